"""Command: submits a recipe, or a chain of jobs, to Slurm.

    python -m launch.submit RECIPE --nodes 2 --gpus-per-node 8 --time 24:00:00 [--section.key=value …] [--dry-run]
    python -m launch.submit --chain chain.toml [--dry-run]

Everything that can be checked on a login node is checked before anything is written; torch is not needed. The job's
script goes to stdout, messages go to stderr. A run saves and stops before its time limit or when it is preempted, goes
back into the queue under the same number, and continues from its checkpoint until it is done. docs/cluster.md explains
it step by step; launch/job.py describes the files, launch/chain.py the format of chains.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from data.ground.command import exit_code_of, printable
from data.ground.errors import ConfigError
from data.ground.options import Parser, settings_among
from data.ground.records import read_record
from launch.chain import Made, check_shards, read_chain
from launch.job import VARIABLES, Job, training_job
from launch.options import add_options, given_options, job_options
from launch.record import Submitted, submission, uncommitted
from trainer.config.load import load_recipe


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else list(argv)
    return exit_code_of(lambda: _submit(words))


def _submit(words: Sequence[str]) -> int:
    parser = Parser(
        prog="python -m launch.submit",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("recipe", nargs="?", metavar="RECIPE", help="the recipe of a training run")
    parser.add_argument("--chain", type=Path, metavar="FILE", help="a chain of jobs, in place of a recipe")
    parser.add_argument("--dry-run", action="store_true", help="print the script and write, submit nothing")
    parser.add_argument("--resume", action="store_true", help="continue a run that has begun, or a chain")
    parser.add_argument("--after", metavar="JOB", help="number of a job that must succeed before this one starts")
    add_options(parser)
    args, rest = parser.parse_known_args(words)
    settings = settings_among(rest)
    if (args.recipe is None) == (args.chain is None):
        raise ConfigError("give either a recipe or --chain FILE")
    if args.after is not None and not _NUMBER.fullmatch(args.after):
        raise ConfigError(f"--after {args.after} is no number of a job")
    chdir, given = Path.cwd(), given_options(args)
    if args.chain is not None:
        if settings:
            key = settings[0].partition("=")[0]  # without its value, which may be a secret of a misspelt option
            raise ConfigError(f"--{key} is a recipe's setting; write it into settings of a stage of {args.chain}")
        jobs = read_chain(args.chain, given, resume=args.resume, waits=args.after is not None, chdir=chdir)
    else:
        recipe = load_recipe(args.recipe, settings)
        options = job_options(given, where="command line", own=given)
        if args.after is None:
            check_shards(recipe, Made(), where=args.recipe)
        jobs = [training_job(recipe, options, where=args.recipe, resume=args.resume, chdir=chdir)]
    twice = next((job.folder for job in jobs if [each.folder for each in jobs].count(job.folder) > 1), None)
    if twice is not None:
        raise ConfigError(f"two stages train into {twice.parent.parent}; give each a run.output of its own")
    if not jobs:
        print("every stage is done", file=sys.stderr)
        return 0
    for job in jobs:
        _check_script(job)
    if args.dry_run:
        for job in jobs:
            _announce(job)
            print(job.script, flush=True)
        return 0
    if shutil.which("sbatch") is None:
        raise ConfigError("sbatch is not here; run this on a login node of a Slurm cluster, or with --dry-run")
    for job in jobs:
        _refuse_if_queued(job)
    submit_all(jobs, after=args.after, argv=["python", "-m", "launch.submit", *words], chdir=chdir)
    return 0


_NUMBER = re.compile("[0-9]{1,18}")


def _announce(job: Job) -> None:
    print(f"# {printable(f'{job.name}: {job.folder}/job.sbatch')}", file=sys.stderr, flush=True)


def _check_script(job: Job) -> None:
    """Let bash parse the script, which contains the user's shell lines, before it reaches a compute node."""
    bash = shutil.which("bash")
    if bash is None:
        return
    done = subprocess.run([bash, "-n"], input=job.script, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()[:1]
        raise ConfigError(
            f"bash cannot read the script of {job.name} ({' '.join(said)}); fix --setup, --container or --venv"
        )


def _refuse_if_queued(job: Job) -> None:
    """Refuse a job if an earlier job of its folder is still queued: two jobs must not train into one folder."""
    hint = "check with squeue --me that no job of this folder is in the queue, then remove the file"
    for record in sorted(job.folder.parent.glob("*/environment.json")):
        number = read_record(record, Submitted, what="record", hint=hint).job
        if number is None:  # the run's own file
            continue
        listed = subprocess.run(["squeue", "--noheader", "--jobs", number], capture_output=True, text=True, check=False)
        # Of a job that Slurm has forgotten, squeue says that its number is invalid.
        if listed.returncode != 0 and "Invalid job id" not in listed.stderr:
            why = listed.stderr.strip() or f"exit code {listed.returncode}"
            raise ConfigError(
                f"squeue does not say whether job {number} of {record.parent} is still in the queue ({why}); try again"
            )
        if listed.returncode == 0 and listed.stdout.strip():
            raise ConfigError(
                f"job {number} of {record.parent} is still in the queue; wait for it, or scancel {number}"
            )


def submit_all(jobs: Sequence[Job], *, after: str | None, argv: Sequence[str], chdir: Path) -> list[str]:
    """Write and submit all jobs, each to start after the previous one, or none. Returns Slurm's job numbers."""
    numbers: list[str] = []
    written: list[_Written] = []
    first_after = after
    try:
        patch = uncommitted(chdir)
        for job in jobs:
            files = {path: text.encode() for path, text in job.files.items()}
            files[job.folder / "job.sbatch"] = job.script.encode()
            files[job.folder / VARIABLES] = job.variables.encode(errors="surrogateescape")
            files[job.folder / "uncommitted.diff"] = patch
            for path, content in files.items():
                if content:
                    _write(path, content, written, private=path.parent == job.folder)
                elif path.exists():  # a chain's stage that is submitted again has its folder again
                    written.append(_Written(path, path.read_bytes()))
                    path.unlink()
            after = _sbatch(job, after)
            numbers.append(after)
            record = submission(after, job.options, argv=argv, folder=chdir)
            text = json.dumps(record.model_dump(mode="json"), indent=2) + "\n"
            _write(job.folder / "environment.json", text.encode(), written, private=True)
    except BaseException as error:
        # Cancel the earlier stages of a chain if Slurm refuses a later one: they would train for days in vain.
        if numbers:
            subprocess.run(["scancel", *numbers], check=False)
        for each in reversed(written):
            with contextlib.suppress(OSError):  # Slurm may have begun a log there
                each.undo()
        if isinstance(error, OSError) and error.filename is not None:
            raise ConfigError(
                f"{os.fsdecode(error.filename)} cannot be written ({error.strerror}); choose a writable folder"
            ) from None
        raise
    for job, number, before in zip(jobs, numbers, [first_after, *numbers]):
        _announce(job)
        print(job.script, flush=True)
        waits = f", after job {before}" if before else ""
        print(f"# submitted as job {number}{waits}", file=sys.stderr, flush=True)
    return numbers


@dataclass(frozen=True)
class _Written:
    """A file or folder that was written or removed. before: a file's earlier content; None: there was nothing."""

    path: Path
    before: bytes | None = None
    private: bool = True

    def undo(self) -> None:
        if self.before is not None:
            _replace(self.path, self.before, private=self.private)
        elif self.path.is_dir():
            self.path.rmdir()
        else:
            self.path.unlink()


def _write(path: Path, content: bytes, written: list[_Written], *, private: bool) -> None:
    """Write a file atomically, and note in `written` what was there. private: only the owner may read it."""
    missing = [folder for folder in reversed(path.parents) if not folder.exists()]
    for folder in missing:
        folder.mkdir()
        written.append(_Written(folder))
    before = path.read_bytes() if path.exists() else None
    _replace(path, content, private=private)
    written.append(_Written(path, before, private))


def _replace(path: Path, content: bytes, *, private: bool) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.unlink(missing_ok=True)
        with os.fdopen(
            os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o666), "wb"
        ) as file:
            file.write(content)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error


def _sbatch(job: Job, after: str | None) -> str:
    waiting = [f"--dependency=afterok:{after}", "--kill-on-invalid-dep=yes"] if after else []
    command = ["sbatch", "--parsable", *waiting, *_directives(job.script), str(job.folder / "job.sbatch")]
    done = subprocess.run(command, env=_environment(), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ConfigError(f"Slurm refused {job.name}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    # Some sites' sbatch prints a greeting first; a cluster's name may follow the number.
    number = done.stdout.strip().rpartition("\n")[2].split(";")[0]
    if not _NUMBER.fullmatch(number):
        raise ConfigError(f"sbatch printed {done.stdout.strip()!r} in place of a job's number; check with squeue --me")
    return number


def _environment() -> dict[str, str]:
    """The environment of a job: this process's variables, without those of a Slurm job in which it runs itself."""
    inside = "SLURM_JOB_ID" in os.environ
    return {
        name: value
        for name, value in os.environ.items()
        if not (inside and name.startswith(("SLURM_", "SRUN_"))) or name == "SLURM_CONF"
    }


def _directives(script: str) -> list[str]:
    """The options of a script's #SBATCH lines.

    sbatch gets them as arguments, too, because variables such as SBATCH_ACCOUNT override the lines of a script.
    """
    prefix = "#SBATCH "
    head = takewhile(lambda line: line.startswith("#"), script.split("\n"))
    return [word for line in head if line.startswith(prefix) for word in shlex.split(line.removeprefix(prefix))]


if __name__ == "__main__":
    sys.exit(main())

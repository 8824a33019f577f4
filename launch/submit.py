"""Command: a recipe, or a chain of jobs, to Slurm.

    python -m launch.submit RECIPE --nodes 2 --gpus-per-node 8 --time 24:00:00 [--section.key=value …] [--dry-run]
    python -m launch.submit --chain chain.toml [--dry-run]

Everything that can be checked on a login node is, before anything is written: torch is not needed here. The job's
script goes to stdout, what happens to it to stderr. A run saves and stops ahead of its time limit or when it is
preempted, goes back into the queue under the same number, and goes on from its checkpoint until it is done.
docs/cluster.md walks through it; launch/job.py says what is written where, launch/chain.py what a chain looks like.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from data.command import exit_code_of
from launch.chain import Made, check_shards, read_chain
from launch.job import Job, training_job
from launch.options import add_options, given_options, job_options
from launch.record import environment_record, uncommitted
from trainer.config import ConfigError, load_recipe


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else list(argv)
    return exit_code_of(lambda: _submit(words))


def _submit(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m launch.submit",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("recipe", nargs="?", metavar="RECIPE", help="the recipe of a training run")
    parser.add_argument("--chain", type=Path, metavar="FILE", help="a chain of jobs, in place of a recipe")
    parser.add_argument("--dry-run", action="store_true", help="print the script and write, submit nothing")
    parser.add_argument("--resume", action="store_true", help="go on with a run that has begun, or a chain")
    parser.add_argument("--after", metavar="JOB", help="number of a job that must end well before this one starts")
    add_options(parser)
    args, rest = parser.parse_known_args(words)
    strange = next((word for word in rest if not (word.startswith("--") and "=" in word and "." in word)), None)
    if strange is not None:
        raise ConfigError(f"{strange!r} is not understood; settings of a recipe are given as --section.key=value")
    if (args.recipe is None) == (args.chain is None):
        raise ConfigError("give either a recipe or --chain FILE")
    if args.after is not None and not args.after.isdigit():
        raise ConfigError(f"--after {args.after} is no number of a job")
    chdir, given = Path.cwd(), given_options(args)
    if args.chain is not None:
        if rest:
            raise ConfigError(f"{rest[0]} is a recipe's setting; write it into settings of a stage of {args.chain}")
        jobs = read_chain(args.chain, given, resume=args.resume, chdir=chdir)
    else:
        recipe = load_recipe(args.recipe, [word.removeprefix("--") for word in rest])
        options = job_options(given, where="command line")
        if args.after is None:
            check_shards(recipe, Made(), where=args.recipe)
        jobs = [training_job(recipe, options, where=args.recipe, resume=args.resume, chdir=chdir)]
    twice = next((job.folder for job in jobs if [each.folder for each in jobs].count(job.folder) > 1), None)
    if twice is not None:
        raise ConfigError(f"two stages train into {twice.parent.parent}; give each a run.output of its own")
    if not jobs:
        print("every stage is done", file=sys.stderr)
        return 0
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


def _announce(job: Job) -> None:
    print(f"# {job.name}: {job.folder / 'job.sbatch'}", file=sys.stderr, flush=True)


def _refuse_if_queued(job: Job) -> None:
    """Two jobs must not train into one folder."""
    for record in sorted(job.folder.parent.glob("*/environment.json")):
        number = json.loads(record.read_text(encoding="utf-8")).get("job")
        if number is None:
            continue
        listed = subprocess.run(["squeue", "--noheader", "--jobs", number], capture_output=True, text=True, check=False)
        if listed.returncode == 0 and listed.stdout.strip():
            raise ConfigError(
                f"job {number} of {record.parent} is still in the queue; wait for it, or scancel {number}"
            )


def submit_all(jobs: Sequence[Job], *, after: str | None, argv: Sequence[str], chdir: Path) -> list[str]:
    """Write and submit every job, each after the one before it; all or none. Returns Slurm's numbers."""
    numbers: list[str] = []
    written: list[Path] = []
    patch = uncommitted(chdir)
    try:
        for job in jobs:
            record = environment_record(job.options, argv=argv, folder=chdir)
            files = {**job.files, job.folder / "job.sbatch": job.script}
            if patch:
                files[job.folder / "uncommitted.diff"] = patch
            for path, text in files.items():
                _write(path, text, written)
            number = _sbatch(job, after)
            numbers.append(number)
            _write(job.folder / "environment.json", json.dumps({"job": number, **record}, indent=2) + "\n", written)
            _announce(job)
            print(job.script, flush=True)
            print(
                f"# submitted as job {number}" + (f", after job {after}" if after else ""), file=sys.stderr, flush=True
            )
            after = number
    except (ConfigError, OSError) as error:
        # A chain whose later stages Slurm refuses would train for days and go nowhere.
        if numbers:
            subprocess.run(["scancel", *numbers], check=False)
        for path in reversed(written):
            path.rmdir() if path.is_dir() else path.unlink()
        if isinstance(error, OSError):
            raise ConfigError(
                f"{error.filename} cannot be written ({error.strerror}); choose a writable folder"
            ) from None
        raise
    return numbers


def _write(path: Path, text: str, written: list[Path]) -> None:
    """Whole or not at all; `written` remembers what is new, folders too."""
    missing = [folder for folder in reversed(path.parents) if not folder.exists()]
    for folder in missing:
        folder.mkdir()
        written.append(folder)
    new = not path.exists()
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
    if new:
        written.append(path)


def _sbatch(job: Job, after: str | None) -> str:
    waiting = [f"--dependency=afterok:{after}", "--kill-on-invalid-dep=yes"] if after else []
    command = ["sbatch", "--parsable", *waiting, str(job.folder / "job.sbatch")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ConfigError(f"Slurm refused {job.name}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout.strip().split(";")[0]


if __name__ == "__main__":
    sys.exit(main())

"""Jobs: from a recipe, prepare commands or an evaluation, and options, to the exact script that Slurm gets.

Scripts are made from the templates in launch/slurm by putting values in the places of @@NAMES@@; nothing else of a
template changes. A training run's jobs live in the run's own folder:

    <run>/recipe.toml            the resolved recipe, so that the trainer knows the folder as this run's
          job/001/recipe.toml    as submitted the first time, second time, …: what the job reads
                  environment.json, job.sbatch, uncommitted.diff
                  variables.sh         what --env says, for the script to read
                  slurm-<job>.log, logs/attempt-000/rank-00000.log …

Later edits of the recipe in the repository do not reach a job in the queue; later edits of the code do. What a
submission writes into a job's folder only its owner may read: what was not committed, and the values of variables, are
private.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from data.ground.errors import ConfigError
from data.ground.files import is_unicode
from data.ground.secrets import HIDDEN, variables_of, without_secrets
from launch.options import JobOptions
from trainer.config.checks import check_world
from trainer.config.load import as_tables, as_toml
from trainer.config.schema import Recipe
from trainer.resilience.run_lock import is_begun

TEMPLATES = Path(__file__).resolve().parent / "slurm"
VARIABLES = "variables.sh"
_LONGEST_NAME = 255
_PLACE = re.compile(r"@@([A-Z_]+)@@")


@dataclass(frozen=True)
class Job:
    """One submission: its script, where it and its record are kept, and what Slurm calls it."""

    name: str
    folder: Path
    script: str
    files: Mapping[Path, str] = dataclasses.field(default_factory=dict)  # beside the script, written first
    options: JobOptions = dataclasses.field(default_factory=JobOptions)

    @property
    def variables(self) -> str:
        """The shell's lines of the file that the script reads its variables from; empty where there are none."""
        return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in self.options.variables.items())


def training_job(recipe: Recipe, options: JobOptions, *, where: str, resume: bool, chdir: Path) -> Job:
    """A job that pre-trains or fine-tunes; refuses what could not train."""
    check_world(recipe, options.nodes * options.ranks)
    run = Path(recipe.run.output)
    _check_path(recipe.run.output, "run.output")
    _check_secrets(recipe, options)
    if not (chdir / recipe.engine.ds_config).is_file():
        raise ConfigError(
            f"engine.ds_config {recipe.engine.ds_config} does not exist; the shipped ones are ds_configs/*"
        )
    trained = any((run / part).exists() for part in ("checkpoints", "metrics.jsonl"))
    if run.exists() and not run.is_dir():
        raise ConfigError(f"run.output {run} is a file; name a folder")
    foreign = run.is_dir() and any(not is_begun(path.name) for path in run.iterdir())
    if foreign and not (run / "recipe.toml").is_file():
        raise ConfigError(f"run.output {run} holds files that are no run of ours; name another folder")
    if (run / "DONE").exists():
        raise ConfigError(f"run.output {run} holds a run that is done; name another folder")
    if trained and not resume:
        raise ConfigError(f"run.output {run} holds another run; go on with it by --resume, or name another folder")
    names = [path.name for path in (run / "job").glob("[0-9]*")]
    number = 1 + max((int(name) for name in names if re.fullmatch("[0-9]{1,9}", name)), default=0)
    folder = run / "job" / f"{number:03d}"
    task = recipe.kind.command
    resolved = dataclasses.replace(recipe, run=dataclasses.replace(recipe.run, resume="auto"))
    script = fill(
        f"{task}.sbatch",
        DIRECTIVES=directives(options, name=run.name, log=folder / "slurm-%j.log", chdir=chdir),
        SIGNAL_SECONDS=str(options.signal_seconds),
        PRELUDE=prelude(options, folder),
        RUN=quoted(run),
        JOB=quoted(folder),
        RANKS=str(options.ranks),
        MAX_REQUEUES=str(options.max_requeues),
        CRASH_REQUEUES=str(options.crash_requeues),
        CONTAINER=_container(options),
        ATTEMPT=(TEMPLATES / "attempt.sh").read_text(encoding="utf-8").rstrip("\n"),
    )
    files = {folder / "recipe.toml": as_toml(resolved)}
    if not trained:
        files[run / "recipe.toml"] = as_toml(resolved)
    return Job(name=f"{task} {where}", folder=folder, script=script, files=files, options=options)


def prepare_job(commands: Sequence[Sequence[str]], options: JobOptions, *, folder: Path, chdir: Path) -> Job:
    """An array of `data.prepare` commands, one a task, each on one node."""
    options = dataclasses.replace(options, nodes=1)
    _check_path(str(folder), "output")
    cases = "\n".join(
        f"    {index}) command=({_container(options)}python -m data.prepare {shlex.join(command)}) ;;"
        for index, command in enumerate(commands)
    )
    limit = f"%{options.array_limit}" if options.array_limit else ""
    script = fill(
        "prepare_array.sbatch",
        DIRECTIVES=directives(options, name=folder.name, log=folder / "slurm-%A-%a.log", chdir=chdir),
        ARRAY=f"0-{len(commands) - 1}{limit}",
        PRELUDE=prelude(options, folder),
        CASES=cases,
    )
    return Job(name=f"prepare, {len(commands)} tasks", folder=folder, script=script, options=options)


def evaluate_job(commands: Sequence[Sequence[str]], options: JobOptions, *, folder: Path, chdir: Path) -> Job:
    """`trainer.evaluate` and `trainer.export` commands, one after the other, on one node."""
    options = dataclasses.replace(options, nodes=1)
    _check_path(str(folder), "output")
    script = fill(
        "evaluate.sbatch",
        DIRECTIVES=directives(options, name=folder.name, log=folder / "slurm-%j.log", chdir=chdir),
        PRELUDE=prelude(options, folder),
        COMMANDS="\n".join(f"srun --ntasks=1 {_container(options)}python -m {shlex.join(each)}" for each in commands),
    )
    return Job(name="evaluate", folder=folder, script=script, options=options)


def fill(template: str, **values: str) -> str:
    """A template with every @@NAME@@ replaced. A place without a value, or the reverse, is our mistake."""
    text = (TEMPLATES / template).read_text(encoding="utf-8")
    assert set(_PLACE.findall(text)) == set(values), (template, set(_PLACE.findall(text)) ^ set(values))
    filled = _PLACE.sub(lambda place: values[place[1]], text)
    if "\0" in filled or not is_unicode(filled):
        raise ConfigError("a name in the job's script holds a zero byte, or is not UTF-8; choose another name")
    return filled


def directives(options: JobOptions, *, name: str, log: Path, chdir: Path) -> str:
    """#SBATCH lines of what was asked for; Slurm's defaults stand for the rest."""
    if not str(chdir).isprintable():
        raise ConfigError(f"the working folder {str(chdir)!r} holds a line break or a sign of no script; rename it")
    chosen = [f"--job-name={name}", f"--nodes={options.nodes}"]
    if options.gpus_per_node:
        chosen.append(f"--gpus-per-node={options.gpus_per_node}")
    for key in ("partition", "account", "qos", "constraint", "time", "mem"):
        if value := getattr(options, key):
            chosen.append(f"--{key}={value}")
    if options.cpus_per_task:
        chosen.append(f"--cpus-per-task={options.cpus_per_task}")
    chosen += [f"--chdir={chdir}", f"--output={log}"]
    return "\n".join(f"#SBATCH {quoted(each)}" for each in chosen) + "".join(
        f"\n#SBATCH {each}" for each in options.sbatch
    )


def prelude(options: JobOptions, folder: Path) -> str:
    """Shell lines that make the job's environment. `folder`: the job's."""
    lines = [f"module load {name}" for name in options.module]
    if options.venv:
        lines.append(f"source {quoted(Path(options.venv) / 'bin' / 'activate')}")
    lines += options.setup
    if options.variables:
        lines.append(f"source {quoted(folder / VARIABLES)}  # sets {', '.join(options.variables)}")
    if not options.gpus_per_node:
        # Said, so that DeepSpeed does not have to guess.
        lines.append("export DS_ACCELERATOR=cpu")
    return "\n".join(lines)


def quoted(value: object) -> str:
    return shlex.quote(str(value))


def _container(options: JobOptions) -> str:
    return f"{options.container} " if options.container else ""


def _check_path(path: str, key: str) -> None:
    """A per cent sign in the name of a log is Slurm's; a line break would end a directive."""
    if re.search(r"[%'\"\\]", path) or not path.isprintable():
        raise ConfigError(f"{key} {path!r} holds a sign that Slurm's scripts give a meaning to; use a plain name")
    if path.startswith("-"):
        raise ConfigError(f"{key} {path!r} begins with a dash, as options do; choose another name")
    if any(len(part.encode()) > _LONGEST_NAME for part in Path(path).parts):
        raise ConfigError(f"{key} {path!r} is too long; choose a name of at most {_LONGEST_NAME} letters")


def _check_secrets(recipe: Recipe, options: JobOptions) -> None:
    """The job reads its recipe from a file, which holds no secrets but may name variables."""
    if as_tables(recipe) != dataclasses.asdict(recipe):
        shown = next((each for each in map(without_secrets, recipe.data.shards) if HIDDEN in each), "an address")
        raise ConfigError(
            f"the recipe's {shown} holds a password, and a job's recipe is a file; name a variable in its place, as in "
            "https://user:${BARISTA_PASSWORD}@…, and give it by --env BARISTA_PASSWORD"
        )
    for name in (name for folder in recipe.data.shards for name in variables_of(folder)):
        if name not in options.variables:
            raise ConfigError(f"data.shards names the variable {name}; export it here, and give it by --env {name}")

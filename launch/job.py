"""Jobs: the exact script that Slurm gets, from options and a recipe, prepare commands or an evaluation.

Scripts are made from the templates in launch/slurm by replacing @@NAMES@@ with values; nothing else in a template
changes. The jobs of a training run are stored in the run's folder:

    <run>/recipe.toml            the resolved recipe, by which the trainer recognises the folder as this run's
          job/001/recipe.toml    the recipe that the job reads, as submitted (002 the second time, …)
                  environment.json, job.sbatch, uncommitted.diff
                  variables.sh         the variables of --env, which the script reads
                  slurm-<job>.log, logs/attempt-000/rank-00000.log …

Later edits of the recipe in the repository do not reach a job in the queue; later edits of the code do. Only the owner
may read the files that a submission writes into a job's folder, because uncommitted changes and the values of variables
are private.
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
from trainer.monitoring.lines import FILE as METRICS_FILE
from trainer.resilience.run_lock import is_begun

TEMPLATES = Path(__file__).resolve().parent / "slurm"
VARIABLES = "variables.sh"
_LONGEST_NAME = 255
_PLACE = re.compile(r"@@([A-Z_]+)@@")
_NAME_A_VARIABLE = (
    "name a variable in its place, as in https://user:${BARISTA_PASSWORD}@…, and give it by --env BARISTA_PASSWORD"
)


@dataclass(frozen=True)
class Job:
    """One submission: its name in Slurm, the folder of its files, its script and its options."""

    name: str
    folder: Path
    script: str
    files: Mapping[Path, str] = dataclasses.field(default_factory=dict)  # beside the script, written first
    options: JobOptions = dataclasses.field(default_factory=JobOptions)

    @property
    def variables(self) -> str:
        """The content of the file from which the script reads its variables; empty if there are none."""
        return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in self.options.variables.items())


def training_job(recipe: Recipe, options: JobOptions, *, where: str, resume: bool, chdir: Path) -> Job:
    """A job that pre-trains or fine-tunes; refuses a recipe that could not train."""
    check_world(recipe, options.nodes * options.ranks)
    run = Path(recipe.run.output)
    _check_path(recipe.run.output, "run.output")
    _check_secrets(recipe, options)
    if not (chdir / recipe.engine.ds_config).is_file():
        raise ConfigError(
            f"engine.ds_config {recipe.engine.ds_config} does not exist; the shipped ones are ds_configs/*"
        )
    trained = any((run / part).exists() for part in ("checkpoints", METRICS_FILE))
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
        "train.sbatch",
        DIRECTIVES=directives(options, name=run.name, log=folder / "slurm-%j.log", chdir=chdir),
        SIGNAL_SECONDS=str(options.signal_seconds),
        PRELUDE=prelude(options, folder),
        RUN=quoted(run),
        JOB=quoted(folder),
        RANKS=str(options.ranks),
        CONTAINED="yes" if options.container else "no",
        MAX_REQUEUES=str(options.max_requeues),
        CRASH_REQUEUES=str(options.crash_requeues),
        CONTAINER=_container(options),
        COMMAND=task,
        ATTEMPT=(TEMPLATES / "attempt.sh").read_text(encoding="utf-8").rstrip("\n"),
    )
    files = {folder / "recipe.toml": as_toml(resolved)}
    if not trained:
        files[run / "recipe.toml"] = as_toml(resolved)
    return Job(name=f"{task} {where}", folder=folder, script=script, files=files, options=options)


def prepare_job(
    commands: Sequence[Sequence[str]], options: JobOptions, *, where: str, folder: Path, chdir: Path
) -> Job:
    """A job array of `data.prepare` commands, one for each task, each on one node."""
    options = dataclasses.replace(options, nodes=1)
    _check_path(str(folder), "output")
    _check_words(commands, options, where)
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


def evaluate_job(
    commands: Sequence[Sequence[str]], options: JobOptions, *, where: str, folder: Path, chdir: Path
) -> Job:
    """`trainer.evaluate` and `trainer.export` commands, one after the other, on one node."""
    options = dataclasses.replace(options, nodes=1)
    _check_path(str(folder), "output")
    _check_words(commands, options, where)
    script = fill(
        "evaluate.sbatch",
        DIRECTIVES=directives(options, name=folder.name, log=folder / "slurm-%j.log", chdir=chdir),
        PRELUDE=prelude(options, folder),
        COMMANDS="\n".join(f"srun --ntasks=1 {_container(options)}python -m {shlex.join(each)}" for each in commands),
    )
    return Job(name="evaluate", folder=folder, script=script, options=options)


def fill(template: str, **values: str) -> str:
    """A template with every @@NAME@@ replaced. Names and values must match exactly; a mismatch is a bug."""
    text = (TEMPLATES / template).read_text(encoding="utf-8")
    assert set(_PLACE.findall(text)) == set(values), (template, set(_PLACE.findall(text)) ^ set(values))
    filled = _PLACE.sub(lambda place: values[place[1]], text)
    if "\0" in filled or not is_unicode(filled):
        raise ConfigError("a name in the job's script holds a zero byte, or is not UTF-8; choose another name")
    return filled


def directives(options: JobOptions, *, name: str, log: Path, chdir: Path) -> str:
    """The #SBATCH lines for the given options; Slurm's defaults apply to all others."""
    if not str(chdir).isprintable():
        raise ConfigError(f"the working folder {str(chdir)!r} holds a line break or another control sign; rename it")
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
    """The shell lines that set up the job's environment. `folder`: the job's folder."""
    lines = ["unset SLURM_EXPORT_ENV  # with which srun would pass on none of these variables, after --export=NONE"]
    lines += [f"module load {name}" for name in options.module]
    if options.venv:
        lines.append(f"source {quoted(Path(options.venv) / 'bin' / 'activate')}")
    lines += options.setup
    if options.variables:
        lines.append(f"source {quoted(folder / VARIABLES)}  # sets {', '.join(options.variables)}")
    if not options.gpus_per_node:
        # Without this, DeepSpeed would guess the accelerator.
        lines.append("export DS_ACCELERATOR=cpu")
    return "\n".join(lines)


def quoted(value: object) -> str:
    return shlex.quote(str(value))


def _container(options: JobOptions) -> str:
    return f"{options.container} " if options.container else ""


def _check_path(path: str, key: str) -> None:
    """Refuse names that Slurm would change: it replaces % in log names, and a line break would end a directive."""
    if re.search(r"[%'\"\\]", path) or not path.isprintable():
        raise ConfigError(f"{key} {path!r} holds a sign that has a meaning in Slurm's scripts; use a plain name")
    if path.startswith("-"):
        raise ConfigError(f"{key} {path!r} begins with a dash, as options do; choose another name")
    if any(len(part.encode()) > _LONGEST_NAME for part in Path(path).parts):
        raise ConfigError(f"{key} {path!r} is too long; choose a name of at most {_LONGEST_NAME} letters")


def _check_secrets(recipe: Recipe, options: JobOptions) -> None:
    """Refuse secrets in the recipe: the job reads it from a file, which may name variables instead."""
    if as_tables(recipe) != dataclasses.asdict(recipe):
        shown = next((each for each in map(without_secrets, recipe.data.shards) if HIDDEN in each), "an address")
        raise ConfigError(f"the recipe's {shown} holds a password, and a job's recipe is a file; {_NAME_A_VARIABLE}")
    _check_variables(recipe.data.shards, options, "data.shards")


def _check_words(commands: Sequence[Sequence[str]], options: JobOptions, where: str) -> None:
    """Refuse secrets in commands: the script, which is printed and stored, has them as they are."""
    words = [word for command in commands for word in command if "://" in word]
    for word in words:
        if (shown := without_secrets(word)) != word:
            raise ConfigError(f"{where}: {shown} holds a password, and a job's script is a file; {_NAME_A_VARIABLE}")
    _check_variables(words, options, where)


def _check_variables(addresses: Sequence[str], options: JobOptions, where: str) -> None:
    """Refuse addresses that name variables which the job will not have."""
    for name in (name for address in addresses for name in variables_of(address)):
        if name not in options.variables:
            raise ConfigError(f"{where} names the variable {name}; export it here, and give it by --env {name}")

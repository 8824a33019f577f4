"""Jobs: from a recipe, prepare commands or an evaluation, and options, to the exact script that Slurm gets.

Scripts are made from the templates in launch/slurm by putting values in the places of @@NAMES@@; nothing else of a
template changes. A training run's jobs live in the run's own folder:

    <run>/recipe.toml            the resolved recipe, so that the trainer knows the folder as this run's
          job/001/recipe.toml    as submitted the first time, second time, …: what the job reads
                  environment.json, job.sbatch, uncommitted.diff
                  slurm-<job>.log, logs/attempt-000/rank-00000.log …

Later edits of the recipe in the repository do not reach a job in the queue; later edits of the code do.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.options import JobOptions
from trainer.config import BEGUN, ConfigError, Recipe, as_toml, check_world

TEMPLATES = Path(__file__).resolve().parent / "slurm"
_PLACE = re.compile(r"@@([A-Z_]+)@@")


@dataclass(frozen=True)
class Job:
    """One submission: its script, where it and its record are kept, and what Slurm calls it."""

    name: str
    folder: Path
    script: str
    files: Mapping[Path, str] = dataclasses.field(default_factory=dict)  # beside the script, written first
    options: JobOptions = dataclasses.field(default_factory=JobOptions)


def training_job(recipe: Recipe, options: JobOptions, *, where: str, resume: bool, chdir: Path) -> Job:
    """A job that pre-trains or fine-tunes; refuses what could not train."""
    check_world(recipe, options.nodes * options.ranks)
    run = Path(recipe.run.output)
    _check_path(run, "run.output")
    if not (chdir / recipe.engine.ds_config).is_file():
        raise ConfigError(
            f"engine.ds_config {recipe.engine.ds_config} does not exist; the shipped ones are ds_configs/*"
        )
    trained = any((run / part).exists() for part in ("checkpoints", "metrics.jsonl"))
    if run.exists() and not run.is_dir():
        raise ConfigError(f"run.output {run} is a file; name a folder")
    foreign = run.is_dir() and any(path.name not in BEGUN for path in run.iterdir())
    if foreign and not (run / "recipe.toml").is_file():
        raise ConfigError(f"run.output {run} holds files that are no run of ours; name another folder")
    if (run / "DONE").exists():
        raise ConfigError(f"run.output {run} holds a run that is done; name another folder")
    if trained and not resume:
        raise ConfigError(f"run.output {run} holds another run; go on with it by --resume, or name another folder")
    number = 1 + max((int(path.name) for path in (run / "job").glob("[0-9]*") if path.name.isdigit()), default=0)
    folder = run / "job" / f"{number:03d}"
    task = {"masked": "pretrain", "contrastive": "finetune"}[recipe.objective.name]
    resolved = dataclasses.replace(recipe, run=dataclasses.replace(recipe.run, resume="auto"))
    script = fill(
        f"{task}.sbatch",
        DIRECTIVES=directives(options, name=run.name, log=folder / "slurm-%j.log", chdir=chdir),
        SIGNAL_SECONDS=str(options.signal_seconds),
        PRELUDE=prelude(options),
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
    _check_path(folder, "output")
    cases = "\n".join(
        f"    {index}) command=({_container(options)}python -m data.prepare {shlex.join(command)}) ;;"
        for index, command in enumerate(commands)
    )
    limit = f"%{options.array_limit}" if options.array_limit else ""
    script = fill(
        "prepare_array.sbatch",
        DIRECTIVES=directives(options, name=folder.name, log=folder / "slurm-%A-%a.log", chdir=chdir),
        ARRAY=f"0-{len(commands) - 1}{limit}",
        PRELUDE=prelude(options),
        CASES=cases,
    )
    return Job(name=f"prepare, {len(commands)} tasks", folder=folder, script=script, options=options)


def evaluate_job(commands: Sequence[Sequence[str]], options: JobOptions, *, folder: Path, chdir: Path) -> Job:
    """`trainer.evaluate` and `trainer.export` commands, one after the other, on one node."""
    options = dataclasses.replace(options, nodes=1)
    _check_path(folder, "output")
    script = fill(
        "evaluate.sbatch",
        DIRECTIVES=directives(options, name=folder.name, log=folder / "slurm-%j.log", chdir=chdir),
        PRELUDE=prelude(options),
        COMMANDS="\n".join(f"srun --ntasks=1 {_container(options)}python -m {shlex.join(each)}" for each in commands),
    )
    return Job(name="evaluate", folder=folder, script=script, options=options)


def fill(template: str, **values: str) -> str:
    """A template with every @@NAME@@ replaced. A place without a value, or the reverse, is our mistake."""
    text = (TEMPLATES / template).read_text(encoding="utf-8")
    assert set(_PLACE.findall(text)) == set(values), (template, set(_PLACE.findall(text)) ^ set(values))
    return _PLACE.sub(lambda place: values[place[1]], text)


def directives(options: JobOptions, *, name: str, log: Path, chdir: Path) -> str:
    """#SBATCH lines of what was asked for; Slurm's defaults stand for the rest."""
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


def prelude(options: JobOptions) -> str:
    """Shell lines that make the job's environment."""
    lines = [f"module load {name}" for name in options.module]
    if options.venv:
        lines.append(f"source {quoted(Path(options.venv) / 'bin' / 'activate')}")
    lines += options.setup
    for each in options.env:
        name, _, value = each.partition("=")
        lines.append(f"export {name}={shlex.quote(value)}")
    if not options.gpus_per_node:
        # Said, so that DeepSpeed does not have to guess.
        lines.append("export DS_ACCELERATOR=cpu")
    return "\n".join(lines)


def quoted(value: object) -> str:
    return shlex.quote(str(value))


def _container(options: JobOptions) -> str:
    return f"{options.container} " if options.container else ""


def _check_path(path: Path, key: str) -> None:
    """A per cent sign in the name of a log is Slurm's; a line break would end a directive."""
    if re.search(r"[%\n'\"\\]", str(path)):
        raise ConfigError(f"{key} {str(path)!r} holds a sign that Slurm's scripts give a meaning to; use a plain name")

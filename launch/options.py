"""The options of a Slurm job, checked before anything is written.

One dataclass defines both the command line of `launch.submit` and the keys of a chain file: each field is an option
(`--gpus-per-node`) and a key (`gpus_per_node`). A value that becomes part of a `#SBATCH` line is refused if it could
change the meaning of that line.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import shlex
import typing
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data.ground.errors import ConfigError
from data.ground.options import flag_of


def _help(text: str, metavar: str) -> dict[str, str]:
    return {"help": text, "metavar": metavar}


@dataclass(frozen=True)
class JobOptions:
    """Resources, environment and requeue limits of one job. Empty or 0 means the cluster's default."""

    nodes: int = field(default=1, metadata=_help("nodes of the job", "N"))
    gpus_per_node: int = field(default=-1, metadata=_help("GPUs per node, one rank each; 0: a job without GPUs", "G"))
    ranks_per_node: int = field(default=0, metadata=_help("ranks per node of a job without GPUs (default 1)", "N"))
    time: str = field(default="", metadata=_help("time limit in Slurm's form, such as 24:00:00 or 2-12", "TIME"))
    partition: str = field(default="", metadata=_help("partition, or several with commas", "NAME"))
    account: str = field(default="", metadata=_help("account that pays", "NAME"))
    qos: str = field(default="", metadata=_help("quality of service", "NAME"))
    constraint: str = field(default="", metadata=_help("node features, such as 'h100&ib'", "FEATURES"))
    cpus_per_task: int = field(default=0, metadata=_help("CPUs per node, for all its ranks and loader processes", "N"))
    mem: str = field(default="", metadata=_help("memory per node, such as 200G; 0: all of it", "SIZE"))
    venv: str = field(default="", metadata=_help("virtual environment to activate in the job", "FOLDER"))
    module: list[str] = field(
        default_factory=list, metadata=_help("environment module to load; may be repeated", "NAME")
    )
    setup: list[str] = field(
        default_factory=list, metadata=_help("shell line to run at the start of the job; may be repeated", "LINE")
    )
    container: str = field(
        default="",
        metadata=_help("prefix of the ranks' command, such as 'apptainer exec --nv b.sif'", "COMMAND"),
    )
    env: list[str] = field(
        default_factory=list,
        metadata=_help(
            "environment variable of the job, NAME=VALUE, or NAME for its current value here; the value goes into a "
            "file that only you can read; may be repeated",
            "NAME[=VALUE]",
        ),
    )
    sbatch: list[str] = field(
        default_factory=list, metadata=_help("another #SBATCH option, such as --exclusive; may be repeated", "OPTION")
    )
    signal_seconds: int = field(
        default=300, metadata=_help("seconds before the time limit at which a run saves and stops", "SECONDS")
    )
    max_requeues: int = field(default=100, metadata=_help("how often a run may go back into the queue", "N"))
    crash_requeues: int = field(
        default=1, metadata=_help("requeues in a row after crashes without a new checkpoint in between", "N")
    )
    array_limit: int = field(default=0, metadata=_help("tasks of an array that run at the same time; 0: all", "N"))

    @property
    def ranks(self) -> int:
        """Ranks per node."""
        return self.gpus_per_node or self.ranks_per_node or 1

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables of the job: those of `env`; a missing value is taken from this process."""
        matches = [_VARIABLE.fullmatch(each) for each in self.env]
        named = [(match["name"], match["value"]) for match in matches if match is not None]
        return {name: os.environ[name] if value is None else value for name, value in named}


_TYPES = typing.get_type_hints(JobOptions)
_AT_LEAST = {
    "nodes": 1,
    "gpus_per_node": 0,
    "ranks_per_node": 0,
    "cpus_per_task": 0,
    "signal_seconds": 1,
    "max_requeues": 0,
    "crash_requeues": 0,
    "array_limit": 0,
}
# Slurm has 16 bits for a signal's time, and 32 for other numbers; a shell could not compare a number of 65.
_AT_MOST = {name: 2**16 - 1 if name == "signal_seconds" else 2**31 - 1 for name in _AT_LEAST}
# The tasks of a chain's stages that read an option; all of them read the others. A recipe's job is a task "train".
_READ_BY = {
    "nodes": "train",
    "ranks_per_node": "train",
    "signal_seconds": "train",
    "max_requeues": "train",
    "crash_requeues": "train",
    "array_limit": "prepare",
}
# minutes | minutes:seconds | hours:minutes:seconds | days-hours[:minutes[:seconds]]
_TIME = re.compile(
    r"(?:(?P<days>\d{1,9})-(?P<dh>\d{1,9})(?::(?P<dm>\d{1,9})(?::(?P<ds>\d{1,9}))?)?)|(?P<plain>\d{1,9}(?::\d{1,9}){0,2})",
    re.ASCII,
)
_MOST_SECONDS = 10 * 366 * 24 * 3600
_WORD = re.compile(r"[^\s'\"\\#`$;<>]+")
_MEMORY = re.compile(r"\d+[KMGT]?", re.IGNORECASE | re.ASCII)
_VARIABLE = re.compile(r"(?P<name>[A-Za-z_]\w*)(?:=(?P<value>[^\n\0]*))?", re.ASCII)
_LONG_OPTION = re.compile(r"(?P<name>--[a-z][a-z-]*)(?:=.*)?", re.DOTALL)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add every field as an option. Options that are not given are absent from the namespace."""
    for each in dataclasses.fields(JobOptions):
        several = typing.get_origin(_TYPES[each.name]) is list
        parser.add_argument(
            flag_of(each.name),
            type=int if _TYPES[each.name] is int else str,
            action="append" if several else "store",
            default=argparse.SUPPRESS,
            metavar=each.metadata["metavar"],
            help=each.metadata["help"]
            + ("" if each.default in ("", -1, 0) or several else f" (default {each.default})"),
        )


def given_options(namespace: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name, value in vars(namespace).items() if name in _TYPES}


def job_options(values: Mapping[str, Any], *, where: str, task: str = "train", own: Collection[str] = ()) -> JobOptions:
    """Check values and make options of them. `where`: the place of the values, with which error messages begin.

    own: names of values that were given for this one job, of which its task must read each.
    """
    for name, value in values.items():
        if name not in _TYPES:
            raise ConfigError(f"{where}: unknown key {name}; the keys are {', '.join(_TYPES)}")
        wanted: Any = _TYPES[name]
        several = typing.get_origin(wanted) is list
        right = (
            isinstance(value, list) and all(isinstance(each, str) for each in value)
            if several
            else isinstance(value, wanted) and not isinstance(value, bool)
        )
        if not right:
            kind = "a list of texts" if several else {int: "a whole number", str: "a text"}[wanted]
            shown = name if name == "env" else f"{name} = {value!r}"  # values of env may be secret
            raise ConfigError(f"{where}: {shown} must be {kind}")
    for name in own:
        if (reader := _READ_BY.get(name, task)) != task:
            raise ConfigError(
                f"{where}: {name} is read by stages of task {reader!r} alone, and this is {task!r}; leave it out"
            )
    options = JobOptions(**values)
    _check(options, where, lead=options.signal_seconds if task == "train" else 0)
    return options


def refuse_unread(given: Mapping[str, str], *, tasks: Collection[str], chain: Path) -> None:
    """Refuse an option that was given for a whole chain if no stage of the chain reads it.

    given: the option's name -> how the user wrote it. tasks: the tasks of the stages.
    """
    for name, option in given.items():
        if (reader := _READ_BY.get(name)) is not None and reader not in tasks:
            raise ConfigError(
                f"{option} is read by stages of task {reader!r} alone, and {chain} has none; leave it out"
            )


def _check(options: JobOptions, where: str, *, lead: int) -> None:
    """lead: seconds before the time limit at which the job is signalled; 0: it is not."""

    def refuse(name: str, why: str) -> typing.NoReturn:
        raise ConfigError(f"{where}: {_shown(name, getattr(options, name))} {why}")

    if options.gpus_per_node < 0:
        raise ConfigError(f"{where}: --gpus-per-node is not given; give the GPUs a node, or 0 for a job without GPUs")
    for name, least in _AT_LEAST.items():
        if getattr(options, name) < least:
            refuse(name, f"is too small; it must be at least {least}")
    for name, most in _AT_MOST.items():
        if getattr(options, name) > most:
            refuse(name, f"is too large; it must be at most {most:,}")
    if options.gpus_per_node and options.ranks_per_node not in (0, options.gpus_per_node):
        refuse("ranks_per_node", f"is for jobs without GPUs; {options.gpus_per_node} GPUs have one rank each")
    for name in ("partition", "account", "qos", "constraint"):
        if getattr(options, name) and not _WORD.fullmatch(getattr(options, name)):
            refuse(name, "is no name; it must have neither spaces nor quotes")
    if options.mem and not _MEMORY.fullmatch(options.mem):
        refuse("mem", "is no size; write it as 64000M or 200G, or 0 for all of a node's")
    if options.time and options.time not in ("UNLIMITED", "INFINITE"):
        seconds = time_limit_seconds(options.time)
        if seconds is None:
            refuse("time", "is no time limit; write minutes, HH:MM:SS, or days-HH:MM:SS")
        if not seconds:
            refuse("time", "is no time to run in; write UNLIMITED for no limit")
        if seconds <= lead:
            refuse(
                "time",
                f"leaves no time before the signal {lead} s ahead of it; give more time, or a smaller --signal-seconds",
            )
        if seconds > _MOST_SECONDS:
            refuse("time", "is more than ten years; write UNLIMITED for no limit")
    for name in ("module", "setup", "sbatch"):
        for each in getattr(options, name):
            if "\n" in each or not each.strip():
                refuse(name, "must be one line each, and not empty")
    for each in options.module:
        if not _WORD.fullmatch(each):
            refuse("module", "must hold names of modules only")
    for number, each in enumerate(options.env, 1):
        match = _VARIABLE.fullmatch(each)
        if match is None:
            # Not shown, because it may be a secret value whose name was forgotten.
            raise ConfigError(f"{where}: --env (number {number}) is not of the form NAME=VALUE, or NAME, on one line")
        if match["value"] is None and match["name"] not in os.environ:
            raise ConfigError(f"{where}: --env {each} has no value, and {each} is not set here; export it, or give one")
    for each in options.sbatch:
        _check_sbatch(each, where)
    if options.venv and not (Path(options.venv) / "bin" / "activate").is_file():
        refuse("venv", "holds no bin/activate; name a virtual environment's folder")
    if "\n" in options.container:
        refuse("container", "must be one line")
    if _words(options.container) is None:
        refuse("container", "leaves a quote open; close it")


def _check_sbatch(text: str, where: str) -> None:
    """Check one #SBATCH line: every word must be a long option, and none may be one that the script sets itself."""
    words = _words(text)
    if words is None:
        raise ConfigError(f"{where}: --sbatch {text!r} leaves a quote open; close it")
    for word in words:
        match = _LONG_OPTION.fullmatch(word)
        if match is None:
            raise ConfigError(
                f"{where}: --sbatch {text!r}: {word!r} is no long option of sbatch; write each as --sbatch=--exclusive "
                "or --sbatch=--name=value"
            )
        # Slurm accepts abbreviated option names.
        clash = next((name for name in _OURS if name.startswith(match["name"])), None)
        if clash:
            raise ConfigError(f"{where}: --sbatch {text!r} is set by this command itself; leave {clash} out")
        own = next((name for name in _OWN if name.startswith(match["name"]) and match["name"] != "--gpus"), None)
        if own:
            raise ConfigError(f"{where}: --sbatch {text!r} is an option of this command; give it as {own}")


def _words(text: str) -> list[str] | None:
    """A line's words, separated as in a shell; None if a quote is left open."""
    try:
        return shlex.split(text)
    except ValueError:
        return None


_OURS = (
    "--nodes",
    "--ntasks",
    "--ntasks-per-node",
    "--tasks-per-node",
    "--array",
    "--signal",
    "--requeue",
    "--no-requeue",
    "--open-mode",
    "--output",
    "--job-name",
    "--dependency",
    "--chdir",
)
# They are checked, and ranks are counted by them.
_OWN = (
    "--partition",
    "--account",
    "--qos",
    "--constraint",
    "--time",
    "--mem",
    "--gpus-per-node",
    "--cpus-per-task",
)


def _shown(name: str, value: object) -> str:
    return f"{flag_of(name)} {', '.join(value) if isinstance(value, list) else value}"


def time_limit_seconds(text: str) -> int | None:
    """Seconds of a time limit in Slurm's notation; None if the text is no time limit."""
    match = _TIME.fullmatch(text)
    if match is None:
        return None
    if match["days"] is not None:
        days, hours, minutes, seconds = (int(match[name] or 0) for name in ("days", "dh", "dm", "ds"))
        return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    parts = [int(part) for part in match["plain"].split(":")]
    if len(parts) == 3:
        return (parts[0] * 60 + parts[1]) * 60 + parts[2]
    return parts[0] * 60 + (parts[1] if len(parts) == 2 else 0)

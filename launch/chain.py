"""Chains: several jobs in one file, each started when the previous one has ended successfully.

    output = "runs/fineweb_chain"              # for records and logs of stages other than training

    [options]                                  # options of launch.submit for every stage
    partition = "gpu"
    venv = ".venv"

    [[stages]]
    task = "prepare"                           # a job array, one task for each command of data.prepare
    options = { gpus_per_node = 0, cpus_per_task = 16, time = "4:00:00" }
    [[stages.corpora]]
    kind = "documents"
    inputs = ["fineweb/sample/10BT/*.parquet"]
    output = "shards/fineweb-10bt"
    parts = 15                                 # the files are divided among folders part-000, part-001, …
    arguments = ["--tokenizer", "google-bert/bert-base-uncased"]

    [[stages]]
    task = "train"
    recipe = "launch/recipes/smae_bert_base_fineweb.toml"
    settings = ["train.steps=100000"]
    options = { nodes = 2, gpus_per_node = 8, time = "24:00:00" }

    [[stages]]
    task = "evaluate"                          # evaluates the model of the previous training stage
    options = { gpus_per_node = 1 }
    arguments = ["--beir", "beir/scifact"]
    export = "export"

If a recipe names a folder that an earlier stage writes in parts, the parts replace the folder.
"""

from __future__ import annotations

import dataclasses
import glob
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data.ground.errors import ConfigError
from data.ground.options import flag_of
from launch.job import Job, evaluate_job, prepare_job, training_job
from launch.options import job_options, refuse_unread
from trainer.config.load import load_recipe, parse_toml
from trainer.config.schema import Recipe

_STAGE_KEYS: dict[str, dict[str, type]] = {
    "prepare": {"corpora": list},
    "train": {"recipe": str, "settings": list},
    "evaluate": {"model": str, "arguments": list, "export": str},
}
_CORPUS_KEYS: dict[str, type] = {"kind": str, "inputs": list, "output": str, "parts": int, "arguments": list}
_KINDS = ("documents", "tuples")
_KINDS_OF_VALUES = {str: "a text", list: "a list", int: "a whole number", dict: "a table"}


@dataclass
class Made:
    """The output of the stages so far: folders of shards, by their normalised path, and the last model."""

    shards: dict[str, list[str]] = field(default_factory=dict)
    model: str = ""


def read_chain(path: Path, given: Mapping[str, Any], *, resume: bool, waits: bool, chdir: Path) -> list[Job]:
    """A chain file's jobs, in order, without training that is done.

    `given`: options of the command line. They override the chain's options; a stage's own options override both.
    `waits`: the chain starts after another job, which may write the shards.
    """
    values = parse_toml(path, "chain", hint="launch/chain.py has an example")
    _check_keys(values, {"output": str, "options": dict, "stages": list}, str(path))
    if not values.get("output") or not values.get("stages"):
        raise ConfigError(f"{path}: a chain needs output, a folder for its records, and at least one of [[stages]]")
    output, made, jobs = Path(values["output"]), Made(), []
    for number, stage in enumerate(values["stages"], 1):
        where = f"{path}, stage {number}"
        task = stage.get("task") if isinstance(stage, Mapping) else None
        if not isinstance(task, str) or task not in _STAGE_KEYS:
            raise ConfigError(f"{where}: task = {task!r} is unknown; choose one of {', '.join(_STAGE_KEYS)}")
        _check_keys(stage, {"task": str, "options": dict, **_STAGE_KEYS[task]}, where)
        merged = {**values.get("options", {}), **given, **stage.get("options", {})}
        merged = {"gpus_per_node": 0, **merged} if task == "prepare" else merged
        options = job_options(merged, where=where, task=task, own=stage.get("options", {}))
        folder = output / f"{number:02d}-{task}"
        if task == "prepare":
            commands = [each for corpus in stage.get("corpora", []) for each in _commands(corpus, made, where)]
            if not commands:
                raise ConfigError(f"{where}: nothing to prepare; add [[stages.corpora]]")
            jobs.append(prepare_job(commands, options, where=where, folder=folder, chdir=chdir))
        elif task == "train":
            if "recipe" not in stage:
                raise ConfigError(f"{where}: recipe is not given; name a recipe's file")
            recipe = with_parts(load_recipe(stage["recipe"], _texts(stage, "settings", where)), made)
            made.model = f"{recipe.run.output}/model"
            if resume and (Path(recipe.run.output) / "DONE").exists():
                continue
            if not waits:
                check_shards(recipe, made, where=where)
            jobs.append(training_job(recipe, options, where=stage["recipe"], resume=resume, chdir=chdir))
        else:
            commands = _evaluation(stage, made, where)
            jobs.append(evaluate_job(commands, options, where=where, folder=folder, chdir=chdir))
    named = {name: f"key {name} of [options]" for name in values.get("options", {})}
    named |= {name: flag_of(name) for name in given}
    refuse_unread(named, tasks={stage["task"] for stage in values["stages"]}, chain=path)
    return jobs


def _commands(corpus: Any, made: Made, where: str) -> list[list[str]]:
    """The arguments of data.prepare for each task. Files are dealt out in turn, so that the parts are similar."""
    if not isinstance(corpus, Mapping):
        raise ConfigError(f"{where}: corpora must be tables, [[stages.corpora]]")
    _check_keys(corpus, _CORPUS_KEYS, where)
    if corpus.get("kind") not in _KINDS:
        raise ConfigError(f"{where}: kind = {corpus.get('kind')!r} is unknown; choose one of {', '.join(_KINDS)}")
    inputs, output, parts = _texts(corpus, "inputs", where), corpus.get("output", ""), corpus.get("parts", 1)
    if not inputs or not output:
        raise ConfigError(f"{where}: a corpus needs inputs and output")
    folder = os.path.normpath(output)
    if folder in made.shards:
        raise ConfigError(f"{where}: output = {output!r} is another corpus' too; give each a folder of its own")
    rest = _texts(corpus, "arguments", where)
    _refuse_options(rest, {"--output": "output", "--processes": "cpus_per_task in options"}, where)
    if parts == 1:
        made.shards[folder] = [output]
        return [[corpus["kind"], *inputs, *rest, "--output", output]]
    files = sorted({file for pattern in inputs for file in glob.glob(pattern, recursive=True)})  # noqa: PTH207
    folders = [file for file in files if Path(file).is_dir()]
    if folders:
        raise ConfigError(f"{where}: {folders[0]} is a folder, and parts are made of files; write {folders[0]}/*")
    if not 1 <= parts <= len(files):
        raise ConfigError(f"{where}: parts = {parts} of {len(files)} files cannot be; use 1 to {max(1, len(files))}")
    made.shards[folder] = [f"{folder}/part-{part:03d}" for part in range(parts)]
    return [
        [corpus["kind"], *files[number::parts], *rest, "--output", part]
        for number, part in enumerate(made.shards[folder])
    ]


def with_parts(recipe: Recipe, made: Made) -> Recipe:
    """The recipe with every folder that is written in parts replaced by its parts."""
    data = recipe.data
    shards = [part for folder in data.shards for part in made.shards.get(os.path.normpath(folder), [folder])]
    if len(shards) == len(data.shards):
        return recipe
    for name, per_folder in (
        ("weights", data.weights),
        ("query_prompts", data.query_prompts[1:]),
        ("passage_prompts", data.passage_prompts[1:]),
    ):
        if per_folder:
            raise ConfigError(
                f"data.{name} has an entry for each folder, and {data.shards} are written in parts; use parts = 1"
            )
    return dataclasses.replace(recipe, data=dataclasses.replace(data, shards=shards))


def check_shards(recipe: Recipe, made: Made, *, where: str) -> None:
    """Refuse local folders that hold no shards and that no stage will write; the job itself checks addresses."""
    coming = {os.path.normpath(part) for parts in made.shards.values() for part in parts}
    for folder in recipe.data.shards:
        is_here = "://" in folder or os.path.normpath(folder) in coming or (Path(folder) / "manifest.json").is_file()
        if not is_here:
            raise ConfigError(
                f"{where}: data.shards: {folder} holds no finished shards; "
                "make them first by `python -m data.prepare`, or in a stage before this one"
            )


def _evaluation(stage: Mapping[str, Any], made: Made, where: str) -> list[list[str]]:
    model = stage.get("model", made.model)
    if not model:
        raise ConfigError(f"{where}: model is not given, and no stage before it trains one; name a run's model folder")
    commands = []
    if arguments := _texts(stage, "arguments", where):
        _refuse_options(arguments, {"--model": "model"}, where)
        commands.append(["trainer.evaluate", "sizes", "--model", model, *arguments])
    if export := stage.get("export"):
        commands.append(["trainer.export", "--model", model, "--output", export])
    if not commands:
        raise ConfigError(f"{where}: give arguments of trainer.evaluate, a folder for export, or both")
    return commands


def _refuse_options(arguments: Sequence[str], decided: Mapping[str, str], where: str) -> None:
    """Refuse options, also abbreviated ones, that a key of the chain decides: one of both values would be ignored."""
    for word in arguments:
        name = word.partition("=")[0]
        for option, key in decided.items():
            if name.startswith("--") and len(name) > 2 and option.startswith(name):
                raise ConfigError(f"{where}: arguments have {option}, which {key} decides; leave it out there")


def _texts(table: Mapping[str, Any], key: str, where: str) -> list[str]:
    values: Sequence[Any] = table.get(key, [])
    if not all(isinstance(each, str) for each in values):
        raise ConfigError(f"{where}: {key} = {values!r} must be a list of texts")
    return list(values)


def _check_keys(table: Mapping[str, Any], known: Mapping[str, type], where: str) -> None:
    for key, value in table.items():
        if key not in known:
            raise ConfigError(f"{where}: unknown key {key}; the keys are {', '.join(known)}")
        if not isinstance(value, known[key]) or isinstance(value, bool):
            raise ConfigError(f"{where}: {key} = {value!r} must be {_KINDS_OF_VALUES[known[key]]}")

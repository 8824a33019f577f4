"""Checks before a study starts: its files and given models exist and fit, and no runs wait for each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from data.ground.errors import ConfigError
from models.loading import local_folder
from models.settings import EmbeddingSettings
from models.sizes import Size
from trainer.build import refuse_heads
from trainer.config.schema import flat
from trainer.evaluation.tasks.read import read_tasks
from trainer.experiments.plan import Result, Run, Study
from trainer.experiments.study_jobs import GIVEN, by_model, finished_at, is_done, read_by
from trainer.run_folder import check_output_folder, check_same_recipe


def check_files(study: Study, runs: Sequence[Run]) -> None:
    chosen = study.evaluation
    read_tasks(chosen.sts, chosen.beir, split=chosen.split, subsets=chosen.sts_subsets or None)
    makers = by_model(runs)
    for run in runs:
        if is_done(run):
            check_same_recipe(run.recipe)
        else:
            check_output_folder(run.recipe)
        for read in read_by(run, makers) if is_done(run) else ():
            if not (is_done(read) and finished_at(read) <= finished_at(run)):
                raise ConfigError(
                    f"{run.folder} was made from an earlier {read.folder}, which is gone or was trained again since; "
                    "remove it to train it again, or use --report-only"
                )
        for shards in run.recipe.data.shards:
            if "://" not in shards and not (Path(shards) / "manifest.json").is_file():
                raise ConfigError(
                    f"{study.path}, run {run.name}: data.shards names {shards}, which holds no shards; "
                    "make them with `python -m data.prepare`"
                )


def check_given(study: Study, runs: Sequence[Run], results: Sequence[Result]) -> None:
    """Refuse given models that do not exist, do not fit the runs that start from them, or lack the sizes evaluated."""
    makers = by_model(runs)
    check_order(study, runs, makers)
    for run in runs:
        values = flat(run.recipe)
        for key in GIVEN:
            if values[key] and values[key] not in makers:
                _check_there(values[key], f"{study.path}, run {run.name}: {key} names")
        source = _first_source(run, makers)
        if run.recipe.kind.predicts_tokens and Path(source).is_dir():
            refuse_heads(source)
    for result in results:
        if result.run is None:
            check_as_it_is(study, result)


def check_order(study: Study, runs: Sequence[Run], makers: Mapping[str, Run]) -> None:
    """Refuse runs that wait for each other: a run's start, teacher and guide must be made before it."""
    waiting = {run.name: run for run in runs}
    while waiting:
        ready = [run for run in waiting.values() if not any(each.name in waiting for each in read_by(run, makers))]
        if not ready:
            run = next(iter(waiting.values()))
            named = ", ".join(each.name for each in read_by(run, makers) if each.name in waiting)
            raise ConfigError(
                f"{study.path}, run {run.name} reads the model of {named}, which waits for it in turn; name another "
                "teacher or guide"
            )
        for run in ready:
            del waiting[run.name]


def _first_source(run: Run, makers: Mapping[str, Run]) -> str:
    """The given model at the beginning of this run's chain of starts; empty: random weights."""
    source = run.recipe.model.source
    while source in makers:
        source = makers[source].recipe.model.source
    return source


def _check_there(model: str, where: str) -> None:
    """Refuse a model folder that does not exist; a hub name passes. `where` begins the error message."""
    folder = local_folder(model)
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"{where} {folder}, which is not there; make it first, or fix its name")


def check_as_it_is(study: Study, result: Result) -> None:
    """Refuse a given model that does not say how it pools, or that lacks a size at which it is evaluated."""
    _check_there(result.model, f"{study.path}: {result.arm} evaluates")
    settings = EmbeddingSettings.load(result.model)
    if settings is None or not settings.ladder:
        raise ConfigError(
            f"{study.path}: {result.arm} evaluates {result.model} as it is, which does not say how it pools; give a "
            "folder of sentence-transformers, or of a trained run"
        )
    full = settings.sizes.full
    for size in map(Size.parse, result.sizes.split(",")):
        if not size.fits_in(full):
            raise ConfigError(
                f"{study.path}: {result.arm} is evaluated at {size}, which outgrows {result.model} of {full}; give it "
                "a ladder that ends there"
            )

"""Command: backbones × methods × seeds, trained, evaluated and reported, from one file.

    python -m trainer.study STUDY.toml                  go on where it stopped; at the end <output>/report
    python -m trainer.study STUDY.toml --jobs 2         two runs at a time
    python -m trainer.study STUDY.toml --arms mlm/srl   these arms first; the report says what is missing
    python -m trainer.study STUDY.toml --list           the runs and which are done
    python -m trainer.study STUDY.toml --report-only    the report again, from the raw results alone

Each run is the command that a user would type, in a process of its own: `trainer.pretrain`, `trainer.distill` or
`trainer.finetune` (under the deepspeed launcher where the study has more than one rank), then `trainer.evaluate`, which
is all that there is of a method without a recipe. What is done (<run>/DONE, and an evaluation made by the same command)
is skipped, unless its recipe is no longer the study's, which is refused. Checkpoints of finished runs are removed.
Output goes to <output>/logs. SIGTERM, SIGUSR1, Ctrl-C, the file that BARISTA_STOP_FILE names, or --stop-after-minutes
lets the runs in progress save and ends with code 75; the same command goes on.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import logging
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from data.command import run_command
from data.files import sha256_of, write_atomically
from data.records import read_json
from models.encoder import EmbeddingSettings
from models.loading import local_folder
from models.sizes import Size
from trainer.build import refuse_heads
from trainer.config import ConfigError, flat
from trainer.evaluation.raw import RAW_FILE
from trainer.evaluation.retrieval import load_beir
from trainer.evaluation.sts import read_sts
from trainer.run_folder import check_output_folder, check_same_recipe
from trainer.study_plan import Result, Run, Study, load_study, results_of, runs_of
from trainer.study_report import LATENCY_FILE, write_report
from trainer.study_work import Job, Work, training_job

log = logging.getLogger(__name__)

_LATENCY_QUERIES = 100
_WEIGHTS = ("*.safetensors", "*.bin")
# What of a recipe may name a folder that somebody else has made.
_GIVEN = ("model.source", "teacher.model", "teacher.store", "guide.model")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m trainer.study", description="Train, evaluate and report a study.")
    parser.add_argument("study", metavar="STUDY.toml", help="see launch/studies and docs/evaluation.md")
    parser.add_argument(
        "--report-only", action="store_true", help="make the report from the raw results that are there"
    )
    parser.add_argument("--list", action="store_true", help="list the runs and whether they are done; starts nothing")
    parser.add_argument(
        "--stop-after-minutes", type=float, default=0.0, metavar="M", help="let the run in progress save, exit with 75"
    )
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="runs at a time, sharing the cores or GPUs (%(default)s)"
    )
    parser.add_argument("--arms", nargs="+", metavar="B/M", help="only these arms for now, and what they start from")
    args = parser.parse_args(argv)
    if args.jobs < 1:
        raise ConfigError(f"--jobs {args.jobs} is below 1, one run at a time")
    study = load_study(args.study)
    if args.report_only:
        sys.stdout.write(f"{write_report(study)}\n")
        return
    # All recipes are resolved and all evaluation files read before anything starts.
    runs, results = _chosen(study, args.arms)
    if args.list:
        _list(runs, results)
        return
    _check_files(study, runs)
    _check_given(study, runs, results)
    work = Work(study.output, args.stop_after_minutes, args.jobs, _gpus(args.jobs, study.ranks))
    jobs = _jobs(study, runs, results, work)
    log.info("%s: %d runs, %d evaluations, %d left to do", study.name, len(runs), len(results), len(jobs))
    with work.listening():
        work.carry_out(jobs)
    sys.stdout.write(f"{write_report(study)}\n")


def _chosen(study: Study, arms: Sequence[str] | None) -> tuple[list[Run], list[Result]]:
    """The runs and results of these arms, and the backbones that their runs start from; None: of all."""
    runs, results = runs_of(study), results_of(study)
    if arms is None:
        return runs, results
    if unknown := [arm for arm in arms if arm not in study.arms]:
        raise ConfigError(f"--arms names {unknown[0]!r}; the arms of {study.path} are {', '.join(study.arms)}")
    results = [result for result in results if result.arm in arms]
    makers = _by_model(runs)
    wanted, open_ends = set[str](), [result.run for result in results if result.run is not None]
    while open_ends:
        run = open_ends.pop()
        if run.name not in wanted:
            wanted.add(run.name)
            open_ends += _read_by(run, makers)
    return [run for run in runs if run.name in wanted], results


def _by_model(runs: Sequence[Run]) -> dict[str, Run]:
    """Runs by the model that they make, as other runs' recipes name it."""
    return {str(run.folder / "model"): run for run in runs}


def _read_by(run: Run, makers: Mapping[str, Run]) -> list[Run]:
    """The runs whose models this one reads: what it starts from, its teacher and its guide."""
    recipe = run.recipe
    named = dict.fromkeys((recipe.model.source, recipe.teacher.model, recipe.guide.model))
    return [makers[name] for name in named if name in makers]


def _jobs(study: Study, runs: Sequence[Run], results: Sequence[Result], work: Work) -> list[Job]:
    """What is left to do, in order: each run before its evaluation, a backbone before what starts from it."""
    makers = _by_model(runs)
    given = [result for result in results if result.run is None]
    jobs = [_evaluation(study, result) for result in given if not is_evaluated(study, result)]
    for run in runs:
        to_train = not is_done(run)
        if to_train:
            jobs.append(_training(study, run, work, needs=frozenset(each.name for each in _read_by(run, makers))))
        of_run = (result for result in results if result.run is not None and result.run.name == run.name)
        jobs += [_evaluation(study, result) for result in of_run if to_train or not is_evaluated(study, result)]
    latency = study.output / "results" / LATENCY_FILE
    whole = next((result for result in results if not study.arms[result.arm].each_size), None)
    if whole is not None and not latency.is_file():
        sizes = ",".join(map(str, study.arms[whole.arm].ladder or study.ladder))
        command = ["trainer.evaluate", "latency", "--model", whole.model, "--sizes", sizes, "--json", latency]
        texts = ["--sts", study.evaluation.sts[0]] if study.evaluation.sts else ["--beir", study.evaluation.beir[0]]
        command += [*texts, "--split", study.evaluation.split, "--queries", str(_LATENCY_QUERIES)]
        # Last and alone, so that nothing else disturbs the clock.
        jobs.append(Job("latency", "latency", lambda: command, frozenset(job.name for job in jobs)))
    return jobs


def _gpus(jobs: int, ranks: int) -> list[str]:
    """The GPUs to share out, as CUDA_VISIBLE_DEVICES names them; none on a machine of cores alone."""
    count = torch.cuda.device_count()
    if count and jobs > 1 and jobs * ranks > count:
        raise ConfigError(f"--jobs {jobs} of {ranks} ranks need {jobs * ranks} GPUs, there are {count}; lower --jobs")
    return (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))).split(",")[:count]


def is_done(run: Run) -> bool:
    return (run.folder / "DONE").is_file()


def _finished(run: Run) -> int:
    return (run.folder / "DONE").stat().st_mtime_ns


def is_evaluated(study: Study, result: Result) -> bool:
    """Whether the raw results there are of this model, and of the command that would make them now."""
    receipt = _receipt(result)
    if result.run is not None and not is_done(result.run):
        return False
    if not _has_results(result) or not receipt.is_file():
        return False
    return read_json(receipt, mend="remove it; what it is of is then made again") == _receipt_content(study, result)


def evaluation_command(study: Study, result: Result) -> list[str]:
    tests = study.evaluation
    command = ["trainer.evaluate", "sizes", "--model", result.model, "--sizes", result.sizes]
    command += ["--sts", *tests.sts] if tests.sts else []
    command += ["--sts-subsets", tests.sts_subsets] if tests.sts_subsets else []
    command += ["--beir", *tests.beir, "--split", tests.split] if tests.beir else []
    command += ["--random-init"] if result.untrained else []
    command += ["--dtype", tests.dtype] if tests.dtype else []
    command += ["--max-length", str(tests.max_length)] if tests.max_length else []
    command += ["--bm25"] if result.bm25 and tests.beir else []
    return [*command, "--output", str(result.folder)]


def _training(study: Study, run: Run, work: Work, *, needs: frozenset[str]) -> Job:
    job = training_job(
        run.name,
        _kind(run),
        run.module,
        run.recipe_file,
        run.overrides,
        run.folder,
        work,
        ranks=study.ranks,
        done=lambda: is_done(run),
    )
    return dataclasses.replace(
        job,
        needs=needs,
        # Only a stopped run needs them again.
        after=lambda: shutil.rmtree(run.folder / "checkpoints", ignore_errors=True),
    )


def _evaluation(study: Study, result: Result) -> Job:
    def write_receipt() -> None:
        write_atomically(_receipt(result), json.dumps(_receipt_content(study, result), indent=1) + "\n")

    return Job(
        f"evaluate {result.name}",
        f"evaluate {'grid' if study.grid and ',' in result.sizes else 'sizes'}",
        lambda: evaluation_command(study, result),
        frozenset() if result.run is None else frozenset({result.run.name}),
        before=lambda: _receipt(result).unlink(missing_ok=True),
        after=write_receipt,
    )


def _receipt(result: Result) -> Path:
    return result.folder.with_name(f"{result.folder.name}.receipt.json")


def _receipt_content(study: Study, result: Result) -> dict[str, object]:
    """The command, and a digest of the model's weights, in its folder or below it; of a hub name, of no weights."""
    digest = hashlib.sha256()
    for path in sorted(path for kind in _WEIGHTS for path in Path(result.model).rglob(kind)):
        digest.update(bytes.fromhex(sha256_of(path)))
    return {"command": evaluation_command(study, result), "weights_sha256": digest.hexdigest()}


def _kind(run: Run) -> str:
    """Runs of one kind take about the same time: all but the seed are the same."""
    return "/".join(part for part in run.name.split("/") if not part.startswith("seed_"))


def _check_files(study: Study, runs: Sequence[Run]) -> None:
    for path in study.evaluation.sts:
        read_sts(path, subsets=study.evaluation.sts_subsets or None)
    for folder in study.evaluation.beir:
        load_beir(folder, split=study.evaluation.split)
    makers = _by_model(runs)
    for run in runs:
        if is_done(run):
            check_same_recipe(run.recipe)
        else:
            check_output_folder(run.recipe)
        for read in _read_by(run, makers) if is_done(run) else ():
            if not (is_done(read) and _finished(read) <= _finished(run)):
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


def _check_given(study: Study, runs: Sequence[Run], results: Sequence[Result]) -> None:
    """What the study does not make itself: models that are there, fit what starts from them, and have their sizes."""
    makers = _by_model(runs)
    _check_order(study, runs, makers)
    for run in runs:
        values = flat(run.recipe)
        for key in _GIVEN:
            if values[key] and values[key] not in makers:
                _check_there(values[key], f"{study.path}, run {run.name}: {key} names")
        source = _first_source(run, makers)
        if run.recipe.objective.name == "masked" and Path(source).is_dir():
            refuse_heads(source)
    for result in results:
        if result.run is None:
            _check_as_it_is(study, result)


def _check_order(study: Study, runs: Sequence[Run], makers: Mapping[str, Run]) -> None:
    """Teachers and guides are made before what reads them, as starts are."""
    waiting = {run.name: run for run in runs}
    while waiting:
        ready = [run for run in waiting.values() if not any(each.name in waiting for each in _read_by(run, makers))]
        if not ready:
            run = next(iter(waiting.values()))
            named = ", ".join(each.name for each in _read_by(run, makers) if each.name in waiting)
            raise ConfigError(
                f"{study.path}, run {run.name} reads the model of {named}, which waits for it in turn; name another "
                "teacher or guide"
            )
        for run in ready:
            del waiting[run.name]


def _first_source(run: Run, makers: Mapping[str, Run]) -> str:
    """The given model from which all that this run starts from has come; empty: random weights."""
    source = run.recipe.model.source
    while source in makers:
        source = makers[source].recipe.model.source
    return source


def _check_there(model: str, where: str) -> None:
    """Refuse a folder that is not there; `where` begins the sentence. A hub name passes."""
    folder = local_folder(model)
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"{where} {folder}, which is not there; make it first, or mend its name")


def _check_as_it_is(study: Study, result: Result) -> None:
    """A given model says how it pools, and reaches the sizes at which it is evaluated."""
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


def _list(runs: Sequence[Run], results: Sequence[Result]) -> None:
    """A line a run and its evaluation; then one for each evaluation of what another arm's run, or nobody, makes."""
    own = {result.name: result for result in results}
    for run in runs:
        state = "done" if is_done(run) else "stopped" if (run.folder / "STOPPED").is_file() else "to do"
        result = own.pop(run.name.removeprefix("runs/"), None)
        if result is not None and is_done(run):
            state += ", evaluated" if _has_results(result) else ", not evaluated"
        sys.stdout.write(f"{run.name}\t{state}\n")
    for result in own.values():
        sys.stdout.write(f"results/{result.name}\t{'evaluated' if _has_results(result) else 'to do'}\n")


def _has_results(result: Result) -> bool:
    return (result.folder / RAW_FILE).is_file()


if __name__ == "__main__":
    run_command(main)

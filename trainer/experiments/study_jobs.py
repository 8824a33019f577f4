"""A study's runs and evaluations as jobs: the jobs that each needs, its command, and how it is known to be done."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from data.ground.errors import ConfigError
from data.ground.files import sha256_of, write_atomically
from data.ground.records import read_json
from trainer.evaluation.results.raw import RAW_FILE
from trainer.evaluation.tasks.read import digest_of_tasks
from trainer.experiments.collected import latencies_of, latency_file
from trainer.experiments.jobs import Job, Work, training_job
from trainer.experiments.plan import Result, Run, Study, results_of, runs_of

_LATENCY_QUERIES = 100
_WEIGHTS = ("*.safetensors", "*.bin")
# The recipe keys that may name a folder made outside the study.
GIVEN = ("model.source", "teacher.model", "teacher.store", "guide.model", "guide.store")


def chosen(study: Study, arms: Sequence[str] | None) -> tuple[list[Run], list[Result]]:
    """The runs and results of these arms, and the runs of the backbones that they start from; None: of all arms."""
    runs, results = runs_of(study), results_of(study)
    if arms is None:
        return runs, results
    if unknown := [arm for arm in arms if arm not in study.arms]:
        raise ConfigError(f"--arms names {unknown[0]!r}; the arms of {study.path} are {', '.join(study.arms)}")
    results = [result for result in results if result.arm in arms]
    makers = by_model(runs)
    wanted, open_ends = set[str](), [result.run for result in results if result.run is not None]
    while open_ends:
        run = open_ends.pop()
        if run.name not in wanted:
            wanted.add(run.name)
            open_ends += read_by(run, makers)
    return [run for run in runs if run.name in wanted], results


def by_model(runs: Sequence[Run]) -> dict[str, Run]:
    """Runs by the model folder that they write, as the recipes of other runs name it."""
    return {str(run.folder / "model"): run for run in runs}


def read_by(run: Run, makers: Mapping[str, Run]) -> list[Run]:
    """The runs whose models this run reads: its start, its teacher and its guide."""
    recipe = run.recipe
    named = dict.fromkeys((recipe.model.source, recipe.teacher.model, recipe.guide.model))
    return [makers[name] for name in named if name in makers]


def jobs_of(study: Study, runs: Sequence[Run], results: Sequence[Result], work: Work) -> list[Job]:
    """The jobs left to do, in order: each run before its evaluation, a backbone before the runs that start from it."""
    makers = by_model(runs)
    given = [result for result in results if result.run is None]
    jobs = [_evaluation(study, result) for result in given if not is_evaluated(study, result)]
    for run in runs:
        to_train = not is_done(run)
        if to_train:
            jobs.append(_training(study, run, work, needs=frozenset(each.name for each in read_by(run, makers))))
        of_run = (result for result in results if result.run is not None and result.run.name == run.name)
        jobs += [_evaluation(study, result) for result in of_run if to_train or not is_evaluated(study, result)]
    whole = next((result for result in results if study.arms[result.arm].has_all_sizes), None)
    if whole is not None and not _is_timed(study, whole.model):
        command = latency_command(study, whole)
        # Latency is measured last and alone, so that no other job disturbs the timing.
        jobs.append(Job("latency", "latency", lambda: command, frozenset(job.name for job in jobs)))
    return jobs


def _is_timed(study: Study, model: str) -> bool:
    measured = latencies_of(study)
    return measured.model == model and set(measured.milliseconds) == set(study.ladder)


def is_done(run: Run) -> bool:
    return (run.folder / "DONE").is_file()


def finished_at(run: Run) -> int:
    """When a run that is done was finished, in nanoseconds."""
    return (run.folder / "DONE").stat().st_mtime_ns


def is_evaluated(study: Study, result: Result) -> bool:
    """Whether the raw results exist, and come from this model, these tests and the command that would be run now."""
    marker = marker_of(result)
    if result.run is not None and not is_done(result.run):
        return False
    if not has_results(result) or not marker.is_file():
        return False
    return read_json(marker, hint="remove it; what it is of is then made again") == marker_content(study, result)


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


def latency_command(study: Study, result: Result) -> list[str]:
    tests = study.evaluation
    command = ["trainer.evaluate", "latency", "--model", result.model, "--sizes", ",".join(map(str, study.ladder))]
    command += ["--sts", tests.sts[0]] if tests.sts else ["--beir", tests.beir[0], "--split", tests.split]
    return [*command, "--queries", str(_LATENCY_QUERIES), "--json", str(latency_file(study))]


def _training(study: Study, run: Run, work: Work, *, needs: frozenset[str]) -> Job:
    job = training_job(
        run.name,
        kind_of(run),
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
        # Checkpoints are needed only to resume a run.
        after=lambda: shutil.rmtree(run.folder / "checkpoints", ignore_errors=True),
    )


def _evaluation(study: Study, result: Result) -> Job:
    content: dict[str, object] = {}

    def begin() -> None:
        marker_of(result).unlink(missing_ok=True)
        content.update(marker_content(study, result))  # of the files that are read, should they change meanwhile

    return Job(
        f"evaluate {result.name}",
        f"evaluate {'grid' if study.grid and ',' in result.sizes else 'sizes'}",
        lambda: evaluation_command(study, result),
        frozenset() if result.run is None else frozenset({result.run.name}),
        before=begin,
        after=lambda: write_atomically(marker_of(result), json.dumps(content, indent=1) + "\n"),
    )


def marker_of(result: Result) -> Path:
    """The completion marker of an evaluation. Studies of earlier versions have markers of this name, too."""
    return result.folder.with_name(f"{result.folder.name}.receipt.json")


def marker_content(study: Study, result: Result) -> dict[str, object]:
    """The completion marker's content: the command, and digests of the weights and of the tests that it reads.

    The weights are those in the model's folder or below it; for a hub name the digest covers none. Markers of earlier
    versions lack the tests' digest, so what they are of is evaluated again.
    """
    tests, digest = study.evaluation, hashlib.sha256()
    for path in sorted(path for kind in _WEIGHTS for path in Path(result.model).rglob(kind)):
        digest.update(bytes.fromhex(sha256_of(path)))
    return {
        "command": evaluation_command(study, result),
        "weights_sha256": digest.hexdigest(),
        "tests_sha256": digest_of_tasks(tests.sts, tests.beir, split=tests.split, subsets=tests.sts_subsets or None),
    }


def kind_of(run: Run) -> str:
    """The kind of a run: its name without the seed. Runs of one kind take about the same time."""
    return "/".join(part for part in run.name.split("/") if not part.startswith("seed_"))


def has_results(result: Result) -> bool:
    return (result.folder / RAW_FILE).is_file()

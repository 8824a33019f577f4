"""A study's raw results, read into one sample for each arm, task, metric and size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from data.ground.errors import ConfigError, DataError
from data.ground.records import Record, read_record
from models.sizes import ModelError, Size
from trainer.evaluation.results.comparison import Sample, average, samples_of
from trainer.evaluation.results.raw import BM25, RAW_FILE, Key, RawResults, RawTask, read_raw
from trainer.experiments.plan import Result, Study, results_of

AVERAGE = "average"


class _Latency(Record):
    milliseconds: float


class _Latencies(Record):
    model: str
    sizes: dict[str, _Latency]


TRAINED = "trained"  # the method's name in an evaluation's own files

Column = Size | str  # a size, or AVERAGE
_Place = tuple[str, str, tuple[float, ...]]  # arm, task, the numbers of a size


@dataclass
class Collected:
    """samples: (arm, task, metric) -> column -> sample. The average is there only if every size of the ladder is."""

    kinds: dict[str, str]  # task -> kind
    samples: dict[tuple[str, str, str], dict[Column, Sample]]
    # BM25 (in the column AVERAGE), and the untrained control of each backbone
    references: dict[tuple[str, str, str], dict[Column, Sample]]
    missing: list[str]
    latency_ms: dict[Size, float] = field(default_factory=dict)


def collect(study: Study) -> Collected:
    """Read every result that exists, in the order of the study file. Tasks that the study no longer names are left out.

    Raises:
        ConfigError: there are no results, or two of them are of one task with other items.

    """
    found: dict[_Place, dict[int, tuple[RawResults, Key]]] = {}
    references: dict[_Place, dict[int, tuple[RawResults, Key]]] = {}
    tasks: dict[str, tuple[RawTask, Result]] = {}  # with the first result that has them
    missing = []
    for result in results_of(study):
        if not (result.folder / RAW_FILE).is_file():
            missing.append(str(result.folder.relative_to(study.output / "results")))
            continue
        raw = read_raw(result.folder / RAW_FILE)
        for task in study.evaluation.task_names:
            if (of_task := raw.tasks.get(task)) is None:
                continue
            known, first = tasks.setdefault(task, (of_task, result))
            if of_task != known:
                raise ConfigError(
                    f"{task} has other items in {result.folder} than in {first.folder}: its data or the study's "
                    "[evaluation] changed in between; remove the older results, and run the study to evaluate again"
                )
        for key in raw.values:
            task, method, *numbers = key
            if task not in tasks:
                continue
            where, name = (found, result.arm) if method == TRAINED else (references, _reference(study, result, method))
            of_size = where.setdefault((name, task, tuple(numbers)), {})
            if method == TRAINED or not of_size:
                of_size[result.seed] = (raw, key)
    if not found:
        raise ConfigError(f"{study.output / 'results'} holds no result of {study.path}; run the study first")
    order = [name for name in study.evaluation.task_names if name in tasks]
    latency_ms = latencies_of(study).milliseconds
    return Collected(
        {task: tasks[task][0].kind for task in order},
        _in_columns(study, found),
        _in_columns(study, references),
        missing,
        {size: latency_ms[size] for size in study.ladder if size in latency_ms},
    )


def latency_file(study: Study) -> Path:
    return study.output / "results" / "latency.json"


class Latencies(NamedTuple):
    """The model that was timed, and its milliseconds a query at each size. The study may have changed since."""

    model: str = ""
    milliseconds: Mapping[Size, float] = MappingProxyType({})


def latencies_of(study: Study) -> Latencies:
    """The latencies that the study's last measurement wrote; without one, there is no model and no size."""
    path = latency_file(study)
    if not path.is_file():
        return Latencies()
    hint = "remove it; it is then measured again"
    found = read_record(path, _Latencies, hint=hint)
    try:
        return Latencies(found.model, {Size.parse(name): each.milliseconds for name, each in found.sizes.items()})
    except ModelError as error:
        raise DataError(f"{path} is damaged ({error}); {hint}") from None


def _reference(study: Study, result: Result, method: str) -> str:
    """The name of a reference: a control has the shape of a backbone, which is named where there are several."""
    if method == BM25 or len(study.backbones) == 1:
        return method
    return f"{method} {result.arm.split('/')[0]}"


def _in_columns(
    study: Study, found: dict[_Place, dict[int, tuple[RawResults, Key]]]
) -> dict[tuple[str, str, str], dict[Column, Sample]]:
    columns: dict[tuple[str, str, str], dict[Column, Sample]] = {}
    for (name, task, numbers), by_seed in found.items():
        for metric, sample in samples_of(by_seed).items():
            columns.setdefault((name, task, metric), {})[Size.of(numbers) if numbers[0] else AVERAGE] = sample
    for by_column in columns.values():
        if all(size in by_column for size in study.ladder):
            by_column[AVERAGE] = average([by_column[size] for size in study.ladder])
    return columns

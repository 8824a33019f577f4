"""Comparison of methods from raw results: how seeds are averaged, and what is tested.

A **sample** is one method at one size on one task and metric, over its seeds. Before a test, seeds are averaged within
the item that the test counts: a query's scores in retrieval, the Fisher z of the correlation in STS. So the number of
queries or pairs in a test is the task's own, however many seeds there were. Sizes are averaged in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from data.ground.errors import ConfigError
from models.sizes import Size
from trainer.evaluation.results.raw import BM25, AcrossKey, Key, RawResults, own_key
from trainer.evaluation.results.report import HEADLINE_METRICS, METRIC_LABELS, Verdict, markdown_table
from trainer.evaluation.results.significance import (
    LEVEL,
    Interval,
    TestResult,
    confidence_interval,
    fisher_z,
    holm,
    p_text,
    paired_t_test,
    z_test,
)
from trainer.evaluation.tasks.retrieval import RetrievalData
from trainer.evaluation.tasks.sts import STSTask


@dataclass(frozen=True)
class Sample:
    """One method at one size on one task and metric.

    `by_seed`: seed -> value of the metric. `items`: float64 [queries], means over seeds (retrieval). `z`: mean of
    Fisher's z over seeds (STS). `n`: the number of queries or sentence pairs in a test; 0 if the metric has no test, as
    with a mean over subsets.
    """

    by_seed: Mapping[int, float]
    n: int
    items: np.ndarray | None = None
    z: float = math.nan

    @property
    def interval(self) -> Interval:
        return confidence_interval(list(self.by_seed.values()))

    @property
    def mean(self) -> float:
        return float(np.mean(list(self.by_seed.values())))


def samples_of(by_seed: Mapping[int, tuple[RawResults, Key | AcrossKey]]) -> dict[str, Sample]:
    """Metric -> sample, from one method's results at one size on one task, seed by seed."""
    means = {seed: raw.means(key) for seed, (raw, key) in by_seed.items()}
    raw, key = next(iter(by_seed.values()))
    task = raw.tasks[key[0]]
    for seed, (other, _) in by_seed.items():
        if other.tasks[key[0]] != task:
            raise ConfigError(f"seed {seed} was evaluated on other items of {task.name}; evaluate all seeds alike")
    samples = {}
    for metric in means[next(iter(means))]:
        values = {seed: of_seed[metric] for seed, of_seed in means.items()}
        if task.kind == "retrieval":
            rows = np.stack([other.columns(place)[metric] for other, place in by_seed.values()])
            samples[metric] = Sample(values, rows.shape[1], items=rows.mean(0))
        elif metric == "spearman_mean":
            samples[metric] = Sample(values, 0)
        else:
            part = metric.partition("/")[2]
            n = next((subset.rows for subset in task.subsets if subset.name == part), len(task.gold))
            samples[metric] = Sample(values, n, z=float(np.mean([fisher_z(value) for value in values.values()])))
    return samples


def average(samples: Sequence[Sample]) -> Sample:
    """The mean over sizes of the same method, task and metric, with the seeds that all samples have."""
    seeds = [seed for seed in samples[0].by_seed if all(seed in sample.by_seed for sample in samples)]
    by_seed = {seed: float(np.mean([sample.by_seed[seed] for sample in samples])) for seed in seeds}
    if all(sample.items is not None for sample in samples):
        items = np.stack([sample.items for sample in samples if sample.items is not None]).mean(0)
        return Sample(by_seed, samples[0].n, items=items)
    return Sample(by_seed, samples[0].n, z=float(np.mean([sample.z for sample in samples])))


def compare(sample: Sample, baseline: Sample) -> TestResult:
    """Two-tailed test: the paired t-test over queries, or Fisher's z of the correlations; p is NaN without a test."""
    difference = sample.mean - baseline.mean
    if sample.items is not None and baseline.items is not None:
        return paired_t_test(sample.items, baseline.items)
    if sample.n != baseline.n:
        return TestResult(difference, math.nan, math.nan, sample.n)
    return z_test(sample.z, baseline.z, n=sample.n, difference=difference)


BETTER, WORSE = "†", "‡"


def mark(difference: float, p: float, *, level: float = LEVEL) -> str:
    """† if significantly better than the baseline, ‡ if significantly worse, else an empty text."""
    if math.isnan(p) or p >= level:
        return ""
    return BETTER if difference > 0 else WORSE


def check_same_items(
    against: RawResults, sts: Sequence[STSTask], retrieval: Sequence[RetrievalData], *, name: str
) -> None:
    """Refuse the evaluation `name` unless it shares tasks with this one, with the same pairs and queries.

    It is called before anything is computed.
    """
    shared = 0
    items = {task.name: (task.scores, task.subsets) for task in sts}
    queries = {data.name: set(data.qrels) for data in retrieval}
    for task in against.tasks.values():
        known = items.get(task.name, (task.gold, task.subsets)) == (task.gold, task.subsets)
        if not known or queries.get(task.name, set(task.items)) != set(task.items):
            raise ConfigError(f"{name} was evaluated on other items of {task.name}; evaluate both on the same files")
        shared += task.name in items or task.name in queries
    if not shared:
        raise ConfigError(f"{name} has none of these tasks; compare with an evaluation on the same files")


def verdicts_of(
    raw: RawResults, *, against: RawResults | None = None, name: str = "", corrected: bool = False
) -> list[Verdict]:
    """Tests of every size against the baseline: the evaluation `against` if given, else BM25, else the untrained model.

    The trained model is compared with the other evaluation, or with the untrained model, at the same size. `corrected`:
    p values are corrected by Holm's method over the tests of a task.
    """
    verdicts = []
    for task in raw.tasks.values():
        metric = HEADLINE_METRICS[task.kind]
        of_task = [key for key in raw.values if key[0] == task.name]
        trained = [key for key in of_task if key[1] == "trained"]
        pairs: dict[Key, tuple[RawResults, Key]] = {}
        if against is not None:
            baseline = name
            pairs = {key: (against, key) for key in trained if key in against.values}
        elif (task.name, BM25, 0, 0) in raw.values:
            baseline = BM25
            pairs = {key: (raw, (task.name, BM25, 0, 0)) for key in of_task if key[1] != BM25}
        else:
            baseline = "the untrained model"
            others = {key: (task.name, "untrained", *key[2:]) for key in trained}
            pairs = {key: (raw, other) for key, other in others.items() if other in raw.values}
        tests = {
            key: compare(samples_of({0: (raw, key)})[metric], samples_of({0: other})[metric])
            for key, other in pairs.items()
        }
        p_values = [test.p for test in tests.values()]
        shown = holm(p_values) if corrected else p_values
        for (key, test), p in zip(tests.items(), shown):
            sign = mark(test.difference, p)
            of_test = (metric, baseline, test.difference, p, sign, 0, _fraction_of(key))
            verdicts.append(Verdict(key[1], task.name, key[2], key[3], *of_test))
    return verdicts


def across_verdicts(raw: RawResults, *, corrected: bool = False) -> list[Verdict]:
    """Tests of documents of every other depth against documents of the query's own size, by the same method.

    `corrected`: p values are corrected by Holm's method over the tests of a task.
    """
    verdicts = []
    for task in raw.tasks.values():
        metric = HEADLINE_METRICS[task.kind]
        tests = {}
        for key in (key for key in raw.across if key[0] == task.name):
            tests[key] = compare(samples_of({0: (raw, key)})[metric], samples_of({0: (raw, own_key(key))})[metric])
        p_values = [test.p for test in tests.values()]
        shown = holm(p_values) if corrected else p_values
        for (key, test), p in zip(tests.items(), shown):
            _, method, layers, dim = key[:4]
            sign, baseline = mark(test.difference, p), "documents of the query's own size"
            row = (method, task.name, layers, dim, metric, baseline, test.difference, p, sign)
            verdicts.append(Verdict(*row, int(key[-1]), _fraction_of(own_key(key))))
    return verdicts


def _fraction_of(key: Key) -> float:
    """The fraction of the feed-forwards at a key's size; 1 for BM25, which has no size."""
    return key[4] if len(key) == 5 else 1.0


def compare_results(
    results: Mapping[str, RawResults], *, baseline: str, corrected: bool, method: str = "trained"
) -> str:
    """Markdown with one table per task: the headline metric at every size of the baseline.

    Each result is a single evaluation, without seeds.
    """
    base = results[baseline]
    parts = []
    for task in base.tasks.values():
        metric = HEADLINE_METRICS[task.kind]
        sizes = [Size.of(key[2:]) for key in base.values if key[:2] == (task.name, method)]
        samples = {
            (name, size): samples_of({0: (raw, key)})[metric]
            for name, raw in results.items()
            for size in sizes
            if (key := (task.name, method, *size.numbers)) in raw.values
        }
        for name, raw in results.items():
            if raw.tasks.get(task.name, task) != task:
                raise ConfigError(
                    f"{name} was evaluated on other items of {task.name}; evaluate both on the same files"
                )
        pairs = [place for place in samples if place[0] != baseline]
        tests = {place: compare(samples[place], samples[baseline, place[1]]) for place in pairs}
        p_values = [test.p for test in tests.values()]
        shown = dict(zip(tests, holm(p_values) if corrected else p_values))
        rows = []
        for (name, size), sample in samples.items():
            test = tests.get((name, size))
            p = shown.get((name, size), math.nan)
            sign = mark(test.difference, p) if test else ""
            difference = f"{test.difference:+.4f}" if test else "–"
            rows.append([name, str(size), f"{sample.mean:.4f}{sign}", difference, p_text(p)])
        header = ["results", "size", METRIC_LABELS[metric], "difference", "p, Holm" if corrected else "p"]
        parts.append(f"### {task.name}\n\n{markdown_table(header, rows, text_columns=2)}")
    return "\n".join(parts)

"""Methods against each other, from raw results: what is averaged before what is tested.

A **sample** is one method at one size on one task and metric, over its seeds. Before a test, seeds are averaged within
the item that the test counts: a retrieval query's scores, an STS correlation's Fisher z. So the number of queries or
pairs in a test is the task's own, however many seeds there were. The average over sizes is taken the same way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from models.sizes import Size
from trainer.config import ConfigError
from trainer.evaluation.raw import Key, RawResults
from trainer.evaluation.report import HEADLINE_METRICS, METRIC_LABELS, markdown_table
from trainer.evaluation.significance import (
    Interval,
    TestResult,
    confidence_interval,
    fisher_z,
    holm,
    p_text,
    paired_t_test,
    z_test,
)


@dataclass(frozen=True)
class Sample:
    """`by_seed`: the metric a seed. `items`: float64 [queries], means over seeds (retrieval); `z`: STS.

    `n`: what a test counts, queries or sentence pairs; 0 where the metric has no test (a mean over subsets).
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


def samples_of(by_seed: Mapping[int, tuple[RawResults, Key]]) -> dict[str, Sample]:
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
            rows = np.stack([other.values[place][metric] for other, place in by_seed.values()])
            samples[metric] = Sample(values, rows.shape[1], items=rows.mean(0))
        elif metric == "spearman_mean":
            samples[metric] = Sample(values, 0)
        else:
            part = metric.partition("/")[2]
            n = next((subset.rows for subset in task.subsets if subset.name == part), len(task.gold))
            samples[metric] = Sample(values, n, z=float(np.mean([fisher_z(value) for value in values.values()])))
    return samples


def average(samples: Sequence[Sample]) -> Sample:
    """The mean over sizes (of the same method, task and metric), over the seeds that all of them have."""
    seeds = [seed for seed in samples[0].by_seed if all(seed in sample.by_seed for sample in samples)]
    by_seed = {seed: float(np.mean([sample.by_seed[seed] for sample in samples])) for seed in seeds}
    if all(sample.items is not None for sample in samples):
        items = np.stack([sample.items for sample in samples if sample.items is not None]).mean(0)
        return Sample(by_seed, samples[0].n, items=items)
    return Sample(by_seed, samples[0].n, z=float(np.mean([sample.z for sample in samples])))


def compare(sample: Sample, baseline: Sample) -> TestResult:
    """Two-tailed: the paired t-test over queries, or Fisher's z of the correlations; p is NaN without a test."""
    difference = sample.mean - baseline.mean
    if sample.items is not None and baseline.items is not None:
        return paired_t_test(sample.items, baseline.items)
    if sample.n < 4 or sample.n != baseline.n:
        return TestResult(difference, math.nan, math.nan, sample.n)
    return z_test(sample.z, baseline.z, n=sample.n, difference=difference)


BETTER, WORSE = "†", "‡"


def mark(difference: float, p: float, *, level: float = 0.05) -> str:
    """† significantly better than the baseline, ‡ significantly worse, else nothing."""
    if math.isnan(p) or p >= level:
        return ""
    return BETTER if difference > 0 else WORSE


def compare_results(
    results: Mapping[str, RawResults], *, baseline: str, corrected: bool, method: str = "trained"
) -> str:
    """Markdown: a table a task with every size of the baseline, one evaluation each (no seeds), headline metrics."""
    base = results[baseline]
    parts = []
    for task in base.tasks.values():
        metric = HEADLINE_METRICS[task.kind]
        sizes = [Size(*key[2:]) for key in base.values if key[:2] == (task.name, method)]
        samples = {
            (name, size): samples_of({0: (raw, key)})[metric]
            for name, raw in results.items()
            for size in sizes
            if (key := (task.name, method, size.layers, size.dim)) in raw.values
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

"""Tests of whether one method is better than another or the difference is due to chance, as pure functions.

- Retrieval: the two-tailed paired t-test over queries, `paired_t_test`. Queries are the sample; the documents and the
  models are taken as given.
- STS: Fisher's r→z and its z statistic, `fisher_z_test`. It treats the two correlations as if they came from different
  sentence pairs. They come from the same pairs and agree, so its p is too large: the test is conservative.
- Several comparisons at once: Holm's step-down correction, `holm`.
- Seeds: Student's t interval of the mean, `confidence_interval`. It is about the training run of another seed, while
  the two tests are about further queries or sentence pairs; neither replaces the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy  # its submodules are loaded where they are used: scipy.stats takes half a second

LEVEL = 0.05


@dataclass(frozen=True)
class TestResult:
    """`difference`: first mean minus second. `statistic`: t or z. `n`: queries, or sentence pairs per correlation.

    Where there is no test, the statistic and p are NaN.
    """

    difference: float
    statistic: float
    p: float
    n: int


@dataclass(frozen=True)
class Interval:
    """A mean and the interval around it. Both ends are NaN for a single value, which has no spread."""

    mean: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2


def paired_t_test(first: Sequence[float] | np.ndarray, second: Sequence[float] | np.ndarray) -> TestResult:
    """Two-tailed paired t-test; value i of both is the same query's.

    If all pairs are equal, p is 1; if all differences are the same and not 0, p is 0. A single query has no test: its
    statistic and p are NaN. Raises ValueError where the two are not equally long.
    """
    a, b = np.asarray(first, np.float64), np.asarray(second, np.float64)
    if a.shape != b.shape or a.ndim != 1:
        raise ValueError(f"paired values have the shapes {a.shape} and {b.shape}; give the same queries twice")
    differences = a - b
    mean = float(differences.mean())
    if len(a) < 2:
        return TestResult(mean, math.nan, math.nan, len(a))
    if np.ptp(differences) == 0:
        return TestResult(mean, math.copysign(math.inf, mean) if mean else 0.0, 0.0 if mean else 1.0, len(a))
    found = scipy.stats.ttest_rel(a, b)
    return TestResult(mean, float(found.statistic), float(found.pvalue), len(a))


def fisher_z_test(first: float, second: float, *, n: int) -> TestResult:
    """Two-tailed test of two correlations over n pairs each: z = (atanh r1 − atanh r2) / √(2 / (n − 3)).

    Fewer than four pairs have no test: z and p are NaN.
    """
    return z_test(fisher_z(first), fisher_z(second), n=n, difference=first - second)


def z_test(first: float, second: float, *, n: int, difference: float) -> TestResult:
    """`fisher_z_test` of values that are already transformed by `fisher_z`, for example means over seeds."""
    if n < 4:
        return TestResult(difference, math.nan, math.nan, n)
    if math.isnan(first) or math.isnan(second):
        return TestResult(math.nan, math.nan, math.nan, n)
    # Two perfect correlations are the same infinity, and do not differ.
    z = 0.0 if first == second else (first - second) / math.sqrt(2 / (n - 3))
    return TestResult(difference, z, math.erfc(abs(z) / math.sqrt(2)), n)


def fisher_z(correlation: float) -> float:
    """atanh r; infinite at ±1."""
    if abs(correlation) > 1:
        raise ValueError(f"{correlation} is no correlation; it must lie between -1 and 1")
    return math.copysign(math.inf, correlation) if abs(correlation) == 1 else math.atanh(correlation)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p values, in the order given; NaN stays NaN and is not counted.

    The k-th smallest of m is multiplied by m − k + 1; then each adjusted value is raised to the largest before it.
    """
    known = [i for i, p in enumerate(p_values) if not math.isnan(p)]
    adjusted = [math.nan] * len(p_values)
    largest = 0.0
    for rank, i in enumerate(sorted(known, key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (len(known) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted


def confidence_interval(values: Sequence[float], *, confidence: float = 0.95) -> Interval:
    """Mean over seeds with Student's t interval: mean ± t(n − 1) · s / √n."""
    if not values:
        raise ValueError("no values; give one a seed")
    mean = float(np.mean(values))
    if len(values) < 2:
        return Interval(mean, math.nan, math.nan)
    half = float(
        scipy.stats.t.ppf((1 + confidence) / 2, len(values) - 1) * np.std(values, ddof=1) / math.sqrt(len(values))
    )
    return Interval(mean, mean - half, mean + half)


def p_text(p: float) -> str:
    """A p value as tables show it."""
    if math.isnan(p):
        return "–"
    return "<0.0001" if p < 0.0001 else f"{p:.4f}"

"""Significance against scipy's own tests, worked examples and simulation under the null hypothesis."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from trainer.evaluation.results.significance import (
    confidence_interval,
    fisher_z,
    fisher_z_test,
    holm,
    p_text,
    paired_t_test,
)


def test_paired_t_test_is_scipys() -> None:
    rng = np.random.default_rng(3)
    for n in (2, 7, 300):
        a, b = rng.random(n), rng.random(n)
        ours, theirs = paired_t_test(a, b), stats.ttest_rel(a, b)
        assert ours.statistic == pytest.approx(theirs.statistic, rel=1e-12)
        assert ours.p == pytest.approx(theirs.pvalue, rel=1e-10)
        assert ours.n == n and ours.difference == pytest.approx(a.mean() - b.mean())
    # Negative control: what pairing is for. Unpaired, this difference drowns in the queries' own spread.
    hard = np.linspace(0, 1, 40)
    better = hard + 0.01 + 0.001 * np.sin(np.arange(40))
    assert paired_t_test(better, hard).p < 1e-10 < 0.5 < stats.ttest_ind(better, hard).pvalue


def test_paired_t_test_by_hand() -> None:
    """Differences 1, 2, 3: mean 2, s = 1, t = 2 √3 = 3.4641, two-tailed with 2 degrees of freedom p = 0.0742."""
    found = paired_t_test([2, 4, 6], [1, 2, 3])
    assert found.statistic == pytest.approx(3.4641016)
    # With two degrees of freedom the tail is 1/2 − t / (2 √(2 + t²)).
    assert found.p == pytest.approx(1 - 3.4641016 / math.sqrt(2 + 12), abs=1e-7)
    assert paired_t_test([1, 2, 3], [2, 4, 6]).statistic == -found.statistic


def test_paired_t_test_without_spread() -> None:
    same = paired_t_test([0.5, 0.25], [0.5, 0.25])
    assert (same.statistic, same.p) == (0.0, 1.0)
    shifted = paired_t_test([0.5, 0.75], [0.25, 0.5])
    assert (shifted.statistic, shifted.p) == (math.inf, 0.0)
    with pytest.raises(ValueError, match="same queries twice"):
        paired_t_test([1.0, 2.0], [1.0])
    alone = paired_t_test([1.0], [2.0])  # there is no test of a single query
    assert (alone.difference, alone.n) == (-1, 1) and math.isnan(alone.p) and math.isnan(alone.statistic)


def test_fisher_by_hand() -> None:
    """r 0.5 and 0.3 over 103 pairs: z' 0.54931 and 0.30952, standard error √(2/100), z = 1.69557, p = 0.08997."""
    found = fisher_z_test(0.5, 0.3, n=103)
    assert fisher_z(0.5) == pytest.approx(0.5 * math.log(1.5 / 0.5))
    assert found.statistic == pytest.approx((0.5493061443 - 0.3095196042) / math.sqrt(0.02), rel=1e-9)
    assert found.p == pytest.approx(2 * stats.norm.sf(found.statistic), rel=1e-12)
    assert found.p == pytest.approx(0.08997, abs=1e-4) and found.difference == pytest.approx(0.2)
    assert fisher_z_test(0.5, 0.3, n=303).p < 0.01  # more pairs, more certainty
    assert fisher_z_test(0.4, 0.4, n=10).p == 1 and fisher_z_test(1.0, 1.0, n=10).p == 1
    assert fisher_z_test(1.0, 0.9, n=10).p == 0
    assert math.isnan(fisher_z_test(math.nan, 0.1, n=10).p)
    few = fisher_z_test(0.25, 0.5, n=3)  # there is no test of three pairs
    assert (few.difference, few.n) == (-0.25, 3) and math.isnan(few.p) and math.isnan(few.statistic)
    assert fisher_z_test(0.25, 0.5, n=4).p < 1
    with pytest.raises(ValueError, match="no correlation"):
        fisher_z(1.5)


def test_both_tests_keep_their_level() -> None:
    """Where nothing differs, one comparison in twenty is marked; a test with a wrong spread would not keep that."""
    rng = np.random.default_rng(11)
    marked = sum(paired_t_test(*rng.normal(size=(2, 30))).p < 0.05 for _ in range(2000))
    assert 70 <= marked <= 130

    def correlation() -> float:
        x = rng.normal(size=60)
        return float(np.corrcoef(x, 0.5 * x + rng.normal(size=60))[0, 1])

    marked = sum(fisher_z_test(correlation(), correlation(), n=60).p < 0.05 for _ in range(2000))
    assert 70 <= marked <= 130


def test_holm_by_hand() -> None:
    """Holm (1979): 0.01·4, 0.02·3, then 0.03·2 = 0.06, and 0.04·1 lifted to 0.06."""
    assert holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0] and holm([]) == []
    assert holm([0.03]) == [0.03]
    with_gap = holm([math.nan, 0.02, 0.03])
    assert math.isnan(with_gap[0]) and with_gap[1:] == pytest.approx([0.04, 0.04])
    # Negative control: it is not Bonferroni.
    assert holm([0.01, 0.02])[1] == 0.02 != 0.04


def test_holm_keeps_the_family_wise_error_rate() -> None:
    rng = np.random.default_rng(5)
    draws = rng.random((4000, 8))
    wrong = sum(min(holm(row)) < 0.05 for row in draws.tolist())
    assert 150 <= wrong <= 250
    assert sum(min(row) < 0.05 for row in draws.tolist()) > 1000  # uncorrected


def test_confidence_interval() -> None:
    values = [0.71, 0.73, 0.78]
    found = confidence_interval(values)
    low, high = stats.t.interval(0.95, 2, loc=np.mean(values), scale=stats.sem(values))
    assert (found.low, found.high) == pytest.approx((low, high))
    assert found.half_width == pytest.approx(4.302653 * np.std(values, ddof=1) / math.sqrt(3), rel=1e-6)
    alone = confidence_interval([0.5])
    assert alone.mean == 0.5 and math.isnan(alone.low)
    with pytest.raises(ValueError, match="no values"):
        confidence_interval([])


def test_p_text() -> None:
    assert [p_text(p) for p in (0.03125, 1e-7, math.nan, 1.0)] == ["0.0312", "<0.0001", "–", "1.0000"]

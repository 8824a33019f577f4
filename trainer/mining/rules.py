"""Which of a query's best matches become its hard negatives: pure functions of scores and rules.

The rules, their names and the choice are the same as in sentence-transformers' `mine_hard_negatives`. Matches without
the query's own positives are ranked by score and cut at `range_max`. Matches that a rule on scores refuses are dropped.
Of the rest the first `range_min` are skipped, and `num_negatives` are taken from the top or at random. With several
positives, margins count from the lowest-scoring one, which is the strictest choice.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from data.ground.errors import ConfigError
from data.keyed_random import Purpose, draws, purpose_keys, sample_keys

DROPPED = ("absolute_margin", "relative_margin", "max_score", "min_score")
_WIDE = 10  # matches considered for each negative that is wanted


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Scores are the model's own similarities; a rule of None does not apply."""

    num_negatives: int = 3
    range_min: int = 0  # ranks from 0
    range_max: int = 0  # exclusive; 0: range_min + 10 × num_negatives
    absolute_margin: float | None = None  # score ≤ positive − this
    relative_margin: float | None = None  # score ≤ positive − |positive| × this
    max_score: float | None = None
    min_score: float | None = None
    sampling: str = "top"  # top | random
    seed: int = 0  # for random

    def __post_init__(self) -> None:
        if self.num_negatives < 1:
            raise ConfigError(f"--num-negatives {self.num_negatives} must be at least 1")
        if self.range_min < 0:
            raise ConfigError(f"--range-min {self.range_min} is negative; ranks start at 0")
        if self.last_rank - self.range_min < self.num_negatives:
            raise ConfigError(
                f"--range-min {self.range_min} and --range-max {self.range_max} leave fewer ranks than the "
                f"{self.num_negatives} of --num-negatives; widen the range"
            )
        if self.sampling not in ("top", "random"):
            raise ConfigError(f"--sampling {self.sampling!r} is unknown; use top or random")
        if self.seed < 0:
            raise ConfigError(f"--seed {self.seed} is negative; give 0 or more")
        if self.relative_margin is not None and not 0 <= self.relative_margin < 1:
            raise ConfigError(
                f"--relative-margin {self.relative_margin} must be at least 0 and below 1: 0.05 keeps what scores at "
                "most 95 % of the positive"
            )
        if self.absolute_margin is not None and self.absolute_margin < 0:
            raise ConfigError(f"--absolute-margin {self.absolute_margin} must be at least 0")

    @property
    def last_rank(self) -> int:
        return self.range_max or self.range_min + _WIDE * self.num_negatives


@dataclass(frozen=True)
class Chosen:
    ids: np.ndarray  # int64 [n, num_negatives], best first; -1 after the last
    scores: np.ndarray  # float32 [n, num_negatives]
    dropped: dict[str, int]  # rule -> number of matches that it refused; rules apply in the order of DROPPED


def choose(
    scores: np.ndarray, ids: np.ndarray, *, excluded: np.ndarray, positives: np.ndarray, rows: np.ndarray, rules: Rules
) -> Chosen:
    """The negatives of n queries.

    scores float32, ids int64, excluded bool: [n, k], best first; k must be large enough for `rules.last_rank` matches
    that are not excluded, if there are so many. positives: float32 [n], the lowest score of each query's positives.
    rows: int64 [n], the queries' numbers, which together with the seed decide the random choice.
    """
    left = ~excluded
    left &= np.cumsum(left, axis=1) <= rules.last_rank
    positive = positives[:, None]
    dropped = {}
    for name, refused in (
        ("absolute_margin", _beyond(scores, positive, rules.absolute_margin)),
        ("relative_margin", _beyond(scores, positive, rules.relative_margin, of=np.abs(positive))),
        ("max_score", scores > rules.max_score if rules.max_score is not None else None),
        ("min_score", scores < rules.min_score if rules.min_score is not None else None),
    ):
        dropped[name] = 0
        if refused is not None:
            refused = refused & left
            dropped[name] = int(refused.sum())
            left &= ~refused
    left &= np.cumsum(left, axis=1) > rules.range_min
    if rules.sampling == "random":
        keys = sample_keys(rules.seed, epochs=np.zeros_like(rows), sources=np.zeros_like(rows), samples=rows)
        bits = draws(purpose_keys(keys, Purpose.NEGATIVES)[:, None], ids)  # [n, k], by passage: tie order has no effect
        order = np.lexsort((bits, ~left), axis=1)[:, : rules.num_negatives]
        drawn = np.zeros_like(left)
        np.put_along_axis(drawn, order, True, axis=1)
        left &= drawn
    found = np.full((len(scores), rules.num_negatives), -1, np.int64)
    found_scores = np.zeros(found.shape, np.float32)
    places = np.cumsum(left, axis=1) - 1
    row, column = np.nonzero(left & (places < rules.num_negatives))
    found[row, places[row, column]] = ids[row, column]
    found_scores[row, places[row, column]] = scores[row, column]
    return Chosen(found, found_scores, dropped)


def _beyond(
    scores: np.ndarray, positive: np.ndarray, margin: float | None, *, of: np.ndarray | float = 1.0
) -> np.ndarray | None:
    return None if margin is None else scores > positive - np.float32(margin) * of

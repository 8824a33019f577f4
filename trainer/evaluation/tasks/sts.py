"""Semantic textual similarity: Spearman's rank correlation of cosine with human scores.

Cosine is the measure whatever a model was trained with, as in SentEval and the paper's STS tables. A file of several
subsets is reported both as a whole ("all": the pairs concatenated) and as the mean over its subsets, because the
literature uses both and they differ by points.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import scipy  # its submodules are loaded where they are used: scipy.stats takes half a second

from data.ground.errors import ConfigError
from trainer.evaluation.encoding.across import Searched, sides
from trainer.evaluation.encoding.encode import EncodeTexts
from trainer.evaluation.tasks.inputs import json_lines, text_lines, text_of, whole_number

log = logging.getLogger(__name__)

_MOST_ROWS = 10**9
_JSON_NAMES = (("sentence1", "sentence2"), ("text1", "text2"), ("s1", "s2"))


@dataclass(frozen=True)
class Subset:
    """Rows [start, start + rows) of a task."""

    name: str
    start: int
    rows: int


@dataclass(frozen=True)
class STSTask:
    """Sentence pairs with human scores. The scores may have any scale, because only their ranks count."""

    name: str
    pairs: tuple[tuple[str, str], ...]
    scores: tuple[float, ...]
    subsets: tuple[Subset, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.pairs) == len(self.scores)
        for subset in self.subsets:
            if subset.start < 0 or subset.rows < 2 or subset.start + subset.rows > len(self.pairs):
                raise ConfigError(
                    f"subset {subset.name!r} of {self.name!r} covers rows {subset.start} to "
                    f"{subset.start + subset.rows} of {len(self.pairs)}; fix the subsets file"
                )


def read_sts(path: str | Path, *, name: str | None = None, subsets: str | Path | None = None) -> STSTask:
    """Read score, sentence, sentence: TSV without a header, or jsonl with `score`, `sentence1`, `sentence2`.

    A file whose name ends in .gz is read through gzip. `subsets`: a TSV with the header dataset, subset,
    first_row_0based, rows; its lines for other data sets are skipped.
    """
    path = Path(path)
    name = name or path.name.split(".")[0]
    if not path.is_file():
        raise ConfigError(f"STS file {path} does not exist; give a TSV or jsonl file of scored sentence pairs")
    scores, pairs = [], []
    for where, score, first, second in _jsonl_rows(path) if ".jsonl" in path.suffixes else _tsv_rows(path):
        if not first.strip() or not second.strip():
            raise ConfigError(f"{where} has an empty sentence; remove the line or fill it in")
        scores.append(score)
        pairs.append((first, second))
    if len(pairs) < 2:
        raise ConfigError(f"{path} holds {len(pairs)} sentence pairs; a correlation needs two at least")
    return STSTask(name, tuple(pairs), tuple(scores), _read_subsets(Path(subsets), name) if subsets else ())


def evaluate_sts(
    encode_texts: EncodeTexts,
    tasks: Sequence[STSTask],
    *,
    searched: Sequence[Searched] | None = None,
    on_cosines: Callable[[STSTask, Searched, np.ndarray], None] | None = None,
) -> dict[str, dict[Searched, dict[str, float]]]:
    """Task name -> size -> metrics, for all tasks and all sizes from one pass.

    Metrics: `spearman` and `pearson` over all pairs; with subsets also `spearman/<subset>` and `spearman_mean`, the
    plain mean over subsets. A correlation that is not defined (all cosines equal) is NaN.
    `searched`: the sizes to score; default: all sizes that `encode_texts` gives. In a pair of sizes, the first size is
    used for the first sentences and the second size for the second; the reverse is another pair.
    `on_cosines` is called with the cosines, [pairs], of every task and size.
    """
    vectors = encode_texts([text for task in tasks for pair in task.pairs for text in pair])
    results: dict[str, dict[Searched, dict[str, float]]] = {task.name: {} for task in tasks}
    for size in vectors if searched is None else searched:
        first, second = (vectors[side] for side in sides(size))
        start = 0
        for task in tasks:
            rows = slice(start, start + 2 * len(task.pairs))
            start = rows.stop
            cosines = cosine_of_pairs(first[rows][0::2], second[rows][1::2])
            if on_cosines is not None:
                on_cosines(task, size, cosines)
            results[task.name][size] = score_sts(task, cosines)
    return results


def score_sts(task: STSTask, similarities: np.ndarray) -> dict[str, float]:
    """The metrics of one task from its pairs' similarities, [pairs]."""
    gold = np.asarray(task.scores, np.float64)
    metrics = {"spearman": spearman(similarities, gold), "pearson": pearson(similarities, gold)}
    parts = []
    for subset in task.subsets:
        rows = slice(subset.start, subset.start + subset.rows)
        parts.append(spearman(similarities[rows], gold[rows]))
        metrics[f"spearman/{subset.name}"] = parts[-1]
    if parts:
        metrics["spearman_mean"] = float(np.mean(parts))
    return metrics


def cosine_of_pairs(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Cosine of row i with row i, float64 [n]; 0 where a vector is all zeros. Inputs: [n, dim]."""
    a, b = first.astype(np.float64), second.astype(np.float64)
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    return np.einsum("nd,nd->n", a, b) / np.where(norms > 0, norms, 1.0)


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Rank correlation with tied ranks averaged; NaN where one side is constant."""
    return _correlation(scipy.stats.spearmanr, a, b)


def pearson(a: np.ndarray, b: np.ndarray) -> float:
    """Linear correlation; NaN where one side is constant."""
    return _correlation(scipy.stats.pearsonr, a, b)


def _correlation(function: Callable, a: np.ndarray, b: np.ndarray) -> float:
    if np.ptp(a) == 0 or np.ptp(b) == 0 or not (np.isfinite(a).all() and np.isfinite(b).all()):
        return math.nan
    return float(function(a, b).statistic)


def _tsv_rows(path: Path) -> Iterator[tuple[str, float, str, str]]:
    # Quotation marks are part of the sentences, so the csv module's rules do not apply; nor do Unicode line breaks.
    for number, line in text_lines(path, "STS file"):
        columns = line.rstrip("\r\n").split("\t")
        if columns == [""]:
            continue
        where = f"{path} line {number}"
        if len(columns) != 3:
            raise ConfigError(f"{where} has {len(columns)} tab-separated columns; it needs score, sentence, sentence")
        yield where, _number(columns[0], where), columns[1], columns[2]


def _jsonl_rows(path: Path) -> Iterator[tuple[str, float, str, str]]:
    for where, row in json_lines(path, "STS file"):
        names = next((pair for pair in _JSON_NAMES if set(pair) <= set(row)), None)
        if names is None or "score" not in row:
            raise ConfigError(f"{where} lacks one of the keys score, sentence1, sentence2; add it")
        yield where, _number(row["score"], where), text_of(row, names[0], where), text_of(row, names[1], where)


def _number(value: object, where: str) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError(f"{where} has the score {value!r:.60}, which is no number; fix or remove the line")
    return number


def _read_subsets(path: Path, dataset: str) -> tuple[Subset, ...]:
    if not path.is_file():
        raise ConfigError(f"subsets file {path} does not exist; give a TSV of dataset, subset, first row and rows")
    subsets: dict[str, Subset] = {}
    for number, line in text_lines(path, "subsets file"):
        columns = line.rstrip("\r\n").split("\t")
        if number == 1 or columns == [""]:
            continue
        first, rows = (whole_number(each, most=_MOST_ROWS) for each in (*columns, "", "", "", "")[2:4])
        if len(columns) != 4 or first is None or rows is None:
            raise ConfigError(f"{path} line {number} is not dataset, subset, first row, rows in four columns; fix it")
        if columns[0] != dataset:
            continue
        if columns[1] in subsets:
            raise ConfigError(f"{path} line {number} gives the subset {columns[1]!r} again; remove one of them")
        subsets[columns[1]] = Subset(columns[1], first, rows)
    return tuple(subsets.values())

"""Semantic textual similarity: Spearman's rank correlation of cosine with people's scores (SPEC.md, Evaluation).

Cosine is the measure whatever a model was trained with, as in SentEval and the paper's STS tables. A file of several
subsets is reported as a whole ("all": the pairs concatenated) and as the mean over its subsets, because the literature
uses both and they differ by points.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy import stats

from models.sizes import Size
from trainer.config import ConfigError
from trainer.evaluation.encode import EncodeTexts

log = logging.getLogger(__name__)

_JSON_NAMES = (("sentence1", "sentence2"), ("text1", "text2"), ("s1", "s2"))


@dataclass(frozen=True)
class Subset:
    """Rows [start, start + rows) of a task."""

    name: str
    start: int
    rows: int


@dataclass(frozen=True)
class STSTask:
    """Sentence pairs with people's scores, on any scale: only their ranks count."""

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
                    f"{subset.start + subset.rows} of {len(self.pairs)}; mend the subsets file"
                )


def read_sts(path: str | Path, *, name: str | None = None, subsets: str | Path | None = None) -> STSTask:
    """Read score, sentence, sentence: TSV without a header, or jsonl with `score`, `sentence1`, `sentence2`.

    `subsets`: a TSV with the header dataset, subset, first_row_0based, rows; lines of other data sets are skipped.
    """
    path = Path(path)
    name = name or path.name.split(".")[0]
    if not path.is_file():
        raise ConfigError(f"STS file {path} does not exist; give a TSV or jsonl file of scored sentence pairs")
    scores, pairs = [], []
    for number, score, first, second in _jsonl_rows(path) if ".jsonl" in path.suffixes else _tsv_rows(path):
        if not first.strip() or not second.strip():
            raise ConfigError(f"{path} line {number} has an empty sentence; remove the line or fill it in")
        scores.append(score)
        pairs.append((first, second))
    if len(pairs) < 2:
        raise ConfigError(f"{path} holds {len(pairs)} sentence pairs; a correlation needs two at least")
    return STSTask(name, tuple(pairs), tuple(scores), _read_subsets(Path(subsets), name) if subsets else ())


def evaluate_sts(
    encode_texts: EncodeTexts,
    tasks: Sequence[STSTask],
    *,
    on_cosines: Callable[[STSTask, Size, np.ndarray], None] | None = None,
) -> dict[str, dict[Size, dict[str, float]]]:
    """Task name -> size -> metrics, all tasks and all sizes from one pass.

    Metrics: `spearman` and `pearson` over all pairs; with subsets also `spearman/<subset>` and `spearman_mean`, the
    plain mean over subsets. A correlation that is not defined (all cosines equal) is NaN.
    `on_cosines` sees the pairs' cosines, [pairs], of every task and size.
    """
    vectors = encode_texts([text for task in tasks for pair in task.pairs for text in pair])
    results: dict[str, dict[Size, dict[str, float]]] = {task.name: {} for task in tasks}
    for size, all_rows in vectors.items():
        start = 0
        for task in tasks:
            rows = all_rows[start : start + 2 * len(task.pairs)]
            start += len(rows)
            cosines = cosine_of_pairs(rows[0::2], rows[1::2])
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
    return _correlation(stats.spearmanr, a, b)


def pearson(a: np.ndarray, b: np.ndarray) -> float:
    """Linear correlation; NaN where one side is constant."""
    return _correlation(stats.pearsonr, a, b)


def _correlation(function: Callable, a: np.ndarray, b: np.ndarray) -> float:
    if np.ptp(a) == 0 or np.ptp(b) == 0 or not (np.isfinite(a).all() and np.isfinite(b).all()):
        return math.nan
    return float(function(a, b).statistic)


def _tsv_rows(path: Path) -> Iterator[tuple[int, float, str, str]]:
    # Quotation marks are part of the sentences, so the csv module's rules do not apply; nor do Unicode line breaks.
    with path.open(encoding="utf-8", newline="\n") as lines:
        for number, line in enumerate(lines, 1):
            columns = line.rstrip("\r\n").split("\t")
            if columns == [""]:
                continue
            if len(columns) != 3:
                raise ConfigError(
                    f"{path} line {number} has {len(columns)} tab-separated columns; it needs score, sentence, sentence"
                )
            yield number, _number(columns[0], path, number), columns[1], columns[2]


def _jsonl_rows(path: Path) -> Iterator[tuple[int, float, str, str]]:
    with path.open(encoding="utf-8", newline="\n") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ConfigError(f"{path} line {number} is not JSON ({error}); mend or remove it") from None
            names = next((pair for pair in _JSON_NAMES if isinstance(row, dict) and set(pair) <= set(row)), None)
            if names is None or "score" not in row:
                raise ConfigError(f"{path} line {number} lacks one of the keys score, sentence1, sentence2; add it")
            yield number, _number(row["score"], path, number), str(row[names[0]]), str(row[names[1]])


def _number(value: object, path: Path, line: int) -> float:
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError(f"{path} line {line} has the score {value!r}, which is no number; mend or remove the line")
    return number


def _read_subsets(path: Path, dataset: str) -> tuple[Subset, ...]:
    if not path.is_file():
        raise ConfigError(f"subsets file {path} does not exist; give a TSV of dataset, subset, first row and rows")
    subsets = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()[1:], 2):
        columns = line.split("\t")
        if len(columns) != 4 or not (columns[2].isdigit() and columns[3].isdigit()):
            raise ConfigError(f"{path} line {number} is not dataset, subset, first row, rows in four columns; mend it")
        if columns[0] == dataset:
            subsets.append(Subset(columns[1], int(columns[2]), int(columns[3])))
    return tuple(subsets)

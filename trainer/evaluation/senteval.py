"""SentEval transfer: how well a linear classifier does on frozen embeddings (Conneau & Kiela, 2018, arXiv:1803.05449).

The classifier is scikit-learn's L2-regularised logistic regression. Its regularisation strength is chosen from
`STRENGTHS` without sight of the test data:
- MR, CR, SUBJ and MPQA have no split, so they use 10-fold cross-validation. In each fold, 5-fold cross-validation on
  the training part chooses the strength. The score is the mean accuracy of the folds.
- SST2 chooses the strength on its development set, TREC and MRPC by 5-fold cross-validation on their training data.
- MRPC's features of a pair (u, v) are |u − v| and u · v, element by element; F1 of "equivalent" is given too.
Folds are stratified and drawn from `seed`. Features are standardised by the training part's mean and standard
deviation.

Files are SentEval's own, as its download script writes them (docs/evaluation.md lists the names).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data.ground.errors import ConfigError
from data.ground.files import reading
from models.sizes import Size
from trainer.evaluation.encoding.encode import EncodeTexts
from trainer.evaluation.results.report import Record

STRENGTHS = (0.001, 0.01, 0.1, 1.0)  # scikit-learn's C, the inverse of the penalty
_BINARY = {
    "MR": ("MR", "rt-polarity.neg", "rt-polarity.pos"),
    "CR": ("CR", "custrev.neg", "custrev.pos"),
    "SUBJ": ("SUBJ", "subj.subjective", "subj.objective"),
    "MPQA": ("MPQA", "mpqa.neg", "mpqa.pos"),
}
TASKS = (*_BINARY, "SST2", "TREC", "MRPC")


@dataclass(frozen=True)
class Part:
    """Texts, or pairs of texts, with class numbers."""

    first: tuple[str, ...]
    labels: tuple[int, ...]
    second: tuple[str, ...] = ()


@dataclass(frozen=True)
class TransferTask:
    """A task's data. Without `test`, the score is cross-validated over `train`; without `dev`, so is the strength."""

    name: str
    train: Part
    dev: Part | None = None
    test: Part | None = None


def read_task(folder: str | Path, name: str) -> TransferTask:
    """One of TASKS from SentEval's folder of downstream data."""
    folder = Path(folder)
    if name in _BINARY:
        subfolder, negative, positive = _BINARY[name]
        texts: list[str] = []
        labels: list[int] = []
        for label, file in enumerate((negative, positive)):
            lines = _lines(folder / subfolder / file)
            texts += lines
            labels += [label] * len(lines)
        return TransferTask(name, Part(tuple(texts), tuple(labels)))
    if name == "SST2":
        base = folder / "SST" / "binary"
        parts = [_sst(base / f"sentiment-{part}") for part in ("train", "dev", "test")]
        return TransferTask(name, *parts)
    if name == "TREC":
        train, test = (_trec(folder / "TREC" / file) for file in ("train_5500.label", "TREC_10.label"))
        classes = {label: number for number, label in enumerate(sorted({label for label, _ in train}))}
        if strange := {label for label, _ in test} - classes.keys():
            raise ConfigError(f"{folder}/TREC/TREC_10.label has the class {min(strange)!r}, which training lacks")
        both = [
            Part(tuple(text for _, text in rows), tuple(classes[label] for label, _ in rows)) for rows in (train, test)
        ]
        return TransferTask(name, both[0], test=both[1])
    if name == "MRPC":
        parts = [_mrpc(folder / "MRPC" / f"msr_paraphrase_{part}.txt") for part in ("train", "test")]
        return TransferTask(name, parts[0], test=parts[1])
    raise ConfigError(f"SentEval task {name!r} is unknown; choose from {', '.join(TASKS)}")


def evaluate_transfer(
    encode_texts: EncodeTexts,
    tasks: Sequence[TransferTask],
    *,
    name_of: Callable[[Size], str] = str,
    method: str = "trained",
    seed: int = 0,
) -> list[Record]:
    """Accuracy (and F1 for pairs) of every task at every size, all from one pass over the texts."""
    parts = [part for task in tasks for part in (task.train, task.dev, task.test) if part]
    vectors = encode_texts([text for part in parts for text in (*part.first, *part.second)])
    records = []
    for size, rows in vectors.items():
        start = 0
        features: dict[int, np.ndarray] = {}
        for part in parts:
            first = rows[start : start + len(part.first)].astype(np.float64)
            start += len(part.first)
            if part.second:
                second = rows[start : start + len(part.second)].astype(np.float64)
                start += len(part.second)
                first = np.concatenate([np.abs(first - second), first * second], axis=1)
            features[id(part)] = first
        for task in tasks:
            for metric, value in score_task(task, features, seed=seed).items():
                records.append(
                    Record(
                        method,
                        task.name,
                        "transfer",
                        name_of(size),
                        size.layers,
                        size.dim,
                        metric,
                        value,
                        feed_forward=size.feed_forward,
                    )
                )
    return records


def score_task(task: TransferTask, features: dict[int, np.ndarray], *, seed: int = 0) -> dict[str, float]:
    """The task's metrics. `features`: id of a part -> [texts, width]."""
    from sklearn.metrics import f1_score

    x, y = features[id(task.train)], np.array(task.train.labels)
    if task.test is None:
        scores = []
        for fold, (inside, held) in enumerate(folds(y, 10, seed=seed)):
            strength = _best_strength(x[inside], y[inside], seed=seed + fold + 1)
            scores.append(_fitted(x[inside], y[inside], strength).score(x[held], y[held]))
        return {"accuracy": float(np.mean(scores))}
    if task.dev is not None:
        dev_x, dev_y = features[id(task.dev)], np.array(task.dev.labels)
        strength = STRENGTHS[int(np.argmax([_fitted(x, y, each).score(dev_x, dev_y) for each in STRENGTHS]))]
    else:
        strength = _best_strength(x, y, seed=seed)
    test_y = np.array(task.test.labels)
    predicted = _fitted(x, y, strength).predict(features[id(task.test)])
    metrics = {"accuracy": float(np.mean(predicted == test_y))}
    if task.train.second:
        metrics["f1"] = float(f1_score(test_y, predicted, zero_division=0.0))
    return metrics


def folds(labels: np.ndarray, count: int, *, seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Stratified folds, (rows to train on, rows held out): each class is spread evenly over the folds."""
    from sklearn.model_selection import StratifiedKFold

    if min(np.bincount(labels)[np.unique(labels)]) < count:
        raise ConfigError(f"a class has fewer than {count} texts, too few for {count}-fold cross-validation")
    return list(StratifiedKFold(count, shuffle=True, random_state=seed).split(labels, labels))


def _best_strength(x: np.ndarray, y: np.ndarray, *, seed: int) -> float:
    """The strength with the best 5-fold cross-validation accuracy; a tie goes to the most regularised classifier."""
    parts = folds(y, 5, seed=seed)
    accuracies = [
        np.mean([_fitted(x[inside], y[inside], strength).score(x[held], y[held]) for inside, held in parts])
        for strength in STRENGTHS
    ]
    return STRENGTHS[int(np.argmax(accuracies))]


def _fitted(x: np.ndarray, y: np.ndarray, strength: float) -> Any:
    """scikit-learn's logistic regression, fitted on standardised features."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    return make_pipeline(StandardScaler(), LogisticRegression(C=strength, max_iter=1000)).fit(x, y)


def _lines(path: Path) -> list[str]:
    if not path.is_file():
        raise ConfigError(f"{path} does not exist; give SentEval's folder of downstream data")
    with reading(path):
        data = path.read_bytes()
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        text = data.decode("latin-1")  # MR, CR and SUBJ were published in it
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    if not lines:
        raise ConfigError(f"{path} is empty; fetch SentEval's data again")
    return lines


def _sst(path: Path) -> Part:
    rows = [line.rsplit("\t", 1) for line in _lines(path)]
    for number, row in enumerate(rows, 1):
        if len(row) != 2 or row[1] not in ("0", "1"):
            raise ConfigError(f"{path} line {number} is not sentence, tab, 0 or 1; fix or remove it")
    return Part(tuple(row[0] for row in rows), tuple(int(row[1]) for row in rows))


def _trec(path: Path) -> list[tuple[str, str]]:
    rows = []
    for number, line in enumerate(_lines(path), 1):
        label, space, question = line.partition(" ")
        coarse, colon, _ = label.partition(":")
        if not (space and colon):
            raise ConfigError(f"{path} line {number} is not CLASS:fine question; fix or remove it")
        rows.append((coarse, question))
    return rows


def _mrpc(path: Path) -> Part:
    rows = [line.split("\t") for line in _lines(path)[1:]]
    for number, row in enumerate(rows, 2):
        if len(row) != 5 or row[0] not in ("0", "1"):
            raise ConfigError(f"{path} line {number} is not Quality, two ids and two sentences; fix or remove it")
    return Part(tuple(r[3] for r in rows), tuple(int(r[0]) for r in rows), tuple(r[4] for r in rows))

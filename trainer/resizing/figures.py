"""The figures of `trainer.resize`: what each size scores by each method, and what a score costs in milliseconds."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from data.ground.files import file_name
from models.sizes import Size
from trainer.evaluation.results.report import add_legend, new_axes, plot_score_by_size, save_figure
from trainer.resizing.table import AS_IT_IS, CLOSED_FORM, RESIZED, Row

_METHODS = {"resized": RESIZED, "closed form, no training": CLOSED_FORM, "truncated as it is": AS_IT_IS}


def draw(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Two figures for each task with scores: by size, and over the milliseconds of one query. Returns their paths."""
    written = []
    costs = {row.shape: row.milliseconds for row in rows}
    for task, of_task in itertools.groupby(rows, key=lambda row: row.task):
        curves, name = _curves(list(of_task)), file_name(task)
        if not curves:
            continue
        written.append(plot_score_by_size(curves, folder / f"{name}_by_size.png", title=task, ylabel="score"))
        written.append(_plot_by_milliseconds(curves, costs, folder / f"{name}_by_milliseconds.png", title=task))
    return written


def _curves(rows: Sequence[Row]) -> dict[str, dict[Size, float]]:
    """method -> size -> score, of the methods that were evaluated."""
    curves: dict[str, dict[Size, float]] = {}
    for label, column in _METHODS.items():
        found = {row.shape: getattr(row, column) for row in rows}
        if curve := {size: score for size, score in found.items() if score is not None}:
            curves[label] = curve
    return curves


def _plot_by_milliseconds(
    curves: dict[str, dict[Size, float]], costs: dict[Size, float], path: Path, *, title: str
) -> Path:
    """One line per method through its sizes; the points of the first method carry the sizes' names."""
    figure, axes = new_axes()
    for (method, curve), marker in zip(curves.items(), "osD"):
        points = sorted((costs[size], score) for size, score in curve.items())
        axes.plot(*zip(*points), marker=marker, markersize=5, label=method)
    for size, score in next(iter(curves.values())).items():
        text = f"{size}".replace("x", "×")
        axes.annotate(text, (costs[size], score), fontsize=7, xytext=(4, 5), textcoords="offset points")
    axes.set_xlabel("milliseconds a query")
    axes.set_ylabel("score")
    axes.set_title(title)
    add_legend(axes)
    return save_figure(figure, path)

"""A study's figures, from the results that trainer/experiments/collected.py read.

- For each task, the score by size of every method.
- For each task, quality over dimensions: at the deepest layer if the grid was evaluated, else along the ladder.
- For each task, quality over latency, if it was measured.
- For each ablation, the differences by size over all tasks.
- Heat maps of arm − baseline and of ablations over layers × dimensions, if both arms have the grid.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import cycle
from pathlib import Path
from typing import Any

from data.ground.files import file_name
from models.sizes import Size
from trainer.evaluation.results.comparison import Sample
from trainer.evaluation.results.report import (
    HEADLINE_METRICS,
    METRIC_LABELS,
    add_legend,
    new_axes,
    plot_heat_map,
    plot_score_by_size,
    save_figure,
)
from trainer.experiments.collected import Collected
from trainer.experiments.plan import Study

Curve = list[tuple[float, float, float]]
"""x, y and half of the interval of y (NaN: none), in the order of x."""


def draw_figures(study: Study, collected: Collected, folder: Path) -> list[Path]:
    """Draw all figures and return their files, in the order of the report. Files of an earlier report are removed."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.png"):
        old.unlink()
    written: list[Path] = []
    for task, kind in collected.kinds.items():
        label, stem = METRIC_LABELS[HEADLINE_METRICS[kind]], file_name(task)
        scores = {arm: _sizes(study, collected, arm, task) for arm in study.arms}
        scores = {arm: row for arm, row in scores.items() if row}
        ladder = {arm: {s: v.mean for s, v in row.items() if s in study.ladder.sizes} for arm, row in scores.items()}
        ladder = {arm: row for arm, row in ladder.items() if row}  # an arm's own ladder may share no size with it
        levels = {
            name: by_column["average"].mean
            for (name, of_task, metric), by_column in collected.references.items()
            if (of_task, metric) == (task, HEADLINE_METRICS[kind]) and len(by_column) == 1 and "average" in by_column
        }
        path = folder / f"{stem}_by_size.png"
        names = study.ladder.names
        written.append(plot_score_by_size(ladder, path, title=task, ylabel=label, names=names, levels=levels))
        written.append(_by_dimension(study, scores, folder / f"{stem}_by_dimension.png", title=task, label=label))
        if collected.latency_ms:
            path = folder / f"{stem}_by_latency.png"
            written.append(_by_latency(study, collected, scores, path, title=task, label=label))
        written += _heat_maps(study, scores, folder, task=task, label=label)
    written += _ablations(study, collected, folder)
    return written


def plot_curves(
    curves: Mapping[str, Curve], path: Path, *, title: str, xlabel: str, ylabel: str, log_x: bool = False
) -> Path:
    """One line per curve, with error bars at the points that have an interval."""
    figure, axes = new_axes()
    # Ten colours, then the same ones dashed.
    styles = cycle([style for style in ("-", "--", ":", "-.") for _ in range(10)])
    for (name, points), marker, style in zip(curves.items(), "osD^vPX*" * len(curves), styles):
        xs, ys, errors = (list(part) for part in zip(*points))
        axes.errorbar(
            xs, ys, yerr=errors, marker=marker, linestyle=style, markersize=5, linewidth=1.4, capsize=2, label=name
        )
    if log_x:
        axes.set_xscale("log", base=2)
        ticks = sorted({x for points in curves.values() for x, _, _ in points})
        axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
        axes.minorticks_off()
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.set_title(title)
    add_legend(axes)
    return save_figure(figure, path)


def _sizes(study: Study, collected: Collected, arm: str, task: str) -> dict[Size, Sample]:
    metric = HEADLINE_METRICS[collected.kinds[task]]
    by_column = collected.samples.get((arm, task, metric), {})
    return {size: sample for size, sample in sorted_sizes(by_column) if study.ladder.full.dim >= size.dim}


def sorted_sizes(by_column: Mapping[Any, Sample]) -> list[tuple[Size, Sample]]:
    return sorted((column, sample) for column, sample in by_column.items() if isinstance(column, Size))


def _points(row: Mapping[Size, Sample], x: Callable[[Size], float]) -> Curve:
    return sorted((x(size), sample.mean, sample.interval.half_width) for size, sample in row.items())


def _by_dimension(
    study: Study, scores: Mapping[str, Mapping[Size, Sample]], path: Path, *, title: str, label: str
) -> Path:
    whole = study.ladder.full.body
    curves = {}
    for arm, row in scores.items():
        deepest = {size: sample for size, sample in row.items() if size.body == whole}
        on_ladder = {size: sample for size, sample in row.items() if size in study.ladder.sizes}
        # Separate models have one size each, and their depth grows with their width.
        shared = len(deepest) > 1 or not study.grid
        if points := _points(deepest if len(deepest) > 1 else on_ladder, lambda size: size.dim):
            curves[arm if shared else f"{arm} (its own depths)"] = points
    what = f"dimensions, at {whole.layers} layers" if study.grid else "dimensions, along the ladder"
    return plot_curves(curves, path, title=title, xlabel=what, ylabel=label, log_x=True)


def _by_latency(
    study: Study,
    collected: Collected,
    scores: Mapping[str, Mapping[Size, Sample]],
    path: Path,
    *,
    title: str,
    label: str,
) -> Path:
    measured = collected.latency_ms
    curves = {
        arm: _points(
            {s: v for s, v in row.items() if s in measured and s in study.ladder.sizes}, lambda size: measured[size]
        )
        for arm, row in scores.items()
    }
    curves = {arm: points for arm, points in curves.items() if points}
    return plot_curves(curves, path, title=title, xlabel="milliseconds to encode one query", ylabel=label)


def _heat_maps(
    study: Study, scores: Mapping[str, Mapping[Size, Sample]], folder: Path, *, task: str, label: str
) -> list[Path]:
    if not study.grid:
        return []
    pairs = [(arm, study.baseline) for arm in scores if arm != study.baseline]
    pairs += [(each.with_arm, each.without_arm) for each in study.ablations]
    grid_cells = len(study.ladder.grid)
    written = []
    for first, second in dict.fromkeys(pairs):
        a, b = scores.get(first, {}), scores.get(second, {})
        common = [size for size in a if size in b]
        if len(common) < grid_cells:  # an arm of single sizes has only the ladder
            continue
        path = folder / f"{file_name(task)}_delta_{file_name(first)}_minus_{file_name(second)}.png"
        values = {size: a[size].mean - b[size].mean for size in common}
        title = f"{task}: {first} − {second}"
        written.append(plot_heat_map(values, path, title=title, label=f"Δ {label}", difference=True))
    return written


def _ablations(study: Study, collected: Collected, folder: Path) -> list[Path]:
    written = []
    for ablation in study.ablations:
        curves: dict[str, dict[Size, float]] = {}
        for task in collected.kinds:
            a = _sizes(study, collected, ablation.with_arm, task)
            b = _sizes(study, collected, ablation.without_arm, task)
            common = [size for size in study.ladder if size in a and size in b]
            if common:
                curves[task] = {size: a[size].mean - b[size].mean for size in common}
        if curves:
            path = folder / f"ablation_{file_name(ablation.name)}.png"
            title = f"{ablation.name}: {ablation.with_arm} − {ablation.without_arm}"
            names = study.ladder.names
            written.append(
                plot_score_by_size(curves, path, title=title, ylabel="difference", names=names, levels={"none": 0.0})
            )
    return written

"""Results as records, and records as tables and figures.

A record is one number (tidy data), so that later tables (studies, significance) select and pivot instead of walking
nested dictionaries. The figures are the score by size for each method, and heat maps of layers × dimensions.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data.ground.files import file_name
from models.sizes import Size
from trainer.evaluation.results.significance import p_text

METRIC_LABELS = {
    "ndcg_cut_10": "nDCG@10",
    "recip_rank": "MRR",
    "recip_rank_10": "MRR@10",
    "map": "MAP",
    "recall_100": "Recall@100",
    "recall_1000": "Recall@1000",
    "spearman": "Spearman",
    "spearman_mean": "Spearman, mean of subsets",
    "pearson": "Pearson",
    "accuracy": "accuracy",
    "f1": "F1",
}
SPEARMAN, NDCG = "spearman", "ndcg_cut_10"
# The texts that are encoded at the two sizes of a pair.
_SIDES = {SPEARMAN: ("first sentences", "second sentences"), NDCG: ("queries", "documents")}
HEADLINE_METRICS = {"sts": SPEARMAN, "retrieval": NDCG, "transfer": "accuracy"}


@dataclass(frozen=True)
class Record:
    """One number. A method without sizes (BM25) has size "", layers 0 and dim 0.

    A record of queries against documents of another depth (--across-depths) also has the documents' size; `size` is
    then the queries' size, and both are equally wide.
    """

    method: str
    task: str
    kind: str  # "sts" | "retrieval" | "transfer"
    size: str  # the size's name in its ladder
    layers: int
    dim: int
    metric: str
    value: float
    document_size: str = ""
    document_layers: int = 0
    feed_forward: float = 1.0  # the fraction of the size's feed-forwards; documents of another depth have whole ones

    @property
    def shape(self) -> Size:
        """The size, of methods that have sizes."""
        return Size(self.layers, self.dim, self.feed_forward)

    def as_json(self) -> dict[str, Any]:
        """The record as JSON. An undefined value is null, because JSON has no NaN.

        The keys of the documents' size are left out if it is the queries' size, and a fraction if it is 1.
        """
        values = {**dataclasses.asdict(self), "value": None if math.isnan(self.value) else self.value}
        return _without_defaults(values)


@dataclass(frozen=True)
class Verdict:
    """A test of one size's headline metric. `p` is NaN if there is no test. `mark`: † better, ‡ worse."""

    method: str
    task: str
    layers: int
    dim: int
    metric: str
    baseline: str  # as it is named in a sentence
    difference: float
    p: float
    mark: str
    document_layers: int = 0
    feed_forward: float = 1.0

    def as_json(self) -> dict[str, Any]:
        values = dataclasses.asdict(self)
        values = {key: None if isinstance(each, float) and math.isnan(each) else each for key, each in values.items()}
        return _without_defaults(values)


def _without_defaults(values: dict[str, Any]) -> dict[str, Any]:
    """Without the documents' size if it is the queries', and without the fraction of whole feed-forwards."""
    if values["feed_forward"] == 1:
        del values["feed_forward"]
    if values["document_layers"]:
        return values
    return {key: value for key, value in values.items() if not key.startswith("document_")}


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]], *, text_columns: int = 1) -> str:
    """A Markdown table that is also readable in a terminal: cells are padded, and numbers are right-aligned."""
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(3, *(len(line[i]) for line in lines)) for i in range(len(header))]

    def render(cells: Sequence[str]) -> str:
        padded = [c.ljust(w) if i < text_columns else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths))]
        return "| " + " | ".join(padded) + " |"

    rule = ["-" * w if i < text_columns else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    return "\n".join([render(lines[0]), render(rule), *(render(line) for line in lines[1:])]) + "\n"


def results_markdown(records: Sequence[Record], verdicts: Sequence[Verdict] = ()) -> str:
    """A heading and a table per task. Rows are methods and sizes; columns are metrics, and p if sizes were tested."""
    parts = []
    for task in _in_order(record.task for record in records):
        of_task = [record for record in records if record.task == task]
        metrics = [m for m in _in_order(record.metric for record in of_task) if "/" not in m]
        values = {(r.method, r.size, r.layers, r.dim, r.feed_forward, r.metric): r.value for r in of_task}
        tests = {(v.method, v.layers, v.dim, v.feed_forward): v for v in verdicts if v.task == task}
        fractions = any(r.feed_forward != 1 for r in of_task)  # a column only where they differ
        rows = []
        for method, size, *of_size in _in_order((r.method, r.size, r.layers, r.dim, r.feed_forward) for r in of_task):
            numbers = [_number(values.get((method, size, *of_size, metric))) for metric in metrics]
            shape = [f"{each:g}" if of_size[0] else "" for each in of_size[: 3 if fractions else 2]]
            if test := tests.get((method, *of_size)):
                numbers[metrics.index(test.metric)] += test.mark
            numbers += [p_text(test.p if test else math.nan)] if tests else []
            rows.append([method, size or "–", *shape, *numbers])
        columns = ["layers", "dim", *(["feed-forward"] if fractions else [])]
        header = ["method", "size", *columns, *(METRIC_LABELS.get(metric, metric) for metric in metrics)]
        part = f"### {task}\n\n{markdown_table([*header, *(['p'] if tests else [])], rows, text_columns=2)}"
        if tests:
            test = next(iter(tests.values()))
            label = METRIC_LABELS[test.metric]
            part += f"\np: {label} against {test.baseline}; † significantly better, ‡ significantly worse (p < 0.05)\n"
        parts.append(part)
    return "\n".join(parts)


@dataclass(frozen=True)
class Grid:
    """One method's headline metric on one task: queries of each size (rows) by the documents' layers (columns)."""

    task: str
    method: str
    metric: str
    sizes: tuple[Size, ...]
    names: tuple[str, ...]  # the sizes' names in their ladder
    depths: tuple[int, ...]
    values: np.ndarray  # float64 [sizes, depths]; the depths include the query's own


def grids_of(records: Sequence[Record], across: Sequence[Record]) -> list[Grid]:
    """The grids of all tasks and methods. `records`: queries and documents of one size; `across`: of two depths."""
    grids = []
    for task, method in _in_order((record.task, record.method) for record in across):
        of_both = [r for r in (*records, *across) if (r.task, r.method) == (task, method)]
        metric = HEADLINE_METRICS[of_both[0].kind]
        values = {
            (r.shape, r.document_layers or r.layers): r.value
            for r in of_both
            # Documents of narrower feed-forwards are in no column.
            if r.layers and r.metric == metric and (r.document_layers or r.feed_forward == 1)
        }
        names = {r.shape: r.size for r in of_both if r.layers}
        sizes = tuple(sorted(names))
        depths = tuple(sorted({size.layers for size in names if size.has_whole_feed_forwards}))
        table = [[values.get((size, depth), math.nan) for depth in depths] for size in sizes]
        shown = tuple(names[size] for size in sizes)
        grids.append(Grid(task, method, metric, sizes, shown, depths, np.array(table)))
    return grids


def grids_markdown(grids: Iterable[Grid], verdicts: Sequence[Verdict] = ()) -> str:
    """A heading and a table per task and method. Rows are sizes of queries, columns are depths of documents."""
    marks = {(v.task, v.method, (v.layers, v.dim, v.feed_forward), v.document_layers): v.mark for v in verdicts}
    parts = []
    for grid in grids:
        label, first, second = METRIC_LABELS[grid.metric], *_SIDES[grid.metric]
        rows = []
        for size, name, values in zip(grid.sizes, grid.names, grid.values.tolist()):
            shape = (size.layers, size.dim, size.feed_forward)
            places = [(grid.task, grid.method, shape, depth) for depth in grid.depths]
            cells = [_number(value) + marks.get(place, "") for value, place in zip(values, places)]
            rows.append([name, str(size.layers), str(size.dim), *cells])
        header = [first, "layers", "dim", *(f"{depth} layer{'s' * (depth > 1)}" for depth in grid.depths)]
        part = f"### {grid.task}: {grid.method}, {label}, {first} (rows) by {second} of other depths (columns)\n\n"
        part += markdown_table(header, rows)
        if any(place[:2] == (grid.task, grid.method) for place in marks):
            part += f"\n{second} of another depth against the row's own: † significantly better, ‡ significantly worse"
            part += " (p < 0.05)\n"
        parts.append(part)
    return "\n".join(parts)


def plot_grids(grids: Iterable[Grid], folder: Path) -> list[Path]:
    """One heat map per task and method."""
    written = []
    for grid in grids:
        figure = draw_numbers(
            grid.values,
            rows=[f"{size}".replace("x", "×") for size in grid.sizes],
            columns=[str(depth) for depth in grid.depths],
            ylabel=_SIDES[grid.metric][0],
            xlabel=f"layers of {_SIDES[grid.metric][1]}",
            title=f"{grid.task}: {grid.method}",
            label=METRIC_LABELS[grid.metric],
        )
        name = f"{file_name(grid.task)}_{grid.metric}_{file_name(grid.method)}_across_depths.png"
        written.append(save_figure(figure, folder / name))
    return written


def size_scores(records: Iterable[Record], *, task: str, metric: str, method: str) -> dict[Size, float]:
    """Size -> value of one method on one task."""
    return {r.shape: r.value for r in records if r.layers and (r.task, r.metric, r.method) == (task, metric, method)}


def plot_score_by_size(
    curves: Mapping[str, Mapping[Size, float]],
    path: str | Path,
    *,
    title: str,
    ylabel: str,
    names: Mapping[Size, str] | None = None,
    levels: Mapping[str, float] | None = None,
) -> Path:
    """One line per method over the sizes. Sizes are ordered categories at equal steps; `levels`: dashed lines."""
    plt = _pyplot()
    sizes = sorted({size for curve in curves.values() for size in curve})
    figure, axes = plt.subplots(figsize=(max(5.0, 1.0 + 0.9 * len(sizes)), 3.8), layout="constrained")
    for (method, curve), marker in zip(curves.items(), "osD^vPX*" * len(curves)):
        places = [place for place, size in enumerate(sizes) if size in curve]
        axes.plot(places, [curve[sizes[place]] for place in places], marker=marker, markersize=5, label=method)
    for number, (method, value) in enumerate((levels or {}).items()):
        axes.axhline(value, linestyle=("--", ":", "-.")[number % 3], linewidth=1.2, color="0.35", label=method)
    labels = [
        f"{name}\n{size}" if (name := (names or {}).get(size, str(size))) != str(size) else name for size in sizes
    ]
    axes.set_xticks(range(len(sizes)), [label.replace("x", "×") for label in labels])
    fractions = any(not size.has_whole_feed_forwards for size in sizes)
    axes.set_xlabel(f"size (layers × dimensions{' × feed-forward' * fractions})")
    axes.set_ylabel(ylabel)
    axes.set_title(title)
    axes.grid(axis="y", linewidth=0.5, alpha=0.5)
    axes.spines[["top", "right"]].set_visible(False)
    add_legend(axes)
    return save_figure(figure, path)


def plot_heat_map(
    values: Mapping[Size, float], path: str | Path, *, title: str, label: str, difference: bool = False
) -> Path:
    """`draw_heat_map` as a file."""
    return save_figure(draw_heat_map(values, title=title, label=label, difference=difference), path)


def draw_heat_map(values: Mapping[Size, float], *, title: str, label: str, difference: bool = False) -> Any:
    """A matplotlib figure: bodies upwards, dimensions across, the number in each cell.

    `difference`: colours are centred on zero. The caller must close the figure (`close_figure`).
    """
    bodies = sorted({size.body for size in values})
    dims = sorted({size.dim for size in values})
    grid = np.full((len(bodies), len(dims)), np.nan)
    for size, value in values.items():
        grid[bodies.index(size.body), dims.index(size.dim)] = value
    return draw_numbers(
        grid,
        rows=[str(body).replace("x", "×") for body in bodies],
        columns=[str(dim) for dim in dims],
        ylabel="layers" if all(body.feed_forward == 1 for body in bodies) else "layers × feed-forward",
        xlabel="dimensions",
        title=title,
        label=label,
        difference=difference,
    )


def draw_numbers(
    grid: np.ndarray,
    *,
    rows: Sequence[str],
    columns: Sequence[str],
    ylabel: str,
    xlabel: str,
    title: str,
    label: str,
    difference: bool = False,
) -> Any:
    """A figure with a number in each cell of `grid`, float64 [rows, columns], and the first row at the bottom."""
    plt = _pyplot()
    finite = grid[np.isfinite(grid)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    if difference:
        high = max(abs(low), abs(high)) or 1.0
        low = -high
    figure, axes = plt.subplots(figsize=(2.4 + 0.75 * len(columns), 1.6 + 0.5 * len(rows)), layout="constrained")
    image = axes.imshow(
        grid, origin="lower", aspect="auto", cmap="RdBu" if difference else "viridis", vmin=low, vmax=high
    )
    for row, column in np.ndindex(grid.shape):
        value = float(grid[row, column])
        if math.isfinite(value):
            shade = (value - low) / ((high - low) or 1.0)
            dark = 0.25 < shade < 0.75 if difference else shade > 0.6
            text = f"{value:+.3f}" if difference else f"{value:.3f}"
            axes.text(column, row, text, ha="center", va="center", fontsize=8, color="black" if dark else "white")
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.set_title(title)
    figure.colorbar(image, ax=axes, label=label)
    return figure


def plot_records(records: Sequence[Record], folder: str | Path) -> list[Path]:
    """Plot every task's headline metric: a line figure, and a heat map per method if the sizes make a grid."""
    folder = Path(folder)
    written = []
    for task in _in_order(record.task for record in records):
        of_task = [record for record in records if record.task == task]
        metric = HEADLINE_METRICS[of_task[0].kind]
        label = METRIC_LABELS[metric]
        methods = _in_order(record.method for record in of_task)
        curves = {method: size_scores(of_task, task=task, metric=metric, method=method) for method in methods}
        levels = {r.method: r.value for r in of_task if not r.layers and r.metric == metric}
        curves = {method: curve for method, curve in curves.items() if curve}
        names = {r.shape: r.size for r in of_task if r.layers}
        stem = f"{file_name(task)}_{metric}"
        if any(len(curve) > len({size.body for size in curve}) for curve in curves.values()):
            for method, curve in curves.items():
                path = folder / f"{stem}_{file_name(method)}_grid.png"
                written.append(plot_heat_map(curve, path, title=f"{task}: {method}", label=label))
        else:
            path = folder / f"{stem}.png"
            written.append(plot_score_by_size(curves, path, title=task, ylabel=label, names=names, levels=levels))
    return written


def _number(value: float | None) -> str:
    return "–" if value is None or math.isnan(value) else f"{value:.4f}"


def _in_order(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")  # figures are only written to files, and a login node has no display
    from matplotlib import pyplot

    return pyplot


def new_axes() -> tuple[Any, Any]:
    """A figure in the common style, and its axes; `save_figure` closes it."""
    figure, axes = _pyplot().subplots(figsize=(6.0, 3.8), layout="constrained")
    axes.grid(axis="y", linewidth=0.5, alpha=0.5)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def add_legend(axes: Any) -> None:
    """Add a legend if there are several entries; with more than four it stands beside the axes, clear of the lines."""
    entries = len(axes.get_legend_handles_labels()[1])
    if entries > 4:
        axes.figure.set_figwidth(axes.figure.get_figwidth() + 1.6)
        axes.figure.legend(loc="outside right center", frameon=False, fontsize=8)
    elif entries > 1:
        axes.legend(frameon=False, fontsize=8)


def save_figure(figure: Any, path: str | Path) -> Path:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    close_figure(figure)
    return path


def close_figure(figure: Any) -> None:
    """Free a figure: matplotlib keeps every figure until it is closed."""
    _pyplot().close(figure)

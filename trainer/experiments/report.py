"""A study's report, made from its raw results alone: report.md, report.csv, report.tex and figures/.

The tables compare every arm with the study's baseline at the same size (trainer/evaluation/results/comparison.py): †
marks an arm above the baseline with p < 0.05, ‡ one below it, and the p value stands beside the score. With Holm's
correction all comparisons of one table are one family. Missing results are listed, and every row gives its number of
seeds. An arm that trains nothing has one evaluation. It is compared, query by query, with the mean over the other arm's
seeds, which equals the mean of the comparisons with each seed.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.evaluation.results.comparison import Sample, compare, mark
from trainer.evaluation.results.report import HEADLINE_METRICS, METRIC_LABELS, markdown_table
from trainer.evaluation.results.significance import TestResult, holm, p_text
from trainer.experiments.collected import AVERAGE, Collected, Column, collect
from trainer.experiments.figures import draw_figures
from trainer.experiments.plan import Study


@dataclass(frozen=True)
class Cell:
    sample: Sample
    test: TestResult | None  # None: the baseline itself, or nothing to compare with
    p_holm: float = math.nan

    def p(self, *, corrected: bool) -> float:
        if self.test is None:
            return math.nan
        return self.p_holm if corrected else self.test.p


Table = dict[str, dict[Column, Cell]]  # arm -> column -> cell


def write_report(study: Study) -> Path:
    """Write everything under <output>/report, from <output>/results. Returns the path of report.md."""
    collected = collect(study)
    folder = study.output / "report"
    folder.mkdir(parents=True, exist_ok=True)
    tables = {
        task: comparison_table(study, collected, task, HEADLINE_METRICS[kind]) for task, kind in collected.kinds.items()
    }
    figures = draw_figures(study, collected, folder / "figures")
    (folder / "report.csv").write_text(_csv(study, collected), encoding="utf-8")
    (folder / "report.tex").write_text(_latex(study, tables, collected), encoding="utf-8")
    text = _markdown(study, collected, tables, [path.relative_to(folder) for path in figures])
    (folder / "report.md").write_text(text, encoding="utf-8")
    return folder / "report.md"


def comparison_table(study: Study, collected: Collected, task: str, metric: str) -> Table:
    """Every arm against the baseline on one task, at the ladder's sizes and on their average.

    Holm's correction is over all comparisons of the table.
    """
    shown: tuple[Column, ...] = (*study.ladder, AVERAGE)
    baseline = collected.samples.get((study.baseline, task, metric), {})
    table: Table = {}
    for arm in study.arms:
        by_column = collected.samples.get((arm, task, metric), {})
        table[arm] = {
            column: Cell(
                by_column[column],
                compare(by_column[column], baseline[column]) if arm != study.baseline and column in baseline else None,
            )
            for column in shown
            if column in by_column
        }
    places = [(arm, column) for arm, row in table.items() for column, cell in row.items() if cell.test]
    adjusted = holm([test.p for arm, column in places if (test := table[arm][column].test)])
    for (arm, column), p in zip(places, adjusted):
        table[arm][column] = Cell(table[arm][column].sample, table[arm][column].test, p)
    return table


def ablation_table(study: Study, collected: Collected) -> list[tuple[str, str, dict[Column, TestResult]]]:
    """Rows (ablation, task, column -> test of with minus without) of the headline metrics."""
    rows = []
    for ablation in study.ablations:
        for task, kind in collected.kinds.items():
            metric = HEADLINE_METRICS[kind]
            with_it = collected.samples.get((ablation.with_arm, task, metric), {})
            without = collected.samples.get((ablation.without_arm, task, metric), {})
            columns: list[Column] = [c for c in (*study.ladder, AVERAGE) if c in with_it and c in without]
            if columns:
                rows.append((ablation.name, task, {c: compare(with_it[c], without[c]) for c in columns}))
    return rows


# Markdown


def _markdown(study: Study, collected: Collected, tables: dict[str, Table], figures: Sequence[Path]) -> str:
    seeds = len(study.seeds)
    correction = " after Holm's correction over the table" if study.holm else ""
    parts = [
        f"# {study.name}",
        f"{len(study.arms)} arms, {seeds} seed{'s' if seeds > 1 else ''}. Ladder: "
        f"{', '.join(_column_name(study, size) for size in study.ladder)}. Made by "
        "`python -m trainer.study … --report-only` from the raw results alone.",
        "A cell is the mean over seeds ± half of its 95 % interval (Student's t; none with one seed), with † where it "
        f"is significantly above and ‡ where it is significantly below {study.baseline} at the same size "
        f"(p < 0.05{correction}), and the p value in brackets: retrieval, two-tailed paired t-test over queries; STS, "
        "Fisher's z. Seeds are averaged within a query, or a correlation's z, before a test.",
    ]
    once = [arm for arm, method in study.arms.items() if method.recipe is None]
    if once and seeds > 1:
        parts.append(
            f"Nothing is fine-tuned for {', '.join(once)}: one evaluation each, without an interval. In a test it is "
            "paired, query by query (a correlation by its z), with the mean over the other arm's seeds, which is the "
            "mean of its differences to each of them."
        )
    if collected.missing:
        parts.append(
            f"**Not complete**: {len(collected.missing)} evaluations are missing: {', '.join(collected.missing)}."
        )
    parts += ["## Average over the sizes", _summary(study, tables)]
    for task, table in tables.items():
        metric = HEADLINE_METRICS[collected.kinds[task]]
        parts += [f"## {task}: {METRIC_LABELS[metric]}", _task_table(study, collected, task, metric, table)]
    if rows := ablation_table(study, collected):
        columns: list[Column] = [*study.ladder, AVERAGE]
        header = ["ablation", "task", *(_column_name(study, column) for column in columns)]
        body = [
            [name, task, *(_difference(tests[column]) if column in tests else "–" for column in columns)]
            for name, task, tests in rows
        ]
        arms = "; ".join(f"{each.name}: {each.with_arm} minus {each.without_arm}" for each in study.ablations)
        parts += ["## Ablations", f"With minus without, p in brackets. {arms}."]
        parts.append(markdown_table(header, body, text_columns=2))
    if collected.latency_ms:
        header = ["size", "milliseconds a query"]
        body = [[_column_name(study, size), f"{value:.2f}"] for size, value in collected.latency_ms.items()]
        parts += ["## Latency", "One query at a time, the encoder cut to the size's layers (median)."]
        parts.append(markdown_table(header, body))
    parts.append("## Figures")
    parts += [f"![{path.stem.replace('_', ' ')}]({path.as_posix()})" for path in figures]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _summary(study: Study, tables: dict[str, Table]) -> str:
    rows = []
    for arm in study.arms:
        cells = [table[arm].get(AVERAGE) for table in tables.values()]
        rows.append([arm, _seeds_text(cells), *(_cell_text(cell, corrected=study.holm) for cell in cells)])
    return markdown_table(["arm", "seeds", *tables], rows)


def _task_table(study: Study, collected: Collected, task: str, metric: str, table: Table) -> str:
    columns: list[Column] = [*study.ladder, AVERAGE]
    rows = []
    for arm, row in table.items():
        cells = [row.get(column) for column in columns]
        rows.append([arm, _seeds_text(cells), *(_cell_text(cell, corrected=study.holm) for cell in cells)])
    for (name, of_task, of_metric), by_column in collected.references.items():
        if (of_task, of_metric) == (task, metric):
            values = [by_column.get(column) for column in columns]
            rows.append([name, "", *(f"{value.mean:.4f}" if value else "–" for value in values)])
    return markdown_table(["arm", "seeds", *(_column_name(study, column) for column in columns)], rows)


def _cell_text(cell: Cell | None, *, corrected: bool) -> str:
    if cell is None:
        return "–"
    interval = cell.sample.interval
    spread = "" if math.isnan(interval.half_width) else f" ± {interval.half_width:.4f}"
    if cell.test is None:
        return f"{interval.mean:.4f}{spread}"
    p = cell.p(corrected=corrected)
    return f"{interval.mean:.4f}{spread}{mark(cell.test.difference, p)} ({p_text(p)})"


def _difference(test: TestResult) -> str:
    return f"{test.difference:+.4f}{mark(test.difference, test.p)} ({p_text(test.p)})"


def _seeds_text(cells: Iterable[Cell | None]) -> str:
    counts = sorted({len(cell.sample.by_seed) for cell in cells if cell is not None})
    return "–".join(str(count) for count in dict.fromkeys((counts[0], counts[-1]))) if counts else "0"


def _column_name(study: Study, column: Column) -> str:
    if isinstance(column, str):
        return column
    name = study.ladder.name(column)
    return name if name == str(column) else f"{name} {column}"


# Other forms

_CSV_COLUMNS = (
    "arm", "task", "kind", "metric", "size", "layers", "dim", "feed_forward", "seeds", "mean", "ci95_low", "ci95_high",
    "baseline", "difference", "statistic", "p", "p_holm", "significant", "n",
)  # fmt: skip


def _csv(study: Study, collected: Collected) -> str:
    """One row per arm, task, metric and size, including the grid's sizes; a cell without a number is empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, _CSV_COLUMNS, lineterminator="\n")
    writer.writeheader()
    tables = {
        (task, metric): comparison_table(study, collected, task, metric)
        for _, task, metric in dict.fromkeys(collected.samples)
    }
    everything = {**collected.samples, **collected.references}
    for (arm, task, metric), by_column in everything.items():
        baseline = collected.samples.get((study.baseline, task, metric), {})
        for column, sample in by_column.items():
            cell = tables.get((task, metric), {}).get(arm, {}).get(column)
            test = cell.test if cell else None
            if cell is None and arm in study.arms and arm != study.baseline and column in baseline:
                test = compare(sample, baseline[column])  # a grid size: outside the table, so without Holm
            p_holm = cell.p_holm if cell else math.nan
            decisive = p_holm if study.holm and cell else (test.p if test else math.nan)
            interval = sample.interval
            row: dict[str, Any] = {
                "arm": arm,
                "task": task,
                "kind": collected.kinds[task],
                "metric": metric,
                "size": column if isinstance(column, str) else study.ladder.name(column),
                "layers": "" if isinstance(column, str) else column.layers,
                "dim": "" if isinstance(column, str) else column.dim,
                "feed_forward": "" if isinstance(column, str) else column.feed_forward,
                "seeds": len(sample.by_seed),
                "mean": interval.mean,
                "ci95_low": interval.low,
                "ci95_high": interval.high,
                "n": sample.n,
            }
            if test is not None:
                row |= {"baseline": study.baseline, "difference": test.difference, "statistic": test.statistic}
                row |= {"p": test.p, "p_holm": p_holm, "significant": mark(test.difference, decisive)}
            writer.writerow({key: "" if isinstance(v, float) and math.isnan(v) else v for key, v in row.items()})
    return text.getvalue()


_TEX_MARKS = {"†": r"$^{\dagger}$", "‡": r"$^{\ddagger}$"}


def _latex(study: Study, tables: dict[str, Table], collected: Collected) -> str:
    """LaTeX with one table of averages over the sizes and one table per task; needs the package booktabs."""
    parts = ["% needs \\usepackage{booktabs}; made by `python -m trainer.study`"]
    columns: list[Column] = [*study.ladder, AVERAGE]
    summary = {arm: [table[arm].get(AVERAGE) for table in tables.values()] for arm in study.arms}
    parts.append(_tabular(study, list(tables), summary, f"Average over {len(study.ladder)} sizes"))
    for task, table in tables.items():
        label = METRIC_LABELS[HEADLINE_METRICS[collected.kinds[task]]]
        rows = {arm: [row.get(column) for column in columns] for arm, row in table.items()}
        parts.append(_tabular(study, [_column_name(study, column) for column in columns], rows, f"{task}, {label}"))
    return "\n\n".join(parts) + "\n"


def _tabular(study: Study, names: Sequence[str], rows: dict[str, list[Cell | None]], caption: str) -> str:
    lines = [
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{_tex(caption)}. $\dagger$/$\ddagger$: above/below {_tex(study.baseline)}, $p < 0.05$.}}",
        rf"\begin{{tabular}}{{l{'r' * len(names)}}}",
        r"\toprule",
        " & ".join(["arm", *map(_tex, names)]) + r" \\",
        r"\midrule",
    ]
    for arm, cells in rows.items():
        texts = [_tex(_cell_text(cell, corrected=study.holm)) for cell in cells]
        lines.append(" & ".join([_tex(arm), *texts]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}"])


def _tex(text: str) -> str:
    for plain, escaped in (("\\", r"\textbackslash{}"), ("_", r"\_"), ("&", r"\&"), ("%", r"\%"), ("#", r"\#")):
        text = text.replace(plain, escaped)
    text = text.replace("±", r"$\pm$").replace("<", "$<$").replace("–", "--").replace("×", r"$\times$")
    for sign, tex in _TEX_MARKS.items():
        text = text.replace(sign, tex)
    return text

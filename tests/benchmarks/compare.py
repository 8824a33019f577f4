"""Runs benchmarks and compares their figures with the baselines of this kind of machine.

    python -m tests.benchmarks.compare [BENCHMARK ...] [--quick] [--save] [--note TEXT]
    python -m tests.benchmarks.compare --table

Without names it compares all benchmarks that have a baseline here (tests/benchmarks/baselines), and with --save it
runs all there are. A table shows every figure: baseline, now, ratio (now ÷ baseline), and for the headline figures
(tests/benchmarks/headlines.py) a verdict: "worse" or "better" if the change is beyond the figure's tolerance, else
"same". Other figures have no verdict. Figures that only one side has are named. A figure such as a step's time depends
on other work on the machine, which is why most headline figures are ratios of CPU times taken in turn.
--quick: small sizes, each benchmark in under five minutes; its baselines are apart from those of the full sizes.
--save: the figures become the baseline, after the comparison with the earlier one, if there is one.
--note: kept with the baseline, such as "shared with other work".
--table: print the table of headline figures of all baselines, as in docs/performance.md, and run nothing.
Exit code 0: no headline figure is worse, or --save; 1: some are, or a benchmark failed; 2: a user's mistake.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from data.ground.command import exit_code_of
from data.ground.errors import CommandEnd, ConfigError
from tests import ROOT
from tests.benchmarks.baseline_files import (
    Baseline,
    all_baselines,
    baseline_of,
    file_of,
    no_baseline,
    read_baseline,
    this_machine,
    write_baseline,
)
from tests.benchmarks.headlines import HEADLINES, Headline

WORSE, SAME, BETTER, MISSING = "worse", "same", "better", "missing"


class BenchmarkFailed(CommandEnd):
    """A benchmark's process ended with an error, or left no figures."""


@dataclass(frozen=True)
class Row:
    """A figure of either run; None where a run lacks it. Figures that are no headlines have no verdict."""

    figure: str
    before: float | None
    now: float | None
    verdict: str = ""


def verdict_of(headline: Headline, before: float, now: float) -> str:
    """Whether a headline figure (≥ 0) has become worse or better by more than its tolerance.

    >>> verdict_of(Headline("time", "lower", 0.1, ""), 2.0, 2.3)
    'worse'
    """
    if not math.isfinite(now):
        return WORSE
    allowed = 1.0 + headline.tolerance
    lower, higher = now * allowed < before, now > before * allowed
    if headline.better == "higher":
        lower, higher = higher, lower
    return BETTER if lower else WORSE if higher else SAME


def compared(before: Mapping[str, float], now: Mapping[str, float], headlines: Iterable[Headline]) -> list[Row]:
    """A row for each figure of either run: first the headlines, then the others in the order of the new run.

    A headline that the baseline has and the new run lacks is "missing". One that the baseline lacks has no verdict.
    """
    rows = []
    named = {headline.figure: headline for headline in headlines}
    for figure in dict.fromkeys((*named, *now, *before)):
        old, new = before.get(figure), now.get(figure)
        verdict = ""
        if figure in named and old is not None:
            verdict = MISSING if new is None else verdict_of(named[figure], old, new)
        if old is not None or new is not None:
            rows.append(Row(figure, old, new, verdict))
    return rows


def is_worse(rows: Iterable[Row]) -> bool:
    """Whether a headline figure is worse, or is no longer measured."""
    return any(row.verdict in (WORSE, MISSING) for row in rows)


def shown(rows: Sequence[Row]) -> str:
    """The rows as a table of text, and below it the figures that only one side has."""
    cells = [("figure", "baseline", "now", "ratio", "verdict")]
    for row in rows:
        if row.before is not None and row.now is not None:
            ratio = f"{row.now / row.before:.3f}" if row.before else "-"
            cells.append((row.figure, f"{row.before:.4g}", f"{row.now:.4g}", ratio, row.verdict))
    widths = [max(map(len, column)) for column in zip(*cells)]
    lines = []
    for figure, *numbers, verdict in cells:
        columns = [cell.rjust(width) for cell, width in zip(numbers, widths[1:])]
        lines.append("  ".join([figure.ljust(widths[0]), *columns, verdict]).rstrip())
    gone = [f"{row.figure} ({MISSING})" if row.verdict else row.figure for row in rows if row.now is None]
    new = [row.figure for row in rows if row.before is None]
    lines += [f"only in the baseline: {', '.join(gone)}"] if gone else []
    lines += [f"only now: {', '.join(new)}"] if new else []
    return "\n".join(lines)


def table(baselines: Iterable[Baseline]) -> str:
    """The headline figures of baselines as a table in Markdown, a part for each kind of machine."""
    parts: dict[str, list[str]] = {}
    for baseline in baselines:
        size = ", `--quick`" if baseline.quick else ""
        header = ["| benchmark | figure | what it is | value |", "| --- | --- | --- | --- |"]
        lines = parts.setdefault(f"{_described(baseline)}:", header)
        for headline in HEADLINES.get(baseline.benchmark, ()):
            value = baseline.figures.get(headline.figure)
            if value is not None:
                name = f"{baseline.benchmark}{size}"
                lines.append(f"| {name} | `{headline.figure}` | {headline.meaning} | {_number(value)} |")
    return "\n\n".join(f"{title}\n\n" + "\n".join(lines) for title, lines in parts.items())


def _described(baseline: Baseline) -> str:
    machine = baseline.machine
    note = f", {baseline.note}" if baseline.note else ""
    return f"{machine.cpu}, {machine.cores} cores, {machine.units}, {baseline.date}{note}"


def _number(value: float) -> str:
    return f"{value:.1e}" if 0 < abs(value) < 1e-3 else f"{value:.3g}"


def run_benchmark(name: str, *, quick: bool) -> dict[str, float]:
    """The figures of a benchmark, run as a process whose output is shown."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "figures.json"
        command = [sys.executable, "-m", f"tests.benchmarks.{name}", "--json", str(path), *(["--quick"] * quick)]
        print(f"$ {' '.join(['python', *command[1:3], *command[5:]])}", flush=True)
        done = subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
        if done.returncode or not path.is_file():
            raise BenchmarkFailed(f"the benchmark {name} ended with exit code {done.returncode} and left no figures")
        return json.loads(path.read_text("utf-8"))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benchmarks", nargs="*", metavar="BENCHMARK", help=", ".join(HEADLINES))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--note", default="", metavar="TEXT")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args(argv)
    return exit_code_of(lambda: _compare(args))


def chosen(names: Sequence[str], *, quick: bool, save: bool) -> list[str]:
    """The benchmarks to run. Those to compare must have a baseline."""
    if unknown := [name for name in names if name not in HEADLINES]:
        raise ConfigError(f"there is no benchmark {unknown[0]}; there are {', '.join(HEADLINES)}")
    machine = this_machine()
    if save:
        return list(names or HEADLINES)
    for name in names:
        read_baseline(machine, name, quick=quick)
    found = list(names) or [name for name in HEADLINES if file_of(machine, name, quick=quick).is_file()]
    if not found:
        raise no_baseline("no benchmark has a baseline", machine, quick=quick)
    return found


def _compare(args: argparse.Namespace) -> int:
    if args.table:
        print(table(all_baselines()))
        return 0
    machine, worse = this_machine(), []
    for name in chosen(args.benchmarks, quick=args.quick, save=args.save):
        figures = run_benchmark(name, quick=args.quick)
        if file_of(machine, name, quick=args.quick).is_file():
            baseline = read_baseline(machine, name, quick=args.quick)
            rows = compared(baseline.figures, figures, HEADLINES[name])
            print(f"\n{baseline.headed}\n{shown(rows)}\n", flush=True)
            worse += [name] if is_worse(rows) else []
        if args.save:
            path = write_baseline(baseline_of(name, figures, quick=args.quick, note=args.note))
            print(f"saved as {path.relative_to(ROOT)}", flush=True)
    if worse and not args.save:
        print(f"worse than the baseline: {', '.join(worse)}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

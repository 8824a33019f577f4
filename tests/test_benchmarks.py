"""The benchmarks' headline figures, the comparison with baselines, and the table that the documentation has of them.

No benchmark runs here.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from data.ground.errors import ConfigError
from tests import ROOT
from tests.benchmarks import baseline_files, compare, contrastive_loss
from tests.benchmarks.baseline_files import all_baselines, baseline_of, file_of, machine_of, read_baseline, this_machine
from tests.benchmarks.compare import BETTER, MISSING, SAME, WORSE, BenchmarkFailed, Row, compared, is_worse, verdict_of
from tests.benchmarks.headlines import HEADLINES, Headline

FOLDER = ROOT / "tests" / "benchmarks"
TIME, RATE = Headline("time", "lower", 0.1, ""), Headline("rate", "higher", 0.1, "")


def docstrings() -> dict[str, str]:
    """The docstring of each benchmark, by its name; found by parsing, because some need packages that may be absent."""
    found = {path.stem: ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "" for path in FOLDER.glob("*.py")}
    return {name: text for name, text in found.items() if text.startswith("Benchmark: ")}


# Verdicts


@pytest.mark.parametrize(
    ("headline", "before", "now", "expected"),
    [
        (TIME, 2.0, 2.19, SAME),
        (TIME, 2.0, 2.21, WORSE),
        (TIME, 2.0, 1.83, SAME),
        (TIME, 2.0, 1.81, BETTER),
        (RATE, 2.0, 1.83, SAME),
        (RATE, 2.0, 1.81, WORSE),
        (RATE, 2.0, 2.19, SAME),
        (RATE, 2.0, 2.21, BETTER),
        (TIME, 0.0, 0.0, SAME),
        (TIME, 0.0, 0.1, WORSE),
        (RATE, 0.0, 0.1, BETTER),
        (TIME, 2.0, float("nan"), WORSE),
        (RATE, 2.0, float("inf"), WORSE),
    ],
)
def test_a_verdict_is_beyond_the_tolerance_in_the_figures_own_direction(headline, before, now, expected):
    assert verdict_of(headline, before, now) == expected


@pytest.mark.parametrize("headline", [TIME, RATE])
def test_without_tolerance_every_change_has_a_verdict(headline):
    """Negative control: the tolerance alone makes a small change count as none."""
    exact = Headline(headline.figure, headline.better, 0.0, "")
    assert verdict_of(headline, 2.0, 2.01) == SAME
    assert {verdict_of(exact, 2.0, now) for now in (1.99, 2.01)} == {WORSE, BETTER}
    assert verdict_of(exact, 2.0, 2.0) == SAME


def test_other_figures_are_shown_without_a_verdict_and_absent_ones_are_named():
    before = {"time": 1.0, "seconds": 5.0, "old": 1.0}
    rows = compared(before, {"seconds": 50.0, "time": 1.05, "new": 2.0}, [TIME, RATE])
    assert rows == [
        Row("time", 1.0, 1.05, SAME),
        Row("seconds", 5.0, 50.0),
        Row("new", None, 2.0),
        Row("old", 1.0, None),
    ]
    assert not is_worse(rows)
    lines = compare.shown(rows).splitlines()
    assert lines[0].split() == ["figure", "baseline", "now", "ratio", "verdict"]
    assert lines[1].split() == ["time", "1", "1.05", "1.050", SAME]
    assert lines[2].split() == ["seconds", "5", "50", "10.000"]
    assert lines[3:] == ["only in the baseline: old", "only now: new"]


def test_a_headline_that_is_no_longer_measured_is_worse():
    rows = compared({"time": 1.0}, {}, [TIME])
    assert rows == [Row("time", 1.0, None, MISSING)] and is_worse(rows)
    assert "time (missing)" in compare.shown(rows)
    assert not is_worse(compared({}, {"time": 1.0}, [TIME])), "a new headline has nothing to be compared with"


# Machines and files


CPUINFO = "processor\t: 0\nmodel name\t: AMD EPYC 9R14\nflags\t\t: fpu avx2 avx512f avx512_bf16\n\nprocessor\t: 1\n"


def test_a_kind_of_machine_is_its_processor_its_cores_and_its_widest_units():
    assert machine_of(CPUINFO, cores=2).kind == "amd-epyc-9r14-2-cores-avx512_bf16"
    assert machine_of(CPUINFO.replace(" avx512_bf16", ""), cores=2).kind == "amd-epyc-9r14-2-cores-avx512f"
    assert machine_of(CPUINFO.replace("fpu", "amx_bf16"), cores=64).kind == "amd-epyc-9r14-64-cores-amx_bf16"
    assert machine_of("", cores=1).kind.endswith("-1-cores-plain")


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of baselines, below a root, without asking git."""
    folder = tmp_path / "baselines"
    monkeypatch.setattr(baseline_files, "FOLDER", folder)
    monkeypatch.setattr(baseline_files, "ROOT", tmp_path)
    monkeypatch.setattr(compare, "ROOT", tmp_path)
    monkeypatch.setattr(baseline_files, "commit", lambda folder: None)
    return folder


def command(monkeypatch: pytest.MonkeyPatch, figures: Mapping[str, float] | None, *words: str) -> int:
    """The exit code of the command, whose benchmarks find these figures, or fail."""

    def run(name: str, *, quick: bool) -> dict[str, float]:
        if figures is None:
            raise BenchmarkFailed(f"the benchmark {name} failed")
        return dict(figures)

    monkeypatch.setattr(compare, "run_benchmark", run)
    return compare.main(words)


def test_a_saved_baseline_is_compared_with_the_next_run(own_folder, monkeypatch, capsys):
    good = {headline.figure: 2.0 for headline in HEADLINES["search"]}
    assert command(monkeypatch, good, "search", "--quick", "--save", "--note", "busy") == 0
    kept = read_baseline(this_machine(), "search", quick=True)
    assert (kept.figures, kept.note, kept.quick) == (good, "busy", True) and "torch" in kept.versions
    assert command(monkeypatch, good, "--quick") == 0, "without names: all that have a baseline"
    assert "search (--quick), baseline of" in capsys.readouterr().out
    assert command(monkeypatch, good | {"faiss_ratio_100": 1.0}, "search", "--quick") == 1
    assert "worse than the baseline: search" in capsys.readouterr().out
    assert command(monkeypatch, good | {"faiss_ratio_100": 9.0}, "search", "--quick") == 0
    assert command(monkeypatch, None, "search", "--quick") == 1
    assert read_baseline(this_machine(), "search", quick=True) == kept, "a comparison leaves the baseline alone"


def test_a_mistake_of_the_user_is_one_sentence(own_folder, monkeypatch, capsys):
    for words in (["search"], ["search", "--quick"], [], ["nothing"]):
        assert command(monkeypatch, {}, *words) == 2
        said = capsys.readouterr().err
        assert said.startswith("error: ") and said.count("\n") == 1
        assert ("--save" in said) == (words != ["nothing"])


def test_a_damaged_baseline_is_named(own_folder, monkeypatch):
    command(monkeypatch, {"faiss_ratio_100": 2.0}, "search", "--save")
    path = file_of(this_machine(), "search", quick=False)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"figures": {"faiss_ratio_100": "2"}}))
    with pytest.raises(ValueError, match=r"search\.json is damaged \(figures\.faiss_ratio_100"):
        read_baseline(this_machine(), "search", quick=False)
    with pytest.raises(ConfigError, match="has no baseline with --quick"):
        read_baseline(this_machine(), "search", quick=True)


# The benchmarks


def test_every_benchmark_has_headline_figures():
    assert docstrings().keys() == HEADLINES.keys()


@pytest.mark.parametrize("name", HEADLINES)
def test_the_docstring_of_a_benchmark_names_its_headline_figures(name):
    words = set(re.findall(r"\w+", docstrings()[name]))
    figures = [headline.figure for headline in HEADLINES[name]]
    assert figures and len(set(figures)) == len(figures)
    assert set(figures) <= words
    assert "no_such_figure" not in words, "negative control"


@pytest.mark.parametrize("name", HEADLINES)
def test_a_benchmark_has_the_options_that_the_comparison_gives_it(name):
    source = (FOLDER / f"{name}.py").read_text("utf-8")
    assert '"--quick"' in source and '"--json"' in source
    assert re.search(r"^--quick: |\. --quick: ", docstrings()[name], re.MULTILINE), (
        "the docstring says what it measures"
    )
    assert "mean nothing" not in docstrings()[name]


def test_the_products_alone_run_in_the_tiles_of_the_loss():
    """With enough memory, and with so little that two sweeps are needed."""
    for mib in (256.0, 2.0**-6):
        found = contrastive_loss.gemm_ratios(150, 300, repeats=1, score_memory_mib=mib)
        assert found.keys() == {"ratio", "bare", "seconds", "gflops"} and min(found.values()) > 0
        queries, passages = (contrastive_loss.unit_vectors(rows, seed=1) for rows in (150, 300))
        assert contrastive_loss.tiling_of(queries, passages, mib).keeps_rows == (mib > 1)


# The documentation


def test_the_page_has_the_table_of_the_baselines():
    page = (ROOT / "docs" / "performance.md").read_text("utf-8")
    made = compare.table(all_baselines())
    assert made and made in page, "put what `python -m tests.benchmarks.compare --table` prints into the page"


def test_the_table_shows_the_headline_figures_alone(own_folder):
    baseline = baseline_of("search", {"faiss_ratio_100": 1.25, "seconds_100": 3.0}, quick=True, note="busy")
    *title, _, header, ruler, row = compare.table([baseline]).splitlines()
    assert title[0].endswith("busy:") and header.count("|") == ruler.count("|") == row.count("|")
    assert "`faiss_ratio_100`" in row and "| 1.25 |" in row
    assert "seconds_100" not in row


def test_baselines_are_of_known_benchmarks_and_name_no_path():
    for path in sorted((FOLDER / "baselines").glob("*/*.json")):
        baseline = baseline_files.read_record(path, baseline_files.Baseline)
        assert path == file_of(baseline.machine, baseline.benchmark, quick=baseline.quick)
        missing = {headline.figure for headline in HEADLINES[baseline.benchmark]} - baseline.figures.keys()
        assert not missing, f"{path}: {missing}"
        assert "/" not in baseline.note + baseline.machine.cpu

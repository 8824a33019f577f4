"""The tutorials: every command runs as it is written, in the order of a reader, and gives what the page shows."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT
from tests.launch.slurm_cluster import cluster, until, why_not
from tests.launcher import environment_of_ranks
from tests.run_folder import steps_of
from tests.tutorials import LANGUAGES, PAGES, Tutorial, Workplace

NAMES = sorted(path.stem for path in PAGES.glob("*.md"))
SIZES = ("2x64", "4x192", "6x384")
TINY_SIZES = ("1x32", "2x64", "4x128")
# Between the scores on a page and those found by the test: other processors round otherwise, and that is trained on.
TOLERANCE = 0.1


@pytest.fixture(scope="module")
def workplace(launcher: None, minilm: Path, tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    return Workplace(tmp_path_factory.mktemp("tutorials") / "reader")


def ndcg(results: Path, method: str = "trained") -> dict[str, float]:
    """nDCG@10 by size."""
    records = json.loads((results / "results.json").read_text())["records"]
    return {r["size"]: r["value"] for r in records if (r["method"], r["metric"]) == (method, "ndcg_cut_10")}


def resized(runs: Path, shown: dict[str, list[float]]) -> None:
    rows = json.loads((runs / "resized/resize.json").read_text())["records"]
    found = {f"{row['layers']}x{row['dim']}": row for row in rows}
    assert tuple(found) == SIZES
    for size in SIZES[:-1]:
        assert found[size]["resized"] > found[size]["as_it_is"] + 0.1
    for size, row in found.items():
        expected = [row["as_it_is"], row["closed_form"], row["resized"]]
        assert shown[size][:3] == pytest.approx(expected, abs=TOLERANCE)


def tuned(runs: Path, shown: dict[str, list[float]]) -> None:
    start, trained = ndcg(runs / "scores/start"), ndcg(runs / "scores/pairs")
    for size in SIZES[:-1]:
        assert trained[size] > 1.2 * start[size]
    assert trained[SIZES[-1]] > start[SIZES[-1]] - 0.1
    assert {size: shown[size] for size in SIZES} == {
        size: pytest.approx([start[size], trained[size]], abs=TOLERANCE) for size in SIZES
    }


def mined(runs: Path, shown: dict[str, list[float]]) -> None:
    report = json.loads((runs / "mined/report.json").read_text())
    assert report["negatives"] > report["tuples"] > 0
    before, after = ndcg(runs / "scores/pairs"), ndcg(runs / "scores/pairs_mined")
    for size in SIZES:
        assert after[size] > before[size] - 0.1
        assert shown[size] == pytest.approx([before[size], after[size]], abs=TOLERANCE)


def served(runs: Path, shown: dict[str, list[float]]) -> None:
    checks = json.loads((runs / "export/export.json").read_text())["onnx"]
    for size in ("2x64", "6x384"):
        assert checks[size]["float32"]["largest_difference"] < 1e-5
        assert checks[size]["int8"]["least_cosine"] > 0.95
        megabytes = [checks[size][precision]["megabytes"] for precision in ("float32", "int8")]
        assert shown[size][:2] == pytest.approx(megabytes, rel=0.05)


def pretrained(runs: Path, shown: dict[str, list[float]]) -> None:
    losses = steps_of(runs / "smae")
    scratch, after = ndcg(runs / "scores/srl_from_scratch"), ndcg(runs / "scores/srl_after_smae")
    untrained = ndcg(runs / "scores/srl_from_scratch", "untrained")
    for size in TINY_SIZES:
        of_size = [row[f"encoder/{size}"] for row in losses]
        half = len(of_size) // 2
        assert sum(of_size[half:]) / len(of_size[half:]) < sum(of_size[:half]) / half - 0.05
        assert shown[size] == pytest.approx([untrained[size], scratch[size], after[size]], abs=TOLERANCE)
    assert scratch[TINY_SIZES[-1]] > 1.2 * untrained[TINY_SIZES[-1]]


def drawn(runs: Path, shown: dict[str, list[float]]) -> None:
    from matplotlib import image

    picture = image.imread(runs / "curves.png")
    # All six lines of the legend have a colour of their own among grey text and axes.
    saturation = picture[..., :3].max(-1) - picture[..., :3].min(-1)
    assert (saturation > 0.3).sum() > 1000


def submitted(runs: Path, shown: dict[str, list[float]]) -> None:
    here, there = ({row["step"]: row["loss"] for row in steps_of(runs / run)} for run in ("smae", "slurm"))
    assert here == pytest.approx(there, abs=1e-3) and len(set(here.values())) > 10
    assert json.loads((runs / "slurm/environment.json").read_text())["world_size"] == 2
    assert shown and all(shown[step] == pytest.approx([here[int(step)]] * 2, abs=TOLERANCE) for step in shown)


# What a page promises, beside the files that it names.
PROMISES: dict[str, Callable[[Path, dict[str, list[float]]], None]] = {
    "resize": resized,
    "pairs": tuned,
    "negatives": mined,
    "serve": served,
    "pretrain": pretrained,
    "tensorboard": drawn,
    "slurm": submitted,
}


def check(name: str, workplace: Workplace) -> None:
    tutorial = Tutorial.read(name)
    runs = workplace.checkout / "runs" / "tutorials"
    missing = [path for path in sorted(tutorial.outputs) if not (workplace.checkout / path).exists()]
    assert not missing, f"the page names what its commands do not write: {missing}"
    PROMISES[name](runs, tutorial.table)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in PROMISES if name != "slurm"])
def test_a_tutorial_runs_as_it_is_written(name: str, workplace: Workplace) -> None:
    workplace.run(name)
    check(name, workplace)


@pytest.mark.long
@pytest.mark.skipif(why_not() is not None, reason=why_not() or "")
def test_the_tutorial_of_slurm_runs_on_two_nodes(workplace: Workplace, tmp_path: Path) -> None:
    workplace.run("pretrain")
    with cluster(tmp_path / "slurm") as slurm:
        workplace.run("slurm", SLURM_CONF=slurm.environment["SLURM_CONF"])
    check("slurm", workplace)


@pytest.mark.long
def test_tensorboard_serves_the_charts_of_every_size(workplace: Workplace) -> None:
    """The page's command, on a free port."""
    workplace.run("pretrain")
    (command,) = (block.code for block in Tutorial.read("tensorboard").blocks if block.language == "console")
    words = [*shlex.split(command.removeprefix("$ ")), "--port", "0"]
    server = subprocess.Popen(
        words, cwd=workplace.checkout, env=environment_of_ranks(), stderr=subprocess.PIPE, text=True
    )
    try:
        assert server.stderr is not None
        address = next(found[0] for line in server.stderr if (found := re.search(r"http://\S+/", line)))

        def answer(path: str) -> Any:
            with urllib.request.urlopen(f"{address}data/{path}", timeout=30) as reply:
                return json.load(reply)

        sizes = {f"smae/tensorboard/{number}_{size}" for number, size in enumerate(TINY_SIZES, 1)}
        until(lambda: sizes <= set(answer("runs")), what=lambda: str(answer("runs")))
        charts = json.dumps(answer("plugin/custom_scalars/layout"))
        assert "losses/encoder" in charts and "train/grad_norm" in charts
    finally:
        server.terminate()
        server.communicate()


def test_every_page_is_listed_and_tested() -> None:
    assert set(NAMES) == {"index", *PROMISES}
    navigation = (ROOT / "docs/site/mkdocs.yml").read_text("utf-8")
    index = (PAGES / "index.md").read_text("utf-8")
    for name in PROMISES:
        assert f"tutorials/{name}.md" in navigation and f"]({name}.md)" in index


@pytest.mark.parametrize("name", NAMES)
def test_a_page_has_blocks_that_are_understood_and_a_measured_time(name: str) -> None:
    tutorial = Tutorial.read(name)
    assert {block.language for block in tutorial.blocks} <= LANGUAGES
    assert any(block.language == "sh" for block in tutorial.blocks)
    if name != "index":
        assert tutorial.needs and set(tutorial.needs) < set(NAMES)
        assert re.search(
            r"^(Measured: \d+ CPU seconds.* \d{4}-\d\d-\d\d|Not measured yet)", tutorial.page, re.MULTILINE
        )


def test_what_is_read_from_a_page(tmp_path: Path) -> None:
    page = """You need the text of
[one](one.md#here), and [two](two.md).

It is in `runs/tutorials/x/table.md`. See [three](three.md).

```sh
echo a
```

```text
not run
```

```python
print("b")
```

| size | ignored |
| --- | ---: |
| 1x2 | 1.0 |

| size | before | after |
| --- | ---: | ---: |
| 1x2 | 0.25 | 0.5† |
"""
    tutorial = Tutorial("page", page)
    assert tutorial.needs == ["one", "two"]
    assert tutorial.outputs == {"runs/tutorials/x/table.md"}
    assert tutorial.table == {"1x2": [0.25, 0.5]}
    script = tutorial.script(tmp_path)
    assert "echo a" in script and "not run" not in script
    assert [path.read_text() for path in tmp_path.iterdir()] == ['print("b")\n']


def test_a_promise_that_is_broken_is_noticed(tmp_path: Path) -> None:
    """A negative control: scores that training has made worse, and a table that shows others than were found."""

    def write(run: str, values: dict[str, float]) -> None:
        records = [{"method": "trained", "metric": "ndcg_cut_10", "size": s, "value": v} for s, v in values.items()]
        (tmp_path / "scores" / run).mkdir(parents=True, exist_ok=True)
        (tmp_path / "scores" / run / "results.json").write_text(json.dumps({"records": records}))

    start, trained = dict(zip(SIZES, (0.2, 0.3, 0.7))), dict(zip(SIZES, (0.4, 0.5, 0.7)))
    shown = {size: [start[size], trained[size]] for size in SIZES}
    write("start", start)
    write("pairs", trained)
    tuned(tmp_path, shown)
    with pytest.raises(AssertionError):
        tuned(tmp_path, {**shown, "2x64": [0.2, 0.9]})
    write("pairs", start)
    with pytest.raises(AssertionError):
        tuned(tmp_path, shown)

"""What the demo does to files that are not its own, and what it says; the demo itself is run by CI (`make demo`)."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from launch import demo
from launch.demo import EVALUATION, QUICK, WHOLE, main


def test_what_is_not_ours_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """A folder of other files, a link and a file in the demo's place, and a question without a demo or an answer."""
    monkeypatch.chdir(tmp_path)
    theirs = tmp_path / "runs/demo"
    theirs.mkdir(parents=True)
    (theirs / "thesis.txt").write_text("mine")
    assert main([]) == 2 and "not of an earlier demo" in capsys.readouterr().err
    (tmp_path / "runs/other").mkdir()
    (theirs / "thesis.txt").rename(tmp_path / "runs/other/demo.json")
    theirs.rmdir()
    theirs.symlink_to(tmp_path / "runs/other")
    assert main([]) == 2 and "is a link or a file" in capsys.readouterr().err
    assert (tmp_path / "runs/other/demo.json").read_text() == "mine"
    assert main(["ask", "why?"]) == 2 and "holds no exported model" in capsys.readouterr().err


def test_the_forecast_follows_the_work_and_the_machine() -> None:
    whole = demo.forecast_seconds(WHOLE, speed=1e11, bf16_units=False)
    assert QUICK.operations < 0.6 * WHOLE.operations
    assert demo.forecast_seconds(QUICK, speed=1e11, bf16_units=False) < whole
    assert demo.forecast_seconds(WHOLE, speed=1e11, bf16_units=True) < whole
    assert demo.forecast_seconds(WHOLE, speed=5e10, bf16_units=False) > 1.5 * whole
    # A token costs 21 million operations forward, three times that with its gradient.
    step = dataclasses.replace(WHOLE, pair_steps=WHOLE.pair_steps + 1).operations - WHOLE.operations
    assert step == pytest.approx(3 * 64 * (14 + 58) * 21.2e6, rel=0.01)


def test_the_summary_puts_every_control_beside_a_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def write(folder: Path, values: dict[str, float]) -> None:
        rows = [
            {"method": method, "metric": metric, "value": value, "size": size, "layers": layers, "dim": 8 * layers}
            for method, value in values.items()
            for metric in ("recip_rank_10", "ndcg_cut_10", "recall_100")
            for size, layers in ((("", 0),) if method == "BM25" else (("demi", 1), ("venti", 2)))
        ]
        folder.mkdir(parents=True)
        (folder / "results.json").write_text(json.dumps({"records": rows}))

    write(EVALUATION, {"trained": 0.5, "untrained": 0.125, "BM25": 0.25})
    summary = demo.summarise(seconds=1.04)
    assert "as_it_is_mrr10" not in summary and "as it is" not in demo.table_of(summary)
    write(demo.AS_IT_IS, {"trained": 0.375})
    summary = demo.summarise(seconds=1.04)
    assert summary["as_it_is_mrr10"] == {"demi": 0.375, "venti": 0.375}
    assert (summary["mrr10"]["demi"], summary["untrained_mrr10"]["demi"], summary["bm25_mrr10"]) == (0.5, 0.125, 0.25)
    assert "| demi | 1 × 8 | 0.500 | 0.375 | 0.125 | 0.500 | 0.500 |" in demo.table_of(summary)
    assert "| BM25 |  | 0.250 |" in demo.table_of(summary)

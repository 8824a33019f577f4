"""The scores in the table of a resized model, and the figures of its rows."""

import math
from pathlib import Path

import pytest

from models.sizes import Size
from trainer.evaluation.results.report import Record
from trainer.resizing import figures
from trainer.resizing.table import Row, scores_of


def row(task: str, layers: int, closed_form: float | None) -> Row:
    nothing = dict.fromkeys(("as_it_is_to_whole", "closed_form_to_whole", "resized_to_whole"))
    score = {"as_it_is": 0.1 * layers, "closed_form": closed_form, "resized": 0.3 * layers}
    return Row(task=task, layers=layers, dim=8 * layers, milliseconds=2.0 * layers, megabytes=1.0, **score, **nothing)


def test_two_figures_a_task(tmp_path: Path) -> None:
    rows = [row(task, layers, 0.2) for task in ("stsb", "a/b") for layers in (1, 2)]
    names = [path.name for path in figures.draw(rows, tmp_path / "figures")]
    assert names == [
        "stsb_by_size.png",
        "stsb_by_milliseconds.png",
        "a_b_by_size.png",
        "a_b_by_milliseconds.png",
    ]
    assert all((tmp_path / "figures" / name).read_bytes().startswith(b"\x89PNG") for name in names)


def test_what_is_drawn_is_each_methods_score_of_its_own_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A method without scores, as the closed form of a model without heads, has no line."""
    drawn: dict[str, object] = {}
    monkeypatch.setattr(
        figures, "plot_score_by_size", lambda curves, path, **_: drawn.update({path.name: curves}) or path
    )
    figures.draw([row("stsb", 1, None), row("stsb", 2, None), row("sick", 1, 0.25)], tmp_path)
    assert drawn["stsb_by_size.png"] == {
        "resized": {Size(1, 8): 0.3, Size(2, 16): 0.6},
        "truncated as it is": {Size(1, 8): 0.1, Size(2, 16): 0.2},
    }
    assert drawn["sick_by_size.png"]["closed form, no training"] == {Size(1, 8): 0.25}  # type: ignore[index]


def test_scores_that_are_not_defined_are_left_out(tmp_path: Path) -> None:
    """A correlation where all scores are equal: the row has none, and a task without scores has no figures."""
    size = Size(1, 8)
    of_task = {"method": "trained", "size": "1x8", "layers": 1, "dim": 8, "task": "sts", "kind": "sts"}
    records = [
        Record(**of_task, metric=name, value=value) for name, value in (("spearman", math.nan), ("pearson", 0.5))
    ]
    assert scores_of("resized", records) == {("sts", size, "resized"): None}
    to_whole = Record(**of_task, metric="spearman", value=0.25, document_layers=3)
    assert scores_of("resized", [to_whole]) == {("sts", size, "resized_to_whole"): 0.25}
    empty = row("sts", 1, None).model_copy(update={"as_it_is": None, "resized": None})
    assert figures.draw([empty], tmp_path / "figures") == []

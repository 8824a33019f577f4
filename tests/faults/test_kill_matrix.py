"""The kill matrix in short: real runs killed at random moments end as if nothing had happened.

There is one trial at the ZeRO stage that partitions all it can, and one run that is resumed from a wrong checkpoint,
which the figures must show. Copies of a run's records test that the figures show every other difference. A kill at the
shipped default's stage is in tests/test_road.py; for all stages and more trials: `python -m tests.faults.kill_matrix`.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.comparison import NO_DIFFERENCES, compare, step_records
from tests.faults.kill_matrix import MOMENTS, MUST_BE_0, draw_moment, is_good, run_matrix
from tests.faults.tiny_run import SAVE_EVERY_STEPS, STEPS, TARGETS

STAGES = (3,)

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def result(launcher: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_matrix(tmp_path_factory.mktemp("killed") / "runs", trials=len(STAGES), seed=1, stages=STAGES)


def test_killed_runs_end_as_if_nothing_had_happened(result: dict[str, Any]) -> None:
    assert {name: result[name] for name in MUST_BE_0} == dict.fromkeys(MUST_BE_0, 0), json.dumps(result, indent=2)
    assert result["trials"] == len(STAGES)
    assert result["kills"] >= len(STAGES)
    assert {trial["stage"] for trial in result["each_trial"]} == set(STAGES)
    assert is_good(result)


def test_a_checkpoint_that_is_off_by_one_batch_is_noticed(result: dict[str, Any]) -> None:
    """Negative control through a real start."""
    control = result["control"]
    assert control["mismatched_steps"] > 0 and control["mismatched_weights"] == 1
    assert control["repeated_documents"] > 0 and control["missed_documents"] > 0
    assert not is_good({**result, "control": vars(NO_DIFFERENCES)})
    assert not any(is_good({**result, name: 1}) for name in MUST_BE_0)


DOCUMENTS = [(0, index) for index in range(8)]


def write_run(run: Path) -> Path:
    """Write a run folder with two steps of two ranks and two documents each."""
    (run / "samples").mkdir(parents=True)
    (run / "model").mkdir()
    (run / "model" / "model.safetensors").write_bytes(b"weights")
    records = [{"step": step, "loss": 0.1 * step, "grad_norm": 1.5, "seconds": run.name} for step in (1, 2)]
    lines = [records[0], {"step": 1, "checkpoint/seconds": 0.1}, records[1]]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for rank in (0, 1):
        samples = [[[0, 4 * step + 2 * rank], [0, 4 * step + 2 * rank + 1]] for step in (0, 1)]
        text = "".join(json.dumps({"step": step, "samples": drawn}) + "\n" for step, drawn in enumerate(samples, 1))
        (run / "samples" / f"rank_{rank:05d}.jsonl").write_text(text)
    return run


def change(file: str, old: str, new: str) -> Callable[[Path], None]:
    def apply(run: Path) -> None:
        text = (run / file).read_text()
        assert old in text
        (run / file).write_text(text.replace(old, new, 1))

    return apply


def repeat_last_line(file: str) -> Callable[[Path], None]:
    def apply(run: Path) -> None:
        text = (run / file).read_text()
        (run / file).write_text(text + text.splitlines(keepends=True)[-1])

    return apply


SAMPLES = "samples/rank_00001.jsonl"


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda run: None, (0, 0, 0, 0)),
        (change("metrics.jsonl", '"loss": 0.1', '"loss": 0.10000000000000002'), (1, 0, 0, 0)),
        (change("metrics.jsonl", '"grad_norm": 1.5', '"grad_norm": 1.50'), (1, 0, 0, 0)),
        (change("metrics.jsonl", '"step": 2', '"step": 3'), (2, 0, 0, 0)),
        (repeat_last_line("metrics.jsonl"), (1, 0, 0, 0)),
        (change("model/model.safetensors", "w", "v"), (0, 1, 0, 0)),
        (change(SAMPLES, "[0, 2]", "[0, 1]"), (1, 0, 1, 1)),
        (change(SAMPLES, "[0, 2]", "[1, 2]"), (1, 0, 1, 1)),
        (change(SAMPLES, "[0, 2], [0, 3]", "[0, 3], [0, 2]"), (1, 0, 0, 0)),
        (change(SAMPLES, '{"step": 1', '"step": 1'), (1, 0, 0, 2)),
        (repeat_last_line(SAMPLES), (1, 0, 2, 0)),
        (lambda run: (run / SAMPLES).unlink(), (2, 0, 0, 4)),
    ],
)
def test_every_difference_is_counted(damage: Callable[[Path], None], expected: tuple[int, ...], tmp_path: Path) -> None:
    undisturbed, run = write_run(tmp_path / "undisturbed"), write_run(tmp_path / "run")
    damage(run)
    assert tuple(vars(compare(run, undisturbed, documents=DOCUMENTS)).values()) == expected


def test_records_of_before_a_kill_count_too(tmp_path: Path) -> None:
    undisturbed, run = write_run(tmp_path / "undisturbed"), write_run(tmp_path / "run")
    before = step_records(run)
    assert compare(run, undisturbed, documents=DOCUMENTS, before=before) == NO_DIFFERENCES
    other = [(step, record.replace("1.5", "1.6")) for step, record in before[:1]]
    assert compare(run, undisturbed, documents=DOCUMENTS, before=other).mismatched_steps == 1


def test_a_line_cut_off_by_a_kill_is_no_record(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    text = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(text[:-3])
    assert [step for step, _ in step_records(run)] == [1]


def test_moments_fall_on_all_targets_and_mostly_on_saves() -> None:
    rng = random.Random(3)
    moments = [draw_moment(rng, saved_step=4) for _ in range(400)]
    kinds = Counter(moment.kind for moment in moments)
    assert set(kinds) == set(MOMENTS) and kinds["save"] > 200
    assert {moment.target for moment in moments} == set(TARGETS)
    saves = {moment.step for moment in moments if moment.kind == "save"}
    assert saves == set(range(2 * SAVE_EVERY_STEPS, STEPS + 1, SAVE_EVERY_STEPS))
    assert {moment.step for moment in moments if moment.kind == "step"} == set(range(5, STEPS + 1))
    assert {moment.kind for moment in (draw_moment(rng, saved_step=STEPS) for _ in range(50))} == {"start", "end"}

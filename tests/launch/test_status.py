"""`python -m launch.status` on planted run folders: states, times, tables, JSON, and what a user may get wrong."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from launch.status import as_text, main, read_status
from trainer.config.load import as_toml, build_recipe

NOW = 1_800_000_000.0
CUPS = {"demi": "1x8", "short": "2x16", "tall": "3x24", "grande": "4x32", "venti": "5x40", "trenta": "6x48"}
Line = dict[str, Any]


def plant(folder: Path, lines: list[Line], *, age_seconds: float = 5.0, **sections: dict[str, Any]) -> Path:
    """A run folder as training leaves it, everything in it written `age_seconds` before NOW."""
    values: dict[str, dict[str, Any]] = {
        "model": {"config": {"model_type": "bert"}, "ladder": [[n, 8 * n] for n in range(1, 7)]},
        "data": {"shards": ["shards"]},
        "objective": {"name": "masked"},
        "train": {"steps": 100},
        "checkpoint": {"every_steps": 20},
        "log": {"every_steps": 10},
    }
    for section, table in sections.items():
        values[section] = {**values.get(section, {}), **table}
    folder.mkdir(parents=True)
    (folder / "recipe.toml").write_text(as_toml(build_recipe(values)))
    if lines:
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    touch(folder, age_seconds)
    return folder


def touch(folder: Path, age_seconds: float) -> None:
    for path in [folder, *folder.rglob("*")]:
        os.utime(path, (NOW - age_seconds, NOW - age_seconds))


def step(number: int, **more: float) -> Line:
    return {
        "step": number,
        "epoch": number / 200,
        "loss": 8.0,
        "lr": 1e-3,
        "grad_norm": 1.5,
        "tokens_per_second": 12345.6,
        "mfu": 0.314,
        "padding_share": 0.04,
        "data_wait_share": 0.01,
        "memory_mib": 900.0,
        "seconds": 2.0,
        **{f"{side}/{name}": value + index for side, value in (("encoder", 1.0), ("decoder", 10.0))
           for index, name in enumerate(CUPS)},
        **more,
    }  # fmt: skip


def evaluation(number: int) -> Line:
    scores = {f"evaluation/docs/ndcg_cut_10/{name}": 0.1 * (i + 1) for i, name in enumerate(CUPS)}
    return {"step": number, **scores, "evaluation/docs/ndcg_cut_10/1x48": 0.9}


def checkpoint(folder: Path, number: int) -> None:
    (folder / "checkpoints" / f"step_{number:08d}").mkdir(parents=True)
    (folder / "checkpoints" / f"step_{number:08d}" / "manifest.json").write_text("{}")


def test_a_running_one(tmp_path: Path) -> None:
    saved = {"step": 40, "checkpoint/seconds": 9.0, "checkpoint/still_seconds": 3.0, "checkpoint/mib": 10.0}
    run = plant(tmp_path / "run", [*(step(n) for n in range(10, 51, 10)), saved, evaluation(40)])
    for number in (20, 40):
        checkpoint(run, number)
    (run / "checkpoints" / "tmp-step_00000060").mkdir()
    touch(run, 5.0)
    status = read_status(run, now=NOW)
    assert (status.state, status.step, status.total_steps, status.total_is_estimated) == ("running", 50, 100, False)
    assert status.seconds_since_written == pytest.approx(5.0)
    # 50 steps of 2 s, and the checkpoints of steps 60, 80 and 100 at 3 s.
    assert status.seconds_left == pytest.approx(50 * 2.0 + 3 * 3.0)
    assert status.checkpoint_step == 40 and status.evaluation_step == 40
    assert [size.name for size in status.sizes] == list(CUPS)
    assert [size.losses["encoder"] for size in status.sizes] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert [size.scores["docs/ndcg_cut_10"] for size in status.sizes] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    assert status.warnings == []
    text = as_text([status], now=NOW)
    for part in ("running", "step 50 of 100 (50%)", "1 min 49 s left", "12,346 tokens/s", "MFU 31.4%", "docs nDCG@10"):
        assert part in text, text
    (venti,) = [line.split() for line in text.splitlines() if "venti" in line]
    assert venti == ["venti", "5", "40", "5.000", "14.000", "0.5000"]


@pytest.mark.parametrize(
    "age_seconds, seconds_a_step, state",
    [
        (599, 1.0, "running"),
        (601, 1.0, "silent"),
        # Slow steps are logged 10 apart: ten minutes of nothing are no sign.
        (601, 30.0, "running"),
        (1201, 30.0, "silent"),
    ],
)
def test_silence(tmp_path: Path, age_seconds: float, seconds_a_step: float, state: str) -> None:
    run = plant(tmp_path / "run", [step(10, seconds=seconds_a_step)], age_seconds=age_seconds)
    status = read_status(run, now=NOW)
    assert status.state == state and (status.seconds_left is None) == (state == "silent")
    assert ("silent since" in as_text([status], now=NOW)) == (state == "silent")


def test_a_checkpoint_is_a_sign_of_life(tmp_path: Path) -> None:
    run = plant(tmp_path / "run", [step(10)], age_seconds=5000)
    assert read_status(run, now=NOW).state == "silent"
    checkpoint(run, 20)
    os.utime(run / "checkpoints" / "step_00000020", (NOW - 3, NOW - 3))
    assert read_status(run, now=NOW).state == "running"


def test_ends_and_beginnings(tmp_path: Path) -> None:
    assert read_status(plant(tmp_path / "starting", []), now=NOW).state == "starting"
    done = plant(tmp_path / "done", [step(100)], age_seconds=99999)
    (done / "DONE").write_text("")
    assert read_status(done, now=NOW).state == "done"
    stopped = plant(tmp_path / "stopped", [step(30)], age_seconds=99999)
    (stopped / "STOPPED").write_text(json.dumps({"step": 30, "reason": "SIGUSR1"}))
    status = read_status(stopped, now=NOW)
    assert (status.state, status.reason) == ("stopped", "SIGUSR1")
    assert "stopped (SIGUSR1)" in as_text([status], now=NOW)
    (stopped / "STOPPED").write_text("")
    assert (read_status(stopped, now=NOW).state, read_status(stopped, now=NOW).reason) == ("stopped", None)
    early = plant(tmp_path / "early", [step(30)], age_seconds=99999, train={"stop_at_step": 30})
    assert read_status(early, now=NOW).reason == "train.stop_at_step"


def test_steps_are_reckoned_by_epochs(tmp_path: Path) -> None:
    status = read_status(plant(tmp_path / "run", [step(50)], train={"steps": 0, "epochs": 2.0}), now=NOW)
    assert (status.total_steps, status.total_is_estimated) == (400, True)
    assert "of about 400" in as_text([status], now=NOW)


@pytest.mark.parametrize(
    "changed, said",
    [
        ({"loss": math.nan, "grad_norm": math.inf}, "loss and grad_norm not finite"),
        ({"data_wait_share": 0.5}, "50% of the time waits for data"),
        ({"padding_share": 0.7}, "70% of the tokens computed are padding"),
        ({"step": 90}, "the newest checkpoint is 90 steps old"),
    ],
)
def test_warnings(tmp_path: Path, changed: dict[str, float], said: str) -> None:
    (warning,) = read_status(plant(tmp_path / "run", [step(10) | changed]), now=NOW).warnings
    assert said in warning


def test_faults(tmp_path: Path) -> None:
    """A window of skipped steps alone has no loss, and is a logged step all the same."""
    faults = [
        {"step": 8, "fault": "spike", "fault/loss": "99.0"},
        {"step": 12, "fault": "non-finite loss", "fault/loss": "nan"},
        {"step": 14, "fault": "non-finite gradient", "fault/loss": "1.0"},
    ]
    skipped = {"step": 20, "epoch": 0.1, "lr": 1e-3, "seconds": 2.0, "skipped_steps": 10}
    run = plant(tmp_path / "run", [faults[0], step(10, skipped_steps=0), *faults[1:], skipped])
    status = read_status(run, now=NOW)
    assert status.step == 20 and status.newest["skipped_steps"] == 10
    assert status.warnings == [
        "10 steps skipped, the newest: non-finite gradient at step 14",
        "1 spike of the loss, the newest: at step 8",
    ]
    assert as_text([status], now=NOW).count("warning: ") == 2
    calm = plant(tmp_path / "calm", [step(10, skipped_steps=0)])
    assert read_status(calm, now=NOW).warnings == []


def test_a_score_that_is_not_defined(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Null is a value like another: the newest evaluation has no such score, and no earlier one takes its place."""
    scores = {"evaluation/a/spearman/demi": 0.5, "evaluation/a/ndcg_cut_10/demi": 0.7}
    run = plant(tmp_path / "run", [step(10), {"step": 10, **scores}])
    assert read_status(run, now=NOW).sizes[0].scores == {"a/spearman": 0.5, "a/ndcg_cut_10": 0.7}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 20, **scores, "evaluation/a/spearman/demi": None}) + "\n")
    status = read_status(run, now=NOW)
    assert status.sizes[0].scores == {"a/ndcg_cut_10": 0.7} and status.warnings == []
    assert main([str(run)]) == 0 and "damaged" not in capsys.readouterr().out


def test_damaged_lines_and_one_being_written(tmp_path: Path) -> None:
    run = plant(tmp_path / "run", [step(10)])
    whole = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(whole + '{"step": 2' + "\n" + json.dumps(step(20)) + "\n" + '{"step": 30, "lo')
    status = read_status(run, now=NOW)
    assert status.step == 20 and status.warnings == ["1 damaged line in metrics.jsonl"]


def test_lines_of_other_versions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Lines without a format are read. Those of an unknown one are counted, and are not called damaged."""
    later = {"format": 2, "epoch": 0.9, "a new name": "of a later version"}
    run = plant(tmp_path / "run", [step(10), {"format": 1, **step(20)}, later, {**step(30), "format": 2}])
    status = read_status(run, now=NOW)
    assert status.step == 20 and status.newest["loss"] == 8.0 and "format" not in status.newest
    (warning,) = status.warnings
    assert warning.startswith("2 lines in metrics.jsonl of a format that this version does not read; use the version")
    assert main([str(run)]) == 0 and f"warning: {warning}" in capsys.readouterr().out
    known = plant(tmp_path / "known", [step(10), {"format": 1, **step(20)}])
    assert read_status(known, now=NOW).warnings == []


def test_recipes_of_other_versions_are_read(tmp_path: Path) -> None:
    run = plant(tmp_path / "run", [step(10)])
    with (run / "recipe.toml").open("a") as file:
        file.write("\n[section_of_tomorrow]\nkey = 1\n")
    assert read_status(run, now=NOW).step == 10


def test_several_are_a_row_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launch.status.time.time", lambda: NOW)
    first = plant(tmp_path / "first", [step(10), evaluation(10)])
    second = plant(tmp_path / "second", [{"step": 7, "epoch": 0.1, "loss": 2.0, "seconds": 1.0, "loss/tall": 0.75}])
    assert main([str(first), str(second)]) == 0
    header, _, one, two, *rest = capsys.readouterr().out.splitlines()
    assert header.split()[:3] == ["run", "state", "step"]
    assert str(first) in one and "1.00 2.00 3.00 4.00 5.00 6.00" in one and "0.100 0.200" in one
    assert str(second) in two and "0.750" in two and "7 of 100" in two
    assert not rest


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launch.status.time.time", lambda: NOW)
    run = plant(tmp_path / "run", [step(10, loss=math.nan)])
    assert main([str(run), "--json"]) == 0

    def refuse(name: str) -> None:
        raise AssertionError(name)

    (status,) = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert status["state"] == "running" and status["step"] == 10 and status["newest"]["loss"] is None
    assert status["sizes"][5] == {
        "name": "trenta", "layers": 6, "dim": 48, "feed_forward": 1.0,
        "losses": {"encoder": 6.0, "decoder": 15.0}, "scores": {},
    }  # fmt: skip


def test_sizes_with_narrower_feed_forwards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    losses = {"loss/3x16x0.25": 1.0, "loss/3x32": 2.0, "loss/3x24x0.5": 3.0}
    run = plant(tmp_path / "run", [step(10) | losses], model={"ladder": [[3, 16, 0.25], [3, 32]]})
    assert main([str(run), "--json"]) == 0
    (status,) = json.loads(capsys.readouterr().out)
    found = {(s["layers"], s["dim"], s["feed_forward"]): s["losses"]["loss"] for s in status["sizes"]}
    assert found == {(3, 16, 0.25): 1.0, (3, 24, 0.5): 3.0, (3, 32, 1.0): 2.0}
    assert main([str(run)]) == 0
    assert "feed-forward" in capsys.readouterr().out


def test_watching_ends_with_the_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = plant(tmp_path / "run", [step(10)])
    waits = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 2:
            (run / "DONE").write_text("")

    monkeypatch.setattr("launch.status.time.time", lambda: NOW)
    monkeypatch.setattr("launch.status.time.sleep", sleep)
    assert main([str(run), "--watch", "7"]) == 0
    assert waits == [7.0, 7.0]
    assert [line.split(", ")[0].split(": ")[1] for line in capsys.readouterr().out.splitlines() if "run: " in line] == [
        "running",
        "running",
        "done",
    ]


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda folder: folder / "nowhere", "is no folder"),
        (lambda folder: folder, "it holds runs: "),
        (lambda folder: folder / "empty", "it has no recipe.toml; name the folders of runs"),
        (lambda folder: folder / "damaged", "recipe.toml is damaged"),
        (lambda folder: folder / "foreign", "recipe.toml is damaged (it has no 'model')"),
        (lambda folder: folder / "shrinking", "the ladder does not increase"),
    ],
)
def test_user_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str], make: Any, said: str) -> None:
    plant(tmp_path / "run", [step(10)])
    (tmp_path / "empty").mkdir()
    recipes = {"damaged": "[model", "foreign": "[tool]", "shrinking": "[model]\nladder = [[2, 32], [1, 64]]"}
    for name, text in recipes.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "recipe.toml").write_text(text)
    assert main([str(make(tmp_path))]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and len(err.splitlines()) == 1 and said in err


def test_what_cannot_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = plant(tmp_path / "run", [step(10)])

    def refuse(path: Path, *arguments: Any, **named: Any) -> str:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_text", refuse)
    assert main([str(run)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {run}/recipe.toml: Permission denied; give this user leave")


def test_watch_wants_seconds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), "--watch", "0"]) == 2
    assert "--watch 0.0 must be above 0 seconds" in capsys.readouterr().err


def damaged_recipe(run: Path, old: str, new: str) -> None:
    text = (run / "recipe.toml").read_text()
    assert old in text
    (run / "recipe.toml").write_text(text.replace(old, new))
    touch(run, 5.0)


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("\nsteps = 100", '\nsteps = "x"', "train.steps"),
        ("\nsteps = 100", "\nsteps = -1", "train.steps"),
        ("\nsteps = 100", "\nsteps = 1.5", "train.steps"),
        ("\nsteps = 100", "\nsteps = true", "train.steps"),
        ("epochs = 1.0", "epochs = nan", "train.epochs"),
        ("epochs = 1.0", "epochs = inf", "train.epochs"),
        ("stop_at_step = 0", "stop_at_step = []", "train.stop_at_step"),
        ("[checkpoint]\nevery_steps = 20", '[checkpoint]\nevery_steps = "x"', "checkpoint.every_steps"),
        ("[log]\nevery_steps = 10", "[log]\nevery_steps = 1e400", "log.every_steps"),
    ],
)
def test_what_a_recipe_cannot_hold_is_named(tmp_path: Path, old: str, new: str, named: str) -> None:
    run = plant(tmp_path / "run", [step(10)])
    damaged_recipe(run, old, new)
    status = read_status(run, now=NOW)
    assert status.step == 10 and f"recipe.toml is damaged: {named} cannot be" in status.warnings
    assert "step 10" in as_text([status], now=NOW)


def test_a_section_that_is_a_number(tmp_path: Path) -> None:
    run = plant(tmp_path / "run", [step(10)])
    (run / "recipe.toml").write_text("train = 3\n[model]\nladder = [[1, 8]]\n")
    touch(run, 5.0)
    (warning,) = read_status(run, now=NOW).warnings
    assert "train.steps and train.epochs and train.stop_at_step" in warning


@pytest.mark.parametrize(
    "line",
    [
        '{"step": 20, "epoch": "x"}',
        '{"step": 20, "epoch": 0.1, "loss": "x"}',
        '{"step": 20, "epoch": 0.1, "seconds": [1]}',
        '{"step": 20, "epoch": 0.1, "encoder/demi": [null]}',
        '{"step": 20, "evaluation/a/mrr/demi": {}}',
        '{"step": 20, "epoch": 0.1, "loss": 1' + "0" * 400 + "}",
        '{"step": 1' + "0" * 5000 + "}",
        '{"step": true}',
        '{"step": -3}',
        '{"step": 1e400, "epoch": 0.1}',
        '{"step": 20, "epoch": 0.1, "skipped_steps": 1e400}',
        '{"step": 20, "epoch": 0.1, "samples": -1}',
        '{"step": 20, "fault": "a cold"}',
        '{"step": 20, "format": "1"}',
        '{"epoch": 0.1}',
        "[" * 100_000,
        "[]",
        "3",
        '"x"',
        "\x00",
    ],
)
@pytest.mark.parametrize("more", [(), ("--json",)])
def test_lines_that_no_run_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, more: tuple[str, ...]
) -> None:
    run = plant(tmp_path / "run", [step(10)])
    with (run / "metrics.jsonl").open("a") as file:
        file.write(line + "\n")
    assert main([str(run), *more]) == 0
    out, err = capsys.readouterr()
    assert "1 damaged line in metrics.jsonl" in out and err == ""


@pytest.mark.parametrize(
    "line",
    [
        '{"step": 20, "epoch": 0}',
        '{"step": 20, "epoch": 0.0, "seconds": NaN}',
        '{"step": 20, "epoch": -1.0, "seconds": Infinity}',
        '{"step": 20, "epoch": NaN}',
        '{"step": 20, "epoch": 1e-320, "seconds": 1e300}',
        '{"step": 9007199254740000, "epoch": 0.5, "seconds": 1e9}',
        '{"step": 20, "epoch": 0.5, "encoder/0x0": 1.0, "encoder/999999999999x9": 1.0}',
        '{"step": 20, "epoch": 0.5, "later": "a text of a version to come"}',
        '{"step": 20, "checkpoint/still_seconds": NaN}',
        '{"step": 20, "epoch": 0.5, "loss": null, "encoder/demi": null}',
        '{"step": 20, "evaluation/a/spearman/demi": null}',
    ],
)
@pytest.mark.parametrize("steps", [0, 100])
def test_numbers_that_nothing_can_be_reckoned_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, steps: int
) -> None:
    run = plant(tmp_path / "run", [step(10)], train={"steps": steps})
    with (run / "metrics.jsonl").open("a") as file:
        file.write(line + "\n")
    for more in ((), ("--json",), (str(run),)):
        assert main([str(run), *more]) == 0
        assert "damaged" not in capsys.readouterr().out


def test_names_that_are_no_steps(tmp_path: Path) -> None:
    run = plant(tmp_path / "run", [step(10)])
    for name in ("step_\u00b2", "step_9" + "9" * 200, "step_-3", "step_00000010", "step_x"):
        (run / "checkpoints" / name).mkdir(parents=True)
        (run / "checkpoints" / name / "manifest.json").write_text("{}")
    assert read_status(run, now=NOW).checkpoint_step == 10


@pytest.mark.parametrize("text", ["", "[]", '{"reason": 3}', "[" * 100_000, "\x00", '{"step": 3}'])
def test_a_stop_that_does_not_say_why(tmp_path: Path, text: str) -> None:
    run = plant(tmp_path / "run", [step(10)])
    (run / "STOPPED").write_text(text)
    status = read_status(run, now=NOW)
    assert status.state == "stopped" and status.warnings == ["STOPPED is damaged: it does not say why"]


def test_escape_codes_do_not_reach_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a folder's name, a stop's reason, a fault and a task; in JSON they are JSON's."""
    red = "\x1b[31m\u202e"
    lines = [step(10), {"step": 10, f"evaluation/{red}/ndcg_cut_10/demi": 0.5}, {"step": 10, "fault": red, "format": 1}]
    run = plant(tmp_path / f"run{red}", [*lines, step(20, skipped_steps=1)])
    (run / "STOPPED").write_text(json.dumps({"step": 20, "reason": red}))
    for more in ((), (str(run),), ("--json",)):
        assert main([str(run), *more]) == 0
        out = capsys.readouterr().out
        assert "\x1b" not in out and "\u202e" not in out and "31m" in out


def test_one_damaged_folder_hides_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = plant(tmp_path / "run", [step(10)])
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad/recipe.toml").write_text("[model]\nladder = [[1, inf]]")
    assert main([str(tmp_path / "bad"), str(run), str(tmp_path / "nowhere")]) == 2
    out, err = capsys.readouterr()
    assert "step 10 of 100" in out and len(err.splitlines()) == 2


@pytest.mark.parametrize("seconds", ["inf", "nan", "1e10", "-1", "86401"])
def test_watch_has_bounds(tmp_path: Path, capsys: pytest.CaptureFixture[str], seconds: str) -> None:
    assert main([str(tmp_path), f"--watch={seconds}"]) == 2
    assert "must be above 0 seconds, and at most a day" in capsys.readouterr().err


def test_times_that_no_calendar_has(tmp_path: Path) -> None:
    run = plant(tmp_path / "run", [step(10)])
    for path in run.rglob("*"):
        os.utime(path, (-(2**33), -(2**33)))
    assert "silent since 1970" in as_text([read_status(run, now=NOW)], now=NOW)

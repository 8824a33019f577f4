"""The page of a qualification, its exit codes, and that one faulty part does not take it with it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launch import qualified, qualify
from launch.qualified import Page, calibration, gpu_named, plan_asked, prediction_of, remaining_seconds, shares_of
from launch.qualify import PARTS, SUBJECTS, Part, Phase, ended, main
from launch.scaling import GPUS, Assumptions
from trainer.config.load import as_tables
from trainer.config.schema import Recipe
from trainer.qualification.lines import Bound, Found, Line, Outcome, judged, measured, not_answered
from trainer.qualification.measure import ALONE, TOGETHER

H100 = "NVIDIA H100 80GB HBM3"
PASSED = Line("attention", "is it equal?", judged({"error": Bound(1e-7, most=1e-5)}), 1.0)
FAILED = Line("ranks", "are they equal?", judged({"error": Bound(1.0, most=1e-5)}), 2.0)
SILENT = Line("ranks", "over NCCL?", not_answered("there is no GPU"), 0.0)


def page(*lines: Line, device: str = "a CPU") -> Page:
    return Page(lines, {"device": device}, quick=True, hostfile=False, seconds=12.3)


def test_the_page_has_a_verdict_a_line() -> None:
    shown = page(PASSED, FAILED, SILENT)
    assert shown.failed == 1 and shown.summary == "1 passed, 1 failed, 1 not answered; 12 s"
    text = shown.text
    assert "| is it equal? | passed | error 1e-07 | error ≤ 1e-05 | 1.0 |" in text
    assert "| are they equal? | **failed** | error 1 | error ≤ 1e-05 | 2.0 |" in text
    assert "| over NCCL? | not answered | there is no GPU |  | 0.0 |" in text
    assert text.index("## Packed and padded attention") < text.index("## Ranks × ZeRO stages")
    record = shown.as_json
    assert (record["passed"], record["failed"], record["not_answered"]) == (1, 1, 1)
    assert [Line.of_json(each) for each in record["lines"]] == [PASSED, FAILED, SILENT]


def test_the_json_has_no_values_that_json_lacks() -> None:
    """Not a number fails a line, and stays on the page. Negative control: other values stay."""
    values = {"error": Bound(float("nan"), most=1e-5), "ratio": Bound(float("inf"), most=1.0), "rest": Bound(0.5)}
    shown = page(Line("ranks", "are they equal?", judged(values), 2.0))
    assert "error nan, ratio inf, rest 0.5" in shown.text and shown.failed == 1
    record = json.loads(json.dumps(shown.as_json, allow_nan=False))
    assert record["lines"][0]["values"] == {"error": None, "ratio": None, "rest": 0.5}


def test_every_subject_has_a_title() -> None:
    assert {*SUBJECTS, "plan"} == set(qualified.TITLES)


def test_the_time_left_follows_the_pace() -> None:
    left = remaining_seconds
    assert left([10, 20, 30], done=0, before=0.0, here=0.0) == 60
    assert left([10, 20, 30], done=0, before=0.0, here=4.0) == 56
    assert left([10, 20, 30], done=1, before=20.0, here=0.0) == 100, "half as fast as expected"
    assert left([10, 20, 30], done=1, before=10.0, here=80.0) == 90, "the second part is slow"
    assert left([10], done=0, before=0.0, here=50.0) == 0


# --- launch.plan -------------------------------------------------------------------------------------------------


@pytest.fixture
def record() -> dict[str, Any]:
    """As trainer/qualification/steps.py writes it."""
    config = {"model_type": "bert", "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
    config |= {"intermediate_size": 3072, "max_position_embeddings": 512, "vocab_size": 30522}
    recipe = as_tables(Recipe())
    recipe["objective"]["name"] = "masked"
    recipe["train"] |= {"global_batch_size": 16, "micro_batch_size": 8}
    return {"recipe": recipe, "config": config, "lengths": {"document": 300.0}, "device": H100}


def outcomes(records: dict[str, Any], *, cuda: bool = True) -> list[Outcome]:
    return [each.measure() for each in plan_asked(lambda: records, [], cuda=cuda, hosts=False)]


def test_a_prediction_stands_beside_each_measurement(record: dict[str, Any]) -> None:
    predicted = prediction_of(record, "h100", Assumptions())
    assert predicted.gpus == 1 and predicted.stage == 0 and predicted.global_batch_size == 16
    memory = predicted.memory.total - predicted.memory.context
    record |= {"seconds": 1.5 * predicted.step_seconds, "peak_bytes": 0.8 * memory}
    time, space, *others = outcomes({"SMAE": record})
    assert time.verdict == space.verdict == "passed"
    assert time.values == pytest.approx({"measured ÷ predicted": 1.5})
    assert [each.figure for each in others] == ["the step was not measured"] * 2
    record |= {"seconds": 2.1 * predicted.step_seconds, "peak_bytes": 2.1 * memory}
    assert [each.verdict for each in outcomes({"SMAE": record})[:2]] == ["failed"] * 2


def test_what_the_plan_does_not_know_is_not_answered(record: dict[str, Any]) -> None:
    record |= {"seconds": 1.0, "peak_bytes": 1.0, "device": "NVIDIA GeForce RTX 4090"}
    for found in (outcomes({"SMAE": record}), outcomes({}, cuda=False)):
        assert {each.verdict for each in found} == {"not answered"}


@pytest.mark.parametrize(
    ("device", "sheet"),
    [
        (H100, "h100"),
        ("H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA A100-SXM4-40GB", None),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", None),
        ("NVIDIA RTX A1000", None),
    ],
)
def test_the_sheet_of_a_device_is_the_one_of_its_product(device: str, sheet: str | None) -> None:
    """Each of these shares a part of its name with a product that has another memory, another link or another peak."""
    assert gpu_named(device) == sheet


def test_measured_speeds_become_options_of_the_plan(record: dict[str, Any]) -> None:
    sheet = GPUS["h100"]
    speeds = {"matrix_flops": 0.6 * sheet.peak_flops, "memory_bytes": 0.9 * sheet.memory_bandwidth}
    speeds |= {"link_bytes": 2 * sheet.link_bandwidth, "launch_seconds": 5e-6, "context_bytes": 2.0**29}
    lines = [Line("steps", name, measured("", {name: value}), 0.0) for name, value in speeds.items()]
    assert shares_of("h100", lines, hosts=False) == pytest.approx({"matrix": 0.6, "memory": 0.9, "link": 1.0})
    assert shares_of("h100", lines, hosts=True) == pytest.approx({"matrix": 0.6, "memory": 0.9})
    command, assumptions = calibration(lines, H100, hosts=False)
    assert "--gpu h100 --matrix-share 0.60 --memory-share 0.90 --link-share 1.00" in command
    assert "measured here 5.0 µs" in assumptions
    assert "900.0 GB/s" in calibration(lines, H100, hosts=True)[1]
    assert "Nothing here measured any" in calibration([], "a CPU", hosts=False)[0]
    slower = Assumptions(matrix_share=0.01)
    assert (
        prediction_of(record, "h100", slower).step_seconds > prediction_of(record, "h100", Assumptions()).step_seconds
    )


# --- the command -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("phase", "code", "verdicts", "told"),
    [
        (Phase("a"), 0, ["passed"], False),
        (Phase("a"), 1, ["passed", "failed"], True),
        (Phase("a"), None, ["passed", "failed"], True),
        (Phase("a", dies=True), 247, ["passed"], False),
        (Phase("a", dies=True), 0, ["failed"], True),
        (Phase("a", dies=True), None, ["passed", "failed"], True),
    ],
)
def test_how_a_phase_ends(phase: Phase, code: int | None, verdicts: list[str], told: bool) -> None:
    found = ended(Found((PASSED,)), phase, "attention", code, Path("log"), seconds=1.0)
    assert [line.outcome.verdict for line in found.lines] == verdicts
    assert found.told is told


def answering(outcome: Outcome | None) -> Callable[..., int]:
    """In the place of `call_into`: a process that has written a line, or none."""

    def call(log: Path, command: list[Any], **_: Any) -> int:
        words = [str(word) for word in command]
        path = Path(words[words.index("--lines") + 1])
        if outcome is not None:
            line = Line("attention", "asked", outcome, 0.0)
            path.write_text(json.dumps(line.as_json()) + "\n")
        return 0 if outcome is not None else -11

    return call


@pytest.mark.parametrize(
    ("outcome", "code"),
    [
        (judged({"error": Bound(0.0, most=1.0)}), 0),
        (not_answered("no GPU"), 0),
        (judged({"error": Bound(2.0, most=1.0)}), 1),
        (None, 1),
    ],
)
def test_the_exit_code_is_1_if_a_line_failed(
    outcome: Outcome | None, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(qualify, "call_into", answering(outcome))
    monkeypatch.setattr(qualify, "count_gpus", lambda: 0)
    written = tmp_path / "figures.json"
    assert main(["--quick", "--only", "attention", "--folder", str(tmp_path / "f"), "--json", str(written)]) == code
    record = json.loads(written.read_text())
    assert record["failed"] == code and len(record["lines"]) == 1
    # A failed line names files, which stay.
    assert bool(list((tmp_path / "f").glob("details_*"))) == bool(code)
    assert (tmp_path / "f" / "qualification.md").is_file()


@pytest.mark.parametrize(
    ("error", "stays"), [(KeyboardInterrupt(), False), (SystemExit(143), False), (KeyError(), True)]
)
def test_what_is_interrupted_leaves_nothing(
    error: BaseException, stays: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: after a fault of the program, what it has written stays."""

    def interrupted(log: Path, command: list[object], **_: object) -> None:
        log.write_text("begun")
        raise error

    monkeypatch.setattr(qualify, "call_into", interrupted)
    monkeypatch.setattr(qualify, "count_gpus", lambda: 0)
    words = ["--quick", "--only", "attention", "--folder", str(tmp_path)]
    if isinstance(error, KeyboardInterrupt):
        assert main(words) == 130
    else:
        with pytest.raises(type(error)):
            main(words)
    assert bool(list(tmp_path.iterdir())) == stays


def test_a_users_mistake_is_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("node1 slots=0\n")
    assert main(["--hostfile", str(hosts), "--folder", str(tmp_path)]) == 2
    assert "node1 has no slots" in capsys.readouterr().err
    hosts.write_text("localhost slots=1\n")
    alone = ["--only", "attention", "--only", "precision", "--only", "cross_entropy"]
    assert main(["--hostfile", str(hosts), "--folder", str(tmp_path / "new"), *alone]) == 2
    assert "--hostfile is read by the subjects ranks, resume, steps alone" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
    assert main(["--output", str(tmp_path), "--folder", str(tmp_path)]) == 2
    assert main(["--folder", str(tmp_path), "--json", str(tmp_path / "qualification.md")]) == 2
    assert "qualification.md is the page's file, too; name another" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert main(["--folder", str(tmp_path / "file")]) == 2
    with pytest.raises(SystemExit) as end:
        main(["--only", "everything"])
    assert end.value.code == 2


def test_the_subjects_that_read_a_hostfile_are_known() -> None:
    launched = {part.subject for part in PARTS if any(phase.launched for phase in part.phases)}
    assert launched == {*qualify.OF_HOSTS} - {"steps"}


def test_one_subject_of_hosts_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost slots=1\n")
    asked: list[object] = []
    monkeypatch.setattr(qualify.Qualification, "_answer", lambda self, part, progress: asked.append(part.subject))
    monkeypatch.setattr(qualify, "count_gpus", lambda: 0)
    words = ["--hostfile", str(hosts), "--folder", str(tmp_path / "new"), "--only", "attention", "--only", "ranks"]
    assert main(words) == 0 and asked == ["attention", "ranks"]


@pytest.mark.processes
def test_a_faulty_process_does_not_take_the_page_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process dies of a signal, one hangs, and the third one answers."""
    line = json.dumps(PASSED.as_json())
    programs = {
        "dies": "import os; os.kill(os.getpid(), 11)",
        "hangs": "import signal; signal.pause()",
        "answers": f"import sys; open(sys.argv[1], 'w').write({line!r} + chr(10))",
    }
    monkeypatch.setattr(qualify, "PARTS", tuple(Part(name, (Phase(name),), PARTS[0].seconds) for name in programs))
    monkeypatch.setattr(qualify, "SUBJECTS", tuple(programs))
    monkeypatch.setattr(qualify, "LONGEST_SECONDS", {True: 2.0})
    monkeypatch.setattr(qualify, "count_gpus", lambda: 0)

    def command(self: Any, phase: Phase, folder: Path, lines: Path) -> list[object]:
        return [sys.executable, "-c", programs[phase.name], lines]

    monkeypatch.setattr(qualify.Qualification, "_command", command)
    output = tmp_path / "page.md"
    assert main(["--quick", "--folder", str(tmp_path), "--output", str(output)]) == 1
    text = output.read_text()
    assert "| dies runs to its end | **failed** | the process ended with exit code -11;" in text
    assert "| hangs runs to its end | **failed** | it was ended after 2 s;" in text
    assert "| is it equal? | passed |" in text


@pytest.mark.processes
def test_the_command_answers_on_this_machine(tmp_path: Path) -> None:
    """Real measurements of two subjects, on a CPU."""
    written = tmp_path / "figures.json"
    words = ["--quick", "--only", "attention", "--only", "cross_entropy", "--folder", str(tmp_path)]
    assert main([*words, "--json", str(written)]) == 0
    record = json.loads(written.read_text())
    assert (record["passed"], record["failed"], record["not_answered"]) == (8, 0, 2)
    assert {line["subject"] for line in record["lines"]} == {"attention", "cross_entropy"}
    assert record["about"]["device"].startswith("CPU")


@pytest.mark.launcher
@pytest.mark.parametrize("subject", ["resume", "steps"])
def test_the_other_subjects_answer_on_this_machine(subject: str, tmp_path: Path) -> None:
    """Real launches; in the lane `full`. tests/launch/test_hosts.py has the subject `ranks`, on two hosts.

    tests/trainer/qualification/test_measurements.py has all that `precision` asks.
    """
    written = tmp_path / "figures.json"
    assert main(["--quick", "--only", subject, "--folder", str(tmp_path), "--json", str(written)]) == 0
    record = json.loads(written.read_text())
    assert record["failed"] == 0 and record["passed"] > 0


def test_every_phase_can_be_measured() -> None:
    """The process that is started knows each phase by its name, and whether ranks answer it together."""
    assert {phase.name: phase.launched for part in PARTS for phase in part.phases} == {
        **dict.fromkeys(ALONE, False),
        **dict.fromkeys(TOGETHER, True),
    }

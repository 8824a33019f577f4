"""The harness notices every fault that it looks for, shown by made-up commands with one fault each or with none."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

import tests.faults.hostile.case as case_module
from tests.faults.hostile.builders import ran, small_disk, write
from tests.faults.hostile.case import Build, Case, Command, case, family, row
from tests.faults.hostile.rights import Skip
from tests.faults.hostile.runner import MUST_BE_0, Result, figures, run_cases
from tests.faults.hostile.verdict import (
    Check,
    absent,
    check,
    done,
    done_and_said,
    either,
    ended_with,
    gave_up,
    holds,
    kept,
    misused,
    refused,
    same_result_as,
)

pytestmark = pytest.mark.processes

NO_BYTECODE = {"PYTHONDONTWRITEBYTECODE": "1"}
SECRET = "s3cr3tOfTheCase"
REFUSAL = "sys.stderr.write('error: a.txt is empty; fill it\\n'); sys.exit(2)"

Try = Callable[..., Result]


@pytest.fixture
def judged(tmp_path: Path) -> Try:
    """A function that runs a command with the given body and expectations, and returns its result."""

    def judge(
        body: str, *expect: Check, seconds: float = 20.0, variables: Mapping[str, str] = NO_BYTECODE, **fields: Any
    ) -> Result:
        def build(folder: Path, assets: object) -> Command:
            write(folder / "a.txt", "input")
            write(folder / "fake.py", f"import os, subprocess, sys\nfrom pathlib import Path\n{body}\n")
            return Command("fake", outputs=("out",), environment={**NO_BYTECODE, **variables}, **fields)

        case = Case("fake/case", build, expect, secrets=(SECRET,), seconds=seconds)
        (result,) = run_cases([case], None, tmp_path / "c")
        assert not list((tmp_path / "c").iterdir())
        return result

    return judge


BLAMELESS = [
    (REFUSAL, refused("a.txt", "empty")),
    ("Path('out').mkdir(); Path('out/x').write_text('y'); print('all')", done_and_said("all")),
    ("sys.exit('python -m fake: error: --colour is unknown')", ended_with(1, "--colour")),
    ("sys.stderr.write('usage: fake\\npython -m fake: error: --colour?\\n'); sys.exit(2)", misused("--colour")),
    ("sys.stderr.write('[node 0] error: x y\\n'); sys.exit(2)", refused("x")),
    ("sys.stderr.write('error: no step\\n'); sys.exit(3)", gave_up("no step")),
    ("Path('out').write_text('abc')", holds("out", "b")),
    ("pass", either(refused("a.txt"), done())),
    ("pass", absent("out")),
    ("pass", kept("a.txt")),
    ("Path('out').mkdir(); Path('out/x.tmp.txt').touch()", done()),
    ("Path(os.environ['TMPDIR'], 'barista-0').mkdir()", done()),
]


@pytest.mark.parametrize(("body", "expect"), BLAMELESS)
def test_what_is_as_expected_is_ok(body: str, expect: Check, judged: Try) -> None:
    result = judged(body, expect)
    assert (result.verdict, result.said) == ("ok", "")


NOTICED = [
    # the command's body, the expectation, the verdict, words of the finding
    ("raise KeyError('x')", refused(), "traceback", 'fake.py", line 3'),
    ("raise KeyError('x')", done(), "traceback", "KeyError: 'x'"),
    ("import traceback\ntry: 1 / 0\nexcept ZeroDivisionError: traceback.print_exc()", done(), "traceback", "Zero"),
    ("raise RecursionError", ended_with(1), "traceback", "RecursionError"),
    ("print('fine')", refused("a.txt"), "silent", "exit code 0"),
    ("print('fine')", gave_up(), "silent", "exit code 0"),
    ("print('fine')", done_and_said("a.txt was left out"), "silent", "a.txt was left out"),
    ("print('fine')", check("never", lambda outcome: False), "silent", "not so: never"),
    ("print('fine')", either(refused("a.txt"), holds("out", "x")), "silent", "neither"),
    ("print('fine')", ended_with(75), "silent", "0 in place of 75"),
    ("pass", holds("a.txt", "output"), "silent", "a.txt lacks 'output'"),
    ("pass", absent("a.txt"), "silent", "a.txt is there"),
    (REFUSAL, refused("b.txt"), "wrong", "does not name 'b.txt'"),
    (REFUSAL, done(), "wrong", "2 in place of 0"),
    (REFUSAL, either(done(), gave_up()), "wrong", "neither"),
    (f"sys.stderr.write('error: one\\n'); {REFUSAL}", refused("a.txt"), "wrong", "2 errors"),
    (f"Path('out').touch(); {REFUSAL}", refused(untouched=True), "wrong", "work/out was written"),
    ("sys.stderr.write('no\\n'); sys.exit(2)", refused(), "wrong", "no `error: …`"),
    ("sys.stderr.write('error: x y\\nthen\\n'); sys.exit(2)", refused("x"), "wrong", "no `error: …`"),
    ("sys.stderr.write('python -m fake: error: x\\n'); sys.exit(2)", refused("x"), "wrong", "no `error: …`"),
    ("sys.exit(1)", refused(), "wrong", "exit code 1"),
    ("os.kill(os.getpid(), 9)", done(), "wrong", "exit code -9"),
    ("Path('a.txt').write_text('other')", done(), "wrong", "work/a.txt was changed"),
    ("Path('a.txt').unlink()", done(), "wrong", "work/a.txt was removed"),
    ("Path('a.txt').chmod(0o600)", done(), "wrong", "work/a.txt was changed"),
    ("Path('beside').touch()", done(), "left_behind", "work/beside is left"),
    (f"Path('beside').touch(); {REFUSAL}", refused(), "left_behind", "work/beside is left"),
    ("Path('out').mkdir(); Path('out/x.partial').mkdir()", done(), "left_behind", "work/out/x.partial is left"),
    ("Path(os.environ['TMPDIR'], 'x').touch()", done(), "left_behind", "tmp/x is left"),
    ("Path.home().joinpath('.fake').touch()", done(), "left_behind", "home/.fake is left"),
    (f"print('{SECRET}')", done(), "leaked", "stdout"),
    (f"sys.stderr.write('error: {SECRET}\\n'); sys.exit(2)", refused(), "leaked", "stderr"),
    (f"Path('out').write_bytes(b'\\0\\xff{SECRET}')", done(), "leaked", "work/out"),
    (f"Path('out').write_text('{SECRET}'); Path('out').chmod(0o640)", done(), "leaked", "work/out"),
    (f"Path('out').mkdir(); Path('out', '{SECRET}').touch()", done(), "leaked", "in the name"),
    ("print(os.environ['HF_TOKEN'])", done(), "leaked", "stdout"),
]


@pytest.mark.parametrize(("body", "expect", "verdict", "said"), NOTICED)
def test_what_is_not_as_expected_is_noticed(body: str, expect: Check, verdict: str, said: str, judged: Try) -> None:
    result = judged(body, expect)
    assert result.verdict == verdict and said in result.said, result
    assert result.kinds == (verdict,)


def test_a_secret_that_its_owner_alone_reads_is_no_leak(judged: Try) -> None:
    assert judged(f"Path('out').write_text('{SECRET}'); Path('out').chmod(0o600)", done()).verdict == "ok"


def test_an_input_that_must_be_kept_and_is_not(judged: Try) -> None:
    result = judged("Path('a.txt').write_text('other')", kept("a.txt"))
    assert result.verdict == "silent" and "a.txt is changed" in result.said


def test_several_things_are_all_counted(judged: Try) -> None:
    result = judged(f"Path('beside').touch(); print('{SECRET}'); raise KeyError", done())
    assert result.verdict == "leaked" and result.kinds == ("leaked", "left_behind", "traceback")
    values = figures([result], seconds=1.0)
    assert [values[name] for name in MUST_BE_0] == [1, 0, 0, 1, 1] and values["cases"] == 1


@pytest.mark.parametrize("session", [False, True])
def test_a_process_that_lives_on_is_noticed_and_ended(session: bool, judged: Try) -> None:
    pause = f"[sys.executable, '-c', 'import signal; signal.pause()'], start_new_session={session}"
    result = judged(f"subprocess.Popen({pause})", done())
    assert result.verdict == "left_behind" and "signal.pause" in result.said
    (pid,) = (word for word in result.said.split() if word.isdigit())
    assert not psutil.pid_exists(int(pid))


def test_a_process_that_ends_a_little_later_is_nothing(judged: Try) -> None:
    """The process waits for a pipe that closes when its parent ends, as multiprocessing's helpers do."""
    waiting = "[sys.executable, '-c', 'import sys; sys.stdin.read()'], stdin=subprocess.PIPE"
    assert judged(f"subprocess.Popen({waiting})", done()).verdict == "ok"


def test_a_command_that_does_not_end_is_ended(judged: Try) -> None:
    result = judged("import signal; signal.pause()", refused(), seconds=0.3)
    assert result.verdict == "wrong" and "did not end within" in result.said


@pytest.mark.parametrize("own_process", [False, True])
def test_the_command_is_run_as_by_python_m(own_process: bool, judged: Try) -> None:
    body = "print(__name__, Path(sys.argv[0]).name, sys.argv[1:], sys.stdin.read(), Path.cwd().name, os.environ['X'])"
    result = judged(
        body,
        done_and_said("__main__ fake.py ['--x', '1'] typed work given"),
        arguments=("--x", "1"),
        stdin=b"typed",
        variables={"X": "given"},
        own_process=own_process,
    )
    assert result.verdict == "ok", result.said


def test_a_case_that_fails_itself_is_not_ok(tmp_path: Path) -> None:
    def fails(folder: Path, assets: object) -> Command:
        raise ZeroDivisionError("here")

    def ends(folder: Path, assets: object) -> Command:
        os._exit(3)

    def skips(folder: Path, assets: object) -> Command:
        raise Skip("no such device")

    cases = [Case(f"fake/{build.__name__}", build, (done(),)) for build in (fails, ends, skips)]
    results = run_cases(cases, None, tmp_path / "c", jobs=3)
    assert [each.verdict for each in results] == ["wrong", "wrong", "skipped"]
    assert "here" in results[0].said and "never ended" in results[1].said and results[2].said == "no such device"
    assert figures(results, seconds=1.0)["skipped"] == 1


def unreadable(folder: Path, assets: object) -> Command:
    write(folder / "a.txt", "input").chmod(0o000)
    write(folder / "fake.py", "open('a.txt')")
    return Command("fake", without_rights=True, environment=NO_BYTECODE)


def full(folder: Path, assets: object) -> Command:
    small_disk(folder / "m", 4)
    write(folder / "fake.py", "open('m/x', 'w').write('x' * 100_000)")
    return Command("fake", outputs=("m",), environment=NO_BYTECODE)


@pytest.mark.parametrize(("build", "said"), [(unreadable, "PermissionError"), (full, "No space left")])
def test_rights_and_room_that_are_taken(build: Build, said: str, tmp_path: Path) -> None:
    """A case can take rights and disk space from its command, if the machine permits that."""
    (result,) = run_cases([Case(f"fake/{build.__name__}", build, (done(),))], None, tmp_path / "c")
    if result.verdict == "skipped":
        pytest.skip(result.said)
    assert result.verdict == "traceback" and said in result.said, result


def test_results_are_compared_file_by_file(tmp_path: Path) -> None:
    def twice(folder: Path, assets: object, *, second: str) -> Command:
        write(folder / "fake.py", "import sys; from pathlib import Path; Path(sys.argv[1]).write_text(sys.argv[2])")
        for name in ("good", "out"):
            (folder / name).mkdir()
        command = Command("fake", environment=NO_BYTECODE, outputs=("good", "out"))
        ran(command.but("good/x", "1"))
        return command.but("out/x", second)

    cases = [
        Case(f"fake/{second}", partial(twice, second=second), (done(), same_result_as("good", "out")))
        for second in ("1", "2")
    ]
    results = run_cases(cases, None, tmp_path / "c")
    assert [each.verdict for each in results] == ["ok", "silent"] and "x differs" in results[1].said


def test_families_name_their_rows_and_a_name_is_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(case_module, "CASES", {})
    rows = [row("one", 1), row("two", 2, expect=done(), cause="own", quick=True)]
    family("fake/number", rows, refused(), cause=7)(lambda folder, assets, number: Command(f"m{number}"))
    one, two = case_module.CASES.values()
    assert (one.name, one.cause, one.quick, one.build(Path(), None).module) == ("fake/number/one", 7, False, "m1")
    assert (two.name, two.cause, two.quick, two.build(Path(), None).module) == ("fake/number/two", "own", True, "m2")
    assert [one.expect[0].name, two.expect[0].name] == ["refused", "done"]
    with pytest.raises(AssertionError, match="two cases"):
        case("fake/number/one", done())(lambda folder, assets: Command("m"))

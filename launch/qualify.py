"""Command: runs all that only a GPU can show, on one machine or a hostfile, and writes a page with a verdict a line.

    python -m launch.qualify                                # this machine: all its GPUs, or two ranks on its CPU
    python -m launch.qualify --hostfile hosts --folder /shared/qualify
    python -m launch.qualify --quick --only attention       # smaller shapes; one subject

The subjects are in trainer/qualification/; docs/qualification.md says what each of them asks, with its tolerances and
their reasons. Measurements of one device run on this machine. Those of several ranks run under DeepSpeed's launcher on
all GPUs of the machine, or on the hosts of the hostfile, which must see --folder. Exit code 0: nothing failed; 1: a
line failed; 2: an error on the command line. A question that this machine cannot answer does not count as failed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from data.ground.command import exit_code_of, printable
from data.ground.errors import UserError
from data.ground.files import write_atomically
from data.ground.options import Parser
from data.ground.ports import free_port
from data.ground.whole_folder import check_file
from launch import checks
from launch.calls import call_into, ends_all_it_started
from launch.machine import ON_A_CPU, count_gpus
from launch.qualified import Page, plan_asked, remaining_seconds
from trainer.qualification.lines import Found, Line, Lines, crashed, measure_all, read_lines

MEASURE = "trainer.qualification.measure"
RANKS_ON_A_CPU = 2
# A process that takes longer is ended, and its line has failed.
LONGEST_SECONDS = {True: 300.0, False: 900.0}  # quick: seconds
STEPS_FILE = "steps.json"


@dataclass(frozen=True)
class Phase:
    """One start of trainer/qualification/measure.py. dies: it is killed by itself, as it should."""

    name: str
    launched: bool = False
    dies: bool = False


@dataclass(frozen=True)
class Part:
    """A subject, and the phases that answer it. seconds: expected, by (GPU, quick)."""

    name: str
    phases: tuple[Phase, ...]
    seconds: dict[tuple[bool, bool], float]
    quick: bool = True  # whether the quick form has it

    @property
    def subject(self) -> str:
        return self.name.partition("_of_")[0]


def _expected(cpu: float, quick_cpu: float, gpu: float, quick_gpu: float) -> dict[tuple[bool, bool], float]:
    return {(False, False): cpu, (False, True): quick_cpu, (True, False): gpu, (True, True): quick_gpu}


def _resumed(task: str) -> tuple[Phase, ...]:
    return Phase(f"resume_of_{task}.killed", launched=True, dies=True), Phase(f"resume_of_{task}", launched=True)


# On a CPU as measured (docs/qualification.md); on GPUs a guess, which the first parts correct.
PARTS = (
    Part("attention", (Phase("attention"),), _expected(20, 10, 30, 25)),
    Part("precision", (Phase("precision"),), _expected(30, 13, 30, 25)),
    Part("cross_entropy", (Phase("cross_entropy"),), _expected(10, 8, 20, 20)),
    Part("ranks", (Phase("ranks.alone"), Phase("ranks", launched=True)), _expected(80, 40, 120, 70)),
    Part("resume_of_smae", _resumed("smae"), _expected(50, 45, 70, 70)),
    Part("resume_of_srl", _resumed("srl"), _expected(60, 60, 80, 80), quick=False),
    Part("steps", (Phase("steps"),), _expected(120, 25, 120, 60)),
)
SUBJECTS = tuple(dict.fromkeys(part.subject for part in PARTS))
# Those that read the hostfile: measurements of several ranks, and the plan beside `steps`.
OF_HOSTS = ("ranks", "resume", "steps")


@dataclass
class Qualification:
    """One run of the command: what it starts, where, and what it has found."""

    args: argparse.Namespace
    scratch: Path
    cuda: bool
    begin: float = field(default_factory=time.monotonic)
    lines: list[Line] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def parts(self) -> list[Part]:
        chosen = self.args.only or SUBJECTS
        return [part for part in PARTS if part.subject in chosen and (part.quick or not self.args.quick)]

    def run(self) -> None:
        """Answer all chosen subjects, one after another."""
        for number, part in enumerate(self.parts):
            progress = Progress([each.seconds[self.cuda, self.args.quick] for each in self.parts], number, self.begin)
            progress.say(part.name.replace("_", " "))
            self._answer(part, progress)
        if "steps" in {part.subject for part in self.parts}:
            path = self.scratch / "plan.jsonl"
            asked = plan_asked(self._records, tuple(self.lines), cuda=self.cuda, hosts=bool(self.args.hostfile))
            measure_all(asked, Lines(path, "plan"), tracebacks=path.with_suffix(".txt"))
            self.lines += read_lines(path).lines

    def _records(self) -> dict[str, dict[str, Any]]:
        """What trainer/qualification/steps.py has measured, by task."""
        path = self.scratch / "steps" / STEPS_FILE
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}

    def _answer(self, part: Part, progress: Progress) -> None:
        """Run a part's phases. Where one ends before its time, its lines say so, and the next are not tried."""
        folder = self.scratch / part.name
        folder.mkdir()
        for phase in part.phases:
            path, log = folder / f"{phase.name}.jsonl", folder / f"{phase.name}.log"
            begin = time.monotonic()
            code = call_into(
                log,
                self._command(phase, folder, path),
                environment={} if self.cuda else ON_A_CPU,
                seconds=LONGEST_SECONDS[self.args.quick],
                watch=partial(progress.show_file, path),
            )
            found = ended(read_lines(path), phase, part.subject, code, log, seconds=time.monotonic() - begin)
            progress.show(found.lines)
            self.lines += found.lines
            self.about |= found.about
            if found.told:
                return

    def _command(self, phase: Phase, folder: Path, lines: Path) -> list[object]:
        arguments = [phase.name, "--folder", folder, "--lines", lines, *(["--quick"] if self.args.quick else [])]
        if not phase.launched:
            return [sys.executable, "-m", MEASURE, *arguments]
        launcher: list[object] = [Path(sys.executable).with_name("deepspeed"), "--master_port", free_port()]
        if self.args.hostfile:
            launcher += ["--hostfile", self.args.hostfile]
        elif not self.cuda:
            launcher += ["--num_gpus", RANKS_ON_A_CPU]
        return [*launcher, "--module", MEASURE, *arguments]


class Progress:
    """Says on stderr what part number `number` has found, and how long all parts will take.

    expected: seconds of every part. begin: when the first one began.
    """

    def __init__(self, expected: Sequence[float], number: int, begin: float) -> None:
        self._expected, self._number, self._begin = expected, number, begin
        self._here = time.monotonic()
        self._shown: set[str] = set()

    def say(self, name: str) -> None:
        print(f"[{self._number + 1}/{len(self._expected)}] {name}{self._times()}", file=sys.stderr, flush=True)

    def show(self, lines: Sequence[Line]) -> None:
        """Print the lines that were not shown before."""
        for line in lines:
            if line.asked not in self._shown:
                self._shown.add(line.asked)
                said = f"  {line.outcome.verdict}: {line.asked} ({line.outcome.figure}){self._times()}"
                print(printable(said), file=sys.stderr, flush=True)

    def show_file(self, path: Path) -> None:
        self.show(read_lines(path).lines)

    def _times(self) -> str:
        now = time.monotonic()
        here = now - self._here
        left = remaining_seconds(self._expected, done=self._number, before=self._here - self._begin, here=here)
        return f"   [{now - self._begin:.0f} s so far, about {left:.0f} s left]"


def ended(found: Found, phase: Phase, subject: str, code: int | None, log: Path, *, seconds: float) -> Found:
    """What a phase has found, completed if it ended before its time. code: None if it was ended for taking too long."""
    if code is None:
        return found.completed(subject=subject, ended=f"it was ended after {seconds:.0f} s", details=log)
    if phase.dies:
        if code:
            return found
        said = crashed("the run that was to be killed came to its end", log)
        return Found(
            (Line(subject, "a run is killed after a checkpoint", said, seconds),), about=found.about, told=True
        )
    if code or found.missing:
        why = f"the process ended with exit code {code}{_last_words(log)}"
        return found.completed(subject=subject, ended=why, details=log)
    return found


def _last_words(log: Path) -> str:
    """The last line that a process has written, which often says why it ended."""
    written = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
    last = next((line.strip() for line in reversed(written) if line.strip()), "")
    return f' after "{last[:200]}"' if last else ""


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    with ends_all_it_started():
        return exit_code_of(lambda: qualify(args))


def qualify(args: argparse.Namespace) -> int:
    if args.hostfile and (problem := checks.hostfile(args.hostfile)).status == checks.BAD:
        raise UserError(f"--hostfile: {problem.seen}; {problem.hint}")
    output = args.output or args.folder / "qualification.md"
    if args.json and args.json.resolve() == output.resolve():
        raise UserError(f"--json {args.json} is the page's file, too; name another")
    for option, path in (("--output", output), ("--json", args.json)):
        check_file(path, option)
        if path and args.hostfile and path.resolve() == args.hostfile.resolve():
            raise UserError(f"{option} {path} is the hostfile, too; name another")
    if args.hostfile and args.only and not set(args.only) & set(OF_HOSTS):
        raise UserError(
            f"--hostfile is read by the subjects {', '.join(OF_HOSTS)} alone; leave --hostfile out, or add one"
        )
    args.folder.mkdir(parents=True, exist_ok=True)
    for path in filter(None, (output, args.json)):
        if path.is_dir():
            raise UserError(f"{path} is a folder; name a file")
        path.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="details_", dir=args.folder)).resolve()
    this = Qualification(args, scratch, cuda=count_gpus() > 0)
    try:
        this.run()
    except BaseException as error:
        if not isinstance(error, Exception):  # it was interrupted: no page names the files, and no fault needs them
            shutil.rmtree(scratch, ignore_errors=True)
        raise
    page = Page(
        this.lines, this.about, quick=args.quick, hostfile=bool(args.hostfile), seconds=time.monotonic() - this.begin
    )
    write_atomically(output, page.text)
    if args.json:
        write_atomically(args.json, json.dumps(page.as_json, indent=2) + "\n")
    if not page.failed:
        shutil.rmtree(scratch)  # a failed line names files in it
    print(f"{page.summary}\n{output}", flush=True)
    return int(page.failed > 0)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m launch.qualify",
        description="Run all that only a GPU can show, and write a page with a verdict a line.",
        allow_abbrev=False,
    )
    parser.add_argument("--hostfile", type=Path, help="the hosts whose ranks train together; default: this machine")
    parser.add_argument("--quick", action="store_true", help="smaller shapes, fewer cases: three minutes on two cores")
    parser.add_argument("--only", action="append", choices=SUBJECTS, help="answer this subject alone; may be repeated")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/qualify"), help="for files of the measurements; all hosts must see it"
    )
    parser.add_argument("--output", type=Path, metavar="PAGE.md", help="the page; default: FOLDER/qualification.md")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all lines as JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())

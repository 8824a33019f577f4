"""Command: backbones × methods × seeds, trained, evaluated and reported, from one file.

    python -m trainer.study STUDY.toml                  go on where it stopped; at the end <output>/report
    python -m trainer.study STUDY.toml --list           the runs and which are done
    python -m trainer.study STUDY.toml --report-only    the report again, from the raw results alone

Each run is the command that a user would type, in a process of its own: `trainer.pretrain` or `trainer.finetune` (under
the deepspeed launcher where the study has more than one rank), then `trainer.evaluate`. What is done (<run>/DONE, and
an evaluation made by the same command) is skipped, unless its recipe is no longer the study's, which is refused.
Checkpoints of finished runs are removed. Output goes to <output>/logs. SIGTERM, SIGUSR1, Ctrl-C, the file that
BARISTA_STOP_FILE names, or --stop-after-minutes lets the run in progress save and ends with code 75; the same command
goes on.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from data.files import write_atomically
from trainer.checkpoint import check_output_folder
from trainer.command import MISTAKE_CODE, run_command
from trainer.config import ConfigError
from trainer.distributed import free_port
from trainer.evaluation.raw import RAW_FILE
from trainer.evaluation.retrieval import load_beir
from trainer.evaluation.sts import read_sts
from trainer.stopping import STOP_FILE_VARIABLE, Stopped
from trainer.study_plan import Result, Run, Study, load_study, results_of, runs_of
from trainer.study_report import LATENCY_FILE, write_report

log = logging.getLogger(__name__)

TIMINGS_FILE = "timings.jsonl"
_LATENCY_QUERIES = 100
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class RunFailed(RuntimeError):
    """A run that ended without DONE, neither by a mistake of the user's nor by a wish to stop."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m trainer.study", description="Train, evaluate and report a study.")
    parser.add_argument("study", metavar="STUDY.toml", help="see launch/studies and docs/evaluation.md")
    parser.add_argument(
        "--report-only", action="store_true", help="make the report from the raw results that are there"
    )
    parser.add_argument("--list", action="store_true", help="list the runs and whether they are done; starts nothing")
    parser.add_argument(
        "--stop-after-minutes", type=float, default=0.0, metavar="M", help="let the run in progress save, exit with 75"
    )
    args = parser.parse_args(argv)
    study = load_study(args.study)
    if args.report_only:
        sys.stdout.write(f"{write_report(study)}\n")
        return
    # All recipes are resolved and all evaluation files read before anything starts.
    runs, results = runs_of(study), results_of(study)
    if args.list:
        _list(runs, results)
        return
    _check_files(study, runs)
    try:
        with _Work(study.output, args.stop_after_minutes).listening() as work:
            _carry_out(study, runs, results, work)
    except RunFailed as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(1)
    sys.stdout.write(f"{write_report(study)}\n")


def _carry_out(study: Study, runs: Sequence[Run], results: Sequence[Result], work: _Work) -> None:
    by_run = {result.run.name: result for result in results}
    todo: list[tuple[str, str]] = []  # name, kind
    for run in runs:
        if not is_done(run):
            todo.append((run.name, _kind(run)))
        result = by_run.get(run.name)
        if result is not None and not is_evaluated(study, result):
            todo.append((f"evaluate {run.name}", f"evaluate {'grid' if ',' in result.sizes else 'sizes'}"))
    work.plan(todo)
    log.info("%s: %d runs, %d evaluations, %d left to do", study.name, len(runs), len(results), len(todo))
    for run in runs:
        if not is_done(run):
            _train(study, run, work)
        result = by_run.get(run.name)
        if result is not None and not is_evaluated(study, result):
            _evaluate(study, result, work)
    latency = study.output / "results" / LATENCY_FILE
    whole = next((result for result in results if result.sizes not in map(str, study.ladder)), None)
    if whole is not None and not latency.is_file():
        command = ["trainer.evaluate", "latency", "--model", whole.run.folder / "model", "--json", latency]
        texts = ["--sts", study.evaluation.sts[0]] if study.evaluation.sts else ["--beir", study.evaluation.beir[0]]
        work.call(
            "latency",
            "latency",
            [*command, *texts, "--split", study.evaluation.split, "--queries", str(_LATENCY_QUERIES)],
        )


def is_done(run: Run) -> bool:
    return (run.folder / "DONE").is_file()


def _finished(run: Run) -> int:
    return (run.folder / "DONE").stat().st_mtime_ns


def is_evaluated(study: Study, result: Result) -> bool:
    """Whether the raw results there are of this model, and of the command that would make them now."""
    receipt = _receipt(result)
    if not (result.folder / RAW_FILE).is_file() or not receipt.is_file() or not is_done(result.run):
        return False
    return json.loads(receipt.read_text(encoding="utf-8")) == _receipt_content(study, result)


def evaluation_command(study: Study, result: Result) -> list[str]:
    tests = study.evaluation
    command = ["trainer.evaluate", "sizes", "--model", str(result.run.folder / "model"), "--sizes", result.sizes]
    command += ["--sts", *tests.sts] if tests.sts else []
    command += ["--sts-subsets", tests.sts_subsets] if tests.sts_subsets else []
    command += ["--beir", *tests.beir, "--split", tests.split] if tests.beir else []
    command += ["--random-init"] if result.untrained else []
    command += ["--bm25"] if result.bm25 and tests.beir else []
    return [*command, "--output", str(result.folder)]


def _train(study: Study, run: Run, work: _Work) -> None:
    settings = [f"--{override}" for override in run.overrides]
    if work.minutes_left is not None:
        settings.append(f"--train.stop_after_minutes={max(0.02, work.minutes_left):.3f}")
    command = [run.module, "--config", run.recipe_file, *settings]
    stopped = run.folder / "STOPPED"
    stopped.unlink(missing_ok=True)
    work.call(
        run.name, _kind(run), command, ranks=study.ranks, done=lambda: is_done(run), stopped=lambda: stopped.is_file()
    )
    # Only a stopped run needs them again.
    shutil.rmtree(run.folder / "checkpoints", ignore_errors=True)


def _evaluate(study: Study, result: Result, work: _Work) -> None:
    _receipt(result).unlink(missing_ok=True)
    command = evaluation_command(study, result)
    kind = f"evaluate {'grid' if ',' in result.sizes else 'sizes'}"
    work.call(f"evaluate {result.run.name}", kind, command)
    write_atomically(_receipt(result), json.dumps(_receipt_content(study, result), indent=1) + "\n")


def _receipt(result: Result) -> Path:
    return result.folder.with_name(f"{result.folder.name}.receipt.json")


def _receipt_content(study: Study, result: Result) -> dict[str, object]:
    digest = hashlib.sha256()
    for path in sorted((result.run.folder / "model").glob("*.safetensors")):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return {"command": evaluation_command(study, result), "weights_sha256": digest.hexdigest()}


def _kind(run: Run) -> str:
    """Runs of one kind take about the same time: all but the seed are the same."""
    return "/".join(part for part in run.name.split("/") if not part.startswith("seed_"))


def _check_files(study: Study, runs: Sequence[Run]) -> None:
    for path in study.evaluation.sts:
        read_sts(path, subsets=study.evaluation.sts_subsets or None)
    for folder in study.evaluation.beir:
        load_beir(folder, split=study.evaluation.split)
    by_model = {str(run.folder / "model"): run for run in runs}
    for run in runs:
        check_output_folder(run.recipe)
        start = by_model.get(run.recipe.model.source)
        if start is not None and is_done(run) and not (is_done(start) and _finished(start) <= _finished(run)):
            raise ConfigError(
                f"{run.folder} started from an earlier {start.folder}, which is gone or was trained again since; "
                "remove it to train it again, or use --report-only"
            )
        for shards in run.recipe.data.shards:
            if "://" not in shards and not (Path(shards) / "manifest.json").is_file():
                raise ConfigError(
                    f"{study.path}, run {run.name}: data.shards names {shards}, which holds no shards; "
                    "make them with `python -m data.prepare`"
                )


def _list(runs: Sequence[Run], results: Sequence[Result]) -> None:
    evaluated = {result.run.name: (result.folder / RAW_FILE).is_file() for result in results}
    for run in runs:
        state = "done" if is_done(run) else "stopped" if (run.folder / "STOPPED").is_file() else "to do"
        if run.name in evaluated and is_done(run):
            state += ", evaluated" if evaluated[run.name] else ", not evaluated"
        sys.stdout.write(f"{run.name}\t{state}\n")


@dataclass
class _Work:
    """Starts the commands one after another, keeps their times, and passes on a wish to stop."""

    output: Path
    stop_after_minutes: float
    _begin: float = field(default_factory=time.monotonic)
    _process: subprocess.Popen[bytes] | None = None
    _stopping: str = ""
    _todo: list[tuple[str, str]] = field(default_factory=list)
    _total: int = 0

    def plan(self, todo: Sequence[tuple[str, str]]) -> None:
        self._todo, self._total = list(todo), len(todo)

    @property
    def minutes_left(self) -> float | None:
        """Before this process should stop; None: no limit."""
        if not self.stop_after_minutes:
            return None
        return self.stop_after_minutes - (time.monotonic() - self._begin) / 60

    @contextmanager
    def listening(self) -> Iterator[_Work]:
        before = {number: signal.signal(number, self._on_signal) for number in _STOP_SIGNALS}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stopping = signal.Signals(number).name
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)

    def call(
        self,
        name: str,
        kind: str,
        command: Sequence[object],
        *,
        ranks: int = 1,
        done: Callable[[], bool] | None = None,
        stopped: Callable[[], bool] | None = None,
    ) -> None:
        """Run one of our commands to its end. `done()`, `stopped()`: what it left, where exit codes do not say."""
        if reason := self._stopping or self._asked_to_stop():
            raise Stopped(f"stopped before {name} ({reason}); the same command goes on")
        place = self._total - len(self._todo) + 1
        log.info("[%d/%d] %s%s", min(place, self._total), self._total, name, self._eta())
        module, *arguments = map(str, command)
        words = [sys.executable, "-m", module, *arguments]
        if ranks > 1:
            launcher = [str(Path(sys.executable).with_name("deepspeed")), "--num_gpus", str(ranks)]
            words = [*launcher, "--master_port", str(free_port()), "--module", module, *arguments]
        accelerator = {} if shutil.which("nvidia-smi") else {"DS_ACCELERATOR": "cpu"}
        path = self.output / "logs" / f"{name.replace('/', '_').replace(' ', '_')}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        begin = time.monotonic()
        with path.open("ab") as file:
            file.write(f"$ {shlex.join(words)}\n".encode())
            file.flush()
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **accelerator},
                # A launcher does not pass signals on, so all its processes get them as one group.
                start_new_session=True,
            )
            if self._stopping:  # asked while it was being started
                os.killpg(self._process.pid, signal.SIGTERM)
            code = self._process.wait()
            self._process = None
        complete = done() if done else code == 0
        self._note(name, kind, seconds=time.monotonic() - begin, complete=complete)
        if complete:
            self._todo = [entry for entry in self._todo if entry[0] != name]
            return
        if self._stopping or (stopped is not None and stopped()):
            reason = self._stopping or "the run was asked to stop"
            raise Stopped(f"stopped in {name} ({reason}); the same command goes on")
        said = _last_error(path)
        if code == MISTAKE_CODE and said:
            raise ConfigError(f"{name}: {said}")
        raise RunFailed(f"{name} ended with code {code} and is not complete; its own words are in {path}")

    def _asked_to_stop(self) -> str:
        """Why no further command should start; training in progress looks at the same two itself."""
        stop_file = os.environ.get(STOP_FILE_VARIABLE)
        if stop_file and Path(stop_file).exists():
            return "stop file"
        return "its minutes are over" if self.minutes_left is not None and self.minutes_left <= 0 else ""

    def _note(self, name: str, kind: str, *, seconds: float, complete: bool) -> None:
        line = {"name": name, "kind": kind, "seconds": round(seconds, 1), "complete": complete}
        with (self.output / TIMINGS_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _eta(self) -> str:
        """From what the same kind took, or else the same stage; nothing before the first of a stage has ended."""
        path = self.output / TIMINGS_FILE
        if not path.is_file() or not self._todo:
            return ""
        seconds: dict[str, dict[str, float]] = {}  # kind -> name -> seconds, interrupted tries included
        complete = set()
        for line in path.read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            of_kind = seconds.setdefault(entry["kind"], {})
            of_kind[entry["name"]] = of_kind.get(entry["name"], 0.0) + entry["seconds"]
            complete |= {entry["name"]} if entry["complete"] else set()
        whole = {kind: [s for name, s in named.items() if name in complete] for kind, named in seconds.items()}
        total, unknown = 0.0, 0
        for _, kind in self._todo:
            times = whole.get(kind) or [
                s for other, values in whole.items() if other.split("/")[0] == kind.split("/")[0] for s in values
            ]
            total += sum(times) / len(times) if times else 0.0
            unknown += not times
        open_end = f" and {unknown} of unknown length" if unknown else ""
        return f", about {_duration(total)} left{open_end}" if total else ""


def _duration(seconds: float) -> str:
    return (
        f"{seconds:.0f} s"
        if seconds < 120
        else f"{seconds / 60:.0f} min"
        if seconds < 7200
        else f"{seconds / 3600:.1f} h"
    )


def _last_error(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line.removeprefix("error: ") for line in reversed(lines) if line.startswith("error: ")), "")


if __name__ == "__main__":
    run_command(main)

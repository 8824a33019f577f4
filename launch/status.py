"""Command: shows the progress of runs, as a table in a terminal.

    python -m launch.status RUN…  [--watch SECONDS] [--json]

For one run it prints the state, the speed, and a row for each size; for several runs a row each. Everything is read
from the run folders, so it works on a login node without torch, during the run and long after. A run's state follows
from its files alone:

    done       DONE is there
    stopped    STOPPED is there (it says why), or the run has reached train.stop_at_step
    starting   no step is logged yet
    running    something was written within the last ten minutes, or within four times the interval of logged steps
    silent     nothing was written for longer than that: look at its log, then start it again with --resume auto

The time left is the remaining steps at the speed of the newest ones, plus the checkpoints due. Evaluations are not
included.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import re
import statistics
import sys
import time
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from data.ground.command import exit_code_of, printable, tell
from data.ground.errors import ConfigError, DataError, OtherFormat, UserError
from data.ground.files import describe_os_error, first_line
from data.ground.options import Parser
from data.ground.records import Record, json_of, read_record
from models.sizes import Ladder
from trainer.config.schema import Recipe
from trainer.config.sections import ModelConfig
from trainer.monitoring.lines import FILE as METRICS_FILE
from trainer.monitoring.lines import Line, read_lines
from trainer.monitoring.names import is_off_the_ladder, loss_of, score_of

_PATIENCE_SECONDS = 600.0
_PATIENCE_RECORDS = 4.0
_NEWEST_RECORDS = 10
_SCORES = {"ndcg_cut_10": "nDCG@10", "recip_rank_10": "MRR@10", "spearman": "Spearman"}
_HEADLINES = ("ndcg_cut_10", "spearman")
_SLOW_FEED = 0.2
_MUCH_PADDING = 0.5
_MOST = 2**53  # of a count, beyond which it is none
_MOST_SECONDS = 1e10
_LONGEST_WATCH = 86400.0


@dataclass(frozen=True)
class SizeStatus:
    """The newest numbers of one size."""

    name: str
    layers: int
    dim: int
    feed_forward: float  # the fraction of each feed-forward
    losses: dict[str, float]  # by family: "encoder", "kl"
    scores: dict[str, float]  # "task/metric"


@dataclass(frozen=True)
class RunStatus:
    """The status of a run, read from its folder; None means not known (yet)."""

    run: str
    state: str
    reason: str | None  # why the run stopped
    seconds_since_written: float
    step: int
    total_steps: int | None
    total_is_estimated: bool  # from the epochs, by the position in the data
    epoch: float | None
    seconds_left: float | None
    newest: dict[str, float]  # numbers of the newest logged step, without those of single sizes
    sizes: list[SizeStatus]
    evaluation_step: int | None
    checkpoint_step: int | None
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Plan:
    """The recipe's keys that matter for the progress of its run; `damaged` names the keys with impossible values."""

    ladder: Ladder
    steps: int
    epochs: float
    stop_at_step: int
    log_every_steps: int
    save_every_steps: int
    damaged: list[str]


class _Stopped(Record):
    """The field of STOPPED that is shown, in files of all versions."""

    reason: str


def read_status(folder: Path, *, now: float) -> RunStatus:
    """The status of a run. `now`: the time, in seconds since 1970.

    Raises ConfigError if the folder cannot be read or is no run, whatever it holds: it may be somebody else's folder.
    """
    try:
        return _read_status(folder, now=now)
    except OSError as error:
        sentence = describe_os_error(error)
        if sentence is None:
            raise
        raise ConfigError(sentence) from error


def _read_status(folder: Path, *, now: float) -> RunStatus:
    plan = _read_plan(folder)
    lines, damaged, foreign = _read_metrics(folder / METRICS_FILE)
    # Lines about evaluations, checkpoints and faults have no epoch.
    steps = [line for line in lines if line.epoch is not None]
    newest = steps[-1] if steps else None
    numbers = newest.numbers() if newest else {}
    step = newest.step if newest else 0
    total, estimated = _total_steps(plan, newest)
    checkpoint = _newest_checkpoint(folder / "checkpoints")
    age = max(0.0, now - _written_at(folder))
    state, reason = _state(folder, plan, steps, step=step, age_seconds=age)
    scored = [line for line in lines if line.scores]
    evaluation = scored[-1] if scored else None
    left = None
    if state == "running" and total is not None:
        left = max(0, total - step) * _seconds_a_step(steps) + _checkpoint_seconds(lines, plan, step, total)
    warnings = _warnings(plan, lines, steps, state=state, step=step, checkpoint=checkpoint)
    if damaged:
        warnings.append(f"{_count(damaged, 'damaged line')} in {METRICS_FILE}")
    if foreign:
        warnings.append(
            f"{_count(foreign, 'line')} in {METRICS_FILE} of a format that this version does not read; use the version "
            "that wrote the run"
        )
    if state == "stopped" and reason is None:
        warnings.append("STOPPED is damaged: it does not say why")
    return RunStatus(
        run=str(folder),
        state=state,
        reason=reason,
        seconds_since_written=age,
        step=step,
        total_steps=total,
        total_is_estimated=estimated,
        epoch=newest.epoch if newest else None,
        seconds_left=left if left is not None and left < _MOST_SECONDS else None,
        newest={name: value for name, value in numbers.items() if "/" not in name},
        sizes=_sizes(plan.ladder, numbers, evaluation.numbers() if evaluation else {}),
        evaluation_step=evaluation.step if evaluation else None,
        checkpoint_step=checkpoint,
        warnings=warnings,
    )


def _read_plan(folder: Path) -> _Plan:
    """Read the plan from the resolved recipe, of which nothing else is checked: other versions may have other keys."""
    path = folder / "recipe.toml"
    if not path.is_file():
        if not folder.is_dir():
            raise ConfigError(f"{folder} is no folder; name the folders of runs (run.output in their recipes)")
        below = sorted(str(found.parent) for found in folder.glob("*/recipe.toml"))
        hint = f"it holds runs: {', '.join(below)}" if below else "name the folders of runs (run.output in a recipe)"
        raise ConfigError(f"{folder} is no run: it has no recipe.toml; {hint}")
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
        ladder = Recipe(model=ModelConfig(ladder=values["model"]["ladder"])).ladder  # refuses what is none
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        problem = f"it has no {error}" if isinstance(error, KeyError) else first_line(error)
        raise ConfigError(f"{path} is damaged ({problem}); a run writes it anew when it is started") from None
    damaged = []

    def number(section: str, key: str, default: float) -> float:
        table = values.get(section, {})
        value = table.get(key, default) if isinstance(table, dict) else None
        kinds = (int, float) if isinstance(default, float) else int
        if isinstance(value, kinds) and not isinstance(value, bool) and 0 <= value < _MOST:
            return value
        damaged.append(f"{section}.{key}")
        return default

    return _Plan(
        ladder=ladder,
        steps=int(number("train", "steps", 0)),
        epochs=number("train", "epochs", 1.0),
        stop_at_step=int(number("train", "stop_at_step", 0)),
        log_every_steps=int(number("log", "every_steps", 1)),
        save_every_steps=int(number("checkpoint", "every_steps", 0)),
        damaged=damaged,
    )


def _read_metrics(path: Path) -> tuple[list[Line], int, int]:
    """(The lines of metrics.jsonl, how many are damaged, how many another version wrote).

    An incomplete last line is still being written, and is left out.
    """
    contents = [each.content for each in read_lines(path) if each.is_complete]
    lines = [content for content in contents if isinstance(content, Line)]
    foreign = sum(isinstance(content, OtherFormat) for content in contents)
    return lines, len(contents) - len(lines) - foreign, foreign


def _total_steps(plan: _Plan, newest: Line | None) -> tuple[int | None, bool]:
    """(the number of steps of the whole run, whether it is estimated from the epochs)."""
    if plan.steps:
        return plan.steps, False
    if newest is None or newest.epoch is None or not newest.epoch > 0:
        return None, False
    total = newest.step * plan.epochs / newest.epoch
    return (max(newest.step, round(total)), True) if total < _MOST else (None, False)


def _newest_checkpoint(folder: Path) -> int | None:
    found = [re.fullmatch(r"step_([0-9]{1,15})", path.parent.name) for path in folder.glob("step_*/manifest.json")]
    return max((int(match[1]) for match in found if match is not None), default=None)


def _written_at(folder: Path) -> float:
    """The time of the run's last write to its metrics, checkpoints and descriptions."""
    candidates = [folder / name for name in (METRICS_FILE, "recipe.toml", "environment.json", "checkpoints", "DONE")]
    candidates += (folder / "checkpoints").glob("*")
    times = []
    for path in candidates:
        with contextlib.suppress(FileNotFoundError):  # an unfinished checkpoint is renamed at its end
            times.append(path.stat().st_mtime)
    return max(times, default=0.0)


def _state(
    folder: Path, plan: _Plan, steps: Sequence[Line], *, step: int, age_seconds: float
) -> tuple[str, str | None]:
    if (folder / "DONE").exists():
        return "done", None
    if (folder / "STOPPED").exists():
        with contextlib.suppress(DataError):
            return "stopped", read_record(folder / "STOPPED", _Stopped).reason
        return "stopped", None
    if 0 < plan.stop_at_step <= step:
        return "stopped", "train.stop_at_step"
    apart = _seconds_a_step(steps) * plan.log_every_steps
    if age_seconds > max(_PATIENCE_SECONDS, _PATIENCE_RECORDS * apart):
        return "silent", None
    return ("running" if steps else "starting"), None


def _seconds_a_step(steps: Sequence[Line]) -> float:
    """Mean seconds a step of the newest records. Slow steps are included, because they recur."""
    return _mean([line.seconds for line in steps[-_NEWEST_RECORDS:] if line.seconds is not None])


def _mean(seconds: Sequence[float]) -> float:
    """The mean of the plausible times; 0 if there are none."""
    known = [each for each in seconds if 0 <= each < _MOST_SECONDS]
    return statistics.mean(known) if known else 0.0


def _checkpoint_seconds(lines: Sequence[Line], plan: _Plan, step: int, total: int) -> float:
    """The seconds for which the checkpoints still to be written will stall training."""
    known = [line.checkpoint_still_seconds for line in lines if line.checkpoint_still_seconds is not None]
    every = plan.save_every_steps
    if not every:
        return 0.0
    due = total // every - step // every + (1 if total % every else 0)
    return max(0, due) * _mean(known[-_NEWEST_RECORDS:])


def _sizes(ladder: Ladder, newest: Mapping[str, float], evaluation: Mapping[str, float]) -> list[SizeStatus]:
    """The ladder's sizes, and others that the newest step trained, smallest first."""
    named = {name: loss for name in newest if (loss := loss_of(name))}
    others = {loss.size for loss in named.values() if is_off_the_ladder(loss.size)}
    found = []
    for size in sorted({*ladder, *map(ladder.find, others)}):
        name = ladder.name(size)
        losses = {loss.family: newest[key] for key, loss in named.items() if loss.size == name}
        scores = {
            f"{score.task}/{score.metric}": value
            for key, value in evaluation.items()
            if (score := score_of(key)) and score.size == name
        }
        if losses or scores:
            found.append(SizeStatus(name, size.layers, size.dim, size.feed_forward, losses, scores))
    return found


def _warnings(
    plan: _Plan,
    lines: Sequence[Line],
    steps: Sequence[Line],
    *,
    state: str,
    step: int,
    checkpoint: int | None,
) -> list[str]:
    found = []
    if steps:
        newest = steps[-1]
        numbers = {"loss": newest.loss, "grad_norm": newest.grad_norm}
        if bad := [name for name, value in numbers.items() if value is not None and not math.isfinite(value)]:
            found.append(f"{' and '.join(bad)} not finite at step {step}")
        if newest.skipped_steps:
            found.append(f"{_count(newest.skipped_steps, 'step')} skipped{_newest_fault(lines, spike=False)}")
    if spikes := sum(line.fault == "spike" for line in lines):
        found.append(f"{_count(spikes, 'spike')} of the loss{_newest_fault(lines, spike=True)}")
    recent = steps[-_NEWEST_RECORDS:]
    waiting = [line.data_wait_share for line in recent if line.data_wait_share is not None]
    if waiting and statistics.median(waiting) > _SLOW_FEED:
        found.append(f"{statistics.median(waiting):.0%} of the time waits for data: raise data.num_workers")
    padding = [line.padding_share for line in recent if line.padding_share is not None]
    if padding and statistics.median(padding) > _MUCH_PADDING:
        found.append(f"{statistics.median(padding):.0%} of the tokens computed are padding")
    every = plan.save_every_steps
    if every and state != "done" and step - (checkpoint or 0) > 2 * every:
        found.append(f"the newest checkpoint is {step - (checkpoint or 0):,} steps old, of {every:,} wanted")
    if plan.damaged:
        found.append(f"recipe.toml is damaged: {' and '.join(plan.damaged)} cannot be")
    return found


def _newest_fault(lines: Sequence[Line], *, spike: bool) -> str:
    faults = [line for line in lines if line.fault is not None and (line.fault == "spike") == spike]
    if not faults:
        return ""
    kind = "" if spike else f"{faults[-1].fault} "
    return f", the newest: {kind}at step {faults[-1].step:,}"


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def as_text(runs: Sequence[RunStatus], *, now: float) -> str:
    """One run in full, several runs as one row each. Escape codes in names are made visible for the terminal."""
    runs = [_printable(run) for run in runs]
    return _details(runs[0], now) if len(runs) == 1 else _rows(runs, now)


def _printable(run: RunStatus) -> RunStatus:
    return dataclasses.replace(
        run,
        run=printable(run.run),
        reason=None if run.reason is None else printable(run.reason),
        sizes=[
            dataclasses.replace(size, scores={printable(name): value for name, value in size.scores.items()})
            for size in run.sizes
        ],
        warnings=[printable(warning) for warning in run.warnings],
    )


def _details(run: RunStatus, now: float) -> str:
    newest = run.newest
    lines = [f"{run.run}: {_state_words(run, now)}, {_progress(run)}"]
    facts = [
        _fact(newest, "loss", "loss {:.4g}"),
        _fact(newest, "lr", "learning rate {:.3g}"),
        _fact(newest, "grad_norm", "gradient norm {:.3g}"),
        f"last written {_duration(run.seconds_since_written)} ago",
    ]
    lines.append("  " + " · ".join(filter(None, facts)))
    speed = [
        _fact(newest, "tokens_per_second", "{:,.0f} tokens/s"),
        _fact(newest, "mfu", "MFU {:.1%}"),
        _fact(newest, "seconds", "{:.3g} s a step"),
        _fact(newest, "padding_share", "padding {:.1%}"),
        _fact(newest, "data_wait_share", "waiting for data {:.1%}"),
        _fact(newest, "memory_mib", "{:,.0f} MiB"),
    ]
    if any(speed):
        lines.append("  " + " · ".join(filter(None, speed)))
    kept = "none yet" if run.checkpoint_step is None else f"step {run.checkpoint_step:,}"
    scored = "" if run.evaluation_step is None else f" · evaluated at step {run.evaluation_step:,}"
    lines.append(f"  newest checkpoint: {kept}{scored}")
    if run.sizes:
        losses = list(dict.fromkeys(family for size in run.sizes for family in size.losses))
        scores = list(dict.fromkeys(name for size in run.sizes for name in size.scores))
        fractions = any(size.feed_forward != 1 for size in run.sizes)
        header = [
            "size",
            "layers",
            "dim",
            *(["feed-forward"] if fractions else []),
            *losses,
            *(_score_label(name) for name in scores),
        ]
        table = [
            [
                size.name,
                str(size.layers),
                str(size.dim),
                *([f"{size.feed_forward:g}"] if fractions else []),
                *(_number(size.losses.get(name)) for name in losses),
                *(_number(size.scores.get(name)) for name in scores),
            ]
            for size in run.sizes
        ]
        lines += ["", *("  " + line for line in _table(header, table, text_columns=1))]
    lines += [f"  warning: {warning}" for warning in run.warnings]
    return "\n".join(lines) + "\n"


def _rows(runs: Sequence[RunStatus], now: float) -> str:
    table = []
    for run in runs:
        loss = next((family for size in run.sizes for family in size.losses), "loss")
        score = next((s for size in run.sizes for s in size.scores if s.rpartition("/")[2] in _HEADLINES), "")
        table.append(
            [
                run.run,
                _state_words(run, now),
                f"{run.step:,}" + (f" of {'≈' * run.total_is_estimated}{run.total_steps:,}" if run.total_steps else ""),
                "–" if run.seconds_left is None else _duration(run.seconds_left),
                _number(run.newest.get("loss")),
                _by_size([size.losses.get(loss) for size in run.sizes]),
                _by_size([size.scores.get(score) for size in run.sizes]),
                _fact(run.newest, "tokens_per_second", "{:,.0f}") or "–",
                _fact(run.newest, "mfu", "{:.1%}") or "–",
                "–" if run.checkpoint_step is None else f"{run.checkpoint_step:,}",
            ]
        )
    header = ["run", "state", "step", "left", "loss", "loss by size", "score by size", "tokens/s", "MFU", "saved"]
    lines = list(_table(header, table, text_columns=2))
    lines += [f"{run.run}: warning: {warning}" for run in runs for warning in run.warnings]
    return "\n".join(lines) + "\n"


def _state_words(run: RunStatus, now: float) -> str:
    if run.state == "silent":
        clock = "%H:%M" if run.seconds_since_written < 12 * 3600 else "%Y-%m-%d %H:%M"
        # File times may lie before 1970, which localtime cannot always show.
        return f"silent since {time.strftime(clock, time.localtime(max(0.0, now - run.seconds_since_written)))}"
    return f"stopped ({run.reason})" if run.reason else run.state


def _progress(run: RunStatus) -> str:
    total = "" if run.total_steps is None else f" of {'about ' * run.total_is_estimated}{run.total_steps:,}"
    share = f" ({run.step / run.total_steps:.0%})" if run.total_steps else ""
    epoch = "" if run.epoch is None else f", epoch {run.epoch:.2f}"
    left = "" if run.seconds_left is None else f", {_duration(run.seconds_left)} left"
    return f"step {run.step:,}{total}{share}{epoch}{left}"


def _fact(values: Mapping[str, float], name: str, form: str) -> str:
    return form.format(values[name]) if name in values else ""


def _by_size(values: Sequence[float | None]) -> str:
    """The values of all sizes, smallest first, in one cell."""
    return " ".join(_number(value, digits=3) for value in values) if any(v is not None for v in values) else "–"


def _score_label(name: str) -> str:
    task, _, metric = name.rpartition("/")
    return f"{task} {_SCORES.get(metric, metric)}"


def _number(value: float | None, *, digits: int = 4) -> str:
    if value is None:
        return "–"
    if abs(value) < 1:
        return f"{value:.{digits}f}"
    return f"{value:.{digits - 1}f}" if abs(value) < 100 else f"{value:.{digits}g}"


def _duration(seconds: float) -> str:
    """A duration in at most two units: "3 min 10 s"."""
    whole = round(seconds)
    for unit, next_unit, size, next_size in (("d", "h", 86400, 3600), ("h", "min", 3600, 60), ("min", "s", 60, 1)):
        if whole >= size:
            rest = whole % size // next_size
            return f"{whole // size} {unit}" + (f" {rest} {next_unit}" if rest else "")
    return f"{whole} s"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], *, text_columns: int) -> Iterable[str]:
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    for number, line in enumerate(lines):
        cells = [c.ljust(w) if i < text_columns else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths))]
        yield "  ".join(cells).rstrip()
        if number == 0:
            yield "  ".join("─" * width for width in widths)


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="python -m launch.status", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run's folder")
    parser.add_argument("--watch", type=float, metavar="SECONDS", help="repeat at this interval until all are done")
    parser.add_argument("--json", action="store_true", help="print everything as a JSON list of objects")
    args = parser.parse_args(argv)
    return exit_code_of(lambda: _show(args))


def _show(args: argparse.Namespace) -> int:
    if args.watch is not None and not 0 < args.watch <= _LONGEST_WATCH:
        raise ConfigError(f"--watch {args.watch} must be above 0 seconds, and at most a day")
    while True:
        now = time.time()
        runs, problems = [], []
        for run in args.runs:
            try:
                runs.append(read_status(Path(run), now=now))
            except UserError as problem:
                problems.append(problem)
        text = "" if not runs else _json(runs) if args.json else as_text(runs, now=now)
        if args.watch is not None and not args.json and sys.stdout.isatty():
            print("\033[H\033[2J", end="")
        print(text, end="", flush=True)
        if problems:
            return max(tell(problem) for problem in problems)
        if args.watch is None or all(run.state == "done" for run in runs):
            return 0
        time.sleep(args.watch)


def _json(runs: Sequence[RunStatus]) -> str:
    """The runs as JSON; NaN and infinity, which JSON lacks, become null."""
    return json_of([dataclasses.asdict(run) for run in runs], indent=2) + "\n"


if __name__ == "__main__":
    sys.exit(main())

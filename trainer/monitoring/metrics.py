"""What a person watches: metrics.jsonl, a progress bar and the dashboard, all fed with one record a logged step.

`metrics.jsonl` has one JSON object a line, whose schema is trainer/monitoring/lines.py. A record has means over the
steps since the last record; evaluations, checkpoints and faults write lines of their own. trainer/monitoring/names.py
says what each name means.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor
from tqdm import tqdm

from data.collate import samples_of
from data.ground.errors import DataError, OtherFormat
from data.ground.files import write_atomically
from data.ground.records import defined
from trainer.costs.flops import peak_flops
from trainer.distributed import World, gather_objects, sum_over_ranks
from trainer.monitoring.dashboard import Dashboard
from trainer.monitoring.lines import FILE, read_lines, text_of
from trainer.monitoring.names import EVALUATION, FAULT, RATES, SAVED
from trainer.objectives.backward import StepReport
from trainer.resilience.anomalies import Fault

log = logging.getLogger(__name__)


class Lines:
    """A file that grows by whole lines, on a disk that may be full for a while.

    Lines that cannot be written are kept in memory and are written first when there is room again. One warning tells
    of each failure, and one of its end.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        # Without a buffer, so that `write` returns how much was written.
        self._file = path.open("ab", buffering=0)
        self._waiting = b""
        self._failed = False

    def write(self, line: str) -> None:
        self._waiting += line.encode() + b"\n"
        try:
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting) :]
        except OSError as error:
            if not self._failed:
                log.warning(
                    "%s cannot be written (%s); its lines are kept in memory until it can", self._path, error.strerror
                )
            self._failed = True
            return
        if self._failed:
            log.warning("%s is written again; nothing of it is missing", self._path)
        self._failed = False

    def close(self) -> None:
        if self._waiting:
            # One more try, whose failure was already reported.
            with contextlib.suppress(OSError):
                self._waiting = self._waiting[self._file.write(self._waiting) :]
        if self._waiting:
            log.warning("%s lacks its last %d lines", self._path, self._waiting.count(b"\n"))
        self._file.close()


class Metrics:
    """Collects step reports and writes a record every `every_steps`; all ranks call `update`, rank 0 writes."""

    def __init__(
        self,
        folder: Path,
        world: World,
        *,
        every_steps: int,
        total_steps: int,
        start_step: int,
        dashboard: Dashboard | None,
        samples: bool = False,
        repeats_evaluation: bool = True,
    ) -> None:
        """samples: write down which samples each step read, in one file a rank.

        repeats_evaluation: whether the run evaluates at `start_step`, in place of an evaluation that it has there.
        """
        self._world = world
        self._every_steps = every_steps
        self._total_steps = total_steps
        self._peak = peak_flops(world.device) * world.size
        self._last: dict[str, Any] = {}
        self._skipped_steps = 0
        self._clear()
        self._dashboard = dashboard  # on rank 0 alone
        self._file: Lines | None = None
        self._bar: tqdm | None = None
        self._samples = _open_samples(folder / "samples", world, start_step) if samples else None
        if not world.is_main:
            return
        path = folder / FILE
        forget_after(path, start_step, repeats_evaluation=repeats_evaluation)
        self._file = Lines(path)
        self._bar = tqdm(
            total=total_steps,
            initial=start_step,
            unit="step",
            desc=folder.name,
            dynamic_ncols=True,
            # A terminal gets a live bar; a log file gets a line every 20 seconds.
            mininterval=0.5 if sys.stderr.isatty() else 20.0,
        )

    def _clear(self) -> None:
        self._losses: dict[str, Tensor] = {}
        self._work = [0.0, 0.0, 0.0]  # tokens, padded tokens, FLOPs
        self._seconds = self._wait_seconds = 0.0
        self._steps = self._counted = 0

    def update(
        self,
        report: StepReport,
        batch: Any,
        *,
        step: int,
        epoch: float,
        samples: int,
        rates: Mapping[str, float],
        grad_norm: float,
        seconds: float,
        wait_seconds: float,
        skipped_steps: int = 0,
        counts: bool = True,
    ) -> dict[str, Any] | None:
        """Take in one step, and return the record if the step is logged. `step` counts finished steps.

        counts: whether the step's losses go into the means.
        """
        for name, value in report.losses.items():
            value = value.detach().double() if counts else torch.zeros((), device=value.device, dtype=torch.float64)
            self._losses[name] = self._losses[name] + value if name in self._losses else value
        self._counted += counts
        if self._samples is not None:
            self._samples.write(text_of({"step": step, "samples": samples_of(batch)}))
        self._last = {"epoch": epoch, "samples": samples, **rates, "grad_norm": grad_norm}
        self._skipped_steps = skipped_steps
        for index, amount in enumerate((report.tokens, report.padded_tokens, report.flops)):
            self._work[index] += amount
        self._seconds += seconds
        self._wait_seconds += wait_seconds
        self._steps += 1
        if self._bar is not None:
            self._bar.update(1)
        if step % self._every_steps and step != self._total_steps:
            return None
        return self.flush(step)

    def flush(self, step: int) -> dict[str, Any] | None:
        """Write the record of the steps since the last record, up to `step`; all ranks call it."""
        if not self._steps:
            return None
        device = self._world.device
        sums = sum_over_ranks(
            torch.cat([torch.stack(list(self._losses.values())), torch.tensor(self._work).to(device)]), device
        )
        # A window of skipped steps alone has no losses.
        counted = max(1, self._counted)
        losses = {name: float(value) / counted for name, value in zip(self._losses, sums) if self._counted}
        tokens, padded, flops = (float(value) for value in sums[-3:])
        record = {
            "step": step,
            "epoch": self._last["epoch"],
            "samples": self._last["samples"],
            **losses,
            **{name: self._last[name] for name in RATES if name in self._last},
            **({"grad_norm": self._last["grad_norm"]} if math.isfinite(self._last["grad_norm"]) else {}),
            "tokens_per_second": tokens / self._seconds,
            "mfu": flops / self._seconds / self._peak,
            "padding_share": 1.0 - tokens / max(padded, 1.0),
            "data_wait_share": self._wait_seconds / self._seconds,
            "memory_mib": _memory_mib(device),
            "seconds": self._seconds / self._steps,
            "skipped_steps": self._skipped_steps,
        }
        self._clear()
        self._write(record)
        return record

    def evaluation(self, step: int, scores: dict[str, float]) -> None:
        """Scores of an evaluation during training, by name."""
        self._write({"step": step, **{f"{EVALUATION}{name}": value for name, value in scores.items()}})

    def checkpoint(self, step: int, *, seconds: float, still_seconds: float, mib: float) -> None:
        """What a checkpoint cost: seconds to write it, seconds that training stood still, and MiB over all ranks."""
        self._write({"step": step, **dict(zip(SAVED, (seconds, still_seconds, mib)))})

    def fault(self, kind: Fault, step: int, *, loss: float, own_loss: float, grad_norm: float, batch: Any) -> None:
        """Name a step's samples and each rank's part of the loss; all ranks call it."""
        samples = samples_of(batch)
        everyone = gather_objects((own_loss, samples))
        skipped = "" if kind == "spike" else "skipped: "
        ranks = [rank for rank, (value, _) in enumerate(everyone) if not math.isfinite(value)]
        where = f" on {'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}" if ranks else ""
        log.log(
            logging.WARNING if self._world.is_main else logging.DEBUG,
            "step %d %s%s%s (loss %g, gradient norm %g); its samples are in metrics.jsonl",
            *(step, skipped, kind, where, loss, grad_norm),
        )
        self._write_line(
            {
                "step": step,
                "fault": kind,
                f"{FAULT}loss": repr(loss),  # JSON has no NaN and no infinity
                f"{FAULT}grad_norm": repr(grad_norm),
                "by_rank": [repr(value) for value, _ in everyone],
                "samples": [sample for _, part in everyone for sample in part],
            }
        )

    def _write_line(self, record: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(text_of(record))

    def _write(self, record: dict[str, Any]) -> None:
        record = defined(record)
        self._write_line(record)
        if self._dashboard is not None:
            self._dashboard.record(record)
        if self._bar is not None and record.get("loss") is not None:
            self._bar.set_postfix(
                loss=f"{record['loss']:.3f}", tok_s=f"{record['tokens_per_second']:.0f}", refresh=False
            )

    def close(self) -> None:
        for sink in (self._file, self._dashboard, self._bar, self._samples):
            if sink is not None:
                sink.close()


def _open_samples(folder: Path, world: World, start_step: int) -> Lines:
    """Open this rank's file of samples. Drops lines after the resumed step, also of ranks that this start lacks."""
    folder.mkdir(exist_ok=True)
    for number, path in enumerate(sorted(folder.glob("rank_*.jsonl"))):
        if number % world.size == world.rank:
            forget_after(path, start_step)
    gather_objects(None)  # no rank writes before all files are cut
    return Lines(folder / f"rank_{world.rank:05d}.jsonl")


def _memory_mib(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return psutil.Process().memory_info().rss / 2**20


def forget_after(path: Path, step: int, *, repeats_evaluation: bool = True) -> None:
    """Drop the records of steps that a resumed run repeats, and lines that are no records, such as a line cut off.

    repeats_evaluation: whether an evaluation at the resumed step is repeated, and so dropped as well.

    Raises OtherFormat, and changes nothing, if another version wrote one of the lines.
    """
    lines, kept, broken = [], [], 0
    for each in read_lines(path):
        if isinstance(each.content, OtherFormat):
            raise each.content
        lines.append(each.text)
        if isinstance(each.content, DataError) or not each.is_complete:
            broken += 1
        elif each.content.step < step + (not (repeats_evaluation and each.content.scores)):
            kept.append(each.text)
    if broken:
        log.warning("%s: dropped %d line%s that %s cut off or no record", path, broken, *_plural(broken))
    if len(kept) == len(lines):
        return
    if kept == lines[: len(kept)]:
        # A full disk allows this, too.
        os.truncate(path, sum(map(len, kept)))
    else:
        write_atomically(path, b"".join(kept))


def _plural(count: int) -> tuple[str, str]:
    return ("", "was") if count == 1 else ("s", "were")

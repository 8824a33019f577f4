"""What a person watches: TensorBoard, metrics.jsonl and a progress bar, all from one record a logged step.

Records are means over the steps since the last one. `metrics.jsonl` has one JSON object a line with: step, epoch,
samples; loss and its parts by size; lr; grad_norm (before clipping, of the last step); tokens_per_second
(without padding, all ranks); mfu (model FLOPs utilisation, trainer/flops.py); padding_share (of the tokens computed);
data_wait_share (of the time); memory_mib (peak on this rank's device; resident on CPU); seconds (a step). Evaluations
and checkpoints write lines of their own: step, then evaluation/… or checkpoint/seconds and checkpoint/mib.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor
from tqdm import tqdm

from trainer.distributed import World, sum_over_ranks
from trainer.flops import peak_flops
from trainer.objectives import StepReport

log = logging.getLogger(__name__)


class Metrics:
    """Collects step reports and writes a record every `every_steps`; all ranks call `update`, rank 0 writes."""

    def __init__(
        self, folder: Path, world: World, *, every_steps: int, total_steps: int, start_step: int, tensorboard: bool
    ) -> None:
        self._world = world
        self._every_steps = every_steps
        self._total_steps = total_steps
        self._peak = peak_flops(world.device) * world.size
        self._clear()
        self._file = self._board = self._bar = None
        if not world.is_main:
            return
        path = folder / "metrics.jsonl"
        _forget_after(path, start_step)
        self._file = path.open("a", encoding="utf-8")
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=start_step + 1)
        self._bar = tqdm(
            total=total_steps,
            initial=start_step,
            unit="step",
            desc=folder.name,
            dynamic_ncols=True,
            # A log file gets a line now and then, a terminal a live bar.
            mininterval=0.5 if sys.stderr.isatty() else 20.0,
        )

    def _clear(self) -> None:
        self._losses: dict[str, Tensor] = {}
        self._work = [0.0, 0.0, 0.0]  # tokens, padded tokens, FLOPs
        self._seconds = self._wait_seconds = 0.0
        self._steps = 0

    def text(self, tag: str, text: str) -> None:
        if self._board is not None:
            self._board.add_text(tag, text)

    def update(
        self,
        report: StepReport,
        *,
        step: int,
        epoch: float,
        samples: int,
        lr: float,
        grad_norm: float,
        seconds: float,
        wait_seconds: float,
    ) -> dict[str, Any] | None:
        """Take in one step; the record on the steps that are logged. `step` counts finished steps."""
        for name, value in report.losses.items():
            value = value.detach().double()
            self._losses[name] = self._losses[name] + value if name in self._losses else value
        for index, amount in enumerate((report.tokens, report.padded_tokens, report.flops)):
            self._work[index] += amount
        self._seconds += seconds
        self._wait_seconds += wait_seconds
        self._steps += 1
        if self._bar is not None:
            self._bar.update(1)
        if step % self._every_steps and step != self._total_steps:
            return None
        device = self._world.device
        sums = sum_over_ranks(
            torch.cat([torch.stack(list(self._losses.values())), torch.tensor(self._work).to(device)]), device
        )
        losses = {name: float(value) / self._steps for name, value in zip(self._losses, sums)}
        tokens, padded, flops = (float(value) for value in sums[-3:])
        record = {
            "step": step,
            "epoch": epoch,
            "samples": samples,
            **losses,
            "lr": lr,
            "grad_norm": grad_norm,
            "tokens_per_second": tokens / self._seconds,
            "mfu": flops / self._seconds / self._peak,
            "padding_share": 1.0 - tokens / max(padded, 1.0),
            "data_wait_share": self._wait_seconds / self._seconds,
            "memory_mib": _memory_mib(device),
            "seconds": self._seconds / self._steps,
        }
        self._clear()
        self._write(record)
        return record

    def evaluation(self, step: int, scores: dict[str, float]) -> None:
        """Scores of an evaluation during training, by name."""
        self._write({"step": step, **{f"evaluation/{name}": value for name, value in scores.items()}})

    def checkpoint(self, step: int, *, seconds: float, mib: float) -> None:
        """What a checkpoint cost: seconds that training stood still, and its size over all ranks."""
        self._write({"step": step, "checkpoint/seconds": seconds, "checkpoint/mib": mib})

    def _write(self, record: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
        if self._board is not None:
            for name, value in record.items():
                if name != "step":
                    self._board.add_scalar(name if "/" in name else f"train/{name}", value, record["step"])
        if self._bar is not None and "loss" in record:
            self._bar.set_postfix(
                loss=f"{record['loss']:.3f}", tok_s=f"{record['tokens_per_second']:.0f}", refresh=False
            )

    def close(self) -> None:
        for sink in (self._file, self._board, self._bar):
            if sink is not None:
                sink.close()


def _memory_mib(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return psutil.Process().memory_info().rss / 2**20


def _forget_after(path: Path, step: int) -> None:
    """Drop records of steps that a resumed run takes again, and a last line that was cut off."""
    if not path.is_file():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except json.JSONDecodeError:
            log.warning("%s: dropped a line that was cut off", path)
    path.write_text("".join(kept), encoding="utf-8")

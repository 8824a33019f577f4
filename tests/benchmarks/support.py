"""What the benchmarks share: where the data lie, timing in turn, memory, and figures as printed and as kept."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from itertools import accumulate
from pathlib import Path
from typing import TypeVar

from torch.profiler import ProfilerActivity, profile

T = TypeVar("T")

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"


class Figures:
    """Named numbers, printed as they come."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}

    def show(self, **new: float) -> None:
        """Print figures on one line, and keep them."""
        self.values |= new
        print("  ".join(f"{name} {_shown(value)}" for name, value in new.items()), flush=True)

    def write(self, path: Path | None) -> None:
        """All figures so far as JSON; None: nowhere."""
        write_figures(self.values, path)


def _shown(value: float) -> str:
    """Three decimals, or two digits of what they would round to 0."""
    return f"{value:.1e}" if 0 < abs(value) < 5e-4 else f"{value:.3f}"


def write_figures(figures: Mapping[str, object], path: Path | None) -> None:
    if path is not None:
        path.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def take_turns(actions: Mapping[str, Callable[[], object]], *, repeats: int) -> dict[str, float]:
    """CPU seconds of each, the best of `repeats`, taken in turn."""
    best = dict.fromkeys(actions, float("inf"))
    for _ in range(repeats):
        for name, action in actions.items():
            begin = time.process_time()
            action()
            best[name] = min(best[name], time.process_time() - begin)
    return best


def alternate(first: Callable[[], object], second: Callable[[], object], repeats: int) -> tuple[float, float]:
    """CPU seconds of each, the best of `repeats`, taken in turn."""
    best = take_turns({"first": first, "second": second}, repeats=repeats)
    return best["first"], best["second"]


def peak_allocation(action: Callable[[], T]) -> tuple[float, T]:
    """MiB of the tensors that an action makes, at their peak, and what it returns.

    torch's allocator on the CPU counts them, exactly: no page that was free before hides one.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else each use writes lines to stderr
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        made = action()
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    events = [each for each in profiler.profiler.kineto_results.events() if each.name() == "[memory]"]
    changes = [each.nbytes() for each in sorted(events, key=lambda each: each.start_ns())]
    return max(accumulate(changes), default=0) / 2**20, made


def peak_mib() -> float:
    """Peak resident memory of this process alone: rusage's figure would be the parent's, if that was larger."""
    return _status_mib("VmHWM")


def resident_mib() -> float:
    """What this process holds now."""
    return _status_mib("VmRSS")


def _status_mib(name: str) -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) / 1024

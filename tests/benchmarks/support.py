"""What the benchmarks share: where the data lie, timing in turn, memory, and figures as printed and as kept."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"


class Figures:
    """Named numbers, printed as they come."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}

    def show(self, **new: float) -> None:
        """Print figures on one line, and keep them."""
        self.values |= new
        print("  ".join(f"{name} {value:.3f}" for name, value in new.items()), flush=True)

    def write(self, path: Path | None) -> None:
        """All figures so far as JSON; None: nowhere."""
        write_figures(self.values, path)


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


def peak_mib() -> float:
    """Peak resident memory of this process alone: rusage's figure would be the parent's, if that was larger."""
    return _status_mib("VmHWM")


def resident_mib() -> float:
    """What this process holds now."""
    return _status_mib("VmRSS")


def _status_mib(name: str) -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) / 1024

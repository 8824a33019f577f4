"""`trainer.evaluate` in a process that ends itself at a chosen moment: KILL_AT=block:N, task:N or stop:N, from 1 on.

block:N    in the middle of writing block N of vectors, its bytes on disk but not its name
task:N     when N tasks are kept, before the next begins
stop:N     rank 0 alone, and not by a signal: it is asked to stop when it has written N blocks
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from trainer import evaluate
from trainer.evaluation.results.parts import Parts
from trainer.evaluation.search import vectors
from trainer.resilience.stopping import StopRequests


def main() -> None:
    what, _, count = os.environ["KILL_AT"].partition(":")
    seen = 0
    asked: list[str] = []
    if what == "stop":
        StopRequests.wanted = lambda _: next(iter(asked), None)  # type: ignore[method-assign]

    def is_time(now: str) -> bool:
        nonlocal seen
        seen += now == what
        return now == what and seen == int(count)

    write, save = vectors.write_atomically, Parts.save

    def write_or_die(path: Path, content: str | bytes) -> None:
        if path.suffix == ".f16" and is_time("block"):
            path.with_name(f"{path.name}.tmp").write_bytes(bytes(content)[: len(content) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        write(path, content)
        if path.suffix == ".f16" and os.environ.get("RANK") == "0" and is_time("stop"):
            asked.append("asked")

    def save_or_die(parts: Parts, *arguments: Any) -> None:
        save(parts, *arguments)
        if is_time("task"):
            os.kill(os.getpid(), signal.SIGKILL)

    vectors.write_atomically = write_or_die
    Parts.save = save_or_die  # type: ignore[method-assign]
    sys.exit(evaluate.main(sys.argv[1:]))


if __name__ == "__main__":
    main()

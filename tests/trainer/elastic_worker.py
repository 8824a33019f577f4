"""Whole runs, one after another, on several ranks, that leave the ids of every step's samples.

    deepspeed --num_gpus 2 --module tests.trainer.elastic_worker CASES.json

Each case is {task, arguments, ids, control}: rank r of w writes a JSON line a step into the file w-r.jsonl in `ids`.
`control` breaks something on purpose.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
import unittest.mock
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from data.ground.command import run_command
from data.stream import Sample, Stream
from tests.trainer.support import without_fp16_units
from trainer import build, checkpoint, run
from trainer.config.kinds import kind_named
from trainer.distributed import World, start
from trainer.engine import MASTER, Engine, Fragment


class Recorded:
    """A collator that writes down what it is given: with no loader processes, one call a step."""

    def __init__(self, collate: Any, path: Path) -> None:
        self._collate, self._path = collate, path

    def __call__(self, samples: list[Sample]) -> Any:
        with self._path.open("a") as file:
            file.write(json.dumps([[s.epoch, s.source, s.index] for s in samples]) + "\n")
        return self._collate(samples)


def main() -> None:
    cases = json.loads(Path(sys.argv[-1]).read_text())
    world = start()
    without_fp16_units()
    patch = unittest.mock.patch.object
    for case in cases:
        ids = Path(case["ids"])
        ids.mkdir(parents=True, exist_ok=True)

        def recorded(*args: Any, collate: Any, ids: Path = ids, **settings: Any) -> Stream:
            return Stream(*args, collate=Recorded(collate, ids / f"{world.size}-{world.rank}.jsonl"), **settings)

        with patch(dist, "destroy_process_group"), patch(build, "Stream", recorded), _broken(case["control"], world):
            run.main(kind_named(case["task"]).command, "", case["arguments"])
    dist.barrier()
    dist.destroy_process_group()


@contextlib.contextmanager
def _broken(control: str, world: World) -> Iterator[None]:
    patch = unittest.mock.patch.object
    if not control:
        yield
    elif control == "moments stay behind":
        write = Engine._write

        def weights_alone(self: Engine, fragment: Fragment, values: Tensor) -> None:
            if fragment.kind == MASTER:
                write(self, fragment, values)

        with patch(Engine, "_write", weights_alone):
            yield
    elif control == "rank 1 has no room at its second save":
        write_fragments, saves = checkpoint.write_fragments, iter(range(1, 100))

        def full(path: Path, *rest: Any) -> dict[str, Any]:
            if next(saves) == 2 and world.rank == 1:
                path.write_bytes(b"a part")
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            return write_fragments(path, *rest)

        with patch(checkpoint, "write_fragments", full):
            yield
    else:
        raise ValueError(f"no control {control!r}")


if __name__ == "__main__":
    run_command(main)

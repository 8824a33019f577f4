"""What training steps send and hold, counted: one rank a host, run by tests and, under the launcher, by benchmarks.

    deepspeed --hostfile H --no_ssh --node_rank I … --module tests.launch.communication CASES.json OUTPUT.json

Each case is {name, values (a recipe's tables), steps}. Rank 0 writes a list of dicts, a case each: `sent`, bytes a step
that each rank's network device sent; `collectives`, bytes a step by kind, of the tensor that is whole on every rank, as
rank 0 called them; `held`, bytes of tensors that each rank has more after a step than before its engine;
`micro_batches` a step; `passages` of a global batch, every rank's padded to the largest; `seconds`, of the fastest
step; `link`, bytes a second that a rank sends in large all-reduces. The first two steps are not counted: DeepSpeed
plans its fetches in them.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_calls: Counter[str] = Counter()


COLLECTIVES = ("all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor")
COLLECTIVES += ("reduce_scatter", "reduce_scatter_tensor")


def _watch(name: str) -> None:
    """Replace a collective by one that counts the bytes of its whole tensor; before DeepSpeed keeps a reference."""
    function = getattr(dist, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        _calls[name] += max(_bytes_of(each) for each in (*args, *kwargs.values()))
        return function(*args, **kwargs)

    setattr(dist, name, counted)


def _bytes_of(argument: Any) -> int:
    if isinstance(argument, list):
        return sum(map(_bytes_of, argument))
    return int(argument.nbytes) if isinstance(argument, torch.Tensor) else 0


for each_name in COLLECTIVES:
    _watch(each_name)

from data.ground.command import run_command  # noqa: E402
from tests.launch.hosts import DEVICE, sent_by  # noqa: E402
from tests.trainer.support import recipe_of  # noqa: E402
from tests.trainer.worker import counted_chunks  # noqa: E402
from trainer import build, engine  # noqa: E402
from trainer.distributed import World, gather_objects, start  # noqa: E402
from trainer.ds_config import read_ds_config  # noqa: E402

WARM_UP_STEPS = 2


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--local_rank")
    args = parser.parse_args()
    world = start()
    gc.freeze()  # what is imported has no tensors to be counted, and need not be looked through
    results = [watch_steps(case["values"], world, steps=case["steps"]) for case in json.loads(args.cases.read_text())]
    if world.is_main:
        args.output.write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def watch_steps(values: dict[str, Any], world: World, *, steps: int) -> dict[str, Any]:
    """The trainer's own parts, put together as trainer/run.py does."""
    recipe = recipe_of(values)
    before = _storages()  # kept, so that what is left of an earlier engine cannot go while this one is counted
    sources = build.open_shards(recipe)
    ds_config = read_ds_config(recipe.engine.ds_config)
    parts = build.build_model(recipe, sources, ds_config)
    trained = engine.Engine(parts.module, recipe, world, ds_config)
    trained.train()
    stream = build.open_stream(recipe, sources, rank=world.rank, world_size=world.size)
    objective = build.build_objective(recipe, parts)
    batches = [next(stream) for _ in range(steps + WARM_UP_STEPS)]
    stream.close()
    seconds: list[float] = []
    sent = 0
    passages: list[int] = []
    with counted_chunks() as chunks:
        for step, batch in enumerate(batches):
            dist.barrier()
            if step == WARM_UP_STEPS:
                _calls.clear()
                chunks.clear()
                sent = -_sent()
            begin = time.perf_counter()
            objective.forward_backward(trained, batch, step)
            trained.step(recipe.optim.lr)
            if step >= WARM_UP_STEPS:
                seconds.append(time.perf_counter() - begin)
                passages.append(len(getattr(getattr(batch, "pairs", batch), "passages", ())))
    calls = dict(_calls)
    counted = _sent()
    link = _link_rate(world)
    sent -= _sent() - counted
    dist.barrier()
    sent += _sent()
    result = {
        "sent": [each / steps for each in gather_objects(sent)],
        "collectives": _by_kind({name: count / steps for name, count in calls.items()}),
        "held": gather_objects(sum(each.nbytes() for key, each in _storages().items() if key not in before)),
        "micro_batches": sum(map(max, zip(*gather_objects(list(chunks))))) / steps,
        "passages": sum(map(max, zip(*gather_objects(passages)))) * world.size / steps,
        "seconds": min(seconds),
        "link": link,
    }
    trained.deepspeed.destroy()
    return result


def _link_rate(world: World) -> float:
    """The best of three."""
    values = torch.zeros(2**21)
    best = float("inf")
    for _ in range(3):
        dist.barrier()
        begin = time.perf_counter()
        dist.all_reduce(values)
        best = min(best, time.perf_counter() - begin)
    return 2 * (world.size - 1) / world.size * values.nbytes / best


def _by_kind(calls: dict[str, float]) -> dict[str, float]:
    """all_gather_into_tensor and all_gather are one kind."""
    kinds = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
    return {kind: sum(count for name, count in calls.items() if name.startswith(kind)) for kind in kinds}


def _sent() -> int:
    return sent_by(DEVICE, Path("/proc/net/dev").read_text())


def _storages() -> dict[int, Any]:
    """Of all tensors that Python can reach, by address."""
    gc.collect()
    # type(), for isinstance asks objects that answer with imports.
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor) and each.device.type == "cpu"]
    return {storage.data_ptr(): storage for storage in (each.untyped_storage() for each in tensors)}


if __name__ == "__main__":
    run_command(main)

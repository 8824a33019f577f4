"""What tests start on several ranks: many small cases in one set of processes, since a start costs seconds.

    deepspeed --num_gpus 2 --module tests.trainer.worker steps CASES.json OUTPUT

`steps`: each case is {name, values (a recipe's tables), steps, control}; rank 0 writes OUTPUT/<name>.pt, a list with
a dict a step: loss, norm, parameters, and the number of micro-batches of every rank. `control` breaks the trainer on
purpose, so that a test can show that its equality notices.
`starts`: each case is {name, values, control}; rank 0 writes OUTPUT/<name>.pt, a list with a dict a rank of the bytes
that the rank held while it built its model and engine.
`runs`: each case is {task, arguments}, the command line of a whole run, one after another.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import unittest.mock
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from data.ground.command import run_command
from data.shards.reader import ShardFolder
from tests.trainer.support import recipe_of, without_fp16_units
from trainer import build, engine, ring, run
from trainer import ds_config as engine_settings
from trainer.config.kinds import kind_named
from trainer.config.schema import Recipe
from trainer.distributed import World, gather_counts, gather_objects, gather_rows, seed_step, start, sum_over_ranks
from trainer.objectives import backward, compression, infonce_terms, masked, spread, teacher

# Control -> the module that sums its Gram matrices over ranks.
GRAM_MATRICES: dict[str, Any] = {
    "Gram matrices of one rank": teacher,
    "texts spread on one rank": spread,
    "components of one rank": compression,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("steps", "starts", "runs"))
    parser.add_argument("cases", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--local_rank")
    args = parser.parse_args()
    cases = json.loads(args.cases.read_text())
    world = start()
    without_fp16_units()
    # Stage 3 collects garbage at each of its starts; what is imported is none, and need not be looked through.
    gc.freeze()
    for case in cases:
        if args.kind != "runs":
            with _broken(case.get("control", "")):
                if args.kind == "steps":
                    results = take_steps(case["values"], world, steps=case["steps"])
                else:
                    results = gather_objects(bytes_at_start(case["values"], world))
            if world.is_main:
                torch.save(results, args.output / f"{case['name']}.pt")
        else:
            with unittest.mock.patch.object(dist, "destroy_process_group"):
                run.main(kind_named(case["task"]).command, "", case["arguments"])
    dist.barrier()
    dist.destroy_process_group()


def take_steps(values: dict[str, Any], world: World, *, steps: int) -> list[dict[str, Any]]:
    """The trainer's own parts, put together as trainer/run.py does, with every parameter read after every step."""
    recipe = recipe_of(values)
    sources = build.open_shards(recipe)
    parts, trained = started(recipe, sources, world)
    trained.train()
    stream = build.open_stream(recipe, sources, rank=world.rank, world_size=world.size)
    objective = build.build_objective(recipe, parts)
    results = []
    with counted_chunks() as counts, _counted_bytes() as sent:
        for step in range(steps):
            seed_step(recipe.run.seed, step, world.rank)
            counts.clear()
            sent.clear()
            batch = next(stream)
            report = objective.forward_backward(trained, batch, step)
            norm = trained.step(recipe.optim.lr)
            losses = {name: float(sum_over_ranks([float(v)], world.device)[0]) for name, v in report.losses.items()}
            results.append(
                {
                    "loss": losses["loss"],
                    "losses": losses,
                    "norm": norm,
                    "passages": gather_counts(len(getattr(batch, "passages", ())), world.device),
                    "sent": [gather_counts(sent[way], world.device) for way in ("gather", "scatter")],
                    "micro_batches": gather_counts(sum(counts), world.device),
                    "parameters": {n: trained.full_parameter(p).clone() for n, p in parts.module.named_parameters()},
                }
            )
    trained.deepspeed.destroy()
    return results


def started(recipe: Recipe, sources: Sequence[ShardFolder], world: World) -> tuple[build.ModelParts, engine.Engine]:
    """The model and its engine, as trainer/run.py makes them."""
    ds_config = engine_settings.read_ds_config(recipe.engine.ds_config)
    weights = engine_settings.loads_weights(recipe, ds_config, world.rank)
    parts = build.build_model(recipe, sources, ds_config, weights=weights)
    return parts, engine.Engine(parts.module, recipe, world, ds_config)


def bytes_at_start(values: dict[str, Any], world: World) -> dict[str, int]:
    """Bytes of tensors that this rank held at once: until the weights were divided, and until the engine stood.

    With them: what the engine keeps beside the frozen weights; and the float32 bytes of frozen weights, of all, and of
    the largest.
    """
    recipe, divided = recipe_of(values), 0
    sources = build.open_shards(recipe)
    divide = engine.Engine._divide

    def dividing(self: engine.Engine, module: torch.nn.Module) -> dict[int, torch.Tensor]:
        nonlocal divided
        originals = divide(self, module)
        divided = live.peak
        return originals

    gc.collect()
    with LiveBytes() as live, unittest.mock.patch.object(engine.Engine, "_divide", dividing):
        parts, trained = started(recipe, sources, world)
    sizes = {p: 4 * (p.ds_numel if trained.stage == 3 else p.numel()) for p in parts.module.parameters()}
    counts = {
        "divided": divided,
        "peak": live.peak,
        "kept": sum(value.nbytes for value in trained._frozen.values()),
        "frozen": sum(size for p, size in sizes.items() if not p.requires_grad),
        "all": sum(sizes.values()),
        "largest": max(sizes.values()),
    }
    trained.deepspeed.destroy()
    return counts


class LiveBytes(TorchDispatchMode):
    """`peak`: the most bytes that the tensors made while it lasts have held at once, those of the meta device aside."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                self._see(tensor.untyped_storage())
        return out

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()
        if key in self._seen:
            return

        def gone(_: Any) -> None:
            del self._seen[key]
            self.now -= size

        self._seen[key] = weakref.ref(storage, gone)
        self.now += size
        self.peak = max(self.peak, self.now)


@contextlib.contextmanager
def counted_chunks() -> Iterator[list[int]]:
    counts: list[int] = []
    cut = backward.micro_batches

    def counted(lengths: torch.Tensor, **options: Any) -> list[torch.Tensor]:
        chunks = cut(lengths, **options)
        counts.append(len(chunks))
        return chunks

    patch = unittest.mock.patch.object
    with patch(backward, "micro_batches", counted), patch(masked, "micro_batches", counted):
        yield counts


@contextlib.contextmanager
def _counted_bytes() -> Iterator[Counter[str]]:
    """Bytes of embeddings and of their gradients that this rank gives to each other rank's collective."""
    sent: Counter[str] = Counter()
    active: list[str] = []

    def watched(function: Any, way: str) -> Any:
        def inside(*args: Any) -> Any:
            active.append(way)
            try:
                return function(*args)
            finally:
                active.pop()

        return inside

    def counting(function: Any) -> Any:
        def counted(*args: Any, **options: Any) -> Any:
            if active:
                given = args[1]
                tensor = given if isinstance(given, torch.Tensor) else given[0]
                if tensor.is_floating_point():
                    sent[active[-1]] += tensor.nbytes
            return function(*args, **options)

        return counted

    patch = unittest.mock.patch.object
    with (
        patch(infonce_terms, "gather_rows", watched(infonce_terms.gather_rows, "gather")),
        patch(infonce_terms, "scatter_gradients", watched(infonce_terms.scatter_gradients, "scatter")),
        patch(dist, "all_gather", counting(dist.all_gather)),
        patch(dist, "reduce_scatter", counting(dist.reduce_scatter)),
    ):
        yield sent


@contextlib.contextmanager
def _broken(control: str) -> Iterator[None]:
    patch = unittest.mock.patch.object
    if not control:
        yield
    elif control == "passage gradients stay":  # what a gather without gradient gives

        def own_rows(gradients: torch.Tensor, counts: list[int]) -> torch.Tensor:
            return gradients.split(list(counts))[dist.get_rank()].clone()

        with patch(infonce_terms, "scatter_gradients", own_rows), patch(teacher, "scatter_gradients", own_rows):
            yield
    elif control == "queries' gradients stay":  # what gathering queries as columns without gradient gives
        send_back, calls = infonce_terms.Everyone.send_back, itertools.count()

        def of_passages(self: infonce_terms.Everyone) -> None:
            if next(calls) % 2 == 0:  # the passages' gradients are sent before the queries'
                send_back(self)

        with patch(infonce_terms.Everyone, "send_back", of_passages):
            yield
    elif control == "ring without a way home":  # what a round that ends one rank too early gives
        finish = ring.Ring._finish

        def forgetful(self: ring.Ring, moves: Sequence[Any], work: Sequence[Any]) -> None:
            finish(self, [], work)
            for buffers, _, coming in moves:
                if coming.owner == dist.get_rank():
                    buffers.message(coming).zero_()
            finish(self, moves, [])

        with patch(ring.Ring, "_finish", forgetful):
            yield
    elif control == "full size's passages stay":  # what a detached index gives

        def nothing(gradient: torch.Tensor, unit: torch.Tensor, lengths: torch.Tensor) -> None:
            gradient.zero_()

        with patch(infonce_terms, "unnormalized_gradient_", nothing):
            yield
    elif control in GRAM_MATRICES:  # what comparing a rank's own texts gives

        def alone(values: Any, device: torch.device) -> torch.Tensor:
            return torch.as_tensor(values, dtype=torch.float64)

        with patch(GRAM_MATRICES[control], "sum_over_ranks", alone):
            yield
    elif control == "false negatives of one rank":  # what masking without a gather of the hashes gives

        def own_hashes(rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
            if rows.dtype != torch.int64:
                return gather_rows(rows, counts)
            spread = rows.new_full((sum(counts), *rows.shape[1:]), -1)
            begin = sum(counts[: dist.get_rank()])
            spread[begin : begin + len(rows)] = rows
            return spread

        with patch(infonce_terms, "gather_rows", own_hashes):
            yield
    elif control == "every rank loads":  # what stage 3 needed before

        def always(*_: Any) -> bool:
            return True

        with patch(engine_settings, "loads_weights", always):
            yield
    elif control == "no world size factor":  # the mean over ranks that data parallelism takes on its own

        def averaged(self: engine.Engine, loss: torch.Tensor) -> None:
            self.deepspeed.backward(loss, scale_wrt_gas=False)

        with patch(engine.Engine, "backward", averaged):
            yield
    elif control == "rank means":  # each rank divides by its own count of masked tokens

        def local(values: Any, device: torch.device) -> torch.Tensor:
            return torch.as_tensor(values, dtype=torch.float64) * dist.get_world_size()

        with patch(masked, "sum_over_ranks", local):
            yield
    elif control == "new dropout each pass":
        draws = itertools.count()

        def fresh(*keys: int) -> int:
            return next(draws)

        with patch(backward, "derive_seed", fresh):
            yield
    else:
        raise ValueError(f"no control {control!r}")


if __name__ == "__main__":
    run_command(main)

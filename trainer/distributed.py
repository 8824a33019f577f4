"""Ranks: starting them, small collectives, and the seeding of a step.

trainer/losses/ does not use this module, so every gather is visible in the objective that calls it.
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from data.ground.errors import CommandEnd, UserError
from data.ground.ports import free_port
from data.keyed_random import derive_seed

log = logging.getLogger(__name__)
T = TypeVar("T")


class Refused(CommandEnd):
    """A user's mistake that all ranks find together: each rank raises it, and the first one reports it."""

    exit_code = UserError.exit_code


def named_ranks(ranks: Sequence[int], *, most: int | None = None) -> str:
    """ "rank 3", or "ranks 0, 1"; of more ranks than `most`, the first ones."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = ", …" if most is not None and len(ranks) > most else ""
    return f"ranks {', '.join(map(str, ranks[:most]))}{more}"


@dataclass(frozen=True)
class World:
    """This process' place among all ranks."""

    rank: int
    local_rank: int
    size: int
    device: torch.device

    @classmethod
    def alone(cls, device: torch.device | str = "cpu") -> World:
        """A World of one rank."""
        return cls(0, 0, 1, torch.device(device))

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def start() -> World:
    """Join the process group that the launcher describes in the environment; without a launcher, a group of one."""
    import deepspeed
    import deepspeed.ops

    cuda = torch.cuda.is_available()
    if not cuda:
        # Switch off an inference-only op that DeepSpeed would compile at start, which takes a minute, or crashes
        # without a compiler.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
        os.environ.setdefault("MASTER_PORT", str(free_port()))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if cuda:
        _take_gpu(local_rank)
    elif "OMP_NUM_THREADS" not in os.environ:
        # Launchers start several ranks a machine, and each would take all cores.
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1)
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks_here))
    if not dist.is_initialized():
        try:
            deepspeed.init_distributed("nccl" if cuda else "gloo", verbose=False)
        except dist.DistNetworkError as error:
            if "EADDRINUSE" not in str(error):
                raise
            raise UserError(
                f"port {os.environ['MASTER_PORT']} of this machine, at which ranks would meet, is in use by another "
                "program; give the launcher another by --master_port (or MASTER_PORT)"
            ) from error
    if not cuda:
        waiting = "spin" if os.environ.get("OMP_WAIT_POLICY", "").upper() == "ACTIVE" else "soon sleep"
        log.info("%d threads a rank, which %s while they wait for each other", torch.get_num_threads(), waiting)
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    return World(dist.get_rank(), local_rank, dist.get_world_size(), device)


def _take_gpu(local_rank: int) -> None:
    """Make the GPU of that number this process' own. Raises UserError where there is none."""
    if local_rank >= (gpus := torch.cuda.device_count()):
        raise UserError(
            f"LOCAL_RANK is {local_rank}, counted from 0, and the number of GPUs that this rank sees is {gpus}; start "
            "at most one rank for each GPU, and let all ranks of a machine see all of them (CUDA_VISIBLE_DEVICES)"
        )
    torch.cuda.set_device(local_rank)


def join(device: torch.device) -> World:
    """This process' World among the ranks of its launcher, or a World of one rank on `device`."""
    return start() if int(os.environ.get("WORLD_SIZE", "1")) > 1 else World.alone(device)


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seed the global generators, which dropout draws from, by (seed, step, rank): a resume repeats the draws."""
    value = derive_seed(seed, step, rank)
    seed_torch(value)
    random.seed(value)
    np.random.seed(value % 2**32)


def seed_torch(seed: int) -> None:
    """Seed torch's generators of the CPU and of this process' GPU, which dropout draws from.

    `torch.manual_seed` does the same for every kind of device, and on a machine without them it takes a millisecond a
    call: as long as a layer of a tiny model.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed(seed)


def sum_over_ranks(values: Sequence[float] | Tensor, device: torch.device) -> Tensor:
    """Element-wise sum over ranks, float64 so that counts stay exact."""
    # Contiguous: all_reduce adds what lies at the same place in memory, whatever the strides of each rank.
    total = torch.as_tensor(values, dtype=torch.float64, device=device).clone(memory_format=torch.contiguous_format)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(total)
    return total


def max_over_ranks(value: int, device: torch.device) -> int:
    largest = torch.tensor(value, dtype=torch.int64, device=device)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return int(largest)


def gather_objects(value: T) -> list[T]:
    """Every rank's value, by rank. Values should be small. No rank returns before all ranks have called it."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values: list[T] = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def gather_counts(count: int, device: torch.device) -> list[int]:
    """Every rank's count, by rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [count]
    counts = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, torch.tensor([count], dtype=torch.int64, device=device))
    return [int(each) for each in counts]


def gather_rows(rows: Tensor, counts: Sequence[int]) -> Tensor:
    """Every rank's rows [n_r, ...], rank by rank. No gradient flows; `scatter_gradients` sends gradients back."""
    if len(counts) == 1:
        return rows
    largest = max(counts)
    padded = rows.new_zeros((largest, *rows.shape[1:]))
    padded[: rows.shape[0]] = rows
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded)
    return torch.cat([part[:count] for part, count in zip(parts, counts)])


def scatter_gradients(gradients: Tensor, counts: Sequence[int]) -> Tensor:
    """The sum over ranks of the gradients of gathered rows; each rank keeps those of its own rows.

    gradients: [sum of counts, d]. Returns [counts[rank], d].
    """
    if len(counts) == 1:
        return gradients
    rank, largest = dist.get_rank(), max(counts)
    blocks = gradients.new_zeros((len(counts), largest, *gradients.shape[1:]))
    for block, part in zip(blocks, gradients.split(list(counts))):
        block[: part.shape[0]] = part
    mine = torch.empty_like(blocks[0])
    dist.reduce_scatter(mine, [block.contiguous() for block in blocks])
    return mine[: counts[rank]]

"""The contrastive losses of random vectors on several ranks in float64, by the gather and in the ring.

    python -m tests.trainer.objectives.ring_worker OUTPUT

Started on ranks (tests/ranks.py). Rank 0 writes OUTPUT, a JSON object: for each case the largest relative difference of
losses and gradients between the two, how far each control is off, and the bytes that were sent and held.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from data.collate import PairBatch, Texts
from data.ground.command import run_command
from models.sizes import Size
from tests.trainer.objectives.given import Given
from tests.trainer.worker import LiveBytes
from trainer.distributed import World, gather_objects, start
from trainer.losses import infonce
from trainer.losses.tile_settings import GUIDE, PARTS, MarginFilter, ScoreTeacher
from trainer.objectives import infonce_terms
from trainer.objectives.contrastive_loss import ContrastiveLoss
from trainer.objectives.contrastive_terms import Term
from trainer.objectives.infonce_terms import Asymmetric, InfoNCE, Negatives
from trainer.objectives.size_schedules import SizePlan
from trainer.objectives.spread import SpreadOut
from trainer.ring import Ring, Visit

WIDTHS = (4, 6, 9)
GUIDE_WIDTH, PER_QUERY = 5, 4
TEMPERATURE, MIB = 0.1, 400 * 8 / 2**20  # so little memory that there are several tiles and blocks
EVERY_PART = tuple(PARTS)


def infonce_term(**changes: Any) -> InfoNCE:
    return InfoNCE(TEMPERATURE, **{"negatives": Negatives(), "score_memory_mib": MIB, **changes})


def terms_of(*, in_a_ring: bool) -> dict[str, tuple[Term, ...]]:
    make = partial(infonce_term, in_a_ring=in_a_ring)
    filters = {"full": Negatives(filter=MarginFilter(0.1)), "guide": Negatives(filter=MarginFilter(0.1, GUIDE))}
    kl = {"kl_weight": 0.5}
    everything = Negatives(filter=MarginFilter(0.1, GUIDE), parts=EVERY_PART)
    return {
        "infonce": (make(negatives=Negatives(masks_known=False)),),
        "mask": (make(),),
        "filter": (make(negatives=filters["full"]),),
        "filter by the guide": (make(negatives=filters["guide"]),),
        "kl": (make(**kl),),
        "kl with a teacher that learns": (make(**kl, teacher=ScoreTeacher(detached=False)),),
        "kl to the guide": (make(**kl, teacher=ScoreTeacher(GUIDE), negatives=filters["full"]),),
        "spread": (make(**kl), SpreadOut(2.0, unit=True)),
        "blocks": (make(**kl, negatives=Negatives(parts=EVERY_PART)),),
        "queries alone": (make(negatives=Negatives(parts=("query_passage", "query_query"))),),
        "hardness": (make(hardness=3.0),),
        "weights": (make(**kl),),
        "positives": (make(**kl, negatives=Negatives(parts=EVERY_PART)),),
        "asymmetric": (make(), Asymmetric(2.0, make(), cosine=True)),
        "all at once": (make(**kl, teacher=ScoreTeacher(GUIDE), negatives=everything, hardness=3.0),),
    }


def batch_of(rank: int, queries: int, *, weighted: bool = False, positives: int = 1) -> PairBatch:
    """A rank's queries with four passages each, as hashes of which some are equal; the first ones are positives."""
    generator = torch.Generator().manual_seed(rank)
    count, nothing = PER_QUERY * queries, torch.zeros(0, dtype=torch.int32)
    owners = torch.arange(queries).repeat_interleave(PER_QUERY)
    targets = (torch.arange(queries)[:, None] * PER_QUERY + torch.arange(positives)).flatten()
    hashes = torch.randint(40, (queries + count,), generator=generator)
    return PairBatch(
        queries=Texts(nothing, torch.zeros(queries + 1, dtype=torch.int64)),
        passages=Texts(nothing, torch.zeros(count + 1, dtype=torch.int64)),
        targets=targets,
        passage_query=owners,
        scores=None,
        query_hashes=hashes[:queries],
        passage_hashes=hashes[queries:],
        known_hashes=hashes[queries:][targets],
        known_offsets=torch.arange(queries + 1) * positives,
        sample_ids=torch.arange(queries),
        weights=torch.rand(queries, generator=generator) if weighted else None,
        target_query=owners[targets] if positives > 1 else None,
    )


def computed(
    terms: tuple[Term, ...],
    batch: PairBatch,
    world: World,
    widths: Sequence[int],
    dtype: torch.dtype = torch.float64,
    *,
    guided: bool = True,
) -> list[Tensor]:
    """This rank's part of the loss, by name, and the gradients of its vectors, which are random."""
    generator = torch.Generator().manual_seed(100 + world.rank)
    count, sizes = len(batch.queries) + len(batch.passages), len(widths)
    vectors = [torch.randn(count, width, generator=generator, dtype=dtype) for width in widths]
    both = F.normalize(torch.randn(count, GUIDE_WIDTH, generator=generator, dtype=dtype), dim=1)
    plan = SizePlan(
        tuple(map(str, widths)),
        tuple(Size(1, width) for width in widths),
        (0.5,) * sizes,
        (0.3,) * (sizes - 1) + (0.2,),
    )
    engine: Any = SimpleNamespace(world=world, device=world.device, heartbeat=lambda phase: None)
    loss = ContrastiveLoss(True, terms, guide=Given(both, temperature=0.2) if guided else None)
    losses, gradients = loss.loss_and_gradients(vectors, batch, plan, engine)
    return [torch.stack(list(losses.values())), *gradients]


def apart(got: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """The largest difference of an entry on any rank, over the largest entry of its tensor."""
    largest = [
        float((g - w).abs().max() / w.abs().max()) if w.numel() else 0.0 for g, w in zip(got, wanted, strict=True)
    ]
    return max(gather_objects(max(largest)))


@contextlib.contextmanager
def skipping(name: str) -> Iterator[None]:
    """A round that leaves out one chunk of one rank."""
    usual = getattr(Ring, name)

    def lossy(self: Ring) -> Iterator[Visit]:
        return (visit for visit in usual(self) if visit.stop != (0, 1))

    with patch.object(Ring, name, lossy):
        yield


@contextlib.contextmanager
def counted_bytes() -> Iterator[dict[str, int]]:
    """Count the bytes of vectors and gradients that this rank sends to the other ranks."""
    sent = {"bytes": 0}
    others = dist.get_world_size() - 1

    def counting(name: str) -> Any:
        usual = getattr(dist, name)

        def counted(first: Any, *rest: Any, **options: Any) -> Any:
            if name == "batch_isend_irecv":
                sent["bytes"] += sum(each.tensor.nbytes for each in first if each.op is dist.isend)
            else:  # what this rank has for the others, or of theirs
                own = rest[0] if name == "all_gather" else first
                sent["bytes"] += own.nbytes * others if own.is_floating_point() else 0
            return usual(first, *rest, **options)

        return patch.object(dist, name, counted)

    with counting("batch_isend_irecv"), counting("all_gather"), counting("reduce_scatter"):
        yield sent


def costs(world: World, *, queries: int, widths: Sequence[int]) -> dict[str, list[float]]:
    """Bytes that each rank held at most, beyond what it was given and handed out, and those that it sent."""
    found: dict[str, list[float]] = {}
    batch = batch_of(world.rank, queries)
    given = 8 * (1 + PER_QUERY) * queries * sum(widths)
    for way in ("gather", "ring"):
        term = infonce_term(negatives=Negatives(masks_known=False), in_a_ring=way == "ring")
        with LiveBytes() as live, counted_bytes() as sent:
            computed((term,), batch, world, widths, guided=False)
        found[f"{way} held"] = gather_objects(float(live.peak - 2 * given))
        found[f"{way} sent"] = gather_objects(float(sent["bytes"]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    args = parser.parse_args()
    world = start()
    found: dict[str, Any] = {}
    in_float64 = partial(infonce.add_contrastive_gradients, dtype=torch.float64)
    with patch.object(infonce_terms, "add_contrastive_gradients", in_float64):
        ways = zip(terms_of(in_a_ring=False).items(), terms_of(in_a_ring=True).values())
        for (name, gathered), ringed in ways:
            queries = (5, 3, 0, 6)[world.rank]
            batch = batch_of(world.rank, queries, weighted=name == "weights", positives=2 if name == "positives" else 1)
            wanted = computed(gathered, batch, world, WIDTHS)
            found[name] = apart(computed(ringed, batch, world, WIDTHS), wanted)
            if name == "kl":
                for lossy in ("first_round", "second_round"):
                    with skipping(lossy):
                        found[f"without a chunk in the {lossy}"] = apart(computed(ringed, batch, world, WIDTHS), wanted)
        found |= costs(world, queries=64, widths=(64, 128))
    if world.is_main:
        args.output.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    run_command(main)

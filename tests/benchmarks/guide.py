"""Benchmark: what a guide adds to a contrastive step, in time and memory, one thread, both sides in turn.

    python -m tests.benchmarks.guide [--quick] [--queries N] [--json FILE]

The student is a BERT of 6 layers × 384, six sizes, gradient caching; or a table of 1,024 columns, six widths. Its guide
is a BERT of 6 layers × 384 at its full size. Real NLI triplets. Figures, each guided ÷ plain:
  filter_time_ratio          the guide says what is no negative; the plain step has KL to the own full size, as this one
  teacher_time_ratio         the guide teaches, in place of the full size
  static_filter_time_ratio   a static student
  stored_filter_time_ratio, stored_teacher_time_ratio, stored_static_filter_time_ratio
                             the same, where the guide's vectors are looked up in a store
  lookup_milliseconds        of the vectors of a batch of the encoder's, in a store of half a million other texts
  memory_ratio               peaks of processes that took a step of the encoder; what the guide's weights weigh is in it
  step_memory_ratio          of what the step adds to a process that holds the models
--quick: batches of 24, of the table 96, each timed twice, and 10,000 other texts in the store; two to three minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data.collate import PairBatch
from models.encoder import Encoder
from models.sizes import Size
from models.static_embedding import StaticConfig, StaticModel
from tests.benchmarks import srl_step
from tests.benchmarks.support import SHARED, Figures, peak_mib, take_turns
from trainer.config.load import build_recipe
from trainer.costs.flops import Shape
from trainer.distributed import start
from trainer.ds_config import read_ds_config
from trainer.engine import Engine
from trainer.objectives.contrastive import ContrastiveObjective, TableObjective, contrastive
from trainer.objectives.contrastive_loss import contrastive_loss
from trainer.objectives.guide import Guide, PairGuide, StoredGuide
from trainer.objectives.materials import Materials
from trainer.objectives.size_schedules import build_schedule, taught_from_outside
from trainer.objectives.vector_store import StoreRecord, VectorStore, query_keys, write_block, write_store_record
from trainer.teacher_vectors import BLOCK_TEXTS

DIMS = (32, 64, 128, 256, 512, 1024)
QUICK_QUERIES = 24
FILTERS: dict[str, Any] = {"filter_false_negatives": True, "filter_by": "guide", "false_negative_margin": 0.0}


def build_guide() -> Guide:
    encoder = srl_step.build_encoder().requires_grad_(False).eval()
    length, budget = srl_step.MAX_LENGTH, srl_step.MICRO_BATCH * srl_step.MAX_LENGTH
    return Guide(encoder, Size(6, 384), "cosine", 0.05, length, length, budget, 1)


def store_of(guide: Guide, batch: PairBatch, folder: Path, *, others: int = 0) -> StoredGuide:
    """The guide's vectors of a batch, and random ones of so many other texts, as trainer.teacher_vectors lays them."""
    queries, passages = guide.pair_vectors(batch, device=torch.device("cpu"), heartbeat=lambda phase: None)
    keys = torch.cat([query_keys(batch.query_hashes), batch.passage_hashes]).numpy()
    blocks = [(keys, torch.cat([queries, passages]).half().numpy())]
    generator, width = np.random.default_rng(0), queries.shape[1]
    for before in range(0, others, BLOCK_TEXTS):
        count = min(BLOCK_TEXTS, others - before)
        vectors = generator.standard_normal((count, width), np.float32).astype(np.float16)
        blocks.append((generator.integers(-(2**63), 2**63 - 1, count), vectors))
    folder.mkdir()
    for number, (found, vectors) in enumerate(blocks):
        write_block(folder, number, found[:, None], vectors)
    record = StoreRecord(
        teacher="", tokenizer="", texts="", rooms=(1,), query_rooms=(1,), width=width, blocks=len(blocks)
    )
    write_store_record(folder, record)
    return StoredGuide(VectorStore.open(folder, tokenizer=""), guide.temperature)


def guided(of: srl_step.Ours | Static, guide: PairGuide, **changed: Any) -> ContrastiveObjective | TableObjective:
    """The objective with a guide, after changes of its recipe's [objective]."""
    recipe = replace(of.recipe, objective=replace(of.recipe.objective, **changed))
    return replace(of.objective, loss=contrastive_loss(recipe, guide=guide))


class Static:
    """A step of a table, as trainer.build puts it together."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.encoder = Encoder(StaticModel(StaticConfig(vocab_size=30522, special_ids=[0, 101, 102, 103])), "mean")
        values: dict[str, Any] = {
            "model": {"ladder": [[1, dim] for dim in DIMS], "pooling": "mean"},
            "objective": {"name": "contrastive", "kl": "none"},
        }
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "zero0.json"
            path.write_text(json.dumps({"zero_optimization": {"stage": 0}}))
            self.recipe = chosen = build_recipe({**values, "engine": {"ds_config": str(path)}})
            self.engine = Engine(self.encoder, chosen, start(), read_ds_config(path))
        schedule = build_schedule(chosen.step_sizes, reduction="mean", seed=0)
        shape = Shape.of(self.encoder.config)
        self.objective = contrastive(chosen, Materials(schedule, shape, packed=False, static=True))


def take_step(of: srl_step.Ours | Static, objective: ContrastiveObjective | TableObjective, batch: PairBatch) -> None:
    objective.forward_backward(of.engine, batch, 0)
    of.engine.step(1e-5)


def measure_memory(with_guide: bool, count: int) -> tuple[float, float]:
    """In this process: its peak in MiB after a step of so many triplets, and before it."""
    ours = srl_step.Ours(srl_step.MEMORY_MICRO_BATCH)
    objective = ours.objective
    if with_guide:  # else its weights would be in the plain process, too
        guide = replace(build_guide(), token_budget=srl_step.MEMORY_MICRO_BATCH * srl_step.MAX_LENGTH)
        objective = guided(ours, guide, **FILTERS)
    take_step(ours, objective, srl_step.batch_of(srl_step.nli_rows(8)))
    batch = srl_step.batch_of(srl_step.nli_rows(count))
    before = peak_mib()
    take_step(ours, objective, batch)
    return peak_mib(), before


def memory_of(with_guide: bool, count: int) -> tuple[float, float]:
    """MiB of a process of its own: its peak, and what of that the step added."""
    alone = {key: value for key, value in os.environ.items() if key not in ("RANK", "MASTER_PORT")}
    kind = "guided" if with_guide else "plain"
    out = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.guide", "--memory-of", kind, str(count)],
        capture_output=True,
        text=True,
        check=True,
        env={**alone, "MALLOC_MMAP_THRESHOLD_": str(2**20)},  # as in srl_step
    )
    peak, before = map(float, out.stdout.split()[-2:])
    return peak, peak - before


def time_steps(
    figures: Figures,
    of: srl_step.Ours | Static,
    objectives: Mapping[str, ContrastiveObjective | TableObjective],
    batch: PairBatch,
    name: str,
    repeats: int,
) -> None:
    """Of a plain step, one with a live guide and one with a stored guide, in turn."""
    for objective in objectives.values():
        take_step(of, objective, srl_step.batch_of(srl_step.nli_rows(4)) if objective is of.objective else batch)
    seconds = take_turns(
        {kind: partial(take_step, of, each, batch) for kind, each in objectives.items()}, repeats=repeats
    )
    figures.show(
        **{f"{name}_time_ratio": seconds["live"] / seconds["plain"]},
        **{f"stored_{name}_time_ratio": seconds["stored"] / seconds["plain"]},
        **{f"{name}_seconds_{kind}": value for kind, value in seconds.items()},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--queries", type=int, default=64, help="triplets of a batch (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--memory-of", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if not SHARED.is_dir():
        raise SystemExit("this benchmark reads ../shared/data, which is absent")
    if args.memory_of:
        print(*measure_memory(args.memory_of[0] == "guided", int(args.memory_of[1])))
        return
    figures, repeats = Figures(), 2 if args.quick else 3
    count = QUICK_QUERIES if args.quick else args.queries
    (plain, plain_step), (helped, helped_step) = memory_of(False, count), memory_of(True, count)
    figures.show(memory_ratio=helped / plain, plain_mib=plain, guided_mib=helped)
    figures.show(step_memory_ratio=helped_step / plain_step, plain_step_mib=plain_step, guided_step_mib=helped_step)

    batch, guide, ours = srl_step.batch_of(srl_step.nli_rows(count)), build_guide(), srl_step.Ours()
    assert ours.recipe.objective.kl_teacher == "full" and ours.recipe.objective.kl == "scores"
    table, many = Static(), srl_step.batch_of(srl_step.nli_rows(4 * count))
    with tempfile.TemporaryDirectory() as scratch:
        stored = store_of(guide, batch, Path(scratch) / "encoder", others=10_000 if args.quick else 500_000)
        sources: dict[str, PairGuide] = {"live": guide, "stored": stored}
        filters = {kind: guided(ours, source, **FILTERS) for kind, source in sources.items()}
        schedule = taught_from_outside(ours.objective.schedule)
        teaches = {
            kind: replace(guided(ours, source, kl_teacher="guide"), schedule=schedule)
            for kind, source in sources.items()
        }
        time_steps(figures, ours, {"plain": ours.objective, **filters}, batch, "filter", repeats)
        time_steps(figures, ours, {"plain": ours.objective, **teaches}, batch, "teacher", repeats)
        sources["stored"] = store_of(guide, many, Path(scratch) / "static")
        filters = {kind: guided(table, source, **FILTERS) for kind, source in sources.items()}
        time_steps(figures, table, {"plain": table.objective, **filters}, many, "static_filter", repeats)
        seconds = take_turns(
            {"": lambda: stored.pair_vectors(batch, device=torch.device("cpu"), heartbeat=lambda phase: None)},
            repeats=3,
        )
        figures.show(lookup_milliseconds=1e3 * seconds[""])
    figures.write(args.json)


if __name__ == "__main__":
    main()

"""Benchmark: one contrastive step of a small BERT, ours against sentence-transformers, alternating, one thread.

    python -m tests.benchmarks.srl_step [--quick] [--batch N] [--json FILE]

The same encoder (6 layers × 384), the same tokens, the same batch, cosine at τ = 0.05, mean pooling, AdamW. Theirs:
`CachedMultipleNegativesRankingLoss` inside `MatryoshkaLoss`, six widths of the last layer (it cannot do layers), texts
padded by column as its collator does, in mini-batches by its own token budget, the same as ours (its default of 32
texts is slower: --mini-batch-size measures that instead). Ours: six (layers, width) sizes with KL to the full one,
through the objective and the engine that training uses (ZeRO stage 0).
Batches of 256 are real: NLI triplets; SciFact claims with their abstracts; and the pairs of both, half and half, mixed.
Figures:
  time_ratio                theirs ÷ ours, CPU seconds a step, the three batches together
  nli_time_ratio, scifact_time_ratio, mixed_time_ratio   the batches one by one
  peak_memory_growth        our process' peak at 4,096 triplets ÷ at 512 (--quick: at 512 ÷ at 128), in micro-batches
                            that both batches fill
  step_memory_growth        the same of what a step takes above the idle model: vectors and their gradients grow
  padding_share             of the tokens ours computes
  unpadded_time_ratio       theirs ÷ ours on 64 of SciFact's pairs, all of ours' graphs kept
  kept_<n>_time_ratio       ours with no graph kept ÷ with n % of their bytes kept, on the same pairs
  kept_<n>_memory_mib       what the step adds to the idle model
  kept_difference           the largest difference of a gradient from that with no graph kept, ÷ the largest gradient
--quick: batches of 32 and no kept graphs (with --kept-graphs, those of 16 pairs); two minutes. Fewer texts leave more
padding on both sides.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.collate import PairBatch, PairCollator, concatenate
from data.shards.format import Tuple
from data.stream import Sample
from data.tokens import vocabulary_of
from models.encoder import Encoder, base_of, build_masked_lm
from tests.benchmarks.support import SHARED, Figures, alternate, peak_mib, take_turns
from tests.padding import pad_texts
from trainer.config.load import build_recipe
from trainer.config.schema import Recipe
from trainer.costs.flops import Shape
from trainer.distributed import World, start
from trainer.ds_config import read_ds_config
from trainer.engine import Engine
from trainer.objectives.backward import counting_saved, embed_texts, micro_batches
from trainer.objectives.contrastive import contrastive
from trainer.objectives.materials import Materials
from trainer.objectives.size_schedules import build_schedule
from trainer.optim import adamw
from trainer.replay import PlainEngine

LADDER = [[1, 32], [2, 64], [3, 128], [4, 192], [5, 256], [6, 384]]
MODEL = dict(hidden_size=384, num_hidden_layers=6, num_attention_heads=6, intermediate_size=1536)
NO_DROPOUT = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
MAX_LENGTH = 256
MICRO_BATCH = 32
TOKENS = MICRO_BATCH * MAX_LENGTH  # of a micro-batch
UNPADDED, QUICK_UNPADDED = 64, 16  # SciFact's pairs whose graphs are all kept: those of 512 take 30 GiB
QUICK_BATCH = 32
KEPT = (0, 25, 50, 100)  # per cent of the graphs
KEPT_MICRO_BATCH = 8  # where graphs are kept: eight equal micro-batches, and a few small ones
MEMORY_MICRO_BATCH = 4  # 1,024 tokens: cut by length, 512 triplets fill no micro-batch of 8,192


def recipe(micro_batch: int = MICRO_BATCH) -> Recipe:
    return build_recipe(
        {
            "model": {"ladder": LADDER, "pooling": "mean"},
            "data": {"query_max_length": MAX_LENGTH, "passage_max_length": MAX_LENGTH, "num_negatives": 1},
            "objective": {"name": "contrastive", "similarity": "cosine", "temperature": 0.05},
            "train": {"micro_batch_size": micro_batch},
            "optim": {"max_grad_norm": 0.0},
        }
    )


def build_encoder() -> Encoder:
    torch.manual_seed(0)
    masked_lm = build_masked_lm({"model_type": "bert", **MODEL, **NO_DROPOUT}, vocab_size=30522, pad_token_id=0)
    encoder = Encoder(base_of(masked_lm), "mean").train()
    encoder.backbone.set_attn_implementation("sdpa")
    return encoder


class Ours:
    def __init__(self, micro_batch: int = MICRO_BATCH) -> None:
        self.recipe = chosen = recipe(micro_batch)
        self.encoder = build_encoder()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "zero0.json"
            path.write_text(json.dumps({"zero_optimization": {"stage": 0}}))
            values = {"engine": {"ds_config": str(path)}, "optim": {"max_grad_norm": 0.0}}
            self.engine = Engine(self.encoder, build_recipe(values), start(), read_ds_config(path))
        self.engine.train()
        schedule = build_schedule(chosen.step_sizes, reduction="mean", seed=0)
        self.objective = contrastive(chosen, Materials(schedule, Shape.of(self.encoder.config), packed=False))

    def keep(self, room: float) -> None:
        """From now on keep graphs up to so many bytes."""
        self.objective = dataclasses.replace(self.objective, graph_bytes=room)

    def bytes_of_graphs(self, batch: PairBatch) -> list[int]:
        """What the graph of each of the batch's micro-batches takes."""
        texts = concatenate(batch.queries, batch.passages)
        used = []
        for rows in micro_batches(texts.lengths, token_budget=self.objective.token_budget):
            with counting_saved() as saved:
                embed_texts(self.engine, texts, rows, sizes=self.recipe.ladder)
            used.append(sum(saved.values()))
        return used

    def gradient(self, batch: PairBatch) -> Tensor:
        """Of fresh weights, without the engine, which keeps gradients in its own way."""
        encoder = build_encoder()
        self.objective.forward_backward(PlainEngine(encoder, World.alone(torch.device("cpu"))), batch, 0)
        return torch.cat([each.grad.flatten() for each in encoder.parameters() if each.grad is not None])

    def step(self, batch: PairBatch) -> Any:
        report = self.objective.forward_backward(self.engine, batch, 0)
        self.engine.step(1e-5)
        return report


class Theirs:
    """sentence-transformers' loss over an encoder of ours, wrapped as one of its modules."""

    def __init__(self, **options: Any) -> None:
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss, MatryoshkaLoss
        from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

        encoder = build_encoder()
        with tempfile.TemporaryDirectory() as folder:
            encoder.backbone.save_pretrained(folder)
            _tokenizer().save_pretrained(folder)
            transformer = Transformer(folder, model_kwargs={"add_pooling_layer": False})
        self.model = SentenceTransformer(modules=[transformer, Pooling(384, "mean")], device="cpu").train()
        inner = CachedMultipleNegativesRankingLoss(self.model, scale=20.0, **options)
        self.loss = MatryoshkaLoss(self.model, inner, [width for _, width in LADDER])
        self.optimizer = adamw(self.model, lr=1e-5, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)

    def step(self, columns: Sequence[dict[str, Tensor]]) -> None:
        # The loss may add entries to the features it is given.
        loss = self.loss([dict(column) for column in columns], torch.empty(0))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def columns_of(batch: PairBatch) -> list[dict[str, Tensor]]:
    """Anchors, positives and negatives, each padded to its longest text."""
    per_query = len(batch.passages) // len(batch.queries)
    columns = [(batch.queries, torch.arange(len(batch.queries)))]
    columns += [(batch.passages, batch.targets + offset) for offset in range(per_query)]
    return [dict(zip(("input_ids", "attention_mask"), pad_texts(texts, rows, pad_id=0))) for texts, rows in columns]


def _tokenizer() -> Any:
    from transformers import BertTokenizerFast

    return BertTokenizerFast(str(SHARED / "vocab" / "bert-base-uncased-vocab.txt"))


def batch_of(rows: Sequence[Sequence[str]]) -> PairBatch:
    """rows: (query, positive, negatives ...)."""
    tokenizer = _tokenizer()
    vocabulary = vocabulary_of(tokenizer)
    encode = tokenizer.backend_tokenizer.encode_batch

    def ids(texts: list[str]) -> list[Any]:
        return [torch.tensor(item.ids).numpy() for item in encode(texts, add_special_tokens=False)]

    columns = [ids(list(column)) for column in zip(*rows)]
    samples = [
        Sample(0, i, 0, i, Tuple(query=query, passages=list(passages), num_positives=1, score=None))
        for i, (query, *passages) in enumerate(zip(*columns))
    ]
    return PairCollator(
        vocabulary, query_max_length=MAX_LENGTH, passage_max_length=MAX_LENGTH, num_negatives=1, seed=0
    )(samples)


def nli_rows(count: int) -> list[list[str]]:
    rows: list[list[str]] = []
    for name in ("snli_devtest_triplets.tsv", "cad_snli_triplets.tsv"):
        with (SHARED / "nli" / name).open(encoding="utf-8") as file:
            rows += list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))[1:]
    assert len(rows) >= count
    return rows[:count]


def scifact_rows(count: int) -> list[list[str]]:
    folder = SHARED / "retrieval" / "scifact"

    def records(name: str) -> dict[str, dict[str, Any]]:
        lines = (folder / name).read_text(encoding="utf-8").splitlines()
        return {record["_id"]: record for record in map(json.loads, lines)}

    corpus, queries = records("corpus.jsonl"), records("queries.jsonl")
    pairs = [line.split("\t") for line in (folder / "qrels" / "train.tsv").read_text().splitlines()[1:]]
    rows = [[queries[q]["text"], corpus[d]["title"] + " " + corpus[d]["text"]] for q, d, grade in pairs if int(grade)]
    assert len(rows) >= count
    return rows[:count]


def mixed_rows(count: int) -> list[list[str]]:
    rows = [row[:2] for row in nli_rows(count // 2)] + scifact_rows(count // 2)
    random.Random(0).shuffle(rows)
    return rows


def peak_memory(count: int, *, kept: float | None = None) -> tuple[float, float]:
    """MiB of a process in which a step of so many triplets was taken: its peak, and what of that the step added.

    kept: of so many of SciFact's pairs, with graphs up to so many bytes kept.
    """
    alone = {key: value for key, value in os.environ.items() if key not in ("RANK", "MASTER_PORT")}
    more = [] if kept is None else ["--kept", str(kept)]
    out = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.srl_step", "--memory-of", str(count), *more],
        capture_output=True,
        text=True,
        check=True,
        # Else glibc keeps freed blocks of up to 32 MiB, and the peak tells of its habits instead of live memory.
        env={**alone, "MALLOC_MMAP_THRESHOLD_": str(2**20)},
    )
    peak, before = map(float, out.stdout.split()[-2:])
    return peak, peak - before


def measure_memory(count: int, *, kept: float | None) -> tuple[float, float]:
    """In this process: its peak in MiB after the step that `peak_memory` is of, and before it."""
    ours = Ours(MEMORY_MICRO_BATCH if kept is None else KEPT_MICRO_BATCH)
    ours.step(batch_of(nli_rows(8)))
    batch = batch_of(nli_rows(count) if kept is None else scifact_rows(count))
    if kept is not None:
        ours.keep(kept)
    before = peak_mib()
    ours.step(batch)
    return peak_mib(), before


def measure_kept_graphs(figures: Figures, count: int) -> None:
    """A step of texts without padding, by how many bytes of its graphs are kept."""
    ours, theirs = Ours(KEPT_MICRO_BATCH), Theirs(mini_batch_num_tokens=KEPT_MICRO_BATCH * MAX_LENGTH)
    batch = batch_of(scifact_rows(count))
    graphs = ours.bytes_of_graphs(batch)
    # A graph is begun where there is room for one as large as the largest, so all of them need a little more.
    rooms = {share: share / 100 * sum(graphs) + (max(graphs) if share == 100 else 0) for share in KEPT}

    def step(share: int) -> None:
        ours.keep(rooms[share])
        ours.step(batch)

    steps: dict[str, Callable[[], object]] = {str(share): partial(step, share) for share in KEPT}
    seconds = take_turns(steps | {"theirs": partial(theirs.step, columns_of(batch))}, repeats=2)
    figures.show(unpadded_time_ratio=seconds["theirs"] / seconds[str(KEPT[-1])])
    gradients = {}
    for share in KEPT:
        ours.keep(rooms[share])
        gradients[share] = ours.gradient(batch)
        memory = peak_memory(count, kept=rooms[share])[1]
        ratio = {f"kept_{share}_time_ratio": seconds[str(KEPT[0])] / seconds[str(share)]}
        figures.show(**ratio, **{f"kept_{share}_memory_mib": memory})
    first = gradients.pop(KEPT[0])
    largest = max(float((each - first).abs().max()) for each in gradients.values())
    figures.show(kept_difference=largest / float(first.abs().max()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--batch", type=int, default=256, metavar="N", help="samples of a step (%(default)s)")
    parser.add_argument("--mini-batch-size", action="store_true", help="theirs in mini-batches of 32 texts")
    parser.add_argument("--kept-graphs", action="store_true", help="only the figures of kept graphs")
    parser.add_argument("--memory-of", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--kept", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if not SHARED.is_dir():
        raise SystemExit("this benchmark reads ../shared/data, which is absent")
    if args.memory_of:
        print(*measure_memory(args.memory_of, kept=args.kept))
        return
    figures = Figures()
    unpadded = QUICK_UNPADDED if args.quick else UNPADDED
    if args.kept_graphs:
        measure_kept_graphs(figures, unpadded)
        figures.write(args.json)
        return
    small, large = (128, 512) if args.quick else (512, 4096)
    (peak, step), (large_peak, large_step) = peak_memory(small), peak_memory(large)
    figures.show(peak_memory_growth=large_peak / peak, peak_memory_mib=peak, large_peak_memory_mib=large_peak)
    figures.show(step_memory_growth=large_step / step, step_memory_mib=step, large_step_memory_mib=large_step)
    ours = Ours()
    theirs = Theirs(**({"mini_batch_size": MICRO_BATCH} if args.mini_batch_size else {"mini_batch_num_tokens": TOKENS}))
    reports: list[Any] = []
    totals = [0.0, 0.0]
    warm = batch_of(nli_rows(4))
    theirs.step(columns_of(warm))
    ours.step(warm)
    for data, rows_of in (("nli", nli_rows), ("mixed", mixed_rows), ("scifact", scifact_rows)):
        batch = batch_of(rows_of(QUICK_BATCH if args.quick else args.batch))
        peer, own = alternate(partial(theirs.step, columns_of(batch)), lambda b=batch: reports.append(ours.step(b)), 1)
        figures.show(**{f"{data}_seconds_theirs": peer, f"{data}_seconds_ours": own, f"{data}_time_ratio": peer / own})
        totals = [totals[0] + peer, totals[1] + own]
    padding = 1 - sum(report.tokens for report in reports) / sum(report.padded_tokens for report in reports)
    figures.show(time_ratio=totals[0] / totals[1], padding_share=padding)
    if not args.quick:
        measure_kept_graphs(figures, unpadded)
    figures.write(args.json)


if __name__ == "__main__":
    main()

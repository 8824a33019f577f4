"""Benchmark: static embeddings, ours against sentence-transformers, alternating, one thread.

    python -m tests.benchmarks.static_embedding [--quick] [--json FILE]

The same token table (random, × 1,024), the same pairs in the same batches, cosine at τ = 0.05 (scale 20), six widths
32 … 1,024, gradients clipped, fused AdamW. Batches of 2,048 are real: Tatoeba pairs, and SciFact title → abstract, with
a WordPiece tokenizer of 30,522 tokens trained on both. Theirs: `StaticEmbedding`, `MultipleNegativesRankingLoss` inside
`MatryoshkaLoss`, tokenizing its batches as its trainer's collator does. Ours: what training does, from shards on disk
(tokenized once, before) through stream, objective and engine (ZeRO stage 0, float32). Figures:
  train_ratio               theirs ÷ ours, CPU seconds of a step at batch 2,048, both data sets together
  tatoeba_train_ratio, scifact_train_ratio   one by one; *_untokenized: theirs without its tokenizing
  memory_growth             our process' peak at batch 16,384 ÷ at 2,048, the table with the 105,879 rows of the
                            published multilingual model; english_memory_growth: with the 30,522 of the English one
  encode_ratio              theirs ÷ ours, CPU seconds to encode the texts of both data sets, the faster of its default
                            batches of 32 and ones of 1,024
  sparse_ratio              backward and optimizer with sparse gradients and SparseAdam ÷ dense with AdamW
--quick: training is timed as in a full run; memory at batch 8,192 ÷ at 2,048 with the English table alone; 2,000 pairs
of each data set are encoded. About a minute and a half.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from data.collate import PairBatch
from data.encoding import TextEncoder
from data.prepare import main as prepare
from data.shards.reader import ShardFolder
from data.shards.writer import SplitWriter, finish_folder
from data.tokens import load_tokenizer
from models.encoder import Encoder
from models.sizes import Size
from models.static_embedding import StaticConfig, StaticModel
from tests.benchmarks.support import SHARED, Figures, alternate, peak_mib
from trainer.build import open_stream
from trainer.config.load import build_recipe
from trainer.config.schema import Recipe
from trainer.costs.flops import Shape
from trainer.distributed import start
from trainer.ds_config import read_ds_config
from trainer.engine import Engine
from trainer.evaluation.encoding.encode import _text_encoder, embedder_of
from trainer.objectives.contrastive import contrastive
from trainer.objectives.materials import Materials
from trainer.objectives.size_schedules import build_schedule
from trainer.optim import adamw

DIMS = (32, 64, 128, 256, 512, 1024)
ENGLISH_ROWS, MULTILINGUAL_ROWS = 30_522, 105_879
LR = 0.2
SPECIALS = (0, 2, 3, 4)  # of the tokenizer trained here; [UNK] is 1


def recipe(shards: Path, batch: int) -> Recipe:
    return build_recipe(
        {
            "model": {"ladder": [[1, dim] for dim in DIMS], "pooling": "mean", "config": {"model_type": "static"}},
            "data": {"shards": [str(shards)], "query_max_length": 512, "passage_max_length": 512, "num_workers": 0},
            "objective": {"name": "contrastive", "temperature": 0.05, "kl": "none"},
            "train": {"global_batch_size": batch, "epochs": 100.0},
            "engine": {"ds_config": "ds_configs/zero0_float32.json"},
        }
    )


class Ours:
    def __init__(self, chosen: Recipe, rows: int) -> None:
        torch.manual_seed(0)
        table = StaticModel(StaticConfig(vocab_size=rows, hidden_size=DIMS[-1], special_ids=SPECIALS))
        self.encoder = Encoder(table, "mean")
        self.engine = Engine(self.encoder, chosen, start(), read_ds_config(chosen.engine.ds_config))
        schedule = build_schedule(chosen.step_sizes, reduction="mean", seed=0)
        shape = Shape.of(self.encoder.config)
        self.objective = contrastive(chosen, Materials(schedule, shape, packed=False, static=True))

    def step(self, batch: PairBatch) -> float:
        report = self.objective.forward_backward(self.engine, batch, 0)
        self.engine.step(LR)
        return float(report.losses["loss"])

    def step_from(self, stream: Any) -> float:
        return self.step(next(stream))


class Theirs:
    def __init__(self, tokenizer: Any, table: Tensor) -> None:
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.sentence_transformer.losses import MatryoshkaLoss, MultipleNegativesRankingLoss
        from sentence_transformers.sentence_transformer.modules import Normalize, StaticEmbedding

        self.embedding = StaticEmbedding(tokenizer, embedding_weights=table.clone())
        self.model = SentenceTransformer(modules=[self.embedding], device="cpu").train()
        self.serving = SentenceTransformer(modules=[self.embedding, Normalize()], device="cpu")
        weights = [1 / len(DIMS)] * len(DIMS)
        self.loss = MatryoshkaLoss(self.model, MultipleNegativesRankingLoss(self.model, scale=20.0), DIMS, weights)
        self.optimizer = adamw(self.model, lr=LR, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)

    def features(self, columns: Sequence[Sequence[str]]) -> list[dict[str, Tensor]]:
        return [self.embedding.preprocess(list(column)) for column in columns]

    def step(self, features: list[dict[str, Tensor]]) -> float:
        loss = self.loss([dict(each) for each in features], torch.empty(0))
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def step_from(self, columns: Sequence[Sequence[str]]) -> float:
        return self.step(self.features(columns))


def tatoeba() -> list[tuple[str, str]]:
    lines = (SHARED / "pairs" / "tatoeba_xx-eng.tsv").read_text(encoding="utf-8").splitlines()[1:]
    found = [tuple(line.split("\t")[1:3]) for line in lines]
    return [(a, b) for a, b in found if a.strip() and b.strip()]


def scifact() -> list[tuple[str, str]]:
    lines = (SHARED / "retrieval" / "scifact" / "corpus.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    return [(record["title"], record["text"]) for record in records]


def write_tokenizer(folder: Path) -> None:
    texts = folder / "texts.jsonl"
    with texts.open("w", encoding="utf-8") as file:
        for pair in [*tatoeba(), *scifact()]:
            file.writelines(json.dumps({"text": text}) + "\n" for text in pair)
    prepare(["tokenizer", str(texts), "--vocab-size", str(ENGLISH_ROWS), "--output", str(folder / "tokenizer")])


def write_shards(folder: Path, tokenizer: Any, pairs: Sequence[tuple[str, str]]) -> Path:
    ids_of = TextEncoder(tokenizer.backend_tokenizer, torch.empty(0, dtype=torch.int32).numpy().dtype)
    folder.mkdir()
    with SplitWriter(folder, 0, kind="tuples", vocabulary_size=len(tokenizer)) as writer:
        for query, passage in zip(*(ids_of(list(column)) for column in zip(*pairs))):
            writer.add_tuple(query.tolist(), [passage.tolist()])
    finish_folder(folder, 1, tokenizer=tokenizer)
    return folder


def open_batches(chosen: Recipe) -> Any:
    return open_stream(chosen, [ShardFolder(chosen.data.shards[0])], rank=0, world_size=1)


def measure_memory(shards: Path, batch: int, rows: int) -> float:
    """In this process: its peak in MiB after two steps, of which the first, a small one, makes Adam's moments."""
    ours = Ours(recipe(shards, batch), rows)
    for size in (64, batch):
        ours.step_from(open_batches(recipe(shards, size)))
    return peak_mib()


def peak_memory(shards: Path, batch: int, rows: int) -> float:
    alone = {key: value for key, value in os.environ.items() if key not in ("RANK", "MASTER_PORT")}
    command = [sys.executable, "-m", "tests.benchmarks.static_embedding", "--memory-of", str(shards), str(batch)]
    # Else glibc keeps freed blocks of up to 32 MiB, and the peak tells of its habits instead of live memory.
    environment = {**alone, "MALLOC_MMAP_THRESHOLD_": str(2**20)}
    out = subprocess.run([*command, str(rows)], capture_output=True, text=True, check=True, env=environment)
    return float(out.stdout.split()[-1])


def sparse_ratio(batch: PairBatch) -> tuple[float, float]:
    """CPU seconds of a backward pass through the table and an optimizer step: sparse, dense."""
    texts, offsets = batch.queries.tokens.long(), batch.queries.offsets[:-1]
    actions = []
    for sparse in (True, False):
        weight = nn.Parameter(torch.randn(ENGLISH_ROWS, DIMS[-1]))
        optimizer: Any = (
            torch.optim.SparseAdam([weight], lr=LR) if sparse else torch.optim.AdamW([weight], lr=LR, fused=True)
        )

        def step(weight: nn.Parameter = weight, optimizer: Any = optimizer, sparse: bool = sparse) -> None:
            F.embedding_bag(texts, weight, offsets, mode="mean", sparse=sparse).backward(direction)
            optimizer.step()
            optimizer.zero_grad()

        actions.append(step)
    direction = torch.randn(len(offsets), DIMS[-1])
    return alternate(*actions, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--repeats", type=int, default=2, help="of each timing, the best counts (%(default)s)")
    parser.add_argument("--memory-of", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)
    if not SHARED.is_dir():
        raise SystemExit("this benchmark reads ../shared/data, which is absent")
    if args.memory_of:
        print(measure_memory(Path(args.memory_of[0]), *map(int, args.memory_of[1:])))
        return
    figures = Figures()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tokenizer(folder)
        tokenizer = load_tokenizer(folder / "tokenizer")
        pairs = {"tatoeba": tatoeba(), "scifact": scifact()}
        shards = {name: write_shards(folder / name, tokenizer, found) for name, found in pairs.items()}
        small, large = 2048, 8192 if args.quick else 16384
        tables = {"english_": ENGLISH_ROWS} if args.quick else {"": MULTILINGUAL_ROWS, "english_": ENGLISH_ROWS}
        for prefix, rows in tables.items():
            peaks = [peak_memory(shards["tatoeba"], batch, rows) for batch in (small, large)]
            figures.show(
                **{
                    f"{prefix}memory_growth": peaks[1] / peaks[0],
                    f"{prefix}peak_mib": peaks[0],
                    f"{prefix}large_peak_mib": peaks[1],
                }
            )
        ours = Ours(recipe(shards["tatoeba"], small), ENGLISH_ROWS)
        theirs = Theirs(tokenizer, ours.encoder.word_embeddings.weight.detach())
        totals = [0.0, 0.0]
        for data, found in pairs.items():
            stream = open_batches(recipe(shards[data], small))
            columns = list(zip(*found[:small]))
            theirs.step_from(columns)
            batch = next(stream)
            ours.step(batch)
            peer, own = alternate(
                partial(theirs.step_from, columns), partial(ours.step_from, stream), repeats=args.repeats
            )
            bare, _ = alternate(partial(theirs.step, theirs.features(columns)), lambda: None, args.repeats)
            figures.show(
                **{
                    f"{data}_train_ratio": peer / own,
                    f"{data}_untokenized": bare / own,
                    f"{data}_pairs_a_second_theirs": small / peer,
                    f"{data}_pairs_a_second_ours": small / own,
                }
            )
            totals = [totals[0] + peer, totals[1] + own]
            sparse, dense = sparse_ratio(batch)
            figures.show(**{f"{data}_sparse_ratio": sparse / dense})
        figures.show(train_ratio=totals[0] / totals[1])

        texts = [text for found in pairs.values() for pair in found[: 2000 if args.quick else None] for text in pair]
        texts = list(dict.fromkeys(texts))
        encode = embedder_of(ours.encoder, tokenizer, [Size(1, DIMS[-1])], device="cpu")

        def encode_ours() -> None:
            _text_encoder.cache_clear()  # so that words are met for the first time
            encode(texts, similarity="cosine", max_length=10**6)

        def encode_theirs(batch_size: int) -> None:
            theirs.serving.encode(texts, batch_size=batch_size, show_progress_bar=False)

        peers = {}
        own = float("inf")
        for batch_size in (32, 1024):
            peers[batch_size], seconds = alternate(partial(encode_theirs, batch_size), encode_ours, args.repeats)
            own = min(own, seconds)
        peer = min(peers.values())
        figures.show(
            encode_ratio=peer / own,
            texts_a_second_theirs=len(texts) / peer,
            texts_a_second_ours=len(texts) / own,
            default_batch_encode_ratio=peers[32] / own,
        )
    figures.write(args.json)


if __name__ == "__main__":
    main()

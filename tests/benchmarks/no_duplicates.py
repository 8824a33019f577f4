"""Benchmark: what batches without duplicates cost, on real NLI triplets with one hard negative, in one process.

    python -m tests.benchmarks.no_duplicates [--quick] [--json FILE]

Figures a global batch size (128, 1024, 4096), CPU time of one thread:
  plain_samples_per_second      batches as they come, collated
  distinct_samples_per_second   the same with data.no_duplicates
  distinct_rate                 the second ÷ the first; of batches of 1,024, distinct_rate_1024
  planned_samples_per_second    the part that every loader process does for the whole global batch: read, draw, hash and
                                exchange a window of batches, nothing collated
  plain_repeats, distinct_repeats   samples that share a text with another of their batch, per 1,000
  copies_left, copies_forced    copies of a text beyond a batch's first, per 1,000 samples: what no_duplicates leaves
                                (copies_left_1024 in batches of 1,024), and what any exchange must leave, for a text
                                has more copies than a window has batches
--quick: a quarter of the samples; less than a minute.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path

from data.collate import PairBatch, PairCollator
from data.prepare import main as prepare
from data.shards.reader import ShardFolder
from data.stream import WINDOW_BATCHES, Stream
from tests.benchmarks.support import write_figures

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
SIZES = (128, 1024, 4096)


def shards(folder: Path) -> ShardFolder:
    """Both NLI files, tokenized with BERT's vocabulary."""
    from transformers import BertTokenizerFast

    BertTokenizerFast(str(SHARED / "vocab" / "bert-base-uncased-vocab.txt")).save_pretrained(folder / "tokenizer")
    inputs = [str(SHARED / "nli" / name) for name in ("snli_devtest_triplets.tsv", "cad_snli_triplets.tsv")]
    options = ["--query-column", "anchor", "--positive-column", "positive", "--negative-column", "hard_negative"]
    output = ["--output", str(folder / "shards"), "--tokenizer", str(folder / "tokenizer"), "--processes", "1"]
    assert prepare(["tuples", *inputs, *options, *output]) == 0
    return ShardFolder(folder / "shards")


def texts_of(batch: PairBatch) -> list[set[int]]:
    """Each sample's texts, by hash."""
    texts = [{query} for query in batch.query_hashes.tolist()]
    for query, text in zip(batch.passage_query.tolist(), batch.passage_hashes.tolist()):
        texts[query].add(text)
    return texts


def copies(batch: PairBatch) -> Counter[int]:
    """How many samples of a batch hold a text."""
    return Counter(text for mine in texts_of(batch) for text in mine)


def repeats(batch: PairBatch) -> int:
    """Samples of a batch that share a text with another of it."""
    held = copies(batch)
    return sum(any(held[text] > 1 for text in mine) for mine in texts_of(batch))


def copies_left(batch: PairBatch) -> int:
    return sum(count - 1 for count in copies(batch).values())


def copies_forced(batches: Sequence[PairBatch]) -> int:
    """What no exchange within windows could part."""
    forced = 0
    for start in range(0, len(batches), WINDOW_BATCHES):
        held = sum(map(copies, batches[start : start + WINDOW_BATCHES]), Counter[int]())
        forced += sum(max(0, count - WINDOW_BATCHES) for count in held.values())
    return forced


def timed(batches: Iterable[PairBatch], samples: int) -> tuple[float, list[PairBatch]]:
    """Samples a second of CPU time."""
    start = time.process_time()
    taken = list(batches)
    return samples / (time.process_time() - start), taken


def measure(folder: ShardFolder, *, global_batch_size: int, windows: int) -> dict[str, float]:
    collate = PairCollator(folder.vocabulary, query_max_length=64, passage_max_length=64, num_negatives=1, seed=1)
    steps = windows * WINDOW_BATCHES
    samples = steps * global_batch_size
    plain = Stream([folder], collate=collate, seed=1, global_batch_size=global_batch_size)
    distinct = Stream(
        [folder],
        collate=collate,
        seed=1,
        global_batch_size=global_batch_size,
        distinct_texts=collate.drawn_texts,
    )
    # A rank of so many that its shares are empty plans all windows and collates next to nothing.
    planner = Stream(
        [folder],
        collate=collate,
        seed=1,
        global_batch_size=global_batch_size,
        distinct_texts=collate.drawn_texts,
        rank=global_batch_size,
        world_size=global_batch_size + 1,
    )
    plain_rate, plain_batches = timed(islice(plain, steps), samples)
    distinct_rate, distinct_batches = timed(islice(distinct, steps), samples)
    planned_rate, _ = timed(islice(planner, steps), samples)
    return {
        "plain_samples_per_second": round(plain_rate),
        "distinct_samples_per_second": round(distinct_rate),
        "distinct_rate": distinct_rate / plain_rate,
        "planned_samples_per_second": round(planned_rate),
        "plain_repeats": round(1000 * sum(map(repeats, plain_batches)) / samples, 2),
        "distinct_repeats": round(1000 * sum(map(repeats, distinct_batches)) / samples, 2),
        "copies_left": round(1000 * sum(map(copies_left, distinct_batches)) / samples, 2),
        "copies_forced": round(1000 * copies_forced(distinct_batches) / samples, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not SHARED.is_dir():
        sys.exit(f"error: this benchmark needs the data sets of {SHARED}, which is absent")
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = shards(Path(scratch))
        for size in SIZES:
            windows = max(1, 2 ** (14 if args.quick else 16) // (WINDOW_BATCHES * size))
            found = measure(folder, global_batch_size=size, windows=windows)
            figures |= {f"{name}_{size}": value for name, value in found.items()}
    for name, value in figures.items():
        sys.stdout.write(f"{name} {value}\n")
    write_figures(figures, args.json)


if __name__ == "__main__":
    main()

"""One reader of the stream benchmark in a process of its own: an epoch of shuffled token ids, in flat batches.

    python tests/benchmarks/stream_readers.py READER FOLDER --workers N      (ours: python -m, from the root)

Every reader hands (ids uint16 [tokens], lengths [documents]) of 256 documents to this process, batched where the
documents are read, for an epoch or 20 seconds, whichever ends first. Prints one JSON line. The clock starts at the
first batch, so that starting workers is not counted.
A script by itself, because mosaicml-streaming and litdata live in virtual environments that have nothing of ours.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

BATCH = 256
SECONDS = 20.0
PROCESSES = 2  # that write
BUFFER = 1000  # documents in the shuffle buffers of those who need one
Flat = tuple[np.ndarray, np.ndarray]


def flat(documents: Sequence[np.ndarray]) -> Flat:
    return np.concatenate(documents), np.array([len(ids) for ids in documents])


def flat_samples(samples: Sequence) -> Flat:
    return flat([sample.payload for sample in samples])


def flat_rows(rows: Sequence[dict]) -> Flat:
    return flat([np.asarray(row["ids"], dtype=np.uint16) for row in rows])


def flat_members(members: Sequence[Sequence[np.ndarray]]) -> Flat:
    return flat([ids for (ids,) in members])


def ours(folder: Path, workers: int) -> Iterable[Flat]:
    from data.shards.reader import ShardFolder
    from data.stream import Stream

    source = ShardFolder(folder)
    return Stream(
        [source],
        collate=flat_samples,
        seed=1,
        global_batch_size=BATCH,
        num_workers=workers,
        total_samples=source.num_samples,
    )


def web_dataset(folder: Path, workers: int) -> Iterable[Flat]:
    import webdataset
    from torch.utils.data import DataLoader

    urls = [str(path) for path in sorted(folder.glob("*.tar"))]
    dataset = webdataset.WebDataset(urls, shardshuffle=len(urls)).shuffle(BUFFER).decode().to_tuple("ids.npy")
    return DataLoader(dataset.batched(BATCH, collation_fn=flat_members), batch_size=None, num_workers=workers)


def parquet(folder: Path, workers: int) -> Iterable[Flat]:
    from datasets import load_dataset
    from torch.utils.data import DataLoader

    files = [str(path) for path in sorted(folder.glob("*.parquet"))]
    dataset = load_dataset("parquet", data_files=files, split="train", streaming=True)
    dataset = dataset.shuffle(seed=1, buffer_size=BUFFER).with_format("numpy")
    return DataLoader(dataset, batch_size=BATCH, num_workers=workers, collate_fn=flat_rows)


def mosaic(folder: Path, workers: int) -> Iterable[Flat]:
    from streaming import StreamingDataset
    from torch.utils.data import DataLoader

    dataset = StreamingDataset(local=str(folder), shuffle=True, shuffle_seed=1, batch_size=BATCH)
    return DataLoader(dataset, batch_size=BATCH, num_workers=workers, collate_fn=flat_rows)


def lit_data(folder: Path, workers: int) -> Iterable[Flat]:
    from litdata import StreamingDataLoader, StreamingDataset

    # The defaults shuffle blocks of 256 neighbours. Shuffling a whole chunk, as here, is slow unless the chunk is also
    # decoded as a whole; then it is no slower than the defaults.
    shuffle = {"shuffle": True, "seed": 1, "item_shuffle_window": "full", "batch_decode": "all"}
    dataset = StreamingDataset(str(folder), **shuffle)
    return StreamingDataLoader(dataset, batch_size=BATCH, num_workers=workers, collate_fn=flat)


READERS = {"ours": ours, "webdataset": web_dataset, "parquet": parquet, "mosaic": mosaic, "litdata": lit_data}


def write_mosaic(source: Path, folder: Path) -> None:
    """MDS from documents.npz."""
    from streaming import MDSWriter

    with np.load(source) as content, MDSWriter(out=str(folder), columns={"ids": "ndarray:uint16"}) as writer:
        for ids in np.split(content["ids"], content["ends"][:-1]):
            writer.write({"ids": ids})


def write_litdata(source: Path, folder: Path) -> None:
    """Chunks of 64 MB from documents.npz, an item a document: bare uint16 ids."""
    from litdata import optimize

    shares = [(str(source), number, PROCESSES) for number in range(PROCESSES)]
    options = {"num_workers": PROCESSES, "keep_data_ordered": False, "verbose": False}
    optimize(documents_of_share, shares, str(folder), chunk_bytes="64MB", **options)


def documents_of_share(share: tuple[str, int, int]) -> Iterator[np.ndarray]:
    """A part of documents.npz. A share is its path, the number of the part, and how many parts there are."""
    path, number, parts = share
    with np.load(path) as content:
        yield from np.split(content["ids"], content["ends"][:-1])[number::parts]


WRITERS = {"mosaic": write_mosaic, "litdata": write_litdata}


def private_bytes(process: int | str) -> int:
    """Memory that no other process shares and that is no page of a file."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_Dirty"))


def children() -> list[str]:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


def measured(batches: Iterator[Flat]) -> dict[str, float]:
    documents = tokens = 0
    before = private_bytes("self")
    next(batches)
    start, cpu_start = time.perf_counter(), time.process_time()
    memory = 0
    for count, (ids, lengths) in enumerate(batches):
        documents += len(lengths)
        tokens += len(ids)
        if time.perf_counter() - start > SECONDS:
            break
        if count % 32 == 31:
            paused, cpu_paused = time.perf_counter(), time.process_time()
            memory = max(memory, private_bytes("self") - before + sum(map(private_bytes, children())))
            start += time.perf_counter() - paused
            cpu_start += time.process_time() - cpu_paused
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    return {
        "documents_per_second": documents / seconds,
        "tokens_per_second": tokens / seconds,
        "documents_per_cpu_second": documents / cpu_seconds,
        "memory_mib": memory / 2**20,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("reader", choices=READERS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--write", type=Path, metavar="NPZ", help="write the reader's folder from these documents")
    args = parser.parse_args()
    if args.write:
        WRITERS[args.reader](args.write, args.folder)
        return
    sys.stdout.write(json.dumps(measured(iter(READERS[args.reader](args.folder, args.workers)))) + "\n")


if __name__ == "__main__":
    main()

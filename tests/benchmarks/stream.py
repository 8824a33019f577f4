"""Benchmark: our reader and our tokenizing beside what else reads and tokenizes text, over the same 100,000 documents.

    python -m tests.benchmarks.stream [--quick] [--json FILE] [--mosaic PYTHON] [--litdata PYTHON] [--rounds N]

Documents are pieces of the real texts in ../shared/data/text, repeated until there are 100,000 of about 300 tokens.
Readers (tests/benchmarks/stream_readers.py), each an epoch, or 20 seconds of it, in a fresh process, without and with
two loader workers, in turn, N times (3), the best kept: ours (Stream over shards), webdataset (a tar member a
document), parquet (datasets, streaming), mosaic (mosaicml-streaming) and litdata (an item a document). The last two
require packages of other versions than ours; each is in a virtual environment of its own that --mosaic and --litdata
name, or that a full run makes in the temporary folder, several GB each. --quick leaves out what is not named.
Figures:
  <reader>_<documents|tokens>_per_second_<workers>, <reader>_memory_mib_<workers>, and <reader>_disk_overhead
                      (ours_disk_overhead, …), which is bytes on disk for each byte of uint16 ids, less one
  <reader>_documents_per_cpu_second   in one process; cpu_ratio_to_webdataset, cpu_ratio_to_parquet, …: ours ÷ theirs
  ratio_to_best_peer  ours to the fastest other reader, documents a second, the lesser of both numbers of workers
  seek_seconds_<10|50|90>, seek_seconds_max   open the folder, seek to that percentage of an epoch, get a batch of 256
  cold_seek_seconds_max                       the same where no shard was verified before: their hashes are counted
  verify_gb_per_second                        sha256 of a shard in memory
  prepare_mb_per_second, datasets_map_mb_per_second, prepare_ratio_to_datasets_map   2 processes, one tokenizer; ours
                      from jsonl to finished shards, theirs from a loaded data set to its cached file
  prepare_cpu_ratio_to_datasets_map           the same by CPU seconds, which other work on the machine does not change
--quick: 16,000 documents, in two turns; three minutes.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import os
import subprocess
import sys
import tempfile
import time
import venv
from itertools import cycle, islice
from pathlib import Path

import numpy as np

from data.prepare import main as prepare
from data.remote import Cache
from data.shards.reader import ShardFolder
from data.stream import Stream
from tests.benchmarks.stream_readers import BATCH, flat_samples
from tests.benchmarks.support import write_figures

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared" / "data"
FILES = 8
PROCESSES = 2
DOCUMENTS, QUICK_DOCUMENTS = 100_000, 16_000
MEAN_CHARACTERS = 1350
READERS_SCRIPT = Path(__file__).with_name("stream_readers.py")
# The packages of readers in virtual environments of their own, and their files.
APART = {"mosaic": "mosaicml-streaming", "litdata": "litdata"}
PATTERNS = {"ours": "*.tar", "webdataset": "*.tar", "parquet": "*.parquet", "mosaic": "*.mds", "litdata": "*.bin"}


def pieces() -> list[str]:
    """Real texts, cut at spaces into pieces whose lengths are spread as those of web pages are."""
    rng = np.random.default_rng(1)
    found = []
    for path in sorted((SHARED / "text").glob("*.jsonl.gz")):
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            for line in lines:
                text = json.loads(line)["text"]
                while text:
                    length = int(rng.lognormal(np.log(MEAN_CHARACTERS) - 0.32, 0.8)) + 50
                    end = text.find(" ", length)
                    piece, text = (text, "") if end < 0 else (text[:end], text[end + 1 :])
                    if piece.strip():
                        found.append(piece)
    return found


def write_jsonl(folder: Path, documents: int) -> list[Path]:
    folder.mkdir()
    texts = cycle(pieces())
    paths = [folder / f"{number}.jsonl" for number in range(FILES)]
    for path in paths:
        with path.open("w", encoding="utf-8") as file:
            for text in islice(texts, documents // FILES):
                file.write(json.dumps({"text": text}) + "\n")
    return paths


def cpu_seconds() -> float:
    """Of this process and of those it started that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def time_prepare(paths: list[Path], tokenizer: Path, output: Path) -> tuple[float, float]:
    """(Seconds, CPU seconds)."""
    start, cpu_start = time.perf_counter(), cpu_seconds()
    options = ["--tokenizer", str(tokenizer), "--output", str(output), "--processes", str(PROCESSES)]
    assert prepare(["documents", *map(str, paths), *options]) == 0
    return time.perf_counter() - start, cpu_seconds() - cpu_start


def time_datasets_map(paths: list[Path], tokenizer_folder: Path, scratch: Path) -> tuple[float, float]:
    """(Seconds, CPU seconds) in a process of its own, as a user would run it."""
    code = """
import os, sys, time
from datasets import load_dataset
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
texts = load_dataset("json", data_files=sys.argv[4:], split="train", cache_dir=sys.argv[2])
def tokenize(batch):
    found = tokenizer(batch["text"], add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False)
    return {"input_ids": found["input_ids"]}
start, before = time.perf_counter(), os.times()
texts.map(tokenize, batched=True, num_proc=int(sys.argv[3]), remove_columns=["text"])
print(time.perf_counter() - start, sum(os.times()[:4]) - sum(before[:4]))
"""
    arguments = [str(tokenizer_folder), str(scratch / "datasets"), str(PROCESSES), *map(str, paths)]
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments], env=environment, check=True, capture_output=True, text=True
    )
    seconds, cpu = map(float, result.stdout.split()[-2:])
    return seconds, cpu


def write_peers(source: ShardFolder, scratch: Path) -> None:
    import pyarrow
    import pyarrow.parquet
    import webdataset

    (scratch / "webdataset").mkdir()
    (scratch / "parquet").mkdir()
    documents = source.documents(np.arange(source.num_samples))
    for number, share in enumerate(np.array_split(np.arange(len(documents)), FILES)):
        with webdataset.TarWriter(str(scratch / "webdataset" / f"{number}.tar")) as writer:
            for index in share.tolist():
                buffer = io.BytesIO()
                np.save(buffer, documents[index])
                writer.write({"__key__": f"{index:08d}", "ids.npy": buffer.getvalue()})
        column = pyarrow.array([documents[index] for index in share.tolist()], pyarrow.list_(pyarrow.uint16()))
        table = pyarrow.table({"ids": column})
        pyarrow.parquet.write_table(table, scratch / "parquet" / f"{number}.parquet", row_group_size=BATCH * 4)
    ends = np.cumsum([len(ids) for ids in documents])
    np.savez(scratch / "documents.npz", ids=np.concatenate(documents), ends=ends)


def peer_python(reader: str, scratch: Path) -> str | None:
    """The Python of a new virtual environment with a reader's package; None, and a line of print, if it fails."""
    folder = scratch / f"{reader}-venv"
    venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    command = [python, "-m", "pip", "install", "-q", APART[reader]]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        print(f"{reader} is skipped: {' '.join(command)} failed: {result.stderr.strip().splitlines()[-1]}")
        return None
    return python


def readers_of(scratch: Path, *, quick: bool, named: dict[str, str | None]) -> dict[str, str]:
    """Which Python runs each reader. Readers whose folders our own environment cannot write write them here."""
    pythons = dict.fromkeys(("ours", "webdataset", "parquet"), sys.executable)
    for reader in APART:
        python = named[reader] or (None if quick else peer_python(reader, scratch))
        if python is None:
            continue
        command = [python, str(READERS_SCRIPT), reader, str(scratch / reader)]
        subprocess.run([*command, "--write", str(scratch / "documents.npz")], check=True)
        pythons[reader] = python
    return pythons


def read(reader: str, folder: Path, *, workers: int, python: str) -> dict[str, float]:
    script = ["-m", "tests.benchmarks.stream_readers"] if reader == "ours" else [str(READERS_SCRIPT)]
    command = [python, *script, reader, str(folder), "--workers", str(workers)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"error: {reader} failed\n{result.stderr}")
    return json.loads(result.stdout.splitlines()[-1])


def time_readers(scratch: Path, pythons: dict[str, str], *, rounds: int) -> dict[str, float]:
    """Each reader's best figures of several rounds, in each of which every reader has its turn."""
    figures: dict[str, float] = {}
    ratios = []
    for workers in (0, 2):
        runs: dict[str, list[dict[str, float]]] = {reader: [] for reader in pythons}
        for _ in range(rounds):
            for reader, python in pythons.items():
                runs[reader].append(read(reader, scratch / reader, workers=workers, python=python))
        best = {reader: max(found, key=lambda run: run["documents_per_second"]) for reader, found in runs.items()}
        for reader, found in best.items():
            for name in ("documents_per_second", "tokens_per_second", "memory_mib"):
                figures[f"{reader}_{name}_{workers}"] = found[name]
        rates = {reader: found["documents_per_second"] for reader, found in best.items()}
        ratios.append(rates.pop("ours") / max(rates.values()))
        if not workers:  # the CPU time of workers is not counted
            rates = {reader: max(run["documents_per_cpu_second"] for run in found) for reader, found in runs.items()}
            figures |= {f"{reader}_documents_per_cpu_second": rate for reader, rate in rates.items()}
            own = rates.pop("ours")
            figures |= {f"cpu_ratio_to_{reader}": own / rate for reader, rate in rates.items()}
    return {**figures, "ratio_to_best_peer": min(ratios)}


def disk_bytes(folder: Path, pattern: str) -> int:
    return sum(path.stat().st_size for path in folder.glob(pattern))


def seek_seconds(folder: Path, percentage: int, cache: Cache) -> float:
    start = time.perf_counter()
    source = ShardFolder(folder, cache=cache)
    stream = Stream([source], collate=flat_samples, seed=1, global_batch_size=BATCH)
    stream.load_state_dict({**stream.state_dict(), "samples": source.num_samples * percentage // 100})
    next(stream)
    return time.perf_counter() - start


def time_seeks(folder: Path, scratch: Path) -> dict[str, float]:
    cold = max(seek_seconds(folder, percentage, Cache.at(scratch / f"cold{percentage}")) for percentage in (10, 50, 90))
    warm = {percentage: seek_seconds(folder, percentage, Cache.at(scratch / "cold50")) for percentage in (10, 50, 90)}
    figures = {f"seek_seconds_{percentage}": seconds for percentage, seconds in warm.items()}
    return {**figures, "seek_seconds_max": max(warm.values()), "cold_seek_seconds_max": cold}


def verify_rate(folder: Path) -> float:
    content = max(folder.glob("*.tar"), key=lambda path: path.stat().st_size).read_bytes()
    start = time.perf_counter()
    rounds = 10
    for _ in range(rounds):
        hashlib.sha256(content)
    return rounds * len(content) / 1e9 / (time.perf_counter() - start)


def measure(scratch: Path, *, quick: bool, rounds: int, named: dict[str, str | None]) -> dict[str, float]:
    from transformers import BertTokenizerFast

    tokenizer = scratch / "tokenizer"
    BertTokenizerFast(str(SHARED / "vocab" / "bert-base-uncased-vocab.txt")).save_pretrained(tokenizer)
    paths = write_jsonl(scratch / "texts", QUICK_DOCUMENTS if quick else DOCUMENTS)
    megabytes = sum(path.stat().st_size for path in paths) / 1e6
    figures: dict[str, float] = {}
    shards = scratch / "ours"
    our_seconds, our_cpu_seconds = time_prepare(paths, tokenizer, shards)
    their_seconds, their_cpu_seconds = time_datasets_map(paths, tokenizer, scratch)
    figures["prepare_mb_per_second"] = megabytes / our_seconds
    figures["datasets_map_mb_per_second"] = megabytes / their_seconds
    figures["prepare_ratio_to_datasets_map"] = their_seconds / our_seconds
    figures["prepare_cpu_ratio_to_datasets_map"] = their_cpu_seconds / our_cpu_seconds

    source = ShardFolder(shards)
    figures["documents"], figures["tokens"] = source.num_samples, source.num_tokens
    write_peers(source, scratch)
    pythons = readers_of(scratch, quick=quick, named=named)
    figures |= time_readers(scratch, pythons, rounds=rounds)
    for reader in pythons:
        size = disk_bytes(scratch / reader, PATTERNS[reader])
        figures[f"{reader}_disk_overhead"] = size / (2 * source.num_tokens) - 1
    return {**figures, **time_seeks(shards, scratch), "verify_gb_per_second": verify_rate(shards)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--mosaic", metavar="PYTHON", help="of an environment that has mosaicml-streaming")
    parser.add_argument("--litdata", metavar="PYTHON", help="of an environment that has litdata")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if not SHARED.is_dir():
        sys.exit(f"error: this benchmark needs the data sets of {SHARED}, which is absent")
    with tempfile.TemporaryDirectory() as scratch:
        figures = measure(
            Path(scratch),
            quick=args.quick,
            rounds=2 if args.quick else args.rounds,
            named={"mosaic": args.mosaic, "litdata": args.litdata},
        )
    for name, value in figures.items():
        print(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}")
    write_figures(figures, args.json)


if __name__ == "__main__":
    main()

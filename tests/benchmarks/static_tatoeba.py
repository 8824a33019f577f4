"""Study: a multilingual static model trained on Tatoeba for real, and what dimensions and bits keep of it.

    python -m tests.benchmarks.static_tatoeba [--work FOLDER] [--figure FILE] [--json FILE] [--set KEY=VALUE ...]

A tenth of the English sentences is held out with all their translations. Then: a WordPiece tokenizer of the rest,
shards (Tatoeba, and NLI without the rows that share a sentence with an STS test), launch/recipes/static_tatoeba.toml on
one rank. Measured at each dimension, for the trained table and for a random one:
  bitext     share of held-out foreign sentences whose nearest of all held-out English ones is their translation
  sts        mean Spearman × 100 over STS12, STS13, STS14 and the STS-B test (English)
and for the trained table in fewer bits: the table in int8 (a scale a row), vectors in int8, and vectors in one bit.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch

from data.prepare import main as prepare
from data.tokens import load_tokenizer
from models.encoder import Encoder, load_encoder
from models.quantisation import from_int8, int8_ranges, to_int8, to_signs
from models.sizes import Size
from models.static_embedding import StaticModel
from tests.benchmarks.support import SHARED, write_figures
from trainer.evaluation.encoding.encode import embedder_of
from trainer.evaluation.quantised import with_int8_table
from trainer.evaluation.tasks.sts import cosine_of_pairs, read_sts, spearman

RECIPE = "launch/recipes/static_tatoeba.toml"
DIMS = (32, 64, 128, 256, 512, 1024)
STS = ("sts12", "sts13", "sts14", "stsb_test")
NLI = ("snli_devtest_triplets", "cad_snli_triplets")
HELD_OUT = 10  # one English sentence in so many


def split_pairs() -> tuple[list[list[str]], list[list[str]]]:
    """(training, held-out) rows of language, sentence, English; no English sentence is in both."""
    lines = (SHARED / "pairs" / "tatoeba_xx-eng.tsv").read_text(encoding="utf-8").splitlines()[1:]
    rows = [row for row in (line.split("\t") for line in lines) if row[1].strip() and row[2].strip()]
    held = [zlib.crc32(row[2].strip().lower().encode()) % HELD_OUT == 0 for row in rows]
    return [r for r, out in zip(rows, held) if not out], [r for r, out in zip(rows, held) if out]


def prepare_data(work: Path) -> None:
    train, _ = split_pairs()
    nli: list[list[str]] = []
    for name in NLI:
        with (SHARED / "nli" / f"{name}.tsv").open(encoding="utf-8") as file:
            rows = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))[1:]
        dropped = set(map(int, (SHARED / "nli" / f"{name}.sts_overlap_rows.txt").read_text().split()))
        nli += [row for number, row in enumerate(rows) if number not in dropped]
    texts = [*((r[1], r[2]) for r in train), *nli]
    for name, records in (
        ("texts", ({"text": text} for row in texts for text in row)),
        ("tatoeba", ({"query": r[1], "positive": r[2]} for r in train)),
        ("nli", ({"query": r[0], "positive": r[1], "negative": r[2]} for r in nli)),
    ):
        lines = (json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        (work / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    tokenizer = str(work / "tokenizer")
    prepare(["tokenizer", str(work / "texts.jsonl"), "--output", tokenizer])
    for name in ("tatoeba", "nli"):
        prepare(["tuples", str(work / f"{name}.jsonl"), "--tokenizer", tokenizer, "--output", str(work / name)])


Vectors = Callable[[list[str]], np.ndarray]  # float32 [n, 1024], not normalised
Bits = Callable[[np.ndarray], np.ndarray]  # what becomes of vectors that were cut to their dimension


def vectors_of(encoder: Encoder, folder: Path) -> Vectors:
    tokenizer, full = load_tokenizer(folder), Size(1, DIMS[-1])
    encode = embedder_of(encoder, tokenizer, [full], device="cpu")
    return lambda texts: encode(texts, similarity="dot", max_length=128)[full]


def in_int8(vectors: np.ndarray) -> np.ndarray:
    ranges = int8_ranges(vectors)
    return from_int8(to_int8(vectors, ranges), ranges)


def scores(vectors: Vectors, *, bits: Bits = lambda v: v) -> dict[str, dict[int, float]]:
    """ "bitext" and "sts": dimension -> score in per cent."""
    _, held = split_pairs()
    english = list(dict.fromkeys(row[2] for row in held))
    place = {text: index for index, text in enumerate(english)}
    targets = np.array([place[row[2]] for row in held])
    foreign, candidates = vectors([row[1] for row in held]), vectors(english)
    tasks = [read_sts(SHARED / "sts" / f"{name}.tsv") for name in STS]
    sides = [[vectors([pair[side] for pair in task.pairs]) for side in (0, 1)] for task in tasks]
    found: dict[str, dict[int, float]] = {"bitext": {}, "sts": {}}
    for dim in DIMS:
        a, b = (bits(v[:, :dim]) for v in (foreign, candidates))
        b = b / np.maximum(np.linalg.norm(b, axis=1, keepdims=True), 1e-12)
        found["bitext"][dim] = 100 * float(((a @ b.T).argmax(1) == targets).mean())
        correlations = [
            spearman(cosine_of_pairs(bits(first[:, :dim]), bits(second[:, :dim])), np.asarray(task.scores))
            for task, (first, second) in zip(tasks, sides)
        ]
        found["sts"][dim] = 100 * float(np.mean(correlations))
    return found


def draw(results: Mapping[str, Mapping[str, Mapping[int, float]]], path: Path) -> None:
    """A panel a task, a line a method, over the dimensions."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.5, 3.4), layout="constrained")
    panels = figure.subplots(1, 2)
    for axes, task, label in zip(panels, ("bitext", "sts"), ("translations found, per cent", "STS, Spearman × 100")):
        for method, marker in (("trained", "o"), ("one-bit vectors", "s"), ("random", "^")):
            found = results[method][task]
            axes.plot(range(len(found)), list(found.values()), marker=marker, markersize=5, label=method)
        axes.set_xticks(range(len(DIMS)), [str(dim) for dim in DIMS])
        axes.set_xlabel("dimensions")
        axes.set_ylabel(label)
        axes.grid(axis="y", linewidth=0.5, alpha=0.5)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].legend(frameon=False)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("runs/static_tatoeba_data"), help="data (%(default)s)")
    parser.add_argument("--run", type=Path, default=Path("runs/static_tatoeba"), help="the run (%(default)s)")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="draw quality against dimension here")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings of the recipe to change")
    args = parser.parse_args()
    if not SHARED.is_dir():
        raise SystemExit("this study reads ../shared/data, which is absent")
    if not (args.work / "nli").is_dir():
        args.work.mkdir(parents=True, exist_ok=True)
        prepare_data(args.work)
    if not (args.run / "DONE").is_file():
        shards = json.dumps([str(args.work / "tatoeba"), str(args.work / "nli")])
        changes = [f"run.output={args.run}", f"data.shards={shards}", *args.set]
        command = [sys.executable, "-m", "trainer.finetune", "--config", RECIPE]
        subprocess.run([*command, *(f"--{change}" for change in changes)], check=True)
    folder = args.run / "model"
    trained = load_encoder(folder)
    torch.manual_seed(0)
    vectors = vectors_of(trained, folder)
    results = {
        "trained": scores(vectors),
        "random": scores(vectors_of(Encoder(StaticModel(trained.config), "mean"), folder)),
        "int8 table": scores(vectors_of(with_int8_table(trained), folder)),
        "int8 vectors": scores(vectors, bits=in_int8),
        "one-bit vectors": scores(vectors, bits=to_signs),
    }
    for task in ("bitext", "sts"):
        print(f"{task:<18}" + "".join(f"{dim:>8}" for dim in DIMS))
        for method, found in results.items():
            print(f"  {method:<16}" + "".join(f"{found[task][dim]:8.1f}" for dim in DIMS))
    if args.figure:
        draw(results, args.figure)
    write_figures(results, args.json)


if __name__ == "__main__":
    main()

"""Benchmark: hard negatives, ours against sentence-transformers' `mine_hard_negatives`, alternating, one thread.

    python -m tests.benchmarks.mine_negatives [--quick] [--json FILE]

The same static model (a random table of 30,522 × 256) mines five negatives a pair with a relative margin of 5 %, in
SciFact title → abstract (5,183 pairs, long texts) and in Tatoeba (31,918 pairs, short texts). Each turn is a process of
its own, from a file of pairs to a file of tuples; libraries and model are loaded before the clock starts. Theirs: the
faster of batches of 32 and 1,024 (exact search, no faiss), saved as jsonl. Figures:
  scifact_time_ratio, tatoeba_time_ratio     theirs ÷ ours, CPU seconds, the best of the turns
  scifact_peak_ratio, tatoeba_peak_ratio     theirs ÷ ours, peak memory of the whole process
  scifact_growth_ratio, …                    the same, less what the process held when the clock started
  scifact_same, tatoeba_same                 share of the pairs' negatives that both found
--quick: one turn each, all of SciFact's pairs and 8,000 of Tatoeba's; about two minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from data.tokens import load_tokenizer
from models.encoder import load_encoder
from models.settings import EmbeddingSettings
from models.static_embedding import StaticConfig, StaticModel
from tests.benchmarks.static_embedding import ENGLISH_ROWS, SPECIALS, scifact, tatoeba, write_tokenizer
from tests.benchmarks.support import SHARED, Figures, peak_mib, resident_mib
from trainer.mine_negatives import main as mine

NUM_NEGATIVES, MARGIN, DIM = 5, 0.05, 256
NO_CUT = 100_000  # tokens
QUICK_PAIRS = 8_000


def write_model(folder: Path) -> None:
    torch.manual_seed(0)
    table = StaticModel(StaticConfig(vocab_size=ENGLISH_ROWS, hidden_size=DIM, special_ids=SPECIALS))
    table.save_pretrained(folder / "model")
    load_tokenizer(folder / "tokenizer").save_pretrained(folder / "model")
    lengths = {"query_max_length": NO_CUT, "passage_max_length": NO_CUT}
    EmbeddingSettings("mean", "cosine", ((1, DIM),), **lengths).save(folder / "model")


def mine_ours(pairs: Path, model: Path, output: Path) -> tuple[float, float]:
    """(CPU seconds, MiB held before)."""
    load_encoder(model)
    before, begin = resident_mib(), time.process_time()
    options = ["--num-negatives", str(NUM_NEGATIVES), "--relative-margin", str(MARGIN)]
    with contextlib.redirect_stdout(io.StringIO()):
        mine([str(pairs), "--model", str(model), "--output", str(output), *options])
    return time.process_time() - begin, before


def mine_theirs(pairs: Path, model: Path, output: Path, batch_size: int) -> tuple[float, float]:
    import datasets
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, StaticEmbedding
    from sentence_transformers.util import mine_hard_negatives

    weights = load_encoder(model).word_embeddings.weight.detach()
    embedding = StaticEmbedding(load_tokenizer(model), embedding_weights=weights)
    peer = SentenceTransformer(modules=[embedding, Normalize()], device="cpu")
    before, begin = resident_mib(), time.process_time()
    rows = [json.loads(line) for line in pairs.read_text("utf-8").splitlines()]
    data = datasets.Dataset.from_list(rows)
    found = mine_hard_negatives(
        data, peer, num_negatives=NUM_NEGATIVES, relative_margin=MARGIN, batch_size=batch_size, verbose=False
    )
    output.mkdir()
    found.to_json(output / "tuples.jsonl")
    return time.process_time() - begin, before


def turn(side: str, pairs: Path, model: Path, output: Path) -> dict[str, float]:
    """One process: "ours", or "32" and the like for theirs with that batch size."""
    command = [
        sys.executable,
        "-m",
        "tests.benchmarks.mine_negatives",
        "--turn",
        side,
        *map(str, (pairs, model, output)),
    ]
    out = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(out.stdout.splitlines()[-1])


def negatives_of(path: Path) -> set[tuple[str, str]]:
    """(query, negative) of our tuples or their triplets."""
    rows = map(json.loads, path.read_text("utf-8").splitlines())
    return {
        (row["query"], text) for row in rows for text in ([row["negative"]] if "negative" in row else row["negatives"])
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--turn", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    torch.set_num_threads(1)
    if not SHARED.is_dir():
        raise SystemExit("this benchmark reads ../shared/data, which is absent")
    if args.turn:
        side, *paths = args.turn
        pairs, model, output = map(Path, paths)
        seconds, before = (
            mine_ours(pairs, model, output) if side == "ours" else mine_theirs(pairs, model, output, int(side))
        )
        print(json.dumps({"seconds": seconds, "peak": peak_mib(), "growth": peak_mib() - before}))
        return
    figures = Figures()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tokenizer(folder)
        write_model(folder)
        for data, found in (("scifact", scifact()), ("tatoeba", tatoeba())):
            pairs = folder / f"{data}.jsonl"
            rows = found[: QUICK_PAIRS if args.quick else None]
            pairs.write_text("".join(json.dumps({"query": a, "positive": b}) + "\n" for a, b in rows), encoding="utf-8")
            turns: dict[str, list[dict[str, float]]] = {"ours": [], "32": [], "1024": []}
            for number in range(1 if args.quick else args.repeats):
                for side, done in turns.items():
                    done.append(turn(side, pairs, folder / "model", folder / f"{data}_{side}_{number}"))
            best = {side: {key: min(each[key] for each in done) for key in done[0]} for side, done in turns.items()}
            peer = min(("32", "1024"), key=lambda side: best[side]["seconds"])
            ours, theirs = (negatives_of(folder / f"{data}_{side}_0" / "tuples.jsonl") for side in ("ours", peer))
            figures.show(
                **{
                    f"{data}_time_ratio": best[peer]["seconds"] / best["ours"]["seconds"],
                    f"{data}_peak_ratio": best[peer]["peak"] / best["ours"]["peak"],
                    f"{data}_growth_ratio": best[peer]["growth"] / best["ours"]["growth"],
                    f"{data}_same": len(ours & theirs) / max(1, len(ours | theirs)),
                    f"{data}_seconds_ours": best["ours"]["seconds"],
                    f"{data}_seconds_theirs": best[peer]["seconds"],
                    f"{data}_peak_mib_ours": best["ours"]["peak"],
                    f"{data}_peak_mib_theirs": best[peer]["peak"],
                }
            )
    figures.write(args.json)


if __name__ == "__main__":
    main()

"""Benchmark: what saving a BERT-base costs, and how much of it training stands still for.

    python -m tests.benchmarks.checkpoint [--quick] [--json FILE]

One process, ZeRO stage 1, float32, AdamW with its moments; into the temporary folder's disk. Figures:
  mib                 of the checkpoint; bytes_a_parameter: of it, for each parameter that is trained
  save_seconds        written, hashed, fsynced and committed while nothing else happens
  still_seconds       what training stands still for when a thread writes a copy
  still_share         still_seconds ÷ save_seconds
  load_seconds        verified and loaded
--quick: 2 of the 12 layers, some 450 MiB; half a minute. Seconds are less than those of BERT-base, shares are alike.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from models.encoder import Encoder, base_of, build_masked_lm
from models.sizes import Size
from tests.benchmarks.support import write_figures
from trainer.checkpoint import Checkpointer
from trainer.config.load import build_recipe
from trainer.distributed import start
from trainer.ds_config import read_ds_config
from trainer.engine import Engine

BASE = dict(hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072)
QUICK = {**BASE, "num_hidden_layers": 2}


def build_engine(folder: Path, *, quick: bool) -> Engine:
    shape = QUICK if quick else BASE
    masked_lm = build_masked_lm({"model_type": "bert", **shape}, vocab_size=30522, pad_token_id=0)
    path = folder / "zero1.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 1}}))
    recipe = build_recipe({"engine": {"ds_config": str(path)}})
    engine = Engine(Encoder(base_of(masked_lm), "mean"), recipe, start(), read_ds_config(path))
    (vectors,) = engine(
        torch.tensor([[2, 7, 8, 3]]),
        torch.ones(1, 4, dtype=torch.long),
        sizes=[Size(shape["num_hidden_layers"], shape["hidden_size"])],
    )
    engine.backward(vectors.sum())
    engine.step(1e-5)  # for the moments
    return engine


def seconds(action: Callable[[], object]) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        engine = build_engine(Path(name), quick=args.quick)
        parameters = sum(each.numel() for each in engine.module.parameters())
        checkpointer = Checkpointer(Path(name) / "checkpoints", keep=1)
        alone = checkpointer.save(engine, {"step": 1})
        # What follows the copy is a wait for the thread here; in training there is a step instead.
        pending = checkpointer.begin(engine, {"step": 2}, overlap=True)
        pending.result()
        committed = checkpointer.finish(pending)
        assert alone is not None and committed is not None
        figures = {
            "mib": alone.mib,
            "bytes_a_parameter": alone.mib * 2**20 / parameters,
            "save_seconds": alone.seconds,
            "still_seconds": committed.still_seconds,
            "still_share": committed.still_seconds / alone.seconds,
            "load_seconds": seconds(lambda: checkpointer.load_newest(engine)),
        }
    for figure, value in figures.items():
        print(f"{figure} {value:.3f}")
    write_figures(figures, args.json)


if __name__ == "__main__":
    main()

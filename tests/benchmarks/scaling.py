"""Bytes and time that launch.plan predicts, against hosts in network namespaces on a limited link.

    python -m tests.benchmarks.scaling SHARDS TUPLES [--ranks 1 2 4] [--rate-mbit 100]

SHARDS, TUPLES: folders of documents and of tuples, written by data.prepare with one tokenizer. One rank a host, gloo.
Prints, for every shipped ZeRO configuration: bytes that a host sent a step and the ratio to what was predicted; then,
with every host limited to the rate, a step's time and the ratio to what is predicted: its time without the limit and
bytes ÷ rate. Needs root.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

from launch import scaling
from launch.scaling import Model
from tests.launch.hosts import deepspeed_commands, made, run_on_all
from tests.trainer.support import recipe_of
from trainer.costs.shapes import Shape

CONFIGS = {"zero0": 0, "zero1_float32": 1, "zero1": 1, "zero2": 2, "zero3": 3}
HIDDEN, INNER, LAYERS, POSITIONS = 256, 1024, 3, 80
# On the limited link: a step each of what is sent once, and of what is sent at every micro-batch.
LIMITED = ("masked-zero0", "masked-zero1", "contrastive-zero1", "masked-zero2", "masked-zero3")


def cases(documents: str, tuples: str, steps: int) -> list[dict[str, Any]]:
    model = {
        "model_type": "bert",
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "intermediate_size": INNER,
        "max_position_embeddings": POSITIONS,
    }
    found = []
    for config in CONFIGS:
        for name, shards in (("masked", documents), ("contrastive", tuples)):
            values = {
                "model": {"config": model, "ladder": [[1, 64], [2, 128], [3, 256]]},
                "data": {"shards": [shards], "max_length": 32, "passage_max_length": 32, "num_workers": 0},
                "objective": {"name": name},
                "train": {"steps": steps, "global_batch_size": 24, "micro_batch_size": 4},
                "engine": {"ds_config": f"ds_configs/{config}.json"},
            }
            values["data"] |= {"query_max_length": 16, "num_negatives": 3}
            found.append({"name": f"{name}-{config}", "values": values, "steps": steps})
    return found


def measure(chosen: list[dict[str, Any]], ranks: int, rate_mbit: int, folder: Path) -> dict[str, dict[str, Any]]:
    (folder / "cases.json").write_text(json.dumps(chosen))
    words = ["tests.launch.communication", str(folder / "cases.json"), str(folder / "results.json")]
    with made(ranks, rate_mbit=rate_mbit) as hosts:
        (folder / "hostfile").write_text("".join(f"{host.name} slots=1\n" for host in hosts))
        for done in run_on_all(hosts, deepspeed_commands(hosts, folder / "hostfile", words, port=29500)):
            assert done.returncode == 0, done.stdout[-4000:]
    results = json.loads((folder / "results.json").read_text())
    return {case["name"]: case | result for case, result in zip(chosen, results, strict=True)}


def predicted_bytes(case: dict[str, Any], ranks: int, vocabulary: int) -> float:
    """What gloo sends: its reduce-scatter is an all-reduce."""
    recipe = recipe_of(case["values"])
    config = case["name"].partition("-")[2]
    kept = scaling.ZERO1_FLOAT32 if config == "zero1_float32" else None
    model = Model.of(recipe, Shape(HIDDEN, INNER, LAYERS, vocabulary, positions=POSITIONS))
    counts = {"micro_batches": case["micro_batches"], "vectors": case["passages"]}
    planned = scaling.collectives(recipe, model, stage=CONFIGS[config], kept=kept, **counts)
    with_gloo = (dataclasses.replace(each, kind=each.kind.replace("reduce_scatter", "all_reduce")) for each in planned)
    return sum(each.sent(ranks) for each in with_gloo)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("documents")
    parser.add_argument("tuples")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rate-mbit", type=int, default=100)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--only-link", action="store_true", help="only the cases that are timed on the limited link")
    args = parser.parse_args()
    manifest = json.loads((Path(args.documents) / "manifest.json").read_text())
    vocabulary = int(manifest["tokenizer"]["vocab_size"])
    chosen = cases(str(Path(args.documents).resolve()), str(Path(args.tuples).resolve()), args.steps)
    limited = [case for case in chosen if case["name"] in LIMITED]
    chosen = limited if args.only_link else chosen
    with tempfile.TemporaryDirectory() as name:
        for ranks in args.ranks:
            free = measure(chosen, ranks, 0, Path(name))
            for case, result in free.items():
                sent, expected = sum(result["sent"]) / ranks, predicted_bytes(result, ranks, vocabulary)
                ratio = f"{sent / expected:.3f}" if expected else "nothing to send"
                print(f"{ranks} ranks {case}: {sent / 1e6:.2f} MB sent a step, ÷ predicted {ratio}", flush=True)
            if ranks == 1:
                continue
            slow = measure(limited, ranks, args.rate_mbit, Path(name))
            for case, result in slow.items():
                without, expected = free[case]["seconds"], predicted_bytes(result, ranks, vocabulary)
                predicted = without + expected * 8 / (args.rate_mbit * 1e6)
                print(
                    f"{ranks} ranks {case} at {args.rate_mbit} Mbit/s: a step {result['seconds']:.2f} s, predicted "
                    f"{without:.2f} s without the limit + {predicted - without:.2f} s: ratio "
                    f"{result['seconds'] / predicted:.2f} (large all-reduces: {result['link'] * 8e-6:.0f} Mbit/s)",
                    flush=True,
                )


if __name__ == "__main__":
    main()

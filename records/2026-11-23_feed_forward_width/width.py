"""Fewer layers, or narrower feed-forwards: all-MiniLM-L6-v2 cut both ways to the same FLOPs, then taught by the whole.

    python width.py --start MODEL --shards SHARDS --texts TEXTS.jsonl --sts TSV... --beir FOLDER... --output RUNS

MODEL is the model as `python -m trainer.resize MODEL --prepare-only` writes it, SHARDS and TEXTS are that command's
shards and texts. Without biases and the product of queries with keys, a layer of MiniLM costs 4 d² + 8 d² f
multiplications a token, f being the fraction of its feed-forward's neurons that are kept: (1 + 2 f) / 3 of a whole
layer. A feed-forward keeps its most important neurons, by the mean size of the activation times the length of the
neuron's outgoing weights, over some of the texts. Of a nested feed-forward (MatFormer, arXiv:2310.07707) these are the
prefix. Each model is trained on its own, so nested widths could at best do as well.

Finished parts are skipped. RUNS/figures.json has all figures, RUNS/table.md the table.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from itertools import islice
from pathlib import Path

import torch
from transformers import AutoModel, AutoTokenizer

from data.ground.command import run_command
from trainer.evaluation.results.comparison import compare, samples_of
from trainer.evaluation.results.raw import RAW_FILE, RawResults, read_raw
from trainer.evaluation.results.report import HEADLINE_METRICS
from trainer.evaluation.results.significance import p_text

# Models of equal cost stand in one row, that of whole layers first: (layers, fraction of the feed-forward).
ROWS = (
    ((1, 1.0), (2, 0.25)),
    ((2, 1.0), (3, 0.5), (4, 0.25)),
    ((3, 1.0), (6, 0.25)),
    ((4, 1.0), (6, 0.5)),
)
WIDTH = 384
TEXTS_WEIGHED = 512


def main() -> None:
    parser = argparse.ArgumentParser(prog="width.py", description="Fewer layers, or narrower feed-forwards?")
    parser.add_argument("--start", type=Path, required=True)
    parser.add_argument("--shards", type=Path, required=True)
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--sts", nargs="+", required=True)
    parser.add_argument("--beir", nargs="+", required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=1, help="models at a time (%(default)s)")
    args = parser.parse_args()
    arms = [arm for row in ROWS for arm in row]
    importance = weigh(args.start, args.texts)
    for begin in range(0, len(arms), args.jobs):
        chains = [commands(args, *arm) for arm in arms[begin : begin + args.jobs]]
        for arm in arms[begin : begin + args.jobs]:
            if not (folder := folder_of(args.output, *arm) / "start").is_dir():
                cut(args.start, folder, importance, *arm)
        for links in zip(*chains):
            running = [subprocess.Popen(command) for command, done in links if not done.is_file()]
            if any(process.wait() for process in running):
                sys.exit("a command failed; its output stands above")
    write(args.output)


def folder_of(output: Path, layers: int, fraction: float) -> Path:
    return output / f"{layers}_layers_{fraction:g}"


@torch.no_grad()
def weigh(start: Path, texts: Path) -> list[torch.Tensor]:
    """The importance of every neuron of each layer's feed-forward: float32 [neurons] a layer."""
    model, tokenizer = AutoModel.from_pretrained(start).eval(), AutoTokenizer.from_pretrained(start)
    sums = [torch.zeros(model.config.intermediate_size) for _ in model.encoder.layer]
    mask = torch.zeros(0)

    def adds_to(total: torch.Tensor):
        def hook(_module: object, _inputs: object, activation: torch.Tensor) -> None:
            total.add_((activation.abs() * mask[..., None]).sum((0, 1)))

        return hook

    for layer, total in zip(model.encoder.layer, sums):
        layer.intermediate.register_forward_hook(adds_to(total))
    with texts.open(encoding="utf-8") as file:
        lines = [json.loads(line)["text"] for line in islice(file, TEXTS_WEIGHED)]
    for first in range(0, len(lines), 32):
        batch = tokenizer(lines[first : first + 32], padding=True, truncation=True, max_length=96, return_tensors="pt")
        mask = batch["attention_mask"].float()
        model(**batch)
    return [total * layer.output.dense.weight.norm(dim=0) for layer, total in zip(model.encoder.layer, sums)]


@torch.no_grad()
def cut(start: Path, folder: Path, importance: list[torch.Tensor], layers: int, fraction: float) -> None:
    """The first layers, with the most important neurons of their feed-forwards, as a plain folder."""
    model = AutoModel.from_pretrained(start)
    del model.encoder.layer[layers:]
    kept = round(model.config.intermediate_size * fraction)
    for layer, weights in zip(model.encoder.layer, importance):
        rows = weights.argsort(descending=True)[:kept]
        inner, outer = layer.intermediate.dense, layer.output.dense
        inner.weight, inner.bias = (torch.nn.Parameter(each[rows].clone()) for each in (inner.weight, inner.bias))
        outer.weight = torch.nn.Parameter(outer.weight[:, rows].clone())
    model.config.num_hidden_layers, model.config.intermediate_size = layers, kept
    settings = json.loads((start / "barista.json").read_text(encoding="utf-8")) | {"ladder": [[layers, WIDTH]]}
    shutil.copytree(start, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    model.save_pretrained(folder)
    (folder / "barista.json").write_text(json.dumps(settings), encoding="utf-8")


def commands(args: argparse.Namespace, layers: int, fraction: float) -> list[tuple[list[str], Path]]:
    """The commands for a model, each with the file that is there when it is done."""
    folder = folder_of(args.output, layers, fraction)
    recipe = Path(__file__).with_name("recipe.toml")
    train = [
        "trainer.distill",
        "--config",
        recipe,
        f"--model.source={folder / 'start'}",
        f"--run.output={folder / 'run'}",
    ]
    train += [f"--model.ladder=[[{layers}, {WIDTH}]]", f"--data.shards=[{str(args.shards)!r}]"]
    train += [f"--teacher.model={args.start}", f"--train.steps={args.steps}"]

    def evaluate(model: Path, name: str) -> tuple[list[str], Path]:
        command = ["trainer.evaluate", "sizes", "--model", model, "--sizes", f"{layers}x{WIDTH}", "--sts", *args.sts]
        command += ["--beir", *args.beir, "--split", "test", "--max-length", "64", "--dtype", "bfloat16"]
        return _python([*command, "--output", folder / name]), folder / name / RAW_FILE

    before = evaluate(folder / "start", "before")
    return [before, (_python(train), folder / "run" / "DONE"), evaluate(folder / "run" / "model", "after")]


def _python(arguments: list[str | Path]) -> list[str]:
    return [sys.executable, "-m", *map(str, arguments)]


def write(output: Path) -> None:
    """figures.json and table.md, from the raw results."""
    tasks = list(_results(output, *ROWS[0][0], "before").tasks.values())
    lines = ["| cost, in layers | layers × fraction |" + "".join(f" {task.name} |" for task in tasks)]
    lines.append("| ---: | --- |" + " ---: |" * len(tasks))
    figures = []
    for row in ROWS:
        for layers, fraction in row:
            cost = layers * (1 + 2 * fraction) / 3
            cells = []
            for task in tasks:
                metric = HEADLINE_METRICS[task.kind]
                before, after, whole = (
                    samples_of({1: (_results(output, *arm, when), (task.name, "trained", arm[0], WIDTH))})[metric]
                    for arm, when in (((layers, fraction), "before"), ((layers, fraction), "after"), (row[0], "after"))
                )
                record = dict(cost=cost, layers=layers, fraction=fraction, task=task.name, metric=metric)
                record |= dict(before=before.mean, after=after.mean)
                cell = f"{before.mean:.3f} → {after.mean:.3f}"
                if (layers, fraction) != row[0]:
                    test = compare(after, whole)
                    record |= dict(difference=test.difference, p=test.p)
                    cell += f" ({test.difference:+.3f}, p {p_text(test.p)})"
                cells.append(cell)
                figures.append(record)
            lines.append(f"| {cost:g} | {layers} × {fraction:g} | " + " | ".join(cells) + " |")
    (output / "figures.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    (output / "table.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _results(output: Path, layers: int, fraction: float, when: str) -> RawResults:
    return read_raw(folder_of(output, layers, fraction) / when / RAW_FILE)


if __name__ == "__main__":
    run_command(main)

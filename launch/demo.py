"""Command: all steps from data to exported models on a laptop, in minutes (`make demo`).

The demo starts from all-MiniLM-L6-v2, a real model of 6 layers × 384 that comes with the dependencies. It collects the
documentation of the installed packages, writes shards, makes the model work at six sizes without labels, fine-tunes on
(summary, body) pairs (SRL), evaluates every size beside the truncated original model, an untrained model and BM25,
exports every size, and answers a question with one export in sentence-transformers.

With --from-scratch it starts from random weights and pre-trains them: tokenizer, shards, SMAE, SRL, and the same last
steps. This takes longer and gives a worse model; it shows how all sizes are pre-trained at once.

Each stage is a command that a user could type, and is printed as it runs; this file only calls them in turn. All
results are in runs/demo: summary.json, evaluation/ (table, figures), export/<size>/.

    python -m launch.demo [--quick] [--from-scratch]
    python -m launch.demo ask "how do I sort an array?"      (after a demo)
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.ground.command import exit_code_of
from data.ground.errors import UserError
from data.ground.options import Parser
from data.ground.ports import free_port
from data.minilm import minilm_folder
from launch.calls import call, ends_all_it_started
from launch.machine import ON_A_CPU, count_gpus
from models.sizes import Size
from trainer.config.load import load_recipe

OUTPUT = Path("runs/demo")
TEXT, SHARDS = OUTPUT / "text", OUTPUT / "shards"
EVALUATION, AS_IT_IS = OUTPUT / "evaluation", OUTPUT / "evaluation_as_it_is"
RESIZED = OUTPUT / "resized"
TASK = "held-out"
DEFAULT_QUESTION = "how do I sort the elements of an array?"
PYTHON = (sys.executable, "-m")

FEW_PACKAGES = ("stdlib", "numpy", "scipy")
MODEL_RECIPE = "launch/recipes/demo_minilm_srl.toml"
PRETRAIN_RECIPE = "launch/recipes/demo_smae.toml"
FINETUNE_RECIPE = "launch/recipes/demo_srl.toml"
# Fewer steps for --from-scratch --quick.
QUICK_PRETRAIN = ("--train.steps=30", "--checkpoint.every_steps=30")
QUICK_FINETUNE = ("--train.steps=150", "--checkpoint.every_steps=150")


@dataclass(frozen=True)
class Amounts:
    """The amounts of data and steps of a demo that starts from the model."""

    queries: int  # held-out queries of the evaluation
    bodies: int  # bodies among which they search
    texts: int  # texts on which the model is resized
    resize_steps: int  # steps of 64 texts
    pair_steps: int  # steps of 64 pairs

    @property
    def operations(self) -> float:
        """The approximate number of multiplications and additions."""
        forward = 2 * 6 * (4 * 384**2 + 2 * 384 * 1536)  # per token: the products of 6 layers; embeddings cost none
        query, body = 14, 58  # mean number of tokens, of at most 32 and 64
        held_out = self.texts / 10
        tokens = body * (self.texts + 3 * held_out)  # the closed form, and three models' agreement
        tokens += 4 * 64 * body * self.resize_steps  # forward and backward, and the teacher
        tokens += 3 * 64 * (query + body) * self.pair_steps
        tokens += 3 * (query * self.queries + body * self.bodies)  # trained, as it is, untrained
        return forward * tokens


WHOLE = Amounts(queries=200, bodies=600, texts=1000, resize_steps=6, pair_steps=16)
QUICK = Amounts(queries=150, bodies=300, texts=500, resize_steps=3, pair_steps=8)
# Measured on the machine that README.md names: seconds that the stages need beside matrix products, the share of the
# speed of one large float32 product that they reach, and the speed-up by bf16 units.
_START_SECONDS = 75.0
_EFFICIENCY = 0.45
_BF16_GAIN = 1.2


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="python -m launch.demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="the short form: less text, fewer steps")
    parser.add_argument("--from-scratch", action="store_true", help="begin with random weights")
    commands = parser.add_subparsers(dest="command")
    asking = commands.add_parser("ask", help="answer a question from the demo's exported model")
    asking.add_argument("question", nargs="?", help="asked for on the terminal if left out")
    asking.add_argument("--size", default="trenta", help="which export answers (default trenta)")
    args = parser.parse_args(argv)
    if args.command == "ask":
        return exit_code_of(lambda: ask(args.question, size=args.size))
    with ends_all_it_started():
        return exit_code_of(lambda: run(quick=args.quick, from_scratch=args.from_scratch))


def run(*, quick: bool, from_scratch: bool) -> int:
    _make_room({"quick": quick, "from_scratch": from_scratch})
    begin, stages = time.monotonic(), 8 if from_scratch else 6
    model = _from_scratch(quick=quick) if from_scratch else _from_model(QUICK if quick else WHOLE)
    _stage(f"{stages - 1}/{stages} export every size")
    results = EVALUATION / "results.json"
    _call([*PYTHON, "trainer.export", "--model", model, "--output", OUTPUT / "export", "--results", results])
    summary = summarise(seconds=time.monotonic() - begin)
    (OUTPUT / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    table = table_of(summary)
    (OUTPUT / "table.md").write_text(table, encoding="utf-8")
    print(f"\n{table}\nfigures in {EVALUATION / 'figures'}, curves: tensorboard --logdir {OUTPUT}", flush=True)
    _stage(f"{stages}/{stages} answer a question with the largest size, loaded by sentence-transformers")
    _call([*PYTHON, "launch.demo", "ask", *([] if sys.stdin.isatty() else [DEFAULT_QUESTION])], interactive=True)
    print(f"\nthe demo took {time.monotonic() - begin:.0f} s", flush=True)
    return 0


def ask(question: str | None, *, size: str) -> int:
    """Print the five passages of documentation nearest to a question."""
    folder = OUTPUT / "export" / size
    if not (folder / "modules.json").is_file():
        raise UserError(f"{folder} holds no exported model; run `make demo` first, or choose a size in {folder.parent}")
    if question is None:
        try:
            question = input("your question: ").strip() or DEFAULT_QUESTION
        except EOFError:
            raise UserError('no question came; give one: python -m launch.demo ask "…"') from None
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder), device="cpu")
    lines = (TEXT / TASK / "corpus.jsonl").read_text(encoding="utf-8").splitlines()
    entries = [json.loads(line) for line in lines]
    passages = model.encode([entry["text"] for entry in entries], batch_size=64, show_progress_bar=False)
    scores = model.similarity(model.encode([question]), passages)[0]
    print(f"\n{question}  ({len(entries):,} passages of documentation, {passages.shape[1]} dimensions)")
    for score, index in zip(*(part.tolist() for part in scores.topk(5))):
        opening = " ".join(entries[index]["text"].split())[:90]
        print(f"  {score:.3f}  {entries[index]['_id']}\n         {opening} …")
    return 0


def _make_room(description: dict[str, bool]) -> None:
    """Make an empty output folder with a file that marks it as the demo's. Only an earlier demo is deleted."""
    if OUTPUT.is_symlink() or (OUTPUT.exists() and not OUTPUT.is_dir()):
        raise UserError(f"{OUTPUT} is a link or a file; move it away")
    if OUTPUT.exists() and any(OUTPUT.iterdir()):
        if not (OUTPUT / "demo.json").is_file():
            raise UserError(f"{OUTPUT} holds files that are not of an earlier demo; move them away")
        shutil.rmtree(OUTPUT)
    OUTPUT.mkdir(parents=True, exist_ok=True)
    (OUTPUT / "demo.json").write_text(json.dumps(description) + "\n", encoding="utf-8")


def _from_model(amounts: Amounts) -> Path:
    """Make an existing model work at every size: without labels, then on pairs."""
    speed = _speed()
    seconds = forecast_seconds(amounts, speed=speed, bf16_units=_has_bf16_units())
    print(f"{speed / 1e9:.0f} GFLOP/s in float32: about {seconds / 60:.0f} minutes on this machine's CPU", flush=True)
    model = minilm_folder()
    _stage("1/6 collect the documentation of installed packages")
    _collect(FEW_PACKAGES, queries=amounts.queries, bodies=amounts.bodies)
    _stage("2/6 make the model work at every size, without labels")
    texts = ["--texts", TEXT / "documents.jsonl", "--limit", amounts.texts, "--max-length", 64]
    steps = [f"--train.steps={amounts.resize_steps}", "--log.every_steps=1"]
    _call([*PYTHON, "trainer.resize", model, *texts, "--output", RESIZED, *steps, *_precision()])
    _stage("3/6 fine-tune all sizes at once on pairs (SRL)")
    _shards("tuples", "pairs", tokenizer=RESIZED / "start")
    _train("trainer.finetune", MODEL_RECIPE, [f"--train.steps={amounts.pair_steps}"])
    _stage("4/6 evaluate every size on held-out documentation")
    _evaluate(RESIZED / "start", "--output", AS_IT_IS)
    return _evaluate_trained(MODEL_RECIPE)


def _from_scratch(*, quick: bool) -> Path:
    """Pre-train and fine-tune random weights at all sizes at once."""
    _stage("1/8 collect the documentation of the installed packages")
    if quick:
        _collect(FEW_PACKAGES, queries=200, bodies=1500)
    else:
        _collect()
    _stage("2/8 train a WordPiece tokenizer on it")
    tokenizer = OUTPUT / "tokenizer"
    documents = TEXT / "documents.jsonl"
    _call([*PYTHON, "data.prepare", "tokenizer", documents, "--vocab-size", "4096", "--output", tokenizer])
    _stage("3/8 write tokenized shards")
    _shards("documents", "documents", tokenizer=tokenizer)
    _shards("tuples", "pairs", tokenizer=tokenizer)
    _stage("4/8 pre-train all sizes at once (SMAE)")
    _train("trainer.pretrain", PRETRAIN_RECIPE, QUICK_PRETRAIN if quick else ())
    _stage("5/8 fine-tune all sizes at once (SRL)")
    _train("trainer.finetune", FINETUNE_RECIPE, QUICK_FINETUNE if quick else ())
    _stage("6/8 evaluate every size on held-out documentation")
    return _evaluate_trained(FINETUNE_RECIPE)


def _speed() -> float:
    """Measure multiplications and additions a second of one float32 product on all cores, for one second."""
    left, right = (np.ones(shape, dtype=np.float32) for shape in ((1024, 384), (384, 1536)))
    fastest, begin = float("inf"), time.perf_counter()
    while time.perf_counter() - begin < 1.0:
        start = time.perf_counter()
        left @ right
        fastest = min(fastest, time.perf_counter() - start)
    return 2 * left.size * right.shape[1] / fastest


def forecast_seconds(amounts: Amounts, *, speed: float, bf16_units: bool) -> float:
    """The predicted seconds of the demo on an otherwise idle machine. speed: as returned by _speed."""
    return _START_SECONDS + amounts.operations / (speed * _EFFICIENCY * (_BF16_GAIN if bf16_units else 1.0))


def _collect(packages: Sequence[str] = (), *, queries: int | None = None, bodies: int | None = None) -> None:
    held_out = [] if queries is None else ["--held-out", queries, "--bodies", bodies]
    named = [part for name in packages for part in ("--package", name)]
    _call([*PYTHON, "data.prepare", "installed-docs", "--output", TEXT, *named, *held_out])


def _shards(kind: str, name: str, *, tokenizer: Path) -> None:
    source = TEXT / f"{name}.jsonl"
    _call([*PYTHON, "data.prepare", kind, source, "--tokenizer", tokenizer, "--output", SHARDS / name])


def _evaluate_trained(recipe: str) -> Path:
    """Evaluate the model of a recipe beside an untrained model and BM25; returns its folder."""
    model = Path(load_recipe(recipe).run.output) / "model"
    _evaluate(model, "--random-init", "--bm25", "--output", EVALUATION)
    return model


def _evaluate(model: Path, *arguments: object) -> None:
    common = ["--beir", TEXT / TASK, "--top-k", "100", *arguments]
    _call([*PYTHON, "trainer.evaluate", "sizes", "--model", model, *common], quiet=True)


def _train(module: str, recipe: str, overrides: Sequence[object]) -> None:
    launcher = Path(sys.executable).with_name("deepspeed")
    # Without a GPU, two ranks run on the CPU, so that the demo is a distributed run on every machine.
    ranks = ["--num_gpus", count_gpus() or 2, "--master_port", free_port()]
    _call([launcher, *ranks, "--module", module, "--config", recipe, *_precision(), *overrides])


def _precision() -> list[str]:
    """The engine settings: float32 on a CPU without bf16 units, which would take many times as long for bf16."""
    name = "zero1" if count_gpus() or _has_bf16_units() else "zero1_float32"
    return [f"--engine.ds_config=ds_configs/{name}.json"]


def _has_bf16_units() -> bool:
    """Whether the CPU has bf16 units: the names of their flags contain "bf16"."""
    cpu = Path("/proc/cpuinfo")
    return cpu.is_file() and "bf16" in cpu.read_text(encoding="utf-8")


def _stage(title: str) -> None:
    print(f"\n== {title}", flush=True)


def _call(command: Sequence[object], *, quiet: bool = False, interactive: bool = False) -> None:
    accelerator = {} if count_gpus() else ON_A_CPU
    call(command, environment=accelerator, quiet=quiet, interactive=interactive)


def _records(evaluation: Path) -> list[dict]:
    return json.loads((evaluation / "results.json").read_text(encoding="utf-8"))["records"]


def _scores(records: Sequence[dict], method: str, metric: str) -> dict[str, float]:
    """The values of a method and metric by size name, in the order of the sizes."""
    return {r["size"]: r["value"] for r in records if (r["method"], r["metric"]) == (method, metric)}


def summarise(*, seconds: float) -> dict:
    """The results of the demo, by size name."""
    records = _records(EVALUATION)
    trained = _scores(records, "trained", "recip_rank_10")
    controls = {}
    if AS_IT_IS.exists():
        controls["as_it_is_mrr10"] = _scores(_records(AS_IT_IS), "trained", "recip_rank_10")
    return {
        "mrr10": trained,
        **controls,
        "untrained_mrr10": _scores(records, "untrained", "recip_rank_10"),
        "bm25_mrr10": _scores(records, "BM25", "recip_rank_10")[""],
        "ndcg10": _scores(records, "trained", "ndcg_cut_10"),
        "recall100": _scores(records, "trained", "recall_100"),
        "sizes": {
            r["size"]: str(Size(r["layers"], r["dim"], r.get("feed_forward", 1.0))) for r in records if r["layers"]
        },
        "seconds": round(seconds, 1),
        "exports": {name: str(OUTPUT / "export" / name) for name in trained},
    }


def table_of(summary: dict) -> str:
    """The summary in Markdown, a row a size."""
    columns = {"MRR@10": "mrr10", "as it is": "as_it_is_mrr10", "untrained": "untrained_mrr10"}
    columns = {heading: key for heading, key in columns.items() if key in summary}
    columns |= {"nDCG@10": "ndcg10", "Recall@100": "recall100"}
    lines = [["size", "layers × dimensions", *columns], ["---"] * (2 + len(columns))]
    for name, size in summary["sizes"].items():
        lines.append([name, size.replace("x", " × "), *(f"{summary[key][name]:.3f}" for key in columns.values())])
    lines.append(["BM25", "", f"{summary['bm25_mrr10']:.3f}", *[""] * (len(columns) - 1)])
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


if __name__ == "__main__":
    sys.exit(main())

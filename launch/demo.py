"""Command: the whole road on a laptop, in minutes (`make demo`).

The documentation of the installed packages → tokenizer → shards → SMAE → SRL → every size evaluated against the
untrained encoder and BM25 → every size exported → one loaded with sentence-transformers to answer a question. Each
stage is the command a user would type, printed as it runs; this file only strings them together. Everything goes to
runs/demo: summary.json, evaluation/ (table, figures), export/<size>/.

    python -m launch.demo [--quick]
    python -m launch.demo ask "how do I sort an array?"      (after a demo)
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from data.command import exit_code_of
from data.errors import UserError
from data.parent_death import adopt_orphans, signal_at_parents_death
from trainer.config import load_recipe

OUTPUT = Path("runs/demo")
PRETRAIN_RECIPE = "launch/recipes/demo_smae.toml"
FINETUNE_RECIPE = "launch/recipes/demo_srl.toml"
DEFAULT_QUESTION = "how do I sort the elements of an array?"
TASK = "held-out"
_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
_PATIENCE_SECONDS = 30.0  # of a command that is asked to end, before it is killed

# The short form: fewer packages and steps, the same road.
QUICK_PACKAGES = ("stdlib", "numpy", "scipy")
QUICK_PRETRAIN = ("--train.steps=30", "--checkpoint.every_steps=30")
QUICK_FINETUNE = ("--train.steps=150", "--checkpoint.every_steps=150")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m launch.demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="the short form: less text, fewer steps")
    commands = parser.add_subparsers(dest="command")
    asking = commands.add_parser("ask", help="answer a question from the demo's exported model")
    asking.add_argument("question", nargs="?", help="typed in when left out")
    asking.add_argument("--size", default="trenta", help="which export answers (default trenta)")
    args = parser.parse_args(argv)
    if args.command == "ask":
        return exit_code_of(lambda: ask(args.question, size=args.size))
    with ends_all_it_started():
        return exit_code_of(lambda: run(quick=args.quick))


def run(*, quick: bool) -> int:
    if OUTPUT.is_symlink() or (OUTPUT.exists() and not OUTPUT.is_dir()):
        raise UserError(f"{OUTPUT} is a link or a file; move it away")
    if OUTPUT.exists() and any(OUTPUT.iterdir()):
        if not (OUTPUT / "demo.json").is_file():
            raise UserError(f"{OUTPUT} holds files that are no demo of ours; move them away")
        shutil.rmtree(OUTPUT)
    OUTPUT.mkdir(parents=True, exist_ok=True)
    (OUTPUT / "demo.json").write_text(json.dumps({"quick": quick}) + "\n", encoding="utf-8")
    begin = time.monotonic()
    text, shards, tokenizer = OUTPUT / "text", OUTPUT / "shards", OUTPUT / "tokenizer"
    python = [sys.executable, "-m"]
    packages = [part for name in QUICK_PACKAGES if quick for part in ("--package", name)]
    held_out = ["--held-out", "200", "--bodies", "1500"] if quick else []
    _stage("1/8 collect the documentation of the installed packages")
    _call([*python, "data.prepare", "installed-docs", "--output", text, *packages, *held_out])
    _stage("2/8 train a WordPiece tokenizer on it")
    documents, pairs = text / "documents.jsonl", text / "pairs.jsonl"
    _call([*python, "data.prepare", "tokenizer", documents, "--vocab-size", "4096", "--output", tokenizer])
    _stage("3/8 write tokenized shards")
    for kind, source, name in (("documents", documents, "documents"), ("tuples", pairs, "pairs")):
        _call([*python, "data.prepare", kind, source, "--tokenizer", tokenizer, "--output", shards / name])
    _stage("4/8 pre-train all sizes at once (SMAE)")
    _train("trainer.pretrain", PRETRAIN_RECIPE, QUICK_PRETRAIN if quick else ())
    _stage("5/8 fine-tune all sizes at once (SRL)")
    _train("trainer.finetune", FINETUNE_RECIPE, QUICK_FINETUNE if quick else ())
    _stage("6/8 evaluate every size on held-out documentation")
    model = Path(load_recipe(FINETUNE_RECIPE).run.output) / "model"
    evaluation = OUTPUT / "evaluation"
    common = ["--random-init", "--bm25", "--top-k", "100", "--output", evaluation]
    _call([*python, "trainer.evaluate", "sizes", "--model", model, "--beir", text / TASK, *common], quiet=True)
    _stage("7/8 export every size")
    _call([*python, "trainer.export", "--model", model, "--output", OUTPUT / "export"])
    seconds = time.monotonic() - begin
    summary = _summary(evaluation / "results.json", seconds=seconds)
    (OUTPUT / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    table = _table(summary)
    (OUTPUT / "table.md").write_text(table, encoding="utf-8")
    print(f"\n{table}\nfigures in {evaluation / 'figures'}, curves: tensorboard --logdir {OUTPUT}", flush=True)
    _stage("8/8 answer a question with the largest size, loaded by sentence-transformers")
    _call([*python, "launch.demo", "ask", *([] if sys.stdin.isatty() else [DEFAULT_QUESTION])], interactive=True)
    print(f"\nthe demo took {time.monotonic() - begin:.0f} s", flush=True)
    return 0


def ask(question: str | None, *, size: str) -> int:
    """Print the five pieces of documentation nearest to a question."""
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
    lines = (OUTPUT / "text" / TASK / "corpus.jsonl").read_text(encoding="utf-8").splitlines()
    entries = [json.loads(line) for line in lines]
    passages = model.encode([entry["text"] for entry in entries], batch_size=64, show_progress_bar=False)
    scores = model.similarity(model.encode([question]), passages)[0]
    print(f"\n{question}  ({len(entries):,} pieces of documentation, {passages.shape[1]} dimensions)")
    for score, index in zip(*(part.tolist() for part in scores.topk(5))):
        opening = " ".join(entries[index]["text"].split())[:90]
        print(f"  {score:.3f}  {entries[index]['_id']}\n         {opening} …")
    return 0


def _train(module: str, recipe: str, overrides: Sequence[str]) -> None:
    launcher = Path(sys.executable).with_name("deepspeed")
    gpus = _count_gpus()
    # Without a GPU, two ranks on the CPU, so that the demo is a distributed run anywhere.
    ranks = ["--num_gpus", str(gpus or 2), "--master_port", str(_free_port())]
    # A CPU without bf16 units (their names in its flags end so) would take many times as long for bf16 as for float32.
    cpu = Path("/proc/cpuinfo")
    fast = gpus > 0 or (cpu.is_file() and "bf16" in cpu.read_text(encoding="utf-8"))
    precision = () if fast else ("--engine.ds_config=ds_configs/zero1_float32.json",)
    _call([launcher, *ranks, "--module", module, "--config", recipe, *precision, *overrides])


def _count_gpus() -> int:
    if shutil.which("nvidia-smi") is None:
        return 0
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return listed.stdout.count("GPU ") if listed.returncode == 0 else 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _stage(title: str) -> None:
    print(f"\n== {title}", flush=True)


class _Signalled(BaseException):
    """One of _SIGNALS came; as an exception, so that whatever goes on is cleared up."""

    def __init__(self, number: int) -> None:
        self.number = number


@contextlib.contextmanager
def ends_all_it_started() -> Iterator[None]:
    """A signal ends the commands below this one too, and then this one, as a shell would say it: 128 and the number."""
    adopt_orphans()

    def end(number: int, _frame: object) -> None:
        raise _Signalled(number)

    before = {number: signal.signal(number, end) for number in _SIGNALS}
    try:
        yield
    except _Signalled as signalled:
        raise SystemExit(128 + signalled.number) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _call(command: Sequence[object], *, quiet: bool = False, interactive: bool = False) -> None:
    """Run one command; end with its exit code if it fails. Whatever ends this process ends all that it started."""
    words = [str(word) for word in command]
    shown = [Path(words[0]).name, *words[1:]]
    print(f"$ {shlex.join(shown)}", flush=True)
    # Said, so that DeepSpeed does not warn that it had to guess.
    accelerator = {} if _count_gpus() else {"DS_ACCELERATOR": "cpu"}
    parent = os.getpid()
    # A signal waits until there is a process to end.
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *_SIGNALS})

    def prepare() -> None:
        signal_at_parents_death(signal.SIGTERM, parent=parent)
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)

    process: subprocess.Popen[bytes] | None = None
    try:
        process = subprocess.Popen(
            words,
            env={**os.environ, **accelerator},
            stdout=subprocess.DEVNULL if quiet else None,
            # A terminal's question needs the terminal; all else gets a process group of its own, ended as one.
            start_new_session=not interactive,
            preexec_fn=prepare,
        )
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        code = process.wait()
    except (KeyboardInterrupt, _Signalled):
        if process is not None:
            _end(process, alone=interactive)
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
    if code:
        print(f"error: this command ended with exit code {code}; its own words above say why", file=sys.stderr)
        raise SystemExit(code if code > 0 else 1)


def _end(process: subprocess.Popen[bytes], *, alone: bool) -> None:
    """End a command and wait until nothing of it is left. alone: without a group of its own."""
    send = os.kill if alone else os.killpg
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *_SIGNALS})
    for number, patience in ((signal.SIGTERM, _PATIENCE_SECONDS), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError):
            send(process.pid, number)
        deadline = None if patience is None else time.monotonic() + patience
        if _all_gone(process.pid if alone else -process.pid, deadline):
            return


def _all_gone(whom: int, deadline: float | None) -> bool:
    """Wait for a child, or below 0 for all of a group, orphans included; False where the deadline comes first."""
    while True:
        try:
            ended, _ = os.waitpid(whom, 0 if deadline is None else os.WNOHANG)
        except ChildProcessError:
            return True
        if ended == 0:
            if deadline is not None and time.monotonic() > deadline:
                return False
            time.sleep(0.05)


def _summary(results: Path, *, seconds: float) -> dict:
    """What the demo found, by size name."""
    records = json.loads(results.read_text(encoding="utf-8"))["records"]

    def scores(method: str, metric: str) -> dict[str, float]:
        return {r["size"]: r["value"] for r in records if (r["method"], r["metric"]) == (method, metric)}

    names = list(scores("trained", "recip_rank_10"))
    sizes = {r["size"]: f"{r['layers']}x{r['dim']}" for r in records if r["layers"]}
    return {
        "mrr10": scores("trained", "recip_rank_10"),
        "untrained_mrr10": scores("untrained", "recip_rank_10"),
        "bm25_mrr10": scores("BM25", "recip_rank_10")[""],
        "ndcg10": scores("trained", "ndcg_cut_10"),
        "recall100": scores("trained", "recall_100"),
        "sizes": sizes,
        "seconds": round(seconds, 1),
        "exports": {name: str(OUTPUT / "export" / name) for name in names},
    }


def _table(summary: dict) -> str:
    head = "| size | layers × dimensions | MRR@10 | nDCG@10 | Recall@100 | MRR@10 untrained |\n"
    lines = [head, "| --- | --- | --- | --- | --- | --- |\n"]
    for name, value in summary["mrr10"].items():
        others = (summary["ndcg10"][name], summary["recall100"][name], summary["untrained_mrr10"][name])
        numbers = " | ".join(f"{number:.3f}" for number in (value, *others))
        lines.append(f"| {name} | {summary['sizes'][name].replace('x', ' × ')} | {numbers} |\n")
    lines.append(f"| BM25 | | {summary['bm25_mrr10']:.3f} | | | |\n")
    return "".join(lines)


if __name__ == "__main__":
    sys.exit(main())

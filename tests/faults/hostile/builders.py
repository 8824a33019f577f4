"""The parts of cases: files of every format, recipes, commands, small disks, servers, and earlier commands.

The functions that need the case's own place (`ran`, `small_disk`, `serve`) know it from `keep`.
"""

from __future__ import annotations

import gzip
import http.server
import json
import os
import socket
import struct
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w
import zstandard

from tests.faults.hostile.case import Command
from tests.faults.hostile.process import ROOT, Keeper, run_commands
from tests.faults.hostile.rights import SmallDisk, mount_small_disk
from tests.faults.hostile.verdict import Ended

if TYPE_CHECKING:
    from tests.faults.hostile.assets import Assets

LADDER = [[1, 16], [2, 32]]
MODEL = {
    "model_type": "bert",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 80,
    "initializer_range": 0.15,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
STEPS = 8
SAVE_EVERY_STEPS = 2

Values = dict[str, dict[str, Any]]

_keeper: Keeper | None = None


def keep(keeper: Keeper) -> None:
    """Set the keeper for the functions below; called once in the process that keeps a case."""
    global _keeper
    _keeper = keeper


def _kept() -> Keeper:
    assert _keeper is not None, "call this in a case's build function"
    return _keeper


# -------------------------------------------------------------------------------------------------------------- files


def write(path: Path, content: str | bytes) -> Path:
    """Write a file, and make the folders above it; returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def jsonl(rows: Iterable[Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def lines(number: int, *, prefix: str = "the cat saw the dog") -> str:
    """JSON lines of `number` different documents."""
    return jsonl({"text": f"{prefix} {index}"} for index in range(number))


def zst(content: str | bytes) -> bytes:
    return zstandard.compress(content.encode() if isinstance(content, str) else content)


def gz(content: str | bytes) -> bytes:
    return gzip.compress(content.encode() if isinstance(content, str) else content)


def deep(levels: int = 100_000) -> str:
    """JSON that is nested deeper than any reader's recursion limit."""
    return "[" * levels + "]" * levels


def change_json(path: Path, change: Callable[[Any], Any]) -> None:
    """Change the value in a JSON file; `change` mutates it, or returns another value."""
    value = json.loads(path.read_bytes())
    changed = change(value)
    path.write_text(json.dumps(value if changed is None else changed))


def beir(
    folder: Path,
    *,
    corpus: str | bytes | None = None,
    queries: str | bytes | None = None,
    qrels: str | bytes | None = None,
    split: str = "test",
) -> Path:
    """A BEIR folder of three queries and six documents; the content of any of its files may be given."""
    documents = [{"_id": f"d{i}", "title": "", "text": f"{word} and milk"} for i, word in enumerate(_WORDS)]
    asked = [{"_id": f"q{i}", "text": f"what is {word}"} for i, word in enumerate(_WORDS[:3])]
    judged = "query-id\tcorpus-id\tscore\n" + "".join(f"q{i}\td{i}\t1\n" for i in range(3))
    write(folder / "corpus.jsonl", jsonl(documents) if corpus is None else corpus)
    write(folder / "queries.jsonl", jsonl(asked) if queries is None else queries)
    write(folder / "qrels" / f"{split}.tsv", judged if qrels is None else qrels)
    return folder


_WORDS = ("coffee", "water", "bread", "house", "river", "stone")


def change_tensors(file: Path, change: Callable[[dict[str, Any]], dict[str, Any] | None]) -> None:
    """Change the torch tensors of a safetensors file; `change` mutates them, or returns others."""
    from safetensors.torch import load_file, save_file

    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    save_file(change(tensors) or tensors, file, metadata={"format": "pt"})


def safetensors_header(size: int) -> bytes:
    """The first bytes of a safetensors file, which say that its header has `size` bytes."""
    return struct.pack("<Q", size)


# ----------------------------------------------------------------------------------------------------------- commands


def prepare(assets: Assets, kind: str, *arguments: str, output: str = "out", processes: int = 1) -> Command:
    """A data.prepare command. `arguments`: inputs and further options."""
    words = (kind, *arguments, "--output", output, "--tokenizer", str(assets.tokenizer), "--processes", str(processes))
    return Command("data.prepare", words, outputs=(output,))


TUPLE_LENGTHS = {"query_max_length": 16, "passage_max_length": 32, "num_negatives": 1}


def recipe_values(shards: Path | str, task: str = "masked", **sections: Mapping[str, Any]) -> Values:
    """A tiny recipe as nested tables, with the run folder `run`; the keys in `sections` override it one by one."""
    values: Values = {
        "run": {"seed": 7, "output": "run"},
        "model": {"config": dict(MODEL), "ladder": LADDER},
        "data": {
            "shards": [str(shards)],
            "num_workers": 0,
            # The lengths depend on the task, because a key that the objective does not read is refused.
            **({"max_length": 32} if task in ("masked", "distill") else TUPLE_LENGTHS),
        },
        "objective": {"name": task},
        "optim": {"lr": 0.01, "schedule": "constant", "warmup_ratio": 0.0},
        "train": {"steps": STEPS, "global_batch_size": 12, "micro_batch_size": 6},
        "engine": {"ds_config": str(ROOT / "ds_configs" / "zero1_float32.json")},
        "checkpoint": {"every_steps": SAVE_EVERY_STEPS, "keep": 2},
        "log": {"every_steps": 1, "tensorboard": False},
    }
    for section, table in sections.items():
        values[section] = {**values.get(section, {}), **table}
    return values


def train(folder: Path, values: Values, *overrides: str, name: str = "recipe.toml") -> Command:
    """Write the recipe, and return the command that trains by it. `overrides`: --section.key=value, --resume auto."""
    write(folder / name, tomli_w.dumps(values))
    command = {"masked": "pretrain", "distill": "distill"}.get(values["objective"]["name"], "finetune")
    return Command(f"trainer.{command}", ("--config", name, *overrides), outputs=(str(values["run"]["output"]),))


def ranks(command: Command, *others: Command, world_size: int = 2, one_host: bool = False) -> list[Command]:
    """The commands of one job's ranks: `command` is rank 0, `others` are the next ranks, and the last is repeated.

    one_host: they are local ranks 0, 1, …; otherwise each is the only rank of its host.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    every = [command, *others]
    every += [every[-1]] * (world_size - len(every))
    started = []
    for rank, each in enumerate(every):
        place = {
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_RANK": str(rank if one_host else 0),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        started.append(each.but(environment={**each.environment, **place}))
    return started


def evaluate(model: Path | str, *arguments: str, outputs: Sequence[str] = ()) -> Command:
    """A command `trainer.evaluate sizes` for one model."""
    return Command("trainer.evaluate", ("sizes", "--model", str(model), *arguments), outputs=tuple(outputs))


def export(model: Path | str, *arguments: str, output: str = "export") -> Command:
    return Command("trainer.export", ("--model", str(model), "--output", output, *arguments), outputs=(output,))


def soup(*models: str, output: str = "soup", weights: Sequence[str] = ()) -> Command:
    more = ("--weights", *weights) if weights else ()
    return Command("trainer.soup", ("--models", *models, "--output", output, *more), outputs=(output,))


def mine(model: Path | str, *arguments: str, output: str = "mined") -> Command:
    words = (*arguments, "--model", str(model), "--output", output)
    return Command("trainer.mine_negatives", words, outputs=(output,))


# ------------------------------------------------------------------------------------------------- a case's own place


def ran(command: Command, *others: Command, code: int | None = 0) -> Ended:
    """Run an earlier command of the case, which must end with `code` (None: any); returns how it ended."""
    ended, survivors = run_commands(_kept(), [command, *others])
    assert code is None or ended[0].code == code, f"{command.module} ended with {ended[0].code}: {ended[0].err[-600:]}"
    assert not survivors, f"{command.module} left {survivors}"
    return ended[0]


def small_disk(path: Path, kib: int) -> SmallDisk:
    """Mount a file system of `kib` KiB at the folder until the case ends. Raises Skip if the machine cannot."""
    return mount_small_disk(path, kib)


Answer = Callable[[http.server.BaseHTTPRequestHandler], bool]


def serve(folder: Path, answer: Answer | None = None) -> str:
    """Start an HTTP server of the folder's files that runs until the case ends; returns its address.

    answer: called first at every GET; it either answers and returns True, or returns False.
    """

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments, directory=str(folder))

        def do_GET(self) -> None:
            if answer is None or not answer(self):
                super().do_GET()

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    port = server.server_address[1]
    child = os.fork()
    if child == 0:
        try:
            silence = os.open(os.devnull, os.O_RDWR)
            for handle in (0, 1, 2):
                os.dup2(silence, handle)
            server.serve_forever()
        finally:
            os._exit(0)
    server.socket.close()
    _kept().helpers.append(child)
    return f"http://127.0.0.1:{port}"


def answer_with(handler: http.server.BaseHTTPRequestHandler, code: int, body: bytes = b"", **headers: str) -> bool:
    """Send a whole answer from a server; returns True, as an Answer must."""
    handler.send_response(code)
    for name, value in {"Content-Length": str(len(body)), **headers}.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    handler.wfile.write(body)
    return True


def wait_for(happened: Callable[[], bool], *, seconds: float = 60.0) -> None:
    """Wait, in `meanwhile`, until for example a file exists or a line is logged."""
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, f"it did not happen within {seconds:.0f} s"
        time.sleep(0.005)

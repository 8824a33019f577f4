"""The run that is killed: a tiny masked model over one epoch of made-up documents, and one start of it on two ranks.

The run has exactly one epoch with a short last batch, so that every document must be seen exactly once. It has dropout,
one loader worker per rank, and a checkpoint every few steps. A start is the real `deepspeed` command in a session of
its own. Every process below it has MARK in its environment, so orphans can be found as well.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import tomli_w

from data.shards.writer import SplitWriter, finish_folder
from tests import ROOT
from tests.launcher import environment_of_ranks, launcher_command
from tests.trainer.support import float32_ds_config, recipe_values, with_dropout

RANKS = 2
SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = 195
LADDER = [[1, 16], [2, 32]]
GLOBAL_BATCH_SIZE = 12
STEPS = 18
DOCUMENTS = GLOBAL_BATCH_SIZE * STEPS - 5
SAVE_EVERY_STEPS = 3
MARK = "BARISTA_KILL_MATRIX"
# The processes that may be killed.
TARGETS = ("deepspeed", "launch", *(f"rank {rank}" for rank in range(RANKS)))


def write_inputs(folder: Path) -> None:
    """Write shards, and a recipe and a ds_config for each ZeRO stage."""
    from transformers import BertTokenizerFast

    shards = folder / "shards"
    vocabulary = [*SPECIALS, *(f"w{number}" for number in range(WORDS))]
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    tokenizer = BertTokenizerFast(str(folder / "vocab.txt"))
    rng = np.random.default_rng(1)
    with SplitWriter(shards, 0, kind="documents", vocabulary_size=len(tokenizer), chunk_samples=32) as writer:
        for _ in range(DOCUMENTS):
            writer.add_document(rng.integers(len(SPECIALS), len(vocabulary), size=rng.integers(4, 40)))
    finish_folder(shards, 1, tokenizer=tokenizer)
    values = with_dropout(
        recipe_values(
            shards,
            objective={"name": "masked"},
            data={"num_workers": 1},
            optim={"lr": 1e-3, "eps": 1e-8, "schedule": "cosine", "warmup_ratio": 0.2},
            train={"steps": 0, "epochs": 1.0, "global_batch_size": GLOBAL_BATCH_SIZE},
            checkpoint={"every_steps": SAVE_EVERY_STEPS},
            log={"samples": True},
        )
    )
    values["model"]["config"] |= {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64}
    values["model"]["ladder"] = LADDER
    for stage in range(4):
        values["engine"] = {"ds_config": str(float32_ds_config(folder, stage))}
        (folder / f"zero{stage}.toml").write_text(tomli_w.dumps(values))


@dataclass(frozen=True)
class Start:
    """One `deepspeed` command and the processes that it started."""

    process: subprocess.Popen[bytes]
    mark: str
    log: Path
    began: float  # seconds since the epoch

    def found(self, target: str) -> psutil.Process | None:
        """The living process of `target`, a name in TARGETS; None if there is none."""
        try:
            deepspeed = psutil.Process(self.process.pid)
            if target == "deepspeed":
                return deepspeed
            launch = next(
                (each for each in deepspeed.children() if "deepspeed.launcher.launch" in each.cmdline()), None
            )
            if launch is None or target == "launch":
                return launch
            argument = f"--local_rank={target.removeprefix('rank ')}"
            return next((each for each in launch.children() if argument in each.cmdline()), None)
        except psutil.Error:
            return None


def start(inputs: Path, run: Path, stage: int, *, mark: str) -> Start:
    """Start or resume a run of the ZeRO stage `stage` in `run`; its output goes into a file beside the folder."""
    recipe = ["--config", str(inputs / f"zero{stage}.toml"), f"--run.output={run}", "--resume", "auto"]
    command = launcher_command("trainer.pretrain", *recipe, ranks=RANKS)
    environment = {**environment_of_ranks(), MARK: mark}
    log = run.with_name(f"{run.name}.log")
    with log.open("ab") as file:
        began = time.time()
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=file, start_new_session=True)
    return Start(process, mark, log, began)


def processes(mark: str) -> Iterator[psutil.Process]:
    """All living processes of a run's starts: launchers, ranks, loader workers, orphans."""
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                yield process
        except psutil.Error:
            continue

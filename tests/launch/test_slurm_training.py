"""Real training under real Slurm: a chain of all stages on two virtual nodes, then the same run disturbed.

The disturbed runs must end with the undisturbed run's losses, to the last bit. Needs what test_slurm_jobs.py needs.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import tomli_w

from tests import ROOT
from tests.launch.slurm_cluster import Cluster, cluster, until, why_not

STEPS = 12
pytestmark = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")

MODEL = {
    "pooling": "cls",
    "ladder": [[1, 16], [2, 32]],
    "config": {
        "model_type": "bert",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 64,
    },
}
SMALL = {
    "log": {"every_steps": 1, "tensorboard": False},
    "engine": {"ds_config": "ds_configs/zero1_float32.json"},
    "optim": {"lr": 1e-2, "schedule": "linear"},
}


@dataclass(frozen=True)
class Setting:
    """The cluster, and a chain that ran on it: job numbers by stage, in order."""

    slurm: Cluster
    folder: Path
    jobs: dict[str, str]

    @property
    def pretrain_recipe(self) -> Path:
        return self.folder / "smae.toml"

    @property
    def curve(self) -> dict[int, float]:
        return losses(self.folder / "smae")


@pytest.fixture(scope="module")
def setting(launcher, tmp_path_factory, docstrings, tiny_tokenizer_path):
    folder = tmp_path_factory.mktemp("chain")
    chain = write_chain(folder, docstrings, tiny_tokenizer_path)
    with cluster(folder / "slurm") as slurm:
        done = submit(slurm, "--chain", str(chain), "--venv", sys.prefix, "--env=GLOO_SOCKET_IFNAME=lo")
        numbers = [line.split()[4].rstrip(",") for line in done.stderr.splitlines() if line.startswith("# submitted")]
        jobs = dict(zip(("prepare", "pretrain", "finetune", "evaluate"), numbers, strict=True))
        for number in (f"{jobs['prepare']}_2", *numbers[1:]):
            job = slurm.wait_for(number, "COMPLETED", "FAILED", "CANCELLED", seconds=400)
            assert job["JobState"] == "COMPLETED", "\n".join(
                [json.dumps(job), *(path.read_text() for path in folder.glob("**/slurm-*.log"))]
            )
        yield Setting(slurm, folder, jobs)


def write_chain(folder: Path, docstrings: list[str], tokenizer: Path) -> Path:
    """Two files of documents for an array of two tasks, pairs for a third, recipes, a BEIR folder, the chain."""
    pairs = [text.split("\n\n", 1) for text in docstrings if "\n\n" in text][:120]
    for name, rows in (
        ("documents-a", [{"text": text} for text in docstrings[:150]]),
        ("documents-b", [{"text": text} for text in docstrings[150:300]]),
        ("pairs", [{"query": query, "positive": body} for query, body in pairs]),
        ("beir/corpus", [{"_id": f"d{k}", "title": "", "text": body} for k, (_, body) in enumerate(pairs)]),
        ("beir/queries", [{"_id": f"q{k}", "text": query} for k, (query, _) in enumerate(pairs[:20])]),
    ):
        path = folder / f"{name}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "beir/qrels").mkdir()
    judged = "".join(f"q{k}\td{k}\t1\n" for k in range(20))
    (folder / "beir/qrels/test.tsv").write_text("query-id\tcorpus-id\tscore\n" + judged)
    train = {"steps": STEPS, "global_batch_size": 8, "micro_batch_size": 4}
    data = {"max_length": 32, "query_max_length": 16, "passage_max_length": 32, "num_workers": 0}
    smae = {
        "run": {"output": str(folder / "smae")},
        "model": MODEL,
        "data": {**data, "shards": [str(folder / "shards/documents")]},
        "objective": {"name": "masked"},
        "train": train,
        "checkpoint": {"every_steps": 4},
        **SMALL,
    }
    srl = {
        "run": {"output": str(folder / "srl")},
        "model": {"source": str(folder / "smae/model"), "ladder": MODEL["ladder"]},
        "data": {**data, "shards": [str(folder / "shards/pairs")]},
        "objective": {"name": "contrastive"},
        "train": {**train, "steps": 4},
        **SMALL,
    }
    for name, recipe in (("smae", smae), ("srl", srl)):
        (folder / f"{name}.toml").write_text(tomli_w.dumps(recipe))
    arguments = ["--tokenizer", str(tokenizer)]
    documents = {
        "kind": "documents",
        "inputs": [str(folder / "documents-*.jsonl")],
        "output": str(folder / "shards/documents"),
        "parts": 2,
        "arguments": arguments,
    }
    tuples = {
        "kind": "tuples",
        "inputs": [str(folder / "pairs.jsonl")],
        "output": str(folder / "shards/pairs"),
        "arguments": arguments,
    }
    results = ["--beir", str(folder / "beir"), "--output", str(folder / "results")]
    stages = [
        {"task": "prepare", "corpora": [documents, tuples]},
        {"task": "train", "recipe": str(folder / "smae.toml"), "options": {"nodes": 2}},
        {"task": "train", "recipe": str(folder / "srl.toml"), "options": {"ranks_per_node": 2}},
        {"task": "evaluate", "arguments": results, "export": str(folder / "export")},
    ]
    chain = folder / "chain.toml"
    chain.write_text(tomli_w.dumps({"output": str(folder / "jobs"), "options": {"gpus_per_node": 0}, "stages": stages}))
    return chain


def submit(slurm: Cluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "launch.submit", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=slurm.environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done


def submit_again(setting: Setting, name: str, *options: str) -> tuple[str, Path]:
    """The chain's pre-training once more, into another folder."""
    run = setting.folder / name
    parts = json.dumps([str(setting.folder / f"shards/documents/part-{part:03d}") for part in range(2)])
    arguments = [str(setting.pretrain_recipe), "--nodes=2", "--gpus-per-node=0", "--venv", sys.prefix]
    arguments += ["--env=GLOO_SOCKET_IFNAME=lo", f"--run.output={run}", f"--data.shards={parts}", *options]
    submit(setting.slurm, *arguments)
    return json.loads((run / "job/001/environment.json").read_text())["job"], run


def losses(run: Path) -> dict[int, float]:
    """By step. A step that was taken twice, after a crash, must have the same loss both times."""
    found: dict[int, float] = {}
    metrics = run / "metrics.jsonl"
    for line in metrics.read_text().splitlines() if metrics.exists() else ():
        row = json.loads(line)
        if "loss" in row:
            assert found.setdefault(row["step"], row["loss"]) == row["loss"]
    return found


def logs_of(run: Path) -> str:
    return "".join(path.read_text() for path in sorted(run.glob("job/*/**/*.log")))


def ranks_of(run: Path) -> list[int]:
    """Process numbers of the ranks that train into a folder on this machine."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"trainer.pretrain" in words and b"launch.node" not in words and f"{run}/job".encode() in b" ".join(words):
            found.append(int(path.parent.name))
    return found


def test_a_chain_of_all_stages(setting):
    """The fixture has waited for its jobs, each of which was COMPLETED."""
    ends = [setting.slurm.job(number) for number in setting.jobs.values()]
    assert all(before["EndTime"] <= after["StartTime"] for before, after in itertools.pairwise(ends))
    run = setting.folder / "smae"
    assert sorted(setting.curve) == list(range(1, STEPS + 1))
    assert {path.name for path in (run / "job/001/logs/attempt-000").glob("rank-*.log")} == {
        "rank-00000.log",
        "rank-00001.log",
    }
    assert json.loads((run / "environment.json").read_text())["world_size"] == 2
    assert json.loads((run / "job/001/environment.json").read_text())["git"]["commit"]
    assert (setting.folder / "results/results.json").is_file()
    assert len(list(setting.folder.glob("export/*/modules.json"))) >= 2


def test_the_time_limit_requeues_and_the_losses_are_the_undisturbed_ones(setting):
    """Slurm itself sends the signal. The ranks are held until it has, or they might be done before."""
    number, run = submit_again(setting, "limited", "--time=2", "--signal-seconds=60")
    until(lambda: len(losses(run)) >= 2, what=lambda: logs_of(run))
    held = ranks_of(run)
    assert len(held) == 2
    for pid in held:
        os.kill(pid, signal.SIGSTOP)
    until(lambda: "SIGUSR1: the ranks are asked to stop" in logs_of(run), what=lambda: logs_of(run))
    for pid in held:
        os.kill(pid, signal.SIGCONT)
    job = setting.slurm.wait_for(number, "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
    assert job["JobState"] == "COMPLETED", logs_of(run)
    assert int(job["Restarts"]) >= 1
    assert losses(run) == setting.curve
    # A control: losses differ from step to step, so that a step lost or taken twice would show.
    assert len(set(setting.curve.values())) == STEPS


def test_a_node_that_dies(setting):
    """Its processes and daemon end at once. Slurm notices and requeues, and the run goes on from its checkpoint."""
    number, run = submit_again(setting, "died")
    until(lambda: (run / "checkpoints/latest").exists(), what=lambda: logs_of(run))
    setting.slurm.kill_node(setting.slurm.nodes[1])
    assert not (run / "DONE").exists()
    until(lambda: setting.slurm.job(number)["Restarts"] == "1", what=lambda: logs_of(run))
    # First its processes are cleaned up: COMPLETING.
    until(lambda: setting.slurm.job(number)["JobState"] == "PENDING", what=lambda: logs_of(run))
    setting.slurm.start_node(setting.slurm.nodes[1])
    job = setting.slurm.wait_for(number, "COMPLETED", "FAILED", "CANCELLED", seconds=240)
    assert job["JobState"] == "COMPLETED", logs_of(run)
    assert int(job["Restarts"]) >= 1
    assert losses(run) == setting.curve

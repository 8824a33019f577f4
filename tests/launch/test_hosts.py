"""Two hosts without Slurm: the `deepspeed` launcher with a hostfile, one command a host, is one plain process.

The hosts are network namespaces (tests/launch/hosts.py) with three ranks between them, two on the first. That the
parameters are right is not enough: a launcher that does not find the other host trains alone, and rightly. So what
crossed between the hosts is checked too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch

from launch.qualify import main as qualify
from tests.launch.hosts import Host, Unavailable, deepspeed_commands, made, remote_shells, run_on_all
from tests.launcher import environment_of_ranks
from tests.reference import first_parameters, train_naively
from tests.run_folder import weights
from tests.trainer.support import float32_ds_config, recipe_values

PARAMETER_TOLERANCE = 1e-5  # absolute, after steps that move parameters by up to 0.1
STEPS = 2
PORT = 29500  # the namespaces' own


@pytest.fixture(scope="module")
def hosts(launcher: None) -> Iterator[list[Host]]:
    try:
        with made(2) as both:
            yield both
    except Unavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="module")
def hostfile(tmp_path_factory: pytest.TempPathFactory, hosts: list[Host]) -> Path:
    path = tmp_path_factory.mktemp("hosts") / "hostfile"
    path.write_text(f"{hosts[0].name} slots=2\n{hosts[1].name} slots=1\n")
    return path


def run_on(hosts: list[Host], hostfile: Path, *words: str) -> list[int]:
    """Run a module on all hosts; returns the bytes that each sent."""
    before = [host.bytes_sent() for host in hosts]
    for done in run_on_all(hosts, deepspeed_commands(hosts, hostfile, words, port=PORT)):
        assert done.returncode == 0, done.stdout[-8000:]
    return [host.bytes_sent() - start for host, start in zip(hosts, before)]


def largest_difference(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    assert got.keys() == want.keys()
    return max(float((got[name] - value).abs().max()) for name, value in want.items())


@pytest.fixture(scope="module")
def fine_tuning(tuple_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("fine_tuning")
    return recipe_values(
        tuple_shards,
        run={"output": str(folder / "run")},
        train={"steps": STEPS},
        engine={"ds_config": str(float32_ds_config(folder, 2))},
    )


def test_a_training_of_two_hosts_is_that_of_one_process(
    fine_tuning: dict[str, Any], hosts: list[Host], hostfile: Path, tmp_path: Path
) -> None:
    """The real command, from the recipe to the model that it writes."""
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(tomli_w.dumps(fine_tuning))
    sent = run_on(hosts, hostfile, "trainer.finetune", "--config", str(recipe))
    run = Path(fine_tuning["run"]["output"])
    assert (run / "DONE").is_file()
    assert json.loads((run / "environment.json").read_text())["world_size"] == 3
    want = train_naively(fine_tuning, steps=STEPS)[-1]["parameters"]
    got = {f"backbone.{name}": value for name, value in weights(run).items()}
    assert largest_difference(got, want) < PARAMETER_TOLERANCE
    assert largest_difference(got, first_parameters(fine_tuning)) > 1e3 * PARAMETER_TOLERANCE
    # Each host sends at least its share of every step's gradients, in float32.
    size = 4 * sum(value.numel() for value in want.values())
    assert all(STEPS * size / 2 < each < 40 * STEPS * size for each in sent), (sent, size)


def test_the_hosts_of_a_hostfile_qualify_together(
    hosts: list[Host], hostfile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real command: steps of SMAE and SRL at every ZeRO stage on both hosts are those of one process.

    Its launcher reaches the hosts through scripts in place of ssh and pdsh.
    """
    remote_shells(hosts, tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{environment_of_ranks()['PATH']}")
    before = [host.bytes_sent() for host in hosts]
    words = ["--hostfile", str(hostfile), "--quick", "--only", "ranks", "--folder", str(tmp_path / "qualify")]
    assert qualify([*words, "--json", str(tmp_path / "lines.json")]) == 0
    record = json.loads((tmp_path / "lines.json").read_text())
    asked = [line["asked"] for line in record["lines"] if line["verdict"] == "passed"]
    assert len(asked) == 8 and all("3 ranks" in each for each in asked), record["lines"]
    assert all(host.bytes_sent() - start > 1e6 for host, start in zip(hosts, before))

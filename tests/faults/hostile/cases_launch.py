"""launch.submit, status, node, doctor, plan: odd names, run folders that are damaged, environments."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import tomli_w

from tests.faults.hostile.assets import Assets
from tests.faults.hostile.builders import deep, recipe_values, write
from tests.faults.hostile.case import Command, case, family, row
from tests.faults.hostile.verdict import check, done, either, misused, refused

SECRET = "ownKeyOfTheJob"
SBATCH = "#!/bin/sh\necho 4242\n"


def submit(folder: Path, assets: Assets, *options: str, output: str = "runs/run", dry_run: bool = True) -> Command:
    """A submission of a tiny recipe, by default with --dry-run."""
    write(folder / "r.toml", tomli_w.dumps(recipe_values(assets.documents, run={"output": output})))
    words = ("r.toml", "--gpus-per-node", "0", "--time", "1:00:00", *options, *(("--dry-run",) if dry_run else ()))
    return Command("launch.submit", words, outputs=() if dry_run else ("runs",))


@family(
    "launch/submit-output",
    [
        row("with-a-quote", "runs/a'b"),
        row("with-a-newline", "runs/a\ntouch PWNED\n"),
        row("of-300-letters", "runs/" + "x" * 300, cause=25),
        row("begins-with-a-hyphen", "--wrap=x", cause=26),
    ],
    refused("run.output"),
)
def _(folder: Path, assets: Assets, output: str) -> Command:
    return submit(folder, assets, output=output)


@family(
    "launch/submit-sbatch",
    [row("short-nodes", "-N4", quick=True), row("short-array", "-a0-3"), row("long-nodes", "--nodes=4", cause="own")],
    refused("--sbatch"),
    cause=26,
)
def _(folder: Path, assets: Assets, option: str) -> Command:
    return submit(folder, assets, f"--sbatch={option}")


@case("launch/submit-with-a-secret-in-env", done(), secrets=(SECRET,), cause=15, quick=True)
def _(folder: Path, assets: Assets) -> Command:
    """By a stand-in for sbatch; the secret must be in nothing that others can read."""
    for name, text in {"sbatch": SBATCH, "squeue": "#!/bin/sh\n"}.items():
        write(folder / "bin" / name, text).chmod(0o755)
    command = submit(folder, assets, "--env", f"WANDB_API_KEY={SECRET}", dry_run=False)
    return command.but(environment={"PATH": f"{folder / 'bin'}:/usr/bin:/bin"})


NO_ESCAPES = check("no control signs on the terminal", lambda outcome: "\x1b" not in outcome.first.out)


@family(
    "launch/status",
    [
        row("good", lambda run: None, expect=done()),
        row("metrics-deep", lambda run: write(run / "metrics.jsonl", deep()), cause=25),
        row("loss-a-text", lambda run: write(run / "metrics.jsonl", '{"step": 1, "loss": "x"}\n'), cause=25),
        row(
            "epoch-a-text", lambda run: write(run / "metrics.jsonl", '{"step": 1, "loss": 1, "epoch": "x"}\n'), cause=25
        ),
        row("checkpoint-of-no-number", lambda run: (run / "checkpoints" / "step_²").mkdir(), cause=25),
        row(
            "escape-codes",
            lambda run: write(run / "STOPPED", '{"step": 4, "reason": "\\u001b[2J\\u001b]0;x\\u0007"}'),
            expect=(done(), NO_ESCAPES),
            cause=26,
        ),
    ],
    either(done(), refused("run/")),
)
def _(folder: Path, assets: Assets, damage: Callable[[Path], object]) -> Command:
    damage(assets.copy(assets.stopped_run, folder / "run"))
    return Command("launch.status", ("run",))


@family(
    "launch/node",
    [
        row("no-slurm", {}, "true", expect=refused("SLURM_NODEID")),
        row("node-a-text", {"SLURM_NODEID": "x"}, "true", expect=refused("SLURM_NODEID"), cause=25),
        row("command-that-is-not-there", {"SLURM_NODEID": "0"}, "/no/such", expect=refused("/no/such"), cause=25),
    ],
)
def _(folder: Path, assets: Assets, given: dict[str, str], program: str) -> Command:
    place = {"SLURM_NNODES": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"} if given else {}
    words = ("--ranks", "1", "--logs", "logs", "--", program)
    return Command("launch.node", words, outputs=("logs",), environment={**place, **given})


@case("launch/plan-nodes-of-no-number", misused("--nodes"))
def _(folder: Path, assets: Assets) -> Command:
    write(folder / "r.toml", tomli_w.dumps(recipe_values(assets.documents)))
    return Command("launch.plan", ("r.toml", "--vocabulary", "192", "--nodes", "²"))


@case("launch/doctor-world-size-a-text", refused("WORLD_SIZE"), cause=25)
def _(folder: Path, assets: Assets) -> Command:
    environment = {"RANK": "0", "WORLD_SIZE": "x", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    return Command("launch.doctor", ("--folder", "runs"), outputs=("runs",), environment=environment)

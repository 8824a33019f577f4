"""Training runs: ranks that disagree, checkpoints, resuming, run folders that are full or odd, recipes, ds_config."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.faults.hostile.assets import Assets
from tests.faults.hostile.builders import (
    change_json,
    deep,
    lines,
    prepare,
    ran,
    ranks,
    recipe_values,
    small_disk,
    train,
    wait_for,
    write,
)
from tests.faults.hostile.case import Command, case, family, row
from tests.faults.hostile.verdict import done, done_and_said, either, kept, refused, same_result_as

WHOLE = "assets/masked/run"


def resume(folder: Path, assets: Assets, *overrides: str, how: str = "auto") -> Command:
    return train(folder, recipe_values(assets.documents), "--resume", how, *overrides)


def stopped(folder: Path, assets: Assets) -> Path:
    """A run stopped at step 4, at `run`; its newest checkpoint."""
    return assets.copy(assets.stopped_run, folder / "run") / "checkpoints" / "step_00000004"


# ----------------------------------------------------------------------------------------------------- several ranks


@case("runs/two-ranks", done(), seconds=120)
def _(folder: Path, assets: Assets) -> list[Command]:
    return ranks(train(folder, recipe_values(assets.documents)))


@case("runs/ranks-read-other-shards", refused("shards"), cause=3, quick=True, seconds=120)
def _(folder: Path, assets: Assets) -> list[Command]:
    write(folder / "other.jsonl", lines(211))
    ran(prepare(assets, "documents", "other.jsonl", output="other"))
    first = train(folder, recipe_values(assets.documents))
    return ranks(first, train(folder, recipe_values("other"), name="second.toml"))


@case("runs/ranks-have-other-seeds", refused("run.seed"), cause=3, seconds=120)
def _(folder: Path, assets: Assets) -> list[Command]:
    command = train(folder, recipe_values(assets.documents))
    return ranks(command, command.but("--run.seed=8"))


# -------------------------------------------------------------------------------------------- checkpoints, resuming


@case("runs/resumed", done_and_said("going on at step 4 of 8"), same_result_as(WHOLE, "run"))
def _(folder: Path, assets: Assets) -> Command:
    stopped(folder, assets)
    return resume(folder, assets)


def of_format_2(checkpoint: Path) -> None:
    for each in (checkpoint, checkpoint.with_name("step_00000002")):
        change_json(each / "manifest.json", lambda manifest: manifest.update(format=2))


def without_rank_file(checkpoint: Path) -> None:
    next(path for path in sorted(checkpoint.iterdir()) if path.name.startswith("rank_")).unlink()


def with_deep_manifest(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").write_text(deep())


def without_state(checkpoint: Path) -> None:
    change_json(checkpoint / "manifest.json", lambda manifest: manifest.pop("state") and None)


OLDER_USED = (done_and_said("step_00000004", "going on at step 2 of 8"), same_result_as(WHOLE, "run"))


@family(
    "runs/checkpoint",
    [
        row(
            "of-a-later-format",
            of_format_2,
            expect=(refused("format"), kept("run/metrics.jsonl")),
            cause=13,
            quick=True,
        ),
        row("without-a-rank-file", without_rank_file),
        row("with-a-deep-manifest", with_deep_manifest, cause=25),
        row("without-state", without_state, cause=25),
    ],
    either(OLDER_USED, refused("step_00000004")),
)
def _(folder: Path, assets: Assets, damage: Callable[[Path], None]) -> Command:
    damage(stopped(folder, assets))
    return resume(folder, assets)


@case("runs/killed-after-a-checkpoint-then-resumed", done(), same_result_as(WHOLE, "run"))
def _(folder: Path, assets: Assets) -> Command:
    def kill(process: int) -> None:
        wait_for(lambda: any((folder / "run" / "checkpoints").glob("step_*")))
        os.kill(process, signal.SIGKILL)

    command = resume(folder, assets)
    ran(command.but(meanwhile=kill), code=-signal.SIGKILL)
    return command


@case("runs/metrics-cut-in-a-line", done(), same_result_as(WHOLE, "run"))
def _(folder: Path, assets: Assets) -> Command:
    stopped(folder, assets)
    metrics = folder / "run" / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes()[:-9])
    return resume(folder, assets)


# ----------------------------------------------------------------------------------------------- odd run folders


@family(
    "runs/output",
    [
        row("below-a-file", "file/run"),
        row("of-300-letters", "x" * 300),
        row("with-nul", "a\0b", expect=refused("run.output")),
    ],
    refused("run.output"),
    cause=25,
)
def _(folder: Path, assets: Assets, output: str) -> Command:
    write(folder / "file", "mine")
    return train(folder, recipe_values(assets.documents, run={"output": output}))


@case("runs/output-in-a-read-only-folder", refused("run.output"), cause=25, quick=True)
def _(folder: Path, assets: Assets) -> Command:
    (folder / "shut").mkdir(mode=0o500)
    values = recipe_values(assets.documents, run={"output": "shut/run"})
    return train(folder, values).but(without_rights=True)


@case("runs/disk-full-then-resumed-with-room", done(), same_result_as(WHOLE, "m/run"), cause=16)
def _(folder: Path, assets: Assets) -> Command:
    disk = small_disk(folder / "m", 500)
    command = train(folder, recipe_values(assets.documents, run={"output": "m/run"}), "--resume", "auto")
    ran(command, code=None)
    disk.resize(20_000)
    return command


# --------------------------------------------------------------------------------------------- recipes and ds_config


@family(
    "runs/model-config",
    [
        row("vocab-size", {"vocab_size": 100}),
        row("no-attention-heads", {"num_attention_heads": 0}),
        row("hidden-size-a-text", {"hidden_size": "32"}),
        row("unknown-activation", {"hidden_act": "gelo"}),
    ],
    refused("model.config", untouched=True),
    cause=25,
)
def _(folder: Path, assets: Assets, changes: dict[str, Any]) -> Command:
    values = recipe_values(assets.documents)
    values["model"]["config"] |= changes
    return train(folder, values)


@family(
    "runs/ds-config",
    [
        row("negative-bucket", {"zero_optimization": {"stage": 1, "reduce_bucket_size": -5}}),
        row("unknown-key-inside", {"zero_optimization": {"stage": 1, "bucket": 3}}),
        row("unknown-key-at-the-top", {"zero_optimization": {"stage": 1}, "zero_optimisation": {"stage": 2}}),
    ],
    refused("engine.json", untouched=True),
    cause=25,
)
def _(folder: Path, assets: Assets, content: dict[str, Any]) -> Command:
    write(folder / "engine.json", json.dumps(content))
    return train(folder, recipe_values(assets.documents, engine={"ds_config": "engine.json"}))

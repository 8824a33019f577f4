"""Training runs: ranks that disagree, checkpoints, resuming, full or odd run folders, recipes, ds_config."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import resource
import shutil
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tests.faults.hostile.assets import Assets
from tests.faults.hostile.builders import (
    change_json,
    change_tensors,
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
from tests.faults.hostile.rights import mount_over
from tests.faults.hostile.verdict import done, done_and_said, ended_with, holds, kept, refused, same_result_as
from tests.launcher import step_clock

WHOLE = "assets/masked/run"
# Sockets that hold a port for as long as the case's keeper lives.
_HELD: list[socket.socket] = []


def resume(folder: Path, assets: Assets, *overrides: str, how: str = "auto") -> Command:
    return train(folder, recipe_values(assets.documents), "--resume", how, *overrides)


def stopped(folder: Path, assets: Assets) -> Path:
    """Copy a run that stopped at step 4 to `run`; returns its newest checkpoint."""
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


@case("runs/ranks-read-copies-of-the-same-shards", done(), cause=3, seconds=120)
def _(folder: Path, assets: Assets) -> list[Command]:
    assets.copy(assets.documents, folder / "copy")
    first = train(folder, recipe_values(assets.documents))
    second = recipe_values("copy")
    second["data"]["cache_dir"] = "cache"
    return ranks(first, train(folder, second, name="second.toml").but(outputs=("run", "cache")))


@case("runs/ranks-read-other-weights", refused("model.source"), cause=3, seconds=120)
def _(folder: Path, assets: Assets) -> list[Command]:
    assets.copy(assets.bert, folder / "other")
    change_tensors(folder / "other" / "model.safetensors", twice_the_weights)
    values = [from_model(assets, model) for model in (str(assets.bert), "other")]
    first, second = (train(folder, each, name=f"{number}.toml") for number, each in enumerate(values))
    return ranks(first, second)


def from_model(assets: Assets, source: str, **model: Any) -> dict[str, Any]:
    values = recipe_values(assets.tuples, "contrastive", train={"steps": 6}, checkpoint={"every_steps": 3})
    values["model"] = {"source": source, "ladder": values["model"]["ladder"], **model}
    return values


def twice_the_weights(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name: 2 * tensor for name, tensor in tensors.items()}


@family(
    "runs/ranks-have-another",
    [
        row("seed", "run.seed", "8", expect=refused("run.seed")),
        row("global-batch", "train.global_batch_size", "24", expect=refused("train.global_batch_size")),
        row("learning-rate", "optim.lr", "0.02", expect=refused("optim.lr")),
        row("length", "train.steps", "6", expect=refused("train.steps")),
        row("order", "data.shuffle", "false", expect=refused("data.shuffle")),
        row("mask-ratio", "objective.encoder_mask_ratio", "0.3", expect=refused("objective.encoder_mask_ratio")),
        row("pace-of-saves", "checkpoint.every_steps", "3", expect=refused("checkpoint.every_steps")),
        row("pace-of-logs", "log.every_steps", "2", expect=refused("log.every_steps")),
        row("stop", "train.stop_at_step", "3", expect=refused("train.stop_at_step")),
        row("output", "run.output", "run2", expect=refused("run.output")),
    ],
    cause=3,
    seconds=120,
)
def _(folder: Path, assets: Assets, key: str, value: str) -> list[Command]:
    command = train(folder, recipe_values(assets.documents))
    return ranks(command, command.but(f"--{key}={value}"))


@case("runs/port-in-use", refused("port", "--master_port"), cause=25)
def _(folder: Path, assets: Assets) -> Command:
    _HELD.append(socket.socket())
    _HELD[-1].bind(("127.0.0.1", 0))
    _HELD[-1].listen()
    port = str(_HELD[-1].getsockname()[1])
    place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return train(folder, recipe_values(assets.documents)).but(environment=place)


@family("runs/clock-stepped", [row("by+1", 1, quick=True), row("by-3600", -3600)], done(), cause=12)
def _(folder: Path, assets: Assets, seconds: int) -> Command:
    """The clock is set by another btime in /proc/stat; the keeper of this case stands in for a launcher."""
    stat = write(folder / "stat", Path("/proc/stat").read_text())
    mount_over(stat, Path("/proc/stat"))

    def step(process: int) -> None:
        wait_for((folder / "run" / "metrics.jsonl").is_file)
        step_clock(str(stat), seconds)

    command = train(folder, recipe_values(assets.documents, train={"steps": 20}))
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    return command.but(environment=alone, meanwhile=step, outputs=("run", "stat"))


@case(
    "runs/loader-worker-stopped",
    ended_with(1, "loader worker, is stopped"),
    cause=20,
    quick=True,
    seconds=120,
    may_leave=("run/checkpoints/tmp-*",),  # of a save in progress, which the next start removes
)
def _(folder: Path, assets: Assets) -> Command:
    def stop(process: int) -> None:
        metrics = folder / "run" / "metrics.jsonl"
        wait_for(lambda: metrics.is_file() and metrics.read_bytes().count(b"\n") >= 4)
        for child in psutil.Process(process).children():
            os.kill(child.pid, signal.SIGSTOP)

    values = recipe_values(assets.documents, data={"num_workers": 1}, train={"steps": 10_000, "hang_seconds": 2.0})
    # A process that ends abruptly leaves multiprocessing's temporary folder behind.
    (folder / "temporary").mkdir()
    outputs, place = ("run", "temporary"), {"TMPDIR": str(folder / "temporary")}
    return train(folder, values).but(meanwhile=stop, outputs=outputs, environment=place)


# -------------------------------------------------------------------------------------------- checkpoints, resuming


@case("runs/resumed", done_and_said("going on at step 4 of 8"), same_result_as(WHOLE, "run"))
def _(folder: Path, assets: Assets) -> Command:
    stopped(folder, assets)
    return resume(folder, assets)


def of_format_2(checkpoint: Path) -> None:
    for each in (checkpoint, checkpoint.with_name("step_00000002")):
        change_json(each / "manifest.json", lambda manifest: manifest.update(format=2))


def without_rank_file(checkpoint: Path) -> None:
    rank_file(checkpoint).unlink()


def rank_file(checkpoint: Path) -> Path:
    return next(path for path in sorted(checkpoint.iterdir()) if path.name.startswith("rank_"))


def with_deep_manifest(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").write_text(deep())


def manifest_of(content: bytes) -> Callable[[Path], object]:
    return lambda checkpoint: (checkpoint / "manifest.json").write_bytes(content)


def forged(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Damage that changes a manifest and renews its checksum, so that the manifest agrees with itself."""

    def forge(checkpoint: Path) -> None:
        path = checkpoint / "manifest.json"
        manifest = json.loads(path.read_text())
        del manifest["sha256"]
        change(manifest)
        digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
        path.write_text(json.dumps({**manifest, "sha256": digest}))

    return forge


def with_file(name: str) -> Callable[[Path], None]:
    facts = {"bytes": 0, "sha256": hashlib.sha256().hexdigest()}
    return forged(lambda manifest: manifest["files"].update({name: facts}))


def with_the_other_s_file(checkpoint: Path) -> None:
    other = rank_file(checkpoint.with_name("step_00000002"))
    rank_file(checkpoint).write_bytes(other.read_bytes())


def a_file_in_its_place(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint)
    checkpoint.write_text("mine")


def cut(checkpoint: Path) -> None:
    file = rank_file(checkpoint)
    file.write_bytes(file.read_bytes()[:-1])


def a_pickle(checkpoint: Path) -> None:
    content = pickle.dumps({"a": 1})
    rank_file(checkpoint).write_bytes(content)
    facts = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    forged(lambda manifest: manifest["files"].update({rank_file(checkpoint).name: facts}))(checkpoint)


OLDER_USED = (done_and_said("step_00000004", "going on at step 2 of 8"), same_result_as(WHOLE, "run"))


@family(
    "runs/checkpoint",
    [
        row(
            "of-a-later-format",
            of_format_2,
            expect=(refused("format"), kept("run/metrics.jsonl", "run/checkpoints/step_00000004/manifest.json")),
            cause=13,
            quick=True,
        ),
        row("without-a-rank-file", without_rank_file),
        row("with-a-deep-manifest", with_deep_manifest, cause=25),
        row("with-an-empty-manifest", manifest_of(b"")),
        row("with-a-list-for-a-manifest", manifest_of(b"[1]")),
        row("with-a-manifest-that-is-no-text", manifest_of(b"\xff\xfe\x00")),
        row("without-state", forged(lambda manifest: manifest.pop("state")), cause=25),
        row("without-files", forged(lambda manifest: manifest.pop("files")), cause=25),
        row("with-no-files", forged(lambda manifest: manifest["files"].clear()), cause=25),
        row("without-a-place-in-the-data", forged(lambda manifest: manifest["state"].pop("stream")), cause=25),
        row("with-a-file-outside", with_file("../../recipe.toml")),
        row("with-a-device", with_file("/dev/zero")),
        row("with-optimizer-steps-a-text", forged(lambda manifest: manifest.update(optimizer_steps="4"))),
        row("of-step-999", forged(lambda manifest: manifest["state"].update(step=999))),
        row("of-step-below-0", forged(lambda manifest: manifest["state"].update(step=-3))),
        row("at-sample-10-30", forged(lambda manifest: manifest["state"]["stream"].update(samples=10**30)), cause=25),
        row("at-a-sample-below-0", forged(lambda manifest: manifest["state"]["stream"].update(samples=-5)), cause=25),
        row("with-health-of-nan", forged(lambda manifest: manifest["state"]["health"].update(loss_mean=float("nan")))),
        row("with-parameters-a-list", forged(lambda manifest: manifest.update(parameters=[]))),
        row(
            "of-another-model",
            forged(lambda manifest: manifest["parameters"].popitem()),
            expect=(
                refused("its parameters are not this model's"),
                kept("run/metrics.jsonl", "run/checkpoints/step_00000004/manifest.json"),
            ),
            cause=13,
        ),
        row("with-the-other-s-rank-file", with_the_other_s_file),
        row("with-a-cut-rank-file", cut),
        row("with-a-pickle", a_pickle),
        row("that-is-a-file", a_file_in_its_place, cause=14, quick=True),
        row(
            "with-health-of-a-later-version",
            forged(lambda manifest: manifest["state"]["health"].update(new_key=1)),
            expect=(done_and_said("going on at step 4 of 8"), same_result_as(WHOLE, "run")),
            cause=25,
        ),
    ],
    *OLDER_USED,
)
def _(folder: Path, assets: Assets, damage: Callable[[Path], object]) -> Command:
    damage(stopped(folder, assets))
    return resume(folder, assets)


@case(
    "runs/checkpoint-under-another-name", done_and_said("step_00000006", "is of step 4"), same_result_as(WHOLE, "run")
)
def _(folder: Path, assets: Assets) -> Command:
    newest = stopped(folder, assets)
    assets.copy(newest, newest.with_name("step_00000006"))
    return resume(folder, assets)


KEPT_FOR_LATER = kept(
    "run/metrics.jsonl",
    "run/checkpoints/step_00000004/manifest.json",
    "run/checkpoints/step_00000002/manifest.json",
)


@family(
    "runs/unreadable",
    [
        row("manifests", "step_*/manifest.json", 0),
        row("rank-files", "step_*/rank_*", 0),
        row("checkpoint", "step_00000004", 0),
        row("folder", ".", 0, expect=refused("checkpoints cannot be read")),
    ],
    refused("may be sound"),
    cause=13,
)
def _(folder: Path, assets: Assets, pattern: str, mode: int) -> Command:
    checkpoints = stopped(folder, assets).parent
    for path in [checkpoints] if pattern == "." else checkpoints.glob(pattern):
        path.chmod(mode)
    return resume(folder, assets).but(without_rights=True)


@family(
    "runs/checkpoints-on-a-disk-that-is-away",
    [row(how, how) for how in ("auto", "required")],
    cause=13,
    expect=(refused("is not there"), kept("run/metrics.jsonl")),
)
def _(folder: Path, assets: Assets, how: str) -> Command:
    checkpoints = stopped(folder, assets).parent
    shutil.rmtree(checkpoints)
    checkpoints.symlink_to("/nowhere/at/all")
    return resume(folder, assets, how=how)


@case(
    "runs/checkpoint-on-a-disk-that-is-away", refused("may be sound", "/nowhere"), kept("run/metrics.jsonl"), cause=13
)
def _(folder: Path, assets: Assets) -> Command:
    newest = stopped(folder, assets)
    shutil.rmtree(newest)
    newest.symlink_to("/nowhere/at/all")
    return resume(folder, assets)


@case("runs/checkpoints-are-a-link", done(), same_result_as(WHOLE, "run"))
def _(folder: Path, assets: Assets) -> Command:
    checkpoints = stopped(folder, assets).parent
    checkpoints.rename(folder / "run" / "elsewhere")
    checkpoints.symlink_to("elsewhere")
    return resume(folder, assets)


@case("runs/checkpoint-moved-and-linked-then-pruned", done(), same_result_as(WHOLE, "run"), cause=14)
def _(folder: Path, assets: Assets) -> Command:
    older = stopped(folder, assets).with_name("step_00000002")
    older.rename(folder / "moved")
    older.symlink_to(folder / "moved")
    return resume(folder, assets)


@case(
    "runs/left-over-that-cannot-be-removed",
    done_and_said("cannot be removed"),
    same_result_as(WHOLE, "run"),
    cause=14,
)
def _(folder: Path, assets: Assets) -> Command:
    left_over = stopped(folder, assets).with_name("tmp-step_00000006")
    small_disk(left_over, 64)
    return resume(folder, assets)


@case("runs/a-user-s-files-beside-checkpoints", done(), kept("run/checkpoints/notes.txt"), same_result_as(WHOLE, "run"))
def _(folder: Path, assets: Assets) -> Command:
    newest = stopped(folder, assets)
    write(newest.with_name("notes.txt"), "mine")
    assets.copy(newest, newest.with_name("step_00000003_best"))
    assets.copy(newest, newest.with_name("step_²"))
    return resume(folder, assets)


@family(
    "runs/without-checkpoints",
    [row("auto", "auto"), row("required", "required")],
    refused("no whole checkpoint"),
    kept("run/metrics.jsonl", "run/recipe.toml"),
    cause=13,
)
def _(folder: Path, assets: Assets, how: str) -> Command:
    shutil.rmtree(stopped(folder, assets).parent)
    return resume(folder, assets, how=how)


@case("runs/all-checkpoints-damaged", refused("no whole checkpoint"), kept("run/metrics.jsonl"), cause=13)
def _(folder: Path, assets: Assets) -> Command:
    newest = stopped(folder, assets)
    for each in (newest, newest.with_name("step_00000002")):
        cut(each)
    return resume(folder, assets)


@case("runs/killed-before-a-checkpoint", done_and_said("starts over"), same_result_as(WHOLE, "run"), cause=13)
def _(folder: Path, assets: Assets) -> Command:
    stopped(folder, assets)
    shutil.rmtree(folder / "run" / "checkpoints")
    metrics = folder / "run" / "metrics.jsonl"
    kept_lines = [line for line in metrics.read_text().splitlines() if "checkpoint/" not in line]
    metrics.write_text("\n".join(kept_lines) + "\n")
    return resume(folder, assets)


@case("runs/killed-after-a-checkpoint-then-resumed", done(), same_result_as(WHOLE, "run"))
def _(folder: Path, assets: Assets) -> Command:
    def kill(process: int) -> None:
        wait_for(lambda: any((folder / "run" / "checkpoints").glob("step_*")))
        os.kill(process, signal.SIGKILL)

    command = resume(folder, assets)
    ran(command.but(meanwhile=kill), code=-signal.SIGKILL)
    return command


@case(
    "runs/done-then-started-again-and-killed",
    ended_with(-signal.SIGKILL),
    holds("run/DONE"),
    may_leave=("run/*.tmp",),  # of a file that was being written
)
def _(folder: Path, assets: Assets) -> Command:
    run = assets.copy(assets.root / "masked" / "run", folder / "run")
    before = (run / "environment.json").stat().st_mtime_ns

    def kill(process: int) -> None:
        wait_for(lambda: (run / "environment.json").stat().st_mtime_ns != before)
        os.kill(process, signal.SIGKILL)

    return resume(folder, assets).but(meanwhile=kill)


@case("runs/done-then-started-again", done(), same_result_as(WHOLE, "run"), holds("run/DONE"))
def _(folder: Path, assets: Assets) -> Command:
    assets.copy(assets.root / "masked" / "run", folder / "run")
    return resume(folder, assets)


@family(
    "runs/metrics",
    [
        row("cut-in-a-line", lambda content: content[:-9]),
        row("with-bytes-that-are-no-text", lambda content: content + b"\xff\xfe\n"),
        row("with-a-number-for-a-line", lambda content: b"7\n" + content),
        row("with-a-record-without-step", lambda content: content + b"{}\n"),
        row("with-a-step-of-a-text", lambda content: content + b'{"step": "x"}\n'),
        row("with-a-deep-line", lambda content: content + deep().encode() + b"\n"),
    ],
    done(),
    same_result_as(WHOLE, "run"),
    cause=25,
)
def _(folder: Path, assets: Assets, change: Callable[[bytes], bytes]) -> Command:
    stopped(folder, assets)
    metrics = folder / "run" / "metrics.jsonl"
    metrics.write_bytes(change(metrics.read_bytes()))
    return resume(folder, assets)


@case("runs/metrics-of-a-later-version", refused("metrics.jsonl", "format 2", untouched=True), cause=13)
def _(folder: Path, assets: Assets) -> Command:
    stopped(folder, assets)
    with (folder / "run" / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"format": 2, "step": 4}\n')
    return resume(folder, assets)


@family(
    "runs/recipe-of-the-run",
    [
        row("cut", lambda text: text[: len(text) // 2].rpartition("=")[0], expect=refused("recipe.toml")),
        row("of-a-later-version", lambda text: text.replace("[log]", "[log]\nnew_key = 1"), expect=refused("new_key")),
        row("missing", lambda text: None, expect=refused("no run of ours")),
    ],
)
def _(folder: Path, assets: Assets, change: Callable[[str], str | None]) -> Command:
    stopped(folder, assets)
    recipe = folder / "run" / "recipe.toml"
    changed = change(recipe.read_text())
    recipe.unlink() if changed is None else recipe.write_text(changed)
    return resume(folder, assets)


@family(
    "runs/resumed-with-another",
    [
        row(name, key, value, expect=(refused(key), KEPT_FOR_LATER))
        for name, key, value in (
            ("batch", "train.global_batch_size", "24"),
            ("ladder", "model.ladder", "[[1,8],[2,32]]"),
            ("seed", "run.seed", "8"),
            ("rate", "optim.lr", "0.02"),
            ("length", "train.steps", "16"),
            ("mask-ratio", "objective.encoder_mask_ratio", "0.3"),
            ("pooling", "model.pooling", "mean"),
            ("text-length", "data.max_length", "16"),
        )
    ],
)
def _(folder: Path, assets: Assets, key: str, value: str) -> Command:
    stopped(folder, assets)
    return resume(folder, assets, f"--{key}={value}")


@family(
    "runs/base-replaced",
    [
        row("under-adapters", {"lora_rank": 2}, quick=True),
        row("under-frozen-layers", {"frozen_layers": 1}),
        row("under-nothing-that-is-frozen", {}, expect=done()),
    ],
    refused("frozen weights", "model.source"),
    cause=7,
)
def _(folder: Path, assets: Assets, model: dict[str, Any]) -> Command:
    assets.copy(assets.bert, folder / "base")
    command = train(folder, from_model(assets, "base", **model), "--resume", "auto")
    ran(command.but("--train.stop_at_step=3"))
    change_tensors(folder / "base" / "model.safetensors", twice_the_weights)
    return command


# ----------------------------------------------------------------------------------------------- odd run folders


@family(
    "runs/output",
    [
        row("below-a-file", "file/run"),
        row("of-300-letters", "x" * 300),
        row("with-nul", "a\0b"),
        row("empty", ""),
        row("a-file", "file"),
        row("a-link-that-leads-nowhere", "link"),
        row("below-a-link-that-leads-nowhere", "link/run"),
    ],
    refused("run.output"),
    cause=25,
)
def _(folder: Path, assets: Assets, output: str) -> Command:
    write(folder / "file", "mine")
    (folder / "link").symlink_to("/nowhere/at/all")
    return train(folder, recipe_values(assets.documents, run={"output": output})).but(outputs=())


@case("runs/output-that-is-no-text", refused("UTF-8"), cause=25)
def _(folder: Path, assets: Assets) -> Command:
    return train(folder, recipe_values(assets.documents)).but("--run.output=a\udcffb", outputs=())


@family(
    "runs/output-in-a-read-only-folder",
    [row("new", "shut/run"), row("there", "shut"), row("two-below", "shut/a/run")],
    refused("run.output"),
    cause=25,
    quick=True,
)
def _(folder: Path, assets: Assets, output: str) -> Command:
    (folder / "shut").mkdir(mode=0o500)
    values = recipe_values(assets.documents, run={"output": output})
    return train(folder, values).but(without_rights=True, outputs=())


@family("runs/disk-too-small-to-begin", [row(f"{kib}-kib", kib) for kib in (4, 8)], refused("run.output"), cause=25)
def _(folder: Path, assets: Assets, kib: int) -> Command:
    disk = small_disk(folder / "m", kib)
    if kib == 4:
        write(disk.path / "full", "x" * 4096)
    return train(folder, recipe_values(assets.documents, run={"output": "m/run"})).but(outputs=())


@case("runs/disk-full-at-the-end", refused("model cannot be written", "--resume auto", code=1), cause=16, quick=True)
def _(folder: Path, assets: Assets) -> Command:
    small_disk(folder / "m", 500)
    return train(folder, recipe_values(assets.documents, run={"output": "m/run"}))


@family(
    "runs/disk-full-then-resumed-with-room",
    [row(f"{kib}-kib", kib) for kib in (16, 40, 500, 900)],
    done(),
    same_result_as(WHOLE, "m/run"),
    cause=16,
)
def _(folder: Path, assets: Assets, kib: int) -> Command:
    disk = small_disk(folder / "m", kib)
    command = train(folder, recipe_values(assets.documents, run={"output": "m/run"}), "--resume", "auto")
    ended = ran(command, code=None)
    assert "Traceback" not in ended.err, ended.err
    disk.resize(20_000)
    return command


@case("runs/disk-full-with-tensorboard", refused("model cannot be written", code=1), cause=16)
def _(folder: Path, assets: Assets) -> Command:
    small_disk(folder / "m", 500)
    return train(folder, recipe_values(assets.documents, run={"output": "m/run"}, log={"tensorboard": True}))


@case("runs/files-limited-in-size", done_and_said("could not be saved"), cause=16)
def _(folder: Path, assets: Assets) -> Command:
    return train(folder, recipe_values(assets.documents)).but(limits={resource.RLIMIT_FSIZE: 150_000})


# --------------------------------------------------------------------------------------------- recipes and ds_config


@family(
    "runs/recipe",
    [
        row("nested-too-deep", "a = " + "[" * 5000, expect=refused("too deep")),
        row("with-5000-digits", "[train]\nsteps = " + "9" * 5000, expect=refused("digits")),
        row("with-a-base-of-300-letters", f'base = "{"x" * 300}"', expect=refused("too long")),
        row("with-a-base-that-is-a-folder", 'base = "."', expect=refused("does not exist")),
        row("with-a-base-with-nul", 'base = "a\\u0000b"', expect=refused("does not exist")),
        row("that-is-no-text", b"\xff\xfe\x00", expect=refused("UTF-8")),
        row("with-a-key-twice", "[run]\n[run]\n", expect=refused("TOML")),
        row("of-a-device", 'base = "/dev/zero"', expect=refused("/dev/zero")),
        row("of-a-base-that-is-no-recipe", 'base = "/etc/passwd"', expect=refused("/etc/passwd")),
    ],
    cause=25,
)
def _(folder: Path, assets: Assets, content: str | bytes) -> Command:
    command = train(folder, recipe_values(assets.documents))
    write(folder / "recipe.toml", content)
    return command.but(outputs=())


@case("runs/recipe-with-1500-bases", refused("base of"), cause=25)
def _(folder: Path, assets: Assets) -> Command:
    command = train(folder, recipe_values(assets.documents))
    for number in range(1500):
        write(folder / f"{number}.toml", f'base = "{number + 1}.toml"')
    write(folder / "recipe.toml", 'base = "0.toml"')
    return command


@case("runs/recipe-with-a-base-that-may-not-be-read", refused("b.toml", "leave"), cause=25)
def _(folder: Path, assets: Assets) -> Command:
    command = train(folder, recipe_values(assets.documents))
    write(folder / "b.toml", "")
    (folder / "b.toml").chmod(0)
    write(folder / "recipe.toml", 'base = "b.toml"')
    return command.but(without_rights=True)


@family(
    "runs/number-beyond-all-bounds",
    [
        row(key.replace(".", "-").replace("_", "-"), key, value, expect=refused(key, untouched=True))
        for key, value in (
            ("train.steps", str(10**30)),
            ("train.epochs", "1e300"),
            ("train.global_batch_size", str(2**40)),
            ("data.cache_gib", "1e300"),
            ("data.num_workers", "1000000"),
            ("objective.temperature", "1e-300"),
            ("optim.lr", "1e300"),
            ("run.seed", str(2**64)),
            ("train.hang_seconds", "1e300"),
        )
    ],
    cause=25,
)
def _(folder: Path, assets: Assets, key: str, value: str) -> Command:
    return train(folder, recipe_values(assets.documents), f"--{key}={value}")


@case("runs/the-same-shards-twice", refused("the same shards", untouched=True))
def _(folder: Path, assets: Assets) -> Command:
    values = recipe_values(assets.documents)
    values["data"]["shards"] *= 2
    return train(folder, values)


@family(
    "runs/model-config",
    [
        row("vocab-size", {"vocab_size": 100}),
        row("padding", {"pad_token_id": 3}),
        row("no-attention-heads", {"num_attention_heads": 0}),
        row("hidden-size-below-0", {"hidden_size": -32}),
        row("hidden-size-a-text", {"hidden_size": "32"}),
        row("unknown-activation", {"hidden_act": "gelo"}),
        row("dropout-above-1", {"hidden_dropout_prob": 2.0}),
        row("nothing-between", {"intermediate_size": 0}),
        row("layers-below-0", {"num_hidden_layers": -2}, expect=refused("layers", untouched=True)),
        row("epsilon-a-text", {"layer_norm_eps": "x"}),
        row("range-of-nan", {"initializer_range": float("nan")}),
        row("chunks", {"chunk_size_feed_forward": 3}),
        row("a-decoder", {"is_decoder": True}),
        row("float16", {"torch_dtype": "float16"}),
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
        row("odd-communication", {"zero_optimization": {"stage": 1}, "communication_data_type": "fp99"}),
        row("offload-a-text", {"zero_optimization": {"stage": 1, "offload_optimizer": "cpu"}}),
        row("bf16-a-text", {"zero_optimization": {"stage": 1}, "bf16": {"enabled": "yes"}}),
        row("removed-from-deepspeed", {"zero_optimization": {"stage": 1}, "compression_training": {"a": 1}}),
        row("deep", deep()),
        row("of-nan", '{"zero_optimization": {"stage": NaN}}'),
        row("no-text", "\udcff"),
    ],
    refused("engine.json", untouched=True),
    cause=25,
)
def _(folder: Path, assets: Assets, content: dict[str, Any] | str) -> Command:
    text = content if isinstance(content, str) else json.dumps(content)
    write(folder / "engine.json", text.encode(errors="surrogateescape"))
    return train(folder, recipe_values(assets.documents, engine={"ds_config": "engine.json"}))


@family(
    "runs/selection",
    [row("cut", '{"identity": {'), row("a-list", "[]"), row("without-scores", '{"identity": {}}'), row("deep", deep())],
    refused("selection.json"),
    kept("out/selection.json"),
    cause=25,
)
def _(folder: Path, assets: Assets, content: str) -> Command:
    train(folder, from_model(assets, str(assets.bert)))
    write(folder / "out" / "selection.json", content)
    arguments = ("recipe.toml", "--seeds", "1", "2", "--share", "0.5", "--sts", str(assets.sts_file), "--output", "out")
    return Command("trainer.select_seed", arguments, outputs=("out",))

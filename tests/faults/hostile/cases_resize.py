"""trainer.resize: model folders, texts and pairs that it cannot use."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

from tests.faults.hostile.assets import Assets
from tests.faults.hostile.builders import deep, jsonl, ran, small_disk, wait_for, write
from tests.faults.hostile.case import Command, case, family, row
from tests.faults.hostile.cases_models import WEIGHTS, Damage, set_settings, with_nan
from tests.faults.hostile.verdict import done, done_and_said, ended_with, holds, kept, refused

STEPS = ("--train.steps=2", "--train.global_batch_size=8", "--train.micro_batch_size=4", "--log.tensorboard=false")


def resize(model: Path | str, texts: Path | str, *arguments: str, output: str = "run") -> Command:
    words = (str(model), "--texts", str(texts), "--output", output, *STEPS, *arguments)
    return Command("trainer.resize", words, outputs=(output,))


@case("resize/whole", done(), holds("run/resize.json"), seconds=120)
def _(folder: Path, assets: Assets) -> Command:
    return resize(assets.model, assets.documents_file)


@case("resize/again", done_and_said("agreement"), kept("run/training/metrics.jsonl"), seconds=180)
def _(folder: Path, assets: Assets) -> Command:
    ran(resize(assets.model, assets.documents_file))
    return resize(assets.model, assets.documents_file)


@case("resize/again-with-other-arguments", refused("is of another command"), cause="own", seconds=180)
def _(folder: Path, assets: Assets) -> Command:
    ran(resize(assets.model, assets.documents_file))
    return resize(assets.model, assets.documents_file, "--no-heads")


@case("resize/stopped-goes-on", done(), holds("run/resize.json"), seconds=180)
def _(folder: Path, assets: Assets) -> Command:
    command = resize(assets.model, assets.documents_file, "--train.steps=100")

    def stop(process: int) -> None:
        wait_for((folder / "run/training/metrics.jsonl").exists)
        os.kill(process, signal.SIGTERM)

    ran(command.but(meanwhile=stop), code=75)
    return command


@family(
    "resize/arguments",
    [
        row("too-deep", ("--sizes", "1x8,9x32"), expect=refused("9x32")),
        row("too-wide", ("--sizes", "1x8,2x64"), expect=refused("2x64")),
        row("not-sizes", ("--sizes", "large"), expect=refused("large")),
        row("stops-short", ("--sizes", "1x8"), expect=refused("stops short")),
        row("no-tokens", ("--max-length", "1"), expect=refused("--max-length 1")),
        row("too-many-tokens", ("--max-length", "100000"), expect=refused("--max-length 100000")),
        row("heads-without-heads", ("--train", "heads", "--no-heads"), expect=refused("leave --no-heads out")),
        row("no-such-pairs", ("--pairs", "absent.jsonl"), expect=refused("absent.jsonl")),
        row("no-such-sts", ("--sts", "absent.tsv"), expect=refused("absent.tsv")),
        row("no-such-beir", ("--beir", "absent"), expect=refused("absent")),
        row("no-such-teacher", ("--teacher", "absent"), expect=refused("absent")),
        row("no-such-column", ("--text-column", "body"), expect=refused("body")),
        row("what-divides-no-file", ("--text-split", "lines"), expect=refused("--text-split", untouched=True)),
        row("no-such-key", ("--teacher.weight=1",), expect=refused("teacher.weight")),
        row("a-key-of-another-objective", ("--objective.kl_weight=1",), expect=refused("kl_weight")),
        row("no-batch", ("--train.global_batch_size=0",), expect=refused("global_batch_size")),
    ],
    cause="own",
)
def _(folder: Path, assets: Assets, arguments: tuple[str, ...]) -> Command:
    return resize(assets.model, assets.documents_file, *arguments)


@family(
    "resize/texts",
    [
        row("none", None, expect=refused("texts.jsonl")),
        row("empty", "", expect=refused("texts.jsonl")),
        row("one", jsonl([{"text": "the cat saw the dog"}]), expect=refused("no samples")),
        row("of-nothing", jsonl([{"text": "  "}] * 40), expect=refused("no samples")),
        row("few", jsonl([{"text": "the cat saw the dog"}] * 5), expect=refused("give more")),
        row("cut", jsonl([{"text": "the cat"}] * 40) + '{"text": "the', expect=refused("texts.jsonl")),
        row("not-objects", jsonl(["the cat"] * 40), expect=refused("texts.jsonl")),
    ],
    cause="own",
)
def _(folder: Path, assets: Assets, content: str | None) -> Command:
    if content is not None:
        write(folder / "texts.jsonl", content)
    return resize(assets.model, "texts.jsonl")


@family(
    "resize/model",
    [
        row("nan", with_nan, expect=refused("model")),
        row("dot-product", set_settings(similarity="dot"), expect=refused("dot product"), quick=True),
        row("no-weights", lambda model: (model / WEIGHTS).unlink(), expect=refused("model")),
        row("no-settings", lambda model: (model / "barista.json").unlink(), expect=refused("how it pools")),
        row("a-file", lambda model: (shutil.rmtree(model), model.write_text("a model")), expect=refused("model")),
    ],
    cause="own",
)
def _(folder: Path, assets: Assets, damage: Damage) -> Command:
    damage(assets.copy(assets.model, folder / "model"))
    return resize("model", assets.documents_file)


@case("resize/output-of-something-else", refused("holds something else"), kept("run/thesis.txt"), cause="own")
def _(folder: Path, assets: Assets) -> Command:
    write(folder / "run/thesis.txt", "mine")
    return resize(assets.model, assets.documents_file)


@case("resize/disk-full", ended_with(2, "run"), seconds=120)
def _(folder: Path, assets: Assets) -> Command:
    small_disk(folder / "run", 128)
    return resize(assets.model, assets.documents_file)


@family(
    "resize/left-by-another-command",
    [
        row("command-cut", "command.json", "{", expect=refused("command.json")),
        row("command-of-bytes", "command.json", b"\xff\xfe", expect=refused("command.json")),
        row("results-cut", "resize.json", '{"records": [', expect=refused("resize.json")),
        row("results-nested-too-deep", "resize.json", deep(), expect=refused("resize.json")),
        row("results-without-records", "resize.json", "{}", expect=refused("resize.json")),
    ],
    cause="own",
    seconds=180,
)
def _(folder: Path, assets: Assets, name: str, content: str | bytes) -> Command:
    command = resize(assets.model, assets.documents_file)
    ran(command)
    write(folder / "run" / name, content)
    return command


@family(
    "resize/output",
    [row("the-model", "model", expect=refused("model")), row("a-file", "thesis.txt", expect=refused("thesis.txt"))],
    kept("model/barista.json", "thesis.txt"),
    cause="own",
)
def _(folder: Path, assets: Assets, output: str) -> Command:
    assets.copy(assets.model, folder / "model")
    write(folder / "thesis.txt", "mine")
    return resize("model", assets.documents_file, output=output)

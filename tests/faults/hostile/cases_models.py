"""Model folders that are damaged or forged, before every command that reads one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.faults.hostile.assets import Assets
from tests.faults.hostile.builders import (
    change_json,
    change_tensors,
    evaluate,
    export,
    mine,
    ran,
    recipe_values,
    safetensors_header,
    soup,
    train,
    write,
)
from tests.faults.hostile.case import Command, Row, case, family, row
from tests.faults.hostile.verdict import Check, absent, done, either, gave_up, refused

WEIGHTS = "model.safetensors"
Damage = Callable[[Path], object]


def command_on(which: str, folder: Path, assets: Assets) -> Command:
    """One of the commands, reading the model at `model`."""
    if which == "finetune":
        values = recipe_values(assets.tuples, "contrastive", train={"steps": 2})
        values["model"] |= {"config": {}, "source": "model"}
        return train(folder, values)
    if which == "evaluate":
        return evaluate("model", "--sts", str(assets.sts_file), "--beir", str(assets.beir))
    if which == "mine":
        return mine("model", str(assets.tuples_file))
    assert which == "export", which
    return export("model")


ALL = ("finetune", "evaluate", "export", "mine")


def for_each_command(name: str, damage: Damage, *, commands: tuple[str, ...] = ALL, **fields: Any) -> Iterator[Row]:
    """A row a command; the short form has the first alone."""
    for which in commands:
        quick = fields.get("quick", False) and which == commands[0]
        yield row(f"{name}-{which}", which, damage, **{**fields, "quick": quick})


def without_a_layer(model: Path) -> None:
    change_tensors(
        model / WEIGHTS, lambda tensors: {name: each for name, each in tensors.items() if ".layer.1." not in f".{name}"}
    )


def renamed(model: Path) -> None:
    change_tensors(model / WEIGHTS, lambda tensors: {f"other.{name}": each for name, each in tensors.items()})


def with_nan(model: Path) -> None:
    def change(tensors: dict) -> None:
        next(each for name, each in tensors.items() if "word_embeddings" in name).fill_(float("nan"))

    change_tensors(model / WEIGHTS, change)


def cut(model: Path) -> None:
    weights = model / WEIGHTS
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])


def set_config(**changes: object) -> Damage:
    return lambda model: change_json(model / "config.json", lambda config: config.update(changes))


def set_settings(**changes: object) -> Damage:
    return lambda model: change_json(model / "barista.json", lambda settings: settings.update(changes))


REFUSED: Check = refused("model")


@family(
    "models",
    [
        *for_each_command("good", lambda model: None, expect=done()),
        *for_each_command("without-a-layer", without_a_layer, cause=2, quick=True),
        *for_each_command("nothing-fits", renamed, cause=2),
        *for_each_command("weights-nan", with_nan, cause=8, commands=("evaluate", "export", "mine"), quick=True),
        row("weights-nan-finetune", "finetune", with_nan, cause=8, expect=either(refused("model"), gave_up())),
        *for_each_command("weights-cut", cut, cause=25),
        *for_each_command(
            "weights-header-too-long", lambda model: write(model / WEIGHTS, safetensors_header(2**62)), cause=25
        ),
        *for_each_command("no-attention-heads", set_config(num_attention_heads=0), cause=25),
        *for_each_command("gpt2", set_config(model_type="gpt2"), cause=2),
        *for_each_command(
            "ladder-of-letters", set_settings(ladder=["a", "b"]), cause=25, commands=("evaluate", "export", "mine")
        ),
        *for_each_command("length-zero", set_settings(query_max_length=0), cause=25, commands=("evaluate", "export")),
    ],
    REFUSED,
)
def _(folder: Path, assets: Assets, which: str, damage: Damage) -> Command:
    damage(assets.copy(assets.model, folder / "model"))
    return command_on(which, folder, assets)


@family(
    "models/code-from-the-folder",
    [*for_each_command("y-on-stdin", lambda model: None, commands=("finetune", "evaluate", "export"), quick=True)],
    refused("model"),
    absent("ran"),
    cause=17,
)
def _(folder: Path, assets: Assets, which: str, damage: Damage) -> Command:
    model = assets.copy(assets.model, folder / "model")
    write(model / "evil.py", f"import pathlib\npathlib.Path({str(folder / 'ran')!r}).touch()\n")
    change_json(
        model / "config.json",
        lambda config: config.update(
            model_type="evil", auto_map={"AutoConfig": "evil.Config", "AutoModel": "evil.Model"}
        ),
    )
    return command_on(which, folder, assets).but(stdin=b"y\n" * 100)


@case("models/soup", done())
def _(folder: Path, assets: Assets) -> Command:
    assets.copy(assets.model, folder / "a")
    assets.copy(assets.model, folder / "b")
    return soup("a", "b")


@family(
    "models/soup-weights",
    [row(name, weights) for name, weights in (("nan", ("nan", "1")), ("inf", ("inf", "1")), ("minus", ("1", "-1")))],
    refused("--weights", untouched=True),
    cause=8,
)
def _(folder: Path, assets: Assets, weights: tuple[str, ...]) -> Command:
    assets.copy(assets.model, folder / "a")
    assets.copy(assets.model, folder / "b")
    return soup("a", "b", weights=weights)


@case("models/export-over-an-export-with-a-note", refused("export", "note.txt"), cause=24, quick=True)
def _(folder: Path, assets: Assets) -> Command:
    command = export(assets.model)
    ran(command)
    write(folder / "export" / "1x16" / "note.txt", "mine")
    return command


@case("models/export-into-a-read-only-folder", refused("shut/export"), cause=25)
def _(folder: Path, assets: Assets) -> Command:
    (folder / "shut").mkdir(mode=0o500)
    return export(assets.model, output="shut/export").but(without_rights=True)


@case("models/export-after-a-kill-in-the-metrics", done(), cause=25)
def _(folder: Path, assets: Assets) -> Command:
    run = assets.copy(assets.finetuned_run, folder / "run")
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write(json.dumps({"step": 3})[:-3])
    return export("run/model")

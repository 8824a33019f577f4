"""trainer.distill, guides, trainer.teacher_vectors, data.excerpts: teachers, stores and texts they cannot use."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

from tests.faults.hostile.assets import Assets
from tests.faults.hostile.builders import jsonl, ran, recipe_values, small_disk, train, wait_for, write
from tests.faults.hostile.case import Command, case, family, row
from tests.faults.hostile.cases_models import WEIGHTS, Damage, set_settings, with_nan
from tests.faults.hostile.verdict import done, ended_with, holds, kept, misused, refused

STORED = {"vectors": "stored", "store": "store"}


def distill(folder: Path, assets: Assets, *overrides: str, teacher: Path | str = "", **more: str) -> Command:
    return train(folder, distilled(assets, teacher, **more), *overrides)


def distilled(assets: Assets, teacher: Path | str = "", **more: str) -> dict[str, dict[str, Any]]:
    """A recipe that teaches the model of the assets; it is the teacher too where no other is named."""
    values = recipe_values(assets.documents, "distill", train={"steps": 2})
    values["model"] |= {"config": {}, "source": str(assets.model)}
    return values | {"teacher": {"model": str(teacher or assets.model), **more}}


def store(folder: Path, assets: Assets, *arguments: str, texts: Path | str = "", teacher: Path | str = "") -> Command:
    distill(folder, assets, teacher=teacher, **STORED)  # writes the recipe
    words = ("--config", "recipe.toml", "--texts", str(texts or assets.documents_file), *arguments)
    return Command("trainer.teacher_vectors", words, outputs=("store",))


def excerpts(*arguments: str) -> Command:
    return Command("data.excerpts", (*arguments, "--output", "excerpts.jsonl"), outputs=("excerpts.jsonl",))


# ------------------------------------------------------------------------------------------------------ trainer.distill


@case("distill/whole", done(), holds("run/model/barista.json"))
def _(folder: Path, assets: Assets) -> Command:
    return distill(folder, assets)


@family(
    "distill/teacher",
    [
        row("absent", None, expect=refused("teacher")),
        row("nan", with_nan, expect=refused("teacher")),
        row("no-weights", lambda model: (model / WEIGHTS).unlink(), expect=refused("teacher")),
        row("a-file", lambda model: (shutil.rmtree(model), model.write_text("a model")), expect=refused("teacher")),
        row("no-settings", lambda model: (model / "barista.json").unlink(), expect=refused("teacher.pooling")),
        row("narrow", set_settings(ladder=[[2, 8]]), expect=refused("8 dimensions"), quick=True),
    ],
    cause="own",
)
def _(folder: Path, assets: Assets, damage: Damage | None) -> Command:
    if damage is not None:
        damage(assets.copy(assets.model, folder / "teacher"))
    return distill(folder, assets, teacher=folder / "teacher")


@family(
    "distill/settings",
    [
        row("nothing-taught", "--teacher.vector_weight=0", expect=refused("teacher.vector_weight")),
        row("by-dot-product", "--objective.similarity=dot", expect=refused("similarity")),
        row("drawn-sizes", "--objective.sizes=two_d", expect=refused("two_d")),
        row("store-without-use", "--teacher.store=store", expect=refused("teacher.store")),
        row("no-such-store", "--teacher.vectors=stored", expect=refused("teacher.store")),
        row("heads-without-heads", "--model.trains=heads", expect=refused("heads")),
    ],
    cause="own",
)
def _(folder: Path, assets: Assets, override: str) -> Command:
    return distill(folder, assets, override)


@case("distill/store-of-nothing", refused("holds no vectors"), cause="own")
def _(folder: Path, assets: Assets) -> Command:
    return distill(folder, assets, **STORED)


@case("distill/store-unfinished", refused("unfinished"), cause="own")
def _(folder: Path, assets: Assets) -> Command:
    ran(store(folder, assets))
    record = folder / "store" / "store.json"
    record.write_text(record.read_text().replace('"blocks": 1', '"blocks": null'))
    return distill(folder, assets, **STORED)


@case("distill/store-of-other-texts", refused("teacher.store"), cause="own")
def _(folder: Path, assets: Assets) -> Command:
    write(folder / "others.jsonl", jsonl({"text": f"the cat saw {word}"} for word in ("milk", "water", "bread")))
    ran(store(folder, assets, texts="others.jsonl"))
    return distill(folder, assets, **STORED)


@family(
    "distill/store",
    [
        row("record-cut", "store.json", b'{"blocks"'),
        row("keys-cut", "000000.keys.npy", b"\x93NUMPY"),
        row("vectors-cut", "000000.f16.npy", b"\x93NUMPY"),
        row("vectors-zipped", "000000.f16.npy", b"PK\x05\x06" + bytes(18)),
        row("vectors-pickled", "000000.f16.npy", b"\x80\x04K\x01."),
    ],
    refused("store"),
    cause="own",
)
def _(folder: Path, assets: Assets, name: str, content: bytes) -> Command:
    ran(store(folder, assets))
    assert (folder / "store" / name).is_file(), sorted(path.name for path in (folder / "store").iterdir())
    write(folder / "store" / name, content)
    return distill(folder, assets, **STORED)


# ------------------------------------------------------------------------------------------- a guide's stored vectors


def guided(folder: Path, assets: Assets, *overrides: str, **guide: str) -> Command:
    """A recipe whose guide filters; its vectors are in `store` where nothing else is said."""
    values = recipe_values(assets.tuples, "contrastive", train={"steps": 2})
    values["objective"] |= {"filter_false_negatives": True, "filter_by": "guide", "kl_teacher": "guide"}
    return train(folder, values | {"guide": {"model": str(assets.model), "store": "store", **guide}}, *overrides)


def guide_store(folder: Path, assets: Assets, *arguments: str, texts: Path | str = "") -> Command:
    guided(folder, assets)  # writes the recipe
    words = ("--config", "recipe.toml", "--texts", str(texts or assets.tuples_file), *arguments)
    return Command("trainer.teacher_vectors", words, outputs=("store",))


@case("guides/stored", done(), holds("run/model/barista.json"), seconds=120)
def _(folder: Path, assets: Assets) -> Command:
    ran(guide_store(folder, assets))
    return guided(folder, assets)


@case("guides/store-of-nothing", refused("guide.store"), cause="own", quick=True)
def _(folder: Path, assets: Assets) -> Command:
    return guided(folder, assets)


@case("guides/store-of-other-texts", refused("guide.store"), cause="own", seconds=120)
def _(folder: Path, assets: Assets) -> Command:
    words = ("milk", "water", "bread")
    write(folder / "others.jsonl", jsonl({"query": f"what is {word}", "positive": f"a {word}"} for word in words))
    ran(guide_store(folder, assets, texts="others.jsonl"))
    return guided(folder, assets)


@case("guides/store-of-documents", refused("guide.store"), cause="own", seconds=120)
def _(folder: Path, assets: Assets) -> Command:
    ran(store(folder, assets))
    return guided(folder, assets)


@case("guides/store-of-other-lengths", refused("data.passage_max_length"), cause="own", seconds=120)
def _(folder: Path, assets: Assets) -> Command:
    ran(guide_store(folder, assets))
    return guided(folder, assets, "--data.passage_max_length=24")


@family(
    "guides/store",
    [
        row("record-cut", "store.json", b'{"blocks"'),
        row("record-of-lists", "store.json", b"[]"),
        row("keys-cut", "000000.keys.npy", b"\x93NUMPY"),
        row("vectors-cut", "000000.f16.npy", b"\x93NUMPY"),
        row("vectors-empty", "000000.f16.npy", b""),
        row("vectors-pickled", "000000.f16.npy", b"\x80\x04K\x01."),
    ],
    refused("store"),
    cause="own",
    seconds=120,
)
def _(folder: Path, assets: Assets, name: str, content: bytes) -> Command:
    ran(guide_store(folder, assets))
    assert (folder / "store" / name).is_file(), sorted(path.name for path in (folder / "store").iterdir())
    write(folder / "store" / name, content)
    return guided(folder, assets)


@family(
    "guides/settings",
    [
        row("spans", "--objective.name=masked", "--objective.pairs=spans", expect=refused("guide.store")),
        row(
            "two-models-in-one-folder",
            *("--teacher.model=another", "--teacher.vectors=stored", "--teacher.store=store"),
            expect=refused("guide.store and teacher.store"),
        ),
    ],
    cause="own",
)
def _(folder: Path, assets: Assets, *overrides: str) -> Command:
    command = guided(folder, assets, *overrides)
    return command.but(module="trainer.pretrain") if "--objective.name=masked" in overrides else command


# ---------------------------------------------------------------------------------------------- trainer.teacher_vectors


@case("vectors/whole", done(), holds("store/store.json"))
def _(folder: Path, assets: Assets) -> Command:
    return store(folder, assets)


@case("vectors/trained-on", done(), holds("run/model/barista.json"), seconds=120)
def _(folder: Path, assets: Assets) -> Command:
    ran(store(folder, assets))
    return distill(folder, assets, **STORED)


@case("vectors/stopped-goes-on", done(), holds("store/store.json"), seconds=120)
def _(folder: Path, assets: Assets) -> Command:
    command = store(folder, assets)

    def kill(process: int) -> None:
        wait_for((folder / "store" / "store.json").exists)
        os.kill(process, signal.SIGKILL)

    ran(command.but(meanwhile=kill), code=None)
    return command


@case(
    "vectors/store-of-something-else",
    refused("holds something else"),
    kept("store/thesis.txt"),
    cause="own",
    quick=True,
)
def _(folder: Path, assets: Assets) -> Command:
    write(folder / "store/thesis.txt", "mine")
    return store(folder, assets)


@case("vectors/store-of-another-teacher", refused("another teacher"), cause="own", seconds=120)
def _(folder: Path, assets: Assets) -> Command:
    ran(store(folder, assets))
    set_settings(passage_prompt="text: ")(assets.copy(assets.model, folder / "teacher"))
    return store(folder, assets, teacher=folder / "teacher")


@family(
    "vectors/inputs",
    [
        row("no-texts", "absent.jsonl", (), expect=refused("absent.jsonl")),
        row("no-such-column", "", ("--text-column", "body"), expect=refused("body")),
        row("what-divides-no-file", "", ("--text-split", "lines"), expect=refused("--text-split", untouched=True)),
        row("no-such-key", "", ("--teacher.sort=live",), expect=refused("teacher.sort")),
        row("live", "", ("--teacher.vectors=live",), expect=refused("teacher")),
        row("no-such-option", "", ("--speed", "9"), expect=misused("--speed")),
    ],
    cause="own",
)
def _(folder: Path, assets: Assets, texts: str, arguments: tuple[str, ...]) -> Command:
    return store(folder, assets, *arguments, texts=texts)


@case("vectors/disk-full", ended_with(2, "store"), cause="own")
def _(folder: Path, assets: Assets) -> Command:
    small_disk(folder / "store", 8)
    return store(folder, assets)


# -------------------------------------------------------------------------------------------------------- data.excerpts


@case("excerpts/whole", done(), holds("excerpts.jsonl"))
def _(folder: Path, assets: Assets) -> Command:
    write(
        folder / "texts.jsonl", jsonl({"text": f"The cat number {i} saw a dog. Then it went away."} for i in range(9))
    )
    return excerpts("texts.jsonl")


@family(
    "excerpts/inputs",
    [
        row("absent", None, (), expect=refused("texts.jsonl")),
        row("empty", "", (), expect=refused("texts.jsonl")),
        row("too-short", jsonl([{"text": "Cats."}]), (), expect=refused("16 characters")),
        row("cut", '{"text": "The cat saw', (), expect=refused("texts.jsonl")),
        row(
            "no-such-sentences",
            jsonl([{"text": "A cat saw a dog."}]),
            ("--without", "no.tsv"),
            expect=refused("no.tsv"),
        ),
    ],
    cause="own",
)
def _(folder: Path, assets: Assets, content: str | None, arguments: tuple[str, ...]) -> Command:
    if content is not None:
        write(folder / "texts.jsonl", content)
    return excerpts("texts.jsonl", *arguments)


@case(
    "excerpts/output-is-a-folder", refused("excerpts.jsonl"), kept("excerpts.jsonl/mine.txt"), cause="own", quick=True
)
def _(folder: Path, assets: Assets) -> Command:
    write(folder / "texts.jsonl", jsonl([{"text": "The cat saw a dog in the water."}]))
    write(folder / "excerpts.jsonl/mine.txt", "mine")
    return excerpts("texts.jsonl")


@case("excerpts/sentences-are-not-text", refused("sentences"), cause="own")
def _(folder: Path, assets: Assets) -> Command:
    write(folder / "texts.jsonl", jsonl([{"text": "The cat saw a dog in the water."}]))
    write(folder / "sts.tsv", b"\xff\xfe\x00")
    return excerpts("texts.jsonl", "--without", "sts.tsv")


@family(
    "excerpts/output",
    [
        row("an-input", "texts.jsonl", expect=refused("texts.jsonl", "is the input")),
        row("an-input-by-another-path", "../work/texts.jsonl", expect=refused("is the input")),
        row("the-sentences", "sts.tsv", expect=refused("is the input")),
        row("a-pipe", "pipe", expect=refused("no regular file")),
        row("below-a-file", "sts.tsv/out.jsonl", expect=refused("sts.tsv")),
    ],
    kept("texts.jsonl", "sts.tsv", "pipe"),
    cause="own",
)
def _(folder: Path, assets: Assets, output: str) -> Command:
    write(folder / "texts.jsonl", jsonl([{"text": "The cat saw a dog in the water."}]))
    write(folder / "sts.tsv", "1.0\ta\tb\n")
    os.mkfifo(folder / "pipe")
    return Command("data.excerpts", ("texts.jsonl", "--without", "sts.tsv", "--output", output))


@case("vectors/store-that-is-a-file", refused("store"), kept("store"), cause="own")
def _(folder: Path, assets: Assets) -> Command:
    write(folder / "store", "mine")
    return store(folder, assets)

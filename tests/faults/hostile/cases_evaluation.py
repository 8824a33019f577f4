"""Evaluation: inputs that are damaged or ambiguous, outputs, stored vectors, results of others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.faults.hostile.assets import Assets
from tests.faults.hostile.builders import beir, change_json, deep, evaluate, gz, jsonl, ran, write
from tests.faults.hostile.case import Command, case, family, row
from tests.faults.hostile.verdict import done, kept, refused

QUERIES = [{"_id": f"q{i}", "text": text} for i, text in enumerate(("what is milk", "the cat", "the dog"))]
CORPUS = [{"_id": f"d{i}", "text": text} for i, text in enumerate(("milk", "cat", "dog", "water", "bread", "coffee"))]
HEADER = "query-id\tcorpus-id\tscore\n"


def judging(grade: str) -> dict[str, str]:
    return {"qrels": f"{HEADER}q0\td0\t{grade}\nq1\td1\t1\n"}


@family(
    "evaluation/beir",
    [
        row("good", {}, expect=done()),
        row("contents-for-text", {"corpus": jsonl({"_id": f"d{i}", "contents": "milk"} for i in range(6))}, cause=4),
        row("query-for-text", {"queries": jsonl({"_id": f"q{i}", "query": "milk"} for i in range(3))}, cause=4),
        row("document-twice", {"corpus": jsonl([*CORPUS, {"_id": "d1", "text": "other"}])}, cause=4, quick=True),
        row("ids-1-and-one", {"corpus": jsonl([*CORPUS, {"_id": 1, "text": "a"}, {"_id": "1", "text": "b"}])}, cause=4),
        row("text-a-list", {"corpus": jsonl([*CORPUS, {"_id": "d9", "text": ["a"]}])}, cause=4),
        row("grade-superscript", judging("²"), cause=25),
        row("grade-two-signs", judging("--1"), cause=25),
        row("grade-huge", judging("1" + "0" * 30), cause=25),
        row("corpus-deep", {"corpus": deep()}, cause=25),
        row("corpus-latin-1", {"corpus": '{"_id": "d0", "text": "café"}\n'.encode("latin-1")}, cause=25),
        row("qrels-latin-1", {"qrels": HEADER.encode() + b"q\xe9\td0\t1\n"}, cause=25),
        row("qrels-header-alone", {"qrels": HEADER}),
    ],
    refused("b/"),
)
def _(folder: Path, assets: Assets, files: dict[str, str | bytes]) -> Command:
    beir(folder / "b", **files)  # type: ignore[arg-type]
    return evaluate(assets.model, "--beir", "b")


@family(
    "evaluation/sts",
    [
        row("latin-1", "s.tsv", "1.0\tcafé\tb\n".encode("latin-1"), cause=25),
        row("gz", "s.jsonl.gz", gz(jsonl([{"sentence1": "a", "sentence2": "b", "score": 1.0}])), cause=25),
        row("score-nan", "s.tsv", "nan\ta\tb\n"),
        row("deep", "s.jsonl", deep(), cause=25),
    ],
    refused("s."),
)
def _(folder: Path, assets: Assets, name: str, content: str | bytes) -> Command:
    write(folder / name, content)
    return evaluate(assets.model, "--sts", name)


@case("evaluation/output-read-only", refused("--output"), cause=24)
def _(folder: Path, assets: Assets) -> Command:
    (folder / "o").mkdir(mode=0o500)
    command = evaluate(assets.model, "--beir", str(assets.beir), "--output", "o", outputs=("o",))
    return command.but(without_rights=True)


@case("evaluation/output-foreign", refused("--output", "thesis"), kept("o/thesis"))
def _(folder: Path, assets: Assets) -> Command:
    write(folder / "o" / "thesis", "mine")
    return evaluate(assets.model, "--beir", str(assets.beir), "--output", "o", outputs=("o",))


def settings(folder: Path) -> Path:
    return next(folder.rglob("store.json"))


@family(
    "evaluation/vectors",
    [
        row("good", lambda store: None, expect=done()),
        row(
            "cut",
            lambda store: next(store.parent.glob("*.f16")).write_bytes(b"abc"),
            expect=refused("vec/", "bytes"),
        ),
        row("widths-of-letters", lambda store: change_json(store, lambda value: value.update(widths={"x": "y"}))),
        row("fingerprints-a-number", lambda store: change_json(store, lambda value: value.update(fingerprints=3))),
    ],
    refused("vec/"),
    cause=25,
)
def _(folder: Path, assets: Assets, damage: Callable[[Path], None]) -> Command:
    command = evaluate(assets.model, "--beir", str(assets.beir), "--vectors", "vec", outputs=("vec",))
    ran(command)
    damage(settings(folder))
    return command

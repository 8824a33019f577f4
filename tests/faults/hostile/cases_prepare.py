"""data.prepare: files, columns, compression, odd names, outputs."""

from __future__ import annotations

import resource
from pathlib import Path

from tests.faults.hostile.assets import Assets
from tests.faults.hostile.builders import beir, deep, gz, jsonl, lines, prepare, ran, small_disk, write, zst
from tests.faults.hostile.case import Command, case, family, row
from tests.faults.hostile.verdict import check, counts, done, either, kept, misused, refused

GOOD = jsonl([{"text": "the cat"}, {"text": "the dog saw water"}])


@family(
    "prepare/documents",
    [
        row("deep-nesting", "a.jsonl", deep(), expect=refused("a.jsonl"), cause=25, quick=True),
        row("five-thousand-digits", "a.jsonl", GOOD + '{"text": 1' + "0" * 5000 + "}\n", expect=refused("a.jsonl:3")),
        row("invalid-utf8", "a.jsonl", GOOD.encode() + b'{"text": "\xff"}\n', expect=refused("a.jsonl:3", "UTF-8")),
        row("empty-file", "a.jsonl", "", expect=refused("a.jsonl", "empty", untouched=True)),
        row("escaped-nul", "a.jsonl", jsonl([{"text": "the\0cat"}]), expect=(done(), counts("out", samples=1))),
        row("zst-cut-at-half", "a.jsonl.zst", zst(lines(2000))[:-900], expect=refused("a.jsonl.zst"), cause=1),
        row("gz-cut-at-half", "a.jsonl.gz", gz(lines(2000))[:-900], expect=refused("a.jsonl.gz", "damaged")),
        row("unknown-format", "a.csv", "text\ncat\n", expect=refused("a.csv", untouched=True)),
    ],
)
def _(folder: Path, assets: Assets, name: str, content: str | bytes) -> Command:
    write(folder / name, content)
    return prepare(assets, "documents", name)


@case(
    "prepare/zst-one-of-three-cut-by-three-bytes",
    either(refused("2.jsonl.zst"), (done(), counts("out", samples=3000))),
    cause=1,
    quick=True,
)
def _(folder: Path, assets: Assets) -> Command:
    for number in (1, 2, 3):
        whole = zst(lines(1000, prefix=f"file {number}"))
        write(folder / "in" / f"{number}.jsonl.zst", whole[:-3] if number == 2 else whole)
    return prepare(assets, "documents", "in")


@case(
    "prepare/negatives-from-the-second-row-on",
    either(
        refused("a.jsonl:2"),
        (done(), check("a row's negative is read", lambda outcome: _passages(outcome.folder / "out") > 10)),
    ),
    cause=5,
    quick=True,
)
def _(folder: Path, assets: Assets) -> Command:
    rows = [{"query": f"what is {i}", "positive": "milk"} | ({"negative": "bread"} if i else {}) for i in range(10)]
    write(folder / "a.jsonl", jsonl(rows))
    return prepare(assets, "tuples", "a.jsonl")


def _passages(output: Path) -> int:
    from data.shards import ShardFolder

    shards = ShardFolder(output, verify="size")
    return sum(len(shards.tuple(index).passages) for index in range(len(shards)))


@case(
    "prepare/same-file-twice",
    either(refused("a.jsonl"), (done(), counts("out", samples=2))),
    cause=6,
    quick=True,
)
def _(folder: Path, assets: Assets) -> Command:
    write(folder / "a.jsonl", GOOD)
    return prepare(assets, "documents", "a.jsonl", "a.jsonl")


@case("prepare/input-unreadable", refused("a.jsonl", untouched=True), cause=25)
def _(folder: Path, assets: Assets) -> Command:
    write(folder / "a.jsonl", GOOD).chmod(0o000)
    return prepare(assets, "documents", "a.jsonl").but(without_rights=True)


@case("prepare/beir-judges-a-document-that-is-not-there", refused("d99", "b/corpus.jsonl"))
def _(folder: Path, assets: Assets) -> Command:
    beir(folder / "b", qrels="query-id\tcorpus-id\tscore\nq0\td99\t1\n")
    return prepare(assets, "tuples", "b", "--split", "test")


@case("prepare/output-is-a-foreign-folder", refused("out", "thesis.txt"), kept("out/thesis.txt"))
def _(folder: Path, assets: Assets) -> Command:
    write(folder / "a.jsonl", GOOD)
    write(folder / "out" / "thesis.txt", "mine")
    return prepare(assets, "documents", "a.jsonl")


@family("prepare/output-on-a-disk-of", [row(f"{kib}-kib", kib, cause=25) for kib in (4, 64)], refused("out"))
def _(folder: Path, assets: Assets, kib: int) -> Command:
    write(folder / "a.jsonl", lines(20_000))
    small_disk(folder / "out", kib)
    return prepare(assets, "documents", "a.jsonl")


@case("prepare/disk-full-then-again-with-room", done(), counts("out", samples=20_000))
def _(folder: Path, assets: Assets) -> Command:
    write(folder / "a.jsonl", lines(20_000))
    disk = small_disk(folder / "out", 64)
    command = prepare(assets, "documents", "a.jsonl")
    ran(command, code=2)
    disk.resize(4000)
    return command


@case("prepare/file-size-limit", refused("out/shard-"))
def _(folder: Path, assets: Assets) -> Command:
    write(folder / "a.jsonl", lines(20_000))
    return prepare(assets, "documents", "a.jsonl").but(limits={resource.RLIMIT_FSIZE: 200_000})


@case("prepare/unknown-option", misused("--colour"))
def _(folder: Path, assets: Assets) -> Command:
    write(folder / "a.jsonl", GOOD)
    return prepare(assets, "documents", "a.jsonl", "--colour", "red")

"""data.prepare: files, columns, compression, ids, names, options, outputs, tokenizers, and repeated commands."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import zstandard

from tests.faults.hostile.assets import Assets
from tests.faults.hostile.builders import beir, deep, gz, jsonl, lines, prepare, ran, small_disk, wait_for, write, zst
from tests.faults.hostile.case import Command, case, family, row
from tests.faults.hostile.verdict import (
    Check,
    absent,
    check,
    counts,
    done,
    done_and_said,
    ended_with,
    kept,
    misused,
    refused,
    same_result_as,
)

GOOD = jsonl([{"text": "the cat"}, {"text": "the dog saw water"}])
CUT = lines(2000)
CHECKED = zstandard.ZstdCompressor(write_checksum=True).compress(CUT.encode())
BOM = b"\xef\xbb\xbf"


def read(samples: int) -> tuple[Check, ...]:
    return (done(), counts("out", samples=samples))


def nothing_left(*naming: str) -> tuple[Check, ...]:
    """The command is refused, and the output is as if it had never run."""
    return refused(*naming), absent("out")


def long_frames(content: str) -> bytes:
    parameters = zstandard.ZstdCompressionParameters(window_log=28, enable_ldm=True)
    return zstandard.ZstdCompressor(compression_params=parameters).compress(content.encode())


def flushed(content: str) -> bytes:
    """Compressed blocks of one line each, so that a cut between two blocks leaves whole lines."""
    compressor = zstandard.ZstdCompressor().compressobj()
    parts = []
    for line in content.splitlines(keepends=True):
        parts += [compressor.compress(line.encode()), compressor.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)]
    return b"".join([*parts, compressor.flush()])


def parquet(path: Path, table: Any, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(table, path, **options)
    return path


def flip(content: bytes, place: int) -> bytes:
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


# ---------------------------------------------------------------------------------------------------- one bad file


@family(
    "prepare/documents",
    [
        row(
            "deep-nesting", "a.jsonl", deep(), expect=nothing_left("a.jsonl:1", "nested too deep"), cause=25, quick=True
        ),
        row(
            "deep-nesting-in-another-key",
            "a.jsonl",
            f'{{"text": "a", "b": {deep()}}}',
            expect=nothing_left("a.jsonl:1"),
        ),
        row(
            "five-thousand-digits",
            "a.jsonl",
            GOOD + '{"text": 1' + "0" * 5000 + "}\n",
            expect=nothing_left("a.jsonl:3"),
        ),
        row("nul-bytes", "a.jsonl", GOOD + '{"text": "a\0b"}\n', expect=nothing_left("a.jsonl:3", "no JSON")),
        row("escaped-nul", "a.jsonl", jsonl([{"text": "the\0cat"}]), expect=read(1)),
        row(
            "invalid-utf8", "a.jsonl", GOOD.encode() + b'{"text": "\xff"}\n', expect=nothing_left("a.jsonl:3", "UTF-8")
        ),
        row("lone-surrogates", "a.jsonl", '{"text": "cat \\ud800", "\\udfff": 1}\n', expect=read(1)),
        row("cesu", "a.jsonl", b'{"text": "\xed\xa0\xbd\xed\xb8\x80"}\n', expect=nothing_left("a.jsonl:1", "UTF-8")),
        row("byte-order-mark", "a.jsonl", BOM + GOOD.encode(), expect=read(2)),
        row("byte-order-mark-gz", "a.jsonl.gz", gz(BOM + GOOD.encode()), expect=read(2)),
        row("byte-order-mark-txt", "a.txt", BOM + b"the cat\n", expect=read(1)),
        row("utf-16", "a.jsonl", GOOD.encode("utf-16"), expect=nothing_left("a.jsonl:1")),
        row("empty-file", "a.jsonl", "", expect=nothing_left("a.jsonl", "empty")),
        row("blank-lines", "a.jsonl", "\n \n\n", expect=nothing_left("no samples")),
        row("empty-gz", "a.jsonl.gz", gz(""), expect=nothing_left("no samples")),
        row("empty-zst", "a.jsonl.zst", zst(""), expect=nothing_left("no samples")),
        row("a-list", "a.jsonl", GOOD + "[1]\n", expect=nothing_left("a.jsonl:3", "list")),
        row("a-number", "a.jsonl", GOOD + "1\n", expect=nothing_left("a.jsonl:3", "int")),
        row("two-objects-a-line", "a.jsonl", '{"text": "a"}{"text": "b"}\n', expect=nothing_left("a.jsonl:1")),
        row("one-object-over-lines", "a.json", '{\n"text": "a"}\n', expect=nothing_left("a.json:1")),
        row("an-array-of-objects", "a.json", '[{"text": "a"}]', expect=nothing_left("a.json:1", "list")),
        row("missing-column", "a.jsonl", jsonl([{"body": "x"}]), expect=nothing_left("a.jsonl:1", "'body'")),
        row(
            "missing-column-later", "a.jsonl", GOOD + jsonl([{"body": "x"}]), expect=nothing_left("a.jsonl:3", "'text'")
        ),
        row("text-a-list", "a.jsonl", jsonl([{"text": ["a"]}]), expect=nothing_left("a.jsonl:1", "list")),
        row("text-nan", "a.jsonl", '{"text": NaN}\n', expect=nothing_left("a.jsonl:1", "float")),
        row("text-null", "a.jsonl", '{"text": null}\n', expect=nothing_left("a.jsonl:1", "empty")),
        row("text-of-controls", "a.jsonl", '{"text": "\\u0001\\u0002"}\n', expect=nothing_left("a.jsonl:1", "token")),
        row("last-line-without-an-end", "a.jsonl", GOOD[:-1], expect=read(2)),
        row("windows-line-ends", "a.jsonl", GOOD.replace("\n", "\r\n"), expect=read(2)),
        row("csv", "a.csv", "text\ncat\n", expect=refused("a.csv", "unknown format", untouched=True)),
        row("no-ending", "a", GOOD, expect=refused("a is of an unknown format", untouched=True)),
        row("upper-case-ending", "A.JSONL", GOOD, expect=read(2)),
        row("upper-case-gz", "A.JSONL.GZ", gz(GOOD), expect=read(2)),
        row("hidden", ".a.jsonl", GOOD, expect=read(2)),
        row("twice-packed", "a.jsonl.gz.gz", gz(gz(GOOD)), expect=refused("a.jsonl.gz.gz", untouched=True)),
        row("parquet-gz", "a.parquet.gz", gz("x"), expect=refused("decompress it", untouched=True)),
        row("parquet-that-is-text", "a.parquet", GOOD, expect=refused("a.parquet", untouched=True)),
        row("newline-and-brackets-in-its-name", "a\n[1].jsonl", GOOD, expect=read(2)),
        row("long-name", f"{'x' * 240}.jsonl", GOOD, expect=read(2)),
        row("long-line", "a.jsonl", jsonl([{"text": "cat " * 2_000_000}]), expect=read(1)),
        row("txt-of-nul", "a.txt", "\0\0\n\n\0", expect=nothing_left("a.txt:1", "token")),
    ],
)
def _(folder: Path, assets: Assets, name: str, content: str | bytes) -> Command:
    write(folder / name, content)
    return prepare(assets, "documents", name)


@family(
    "prepare/compressed",
    [
        row("gz-garbage-behind", "a.jsonl.gz", gz(CUT) + b"garbage", expect=nothing_left("a.jsonl.gz")),
        row("gz-zeros-behind", "a.jsonl.gz", gz(CUT) + bytes(512), expect=read(2000)),
        row("gz-cut-at-half", "a.jsonl.gz", gz(CUT)[:-900], expect=nothing_left("a.jsonl.gz", "damaged")),
        row("gz-cut-by-one", "a.txt.gz", gz(CUT)[:-1], expect=nothing_left("a.txt.gz", "damaged")),
        row("gz-wrong-crc", "a.jsonl.gz", flip(gz(CUT), len(gz(CUT)) - 6), expect=nothing_left("a.jsonl.gz")),
        row("gz-that-is-text", "a.jsonl.gz", GOOD, expect=nothing_left("a.jsonl.gz")),
        row("gz-several-members", "a.jsonl.gz", gz(GOOD) + gz(GOOD), expect=read(4)),
        row("zst-cut-at-half", "a.jsonl.zst", zst(CUT)[:-900], expect=nothing_left("a.jsonl.zst", "missing"), cause=1),
        row("zst-cut-by-one", "a.jsonl.zst", zst(CUT)[:-1], expect=nothing_left("a.jsonl.zst", "missing"), cause=1),
        row("zst-cut-to-a-byte", "a.jsonl.zst", zst(CUT)[:1], expect=nothing_left("a.jsonl.zst", "missing"), cause=1),
        row("zst-txt-cut", "a.txt.zst", zst(CUT)[:-900], expect=nothing_left("a.txt.zst", "missing"), cause=1),
        row("zst-cut-between-lines", "a.jsonl.zst", flushed(CUT)[:-3], expect=nothing_left("missing"), cause=1),
        row("zst-second-frame-cut", "a.jsonl.zst", zst(GOOD) + zst(CUT)[:-3], expect=nothing_left("missing"), cause=1),
        row("zst-bit-flip", "a.jsonl.zst", flip(CHECKED, len(CHECKED) // 2), expect=nothing_left("a.jsonl.zst")),
        row("zst-garbage-behind", "a.jsonl.zst", zst(CUT) + b"garbage", expect=nothing_left("a.jsonl.zst", "damaged")),
        row("zst-several-frames", "a.jsonl.zst", zst(GOOD) + zst(GOOD), expect=read(4)),
        row("zst-skippable-frame", "a.jsonl.zst", b"\x50\x2a\x4d\x18\x02\0\0\0hi" + zst(GOOD), expect=read(2)),
        row("zst-long-window", "a.jsonl.zst", long_frames(CUT), expect=read(2000)),
        row("zst-that-is-gz", "a.jsonl.zst", gz(GOOD), expect=nothing_left("a.jsonl.zst", "damaged")),
    ],
)
def _(folder: Path, assets: Assets, name: str, content: str | bytes) -> Command:
    write(folder / name, content)
    return prepare(assets, "documents", name)


# Results from the other files may stay in the output, so that the same command can go on with them.
@case("prepare/zst-one-of-three-cut-by-three-bytes", refused("2.jsonl.zst", "missing"), cause=1, quick=True)
def _(folder: Path, assets: Assets) -> Command:
    for number in (1, 2, 3):
        whole = zst(lines(1000, prefix=f"file {number}"))
        write(folder / "in" / f"{number}.jsonl.zst", whole[:-3] if number == 2 else whole)
    return prepare(assets, "documents", "in")


@family(
    "prepare/one-line-of-a-gibibyte-in",
    [
        row("gz", "gz", "1024", expect=nothing_left("longer than 1024 MiB", "--longest-line")),
        row("zst", "zst", "8", expect=nothing_left("longer than 8 MiB", "--longest-line")),
    ],
    seconds=120.0,
)
def _(folder: Path, assets: Assets, ending: str, mib: str) -> Command:
    """A file of about a megabyte that decompresses to a gigabyte, which must never be in memory whole."""
    if ending == "gz":
        member = gz(b"x" * 2**24)
        write(folder / "a.txt.gz", b"".join([member] * 65))
    else:
        compressor = zstandard.ZstdCompressor().compressobj()
        parts = [compressor.compress(bytes(2**24)) for _ in range(65)]
        write(folder / "a.txt.zst", b"".join([*parts, compressor.flush()]))
    command = prepare(assets, "documents", f"a.txt.{ending}", "--longest-line", mib)
    return command.but(limits={resource.RLIMIT_AS: 24 * 2**30})


def _text_table(column: Any, name: str = "text") -> Any:
    return pyarrow.table({name: column})


def _invalid_utf8() -> Any:
    offsets, characters = b"\0\0\0\0\2\0\0\0", b"\xff\xff"
    return pyarrow.Array.from_buffers(
        pyarrow.string(), 1, [None, pyarrow.py_buffer(offsets), pyarrow.py_buffer(characters)]
    )


@family(
    "prepare/parquet",
    [
        row("list-column", [["a"]], expect=nothing_left("a.parquet row 0", "list")),
        row("binary-column", [b"a"], expect=nothing_left("a.parquet row 0", "bytes")),
        row("number-column", [1], expect=nothing_left("a.parquet row 0", "int")),
        row("no-rows", pyarrow.array([], pyarrow.string()), expect=refused("no rows", untouched=True)),
        row("large-strings", pyarrow.array(["a"], pyarrow.large_string()), expect=read(1)),
        row("dictionary", pyarrow.array(["a", "a"]).dictionary_encode(), expect=read(2)),
        row("null", pyarrow.array(["a", None]), expect=nothing_left("a.parquet row 1", "empty")),
    ],
)
def _(folder: Path, assets: Assets, column: Any) -> Command:
    parquet(folder / "a.parquet", _text_table(column))
    return prepare(assets, "documents", "a.parquet")


@case("prepare/parquet/invalid-utf8", *nothing_left("a.parquet", "UTF-8"), cause=25)
def _(folder: Path, assets: Assets) -> Command:
    parquet(folder / "a.parquet", _text_table(_invalid_utf8()))
    return prepare(assets, "documents", "a.parquet")


@case("prepare/parquet/two-columns-of-one-name", refused("several columns 'text'", untouched=True))
def _(folder: Path, assets: Assets) -> Command:
    table = pyarrow.Table.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["text", "text"])
    parquet(folder / "a.parquet", table)
    return prepare(assets, "documents", "a.parquet")


@case("prepare/parquet/column-name-with-a-dot", *read(1))
def _(folder: Path, assets: Assets) -> Command:
    parquet(folder / "a.parquet", _text_table(["the cat"], "a.b"))
    return prepare(assets, "documents", "a.parquet", "--text-column", "a.b")


@family(
    "prepare/parquet/damaged-page",
    [
        row("plain", "none", False, expect=nothing_left("a.parquet"), cause=25),
        row("snappy", "snappy", False, expect=nothing_left("a.parquet"), cause=25),
        row("zstd-with-checksums", "zstd", True, expect=nothing_left("a.parquet")),
    ],
)
def _(folder: Path, assets: Assets, compression: str, checksums: bool) -> Command:
    texts = [f"the cat {number} {'x' * 50}" for number in range(2000)]
    path = parquet(
        folder / "a.parquet",
        _text_table(texts),
        compression=compression,
        use_dictionary=False,
        write_page_checksum=checksums,
    )
    content = bytearray(path.read_bytes())
    content[200:600] = bytes(byte ^ 0xFF for byte in content[200:600])
    path.write_bytes(content)
    return prepare(assets, "documents", "a.parquet")


@case("prepare/parquet/cut", refused("a.parquet", untouched=True))
def _(folder: Path, assets: Assets) -> Command:
    path = parquet(folder / "a.parquet", _text_table(["a"] * 100))
    path.write_bytes(path.read_bytes()[:-10])
    return prepare(assets, "documents", "a.parquet")


@family(
    "prepare/parquet/pairs",
    [
        row("structs", [[{"title": "a", "text": "b"}]], expect=read(1)),
        row(
            "map",
            pyarrow.array([[("text", "dog")]], pyarrow.map_(pyarrow.string(), pyarrow.string())),
            expect=nothing_left("a.parquet row 0", "map"),
        ),
    ],
)
def _(folder: Path, assets: Assets, positive: Any) -> Command:
    parquet(folder / "a.parquet", pyarrow.table({"query": ["what"], "positive": positive}))
    return prepare(assets, "tuples", "a.parquet")


# ------------------------------------------------------------------------------------------ columns, rows, headers


def passages(*expected: int) -> Check:
    """A check of the samples' numbers of passages, in sorted order."""

    def look(outcome: Any) -> bool | str:
        from data.shards.reader import ShardFolder

        shards = ShardFolder(outcome.folder / "out", verify="size")
        seen = sorted(len(shards.tuple(index).passages) for index in range(len(shards)))
        return seen == sorted(expected) or f"{seen}"

    return check(f"passages {expected}", look)


PAIR = {"query": "what is it", "positive": "milk"}


@family(
    "prepare/rows",
    [
        row(
            "negatives-from-the-second-on",
            [PAIR | ({"negative": "bread"} if number else {}) for number in range(10)],
            expect=(done(), passages(1, *[2] * 9)),
            cause=5,
            quick=True,
        ),
        row("negatives-missing-later", [PAIR | {"negative": "x"}, PAIR], expect=(done(), passages(2, 1))),
        row("other-names-of-negatives", [PAIR, PAIR | {"neg_1": "a", "neg_2": "b"}], expect=(done(), passages(1, 3))),
        row(
            "scores-from-the-second-on", [PAIR, PAIR | {"score": 1}], expect=nothing_left("a.jsonl:2", "score"), cause=5
        ),
        row("scores-missing-later", [PAIR | {"score": 1}, PAIR], expect=nothing_left("a.jsonl:2", "score")),
        row(
            "negatives-after-scores", [PAIR | {"score": 1}, PAIR | {"negative": "x"}], expect=nothing_left("a.jsonl:2")
        ),
        row("two-positive-columns", [PAIR | {"answer": "x"}], expect=done_and_said("not read: 'answer'")),
        row(
            "score-beside-negatives", [PAIR | {"negative": "x", "score": 1}], expect=done_and_said("not read: 'score'")
        ),
        row("score-with-underscores", [PAIR | {"score": "1_000"}], expect=nothing_left("a.jsonl:1", "1_000")),
        row("score-true", [PAIR | {"score": True}], expect=nothing_left("a.jsonl:1", "True")),
        row("score-of-400-digits", [PAIR | {"score": 10**400}], expect=nothing_left("a.jsonl:1", "finite")),
        row("query-a-list-of-one", [{"query": ["a"], "positive": ["b", "c"]}], expect=(done(), passages(2))),
        row(
            "query-a-list-of-two",
            [{"query": ["a", "b"], "positive": "b"}],
            expect=nothing_left("a.jsonl:1", "one query"),
        ),
        row("positive-an-empty-list", [{"query": "a", "positive": []}], expect=nothing_left("a.jsonl:1", "empty")),
        row("positive-a-number", [{"query": "a", "positive": 1}], expect=nothing_left("a.jsonl:1", "int")),
        row("positive-missing-later", [PAIR, {"query": "a"}], expect=nothing_left("a.jsonl:2", "'positive'")),
        row("no-known-columns", [{"a": "b"}], expect=refused("--query-column", untouched=True)),
    ],
)
def _(folder: Path, assets: Assets, rows: list[dict[str, Any]]) -> Command:
    write(folder / "a.jsonl", jsonl(rows))
    return prepare(assets, "tuples", "a.jsonl")


@case("prepare/rows/positive-nested-too-deep", *nothing_left("a.jsonl:1"), cause=25)
def _(folder: Path, assets: Assets) -> Command:
    write(folder / "a.jsonl", f'{{"query": "a", "positive": {"[" * 500}"x"{"]" * 500}}}\n')
    return prepare(assets, "tuples", "a.jsonl")


@family(
    "prepare/tsv",
    [
        row("quotes", 'query\tpositive\n"a ""b"""\tc\n', (), expect=read(1)),
        row("quoted-line-break", 'query\tpositive\n"a\nb"\tc\n', (), expect=nothing_left("a.tsv:2", "columns")),
        row("carriage-returns", "query\tpositive\rcat\tdog\r", (), expect=refused("a.tsv", untouched=True)),
        row("twice-the-same-name", "query\tquery\na\tb\n", (), expect=refused("a.tsv:1", "distinct", untouched=True)),
        row("a-row-too-short", "query\tpositive\na\n", (), expect=nothing_left("a.tsv:2", "1 tab-separated")),
        row("latin-1", "query\tpositive\ncaf\xe9\tb\n".encode("latin-1"), (), expect=nothing_left("a.tsv:2", "UTF-8")),
        row("only-a-header", "query\tpositive\n", (), expect=refused("a.tsv", "empty", untouched=True)),
        row(
            "nli-without-a-header",
            "cat\tanimal\tstone\ndog\tpet\tcar\n",
            ("--format", "nli"),
            expect=refused("a.tsv:1", "no header", untouched=True),
            cause=5,
        ),
        row("nli-with-one", "anchor\tpositive\thard_negative\na\tb\tc\n", ("--format", "nli"), expect=read(1)),
        row("nli-of-two", "anchor\tpositive\na\tb\n", ("--format", "nli"), expect=refused("2 columns", untouched=True)),
        row(
            "columns-and-a-header",
            "query\tpositive\na\tb\n",
            ("--columns", "query,positive"),
            expect=refused("is a header", untouched=True),
        ),
        row("columns-named-twice", "a\tb\n", ("--columns", "query,query"), expect=refused("distinct", untouched=True)),
        row("sts-with-a-header", "score\ta\tb\n1\ta\tb\n", ("--format", "sts"), expect=nothing_left("a.tsv:1")),
        row("sts-infinite", "1e999\ta\tb\n", ("--format", "sts"), expect=nothing_left("a.tsv:1", "finite")),
        row("zst-cut", zst("query\tpositive\n" + "a\tb\n" * 5000)[:-3], (), expect=nothing_left("missing"), cause=1),
    ],
)
def _(folder: Path, assets: Assets, content: str | bytes, options: tuple[str, ...]) -> Command:
    name = "a.tsv.zst" if isinstance(content, bytes) and content.startswith(b"\x28\xb5") else "a.tsv"
    write(folder / name, content)
    return prepare(assets, "tuples", name, *options)


@case("prepare/tsv/skip-rows-of-another-content", refused("skipped rows"), kept("out/manifest.json"))
def _(folder: Path, assets: Assets) -> Command:
    write(folder / "a.tsv", "query\tpositive\n" + "a\tb\n" * 5)
    write(folder / "skip", "1\n")
    command = prepare(assets, "tuples", "a.tsv", "--skip-rows", "skip")
    ran(command)
    write(folder / "skip", "2\n")
    return command


@family(
    "prepare/skip-rows",
    [
        row("negative", "-1\n", expect=refused("-1", untouched=True)),
        row("beyond", "9\n", expect=nothing_left("row 9", "5 rows")),
        row("no-number", "one\n", expect=refused("skip", untouched=True)),
        row("binary", b"\xff", expect=refused("skip", "UTF-8", untouched=True)),
        row("all", "0 1 2 3 4", expect=nothing_left("no samples")),
    ],
)
def _(folder: Path, assets: Assets, content: str | bytes) -> Command:
    write(folder / "a.tsv", "query\tpositive\n" + "a\tb\n" * 5)
    write(folder / "skip", content)
    return prepare(assets, "tuples", "a.tsv", "--skip-rows", "skip")


# ------------------------------------------------------------------------------------------------ which files are read


def _tree(folder: Path) -> None:
    for name in ("in/a.jsonl", "in/sub/b.jsonl", "in/sub/deep/c.jsonl"):
        write(folder / name, jsonl([{"text": f"the cat {name} {number}"} for number in range(3)]))


@family(
    "prepare/inputs",
    [
        row("folder", "in", expect=read(9)),
        row("glob", "in/**/*.jsonl", expect=read(9)),
        row("same-file-twice", "in/a.jsonl", "in/a.jsonl", expect=refused("in/a.jsonl", "twice"), cause=6, quick=True),
        row("file-and-folder", "in/a.jsonl", "in", expect=refused("in/a.jsonl", "twice"), cause=6),
        row("glob-and-folder", "in/*/*.jsonl", "in", expect=refused("in/sub/b.jsonl", "twice"), cause=6),
        row("two-ways-to-a-file", "in/a.jsonl", "in/sub/../a.jsonl", expect=refused("twice"), cause=6),
        row("glob-that-matches-nothing", "no*/x*.jsonl", expect=refused("no*/x*.jsonl", untouched=True)),
        row("glob-that-matches-folders-alone", "in/s*", expect=refused("no file matches", untouched=True)),
        row("not-there", "in/x.jsonl", expect=refused("in/x.jsonl", "does not exist", untouched=True)),
        row("below-a-file", "in/a.jsonl/b.jsonl", expect=refused("does not exist", untouched=True)),
        row("name-of-300-letters", "x" * 300, expect=refused("xxx", untouched=True)),
        row("device", "/dev/zero", expect=refused("/dev/zero", "regular", untouched=True)),
        row("standard-input", "/dev/stdin", expect=refused("/dev/stdin", untouched=True)),
        row("empty-name", "", expect=refused(untouched=True)),
        row("hub-name", "someone/something", expect=refused("someone/something", untouched=True)),
    ],
)
def _(folder: Path, assets: Assets, *names: str) -> Command:
    _tree(folder)
    return prepare(assets, "documents", *names)


def _link(folder: Path, name: str, to: str) -> None:
    (folder / name).symlink_to(to)


@family(
    "prepare/links",
    [
        row("broken-in-a-folder", "in/x.jsonl", "nowhere", "in", expect=refused("in/x.jsonl", "link"), cause=6),
        row("broken-by-a-glob", "in/x.jsonl", "nowhere", "in/*.jsonl", expect=refused("in/x.jsonl", "link"), cause=6),
        row("broken-by-name", "in/x.jsonl", "nowhere", "in/x.jsonl", expect=refused("in/x.jsonl", "link")),
        row("circle", "in/x.jsonl", "x.jsonl", "in", expect=refused("in/x.jsonl", "link"), cause=6),
        row("loop-in-a-folder", "in/sub/up", "..", "in", expect=read(9)),
        row("loop-by-a-glob", "in/sub/up", "..", "in/**/*.jsonl", expect=read(9), cause=6, quick=True),
        row("linked-folder", "in/linked", "../more", "in", expect=read(10), cause=6),
        row("linked-folder-by-a-glob", "in/linked", "../more", "in/**/*.jsonl", expect=read(10)),
        row("two-names-of-a-file", "in/z.jsonl", "a.jsonl", "in", expect=refused("in/z.jsonl", "in/a.jsonl"), cause=6),
        row("linked-file", "in/z.jsonl", "../more/d.jsonl", "in", expect=read(10)),
    ],
)
def _(folder: Path, assets: Assets, name: str, to: str, given: str) -> Command:
    _tree(folder)
    write(folder / "more" / "d.jsonl", jsonl([{"text": "the dog"}]))
    _link(folder, name, to)
    return prepare(assets, "documents", given)


@case(
    "prepare/folder-with-other-files", done_and_said("2 .csv", "1 .bz2", "1 hidden"), counts("out", samples=9), cause=6
)
def _(folder: Path, assets: Assets) -> Command:
    _tree(folder)
    for name in ("a.csv", "b.csv", "c.bz2", ".d.jsonl"):
        write(folder / "in" / name, "x")
    return prepare(assets, "documents", "in")


@family(
    "prepare/pipe",
    [
        row("by-name", "p.jsonl", expect=refused("p.jsonl", "regular", untouched=True)),
        row("by-a-glob", "*.jsonl", expect=refused("p.jsonl", "regular", untouched=True)),
        row("in-a-folder", ".", expect=refused(untouched=True)),
    ],
)
def _(folder: Path, assets: Assets, given: str) -> Command:
    os.mkfifo(folder / "p.jsonl")
    return prepare(assets, "documents", given)


@family(
    "prepare/without-rights",
    [
        row("file", "in/a.jsonl", "in", expect=refused("in/a.jsonl", untouched=True), cause=25),
        row("folder", "in/sub", "in", expect=refused("in/sub", untouched=True), cause=6),
        row("folder-by-a-glob", "in/sub", "in/*/*.jsonl", expect=refused("in/sub", untouched=True), cause=6),
        row("deep-folder-by-a-glob", "in/sub/deep", "in/**/*.jsonl", expect=refused("in/sub/deep", untouched=True)),
        row("the-folder-itself", "in", "in", expect=refused("in", untouched=True)),
    ],
)
def _(folder: Path, assets: Assets, closed: str, given: str) -> Command:
    _tree(folder)
    (folder / closed).chmod(0o000)
    return prepare(assets, "documents", given).but(without_rights=True)


@case("prepare/without-rights/parquet", refused("a.parquet", untouched=True))
def _(folder: Path, assets: Assets) -> Command:
    parquet(folder / "a.parquet", _text_table(["a"])).chmod(0o000)
    return prepare(assets, "documents", "a.parquet").but(without_rights=True)


@family(
    "prepare/name-that-is-not-utf-8",
    [row("by-name", b"in/\xff.jsonl"), row("in-a-folder", b"in"), row("by-a-glob", b"in/*.jsonl")],
    refused("not UTF-8", untouched=True),
    cause=25,
)
def _(folder: Path, assets: Assets, given: bytes) -> Command:
    _tree(folder)
    write(folder / os.fsdecode(b"in/\xff.jsonl"), GOOD)
    return prepare(assets, "documents", os.fsdecode(given))


# ------------------------------------------------------------------------------------------------------ texts by id


QRELS = "query-id\tcorpus-id\tscore\nq0\td0\t1\n"


@family(
    "prepare/beir",
    [
        row(
            "document-that-is-not-there", {"qrels": QRELS + "q0\td99\t1\n"}, expect=nothing_left("d99", "corpus.jsonl")
        ),
        row("query-that-is-not-there", {"qrels": QRELS + "q9\td0\t1\n"}, expect=refused("q9", untouched=True)),
        row("document-twice", {"corpus": jsonl([{"_id": "d0", "text": "a"}] * 2)}, expect=refused("d0", "twice")),
        row("query-twice", {"queries": jsonl([{"_id": "q0", "text": t} for t in "ab"])}, expect=refused("q0", "twice")),
        row("judged-twice", {"qrels": QRELS + "q0\td0\t0\n"}, expect=refused("test.tsv:3", "another grade"), cause=4),
        row("judged-twice-alike", {"qrels": QRELS + "q0\td0\t1\n"}, expect=read(1)),
        row("no-id", {"corpus": jsonl([{"id": "d0", "text": "a"}])}, expect=refused("corpus.jsonl:1", "_id")),
        row("id-null", {"corpus": jsonl([{"_id": None, "text": "a"}])}, expect=refused("corpus.jsonl:1", "_id")),
        row("contents-for-text", {"corpus": jsonl([{"_id": "d0", "contents": "a"}])}, expect=refused("corpus.jsonl:1")),
        row("title-a-list", {"corpus": jsonl([{"_id": "d0", "text": "a", "title": ["x"]}])}, expect=refused("title")),
        row("qrels-empty", {"qrels": "query-id\tcorpus-id\tscore\n"}, expect=refused("test.tsv", untouched=True)),
        row(
            "qrels-latin-1",
            {"qrels": (QRELS + "caf\xe9\td0\t1\n").encode("latin-1")},
            expect=refused("UTF-8"),
            cause=25,
        ),
        row(
            "corpus-latin-1", {"corpus": b'{"_id": "d0", "text": "\xe9"}\n'}, expect=refused("corpus.jsonl:1", "UTF-8")
        ),
        row("corpus-deep", {"corpus": deep()}, expect=refused("corpus.jsonl:1"), cause=25),
        row("grade-infinite", {"qrels": QRELS + "q0\td1\tinf\n"}, expect=refused("test.tsv:3")),
        row("grade-nan", {"qrels": QRELS + "q0\td1\tnan\n"}, expect=refused("test.tsv:3")),
        row("grade-superscript", {"qrels": QRELS + "q0\td1\t\u00b2\n"}, expect=refused("test.tsv:3")),
        row("nothing-relevant", {"qrels": "q0\td0\t0\n"}, expect=refused("relevant", untouched=True)),
        row("line-separators-in-ids", {"qrels": QRELS + "q0\td\u2028 1\t1\n"}, expect=refused("corpus.jsonl")),
    ],
)
def _(folder: Path, assets: Assets, files: dict[str, Any]) -> Command:
    beir(folder / "b", **({"qrels": QRELS} | files))
    return prepare(assets, "tuples", "b", "--split", "test")


@case("prepare/beir/qrels-unreadable", refused("qrels/test.tsv", untouched=True), cause=25)
def _(folder: Path, assets: Assets) -> Command:
    (beir(folder / "b") / "qrels" / "test.tsv").chmod(0o000)
    return prepare(assets, "tuples", "b", "--split", "test").but(without_rights=True)


@case("prepare/beir/folder-twice", refused("b", "twice", untouched=True))
def _(folder: Path, assets: Assets) -> Command:
    beir(folder / "b")
    return prepare(assets, "tuples", "b", "./b", "--split", "test")


@case("prepare/beir/a-passage-changed-within", refused("out", "inputs"), kept("out/manifest.json"), cause=9)
def _(folder: Path, assets: Assets) -> Command:
    beir(folder / "b")
    command = prepare(assets, "tuples", "b", "--split", "test")
    ran(command)
    path = folder / "b" / "corpus.jsonl"
    path.write_text(path.read_text().replace("water", "dater"))
    return command


@family(
    "prepare/hard-negatives",
    [
        row("good", [{"qid": "q0", "neg": {"bm25": [{"pid": "d1"}]}}], expect=(done(), passages(2))),
        row("without-pid", [{"qid": "q0", "neg": {"bm25": [{"id": "d1"}]}}], expect=refused("hn.jsonl:1"), cause=25),
        row("system-a-number", [{"qid": "q0", "neg": {"bm25": 5}}], expect=refused("hn.jsonl:1"), cause=25),
        row("list-of-lists", [{"qid": "q0", "neg": [["d1"]]}], expect=refused("hn.jsonl:1")),
        row("text-for-list", [{"qid": "q0", "neg": "d1"}], expect=refused("hn.jsonl:1")),
        row("query-twice", [{"qid": "q0", "neg": ["d1"]}, {"qid": "q0", "neg": ["d2"]}], expect=refused("hn.jsonl:2")),
        row("not-in-the-corpus", [{"qid": "q0", "neg": ["zz"]}], expect=nothing_left("zz")),
    ],
)
def _(folder: Path, assets: Assets, rows: list[Any]) -> Command:
    beir(folder / "b", qrels=QRELS)
    write(folder / "hn.jsonl", jsonl(rows))
    return prepare(assets, "tuples", "b", "--split", "test", "--negatives", "hn.jsonl")


@case("prepare/hard-negatives/zst-cut", refused("hn.jsonl.zst", "missing"), cause=1, quick=True)
def _(folder: Path, assets: Assets) -> Command:
    beir(folder / "b", qrels=QRELS)
    write(folder / "hn.jsonl.zst", zst(jsonl([{"qid": f"q{i}", "neg": ["d1"]} for i in (*range(1, 2000), 0)]))[:-3])
    return prepare(assets, "tuples", "b", "--split", "test", "--negatives", "hn.jsonl.zst")


@case("prepare/hard-negatives/not-there", refused("hn.jsonl", untouched=True))
def _(folder: Path, assets: Assets) -> Command:
    beir(folder / "b", qrels=QRELS)
    return prepare(assets, "tuples", "b", "--split", "test", "--negatives", "hn.jsonl")


# --------------------------------------------------------------------------------------------------------- options


@family(
    "prepare/option",
    [
        row("limit-0", "--limit", "0", expect=refused("--limit", untouched=True)),
        row("limit-10e30", "--limit", "1" + "0" * 30, expect=refused("--limit", untouched=True), cause=25),
        row("limit-a-word", "--limit", "many", expect=misused("--limit")),
        row("limit-1", "--limit", "1", expect=read(1)),
        row("seed-negative", "--seed", "-1", expect=refused("seed -1", untouched=True)),
        row("seed-of-70-bits", "--seed", str(2**70), expect=refused("seed", untouched=True)),
        row("processes-0", "--processes", "0", expect=refused("--processes", untouched=True)),
        row("shard-megabytes-huge", "--shard-megabytes", "1" + "0" * 30, expect=refused("--shard-megabytes")),
        row("shard-megabytes-0", "--shard-megabytes", "0", expect=refused("--shard-megabytes", untouched=True)),
        row("chunk-samples-negative", "--chunk-samples", "-5", expect=refused("--chunk-samples", untouched=True)),
        row("longest-line-0", "--longest-line", "0", expect=refused("--longest-line", untouched=True)),
        row("text-column-not-utf-8", "--text-column", "\udcff", expect=refused("UTF-8", untouched=True)),
        row("text-split-unknown", "--text-split", "pages", expect=misused("--text-split")),
        row("unknown", "--colour", "red", expect=misused("--colour")),
        row("max-negatives-negative", "--max-negatives", "-1", expect=misused("--max-negatives")),
    ],
)
def _(folder: Path, assets: Assets, option: str, value: str) -> Command:
    write(folder / "a.jsonl", GOOD)
    return prepare(assets, "documents", "a.jsonl").but(option, value)


@family(
    "prepare/max-negatives",
    [row("negative", "-1"), row("huge", "1" + "0" * 30)],
    refused("--max-negatives", untouched=True),
    cause=25,
)
def _(folder: Path, assets: Assets, value: str) -> Command:
    beir(folder / "b")
    return prepare(assets, "tuples", "b", "--split", "test", "--max-negatives", value)


def unread(*words: str) -> Any:
    """A row of the family below: the command, its input and the option, which is refused before anything is written."""
    kind, name, option, *_ = words
    label = "-of-".join((option.strip("-"), kind, name.replace(".", "-")))
    return row(label, *words, expect=(refused(option, untouched=True), absent("out")))


@family(
    "prepare/unread",
    [
        *(unread("documents", name, "--split", "test") for name in ("a.jsonl", "a.txt")),
        unread("documents", "a.jsonl", "--subset", "de"),
        unread("documents", "a.jsonl", "--text-split", "lines"),
        unread("documents", "a.txt", "--text-column", "text"),
        unread("tuples", "a.jsonl", "--split", "test"),
        unread("tuples", "a.jsonl", "--subset", "de"),
        unread("tuples", "a.jsonl", "--max-negatives", "3"),
        unread("tuples", "a.jsonl", "--columns", "query,positive"),
        unread("tuples", "b", "--subset", "de"),
        unread("tuples", "b", "--columns", "query,positive"),
        *(
            unread("tuples", "b", f"--{name}-column", name)
            for name in ("query", "positive", "negative", "score", "weight")
        ),
        unread("tuples", "nobody/nothing", "--format", "nli"),
        row("split-of-a-folder", "tuples", "b", "--split", "test", expect=done()),
        row("columns-of-one-of-two", "tuples", "a.tsv", "a.jsonl", "--columns", "query,positive", expect=done()),
        row("text-split-of-one-of-two", "documents", "a.txt", "a.jsonl", "--text-split", "lines", expect=done()),
    ],
    cause="own",
)
def _(folder: Path, assets: Assets, *words: str) -> Command:
    write(folder / "a.jsonl", jsonl([{"text": "the cat", "query": "cat", "positive": "the cat"}]))
    write(folder / "a.txt", "the cat\n")
    write(folder / "a.tsv", "cat\tthe cat\n")
    beir(folder / "b")
    return prepare(assets, *words)


# --------------------------------------------------------------------------------------------------------- outputs


@family(
    "prepare/output",
    [
        row("below-a-file", "a.jsonl/out", expect=refused("a.jsonl/out")),
        row("name-of-300-letters", "x" * 300, expect=refused("xxx"), cause=25),
        row("not-utf-8", "\udcff", expect=refused("UTF-8"), cause=25),
        row("device", "/dev/null", expect=refused("/dev/null")),
        row("empty-name", "", expect=refused()),
    ],
)
def _(folder: Path, assets: Assets, output: str) -> Command:
    write(folder / "a.jsonl", GOOD)
    return prepare(assets, "documents", "a.jsonl", output=output)


@case("prepare/output/foreign-folder", refused("out", "thesis.txt"), kept("out/thesis.txt"))
def _(folder: Path, assets: Assets) -> Command:
    write(folder / "a.jsonl", GOOD)
    write(folder / "out" / "thesis.txt", "mine")
    return prepare(assets, "documents", "a.jsonl")


@case("prepare/output/plan-is-a-link", refused("out/.plan"), kept("precious/a"), may_leave=("out/.plan",), cause=25)
def _(folder: Path, assets: Assets) -> Command:
    write(folder / "a.jsonl", GOOD)
    write(folder / "precious" / "a", "mine")
    (folder / "out").mkdir()
    (folder / "out" / ".plan").symlink_to("../precious")
    return prepare(assets, "documents", "a.jsonl")


@family(
    "prepare/output/read-only",
    [row("itself", "out", cause=25), row("its-folder", "above")],
    refused("out", "ermission denied", untouched=True),
)
def _(folder: Path, assets: Assets, name: str) -> Command:
    write(folder / "a.jsonl", GOOD)
    (folder / name).mkdir()
    (folder / name).chmod(0o555)
    output = "out" if name == "out" else "above/out"
    return prepare(assets, "documents", "a.jsonl", output=output).but(without_rights=True)


@family("prepare/output-on-a-disk-of", [row(f"{kib}-kib", kib, cause=25) for kib in (4, 16, 64, 300)], refused())
def _(folder: Path, assets: Assets, kib: int) -> Command:
    write(folder / "a.jsonl", lines(20_000))
    small_disk(folder / "out", kib)
    return prepare(assets, "documents", "a.jsonl")


@family("prepare/disk-full-then-again-with-room", [row(f"{kib}-kib", kib) for kib in (4, 64)], *read(20_000))
def _(folder: Path, assets: Assets, kib: int) -> Command:
    write(folder / "a.jsonl", lines(20_000))
    disk = small_disk(folder / "out", kib)
    command = prepare(assets, "documents", "a.jsonl")
    ran(command, code=2)
    disk.resize(4000)
    return command


@family("prepare/file-size-limit-in", [row("one-process", 1), row("two", 2)], refused("out/shard-"))
def _(folder: Path, assets: Assets, processes: int) -> Command:
    for name in "ab":
        write(folder / "in" / f"{name}.jsonl", lines(20_000))
    command = prepare(assets, "documents", "in", processes=processes)
    return command.but(limits={resource.RLIMIT_FSIZE: 200_000}, own_process=processes > 1)


def _two_files(folder: Path, assets: Assets, *, output: str = "out") -> Command:
    for name in "ab":
        write(folder / "in" / f"{name}.jsonl", lines(200, prefix=name))
    return prepare(assets, "documents", "in", output=output)


@family(
    "prepare/finished-folder-that-lost",
    [
        row("a-shard", lambda out: (out / "shard-00001-000.tar").unlink(), quick=True),
        row("half-of-a-shard", lambda out: os.truncate(out / "shard-00001-000.tar", 5000)),
        row("a-marker", lambda out: (out / "units" / "00001.json").unlink()),
        row("half-of-a-marker", lambda out: os.truncate(out / "units" / "00001.json", 99)),
        row("a-deep-marker", lambda out: write(out / "units" / "00001.json", deep()), cause=25),
        row("the-manifest", lambda out: (out / "manifest.json").unlink()),
        row("half-of-the-manifest", lambda out: os.truncate(out / "manifest.json", 99)),
        row("the-tokenizer", lambda out: shutil.rmtree(out / "tokenizer")),
        row("its-marks", lambda out: write(out / ".inputs", b"\xff")),
    ],
    done(),
    same_result_as("before", "out"),
)
def _(folder: Path, assets: Assets, lose: Any) -> Command:
    command = _two_files(folder, assets)
    ran(command)
    shutil.copytree(folder / "out", folder / "before")
    lose(folder / "out")
    return command


@case("prepare/finished-folder-whose-preparation-was-cut", refused("out"), kept("out/manifest.json"))
def _(folder: Path, assets: Assets) -> Command:
    command = _two_files(folder, assets)
    ran(command)
    os.truncate(folder / "out" / "preparation.json", 50)
    return command


@family(
    "prepare/input-changed-after-it-was-read",
    [row("and-its-time", False), row("but-not-its-time", True)],
    refused("out", "inputs"),
    kept("out/manifest.json"),
    cause=9,
    quick=True,
)
def _(folder: Path, assets: Assets, put_back: bool) -> Command:
    command = _two_files(folder, assets)
    ran(command)
    path = folder / "in" / "a.jsonl"
    about = path.stat()
    path.write_text(path.read_text().replace("a 100", "a 001"))
    if put_back:
        os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
    return command


@case("prepare/input-touched-after-it-was-read", done_and_said("already complete"), kept("out/manifest.json"))
def _(folder: Path, assets: Assets) -> Command:
    command = _two_files(folder, assets)
    ran(command)
    os.utime(folder / "in" / "a.jsonl", ns=(0, 0))
    return command


@family(
    "prepare/output-below-its-input",
    [
        row("again", "in/out", expect=done_and_said("already complete")),
        row("another", "in/other", expect=(done_and_said("written by data.prepare"), counts("in/other", samples=400))),
        row("beside", "out", expect=(done_and_said("written by data.prepare"), *read(400))),
    ],
    cause=23,
)
def _(folder: Path, assets: Assets, output: str) -> Command:
    ran(_two_files(folder, assets, output="in/out"))
    return prepare(assets, "documents", "in", output=output)


@case(
    "prepare/output-below-its-input/killed",
    done(),
    counts("in/out", samples=200_000),
    cause=23,
    quick=True,
    seconds=120.0,
)
def _(folder: Path, assets: Assets) -> Command:
    for name in "abcd":
        write(folder / "in" / f"{name}.jsonl", lines(50_000, prefix=name))
    command = prepare(assets, "documents", "in", output="in/out")

    def kill(pid: int) -> None:
        wait_for((folder / "in" / "out" / "preparation.json").exists)
        os.kill(pid, signal.SIGKILL)

    ran(command.but(meanwhile=kill), code=-signal.SIGKILL)
    return command


@case("prepare/a-prepared-folder-as-input", refused("in/out", "written by data.prepare", untouched=True), cause=23)
def _(folder: Path, assets: Assets) -> Command:
    ran(_two_files(folder, assets, output="in/out"))
    return prepare(assets, "documents", "in/out")


# ------------------------------------------------------------------------------------------------------- tokenizers


def _own_tokenizer(folder: Path, assets: Assets) -> Path:
    return Path(shutil.copytree(assets.tokenizer, folder / "t"))


@family(
    "prepare/tokenizer",
    [
        row("cut", "tokenizer.json", '{"version": "1.0", "trunc', cause=25),
        row("config-a-list", "tokenizer_config.json", "[]"),
        row("config-deep", "tokenizer_config.json", deep()),
        row("binary", "tokenizer.json", b"\xff\xfe"),
        row("empty", "tokenizer.json", ""),
    ],
    refused("tokenizer folder t", untouched=True),
)
def _(folder: Path, assets: Assets, name: str, content: str | bytes) -> Command:
    write(_own_tokenizer(folder, assets) / name, content)
    write(folder / "a.jsonl", GOOD)
    return prepare(assets, "documents", "a.jsonl").but("--tokenizer", "t")


@case("prepare/tokenizer/a-pipe", refused("t", "regular", untouched=True))
def _(folder: Path, assets: Assets) -> Command:
    path = _own_tokenizer(folder, assets) / "tokenizer_config.json"
    path.unlink()
    os.mkfifo(path)
    write(folder / "a.jsonl", GOOD)
    return prepare(assets, "documents", "a.jsonl").but("--tokenizer", "t")


@case("prepare/tokenizer/unreadable", refused("t", untouched=True), cause=25)
def _(folder: Path, assets: Assets) -> Command:
    (_own_tokenizer(folder, assets) / "tokenizer.json").chmod(0o000)
    write(folder / "a.jsonl", GOOD)
    return prepare(assets, "documents", "a.jsonl").but("--tokenizer", "t").but(without_rights=True)


@family(
    "prepare/tokenizer/code-of-its-own",
    [
        row("no-answer", "Own", b"", expect=refused("auto_map", untouched=True), cause=17),
        row(
            "yes", "Own", b"y\n" * 9, expect=(refused("auto_map", untouched=True), absent("ran")), cause=17, quick=True
        ),
        row("known-class", None, b"y\n" * 9, expect=(*read(2), absent("ran")), cause=17),
    ],
)
def _(folder: Path, assets: Assets, name: str | None, stdin: bytes) -> Command:
    own = _own_tokenizer(folder, assets)
    config = json.loads((own / "tokenizer_config.json").read_text())
    config |= {"auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}} | ({"tokenizer_class": name} if name else {})
    write(own / "tokenizer_config.json", json.dumps(config))
    write(own / "own.py", "open('ran', 'w')\nfrom transformers import BertTokenizerFast as Own\n")
    write(folder / "a.jsonl", GOOD)
    return prepare(assets, "documents", "a.jsonl").but("--tokenizer", "t").but(stdin=stdin)


def _train_tokenizer(*arguments: str) -> Command:
    return Command("data.prepare", ("tokenizer", *arguments, "--output", "out"), outputs=("out",))


@family(
    "prepare/train-tokenizer",
    [
        row(
            "vocabulary-10e25",
            "a.jsonl",
            GOOD,
            ("--vocab-size", "1" + "0" * 25),
            expect=refused("--vocab-size"),
            cause=25,
        ),
        row("vocabulary-5", "a.jsonl", GOOD, ("--vocab-size", "5"), expect=refused("--vocab-size", untouched=True)),
        row(
            "frequency-negative",
            "a.jsonl",
            GOOD,
            ("--min-frequency", "-5"),
            expect=refused("--min-frequency"),
            cause=25,
        ),
        row("length-negative", "a.jsonl", GOOD, ("--max-length", "-5"), expect=refused("--max-length", untouched=True)),
        row("invalid-utf8", "a.jsonl", GOOD.encode() + b"\xff\n", (), expect=nothing_left("a.jsonl:3", "UTF-8")),
        row("zst-cut", "a.txt.zst", zst(CUT)[:-900], (), expect=nothing_left("missing"), cause=1, quick=True),
        row("no-word", "a.jsonl", '{"text": "\\u0001"}\n', (), expect=nothing_left("no word")),
        row("good", "a.jsonl", GOOD, ("--vocab-size", "50"), expect=done()),
    ],
)
def _(folder: Path, assets: Assets, name: str, content: str | bytes, options: tuple[str, ...]) -> Command:
    write(folder / name, content)
    return _train_tokenizer(name, *options)


@case("prepare/train-tokenizer/input-changed-within", refused("out", "inputs"), kept("out/tokenizer.json"), cause=9)
def _(folder: Path, assets: Assets) -> Command:
    write(folder / "a.jsonl", lines(200))
    ran(_train_tokenizer("a.jsonl"))
    write(folder / "a.jsonl", lines(200).replace("dog 100", "cat 100"))
    return _train_tokenizer("a.jsonl")


@family(
    "prepare/installed-docs",
    [
        row("unknown-package", ("--package", "no_such_package"), expect=nothing_left("no_such_package")),
        row("held-out-negative", ("--held-out", "-1"), expect=refused("--held-out", untouched=True)),
        row("processes-0", ("--processes", "0"), expect=refused("--processes", untouched=True)),
    ],
)
def _(folder: Path, assets: Assets, options: tuple[str, ...]) -> Command:
    return Command("data.prepare", ("installed-docs", *options, "--output", "out"), outputs=("out",))


@case("prepare/interrupted-before-anything-was-finished", ended_with(143), absent("out"), seconds=120.0)
def _(folder: Path, assets: Assets) -> Command:
    write(folder / "a.jsonl", lines(200_000))

    def stop(pid: int) -> None:
        wait_for((folder / "out" / "preparation.json").exists)
        os.kill(pid, signal.SIGTERM)

    return prepare(assets, "documents", "a.jsonl").but(meanwhile=stop)

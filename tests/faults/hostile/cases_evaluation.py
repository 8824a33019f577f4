"""Evaluation: damaged or ambiguous inputs, outputs, stored vectors, and results of other evaluations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.faults.hostile.assets import Assets
from tests.faults.hostile.builders import beir, change_json, deep, evaluate, gz, jsonl, ran, small_disk, write
from tests.faults.hostile.case import Command, case, family, row
from tests.faults.hostile.verdict import done, kept, misused, refused

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
        row("text-null", {"corpus": jsonl([*CORPUS, {"_id": "d9", "text": None}])}, cause=4),
        row("title-a-number", {"corpus": jsonl([*CORPUS, {"_id": "d9", "title": 3, "text": "a"}])}, cause=4),
        row("query-twice", {"queries": jsonl([*QUERIES, {"_id": "q1", "text": "other"}])}, cause=4),
        row("same-row-twice", {"corpus": jsonl([*CORPUS, CORPUS[0]])}, expect=done()),
        row("id-a-list", {"corpus": jsonl([*CORPUS, {"_id": ["d9"], "text": "a"}])}, cause=4),
        row("id-a-half", {"corpus": jsonl([*CORPUS, {"_id": 1.5, "text": "a"}])}, cause=4),
        row("id-empty", {"queries": jsonl([*QUERIES, {"_id": "", "text": "a"}])}, cause=4),
        row("id-missing", {"corpus": jsonl([*CORPUS, {"text": "a"}])}),
        row("half-a-surrogate-pair", {"corpus": '{"_id": "d0", "text": "\\ud83d"}\n'}, cause=25),
        row("half-a-surrogate-pair-in-an-id", {"queries": '{"_id": "\\udc00", "text": "a"}\n'}, cause=25),
        row("a-row-that-is-a-list", {"corpus": "[]\n"}),
        row("a-row-that-is-cut", {"corpus": '{"_id": "d0", "te'}),
        row("a-number-of-5000-digits", {"corpus": '{"_id": ' + "9" * 5000 + "}\n"}, cause=25),
        row("queries-deep", {"queries": deep()}, cause=25),
        row("queries-latin-1", {"queries": b'{"_id": "q0", "text": "\xe9"}\n'}, cause=25),
        row("corpus-utf-16", {"corpus": jsonl(CORPUS).encode("utf-16")}, cause=25),
        row("corpus-empty", {"corpus": ""}, expect=refused("b")),
        row("queries-empty", {"queries": "\n"}, expect=refused("b")),
        row("grade-plus-minus", judging("+-1"), cause=25),
        row("grade-a-half", judging("1.0")),
        row("grade-nan", judging("nan")),
        row("grade-minus", judging("-1"), expect=done()),
        row("qrels-without-a-header", {"qrels": "q0\td0\tx\nq1\td1\t1\n"}),
        row("qrels-with-spaces-in-ids", {"qrels": f"{HEADER}q0\td 0\t1\nq1\td1\t1\n"}, expect=done()),
        row("qrels-with-two-columns", {"qrels": f"{HEADER}q0\td0\n"}),
        row("qrels-with-a-judgement-twice", {"qrels": f"{HEADER}q0\td0\t1\nq0\td0\t2\n"}),
        row("qrels-of-others", {"qrels": f"{HEADER}x\td0\t1\n"}, expect=refused("b")),
        row("qrels-of-no-document", {"qrels": f"{HEADER}q0\tx\t1\n"}, expect=refused("b")),
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
        row("sentences-lists", "s.jsonl", jsonl([{"sentence1": ["a"], "sentence2": "b", "score": 1.0}] * 2), cause=4),
        row("score-true", "s.jsonl", jsonl([{"sentence1": "a", "sentence2": "b", "score": True}] * 2)),
        row("score-a-list", "s.jsonl", jsonl([{"sentence1": "a", "sentence2": "b", "score": [1]}] * 2)),
        row("score-of-400-digits", "s.jsonl", jsonl([{"sentence1": "a", "sentence2": "b", "score": 10**400}] * 2)),
        row("rows-lists", "s.jsonl", jsonl([["a", "b", 1.0]] * 2)),
        row("keys-of-others", "s.jsonl", jsonl([{"first": "a", "second": "b", "score": 1.0}] * 2)),
        row("half-a-pair", "s.jsonl", '{"sentence1": "\\ud83d", "sentence2": "b", "score": 1}\n' * 2, cause=25),
        row("gz-cut", "s.jsonl.gz", gz(jsonl([{"sentence1": "a", "sentence2": "b", "score": 1.0}] * 9))[:-9], cause=1),
        row("gz-that-is-none", "s.tsv.gz", "1.0\ta\tb\n2.0\tc\td\n", cause=25),
        row("gz-of-two", "s.tsv.gz", gz("1.0\ta\tb\n2.0\tc\td\n"), expect=done()),
        row("two-columns", "s.tsv", "1.0\ta\n"),
        row("one-pair", "s.tsv", "1.0\ta\tb\n"),
        row("empty", "s.tsv", ""),
        row("constant", "s.tsv", "1.0\ta\tb\n1.0\tc\td\n", expect=done()),
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


@case("evaluation/vectors-changed", refused("vec/", "checksum"), cause=11, quick=True)
def _(folder: Path, assets: Assets) -> Command:
    command = evaluate(assets.model, "--beir", str(assets.beir), "--vectors", "vec", outputs=("vec",))
    ran(command)
    block = next(folder.rglob("*.f16"))
    content = bytearray(block.read_bytes())
    content[9] ^= 64
    block.write_bytes(content)
    return command


@family(
    "evaluation/store",
    [
        row("deep", deep()),
        row("a-list", "[]"),
        row("of-later", '{"format": 3, "rows": 6, "rows_per_block": 6, "widths": {"1": 16}, "fingerprints": {}}'),
        row("of-no-rows", '{"format": 2, "rows": 0, "rows_per_block": 6, "widths": {"1": 16}, "fingerprints": {}}'),
        row("latin-1", b"\xff"),
    ],
    refused("vec/"),
    cause=25,
)
def _(folder: Path, assets: Assets, content: str | bytes) -> Command:
    command = evaluate(assets.model, "--beir", str(assets.beir), "--vectors", "vec", outputs=("vec",))
    ran(command)
    write(settings(folder), content)
    return command


@family(
    "evaluation/vectors-at",
    [
        row("a-full-disk", "disk/vec", lambda folder: small_disk(folder / "disk", 4)),
        row("a-file", "vec", lambda folder: write(folder / "vec", "mine")),
        row("a-foreign-folder", "vec", lambda folder: write(folder / "vec" / "beir_trained" / "thesis", "mine")),
    ],
    refused("vec"),
    cause=25,
)
def _(folder: Path, assets: Assets, vectors: str, damage: Callable[[Path], object]) -> Command:
    damage(folder)
    return evaluate(assets.model, "--beir", str(assets.beir), "--vectors", vectors, outputs=(vectors,))


@family(
    "evaluation/subsets",
    [
        row("superscript", "sts\tx\t0\t²", cause=25),
        row("minus", "sts\tx\t-1\t2", expect=refused("subset")),
        row("beyond", "sts\tx\t0\t99", expect=refused("subset")),
        row("twice", "sts\tx\t0\t2\nsts\tx\t0\t2"),
        row("three-columns", "sts\tx\t0"),
        row("latin-1", b"sts\t\xe9\t0\t2", cause=25),
    ],
    refused("subsets.tsv"),
)
def _(folder: Path, assets: Assets, rows: str | bytes) -> Command:
    content = rows.encode() if isinstance(rows, str) else rows
    write(folder / "subsets.tsv", b"dataset\tsubset\tfirst_row_0based\trows\n" + content + b"\n")
    return evaluate(assets.model, "--sts", str(assets.sts_file), "--sts-subsets", "subsets.tsv")


def score(*words: str) -> Command:
    return Command("trainer.evaluate", ("score", "--qrels", "q", "--run", "r", *words))


RUN = "q0 Q0 d0 1 2.0 x\nq0 Q0 d1 2 1.0 x\n"
QRELS = "q0 0 d0 1\nq0 0 d2 1\n"


@family(
    "evaluation/score",
    [
        row("good", RUN, QRELS, expect=done()),
        row("good-null-in-an-id", RUN.replace("d0", "d\0"), QRELS, expect=done()),
        row("five-columns", "q0 Q0 d0 1 2.0\n", QRELS),
        row("score-nan", RUN.replace("2.0", "nan"), QRELS),
        row("score-inf", RUN.replace("2.0", "inf"), QRELS),
        row("score-beyond-single-precision", RUN.replace("2.0", "1e39"), QRELS),
        row("document-twice", RUN.replace("d1", "d0"), QRELS),
        row("run-latin-1", b"q\xe9 Q0 d0 1 2.0 x\n", QRELS, cause=25),
        row("run-empty", "", QRELS),
        row("run-missing", None, QRELS),
        row("no-query-in-common", RUN.replace("q0", "q7"), QRELS, expect=refused("judged")),
        row("grade-superscript", RUN, QRELS.replace(" 1", " ²"), cause=25),
        row("grade-two-signs", RUN, QRELS.replace(" 1", " +-1"), cause=25),
        row("grade-huge", RUN, QRELS.replace(" 1", " 1" + "0" * 30), cause=25),
        row("grade-large", RUN, QRELS.replace(" 1", " 2000000000"), cause=25),
        row("qrels-latin-1", RUN, b"q\xe9 0 d0 1\n", cause=25),
        row("qrels-empty", RUN, "\n"),
        row("qrels-missing", RUN, None),
    ],
    refused(),
)
def _(folder: Path, assets: Assets, run: str | bytes | None, qrels: str | bytes | None) -> Command:
    for name, content in (("r", run), ("q", qrels)):
        if content is not None:
            write(folder / name, content)
    return score()


@family(
    "evaluation/json",
    [
        row("below-a-file", ("--json", "file/x.json"), quick=True),
        row("a-folder", ("--json", ".")),
        row("on-a-full-device", ("--json", "/dev/full"), expect=refused("No space left")),
        row("a-dangling-link", ("--json", "link"), expect=done()),
        row("to-stdout", ("--json", "/dev/stdout"), expect=done()),
        row("name-too-long", ("--json", "x" * 300)),
    ],
    refused("--json"),
    cause=24,
)
def _(folder: Path, assets: Assets, words: tuple[str, ...]) -> Command:
    write(folder / "file", "mine")
    write(folder / "r", RUN)
    write(folder / "q", QRELS)
    (folder / "link").symlink_to("made.json")
    return score(*words).but(outputs=("made.json", "link"))


@case("evaluation/json-where-nobody-may-write", refused("--json"), cause=24)
def _(folder: Path, assets: Assets) -> Command:
    (folder / "o").mkdir(mode=0o500)
    return evaluate(assets.model, "--beir", str(assets.beir), "--json", "o/x.json").but(without_rights=True)


@family(
    "evaluation/options",
    [
        row("top-k-zero", ("--top-k", "0")),
        row("top-k-below-the-metrics", ("--top-k", "9")),
        row("top-k-superscript", ("--top-k", "²")),
        row("top-k-huge", ("--top-k", "1" + "0" * 30)),
        row("documents-minus", ("--max-documents", "-1")),
        row("seed-minus", ("--random-init", "--seed", "-1")),
        row("seed-huge", ("--random-init", "--seed", "1" + "0" * 30)),
        row("length-one", ("--max-length", "1")),
        row("length-beyond", ("--max-length", "81")),
        row("sizes-of-others", ("--sizes", "demi")),
        row("sizes-none", ("--sizes", ",")),
        row("split-traversal", ("--split", "../../beir/qrels/test")),
        row("split-missing", ("--split", "dev")),
        row("against-nothing", ("--against", "nowhere")),
        row("model-missing", ("--model", "./nowhere")),
        row("model-a-file", ("--model", "/etc/hostname")),
        row("batch-zero", ("--batch-tokens", "0")),
        row("set-twice", ("--sts", "s.tsv", "s.tsv")),
    ],
    misused(),
)
def _(folder: Path, assets: Assets, words: tuple[str, ...]) -> Command:
    write(folder / "s.tsv", "1.0\ta\tb\n2.0\tc\td\n")
    return evaluate(assets.model, "--beir", str(assets.beir), *words)


@family(
    "evaluation/unread",
    [
        row("identical-ids", "sizes", ("--ignore-identical-ids",), expect=misused("--ignore-identical-ids")),
        row("passages-per-block", "sizes", ("--passages-per-block", "9"), expect=misused("--passages-per-block")),
        row("similarity", "sizes", ("--similarity", "dot"), expect=misused("--similarity")),
        row("holm", "sizes", ("--holm",), expect=misused("--holm")),
        row("rescored", "quantised", ("--rescored", "5"), expect=misused("--rescored")),
        row("similarity-of-bits", "quantised", ("--similarity", "dot"), expect=misused("--similarity")),
        row("similarity-of-sums", "fused", ("--similarity", "dot"), expect=misused("--similarity")),
        row("split-of-queries", "latency", ("--split", "test"), expect=misused("--split")),
        row("similarity-of-milliseconds", "latency", ("--similarity", "dot"), expect=misused("--similarity")),
        row("batch-of-one", "latency", ("--batch-tokens", "9"), expect=misused("--batch-tokens")),
        row("split-of-a-folder", "sizes", ("--beir", "b", "--split", "test", "--ignore-identical-ids"), expect=done()),
    ],
    cause="own",
)
def _(folder: Path, assets: Assets, name: str, words: tuple[str, ...]) -> Command:
    write(folder / "s.tsv", "1.0\ta\tb\n2.0\tc\td\n")
    beir(folder / "b")
    return Command(
        "trainer.evaluate", (name, "--model", str(assets.model), "--device", "cpu", "--sts", "s.tsv", *words)
    )


@case("evaluation/ids-with-spaces-as-run-files", refused("white space", untouched=True))
def _(folder: Path, assets: Assets) -> Command:
    beir(folder / "b", corpus=jsonl([*CORPUS, {"_id": "d 9", "text": "a"}]))
    words = ("--beir", "b", "--output", "o", "--save-runs")
    return evaluate(assets.model, *words, outputs=("o",))


@family(
    "evaluation/against",
    [
        row("cut", lambda whole: whole[:-9]),
        row("deep", lambda whole: gz(deep()), quick=True),
        row("no-gzip", lambda whole: b"{}"),
        row("a-list", lambda whole: gz("[]\n")),
        row("values-of-nothing", lambda whole: gz('{"task": "x", "method": "m", "values": {"map": [1]}}\n')),
        row("of-other-items", lambda whole: gz('{"task": "beir", "kind": "retrieval", "queries": ["z"]}\n')),
        row("latin-1", lambda whole: gz(b"\xff\n")),
    ],
    refused("a"),
    cause=25,
)
def _(folder: Path, assets: Assets, damage: Callable[[bytes], bytes]) -> Command:
    ran(evaluate(assets.model, "--beir", str(assets.beir), "--output", "a", outputs=("a",)))
    raw = folder / "a" / "raw.jsonl.gz"
    raw.write_bytes(damage(raw.read_bytes()))
    return evaluate(assets.model, "--beir", str(assets.beir), "--against", "a")


@family(
    "evaluation/parts",
    [
        row("deep", deep()),
        row("of-letters", '{"decided_by": {}, "records": [{"value": "x"}]}'),
        row("a-list", "[]"),
    ],
    done(),
)
def _(folder: Path, assets: Assets, content: str) -> Command:
    """Partial results of an interrupted evaluation that cannot be read are made again."""
    write(folder / "o" / "parts" / "trained_beir.json", content)
    return evaluate(assets.model, "--beir", str(assets.beir), "--output", "o", outputs=("o",))


@family(
    "evaluation/transfer",
    [
        row("good", (b"good\n" * 12, b"bad\n" * 12), expect=done()),
        row("empty", (b"", b"bad\n" * 12)),
        row("few", (b"good\n", b"bad\n" * 12), expect=refused("fewer than")),
        row("missing", (b"good\n" * 12, None)),
    ],
    refused("custrev"),
)
def _(folder: Path, assets: Assets, texts: tuple[bytes | None, bytes | None]) -> Command:
    for name, content in zip(("custrev.neg", "custrev.pos"), texts):
        if content is not None:
            write(folder / "d" / "CR" / name, content)
    words = ("transfer", "--model", str(assets.model), "--data", "d", "--tasks", "CR", "--sizes", "1x16")
    return Command("trainer.evaluate", words)


@family(
    "evaluation/sizes-of",
    [
        row("5000-digits", "sizes", "1x" + "9" * 5000, expect=refused("size")),
        row("one-fused", "fused", "1x16,1x16", expect=refused("--sizes")),
        row("zero-quantised", "quantised", "0x16", expect=refused("0x16")),
    ],
    cause="own",
)
def _(folder: Path, assets: Assets, command: str, sizes: str) -> Command:
    words = (command, "--model", str(assets.model), "--beir", str(assets.beir), "--sizes", sizes)
    return Command("trainer.evaluate", words)


@case("evaluation/across-one-depth", refused("several depths"), cause="own")
def _(folder: Path, assets: Assets) -> Command:
    return evaluate(assets.model, "--beir", str(assets.beir), "--sizes", "1x16", "--across-depths")


@family(
    "evaluation/output-file-of",
    [row("fused", "fused", "figures"), row("quantised", "quantised", "float32")],
    refused("--output o holds something else"),
    cause="own",
)
def _(folder: Path, assets: Assets, command: str, name: str) -> Command:
    """A file stands where the command writes a folder."""
    write(folder / "o" / name, "mine")
    words = (command, "--model", str(assets.model), "--beir", str(assets.beir), "--output", "o")
    return Command("trainer.evaluate", words, outputs=("o",))

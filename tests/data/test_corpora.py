"""Readers: every format, on small files and on real rows, whole and in units; errors name file and line."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from data.corpora import plan as planning
from data.corpora import rows as rows_module
from data.corpora.by_id import TextIndex, read_beir_texts, read_qrels
from data.corpora.options import SourceOptions, TupleOptions
from data.corpora.plan import plan_documents, plan_tuples
from data.corpora.read import read_split
from data.corpora.splits import DocumentLayout, TupleLayout, place
from data.ground.errors import DataError
from tests.data.reading import read_documents, read_tuples


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def write_tsv(path: Path, rows: Iterable[Sequence[object]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join("\t".join(map(str, row)) + "\n" for row in rows), encoding="utf-8")
    return path


def texts_of(
    *inputs: Path | str, text_column: str = "text", text_split: str = "blank-lines", **source: Any
) -> list[str]:
    layout = DocumentLayout(text_column, text_split)
    records = read_documents([str(name) for name in inputs], layout=layout, source=SourceOptions(**source))
    return [record["text"] for record in records]


def tuples_of(
    *inputs: Path | str,
    query_column: str = "",
    positive_columns: Sequence[str] = (),
    negative_columns: Sequence[str] = (),
    score_column: str | None = None,
    columns: Sequence[str] = (),
    scratch: Path | None = None,
    **options: Any,
) -> list[tuple[str, list[str], list[str], float | None]]:
    source = {name: options.pop(name) for name in [field.name for field in fields(SourceOptions)] if name in options}
    wanted = TupleLayout(query_column, tuple(positive_columns), tuple(negative_columns), score_column)
    tuples = TupleOptions(wanted=wanted, columns=tuple(columns), **options)
    names = [str(name) for name in inputs]
    records = read_tuples(names, tuples=tuples, source=SourceOptions(**source), scratch=scratch)
    return [(record["query"], record["positives"], record["negatives"], record["score"]) for record in records]


def refused(sentence: str, call: Any, *arguments: Any, **options: Any) -> None:
    with pytest.raises(DataError, match=sentence) as caught:
        call(*arguments, **options)
    assert "\n" not in str(caught.value)


# ------------------------------------------------------------------------------------------------------- documents

TEXTS = [f"text {number} with ünïcode\nand a second line" for number in range(50)]


def test_the_same_documents_from_every_file_format(tmp_path: Path) -> None:
    rows = [{"id": number, "text": text} for number, text in enumerate(TEXTS)]
    plain = write_jsonl(tmp_path / "a.jsonl", rows)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
    frames = [zstandard.compress(part) for part in (plain.read_bytes()[:1000], plain.read_bytes()[1000:])]
    (tmp_path / "a.jsonl.zst").write_bytes(b"".join(frames))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=7)
    (tmp_path / "a.txt").write_text("\n\n\n".join(TEXTS) + "\n", encoding="utf-8")
    for name in ("a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.txt"):
        assert texts_of(tmp_path / name) == TEXTS, name
    assert texts_of(tmp_path / "a.txt", text_split="lines") == [line for text in TEXTS for line in text.split("\n")]
    assert texts_of(tmp_path / "a.txt", text_split="file") == ["\n\n\n".join(TEXTS)]
    assert texts_of(tmp_path / "*.jsonl*") == TEXTS * 3
    assert texts_of(tmp_path) == TEXTS * 5
    assert texts_of(tmp_path / "a.jsonl.gz", limit=3) == TEXTS[:3]
    table = write_tsv(tmp_path / "b.tsv", [("id", "body"), *((number, f"row {number}") for number in range(9))])
    assert texts_of(table, text_column="body") == [f"row {number}" for number in range(9)]


@pytest.mark.parametrize(("unit_bytes", "one_unit"), [(1, ""), (17, ""), (100, ""), (1000, "d"), (10**6, "acd")])
def test_units_hold_every_record_once_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unit_bytes: int, one_unit: str
) -> None:
    """one_unit: the files that are not cut."""
    monkeypatch.setattr(planning, "SMALLEST_SPLIT_BYTES", unit_bytes)
    monkeypatch.setattr(planning, "LARGEST_SPLIT_BYTES", unit_bytes)
    write_jsonl(tmp_path / "a.jsonl", ({"text": text} for text in TEXTS))
    rows = [("query", "positive"), *((f"q{number}", f"p{number}") for number in range(50))]
    write_tsv(tmp_path / "b.tsv", rows)
    table = pyarrow.Table.from_pylist([{"text": text} for text in TEXTS])
    pyarrow.parquet.write_table(table, tmp_path / "c.parquet", row_group_size=3)
    (tmp_path / "d.txt").write_text("".join(f"line {number}\n" for number in range(50)))
    for name, expected in (("a.jsonl", TEXTS), ("c.parquet", TEXTS), ("d.txt", [f"line {i}" for i in range(50)])):
        units = plan_documents([str(tmp_path / name)], DocumentLayout(text_split="lines"))
        assert (len(units) == 1) == (name[0] in one_unit)
        assert texts_of(tmp_path / name, text_split="lines") == expected
    assert [query for query, *_ in tuples_of(tmp_path / "b.tsv")] == [f"q{number}" for number in range(50)]
    positions = [
        place(unit, position) for unit in plan_tuples([str(tmp_path / "b.tsv")]) for position, _ in read_split(unit)
    ]
    assert positions == [f"{tmp_path / 'b.tsv'}:{line}" for line in range(2, 52)]
    limited = plan_documents([str(tmp_path / "a.jsonl")], source=SourceOptions(limit=20))
    assert [record for unit in limited for _, record in read_split(unit)] == [{"text": text} for text in TEXTS[:20]]


def test_losing_a_unit_loses_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the test above."""
    monkeypatch.setattr(planning, "SMALLEST_SPLIT_BYTES", 100)
    units = plan_documents([str(write_jsonl(tmp_path / "a.jsonl", ({"text": text} for text in TEXTS)))])
    assert sum(1 for unit in units[1:] for _ in read_split(unit)) < len(TEXTS)
    moved = [replace(unit, start=unit.start + 40) for unit in units]
    assert sum(1 for unit in moved for _ in read_split(unit)) < len(TEXTS)


def test_bad_documents_are_named_with_file_and_line(tmp_path: Path) -> None:
    good = '{"text": "good"}\n'
    cases = {
        "empty.jsonl": (good + '{"text": " "}\n', r"empty.jsonl:2: text is empty; .*--skip-empty"),
        "null.jsonl": (good * 2 + '{"text": null}\n', r"null.jsonl:3: text is empty"),
        "column.jsonl": (good + '{"body": "x"}\n', r"column.jsonl:2 has no column 'text'; it has 'body'"),
        "json.jsonl": (good + "{oops\n", r"json.jsonl:2 is no JSON"),
        "list.jsonl": (good + "[1]\n", r"list.jsonl:2 holds a list"),
        "number.jsonl": (good + '{"text": 5}\n', r"number.jsonl:2: column 'text' holds a int, not a text"),
        "nothing.jsonl": ("", r"nothing.jsonl is empty"),
        "table.tsv": ("id\ttext\n1\ta\n2\n", r"table.tsv:3 has 1 tab-separated columns instead of 2"),
    }
    for name, (content, sentence) in cases.items():
        (tmp_path / name).write_text(content)
        refused(sentence, texts_of, tmp_path / name)
        if content:
            (tmp_path / f"{name}.gz").write_bytes(gzip.compress(content.encode()))
            refused(sentence.replace(name, f"{name}.gz"), texts_of, tmp_path / f"{name}.gz")
    (tmp_path / "latin.jsonl").write_bytes(good.encode() + '{"text": "ü"}\n'.encode("latin-1"))
    refused(r"latin.jsonl:2 is not UTF-8", texts_of, tmp_path / "latin.jsonl")
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(good.encode() * 99)[:-9])
    refused(r"cut.jsonl.gz is damaged", texts_of, tmp_path / "cut.jsonl.gz")
    (tmp_path / "fake.parquet").write_text("no parquet")
    refused(r"fake.parquet is damaged", texts_of, tmp_path / "fake.parquet")
    table = pyarrow.Table.from_pylist([{"text": "a"}, {"text": ""}])
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    refused(r"rows.parquet row 1: text is empty", texts_of, tmp_path / "rows.parquet")
    refused(r"rows.parquet has no column 'body'", texts_of, tmp_path / "rows.parquet", text_column="body")
    assert texts_of(tmp_path / "empty.jsonl", skip_empty=True) == ["good"]
    assert texts_of(tmp_path / "rows.parquet", skip_empty=True) == ["a"]


def test_half_surrogates_become_question_marks(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "half \\ud83d whole \\ud83d\\ude00"}\n')
    assert texts_of(tmp_path / "a.jsonl") == ["half ? whole \U0001f600"]


def test_inputs_that_are_not_there_are_refused(tmp_path: Path) -> None:
    refused("absent.jsonl does not exist", texts_of, tmp_path / "absent.jsonl")
    refused("no file matches", texts_of, tmp_path / "*.jsonl")
    refused("holds no .jsonl", texts_of, tmp_path)
    (tmp_path / "a.docx").write_text("x")
    refused("unknown format", texts_of, tmp_path / "a.docx")
    refused("text split 'words' is unknown", texts_of, tmp_path, text_split="words")
    refused("neither a file or folder here nor a data set", texts_of, "HuggingFaceFW/fineweb")
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n')
    refused("limit is 0", texts_of, tmp_path / "a.jsonl", limit=0)


def local_hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's "someone/corpus", subset "small": the folder's jsonl files, a shard each."""
    import datasets

    load = datasets.load_dataset

    def local(name: str, subset: str | None, *, split: str, streaming: bool) -> Any:
        assert (name, subset, streaming) == ("someone/corpus", "small", True)
        files = sorted(map(str, folder.glob("*.jsonl")))
        return load("json", data_files={"train": files}, split=split, streaming=True, cache_dir=str(folder / "cache"))

    monkeypatch.setattr(rows_module, "require_hub", lambda hint: None)
    monkeypatch.setattr(datasets, "load_dataset", local)


def test_hub_data_sets_stream_in_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        write_jsonl(tmp_path / f"{number}.jsonl", ({"text": f"{number}-{row}"} for row in range(4)))
    local_hub(tmp_path, monkeypatch)
    stated = ("subset", "split", "text_column")
    units = plan_documents(["someone/corpus"], source=SourceOptions(subset="small", stated=stated))
    assert [unit.source for unit in units] == [f"hub:someone/corpus/small/train[{shard}/3]" for shard in range(3)]
    assert texts_of("someone/corpus", subset="small") == [f"{number}-{row}" for number in range(3) for row in range(4)]
    refused("has no column 'body'", texts_of, "someone/corpus", subset="small", text_column="body")
    refused("check --subset and --split", texts_of, "someone/corpus", subset="small", split="dev")


def test_real_documents(shared_data: Path) -> None:
    folder = shared_data / "text"
    sample = texts_of(folder / "fineweb_sample.jsonl")
    assert len(sample) == 20 and sample[0].startswith("The F-word continues to reverberate")
    rows = texts_of(folder / "*.parquet")
    assert set(rows) == set(sample) and len(rows) == 25
    assert len(texts_of(folder / "fineweb_edu_1MB.jsonl.gz", limit=50)) == 50
    assert sum(1 for _ in read_documents([str(folder / "*.jsonl.gz")])) == 4387


# ---------------------------------------------------------------------------------------------------------- tuples


def test_customary_columns(tmp_path: Path) -> None:
    triplets = [{"anchor": "a", "positive": "p", "negative": "n"}]
    assert tuples_of(write_jsonl(tmp_path / "a.jsonl", triplets)) == [("a", ["p"], ["n"], None)]
    lists = [{"query": "q", "positives": ["p", "r"], "negatives": []}, {"query": "q", "positives": ["p"]}]
    assert tuples_of(write_jsonl(tmp_path / "b.jsonl", lists)) == [
        ("q", ["p", "r"], [], None),
        ("q", ["p"], [], None),
    ]
    numbered = [{"query": "q", "positive": "p", "negative_1": "n", "negative_2": "m"}]
    assert tuples_of(write_jsonl(tmp_path / "c.jsonl", numbered)) == [("q", ["p"], ["n", "m"], None)]
    graded = [{"sentence1": "a", "sentence2": "b", "score": 0.5}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(graded), tmp_path / "d.parquet")
    assert tuples_of(tmp_path / "d.parquet") == [("a", ["b"], [], 0.5)]
    tevatron = {
        "query_id": "1",
        "query": "q",
        "positive_passages": [{"docid": "5", "title": "T", "text": "x"}, {"docid": "6", "text": "y"}],
        "negative_passages": [{"docid": "7", "title": "", "text": "z"}],
    }
    assert tuples_of(write_jsonl(tmp_path / "e.jsonl", [tevatron])) == [("q", ["T x", "y"], ["z"], None)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([tevatron]), tmp_path / "e.parquet")
    assert tuples_of(tmp_path / "e.parquet") == [("q", ["T x", "y"], ["z"], None)]


def test_columns_by_name(tmp_path: Path) -> None:
    rows = [("left", "right", "other", "grade"), ("a", "b", "c", "1"), ("d", "e", "f", "2")]
    path = write_tsv(tmp_path / "a.tsv", rows)
    named = {"query_column": "left", "positive_columns": ["right"]}
    assert tuples_of(path, **named) == [("a", ["b"], [], None), ("d", ["e"], [], None)]
    assert tuples_of(path, **named, negative_columns=["other"])[0] == ("a", ["b"], ["c"], None)
    assert tuples_of(path, **named, score_column="grade")[1] == ("d", ["e"], [], 2.0)
    both = {"query_column": "left", "positive_columns": ["right", "other"]}
    assert tuples_of(path, **both)[0] == ("a", ["b", "c"], [], None)
    bare = write_tsv(tmp_path / "b.tsv", rows[1:])
    assert tuples_of(bare, columns=["query", "positive", "negative", "unused"])[0] == ("a", ["b"], ["c"], None)


def test_rows_have_weights(tmp_path: Path) -> None:
    """A row without one has the weight 1; a column named among others is read like them."""
    rows = [{"query": "a", "positive": "p", "weight": 0}, {"query": "b", "positive": "p"}]
    rows += [{"query": "c", "positive": "p", "weight": None}, {"query": "d", "positive": "p", "weight": 2.5}]
    found = read_tuples([str(write_jsonl(tmp_path / "a.jsonl", rows))])
    assert [record.get("weight") for record in found] == [0.0, 1.0, 1.0, 2.5]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    found = read_tuples([str(tmp_path / "a.parquet")])
    assert [record.get("weight") for record in found] == [0.0, 1.0, 1.0, 2.5]
    table = write_tsv(
        tmp_path / "b.tsv", [("query", "positive", "weight", "w"), ("a", "p", "3", "4"), ("b", "p", "3", "")]
    )
    for column, expected in (("", [3.0, 3.0]), ("w", [4.0, 1.0])):
        wanted = TupleLayout("", (), weight=column or None)
        found = read_tuples([str(table)], tuples=TupleOptions(wanted=wanted))
        assert [record.get("weight") for record in found] == expected
    plain = write_jsonl(tmp_path / "c.jsonl", [{"query": "a", "positive": "p"}])
    assert [record.get("weight") for record in read_tuples([str(plain)])] == [None]


def test_bad_tuples_are_named_with_file_and_line(tmp_path: Path) -> None:
    def case(name: str, rows: Iterable[Sequence[object]], sentence: str, **options: Any) -> None:
        refused(sentence, tuples_of, write_tsv(tmp_path / name, rows), **options)

    case("a.tsv", [("query", "body"), ("q", "b")], r"a.tsv has no positive column .* --positive-column")
    case("b.tsv", [("topic", "positive"), ("q", "b")], r"b.tsv has no query column .* --query-column")
    case("c.tsv", [("query", "positive"), ("q", "b"), ("", "b")], r"c.tsv:3: query is empty")
    case("d.tsv", [("query", "positive"), ("q", "")], r"d.tsv:2: positive is empty")
    case("e.tsv", [("query", "positive", "score"), ("q", "b", "high")], r"e.tsv:2: score 'high' is not a finite")
    case("f.tsv", [("query", "positive", "score"), ("q", "b", "nan")], r"f.tsv:2: score 'nan' is not a finite")
    case("g.tsv", [("query", "query"), ("q", "b")], r"g.tsv:1 is no header of distinct column names")
    case("h.tsv", [("query", "positive"), ("q", "b")], "no column 'neg'", negative_columns=["neg"])
    case("i.tsv", [("query", "positive"), ("q", "b")], "format 'csv' is unknown", format="csv")
    case("j.tsv", [("query", "positive"), ("q", "b")], "no MS MARCO or BEIR folder", negatives_file="x.jsonl")
    graded = {"query_column": "q", "positive_columns": ["p"], "negative_columns": ["n"], "score_column": "s"}
    case(
        "w.tsv",
        [("query", "positive", "weight"), ("q", "b", "-1")],
        r"w.tsv:2: weight '-1' is not a finite .* at least 0",
    )
    case("x.tsv", [("query", "positive", "weight"), ("q", "b", "much")], r"x.tsv:2: weight 'much' is not a finite")
    both = [("query", "positive", "score", "weight"), ("q", "b", "1", "2")]
    case("y.tsv", both, "graded pairs have no weights of their own; rename the column 'weight'")
    later = write_jsonl(
        tmp_path / "z.jsonl", [{"query": "a", "positive": "p"}, {"query": "a", "positive": "p", "weight": 2}]
    )
    refused("z.jsonl:2 has a weight, and the first row none", tuples_of, later)
    case("k.tsv", [("q", "p", "n", "s"), ("a", "b", "c", "1")], "graded pairs are one query", **graded)
    refused("graded pairs into a folder", tuples_of, tmp_path / "e.tsv", tmp_path / "h.tsv")
    path = write_jsonl(tmp_path / "l.jsonl", [{"query": ["a", "b"], "positive": "p"}])
    refused("l.jsonl:1: column 'query' must hold one query, not 2", tuples_of, path)
    path = write_jsonl(tmp_path / "m.jsonl", [{"query": "a", "positive": "p"}, {"query": "a"}])
    refused("m.jsonl:2 has no column 'positive'", tuples_of, path)
    (tmp_path / "n.txt").write_text("text\n")
    refused("plain text, which has no queries", tuples_of, tmp_path / "n.txt")
    rows = [{"query": "q", "positives": ["", "p"], "negatives": ["", "n"]}, {"query": "", "positives": ["p"]}]
    path = write_jsonl(tmp_path / "o.jsonl", [*rows, {"query": "q", "positives": []}])
    assert tuples_of(path, skip_empty=True) == [("q", ["p"], ["n"], None)]


def test_skipped_records_are_the_first_of_all_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Input splits are an inner matter: held-out records beyond the first of them must not be trained on."""
    monkeypatch.setattr(planning, "SMALLEST_SPLIT_BYTES", 100)
    first = write_jsonl(tmp_path / "a.jsonl", ({"text": f"a{number:02d}"} for number in range(60)))
    second = write_jsonl(tmp_path / "b.jsonl", ({"text": f"b{number:02d}"} for number in range(60)))
    texts = texts_of(first, second)
    assert len(plan_documents([str(first)])) > 5
    for skip in (0, 1, 7, 23, 59, 60, 61, 100):
        for limit in (None, 10, 70):
            units = plan_documents([str(first), str(second)], source=SourceOptions(limit), skip=skip)
            found = [record["text"] for unit in units for _, record in read_split(unit)]
            assert found == texts[skip:][:limit], (skip, limit)
    refused(
        r"61 records are to be skipped, but the inputs have 60; lower --skip-first",
        plan_documents,
        [str(first)],
        skip=61,
    )


def test_nli_and_sts_files(tmp_path: Path) -> None:
    rows = [("premise", "entailed", "contradicted"), *((f"a{i}", f"e{i}", f"c{i}") for i in range(5))]
    path = write_tsv(tmp_path / "nli.tsv", rows)
    assert tuples_of(path, format="nli")[2] == ("a2", ["e2"], ["c2"], None)
    (tmp_path / "skip.txt").write_text("0\n3\n")
    kept = tuples_of(path, format="nli", skip_rows=str(tmp_path / "skip.txt"))
    assert [query for query, *_ in kept] == ["a1", "a2", "a4"]
    sts = write_tsv(tmp_path / "sts.tsv", [("4.5", "one", "two"), ("0", "three", 'f"our')])
    assert tuples_of(sts, format="sts") == [("one", ["two"], [], 4.5), ("three", ['f"our'], [], 0.0)]
    refused("skip.txt2 cannot be read", tuples_of, path, skip_rows=str(tmp_path / "skip.txt2"))
    refused("one input at a time", tuples_of, path, sts, skip_rows=str(tmp_path / "skip.txt"))


def test_rows_to_skip_of_a_hub_data_set_count_over_all_its_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a limit: so many of those that are left, as a published cut with a hold-out is made (docs/static.md)."""
    for number in range(3):
        write_jsonl(tmp_path / f"{number}.jsonl", ({"query": f"q{4 * number + i}", "positive": "p"} for i in range(4)))
    local_hub(tmp_path, monkeypatch)
    (tmp_path / "held_out.txt").write_text("1\n6\n11\n")
    options = {"subset": "small", "skip_rows": str(tmp_path / "held_out.txt")}
    kept = [query for query, *_ in tuples_of("someone/corpus", **options)]
    assert kept == [f"q{row}" for row in range(12) if row not in (1, 6, 11)]
    assert [query for query, *_ in tuples_of("someone/corpus", **options, limit=6)] == kept[:6]


@pytest.fixture
def marco(tmp_path: Path) -> Path:
    folder = tmp_path / "marco"
    write_tsv(folder / "collection.tsv", ((number, f"passage {number}") for number in range(10)))
    write_tsv(folder / "queries.train.tsv", [("7", "what is seven"), ("8", "what is eight"), ("9", "unjudged")])
    write_tsv(folder / "qrels.train.tsv", [("7", 0, 1, 1), ("8", 0, 2, 1), ("8", 0, 3, 1)])
    return folder


def test_ms_marco(marco: Path, tmp_path: Path) -> None:
    assert tuples_of(marco, scratch=tmp_path / "s1") == [
        ("what is seven", ["passage 1"], [], None),
        ("what is eight", ["passage 2", "passage 3"], [], None),
    ]
    plain = write_jsonl(tmp_path / "plain.jsonl", [{"qid": "7", "neg": ["4", "5", "1"]}, {"qid": "77", "neg": ["4"]}])
    found = tuples_of(marco, scratch=tmp_path / "s2", negatives_file=str(plain))
    assert [negatives for _, _, negatives, _ in found] == [["passage 4", "passage 5"], []]
    by_system = {"qid": 7, "pos": [1], "neg": {"bm25": [4, 5, 6], "dense": [5, 1, {"pid": 9, "score": 0.1}]}}
    path = tmp_path / "systems.jsonl.gz"
    path.write_bytes(gzip.compress((json.dumps(by_system) + "\n").encode()))
    found = tuples_of(marco, scratch=tmp_path / "s3", negatives_file=str(path), max_negatives=3)
    assert found[0][2] == ["passage 4", "passage 5", "passage 6"]


def test_a_record_by_id_is_named_by_its_query(marco: Path, tmp_path: Path) -> None:
    """The joined rows are in a file that no user has."""
    (unit,) = plan_tuples([str(marco)], scratch=tmp_path / "s")
    places = [place(unit, position) for position, _ in read_split(unit)]
    named = ("what is seven", "what is eight")
    assert places == [f"msmarco:{marco}/train, the query {query!r} or one of its passages," for query in named]


def test_errors_in_ms_marco_files(marco: Path, tmp_path: Path) -> None:
    refused("has no queries.dev.tsv", tuples_of, marco, scratch=tmp_path / "s1", split="dev")
    refused("takes a scratch folder", tuples_of, marco)
    (tmp_path / "skip").write_text("0\n")
    no_rows = "marco names passages by id, so it has no rows to skip"
    refused(no_rows, tuples_of, marco, scratch=tmp_path / "s0", skip_rows=str(tmp_path / "skip"))
    absent = write_jsonl(tmp_path / "negatives.jsonl", [{"qid": "7", "neg": ["99"]}])
    refused("passage '99', which", tuples_of, marco, scratch=tmp_path / "s2", negatives_file=str(absent))
    wrong = write_jsonl(tmp_path / "wrong.jsonl", [{"query": "7"}])
    refused("wrong.jsonl:1 is not of the form", tuples_of, marco, scratch=tmp_path / "s3", negatives_file=str(wrong))
    write_tsv(marco / "qrels.train.tsv", [("55", 0, 1, 1)])
    refused("judges query '55', which is not in", tuples_of, marco, scratch=tmp_path / "s4")
    write_tsv(marco / "qrels.train.tsv", [("7", 0, 1, "yes")])
    refused("qrels.train.tsv:1 is not of the form", tuples_of, marco, scratch=tmp_path / "s5")
    write_tsv(marco / "collection.tsv", [(1, "a"), (2, "b"), (1, "c")])
    refused("holds the id '1' twice", TextIndex.build, marco / "collection.tsv")


def test_beir_folder(tmp_path: Path) -> None:
    folder = tmp_path / "beir"
    corpus = [{"_id": f"d{number}", "title": "T" * (number % 2), "text": f"body {number}"} for number in range(4)]
    write_jsonl(folder / "corpus.jsonl", corpus)
    write_jsonl(folder / "queries.jsonl", [{"_id": "q1", "text": "first"}, {"_id": "q2", "text": "second"}])
    rows = [("query-id", "corpus-id", "score"), ("q1", "d1", 2), ("q1", "d0", 0), ("q2", "d3", 0)]
    write_tsv(folder / "qrels" / "train.tsv", rows)
    assert tuples_of(folder, scratch=tmp_path / "s") == [("first", ["T body 1"], ["body 0"], None)]
    assert read_qrels(folder / "qrels" / "train.tsv") == {"q1": {"d1": 2.0, "d0": 0.0}, "q2": {"d3": 0.0}}
    assert read_beir_texts(folder / "corpus.jsonl")["d3"] == "T body 3"
    refused("qrels/test.tsv; check the folder and --split", tuples_of, folder, scratch=tmp_path / "t", split="test")


def test_text_index_finds_every_text(tmp_path: Path) -> None:
    path = write_tsv(tmp_path / "collection.tsv", ((f"id-{number}", f"text\t{number}") for number in range(3000)))
    TextIndex.build(path).save(tmp_path)
    index = TextIndex.load(tmp_path)
    assert len(index) == 3000
    assert all(index.get(f"id-{number}") == f"text\t{number}" for number in range(0, 3000, 7))
    assert index.get("id-3000") is None


def test_real_tuples(shared_data: Path, tmp_path: Path) -> None:
    nli = shared_data / "nli"
    snli = tuples_of(nli / "snli_devtest_triplets.tsv")
    assert len(snli) == 6339 and snli == tuples_of(nli / "snli_devtest_triplets.tsv", format="nli")
    assert snli[0] == (
        "Two women are embracing while holding to go packages.",
        ["Two woman are holding packages."],
        ["The men are fighting outside a deli."],
        None,
    )
    rows = nli / "cad_snli_triplets.sts_overlap_rows.txt"
    kept = tuples_of(nli / "cad_snli_triplets.tsv", skip_rows=str(rows))
    assert len(kept) == 2342 - len(rows.read_text().split())
    for name, count in (("sts12", 3108), ("sts13", 1500), ("sts14", 3750), ("stsb_dev", 1500)):
        graded = tuples_of(shared_data / "sts" / f"{name}.tsv", format="sts")
        assert len(graded) == count and all(0 <= score <= 5 for *_, score in graded if score is not None)
    pairs = {"query_column": "sentence", "positive_columns": ["english"]}
    assert len(tuples_of(shared_data / "pairs" / "tatoeba_xx-eng.tsv", **pairs)) == 31918
    scifact = tuples_of(shared_data / "retrieval" / "scifact", scratch=tmp_path / "s")
    assert len(scifact) == 809
    assert scifact[0][0] == "0-dimensional biomaterials lack inductive properties."


# ------------------------------------------------------------------------------------------- rows that are not alike


def pair(number: int, **more: object) -> dict[str, object]:
    return {"query": f"q{number}", "positive": f"p{number}", **more}


def test_every_row_has_its_own_negatives(tmp_path: Path) -> None:
    rows = [pair(0), pair(1, negative="n1"), pair(2, hard_negatives=["a", "b"]), pair(3, neg_1="c", neg_2=None)]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    assert [negatives for *_, negatives, _ in tuples_of(path)] == [[], ["n1"], ["a", "b"], ["c"]]
    named = tuples_of(path, query_column="query", positive_columns=["positive"])
    assert [negatives for *_, negatives, _ in named] == [[]] * 4, "columns given by hand mean just those"


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([pair(0), pair(1, score=1.0)], r"a.jsonl:2 has a score, and the first row none"),
        ([pair(0), pair(1, score=1.0, negative="n")], r"a.jsonl:2 has a score, and the first row none"),
        ([pair(0, score=1.0), pair(1, score=0.5, negative="n")], r"a.jsonl:2 has negatives, and the first row a score"),
        ([pair(0, negative="n"), pair(1, score=1.0)], r"a.jsonl:2 has a score, and the first row none"),
        (
            [pair(0), pair(1, positives=["e", "f"])],
            r"a.jsonl:2 has a column 'positives', and the positives of .*'positive'",
        ),
        ([pair(0), pair(1, positive="", positives=["e"])], r"a.jsonl:2 has a column 'positives'"),
        (
            [pair(0, pos=["i"]), pair(1, positive_passages=[{"text": "z"}])],
            r"a.jsonl:2 has a column 'positive_passages'",
        ),
        ([pair(0, score=1.0), pair(1, score=0.5, sentence2="x")], r"a.jsonl:2 has a column 'sentence2'"),
        ([pair(0), pair(1, question="x")], r"a.jsonl:2 has a column 'question', and the queries of .*'query'"),
        ([pair(0, score=1.0), pair(1)], r"a.jsonl:2: score None is not a finite number"),
        ([pair(0, score="1_000")], r"a.jsonl:1: score '1_000' is not a finite number"),
        ([pair(0, score=True)], r"a.jsonl:1: score True is not a finite number"),
        ([pair(0, score=[1])], r"a.jsonl:1: score \[1\] is not a finite number"),
        ([pair(0, score=10**400)], r"a.jsonl:1: score 10*0 is not a finite number"),
        ([{**pair(0), "positive": [[[[[[[[[["x"]]]]]]]]]]}], r"a.jsonl:1: column 'positive' holds a list"),
    ],
)
def test_rows_that_do_not_go_together_are_refused(tmp_path: Path, rows: list[dict[str, object]], sentence: str) -> None:
    refused(sentence, tuples_of, write_jsonl(tmp_path / "a.jsonl", rows))


def test_other_names_of_positives_that_lose_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They hold no text, were named in the warning about the first row, or the columns were named by hand."""
    empty = [pair(0), pair(1, positives=[]), pair(2, pos=None, question="")]
    assert len(tuples_of(write_jsonl(tmp_path / "empty.jsonl", empty))) == 3 and not caplog.messages
    named = write_jsonl(tmp_path / "named.jsonl", [pair(0), pair(1, positives=["e"])])
    assert len(tuples_of(named, query_column="query", positive_columns=["positive"])) == 2 and not caplog.messages
    first = write_jsonl(
        tmp_path / "first.jsonl", [pair(0, pos=["i"], score=1, negative="n"), pair(1, pos="x", score=2)]
    )
    assert [positives for _, positives, *_ in tuples_of(first)] == [["p0"], ["p1"]]
    assert len(caplog.messages) == 1 and caplog.messages[0].endswith("not read: 'pos', 'score'")


def test_negatives_that_no_option_names_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [pair(0, negative="n", neg_1="m")])
    assert tuples_of(path, query_column="query", negative_columns=["neg_1"]) == [("q0", ["p0"], ["m"], None)]
    assert len(caplog.messages) == 1 and caplog.messages[0].endswith("not read: 'negative'")


def test_columns_of_a_hub_data_set_that_are_not_read_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_jsonl(tmp_path / "0.jsonl", [pair(0, answer="x")])
    local_hub(tmp_path, monkeypatch)
    assert len(tuples_of("someone/corpus", subset="small")) == 1
    assert "someone/corpus: queries are 'query', positives 'positive'; not read: 'answer'" in caplog.messages


def test_columns_that_are_not_read_are_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        write_jsonl(tmp_path / name, [pair(0, answer="x", negative="n", score=1)])
    assert tuples_of(tmp_path)[0] == ("q0", ["p0"], ["n"], None)
    assert caplog.messages == [
        f"{tmp_path / 'a.jsonl'}: queries are 'query', positives 'positive'; not read: 'answer', 'score'"
    ]


@pytest.mark.parametrize(
    ("content", "format", "columns", "sentence"),
    [
        ("cat\tanimal\tstone\ndog\tpet\tcar\n", "nli", (), "a.tsv:1 is no header of NLI triplets .*'cat', 'animal'"),
        ("A man\tA person\tA stone\n", "nli", (), "a.tsv:1 is no header of NLI triplets"),
        ("query\tpositive\nq\tp\n", "columns", ("query", "positive"), "a.tsv:1 is a header .* leave --columns out"),
        ("q\tp\n", "columns", ("query", "query"), "not distinct names"),
        ("q\tp\n", "columns", ("query", ""), "not distinct names"),
        ("score\tsentence1\tsentence2\n1\ta\tb\n", "sts", (), "a.tsv:1: score 'score' is not a finite number"),
        ("a\tb\tc\n", "nli", (), "name the columns with --columns in place of --format nli"),
        ("a\tb\tc\n", "nli", ("anchor", "entailed", "contradicted"), "format nli has columns of its own"),
        ("1\ta\tb\n", "sts", ("score", "query", "positive"), "format sts has columns of its own"),
    ],
)
def test_headers_are_neither_lost_nor_read(
    tmp_path: Path, content: str, format: str, columns: tuple[str, ...], sentence: str
) -> None:
    (tmp_path / "a.tsv").write_text(content)
    refused(sentence, tuples_of, tmp_path / "a.tsv", format=format, columns=columns)


def test_triplets_without_a_header(tmp_path: Path) -> None:
    """As the message to --format nli says."""
    (tmp_path / "a.tsv").write_text("a\tb\tc\n")
    found = tuples_of(tmp_path / "a.tsv", columns=("anchor", "entailed", "contradicted"))
    assert found == [("a", ["b"], ["c"], None)]


def test_columns_that_triplets_would_not_read(tmp_path: Path) -> None:
    """A weight that is asked for must not be lost silently."""
    (tmp_path / "a.tsv").write_text("anchor\tentailed\tcontradicted\tworth\na\tb\tc\t2\n")
    wanted = TupleLayout("", (), weight="worth")
    refused("format nli reads the first three columns", lambda: TupleOptions("nli", wanted))


def test_a_header_of_documents_is_asked_for_by_no_option_that_documents_lack(tmp_path: Path) -> None:
    refused(
        "no header of distinct column names; write one", texts_of, write_tsv(tmp_path / "a.tsv", [("text", "text")])
    )


@pytest.mark.parametrize("names", ["anchor\tpositive\thard_negative", "Premise\tentailment\tcontradiction"])
def test_customary_headers_of_triplets(tmp_path: Path, names: str) -> None:
    (tmp_path / "a.tsv").write_text(f"{names}\na\tb\tc\n")
    assert tuples_of(tmp_path / "a.tsv", format="nli") == [("a", ["b"], ["c"], None)]


def test_marks_of_editors_are_no_text(tmp_path: Path) -> None:
    for name, content in (("a.txt", "one\n"), ("a.jsonl", '{"text": "one"}\n'), ("a.tsv", "text\none\n")):
        marked = b"\xef\xbb\xbf" + content.encode()
        (tmp_path / name).write_bytes(marked)
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(marked))
        assert texts_of(tmp_path / name) == texts_of(tmp_path / f"{name}.gz") == ["one"], name


def test_what_nests_too_deep_is_named(tmp_path: Path) -> None:
    deep = "[" * 100_000 + "]" * 100_000
    (tmp_path / "a.jsonl").write_text(f'{{"text": "x"}}\n{{"text": "y", "more": {deep}}}\n')
    refused(r"a.jsonl:2 is no JSON \(nested too deep\)", texts_of, tmp_path / "a.jsonl")


def test_a_document_may_be_too_long(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\n" + "word\n" * 300)
    refused(r"a.txt:3: a line or a document is longer", texts_of, tmp_path / "a.txt", longest_line=1000)
    assert len(texts_of(tmp_path / "a.txt", longest_line=1500)) == 2
    assert len(texts_of(tmp_path / "a.txt", longest_line=1000, text_split="lines")) == 301


def test_damaged_parquet_is_named(tmp_path: Path) -> None:
    table = pyarrow.table({"text": [f"text {number} {'x' * 50}" for number in range(2000)]})
    for compression, checksums in (("none", False), ("snappy", False), ("zstd", True)):
        path = tmp_path / "a.parquet"
        pyarrow.parquet.write_table(
            table, path, compression=compression, use_dictionary=False, write_page_checksum=checksums
        )
        content = bytearray(path.read_bytes())
        content[200:600] = bytes(byte ^ 0xFF for byte in content[200:600])
        path.write_bytes(content)
        refused(r"parquet file .*a\.parquet (is damaged|cannot be read|is not UTF-8)", texts_of, path)


def test_parquet_columns_that_are_no_texts(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    column = pyarrow.array([[("text", "dog")]], pyarrow.map_(pyarrow.string(), pyarrow.string()))
    pyarrow.parquet.write_table(pyarrow.table({"query": ["q"], "positive": column}), path)
    refused("column 'positive' holds a map, not a text", tuples_of, path)
    twins = pyarrow.Table.from_arrays([pyarrow.array(["a"])] * 2, names=["text", "text"])
    pyarrow.parquet.write_table(twins, path)
    refused("several columns 'text'", texts_of, path)
    bad = pyarrow.Array.from_buffers(
        pyarrow.string(), 1, [None, pyarrow.py_buffer(b"\0\0\0\0\2\0\0\0"), pyarrow.py_buffer(b"\xff\xff")]
    )
    pyarrow.parquet.write_table(pyarrow.table({"text": bad}), path)
    refused(r"a\.parquet is not UTF-8", texts_of, path)


def test_bounds_of_options(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [pair(0), pair(1)])
    assert len(tuples_of(path, limit=10**30)) == 2
    refused("the limit is 0", tuples_of, path, limit=0)
    for number in (-1, 10**30):
        refused(f"{number} negatives a query cannot be kept", tuples_of, path, max_negatives=number)
    for rows, sentence in (("2\n", "row 2 is to be skipped, but .*a.jsonl has 2 rows"), ("-1\n", "counted from 0")):
        (tmp_path / "skip").write_text(rows)
        refused(sentence, tuples_of, path, skip_rows=str(tmp_path / "skip"))
    (tmp_path / "skip").write_bytes(b"\xff")
    refused("is not UTF-8", tuples_of, path, skip_rows=str(tmp_path / "skip"))


# ------------------------------------------------------------------------------------------------- ids, said once each


@pytest.fixture
def beir(tmp_path: Path) -> Path:
    folder = tmp_path / "beir"
    write_jsonl(folder / "corpus.jsonl", [{"_id": f"d{number}", "text": f"text {number}"} for number in range(5)])
    write_jsonl(folder / "queries.jsonl", [{"_id": "q0", "text": "query 0"}])
    write_tsv(folder / "qrels" / "train.tsv", [("query-id", "corpus-id", "score"), ("q0", "d0", 1)])
    return folder


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("queries.jsonl", b'{"_id": "q0", "text": "other"}\n', "holds the id 'q0' twice"),
        ("corpus.jsonl", b'{"_id": "d0", "text": "other"}\n', "holds the id 'd0' twice"),
        ("corpus.jsonl", b'{"_id": "d9", "text": "a", "title": ["x"]}\n', "the title is a list, not a text"),
        ("corpus.jsonl", b'{"_id": null, "text": "a"}\n', "has no '_id'"),
        ("corpus.jsonl", b'{"_id": true, "text": "a"}\n', "has no '_id'"),
        ("corpus.jsonl", b"\xff\n", "is not UTF-8"),
        ("qrels/train.tsv", b"q0\td0\t0\n", "train.tsv:3 judges query 'q0' and passage 'd0' again"),
        ("qrels/train.tsv", b"q0\td1\tinf\n", "train.tsv:3 is not of the form"),
        ("qrels/train.tsv", b"q0\td1\t1_0\n", "train.tsv:3 is not of the form"),
        ("qrels/train.tsv", b"q0\t\t1\n", "train.tsv:3 is not of the form"),
        ("qrels/train.tsv", b"q\xe9\td1\t1\n", "train.tsv is not UTF-8"),
    ],
)
def test_one_text_and_one_grade_an_id(beir: Path, tmp_path: Path, name: str, content: bytes, sentence: str) -> None:
    assert len(tuples_of(beir, scratch=tmp_path / "sound")) == 1
    with (beir / name).open("ab") as file:
        file.write(content)
    refused(sentence, tuples_of, beir, scratch=tmp_path / "scratch")


def test_a_judgement_may_be_repeated_and_a_folder_not(beir: Path, tmp_path: Path) -> None:
    with (beir / "qrels" / "train.tsv").open("a") as file:
        file.write("q0\td0\t1\n")
    assert len(tuples_of(beir, scratch=tmp_path / "a")) == 1
    refused("is given twice", tuples_of, beir, f"{beir}/", scratch=tmp_path / "b")


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ([{"qid": "q0", "neg": {"bm25": [{"score": 1}]}}], "must hold passage ids"),
        ([{"qid": "q0", "neg": {"bm25": 5}}], "must hold passage ids"),
        ([{"qid": "q0", "neg": [["d1"]]}], "must hold passage ids"),
        ([{"qid": "q0", "neg": [None]}], "must hold passage ids"),
        ([{"qid": "q0", "neg": "d1"}], "is not of the form"),
        (
            [{"qid": "q0", "neg": ["d1"]}, {"qid": "q0", "neg": ["d2"]}],
            "hard.jsonl:2 gives negatives of query 'q0' again",
        ),
        ([{"qid": "q0", "neg": ["d99"]}], "passage 'd99'"),
    ],
)
def test_hard_negatives_that_name_no_passages(
    beir: Path, tmp_path: Path, lines: list[dict[str, object]], sentence: str
) -> None:
    path = write_jsonl(tmp_path / "hard.jsonl", lines)
    refused(sentence, tuples_of, beir, scratch=tmp_path / "scratch", negatives_file=str(path))


def test_hard_negatives_that_were_cut(beir: Path, tmp_path: Path) -> None:
    rows = [{"qid": f"q{number}", "neg": ["d1"]} for number in (*range(5, 2000), 0)]
    content = write_jsonl(tmp_path / "a.jsonl", rows).read_bytes()
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(zstandard.compress(content))
    assert tuples_of(beir, scratch=tmp_path / "a", negatives_file=str(path))[0][2] == ["text 1"]
    path.write_bytes(zstandard.compress(content)[:-5])
    refused("ends within a frame", tuples_of, beir, scratch=tmp_path / "b", negatives_file=str(path))

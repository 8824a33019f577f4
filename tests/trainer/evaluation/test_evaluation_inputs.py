"""What evaluation reads: texts by id, judgements, runs and graded pairs, and what is said of files that are damaged."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from data.ground.errors import ConfigError, UserError
from models.settings import EmbeddingSettings
from tests.trainer.support import recipe_of, recipe_values
from trainer.evaluate import main
from trainer.evaluation.during_training import Evaluator
from trainer.evaluation.results.raw import read_raw
from trainer.evaluation.tasks.inputs import check_task_names, whole_number
from trainer.evaluation.tasks.retrieval import check_run_names, load_beir, read_qrels, read_run
from trainer.evaluation.tasks.sts import read_sts

DOCUMENTS = [{"_id": f"d{i}", "title": "", "text": f"text {i}"} for i in range(3)]
QUERIES = [{"_id": "q0", "text": "a"}, {"_id": "q1", "text": "b"}]
HEADER = "query-id\tcorpus-id\tscore\n"


def lines(rows: Iterable[Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def beir(folder: Path, *, corpus: bytes = b"", queries: bytes = b"", qrels: str | bytes = "") -> Path:
    folder.joinpath("qrels").mkdir(parents=True, exist_ok=True)
    (folder / "corpus.jsonl").write_bytes(corpus or lines(DOCUMENTS))
    (folder / "queries.jsonl").write_bytes(queries or lines(QUERIES))
    judged = qrels or f"{HEADER}q0\td0\t1\nq1\td1\t1\n"
    (folder / "qrels" / "test.tsv").write_bytes(judged if isinstance(judged, bytes) else judged.encode())
    return folder


def test_a_sound_folder(tmp_path: Path) -> None:
    """Titles may be absent or null, ids whole numbers; the same row may come twice; ids may hold spaces."""
    rows = [*DOCUMENTS, DOCUMENTS[0], {"_id": 7, "title": None, "text": "seven"}, {"_id": "a b", "text": ""}]
    data = load_beir(beir(tmp_path, corpus=lines(rows), qrels=f"\ufeff{HEADER}q0\ta b\t2\nq1\t7\t-1\n\nq1\td1\t+3\n"))
    assert dict(zip(data.document_ids, data.documents))["7"] == "seven"
    assert data.qrels == {"q0": {"a b": 2}, "q1": {"7": -1, "d1": 3}}
    with pytest.raises(UserError, match="'a b', and a run file's names cannot hold white space"):
        check_run_names([data])


@pytest.mark.parametrize("which", ["corpus", "queries"])
@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (lines([{"_id": "d0", "contents": "x"}]), "line 1 has no 'text' but '_id', 'contents'"),
        (lines([{"_id": "d0", "text": "x"}, {"_id": "d0", "text": "y"}]), "line 2 gives the _id 'd0' again"),
        (lines([{"_id": 1, "text": "x"}, {"_id": "1", "text": "y"}]), "line 2 gives the _id '1' again"),
        (lines([{"_id": "d0", "text": ["x"]}]), "line 1: 'text' holds a list"),
        (lines([{"_id": "d0", "text": None}]), "line 1: 'text' holds null"),
        (lines([{"_id": 1.5, "text": "x"}]), "line 1 has no _id"),
        (lines([{"_id": True, "text": "x"}]), "line 1 has no _id"),
        (lines([{"_id": "", "text": "x"}]), "line 1 has no _id"),
        (lines([{"text": "x"}]), "line 1 has no _id"),
        (b'{"_id": "d0", "text": "\\ud83d"}\n', "line 1 holds half of a surrogate pair"),
        (b'{"_id": "\\ud83d", "text": "x"}\n', "line 1 holds half of a surrogate pair"),
        (lines(DOCUMENTS) + b'{"_id": "d9", "text": "caf\xe9"}\n', "line 4 is not UTF-8"),
        (b"[" * 10**5 + b"\n", "line 1 is nested too deep"),
        (b"[]\n", "line 1 is no JSON object"),
        (b'{"_id": 1\n', "line 1 is not JSON"),
        (b'{"_id": ' + b"9" * 5000 + b"}\n", "line 1 is not JSON"),
    ],
)
def test_damaged_texts(rows: bytes, words: str, which: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words) as refusal:
        load_beir(beir(tmp_path, **{which: rows}))
    assert str(tmp_path) in str(refusal.value)


def test_a_title_that_is_no_text(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="'title' holds a number"):
        load_beir(beir(tmp_path, corpus=lines([{"_id": "d0", "title": 3, "text": "x"}])))


@pytest.mark.parametrize("grade", ["²", "--1", "+-1", "1.0", "x", "1" + "0" * 30, "-1000001", "1_0", "", "0x1"])
def test_grades_that_are_none(grade: str, tmp_path: Path) -> None:
    path = tmp_path / "qrels"
    for content in (f"{HEADER}q0\td0\t{grade}\n", f"q0 0 d0 {grade}\n"):
        path.write_text(content)
        with pytest.raises(UserError, match=r"line \d "):
            read_qrels(path)


def test_judgements(tmp_path: Path) -> None:
    path = tmp_path / "qrels"
    for content in ("q0 0 d0 1\nq0\t0\td1\t-2\n", "q0 d0 1\nq0 d1 -2\n", f"{HEADER}q0\td0\t1\nq0\td1\t-2\n"):
        path.write_text(content)
        assert read_qrels(path) == {"q0": {"d0": 1, "d1": -2}}
    # What is no header is no judgement either: without this a query would be lost.
    path.write_text("q0\td0\tx\nq0\td1\t1\n")
    with pytest.raises(UserError, match="line 1 "):
        read_qrels(path)
    path.write_bytes(b"q\xe9 0 d0 1\n")
    with pytest.raises(UserError, match="line 1 is not UTF-8"):
        read_qrels(path)


@pytest.mark.parametrize("score", ["nan", "inf", "-inf", "1e39", "x"])
def test_scores_of_runs_are_finite_in_single_precision(score: str, tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.write_text("q0 Q0 d0 1 3e38 x\n")
    assert read_run(path) == {"q0": {"d0": 3e38}}
    path.write_text(f"q0 Q0 d0 1 {score} x\n")
    with pytest.raises(UserError, match="line 1 "):
        read_run(path)


def test_pairs_may_be_compressed(tmp_path: Path) -> None:
    tsv = b"1.0\ta\tb\n2.0\tc\td\n"
    jsonl = lines([{"score": 1, "text1": "a", "text2": "b"}, {"score": "2", "text1": "c", "text2": "d"}])
    for name, content in (("s.tsv", tsv), ("s.jsonl", jsonl)):
        (tmp_path / name).write_bytes(content)
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(content))
        plain = read_sts(tmp_path / name)
        assert plain.scores == (1.0, 2.0) and plain.pairs == (("a", "b"), ("c", "d"))
        assert read_sts(tmp_path / f"{name}.gz") == plain
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(content)[:-9])
        with pytest.raises(UserError, match=f"{name}.gz"):
            read_sts(tmp_path / f"{name}.gz")


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"score": 1, "sentence1": ["a"], "sentence2": "b"}, "'sentence1' holds a list"),
        ({"score": True, "sentence1": "a", "sentence2": "b"}, "the score True"),
        ({"score": [1], "sentence1": "a", "sentence2": "b"}, "the score"),
        ({"score": 10**400, "sentence1": "a", "sentence2": "b"}, "the score"),
        ({"score": 1, "sentence1": "\ud83d", "sentence2": "b"}, "surrogate"),
        ([1, "a", "b"], "no JSON object"),
        ({"score": 1, "first": "a", "second": "b"}, "lacks one of the keys"),
    ],
)
def test_damaged_pairs(row: Any, words: str, tmp_path: Path) -> None:
    (tmp_path / "s.jsonl").write_bytes(lines([row, row]))
    with pytest.raises(UserError, match=words):
        read_sts(tmp_path / "s.jsonl")


@pytest.mark.parametrize(
    "rows",
    ["s\tx\t²\t2", "s\tx\t0", "s\tx\t-1\t2", "s\tx\t0\t9", "s\tx\t0\t1" + "0" * 30, "s\tx\t0\t2\ns\tx\t0\t2", "\udce9"],
)
def test_damaged_subsets(rows: str, tmp_path: Path) -> None:
    (tmp_path / "s.tsv").write_bytes(b"1.0\ta\tb\n2.0\tc\td\n")
    subsets = tmp_path / "subsets.tsv"
    subsets.write_text("dataset\tsubset\tfirst_row_0based\trows\ns\tx\t0\t2\nother\tx\t5\t9\n")
    assert len(read_sts(tmp_path / "s.tsv", subsets=subsets).subsets) == 1
    subsets.write_bytes(b"dataset\tsubset\tfirst_row_0based\trows\n" + rows.encode("utf-8", "surrogateescape") + b"\n")
    with pytest.raises(UserError):
        read_sts(tmp_path / "s.tsv", subsets=subsets)


@pytest.mark.parametrize(
    "row",
    [
        [],
        {"task": 3},
        {"task": "t", "kind": "retrieval", "queries": 3},
        {"task": "t", "kind": "song"},
        {"task": "t", "kind": "sts", "gold": ["x"]},
        {"task": "t", "method": "m", "layers": 1, "dim": 2, "values": {"map": [1.0]}},
        {"task": "t", "method": "m", "layers": "1", "dim": 2, "values": {}},
    ],
)
def test_damaged_raw_results(row: Any, tmp_path: Path) -> None:
    path = tmp_path / "raw.jsonl.gz"
    for content in (gzip.compress(lines([row])), gzip.compress(lines([row]))[:-9], b"\xff", lines([row])):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"raw\.jsonl\.gz"):
            read_raw(path)


def test_whole_numbers() -> None:
    assert [whole_number(text, most=99) for text in ("7", "+7", "-99")] == [7, 7, -99]
    assert {whole_number(text, most=99) for text in ("100", "", " 7", "٣", "7\n", "1e1")} == {None}


def test_two_tasks_whose_results_would_be_files_of_one_name_are_refused() -> None:
    """The second task's figure or run would replace the first one's."""
    with pytest.raises(ConfigError, match="the results of the tasks 'a b' and 'a_b' would be files of the same name"):
        check_task_names(["a b", "a_b"])
    check_task_names(["a-b", "a_b", "a+b"])  # negative control


def test_two_tasks_of_one_name_are_refused_wherever_tasks_are_read(tmp_path: Path, capsys) -> None:
    """Results are told apart by the task's name, so the second task would take the place of the first."""
    paths = []
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        paths.append(tmp_path / folder / "graded.tsv")
        paths[-1].write_text("1\ta\tb\n2\tb\tc\n")
    for command in ("sizes", "quantised", "fused"):
        assert main([command, "--model", "nowhere", "--sts", *map(str, paths)]) == 2
        assert "two of the tasks are named 'graded'" in capsys.readouterr().err
        assert main([command, "--model", "nowhere", "--sts", str(paths[0])]) == 2  # negative control
        assert "two of the tasks" not in capsys.readouterr().err

    def evaluator(*sts: Path) -> Evaluator:
        recipe = recipe_of(recipe_values(tmp_path, evaluation={"every_steps": 1, "sts": [*map(str, sts)]}))
        return Evaluator.of(recipe, EmbeddingSettings())

    with pytest.raises(ConfigError, match="'graded'"):
        evaluator(*paths)
    assert evaluator(paths[0]).has_tasks

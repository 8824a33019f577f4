"""A collection of tuples on disk: distinct passages, and which of them a query knows to be its own."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from data.corpora.plan import corpus_of, plan_tuples
from data.ground.errors import DataError
from data.passages import Passages, build, is_built, text_key
from tests.data.reading import read_tuples

ROWS = [
    {"query": "What is tea?", "positives": ["A drink.", "a  DRINK.", "Leaves in water."], "negatives": ["A car."]},
    {"query": "what is  tea?", "positives": ["An infusion."]},
    {"query": "A car.", "positives": ["It has wheels."], "negatives": ["A drink.", "Naïve ü text"]},
]


@pytest.fixture
def collection(tmp_path: Path) -> Passages:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "corpus.jsonl").write_text(
        '{"_id": "1", "title": "On", "text": "tea"}\n{"_id": "2", "text": "a drink."}\n{"_id": "3", "text": " "}\n'
    )
    (tmp_path / "out").mkdir()
    assert not is_built(tmp_path / "out")
    build(tmp_path / "out", plan_tuples([str(tmp_path / "rows.jsonl")]), [tmp_path / "corpus.jsonl"])
    assert is_built(tmp_path / "out")
    return Passages(tmp_path / "out")


def test_distinct_passages_in_the_order_of_their_first_mention(collection: Passages) -> None:
    texts = collection.passages(range(collection.num_passages))
    assert texts == [
        *("A drink.", "Leaves in water.", "A car.", "An infusion.", "It has wheels.", "Naïve ü text", "On tea")
    ]
    assert collection.queries(range(collection.num_rows)) == [row["query"] for row in ROWS]


def test_rows_share_what_their_query_knows(collection: Passages) -> None:
    named = [collection.passages(collection.known(row)) for row in range(3)]
    assert named[0] == named[1] == ["A drink.", "Leaves in water.", "An infusion."]
    assert [collection.positives(row).tolist() for row in range(3)] == [[0, 0, 1], [3], [4]]
    assert [collection.negatives(row).tolist() for row in range(3)] == [[2], [], [0, 5]]
    # The passage that equals the query is excluded too, and only there.
    assert collection.passages(collection.excluded(2)) == ["It has wheels.", "A car."]
    assert collection.excluded(0).tolist() == collection.known(0).tolist()


def test_keys_differ_where_words_do() -> None:
    assert text_key("A  drink.\n") == text_key("a drink.") != text_key("a drink")


def test_a_whole_folder_against_a_plain_reading(tmp_path: Path, docstrings: list[str]) -> None:
    """Restated with dictionaries, on rows with repeated queries and passages."""
    rng = np.random.default_rng(3)
    rows = []
    for _ in range(300):
        positives = [docstrings[i] for i in rng.integers(80, size=int(rng.integers(1, 4)))]
        negatives = [docstrings[i] for i in rng.integers(120, size=int(rng.integers(0, 3)))]
        rows.append({"query": docstrings[int(rng.integers(60, 200))], "positives": positives, "negatives": negatives})
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    build(tmp_path, plan_tuples([str(path)]))
    got = Passages(tmp_path)
    mentioned = [text for row in rows for side in ("positives", "negatives") for text in row[side]]
    first = {text_key(text): text for text in reversed(mentioned)}
    in_order = {text_key(text): None for text in mentioned}
    assert got.passages(range(got.num_passages)) == [first[key] for key in in_order]
    for number, row in enumerate(read_tuples([str(path)])):
        same_query = [r for r in rows if text_key(r["query"]) == text_key(row["query"])]
        known = {text_key(text) for r in same_query for text in r["positives"]}
        assert {text_key(text) for text in got.passages(got.known(number))} == known
        barred = known | ({text_key(row["query"])} & first.keys())
        assert {text_key(text) for text in got.passages(got.excluded(number))} == barred
    assert any(len(got.excluded(number)) > len(got.known(number)) for number in range(300))


def test_weights_of_rows_are_kept(tmp_path: Path, collection: Passages) -> None:
    (tmp_path / "w.jsonl").write_text("".join(json.dumps(r | {"weight": n / 2}) + "\n" for n, r in enumerate(ROWS)))
    (tmp_path / "weighted").mkdir()
    build(tmp_path / "weighted", plan_tuples([str(tmp_path / "w.jsonl")]))
    assert [Passages(tmp_path / "weighted").weight(row) for row in range(3)] == [0.0, 0.5, 1.0]
    assert collection.weight(0) is None


def test_what_cannot_be_mined_is_refused(tmp_path: Path) -> None:
    graded = tmp_path / "graded.jsonl"
    graded.write_text('{"query": "a", "positive": "b", "score": 1.0}\n')
    with pytest.raises(DataError, match="graded pairs"):
        build(tmp_path, plan_tuples([str(graded)]))
    with pytest.raises(DataError, match=r"corpus\.jsonl does not exist"):
        plain = tmp_path / "plain.jsonl"
        plain.write_text('{"query": "a", "positive": "b"}\n')
        build(tmp_path, plan_tuples([str(plain)]), [tmp_path / "corpus.jsonl"])
    assert not is_built(tmp_path)
    assert corpus_of(str(tmp_path)) is None
    (tmp_path / "collection.tsv").write_text("1\tx\n")
    assert corpus_of(str(tmp_path)) == tmp_path / "collection.tsv"

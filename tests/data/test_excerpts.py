"""Documents cut into excerpts: every sentence once, in order, but for those of tests; the same wherever they stand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from data import excerpts as command
from data.excerpts import excerpts, plain, sentences_of
from data.ground.errors import DataError

SENTENCES = [f"This is the sentence of number {number} in a document." for number in range(400)]


def test_every_sentence_is_there_once_and_in_its_order() -> None:
    found = excerpts([" ".join(SENTENCES)], set())
    counts = [len(sentences_of(text, set())) for text in found]
    assert sorted(part for text in found for part in sentences_of(text, set())) == sorted(SENTENCES)
    assert all(" ".join(SENTENCES).count(text) == 1 for text in found)
    assert set(counts) <= set(range(1, 9))
    assert counts.count(1) > counts.count(2) > counts.count(8) > 0


def test_sentences_of_tests_are_left_out() -> None:
    """However they are written there; and nothing else is."""
    left_out = {plain(f"  {SENTENCES[3].upper()}\t"), plain(SENTENCES[7])}
    document = "\n".join([*SENTENCES[:20], "A heading", "2.1"])
    found = " ".join(excerpts([document], left_out))
    assert [number for number, text in enumerate(SENTENCES[:20]) if text not in found] == [3, 7]
    assert "heading" not in found
    assert all(text in " ".join(excerpts([document], set())) for text in SENTENCES[:20])  # negative control


def test_the_same_documents_in_any_order_and_number_give_the_same_excerpts() -> None:
    documents = [" ".join(SENTENCES[start : start + 40]) for start in range(0, 400, 40)]
    found = excerpts(documents, set())
    assert found == excerpts([*reversed(documents), documents[0]], set())
    assert found != sorted(found) and set(excerpts(documents[:5], set())) < set(found)


def test_the_command_writes_a_line_an_excerpt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    documents, pairs, output = tmp_path / "documents.jsonl", tmp_path / "sts.tsv", tmp_path / "new" / "texts.jsonl"
    documents.write_text("".join(json.dumps({"text": " ".join(SENTENCES[n : n + 9])}) + "\n" for n in (0, 9)))
    pairs.write_text(f"3.2\t{SENTENCES[4]}\tAnother sentence of a pair.\n")
    command.main([str(documents), "--without", str(pairs), "--output", str(output)])
    texts = [json.loads(line)["text"] for line in output.read_text().splitlines()]
    assert capsys.readouterr().out.startswith(f"{len(texts)} excerpts, ")
    assert SENTENCES[4] not in " ".join(texts) and all(text in " ".join(texts) for text in SENTENCES[5:9])
    documents.write_text(json.dumps({"text": "Too short."}) + "\n")
    with pytest.raises(DataError, match="hold no sentence of 16 characters"):
        command.main([str(documents), "--output", str(output)])
    assert [json.loads(line)["text"] for line in output.read_text().splitlines()] == texts

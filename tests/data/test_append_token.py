"""`data.prepare --append-token`: the shards' tokenizer ends every text with a token, wherever it is used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import processors
from transformers import LlamaTokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer

from data.collate import PairCollator, TextCollator
from data.ground.errors import DataError
from data.prepare import main
from data.shards.format import read_manifest
from data.shards.reader import ShardFolder
from data.stream import Sample
from data.tokens import append_token, frame_of, ids_fingerprint, load_tokenizer, tokenizer_fingerprint
from tests.data.frame_tokenizers import FRAMED, byte_level, metaspace, template
from tests.data.test_frames import evaluated, framed

END = "<|endoftext|>"
LENGTH = 12


@pytest.fixture(scope="module")
def texts(docstrings: list[str]) -> list[str]:
    return docstrings[:120]


@pytest.fixture(scope="module")
def made(texts: list[str]) -> dict[str, PreTrainedTokenizerFast]:
    return {name: make(texts) for name, (make, _, _) in FRAMED.items()}


def saved(tokenizer: PreTrainedTokenizerFast, folder: Path) -> PreTrainedTokenizerFast:
    """A tokenizer of its own, after saving and loading."""
    tokenizer.save_pretrained(folder)
    return load_tokenizer(folder)


def prepared(kind: str, source: Path, tokenizer: Path, output: Path, *options: str) -> ShardFolder:
    fixed = ["--output", str(output), "--tokenizer", str(tokenizer), "--processes", "1", "--skip-empty"]
    assert main([kind, str(source), *fixed, *options]) == 0
    return ShardFolder(output)


def corpus(folder: Path, texts: list[str]) -> Path:
    path = folder / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.mark.parametrize("name", FRAMED)
def test_a_token_is_appended_behind_all_others(
    name: str, made: dict[str, PreTrainedTokenizerFast], texts: list[str], tmp_path: Path
) -> None:
    tokenizer = saved(made[name], tmp_path / "own")
    before, after = FRAMED[name][1:]
    ids = tokenizer(texts, add_special_tokens=False).input_ids
    own, vocabulary = tokenizer_fingerprint(tokenizer), ids_fingerprint(tokenizer)
    if after[-1:] == (END,):
        with pytest.raises(DataError, match=r"ends every text with '<\|endoftext\|>' already; do not append it"):
            append_token(tokenizer, END)
        return
    append_token(tokenizer, END)
    for each in (tokenizer, saved(tokenizer, tmp_path / "appended")):
        assert tuple(map(tuple, map(each.convert_ids_to_tokens, map(list, frame_of(each))))) == (before, (*after, END))
        assert tokenizer_fingerprint(each) == tokenizer_fingerprint(tokenizer) != own
        assert ids_fingerprint(each) == vocabulary
        assert each(texts, add_special_tokens=False).input_ids == ids
        (first, last) = frame_of(each)
        assert each(texts).input_ids == [[*first, *row, *last] for row in ids]
        room = LENGTH - len(first) - len(last)
        cut = each(texts, truncation=True, max_length=LENGTH).input_ids
        assert cut == [[*first, *row[:room], *last] for row in ids]
        # Negative control: a token that is put on before the cut is cut off.
        assert sum(row[-1] != 4 for row in [[*first, *row, *last][:LENGTH] for row in ids]) > 50
        assert all(row[-1] == 4 for row in cut)
        pair = each("one", "two").input_ids
        assert pair == [*each("one").input_ids, *each("two").input_ids]


@pytest.mark.parametrize(("kind", "maker"), [(Qwen2Tokenizer, byte_level), (LlamaTokenizer, metaspace)])
def test_transformers_own_classes_keep_the_token(kind: Any, maker: Any, texts: list[str], tmp_path: Path) -> None:
    """They build the tokenizer from its vocabulary, and take only the post-processor from the file."""
    model = json.loads(maker(texts, template("<s> $A")).backend_tokenizer.to_str())["model"]
    kind(vocab=model["vocab"], merges=[tuple(each) for each in model["merges"]]).save_pretrained(tmp_path / "own")
    config = json.loads((tmp_path / "own" / "tokenizer_config.json").read_text())
    (tmp_path / "own" / "tokenizer_config.json").write_text(
        json.dumps({**config, "add_bos_token": False, "add_eos_token": False})  # as older versions wrote them
    )
    end = "</s>" if kind is LlamaTokenizer else END
    folder = prepared(
        "documents", corpus(tmp_path, texts), tmp_path / "own", tmp_path / "shards", "--append-token", end
    )
    tokenizer = load_tokenizer(folder.tokenizer_path)
    assert isinstance(tokenizer, kind)
    (index,) = folder.vocabulary.after
    assert tokenizer.convert_ids_to_tokens(index) == end and folder.vocabulary.before == ()
    again = saved(tokenizer, tmp_path / "model")
    assert again(texts[0], truncation=True, max_length=5).input_ids[-1] == index
    assert tokenizer_fingerprint(again) == folder.manifest.tokenizer["fingerprint"]


def test_prepared_texts_end_with_the_token_in_training_and_evaluation(
    made: dict[str, PreTrainedTokenizerFast], texts: list[str], tmp_path: Path
) -> None:
    made["qwen3"].save_pretrained(tmp_path / "qwen3")
    source = corpus(tmp_path, texts)
    plain = prepared("documents", source, tmp_path / "qwen3", tmp_path / "plain")
    folder = prepared("documents", source, tmp_path / "qwen3", tmp_path / "shards", "--append-token", END)
    assert folder.manifest.frame is not None and plain.manifest.frame is not None
    assert folder.manifest.frame.model_dump() == {"before": (), "after": (END,), "appended": END}
    assert plain.manifest.frame.model_dump() == {"before": (), "after": (), "appended": ""}
    tokenizer = load_tokenizer(folder.tokenizer_path)
    documents = folder.documents(range(folder.num_samples))
    assert [row.tolist() for row in documents] == [row.tolist() for row in plain.documents(range(len(plain)))]
    samples = [Sample(0, index, 0, index, ids) for index, ids in enumerate(documents)]
    batch = TextCollator(folder.vocabulary, max_length=LENGTH)(samples)
    read = sorted(framed(batch.texts))
    assert all(row[-1] == 4 for row in read) and max(map(len, read)) == LENGTH
    assert read == sorted(tokenizer(texts, truncation=True, max_length=LENGTH).input_ids)
    assert read == sorted(evaluated(tokenizer, texts, max_length=LENGTH))
    bare = framed(TextCollator(plain.vocabulary, max_length=LENGTH)(samples).texts)
    assert sorted(bare) == sorted(evaluated(load_tokenizer(tmp_path / "qwen3"), texts, max_length=LENGTH)) != read


def test_the_same_command_goes_on_and_another_is_refused(
    made: dict[str, PreTrainedTokenizerFast], texts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made["llama3"].save_pretrained(tmp_path / "llama3")
    command = ["documents", str(corpus(tmp_path, texts)), "--tokenizer", str(tmp_path / "llama3"), "--processes", "1"]
    output = ["--output", str(tmp_path / "shards")]
    assert main([*command, *output, "--append-token", END]) == 0
    before = (tmp_path / "shards" / "manifest.json").read_bytes()
    (tmp_path / "shards" / "manifest.json").unlink()
    assert main([*command, *output, "--append-token", END]) == 0
    assert (tmp_path / "shards" / "manifest.json").read_bytes() == before
    assert "is already complete" not in capsys.readouterr().out
    assert main([*command, *output, "--append-token", END]) == 0
    assert "is already complete" in capsys.readouterr().out
    for other in ([], ["--append-token", "</s>"]):
        assert main([*command, *output, *other]) == 2
        assert "made with other append token, tokenizer" in capsys.readouterr().err
    for token, words in (
        ("<|none|>", "is not in the vocabulary of tokenizer"),
        ("the", "is an ordinary token, which texts hold too, of tokenizer"),
    ):
        assert main([*command, "--output", str(tmp_path / "other"), "--append-token", token]) == 2
        error = capsys.readouterr().err
        assert words in error and "append one of its special tokens, such as <unk>, <s>" in error
        assert not (tmp_path / "other").exists()


def test_manifests_of_today_have_no_new_entry(tiny_tokenizer_path: Path, texts: list[str], tmp_path: Path) -> None:
    folder = prepared("documents", corpus(tmp_path, texts), tiny_tokenizer_path, tmp_path / "shards")
    content = json.loads((tmp_path / "shards" / "manifest.json").read_text())
    assert list(content) == ["format", "kind", "columns", "tokenizer", "totals", "shards"]
    assert "append_token" not in json.loads((tmp_path / "shards" / "preparation.json").read_text())["options"]
    assert folder.manifest.frame is None and folder.vocabulary.frame_length == 2
    # A manifest that contradicts its tokenizer is refused.
    content["frame"] = {"before": ["[CLS]"], "after": []}
    (tmp_path / "shards" / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"records that texts become '\[CLS\] TEXT', and its tokenizer does otherwise"):
        _ = ShardFolder(tmp_path / "shards").vocabulary


def test_a_model_may_differ_in_the_appended_token_alone(
    made: dict[str, PreTrainedTokenizerFast], texts: list[str], tmp_path: Path
) -> None:
    source = corpus(tmp_path, texts)
    for name in ("qwen3", "qwen3-embedding", "llama3"):
        made[name].save_pretrained(tmp_path / name)
    plain, end = made["qwen3"], made["qwen3-embedding"]
    other = byte_level(texts[:30], processors.ByteLevel(trim_offsets=False))
    assert ids_fingerprint(plain) == ids_fingerprint(end) == ids_fingerprint(made["llama3"]) != ids_fingerprint(other)
    folder = prepared("documents", source, tmp_path / "qwen3", tmp_path / "end", "--append-token", END)
    folder.check_model_tokenizer(plain)
    folder.check_model_tokenizer(load_tokenizer(folder.tokenizer_path))
    folder.check_model_tokenizer(end)  # made by others, with the same frame
    assert folder.reads_alike(end) and not folder.reads_alike(plain)
    with pytest.raises(DataError, match="is not the one the shards in"):
        folder.check_tokenizer(plain)
    for tokenizer, words in (
        (other, "is not the one the shards in"),
        (made["llama3"], r"makes '<s> TEXT' of a text, and the shards in .* are for 'TEXT <\|endoftext\|>'"),
    ):
        with pytest.raises(DataError, match=words):
            folder.check_model_tokenizer(tokenizer)
    # Where nothing was appended on purpose, another frame is a mistake.
    for name, tokenizer in (("qwen3", end), ("qwen3-embedding", plain)):
        shards = prepared("documents", source, tmp_path / name, tmp_path / f"{name}-shards")
        shards.check_model_tokenizer(made[name])
        with pytest.raises(DataError, match=r"make the shards again with the model's own tokenizer \(--append-token"):
            shards.check_model_tokenizer(tokenizer)


def test_tuples_end_with_the_token_too(
    made: dict[str, PreTrainedTokenizerFast], texts: list[str], tmp_path: Path
) -> None:
    made["llama2"].save_pretrained(tmp_path / "llama2")
    rows = [{"query": a, "positive": b} for a, b in zip(texts[::2], texts[1::2])]
    source = tmp_path / "pairs.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = prepared("tuples", source, tmp_path / "llama2", tmp_path / "shards", "--append-token", "</s>")
    assert read_manifest(folder.path).frame == folder.manifest.frame  # type: ignore[arg-type]
    tokenizer = load_tokenizer(folder.tokenizer_path)
    collate = PairCollator(folder.vocabulary, query_max_length=7, passage_max_length=LENGTH, num_negatives=0, seed=0)
    samples = [Sample(0, index, 0, index, folder.tuple(index)) for index in range(folder.num_samples)]
    batch = collate(samples)
    for found, key, length in ((batch.queries, "query", 7), (batch.passages, "positive", LENGTH)):
        own = [row[key] for row in rows]
        assert sorted(framed(found)) == sorted(tokenizer(own, truncation=True, max_length=length).input_ids)
        assert torch.equal(found.tokens[found.offsets[:-1]], torch.full((len(own),), 1, dtype=torch.int32))
        assert torch.equal(found.tokens[found.offsets[1:] - 1], torch.full((len(own),), 2, dtype=torch.int32))

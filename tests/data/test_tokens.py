"""Vocabularies, word boundaries and fingerprints of tokenizers of every family we train."""

from __future__ import annotations

import io
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, BertTokenizerFast, PreTrainedTokenizerFast

from data.ground.errors import DataError
from data.tokens import (
    ids_beside_text,
    load_tokenizer,
    pad_id_of,
    prompt_ids,
    special_ids_of,
    tokenizer_fingerprint,
    used_ids,
    vocabulary_of,
)
from tests.data.frame_tokenizers import FRAMED


def words_of(tokenizer: PreTrainedTokenizerFast, text: str) -> list[str]:
    """Group a text's ids into words by the continuation flags alone."""
    continuation = vocabulary_of(tokenizer).continuation
    words: list[list[int]] = []
    for index in tokenizer(text, add_special_tokens=False).input_ids:
        if continuation[index] and words:
            words[-1].append(index)
        else:
            words.append([index])
    return [tokenizer.decode(word).strip() for word in words]


def byte_level_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    from tokenizers import decoders

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<s>", "</s>", "<pad>", "<mask>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    # No cls or sep token: both fall back to bos and eos.
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>", mask_token="<mask>"
    )


def sentencepiece_like_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    from tokenizers import decoders

    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=["<s>", "</s>", "<unk>", "<pad>"], show_progress=False)
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, cls_token="<s>", sep_token="</s>", unk_token="<unk>", pad_token="<pad>"
    )


def test_wordpiece_vocabulary(tiny_tokenizer):
    vocabulary = vocabulary_of(tiny_tokenizer)
    assert vocabulary.size == len(tiny_tokenizer) == len(vocabulary.continuation)
    ids = [vocabulary.pad_id, *vocabulary.before, *vocabulary.after, vocabulary.mask_id]
    assert tiny_tokenizer.convert_ids_to_tokens(ids) == ["[PAD]", "[CLS]", "[SEP]", "[MASK]"]
    assert vocabulary.special_ids == (0, 1, 2, 3, 4)
    for token, index in tiny_tokenizer.get_vocab().items():
        assert vocabulary.continuation[index] == token.startswith("##"), token
    assert 0 < vocabulary.continuation.sum() < vocabulary.size


def test_words_are_whole_in_every_tokenizer_family(tiny_tokenizer, docstrings):
    text = "return unquestionably interchangeable iterators"
    for tokenizer in (
        tiny_tokenizer,
        byte_level_tokenizer(docstrings[:300]),
        sentencepiece_like_tokenizer(docstrings[:300]),
    ):
        pieces = tokenizer(text, add_special_tokens=False).input_ids
        assert len(pieces) > len(text.split()), "the text must be cut into pieces, or nothing is shown"
        assert words_of(tokenizer, text) == text.split()


def test_the_frame_is_what_the_tokenizer_adds_not_what_it_names(docstrings):
    tokenizer = byte_level_tokenizer(docstrings[:50])
    assert tokenizer.bos_token_id is not None and tokenizer.eos_token_id is not None
    vocabulary = vocabulary_of(tokenizer)
    assert (vocabulary.before, vocabulary.after, vocabulary.frame_length) == ((), (), 0)
    assert tokenizer("text").input_ids == tokenizer("text", add_special_tokens=False).input_ids
    assert vocabulary_of(sentencepiece_like_tokenizer(docstrings[:50])).mask_id is None


def test_a_tokenizer_without_any_token_to_pad_with_is_refused(docstrings):
    backend = byte_level_tokenizer(docstrings[:50]).backend_tokenizer
    with pytest.raises(DataError, match="no padding token; add pad_token to its"):
        vocabulary_of(PreTrainedTokenizerFast(tokenizer_object=backend))
    assert vocabulary_of(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")).pad_id == 1


def test_a_tokenizer_without_a_padding_token_pads_with_the_one_that_ends_texts(docstrings, tmp_path):
    """As Llama 3. The ids of texts stay the same, and what is saved can be padded by other programs."""
    backend = FRAMED["llama3"][0](docstrings[:50]).backend_tokenizer
    PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>").save_pretrained(tmp_path)
    plain, tokenizer = AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)
    assert plain.pad_token is None and tokenizer.pad_token == "</s>"
    assert pad_id_of(plain) == pad_id_of(tokenizer) == vocabulary_of(plain).pad_id == tokenizer.eos_token_id
    assert tokenizer_fingerprint(plain) == tokenizer_fingerprint(tokenizer)
    assert plain(docstrings[:20]).input_ids == tokenizer(docstrings[:20]).input_ids
    tokenizer.save_pretrained(tmp_path / "saved")
    again = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert again.pad_token == "</s>" and tokenizer_fingerprint(again) == tokenizer_fingerprint(plain)


def test_added_tokens_count_and_start_words(tiny_tokenizer_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_tokenizer_path)
    before = vocabulary_of(tokenizer).size
    tokenizer.add_tokens(["##latte"])
    after = vocabulary_of(tokenizer)
    assert after.size == before + 1
    assert not after.continuation[tokenizer.convert_tokens_to_ids("##latte")]


def test_fingerprint_ignores_padding_and_truncation_but_not_the_vocabulary(tiny_tokenizer_path, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_tokenizer_path)
    fingerprint = tokenizer_fingerprint(tokenizer)
    raw = tokenizer.backend_tokenizer.to_str()
    tokenizer("a text", padding="max_length", truncation=True, max_length=9)
    assert tokenizer.backend_tokenizer.to_str() != raw, "the call must have changed the raw JSON, or nothing is shown"
    assert tokenizer_fingerprint(tokenizer) == fingerprint
    tokenizer.save_pretrained(tmp_path)
    assert tokenizer_fingerprint(load_tokenizer(tmp_path)) == fingerprint
    tokenizer.add_tokens(["latte"])
    assert tokenizer_fingerprint(tokenizer) != fingerprint


def test_bert_base_uncased(shared_data):
    tokenizer = BertTokenizerFast(vocab=str(shared_data / "vocab" / "bert-base-uncased-vocab.txt"))
    vocabulary = vocabulary_of(tokenizer)
    assert (vocabulary.size, vocabulary.pad_id, vocabulary.before) == (30522, 0, (101,))
    assert (vocabulary.after, vocabulary.mask_id, vocabulary.special_ids) == ((102,), 103, (0, 100, 101, 102, 103))
    assert words_of(tokenizer, "embeddings of baristas") == ["embeddings", "of", "baristas"]
    assert int(vocabulary.continuation.sum()) == sum(token.startswith("##") for token in tokenizer.get_vocab()) - sum(
        token == "##" for token in tokenizer.get_vocab()
    )


def test_ids_of_bert_that_texts_consist_of(shared_data):
    """All but the special tokens and the 994 places that it keeps free; "!" is the first of them after [UNK]."""
    tokenizer = BertTokenizerFast(vocab=str(shared_data / "vocab" / "bert-base-uncased-vocab.txt"))
    assert special_ids_of(tokenizer) == (0, 100, 101, 102, 103) and ids_beside_text(tokenizer) == (0, 101, 102, 103)
    used = used_ids(tokenizer)
    assert used[:3] == (100, 999, 1000) and len(used) == 30522 - 4 - 994
    assert tokenizer.convert_ids_to_tokens([98, 99, 104, 998, 999]) == [
        *("[unused97]", "[unused98]", "[unused99]", "[unused993]", "!")
    ]


def test_ids_of_byte_level_bpe_that_texts_consist_of(docstrings):
    """It knows every text. The name of the unknown token may be that of another one, as in GPT-2."""
    backend = byte_level_tokenizer(docstrings[:50]).backend_tokenizer
    roles = {"bos_token": "<s>", "eos_token": "<s>", "unk_token": "<s>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **roles)
    size = len(tokenizer)
    # Special tokens without a role: "</s>", "<pad>" and "<mask>" have none here.
    assert special_ids_of(tokenizer) == ids_beside_text(tokenizer) == (0, 1, 2, 3)
    assert used_ids(tokenizer) == tuple(range(4, size))
    tokenizer.add_tokens(["<unused0>", "[unused12]", "[unused]"])
    assert used_ids(tokenizer) == (*range(4, size), size + 2)
    assert vocabulary_of(tokenizer).special_ids == (0, 1, 2, 3)
    # An unknown token with no other role stands for a part of a text.
    named = sentencepiece_like_tokenizer(docstrings[:50])
    assert named.unk_token_id == 2 and special_ids_of(named) == (0, 1, 2, 3) and ids_beside_text(named) == (0, 1, 3)


@pytest.fixture(scope="module")
def beginnings(docstrings: list[str]) -> list[str]:
    """Where a prompt and a text meet, the rest of the text has no part."""
    return [text[:80] for text in docstrings]


def ids(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False).input_ids


def agreement(tokenizer: PreTrainedTokenizerFast, prompt: str, texts: list[str]) -> float:
    """Share of texts for which prompt and text tokenized apart are what they are tokenized together."""
    before = prompt_ids(tokenizer, prompt).tolist()
    apart = tokenizer(texts, add_special_tokens=False).input_ids
    together = tokenizer([prompt + text for text in texts], add_special_tokens=False).input_ids
    return float(np.mean([before + own == joined for own, joined in zip(apart, together, strict=True)]))


def test_prompts_agree_with_the_joined_text_in_wordpiece(tiny_tokenizer, beginnings):
    for prompt in ("query: ", "query:", "Represent this sentence for searching: ", "[a] ", "", " "):
        assert agreement(tiny_tokenizer, prompt, beginnings) == 1.0
    assert prompt_ids(tiny_tokenizer, "query: ").tolist() == ids(tiny_tokenizer, "query:")
    assert prompt_ids(tiny_tokenizer, "").tolist() == []
    with pytest.raises(DataError, match=r"prompt 'query' runs into the first word .* end it in ': '"):
        prompt_ids(tiny_tokenizer, "query")


def test_prompts_agree_with_the_joined_text_in_byte_level_bpe(docstrings, beginnings):
    tokenizer = byte_level_tokenizer(docstrings[:300])
    assert agreement(tokenizer, "query:\n", beginnings) == 1.0
    lettered = [text for text in beginnings if text[0].isalnum()]
    signed = [text for text in beginnings if not text[0].isalnum()]
    assert len(lettered) > 2000 and len(signed) > 10
    assert agreement(tokenizer, "query:", lettered) == 1.0
    # What does not agree: a space at the end belongs to the next word, and signs run together with signs.
    assert ids(tokenizer, "query: ") + ids(tokenizer, "what") != ids(tokenizer, "query: what")
    for prompt in ("query: ", "th", "a b "):
        with pytest.raises(DataError, match="runs into the first word"):
            prompt_ids(tokenizer, prompt)
    merging = byte_level_tokenizer([*docstrings[:300], *["see:(( and:(("] * 500])
    assert agreement(merging, "query:", ["((nested) text"]) == 0.0
    assert agreement(merging, "query:\n", ["((nested) text"]) == 1.0


def test_prompts_agree_where_texts_begin_with_a_space_of_their_own(docstrings, beginnings):
    backend = byte_level_tokenizer(docstrings[:300]).backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    prefixing = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    for tokenizer in (prefixing, sentencepiece_like_tokenizer(docstrings[:300])):
        lettered = [text for text in beginnings if text[0].isalnum()]
        assert agreement(tokenizer, "query: ", lettered) == 1.0
        with pytest.raises(DataError, match="runs into the first word"):
            prompt_ids(tokenizer, "query:")


@pytest.mark.parametrize("name", ["./absent", "/absent/folder", "a/b/c", Path("absent")])
def test_a_missing_folder_is_one_sentence(name):
    with pytest.raises(DataError, match="does not exist"):
        load_tokenizer(name)


def test_other_bad_names_are_one_sentence(tmp_path, tiny_tokenizer_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text("{")
    (tmp_path / "broken" / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    for name, words in (
        ("no-such-tokenizer-on-the-hub", "network"),
        (tmp_path / "empty", "tokenizer.json"),
        (tmp_path / "broken", "save it again"),
        (tiny_tokenizer_path / "tokenizer.json", "is a file"),
    ):
        with pytest.raises(DataError, match=words) as caught:
            load_tokenizer(name)
        assert "\n" not in str(caught.value)


def test_vocabulary_arrays_are_read_only(tiny_tokenizer):
    with pytest.raises(ValueError, match="read-only"):
        vocabulary_of(tiny_tokenizer).continuation[0] = np.True_


CODE = """
import io
import json
import os
import shutil
from pathlib import Path
from transformers import BertTokenizerFast

Path(__file__).with_name("ran").touch()


class Own(BertTokenizerFast):
    pass
"""


@pytest.mark.parametrize("settings", [{"tokenizer_class": "Own"}, {"tokenizer_class": "OwnFast"}, {}])
def test_code_of_a_folder_is_never_run(tiny_tokenizer_path, tmp_path, monkeypatch, settings):
    """Not even where somebody, or `yes`, would say so on the terminal."""
    folder = shutil.copytree(tiny_tokenizer_path, tmp_path / "own")
    (folder / "own.py").write_text(CODE)
    path = folder / "tokenizer_config.json"
    own = {"AutoTokenizer": ["own.Own", "own.Own"]}
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings, "auto_map": own}))
    monkeypatch.setattr("builtins.input", lambda *args: "y")
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    try:
        load_tokenizer(folder)
    except DataError as error:
        assert "asks for code of its own (auto_map" in str(error)
    else:
        assert not settings, "a class of transformers' own needs no code of the folder's"
    assert not list(tmp_path.rglob("ran"))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", b'{"cut'),
        ("tokenizer.json", b"\xff\xfe\x00"),
        ("tokenizer.json", b"[" * 100_000),
        ("tokenizer_config.json", b"[]"),
        ("tokenizer_config.json", b"[" * 100_000),
        ("tokenizer_config.json", b"\xff"),
    ],
)
def test_damaged_tokenizers_are_one_sentence(tiny_tokenizer_path, tmp_path, name, content):
    folder = shutil.copytree(tiny_tokenizer_path, tmp_path / "damaged")
    (folder / name).write_bytes(content)
    with pytest.raises(DataError, match=r"tokenizer folder .*damaged cannot be read .*save it again") as caught:
        load_tokenizer(folder)
    assert "\n" not in str(caught.value)


def test_a_pipe_in_a_tokenizer_folder_is_refused(tiny_tokenizer_path, tmp_path):
    folder = shutil.copytree(tiny_tokenizer_path, tmp_path / "pipe")
    (folder / "tokenizer_config.json").unlink()
    os.mkfifo(folder / "tokenizer_config.json")
    with pytest.raises(DataError, match=r"tokenizer_config\.json is no regular file"):
        load_tokenizer(folder)


def test_ids_beyond_all_tables_are_refused(tiny_tokenizer_path, tmp_path):
    folder = shutil.copytree(tiny_tokenizer_path, tmp_path / "large")
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"]["zz"] = 2**31
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match="has the id 2147483648"):
        vocabulary_of(load_tokenizer(folder))

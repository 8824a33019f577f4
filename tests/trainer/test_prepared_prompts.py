"""Prompts that are prepared with the texts: any prompt, read as evaluation reads it, and known to the run."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from data.collate import PairBatch
from data.ground.errors import ConfigError, DataError
from data.prepare import main
from data.shards.reader import ShardFolder
from data.tokens import load_tokenizer, prompt_ids, prompt_length
from models.encoder import build_masked_lm
from tests.data.frame_tokenizers import FRAMED
from tests.data.test_frames import evaluated, framed
from tests.trainer.support import MODEL, recipe_of, recipe_values
from trainer.build import build_model, open_shards, open_stream
from trainer.exporting.folders import _write_modules
from trainer.exporting.model_folder import embedding_settings
from trainer.objectives.prompts import folder_prompts

INSTRUCT = "Instruct: Given a title, find its text\nQuery: "
QUERY_LENGTH, PASSAGE_LENGTH = 40, 24
NAMES = ["bert", "qwen3-embedding", "llama3", "llama2", "t5"]


@pytest.fixture(scope="module")
def rows(docstrings: list[str]) -> list[dict[str, str]]:
    return [{"query": a, "positive": b} for a, b in zip(docstrings[:80:2], docstrings[1:80:2])]


@pytest.fixture(scope="module")
def tokenizers(
    tmp_path_factory: pytest.TempPathFactory, docstrings: list[str], tiny_tokenizer_path: Path
) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("tokenizers")
    for name in set(NAMES) - {"bert"}:
        FRAMED[name][0]([*docstrings[:150], INSTRUCT, "passage: "]).save_pretrained(folder / name)
    return {name: folder / name for name in NAMES} | {"bert": tiny_tokenizer_path}


def prepared(
    folder: Path,
    rows: list[dict[str, str]],
    tokenizer: Path,
    query: str = "",
    passage: str = "",
    *,
    options: Sequence[str] = (),
) -> Path:
    folder.mkdir()
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = ["--query-prompt", query, "--passage-prompt", passage]
    fixed = ["--output", str(folder / "shards"), "--tokenizer", str(tokenizer), "--processes", "1"]
    assert main(["tuples", str(folder / "pairs.jsonl"), *fixed, *prompts, *options]) == 0
    return folder / "shards"


def recipe_for(folders: list[Path], *, model: Mapping[str, Any] | None = None, **prompts: list[str]) -> Any:
    lengths = {"query_max_length": QUERY_LENGTH, "passage_max_length": PASSAGE_LENGTH}
    data = {"shards": [str(folder) for folder in folders], "shuffle": False, **lengths, **prompts}
    return recipe_of(recipe_values("", data=data, train={"global_batch_size": 40 * len(folders)}, model=model or {}))


def batch_of(folders: list[Path], **prompts: list[str]) -> PairBatch:
    recipe = recipe_for(folders, **prompts)
    return next(open_stream(recipe, open_shards(recipe), rank=0, world_size=1))


def joined(tokenizer: PreTrainedTokenizerFast, prompt: str, texts: list[str], length: int) -> list[list[int]]:
    return sorted(tokenizer([prompt + text for text in texts], truncation=True, max_length=length).input_ids)


@pytest.mark.parametrize("name", NAMES)
def test_training_reads_prompt_and_text_as_one(
    name: str, tokenizers: dict[str, Path], rows: list[dict[str, str]], tmp_path: Path
) -> None:
    shards = prepared(tmp_path / "prompted", rows, tokenizers[name], INSTRUCT, "passage: ")
    tokenizer = load_tokenizer(tokenizers[name])
    batch = batch_of([shards])
    for found, prompt in ((batch.queries, INSTRUCT), (batch.passages, "passage: ")):
        assert found.prompt_lengths is not None
        assert set(found.prompt_lengths.tolist()) == {prompt_length(tokenizer, prompt)}
    for found, key, prompt, length in (
        (batch.queries, "query", INSTRUCT, QUERY_LENGTH),
        (batch.passages, "positive", "passage: ", PASSAGE_LENGTH),
    ):
        texts = [row[key] for row in rows]
        read = sorted(framed(found))
        assert read == joined(tokenizer, prompt, texts, length)
        assert read == sorted(evaluated(tokenizer, [prompt + text for text in texts], max_length=length))
        # Negative control: without the prompt they are other texts.
        assert read != joined(tokenizer, "", texts, length)
    bare = prepared(tmp_path / "bare", rows, tokenizers[name])
    if name in ("qwen3-embedding", "llama3"):
        # Put before ids that were tokenized without it, the same prompt is refused.
        with pytest.raises(ConfigError, match=r"data\.query_prompts: prompt 'Instruct: .* runs into the first word"):
            batch_of([bare], query_prompts=[INSTRUCT])
        with pytest.raises(DataError, match="runs into the first word"):
            prompt_ids(tokenizer, INSTRUCT)
    elif name == "bert":
        assert sorted(framed(batch_of([bare], query_prompts=[INSTRUCT]).queries)) == sorted(framed(batch.queries))


def test_the_manifest_and_the_settings_name_the_prompts(
    tokenizers: dict[str, Path], rows: list[dict[str, str]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = tokenizers["qwen3-embedding"]
    one = prepared(tmp_path / "one", rows, tokenizer, INSTRUCT)
    other = prepared(tmp_path / "other", rows[:20], tokenizer, INSTRUCT, "Text:\n")
    bare = prepared(tmp_path / "bare", rows[:10], tokenizer)
    written = json.loads((one / "manifest.json").read_text())
    assert written["prompts"] == {"query": INSTRUCT, "passage": ""}
    assert "prompts" not in json.loads((bare / "manifest.json").read_text())
    assert ShardFolder(other).manifest.prompts.passage == "Text:\n"
    for folders, prompts, queries, passages in (
        ([one], {}, [INSTRUCT], [""]),
        ([other], {}, [INSTRUCT], ["Text:\n"]),
        ([bare], {}, [""], [""]),
        ([one], {"passage_prompts": ["Text:\n"]}, [INSTRUCT], ["Text:\n"]),
        ([one, other], {}, [INSTRUCT] * 2, ["", "Text:\n"]),
        ([one, other], {"passage_prompts": ["Text:\n", ""]}, [INSTRUCT] * 2, ["Text:\n"] * 2),
        ([bare, one], {"query_prompts": ["q:\n", ""]}, ["q:\n", INSTRUCT], ["", ""]),
    ):
        recipe = recipe_for(folders, **prompts)  # type: ignore[arg-type]
        sources = open_shards(recipe)
        assert folder_prompts(recipe, sources) == (queries, passages)
        settings = embedding_settings(recipe, sources)
        common = [each[0] if len(set(each)) == 1 else "" for each in (queries, passages)]
        assert [settings.query_prompt, settings.passage_prompt] == common
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            open_stream(recipe, sources, rank=0, world_size=1)
        assert len(caplog.messages) == (len(set(queries)) > 1 or len(set(passages)) > 1)


@pytest.mark.parametrize(
    "prompts",
    [
        {"query_prompts": [INSTRUCT]},
        {"query_prompts": ["q:\n", "q:\n"]},
        {"query_prompts": ["q:\n", ""], "passage_prompts": ["p:\n"]},
    ],
)
def test_a_second_prompt_is_refused(
    tokenizers: dict[str, Path], rows: list[dict[str, str]], tmp_path: Path, prompts: dict[str, list[str]]
) -> None:
    tokenizer = tokenizers["qwen3-embedding"]
    bare = prepared(tmp_path / "bare", rows[:10], tokenizer)
    one = prepared(tmp_path / "one", rows, tokenizer, INSTRUCT, "Text:\n")
    recipe = recipe_for([bare, one], **prompts)
    with pytest.raises(
        ConfigError, match=r"data\.\w+_prompts names .* whose texts have the prompt .* already"
    ) as caught:
        open_stream(recipe, open_shards(recipe), rank=0, world_size=1)
    assert "\n" not in str(caught.value) and str(one) in str(caught.value)


def test_exports_have_the_shards_prompts(
    tokenizers: dict[str, Path], rows: list[dict[str, str]], tmp_path: Path
) -> None:
    shards = prepared(tmp_path / "one", rows, tokenizers["llama3"], INSTRUCT, "Text:\n")
    recipe = recipe_for([shards])
    settings = embedding_settings(recipe, open_shards(recipe))
    assert dataclasses.replace(settings, query_prompt="", passage_prompt="") != settings
    settings.save(tmp_path)
    (tmp_path / "export").mkdir()
    _write_modules(tmp_path / "export", {"": "Transformer"}, type(settings).load(tmp_path))  # type: ignore[arg-type]
    written = json.loads((tmp_path / "export" / "config_sentence_transformers.json").read_text())
    assert written["prompts"] == {"query": INSTRUCT, "document": "Text:\n"}


def test_a_model_is_trained_with_a_token_that_its_own_tokenizer_lacks(
    docstrings: list[str], rows: list[dict[str, str]], tmp_path: Path
) -> None:
    plain, other = FRAMED["modernbert"][0](docstrings[:60]), FRAMED["modernbert"][0](docstrings[60:90])
    config = {**MODEL, "num_hidden_layers": 3}
    torch.manual_seed(0)
    build_masked_lm(config, vocab_size=len(plain), pad_token_id=3).save_pretrained(tmp_path / "model")
    plain.save_pretrained(tmp_path / "model")
    end = ["--append-token", "<|endoftext|>"]
    shards = prepared(tmp_path / "ended", rows, tmp_path / "model", "query: ", options=end)
    recipe = recipe_for([shards], model={"source": str(tmp_path / "model"), "config": {}})
    sources = open_shards(recipe)
    parts = build_model(recipe, sources)
    texts = ["query: " + row["query"] for row in rows]
    batch = next(open_stream(recipe, sources, rank=0, world_size=1))
    read = sorted(framed(batch.queries))
    assert read == sorted(evaluated(parts.tokenizer, texts, max_length=QUERY_LENGTH))
    assert {row[-1] for row in read} == {4} and {row[0] for row in read} == {1}
    assert read != sorted(evaluated(load_tokenizer(tmp_path / "model"), texts, max_length=QUERY_LENGTH))
    other.save_pretrained(tmp_path / "other")
    for name, options in (("of_others", end), ("of_others_without", [])):
        shards = prepared(tmp_path / name, rows, tmp_path / "other", options=options)
        recipe = recipe_for([shards], model={"source": str(tmp_path / "model"), "config": {}})
        with pytest.raises(DataError, match="is not the one the shards in"):
            build_model(recipe, open_shards(recipe))

"""Prompts: what training reads is what evaluation reads, and the settings beside a model say which prompt that was."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from data.collate import PairBatch
from data.shards.writer import SplitWriter, finish_folder
from models.sizes import Size
from tests.trainer.support import recipe_of, recipe_values
from trainer.build import open_shards, open_stream
from trainer.distributed import World
from trainer.evaluation.encoding.encode import Embedder, encode
from trainer.exporting.model_folder import embedding_settings

QUERY_LENGTH, PASSAGE_LENGTH = 18, 28
PROMPTS = {"query_prompts": ["query: ", "find the text for this title: "], "passage_prompts": ["passage: "]}


@pytest.fixture(scope="module")
def texts(docstrings: list[str]) -> list[str]:
    return docstrings[:160]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Any, texts: list[str]) -> list[Path]:
    """Two folders of pairs: text i and text i + 1, the first half and the second."""
    found = []
    for start in (0, 80):
        folder = tmp_path_factory.mktemp("pairs")
        with SplitWriter(folder, 0, kind="tuples", vocabulary_size=len(tiny_tokenizer)) as writer:
            for index in range(start, start + 80, 2):
                ids = tiny_tokenizer(texts[index : index + 2], add_special_tokens=False).input_ids
                writer.add_tuple(ids[0], ids[1:])
        finish_folder(folder, 1, tokenizer=tiny_tokenizer)
        found.append(folder)
    return found


def data_of(folders: list[Path], **options: Any) -> dict[str, Any]:
    lengths = {"query_max_length": QUERY_LENGTH, "passage_max_length": PASSAGE_LENGTH}
    return {"shards": [str(folder) for folder in folders], **lengths, **options}


def batch_of(folders: list[Path], **options: Any) -> PairBatch:
    """One batch of every pair, in the order on disk."""
    values = recipe_values("", data=data_of(folders, shuffle=False, **options), train={"global_batch_size": 80})
    recipe = recipe_of(values)
    return next(open_stream(recipe, open_shards(recipe), rank=0, world_size=1))


def as_evaluation_reads(tokenizer: Any, prompts: list[str], texts: list[str], max_length: int) -> list[list[int]]:
    found: list[list[int]] = []

    def forward(input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor]:
        assert attention_mask.all()
        found.extend(input_ids.tolist())
        return (torch.zeros(len(input_ids), 1),)

    embedder = Embedder(forward, tokenizer, [Size(1, 1)], World.alone())
    for prompt, text in zip(prompts, texts, strict=True):
        encode(embedder, [text], similarity="dot", max_length=max_length, prompt=prompt)
    return found


def read(batch: Any) -> list[list[int]]:
    return [ids.tolist() for ids in torch.tensor_split(batch.tokens, batch.offsets[1:-1])]


def test_training_reads_what_evaluation_reads(folders: list[Path], texts: list[str], tiny_tokenizer: Any) -> None:
    batch = batch_of(folders, **PROMPTS)
    # The mixture takes one of each folder in turn.
    pairs = [index for k in range(0, 80, 2) for index in (k, 80 + k)]
    assert [number % 2**40 for number in batch.sample_ids.tolist()] == [k for k in range(40) for _ in range(2)]
    queries = as_evaluation_reads(
        tiny_tokenizer, PROMPTS["query_prompts"] * 40, [texts[i] for i in pairs], QUERY_LENGTH
    )
    passages = as_evaluation_reads(tiny_tokenizer, ["passage: "] * 80, [texts[i + 1] for i in pairs], PASSAGE_LENGTH)
    assert read(batch.queries) == queries
    assert read(batch.passages) == passages
    # Negative control: the folders the other way round are other queries.
    turned = batch_of(folders, **{**PROMPTS, "query_prompts": PROMPTS["query_prompts"][::-1]})
    assert read(turned.queries) != queries and read(turned.passages) == passages


def test_prompts_change_no_hash_of_a_text_that_fits(folders: list[Path], tiny_tokenizer: Any) -> None:
    bare, prompted = batch_of(folders), batch_of(folders, **PROMPTS)
    prompt_length = len(tiny_tokenizer("passage:", add_special_tokens=False).input_ids)
    short = bare.passages.lengths + prompt_length <= PASSAGE_LENGTH
    assert 0 < int(short.sum()) < 80
    same = bare.passage_hashes == prompted.passage_hashes
    assert same.tolist() == short.tolist(), "a text that the prompt shortens is another text"
    assert prompted.known_hashes.tolist() == prompted.passage_hashes.tolist()


def test_settings_record_a_prompt_that_all_folders_share(folders: list[Path], caplog: pytest.LogCaptureFixture) -> None:
    for prompts, recorded in (
        ([], ""),
        (["a: "], "a: "),
        (["a: ", "a: "], "a: "),
        (["a: ", "b: "], ""),
        (["a: ", ""], ""),
    ):
        data = data_of(folders, query_prompts=prompts, passage_prompts=["passage: "])
        recipe = recipe_of(recipe_values("", data=data))
        sources = open_shards(recipe)
        settings = embedding_settings(recipe, sources)
        assert (settings.query_prompt, settings.passage_prompt) == (recorded, "passage: ")
        with caplog.at_level(logging.WARNING):
            caplog.clear()
            for rank in range(2):
                open_stream(recipe, sources, rank=rank, world_size=2)
        assert len(caplog.messages) == (len(set(prompts)) > 1)


def test_epochs_end_with_what_remains(folders: list[Path]) -> None:
    for epochs, total, steps in ((1.0, 80, 7), (2.5, 200, 17), (0.001, 1, 1)):
        recipe = recipe_of(recipe_values("", data=data_of(folders), train={"steps": 0, "epochs": epochs}))
        stream = open_stream(recipe, open_shards(recipe), rank=1, world_size=5)
        assert (stream.total_samples, stream.num_steps) == (total, steps)
        shares = [batch.num_samples for batch in stream]
        assert len(shares) == steps and shares[-1] == {80: 2, 200: 2, 1: 0}[total]
        assert stream.samples == total
    endless = recipe_of(recipe_values("", data=data_of(folders), train={"steps": 9, "epochs": 1.0}))
    assert open_stream(endless, open_shards(endless), rank=0, world_size=1).total_samples is None

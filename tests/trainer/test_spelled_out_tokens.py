"""Texts that spell out special tokens for which the model has no row: read as ordinary text, wherever they are read."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from data.ground.errors import ConfigError, DataError
from data.masking import MaskingTables
from data.prepare import main as prepare
from data.tokens import SpelledOut, load_tokenizer, vocabulary_of
from models.encoder import Encoder, build_masked_lm
from models.settings import EmbeddingSettings
from models.sizes import Size
from models.static_embedding import StaticConfig, StaticModel
from tests.trainer.support import LADDER, MODEL, loaded, recipe_values
from trainer import mine_negatives, teacher_vectors
from trainer.build import build_model, open_shards, open_stream
from trainer.config.load import as_toml
from trainer.evaluation.encoding.encode import Embedder, embedder_of, encoder_forward
from trainer.evaluation.latency import measure_costs
from trainer.evaluation.subject import load_model
from trainer.resizing.neurons import sort_neurons

IMAGE, AUDIO = "<image>", "<audio>"
TEXTS = [
    f"what does {IMAGE} mean",
    "what does audio mean",
    IMAGE,
    f"{AUDIO}{IMAGE} return the value of the {IMAGE} " * 20,
    "the value that is returned",
    "a list of integers",
]
FULL = Size(3, 48)
LENGTHS = {"query_max_length": 16, "passage_max_length": 32}


@dataclass(frozen=True)
class Setting:
    model: Path
    documents: Path
    tuples: Path
    file: Path  # of the tuples
    plain: PreTrainedTokenizerFast  # the tokenizer without the two tokens


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: PreTrainedTokenizerFast) -> Setting:
    root = tmp_path_factory.mktemp("spelled_out")
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE]})
    tokenizer.add_tokens([AddedToken(AUDIO, special=True)])  # special, but no role names it
    torch.manual_seed(3)
    build_masked_lm(MODEL, vocab_size=len(tiny_tokenizer), pad_token_id=0).save_pretrained(root / "model")
    tokenizer.save_pretrained(root / "model")
    EmbeddingSettings("mean", ladder=tuple((n, d) for n, d in LADDER), **LENGTHS).save(root / "model")
    lines = {
        "documents": [{"text": text} for text in TEXTS * 2],
        "tuples": [
            {"query": text, "positives": [text, "a value"], "negatives": [f"no {AUDIO}"] * 3} for text in TEXTS * 2
        ],
    }
    for kind, rows in lines.items():
        (root / f"{kind}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        inputs = [str(root / f"{kind}.jsonl"), "--tokenizer", str(root / "model")]
        assert prepare([kind, *inputs, "--output", str(root / kind), "--processes", "1"]) == 0
    return Setting(root / "model", root / "documents", root / "tuples", root / "tuples.jsonl", tiny_tokenizer)


def values_of(setting: Setting, kind: str, **sections: Any) -> dict[str, dict[str, Any]]:
    values = recipe_values(setting.documents if kind == "documents" else setting.tuples, **sections)
    values["model"] = {"source": str(setting.model), "pooling": "mean", "ladder": LADDER, **sections.get("model", {})}
    return values


def ids_of(plain: PreTrainedTokenizerFast, text: str, length: int) -> list[int]:
    return plain(text, truncation=True, max_length=length)["input_ids"]


def rows_of(tokens: torch.Tensor, offsets: torch.Tensor) -> list[list[int]]:
    return [tokens[a:b].tolist() for a, b in zip(offsets.tolist(), offsets.tolist()[1:])]


def embedder(encoder: Encoder, tokenizer: PreTrainedTokenizerFast) -> Embedder:
    return embedder_of(encoder, tokenizer, [FULL], device="cpu")


def test_shards_hold_the_tokens_ids(setting: Setting) -> None:
    """So a model that has rows for the tokens reads the same shards. Without such ids, the other tests show nothing."""
    recipe = loaded(values_of(setting, "tuples"), setting.model)
    (source,) = open_shards(recipe)
    held = np.concatenate([sample.query for sample in source.tuples(range(len(source)))])
    assert set(held[held >= len(setting.plain)].tolist()) == {len(setting.plain), len(setting.plain) + 1}


def test_pairs_are_read_as_in_evaluation(setting: Setting, tmp_path: Path) -> None:
    recipe = loaded(values_of(setting, "tuples"), tmp_path)
    sources = open_shards(recipe)
    stream = open_stream(recipe, sources, rank=0, world_size=1)
    parts = build_model(recipe, sources)
    batch = next(stream)
    queries = rows_of(batch.queries.tokens, batch.queries.offsets)
    assert sorted(queries) == sorted(ids_of(setting.plain, text, 16) for text in TEXTS * 2)
    assert int(torch.cat([batch.queries.tokens, batch.passages.tokens]).max()) < len(setting.plain)
    assert max(map(len, queries)) == 16 and int(batch.passages.lengths.max()) <= 32
    encoder, tokenizer, _ = load_model(setting.model)
    vectors = embedder(encoder, tokenizer)(TEXTS, similarity="dot", max_length=16)[FULL]
    parts.encoder.eval()
    with torch.no_grad():
        (found,) = parts.encoder(batch.queries.tokens, None, (FULL,), offsets=batch.queries.offsets)
    wanted = {tuple(ids_of(setting.plain, text, 16)): vector for text, vector in zip(TEXTS, vectors)}
    np.testing.assert_allclose(found.numpy(), [wanted[tuple(row)] for row in queries], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("objective", [{}, {"pairs": "spans"}, {"decoder": True}], ids=str)
def test_masked_texts_have_rows(objective: dict[str, Any], setting: Setting, tmp_path: Path) -> None:
    """The masks' labels and random replacements, too; the head's first bias counts the tokens that have a row."""
    values = values_of(setting, "documents", objective={"name": "masked", **objective})
    recipe = loaded(values, tmp_path)
    sources = open_shards(recipe)
    stream = open_stream(recipe, sources, rank=0, world_size=1)
    build_model(recipe, sources)
    for _ in range(recipe.train.steps):
        batch = next(stream)
        for ids in (batch.encoder_input_ids, batch.encoder_labels, batch.decoder_input_ids, batch.decoder_labels):
            assert ids is None or int(ids.max()) < len(setting.plain)
        assert int(batch.offsets.diff().max()) <= 32


def test_no_special_token_is_a_random_replacement(setting: Setting) -> None:
    vocabulary = vocabulary_of(load_tokenizer(setting.model))
    replacements = set(MaskingTables.of(vocabulary).replacements.tolist())
    assert replacements == set(range(5, len(setting.plain)))


@pytest.mark.parametrize("flat", [False, True], ids=["encoder", "static"])
@pytest.mark.parametrize("max_length", [8, 48])
def test_evaluation_reads_the_spelling(flat: bool, max_length: int, setting: Setting) -> None:
    encoder, tokenizer, _ = load_model(setting.model)
    if flat:
        torch.manual_seed(1)
        encoder = Encoder(StaticModel(StaticConfig(len(setting.plain), 48, special_ids=[0, 2, 3, 4])), "mean")
    size = Size(1, 48) if flat else FULL
    found = embedder_of(encoder, tokenizer, [size], device="cpu")(TEXTS, similarity="dot", max_length=max_length)[size]
    plain = embedder_of(encoder, setting.plain, [size], device="cpu")
    np.testing.assert_allclose(found, plain(TEXTS, similarity="dot", max_length=max_length)[size], atol=1e-6)
    # Without the rows of the table, the ids are looked up where there is nothing.
    blind = Embedder(encoder_forward(encoder, [size]), tokenizer, [size], plain.world, flat=flat)
    with pytest.raises((IndexError, RuntimeError)):
        blind(TEXTS, similarity="dot", max_length=max_length)


def test_a_model_with_rows_reads_the_tokens(setting: Setting) -> None:
    tokenizer = load_tokenizer(setting.model)
    assert SpelledOut.of(tokenizer, len(tokenizer)) is None
    (missing,) = SpelledOut.of(tokenizer, len(tokenizer) - 1).ids  # type: ignore[union-attr]
    assert missing == len(tokenizer) - 1 == tokenizer.convert_tokens_to_ids(AUDIO)


def test_a_token_whose_spelling_has_no_ordinary_ids_is_refused(setting: Setting) -> None:
    tokenizer = load_tokenizer(setting.model)
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE, "\N{SOFT HYPHEN}"]})
    with pytest.raises(DataError, match=r"has the special token '\\xad', for which the model's 2000 token embeddings"):
        SpelledOut.of(tokenizer, 2000)


def test_a_missing_guide_is_named_by_its_key(setting: Setting, tmp_path: Path) -> None:
    values = values_of(setting, "tuples", objective={"filter_false_negatives": True, "filter_by": "guide"})
    recipe = loaded(values | {"guide": {"model": str(tmp_path / "absent")}}, tmp_path)
    with pytest.raises(ConfigError, match=r"^guide\.model = '.*absent': "):
        open_stream(recipe, open_shards(recipe), rank=0, world_size=1)


def test_a_prompt_with_such_a_token_is_refused(setting: Setting, tmp_path: Path) -> None:
    data = {"query_prompts": [f"{IMAGE} query: "]}
    recipe = loaded(values_of(setting, "tuples", data=data), tmp_path)
    with pytest.raises(ConfigError, match=r"^data\.query_prompts: prompt '<image> query: ' has the special token '<im"):
        open_stream(recipe, open_shards(recipe), rank=0, world_size=1)
    encoder, tokenizer, _ = load_model(setting.model)
    with pytest.raises(DataError, match="has the special token '<image>'"):
        embedder(encoder, tokenizer)(["text"], similarity="dot", max_length=16, prompt=f"{IMAGE} query: ")


def test_commands_read_such_texts(setting: Setting, tmp_path: Path) -> None:
    """Mining, the times of a query, the numbering of neurons, and the vectors of a stored teacher."""
    out = tmp_path / "mined"
    mine_negatives.main([str(setting.file), "--model", str(setting.model), "--output", str(out)])
    assert (out / "tuples.jsonl").exists()
    encoder, tokenizer, settings = load_model(setting.model)
    assert settings is not None
    assert measure_costs(encoder, tokenizer, [FULL], settings, TEXTS)[FULL].milliseconds > 0
    sort_neurons(encoder, tokenizer, TEXTS, settings, device=torch.device("cpu"))


def stored(setting: Setting, folder: Path) -> dict[str, dict[str, Any]]:
    teacher = {"vectors": "stored", "model": str(setting.model), "store": str(folder / "store")}
    return values_of(setting, "tuples", teacher=teacher)


def test_stored_vectors_are_found(setting: Setting, tmp_path: Path) -> None:
    """They are stored under the ids that shards hold, and computed from those that the model reads."""
    recipe_file = tmp_path / "recipe.toml"
    recipe = loaded(stored(setting, tmp_path), tmp_path)
    recipe_file.write_text(as_toml(recipe))
    teacher_vectors.main(["--config", str(recipe_file), "--texts", str(setting.file)])
    sources = open_shards(recipe)
    stream = open_stream(recipe, sources, rank=0, world_size=1)
    teacher = build_model(recipe, sources).teacher
    assert teacher is not None
    batch = next(stream)
    found, _ = teacher.store.find_pairs(batch)  # type: ignore[union-attr]
    encoder, _, _ = load_model(setting.model)
    with torch.no_grad():
        (wanted,) = encoder.eval()(batch.queries.tokens, None, (FULL,), offsets=batch.queries.offsets)
    wanted = torch.nn.functional.normalize(wanted, dim=1)
    torch.testing.assert_close(found.float(), wanted, rtol=2e-3, atol=1e-3)

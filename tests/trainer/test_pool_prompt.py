"""model.pool_prompt = false from the recipe to barista.json: in training, its frozen models, evaluation and mining."""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from data import prepare
from data.collate import MaskedBatch, PairBatch, Texts, concatenate
from data.ground.errors import ConfigError
from data.shards.reader import ShardFolder
from data.tokens import load_tokenizer
from models.encoder import Encoder
from models.settings import EmbeddingSettings
from models.sizes import ModelError
from tests.trainer.support import float32_ds_config, loaded, recipe_of, recipe_values
from trainer import teacher_vectors
from trainer.build import ModelParts, build_model, build_objective, open_shards, open_stream
from trainer.config.load import load_recipe
from trainer.config.schema import Recipe
from trainer.distributed import World
from trainer.evaluation.during_training import Evaluator
from trainer.evaluation.encoding.encode import embedder_of
from trainer.evaluation.subject import load_model
from trainer.evaluation.tasks.sts import STSTask, evaluate_sts
from trainer.exporting.model_folder import embedding_settings, write_model_folder
from trainer.mine_negatives import load_miner
from trainer.objectives.backward import EMPTY, embed_texts
from trainer.objectives.vector_store import VectorStore
from trainer.replay import PlainEngine
from trainer.resizing.resize import Resize, _write_recipes

CPU = torch.device("cpu")
PROMPTS = {"query_prompts": ["a title: "], "passage_prompts": ["the text of a page: "]}
Values = dict[str, dict[str, Any]]


@pytest.fixture
def values(tuple_shards: Path) -> Values:
    made = recipe_values(tuple_shards, model={"pooling": "mean", "pool_prompt": False}, data=PROMPTS)
    made["data"] |= {"query_max_length": 20, "passage_max_length": 32}
    return made


def with_model(values: Values, **model: Any) -> Values:
    return {**values, "model": {**values["model"], **model}}


def built(values: Values) -> tuple[Recipe, ModelParts, Any]:
    """A recipe, its model in eval mode and its first batch."""
    recipe = recipe_of(values)
    sources = open_shards(recipe)
    parts = build_model(recipe, sources)
    parts.module.eval()
    return recipe, parts, next(open_stream(recipe, sources, rank=0, world_size=1))


def naive(encoder: Encoder, texts: Texts, layers: int, *, longest: int | None = None) -> Tensor:
    """Text by text, the mean of a layer's states after the prompt, [n, hidden]. longest: texts are cut there."""
    rows = []
    for start, end, skipped in zip(texts.offsets, texts.offsets[1:], texts.left_out.tolist()):
        ids = texts.tokens[start:end].long()
        if longest is not None and len(ids) > longest:
            ids = torch.cat([ids[: longest - 1], ids[-1:]])
        states = encoder.backbone(ids[None], output_hidden_states=True).hidden_states[layers][0]
        rows.append(states[skipped:].mean(0))
    return torch.stack(rows)


def test_training_pools_the_rest_of_each_text(values: Values) -> None:
    """Padded and packed, in any micro-batch, and the filler of a rank without texts."""
    recipe, parts, batch = built(values)
    texts, sizes = concatenate(batch.queries, batch.passages), list(recipe.ladder)
    tokenizer = load_tokenizer(open_shards(recipe)[0].tokenizer_path)
    lengths = [len(tokenizer(prompts[0]).input_ids) - 1 for prompts in PROMPTS.values()]
    assert set(batch.queries.left_out.tolist()) == {lengths[0]} != {lengths[1]} == set(batch.passages.left_out.tolist())
    engine: Any = PlainEngine(parts.module, World.alone(CPU))
    with torch.no_grad():
        wanted = [naive(parts.encoder, texts, size.layers)[:, : size.dim] for size in sizes]
        for attention in ("sdpa", "packed"):
            parts.encoder.backbone.set_attn_implementation(attention)
            for rows in (torch.arange(len(texts)), torch.arange(len(texts)).flip(0)[::2]):
                for ours, theirs in zip(embed_texts(engine, texts, rows, sizes=sizes), wanted):
                    torch.testing.assert_close(ours, theirs[rows], rtol=1e-5, atol=1e-5)
        assert all(each.isfinite().all() for each in embed_texts(engine, texts, EMPTY, sizes=sizes))
        # Negative control: lengths that are those of other texts.
        shifted = dataclasses.replace(texts, prompt_lengths=texts.left_out.flip(0))
        other = embed_texts(engine, shifted, torch.arange(len(texts)), sizes=sizes)[-1]
    assert (other - wanted[-1]).abs().amax(1)[: len(batch.queries)].min() > 1e-3


def test_gradient_caching_is_one_pass(values: Values) -> None:
    gradients = {}
    for name, changed in (
        ("cached", values),
        ("direct", {**values, "objective": {"name": "contrastive", "backward": "direct"}}),
        ("pooled", with_model(values, pool_prompt=True)),
    ):
        recipe, parts, batch = built(changed)
        engine: Any = PlainEngine(parts.module, World.alone(CPU))
        build_objective(recipe, parts).forward_backward(engine, batch, 0)
        gradients[name] = {n: p.grad.clone() for n, p in parts.module.named_parameters() if p.grad is not None}
    assert gradients["cached"].keys() == gradients["direct"].keys()
    furthest = 0.0
    for name, gradient in gradients["cached"].items():
        torch.testing.assert_close(gradients["direct"][name], gradient, rtol=1e-4, atol=1e-5, msg=name)
        furthest = max(furthest, float((gradients["pooled"][name] - gradient).abs().max()))
    assert furthest > 1e-2  # the control


def prepared(folder: Path, docstrings: list[str], tokenizer: Path) -> Path:
    rows = [{"query": a, "positive": b} for a, b in zip(docstrings[:80:2], docstrings[1:80:2])]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--tokenizer", str(tokenizer), "--processes", "1", "--query-prompt", "a title: "]
    prepare.run(["tuples", str(folder / "pairs.jsonl"), "--output", str(folder / "shards"), *options])
    return folder / "shards"


def test_pairs_beside_masked_losses(
    docstrings: list[str], tiny_tokenizer_path: Path, guide_folder: Path, tmp_path: Path
) -> None:
    """Masked texts are pooled without the prompt that preparation has put into the shards."""
    shards = prepared(tmp_path, docstrings, tiny_tokenizer_path)
    values = recipe_values(
        shards,
        model={"pooling": "mean", "pool_prompt": False, "source": str(guide_folder), "config": {}, "ladder": [[2, 24]]},
        objective={"name": "masked", "pairs": "tuples", "sizes": "full", "decoder": False},
    )
    _, parts, batch = built(values)
    assert isinstance(batch, MaskedBatch) and batch.pairs is not None
    texts = concatenate(batch.pairs.queries, batch.pairs.passages)
    assert set(batch.pairs.queries.left_out.tolist()) == {6} and not batch.pairs.passages.left_out.any()
    seen: list[dict[str, Any]] = []

    class Seeing(PlainEngine):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            seen.append(kwargs)
            return super().__call__(*args, **kwargs)

    engine: Any = Seeing(parts.module, World.alone(CPU))
    build_objective(recipe_of(values), parts).forward_backward(engine, batch, 0)
    masked = dataclasses.replace(texts, tokens=batch.encoder_input_ids)
    called = [call for call in seen if call["embeddings"] == "only"]
    with torch.no_grad():
        (vectors,) = (torch.cat(each) for each in zip(*(parts.module(**call) for call in called)))
        wanted = naive(parts.encoder, masked, 2)
    order = torch.cat([call["offsets"].diff() for call in called])
    assert order.tolist() == sorted(texts.lengths.tolist(), reverse=True)
    rows = texts.lengths.argsort(descending=True, stable=True)
    torch.testing.assert_close(vectors, wanted[rows], rtol=1e-5, atol=1e-5)


@pytest.fixture
def frozen_folder(guide_folder: Path, tmp_path: Path) -> Path:
    """A guide that leaves the prompt out, though the student may not."""
    folder = tmp_path / "frozen"
    shutil.copytree(guide_folder, folder)
    found = EmbeddingSettings.load(folder)
    assert found is not None
    dataclasses.replace(found, pool_prompt=False, query_prompt="a title: ").save(folder)
    return folder


@pytest.mark.parametrize("student", [False, True])
def test_a_guide_does_as_its_settings_say(student: bool, values: Values, frozen_folder: Path, tmp_path: Path) -> None:
    objective = {"name": "contrastive", "filter_false_negatives": True, "filter_by": "guide"}
    guided = {**values, "objective": objective, "guide": {"model": str(frozen_folder)}}
    guided["engine"] = {"ds_config": str(float32_ds_config(tmp_path, 1))}
    _, parts, batch = built(with_model(guided, pool_prompt=student))
    assert isinstance(batch, PairBatch) and parts.guide is not None and parts.encoder.pool_prompt is student
    found = parts.guide.vectors(batch.queries, batch.passages, device=CPU, heartbeat=lambda phase: None)
    with torch.no_grad():
        for vectors, texts, longest in zip(found, (batch.queries, batch.passages), (10, 20)):
            wanted = naive(parts.guide.encoder, texts, 2, longest=longest)
            torch.testing.assert_close(vectors, torch.nn.functional.normalize(wanted, dim=1), rtol=1e-5, atol=1e-5)


def test_a_prompt_that_a_guide_cannot_leave_out_is_refused(
    values: Values, frozen_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = with_model(values, pool_prompt=True)
    values["objective"] = {"name": "contrastive", "filter_false_negatives": True, "filter_by": "guide"}
    values["guide"] = {"model": str(frozen_folder)}
    recipe = recipe_of(values)
    # A tokenizer of which sentence-transformers would count another length.
    monkeypatch.setattr("transformers.PreTrainedTokenizerFast.all_special_ids", [])
    with pytest.raises(ConfigError, match=r"guide\.model = .*: prompt '.*' cannot be left out"):
        build_model(recipe, open_shards(recipe))


def test_stored_vectors_are_those_of_the_teacher(
    values: Values, frozen_folder: Path, docstrings: list[str], tiny_tokenizer_path: Path, tmp_path: Path
) -> None:
    texts = docstrings[:40]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    command = ["documents", str(tmp_path / "texts.jsonl"), "--tokenizer", str(tiny_tokenizer_path)]
    prepare.run([*command, "--output", str(tmp_path / "shards")])
    found = EmbeddingSettings.load(frozen_folder)
    assert found is not None
    dataclasses.replace(found, passage_prompt="the text of a page: ").save(frozen_folder)
    teacher = {"model": str(frozen_folder), "vectors": "stored", "store": str(tmp_path / "store")}
    model = {"ladder": [[1, 8], [2, 16], [3, 24]]}
    loaded(recipe_values(tmp_path / "shards", objective={"name": "distill"}, teacher=teacher, model=model), tmp_path)
    files = ["--config", str(tmp_path / "written.toml"), "--texts", str(tmp_path / "texts.jsonl")]
    teacher_vectors.main(files)
    encoder, tokenizer, settings = load_model(frozen_folder)
    assert settings is not None
    wanted = vectors_of(encoder, tokenizer, settings, texts, "the text of a page: ", length=20)
    fingerprint = ShardFolder(tmp_path / "shards").manifest.tokenizer["fingerprint"]
    held = VectorStore.open(tmp_path / "store", tokenizer=fingerprint)
    vectors = np.concatenate([np.asarray(block) for block in held.blocks])
    np.testing.assert_allclose(vectors, wanted, atol=1e-3)


def vectors_of(
    encoder: Encoder, tokenizer: Any, settings: EmbeddingSettings, texts: list[str], prompt: str, *, length: int
) -> np.ndarray:
    """Unit vectors, text by text: [n, D]."""
    skipped, full = len(tokenizer(prompt).input_ids) - 1, settings.sizes.full
    rows = []
    with torch.no_grad():
        for text in texts:
            ids = torch.tensor([tokenizer(prompt + text, truncation=True, max_length=length).input_ids])
            states = encoder.backbone(ids, output_hidden_states=True).hidden_states[full.layers][0]
            rows.append(states[skipped:].mean(0)[: full.dim])
    return torch.nn.functional.normalize(torch.stack(rows), dim=1).numpy()


def test_what_is_trained_is_kept_evaluated_and_mined_with(
    values: Values, docstrings: list[str], tmp_path: Path
) -> None:
    recipe, parts, _ = built(values)
    settings = embedding_settings(recipe, open_shards(recipe))
    assert settings.pool_prompt is False and settings.query_prompt == "a title: "
    folder = tmp_path / "model"
    write_model_folder(folder, parts.encoder.backbone, parts.tokenizer, settings, parts.encoder.heads)
    assert json.loads((folder / "barista.json").read_text())["pool_prompt"] is False
    encoder, tokenizer, read = load_model(folder)
    assert read == dataclasses.replace(settings, tokenizer=read.tokenizer)
    texts = [text[:60] for text in docstrings[:6]]
    # A miner, at its own lengths and prompts.
    args = SimpleNamespace(model=folder, size="", rerank="", device="cpu", batch_tokens=512)
    miner, _ = load_miner(args)  # type: ignore[arg-type]
    for queries, prompt, length in ((True, settings.query_prompt, 20), (False, settings.passage_prompt, 32)):
        mined = miner.encode(texts, queries)[miner.large]
        wanted = vectors_of(encoder, tokenizer, settings, texts, prompt, length=length)
        np.testing.assert_allclose(mined, wanted, atol=1e-5)
    # Scores in the middle of training are those of the folder.
    task = STSTask("pairs", tuple(pairwise(texts)), tuple(float(n % 3) for n in range(5)))
    engine: Any = PlainEngine(parts.module, World.alone(CPU))
    engine.train = lambda training: None
    scores = Evaluator(settings, (task,), ()).run(engine, parts.tokenizer, World.alone(CPU))
    run = embedder_of(encoder, tokenizer, list(settings.sizes), device="cpu")
    found = evaluate_sts(
        lambda each: run(each, similarity="dot", max_length=32, prompt=settings.query_prompt),
        [task],
        searched=list(settings.sizes),
    )[task.name]
    for size, metrics in found.items():
        assert scores[f"pairs/spearman/{settings.sizes.name(size)}"] == pytest.approx(metrics["spearman"])


def test_a_model_that_leaves_it_out_is_not_trained_otherwise(values: Values, frozen_folder: Path) -> None:
    shape = {"source": str(frozen_folder), "config": {}, "ladder": [[1, 8], [2, 24]]}
    recipe = recipe_of(with_model(values, **shape, pool_prompt=True))
    with pytest.raises(
        ConfigError, match=r"model\.source = .* leaves the prompt out .* set model\.pool_prompt = false"
    ):
        build_model(recipe, open_shards(recipe))
    for model in ({"pool_prompt": False}, {"pool_prompt": True, "pooling": "cls"}):
        built(with_model(values, **shape, **model))


def test_a_resized_model_is_trained_as_it_was(frozen_folder: Path, tmp_path: Path) -> None:
    asked = Resize(str(frozen_folder), texts=(), output=tmp_path)
    _write_recipes(asked, frozen_folder, ranks=1)
    recipe = load_recipe(tmp_path / "training.toml")
    assert recipe.model.pooling == "mean" and not recipe.pools_prompt


def test_refusals(
    values: Values,
    static_guide_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    for pooling in ("cls", "last"):
        with pytest.raises(
            ConfigError, match=r'pool_prompt = false .* would take model\.pooling = "mean" or "weighted'
        ):
            loaded(with_model(values, pooling=pooling), tmp_path)
    table = {"source": str(static_guide_folder), "config": {}, "ladder": [[1, 12], [1, 16]]}
    recipe = recipe_of(with_model(values, **table))
    with pytest.raises(ModelError, match="is a token table, which takes all tokens of a text"):
        build_model(recipe, open_shards(recipe))
    recipe = recipe_of({**values, "data": {**values["data"], "query_prompts": [], "passage_prompts": []}})
    with caplog.at_level(logging.WARNING):
        open_stream(recipe, open_shards(recipe), rank=0, world_size=1)
    assert caplog.messages == ["model.pool_prompt = false leaves nothing out, because no text has a prompt"]
    # A tokenizer of which sentence-transformers would count another length.
    monkeypatch.setattr("transformers.PreTrainedTokenizerFast.all_special_ids", [])
    recipe = recipe_of(values)
    with pytest.raises(ConfigError, match=r"model\.pool_prompt = false: prompt 'a title: ' cannot .* of its 6 tokens"):
        open_stream(recipe, open_shards(recipe), rank=0, world_size=1)

"""A guide beside the trained model: what it reads, that it stays as it is, and what a user gets wrong about it.

That its vectors reach the loss rightly, on any ranks and at any ZeRO stage, is shown in test_exactness.py and
test_static.py; what the loss makes of them in test_losses.py and test_prefix_contrastive.py.
"""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tomli_w
import torch

from data.collate import PairBatch, TextBatch, Texts
from data.ground.errors import ConfigError
from tests.ranks import run_ranks
from tests.reference import naive_guide
from tests.run_folder import steps_of, weights
from tests.trainer.support import float32_ds_config, loaded, recipe_of, recipe_values
from trainer.build import build_model, open_shards, open_stream
from trainer.objectives import guide as guides
from trainer.objectives.guide import cut
from trainer.objectives.teacher import LiveTeacher

FILTERS = {"filter_false_negatives": True, "filter_by": "guide"}
CPU = torch.device("cpu")

Values = dict[str, dict[str, Any]]


@pytest.fixture(params=["encoder", "static"])
def values(
    request: pytest.FixtureRequest, tuple_shards: Path, guide_folder: Path, static_guide_folder: Path, tmp_path: Path
) -> Values:
    folder = guide_folder if request.param == "encoder" else static_guide_folder
    engine = {"ds_config": str(float32_ds_config(tmp_path, 1))}
    return recipe_values(tuple_shards, objective=FILTERS, guide={"model": str(folder)}, engine=engine)


def batch_of(values: Values) -> PairBatch:
    recipe = recipe_of(values)
    batch = next(open_stream(recipe, open_shards(recipe), rank=0, world_size=1))
    assert isinstance(batch, PairBatch)
    return batch


def test_its_vectors_are_those_of_texts_one_by_one(values: Values) -> None:
    """In micro-batches of like length, cut to the guide's own lengths, whatever dropout its config has."""
    recipe = recipe_of(values)
    guide, batch = build_model(recipe, open_shards(recipe)).guide, batch_of(values)
    assert guide is not None
    assert int(batch.passages.lengths.max()) > 20  # else nothing is cut
    beats: list[str] = []
    queries, passages = guide.vectors(batch.queries, batch.passages, device=CPU, heartbeat=beats.append)
    assert len(beats) == 2 if guide.encoder.is_static else len(beats) > 2  # several micro-batches
    want = naive_guide([batch], recipe)
    torch.testing.assert_close(queries @ passages.T, want["guide"], rtol=1e-5, atol=1e-5)
    assert guide.temperature == want["guide_temperature"]
    assert not queries.requires_grad and queries.dtype == torch.float32
    nothing = Texts(batch.queries.tokens[:0], batch.queries.offsets[:1])
    none, _ = guide.vectors(nothing, batch.passages, device=CPU, heartbeat=beats.append)
    assert none.shape == (0, guide.size.dim)


def test_texts_are_cut_before_their_end() -> None:
    texts = Texts(torch.tensor([2, 5, 3, 2, 6, 7, 8, 3, 2, 3]), torch.tensor([0, 3, 8, 10]))
    shorter = cut(texts, 4, closing=1)
    assert shorter.tokens.tolist() == [2, 5, 3, 2, 6, 7, 3, 2, 3]
    assert shorter.offsets.tolist() == [0, 3, 7, 9]
    assert cut(texts, 5, closing=1) is texts
    bare = cut(texts, 4, closing=0)  # nothing ends these texts
    assert bare.tokens.tolist() == [2, 5, 3, 2, 6, 7, 8, 2, 3]
    prompted = cut(Texts(texts.tokens, texts.offsets, torch.tensor([1, 4, 1])), 4, closing=1).prompt_lengths
    assert prompted is not None and prompted.tolist() == [1, 3, 1]
    longer = cut(texts, 4, closing=2)
    assert longer.tokens.tolist() == [2, 5, 3, 2, 6, 8, 3, 2, 3]


@pytest.mark.parametrize(("closing", "expected"), [(0, [2, 6, 7, 8]), (1, [2, 6, 7, 3]), (2, [2, 6, 8, 3])])
def test_a_teacher_of_documents_cuts_them_before_what_ends_them(closing: int, expected: list[int]) -> None:
    read: list[list[int]] = []

    def embed(texts: Texts, **_: Any) -> torch.Tensor:
        read.append(texts.tokens.tolist())
        return torch.ones(len(texts), 2)

    frozen: Any = SimpleNamespace(passage_max_length=4, closing=closing, similarity="cosine", embed=embed)
    batch = TextBatch(Texts(torch.tensor([2, 6, 7, 8, 3]), torch.tensor([0, 5])), torch.zeros(1), torch.zeros(1))
    LiveTeacher(frozen).vectors(batch, device=CPU, heartbeat=lambda phase: None)
    assert read == [expected]


def test_it_is_no_part_of_what_trains(values: Values) -> None:
    recipe = recipe_of(values)
    parts = build_model(recipe, open_shards(recipe))
    assert parts.guide is not None
    guide = list(parts.guide.encoder.parameters())
    assert guide and not any(p.requires_grad for p in guide) and not parts.guide.encoder.training
    assert not {id(p) for p in guide} & {id(p) for p in parts.module.parameters()}
    # The trained model is the one that there would be without a guide.
    plain = copy.deepcopy(values) | {"guide": {}, "objective": {"name": "contrastive"}}
    other = build_model(recipe_of(plain), open_shards(recipe_of(plain))).module.state_dict()
    assert all(torch.equal(value, other[name]) for name, value in parts.module.state_dict().items())


@pytest.mark.launcher
def test_resumed_equals_uninterrupted_and_the_guide_stays_outside(
    tuple_shards: Path, guide_folder: Path, static_guide_folder: Path, tmp_path: Path
) -> None:
    """Two ranks, bf16 weights, the guide filters and teaches; and another guide is another run."""
    settings: dict[str, Any] = {
        **{f"objective.{key}": value for key, value in FILTERS.items()},
        "objective.kl_teacher": "guide",
        "guide.model": str(guide_folder),
        "train.steps": 4,
        "checkpoint.every_steps": 2,
    }
    values = recipe_values(tuple_shards, engine={"ds_config": "ds_configs/zero1.json"})
    (tmp_path / "recipe.toml").write_text(tomli_w.dumps(values))

    def run(name: str, **more: Any) -> dict[str, Any]:
        chosen = settings | {"run.output": str(tmp_path / name)} | more
        arguments = [f"--{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in chosen.items()]
        return {"task": "contrastive", "arguments": ["--config", str(tmp_path / "recipe.toml"), *arguments]}

    def start(*runs: dict[str, Any]) -> None:
        (tmp_path / "cases.json").write_text(json.dumps(runs))
        run_ranks("tests.trainer.worker", "runs", str(tmp_path / "cases.json"), str(tmp_path), ranks=2)

    stopped = run("resumed", **{"train.stop_at_step": 2})
    start(run("whole"), run("other", **{"guide.model": str(static_guide_folder), "train.steps": 1}), stopped)
    start(run("resumed", **{"run.resume": "required"}))

    def losses(name: str) -> list[dict[str, float]]:
        kept = ("step", "loss", "grad_norm")
        return [
            {key: value for key, value in line.items() if key in kept or ("/" in key and "second" not in key)}
            for line in steps_of(tmp_path / name)
        ]

    whole, resumed = losses("whole"), losses("resumed")
    assert whole == resumed and len(whole) == 4
    assert any("kl/" in key for key in whole[0])
    assert losses("other")[0]["loss"] != whole[0]["loss"]
    models = [weights(tmp_path / name) for name in ("whole", "resumed")]
    assert all(torch.equal(value, models[1][name]) for name, value in models[0].items())
    manifest = json.loads((tmp_path / "whole/checkpoints/step_00000004/manifest.json").read_text())
    assert sum(1 for name in manifest["parameters"] if "word_embeddings" in name) == 1


@pytest.fixture
def good(tuple_shards: Path, guide_folder: Path, tmp_path: Path) -> Values:
    engine = {"ds_config": str(float32_ds_config(tmp_path, 1))}
    return recipe_values(tuple_shards, objective=FILTERS, guide={"model": str(guide_folder)}, engine=engine)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"guide.model": ""}, 'filter_by = "guide" needs one.*guide.model'),
        (
            {"guide.model": "", "objective.filter_by": "full", "guide.pooling": "cls"},
            "guide.pooling = .*read by nothing",
        ),
        ({"objective.filter_false_negatives": False}, "take objective.filter_false_negatives = true"),
        ({"objective.filter_by": "full"}, "guide.model = .*read by nothing"),
        ({"objective.filter_by": "student"}, "filter_by = 'student'.*full, guide"),
        (
            {"objective.kl_teacher": "guide", "objective.kl": "none"},
            'kl_teacher = "guide" is read by nothing',
        ),
        ({"objective.kl": "margins", "data.num_negatives": 0}, '"margins" is of hard negatives'),
        ({"objective.loss": "cosent", "objective.kl": "margins"}, '"cosent" has no negatives to score'),
        ({"objective.loss": "cosent", "objective.kl": "none"}, "num_negatives = 3 is read by nothing"),
        (
            {"objective.filter_by": "full", "objective.filter_false_negatives": False, "guide.model": ""}
            | {"objective.false_negative_margin": 0.1},
            "take objective.filter_false_negatives = true",
        ),
        ({"guide.temperature": -1.0}, "guide.temperature = -1.0.*at least 0"),
        ({"objective.kl_size_weights": [1.0] * 3}, "3 entries for the 2 sizes below the full one"),
        ({"objective.kl_size_weights": [1.0] * 2, "objective.kl_teacher": "guide"}, "2 entries for the 3 sizes of"),
        ({"guide.model": "/nowhere/guide"}, "guide.model = '/nowhere/guide'.*does not exist"),
    ],
)
def test_user_errors(changes: dict[str, Any], match: str, good: Values, tmp_path: Path) -> None:
    def load(values: Values) -> guides.Guide | None:
        recipe = loaded(values, tmp_path)
        return guides.load_guide(recipe, open_shards(recipe))

    changed = copy.deepcopy(good)
    assert load(changed) is not None
    for key, value in changes.items():
        section, _, name = key.partition(".")
        changed[section][name] = value
    with pytest.raises(ConfigError, match=match):
        load(changed)


def test_a_folder_that_cannot_guide(good: Values, guide_folder: Path, tiny_tokenizer: Any, tmp_path: Path) -> None:
    def load(folder: Path, **chosen: Any) -> Any:
        values = good | {"guide": {"model": str(folder), **chosen}}
        recipe = recipe_of(values | {"objective": {**values["objective"], "kl_teacher": "guide"}})
        return guides.load_guide(recipe, open_shards(recipe))

    plain = tmp_path / "plain"
    shutil.copytree(guide_folder, plain)
    (plain / "barista.json").unlink()
    with pytest.raises(ConfigError, match=r"guide\.model = .* does not say how it pools; set guide\.pooling"):
        load(plain)
    with pytest.raises(ConfigError, match=r"no barista\.json.*set guide\.temperature"):
        load(plain, pooling="mean")
    found = load(plain, pooling="cls", temperature=0.1)
    assert (found.encoder.pooling, found.temperature, str(found.size)) == ("cls", 0.1, "2x24")
    assert found.query_max_length == found.passage_max_length == 64  # its positions

    other = tmp_path / "other"
    shutil.copytree(guide_folder, other)
    content = json.loads((other / "tokenizer.json").read_text())
    content["model"]["vocab"] = {k[::-1] if k.isalpha() else k: v for k, v in content["model"]["vocab"].items()}
    (other / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"another tokenizer than the shards in .*ids it would read"):
        load(other)

    empty = tmp_path / "empty"
    tiny_tokenizer.save_pretrained(empty)
    with pytest.raises(ConfigError, match=r"guide\.model.*config\.json is missing"):
        load(empty, pooling="cls", temperature=1.0)


def test_folders_of_sentence_transformers_guide_and_start_training(
    good: Values, guide_folder: Path, tmp_path: Path
) -> None:
    """With the transformer in a folder of its own, and the pooling and lengths that the folder says."""
    folder = tmp_path / "st"
    shutil.copytree(guide_folder, folder / "0_Transformer")
    (folder / "0_Transformer" / "barista.json").unlink()
    (folder / "0_Transformer" / "sentence_bert_config.json").write_text('{"max_seq_length": 18}')
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    paths = {"Transformer": "0_Transformer", "Pooling": "1_Pooling"}
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in paths.items()]
    (folder / "modules.json").write_text(json.dumps(modules))

    teaching = good | {"objective": {**good["objective"], "kl_teacher": "guide"}}
    recipe = recipe_of(teaching | {"guide": {"model": str(folder)}})
    with pytest.raises(ConfigError, match=r"no barista\.json with a temperature; set guide\.temperature"):
        guides.load_guide(recipe, open_shards(recipe))
    recipe = recipe_of(teaching | {"guide": {"model": str(folder), "temperature": 0.3}})
    found = guides.load_guide(recipe, open_shards(recipe))
    assert found is not None
    assert (found.encoder.pooling, found.similarity, str(found.size)) == ("mean", "cosine", "2x24")
    assert (found.query_max_length, found.passage_max_length, found.temperature) == (18, 18, 0.3)

    started = {"source": str(folder), "ladder": [[1, 8], [2, 24]], "pooling": "mean"}
    recipe = recipe_of(teaching | {"model": started, "guide": {"model": str(folder), "temperature": 0.3}})
    encoder = build_model(recipe, open_shards(recipe)).encoder
    assert torch.equal(encoder.word_embeddings.weight, found.encoder.word_embeddings.weight)

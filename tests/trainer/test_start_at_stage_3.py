"""How much memory a start takes: at stage 3, ranks other than the first hold their share and one weight at a time.

Every tensor that a rank makes while it builds model and engine is counted. The model is one of eight layers, so that
its largest weight is a small part of it. Negative control: the same count where every rank loads the model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from models.encoder import build_decoder, load_encoder
from models.heads import save_heads
from tests.needs import needed, own
from tests.ranks import run_ranks
from tests.trainer.support import float32_ds_config, recipe_of, recipe_values
from trainer.agreement import disagreement, facts_of
from trainer.build import build_model, open_shards
from trainer.config.schema import Recipe
from trainer.ds_config import loads_weights, read_ds_config

SHAPE = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 512,
    "max_position_embeddings": 64,
}
EVERY_RANK = "every rank loads"  # the control
SMALL = 4096  # bytes: buffers, ids, and what rounding up to whole shares adds

Counts = list[dict[str, int]]  # by rank


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Any) -> dict[str, Path]:
    """The same model in float32 and, rounded, in bf16, as most large models are published."""
    torch.manual_seed(0)
    ids = {"vocab_size": len(tiny_tokenizer), "pad_token_id": 0}
    folders = {}
    for precision in (torch.float32, torch.bfloat16):
        model = build_decoder(SHAPE, "causal", **ids).to(precision)
        folder = folders[str(precision).removeprefix("torch.")] = tmp_path_factory.mktemp("source")
        model.save_pretrained(folder)
    return folders


def values_of(shards: Path, source: Path, **model: Any) -> dict[str, dict[str, Any]]:
    model = {"source": str(source), "config": {}, "pooling": "last", "direction": "causal", **model}
    return recipe_values(shards, model=model | {"ladder": [[4, 32], [8, 64]]})


@pytest.fixture(scope="module")
def launched(
    request: pytest.FixtureRequest,
    launcher: None,
    folders: Mapping[str, Path],
    tuple_shards: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Counts]:
    """By name: "float32-RANKS", "bf16-RANKS", the control, and adapters over a model by the precision of its file."""
    folder = tmp_path_factory.mktemp("starts")
    bf16 = json.loads(float32_ds_config(folder, 3).read_text()) | {"bf16": {"enabled": True}}
    (folder / "bf16_zero3.json").write_text(json.dumps(bf16))
    (folder / "bf16_zero1.json").write_text(json.dumps(bf16 | {"zero_optimization": {"stage": 1}}))
    counts: dict[str, Counts] = {}
    for ranks in (2, 3):
        cases = []
        for name in sorted(needed(request)):
            what, *_, count = name.split("-")
            if count != str(ranks):
                continue
            source, ds_config = folders["float32"], "bf16_zero3.json"
            model: dict[str, Any] = {}
            if what in ("float32", "control"):
                ds_config = "float32_zero3.json"
            if what == "lora":
                precision, stage = name.split("-")[1:3]
                source, ds_config = folders[precision], f"bf16_zero{stage}.json"
                model = {"lora_rank": 2}
            values = values_of(tuple_shards, source, **model) | {"engine": {"ds_config": str(folder / ds_config)}}
            cases.append({"name": name, "values": values, "control": EVERY_RANK if what == "control" else ""})
        if cases:
            path = folder / f"{ranks}.json"
            path.write_text(json.dumps(cases))
            run_ranks("tests.trainer.worker", "starts", str(path), str(folder), ranks=ranks)
            counts |= {case["name"]: torch.load(folder / f"{case['name']}.pt") for case in cases}
    return counts


@pytest.fixture
def counts(request: pytest.FixtureRequest, launched: dict[str, Counts]) -> dict[str, Counts]:
    return own(request, launched)


def most_bytes(count: Mapping[str, int], ranks: int, *, rounds: bool) -> float:
    """A share of all weights and one whole weight: in float32, with bf16 weights also in bf16."""
    both = 1.5 if rounds else 1.0
    return both * (count["all"] / ranks + count["largest"]) + SMALL


@pytest.mark.parametrize(
    ("precision", "ranks"),
    [
        pytest.param("float32", 2, marks=pytest.mark.launch),
        ("bf16", 2),
        ("bf16", 3),  # does not divide the weights evenly
    ],
)
@pytest.mark.needs("{precision}-{ranks}", "control-2")
def test_other_ranks_hold_a_share_and_one_weight(precision: str, ranks: int, counts: dict[str, Counts]) -> None:
    first, *others = counts[f"{precision}-{ranks}"]
    assert len(others) == ranks - 1 and first["largest"] < first["all"] / 6
    print(f"{precision}, {ranks} ranks:", *counts[f"{precision}-{ranks}"], sep="\n")
    for count in others:
        assert count["divided"] <= most_bytes(count, ranks, rounds=precision == "bf16")
        # With the engine: masters and gradients of the share, and what DeepSpeed holds while it makes them.
        assert count["peak"] < count["all"] * 6 / ranks
    assert first["divided"] > first["all"]
    for count in counts["control-2"]:
        assert count["divided"] > count["all"] > most_bytes(count, 2, rounds=False)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.needs("lora-float32-{stage}-2", "lora-bfloat16-{stage}-2")
def test_frozen_weights_are_kept_in_bf16_alone_where_the_file_has_them_so(
    stage: int, counts: dict[str, Counts]
) -> None:
    """Rounding changes the weights of a float32 file, whose own values a run's result must still have."""
    for count in counts[f"lora-bfloat16-{stage}-2"]:
        assert count["kept"] == 0 < count["frozen"] < count["all"]
    for count in counts[f"lora-float32-{stage}-2"]:
        # A norm's fresh weights are ones, which bf16 has.
        own = count["frozen"] / (2 if stage == 3 else 1)
        assert 0.99 * own < count["kept"] < own


@pytest.fixture
def recipe(folders: Mapping[str, Path], tuple_shards: Path, tmp_path: Path) -> Recipe:
    values = values_of(tuple_shards, folders["float32"], lora_rank=2)
    return recipe_of(values | {"engine": {"ds_config": str(float32_ds_config(tmp_path, 3))}})


def test_a_rank_without_weights_has_the_same_model(recipe: Recipe, tmp_path: Path) -> None:
    """Names, order, shapes and what trains; and its facts are those of rank 0, unless its folder's shape differs."""
    sources, ds_config = open_shards(recipe), read_ds_config(recipe.engine.ds_config)
    assert [loads_weights(recipe, ds_config, rank) for rank in range(3)] == [True, False, False]
    whole, empty = (build_model(recipe, sources, ds_config, weights=weights) for weights in (True, False))

    def described(module: nn.Module) -> list[Any]:
        return [(name, p.shape, p.dtype, p.requires_grad) for name, p in module.named_parameters()] + [
            (name, buffer.shape, buffer.dtype) for name, buffer in module.named_buffers()
        ]

    assert described(whole.module) == described(empty.module)
    assert all(p.is_meta for p in empty.module.parameters()) and not any(p.is_meta for p in whole.module.parameters())
    facts = [facts_of(recipe, ds_config, sources, parts) for parts in (whole, empty)]
    assert disagreement(facts) is None
    empty.encoder.config.rms_norm_eps *= 2
    sentence = disagreement([facts[0], facts_of(recipe, ds_config, sources, empty)])
    assert sentence is not None and "model.source is shape " in sentence


def test_other_stages_and_a_replay_load_on_every_rank(recipe: Recipe, tmp_path: Path) -> None:
    for stage in range(3):
        assert loads_weights(recipe, read_ds_config(float32_ds_config(tmp_path, stage)), 1)
    object.__setattr__(recipe.debug, "replay", 3)
    assert loads_weights(recipe, read_ds_config(recipe.engine.ds_config), 1)


def test_heads_have_no_values_either(folders: Mapping[str, Path], tmp_path: Path) -> None:
    source = tmp_path / "headed"
    source.mkdir()
    for path in folders["float32"].iterdir():
        (source / path.name).symlink_to(path)
    heads = nn.ModuleDict({"4": nn.Linear(64, 64), "8": nn.Linear(64, 64)})
    save_heads(dict(heads.named_parameters()), source)
    encoder = load_encoder(source, pooling="last", weights=False)
    assert list(encoder.heads) == ["4", "8"] and all(p.is_meta for p in encoder.heads.parameters())


@pytest.mark.launcher
def test_weights_that_rank_0_refuses_end_all_ranks(
    folders: Mapping[str, Path], tuple_shards: Path, tmp_path: Path
) -> None:
    source, damaged = tmp_path / "damaged", load_file(folders["float32"] / "model.safetensors")
    source.mkdir()
    damaged["norm.weight"][3] = torch.nan
    save_file(damaged, source / "model.safetensors", metadata={"format": "pt"})
    (source / "config.json").symlink_to(folders["float32"] / "config.json")
    values = values_of(tuple_shards, source) | {"engine": {"ds_config": str(float32_ds_config(tmp_path, 3))}}
    values["run"] |= {"output": str(tmp_path / "run")}
    (tmp_path / "recipe.toml").write_text(tomli_w.dumps(values))
    ended = run_ranks("trainer.finetune", "--config", str(tmp_path / "recipe.toml"), ranks=2, expect=2)
    said = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert len(said) == 1 and "holds NaN or infinity in norm.weight" in said[0]
    assert "Traceback" not in ended.stderr and not (tmp_path / "run").exists()

"""Six steps are three steps, an end of the process, and three more, to the last bit; and what a run leaves behind.

All runs are whole commands on two ranks, with dropout and shuffled real shards. A first start makes the uninterrupted
and the interrupted runs, a second one resumes in new processes. tests/test_road.py resumes under the real launcher.
"""

from __future__ import annotations

import copy
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer

from models.encoder import load_encoder
from models.settings import EmbeddingSettings
from models.sizes import Size
from tests import ROOT
from tests.needs import needed, own
from tests.ranks import run_ranks
from tests.run_folder import CLOCKED, records, steps_of, weights
from tests.trainer.support import LADDER, float32_ds_config, recipe_values, with_dropout
from trainer.config.load import build_recipe, load_recipe, read_toml

STEPS = 6
# Runs that are interrupted, and the step that they stop at.
RESUMED = {"smae_zero0": 3, "srl_bf16": 3, "srl_torn": 4, "smae_zero3": 3}

Values = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def launched(
    request: pytest.FixtureRequest,
    launcher: None,
    document_shards: Path,
    tuple_shards: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Path]:
    """Run folders by name, of the runs that the selected tests need.

    <name> is trained without interruption. <name>-resumed is trained in two launches, and <name>-stopped is a copy of
    its folder after the first. srl_zero1-seed has another seed, and srl_zero1-one trains one size.
    """
    wanted = needed(request)
    resumed = [name for name in RESUMED if {f"{name}-resumed", f"{name}-stopped"} & wanted]
    folder = tmp_path_factory.mktemp("resume")
    gentle = {"lr": 1e-3, "eps": 1e-8, "schedule": "cosine", "warmup_ratio": 0.3}
    common = {"optim": gentle, "checkpoint": {"every_steps": 3, "keep": 2}, "train": {"steps": STEPS}}
    smae = with_dropout(recipe_values(document_shards, objective={"name": "masked"}, **common))
    srl = with_dropout(recipe_values(tuple_shards, **common))
    srl["train"]["micro_batch_size"] = 3
    smae["data"]["num_workers"] = 1
    bf16 = copy.deepcopy(srl) | {"engine": {"ds_config": str(ROOT / "ds_configs/zero1.json")}}
    bf16["log"]["tensorboard"] = True
    torn = copy.deepcopy(srl) | {"checkpoint": {"every_steps": 2, "keep": 3}}
    recipes: dict[str, Values] = {"srl_bf16": bf16}
    for name, values, stage in (("smae_zero0", smae, 0), ("srl_zero1", srl, 1), ("srl_torn", torn, 1)):
        recipes[name] = values | {"engine": {"ds_config": str(float32_ds_config(folder, stage))}}
    recipes["smae_zero3"] = smae | {"engine": {"ds_config": str(float32_ds_config(folder, 3))}}
    for name, values in recipes.items():
        (folder / f"{name}.toml").write_text(tomli_w.dumps(values))

    def run(name: str, output: str, *arguments: str) -> dict[str, Any]:
        task = "masked" if "smae" in name else "contrastive"
        common = ["--config", str(folder / f"{name}.toml"), f"--run.output={folder / output}"]
        return {"task": task, "arguments": [*common, *arguments]}

    def start(name: str, runs: list[dict[str, Any]]) -> None:
        (folder / f"{name}.json").write_text(json.dumps(runs))
        run_ranks("tests.trainer.worker", "runs", str(folder / f"{name}.json"), str(folder), ranks=2)

    first = []
    one = ["--objective.sizes=one", "--objective.size=2x32", "--train.steps=1"]
    for name in recipes:  # stage 3 comes last: it changes its process
        if name in wanted:
            first.append(run(name, name))
        if name in resumed:
            first.append(run(name, f"{name}-resumed", f"--train.stop_at_step={RESUMED[name]}"))
        for suffix, changes in (("seed", ["--run.seed=8"]), ("one", one)):
            if f"{name}-{suffix}" in wanted:
                first.append(run(name, f"{name}-{suffix}", *changes))
    start("first", first)

    for name in resumed:
        output = folder / f"{name}-resumed"
        assert not (output / "DONE").exists() and not (output / "model").exists()
        shutil.copytree(output, folder / f"{name}-stopped")
    if "srl_torn" in resumed:
        checkpoints = folder / "srl_torn-resumed" / "checkpoints"
        newest = checkpoints / "step_00000004"
        largest = max((path for path in newest.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
        largest.write_bytes(largest.read_bytes()[:-100])
        # What a kill in the middle of a save leaves.
        shutil.copytree(newest, checkpoints / "tmp-step_00000005")

    if resumed:
        how = {"srl_bf16": "required"}
        start("second", [run(name, f"{name}-resumed", f"--resume={how.get(name, 'auto')}") for name in resumed])
    return {name: folder / name for name in wanted}


@pytest.fixture
def runs(request: pytest.FixtureRequest, launched: dict[str, Path]) -> dict[str, Path]:
    return own(request, launched)


def trained(run: Path) -> dict[str, torch.Tensor]:
    """The float32 parameters in a run's last checkpoint, put together from the fragments of its ranks."""
    fragments: dict[str, dict[int, torch.Tensor]] = {}
    folder = run / "checkpoints" / "step_00000006"
    for file in sorted(folder.glob("*.safetensors")):
        for key, values in load_file(file).items():
            kind, start, name = key.split("/", 2)
            if kind == "master":
                fragments.setdefault(name, {})[int(start)] = values
    shapes = json.loads((folder / "manifest.json").read_text())["parameters"]
    assert fragments.keys() == shapes.keys()
    return {
        name: torch.cat([parts[start] for start in sorted(parts)]).view(shapes[name])
        for name, parts in fragments.items()
    }


@pytest.mark.parametrize(
    ("name", "whole"),
    [
        ("smae_zero0", "smae_zero0"),
        ("srl_bf16", "srl_bf16"),
        ("smae_zero3", "smae_zero3"),
        ("srl_torn", "srl_zero1"),
    ],
)
@pytest.mark.needs("{name}-resumed", "{whole}")
def test_resumed_equals_uninterrupted(name: str, whole: str, runs: dict[str, Path]) -> None:
    resumed = runs[f"{name}-resumed"]
    got, want = records(resumed), records(runs[whole])
    assert [record["step"] for record in want] == list(range(1, STEPS + 1))
    assert got == want
    got_weights, want_weights = weights(resumed), weights(runs[whole])
    assert got_weights.keys() == want_weights.keys()
    assert all(torch.equal(got_weights[key], want_weights[key]) for key in want_weights)
    assert (resumed / "DONE").is_file()


@pytest.mark.needs(*(f"{name}-stopped" for name in RESUMED), "srl_torn-resumed", "smae_zero3-resumed")
def test_the_resumed_runs_did_resume(runs: dict[str, Path]) -> None:
    for name, stop in RESUMED.items():
        assert [record["step"] for record in records(runs[f"{name}-stopped"])] == list(range(1, stop + 1))
    # The torn checkpoint was passed over, so steps 3 and 4 were taken, and written, again.
    lines, before = steps_of(runs["srl_torn-resumed"]), steps_of(runs["srl_torn-stopped"])
    assert lines[:2] == before[:2]
    assert lines[2] != before[2]
    assert steps_of(runs["smae_zero3-resumed"])[:3] == steps_of(runs["smae_zero3-stopped"])


@pytest.mark.needs("srl_zero1-seed", "srl_zero1")
def test_another_seed_is_another_run(runs: dict[str, Path]) -> None:
    """Negative control: the records and weights that are compared above can differ."""
    other, run = runs["srl_zero1-seed"], runs["srl_zero1"]
    assert all(a["loss"] != b["loss"] for a, b in zip(records(other), records(run), strict=True))
    assert not all(torch.equal(value, weights(run)[key]) for key, value in weights(other).items())


@pytest.mark.needs("smae_zero3", "smae_zero0")
def test_stages_agree_on_a_whole_run(runs: dict[str, Path]) -> None:
    """Dropout is drawn alike at every stage, so whole runs differ by rounding alone."""
    for ours, theirs in zip(records(runs["smae_zero3"]), records(runs["smae_zero0"]), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
    stage_0, stage_3 = weights(runs["smae_zero0"]), weights(runs["smae_zero3"])
    assert stage_0.keys() == stage_3.keys()
    for name, value in stage_0.items():
        if "key.bias" not in name:  # its gradient is rounding alone, of which Adam makes steps of full size
            torch.testing.assert_close(stage_3[name], value, rtol=0, atol=5e-4)


@pytest.mark.needs("srl_bf16-resumed")
def test_learning_rates_follow_the_schedule(runs: dict[str, Path]) -> None:
    rates = [record["lr"] for record in records(runs["srl_bf16-resumed"])]
    expected = [0.0, 0.5e-3] + [1e-3 * (1 + math.cos(math.pi * part / 4)) / 2 for part in range(4)]
    assert rates == pytest.approx(expected)


@pytest.mark.needs("srl_zero1")
def test_checkpoints_are_kept_as_asked(runs: dict[str, Path]) -> None:
    folder = runs["srl_zero1"] / "checkpoints"
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == ["step_00000003", "step_00000006"]
    assert (folder / "latest").read_text() == "step_00000006"


@pytest.mark.needs("srl_bf16-resumed")
def test_the_recipe_in_the_run_folder_is_the_recipe(runs: dict[str, Path]) -> None:
    output = runs["srl_bf16-resumed"]
    again = build_recipe(read_toml(output / "recipe.toml"))
    overrides = [f"run.output={output}", "run.resume=required"]
    assert again == load_recipe(output.with_name("srl_bf16.toml"), overrides)


@pytest.mark.needs("srl_bf16-resumed", "smae_zero0", "srl_zero1")
def test_records(runs: dict[str, Path]) -> None:
    names = [f"{n}x{d}" for n, d in LADDER]
    common = {
        "format",
        "step",
        "epoch",
        "samples",
        "loss",
        "lr",
        "grad_norm",
        "padding_share",
        "skipped_steps",
        *CLOCKED,
    }
    expected = {
        "srl_bf16-resumed": {f"loss/{name}" for name in names} | {f"kl/{name}" for name in names[:-1]},
        "smae_zero0": {f"{side}/{name}" for side in ("encoder", "decoder") for name in names},
    }
    for run, added in expected.items():
        for number, line in enumerate(steps_of(runs[run]), 1):
            assert set(line) == common | added
            assert all(math.isfinite(value) for value in line.values())
            assert (line["step"], line["samples"]) == (number, 12 * number)
            assert 0 <= line["padding_share"] < 1 and line["tokens_per_second"] > 0 and line["mfu"] > 0
    # The loss is the mean of its parts over sizes.
    for line in records(runs["srl_zero1"]):
        total = sum(line[f"loss/{name}"] for name in names) + sum(line[f"kl/{name}"] for name in names[:-1])
        assert line["loss"] == pytest.approx(total / 3, rel=1e-5)
    for line in records(runs["smae_zero0"]):
        parts = sum(line[f"{side}/{name}"] for side in ("encoder", "decoder") for name in names)
        assert line["loss"] == pytest.approx(parts / 3, rel=1e-5)


@pytest.mark.needs("srl_bf16-resumed")
def test_tensorboard_shows_the_records(runs: dict[str, Path]) -> None:
    run = runs["srl_bf16-resumed"]
    places = {name: (".", f"train/{name}") for name in ("loss", "lr", "grad_norm")}
    places |= {name: (".", f"speed/{name}") for name in ("tokens_per_second", "mfu", "memory_mib")}
    places |= {"loss/1x16": ("1_1x16", "losses/contrastive"), "kl/1x16": ("1_1x16", "losses/kl")}
    for name, (folder, tag) in places.items():
        events = EventAccumulator(str(run / "tensorboard" / folder))
        events.Reload()
        scalars = events.Scalars(tag)
        assert [scalar.step for scalar in scalars] == list(range(1, STEPS + 1))
        assert [scalar.value for scalar in scalars] == pytest.approx([line[name] for line in steps_of(run)])


@pytest.mark.needs("srl_bf16-resumed")
def test_other_files_of_a_run(runs: dict[str, Path]) -> None:
    run = runs["srl_bf16-resumed"]
    assert json.loads((run / "environment.json").read_text())["world_size"] == 2
    assert json.loads((run / "ds_config.json").read_text())["bf16"] == {"enabled": True, "check_grad_overflow": True}
    names = {path.name for path in run.iterdir()}
    files = {"recipe.toml", "ds_config.json", "environment.json", "metrics.jsonl", "lock", "DONE"}
    assert names == files | {"tensorboard", "checkpoints", "model"}


@pytest.mark.parametrize("name", ["srl_zero1", "srl_bf16-resumed"])
@pytest.mark.needs("{name}", "srl_zero1-seed")
def test_the_model_is_an_ordinary_checkpoint_of_what_was_trained(name: str, runs: dict[str, Path]) -> None:
    run = runs[name]
    model, report = AutoModel.from_pretrained(run / "model", output_loading_info=True)
    assert not report["unexpected_keys"] and all(key.startswith("pooler.") for key in report["missing_keys"])
    saved = trained(run)
    loaded = {f"backbone.{key}": value for key, value in model.state_dict().items() if not key.startswith("pooler.")}
    assert loaded.keys() == saved.keys()
    for key, value in loaded.items():
        assert value.dtype == torch.float32
        assert torch.equal(value, saved[key])
    before = weights(runs["srl_zero1-seed"])
    assert not all(torch.equal(value, before[key]) for key, value in weights(run).items())

    settings = EmbeddingSettings.load(run / "model")
    assert settings is not None
    assert settings.ladder == tuple((n, d) for n, d in LADDER)
    assert (settings.similarity, settings.temperature, settings.query_max_length) == ("cosine", 0.05, 16)
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    encoder = load_encoder(run / "model").eval()
    batch = tokenizer(["one text", "a somewhat longer second text"], padding=True, return_tensors="pt")
    vectors = encoder(batch["input_ids"], batch["attention_mask"], [Size(1, 16), Size(3, 48)])
    assert [tuple(each.shape) for each in vectors] == [(2, 16), (2, 48)]


@pytest.mark.needs("smae_zero0")
def test_the_pretrained_model_keeps_its_head(runs: dict[str, Path]) -> None:
    run = runs["smae_zero0"]
    model, report = AutoModelForMaskedLM.from_pretrained(run / "model", output_loading_info=True)
    assert not report["unexpected_keys"] and not report["missing_keys"]
    saved = trained(run)
    transform = model.cls.predictions.transform
    assert torch.equal(transform.dense.weight, saved["head.weight"])
    assert torch.equal(transform.LayerNorm.weight, saved["head.norm_weight"])
    assert torch.equal(model.cls.predictions.bias, saved["vocabulary_loss.bias"])
    assert torch.equal(
        model.bert.embeddings.word_embeddings.weight, saved["encoder.backbone.embeddings.word_embeddings.weight"]
    )
    assert not any("decoder.query" in key for key in weights(run))  # the decoder is thrown away


@pytest.mark.needs("srl_zero1-one")
def test_a_size_trained_alone_is_a_model_of_its_own(runs: dict[str, Path]) -> None:
    folder = runs["srl_zero1-one"] / "model"
    settings = EmbeddingSettings.load(folder)
    assert settings is not None and settings.ladder == ((2, 32),)
    model, report = AutoModel.from_pretrained(folder, output_loading_info=True)
    assert model.config.num_hidden_layers == 2
    assert not report["unexpected_keys"] and all(key.startswith("pooler.") for key in report["missing_keys"])

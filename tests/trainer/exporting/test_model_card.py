"""Model cards: what they tell is what the run's files say, and what is not known is said to be unknown."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from data.ground.errors import ConfigError, DataError, OtherFormat
from models.encoder import build_masked_lm
from models.settings import EmbeddingSettings
from models.sizes import Size
from tests.trainer.support import LADDER, MODEL, recipe_of, recipe_values
from trainer.config.load import as_toml
from trainer.environment import Environment
from trainer.exporting.model_card import (
    Results,
    base_model_of,
    read_compute,
    results_section,
    training_section,
)
from trainer.exporting.sizes import export_sizes


@pytest.fixture
def run(tmp_path: Path, tuple_shards: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "recipe.toml").write_text(as_toml(recipe_of(recipe_values(tuple_shards))))
    environment = {"world_size": 2, "device": "some CPU", "versions": {"torch": "9.9"}, "commit": "abc1234"}
    (folder / "environment.json").write_text(json.dumps(environment))
    records = [
        {"step": 10, "seconds": 3.0, "samples": 120},
        {"step": 10, "evaluation/x": 1.0},
        {"step": 30, "seconds": 0.6, "samples": 360},
        {"step": 30, "checkpoint/seconds": 5.0},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def test_compute_by_hand(run: Path) -> None:
    """10 steps of 3 s and 20 of 0.6 s: 42 s, on 2 ranks of 50 W 1.167 Wh."""
    compute = read_compute(run, Environment(world_size=2, device="some CPU"))
    assert compute is not None
    assert (compute.steps, compute.samples, compute.ranks) == (30, 360, 2)
    assert compute.hours == pytest.approx(42 / 3600)
    assert compute.kilowatt_hours == pytest.approx(42 / 3600 * 2 * 0.05)
    gpu = read_compute(run, Environment(device="NVIDIA H100", world_size=2))
    assert gpu is not None and gpu.kilowatt_hours == pytest.approx(10 * compute.kilowatt_hours)
    stated = read_compute(run, Environment(device="some CPU"), watts_per_rank=7.0)
    assert stated is not None and stated.watts_per_rank == 7.0


def test_section_tells_what_is_known(run: Path, tuple_shards: Path) -> None:
    text = training_section(run / "model")
    for part in ("abc1234", "torch 9.9", "30 steps, 360 samples", "50 W a rank", str(tuple_shards), "lr = 0.1"):
        assert part in text, part
    (run / "environment.json").unlink()
    (run / "metrics.jsonl").unlink()
    text = training_section(run / "model")
    assert "commit       | unknown" in text and "no metrics.jsonl" in text and "abc1234" not in text
    assert "not inside the folder of a run" in training_section(run / "model" / "deeper")


def test_watts_are_for_a_run_that_says_how_long_it_took(run: Path) -> None:
    assert "7 W a rank" in training_section(run / "model", watts_per_rank=7)
    for model in (run / "model" / "deeper", run / "model"):
        with pytest.raises(
            ConfigError, match=r"--watts-per-rank is for the energy of a run.*leave --watts-per-rank out"
        ):
            training_section(model, watts_per_rank=7)
        (run / "metrics.jsonl").unlink(missing_ok=True)


def test_addresses_are_told_without_their_secrets(run: Path, tuple_shards: Path) -> None:
    """Also of a run whose recipe.toml still has them."""
    recipe = (run / "recipe.toml").read_text()
    (run / "recipe.toml").write_text(recipe.replace(str(tuple_shards), "http://user:s3cr3t@host/a"))
    text = training_section(run / "model")
    assert "s3cr3t" not in text and "http://***@host/a (not on this machine)" in text
    (run / "recipe.toml").write_text(recipe.replace('source = ""', 'source = "http://user:s3cr3t@host/m"'))
    text = training_section(run / "model")
    assert "s3cr3t" not in text and text.count("http://***@host/m") == 2


@pytest.mark.parametrize("totals", [[], None, 3, {"samples": "many"}])
def test_shards_without_totals_are_named_alone(run: Path, tuple_shards: Path, tmp_path: Path, totals: object) -> None:
    """What is not needed to train need not be sound. Negative control: sound ones are told."""
    assert " samples, " in training_section(run / "model").split("| seed")[0]
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards/manifest.json").write_text(json.dumps({"totals": totals}))
    recipe = (run / "recipe.toml").read_text()
    (run / "recipe.toml").write_text(recipe.replace(str(tuple_shards), str(tmp_path / "shards")))
    assert f"{tmp_path / 'shards'} " in training_section(run / "model")


def test_results_are_the_sizes_own(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    records = [
        {
            "method": method,
            "task": "docs",
            "kind": "retrieval",
            "metric": "ndcg_cut_10",
            "layers": n,
            "dim": 16 * n,
            "value": value,
        }
        for method, n, value in (("trained", 1, 0.25), ("trained", 3, 0.5), ("untrained", 1, 0.01))
    ]
    path.write_text(json.dumps({"format": 1, "records": records}))
    text = results_section(Results.read(path), Size(1, 16))
    assert "0.2500" in text and "0.5000" in text and "0.0100" not in text
    assert "none of the size 2x32" in results_section(Results.read(path), Size(2, 32))
    assert "None given" in results_section(Results.read(None), Size(1, 16))
    path.write_text("[]")
    with pytest.raises(DataError, match="no JSON object"):
        Results.read(path)


def test_exports_carry_the_card(run: Path, tiny_tokenizer, tmp_path: Path) -> None:
    model = build_masked_lm(dict(MODEL), vocab_size=len(tiny_tokenizer), pad_token_id=tiny_tokenizer.pad_token_id)
    model.save_pretrained(run / "model")
    tiny_tokenizer.save_pretrained(run / "model")
    EmbeddingSettings(ladder=tuple((n, d) for n, d in LADDER), passage_max_length=64).save(run / "model")
    folders = export_sizes(run / "model", tmp_path / "export")
    assert len(folders) == len(LADDER)
    for folder in folders.values():
        card = (folder / "README.md").read_text()
        assert all(title in card for title in ("## Training", "## Results", "## Limits", "SentenceTransformer("))
        assert "abc1234" in card and "kWh" in card


def test_the_front_matter_is_what_the_hub_reads(run: Path, tiny_tokenizer, tmp_path: Path) -> None:
    """Scores as model-index, each under its own size, and the model at the beginning of the chain of runs."""
    model = build_masked_lm(dict(MODEL), vocab_size=len(tiny_tokenizer), pad_token_id=tiny_tokenizer.pad_token_id)
    model.save_pretrained(run / "model")
    tiny_tokenizer.save_pretrained(run / "model")
    EmbeddingSettings(ladder=tuple((n, d) for n, d in LADDER), passage_max_length=64).save(run / "model")
    records = [
        {"method": "trained", "task": task, "kind": kind, "metric": metric, "layers": n, "dim": d, "value": value * n}
        for n, d in LADDER
        for task, kind, metric, value in (
            ("stsb", "sts", "spearman", 0.21234567),
            ("stsb", "sts", "pearson", 0.1),
            ("scifact: titles", "retrieval", "ndcg_cut_10", 0.1),
            ("scifact: titles", "retrieval", "recall_100", None if n == 2 else 0.3),
        )
        if value is not None
    ]
    (tmp_path / "results.json").write_text(json.dumps({"format": 1, "records": records}))
    folders = export_sizes(
        run / "model",
        tmp_path / "export",
        routers=["1x16:3x16"],
        results=tmp_path / "results.json",
        base_model="owner/model",
    )
    for (layers, dim), folder in zip(LADDER, folders.values()):
        data = ModelCard.load(folder / "README.md").data
        assert (data.library_name, data.pipeline_tag) == ("sentence-transformers", "sentence-similarity")
        assert data.base_model == "owner/model" and data.model_name == f"model {layers}x{dim}"
        found = {(each.dataset_name, each.metric_type): each.metric_value for each in data.eval_results}
        expected = {("stsb", "spearman_cosine"): 0.21234567, ("scifact: titles", "cosine_ndcg@10"): 0.1}
        expected |= {("scifact: titles", "cosine_recall@100"): 0.3} if layers != 2 else {}
        assert found == pytest.approx({key: value * layers for key, value in expected.items()}, abs=1e-4)
    data = ModelCard.load(folders["router-1x16-3x16"] / "README.md").data
    assert data.base_model == "owner/model" and not data.eval_results and "router" in data.tags
    text = (folders["router-1x16-3x16"] / "README.md").read_text()
    assert "## Limits" in text and "abc1234" in text


def test_the_base_model_is_at_the_end_of_the_chain(run: Path, tuple_shards: Path, tmp_path: Path) -> None:
    (run / "model").mkdir()
    assert base_model_of(run / "model") is None  # from random weights
    names = {str(run / "model"): None, "owner/model": "owner/model", "../elsewhere/a/model": None}
    for source, expected in names.items():
        later = tmp_path / f"later{len(source)}"
        (later / "model").mkdir(parents=True)
        recipe = recipe_of(recipe_values(tuple_shards))
        model = dataclasses.replace(recipe.model, source=source, config={})
        (later / "recipe.toml").write_text(as_toml(dataclasses.replace(recipe, model=model)))
        assert base_model_of(later / "model") == expected
    (run / "recipe.toml").write_text((tmp_path / "later11" / "recipe.toml").read_text())
    assert base_model_of(tmp_path / f"later{len(str(run / 'model'))}" / "model") == "owner/model"
    assert base_model_of(tmp_path / "no run" / "model") is None


def test_half_a_last_line_is_passed_over_and_damage_is_not(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What a killed run leaves, and what it does not leave."""
    before = read_compute(run, Environment())
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 40, "secon')
    assert read_compute(run, Environment()) == before and "half a line" in caplog.text
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write("\n")
    with pytest.raises(DataError, match=r"metrics\.jsonl line 5"):
        read_compute(run, Environment())


def test_a_fault_is_no_damage(run: Path) -> None:
    """Its line has a list of samples, where that of a step has their number."""
    before = read_compute(run, Environment())
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 31, "fault": "spike", "fault/loss": "9.0", "by_rank": ["9.0"], "samples": [[0, 1]]}\n')
    assert read_compute(run, Environment()) == before


@pytest.mark.parametrize("format_of_line", [1, None])
def test_lines_of_two_versions_are_added_up(format_of_line: int | None, run: Path) -> None:
    line = {"step": 40, "seconds": 1.8, "samples": 480}
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write(json.dumps(line if format_of_line is None else {"format": format_of_line, **line}) + "\n")
    compute = read_compute(run, Environment())
    assert compute is not None and (compute.steps, compute.samples) == (40, 480)
    assert compute.hours == pytest.approx(60 / 3600)


def test_lines_of_a_later_version_are_not_left_out_of_the_sum(run: Path) -> None:
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"format": 2, "step": 40, "seconds": 1.0}\n')
    with pytest.raises(OtherFormat, match=r"metrics\.jsonl line 5 is of format 2"):
        training_section(run / "model")


@pytest.mark.parametrize("seconds", ["-1.0", "NaN", "Infinity", '"1"'])
def test_seconds_that_cannot_be_added_up(seconds: str, run: Path) -> None:
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write(f'{{"step": 40, "seconds": {seconds}}}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl line 5 is damaged \(seconds = .*; remove that line"):
        read_compute(run, Environment())


@pytest.mark.parametrize("content", ["[" * 10**5, "[]", "{", '{"world_size": 0}', '{"versions": ["torch"]}'])
def test_a_damaged_environment_is_refused(content: str, run: Path) -> None:
    (run / "environment.json").write_text(content)
    with pytest.raises(DataError, match=r"environment\.json"):
        training_section(run / "model")

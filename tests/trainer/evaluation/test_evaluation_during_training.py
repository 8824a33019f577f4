"""Scores in the middle of training, by all ranks through a partitioned engine, are those of the saved model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from models.encoder import load_encoder
from tests.beir import write_beir
from tests.ranks import run_ranks
from tests.run_folder import lines_of
from tests.trainer.support import float32_ds_config, recipe_of, recipe_values
from trainer.config.load import as_toml
from trainer.evaluate import main as evaluate


@pytest.fixture
def tasks(tmp_path: Path, docstrings: list[str]) -> dict[str, list[str]]:
    """A BEIR folder of (summary, body) pairs and an STS file of graded ones, from real documentation."""
    pairs = [text.split("\n\n", 1) for text in docstrings if "\n\n" in text][:60]
    documents, queries = [{"title": "", "text": body} for _, body in pairs], [query for query, _ in pairs[:20]]
    beir = write_beir(tmp_path / "pydoc", documents, queries)
    lines = []
    for i, (query, _) in enumerate(pairs):
        other = pairs[(i + i % 3) % len(pairs)][1]
        lines.append(f"{5 - 2 * (i % 3)}\t{' '.join(query.split())}\t{' '.join(other.split())[:200]}")
    sts = tmp_path / "graded.tsv"
    sts.write_text("\n".join(lines) + "\n")
    return {"beir": [str(beir)], "sts": [str(sts)]}


@pytest.mark.launcher
def test_scores_are_those_of_the_saved_model(tmp_path, tuple_shards, tasks):
    """At stage 3, whose engine divides the weights. tests/trainer/test_static.py has a stage that does not."""
    run = tmp_path / "run"
    values = recipe_values(
        tuple_shards,
        run={"output": str(run)},
        engine={"ds_config": str(float32_ds_config(tmp_path, 3))},
        train={"steps": 4},
        # A rate at which the model stays whole, unlike the exactness tests'.
        optim={"lr": 1e-3, "eps": 1e-8},
        evaluation={"every_steps": 2, **tasks},
    )
    (tmp_path / "recipe.toml").write_text(as_toml(recipe_of(values)))
    run_ranks("trainer.finetune", "--config", str(tmp_path / "recipe.toml"), ranks=2)
    scored = {r["step"]: r for r in lines_of(run) if any(key.startswith("evaluation/") for key in r)}
    assert sorted(scored) == [2, 4]
    inputs = ["--model", str(run / "model"), "--beir", *tasks["beir"], "--sts", *tasks["sts"]]
    assert evaluate(["sizes", *inputs, "--json", str(tmp_path / "scores.json"), "--device", "cpu"]) == 0
    compared = 0
    for record in json.loads((tmp_path / "scores.json").read_text())["records"]:
        key = f"evaluation/{record['task']}/{record['metric']}/{record['size']}"
        if key in scored[4]:
            assert scored[4][key] == pytest.approx(record["value"], abs=1e-6), key
            compared += 1
    assert compared == load_encoder(run / "model").num_layers * 3  # three metrics at each of three sizes
    # Negative control: two steps earlier the model was another.
    assert any(scored[2][key] != scored[4][key] for key in scored[4] if key.startswith("evaluation/"))

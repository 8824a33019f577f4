"""The README's steps in small, each by its command on two ranks: pre-train, be killed, resume, fine-tune, evaluate,
export. Tests beside each module cover its cases; this module tests that the steps work together. What is killed, its
resumption and the evaluation run under the real launcher.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import tomli_w
from sentence_transformers import SentenceTransformer
from transformers import AutoTokenizer

from data.shards.writer import SplitWriter, finish_folder
from models.encoder import load_encoder
from models.settings import EmbeddingSettings
from tests.beir import write_beir
from tests.faults.comparison import NO_DIFFERENCES
from tests.faults.kill_matrix import Moment, Pace, Reference, Trial, run_trial
from tests.faults.tiny_run import LADDER, WORDS, write_inputs
from tests.launcher import launch, run_process
from tests.ranks import run_ranks
from tests.run_folder import steps_of, weights
from tests.trainer.support import float32_ds_config, recipe_values
from trainer import evaluate
from trainer.evaluation.encoding.encode import embedder_of

pytestmark = pytest.mark.launch

STAGE = 1
STEPS = 4
SIZES = [f"{layers}x{dim}" for layers, dim in LADDER]


def made_up_texts(count: int) -> list[str]:
    rng = np.random.default_rng(3)
    return [" ".join(f"w{word}" for word in rng.integers(WORDS, size=rng.integers(6, 25))) for _ in range(count)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("road")
    write_inputs(folder)
    return folder


@pytest.fixture(scope="module")
def killed(launcher: None, folder: Path) -> tuple[Path, Trial]:
    """A pre-training run whose rank 1 is killed after step 5 of 18, then resumed; compared with an undisturbed run."""
    run_ranks(
        "trainer.pretrain", "--config", str(folder / f"zero{STAGE}.toml"), f"--run.output={folder / 'whole'}", ranks=2
    )
    whole = Reference(folder / "whole", Pace(start=0.0, step=0.0, save=0.0, end=0.0))  # the moment has no share of them
    moment = Moment(kind="step", step=5, share=0.0, target="rank 1", at_once=False)
    run = folder / "killed"
    return run, run_trial(run, folder, whole, stage=STAGE, rng=random.Random(0), wanted_kills=1, first=moment)


@pytest.fixture(scope="module")
def tuned(launcher: None, folder: Path, killed: tuple[Path, Trial]) -> Path:
    """A fine-tuning run from the model of the killed and resumed run; a query is the first half of its passage."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "shards" / "tokenizer")
    with SplitWriter(folder / "tuples", 0, kind="tuples", vocabulary_size=len(tokenizer)) as writer:
        for text in made_up_texts(64):
            ids = tokenizer(text, add_special_tokens=False).input_ids
            writer.add_tuple(ids[: len(ids) // 2], [ids])
    finish_folder(folder / "tuples", 1, tokenizer=tokenizer)
    values = recipe_values(
        folder / "tuples",
        run={"output": str(folder / "tuned")},
        model={"source": str(killed[0] / "model"), "config": {}, "ladder": LADDER, "pooling": "mean"},
        data={"num_negatives": 0},
        optim={"lr": 1e-3, "eps": 1e-8},
        train={"steps": STEPS},
        engine={"ds_config": str(float32_ds_config(folder, STAGE))},
    )
    (folder / "tuned.toml").write_text(tomli_w.dumps(values))
    run_ranks("trainer.finetune", "--config", str(folder / "tuned.toml"), ranks=2)
    return folder / "tuned"


def test_a_killed_pre_training_ends_as_if_nothing_had_happened(killed: tuple[Path, Trial]) -> None:
    run, trial = killed
    assert [kill["killed"] for kill in trial.kills] == ["rank 1"] and trial.resumes == 1
    assert trial.differences == NO_DIFFERENCES
    assert (trial.lost, trial.failed_starts, trial.unended, trial.orphans) == (0, 0, 0, 0)
    assert (run / "DONE").is_file()


def test_fine_tuning_starts_from_it(killed: tuple[Path, Trial], tuned: Path) -> None:
    assert [step["step"] for step in steps_of(tuned)] == list(range(1, STEPS + 1))
    assert (tuned / "DONE").is_file()
    before, after = weights(killed[0]), weights(tuned)
    name = next(name for name in after if name.endswith("word_embeddings.weight"))
    assert 0 < float((after[name] - before[f"bert.{name}"]).abs().max()) < 0.1


def test_two_ranks_evaluate_it_as_one_process_does(tuned: Path, tmp_path: Path) -> None:
    texts = made_up_texts(40)
    beir = write_beir(tmp_path / "docs", texts, [" ".join(text.split()[1:4]) for text in texts[:15]])

    def scores(name: str) -> dict[str, float]:
        records = json.loads((tmp_path / name / "results.json").read_text())["records"]
        return {f"{record['size']} {record['metric']}": record["value"] for record in records}

    words = ["sizes", "--model", str(tuned / "model"), "--beir", str(beir), "--device", "cpu"]
    launch("trainer.evaluate", *words, "--output", str(tmp_path / "ranks"), ranks=2)
    assert evaluate.main([*words, "--output", str(tmp_path / "alone")]) == 0
    assert scores("ranks") == pytest.approx(scores("alone"), abs=1e-6)
    assert len({value for name, value in scores("ranks").items() if name.endswith("ndcg_cut_10")}) == len(SIZES)


@pytest.mark.processes
def test_its_export_loads_and_gives_its_vectors(tuned: Path, tmp_path: Path) -> None:
    run_process([sys.executable, "-m", "trainer.export", "--model", str(tuned / "model"), "--output", str(tmp_path)])
    settings, texts = EmbeddingSettings.load(tuned / "model"), made_up_texts(5)
    assert settings is not None and [str(size) for size in settings.sizes] == SIZES
    encoder, tokenizer = load_encoder(tuned / "model"), AutoTokenizer.from_pretrained(tuned / "model")
    encode = embedder_of(encoder, tokenizer, list(settings.sizes), device="cpu")
    ours = encode(texts, similarity=settings.similarity, max_length=settings.passage_max_length)
    for size, vectors in ours.items():
        exported = SentenceTransformer(str(tmp_path / settings.sizes.name(size)), device="cpu")
        np.testing.assert_allclose(exported.encode(texts), vectors, atol=1e-5)

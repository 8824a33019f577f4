"""SentEval transfer, and our model inside mteb."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from data.ground.errors import ConfigError
from models.encoder import build_masked_lm
from models.settings import EmbeddingSettings
from models.sizes import Size
from trainer import evaluate
from trainer.evaluation.senteval import (
    TASKS,
    Part,
    TransferTask,
    evaluate_transfer,
    folds,
    read_task,
    score_task,
)

SIZES = [Size(1, 8), Size(2, 16)]


@pytest.fixture(scope="module")
def model_folder(tiny_tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("model")
    config = dict(model_type="bert", hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    model = build_masked_lm(
        {**config, "max_position_embeddings": 64},
        vocab_size=len(tiny_tokenizer),
        pad_token_id=tiny_tokenizer.pad_token_id,
    )
    model.save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    ladder = tuple((size.layers, size.dim) for size in SIZES)
    EmbeddingSettings(pooling="mean", ladder=ladder, query_max_length=16, passage_max_length=32).save(folder)
    return folder


def test_folds_partition_and_are_stratified() -> None:
    labels = np.array([0] * 40 + [1] * 20)
    parts = [held for _, held in folds(labels, 10, seed=1)]
    assert sorted(np.concatenate(parts).tolist()) == list(range(60))
    assert {(int(np.sum(labels[held] == 0)), int(np.sum(labels[held] == 1))) for held in parts} == {(4, 2)}
    assert all(set(inside) | set(held) == set(range(60)) for inside, held in folds(labels, 10, seed=1))
    assert not all((a == b).all() for a, (_, b) in zip(parts, folds(labels, 10, seed=2)))
    with pytest.raises(ConfigError, match="fewer than 10"):
        folds(np.array([0] * 40 + [1] * 9), 10, seed=1)


def test_accuracy_is_chance_without_signal_and_full_with_it() -> None:
    rng = np.random.default_rng(0)
    labels = tuple(int(i % 2) for i in range(200))
    task = TransferTask("MR", Part(("",) * 200, labels))
    noise = rng.normal(size=(200, 4))
    clear = noise + 6 * np.array(labels)[:, None]
    assert score_task(task, {id(task.train): clear})["accuracy"] > 0.99
    assert abs(score_task(task, {id(task.train): noise})["accuracy"] - 0.5) < 0.2
    pairs = Part(("a",) * 200, labels, ("b",) * 200)
    paired = TransferTask("MRPC", pairs, test=Part(pairs.first, labels, pairs.second))
    assert paired.test is not None
    features = {id(paired.train): clear, id(paired.test): clear}
    assert score_task(paired, features) == {"accuracy": pytest.approx(1.0), "f1": pytest.approx(1.0)}


def senteval_folder(folder: Path) -> Path:
    """SentEval's layout, in small: the class is in a word."""
    good, bad = [f"a good film {i}" for i in range(30)], [f"a bad film {i}" for i in range(30)]
    for name, negative, positive in (
        ("MR", "rt-polarity.neg", "rt-polarity.pos"),
        ("CR", "custrev.neg", "custrev.pos"),
        ("SUBJ", "subj.subjective", "subj.objective"),
        ("MPQA", "mpqa.neg", "mpqa.pos"),
    ):
        (folder / name).mkdir(parents=True)
        (folder / name / negative).write_bytes("\n".join([*bad, "caf\xe9"]).encode("latin-1"))
        (folder / name / positive).write_text("\n".join(good) + "\n")
    sst = folder / "SST" / "binary"
    sst.mkdir(parents=True)
    for part in ("train", "dev", "test"):
        (sst / f"sentiment-{part}").write_text("".join(f"{a}\t1\n{b}\t0\n" for a, b in zip(good, bad)))
    (folder / "TREC").mkdir()
    questions = [
        f"{kind}:x what about {word} {i} ?" for i in range(12) for kind, word in (("NUM", "count"), ("LOC", "place"))
    ]
    for file in ("train_5500.label", "TREC_10.label"):
        (folder / "TREC" / file).write_text("\n".join(questions) + "\n")
    (folder / "MRPC").mkdir()
    rows = [f"{i % 2}\t1\t2\tgood {i}\t{'good' if i % 2 else 'bad'} {i}" for i in range(40)]
    for part in ("train", "test"):
        (folder / "MRPC" / f"msr_paraphrase_{part}.txt").write_text("\n".join(["Quality\ta\tb\tc\td", *rows]) + "\n")
    return folder


def test_files_are_read_as_senteval_has_them(tmp_path: Path) -> None:
    folder = senteval_folder(tmp_path)
    tasks = {name: read_task(folder, name) for name in TASKS}
    assert tasks["MR"].train.first[30] == "café" and tasks["MR"].train.labels == (0,) * 31 + (1,) * 30
    assert tasks["SST2"].dev is not None and tasks["SST2"].train.first[0] == "a good film 0"
    assert tasks["SST2"].train.labels[:2] == (1, 0)
    assert tasks["TREC"].train.labels[:2] == (1, 0) and tasks["TREC"].train.first[0] == "what about count 0 ?"
    assert tasks["MRPC"].train.second[1] == "good 1" and tasks["MRPC"].train.labels[:2] == (0, 1)
    (folder / "TREC" / "TREC_10.label").write_text("HUM:x who ?\n")
    with pytest.raises(ConfigError, match="class 'HUM'"):
        read_task(folder, "TREC")
    with pytest.raises(ConfigError, match="does not exist"):
        read_task(folder / "MR", "MR")


@pytest.mark.full
def test_a_word_that_gives_the_class_away_is_enough(tmp_path: Path) -> None:
    """Counting it is enough, and the other feature is none."""
    folder = senteval_folder(tmp_path)
    tasks = {name: read_task(folder, name) for name in TASKS}
    vectors = {Size(1, 2): lambda text: [text.count("good") + text.count("count"), len(text)]}
    records = evaluate_transfer(
        lambda texts: {size: np.array([f(t) for t in texts], np.float32) for size, f in vectors.items()},
        list(tasks.values()),
    )
    scores = {(r.task, r.metric): r.value for r in records}
    assert all(scores[name, "accuracy"] > 0.95 for name in TASKS), scores


def test_command(model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = senteval_folder(tmp_path / "data")
    command = ["transfer", "--model", str(model_folder), "--data", str(folder), "--device", "cpu"]
    output = tmp_path / "out"
    assert evaluate.main([*command, "--tasks", "MRPC", "--output", str(output)]) == 0
    table = capsys.readouterr().out
    assert "### MRPC\n" in table and "| F1" in table.replace("     F1", "| F1") and (output / "results.json").is_file()
    assert evaluate.main([*command, "--tasks", "NO"]) == 2
    assert "SentEval task 'NO' is unknown" in capsys.readouterr().err


@pytest.mark.full
def test_mteb_gives_our_scores(
    model_folder: Path, docstrings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task of mteb's on local sentences: its Spearman is ours, at each size."""
    monkeypatch.setenv("MTEB_CACHE", str(tmp_path / "mteb"))
    mteb = pytest.importorskip("mteb", reason="needs the package mteb")
    from datasets import Dataset
    from mteb.abstasks.sts import AbsTaskSTS

    from trainer.evaluation.mteb_model import load_mteb_model

    first, second = docstrings[:30], docstrings[1:31]
    gold = [float((i * 7) % 11) for i in range(30)]

    class LocalSTS(AbsTaskSTS):
        metadata = mteb.get_task("STS12").metadata.model_copy(update={"name": "LocalSTS"})
        min_score, max_score = 0, 11

        def load_data(self, *args: object, **kwargs: object) -> None:
            rows = {"sentence1": first, "sentence2": second, "score": gold}
            self.dataset = {"test": Dataset.from_dict(rows)}
            self.data_loaded = True

    sts = tmp_path / "local.tsv"
    sts.write_text(
        "".join(f"{g}\t{' '.join(a.split())}\t{' '.join(b.split())}\n" for g, a, b in zip(gold, first, second))
    )
    results = tmp_path / "r.json"
    arguments = ["sizes", "--model", str(model_folder), "--sts", str(sts), "--device", "cpu", "--json", str(results)]
    assert evaluate.main(arguments) == 0
    import json

    ours = {r["size"]: r["value"] for r in json.loads(results.read_text())["records"] if r["metric"] == "spearman"}
    theirs = {}
    for size in SIZES:
        model = load_mteb_model(model_folder, str(size))
        assert model.mteb_model_meta.embed_dim == size.dim
        (result,) = mteb.evaluate(model, LocalSTS(), cache=None, show_progress_bar=False).task_results
        theirs[str(size)] = result.get_score()
    assert theirs == pytest.approx(ours, abs=1e-6)
    assert abs(ours["1x8"] - ours["2x16"]) > 1e-4  # the sizes differ
    with pytest.raises(ConfigError, match="outgrows"):
        load_mteb_model(model_folder, "9x9")


@pytest.mark.launch  # importing mteb takes longer than most tests
def test_mteb_takes_the_sizes_that_are_named(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No name stands for the largest size, and a wrong size is refused before any is evaluated."""
    mteb = pytest.importorskip("mteb", reason="needs the package mteb")
    asked: list[int] = []

    def evaluated(model: Any, *_: Any, **__: Any) -> SimpleNamespace:
        asked.append(model.mteb_model_meta.embed_dim)
        return SimpleNamespace(task_results=[SimpleNamespace(task_name="T", get_score=lambda: 0.5)])

    monkeypatch.setattr(mteb, "get_tasks", lambda tasks: tasks)
    monkeypatch.setattr(mteb, "evaluate", evaluated)
    command = ["mteb", "--model", str(model_folder), "--tasks", "T", "--device", "cpu", "--sizes"]
    assert evaluate.main([*command, "1x8, 2x16,"]) == 0 and asked == [8, 16]
    for sizes, said in ((",", "names no size"), ("1x8,large", "'large'"), ("1x8,9x9", "9x9 outgrows")):
        assert evaluate.main([*command, sizes]) == 2 and said in capsys.readouterr().err
    assert asked == [8, 16]

"""What a user gets wrong: one sentence, exit code 2, before a device starts or a file is written."""

from __future__ import annotations

import copy
import dataclasses
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w

import trainer.run
from data.shards import UnitWriter, finish_folder
from models.encoder import build_masked_lm
from tests import ROOT
from tests.launcher import launch, run_process
from tests.trainer.support import LADDER, MODEL, recipe_of, recipe_values
from trainer.command import run_command
from trainer.config import Recipe, as_toml
from trainer.run import main

Values = dict[str, dict[str, Any]]


@pytest.fixture
def values(tuple_shards: Path, tmp_path: Path) -> Values:
    """A contrastive recipe that nothing is wrong with."""
    return recipe_values(
        tuple_shards,
        run={"output": str(tmp_path / "run")},
        engine={"ds_config": str(ROOT / "ds_configs/zero1.json")},
    )


@pytest.fixture
def masked_values(document_shards: Path, tmp_path: Path) -> Values:
    return recipe_values(
        document_shards,
        run={"output": str(tmp_path / "run")},
        objective={"name": "masked"},
        engine={"ds_config": str(ROOT / "ds_configs/zero1.json")},
    )


@pytest.fixture
def refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command in this process and return its one sentence, having checked all that a refusal promises."""

    def run(values: Values | str | None, *arguments: str, task: str = "contrastive", ranks: int = 1) -> str:
        config = tmp_path / "recipe.toml"
        if values is not None:
            config.write_text(values if isinstance(values, str) else tomli_w.dumps(values))
        before = snapshot(tmp_path)
        monkeypatch.setattr(sys, "argv", ["trainer", "--config", str(config), *arguments])
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        monkeypatch.setattr(trainer.run, "start", lambda: pytest.fail("refused only after the devices started"))
        capfd.readouterr()
        with pytest.raises(SystemExit) as stopped:
            run_command(lambda: main(task, "a command"))
        out, err = capfd.readouterr()
        assert stopped.value.code == 2
        sentence = the_sentence(out + err)
        assert snapshot(tmp_path) == before, "something was written"
        return sentence

    return run


def the_sentence(text: str) -> str:
    assert "Traceback" not in text
    sentences = [line for line in text.splitlines() if line.startswith("error: ")]
    assert len(sentences) == 1, text
    return sentences[0]


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() if path.is_file() else b"" for path in sorted(folder.rglob("*"))}


def changed(values: Values, key: str, value: Any) -> Values:
    section, _, name = key.partition(".")
    return {**values, section: {**values.get(section, {}), name: value}}


RECIPE_MISTAKES = [
    # key, value, what the sentence must name
    ("optim.learning_rate", 1e-3, ["optim.learning_rate", "lr"]),
    ("optimizer.lr", 1e-3, ["[optimizer]", "optim"]),
    ("train.steps", "six", ["train.steps", "'six'", "whole number"]),
    ("train.steps", 2.5, ["train.steps", "2.5", "whole number"]),
    ("train.steps", True, ["train.steps", "True", "whole number"]),
    ("train.steps", -1, ["train.steps", "-1", "at least 0"]),
    ("optim.lr", "fast", ["optim.lr", "'fast'", "number"]),
    ("optim.lr", 0.0, ["optim.lr", "above 0"]),
    ("optim.lr", float("nan"), ["optim.lr", "nan"]),
    ("optim.lr", float("inf"), ["optim.lr", "inf"]),
    ("optim.weight_decay", float("nan"), ["optim.weight_decay", "nan"]),
    ("optim.beta1", 1.0, ["optim.beta1", "below 1"]),
    ("optim.warmup_ratio", 1.5, ["optim.warmup_ratio", "1.5"]),
    ("optim.schedule", "exponential", ["optim.schedule", "'exponential'", "cosine"]),
    ("data.shuffle", 1, ["data.shuffle", "true or false"]),
    ("data.shards", "folder", ["data.shards", "list"]),
    ("data.shards", [], ["data.shards", "empty", "data.prepare"]),
    ("data.shards", ["/nowhere/at/all"], ["/nowhere/at/all"]),
    ("data.shards", [3], ["data.shards", "3", "text"]),
    ("data.weights", [1.0, 2.0], ["data.weights", "2 entries", "1 folders"]),
    ("data.weights", [0.0], ["data.weights", "above 0"]),
    ("data.weights", [float("inf")], ["data.weights", "inf"]),
    ("data.mixture_temperature", 0.5, ["data.mixture_temperature", "0.5", "at least 1"]),
    ("data.mixture_temperature", float("inf"), ["data.mixture_temperature", "inf"]),
    ("data.batches", "one", ["data.batches", "'one'", "one_dataset"]),
    ("data.no_duplicates", 1, ["data.no_duplicates", "true or false"]),
    ("data.query_prompts", "query: ", ["data.query_prompts", "list"]),
    ("data.query_prompts", ["a: ", "b: "], ["data.query_prompts", "2 entries", "1 folders"]),
    ("data.query_prompts", ["query"], ["data.query_prompts", "'query'", "first word"]),
    ("data.query_prompts", ["a b c d e f g h: " * 2], ["query_max_length is 16", "shorten the prompt"]),
    ("data.passage_prompts", ["a: ", "b: "], ["data.passage_prompts", "2 entries", "1 folders"]),
    ("data.query_max_length", 3, ["data.query_max_length", "at least 4"]),
    ("data.passage_max_length", 81, ["data.passage_max_length", "81", "80"]),
    ("model.pooling", "max", ["model.pooling", "'max'", "mean"]),
    ("model.ladder", [[2, 16], [1, 32], [3, 48]], ["model.ladder", "1x32", "grow"]),
    ("model.ladder", [[1, 16], [2, 16], [3, 48]], ["model.ladder", "2x16"]),
    ("model.ladder", [], ["model.ladder", "empty"]),
    ("model.ladder", [[1, 16, 2]], ["model.ladder", "[1, 16, 2]"]),
    ("model.ladder", [[0, 16], [3, 48]], ["model.ladder", "0x16"]),
    ("model.ladder", [[1, 16], [4, 64]], ["4x64", "outgrows", "[3, 48]"]),
    ("model.ladder", [[1, 16], [2, 32]], ["2x32", "stops short", "[3, 48]"]),
    ("model.output_dim", 32, ["outgrows", "[3, 32]"]),
    ("model.output_dim", 64, ["model.output_dim = 64", "encoder's 48"]),
    ("model.config", {}, ["model.source", "model.config"]),
    ("model.config", {**MODEL, "model_type": "brett"}, ["brett"]),
    ("model.config", {k: v for k, v in MODEL.items() if k != "model_type"}, ["model_type"]),
    ("model.config", {**MODEL, "hidden_sise": 3}, ["hidden_sise"]),
    ("model.config", {**MODEL, "hidden_size": 50}, ["50", "num_attention_heads"]),
    ("model.source", "bert-base-uncased", ["model.source", "not both"]),
    ("objective.name", "masked", ["trainer.pretrain"]),
    ("objective.name", "", ["objective.name", "contrastive"]),
    ("objective.sizes", "all", ["objective.sizes", "'all'", "ladder"]),
    ("objective.loss", "cosent", ["objective.kl", "none"]),
    ("objective.temperature", 0, ["objective.temperature", "above 0"]),
    ("objective.kl_weight", -1.0, ["objective.kl_weight"]),
    ("train.micro_batch_size", 0, ["train.micro_batch_size", "at least 1"]),
    ("train.epochs", "many", ["train.epochs"]),
    ("checkpoint.keep", 0, ["checkpoint.keep", "at least 1"]),
    ("engine.ds_config", "ds_configs/zero9.json", ["ds_configs/zero9.json", "zero{0,1,2,3}.json"]),
    ("evaluation.sts", ["/nowhere/sts.tsv"], ["/nowhere/sts.tsv"]),
    ("evaluation.beir", ["/nowhere/beir"], ["/nowhere/beir"]),
    ("run.resume", "maybe", ["run.resume", "'maybe'", "auto"]),
    ("run.resume", "required", ["run.resume", "holds no run"]),
    ("run.seed", -1, ["seed", "-1"]),
]


@pytest.mark.parametrize(
    ("key", "value", "named"), RECIPE_MISTAKES, ids=[f"{key}={value}"[:50] for key, value, _ in RECIPE_MISTAKES]
)
def test_a_mistake_in_a_recipe(
    key: str, value: Any, named: list[str], values: Values, refusal: Callable[..., str]
) -> None:
    sentence = refusal(changed(values, key, value))
    for part in named:
        assert part in sentence


def test_a_section_that_is_no_section(values: Values, refusal: Callable[..., str]) -> None:
    assert "[train]" in refusal({**values, "train": 7})  # type: ignore[dict-item]


def test_combinations(values: Values, masked_values: Values, refusal: Callable[..., str]) -> None:
    one = changed(values, "objective.sizes", "one")
    assert "objective.size" in refusal(one)
    assert "objective.size" in refusal(changed(one, "objective.size", "small"))
    assert "outgrows" in refusal(changed(one, "objective.size", "4x8"))
    assert "train.epochs" in refusal(changed(changed(values, "train.steps", 0), "train.epochs", 0.0))
    assert "train.epochs" in refusal(changed(changed(values, "train.steps", 0), "train.epochs", float("inf")))
    partitioned = changed(values, "engine.ds_config", "ds_configs/zero3.json")
    assert "train.compile" in refusal(changed(partitioned, "train.compile", True))
    cosent = changed(changed(values, "objective.loss", "cosent"), "objective.kl", "none")
    assert "no scores" in refusal(cosent)
    low = changed(masked_values, "objective.decoder_mask_ratio", 0.1)
    assert "decoder_mask_ratio" in refusal(low, task="masked")
    for key, value in (("query_prompts", ["a: "]), ("passage_prompts", ["a: "]), ("no_duplicates", True)):
        assert f"data.{key}" in refusal(changed(masked_values, f"data.{key}", value), task="masked")
    filtered = changed(changed(values, "objective.filter_false_negatives", True), "objective.filter_by", "guide")
    assert "guide.model" in refusal(filtered)
    assert "guide.model = '/nowhere/guide'" in refusal(changed(filtered, "guide.model", "/nowhere/guide"))
    twice = changed(changed(values, "data.weights", [1.0]), "data.mixture_temperature", 2.0)
    sentence = refusal(twice)
    assert "data.mixture_temperature = 2.0" in sentence and "data.weights" in sentence
    assert "two_d" in refusal(changed(masked_values, "objective.sizes", "two_d"), task="masked")
    assert "encoder_mask_ratio" in refusal(changed(masked_values, "objective.encoder_mask_ratio", 1.0), task="masked")
    assert "data.max_length" in refusal(changed(masked_values, "data.max_length", 81), task="masked")
    assert "trainer.finetune" in refusal(values, task="masked")


def test_batches_smaller_than_the_world(values: Values, refusal: Callable[..., str]) -> None:
    sentence = refusal(values, ranks=13)
    assert "train.global_batch_size = 12" in sentence and "13 ranks" in sentence and "13 or more" in sentence


def test_graded_and_ungraded_shards(
    values: Values, tuple_shards: Path, graded_shards: Path, refusal: Callable[..., str]
) -> None:
    mixed = changed(values, "data.shards", [str(tuple_shards), str(graded_shards)])
    for batches in ("mixed", "one_dataset"):
        assert "differ in grading" in refusal(changed(mixed, "data.batches", batches))


def test_recipe_files(values: Values, refusal: Callable[..., str], tmp_path: Path) -> None:
    assert "recipe.toml does not exist" in refusal(None)
    assert "TOML" in refusal("[train\nsteps = 3")
    (tmp_path / "first.toml").write_text('base = "second.toml"')
    (tmp_path / "second.toml").write_text('base = "first.toml"')
    assert "circle" in refusal('base = "first.toml"')
    assert "absent.toml" in refusal('base = "absent.toml"')
    assert "base = 3" in refusal("base = 3")
    (tmp_path / "recipe.toml").write_bytes(b"\xff\xfe\x00")
    assert "TOML" in refusal(None)


@pytest.mark.parametrize(
    ("argument", "named"),
    [
        ("--train.steps=six", "a whole number"),
        ("--train.stepps=6", "train.stepps"),
        ("--training.steps=6", "training"),
        ("--steps=6", "'steps=6'"),
        ("--optim.lr=nan", "optim.lr"),
        ("--model.ladder=[[3,48],[1,16]]", "model.ladder"),
    ],
)
def test_a_mistake_on_the_command_line(argument: str, named: str, values: Values, refusal: Callable[..., str]) -> None:
    assert named in refusal(values, argument)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('{"train_batch_size": 8}', "train.global_batch_size"),
        ('{"train_micro_batch_size_per_gpu": 8}', "train.micro_batch_size"),
        ('{"gradient_accumulation_steps": 8}', "train.micro_batch_size"),
        ('{"gradient_clipping": 1.0}', "optim.max_grad_norm"),
        ('{"optimizer": {"type": "Adam"}}', "[optim]"),
        ('{"scheduler": {"type": "WarmupLR"}}', "[optim]"),
        ('{"activation_checkpointing": {}}', "train.activation_checkpointing"),
        ('{"fp16": {"enabled": true}}', "fp16"),
        ('{"bf16": {"enabled": true}, "zero_optimization": {"stage": 0}}', "stage 0"),
        ('{"bf16": {"enabled": true}', "JSON"),
        ("[1, 2]", "object"),
        ('{"zero_optimization": 2}', "zero_optimization"),
        ('{"zero_optimization": {"stage": 4}}', "stage"),
        ('{"zero_optimization": {"stage": "two"}}', "stage"),
        ('{"bf16": true}', "bf16"),
    ],
)
def test_engine_settings(text: str, named: str, values: Values, refusal: Callable[..., str], tmp_path: Path) -> None:
    path = tmp_path / "engine.json"
    path.write_text(text)
    sentence = refusal(changed(values, "engine.ds_config", str(path)))
    assert named in sentence and "engine.json" in sentence


def test_wrong_shards(
    values: Values,
    masked_values: Values,
    document_shards: Path,
    tuple_shards: Path,
    refusal: Callable[..., str],
    tmp_path: Path,
) -> None:
    sentence = refusal(changed(values, "data.shards", [str(document_shards)]))
    assert "holds documents" in sentence and "trains on tuples" in sentence
    sentence = refusal(changed(masked_values, "data.shards", [str(tuple_shards)]), task="masked")
    assert "holds tuples" in sentence and "trains on documents" in sentence
    empty = tmp_path / "empty"
    empty.mkdir()
    assert str(empty) in refusal(changed(values, "data.shards", [str(empty)]))


def test_damaged_shards(values: Values, tuple_shards: Path, refusal: Callable[..., str], tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    shutil.copytree(tuple_shards, folder)
    (shard,) = folder.glob("*.tar")
    whole = shard.read_bytes()
    with_folder = changed(values, "data.shards", [str(folder)])
    for content in (b"", whole[: len(whole) // 2]):
        shard.write_bytes(content)
        assert shard.name in refusal(with_folder)
    shard.unlink()
    assert shard.name in refusal(with_folder)
    shard.write_bytes(whole)
    (folder / "manifest.json").write_text("{")
    assert "manifest.json" in refusal(with_folder)


def test_shards_of_different_tokenizers(
    values: Values, tuple_shards: Path, tiny_tokenizer: Any, refusal: Callable[..., str], tmp_path: Path
) -> None:
    other = other_tokenizer(tiny_tokenizer)
    folder = tuples_of(tmp_path / "other", other)
    sentence = refusal(changed(values, "data.shards", [str(tuple_shards), str(folder)]))
    assert "tokenizer" in sentence and str(folder) in sentence


def test_a_model_with_another_tokenizer(
    values: Values, tiny_tokenizer: Any, refusal: Callable[..., str], tmp_path: Path
) -> None:
    model = tmp_path / "model"
    build_masked_lm(MODEL, vocab_size=2100, pad_token_id=0).save_pretrained(model)
    other_tokenizer(tiny_tokenizer).save_pretrained(model)
    of_model = changed({**values, "model": {"ladder": LADDER}}, "model.source", str(model))
    assert "tokenizer" in refusal(of_model)


def test_ids_beyond_the_vocabulary(values: Values, refusal: Callable[..., str], tmp_path: Path) -> None:
    model = tmp_path / "model"  # without tokenizer files, so that only the table's size can tell
    build_masked_lm(MODEL, vocab_size=100, pad_token_id=0).save_pretrained(model)
    of_model = changed({**values, "model": {"ladder": LADDER}}, "model.source", str(model))
    sentence = refusal(of_model)
    assert "1999" in sentence and "100" in sentence


def test_missing_models(values: Values, refusal: Callable[..., str], tmp_path: Path) -> None:
    without = {**values, "model": {"ladder": LADDER}}
    assert "model.source" in refusal(without)
    sentence = refusal(changed(without, "model.source", "nobody/no-such-model"))
    assert "nobody/no-such-model" in sentence and "network" in sentence
    assert "config.json" in refusal(changed(without, "model.source", str(tmp_path / "absent")))


def test_output_folders(values: Values, refusal: Callable[..., str], tmp_path: Path) -> None:
    output = tmp_path / "run"
    output.mkdir()
    (output / "thesis.txt").write_text("mine")
    for resume in ("never", "auto"):
        assert "no run of ours" in refusal(values, "--resume", resume)
    (output / "thesis.txt").unlink()
    (output / "recipe.toml").write_text(as_toml(recipe_of(values)))
    assert "holds another run" in refusal(values)
    assert "no whole checkpoint" in refusal(values, "--resume", "required")
    sentence = refusal(changed(values, "optim.lr", 0.5), "--resume", "auto")
    assert "optim.lr = 0.1" in sentence and "0.5" in sentence
    (output / "recipe.toml").unlink()
    output.rmdir()
    output.write_text("a file")
    assert "is a file" in refusal(values)


def test_bare_arguments_are_not_understood(values: Values, tmp_path: Path, capfd: Any) -> None:
    with pytest.raises(SystemExit) as stopped:
        main("contrastive", "a command", ["--config", "x.toml", "--train.steps", "5"])
    assert stopped.value.code == 2
    assert "--section.key=value" in capfd.readouterr().err


@pytest.mark.parametrize("task", ["masked", "contrastive"])
def test_help_lists_every_key(task: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(task, "a command", ["--help"])
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    for section, table in dataclasses.asdict(Recipe()).items():
        assert f"[{section}]" in shown
        for key in table:
            assert f"    {key} = " in shown
    assert "--config" in shown and "--resume" in shown


@pytest.mark.processes
def test_a_real_process_ends_with_2(values: Values, tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(tomli_w.dumps(changed(values, "train.steps", -3)))
    arguments = ["--config", str(tmp_path / "recipe.toml")]
    done = run_process([sys.executable, "-m", "trainer.finetune", *arguments], expect=2)
    assert "train.steps" in the_sentence(done.stdout + done.stderr)
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.toml"]


@pytest.mark.launcher
def test_the_launcher_ends_with_2_and_one_sentence(values: Values, tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(tomli_w.dumps(changed(values, "train.global_batch_size", 1)))
    done = launch("trainer.finetune", "--config", str(tmp_path / "recipe.toml"), ranks=2, expect=2)
    assert "leaves some of 2 ranks without a sample" in the_sentence(done.stdout + done.stderr)
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.toml"]


def other_tokenizer(tokenizer: Any) -> Any:
    """The same kind with one token more."""
    other = copy.deepcopy(tokenizer)
    other.add_tokens(["zyzzyva"])
    return other


def tuples_of(folder: Path, tokenizer: Any) -> Path:
    with UnitWriter(folder, 0, kind="tuples", vocabulary_size=len(tokenizer)) as writer:
        writer.add_tuple([10, 11], [[12, 13], [14]])
    finish_folder(folder, 1, tokenizer=tokenizer)
    return folder

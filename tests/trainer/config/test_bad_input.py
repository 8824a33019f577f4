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

import trainer.build
import trainer.run
from data.ground.command import run_command
from data.ground.errors import ConfigError
from data.shards.writer import SplitWriter, finish_folder
from models.encoder import build_masked_lm
from tests import ROOT
from tests.launcher import launch
from tests.trainer.support import LADDER, MODEL, recipe_of, recipe_values
from trainer.config.kinds import kind_named
from trainer.config.load import as_toml
from trainer.config.schema import Recipe
from trainer.run import main
from trainer.run_folder import check_output_folder

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
            run_command(lambda: main(kind_named(task).command, "a command"))
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


RECIPE_ERRORS = [
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
    ("model.ladder", [[1, 16, 2]], ["model.ladder", "1x16x2"]),
    ("model.ladder", [[0, 16], [3, 48]], ["model.ladder", "0x16"]),
    ("model.ladder", [[1, 16], [4, 64]], ["4x64", "outgrows", "[3, 48]"]),
    ("model.ladder", [[1, 16], [2, 32]], ["2x32", "stops short", "[3, 48]"]),
    ("model.output_dim", 32, ["outgrows", "[3, 32]"]),
    ("model.output_dim", 64, ["model.output_dim = 64", "encoder's 48"]),
    ("model.config", {}, ["model.source", "model.config"]),
    ("model.config", {**MODEL, "model_type": "brett"}, ["brett"]),
    ("model.config", {k: v for k, v in MODEL.items() if k != "model_type"}, ["model_type"]),
    ("model.config", {**MODEL, "hidden_sise": 3}, ["hidden_sise"]),
    ("model.config", {**MODEL, "hidden_size": 50}, ["50", "attention heads"]),
    ("model.source", "bert-base-uncased", ["model.source", "not both"]),
    ("objective.name", "masked", ["data.query_max_length", "objective.pairs"]),
    ("objective.kl_temperature", 0.3, ["objective.kl_temperature = 0.3", "read by nothing", '"coordinates"']),
    ("objective.name", "", ["objective.name", "contrastive"]),
    ("objective.sizes", "all", ["objective.sizes", "'all'", "ladder"]),
    ("objective.loss", "cosent", ["objective.kl", "none"]),
    ("objective.temperature", 0, ["objective.temperature", "at least 1e-06"]),
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
    ("run.seed", 2**64 - 2**62 + 2**63, ["run.seed", "18,446,744,073,709,551,615"]),
    ("train.steps", 10**13, ["train.steps", "10000000000000", "at most 1,000,000,000,000"]),
    ("train.epochs", 1e300, ["train.epochs", "1e+300", "at most"]),
    ("train.global_batch_size", 2**40, ["train.global_batch_size", "at most 16,777,216"]),
    ("data.num_workers", 1_000_000, ["data.num_workers", "at most 1,024"]),
    ("data.cache_gib", 1e300, ["data.cache_gib", "at most"]),
    ("objective.temperature", 1e-300, ["objective.temperature", "1e-300", "at least 1e-06"]),
    ("objective.temperature", 1e300, ["objective.temperature", "at most"]),
    ("optim.lr", 1e300, ["optim.lr", "at most"]),
    ("model.config", {**MODEL, "vocab_size": 100}, ["model.config.vocab_size", "tokenizer"]),
    ("model.config", {**MODEL, "pad_token_id": 3}, ["model.config.pad_token_id"]),
    ("model.config", {**MODEL, "num_attention_heads": 0}, ["model.config"]),
    ("model.config", {**MODEL, "hidden_size": -48}, ["model.config"]),
    ("model.config", {**MODEL, "hidden_size": "48"}, ["model.config", "hidden_size"]),
    ("model.config", {**MODEL, "hidden_act": "gelo"}, ["model.config", "gelo"]),
    ("model.config", {**MODEL, "hidden_dropout_prob": 2.0}, ["model.config", "2.0"]),
    ("model.config", {**MODEL, "intermediate_size": 0}, ["model.config", "intermediate_size = 0"]),
    ("model.config", {**MODEL, "is_decoder": True}, ["model.config.is_decoder = True"]),
    ("model.config", {**MODEL, "torch_dtype": "float16"}, ["model.config.torch_dtype"]),
    ("model.config", {**MODEL, "chunk_size_feed_forward": 3}, ["model.config.chunk_size_feed_forward"]),
    ("model.config", {**MODEL, "layer_norm_eps": "x"}, ["model.config", "layer_norm_eps"]),
    ("model.config", {**MODEL, "initializer_range": float("nan")}, ["model.config"]),
]


@pytest.mark.parametrize(
    ("key", "value", "named"), RECIPE_ERRORS, ids=[f"{key}={value}"[:50] for key, value, _ in RECIPE_ERRORS]
)
def test_an_error_in_a_recipe(
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
    assert "data.num_negatives = 3" in refusal(cosent)
    assert "no scores" in refusal(changed(cosent, "data.num_negatives", 0))
    low = changed(masked_values, "objective.decoder_mask_ratio", 0.1)
    assert "decoder_mask_ratio" in refusal(low, task="masked")
    for key, value in (("query_prompts", ["a: "]), ("passage_prompts", ["a: "]), ("no_duplicates", True)):
        assert f"data.{key}" in refusal(changed(masked_values, f"data.{key}", value), task="masked")
    filtered = changed(changed(values, "objective.filter_false_negatives", True), "objective.filter_by", "guide")
    assert "guide.model" in refusal(filtered)
    assert "guide.model = '/nowhere/guide'" in refusal(changed(filtered, "guide.model", "/nowhere/guide"))
    filtered = changed(changed(values, "objective.filter_false_negatives", True), "objective.asymmetric_weight", 1.0)
    assert "objective.asymmetric_weight" in refusal(filtered)
    without = refusal(changed(values, "objective.negatives", ["query_query"]))
    assert "objective.negatives" in without and '"query_passage"' in without
    assert "nothing twice" in refusal(changed(values, "objective.negatives", ["query_passage", "query_passage"]))
    assert "query_passage" in refusal(changed(values, "objective.negatives", ["passages"]))
    spans = changed(changed(masked_values, "objective.pairs", "spans"), "objective.symmetric_spans", True)
    both = changed(spans, "objective.negatives", ["query_passage", "query_query"])
    assert "objective.symmetric_spans" in refusal(both, task="masked")
    graded = changed(cosent, "data.num_negatives", 0)
    assert "objective.hardness" in refusal(changed(graded, "objective.hardness", 5.0))
    assert "objective.negatives" in refusal(changed(graded, "objective.negatives", ["query_passage", "query_query"]))
    margins = changed(values, "objective.kl", "margins")
    assert "data.num_positives = 2" in refusal(changed(margins, "data.num_positives", 2))
    alone = changed(values, "data.num_negatives", 0)
    assert "data.num_negatives above 0" in refusal(changed(alone, "objective.hardness", 5.0))
    twice = changed(changed(values, "data.weights", [1.0]), "data.mixture_temperature", 2.0)
    sentence = refusal(twice)
    assert "data.mixture_temperature = 2.0" in sentence and "data.weights" in sentence
    assert "two_d" in refusal(changed(masked_values, "objective.sizes", "two_d"), task="masked")
    assert "encoder_mask_ratio" in refusal(changed(masked_values, "objective.encoder_mask_ratio", 1.0), task="masked")
    assert "data.max_length" in refusal(changed(masked_values, "data.max_length", 81), task="masked")
    assert "trainer.finetune" in refusal(values, task="masked")
    assert "trainer.pretrain" in refusal(masked_values)


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
    assert "not UTF-8" in refusal(None)
    assert "nested too deep" in refusal("a = " + "[" * 5000)
    assert "digits" in refusal("[train]\nsteps = " + "9" * 5000)
    assert "does not exist" in refusal('base = "a\\u0000b"')
    assert "File name too long" in refusal(f'base = "{"x" * 300}.toml"')
    for number in range(40):
        (tmp_path / f"{number}.toml").write_text(f'base = "{number + 1}.toml"')
    assert "is the base of 32 others" in refusal('base = "0.toml"')


@pytest.mark.parametrize(
    ("argument", "named"),
    [
        ("--train.steps=six", "a whole number"),
        ("--train.stepps=6", "train.stepps"),
        ("--training.steps=6", "training"),
        ("--steps=6", "'--steps'"),
        ("--optim.lr=nan", "optim.lr"),
        ("--model.ladder=[[3,48],[1,16]]", "model.ladder"),
    ],
)
def test_an_error_on_the_command_line(argument: str, named: str, values: Values, refusal: Callable[..., str]) -> None:
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
        ('{"bf16": {"enabled": "yes"}}', "bf16.enabled"),
        ('{"zero_optimization": {"stage": 1.0}}', "stage"),
        ('{"zero_optimization": {"stage": 1, "offload_optimizer": "cpu"}}', "offload_optimizer"),
        ('{"zero_optimization": {"stage": 1, "reduce_bucket_size": -5}}', "reduce_bucket_size"),
        ('{"zero_optimization": {"stage": 1, "bucket": 3}}', "bucket"),
        ('{"zero_optimization": {"stage": 1}, "communication_data_type": "fp99"}', "fp99"),
        ('{"zero_optimization": {"stage": 1}, "zero_optimisation": {"stage": 2}}', "'zero_optimisation'"),
        ('{"zero_optimization": {"stage": 1}, "compression_training": {}}', "compression"),
        ('{"a": ' * 100_000, "nested too deep"),
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


def test_a_changed_password_is_the_same_run(values: Values, tmp_path: Path) -> None:
    """A run's recipe.toml lacks it. Another host is another run."""

    def recipe(address: str) -> Recipe:
        return recipe_of(changed(changed(values, "data.shards", [address]), "run.resume", "auto"))

    output = tmp_path / "run"
    output.mkdir()
    (output / "recipe.toml").write_text(as_toml(recipe("http://user:s3cr3t@host/a")))
    assert "s3cr3t" not in (output / "recipe.toml").read_text()
    for same in ("http://user:s3cr3t@host/a", "http://user:changed@host/a", "http://user:${BARISTA_PASSWORD}@host/a"):
        check_output_folder(recipe(same))
    with pytest.raises(ConfigError) as refused:
        check_output_folder(recipe("http://user:s3cr3t@elsewhere/a"))
    assert "elsewhere" in str(refused.value)


def test_a_run_that_a_bad_shard_has_ended_goes_on_without_it(values: Values, tmp_path: Path) -> None:
    def recipe(**data: str) -> Recipe:
        written = changed(values, "run.resume", "auto")
        for key, value in data.items():
            written = changed(written, f"data.{key}", value)
        return recipe_of(written)

    output = tmp_path / "run"
    output.mkdir()
    (output / "recipe.toml").write_text(as_toml(recipe()))
    check_output_folder(recipe(bad_shards="skip"))
    with pytest.raises(ConfigError, match=r"data\.batches"):
        check_output_folder(recipe(bad_shards="skip", batches="one_dataset"))


def test_a_key_that_nothing_reads_may_leave_a_runs_recipe(values: Values, tmp_path: Path) -> None:
    """Earlier versions accepted it. Now it is refused, and without it the run must go on."""
    values = changed(changed(values, "run.resume", "auto"), "objective.kl", "none")
    output = tmp_path / "run"
    output.mkdir()
    (output / "recipe.toml").write_text(as_toml(recipe_of(changed(values, "objective.kl_weight", 0.5))))
    check_output_folder(recipe_of(values))
    # Negative control: a key that either of the two reads is another run's.
    for differs in ({"objective.kl": "scores"}, {"objective.temperature": 0.5}):
        for key, value in differs.items():
            with pytest.raises(ConfigError, match=rf"holds a run with {key} = "):
                check_output_folder(recipe_of(changed(values, key, value)))


def test_a_masked_run_is_resumed_with_the_similarity_of_its_model(masked_values: Values, tmp_path: Path) -> None:
    """The training does not read the similarity, but the run's evaluations and searches with its model do."""
    values = changed(masked_values, "run.resume", "auto")
    output = tmp_path / "run"
    output.mkdir()
    (output / "recipe.toml").write_text(as_toml(recipe_of(changed(values, "objective.similarity", "dot"))))
    with pytest.raises(ConfigError, match=r"holds a run with objective\.similarity = 'dot'"):
        check_output_folder(recipe_of(values))
    check_output_folder(recipe_of(changed(values, "objective.similarity", "dot")))


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


@pytest.mark.parametrize(
    ("output", "named"),
    [
        ("", "run.output is empty"),
        ("a\0b", "run.output 'a\\x00b'"),
        ("a\udcffb", "a\\udcffb"),
        ("x" * 300, "File name too long"),
        ("file/run", "Not a directory"),
        ("link", "is a link to /nowhere/at/all, which is not there"),
    ],
)
def test_folders_that_cannot_be(
    output: str, named: str, values: Values, refusal: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to("/nowhere/at/all")
    where = f"{tmp_path}/{output}" if output else ""
    if "\0" in output or "\udcff" in output:
        sentence = refusal(values, f"--run.output={output}")
    else:
        sentence = refusal(values, f"--run.output={where}")
    assert "run.output" in sentence and named in sentence


def test_the_same_shards_twice(values: Values, tuple_shards: Path, refusal: Callable[..., str], tmp_path: Path) -> None:
    shutil.copytree(tuple_shards, tmp_path / "copy")
    (tmp_path / "link").symlink_to(tuple_shards)
    for other in (tuple_shards, tmp_path / "link", tmp_path / "copy"):
        sentence = refusal(changed(values, "data.shards", [str(tuple_shards), str(other)]))
        assert "hold the same shards" in sentence and str(other) in sentence and "data.weights" in sentence


def test_too_little_shared_memory(values: Values, refusal: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 64 * 1024})
    monkeypatch.setattr(trainer.build.shutil, "disk_usage", lambda path: usage)
    sentence = refusal(changed(values, "data.num_workers", 2))
    assert "data.num_workers = 2" in sentence and "64 KiB free" in sentence


def test_what_cannot_be_gone_on_with(values: Values, refusal: Callable[..., str], tmp_path: Path) -> None:
    """--resume auto starts over only where nothing was saved."""
    output = tmp_path / "run"
    checkpoints = output / "checkpoints"
    output.mkdir()
    (output / "recipe.toml").write_text(as_toml(recipe_of(values)))
    (output / "metrics.jsonl").write_text(
        '{"step": 4, "loss": 1.0}\n{"step": 4, "checkpoint/mib": 1.0}\n{"step": 7, "lo'
    )
    for how in ("auto", "required"):
        sentence = refusal(values, "--resume", how)
        assert "holds no whole checkpoint" in sentence and "another run.output" in sentence
    assert "a checkpoint of step 4 in its metrics.jsonl" in refusal(values, "--resume", "auto")
    for marker in ("DONE", "STOPPED"):
        (output / "metrics.jsonl").unlink(missing_ok=True)
        (output / marker).write_text("")
        assert marker in refusal(values, "--resume", "auto")
        (output / marker).unlink()
    damaged = checkpoints / "step_00000004"
    damaged.mkdir(parents=True)
    assert "damaged checkpoints" in refusal(values, "--resume", "auto")
    (damaged / "manifest.json").write_text('{"format": 2}')
    for how in ("auto", "required"):
        assert "format 2" in refusal(values, "--resume", how)
    shutil.rmtree(checkpoints)
    checkpoints.symlink_to("/nowhere/at/all")
    for how in ("auto", "required"):
        assert "is a link to /nowhere/at/all" in refusal(values, "--resume", how)


def test_bare_arguments_are_not_understood() -> None:
    with pytest.raises(ConfigError, match="is not understood; settings are given as --section"):
        main("finetune", "a command", ["--config", "x.toml", "--train.steps", "5"])


@pytest.mark.parametrize("task", ["masked", "contrastive"])
def test_help_lists_every_key(task: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(kind_named(task).command, "a command", ["--help"])
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    for section, table in dataclasses.asdict(Recipe()).items():
        assert f"[{section}]" in shown
        for key in table:
            assert f"  {key} = " in shown
    assert "--config" in shown and "--resume" in shown


@pytest.mark.launcher
def test_the_launcher_ends_with_2_and_one_sentence(values: Values, tmp_path: Path) -> None:
    """Real processes, each of which ends with 2. tests/faults/test_hostile.py has other commands."""
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
    with SplitWriter(folder, 0, kind="tuples", vocabulary_size=len(tokenizer)) as writer:
        writer.add_tuple([10, 11], [[12, 13], [14]])
    finish_folder(folder, 1, tokenizer=tokenizer)
    return folder

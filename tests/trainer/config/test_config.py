"""Recipes: what overrides what, what is read back, and how small a batch may be."""

from __future__ import annotations

import dataclasses
import tomllib
import typing
from pathlib import Path

import pytest

from data.ground.errors import ConfigError
from models.sizes import STARBUCKS_LADDER, Size
from tests.trainer.support import recipe_of, recipe_values
from trainer.config.checks import check, check_world
from trainer.config.load import as_toml, build_recipe, load_recipe
from trainer.config.presets import SMAE, SRL_RETRIEVAL, SRL_STS
from trainer.config.schema import Recipe

MINIMAL = """
[objective]
name = "contrastive"
[model]
source = "some/encoder"
[data]
shards = ["shards"]
"""


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_defaults_then_base_then_recipe_then_command_line(tmp_path: Path) -> None:
    write(tmp_path, "common/root.toml", MINIMAL + "[optim]\nlr = 1.0\neps = 1.0\nbeta1 = 0.5\n[train]\nsteps = 1")
    write(tmp_path, "common/middle.toml", 'base = "root.toml"\n[optim]\neps = 2.0\nbeta1 = 0.6')
    recipe = write(tmp_path, "recipe.toml", 'base = "common/middle.toml"\n[optim]\nbeta1 = 0.7')
    loaded = load_recipe(recipe, ["optim.beta2=0.8", "train.steps=3"])
    assert (loaded.optim.lr, loaded.optim.eps, loaded.optim.beta1, loaded.optim.beta2) == (1.0, 2.0, 0.7, 0.8)
    assert loaded.train.steps == 3
    assert loaded.data.shards == ["shards"]
    assert loaded.optim.weight_decay == Recipe().optim.weight_decay


def test_a_table_in_a_section_replaces_the_bases(tmp_path: Path) -> None:
    """A base's [model.config] and a recipe's own are two models, not one mixed of both."""
    base = MINIMAL.replace('source = "some/encoder"', 'config = { model_type = "bert", hidden_size = 48 }')
    write(tmp_path, "base.toml", base)
    recipe = write(tmp_path, "recipe.toml", 'base = "base.toml"\n[model.config]\nmodel_type = "roberta"')
    assert load_recipe(recipe).model.config == {"model_type": "roberta"}


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("train.steps=7", "train.steps", 7),
        ("optim.lr=3", "optim.lr", 3.0),
        ("optim.lr=3e-5", "optim.lr", 3e-5),
        ("data.shuffle=false", "data.shuffle", False),
        ("run.output=runs/a=b", "run.output", "runs/a=b"),
        ("run.output=7", "run.output", "7"),
        ("data.shards=a,b", "data.shards", ["a", "b"]),
        ('data.shards=["a", "b"]', "data.shards", ["a", "b"]),
        ("data.shards=one", "data.shards", ["one"]),
        ("model.ladder=[[1, 8], [2, 16]]", "model.ladder", [[1, 8], [2, 16]]),
        ("evaluation.sts=[]", "evaluation.sts", []),
        ("data.mixture_temperature=2", "data.mixture_temperature", 2.0),
        ("data.query_prompts=query: ", "data.query_prompts", ["query: "]),
        ("data.query_prompts=for a question, find: ", "data.query_prompts", ["for a question, find: "]),
        ("data.query_prompts=", "data.query_prompts", []),
        ('data.passage_prompts=["text, or so: "]', "data.passage_prompts", ["text, or so: "]),
    ],
)
def test_command_line_values(override: str, key: str, value: object, tmp_path: Path) -> None:
    loaded = load_recipe(write(tmp_path, "recipe.toml", MINIMAL), [override])
    section, _, name = key.partition(".")
    assert getattr(getattr(loaded, section), name) == value


def test_tables_on_the_command_line(tmp_path: Path) -> None:
    recipe = write(tmp_path, "recipe.toml", MINIMAL.replace('source = "some/encoder"', ""))
    for text in ('{model_type = "bert", hidden_size = 8}', '{"model_type": "bert", "hidden_size": 8}'):
        loaded = load_recipe(recipe, [f"model.config={text}"])
        assert loaded.model.config == {"model_type": "bert", "hidden_size": 8}


@pytest.mark.parametrize("text", ['{"model_type": "bert", "pad_token_id": null}', '{"a": [{"b": null}]}', "null"])
def test_null_on_the_command_line_is_refused(text: str, tmp_path: Path) -> None:
    """JSON has it, and the run's recipe.toml could not hold it."""
    recipe = write(tmp_path, "recipe.toml", MINIMAL.replace('source = "some/encoder"', ""))
    with pytest.raises(ConfigError, match=r"--model\.config holds null"):
        load_recipe(recipe, [f"model.config={text}"])


def test_a_resolved_recipe_reads_back_equal(tmp_path: Path) -> None:
    recipe = recipe_of(recipe_values("shards", optim={"lr": 3e-5}, evaluation={"sts": ["a.tsv"]}))
    path = write(tmp_path, "recipe.toml", as_toml(recipe))
    assert load_recipe(path) == recipe
    # Every key is written out, so that a later version's defaults change nothing.
    written = tomllib.loads(as_toml(recipe))
    assert {s: set(table) for s, table in written.items()} == {
        s: set(table) for s, table in dataclasses.asdict(recipe).items()
    }


def test_every_number_refuses_the_wrong_type() -> None:
    for section, kind in typing.get_type_hints(Recipe).items():
        for name, hint in typing.get_type_hints(kind).items():
            wrong = "text" if hint is not str else 3
            with pytest.raises(ConfigError, match=rf"{section}\.{name}"):
                build_recipe({section: {name: wrong}})
            if hint is int:
                for value in (True, 1.5):
                    with pytest.raises(ConfigError, match=f"{section}.{name}.*whole number"):
                        build_recipe({section: {name: value}})


def test_the_default_ladder_is_starbucks() -> None:
    assert Recipe().ladder == STARBUCKS_LADDER
    assert Recipe().ladder.full == Size(12, 768)


@pytest.mark.parametrize(("total", "world", "right"), [(128, 1, True), (128, 3, True), (8, 8, True), (7, 8, False)])
def test_every_rank_gets_a_sample(total: int, world: int, right: bool) -> None:
    recipe = build_recipe(recipe_values("shards", train={"global_batch_size": total, "micro_batch_size": 48}))
    check(recipe)
    if right:
        check_world(recipe, world)
    else:
        with pytest.raises(ConfigError, match="without a sample; use 8 or more"):
            check_world(recipe, world)


@pytest.mark.parametrize(("given", "right"), [([], True), (["a: "], True), (["a: ", ""], True), (["a: "] * 3, False)])
def test_prompts_are_none_one_or_one_a_folder(given: list[str], right: bool) -> None:
    for name in ("query_prompts", "passage_prompts"):
        recipe = build_recipe(recipe_values("one", data={"shards": ["one", "two"], name: given}))
        if right:
            check(recipe)
        else:
            with pytest.raises(ConfigError, match=f"data.{name} has 3 entries for 2 folders"):
                check(recipe)


# Starbucks' points and the two columns of each, as the paper and its authors' code have them; settings that no column
# decides (the paper's lengths) are absent.
PRESETS = {
    ("masked", ""): {
        "objective.encoder_mask_ratio": (0.2, 0.2),
        "objective.decoder_mask_ratio": (0.4, 0.4),
        "objective.nested_masks": (False, True),
        "objective.loss_scale": (1.0, 0.5),
        "optim.weight_decay": (0.05, 0.001),
    },
    ("contrastive", "retrieval"): {
        "objective.reduction": ("mean", "sum"),
        "objective.mask_false_negatives": (False, False),
        "objective.kl": ("scores", "scores"),
        "objective.kl_weight": (1.0, 1.0),
        "objective.detach_teacher": (True, True),
        "objective.similarity": ("dot", "dot"),
        "objective.temperature": (1.0, 1.0),
        "optim.lr": (1e-4, 1e-4),
        "optim.schedule": ("linear", "linear"),
        "optim.warmup_ratio": (0.1, 0.1),
        "optim.weight_decay": (0.0, 0.0),
        "train.epochs": (3.0, 3.0),
        "train.global_batch_size": (128, 128),
        "data.num_negatives": (7, 7),
        "data.query_max_length": (None, 32),
        "data.passage_max_length": (None, 196),
        "model.pooling": (None, "cls"),
    },
    ("contrastive", "sts"): {
        "objective.reduction": ("mean", "sum"),
        "objective.mask_false_negatives": (False, False),
        "objective.kl": ("scores", "coordinates"),
        "objective.kl_weight": (0.3, 0.3),
        "objective.kl_temperature": (None, 1.0),
        "objective.detach_teacher": (True, False),
        "objective.similarity": ("cosine", "cosine"),
        "objective.temperature": (0.05, 1 / 20),
        "optim.lr": (5e-5, 5e-5),
        "optim.schedule": ("linear", "linear"),
        "optim.warmup_ratio": (0.1, 0.1),
        "optim.weight_decay": (0.0, 0.0),
        "train.epochs": (1.0, 1.0),
        "train.global_batch_size": (128, 128),
        "model.pooling": (None, "mean"),
    },
}


@pytest.mark.parametrize("column", ["paper", "released-code"])
@pytest.mark.parametrize(("name", "preset_for"), PRESETS)
def test_presets_row_by_row(name: str, preset_for: str, column: str, tmp_path: Path) -> None:
    text = MINIMAL.replace('"contrastive"', f'"{name}"\npreset = "{column}"\npreset_for = "{preset_for}"')
    loaded = load_recipe(write(tmp_path, "recipe.toml", text))
    plain = load_recipe(write(tmp_path, "plain.toml", MINIMAL.replace('"contrastive"', f'"{name}"')))
    resolved, untouched = flat(loaded), flat(plain)
    decided = {key: values[column == "released-code"] for key, values in PRESETS[(name, preset_for)].items()}
    for key, value in decided.items():
        assert resolved[key] == (untouched[key] if value is None else value), key
    changed = {key for key in resolved if resolved[key] != untouched[key]}
    assert changed - {"objective.preset", "objective.preset_for"} <= {k for k, v in decided.items() if v is not None}
    # What the run folder holds is the values, and it reads back equal.
    assert load_recipe(write(tmp_path, "resolved.toml", as_toml(loaded))) == loaded


def flat(recipe: Recipe) -> dict[str, object]:
    return {f"{s}.{k}": v for s, table in dataclasses.asdict(recipe).items() for k, v in table.items()}


def test_every_row_of_a_preset_says_where_it_is_from() -> None:
    for table in (SMAE, SRL_RETRIEVAL, SRL_STS):
        assert len({row.point for row in table}) == len(table)
        assert all(row.where and (row.paper or row.released_code) for row in table)
        keys = [key for row in table for key in {**row.paper, **row.released_code}]
        assert len(keys) == len(set(keys))


def test_what_is_written_out_wins_over_a_preset(tmp_path: Path) -> None:
    """In the base, in the recipe and on the command line; a recipe's preset wins over its base's."""
    objective = 'preset = "paper"\npreset_for = "sts"\nkl_weight = 0.7'
    write(tmp_path, "base.toml", MINIMAL.replace("[model]", objective + "\n[model]"))
    recipe = write(tmp_path, "recipe.toml", 'base = "base.toml"\n[objective]\npreset = "released-code"\nkl = "none"')
    loaded = load_recipe(recipe, ["objective.reduction=mean", "optim.lr=1.0"])
    chosen = loaded.objective
    assert (chosen.kl_weight, chosen.kl, chosen.reduction, loaded.optim.lr) == (0.7, "none", "mean", 1.0)
    assert (chosen.mask_false_negatives, chosen.detach_teacher, loaded.model.pooling) == (False, False, "mean")
    # A default that is written out is as explicit as any other value.
    assert load_recipe(recipe, ["model.pooling=cls"]).model.pooling == "cls"
    without = load_recipe(recipe, ["objective.preset=", "objective.preset_for="])
    assert without.objective.mask_false_negatives == Recipe().objective.mask_false_negatives


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        (["preset=code"], "objective.preset = 'code'.*paper, released-code"),
        (["preset=paper"], "preset = 'paper'.*preset_for.*retrieval, sts"),
        (["preset=paper", "preset_for=nli"], "preset_for = 'nli'.*retrieval, sts"),
        (["size_weights=[1.0, 2.0]"], "size_weights has 2 entries for the 6 sizes"),
        (["size_weights=[1, 1, 1, 1, 1, -1]"], "size_weights.*at least 0"),
        (["size_weights=[0, 0, 0, 0, 0, 0]"], "size_weights.*not all 0"),
        (["size_weights=[1, 1, 1, 1, 1, 1]", "sizes=full"], "6 entries for the 1 sizes"),
        (["kl_size_weights=[1, 1, 1, 1, 1, 1]"], "kl_size_weights has 6 entries for the 5 sizes below the full one"),
        (["decoding=better", "name=masked"], "decoding = 'better'.*basic, enhanced"),
        (["bottleneck=cls", "name=masked"], 'bottleneck = "cls".*only sizes = "full"'),
        (["sizes=two_d_listed", "name=masked"], '"two_d_listed" is a fine-tuning schedule'),
        (["sizes=espresso", "name=masked"], '"espresso" is a fine-tuning schedule'),
        (["sizes=espresso", "name=distill"], '"espresso" is a schedule of contrastive fine-tuning'),
        (["symmetric_spans=true", "name=masked", "pairs=spans", "mask_false_negatives=false"], "its own negative"),
        (["pair_weight=0", "name=masked", "pairs=spans"], "pair_weight = 0.0 must be above 0"),
    ],
)
def test_presets_and_weights_that_make_no_sense(overrides: list[str], match: str, tmp_path: Path) -> None:
    path = write(tmp_path, "recipe.toml", MINIMAL)
    with pytest.raises(ConfigError, match=match):
        load_recipe(path, [f"objective.{override}" for override in overrides])


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        (["model.frozen_layers=12"], "frozen_layers = 12 freezes all of the 12 layers.*at most 11"),
        (["model.frozen_layers=2", "objective.sizes=one", "objective.size=2x32"], "all of the 2 layers.*at most 1"),
        (["model.frozen_layers=-1"], "frozen_layers = -1.*at least 0"),
        (["model.lora_rank=8", "model.lora_alpha=0"], "lora_alpha = 0.0 must be above 0"),
        (["model.lora_rank=8", "model.lora_dropout=1"], "lora_dropout = 1.0 must be at least 0 and below 1"),
        (["model.source=", "model.config={model_type='bert'}", "model.lora_rank=8"], "lora_rank = 8.*model.source"),
        (["model.source=", "model.config={model_type='bert'}", "model.frozen_layers=1"], "frozen_layers.*model.source"),
    ],
)
def test_frozen_layers_and_adapters_that_make_no_sense(overrides: list[str], match: str, tmp_path: Path) -> None:
    path = write(tmp_path, "recipe.toml", MINIMAL)
    load_recipe(path, ["model.frozen_layers=11", "model.lora_rank=8", "model.lora_targets=query,key"])  # sensible
    with pytest.raises(ConfigError, match=match):
        load_recipe(path, overrides)


SECRET = 'data.shards=["http://user:s3cr3t@host/a"]'
NAMED = 'data.shards=["http://user:${BARISTA_PASSWORD}@host/a"]'


def test_what_is_written_hides_secrets(tmp_path):
    path = write(tmp_path, "recipe.toml", MINIMAL)
    recipe = load_recipe(path, [SECRET])
    assert recipe.data.shards == ["http://user:s3cr3t@host/a"], "the run needs it"
    assert "s3cr3t" not in as_toml(recipe) and '"http://***@host/a"' in as_toml(recipe)
    again = write(tmp_path, "again.toml", as_toml(recipe))
    with pytest.raises(ConfigError, match="a secret is hidden, as in every file of a run"):
        load_recipe(again)


def test_names_of_variables_are_written_as_they_are(tmp_path):
    recipe = load_recipe(write(tmp_path, "recipe.toml", MINIMAL), [NAMED])
    assert load_recipe(write(tmp_path, "again.toml", as_toml(recipe))) == recipe


def test_texts_are_written_as_they_are(tmp_path):
    """Prompts are no places: what a model reads is never changed."""
    prompt = 'data.query_prompts=["find http://u:p@h/a?x=1 "]'
    recipe = load_recipe(write(tmp_path, "recipe.toml", MINIMAL), ["objective.name=contrastive", prompt])
    assert "http://u:p@h/a?x=1 " in as_toml(recipe)


def test_words_that_are_not_utf8_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="is not UTF-8"):
        load_recipe(write(tmp_path, "recipe.toml", MINIMAL), ["run.output=runs/\udcff"])


@pytest.mark.parametrize(
    ("objective", "longest"),
    [
        ({"name": "masked"}, 32),
        ({"name": "masked", "pairs": "spans"}, 32),
        ({"name": "masked", "pairs": "tuples"}, 24),
        ({"name": "contrastive"}, 24),
        ({"name": "distill"}, 32),
    ],
)
def test_a_micro_batch_holds_so_many_of_the_longest_texts(objective: dict[str, str], longest: int) -> None:
    data = {"shards": ["x"], "max_length": 32, "query_max_length": 24, "passage_max_length": 16}
    recipe = build_recipe({"objective": objective, "data": data, "train": {"micro_batch_size": 5}})
    assert (recipe.longest_text, recipe.token_budget) == (longest, 5 * longest)

"""A key that is written out and that no part of the run reads is refused (trainer/config/read_keys.py)."""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
from pathlib import Path

import pytest
import tomli_w

from data.ground.errors import ConfigError
from tests import ROOT
from trainer.config import load, read_keys
from trainer.config.load import as_toml, load_recipe
from trainer.config.read_keys import READ_WHEN, as_read, is_read, says_nothing
from trainer.config.schema import Recipe, flat

PAIRS = """
[objective]
name = "contrastive"
[model]
source = "some/encoder"
[data]
shards = ["shards"]
"""
DEFAULTS = {f"{s}.{key}": value for s, table in dataclasses.asdict(Recipe()).items() for key, value in table.items()}
STATIC = ["model.source=", "model.config={model_type='static', hidden_size=8}", "model.ladder=[[1, 4], [1, 8]]"]
STATIC += ["model.pooling=mean"]
MASKED = ["objective.name=masked"]
SPANS = [*MASKED, "objective.pairs=spans"]
GUIDE = ["guide.model=a/guide"]
FILTERS = ["objective.filter_false_negatives=true"]
FILTERED_BY_GUIDE = [*GUIDE, *FILTERS, "objective.filter_by=guide"]
COSENT = ["objective.loss=cosent", "objective.kl=none"]
DOT = ["objective.similarity=dot"]
STS = ['evaluation.sts=["a.tsv"]']
DISTILL = ["objective.name=distill"]
TAUGHT = ["teacher.model=a/teacher"]
MUON = ["optim.name=muon"]
NO_WEIGHT = ["objective.kl_weight=0"]
ONE_SIZE = ["objective.sizes=one", "objective.size=2x32"]

# key -> value, settings under which it is read, and settings under each of which it is not.
CASES: dict[str, tuple[str, list[str], list[list[str]]]] = {
    "model.pool_prompt": ("false", ["model.pooling=mean"], [[], ["model.pooling=last"], STATIC]),
    "model.direction": ("bidirectional", [], [STATIC]),
    "model.attention": ("sdpa", [], [STATIC]),
    "model.frozen_layers": ("1", [], [STATIC]),
    "model.lora_rank": ("4", [], [MASKED]),
    "model.lora_alpha": ("8.0", ["model.lora_rank=4"], [[], MASKED]),
    "model.lora_dropout": ("0.1", ["model.lora_rank=4"], [[], MASKED]),
    "model.lora_targets": ("query", ["model.lora_rank=4"], [[], MASKED]),
    "data.mixture_temperature": ("2.0", [], [["data.weights=[1.0]"]]),
    "data.no_duplicates": ("true", [], [MASKED, SPANS, DISTILL]),
    "data.max_length": ("64", DISTILL, [[], COSENT]),
    "data.query_max_length": ("16", [*MASKED, "objective.pairs=tuples"], [MASKED, SPANS]),
    "data.passage_max_length": ("16", [], [MASKED, SPANS]),
    "data.query_prompts": ('["query: "]', [], [MASKED, [*MASKED, "objective.pairs=tuples"]]),
    "data.passage_prompts": ('["text: "]', DISTILL, [MASKED]),
    "data.num_positives": ("2", [], [MASKED, SPANS, COSENT]),
    "data.num_negatives": ("3", [], [MASKED, SPANS, COSENT]),
    "data.negatives_from": ("[0.5]", ["data.num_negatives=2"], [[], MASKED]),
    "data.cache_dir": ("cache", [], [["data.verify=size"]]),
    "data.cache_gib": ("8.0", ['data.shards=["s3://bucket/shards"]'], [[]]),
    "objective.size": ("2x32", ["objective.sizes=one"], [[], ["objective.sizes=full"]]),
    "objective.preset": ("paper", ["objective.preset_for=sts"], [DISTILL]),
    "objective.preset_for": ("sts", ["objective.preset=paper"], [[], [*MASKED, "objective.preset=paper"]]),
    "objective.reduction": (
        "sum",
        ["objective.sizes=mrl"],
        [[f"objective.sizes={kind}"] for kind in ("full", "two_d", "two_d_listed", "two_d_all_widths")],
    ),
    "objective.layer_weighting": (
        "log",
        [*MASKED],
        [STATIC, ONE_SIZE, *([f"objective.sizes={kind}"] for kind in ("full", "mrl", "two_d_listed"))],
    ),
    "objective.size_weights": (
        "[1.0, 2.0, 1.0, 1.0, 1.0, 1.0]",
        [],
        [[f"objective.sizes={kind}"] for kind in ("two_d", "two_d_listed", "two_d_all_widths")],
    ),
    "objective.encoder_mask_ratio": ("0.3", MASKED, [[]]),
    "objective.decoder_mask_ratio": ("0.5", MASKED, [[], [*MASKED, "objective.decoder=false"]]),
    "objective.decoder": ("true", MASKED, [[]]),
    "objective.decoding": ("enhanced", MASKED, [[], [*MASKED, "objective.decoder=false"]]),
    "objective.bottleneck": (
        "cls",
        [*MASKED, "objective.sizes=full"],
        [["objective.sizes=full"], [*MASKED, "objective.decoder=false"]],
    ),
    "objective.nested_masks": (
        "false",
        MASKED,
        [[], [*MASKED, "objective.decoder=false"], [*MASKED, "objective.decoding=enhanced"]],
    ),
    "objective.pairs": ("spans", MASKED, [[]]),
    "objective.symmetric_spans": ("true", SPANS, [[], MASKED, [*MASKED, "objective.pairs=tuples"]]),
    "objective.pair_weight": ("0.5", SPANS, [[], MASKED]),
    "objective.loss_scale": ("0.5", MASKED, [[]]),
    "objective.loss": ("infonce", [], [MASKED, SPANS]),
    "objective.temperature": ("0.1", [], [MASKED]),
    "objective.kl": (
        "scores",
        [],
        [MASKED, SPANS, ["objective.sizes=full"], ONE_SIZE],
    ),
    "objective.kl_weight": ("5.0", [], [["objective.kl=none"], ["objective.sizes=full"], SPANS]),
    "objective.kl_teacher": ("guide", GUIDE, [["objective.kl=coordinates"], ["objective.kl=none"], NO_WEIGHT, MASKED]),
    "objective.kl_size_weights": (
        "[1.0, 1.0, 2.0, 1.0, 1.0]",
        [],
        [["objective.kl=none"], NO_WEIGHT, ["objective.sizes=two_d"], ["objective.sizes=full"], MASKED],
    ),
    "objective.kl_temperature": (
        "0.3",
        ["objective.kl=coordinates"],
        [[], ["objective.kl=none"], [*NO_WEIGHT, "objective.kl=coordinates"], MASKED],
    ),
    "objective.detach_teacher": (
        "false",
        [],
        [["objective.kl=none"], NO_WEIGHT, [*GUIDE, "objective.kl_teacher=guide"], ["objective.sizes=full"], MASKED],
    ),
    "objective.asymmetric_weight": ("0.5", [], [MASKED, COSENT, ["objective.sizes=full"], ONE_SIZE]),
    "objective.spread_weight": ("0.5", COSENT, [MASKED, DISTILL]),
    "objective.compression_weight": (
        "0.5",
        [],
        [MASKED, DISTILL, ONE_SIZE, *([f"objective.sizes={kind}"] for kind in ("adaptive_layers", "two_d_listed"))],
    ),
    "objective.compression_temperature": ("0.5", ["objective.compression_weight=1.0"], [[], DISTILL]),
    "objective.negatives": ('["query_passage", "query_query"]', SPANS, [MASKED, COSENT]),
    "objective.hardness": ("5.0", ["data.num_negatives=2"], [[], SPANS]),
    "objective.mask_false_negatives": ("false", [], [MASKED, COSENT]),
    "objective.filter_false_negatives": ("true", [], [MASKED, COSENT]),
    "objective.filter_by": ("full", FILTERS, [[], MASKED, SPANS]),
    "objective.false_negative_margin": ("0.1", FILTERS, [[], MASKED, SPANS]),
    "objective.backward": ("direct", [], [MASKED, SPANS, STATIC, DISTILL]),
    "train.activation_memory_mib": (
        "100.0",
        [],
        [MASKED, SPANS, STATIC, DISTILL, ["objective.backward=direct"], ["train.activation_checkpointing=true"]],
    ),
    "guide.model": ("a/guide", ["objective.kl_teacher=guide"], [[], FILTERS, [*SPANS, *FILTERS]]),
    "guide.store": ("a/store", ["objective.kl_teacher=guide"], [[], FILTERS, [*SPANS, *FILTERS]]),
    "guide.pooling": ("cls", FILTERED_BY_GUIDE, [[]]),
    "guide.temperature": ("0.1", [*GUIDE, "objective.kl_teacher=guide"], [[], FILTERED_BY_GUIDE]),
    "model.trains": ("heads", DISTILL, [MASKED, STATIC]),
    "model.dropout": ("0.0", MASKED, [STATIC]),
    "teacher.model": ("a/teacher", [], [MASKED]),
    "teacher.pooling": ("mean", TAUGHT, [[], MASKED]),
    "teacher.vectors": ("live", DISTILL, [[], MASKED]),
    "teacher.store": ("a/store", [*DISTILL, "teacher.vectors=stored"], [[], DISTILL, MASKED]),
    "teacher.vector_weight": ("2.0", TAUGHT, [[], MASKED]),
    "teacher.similarity_weight": ("2.0", TAUGHT, [[], MASKED]),
    "teacher.gram_weight": ("2.0", DISTILL, [[], MASKED]),
    "teacher.order_weight": ("2.0", DISTILL, [[], MASKED]),
    "teacher.balance": ("roles", TAUGHT, [[], DISTILL, MASKED]),
    "teacher.temperature": ("0.1", [*DISTILL, "teacher.similarity_weight=1.0"], [[], DISTILL, TAUGHT]),
    "optim.muon_lr": ("0.001", MUON, [[], MASKED]),
    "optim.muon_momentum": ("0.9", MUON, [[]]),
    "optim.max_grad_norm": ("0.5", [], [MUON]),
    "train.epochs": ("2.0", [], [["train.steps=5"]]),
    "train.micro_batch_size": (
        "8",
        [*STATIC, *FILTERED_BY_GUIDE],
        [
            STATIC,
            [*STATIC, *FILTERED_BY_GUIDE, "guide.store=s"],
            [*STATIC, "teacher.vectors=stored", "teacher.store=s"],
        ],
    ),
    "train.activation_checkpointing": ("true", [], [STATIC]),
    "train.compile": ("true", [], [STATIC]),
    "train.logits_memory_mib": ("8.0", MASKED, [[]]),
    "train.score_memory_mib": ("8.0", SPANS, [MASKED, COSENT]),
    "train.negatives_exchange": ("ring", SPANS, [MASKED, COSENT]),
    "evaluation.every_steps": ("5", STS, [[]]),
    "evaluation.split": ("dev", ['evaluation.beir=["scifact"]'], [[], STS]),
    "evaluation.max_documents": ("5", ['evaluation.beir=["scifact"]'], [[], STS]),
    "evaluation.grid": ("true", STS, [[]]),
}


def write(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(text)
    return folder / name


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    return write(tmp_path, "pairs.toml", PAIRS)


def test_every_key_has_its_conditions_and_every_condition_its_case() -> None:
    assert set(READ_WHEN) == set(DEFAULTS)
    # objective.own is read by objectives of other packages: tests/trainer/objectives/test_own_objective.py.
    assert {*CASES, "objective.own"} == {key for key, conditions in READ_WHEN.items() if conditions}


@pytest.mark.parametrize("key", CASES)
def test_a_key_is_accepted_where_it_is_read_and_refused_elsewhere(key: str, pairs: Path) -> None:
    value, read, unread = CASES[key]
    section, _, name = key.partition(".")
    loaded = load_recipe(pairs, [*read, f"{key}={value}"])
    assert is_read(loaded, key)
    written = getattr(getattr(loaded, section), name)
    for settings in unread:
        load_recipe(pairs, settings)  # sensible without it
        with pytest.raises(ConfigError) as refusal:
            load_recipe(pairs, [*settings, f"{key}={value}"])
        sentence = str(refusal.value)
        assert sentence.startswith(f"{key} = {json.dumps(written)} is read by nothing in this run"), settings
        missing = [c.words for c in READ_WHEN[key] if not c.holds(load_recipe(pairs, settings))]
        assert missing and all(words in sentence for words in missing), settings


@pytest.mark.parametrize("key", [key for key, conditions in READ_WHEN.items() if not conditions])
def test_keys_that_every_run_reads_are_accepted_in_any(key: str, pairs: Path) -> None:
    others = {"model.source": "other/encoder", "data.shards": ["others"], "data.weights": [2.0]}
    value = others.get(key, DEFAULTS[key])
    given = f"{key}={value if isinstance(value, str) else json.dumps(value)}"
    for settings in ([], MASKED) if key != "objective.name" else ():
        load_recipe(pairs, [*settings, given])


def test_the_cases_of_the_audit(pairs: Path) -> None:
    """What was once accepted without a word."""
    for settings in (
        ["objective.kl_temperature=0.3"],
        ["objective.kl=none", "objective.kl_weight=5"],
        [*GUIDE, "objective.kl_teacher=guide", "objective.detach_teacher=false"],
        ["objective.sizes=two_d", "objective.reduction=sum"],
        ["objective.sizes=full", "objective.reduction=sum"],
        ["objective.loss_scale=0.5"],
        ["objective.encoder_mask_ratio=0.3"],
        [*MASKED, "objective.temperature=0.1"],
        [*MASKED, "objective.kl=scores"],
    ):
        with pytest.raises(ConfigError, match="is read by nothing in this run"):
            load_recipe(pairs, settings)


@pytest.mark.parametrize("key", CASES)
def test_a_run_takes_the_default_of_what_it_does_not_read(key: str, pairs: Path) -> None:
    """Putting defaults in place of unread values does not change which keys the run reads."""
    value, read, unread = CASES[key]
    section, _, name = key.partition(".")
    for settings in unread:
        recipe = load_recipe(pairs, settings)
        given = getattr(getattr(load_recipe(pairs, [*read, f"{key}={value}"]), section), name)
        inherited = dataclasses.replace(
            recipe, **{section: dataclasses.replace(getattr(recipe, section), **{name: given})}
        )
        assert not is_read(inherited, key)
        run = as_read(inherited)
        assert run == as_read(recipe) and run == as_read(run), settings
        assert {each for each in DEFAULTS if is_read(run, each)} == {each for each in DEFAULTS if is_read(recipe, each)}


@pytest.mark.parametrize("path", sorted((ROOT / "launch" / "recipes").glob("*.toml")), ids=lambda path: path.stem)
def test_a_shipped_recipe_is_run_as_it_is_read(path: Path) -> None:
    recipe = load_recipe(path)
    run = as_read(recipe)
    for key in DEFAULTS:
        assert is_read(run, key) == is_read(recipe, key), key
        assert flat(run)[key] == (flat(recipe)[key] if is_read(recipe, key) else DEFAULTS[key]), key


ONE_RUNG = ["model.ladder=[[12, 768]]"]


@pytest.mark.parametrize(
    "setting",
    [
        "objective.kl_weight=5",
        "objective.kl=coordinates",
        "objective.kl_teacher=full",
        "objective.detach_teacher=false",
        "objective.reduction=sum",
        "objective.layer_weighting=log",
        "objective.asymmetric_weight=1",
        "objective.compression_weight=1",
    ],
)
def test_a_ladder_of_one_size_teaches_and_averages_nothing(setting: str) -> None:
    recipe = ROOT / "launch" / "recipes" / "srl_nli.toml"
    load_recipe(recipe, ONE_RUNG)  # what the preset says of several sizes is no mistake
    with pytest.raises(ConfigError, match=f"{setting.partition('=')[0]} = .* is read by nothing.*model.ladder"):
        load_recipe(recipe, [*ONE_RUNG, setting])
    # Negative control: with a smaller size they are read.
    load_recipe(recipe, ["model.ladder=[[6, 128], [12, 768]]", setting])


def test_one_size_may_learn_from_a_guide_and_draws_are_several_sizes() -> None:
    recipe = ROOT / "launch" / "recipes" / "srl_nli.toml"
    load_recipe(recipe, [*ONE_RUNG, *GUIDE, "objective.kl_teacher=guide", "objective.kl_weight=5"])
    load_recipe(recipe, [*ONE_RUNG, "objective.sizes=two_d", "objective.kl_weight=5", "objective.layer_weighting=log"])


@pytest.mark.parametrize("key", sorted(key for key, value in DEFAULTS.items() if says_nothing(value, value)))
def test_what_is_off_may_be_said_anywhere(key: str, pairs: Path) -> None:
    """A key that is off by default, written with that value, says what is true of the run."""
    value = DEFAULTS[key]
    needed = {"model.source", "data.shards", "objective.name", "model.config"}
    if key not in needed:
        given = f"{key}={value if isinstance(value, str) else json.dumps(value)}"
        for settings in ([], MASKED):
            load_recipe(pairs, [*settings, given])
    assert not says_nothing(True, False) and not says_nothing(False, True) and not says_nothing(0.3, 0.3)


def test_a_child_may_switch_off_what_its_base_refines(pairs: Path, tmp_path: Path) -> None:
    """The innermost setting counts: what a base wrote sensibly is not the child's mistake."""
    refined = 'base = "pairs.toml"\n[objective]\nkl_weight = 0.5\nkl_size_weights = [1, 1, 1, 1, 2]\n'
    refined += 'filter_false_negatives = true\nfalse_negative_margin = 0.1\nreduction = "sum"\n'
    refined += "[data]\nnum_negatives = 2\nnegatives_from = [0.2, 0.5]\n[model]\nlora_rank = 4\nlora_alpha = 2.0\n"
    base = write(tmp_path, "base.toml", refined)
    load_recipe(base)
    child = 'base = "base.toml"\n[objective]\nkl = "none"\nfilter_false_negatives = false\nsizes = "two_d"\n'
    child += "[data]\nnum_negatives = 0\n[model]\nlora_rank = 0\n"
    loaded = load_recipe(write(tmp_path, "child.toml", child))
    assert (loaded.objective.kl, loaded.objective.kl_weight) == ("none", 0.5)
    # On the command line too, over either of them.
    load_recipe(base, ["objective.kl=none", "train.steps=5", "objective.filter_false_negatives=false"])
    # What the child writes itself must be read.
    for text in ("kl_weight = 0.7", "false_negative_margin = 0.2"):
        with pytest.raises(ConfigError, match=f"{text}.*is read by nothing"):
            load_recipe(write(tmp_path, "wrong.toml", child.replace("[data]", text + "\n[data]")))
    with pytest.raises(ConfigError, match=r"kl_weight = 0\.7 is read by nothing"):
        load_recipe(tmp_path / "child.toml", ["objective.kl_weight=0.7"])
    # A grandchild that switches it on again reads what the base wrote.
    on = 'base = "child.toml"\n[objective]\nkl = "scores"\nsizes = "ladder"\n'
    again = load_recipe(write(tmp_path, "again.toml", on))
    assert again.objective.kl_weight == 0.5


def test_a_base_that_is_wrong_by_itself_is_refused_through_its_child(pairs: Path, tmp_path: Path) -> None:
    write(tmp_path, "base.toml", 'base = "pairs.toml"\n[objective]\nkl_temperature = 0.3\n')
    child = write(tmp_path, "child.toml", 'base = "base.toml"\n[optim]\nlr = 1e-3\n')
    with pytest.raises(ConfigError, match=r"kl_temperature = 0\.3 is read by nothing"):
        load_recipe(child)
    # Unless the child makes it read.
    assert load_recipe(child, ["objective.kl=coordinates"]).objective.kl_temperature == 0.3


def test_a_base_may_leave_the_objective_to_its_children(tmp_path: Path) -> None:
    write(tmp_path, "base.toml", '[model]\nsource = "e"\n[data]\nshards = ["s"]\n[objective]\nloss_scale = 0.5\n')
    child = write(tmp_path, "child.toml", 'base = "base.toml"\n[objective]\nname = "masked"\n')
    assert load_recipe(child).objective.loss_scale == 0.5
    with pytest.raises(ConfigError, match=r"loss_scale = 0\.5 is read by nothing"):
        load_recipe(child, ["objective.name=contrastive"])


def test_a_presets_values_are_not_the_recipes_words(pairs: Path) -> None:
    """paper/sts sets KL's weight: a run without KL need not unset it."""
    settings = ["objective.preset=released-code", "objective.preset_for=sts", "objective.kl=none"]
    assert load_recipe(pairs, settings).objective.kl_weight == 0.3


NO_KL = 'base = "pairs.toml"\n[data]\nnum_negatives = 3\n[objective]\nkl = "none"\n'


@pytest.fixture
def without_kl(pairs: Path, tmp_path: Path) -> Path:
    """A recipe that inherits a weight of the KL which it switches off."""
    pairs.write_text(PAIRS.replace("[objective]", "[objective]\nkl_weight = 0.7"))
    return write(tmp_path, "no_kl.toml", NO_KL)


def test_a_resolved_recipe_is_read_as_it_was_written(without_kl: Path, tmp_path: Path) -> None:
    """It has keys that nothing reads, as a base set them. It loads again, with changes, and as a base."""
    recipe = load_recipe(without_kl)
    assert recipe.objective.kl_weight == 0.7 and not is_read(recipe, "objective.kl_weight")
    path = write(tmp_path, "recipe.toml", as_toml(recipe))
    assert load_recipe(path) == recipe
    assert as_toml(load_recipe(path)) == path.read_text()
    assert load_recipe(path, ["run.resume=auto", "optim.lr=1e-3"]).objective == recipe.objective
    assert load_recipe(path, ["objective.kl=scores"]).objective.kl_weight == 0.7
    grandchild = write(tmp_path, "child.toml", 'base = "recipe.toml"\n[optim]\nlr = 1e-3\n')
    assert load_recipe(grandchild).objective == recipe.objective
    # What is written beside it is judged.
    with pytest.raises(ConfigError, match=r"kl_temperature = 0\.3 is read by nothing"):
        load_recipe(path, ["objective.kl_temperature=0.3"])


@pytest.mark.parametrize(
    ("before", "after", "refused"),
    [
        ("kl_weight = 0.7", "kl_weight = 5.0", "objective.kl_weight = 5.0"),  # inherited before
        ("loss_scale = 1.0", "loss_scale = 0.5", "objective.loss_scale = 0.5"),  # a default before
        ('loss = "infonce"', 'loss = "cosent"', "data.num_negatives = 3"),  # read before
        ('{"objective.kl_weight": 0.7}', "{}", "objective.kl_weight = 0.7"),
        ('{"objective.kl_weight": 0.7}', '{"objective.kl_weight"', "objective.kl_weight = 0.7"),
    ],
)
def test_edits_of_a_resolved_recipe_are_judged(
    before: str, after: str, refused: str, without_kl: Path, tmp_path: Path
) -> None:
    text = as_toml(load_recipe(without_kl))
    assert text.count(before) == 1
    with pytest.raises(ConfigError, match=f"^{re.escape(refused)} is read by nothing"):
        load_recipe(write(tmp_path, "recipe.toml", text.replace(before, after)))


def test_a_comment_above_a_resolved_recipe_changes_nothing(without_kl: Path, tmp_path: Path) -> None:
    text = "# my copy\n\n" + as_toml(load_recipe(without_kl))
    load_recipe(write(tmp_path, "recipe.toml", text))
    with pytest.raises(ConfigError, match=r"^objective\.kl_weight = 5\.0 is read by nothing"):
        load_recipe(write(tmp_path, "recipe.toml", text.replace("kl_weight = 0.7\n", "kl_weight = 5.0\n")))


def test_what_a_resolved_recipe_inherited_may_be_switched_off(pairs: Path, tmp_path: Path) -> None:
    pairs.write_text(f"{PAIRS}\n[evaluation]\nbeir = ['docs']\nevery_steps = 1\nmax_documents = 100\n")
    child = write(tmp_path, "none.toml", 'base = "pairs.toml"\n[evaluation]\nbeir = []\nevery_steps = 0\n')
    text = as_toml(load_recipe(child))
    assert '"evaluation.max_documents": 100' in text
    edited = text.replace("max_documents = 100\n", "max_documents = 0\n")
    assert load_recipe(write(tmp_path, "recipe.toml", edited)).evaluation.max_documents == 0


def test_a_resolved_recipe_of_another_version_is_not_judged(
    without_kl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job in the queue must not be refused after an upgrade for keys that nobody edited."""
    path = write(tmp_path, "recipe.toml", as_toml(load_recipe(without_kl)))
    monkeypatch.setitem(read_keys.READ_WHEN, "log.samples", (read_keys.MASKED,))
    monkeypatch.setattr(load, "_schema", load._schema.__wrapped__)
    path.write_text(path.read_text().replace("samples = false", "samples = true"))
    load_recipe(path)
    # Negative control: an edit of a file that this version wrote is refused.
    mine = as_toml(load_recipe(without_kl)).replace("samples = false", "samples = true")
    with pytest.raises(ConfigError, match=r"^log\.samples = true is read by nothing"):
        load_recipe(write(tmp_path, "mine.toml", mine))


def test_all_keys_that_nothing_reads_are_named_at_once(pairs: Path) -> None:
    settings = ["objective.kl=none", "objective.kl_weight=5", "objective.kl_temperature=0.3"]
    with pytest.raises(ConfigError, match=r"kl_weight = 5.*remove the key; nothing reads objective\.kl_temperature, e"):
        load_recipe(pairs, settings)


def test_resolved_recipes_of_earlier_versions_are_not_judged(pairs: Path, tmp_path: Path) -> None:
    """They do not list what they inherited, and nobody minded keys that were not read."""
    values = tomllib.loads(as_toml(load_recipe(pairs, ["objective.kl=none"])))
    values["objective"] |= {"kl_weight": 5.0, "loss_scale": 0.5}
    path = write(tmp_path, "recipe.toml", tomli_w.dumps(values))
    loaded = load_recipe(path)
    assert (loaded.objective.kl_weight, loaded.objective.loss_scale) == (5.0, 0.5)
    assert load_recipe(write(tmp_path, "again.toml", as_toml(loaded))) == loaded

"""Every shipped recipe, trained by 2 ranks under the real `deepspeed` launcher on a tiny model and real text."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from models.encoder import EmbeddingSettings, build_masked_lm, load_encoder
from tests import ROOT
from tests.launcher import launch
from tests.needs import needed, own
from tests.run_folder import steps_of
from trainer.config import load_recipe, read_toml
from trainer.presets import preset_settings

RECIPES = sorted((ROOT / "launch" / "recipes").glob("*.toml"))
CONTRASTIVE = [path for path in RECIPES if load_recipe(path).objective.name == "contrastive"]
LADDER = [[1, 8], [2, 16], [3, 24], [4, 32], [5, 40], [6, 48]]
REDUCED_LADDER = [[1, 8], [3, 16], [6, 24]]
STATIC_LADDER = [[1, dim] for _, dim in LADDER]


@pytest.fixture(scope="module")
def launched(
    request, launcher, tmp_path_factory, document_shards, tuple_shards, graded_shards, tiny_tokenizer, guide_folder
) -> dict[str, Path]:
    """Recipe name -> run folder, those that are needed in one launch; "NAME-direct" without gradient caching."""
    wanted = needed(request)
    root = tmp_path_factory.mktemp("recipes")
    shape = dict(hidden_size=48, num_hidden_layers=6, num_attention_heads=4, intermediate_size=96)
    shape |= dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model = build_masked_lm(
        {"model_type": "bert", **shape, "max_position_embeddings": 64}, vocab_size=len(tiny_tokenizer), pad_token_id=0
    )
    model.save_pretrained(root / "backbone")
    tiny_tokenizer.save_pretrained(root / "backbone")
    cases = []
    for path in RECIPES:
        values = read_toml(path)
        static = values["model"].get("config", {}).get("model_type") == "static"
        masked = values["objective"]["name"] == "masked"
        graded = values["objective"].get("loss") == "cosent"
        documents = masked and values["objective"].get("pairs") != "tuples"
        shards = document_shards if documents else graded_shards if graded else tuple_shards
        overrides = {
            "run.output": str(root / path.stem),
            "model.ladder": STATIC_LADDER if static else LADDER,
            "data.shards": [str(shards)],
            "data.num_workers": 0,
            "data.max_length": 48,
            "data.query_max_length": 24,
            "data.passage_max_length": 48,
            "train.steps": 2,
            "train.global_batch_size": 8,
            "train.micro_batch_size": 2,
            "log.every_steps": 1,
        }
        if "output_dim" in values["model"]:
            overrides |= {"model.ladder": REDUCED_LADDER, "model.output_dim": REDUCED_LADDER[-1][1]}
        # A recipe from scratch keeps doing so, at a smaller width.
        if static:
            overrides["model.config"] = {**values["model"]["config"], "hidden_size": shape["hidden_size"]}
        elif "config" in values["model"]:
            overrides["model.config"] = {**values["model"]["config"], **shape, "max_position_embeddings": 64}
        else:
            overrides["model.source"] = str(root / "backbone")
        if "guide" in values:
            overrides["guide.model"] = str(guide_folder)
        if values["objective"].get("sizes") == "one":
            overrides["objective.size"] = "2x16"
        arguments = ["--config", str(path)]
        arguments += [f"--{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in overrides.items()]
        if path.stem in wanted:
            cases.append({"task": "masked" if masked else "contrastive", "arguments": arguments})
        if f"{path.stem}-direct" in wanted:
            # As many steps: a curriculum goes by the share of them that is done.
            changed = [f"--run.output={root / path.stem}-direct", "--objective.backward=direct"]
            cases.append({"task": "contrastive", "arguments": [*arguments, *changed]})
        if path.stem == "srl_nli" and "feed" in wanted:
            # The same with all that can be said of how folders are fed.
            feed = {
                "run.output": str(root / "feed"),
                "data.shards": [str(tuple_shards)] * 2,
                "data.mixture_temperature": 2.0,
                "data.batches": "one_dataset",
                "data.no_duplicates": "true",
                "data.query_prompts": ["query: "],
                "data.passage_prompts": ["title: ", "text: "],
            }
            arguments = [*arguments, *(f"--{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in feed.items())]
            cases.append({"task": "contrastive", "arguments": arguments})
    (root / "cases.json").write_text(json.dumps(cases))
    launch("tests.trainer.worker", "runs", str(root / "cases.json"), str(root), ranks=2)
    return {name: root / name for name in wanted}


@pytest.fixture
def trained(request, launched) -> dict[str, Path]:
    return own(request, launched)


@pytest.mark.parametrize("name", [*(path.stem for path in RECIPES), "feed"])
@pytest.mark.needs("{name}")
def test_recipe_trains(name, trained):
    run = trained[name]
    assert (run / "DONE").is_file()
    steps = steps_of(run)
    assert [step["step"] for step in steps] == [1, 2]
    assert all(0 < step["loss"] < 100 for step in steps)
    assert json.loads((run / "environment.json").read_text())["world_size"] == 2
    settings = EmbeddingSettings.load(run / "model")
    resolved = tomllib.loads((run / "recipe.toml").read_text())
    assert settings is not None and settings.pooling == resolved["model"]["pooling"]
    encoder = load_encoder(run / "model")
    assert encoder.num_layers == settings.sizes.full.layers


@pytest.mark.needs("feed")
def test_prompts_are_recorded_where_all_folders_share_one(trained):
    settings = EmbeddingSettings.load(trained["feed"] / "model")
    assert settings is not None
    assert (settings.query_prompt, settings.passage_prompt) == ("query: ", "")
    resolved = tomllib.loads((trained["feed"] / "recipe.toml").read_text())
    assert resolved["data"]["passage_prompts"] == ["title: ", "text: "]


@pytest.mark.parametrize("name", [path.stem for path in CONTRASTIVE])
@pytest.mark.needs("{name}", "{name}-direct")
def test_recipe_trains_without_gradient_caching(name, trained):
    """The same first loss, to what bf16 keeps of texts that are padded otherwise."""
    cached, direct = trained[name], trained[f"{name}-direct"]
    assert tomllib.loads((direct / "recipe.toml").read_text())["objective"]["backward"] == "direct"
    assert (direct / "DONE").is_file()
    assert steps_of(direct)[0]["loss"] == pytest.approx(steps_of(cached)[0]["loss"], rel=0.02)


def test_every_method_has_a_recipe_for_both_fine_tunings():
    """SRL, 2DMSE, MRL, adaptive layers, separate and full, with gradient caching, for STS and for retrieval."""
    for data in ("nli", "msmarco"):
        sizes = {}
        for method in ("srl", "two_d", "mrl", "adaptive_layers", "separate", "full"):
            recipe = load_recipe(ROOT / "launch" / "recipes" / f"{method}_{data}.toml")
            assert recipe.objective.backward == "grad_cache"
            sizes[method] = recipe.objective.sizes
        assert list(sizes.values()) == ["ladder", "two_d", "mrl", "adaptive_layers", "one", "full"]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_passes_every_check(path):
    load_recipe(path)


def test_each_recipe_has_a_folder_of_its_own():
    outputs = [load_recipe(path).run.output for path in RECIPES]
    assert len(set(outputs)) == len(outputs)


def test_published_values():
    """The paper's hyper-parameters (Starbucks §4.1, tables 5 and 6), so that an edit of a recipe is noticed."""
    folder = ROOT / "launch" / "recipes"
    smae = load_recipe(folder / "smae_bert_base_fineweb.toml")
    assert (smae.optim.lr, smae.optim.weight_decay, smae.optim.schedule) == (1e-4, 0.05, "cosine")
    assert (smae.train.global_batch_size, smae.train.epochs, smae.data.max_length) == (512, 1.0, 512)
    assert smae.ladder.names[smae.ladder.sizes[0]] == "demi" and str(smae.ladder.full) == "12x768"
    retrieval = load_recipe(folder / "srl_msmarco.toml")
    assert (retrieval.optim.lr, retrieval.train.epochs, retrieval.train.global_batch_size) == (1e-4, 3.0, 128)
    assert (retrieval.data.num_negatives, retrieval.objective.similarity) == (7, "dot")
    assert (retrieval.objective.temperature, retrieval.data.query_max_length) == (1.0, 32)
    similarity = load_recipe(folder / "srl_nli.toml")
    assert (similarity.optim.lr, similarity.train.epochs, similarity.objective.temperature) == (5e-5, 1.0, 0.05)
    assert similarity.objective.reduction == "mean"
    # SentMAE §2.2.
    retromae = load_recipe(folder / "retromae_bert_base_wikipedia.toml").objective
    assert (retromae.encoder_mask_ratio, retromae.decoder_mask_ratio) == (0.3, 0.5)
    assert (retromae.sizes, retromae.decoding, retromae.pairs) == ("full", "enhanced", "none")
    for name, folders in (("static_retrieval_english", 13), ("static_similarity_multilingual", 19)):
        static = load_recipe(folder / f"{name}.toml")
        assert (static.optim.lr, static.optim.warmup_ratio, static.train.global_batch_size) == (0.2, 0.1, 2048)
        assert [size.dim for size in static.ladder] == [32, 64, 128, 256, 512, 1024]
        assert static.data.no_duplicates and len(set(static.data.shards)) == folders
    for name in ("smae_bert_base_fineweb", "srl_msmarco", "srl_nli"):
        code = load_recipe(folder / f"{name}_released_code.toml")
        plain = load_recipe(folder / f"{name}.toml")
        assert (plain.objective.preset, code.objective.preset) == ("paper", "released-code")
        assert code.objective.preset_for == plain.objective.preset_for
        # Nothing that the presets differ in is written out, so the whole column holds.
        changed = preset_settings(plain.objective.name, "released-code", plain.objective.preset_for)
        for key, value in changed.items():
            section, _, field = key.partition(".")
            assert getattr(getattr(code, section), field) == value

"""Every shipped recipe, trained by 2 ranks under the real `deepspeed` launcher on a tiny model and real text."""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from data.tokens import load_tokenizer
from models.encoder import build_masked_lm, load_encoder
from models.settings import EmbeddingSettings
from tests import ROOT
from tests.needs import needed, own
from tests.ranks import run_ranks
from tests.run_folder import steps_of
from tests.trainer.conftest import tuple_file
from tests.trainer.recipe_starts import END, INSTRUCT, QUERY_LENGTH, SIMILARITY, STARTS
from trainer import teacher_vectors
from trainer.config.load import load_recipe, read_toml
from trainer.config.presets import preset_settings
from trainer.config.read_keys import is_read
from trainer.exporting.model_folder import write_model_folder

pytestmark = pytest.mark.long

RECIPES = sorted((ROOT / "launch" / "recipes").glob("*.toml"))
NLI = {path.stem for path in RECIPES if "nli" in path.stem}
# A token table caches nothing. Of two recipes that differ in their data alone, the one on NLI is enough.
CACHED = [
    path
    for path in RECIPES
    if is_read(load_recipe(path), "objective.backward")
    and ("msmarco" not in path.stem or path.stem.replace("msmarco", "nli") not in NLI)
]
OUTPUTS = [load_recipe(path).run.output for path in RECIPES]
LADDER = [[1, 8], [2, 16], [3, 24], [4, 32], [5, 40], [6, 48]]
REDUCED_LADDER = [[1, 8], [3, 16], [6, 24]]
STATIC_LADDER = [[1, dim] for _, dim in LADDER]


@pytest.fixture(scope="module")
def launched(
    request,
    launcher,
    tmp_path_factory,
    document_shards,
    tuple_shards,
    crowded_shards,
    graded_shards,
    tiny_tokenizer,
    guide_folder,
    docstrings,
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
        task = values["objective"]["name"]
        graded = values["objective"].get("loss") == "cosent"
        documents = task == "distill" or (task == "masked" and values["objective"].get("pairs") != "tuples")
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
        if "teacher" in values:
            overrides |= {"teacher.model": str(root / "backbone"), "teacher.pooling": "mean"}
        stored = "store" in values.get("guide", {})
        if stored:
            frozen = {"model": str(root / "frozen"), "store": str(root / f"{path.stem}-vectors")}
            overrides |= {
                f"{section}.{key}": value for section in ("guide", "teacher") for key, value in frozen.items()
            }
        if values["objective"].get("sizes") == "one":
            overrides["objective.size"] = "2x16"
        if (source := values["model"].get("source")) in STARTS and wanted & {path.stem, f"{path.stem}-direct"}:
            (root / f"{path.stem}-start").mkdir()
            start = STARTS[source](root / f"{path.stem}-start", docstrings[:200])
            overrides |= {"model.source": str(start.model), "data.shards": [str(start.shards)]}
            overrides["data.query_max_length"] = QUERY_LENGTH
        recipe = load_recipe(path, ["train.steps=2"])
        arguments = ["--config", str(path)]
        arguments += [
            f"--{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in overrides.items() if is_read(recipe, k)
        ]
        if path.stem in wanted:
            cases.append({"task": task, "arguments": arguments})
        if stored and {path.stem, f"{path.stem}-direct"} & set(wanted):
            settings = EmbeddingSettings("mean", ladder=((6, 48),))
            write_model_folder(root / "frozen", model.base_model, tiny_tokenizer, settings, nn.ModuleDict())
            teacher_vectors.main(
                [*arguments, "--texts", str(tuple_file(root / "texts.jsonl", docstrings, of="tuples"))]
            )
        if f"{path.stem}-direct" in wanted:
            # Stopped after the first of as many steps: a curriculum goes by the share of them that is done.
            changed = [f"--run.output={root / path.stem}-direct", "--objective.backward=direct"]
            changed += ["--train.stop_at_step=1", "--log.tensorboard=false"]
            cases.append({"task": "contrastive", "arguments": [*arguments, *changed]})
        if path.stem == "srl_nli" and "feed" in wanted:
            # The same with all that can be said of how folders are fed.
            feed = {
                "run.output": str(root / "feed"),
                "data.shards": [str(tuple_shards), str(crowded_shards)],
                "data.mixture_temperature": 2.0,
                "data.batches": "one_dataset",
                "data.no_duplicates": "true",
                "data.query_prompts": ["query: "],
                "data.passage_prompts": ["title: ", "text: "],
            }
            arguments = [*arguments, *(f"--{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in feed.items())]
            cases.append({"task": "contrastive", "arguments": arguments})
    (root / "cases.json").write_text(json.dumps(cases))
    run_ranks("tests.trainer.worker", "runs", str(root / "cases.json"), str(root), ranks=2)
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
    resolved = tomllib.loads((run / "recipe.toml").read_text())
    # ESE's targets are vectors times singular values, from which a random model's coordinates are far.
    most = 1000 if resolved["objective"].get("compression_weight") else 100
    assert all(0 < step["loss"] < most for step in steps)
    assert json.loads((run / "environment.json").read_text())["world_size"] == 2
    settings = EmbeddingSettings.load(run / "model")
    assert settings is not None and settings.pooling == resolved["model"]["pooling"]
    encoder = load_encoder(run / "model")
    assert encoder.num_layers == settings.sizes.full.layers


@pytest.mark.needs("srl_qwen3_0_6b_msmarco", "srl_embeddinggemma_300m_nli", "resize_qwen3_embedding_0_6b")
def test_what_a_named_model_is_stays_so(trained):
    """Prompts, of the shards or of the model; the direction; the closing token; a map of every depth for Dense."""
    expected = {
        "srl_qwen3_0_6b_msmarco": ("last", "causal", INSTRUCT, ""),
        "srl_embeddinggemma_300m_nli": ("mean", "bidirectional", SIMILARITY, SIMILARITY),
        "resize_qwen3_embedding_0_6b": ("last", "causal", INSTRUCT, ""),
    }
    for name, wanted in expected.items():
        model = trained[name] / "model"
        settings = EmbeddingSettings.load(model)
        assert settings is not None
        assert (settings.pooling, settings.direction, settings.query_prompt, settings.passage_prompt) == wanted
        tokenizer, encoder = load_tokenizer(model), load_encoder(model)
        assert tokenizer("a text").input_ids[-1] == tokenizer.convert_tokens_to_ids("</s>" if "gemma" in name else END)
        assert sorted(map(int, encoder.heads)) == ([1, 2, 3, 4, 5, 6] if "gemma" in name else [])


@pytest.mark.needs("feed")
def test_prompts_are_recorded_where_all_folders_share_one(trained):
    settings = EmbeddingSettings.load(trained["feed"] / "model")
    assert settings is not None
    assert (settings.query_prompt, settings.passage_prompt) == ("query: ", "")
    resolved = tomllib.loads((trained["feed"] / "recipe.toml").read_text())
    assert resolved["data"]["passage_prompts"] == ["title: ", "text: "]


@pytest.mark.parametrize("name", [path.stem for path in CACHED])
@pytest.mark.needs("{name}", "{name}-direct")
def test_recipe_trains_without_gradient_caching(name, trained):
    """The same first loss, to what bf16 keeps of texts that are padded otherwise."""
    cached, direct = trained[name], trained[f"{name}-direct"]
    assert tomllib.loads((direct / "recipe.toml").read_text())["objective"]["backward"] == "direct"
    (first,) = steps_of(direct)
    assert first["loss"] == pytest.approx(steps_of(cached)[0]["loss"], rel=0.02)


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
def test_recipe_is_what_it_says(path):
    """The shipped values pass every check, and each run has a folder of its own."""
    assert OUTPUTS.count(load_recipe(path).run.output) == 1


# --- what is published ---------------------------------------------------------------------------------------------

TABLE = ROOT / "docs" / "objectives.md"
# A recipe whose head says one of these promises the numbers of a publication.
PROMISES = ("as published", "as released")
# How a run is carried out, where it starts and which preset it names: no numbers of a publication.
CARRIED_OUT = (
    *("run.", "engine.", "checkpoint.", "log.", "data.shards", "data.num_workers", "train.micro_batch_size"),
    *("model.source", "objective.name", "objective.preset"),
)


def published_rows(markdown: str) -> list[tuple[str, str, Any, str]]:
    """(recipe, key, value, where) of the table "Published numbers", one for each recipe of a row."""
    section = markdown.split("## Published numbers\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    assert lines[0] == "| recipe | key | value | where |"
    rows = []
    for line in lines[2:]:
        recipes, key, value, where = (cell.strip() for cell in line.strip("|").split(" | "))
        for recipe in recipes.split(", "):
            rows.append(
                (recipe.strip("`"), key.strip("`"), tomllib.loads(f"value = {value.strip('`')}")["value"], where)
            )
    return rows


def promises(path: Path) -> bool:
    head = path.read_text("utf-8").split("\n\n")[0]
    return any(promise in " ".join(head.replace("#", " ").split()) for promise in PROMISES)


def set_keys(path: Path) -> dict[str, Any]:
    """The keys with numbers or choices that a recipe, its bases or its preset set and that it reads: their values."""
    recipe = load_recipe(path)
    flat = {f"{s}.{key}": value for s, table in dataclasses.asdict(recipe).items() for key, value in table.items()}
    written = {f"{section}.{key}" for section, table in read_toml(path).items() for key in table}
    chosen = recipe.objective
    written |= set(preset_settings(chosen.name, chosen.preset, chosen.preset_for))
    return {key: flat[key] for key in written if not key.startswith(CARRIED_OUT) and is_read(recipe, key)}


def faults(rows: list[tuple[str, str, Any, str]]) -> list[str]:
    """What the table and the recipes do not agree in."""
    found = []
    told = {(recipe, key): value for recipe, key, value, _ in rows}
    if len(told) < len(rows):
        found.append("a key of a recipe stands in two rows")
    promising = {path.stem: set_keys(path) for path in RECIPES if promises(path)}
    for recipe, key, value, where in rows:
        if recipe not in promising:
            found.append(f"{recipe} has a row and promises nothing")
        elif key not in promising[recipe]:
            found.append(f"{recipe}: {key} has a row and is not set")
        elif promising[recipe][key] != value:
            found.append(f"{recipe}: {key} is {promising[recipe][key]!r}, published {value!r} ({where})")
        if not where:
            found.append(f"{recipe}: {key} has no place")
    for recipe, keys in promising.items():
        found += [f"{recipe}: {key} = {keys[key]!r} has no row" for key in sorted(keys) if (recipe, key) not in told]
    return found


def test_recipes_are_what_is_published():
    """Every row of docs/objectives.md's table is the loaded recipe's value, and every published number has a row."""
    rows = published_rows(TABLE.read_text("utf-8"))
    assert not faults(rows)
    assert {recipe for recipe, *_ in rows} == {path.stem for path in RECIPES if promises(path)}
    # The papers' own recipes are among them, by name.
    promising = {"smae_bert_base_fineweb", "srl_nli", "srl_msmarco", "retromae_bert_base_wikipedia"}
    assert promising < {recipe for recipe, *_ in rows}


def test_a_wrong_row_is_noticed():
    """Negative controls: wrong value, missing row, row of a key that is not set, recipe without a promise, two rows."""
    rows = published_rows(TABLE.read_text("utf-8"))
    place = next(n for n, row in enumerate(rows) if row[:2] == ("srl_nli", "objective.kl_weight"))
    recipe, key, value, where = rows[place]
    assert value == 0.3

    def changed(*instead: tuple[str, str, Any, str]) -> list[str]:
        return faults([*rows[:place], *instead, *rows[place + 1 :]])

    assert changed((recipe, key, 1.0, where)) == [f"srl_nli: {key} is 0.3, published 1.0 ({where})"]
    assert changed() == [f"srl_nli: {key} = 0.3 has no row"]
    assert changed((recipe, key, value, "")) == [f"srl_nli: {key} has no place"]
    assert "demo_srl has a row and promises nothing" in changed(("demo_srl", key, value, where))
    assert "srl_nli: objective.pair_weight has a row and is not set" in changed(
        (recipe, key, value, where), (recipe, "objective.pair_weight", 1.0, where)
    )
    assert changed(rows[place], rows[place]) == ["a key of a recipe stands in two rows"]


# What names a place: a section, equation, table, file, script or library; or that a value is ours.
PLACE = re.compile(
    r"§|\beq\. \d|\btable \d|\bREADME\b|\bscript\b|\w/\w+\.py\b|\bsentence-transformers\b|\bthe default of\b|\bours\b"
)


def without_place(name: str, text: str) -> list[str]:
    """The values of a recipe's own text that have no place in a comment on their line."""
    found, section = [], ""
    for line in text.splitlines():
        if header := re.fullmatch(r"\[(\w+)\]", line):
            section = header[1]
        elif (setting := re.match(r"(\w+) = (.*)", line)) and section:
            key, comment = f"{section}.{setting[1]}", setting[2].partition("  # ")[2]
            if not key.startswith(CARRIED_OUT) and not PLACE.search(comment):
                found.append(f"{name}: {key} has no place beside it")
    return found


@pytest.mark.parametrize("path", [path for path in RECIPES if promises(path)], ids=lambda path: path.stem)
def test_published_values_have_their_place_beside_them(path):
    assert not without_place(path.stem, path.read_text("utf-8"))


def test_a_missing_place_is_noticed():
    """Negative controls: each comment removed or empty of a place, one at a time."""
    path = next(path for path in RECIPES if path.stem == "espresso_nli")
    text = path.read_text("utf-8")
    settings = {line.split(" = ")[0]: line for line in text.splitlines() if re.match(r"\w+ = .*  # ", line)}
    assert {"ladder", "compression_weight", "lr", "global_batch_size"} < set(settings)
    for key, line in settings.items():
        for comment in ("", "  # a usual value"):
            changed = text.replace(line, line.partition("  # ")[0] + comment)
            assert [each.split(".")[1] for each in without_place("r", changed)] == [f"{key} has no place beside it"]
    assert not without_place("r", "[run]\noutput = 'x'\n[train]\nmicro_batch_size = 32\n")


def test_presets_hold_in_the_recipes_that_name_them():
    """Nothing that the presets differ in is written out, so the whole column holds."""
    folder = ROOT / "launch" / "recipes"
    for name in ("smae_bert_base_fineweb", "srl_msmarco", "srl_nli"):
        code = load_recipe(folder / f"{name}_released_code.toml")
        plain = load_recipe(folder / f"{name}.toml")
        assert (plain.objective.preset, code.objective.preset) == ("paper", "released-code")
        assert code.objective.preset_for == plain.objective.preset_for
        changed = preset_settings(plain.objective.name, "released-code", plain.objective.preset_for)
        for key, value in changed.items():
            section, _, field = key.partition(".")
            assert getattr(getattr(code, section), field) == value


STATIC = {"static_retrieval_english": 13, "static_similarity_multilingual": 19}
# Rows of a set that the training scripts take, and those they hold out of it where they do not hold out 10,000.
CUT = {
    "s2orc_title_abstract": 100_000,
    "parallel_europarl": 5_000_000,
    "parallel_opensubtitles": 5_000_000,
    "wikianswers_duplicates": 10_000_000,
}
HELD_OUT = {"trivia_qa": 5_000, "pubmedqa_triplet_20": 100, "negation": 100, "all_nli": 0}


def test_published_sets_are_cut_and_held_out_as_published():
    """docs/static.md names each folder of the two recipes once, with its limit and its rows held out."""
    folders = []
    for name, count in STATIC.items():
        shards = load_recipe(ROOT / "launch" / "recipes" / f"{name}.toml").data.shards
        assert len(set(shards)) == count
        folders += [folder for folder in shards if folder not in folders]
    section = (ROOT / "docs" / "static.md").read_text("utf-8").split("## The published sets\n")[1].split("\n## ")[0]
    lines = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| `")]
    # The page's other table, of columns, has three cells in a row.
    rows = {cells[0].strip(" `"): [cell.strip() for cell in cells[1:]] for cells in lines if len(cells) == 4}
    assert [f"shards/{folder}" for folder in rows] == folders
    for folder, (source, limit, held_out) in rows.items():
        assert int(held_out.replace(",", "")) == HELD_OUT.get(folder, 10_000), folder
        taken = CUT.get(folder)
        assert limit == (f"{taken - HELD_OUT.get(folder, 10_000):,} ({taken:,})" if taken else ""), folder
        assert len(re.findall("/", source)) == 1, folder

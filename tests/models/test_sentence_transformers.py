"""Folders of sentence-transformers in both layouts: the vectors that the library gives, or one sentence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from data.model_folders import transformer_folder
from data.tokens import load_tokenizer, tokenizer_fingerprint
from models.encoder import load_encoder, load_masked_lm
from models.sentence_transformers import read_sentence_model
from models.settings import EmbeddingSettings
from models.sizes import ModelError
from trainer.evaluation.encoding.encode import embedder_of
from trainer.evaluation.subject import load_model

sentence_transformers = pytest.importorskip("sentence_transformers", reason="needs the package sentence-transformers")

WIDTH = 32
POSITIONS = 64
LAYOUTS = ("newest", "long-standing", "in a folder of its own")
Make = Callable[..., Path]


def write_json(path: Path, values: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values), encoding="utf-8")


def change(path: Path, **values: Any) -> None:
    write_json(path, {**(json.loads(path.read_text("utf-8")) if path.exists() else {}), **values})


def in_older_layout(folder: Path) -> None:
    """What versions before 6 wrote, of the same model."""
    modules = json.loads((folder / "modules.json").read_text("utf-8"))
    for module in modules:
        module["type"] = f"sentence_transformers.models.{module['type'].rpartition('.')[2]}"
    write_json(folder / "modules.json", modules)
    pooling = json.loads((folder / "1_Pooling" / "config.json").read_text("utf-8"))
    modes = {"cls": "cls_token", "mean": "mean_tokens", "lasttoken": "lasttoken", "weightedmean": "weightedmean_tokens"}
    flags = {f"pooling_mode_{name}": mode == pooling["pooling_mode"] for mode, name in modes.items()}
    write_json(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": WIDTH, **flags})
    length = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))["model_max_length"]
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": length, "do_lower_case": False})
    change(folder / "tokenizer_config.json", model_max_length=10**30)
    for path in folder.glob("*_Normalize"):
        shutil.rmtree(path)


def in_own_folder(folder: Path) -> None:
    """As the oldest folders are: the transformer in 0_Transformer."""
    own = folder / "0_Transformer"
    own.mkdir()
    for path in list(folder.iterdir()):
        if path.is_file() and path.name not in ("modules.json", "config_sentence_transformers.json", "README.md"):
            path.rename(own / path.name)
    modules = json.loads((folder / "modules.json").read_text("utf-8"))
    modules[0]["path"] = "0_Transformer"
    write_json(folder / "modules.json", modules)


@pytest.fixture(scope="module")
def make(tiny_tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """A small BERT that sentence-transformers has saved."""

    def make(
        layout: str = "newest",
        *,
        pooling: str | tuple[str, ...] = "mean",
        length: int = 24,
        dense: tuple[torch.nn.Module, ...] = (),
        normalised: bool = True,
        **about: Any,
    ) -> Path:
        base, folder = tmp_path_factory.mktemp("base"), tmp_path_factory.mktemp("model")
        torch.manual_seed(5)
        shape = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
        config = BertConfig(
            vocab_size=len(tiny_tokenizer), hidden_size=WIDTH, max_position_embeddings=POSITIONS, **shape
        )
        bert = BertModel(config)
        with torch.no_grad():
            for parameter in bert.parameters():
                parameter += 0.2 * torch.randn_like(parameter)
        bert.save_pretrained(base)
        tiny_tokenizer.save_pretrained(base)
        models = sentence_transformers.sentence_transformer.modules
        modules = [models.Transformer(str(base), max_seq_length=length), models.Pooling(WIDTH, pooling), *dense]
        if normalised:
            modules.append(models.Normalize())
        model = sentence_transformers.SentenceTransformer(modules=modules, device="cpu", **about)
        model.save(str(folder), create_model_card=False)
        if layout != "newest":
            in_older_layout(folder)
        if layout == "in a folder of its own":
            in_own_folder(folder)
        return folder

    return make


def dense_of(width_in: int, width_out: int, **values: Any) -> Any:
    values = {"activation_function": torch.nn.Identity(), **values}
    return sentence_transformers.sentence_transformer.modules.Dense(width_in, width_out, **values)


def our_vectors(folder: Path, texts: list[str], *, side: str = "query", **changes: Any) -> np.ndarray:
    """Of the full size, through the functions that evaluation uses."""
    encoder, tokenizer, settings = load_model(folder, **changes)
    assert settings is not None
    full = settings.sizes.full
    return embedder_of(encoder, tokenizer, [full], device="cpu")(
        texts,
        similarity=settings.similarity,
        max_length=getattr(settings, f"{side}_max_length"),
        prompt=getattr(settings, f"{side}_prompt"),
    )[full]


def their_vectors(folder: Path, texts: list[str], *, side: str = "query") -> np.ndarray:
    model = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
    return (model.encode_query if side == "query" else model.encode_document)(texts)


@pytest.fixture(scope="module")
def texts(docstrings: list[str]) -> list[str]:
    found = docstrings[:16]
    assert max(len(text) for text in found) > 400  # some are cut at the maximal length
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("pooling", "normalised", "similarity"), [("mean", True, "cosine"), ("cls", False, "dot")])
def test_vectors_are_the_librarys(
    layout: str, pooling: str, normalised: bool, similarity: str, make: Make, texts: list[str]
) -> None:
    prompts = {"query": "find: ", "document": "text of it: "}
    folder = make(layout, pooling=pooling, normalised=normalised, similarity_fn_name=similarity, prompts=prompts)
    for side in ("query", "passage"):
        ours, theirs = our_vectors(folder, texts, side=side), their_vectors(folder, texts, side=side)
        np.testing.assert_allclose(ours, theirs, atol=2e-6 * np.abs(theirs).max())
    # Negative controls: another pooling, no prompt, another length.
    other = "cls" if pooling == "mean" else "mean"
    assert np.abs(our_vectors(folder, texts, side="passage", pooling=other) - theirs).max() > 0.01
    change(folder / "config_sentence_transformers.json", prompts={})
    assert np.abs(our_vectors(folder, texts, side="passage") - theirs).max() > 0.01


@pytest.mark.parametrize("layout", LAYOUTS[:2])
@pytest.mark.parametrize("pooling", ["lasttoken", "weightedmean"])
def test_poolings_of_decoders_are_the_librarys(pooling: str, layout: str, make: Make, texts: list[str]) -> None:
    folder = make(layout, pooling=pooling)
    ours = our_vectors(folder, texts)
    np.testing.assert_allclose(ours, their_vectors(folder, texts), atol=2e-6)
    assert np.abs(our_vectors(folder, texts, pooling="mean") - ours).max() > 0.01  # the control


@pytest.mark.parametrize("layout", LAYOUTS[:2])
@pytest.mark.parametrize("pooling", ["mean", "weightedmean", "lasttoken"])
def test_prompts_that_are_left_out_of_the_pooling(pooling: str, layout: str, make: Make, texts: list[str]) -> None:
    folder = make(layout, pooling=pooling, prompts={"query": "query: ", "document": "the text of a page: "})
    pooled = our_vectors(folder, texts)
    change(folder / "1_Pooling" / "config.json", include_prompt=False)
    settings = EmbeddingSettings.load(folder)
    # The last token is none of the prompt's, so there is nothing to leave out.
    assert settings is not None and settings.pool_prompt == (pooling == "lasttoken")
    for side in ("query", "passage"):
        np.testing.assert_allclose(
            our_vectors(folder, texts, side=side), their_vectors(folder, texts, side=side), atol=2e-6
        )
    assert (np.abs(our_vectors(folder, texts) - pooled).max() > 0.01) != settings.pool_prompt  # the control


@pytest.mark.parametrize("layout", LAYOUTS)
def test_settings_are_the_folders(layout: str, make: Make, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    folder = make(layout, pooling="cls", prompts={"query": "q: ", "document": "d: "})
    settings = EmbeddingSettings.load(folder)
    assert settings == EmbeddingSettings("cls", "cosine", ((2, WIDTH),), 24, 24, "q: ", "d: ")
    assert tokenizer_fingerprint(load_tokenizer(folder)) == tokenizer_fingerprint(tiny_tokenizer)
    assert transformer_folder(folder) == (folder / "0_Transformer" if layout == LAYOUTS[2] else folder)


@pytest.mark.parametrize("length", [40, 10_000])
def test_lengths_are_clipped_to_the_position_table(length: int, make: Make) -> None:
    settings = EmbeddingSettings.load(make("long-standing", length=length))
    assert settings is not None
    assert (settings.query_max_length, settings.passage_max_length) == (min(length, POSITIONS),) * 2


def test_without_a_length_the_position_table_is_the_limit(make: Make) -> None:
    folder = make("long-standing")
    write_json(folder / "sentence_bert_config.json", {})
    settings = EmbeddingSettings.load(folder)
    assert settings is not None
    assert settings.passage_max_length == POSITIONS


@pytest.mark.parametrize(
    ("normalised", "named", "similarity"),
    [
        (True, "cosine", "cosine"),
        (False, "cosine", "cosine"),
        (True, "dot", "cosine"),
        (False, "dot", "dot"),
        (True, None, "cosine"),
        (False, None, "cosine"),
    ],
)
def test_unit_vectors_are_compared_by_cosine(normalised: bool, named: str | None, similarity: str, make: Make) -> None:
    folder = make(normalised=normalised)
    change(folder / "config_sentence_transformers.json", similarity_fn_name=named)
    settings = EmbeddingSettings.load(folder)
    assert settings is not None
    assert settings.similarity == similarity


@pytest.mark.parametrize(
    ("prompts", "default", "expected"),
    [
        ({"query": "q: ", "passage": "p: "}, None, ("q: ", "p: ")),
        ({"query": "q: ", "document": "", "passage": "p: "}, None, ("q: ", "p: ")),
        ({"query": "q: ", "document": "d: ", "passage": "p: "}, "query", ("q: ", "d: ")),
        ({"query": None, "document": "", "all": "a: "}, "all", ("a: ", "a: ")),
        ({"query": "", "document": "", "other": "o: "}, None, ("", "")),
    ],
)
def test_prompts(prompts: dict[str, str], default: str | None, expected: tuple[str, str], make: Make) -> None:
    folder = make()
    change(folder / "config_sentence_transformers.json", prompts=prompts, default_prompt_name=default)
    settings = EmbeddingSettings.load(folder)
    assert settings is not None
    assert (settings.query_prompt, settings.passage_prompt) == expected


@pytest.mark.parametrize("layout", LAYOUTS)
def test_dense_modules_are_one_linear_map(layout: str, make: Make, texts: list[str]) -> None:
    torch.manual_seed(1)
    folder = make(
        layout, dense=(dense_of(WIDTH, 48), dense_of(48, 20, bias=False), dense_of(20, 20, use_residual=True))
    )
    found = read_sentence_model(folder)
    assert found is not None
    linear = found.linear_map(WIDTH)
    assert linear is not None
    assert linear.weight.shape == (20, WIDTH) and linear.bias.shape == (20,)
    settings = EmbeddingSettings.load(folder)
    assert settings is not None
    assert settings.ladder == ((2, 20),)
    encoder = load_encoder(folder)
    assert encoder.embedding_size == 20
    assert list(encoder.heads) == ["1", "2"]  # a depth is as a folder cut to its layers would be
    np.testing.assert_allclose(our_vectors(folder, texts), their_vectors(folder, texts), atol=2e-6)


def test_barista_json_goes_before_modules_json(make: Make) -> None:
    folder = make(pooling="mean")
    ours = EmbeddingSettings("cls", "dot", ((1, 8), (2, WIDTH)), 10, 20)
    ours.save(folder)
    assert EmbeddingSettings.load(folder) == ours
    assert load_encoder(folder).pooling == "cls"


def test_a_folder_without_modules_json_has_no_settings(make: Make) -> None:
    folder = make()
    (folder / "modules.json").unlink()
    assert EmbeddingSettings.load(folder) is None
    assert load_encoder(folder).pooling == "cls"


def test_pre_training_starts_from_the_transformer(make: Make) -> None:
    assert load_masked_lm(make("in a folder of its own"))[0].config.hidden_size == WIDTH


def set_module(folder: Path, index: int, **values: Any) -> None:
    modules = json.loads((folder / "modules.json").read_text("utf-8"))
    modules[index] |= values
    write_json(folder / "modules.json", modules)


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "max pooling": (lambda f: change(f / "1_Pooling/config.json", pooling_mode="max"), "pools by max"),
    "mean by the root": (
        lambda f: write_json(f / "1_Pooling/config.json", {"pooling_mode_mean_sqrt_len_tokens": True}),
        "pools by mean_sqrt_len_tokens",
    ),
    "two poolings": (
        lambda f: write_json(
            f / "1_Pooling/config.json", {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}
        ),
        "pools by cls and mean",
    ),
    "first token after the prompt": (
        lambda f: (
            change(f / "1_Pooling/config.json", include_prompt=False, pooling_mode="cls"),
            change(f / "config_sentence_transformers.json", prompts={"query": "q: "}),
        ),
        "its vector is the state of the first token after the prompt",
    ),
    "unknown module": (
        lambda f: set_module(f, 1, type="sentence_transformers.models.WeightedLayerPooling"),
        "its modules are Transformer, WeightedLayerPooling, Normalize",
    ),
    "router": (lambda f: set_module(f, 0, type="sentence_transformers.models.Router"), "its modules are Router"),
    "another order": (
        lambda f: write_json(f / "modules.json", json.loads((f / "modules.json").read_text("utf-8"))[::-1]),
        "its modules are Normalize, Pooling, Transformer",
    ),
    "own code": (
        lambda f: set_module(f, 0, type="custom_st.Transformer"),
        "'custom_st.Transformer' is code of its own",
    ),
    "trust_remote_code": (
        lambda f: change(f / "sentence_bert_config.json", model_args={"trust_remote_code": True}),
        "loaded with trust_remote_code",
    ),
    "another task": (
        lambda f: change(f / "sentence_bert_config.json", transformer_task="sequence-classification"),
        "has a transformer_task of another kind",
    ),
    "cross encoder": (
        lambda f: change(f / "config_sentence_transformers.json", model_type="CrossEncoder"),
        "is a 'CrossEncoder' and no SentenceTransformer",
    ),
    "similarity": (
        lambda f: change(f / "config_sentence_transformers.json", similarity_fn_name="manhattan"),
        "compares vectors by 'manhattan'",
    ),
    "cut at the left": (
        lambda f: change(f / "tokenizer_config.json", truncation_side="left"),
        "cuts texts at the left",
    ),
    "lower case": (
        lambda f: (
            change(f / "sentence_bert_config.json", do_lower_case=True),
            change(f / "tokenizer.json", normalizer={"type": "NFC"}),
        ),
        "asks for lower case",
    ),
    "damaged list": (lambda f: (f / "modules.json").write_text("[{"), "modules.json is no JSON"),
    "no module": (lambda f: write_json(f / "modules.json", []), "lists no module"),
    "escape": (lambda f: set_module(f, 1, path="../other"), "outside of its folder"),
    "no pooling file": (lambda f: shutil.rmtree(f / "1_Pooling"), "1_Pooling/config.json cannot be read"),
    "wrong type": (lambda f: change(f / "sentence_bert_config.json", max_seq_length="long"), "max_seq_length = 'long'"),
    "length": (lambda f: change(f / "sentence_bert_config.json", max_seq_length=0), "cuts texts at 0 tokens"),
}


@pytest.fixture(scope="module")
def plain(make: Make) -> Path:
    return make()


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_computed_is_refused(what: str, plain: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(plain, folder)
    break_it, words = REFUSED[what]
    break_it(folder)
    for load in (EmbeddingSettings.load, load_encoder):
        with pytest.raises(ModelError, match=words) as caught:
            load(folder)
        assert str(folder) in str(caught.value)
        assert "\n" not in str(caught.value) and "; " in str(caught.value)


def test_lower_case_that_the_tokenizer_gives_is_no_matter(plain: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(plain, folder)
    change(folder / "sentence_bert_config.json", do_lower_case=True)
    assert EmbeddingSettings.load(folder) == EmbeddingSettings.load(plain)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"activation_function": torch.nn.Tanh()}, "2_Dense has the activation Tanh"),
        ({"module_output_name": "other"}, "2_Dense does not take and give the pooled vector"),
    ],
)
def test_a_dense_module_that_is_no_linear_map_is_refused(values: dict[str, Any], words: str, make: Make) -> None:
    folder = make(dense=(dense_of(WIDTH, 8, **values),))
    for load in (EmbeddingSettings.load, load_encoder):
        with pytest.raises(ModelError, match=words):
            load(folder)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda tensors: {"linear.weight": tensors["linear.weight"]}, "do not fit its config.json"),
        (lambda tensors: {**tensors, "linear.bias": tensors["linear.bias"] * float("nan")}, "NaN or infinity"),
        (None, "neither model.safetensors nor pytorch_model.bin"),
    ],
)
def test_a_damaged_dense_module_is_refused(function: Callable[[Any], Any] | None, words: str, make: Make) -> None:
    folder = make(dense=(dense_of(WIDTH, 8),))
    path = folder / "2_Dense" / "model.safetensors"
    tensors = load_file(path)
    path.unlink()
    if function is not None:
        save_file(function(tensors), path)
    with pytest.raises(ModelError, match=words):
        load_encoder(folder)


def test_a_dense_module_of_another_width_is_refused(make: Make) -> None:
    folder = make(dense=(dense_of(WIDTH, 8), dense_of(9, 4)))
    with pytest.raises(ModelError, match="3_Dense takes vectors of 9 dimensions, and is given 8"):
        load_encoder(folder)


def test_weights_of_older_versions_are_read(make: Make, texts: list[str]) -> None:
    folder = make(dense=(dense_of(WIDTH, 8),))
    expected = our_vectors(folder, texts)
    path = folder / "2_Dense" / "model.safetensors"
    torch.save(load_file(path), folder / "2_Dense" / "pytorch_model.bin")
    path.unlink()
    assert np.array_equal(our_vectors(folder, texts), expected)


def test_a_hub_name_is_read_from_the_cache(
    make: Make, texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, revision = make(prompts={"query": "q: ", "document": "d: "}), "a" * 40
    snapshot = tmp_path / "models--some--model" / "snapshots" / revision
    shutil.copytree(folder, snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text(revision)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert EmbeddingSettings.load("some/model") == EmbeddingSettings.load(folder)
    assert np.array_equal(our_vectors("some/model", texts), our_vectors(folder, texts))  # type: ignore[arg-type]
    assert EmbeddingSettings.load("some/other") is None


def test_a_hub_name_with_a_folder_for_its_transformer_is_refused(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "models--some--model" / "snapshots" / ("a" * 40)
    shutil.copytree(make("in a folder of its own"), snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("a" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match="keeps its transformer in the folder 0_Transformer"):
        EmbeddingSettings.load("some/model")

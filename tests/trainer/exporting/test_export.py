"""Exports: sentence-transformers loads every folder as it stands and gives the vectors that our own `encode` gives."""

from __future__ import annotations

import copy
import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, PreTrainedTokenizerFast

from data.ground.errors import ConfigError, OtherFormat
from data.tokens import load_tokenizer, rows_needed, tokenizer_fingerprint, vocabulary_of
from models.encoder import load_encoder
from models.settings import EmbeddingSettings
from models.sizes import ModelError, Size
from tests.trainer.exports import LADDER, our_vectors, write_model
from trainer import export
from trainer.evaluation.subject import load_model
from trainer.exporting.sizes import export_sizes

sentence_transformers = pytest.importorskip("sentence_transformers", reason="needs the package sentence-transformers")

ModelFactory = Callable[..., Path]


@pytest.fixture(scope="module")
def make_model(tiny_tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> ModelFactory:
    def make(family: str, *args: str, **more: object) -> Path:
        return write_model(tmp_path_factory.mktemp(family), tiny_tokenizer, family, *args, **more)  # type: ignore[arg-type]

    return make


@pytest.mark.parametrize(
    ("family", "pooling", "similarity"),
    [
        ("bert", "cls", "cosine"),
        ("bert", "mean", "dot"),
        ("roberta", "cls", "dot"),
        ("distilbert", "mean", "cosine"),
        ("modernbert", "mean", "dot"),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                ("roberta", "mean", "cosine"),
                ("distilbert", "cls", "dot"),
                ("modernbert", "cls", "cosine"),
            )
        ),
    ],
)
def test_sentence_transformers_gives_our_vectors(
    family: str, pooling: str, similarity: str, make_model: ModelFactory, docstrings: list[str], tmp_path: Path
) -> None:
    texts = docstrings[:24]
    assert max(len(text) for text in texts) > 400  # some are cut at the maximal length
    model = make_model(family, pooling, similarity)
    sizes = [Size(*pair) for pair in LADDER]
    folders = export_sizes(model, tmp_path / "export")
    assert list(folders) == ["1x8", "2x12", "4x32"]
    ours = our_vectors(model, texts, sizes)
    for size, folder in zip(sizes, folders.values()):
        loaded = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
        theirs = loaded.encode(texts, batch_size=5)
        assert theirs.shape == (len(texts), size.dim)
        np.testing.assert_allclose(theirs, ours[size], atol=1e-5, rtol=1e-5)
        assert loaded.get_embedding_dimension() == size.dim
        assert loaded.similarity_fn_name == similarity
        assert loaded.max_seq_length == 48
        norms = np.linalg.norm(theirs, axis=1)
        assert np.allclose(norms, 1, atol=1e-5) == (similarity == "cosine")

        # The layers are really gone, and nothing is missing or left over.
        backbone, report = AutoModel.from_pretrained(folder, output_loading_info=True)
        assert backbone.config.num_hidden_layers == size.layers
        assert not report["missing_keys"] and not report["unexpected_keys"]
        weights = load_file(folder / "model.safetensors")
        assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
        assert len(_layer_numbers(weights)) == size.layers

    # Negative control: another number of layers gives other vectors.
    other = our_vectors(model, texts, [Size(2, 8)])[Size(2, 8)]
    assert np.abs(other - ours[sizes[0]]).max() > 1e-2


def test_a_wrong_layer_count_is_what_the_export_prevents(make_model: ModelFactory, tmp_path: Path) -> None:
    """The negative control of the control: the old count in the config makes a loader invent layers."""
    folder = export_sizes(make_model("bert"), tmp_path / "export", sizes=["2x12"])["2x12"]
    config = json.loads((folder / "config.json").read_text())
    assert config["num_hidden_layers"] == 2
    config["num_hidden_layers"] = 4
    (folder / "config.json").write_text(json.dumps(config))
    _, report = AutoModel.from_pretrained(folder, output_loading_info=True)
    assert report["missing_keys"]


def test_the_layout_is_the_long_standing_one(make_model: ModelFactory, tmp_path: Path) -> None:
    folders = export_sizes(make_model("bert", "mean", "cosine"), tmp_path / "export")
    small, full = folders["1x8"], folders["4x32"]
    prefix = "sentence_transformers.models."
    types = [module["type"] for module in json.loads((small / "modules.json").read_text())]
    assert types == [prefix + name for name in ("Transformer", "Pooling", "Dense", "Normalize")]
    types = [module["type"] for module in json.loads((full / "modules.json").read_text())]
    assert types == [prefix + name for name in ("Transformer", "Pooling", "Normalize")]  # nothing to cut
    assert json.loads((small / "sentence_bert_config.json").read_text()) == {
        "max_seq_length": 48,
        "do_lower_case": False,
    }
    pooling = json.loads((small / "1_Pooling" / "config.json").read_text())
    assert pooling["word_embedding_dimension"] == 32
    assert pooling["pooling_mode_mean_tokens"] and not pooling["pooling_mode_cls_token"]
    dense = load_file(small / "2_Dense" / "model.safetensors")
    assert list(dense) == ["linear.weight"] and torch.equal(dense["linear.weight"], torch.eye(8, 32))
    assert json.loads((small / "tokenizer_config.json").read_text())["model_max_length"] == 48
    tokenizer = json.loads((small / "tokenizer.json").read_text())
    assert tokenizer["truncation"] is None and tokenizer["padding"] is None
    card = (small / "README.md").read_text()
    assert "SentenceTransformer(" in card and "the first layer and" in card and "| embedding dimensions | 8" in card


def test_prompts_are_those_of_training(make_model: ModelFactory, docstrings: list[str], tmp_path: Path) -> None:
    model = make_model("bert", query_prompt="find: ", passage_prompt="text: ")
    folder = export_sizes(model, tmp_path / "export", sizes=["1x8"])["1x8"]
    loaded = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
    texts, size = docstrings[:6], Size(1, 8)
    plain = our_vectors(model, texts, [size])[size]
    for theirs, prompt in ((loaded.encode_query(texts), "find: "), (loaded.encode_document(texts), "text: ")):
        ours = our_vectors(model, texts, [size], prompt=prompt)[size]
        np.testing.assert_allclose(theirs, ours, atol=1e-5)
        assert np.abs(plain - ours).max() > 1e-3


def test_the_whole_encoder_is_an_ordinary_checkpoint(make_model: ModelFactory, tmp_path: Path) -> None:
    model = make_model("roberta", "mean")
    export_sizes(model, tmp_path / "export")
    again, report = AutoModel.from_pretrained(tmp_path / "export" / "encoder", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    original = load_encoder(model).backbone.state_dict()
    weights = {key: value for key, value in again.state_dict().items() if not key.startswith("pooler.")}
    assert weights.keys() == original.keys() and all(torch.equal(weights[key], original[key]) for key in weights)
    assert load_encoder(tmp_path / "export" / "encoder").pooling == "mean"


@pytest.mark.parametrize(("pooling", "similarity"), [("mean", "cosine"), ("cls", "dot")])
def test_a_head_is_its_size_s_dense(
    pooling: str, similarity: str, make_model: ModelFactory, docstrings: list[str], tmp_path: Path
) -> None:
    """Heads at 1 and 4 layers: the full size gets a Dense as well, and 2x12, without one, the selection."""
    texts, sizes = docstrings[:12], [Size(*pair) for pair in LADDER]
    model = make_model("bert", pooling, similarity, heads=(1, 4))
    folders = export_sizes(model, tmp_path / "export")
    ours = our_vectors(model, texts, sizes)
    heads = load_encoder(model).heads
    for size, folder in zip(sizes, folders.values()):
        theirs = sentence_transformers.SentenceTransformer(str(folder), device="cpu").encode(texts)
        np.testing.assert_allclose(theirs, ours[size], atol=1e-5, rtol=1e-5)
        dense = load_file(folder / "2_Dense" / "model.safetensors")
        if str(size.layers) in heads:
            head = heads[str(size.layers)]
            assert torch.equal(dense["linear.weight"], head.weight[: size.dim])
            assert torch.equal(dense["linear.bias"], head.bias[: size.dim])
            assert "through a linear" in (folder / "README.md").read_text()
        else:
            assert list(dense) == ["linear.weight"]
    whole = our_vectors(tmp_path / "export" / "encoder", texts, sizes)
    assert all(np.array_equal(whole[size], ours[size]) for size in sizes)
    # Negative control: without its bias a head gives other vectors.
    path = folders["1x8"] / "2_Dense" / "model.safetensors"
    dense = load_file(path)
    save_file({**dense, "linear.bias": torch.zeros(8)}, path)
    theirs = sentence_transformers.SentenceTransformer(str(folders["1x8"]), device="cpu").encode(texts)
    assert np.abs(theirs - ours[sizes[0]]).max() > 1e-2


NARROWER = ((2, 8, 0.25), (4, 12, 0.25), (4, 16, 0.5), (4, 32))


@pytest.mark.parametrize(("family", "heads"), [("bert", ()), ("modernbert", ()), ("bert", (2, "4x0_25"))])
def test_narrower_feed_forwards_are_cut_out(
    family: str, heads: tuple[int | str, ...], make_model: ModelFactory, docstrings: list[str], tmp_path: Path
) -> None:
    """Of the heads, that of 2 layers serves their narrower feed-forwards, too; the other is one body's own."""
    texts, sizes = docstrings[:12], [Size.of(numbers) for numbers in NARROWER]
    model = make_model(family, "mean", heads=heads, ladder=NARROWER)
    folders = export_sizes(model, tmp_path / "export", routers=["4x12x0.25:4x12"])
    assert list(folders) == ["2x8x0.25", "4x12x0.25", "4x16x0.5", "4x32", "router-4x12x0.25-4x12"]
    ours = our_vectors(model, texts, [*sizes, Size(4, 12)])
    loaded = {
        name: sentence_transformers.SentenceTransformer(str(path), device="cpu") for name, path in folders.items()
    }
    for size, (name, folder) in zip(sizes, folders.items()):
        np.testing.assert_allclose(loaded[name].encode(texts), ours[size], atol=1e-5, rtol=1e-5)
        config = AutoConfig.from_pretrained(folder)
        assert (config.num_hidden_layers, config.intermediate_size) == (size.layers, 48 * size.feed_forward)
        _, report = AutoModel.from_pretrained(folder, output_loading_info=True)
        assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    router = loaded["router-4x12x0.25-4x12"]
    np.testing.assert_allclose(router.encode_document(texts), ours[Size(4, 12)], atol=1e-5, rtol=1e-5)
    assert np.abs(router.encode_query([text[:20] for text in texts]) - router.encode_document(texts)).max() > 1e-2
    whole = our_vectors(tmp_path / "export" / "encoder", texts, sizes)
    assert all(np.array_equal(whole[size], ours[size]) for size in sizes)
    # Negative control: with whole feed-forwards the same layers and dimensions have other vectors.
    assert np.abs(ours[Size(4, 12)] - ours[Size(4, 12, 0.25)]).max() > 1e-2
    manifest = json.loads((tmp_path / "export" / "export.json").read_text())
    assert manifest["sizes"] == {"2x8x0.25": [2, 8, 0.25], "4x12x0.25": [4, 12, 0.25], "4x16x0.5": [4, 16, 0.5]} | {
        "4x32": [4, 32]
    }
    card = (folders["4x12x0.25"] / "README.md").read_text()
    assert "| feed-forward | 0.25 of the whole encoder's |" in card and "the first 0.25 of the neurons" in card
    assert "feed-forward" not in (folders["4x32"] / "README.md").read_text()
    router_card = (folders["router-4x12x0.25-4x12"] / "README.md").read_text()
    assert "4 of its layers with 0.25 of their feed-forwards and `encode_document` 4" in router_card
    with pytest.raises(ModelError, match="whole number from 1 on"):
        export_sizes(model, tmp_path / "other", sizes=["4x12x0.3"])


def test_widths_that_servers_may_cut_to(make_model: ModelFactory, docstrings: list[str], tmp_path: Path) -> None:
    """vLLM reads them off config.json; the prefix of a size's vector is the vector of that width."""
    model = make_model("bert", "mean", heads=(2,))
    folders = export_sizes(model, tmp_path / "export", sizes=["4x32", "3x20", "2x12", "1x8"])
    widths = {"4x32": [8, 12, 32], "3x20": [8, 12, 20], "2x12": [8, 12], "1x8": None}
    for name, expected in widths.items():
        config = AutoConfig.from_pretrained(folders[name])
        assert getattr(config, "matryoshka_dimensions", None) == expected
        assert getattr(config, "is_matryoshka", None) == (True if expected else None)
    assert not hasattr(AutoConfig.from_pretrained(tmp_path / "export" / "encoder"), "is_matryoshka")
    loaded = sentence_transformers.SentenceTransformer(str(folders["2x12"]), device="cpu")
    narrow = loaded.encode(docstrings[:6], truncate_dim=8, normalize_embeddings=True)
    np.testing.assert_allclose(narrow, our_vectors(model, docstrings[:6], [Size(2, 8)])[Size(2, 8)], atol=1e-5)
    assert "truncate_dim=8" in (folders["2x12"] / "README.md").read_text()
    assert "truncate_dim" not in (folders["1x8"] / "README.md").read_text()


@pytest.mark.parametrize("heads", [(), (1, 3)])
def test_a_router_encodes_queries_and_documents_at_a_size_each(
    heads: tuple[int, ...], make_model: ModelFactory, docstrings: list[str], tmp_path: Path
) -> None:
    model = make_model("bert", "mean", heads=heads, query_prompt="find: ", passage_prompt="text: ")
    folders = export_sizes(model, tmp_path / "export", sizes=["1x12", "3x12"], routers=["1x12:3x12"])
    assert list(folders) == ["1x12", "3x12", "router-1x12-3x12"]
    single = [sentence_transformers.SentenceTransformer(str(folders[name]), device="cpu") for name in ("1x12", "3x12")]
    router = sentence_transformers.SentenceTransformer(str(folders["router-1x12-3x12"]), device="cpu")
    # Within both lengths all agree; beyond, the router cuts queries at their own length, as they were trained.
    short, long = [text[:20] for text in docstrings[:8]], docstrings[:8]
    np.testing.assert_allclose(router.encode_query(short), single[0].encode_query(short), atol=1e-6)
    np.testing.assert_allclose(router.encode_document(long), single[1].encode_document(long), atol=1e-6)
    np.testing.assert_allclose(router.encode(long), single[1].encode(long), atol=1e-6)
    ours = our_vectors(model, long, [Size(1, 12)], "find: ", max_length=16)[Size(1, 12)]
    np.testing.assert_allclose(router.encode_query(long), ours, atol=1e-5)
    assert router.get_embedding_dimension() == 12 and router.similarity_fn_name == "cosine"
    assert router.similarity(router.encode_query(short), router.encode_document(short)).shape == (8, 8)
    # Negative controls: the routes differ, and so would one length for both.
    assert np.abs(router.encode_query(short) - router.encode_document(short)).max() > 1e-2
    assert np.abs(router.encode_query(long) - single[0].encode_query(long)).max() > 1e-3
    manifest = json.loads((tmp_path / "export" / "export.json").read_text())
    assert manifest["routers"] == {"router-1x12-3x12": {"query": [1, 12], "document": [3, 12]}}
    assert "queries of 1x12 and documents of 3x12" in (folders["router-1x12-3x12"] / "README.md").read_text()


def test_weights_in_float16(make_model: ModelFactory, docstrings: list[str], tmp_path: Path) -> None:
    """float16 halves the files of a size, which computes in float32 once it is loaded; encoder/ stays in float32."""
    model, texts = make_model("bert", "mean"), docstrings[:12]
    names = ["1x8", "2x12", "4x32"]
    whole = export_sizes(model, tmp_path / "whole", routers=["1x8:2x8"])
    half = export_sizes(model, tmp_path / "half", routers=["1x8:2x8"], weights="float16")
    for name in [*names, "router-1x8-2x8"]:
        models = [sentence_transformers.SentenceTransformer(str(each[name]), device="cpu") for each in (half, whole)]
        assert {parameter.dtype for parameter in models[0].parameters()} == {torch.float32}
        a, b = (each.encode(texts) for each in models)
        assert (a * b).sum(1).min() > 0.9999 and not np.array_equal(a, b)
        if name in names:
            stored = load_file(half[name] / "model.safetensors")
            assert {tensor.dtype for tensor in stored.values()} == {torch.float16}
            sizes = [(each[name] / "model.safetensors").stat().st_size for each in (half, whole)]
            assert sizes[0] < 0.6 * sizes[1]
            assert "| weights | float16, " in (half[name] / "README.md").read_text()
    encoders = [load_file(tmp_path / each / "encoder" / "model.safetensors") for each in ("half", "whole")]
    assert all(torch.equal(encoders[0][key], encoders[1][key]) for key in encoders[1])


def test_weights_beyond_float16_are_refused(make_model: ModelFactory, tmp_path: Path) -> None:
    model = make_model("bert")
    weights = load_file(model / "model.safetensors")
    weights["bert.embeddings.word_embeddings.weight"][3, 3] = 1e5
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"word_embeddings\.weight has values beyond float16's 65,504"):
        export_sizes(model, tmp_path / "export", sizes=["1x8"], weights="float16")
    assert not (tmp_path / "export").exists()
    export_sizes(model, tmp_path / "export", sizes=["1x8"])


def test_six_sizes_bear_the_cups_names(make_model: ModelFactory, tmp_path: Path) -> None:
    settings = {"ladder": ((1, 4), (2, 8), (3, 12), (4, 16), (5, 24), (6, 32))}
    short_model = make_model("bert", **settings)
    with pytest.raises(ConfigError, match=r"5x24 outgrows the encoder of 4 layers"):
        export_sizes(short_model, tmp_path / "export")
    assert not (tmp_path / "export").exists()
    assert list(export_sizes(short_model, tmp_path / "export", sizes=["demi", Size(3, 5)])) == ["demi", "3x5"]
    assert sorted(path.name for path in (tmp_path / "export").iterdir()) == ["3x5", "demi", "encoder", "export.json"]


def test_an_export_replaces_an_export_and_nothing_else(make_model: ModelFactory, tmp_path: Path) -> None:
    model, output = make_model("bert"), tmp_path / "export"
    output.mkdir()
    export_sizes(model, output)
    export_sizes(model, output, sizes=["1x8"])
    assert sorted(path.name for path in output.iterdir()) == ["1x8", "encoder", "export.json"]
    (output / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"holds something else \(thesis.txt\)"):
        export_sizes(model, output)
    assert (output / "thesis.txt").read_text() == "mine"
    stranger = tmp_path / "stranger"
    shutil.copytree(output / "encoder", stranger)
    with pytest.raises(ConfigError, match="holds something else"):
        export_sizes(model, stranger)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["export", "stranger"]  # no partial folder left


def test_nothing_of_a_user_s_is_removed(make_model: ModelFactory, tmp_path: Path) -> None:
    model, output = make_model("bert"), tmp_path / "export"
    export_sizes(model, output, sizes=["1x8"])
    listed = json.loads((output / "export.json").read_text())["files"]
    assert listed["1x8/README.md"] == (output / "1x8" / "README.md").stat().st_size
    for name, content in (("1x8/note.txt", "mine"), ("encoder/deep/note.txt", "mine"), ("1x8/README.md", "changed")):
        path = output / name
        before = path.read_text() if path.exists() else None
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
        with pytest.raises(ConfigError, match=name):
            export_sizes(model, output, sizes=["1x8"])
        assert path.read_text() == content
        path.unlink() if before is None else path.write_text(before)
    (output / "1x8" / "link").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="1x8/link"):
        export_sizes(model, output, sizes=["1x8"])
    (output / "1x8" / "link").unlink()
    export_sizes(model, output, sizes=["1x8"])  # the control
    manifest = json.loads((output / "export.json").read_text())
    del manifest["files"]
    (output / "export.json").write_text(json.dumps(manifest))
    with pytest.raises(ConfigError, match="export of an earlier version"):
        export_sizes(model, output, sizes=["1x8"])
    (output / "export.json").write_text(json.dumps({**manifest, "format": 2}))
    with pytest.raises(OtherFormat, match="format 2"):
        export_sizes(model, output, sizes=["1x8"])


def test_links_and_files_are_no_outputs(make_model: ModelFactory, tmp_path: Path) -> None:
    model = make_model("bert")
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "file").write_text("mine")
    for name in ("link", "dangling", "file", "file/out"):
        with pytest.raises(ConfigError, match=name):
            export_sizes(model, tmp_path / name)


def test_another_tokenizer_is_refused(
    make_model: ModelFactory, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """By the fingerprint in barista.json; without one, as older versions left it, only one that is too large."""
    model = make_model("bert", tokenizer=tokenizer_fingerprint(tiny_tokenizer))
    export_sizes(model, tmp_path / "export", sizes=["1x8"])
    settings = EmbeddingSettings.load(tmp_path / "export" / "encoder")
    assert settings is not None and settings.tokenizer == tokenizer_fingerprint(tiny_tokenizer)
    path = model / "tokenizer.json"
    content = json.loads(path.read_text())
    words = content["model"]["vocab"]
    words["the"], words["of"] = words["of"], words["the"]
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"is not the one that its barista\.json names"):
        export_sizes(model, tmp_path / "other", sizes=["1x8"])
    dataclasses.replace(settings, tokenizer=None).save(model)
    export_sizes(model, tmp_path / "unknown", sizes=["1x8"])
    content["model"]["vocab"]["zyzzyva"] = len(tiny_tokenizer)
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="2001 tokens and the model's table 2000"):
        export_sizes(model, tmp_path / "larger", sizes=["1x8"])


def test_a_special_token_may_have_no_row(
    make_model: ModelFactory, tiny_tokenizer: PreTrainedTokenizerFast, docstrings: list[str], tmp_path: Path
) -> None:
    """If no text gets it by itself, as in EmbeddingGemma. Any other token must have one."""
    model = make_model("bert")
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.save_pretrained(model)
    assert (
        len(load_tokenizer(model)) == len(tiny_tokenizer) + 1 == 1 + load_model(model)[0].word_embeddings.num_embeddings
    )
    tokenizer.add_tokens(["zyzzyva"])
    tokenizer.save_pretrained(model)
    with pytest.raises(ConfigError, match="2002 tokens and the model's table 2000"):
        load_model(model)
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.add_special_tokens({"pad_token": "<padding>"})
    assert rows_needed(tokenizer) == len(tokenizer) == vocabulary_of(tokenizer).rows_needed == 2001


def test_a_failed_export_leaves_what_was_there(
    make_model: ModelFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, output = make_model("bert"), tmp_path / "export"
    export_sizes(model, output, sizes=["1x8"])
    before = {path: path.read_bytes() for path in sorted(output.rglob("*")) if path.is_file()}

    def fail(*args: object, **more: object) -> str:
        raise OSError("disk full")

    monkeypatch.setattr("trainer.exporting.sizes.size_card", fail)
    with pytest.raises(OSError, match="disk full"):
        export_sizes(model, output)
    assert before == {path: path.read_bytes() for path in sorted(output.rglob("*")) if path.is_file()}
    assert [path.name for path in tmp_path.iterdir()] == ["export"]


def test_command(make_model: ModelFactory, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_model("bert")
    command = ["--model", str(model), "--output", str(tmp_path / "export"), "--sizes", "1x8,2x12"]
    assert export.main(command) == 0
    assert capsys.readouterr().out.splitlines() == [f"{n}\t{tmp_path / 'export' / n}" for n in ("1x8", "2x12")]


def test_user_errors_exit_with_2(make_model: ModelFactory, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_model("bert")
    capsys.readouterr()  # the bar of the model's files, unless an earlier test has switched bars off

    def error(*args: str) -> str:
        assert export.main(["--output", str(tmp_path / "out"), *args]) == 2
        message = capsys.readouterr().err
        assert message.startswith("error: ") and message.count("\n") == 1
        return message

    assert "barista.json" in error("--model", str(tmp_path / "absent"))
    assert "grande" in error("--model", str(model), "--sizes", "grande")
    assert "outgrows" in error("--model", str(model), "--sizes", "9x9")
    assert "no size" in error("--model", str(model), "--sizes", ",")
    assert "12 dimensions with 32" in error("--model", str(model), "--router", "2x12:4x32")
    assert "QUERY_SIZE:DOCUMENT_SIZE" in error("--model", str(model), "--router", "2x12")
    assert "outgrows" in error("--model", str(model), "--router", "2x12:9x12")
    assert "'int4' is unknown" in error("--model", str(model), "--onnx", "int4")
    assert "no token table alone" in error("--model", str(model), "--table", "int8")
    (model / "config.json").unlink()
    assert "config.json" in error("--model", str(model))
    assert not (tmp_path / "out").exists()
    with pytest.raises(ModelError):
        export_sizes(model, tmp_path / "out")


def _layer_numbers(weights: dict[str, torch.Tensor]) -> set[str]:
    return {part for key in weights for part in key.split(".") if part.isdigit()}

"""The one loader of model folders: all of an encoder's weights, finite, or one sentence that names the folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, GPT2Config, GPT2Model

from data.ground.errors import OtherFormat
from models.encoder import build_masked_lm, load_encoder, load_masked_lm
from models.loading import check_finite, check_plausible
from models.settings import EmbeddingSettings
from models.sizes import ModelError
from models.static_embedding import StaticConfig, StaticModel

WEIGHTS = "model.safetensors"
CONFIG = {"model_type": "bert", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    torch.manual_seed(0)
    build_masked_lm({**CONFIG, "intermediate_size": 32}, vocab_size=40, pad_token_id=0).save_pretrained(folder)
    return folder


@pytest.fixture
def model(whole: Path, tmp_path: Path) -> Path:
    shutil.copytree(whole, tmp_path / "model")
    return tmp_path / "model"


def change(model: Path, function: Callable[[Tensors], Tensors]) -> None:
    save_file(function(load_file(model / WEIGHTS)), model / WEIGHTS, metadata={"format": "pt"})


def configure(model: Path, **values: Any) -> None:
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize("load", [load_encoder, load_masked_lm])
@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda tensors: {n: t for n, t in tensors.items() if "layer.1." not in n}, "lack .*layer.1.* and 13 more"),
        (lambda tensors: {f"other.{n}": t for n, t in tensors.items()}, "lack .*embeddings"),
        (lambda tensors: {n: t for n, t in tensors.items() if "0.attention.self.key.bias" not in n}, "key.bias"),
        (lambda tensors: {**tensors, "bert.encoder.layer.2.x": torch.ones(1)}, "no place for: bert.encoder.layer.2.x"),
        (
            lambda tensors: {n: t.repeat(1, 2) if "word_emb" in n else t for n, t in tensors.items()},
            r"do not fit .*word_embeddings.weight is \[40, 32\] in place of \[40, 16\]",
        ),
        (
            lambda tensors: {n: t / 0 if "1.output.dense.b" in n else t for n, t in tensors.items()},
            "NaN or infinity in",
        ),
    ],
)
def test_weights_that_are_not_the_configuration_s(
    load: Callable[[Path], object], function: Callable[[Tensors], Tensors], words: str, model: Path
) -> None:
    load(model)  # the control
    change(model, function)
    with pytest.raises(ModelError, match=words) as refusal:
        load(model)
    assert str(model) in str(refusal.value)


def test_what_does_not_count(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Poolers, buffers that are computed, heads that are not used, and a head that is absent as a whole."""
    before = load_encoder(model).backbone.state_dict()
    assert not load_masked_lm(model)[1]
    change(model, lambda tensors: {
        **tensors,
        "bert.pooler.dense.weight": torch.ones(16, 16),
        "bert.embeddings.position_ids": torch.arange(512)[None],
        "cls.seq_relationship.weight": torch.ones(2, 16),
    })  # fmt: skip
    assert all(torch.equal(each, before[name]) for name, each in load_encoder(model).backbone.state_dict().items())
    assert "a fresh one is trained" not in caplog.text
    change(model, lambda tensors: {n.removeprefix("bert."): t for n, t in tensors.items() if n.startswith("bert.")})
    load_encoder(model)
    assert load_masked_lm(model)[1]
    assert "a fresh one is trained" in caplog.text


def test_a_head_in_part(model: Path) -> None:
    change(model, lambda tensors: {n: t for n, t in tensors.items() if n != "cls.predictions.transform.dense.weight"})
    load_encoder(model)
    with pytest.raises(ModelError, match=r"lack cls\.predictions\.transform\.dense\.weight"):
        load_masked_lm(model)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads = 0; it must be a whole number"),
        ({"num_attention_heads": 3}, "refused by transformers .*multiple"),
        ({"hidden_size": "16"}, "hidden_size"),
        ({"hidden_size": 10**9}, "hidden_size = 1000000000"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers = 1000000"),
        ({"hidden_size": 65536, "num_hidden_layers": 900}, "belongs to another model"),
        ({"hidden_act": "gelo"}, "KeyError: 'gelo'"),
        ({"vocab_size": 10}, "do not fit"),
        ({"dtype": "float99"}, "refused by transformers|cannot load"),
        ({"model_type": "gpt2"}, "lack .*h.0.*, which would be random"),
        ({"model_type": "t5", "classifier_dropout": 0.0}, "'t5', which is not an encoder or a decoder of texts"),
        ({"model_type": "vit"}, "'vit', which is not an encoder or a decoder of texts"),
        ({"model_type": "gemma3"}, "'gemma3', which is not an encoder or a decoder of texts"),
        ({"model_type": "bart"}, "'bart' as a decoder"),
        ({"is_decoder": True}, "'bert' as a decoder"),
        ({"model_type": None}, "names no model_type"),
        ({"model_type": "evil"}, "'evil', which transformers does not know;"),
        ({"model_type": "evil", "auto_map": {"AutoConfig": "evil.C"}}, "code inside a model folder is never run"),
    ],
)
def test_configurations(values: dict[str, Any], words: str, model: Path) -> None:
    configure(model, **values)
    with pytest.raises(ModelError, match=words) as refusal:
        load_encoder(model)
    assert str(model) in str(refusal.value)


def test_a_decoder_whose_weights_fit(tmp_path: Path) -> None:
    """It embeds texts, if somebody says how; there is no masked language model to pre-train."""
    GPT2Model(GPT2Config(vocab_size=20, n_embd=8, n_layer=2, n_head=2)).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="does not say how it pools"):
        load_encoder(tmp_path)
    assert load_encoder(tmp_path, pooling="last").num_layers == 2
    with pytest.raises(ModelError, match="'gpt2', which has no masked language model to pre-train"):
        load_masked_lm(tmp_path)


def test_an_encoder_has_no_direction_to_choose(model: Path) -> None:
    load_encoder(model, direction="bidirectional")
    with pytest.raises(ModelError, match="'bert', an encoder, which reads in both directions"):
        load_encoder(model, direction="causal")


@pytest.mark.parametrize("content", [b"", b"\xff" * 99, b"\x80\x04}.", b"[" * 10**5, b"[]", b"{"])
@pytest.mark.parametrize("name", [WEIGHTS, "config.json", "barista.json"])
def test_damaged_files(name: str, content: bytes, model: Path) -> None:
    (model / name).write_bytes(content)
    with pytest.raises(ModelError) as refusal:
        load_encoder(model)
    assert str(model) in str(refusal.value)


def test_an_adapter_is_not_followed(model: Path) -> None:
    (model / "adapter_config.json").write_text('{"base_model_name_or_path": "/elsewhere"}')
    with pytest.raises(ModelError, match="adapter"):
        load_encoder(model)


def test_a_static_table(tmp_path: Path) -> None:
    StaticModel(StaticConfig(vocab_size=9, hidden_size=4)).save_pretrained(tmp_path)
    load_encoder(tmp_path)
    with pytest.raises(ModelError, match="'static', which has no layers"):
        load_masked_lm(tmp_path)
    configure(tmp_path, special_ids=["a"])
    with pytest.raises(ModelError, match="special_ids"):
        load_encoder(tmp_path)
    configure(tmp_path, special_ids=[])
    change(tmp_path, lambda tensors: {"other": tensors["embedding.weight"]})
    with pytest.raises(ModelError, match=r"lack embedding\.weight"):
        load_encoder(tmp_path)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"vocab_size": 3}, "comes from the shards' tokenizer"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"hidden_act": "gelo"}, "model.config is refused by transformers"),
        ({"model_type": "gpt2"}, "'gpt2', which is a decoder and not an encoder with a masked language model"),
        ({"hidden_size": 2**17, "num_hidden_layers": 1000, "intermediate_size": 2**20}, "GiB of memory"),
    ],
)
def test_encoders_that_cannot_be_built(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        build_masked_lm({"model_type": "bert", **values}, vocab_size=40, pad_token_id=0)


def test_finite_and_plausible() -> None:
    large = torch.full((4,), 3e38)
    check_finite([("a", large), ("ids", torch.arange(3))], "model")  # its sum is infinite, and it is not
    with pytest.raises(ModelError, match="in b:"):
        check_finite([("a", large), ("b", torch.tensor([1.0, float("nan")]))], "model")
    check_plausible(BertConfig(), "model")
    with pytest.raises(ModelError, match="vocab_size = True"):
        check_plausible(StaticConfig(vocab_size=True), "model")


def test_settings_are_checked(tmp_path: Path) -> None:
    settings = EmbeddingSettings("mean", "dot", ((1, 4), (2, 8)), 16, 32, "q: ", "", 0.1, tokenizer="f")
    settings.save(tmp_path)
    path = tmp_path / "barista.json"
    assert EmbeddingSettings.load(tmp_path) == settings
    values = json.loads(path.read_text())
    del values["tokenizer"]
    path.write_text(json.dumps({**values, "colour": "blue"}))  # of an older version, and of a later one
    loaded = EmbeddingSettings.load(tmp_path)
    assert loaded is not None and loaded.tokenizer is None and loaded.ladder == settings.ladder
    for changed, words in (
        ({"ladder": ["a", "b"]}, r"ladder\[0\]"),
        ({"ladder": [[1, 4, 2]]}, r"ladder\[0\]"),
        ({"ladder": [[2, 8], [1, 4]]}, "does not increase"),
        ({"ladder": [[1, 0]]}, "ladder"),
        ({"query_max_length": 0}, "query_max_length = 0"),
        ({"query_max_length": "64"}, "query_max_length"),
        ({"passage_max_length": 2**40}, "passage_max_length"),
        ({"query_prompt": 3}, "query_prompt = 3"),
        ({"pooling": "max"}, "pooling = 'max'"),
        ({"direction": "backwards"}, "direction = 'backwards'"),
        ({"temperature": 0.0}, "temperature = 0.0"),
    ):
        path.write_text(json.dumps({**values, **changed}))
        with pytest.raises(ModelError, match=words):
            EmbeddingSettings.load(tmp_path)
    path.write_text(json.dumps({**values, "format": 3}))
    with pytest.raises(OtherFormat, match="format 3"):
        EmbeddingSettings.load(tmp_path)
    path.unlink()
    assert EmbeddingSettings.load(tmp_path) is None
    path.symlink_to("nowhere")
    with pytest.raises(ModelError, match=r"barista\.json cannot be read"):
        EmbeddingSettings.load(tmp_path)

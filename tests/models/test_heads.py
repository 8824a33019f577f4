"""Heads: each depth's map into the embedding space, in a pass and in a folder, and refused where they do not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import BertConfig, BertModel

from models.encoder import Encoder, load_encoder, pool
from models.heads import HEADS_FILE, check_heads, heads_up_to, linear_head, load_heads, save_heads
from models.layout import Layout
from models.sizes import ModelError, Size

HIDDEN, LAYERS = 16, 3


def backbone() -> BertModel:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=50,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
    )
    return BertModel(config, add_pooling_layer=False).eval()


def heads_of(depths: tuple[int, ...], *, out: int = HIDDEN) -> nn.ModuleDict:
    torch.manual_seed(1)
    return nn.ModuleDict({str(depth): nn.Linear(HIDDEN, out) for depth in depths})


IDS, MASK = torch.arange(5, 17).view(2, 6), torch.tensor([[1] * 6, [1] * 4 + [0] * 2])


@torch.no_grad()
def test_a_size_is_a_prefix_of_its_depths_head() -> None:
    heads = heads_of((1, 2))
    encoder = Encoder(backbone(), "mean", heads)
    sizes = [Size(1, 4), Size(1, 8), Size(2, 16), Size(3, 8)]
    layout = Layout.of_mask(MASK)
    states = encoder.hidden_states(layout.pack(IDS), layout, [1, 2, 3])
    pooled = {layer: pool(state, MASK, "mean") for layer, state in states.items()}
    expected = [
        (pooled[1] @ heads["1"].weight.T + heads["1"].bias)[:, :4],
        (pooled[1] @ heads["1"].weight.T + heads["1"].bias)[:, :8],
        pooled[2] @ heads["2"].weight.T + heads["2"].bias,
        pooled[3][:, :8],
    ]
    found = encoder(IDS, MASK, sizes)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    without = Encoder(backbone(), "mean")(IDS, MASK, sizes)
    assert not torch.allclose(without[0], found[0])  # the heads take part
    assert torch.equal(without[3], found[3])  # but not where there is none


def test_heads_come_back_from_a_folder(tmp_path: Path) -> None:
    model, heads = backbone(), heads_of((1, 2, 3), out=24)
    model.save_pretrained(tmp_path)
    save_heads(dict(heads.named_parameters()), tmp_path)
    encoder = load_encoder(tmp_path, pooling="mean")
    assert encoder.embedding_size == 24 and set(encoder.heads) == {"1", "2", "3"}
    for name, value in heads.state_dict().items():
        assert torch.equal(encoder.heads.state_dict()[name], value)
    assert set(heads_up_to(encoder.heads, 2)) == {"1", "2"}


def test_a_folder_without_heads_has_the_encoders_width(tmp_path: Path) -> None:
    backbone().save_pretrained(tmp_path)
    save_heads({}, tmp_path)
    assert not (tmp_path / HEADS_FILE).exists()
    assert load_encoder(tmp_path).embedding_size == HIDDEN


@pytest.mark.parametrize(
    ("heads", "words"),
    [
        (heads_of((4,)), "has a head for 4 layers"),
        (nn.ModuleDict({"1": nn.Linear(8, HIDDEN)}), "reads 8 dimensions"),
        (nn.ModuleDict({"1": nn.Linear(HIDDEN, 8), "2": nn.Linear(HIDDEN, 16)}), "all must share one"),
        (heads_of((1, 3), out=24), "2 layers, of 16, have no head"),
    ],
)
def test_heads_that_do_not_fit_are_refused(heads: nn.ModuleDict, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        check_heads(heads, num_layers=LAYERS, hidden_size=HIDDEN, thing="folder x")


@pytest.mark.parametrize(
    "tensors",
    [
        {"1.weight": torch.zeros(4, 4)},
        {"1.weight": torch.zeros(4, 4), "1.bias": torch.zeros(3)},
        {"one.weight": torch.zeros(4, 4), "one.bias": torch.zeros(4)},
        {"1.weight": torch.zeros(4, 4), "1.bias": torch.zeros(4), "1.scale": torch.zeros(4)},
    ],
)
def test_a_file_that_is_not_of_heads_is_refused(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, tmp_path / HEADS_FILE)
    with pytest.raises(ModelError, match="heads file"):
        load_heads(tmp_path)


def test_a_linear_head_is_the_map_that_it_was_given() -> None:
    weight = torch.randn(5, 3)
    vectors = torch.randn(2, 3)
    torch.testing.assert_close(linear_head(weight, torch.zeros(5))(vectors), vectors @ weight.T)

"""The token table: means and gradients as a plain loop over texts gives them, whatever form the texts come in."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from models.encoder import Encoder, load_encoder
from models.sizes import ModelError, Size
from models.static_embedding import StaticConfig, StaticModel, build_static

SPECIALS = (0, 2, 3)
SIZES = (Size(1, 4), Size(1, 12))
TEXTS = [[2, 7, 8, 7, 3], [2, 9, 3], [2, 3], [10, 11, 12, 13, 14, 15]]


def make_encoder() -> Encoder:
    torch.manual_seed(0)
    table = build_static({"model_type": "static", "hidden_size": 12}, vocab_size=20, special_ids=SPECIALS)
    return Encoder(table, "mean")


def padded() -> tuple[Tensor, Tensor]:
    longest = max(map(len, TEXTS))
    # Padded with a word, which only the mask tells from the text.
    ids = torch.tensor([text + [5] * (longest - len(text)) for text in TEXTS])
    return ids, torch.tensor([[1] * len(text) + [0] * (longest - len(text)) for text in TEXTS])


def flat() -> tuple[Tensor, Tensor]:
    tokens = [token for text in TEXTS for token in text]
    return torch.tensor(tokens, dtype=torch.int32), torch.tensor([0, *map(len, TEXTS)]).cumsum(0)


def naive(table: Tensor, *, skipped: tuple[int, ...] = SPECIALS) -> Tensor:
    rows = []
    for text in TEXTS:
        tokens = [token for token in text if token not in skipped]
        total = torch.zeros(table.shape[1])
        for token in tokens:
            total = total + table[token]
        rows.append(total / max(1, len(tokens)))
    return torch.stack(rows)


@pytest.mark.parametrize("form", ["padded", "flat"])
def test_vectors_and_gradients_are_those_of_plain_means(form: str) -> None:
    encoder = make_encoder()
    weight = encoder.word_embeddings.weight
    table = weight.detach().clone().requires_grad_()
    direction = torch.randn(len(TEXTS), 12)
    if form == "padded":
        outputs = encoder(*padded(), SIZES)
    else:
        tokens, offsets = flat()
        outputs = encoder(tokens, None, SIZES, offsets=offsets)
    expected = naive(table)
    for size, output in zip(SIZES, outputs):
        torch.testing.assert_close(output, expected[:, : size.dim])
        (output * direction[:, : size.dim]).sum().backward(retain_graph=True)
        (expected[:, : size.dim] * direction[:, : size.dim]).sum().backward(retain_graph=True)
    assert weight.grad is not None and table.grad is not None
    torch.testing.assert_close(weight.grad, table.grad)
    assert not weight.grad[list(SPECIALS)].any()


def test_many_specials_are_ignored_like_few() -> None:
    """Llama 3 has 256 special tokens. Those above the vocabulary here are in no text, and change nothing."""
    few, many = (StaticModel(StaticConfig(20, 12, special_ids=ids)) for ids in (SPECIALS, [*SPECIALS, *range(20, 60)]))
    many.load_state_dict(few.state_dict())
    assert torch.equal(many(*flat()), few(*flat()))
    torch.testing.assert_close(many(*flat()), naive(few.embedding.weight))


def test_counted_padding_and_counted_specials_are_noticed() -> None:
    encoder = make_encoder()
    ids, mask = padded()
    expected = naive(encoder.word_embeddings.weight)
    (wrong,) = encoder(ids, torch.ones_like(mask), SIZES[1:])
    assert (wrong - expected)[:3].abs().max() > 0.1
    torch.testing.assert_close(wrong[3], expected[3])  # the longest text has no padding
    assert (naive(encoder.word_embeddings.weight, skipped=()) - expected).abs().max() > 0.1


def test_a_folder_loads_as_what_was_saved(tmp_path) -> None:
    encoder = make_encoder()
    encoder.backbone.save_pretrained(tmp_path)
    loaded = load_encoder(tmp_path, pooling="mean")
    assert loaded.is_static and (loaded.num_layers, loaded.hidden_size) == (1, 12)
    assert torch.equal(loaded(*padded(), SIZES)[1], encoder(*padded(), SIZES)[1])


@pytest.mark.parametrize("config", [{"hidden_size": 0}, {"hidden_size": 8, "num_attention_heads": 2}])
def test_refused_configurations(config: dict) -> None:
    with pytest.raises(ModelError, match=r"model\.config\.(hidden_size|num_attention_heads)"):
        build_static({"model_type": "static", **config}, vocab_size=20, special_ids=())

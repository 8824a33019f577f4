"""Nested feed-forwards: a fraction is the sliced model, gradients fall on prefixes, and sorting changes nothing."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel, PreTrainedModel

from models.backbone import encoder_layers, truncate_layers
from models.encoder import Encoder
from models.heads import heads_of_narrowed
from models.layout import Layout
from models.nested_feed_forward import NestedFeedForwards, count_of, inner_width, narrow
from models.sizes import Body, ModelError, Size
from tests.models.test_backbones import CELLS, HIDDEN, LAYERS, VOCABULARY, Cell, each_of

INNER = 48
SIZES = [Size(2, 8, 0.25), Size(3, 12, 0.25), Size(3, 16, 0.5), Size(2, 16), Size(3, HIDDEN)]
# Where a family's matrices into and out of the neurons are; the code under test finds them by shapes alone.
BY_NAME = {
    "bert": (("intermediate.dense",), "output.dense"),
    "modernbert": (("mlp.Wi",), "mlp.Wo"),
    "qwen3": (("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj"),
    "gemma3_text": (("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj"),
    "phi3": (("mlp.gate_up_proj",), "mlp.down_proj"),
    "distilbert": (("ffn.lin1",), "ffn.lin2"),
}
every_family = each_of(CELLS)
CLOSE = dict(rtol=1e-9, atol=1e-9)


def built(cell: Cell) -> PreTrainedModel:
    """In float64, in which Gemma 2's attention of padded texts has no numbers."""
    return cell.build().double() if cell.family != "gemma2" else cell.build()


def closeness(cell: Cell) -> dict[str, float]:
    return CLOSE if cell.family != "gemma2" else dict(rtol=1e-5, atol=1e-5)


def texts() -> tuple[Tensor, Tensor]:
    ids = torch.randint(5, VOCABULARY - 8, (3, 12), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(12) < torch.tensor([[12], [7], [3]])).long()
    return ids.masked_fill(mask == 0, 0), mask


def naive_narrowed(backbone: PreTrainedModel, family: str, fraction: float) -> PreTrainedModel:
    """A copy whose matrices are cut by their names, row by row."""
    count = round(fraction * INNER)
    cut = copy.deepcopy(backbone)
    into, out = BY_NAME[family]
    for layer in encoder_layers(cut):
        for name in into:
            matrix = layer.get_submodule(name)
            rows = [*range(count)]
            if len(matrix.weight) == 2 * INNER:
                rows += [INNER + row for row in rows]
            matrix.weight = nn.Parameter(torch.stack([matrix.weight[row] for row in rows]))
            if matrix.bias is not None:
                matrix.bias = nn.Parameter(torch.stack([matrix.bias[row] for row in rows]))
        matrix = layer.get_submodule(out)
        matrix.weight = nn.Parameter(torch.stack([matrix.weight[:, column] for column in range(count)], dim=1))
    return cut


@every_family
def test_a_size_is_the_sliced_model(cell: Cell) -> None:
    backbone = built(cell)
    encoder, (ids, mask) = Encoder(backbone, cell.pooling).eval(), texts()
    with torch.no_grad():
        found = encoder(ids, mask, SIZES)
        for size, vectors in zip(SIZES, found, strict=True):
            cut = truncate_layers(narrow(copy.deepcopy(backbone), size.feed_forward), size.layers)
            assert inner_width(cut.config) == size.feed_forward * INNER
            (alone,) = Encoder(cut, cell.pooling).eval()(ids, mask, [Size(size.layers, size.dim)])
            torch.testing.assert_close(vectors, alone, **closeness(cell))
            if cell.family in BY_NAME:
                naive = truncate_layers(naive_narrowed(backbone, cell.family, size.feed_forward), size.layers)
                (alone,) = Encoder(naive, cell.pooling).eval()(ids, mask, [Size(size.layers, size.dim)])
                torch.testing.assert_close(vectors, alone, **closeness(cell))
        # Negative control: another fraction gives other vectors.
        other = encoder(ids, mask, [Size(2, 8)])[0]
    assert not torch.allclose(found[0], other, atol=1e-3)
    assert not any("weight" in module.__dict__ for module in backbone.modules())  # nothing is left behind


@pytest.mark.parametrize("family", ["bert", "modernbert", "qwen3"])
def test_gradients_fall_on_prefixes_as_in_a_naive_restatement(family: str) -> None:
    cell = next(each for each in CELLS if each.family == family)
    backbone = cell.build().double()
    encoder, (ids, mask) = Encoder(backbone, "mean"), texts()
    generator = torch.Generator().manual_seed(2)
    size = Size(LAYERS, 16, 0.25)
    weights = torch.randn(3, 16, dtype=torch.float64, generator=generator)
    (vectors,) = encoder(ids, mask, [size])
    (vectors * weights).sum().backward()
    naive = naive_narrowed(backbone, family, size.feed_forward)
    (vectors,) = Encoder(naive, "mean")(ids, mask, [Size(LAYERS, 16)])
    (vectors * weights).sum().backward()
    narrowed = 0
    for (name, whole), (_, cut) in zip(backbone.named_parameters(), naive.named_parameters(), strict=True):
        if cut.grad is None:
            assert whole.grad is None, name
            continue
        assert whole.grad is not None
        if whole.shape == cut.shape:
            torch.testing.assert_close(whole.grad, cut.grad, rtol=1e-9, atol=1e-12)
            continue
        narrowed += 1
        expected = torch.zeros_like(whole)
        halves, count = len(whole) // INNER, INNER // 4
        if whole.shape[-1] == INNER and whole.ndim == 2:
            expected[:, :count] = cut.grad
        else:
            for half in range(halves):
                expected[half * INNER : half * INNER + count] = cut.grad[half * count : (half + 1) * count]
        torch.testing.assert_close(whole.grad, expected, rtol=1e-9, atol=1e-12)
        assert (whole.grad == 0).any() and (whole.grad != 0).any()
    assert narrowed >= 2 * LAYERS


def test_gradients_of_several_fractions_add_up() -> None:
    cell = CELLS[0]
    (ids, mask), sizes = texts(), [Size(2, 8, 0.25), Size(3, 16, 0.5), Size(3, HIDDEN)]
    together = Encoder(cell.build().double(), "mean")
    torch.stack([each.square().sum() for each in together(ids, mask, sizes)]).sum().backward()
    apart = Encoder(cell.build().double(), "mean")
    for size in sizes:
        apart(ids, mask, [size])[0].square().sum().backward()
    for one, other in zip(together.parameters(), apart.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-9, atol=1e-12)


@every_family
@torch.no_grad()
def test_sorting_changes_no_output_but_those_of_fractions(cell: Cell) -> None:
    backbone = built(cell)
    encoder, (ids, mask) = Encoder(backbone, cell.pooling).eval(), texts()
    size = Size(LAYERS, HIDDEN, 0.5)
    whole, narrower = encoder(ids, mask, [Size(LAYERS, HIDDEN), size])
    nested = NestedFeedForwards.of(backbone)
    importance = [torch.rand(INNER, generator=torch.Generator().manual_seed(seed)) for seed in range(LAYERS)]
    before = encoder_layers(backbone)[0].state_dict()
    nested.sort(importance)
    after, narrower_after = encoder(ids, mask, [Size(LAYERS, HIDDEN), size])
    torch.testing.assert_close(after, whole, **closeness(cell))
    assert not torch.allclose(narrower_after, narrower, atol=1e-3)
    changed = encoder_layers(backbone)[0].state_dict()
    assert any(not torch.equal(before[name], changed[name]) for name in before)
    # Negative control: sorting only the matrices into the neurons is another model.
    for layer in nested.layers:
        for matrix in layer.into:
            matrix.weight.copy_(layer.into_rows(matrix.weight, matrix, torch.arange(INNER).flip(0)))
    assert not torch.allclose(encoder(ids, mask, [Size(LAYERS, HIDDEN)])[0], whole, atol=1e-3)


@pytest.mark.parametrize("family", ["bert", "modernbert", "qwen3"])
@torch.no_grad()
def test_importance_is_the_activation_times_the_norm_of_the_outgoing_weights(family: str) -> None:
    cell = next(each for each in CELLS if each.family == family)
    backbone = cell.build().double()
    encoder, (ids, mask) = Encoder(backbone, "mean").eval(), texts()
    layout = Layout.of_mask(mask)
    nested = NestedFeedForwards.of(backbone)
    with nested.weighing(lambda activations: activations[mask.bool()]) as importance:
        encoder.hidden_states(layout.pack(ids), layout, [LAYERS])
    assert len(importance) == LAYERS
    seen: list[Tensor] = []
    out = encoder_layers(backbone)[1].get_submodule(BY_NAME[family][1])
    handle = out.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    backbone(input_ids=ids, attention_mask=mask)
    handle.remove()
    for neuron in range(INNER):
        total = sum(
            abs(float(seen[0][text, token, neuron])) for text in range(3) for token in range(int(mask[text].sum()))
        )
        norm = sum(float(weight) ** 2 for weight in out.weight[:, neuron]) ** 0.5
        assert float(importance[1][neuron]) == pytest.approx(total * norm, rel=1e-9)


def test_a_pass_that_fails_leaves_the_whole_model() -> None:
    backbone = CELLS[0].build()
    with pytest.raises(RuntimeError), NestedFeedForwards.of(backbone).at(0.25):
        assert encoder_layers(backbone)[0].intermediate.dense.weight.shape == (INNER // 4, HIDDEN)
        raise RuntimeError
    assert encoder_layers(backbone)[0].intermediate.dense.weight.shape == (INNER, HIDDEN)


@torch.no_grad()
def test_a_body_without_a_head_of_its_own_takes_its_depths() -> None:
    (ids, mask), backbone = texts(), CELLS[0].build()
    heads = nn.ModuleDict({key: nn.Linear(HIDDEN, HIDDEN) for key in ("2", "2x0_25", "3")})
    bare, encoder = Encoder(backbone, "mean"), Encoder(backbone, "mean", heads)
    sizes = [Size(2, 8, 0.25), Size(2, 8, 0.5), Size(3, 8, 0.25), Size(1, 8, 0.5)]
    whole = [size.body.of_dim(HIDDEN) for size in sizes]
    states = bare(ids, mask, whole)
    maps = [heads["2x0_25"], heads["2"], heads["3"], nn.Identity()]
    for found, state, mapped in zip(encoder(ids, mask, sizes), states, maps, strict=True):
        torch.testing.assert_close(found, mapped(state)[:, :8])
    kept = heads_of_narrowed(heads, 0.25, 2)
    assert set(kept) == {"2"} and torch.equal(kept["2"].weight, heads["2x0_25"].weight)


@pytest.mark.parametrize(("fraction", "neurons", "count"), [(0.25, 48, 12), (0.1, 1540, 154), (1 / 3, 48, 16)])
def test_a_fraction_is_a_whole_number_of_neurons(fraction: float, neurons: int, count: int) -> None:
    assert count_of(fraction, neurons) == count
    for wrong in (fraction + 0.3 / neurons, 0.4 / neurons):
        with pytest.raises(ModelError, match="whole number from 1 on; give a fraction such as"):
            count_of(wrong, neurons)


def test_other_feed_forwards_are_refused() -> None:
    # As many neurons as hidden elements: shapes do not tell a feed-forward from attention.
    shape = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, vocab_size=30)
    with pytest.raises(ModelError, match="cannot cut to a fraction"):
        NestedFeedForwards.of(BertModel(BertConfig(**shape)))
    # A norm of the neurons sees all of them.
    backbone = CELLS[0].build()
    for layer in encoder_layers(backbone):
        layer.intermediate.add_module("norm", nn.LayerNorm(INNER))
    with pytest.raises(ModelError, match="cannot cut to a fraction"):
        NestedFeedForwards.of(backbone)


def test_bodies_have_names() -> None:
    assert [str(body) for body in (Body(6), Body(6, 0.25))] == ["6", "6x0.25"]
    assert [Body.parse(text) for text in ("6", "6x0.25")] == [Body(6), Body(6, 0.25)]
    assert Body(6, 0.25).described == "6 layers with 0.25 of their feed-forwards"

"""The fused pre-training loss against the naive restatement (tests/models/naive.py), on real text."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from models.encoder import build_masked_lm
from models.fused_linear_cross_entropy import fused_linear_cross_entropy
from models.masked_autoencoder import DecoderInputs, MaskedAutoencoder
from models.sizes import Size
from tests.models.naive import bert_layer_like, naive_loss

LADDERS = {
    1: [Size(3, 48)],
    2: [Size(1, 16), Size(3, 48)],
    6: [Size(1, 8), Size(2, 16), Size(3, 24), Size(4, 32), Size(5, 40), Size(6, 48)],
}


def bert(layers: int, vocab_size: int, *, family: str = "bert") -> torch.nn.Module:
    torch.manual_seed(0)
    shape = dict(hidden_size=48, num_attention_heads=4, intermediate_size=96, num_hidden_layers=layers)
    config = dict(model_type=family, **shape, max_position_embeddings=80)
    config |= dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, initializer_range=0.15)
    return build_masked_lm(config, vocab_size=vocab_size, pad_token_id=0)


def masked_texts(texts: list[str], tokenizer, *, length: int = 32, unmasked_row: int | None = None):
    """Padded ids of real texts with simple masks; one row may keep no mask at all."""
    texts = [" ".join(text.split()[: 6 + 4 * k]) for k, text in enumerate(texts)]  # so that there is padding
    encoded = tokenizer(texts, truncation=True, max_length=length, padding=True, return_tensors="pt")
    ids, attention = encoded["input_ids"], encoded["attention_mask"]
    generator = torch.Generator().manual_seed(1)
    ordinary = attention.bool() & (ids > 4)
    draw = torch.rand(ids.shape, generator=generator)

    def mask(ratio: float):
        chosen = ordinary & (draw < ratio)
        if unmasked_row is not None:
            chosen[unmasked_row] = False
        return ids.masked_fill(chosen, tokenizer.mask_token_id), torch.where(chosen, ids, -100)

    return ids, attention, *mask(0.25), *mask(0.5)


def fused_loss(model: MaskedAutoencoder, sizes, weights, inputs, *, with_decoder: bool = True):
    _, attention, encoder_ids, encoder_labels, decoder_ids, decoder_labels = inputs
    decoder = DecoderInputs(decoder_ids, decoder_labels, scale=1.0 / int((decoder_labels != -100).sum()))
    return model(
        encoder_ids,
        attention,
        sizes=sizes,
        labels=encoder_labels,
        size_weights=weights,
        encoder_scale=1.0 / int((encoder_labels != -100).sum()),
        decoder=decoder if with_decoder else None,
    )


def compare(model, layer, masked_lm, naive, fused) -> tuple[float, float]:
    """Relative loss difference and the largest gradient difference, relative to that gradient's largest entry."""
    for module in (masked_lm, model, *([layer] if layer is not None else [])):
        module.zero_grad()
    naive.backward()
    expected = {name: p.grad.clone() for name, p in masked_lm.named_parameters() if p.grad is not None}
    if layer is not None:
        expected |= {f"layer.{name}": p.grad.clone() for name, p in layer.named_parameters()}
    masked_lm.zero_grad()
    fused.backward()
    got = {name: p.grad for name, p in masked_lm.named_parameters() if p.grad is not None}
    if layer is not None:
        copy = bert_layer_like(model)
        d = model.decoder
        by_path = {
            "attention.self.query": d.query,
            "attention.self.key": d.key,
            "attention.self.value": d.value,
            "attention.output.dense": d.attention_output,
            "attention.output.LayerNorm": d.attention_norm,
            "intermediate.dense": d.up,
            "output.dense": d.down,
            "output.LayerNorm": d.output_norm,
        }
        assert {n.rsplit(".", 1)[0] for n, _ in copy.named_parameters()} == set(by_path)
        for path, module in by_path.items():
            got |= {f"layer.{path}.{name}": p.grad for name, p in module.named_parameters()}
    assert expected.keys() == got.keys()
    worst = 0.0
    for name, want in expected.items():
        # A key's bias shifts all scores of a query alike: its gradient is zero in theory, so compare absolutely.
        scale = 1.0 if ".key.bias" in name else want.abs().max().clamp(min=1e-8)
        worst = max(worst, float((got[name] - want).abs().max() / scale))
    return abs(float(fused.detach() - naive.detach())) / abs(float(naive.detach())), worst


@pytest.mark.parametrize("count", [1, 2, 6])
@pytest.mark.parametrize("with_decoder", [True, False])
@pytest.mark.parametrize("unmasked_row", [None, 2])
def test_fused_equals_naive_on_real_text(count, with_decoder, unmasked_row, tiny_tokenizer, docstrings):
    sizes = LADDERS[count]
    masked_lm = bert(sizes[-1].layers, len(tiny_tokenizer))
    model = MaskedAutoencoder(masked_lm, pooling="cls", with_decoder=with_decoder, logits_memory_mib=0.5)
    inputs = masked_texts(docstrings[:6], tiny_tokenizer, unmasked_row=unmasked_row)
    assert not bool(inputs[1].all()), "the batch must contain padding"
    weights = [1.0 / count + 0.1 * k for k in range(count)]
    layer = bert_layer_like(model) if with_decoder else None
    naive, encoder_losses, decoder_losses = naive_loss(masked_lm, layer, sizes, weights, inputs)
    fused, encoder_parts, decoder_parts = fused_loss(model, sizes, weights, inputs, with_decoder=with_decoder)
    torch.testing.assert_close(encoder_parts, torch.tensor(encoder_losses), rtol=1e-5, atol=1e-6)
    if with_decoder:
        torch.testing.assert_close(decoder_parts, torch.tensor(decoder_losses), rtol=1e-5, atol=1e-6)
    loss_error, gradient_error = compare(model, layer, masked_lm, naive, fused)
    assert loss_error < 1e-6
    assert gradient_error < 1e-4


@pytest.mark.parametrize("bottleneck", ["cls", "head"])
def test_basic_decoding_reads_what_it_is_told(bottleneck, tiny_tokenizer, docstrings):
    """RetroMAE's decoder reads the CLS vector itself (SentMAE eq. 2), SMAE's reads head(CLS) (Starbucks eq. 7)."""
    masked_lm = bert(3, len(tiny_tokenizer))
    model = MaskedAutoencoder(masked_lm, pooling="cls", with_decoder=True, bottleneck=bottleneck)
    inputs, layer = masked_texts(docstrings[:6], tiny_tokenizer), bert_layer_like(model)
    errors = {}
    for told in ("cls", "head"):
        naive, *_ = naive_loss(masked_lm, layer, LADDERS[1], [1.0], inputs, bottleneck=told)
        fused, *_ = fused_loss(model, LADDERS[1], [1.0], inputs)
        errors[told] = compare(model, layer, masked_lm, naive, fused)
    loss_error, gradient_error = errors.pop(bottleneck)
    assert loss_error < 1e-6
    assert gradient_error < 1e-4
    ((loss_error, gradient_error),) = errors.values()  # the other one is the negative control
    assert loss_error > 2e-5 and gradient_error > 1e-2


def test_a_wrong_merge_is_noticed(tiny_tokenizer, docstrings, monkeypatch):
    """Negative control: with the CLS share taken against nothing but itself, the comparison above fails."""
    sizes = LADDERS[2]
    masked_lm = bert(3, len(tiny_tokenizer))
    model = MaskedAutoencoder(masked_lm, pooling="cls", with_decoder=True)
    inputs = masked_texts(docstrings[:6], tiny_tokenizer)
    layer = bert_layer_like(model)
    naive, *_ = naive_loss(masked_lm, layer, sizes, [0.5, 0.5], inputs)
    sigmoid = torch.sigmoid
    monkeypatch.setattr(torch, "sigmoid", lambda x: sigmoid(x - 1.0))
    fused, *_ = fused_loss(model, sizes, [0.5, 0.5], inputs)
    monkeypatch.undo()
    _, gradient_error = compare(model, layer, masked_lm, naive, fused)
    assert gradient_error > 1e-2  # the loss of an untrained model hardly moves


def test_micro_batches_add_up(tiny_tokenizer, docstrings):
    sizes = LADDERS[2]
    masked_lm = bert(3, len(tiny_tokenizer))
    model = MaskedAutoencoder(masked_lm, pooling="cls", with_decoder=True)
    inputs = masked_texts(docstrings[:6], tiny_tokenizer)
    whole = float(fused_loss(model, sizes, [0.5, 0.5], inputs)[0].detach())
    scales = [1.0 / int((inputs[k] != -100).sum()) for k in (3, 5)]
    parts = 0.0
    for rows in (slice(0, 2), slice(2, 6)):
        _, attention, ids, labels, decoder_ids, decoder_labels = (x[rows] for x in inputs)
        loss, *_ = model(
            ids,
            attention,
            sizes=sizes,
            labels=labels,
            decoder=DecoderInputs(decoder_ids, decoder_labels, scale=scales[1]),
            size_weights=[0.5, 0.5],
            encoder_scale=scales[0],
        )
        parts += float(loss.detach())
    assert parts == pytest.approx(whole, rel=1e-6)


@pytest.mark.parametrize("family", ["roberta", "distilbert", "modernbert"])
def test_other_families_train(family, tiny_tokenizer, docstrings):
    """Loss and gradients exist for each family, and the full-size encoder loss is the family's own MLM loss."""
    torch.manual_seed(0)
    shape: dict = dict(hidden_size=48, num_hidden_layers=3, num_attention_heads=4, intermediate_size=96)
    if family == "distilbert":
        shape = dict(dim=48, n_layers=3, n_heads=4, hidden_dim=96, dropout=0.0, attention_dropout=0.0)
    elif family == "roberta":
        shape |= dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    config = dict(model_type=family, max_position_embeddings=80, **shape)
    masked_lm = build_masked_lm(config, vocab_size=len(tiny_tokenizer), pad_token_id=0)
    model = MaskedAutoencoder(masked_lm, pooling="cls", with_decoder=True)
    inputs = masked_texts(docstrings[:6], tiny_tokenizer)
    loss, encoder_losses, _ = fused_loss(model, LADDERS[2], [0.5, 0.5], inputs)
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    own = masked_lm(inputs[2], attention_mask=inputs[1], labels=inputs[3]).loss
    assert encoder_losses[-1].item() == pytest.approx(own.item(), rel=1e-5)


@pytest.mark.parametrize("name", ["relu", "gelu_new"])
@pytest.mark.parametrize("family", ["bert", "distilbert", "modernbert", "roberta"])
def test_the_head_has_the_activation_of_the_models_config(family, name, tiny_tokenizer, docstrings):
    """transformers' own MLM loss. RoBERTa's head there is gelu, whatever its config says of the layers."""
    torch.manual_seed(0)
    shape: dict = dict(hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96)
    if family == "distilbert":
        shape = dict(dim=48, n_layers=2, n_heads=4, hidden_dim=96, activation=name)
    elif family == "modernbert":
        shape |= dict(hidden_activation=name, classifier_activation=name)
    else:
        shape |= dict(hidden_act=name)
    config = dict(model_type=family, max_position_embeddings=80, initializer_range=0.5, **shape)
    masked_lm = build_masked_lm(config, vocab_size=len(tiny_tokenizer), pad_token_id=0).eval()
    model = MaskedAutoencoder(masked_lm, pooling="cls", with_decoder=False).eval()
    inputs = masked_texts(docstrings[:6], tiny_tokenizer)

    def ours() -> float:
        return fused_loss(model, [Size(2, 48)], [1.0], inputs, with_decoder=False)[0].item()

    own = float(masked_lm(inputs[2], attention_mask=inputs[1], labels=inputs[3]).loss.detach())
    assert ours() == pytest.approx(own, rel=1e-6)
    # Negative control: a head of another activation is noticed.
    model.head.activation = torch.nn.GELU() if name == "relu" and family != "roberta" else torch.nn.ReLU()
    assert ours() != pytest.approx(own, rel=1e-6)


@pytest.mark.parametrize("chunk_rows", [1, 7, 64])
def test_linear_cross_entropy_in_chunks(chunk_rows):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(23, 16, generator=generator, dtype=torch.float64, requires_grad=True)
    table = torch.randn(50, 16, generator=generator, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(50, generator=generator, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 50, (23,), generator=generator)
    weights = torch.rand(23, generator=generator)
    direct = (F.cross_entropy(rows @ table.T + bias, targets, reduction="none") * weights).sum()
    expected = torch.autograd.grad(direct * 3.0, (rows, table, bias))
    floats = [x.detach().float().requires_grad_() for x in (rows, table, bias)]
    loss, losses = fused_linear_cross_entropy(
        floats[0], floats[1], bias=floats[2], targets=targets, row_weights=weights, chunk_rows=chunk_rows
    )
    got = torch.autograd.grad(loss * 3.0, floats)
    assert float(loss) == pytest.approx(float(direct), rel=1e-6)
    assert float((losses * weights).sum()) == pytest.approx(float(direct), rel=1e-6)
    for ours, theirs in zip(got, expected):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-5)


def test_linear_cross_entropy_of_a_hopeless_target_is_exact():
    """A target whose probability underflows in float32 still has its true loss."""
    rows, table = torch.full((1, 1), 300.0), torch.tensor([[1.0], [0.0], [-1.0]])
    args = dict(bias=None, targets=torch.tensor([2]), row_weights=torch.ones(1), chunk_rows=16)
    assert float(fused_linear_cross_entropy(rows, table, **args)[0]) == pytest.approx(600.0)


def test_linear_cross_entropy_in_bfloat16_stays_within_rounding():
    """bf16 products, float32 sums: the loss within 1 %, gradients within 2 % of their norm."""
    generator = torch.Generator().manual_seed(0)
    rows, table = torch.randn(200, 64, generator=generator), torch.randn(500, 64, generator=generator) * 0.2
    bias, targets = torch.zeros(500), torch.randint(0, 500, (200,), generator=generator)
    weights = torch.full((200,), 1 / 200)
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        r, t, b = (x.to(dtype).requires_grad_() for x in (rows, table, bias))
        loss, _ = fused_linear_cross_entropy(r, t, bias=b, targets=targets, row_weights=weights, chunk_rows=64)
        results.append((float(loss), [g.float() for g in torch.autograd.grad(loss, (r, t, b))]))
    assert results[1][0] == pytest.approx(results[0][0], rel=1e-2)
    for low, exact in zip(results[1][1], results[0][1]):
        assert float((low - exact).norm() / exact.norm()) < 0.02

"""Enhanced decoding against its restatement (tests/models/naive.py) on real text, and what its visibility masks are."""

from __future__ import annotations

import pytest
import torch

from data.keyed_random import Purpose, purpose_keys, sample_keys
from models import masked_autoencoder
from models.encoder import build_masked_lm
from models.masked_autoencoder import DecoderInputs, MaskedAutoencoder
from models.visibility import visible_positions
from tests.models.naive import bert_layer_like, naive_enhanced_loss, naive_visibility
from tests.models.test_masked_autoencoder import LADDERS, bert, compare, masked_texts

SHARE = 0.5


def keys_of(count: int, *, seed: int = 3, epoch: int = 0) -> torch.Tensor:
    numbers = torch.arange(count).numpy()
    keys = sample_keys(seed, epochs=numbers * 0 + epoch, sources=numbers * 0, samples=numbers)
    return torch.from_numpy(purpose_keys(keys, Purpose.VISIBILITY).view("int64"))


def enhanced_texts(texts: list[str], tokenizer) -> tuple[torch.Tensor, ...]:
    """ids, attention mask, the encoder's input ids and labels, and every ordinary token as the decoder's labels."""
    ids, attention, encoder_ids, encoder_labels, *_ = masked_texts(texts, tokenizer)
    return ids, attention, encoder_ids, encoder_labels, torch.where(ids > 4, ids, -100)


def enhanced_loss(model: MaskedAutoencoder, sizes, weights, inputs, keys, *, scales=None):
    ids, attention, encoder_ids, encoder_labels, decoder_labels = inputs
    encoder_scale, decoder_scale = scales or [
        1.0 / int((each != -100).sum()) for each in (encoder_labels, decoder_labels)
    ]
    return model(
        encoder_ids,
        attention,
        sizes=sizes,
        labels=encoder_labels,
        decoder=DecoderInputs(ids, decoder_labels, decoder_scale, keys, SHARE),
        size_weights=weights,
        encoder_scale=encoder_scale,
    )


@pytest.fixture
def case(tiny_tokenizer, docstrings):
    """(backbone, model, a transformers layer like its decoder, inputs with padding, keys) of two sizes."""
    masked_lm = bert(3, len(tiny_tokenizer))
    model = MaskedAutoencoder(masked_lm, pooling="cls", with_decoder=True, logits_memory_mib=0.5)
    inputs = enhanced_texts(docstrings[:5], tiny_tokenizer)
    assert not bool(inputs[1].all()), "the batch must contain padding"
    return masked_lm, model, bert_layer_like(model), inputs, keys_of(len(inputs[0]))


@pytest.mark.parametrize("sizes", [LADDERS[1], LADDERS[2]], ids=["retromae", "smae"])
def test_fused_equals_row_by_row(sizes, case):
    masked_lm, model, layer, inputs, keys = case
    weights = [0.6, 0.5][: len(sizes)]
    columns = naive_visibility(keys.tolist(), inputs[1].sum(1).tolist(), SHARE)
    naive, encoder_losses, decoder_losses = naive_enhanced_loss(masked_lm, layer, sizes, weights, inputs, columns)
    fused, encoder_parts, decoder_parts = enhanced_loss(model, sizes, weights, inputs, keys)
    torch.testing.assert_close(encoder_parts, torch.tensor(encoder_losses), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(decoder_parts, torch.tensor(decoder_losses), rtol=1e-5, atol=1e-6)
    loss_error, gradient_error = compare(model, layer, masked_lm, naive, fused)
    assert loss_error < 1e-6
    assert gradient_error < 1e-4


def test_retromae_reads_the_sentence_vector_itself(case):
    """SentMAE eq. 4: h is the encoder's CLS state, in the queries and at position 0 of keys and values."""
    masked_lm, model, layer, inputs, keys = case
    model.bottleneck = "cls"
    columns = naive_visibility(keys.tolist(), inputs[1].sum(1).tolist(), SHARE)
    naive, *_ = naive_enhanced_loss(masked_lm, layer, LADDERS[1], [1.0], inputs, columns, bottleneck="cls")
    fused, *_ = enhanced_loss(model, LADDERS[1], [1.0], inputs, keys)
    loss_error, gradient_error = compare(model, layer, masked_lm, naive, fused)
    assert loss_error < 1e-6
    assert gradient_error < 1e-4
    # Negative control: SMAE's head(CLS) is another vector.
    naive, *_ = naive_enhanced_loss(masked_lm, layer, LADDERS[1], [1.0], inputs, columns, bottleneck="cls")
    model.bottleneck = "head"
    fused, *_ = enhanced_loss(model, LADDERS[1], [1.0], inputs, keys)
    loss_error, gradient_error = compare(model, layer, masked_lm, naive, fused)
    assert loss_error > 1e-4 and gradient_error > 1e-2


@pytest.mark.parametrize("mistake", ["a row sees itself", "rows share a sample", "position 0 is hidden", "padding"])
def test_a_wrong_mask_is_noticed(mistake, case, monkeypatch):
    """Negative controls: one row's wrong columns are enough for the comparison above to fail."""
    masked_lm, model, layer, inputs, keys = case
    columns = naive_visibility(keys.tolist(), inputs[1].sum(1).tolist(), SHARE)
    naive, *_ = naive_enhanced_loss(masked_lm, layer, LADDERS[2], [0.5, 0.5], inputs, columns)
    visible = visible_positions(keys, inputs[1], share=SHARE)
    shortest = int(inputs[1].sum(1).argmin())
    if mistake == "a row sees itself":
        visible[0, 2, 2] = True
    elif mistake == "rows share a sample":
        visible[:] = visible[:, 1:2]
    elif mistake == "position 0 is hidden":
        visible[0, 3, 0] = False
    else:
        visible[shortest, 1, -1] = True
    monkeypatch.setattr(masked_autoencoder, "visible_positions", lambda *_, **__: visible)
    fused, *_ = enhanced_loss(model, LADDERS[2], [0.5, 0.5], inputs, keys)
    loss_error, gradient_error = compare(model, layer, masked_lm, naive, fused)
    assert loss_error > 1e-6 and gradient_error > 1e-4


def test_micro_batches_add_up(case):
    """Other texts beside it and other padding change no text's sample: 2 + 3 texts have the loss and gradients of 5."""
    _, model, _, inputs, keys = case
    scales = tuple(1.0 / int((inputs[k] != -100).sum()) for k in (3, 4))

    def gradients(parts: list[list[int]], changed: int = 0) -> tuple[float, dict[str, torch.Tensor]]:
        model.zero_grad()
        total = 0.0
        for rows in parts:
            longest = int(inputs[1][rows].sum(1).max())
            cut = tuple(each[rows, :longest] for each in inputs)
            loss = enhanced_loss(model, LADDERS[2], [0.5, 0.5], cut, keys[rows] + changed, scales=scales)[0]
            loss.backward()
            total += float(loss.detach())
        return total, {name: p.grad.clone() for name, p in model.named_parameters()}

    whole, expected = gradients([[0, 1, 2, 3, 4]])
    total, got = gradients([[3, 0], [4, 1, 2]])
    assert total == pytest.approx(whole, rel=1e-6)
    for name, want in expected.items():
        scale = 1.0 if "key.bias" in name else float(want.abs().max().clamp(min=1e-8))
        assert float((got[name] - want).abs().max()) < 1e-4 * scale, name
    other, _ = gradients([[3, 0], [4, 1, 2]], changed=1)
    assert abs(other / whole - 1) > 1e-5  # the sample matters


@pytest.mark.parametrize("family", ["roberta", "distilbert", "modernbert"])
def test_other_families_train(family, tiny_tokenizer, docstrings):
    """RoBERTa's positions start behind its padding row; ModernBERT has none, so the decoder brings its own."""
    torch.manual_seed(0)
    shape: dict = dict(hidden_size=48, num_hidden_layers=3, num_attention_heads=4, intermediate_size=96)
    if family == "distilbert":
        shape = dict(dim=48, n_layers=3, n_heads=4, hidden_dim=96, dropout=0.0, attention_dropout=0.0)
    config = dict(model_type=family, max_position_embeddings=80, **shape)
    masked_lm = build_masked_lm(config, vocab_size=len(tiny_tokenizer), pad_token_id=0)
    model = MaskedAutoencoder(masked_lm, pooling="cls", with_decoder=True)
    inputs = enhanced_texts(docstrings[:4], tiny_tokenizer)
    loss, *_ = enhanced_loss(model, LADDERS[2], [0.5, 0.5], inputs, keys_of(len(inputs[0])))
    loss.backward()
    assert torch.isfinite(loss.detach())
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and bool(torch.isfinite(parameter.grad).all()), name
    if family == "roberta":
        used = model.encoder.backbone.embeddings.position_embeddings.weight.grad.abs().sum(1) > 0
        assert used.nonzero().flatten().tolist() == list(range(1, 1 + inputs[0].shape[1]))


def test_a_micro_batch_without_text_sends_zeros(case):
    """What a rank runs when the others still have texts: gradients exist for every parameter and are zero."""
    _, model, *_ = case
    one = torch.ones((1, 1), dtype=torch.long)
    inputs = (0 * one, one, 0 * one, -100 * one, -100 * one)
    key = torch.zeros(1, dtype=torch.int64)
    loss, *_ = enhanced_loss(model, LADDERS[2], [0.5, 0.5], inputs, key, scales=(1.0, 1.0))
    loss.backward()
    decoder = model.decoder
    assert decoder is not None
    for name, parameter in decoder.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), name


@pytest.mark.parametrize("share", [0.3, 0.5, 0.85])
def test_visibility_statistics(share):
    """The share of others, self never, position 0 always, padding never, and rows and texts independent of another."""
    length, texts = 65, 64
    lengths = torch.full((texts,), length)
    lengths[::2] = 40
    attention = (torch.arange(length) < lengths[:, None]).long()
    visible = visible_positions(keys_of(texts), attention, share=share)
    assert visible.shape == (texts, length, length)
    assert not visible.diagonal(dim1=1, dim2=2).any()
    assert visible[:, 1:, 0].all()
    assert not visible[::2, :, 40:].any()
    full = visible[1::2]  # [32, 65, 65]
    others = ~torch.eye(length, dtype=torch.bool)
    others[:, 0] = False
    sampled = full[:, others].float()  # [32, pairs]
    # Five standard deviations of a mean of so many draws.
    tolerance = 5 * (share * (1 - share) / sampled.numel()) ** 0.5 + 2**-16
    assert abs(float(sampled.mean()) - share) < tolerance
    # Neighbouring rows, columns, and texts agree as often as independent draws do; equal draws would always.
    agree = share**2 + (1 - share) ** 2
    pairs = {
        "rows": full[:, 10:60, 65 - 4 :] == full[:, 11:61, 65 - 4 :],
        "columns": full[:, 1:10, 20:60] == full[:, 1:10, 21:61],
        "texts": full[:-1, 1:10, 20:60] == full[1:, 1:10, 20:60],
        "epochs": visible_positions(keys_of(texts, epoch=1), attention, share=share)[1::2, 1:10, 20:60]
        == full[:, 1:10, 20:60],
    }
    for name, equal in pairs.items():
        spread = 6 * (agree * (1 - agree) / equal.numel()) ** 0.5
        assert abs(float(equal.float().mean()) - agree) < spread, name


def test_visibility_is_its_restatement_and_a_function_of_the_text_alone():
    keys = keys_of(4)
    lengths = torch.tensor([9, 5, 12, 2])
    attention = (torch.arange(17) < lengths[:, None]).long()  # more padding than the longest needs
    visible = visible_positions(keys, attention, share=0.37)
    columns = naive_visibility(keys.tolist(), lengths.tolist(), 0.37)
    for text, rows in enumerate(columns):
        for row, wanted in enumerate(rows):
            assert visible[text, row].nonzero().flatten().tolist() == wanted
    order = torch.tensor([2, 0, 3])
    again = visible_positions(keys[order], attention[order, :12], share=0.37)
    for place, text in enumerate(order.tolist()):
        n = int(lengths[text])
        assert torch.equal(again[place, :n, :n], visible[text, :n, :n])
    assert not torch.equal(visible_positions(keys + 1, attention, share=0.37), visible)


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_embeddings_beside_the_loss_are_those_without_it(pooling, tiny_tokenizer, docstrings):
    """A contrastive term's gradient is made from one forward and sent through another: dropout must be the same."""
    torch.manual_seed(0)
    shape = dict(hidden_size=48, num_hidden_layers=3, num_attention_heads=4, intermediate_size=96)
    config = dict(model_type="bert", max_position_embeddings=80, hidden_dropout_prob=0.1, **shape)
    masked_lm = build_masked_lm(config, vocab_size=len(tiny_tokenizer), pad_token_id=0)
    model = MaskedAutoencoder(masked_lm, pooling=pooling, with_decoder=True).train()
    ids, attention, encoder_ids, labels, decoder_labels = enhanced_texts(docstrings[:5], tiny_tokenizer)

    def embeddings(seed: int, **options) -> list[torch.Tensor]:
        torch.manual_seed(seed)
        return model(encoder_ids, attention, sizes=LADDERS[2], labels=labels, size_weights=[0.5, 0.5], **options)

    alone = embeddings(1, embeddings="only")
    decoder = DecoderInputs(ids, decoder_labels, visibility_keys=keys_of(5), visible_share=SHARE)
    _, _, _, *beside = embeddings(1, embeddings="also", decoder=decoder)
    assert [each.shape for each in alone] == [(5, 16), (5, 48)]
    for first, second in zip(alone, beside, strict=True):
        assert torch.equal(first, second)
    assert not torch.equal(embeddings(2, embeddings="only")[0], alone[0])

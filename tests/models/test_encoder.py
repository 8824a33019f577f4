"""Every size from one pass is what a model cut to that size computes, for each family of encoders."""

from __future__ import annotations

import pytest
import torch

from models.backbone import encoder_layers, set_dropout, truncate_layers
from models.encoder import Encoder, base_of, build_masked_lm, float32_einsum, load_encoder, load_masked_lm, pool
from models.layout import Layout
from models.packed_attention import check_packs
from models.settings import EmbeddingSettings
from models.sizes import ModelError, Size

SHAPE = dict(hidden_size=48, num_hidden_layers=3, num_attention_heads=4, intermediate_size=96)
FAMILIES = {
    "bert": dict(model_type="bert", **SHAPE, max_position_embeddings=64),
    "roberta": dict(model_type="roberta", **SHAPE, max_position_embeddings=64),
    "distilbert": dict(model_type="distilbert", dim=48, n_layers=3, n_heads=4, hidden_dim=96),
    "modernbert": dict(
        model_type="modernbert",
        **SHAPE,
        max_position_embeddings=64,
        local_attention=8,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
    ),
}
SIZES = [Size(1, 16), Size(2, 32), Size(3, 48)]


def build(family: str, pooling: str = "mean") -> Encoder:
    torch.manual_seed(0)
    return Encoder(base_of(build_masked_lm(FAMILIES[family], vocab_size=120, pad_token_id=1)), pooling).eval()


def texts() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(5, 120, (3, 12), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(12) < torch.tensor([[12], [7], [3]])).long()
    return ids.masked_fill(mask == 0, 1), mask


@pytest.mark.parametrize("pooling", ["cls", "mean"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_size_is_the_cut_model(family, pooling):
    ids, mask = texts()
    whole = build(family, pooling)
    with torch.no_grad():
        embeddings = whole(ids, mask, SIZES)
        for size, embedding in zip(SIZES, embeddings):
            cut = build(family, pooling)
            truncate_layers(cut.backbone, size.layers)
            last = cut.backbone(input_ids=ids, attention_mask=mask).last_hidden_state
            weights = mask[..., None].float()
            pooled = last[:, 0] if pooling == "cls" else (last * weights).sum(1) / weights.sum(1)
            assert embedding.shape == (3, size.dim)
            torch.testing.assert_close(embedding, pooled[:, : size.dim], rtol=1e-5, atol=1e-6)
            # Negative control: another depth gives other vectors.
            other = whole(ids, mask, [Size(size.layers % 3 + 1, size.dim)])[0]
            assert not torch.allclose(embedding, other, atol=1e-3)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_padding_does_not_reach_the_embedding(family):
    ids, mask = texts()
    encoder = build(family)
    with torch.no_grad():
        short = encoder(ids[2:, :3], mask[2:, :3], SIZES)
        padded = encoder(ids, mask, SIZES)
    for alone, together in zip(short, padded):
        torch.testing.assert_close(alone[0], together[2], rtol=1e-4, atol=1e-5)


def test_the_mean_runs_in_float32_under_autocast():
    hidden = torch.randn(8, 120, 64, generator=torch.Generator().manual_seed(0)) + 0.5
    mask = (torch.arange(120) < torch.arange(50, 130, 10)[:, None]).long()
    exact = (hidden.double() * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mean = pool(hidden, mask, "mean")
        half = torch.einsum("bsd,bs->bd", hidden, mask.float()) / mask.sum(1, keepdim=True)
    torch.testing.assert_close(mean.double(), exact, rtol=0, atol=1e-6)
    # Negative control: a product that autocast sees is rounded.
    assert float((half.double() - exact).abs().max()) > 1e-4


def test_the_decoders_score_of_position_0_runs_in_float32_under_autocast():
    """The score that models/mae_decoder.py computes for position 0 is that of float64, and it has a gradient."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, 5, 8, generator=generator, requires_grad=True)
    key = torch.randn(3, 2, 4, 8, generator=generator)
    exact = (query.double()[None] * key.double()[:, :, :, None]).sum(-1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = float32_einsum("bhmk,sbhk->sbhm", query, key)
        half = torch.einsum("bhmk,sbhk->sbhm", query, key)
    torch.testing.assert_close(scores.double(), exact, rtol=1e-5, atol=1e-5)
    assert float((half.double() - exact).detach().abs().max()) > 1e-3
    (gradient,) = torch.autograd.grad(scores.sum(), query)
    torch.testing.assert_close(gradient, key.sum(0)[:, :, None].expand_as(query), rtol=1e-5, atol=1e-5)


def test_saved_encoder_loads_with_its_settings(tmp_path):
    encoder = build("bert", "mean")
    encoder.backbone.save_pretrained(tmp_path)
    settings = EmbeddingSettings(pooling="mean", similarity="dot", ladder=((1, 16), (3, 48)), query_max_length=9)
    settings.save(tmp_path)
    assert EmbeddingSettings.load(tmp_path) == settings
    loaded = load_encoder(tmp_path).eval()
    assert loaded.pooling == "mean"
    ids, mask = texts()
    with torch.no_grad():
        for ours, theirs in zip(encoder(ids, mask, SIZES), loaded(ids, mask, SIZES)):
            torch.testing.assert_close(ours, theirs)


def test_refusals(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError, match="config"):
        load_encoder(tmp_path)
    with pytest.raises(ModelError, match="network"):
        load_masked_lm("nobody/has-this-model")
    with pytest.raises(ModelError, match="model_type"):
        build_masked_lm({}, vocab_size=10, pad_token_id=0)
    with pytest.raises(ModelError, match="hiden_size"):
        build_masked_lm({"model_type": "bert", "hiden_size": 3}, vocab_size=10, pad_token_id=0)
    with pytest.raises(ModelError, match="multiple"):
        build_masked_lm(
            {"model_type": "bert", "hidden_size": 50, "num_attention_heads": 4}, vocab_size=10, pad_token_id=0
        )
    with pytest.raises(ModelError, match="keep 4 layers"):
        truncate_layers(build("bert").backbone, 4)
    (tmp_path / "barista.json").write_text("{}")
    with pytest.raises(ModelError, match="settings"):
        EmbeddingSettings.load(tmp_path)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_packed_texts_are_the_padded_ones(family):
    ids, mask = texts()
    padded, packed = build(family), build(family)
    if family == "modernbert":
        with pytest.raises(ModelError, match="sliding"):
            check_packs(packed.backbone)
        return
    packed.backbone.set_attn_implementation("packed")
    for encoder in (padded, packed):
        sum(each.pow(power).sum() for power, each in enumerate(encoder(ids, mask, SIZES), start=2)).backward()
    for (name, ours), theirs in zip(packed.named_parameters(), padded.parameters()):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5, msg=name)
    assert "packed" not in packed.backbone.config.to_json_string()


def test_texts_that_attend_to_each_other_are_noticed():
    """The control: one text of all tokens is not three texts."""
    ids, mask = texts()
    encoder = build("bert")
    encoder.backbone.set_attn_implementation("packed")
    apart = encoder(ids, mask, SIZES)
    together = encoder(ids[mask.bool()][None], torch.ones(1, int(mask.sum()), dtype=torch.long), SIZES)
    assert (apart[2][:1] - together[2]).abs().max() > 1e-2


@pytest.mark.parametrize("attention", ["sdpa", "packed"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", ["bert", "distilbert", "roberta"])
def test_the_last_layer_reads_only_what_is_asked(family, checkpointing, attention):
    """Values and gradients at the positions read are those of the whole layer; the feed-forward ran for fewer rows."""
    ids, mask = texts()
    read = torch.zeros_like(mask, dtype=torch.bool)
    read[:, 0] = read[0, 5] = read[1, 3] = True
    states, rows = [], []
    models = [build(family).train() for _ in range(2)]
    for encoder, asked in zip(models, (None, read)):
        encoder.backbone.set_attn_implementation(attention)
        for module in encoder.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
            if "dropout_prob" in vars(module):
                module.dropout_prob = 0.0
        if checkpointing:
            encoder.backbone.activation_checkpointing_enable({"use_reentrant": False})
        layer = encoder_layers(encoder.backbone)[-1]
        last = next(m for m in reversed(list(layer.modules())) if isinstance(m, torch.nn.Linear))
        last.register_forward_hook(lambda m, args, out, into=rows: into.append(out.shape[:-1].numel()))
        layout = Layout.of_mask(mask)
        state = encoder.hidden_states(
            layout.pack(ids), layout, [2, 3], read=None if asked is None else layout.pack(asked)
        )
        states.append(state[3][read])
        (state[3][read].square().sum() + state[2].sum() * 0.1).backward()
    torch.testing.assert_close(states[1], states[0], rtol=1e-5, atol=1e-6)
    for (name, ours), theirs in zip(models[1].named_parameters(), models[0].parameters()):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5, msg=name)
    if family != "distilbert":  # its layers have another form, and compute all
        assert rows[-1] == int(read.sum()) < rows[0]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_passes_that_wait_for_their_backward_passes_read_their_own_positions(checkpointing):
    """Activation checkpointing repeats a pass after others have come; each has its own positions again."""
    ids, mask = texts()
    gradients = []
    for reads in (False, True):
        encoder = build("bert", "cls").train()
        set_dropout(encoder.backbone, 0.0)
        encoder._last_layer_skips = reads
        if checkpointing:
            encoder.backbone.activation_checkpointing_enable({"use_reentrant": False})
        first, second = (encoder(ids[rows], mask[rows], [Size(3, 48)])[0] for rows in (slice(0, 1), slice(1, 3)))
        (first.square().sum() + second.pow(3).sum()).backward()
        gradients.append([parameter.grad for parameter in encoder.parameters() if parameter.grad is not None])
    for ours, theirs in zip(*gradients):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_plain_call_after_reading_computes_everything():
    ids, mask = texts()
    encoder = build("bert")
    before = encoder.backbone(input_ids=ids, attention_mask=mask).last_hidden_state
    layout = Layout.of_mask(mask)
    encoder.hidden_states(layout.pack(ids), layout, [3], read=layout.pack(torch.eye(3, 12, dtype=torch.bool)))
    after = encoder.backbone(input_ids=ids, attention_mask=mask).last_hidden_state
    assert torch.equal(before, after)


@pytest.mark.full
@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_the_compiled_encoder_is_the_encoder(pooling):
    """Tracing sees the hooks and lengths of the moment. Code generation is PyTorch's own to test, and slow."""
    ids, mask = texts()
    plain, compiled = build("bert", pooling), build("bert", pooling)
    compiled.backbone.compile(dynamic=True, backend="aot_eager")
    for length in (12, 7, 9):
        for encoder in (plain, compiled):
            outputs = encoder(ids[:, :length], mask[:, :length], SIZES)
            sum(each.pow(power).sum() for power, each in enumerate(outputs, start=2)).backward()
    for (name, ours), theirs in zip(compiled.named_parameters(), plain.named_parameters()):
        torch.testing.assert_close(ours.grad, theirs[1].grad, rtol=1e-4, atol=1e-5, msg=name)

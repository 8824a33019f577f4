"""The table of families: each is itself at full size, at every cut, however padded, exported, and with merged adapters.

Each family is a tiny random model of its real class. Decoders are there twice, causal and bidirectional.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModel, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from data.ground.errors import ConfigError
from models.adapters import add_adapters, freeze_lower_layers, merged_tensors
from models.backbone import encoder_layers, final_norm, set_dropout, truncate_layers
from models.choices import Direction, Pooling
from models.direction import looks_ahead
from models.encoder import Encoder, base_of, build_decoder, build_masked_lm, load_encoder, pool
from models.layout import Layout
from models.loading import load_pretrained
from models.packed_attention import check_packs
from models.settings import EmbeddingSettings
from models.sizes import ModelError, Size
from tests.data.frame_tokenizers import FRAMED
from tests.trainer.exports import our_vectors
from trainer.exporting.sizes import export_sizes

sentence_transformers = pytest.importorskip("sentence_transformers", reason="needs the package sentence-transformers")

HIDDEN, LAYERS = 32, 3
SIZES = [Size(1, 8), Size(2, 12), Size(3, HIDDEN)]
VOCABULARY = 2008  # more rows than tokens, as many models have
_BERT = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
_DECODER = {**_BERT, "num_key_value_heads": 2}
WINDOW = 4  # of all decoders that have sliding layers
_FULL, _SLIDING = "full_attention", "sliding_attention"
ENCODERS: dict[str, dict[str, Any]] = {
    "bert": _BERT,
    "roberta": {**_BERT, "max_position_embeddings": 66},
    "xlm-roberta": {**_BERT, "max_position_embeddings": 66},
    "distilbert": {"dim": HIDDEN, "n_layers": LAYERS, "n_heads": 4, "hidden_dim": 48, "max_position_embeddings": 64},
    "mpnet": {**_BERT, "max_position_embeddings": 66},
    "electra": {**_BERT, "embedding_size": 16},
    "deberta-v2": {
        **_BERT,
        "relative_attention": True,
        "position_biased_input": False,
        "pos_att_type": ["p2c", "c2p"],
    },
    "modernbert": {**_BERT, "local_attention": 8, "layer_types": [_FULL, _SLIDING, _FULL]},
    "eurobert": _DECODER,
}
DECODERS: dict[str, dict[str, Any]] = {
    "qwen2": {**_DECODER, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 0},
    "qwen3": {**_DECODER, "head_dim": 8},
    "llama": _DECODER,
    "mistral": {**_DECODER, "sliding_window": WINDOW},
    "gemma2": {**_DECODER, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": WINDOW},
    "gemma3_text": {
        **_DECODER,
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "sliding_window": WINDOW,
        "layer_types": [_SLIDING, _SLIDING, _FULL],
    },
    "phi3": _DECODER,
}
# Whose attention does not take packed texts, and why.
NOT_PACKED = {
    "mpnet": "does not let",
    "deberta-v2": "does not let",
    "modernbert": "sliding",
    "qwen2": "sliding",
    "mistral": "sliding",
    "gemma2": "sliding",
    "gemma3_text": "sliding",
}


@dataclass(frozen=True)
class Cell:
    """A family, and the direction of a decoder; its folder has random weights, a tokenizer and barista.json."""

    family: str
    direction: Direction | None = None

    def __str__(self) -> str:
        return self.family if self.direction is None else f"{self.family}-{self.direction}"

    @property
    def pooling(self) -> Pooling:
        return "last" if self.direction == "causal" else "mean"

    def build(self) -> PreTrainedModel:
        """The backbone in eval mode. Fresh norms are ones, and biases zeros, which would hide one that is forgotten."""
        torch.manual_seed(7)
        ids = {"vocab_size": VOCABULARY, "pad_token_id": 0}
        if self.direction is None:
            masked_lm = build_masked_lm({"model_type": self.family, **ENCODERS[self.family]}, **ids)
            backbone = base_of(masked_lm)
        else:
            backbone = build_decoder({"model_type": self.family, **DECODERS[self.family]}, self.direction, **ids)
        with torch.no_grad():
            for parameter in backbone.parameters():
                parameter += 0.2 * torch.randn_like(parameter)
        return backbone.eval()


BOTH: tuple[Direction, ...] = ("causal", "bidirectional")
DECODER_CELLS = [Cell(family, direction) for family in DECODERS for direction in BOTH]
CELLS = [*(Cell(family) for family in ENCODERS), *DECODER_CELLS]
# The families that differ most; the others are in the lane `full`.
IN_THE_FAST_LANE = ("bert", "modernbert", "qwen3", "gemma3_text")


def each_of(cells: Sequence[Cell]) -> pytest.MarkDecorator:
    """Parametrises a test by `cell`."""
    marks = {cell: () if cell.family in IN_THE_FAST_LANE else pytest.mark.full for cell in cells}
    return pytest.mark.parametrize("cell", [pytest.param(cell, id=str(cell), marks=marks[cell]) for cell in cells])


every_family, every_decoder = each_of(CELLS), each_of(DECODER_CELLS)


@pytest.fixture(scope="module")
def folder_of(
    tiny_tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Cell], Path]:
    """The folder of a cell, which is written once."""
    assert len(tiny_tokenizer) <= VOCABULARY and tiny_tokenizer.pad_token_id == 0
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    written: dict[Cell, Path] = {}

    def folder_of(cell: Cell) -> Path:
        if cell not in written:
            folder = tmp_path_factory.mktemp(str(cell))
            cell.build().save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            ladder = tuple((size.layers, size.dim) for size in SIZES)
            lengths = {"query_max_length": 24, "passage_max_length": 24}
            settings = EmbeddingSettings(cell.pooling, ladder=ladder, direction=cell.direction or "", **lengths)
            settings.save(folder)
            written[cell] = folder
        return written[cell]

    return folder_of


@pytest.fixture(scope="module")
def texts(docstrings: list[str]) -> list[str]:
    return [docstrings[0][:400], docstrings[1][:60], "a", docstrings[2][:100]]


def batch() -> tuple[Tensor, Tensor]:
    """Ids [4, 12] and mask, padded at the right."""
    ids = torch.randint(5, VOCABULARY, (4, 12), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(12) < torch.tensor([[12], [7], [3], [1]])).long()
    return ids * mask, mask


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@every_family
def test_the_full_size_is_plain_sentence_transformers(
    cell: Cell, folder_of: Callable[[Cell], Path], texts: list[str]
) -> None:
    folder = folder_of(cell)
    modules = sentence_transformers.sentence_transformer.modules
    mode = {"last": "lasttoken", "mean": "mean"}[cell.pooling]
    parts = [modules.Transformer(str(folder), max_seq_length=24), modules.Pooling(HIDDEN, mode), modules.Normalize()]
    theirs = sentence_transformers.SentenceTransformer(modules=parts, device="cpu")
    ours = our_vectors(folder, texts, [SIZES[-1]], max_length=24)[SIZES[-1]]
    # Positions in a table are counted from the left, with the padding.
    for side in ("right", "left") if cell.direction else ("right",):
        theirs.tokenizer.padding_side = side
        np.testing.assert_allclose(ours, theirs.encode(texts), atol=1e-5)
    # Negative control: the other pooling.
    parts[1] = modules.Pooling(HIDDEN, "cls")
    other = sentence_transformers.SentenceTransformer(modules=parts, device="cpu").encode(texts)
    assert np.abs(ours - other).max() > 1e-2


@every_family
def test_every_cut_is_the_truncated_model(cell: Cell, tmp_path: Path) -> None:
    ids, mask = batch()
    whole = Encoder(cell.build(), "mean")
    weights = mask[..., None].float()
    with torch.no_grad():
        embeddings = whole(ids, mask, SIZES)
        raw = whole.backbone(input_ids=ids, attention_mask=mask, output_hidden_states=True).hidden_states
        for size, embedding in zip(SIZES, embeddings):
            truncate_layers(cell.build(), size.layers).save_pretrained(tmp_path)
            cut = AutoModel.from_pretrained(tmp_path)
            assert cut.config.num_hidden_layers == len(encoder_layers(cut)) == size.layers
            last = cut(input_ids=ids, attention_mask=mask).last_hidden_state
            pooled = (last * weights).sum(1) / weights.sum(1)
            assert_close(embedding, pooled[:, : size.dim])
            # Negative controls: another depth, and the state without the final norm.
            other = whole(ids, mask, [Size(size.layers % LAYERS + 1, size.dim)])[0]
            assert not torch.allclose(embedding, other, atol=1e-2)
            if final_norm(whole.backbone) is not None and size.layers < LAYERS:
                forgotten = (raw[size.layers] * weights).sum(1) / weights.sum(1)
                assert not torch.allclose(embedding, forgotten[:, : size.dim], atol=1e-2)


@every_family
def test_left_right_and_packed_are_one(cell: Cell) -> None:
    ids, mask = batch()
    lengths = mask.sum(1).tolist()
    left_ids, left_mask = (
        torch.stack([row.roll(12 - length) for row, length in zip(each, lengths)]) for each in (ids, mask)
    )
    backbone = cell.build()
    encoders = [Encoder(backbone, pooling) for pooling in get_args(Pooling)]
    with torch.no_grad():
        right = [encoder(ids, mask, SIZES) for encoder in encoders]
        for encoder, together in zip(encoders, right):
            alone = [encoder(ids[[i], :length], mask[[i], :length], SIZES) for i, length in enumerate(lengths)]
            for ours, theirs in zip(map(torch.cat, zip(*alone)), together):
                assert_close(ours, theirs)
            for ours, theirs in zip(encoder(left_ids, left_mask, SIZES), together):
                assert torch.equal(ours, theirs)
        if cell.family in NOT_PACKED:
            with pytest.raises(ModelError, match=NOT_PACKED[cell.family]):
                check_packs(backbone)
            return
        check_packs(backbone)
        backbone.set_attn_implementation("packed")
        for encoder, together in zip(encoders, right):
            for ours, theirs in zip(encoder(ids, mask, SIZES), together):
                assert_close(ours, theirs)
        # Negative control: one text of all tokens is not four texts.
        joined = encoders[1](ids[mask.bool()][None], torch.ones(1, int(mask.sum()), dtype=torch.long), SIZES)
        assert (joined[2] - right[1][2][:1]).abs().max() > 1e-2


@every_family
def test_exports_are_plain_sentence_transformers(
    cell: Cell, folder_of: Callable[[Cell], Path], texts: list[str], tmp_path: Path
) -> None:
    exported = export_sizes(folder_of(cell), tmp_path / "out")
    ours = our_vectors(folder_of(cell), texts, SIZES, max_length=24)
    for size, folder in zip(SIZES, exported.values()):
        theirs = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
        np.testing.assert_allclose(ours[size], theirs.encode(texts), atol=1e-5)
        loaded = EmbeddingSettings.load(folder)
        assert loaded is not None
        assert (loaded.pooling, loaded.direction) == (cell.pooling, cell.direction or "")
    assert cell.direction is None or looks_ahead(theirs[0].auto_model.float()) == (cell.direction == "bidirectional")


def test_a_model_without_a_padding_token_is_evaluated_and_exported(texts: list[str], tmp_path: Path) -> None:
    """As Llama 3: padding is with the closing token, and the export says so, without which nobody could pad."""
    folder, cell = tmp_path / "llama", Cell("llama", "causal")
    cell.build().save_pretrained(folder)
    backend = FRAMED["llama3"][0](texts).backend_tokenizer
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    tokenizer.save_pretrained(folder)
    lengths = {"query_max_length": 24, "passage_max_length": 24}
    ladder = tuple((size.layers, size.dim) for size in SIZES)
    EmbeddingSettings(cell.pooling, ladder=ladder, direction="causal", **lengths).save(folder)
    assert AutoTokenizer.from_pretrained(folder).pad_token is None
    ours = our_vectors(folder, texts, SIZES, max_length=24)
    for size, path in zip(SIZES, export_sizes(folder, tmp_path / "out").values()):
        theirs = sentence_transformers.SentenceTransformer(str(path), device="cpu")
        np.testing.assert_allclose(ours[size], theirs.encode(texts), atol=1e-5)


def test_a_decoder_is_not_written_as_onnx(folder_of: Callable[[Cell], Path], tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    with pytest.raises(ConfigError, match=r"is a decoder \(qwen3\).*leave --onnx out"):
        export_sizes(folder_of(Cell("qwen3", "causal")), tmp_path / "out", onnx=["float32"])


@every_family
def test_merged_adapters_compute_the_same(cell: Cell) -> None:
    ids, mask = batch()
    encoder = Encoder(cell.build(), cell.pooling)
    before = encoder(ids, mask, SIZES)
    add_adapters(encoder.backbone, rank=2, alpha=4.0, dropout=0.0, targets=())
    with torch.no_grad():
        for name, parameter in encoder.backbone.named_parameters():
            if ".lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.1)
        adapted = encoder(ids, mask, SIZES)
        merged = cell.build()
        merged.load_state_dict(merged_tensors(encoder.backbone, encoder.backbone.state_dict()))
        for first, ours, theirs in zip(before, Encoder(merged, cell.pooling)(ids, mask, SIZES), adapted):
            assert_close(ours, theirs)
            assert (first - theirs).abs().max() > 1e-2  # the control


_BERT_LINEARS = ("self.query", "self.key", "self.value", "attention.output.dense", "intermediate.dense", "output.dense")
_LLAMA_LINEARS = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)
# family -> the projections of a layer's attention and feed-forward.
LINEARS = {
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "electra"), _BERT_LINEARS),
    "distilbert": (*(f"attention.{name}_lin" for name in ("q", "k", "v", "out")), "ffn.lin1", "ffn.lin2"),
    "mpnet": (*(f"attention.attn.{name}" for name in "qkvo"), "intermediate.dense", "output.dense"),
    "deberta-v2": (
        *(f"attention.self.{name}_proj" for name in ("query", "key", "value", "pos_query", "pos_key")),
        *("attention.output.dense", "intermediate.dense", "output.dense"),
    ),
    "modernbert": ("attn.Wqkv", "attn.Wo", "mlp.Wi", "mlp.Wo"),
    **dict.fromkeys(("eurobert", "qwen2", "qwen3", "llama", "mistral", "gemma2", "gemma3_text"), _LLAMA_LINEARS),
    "phi3": ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"),
}


@each_of([cell for cell in CELLS if cell.direction != "bidirectional"])
def test_adapters_are_on_attention_and_feed_forward_by_default(cell: Cell) -> None:
    """In every layer, and nowhere else."""
    backbone = cell.build()
    paths = {id(module): name for name, module in backbone.named_modules()}
    blocks = [paths[id(layer)] for layer in encoder_layers(backbone)]
    add_adapters(backbone, rank=2, alpha=4.0, dropout=0.0, targets=())
    adapted = {name.partition(".lora_A.")[0] for name, _ in backbone.named_parameters() if ".lora_A." in name}
    assert len(adapted) == LAYERS * len(LINEARS[cell.family])
    for block in blocks:
        inside = {name for name in adapted if name.startswith(f"{block}.")}
        assert len(inside) == len(LINEARS[cell.family])
        assert all(any(name.endswith(f".{each}") for name in inside) for each in LINEARS[cell.family])
    assert {name for name, each in backbone.named_parameters() if each.requires_grad} == {
        f"{name}.lora_{side}.default.weight" for name in adapted for side in "AB"
    }


_GPT2 = {"n_embd": HIDDEN, "n_layer": LAYERS, "n_head": 4, "n_positions": 64}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "gpt2", **_GPT2}, r"GPT2Model, such as (attn|mlp)\.c_"),
        ({"model_type": "mixtral", **_DECODER, "num_local_experts": 4}, r"MixtralModel, such as mlp\.experts\."),
    ],
)
def test_adapters_that_would_leave_out_the_feed_forward_are_refused(config: dict[str, Any], said: str) -> None:
    backbone = build_decoder(config, "causal", vocab_size=200, pad_token_id=0)
    with pytest.raises(ModelError, match=rf"model\.lora_targets is empty, and most weights of a layer of {said}"):
        add_adapters(backbone, rank=2, alpha=4.0, dropout=0.0, targets=())
    if config["model_type"] == "mixtral":
        adapted = add_adapters(backbone, rank=2, alpha=4.0, dropout=0.0, targets=["q_proj", "v_proj"])
        assert sum(each.requires_grad for each in adapted.parameters()) == 2 * 2 * LAYERS


@pytest.mark.parametrize("layers", [0, 2])
@each_of([cell for cell in CELLS if cell.direction != "bidirectional"])
def test_frozen_layers_keep_all_that_comes_before_the_others(cell: Cell, layers: int) -> None:
    """Positions that all layers share, too (DeBERTa, MPNet), and ELECTRA's projection; the final norm trains."""
    _trains_above(cell.build(), layers)


def test_frozen_layers_keep_positions_that_stand_beside_the_token_table() -> None:
    backbone = build_decoder({"model_type": "gpt2", **_GPT2}, "causal", vocab_size=200, pad_token_id=0)
    _trains_above(backbone, 2)
    assert not backbone.wpe.weight.requires_grad


def _trains_above(backbone: PreTrainedModel, layers: int) -> None:
    freeze_lower_layers(backbone, layers)
    trained = {id(each) for each in backbone.parameters() if each.requires_grad}
    above = [*encoder_layers(backbone)[layers:], final_norm(backbone)] if layers else [backbone]
    assert trained == {id(each) for part in above if part is not None for each in part.parameters()}
    assert len(trained) == len(list(backbone.parameters())) if layers == 0 else trained


@every_decoder
def test_direction_is_what_was_asked(cell: Cell, folder_of: Callable[[Cell], Path]) -> None:
    """A later token changes an earlier state, or does not: in our encoder and in plain transformers, at every layer."""
    assert cell.direction is not None
    ahead = cell.direction == "bidirectional"
    assert looks_ahead(AutoModel.from_pretrained(folder_of(cell))) == ahead
    encoder = load_encoder(folder_of(cell))
    ids, mask = batch()
    changed = ids.clone()
    changed[0, 3:] = ids[0, 3:].flip(0)
    texts = Layout.of_mask(mask)
    with torch.no_grad():
        states, others = (
            encoder.hidden_states(texts.pack(each), texts, range(1, LAYERS + 1)) for each in (ids, changed)
        )
        for layer in range(1, LAYERS + 1):
            difference = (states[layer] - others[layer])[0, :3].abs().max()
            assert difference > 1e-3 if ahead else difference < 1e-6
    # The negative control: in the other direction the vectors differ, which they would not if the mask were forgotten.
    other: Direction = "causal" if ahead else "bidirectional"
    turned = load_encoder(folder_of(cell), direction=other)
    assert looks_ahead(turned.backbone) != ahead
    assert (turned(ids, mask, SIZES)[2] - encoder(ids, mask, SIZES)[2]).abs().max() > 1e-2


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@each_of([cell for cell in DECODER_CELLS if NOT_PACKED.get(cell.family) == "sliding"])
def test_windows_are_respected(cell: Cell, attention: str) -> None:
    """The first layer reads its window and no further; windows of padding alone give no NaN (transformers #45491)."""
    backbone = cell.build()
    if attention == "sdpa" and not backbone._supports_sdpa:
        with pytest.raises(ValueError, match="does not support"):
            backbone.set_attn_implementation(attention)
        return
    backbone.set_attn_implementation(attention)
    ids = torch.randint(5, VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[1, 1:] = 0  # the windows of the last tokens hold padding alone
    texts = Layout.of_mask(mask)
    changed = ids.clone()
    changed[0, 8] = (ids[0, 8] + 7) % VOCABULARY
    with torch.no_grad():
        left = backbone(input_ids=(ids * mask).flip(1), attention_mask=mask.flip(1)).last_hidden_state
        assert left[mask.flip(1).bool()].isfinite().all()
        states, others = (
            Encoder(backbone).hidden_states(texts.pack(each), texts, [1, 2, 3]) for each in (ids, changed)
        )
    assert all(state.isfinite().all() for state in states.values())
    moved = (states[1][0] - others[1][0]).abs().amax(1) > 1e-5
    # A causal window counts the token itself; one in both directions reaches as far on each side, and Gemma 3's half.
    before, after = (0, WINDOW - 1) if cell.direction == "causal" else (WINDOW, WINDOW)
    if (cell.family, cell.direction) == ("gemma3_text", "bidirectional"):
        before, after = WINDOW // 2, WINDOW // 2
    assert moved.nonzero().flatten().tolist() == list(range(8 - before, 8 + after + 1))


@pytest.mark.parametrize("checkpointing", [False, True])
@each_of([cell for cell in DECODER_CELLS if cell.direction == "causal"])
def test_the_last_layer_reads_only_the_last_tokens(cell: Cell, checkpointing: bool) -> None:
    """Values and gradients are those of the whole layer; the feed-forward ran for fewer rows."""
    ids, mask = batch()
    rows, gradients = [], []
    for reads in (False, True):
        encoder = Encoder(cell.build().train(), "last")
        encoder._last_layer_skips &= reads
        if checkpointing:
            encoder.backbone.activation_checkpointing_enable({"use_reentrant": False})
        down = [m for m in encoder_layers(encoder.backbone)[-1].modules() if isinstance(m, torch.nn.Linear)][-1]
        down.register_forward_hook(lambda m, args, out: rows.append(out.shape[:-1].numel()))
        vectors = encoder(ids, mask, SIZES)
        sum(each.pow(power).sum() for power, each in enumerate(vectors, start=2)).backward()
        gradients.append({name: each.grad for name, each in encoder.named_parameters()})
    assert rows[0] == mask.numel() and rows[-1] == len(mask)
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-4, atol=1e-5, msg=name)


def test_poolings_take_the_tokens_that_they_name() -> None:
    hidden = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0))
    encoder_mask = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 1, 1, 1]])
    weights = torch.tensor([1.0, 2.0, 3.0])[:, None] / 6
    rows = [hidden[0, :3], hidden[1, 2:]]
    for pooling, expected in (
        ("cls", [row[0] for row in rows]),
        ("last", [row[-1] for row in rows]),
        ("mean", [row.mean(0) for row in rows]),
        ("weighted_mean", [(row * weights).sum(0) for row in rows]),
    ):
        assert_close(pool(hidden, encoder_mask, pooling), torch.stack(expected))
    # Negative control: the last place is not the last token where the padding is at the right.
    assert not torch.allclose(pool(hidden, encoder_mask, "last")[0], hidden[0, -1])


def test_dropout_is_set_in_modules_and_in_the_configuration() -> None:
    backbone = Cell("phi3", "causal").build()
    set_dropout(backbone, 0.25)
    config = backbone.config
    assert config.resid_pdrop == config.embd_pdrop == config.attention_dropout == 0.25
    attention = encoder_layers(backbone)[0].self_attn
    assert attention.attention_dropout == 0.25


def test_a_norm_that_is_not_known_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A family whose final norm had another name would be wrong at every cut, and is refused."""
    backbone = Cell("qwen3", "causal").build()
    backbone.save_pretrained(tmp_path)
    load_pretrained(AutoModel, tmp_path)
    monkeypatch.setattr("models.backbone._FINAL_NORM_NAMES", ())
    with pytest.raises(ModelError, match="Qwen3Model computes something after its layers"):
        load_pretrained(AutoModel, tmp_path)


def test_a_family_that_cannot_be_turned_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Cell("llama", "causal").build().save_pretrained(tmp_path)
    monkeypatch.setattr("models.direction.said_by", lambda config: "bidirectional")
    with pytest.raises(ModelError, match="LlamaModel is causal whatever its configuration says"):
        load_pretrained(AutoModel, tmp_path)

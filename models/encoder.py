"""Any Hugging Face encoder or decoder as an embedding model of every size.

The encoder returns every wanted layer, so the embedding of a size (n, d) is a slice of the output of one pass. The
backbone's code is not patched, and 2-D objectives work with gradient caching. V_n^d and v_n^d are Starbucks §3.1,
eq. 1. Sizes with narrower feed-forwards share a pass with those of the same fraction (models/nested_feed_forward.py).

Models with a norm after the last layer (ModernBERT, decoders) get the same norm on every wanted layer. A copy of the
model cut to n layers computes just this, so training, evaluation and export agree.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM, PretrainedConfig, PreTrainedModel

from models.backbone import encoder_layers, final_norm, let_last_layer_skip, position_table, takes
from models.choices import MEANS, Direction, Pooling
from models.direction import is_decoder
from models.heads import check_heads, embedding_size, head_of, linear_head, load_heads
from models.layout import Layout
from models.loading import build_from_config, build_without_weights, load_pretrained, load_with_head
from models.nested_feed_forward import NestedFeedForwards
from models.packed_attention import packs
from models.read_rows import ReadRows
from models.sentence_transformers import read_sentence_model
from models.settings import EmbeddingSettings
from models.sizes import Body, ModelError, Size
from models.static_embedding import StaticModel


def float32_einsum(equation: str, first: Tensor, second: Tensor) -> Tensor:
    """`torch.einsum` in float32, also under autocast, which would round both operands to half precision."""
    with torch.autocast(first.device.type, enabled=False):
        return torch.einsum(equation, first.float(), second.float())


def pool(hidden: Tensor, attention_mask: Tensor, pooling: Pooling, kept: Tensor | None = None) -> Tensor:
    """Token vectors [batch, seq, dim] to text vectors [batch, dim]. The mask may have its padding on either side.

    cls and last are the first and the last real token. The means skip padding and run in float32; in weighted_mean, the
    n tokens of a text have the weights 1 to n. kept: bool [batch, seq], the tokens that a mean takes; None: all. Those
    that weighted_mean takes have the weights of their places in the whole text.
    """
    if pooling in ("cls", "last"):
        length = hidden.shape[1]
        # The largest of these numbers stands at the wanted token, and there is only one.
        order = torch.arange(1, length + 1, device=hidden.device, dtype=torch.int32)
        order = order if pooling == "last" else length + 1 - order
        wanted = (attention_mask.to(torch.int32) * order).argmax(1)
        # Of the shape, because len() would fix the number of texts in an exported graph.
        return hidden[torch.arange(hidden.shape[0], device=hidden.device), wanted]
    weights = attention_mask.to(torch.float32)
    if pooling == "weighted_mean":
        weights = weights * weights.cumsum(1)
    if kept is not None:
        weights = weights * kept
    total = float32_einsum("bsd,bs->bd", hidden, weights)
    return (total / weights.sum(1, keepdim=True).clamp(min=1.0)).to(hidden.dtype)


def flat_texts(input_ids: Tensor, attention_mask: Tensor | None, offsets: Tensor | None) -> tuple[Tensor, Layout]:
    """Ids [T] and layout of texts that come flat, with `offsets`, or padded [B, L], with `attention_mask`."""
    assert (attention_mask is None) != (offsets is None), "texts come padded with a mask, or flat with offsets"
    if offsets is not None:
        return input_ids, Layout(offsets)
    assert attention_mask is not None
    texts = Layout.of_mask(attention_mask)
    return texts.pack(input_ids), texts


class Encoder(nn.Module):
    """A backbone, its pooling and its heads; `forward` returns the embeddings of all wanted sizes.

    heads: linear maps of some depths, "LAYERS" -> nn.Linear (models/heads.py). At a depth without a head, the pooled
    states are the embedding. pool_prompt: whether a mean takes the tokens of a text's prompt. If it does not, every
    forward pass must be told how long the prompts are.
    """

    def __init__(
        self,
        backbone: PreTrainedModel,
        pooling: Pooling = "cls",
        heads: nn.ModuleDict | None = None,
        *,
        pool_prompt: bool = True,
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.pooling = pooling
        assert pool_prompt or (pooling in MEANS and not self.is_static), "only a mean of states leaves the prompt out"
        self.pool_prompt = pool_prompt
        self.heads = nn.ModuleDict() if heads is None else heads
        self._last_layer_skips = let_last_layer_skip(backbone)
        self._nested: tuple[list[nn.Module], NestedFeedForwards] | None = None
        # Decoders keep all keys and values unless they are told not to.
        self._makes_cache = is_decoder(backbone.config) and takes(backbone, "use_cache")

    @property
    def _first_position(self) -> int:
        """RoBERTa counts positions from the padding index on."""
        table = position_table(self.backbone)
        return 0 if table is None or table.padding_idx is None else table.padding_idx + 1

    @property
    def config(self) -> PretrainedConfig:
        return self.backbone.config

    @property
    def num_layers(self) -> int:
        return int(self.config.num_hidden_layers)

    @property
    def is_static(self) -> bool:
        """Whether it is a token table, which takes flat texts without padding (models/static_embedding.py)."""
        return isinstance(self.backbone, StaticModel)

    @property
    def hidden_size(self) -> int:
        return int(self.config.hidden_size)

    @property
    def embedding_size(self) -> int:
        """Dimensions of the largest embedding: the output width of the heads, or the encoder's width without heads."""
        return embedding_size(self.heads, hidden_size=self.hidden_size)

    @property
    def pad_id(self) -> int:
        """The id that stands at padding, where nothing is read."""
        return int(getattr(self.config, "pad_token_id", None) or 0)

    @property
    def word_embeddings(self) -> nn.Embedding:
        return cast(nn.Embedding, self.backbone.get_input_embeddings())

    def position_vectors(self, length: int) -> Tensor | None:
        """The vectors that the embedding layer adds at positions 0..length-1: [length, hidden], or None if none."""
        table = position_table(self.backbone)
        if table is None:
            return None
        first = self._first_position
        return table(torch.arange(first, first + length, device=table.weight.device))

    def hidden_states(
        self, tokens: Tensor, texts: Layout, layers: Sequence[int], *, read: Tensor | None = None
    ) -> dict[int, Tensor]:
        """Layer number -> [B, L, hidden]; layer 0 is the embedding layer.

        tokens: ids of flat texts [T], which are laid out here as the backbone reads them: packed, or padded. read: bool
        [T], the tokens of the last layer that will be read; None: all. The last layer's output at other tokens, and
        every output at padding, is undefined, but finite.
        """
        packed = packs(self.backbone)
        inputs: dict[str, Any]
        if packed:
            inputs = {
                "input_ids": tokens.long()[None],
                "position_ids": texts.positions[None] + self._first_position,
                "cu_seq_lens_q": texts.offsets.int(),
                "max_length_q": texts.longest,
            }
        else:
            inputs = {"input_ids": texts.pad(tokens.long(), self.pad_id), "attention_mask": texts.mask}
        if self._makes_cache:
            inputs["use_cache"] = False
        if read is not None and self._last_layer_skips:
            inputs[ReadRows.KEYWORD] = read[None] if packed else texts.pad(read)
        out = self.backbone(**inputs, output_hidden_states=True)
        norm = final_norm(self.backbone)
        states = {}
        for layer in sorted(set(layers)):
            state = out.hidden_states[layer]
            # The backbone has already applied the final norm to the last state.
            state = norm(state) if norm is not None and 0 < layer < self.num_layers else state
            states[layer] = texts.pad(state[0]) if packed else state
        return states

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        sizes: Sequence[Size],
        *,
        offsets: Tensor | None = None,
        prompt_lengths: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """The vectors of each size, [B, size.dim], pooled and cut, not normalised. Sizes of one fraction share a pass.

        input_ids: flat texts [T] with `offsets`, int64 [B + 1]; or padded texts [B, L] with their attention_mask.
        prompt_lengths: int64 [B], the tokens of each text's prompt; read only where they are left out of the pooling.
        """
        tokens, texts = flat_texts(input_ids, attention_mask, offsets)
        if self.is_static:
            whole = self.backbone(tokens, texts.offsets)
            # The full width is not sliced: the backward pass of a slice would copy the gradient of a large batch.
            return tuple(whole if size.dim == whole.shape[1] else whole[:, : size.dim] for size in sizes)
        kept = self.kept(texts, prompt_lengths)
        read = texts.first if self.pooling == "cls" else texts.last if self.pooling == "last" else kept
        vectors: dict[Body, Tensor] = {}
        for fraction in dict.fromkeys(size.feed_forward for size in sizes):
            layers = [size.layers for size in sizes if size.feed_forward == fraction]
            with self.narrowed(fraction):
                states = self.hidden_states(tokens, texts, layers, read=read)
            for layer, pooled in self.pooled(states, texts, kept).items():
                body = Body(layer, fraction)
                vectors[body] = self.head(pooled, body)
        return tuple(vectors[size.body][:, : size.dim] for size in sizes)

    def narrowed(self, fraction: float) -> contextlib.AbstractContextManager[None]:
        """Inside, the backbone runs with the first `fraction` of every feed-forward's neurons."""
        if fraction == 1:
            return contextlib.nullcontext()
        # Truncation and copies exchange layers, and then their matrices are looked for again.
        layers = list(encoder_layers(self.backbone))
        if self._nested is None or self._nested[0] != layers:
            self._nested = layers, NestedFeedForwards.of(self.backbone)
        return self._nested[1].at(fraction)

    def kept(self, texts: Layout, prompt_lengths: Tensor | None) -> Tensor | None:
        """bool [T], the tokens that a mean takes where it leaves the prompt out, or None where it takes all.

        The last token is always taken, so a text that is nothing but its prompt has a vector, too.
        """
        if self.pool_prompt:
            return None
        assert prompt_lengths is not None, "the prompt is left out of the pooling; give prompt_lengths, 0 for no prompt"
        return texts.after(prompt_lengths)

    def pooled(self, states: Mapping[int, Tensor], texts: Layout, kept: Tensor | None) -> dict[int, Tensor]:
        """Layer -> pooled states [B, hidden], from `hidden_states`. kept: bool [T], as `kept` returns it."""
        padded = None if kept is None else texts.pad(kept)
        return {layer: pool(state, texts.mask, self.pooling, padded) for layer, state in states.items()}

    def head(self, pooled: Tensor, body: Body) -> Tensor:
        """Apply the head of a body, if any, to pooled states: [batch, hidden] -> [batch, embedding_size]."""
        head = head_of(self.heads, body)
        return pooled if head is None else head(pooled)


def load_encoder(
    source: str | Path,
    *,
    pooling: Pooling | None = None,
    pool_prompt: bool | None = None,
    direction: Direction | None = None,
    weights: bool = True,
) -> Encoder:
    """An encoder from a local folder or a hub name.

    `pooling` None: that of its settings, else CLS. `pool_prompt` None: that of its settings, unless `pooling` is one
    that takes a single token. `direction` None: that of its settings, else that of its config. `weights` False: on the
    meta device, for a process that is given the weights by another one.
    """
    settings = EmbeddingSettings.load(source)
    if direction is None and settings is not None:
        direction = settings.direction or None
    if weights:
        backbone = load_pretrained(AutoModel, source, direction=direction)
    else:
        backbone = build_without_weights(source, direction=direction)
    if pooling is None and settings is None and is_decoder(backbone.config):
        raise ModelError(f"model {str(source)!r} does not say how it pools; give a pooling, such as last or mean")
    with contextlib.nullcontext() if weights else torch.device("meta"):
        heads = _heads_of(source, backbone.config)
    pooling = pooling or (settings.pooling if settings else "cls")
    if pool_prompt is None:
        pool_prompt = settings is None or settings.pool_prompt or pooling not in MEANS
    if not pool_prompt and isinstance(backbone, StaticModel):
        raise ModelError(
            f"model {str(source)!r} is a token table, which takes all tokens of a text; pool_prompt = false is for "
            "encoders with layers"
        )
    encoder = Encoder(backbone, pooling, heads, pool_prompt=pool_prompt)
    check_heads(heads, num_layers=encoder.num_layers, hidden_size=encoder.hidden_size, thing=f"model folder {source}")
    return encoder


def _heads_of(source: str | Path, config: PretrainedConfig) -> nn.ModuleDict:
    """The heads beside a model. Dense modules of sentence-transformers become the same head for every depth."""
    found = read_sentence_model(source)
    linear = None if found is None else found.linear_map(int(config.hidden_size))
    if linear is None:
        return load_heads(source)
    depths = range(1, int(config.num_hidden_layers) + 1)
    return nn.ModuleDict({str(depth): linear_head(*linear) for depth in depths})


def base_of(masked_lm: PreTrainedModel) -> PreTrainedModel:
    """The encoder inside a model with an MLM head."""
    return cast(PreTrainedModel, masked_lm.base_model)


def load_masked_lm(source: str | Path) -> tuple[PreTrainedModel, bool]:
    """(an encoder with its MLM head, whether the head is freshly initialised), from a local folder or a hub name."""
    return load_with_head(AutoModelForMaskedLM, source)


def build_masked_lm(config: Mapping[str, Any], *, vocab_size: int, pad_token_id: int) -> PreTrainedModel:
    """An untrained encoder with its MLM head. `config`: a `model_type` and keys of that family's configuration."""
    return build_from_config(_values_of(config, vocab_size, pad_token_id), thing="model.config")


def build_decoder(
    config: Mapping[str, Any], direction: Direction, *, vocab_size: int, pad_token_id: int
) -> PreTrainedModel:
    """An untrained decoder without a head. `config`: as for `build_masked_lm`."""
    return build_from_config(_values_of(config, vocab_size, pad_token_id), thing="model.config", direction=direction)


def _values_of(config: Mapping[str, Any], vocab_size: int, pad_token_id: int) -> dict[str, Any]:
    """The values of an untrained model's configuration: the recipe's, and those of the shards' tokenizer."""
    family, known = config.get("model_type"), untrained_family(config)
    values = {key: value for key, value in config.items() if key != "model_type"}
    for key in values:
        if key in ("vocab_size", "pad_token_id"):
            raise ModelError(f"model.config.{key} comes from the shards' tokenizer; remove it")
        if not hasattr(known, key):
            raise ModelError(f"model.config.{key} is not a setting of {family!r} encoders; remove it or fix its name")
    return {"model_type": family, **values, "vocab_size": vocab_size, "pad_token_id": pad_token_id}


def untrained_family(config: Mapping[str, Any]) -> PretrainedConfig:
    """The default configuration in transformers of the family that `config` names by its `model_type`."""
    family = config.get("model_type")
    if family is None:
        raise ModelError('model.config lacks model_type; name the family, for example model_type = "bert"')
    try:
        return AutoConfig.for_model(family)
    except (ValueError, TypeError):
        raise ModelError(
            f"model.config.model_type {family!r} is unknown to transformers; use for example 'bert'"
        ) from None

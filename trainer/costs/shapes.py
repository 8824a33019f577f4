"""The shape of an encoder or a decoder: what its costs depend on, and how it is read from a config. Torch-free.

A config.json says most of a shape: widths, heads, windows, and by which keys it has (`rms_norm_eps`, `local_attention`)
of which kind its layers are. What no config says, because transformers' code of the family decides it (Qwen3's norms of
queries and keys, Gemma's four norms a layer), stands in `_FAMILIES`. tests/trainer/costs/test_shapes.py compares the
parameters, the products and the attended pairs of every family named here with those of a model of its class. A family
that is not named counts as what its keys say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from data.ground.errors import ConfigError

# Beyond this nothing that could exist is meant, and the formulas leave the numbers that a computer has.
_MOST, _MOST_LAYERS = 10**9, 10**5


@dataclass(frozen=True)
class Linear:
    """A linear layer, from `inputs` to `outputs` elements a token."""

    inputs: int
    outputs: int
    bias: bool

    @property
    def weights(self) -> int:
        return self.inputs * self.outputs


@dataclass(frozen=True)
class Vectors:
    """The norms and biases of a model, which cost memory and bytes moved, and no products. The defaults are BERT's."""

    rms: bool = False  # norms divide by the root of the mean square, in eager PyTorch, and have a weight alone
    wide_norms: bool = False  # such a norm weights in float32, too
    norm_bias: bool = True
    layer_norms: int = 2  # a layer
    no_first_norm: bool = False  # the first layer has one norm less, because the embeddings end with one (ModernBERT)
    head_norms: bool = False  # a norm each of every head's queries and keys
    embedding_norm: bool = True
    final_norm: bool = False
    attention_bias: bool = True  # of queries, keys and values
    output_bias: bool = True  # of attention's output
    inner_bias: bool = True  # of the feed-forward

    @property
    def of_a_norm(self) -> int:
        """How many vectors a norm has."""
        return 2 if self.norm_bias and not self.rms else 1


@dataclass(frozen=True)
class Shape:
    """The dimensions of an encoder or a decoder that determine its costs. The defaults are those of BERT."""

    hidden: int
    inner: int
    layers: int
    vocabulary: int
    heads: int = 1
    key_heads: int = 0  # heads of keys and values; 0: as many as heads of queries
    head_width: int = 0  # 0: hidden / heads
    gated: bool = False  # a feed-forward of three matrices: down(activation(gate(x)) · up(x))
    fused: bool = False  # one matrix for queries, keys and values, and one for gate and up
    causal: bool = False  # a token sees none that come after it
    # For each layer, how many tokens a token sees before it, and after it if not causal. None means all of them. The
    # empty tuple means all of them in every layer.
    reaches: tuple[int | None, ...] = ()
    positions: int = 512  # the longest text's, and rows of their table
    rotary: bool = False  # positions are computed, and have no table
    token_types: int = 2
    table_width: int = 0  # of the tables, where a projection to the hidden width follows (ELECTRA); 0: hidden
    relative_positions: int = 0  # a bias of every head for so many distances (MPNet)
    vectors: Vectors = Vectors()
    drops: bool = True  # dropout after attention and after the feed-forward
    reads_rows: bool = True  # the last feed-forward computes only the rows that are read (models/read_rows.py)

    @property
    def query_width(self) -> int:
        """Elements of a token's queries, all heads together."""
        return self.heads * self.width_of_a_head

    @property
    def key_width(self) -> int:
        """Elements of a token's keys, and of its values."""
        return (self.key_heads or self.heads) * self.width_of_a_head

    @property
    def width_of_a_head(self) -> int:
        return self.head_width or self.hidden // self.heads

    @property
    def embedding_width(self) -> int:
        return self.table_width or self.hidden

    @property
    def attention(self) -> list[Linear]:
        """The linear layers around a layer's attention."""
        hidden, queries, keys, vectors = self.hidden, self.query_width, self.key_width, self.vectors
        widths = [queries + 2 * keys] if self.fused else [queries, keys, keys]
        into = [Linear(hidden, width, vectors.attention_bias) for width in widths]
        return [*into, Linear(queries, hidden, vectors.output_bias)]

    @property
    def feed_forward(self) -> list[Linear]:
        hidden, inner, bias = self.hidden, self.inner, self.vectors.inner_bias
        widths = ([2 * inner] if self.fused else [inner, inner]) if self.gated else [inner]
        return [*(Linear(hidden, width, bias) for width in widths), Linear(inner, hidden, bias)]

    def narrowed(self, fraction: float) -> Shape:
        """With this fraction of each feed-forward."""
        return replace(self, inner=max(1, round(fraction * self.inner)))

    @classmethod
    def of(
        cls,
        config: object,
        *,
        said: str = "the model's config",
        hidden: int = 0,
        layers: int = 0,
        direction: str = "",
    ) -> Shape:
        """The shape that a config says: a config of transformers, or what a config.json holds.

        said: what an error calls it. hidden, layers: where it does not say them. The vocabulary is 0 if it is not said.
        direction: of a decoder, in place of the config's, "causal" or "bidirectional" (models/direction.py). Raises
        ConfigError for a number that no model has.
        """
        values = _values_of(config)
        return _shape_of(_Config(values | _directed(values, direction) if direction else values, said), hidden, layers)


# --- reading ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Family:
    """What a config.json leaves to the family's code, or may leave out because it is the family's default."""

    rms: bool = False
    causal: bool = True  # of families with RMS norms
    fused: bool = False
    attention_bias: bool | None = None  # None: as the config's attention_bias says, of the output too
    layer_norms: int = 2
    head_norms: bool = False
    wide_norms: bool = False
    head_width: int = 0
    token_types: int = 2
    relative_positions: int = 0
    switch: bool = False  # the config's use_bidirectional_attention says the direction
    full_every: int = 0  # the period of the layers that attend to whole texts where the others have windows
    first_is_full: bool = False  # counted from the first layer, not from its end
    reads_rows: bool = False


_BERT = _Family(reads_rows=True)
_FAMILIES = {
    "": _BERT,  # a config that names no family
    "bert": _BERT,
    "roberta": _BERT,
    "xlm-roberta": _BERT,
    "camembert": _BERT,
    "electra": _BERT,
    "distilbert": _Family(token_types=0),
    "mpnet": _Family(token_types=0, relative_positions=32),
    "modernbert": _Family(fused=True, full_every=3, first_is_full=True),
    "eurobert": _Family(rms=True, causal=False, reads_rows=True),
    "llama": _Family(rms=True, reads_rows=True),
    "mistral": _Family(rms=True, reads_rows=True),
    "qwen2": _Family(rms=True, attention_bias=True, reads_rows=True),
    "qwen3": _Family(rms=True, head_norms=True, head_width=128, reads_rows=True),
    "gemma2": _Family(rms=True, layer_norms=4, wide_norms=True, head_width=256, full_every=2, reads_rows=True),
    "gemma3_text": _Family(
        rms=True,
        layer_norms=4,
        head_norms=True,
        wide_norms=True,
        head_width=256,
        switch=True,
        full_every=6,
        reads_rows=True,
    ),
    "phi3": _Family(rms=True, fused=True, reads_rows=True),
}
# Names that some families give to what the others call by the first.
_NAMES = {
    "hidden_size": ("hidden_size", "dim"),
    "num_hidden_layers": ("num_hidden_layers", "n_layers"),
    "num_attention_heads": ("num_attention_heads", "n_heads"),
    "intermediate_size": ("intermediate_size", "hidden_dim"),
}
_OF_TRANSFORMERS = (*_NAMES, "vocab_size")


def _family_of(values: Mapping[str, Any]) -> _Family:
    return _FAMILIES.get(str(values.get("model_type") or ""), _Family())


@dataclass(frozen=True)
class _Config:
    values: dict[str, Any]
    said: str

    @property
    def family(self) -> _Family:
        return _family_of(self.values)

    def number(self, name: str, default: int, *, optional: bool = False, most: int = _MOST) -> int:
        """A whole number from 1 on. optional: null is the default, too."""
        for each in _NAMES.get(name, (name,)):
            value = self.values.get(each)
            if each not in self.values or (value is None and optional):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
                raise ConfigError(f"{self.said}: {each} = {value!r} must be a whole number from 1 to {most:,}")
            return value
        return default

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.values.get(name)
        return default if value is None else bool(value)


def _directed(values: dict[str, Any], direction: str) -> dict[str, Any]:
    """What a config says of a decoder that reads in this direction."""
    if _family_of(values).switch:
        return {"use_bidirectional_attention": direction == "bidirectional"}
    return {"is_causal": direction == "causal"}


def _values_of(config: object) -> dict[str, Any]:
    if isinstance(config, Mapping):
        return dict(config)
    values: dict[str, Any] = config.to_dict()  # type: ignore[attr-defined]  # a config of transformers
    # By transformers' own names, which the config maps to its family's.
    return values | {name: getattr(config, name) for name in _OF_TRANSFORMERS if hasattr(config, name)}


def _shape_of(config: _Config, hidden: int, layers: int) -> Shape:
    family = config.family
    hidden = config.number("hidden_size", hidden)
    heads = config.number("num_attention_heads", 1, optional=True)
    shape = Shape(
        hidden,
        config.number("intermediate_size", 4 * hidden, optional=True),
        config.number("num_hidden_layers", layers, most=_MOST_LAYERS),
        config.number("vocab_size", 0),
        heads=heads,
        head_width=config.number("head_dim", 0, optional=True)
        or (family.head_width if "head_dim" not in config.values else 0)
        or max(1, hidden // heads),
        positions=config.number("max_position_embeddings", 512),
        reads_rows=family.reads_rows,
    )
    if family.rms or "rms_norm_eps" in config.values:
        return _like_llama(shape, config, family)
    if family.first_is_full or "local_attention" in config.values:
        return _like_modernbert(shape, config, family)
    return _like_bert(shape, config, family)


def _like_bert(shape: Shape, config: _Config, family: _Family) -> Shape:
    """Norms after attention and after the feed-forward, biases everywhere."""
    embedding = config.number("embedding_size", shape.hidden, optional=True)
    return replace(
        shape,
        causal=config.flag("is_decoder"),
        rotary=bool(config.values.get("rope_parameters")),
        token_types=_count(config, "type_vocab_size", family.token_types),
        table_width=0 if embedding == shape.hidden else embedding,
        relative_positions=family.relative_positions,
    )


def _count(config: _Config, name: str, default: int) -> int:
    """A number that may be 0."""
    return 0 if config.values.get(name) == 0 else config.number(name, default, optional=True)


def _like_llama(shape: Shape, config: _Config, family: _Family) -> Shape:
    """Rotary positions, RMS norms before attention and before a gated feed-forward."""
    switched = family.switch and config.flag("use_bidirectional_attention")
    causal = config.flag("is_causal", family.causal) and not switched
    bias = config.flag("attention_bias")
    # A causal window counts the token itself. One in both directions does not, on either side; Gemma 3 halves it.
    window = config.number("sliding_window", 0, optional=True)
    reach = (window // 2 if switched else window - causal) if window else None
    return replace(
        shape,
        key_heads=config.number("num_key_value_heads", 0, optional=True),
        gated=True,
        fused=family.fused,
        causal=causal,
        reaches=_reaches(config, family, shape.layers, reach),
        rotary=True,
        token_types=0,
        drops=False,
        vectors=Vectors(
            rms=True,
            wide_norms=family.wide_norms,
            layer_norms=family.layer_norms,
            head_norms=family.head_norms,
            embedding_norm=False,
            final_norm=True,
            attention_bias=bias if family.attention_bias is None else family.attention_bias,
            output_bias=bias,
            inner_bias=config.flag("mlp_bias"),
        ),
    )


def _like_modernbert(shape: Shape, config: _Config, family: _Family) -> Shape:
    """Rotary positions, norms as in Llama but of the mean, too, after the embeddings in place of before layer 1."""
    bias = config.flag("attention_bias")
    return replace(
        shape,
        gated=True,
        fused=family.fused,
        reaches=_reaches(config, family, shape.layers, config.number("local_attention", 128) // 2),
        rotary=True,
        token_types=0,
        drops=False,
        vectors=Vectors(
            norm_bias=config.flag("norm_bias"),
            no_first_norm=True,
            final_norm=True,
            attention_bias=bias,
            output_bias=bias,
            inner_bias=config.flag("mlp_bias"),
        ),
    )


def _reaches(config: _Config, family: _Family, layers: int, reach: int | None) -> tuple[int | None, ...]:
    """`reach` for every layer with a window. Configs say which these are by a list, by a period or by a first layer."""
    values = config.values
    if reach is None or ("max_window_layers" in values and not config.flag("use_sliding_window")):
        return ()
    kinds = values.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) < layers:
            raise ConfigError(f"{config.said}: layer_types must list the kinds of {layers} layers")
        return tuple(reach if kind == "sliding_attention" else None for kind in kinds[:layers])
    if "max_window_layers" in values:
        first = _count(config, "max_window_layers", 0)
        return tuple(reach if layer >= first else None for layer in range(layers))
    if family.first_is_full:
        every = config.number("global_attn_every_n_layers", family.full_every, optional=True)
        return tuple(reach if layer % every else None for layer in range(layers))
    own = config.number("_sliding_window_pattern", family.full_every, optional=True)
    every = config.number("sliding_window_pattern", own, optional=True)
    return tuple(reach if not every or (layer + 1) % every else None for layer in range(layers))

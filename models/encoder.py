"""Any Hugging Face encoder as an embedding model of every size.

The encoder returns every wanted layer, so the embedding of a size (n, d) is a slice of the output of one pass. The
backbone's code is not patched, and 2-D objectives work with gradient caching. V_n^d and v_n^d are Starbucks §3.1,
eq. 1.

Models with a norm after the last layer (ModernBERT) get the same norm on every wanted layer. A copy of the model cut to
n layers computes just this, so training, evaluation and export agree.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import pydantic
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM, PretrainedConfig, PreTrainedModel

from data.ground.errors import DataError, OtherFormat
from data.ground.files import refused_by, write_atomically
from data.ground.records import Record, read_record
from data.model_folders import SETTINGS_FILE
from models.heads import check_heads, embedding_size, linear_head, load_heads
from models.layout import Layout
from models.loading import build_from_config, load_config, load_pretrained, load_with_head
from models.packed_attention import packs
from models.sentence_transformers import read_sentence_model
from models.sizes import Ladder, ModelError, Size
from models.static_embedding import StaticModel

Pooling = Literal["cls", "mean"]
_Count = Annotated[int, pydantic.Field(ge=1, le=1 << 20)]
_Length = Annotated[int, pydantic.Field(ge=1, le=1 << 31)]
_FINAL_NORM_NAMES = ("final_norm", "final_layer_norm", "ln_f")


class _SettingsFile(Record):
    """The fields of barista.json. Lengths are in tokens, special tokens included."""

    format: Literal[1] = 1
    pooling: Literal["cls", "mean"] = "cls"
    similarity: Literal["dot", "cosine"] = "cosine"
    ladder: tuple[tuple[_Count, _Count], ...]
    query_max_length: _Length = 64
    passage_max_length: _Length = 256
    query_prompt: str = ""
    passage_prompt: str = ""
    temperature: float = pydantic.Field(default=0.05, gt=0)
    tokenizer: str | None = None


@dataclass(frozen=True)
class EmbeddingSettings:
    """The settings that turn hidden states into embeddings, stored beside the weights in `barista.json`.

    `temperature` divides the scores in training. Lengths are in tokens, special tokens included. `tokenizer` is the
    fingerprint of the tokenizer that the weights were trained with; it is None in folders of older versions, and the
    tokenizer is then not compared.
    """

    pooling: str = "cls"
    similarity: str = "cosine"
    ladder: tuple[tuple[int, int], ...] = ()
    query_max_length: int = 64
    passage_max_length: int = 256
    query_prompt: str = ""
    passage_prompt: str = ""
    temperature: float = 0.05
    format: int = field(default=1)
    tokenizer: str | None = None

    def __post_init__(self) -> None:
        if self.pooling not in ("cls", "mean"):
            raise ModelError(f"pooling {self.pooling!r} is unknown; use 'cls' or 'mean'")
        if self.similarity not in ("dot", "cosine"):
            raise ModelError(f"similarity {self.similarity!r} is unknown; use 'dot' or 'cosine'")

    @property
    def sizes(self) -> Ladder:
        return Ladder.of(self.ladder)

    def save(self, folder: str | Path) -> None:
        write_atomically(Path(folder) / SETTINGS_FILE, json.dumps(dataclasses.asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, source: str | Path) -> EmbeddingSettings | None:
        """The settings beside a model, or None if there are none.

        They are read from barista.json, or else from a sentence-transformers folder or hub name. The ladder of the
        latter has only the full size.
        """
        path = Path(source) / SETTINGS_FILE
        if not os.path.lexists(path):
            return _settings_of_sentence_model(source)
        try:
            found = read_record(path, _SettingsFile, what="settings file", hint="export the model again")
            settings = cls(**found.model_dump())
            _ = settings.sizes if settings.ladder else None
        except OtherFormat:
            raise
        except ModelError as error:
            raise ModelError(f"settings file {path}: {error}") from error
        except DataError as error:
            raise ModelError(str(error)) from error
        return settings


def float32_einsum(equation: str, first: Tensor, second: Tensor) -> Tensor:
    """`torch.einsum` in float32, also under autocast, which would round both operands to half precision."""
    with torch.autocast(first.device.type, enabled=False):
        return torch.einsum(equation, first.float(), second.float())


def pool(hidden: Tensor, attention_mask: Tensor, pooling: str) -> Tensor:
    """Token vectors [batch, seq, dim] to text vectors [batch, dim]; the mean skips padding and runs in float32."""
    if pooling == "cls":
        return hidden[:, 0]
    weights = attention_mask.to(torch.float32)
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
    """A backbone, its pooling and its heads; `forward` returns the embeddings of all wanted sizes from one pass.

    heads: linear maps of some depths, "LAYERS" -> nn.Linear (models/heads.py). At a depth without a head, the pooled
    states are the embedding.
    """

    def __init__(self, backbone: PreTrainedModel, pooling: str = "cls", heads: nn.ModuleDict | None = None) -> None:
        super().__init__()
        self.backbone = backbone
        self.pooling = pooling
        self.heads = nn.ModuleDict() if heads is None else heads
        self._last_layer_skips = _let_last_layer_skip(backbone)

    @property
    def _first_position(self) -> int:
        """RoBERTa counts positions from the padding index on."""
        table = _position_table(self.backbone)
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
        table = _position_table(self.backbone)
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
        every output at padding, is undefined.
        """
        packed = packs(self.backbone)
        if packed:
            inputs: dict[str, Any] = {
                "input_ids": tokens.long()[None],
                "position_ids": texts.positions[None] + self._first_position,
                "cu_seq_lens_q": texts.offsets.int(),
                "max_length_q": texts.longest,
            }
        else:
            inputs = {"input_ids": texts.pad(tokens.long(), self.pad_id), "attention_mask": texts.mask}
        if read is not None and self._last_layer_skips:
            inputs[ReadRows.KEYWORD] = read[None] if packed else texts.pad(read)
        out = self.backbone(**inputs, output_hidden_states=True)
        final_norm = _final_norm(self.backbone)
        states = {}
        for layer in sorted(set(layers)):
            state = out.hidden_states[layer]
            # The backbone has already applied the final norm to the last state.
            state = final_norm(state) if final_norm is not None and 0 < layer < self.num_layers else state
            states[layer] = texts.pad(state[0]) if packed else state
        return states

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        sizes: Sequence[Size],
        *,
        offsets: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """One pass for all sizes: a tuple of [B, size.dim], pooled and cut, not normalised.

        input_ids: flat texts [T] with `offsets`, int64 [B + 1]; or padded texts [B, L] with their attention_mask.
        """
        tokens, texts = flat_texts(input_ids, attention_mask, offsets)
        if self.is_static:
            whole = self.backbone(tokens, texts.offsets)
            # The full width is not sliced: the backward pass of a slice would copy the gradient of a large batch.
            return tuple(whole if size.dim == whole.shape[1] else whole[:, : size.dim] for size in sizes)
        read = texts.first if self.pooling == "cls" else None
        states = self.hidden_states(tokens, texts, [size.layers for size in sizes], read=read)
        vectors = {layer: self.head(pool(state, texts.mask, self.pooling), layer) for layer, state in states.items()}
        return tuple(vectors[size.layers][:, : size.dim] for size in sizes)

    def head(self, pooled: Tensor, layers: int) -> Tensor:
        """Apply the head of a depth, if any, to pooled states: [batch, hidden] -> [batch, embedding_size]."""
        return self.heads[str(layers)](pooled) if str(layers) in self.heads else pooled


_READ_FAMILIES = ("bert", "roberta", "xlm-roberta", "camembert", "electra")


class ReadRows:
    """Hooks that run the last layer's feed-forward only for the positions that will be read.

    Nothing attends to the last layer's output, so its feed-forward, two thirds of the layer's products, is needed only
    at positions that a loss or the pooling reads: masked positions and CLS. `read_positions` (bool [batch, seq]) is
    passed as a keyword through the backbone to its layers, so that activation checkpointing repeats it. A call without
    it computes all positions.
    """

    KEYWORD = "read_positions"

    def __init__(self, layer: nn.Module) -> None:
        self.read: Tensor | None = None
        self.shape = torch.Size()
        intermediate, output = cast(nn.Module, layer.intermediate), cast(nn.Module, layer.output)
        layer.register_forward_pre_hook(self._before_layer, with_kwargs=True)
        intermediate.register_forward_pre_hook(self._before_up)
        output.register_forward_pre_hook(self._before_down)
        output.register_forward_hook(self._after_down)

    def _before_layer(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self.read = kwargs.get(self.KEYWORD)

    def _before_up(self, module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        self.shape = args[0].shape  # [batch, seq, hidden]
        return args if self.read is None else (args[0][self.read],)

    def _before_down(self, module: nn.Module, args: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return args if self.read is None else (args[0], args[1][self.read])

    def _after_down(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        if self.read is None:
            return output
        return output.new_zeros(self.shape).masked_scatter(self.read[..., None], output)


def _let_last_layer_skip(backbone: PreTrainedModel) -> bool:
    """Attach ReadRows to the last layer, once; False for families whose layers have another structure."""
    if backbone.config.model_type not in _READ_FAMILIES:
        return False
    layer: Any = encoder_layers(backbone)[-1]
    if not hasattr(layer, "read_rows"):
        layer.read_rows = ReadRows(layer)
    return True


def _final_norm(backbone: nn.Module) -> nn.Module | None:
    for name in _FINAL_NORM_NAMES:
        if isinstance(norm := getattr(backbone, name, None), nn.Module):
            return norm
    return None


def encoder_layers(backbone: PreTrainedModel) -> nn.ModuleList:
    """The backbone's list of transformer layers, whose name differs between families."""
    wanted = int(backbone.config.num_hidden_layers)
    lists = [m for m in backbone.modules() if isinstance(m, nn.ModuleList) and len(m) == wanted]
    if not lists:
        raise ModelError(
            f"{type(backbone).__name__} has no list of its {wanted} layers; use an encoder of the BERT, RoBERTa, "
            "DistilBERT, MiniLM or ModernBERT kind"
        )
    return lists[0]


def _position_table(backbone: nn.Module) -> nn.Embedding | None:
    for name, module in backbone.named_modules():
        if name.rpartition(".")[2] == "position_embeddings" and isinstance(module, nn.Embedding):
            return module
    return None


def longest_input(backbone: nn.Module) -> int | None:
    """The number of tokens that the position table allows; None if positions are computed (rotary)."""
    table = _position_table(backbone)
    if table is None:
        return None
    # RoBERTa counts positions from the padding index on.
    return table.num_embeddings - (0 if table.padding_idx is None else table.padding_idx + 1)


def truncate_layers(backbone: PreTrainedModel, num_layers: int) -> PreTrainedModel:
    """Cut the backbone to its first layers, in place, and set the count in its config."""
    have = int(backbone.config.num_hidden_layers)
    if not 1 <= num_layers <= have:
        raise ModelError(f"cannot keep {num_layers} layers of an encoder that has {have}; choose 1 to {have}")
    layers = encoder_layers(backbone)
    del layers[num_layers:]
    backbone.config.num_hidden_layers = num_layers
    _let_last_layer_skip(backbone)
    # ModernBERT's config lists the kind of every layer; a list of the old length could not be loaded.
    if getattr(backbone.config, "layer_types", None):
        backbone.config.layer_types = list(backbone.config.layer_types)[:num_layers]
    return backbone


def set_dropout(backbone: PreTrainedModel, probability: float) -> None:
    """Set the probability of every dropout of the backbone, also in its config; below 0: change nothing."""
    if probability < 0:
        return
    for module in backbone.modules():
        if isinstance(module, nn.Dropout):
            module.p = probability
        # The attention of some families (ModernBERT) keeps its own probability.
        for name in ("attention_dropout", "dropout_prob"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, probability)
    for name, value in backbone.config.to_dict().items():
        if "dropout" in name and isinstance(value, float):
            setattr(backbone.config, name, probability)


def load_encoder(source: str | Path, *, pooling: str | None = None) -> Encoder:
    """An encoder from a local folder or a hub name. `pooling` None: the pooling of its settings, else CLS."""
    settings = EmbeddingSettings.load(source)
    backbone = load_pretrained(AutoModel, source)
    heads = _heads_of(source, backbone.config)
    encoder = Encoder(backbone, pooling or (settings.pooling if settings else "cls"), heads)
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


def _settings_of_sentence_model(source: str | Path) -> EmbeddingSettings | None:
    found = read_sentence_model(source)
    if found is None:
        return None
    config = load_config(source)
    thing = f"sentence-transformers folder {source}"
    with torch.device("meta"), refused_by("transformers", thing, hint="give another", kind=ModelError):
        limit = longest_input(AutoModel.from_config(config, trust_remote_code=False))
    # If positions are computed, the configuration names the length that the model was made for.
    limit = limit or getattr(config, "max_position_embeddings", None)
    lengths = [min(each for each in (named, limit) if each) for named in found.lengths if named or limit]
    if len(lengths) < 2:
        raise ModelError(
            f"{thing} does not say how many tokens it takes; write max_seq_length into its sentence_bert_config.json"
        )
    linear = found.linear_map(int(config.hidden_size))
    width = int(config.hidden_size) if linear is None else len(linear.bias)
    return EmbeddingSettings(
        pooling=found.pooling,
        similarity=found.similarity,
        ladder=((int(config.num_hidden_layers), width),),
        query_max_length=lengths[0],
        passage_max_length=lengths[1],
        query_prompt=found.query_prompt,
        passage_prompt=found.passage_prompt,
    )


def base_of(masked_lm: PreTrainedModel) -> PreTrainedModel:
    """The encoder inside a model with an MLM head."""
    return cast(PreTrainedModel, masked_lm.base_model)


def load_masked_lm(source: str | Path) -> tuple[PreTrainedModel, bool]:
    """(an encoder with its MLM head, whether the head is freshly initialised), from a local folder or a hub name."""
    return load_with_head(AutoModelForMaskedLM, source)


def build_masked_lm(config: Mapping[str, Any], *, vocab_size: int, pad_token_id: int) -> PreTrainedModel:
    """An untrained encoder with its MLM head. `config`: a `model_type` and keys of that family's configuration."""
    values = dict(config)
    family = values.pop("model_type", None)
    if family is None:
        raise ModelError('model.config lacks model_type; name the family, for example model_type = "bert"')
    try:
        known = AutoConfig.for_model(family)
    except (ValueError, TypeError):
        raise ModelError(
            f"model.config.model_type {family!r} is unknown to transformers; use for example 'bert'"
        ) from None
    for key in values:
        if key in ("vocab_size", "pad_token_id"):
            raise ModelError(f"model.config.{key} comes from the shards' tokenizer; remove it")
        if not hasattr(known, key):
            raise ModelError(f"model.config.{key} is not a setting of {family!r} encoders; remove it or fix its name")
    return build_from_config(
        family, {**values, "vocab_size": vocab_size, "pad_token_id": pad_token_id}, thing="model.config"
    )

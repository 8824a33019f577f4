"""The folders of sizes, in sentence-transformers' long-standing layout, which all its versions and other servers read.

The modules of a size are Transformer, Pooling, Dense if its depth has a head or its dimensions are cut, and Normalize
if similarity is cosine.
- Layers are cut out of the checkpoint and out of its config: a config that keeps the old count reloads RANDOM layers.
- Narrower feed-forwards are the first rows and columns of their matrices, with their number in the config.
- A head (models/heads.py) becomes a Dense with its first d rows and its bias. Without a head, the width is cut by a
  Dense with the selection matrix [d, D] (ones on the diagonal, no bias, identity activation): `truncate_dim` would act
  after Normalize and give vectors that are not of unit length.
- Families with a pooler (BERT, RoBERTa) get a pooler of zeros. It takes no part in the embedding, but without it in the
  checkpoint every loader reports newly initialised weights.
- `is_matryoshka` and `matryoshka_dimensions` in config.json name the ladder's widths up to the size's own. vLLM
  refuses a request's `dimensions` if both keys are missing or the list lacks the value. A prefix of a size's vector is
  the vector of the smaller width at the same depth, because only the Dense was cut.
- Weights in float16 halve the files, but config.json still says float32. So a loader computes in float32, which is
  several times as fast on a CPU, unless it is asked for another type.
A Router holds two sizes of one width, for `encode_query` and `encode_document`. Each of its routes has all modules of a
size, and cuts texts at the length that queries or documents were trained with. A folder of one size has a single length
for both: the longer one.
A static encoder (models/static_embedding.py) becomes a StaticEmbedding: its files stand in the root, its width is cut
in the table itself, and its tokenizer adds no special tokens and cuts texts by itself. An int8 table consists of codes
and one scale per token, which sentence-transformers multiplies when it loads them. It does so only for StaticEmbedding:
a Transformer's int8 table would need a package of its own to load, so int8 for Transformers is left to the ONNX files.
"""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from models.backbone import truncate_layers
from models.encoder import Encoder
from models.heads import head_of, linear_head
from models.nested_feed_forward import narrow
from models.quantisation import int8_table
from models.sentence_transformers import POOLING_FLAGS, POOLINGS
from models.settings import EmbeddingSettings
from models.sizes import ModelError, Size

WEIGHTS = ("float32", "float16")
_MODULES = "sentence_transformers.models"
_ROUTER_FILE = "router_config.json"


@dataclass(frozen=True)
class Cut:
    """One size of an encoder: its layers, and the projection from pooled states [batch, hidden] to its embedding.

    projection: None if the pooled states are the embedding. widths: the dimensions to which the embedding may be cut,
    its own included. parameters: their number in the size's layers and head; it is kept because the backbone itself is
    cut further for the next size.
    """

    size: Size
    backbone: PreTrainedModel
    projection: nn.Linear | None
    settings: EmbeddingSettings
    widths: tuple[int, ...]
    parameters: int

    @property
    def modules(self) -> list[str]:
        """The kinds of the size's modules, in order."""
        dense = ["Dense"] if self.projection is not None else []
        return ["Transformer", "Pooling", *dense, *_normalize(self.settings)]


def cut_to(encoder: Encoder, size: Size, settings: EmbeddingSettings) -> Cut:
    """Cut the encoder's backbone to the size's layers, in place; call it for deeper sizes first.

    Feed-forwards are cut in a copy, because the next size may have wider ones.
    """
    backbone = truncate_layers(encoder.backbone, size.layers)
    if not size.has_whole_feed_forwards:
        backbone = narrow(copy.deepcopy(backbone), size.feed_forward)
    widths = tuple(sorted({size.dim, *(each.dim for each in settings.sizes if each.dim < size.dim)}))
    for key, value in (("is_matryoshka", True), ("matryoshka_dimensions", list(widths))):
        if len(widths) > 1:
            setattr(backbone.config, key, value)
        elif hasattr(backbone.config, key):
            delattr(backbone.config, key)
    projection = _projection(encoder, size)
    parameters = sum(each.numel() for name, each in backbone.named_parameters() if not name.startswith("pooler."))
    if projection is not None and projection.bias is not None:
        parameters += sum(each.numel() for each in projection.parameters())
    return Cut(size, backbone, projection, settings, widths, parameters)


@torch.no_grad()
def _projection(encoder: Encoder, size: Size) -> nn.Linear | None:
    if (head := head_of(encoder.heads, size.body)) is not None:
        return linear_head(head.weight[: size.dim], head.bias[: size.dim]).requires_grad_(False)
    if size.dim == encoder.hidden_size:
        return None
    selection = nn.Linear(encoder.hidden_size, size.dim, bias=False).requires_grad_(False)
    selection.weight.copy_(torch.eye(size.dim, encoder.hidden_size))
    return selection


def with_idle_pooler(backbone: PreTrainedModel) -> PreTrainedModel:
    """The same backbone with a pooler of zeros, if its family has one."""
    takes_pooler = "add_pooling_layer" in inspect.signature(type(backbone).__init__).parameters
    if takes_pooler and getattr(backbone, "pooler", None) is None:
        with torch.device("meta"):
            pooler: Any = type(backbone)(copy.deepcopy(backbone.config)).pooler
        pooler.to_empty(device="cpu")
        for parameter in pooler.parameters():
            torch.nn.init.zeros_(parameter)
        backbone.pooler = pooler
    return backbone


def write_size(cut: Cut, tokenizer: PreTrainedTokenizerFast, folder: Path, *, weights: str = "float32") -> Path:
    """Write a folder for `SentenceTransformer(folder)`; returns its Transformer's folder. weights: one of WEIGHTS."""
    paths = [f"{i}_{kind}" if i else "" for i, kind in enumerate(cut.modules)]
    for kind, path in zip(cut.modules, paths, strict=True):
        _write_module(cut, kind, tokenizer, folder / path, weights=weights)
    _write_modules(folder, dict(zip(paths, cut.modules, strict=True)), cut.settings)
    return folder


def write_route(
    cut: Cut, tokenizer: PreTrainedTokenizerFast, folder: Path, route: str, *, weights: str = "float32"
) -> Path:
    """Write the modules of one route of a Router; returns the folder of its Transformer."""
    for path, kind in _route(cut, route).items():
        _write_module(cut, kind, tokenizer, folder / path, weights=weights)
    return folder / next(iter(_route(cut, route)))


def write_router(cuts: Mapping[str, Cut], folder: Path) -> dict[str, Path]:
    """Join routes that are already written into a folder that `SentenceTransformer(folder)` loads.

    Returns the folder of each route's Transformer.
    """
    routes = {route: _route(cut, route) for route, cut in cuts.items()}
    content = {
        "types": {path: f"{_MODULES}.{kind}" for paths in routes.values() for path, kind in paths.items()},
        "structure": {route: list(paths) for route, paths in routes.items()},
        "parameters": {"default_route": "document", "allow_empty_key": True, "route_mappings": {}},
    }
    _write_json(folder / _ROUTER_FILE, content)
    _write_modules(folder, {"": "Router"}, next(iter(cuts.values())).settings)
    return {route: folder / next(iter(paths)) for route, paths in routes.items()}


def _route(cut: Cut, route: str) -> dict[str, str]:
    """Folder of each module of a route, relative to the Router's -> kind."""
    return {f"{route}_{i}_{kind}": kind for i, kind in enumerate(cut.modules)}


def _write_module(cut: Cut, kind: str, tokenizer: PreTrainedTokenizerFast, folder: Path, *, weights: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "Transformer":
        save_checkpoint(cut.backbone, tokenizer, folder, weights=weights)
        lengths = {"max_seq_length": tokenizer.model_max_length, "do_lower_case": False}
        _write_json(folder / "sentence_bert_config.json", lengths)
    elif kind == "Pooling":
        _write_json(
            folder / "config.json",
            {
                "word_embedding_dimension": int(cut.backbone.config.hidden_size),
                **{flag: POOLINGS.get(mode) == cut.settings.pooling for flag, mode in POOLING_FLAGS.items()},
                **({} if cut.settings.pool_prompt else {"include_prompt": False}),
            },
        )
    elif kind == "Dense":
        assert cut.projection is not None
        _write_json(
            folder / "config.json",
            {
                "in_features": cut.projection.in_features,
                "out_features": cut.projection.out_features,
                "bias": cut.projection.bias is not None,
                "activation_function": "torch.nn.modules.linear.Identity",
            },
        )
        _save_tensors(cut.projection.state_dict(prefix="linear."), folder)


def save_checkpoint(
    backbone: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path, *, weights: str = "float32"
) -> None:
    """Write the Hugging Face files of an encoder and of its tokenizer."""
    tensors = None
    if weights == "float16":
        state = backbone.state_dict()
        tensors = {name: each.half() if each.is_floating_point() else each for name, each in state.items()}
        if too_large := [name for name, tensor in tensors.items() if not tensor.isfinite().all()]:
            raise ModelError(f"{too_large[0]} has values beyond float16's 65,504; leave --weights float16 out")
    backbone.save_pretrained(folder, state_dict=tensors)
    tokenizer.save_pretrained(folder)


def weights_megabytes(folder: Path) -> float:
    """Megabytes of all safetensors files in a folder and below it."""
    return sum(path.stat().st_size for path in folder.rglob("*.safetensors")) / 1e6


def table_tensors(table: Tensor, *, in_int8: bool) -> dict[str, Tensor]:
    """A token table [V, D] under the names that StaticEmbedding looks for; one scale per row serves every width."""
    if not in_int8:
        return {"embedding.weight": table}
    codes, scales = int8_table(table)
    return {"embeddings": codes, "weights": scales}


def write_static(
    tensors: Mapping[str, Tensor],
    tokenizer: PreTrainedTokenizerFast,
    settings: EmbeddingSettings,
    size: Size,
    folder: Path,
) -> None:
    """Write one width of a token table. The tokenizer's file cuts texts: a StaticEmbedding has no length limit."""
    folder.mkdir(parents=True)
    _save_tensors({key: each[:, : size.dim] if each.ndim == 2 else each for key, each in tensors.items()}, folder)
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.enable_truncation(tokenizer.model_max_length - tokenizer.num_special_tokens_to_add())
    backend.save(str(folder / "tokenizer.json"))
    kinds = ["StaticEmbedding", *_normalize(settings)]
    _write_modules(folder, {f"{i}_{kind}" if i else "": kind for i, kind in enumerate(kinds)}, settings)


def _normalize(settings: EmbeddingSettings) -> list[str]:
    """The module that makes unit vectors if similarity is cosine, else none."""
    return ["Normalize"] if settings.similarity == "cosine" else []


def _write_modules(folder: Path, modules: Mapping[str, str], settings: EmbeddingSettings) -> None:
    """Write modules.json, and the settings beside it. modules: folder of a module -> kind."""
    listed = []
    for i, (path, kind) in enumerate(modules.items()):
        (folder / path).mkdir(exist_ok=True)  # a module without files needs its folder too
        listed.append({"idx": i, "name": str(i), "path": path, "type": f"{_MODULES}.{kind}"})
    _write_json(folder / "modules.json", listed)
    _write_json(
        folder / "config_sentence_transformers.json",
        {
            "prompts": {"query": settings.query_prompt, "document": settings.passage_prompt},
            "default_prompt_name": None,
            "similarity_fn_name": settings.similarity,
        },
    )


def _save_tensors(tensors: Mapping[str, Tensor], folder: Path) -> None:
    contiguous = {key: tensor.contiguous() for key, tensor in tensors.items()}
    save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

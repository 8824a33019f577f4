"""The one loader of model folders: complete, plausible and finite weights of a known model, or a one-sentence error.

transformers fills missing weights with random numbers, asks on stdin whether a folder's own code may run, and raises
many kinds of exceptions. This module checks the folder first and never runs its code. Every exception becomes a
ModelError that names the folder, and the loaded weights must be complete and finite. Encoders and decoders of texts are
loaded; what is said of them (models/backbone.py, models/direction.py) is tried out with a few tokens.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModel, AutoModelForMaskedLM, PretrainedConfig, PreTrainedModel

from data.ground.errors import DataError
from data.ground.files import first_line, refused_by
from data.ground.records import read_json
from data.model_folders import transformer_folder
from models.backbone import check_cuts
from models.choices import Direction
from models.direction import check_direction, is_decoder, with_direction
from models.sizes import ModelError
from models.static_embedding import StaticConfig

log = logging.getLogger(__name__)

# Keys of a configuration that say where a model comes from; they do not change what it computes.
NOT_COMPUTED_WITH = ("_name_or_path", "architectures", "transformers_version", "dtype", "torch_dtype")
_HINT = "give a sound model folder"
_WEIGHT_FILES = ("*.safetensors", "*.bin")
# Buffers that older versions stored in files; models compute them now.
_COMPUTED = ("position_ids", "token_type_ids", "inv_freq")
_POOLER = "pooler"
# Far above every existing model. A larger value is an error, and building such a model would take all memory.
_LARGEST = {
    "num_hidden_layers": 1_000,
    "hidden_size": 1 << 17,
    "num_attention_heads": 1 << 12,
    "num_key_value_heads": 1 << 12,
    "intermediate_size": 1 << 20,
    "vocab_size": 1 << 27,
    "max_position_embeddings": 1 << 24,
}
_NAMED = 3  # number of tensors that an error message names


def load_pretrained(auto: Any, source: str | Path, *, direction: Direction | None = None) -> PreTrainedModel:
    """Load a folder or hub name by `auto` (AutoModel or AutoModelForMaskedLM), in float32.

    direction: that of a decoder; None: as its configuration says.

    Raises:
        ModelError: there is no such model, it is neither an encoder nor a decoder of texts, it cannot be run in this
            direction, or its weights are incomplete, do not fit its configuration or are not finite.

    """
    return load_with_head(auto, source, direction=direction)[0]


def load_with_head(
    auto: Any, source: str | Path, *, direction: Direction | None = None
) -> tuple[PreTrainedModel, bool]:
    """As `load_pretrained`; returns (model, whether its head is freshly initialised because the source has none)."""
    thing = f"model {str(source)!r}"
    config, extra = _config_and_options(auto, source, direction, thing)
    folder = local_folder(source)
    if folder is not None:
        source = folder = _transformer_folder(folder)
        _check_room(config, folder, thing)
    with _refusing(source, thing):
        model, report = auto.from_pretrained(
            source,
            config=config,
            dtype=torch.float32,
            trust_remote_code=False,
            output_loading_info=True,
            # Mismatches are then listed in the report, so that the error message can name them.
            ignore_mismatched_sizes=True,
            **extra,
        )
    fresh = _check_report(model, report, thing)
    if not isinstance(model.get_input_embeddings(), nn.Embedding | nn.EmbeddingBag):
        raise ModelError(f"{thing} has no table of token embeddings; give an encoder of texts")
    tensors = (*model.named_parameters(), *model.named_buffers())
    check_finite(tensors, thing)
    if not isinstance(config, StaticConfig):
        check_understood(model.base_model, thing)
    return cast(PreTrainedModel, model), fresh


def build_without_weights(source: str | Path, *, direction: Direction | None = None) -> PreTrainedModel:
    """The model of a folder or hub name on the meta device: its modules and the shapes of its weights, float32.

    It is for a process that is given the weights by another one, which loads them with `load_pretrained`, and with all
    of its checks. Parameters and buffers have no values; no file of weights is opened.
    """
    thing = f"model {str(source)!r}"
    config, extra = _config_and_options(AutoModel, source, direction, thing)
    with _refusing(source, thing), torch.device("meta"):
        model = AutoModel.from_config(config, dtype=torch.float32, trust_remote_code=False, **extra)
    return cast(PreTrainedModel, model.eval())


def _config_and_options(
    auto: Any, source: str | Path, direction: Direction | None, thing: str
) -> tuple[PretrainedConfig, dict[str, Any]]:
    """The configuration of a model, and the further arguments of its class."""
    config = _in_direction(load_config(source), direction, thing)
    model_class = auto._model_mapping.get(type(config), None)
    if model_class is None:
        lacks = "has no masked language model" if is_decoder(config) else "has no layers"
        raise ModelError(
            f"{thing} is of the type {config.model_type!r}, which {lacks} to pre-train; give an encoder such as bert, "
            "or fine-tune this model"
        )
    # With a pooler, the optimizer would apply weight decay to an unused one.
    has_pooler = "add_pooling_layer" in inspect.signature(model_class.__init__).parameters
    return config, {"add_pooling_layer": False} if has_pooler else {}


def check_understood(backbone: PreTrainedModel, thing: str) -> None:
    """Refuse a model that computes something else than this program thinks it does."""
    with refused_by("transformers", thing, hint=_HINT, kind=ModelError):
        check_cuts(backbone, thing)
        if is_decoder(backbone.config):
            check_direction(backbone, thing)


def _in_direction(config: PretrainedConfig, direction: Direction | None, thing: str) -> PretrainedConfig:
    if direction is None or isinstance(config, StaticConfig):
        return config
    if is_decoder(config):
        return with_direction(config, direction)
    if direction == "causal":
        raise ModelError(
            f"{thing} is of the type {config.model_type!r}, an encoder, which reads in both directions; leave the "
            "direction empty"
        )
    return config


def load_config(source: str | Path) -> PretrainedConfig:
    """Load the configuration of a folder or a hub name, and refuse it unless its family is supported.

    Raises:
        ModelError: there is no configuration, or it is not that of a supported model.

    """
    thing = f"model {str(source)!r}"
    folder = local_folder(source)
    if folder is not None:
        source = _transformer_folder(folder)
        _look_at(source)
    with _refusing(source, thing):
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    _check_family(config, thing)
    _check_precision(config, thing)
    check_plausible(config, thing)
    return config


def build_from_config(values: Mapping[str, Any], *, thing: str, direction: Direction | None = None) -> PreTrainedModel:
    """An untrained encoder with its MLM head, or an untrained decoder without a head, which needs a direction.

    values: those of the configuration, `model_type` among them. thing: their source, with which errors begin.
    """
    hint = "fix its values"
    with refused_by("transformers", thing, hint=hint, kind=ModelError):
        config = AutoConfig.for_model(**values)
    _check_family(config, thing)
    if is_decoder(config) and direction is None:
        raise ModelError(
            f"{thing} is of the type {config.model_type!r}, which is a decoder and not an encoder with a masked "
            "language model; give one such as bert"
        )
    check_plausible(config, thing)
    needed, there = 4 * _parameters(config), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > there:
        raise ModelError(
            f"{thing} asks for about {needed >> 30} GiB of weights, and this machine has {there >> 30} GiB of memory; "
            "make the encoder smaller"
        )
    config = _in_direction(config, direction, thing)
    auto = AutoModelForMaskedLM if direction is None else AutoModel
    with refused_by("transformers", thing, hint=hint, kind=ModelError):
        model = cast(PreTrainedModel, auto.from_config(config, trust_remote_code=False))
    if direction is not None:
        check_understood(model.eval(), thing)
    return model.train()


def check_plausible(config: PretrainedConfig, thing: str) -> None:
    """Refuse impossible layer counts, widths and the like in a configuration before a model of that size is built."""
    for name, largest in _LARGEST.items():
        value = getattr(config, name, None)
        optional = name not in ("num_hidden_layers", "hidden_size", "vocab_size")
        # Some families compute positions, which -1 denotes.
        if (value is None and optional) or (name == "max_position_embeddings" and value == -1):
            continue
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= largest:
            shown = str(value)[:40] if isinstance(value, int) else repr(value)[:40]
            raise ModelError(
                f"{thing} has the configuration {name} = {shown}; it must be a whole number from 1 to {largest}"
            )
    if isinstance(config, StaticConfig) and not all(type(index) is int for index in config.special_ids):
        raise ModelError(f"{thing} has the configuration special_ids = {config.special_ids!r:.60}; they must be ids")


def check_finite(tensors: Iterable[tuple[str, Tensor]], thing: str) -> None:
    """Refuse tensors with NaN or infinity, and name the first."""
    for name, tensor in tensors:
        # The sum needs no memory, unlike isfinite(). It may overflow, so isfinite() decides if the sum is not finite.
        if tensor.is_floating_point() and not tensor.sum().isfinite() and not tensor.isfinite().all():
            raise ModelError(
                f"{thing} holds NaN or infinity in {name}: its training diverged or its file is damaged; "
                "take an earlier checkpoint, or train it again"
            )


def local_folder(source: str | Path) -> Path | None:
    """The folder that a source names; None if it can only be a name on the hub."""
    path, name = Path(source), str(source)
    is_path = isinstance(source, Path) or name.startswith((".", "/", "~")) or name.count("/") > 1
    return path if is_path or path.exists() else None


def _transformer_folder(folder: Path) -> Path:
    try:
        return transformer_folder(folder)
    except DataError as error:
        raise ModelError(str(error)) from error


def _look_at(folder: Path) -> None:
    """Refuse a folder on which transformers would crash, ask the user, or load another model instead."""
    path = folder / "config.json"
    if not path.is_file():
        raise ModelError(f"no model in {folder}: config.json is missing; give the folder of a Hugging Face checkpoint")
    if (folder / "adapter_config.json").exists():
        raise ModelError(
            f"model folder {folder} holds an adapter (adapter_config.json), which needs another model under it; "
            "give the folder of the merged model"
        )
    try:
        values = read_json(path, what="model configuration", hint=_HINT)
    except DataError as error:
        raise ModelError(str(error)) from error
    family = values.get("model_type") if isinstance(values, dict) else None
    if not isinstance(family, str):
        raise ModelError(f"model configuration {path} names no model_type; {_HINT}")
    if family not in CONFIG_MAPPING:
        own_code = ", and code inside a model folder is never run" if "auto_map" in values else ""
        raise ModelError(
            f"model configuration {path} names the model_type {family!r:.60}, which transformers does not "
            f"know{own_code}; give a model of a family that it knows, such as bert"
        )


def _check_family(config: PretrainedConfig, thing: str) -> None:
    """Refuse what is neither an encoder (a family with a masked language model), a decoder of texts, nor a table."""
    is_masked = AutoModelForMaskedLM._model_mapping.get(type(config), None) is not None
    as_decoder = getattr(config, "is_encoder_decoder", False) or getattr(config, "is_decoder", False)
    if isinstance(config, StaticConfig) or is_decoder(config) or (is_masked and not as_decoder):
        return
    raise ModelError(
        f"{thing} is of the type {config.model_type!r}{' as a decoder' if is_masked else ''}, which is not an encoder "
        "or a decoder of texts that this program can use; give one of a family with masked or causal language models, "
        "such as bert or qwen3"
    )


def _check_precision(config: PretrainedConfig, thing: str) -> None:
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(
            f"{thing} is quantised (quantization_config), and training and cutting need its floats; {_HINT}"
        )


def _check_room(config: PretrainedConfig, folder: Path, thing: str) -> None:
    """Refuse a configuration with far more weights than the folder's files can hold, before memory is allocated."""
    held = sum(path.stat().st_size for pattern in _WEIGHT_FILES for path in folder.glob(pattern) if path.is_file())
    # A weight takes at least one byte, and the estimate is rough.
    if held and _parameters(config) > 4 * held + 10**7:
        raise ModelError(
            f"{thing} has a configuration of about {_parameters(config):,} weights, and its files hold {held:,} bytes; "
            "config.json belongs to another model"
        )


def _parameters(config: PretrainedConfig) -> int:
    """The approximate number of weights of an encoder with this configuration."""
    hidden = int(config.hidden_size)
    tables = int(config.vocab_size) * int(getattr(config, "embedding_size", None) or hidden)
    if isinstance(config, StaticConfig):
        return tables
    # ALBERT's layers share their weights.
    layers = min(int(config.num_hidden_layers), int(getattr(config, "num_hidden_groups", 1_000)))
    inner = getattr(config, "intermediate_size", None)
    return tables + layers * hidden * (4 * hidden + 2 * (inner if isinstance(inner, int) else hidden))


def _check_report(model: PreTrainedModel, report: Mapping[str, Collection[Any]], thing: str) -> bool:
    """Refuse a model if weights of the encoder are random or were left out; poolers and heads may be missing.

    Returns whether the head is random.
    """
    base = model.base_model
    prefix = "" if base is model else f"{model.base_model_prefix}."
    parts = tuple(f"{name}." for name, _ in base.named_children() if name != _POOLER)

    def of_encoder(name: str) -> bool:
        own = name.removeprefix(f"{model.base_model_prefix}.")
        return own.startswith(parts) and name.rpartition(".")[2] not in _COMPUTED

    missing = sorted(name for name in report["missing_keys"] if not _is_pooler(name.removeprefix(prefix)))
    if lost := [name for name in missing if name.startswith(prefix)]:
        raise ModelError(f"the weights of {thing} lack {_some(lost)}, which would be random; {_HINT}")
    if mismatched := sorted(report["mismatched_keys"], key=str):
        name, stored, wanted = mismatched[0]
        raise ModelError(
            f"the weights of {thing} do not fit its configuration: {name} is {list(stored)} in place of "
            f"{list(wanted)}{_and_more(len(mismatched) - 1)}; {_HINT}"
        )
    if left := sorted(name for name in report["unexpected_keys"] if of_encoder(name)):
        raise ModelError(f"{thing} has weights that its configuration has no place for: {_some(left)}; {_HINT}")
    if errors := report.get("error_msgs"):
        raise ModelError(f"{thing} is refused by transformers ({str(errors)[:200]}); {_HINT}")
    if missing:
        _check_head(model, base, set(missing), thing)
    return bool(missing)


def _check_head(model: PreTrainedModel, base: nn.Module, missing: set[str], thing: str) -> None:
    """Refuse a head of which only a part is missing. Fine-tuned encoders have no head at all, which is accepted."""
    tied = {id(parameter) for parameter in base.parameters()}
    head = [name for name, each in model.named_parameters(remove_duplicate=False) if id(each) not in tied]
    if set(head) - missing:
        raise ModelError(f"the weights of {thing} lack {_some(sorted(missing))}, which would be random; {_HINT}")
    log.warning("%s has no masked language model's head; a fresh one is trained", thing)


def _is_pooler(name: str) -> bool:
    return name.partition(".")[0] == _POOLER


def _some(names: list[str]) -> str:
    return ", ".join(names[:_NAMED]) + _and_more(len(names) - _NAMED)


def _and_more(count: int) -> str:
    return f" and {count} more" if count > 0 else ""


@contextlib.contextmanager
def _refusing(source: str | Path, thing: str) -> Iterator[None]:
    """As `refused_by`, for a folder or a hub name: an OSError may mean that the hub could not be reached."""
    with refused_by("transformers", thing, hint=_HINT, kind=ModelError):
        try:
            yield
        except OSError as error:
            raise ModelError(
                f"cannot load the model {str(source)!r} ({first_line(error)}); "
                "give a local folder, or a hub name on a machine with network"
            ) from error

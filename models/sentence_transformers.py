"""Reads folders of sentence-transformers as a transformer, its settings and a linear map.

Two layouts are read: that of versions up to 5 (1_Pooling/config.json with a flag for each pooling mode, max_seq_length
in sentence_bert_config.json) and that of version 6 (`pooling_mode`, the length in tokenizer_config.json). The modules
may be Transformer, Pooling (in one way), Dense (without activation), Dropout and Normalize. Several Dense modules are
combined into one linear map. Normalize scales vectors to unit length, which does not change their cosine. Anything else
in a folder would change its vectors in a way that this project cannot compute, and is refused in one sentence.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers.utils.hub import cached_file

from data.ground.errors import DataError, OtherFormat
from data.ground.files import reading
from data.ground.records import Record, read_record
from data.model_folders import MODULES_FILE, Module, Modules, read_modules
from models.choices import MEANS, Pooling, Similarity
from models.loading import local_folder
from models.sizes import ModelError

# The library tries these names in turn; older versions had one for each family.
_TRANSFORMER_FILES = tuple(
    f"sentence_{family}_config.json"
    for family in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
_MODEL_FILE = "config_sentence_transformers.json"
_POOLED = "sentence_embedding"
_IDENTITY = ("torch.nn.modules.linear.Identity", "torch.nn.Identity")
# Loading arguments that do not change the vectors.
_HARMLESS = {"attn_implementation", "dtype", "torch_dtype", "local_files_only", "use_fast", "model_max_length"}
POOLING_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
# sentence-transformers' names of the ways of pooling that can be computed here -> ours.
POOLINGS: Mapping[str, Pooling] = {"cls": "cls", "mean": "mean", "lasttoken": "last", "weightedmean": "weighted_mean"}
_LARGEST_LENGTH = 1 << 24  # tokenizers without a length write 1e30
_HINT = "take another model, or remove modules.json from a copy to use the transformer alone"
Schema = TypeVar("Schema", bound=Record)


class LinearMap(NamedTuple):
    """The linear map of the Dense modules: weight [out, hidden], bias [out], float32."""

    weight: Tensor
    bias: Tensor


class _TransformerFile(Record):
    """The fields of sentence_bert_config.json."""

    max_seq_length: int | None = None
    do_lower_case: bool | None = False
    transformer_task: str = "feature-extraction"
    modality_config: dict[str, Any] | None = None
    module_output_name: str = "token_embeddings"
    query_length: int | None = None
    document_length: int | None = None
    query_expansion: dict[str, Any] | None = None
    processing_kwargs: dict[str, Any] | None = None
    model_args: dict[str, Any] | None = None
    model_kwargs: dict[str, Any] | None = None
    tokenizer_args: dict[str, Any] | None = None
    processor_kwargs: dict[str, Any] | None = None
    config_args: dict[str, Any] | None = None
    config_kwargs: dict[str, Any] | None = None


class _TokenizerFile(Record):
    """The fields of tokenizer_config.json that matter here. Without a limit, the length is 1e30 as an integer."""

    model_max_length: int | float | None = None
    truncation_side: str = "right"
    do_lower_case: bool | None = None


class _Tokenizer(Record):
    """The field of tokenizer.json that matters here."""

    normalizer: dict[str, Any] | None = None


class _PoolingFile(Record):
    """The fields of N_Pooling/config.json: the mode or modes by name, or flags before version 6; no flag means mean."""

    pooling_mode: str | list[str] | None = None
    include_prompt: bool = True
    pooling_mode_cls_token: bool = False
    pooling_mode_max_tokens: bool = False
    pooling_mode_mean_tokens: bool = False
    pooling_mode_mean_sqrt_len_tokens: bool = False
    pooling_mode_weightedmean_tokens: bool = False
    pooling_mode_lasttoken: bool = False

    @property
    def modes(self) -> list[str]:
        if self.pooling_mode is not None:
            return [self.pooling_mode] if isinstance(self.pooling_mode, str) else self.pooling_mode
        return [mode for flag, mode in POOLING_FLAGS.items() if getattr(self, flag)] or ["mean"]


class _DenseFile(Record):
    """The fields of N_Dense/config.json."""

    in_features: int
    out_features: int
    bias: bool = True
    activation_function: str = "torch.nn.modules.activation.Tanh"
    module_input_name: str = _POOLED
    module_output_name: str | None = None
    use_residual: bool = False


class _NormalizeFile(Record):
    """The fields of N_Normalize/config.json, which older versions do not write."""

    module_input_name: str | None = _POOLED
    module_output_name: str | None = None


class _ModelFile(Record):
    """The fields of config_sentence_transformers.json."""

    model_type: str = "SentenceTransformer"
    prompts: dict[str, str | None] | None = None
    default_prompt_name: str | None = None
    similarity_fn_name: str | None = None


@dataclass(frozen=True)
class SentenceModel:
    """The content of a sentence-transformers folder.

    `lengths`: the tokens at which queries and passages are cut, special tokens included; None if the folder names no
    limit. `dense`: the folders of the Dense modules, in order.
    """

    folder: Path
    transformer: Path
    pooling: Pooling
    pool_prompt: bool
    similarity: Similarity
    lengths: tuple[int | None, int | None]
    query_prompt: str
    passage_prompt: str
    dense: tuple[Path, ...]

    def linear_map(self, hidden_size: int) -> LinearMap | None:
        """The Dense modules combined into one map of pooled vectors [hidden_size]; None if there are none."""
        if not self.dense:
            return None
        weight = torch.eye(hidden_size, dtype=torch.float64)
        bias = torch.zeros(hidden_size, dtype=torch.float64)
        for folder in self.dense:
            with _as_model_error():
                each_weight, each_bias = _read_dense(folder)
            if each_weight.shape[1] != len(weight):
                raise ModelError(
                    f"{folder} takes vectors of {each_weight.shape[1]} dimensions, and is given {len(weight)}; "
                    "save the model again"
                )
            weight, bias = each_weight @ weight, each_weight @ bias + each_bias
        return LinearMap(weight.float(), bias.float())


def read_sentence_model(source: str | Path) -> SentenceModel | None:
    """Read a sentence-transformers folder, or a hub name whose files are cached or can be fetched.

    None without a modules.json, or with a barista.json, which takes precedence.

    Raises:
        ModelError: the folder is damaged, or it describes a model that this project cannot compute.

    """
    with _as_model_error():
        folder = local_folder(source)
        if folder is None and (folder := _fetch(str(source), MODULES_FILE)) is None:
            return None
        modules = read_modules(folder)
        if modules is None:
            return None
        if local_folder(source) is None:
            _fetch_all(str(source), modules)
        return _understand(modules)


def _understand(modules: Modules) -> SentenceModel:
    folder, kinds = modules.folder, []
    for module in modules.listed:
        kind = module.type.rpartition(".")[2]
        if not module.type.startswith("sentence_transformers."):
            raise _refusal(folder, f"its module {module.type!r:.80} is code of its own, which is never run")
        kinds.append(kind)
    steps = [kind for kind in kinds if kind != "Dropout"]
    wanted = ["Transformer", "Pooling", *["Dense"] * steps.count("Dense"), *["Normalize"] * steps.count("Normalize")]
    if steps != wanted:
        known = "Transformer, Pooling, Dense and Normalize, in this order, are all that can be read"
        raise _refusal(folder, f"its modules are {', '.join(kinds)}, and {known}")
    found = _read_optional(folder / _MODEL_FILE, _ModelFile)
    if found.model_type != "SentenceTransformer":
        raise _refusal(folder, f"it is a {found.model_type!r:.40} and no SentenceTransformer")
    for module in (module for module, kind in zip(modules.listed, kinds) if kind == "Normalize"):
        names = _read_optional(modules.folder_of(module) / "config.json", _NormalizeFile)
        if {names.module_input_name, names.module_output_name} - {None, _POOLED}:
            raise _refusal(folder, f"its {module.path} does not take and give the pooled vector")
    query_prompt, passage_prompt = _prompts(found)
    lengths = _lengths(modules.folder_of(modules.listed[0]), folder)
    pooling = next(module for module, kind in zip(modules.listed, kinds) if kind == "Pooling")
    has_prompt = bool(query_prompt or passage_prompt)
    pooled_by, pool_prompt = _pooling(modules.folder_of(pooling), folder, has_prompt=has_prompt)
    return SentenceModel(
        folder,
        modules.folder_of(modules.listed[0]),
        pooled_by,
        pool_prompt,
        _similarity(found.similarity_fn_name, folder, unit="Normalize" in kinds),
        lengths,
        query_prompt,
        passage_prompt,
        tuple(modules.folder_of(module) for module, kind in zip(modules.listed, kinds) if kind == "Dense"),
    )


def _lengths(transformer: Path, folder: Path) -> tuple[int | None, int | None]:
    """The tokens at which queries and passages are cut."""
    path = next((transformer / name for name in _TRANSFORMER_FILES if (transformer / name).is_file()), None)
    found = _TransformerFile() if path is None else read_record(path, _TransformerFile, what="settings file")
    plain = {"method": "forward", "method_output_name": "last_hidden_state"}
    for name, is_plain in {
        "transformer_task": found.transformer_task == "feature-extraction",
        "modality_config": (found.modality_config or {}).get("text", plain) == plain,
        "module_output_name": found.module_output_name == "token_embeddings",
        "query_expansion": not found.query_expansion,
        "processing_kwargs": not any((found.processing_kwargs or {}).values()),
    }.items():
        if not is_plain:
            raise _refusal(folder, f"its transformer has a {name} of another kind ({path})")
    arguments: dict[str, Any] = {}
    for name in ("model_args", "tokenizer_args", "config_args", "model_kwargs", "processor_kwargs", "config_kwargs"):
        arguments |= getattr(found, name) or {}
    if unknown := [name for name, value in arguments.items() if name not in _HARMLESS and value is not False]:
        raise _refusal(folder, f"its transformer is loaded with {', '.join(unknown)} ({path})")
    tokenizer = _read_optional(transformer / "tokenizer_config.json", _TokenizerFile)
    if tokenizer.truncation_side != "right":
        raise _refusal(folder, f"its tokenizer cuts texts at the {tokenizer.truncation_side}")
    if found.do_lower_case and not _lowers_case(transformer, tokenizer):
        raise ModelError(
            f"{path} asks for lower case, and the tokenizer beside it does not give it; save the tokenizer with a "
            "Lowercase normalizer, or set do_lower_case to false"
        )
    longest = arguments.get("model_max_length", found.max_seq_length)
    if longest is None:
        longest = tokenizer.model_max_length
    if longest is not None and (not isinstance(longest, int | float) or longest < 1):
        raise ModelError(f"{path or transformer} cuts texts at {longest} tokens; give a length of at least 1")
    whole = None if longest is None or longest > _LARGEST_LENGTH else int(longest)
    return found.query_length or whole, found.document_length or whole


def _lowers_case(transformer: Path, tokenizer: _TokenizerFile) -> bool:
    """Whether a tokenizer converts texts to lower case, as far as its files say."""
    path = transformer / "tokenizer.json"
    if not path.is_file():
        # BERT's tokenizers with a vocab.txt do so by default.
        return tokenizer.do_lower_case is not False and (transformer / "vocab.txt").is_file()
    normalizer = read_record(path, _Tokenizer, what="tokenizer").normalizer or {}
    parts = normalizer.get("normalizers", [normalizer])
    return any(part.get("type") == "Lowercase" or part.get("lowercase") is True for part in parts)


def _pooling(path: Path, folder: Path, *, has_prompt: bool) -> tuple[Pooling, bool]:
    """The pooling, and whether it takes the prompt's tokens, too."""
    found = read_record(path / "config.json", _PoolingFile, what="settings file")
    if len(found.modes) != 1 or found.modes[0] not in POOLINGS:
        known = " or ".join(POOLINGS)
        raise _refusal(folder, f"it pools by {' and '.join(found.modes)}, and only {known} can be computed")
    pooling = POOLINGS[found.modes[0]]
    if pooling == "cls" and has_prompt and not found.include_prompt:
        raise _refusal(folder, "its vector is the state of the first token after the prompt, which cannot be done here")
    # The last token is none of the prompt's.
    return pooling, found.include_prompt or pooling not in MEANS


def _similarity(name: str | None, folder: Path, *, unit: bool) -> Similarity:
    """The similarity, "cosine" or "dot". The dot product of unit vectors is their cosine."""
    if name not in (None, "cosine", "dot"):
        raise _refusal(folder, f"it compares vectors by {name!r:.40}, and only cosine and dot can be computed")
    return "dot" if name == "dot" and not unit else "cosine"


def _prompts(found: _ModelFile) -> tuple[str, str]:
    """The prompts of queries and passages. The default prompt serves both if the folder names neither."""
    prompts = found.prompts or {}
    query = prompts.get("query") or ""
    passage = next((text for name in ("document", "passage", "corpus") if (text := prompts.get(name))), "")
    if not query and not passage and found.default_prompt_name is not None:
        query = passage = prompts.get(found.default_prompt_name) or ""
    return query, passage


def _read_dense(folder: Path) -> tuple[Tensor, Tensor]:
    """Weight [out, in] and bias [out] of a Dense module, float64."""
    found = read_record(folder / "config.json", _DenseFile, what="settings file")
    if found.activation_function not in _IDENTITY:
        name = found.activation_function.rpartition(".")[2]
        raise _refusal(folder.parent, f"its {folder.name} has the activation {name}, and is no linear map")
    if found.module_input_name != _POOLED or found.module_output_name not in (None, _POOLED):
        raise _refusal(folder.parent, f"its {folder.name} does not take and give the pooled vector")
    tensors = _read_tensors(folder)
    shape = (found.out_features, found.in_features)
    wanted: dict[str, tuple[int, ...]] = {"linear.weight": shape}
    if found.bias:
        wanted["linear.bias"] = shape[:1]
    if found.use_residual and shape[0] != shape[1]:
        wanted["residual.weight"] = shape
    if {name: tuple(tensor.shape) for name, tensor in tensors.items()} != wanted:
        raise ModelError(f"the weights in {folder} do not fit its config.json; save the model again")
    if not all(tensor.isfinite().all() for tensor in tensors.values()):
        raise ModelError(f"the weights in {folder} hold NaN or infinity; take an earlier checkpoint")
    weight = tensors["linear.weight"].double()
    if found.use_residual:
        weight = weight + tensors.get("residual.weight", torch.eye(shape[0])).double()
    return weight, tensors["linear.bias"].double() if found.bias else torch.zeros(shape[0], dtype=torch.float64)


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    path = folder / "model.safetensors"
    if path.is_file():
        with reading(path, what="weights"):
            return load_file(path)
    path = folder / "pytorch_model.bin"
    if not path.is_file():
        raise ModelError(f"{folder} has neither model.safetensors nor pytorch_model.bin; copy the model folder again")
    try:
        return dict(torch.load(path, map_location="cpu", weights_only=True))
    except Exception as error:  # pickle's, zip's and torch's own
        raise ModelError(f"weights {path} are damaged ({error!s:.100}); copy the model folder again") from error


def _fetch(name: str, file: str) -> Path | None:
    """The snapshot folder of a hub name, after fetching one of its files; None if there is no such file."""
    # A wrong name is reported later, when the model is loaded.
    with contextlib.suppress(OSError, ValueError):
        found = cached_file(
            name,
            file,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
            _raise_exceptions_for_gated_repo=False,
        )
        # All files of a revision lie in one folder.
        return None if found is None else Path(found).parents[file.count("/")]
    return None


def _fetch_all(name: str, modules: Modules) -> None:
    """Fetch the files of a hub name that are read here; the transformer itself is loaded by its name."""
    if modules.listed[0].path:
        raise ModelError(
            f"{name} keeps its transformer in the folder {modules.listed[0].path}; download it, and name the folder"
        )
    for file in (_MODEL_FILE, *_TRANSFORMER_FILES[:1], "tokenizer_config.json", "tokenizer.json", "config.json"):
        _fetch(name, file)
    for module in modules.listed[1:]:
        for file in _files_of(module):
            _fetch(name, f"{module.path}/{file}")


def _files_of(module: Module) -> tuple[str, ...]:
    has_weights = module.type.endswith("Dense")
    return ("config.json", "model.safetensors", "pytorch_model.bin") if has_weights else ("config.json",)


def _read_optional(path: Path, schema: type[Schema]) -> Schema:
    return read_record(path, schema, what="settings file") if path.is_file() else schema()


def _refusal(folder: Path, problem: str) -> ModelError:
    return ModelError(f"sentence-transformers folder {folder} cannot be read here: {problem}; {_HINT}")


@contextlib.contextmanager
def _as_model_error() -> Iterator[None]:
    try:
        yield
    except (OtherFormat, ModelError):
        raise
    except DataError as error:
        raise ModelError(str(error)) from error

"""ONNX files of a size: one graph from token ids to the finished embedding, checked and timed as it is written.

The graph takes `input_ids` and `attention_mask` and has two outputs, because it is served in two ways. Plain
onnxruntime asks for `sentence_embedding`: pooled, mapped by the head or cut, and of unit length if similarity is
cosine, so it needs nothing of the folder but the tokenizer. sentence-transformers' `backend="onnx"` looks for
onnx/model.onnx, reads the first output, `last_hidden_state`, and applies the folder's own Pooling, Dense and Normalize.

The graph is written by torch's own exporter, which is maintained with torch and takes transformers' modules as they
are. `optimum` (2.1, optimum-onnx 0.1) requires transformers below 4.58 and exports through TorchScript, which torch
gives up. sentence-transformers' backend needs optimum, and in an environment that has it loads the files written here
(tried with sentence-transformers 5.7, transformers 4.57 and optimum-onnx 0.1).

int8 is onnxruntime's dynamic quantisation of the weight matrices (MatMul, one scale per column) and of the word and
position tables (Gather, one scale per table). The matrices have seven bits, because sums of eight-bit products overflow
on processors without VNNI. Measured on all-MiniLM-L6-v2 (STS-B's test set, Spearman): .8203 in float32, .8190 with this
quantisation, .8174 with eight bits, and .8163 with one scale per matrix. The vectors have a mean cosine with float32's
of .991, and of .957 with one scale per matrix. One scale per word (.8196) was not worth a step of our own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedModel, PreTrainedTokenizerFast

from data.ground.errors import ConfigError
from models.encoder import pool
from models.loading import load_pretrained
from models.sizes import ModelError
from trainer.exporting.folders import Cut

PRECISIONS = ("float32", "int8")
FOLDER = "onnx"
FILES = {"float32": "model.onnx", "int8": "model_int8.onnx"}
# Relative to a vector's length: float32 rounding changes the sums when their order changes; this leaves some room.
TOLERANCE = 1e-5
OPSET = 18
INPUTS, OUTPUTS = ("input_ids", "attention_mask"), ("last_hidden_state", "sentence_embedding")
_LARGEST_FILE = 1 << 31  # the limit of a protobuf in bytes; larger weights go into a file of their own
_QUERY = "how do I clean the steam wand of an espresso machine?"
# Texts of one token, of one sentence, and longer than most models read.
_TEXTS = (
    "coffee",
    _QUERY,
    "Espresso is coffee brewed by forcing hot water under pressure through finely ground beans, in 25 to 30 seconds.",
    "The grinder, the water, the pressure and the barista decide together what a cup tastes like. " * 40,
)
_WARM_UP, _REPEATS = 5, 30


@dataclass(frozen=True)
class Check:
    """Measurements of one ONNX file, compared with the folder's weights in torch.

    largest_difference: over all numbers of all vectors. least_cosine: between a text's two vectors, over all texts.
    The milliseconds are the time of one query on one thread, from its token ids to its vector.
    """

    file: str
    megabytes: float
    largest_difference: float
    least_cosine: float
    torch_milliseconds: float
    onnx_milliseconds: float

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


class Graph(nn.Module):
    """A size from token ids to its embedding, as sentence-transformers computes it from the folder."""

    backbone: PreTrainedModel

    def __init__(self, backbone: PreTrainedModel, cut: Cut) -> None:
        super().__init__()
        self.backbone = backbone
        self.projection = cut.projection
        self.pooling = cut.settings.pooling
        self.unit_length = cut.settings.similarity == "cosine"

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        """input_ids, attention_mask: int64 [batch, sequence] -> [batch, sequence, hidden] and [batch, dim]."""
        hidden = self.backbone(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        vectors = pool(hidden, attention_mask, self.pooling)
        if self.projection is not None:
            vectors = self.projection(vectors)
        return hidden, nn.functional.normalize(vectors) if self.unit_length else vectors


def check_onnx() -> None:
    """Raise an error in one sentence if a package is missing, before anything is computed."""
    try:
        import onnx
        import onnxruntime
        import onnxscript
    except ImportError as error:
        raise ConfigError(
            f"--onnx needs the package {error.name}; install what it needs with: "
            "pip install onnx onnxruntime onnxscript"
        ) from None
    del onnx, onnxruntime, onnxscript


def write_onnx(
    cut: Cut, tokenizer: PreTrainedTokenizerFast, folder: Path, precisions: tuple[str, ...]
) -> dict[str, Check]:
    """Write a size's ONNX files from its Transformer's folder, which must exist; returns precision -> check.

    Raises:
        ModelError: the float32 graph gives other vectors than the folder, or the model cannot be expressed.

    """
    graph = Graph(load_pretrained(AutoModel, folder), cut).eval()
    batch = _tokenized(tokenizer, list(_TEXTS))
    place = folder / FOLDER
    place.mkdir()
    float32 = place / FILES["float32"]
    with _quiet():
        write_graph(graph, batch, float32)
        checks = {"float32": _check(graph, tokenizer, float32, batch)}
        if checks["float32"].largest_difference > TOLERANCE * _longest(graph, batch):
            raise ModelError(
                f"the ONNX graph of {cut.size} differs from its weights by {checks['float32'].largest_difference:.2g}, "
                f"more than {TOLERANCE:g} of a vector's length; leave --onnx out"
            )
        if "int8" in precisions:
            _quantize(float32, place / FILES["int8"])
            checks["int8"] = _check(graph, tokenizer, place / FILES["int8"], batch)
    if "float32" not in precisions:
        for path in place.glob(f"{FILES['float32']}*"):  # the weights may be in a file beside it
            path.unlink()
    return {precision: checks[precision] for precision in precisions}


def write_graph(graph: Graph, batch: dict[str, Tensor], path: Path) -> None:
    axes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence")}
    weights = sum(each.numel() * each.element_size() for each in graph.parameters())
    try:
        torch.onnx.export(
            graph,
            tuple(batch[name] for name in INPUTS),
            path,
            dynamo=True,
            opset_version=OPSET,
            input_names=list(INPUTS),
            output_names=list(OUTPUTS),
            dynamic_shapes=tuple(axes for _ in INPUTS),
            external_data=weights > 0.9 * _LARGEST_FILE,
            verbose=False,
        )
    except torch.onnx.OnnxExporterError as error:
        family = graph.backbone.config.model_type
        raise ModelError(
            f"torch cannot write {family!r} encoders as ONNX ({str(error).splitlines()[0]}); leave --onnx out"
        ) from error


def _quantize(source: Path, target: Path) -> None:
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    model = onnx.load(source)
    # The exporter records the shape of a transposed matrix before its transposition, which shape inference refuses.
    del model.graph.value_info[:]
    quantize_dynamic(model, target, weight_type=QuantType.QInt8, per_channel=True, reduce_range=True)


@torch.inference_mode()
def _check(graph: Graph, tokenizer: PreTrainedTokenizerFast, path: Path, batch: dict[str, Tensor]) -> Check:
    run = onnx_runner(path)
    one = _tokenized(tokenizer, [_QUERY])
    differences, cosines = [], []
    # The texts are checked in one batch, where most are padded, and one by one.
    for inputs in (batch, *(_tokenized(tokenizer, [text]) for text in _TEXTS)):
        ours, theirs = graph(**inputs)[1], torch.from_numpy(run(inputs))
        differences.append((ours - theirs).abs().max().item())
        cosines.append(nn.functional.cosine_similarity(ours, theirs).min().item())
    with one_thread():
        torch_ms, onnx_ms = _milliseconds(lambda: graph(**one), lambda: run(one))
    files = path.parent.glob(f"{path.name}*")
    return Check(
        path.name,
        round(sum(each.stat().st_size for each in files) / 1e6, 2),
        max(differences),
        min(cosines),
        round(torch_ms, 3),
        round(onnx_ms, 3),
    )


def onnx_runner(path: Path) -> Callable[[dict[str, Tensor]], np.ndarray]:
    """A function from token ids and mask to vectors, float32 [batch, dim], on one thread."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def run(inputs: dict[str, Tensor]) -> np.ndarray:
        return session.run([OUTPUTS[1]], {name: inputs[name].numpy() for name in INPUTS})[0]

    return run


def _milliseconds(*ways: Callable[[], Any]) -> list[float]:
    """The median time of each function. They are timed in turn, so that a busy machine slows them alike."""
    seconds: list[list[float]] = [[] for _ in ways]
    for _ in range(_WARM_UP + _REPEATS):
        for way, taken in zip(ways, seconds):
            begin = time.perf_counter()
            way()
            taken.append(time.perf_counter() - begin)
    return [float(np.median(taken[_WARM_UP:])) * 1000 for taken in seconds]


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """torch on one thread, as on a server that answers many queries at once."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _tokenized(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> dict[str, Tensor]:
    encoded = tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
    # A call leaves its settings in the tokenizer, and so in the tokenizer's file.
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    return {name: encoded[name] for name in INPUTS}


@torch.inference_mode()
def _longest(graph: Graph, batch: dict[str, Tensor]) -> float:
    return graph(**batch)[1].norm(dim=1).max().item()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the packages' warnings about missing parts and future changes, about which a user can do nothing."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)

"""ONNX files of exports: what onnxruntime gives is what sentence-transformers gives of the same folder."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from data.ground.errors import ConfigError
from models.heads import HEADS_FILE, save_heads
from models.sizes import ModelError, Size
from tests.trainer.exports import our_vectors, write_model
from trainer.exporting import onnx_files
from trainer.exporting.onnx_files import TOLERANCE, one_thread, onnx_runner
from trainer.exporting.sizes import export_sizes

onnx = pytest.importorskip("onnx", reason="needs the package onnx")
onnxruntime = pytest.importorskip("onnxruntime", reason="needs the package onnxruntime")
pytest.importorskip("onnxscript", reason="needs the package onnxscript")
sentence_transformers = pytest.importorskip("sentence_transformers", reason="needs the package sentence-transformers")


@pytest.fixture(scope="module")
def model(tiny_tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return write_model(folder, tiny_tokenizer, "bert", "mean", heads=(1,), query_prompt="find: ")


@pytest.fixture(scope="module")
def export(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A size with a head, in both precisions: one graph for most tests, since to write one takes seconds."""
    output = tmp_path_factory.mktemp("export") / "export"
    export_sizes(model, output, sizes=["1x8"], onnx=["float32", "int8"])
    return output


@pytest.fixture
def copied(export: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exports take that graph in place of writing their own."""

    def copy(graph: Any, batch: Any, path: Path) -> None:
        shutil.copy(export / "1x8" / "onnx" / "model.onnx", path)

    monkeypatch.setattr(onnx_files, "write_graph", copy)


def vectors_of(folder: Path, texts: list[str], file: str = "model.onnx", *, size: int = 5) -> np.ndarray:
    """As a server of plain onnxruntime does it: the folder's tokenizer, the file, nothing else."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    session = onnxruntime.InferenceSession(str(folder / "onnx" / file), providers=["CPUExecutionProvider"])
    assert [each.name for each in session.get_inputs()] == ["input_ids", "attention_mask"]
    # sentence-transformers' own backend takes the first.
    assert [each.name for each in session.get_outputs()] == ["last_hidden_state", "sentence_embedding"]
    found = []
    for start in range(0, len(texts), size):
        batch = tokenizer(texts[start : start + size], padding=True, truncation=True, return_tensors="np")
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        found.append(session.run(["sentence_embedding"], inputs)[0])
    return np.concatenate(found)


@pytest.mark.launch
def test_the_graph_gives_the_folder_s_vectors(model: Path, export: Path, docstrings: list[str]) -> None:
    texts = ["", "a", *docstrings[:12]]  # of all lengths, one and several at a time
    theirs = sentence_transformers.SentenceTransformer(str(export / "1x8"), device="cpu").encode(texts)
    for size in (1, 5):
        np.testing.assert_allclose(vectors_of(export / "1x8", texts, size=size), theirs, atol=2e-6)
    other = our_vectors(model, texts, [Size(2, 8)])[Size(2, 8)]
    assert np.abs(vectors_of(export / "1x8", texts) - other).max() > 1e-2  # negative control


@pytest.mark.full
def test_a_route_has_its_own_graph(model: Path, docstrings: list[str], tmp_path: Path) -> None:
    export_sizes(model, tmp_path / "export", sizes=["2x12"], routers=["1x12:2x12"], onnx=["float32"])
    folder, texts = tmp_path / "export" / "router-1x12-2x12", docstrings[:6]
    router = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
    queries = vectors_of(folder / "query_0_Transformer", ["find: " + text for text in texts])
    documents = vectors_of(folder / "document_0_Transformer", texts)
    np.testing.assert_allclose(queries, router.encode_query(texts), atol=2e-6)
    np.testing.assert_allclose(documents, router.encode_document(texts), atol=2e-6)
    assert np.abs(queries - documents).max() > 1e-2  # negative control
    np.testing.assert_allclose(vectors_of(tmp_path / "export" / "2x12", texts), documents, atol=2e-6)
    manifest = json.loads((tmp_path / "export" / "export.json").read_text())
    routes = [f"router-1x12-2x12/{route}_0_Transformer" for route in ("document", "query")]
    assert sorted(manifest["onnx"]) == ["2x12", *routes]
    assert "query_0_Transformer/onnx/model.onnx" in (folder / "README.md").read_text()


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "pooling", "similarity"),
    [("modernbert", "cls", "dot"), ("roberta", "mean", "cosine"), ("distilbert", "cls", "cosine")],
)
def test_other_families(
    family: str,
    pooling: str,
    similarity: str,
    tiny_tokenizer: PreTrainedTokenizerFast,
    docstrings: list[str],
    tmp_path: Path,
) -> None:
    model = write_model(tmp_path / "model", tiny_tokenizer, family, pooling, similarity)
    folder = export_sizes(model, tmp_path / "export", sizes=["3x12"], onnx=["float32"])["3x12"]
    theirs = sentence_transformers.SentenceTransformer(str(folder), device="cpu").encode(docstrings[:10])
    np.testing.assert_allclose(vectors_of(folder, docstrings[:10]), theirs, atol=1e-5)
    assert not (folder / "onnx" / "model_int8.onnx").exists()


def big_tensors(path: Path) -> dict[str, str]:
    """Name -> type of every tensor in a file with more than 250 numbers."""
    types = onnx.TensorProto.DataType
    found = onnx.load(path).graph.initializer
    return {each.name: types.Name(each.data_type) for each in found if np.prod(each.dims) > 250}


@pytest.mark.launch
def test_int8_files_hold_their_tables_in_int8(export: Path, docstrings: list[str]) -> None:
    folder = export / "1x8"
    whole, small = (folder / "onnx" / name for name in ("model.onnx", "model_int8.onnx"))
    tables = [name for name in big_tensors(whole) if "embeddings" in name]
    assert any("word_embeddings" in name for name in tables)
    assert set(big_tensors(whole).values()) == {"FLOAT"}  # the control
    assert set(big_tensors(small).values()) <= {"INT8", "UINT8"}
    assert any("word_embeddings" in name for name in big_tensors(small))
    # The graph's own operators weigh as much as such small layers; the table of 2,000 words dominates.
    assert small.stat().st_size < 0.6 * whole.stat().st_size
    a, b = vectors_of(folder, docstrings[:12]), vectors_of(folder, docstrings[:12], "model_int8.onnx")
    assert (a * b).sum(1).min() > 0.95 and np.abs(a - b).max() > 1e-4


@pytest.mark.launch
def test_what_was_measured_is_told(export: Path) -> None:
    checks = json.loads((export / "export.json").read_text())["onnx"]["1x8"]
    assert 0 <= checks["float32"]["largest_difference"] < TOLERANCE
    assert checks["float32"]["least_cosine"] > 0.99999 > checks["int8"]["least_cosine"] > 0.9
    for check in checks.values():
        assert check["torch_milliseconds"] > 0 and check["onnx_milliseconds"] > 0
        assert check["megabytes"] == round((export / "1x8" / "onnx" / check["file"]).stat().st_size / 1e6, 2)
    card = (export / "1x8" / "README.md").read_text()
    assert "onnx/model.onnx" in card and "onnx/model_int8.onnx" in card and "- onnx\n" in card
    assert "'find: what is an espresso?'" in card  # the query's prompt, which no other program adds


@pytest.mark.launch
def test_int8_alone(model: Path, copied: None, tmp_path: Path) -> None:
    folder = export_sizes(model, tmp_path / "export", sizes=["1x8"], onnx=["int8"])["1x8"]
    assert [path.name for path in (folder / "onnx").iterdir()] == ["model_int8.onnx"]
    assert list(json.loads((tmp_path / "export" / "export.json").read_text())["onnx"]["1x8"]) == ["int8"]


@pytest.mark.launch
def test_another_graph_is_refused(model: Path, copied: None, tmp_path: Path) -> None:
    """Negative control of the check that is part of the export: the graph of weights that were a little others."""
    shutil.copytree(model, tmp_path / "model")
    heads = load_file(model / HEADS_FILE)
    save_heads({**heads, "1.bias": heads["1.bias"] * 1.001}, tmp_path / "model")
    with pytest.raises(ModelError, match="the ONNX graph of 1x8 differs from its weights by"):
        export_sizes(tmp_path / "model", tmp_path / "export", sizes=["1x8"], onnx=["float32"])
    assert not (tmp_path / "export").exists()


def test_a_missing_package_is_named_before_anything_is_done(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ConfigError, match="--onnx needs the package onnxscript"):
        export_sizes(model, tmp_path / "export", onnx=["float32"])
    assert not (tmp_path / "export").exists()


@pytest.mark.launch
def test_threads_are_as_before(export: Path) -> None:
    before = torch.get_num_threads()
    with one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before
    one = {name: torch.ones(1, 3, dtype=torch.int64) for name in ("input_ids", "attention_mask")}
    assert onnx_runner(export / "1x8" / "onnx" / "model.onnx")(one).shape == (1, 8)

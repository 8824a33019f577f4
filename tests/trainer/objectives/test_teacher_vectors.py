"""A teacher's vectors, stored once and found by the text, whatever the teacher's tokenizer and width."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from data import prepare
from data.collate import PairBatch, TextBatch, Texts, text_hashes
from data.ground.errors import ConfigError, DataError
from data.shards.reader import ShardFolder
from data.stream import Sample
from tests.trainer.objectives.conftest import TEACHER_WIDTH as WIDTH
from tests.trainer.support import loaded, recipe_values
from trainer import teacher_vectors
from trainer.evaluation.encoding.encode import embedder_of
from trainer.evaluation.subject import load_model
from trainer.objectives.guide import Guide
from trainer.objectives.registry import maker_of
from trainer.objectives.teacher import LiveTeacher, StoredTeacher, load_teacher
from trainer.objectives.vector_store import STORE_FILE, VectorStore


@pytest.fixture(scope="module")
def corpus(
    tmp_path_factory: pytest.TempPathFactory, docstrings: list[str], tiny_tokenizer: Any
) -> tuple[Path, Path, list[str]]:
    """A file of texts, shards of it, and the texts."""
    folder = tmp_path_factory.mktemp("corpus")
    texts = docstrings[:90]
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tiny_tokenizer.save_pretrained(folder / "tokenizer")
    command = ["documents", str(folder / "texts.jsonl"), "--tokenizer", str(folder / "tokenizer")]
    prepare.run([*command, "--output", str(folder / "shards")])
    return folder / "texts.jsonl", folder / "shards", texts


def values_of(shards: Path, teacher: Path, store: Path) -> dict[str, dict[str, Any]]:
    return recipe_values(
        shards,
        model={"ladder": [[1, 8], [2, 16], [3, 48]]},
        objective={"name": "distill"},
        teacher={"model": str(teacher), "vectors": "stored", "store": str(store)},
    )


@pytest.fixture
def stored(
    tmp_path: Path, corpus: tuple[Path, Path, list[str]], teacher_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Any, VectorStore]:
    """A recipe, which stands in written.toml, and its store, in blocks of 32 texts."""
    file, shards, _ = corpus
    monkeypatch.setattr(teacher_vectors, "BLOCK_TEXTS", 32)
    recipe = loaded(values_of(shards, teacher_folder, tmp_path / "store"), tmp_path)
    teacher_vectors.main(["--config", str(tmp_path / "written.toml"), "--texts", str(file)])
    fingerprint = ShardFolder(shards).manifest.tokenizer["fingerprint"]
    return recipe, VectorStore.open(tmp_path / "store", tokenizer=fingerprint)


def batch_of(recipe: Any, source: ShardFolder, payloads: list[Any]) -> Any:
    """These samples of a folder as training gets them."""
    return maker_of(recipe).collator(recipe, [source])(
        [Sample(0, i, 0, i, payload) for i, payload in enumerate(payloads)]
    )


def test_vectors_are_the_teachers_of_the_text_itself(
    stored: tuple[Any, VectorStore], corpus: tuple[Path, Path, list[str]], teacher_folder: Path, tiny_tokenizer: Any
) -> None:
    _, store = stored
    assert len(store.blocks) == 3 and store.width == WIDTH
    texts = corpus[2]
    encoder, tokenizer, settings = load_model(teacher_folder)
    assert settings is not None
    full = settings.sizes.full
    expected = embedder_of(encoder, tokenizer, [full], device="cpu")(
        texts, similarity="cosine", max_length=40, prompt="text: "
    )[full]
    ids = [np.asarray(tiny_tokenizer.backend_tokenizer.encode(t, add_special_tokens=False).ids) for t in texts]
    keys = torch.from_numpy(text_hashes([each[:30] for each in ids]))
    found = store.find(keys).numpy()
    assert np.abs(found - expected).max() < 1e-3
    assert np.abs(store.find(keys.flip(0)).numpy() - expected).max() > 0.05  # negative control


def test_a_batch_of_the_shards_finds_its_vectors(
    stored: tuple[Any, VectorStore], corpus: tuple[Path, Path, list[str]]
) -> None:
    recipe, store = stored
    sources = [ShardFolder(corpus[1])]
    teacher = load_teacher(recipe, sources)
    assert isinstance(teacher, StoredTeacher) and teacher.width == WIDTH
    batch = batch_of(recipe, sources[0], sources[0].documents(range(12)))
    vectors = teacher.vectors(batch, device=torch.device("cpu"), heartbeat=lambda phase: None)
    torch.testing.assert_close(vectors.norm(dim=1), torch.ones(12))
    torch.testing.assert_close(vectors, store.find(batch.hashes), rtol=0, atol=2e-3)


def test_texts_that_are_not_there_are_refused(stored: tuple[Any, VectorStore]) -> None:
    _, store = stored
    with pytest.raises(ConfigError, match="has no vector of 1 of a batch's 2 texts"):
        store.find(torch.tensor([int(store.keys[0]), 12345]))


def test_a_killed_command_goes_on_and_another_is_refused(
    tmp_path: Path, stored: tuple[Any, VectorStore], corpus: tuple[Path, Path, list[str]], guide_folder: Path
) -> None:
    _, store = stored
    folder = store.folder
    before = {path.name: path.stat().st_mtime_ns for path in folder.glob("*.npy")}
    record = json.loads((folder / STORE_FILE).read_text())
    (folder / STORE_FILE).write_text(json.dumps(record | {"blocks": None}))
    (folder / "000001.keys.npy").unlink()
    fingerprint = record["tokenizer"]
    with pytest.raises(ConfigError, match="is unfinished"):
        VectorStore.open(folder, tokenizer=fingerprint)
    command = ["--config", str(tmp_path / "written.toml"), "--texts", str(corpus[0])]
    teacher_vectors.main(command)
    after = {path.name: path.stat().st_mtime_ns for path in folder.glob("*.npy")}
    assert {name for name in after if after[name] != before[name]} == {"000001.keys.npy", "000001.f16.npy"}
    assert torch.equal(
        VectorStore.open(folder, tokenizer=fingerprint).find(torch.from_numpy(store.keys)),
        store.find(torch.from_numpy(store.keys)),
    )
    with pytest.raises(ConfigError, match="another teacher and width"):
        teacher_vectors.main([*command, f"--teacher.model={guide_folder}"])
    with pytest.raises(ConfigError, match="by another tokenizer"):
        VectorStore.open(folder, tokenizer="f" * 64)


def test_a_recipe_says_how_a_teacher_pools_whose_folder_does_not(
    tmp_path: Path, corpus: tuple[Path, Path, list[str]], teacher_folder: Path
) -> None:
    file, shards, _ = corpus
    shutil.copytree(teacher_folder, tmp_path / "bare")
    (tmp_path / "bare" / "barista.json").unlink()
    values = values_of(shards, tmp_path / "bare", tmp_path / "store")
    command = ["--config", str(tmp_path / "written.toml"), "--texts", str(file)]
    loaded(values, tmp_path)
    with pytest.raises(ConfigError, match=r"does not say how it pools; set teacher\.pooling"):
        teacher_vectors.main(command)
    values["teacher"]["pooling"] = "mean"
    recipe = loaded(values, tmp_path)
    teacher_vectors.main(command)
    assert isinstance(load_teacher(recipe, [ShardFolder(shards)]), StoredTeacher)


def test_a_recipe_without_a_store_is_refused(
    tmp_path: Path, corpus: tuple[Path, Path, list[str]], teacher_folder: Path
) -> None:
    values = values_of(corpus[1], teacher_folder, tmp_path / "store")
    values["teacher"] = {"model": str(teacher_folder)}
    loaded(values, tmp_path)
    with pytest.raises(ConfigError, match="stores no vectors"):
        teacher_vectors.main(["--config", str(tmp_path / "written.toml"), "--texts", str(corpus[0])])


@pytest.mark.parametrize(
    ("option", "value", "reads"), [("--text-split", "lines", ".txt files"), ("--text-column", "text", "inputs with")]
)
def test_what_no_texts_read_is_refused(
    tmp_path: Path, corpus: tuple[Path, Path, list[str]], teacher_folder: Path, option: str, value: str, reads: str
) -> None:
    file, shards, texts = corpus
    if option == "--text-column":
        file = tmp_path / "texts.txt"
        file.write_text("\n\n".join(texts))
    loaded(values_of(shards, teacher_folder, tmp_path / "store"), tmp_path)
    command = ["--config", str(tmp_path / "written.toml"), "--texts", str(file), option, value]
    with pytest.raises(DataError, match=f"no input reads {option}, which is for {reads}"):
        teacher_vectors.main(command)
    assert not (tmp_path / "store").exists()


def test_pairs_have_their_queries_and_passages_in_the_store(
    tmp_path: Path, teacher_folder: Path, docstrings: list[str], tiny_tokenizer: Any
) -> None:
    rows = [{"query": f"what is {n}", "positive": docstrings[n]} for n in range(20)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tiny_tokenizer.save_pretrained(tmp_path / "tokenizer")
    command = ["tuples", str(tmp_path / "pairs.jsonl"), "--tokenizer", str(tmp_path / "tokenizer")]
    prepare.run([*command, "--output", str(tmp_path / "shards")])
    values = values_of(tmp_path / "shards", teacher_folder, tmp_path / "store")
    values["objective"] = {"name": "contrastive"}
    values["data"] = {"shards": [str(tmp_path / "shards")], "query_max_length": 16, "passage_max_length": 32}
    recipe = loaded(values, tmp_path)
    command = ["--config", str(tmp_path / "written.toml"), "--texts", str(tmp_path / "pairs.jsonl")]
    for option in (["--text-column", "positive"], ["--text-split", "lines"]):
        with pytest.raises(DataError, match=f"no input reads {option[0]}, which is for documents"):
            teacher_vectors.main([*command, *option])
    teacher_vectors.main(command)
    sources = [ShardFolder(tmp_path / "shards")]
    batch = batch_of(recipe, sources[0], sources[0].tuples(range(20)))
    teacher = load_teacher(recipe, sources)
    assert teacher is not None
    vectors = teacher.vectors(batch, device=torch.device("cpu"), heartbeat=lambda phase: None)
    assert vectors.shape == (40, WIDTH)


@pytest.mark.parametrize(("similarity", "length"), [("dot", 1.0), ("cosine", 5.0)])
def test_a_live_teachers_vectors_have_unit_length(similarity: str, length: float) -> None:
    """Those of a teacher of dot products are scaled; one of cosines gives unit vectors itself, and is left alone."""
    frozen = SimpleNamespace(
        similarity=similarity,
        passage_max_length=4,
        closing=1,
        embed=lambda texts, **_: torch.tensor([[3.0, 4.0]]).repeat(len(texts), 1),
        vectors=lambda queries, passages, **_: (torch.tensor([[0.0, 5.0]]), torch.tensor([[5.0, 0.0], [3.0, 4.0]])),
    )
    teacher = LiveTeacher(cast(Guide, frozen))
    texts = Texts(torch.arange(5, dtype=torch.int32), torch.tensor([0, 3, 5]))
    batch = TextBatch(texts, torch.arange(2), torch.arange(2))
    pairs = Mock(spec=PairBatch, queries=texts, passages=texts)
    for each, count in ((batch, 2), (pairs, 3)):
        vectors = teacher.vectors(each, device=torch.device("cpu"), heartbeat=lambda _: None)
        assert torch.allclose(vectors.norm(dim=1), torch.full((count,), length))


def test_texts_that_were_prepared_with_prompts_are_refused(
    tmp_path: Path, teacher_folder: Path, docstrings: list[str], tiny_tokenizer_path: Path
) -> None:
    rows = [{"query": f"what is {n}", "positive": docstrings[n]} for n in range(20)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["tuples", str(tmp_path / "pairs.jsonl"), "--tokenizer", str(tiny_tokenizer_path)]
    prepare.run([*command, "--output", str(tmp_path / "shards"), "--query-prompt", "query: "])
    values = values_of(tmp_path / "shards", teacher_folder, tmp_path / "store")
    values["objective"] = {"name": "contrastive"}
    values["data"] = {"shards": [str(tmp_path / "shards")], "query_max_length": 16, "passage_max_length": 32}
    loaded(values, tmp_path)
    with pytest.raises(ConfigError, match="were prepared with prompts, and stored vectors are found by a text without"):
        teacher_vectors.main(["--config", str(tmp_path / "written.toml"), "--texts", str(tmp_path / "pairs.jsonl")])
    assert not (tmp_path / "store").exists()

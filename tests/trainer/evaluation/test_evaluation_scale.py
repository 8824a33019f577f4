"""Evaluation of large corpora: the store of vectors, ranks, going on after a kill, FAISS, and marks in the table."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import sparse
from torch import nn
from transformers import PreTrainedTokenizerFast

from data.ground.errors import ConfigError, DataError, OtherFormat
from data.ground.ports import free_port
from models.encoder import build_masked_lm, load_encoder
from models.settings import EmbeddingSettings
from models.sizes import Body, Size
from tests import ROOT
from tests.beir import write_beir
from tests.launcher import run_process
from tests.ranks import run_ranks
from trainer import evaluate
from trainer.evaluation.encoding.encode import embedder_of
from trainer.evaluation.results.comparison import verdicts_of
from trainer.evaluation.results.raw import BM25, read_raw
from trainer.evaluation.results.significance import holm, paired_t_test
from trainer.evaluation.search import vectors
from trainer.evaluation.search.vectors import cut, open_store, read_store, texts_digest, weights_digest, widest
from trainer.evaluation.subject import untrained_encoder
from trainer.evaluation.tasks.retrieval import Run, TopK, as_run, load_beir, read_run, score_run, search
from trainer.resilience.stopping import STOPPED_CODE

pytestmark = pytest.mark.usefixtures("undrawn")

LADDER = [(1, 8), (2, 16), (3, 32)]
CONFIG = {
    "model_type": "bert",
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}


def save_model(folder: Path, tokenizer: PreTrainedTokenizerFast, *, seed: int, similarity: str = "cosine") -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build_masked_lm(CONFIG, vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    settings = EmbeddingSettings(pooling="mean", ladder=tuple(LADDER), query_max_length=24, passage_max_length=48)
    dataclasses.replace(settings, similarity=similarity).save(folder)
    return folder


@pytest.fixture(scope="module")
def model_folder(tiny_tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), tiny_tokenizer, seed=3)


@pytest.fixture(scope="module")
def tasks(docstrings: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two corpora in which docstrings are found by their first words, and some graded pairs."""
    folder = tmp_path_factory.mktemp("tasks")
    texts = [text for text in docstrings if len(text.split()) > 12]
    for name, part in (("first", texts[:90]), ("second", texts[90:150])):
        documents = [{"title": "", "text": text} for text in part]
        documents.append({"_id": "copy", "title": "", "text": part[0]})  # ties with d0 everywhere
        write_beir(folder / name, documents, [" ".join(text.split()[:6]) for text in part[:20]])
    sts = folder / "pairs.tsv"
    words = [" ".join(text.split()[:8]) for text in texts[:40]]
    # Never a text with itself: rounding orders equal cosines.
    sts.write_text("".join(f"{i % 5}\t{words[i]}\t{words[(i * (i % 5) + 7) % 40]}\n" for i in range(40)))
    return ["--beir", str(folder / "first"), str(folder / "second"), "--sts", str(sts)]


def command(model: Path, tasks: Sequence[str], *options: object) -> list[str]:
    return ["sizes", "--model", str(model), *tasks, "--device", "cpu", "--top-k", "30", *map(str, options)]


def values_of(folder: Path) -> dict[tuple[str, ...], float]:
    content = json.loads((folder / "results.json").read_text())
    values = {(r["method"], r["task"], r["size"], r["metric"]): r["value"] for r in content["records"]}
    for r in content.get("across_depths", {"records": []})["records"]:
        values[r["method"], r["task"], r["size"], r["metric"], r["document_size"]] = r["value"]
    return values


def files_of(folder: Path) -> dict[str, bytes]:
    """What an evaluation left, but for its figures."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


# The store


def fingerprints(**changes: str) -> dict[str, str]:
    return {"weights": "w", "texts": "t", **changes}


def test_a_size_is_cut_from_what_is_kept(
    model_folder: Path, tiny_tokenizer: PreTrainedTokenizerFast, docstrings: list[str], tmp_path: Path
) -> None:
    """Cut, then of unit length, through float16; normalising first would give other vectors."""
    grid = [Size(layers, dim) for layers in (1, 3) for dim in (8, 20)] + [Size(2, 32)]
    assert widest(grid) == [Size(1, 20), Size(2, 32), Size(3, 20)]
    texts = docstrings[:23]
    encoder = load_encoder(model_folder)

    def run(sizes: Sequence[Size], similarity: str) -> dict[Size, np.ndarray]:
        encode = embedder_of(encoder, tiny_tokenizer, sizes, device="cpu")
        return encode(texts, similarity=similarity, max_length=32)

    store = open_store(tmp_path / "s", rows=23, rows_per_block=10, sizes=grid, fingerprints=fingerprints())
    assert store.num_blocks == 3 and store.missing() == [0, 1, 2] and store.sizes == widest(grid)
    whole = run(store.sizes, "dot")
    for block in (2, 0):
        rows = store.rows_of(block)
        store.write(block, {size: vectors[rows.start : rows.stop] for size, vectors in whole.items()})
    assert store.missing() == [1]
    assert (tmp_path / "s" / "000000.f16").stat().st_size == 2 * 10 * (20 + 32 + 20) + 32  # and a checksum
    for similarity in ("dot", "cosine"):
        for size, expected in run(grid, similarity).items():
            kept = cut(store.read(2, size.body), size, similarity=similarity).numpy()
            np.testing.assert_allclose(kept, expected[20:], rtol=1e-3, atol=1e-3)
            assert kept.dtype == np.float32 and (kept != expected[20:]).any()  # float16 rounds
    # Negative control: normalised before it is cut, a vector is shorter than one.
    wrong = run([Size(1, 20)], "cosine")[Size(1, 20)][:, :8]
    assert np.abs(np.linalg.norm(wrong, axis=1) - 1).min() > 1e-2


def test_stores_of_other_things_are_refused(tmp_path: Path) -> None:
    sizes = [Size(1, 4), Size(2, 8)]
    make = partial(open_store, tmp_path / "s", rows=5, rows_per_block=2)
    store = make(sizes=sizes, fingerprints=fingerprints())
    assert make(sizes=sizes, fingerprints=fingerprints()) == store
    assert make(sizes=[Size(2, 3)], fingerprints=fingerprints()) == store  # narrower: a prefix of what is there
    with pytest.raises(ConfigError, match="vectors of other weights; remove it, or give another"):
        make(sizes=sizes, fingerprints=fingerprints(weights="v"))
    with pytest.raises(ConfigError, match="vectors of other texts"):
        make(sizes=sizes, fingerprints=fingerprints(texts="v"))
    for missing in (Size(1, 5), Size(3, 4)):
        with pytest.raises(ConfigError, match=f"no vectors of size {missing}"):
            make(sizes=[*sizes, missing], fingerprints=fingerprints())
    with pytest.raises(ConfigError, match=r"000001\.f16 is gone"):
        store.read(1, Body(1))
    full = {Size(1, 4): np.ones((2, 4), np.float32), Size(2, 8): np.ones((2, 8), np.float32)}
    store.write(1, full)
    with pytest.raises(ConfigError, match="float16 ends at 65504"):
        store.write(0, {**full, Size(2, 8): np.full((2, 8), 7e4, np.float32)})
    assert store.missing() == [0, 2]
    (tmp_path / "s" / "000001.f16").write_bytes(b"short")
    with pytest.raises(ConfigError, match="has 5 bytes in place of 80"):
        store.read(1, Body(2))
    store.write(1, full)
    assert (store.read(1, Body(2)) == 1).all()
    blocks = bytearray((tmp_path / "s" / "000001.f16").read_bytes())
    blocks[7] ^= 1
    (tmp_path / "s" / "000001.f16").write_bytes(blocks)
    with pytest.raises(ConfigError, match=r"000001\.f16 is damaged"):
        read_store(tmp_path / "s").read(1, Body(1))
    # Stores of the first format have no checksums, and are read as they are.
    description = tmp_path / "s" / "store.json"
    whole = description.read_text()
    description.write_text(whole.replace('"format": 2', '"format": 1'))
    (tmp_path / "s" / "000001.f16").write_bytes(blocks[:-32])
    assert (read_store(tmp_path / "s").read(1, Body(2)) == 1).all()
    description.write_text(whole.replace('"format": 2', '"format": 3'))
    with pytest.raises(OtherFormat, match="format 3"):
        read_store(tmp_path / "s")
    (tmp_path / "s" / "store.json").write_text("{}")
    with pytest.raises(DataError, match=r"store\.json is damaged"):
        make(sizes=sizes, fingerprints=fingerprints())
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"something else \(thesis\.txt\)"):
        open_store(tmp_path / "else", rows=5, rows_per_block=2, sizes=sizes, fingerprints={})
    huge = partial(open_store, tmp_path / "huge", rows=10**12, rows_per_block=2, fingerprints={})
    with pytest.raises(ConfigError, match="--vectors needs"):
        huge(sizes=sizes)
    assert not (tmp_path / "huge").exists()


def test_fingerprints_tell_weights_and_texts_apart(model_folder: Path) -> None:
    encoder = load_encoder(model_folder)
    digest = weights_digest(encoder)
    assert weights_digest(load_encoder(model_folder)) == digest
    assert weights_digest(untrained_encoder(encoder)) != digest
    assert weights_digest(load_encoder(model_folder, pooling="cls")) != digest
    with torch.no_grad():
        next(iter(encoder.parameters())).view(-1)[0] += 1e-6
    assert weights_digest(encoder) != digest
    # A pooler takes no part in an embedding, and comes fresh with every load where a checkpoint has none.
    plain = weights_digest(encoder)
    encoder.backbone.pooler = nn.Linear(2, 2)
    assert weights_digest(encoder) == plain
    assert texts_digest(["ab", "c"]) != texts_digest(["a", "bc"]) != texts_digest(["bc", "a"])


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
def test_vectors_from_the_store_score_as_ever(
    similarity: str, tiny_tokenizer: PreTrainedTokenizerFast, tasks: list[str], tmp_path: Path
) -> None:
    """The same scores as without a store within 1e-3, whether the vectors are made or found there."""
    model = save_model(tmp_path / "model", tiny_tokenizer, seed=3, similarity=similarity)
    run = partial(command, model, tasks, "--random-init", "--save-runs")
    assert evaluate.main(run("--output", tmp_path / "plain")) == 0
    stored = ["--vectors", tmp_path / "vectors", "--passages-per-block", 16]
    assert evaluate.main(run("--output", tmp_path / "made", *stored)) == 0
    files = sorted((tmp_path / "vectors").glob("*/*.f16"))
    assert len(files) == 2 * (6 + 4)  # 91 and 61 documents, of two methods
    before = [path.stat().st_mtime_ns for path in files]
    assert evaluate.main(run("--output", tmp_path / "found", *stored)) == 0
    assert [path.stat().st_mtime_ns for path in files] == before
    assert files_of(tmp_path / "found") == files_of(tmp_path / "made")
    plain, made = values_of(tmp_path / "plain"), values_of(tmp_path / "made")
    assert plain.keys() == made.keys()
    # Twenty queries, and documents a random model hardly tells apart: one that moves a place is a good part of 0.01.
    for key, value in plain.items():
        assert made[key] == pytest.approx(value, abs=0.03), key
    # Negative control: one size is not another, and one method not the other, to these measures.
    smallest, largest = (
        np.array([value for (method, _, of, *_), value in plain.items() if method == "trained" and of == size])
        for size in ("1x8", "3x32")
    )
    assert np.abs(smallest - largest).max() > 0.05
    runs = {path.name: read_run(path) for path in (tmp_path / "plain" / "runs").iterdir()}
    assert len(runs) == 2 * 2 * 3

    def largest_difference(one: Run, other: Run) -> float:
        pairs = [(query, doc) for query in one for doc in one[query] if doc in other[query]]
        assert len(pairs) > 300
        largest = max(abs(score) for scores in one.values() for score in scores.values())
        return max(abs(one[query][doc] - other[query][doc]) for query, doc in pairs) / largest

    for name, run_of_size in runs.items():
        assert largest_difference(run_of_size, read_run(tmp_path / "made" / "runs" / name)) < 1e-3, name
    assert largest_difference(runs["first_trained_1x8.trec"], runs["first_trained_2x16.trec"]) > 1e-2


def test_float16_leaves_rankings_of_real_texts_as_they_are(shared_data: Path, tmp_path: Path) -> None:
    """SciFact as random projections of its weighted words: a model that finds something, without training one."""
    data = load_beir(shared_data / "retrieval" / "scifact")
    words = [re.findall(r"[a-z0-9]+", text.lower()) for text in (*data.documents, *data.queries)]
    vocabulary = {word: i for i, word in enumerate(dict.fromkeys(word for text in words for word in text))}
    tallies = [(row, vocabulary[word], n) for row, text in enumerate(words) for word, n in Counter(text).items()]
    lines, columns, times = np.array(tallies).T
    counts = sparse.csr_matrix((1 + np.log(times), (lines, columns)), dtype=np.float32)
    weights = np.log(len(words) / np.asarray((counts > 0).sum(0))[0])
    projection = np.random.default_rng(7).normal(size=(len(vocabulary), 512)) * weights[:, None]
    whole = (counts @ projection).astype(np.float32)
    documents, queries = whole[: len(data.documents)], whole[len(data.documents) :]
    sizes = [Size(1, dim) for dim in (32, 128, 512)]
    store = open_store(tmp_path, rows=len(documents), rows_per_block=2000, sizes=sizes, fingerprints={})
    for block in range(store.num_blocks):
        rows = store.rows_of(block)
        store.write(block, {Size(1, 512): documents[rows.start : rows.stop]})

    def scores(size: Size, read: Callable[[int], np.ndarray]) -> dict[str, float]:
        found = TopK(len(queries), 100)
        for block in range(store.num_blocks):
            rows = cut(read(block), size, similarity="cosine")
            found.add_block(cut(queries, size, similarity="cosine"), rows, start=store.rows_of(block).start)
        return score_run(as_run(data, *found.result()), data.qrels).means

    def exact(block: int) -> np.ndarray:
        rows = store.rows_of(block)
        return documents[rows.start : rows.stop]

    expected = [scores(size, exact) for size in sizes]
    for size, means in zip(sizes, expected):
        kept = scores(size, lambda block: store.read(block, Body(1)))
        for metric, value in means.items():
            assert kept[metric] == pytest.approx(value, abs=1e-3), (size, metric)
    assert expected[-1]["ndcg_cut_10"] > 0.4  # it does find something

    # Negative control: three significant bits in place of eleven are seen.
    def coarse(block: int) -> np.ndarray:
        mantissa, exponent = np.frexp(exact(block))
        return np.ldexp(np.round(mantissa * 8) / 8, exponent)

    assert scores(sizes[-1], coarse)["ndcg_cut_10"] != pytest.approx(expected[-1]["ndcg_cut_10"], abs=1e-3)


def test_stale_vectors_stop_the_command(
    model_folder: Path,
    tiny_tokenizer: PreTrainedTokenizerFast,
    tasks: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    stored = ["--vectors", tmp_path / "vectors"]
    assert evaluate.main(command(model_folder, tasks[:2], *stored)) == 0
    other = save_model(tmp_path / "other", tiny_tokenizer, seed=4)
    for model, options, reason in (
        (other, [], "other weights"),
        (model_folder, ["--max-length", 20], "other settings"),
        (model_folder, ["--dtype", "bfloat16"], "other settings"),
        (model_folder, ["--max-documents", 50], "other texts"),
        (model_folder, ["--sizes", "2x32"], "no vectors of size 2x32"),
    ):
        assert evaluate.main(command(model, tasks[:2], *stored, *options)) == 2
        message = capsys.readouterr().err.splitlines()[-1]
        assert message.startswith("error: ") and reason in message, (message, reason)
    assert evaluate.main(command(model_folder, tasks[:2], *stored, "--similarity", "dot")) == 0  # of queries alone


# Ranks


@pytest.mark.launcher
def test_two_ranks_give_what_one_process_gives(
    model_folder: Path, tiny_tokenizer: PreTrainedTokenizerFast, tasks: list[str], tmp_path: Path
) -> None:
    """With a store, and without under torchrun: the same blocks give the same vectors, so nothing differs at all."""

    def run(name: str, *options: object) -> list[str]:
        blocks = ["--passages-per-block", 13, "--bm25", "--random-init", "--across-depths"]
        return command(model_folder, tasks, "--output", tmp_path / name, *blocks, *options)

    stores = [["--vectors", tmp_path / name] for name in ("alone_vectors", "ranks_vectors")]
    assert evaluate.main(run("alone_stored", *stores[0])) == 0
    run_ranks("trainer.evaluate", *run("ranks_stored", *stores[1]), ranks=2)
    assert evaluate.main(run("alone")) == 0
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    torchrun += ["--master-port", str(free_port()), "-m", "trainer.evaluate"]
    done = run_process([*torchrun, *run("ranks")])
    assert done.stdout == (tmp_path / "ranks" / "table.md").read_text()  # one rank speaks
    for name in ("stored", ""):
        one, two = (values_of(tmp_path / f"{who}_{name}".rstrip("_")) for who in ("alone", "ranks"))
        assert one.keys() == two.keys()
        for key, value in one.items():
            assert two[key] == pytest.approx(value, abs=1e-6), key
    # Negative control: half of the corpus is not all of it.
    half = values_of(tmp_path / "alone")
    assert evaluate.main(command(model_folder, tasks, "--output", tmp_path / "half", "--max-documents", 45)) == 0
    assert values_of(tmp_path / "half")["trained", "first", "3x32", "map"] != half["trained", "first", "3x32", "map"]


def test_other_commands_refuse_ranks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert evaluate.main(["--local_rank=0", "score", "--qrels", "q", "--run", "r"]) == 2
    assert "only `sizes` shares its work among ranks" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert evaluate.main(["score", "--qrels", "q", "--run", "r"]) == 2
    assert "ranks" not in capsys.readouterr().err


# Going on


def die(arguments: Sequence[str], kill_at: str) -> None:
    environment = {**os.environ, "KILL_AT": kill_at}
    words = [sys.executable, "-m", "tests.trainer.evaluation_worker", *arguments]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]


@pytest.mark.processes
def test_a_killed_evaluation_goes_on(
    model_folder: Path,
    tiny_tokenizer: PreTrainedTokenizerFast,
    tasks: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def run(name: str) -> list[str]:
        options = ["--passages-per-block", 16, "--vectors", tmp_path / f"{name}_vectors", "--bm25"]
        return command(model_folder, tasks, "--output", tmp_path / name, *options)

    assert evaluate.main(run("whole")) == 0
    die(run("killed"), "block:9")  # the pairs and the first corpus are done, and two blocks of the second
    assert not (tmp_path / "killed" / "results.json").exists()
    kept = sorted(path.name for path in (tmp_path / "killed" / "parts").glob("*.json"))
    assert kept == ["trained_first.json", "trained_pairs.json"]
    second = tmp_path / "killed_vectors" / "second_trained"
    assert sorted(path.name for path in second.iterdir()) == [
        "000000.f16",
        "000001.f16",
        "000002.f16.tmp",
        "store.json",
    ]
    die(run("killed"), "task:1")  # of those kept by this start: the second corpus
    written: list[str] = []
    write = vectors.write_atomically

    def write_and_tell(path: Path, content: bytes) -> None:
        written.append(path.name)
        write(path, content)

    monkeypatch.setattr(vectors, "write_atomically", write_and_tell)
    caplog.set_level("INFO")
    assert evaluate.main(run("killed")) == 0
    assert not written
    said = [record.message for record in caplog.records]
    assert all(f"trained, {name}: done before" in said for name in ("pairs", "first", "second"))
    assert not any("BM25, first: done" in line for line in said)
    assert files_of(tmp_path / "killed") == files_of(tmp_path / "whole")
    killed, whole = (sorted(path.name for path in (tmp_path / name).iterdir()) for name in ("killed", "whole"))
    assert killed == whole


@pytest.mark.processes
def test_what_was_kept_of_another_model_is_made_again(
    model_folder: Path,
    tiny_tokenizer: PreTrainedTokenizerFast,
    tasks: list[str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Negative control of going on: other weights take nothing of what is there."""
    other = save_model(tmp_path / "other", tiny_tokenizer, seed=4)
    assert evaluate.main(command(other, tasks, "--output", tmp_path / "whole")) == 0
    die(command(model_folder, tasks, "--output", tmp_path / "killed"), "task:2")
    caplog.set_level("INFO")
    assert evaluate.main(command(other, tasks, "--output", tmp_path / "killed")) == 0
    assert sum("of another evaluation and made again" in record.message for record in caplog.records) == 2
    assert files_of(tmp_path / "killed") == files_of(tmp_path / "whole")


def test_asked_to_stop_it_keeps_what_is_encoded(
    model_folder: Path,
    tasks: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    stop = tmp_path / "stop"
    monkeypatch.setenv("BARISTA_STOP_FILE", str(stop))
    write = vectors.write_atomically

    def write_and_ask(path: Path, content: bytes) -> None:
        write(path, content)
        if path.name == "000002.f16":
            stop.touch()

    monkeypatch.setattr(vectors, "write_atomically", write_and_ask)
    run = partial(command, model_folder, tasks[:2], "--passages-per-block", 16)
    stored = ["--vectors", tmp_path / "vectors", "--output", tmp_path / "stopped"]
    assert evaluate.main(run(*stored)) == STOPPED_CODE
    message = capsys.readouterr().err.splitlines()[-1]
    assert message == "stopped (stop file); the same command goes on with what --output and --vectors kept"
    assert len(list((tmp_path / "vectors").glob("*/*.f16"))) == 3
    stop.unlink()
    monkeypatch.setattr(vectors, "write_atomically", write)
    assert evaluate.main(run(*stored)) == 0
    assert evaluate.main(run("--vectors", tmp_path / "again", "--output", tmp_path / "whole")) == 0
    assert files_of(tmp_path / "stopped") == files_of(tmp_path / "whole")


@pytest.mark.launcher
def test_one_rank_is_asked_to_stop_and_all_do(
    model_folder: Path, tasks: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other rank encodes what is its own first; nobody hangs, and the launcher tells code 75."""

    def run(name: str) -> list[str]:
        options = ["--passages-per-block", 16, "--vectors", tmp_path / f"{name}_vectors"]
        return command(model_folder, tasks[:2], "--output", tmp_path / name, *options)

    monkeypatch.setenv("KILL_AT", "stop:1")
    done = run_ranks("tests.trainer.evaluation_worker", *run("ranks"), ranks=2, expect=STOPPED_CODE)
    assert "stopped (asked); the same command goes on" in done.stderr
    blocks = sorted(path.name for path in (tmp_path / "ranks_vectors").glob("*/*.f16"))
    assert blocks == ["000000.f16", "000001.f16", "000003.f16", "000005.f16"]
    assert evaluate.main(run("ranks")) == 0
    assert evaluate.main(run("alone")) == 0
    assert files_of(tmp_path / "ranks") == files_of(tmp_path / "alone")


# Marks


def test_the_table_says_what_is_significant(
    model_folder: Path,
    tiny_tokenizer: PreTrainedTokenizerFast,
    tasks: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("bm25s", reason="needs the package bm25s")
    assert evaluate.main(command(model_folder, tasks, "--bm25", "--random-init", "--output", tmp_path / "one")) == 0
    raw = read_raw(tmp_path / "one" / "raw.jsonl.gz")
    by_hand = {
        size: paired_t_test(
            raw.values["first", "trained", *size]["ndcg_cut_10"], raw.values["first", BM25, 0, 0]["ndcg_cut_10"]
        )
        for size in LADDER
    }
    verdicts = {(v.method, v.task, v.layers, v.dim): v for v in verdicts_of(raw)}
    for size, test in by_hand.items():
        verdict = verdicts["trained", "first", *size]
        assert (verdict.baseline, verdict.metric, verdict.p) == (BM25, "ndcg_cut_10", test.p)
        assert verdict.mark == ("‡" if test.p < 0.05 and test.difference < 0 else "")
    assert any(verdict.mark == "‡" for verdict in verdicts.values())  # a tiny model against BM25 on its own words
    assert ("untrained", "first", 1, 8) in verdicts  # BM25 is everybody's baseline
    sts = verdicts["trained", "pairs", 3, 32]
    assert sts.baseline == "the untrained model" and 0 < sts.p < 1
    corrected = [v.p for v in verdicts_of(raw, corrected=True) if v.task == "first"]
    assert corrected == holm([v.p for v in verdicts.values() if v.task == "first"])
    table = (tmp_path / "one" / "table.md").read_text()
    assert "p: nDCG@10 against BM25; † significantly better" in table
    rows = [line.split("|") for line in table.split("### second")[0].splitlines() if line.startswith("| trained")]
    assert [row[-2].strip() for row in rows[-3:]] == [
        "<0.0001" if test.p < 0.0001 else f"{test.p:.4f}" for test in by_hand.values()
    ]
    content = json.loads((tmp_path / "one" / "results.json").read_text())["significance"]
    assert len(content) == len(verdicts) and {"method", "task", "p", "mark", "baseline"} <= content[0].keys()

    # Against another evaluation: its own comparison's p, and 1 against itself.
    other = save_model(tmp_path / "other", tiny_tokenizer, seed=4)
    assert evaluate.main(command(other, tasks, "--against", tmp_path / "one", "--output", tmp_path / "two")) == 0
    content = json.loads((tmp_path / "two" / "results.json").read_text())["significance"]
    mine = {(entry["task"], entry["layers"]): entry["p"] for entry in content}
    test = paired_t_test(
        read_raw(tmp_path / "two" / "raw.jsonl.gz").values["first", "trained", 3, 32]["ndcg_cut_10"],
        raw.values["first", "trained", 3, 32]["ndcg_cut_10"],
    )
    assert mine["first", 3] == test.p and len(mine) == 9
    assert all(v.p == 1 and not v.mark for v in verdicts_of(raw, against=raw))
    capsys.readouterr()
    assert evaluate.main(command(other, tasks, "--against", tmp_path / "one", "--max-documents", 40)) == 0
    assert "against" in capsys.readouterr().out
    assert evaluate.main(command(other, [*tasks[:2]], "--against", tmp_path / "none")) == 2
    renamed = tmp_path / "third"
    renamed.symlink_to(Path(tasks[1]))
    assert evaluate.main(command(other, ["--beir", str(renamed)], "--against", tmp_path / "one")) == 2
    assert "has none of these tasks" in capsys.readouterr().err
    (tmp_path / "more").mkdir()
    fewer = tmp_path / "more" / "first"
    fewer.mkdir()
    for name in ("corpus.jsonl", "queries.jsonl"):
        (fewer / name).symlink_to(Path(tasks[1]) / name)
    (fewer / "qrels").mkdir()
    lines = (Path(tasks[1]) / "qrels" / "test.tsv").read_text().splitlines()[:-1]
    (fewer / "qrels" / "test.tsv").write_text("\n".join(lines) + "\n")
    assert evaluate.main(command(other, ["--beir", str(fewer)], "--against", tmp_path / "one")) == 2
    assert "other items of first" in capsys.readouterr().err


def test_positions_do_not_depend_on_the_order_of_blocks() -> None:
    rng = np.random.default_rng(6)
    queries = torch.from_numpy(rng.integers(-2, 3, (8, 4)).astype(np.float32))
    documents = torch.from_numpy(rng.integers(-2, 3, (100, 4)).astype(np.float32))
    orders: list[Callable[[list[int]], list[int]]] = [list, lambda starts: starts[::-1]]
    results = []
    for order in orders:
        found = TopK(8, 9)
        for start in order([0, 30, 60, 90]):
            found.add_block(queries, documents[start : start + 30], start=start)
        results.append(found.result())
    np.testing.assert_array_equal(results[0][1], results[1][1])
    np.testing.assert_array_equal(results[0][1], search(queries.numpy(), documents.numpy(), top_k=9)[1])


def test_the_corpora_hold_ties(tasks: list[str]) -> None:
    """What the tests of ranks rely on: two documents with the same text."""
    data = load_beir(Path(tasks[1]))
    assert len(set(data.documents)) == len(data.documents) - 1

"""The prepare command end to end: shards read back to the same texts, kills, refusals."""

from __future__ import annotations

import copy
import io
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow
import pyarrow.parquet
import pytest

from data.corpora.by_id import read_beir_texts
from data.corpora.options import DOCUMENT_READERS, TUPLE_READERS, SourceOptions
from data.ground.errors import CommandEnd, DataError
from data.ground.options import Stated
from data.inputs import SCRATCH
from data.preparation import convert, output_folder, workers
from data.prepare import _parser, main
from data.shards.reader import ShardFolder
from tests import ROOT
from tests.beir import write_beir
from tests.data.reading import read_tuples
from tests.run_folder import contents

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# A machine under load may take long to start Python; a test that waits longer than this hangs.
PATIENCE_SECONDS = 120


@pytest.fixture(scope="module")
def corpus(docstrings: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six files of real documents."""
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(6):
        lines = [json.dumps({"text": text}) + "\n" for text in docstrings[number::6]]
        (folder / f"{number}.jsonl").write_text("".join(lines))
    return folder


@pytest.fixture(scope="module")
def long_corpus(docstrings: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Enough files that the command is still at work when a signal comes, even late."""
    folder = tmp_path_factory.mktemp("long_corpus")
    text = "".join(json.dumps({"text": text}) + "\n" for text in docstrings)
    for number in range(16):
        (folder / f"{number:02d}.jsonl").write_text(text)
    return folder


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def documents(corpus: Path, output: Path, tokenizer: Path, *options: object, processes: int = 1) -> int:
    fixed = ("--output", output, "--tokenizer", tokenizer, "--chunk-samples", 64, "--processes", processes)
    return run("documents", corpus, *fixed, *options)


def words(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Run a command that must refuse: exit code 2 and one sentence."""
    capsys.readouterr()
    assert run(*arguments) == 2
    captured = capsys.readouterr()
    error = captured.err.strip().splitlines()[-1]
    assert error.startswith("error: ") and captured.err.count("error: ") == 1
    assert "Traceback" not in captured.err and not captured.out
    return error


@pytest.fixture(scope="module")
def prepared(corpus: Path, tiny_tokenizer_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("prepared") / "shards"
    assert documents(corpus, output, tiny_tokenizer_path) == 0
    return output


def test_documents_read_back_as_the_same_texts(
    prepared: Path, docstrings: list[str], tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    folder = ShardFolder(prepared)
    folder.check()
    assert folder.kind == "documents" and folder.num_samples == len(docstrings)
    found = sorted(folder.document(index).tolist() for index in range(folder.num_samples))
    assert found == sorted(words(tiny_tokenizer, text) for text in docstrings)
    # Shuffled within a unit: the first file's documents come first, in another order.
    first = [words(tiny_tokenizer, text) for text in docstrings[0::6]]
    read = [folder.document(index).tolist() for index in range(len(first))]
    assert read != first and sorted(read) == sorted(first)
    decoded = tiny_tokenizer.decode(folder.document(0))
    assert decoded in {tiny_tokenizer.decode(words(tiny_tokenizer, text)) for text in docstrings[0::6]}
    assert not (prepared / SCRATCH).exists()


@pytest.mark.processes
def test_processes_do_not_change_a_byte(
    prepared: Path, corpus: Path, tiny_tokenizer_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert documents(corpus, tmp_path / "two", tiny_tokenizer_path, processes=2) == 0
    assert "3,000 documents" in capsys.readouterr().out
    assert contents(tmp_path / "two") == contents(prepared)
    assert documents(corpus, tmp_path / "seed", tiny_tokenizer_path, "--seed", 1) == 0
    assert contents(tmp_path / "seed")["shard-00000-000.tar"] != contents(prepared)["shard-00000-000.tar"]


@pytest.mark.processes
def test_kill_and_rerun_is_byte_identical_and_leaves_no_process(
    prepared: Path, corpus: Path, tiny_tokenizer_path: Path, tmp_path: Path
) -> None:
    output, _ = stopped(corpus, tmp_path, tiny_tokenizer_path, "--chunk-samples", "64", number=signal.SIGKILL)
    assert list((output / "units").glob("*.json"))
    assert not (output / "manifest.json").exists()
    assert documents(corpus, output, tiny_tokenizer_path) == 0
    assert contents(output) == contents(prepared)


def stopped(corpus: Path, folder: Path, tokenizer: Path, *options: str, number: signal.Signals) -> tuple[Path, bytes]:
    """Send a signal to the command when its first unit is finished; its output folder and what it still said."""
    for attempt in range(10):
        output = folder / f"out-{attempt}"
        command = [sys.executable, "-m", "data.prepare", "documents", corpus, "--output", output, *options]
        command += ["--tokenizer", tokenizer, "--processes", "2", "--verbose"]
        arguments = [str(part) for part in command]
        with subprocess.Popen(
            arguments, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        ) as process:
            assert process.stderr is not None
            for line in process.stderr:
                if b"finished" in line:
                    break
            # Ctrl-C reaches the whole group, a scheduler's TERM or a kill often only the command itself.
            if number == signal.SIGINT:
                os.killpg(process.pid, number)
            else:
                process.send_signal(number)
            # The workers hold the pipe too: it ends only when they are gone.
            _, rest = process.communicate(timeout=PATIENCE_SECONDS)
        # On a busy machine the command may be done before the signal comes.
        if process.returncode or not (output / "manifest.json").exists():
            assert process.returncode == {signal.SIGKILL: -9, signal.SIGINT: 130, signal.SIGTERM: 143}[number]
            return output, rest
    raise AssertionError("the command ended before every signal")


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupts_end_every_process(
    long_corpus: Path, tiny_tokenizer_path: Path, tmp_path: Path, number: signal.Signals
) -> None:
    _, rest = stopped(long_corpus, tmp_path, tiny_tokenizer_path, number=number)
    assert b"Traceback" not in rest, rest.decode()


def test_a_finished_folder_is_left_alone_and_others_are_refused(
    prepared: Path,
    corpus: Path,
    tiny_tokenizer_path: Path,
    tiny_tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = contents(prepared)
    assert documents(corpus, prepared, tiny_tokenizer_path) == 0
    assert "already complete" in capsys.readouterr().out
    fixed = ["documents", corpus, "--output", prepared, "--tokenizer"]
    assert "other chunk samples, seed" in refusal(capsys, *fixed, tiny_tokenizer_path, "--seed", 5)
    assert "other inputs" in refusal(
        capsys, "documents", corpus / "0.jsonl", *fixed[2:], tiny_tokenizer_path, "--chunk-samples", 64
    )
    other = copy.deepcopy(tiny_tokenizer)
    other.add_tokens(["starbucks"])
    other.save_pretrained(tmp_path / "other")
    assert "other tokenizer" in refusal(capsys, *fixed, tmp_path / "other", "--chunk-samples", 64)
    assert contents(prepared) == before

    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("mine")
    fixed[3] = tmp_path / "mine"
    assert "holds other files (thesis.txt)" in refusal(capsys, *fixed, tiny_tokenizer_path)
    assert contents(tmp_path / "mine") == {"thesis.txt": b"mine"}


@pytest.mark.processes
def test_user_errors_get_one_sentence_and_leave_nothing(
    corpus: Path, tiny_tokenizer_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"

    def told(*arguments: object) -> str:
        sentence = refusal(capsys, *arguments, "--output", output, "--tokenizer", tiny_tokenizer_path)
        assert not output.exists()
        return sentence

    assert "absent.jsonl" in told("documents", tmp_path / "absent.jsonl")
    assert "nor a data set that can be reached" in told("documents", "HuggingFaceFW/fineweb", "--subset", "sample-10BT")
    table = tmp_path / "a.tsv"
    table.write_text("query\tpositive\nq\tp\n")
    assert "'body'" in told("documents", table, "--text-column", "body")
    assert "'passage'" in told("tuples", table, "--positive-column", "passage")
    assert "seed -1" in told("documents", corpus, "--seed", -1)
    assert "--shard-megabytes" in told("documents", corpus, "--shard-megabytes", 0)
    missing = ["documents", corpus, "--output", output, "--tokenizer", tmp_path / "absent"]
    assert "tokenizer folder" in refusal(capsys, *missing)
    assert not output.exists()
    with pytest.raises(SystemExit) as caught:
        run("documents", corpus, "--output", output, "--tokenizer", tiny_tokenizer_path, "--shard-size", 1)
    assert caught.value.code == 2
    bad = documents_with_an_empty_text(tmp_path)
    for processes in (1, 2):
        arguments = ["documents", bad, corpus / "1.jsonl", "--processes", processes, "--output", output]
        sentence = refusal(capsys, *arguments, "--tokenizer", tiny_tokenizer_path)
        assert "bad.jsonl:2: text" in sentence and "--skip-empty" in sentence


def documents_with_an_empty_text(folder: Path) -> Path:
    path = folder / "bad.jsonl"
    path.write_text('{"text": "good"}\n{"text": ""}\n')
    return path


def test_a_corrected_command_goes_on_in_the_same_folder(
    tiny_tokenizer_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = documents_with_an_empty_text(tmp_path)
    fixed = ["documents", bad, "--output", tmp_path / "out", "--tokenizer", tiny_tokenizer_path, "--processes", 1]
    refusal(capsys, *fixed)
    assert run(*fixed, "--skip-empty") == 0
    assert ShardFolder(tmp_path / "out").num_samples == 1
    # Control characters are text to a reader and nothing to the tokenizer.
    bad.write_text('{"text": "good"}\n{"text": "\\u0001"}\n')
    fixed[3] = tmp_path / "again"
    assert "bad.jsonl:2 holds a text without any token" in refusal(capsys, *fixed)
    bad.write_text('{"text": "good"}\n{"text": "better"}\n')
    assert run(*fixed) == 0
    assert ShardFolder(tmp_path / "again").num_samples == 2


def test_limit_and_hub_streams(
    corpus: Path, tiny_tokenizer_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert documents(corpus, tmp_path / "limited", tiny_tokenizer_path, "--limit", 520) == 0
    limited = ShardFolder(tmp_path / "limited")
    assert limited.num_samples == 520
    assert len(limited.manifest.shards) == 2

    import datasets

    from data.corpora import rows

    load = datasets.load_dataset

    def local(name: str, subset: str | None, *, split: str, streaming: bool) -> Any:
        files = {"train": [str(corpus / f"{number}.jsonl") for number in range(2)]}
        return load("json", data_files=files, split=split, streaming=True, cache_dir=str(tmp_path / "cache"))

    monkeypatch.setattr(rows, "require_hub", lambda hint: None)
    monkeypatch.setattr(datasets, "load_dataset", local)
    assert documents(Path("someone"), tmp_path / "hub", tiny_tokenizer_path) == 0
    hub = ShardFolder(tmp_path / "hub")
    assert hub.num_samples == 1000 and len(hub.manifest.shards) == 2


def test_blocks_bound_memory_and_lose_nothing(
    prepared: Path, corpus: Path, tiny_tokenizer_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert, "BLOCK_TOKENS", 5000)
    monkeypatch.setattr(convert, "BATCH_CHARACTERS", 3000)
    assert documents(corpus, tmp_path / "out", tiny_tokenizer_path) == 0
    whole, blocks = ShardFolder(prepared), ShardFolder(tmp_path / "out")
    assert blocks.num_tokens == whole.num_tokens
    assert sorted(map(bytes, blocks.documents(range(500)))) == sorted(map(bytes, whole.documents(range(500))))
    assert list(map(bytes, blocks.documents(range(500)))) != list(map(bytes, whole.documents(range(500))))


def test_tuples_read_back_as_the_same_texts(
    tiny_tokenizer_path: Path, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    rows: list[dict[str, Any]] = [
        {"query": "how to sort", "positives": ["sort a list", "order it"], "negatives": ["delete", "open a file"]},
        {"query": "how to open", "positives": ["open a file"], "negatives": []},
        {"query": "how to copy", "positives": ["copy a list"], "negatives": ["sort a list"]},
    ]
    source = tmp_path / "tuples.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    fixed = ["--output", tmp_path / "out", "--tokenizer", tiny_tokenizer_path, "--processes", 1]
    assert run("tuples", source, *fixed, "--query-prompt", "query: ", "--passage-prompt", "passage: ") == 0
    folder = ShardFolder(tmp_path / "out")
    folder.check()
    assert folder.kind == "tuples" and not folder.graded
    found = [folder.tuple(index) for index in range(3)]
    for row in rows:
        query = words(tiny_tokenizer, "query: " + row["query"])
        (match,) = [item for item in found if item.query.tolist() == query]
        expected = [words(tiny_tokenizer, "passage: " + text) for text in (*row["positives"], *row["negatives"])]
        assert [passage.tolist() for passage in match.passages] == expected
        assert match.num_positives == len(row["positives"]) and match.score is None


def test_real_tuples(
    shared_data: Path, tiny_tokenizer_path: Path, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    fixed = ["--tokenizer", tiny_tokenizer_path, "--processes", 2, "--limit", 300]
    sts = shared_data / "sts" / "sts12.tsv"
    assert run("tuples", sts, "--format", "sts", "--output", tmp_path / "sts", *fixed) == 0
    graded = ShardFolder(tmp_path / "sts")
    scores = sorted(graded.tuple(index).score or 0.0 for index in range(300))
    assert graded.graded and scores == pytest.approx(
        sorted(float(line.split("\t")[0]) for line in sts.read_text("utf-8").splitlines()[:300])
    )
    scifact = shared_data / "retrieval" / "scifact"
    assert run("tuples", scifact, "--output", tmp_path / "scifact", *fixed) == 0
    found = {tuple(item.query.tolist()): item for item in map(ShardFolder(tmp_path / "scifact").tuple, range(300))}
    corpus = read_beir_texts(scifact / "corpus.jsonl")
    (tmp_path / "scratch").mkdir()
    options = {"source": SourceOptions(limit=300), "scratch": tmp_path / "scratch"}
    for record in list(read_tuples([str(scifact)], **options))[::25]:
        assert record["positives"][0] in corpus.values()
        item = found[tuple(words(tiny_tokenizer, record["query"]))]
        assert item.passages[0].tolist() == words(tiny_tokenizer, record["positives"][0])
    nli = shared_data / "nli" / "cad_snli_triplets.tsv"
    assert run("tuples", nli, "--format", "nli", "--output", tmp_path / "nli", *fixed) == 0
    assert all(len(item.passages) == 2 for item in map(ShardFolder(tmp_path / "nli").tuple, range(300)))


def test_tokenizer_command(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoTokenizer

    fixed = ["tokenizer", corpus, "--output", tmp_path / "tokenizer", "--vocab-size", 600, "--max-length", 128]
    assert run(*fixed) == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    assert tokenizer.is_fast and len(tokenizer) == 600 and tokenizer.model_max_length == 128
    specials = ["pad", "unk", "cls", "sep", "mask"]
    assert [getattr(tokenizer, f"{name}_token_id") for name in specials] == [0, 1, 2, 3, 4]
    ids = tokenizer("Return the LIST")["input_ids"]
    assert (ids[0], ids[-1]) == (2, 3) and tokenizer.decode(ids[1:-1]) == "return the list"
    assert tokenizer("a", "b")["token_type_ids"] == [0, 0, 0, 1, 1]
    assert run(*fixed) == 0 and "already complete" in capsys.readouterr().out
    assert "other vocab size" in refusal(capsys, *fixed[:4], "--vocab-size", 700, "--max-length", 128)
    assert "--vocab-size 5 is not possible" in refusal(
        capsys, *fixed[:2], "--output", tmp_path / "b", "--vocab-size", 5
    )
    assert run(*fixed[:2], "--output", tmp_path / "cased", "--keep-case", "--vocab-size", 600) == 0
    cased = AutoTokenizer.from_pretrained(tmp_path / "cased")
    assert cased.decode(cased("Return the LIST")["input_ids"][1:-1]) == "Return the LIST"


def test_installed_docs_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fixed = ["installed-docs", "--output", tmp_path / "docs", "--package", "numpy", "--processes", 1]
    assert run(*fixed, "--held-out", 20, "--bodies", 60) == 0
    assert "20 held-out queries over 60 bodies" in capsys.readouterr().out
    lines = {name: data.count(b"\n") for name, data in contents(tmp_path / "docs").items()}
    assert lines["held-out/corpus.jsonl"] == 60 and lines["held-out/queries.jsonl"] == 20
    assert lines["held-out/qrels/test.tsv"] == 21 and lines["pairs.jsonl"] > 500
    assert run(*fixed, "--held-out", 20, "--bodies", 60) == 0
    assert "already complete" in capsys.readouterr().out
    assert "other held out" in refusal(capsys, *fixed, "--held-out", 30, "--bodies", 60)
    absent = ["installed-docs", "--output", tmp_path / "absent", "--package", "no_such_package"]
    assert "is not installed" in refusal(capsys, *absent)


@pytest.mark.parametrize("command", ["documents", "tuples", "tokenizer", "installed-docs"])
def test_help_names_every_option_once(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run(command, "--help")
    assert caught.value.code == 0
    options = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("  --")]
    assert "--output" in options and len(set(options)) == len(options)


# ------------------------------------------------------------------------------- what may befall a folder or its inputs


@pytest.fixture
def small(tiny_tokenizer_path: Path, tmp_path: Path) -> list[object]:
    """A command over two small files of 100 documents each, into `out`."""
    for name in ("a", "b"):
        rows = [json.dumps({"text": f"text {name} {number}"}) + "\n" for number in range(100)]
        (tmp_path / "in").mkdir(exist_ok=True)
        (tmp_path / "in" / f"{name}.jsonl").write_text("".join(rows))
    fixed: list[object] = ["documents", tmp_path / "in", "--tokenizer", tiny_tokenizer_path, "--processes", 1]
    return [*fixed, "--output", tmp_path / "out"]


def test_a_change_of_the_same_length_is_another_input(
    small: list[object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where its time is put back, and not where only its time has changed."""
    assert run(*small) == 0
    path = tmp_path / "in" / "a.jsonl"
    before, content = path.stat(), path.read_text()
    path.write_text(content.replace("text a 50", "text a 05"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size and path.stat().st_mtime_ns == before.st_mtime_ns
    assert "made with other inputs" in refusal(capsys, *small)
    path.write_text(content)
    os.utime(path, ns=(0, 0))
    assert run(*small) == 0 and "already complete" in capsys.readouterr().out


def test_inputs_are_hashed_again_only_where_they_look_different(
    small: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[str] = []
    original = output_folder.sha256_of
    monkeypatch.setattr(output_folder, "sha256_of", lambda path: (hashed.append(Path(path).name), original(path))[1])
    assert run(*small) == run(*small) == 0
    assert sorted(hashed) == ["a.jsonl", "b.jsonl"]
    os.utime(tmp_path / "in" / "b.jsonl")
    (tmp_path / "out" / output_folder.SEEN).write_text((tmp_path / "out" / output_folder.SEEN).read_text())
    assert run(*small) == 0
    assert sorted(hashed) == ["a.jsonl", "b.jsonl", "b.jsonl"]
    for damaged in (b"\xff", b"[]", b'{"x": 1}', b"[" * 100_000):
        (tmp_path / "out" / output_folder.SEEN).write_bytes(damaged)
        assert run(*small) == 0, "the file is no more than a shortcut"


def test_an_input_that_changes_while_it_is_read_is_refused(
    small: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = workers.write_split

    def write_split(job: convert.Job, report: convert.Report) -> None:
        path = tmp_path / "in" / "a.jsonl"
        path.write_text(path.read_text().replace("text a 50", "text a 05"))
        original(job, report)

    monkeypatch.setattr(workers, "write_split", write_split)
    assert "a.jsonl was changed while it was read" in refusal(capsys, *small)
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_other_rows_to_skip_under_the_same_name(
    tiny_tokenizer_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.tsv").write_text("query\tpositive\n" + "".join(f"q {i}\tp {i}\n" for i in range(5)))
    (tmp_path / "skip").write_text("1\n")
    fixed = ["tuples", tmp_path / "a.tsv", "--skip-rows", tmp_path / "skip", "--tokenizer", tiny_tokenizer_path]
    fixed += ["--output", tmp_path / "out"]
    assert run(*fixed) == 0
    (tmp_path / "skip").write_text("2\n")
    assert "other skipped rows" in refusal(capsys, *fixed)


def test_a_passage_that_changes_is_another_input(
    tiny_tokenizer_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, rows in (
        ("corpus.jsonl", [{"_id": f"d{number}", "text": f"text {number}"} for number in range(9)]),
        ("queries.jsonl", [{"_id": "q0", "text": "query"}]),
    ):
        (tmp_path / "beir" / "qrels").mkdir(parents=True, exist_ok=True)
        (tmp_path / "beir" / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "beir" / "qrels" / "train.tsv").write_text("query-id\tcorpus-id\tscore\nq0\td4\t1\n")
    fixed = ["tuples", tmp_path / "beir", "--tokenizer", tiny_tokenizer_path, "--output", tmp_path / "out"]
    assert run(*fixed) == run(*fixed) == 0
    path = tmp_path / "beir" / "corpus.jsonl"
    path.write_text(path.read_text().replace("text 4", "text 3"))
    assert "other inputs" in refusal(capsys, *fixed)


@pytest.mark.parametrize(
    "lost", ["shard", "cut shard", "marker", "cut marker", "manifest", "cut manifest", "tokenizer"]
)
def test_what_a_finished_folder_lost_is_written_again(small: list[object], tmp_path: Path, lost: str) -> None:
    assert run(*small) == 0
    output = tmp_path / "out"
    before = contents(output)
    part = lost.split()[-1]
    path = output / {"shard": "shard-00001-000.tar", "marker": "units/00001.json", "manifest": "manifest.json"}.get(
        part, "tokenizer/tokenizer.json"
    )
    if lost.startswith("cut"):
        path.write_bytes(path.read_bytes()[:100])
    else:
        path.unlink()
    assert run(*small) == 0
    assert contents(output) == before


def test_the_output_may_lie_below_the_input(
    small: list[object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "in" / "out"
    small[-1] = output
    assert run(*small) == 0
    assert run(*small) == 0 and "already complete" in capsys.readouterr().out
    # Killed, it goes on; and another command does not take the first one's files for text.
    (output / "manifest.json").unlink()
    (output / ".plan").mkdir()
    (output / ".plan" / "tokenizer.json").write_text("{}")
    assert run(*small) == 0
    assert run(*small[:-1], tmp_path / "other") == 0
    assert ShardFolder(tmp_path / "other").num_samples == 200


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--limit", 0], "--limit 0 is not possible"),
        (["--limit", 10**30], "--limit 1000000000000000000000000000000 is not possible"),
        (["--shard-megabytes", 10**30], "--shard-megabytes"),
        (["--chunk-samples", -1], "--chunk-samples -1"),
        (["--processes", 0], "--processes 0"),
        (["--longest-line", 0], "--longest-line 0"),
        (["--text-column", "\udcff"], "is not UTF-8"),
        (["--text-column", "a\0"], "holds a NUL"),
        (["--output", "x\0y"], "holds a NUL"),
        (["--output", "\udcff"], "is not UTF-8"),
        (["--output", "x" * 300], "File name too long"),
        (["--output", "/dev/null/out"], "Not a directory"),
        (["--tokenizer", "x" * 300], "error: "),
    ],
)
def test_odd_options_are_refused_and_leave_nothing(
    small: list[object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[object],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    before = contents(tmp_path)
    assert said in refusal(capsys, *small, *options)
    assert contents(tmp_path) == before and not (tmp_path / "out").exists()


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    """A folder with an input of each kind, by which the tests below name them."""
    folder = tmp_path / "inputs"
    folder.mkdir()
    row = {"text": "the cat", "query": "the cat", "positive": "the dog"}
    (folder / "a.jsonl").write_text(json.dumps(row) + "\n")
    (folder / "a.tsv").write_text("\t".join(row) + "\n" + "\t".join(row.values()) + "\n")
    (folder / "plain.tsv").write_text("the cat\tthe dog\n")
    (folder / "a.txt").write_text("the cat\n")
    pyarrow.parquet.write_table(pyarrow.table({name: [value] for name, value in row.items()}), folder / "a.parquet")
    with tarfile.open(folder / "a.tar", "w") as tar:
        for name, value in row.items():
            member = tarfile.TarInfo(f"0.{name}.txt" if name != "text" else "0.txt")
            member.size = len(value)
            tar.addfile(member, io.BytesIO(value.encode()))
    write_beir(folder / "beir", ["the dog"], ["the cat"], split="train")
    return folder


HUB = "someone/texts"  # a data set that these tests never reach


@pytest.mark.parametrize(
    ("command", "names", "options", "reads"),
    [
        *(
            ("documents", names, options, reads)
            for options, reads, names in (
                (["--split", "test"], "data sets of the Hugging Face hub", ["a.jsonl", "a.tsv", "a.txt", "a.parquet"]),
                (["--split", "train"], "data sets of the Hugging Face hub", ["a.jsonl"]),  # the default
                (["--subset", "de"], "data sets of the Hugging Face hub", ["a.tar"]),
                (["--text-column", "text"], "inputs with columns", ["a.txt"]),
                (["--text-split", "lines"], ".txt files", ["a.jsonl", "a.tsv", "a.parquet", "a.tar"]),
                (["--text-split", "lines"], ".txt files", [HUB]),
                (["--longest-line", 9], "jsonl, TSV and .txt files and tars", ["a.parquet"]),
            )
        ),
        ("tokenizer", ["a.jsonl"], ["--split", "test"], "data sets of the Hugging Face hub"),
        ("tokenizer", ["a.txt"], ["--text-column", "text"], "inputs with columns"),
        ("tokenizer", ["a.jsonl"], ["--text-split", "file"], ".txt files"),
        *(
            ("tuples", names, options, reads)
            for options, reads, names in (
                (["--split", "test"], "hub, MS MARCO folders and BEIR folders", ["a.jsonl", "a.tsv", "a.parquet"]),
                (["--subset", "de"], "data sets of the Hugging Face hub", ["a.jsonl", "beir"]),
                (["--max-negatives", 3], "MS MARCO and BEIR folders", ["a.jsonl", "a.tar", HUB]),
                (["--max-negatives", 50], "MS MARCO and BEIR folders", ["a.jsonl"]),  # the default
                (["--columns", "query,positive"], "TSV files", ["a.jsonl", "a.parquet", "beir"]),
                (["--query-column", "query"], "inputs with columns", ["beir"]),
                (["--positive-column", "positive"], "inputs with columns", ["beir"]),
                (["--negative-column", "negative"], "inputs with columns", ["beir"]),
                (["--score-column", "score"], "inputs with columns", ["beir"]),
                (["--weight-column", "weight"], "inputs with columns", ["beir"]),
                (["--longest-line", 9], "jsonl and TSV files, tars", ["a.parquet"]),
            )
        ),
    ],
)
def test_options_that_no_input_reads_are_refused(
    inputs: Path,
    tiny_tokenizer_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    names: list[str],
    options: list[object],
    reads: str,
) -> None:
    """Before the passages of a folder are indexed, and before a data set of the hub is asked for."""
    monkeypatch.chdir(inputs)
    monkeypatch.setattr("data.corpora.rows.require_hub", lambda hint: pytest.fail("the hub was asked"))
    monkeypatch.setattr("data.corpora.by_id.TextIndex.build", lambda corpus: pytest.fail("passages were indexed"))
    tokenizer = [] if command == "tokenizer" else ["--tokenizer", tiny_tokenizer_path]
    before = contents(inputs)
    sentence = refusal(capsys, command, *names, *options, "--output", "out", *tokenizer)
    assert sentence.startswith(f"error: no input reads {options[0]}, which is for ")
    assert reads in sentence and sentence.endswith(f"; leave {options[0]} out")
    assert contents(inputs) == before and not (inputs / "out").exists()


@pytest.mark.parametrize(
    ("command", "names", "options"),
    [
        ("documents", ["a.txt", "a.jsonl"], ["--text-column", "text", "--text-split", "lines"]),
        *(("documents", [name], ["--text-column", "text"]) for name in ("a.jsonl", "a.tsv", "a.parquet", "a.tar")),
        *(("documents", [name], ["--longest-line", 9]) for name in ("a.jsonl", "a.tsv", "a.txt", "a.tar")),
        ("documents", ["a.parquet", "a.txt"], ["--longest-line", 9]),
        ("tuples", ["a.jsonl", "beir"], ["--split", "train", "--max-negatives", 3, "--positive-column", "positive"]),
        ("tuples", ["plain.tsv", "a.jsonl"], ["--columns", "query,positive"]),
        *(
            ("tuples", [name], ["--query-column", "query", "--positive-column", "positive"])
            for name in ("a.jsonl", "a.tsv", "a.parquet", "a.tar")
        ),
        *(("tuples", [name], ["--longest-line", 9]) for name in ("a.jsonl", "a.tsv", "a.tar", "beir")),
    ],
)
def test_options_that_an_input_reads_are_taken(
    inputs: Path,
    tiny_tokenizer_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    names: list[str],
    options: list[object],
) -> None:
    monkeypatch.chdir(inputs)
    fixed = ["--output", "out", "--tokenizer", tiny_tokenizer_path, "--processes", 1]
    assert run(command, *names, *options, *fixed) == 0
    assert ShardFolder(inputs / "out").num_samples == len(names)


@pytest.mark.parametrize(
    ("command", "readers"),
    [("documents", DOCUMENT_READERS), ("tokenizer", DOCUMENT_READERS), ("tuples", TUPLE_READERS)],
)
def test_what_some_inputs_do_not_read_is_known_to_be_stated(command: str, readers: dict[str, object]) -> None:
    """A default must not be refused, and what is not known to be stated would never be."""
    (commands,) = (each for each in _parser()._actions if each.dest == "command")
    options = {each.dest: each for each in commands.choices[command]._actions}
    limited = {name for name in readers if name in options}
    assert {name for name, option in options.items() if isinstance(option, Stated)} == limited


@pytest.mark.parametrize("format", ["nli", "sts"])
def test_formats_of_files_are_refused_for_the_hub(
    tiny_tokenizer_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    format: str,
) -> None:
    monkeypatch.setattr("data.corpora.rows.require_hub", lambda hint: pytest.fail("the hub was asked"))
    words = ["tuples", HUB, "--format", format, "--output", tmp_path / "out", "--tokenizer", tiny_tokenizer_path]
    assert f"{HUB} is not a .tsv file, which format {format} needs" in refusal(capsys, *words)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--vocab-size", 10**25], "--vocab-size"),
        (["--min-frequency", -5], "--min-frequency -5"),
        (["--max-length", -5], "--max-length -5"),
    ],
)
def test_tokenizers_that_cannot_be_trained(
    small: list[object], tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[object], said: str
) -> None:
    assert said in refusal(capsys, "tokenizer", small[1], "--output", tmp_path / "out", *options)
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_of_no_words_is_not_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "\\u0001"}\n')
    sentence = refusal(capsys, "tokenizer", tmp_path / "a.jsonl", "--output", tmp_path / "out")
    assert "hold no word" in sentence and not (tmp_path / "out").exists()


class Collected:
    """The worker's end of a pipe: one job, then the end."""

    def __init__(self, job: object) -> None:
        self.jobs = [job]
        self.sent: list[object] = []

    def recv(self) -> object:
        if not self.jobs:
            raise EOFError
        return self.jobs.pop()

    def send(self, message: object) -> None:
        self.sent.append(message)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (DataError("a.jsonl:1 is bad"), "a.jsonl:1 is bad"),
        (PermissionError(13, "Permission denied", "a.jsonl"), "a.jsonl: Permission denied"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (MemoryError(), "the memory does not suffice"),
        (KeyError("a fault of ours"), None),
    ],
)
def test_workers_hand_on_sentences(monkeypatch: pytest.MonkeyPatch, error: Exception, said: str | None) -> None:
    def write_split(job: object, report: object) -> None:
        raise error

    monkeypatch.setattr(workers, "write_split", write_split)
    monkeypatch.setattr(workers, "signal_at_parents_death", lambda *arguments, **options: None)
    connection = Collected("job")
    workers.work(connection, os.getpid())  # type: ignore[arg-type]
    (message,) = connection.sent
    if said is None:
        assert isinstance(message, str) and "Traceback" in message
    else:
        assert isinstance(message, CommandEnd) and said in str(message)


PUBLISHED_SETS = re.findall(
    r"^\| `(\S+)` \| ([\w, ]+) \| `(--query-column .*)` \|$", (ROOT / "docs/static.md").read_text("utf-8"), re.M
)


@pytest.mark.parametrize(("folder", "columns", "arguments"), PUBLISHED_SETS, ids=[row[0] for row in PUBLISHED_SETS])
def test_the_columns_of_the_published_static_sets(
    folder: str,
    columns: str,
    arguments: str,
    tiny_tokenizer_path: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The arguments of docs/static.md read a row with the columns of the set's card, and are needed for it."""
    names = columns.split(", ")
    (tmp_path / "set.jsonl").write_text(json.dumps({name: f"the text of {name}" for name in names}) + "\n")
    fixed = ("tuples", tmp_path / "set.jsonl", "--tokenizer", tiny_tokenizer_path, "--output", tmp_path / "shards")
    assert "column" in refusal(capsys, *fixed)
    assert run(*fixed, *arguments.split()) == 0
    sample = ShardFolder(tmp_path / "shards").tuple(0)
    assert len(sample.passages) == len(names) - 1


def test_the_sets_whose_columns_are_named() -> None:
    assert {row[0] for row in PUBLISHED_SETS} == {"s2orc_title_abstract", "swim_ir_en", "negation", "parallel_*"}

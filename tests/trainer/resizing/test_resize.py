"""trainer.resize: a model of sentence-transformers becomes one of every size, by the command as a user types it."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from data.corpora.read import read_split
from data.ground.errors import ConfigError, DataError
from data.shards.reader import ShardFolder
from models.encoder import build_masked_lm, load_encoder
from models.heads import HEADS_FILE
from models.settings import EmbeddingSettings
from models.sizes import STARBUCKS_LADDER, Ladder, Size
from tests.ranks import run_ranks
from tests.run_folder import steps_of
from trainer import resize
from trainer.config.load import load_recipe
from trainer.evaluation.subject import load_model
from trainer.evaluation.tasks.read import digest_of_tasks
from trainer.resizing import resize as resizing
from trainer.resizing.resize import START, TRAINING, Resize, agreement, propose_ladder
from trainer.resizing.table import AS_IT_IS, CLOSED_FORM, RESIZED, Row

SIZES = "1x8,2x16,3x24"
FAST = ("--train.steps=4", "--train.global_batch_size=8", "--train.micro_batch_size=4", "--log.tensorboard=false")


@pytest.fixture(scope="module")
def model_folder(bert_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of sentence-transformers: mean pooling, unit vectors, a length of 48."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Normalize, Pooling, Transformer

    folder = tmp_path_factory.mktemp("model")
    modules = [Transformer(str(bert_folder), max_seq_length=48), Pooling(24, pooling_mode="mean"), Normalize()]
    SentenceTransformer(modules=modules, device="cpu").save(str(folder))
    return folder


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory, docstrings: list[str]) -> Path:
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    rows = [{"query": text.split(". ")[0], "positive": text} for text in docstrings[200:260]]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def resized(launcher: None, model_folder: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A RUN of two ranks."""
    run = tmp_path_factory.mktemp("resized") / "run"
    command = [str(model_folder), "--texts", str(texts), "--output", str(run), "--sizes", SIZES, *FAST]
    run_ranks("trainer.resize", *command, ranks=2)
    return run


@pytest.fixture(scope="module")
def heads_alone(launcher: None, model_folder: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("heads") / "run"
    command = [str(model_folder), "--texts", str(texts), "--output", str(run), "--sizes", SIZES, "--train", "heads"]
    command += ["--max-length", "16"]
    run_ranks("trainer.resize", *command, *FAST, ranks=2)
    return run


@pytest.fixture(scope="module")
def with_pairs(
    launcher: None,
    model_folder: Path,
    texts: Path,
    pairs: Path,
    guide_folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """Another model teaches, by stored vectors, and pairs follow."""
    run = tmp_path_factory.mktemp("pairs_too") / "run"
    command = [str(model_folder), "--texts", str(texts), "--output", str(run), "--sizes", "1x8,2x16,3x24"]
    run_ranks("trainer.resize", *command, "--teacher", str(guide_folder), "--pairs", str(pairs), *FAST, ranks=2)
    return run


@pytest.mark.launch
def test_the_command_leaves_a_model_of_every_size_and_a_table(resized: Path) -> None:
    records = json.loads((resized / "resize.json").read_text())["records"]
    assert [(r["task"], r["layers"], r["dim"]) for r in records] == [
        ("agreement", 1, 8),
        ("agreement", 2, 16),
        ("agreement", 3, 24),
    ]
    for record in records:
        assert all(-1 <= record[method] <= 1 for method in (AS_IT_IS, CLOSED_FORM, RESIZED))
        assert record["milliseconds"] > 0 and record["megabytes"] > 0
    assert records[-1][AS_IT_IS] == records[-1][CLOSED_FORM] == pytest.approx(1.0, abs=1e-6)
    assert records[0][CLOSED_FORM] != records[0][AS_IT_IS]  # what the maps are worth: test_closed_form
    assert "| 1x8 " in (resized / "table.md").read_text()
    drawn = sorted(path.name for path in (resized / "figures").iterdir())
    assert drawn == ["agreement_by_milliseconds.png", "agreement_by_size.png"]
    settings = EmbeddingSettings.load(resized / TRAINING / "model")
    assert settings is not None and settings.pooling == "mean" and settings.passage_max_length == 48
    assert set(load_encoder(resized / TRAINING / "model").heads) == {"1", "2"}


@pytest.mark.launch
def test_what_is_exported_is_what_was_trained(resized: Path, docstrings: list[str]) -> None:
    from sentence_transformers import SentenceTransformer

    from trainer.evaluation.encoding.encode import embedder_of

    encoder, tokenizer, settings = load_model(resized / TRAINING / "model")
    assert settings is not None
    for size in settings.sizes:
        found = SentenceTransformer(str(resized / "export" / settings.sizes.name(size)), device="cpu").encode(
            docstrings[:5]
        )
        expected = embedder_of(encoder, tokenizer, [size], device="cpu")(
            docstrings[:5], similarity="cosine", max_length=48, prompt=""
        )[size]
        np.testing.assert_allclose(found, expected, atol=2e-6)


@pytest.mark.launch
def test_the_same_command_is_done_and_another_is_refused(resized: Path, model_folder: Path, texts: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in (resized / TRAINING).rglob("*") if path.is_file()}
    command = [str(model_folder), "--texts", str(texts), "--output", str(resized), "--sizes", SIZES, *FAST]
    (resized / "table.md").unlink()
    resize.main(["--local_rank=0", *command])  # as the launcher starts it
    assert (resized / "table.md").is_file()
    assert before == {path: path.stat().st_mtime_ns for path in (resized / TRAINING).rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match="is of another command"):
        resize.main([*command, "--train", "heads"])


def test_a_changed_test_file_is_evaluated_and_exported_again(
    resized: Path, model_folder: Path, texts: Path, docstrings: list[str], tmp_path: Path
) -> None:
    """Its scores are also those of the exported model cards."""
    run, sts = tmp_path / "run", tmp_path / "pairs.tsv"
    shutil.copytree(resized, run)
    asked = json.loads((run / "command.json").read_text())
    (run / "command.json").write_text(json.dumps(asked | {"sts": [str(sts)]}, indent=2) + "\n")
    command = [str(model_folder), "--texts", str(texts), "--output", str(run), "--sizes", SIZES, *FAST]

    def scores_on(sentences: list[str]) -> tuple[str, str]:
        plain = [" ".join(sentence.split()) for sentence in sentences]
        pairs = enumerate(itertools.pairwise(plain))
        sts.write_text("".join(f"{score}\t{first}\t{second}\n" for score, (first, second) in pairs))
        resize.main([*command, "--sts", str(sts)])
        return (run / "table.md").read_text(), (run / "export" / "1x8" / "README.md").read_text()

    before, after = scores_on(docstrings[:20]), scores_on(docstrings[20:40])
    assert before[0] != after[0] and before[1] != after[1]
    written = (run / "resize.json").stat().st_mtime_ns
    assert scores_on(docstrings[20:40]) == after
    assert (run / "resize.json").stat().st_mtime_ns == written, "an unchanged file is not evaluated again"


def test_results_are_kept_while_the_test_files_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that an earlier version left without a digest are kept only if no files are named."""
    scores = dict.fromkeys(f"{method}{to}" for method in (AS_IT_IS, CLOSED_FORM, RESIZED) for to in ("", "_to_whole"))
    row = Row(task="agreement", layers=1, dim=8, milliseconds=1.0, megabytes=1.0, **scores)
    measured = Mock(return_value=(row,))
    monkeypatch.setattr(resizing, "_measured", measured)
    asked = Resize("m", ("t.txt",), tmp_path)

    def times_measured(tests: str) -> int:
        before = measured.call_count
        resizing._report(asked, ([], []), tests)
        return measured.call_count - before

    nothing, first, second = digest_of_tasks((), ()), "1" * 64, "2" * 64
    assert [times_measured(tests) for tests in (first, first, second, second, first)] == [1, 0, 1, 0, 1]
    values = json.loads((tmp_path / "resize.json").read_text())
    del values["tests_sha256"]
    for tests, again in ((nothing, 0), (first, 1)):
        (tmp_path / "resize.json").write_text(json.dumps(values))
        assert times_measured(tests) == again


def test_heads_leave_the_model_as_it_is_to_the_last_bit(heads_alone: Path) -> None:
    start, trained = (load_file(heads_alone / f / "model.safetensors") for f in (START, f"{TRAINING}/model"))
    assert start.keys() == trained.keys()
    assert all(torch.equal(start[name], trained[name]) for name in start)
    before, after = (load_file(heads_alone / f / HEADS_FILE) for f in (CLOSED_FORM, f"{TRAINING}/model"))
    assert before.keys() == after.keys() and "3.weight" not in after  # the whole model has none
    assert not any(torch.equal(before[name], after[name]) for name in before)  # and they did train
    records = json.loads((heads_alone / "resize.json").read_text())["records"]
    assert records[-1][RESIZED] == records[-1][AS_IT_IS]


def test_texts_are_cut_where_it_was_asked(heads_alone: Path) -> None:
    for folder in (START, CLOSED_FORM, f"{TRAINING}/model"):
        settings = EmbeddingSettings.load(heads_alone / folder)
        assert settings is not None and (settings.query_max_length, settings.passage_max_length) == (16, 16)
    assert load_recipe(heads_alone / f"{TRAINING}.toml").data.max_length == 16


def test_another_teacher_and_pairs(with_pairs: Path) -> None:
    """The teacher is as wide as the ladder, of two layers, and mean-pooled; SRL follows with its term beside it."""
    assert (with_pairs / "pair_training" / "DONE").is_file()
    step = steps_of(with_pairs / "pair_training")[0]
    assert any(name.startswith("distill/") for name in step) and any(name.startswith("kl/") for name in step)
    assert set(load_encoder(with_pairs / "pair_training" / "model").heads) == {"1", "2", "3"}


@pytest.mark.parametrize(
    ("layers", "width", "sizes"),
    [
        (6, 384, [(1, 32), (2, 64), (3, 128), (4, 192), (5, 256), (6, 384)]),
        (12, 384, [(2, 32), (4, 64), (6, 128), (8, 192), (10, 256), (12, 384)]),
        (24, 1024, [(4, 88), (8, 168), (12, 344), (16, 512), (20, 680), (24, 1024)]),
        (3, 24, [(1, 8), (2, 16), (3, 24)]),
        (5, 24, [(1, 4), (2, 8), (3, 12), (4, 16), (5, 24)]),
        (6, 4, [(2, 1), (3, 2), (4, 3), (6, 4)]),
        (1, 64, [(1, 64)]),
    ],
)
def test_a_ladder_is_proposed_by_the_models_shape(layers: int, width: int, sizes: list[tuple[int, int]]) -> None:
    assert propose_ladder(layers, width) == Ladder.of(sizes)


def test_the_papers_ladder_is_proposed_for_its_shape() -> None:
    assert propose_ladder(12, 768) == STARBUCKS_LADDER


@torch.no_grad()
def test_agreement_is_the_whole_models_own_order(model_folder: Path, docstrings: list[str]) -> None:
    encoder, tokenizer, settings = load_model(model_folder)
    assert settings is not None and settings.sizes.full == Size(3, 24)
    task = agreement(encoder, tokenizer, settings, docstrings[:20])
    assert len(task.pairs) == 40 and len(set(task.pairs[:20])) == 20
    assert all(first != second for first, second in task.pairs)
    assert np.mean(task.scores[:20]) > np.mean(task.scores[20:])  # nearest neighbours, then others


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--sizes", "1x8,3x48"], "the ladder's last size 3x48 outgrows"),
        (["--sizes", "1x8,2x16"], "stops short of"),
        (["--sizes", "small"], "is not of the form"),
        (["--train", "heads", "--no-heads"], "leave --no-heads out"),
        (["--sts", "absent.tsv"], "absent.tsv"),
        (["--run.output=elsewhere"], "--run.output is what this command decides itself"),
        (["--train.stop_at_step=3"], "--train.stop_at_step is what this command decides itself"),
        (["--max-length", "2"], "the model takes 3 to 64 tokens"),
        (["--max-length", "65"], "the model takes 3 to 64 tokens"),
    ],
)
def test_user_errors_are_told_before_anything_is_trained(
    tmp_path: Path, model_folder: Path, texts: Path, arguments: list[str], words: str
) -> None:
    with pytest.raises(Exception, match=words):
        resize.main([str(model_folder), "--texts", str(texts), "--output", str(tmp_path / "run"), *arguments])
    assert not (tmp_path / "run" / TRAINING).exists()


@pytest.mark.parametrize(
    ("name", "option", "value"), [("texts.jsonl", "--text-split", "lines"), ("texts.txt", "--text-column", "text")]
)
def test_what_no_text_reads_is_refused_and_leaves_nothing(
    tmp_path: Path, model_folder: Path, texts: Path, name: str, option: str, value: str
) -> None:
    (tmp_path / name).write_bytes(texts.read_bytes())
    command = [str(model_folder), "--texts", str(tmp_path / name), "--output", str(tmp_path / "run")]
    with pytest.raises(DataError, match=f"no input reads {option}, which is for .*; leave {option} out"):
        resize.main([*command, option, value])
    assert not (tmp_path / "run").exists()


def test_what_divides_the_texts_decides_the_shards(tmp_path: Path, model_folder: Path, texts: Path) -> None:
    lines = [json.loads(line)["text"].replace("\n", " ") for line in texts.read_text().splitlines()[:40]]
    (tmp_path / "texts.txt").write_text("\n".join(lines))
    command = [str(model_folder), "--texts", str(tmp_path / "texts.txt"), "--sizes", SIZES, "--prepare-only"]
    resize.main([*command, "--output", str(tmp_path / "run"), "--text-split", "lines"])
    assert ShardFolder(tmp_path / "run" / "shards").num_samples == 36  # a tenth is held out


def test_preparing_ends_before_training_and_the_command_goes_on_from_there(
    tmp_path: Path, model_folder: Path, texts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("trainer.resizing.resize.execute", lambda recipe, last: pytest.fail("it trains"))
    run = tmp_path / "run"
    arguments = [str(model_folder), "--texts", str(texts), "--output", str(run), "--sizes", SIZES]
    resize.main([*arguments, "--prepare-only"])
    assert "size" not in capsys.readouterr().out  # no table
    assert not (run / TRAINING).exists() and not (run / "resize.json").exists()
    assert (run / "shards" / "manifest.json").is_file()
    assert set(load_encoder(run / CLOSED_FORM).heads) == {"1", "2"} and not load_encoder(run / START).heads
    with pytest.raises(pytest.fail.Exception, match="it trains"):
        resize.main(arguments)  # the same command but for the option


def test_a_teacher_of_another_width_decides_the_width_of_the_result(
    tmp_path: Path, model_folder: Path, texts: Path, tiny_tokenizer
) -> None:
    """The ladder that is asked for ends there; every depth gets a head, for one without would have another width."""
    torch.manual_seed(6)
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    teacher, run = tmp_path / "teacher", tmp_path / "run"
    masked_lm = build_masked_lm({"model_type": "bert", **shape}, vocab_size=len(tiny_tokenizer), pad_token_id=0)
    masked_lm.base_model.save_pretrained(teacher)
    tiny_tokenizer.save_pretrained(teacher)
    EmbeddingSettings("mean", ladder=((1, 32),)).save(teacher)
    arguments = [str(model_folder), "--texts", str(texts), "--output", str(run), "--teacher", str(teacher)]
    resize.main([*arguments, "--sizes", "1x8,3x32", "--prepare-only"])
    start, fitted = (load_model(run / name)[2] for name in (START, CLOSED_FORM))
    assert (start.ladder, fitted.ladder) == (((1, 8), (3, 24)), ((1, 8), (3, 32)))
    assert set(load_encoder(run / CLOSED_FORM).heads) == {"1", "2", "3"}
    with pytest.raises(ConfigError, match=r"--sizes end with 3x24, and --teacher .* has vectors of 32 dimensions"):
        resize.main([*arguments[:3], "--output", str(tmp_path / "b"), *arguments[5:], "--sizes", "1x8,3x24"])


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path, model_folder: Path, texts: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ConfigError, match="holds something else"):
        resize.main([str(model_folder), "--texts", str(texts), "--output", str(tmp_path)])
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_the_kept_command_hides_the_secrets_in_addresses(tmp_path: Path) -> None:
    """And the password may change, but not the address."""

    def begun(address: str) -> str:
        resizing._begin(Resize("m", (address,), tmp_path, overrides=(f"model.source={address}",)))
        return (tmp_path / "command.json").read_text()

    text = begun("https://me:geheim@h/x.tar?token=geheim")
    assert text.count("https://***@h/x.tar?token=***") == 2 and "geheim" not in text
    assert begun("https://me:another@h/x.tar?token=another") == text
    with pytest.raises(ConfigError, match="is of another command"):
        begun("https://me:geheim@h/y.tar?token=geheim")
    kept_before = text.replace("***@", "me:geheim@").replace("=***", "=geheim")  # by earlier versions
    (tmp_path / "command.json").write_text(kept_before)
    assert begun("https://me:geheim@h/x.tar?token=geheim") == text


def test_a_teacher_reads_the_texts_that_the_shards_hold(tmp_path: Path, texts: Path) -> None:
    """With a limit too, which counts from the first text that is not held out."""
    lines = [json.loads(line)["text"] for line in texts.read_text().splitlines()]
    asked = Resize("m", (str(texts),), tmp_path, limit=50)
    read = [record["text"] for unit in asked.units for _, record in read_split(unit)]
    assert asked.held_out == lines[:5] and read == lines[5:55]


def test_the_first_texts_of_all_files_are_held_out(tmp_path: Path) -> None:
    for number in range(40):
        (tmp_path / f"{number:02d}.txt").write_text(f"text {number}\n")
    asked = Resize("m", (str(tmp_path / "*.txt"),), tmp_path / "run")
    read = [record["text"] for unit in asked.units for _, record in read_split(unit)]
    assert asked.held_out == [f"text {number}" for number in range(4)]
    assert read == [f"text {number}" for number in range(4, 40)]
    few = Resize("m", tuple(str(tmp_path / f"{number:02d}.txt") for number in range(20)), tmp_path / "run")
    assert len(few.held_out) == 4  # of two, every pair has the same cosine

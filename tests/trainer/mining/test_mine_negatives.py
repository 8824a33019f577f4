"""Hard negatives: the rules against a plain restatement and the peer, and a command that may be stopped anywhere."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertModel

from data.collate import PairCollator
from data.ground.command import run_command
from data.ground.errors import ConfigError, DataError, UserError
from data.passages import text_key
from data.prepare import main as prepare
from data.shards.reader import ShardFolder
from data.stream import Sample
from data.tokens import load_tokenizer
from models.encoder import build_masked_lm, load_encoder
from models.settings import EmbeddingSettings
from models.sizes import Size
from models.static_embedding import StaticConfig, StaticModel
from tests.beir import write_beir
from trainer import mine_negatives as command
from trainer.evaluation.encoding.encode import embedder_of
from trainer.mine_negatives import main
from trainer.mining import mine as mining
from trainer.mining.mine import IDENTITY, REPORT, TUPLES, WORK
from trainer.mining.rules import Rules, choose
from trainer.resilience.stopping import Stopped

SMALL, FULL = Size(1, 16), Size(1, 48)


# The rules


def choose_plainly(
    scores: np.ndarray, ids: np.ndarray, excluded: np.ndarray, positive: float, rules: Rules
) -> list[int]:
    """What `top` takes of one query, said in loops."""
    matches = [(s, i) for s, i, out in zip(scores.tolist(), ids.tolist(), excluded.tolist()) if not out]
    kept = []
    for score, number in matches[: rules.last_rank]:
        if rules.absolute_margin is not None and score + rules.absolute_margin > positive:
            continue
        if rules.relative_margin is not None and score > positive - abs(positive) * rules.relative_margin:
            continue
        if rules.max_score is not None and score > rules.max_score:
            continue
        if rules.min_score is not None and score < rules.min_score:
            continue
        kept.append(number)
    return kept[rules.range_min :]


@pytest.fixture(scope="module")
def matches() -> tuple[np.ndarray, ...]:
    """scores, ids, excluded [n, k] and positives [n], negative ones among the scores."""
    rng = np.random.default_rng(1)
    scores = -np.sort(-rng.uniform(-1, 1, (200, 40)).astype(np.float32), axis=1)
    ids = np.stack([rng.permutation(500)[:40] for _ in range(200)])
    return scores, ids, rng.random((200, 40)) < 0.1, rng.uniform(-0.5, 1, 200).astype(np.float32)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"range_min": 3, "range_max": 12},
        {"absolute_margin": 0.1},
        {"relative_margin": 0.2, "range_min": 2},
        {"max_score": 0.6, "min_score": 0.3},
        {"absolute_margin": 0.0, "relative_margin": 0.05, "max_score": 0.9, "min_score": -0.5, "range_max": 30},
    ],
)
def test_rules_are_the_plain_ones(options: dict[str, Any], matches: tuple[np.ndarray, ...]) -> None:
    scores, ids, excluded, positives = matches
    rows = np.arange(len(scores)) + 7
    rules = Rules(num_negatives=4, **options)
    kept = [choose_plainly(*each, rules) for each in zip(scores, ids, excluded, positives.tolist())]
    top = choose(scores, ids, excluded=excluded, positives=positives, rows=rows, rules=rules)
    assert [[i for i in row if i >= 0] for row in top.ids.tolist()] == [row[:4] for row in kept]
    score_of = [dict(zip(i, s)) for i, s in zip(ids.tolist(), scores.tolist())]
    for row, line, values in zip(score_of, top.ids.tolist(), top.scores.tolist()):
        assert [row[i] for i in line if i >= 0] == values[: sum(i >= 0 for i in line)]
    # Negative control: every option leaves out some that are taken without it.
    plain = choose(scores, ids, excluded=excluded, positives=positives, rows=rows, rules=Rules(num_negatives=4))
    assert (plain.ids != top.ids).any() == bool(options)

    drawn = choose(
        scores, ids, excluded=excluded, positives=positives, rows=rows,
        rules=Rules(num_negatives=4, sampling="random", **options),
    )  # fmt: skip
    for got, may in zip(drawn.ids.tolist(), kept):
        chosen = [i for i in got if i >= 0]
        assert len(chosen) == min(4, len(may)) and set(chosen) <= set(may)
        assert chosen == [i for i in may if i in chosen]  # best first
    assert (drawn.ids != top.ids).any()


def test_random_draws_are_by_row_and_seed_alone(matches: tuple[np.ndarray, ...]) -> None:
    scores, ids, excluded, positives = matches

    def draw(start: int, stop: int, seed: int = 5) -> np.ndarray:
        cut = slice(start, stop)
        return choose(
            scores[cut], ids[cut], excluded=excluded[cut], positives=positives[cut], rows=np.arange(start, stop),
            rules=Rules(num_negatives=3, sampling="random", seed=seed),
        ).ids  # fmt: skip

    assert (np.concatenate([draw(0, 33), draw(33, 200)]) == draw(0, 200)).all()
    assert (draw(0, 200) != draw(0, 200, seed=6)).any()
    # Each of the 30 ranks is as likely: 600 draws over 30 places, five standard deviations.
    places = [np.flatnonzero(np.isin(row, chosen)) for row, chosen in zip(ids, draw(0, 200))]
    ranks = np.bincount(np.concatenate(places), minlength=40)[:25]
    assert abs(ranks - 600 * 0.9 / 27).max() < 5 * np.sqrt(20)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"num_negatives": 0}, "num-negatives"),
        ({"range_min": -1}, "range-min"),
        ({"num_negatives": 5, "range_min": 3, "range_max": 7}, "widen"),
        ({"relative_margin": 1.0}, "relative-margin"),
        ({"absolute_margin": -0.1}, "absolute-margin"),
        ({"sampling": "best"}, "sampling"),
        ({"seed": -1}, "seed"),
    ],
)
def test_rules_that_mean_nothing_are_refused(options: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        Rules(**options)


# The command


@pytest.fixture(scope="module")
def model(tiny_tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A static model with random weights."""
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("static")
    table = StaticModel(StaticConfig(vocab_size=len(tiny_tokenizer), hidden_size=48, special_ids=[0, 2, 3, 4]))
    table.save_pretrained(folder)
    # What another test's call left in it would be saved, and obeyed by sentence-transformers.
    tiny_tokenizer.backend_tokenizer.no_truncation()
    tiny_tokenizer.backend_tokenizer.no_padding()
    tiny_tokenizer.save_pretrained(folder)
    settings = EmbeddingSettings("mean", "cosine", ((1, 16), (1, 48)), query_max_length=10**5, passage_max_length=10**5)
    settings.save(folder)
    return folder


def test_another_configuration_is_another_model(model: Path, tmp_path: Path) -> None:
    """With the same weights: here other tokens count. A copy elsewhere is the same model."""

    def identity(folder: Path) -> dict[str, Any]:
        return command.load_miner(command._parser().parse_args(["in", "--model", str(folder), "--output", "out"]))[1]

    copy = shutil.copytree(model, tmp_path / "copy")
    assert identity(copy) == identity(model)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "special_ids": [0]}))
    assert identity(copy) != identity(model)


@pytest.fixture(scope="module")
def pairs(docstrings: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """250 tuples; queries come up to three times with other positives, and some have negatives."""
    parts = [text.split("\n\n", 1) for text in docstrings if "\n\n" in text]
    bodies = [part[1] for part in parts if len(part[1].split()) > 5][:250]
    parts = [(" ".join(body.split()[::2]), body) for body in bodies]
    rows = [
        {
            "query": parts[number - number % 3][0] if number < 90 else query,
            "positives": [body, parts[(number + 1) % 250][1]] if number % 5 == 0 else [body],
            "negatives": [parts[(number + 9) % 250][1]] if number % 4 == 0 else [],
        }
        for number, (query, body) in enumerate(parts)
    ]
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(pairs: Path, model: Path, output: Path, *more: str) -> list[dict[str, Any]]:
    main([str(pairs), "--model", str(model), "--output", str(output), *more])
    return [json.loads(line) for line in (output / TUPLES).read_text().splitlines()]


def vectors(model: Path, texts: Sequence[str], size: Size) -> np.ndarray:
    encode = embedder_of(load_encoder(model, pooling="mean"), load_tokenizer(model), [size], device="cpu")
    return encode(texts, similarity="cosine", max_length=10**5)[size]


RULES = ["--num-negatives", "4", "--range-min", "1", "--range-max", "15", "--relative-margin", "0.02"]


def test_negatives_are_what_a_full_score_matrix_gives(
    pairs: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = ["--queries-per-block", "64", "--passages-per-block", "50"]
    got = run(pairs, model, tmp_path / "out", *RULES, *blocks)
    rows = [json.loads(line) for line in pairs.read_text().splitlines()]
    pool = {text_key(text): text for row in reversed(rows) for text in (*row["positives"], *row["negatives"])}
    texts = list(pool.values())
    table = vectors(model, texts, FULL)
    place = {key: number for number, key in enumerate(pool)}
    queries = vectors(model, [row["query"] for row in rows], FULL)
    rules = Rules(num_negatives=4, range_min=1, range_max=15, relative_margin=0.02)
    found = 0
    for number, (row, line) in enumerate(zip(rows, got)):
        scores = table @ queries[number]
        known = {text_key(t) for r in rows if text_key(r["query"]) == text_key(row["query"]) for t in r["positives"]}
        order = np.argsort(-scores, kind="stable")
        excluded = np.array([list(pool)[i] in known | {text_key(row["query"])} for i in order])
        lowest = min(scores[place[key]] for key in known)
        want = choose_plainly(scores[order], order, excluded, float(lowest), rules)[:4]
        assert (line["query"], line["positives"]) == (row["query"], row["positives"])
        assert line["negatives"] == [texts[i] for i in want]
        assert line["mined_scores"] == pytest.approx([scores[i] for i in want], abs=2e-5)
        own = [scores[place[text_key(text)]] for text in row["positives"]]
        assert line["positive_scores"] == pytest.approx(own, abs=2e-5)
        found += len(want)
    report = json.loads((tmp_path / "out" / REPORT).read_text())
    assert report["negatives"] == found > 400 and report["tuples"] == 250 and report["passages"] == len(pool)
    assert report["tuples_by_negatives"]["4"] == sum(len(line["negatives"]) == 4 for line in got)
    assert report["dropped"]["relative_margin"] > 0 == report["dropped"]["max_score"]
    mined = [score for line in got for score in line["mined_scores"]]
    assert report["scores"]["negative"]["50%"] == pytest.approx(np.median(mined), abs=2e-5)
    assert f"{found:,} negatives for 250 tuples" in capsys.readouterr().out
    assert not (tmp_path / "out" / WORK).exists()
    # Any other blocks, and what keeps the input's negatives.
    assert run(pairs, model, tmp_path / "whole", *RULES) == got
    kept = run(pairs, model, tmp_path / "kept", *RULES, "--keep-negatives")
    for row, line in zip(rows, kept):
        own = len(row["negatives"])
        assert line["negatives"][:own] == row["negatives"]
        assert not set(line["negatives"][own:]) & set(row["negatives"])
        assert len(line["negatives"]) == own + len(line["mined_scores"])


def test_a_small_size_searches_and_a_large_one_decides(pairs: Path, model: Path, tmp_path: Path) -> None:
    deep = ["--num-negatives", "2", "--range-max", "400"]
    full = run(pairs, model, tmp_path / "full", *deep)
    # A shortlist of everything leaves the decision to the large size alone.
    reranked = run(pairs, model, tmp_path / "reranked", *deep, "--size", "1x16", "--rerank", "1x48")
    assert [line["negatives"] for line in reranked] == [line["negatives"] for line in full]
    short = run(pairs, model, tmp_path / "short", "--num-negatives", "2", "--size", "1x16", "--rerank", "1x48")
    small = run(pairs, model, tmp_path / "small", "--num-negatives", "2", "--size", "1x16")
    same = sum(a["negatives"] == b["negatives"] for a, b in zip(full, short))
    assert len(full) > same > sum(a["negatives"] == b["negatives"] for a, b in zip(full, small))


def test_stopped_anywhere_it_goes_on_to_the_same_bytes(pairs: Path, model: Path, tmp_path: Path) -> None:
    arguments = [*RULES, "--sampling", "random", "--queries-per-block", "70", "--passages-per-block", "100"]
    run(pairs, model, tmp_path / "whole", *arguments)
    want = [(tmp_path / "whole" / name).read_bytes() for name in (TUPLES, REPORT, IDENTITY)]
    places = []
    output = tmp_path / "stopped"
    # Every start gets one block further.
    for _ in range(50):
        asked = iter([None])
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(command.StopRequests, "wanted", lambda self, asked=asked: next(asked, "SIGTERM"))
                run(pairs, model, output, *arguments)
            break
        except Stopped as stopped:
            places.append(str(stopped).split("(")[0])
            assert not (output / REPORT).exists()
            # What a kill in the middle of a block leaves.
            for path in output.glob(f"{WORK}/*.f32"):
                with path.open("ab") as file:
                    file.write(b"half a vector")
            for path in output.glob(f"{WORK}/parts"):
                (path / "000000000210.npz").write_bytes(b"half")
    assert [(output / name).read_bytes() for name in (TUPLES, REPORT, IDENTITY)] == want
    assert {"stopped in encoding ", "stopped in mining "} <= set(places) and len(places) > 5
    # Once more does nothing; another command is refused, and so is another model.
    before = (output / TUPLES).stat().st_mtime_ns
    run(pairs, model, output, *arguments)
    assert (output / TUPLES).stat().st_mtime_ns == before
    with pytest.raises(ConfigError, match="begun with other rules"):
        run(pairs, model, output, *arguments, "--seed", "1")
    seeded = run(pairs, model, tmp_path / "seeded", *arguments, "--seed", "1")
    assert seeded != [json.loads(line) for line in want[0].splitlines()]


def test_other_rows_to_skip_are_another_command(pairs: Path, model: Path, tmp_path: Path) -> None:
    """If mining went on, its output would contain tuples of rows that the changed file leaves out."""
    skipped, output = tmp_path / "rows.txt", tmp_path / "out"
    skipped.write_text("0\n1\n")
    run(pairs, model, output, "--skip-rows", str(skipped))
    run(pairs, model, output, "--skip-rows", str(skipped))  # negative control
    skipped.write_text("0\n1\n2\n")
    with pytest.raises(ConfigError, match="begun with other reading"):
        run(pairs, model, output, "--skip-rows", str(skipped))


def test_a_signal_stops_between_blocks(
    pairs: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = mining.TopK.add_block

    def interrupted(*args: Any, **options: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        whole(*args, **options)
        monkeypatch.undo()

    monkeypatch.setattr(mining.TopK, "add_block", interrupted)
    arguments = [str(pairs), "--model", str(model), "--output", str(tmp_path / "out"), "--queries-per-block", "60"]
    with pytest.raises(SystemExit) as end:
        run_command(lambda: main(arguments))
    assert end.value.code == 75 and "stopped in mining (SIGTERM)" in capfd.readouterr().err
    assert len(list((tmp_path / "out" / WORK / "parts").glob("*.jsonl"))) >= 1
    main(arguments)
    assert (tmp_path / "out" / REPORT).is_file()


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (lambda work: (work / "encoded").write_text("x"), "encoded is no number"),
        (lambda work: (work / "encoded").write_text("-5"), "encoded is no number"),
        (lambda work: (work / "encoded").write_text("²"), "encoded is no number"),
        (lambda work: (work / "encoded").write_text("1000000"), "encoded is no number"),
        (lambda work: next(work.glob("*.f32")).unlink(), "has 0 bytes"),
        (lambda work: next(work.glob("*.f32")).write_bytes(b"cut"), "has 3 bytes"),
        (lambda work: (work.parent / IDENTITY).write_text("[]"), "holds no object"),
        (lambda work: (work.parent / IDENTITY).write_text("[" * 10**5), "nested too deep"),
    ],
)
def test_damaged_work_is_refused(
    damage: Callable[[Path], Any],
    word: str,
    pairs: Path,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    output = tmp_path / "out"
    asked = iter([None] * 3)  # while reading, and before two blocks of passages
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped, match="encoding"):
        patch.setattr(command.StopRequests, "wanted", lambda self: next(asked, "SIGTERM"))
        run(pairs, model, output, "--passages-per-block", "100")
    damage(output / WORK)
    with pytest.raises(UserError, match=word):
        run(pairs, model, output, "--passages-per-block", "100")


def test_beir_folders_bring_their_corpus(model: Path, docstrings: list[str], tmp_path: Path) -> None:
    texts = docstrings[:90]
    documents = [{"title": "About", "text": text} for text in texts]
    queries = [" ".join(text.split()[:6]) for text in texts[:20]]
    folder = write_beir(tmp_path / "beir", documents, queries, split="train")
    got = run(folder, model, tmp_path / "out", "--num-negatives", "5", "--split", "train")
    assert json.loads((tmp_path / "out" / REPORT).read_text())["passages"] == 90
    assert {text for line in got for text in line["negatives"]} - {f"About {text}" for text in texts[:20]}
    assert all(f"About {text}" not in line["negatives"] for text, line in zip(texts, got))


def test_weights_of_rows_are_handed_on(pairs: Path, model: Path, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in pairs.read_text().splitlines()[:30]]
    weighted = tmp_path / "weighted.jsonl"
    weighted.write_text("".join(json.dumps(row | {"weight": n / 4}) + "\n" for n, row in enumerate(rows)))
    got = run(weighted, model, tmp_path / "out")
    assert [row["weight"] for row in got] == [n / 4 for n in range(30)]


def test_rows_keep_their_own_texts(pairs: Path, model: Path, tmp_path: Path) -> None:
    """Texts that differ in case count as one passage, and are handed on as each row has them."""
    rows = [json.loads(line) | {"negatives": []} for line in pairs.read_text().splitlines()[100:110]]
    loud = [row["positives"][0].upper() for row in rows[:2]]
    own = tmp_path / "own.jsonl"
    own.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with own.open("a") as file:
        file.write(
            json.dumps({"query": "aloud", "positives": loud[:1], "negatives": [loud[1], loud[1].lower()]}) + "\n"
        )
    got = run(own, model, tmp_path / "out", "--keep-negatives")
    assert [row["positives"] for row in got] == [*(row["positives"] for row in rows), loud[:1]]
    assert got[-1]["negatives"][0] == loud[1] and len(got[-1]["negatives"]) == 4


def test_what_is_mined_trains(pairs: Path, model: Path, tiny_tokenizer_path: Path, tmp_path: Path) -> None:
    got = run(pairs, model, tmp_path / "out")
    shards = str(tmp_path / "shards")
    assert not prepare(
        ["tuples", str(tmp_path / "out" / TUPLES), "--tokenizer", str(tiny_tokenizer_path), "--output", shards]
    )
    folder = ShardFolder(shards)
    sizes = sorted((item.num_positives, len(item.passages)) for item in folder.tuples(range(len(folder))))
    assert sizes == sorted((len(r["positives"]), len(r["positives"]) + len(r["negatives"])) for r in got)
    assert not folder.graded
    collate = PairCollator(folder.vocabulary, query_max_length=32, passage_max_length=64, num_negatives=3, seed=1)
    batch = collate([Sample(0, number, 0, number, item) for number, item in enumerate(folder.tuples(range(50)))])
    negatives = [len(item.passages) - item.num_positives for item in folder.tuples(range(50))]
    assert len(batch.passages) == 50 + sum(min(3, number) for number in negatives) > 150


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-negatives", "9", "--range-max", "3"], "widen the range"),
        (["--rerank", "1x16"], "no larger than"),
        (["--size", "1x16", "--rerank", "1x16"], "--rerank 1x16 is the size that searches, too"),
        (["--size", "2x16"], "outgrows"),
        (["--corpus", "absent.jsonl"], "absent.jsonl does not exist"),
        (["--query-column", "absent"], "'absent'"),
        (["--split", "train"], "no input reads --split, which is for data sets of the Hugging Face hub, MS MARCO"),
        (["--columns", "query,positive"], "no input reads --columns, which is for TSV files; leave --columns out"),
        (["--seed", "0"], "--seed is read with --sampling random alone"),
        (["--model", "absent"], "is no folder"),
    ],
)
def test_user_errors_are_one_sentence_and_leave_nothing(
    arguments: list[str], message: str, pairs: Path, model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        run_command(lambda: main([str(pairs), "--model", str(model), "--output", str(tmp_path / "out"), *arguments]))
    assert end.value.code == 2
    error = capfd.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ") and message in error
    assert not (tmp_path / "out").exists()


def test_options_are_refused_before_the_model_is_loaded(
    pairs: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "load_model", lambda *_, **__: pytest.fail("the model was loaded"))
    with pytest.raises(DataError, match="no input reads --split"):
        run(pairs, model, tmp_path / "out", "--split", "train")
    with pytest.raises(DataError, match=r"absent\.jsonl"):
        run(tmp_path / "absent.jsonl", model, tmp_path / "out")


def test_inputs_that_are_no_files_here_are_told_apart(tmp_path: Path) -> None:
    """Otherwise the output of one data set of the hub, or of one address, would go on with another's texts."""
    (tmp_path / "a1.jsonl").write_text("a")
    (tmp_path / "a2.jsonl").write_text("b")

    def identity(*names: str) -> list[dict[str, Any]]:
        return command._inputs_identity(names)

    assert identity("org/one") == [{"name": "org/one"}] != identity("org/two")
    address = "https://me:{}@host/{}.tar"
    assert identity(address.format("secret", "one")) == identity(address.format("changed", "one"))
    assert identity(address.format("secret", "one")) != identity(address.format("secret", "two"))
    assert "secret" not in json.dumps(identity(address.format("secret", "one")))
    # Files that a pattern with braces names are told apart by their content.
    pattern = str(tmp_path / "a{1,2}.jsonl")
    before = identity(pattern)
    assert [Path(each["path"]).name for each in before] == ["a1.jsonl", "a2.jsonl"]
    (tmp_path / "a2.jsonl").write_text("c")
    assert identity(pattern) != before


def test_the_output_of_one_address_is_not_continued_with_another(
    pairs: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = command.plan_tuples

    def plan_here(inputs: object, *options: Any, scratch: Path) -> Any:
        """Plan the file of pairs, whichever address was given."""
        return plan([str(pairs)], *options, scratch=scratch)

    monkeypatch.setattr(command, "plan_tuples", plan_here)
    arguments = ["--model", str(model), "--output", str(tmp_path / "out"), *RULES]
    main(["https://host/one.tar", *arguments])
    main(["https://host/one.tar", *arguments])
    with pytest.raises(ConfigError, match="was begun with other inputs"):
        main(["https://host/two.tar", *arguments])


def test_folders_of_others_are_left_alone(pairs: Path, model: Path, tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(ConfigError, match="holds other files"):
        run(pairs, model, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]


def test_layers_mine_as_tables_do(tiny_tokenizer, pairs: Path, tmp_path: Path) -> None:
    """A model with layers, a small size of which searches."""
    torch.manual_seed(2)
    shape = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    model = build_masked_lm(
        {"model_type": "bert", **shape, "max_position_embeddings": 64}, vocab_size=len(tiny_tokenizer), pad_token_id=0
    )
    model.save_pretrained(tmp_path / "bert")
    tiny_tokenizer.save_pretrained(tmp_path / "bert")
    settings = EmbeddingSettings("mean", "cosine", ((1, 4), (2, 16)), query_max_length=16, passage_max_length=32)
    settings.save(tmp_path / "bert")
    got = run(pairs, tmp_path / "bert", tmp_path / "out", "--size", "1x4", "--rerank", "2x16", "--limit", "40")
    assert len(got) == 40 and all(len(line["negatives"]) == 3 for line in got)


def test_folders_of_sentence_transformers_mine_as_those_of_runs_do(tiny_tokenizer, pairs: Path, tmp_path: Path) -> None:
    """The same weights, saved by the library in its own layout; other weights there are another model."""
    library = pytest.importorskip("sentence_transformers", reason="needs sentence-transformers, whose folder it is")
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

    torch.manual_seed(2)
    shape = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    config = BertConfig(vocab_size=len(tiny_tokenizer), max_position_embeddings=64, **shape)
    own, theirs = tmp_path / "own", tmp_path / "theirs"
    BertModel(config, add_pooling_layer=False).save_pretrained(own)
    tiny_tokenizer.save_pretrained(own)
    modules = [Transformer(str(own), max_seq_length=32), Pooling(16, pooling_mode="mean"), Normalize()]
    library.SentenceTransformer(modules=modules, device="cpu").save(str(theirs))
    EmbeddingSettings("mean", "cosine", ((2, 16),), query_max_length=32, passage_max_length=32).save(own)
    expected = run(pairs, own, tmp_path / "of_own", "--limit", "40")
    assert run(pairs, theirs, tmp_path / "of_theirs", "--limit", "40") == expected
    identity = json.loads((tmp_path / "of_theirs" / IDENTITY).read_text())
    assert any(name.endswith("model.safetensors") for name in identity["model"]["files"])


# The peer


@pytest.mark.parametrize(
    "options",
    [
        {"num_negatives": 3},
        {"num_negatives": 4, "range_min": 2, "range_max": 316, "relative_margin": 0.1},
        {"num_negatives": 2, "range_max": 316, "absolute_margin": 0.02, "max_score": 0.6, "min_score": 0.05},
    ],
)
def test_sentence_transformers_mines_the_same(
    options: dict[str, Any], model: Path, docstrings: list[str], tmp_path: Path
) -> None:
    """Two positives a query, texts that differ by more than case, and a range that does not cut off what rules leave:
    the peer looks two ranks deeper where a query's positives are not among its best.
    """
    library = pytest.importorskip("sentence_transformers", reason="needs sentence-transformers, the peer")
    datasets = pytest.importorskip("datasets", reason="needs datasets, which the peer reads")
    from sentence_transformers.sentence_transformer.modules import Normalize, StaticEmbedding
    from sentence_transformers.util import mine_hard_negatives

    texts = [text.split() for text in {text_key(t): t for t in docstrings}.values() if "[" not in text]
    texts = [words for words in texts if 20 <= len(words) <= 60][:160]
    rows = [(" ".join(words[::3]), " ".join(words[side::2])) for words in texts for side in range(2)]
    tokenizer = load_tokenizer(model)
    weights = load_encoder(model).word_embeddings.weight.detach()
    peer = library.SentenceTransformer(
        modules=[StaticEmbedding(tokenizer, embedding_weights=weights), Normalize()], device="cpu"
    )
    theirs = mine_hard_negatives(
        datasets.Dataset.from_dict({"query": [q for q, _ in rows], "positive": [p for _, p in rows]}),
        peer, output_format="triplet", verbose=False, **options,
    )  # fmt: skip
    want: dict[str, list[str]] = {}
    for line in theirs:
        want.setdefault(line["query"], [])
        if line["negative"] not in want[line["query"]]:
            want[line["query"]].append(line["negative"])
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps({"query": q, "positive": p}) + "\n" for q, p in rows))
    flags = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    got = run(path, model, tmp_path / "out", *flags)
    assert len(got) == 320 and sum(map(len, want.values())) > 150
    for line in got:
        assert line["negatives"] == want.get(line["query"], [])

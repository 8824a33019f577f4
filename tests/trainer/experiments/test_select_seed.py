"""Several seeds a part of the way, the best to the end: which is taken, and that it is the run of its seed alone."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from data.ground.command import run_command
from data.ground.errors import ConfigError, OtherFormat
from tests.ranks import run_ranks
from tests.run_folder import steps_of, weights
from tests.trainer.support import float32_ds_config, recipe_values
from trainer.experiments import selection
from trainer.experiments.jobs import TIMINGS_FILE
from trainer.experiments.selection import SELECTION, make_plan, scores_at, select
from trainer.resilience.stopping import STOP_FILE_VARIABLE, Stopped
from trainer.select_seed import main


def test_the_highest_mean_is_taken() -> None:
    scores = {"4": {"a": 0.1, "b": 0.6}, "7": {"a": 0.5, "b": 0.4}, "2": {"a": math.nan, "b": 0.9}, "9": {"a": 0.45}}
    found = select(scores, 12)
    assert found["best"] == 7 and found["means"]["4"] == pytest.approx(0.35)
    assert "seed 7 has the highest mean at step 12: 0.4500, against 0.3500 with seed 4" in found["why"]
    assert select({"9": scores["9"], "7": scores["7"]}, 1)["best"] == 9  # equal: the first


def test_scores_are_those_of_the_step(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [
        {"step": 2, "loss": 1.0, "loss/1x16": 0.3},
        {"step": 2, "evaluation/dev/spearman/1x16": 0.1, "evaluation/d/recip_rank_10/1x16": 0.2},
        {"step": 4, "evaluation/dev/spearman/1x16": 0.3},
        {"step": 6, "evaluation/dev/spearman/1x16": None, "evaluation/dev/spearman/2x32": 0.2},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert scores_at(tmp_path, 2) == {"dev/spearman/1x16": 0.1}
    assert scores_at(tmp_path, 3) == {}
    undefined = scores_at(tmp_path, 6)  # it loses against every score
    assert math.isnan(undefined["dev/spearman/1x16"]) and undefined["dev/spearman/2x32"] == 0.2


def test_scores_of_a_later_version_are_not_overlooked(tmp_path: Path) -> None:
    """Without them a seed would seem to have no scores. Damaged lines, such as one cut off, are passed over."""
    scores = '{"step": 2, "evaluation/dev/spearman/1x16": 0.1}\n'
    damaged = '{"step": 2, "evaluation/dev/spearman/1x16": "x"}\n[]\n{"step": 2, "evalu'
    (tmp_path / "metrics.jsonl").write_text(scores + damaged)
    assert scores_at(tmp_path, 2) == {"dev/spearman/1x16": 0.1}
    (tmp_path / "metrics.jsonl").write_text(scores + scores.replace("{", '{"format": 2, '))
    with pytest.raises(OtherFormat, match=r"metrics\.jsonl line 2 is of format 2"):
        scores_at(tmp_path, 2)
    (tmp_path / "metrics.jsonl").write_text(scores.replace("{", '{"format": 1, '))
    assert scores_at(tmp_path, 2) == {"dev/spearman/1x16": 0.1}


@pytest.mark.parametrize("written", ["null", "NaN"])  # earlier versions wrote NaN, which is no JSON
def test_a_selection_whose_scores_are_not_defined(written: str, tmp_path: Path) -> None:
    scores = {"4": {"a": math.nan}, "7": {"a": 0.5}}
    selection._write(tmp_path / SELECTION, {"identity": {}, "scores": scores, **select(scores, 3)})
    text = (tmp_path / SELECTION).read_text()
    assert json.loads(text, parse_constant=pytest.fail)["means"] == {"4": None, "7": 0.5}
    (tmp_path / SELECTION).write_text(text.replace("null", written))
    found = selection._read(tmp_path / SELECTION)
    assert math.isnan(found["scores"]["4"]["a"]) and math.isnan(found["means"]["4"]) and found["best"] == 7
    assert select(found["scores"], 3)["best"] == 7
    assert "seed 4: nan" in selection.selection_text({**found, "model": "m"})


@pytest.fixture(scope="module")
def folder(tuple_shards: Path, docstrings: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seeds")
    values = recipe_values(
        tuple_shards,
        optim={"lr": 1e-2, "eps": 1e-8},
        train={"steps": 5},
        engine={"ds_config": str(float32_ds_config(folder, 0))},
    )
    (folder / "recipe.toml").write_text(tomli_w.dumps(values))
    texts = [text.replace("\n", " ").replace("\t", " ") for text in docstrings[:60]]
    dev = [f"{i % 6}\t{texts[i]}\t{texts[i + 1] if i % 6 < 3 else texts[i][:60]}\n" for i in range(59)]
    (folder / "dev.tsv").write_text("".join(dev))
    return folder


def arguments(folder: Path, *more: str, seeds: str = "3 8", output: str = "out") -> list[str]:
    options = ["--share", "0.4", "--sts", str(folder / "dev.tsv"), "--output", str(folder / output)]
    return [str(folder / "recipe.toml"), "--seeds", *seeds.split(), *options, *more]


@pytest.mark.launcher
def test_the_best_is_the_run_of_its_seed_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = folder / "out"
    # Asked to end before anything, and after the first seed.
    (folder / "stop").touch()
    monkeypatch.setenv(STOP_FILE_VARIABLE, str(folder / "stop"))
    with pytest.raises(Stopped, match="stopped before seed_3"):
        main(arguments(folder))
    (folder / "stop").unlink()

    def then_stop(run: Path, step: int) -> dict[str, float]:
        (folder / "stop").touch()
        return scores_at(run, step)

    with monkeypatch.context() as context, pytest.raises(Stopped, match="stopped before seed_8"):
        context.setattr(selection, "scores_at", then_stop)
        main(arguments(folder))
    assert list(json.loads((output / SELECTION).read_text())["scores"]) == ["3"]
    (folder / "stop").unlink()
    main(arguments(folder))
    timings = (output / TIMINGS_FILE).read_text()
    assert [json.loads(line)["name"] for line in timings.splitlines()] == ["seed_3", "seed_8", "the best"]
    found = json.loads((output / SELECTION).read_text())
    assert list(found["scores"]) == ["3", "8"] and found["identity"]["step"] == 2
    assert len(set(found["means"].values())) == 2
    best = max(found["means"], key=found["means"].get)
    other = "3" if best == "8" else "8"
    assert found["best"] == int(best) and f"its model: {found['model']}" in capsys.readouterr().out
    assert (output / f"seed_{best}" / "DONE").is_file() and not (output / f"seed_{other}" / "DONE").exists()
    assert not list(output.glob("seed_*/checkpoints"))

    alone = ["--config", str(folder / "recipe.toml"), f"--run.seed={best}", f"--run.output={folder / 'alone'}"]
    run_ranks("trainer.finetune", *alone, ranks=1)
    got, want = weights(Path(found["model"]).parent), weights(folder / "alone")
    assert got.keys() == want.keys() and all((got[name] == want[name]).all() for name in want)
    # Negative control: the seed changes them.
    losses = [steps_of(output / f"seed_{seed}")[0]["loss"] for seed in "38"]
    assert losses[0] != losses[1]

    main(arguments(folder))  # nothing is left to do
    assert (output / TIMINGS_FILE).read_text() == timings
    with pytest.raises(ConfigError, match="other seeds or steps"):
        main(arguments(folder, seeds="3 9"))


@pytest.mark.parametrize(
    ("more", "seeds", "message"),
    [
        ([], "3", "two or more"),
        ([], "3 3", "two or more"),
        (["--share", "1"], "1 2", "between 0 and 1"),
        (["--share", "0.01"], "1 2", "nothing to compare"),
        (["--run.seed=4"], "1 2", "decides itself"),
        (["--train.nothing=4"], "1 2", "unknown key"),
        (["--sts", "absent.tsv"], "1 2", "absent.tsv"),
        (["--sts", "absent.tsv", "--split", "dev"], "1 2", "--split is read with --beir alone; give --beir, or leave"),
        (["--ranks", "0"], "1 2", "--ranks"),
        (["--data.shards=https://me:geheim@h/a"], "1 2", "data.shards=https://***@h/a holds a password"),
    ],
)
def test_user_errors_leave_nothing(
    more: list[str], seeds: str, message: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        run_command(lambda: main(arguments(folder, *more, seeds=seeds, output="mistake")))
    assert end.value.code == 2 and message in capfd.readouterr().err
    assert not (folder / "mistake").exists()


def test_a_recipe_without_a_development_set_is_refused(folder: Path) -> None:
    args = argparse.Namespace(
        recipe=str(folder / "recipe.toml"), seeds=[1, 2], share=0.5, sts=[], beir=[], split="", output="x", ranks=1
    )
    with pytest.raises(ConfigError, match="nothing to compare seeds on"):
        make_plan(args, [])
    assert make_plan(args, ["--evaluation.sts=" + json.dumps([str(folder / "dev.tsv")])]).step == 2


def test_a_development_set_that_changes_is_another_selection(folder: Path, tmp_path: Path) -> None:
    """But not for the selection of an earlier version, which does not know the contents of its sets."""
    dev = tmp_path / "dev.tsv"
    dev.write_bytes((folder / "dev.tsv").read_bytes())

    def identity() -> dict[str, Any]:
        args = argparse.Namespace(
            recipe=str(folder / "recipe.toml"),
            seeds=[1, 2],
            share=0.5,
            sts=[str(dev)],
            beir=[],
            split="",
            output=str(tmp_path / "out"),
            ranks=1,
        )
        return dict(make_plan(args, []).identity)

    (tmp_path / "out").mkdir()
    found = identity()
    (tmp_path / "out" / SELECTION).write_text(json.dumps({"identity": found, "scores": {}}))
    assert identity() == found, "negative control"
    dev.write_text(dev.read_text().replace("0\t", "5\t", 1))
    with pytest.raises(ConfigError, match="other contents of the development sets"):
        identity()
    before = {key: value for key, value in found.items() if key != "tests_sha256"}
    (tmp_path / "out" / SELECTION).write_text(json.dumps({"identity": before, "scores": {}}))
    identity()

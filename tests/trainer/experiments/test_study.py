"""Studies: the file is checked, the real command trains and evaluates, and the report comes from raw results alone."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from data.ground.command import run_command
from data.ground.errors import ConfigError, DataError
from models.encoder import base_of, build_masked_lm
from models.settings import EmbeddingSettings
from models.sizes import Size
from tests import ROOT
from tests.beir import write_beir
from tests.launcher import run_process
from tests.trainer.support import LADDER, MODEL, float32_ds_config, recipe_values
from trainer import evaluate
from trainer import study as command
from trainer.build import build_model, open_shards
from trainer.evaluation import arguments
from trainer.evaluation.results.raw import RawResults, RawTask, read_raw, write_raw
from trainer.evaluation.tasks.retrieval import RunScores
from trainer.evaluation.tasks.sts import STSTask
from trainer.experiments import checks, study_jobs
from trainer.experiments.collected import AVERAGE, collect
from trainer.experiments.jobs import Job, RunFailed, Work
from trainer.experiments.plan import load_study, results_of, runs_of
from trainer.experiments.report import comparison_table, write_report
from trainer.exporting.model_folder import write_model_folder
from trainer.resilience.stopping import Stopped

pytestmark = pytest.mark.long

SIZES = [Size(n, d) for n, d in LADDER]


def write_toml(path: Path, values: dict) -> Path:
    import tomli_w

    path.write_text(tomli_w.dumps(values))
    return path


@pytest.fixture
def study_file(tmp_path: Path) -> Path:
    """Two arms, a baseline of separate sizes among them; nothing that it names needs to exist."""
    recipe = recipe_values("shards", data={"shards": ["shards"]})
    recipe["model"] = {"source": "anything", "ladder": LADDER}
    write_toml(tmp_path / "srl.toml", recipe)
    values = {
        "study": {
            "output": str(tmp_path / "out"),
            "seeds": [1, 2],
            "ladder": LADDER,
            "baseline": "tiny/separate",
            "grid": True,
        },
        "evaluation": {"sts": ["pairs.tsv"], "beir": ["docs"]},
        "backbones": {"tiny": {"source": "tiny"}},
        "methods": {
            "separate": {"recipe": "srl.toml", "each_size": True},
            "srl": {"recipe": "srl.toml"},
            "no_kl": {"recipe": "srl.toml", "settings": {"objective.kl": "none"}},
        },
        "ablations": [{"name": "KL", "with": "tiny/srl", "without": "tiny/no_kl"}],
    }
    return write_toml(tmp_path / "study.toml", values)


def changed(path: Path, section: str, **values: object) -> Path:
    import tomllib

    content = tomllib.loads(path.read_text())
    table = content
    for part in section.split(".") if section else ():
        table = table.setdefault(part, {})
    table.update(values)
    return write_toml(path.with_name("changed.toml"), content)


def test_runs_are_the_product(study_file: Path) -> None:
    study = load_study(study_file)
    runs, results = runs_of(study), results_of(study)
    assert len(runs) == len(results) == 2 * (len(LADDER) + 1 + 1)
    assert len({run.folder for run in runs}) == len(runs)
    assert [run.recipe.run.seed for run in runs] == [1] * 5 + [2] * 5
    separate = {result.sizes: result.run.recipe.objective for result in results if result.arm == "tiny/separate"}
    assert {text: objective.size for text, objective in separate.items()} == {str(s): str(s) for s in SIZES}
    assert {objective.sizes for objective in separate.values()} == {"one"}
    by_arm = {result.arm: result for result in results}
    assert by_arm["tiny/no_kl"].run.recipe.objective.kl == "none" != by_arm["tiny/srl"].run.recipe.objective.kl
    assert by_arm["tiny/srl"].sizes.count(",") == len(LADDER) ** 2 - 1


def test_backbones_start_from_each_other(study_file: Path) -> None:
    masked = recipe_values("shards", objective={"name": "masked"})
    write_toml(study_file.with_name("mlm.toml"), masked)
    path = changed(
        study_file,
        "backbones",
        smae={"recipe": "mlm.toml", "from": "start"},
        start={"recipe": "mlm.toml", "settings": {"train.steps": 2}},
    )
    runs = runs_of(load_study(path))
    assert [run.name for run in runs[:2]] == ["pretrain/start", "pretrain/smae"]
    start, smae = runs[0].recipe, runs[1].recipe
    assert start.model.config and not start.model.source and start.train.steps == 2
    assert smae.model.source == str(runs[0].folder / "model") and not smae.model.config
    sources = {run.recipe.model.source for run in runs[2:]}
    assert sources == {"tiny", str(runs[0].folder / "model"), str(runs[1].folder / "model")}


def made_by(name: str, **sections: dict) -> dict:
    """A recipe of an objective that makes a backbone."""
    return recipe_values("shards", objective={"name": name}, **sections)


def test_a_backbone_is_made_by_its_recipes_objective(study_file: Path) -> None:
    """Pre-trained or distilled, from a given model or from another of the study."""
    write_toml(study_file.with_name("mlm.toml"), made_by("masked"))
    write_toml(study_file.with_name("distil.toml"), made_by("distill", teacher={"model": "tiny"}))
    path = changed(
        study_file,
        "backbones",
        small={"recipe": "distil.toml", "from": "tiny", "settings": {"teacher.gram_weight": 0.5}},
        mlm={"recipe": "mlm.toml", "from": "tiny"},
        smaller={"recipe": "distil.toml", "from": "mlm"},
    )
    runs = {run.name: run for run in runs_of(load_study(path))}
    made = {name: run for name, run in runs.items() if name.startswith("pretrain/")}
    assert {name: run.module for name, run in made.items()} == {
        "pretrain/small": "trainer.distill",
        "pretrain/mlm": "trainer.pretrain",
        "pretrain/smaller": "trainer.distill",
    }
    small = made["pretrain/small"].recipe
    assert small.model.source == "tiny" and not small.model.config
    assert small.teacher.model == "tiny" and small.teacher.gram_weight == 0.5
    assert made["pretrain/smaller"].recipe.model.source == str(made["pretrain/mlm"].folder / "model")
    assert runs["runs/small/srl/seed_1"].recipe.model.source == str(made["pretrain/small"].folder / "model")
    assert {run.module for name, run in runs.items() if name not in made} == {"trainer.finetune"}


@pytest.mark.parametrize("objective", ["masked", "distill"])
def test_what_fine_tunes_makes_no_backbone_and_the_reverse(study_file: Path, objective: str) -> None:
    write_toml(study_file.with_name("other.toml"), made_by(objective))
    for section, values, words in (
        ("backbones", {"b": {"recipe": "srl.toml"}}, "pretrain/b.* needs a recipe with 'masked' or 'distill'"),
        ("methods", {"m": {"recipe": "other.toml"}}, "runs/tiny/m/seed_1.* needs a recipe with 'contrastive'"),
    ):
        with pytest.raises(ConfigError, match=words):
            runs_of(load_study(changed(study_file, section, **values)))
    runs_of(load_study(changed(study_file, "backbones", b={"recipe": "other.toml", "from": "tiny"})))


@pytest.fixture
def as_it_is(study_file: Path) -> Path:
    """A study with a method that trains nothing, on a given model and on one that is made here."""
    write_toml(study_file.with_name("distil.toml"), made_by("distill", teacher={"model": "tiny"}))
    path = changed(study_file, "methods", as_it_is={})
    path = changed(path, "study", grid=False)
    path = changed(path, "backbones", small={"recipe": "distil.toml", "from": "tiny"})
    return path.rename(path.with_name("as_it_is.toml"))


def test_without_a_recipe_the_backbone_is_evaluated_once(as_it_is: Path) -> None:
    study = load_study(as_it_is)
    runs, results = runs_of(study), results_of(study)
    given, made = (result for result in results if result.arm.endswith("/as_it_is"))
    assert (given.seed, given.run, given.model) == (1, None, "tiny")
    assert made.seed == 1 and made.run is not None and made.run.name == "pretrain/small"
    assert made.model == str(study.output / "pretrain" / "small" / "model") == str(made.run.folder / "model")
    assert given.sizes == made.sizes == ",".join(f"{n}x{d}" for n, d in LADDER)  # the given model's ladder is its own
    assert [run.name for run in runs].count("pretrain/small") == 1
    assert not any("as_it_is" in run.name for run in runs)
    trained = {result.name: result for result in results if result not in (given, made)}
    assert len(runs) == len(trained) + 1 and {result.sizes for name, result in trained.items() if "srl" in name} == {
        "ladder"
    }
    words = study_jobs.evaluation_command(study, given)
    assert words[words.index("--model") + 1] == "tiny" and "--max-length" not in words


def test_jobs_of_what_is_not_trained(as_it_is: Path) -> None:
    """A given model is evaluated at once, one that is made here after its run, and the clock runs last and alone."""
    study = load_study(as_it_is)
    runs, results = study_jobs.chosen(study, ["tiny/as_it_is", "small/as_it_is"])
    assert [run.name for run in runs] == ["pretrain/small"] and len(results) == 2
    jobs = {job.name: job for job in study_jobs.jobs_of(study, runs, results, Work(study.output))}
    assert list(jobs) == [
        "evaluate tiny/as_it_is/seed_1", "pretrain/small", "evaluate small/as_it_is/seed_1", "latency",
    ]  # fmt: skip
    assert not jobs["evaluate tiny/as_it_is/seed_1"].needs
    assert jobs["evaluate small/as_it_is/seed_1"].needs == {"pretrain/small"}
    assert jobs["latency"].needs == jobs.keys() - {"latency"}
    timed = list(map(str, jobs["latency"].command()))
    assert timed[timed.index("--model") + 1] == "tiny" and timed[timed.index("--sizes") + 1] == results[0].sizes

    # Once it is there, only another model or another command is evaluated again.
    for number, result in enumerate(results):
        result.folder.mkdir(parents=True)
        (result.folder / "raw.jsonl.gz").touch()
        assert not study_jobs.is_evaluated(study, result), "there is no completion marker"
        jobs[f"evaluate {result.name}"].before()
        jobs[f"evaluate {result.name}"].after()
        assert study_jobs.is_evaluated(study, result) == (number == 0), "small is not made yet"
    runs[0].folder.mkdir(parents=True)
    (runs[0].folder / "DONE").touch()
    assert study_jobs.is_evaluated(study, results[1])
    (runs[0].folder / "model").mkdir()
    (runs[0].folder / "model" / "heads.safetensors").write_bytes(b"made again")
    assert not study_jobs.is_evaluated(study, results[1])
    shorter = load_study(changed(as_it_is, "evaluation", max_length=48))
    assert not study_jobs.is_evaluated(shorter, results[0])
    words = study_jobs.evaluation_command(shorter, results[0])
    assert words[words.index("--max-length") + 1] == "48"


def test_tests_that_change_are_evaluated_again(as_it_is: Path, tmp_path: Path) -> None:
    """Each file that an evaluation reads, and no other. A change during an evaluation is seen, too."""
    docs = write_beir(tmp_path / "docs", ["a text"], ["a query"])
    files = {name: tmp_path / name for name in ("pairs.tsv", "subsets.tsv")}
    files |= {name: docs / name for name in ("corpus.jsonl", "queries.jsonl", "qrels/test.tsv")}
    for name in ("pairs.tsv", "subsets.tsv"):
        files[name].write_text("before")
    tests = {"sts": [str(files["pairs.tsv"])], "sts_subsets": str(files["subsets.tsv"]), "beir": [str(docs)]}
    study = load_study(changed(as_it_is, "evaluation", **tests))
    result = next(result for result in results_of(study) if result.run is None)
    result.folder.mkdir(parents=True)
    (result.folder / "raw.jsonl.gz").touch()

    def job() -> Job | None:
        jobs = study_jobs.jobs_of(study, [], [result], Work(study.output))
        return next((job for job in jobs if job.name == f"evaluate {result.name}"), None)

    for path in files.values():
        again = job()
        assert again is not None
        again.before()
        again.after()
        assert job() is None
        (docs / "README.md").write_text(f"not {path.name}")
        assert job() is None, "negative control: no evaluation reads it"
        path.write_text(f"{path.read_text()}\n")
    again = job()
    assert again is not None
    again.before()
    files["pairs.tsv"].write_text("changed during the evaluation")
    again.after()
    assert job() is not None


def test_a_smaller_ladder_gives_neither_the_control_nor_the_latency(as_it_is: Path) -> None:
    """They are of the study's sizes, and the first method that has all of them makes them."""
    path = changed(as_it_is, "evaluation", untrained=True)
    path = changed(path, "methods", separate={"ladder": [LADDER[0], LADDER[-1]]}, as_it_is={})
    study = load_study(path)
    runs, results = study_jobs.chosen(study, None)
    assert results[0].arm == "tiny/separate"
    assert [result.arm for result in results if result.untrained] == ["tiny/srl", "small/srl"]
    *_, latency = study_jobs.jobs_of(study, runs, results, Work(study.output))
    words = list(map(str, latency.command()))
    assert words[words.index("--sizes") + 1] == ",".join(map(str, SIZES))
    runs, results = study_jobs.chosen(study, ["tiny/separate"])
    assert "latency" not in [job.name for job in study_jobs.jobs_of(study, runs, results, Work(study.output))]


def test_latency_is_measured_again_at_the_sizes_of_another_ladder_and_with_another_model(as_it_is: Path) -> None:
    study = load_study(as_it_is)
    timed = next(each.model for each in study_jobs.chosen(study, None)[1] if study.arms[each.arm].has_all_sizes)

    def measured(sizes: Sequence[Size | str], model: str = timed) -> bool:
        path = study.output / "results" / "latency.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"model": model, "sizes": {str(size): {"milliseconds": 1.5} for size in sizes}}))
        jobs = study_jobs.jobs_of(study, *study_jobs.chosen(study, None), Work(study.output))
        return "latency" not in [job.name for job in jobs]

    assert measured(SIZES)
    assert not measured(SIZES[:-1])
    assert not measured([*SIZES, Size(1, 2)])
    assert not measured(SIZES, "another/model")
    with pytest.raises(DataError, match=r"latency\.json is damaged \(size 'abc' .*; remove it"):
        measured(["abc"])


def test_a_list_names_what_is_only_evaluated(as_it_is: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = load_study(as_it_is)
    results = results_of(study)
    given = next(result for result in results if result.run is None)
    given.folder.mkdir(parents=True)
    (given.folder / "raw.jsonl.gz").touch()
    study_jobs.marker_of(given).write_text(json.dumps(study_jobs.marker_content(study, given)))
    command.main([str(as_it_is), "--list"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "pretrain/small\tto do"
    assert lines[-2:] == ["results/tiny/as_it_is/seed_1\tevaluated", "results/small/as_it_is/seed_1\tto do"]
    assert len(lines) == len(runs_of(study)) + 2
    study_jobs.marker_of(given).write_text(json.dumps({"command": [], "weights_sha256": "", "tests_sha256": ""}))
    command.main([str(as_it_is), "--list"])
    assert "results/tiny/as_it_is/seed_1\tto be evaluated again" in capsys.readouterr().out.splitlines()


@pytest.fixture
def given_model(tmp_path: Path, tiny_tokenizer: Any) -> Path:
    """A model folder with a head for a depth."""
    torch.manual_seed(0)
    model = build_masked_lm(MODEL, vocab_size=len(tiny_tokenizer), pad_token_id=tiny_tokenizer.pad_token_id)
    heads = torch.nn.ModuleDict({"1": torch.nn.Linear(48, 48)})
    settings = EmbeddingSettings("mean", ladder=tuple((n, d) for n, d in LADDER))
    write_model_folder(tmp_path / "given", base_of(model), tiny_tokenizer, settings, heads)
    return tmp_path / "given"


def test_what_is_given_is_looked_at_first(as_it_is: Path, given_model: Path, tmp_path: Path) -> None:
    def check(path: Path) -> None:
        study = load_study(path)
        checks.check_given(study, runs_of(study), results_of(study))

    def refused(path: Path, words: str) -> None:
        with pytest.raises(ConfigError, match=words):
            check(path)

    sound = changed(as_it_is, "backbones", tiny={"source": str(given_model)}).rename(tmp_path / "given.toml")
    check(sound)  # negative control
    absent = str(tmp_path / "absent")
    refused(changed(sound, "backbones", tiny={"source": absent}), "model.source names .*absent, which is not there")
    refused(changed(sound, "backbones.small", settings={"teacher.model": absent}), "teacher.model names .*absent")
    refused(changed(sound, "study", ladder=[[1, 16], [2, 64]]), "evaluated at 2x64, which outgrows .* of 3x48")
    bare = tmp_path / "bare"
    shutil.copytree(given_model, bare, ignore=shutil.ignore_patterns("barista.json"))
    refused(changed(sound, "backbones", tiny={"source": str(bare)}), "does not say how it pools")
    only = changed(sound, "methods", as_it_is={"backbones": ["lost"]}).rename(tmp_path / "only.toml")
    refused(changed(only, "backbones", lost={"source": absent}), "absent, which is not there")
    # Masked pre-training would lose heads, though another run lies between.
    write_toml(tmp_path / "mlm.toml", made_by("masked"))
    refused(changed(sound, "backbones", mlm={"recipe": "mlm.toml", "from": "small"}), "has heads .* would lose")
    (given_model / "heads.safetensors").unlink()
    check(changed(sound, "backbones", mlm={"recipe": "mlm.toml", "from": "small"}))


def test_a_teacher_that_the_study_makes_comes_first(as_it_is: Path, given_model: Path, tmp_path: Path) -> None:
    def taught_by(**teachers: str) -> Path:
        tables = {
            name: {"recipe": "distil.toml", "from": "tiny", "settings": {"teacher.model": made(teacher)}}
            for name, teacher in teachers.items()
        }
        return changed(path, "backbones", **tables)

    def made(name: str) -> str:
        return str(tmp_path / "out" / "pretrain" / name / "model")

    path = changed(as_it_is, "backbones", tiny={"source": str(given_model)}).rename(tmp_path / "given.toml")
    study = load_study(taught_by(pupil="small"))
    runs, results = study_jobs.chosen(study, ["pupil/as_it_is"])
    assert [run.name for run in runs] == ["pretrain/small", "pretrain/pupil"]
    jobs = {job.name: job for job in study_jobs.jobs_of(study, runs, results, Work(study.output))}
    assert jobs["pretrain/pupil"].needs == {"pretrain/small"}
    checks.check_given(study, runs, results)
    study = load_study(taught_by(one="other", other="one"))
    with pytest.raises(ConfigError, match="pretrain/one reads the model of pretrain/other, which waits for it"):
        checks.check_given(study, *study_jobs.chosen(study, ["one/as_it_is"]))


def test_heads_stay_from_a_backbone_to_its_arm(study_file: Path, given_model: Path, tuple_shards: Path) -> None:
    """The model that an arm trains has the maps of the model that it starts from, and a single size its own depth's."""
    path = changed(study_file, "backbones", tiny={"source": str(given_model)}).rename(
        study_file.with_name("heads.toml")
    )
    settings = {"data.shards": [str(tuple_shards)]}
    study = load_study(changed(path, "settings", **settings))
    for result in results_of(study):
        if result.seed == 1 and result.run is not None and result.arm != "tiny/no_kl":
            recipe = result.run.recipe
            encoder = build_model(recipe, open_shards(recipe)).encoder
            assert set(encoder.heads) == {"1"}, result.name
            assert all(parameter.requires_grad for parameter in encoder.heads.parameters())


@pytest.mark.launch
def test_chosen_arms_bring_what_they_start_from(study_file: Path) -> None:
    write_toml(study_file.with_name("mlm.toml"), recipe_values("shards", objective={"name": "masked"}))
    path = changed(
        study_file,
        "backbones",
        start={"recipe": "mlm.toml"},
        smae={"recipe": "mlm.toml", "from": "start"},
        other={"recipe": "mlm.toml", "from": "start"},
    )
    study = load_study(path)
    runs, results = study_jobs.chosen(study, ["smae/srl"])
    assert [run.name for run in runs] == ["pretrain/start", "pretrain/smae"] + [r.run.name for r in results]
    assert [result.run.name for result in results] == ["runs/smae/srl/seed_1", "runs/smae/srl/seed_2"]
    everything = study_jobs.chosen(study, None)
    assert len(everything[0]) == len(runs_of(study)) and len(everything[1]) == len(results_of(study))
    with pytest.raises(ConfigError, match=r"the arms of .* are tiny/separate"):
        study_jobs.chosen(study, ["smae/none"])


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        ("study", {"colour": "red"}, "unknown key study.colour"),
        ("", {"colours": {}}, "unknown key colours"),
        ("study", {"seeds": [1, 1]}, "study.seeds"),
        ("study", {"seeds": "1"}, "must be a list"),
        ("study", {"baseline": "tiny/none"}, "the arms are tiny/separate"),
        ("study", {"ladder": [[2, 32], [1, 16]]}, "study.ladder: the ladder does not increase"),
        ("study", {"ranks": 0}, "study.ranks"),
        ("evaluation", {"sts": [], "beir": []}, "evaluates nothing"),
        ("evaluation", {"dtype": "float8"}, "evaluation.dtype"),
        ("evaluation", {"sts": ["a/x.tsv", "b/x.tsv"]}, "two of the tasks are named 'x'"),
        ("backbones", {"tiny": {}}, "either source"),
        ("backbones", {"a b": {"source": "x"}}, "becomes a folder"),
        ("backbones", {"a": {"recipe": "r", "from": "b"}, "b": {"recipe": "r", "from": "a"}}, "circle"),
        ("backbones", {"a": {"recipe": "r", "from": "nobody"}}, "no backbone of this study"),
        ("methods.srl", {"backbones": ["other"]}, "no backbone"),
        ("methods.srl", {"settings": {"run.seed": 3}}, "decides itself"),
        ("methods.srl", {"settings": {"objective.nothing": 3}}, "unknown key objective.nothing"),
        ("methods.srl", {"settings": {"train.steps": "many"}}, "train.steps"),
        ("methods.srl", {"recipe": "absent.toml"}, "absent.toml"),
        ("methods.srl", {"settings": {"objective.name": "masked"}}, "needs a recipe with"),
        (
            "methods",
            {"m": {"each_size": True}},
            "methods.m has no recipe, so it trains nothing; give one, or remove each",
        ),
        ("methods", {"m": {"settings": {"train.steps": 3}}}, "give one, or remove settings"),
        ("methods", {"m": {"recipe": ""}}, "methods.m.recipe is missing"),
        ("methods", {"m": {"ladder": [[1, 16], [4, 64]]}}, "ladder ends with 4x64, which outgrows the backbones' 3x48"),
        (
            "",
            {"ablations": [{"name": "KL", "with": "tiny/srl", "without": "tiny/no_kl", "task": "docs"}]},
            "unknown key ablations[0].task",
        ),
        (
            "",
            {
                "ablations": [
                    {"name": "KL", "with": "tiny/srl", "without": arm} for arm in ("tiny/no_kl", "tiny/separate")
                ]
            },
            "two ablations are called 'KL'",
        ),
        (
            "",
            {
                "backbones": {"tiny": {"source": "tiny"}, "tiny_no": {"source": "tiny"}},
                "methods": {name: {"recipe": "srl.toml"} for name in ("separate", "no_kl", "kl")},
            },
            "the figures of the arms 'tiny/no_kl' and 'tiny_no/kl' would be files of the same name",
        ),
        (
            "",
            {"ablations": [{"name": name, "with": "tiny/srl", "without": "tiny/no_kl"} for name in ("a b", "a_b")]},
            "the figures of the ablations 'a b' and 'a_b' would be files of the same name",
        ),
        (
            "settings",
            {"data.shards": ["https://me:geheim@h/a"]},
            'run runs/tiny/separate/seed_1/1x16: data.shards=["https://***@h/a"] holds a password',
        ),
        ("evaluation", {"beir": [], "bm25": True}, "evaluation.bm25 is read with evaluation.beir alone"),
        ("evaluation", {"beir": [], "split": "test"}, "evaluation.split is read with evaluation.beir alone"),
        ("evaluation", {"sts": [], "sts_subsets": "s.tsv"}, "evaluation.sts_subsets is read with evaluation.sts alone"),
        ("evaluation", {"max_length": 3}, "evaluation.max_length = 3 must be at least 4"),
        ("evaluation", {"max_length": "48"}, "must be a whole number"),
    ],
)
def test_errors_in_the_file(study_file: Path, section: str, values: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        runs_of(load_study(changed(study_file, section, **values)))
    runs_of(load_study(study_file))  # negative control


def test_a_study_names_variables_in_place_of_secrets(study_file: Path) -> None:
    """Or leaves them in the recipe, which is no part of a command."""
    address = "https://me:${BARISTA_P}@h/a"
    runs = runs_of(load_study(changed(study_file, "settings", **{"data.shards": [address]})))
    assert {run.recipe.data.shards[0] for run in runs} == {address}
    recipe = study_file.with_name("srl.toml")
    recipe.write_text(recipe.read_text().replace('"shards"', '"https://me:geheim@h/a"'))
    runs = runs_of(load_study(study_file))
    assert {run.recipe.data.shards[0] for run in runs} == {"https://me:geheim@h/a"}
    assert not any("geheim" in word for run in runs for word in run.overrides)


# Reports from made-up raw results


QUERIES = [f"q{i}" for i in range(30)]


def _fill(study_file: Path, *, gain: float = 0.2) -> dict[tuple[str, int, Size], dict[str, np.ndarray]]:
    """Raw results of every run: SRL is `gain` above the rest in nDCG, and nothing else differs but by chance."""
    study = load_study(study_file)
    made = {}
    rng = np.random.default_rng(0)
    gold = tuple(float(i) for i in range(40))
    hardness = rng.random(len(QUERIES)) * 0.5
    for result in results_of(study):
        raw = RawResults()
        raw.tasks["pairs"] = RawTask("pairs", "sts", gold=gold)
        sizes = SIZES if result.sizes == "ladder" else [Size.parse(text) for text in result.sizes.split(",")]
        for size in sizes:
            ndcg = hardness + 0.02 * rng.random(len(QUERIES)) + (gain if result.arm == "tiny/srl" else 0.0)
            cosines = np.array(gold) + 8 * rng.normal(size=len(gold))
            raw.add_sts("trained", STSTask("pairs", (("", ""),) * 40, gold), size, cosines)
            scores = {query: {"ndcg_cut_10": float(value)} for query, value in zip(QUERIES, ndcg)}
            raw.add_retrieval("trained", "docs", (size.layers, size.dim), RunScores({}, scores, 30), ["ndcg_cut_10"])
            made[result.arm, result.seed, size] = {"ndcg": ndcg, "cosine": cosines}
        result.folder.mkdir(parents=True)
        write_raw(raw, result.folder / "raw.jsonl.gz")
    return made


def test_report_has_the_numbers_of_the_raw_results(study_file: Path) -> None:
    made = _fill(study_file)
    study = load_study(study_file)
    (study.output / "results" / "latency.json").write_text(
        json.dumps({"model": "m", "sizes": {str(size): {"milliseconds": 1.5 + i} for i, size in enumerate(SIZES)}})
    )
    report = write_report(study)
    rows = list(csv.DictReader(io.StringIO((report.parent / "report.csv").read_text())))
    found = {(row["arm"], row["task"], row["metric"], row["size"]): row for row in rows}

    # By hand, with scipy: retrieval at one size, seeds averaged within queries.
    size = SIZES[0]
    ours = np.mean([made["tiny/srl", seed, size]["ndcg"] for seed in (1, 2)], axis=0)
    base = np.mean([made["tiny/separate", seed, size]["ndcg"] for seed in (1, 2)], axis=0)
    row = found["tiny/srl", "docs", "ndcg_cut_10", str(size)]
    assert float(row["mean"]) == pytest.approx(ours.mean())
    assert float(row["p"]) == pytest.approx(stats.ttest_rel(ours, base).pvalue)
    assert row["significant"] == "†" and row["n"] == "30" and row["seeds"] == "2"
    low, high = stats.t.interval(
        0.95,
        1,
        loc=ours.mean(),
        scale=stats.sem([made["tiny/srl", seed, size]["ndcg"].mean() for seed in (1, 2)]),
    )
    assert (float(row["ci95_low"]), float(row["ci95_high"])) == pytest.approx((low, high))

    # STS, by Fisher's formula.
    def z(arm: str) -> float:
        gold = np.arange(40.0)
        return float(
            np.mean([np.arctanh(stats.spearmanr(made[arm, s, size]["cosine"], gold).statistic) for s in (1, 2)])
        )

    statistic = (z("tiny/srl") - z("tiny/separate")) / np.sqrt(2 / 37)
    row = found["tiny/srl", "pairs", "spearman", str(size)]
    assert float(row["statistic"]) == pytest.approx(statistic)
    assert float(row["p"]) == pytest.approx(2 * stats.norm.sf(abs(statistic)))

    # The average over sizes is tested over queries too.
    ours = np.mean([made["tiny/srl", seed, s]["ndcg"] for seed in (1, 2) for s in SIZES], axis=0)
    base = np.mean([made["tiny/separate", seed, s]["ndcg"] for seed in (1, 2) for s in SIZES], axis=0)
    row = found["tiny/srl", "docs", "ndcg_cut_10", AVERAGE]
    assert float(row["p"]) == pytest.approx(stats.ttest_rel(ours, base).pvalue)
    # The grid is in the table of numbers, where separate models have no place.
    assert ("tiny/srl", "docs", "ndcg_cut_10", "1x48") in found
    assert ("tiny/separate", "docs", "ndcg_cut_10", "1x48") not in found

    text = report.read_text()
    assert "Not complete" not in text and "† (<0.0001)" in text and "## Ablations" in text and "## Latency" in text
    tex = (report.parent / "report.tex").read_text()
    assert r"tiny/no\_kl" in tex and r"$^{\dagger}$" in tex and tex.count(r"\begin{tabular}") == 3
    figures = {path.name for path in (report.parent / "figures").iterdir()}
    assert {
        "docs_by_size.png",
        "docs_by_dimension.png",
        "docs_by_latency.png",
        "docs_delta_tiny_srl_minus_tiny_no_kl.png",
        "ablation_KL.png",
    } <= figures
    assert all(f"figures/{name}" in text for name in figures)


@pytest.mark.usefixtures("undrawn")
def test_one_evaluation_meets_the_mean_over_seeds(as_it_is: Path) -> None:
    """By hand, with scipy: the only run of an arm against each seed's of another, differences averaged."""
    made = _fill(as_it_is)
    study = load_study(as_it_is)
    report = write_report(study)
    rows = csv.DictReader(io.StringIO((report.parent / "report.csv").read_text()))
    found = {(row["arm"], row["metric"], row["size"]): row for row in rows}
    for size in SIZES:
        row = found["tiny/as_it_is", "ndcg_cut_10", str(size)]
        once = made["tiny/as_it_is", 1, size]["ndcg"]
        differences = np.mean([once - made["tiny/separate", seed, size]["ndcg"] for seed in (1, 2)], axis=0)
        assert row["seeds"] == "1" and row["ci95_low"] == "" and row["n"] == "30"
        assert float(row["difference"]) == pytest.approx(differences.mean())
        assert float(row["p"]) == pytest.approx(stats.ttest_1samp(differences, 0.0).pvalue)
        assert found["tiny/separate", "ndcg_cut_10", str(size)]["seeds"] == "2"
    assert float(found["tiny/as_it_is", "ndcg_cut_10", AVERAGE]["p"]) <= 1
    text = report.read_text()
    assert "Nothing is fine-tuned for tiny/as_it_is, small/as_it_is: one evaluation each" in text
    assert "missing" not in text


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("alone", [False, True])
def test_the_control_of_every_backbone_is_reported(as_it_is: Path, alone: bool) -> None:
    """By its backbone's name where there are several. BM25, of which there is one, has no such name."""
    path = changed(as_it_is, "evaluation", untrained=True, bm25=True)
    if alone:
        path = changed(path, "methods.srl", backbones=["tiny"])
        values = tomllib.loads(path.read_text())
        del values["backbones"]["small"]
        path = write_toml(path, values)
    _fill(path)
    study = load_study(path)
    controls = {"tiny": 0.25, "small": 0.75}
    for result in results_of(study):
        raw = read_raw(result.folder / "raw.jsonl.gz")
        if result.untrained:
            for size in SIZES:
                scores = {query: {"ndcg_cut_10": controls[result.arm.split("/")[0]]} for query in QUERIES}
                raw.add_retrieval("untrained", "docs", size.numbers, RunScores({}, scores, 30), ["ndcg_cut_10"])
        if result.bm25:
            scores = {query: {"ndcg_cut_10": 0.5} for query in QUERIES}
            raw.add_retrieval("BM25", "docs", (0, 0), RunScores({}, scores, 30), ["ndcg_cut_10"])
        write_raw(raw, result.folder / "raw.jsonl.gz")
    rows = csv.DictReader((write_report(study).parent / "report.csv").open())
    means = {row["arm"]: float(row["mean"]) for row in rows if "/" not in row["arm"] and row["size"] == "average"}
    expected = {"untrained": 0.25} if alone else {"untrained tiny": 0.25, "untrained small": 0.75}
    assert means == expected | {"BM25": 0.5}
    text = (study.output / "report/report.md").read_text()
    assert all(f"| {name} " in text for name in means)


@pytest.mark.usefixtures("undrawn")
def test_a_study_that_fine_tunes_every_arm_says_nothing_of_it(study_file: Path) -> None:
    """Negative control."""
    _fill(study_file)
    assert "Nothing is fine-tuned" not in write_report(load_study(study_file)).read_text()


def test_chance_is_not_marked_and_holm_marks_less(study_file: Path) -> None:
    """Negative control: with no gain, marks are as rare as chance has them, and Holm's p are never smaller."""
    _fill(study_file, gain=0.0)
    study = load_study(study_file)
    table = comparison_table(study, collect(study), "docs", "ndcg_cut_10")
    cells = [cell for arm, row in table.items() for cell in row.values() if cell.test]
    assert len(cells) == 2 * (len(SIZES) + 1)
    assert all(cell.p(corrected=True) >= cell.p(corrected=False) for cell in cells)
    assert not any(cell.p(corrected=True) < 0.05 for cell in cells)
    assert table["tiny/separate"][AVERAGE].test is None


@pytest.mark.usefixtures("undrawn")
def test_missing_results_are_listed(study_file: Path) -> None:
    _fill(study_file)
    study = load_study(study_file)
    gone = results_of(study)[-1].folder
    shutil.rmtree(gone)
    text = write_report(study).read_text()
    assert "1 evaluations are missing: tiny/no_kl/seed_2" in text
    shutil.rmtree(study.output / "results")
    with pytest.raises(ConfigError, match="holds no result"):
        write_report(study)


@pytest.mark.usefixtures("undrawn")
def test_tasks_that_the_study_no_longer_names_are_left_out(study_file: Path) -> None:
    _fill(study_file)
    folder = write_report(load_study(changed(study_file, "evaluation", beir=[]))).parent
    assert {row["task"] for row in csv.DictReader((folder / "report.csv").open())} == {"pairs"}
    assert "docs" not in (folder / "report.md").read_text()


def test_results_of_other_items_are_refused(study_file: Path) -> None:
    """A test set that changed between the evaluations of two arms: their queries cannot be paired."""
    _fill(study_file)
    study = load_study(study_file)
    for path in (result.folder / "raw.jsonl.gz" for result in results_of(study) if result.arm == "tiny/no_kl"):
        raw = read_raw(path)
        raw.tasks["docs"] = dataclasses.replace(raw.tasks["docs"], items=tuple(f"other {query}" for query in QUERIES))
        write_raw(raw, path)
    with pytest.raises(ConfigError, match=r"docs has other items in .*no_kl/seed_1 than in"):
        collect(study)


@pytest.mark.usefixtures("undrawn")
def test_an_arm_may_share_no_size_with_the_studys_ladder(study_file: Path) -> None:
    """Its results stand in the CSV; the figures of the study's ladder leave it out."""
    path = changed(study_file, "study", grid=False)
    settings = {"objective.sizes": "mrl", "model.output_dim": 24}
    reduced = {"recipe": "srl.toml", "ladder": [[1, 8], [3, 24]], "settings": settings}
    path = changed(path, "methods", reduced=reduced)
    study = load_study(path)
    for result in results_of(study):
        sizes = list((study.arms[result.arm].ladder or study.ladder) if result.sizes == "ladder" else [])
        raw = RawResults()
        for size in sizes or [Size.parse(result.sizes)]:
            raw.add_sts("trained", STSTask("pairs", (("", ""),) * 4, (1.0, 2.0, 3.0, 4.0)), size, np.arange(4.0))
        result.folder.mkdir(parents=True)
        write_raw(raw, result.folder / "raw.jsonl.gz")
    rows = list(csv.DictReader((write_report(study).parent / "report.csv").open()))
    assert {row["size"] for row in rows if row["arm"] == "tiny/reduced"} == {"1x8", "3x24"}


def test_raw_results_read_back_as_written(tmp_path: Path) -> None:
    raw = RawResults()
    values = np.random.default_rng(1).random(7)
    raw.add_sts("trained", STSTask("a", (("x", "y"),) * 7, tuple(map(float, range(7)))), Size(1, 8), values)
    scores = RunScores({}, {"q1": {"map": 0.1}, "q2": {"map": float("nan")}}, 2)
    raw.add_retrieval("BM25", "b", (0, 0), scores, ["map"])
    path = tmp_path / "raw.jsonl.gz"
    write_raw(raw, path)
    again = read_raw(path)
    assert again.tasks == raw.tasks and list(again.values) == list(raw.values)
    np.testing.assert_array_equal(again.values["a", "trained", 1, 8]["cosine"], values)
    np.testing.assert_array_equal(again.values["b", "BM25", 0, 0]["map"], [0.1, np.nan])
    first = path.read_bytes()
    write_raw(again, path)
    assert path.read_bytes() == first
    path.write_bytes(first[:-20])
    with pytest.raises(DataError, match="damaged"):
        read_raw(path)


# The real command


@pytest.fixture(scope="module")
def real_study(
    tmp_path_factory: pytest.TempPathFactory, tuple_shards: Path, tiny_tokenizer, docstrings: list[str]
) -> Iterator[Path]:
    """Two methods on a tiny model, three steps each; and that model as it is."""
    folder = tmp_path_factory.mktemp("study")
    torch.manual_seed(0)
    config = {"model_type": MODEL["model_type"], **MODEL}
    model = build_masked_lm(config, vocab_size=len(tiny_tokenizer), pad_token_id=tiny_tokenizer.pad_token_id)
    settings = EmbeddingSettings("mean", ladder=((3, 48),))
    write_model_folder(folder / "start", base_of(model), tiny_tokenizer, settings, torch.nn.ModuleDict())
    recipe = recipe_values(tuple_shards, train={"steps": 3, "global_batch_size": 4, "micro_batch_size": 4})
    recipe["model"] = {"source": "set by the study", "ladder": LADDER, "pooling": "mean"}
    recipe["engine"] = {"ds_config": str(float32_ds_config(folder, 0))}
    write_toml(folder / "recipe.toml", recipe)
    texts = [text for text in docstrings if len(text.split()) > 12][:40]
    beir = write_beir(folder / "docs", texts, [" ".join(text.split()[:8]) for text in texts[:15]])
    values = {
        "study": {
            "output": str(folder / "out"),
            "seeds": [1],
            "ladder": LADDER,
            "baseline": "start/full",
            "grid": True,
        },
        "evaluation": {"beir": [str(beir)], "untrained": True, "max_length": 24},
        "backbones": {"start": {"source": str(folder / "start")}},
        "methods": {
            "full": {"recipe": "recipe.toml", "settings": {"objective.sizes": "full", "objective.kl": "none"}},
            "srl": {"recipe": "recipe.toml"},
            "as_it_is": {},
        },
        "ablations": [{"name": "sizes", "with": "start/srl", "without": "start/full"}],
    }
    yield write_toml(folder / "study.toml", values)


@pytest.mark.full
@pytest.mark.processes
def test_the_whole_study(real_study: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    output = real_study.parent / "out"
    words = [sys.executable, "-m", "trainer.study", str(real_study)]
    # Asked to stop: nothing starts. Out of time within the first run: it saves, and is gone on with.
    (real_study.parent / "stop").touch()
    with monkeypatch.context() as patch:
        patch.setenv("BARISTA_STOP_FILE", str(real_study.parent / "stop"))
        with pytest.raises(Stopped, match="stop file"):
            command.main([str(real_study)])
    assert not (output / "runs").exists()
    with pytest.raises(Stopped, match="stopped in runs/start/full/seed_1"):
        command.main([str(real_study), "--stop-after-minutes", "0.05", "--arms", "start/full"])
    assert not (output / "report").exists()
    assert json.loads((output / "runs/start/full/seed_1/STOPPED").read_text())["reason"] == "clock"
    done = run_process(words)
    assert done.stdout.strip().endswith("report.md"), done.stdout
    assert "[1/" in done.stderr and "left" in done.stderr
    runs = sorted(path.parent for path in output.glob("runs/**/DONE"))
    assert [str(run.relative_to(output / "runs")) for run in runs] == [
        "start/full/seed_1",
        "start/srl/seed_1",
    ]
    assert not list(output.glob("runs/**/checkpoints"))
    report = (output / "report" / "report.md").read_text()
    assert "Not complete" not in report and "untrained" in report and "## Latency" in report
    rows = list(csv.DictReader(io.StringIO((output / "report" / "report.csv").read_text())))
    as_it_is = [row for row in rows if row["arm"] == "start/as_it_is" and row["metric"] == "ndcg_cut_10"]
    assert len(as_it_is) == len(LADDER) ** 2 + 1  # and the average
    settings = json.loads((output / "results/start/as_it_is/seed_1/results.json").read_text())["settings"]
    assert settings["query_max_length"] == settings["passage_max_length"] == 24

    # Nothing is done twice: a second start changes no run, no result and not one number.
    before = {path: path.stat().st_mtime_ns for path in output.glob("r[ue]*s/**/*") if path.is_file()}
    table = (output / "report" / "report.csv").read_bytes()
    command.main([str(real_study)])
    assert before == {path: path.stat().st_mtime_ns for path in before}
    assert (output / "report" / "report.csv").read_bytes() == table

    # A run that is trained again is evaluated again: the raw results are of the weights that are there.
    study = load_study(real_study)
    first = results_of(study)[0]
    assert study_jobs.is_evaluated(study, first)
    weights = first.run.folder / "model" / "model.safetensors"
    kept = weights.read_bytes()
    weights.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
    assert not study_jobs.is_evaluated(study, first)
    weights.write_bytes(kept)
    assert study_jobs.is_evaluated(study, first)

    # The report comes from the raw results alone: without models and logs it is the same.
    for folder in ("runs", "logs"):
        shutil.rmtree(output / folder)
    shutil.rmtree(output / "report")
    command.main([str(real_study), "--report-only"])
    assert (output / "report" / "report.md").read_text() == report
    assert (output / "report" / "report.csv").read_bytes() == table
    # Negative control: another raw result, another report.
    path = output / "results" / "start" / "srl" / "seed_1" / "raw.jsonl.gz"
    raw = read_raw(path)
    raw.values["docs", "trained", 3, 48]["ndcg_cut_10"][:] = 0.0
    write_raw(raw, path)
    command.main([str(real_study), "--report-only"])
    assert (output / "report" / "report.csv").read_bytes() != table
    capsys.readouterr()


def nap(name: str, statement: str, **options: Any) -> Job:
    return Job(name, "nap", lambda: ["timeit", "-n", "1", "-r", "1", statement], **options)


FOREVER = "import time; time.sleep(600)"


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_signals_reach_the_runs_in_progress(tmp_path: Path, number: int) -> None:
    work = Work(tmp_path, places=2)
    before = signal.getsignal(number)

    begun = [tmp_path / "a.begun", tmp_path / "b.begun"]
    a, b = (f"import pathlib; pathlib.Path({str(path)!r}).touch(); {FOREVER}" for path in begun)

    def ask() -> None:
        while not all(path.exists() for path in begun):
            pass
        os.kill(os.getpid(), number)

    asking = threading.Thread(target=ask)
    with work.listening():
        asking.start()
        with pytest.raises(Stopped, match=f"stopped in (a|b) .{signal.Signals(number).name}"):
            work.carry_out([nap("a", a), nap("b", b), nap("c", "pass")])
        with pytest.raises(Stopped, match="stopped before next"):
            work.carry_out([nap("next", "pass")])
    asking.join()
    assert signal.getsignal(number) is before
    assert sorted(timings(tmp_path)) == [("a", False), ("b", False)]


def timings(output: Path) -> list[tuple[str, bool]]:
    lines = [json.loads(line) for line in (output / "timings.jsonl").read_text().splitlines()]
    return [(line["name"], line["complete"]) for line in lines]


@pytest.mark.processes
def test_jobs_wait_for_what_they_need_and_share_the_cores(tmp_path: Path) -> None:
    """Two places: `late` needs `first`; `first` and `beside` run together, for each waits for the other's file."""

    def meet(mine: str, other: str) -> str:
        return (
            "import os, pathlib\n"
            f"pathlib.Path({str(tmp_path / mine)!r}).write_text(os.environ['OMP_NUM_THREADS'])\n"
            f"while not pathlib.Path({str(tmp_path / other)!r}).exists(): pass"
        )

    done: list[str] = []
    jobs = [
        nap("first", meet("a", "b"), after=lambda: done.append("first")),
        nap("late", "pass", needs=frozenset({"first", "made long ago"}), before=lambda: done.append("late begins")),
        nap("beside", meet("b", "a"), needs=frozenset()),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("OMP_NUM_THREADS", raising=False)
        Work(tmp_path, places=2).carry_out(jobs)
    assert done == ["first", "late begins"]
    cores = len(os.sched_getaffinity(0))
    assert [(tmp_path / name).read_text() for name in "ab"] == [str(max(1, cores // 2))] * 2
    assert sorted(timings(tmp_path)) == [("beside", True), ("first", True), ("late", True)]


@pytest.mark.processes
def test_a_failure_stops_the_others_and_is_what_is_said(tmp_path: Path) -> None:
    work = Work(tmp_path, places=2)
    with pytest.raises(RunFailed, match=r"broken ended with code 1 .*broken.log"):
        work.carry_out([nap("long", FOREVER), nap("broken", "1 / 0"), nap("never", "pass")])
    assert sorted(timings(tmp_path)) == [("broken", False), ("long", False)]
    Work(tmp_path).carry_out([nap("short", "pass")])  # negative control


@pytest.mark.processes
def test_every_command_has_a_log_of_its_own(tmp_path: Path) -> None:
    """Also where only the place of a slash tells their names apart: an error is looked for in the log."""
    Work(tmp_path).carry_out(
        [nap("a/b_c", "print('one')"), nap("a_b/c", "print('two')"), nap("x a/b", "print('three')")]
    )
    logs = {name: (tmp_path / "logs" / name).read_text() for name in ("a/b_c.log", "a_b/c.log", "x_a/b.log")}
    assert [word for text in logs.values() for word in ("one", "two", "three") if f"\n{word}\n" in text] == [
        "one", "two", "three",
    ]  # fmt: skip


@pytest.mark.processes
def test_the_log_of_a_command_hides_the_secrets_in_its_addresses(tmp_path: Path) -> None:
    """The command gets them: it writes what it was given into a file."""
    address = "https://me:geheim@h/x?token=geheim"
    Work(tmp_path).carry_out(
        [nap("a", f"import pathlib; pathlib.Path({str(tmp_path / 'got')!r}).write_text({address!r})")]
    )
    log = (tmp_path / "logs/a.log").read_text()
    assert "https://***@h/x?token=***" in log and "geheim" not in log
    assert (tmp_path / "got").read_text() == address


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[list[str], str | None]]:
    """In place of processes: the words and the GPU that each job is started with, by its statement."""
    found: dict[str, tuple[list[str], str | None]] = {}

    class Ended:
        def __init__(self, words: list[str], *, env: Mapping[str, str], **_: Any) -> None:
            found[words[-1]] = words, env.get("CUDA_VISIBLE_DEVICES")

        def wait(self) -> int:
            return 0

    monkeypatch.setattr(subprocess, "Popen", Ended)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return found


@pytest.mark.parametrize(
    ("places", "ranks", "gpus", "include"),
    [
        (2, 1, ["4", "5"], [None, None]),
        (2, 2, [None, None], ["localhost:4,5", "localhost:6,7"]),
        (1, 2, [None, None], [None, None]),
    ],
)
def test_places_share_the_gpus_out(
    places: int,
    ranks: int,
    gpus: list[str | None],
    include: list[str | None],
    started: dict[str, tuple[list[str], str | None]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/" + name)  # as where there is an nvidia-smi
    jobs = [nap(name, name, ranks=ranks) for name in "ab"]
    Work(tmp_path, places=places, gpus=["4", "5", "6", "7"]).carry_out(jobs)
    assert [started[name][1] for name in "ab"] == gpus
    for name, named in zip("ab", include):
        words = started[name][0]
        assert (words[words.index("--include") + 1] if "--include" in words else None) == named
        assert (["--num_gpus", str(ranks)] == words[1:3]) == (ranks > 1 and named is None)


@pytest.mark.parametrize(
    ("jobs", "places", "said"),
    [
        # Its own kind, then the same stage: 160 s each, interrupted tries counted.
        ({"runs/a/2": "runs/a", "runs/b/1": "runs/b", "y": "evaluate sizes"}, 1, ", about 5 min left"),
        ({"runs/a/2": "runs/a", "runs/b/1": "runs/b", "y": "evaluate sizes"}, 2, ", about 3 min left"),
        ({"pretrain/z": "pretrain/z", "y": "evaluate sizes"}, 1, ", about 9 s left and 1 of unknown length"),
        ({"pretrain/z": "pretrain/z"}, 1, ""),
    ],
)
def test_time_left_is_what_the_same_kind_took(
    jobs: dict[str, str],
    places: int,
    said: str,
    started: dict[str, tuple[list[str], str | None]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As it is told when the first of the jobs begins."""
    entries = [
        ("runs/a/1", "runs/a", 100.0, False),
        ("runs/a/1", "runs/a", 60.0, True),
        ("x", "evaluate sizes", 9.0, True),
    ]
    lines = [json.dumps(dict(zip(("name", "kind", "seconds", "complete"), entry))) for entry in entries]
    (tmp_path / "timings.jsonl").write_text("\n".join(lines) + "\n")
    with caplog.at_level(logging.INFO):
        Work(tmp_path, places=places).carry_out([Job(name, kind, lambda: ["timeit"]) for name, kind in jobs.items()])
    # Jobs that begin together may log in either order.
    beginning = list(jobs)[:places]
    assert caplog.messages[0] in [f"[1/{len(jobs)}] {name}{said}" for name in beginning]


def test_user_errors_of_the_command(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        run_command(lambda: command.main(["absent.toml"]))
    assert end.value.code == 2
    assert capfd.readouterr().err.startswith("error: study absent.toml does not exist")


@pytest.mark.parametrize("minutes", ["nan", "-1", "inf"])
def test_minutes_that_no_clock_has(study_file: Path, capsys: pytest.CaptureFixture[str], minutes: str) -> None:
    with pytest.raises(SystemExit) as end:
        command.main([str(study_file), "--list", f"--stop-after-minutes={minutes}"])
    assert end.value.code == 2 and f"'{minutes}' is not a finite number of at least 0" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="--stop-after-minutes is not read with --list"):  # negative control
        command.main([str(study_file), "--list", "--stop-after-minutes=0.5"])


@pytest.mark.parametrize(
    ("chosen", "unread"),
    [
        ("--report-only", ["--list"]),
        ("--report-only", ["--arms", "tiny/srl"]),
        ("--report-only", ["--jobs", "1"]),
        ("--report-only", ["--stop-after-minutes", "0"]),
        ("--list", ["--jobs", "2"]),
        ("--list", ["--stop-after-minutes", "5"]),
    ],
)
def test_options_that_start_nothing_refuse_those_of_runs(study_file: Path, chosen: str, unread: list[str]) -> None:
    with pytest.raises(ConfigError, match=f"^{unread[0]} is not read with {chosen}; leave one of the two out$"):
        command.main([str(study_file), *unread, chosen])


@pytest.mark.parametrize("by", ["sts", "beir"])
def test_the_latency_command_has_no_option_that_it_would_not_read(as_it_is: Path, by: str) -> None:
    study = load_study(as_it_is)
    tests = dataclasses.replace(
        study.evaluation, sts=("a.tsv",) if by == "sts" else (), beir=("a",), split="dev", sts_subsets=""
    )
    study = dataclasses.replace(study, evaluation=tests)
    *_, latency = study_jobs.jobs_of(study, *study_jobs.chosen(study, None), Work(study.output))
    _, *words = map(str, latency.command())
    args = arguments.build_parser(evaluate._COMMANDS).parse_args(words)
    arguments.refuse_unread(args)
    read = {"sts": (Path("a.tsv"), None, "test"), "beir": (None, Path("a"), "dev")}
    assert (args.sts, args.beir, args.split) == read[by]


def test_other_recipes_in_a_used_folder_are_refused(study_file: Path, tmp_path: Path) -> None:
    """A finished run is skipped only while its recipe is the study's."""
    from trainer.config.load import as_toml

    shards = tmp_path / "shards"
    shards.mkdir()
    (shards / "manifest.json").write_text("{}")
    path = changed(study_file, "settings", **{"data.shards": [str(shards)]})
    path = path.rename(path.with_name("first.toml"))
    study = load_study(path)
    run = runs_of(study)[0]
    run.folder.mkdir(parents=True)
    (run.folder / "recipe.toml").write_text(as_toml(run.recipe))
    (run.folder / "DONE").write_text("")
    docs = tmp_path / "docs"
    (docs / "qrels").mkdir(parents=True)
    (docs / "corpus.jsonl").write_text('{"_id": "d", "text": "x"}\n')
    (docs / "queries.jsonl").write_text('{"_id": "q", "text": "x"}\n')
    (docs / "qrels" / "test.tsv").write_text("q\td\t1\n")
    same = load_study(changed(path, "evaluation", sts=[], beir=[str(docs)]))
    checks.check_files(same, runs_of(same))
    other = load_study(changed(path.with_name("changed.toml"), "settings", **{"optim.lr": 0.5}))
    with pytest.raises(ConfigError, match=r"holds a run with optim.lr = 0.1, not 0.5"):
        checks.check_files(other, runs_of(other))


def test_runs_of_an_earlier_backbone_are_refused(study_file: Path, tmp_path: Path) -> None:
    from trainer.config.load import as_toml

    shards, docs = tmp_path / "shards", tmp_path / "docs"
    (docs / "qrels").mkdir(parents=True)
    shards.mkdir()
    (shards / "manifest.json").write_text("{}")
    (docs / "corpus.jsonl").write_text('{"_id": "d", "text": "x"}\n')
    (docs / "queries.jsonl").write_text('{"_id": "q", "text": "x"}\n')
    (docs / "qrels" / "test.tsv").write_text("q\td\t1\n")
    write_toml(study_file.with_name("mlm.toml"), recipe_values(shards, objective={"name": "masked"}))
    path = changed(study_file, "backbones", tiny={"recipe": "mlm.toml"})
    path = changed(path, "evaluation", sts=[], beir=[str(docs)])
    study = load_study(changed(path, "settings", **{"data.shards": [str(shards)]}))
    runs = runs_of(study)
    for age, run in ((20, runs[0]), (10, runs[1])):
        run.folder.mkdir(parents=True)
        (run.folder / "recipe.toml").write_text(as_toml(run.recipe))
        (run.folder / "DONE").write_text("")
        os.utime(run.folder / "DONE", (1e9 - age, 1e9 - age))
    checks.check_files(study, runs)
    os.utime(runs[0].folder / "DONE", (1e9, 1e9))
    with pytest.raises(ConfigError, match="trained again since"):
        checks.check_files(study, runs)


def test_all_shipped_studies_are_looked_at() -> None:
    shipped = {path.name for path in (ROOT / "launch" / "studies").glob("*.toml")}
    assert shipped == {
        "starbucks_small.toml", "starbucks_smoke.toml", "starbucks_longer.toml", "matryoshka.toml", "minilm.toml",
        "terms.toml", "muon.toml",
    }  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("name", ["starbucks_small.toml", "starbucks_smoke.toml"])
def test_shipped_studies_are_sound(name: str) -> None:
    """Every recipe of every run resolves, and pre-training is compared from the same start for the same tokens."""
    study = load_study(ROOT / "launch" / "studies" / name)
    runs = {run.name: run for run in runs_of(study)}
    assert len(runs) == 5 + len(study.seeds) * (len(study.arms) - 1 + len(study.ladder))
    start, *others = (runs[f"pretrain/{backbone}"].recipe for backbone in study.backbones)
    assert start.model.config and {each.model.source for each in others} == {
        str(runs["pretrain/start"].folder / "model")
    }
    assert len({(each.train.steps, each.train.global_batch_size, each.run.seed) for each in others}) == 1
    assert {(each.objective.sizes, each.objective.decoder) for each in others} == {
        ("full", False), ("ladder", True), ("ladder", False), ("full", True),
    }  # fmt: skip
    tuned = [run.recipe for run in runs.values() if run.module == "trainer.finetune"]
    assert len({(each.train.steps, each.train.global_batch_size, each.optim.lr) for each in tuned}) == 1


def test_the_study_of_terms_adds_each_alone_and_then_all() -> None:
    """Every arm differs from plain SRL in its own keys alone, and the last arm has the keys of all others."""
    study = load_study(ROOT / "launch" / "studies" / "terms.toml")
    plain, *single, everything = study.methods.values()
    assert (plain.name, everything.name) == ("srl", "all") and not plain.settings
    assert {each.recipe for each in study.methods.values()} == {plain.recipe}
    assert dict(everything.settings) == {key: value for each in single for key, value in each.settings.items()}
    assert sum(len(each.settings) for each in single) == len(everything.settings), "no key is in two arms"


def test_the_study_of_muon_changes_the_optimizer_alone() -> None:
    """Each arm with Muon has an arm with AdamW beside it, which differs in the optimizer alone, for the same tokens."""
    runs = runs_of(load_study(ROOT / "launch" / "studies" / "muon.toml"))
    of = {run.name: run.recipe for run in runs}
    pairs = {name: name.replace("_muon", "") for name in of if "_muon" in name and "smae_muon" not in name}
    pairs |= {f"pretrain/smae_muon{rate}": f"pretrain/smae{rate}" for rate in ("", "_higher")}
    assert len(pairs) == 2 * 3 + 2 and set(pairs.values()) < set(of)
    for muon, adamw in pairs.items():
        ours, theirs = of[muon], of[adamw]
        assert (ours.optim.name, ours.optim.muon_lr) == ("muon", pytest.approx(4 * ours.optim.lr)), muon
        assert dataclasses.replace(ours.optim, name="adamw", muon_lr=theirs.optim.muon_lr) == theirs.optim, muon
        for part in ("data", "objective", "model", "train", "engine"):
            assert getattr(ours, part) == getattr(theirs, part), (muon, part)
    tuned = [recipe for name, recipe in of.items() if "pretrain" not in name]
    assert len(tuned) == 24 and len({recipe.train.steps for recipe in tuned}) == 1


@pytest.mark.full
def test_the_longer_study_differs_in_its_steps_alone() -> None:
    """From the encoders of starbucks_small.toml, on its tests, each arm with its recipe but for the steps."""
    short, long = (load_study(ROOT / "launch" / "studies" / f"starbucks_{name}.toml") for name in ("small", "longer"))
    assert long.evaluation.task_names == short.evaluation.task_names and long.baseline == short.baseline
    before = {run.name: run for run in runs_of(short)}
    found = runs_of(long)
    assert len(found) == len(long.seeds) * (len(long.arms) - 1 + len(long.ladder))
    for run in found:
        other = before[run.name].recipe
        assert run.recipe.train.steps == 4 * other.train.steps
        assert Path(run.recipe.model.source) == Path(other.model.source)
        for part in ("data", "objective", "optim", "engine"):
            assert getattr(run.recipe, part) == getattr(other, part), (run.name, part)


@pytest.mark.full
def test_the_matryoshka_study_is_sound() -> None:
    """All arms start from one encoder with the same budget, and no test of it shares rows with its training pairs."""
    study = load_study(ROOT / "launch" / "studies" / "matryoshka.toml")
    runs = runs_of(study)
    assert len(runs) == len(study.seeds) * len(study.arms)
    assert {(run.recipe.train.steps, run.recipe.train.global_batch_size) for run in runs} == {(135, 64)}
    assert study.evaluation.task_names == ("stsb_test",)
    reduced = [result for result in results_of(study) if result.arm == "mlm/mrl_reduced"]
    assert {str(result.run.recipe.ladder.full) for result in reduced} == {"6x96"}
    assert all(set(result.sizes.split(",")) >= {"6x24", "6x48", "6x96"} for result in reduced)


def test_the_study_from_a_real_start_is_sound() -> None:
    """All that is fine-tuned has the same budget, and the two masked backbones the same tokens from the same start.

    One arm has more steps: as many layers' steps as the separate models together.
    """
    study = load_study(ROOT / "launch" / "studies" / "minilm.toml")
    runs, results = {run.name: run for run in runs_of(study)}, results_of(study)
    assert set(study.arms) == {
        "minilm/as_it_is", "closed_form/as_it_is", "resized/as_it_is", "minilm/full", "minilm/separate", "minilm/two_d",
        "minilm/mrl", "minilm/srl", "mlm/srl", "smae/srl", "resized/srl", "minilm/srl_without_kl",
        "minilm/srl_longer",
    }  # fmt: skip
    fine_tuned = len(study.seeds) * (9 + len(study.ladder))
    assert len(runs) == 3 + fine_tuned and len(results) == 3 + fine_tuned
    mlm, smae, resized = (runs[f"pretrain/{name}"].recipe for name in ("mlm", "smae", "resized"))
    assert (
        mlm.data == smae.data and mlm.train == smae.train and mlm.optim == smae.optim and mlm.run.seed == smae.run.seed
    )
    assert (mlm.objective.sizes, mlm.objective.decoder) == ("full", False)
    assert (smae.objective.sizes, smae.objective.decoder) == ("ladder", True)
    assert {mlm.model.source, smae.model.source} == {study.backbones["minilm"].source} == {resized.teacher.model}
    assert resized.model.source == study.backbones["closed_form"].source and resized.data.shards == mlm.data.shards
    tuned = [run.recipe for run in runs.values() if run.module == "trainer.finetune"]
    assert (
        len({(str(dataclasses.replace(each.train, steps=0)), str(each.optim), str(each.data)) for each in tuned}) == 1
    )
    steps = {run.name: run.recipe.train.steps for run in runs.values() if run.module == "trainer.finetune"}
    layers = sum(size.layers for size in study.ladder) / study.ladder.full.layers
    assert {name for name, each in steps.items() if each != 60} == {
        f"runs/minilm/srl_longer/seed_{n}" for n in (1, 2, 3)
    }
    assert {each for each in steps.values() if each != 60} == {round(60 * layers)}
    assert all(each.model.dropout == 0.0 and each.model.pooling == "mean" for each in (*tuned, mlm, smae, resized))

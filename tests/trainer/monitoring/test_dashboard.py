"""What TensorBoard, Weights & Biases and MLflow are told is what metrics.jsonl holds, arranged for people."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import re
import struct
import sys
import threading
import unittest.mock
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams import plugin_data_pb2
from tensorboard.summary.writer.record_writer import RecordWriter

from data.ground.errors import ConfigError, DataError
from models.sizes import STARBUCKS_LADDER, Ladder, Size
from tests.ranks import run_ranks
from tests.run_folder import lines_of
from tests.trainer.support import float32_ds_config, recipe_of, recipe_values
from trainer.config.load import as_toml
from trainer.config.schema import Recipe
from trainer.config.sections import LogConfig
from trainer.monitoring.dashboard import (
    COMPARED,
    Dashboard,
    heat_maps,
    layout_of,
    open_dashboard,
    results_of,
    settings_of,
    shown_sizes,
    texts_of,
)
from trainer.monitoring.trackers import (
    RESULTS_RUN,
    TensorBoard,
    WeightsAndBiases,
    check_sinks,
    tensorboard_place,
)
from trainer.run import execute

CUPS = ["demi", "short", "tall", "grande", "venti", "trenta"]
STEPS = 4


@pytest.fixture
def tasks(tmp_path: Path, docstrings: list[str]) -> list[str]:
    """A BEIR folder of (summary, body) pairs of real documentation."""
    pairs = [text.split("\n\n", 1) for text in docstrings if "\n\n" in text][:30]
    beir = tmp_path / "pydoc"
    (beir / "qrels").mkdir(parents=True)
    for name, texts in (("corpus", [body for _, body in pairs]), ("queries", [query for query, _ in pairs[:10]])):
        lines = [json.dumps({"_id": f"{name[0]}{i}", "text": text}) for i, text in enumerate(texts)]
        (beir / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    rows = ["query-id\tcorpus-id\tscore", *(f"q{i}\tc{i}\t1" for i in range(10))]
    (beir / "qrels" / "test.tsv").write_text("\n".join(rows) + "\n")
    return [str(beir)]


def six_sizes(shards: Path | str, output: Path, **sections: Any) -> dict[str, dict[str, Any]]:
    values = recipe_values(shards, run={"output": str(output)}, **sections)
    values["model"]["ladder"] = [[n, 8 * n] for n in range(1, 7)]
    values["model"]["config"] |= {"num_hidden_layers": 6}
    values["log"]["tensorboard"] = True
    return values


def events(folder: Path) -> EventAccumulator:
    found = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0, "images": 0})
    found.Reload()
    return found


def drawn(run: Path) -> dict[tuple[str, str], dict[int, float]]:
    """(run beside the main one, tag) -> step -> value of all event files."""
    board = run / "tensorboard"
    found = {}
    for folder in [board, *(path for path in board.iterdir() if path.is_dir())]:
        # A folder's files alone: the main run's folder holds the others.
        accumulator = events(folder)
        name = "." if folder == board else folder.name
        for tag in accumulator.Tags()["scalars"]:
            found[name, tag] = {scalar.step: scalar.value for scalar in accumulator.Scalars(tag)}
    return found


@pytest.mark.launcher
def test_a_real_run(tmp_path: Path, tuple_shards: Path, tasks: list[str]) -> None:
    """Two ranks, evaluation on the grid: every curve, the layout, the heat map, texts and settings."""
    run = tmp_path / "run"
    values = six_sizes(
        tuple_shards,
        run,
        engine={"ds_config": str(float32_ds_config(tmp_path, 1))},
        train={"steps": STEPS},
        checkpoint={"every_steps": 2},
        optim={"lr": 1e-3, "eps": 1e-8},
        evaluation={"every_steps": 2, "beir": tasks, "grid": True},
    )
    recipe = recipe_of(values)
    (tmp_path / "recipe.toml").write_text(as_toml(recipe))
    run_ranks("trainer.finetune", "--config", str(tmp_path / "recipe.toml"), ranks=2)

    curves = drawn(run)
    runs = {name: f"{i + 1}_{name}" for i, name in enumerate(CUPS)}
    expected: dict[tuple[str, str], dict[int, float]] = {}
    cells = 0
    for line in lines_of(run):
        for name, value in line.items():
            stem, _, last = name.rpartition("/")
            if name in ("format", "step"):
                continue
            if stem.startswith("evaluation/") and last not in runs:
                cells += 1  # of the heat map
                continue
            if last in runs:
                stem = {"loss": "losses/contrastive", "kl": "losses/kl"}.get(stem, stem)
                place = (runs[last], stem)
            elif stem:
                place = (".", f"speed/checkpoint_{last}")
            else:
                place = (".", f"{'speed' if last in SPEED else 'train'}/{name}")
            expected.setdefault(place, {})[line["step"]] = value
    shown = {place: curve for place, curve in curves.items() if place[0] != RESULTS_RUN}
    assert shown.keys() == expected.keys()
    for place, curve in expected.items():
        assert shown[place] == pytest.approx(curve, rel=1e-6, nan_ok=True), place
    assert cells == 2 * 2 * 30  # evaluations × metrics × off-ladder sizes
    assert len(shown["1_demi", "losses/kl"]) == STEPS and ("6_trenta", "losses/kl") not in shown
    # Negative control: curves differ between sizes and between steps.
    assert shown["1_demi", "losses/contrastive"] != shown["2_short", "losses/contrastive"]
    assert len(set(shown["1_demi", "losses/contrastive"].values())) == STEPS

    main = events(run / "tensorboard")
    _check_layout(main, {place for place in shown if place[1] not in ("train/samples", "speed/checkpoint_mib")})
    (tag,) = main.Tags()["images"]
    assert tag == "pydoc/nDCG@10"
    images = main.Images(tag)
    assert [image.step for image in images] == [2, 4] and images[0].encoded_image_string.startswith(b"\x89PNG")
    assert images[0].encoded_image_string != images[1].encoded_image_string
    tags = [tag for tag in main.Tags()["tensors"] if tag.endswith("/text_summary")]
    texts = {tag: main.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in tags}
    changed = texts["recipe/1_changed_settings/text_summary"]
    assert "    ladder = [[1, 8], [2, 16]" in changed and "warmup_ratio = 0.0" in changed and "beta1" not in changed
    assert "    beta1 = 0.9" in texts["recipe/2_all_settings/text_summary"]
    assert '"world_size": 2' in texts["recipe/3_environment/text_summary"]

    results = events(run / "tensorboard" / RESULTS_RUN)
    content = results.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    started = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info
    assert started.group_name == f"run ({tmp_path})"
    assert started.hparams["optim.lr"].number_value == 1e-3
    assert started.hparams["objective.kl"].string_value == "scores"
    for shown_name, name in (("loss", "loss"), ("pydoc nDCG@10 1_demi", "evaluation/pydoc/ndcg_cut_10/demi")):
        newest = [line[name] for line in lines_of(run) if name in line][-1]
        assert results.Scalars(f"results/{shown_name}")[-1].value == pytest.approx(newest, rel=1e-6)


SPEED = {"tokens_per_second", "mfu", "seconds", "padding_share", "data_wait_share", "memory_mib"}


def _check_layout(main: EventAccumulator, places: set[tuple[str, str]]) -> None:
    """Every curve is in a chart, all sizes of one quantity in the same, and no chart mixes quantities."""
    (tensor,) = main.Tensors("custom_scalars__config__")
    layout = layout_pb2.Layout.FromString(tensor.tensor_proto.string_val[0])
    assert [category.title for category in layout.category] == [
        "Losses by size, fine-tuning",
        "Evaluation by size",
        "Training",
        "Speed",
    ]
    charts = {chart.title: list(chart.multiline.tag) for category in layout.category for chart in category.chart}
    seen: dict[str, set[tuple[str, str]]] = {
        title: {place for place in places if any(re.compile(pattern).match(place[1]) for pattern in patterns)}
        for title, patterns in charts.items()
    }
    assert set().union(*seen.values()) == places
    assert len(seen["loss"]) == len(seen["nDCG@10"]) == len(seen["MRR@10"]) == 6
    assert len(seen["KL to the full size"]) == 5
    for title, matched in seen.items():
        if title.startswith(("shares", "seconds a checkpoint")):
            assert len(matched) == 2
        else:
            assert len({tag for _, tag in matched}) <= 1, title


def test_a_resumed_run_hides_what_it_takes_again(tmp_path: Path) -> None:
    recipe = recipe_of(six_sizes("shards", tmp_path / "run"))
    first = open_dashboard(recipe, start_step=0)
    for step in (1, 2, 3):
        first.record({"step": step, "loss": float(step), "loss/demi": step / 2})
    first.close()
    second = open_dashboard(recipe, start_step=1)
    second.record({"step": 2, "loss": 20.0, "loss/demi": 10.0})
    second.close()
    curves = drawn(tmp_path / "run")
    assert curves[".", "train/loss"] == {1: 1.0, 2: 20.0}
    assert curves["1_demi", "losses/contrastive"] == {1: 0.5, 2: 10.0}


def test_what_is_no_number_is_not_drawn(tmp_path: Path) -> None:
    board = open_dashboard(recipe_of(six_sizes("shards", tmp_path / "run")), start_step=0)
    board.record({"step": 1, "loss": math.nan, "note": "text", "flag": True, "nothing": None})
    board.close()
    curves = drawn(tmp_path / "run")
    assert {tag for run, tag in curves if run == "."} == {"train/loss"} and math.isnan(curves[".", "train/loss"][1])


def test_a_result_that_is_not_defined_is_no_earlier_one() -> None:
    sink = unittest.mock.Mock()
    board = Dashboard([sink], STARBUCKS_LADDER)
    small, large = "evaluation/a/spearman/demi", "evaluation/a/spearman/trenta"
    board.record({"step": 1, "loss": 2.0, small: 0.5, large: 0.6})
    assert len(sink.results.call_args.args[1]) == 3
    board.record({"step": 2, "loss": 1.0, small: None, large: 0.7})
    assert sink.scalars.call_args.args == (2, {"loss": 1.0, large: 0.7})
    assert sorted(sink.results.call_args.args[1].values()) == [0.7, 1.0]


@pytest.mark.parametrize(
    "name, place",
    [
        ("loss", (".", "train/loss")),
        ("mfu", (".", "speed/mfu")),
        ("encoder/demi", ("1_demi", "losses/encoder")),
        ("decoder/trenta", ("6_trenta", "losses/decoder")),
        ("loss/3x48", (".", "losses/contrastive/3x48")),
        ("evaluation/a/b/ndcg_cut_10/tall", ("3_tall", "evaluation/a/b/ndcg_cut_10")),
        ("evaluation/a/spearman/2x32", None),
        ("evaluation/a/spearman/2x32x0.25", None),
        ("evaluation/a/spearman/2x32x", (".", "evaluation/a/spearman/2x32x")),
        ("checkpoint/mib", (".", "speed/checkpoint_mib")),
        ("pairs/tall", ("3_tall", "losses/pairs")),
        ("fault/loss", (".", "fault/loss")),
    ],
)
def test_places(name: str, place: tuple[str, str] | None) -> None:
    assert tensorboard_place(name, CUPS) == place


@pytest.mark.parametrize(
    "sizes, names",
    [
        ("ladder", ["1x16", "2x32", "3x48"]),
        ("mrl", ["1x16", "2x32", "3x16", "3x32", "3x48"]),
        ("adaptive_layers", ["1x16", "1x48", "2x32", "2x48", "3x48"]),
        ("grid", ["1x16", "1x32", "1x48", "2x16", "2x32", "2x48", "3x16", "3x32", "3x48"]),
        ("two_d", ["1x16", "2x32", "3x48"]),
        ("two_d_listed", ["1x16", "2x32", "3x48"]),
        ("two_d_all_widths", ["1x16", "2x32", "3x16", "3x32", "3x48"]),
    ],
)
def test_sizes_with_a_line_of_their_own(sizes: str, names: list[str]) -> None:
    assert shown_sizes(recipe_of(recipe_values("shards", objective={"sizes": sizes}))) == names


def test_the_layout_follows_the_recipe() -> None:
    def by_size(**sections: Any) -> dict[str, list[str]]:
        layout = layout_of(recipe_of(recipe_values("shards", **sections)))
        return {title: list(charts) for title, charts in layout.items() if title not in ("Training", "Speed")}

    pre_training, fine_tuning = "Losses by size, pre-training", "Losses by size, fine-tuning"
    assert by_size(objective={"name": "masked"}) == {pre_training: ["encoder loss", "decoder loss"]}
    assert by_size(objective={"name": "masked", "decoder": False}) == {pre_training: ["encoder loss"]}
    assert by_size() == {fine_tuning: ["loss", "KL to the full size"]}
    taught = {"model": {"source": "x", "config": {}}, "teacher": {"model": "t"}}
    teacher = "all terms of the teacher"
    assert by_size(objective={"name": "distill"}, **taught) == {"Losses by size, distillation": [teacher]}
    assert by_size(**taught) == {fine_tuning: ["loss", "KL to the full size", teacher]}
    assert by_size(objective={"kl": "none"}, evaluation={"sts": ["x.tsv"]}) == {
        fine_tuning: ["loss"],
        "Evaluation by size": ["Spearman"],
    }


def test_settings_are_of_the_objective_and_plain() -> None:
    contrastive = settings_of(recipe_of(recipe_values("shards")))
    masked = settings_of(recipe_of(recipe_values("shards", objective={"name": "masked"})))
    assert "objective.kl" in contrastive and "objective.encoder_mask_ratio" not in contrastive
    assert "objective.kl" not in masked and "objective.encoder_mask_ratio" in masked
    assert masked["model.ladder"] == "1x16 2x32 3x48"
    assert all(isinstance(value, (bool, int, float, str)) for value in (contrastive | masked).values())
    distilled = settings_of(recipe_of(recipe_values("shards", objective={"name": "distill"}, teacher={"model": "t"})))
    assert "teacher.vector_weight" in distilled and "teacher.vector_weight" not in contrastive
    assert "optim.muon_lr" in settings_of(recipe_of(recipe_values("shards", optim={"name": "muon"})))
    elsewhere = {"train.epochs", "optim.muon_lr"}  # these go by steps, and by AdamW
    assert {*contrastive, *masked, *distilled} == {*COMPARED, "model.ladder"} - elsewhere


def test_texts_are_toml() -> None:
    import tomllib

    recipe = recipe_of(recipe_values("shards"))
    texts = {name: text.replace("\n    ", "\n").lstrip() for name, text in texts_of(recipe, "").items()}
    assert list(texts) == ["recipe/1_changed_settings", "recipe/2_all_settings"]
    whole = tomllib.loads(texts["recipe/2_all_settings"])
    written = tomllib.loads(as_toml(recipe))
    assert whole == written
    changed = tomllib.loads(texts["recipe/1_changed_settings"])
    assert changed["train"] == {"steps": 6, "global_batch_size": 12, "micro_batch_size": 6}


def test_heat_maps_are_of_headline_metrics_and_every_size() -> None:
    scores = {
        "evaluation/pydoc/ndcg_cut_10/demi": 0.1,
        "evaluation/pydoc/ndcg_cut_10/2x768": 0.2,
        "evaluation/pydoc/recip_rank_10/demi": 0.3,
        "evaluation/sts/b/spearman/trenta": 0.4,
        "evaluation/sts/b/spearman/tall": math.nan,
    }
    assert heat_maps(scores, STARBUCKS_LADDER) == {
        ("pydoc", "ndcg_cut_10"): {Size(2, 32): 0.1, Size(2, 768): 0.2},
        ("sts/b", "spearman"): {Size(12, 768): 0.4},
    }
    ladder = Ladder.of([(1, 16), (2, 32)])
    assert results_of({"loss": 1.0, "lr": 2.0, "evaluation/a/spearman/2x32": 0.5, **scores}, ladder) == {
        "loss": 1.0,
        "a Spearman 2_2x32": 0.5,
    }


class Broken:
    """A sink that refuses every other record."""

    name = "broken"

    def __init__(self) -> None:
        self.taken: list[int] = []

    def scalars(self, step: int, values: Any) -> None:
        if step in (2, 3):
            raise OSError("no route to host")
        self.taken.append(step)

    def text(self, name: str, markdown: str) -> None: ...
    def figure(self, name: str, figure: Any, *, step: int) -> None: ...
    def hparams(self, settings: Any) -> None: ...
    def results(self, step: int, values: Any) -> None: ...
    def close(self) -> None: ...


def test_a_sink_that_fails_costs_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Not the run, nor the other sinks; one warning an outage."""
    broken, whole = Broken(), Broken()
    whole.scalars = lambda step, values: whole.taken.append(step)  # type: ignore[method-assign]
    board = Dashboard([broken, whole], STARBUCKS_LADDER)
    with caplog.at_level(logging.WARNING):
        for step in (1, 2, 3, 4):
            board.record({"step": step, "loss": 1.0})
        board.close()
    assert broken.taken == [1, 4] and whole.taken == [1, 2, 3, 4]
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "step 2" in warning and "no route to host" in warning


def test_what_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.monitoring.trackers.find_spec", lambda package: None)
    check_sinks(LogConfig())
    for key in ("wandb", "mlflow"):
        with pytest.raises(ConfigError, match=rf"log\.{key} = true needs the package {key}; .*pip install {key}`"):
            check_sinks(LogConfig(**{key: True}))
    monkeypatch.setattr("trainer.monitoring.trackers.find_spec", lambda package: object())
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(ConfigError, match="MLFLOW_TRACKING_URI"):
        check_sinks(LogConfig(mlflow=True))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow.example.org")
    check_sinks(LogConfig(mlflow=True, wandb=True))


def test_it_is_refused_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.monitoring.trackers.find_spec", lambda package: None)
    values = six_sizes("nowhere", tmp_path / "run")
    # Negative control: without it, the next mistake is found.
    with pytest.raises(DataError, match="nowhere"):
        execute(recipe_of(values))
    values["log"]["wandb"] = True
    with pytest.raises(ConfigError, match="needs the package wandb"):
        execute(recipe_of(values))
    assert not (tmp_path / "run").exists()


def _service_run(recipe: Recipe) -> dict[str, str]:
    """Five records in two processes' worth of dashboards, the second resumed at step 2; what the services call them."""
    folder = Path(recipe.run.output)
    folder.mkdir()
    known = []
    for start, steps in ((0, (1, 2)), (2, (3, 4))):
        board = open_dashboard(recipe, start_step=start)
        for step in steps:
            board.record({"step": step, "loss": 10.0 / step, "loss/demi": float(step)})
        if start:
            board.record({"step": 4, "evaluation/a@b/ndcg_cut_10/demi": 0.25, "evaluation/a@b/ndcg_cut_10/2x8": 0.5})
        board.close()
        known.append(json.loads((folder / "tracking.json").read_text()))
    assert known[0] == known[1]
    return known[0]


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real package with a store in a folder."""
    mlflow = pytest.importorskip("mlflow", reason="needs the package mlflow (or mlflow-skinny)")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    recipe = recipe_of(six_sizes("shards", tmp_path / "run") | {"log": {"tensorboard": False, "mlflow": True}})
    name = _service_run(recipe)["mlflow"]
    client = mlflow.MlflowClient()
    run = client.get_run(name)
    assert run.info.status == "FINISHED" and run.info.run_name == "run"
    history = {metric.step: metric.value for metric in client.get_metric_history(name, "train/loss")}
    assert history == {step: 10.0 / step for step in (1, 2, 3, 4)}
    assert run.data.metrics["loss/demi"] == 4.0
    assert run.data.metrics["evaluation/a_b/ndcg_cut_10/demi"] == 0.25
    assert run.data.params["objective.kl"] == "scores"
    files = [path.name for path in (tmp_path / "store").rglob("*") if path.is_file()]
    assert "1_changed_settings.md" in files and "nDCG_10_step_00000004.png" in files


def test_an_mlflow_that_is_away_is_refused_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow", reason="needs the package mlflow (or mlflow-skinny)")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    recipe = recipe_of(six_sizes("shards", tmp_path / "run") | {"log": {"tensorboard": False, "mlflow": True}})
    with pytest.raises(ConfigError, match=r"log\.mlflow = true, and it cannot be used .*127\.0\.0\.1"):
        open_dashboard(recipe, start_step=0)


def _wandb_records(data: bytes) -> Iterator[bytes]:
    """Messages of an offline run: LevelDB's log format (crc, length, type) in blocks of 32 KiB, after seven bytes."""
    place, message = 7, b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        message += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield message
            message = b""


@pytest.mark.processes
def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real package, offline: what it would send is read back from its files."""
    pytest.importorskip("wandb", reason="needs the package wandb")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    address = "https://me:geheim@h.example/shards"
    monkeypatch.setattr(sys, "argv", ["trainer.finetune", f'--data.shards=["{address}"]'])
    recipe = recipe_of(six_sizes(address, tmp_path / "run") | {"log": {"tensorboard": False, "wandb": True}})
    name = _service_run(recipe)["wandb"]
    losses: dict[int, float] = {}
    keys: set[str] = set()
    for path in (tmp_path / "run").rglob(f"run-{name}.wandb"):
        for data in _wandb_records(path.read_bytes()):
            record = wandb_internal_pb2.Record.FromString(data)
            if record.HasField("history"):
                items = {(i.key or "/".join(i.nested_key)): json.loads(i.value_json) for i in record.history.item}
                keys |= items.keys()
                if "loss" in items:
                    losses[items["_step"]] = items["loss"]
    assert losses == {step: 10.0 / step for step in (1, 2, 3, 4)}
    assert any("nDCG@10" in key for key in keys) and any("loss/demi" in key for key in keys)
    # Negative control: the address is there, without its password.
    sent = b"".join(path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file())
    assert b"https://***@h.example/shards" in sent and b"geheim" not in sent


def test_wandb_is_not_told_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may hold passwords; `test_wandb` reads what the real package would send."""
    chosen: dict[str, object] = {}
    fake = SimpleNamespace(init=lambda **_: SimpleNamespace(id="x"), Settings=lambda **given: chosen.update(given))
    monkeypatch.setitem(sys.modules, "wandb", fake)
    WeightsAndBiases(tmp_path, resumed=False)
    assert chosen["x_disable_meta"] is True


def test_wandb_takes_a_late_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The service drops what comes with a step before its newest one; a save that overlaps with training comes so."""
    shown: dict[int, dict[str, float]] = {}

    def log(values: dict[str, float], step: int) -> None:
        if step >= max(shown, default=0):
            shown[step] = shown.get(step, {}) | values

    run = SimpleNamespace(id="x", log=log)
    fake = SimpleNamespace(init=lambda **_: run, Settings=lambda **_: None)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    sink = WeightsAndBiases(tmp_path, resumed=False)
    for step, values in [(2, {"loss": 1.0}), (3, {"loss": 0.5}), (2, {"checkpoint/mib": 7.0}), (4, {"loss": 0.2})]:
        sink.scalars(step, values)
    assert shown == {2: {"loss": 1.0}, 3: {"loss": 0.5, "checkpoint/mib": 7.0}, 4: {"loss": 0.2}}


def test_a_full_disk_under_tensorboard_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread fails, says nothing itself, and the run goes on. Negative control: other threads do speak."""
    spoken: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda arguments: spoken.append(arguments.thread))
    before = set(threading.enumerate())
    dashboard = Dashboard([TensorBoard(tmp_path, sizes=[], start_step=0, layout={})], STARBUCKS_LADDER)
    dashboard.record({"step": 1, "loss": 1.0})
    (writing,) = set(threading.enumerate()) - before

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(RecordWriter, "write", full)
    dashboard.record({"step": 2, "loss": 1.0})
    writing.join()
    for step in (3, 4, 5):
        dashboard.record({"step": step, "loss": 1.0})
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1 and "TensorBoard misses records from step" in told[0] and "No space left" in told[0]
    assert not spoken
    other = threading.Thread(target=full)
    other.start()
    other.join()
    assert spoken == [other]

"""Where records go besides metrics.jsonl: TensorBoard, Weights & Biases, MLflow, all behind one small interface.

A sink gets names and numbers; trainer/monitoring/dashboard.py decides what is worth showing. The names are those of
metrics.jsonl.

In TensorBoard, colours belong to runs, not to tags. So a number that is measured at every size is written under one tag
by a small run for each size, beside the main run. One chart then shows a line of its own colour for each size:

    tensorboard/            train/loss, train/lr, speed/tokens_per_second, …; the layout, figures and texts
    tensorboard/1_demi/     losses/encoder, losses/kl and the like, evaluation/<task>/<metric>
    tensorboard/2_short/    the same, and so on; numbered, because TensorBoard sorts by name
    tensorboard/results/    the settings and the newest results by which runs are compared: the HPARAMS tab

Calls to MLflow run in their own thread, because its client waits for the server; Weights & Biases has such a thread
itself.
"""

from __future__ import annotations

import io
import json
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from data.ground.errors import ConfigError
from data.ground.files import write_atomically
from data.ground.records import Record, read_record
from trainer.config.sections import LogConfig
from trainer.monitoring.names import CHECKPOINT, EVALUATION, is_off_the_ladder, loss_of

log = logging.getLogger(__name__)

Layout = Mapping[str, Mapping[str, Sequence[str]]]  # category -> chart -> patterns of tags
Settings = Mapping[str, bool | float | str]

MAIN_RUN = "."
RESULTS_RUN = "results"
_SPEED = ("tokens_per_second", "mfu", "seconds", "padding_share", "data_wait_share", "memory_mib")
_TRACKING_FILE = "tracking.json"
_PROJECT = "barista"
_SECONDS_TO_FINISH = 60.0


class _Tracking(Record):
    """The services' names of a run."""

    wandb: str | None = None
    mlflow: str | None = None


class Sink(Protocol):
    """One place that shows a run. Numbers come by the names of metrics.jsonl."""

    name: str

    def scalars(self, step: int, values: Mapping[str, float]) -> None: ...
    def text(self, name: str, markdown: str) -> None: ...
    def figure(self, name: str, figure: Any, *, step: int) -> None: ...
    def hparams(self, settings: Settings) -> None: ...
    def results(self, step: int, values: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


def check_sinks(chosen: LogConfig) -> None:
    """Refuse trackers that cannot be used, before anything starts."""
    for key, package, wanted in (("wandb", "wandb", chosen.wandb), ("mlflow", "mlflow", chosen.mlflow)):
        if wanted and find_spec(package) is None:
            raise ConfigError(
                f"log.{key} = true needs the package {package}; install it with `python -m pip install {package}`, or "
                f"set log.{key} to false"
            )
    if chosen.mlflow and not os.environ.get("MLFLOW_TRACKING_URI"):
        raise ConfigError(
            "log.mlflow = true needs the server's address in the environment variable MLFLOW_TRACKING_URI, such as "
            "http://mlflow.example.org:5000"
        )


def size_run(names: Sequence[str], name: str) -> str:
    """The folder of a size's own TensorBoard run, numbered from the smallest."""
    return f"{names.index(name) + 1}_{name}"


def tensorboard_place(name: str, sizes: Sequence[str]) -> tuple[str, str] | None:
    """A name of metrics.jsonl -> (TensorBoard run, tag), or None where it is not a curve.

    `sizes`: names of the sizes that have a run of their own. Evaluations of other sizes are cells of the heat map.
    """
    stem, _, last = name.rpartition("/")
    if name.startswith(EVALUATION):
        if last in sizes:
            return size_run(sizes, last), stem
        return None if is_off_the_ladder(last) else (MAIN_RUN, name)
    if loss := loss_of(name):
        return (size_run(sizes, last), loss.tag) if last in sizes else (MAIN_RUN, f"{loss.tag}/{last}")
    if name.startswith(CHECKPOINT):
        return MAIN_RUN, f"speed/checkpoint_{name.removeprefix(CHECKPOINT)}"
    if stem:
        return MAIN_RUN, name
    return MAIN_RUN, f"speed/{name}" if name in _SPEED else f"train/{name}"


class TensorBoard:
    """Event files under `folder`. A resumed run hides what a former process wrote after `start_step`."""

    name = "TensorBoard"

    def __init__(
        self, folder: Path, *, sizes: Sequence[str], start_step: int, layout: Layout, trial: str | None = None
    ) -> None:
        self._folder = folder
        self._sizes = tuple(sizes)
        self._start_step = start_step
        self._trial = trial or str(folder)
        self._writers: dict[str, Any] = {}
        _leave_errors_to_the_next_write()
        if layout:
            self._writer(MAIN_RUN).add_custom_scalars(
                {
                    category: {title: ["Multiline", list(patterns)] for title, patterns in charts.items()}
                    for category, charts in layout.items()
                }
            )

    def _writer(self, run: str) -> Any:
        if run not in self._writers:
            from torch.utils.tensorboard import SummaryWriter

            self._writers[run] = SummaryWriter(str(self._folder / run), purge_step=self._start_step + 1, flush_secs=20)
        return self._writers[run]

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            if place := tensorboard_place(name, self._sizes):
                self._writer(place[0]).add_scalar(place[1], value, step)

    def text(self, name: str, markdown: str) -> None:
        self._writer(MAIN_RUN).add_text(name, markdown)

    def figure(self, name: str, figure: Any, *, step: int) -> None:
        self._writer(MAIN_RUN).add_figure(name, figure, global_step=step, close=False)

    def hparams(self, settings: Settings) -> None:
        # add_hparams would make a run named by the clock, and declare metrics, of which only the first run's count.
        # Without a declaration, the tab shows the metrics of all runs. The plugin's `api` would import TensorFlow.
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb

        summary = hparams_pb(dict(settings), trial_id=self._trial)
        self._writer(RESULTS_RUN).file_writer.add_summary(summary)

    def results(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer(RESULTS_RUN).add_scalar(f"results/{name}", value, step)

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()


def _leave_errors_to_the_next_write() -> None:
    """Keep TensorBoard's own threads from reporting errors: the next write raises and reports them again."""
    tell = threading.excepthook
    if getattr(tell, "leaves_tensorboard", False):
        return

    def hook(arguments: threading.ExceptHookArgs) -> None:
        if type(arguments.thread).__module__.split(".")[0] != "tensorboard":
            tell(arguments)

    hook.leaves_tensorboard = True  # type: ignore[attr-defined]
    threading.excepthook = hook


class WeightsAndBiases:
    """A run of the project `barista`, or of WANDB_PROJECT; a resumed run goes on in the same one."""

    name = "Weights & Biases"

    def __init__(self, folder: Path, *, resumed: bool) -> None:
        import wandb

        self._wandb = wandb
        known = _tracked(folder, "wandb") if resumed else None
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", _PROJECT),
                name=folder.name,
                dir=str(folder),
                id=known or secrets.token_hex(8),
                resume="allow",
                # The metadata would hold this process' arguments as they are, with the passwords in their addresses.
                settings=wandb.Settings(console="off", x_disable_meta=True),
            )
        except Exception as error:
            raise _unreachable("wandb", error, "log in with `wandb login`, or set WANDB_MODE=offline") from error
        _track(folder, "wandb", self._run.id)
        self._newest = 0

    def _log(self, values: dict[str, Any], step: int) -> None:
        # The service drops records of steps before its newest one. A checkpoint that was written while training went on
        # is such a record, so it is shown at the newest step.
        self._newest = max(self._newest, step)
        self._run.log(values, step=self._newest)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._log(dict(values), step)

    def text(self, name: str, markdown: str) -> None:
        self._run.config.update({name: markdown}, allow_val_change=True)

    def figure(self, name: str, figure: Any, *, step: int) -> None:
        self._log({name: self._wandb.Image(_pixels(figure))}, step)

    def hparams(self, settings: Settings) -> None:
        self._run.config.update(dict(settings), allow_val_change=True)

    def results(self, step: int, values: Mapping[str, float]) -> None:
        self._run.summary.update(dict(values))

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """A run of the experiment `barista`, or of MLFLOW_EXPERIMENT_NAME, on the server of MLFLOW_TRACKING_URI."""

    name = "MLflow"

    def __init__(self, folder: Path, *, resumed: bool) -> None:
        # By default, the client waits minutes a call for a server that is down, at the end of a run too.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric, self._param = Metric, Param
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mlflow")
        self._waiting: list[Future[None]] = []
        self._down = False
        try:
            self._client = MlflowClient()
            known = _tracked(folder, "mlflow") if resumed else None
            if known is not None:
                self._run = known
                self._client.update_run(known, status="RUNNING")
            else:
                name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
                found = self._client.get_experiment_by_name(name)
                experiment = self._client.create_experiment(name) if found is None else found.experiment_id
                self._run = self._client.create_run(experiment, run_name=folder.name).info.run_id
        except Exception as error:
            raise _unreachable("mlflow", error, "fix MLFLOW_TRACKING_URI") from error
        _track(folder, "mlflow", self._run)

    def _later(self, call: Callable[..., Any], *arguments: Any, **named: Any) -> None:
        def tell() -> None:
            try:
                call(self._run, *arguments, **named)
                self._down = False
            except Exception as error:
                if not self._down:
                    log.warning("MLflow misses records: %s", _first_line(error))
                self._down = True

        self._waiting = [future for future in self._waiting if not future.done()] + [self._thread.submit(tell)]

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        self._later(
            self._client.log_batch,
            metrics=[self._metric(_mlflow_name(name), value, now, step) for name, value in values.items()],
        )

    def text(self, name: str, markdown: str) -> None:
        self._later(self._client.log_text, markdown, f"{name}.md")

    def figure(self, name: str, figure: Any, *, step: int) -> None:
        self._later(self._client.log_image, _pixels(figure), f"{_mlflow_name(name)}_step_{step:08d}.png")

    def hparams(self, settings: Settings) -> None:
        params = [self._param(name, str(value)) for name, value in settings.items()]
        self._later(self._client.log_batch, params=params)

    def results(self, step: int, values: Mapping[str, float]) -> None:
        """Does nothing, because MLflow's tables show the newest value of every metric anyway."""

    def close(self) -> None:
        self._later(self._client.set_terminated)
        late = wait_for(self._waiting, timeout=_SECONDS_TO_FINISH).not_done
        self._thread.shutdown(wait=False, cancel_futures=True)
        if late:
            log.warning("MLflow did not take the last %d calls; metrics.jsonl has every record", len(late))


def _mlflow_name(name: str) -> str:
    """A name that MLflow takes: of few characters, and never another name's folder, as "loss" is of "loss/demi"."""
    return re.sub(r"[^\w\-. /]", "_", name if "/" in name else f"train/{name}")


def _pixels(figure: Any) -> Any:
    from PIL import Image

    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150)
    image = Image.open(buffer)
    image.load()
    return image


def _unreachable(key: str, error: Exception, hint: str) -> ConfigError:
    return ConfigError(f"log.{key} = true, and it cannot be used ({_first_line(error)}); {hint}, or set it to false")


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _tracked(folder: Path, key: str) -> str | None:
    """A service's name of this run, if a former process of the run stored it."""
    return getattr(_tracking(folder), key)


def _track(folder: Path, key: str, name: str) -> None:
    known = _tracking(folder).model_dump(exclude_none=True)
    write_atomically(folder / _TRACKING_FILE, json.dumps({**known, key: name}, indent=2) + "\n")


def _tracking(folder: Path) -> _Tracking:
    path = folder / _TRACKING_FILE
    hint = "remove it; what follows is then shown as another run"
    return read_record(path, _Tracking, what="file", hint=hint) if path.is_file() else _Tracking()

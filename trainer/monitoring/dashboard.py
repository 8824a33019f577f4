"""What a person sees of a run: the layout of the charts, the heat map, the recipe, and what runs are compared by.

The dashboard gets the lines of metrics.jsonl one by one, on rank 0, and passes them to the trackers
(trainer/monitoring/trackers.py). A tracker that fails in the middle of a run costs a warning, never the run, because
metrics.jsonl has every record.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import methodcaller
from pathlib import Path
from typing import Any

from models.sizes import Ladder, Size
from trainer.config.load import as_tables
from trainer.config.read_keys import is_read
from trainer.config.schema import Recipe, by_key
from trainer.evaluation.results.report import HEADLINE_METRICS, METRIC_LABELS, close_figure, draw_heat_map
from trainer.monitoring.names import EVALUATION, score_of
from trainer.monitoring.trackers import Layout, MLflow, Settings, Sink, TensorBoard, WeightsAndBiases, size_run

log = logging.getLogger(__name__)

# The keys that tell one run from another; the recipe's text shows all other keys.
COMPARED = (
    "model.source",
    "model.pooling",
    "model.frozen_layers",
    "model.lora_rank",
    "model.trains",
    "objective.name",
    "objective.sizes",
    "objective.preset",
    "objective.loss",
    "objective.temperature",
    "objective.kl",
    "objective.kl_weight",
    "objective.encoder_mask_ratio",
    "objective.decoder_mask_ratio",
    "objective.decoder",
    "teacher.vector_weight",
    "teacher.similarity_weight",
    "teacher.gram_weight",
    "teacher.order_weight",
    "optim.name",
    "optim.lr",
    "optim.muon_lr",
    "optim.weight_decay",
    "optim.schedule",
    "optim.warmup_ratio",
    "train.steps",
    "train.epochs",
    "train.global_batch_size",
    "data.num_positives",
    "data.num_negatives",
    "run.seed",
    "engine.ds_config",
)


@dataclass
class Dashboard:
    """All trackers of a run."""

    sinks: Sequence[Sink]
    ladder: Ladder
    _newest: dict[str, float] = field(default_factory=dict)
    _step: int = 0
    _failed_before: set[str] = field(default_factory=set)  # names of sinks, at the last record
    _failed_now: set[str] = field(default_factory=set)

    def record(self, record: Mapping[str, Any]) -> None:
        """Show one line of metrics.jsonl; values that are not numbers are skipped.

        A result that is not defined (null) takes the place of an earlier one, which is then no longer shown.
        """
        step = record["step"]
        values = {
            name: float(value)
            for name, value in record.items()
            if name != "step" and isinstance(value, (int, float)) and not isinstance(value, bool)
        }
        undefined = results_of({name: math.nan for name, value in record.items() if value is None}, self.ladder)
        self._step = step
        for name in self._failed_before - self._failed_now:
            log.warning("%s takes records again, before step %d", name, step)
        self._failed_before, self._failed_now = self._failed_now, set()
        self._each(lambda sink: sink.scalars(step, values))
        self._newest = {name: value for name, value in self._newest.items() if name not in undefined}
        self._newest |= results_of(values, self.ladder)
        scores = {name: value for name, value in values.items() if name.startswith(EVALUATION)}
        if not scores:
            return
        for (task, metric), grid in heat_maps(scores, self.ladder).items():
            label = METRIC_LABELS[metric]
            figure = draw_heat_map(grid, title=f"{task}, step {step}", label=label)
            # TensorBoard shows figures small, so this one has few inches, in which the numbers are large.
            figure.set_size_inches(1.6 + 0.52 * len({size.dim for size in grid}), 2.6)
            figure.set_dpi(180)
            self._each(methodcaller("figure", f"{task}/{label}", figure, step=step))
            close_figure(figure)
        self._show_results()

    def introduce(self, settings: Settings, texts: Mapping[str, str]) -> None:
        """Tell all trackers the run's settings and texts."""
        self._each(lambda sink: sink.hparams(settings))
        for name, markdown in texts.items():
            self._each(methodcaller("text", name, markdown))

    def _show_results(self) -> None:
        if self._newest:
            self._each(lambda sink: sink.results(self._step, self._newest))

    def close(self) -> None:
        self._show_results()
        self._each(lambda sink: sink.close())

    def _each(self, call: Callable[[Sink], None]) -> None:
        for sink in self.sinks:
            try:
                call(sink)
            except Exception as error:
                if sink.name not in self._failed_before | self._failed_now:
                    log.warning(
                        "%s misses records from step %d on (%s: %s); metrics.jsonl has them",
                        sink.name,
                        self._step,
                        type(error).__name__,
                        error,
                    )
                self._failed_now.add(sink.name)


def open_dashboard(recipe: Recipe, *, start_step: int) -> Dashboard:
    """Open the trackers that the recipe's [log] names and tell them what the run is; rank 0 calls it."""
    folder = Path(recipe.run.output)
    about = folder / "environment.json"
    environment = about.read_text(encoding="utf-8", errors="replace") if about.is_file() else ""
    sinks: list[Sink] = []
    if recipe.log.tensorboard:
        try:
            sinks.append(
                TensorBoard(
                    folder / "tensorboard",
                    sizes=shown_sizes(recipe),
                    start_step=start_step,
                    layout=layout_of(recipe),
                    trial=f"{folder.name} ({folder.parent})",
                )
            )
        except OSError as error:
            log.warning("TensorBoard misses this run (%s); metrics.jsonl has its records", error)
    if recipe.log.wandb:
        sinks.append(WeightsAndBiases(folder, resumed=start_step > 0))
    if recipe.log.mlflow:
        sinks.append(MLflow(folder, resumed=start_step > 0))
    dashboard = Dashboard(sinks, recipe.ladder)
    dashboard.introduce(settings_of(recipe), texts_of(recipe, environment))
    return dashboard


def shown_sizes(recipe: Recipe) -> list[str]:
    """Names of the sizes that get a line of their own, smallest first: the ladder's and the fixed ones trained."""
    return [recipe.ladder.name(size) for size in recipe.step_sizes.shown]


def layout_of(recipe: Recipe) -> Layout:
    """The Custom Scalars tab: categories of charts; a chart shows the tags that its patterns match."""
    evaluation = recipe.evaluation
    # TensorBoard merges the charts of all runs below one folder. Each objective has a title of its own, so that its
    # charts stay apart from those of other objectives.
    title, losses = recipe.kind.charts(recipe)
    metrics = ["spearman"] * bool(evaluation.sts) + ["ndcg_cut_10", "recip_rank_10"] * bool(evaluation.beir)
    scores = {METRIC_LABELS[metric]: [f"^evaluation/.*/{metric}$"] for metric in metrics}
    return {
        title: losses,
        **({"Evaluation by size": scores} if scores else {}),
        "Training": {
            "loss, all sizes together": ["^train/loss$"],
            "learning rate": ["^train/(muon_)?lr$"],
            "gradient norm before clipping": ["^train/grad_norm$"],
            "epoch": ["^train/epoch$"],
            "skipped steps": ["^train/skipped"],
        },
        "Speed": {
            "tokens a second, without padding": ["^speed/tokens_per_second$"],
            "model FLOPs utilisation": ["^speed/mfu$"],
            "shares: of tokens that are padding, of time waiting for data": [
                "^speed/padding_share$",
                "^speed/data_wait_share$",
            ],
            "memory, MiB": ["^speed/memory_mib$"],
            "seconds a step": ["^speed/seconds$"],
            "seconds a checkpoint, and of them standing still": ["^speed/checkpoint_(still_)?seconds$"],
        },
    }


def settings_of(recipe: Recipe) -> Settings:
    """The settings by which runs are compared, without those that this run does not read."""
    values = by_key(as_tables(recipe))
    ladder = " ".join(str(size) for size in recipe.ladder)
    return {name: values[name] for name in COMPARED if is_read(recipe, name)} | {"model.ladder": ladder}


def texts_of(recipe: Recipe, environment: str) -> dict[str, str]:
    """Markdown by name: what the recipe sets, all of its keys, and where it runs."""
    defaults = dataclasses.asdict(Recipe())
    chosen = {
        section: {key: value for key, value in table.items() if value != defaults[section][key]}
        for section, table in as_tables(recipe).items()
    }
    texts = {
        "recipe/1_changed_settings": _code(_short_toml({name: table for name, table in chosen.items() if table})),
        "recipe/2_all_settings": _code(_short_toml(as_tables(recipe))),
    }
    return texts | ({"recipe/3_environment": _code(environment)} if environment else {})


def results_of(values: Mapping[str, float], ladder: Ladder) -> dict[str, float]:
    """The values of a record by which runs are compared: the loss, the ladder's headline scores, the speed."""
    names = list(ladder.names.values())
    chosen = {name: values[name] for name in ("loss", "tokens_per_second") if name in values}
    for name, value in values.items():
        score = score_of(name)
        if score and score.metric in HEADLINE_METRICS.values() and score.size in names:
            chosen[f"{score.task} {METRIC_LABELS[score.metric]} {size_run(names, score.size)}"] = value
    return chosen


def heat_maps(scores: Mapping[str, float], ladder: Ladder) -> dict[tuple[str, str], dict[Size, float]]:
    """(task, headline metric) -> size -> score, of a record's scores."""
    grids: dict[tuple[str, str], dict[Size, float]] = {}
    for name, value in scores.items():
        score = score_of(name)
        if score and score.metric in HEADLINE_METRICS.values() and math.isfinite(value):
            grids.setdefault((score.task, score.metric), {})[ladder.find(score.size)] = value
    return grids


def _short_toml(sections: Mapping[str, Mapping[str, Any]]) -> str:
    """TOML for reading: one key a line, its list on the same line, and so shorter than recipe.toml."""
    lines = []
    for section, table in sections.items():
        below = {key: value for key, value in table.items() if isinstance(value, dict) and value}
        own = {key: value for key, value in table.items() if key not in below}
        if own:
            lines += [f"[{section}]", *(f"{key} = {json.dumps(value)}" for key, value in own.items()), ""]
        if below:
            lines.append(_short_toml({f"{section}.{key}": value for key, value in below.items()}) + "\n")
    return "\n".join(lines).rstrip()


def _code(text: str) -> str:
    return "    " + text.rstrip().replace("\n", "\n    ")

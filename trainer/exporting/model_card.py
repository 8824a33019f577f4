"""A model card's account of the run behind a model: data, recipe, commit, compute, energy, results, limits.

Everything is read from the run folder (<run>/model's parent: recipe.toml, environment.json, metrics.jsonl) and, if
given, an evaluation's results.json. Whatever these files do not tell is called unknown, never guessed.
Energy is an estimate: hours of training steps × ranks × an assumed power of one rank, which the card names.
"""

from __future__ import annotations

import logging
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from data.ground.errors import ConfigError, DataError
from data.ground.files import reading
from data.ground.records import Record, read_record
from data.ground.secrets import without_secrets
from models.sizes import Size
from trainer.config.load import as_toml, build_recipe, read_json_object, read_toml
from trainer.environment import FILE as ENVIRONMENT_FILE
from trainer.environment import Environment
from trainer.evaluation.results.report import METRIC_LABELS, markdown_table
from trainer.monitoring.lines import FILE as METRICS_FILE
from trainer.monitoring.lines import read_lines

log = logging.getLogger(__name__)

# The power of one rank's share of a machine under load: a data-centre GPU with its host, or half a small CPU server.
WATTS_PER_RANK = {"cuda": 500.0, "cpu": 50.0}
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_SHOWN_METRICS = ("spearman", "ndcg_cut_10", "recip_rank_10", "recall_100")


class Score(Record):
    """The part of a record of results.json that a card shows."""

    method: str
    task: str
    kind: Literal["sts", "retrieval", "transfer"]
    layers: int
    dim: int
    metric: str
    value: float | None
    feed_forward: float = 1.0

    @property
    def shape(self) -> Size:
        return Size(self.layers, self.dim, self.feed_forward)


class _Results(Record):
    """The part of results.json that a card shows."""

    format: Literal[1]
    records: tuple[Score, ...]


@dataclass(frozen=True)
class Compute:
    steps: int
    samples: int
    hours: float  # of the logged steps, including waiting for data, without start-up, evaluation and saving
    ranks: int
    device: str
    watts_per_rank: float

    @property
    def kilowatt_hours(self) -> float:
        return self.hours * self.ranks * self.watts_per_rank / 1000


def training_section(model_folder: Path, *, watts_per_rank: float | None = None) -> str:
    """Markdown about the run that made a model; if the folder is not inside a run's, the text says so."""
    run = model_folder.resolve().parent
    if watts_per_rank is not None and not all((run / name).is_file() for name in ("recipe.toml", METRICS_FILE)):
        raise ConfigError(
            f"--watts-per-rank is for the energy of a run, and {model_folder} is not in the folder of a run with its "
            f"{METRICS_FILE}; leave --watts-per-rank out"
        )
    if not (run / "recipe.toml").is_file():
        return "## Training\n\nUnknown: the model folder is not inside the folder of a run.\n"
    recipe = build_recipe(read_toml(run / "recipe.toml"))
    told = run / ENVIRONMENT_FILE
    environment = read_record(told, Environment, what="file") if told.is_file() else Environment()
    rows = [
        ["objective", f"{recipe.objective.name}, sizes: {recipe.objective.sizes}"],
        [
            "started from",
            without_secrets(recipe.model.source) or f"random weights ({recipe.model.config.get('model_type')})",
        ],
        ["data", "; ".join(_data(folder) for folder in recipe.data.shards)],
        ["seed", str(recipe.run.seed)],
        ["commit", str(environment.commit or "unknown")],
    ]
    if environment.versions:
        rows.append(["software", ", ".join(f"{name} {version}" for name, version in environment.versions.items())])
    compute = read_compute(run, environment, watts_per_rank=watts_per_rank)
    if compute is None:
        rows.append(["compute", f"unknown: the run has no {METRICS_FILE}"])
    else:
        rows += [
            ["compute", f"{compute.steps:,} steps, {compute.samples:,} samples, {compute.hours:.3g} h"],
            ["device", f"{compute.ranks} × {compute.device}"],
            [
                "energy, estimated",
                f"{compute.kilowatt_hours:.2g} kWh, on the assumption of {compute.watts_per_rank:g} W a rank",
            ],
        ]
    table = markdown_table(["", ""], rows, text_columns=2)
    return (
        f"## Training\n\n{table}\n<details><summary>The resolved recipe</summary>\n\n"
        f"```toml\n{as_toml(recipe).strip()}\n```\n\n</details>\n"
    )


def read_compute(run: Path, environment: Environment, *, watts_per_rank: float | None = None) -> Compute | None:
    """The compute of a run, from its metrics. `seconds` of a record is the mean per step since the record before."""
    path = run / METRICS_FILE
    if not path.is_file():
        return None
    seconds, step, samples = 0.0, 0, 0
    with reading(path, what="metrics"):
        for each in read_lines(path):
            if not each.text.strip():
                continue
            if not each.is_complete:
                log.warning("%s ends in half a line, as a killed run leaves it, which is passed over", path)
                continue
            if isinstance(each.content, DataError):
                raise each.content
            line = each.content
            if line.seconds is None:
                continue
            if not 0 <= line.seconds < math.inf:
                raise DataError(f"{each.where} is damaged (seconds = {line.seconds}); remove that line")
            seconds += line.seconds * (line.step - step)
            step, samples = line.step, line.samples if isinstance(line.samples, int) else samples
    device = environment.device or "unknown CPU"
    # The environment has the name of the CUDA device; on a CPU it has the name from platform.processor().
    kind = "cuda" if any(word in device for word in ("NVIDIA", "Tesla", "GeForce", "AMD Instinct")) else "cpu"
    return Compute(
        step, samples, seconds / 3600, environment.world_size, device,
        watts_per_rank if watts_per_rank is not None else WATTS_PER_RANK[kind],
    )  # fmt: skip


@dataclass(frozen=True)
class Results:
    """The scores of a trained model that a card shows, at all sizes. name: the file's; None if none was given."""

    name: str | None = None
    scores: tuple[Score, ...] = ()

    @classmethod
    def read(cls, path: Path | None) -> Results:
        """The scores in a results.json of `trainer.evaluate sizes`."""
        if path is None:
            return cls()
        hint = "give the results.json of `trainer.evaluate sizes`"
        content = read_record(path, _Results, what="evaluation", hint=hint)
        shown = (r for r in content.records if r.method == "trained" and r.metric in _SHOWN_METRICS)
        return cls(path.name, tuple(shown))

    def of(self, size: Size) -> list[Score]:
        return [r for r in self.scores if r.shape == size]


def results_section(results: Results, size: Size) -> str:
    """Markdown: the scores of one size beside the scores of the largest size."""
    if results.name is None:
        return "## Results\n\nNone given; `python -m trainer.export --results results.json` puts them here.\n"
    mine = results.of(size)
    if not mine:
        return f"## Results\n\n{results.name} has none of the size {size}.\n"
    full = max(r.shape for r in results.scores)
    best = {(r.task, r.metric): r.value for r in results.scores if r.shape == full}
    rows = [[r.task, METRIC_LABELS[r.metric], _number(r.value), _number(best.get((r.task, r.metric)))] for r in mine]
    return f"## Results\n\n{markdown_table(['task', 'metric', str(size), str(full)], rows, text_columns=2)}"


def base_model_of(model_folder: Path) -> str | None:
    """The hub name of the model with which the chain of runs behind a model folder began; None if it is unknown."""
    seen = set()
    while (run := model_folder.resolve().parent) not in seen and (run / "recipe.toml").is_file():
        seen.add(run)
        source = build_recipe(read_toml(run / "recipe.toml")).model.source
        if not source or not Path(source).exists():
            return source if _HUB_NAME.fullmatch(source) else None
        model_folder = Path(source)
    return None


LIMITS = """## Limits

- Trained for the languages and kinds of text in its data; elsewhere it has not been measured.
- Texts are cut at the length above; what follows is not seen.
- Similar does not mean true or safe: embeddings carry the biases of their data.
- Smaller sizes lose quality; compare them on your own data before choosing.
"""


def _data(folder: str) -> str:
    manifest = Path(folder) / "manifest.json"
    if "://" in folder or not manifest.is_file():
        return f"{without_secrets(folder)} (not on this machine)"
    totals = read_json_object(manifest, "file", hint="make the shards again").get("totals")
    known = totals if isinstance(totals, dict) else {}
    counts = [f"{known[key]:,} {key}" for key in ("samples", "tokens") if isinstance(known.get(key), int)]
    return f"{folder}" + (f" ({', '.join(counts)})" if counts else "")


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"

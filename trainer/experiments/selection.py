"""The choice among seeds: each is trained for a share of its steps, and the best on held-out tasks to the end."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ConfigDict

from data.ground.errors import ConfigError
from data.ground.files import write_atomically
from data.ground.options import settings_among
from data.ground.records import Record, json_of, read_record
from trainer.build import open_shards
from trainer.config.load import as_tables, load_recipe
from trainer.evaluation.tasks.read import digest_of_tasks, read_tasks
from trainer.experiments.jobs import Job, Work, check_settings, training_job
from trainer.monitoring.lines import FILE as METRICS_FILE
from trainer.monitoring.lines import sound_lines
from trainer.monitoring.names import score_of
from trainer.objectives.collators import total_steps

log = logging.getLogger(__name__)
SELECTION = "selection.json"
_METRICS = ("spearman", "ndcg_cut_10")
_OWN = ("run.seed", "run.output", "run.resume", "train.stop_at_step", "evaluation.every_steps")


class Selection(Record):
    """selection.json."""

    model_config = ConfigDict(allow_inf_nan=True)  # earlier versions wrote NaN where a score is not defined

    identity: dict[str, Any]
    scores: dict[str, dict[str, float | None]]  # None: not defined
    means: dict[str, float | None] | None = None
    best: int | None = None
    why: str | None = None
    model: str | None = None


@dataclass(frozen=True)
class Plan:
    """The work of one command. `overrides`: the user's settings. `step`: the step at which seeds are compared."""

    recipe_file: Path
    overrides: tuple[str, ...]
    seeds: tuple[int, ...]
    step: int
    output: Path
    ranks: int
    identity: Mapping[str, Any]
    module: str

    def run(self, seed: int) -> Path:
        return self.output / f"seed_{seed}"


def make_plan(args: argparse.Namespace, settings: Sequence[str]) -> Plan:
    """The checked plan. Every mistake in the command is found here, before anything is written."""
    if len(set(args.seeds)) < 2 or len(set(args.seeds)) < len(args.seeds) or min(args.seeds) < 0:
        raise ConfigError(f"--seeds {args.seeds} must be two or more different numbers from 0")
    if not 0 < args.share < 1:
        raise ConfigError(f"--share {args.share} must lie between 0 and 1")
    if args.ranks < 1:
        raise ConfigError(f"--ranks {args.ranks} must be at least 1")
    if args.split and args.sts and not args.beir:
        raise ConfigError("--split is read with --beir alone; give --beir, or leave --split out")
    overrides = settings_among(settings, decided=_OWN)
    for key in ("sts", "beir"):
        if args.sts or args.beir:
            overrides.append(f"evaluation.{key}={json.dumps(getattr(args, key))}")
    overrides += [f"evaluation.split={args.split}"] if args.split else []
    check_settings(overrides)
    recipe = load_recipe(args.recipe, overrides)
    if not recipe.evaluation.sts and not recipe.evaluation.beir:
        raise ConfigError("nothing to compare seeds on; give a development set with --sts or --beir")
    read_tasks(recipe.evaluation.sts, recipe.evaluation.beir, split=recipe.evaluation.split)
    steps = recipe.train.steps or total_steps(recipe, open_shards(recipe))
    step = round(args.share * steps)
    if not 1 <= step < steps:
        raise ConfigError(
            f"--share {args.share} of {steps} steps is step {step}, which leaves nothing to compare or "
            "to go on with; give another share or more steps"
        )
    output = Path(args.output)
    tests = digest_of_tasks(recipe.evaluation.sts, recipe.evaluation.beir, split=recipe.evaluation.split)
    identity = {
        "recipe": tomli_w.dumps(as_tables(recipe)),
        "seeds": args.seeds,
        "step": step,
        "ranks": args.ranks,
        "tests_sha256": tests,
    }
    saved = output / SELECTION
    # Selections of earlier versions do not say on which content of their tests they are.
    if saved.is_file() and {"tests_sha256": tests} | _read(saved)["identity"] != identity:
        raise ConfigError(
            f"{output} holds a selection by another recipe, other seeds or steps, or other contents of the development "
            "sets; choose another --output"
        )
    if not saved.is_file() and output.is_dir() and any(output.iterdir()):
        raise ConfigError(f"--output {output} holds other files; choose a new or empty folder")
    module = f"trainer.{recipe.kind.command}"
    return Plan(
        Path(args.recipe), tuple(overrides), tuple(args.seeds), step, output, args.ranks, identity, module
    )  # fmt: skip


def carry_out(plan: Plan, work: Work) -> dict[str, Any]:
    """Train what is not trained yet; returns the content of selection.json."""
    saved = plan.output / SELECTION
    found: dict[str, Any] = {"identity": dict(plan.identity), "scores": {}}
    if saved.is_file():
        found = _read(saved)
    else:
        plan.output.mkdir(parents=True, exist_ok=True)
        _write(saved, found)

    def note_scores(seed: int) -> None:
        found["scores"][str(seed)] = scores_at(plan.run(seed), plan.step)
        _write(saved, found)

    work.carry_out([_start(plan, seed, work, note_scores) for seed in plan.seeds if str(seed) not in found["scores"]])
    if "best" not in found:
        found |= select(found["scores"], plan.step)
        _write(saved, found)
        log.info("%s", found["why"])
    if not (plan.run(found["best"]) / "DONE").is_file():
        work.carry_out([_rest(plan, found["best"], work)])
    for seed in plan.seeds:
        shutil.rmtree(plan.run(seed) / "checkpoints", ignore_errors=True)
    found["model"] = str(plan.run(found["best"]) / "model")
    _write(saved, found)
    return found


def select(scores: Mapping[str, Mapping[str, float]], step: int) -> dict[str, Any]:
    """The seed with the highest mean score, and why. A tie goes to the first seed; a mean of NaN comes last."""
    means = {seed: sum(values.values()) / len(values) for seed, values in scores.items()}
    best = max(means, key=lambda seed: -math.inf if math.isnan(means[seed]) else means[seed])
    others = ", ".join(f"{mean:.4f} with seed {seed}" for seed, mean in means.items() if seed != best)
    why = f"seed {best} has the highest mean at step {step}: {means[best]:.4f}, against {others}"
    return {"means": means, "best": int(best), "why": why}


def scores_at(run: Path, step: int) -> dict[str, float]:
    """task/metric/size -> score of the run's evaluation at a step; empty if there was none at that step.

    A score that is not defined is NaN. Raises OtherFormat if another version wrote a line of the run's metrics.
    """
    found: dict[str, float] = {}
    for line in sound_lines(run / METRICS_FILE):
        if line.step == step:
            for name, value in line.scores.items():
                score = score_of(name)
                if score and score.metric in _METRICS:
                    found["/".join(score)] = math.nan if value is None else value
    return found


def selection_text(found: Mapping[str, Any]) -> str:
    lines = [f"seed {seed}: {mean:.4f}" for seed, mean in found["means"].items()]
    return "\n".join([*lines, found["why"], f"its model: {found['model']}"]) + "\n"


def _start(plan: Plan, seed: int, work: Work, note_scores: Callable[[int], None]) -> Job:
    more = (f"train.stop_at_step={plan.step}", f"evaluation.every_steps={plan.step}")
    job = _training(plan, seed, work, f"seed_{seed}", more, done=lambda: _has_come_to(plan.run(seed), plan.step))
    return dataclasses.replace(job, after=lambda: note_scores(seed))


def _rest(plan: Plan, seed: int, work: Work) -> Job:
    return _training(plan, seed, work, "the best", (), done=(plan.run(seed) / "DONE").is_file)


def _training(plan: Plan, seed: int, work: Work, name: str, more: Sequence[str], *, done: Callable[[], bool]) -> Job:
    run = plan.run(seed)
    settings = [*plan.overrides, *more, f"run.seed={seed}", f"run.output={run}", "run.resume=auto"]
    kind = "start" if more else "rest"
    return training_job(name, kind, plan.module, plan.recipe_file, settings, run, work, ranks=plan.ranks, done=done)


def _has_come_to(run: Path, step: int) -> bool:
    saved = (run / "checkpoints" / f"step_{step:08d}").is_dir()
    return saved and bool(scores_at(run, step)) and not (run / "STOPPED").is_file()


def _read(path: Path) -> dict[str, Any]:
    hint = "restore it, or choose another --output"
    found = read_record(path, Selection, what="selection", hint=hint).model_dump()
    found["scores"] = {seed: _numbers(scores) for seed, scores in found["scores"].items()}
    if found["means"] is not None:
        found["means"] = _numbers(found["means"])
    return {key: value for key, value in found.items() if value is not None}


def _numbers(values: Mapping[str, float | None]) -> dict[str, float]:
    return {name: math.nan if value is None else value for name, value in values.items()}


def _write(path: Path, content: Mapping[str, Any]) -> None:
    write_atomically(path, json_of(content, indent=1) + "\n")

"""What `launch.qualify` makes of its lines: the page, launch.plan's predictions beside measurements, and the ETA.

Pure functions of lines and figures. Torch-free.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

from data.ground.records import defined
from launch.scaling import GPUS, INTERCONNECTS, Assumptions, Cluster, Lengths, Model, Prediction, predict
from trainer.config.load import build_recipe
from trainer.costs.gpus import product_name
from trainer.costs.shapes import Shape
from trainer.qualification.lines import Asked, Bound, Line, Outcome, counted, judged, not_answered

# A prediction from a data sheet and three guessed shares; nothing was fitted.
LEAST_RATIO, MOST_RATIO = 0.5, 2.0
TITLES = {
    "attention": "Packed and padded attention",
    "precision": "bf16 and float32",
    "cross_entropy": "Fused cross-entropy",
    "ranks": "Ranks × ZeRO stages",
    "resume": "Kill and resume",
    "steps": "Whole steps",
    "plan": "What launch.plan predicts",
}
_SHARES = {"matrix": "matrix_flops", "memory": "memory_bytes", "link": "link_bytes"}


def remaining_seconds(expected: Sequence[float], *, done: int, before: float, here: float) -> float:
    """How long the parts from number `done` on will still take, if they are as slow as those so far.

    expected: seconds of each part, in order. before: seconds of the parts that are done. here: of this part so far.
    """
    so_far = sum(expected[:done])
    pace = before / so_far if so_far else 1.0
    pace = max(pace, (before + here) / (so_far + expected[done]))
    return max(0.0, pace * expected[done] - here) + pace * sum(expected[done + 1 :])


# --- launch.plan -------------------------------------------------------------------------------------------------


def gpu_named(device: str) -> str | None:
    """The key of GPUS whose data sheet is this device's; None where there is none."""
    return next((key for key, sheet in GPUS.items() if sheet.product == product_name(device)), None)


def shares_of(gpu: str, lines: Sequence[Line], *, hosts: bool) -> dict[str, float]:
    """The shares of the data sheet that were measured: "matrix", "memory", and on one machine "link"; at most 1."""
    values = {name: value for line in lines for name, value in line.outcome.values.items()}
    sheet = GPUS[gpu]
    peaks = {"matrix": sheet.peak_flops, "memory": sheet.memory_bandwidth}
    peaks |= {} if hosts else {"link": sheet.link_bandwidth}
    return {name: min(1.0, values[_SHARES[name]] / peak) for name, peak in peaks.items() if _SHARES[name] in values}


def prediction_of(record: Mapping[str, Any], gpu: str, assumed: Assumptions) -> Prediction:
    """Of the step that steps.json's record describes: one GPU, ZeRO stage 0."""
    recipe = build_recipe(record["recipe"])
    full = recipe.ladder.full
    shape = Shape.of(record["config"], said="the measured model", hidden=full.dim, layers=full.layers)
    lengths = replace(Lengths.longest(recipe), **record["lengths"])
    # The interconnect is not used by one GPU.
    cluster = Cluster(1, 1, GPUS[gpu], INTERCONNECTS["ib-ndr-8x"])
    micro = recipe.train.micro_batch_size
    model = Model.of(recipe, shape)
    return predict(recipe, model, cluster, stage=0, micro_batch_size=micro, lengths=lengths, assumed=assumed)


Records = Mapping[str, Mapping[str, Any]]  # of steps.json, by task


def plan_asked(records: Callable[[], Records], lines: Sequence[Line], *, cuda: bool, hosts: bool) -> list[Asked]:
    """launch.plan's time and memory beside the measured ones. lines: those before, which have measured speeds."""
    questions = []
    for task in ("SMAE", "SRL"):
        for what, judge in {"time": _time_beside, "memory": _memory_beside}.items():
            answer = partial(_plan_outcome, records, task, judge, lines, cuda=cuda, hosts=hosts)
            questions.append(Asked(f"launch.plan's {what} of a {task} step", answer))
    return questions


def _plan_outcome(
    records: Callable[[], Records],
    task: str,
    judge: Callable[[Mapping[str, Any], Prediction, Prediction], Outcome],
    lines: Sequence[Line],
    *,
    cuda: bool,
    hosts: bool,
) -> Outcome:
    if not cuda:
        return not_answered("there is no GPU, and launch.plan predicts GPUs alone")
    record = records().get(task)
    if record is None:
        return not_answered("the step was not measured")
    gpu = gpu_named(record["device"])
    if gpu is None:
        return not_answered(f"launch.plan has no data sheet of {record['device']} (GPUS in launch/scaling.py)")
    shares = {f"{name}_share": value for name, value in shares_of(gpu, lines, hosts=hosts).items()}
    default, again = (prediction_of(record, gpu, assumed) for assumed in (Assumptions(), Assumptions(**shares)))
    return judge(record, default, again)


def _time_beside(record: Mapping[str, Any], default: Prediction, again: Prediction) -> Outcome:
    predicted, measured = default.step_seconds, record["seconds"]
    shown = f"predicted {predicted:.3f} s, with measured shares {again.step_seconds:.3f} s, measured {measured:.3f} s"
    return _beside(predicted, measured, shown)


def _memory_beside(record: Mapping[str, Any], default: Prediction, again: Prediction) -> Outcome:
    predicted, measured = default.memory.total - default.memory.context, record["peak_bytes"]
    shown = f"predicted {predicted / 2**30:.2f} GiB without the context, measured {measured / 2**30:.2f} GiB"
    return _beside(predicted, measured, shown)


def _beside(predicted: float, measured: float, shown: str) -> Outcome:
    bound = Bound(measured / predicted, least=LEAST_RATIO, most=MOST_RATIO)
    return judged({"measured ÷ predicted": bound}, more=shown)


def calibration(lines: Sequence[Line], device: str, *, hosts: bool) -> list[str]:
    """Paragraphs that say how launch.plan takes what was measured."""
    values = {name: value for line in lines for name, value in line.outcome.values.items()}
    gpu = gpu_named(device)
    if gpu is None or not shares_of(gpu, lines, hosts=hosts):
        return [
            "`launch.plan` takes measured speeds as shares of a GPU's data sheet (`--matrix-share`, `--memory-share`, "
            "`--link-share`). Nothing here measured any: that needs a GPU whose data sheet `GPUS` in launch/scaling.py "
            "has, and the subject `steps`, and for links `ranks` on several GPUs."
        ]
    options = " ".join(f"--{name}-share {value:.2f}" for name, value in shares_of(gpu, lines, hosts=hosts).items())
    parts = [f"```\npython -m launch.plan RECIPE.toml --gpu {gpu} {options}\n```"]
    if hosts and "link_bytes" in values:
        parts.append(
            f"`--link-share`: each rank sent {values['link_bytes'] / 1e9:.1f} GB/s in a large all-reduce. Divide by "
            "the bytes a second of your `--interconnect`, or of the GPU's own link where that is slower."
        )
    if "launch_seconds" in values and "context_bytes" in values:
        parts.append(
            f"Two assumptions have no option. In launch/scaling.py, `Assumptions.launch_seconds` is "
            f"{Assumptions.launch_seconds * 1e6:.0f} µs, measured here {values['launch_seconds'] * 1e6:.1f} µs; and "
            f"`Assumptions.context_bytes` is {Assumptions.context_bytes / 2**30:.1f} GiB, measured here "
            f"{values['context_bytes'] / 2**30:.1f} GiB."
        )
    return parts


# --- the page ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Page:
    """lines: by subject. about: what the processes say of the machine. seconds: of everything."""

    lines: Sequence[Line]
    about: Mapping[str, Any]
    quick: bool
    hostfile: bool
    seconds: float

    @property
    def failed(self) -> int:
        return counted(self.lines)["failed"]

    @property
    def summary(self) -> str:
        counts = ", ".join(f"{count} {verdict}" for verdict, count in counted(self.lines).items())
        return f"{counts}; {self.seconds:.0f} s"

    @property
    def as_json(self) -> dict[str, Any]:
        counts = {verdict.replace(" ", "_"): count for verdict, count in counted(self.lines).items()}
        lines = [defined(line.as_json()) for line in self.lines]  # the values of failed lines may be NaN
        return {
            **counts,
            "seconds": round(self.seconds, 1),
            "quick": self.quick,
            "about": dict(self.about),
            "lines": lines,
        }

    @property
    def text(self) -> str:
        where = "the hosts of a hostfile" if self.hostfile else "one machine"
        facts = ", ".join(f"{name} {value}" for name, value in self.about.items())
        form = "quick form" if self.quick else "full form"
        parts = [
            "# Qualification",
            f"`launch.qualify`, {form}, on {where}, {datetime.now(UTC):%Y-%m-%d}: {facts or platform.machine()}.",
            f"**{self.summary}.** What is asked, and why the tolerances are what they are: docs/qualification.md.",
        ]
        for subject in dict.fromkeys(line.subject for line in self.lines):
            parts += [f"## {TITLES.get(subject, subject)}", _table([x for x in self.lines if x.subject == subject])]
        parts += [
            "## Recalibrating launch.plan",
            *calibration(self.lines, self.about.get("device", ""), hosts=self.hostfile),
        ]
        return "\n\n".join(parts) + "\n"


def _table(lines: Sequence[Line]) -> str:
    rows = [("asked", "verdict", "figure, or why not", "tolerance", "s"), ("---",) * 5]
    for line in lines:
        outcome = line.outcome
        verdict = f"**{outcome.verdict}**" if outcome.verdict == "failed" else outcome.verdict
        rows.append((line.asked, verdict, outcome.figure, outcome.tolerance, f"{line.seconds:.1f}"))
    return "\n".join(f"| {' | '.join(cell.replace('|', '¦') for cell in row)} |" for row in rows)

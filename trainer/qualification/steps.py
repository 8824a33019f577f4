"""Whole steps of SMAE and SRL against the direct way, and against sentence-transformers: results, time, memory, MFU.

Ours runs through the objective and the engine that training uses, at ZeRO stage 0: under autocast to bf16 on a GPU, in
float32 on a CPU. What was measured is also written to steps.json, for launch.qualify to set launch.plan's prediction
beside it.
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from data.collate import PairBatch
from trainer.config.load import as_tables
from trainer.config.schema import Recipe
from trainer.costs.gpus import listed_peak_flops
from trainer.distributed import start
from trainer.ds_config import read_ds_config
from trainer.engine import Engine
from trainer.optim import adamw
from trainer.qualification import direct, made_up
from trainer.qualification.lines import Asked, Bound, Outcome, judged, measured, not_answered
from trainer.qualification.passes import Plain, Subject, gradient_of, peak_bytes, relative_error, seconds_of
from trainer.qualification.settings import TASKS, Setting, recipe_of, recipe_values

# In float32: relative, of the loss, and of all gradients as one vector. Sums run in other orders.
LOSS, GRADIENT = 1e-5, 1e-3
# What is computed once for all sizes must not take longer, nor more memory, than a pass for each.
LEAST_SPEED, MOST_MEMORY = 1.0, 1.0
STEPS_FILE = "steps.json"
_LR = 1e-6
_NO_GPU = "there is no GPU, whose memory could be counted"
_TRAIN: dict[str, Callable[..., float]] = {"SMAE": direct.train_masked, "SRL": direct.train_contrastive}


class Ours:
    """A step through the objective and DeepSpeed's engine."""

    def __init__(self, recipe: Recipe) -> None:
        self.subject = Subject(recipe)
        world = start()
        self.engine = Engine(self.subject.parts.module, recipe, world, read_ds_config(recipe.engine.ds_config))
        self.engine.train()
        self.flops = 0.0

    def step(self) -> None:
        self.flops = self.subject.objective.forward_backward(self.engine, self.subject.batch, 0).flops
        self.engine.step(_LR)


class Direct:
    """The same model's step by trainer/qualification/direct.py and AdamW."""

    def __init__(self, recipe: Recipe, task: str, setting: Setting) -> None:
        self.subject, self._train = Subject(recipe), partial(_TRAIN[task], recipe=recipe, autocast=setting.cuda)
        self.subject.parts.encoder.backbone.set_attn_implementation("sdpa")
        self.module = self.subject.parts.module.to(setting.device).train()
        self._optimizer = adamw(self.module, lr=_LR, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)

    def step(self) -> None:
        self._train(self.module, self.subject.batch)
        self._optimizer.step()
        self._optimizer.zero_grad()


class Theirs:
    """sentence-transformers' step: every width at the last layer, which is what it can train at once."""

    def __init__(self, recipe: Recipe, setting: Setting) -> None:
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss, MatryoshkaLoss
        from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

        subject = Subject(recipe)
        assert isinstance(subject.batch, PairBatch)
        folder = str(setting.folder / "theirs")
        subject.parts.encoder.backbone.save_pretrained(folder)
        subject.parts.tokenizer.save_pretrained(folder)
        modules = [
            Transformer(folder, model_kwargs={"add_pooling_layer": False}),
            Pooling(setting.scale.hidden, "mean"),
        ]
        self._model = SentenceTransformer(modules=modules, device=setting.device.type).train()
        inner = CachedMultipleNegativesRankingLoss(
            self._model, scale=1 / recipe.objective.temperature, mini_batch_num_tokens=recipe.token_budget
        )
        self._loss = MatryoshkaLoss(self._model, inner, [size.dim for size in recipe.ladder])
        self._optimizer = adamw(self._model, lr=_LR, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
        self._columns = [
            {name: value.to(setting.device) for name, value in column.items()}
            for column in direct.columns_of(subject.batch)
        ]
        self._setting = setting

    def step(self) -> None:
        with torch.autocast(self._setting.device.type, torch.bfloat16, enabled=self._setting.cuda):
            # The loss may add entries to the features it is given.
            loss = self._loss([dict(column) for column in self._columns], torch.empty(0, device=self._setting.device))
            loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()


def asked(setting: Setting) -> list[Asked]:
    @functools.cache
    def shards() -> Path:
        return made_up.write(setting.folder / "data", setting.scale)

    def recipe(task: str, *, in_bf16: bool) -> Recipe:
        ds_config = setting.ds_config_in_bf16 if in_bf16 else setting.ds_config_in_float32
        values = recipe_values(task, setting.scale, shards(), ds_config=ds_config, output=setting.folder / "run")
        values["optim"] |= {"max_grad_norm": 0.0}
        return recipe_of(values)

    @functools.cache
    def costs(task: str, who: str) -> dict[str, float]:
        chosen = recipe(task, in_bf16=setting.cuda)
        makers: dict[str, Callable[[], Any]] = {
            "ours": partial(Ours, chosen),
            "direct": partial(Direct, chosen, task, setting),
            "theirs": partial(Theirs, chosen, setting),
        }
        gc.collect()
        held = torch.cuda.memory_allocated() if setting.cuda else 0
        found = costs_of(makers[who](), setting)
        if setting.cuda:
            found["peak_bytes"] -= held  # what earlier measurements have left
        if who == "ours":
            _record(setting, task, chosen, found)
        return found

    return [question for task in TASKS for question in _of_task(task, setting, recipe, partial(costs, task))]


Costs = Callable[[str], dict[str, float]]  # who takes the step -> its costs


def _of_task(task: str, setting: Setting, recipe: Callable[..., Recipe], costs: Costs) -> list[Asked]:
    def equal() -> Outcome:
        return equality(recipe(task, in_bf16=False), task, setting)

    def saving() -> Outcome:
        return memory(costs("ours"), costs("direct")) if setting.cuda else not_answered(_NO_GPU)

    questions = {
        f"{task} step = the direct way, float32": equal,
        f"{task} step, time against the direct way": lambda: speed(costs("ours"), costs("direct")),
        f"{task} step, peak memory against the direct way": saving,
        f"{task} step, MFU": lambda: utilisation(costs, setting),
    }
    if task == "SRL":
        beside = "SRL step beside sentence-transformers (widths of the last layer alone)"
        questions[beside] = lambda: beside_theirs(costs)
    return [Asked(question, answer) for question, answer in questions.items()]


def equality(recipe: Recipe, task: str, setting: Setting) -> Outcome:
    """Loss and gradient of the fresh model on the first batch, both ways."""
    subject = Subject(recipe)
    engine = Plain(subject.parts.module, setting.device)
    loss, gradient = subject.loss_and_gradient(engine)
    engine.module.zero_grad()
    wanted = _TRAIN[task](engine.module, subject.batch, recipe)
    errors = {
        "loss": Bound(abs(loss / wanted - 1), most=LOSS),
        "gradient": Bound(relative_error(gradient, gradient_of(engine.module)), most=GRADIENT),
    }
    return judged(errors)


def costs_of(way: Any, setting: Setting) -> dict[str, float]:
    """Seconds of a step; on a GPU also the bytes that it adds to what was held, and the most that were held."""
    found = {"seconds": seconds_of(way.step, setting.device, repeats=4 if setting.cuda else 2)}
    if setting.cuda:
        peak, before = peak_bytes(way.step, setting.device)
        found |= {"added_bytes": peak - before, "peak_bytes": peak}
    if isinstance(way, Ours):
        found["flops"] = way.flops
    return found


def _record(setting: Setting, task: str, recipe: Recipe, found: dict[str, float]) -> None:
    """Add a task to steps.json: its recipe, its model's shape, the mean lengths of its texts, and its costs."""
    path = setting.folder / STEPS_FILE
    records = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    batch = Subject(recipe).batch
    pairs = isinstance(batch, PairBatch)
    texts = {"query": batch.queries, "passage": batch.passages} if pairs else {"document": batch}
    records[task] = {
        "recipe": as_tables(recipe),
        "config": setting.scale.config | {"vocab_size": setting.scale.vocabulary},
        "lengths": {name: float(each.offsets.diff().float().mean()) for name, each in texts.items()},
        "device": torch.cuda.get_device_name() if setting.cuda else "",
        **found,
    }
    path.write_text(json.dumps(records), encoding="utf-8")


def speed(ours: dict[str, float], others: dict[str, float]) -> Outcome:
    shown = f"{_milliseconds(ours)} against {_milliseconds(others)}"
    return judged({"times as fast": Bound(others["seconds"] / ours["seconds"], least=LEAST_SPEED)}, more=shown)


def memory(ours: dict[str, float], others: dict[str, float]) -> Outcome:
    mine, theirs = (each["added_bytes"] for each in (ours, others))
    shown = f"{mine / 2**20:.0f} MiB against {theirs / 2**20:.0f} MiB above the model"
    return judged({"ratio": Bound(mine / theirs, most=MOST_MEMORY)}, more=shown)


def utilisation(costs: Costs, setting: Setting) -> Outcome:
    if not setting.cuda:
        return not_answered("no data sheet says the peak of this CPU")
    peak = listed_peak_flops(torch.cuda.get_device_name())
    if peak is None:
        return not_answered(f"the peak of {torch.cuda.get_device_name()} is not in trainer/costs/gpus.py")
    ours = costs("ours")
    share = ours["flops"] / ours["seconds"] / peak
    return measured(f"{share:.1%} of {peak / 1e12:.0f} Tflop/s; {_milliseconds(ours)} a step", {"mfu": share})


def beside_theirs(costs: Costs) -> Outcome:
    if importlib.util.find_spec("sentence_transformers") is None:
        return not_answered("install sentence-transformers")
    ours, theirs = costs("ours"), costs("theirs")
    ratio = theirs["seconds"] / ours["seconds"]
    shown = f"ours {_milliseconds(ours)}, theirs {_milliseconds(theirs)} ({ratio:.2f} times ours)"
    if "added_bytes" in ours:
        shown += f"; {ours['added_bytes'] / 2**20:.0f} against {theirs['added_bytes'] / 2**20:.0f} MiB above the model"
    return measured(shown, {"ratio": ratio})


def _milliseconds(costs: dict[str, float]) -> str:
    return f"{costs['seconds'] * 1e3:.0f} ms"

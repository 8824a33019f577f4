"""A study: a TOML file of backbones × methods × seeds, and the runs that follow from it.

    [study]        name, output, seeds, ladder; baseline (an arm), ranks, grid, holm
    [settings]     recipe keys that override every run's recipe; every run must read them: "engine.ds_config" = "…"
    [evaluation]   sts, sts_subsets, beir, split, dtype (float32 or bfloat16), bm25, untrained, max_length (the tokens
                   at which every model's texts are cut, special ones included; 0: each model's own lengths)
    [backbones.B]  source (a folder or hub name), or recipe (made here, by a recipe of objective "masked" or "distill")
                   with settings and from (another backbone, from which it starts)
    [methods.M]    recipe, settings, backbones (default: all), each_size (one run a size, evaluated at that size),
                   ladder (default: the study's; a reduced-dimension model has a shorter one);
                   without a recipe nothing is trained: the backbone is evaluated as it is, once, for the first seed
    [[ablations]]  name, with, without (two arms)

A study **arm** is a backbone and a method, written B/M. Backbones are made once; every arm is fine-tuned once per seed.
A recipe names its teacher or guide itself. If the study makes that model, <output>/pretrain/B/model, the run waits for
it.
Recipes are named relative to the study file. All other paths are relative to the working directory, as in recipes.
Everything is checked before anything runs: every run's recipe is resolved here by `trainer.config`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data.ground.errors import ConfigError
from data.ground.files import one_file_name
from models.sizes import Ladder, ModelError, Size
from trainer.config.kinds import names_that
from trainer.config.load import load_recipe, parse_toml
from trainer.config.schema import Recipe
from trainer.config.sections import LEAST_LENGTH
from trainer.evaluation.tasks.inputs import check_task_names
from trainer.experiments.jobs import check_settings

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")
# Recipe keys that the study itself decides for every run.
_OWN_KEYS = ("run.output", "run.seed", "run.resume", "model.source", "model.config", "model.ladder", "objective.size")


@dataclass(frozen=True)
class EvaluationPlan:
    sts: tuple[str, ...] = ()
    sts_subsets: str = ""
    beir: tuple[str, ...] = ()
    split: str = "test"  # of the judgements of `beir`; empty where there are none
    dtype: str = ""  # of the encoder's matrix products; empty: float32
    bm25: bool = False
    untrained: bool = False  # also evaluate the same architecture with fresh weights, once per backbone
    max_length: int = 0  # tokens at which every model's texts are cut; 0: each model's own lengths

    @property
    def task_names(self) -> tuple[str, ...]:
        return (*(Path(path).name.split(".")[0] for path in self.sts), *(Path(path).name for path in self.beir))


@dataclass(frozen=True)
class Backbone:
    name: str
    source: str = ""
    recipe: Path | None = None
    start: str = ""  # the backbone that it starts from
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Method:
    name: str
    recipe: Path | None  # None: nothing is trained
    backbones: tuple[str, ...]
    each_size: bool
    settings: Mapping[str, Any]
    ladder: Ladder | None = None  # None: the study's ladder

    @property
    def has_all_sizes(self) -> bool:
        """Whether each of its models has all sizes of the study's ladder."""
        return not self.each_size and self.ladder is None


@dataclass(frozen=True)
class Ablation:
    name: str
    with_arm: str
    without_arm: str


@dataclass(frozen=True)
class Run:
    """One training run: a folder, the command that fills it, and its resolved recipe."""

    name: str  # its folder below the study's output folder
    module: str
    recipe_file: Path
    overrides: tuple[str, ...]
    folder: Path
    recipe: Recipe


@dataclass(frozen=True)
class Result:
    """One evaluation of one model. Its raw results, raw.jsonl.gz, are written to `folder`."""

    name: str
    arm: str
    seed: int
    run: Run | None  # the run that makes the model: the arm's own or its backbone's; None: the model is given
    model: str  # a folder; a given model may also be a hub name
    folder: Path
    sizes: str  # as `trainer.evaluate sizes --sizes` takes them
    untrained: bool = False
    bm25: bool = False


@dataclass(frozen=True)
class Study:
    path: Path
    name: str
    output: Path
    seeds: tuple[int, ...]
    ladder: Ladder
    baseline: str
    ranks: int
    grid: bool
    holm: bool
    settings: Mapping[str, Any]
    evaluation: EvaluationPlan
    backbones: Mapping[str, Backbone]
    methods: Mapping[str, Method]
    ablations: tuple[Ablation, ...]

    @property
    def arms(self) -> dict[str, Method]:
        """ "backbone/method" -> method, in the order of the file."""
        return {f"{name}/{method.name}": method for method in self.methods.values() for name in method.backbones}


def load_study(path: str | Path) -> Study:
    """Read and check a study file. Raises ConfigError with one sentence about the first mistake."""
    path = Path(path)
    values = parse_toml(path, "study", hint="shipped studies are in launch/studies")
    top = _Table(values, "")
    head, tests = top.table("study"), top.table("evaluation")
    settings = _settings(top, "")
    backbones = {name: _backbone(name, table, path) for name, table in top.tables("backbones")}
    methods = {name: _method(name, table, path, tuple(backbones)) for name, table in top.tables("methods")}
    ablations = tuple(map(_ablation, top.list_of_tables("ablations")))
    top.refuse_rest()
    sts, beir = tuple(tests.list_of("sts", str)), tuple(tests.list_of("beir", str))
    evaluation = EvaluationPlan(
        sts,
        tests.text("sts_subsets"),
        beir,
        tests.text("split") or ("test" if beir else ""),
        tests.text("dtype"),
        tests.flag("bm25"),
        tests.flag("untrained"),
        tests.number("max_length", 0),
    )
    tests.refuse_rest()
    ranks = head.number("ranks", 1)
    study = Study(
        path,
        head.text("name") or path.stem,
        Path(head.text("output", needed=True)),
        tuple(head.list_of("seeds", int)),
        _ladder(head),
        head.text("baseline", needed=True),
        ranks,
        head.flag("grid"),
        head.flag("holm"),
        settings,
        evaluation,
        backbones,
        methods,
        ablations,
    )
    head.refuse_rest()
    _check(study)
    return study


def runs_of(study: Study) -> list[Run]:
    """Every training run, each after the run that it starts from. Resolves and checks all recipes."""
    made = (_pretraining(study, backbone) for backbone in _in_starting_order(study.backbones))
    runs = [*made, *(result.run for result in results_of(study))]
    # A backbone that is evaluated as it is occurs more than once, but has only one run.
    return list({run.name: run for run in runs if run is not None}.values())


def results_of(study: Study) -> list[Result]:
    """Every evaluation, seed by seed and within a seed arm by arm, so that even an early report compares all arms."""
    results: list[Result] = []
    controlled: set[str] = set()
    for seed in study.seeds:
        for arm, method in study.arms.items():
            if method.recipe is None and seed != study.seeds[0]:
                continue
            backbone = arm.split("/")[0]
            ladder = method.ladder or study.ladder
            for size in ladder if method.each_size else (None,):
                name = f"{arm}/seed_{seed}" + (f"/{size}" if size else "")
                # The control does not depend on the method, so it is evaluated once per backbone, with a method of all
                # sizes.
                untrained = study.evaluation.untrained and method.has_all_sizes and backbone not in controlled
                if untrained:
                    controlled.add(backbone)
                if method.recipe is None:
                    run, model = _pretraining(study, study.backbones[backbone]), _source(study, backbone)
                else:
                    run = _finetuning(study, method, method.recipe, backbone, seed=seed, size=size, name=name)
                    model = str(run.folder / "model")
                results.append(
                    Result(
                        name,
                        arm,
                        seed,
                        run,
                        model,
                        study.output / "results" / name,
                        str(size) if size else _sizes(study, ladder, given=method.recipe is None),
                        untrained=untrained,
                        bm25=study.evaluation.bm25 and not results,
                    )
                )
    return results


def _sizes(study: Study, ladder: Ladder, *, given: bool) -> str:
    """The sizes for --sizes. They are named for a `given` model, because its own ladder may be another."""
    if study.grid:
        return ",".join(map(str, ladder.grid))
    return ",".join(map(str, ladder)) if given else "ladder"


def _pretraining(study: Study, backbone: Backbone) -> Run | None:
    if backbone.recipe is None:
        return None
    own: dict[str, Any] = {"model.ladder": _pairs(study.ladder)}
    if backbone.start:
        own |= {"model.source": _source(study, backbone.start), "model.config": {}}
    return _run(study, f"pretrain/{backbone.name}", True, backbone.recipe, backbone.settings, own)


def _finetuning(
    study: Study, method: Method, recipe: Path, backbone: str, *, seed: int, size: Size | None, name: str
) -> Run:
    own: dict[str, Any] = {
        "run.seed": seed,
        "model.ladder": _pairs(method.ladder or study.ladder),
        "model.source": _source(study, backbone),
        "model.config": {},
    }
    if size is not None:
        own |= {"objective.sizes": "one", "objective.size": str(size)}
    return _run(study, f"runs/{name}", False, recipe, method.settings, own)


def _run(
    study: Study,
    name: str,
    makes_backbone: bool,
    recipe: Path,
    settings: Mapping[str, Any],
    own: Mapping[str, Any],
) -> Run:
    """A training run of a recipe. Its objective must fit `makes_backbone`, and decides the command."""
    folder = study.output / name
    values = {**study.settings, **settings, **own, "run.output": str(folder), "run.resume": "auto"}
    overrides = tuple(f"{key}={_text(value)}" for key, value in values.items())
    try:
        check_settings(overrides)
        resolved = load_recipe(recipe, overrides)
    except ConfigError as error:
        raise ConfigError(f"{study.path}, run {name}: {error}") from None
    if resolved.kind.makes_backbone != makes_backbone:
        names = names_that(make_backbones=makes_backbone)
        raise ConfigError(
            f"{study.path}, run {name}: {recipe} has objective.name = {resolved.objective.name!r}; "
            f"this run needs a recipe with {' or '.join(map(repr, names))}"
        )
    module = f"trainer.{resolved.kind.command}"
    return Run(name, module, recipe, overrides, folder, resolved)


def _source(study: Study, backbone: str) -> str:
    chosen = study.backbones[backbone]
    return chosen.source or str(study.output / "pretrain" / backbone / "model")


def _in_starting_order(backbones: Mapping[str, Backbone]) -> list[Backbone]:
    ordered: dict[str, Backbone] = {}
    for backbone in backbones.values():
        chain = [backbone]
        while chain[-1].start:
            chain.append(backbones[chain[-1].start])
            if len(chain) > len(backbones):
                raise ConfigError(f"backbones.{backbone.name}.from leads back to itself; remove the circle")
        ordered |= {each.name: each for each in reversed(chain) if each.name not in ordered}
    return list(ordered.values())


def _backbone(name: str, table: _Table, path: Path) -> Backbone:
    source, recipe, start = table.text("source"), table.text("recipe"), table.text("from")
    if bool(source) == bool(recipe):
        raise ConfigError(f"{table.where} needs either source (a trained encoder) or recipe (to pre-train one)")
    settings = _settings(table, table.where)
    if source and (start or settings):
        raise ConfigError(f"{table.where} has a source and is not trained; remove from and settings")
    table.refuse_rest()
    return Backbone(name, source, path.parent / recipe if recipe else None, start, settings)


def _method(name: str, table: _Table, path: Path, all_backbones: tuple[str, ...]) -> Method:
    recipe = table.text("recipe", needed=True) if table.has("recipe") else ""
    backbones = tuple(table.list_of("backbones", str)) or all_backbones
    ladder = _ladder(table) if table.has("ladder") else None
    each_size, settings = table.flag("each_size"), _settings(table, table.where)
    table.refuse_rest()
    if not recipe and (each_size or settings):
        key = "settings" if settings else "each_size"
        raise ConfigError(f"{table.where} has no recipe, so it trains nothing; give one, or remove {key}")
    return Method(name, path.parent / recipe if recipe else None, backbones, each_size, settings, ladder)


def _ablation(table: _Table) -> Ablation:
    name, with_arm, without_arm = (table.text(key, needed=True) for key in ("name", "with", "without"))
    table.refuse_rest()
    return Ablation(name, with_arm, without_arm)


def _settings(table: _Table, where: str) -> dict[str, Any]:
    settings = table.take("settings", dict, {})
    for key in settings:
        if key in _OWN_KEYS:
            raise ConfigError(f"{where or 'the study'} sets {key}, which the study decides itself; remove it")
        if key.count(".") != 1:
            raise ConfigError(f'{where or "the study"}: settings has the key {key!r}; write "section.key" = value')
    return dict(settings)


def _ladder(table: _Table) -> Ladder:
    pairs = table.list_of("ladder", list)
    try:
        return Ladder.of(pairs)
    except (ModelError, ValueError, TypeError) as error:
        raise ConfigError(f"{table.where}.ladder: {error}") from None


def _check(study: Study) -> None:
    if not study.seeds or len(set(study.seeds)) < len(study.seeds) or min(study.seeds) < 0:
        raise ConfigError(f"study.seeds = {list(study.seeds)} must be different whole numbers, at least one")
    if study.ranks < 1:
        raise ConfigError(f"study.ranks = {study.ranks} is too small; 1 trains without a launcher")
    if not study.backbones or not study.methods:
        raise ConfigError(f"{study.path} needs at least one [backbones.NAME] and one [methods.NAME]")
    for backbone in study.backbones.values():
        if backbone.start and backbone.start not in study.backbones:
            raise ConfigError(f"backbones.{backbone.name}.from = {backbone.start!r} is no backbone of this study")
    for method in study.methods.values():
        if unknown := [name for name in method.backbones if name not in study.backbones]:
            raise ConfigError(f"methods.{method.name}.backbones names {unknown[0]!r}, which is no backbone")
        full, whole = (method.ladder or study.ladder).full, study.ladder.full
        if method.recipe is None and not full.fits_in(whole):
            raise ConfigError(
                f"methods.{method.name}.ladder ends with {full}, which outgrows the backbones' {whole}; end it there, "
                "or give a recipe that trains that size"
            )
    if study.baseline not in study.arms:
        raise ConfigError(f"study.baseline = {study.baseline!r} is no arm; the arms are {', '.join(study.arms)}")
    for what, called in (("arms", [*study.arms]), ("ablations", [each.name for each in study.ablations])):
        if (two := one_file_name(called)) is not None:
            raise ConfigError(
                f"the figures of the {what} {two[0]!r} and {two[1]!r} would be files of the same name; rename one"
            )
    for number, ablation in enumerate(study.ablations):
        if ablation.name in (each.name for each in study.ablations[:number]):
            raise ConfigError(f"two ablations are called {ablation.name!r}; give each a name of its own")
        for arm in (ablation.with_arm, ablation.without_arm):
            if arm not in study.arms:
                raise ConfigError(f"ablation {ablation.name!r} names {arm!r}; the arms are {', '.join(study.arms)}")
    if study.evaluation.dtype not in ("", "float32", "bfloat16"):
        raise ConfigError(f"evaluation.dtype = {study.evaluation.dtype!r} is unknown; use float32 or bfloat16")
    if study.evaluation.max_length and study.evaluation.max_length < LEAST_LENGTH:
        raise ConfigError(
            f"evaluation.max_length = {study.evaluation.max_length} must be at least {LEAST_LENGTH} tokens, or 0 for "
            "each model's own lengths"
        )
    names = study.evaluation.task_names
    if not names:
        raise ConfigError(f"{study.path} evaluates nothing; give evaluation.sts or evaluation.beir")
    check_task_names(names)
    for key, given, needed in (
        ("bm25", study.evaluation.bm25, "beir"),
        ("split", study.evaluation.split, "beir"),
        ("sts_subsets", study.evaluation.sts_subsets, "sts"),
    ):
        if given and not getattr(study.evaluation, needed):
            raise ConfigError(
                f"evaluation.{key} is read with evaluation.{needed} alone; give {needed}, or remove {key}"
            )
    _in_starting_order(study.backbones)


def _pairs(ladder: Ladder) -> list[list[float]]:
    return [list(size.numbers) for size in ladder]


def _text(value: Any) -> str:
    """A value as the text that `--section.key=` takes."""
    return value if isinstance(value, str) else json.dumps(value)


class _Table:
    """A TOML table that knows its place in the file and which of its keys have been asked for."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.where = where
        self._values = dict(values)
        self._known: list[str] = []

    def has(self, key: str) -> bool:
        return key in self._values

    def take(self, key: str, kind: type, default: Any) -> Any:
        self._known.append(key)
        value = self._values.pop(key, default)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            names = {str: "a text", bool: "true or false", int: "a whole number", list: "a list", dict: "a table"}
            raise ConfigError(f"{self._path(key)} = {value!r} must be {names[kind]}")
        return value

    def text(self, key: str, *, needed: bool = False) -> str:
        value = self.take(key, str, "")
        if needed and not value:
            raise ConfigError(f"{self._path(key)} is missing; give a text")
        return str(value)

    def flag(self, key: str) -> bool:
        return bool(self.take(key, bool, False))

    def number(self, key: str, default: int) -> int:
        return int(self.take(key, int, default))

    def list_of(self, key: str, kind: type) -> list[Any]:
        values: list[Any] = self.take(key, list, [])
        for value in values:
            if not isinstance(value, kind) or isinstance(value, bool):
                raise ConfigError(f"{self._path(key)} holds {value!r}, which is not of the kind it needs")
        return values

    def table(self, key: str) -> _Table:
        return _Table(self.take(key, dict, {}), self._path(key))

    def tables(self, key: str) -> list[tuple[str, _Table]]:
        found = []
        for name, values in self.take(key, dict, {}).items():
            where = f"{self._path(key)}.{name}"
            if not isinstance(values, dict):
                raise ConfigError(f"{where} = {values!r} must be a table [{where}]")
            if not _NAME.fullmatch(name):
                raise ConfigError(f"{where}: the name becomes a folder; use letters, digits and _ . + -")
            found.append((name, _Table(values, where)))
        return found

    def list_of_tables(self, key: str) -> list[_Table]:
        tables = [_Table(values, f"{self._path(key)}[{i}]") for i, values in enumerate(self.list_of(key, dict))]
        return tables

    def refuse_rest(self) -> None:
        for key in self._values:
            known = ", ".join(self._known)
            raise ConfigError(f"unknown key {self._path(key)}; known here are {known}")

    def _path(self, key: str) -> str:
        return f"{self.where}.{key}" if self.where else key

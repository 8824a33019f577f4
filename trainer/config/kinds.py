"""What the program asks of an objective without training it. Each objective has one class, and one line in `KINDS`.

Commands, checks, charts, plans and exports ask these classes and never compare an objective's name. How an objective
trains is in trainer/objectives/. An objective of another package is a class named by an entry point of the group
`barista.objectives`; docs/objectives.md shows one. Torch-free, because login nodes check and submit recipes.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from typing import ClassVar

from data.ground.errors import ConfigError
from trainer.config.presets import PRESETS_FOR
from trainer.config.sections import Sections
from trainer.config.step_sizes import DRAWN, EVERY_DEPTH

ENTRY_POINTS = "barista.objectives"
# The title of a page of charts, and chart -> patterns of its metrics' tags.
Charts = tuple[str, Mapping[str, Sequence[str]]]


class Kind:
    """An objective that embeds texts with the encoder. Subclasses override what is different for them.

    command: `python -m trainer.COMMAND` trains it. makes_backbone: a study trains it before it fine-tunes.
    predicts_tokens: it masks texts and predicts their tokens, with a head for masked language modelling.
    contrasts: it trains queries to score their positives above other passages, or trains on graded pairs.
    own_keys: recipe keys that it reads, besides those that follow from its other attributes and methods.
    """

    command: ClassVar[str] = "finetune"
    makes_backbone: ClassVar[bool] = False
    predicts_tokens: ClassVar[bool] = False
    contrasts: ClassVar[bool] = False
    own_keys: ClassVar[tuple[str, ...]] = ()

    def reads_documents(self, recipe: Sections) -> bool:
        """Whether its shards hold documents; else they hold tuples."""
        return False

    def pairs(self, recipe: Sections) -> str:
        """The kind of pairs beside masked losses: "none", "spans" or "tuples"."""
        return "none"

    def is_taught(self, recipe: Sections) -> bool:
        """Whether it learns the vectors of [teacher]."""
        return False

    def compares_texts(self, recipe: Sections) -> bool:
        """Whether a text's gradient depends on the other texts of its batch."""
        return self.contrasts

    def grades_pairs(self, recipe: Sections) -> bool:
        """Whether its shards must hold a score for each pair."""
        return False

    def charts(self, recipe: Sections) -> Charts:
        """The charts of its losses by size."""
        return "Losses by size", {"loss": ["^losses/"]}

    def check(self, recipe: Sections) -> None:
        """Raises ConfigError where settings of the recipe contradict this objective."""


class Masked(Kind):
    """SMAE, its ablations and plain masked language modelling (Starbucks §3.2), and RetroMAE (SentMAE §2)."""

    command = "pretrain"
    makes_backbone = True
    predicts_tokens = True

    def reads_documents(self, recipe: Sections) -> bool:
        return recipe.objective.pairs != "tuples"

    def pairs(self, recipe: Sections) -> str:
        return recipe.objective.pairs

    def charts(self, recipe: Sections) -> Charts:
        charts = {"encoder loss": ["^losses/encoder"]}
        if recipe.objective.decoder:
            charts["decoder loss"] = ["^losses/decoder"]
        return "Losses by size, pre-training", charts

    def check(self, recipe: Sections) -> None:
        if recipe.objective.sizes in (*DRAWN, *EVERY_DEPTH):
            raise ConfigError(
                f'objective.sizes = "{recipe.objective.sizes}" is a fine-tuning schedule; use "ladder" or "full" for '
                "masked"
            )


class Contrastive(Kind):
    """SRL, its baselines and ablations (Starbucks §3.1), and static embeddings."""

    command = "finetune"
    contrasts = True

    def is_taught(self, recipe: Sections) -> bool:
        return bool(recipe.teacher.model or (recipe.teacher.store and recipe.teacher.vectors == "stored"))

    def grades_pairs(self, recipe: Sections) -> bool:
        return recipe.objective.loss == "cosent"

    def charts(self, recipe: Sections) -> Charts:
        charts = {"loss": ["^losses/contrastive"]}
        if recipe.objective.kl != "none":
            charts["KL to the full size"] = ["^losses/kl"]
        if recipe.objective.asymmetric_weight:
            charts["queries against the full size's passages"] = ["^losses/asymmetric"]
        if recipe.objective.spread_weight:
            charts["squared similarity of different texts"] = ["^losses/spread"]
        if recipe.objective.compression_weight:
            charts["distance to the principal components"] = ["^losses/compression"]
        if self.is_taught(recipe):
            charts["all terms of the teacher"] = ["^losses/distillation"]
        return "Losses by size, fine-tuning", charts

    def check(self, recipe: Sections) -> None:
        objective = recipe.objective
        if objective.kl == "margins" and not recipe.data.num_negatives:
            raise ConfigError('objective.kl = "margins" is of hard negatives; set data.num_negatives, or kl = "scores"')
        if objective.kl == "margins" and recipe.data.num_positives > 1:
            raise ConfigError(
                f'objective.kl = "margins" compares one positive with hard negatives, and data.num_positives = '
                f'{recipe.data.num_positives}; set that to 1, or kl = "scores"'
            )
        if objective.loss == "cosent" and objective.kl in ("scores", "margins"):
            raise ConfigError(
                'objective.loss = "cosent" has no negatives to score; set objective.kl to "none" or "coordinates"'
            )
        if objective.asymmetric_weight and objective.filter_false_negatives:
            raise ConfigError(
                "objective.asymmetric_weight compares a size's queries with the full size's passages, for which "
                "objective.filter_false_negatives has no scores; set one of the two"
            )
        if objective.preset and not objective.preset_for:
            raise ConfigError(
                f"objective.preset = {objective.preset!r} differs between fine-tunings; "
                f"set objective.preset_for to one of {', '.join(PRESETS_FOR)}"
            )


class Distill(Kind):
    """Every size learns a frozen teacher's vectors, from texts without labels."""

    command = "distill"
    makes_backbone = True

    def reads_documents(self, recipe: Sections) -> bool:
        return True

    def is_taught(self, recipe: Sections) -> bool:
        return True

    def compares_texts(self, recipe: Sections) -> bool:
        return recipe.teacher.compares_texts

    def charts(self, recipe: Sections) -> Charts:
        return "Losses by size, distillation", {"all terms of the teacher": ["^losses/distillation"]}

    def check(self, recipe: Sections) -> None:
        if recipe.objective.sizes in (*DRAWN, *EVERY_DEPTH):
            raise ConfigError(
                f'objective.sizes = "{recipe.objective.sizes}" is a schedule of contrastive fine-tuning; use "grid" or '
                '"ladder"'
            )


KINDS: Mapping[str, Kind] = {"masked": Masked(), "contrastive": Contrastive(), "distill": Distill()}
_UNNAMED = Kind()  # of a recipe whose objective.name is still empty


@functools.cache
def kind_named(name: str) -> Kind:
    """The kind that `objective.name` names.

    Raises ConfigError for a name that neither barista nor an installed package has, and for an entry point that cannot
    be loaded or is not a Kind.
    """
    if not name:
        return _UNNAMED
    if name in KINDS:
        return KINDS[name]
    installed = entry_points(group=ENTRY_POINTS)
    if name not in installed.names:
        raise ConfigError(
            f"objective.name = {name!r} is unknown; choose one of {', '.join([*KINDS, *sorted(installed.names)])}"
        )
    place = installed[name].value
    try:
        found = installed[name].load()
    except Exception as error:
        raise ConfigError(
            f"objective.name = {name!r} is {place}, which cannot be imported ({type(error).__name__}: {error}); fix it"
        ) from error
    if not (isinstance(found, type) and issubclass(found, Kind)):
        raise ConfigError(f"objective.name = {name!r} is {place}, which is no subclass of trainer.config.kinds.Kind")
    return found()


def names_that(*, make_backbones: bool) -> list[str]:
    """barista's own objectives that make a backbone, or those that fine-tune one."""
    return [name for name, kind in KINDS.items() if kind.makes_backbone == make_backbones]

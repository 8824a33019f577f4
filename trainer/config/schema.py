"""A recipe: its sections (trainer/config/sections.py), and what follows from them.

Torch-free, because login nodes check and submit recipes without a GPU stack.
"""

from __future__ import annotations

import math
import typing
from collections.abc import Mapping
from typing import Any

from pydantic.dataclasses import dataclass
from pydantic.fields import FieldInfo

from models.choices import MEANS
from models.sizes import Ladder, Size
from trainer.config.kinds import Kind, kind_named
from trainer.config.sections import STRICT, Sections
from trainer.config.step_sizes import StepSizes


@dataclass(frozen=True, config=STRICT)
class Recipe(Sections):
    """A run: what the recipe says, and what follows from it."""

    @property
    def kind(self) -> Kind:
        """What is known of the objective without training it. Raises ConfigError if its name is unknown."""
        return kind_named(self.objective.name)

    @property
    def ladder(self) -> Ladder:
        return Ladder.of(self.model.ladder)

    @property
    def reads_documents(self) -> bool:
        """Whether the recipe's shards hold documents; otherwise they hold tuples."""
        return self.kind.reads_documents(self)

    @property
    def longest_text(self) -> int:
        """The most tokens that a text keeps when it is read: a document, or else a query or a passage."""
        data = self.data
        return data.max_length if self.reads_documents else max(data.query_max_length, data.passage_max_length)

    @property
    def token_budget(self) -> int:
        """Tokens of a micro-batch, padding counted."""
        return self.train.micro_batch_size * self.longest_text

    @property
    def is_static(self) -> bool:
        """Whether a token table is trained from scratch. One in model.source is recognised only when it is loaded."""
        return self.model.config.get("model_type") == "static"

    @property
    def pairs(self) -> str:
        """The kind of pairs beside masked losses, "none" where there are none."""
        return self.kind.pairs(self)

    @property
    def decodes_enhanced(self) -> bool:
        """Whether there is a decoder that predicts every token."""
        objective = self.objective
        return self.kind.predicts_tokens and objective.decoder and objective.decoding == "enhanced"

    @property
    def adapter_rank(self) -> int:
        """The rank of the adapters that train; 0 where the weights train."""
        return 0 if self.kind.predicts_tokens else self.model.lora_rank

    @property
    def trains_heads_alone(self) -> bool:
        """Whether the linear maps of the depths train, and no weight of the encoder does."""
        return not self.kind.predicts_tokens and self.model.trains == "heads"

    @property
    def prompts(self) -> tuple[list[str], list[str]]:
        """The prompts of queries and of passages: none, one for all folders, or one each; none in pre-training."""
        return ([], []) if self.kind.predicts_tokens else (self.data.query_prompts, self.data.passage_prompts)

    @property
    def pools_prompt(self) -> bool:
        """Whether the pooling takes the tokens of a text's prompt, if it meets them."""
        return self.model.pool_prompt or self.model.pooling not in MEANS or self.is_static

    @property
    def guide_filters(self) -> bool:
        """Whether the guide filters out false negatives."""
        objective = self.objective
        negatives = objective.loss == "infonce" if self.kind.contrasts else self.pairs != "none"
        return negatives and objective.filter_false_negatives and objective.filter_by == "guide"

    @property
    def guide_teaches(self) -> bool:
        """Whether every size learns the guide's scores."""
        objective = self.objective
        learns = self.kind.contrasts and objective.kl in ("scores", "margins") and objective.kl_weight > 0
        return learns and objective.kl_teacher == "guide"

    @property
    def uses_guide(self) -> bool:
        return self.guide_filters or self.guide_teaches

    @property
    def is_taught(self) -> bool:
        """Whether a teacher's vectors are learnt, alone or beside a contrastive loss."""
        return self.kind.is_taught(self)

    @property
    def compares_texts(self) -> bool:
        """Whether a text's gradient depends on the other texts of its batch."""
        return self.kind.compares_texts(self)

    @property
    def graph_bytes(self) -> float:
        """Bytes of graphs that gradient caching may keep; infinite where one pass keeps the whole batch's graph."""
        return math.inf if self.objective.backward == "direct" else self.train.activation_memory_mib * 2**20

    @property
    def compresses(self) -> bool:
        """Whether narrow sizes learn the principal components of whole vectors."""
        return self.kind.contrasts and self.objective.compression_weight > 0

    @property
    def single_size(self) -> Size | None:
        """The size that is trained on its own, for objective.sizes = "one"."""
        return Size.parse(self.objective.size) if self.objective.sizes == "one" else None

    @property
    def num_layers(self) -> int:
        """How many layers the encoder keeps: those of the full size, or of the one size that is trained on its own."""
        return (self.single_size or self.ladder.full).layers

    @property
    def replays_from_start(self) -> bool:
        """Whether the step to replay comes before the first save, so that the first weights are the nearest."""
        return 0 < self.debug.replay <= self.checkpoint.every_steps

    @property
    def step_sizes(self) -> StepSizes:
        """The sizes that a step trains."""
        return StepSizes(self.objective.sizes, self.ladder, self.single_size)


def by_key(tables: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The values of tables by section, as SECTION.KEY -> value."""
    return {f"{section}.{name}": value for section, table in tables.items() for name, value in table.items()}


def flat(recipe: Recipe) -> dict[str, Any]:
    """Every key, as SECTION.KEY, with its value."""
    return by_key({section: vars(table) for section, table in vars(recipe).items()})


# section -> its class, in the order in which recipes are written out.
SECTIONS: Mapping[str, type] = typing.get_type_hints(Recipe)


def keys_of(section: str) -> Mapping[str, FieldInfo]:
    """The keys of a section, each with its type (`annotation`), its bounds and its help."""
    return SECTIONS[section].__pydantic_fields__  # type: ignore[attr-defined]


def bounds_of(key: FieldInfo) -> dict[str, float]:
    """The bounds that the key of a number has, of gt, ge, lt and le."""
    return {
        bound: getattr(each, bound)
        for each in key.metadata
        for bound in ("gt", "ge", "lt", "le")
        if hasattr(each, bound)
    }

"""An objective as a user would bring it: one class, which a package names in one line (test_own_objective.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from data.collate import PairBatch, PairCollator, concatenate
from data.ground.errors import ConfigError
from data.shards.reader import ShardFolder
from trainer.config.kinds import Kind
from trainer.config.schema import Recipe
from trainer.config.sections import Sections
from trainer.distributed import sum_over_ranks
from trainer.objectives.backward import Passes, StepReport, accumulate, embed_texts, in_one
from trainer.objectives.collators import pair_collator
from trainer.objectives.materials import Materials


class Alignment(Kind):
    """How near a query and its positive are: the mean of |q/|q| − p/|p||² over the global batch, at every size.

    It is half of what Wang and Isola (2020, arXiv:2005.10242) measure in place of a contrastive loss.
    """

    own_keys = ("objective.own",)

    def check(self, recipe: Sections) -> None:
        weight = recipe.objective.own.get("weight", 1.0)
        if not isinstance(weight, float) or weight <= 0:
            raise ConfigError(f"objective.own.weight = {weight!r} must be a number above 0")

    def collator(self, recipe: Recipe, sources: Sequence[ShardFolder]) -> PairCollator:
        return pair_collator(recipe, sources)

    def objective(self, recipe: Recipe, materials: Materials) -> AlignmentObjective:
        return AlignmentObjective(materials, recipe.objective.own.get("weight", 1.0))


@dataclass(frozen=True)
class AlignmentObjective:
    of: Materials
    weight: float

    def forward_backward(self, engine: Passes, batch: PairBatch, step: int) -> StepReport:
        plan, count = self.of.schedule(step), len(batch.queries)
        texts = concatenate(batch.queries, batch.passages)
        total = sum_over_ranks([float(count)], engine.device)[0]
        losses = torch.zeros(len(plan.sizes), device=engine.device)

        def loss_of(rows: Tensor) -> Tensor:
            nonlocal losses
            vectors = embed_texts(engine, texts, rows, sizes=plan.sizes)
            if not len(rows):  # a rank without texts takes part with a filler
                return torch.stack([each.float().sum() for each in vectors]).sum() * 0.0
            in_order = rows.argsort()  # they came by length
            units = [torch.nn.functional.normalize(each.float(), dim=1)[in_order] for each in vectors]
            positives = count + batch.targets.to(engine.device)
            values = torch.stack([(each[:count] - each[positives]).square().sum() for each in units]) / total
            losses = losses + values.detach()
            return self.weight * (values * values.new_tensor(plan.loss_weights)).sum()

        accumulate(engine, in_one(texts.lengths), loss_of=loss_of)
        reported = {f"alignment/{name}": value for name, value in zip(plan.names, losses)}
        loss = self.weight * (losses * losses.new_tensor(plan.loss_weights)).sum()
        return StepReport({"loss": loss} | reported, batch.num_tokens, batch.num_tokens, 0.0)

"""The contrastive objective: a global batch's queries against all its passages, at the sizes of the step's plan.

Embeddings and their gradients cross ranks here, and nowhere else: passages are gathered, gradients sent home. What is
computed of them is in trainer/losses/infonce.py and, for sizes that are prefixes of one vector,
trainer/losses/prefix_infonce.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from data.collate import PairBatch, Texts, concatenate
from trainer.config.read_keys import is_read
from trainer.config.schema import Recipe
from trainer.costs.flops import FORWARD_AND_BACKWARD, Shape, encoder_flops
from trainer.distributed import derive_seed, gather_counts, gather_rows, scatter_gradients, sum_over_ranks
from trainer.losses.contrastive_terms import FULL, GUIDE, ContrastiveTerms
from trainer.losses.false_negatives import false_negatives
from trainer.losses.graded_pairs import coordinate_divergence, cosent
from trainer.losses.infonce import add_contrastive_gradients
from trainer.losses.prefix_infonce import PrefixTerms, prefix_contrastive_
from trainer.losses.unit_vectors import normalize_, unnormalized_gradient_
from trainer.objectives.backward import (
    Passes,
    StepReport,
    embed_texts,
    grad_cache,
    hand_over,
    in_one,
    micro_batches,
    padded_tokens,
)
from trainer.objectives.guide import Guide
from trainer.objectives.size_schedules import Schedule, SizePlan
from trainer.objectives.teacher import Teaching, texts_of_all_ranks


@dataclass(frozen=True)
class ContrastiveObjective:
    """SRL and its relatives (Starbucks §3.1): InfoNCE or CoSENT at the plan's sizes, KL to the full one."""

    schedule: Schedule
    shape: Shape
    token_budget: int
    packed: bool
    pad_id: int
    loss: str
    similarity: str
    temperature: float
    kl: str
    kl_weight: float
    kl_temperature: float
    detach_teacher: bool
    mask_false_negatives: bool
    false_negative_margin: float | None
    cached: bool
    score_memory_mib: float
    seed: int
    static: bool = False  # a token table, see _through_a_table
    guide: Guide | None = None
    filter_by: str = FULL
    kl_teacher: str = FULL
    teaching: Teaching | None = None

    def forward_backward(self, engine: Passes, batch: PairBatch, step: int) -> StepReport:
        plan = self.schedule(step)
        texts = concatenate(batch.queries, batch.passages)
        if self.static:
            return self._through_a_table(engine, batch, texts, plan)
        lengths = texts.lengths
        if self.cached:
            chunks = micro_batches(lengths, token_budget=self.token_budget, packed=self.packed)
        else:
            chunks = in_one(lengths)
        losses = grad_cache(
            engine,
            chunks,
            embed=lambda rows: embed_texts(engine, texts, rows, sizes=plan.sizes, pad_id=self.pad_id),
            loss_and_gradients=lambda embeddings: self.loss_and_gradients(embeddings, batch, plan, engine),
            seed=derive_seed(self.seed, step, engine.world.rank),
            cached=self.cached,
        )
        flops = FORWARD_AND_BACKWARD * encoder_flops(self.shape, lengths)
        return StepReport(losses, batch.num_tokens, padded_tokens(lengths, chunks, packed=self.packed), flops)

    def _through_a_table(self, engine: Passes, batch: PairBatch, texts: Texts, plan: SizePlan) -> StepReport:
        """All texts in one pass and one graph, which keeps their ids and nothing else.

        So caching would only look everything up twice, and every micro-batch's backward would write a gradient of the
        whole table. What grows with the batch are the vectors, once, and half as much for the passages' gradient.
        """
        full = plan.sizes[plan.full]
        tokens, offsets = (texts.tokens, texts.offsets) if len(texts) else _FILLER
        (output,) = engine(tokens.to(engine.device), None, sizes=(full,), offsets=offsets.to(engine.device))
        vectors = output.detach().float()  # the same memory where the output is float32: nobody reads it again
        own = vectors[: len(texts)]
        filters_itself = self.false_negative_margin is not None and not self._guide_filters
        only_infonce = not (self.kl != "none" and self.kl_weight) and self.teaching is None
        if self.loss == "infonce" and only_infonce and not filters_itself:
            losses = self._prefix_infonce_(own, batch, plan, engine)
        else:
            embeddings = [own[:, : size.dim].clone() for size in plan.sizes]
            losses, gradients = self.loss_and_gradients(embeddings, batch, plan, engine)
            own.zero_()
            for size, gradient in zip(plan.sizes, gradients):
                own[:, : size.dim] += gradient
        if not len(texts):
            vectors.zero_()
        with engine.accumulation():
            engine.backward(hand_over(output, vectors.to(output.dtype)))
        count = batch.num_tokens
        return StepReport(losses, count, count, FORWARD_AND_BACKWARD * float(count * self.shape.hidden))

    def _prefix_infonce_(self, vectors: Tensor, batch: PairBatch, plan: SizePlan, engine: Passes) -> dict[str, Tensor]:
        """Sizes that are prefixes of one vector: `vectors` [queries + passages, d] become their gradients."""
        device, num_queries = vectors.device, len(batch.queries)
        counts = gather_counts(len(batch.passages), device)
        passages = vectors[num_queries:] if len(counts) == 1 else gather_rows(vectors[num_queries:], counts)
        gradient = torch.zeros_like(passages)
        targets = batch.targets.to(device) + sum(counts[: engine.world.rank])
        guide = self._guide_vectors(batch, engine) if self._guide_filters else None
        loss, nce = prefix_contrastive_(
            vectors[:num_queries],
            passages,
            gradient,
            targets=targets,
            excluded=_known_false_negatives(batch, targets, counts) if self.mask_false_negatives else None,
            guide=None if guide is None else (guide[0], gather_rows(guide[1], counts)),
            terms=PrefixTerms(
                tuple(size.dim for size in plan.sizes),
                plan.loss_weights,
                self.similarity == "cosine",
                self.temperature,
                int(sum_over_ranks([float(num_queries)], device)[0]),
                self.score_memory_mib,
                self.false_negative_margin or 0.0,
            ),
        )
        vectors[num_queries:] = gradient if len(counts) == 1 else scatter_gradients(gradient, counts)
        return {"loss": loss} | {f"loss/{name}": value for name, value in zip(plan.names, nce)}

    def loss_and_gradients(
        self, embeddings: list[Tensor], batch: PairBatch, plan: SizePlan, engine: Passes
    ) -> tuple[dict[str, Tensor], list[Tensor]]:
        """The global batch's loss (this rank's part) and its gradient with respect to this rank's embeddings.

        embeddings: a size's [queries + passages, d], queries first. They are normalised in place: a large batch has
        room for them and for their gradients, and for nothing else of their size.
        """
        on_coordinates = self.kl == "coordinates" and self.kl_weight > 0
        divergence, more = self._coordinate_kl(embeddings, plan) if on_coordinates else ({}, [])
        lengths = [normalize_(each) for each in embeddings] if self.similarity == "cosine" else []
        gradients = [torch.zeros_like(each) for each in embeddings]
        taught: dict[str, Tensor] = {}
        if self.teaching is not None:
            vectors = self.teaching.teacher.vectors(batch, device=engine.device, heartbeat=engine.heartbeat)
            num_texts = texts_of_all_ranks(len(vectors), engine.device)
            taught = self.teaching.add_gradients(
                embeddings, vectors, gradients, plan, engine.world, num_texts=num_texts
            )
        guide = self._guide_vectors(batch, engine) if self._guide_filters or self._guide_teaches else None
        if self.loss == "cosent":
            losses = self._cosent(embeddings, gradients, batch, plan, engine)
        else:
            losses = self._infonce(embeddings, gradients, batch, plan, engine, guide)
        if self.kl == "margins" and self.kl_weight:
            errors = self._margins(embeddings, gradients, batch, plan, guide)
            losses["loss"] = losses["loss"] + errors.pop("loss")
            losses |= errors
        for gradient, unit, length in zip(gradients, embeddings, lengths):
            unnormalized_gradient_(gradient, unit, length)
        for gradient, extra in zip(gradients, more):
            gradient += extra
        if on_coordinates:
            losses["loss"] = losses["loss"] + divergence.pop("loss")
        if taught:
            losses["loss"] = losses["loss"] + taught.pop("loss")
            losses |= taught
        return losses | divergence, gradients

    def _infonce(
        self,
        vectors: list[Tensor],
        gradients: list[Tensor],
        batch: PairBatch,
        plan: SizePlan,
        engine: Passes,
        guide: tuple[Tensor, Tensor] | None,
    ) -> dict[str, Tensor]:
        device = vectors[0].device
        num_queries = len(batch.queries)
        widths = [each.shape[1] for each in vectors]
        counts = gather_counts(len(batch.passages), device)
        passages = [each[num_queries:] for each in vectors]
        passage_gradients = [each[num_queries:] for each in gradients]
        alone = len(counts) == 1
        if not alone:
            # One gather of all widths side by side: every rank's passages, [M, sum of widths].
            everyone = gather_rows(torch.cat(passages, dim=1), counts)
            returned = torch.zeros_like(everyone)
            passages, passage_gradients = list(everyone.split(widths, dim=1)), list(returned.split(widths, dim=1))
        targets = batch.targets.to(device) + sum(counts[: engine.world.rank])
        total = int(sum_over_ranks([float(num_queries)], device)[0])
        kl = self.kl_weight if self.kl == "scores" else 0.0
        terms = ContrastiveTerms(
            plan.loss_weights,
            tuple(weight * kl for weight in plan.kl_weights),
            self.temperature,
            total,
            self.false_negative_margin,
            self.detach_teacher,
            self.score_memory_mib,
            self.filter_by,
            self.kl_teacher if kl else FULL,
            1.0 if self.guide is None else self.guide.temperature,
        )
        loss, nce, divergence = add_contrastive_gradients(
            [each[:num_queries] for each in vectors],
            passages,
            terms=terms,
            targets=targets,
            excluded=_known_false_negatives(batch, targets, counts) if self.mask_false_negatives else None,
            gradients=[*(each[:num_queries] for each in gradients), *passage_gradients],
            guide=None if guide is None else (guide[0], gather_rows(guide[1], counts)),
        )
        if not alone:
            # Each passage's gradient, summed over all ranks' queries, goes home.
            for gradient, part in zip(gradients, scatter_gradients(returned, counts).split(widths, dim=1)):
                gradient[num_queries:] += part
        losses = {"loss": loss} | {f"loss/{name}": value for name, value in zip(plan.names, nce)}
        if kl:
            used = [(name, value) for name, value, w in zip(plan.names, divergence, plan.kl_weights) if w]
            losses |= {f"kl/{name}": value for name, value in used}
        return losses

    @property
    def _guide_filters(self) -> bool:
        return self.false_negative_margin is not None and self.filter_by == GUIDE

    @property
    def _guide_teaches(self) -> bool:
        return self.kl in ("scores", "margins") and self.kl_weight > 0 and self.kl_teacher == GUIDE

    def _guide_vectors(self, batch: PairBatch, engine: Passes) -> tuple[Tensor, Tensor]:
        """The guide's vectors of this rank's queries and passages."""
        assert self.guide is not None
        return self.guide.vectors(batch.queries, batch.passages, device=engine.device, heartbeat=engine.heartbeat)

    def _margins(
        self,
        vectors: list[Tensor],
        gradients: list[Tensor],
        batch: PairBatch,
        plan: SizePlan,
        guide: tuple[Tensor, Tensor] | None,
    ) -> dict[str, Tensor]:
        """MarginMSE (Hofstätter et al. 2020, arXiv:2010.02666): its metrics, "loss" being what it adds.

        The mean over the global batch's pairs of a query and a negative of its own of ((s⁺ − s⁻) − (t⁺ − t⁻))², where s
        and t are the student's and the teacher's scores. Those pairs are on one rank, so nothing is gathered.
        """
        device, count = vectors[0].device, len(batch.queries)
        owner, targets = batch.passage_query.to(device), batch.targets.to(device)

        def scores_of(queries: Tensor, passages: Tensor) -> Tensor:
            return torch.linalg.vecdot(queries[owner], passages)

        def margins(scores: Tensor) -> Tensor:  # [..., m], the positive's own being 0
            return scores[..., targets][..., owner] - scores

        own = torch.stack([scores_of(each[:count], each[count:]) for each in vectors]) / self.temperature  # [K, m]
        own.requires_grad_()
        if self.kl_teacher == GUIDE:
            assert guide is not None and self.guide is not None
            taught = scores_of(*guide) / self.guide.temperature
        else:
            taught = own[plan.full].detach() if self.detach_teacher else own[plan.full]
        total = sum_over_ranks([float(len(batch.passages) - count)], device).clamp(min=1)[0].to(own.dtype)
        errors = (margins(own) - margins(taught)).square().sum(1) / total
        loss = (errors * errors.new_tensor(plan.kl_weights)).sum() * self.kl_weight
        loss.backward()
        assert own.grad is not None
        for each, gradient, flow in zip(vectors, gradients, own.grad[..., None] / self.temperature):
            gradient[:count].index_add_(0, owner, flow * each[count:])
            gradient[count:] += flow * each[:count][owner]
        used = [(name, error) for name, error, weight in zip(plan.names, errors.detach(), plan.kl_weights) if weight]
        return {"loss": loss.detach()} | {f"margins/{name}": error for name, error in used}

    def _cosent(
        self, vectors: list[Tensor], gradients: list[Tensor], batch: PairBatch, plan: SizePlan, engine: Passes
    ) -> dict[str, Tensor]:
        assert batch.scores is not None
        device = vectors[0].device
        num_pairs = len(batch.queries)
        partner = batch.targets.to(device) + num_pairs
        local = torch.stack([torch.linalg.vecdot(each[:num_pairs], each[partner]) for each in vectors], dim=1)  # [n, K]
        counts = gather_counts(num_pairs, device)
        start = sum(counts[: engine.world.rank])
        similarities = gather_rows(local, counts).requires_grad_()
        gold = gather_rows(batch.scores.to(device), counts)
        per_size = torch.stack([cosent(each, gold, temperature=self.temperature) for each in similarities.unbind(1)])
        loss = (per_size * per_size.new_tensor(plan.loss_weights)).sum()
        loss.backward()
        assert similarities.grad is not None
        # Every rank computed the whole loss, so its own rows' gradient is complete; the value is shared out.
        own = similarities.grad[start : start + num_pairs, :, None]  # [n, K, 1]
        for size, (each, gradient) in enumerate(zip(vectors, gradients)):
            gradient[:num_pairs] += own[:, size] * each[partner]
            gradient.index_add_(0, partner, own[:, size] * each[:num_pairs])
        share = 1.0 / len(counts)
        losses = {"loss": loss.detach() * share}
        return losses | {f"loss/{name}": value.detach() * share for name, value in zip(plan.names, per_size)}

    def _coordinate_kl(self, embeddings: list[Tensor], plan: SizePlan) -> tuple[dict[str, Tensor], list[Tensor]]:
        """KL over coordinates: its metrics, "loss" being what it adds, and its gradients."""
        leaves = [each.clone().requires_grad_() for each in embeddings]
        teacher = leaves[plan.full].detach() if self.detach_teacher else leaves[plan.full]
        total = sum_over_ranks([float(teacher.shape[0])], teacher.device)[0].to(teacher.dtype)
        losses = {"loss": torch.zeros((), device=teacher.device)}
        for name, leaf, weight in zip(plan.names, leaves, plan.kl_weights):
            if weight:
                value = coordinate_divergence(leaf, teacher, temperature=self.kl_temperature) / total
                (value * weight * self.kl_weight).backward()
                losses[f"kl/{name}"] = value.detach()
                losses["loss"] = losses["loss"] + value.detach() * weight * self.kl_weight
        return losses, [torch.zeros_like(each) if each.grad is None else each.grad for each in leaves]


_FILLER = torch.zeros(1, dtype=torch.int32), torch.tensor([0, 1])  # a rank without texts makes its pass too


def _known_false_negatives(batch: PairBatch, targets: Tensor, counts: list[int]) -> Tensor:
    """Pairs of a query here and a passage of the global batch that is no negative of it, by their hashes.

    targets: places in the global batch. counts: every rank's number of passages.
    """
    device = targets.device
    known = torch.stack([batch.query_hashes.repeat_interleave(batch.known_offsets.diff()), batch.known_hashes], dim=1)
    known = gather_rows(known.to(device), gather_counts(len(known), device)).T.contiguous()  # [2, t]
    passage_hashes = gather_rows(batch.passage_hashes.to(device), counts)
    return false_negatives(batch.query_hashes.to(device), targets, passage_hashes, known[0], known[1])


def contrastive(
    recipe: Recipe,
    schedule: Schedule,
    *,
    shape: Shape,
    pad_id: int,
    packed: bool,
    static: bool = False,
    guide: Guide | None = None,
    teaching: Teaching | None = None,
) -> ContrastiveObjective:
    chosen = recipe.objective
    filters = chosen.filter_false_negatives and is_read(recipe, "objective.filter_false_negatives")
    longest = max(recipe.data.query_max_length, recipe.data.passage_max_length)
    return ContrastiveObjective(
        schedule,
        shape,
        token_budget=recipe.train.micro_batch_size * longest,
        packed=packed,
        pad_id=pad_id,
        loss=chosen.loss,
        similarity=chosen.similarity,
        temperature=chosen.temperature,
        kl=chosen.kl,
        kl_weight=chosen.kl_weight,
        kl_temperature=chosen.kl_temperature,
        detach_teacher=chosen.detach_teacher,
        mask_false_negatives=chosen.mask_false_negatives,
        false_negative_margin=chosen.false_negative_margin if filters else None,
        cached=chosen.backward == "grad_cache",
        score_memory_mib=recipe.train.score_memory_mib,
        seed=recipe.run.seed,
        static=static,
        guide=guide,
        filter_by=chosen.filter_by,
        kl_teacher=chosen.kl_teacher,
        teaching=teaching,
    )

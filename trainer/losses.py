"""Contrastive losses of several sizes: tensors in, tensors out.

InfoNCE and the KL to the full size (Starbucks §3.1, eq. 4 and 5; SPEC "SRL fine-tuning") are computed in tiles of
queries by blocks of passages, with gradients in closed form, so that memory does not grow with the batch. With
s = q·p/τ, p = softmax(s), T the full size:
    d InfoNCE / d s = p − onehot(target)
    KL(p_T || p) = Σ_j p_T,j (s_T,j − s_j) − lse_T + lse
    d KL / d s = p − p_T;    d KL / d s_T = p_T (s_T − s − lse_T + lse − KL)   where the teacher is not detached.
A block keeps the exponentials of s minus its own maximum, the maximum and the sum; the row's log-sum-exp follows from
the blocks', and with it the factor that turns the block's exponentials into p. Where a tile's exponentials fit in
memory for all passages, each score is computed once; where they do not, a second sweep computes them again.

Which passages are no negatives: `false_negatives` finds what is known from the texts, the margin filter
(GISTEmbed, arXiv:2402.16829; NV-Retriever, arXiv:2407.15831) what a judge's scores suggest: the full size's, or those
of a guide, a frozen model whose vectors are given too. A guide can be the KL's teacher as well; every size is then its
student. It has no loss of its own and gets no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, isqrt, log
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# Finite, so that an excluded passage's score difference to the teacher's is 0 and not NaN.
EXCLUDED_SCORE = -1e30
# Scores are in bits inside the tiles, p = 2^(s − lse): on a CPU exp2 takes half of exp's time, and exp many times its
# own where the result is nearly 0, as it is for most passages at a low temperature.
NATS_A_BIT = log(2)
# Scores in a block: on a CPU a few such blocks stay in the cache between passes; a GPU wants few, large launches.
CPU_BLOCK_SCORES, GPU_BLOCK_SCORES = 2**19, 2**25
# With fewer queries a tile spends more on reading passages and adding to their gradients than a second sweep costs.
LEAST_QUERIES = 128
MOST_QUERIES = 512
STATISTICS = 4  # numbers for each query, block and size
FULL, GUIDE = "full", "guide"  # whose scores filter and teach


def multi_size_contrastive(
    queries: Sequence[Tensor],
    passages: Sequence[Tensor],
    *,
    targets: Tensor,
    loss_weights: Sequence[float],
    kl_weights: Sequence[float],
    temperature: float,
    num_queries: int | None = None,
    excluded: Tensor | None = None,
    false_negative_margin: float | None = None,
    detach_teacher: bool = True,
    score_memory_mib: float = 256.0,
    guide: tuple[Tensor, Tensor] | None = None,
    filter_by: str = FULL,
    taught_by: str = FULL,
    guide_temperature: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Σ_k loss_weights[k] · InfoNCE_k + kl_weights[k] · KL(teacher || k), means over `num_queries` queries.

    queries: K of [n, d_k]; passages: K of [m, d_k]; the last is the full size. Dot products are taken as they come:
    normalise before for cosine. Half precision is computed in float32. targets: int64 [n], the column of each query's
    positive. excluded: int64 [e, 2], (query, passage) pairs that are no negatives, in any order, never a target.
    false_negative_margin: for each query, passages whose similarity at the full size exceeds the positive's minus the
    margin are left out at every size, besides the positive; no gradient flows through the choice. num_queries: the
    GLOBAL batch's number of queries where `queries` are one rank's share (default n). temperature divides the scores.
    score_memory_mib bounds the scores held at once, whatever n and m are. The gradients can be asked for once.
    guide: vectors [n, g] and [m, g] of another model, without gradient. filter_by, taught_by: "full" or "guide", whose
    similarities filter and whose scores, divided by guide_temperature, teach; of a guide all K sizes learn.
    Returns (loss, InfoNCE of each size [K], KL of each size [K]); the latter two are detached and unweighted.
    """
    terms = ContrastiveTerms(
        tuple(loss_weights),
        tuple(kl_weights),
        temperature,
        queries[0].shape[0] if num_queries is None else num_queries,
        false_negative_margin,
        detach_teacher,
        score_memory_mib,
        filter_by,
        taught_by,
        guide_temperature,
    )
    return _MultiSizeContrastive.apply(targets, excluded, terms, guide, *queries, *passages)


@dataclass(frozen=True)
class ContrastiveTerms:
    """What the loss of `multi_size_contrastive` is made of, besides its tensors.

    Sizes are 0 .. K−1; K stands for the guide.
    """

    loss_weights: tuple[float, ...]
    kl_weights: tuple[float, ...]
    temperature: float
    num_queries: int
    margin: float | None = None
    detach_teacher: bool = True
    score_memory_mib: float = 256.0
    filter_by: str = FULL
    taught_by: str = FULL
    guide_temperature: float = 1.0

    @property
    def needs_guide(self) -> bool:
        return self.taught_by == GUIDE or (self.margin is not None and self.filter_by == GUIDE)

    @property
    def teacher(self) -> int:
        return self._number(self.taught_by)

    @property
    def judge(self) -> int:
        """Whose similarities the margin filter looks at."""
        return self._number(self.filter_by)

    @property
    def students(self) -> range:
        return range(self.teacher)

    @property
    def teaches(self) -> tuple[float, ...]:
        """Each size's weight of the KL; the teacher's from itself is 0 whatever its weight."""
        return (*self.kl_weights[: self.teacher], 0.0)

    @property
    def moves_teacher(self) -> bool:
        return any(self.teaches) and not self.detach_teacher and self.taught_by == FULL

    @property
    def judges_apart(self) -> bool:
        """Whether the filter needs scores before the teacher's, which are computed first otherwise."""
        return self.margin is not None and self.judge != self.teacher

    @property
    def matrices(self) -> int:
        """Matrices of a tile's scores alive at once: exponentials of the teacher and of a student, gaps, penalties."""
        return 1 + (self.teacher > 0) + self.moves_teacher + (self.margin is not None)

    def temperature_of(self, size: int) -> float:
        return self.temperature if size < len(self.loss_weights) else self.guide_temperature

    def _number(self, of: str) -> int:
        return len(self.loss_weights) - (of == FULL)


class _MultiSizeContrastive(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        targets: Tensor,
        excluded: Tensor | None,
        terms: ContrastiveTerms,
        guide: tuple[Tensor, Tensor] | None,
        *vectors: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        sides = vectors[: len(vectors) // 2], vectors[len(vectors) // 2 :]
        half = vectors[0].dtype in (torch.float16, torch.bfloat16)
        dtype = torch.float32 if half else vectors[0].dtype
        gradients = [
            torch.zeros_like(each, dtype=dtype) if wanted else None
            for each, wanted in zip(vectors, ctx.needs_input_grad[4:])
        ]
        loss, nce, divergence = add_contrastive_gradients(
            *sides, terms=terms, targets=targets, excluded=excluded, gradients=gradients, guide=guide, dtype=dtype
        )
        ctx.gradients = [
            None if gradient is None else gradient.to(each.dtype) for gradient, each in zip(gradients, vectors)
        ]
        ctx.mark_non_differentiable(nce, divergence)
        return loss, nce, divergence

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        if ctx.gradients is None:
            raise RuntimeError("The contrastive loss hands its gradients out once: compute it again for a second.")
        # Scaled where they lie and given away: a copy would double what the passages' gradients take.
        gradients, ctx.gradients = ctx.gradients, None
        return None, None, None, None, *(None if each is None else each.mul_(grads[0]) for each in gradients)


@dataclass(frozen=True)
class Tiling:
    """How many queries a tile has, how many passages a block, and whether a tile's exponentials are kept for all."""

    queries: int
    passages: int
    keeps_rows: bool


def choose_tiling(
    num_queries: int,
    num_passages: int,
    *,
    matrices: int,
    statistics: int,
    scores_in_memory: int,
    block_scores: int,
) -> Tiling:
    """One sweep if a tile of enough queries fits beside all passages, else blocks of both.

    matrices: how many a tile keeps, besides a block of scratch. statistics: numbers kept for each query and block.
    """
    block = min(block_scores, scores_in_memory // (matrices + 1))
    narrow = max(1, min(num_passages, block // MOST_QUERIES))
    fitting = (scores_in_memory - block) // (matrices * num_passages + statistics * ceil(num_passages / narrow))
    if fitting >= max(1, min(num_queries, LEAST_QUERIES)):
        queries = max(1, min(num_queries, MOST_QUERIES, fitting))
        return Tiling(queries, max(1, min(num_passages, block // queries)), keeps_rows=True)
    # Wide enough that the statistics take no more than the blocks.
    wide = min(num_passages, max(narrow, isqrt(statistics * num_passages // (matrices + 1))))
    fitting = scores_in_memory // ((matrices + 1) * wide + statistics * ceil(num_passages / wide))
    return Tiling(max(1, min(num_queries, MOST_QUERIES, fitting)), wide, keeps_rows=False)


def add_contrastive_gradients(
    queries: Sequence[Tensor],
    passages: Sequence[Tensor],
    *,
    terms: ContrastiveTerms,
    targets: Tensor,
    excluded: Tensor | None,
    gradients: Sequence[Tensor | None],
    guide: tuple[Tensor, Tensor] | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    """`multi_size_contrastive` without a graph: its gradients are added to `gradients` where they shall lie.

    gradients: 2K tensors shaped as the queries, then the passages, or None where not wanted. dtype: of the scores.
    Returns (loss, InfoNCE [K], KL [K]).
    """
    num_queries, num_passages, num_sizes = queries[0].shape[0], passages[0].shape[0], len(queries)
    query_grads, passage_grads = gradients[:num_sizes], gradients[num_sizes:]
    assert guide is not None or not terms.needs_guide
    if guide is not None:
        queries, passages = [*queries, guide[0]], [*passages, guide[1]]
        query_grads, passage_grads = [*query_grads, None], [*passage_grads, None]
    tiling = choose_tiling(
        num_queries,
        num_passages,
        matrices=terms.matrices,
        statistics=STATISTICS * len(queries),
        scores_in_memory=int(terms.score_memory_mib * 2**20) // dtype.itemsize,
        block_scores=CPU_BLOCK_SCORES if targets.device.type == "cpu" else GPU_BLOCK_SCORES,
    )
    blocks = [
        slice(start, min(start + tiling.passages, num_passages)) for start in range(0, num_passages, tiling.passages)
    ]
    pairs = _pairs_by_block(excluded, tiling, len(blocks), num_queries)
    width = num_passages if tiling.keeps_rows else tiling.passages
    rooms = torch.empty(terms.matrices, tiling.queries * width, dtype=dtype, device=targets.device)
    scratch = torch.empty(tiling.queries * tiling.passages, dtype=dtype, device=targets.device)
    totals = torch.zeros(2, len(queries), dtype=dtype, device=targets.device)
    order = (terms.teacher, *terms.students)
    for number, start in enumerate(range(0, num_queries, tiling.queries)):
        part = slice(start, min(start + tiling.queries, num_queries))
        tile = _Tile(
            [each[part].to(dtype) for each in queries],
            passages,
            [None if each is None else each[part] for each in query_grads],
            passage_grads,
            targets[part],
            blocks,
            pairs[number * len(blocks) : (number + 1) * len(blocks)],
            terms,
            rooms=rooms,
            scratch=scratch,
            keeps_rows=tiling.keeps_rows,
        )
        if tiling.keeps_rows:
            for block in range(len(blocks) if terms.judges_apart else 0):
                tile.judge(block)
            for size in order:
                for block in range(len(blocks)):
                    tile.exponentials(size, block)
                tile.sum_up(size)
                for block in range(len(blocks) if size != terms.teacher else 0):
                    tile.add_gradients(size, block)
            for block in range(len(blocks)):
                tile.add_gradients(terms.teacher, block)
        else:
            for block in range(len(blocks)):
                if terms.judges_apart:
                    tile.judge(block)
                for size in order:
                    tile.exponentials(size, block)
            for size in order:
                tile.sum_up(size)
            for block in range(len(blocks) if any(each is not None for each in gradients) else 0):
                if terms.judges_apart:
                    tile.judge(block)
                for size in order:
                    tile.exponentials(size, block, again=True)
                    if size != terms.teacher:
                        tile.add_gradients(size, block)
                tile.add_gradients(terms.teacher, block)
        totals[0] += tile.nce.sum(1)
        totals[1] += tile.divergence.sum(1)
    nce, divergence = totals[:, :num_sizes] * (NATS_A_BIT / terms.num_queries)
    weights = torch.tensor([terms.loss_weights, terms.kl_weights], dtype=nce.dtype, device=nce.device)
    return (weights[0] * nce + weights[1] * divergence).sum(), nce, divergence


def _pairs_by_block(
    excluded: Tensor | None, tiling: Tiling, num_blocks: int, num_queries: int
) -> list[tuple[Tensor, Tensor] | None]:
    """The excluded pairs of each (tile, block), as rows and columns inside it; None where there are none."""
    num_tiles = -(-num_queries // tiling.queries)
    if excluded is None or not len(excluded):
        return [None] * (num_tiles * num_blocks)
    place = excluded[:, 0] // tiling.queries * num_blocks + excluded[:, 1] // tiling.passages
    place, order = place.sort()
    rows, columns = excluded[order, 0] % tiling.queries, excluded[order, 1] % tiling.passages
    edges = torch.searchsorted(place, torch.arange(num_tiles * num_blocks + 1, device=place.device)).tolist()
    return [(rows[a:b], columns[a:b]) if a < b else None for a, b in pairwise(edges)]


class _Tile:
    """One tile of queries against all passages: a block's exponentials, the rows' sums, then a block's gradients."""

    def __init__(
        self,
        queries: list[Tensor],
        passages: Sequence[Tensor],
        query_grads: list[Tensor | None],
        passage_grads: Sequence[Tensor | None],
        targets: Tensor,
        blocks: list[slice],
        pairs: list[tuple[Tensor, Tensor] | None],
        terms: ContrastiveTerms,
        *,
        rooms: Tensor,
        scratch: Tensor,
        keeps_rows: bool,
    ) -> None:
        self.queries, self.passages = queries, passages
        self.query_grads, self.passage_grads = query_grads, passage_grads
        self.targets, self.blocks, self.pairs, self.terms = targets, blocks, pairs, terms
        self.rooms, self.scratch, self.keeps_rows = rooms, scratch, keeps_rows
        rows, sizes = len(targets), len(queries)
        # Of a block's scores: the maximum, the sum of its exponentials, the sum of the teacher's times what the scores
        # are below their maximum, and what makes its exponentials shares of the row.
        self.peak, self.mass, self.cross, self.log_factor = rooms.new_zeros(STATISTICS, sizes, len(blocks), rows)
        self.positive, self.lse, self.nce, self.divergence = rooms.new_zeros(4, sizes, rows)
        if terms.margin is not None:
            judge = terms.judge
            positives = passages[judge][targets].to(rooms.dtype)
            similarity = (queries[judge] * positives).sum(1, keepdim=True)
            self.ceiling = (similarity - terms.margin) / (terms.temperature_of(judge) * NATS_A_BIT)

    def judge(self, block: int) -> None:
        """Find what the filter leaves out of a block, before any size's scores are wanted."""
        self._find_penalty(self._products(self.terms.judge, block), block)

    def exponentials(self, size: int, block: int, *, again: bool = False) -> None:
        """2^(s − maximum) of a block, into the size's room; `again`: its maximum and sums are known already."""
        terms, teacher = self.terms, self.terms.teacher
        scores = self._scores(size, block)
        if terms.moves_teacher and (size == teacher or terms.teaches[size]):
            gap = self._room("gap", block)  # Σ_k kl_weights[k] (s_T − s_k), in nats
            if size == teacher:
                torch.mul(scores, NATS_A_BIT * sum(terms.teaches), out=gap)
            else:
                gap.sub_(scores, alpha=NATS_A_BIT * terms.teaches[size])
        if not again:
            column, inside = self._targets_in(block)
            found = scores.gather(1, column[:, None])[:, 0]
            self.positive[size] = torch.where(inside, found, self.positive[size])
            torch.amax(scores, 1, out=self.peak[size, block])
        scores -= self.peak[size, block, :, None]
        room = torch.exp2(scores, out=self._room(size, block))
        if not again:
            torch.sum(room, 1, out=self.mass[size, block])
            if any(terms.teaches) and (size == teacher or terms.teaches[size]):
                scores *= self._room(teacher, block)
                torch.sum(scores, 1, out=self.cross[size, block])

    def sum_up(self, size: int) -> None:
        """The rows' log-sum-exp and KL, in bits, from all blocks'; the teacher's before the others'."""
        # Differences to the row's maximum first: beside large scores a log-sum-exp has lost what tells shares apart.
        top = self.peak[size].amax(0)
        spread = ((self.peak[size] - top).exp2() * self.mass[size]).sum(0).log2()
        self.lse[size] = top + spread
        self.nce[size] = (top - self.positive[size]) + spread
        torch.sub(self.peak[size] - top, spread, out=self.log_factor[size])
        if self.terms.teaches[size]:
            self.divergence[size] = self._taught_mean(self.terms.teacher) - self._taught_mean(size)

    def _taught_mean(self, size: int) -> Tensor:
        """Σ_j p_T,j log p_j.  # [rows]"""
        teacher = self.terms.teacher
        blocks = self.cross[size] + self.log_factor[size] * self.mass[teacher]
        return (self.log_factor[teacher].exp2() * blocks).sum(0)

    def add_gradients(self, size: int, block: int) -> None:
        """d loss / d s of a block, in the size's room, and through it to queries and passages."""
        query_grad, passage_grad = self.query_grads[size], self.passage_grads[size]
        if query_grad is None and passage_grad is None:
            return
        terms, teacher = self.terms, self.terms.teacher
        grad, factor = self._room(size, block), self.log_factor[size, block, :, None].exp2()
        if size == teacher and terms.moves_teacher:
            gap = self._room("gap", block)
            gap += self._teacher_offset()[:, None]
            grad *= factor
            grad *= gap
        else:
            weight = terms.loss_weights[size] + terms.teaches[size]
            grad *= weight * factor
            if terms.teaches[size]:
                share = terms.teaches[size] * self.log_factor[teacher, block, :, None].exp2()
                grad.addcmul_(self._room(teacher, block), share, value=-1)
        column, inside = self._targets_in(block)
        grad.scatter_add_(1, column[:, None], (-terms.loss_weights[size] * inside.to(grad.dtype))[:, None])
        scale = 1.0 / (terms.temperature * terms.num_queries)
        if query_grad is not None:
            query_grad.addmm_(grad, self.passages[size][self.blocks[block]].to(grad.dtype), alpha=scale)
        if passage_grad is not None:
            passage_grad[self.blocks[block]].addmm_(grad.t(), self.queries[size], alpha=scale)

    def _teacher_offset(self) -> Tensor:
        """What the row adds to the gaps for the teacher's gradient over p_T.  # [rows]"""
        offset = torch.full_like(self.lse[0], self.terms.loss_weights[self.terms.teacher])
        for size in self.terms.students:
            if weight := self.terms.teaches[size]:
                bits = self.lse[size] - self.lse[self.terms.teacher] - self.divergence[size]
                offset += NATS_A_BIT * weight * bits
        return offset

    def _scores(self, size: int, block: int) -> Tensor:
        scores, terms = self._products(size, block), self.terms
        if (pairs := self.pairs[block]) is not None:
            scores[pairs] = EXCLUDED_SCORE
        if terms.margin is not None:
            if size == terms.teacher and not terms.judges_apart:
                self._find_penalty(scores, block)
            # Adding is many times faster than masked_fill_.
            scores += self._room("penalty", block)
        return scores

    def _products(self, size: int, block: int) -> Tensor:
        passages = self.passages[size][self.blocks[block]].to(self.rooms.dtype)
        scores = self.scratch[: len(self.targets) * len(passages)].view(len(self.targets), len(passages))
        scale = 1.0 / (self.terms.temperature_of(size) * NATS_A_BIT)
        return torch.addmm(scores, self.queries[size], passages.t(), beta=0, alpha=scale, out=scores)

    def _find_penalty(self, scores: Tensor, block: int) -> None:
        """What is added to a block's scores at every size: a lot where the judge's `scores` are above the ceiling."""
        penalty = self._room("penalty", block)
        torch.gt(scores, self.ceiling, out=penalty)
        column, inside = self._targets_in(block)
        penalty.scatter_(1, column[:, None], penalty.gather(1, column[:, None]) * ~inside[:, None])
        penalty *= EXCLUDED_SCORE

    def _targets_in(self, block: int) -> tuple[Tensor, Tensor]:
        """Each query's target as a column of the block, and whether it is one (else the column means nothing)."""
        part = self.blocks[block]
        column = (self.targets - part.start).clamp(0, part.stop - part.start - 1)
        return column, column + part.start == self.targets

    def _room(self, of: int | str, block: int) -> Tensor:
        """Where a block's matrix is kept, contiguous: of the teacher or a student, the gaps or the penalties."""
        terms, part = self.terms, self.blocks[block]
        if of == "gap":
            number = 2
        elif of == "penalty":
            number = terms.matrices - 1
        else:
            number = 0 if of == terms.teacher else 1
        rows, columns = len(self.targets), part.stop - part.start
        begin = rows * part.start if self.keeps_rows else 0
        return self.rooms[number, begin : begin + rows * columns].view(rows, columns)


def normalize_(vectors: Tensor) -> Tensor:
    """Scale the rows of [n, d] to unit length, in place; returns their lengths [n, 1], at least 1e-12."""
    lengths = torch.linalg.vector_norm(vectors, dim=1, keepdim=True).clamp_(min=1e-12)
    vectors /= lengths
    return lengths


def unnormalized_gradient_(gradient: Tensor, unit: Tensor, lengths: Tensor) -> None:
    """From the gradient by unit vectors u = x / |x| to that by x, in place: (g − u (u·g)) / |x|.  # [n, d]"""
    along = torch.linalg.vecdot(unit, gradient)[:, None]
    gradient.addcmul_(unit, along, value=-1).div_(lengths)


def false_negatives(
    query_hashes: Tensor,
    targets: Tensor,
    passage_hashes: Tensor,
    known_query_hashes: Tensor,
    known_hashes: Tensor,
) -> Tensor:
    """Pairs (i, j), j ≠ targets[i], where passage j is no negative of query i, as int64 [e, 2] sorted by query.

    Passage j has the text of query i, of its positive, or of a known positive of a query with the same text as i.
    query_hashes, targets: int64 [n]; passage_hashes: int64 [m]; known_query_hashes, known_hashes: int64 [t], pairs of
    a query's text and a positive's, of all ranks. Sorting only: work is linear, up to a logarithm, in these and e.
    """
    rows = torch.arange(len(query_hashes), device=query_hashes.device)
    # Pairs of which either side is absent here go first, and repeated ones, that would multiply below.
    query_values, passage_values = query_hashes.unique(), passage_hashes.unique()
    known_query, at_query = _equal_pairs(known_query_hashes, query_values)
    among, at_passage = _equal_pairs(known_hashes[known_query], passage_values)
    known = (at_query[among] * len(passage_values) + at_passage).unique()
    row, place = _equal_pairs(query_hashes, query_values[known // max(1, len(passage_values))])
    wanted = torch.cat([query_hashes, passage_hashes[targets], passage_values[known[place] % len(passage_values)]])
    which, column = _equal_pairs(wanted, passage_hashes)
    query = torch.cat([rows, rows, row])[which]
    others = column != targets[query]
    pairs = (query[others] * len(passage_hashes) + column[others]).unique()
    return torch.stack([pairs // len(passage_hashes), pairs % len(passage_hashes)], dim=1)


def _equal_pairs(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """All (a, b) with left[a] == right[b], ordered by a."""
    values, order = right.sort()
    first = torch.searchsorted(values, left)
    count = torch.searchsorted(values, left, right=True) - first
    a = torch.repeat_interleave(count)
    rank = torch.arange(len(a), device=a.device) - (count.cumsum(0) - count)[a]
    return a, order[first[a] + rank]


def cosent(similarities: Tensor, gold: Tensor, *, temperature: float) -> Tensor:
    """CoSENT: log(1 + Σ_{gold_i > gold_j} exp((sim_j − sim_i) / τ)), for graded pairs (SPEC, inner losses).

    similarities, gold: float [n], one entry a pair of the GLOBAL batch. Returns a scalar. For each i the sum over j is
    a prefix of the pairs sorted by grade, so no [n, n] matrix is needed.
    """
    gold, order = gold.sort()
    # In float64, since one running sum passes through all n; n numbers cost nothing.
    scaled = similarities[order].double() / temperature
    prefixes = torch.cat([scaled.new_full((1,), -torch.inf), scaled.logcumsumexp(0)])
    lower = torch.searchsorted(gold, gold)  # how many pairs have a lower grade
    violations = prefixes[lower] - scaled
    return torch.logsumexp(torch.cat([violations.new_zeros(1), violations]), dim=0).to(similarities.dtype)


def coordinate_divergence(student: Tensor, teacher: Tensor, *, temperature: float) -> Tensor:
    """τ · Σ_i KL(softmax(t_i / τ) || softmax(s_i / τ)) over embedding coordinates, summed over texts.

    student: [n, d]; teacher: [n, D], of which the first d coordinates count (SPEC, released STS code).
    """
    reference = F.log_softmax(teacher[:, : student.shape[1]] / temperature, dim=1)
    log_student = F.log_softmax(student / temperature, dim=1)
    return temperature * F.kl_div(log_student, reference, reduction="sum", log_target=True)

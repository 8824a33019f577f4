"""An objective's own share of a step's costs: operations, bytes moved, held and gathered, and parameters, from counts.

`costs_of` chooses the object by the recipe; launch/scaling.py, which plans a step, asks it and knows no objective.
docs/scaling.md derives the formulas, with references. Torch-free and numpy-free, like trainer/costs/counts.py.

Units: bytes, operations. `vectors`: how many vectors of the global batch a rank compares its own with, at each size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from models.sizes import Body, Size
from trainer.config.read_keys import is_read
from trainer.config.schema import Recipe
from trainer.costs.counts import (
    FORWARD_AND_BACKWARD,
    Texts,
    encoder_flops,
    masked_flops,
    needed_passes,
    passes_of,
    sizes_flops,
)
from trainer.costs.exchange import RING_SHARE_HELD, chosen_exchange
from trainer.costs.layers import kept_by_a_norm, kept_bytes, kept_for_the_feed_forward, moved_elements
from trainer.costs.parameters import decoder_parameters, layer_matrices, masked_head_parameters
from trainer.costs.shapes import Shape

_MIB = 2**20
_BF16 = 2.0  # bytes an element


@dataclass(frozen=True)
class ObjectiveCosts:
    """The costs of an objective that only embeds texts. Subclasses add the costs of their losses.

    kept: the share of the texts whose graphs gradient caching keeps (train.activation_memory_mib).
    """

    recipe: Recipe
    kept: float = 0.0

    # Whether its progress is told in tokens read of a corpus.
    pretrains: ClassVar[bool] = False

    @property
    def sizes(self) -> Sequence[Size]:
        """The sizes of a step; where sizes are drawn, those of the mean draw."""
        return self.recipe.step_sizes.planned

    @property
    def widths(self) -> int:
        """Dimensions of a text's vectors of all sizes together."""
        return sum(size.dim for size in self.sizes)

    def own_parameters(self, shape: Shape) -> list[int]:
        """Elements of every parameter beside the encoder's and the heads'."""
        return []

    def own_matrices(self, shape: Shape) -> list[int]:
        """Of these the matrices that take hidden states to hidden states."""
        return []

    def head_parameters(self, shape: Shape) -> list[int]:
        """Elements of every parameter of the heads (models/heads.py), where they alone train.

        They are for every body of the ladder but the last, as `trainer.resize` fits them. Where the encoder trains too,
        no head is counted, because a recipe does not say whether its model has any.
        """
        if not self.recipe.trains_heads_alone:
            return []
        ladder = self.recipe.ladder
        return [shape.hidden * ladder.full.dim, ladder.full.dim] * (len(ladder.bodies) - 1)

    # --- how a step runs ---------------------------------------------------------------------------------------------

    @property
    def caches(self) -> bool:
        """Whether texts are embedded first without a graph, by gradient caching."""
        return self.recipe.compares_texts and self.recipe.objective.backward == "grad_cache"

    @property
    def cuts(self) -> bool:
        """Whether a rank's share is cut into micro-batches, each with a backward pass of its own."""
        return self.caches or not self.recipe.compares_texts

    @property
    def sends_back(self) -> bool:
        """Whether gradients flow through the encoder; where heads alone train, none do."""
        return not self.recipe.trains_heads_alone

    @property
    def forward_passes(self) -> float:
        """How often the encoder runs forward for a text at all sizes: once more by caching, and by checkpointing."""
        again = self.caches * (1 - self.kept)
        return 1 + again + (self.sends_back and self.recipe.train.activation_checkpointing)

    def passes(self, shape: Shape) -> list[Shape]:
        """What each forward pass computes of the encoder: one pass for each fraction of the feed-forwards."""
        return passes_of(shape, self.sizes)

    @property
    def encoder_passes(self) -> float:
        """The encoder's work in forward passes of all sizes, of which backward counts as two."""
        return self.forward_passes + needed_passes(trains_encoder=self.sends_back) - 1

    def rows_read(self, texts: Texts) -> float:
        """Tokens whose state after the last layer is read; most families compute its feed-forward for them alone.

        Those of prompts are counted even if the pooling leaves them out, because their number is not known here.
        """
        return texts.count if self.recipe.model.pooling in ("cls", "last") else texts.tokens

    # --- operations --------------------------------------------------------------------------------------------------

    def model_flops(self, shape: Shape, texts: Texts) -> float:
        """Operations as metrics.jsonl's mfu counts them: the mathematics of a step, forward and backward."""
        return needed_passes(trains_encoder=self.sends_back) * sizes_flops(shape, texts, self.sizes)

    def computed_flops(self, shape: Shape, texts: Texts, *, vectors: float) -> float:
        """Operations that a rank computes for its texts: the model's, minus skipped ones, plus repeated ones."""
        # Of a token, in all passes.
        last_feed_forward = 2 * sum(each.weights for one in self.passes(shape) for each in one.feed_forward)
        passes = self.encoder_passes - (self.recipe.adapter_rank > 0)
        skipped = passes * last_feed_forward * self._skipped(shape, texts)
        spared = self._spared_by_frozen_weights(shape, texts)
        heads = self._head_flops(shape, texts)
        return self._model_products(shape, texts) + heads - skipped - spared + self._loss_flops(texts, vectors)

    def _head_flops(self, shape: Shape, texts: Texts) -> float:
        """Operations of the heads, whose inputs need no gradient: a product each forward, and one for the weights."""
        matrices = sum(self.head_parameters(shape)[::2])
        return (self.forward_passes + 1) * 2 * texts.count * matrices

    def _spared_by_frozen_weights(self, shape: Shape, texts: Texts) -> float:
        """Operations of the backward pass that are not needed, less those of adapters.

        Nothing is sent back through frozen lower layers, nor out of the first layer above them. With adapters, the
        matrices themselves need no gradient, and two thin products stand beside each.
        """
        frozen, rank = self.recipe.model.frozen_layers, self.recipe.adapter_rank
        below = sizes_flops(replace(shape, layers=frozen), texts, self.sizes) if frozen else 0.0
        # Nor are they run again, where activations are recomputed.
        spared = (FORWARD_AND_BACKWARD - 1 + self.recipe.train.activation_checkpointing) * below
        if frozen or rank:
            out_of_first = 2 * sum(each.weights for each in shape.attention[:-1])
            spared += len(self.passes(shape)) * texts.tokens * out_of_first
        if rank:
            linears = (*shape.attention, *shape.feed_forward)
            own = self.encoder_passes * rank * sum(each.inputs + each.outputs for each in linears)
            spared += texts.tokens * (shape.layers - frozen) * 2 * (sum(each.weights for each in linears) - own)
        return spared

    def _skipped(self, shape: Shape, texts: Texts) -> float:
        """Tokens for which the last feed-forward is not computed."""
        return texts.tokens - self.rows_read(texts) if shape.reads_rows else 0.0

    def guide_flops(self, guide: Shape, texts: Texts, *, vectors: float) -> float:
        """Operations of the frozen model beside the student, for a rank's texts."""
        return encoder_flops(guide, texts)

    def _model_products(self, shape: Shape, texts: Texts) -> float:
        return self.encoder_passes * sizes_flops(shape, texts, self.sizes)

    def _loss_flops(self, texts: Texts, vectors: float) -> float:
        return 0.0

    # --- bytes -------------------------------------------------------------------------------------------------------

    def moved_bytes(self, shape: Shape, texts: Texts, *, guide: Shape | None = None) -> float:
        """Bytes that elementwise kernels and softmax move through a GPU's memory.

        Matrix products and the optimizer are not counted. trainer/costs/layers.py counts the forward pass of a layer;
        its backward pass is taken to move twice as many bytes.
        """
        total = sum(_forward_bytes(each, texts) for each in self.passes(shape)) * self.encoder_passes
        return total if guide is None else total + _forward_bytes(guide, texts)

    def activation_bytes(self, shape: Shape, texts: Texts, *, width: float = _BF16, drops: bool = True) -> float:
        """Bytes that one micro-batch keeps for backward at all sizes, with a fused or packed attention (no matrix of
        scores).

        What a layer keeps is counted in trainer/costs/layers.py; 2h more elements a token are kept before and after the
        layers, and what the norm after the last layer keeps at every size, where there is one. width: bytes an element.
        Where nothing is sent back, the layers' outputs alone are there at the end of a pass, as with checkpointing.
        """
        hidden, passes = shape.hidden, self.passes(shape)
        total = 2 * texts.tokens * hidden * width * len(passes)
        layers = [kept_bytes(each, width=width, drops=drops) for each in passes]
        if self.recipe.train.activation_checkpointing or not self.sends_back:
            total += texts.tokens * (len(passes) * shape.layers * hidden * width + max(layers))
        else:
            total += texts.tokens * shape.layers * sum(layers)
            skipped = self._skipped(shape, texts)
            total -= skipped * sum(kept_for_the_feed_forward(each, width=width) for each in passes)
        if shape.vectors.final_norm:
            bodies = len({size.body for size in self.sizes})
            total += texts.tokens * bodies * kept_by_a_norm(shape, width=width)
        return total

    def table_gradient_bytes(self, shape: Shape) -> float:
        """Bytes of a gradient of the token table that a fused loss sums up in float32, beside the engine's."""
        return 0.0

    @property
    def exchange(self) -> str:
        """How other ranks' vectors reach a rank's, "gather" or "ring" (trainer/costs/exchange.py), with several ranks.

        Each contrastive term exchanges vectors by itself, one term after the other.
        """
        return "gather"

    def vectors_held(self, texts: Texts, vectors: float) -> float:
        """How many of `vectors` a rank holds at once, beside its own. texts: the rank's whole share."""
        own = self.vectors(texts)
        return min(vectors, RING_SHARE_HELD * own) if self.exchange == "ring" and vectors > own else vectors

    def loss_bytes(self, texts: Texts, *, vectors: float) -> float:
        """Bytes that a rank holds while the loss is computed. texts: the rank's whole share."""
        return 0.0

    def vectors(self, texts: Texts) -> float:
        """With how many of these texts' vectors a rank compares each of its own."""
        return 0.0

    def gathered_bytes(self, vectors: float) -> float:
        """Bytes of all ranks' vectors, at all sizes. They reach every rank, and their gradients are sent back."""
        return 0.0

    def summed_bytes(self) -> float:
        """Bytes of the matrices that the loss sums over ranks, at all sizes; they do not grow with the batch."""
        return 0.0


def _forward_bytes(shape: Shape, texts: Texts) -> float:
    return shape.layers * texts.tokens * moved_elements(shape) * _BF16


@dataclass(frozen=True)
class ComparingCosts(ObjectiveCosts):
    """Losses of vectors that are compared with each other at every size, in float32."""

    def loss_bytes(self, texts: Texts, *, vectors: float) -> float:
        return self._compared_bytes(texts.count, self.vectors_held(texts, vectors))

    def gathered_bytes(self, vectors: float) -> float:
        return 4.0 * vectors * self.widths

    def summed_bytes(self) -> float:
        """Gram matrices of the queries and of the positives, in float64."""
        return 2 * 8.0 * self._spread_squares

    @property
    def _spread_squares(self) -> int:
        """Elements of a Gram matrix of every size, where texts are spread out."""
        return sum(size.dim**2 for size in self.sizes) if self.recipe.objective.spread_weight else 0

    def _spread_flops(self, texts: Texts) -> float:
        """A Gram matrix and a product with it, for queries and for positives, at every size."""
        return 2 * 2 * (self._queries(texts) + self._rows(texts)) * self._spread_squares

    def guide_flops(self, guide: Shape, texts: Texts, *, vectors: float) -> float:
        """The guide's forward pass, and its scores as often as the loss computes the student's."""
        queries, columns = self._rows(texts), self._columns(vectors)
        scores = self._times_scored(queries, columns) * 2 * queries * columns * guide.hidden
        return super().guide_flops(guide, texts, vectors=vectors) + scores

    def _loss_flops(self, texts: Texts, vectors: float) -> float:
        """The products of the scores and of their two gradients, at every size, and those of the spread-out term."""
        return self._score_flops(texts, vectors) + self._spread_flops(texts)

    def _score_flops(self, texts: Texts, vectors: float) -> float:
        queries, columns = self._rows(texts), self._columns(vectors)
        return (2 + self._times_scored(queries, columns)) * 2 * queries * columns * self.widths

    def _queries(self, texts: Texts) -> float:
        """How many of these texts are queries."""
        return 0.0

    def _columns(self, vectors: float) -> float:
        """How many scores each query has: one with each of these vectors, or one in each part that reads the vector."""
        return vectors

    def _rows(self, texts: Texts) -> float:
        """How many rows of scores an InfoNCE takes of these texts' queries."""
        return 0.0

    def _times_scored(self, queries: float, columns: float) -> int:
        """How often scores are computed: once where a row of them fits in memory, else again for the gradients."""
        if self.exchange == "ring":
            return 2
        return 1 if 4 * 2 * min(128, queries) * columns <= self.recipe.train.score_memory_mib * _MIB else 2

    def _compared_bytes(self, own: float, vectors: float) -> float:
        """Vectors and their gradients, and the largest block of scores. own: the rank's own vectors."""
        return 8 * self.widths * (own + vectors) + self.recipe.train.score_memory_mib * _MIB


@dataclass(frozen=True)
class InfoNCECosts(ComparingCosts):
    """InfoNCE of queries against the passages of the global batch, and against what else `objective.negatives` names.

    Each query has as many passages as every other.
    """

    @property
    def exchange(self) -> str:
        """Token tables stay with the gather by "auto": sizes that are prefixes of one vector then share products."""
        setting = self.recipe.train.negatives_exchange
        if not is_read(self.recipe, "train.negatives_exchange"):
            return "gather"
        if setting == "auto" and (self.recipe.is_static or (self.recipe.is_taught and self.recipe.teacher.gathers)):
            return "gather"
        texts = Texts.alike(self.recipe.train.global_batch_size * (1 + self.passages_each), 1.0)
        return chosen_exchange(setting, 2 * 4.0 * self.widths * self.vectors(texts))

    @property
    def passages_each(self) -> int:
        """Passages of a query: positives and hard negatives, as many as the recipe allows."""
        return self.recipe.data.num_positives + self.recipe.data.num_negatives

    @property
    def rows_each(self) -> int:
        """Rows of scores of a query: one for each positive."""
        return self.recipe.data.num_positives

    def _queries(self, texts: Texts) -> float:
        """How many of these texts are queries."""
        return texts.count / (1 + self.passages_each)

    def _rows(self, texts: Texts) -> float:
        return self._queries(texts) * self.rows_each

    def loss_bytes(self, texts: Texts, *, vectors: float) -> float:
        copies = 8 * self.widths * self._rows(texts) if self.rows_each > 1 else 0.0  # of queries, and their gradients
        return super().loss_bytes(texts, vectors=vectors) + copies

    def vectors(self, texts: Texts) -> float:
        """The passages, and the queries where a part compares with them."""
        return self._queries(texts) * (self.passages_each + self._gathers_queries)

    def _columns(self, vectors: float) -> float:
        queries = vectors / (self.passages_each + self._gathers_queries)
        return queries * (self.passages_each * self._parts_with("_passage") + self._parts_with("_query"))

    def _parts_with(self, columns: str) -> int:
        return sum(name.endswith(columns) for name in self.recipe.objective.negatives)

    @property
    def _gathers_queries(self) -> bool:
        return self._parts_with("_query") > 0


@dataclass(frozen=True)
class MaskedCosts(InfoNCECosts):
    """Masked losses: an MLM head, a decoder where the recipe has one, and logits, all of them at each size."""

    pretrains: ClassVar[bool] = True

    def own_parameters(self, shape: Shape) -> list[int]:
        decoder = decoder_parameters(shape) if self.recipe.objective.decoder else []
        return masked_head_parameters(shape) + decoder

    def own_matrices(self, shape: Shape) -> list[int]:
        decoder = layer_matrices(Shape(shape.hidden, shape.inner, 1, shape.vocabulary))
        return [shape.hidden**2, *(decoder if self.recipe.objective.decoder else [])]

    @property
    def caches(self) -> bool:
        """With pairs, texts are embedded once more, before the pass that has the masked losses."""
        return self.recipe.pairs != "none"

    def predicted_rows(self, texts: Texts) -> tuple[float, float]:
        """Predicted positions of the encoder and of the decoder."""
        objective = self.recipe.objective
        decoder = objective.decoder_mask_ratio * texts.tokens if objective.decoder else 0.0
        if self.recipe.decodes_enhanced:
            decoder = texts.tokens - texts.special * texts.count  # all but the special tokens
        return objective.encoder_mask_ratio * texts.tokens, decoder

    def rows_read(self, texts: Texts) -> float:
        """The predicted tokens, and CLS."""
        return self.predicted_rows(texts)[0] + texts.count

    def model_flops(self, shape: Shape, texts: Texts) -> float:
        encoder_rows, decoder_rows = self.predicted_rows(texts)
        forward = masked_flops(
            shape,
            texts,
            encoder_rows=encoder_rows,
            decoder_rows=decoder_rows,
            sizes=self.sizes,
            enhanced=self.recipe.decodes_enhanced,
        )
        return FORWARD_AND_BACKWARD * forward

    def _model_products(self, shape: Shape, texts: Texts) -> float:
        sizes, decoder_rows = len(self.sizes), self.predicted_rows(texts)[1]
        repeated = self.encoder_passes - FORWARD_AND_BACKWARD
        total = self.model_flops(shape, texts) + repeated * encoder_flops(shape, texts)
        # The decoder computes its feed-forward's first product again in backward.
        total += 2 * shape.hidden * shape.inner * decoder_rows * sizes
        if self.recipe.decodes_enhanced:  # and its attention, too
            total += sizes * decoder_rows * 4 * shape.hidden * texts.tokens / texts.count
        return total

    def moved_bytes(self, shape: Shape, texts: Texts, *, guide: Shape | None = None) -> float:
        rows = sum(self.predicted_rows(texts)) * len(self.sizes)
        total = super().moved_bytes(shape, texts, guide=guide)
        total += 2 * _BF16 * rows * shape.vocabulary  # softmax over logits, read and written
        return total + FORWARD_AND_BACKWARD * _BF16 * rows * (14 * shape.hidden + 2 * shape.inner) / 2

    def activation_bytes(self, shape: Shape, texts: Texts, *, width: float = _BF16, drops: bool = True) -> float:
        hidden, sizes = shape.hidden, len(self.sizes)
        encoder_rows, decoder_rows = self.predicted_rows(texts)
        total = super().activation_bytes(shape, texts, width=width, drops=drops)
        total += encoder_rows * width * (self.widths + 4 * sizes * hidden)  # head: input, product, gelu, norm; gradient
        if decoder_rows:
            total += texts.tokens * width * 3 * hidden  # embeddings, keys, values
            total += decoder_rows * width * sizes * 10 * hidden  # merged; norms; feed-forward's ends; head
        if self.recipe.decodes_enhanced:
            total += decoder_rows * width * sizes * hidden  # queries
            total += texts.pairs * (1 + width)  # what each position sees, as flags and added to scores
        return total

    def table_gradient_bytes(self, shape: Shape) -> float:
        return 4.0 * shape.vocabulary * shape.hidden

    def loss_bytes(self, texts: Texts, *, vectors: float) -> float:
        """Blocks of logits, their softmax and their gradient; or the pair term, whichever is larger.

        The pair term comes before all logits. Of it, the gradients of the rank's own vectors stay.
        """
        logits = 3 * self.recipe.train.logits_memory_mib * _MIB
        if not self.caches:
            return logits
        own = texts.count * (2 if self._symmetric else 1)  # with each span once as a query and once as a passage
        return max(self._compared_bytes(own, self.vectors_held(texts, vectors)), logits + 4 * self.widths * texts.count)

    def gathered_bytes(self, vectors: float) -> float:
        return super().gathered_bytes(vectors) if self.caches else 0.0

    def vectors(self, texts: Texts) -> float:
        """The pairs' passages: second spans, or both spans where both are queries; or positives and hard negatives."""
        if self._symmetric:
            return texts.count
        return super().vectors(texts) if self.caches else 0.0

    def _queries(self, texts: Texts) -> float:
        if self._symmetric:
            return texts.count
        return super()._queries(texts) if self.caches else 0.0

    @property
    def passages_each(self) -> int:
        return 1 if self.recipe.pairs == "spans" else super().passages_each

    @property
    def rows_each(self) -> int:
        return 1 if self.recipe.pairs == "spans" else super().rows_each

    @property
    def _symmetric(self) -> bool:
        return self.recipe.pairs == "spans" and self.recipe.objective.symmetric_spans


@dataclass(frozen=True)
class ContrastiveCosts(InfoNCECosts):
    """Contrastive losses: a rank's queries against the vectors of the global batch."""

    def gathered_bytes(self, vectors: float) -> float:
        if self.recipe.objective.loss != "infonce":
            return 0.0
        return super().gathered_bytes(vectors) + 4.0 * self._passages(vectors) * self._asymmetric_widths

    def _loss_flops(self, texts: Texts, vectors: float) -> float:
        scores = 0.0
        if self.recipe.objective.loss != "cosent":
            queries, passages = self._rows(texts), self._passages(vectors)
            asymmetric = (2 + self._times_scored(queries, passages)) * 2 * queries * passages * self._asymmetric_widths
            scores = self._score_flops(texts, vectors) + asymmetric
        return scores + self._spread_flops(texts) + self._compression_flops(texts.count)

    def summed_bytes(self) -> float:
        """And a Gram matrix of whole vectors, and the directions of their components, for each compressed layer."""
        full = self.sizes[-1].dim
        return super().summed_bytes() + sum(8.0 * full * (full + widest) for widest in self._compressed.values())

    def _compression_flops(self, texts: float) -> float:
        """Each compressed layer's Gram matrix, and every narrow size's targets; not the matrices' decomposition."""
        if not self._compressed:
            return 0.0
        full = self.sizes[-1].dim
        narrow = sum(size.dim for size in self.sizes if size.dim < full)
        return 2 * texts * full * (full * len(self._compressed) + narrow)

    @property
    def _compressed(self) -> dict[Body, int]:
        """The widest of the sizes that learn principal components, by their bodies."""
        found: dict[Body, int] = {}
        for size in self.sizes if self.recipe.compresses else ():
            if size.dim < self.sizes[-1].dim:
                found[size.body] = max(size.dim, found.get(size.body, 0))
        return found

    def _passages(self, vectors: float) -> float:
        """How many of the gathered vectors are passages'."""
        return vectors * self.passages_each / (self.passages_each + self._gathers_queries)

    @property
    def _asymmetric_widths(self) -> int:
        """Dimensions of the full size's passages, cut to every smaller size, which small queries are compared with."""
        return self.widths - self.sizes[-1].dim if self.recipe.objective.asymmetric_weight else 0

    def loss_bytes(self, texts: Texts, *, vectors: float) -> float:
        """And what further terms hold, beside what is summed over ranks.

        That is whole vectors of the layers at which no whole vectors are compared, and the full size's passages, cut.
        """
        whole = {size.body for size in self.sizes if size.dim == self.sizes[-1].dim}
        added = 4.0 * texts.count * self.sizes[-1].dim * len(self._compressed.keys() - whole)
        compared = super().loss_bytes(texts, vectors=vectors)
        compared += 8 * self._asymmetric_widths * self._passages(self.vectors_held(texts, vectors))
        return compared + added + self.summed_bytes()


@dataclass(frozen=True)
class DistillationCosts(ComparingCosts):
    """A teacher's vectors, learnt text by text; with relational terms, similarities within the global batch too."""

    def vectors(self, texts: Texts) -> float:
        """The vectors of all texts, where a term needs them."""
        return texts.count if self.recipe.teacher.gathers else 0.0

    def _loss_flops(self, texts: Texts, vectors: float) -> float:
        """The similarities of a rank's texts to all texts, and their two gradients; 0 if no term compares texts."""
        return 3 * 2 * texts.count * vectors * self.widths


def costs_of(recipe: Recipe) -> ObjectiveCosts:
    """The costs of the recipe's objective, chosen by its kind. Another package's may have those of embedding alone."""
    if recipe.kind.predicts_tokens:
        return MaskedCosts(recipe)
    if recipe.kind.contrasts:
        return ContrastiveCosts(recipe)
    return DistillationCosts(recipe) if recipe.is_taught else ObjectiveCosts(recipe)


def with_kept_graphs(
    costs: ObjectiveCosts, shape: Shape, *, micro: Texts, micro_batches: int, width: float
) -> ObjectiveCosts:
    """The costs where as many micro-batches' graphs are kept as the recipe gives memory for, each as large as `micro`.

    width: bytes an element.
    """
    if not costs.recipe.train.activation_memory_mib:
        return costs
    fitting = int(costs.recipe.graph_bytes // costs.activation_bytes(shape, micro, width=width))
    return replace(costs, kept=min(1.0, fitting / micro_batches))

"""An objective's own share of a step's costs: operations, bytes moved, held and gathered, and parameters, from counts.

`costs_of` chooses the object by the recipe; launch/scaling.py, which plans a step, asks it and knows no objective.
docs/scaling.md derives the formulas, with references. Torch-free and numpy-free, like trainer/costs/counts.py.

Units: bytes, operations. `vectors`: how many vectors of the global batch a rank compares its own with, at each size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from models.sizes import Size
from trainer.config.schema import Recipe
from trainer.costs.counts import FORWARD_AND_BACKWARD, Shape, Texts, encoder_flops, masked_flops
from trainer.costs.parameters import layer_parameters, masked_head_parameters

_MIB = 2**20
_BF16 = 2.0  # bytes an element


@dataclass(frozen=True)
class ObjectiveCosts:
    """The costs of an objective that only embeds texts. Subclasses add the costs of their losses."""

    recipe: Recipe

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
        """Elements of every parameter beside the encoder's."""
        return []

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
    def encoder_passes(self) -> float:
        """The encoder's work in forward passes: backward counts as two, caching and checkpointing as one more each."""
        return FORWARD_AND_BACKWARD + self.caches + self.recipe.train.activation_checkpointing

    def rows_read(self, texts: Texts) -> float:
        """Tokens whose state after the last layer is read; that layer's feed-forward is computed for them alone."""
        return texts.count if self.recipe.model.pooling in ("cls", "last") else texts.tokens

    # --- operations --------------------------------------------------------------------------------------------------

    def model_flops(self, shape: Shape, texts: Texts) -> float:
        """Operations as metrics.jsonl's mfu counts them: the mathematics of a step, forward and backward."""
        return FORWARD_AND_BACKWARD * encoder_flops(shape, texts)

    def computed_flops(self, shape: Shape, texts: Texts, *, vectors: float) -> float:
        """Operations that a rank computes for its texts: the model's, minus skipped ones, plus repeated ones."""
        last_feed_forward = 4 * shape.hidden * shape.inner  # a token
        skipped = self.encoder_passes * last_feed_forward * (texts.tokens - self.rows_read(texts))
        return self._model_products(shape, texts) - skipped + self._loss_flops(texts, vectors)

    def guide_flops(self, guide: Shape, texts: Texts, *, vectors: float) -> float:
        """Operations of the frozen model beside the student, for a rank's texts."""
        return encoder_flops(guide, texts)

    def _model_products(self, shape: Shape, texts: Texts) -> float:
        return self.encoder_passes * encoder_flops(shape, texts)

    def _loss_flops(self, texts: Texts, vectors: float) -> float:
        return 0.0

    # --- bytes -------------------------------------------------------------------------------------------------------

    def moved_bytes(self, shape: Shape, texts: Texts, *, guide: Shape | None = None) -> float:
        """Bytes that elementwise kernels and softmax move through a GPU's memory.

        Matrix products and the optimizer are not counted. For each token, a layer's unfused forward pass reads and
        writes: dropout 2h, residual 3h, norm 2h, each twice, and the activation 2i. Its backward pass moves twice as
        much (docs/scaling.md).
        """
        total = _forward_bytes(shape, texts) * self.encoder_passes
        return total if guide is None else total + _forward_bytes(guide, texts)

    def activation_bytes(self, shape: Shape, texts: Texts, *, width: float = _BF16, drops: bool = True) -> float:
        """Bytes that one micro-batch keeps for backward, with a fused or packed attention (no matrix of scores).

        For each token, a layer keeps its input, q, k, v, the attention's output, both norms' inputs, the first norm's
        output, and the feed-forward's two wide states: 8h + 2i elements (Korthikanti et al. 2022, table 2, without
        recomputable scores), and two dropout masks of h bytes. 2h more elements are kept before and after the layers.
        width: bytes an element.
        """
        hidden, inner = shape.hidden, shape.inner
        masks = 2 * hidden if drops else 0
        layer = (8 * hidden + 2 * inner) * width + masks
        if self.recipe.train.activation_checkpointing:
            total = texts.tokens * (shape.layers * hidden * width + layer)
        else:
            skipped = texts.tokens - self.rows_read(texts)
            total = texts.tokens * shape.layers * layer - skipped * (2 * inner + hidden) * width
        return total + 2 * texts.tokens * hidden * width

    def table_gradient_bytes(self, shape: Shape) -> float:
        """Bytes of a gradient of the token table that a fused loss sums up in float32, beside the engine's."""
        return 0.0

    def loss_bytes(self, texts: Texts, *, vectors: float) -> float:
        """Bytes that a rank holds while the loss is computed. texts: the rank's whole share."""
        return 0.0

    def vectors(self, texts: Texts) -> float:
        """With how many of these texts' vectors a rank compares each of its own."""
        return 0.0

    def gathered_bytes(self, vectors: float) -> float:
        """Bytes of all ranks' vectors, at all sizes. Every rank gathers them and sends their gradients back."""
        return 0.0


def _forward_bytes(shape: Shape, texts: Texts) -> float:
    return shape.layers * texts.tokens * (14 * shape.hidden + 2 * shape.inner) * _BF16


@dataclass(frozen=True)
class MaskedCosts(ObjectiveCosts):
    """Masked losses: an MLM head, a decoder where the recipe has one, and logits, all of them at each size."""

    pretrains: ClassVar[bool] = True

    def own_parameters(self, shape: Shape) -> list[int]:
        decoder = layer_parameters(shape) if self.recipe.objective.decoder else []
        return masked_head_parameters(shape) + decoder

    @property
    def encoder_passes(self) -> float:
        """With pairs, texts are embedded once more, before the pass that has the masked losses."""
        return super().encoder_passes + (self.recipe.pairs != "none")

    def predicted_rows(self, texts: Texts) -> tuple[float, float]:
        """Predicted positions of the encoder and of the decoder."""
        objective = self.recipe.objective
        decoder = objective.decoder_mask_ratio * texts.tokens if objective.decoder else 0.0
        if self.recipe.decodes_enhanced:
            decoder = texts.tokens - 2 * texts.count  # all but the special tokens
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
        """Blocks of logits, their softmax and their gradient."""
        return 3 * self.recipe.train.logits_memory_mib * _MIB


@dataclass(frozen=True)
class ComparingCosts(ObjectiveCosts):
    """Losses of vectors that are compared with each other at every size, in float32."""

    def loss_bytes(self, texts: Texts, *, vectors: float) -> float:
        """Vectors and their gradients, and the largest block of scores."""
        return 8 * self.widths * (texts.count + vectors) + self.recipe.train.score_memory_mib * _MIB

    def gathered_bytes(self, vectors: float) -> float:
        return 4.0 * vectors * self.widths


@dataclass(frozen=True)
class ContrastiveCosts(ComparingCosts):
    """Contrastive losses: a rank's queries against the passages of the global batch."""

    def vectors(self, texts: Texts) -> float:
        """The passages."""
        each = 1 + self.recipe.data.num_negatives
        return texts.count * each / (1 + each)

    def gathered_bytes(self, vectors: float) -> float:
        if self.recipe.objective.loss != "infonce":
            return 0.0
        return super().gathered_bytes(vectors) + 4.0 * vectors * self._asymmetric_widths

    def guide_flops(self, guide: Shape, texts: Texts, *, vectors: float) -> float:
        """The guide's forward pass, and its scores as often as the loss computes the student's."""
        queries, once = self._queries(texts, vectors)
        scores = (1 if once else 2) * 2 * queries * vectors * guide.hidden
        return super().guide_flops(guide, texts, vectors=vectors) + scores

    def _loss_flops(self, texts: Texts, vectors: float) -> float:
        """Scores, and the gradients of queries and passages, at every size; scores twice where a row does not fit."""
        if self.recipe.objective.loss == "cosent":
            return 0.0
        queries, once = self._queries(texts, vectors)
        return (3 if once else 4) * 2 * queries * vectors * (self.widths + self._asymmetric_widths)

    @property
    def _asymmetric_widths(self) -> int:
        """Dimensions of the full size's passages, cut to every smaller size, which small queries are compared with."""
        return self.widths - self.sizes[-1].dim if self.recipe.objective.asymmetric_weight else 0

    def loss_bytes(self, texts: Texts, *, vectors: float) -> float:
        return super().loss_bytes(texts, vectors=vectors) + 8 * self._asymmetric_widths * vectors

    def _queries(self, texts: Texts, vectors: float) -> tuple[float, bool]:
        """A rank's queries, and whether a row of their scores fits in memory and is computed only once."""
        queries = texts.count / (2 + self.recipe.data.num_negatives)
        return queries, 4 * 2 * min(128, queries) * vectors <= self.recipe.train.score_memory_mib * _MIB


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

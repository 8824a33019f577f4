"""Scores at every size in the middle of training, through the engine, on all ranks together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from models.encoder import Encoder
from models.settings import EmbeddingSettings
from trainer.config.schema import Recipe
from trainer.distributed import World
from trainer.engine import Engine
from trainer.evaluation.encoding.encode import Embedder
from trainer.evaluation.run import evaluate_tasks
from trainer.evaluation.tasks.read import read_tasks
from trainer.evaluation.tasks.retrieval import RetrievalData
from trainer.evaluation.tasks.sts import STSTask

# The metrics whose curves over steps are drawn; the command `trainer.evaluate` gives all metrics.
_SHOWN = ("spearman", "ndcg_cut_10", "recip_rank_10")


@dataclass(frozen=True)
class Evaluator:
    """The tasks of a recipe's [evaluation], read before training starts so that a wrong path fails early."""

    settings: EmbeddingSettings
    sts: tuple[STSTask, ...]
    retrieval: tuple[RetrievalData, ...]
    grid: bool = False  # every pairing of the ladder's bodies and dimensions, instead of the ladder's own sizes

    @classmethod
    def of(cls, recipe: Recipe, settings: EmbeddingSettings) -> Evaluator:
        chosen = recipe.evaluation
        sts, beir = read_tasks(chosen.sts, chosen.beir, split=chosen.split, max_documents=chosen.max_documents)
        return cls(settings, tuple(sts), tuple(beir), chosen.grid)

    @property
    def has_tasks(self) -> bool:
        return bool(self.sts or self.retrieval)

    def run(self, engine: Engine, tokenizer: Any, world: World) -> dict[str, float]:
        """task/metric/size -> score. Every rank must call it; only rank 0 gets the retrieval scores."""
        ladder = self.settings.sizes
        # One call gives all sizes, because a size is a slice of its body's output.
        sizes = list(ladder.grid if self.grid else ladder)

        encoder = engine.module if isinstance(engine.module, Encoder) else engine.module.encoder
        assert isinstance(encoder, Encoder)
        static = encoder.is_static

        def forward(input_ids: Tensor, mask_or_offsets: Tensor, prompts: Tensor | None = None) -> tuple[Tensor, ...]:
            if static:
                return engine(input_ids, None, sizes=sizes, offsets=mask_or_offsets)
            return engine(input_ids, mask_or_offsets, sizes=sizes, prompt_lengths=prompts)

        engine.train(False)
        embedder = Embedder(
            forward,
            tokenizer,
            sizes,
            world,
            flat=static,
            pool_prompt=self.settings.pool_prompt,
            rows=encoder.word_embeddings.num_embeddings,
        )
        records = evaluate_tasks(embedder, sizes, self.settings, sts=self.sts, retrieval=self.retrieval)
        engine.train(True)
        return {f"{r.task}/{r.metric}/{r.size}": r.value for r in records if r.metric in _SHOWN}

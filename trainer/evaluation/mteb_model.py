"""One of our models at one size, as an ordinary model of the package `mteb`, which runs MTEB, NanoBEIR and others.

    import mteb
    model = load_mteb_model("runs/x/model", "tall")
    mteb.evaluate(model, mteb.get_tasks(tasks=["NanoSciFactRetrieval"]))

Queries and documents take the model's own prompts and lengths. All other texts are encoded as STS sentences are: with
the query prompt and the longer of the two lengths. `mteb` is an optional dependency (`pip install -e ".[mteb]"`), so
this module is imported only where it is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mteb.models.model_meta import ModelMeta, ScoringFunction
from mteb.types import PromptType
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from models.encoder import Encoder
from models.settings import EmbeddingSettings
from models.sizes import Size
from trainer.evaluation.encoding.encode import DEFAULT_BATCH_TOKENS, embedder_of
from trainer.evaluation.subject import check_sizes, load_model, trained_settings


class MtebModel:
    """Implements mteb's EncoderProtocol."""

    def __init__(
        self,
        encoder: Encoder,
        tokenizer: PreTrainedTokenizerBase,
        settings: EmbeddingSettings,
        size: Size,
        *,
        name: str,
        device: torch.device | str = "cpu",
        batch_tokens: int = DEFAULT_BATCH_TOKENS,
    ) -> None:
        self._encoder, self._tokenizer, self._settings = encoder.to(device).eval(), tokenizer, settings
        self._size, self._device, self._batch_tokens = size, device, batch_tokens
        self.mteb_model_meta = ModelMeta(
            loader=None,
            name=f"barista/{name}-{size}",  # mteb requires an organization before the slash
            revision="local",
            release_date=None,
            languages=None,
            n_parameters=None,
            memory_usage_mb=None,
            max_tokens=settings.max_length,
            embed_dim=size.dim,
            license=None,
            open_weights=True,
            public_training_code=None,
            public_training_data=None,
            framework=["PyTorch"],
            similarity_fn_name=ScoringFunction.COSINE
            if settings.similarity == "cosine"
            else ScoringFunction.DOT_PRODUCT,
            use_instructions=bool(settings.query_prompt or settings.passage_prompt),
            training_datasets=None,
        )

    def encode(self, inputs: Any, *, prompt_type: PromptType | None = None, **_: Any) -> np.ndarray:
        """The vectors of all texts, float32 [texts, size.dim]. inputs: mteb's loader of batches with "text"."""
        texts = [text for batch in inputs for text in batch["text"]]
        settings = self._settings
        length, prompt = settings.max_length, settings.query_prompt
        if prompt_type == PromptType.query:
            length = settings.query_max_length
        elif prompt_type == PromptType.document:
            length, prompt = settings.passage_max_length, settings.passage_prompt
        run = embedder_of(
            self._encoder, self._tokenizer, [self._size], device=self._device, batch_tokens=self._batch_tokens
        )
        return run(texts, similarity=settings.similarity, max_length=length, prompt=prompt)[self._size]

    def similarity(self, embeddings1: Any, embeddings2: Any) -> Tensor:
        """[n, m] dot products. They are the model's own similarity: vectors for cosine already have unit length."""
        return _matrix(embeddings1) @ _matrix(embeddings2).T

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> Tensor:
        return (_matrix(embeddings1) * _matrix(embeddings2)).sum(-1)


def load_mteb_model(model_folder: str | Path, size: str = "", *, device: torch.device | str = "cpu") -> MtebModel:
    """A trained folder at one size. `size`: a name of its ladder or LAYERSxDIM; empty takes the largest."""
    (model,) = load_mteb_models(model_folder, [size], device=device)
    return model


def load_mteb_models(
    model_folder: str | Path, sizes: Sequence[str], *, device: torch.device | str = "cpu"
) -> list[MtebModel]:
    """A trained folder at each of some sizes, which share its weights. Raises ConfigError if it lacks one of them."""
    settings = trained_settings(model_folder)
    chosen = [settings.sizes.find(size) if size else settings.sizes.full for size in sizes]
    encoder, tokenizer, _ = load_model(model_folder)
    check_sizes(chosen, encoder)
    folder = Path(model_folder).resolve()
    name = folder.parent.name if folder.name == "model" else folder.name
    return [MtebModel(encoder, tokenizer, settings, size, name=name, device=device) for size in chosen]


def _matrix(embeddings: Any) -> Tensor:
    tensor = torch.as_tensor(embeddings)
    return tensor if tensor.ndim > 1 else tensor[None]

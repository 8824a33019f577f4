"""Masked-language-model and masked-autoencoder pre-training losses for every size in one forward pass.

L = Σ_{(n,d)} w_{n,d} (L_enc(n,d) + L_dec(n,d)) (Starbucks §3.2, eq. 8 and 9), where both terms are means over masked
tokens. Only masked rows and the CLS rows reach the head. The rows of all sizes are stacked and share one transform and
one fused linear cross-entropy, and the decoder runs once (models/mae_decoder.py). Without a decoder this is MLM at each
size; with the full size only, it is plain MLM or RetroMAE. With visibility keys, decoding is enhanced, and the
decoder terms are means over all tokens. At position 0 the decoder reads each size's CLS vector: in SMAE after the
head's transform, because sizes are narrower than the decoder (eq. 7), and unchanged in RetroMAE (SentMAE eq. 2 and 4).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from models.choices import Pooling
from models.encoder import Encoder, base_of, flat_texts
from models.layout import Layout
from models.mae_decoder import MultiSizeDecoder
from models.mlm_head import head_of
from models.sizes import Size
from models.visibility import visible_positions

IGNORED = -100


@dataclass(frozen=True)
class DecoderInputs:
    """What the decoder reads and predicts of a micro-batch's texts.

    input_ids, labels: as those of the encoder, flat [T] or padded [B, L]. `scale`: the decoder term's weight over the
    GLOBAL batch's count of predicted tokens. visibility_keys: int64 [B], for enhanced decoding, from which each row's
    sample of the positions that it reads is drawn (models/visibility.py); input_ids are then the unmasked tokens. None:
    basic decoding. visible_share: of the other positions, for each one in enhanced decoding.
    """

    input_ids: Tensor
    labels: Tensor
    scale: float = 1.0
    visibility_keys: Tensor | None = None
    visible_share: float = 1.0


class MaskedAutoencoder(nn.Module):
    """Encoder, head and (optionally) bottleneck decoder, sharing embeddings and head.

    bottleneck: what the decoder reads at position 0. "head": head(CLS); "cls": the CLS vector itself, which only sizes
    of the full width allow.
    """

    def __init__(
        self,
        masked_lm: PreTrainedModel,
        *,
        pooling: Pooling,
        pool_prompt: bool = True,
        with_decoder: bool,
        bottleneck: str = "head",
        logits_memory_mib: float = 64.0,
    ) -> None:
        super().__init__()
        assert bottleneck in ("head", "cls"), bottleneck
        self.bottleneck = bottleneck
        # Not registered as a submodule: its parts are registered below under the names that this class uses.
        object.__setattr__(self, "masked_lm", masked_lm)
        self.encoder = Encoder(base_of(masked_lm), pooling, pool_prompt=pool_prompt)
        self.head, self.vocabulary_loss = head_of(masked_lm, logits_memory_mib=logits_memory_mib)
        self.decoder = MultiSizeDecoder(self.encoder.backbone) if with_decoder else None

    @torch.no_grad()
    def start_from_frequencies(self, counts: Tensor) -> None:
        """Set the output bias of an untrained head to the tokens' log frequencies. counts: [V], of the corpus.

        Otherwise an untrained model first learns these frequencies with all its weights. All texts then have nearly the
        same embedding, a state that small models take long to leave. One is added to each count for smoothing.
        """
        counts = counts.to(self.vocabulary_loss.bias) + 1.0
        self.vocabulary_loss.bias.copy_((counts / counts.sum()).log())

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        sizes: Sequence[Size],
        offsets: Tensor | None = None,
        labels: Tensor | None = None,
        decoder: DecoderInputs | None = None,
        size_weights: Sequence[float] = (),
        encoder_scale: float = 1.0,
        embeddings: Literal["no", "also", "only"] = "no",
        prompt_lengths: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Losses of one micro-batch, or its embeddings.

        input_ids, labels: flat texts [T] with `offsets`, int64 [B + 1]; or padded [B, L] with their attention_mask.
        labels are -100 where no token is predicted. `decoder`: what the decoder reads and predicts; None without one.
        `encoder_scale`: the encoder term's weight over the GLOBAL batch's count of predicted tokens, so that the losses
        of micro-batches and ranks add up to the batch's mean.

        Returns (loss, encoder losses [S], decoder losses [S]); the latter two are detached, scaled like the loss but
        not weighted by size. With `embeddings` "also", each size's embeddings of these masked texts [B, d] follow; with
        "only", they alone are returned, computed with the same dropout masks. `prompt_lengths`, and everything without
        `labels`: as in `Encoder.forward`.
        """
        if labels is None:
            return self.encoder(input_ids, attention_mask, sizes, offsets=offsets, prompt_lengths=prompt_lengths)
        tokens, texts = flat_texts(input_ids, attention_mask, offsets)
        flat = texts.pack if offsets is None else Tensor.long
        labels = flat(labels)  # [T]
        predicted = labels != IGNORED
        reads_all = embeddings != "no" and self.encoder.pooling != "cls"
        states = self.encoder.hidden_states(
            tokens, texts, [size.layers for size in sizes], read=None if reads_all else predicted | texts.first
        )
        pooled: tuple[Tensor, ...] = ()
        if embeddings != "no":
            by_layer = self.encoder.pooled(states, texts, self.encoder.kept(texts, prompt_lengths))
            pooled = tuple(by_layer[size.layers][:, : size.dim] for size in sizes)
        if embeddings == "only":
            return pooled
        masked = texts.pad(predicted)  # [B, L]
        rows = [states[size.layers][masked][:, : size.dim] for size in sizes]  # S of [M_enc, d]
        sides = [(labels[predicted], encoder_scale)]
        if decoder is None:
            transformed = self.head(rows)
        else:
            first = [states[size.layers][:, 0, : size.dim] for size in sizes]  # S of [B, d]
            encoder_rows, cls = self._with_bottleneck(rows, first)
            decoded, decoder_labels = self._decode(decoder, cls, texts, flat=flat)
            transformed = torch.cat([encoder_rows, self.head([decoded.flatten(0, 1)])])
            sides.append((decoder_labels, decoder.scale))
        loss, encoder_losses, *decoder_losses = self._losses(transformed, sides, size_weights)
        return loss, encoder_losses, *(decoder_losses or [torch.zeros_like(encoder_losses)]), *pooled

    def _with_bottleneck(self, rows: list[Tensor], first: list[Tensor]) -> tuple[Tensor, Tensor]:
        """(the head's transform of the rows [sum of rows, D], what the decoder reads at position 0 [S, B, D]).

        rows, first: each size's masked rows [M_enc, d] and CLS vectors [B, d].
        """
        if self.bottleneck == "cls":
            return self.head(rows), torch.stack(first)
        transformed = self.head(rows + first)
        of_rows = sum(len(part) for part in rows)
        encoder_rows, cls_rows = transformed.split([of_rows, transformed.shape[0] - of_rows])
        return encoder_rows, cls_rows.view(len(first), len(first[0]), -1)

    def _decode(
        self, given: DecoderInputs, cls: Tensor, texts: Layout, *, flat: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """(the decoder's outputs at the tokens to predict [S, M_dec, D], those tokens [M_dec]).

        cls: [S, B, D]. flat: how the texts' values become flat.
        """
        assert self.decoder is not None, "decoder inputs were given to a model built without a decoder"
        labels = flat(given.labels)
        wanted = labels != IGNORED
        visible = positions = None
        if given.visibility_keys is not None:
            visible = visible_positions(given.visibility_keys, texts.mask, share=given.visible_share)
            positions = self.encoder.position_vectors(texts.length)
        embed = cast(nn.Module, self.encoder.backbone.embeddings)
        decoded = self.decoder(
            embed(input_ids=texts.pad(flat(given.input_ids), self.encoder.pad_id)),
            texts.mask,
            cls,
            texts.pad(wanted),
            visible=visible,
            positions=positions,
        )
        return decoded, labels[wanted]

    def _losses(
        self, rows: Tensor, sides: Sequence[tuple[Tensor, float]], size_weights: Sequence[float]
    ) -> tuple[Tensor, ...]:
        """(loss, each side's losses by size [S]); the latter are detached and not weighted by size.

        rows: [R, D], the head's outputs, side by side and in each size by size. sides: (the tokens to predict [M], the
        scale) of encoder and decoder; each size predicts all M.
        """
        num_sizes = len(size_weights)
        weights = torch.tensor(size_weights, dtype=torch.float32, device=rows.device)
        loss, row_losses = self.vocabulary_loss(
            rows,
            torch.cat([targets.repeat(num_sizes) for targets, _ in sides]),
            torch.cat([(weights * scale).repeat_interleave(len(targets)) for targets, scale in sides]),
        )
        parts = row_losses.split([len(targets) * num_sizes for targets, _ in sides])
        by_size = (part.view(num_sizes, len(targets)).sum(1) * scale for part, (targets, scale) in zip(parts, sides))
        return loss, *by_size

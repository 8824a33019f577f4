"""Masked-language-model and masked-autoencoder pre-training losses for every size in one forward pass.

L = Σ_{(n,d)} w_{n,d} (L_enc(n,d) + L_dec(n,d)) (Starbucks §3.2, eq. 8 and 9), where both terms are means over masked
tokens. Only masked rows and the CLS rows reach the head. The rows of all sizes are stacked and share one transform and
one fused linear cross-entropy, and the decoder runs once (models/mae_decoder.py). Without a decoder this is MLM at each
size; with the full size only, it is plain MLM or RetroMAE. With a visibility mask, decoding is enhanced, and the
decoder terms are means over all tokens. At position 0 the decoder reads each size's CLS vector: in SMAE after the
head's transform, because sizes are narrower than the decoder (eq. 7), and unchanged in RetroMAE (SentMAE eq. 2 and 4).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from models.choices import Pooling
from models.encoder import Encoder, base_of, flat_texts, pool
from models.mae_decoder import MultiSizeDecoder
from models.mlm_head import head_of
from models.sizes import Size

IGNORED = -100


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
        with_decoder: bool,
        bottleneck: str = "head",
        logits_memory_mib: float = 64.0,
    ) -> None:
        super().__init__()
        assert bottleneck in ("head", "cls"), bottleneck
        self.bottleneck = bottleneck
        # Not registered as a submodule: its parts are registered below under the names that this class uses.
        object.__setattr__(self, "masked_lm", masked_lm)
        self.encoder = Encoder(base_of(masked_lm), pooling)
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
        decoder_input_ids: Tensor | None = None,
        decoder_labels: Tensor | None = None,
        decoder_visible: Tensor | None = None,
        size_weights: Sequence[float] = (),
        encoder_scale: float = 1.0,
        decoder_scale: float = 1.0,
        embeddings: Literal["no", "also", "only"] = "no",
    ) -> tuple[Tensor, ...]:
        """Losses of one micro-batch, or its embeddings.

        input_ids, labels, decoder_input_ids, decoder_labels: flat texts [T] with `offsets`, int64 [B + 1]; or padded
        [B, L] with their attention_mask. labels are -100 where no token is predicted. decoder_visible: bool [B, L, L],
        for enhanced decoding: the positions that each row reads (models/visibility.py); decoder_input_ids are then the
        unmasked tokens. `encoder_scale`, `decoder_scale`: the term's weight over the GLOBAL batch's count of predicted
        tokens, so that the losses of micro-batches and ranks add up to the batch's mean.

        Returns (loss, encoder losses [S], decoder losses [S]); the latter two are detached, scaled like the loss but
        not weighted by size. With `embeddings` "also", each size's embeddings of these masked texts [B, d] follow; with
        "only", they alone are returned, computed with the same dropout masks. Without `labels`: as `Encoder.forward`.
        """
        if labels is None:
            return self.encoder(input_ids, attention_mask, sizes, offsets=offsets)
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
            by_layer = {layer: pool(state, texts.mask, self.encoder.pooling) for layer, state in states.items()}
            pooled = tuple(by_layer[size.layers][:, : size.dim] for size in sizes)
        if embeddings == "only":
            return pooled
        masked = texts.pad(predicted)  # [B, L]
        cut = [states[size.layers][masked][:, : size.dim] for size in sizes]  # S of [M_enc, d]
        weights = torch.tensor(size_weights, dtype=torch.float32, device=input_ids.device)
        count = int(predicted.sum())
        targets = labels[predicted].repeat(len(sizes))
        row_weights = (weights * encoder_scale).repeat_interleave(count)
        if decoder_input_ids is None or decoder_labels is None:
            loss, row_losses = self.vocabulary_loss(self.head(cut), targets, row_weights)
            per_size = row_losses.view(len(sizes), count).sum(1) * encoder_scale
            return loss, per_size, torch.zeros_like(per_size), *pooled

        assert self.decoder is not None, "decoder labels were given to a model built without a decoder"
        first = [states[size.layers][:, 0, : size.dim] for size in sizes]  # S of [B, d]
        if self.bottleneck == "cls":
            encoder_rows, cls = self.head(cut), torch.stack(first)  # [S, B, D]
        else:
            transformed = self.head(cut + first)
            encoder_rows, cls_rows = transformed.split([count * len(sizes), transformed.shape[0] - count * len(sizes)])
            cls = cls_rows.view(len(sizes), texts.batch, -1)  # [S, B, D]
        decoder_labels = flat(decoder_labels)
        wanted = decoder_labels != IGNORED
        embed = cast(nn.Module, self.encoder.backbone.embeddings)
        positions = None if decoder_visible is None else self.encoder.position_vectors(texts.length)
        decoded = self.decoder(
            embed(input_ids=texts.pad(flat(decoder_input_ids), self.encoder.pad_id)),
            texts.mask,
            cls,
            texts.pad(wanted),
            visible=decoder_visible,
            positions=positions,
        )  # [S, M_dec, D]
        decoder_count = decoded.shape[1]
        loss, row_losses = self.vocabulary_loss(
            torch.cat([encoder_rows, self.head([decoded.flatten(0, 1)])]),
            torch.cat([targets, decoder_labels[wanted].repeat(len(sizes))]),
            torch.cat([row_weights, (weights * decoder_scale).repeat_interleave(decoder_count)]),
        )
        encoder_losses, decoder_losses = row_losses.split([count * len(sizes), decoder_count * len(sizes)])
        return (
            loss,
            encoder_losses.view(len(sizes), count).sum(1) * encoder_scale,
            decoder_losses.view(len(sizes), decoder_count).sum(1) * decoder_scale,
            *pooled,
        )

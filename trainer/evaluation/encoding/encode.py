"""Texts to embeddings of every wanted size, from one pass over the texts.

`forward` is a callable, so that the same code serves a bare `Encoder`, a DeepSpeed engine in the middle of training and
a test's stub. An engine's parameters may be partitioned, so every rank must make the same number of calls.
A size's vector is first cut and then normalised (Starbucks §3.1), which gives the cosine of truncated vectors.

Memory: the texts' ids (4 bytes per token of this rank's share), one batch on the device, and the result,
4 bytes × texts × the sum of the sizes' dimensions (twice as much while ranks gather). A corpus too large for this is
encoded block by block: see `trainer.evaluation.tasks.retrieval.retrieve`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from data.encoding import TextEncoder
from data.ground.errors import ConfigError, DataError
from data.tokens import SpelledOut, frame_of, left_out_length, pad_id_of
from models.encoder import Encoder
from models.sizes import Size
from trainer.distributed import World, gather_rows, max_over_ranks

Forward = Callable[..., tuple[Tensor, ...]]
"""(input_ids, attention_mask), both int64 [batch, seq], to one [batch, size.dim] a size, not normalised.

With `flat`, (input_ids int32 [T], offsets int64 [batch + 1]) of texts without padding: what a static encoder takes.
Without `pool_prompt`, the tokens of each text's prompt, int64 [batch], follow.
"""

EncodeTexts = Callable[[Sequence[str]], Mapping[Size, np.ndarray]]
"""Texts to size -> float32 [n, size.dim]: `encode` with everything bound but the texts."""

DEFAULT_BATCH_TOKENS = 16_384
_TEXTS_PER_TOKENIZER_CALL = 8_192
_ROWS_PER_GATHER = 16_384
_FLAT_TEXTS_PER_CALL = 1_024  # a static encoder's batch; its vectors and their normalised copy then fit the CPU caches


def encoder_forward(encoder: Encoder, sizes: Sequence[Size], *, dtype: torch.dtype = torch.float32) -> Forward:
    """The encoder as the `forward` of `encode` (`flat` if it is static); a dtype other than float32 uses autocast."""
    if encoder.is_static:
        return lambda input_ids, offsets: encoder(input_ids, None, sizes, offsets=offsets)

    def forward(input_ids: Tensor, attention_mask: Tensor, prompts: Tensor | None = None) -> tuple[Tensor, ...]:
        with torch.autocast(input_ids.device.type, dtype=dtype, enabled=dtype != torch.float32):
            return encoder(input_ids, attention_mask, sizes, prompt_lengths=prompts)

    return forward


@dataclass(frozen=True)
class Ids:
    """Token ids of many texts, concatenated: int32 [T] with offsets int64 [n + 1]."""

    tokens: np.ndarray
    offsets: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)


@dataclass(frozen=True)
class Embedder:
    """A model as `encode` runs it on texts.

    The caller switches the model to eval mode and back.
    """

    forward: Forward
    tokenizer: PreTrainedTokenizerBase
    sizes: Sequence[Size]
    """The sizes that `forward` returns, in its order."""
    world: World
    """The ranks that share the texts, and the device of this one."""
    flat: bool = False
    """`forward` takes concatenated ids and offsets instead of padded ids and a mask. Texts are then tokenized without
    special tokens, and cut where they would leave room for them."""
    pool_prompt: bool = True
    """False: the model leaves the prompt out of its pooling, and `forward` is told how long it is."""
    batch_tokens: int = DEFAULT_BATCH_TOKENS
    """Tokens of a batch at most: rows × longest row, padding included."""
    progress: bool = False
    """Rank 0 shows a bar."""
    rows: int | None = None
    """Rows of the model's token table; None: one for every token of the tokenizer."""

    @functools.cached_property
    def spelled_out(self) -> SpelledOut | None:
        """How the model reads special tokens that a text spells out and that have no row in its table."""
        return None if self.rows is None else SpelledOut.of(self.tokenizer, self.rows)

    def __call__(
        self, texts: Sequence[str], *, similarity: str, max_length: int, prompt: str = ""
    ) -> dict[Size, np.ndarray]:
        """`encode` by this model."""
        return encode(self, texts, similarity=similarity, max_length=max_length, prompt=prompt)


def embedder_of(
    encoder: Encoder,
    tokenizer: PreTrainedTokenizerBase,
    sizes: Sequence[Size],
    *,
    device: torch.device | str,
    batch_tokens: int = DEFAULT_BATCH_TOKENS,
    progress: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Embedder:
    """An encoder as an Embedder of one rank; it is moved to the device and put into eval mode."""
    return Embedder(
        encoder_forward(encoder.to(device).eval(), sizes, dtype=dtype),
        tokenizer,
        sizes,
        World.alone(device),
        flat=encoder.is_static,
        pool_prompt=encoder.pool_prompt,
        batch_tokens=batch_tokens,
        progress=progress,
        rows=encoder.word_embeddings.num_embeddings,
    )


def encode(
    embedder: Embedder, texts: Sequence[str], *, similarity: str, max_length: int, prompt: str = ""
) -> dict[Size, np.ndarray]:
    """Size -> float32 [len(texts), size.dim], rows in the order of `texts`, on every rank.

    `similarity` "cosine" gives unit vectors; "dot" leaves the vectors as they are.
    `max_length`: tokens, special tokens included.
    With several ranks in `embedder.world`, every rank passes the same texts, encodes its share and receives everything.
    Equal texts are encoded once, so that they get equal vectors whatever else is in their batch. Gradients are off.
    """
    sizes = list(dict.fromkeys(embedder.sizes))
    if similarity not in ("dot", "cosine"):
        raise ConfigError(f"similarity {similarity!r} is unknown; use 'dot' or 'cosine'")
    if embedder.batch_tokens < 1:
        raise ConfigError(f"batch_tokens {embedder.batch_tokens} is below 1; give the tokens that one batch may hold")
    if not len(texts):
        return {size: np.empty((0, size.dim), np.float32) for size in sizes}

    if embedder.spelled_out is not None:
        embedder.spelled_out.check_prompt(embedder.tokenizer, prompt)
    unique = {text: row for row, text in enumerate(dict.fromkeys(texts))}
    rows_of_texts = np.fromiter((unique[text] for text in texts), np.int64, len(texts))
    distinct = list(unique)
    shares = _shares(distinct, embedder)
    share = shares[embedder.world.rank]
    read = functools.partial(_read, embedder, prompt=prompt, max_length=max_length)
    ids = read([distinct[row] for row in share])
    if not embedder.flat and not embedder.tokenizer.num_special_tokens_to_add():
        _refuse_empty(ids, embedder.world)
    filler = None if len(share) else read(distinct[:1])
    left_out = None if embedder.pool_prompt else left_out_length(embedder.tokenizer, prompt)
    vectors = _encode_share(  # [len(share), Σ dims]
        embedder, ids, filler=filler, normalise=similarity == "cosine", left_out=left_out
    )

    if embedder.world.size == 1:
        everything = vectors
        place = np.empty(len(share), np.int64)
        place[share] = np.arange(len(share))
        rows_of_texts = place[rows_of_texts]
        if embedder.flat and len(sizes) == 1 and len(distinct) == len(texts):
            return {sizes[0]: everything}  # without a copy, which would take a good part of the time
    else:
        everything = np.empty((len(distinct), vectors.shape[1]), np.float32)
        _gather_shares(vectors, everything, shares, device=embedder.world.device)
    ends = np.cumsum([size.dim for size in sizes])
    return {
        size: np.ascontiguousarray(everything[rows_of_texts, end - size.dim : end]) for size, end in zip(sizes, ends)
    }


def token_batches(lengths: np.ndarray, batch_tokens: int) -> list[np.ndarray]:
    """Rows in batches, longest first, each of at most `batch_tokens` tokens with padding, or of a single row."""
    order = np.argsort(-lengths, kind="stable")
    batches = []
    start = 0
    while start < len(order):
        rows = max(1, batch_tokens // max(1, int(lengths[order[start]])))
        batches.append(order[start : start + rows])
        start += rows
    return batches


def _shares(texts: Sequence[str], embedder: Embedder) -> list[np.ndarray]:
    """The rows of `texts` that each rank encodes.

    Texts are sorted by their characters and dealt out in turn, so that ranks get similar lengths and each tokenizes
    only its own share. Flat batches have no padding, so their order does not matter.
    """
    if embedder.flat:
        by_length = np.arange(len(texts))
    else:
        by_length = np.argsort([-len(text) for text in texts], kind="stable")
    return [by_length[rank :: embedder.world.size] for rank in range(embedder.world.size)]


def _read(embedder: Embedder, texts: Sequence[str], *, prompt: str, max_length: int) -> Ids:
    tokenize = _tokenize_flat if embedder.flat else tokenized
    return tokenize(embedder.tokenizer, [prompt + text for text in texts], max_length, embedder.spelled_out)


def _refuse_empty(ids: Ids, world: World) -> None:
    """Refuse texts without a token on all ranks, whichever has them: there is no position that could embed them."""
    empty = int((ids.lengths == 0).sum())
    if max_over_ranks(empty, world.device) if world.size > 1 else empty:
        raise DataError(
            "an empty text cannot be embedded with a tokenizer that adds no token to a text; leave empty texts out, or "
            "train with a closing token (python -m data.prepare ... --append-token)"
        )


def tokenized(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], max_length: int, spelled_out: SpelledOut | None
) -> Ids:
    """The ids of texts within their frame, cut to `max_length` and below the rows of the model's table."""
    chunks: list[np.ndarray] = []
    lengths: list[int] = []
    for start in range(0, len(texts), _TEXTS_PER_TOKENIZER_CALL):
        rows = tokenizer(
            list(texts[start : start + _TEXTS_PER_TOKENIZER_CALL]),
            truncation=True,
            max_length=max_length,
            return_attention_mask=False,
            return_token_type_ids=False,
        )["input_ids"]
        lengths += [len(row) for row in rows]
        chunks.append(np.fromiter((token for row in rows for token in row), np.int32))
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    ids = Ids(np.concatenate(chunks) if chunks else np.empty(0, np.int32), offsets)
    return ids if spelled_out is None else _spelled_out(ids, tokenizer, max_length, spelled_out)


def _spelled_out(ids: Ids, tokenizer: PreTrainedTokenizerBase, max_length: int, spelled_out: SpelledOut) -> Ids:
    """Framed ids with the tokens replaced that the model has no rows for, cut once more, before the closing tokens."""
    tokens, offsets = spelled_out.replace(ids.tokens, ids.offsets)
    closing = len(frame_of(cast(PreTrainedTokenizerFast, tokenizer)).after)
    lengths = np.diff(offsets)
    places = np.arange(len(tokens)) - np.repeat(offsets[:-1], lengths)  # within the text
    kept = (places < max_length - closing) | (places >= np.repeat(lengths, lengths) - closing)
    ends = np.zeros(len(offsets), np.int64)
    np.cumsum(np.minimum(lengths, max_length), out=ends[1:])
    return Ids(tokens[kept], ends)


def _tokenize_flat(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], max_length: int, spelled_out: SpelledOut | None
) -> Ids:
    """Ids without special tokens, cut to leave the room that special tokens would take."""
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    encode_words, room = _text_encoder(backend), max_length - tokenizer.num_special_tokens_to_add()
    rows: list[np.ndarray] = []
    for start in range(0, len(texts), _TEXTS_PER_TOKENIZER_CALL):
        rows += [row[:room] for row in encode_words(texts[start : start + _TEXTS_PER_TOKENIZER_CALL])]
    if spelled_out is not None:
        starts = np.zeros(len(rows) + 1, np.int64)
        np.cumsum([len(row) for row in rows], out=starts[1:])
        whole, starts = spelled_out.replace(np.concatenate(rows), starts)
        rows = [row[:room] for row in np.split(whole, starts[1:-1])]
    offsets = np.zeros(len(rows) + 1, np.int64)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    return Ids(np.concatenate(rows) if rows else np.empty(0, np.int32), offsets)


@functools.lru_cache(maxsize=1)
def _text_encoder(backend: Tokenizer) -> TextEncoder:
    """The encoder of texts, kept from one block of texts to the next together with its cache of words."""
    return TextEncoder(backend, np.dtype(np.int32))


def _flat(ids: Ids, rows: np.ndarray) -> tuple[Tensor, ...]:
    """Tokens int32 [T] of the texts `rows` (int64 [n]) and their offsets int64 [n + 1]."""
    parts = [ids.tokens[ids.offsets[row] : ids.offsets[row + 1]] for row in rows.tolist()]
    offsets = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(ids.lengths[rows], out=offsets[1:])
    return torch.from_numpy(np.concatenate(parts)), torch.from_numpy(offsets)


def _padded(ids: Ids, rows: np.ndarray, pad_id: int) -> tuple[Tensor, ...]:
    """input_ids and attention_mask, int64 [len(rows), longest]."""
    lengths = ids.lengths[rows]
    columns = np.arange(max(1, int(lengths.max())))
    mask = columns < lengths[:, None]
    input_ids = np.full(mask.shape, pad_id, np.int64)
    input_ids[mask] = ids.tokens[(ids.offsets[rows][:, None] + columns)[mask]]
    return torch.from_numpy(input_ids), torch.from_numpy(mask.astype(np.int64))


@torch.no_grad()
def _encode_share(
    embedder: Embedder, ids: Ids, *, normalise: bool, filler: Ids | None, left_out: int | None
) -> np.ndarray:
    """This rank's vectors, float32 [n, Σ dims], with as many calls of `forward` as the busiest rank makes.

    `filler`: the ids of a text for the calls of a rank that has none. `left_out`: the tokens of the prompt, of which
    `forward` is told; None where it need not know them.
    """
    sizes, world = list(dict.fromkeys(embedder.sizes)), embedder.world
    pad_id = None if embedder.flat else pad_id_of(embedder.tokenizer)
    out = np.empty((len(ids.lengths), sum(size.dim for size in sizes)), np.float32)
    if pad_id is None:
        starts = range(0, len(out), _FLAT_TEXTS_PER_CALL)
        batches = [np.arange(start, min(start + _FLAT_TEXTS_PER_CALL, len(out))) for start in starts]
    else:
        batches = token_batches(ids.lengths, embedder.batch_tokens)
    calls = max_over_ranks(len(batches), world.device) if world.size > 1 else len(batches)
    shown = embedder.progress and world.is_main
    for call in tqdm(range(calls), desc="encoding", unit="batch", disable=not shown, leave=False):
        rows = batches[min(call, len(batches) - 1)] if batches else np.zeros(1, np.int64)
        source = ids if batches else filler or ids
        inputs = _flat(source, rows) if pad_id is None else _padded(source, rows, pad_id)
        if left_out is not None:
            inputs += (torch.full((len(rows),), left_out),)
        outputs = embedder.forward(*(each.to(world.device) for each in inputs))
        assert len(outputs) == len(sizes), f"forward gave {len(outputs)} sizes, {len(sizes)} were asked for"
        if call >= len(batches):
            continue
        vectors = [vector.float() for vector in outputs]
        if normalise:
            vectors = [torch.nn.functional.normalize(vector, dim=-1) for vector in vectors]
        places = slice(rows[0], rows[-1] + 1) if pad_id is None else rows
        out[places] = (vectors[0] if len(vectors) == 1 else torch.cat(vectors, dim=1)).cpu().numpy()
    return out


def _gather_shares(mine: np.ndarray, out: np.ndarray, shares: Sequence[np.ndarray], *, device: torch.device) -> None:
    """Fill `out` [n, width] with all ranks' rows. `shares[r]` holds the row numbers in `out` of rank r's rows."""
    for start in range(0, max(map(len, shares)), _ROWS_PER_GATHER):
        places = [share[start : start + _ROWS_PER_GATHER] for share in shares]
        counts = [len(each) for each in places]
        own = torch.from_numpy(mine[start : start + _ROWS_PER_GATHER]).to(device)
        for rows, received in zip(places, gather_rows(own, counts).split(counts)):
            out[rows] = received.cpu().numpy()

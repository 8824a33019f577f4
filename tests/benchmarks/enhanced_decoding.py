"""Benchmark: enhanced decoding's visibility masks and what it costs in a step, one thread, CPU time, in one run.

    python -m tests.benchmarks.enhanced_decoding [--quick] [--json FILE]

The peer is the collator of RetroMAE's second release (FlagOpen/FlagEmbedding), restated: for each text a pool of up to
128 whole-word masks, made token by token in Python, for each position a copy of one of them with itself hidden, then
the encoder's mask. Its rows share 128 samples, ours are one each, and its copies here are plain list copies. Figures,
all ratios of CPU time:
  visibility_ratio        peer ÷ our collator and mask hash, 8 texts × 512 tokens, everything from ids to tensors
  visibility_mask_ratio   the peer's matrices alone ÷ our hash alone
  enhanced_time_ratio     a step of smae_enhanced_bert_base_fineweb.toml ÷ one of smae_bert_base_fineweb.toml, that is
                          masks of 0.3 and 0.5 against 0.2 and 0.4; BERT-base, six sizes, 4 × 128 tokens, float32
  enhanced_time_ratio_2x512        the same, 2 × 512 tokens
  enhanced_time_ratio_same_masks   4 × 128 tokens with masks of 0.3 and 0.5 on both sides
  retromae_time_ratio     enhanced ÷ basic at the full size alone, masks of 0.3 and 0.5
--quick: the masks are those of a full run; steps are of a model of 6 layers × 384, 4 × 128 tokens alone, where the head
takes a larger share than in BERT-base. About a minute.
"""

from __future__ import annotations

import argparse
import random
from functools import partial
from pathlib import Path

import numpy as np
import torch

from data.collate import MaskedCollator
from data.masking import IGNORED
from data.stream import Sample
from data.tokens import Vocabulary
from models.masked_autoencoder import DecoderInputs
from models.sizes import Size
from models.visibility import visible_positions
from tests.benchmarks.smae_step import Subject
from tests.benchmarks.support import Figures, alternate

SHARE = 0.5
POOL = 128  # masks a text


def whole_word_mask(tokens: list[str], ratio: float, draw: random.Random) -> list[int]:
    """1 where a token is masked; special tokens never are."""
    words: list[list[int]] = []
    for place, token in enumerate(tokens):
        if token in ("[CLS]", "[SEP]"):
            continue
        if words and token.startswith("##"):
            words[-1].append(place)
        else:
            words.append([place])
    draw.shuffle(words)
    budget, chosen = max(1, round(len(tokens) * ratio)), set()
    for word in words:
        if len(chosen) >= budget:
            break
        if len(chosen) + len(word) <= budget:
            chosen.update(word)
    return [1 if place in chosen else 0 for place in range(len(tokens))]


def matrices_row_by_row(texts: list[list[str]], draw: random.Random) -> torch.Tensor:
    """[B, L, L], 1 where a row sees a column; texts of one length."""
    matrices = []
    for tokens in texts:
        pool = [whole_word_mask(tokens, 1 - SHARE, draw) for _ in range(min(len(tokens), POOL))]
        rows = []
        for place in range(len(tokens)):
            row = list(pool[draw.randrange(len(pool))])
            row[place] = 1
            rows.append(row)
        matrices.append(1 - torch.tensor(rows))
    return torch.stack(matrices)


def visibility_ratios(count: int, *, repeats: int) -> dict[str, float]:
    """`count` texts of 512 tokens, three in ten of them word pieces."""
    rng = np.random.Generator(np.random.Philox(1))
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    names = [*special, *(f"{'##' if rng.random() < 0.3 else ''}w{i}" for i in range(30517))]
    continuation = np.array([name.startswith("##") for name in names])
    vocabulary = Vocabulary(len(names), (2,), (3,), 0, 4, (0, 1, 2, 3, 4), continuation)
    documents = rng.integers(5, len(names), (count, 510)).astype(np.uint16)
    samples = [Sample(0, i, 0, i, document) for i, document in enumerate(documents)]
    collate = MaskedCollator(
        vocabulary,
        max_length=512,
        encoder_mask_ratio=0.3,
        decoder_mask_ratio=1 - SHARE,
        nested=False,
        seed=0,
        enhanced=True,
    )
    attention = torch.ones((count, 512), dtype=torch.int64)
    draw = random.Random(0)

    def ours() -> torch.Tensor:
        batch = collate(samples)
        assert batch.visibility_keys is not None
        return visible_positions(batch.visibility_keys, attention, share=SHARE)

    def theirs() -> torch.Tensor:
        texts = [["[CLS]", *(names[i] for i in document), "[SEP]"] for document in documents.tolist()]
        for tokens in texts:
            mask = torch.tensor(whole_word_mask(tokens, 0.3, draw), dtype=torch.bool)
            ids = torch.tensor([0] * len(tokens))
            ids.masked_fill(mask, 4)
        return matrices_row_by_row(texts, draw)

    # Both see the share that is asked for, to what whole words allow.
    for made in (ours(), theirs()):
        assert abs(float(made.float().mean()) - SHARE) < 0.02
    peer, own = alternate(theirs, ours, repeats)
    texts = [[names[i] for i in document] for document in documents.tolist()]
    keys = torch.arange(count) * 7919
    peer_masks, own_masks = alternate(
        partial(matrices_row_by_row, texts, draw), lambda: visible_positions(keys, attention, share=SHARE), repeats
    )
    return {
        "visibility_ratio": peer / own,
        "visibility_mask_ratio": peer_masks / own_masks,
        "visibility_milliseconds_a_text": 1e3 * own_masks / count,
    }


class Step:
    """Forward and backward of one batch with either decoding."""

    def __init__(self, subject: Subject, texts: int, length: int) -> None:
        self.subject = subject
        generator = torch.Generator().manual_seed(1)
        shape = (texts, length)
        self.attention = torch.ones(shape, dtype=torch.int64)
        self.ids = torch.randint(5, self.subject.vocabulary, shape, generator=generator)
        self.draw = torch.rand(shape, generator=generator)

    def masked(self, ratio: float) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = self.draw < ratio
        chosen[:, 0] = False
        return self.ids.masked_fill(chosen, 4), torch.where(chosen, self.ids, IGNORED)

    def run(self, sizes: list[Size], encoder_ratio: float, decoder_ratio: float, *, enhanced: bool) -> None:
        encoder_ids, labels = self.masked(encoder_ratio)
        decoder_ids, decoder_labels = self.masked(decoder_ratio)
        keys = None
        if enhanced:
            decoder_ids, decoder_labels = self.ids, self.ids.clone()
            decoder_labels[:, [0, -1]] = IGNORED
            keys = torch.arange(len(self.ids))
        decoder_scale = 1.0 / int((decoder_labels != IGNORED).sum())
        loss = self.subject.model(
            encoder_ids,
            self.attention,
            sizes=sizes,
            labels=labels,
            decoder=DecoderInputs(decoder_ids, decoder_labels, decoder_scale, keys, 1 - decoder_ratio),
            size_weights=[1.0 / len(sizes)] * len(sizes),
            encoder_scale=1.0 / int((labels != IGNORED).sum()),
        )[0]
        loss.backward()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    torch.set_num_threads(1)
    figures = Figures()
    figures.show(**visibility_ratios(8, repeats=3))
    subject = Subject(quick=args.quick)
    short = Step(subject, 4, 128)
    ladder, full = subject.sizes, subject.sizes[-1:]
    short.run(ladder, 0.3, 0.5, enhanced=True)
    cases = [
        ("enhanced_time_ratio", short, ladder, (0.2, 0.4)),
        ("enhanced_time_ratio_same_masks", short, ladder, (0.3, 0.5)),
        ("retromae_time_ratio", short, full, (0.3, 0.5)),
    ]
    if not args.quick:
        cases.insert(1, ("enhanced_time_ratio_2x512", Step(subject, 2, 512), ladder, (0.2, 0.4)))
    for name, step, sizes, basic in cases:
        enhanced_seconds, basic_seconds = alternate(
            partial(step.run, sizes, 0.3, 0.5, enhanced=True),
            partial(step.run, sizes, *basic, enhanced=False),
            2,
        )
        figures.show(**{name: enhanced_seconds / basic_seconds, f"{name}_seconds": enhanced_seconds})
    figures.write(args.json)


if __name__ == "__main__":
    main()

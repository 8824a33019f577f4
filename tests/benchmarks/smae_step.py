"""Benchmark: one SMAE step on BERT-base, ours against the direct way, in one run, alternating, one thread.

    python -m tests.benchmarks.smae_step [--quick] [--json FILE]

The direct way is tests/models/naive.py: transformers' BERT modules, full logits at every position for every size, a
decoder pass a size; both forward and backward. Figures, all ratios of CPU time or memory unless said otherwise:
  dense_time_ratio, dense_time_ratio_2x512   direct ÷ ours, float32, 4 texts × 128 and 2 × 512 tokens, no padding
  real_lengths_time_ratio   direct ÷ ours on real documents cut at 512: the direct way pads to the batch's longest text,
                            ours cuts micro-batches by length (absent without ../shared/data)
  packed_time_ratio         the same, ours packed instead of padded
  bf16_time_ratio           direct ÷ ours, both in bf16, 4 × 128 (left out where the CPU emulates bf16)
  compiled_time_ratio       ours ÷ ours with train.compile, 4 × 128, float32
  memory_ratio_2x512        ours ÷ direct, peak above the model and its gradients, freed blocks given back at once
  floor_ratio               our time ÷ the time of the step's matrix products alone, measured at their shapes
  gemm_gflops               achieved in those products, a second
  encoder_share, loss_share, optimizer_share   of our time: encoder alone, heads and decoder, AdamW
  masking_ratio             our collator ÷ one that asks the tokenizer for every token's text and whether it is special,
                            as transformers 4's DataCollatorForWholeWordMask did; texts a second, 32 × 512 tokens
  masking_ratio_bare        our collator ÷ the same loop over a plain list of the vocabulary
  masking_ratio_transformers   our collator ÷ transformers' own whole-word collator (no token budget, [MASK] only)
  padding_share             of the tokens computed, real documents at 512, 128 a step, budget 8 × 512 tokens
--quick: 6 layers × 384 with the same vocabulary and lengths, three real documents, nothing compiled; about three
minutes. The head takes a larger share of the time than in BERT-base, so its ratios compare with themselves alone.
On a machine with CUDA, one more part runs: 64 × 512 tokens in bf16 there, tokens a second, MFU, peak memory of both
ways and the profile's top ten.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerFast

from data.collate import MaskedCollator
from data.masking import IGNORED
from data.stream import Sample
from data.tokens import Vocabulary
from models.encoder import base_of, build_masked_lm
from models.layout import Layout
from models.masked_autoencoder import DecoderInputs, MaskedAutoencoder
from models.sizes import STARBUCKS_LADDER, Ladder, Size
from tests.benchmarks.support import SHARED, Figures, alternate, peak_mib
from tests.data.reading import read_documents
from tests.models.naive import bert_layer_like, naive_loss
from trainer.config.sections import TrainConfig
from trainer.costs.flops import FORWARD_AND_BACKWARD, Shape, bf16_slowdown, masked_flops, peak_flops
from trainer.objectives.backward import micro_batches
from trainer.optim import adamw

BASE = dict(hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072)
SMALL = dict(hidden_size=384, num_hidden_layers=6, num_attention_heads=6, intermediate_size=1536)
SMALL_LADDER = Ladder.of([(1, 32), (2, 64), (3, 128), (4, 192), (5, 256), (6, 384)])
VOCABULARY = 30522
NO_DROPOUT = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, max_position_embeddings=512)
Inputs = tuple[torch.Tensor, ...]


class Subject:
    """A model with both ways of computing its step."""

    def __init__(self, *, quick: bool, dtype: torch.dtype = torch.float32, device: str = "cpu") -> None:
        torch.manual_seed(0)
        self.vocabulary = VOCABULARY
        shape = SMALL if quick else BASE
        masked_lm = build_masked_lm(
            {"model_type": "bert", **shape, **NO_DROPOUT}, vocab_size=self.vocabulary, pad_token_id=0
        )
        self.sizes: list[Size] = list(SMALL_LADDER if quick else STARBUCKS_LADDER)
        self.weights = [1.0 / len(self.sizes)] * len(self.sizes)
        self.model = MaskedAutoencoder(
            masked_lm, pooling="cls", with_decoder=True, logits_memory_mib=TrainConfig.logits_memory_mib
        )
        self.model.to(dtype=dtype, device=device)
        self.layer = bert_layer_like(self.model).to(dtype=dtype, device=device)
        # What the trainer chooses on a CPU, for both ways.
        base_of(masked_lm).set_attn_implementation("eager" if dtype == torch.bfloat16 else "sdpa")
        self.masked_lm = masked_lm

    def direct(self, inputs: Inputs) -> None:
        naive_loss(self.masked_lm, self.layer, self.sizes, self.weights, inputs)[0].backward()

    def ours(self, inputs: Inputs) -> None:
        scales = [1.0 / max(1, int((inputs[k] != IGNORED).sum())) for k in (3, 5)]
        self._fused(inputs, scales)

    def ours_by_length(self, inputs: Inputs, *, token_budget: int, packed: bool = False) -> None:
        self.masked_lm.base_model.set_attn_implementation("packed" if packed else "sdpa")
        scales = [1.0 / max(1, int((inputs[k] != IGNORED).sum())) for k in (3, 5)]
        lengths = inputs[1].sum(1)
        for rows in micro_batches(lengths, token_budget=token_budget, packed=packed):
            self._fused(tuple(part[rows, : int(lengths[rows].max())] for part in inputs), scales)

    def _fused(self, inputs: Inputs, scales: list[float]) -> None:
        _, attention, ids, labels, decoder_ids, decoder_labels = inputs
        loss = self.model(
            ids,
            attention,
            sizes=self.sizes,
            labels=labels,
            decoder=DecoderInputs(decoder_ids, decoder_labels, scale=scales[1]),
            size_weights=self.weights,
            encoder_scale=scales[0],
        )[0]
        loss.backward()

    def encoder_alone(self, inputs: Inputs) -> None:
        layout = Layout.of_mask(inputs[1])
        states = self.model.encoder.hidden_states(layout.pack(inputs[2]), layout, [size.layers for size in self.sizes])
        torch.stack([state.float().mean() for state in states.values()]).sum().backward()


def batch(lengths: list[int], vocabulary: int) -> Inputs:
    """Random ids of the given lengths with 20 % and 40 % masked; shapes are what costs, not words."""
    generator = torch.Generator().manual_seed(1)
    shape = (len(lengths), max(lengths))
    attention = (torch.arange(shape[1]) < torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(5, vocabulary, shape, generator=generator) * attention
    draw = torch.rand(shape, generator=generator)
    ordinary = attention.bool()
    ordinary[:, 0] = False
    sides: list[torch.Tensor] = []
    for ratio in (0.2, 0.4):
        chosen = ordinary & (draw < ratio)
        sides += [ids.masked_fill(chosen, 4), torch.where(chosen, ids, IGNORED)]
    return ids, attention, *sides


def product_floor(subject: Subject, inputs: Inputs) -> tuple[float, float]:
    """(seconds of the step's matrix products alone, their operations): each shape timed by itself."""
    config = subject.model.encoder.config
    hidden, inner, vocabulary = config.hidden_size, config.intermediate_size, config.vocab_size
    texts, length = inputs[0].shape
    tokens, sizes = texts * length, len(subject.sizes)
    encoder_rows, decoder_rows = (int((inputs[k] != IGNORED).sum()) for k in (3, 5))
    rows = sizes * (encoder_rows + decoder_rows)
    heads = config.num_attention_heads
    products = [  # count, (batch, m, k, n) of the forward product; backward has two of the same operations
        (4 * config.num_hidden_layers, (1, tokens, hidden, hidden)),
        (1 * config.num_hidden_layers, (1, tokens, hidden, inner)),
        (1 * config.num_hidden_layers, (1, tokens, inner, hidden)),
        (1 * config.num_hidden_layers, (texts * heads, length, hidden // heads, length)),
        (1 * config.num_hidden_layers, (texts * heads, length, length, hidden // heads)),
        (2, (1, tokens, hidden, hidden)),  # the decoder's common keys and values
        (1, (1, decoder_rows, hidden, hidden)),  # its queries
        (1, (texts * heads, decoder_rows // texts, hidden // heads, length)),
        (1, (texts * heads, decoder_rows // texts, length, hidden // heads)),
        (2, (1, sizes * decoder_rows, hidden, hidden)),  # its output, and the head
        (1, (1, sizes * decoder_rows, hidden, inner)),
        (1, (1, sizes * decoder_rows, inner, hidden)),
        (1, (1, rows, hidden, vocabulary)),
    ]
    products += [(1, (1, encoder_rows + texts, size.dim, hidden)) for size in subject.sizes]
    seconds = operations = 0.0
    for count, (groups, m, k, n) in products:
        # A large product runs in chunks, as in the fused cross-entropy.
        part = min(m, 2048)
        operations += 3 * count * 2.0 * groups * m * k * n
        for a, b, c in ((part, k, n), (part, n, k), (k, part, n)):  # forward, rows' gradient, weight's gradient
            left, right = torch.randn(groups, a, b), torch.randn(groups, b, c)
            product = (
                (lambda x=left[0], y=right[0]: x @ y) if groups == 1 else (lambda x=left, y=right: torch.bmm(x, y))
            )
            product()
            best = min(_cpu_seconds(product) for _ in range(3))
            seconds += count * best * m / part
    return seconds, operations


def _cpu_seconds(action: Callable[[], object]) -> float:
    begin = time.process_time()
    action()
    return time.process_time() - begin


def peak_memory(way: str, *, quick: bool) -> float:
    """MiB that one 2×512 step takes above the model and its gradients, in a process of its own."""
    arguments = ["--memory-of", way, *(["--quick"] if quick else [])]
    out = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.smae_step", *arguments],
        capture_output=True,
        text=True,
        check=True,
        # Else glibc keeps freed blocks of up to 32 MiB, and the peak tells of its habits instead of live memory.
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**20)},
    )
    return float(out.stdout.split()[-1])


def measure_memory(way: str, *, quick: bool) -> float:
    subject = Subject(quick=quick)
    action = subject.direct if way == "direct" else subject.ours
    for parameter in subject.masked_lm.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for parameter in (*subject.layer.parameters(), *subject.model.decoder.parameters()):
        parameter.grad = torch.zeros_like(parameter)
    action(batch([8, 8], subject.vocabulary))
    before = peak_mib()
    action(batch([512, 512], subject.vocabulary))
    return peak_mib() - before


def real_lengths() -> list[int] | None:
    """Lengths in tokens of real documents, cut at 512; None without the data."""
    folder = SHARED / "text"
    if not folder.is_dir():
        return None
    from transformers import BertTokenizerFast

    tokenizer = BertTokenizerFast(str(SHARED / "vocab" / "bert-base-uncased-vocab.txt"))
    texts = [record["text"] for record in read_documents([str(p) for p in sorted(folder.glob("*.jsonl.gz"))])]
    order = np.random.Generator(np.random.Philox(0)).permutation(len(texts))[:1024]
    encoded = tokenizer.backend_tokenizer.encode_batch([texts[i] for i in order])
    return [min(512, len(item.ids)) for item in encoded]


def padding_share(lengths: list[int], *, batch_size: int, token_budget: int) -> float:
    computed = 0
    for start in range(0, len(lengths) - batch_size + 1, batch_size):
        share = torch.tensor(lengths[start : start + batch_size])
        chunks = micro_batches(share, token_budget=token_budget)
        computed += sum(len(rows) * int(share[rows].max()) for rows in chunks)
    real = sum(lengths[: len(lengths) // batch_size * batch_size])
    return 1.0 - real / computed


def masking_ratios() -> dict[str, float]:
    """32 texts of 512 tokens, words of one to three tokens, one mask of 15 %: whole collators."""
    rng = np.random.Generator(np.random.Philox(1))
    names = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *(f"{'##' if rng.random() < 0.3 else ''}w{i}" for i in range(30517)),
    ]
    continuation = np.array([name.startswith("##") for name in names])
    vocabulary = Vocabulary(len(names), (2,), (3,), 0, 4, (0, 1, 2, 3, 4), continuation)
    documents = rng.integers(5, len(names), (32, 510)).astype(np.uint16)
    samples = [Sample(0, i, 0, i, document) for i, document in enumerate(documents)]
    collate = MaskedCollator(
        vocabulary, max_length=512, encoder_mask_ratio=0.15, decoder_mask_ratio=None, nested=False, seed=0
    )
    texts = [[2, *document.tolist(), 3] for document in documents]
    draw = random.Random(0)

    tokenizer = _tokenizer(names)

    def token_by_token(*, bare: bool) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, labels = [], []
        for text in texts:
            words: list[list[int]] = []
            written = [names[i] if bare else tokenizer.convert_ids_to_tokens(i) for i in text]
            for place, (number, token) in enumerate(zip(text, written)):
                if number in ((0, 1, 2, 3, 4) if bare else tokenizer.all_special_ids):
                    continue
                if words and token.startswith("##"):
                    words[-1].append(place)
                else:
                    words.append([place])
            draw.shuffle(words)
            budget, chosen = round(len(text) * 0.15), set()
            for word in words:
                if len(chosen) + len(word) <= budget:
                    chosen.update(word)
            changed, wanted = list(text), [IGNORED] * len(text)
            for place in range(len(text)):
                if place in chosen:
                    wanted[place] = text[place]
                    action = draw.random()
                    if action < 0.8:
                        changed[place] = 4
                    elif action < 0.9:
                        changed[place] = draw.randrange(5, len(names))
            inputs.append(changed)
            labels.append(wanted)
        return torch.tensor(inputs), torch.tensor(labels)

    collate(samples)
    slow, fast = alternate(partial(token_by_token, bare=False), lambda: collate(samples), 3)
    bare, fast_too = alternate(partial(token_by_token, bare=True), lambda: collate(samples), 20)
    theirs = DataCollatorForLanguageModeling(
        tokenizer, whole_word_mask=True, mlm_probability=0.15, mask_replace_prob=1.0, random_replace_prob=0.0
    )
    offsets = [(0, 0)]
    for name in (names[i] for i in texts[0][1:-1]):
        begin = offsets[-1][1] + (not name.startswith("##"))
        offsets.append((begin, begin + len(name)))
    encoded = [
        {"input_ids": text, "offset_mapping": [*offsets, (0, 0)], "special_tokens_mask": [1, *[0] * 510, 1]}
        for text in texts
    ]
    peer, fast_again = alternate(lambda: theirs(encoded), lambda: collate(samples), 3)
    return {
        "masking_ratio": slow / fast,
        "masking_ratio_bare": bare / fast_too,
        "masking_ratio_transformers": peer / fast_again,
        "collated_a_second": 32 / fast_too,
    }


def _tokenizer(names: list[str]) -> Any:
    core = Tokenizer(WordPiece({name: i for i, name in enumerate(names)}, unk_token="[UNK]"))
    special = dict(pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]", mask_token="[MASK]")
    return PreTrainedTokenizerFast(tokenizer_object=core, **special)


def compiled_time_ratio(subject: Subject) -> float:
    """Of a step as it is and one with a compiled encoder, which the subject has from then on."""
    inputs = batch([128] * 4, subject.vocabulary)
    seconds = []
    for compiled in (False, True):
        if compiled:
            subject.model.encoder.backbone.compile(dynamic=True)
        subject.ours(inputs)
        seconds.append(min(_cpu_seconds(partial(subject.ours, inputs)) for _ in range(3)))
    return seconds[0] / seconds[1]


def on_cuda(figures: Figures) -> None:
    """64 × 512 tokens in bf16: speed of the whole step, MFU, memory of both ways, the profile."""
    subject = Subject(quick=False, dtype=torch.bfloat16, device="cuda")
    inputs = tuple(part.cuda() for part in batch([512] * 64, subject.vocabulary))
    subject.masked_lm.base_model.set_attn_implementation("packed")
    optimizer = adamw(subject.model, lr=1e-4, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)

    def step() -> None:
        subject.ours(inputs)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    for _ in range(10):
        step()
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - begin) / 10
    peak = torch.cuda.max_memory_allocated()
    rows = [int((inputs[k] != IGNORED).sum()) for k in (3, 5)]
    flops = FORWARD_AND_BACKWARD * masked_flops(
        Shape.of(subject.model.encoder.config),
        inputs[1].sum(1).cpu(),
        encoder_rows=rows[0],
        decoder_rows=rows[1],
        sizes=subject.sizes,
    )
    figures.show(
        cuda_tokens_a_second=64 * 512 / seconds,
        cuda_mfu=flops / seconds / peak_flops(torch.device("cuda")),
        cuda_peak_gib=peak / 2**30,
    )
    with torch.profiler.profile() as profile:
        step()
        torch.cuda.synchronize()
    print(profile.key_averages().table(sort_by="self_cuda_time_total", row_limit=10))
    # The direct way holds twelve whole logit tensors: an eighth of the batch, and its memory grows in proportion.
    few = tuple(part[:8] for part in inputs)
    subject.masked_lm.base_model.set_attn_implementation("sdpa")
    subject.direct(few)
    torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    subject.direct(few)
    torch.cuda.synchronize()
    figures.show(
        cuda_direct_tokens_a_second=8 * 512 / (time.perf_counter() - begin),
        cuda_direct_peak_gib_at_8=torch.cuda.max_memory_allocated() / 2**30,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--memory-of", choices=("direct", "ours"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.memory_of:
        print(measure_memory(args.memory_of, quick=args.quick))
        return
    repeats = 1 if args.quick else 2
    figures = Figures()
    subject = Subject(quick=args.quick)
    for name, lengths in (("dense_time_ratio", [128] * 4), ("dense_time_ratio_2x512", [512] * 2)):
        inputs = batch(lengths, subject.vocabulary)
        subject.ours(inputs)
        direct, ours = alternate(partial(subject.direct, inputs), partial(subject.ours, inputs), repeats)
        figures.show(**{name: direct / ours, f"{name}_seconds_ours": ours})
        if name == "dense_time_ratio":
            floor, operations = product_floor(subject, inputs)
            figures.show(floor_ratio=ours / floor, gemm_gflops=operations / floor / 1e9)
            optimizer = adamw(subject.model, lr=1e-4, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
            optimizer.step()
            encoder, update = alternate(partial(subject.encoder_alone, inputs), optimizer.step, repeats)
            whole = ours + update
            figures.show(
                encoder_share=encoder / whole, loss_share=(ours - encoder) / whole, optimizer_share=update / whole
            )
            optimizer.zero_grad()
    lengths = real_lengths()
    if lengths is None:
        print("real lengths: skipped, ../shared/data is absent")
    else:
        figures.show(padding_share=padding_share(lengths, batch_size=128, token_budget=8 * 512))
        budget, inputs = 2 * 512, batch(lengths[: 3 if args.quick else 8], subject.vocabulary)
        padded = partial(subject.ours_by_length, inputs, token_budget=budget)
        direct, ours = alternate(partial(subject.direct, inputs), padded, 1)
        ours_again, packed = alternate(
            padded, partial(subject.ours_by_length, inputs, token_budget=budget, packed=True), 2
        )
        subject.masked_lm.base_model.set_attn_implementation("sdpa")
        figures.show(real_lengths_time_ratio=direct / ours, packed_time_ratio=direct / ours * ours_again / packed)
    if not args.quick:
        figures.show(compiled_time_ratio=compiled_time_ratio(subject))
    del subject
    if (slowdown := bf16_slowdown(torch.device("cpu"))) > 1:
        print(f"bf16: skipped, this CPU takes {slowdown:.0f} times as long for it as for float32")
    else:
        low = Subject(quick=args.quick, dtype=torch.bfloat16)
        inputs = batch([128] * 4, low.vocabulary)
        low.ours(inputs)
        direct, ours = alternate(partial(low.direct, inputs), partial(low.ours, inputs), repeats)
        figures.show(bf16_time_ratio=direct / ours, bf16_seconds_ours=ours)
        del low
    memory = {way: peak_memory(way, quick=args.quick) for way in ("direct", "ours")}
    figures.show(memory_ratio_2x512=memory["ours"] / memory["direct"], memory_mib_ours=memory["ours"])
    figures.show(**masking_ratios())
    if torch.cuda.is_available() and not args.quick:
        on_cuda(figures)
    figures.write(args.json)


if __name__ == "__main__":
    main()

"""Benchmark: vectors of six sizes from one pass, against sentence-transformers run once a size, in turn, one thread.

    python -m tests.benchmarks.encode_sizes [--quick] [--documents N] [--pooling cls|mean] [--json FILE]

The same weights (random, BERT of 12 layers × 192), the same documents (SciFact's, up to 256 tokens), float32, a ladder
of the paper's shape, 2 to 12 layers. Theirs: `SentenceTransformer.encode` of the folders that `trainer.export` writes,
each cut to its size's layers, with as many rows a batch as hold our tokens at the longest length, and with its default
of 32; the faster counts. Vectors are compared first: both compute the same. Figures are CPU seconds:
  throughput_ratio    theirs, each run cut to its size's layers ÷ ours; depth alone allows (2 + 4 + … + 12) / 12 = 3.5
  full_depth_ratio    theirs, one run of the whole model a size with `truncate_dim`, the usual way ÷ ours
  same_batch_*        the same with the rows a batch that hold our tokens
  texts_a_second_*    documents whose six vectors are there, a second
--quick: the same model, 24 documents, once; about two minutes. Fewer documents leave more padding on both sides.
"""

from __future__ import annotations

import argparse
import logging
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import BertTokenizerFast
from transformers.utils import logging as hf_logging

from models.encoder import build_masked_lm, load_encoder
from models.settings import EmbeddingSettings
from models.sizes import Ladder
from tests.benchmarks.support import SHARED, Figures, take_turns
from trainer.evaluation.encoding.encode import DEFAULT_BATCH_TOKENS, embedder_of
from trainer.evaluation.tasks.retrieval import load_beir
from trainer.exporting.sizes import export_sizes

LADDER = Ladder.of([(2, 8), (4, 16), (6, 32), (8, 64), (10, 128), (12, 192)])
QUICK_DOCUMENTS = 24
MAX_LENGTH = 256
THEIR_BATCH = 32  # sentence-transformers' default


def write_model(folder: Path, ladder: Ladder, pooling: str) -> BertTokenizerFast:
    tokenizer = BertTokenizerFast(str(SHARED / "vocab" / "bert-base-uncased-vocab.txt"))
    width = ladder.full.dim
    config = {
        "model_type": "bert",
        "hidden_size": width,
        "num_hidden_layers": ladder.full.layers,
        "num_attention_heads": max(1, width // 64),
        "intermediate_size": 4 * width,
    }
    torch.manual_seed(0)
    build_masked_lm(config, vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    shapes = tuple((size.layers, size.dim) for size in ladder)
    EmbeddingSettings(pooling=pooling, ladder=shapes, passage_max_length=MAX_LENGTH).save(folder)
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--documents", type=int, default=128, metavar="N", help="of SciFact's (%(default)s)")
    parser.add_argument("--pooling", choices=("cls", "mean"), default="cls", help="%(default)s")
    parser.add_argument("--batch-tokens", type=int, default=DEFAULT_BATCH_TOKENS, help="of ours (%(default)s)")
    parser.add_argument("--repeats", type=int, default=2, help="of each timing, the best counts (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    logging.getLogger("sentence_transformers").setLevel(logging.ERROR)
    if not SHARED.is_dir():
        raise SystemExit("this benchmark reads ../shared/data, which is absent")
    from sentence_transformers import SentenceTransformer

    documents = load_beir(SHARED / "retrieval" / "scifact").documents
    count = QUICK_DOCUMENTS if args.quick else args.documents
    texts = [documents[i * len(documents) // count] for i in range(count)]
    figures = Figures()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer = write_model(folder / "model", LADDER, args.pooling)
        folders = export_sizes(folder / "model", folder / "export")
        load = partial(SentenceTransformer, device="cpu")
        peers: list[Any] = [load(str(folders[LADDER.name(size)])) for size in LADDER]
        encode = embedder_of(
            load_encoder(folder / "model"), tokenizer, list(LADDER), device="cpu", batch_tokens=args.batch_tokens
        )

        def ours() -> list[np.ndarray]:
            return list(encode(texts, similarity="cosine", max_length=MAX_LENGTH).values())

        def cut_peers(batch: int) -> list[np.ndarray]:
            return [peer.encode(texts, batch_size=batch, show_progress_bar=False) for peer in peers]

        def full_peers(batch: int) -> list[np.ndarray]:
            run = partial(peers[-1].encode, texts, batch_size=batch, show_progress_bar=False, normalize_embeddings=True)
            return [run(truncate_dim=size.dim) for size in LADDER]

        same = max(1, args.batch_tokens // MAX_LENGTH)
        for mine, theirs in zip(ours(), cut_peers(same)):
            np.testing.assert_allclose(mine, theirs, atol=1e-5)
        batches = sorted({same, THEIR_BATCH})
        actions: dict[str, Callable[[], object]] = {"ours": ours}
        for batch in batches:
            actions |= {f"cut {batch}": partial(cut_peers, batch), f"full {batch}": partial(full_peers, batch)}
        seconds = take_turns(actions, repeats=1 if args.quick else args.repeats)
        own = seconds["ours"]
        cut, full = (min(seconds[f"{kind} {batch}"] for batch in batches) for kind in ("cut", "full"))
        figures.show(texts=float(count), texts_a_second_ours=count / own)
        figures.show(texts_a_second_cut=count / cut, texts_a_second_full=count / full)
        figures.show(
            same_batch_ratio=seconds[f"cut {same}"] / own, same_batch_full_depth_ratio=seconds[f"full {same}"] / own
        )
        figures.show(throughput_ratio=cut / own, full_depth_ratio=full / own)
    figures.write(args.json)


if __name__ == "__main__":
    main()

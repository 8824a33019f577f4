"""The headline figures of every benchmark: which way is better, and how much of a change noise explains.

`HEADLINES` is their one owner. A benchmark prints many figures; these are the ones that a change of the code must not
make worse. Each exists in a full run and in one with --quick. `scaling`, which needs root, and the study
`static_tatoeba` have none: nobody runs them after each change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Headline:
    """A figure, and when a new value of it counts as a change.

    tolerance: 0.1 means that a figure may become 1.1 times as bad before it counts as worse.
    """

    figure: str
    better: Literal["higher", "lower"]
    tolerance: float
    meaning: str


HEADLINES: dict[str, tuple[Headline, ...]] = {
    "checkpoint": (
        Headline("bytes_a_parameter", "lower", 0.01, "bytes of a checkpoint for each trained parameter"),
        Headline("still_share", "lower", 1.0, "time for which training stands still ÷ time of a save"),
    ),
    "contrastive_loss": (
        Headline("gemm_ratio_2048", "lower", 0.15, "our time ÷ the matrix products' alone, 2,048 × 4,096"),
        Headline("naive_time_ratio", "higher", 0.2, "time of whole matrices and autograd ÷ ours"),
        Headline("naive_memory_ratio", "higher", 0.1, "memory of whole matrices and autograd ÷ ours"),
    ),
    "contrastive_terms": (
        Headline("largest_difference", "lower", 3.0, "largest relative difference from the restatement, in float64"),
        Headline("largest_memory_growth", "lower", 0.05, "growth of the memory of terms that are only tiled"),
    ),
    "encode_sizes": (
        Headline("throughput_ratio", "higher", 0.15, "time of a run for each size, cut to its layers ÷ our one pass"),
        Headline("full_depth_ratio", "higher", 0.15, "time of a run of the whole model for each size ÷ our one pass"),
    ),
    "enhanced_decoding": (
        Headline("visibility_ratio", "higher", 0.25, "time of masks made token by token ÷ ours"),
        Headline("enhanced_time_ratio", "lower", 0.15, "time of a step with enhanced decoding ÷ with basic decoding"),
    ),
    "guide": (
        Headline("filter_time_ratio", "lower", 0.2, "time of a step with a guide that filters ÷ without it"),
        Headline("stored_filter_time_ratio", "lower", 0.2, "the same, where the guide's vectors are stored"),
        Headline("memory_ratio", "lower", 0.05, "peak memory of a process with a guide that filters ÷ without it"),
    ),
    "mine_negatives": (
        Headline("scifact_time_ratio", "higher", 0.2, "time of sentence-transformers' mining ÷ ours, long texts"),
        Headline("tatoeba_time_ratio", "higher", 0.2, "the same, short texts"),
        Headline("scifact_peak_ratio", "higher", 0.05, "peak memory of sentence-transformers' mining ÷ ours"),
        Headline("scifact_same", "higher", 0.01, "share of the negatives that both find"),
    ),
    "no_duplicates": (
        Headline(
            "distinct_rate_1024", "higher", 0.25, "samples a second without duplicates ÷ with them, batches of 1,024"
        ),
        Headline("copies_left_1024", "lower", 0.01, "copies of texts that are left, for each 1,000 samples"),
    ),
    "ring": (
        Headline("largest_difference", "lower", 3.0, "largest relative difference from the gather, in float64"),
        Headline("memory_ratio_4_ranks", "lower", 0.1, "a rank's memory for passages and gradients, ring ÷ gather"),
    ),
    "search": (
        Headline("faiss_ratio_100", "higher", 0.2, "time of FAISS' flat index ÷ ours, the best 100"),
        Headline("semantic_ratio_100", "higher", 0.2, "time of `semantic_search` ÷ ours, the best 100"),
        Headline("faiss_same_100", "higher", 0.001, "share of the answers that FAISS gives, too"),
    ),
    "smae_step": (
        Headline("dense_time_ratio", "higher", 0.15, "time of the direct way ÷ ours, 4 × 128 tokens"),
        Headline("floor_ratio", "lower", 0.2, "our time ÷ the matrix products' alone"),
        Headline("memory_ratio_2x512", "lower", 0.05, "our memory ÷ the direct way's, 2 × 512 tokens"),
        Headline("masking_ratio_transformers", "higher", 0.25, "texts a second of our collator ÷ of transformers'"),
    ),
    "srl_step": (
        Headline("time_ratio", "higher", 0.15, "time of sentence-transformers' step ÷ ours, three batches together"),
        Headline("nli_time_ratio", "higher", 0.2, "the same, NLI triplets"),
        Headline("peak_memory_growth", "lower", 0.03, "our peak memory at the larger batch ÷ at the smaller"),
    ),
    "static_embedding": (
        Headline("train_ratio", "higher", 0.15, "time of sentence-transformers' step ÷ ours, batches of 2,048"),
        Headline("encode_ratio", "higher", 0.2, "time of sentence-transformers' encoding ÷ ours"),
        Headline("english_memory_growth", "lower", 0.03, "our peak memory at the larger batch ÷ at the smaller"),
    ),
    "stream": (
        Headline("cpu_ratio_to_parquet", "higher", 0.3, "documents a CPU second, ours ÷ datasets' streaming parquet"),
        Headline("prepare_cpu_ratio_to_datasets_map", "higher", 0.15, "CPU time of `datasets.map` ÷ `data.prepare`"),
        Headline("ours_disk_overhead", "lower", 0.05, "bytes on disk for each byte of token ids, less one"),
    ),
}

"""Draws figures/peers.png from figures.json: the CPU time of other programs divided by ours. Run: `python draw.py`."""

import json
from pathlib import Path

from matplotlib import pyplot

FOLDER = Path(__file__).parent
# What is done, and by whom else: the benchmark and its figure.
RATIOS = {
    "SMAE step, the direct way": ("smae_step", "dense_time_ratio"),
    "SRL step, sentence-transformers": ("srl_step", "time_ratio"),
    "contrastive loss, whole matrices": ("contrastive_loss", "naive_time_ratio"),
    "vectors of all sizes, a model for each": ("encode_sizes", "throughput_ratio"),
    "mining, long texts, sentence-transformers": ("mine_negatives", "scifact_time_ratio"),
    "mining, short texts, sentence-transformers": ("mine_negatives", "tatoeba_time_ratio"),
    "token table, step, sentence-transformers": ("static_embedding", "train_ratio"),
    "token table, encoding, sentence-transformers": ("static_embedding", "encode_ratio"),
    "exact search, FAISS": ("search", "faiss_ratio_100"),
    "exact search, semantic_search": ("search", "semantic_ratio_100"),
    "shards, writing, datasets.map": ("stream", "prepare_cpu_ratio_to_datasets_map"),
    "shards, reading, datasets (parquet)": ("stream", "cpu_ratio_to_parquet"),
    "shards, reading, LitData": ("stream_with_litdata", "cpu_ratio_to_litdata"),
}

figures = json.loads((FOLDER / "figures.json").read_text())
values = {what: figures[benchmark][figure] for what, (benchmark, figure) in RATIOS.items()}
canvas, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
axes.barh(list(values), [value - 1 for value in values.values()], left=1.0, color="#4477aa")
for row, value in enumerate(values.values()):
    axes.annotate(f"{value:.2f}", (max(value, 1.0), row), (4, 0), textcoords="offset points", va="center")
axes.axvline(1.0, color="black", linewidth=1)
axes.set_xscale("log")
axes.set_xlim(0.5, 60)
axes.set_xticks([0.5, 1, 2, 5, 10, 20, 50], ["0.5", "1", "2", "5", "10", "20", "50"])
axes.minorticks_off()
axes.invert_yaxis()
axes.set_xlabel("their CPU time ÷ ours (above 1: ours is faster)")
canvas.savefig(FOLDER / "figures" / "peers.png", dpi=120)

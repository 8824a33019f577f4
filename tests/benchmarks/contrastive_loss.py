"""Benchmark: the contrastive loss of six sizes and its gradients alone, two passages a query, float32, one thread.

    python -m tests.benchmarks.contrastive_loss [--quick] [--json FILE] [--queries N --passages M]

Widths 32, 64, 128, 256, 512, 768, InfoNCE at all, KL from the last to the others. Times are CPU time, the best of a few
taken in turn; memory is the peak of a process of its own, beyond inputs and the gradients handed out.
  gemm_ratio_N           our time ÷ the time of the sizes' matrix products alone (scores, queries' and passages'
                         gradients: three a size) in the same blocks, N queries × 2N passages
                         (gemm_ratio_2048 in every run)
  gemm_ratio_slice       the same for two tiles of the queries of a batch with 131,072 passages (--quick: 16,384)
  gemm_ratio_two_sweeps  for those tiles where memory forces two sweeps, over the four products a size they need
  gemm_ratio_bare_*      the two-sweep time over three products a size; the margin filter's and the moving teacher's
  naive_time_ratio, naive_memory_ratio   whole matrices and autograd ÷ ours, 2,048 queries × 4,096 passages
  memory_mib_N           extra memory of N queries × 16,384 passages; memory_growth: largest ÷ smallest
--queries, --passages: time and memory of this one shape instead. --quick: up to 2,048 × 4,096; about a minute and a
half.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.benchmarks.support import Figures, alternate, peak_mib
from tests.trainer.losses.autograd import multi_size_contrastive
from trainer.losses import tiles
from trainer.losses.row_sums import STATISTICS
from trainer.losses.tiles import Tiling, choose_tiling

WIDTHS = (32, 64, 128, 256, 512, 768)
WEIGHTS = dict(loss_weights=(1 / 6,) * 6, kl_weights=(*(1 / 6,) * 5, 0.0), temperature=0.05)
Side = list[Tensor]


def unit_vectors(rows: int, *, seed: int) -> Side:
    """Unit vectors of each width that want a gradient, made in place: nothing beside them raises the peak."""
    generator = torch.Generator().manual_seed(seed)
    side = [torch.empty(rows, width).normal_(generator=generator) for width in WIDTHS]
    for vectors in side:
        vectors.div_(vectors.norm(dim=1, keepdim=True))
    return [each.requires_grad_() for each in side]


def targets_of(queries: Side, passages: Side) -> Tensor:
    return torch.arange(len(queries[0])) * 2 % len(passages[0])


def ours(queries: Side, passages: Side, **options: object) -> None:
    targets = targets_of(queries, passages)
    loss, *_ = multi_size_contrastive(queries, passages, targets=targets, **WEIGHTS, **options)  # type: ignore[arg-type]
    torch.autograd.grad(loss, queries + passages)


def naive(queries: Side, passages: Side) -> None:
    targets = targets_of(queries, passages)
    scores = [q @ p.T / WEIGHTS["temperature"] for q, p in zip(queries, passages)]
    teacher = scores[-1].detach().log_softmax(1)
    loss = queries[0].new_zeros(())
    for matrix, weight, kl_weight in zip(scores, WEIGHTS["loss_weights"], WEIGHTS["kl_weights"]):  # type: ignore[call-overload]
        loss = loss + weight * F.cross_entropy(matrix, targets)
        if kl_weight:
            loss = loss + kl_weight * F.kl_div(matrix.log_softmax(1), teacher, reduction="batchmean", log_target=True)
    torch.autograd.grad(loss, queries + passages)


def tiling_of(queries: Side, passages: Side, score_memory_mib: float) -> Tiling:
    return choose_tiling(
        len(queries[0]),
        len(passages[0]),
        matrices=2,
        statistics=STATISTICS * len(WIDTHS),
        scores_in_memory=int(score_memory_mib * 2**20) // 4,
        block_scores=tiles.CPU_BLOCK_SCORES,
    )


def products_alone(queries: Side, passages: Side, tiling: Tiling, *, score_products: int = 1) -> Callable[[], None]:
    """The matrix products of the loss and its gradients in its blocks, and nothing else."""
    query_grads, passage_grads = ([torch.zeros_like(each) for each in side] for side in (queries, passages))
    scratch = torch.empty(tiling.queries * tiling.columns)

    @torch.no_grad()
    def run() -> None:
        for start in range(0, len(queries[0]), tiling.queries):
            for q, p, query_grad, passage_grad in zip(queries, passages, query_grads, passage_grads):
                rows = q[start : start + tiling.queries]
                for first in range(0, len(p), tiling.columns):
                    block = p[first : first + tiling.columns]
                    scores = scratch[: len(rows) * len(block)].view(len(rows), len(block))
                    for _ in range(score_products):
                        torch.mm(rows, block.t(), out=scores)
                    query_grad[start : start + tiling.queries].addmm_(scores, block, beta=0 if first == 0 else 1)
                    passage_grad[first : first + tiling.columns].addmm_(scores.t(), rows, beta=0 if start == 0 else 1)

    return run


def gemm_ratios(
    num_queries: int, num_passages: int, *, repeats: int, score_memory_mib: float = 256.0
) -> dict[str, float]:
    """Our seconds, and their ratio to the products' that the tiling needs and to three products a size."""
    queries, passages = unit_vectors(num_queries, seed=1), unit_vectors(num_passages, seed=2)
    tiling = tiling_of(queries, passages, score_memory_mib)
    needed = products_alone(queries, passages, tiling, score_products=1 if tiling.keeps_rows else 2)
    floor, seconds = alternate(needed, lambda: ours(queries, passages, score_memory_mib=score_memory_mib), repeats)
    bare = floor
    if not tiling.keeps_rows:
        usual = tiling_of(queries, passages, 1024.0)
        bare, seconds = alternate(
            products_alone(queries, passages, usual),
            lambda: ours(queries, passages, score_memory_mib=score_memory_mib),
            repeats,
        )
    operations = 6.0 * sum(WIDTHS) * num_queries * num_passages
    return {"ratio": seconds / floor, "bare": seconds / bare, "seconds": seconds, "gflops": operations / bare / 1e9}


def extra_memory(way: str, num_queries: int, num_passages: int) -> tuple[float, float]:
    """(MiB beyond inputs and gradients, wall seconds) of one loss and its gradients, in a process of its own."""
    arguments = ["--memory-of", way, "--queries", str(num_queries), "--passages", str(num_passages)]
    command = [sys.executable, "-m", "tests.benchmarks.contrastive_loss", *arguments]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return float(out[-2]), float(out[-1])


def measure_memory(way: str, num_queries: int, num_passages: int) -> tuple[float, float]:
    action = naive if way == "naive" else ours
    action(unit_vectors(4, seed=1), unit_vectors(8, seed=2))  # what libraries take on first use
    queries, passages = unit_vectors(num_queries, seed=1), unit_vectors(num_passages, seed=2)
    before, begin = peak_mib(), time.perf_counter()
    action(queries, passages)
    seconds = time.perf_counter() - begin
    return peak_mib() - before - (num_queries + num_passages) * sum(WIDTHS) * 4 / 2**20, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--queries", type=int, metavar="N")
    parser.add_argument("--passages", type=int, metavar="M")
    parser.add_argument("--memory-of", choices=("naive", "ours"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if (args.queries is None) != (args.passages is None):
        parser.error("--queries and --passages name one shape: give both")
    torch.set_num_threads(1)
    if args.memory_of:
        print(*measure_memory(args.memory_of, args.queries, args.passages))
        return
    figures = Figures()
    if args.queries:
        memory, seconds = extra_memory("ours", args.queries, args.passages)
        figures.show(extra_memory_mib=memory, seconds=seconds)
    else:
        measure_ladder(figures, quick=args.quick)
    figures.write(args.json)


def measure_ladder(figures: Figures, *, quick: bool) -> None:
    ladder = (512, 2048) if quick else (1024, 2048, 4096, 8192)
    many = 16384 if quick else 131072
    for num_queries in ladder:
        found = gemm_ratios(num_queries, 2 * num_queries, repeats=2 if num_queries > 4096 else 4)
        figures.show(
            **{
                f"gemm_ratio_{num_queries}": found["ratio"],
                f"seconds_{num_queries}": found["seconds"],
                f"gemm_gflops_{num_queries}": found["gflops"],
            }
        )
    # Every tile of the largest batch costs what these do.
    figures.show(gemm_ratio_slice=gemm_ratios(512, many, repeats=2)["ratio"])
    found = gemm_ratios(512, many, repeats=2, score_memory_mib=8.0 if quick else 64.0)
    figures.show(gemm_ratio_two_sweeps=found["ratio"], gemm_ratio_bare_two_sweeps=found["bare"])
    queries, passages = unit_vectors(ladder[1], seed=1), unit_vectors(2 * ladder[1], seed=2)
    floor = products_alone(queries, passages, tiling_of(queries, passages, 256.0))
    for name, options in (("margin", {"false_negative_margin": 0.1}), ("moving_teacher", {"detach_teacher": False})):
        products, seconds = alternate(floor, lambda options=options: ours(queries, passages, **options), 3)
        figures.show(**{f"gemm_ratio_bare_{name}": seconds / products})
    direct, tiled = alternate(lambda: naive(queries, passages), lambda: ours(queries, passages), 3)
    figures.show(naive_time_ratio=direct / tiled)
    memory = {way: extra_memory(way, ladder[1], 2 * ladder[1])[0] for way in ("naive", "ours")}
    figures.show(naive_memory_ratio=memory["naive"] / memory["ours"], naive_memory_mib=memory["naive"])
    extra = {
        num_queries: extra_memory("ours", num_queries, 2 * ladder[-1])[0] for num_queries in (ladder[0], ladder[-1])
    }
    figures.show(**{f"memory_mib_{num_queries}": mib for num_queries, mib in extra.items()})
    figures.show(memory_growth=extra[ladder[-1]] / extra[ladder[0]])


if __name__ == "__main__":
    main()

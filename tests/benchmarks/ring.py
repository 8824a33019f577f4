"""Benchmark: the contrastive loss over ranks by the gather and in a ring (trainer/ring.py), on ranks of this machine.

    python -m tests.benchmarks.ring [--quick] [--queries N] [--json FILE]

InfoNCE at widths 32, 64, 128, 256, 512, 768 and the KL from the last to the others, four passages a query, float32, one
thread a rank; the loss and its gradients alone, no encoder. N queries are divided among 2, 4 and 8 ranks.
  largest_difference    of losses and gradients, relative, in float64, on 2 and 4 ranks, over all terms that
                        tests/trainer/objectives/ring_worker.py has, which the unit tests compare, too
  smallest_control      the same where a chunk is left out of one of the rounds
  memory_mib_*_W        what a rank of W holds at most for passages and their gradients, beyond its own; 1 MiB of
                        scores and what rows remember are included; counted, not sampled
  sent_mib_*_W          what a rank of W sends
  cpu_seconds_*_W, wall_seconds_*_W     of the slowest rank, the best of a few taken in turn, with 256 MiB for scores
  memory_ratio_W, bytes_ratio_W, time_ratio_W, wall_ratio_W     ring ÷ gather; time is CPU time, because ranks share
                        cores where there are more of them; without W, or as memory_ratio_4_ranks, on 4 ranks
--quick: 1,024 queries on 2 and 4 ranks, timed once; less than five minutes. Differences are those of a full run.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from tests.benchmarks.support import Figures
from tests.ranks import run_ranks
from tests.trainer.objectives.ring_worker import batch_of, computed, counted_bytes, infonce_term, terms_of
from tests.trainer.worker import LiveBytes
from trainer.distributed import World, gather_objects, start
from trainer.objectives.infonce_terms import Negatives

WIDTHS = (32, 64, 128, 256, 512, 768)
WAYS = ("gather", "ring")
BLOCKS_MIB = 1.0  # of scores, where memory is counted
KINDS = {
    "memory_ratio": "memory_mib",
    "bytes_ratio": "sent_mib",
    "time_ratio": "cpu_seconds",
    "wall_ratio": "wall_seconds",
}


def measure(world: World, queries: int, repeats: int) -> dict[str, float]:
    """MiB held and sent by the rank with most, and the slowest rank's seconds, by way."""
    batch = batch_of(world.rank, queries // world.size)
    given = 4 * (len(batch.queries) + len(batch.passages)) * sum(WIDTHS)
    found: dict[str, float] = {}

    def compute(way: str, score_memory_mib: float) -> None:
        term = infonce_term(
            negatives=Negatives(masks_known=False),
            kl_weight=1.0,
            in_a_ring=way == "ring",
            score_memory_mib=score_memory_mib,
        )
        computed((term,), batch, world, WIDTHS, torch.float32, guided=False)

    for way in WAYS:
        with LiveBytes() as live, counted_bytes() as sent:
            compute(way, BLOCKS_MIB)
        found[f"memory_mib_{way}"] = max(gather_objects(live.peak - 2 * given)) / 2**20
        found[f"sent_mib_{way}"] = max(gather_objects(sent["bytes"])) / 2**20
    for _ in range(repeats):
        for way in WAYS:
            dist.barrier()
            begin = time.perf_counter(), time.process_time()
            compute(way, 256.0)
            took = time.perf_counter() - begin[0], time.process_time() - begin[1]
            for name, seconds in zip(("wall", "cpu"), took):
                slowest = max(gather_objects(seconds))
                found[f"{name}_seconds_{way}"] = min(slowest, found.get(f"{name}_seconds_{way}", slowest))
    return found


def on_ranks(ranks: int, *arguments: str) -> dict[str, float]:
    """What this module, or another one, writes on so many ranks."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "found.json"
        module = "tests.benchmarks.ring" if arguments else "tests.trainer.objectives.ring_worker"
        run_ranks(module, *arguments, str(output), ranks=ranks)
        return dict(json.loads(output.read_text()))


def be_rank(queries: int, repeats: int, output: Path) -> None:
    torch.set_num_threads(1)
    world = start()
    found = measure(world, queries, repeats)
    if world.is_main:
        output.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="1,024 queries on 2 and 4 ranks, one repeat")
    parser.add_argument("--queries", type=int, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    figures = Figures()
    exact = [on_ranks(ranks) for ranks in (2, 4)]
    cases = terms_of(in_a_ring=True)
    figures.show(
        largest_difference=max(found[case] for found in exact for case in cases),
        smallest_control=min(value for found in exact for name, value in found.items() if name.startswith("without")),
    )
    queries = args.queries or (1024 if args.quick else 8192)
    table = ["ranks  way     MiB a rank  MiB sent  CPU seconds  wall seconds"]
    for ranks in (2, 4) if args.quick else (2, 4, 8):
        found = on_ranks(ranks, "--rank", str(queries), "1" if args.quick else "3")
        for way in WAYS:
            own = [found[f"{kind}_{way}"] for kind in KINDS.values()]
            table.append(f"{ranks:5}  {way:6}  {own[0]:10.1f}  {own[1]:8.1f}  {own[2]:11.2f}  {own[3]:12.2f}")
        figures.show(**{f"{name}_{ranks}": value for name, value in found.items()})
        ratios = {name: found[f"{kind}_ring"] / found[f"{kind}_gather"] for name, kind in KINDS.items()}
        figures.show(**{f"{name}_{ranks}": ratio for name, ratio in ratios.items()})
    on_four = {name: figures.values[f"{name}_4"] for name in KINDS}
    figures.show(memory_ratio_4_ranks=on_four.pop("memory_ratio"), **on_four)
    print("\n".join(table))
    figures.write(args.json)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        be_rank(int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
    else:
        main()

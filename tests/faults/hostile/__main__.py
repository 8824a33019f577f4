"""Command: try every case (see the package's docstring for what they are and how to add some).

python -m tests.faults.hostile [--quick] [--only TEXT] [--json FILE] [--jobs N] [--keep]
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

# These variables are read when libraries are imported; a case's own environment is set in its fork.
os.environ.update(
    OMP_NUM_THREADS="1",
    DS_ACCELERATOR="cpu",
    TOKENIZERS_PARALLELISM="false",
    HF_HUB_OFFLINE="1",
    JE_ARROW_MALLOC_CONF="background_thread:false",  # pyarrow's allocator would start a thread
)

from tests.faults.hostile.assets import make_assets
from tests.faults.hostile.case import Case, load_cases
from tests.faults.hostile.rights import adopt_orphans
from tests.faults.hostile.runner import MUST_BE_0, Result, figures, remove, run_cases

# The commands that cases run, and the modules that they import only when they need them.
_WARM = (
    "data.prepare",
    "trainer.pretrain",
    "trainer.finetune",
    "trainer.resize",
    "trainer.evaluate",
    "trainer.export",
    "trainer.soup",
    "trainer.mine_negatives",
    "trainer.static_init",
    "launch.submit",
    "launch.status",
    "launch.node",
    "launch.doctor",
    "launch.plan",
    "deepspeed",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.ops.op_builder.all_ops",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "setuptools",
    "torch._inductor.compile_fx",
    "transformers.models.auto.tokenization_auto",
    "pyarrow.parquet",
    "pytrec_eval",
    "safetensors.torch",
    "scipy.stats",
    "transformers.models.auto.modeling_auto",
    "transformers.models.bert.modeling_bert",
    "transformers.models.bert.tokenization_bert",
    "aiohttp",
    "fsspec.implementations.http",
    "zstandard",
)


def warm_up() -> None:
    """Import once what every case would import. The imports start no thread, so the process can be forked."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    for module in _WARM:
        importlib.import_module(module)
    import torch

    torch.set_num_threads(1)
    threads = len(list(Path("/proc/self/task").iterdir()))
    assert threads == 1, f"{threads} threads run after the imports; a fork would lose all but one"
    # These objects never change, and freezing them keeps garbage collections in forks from copying their pages.
    gc.collect()
    gc.freeze()


def chosen(cases: list[Case], *, quick: bool, only: str) -> list[Case]:
    return [each for each in cases if only in each.name and (each.quick or not quick)]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.hostile", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the short form: one case or more of each cause")
    parser.add_argument("--only", metavar="TEXT", default="", help="cases whose name holds this, such as prepare/")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the figures and every result")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="cases at a time (%(default)s)")
    parser.add_argument("--keep", action="store_true", help="leave the cases' folders, to look into them")
    args = parser.parse_args()
    began = time.monotonic()
    cases = chosen(load_cases(), quick=args.quick, only=args.only)
    if not cases:
        parser.error(f"no case is named like {args.only!r}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    adopt_orphans()
    folder = Path(tempfile.mkdtemp(prefix="hostile-"))
    # Libraries read HF_HOME when they are imported, so all cases share one.
    os.environ["HF_HOME"] = str(folder / "hf")
    parent = os.getpid()
    try:
        warm_up()
        print(f"{len(cases)} cases in {folder}; warm after {time.monotonic() - began:.0f} s", flush=True)
        assets = make_assets(folder / "assets")
        print(f"assets made after {time.monotonic() - began:.0f} s", flush=True)
        results = run_cases(cases, assets, folder / "c", jobs=args.jobs, keep_folders=args.keep, report=_print)
    finally:
        if os.getpid() == parent and not args.keep:
            remove(folder)
    values = figures(results, seconds=time.monotonic() - began)
    if args.json:
        args.json.write_text(json.dumps(values, indent=2) + "\n")
    for name, value in values.items():
        if name != "results":
            print(f"{name} {value}")
    return 1 if any(values[name] for name in MUST_BE_0) else 0


def _print(result: Result) -> None:
    print(result.line(), flush=True)


if __name__ == "__main__":
    sys.exit(main())

"""A training run without training, for tests of what surrounds one: steps, markers and exit codes are the trainer's.

It is put before the ranks' command as a container would be, and takes the recipe from that command. Ranks agree
through files. What it does besides is said by the environment: STAND_IN_STEP_SECONDS, STAND_IN_EXIT (a code to end with
at once, in the first STAND_IN_EXIT_ATTEMPTS attempts), STAND_IN_SAVE_SECONDS.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import tomllib
from pathlib import Path

flags: list[int] = []
for each in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(each, lambda number, _: flags.append(number))

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
attempt = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
recipe = tomllib.loads(Path(sys.argv[sys.argv.index("--config") + 1]).read_text())
run = Path(recipe["run"]["output"])
latest = run / "checkpoints" / "latest"
sync = run / f"sync-{attempt}"
sync.mkdir(exist_ok=True)


def agree(name: str, value: bool) -> bool:
    (sync / f"{name}-{rank}.tmp").write_text(str(int(value)))
    (sync / f"{name}-{rank}.tmp").rename(sync / f"{name}-{rank}")
    others = [sync / f"{name}-{each}" for each in range(world)]
    while not all(path.exists() for path in others):
        time.sleep(0.01)
    return any(path.read_text() == "1" for path in others)


print(f"rank {rank} of {world}, attempt {attempt}", flush=True)
if attempt < int(os.environ.get("STAND_IN_EXIT_ATTEMPTS", "0")):
    print("error: as asked", flush=True)
    sys.exit(int(os.environ["STAND_IN_EXIT"]))
step = int(latest.read_text()) if latest.exists() else 0
while step < recipe["train"]["steps"]:
    time.sleep(float(os.environ.get("STAND_IN_STEP_SECONDS", "0.05")))
    step += 1
    if rank == 0:
        with (run / "metrics.jsonl").open("a") as log:
            log.write(json.dumps({"step": step, "loss/total": 1 / step}) + "\n")
    if agree(f"step-{step}", bool(flags) or Path(os.environ["BARISTA_STOP_FILE"]).exists()):
        time.sleep(float(os.environ.get("STAND_IN_SAVE_SECONDS", "0")))
        if rank == 0:
            latest.parent.mkdir(exist_ok=True)
            latest.write_text(str(step))
            (run / "STOPPED").write_text(json.dumps({"step": step, "reason": "stop file"}))
        agree("saved", True)
        sys.exit(75)
if rank == 0:
    (run / "DONE").write_text("")

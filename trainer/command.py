"""How commands end: a user's mistake is one sentence and exit code 2, anything else keeps its traceback.

Runs that were asked to stop end with STOPPED_CODE, runs that gave up with GAVE_UP_CODE and one sentence.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
from collections.abc import Callable

from data.errors import DataError
from models.sizes import ModelError
from trainer.config import ConfigError
from trainer.faults import GaveUp
from trainer.stopping import STOPPED_CODE, Stopped

MISTAKE_CODE = 2
GAVE_UP_CODE = 3
USER_MISTAKES = (ConfigError, DataError, ModelError)

# Launchers look at their processes once a second.
_SECONDS_FOR_FIRST_RANK = 5.0


def run_command(main: Callable[[], None]) -> None:
    """Call a command's main; used as the last line of its module."""
    rank = os.environ.get("RANK", "0")
    logging.basicConfig(
        level=logging.INFO if rank == "0" else logging.WARNING,
        format=f"%(asctime)s [rank {rank}] %(message)s",
        datefmt="%H:%M:%S",
        stream=sys.stderr,
    )
    # Libraries that log every request or cache look-up at INFO.
    for name in ("httpx", "filelock", "urllib3", "fsspec", "DeepSpeed"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # Repeated for every engine: DeepSpeed's collectives under their former names.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    try:
        main()
    except USER_MISTAKES as error:
        sys.exit(tell_mistake(error))
    except GaveUp as error:
        if os.environ.get("RANK", "0") == "0":
            os.write(2, f"error: {error}\n".encode())
        sys.exit(GAVE_UP_CODE)
    except Stopped as stopped:
        if os.environ.get("RANK", "0") == "0":
            os.write(2, f"{stopped}\n".encode())
        sys.exit(STOPPED_CODE)
    except KeyboardInterrupt:
        sys.exit(130)


def tell_mistake(error: Exception) -> int:
    """The exit code of a user's mistake, told in one sentence."""
    # A sentence a node: the launcher ends the other ranks while they wait, unless the mistake is theirs alone.
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(_SECONDS_FOR_FIRST_RANK)
    # Written whole, so that the sentences of several ranks do not interleave.
    sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
    sys.stderr.flush()
    return MISTAKE_CODE

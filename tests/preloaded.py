"""What the process that ranks are forked from imports (tests/ranks.py)."""

import gc

# DeepSpeed imports its Muon, and torch's compiler with it, at every start.
import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401

import trainer.evaluate
import trainer.resize  # noqa: F401

# The forked ranks share this memory as long as their collectors do not touch it.
gc.freeze()

"""What the process that ranks are forked from imports (tests/ranks.py)."""

import gc

import deepspeed.runtime.zero.muon.muon_optimizer  # DeepSpeed imports it, and a compiler with it, at every start
import trainer.evaluate
import trainer.resize  # noqa: F401

# The forked ranks share this memory as long as their collectors do not touch it.
gc.freeze()

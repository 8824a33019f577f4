"""What the process that ranks are forked from imports (tests/ranks.py)."""

import gc

import trainer.evaluate
import trainer.resize  # noqa: F401

# The forked ranks share this memory as long as their collectors do not touch it.
gc.freeze()

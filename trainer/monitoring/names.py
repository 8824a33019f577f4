"""The names of the numbers in metrics.jsonl, made and taken apart in one place. Torch-free, like launch/status.py.

    loss, lr, seconds, …              of a logged step, all sizes together
    FAMILY/SIZE                       a loss at one size: encoder/demi, kl/2x32
    evaluation/TASK/METRIC/SIZE       a score; a task's own name may have slashes
    checkpoint/…, fault/…             of a saved checkpoint, of a step that was skipped

A size is called by its name on the ladder, or as LAYERSxDIMENSIONS (models/sizes.py).
"""

from __future__ import annotations

from typing import NamedTuple

EVALUATION, CHECKPOINT, FAULT = "evaluation/", "checkpoint/", "fault/"
_GROUPS = (EVALUATION, CHECKPOINT, FAULT)
# Families of losses whose TensorBoard tag is not "losses/FAMILY".
_TAGS = {"loss": "losses/contrastive", "distill": "losses/distillation"}


class LossName(NamedTuple):
    """A loss at one size."""

    family: str
    size: str

    @property
    def tag(self) -> str:
        """The loss's tag in the size's own TensorBoard run."""
        return _TAGS.get(self.family, f"losses/{self.family}")


class ScoreName(NamedTuple):
    """A score of an evaluation."""

    task: str
    metric: str
    size: str


def loss_of(name: str) -> LossName | None:
    """The family and size of a loss's name; None for other names."""
    family, slash, size = name.partition("/")
    if name.startswith(_GROUPS) or not (family and slash and size) or "/" in size:
        return None
    return LossName(family, size)


def score_of(name: str) -> ScoreName | None:
    """The task, metric and size of a score's name; None for other names."""
    parts = name.removeprefix(EVALUATION).rsplit("/", 2)
    return ScoreName(*parts) if name.startswith(EVALUATION) and len(parts) == 3 else None

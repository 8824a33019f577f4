"""The names in metrics.jsonl and their meanings, made and taken apart in one place. Torch-free, like launch/status.py.

    loss, lr, seconds, …              of a logged step, all sizes together
    FAMILY/SIZE                       a loss at one size: encoder/demi, kl/2x32
    evaluation/TASK/METRIC/SIZE       a score; a task's own name may have slashes
    checkpoint/…, fault/…             of a saved checkpoint, of a step that was skipped

A size is called by its name on the ladder, or as LAYERSxDIMENSIONS, with a third part for narrower feed-forwards
(models/sizes.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

EVALUATION, CHECKPOINT, FAULT = "evaluation/", "checkpoint/", "fault/"
_GROUPS = (EVALUATION, CHECKPOINT, FAULT)
# A logged step: one line. Numbers are means over the steps since the last such line, unless it says otherwise.
STEP: Mapping[str, str] = {
    "step": "The optimizer steps that are finished.",
    "epoch": "The position in the data, in passes over the samples.",
    "samples": "The samples that all ranks have read since the beginning.",
    "loss": "The loss that is trained, over the global batch and all sizes together.",
    "lr": "The learning rate of the last step; AdamW's, where there are two.",
    "muon_lr": 'Muon\'s learning rate of the last step; only with `optim.name = "muon"`.',
    "grad_norm": "The gradient's norm before clipping, in the last step; absent if it is not finite. With Muon, "
    "from ZeRO stage 1 on except in bf16 at stage 1, Muon's orthogonal steps are in it in place of their gradients.",
    "tokens_per_second": "Tokens of all ranks a second, without padding.",
    "mfu": "Model FLOPs utilisation, from 0 to 1: the share of the peak speed in the GPU's data sheet. For a "
    "device that trainer/costs/gpus.py does not list, the peak is that of a large matrix product, timed at the start.",
    "padding_share": "The share of padding in the tokens that were computed.",
    "data_wait_share": "The share of the time that was spent waiting for data.",
    "memory_mib": "Rank 0's memory in MiB: the peak on its GPU, or what the process occupies on a CPU.",
    "seconds": "Seconds a step.",
    "skipped_steps": "The steps skipped since the beginning; their losses are not in the means.",
}
RATES = ("lr", "muon_lr")
# A loss at one size, beside those of a logged step: FAMILY/SIZE.
FAMILIES: Mapping[str, str] = {
    "encoder": "Masked tokens predicted from the encoder's states.",
    "decoder": "Masked tokens predicted by the decoder.",
    "pairs": "The contrastive term beside masked losses (`objective.pairs`).",
    "loss": "The contrastive loss, or that of graded pairs.",
    "kl": "The KL divergence or the margins (`objective.kl`).",
    "asymmetric": "A size's queries against the full size's passages (`objective.asymmetric_weight`).",
    "spread": "The mean squared similarity of different texts (`objective.spread_weight`).",
    "compression": "The distance to the principal components (`objective.compression_weight`).",
    "distill": "All terms of the teacher's vectors together ([teacher]).",
    "vector": "One of several such terms: `teacher.vector_weight`.",
    "similarity": "One of several such terms: `teacher.similarity_weight`.",
    "gram": "One of several such terms: `teacher.gram_weight`.",
    "order": "One of several such terms: `teacher.order_weight`.",
}
# A saved checkpoint: one line, with `step`.
SAVED: Mapping[str, str] = {
    f"{CHECKPOINT}seconds": "Seconds from the beginning of the save until the checkpoint is complete.",
    f"{CHECKPOINT}still_seconds": "Seconds of these in which training stood still.",
    f"{CHECKPOINT}mib": "MiB that all ranks wrote.",
}
# A step that was skipped or that stands out: one line, with `step`.
FAULTY: Mapping[str, str] = {
    "fault": "What is wrong: `non-finite loss`, `non-finite gradient` or `spike`. The first two are skipped.",
    f"{FAULT}loss": "The loss, as text, because JSON has neither NaN nor infinity.",
    f"{FAULT}grad_norm": "The gradient's norm, as text.",
    "by_rank": "Each rank's part of the loss, as text.",
    "samples": "The samples of the global batch, each by its source and its index there.",
}

# How a size that is not on the ladder is called: layers, dimensions, and the fraction of narrower feed-forwards.
_OFF_THE_LADDER = re.compile(r"[1-9][0-9]{0,8}x[1-9][0-9]{0,8}(x0\.[0-9]{0,20}[1-9])?")

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


def is_off_the_ladder(size: str) -> bool:
    """Whether a name is that of a size which is not on the ladder, such as "3x48" or "6x64x0.25"."""
    return _OFF_THE_LADDER.fullmatch(size) is not None

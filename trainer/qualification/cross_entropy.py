"""The fused linear cross-entropy against the product of all rows: value, gradients, and the memory that it saves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from models.fused_linear_cross_entropy import fused_linear_cross_entropy, rows_per_chunk
from trainer.qualification.lines import Asked, Bound, Outcome, judged, not_answered
from trainer.qualification.passes import peak_bytes, relative_error
from trainer.qualification.settings import SEED, Setting

# Against float64. In float32 the order of sums differs; in bf16 logits are rounded to 8 bits, each softmax too, and the
# mean of many rows' losses rounds them away again. (value, gradients)
TOLERANCES = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (5e-3, 2e-2)}
# Where losses are above 87 nats, float32 holds the probabilities with fewer bits, until it takes them for 0.
RARE_VALUE = 1e-3
# The fused form holds the logits of one chunk; the naive one holds those of all rows several times.
MEMORY_RATIO = 0.5
CHUNK_MIB = 64.0


@dataclass(frozen=True)
class Given:
    """rows [R, D], table [V, D], bias [V] or None, targets [R] and row_weights [R]."""

    rows: Tensor
    table: Tensor
    bias: Tensor | None
    targets: Tensor
    row_weights: Tensor

    def to(self, dtype: torch.dtype) -> Given:
        """The same numbers in another type, as leaves of a new graph. The weights of rows stay float32 or above."""
        rows, table = (each.detach().to(dtype).requires_grad_() for each in (self.rows, self.table))
        bias = None if self.bias is None else self.bias.detach().to(dtype).requires_grad_()
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return Given(rows, table, bias, self.targets, self.row_weights.to(wide))

    @property
    def gradients(self) -> list[Tensor]:
        leaves = [self.rows, self.table, *([] if self.bias is None else [self.bias])]
        return [each.grad for each in leaves if each.grad is not None]


Loss = Callable[[Given], Tensor]


def asked(setting: Setting) -> list[Asked]:
    plain, unbiased = partial(given_for, setting), partial(given_for, setting, bias=False)
    rare = partial(given_for, setting, scale=40.0)
    forms = {
        "float32": partial(equality, fused, plain, torch.float32),
        "float32, without a bias": partial(equality, fused, unbiased, torch.float32),
        "float32, losses above 87 nats": partial(equality, fused, rare, torch.float32, of_value=RARE_VALUE),
        "bf16": partial(equality, fused, plain, torch.bfloat16),
    }
    questions = [Asked(f"fused = naive cross-entropy, {name}", answer) for name, answer in forms.items()]
    less = "the fused cross-entropy's peak memory is below the naive one's"
    return [*questions, Asked(less, partial(memory, setting))]


def given_for(setting: Setting, *, bias: bool = True, scale: float = 1.0) -> Given:
    """scale: what all rows are multiplied by; large ones make probabilities that float32 takes for 0."""
    generator = torch.Generator().manual_seed(SEED)
    width, vocabulary = setting.scale.hidden, setting.scale.vocabulary
    count = 2048 if setting.cuda else 256

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).bfloat16().float().to(setting.device)

    rows, table = normal(count, width) * scale, normal(vocabulary, width) / width**0.5
    targets = torch.randint(0, vocabulary, (count,), generator=generator).to(setting.device)
    weights = torch.rand(count, generator=generator).to(setting.device) / count
    return Given(rows, table.bfloat16().float(), normal(vocabulary) if bias else None, targets, weights)


def fused(given: Given, *, chunk_rows: int = 100) -> Tensor:
    return fused_linear_cross_entropy(
        given.rows,
        given.table,
        bias=given.bias,
        targets=given.targets,
        row_weights=given.row_weights,
        chunk_rows=chunk_rows,
    )[0]


def naive(given: Given) -> Tensor:
    logits = F.linear(given.rows, given.table, given.bias)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return (F.cross_entropy(wide, given.targets, reduction="none") * given.row_weights).sum()


def equality(form: Loss, make: Callable[[], Given], dtype: torch.dtype, *, of_value: float | None = None) -> Outcome:
    """A form in `dtype` against the naive one in float64, of the same numbers. of_value: another tolerance."""
    given = make()
    exact, rounded = given.to(torch.float64), given.to(dtype)
    wanted, found = naive(exact), form(rounded)
    wanted.backward()
    found.backward()
    usual, of_gradients = TOLERANCES[dtype]
    errors = [relative_error(f, w) for f, w in zip(rounded.gradients, exact.gradients, strict=True)]
    value = abs(float(found.detach()) / float(wanted.detach()) - 1)
    return judged({"value": Bound(value, most=of_value or usual), "gradients": Bound(max(errors), most=of_gradients)})


def memory(setting: Setting) -> Outcome:
    if not setting.cuda:
        return not_answered("there is no GPU, whose memory could be counted")
    given = given_for(setting)
    chunk = rows_per_chunk(setting.scale.vocabulary, memory_mib=CHUNK_MIB, dtype=torch.bfloat16)
    added = {}
    forms: dict[str, Loss] = {"fused": partial(fused, chunk_rows=chunk), "naive": naive}
    for name, form in forms.items():
        rounded = given.to(torch.bfloat16)
        peak, before = peak_bytes(partial(_forward_and_backward, form, rounded), setting.device)
        added[name] = peak - before
    return judged_memory(added["fused"], added["naive"], MEMORY_RATIO)


def _forward_and_backward(form: Loss, given: Given) -> None:
    form(given).backward()


def judged_memory(ours: float, theirs: float, most: float) -> Outcome:
    """ours, theirs: bytes that a step adds to what was there before."""
    shown = f"{ours / 2**20:.0f} MiB against {theirs / 2**20:.0f} MiB"
    return judged({"ratio": Bound(ours / theirs, most=most)}, more=shown)

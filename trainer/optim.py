"""The optimizers, which parameters each takes, and learning rates as a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from trainer.config.sections import OptimConfig


def parameter_groups(named: Iterable[tuple[str, nn.Parameter]], *, weight_decay: float) -> list[dict]:
    """Two groups: matrices with decay; biases and norms (all that has one dimension) without.

    Call before ZeRO-3 partitions parameters and hides their shapes. A tied parameter is taken once.
    """
    seen: set[int] = set()
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for _, parameter in named:
        if not parameter.requires_grad or id(parameter) in seen:
            continue
        seen.add(id(parameter))
        (decayed if parameter.ndim > 1 else plain).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def adamw(module: nn.Module, *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float):
    """Fused AdamW: as fast on CPU as a compiled one, and without its minute of compiling."""
    groups = parameter_groups(module.named_parameters(), weight_decay=weight_decay)
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)


def hidden_matrices(module: nn.Module) -> list[nn.Parameter]:
    """The trained matrices that take hidden states to hidden states, each once: the parameters for Muon.

    They are all matrices but tables, whose rows belong to tokens, positions or token types. A head's product with the
    vocabulary reads the table of tokens, and so is no matrix of its own. A matrix of one row or column is a vector.

    Call before ZeRO-3 partitions parameters and hides their shapes.
    """
    tables = {
        id(parameter)
        for part in module.modules()
        if isinstance(part, nn.Embedding | nn.EmbeddingBag)
        for parameter in part.parameters()
    }
    return [
        parameter
        for parameter in module.parameters()
        if parameter.requires_grad and parameter.ndim == 2 and min(parameter.shape) > 1 and id(parameter) not in tables
    ]


def optimizer_of(module: nn.Module, optim: OptimConfig) -> torch.optim.Optimizer:
    """The recipe's optimizer of a module's trained parameters. Call before ZeRO-3 partitions parameters."""
    if optim.name == "muon":
        return _muon(module, optim)
    betas = (optim.beta1, optim.beta2)
    return adamw(module, lr=optim.lr, betas=betas, eps=optim.eps, weight_decay=optim.weight_decay)


def _muon(module: nn.Module, optim: OptimConfig) -> torch.optim.Optimizer:
    """DeepSpeed's Muon for the hidden matrices, with fused AdamW for the other parameters.

    `rate` in a group is the group's learning rate as a multiple of AdamW's.
    """
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    class Muon(MuonWithAuxAdam):
        def step(self, closure: Any = None, step_id: Any = None) -> None:
            # DeepSpeed's takes a gradient that is missing for zeros, but a step that is skipped changes nothing.
            if any(p.grad is not None for group in self.param_groups for p in group["params"]):
                super().step(closure, step_id)

    matrices = hidden_matrices(module)
    taken = {id(parameter) for parameter in matrices}
    others = ((name, p) for name, p in module.named_parameters() if id(p) not in taken)
    groups = [
        {
            "params": matrices,
            "use_muon": True,
            "weight_decay": optim.weight_decay,
            "momentum": optim.muon_momentum,
            "rate": optim.muon_lr / optim.lr,
        },
        *({"use_muon": False, **group} for group in parameter_groups(others, weight_decay=optim.weight_decay)),
    ]
    adamw_settings = {"lr": optim.lr, "betas": (optim.beta1, optim.beta2), "eps": optim.eps}
    for group in groups[1:]:
        group |= adamw_settings
    return Muon(groups, torch.optim.AdamW, {**adamw_settings, "fused": True})


def learning_rate(step: int, *, peak: float, total_steps: int, warmup_ratio: float, schedule: str) -> float:
    """The rate of optimizer step `step` (0-based): linear warm-up, then linear or cosine decay to 0, or constant.

    Steps are counted as in transformers' schedulers: the first step of a warm-up has the rate 0, and one has the peak.
    """
    warmup_steps = math.ceil(warmup_ratio * total_steps)
    if step < warmup_steps:
        return peak * step / warmup_steps
    if schedule == "constant":
        return peak
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    if schedule == "linear":
        return peak * max(0.0, 1.0 - progress)
    assert schedule == "cosine", schedule
    return peak * 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))

"""The speeds that launch.plan takes as shares of a data sheet: matrix products, memory, and what the host needs.

The share of a link is measured with all ranks, by trainer/qualification/ranks.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

from trainer.qualification.lines import Asked, Outcome, measured, not_answered
from trainer.qualification.passes import seconds_of, wait_for
from trainer.qualification.settings import Setting

_NO_GPU = "there is no GPU; launch.plan predicts GPUs alone"
# A product of BERT-base's feed-forward, over 16,384 tokens.
_TOKENS, _HIDDEN, _INNER = 16384, 768, 3072
_PRODUCTS = 20
_COPIED_BYTES = 2**30
_LAUNCHES = 2000


def asked(setting: Setting) -> list[Asked]:
    questions = {
        "operations a second of large bf16 products": products,
        "bytes a second through the GPU's memory": memory,
        "seconds that the host needs for a kernel": launches,
        "bytes of the CUDA context": context,
    }
    return [Asked(question, partial(_on_a_gpu, find, setting)) for question, find in questions.items()]


def _on_a_gpu(find: Callable[[torch.device], Outcome], setting: Setting) -> Outcome:
    return find(setting.device) if setting.cuda else not_answered(_NO_GPU)


def products(device: torch.device) -> Outcome:
    left = torch.randn(_TOKENS, _HIDDEN, device=device).bfloat16()
    right = torch.randn(_HIDDEN, _INNER, device=device).bfloat16()

    def several() -> None:  # one alone takes little longer than the host needs to start it
        for _ in range(_PRODUCTS):
            left @ right

    rate = _PRODUCTS * 2 * _TOKENS * _HIDDEN * _INNER / seconds_of(several, device, repeats=5)
    return measured(f"{rate / 1e12:.0f} Tflop/s", {"matrix_flops": rate})


def memory(device: torch.device) -> Outcome:
    source = torch.empty(_COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    rate = 2 * _COPIED_BYTES / seconds_of(lambda: target.copy_(source), device, repeats=10)  # read and written
    return measured(f"{rate / 1e12:.2f} TB/s", {"memory_bytes": rate})


def launches(device: torch.device) -> Outcome:
    """The host's time for small kernels, with autograd, of which the GPU is done sooner than the next one comes."""
    value = torch.zeros(64, device=device, requires_grad=True)
    (value * 1.0).sum().backward()
    wait_for(device)
    begin = time.perf_counter()
    result: torch.Tensor = value
    for _ in range(_LAUNCHES):
        result = result * 1.0
    seconds = (time.perf_counter() - begin) / _LAUNCHES
    wait_for(device)
    return measured(f"{seconds * 1e6:.1f} µs", {"launch_seconds": seconds})


def context(device: torch.device) -> Outcome:
    """What this GPU holds beside PyTorch's tensors and cached blocks; other processes on it count, too."""
    free, total = torch.cuda.mem_get_info(device)
    used = total - free - torch.cuda.memory_reserved(device)
    return measured(f"{used / 2**30:.2f} GiB", {"context_bytes": float(used)})

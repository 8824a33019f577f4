"""A GPU's peak is found by its full product name, because one product's name may contain another's: GH200 and H200."""

from __future__ import annotations

import pytest

from launch.scaling import GPUS
from trainer.costs.gpus import listed_peak_flops


@pytest.mark.parametrize(
    ("device", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("A100-SXM4-40GB", 312),  # as older drivers name it
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 836),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA RTX 6000 Ada Generation", 364),
        ("NVIDIA GeForce RTX 4090", 165),
    ],
)
def test_a_gpu_has_the_peak_of_its_product(device: str, tflops: float) -> None:
    assert listed_peak_flops(device) == tflops * 1e12


@pytest.mark.parametrize(
    "device",
    [
        "NVIDIA A100-SXM4-80GB MIG 3g.40gb",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA H20",
        "NVIDIA L40",
        "Quadro RTX 6000",
        "",
    ],
)
def test_a_product_that_is_not_listed_has_no_peak(device: str) -> None:
    """Its peak is measured in place of looked up; that of a product of a similar name would be wrong."""
    assert listed_peak_flops(device) is None


def test_each_gpu_of_the_plan_has_a_peak() -> None:
    assert {key: sheet.peak_flops for key, sheet in GPUS.items()} == {"a100": 312e12, "h100": 989e12, "h200": 989e12}

"""The peak speed of a GPU, found by the name that its driver reports. Torch-free."""

from __future__ import annotations

# Dense bf16 operations a second with float32 accumulation, from NVIDIA's data sheets of each product, without the
# factor of 2 for sparsity that those print. The figures of B200 and GB200 are a GPU's share of HGX B200 (36 Pflop/s of
# eight, sparse) and of GB200 NVL72 (360 of 72, sparse). That of RTX 6000 Ada is computed: 142 multiprocessors with 512
# multiply-adds a cycle each, at 2.505 GHz. Names are whole ones: a GH200 is no H200, a laptop's RTX 4090 is another
# chip, and a MIG slice has a part of its GPU's peak.
_PEAKS = {
    "A10G": 70e12,
    "A100-PCIE-40GB": 312e12,
    "A100 80GB PCIe": 312e12,
    "A100-SXM4-40GB": 312e12,
    "A100-SXM4-80GB": 312e12,
    "B200": 2250e12,
    "GB200": 2500e12,
    "GH200 120GB": 989e12,
    "GH200 144G HBM3e": 989e12,
    "GH200 480GB": 989e12,
    "GeForce RTX 4090": 165e12,
    "H100 80GB HBM3": 989e12,  # the SXM module
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H200": 989e12,  # the SXM module
    "H200 NVL": 836e12,
    "L40S": 362e12,
    "RTX 6000 Ada Generation": 364e12,
}


def product_name(device: str) -> str:
    """The product's name in the driver's name of a device, which older drivers give without the maker's."""
    return device.removeprefix("NVIDIA ")


def listed_peak_flops(device: str) -> float | None:
    """The maker's figure for a GPU of this name; None where it is not known here."""
    return _PEAKS.get(product_name(device))

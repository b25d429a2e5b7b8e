"""How fast a training runs: tokens per second, and the share of the device's peak that the model's arithmetic is."""

from __future__ import annotations

from typing import Literal

import torch

PEAK_BF16_FLOPS = (
    ("H200 NVL", 836e12), ("H100 NVL", 835e12), ("H100 PCIe", 756e12), ("H200", 989e12), ("H100", 989e12),
    ("A100", 312e12),
)
"""Dense bfloat16 peaks per second by device name, the first match counts (NVIDIA's data sheets)."""


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """The device's dense bfloat16 peak, or None where it is not known."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_BF16_FLOPS if part in name), None)


def model_flops_utilisation(
    tokens_per_second: float, flops_per_token: float, peak: float | None, devices: int
) -> float | Literal["unknown"]:
    """MFU (PaLM, appendix B): model arithmetic per second over the peak of all devices; never a guess."""
    if peak is None:
        return "unknown"
    return tokens_per_second * flops_per_token / (peak * devices)

"""How fast a training runs: tokens per second, and the share of the device's peak that the model's arithmetic is."""

from __future__ import annotations

from typing import Literal

import torch

from gristmill.train.planning.devices import find_device


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """The device's dense bfloat16 peak, or None where it is not known."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return None
    found = find_device(torch.cuda.get_device_name(device))
    return None if found is None else found.flops


def model_flops_utilisation(
    tokens_per_second: float, flops_per_token: float, peak: float | None, devices: int
) -> float | Literal["unknown"]:
    """MFU (PaLM, appendix B): model arithmetic per second over the peak of all devices; never a guess."""
    if peak is None:
        return "unknown"
    return tokens_per_second * flops_per_token / (peak * devices)

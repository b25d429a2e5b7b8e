"""Rotary positions (Su et al. 2021), optionally scaled to longer contexts.

Frequencies follow transformers' modeling_rope_utils, so that its models give the same
logits.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from gristmill.mixtures.schema.model import RopeScaling

Rotary = tuple[Tensor, Tensor]
"""Cosines and sines of positions."""


def frequencies(
    head_width: int, theta: float, scaling: RopeScaling | None, device: torch.device
) -> tuple[Tensor, float]:
    """Radians per position of each channel pair, (head_width / 2,) float32, and the
    factor of cosines and sines.

    Args:
        head_width: channels per head, even.
        theta: base of the frequencies.
        scaling: of the positions; None for plain positions.
        device: of the result.
    """
    exponents = (
        torch.arange(0, head_width, 2, dtype=torch.float32, device=device) / head_width
    )
    plain = 1.0 / theta**exponents
    if scaling is None:
        return plain, 1.0
    if scaling.kind == "linear":
        return plain / scaling.factor, 1.0
    length = float(scaling.original_length or 0)
    if scaling.kind == "llama3":
        # Llama 3.1: scale long wavelengths, keep short ones, and interpolate between
        # them.
        rotations = length * plain / (2 * math.pi)
        low = scaling.low_freq_factor
        kept_share = ((rotations - low) / (scaling.high_freq_factor - low)).clamp(
            0.0, 1.0
        )
        return (1 - kept_share) * plain / scaling.factor + kept_share * plain, 1.0
    # YaRN, section 3.2 of Peng et al. 2023: a linear ramp over channels between those
    # with two numbers of rotations in the original length
    fast_channel, slow_channel = (
        head_width
        * math.log(length / (rotations * 2 * math.pi))
        / (2 * math.log(theta))
        for rotations in (scaling.beta_fast, scaling.beta_slow)
    )
    first = max(math.floor(fast_channel), 0)
    last = min(math.ceil(slow_channel), head_width - 1)
    # Avoids a division by zero.
    width = (last - first) or 0.001
    channels = torch.arange(len(plain), device=device)
    stretched = ((channels - first) / width).clamp(0.0, 1.0)
    warmth = scaling.attention_factor or max(0.1 * math.log(scaling.factor) + 1.0, 1.0)
    return stretched * plain / scaling.factor + (1 - stretched) * plain, warmth


def rotary_table(
    positions: Tensor,
    head_width: int,
    theta: float,
    scaling: RopeScaling | None = None,
    share: float = 1.0,
) -> Rotary:
    """Cosines and sines of the rotary embedding, each half repeated for the rotate-half
    layout.

    Args:
        positions: (..., t) integers.
        head_width: channels per head, even.
        theta: base of the frequencies.
        scaling: of the positions; None for plain positions.
        share: of the channels that are rotated, the first ones of each half.

    Returns:
        two float32 tensors (..., t, head_width).
    """
    rotated_channels = round(head_width * share)
    per_position, warmth = frequencies(
        rotated_channels, theta, scaling, positions.device
    )
    angles = positions.float().unsqueeze(-1) * per_position
    padding = (head_width - rotated_channels) // 2
    cosines = F.pad(angles.cos() * warmth, (0, padding), value=1.0)
    sines = F.pad(angles.sin() * warmth, (0, padding))
    return torch.cat((cosines, cosines), dim=-1), torch.cat((sines, sines), dim=-1)


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate queries or keys (n, h, t, c) by the angles of their positions (broadcast
    over heads).
    """
    first, second = x.chunk(2, dim=-1)
    return x * cosines + torch.cat((-second, first), dim=-1) * sines

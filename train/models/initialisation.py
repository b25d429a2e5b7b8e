"""Initialisation of parameters, seeded by name and thus independent of the other
parameters.
"""

from __future__ import annotations

import math
import re

import torch
from torch import Tensor

from gristmill.core.seeds import seeded_key
from gristmill.mixtures.schema.model import Initialisation
from gristmill.train.models.model_config import Shape

INIT_STD = 0.02
CUT = 3.0
"""Truncation of normal distributions by `llama` and `mitchell`, in standard
deviations.
"""
RESIDUAL_OUTPUTS = ("o_proj.weight", "down_proj.weight", "experts.down_proj")
UP_PROJECTION = ".up_proj.weight"
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
VOCABULARY_TENSORS = (EMBEDDING, HEAD)
"""Tensors with a row per id; the last ids may be padding."""
FINAL_NORM = "model.norm.weight"
LAYERS = "layers."
"""Substring of the names of parameters in layers."""


def generator_of(seed: int, name: str) -> torch.Generator:
    """Random generator of a parameter, seeded by its name."""
    return torch.Generator().manual_seed(seeded_key(seed, name) >> 1)


def initial_tensor(
    name: str,
    size: torch.Size,
    shape: Shape,
    init: Initialisation,
    seed: int,
    mup_base_width: int | None = None,
) -> Tensor:
    """Initial value of a parameter: ones for norms, zeros for biases, matrices by the
    scheme `init` and their names.

    With a base width, standard deviations of matrices in the layers scale with 1 /
    sqrt(width), and the gain of the final norm with 1 / width: the output multiplier of
    muP (Yang & Hu 2021, table 8), stored in the norm so that the model loads without
    muP.
    """
    narrowing = 1.0 if mup_base_width is None else mup_base_width / shape.width
    if len(size) < 2:
        vector = torch.zeros(size) if name.endswith("bias") else torch.ones(size)
        return vector * narrowing if name == FINAL_NORM else vector
    generator = generator_of(seed, name)
    deviation, cut = _deviation(init, name, size, shape)
    if name not in VOCABULARY_TENSORS:
        deviation *= math.sqrt(narrowing)
    if cut is None:
        return torch.empty(size).normal_(0.0, deviation, generator=generator)
    edge = cut * deviation
    return torch.nn.init.trunc_normal_(
        torch.empty(size), 0.0, deviation, -edge, edge, generator=generator
    )


def _deviation(
    init: Initialisation, name: str, size: torch.Size, shape: Shape
) -> tuple[float, float | None]:
    """Standard deviation, and truncation in standard deviations or None."""
    is_residual = name.endswith(RESIDUAL_OUTPUTS)
    layer = re.search(r"layers\.(\d+)\.", name)
    # Layers are counted from 0.
    depth_scale = math.sqrt(2 * (int(layer[1]) + 1)) if layer else 1.0
    width_scale = math.sqrt(shape.width)
    match init:
        case "gpt2":
            # Radford et al. 2019, section 2.3
            return INIT_STD / (
                math.sqrt(2 * shape.layers) if is_residual else 1.0
            ), None
        case "llama":
            # torchtitan, models/llama3, which also scales the up projection by depth.
            # With a tied embedding, logits would start with a deviation of sqrt(width).
            if name == HEAD or (name == EMBEDDING and shape.tied_embeddings):
                return 1 / width_scale, CUT
            if name == EMBEDDING:
                return 1.0, None
            is_scaled = is_residual or name.endswith(UP_PROJECTION)
            return INIT_STD / (depth_scale if is_scaled else 1.0), None
        case "neox":
            # GPT-NeoX, megatron/model/init_functions.py: small_init, and wang_init at
            # residual ends
            if is_residual:
                return 2 / shape.layers / width_scale, None
            return math.sqrt(2 / (5 * shape.width)), None
        case "mitchell":
            # OLMo, olmo/initialization.py; the last dimension is the fan-in.
            fan_in_scale = 1 / math.sqrt(size[-1])
            return fan_in_scale / (depth_scale if is_residual else 1.0), CUT

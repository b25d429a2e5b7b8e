"""Initialisation of parameters, seeded by name and thus independent of the other
parameters.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import torch
from torch import Tensor

from gristmill.core.seeds import seeded_key
from gristmill.mixtures.model import Initialisation
from gristmill.train.models.model_config import Shape

INIT_STD = 0.02
CUT = 3.0
"""Truncation of normal distributions by `llama` and `mitchell`, in standard
deviations.
"""
RESIDUAL_OUTPUTS = (
    "o_proj.weight",
    "down_proj.weight",
    "experts.down_proj",
    "Wo.weight",
)
UP_PROJECTIONS = (".up_proj.weight", ".Wi.weight")
QUERIES = ".q_proj.weight"
"""Scaled down by the root of the head width in an encoder-decoder, which does not scale
scores.

Source: T5's code, mesh_tensorflow/transformer/attention.py.
"""
EMBEDDINGS = ("model.embed_tokens.weight", "model.embeddings.tok_embeddings.weight")
HEADS = ("lm_head.weight", "decoder.weight")
VOCABULARY_TENSORS = (*EMBEDDINGS, *HEADS, "output_bias")
"""Tensors with a row or number per id; the last ids may be padding."""
FINAL_NORM = "model.norm.weight"
LAYERS = "layers."
"""Substring of the names of parameters in layers."""
Deviation = tuple[float, float | None]
"""Standard deviation, and truncation in standard deviations or None."""


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
    scheme `init`.

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
    deviation, cut = SCHEMES[init](name, size, shape)
    if name not in VOCABULARY_TENSORS:
        deviation *= math.sqrt(narrowing)
    if shape.encoder_decoder and name.endswith(QUERIES):
        deviation /= math.sqrt(shape.head_width)
    if cut is None:
        return torch.empty(size).normal_(0.0, deviation, generator=generator)
    edge = cut * deviation
    return torch.nn.init.trunc_normal_(
        torch.empty(size), 0.0, deviation, -edge, edge, generator=generator
    )


def _gpt2(name: str, size: torch.Size, shape: Shape) -> Deviation:
    """Radford et al. 2019, section 2.3."""
    return INIT_STD / (
        math.sqrt(2 * shape.layers) if name.endswith(RESIDUAL_OUTPUTS) else 1.0
    ), None


def _llama(name: str, size: torch.Size, shape: Shape) -> Deviation:
    """torchtitan, models/llama3, which also scales the up projection by depth."""
    if name in HEADS:
        return 1 / math.sqrt(shape.width), CUT
    if name in EMBEDDINGS:
        # With a tied embedding, logits would start with a deviation of sqrt(width).
        return (
            (1 / math.sqrt(shape.width), CUT) if shape.tied_embeddings else (1.0, None)
        )
    return INIT_STD / (
        _depth(name) if name.endswith((*RESIDUAL_OUTPUTS, *UP_PROJECTIONS)) else 1.0
    ), None


def _neox(name: str, size: torch.Size, shape: Shape) -> Deviation:
    """GPT-NeoX, megatron/model/init_functions.py: small_init, and wang_init at residual
    ends.
    """
    if name.endswith(RESIDUAL_OUTPUTS):
        return 2 / shape.layers / math.sqrt(shape.width), None
    return math.sqrt(2 / (5 * shape.width)), None


def _mitchell(name: str, size: torch.Size, shape: Shape) -> Deviation:
    """OLMo, olmo/initialization.py; the last dimension of a matrix is its fan-in."""
    return 1 / math.sqrt(size[-1]) / (
        _depth(name) if name.endswith(RESIDUAL_OUTPUTS) else 1.0
    ), CUT


def _depth(name: str) -> float:
    """sqrt(2 (layer + 1)), with layers counted from 0."""
    match = re.search(r"layers\.(\d+)\.", name)
    return math.sqrt(2 * (int(match[1]) + 1)) if match else 1.0


SCHEMES: dict[Initialisation, Callable[[str, torch.Size, Shape], Deviation]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "neox": _neox,
    "mitchell": _mitchell,
}

"""First values of weights, keyed by their names, so that they depend on nothing else in the model."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import torch
from torch import Tensor

from gristmill.dataprep.seeds import seeded_key
from gristmill.mixtures.model import Initialisation
from gristmill.train.models.shape import Shape

INIT_STD = 0.02
CUT = 3.0
"""Deviations at which `llama` and `mitchell` cut a normal distribution off."""
RESIDUAL_OUTPUTS = ("o_proj.weight", "down_proj.weight", "experts.down_proj", "Wo.weight")
UP_PROJECTIONS = (".up_proj.weight", ".Wi.weight")
QUERIES = ".q_proj.weight"
"""In an encoder-decoder, which does not scale scores, they begin smaller by the root of a head's channels (T5's code,
mesh_tensorflow/transformer/attention.py)."""
EMBEDDINGS = ("model.embed_tokens.weight", "model.embeddings.tok_embeddings.weight")
HEADS = ("lm_head.weight", "decoder.weight")
VOCABULARY_TENSORS = (*EMBEDDINGS, *HEADS, "output_bias")
"""A row, or a number, per id each, the last of which may be padding."""
FINAL_NORM = "model.norm.weight"
LAYERS = "layers."
"""Part of the names of what lies inside the layers."""
Deviation = tuple[float, float | None]
"""Standard deviation, and at how many of them the distribution is cut off, if anywhere."""


def generator_of(seed: int, name: str) -> torch.Generator:
    """What a parameter's first value is drawn with: it depends on no other parameter."""
    return torch.Generator().manual_seed(seeded_key(seed, name) >> 1)


def initial_tensor(
    name: str, size: torch.Size, shape: Shape, init: Initialisation, seed: int, mup_base_width: int | None = None
) -> Tensor:
    """A parameter's first value: ones for norms, zeros for biases, matrices as `mixtures.model.Model.init` says.

    Where there is a base width, the deviations of matrices in the layers go with 1 / sqrt(width), and the gain before
    the output with 1 / width: the output multiplier of muP (Yang & Hu 2021, table 8), which the last norm can hold, so
    that whoever loads the model needs to know nothing of it.
    """
    narrowing = 1.0 if mup_base_width is None else mup_base_width / shape.width
    if len(size) < 2:
        filled = torch.zeros(size) if name.endswith("bias") else torch.ones(size)
        return filled * narrowing if name == FINAL_NORM else filled
    generator = generator_of(seed, name)
    deviation, cut = SCHEMES[init](name, size, shape)
    if name not in VOCABULARY_TENSORS:
        deviation *= math.sqrt(narrowing)
    if shape.encoder_decoder and name.endswith(QUERIES):
        deviation /= math.sqrt(shape.head_width)
    if cut is None:
        return torch.empty(size).normal_(0.0, deviation, generator=generator)
    edge = cut * deviation
    return torch.nn.init.trunc_normal_(torch.empty(size), 0.0, deviation, -edge, edge, generator=generator)


def _gpt2(name: str, size: torch.Size, shape: Shape) -> Deviation:
    """Radford et al. 2019, section 2.3."""
    return INIT_STD / (math.sqrt(2 * shape.layers) if name.endswith(RESIDUAL_OUTPUTS) else 1.0), None


def _llama(name: str, size: torch.Size, shape: Shape) -> Deviation:
    """torchtitan, models/llama3, whose depth scales the up projection too."""
    if name in HEADS:
        return 1 / math.sqrt(shape.width), CUT
    if name in EMBEDDINGS:
        # A tied embedding is the output layer too, whose logits would start with a deviation of sqrt(width).
        return (1 / math.sqrt(shape.width), CUT) if shape.tied_embeddings else (1.0, None)
    return INIT_STD / (_depth(name) if name.endswith((*RESIDUAL_OUTPUTS, *UP_PROJECTIONS)) else 1.0), None


def _neox(name: str, size: torch.Size, shape: Shape) -> Deviation:
    """GPT-NeoX, megatron/model/init_functions.py: small_init, and wang_init at residual ends."""
    if name.endswith(RESIDUAL_OUTPUTS):
        return 2 / shape.layers / math.sqrt(shape.width), None
    return math.sqrt(2 / (5 * shape.width)), None


def _mitchell(name: str, size: torch.Size, shape: Shape) -> Deviation:
    """OLMo, olmo/initialization.py; the last dimension is what a matrix sums over."""
    return 1 / math.sqrt(size[-1]) / (_depth(name) if name.endswith(RESIDUAL_OUTPUTS) else 1.0), CUT


def _depth(name: str) -> float:
    """sqrt(2 (layer + 1)), layers counted from 0."""
    found = re.search(r"layers\.(\d+)\.", name)
    return math.sqrt(2 * (int(found[1]) + 1)) if found else 1.0


SCHEMES: dict[Initialisation, Callable[[str, torch.Size, Shape], Deviation]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "neox": _neox,
    "mitchell": _mitchell,
}

"""What `engine.compute.compile: auto` means for a training."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from typing import Any

from gristmill.mixtures.engine import Compute, Parallel
from gristmill.mixtures.training import Pretrain

COMPILERS = ("cc", "gcc", "clang")
"""Triton compiles its launchers with the first of these, or with what CC names."""


def resolve_compile(compute: Compute, parallel: Parallel, stage: str, config: Mapping[str, Any]) -> Compute:
    """The section with `off`, `block` or `model` in place of `auto`.

    Layers are compiled on NVIDIA GPUs, and of trainings whose every step has rows of one shape: others would compile
    for each shape.

    Args:
        compute, parallel: of `engine`.
        stage: its name.
        config: its settings.
    """
    if compute.compile != "auto":
        return compute
    plain = stage == "pretrain" and parallel.tensor == parallel.pipeline == parallel.context == 1
    chosen = "block" if plain and _has_one_shape(config) and _can_compile() else "off"
    return compute.model_copy(update={"compile": chosen})


def _has_one_shape(config: Mapping[str, Any]) -> bool:
    """Whether a pre-training is of a dense decoder that predicts the next token of rows of one length."""
    section = Pretrain.model_validate({key: value for key, value in config.items() if key in Pretrain.model_fields})
    model = section.model
    several_lengths = bool(section.length_ramp) or any(phase.sequence_length for phase in section.phases)
    is_plain = section.kind == "decoder" and not section.reads_prefixes and section.multi_token is None
    return is_plain and model.own is None and model.moe is None and model.init_from is None and not several_lengths


def _can_compile() -> bool:
    import torch

    has_compiler = "CC" in os.environ or any(map(shutil.which, COMPILERS))
    return torch.cuda.is_available() and torch.version.cuda is not None and has_compiler

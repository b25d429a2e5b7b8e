"""Resolution of `engine.compute.compile: auto`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from typing import Any

from gristmill.mixtures.engine import Compute, Parallel
from gristmill.mixtures.training import Pretrain

COMPILERS = ("cc", "gcc", "clang")
"""C compilers that Triton tries for its launchers, unless CC is set."""


def resolve_compile(
    compute: Compute, parallel: Parallel, stage: str, config: Mapping[str, Any]
) -> Compute:
    """Replace `auto` in the section by `off`, `block` or `model`.

    Layers are compiled on NVIDIA GPUs, and only for trainings with rows of one shape:
    otherwise each shape would be compiled.

    Args:
        compute, parallel: of `engine`.
        stage: name of the stage.
        config: settings of the stage.
    """
    if compute.compile != "auto":
        return compute
    is_plain = (
        stage == "pretrain"
        and parallel.tensor == parallel.pipeline == parallel.context == 1
    )
    compiles = False
    if is_plain and _has_one_shape(config):
        import torch

        has_compiler = "CC" in os.environ or any(map(shutil.which, COMPILERS))
        compiles = has_compiler and torch.cuda.is_available()
        compiles = compiles and torch.version.cuda is not None
    return compute.model_copy(update={"compile": "block" if compiles else "off"})


def _has_one_shape(config: Mapping[str, Any]) -> bool:
    """Return True for next-token pre-training of a dense decoder on rows of one
    length.
    """
    section = Pretrain.model_validate(
        {key: value for key, value in config.items() if key in Pretrain.model_fields}
    )
    model = section.model
    several_lengths = bool(section.length_ramp) or any(
        phase.sequence_length for phase in section.phases
    )
    is_plain = (
        section.kind == "decoder"
        and not section.reads_prefixes
        and section.multi_token is None
    )
    return (
        is_plain
        and model.own is None
        and model.moe is None
        and model.init_from is None
        and not several_lengths
    )

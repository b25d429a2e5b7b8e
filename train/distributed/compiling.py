"""Resolution of `engine.compute.compile: auto`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from typing import Any

from gristmill.mixtures.schema.engine import Compute, Parallel
from gristmill.mixtures.schema.pretrain import Pretrain

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
    compiles = False
    if stage == "pretrain" and parallel.tensor == parallel.context == 1:
        section = Pretrain.model_validate(
            {name: config[name] for name in config if name in Pretrain.model_fields}
        )
        # next-token pre-training of a dense decoder on rows of one length
        compiles = (
            section.kind == "decoder"
            and not section.reads_prefixes
            and section.model.own is None
            and section.model.moe is None
            and section.model.init_from is None
            and not section.length_ramp
            and not any(phase.sequence_length for phase in section.phases)
        )
    if compiles:
        import torch

        has_compiler = "CC" in os.environ or any(map(shutil.which, COMPILERS))
        compiles = has_compiler and torch.cuda.is_available()
        compiles = compiles and torch.version.cuda is not None
    return compute.model_copy(update={"compile": "block" if compiles else "off"})

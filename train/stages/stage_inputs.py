"""Inputs of a training stage: its start model, the mixture, and the length of its
rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from gristmill.core.stage_context import Context
from gristmill.mixtures.manifest import MODELS as MODELS
from gristmill.tokenize.packed import PackedSet

Inputs = Mapping[str, Path]
"""Folders of the stages before, by stage."""
MODEL = "model"
"""Folder of the model in a stage's output."""
EXAMPLE_TOKENS = 1024
"""Longest example if neither its section nor a mixture sets a length: `max_length` of
TRL's SFTConfig and DPOConfig.
"""


def first_model(inputs: Inputs) -> Path:
    """Start model of tuning: the merged one, else the pre-trained one, else the given
    one.
    """
    return (
        inputs[next(name for name in ("merge", "pretrain", "model") if name in inputs)]
        / MODEL
    )


def last_model(inputs: Inputs) -> str:
    """Stage whose model is the last one of the run."""
    return next(name for name in reversed(MODELS) if name in inputs)


def start_of(inputs: Inputs) -> Path:
    """Start model of preference optimisation: the tuned one, else that of tuning."""
    return inputs["sft"] / MODEL if "sft" in inputs else first_model(inputs)


def open_rows(folder: Path, context: Context) -> closing[PackedSet]:
    """Packed set, read as the stage reads its rows; closed at the end of its block."""
    return closing(PackedSet(folder, context.training.stream, context.warn))


def example_length(asked: int | None, inputs: Inputs) -> int:
    """Tokens per row of examples: the configured length, else the mixture's, else the
    model's context up to EXAMPLE_TOKENS.
    """
    if asked is not None:
        return asked
    if "mix" in inputs:
        return PackedSet(inputs["mix"]).sequence_length
    # rows of a mixture's length need no torch
    from gristmill.train.models.weights import read_shape

    return min(read_shape(first_model(inputs)).sequence_length, EXAMPLE_TOKENS)

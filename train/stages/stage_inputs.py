"""What a training stage is given: the model that it starts from, the mixture, and how long its rows are."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path

from gristmill.dataprep.context import Context
from gristmill.mixtures.manifest import MODELS as MODELS
from gristmill.tokenize.packed import PackedSet

MODEL = "model"
"""The folder of a stage's output that holds its model."""
EXAMPLE_TOKENS = 1024
"""Longest example where neither its section nor a mixture says how long: `max_length` of TRL's SFTConfig and
DPOConfig."""


def first_model(inputs: Mapping[str, Path]) -> Path:
    """The model that a tuning starts from: the merged one, or else the pre-trained one, or the one that was given."""
    return inputs[next(name for name in ("merge", "pretrain", "model") if name in inputs)] / MODEL


def start_of(inputs: Mapping[str, Path]) -> Path:
    """The model that preference optimisation starts from: the tuned one, or else the first one."""
    return inputs["sft"] / MODEL if "sft" in inputs else first_model(inputs)


def open_mixture(inputs: Mapping[str, Path], context: Context) -> AbstractContextManager[PackedSet | None]:
    """The mixture, whose held-out rows a training measures; None where a run has none."""
    return open_rows(inputs["mix"], context) if "mix" in inputs else nullcontext(None)


def open_rows(folder: Path, context: Context) -> closing[PackedSet]:
    """A packed set, read as the stage reads its rows; closed where its block ends."""
    return closing(PackedSet(folder, context.stream, context.warn))


def example_length(asked: int | None, inputs: Mapping[str, Path]) -> int:
    """Tokens per row of examples: what is asked for, else the mixture's, else the model's context up to EXAMPLE_TOKENS."""
    if asked is not None:
        return asked
    if "mix" in inputs:
        return PackedSet(inputs["mix"]).sequence_length
    from gristmill.train.models.weights import read_shape  # here: who makes rows of a mixture's length needs no torch

    return min(read_shape(first_model(inputs)).sequence_length, EXAMPLE_TOKENS)

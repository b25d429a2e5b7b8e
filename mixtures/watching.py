"""The sections `engine.wandb` and `engine.profile`: how a training is watched. Nothing here changes a result."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from gristmill.mixtures.section import Positive, Section


class Wandb(Section):
    """Weights & Biases beside metrics.jsonl and TensorBoard (extra `wandb`)."""

    project: Annotated[str, Field(min_length=1)]
    """Where the run appears."""
    name: str | None = None
    """What the run is called; Weights & Biases makes up a name if absent."""
    mode: Literal["online", "offline"] = "online"
    """`offline` writes to the stage's working folder, for `wandb sync`."""


class Profile(Section):
    """A trace of some steps by PyTorch's profiler, in the stage's working folder: `profile/rank-0.json.gz`."""

    first_step: Positive = 10
    """The first step that is traced, counted from 1; the very first ones are not like the others."""
    steps: Positive = 3
    """How many are traced."""
    memory: bool = False
    """On a GPU, record every allocation of these steps too: `profile/rank-0-memory.pickle`, for pytorch.org/memory_viz.
    """

"""The sections `evaluate` and `export`: what is measured and handed on."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from gristmill.mixtures.section import Positive, Section


class Evaluate(Section):
    """Measurements on held-out data, and samples."""

    prompts: tuple[str, ...] = ("The", "def", "Return")
    """Continued by the pre-trained model, and asked of the tuned ones."""
    max_new_tokens: Positive = 48
    """Longest continuation."""
    temperature: Annotated[float, Field(ge=0.0)] = 0.8
    """Of sampling; 0 takes the likeliest token."""
    seed: int | None = None
    """Of initialisation and order; the manifest's if absent."""


class Export(Section):
    """The folder that transformers loads."""

    dtype: Literal["fp32", "bf16"] = "fp32"
    """Of the exported weights."""

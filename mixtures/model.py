"""The section `model`: the shape of the decoder."""

from __future__ import annotations

from pydantic import model_validator

from gristmill.mixtures.section import Positive, PositiveFloat, Section


class Model(Section):
    """A Llama-style decoder."""

    layers: Positive = 4
    """Decoder blocks."""
    width: Positive = 128
    """Of the residual stream."""
    heads: Positive = 4
    """Query heads."""
    kv_heads: Positive | None = None
    """Key and value heads (grouped-query attention); as many as `heads` if absent."""
    ffn_width: Positive | None = None
    """Width of the SwiGLU layer; 8/3 of `width`, rounded up to a multiple of 64, if absent."""
    rope_theta: PositiveFloat = 10_000.0
    """Base of the rotary position embedding."""
    norm_eps: PositiveFloat = 1e-5
    """Of RMSNorm."""
    tied_embeddings: bool = True
    """Use the input embedding as output layer too."""

    @model_validator(mode="after")
    def _divisible(self) -> Model:
        if self.width % self.heads or (self.width // self.heads) % 2:
            raise ValueError(f"width {self.width} must be an even multiple of heads {self.heads}")
        if self.kv_heads is not None and self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} must be a multiple of kv_heads {self.kv_heads}")
        return self

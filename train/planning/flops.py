"""Arithmetic of a training."""

from __future__ import annotations

from dataclasses import dataclass

from gristmill.train.models.model_config import AnyShape, Shape


@dataclass(frozen=True)
class Flops:
    """Floating-point operations per token, forward and backward.

    Attributes:
        six_n: 6 N, with all N parameters.
        matrices: 6 per weight that multiplies a token; the embedding is looked up, not
            multiplied.
        attention: scores and their use, for the full square of positions.
        causal_attention: only the part below a causal mask, half of it and the
            diagonal.
    """

    six_n: float
    matrices: float
    attention: float
    causal_attention: float

    @property
    def whole(self) -> float:
        """Total as counted by the PaLM paper (appendix B), torchtitan and most reports
        of MFU.
        """
        return self.matrices + self.attention

    @property
    def causal(self) -> float:
        """Total that must be computed."""
        return self.matrices + self.causal_attention


def flops_per_token(shape: AnyShape, length: int) -> Flops:
    """Count a model's arithmetic per token in rows of `length` tokens.

    Padding rows of the vocabulary are not counted.
    """
    padding = 0.0
    if isinstance(shape, Shape):
        padding = (shape.padded_vocab_size - shape.vocab_size) * shape.width
    matrices = 6 * (shape.matrix_parameters - padding)
    attention = shape.flops_per_token(length) - 6 * shape.matrix_parameters
    share = (length + 1) / (2 * length) if shape.kind == "decoder" else 1.0
    return Flops(
        6.0 * shape.parameters, float(matrices), float(attention), attention * share
    )

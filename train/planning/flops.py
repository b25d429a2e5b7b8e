"""Arithmetic of a training, and compute-optimal sizes for it.

N: parameters; D: training tokens; C: floating-point operations.
"""

from __future__ import annotations

from dataclasses import dataclass

from gristmill.mixtures.scaling.size_rules import TOKENS_PER_PARAMETER
from gristmill.train.models.model_config import DECODED, Shape

PETAFLOP_DAY = 1e15 * 24 * 3600
KAPLAN_SIZE, KAPLAN_SIZE_POWER = 1.3e9, 0.73
KAPLAN_TOKENS, KAPLAN_TOKENS_POWER = 2e10, 0.27
"""Kaplan et al. 2020, table 6: N = 1.3e9 C^0.73 without embeddings, D = 2e10 C^0.27, C
in petaflop-days.
"""


@dataclass(frozen=True)
class Law:
    """Loss in nats per token as E + A / N^alpha + B / D^beta."""

    source: str
    E: float
    A: float
    B: float
    alpha: float
    beta: float

    def loss(self, parameters: float, tokens: float) -> float:
        """Loss predicted by the law for a model of N parameters after D tokens of its
        authors' text.
        """
        return self.E + self.A / parameters**self.alpha + self.B / tokens**self.beta

    def optimum(self, flops: float) -> tuple[float, float]:
        """(N, D) of least loss with 6 N D = C (Hoffmann et al. 2022, equation 4)."""
        ratio = (self.alpha * self.A / (self.beta * self.B)) ** (
            1 / (self.alpha + self.beta)
        )
        parameters = ratio * (flops / 6) ** (self.beta / (self.alpha + self.beta))
        return parameters, flops / (6 * parameters)


CHINCHILLA = Law("Hoffmann et al. 2022, approach 3", 1.69, 406.4, 410.7, 0.34, 0.28)
REPLICATION = Law("Besiroglu et al. 2024", 1.8172, 482.01, 2085.43, 0.3478, 0.3658)
"""Refit to the same runs, which agrees with Hoffmann's other two approaches."""


def kaplan_optimum(flops: float) -> tuple[float, float]:
    """(N without embeddings, D) by Kaplan et al. 2020."""
    days = flops / PETAFLOP_DAY
    return (
        KAPLAN_SIZE * days**KAPLAN_SIZE_POWER,
        KAPLAN_TOKENS * days**KAPLAN_TOKENS_POWER,
    )


def chinchilla_optimum(flops: float) -> tuple[float, float]:
    """(N, D) with 20 tokens per parameter and 6 N D = C."""
    parameters = (flops / (6 * TOKENS_PER_PARAMETER)) ** 0.5
    return parameters, TOKENS_PER_PARAMETER * parameters


@dataclass(frozen=True)
class Flops:
    """Floating-point operations per token, forward and backward.

    Attributes:
        six_n: 6 N D's 6 N, with all parameters.
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


def flops_per_token(shape: Shape, length: int) -> Flops:
    """Count a decoder's arithmetic per token in rows of `length` tokens.

    Padding rows of the vocabulary are not counted.
    """
    padding = (
        (shape.padded_vocab_size - shape.vocab_size)
        * shape.width
        * (DECODED if shape.encoder_decoder else 1 + shape.multi_token)
    )
    matrices = 6 * (shape.matrix_parameters - padding)
    attention = shape.flops_per_token(length) - 6 * shape.matrix_parameters
    share = (length + 1) / (2 * length) if shape.kind == "decoder" else 1.0
    return Flops(
        6.0 * shape.parameters, float(matrices), float(attention), attention * share
    )

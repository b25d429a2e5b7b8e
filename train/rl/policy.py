"""Policy outputs for answers: log-probabilities, entropy, and divergence from a
teacher.

Probabilities are those at the sampling temperature. All log-probabilities that are
compared come from this forward pass, also those of the sampling policy: the sampling
engine has a cache, other shapes and possibly merged adapters, and its rounding
differences would appear in the surrogate's ratio as changes of the policy. So the ratio
in the first update of a batch is exactly 1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from gristmill.train.distributed.fsdp import evaluating
from gristmill.train.models.transformer import logits_head
from gristmill.train.objectives.distillation import generalised_jsd
from gristmill.train.objectives.losses import Output, Values, of_logits
from gristmill.train.rl.rollout import Part


class Opinion(NamedTuple):
    """Policy outputs for n answers of r tokens: log-probabilities and divergences with
    gradients, entropy without; (n, r) float32. Entries without a token are 0.
    """

    logps: Tensor
    entropies: Tensor
    divergences: Tensor


def opinion_of(
    model: nn.Module,
    part: Part,
    temperature: float,
    teacher: Tensor | None = None,
    beta: float = 0.0,
) -> Opinion:
    """Run a model, sharded or not, on prompts and answers.

    Args:
        model: the policy.
        part: the answers.
        temperature: divides logits.
        teacher: (m, v) float32, see `answer_distributions`; divergences are 0 without
            it.
        beta: see `distillation.generalised_jsd`.
    """

    def head(hidden: Tensor, matrix: Output) -> Opinion:
        tokens = part.tokens[part.mask]

        def opinion_of_chunk(logits: Tensor, chunk: slice) -> Values:
            scores = (logits / temperature).log_softmax(dim=-1)
            with torch.no_grad():
                entropies = -(scores.exp() * scores).sum(dim=-1)
            return (
                scores.gather(1, tokens[chunk, None]).squeeze(1),
                entropies,
                torch.zeros_like(entropies)
                if teacher is None
                else generalised_jsd(teacher[chunk], scores, beta),
            )

        empty = torch.zeros(part.mask.shape, device=hidden.device)
        values = of_logits(part.predicting(hidden), matrix, opinion_of_chunk)
        return Opinion(*(empty.masked_scatter(part.mask, column) for column in values))

    return model(part.ids, head)


def answer_distributions(model: nn.Module, part: Part, temperature: float) -> Tensor:
    """Log-probabilities (m, v) float32 of all ids at the m sampled tokens of answers,
    row by row, without gradients.
    """

    def head(hidden: Tensor, matrix: Output) -> Tensor:
        logits = logits_head(part.predicting(hidden), matrix)
        return (logits / temperature).log_softmax(dim=-1)

    with evaluating(model):
        return model(part.ids, head)

"""Policy outputs for answers: log-probabilities and entropy.

Probabilities are those at the sampling temperature. All log-probabilities that are
compared come from this forward pass, also those of the sampling policy: the sampling
engine has a cache, other shapes and possibly merged adapters, and its rounding
differences would appear in the surrogate's ratio as changes of the policy. So the ratio
in the first update of a batch is exactly 1.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gristmill.train.loop.batch_plan import slices
from gristmill.train.objectives.losses import chunk_rows
from gristmill.train.rl.rollout import Part


class Opinion(NamedTuple):
    """Policy outputs for n answers of r tokens: log-probabilities with gradients,
    entropy without; (n, r) float32. Entries without a token are 0.
    """

    logps: Tensor
    entropies: Tensor


def opinion_of(model: nn.Module, part: Part, temperature: float) -> Opinion:
    """Run a model, sharded or not, on prompts and answers."""

    def head(hidden: Tensor, matrix: Tensor) -> Opinion:
        rows = torch.arange(len(part.mask), device=hidden.device)[:, None].expand_as(
            part.mask
        )[part.mask]
        chosen = hidden[rows, part.columns[part.mask]]
        logps, entropies = token_logps(
            chosen, matrix, part.tokens[part.mask], temperature
        )

        def on_answers(values: Tensor) -> Tensor:
            return torch.zeros(part.mask.shape, device=hidden.device).masked_scatter(
                part.mask, values
            )

        return Opinion(on_answers(logps), on_answers(entropies))

    return model(part.ids, head)


def token_logps(
    hidden: Tensor, matrix: Tensor, tokens: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-probability of each token, and the entropy (without gradient) of its
    distribution; both (m,) float32.

    The logits of all tokens never exist at once: the backward pass recomputes each
    chunk.

    Args:
        hidden: (m, d) hidden states that predict the tokens.
        matrix: (v, d), the output matrix.
        tokens: (m,) int64.
        temperature: divides logits.
    """
    parts = [
        checkpoint(
            _chunk_logps,
            hidden[part],
            matrix,
            tokens[part],
            temperature,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        for part in slices(len(hidden), chunk_rows(matrix))
    ]
    logps, entropies = (torch.cat(column) for column in zip(*parts, strict=True))
    return logps, entropies


def _chunk_logps(
    hidden: Tensor, matrix: Tensor, tokens: Tensor, temperature: float
) -> tuple[Any, Any]:
    scores = (F.linear(hidden, matrix).float() / temperature).log_softmax(dim=-1)
    with torch.no_grad():
        entropies = -(scores.exp() * scores).sum(dim=-1)
    return scores.gather(1, tokens[:, None]).squeeze(1), entropies

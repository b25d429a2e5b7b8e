"""Log-likelihoods of ids after others under a model.

Batches are sorted by length and right-padded, out of sight of causal attention;
softmaxes are computed in float32, sums in float64. The score of a request depends only
on the request, up to rounding with another padded length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from gristmill.train.distributed.fsdp import evaluating
from gristmill.train.distributed.process_groups import World, sum_over_ranks
from gristmill.train.models.transformer import Llama
from gristmill.train.objectives.losses import IGNORED, score_tokens

TOKENS_PER_FORWARD = 8192


@dataclass(frozen=True)
class Request:
    """Ids to score after a context.

    Attributes:
        context: at least one id.
        scored: ids to score.
    """

    context: tuple[int, ...]
    scored: tuple[int, ...]


@dataclass(frozen=True)
class Score:
    """Score of a request.

    Attributes:
        logp: sum of the natural logarithms.
        greedy: True if every scored id was the likeliest.
        tokens: number of scored ids.
    """

    logp: float
    greedy: bool
    tokens: int


def score_requests(
    model: Llama, requests: Sequence[Request], world: World | None = None
) -> list[Score]:
    """Score requests, on all ranks together where the model is sharded.

    Args:
        model: predicts ids.
        requests: contexts are cut from the left where both together exceed the
            model's length + 1 ids.
        world: the processes; None for a model that is whole in this one. All of them
            get all scores.
    """
    length = model.shape.sequence_length
    device = next(model.parameters()).device
    rows = [
        (
            (*request.context, *request.scored)[-(length + 1) :],
            min(len(request.scored), length),
        )
        for request in requests
    ]
    order = sorted(
        (number for number, (_, scored) in enumerate(rows) if scored),
        key=lambda k: -len(rows[k][0]),
    )
    batches = []
    start = 0
    while start < len(order):  # the longest row comes first
        count = max(1, TOKENS_PER_FORWARD // len(rows[order[start]][0]))
        batches.append(order[start : start + count])
        start += count
    rank, size = (0, 1) if world is None else (world.data_rank, world.data_size)
    log_scores = torch.zeros(len(rows), 2, dtype=torch.float64, device=device)
    with torch.no_grad() if world is None else evaluating(model):
        for first in range(0, len(batches), size):
            # A rank without a batch of its own still takes part in the collectives of
            # the forward pass.
            mine = first + rank < len(batches)
            batch = batches[first + rank if mine else first]
            scored = _score(model, [rows[number] for number in batch], device)
            log_scores[batch] = scored if mine else 0.0
    if world is not None:
        log_scores = sum_over_ranks(log_scores, world)
    return [
        Score(logp, not scored or bool(greedy), scored)
        for (logp, greedy), (_, scored) in zip(log_scores.tolist(), rows, strict=True)
    ]


def _score(
    model: Llama, rows: list[tuple[Sequence[int], int]], device: torch.device
) -> Tensor:
    """Sum of the logarithms, and whether all ids were the likeliest: (n, 2) float64."""
    tokens = [torch.tensor(row) for row, _ in rows]
    ids = pad_sequence([row[:-1] for row in tokens], True)
    targets = pad_sequence(
        [
            F.pad(row[-scored:], (len(row) - 1 - scored, 0), value=IGNORED)
            for row, (_, scored) in zip(tokens, rows, strict=True)
        ],
        True,
        padding_value=IGNORED,
    )
    beside = {}
    if model.shape.prefix_lm:
        contexts = torch.tensor([[len(row) - scored] for row, scored in rows])
        beside["prefix"] = (torch.arange(ids.shape[1]) < contexts).to(device)
    nll, correct = model(
        ids.to(device), partial(score_tokens, targets=targets.to(device)), **beside
    )
    counted = (targets != IGNORED).to(device)
    return torch.stack(
        [
            -(nll.double() * counted).sum(dim=1),
            (correct | ~counted).all(dim=1).double(),
        ],
        dim=1,
    )

"""A decoder that also predicts tokens further ahead (DeepSeek-AI 2024, "DeepSeek-V3", section 2.2).

Each further depth is a module of one block behind the one before it: from what that knows at a place, and from the
embedding of the token that it predicted, it predicts the token after. Embedding and output matrix are the decoder's
own. Gloeckle et al. 2024 predict all of them from the same hidden states at once; here the causal chain is kept. The
decoder itself computes what it computes without them, so that they are dropped when it has been trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gristmill.train.models.attention import Visible, document_numbers
from gristmill.train.models.llama import Block, Cache, Head, Llama, RMSNorm, logits_head
from gristmill.train.models.shape import Shape
from gristmill.train.objectives.losses import IGNORED

FURTHER = "further_layers."
"""What the names of their parameters begin with."""


class FurtherToken(nn.Module):
    """One depth (equations 21 and 22)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.hidden_norm = RMSNorm(shape.width, shape.norm_eps)
        self.embedding_norm = RMSNorm(shape.width, shape.norm_eps)
        self.projection = nn.Linear(2 * shape.width, shape.width, bias=False)
        self.block = Block(shape)
        self.norm = RMSNorm(shape.width, shape.norm_eps)

    def forward(
        self, hidden: Tensor, embedded: Tensor, rotary: tuple[Tensor, Tensor], visible: Visible
    ) -> tuple[Tensor, Tensor]:
        """What the depth before knows, and the embeddings of the tokens that it predicts, (n, t, d) each -> what this
        one knows, plain for the next and normalised for a head.
        """
        joined = torch.cat((self.hidden_norm(hidden), self.embedding_norm(embedded)), dim=-1)
        hidden = self.block(self.projection(joined), rotary, visible)
        return hidden, self.norm(hidden)


class MultiTokenLlama(Llama):
    """A decoder with `shape.multi_token` further depths."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.further_layers = nn.ModuleList(FurtherToken(shape) for _ in range(shape.multi_token))

    def forward(
        self,
        ids: Tensor,
        head: Head = logits_head,
        cache: Cache | None = None,
        positions: Tensor | None = None,
        trained: Tensor | None = None,
        prefix: Tensor | None = None,
        further: Sequence[Head] = (),
    ) -> Any:
        """What `head` makes of the decoder's hidden states; with `further`, a list of that and of what each of these
        makes of those of its depth. See llama.Llama.forward.
        """
        if not further:
            return super().forward(ids, head, cache, positions, trained, prefix)
        ids, rotary, visible = self.laid_out(ids, None, positions)
        hidden = self.model(ids, rotary, visible, trained, None)
        hidden, matrix = self.gathered(hidden)
        found = [head(hidden, matrix)]
        for depth, (module, one) in enumerate(zip(self.further_layers, further, strict=True), start=1):
            embedded = self.model.embed_tokens(F.pad(ids[:, depth:], (0, depth)))
            hidden, normalised = module(hidden, embedded, rotary, visible)
            found.append(one(normalised, matrix))
        return found


def further_targets(targets: Tensor, positions: Tensor | None, heads: int) -> list[Tensor]:
    """What each depth is to predict, (n, t) int64 each.

    Depth k has read the k tokens behind a place, and predicts the one after: what the decoder itself predicts k places
    on, where that place belongs to the same document.

    Args:
        targets: (n, t) of the decoder itself.
        positions: (n, t) in their documents, where tokens see these only; None where they see whole rows.
        heads: depths.

    >>> [one.tolist() for one in further_targets(torch.tensor([[6, 7, 8, IGNORED]]), None, 2)]
    [[[7, 8, -100, -100]], [[8, -100, -100, -100]]]
    """
    numbers = None if positions is None or not heads else document_numbers(positions)
    found = []
    for depth in range(1, heads + 1):
        ahead = F.pad(targets[:, depth:], (0, depth), value=IGNORED)
        if numbers is not None:
            ahead = ahead.masked_fill(F.pad(numbers[:, depth:], (0, depth), value=-1) != numbers, IGNORED)
        found.append(ahead)
    return found


def trunk_of(shape: Shape) -> Shape:
    """The shape of the decoder alone."""
    return replace(shape, multi_token=0)

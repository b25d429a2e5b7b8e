"""Decoder with multi-token prediction (DeepSeek-AI 2024, "DeepSeek-V3", section 2.2).

Each further depth is a module of one block after the previous one: it predicts the next
token from the previous hidden state and the embedding of the token predicted there. It
shares the decoder's embedding and output matrix. Gloeckle et al. 2024 predict all
tokens in parallel from the same hidden states; here the causal chain is kept. The
decoder's own outputs do not change, so the modules are dropped after training.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gristmill.train.models.attention import Visible, document_numbers
from gristmill.train.models.decoder import (
    Block,
    Cache,
    Head,
    Llama,
    RMSNorm,
    logits_head,
)
from gristmill.train.models.model_config import Shape
from gristmill.train.models.rotary import Rotary
from gristmill.train.objectives.losses import IGNORED

FURTHER = "further_layers."
"""Prefix of their parameter names."""


class FurtherToken(nn.Module):
    """Module of one depth (equations 21 and 22)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.hidden_norm = RMSNorm(shape.width, shape.norm_eps)
        self.embedding_norm = RMSNorm(shape.width, shape.norm_eps)
        self.projection = nn.Linear(2 * shape.width, shape.width, bias=False)
        self.block = Block(shape)
        self.norm = RMSNorm(shape.width, shape.norm_eps)

    def forward(
        self,
        hidden: Tensor,
        embedded: Tensor,
        rotary: Rotary,
        visible: Visible,
    ) -> tuple[Tensor, Tensor]:
        """Hidden states of this depth, plain for the next depth and normalised for a
        head.

        Inputs are the hidden states of the previous depth and the embeddings of the
        tokens predicted there, (n, t, d) each.
        """
        joined = torch.cat(
            (self.hidden_norm(hidden), self.embedding_norm(embedded)), dim=-1
        )
        hidden = self.block(self.projection(joined), rotary, visible)
        return hidden, self.norm(hidden)


class MultiTokenLlama(Llama):
    """A decoder with `shape.multi_token` further depths."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.further_layers = nn.ModuleList(
            FurtherToken(shape) for _ in range(shape.multi_token)
        )

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
        """Apply `head` to the decoder's hidden states, and the heads of `further`, if
        any, to those of each depth.

        Returns a list of all results if there is `further`. See `Llama.forward`.
        """
        if not further:
            return super().forward(ids, head, cache, positions, trained, prefix)
        ids, rotary, visible = self.laid_out(ids, None, positions)
        hidden = self.model(ids, rotary, visible, trained, None)
        hidden, matrix = self.gathered(hidden)
        outputs = [head(hidden, matrix)]
        for depth, (module, depth_head) in enumerate(
            zip(self.further_layers, further, strict=True), start=1
        ):
            embedded = self.model.embed_tokens(F.pad(ids[:, depth:], (0, depth)))
            hidden, normalised = module(hidden, embedded, rotary, visible)
            outputs.append(depth_head(normalised, matrix))
        return outputs


def further_targets(
    targets: Tensor, positions: Tensor | None, heads: int
) -> list[Tensor]:
    """Targets of each depth, (n, t) int64 each.

    Depth k predicts the decoder's target k places later, after the k tokens before it,
    if that place belongs to the same document.

    Args:
        targets: (n, t) of the decoder.
        positions: (n, t) within documents, if attention is restricted to them; None for
            whole rows.
        heads: number of depths.

    >>> [one.tolist() for one in further_targets(torch.tensor([[6, 7, 8, IGNORED]]), None, 2)]
    [[[7, 8, -100, -100]], [[8, -100, -100, -100]]]
    """
    numbers = None if positions is None or not heads else document_numbers(positions)
    depth_targets = []
    for depth in range(1, heads + 1):
        ahead = F.pad(targets[:, depth:], (0, depth), value=IGNORED)
        if numbers is not None:
            ahead = ahead.masked_fill(
                F.pad(numbers[:, depth:], (0, depth), value=-1) != numbers, IGNORED
            )
        depth_targets.append(ahead)
    return depth_targets

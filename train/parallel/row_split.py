"""Context parallelism: every process computes its share of each row's tokens (Grattafiori et al. 2024, section 3.3.2).

A row of t tokens is cut into two chunks per process, of which process r takes the r-th from the front and the r-th from
the back: under a causal mask all have equally much to do. Between tokens only attention exchanges anything: keys and
values of all tokens are gathered in every layer, and queries stay where they are, so that any mask can be had. (Ring
attention, which `torch.distributed.tensor.experimental.context_parallel` has, passes keys and values around under a
causal mask of the whole row alone, and only by kernels of GPUs.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from gristmill.train.models.attention import Elsewhere, Visible, see_documents
from gristmill.train.models.shape import CHUNKS
from gristmill.train.objectives.losses import IGNORED

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""By the names that torch 2.13 has for them, or those that it warns of and torch 2.11 has alone."""


class RowSplitError(ValueError):
    """A model, or what is asked of it, cannot be computed with rows that lie with several processes."""


@dataclass(frozen=True)
class TokenHead:
    """A head (see llama.Head) that makes of each token's hidden state, and of what is known of the token, its own.

    Attributes:
        function: (hidden (n, t, d), output matrix, ...) -> tensors (n, t) without gradients, and sums over tokens.
        of_tokens: what it takes besides by name, (n, t) each; `targets` are IGNORED for tokens that do not count.
    """

    function: Callable[..., Any]
    of_tokens: Mapping[str, Tensor]

    def __call__(self, hidden: Tensor, matrix: Tensor | None) -> Any:
        """What it makes of all tokens."""
        return self.function(hidden, matrix, **self.of_tokens)


@dataclass(frozen=True)
class RowSplit:
    """The processes that compute the same rows, each a share of their tokens.

    Attributes:
        group: the processes.
        rank, size: which of them this one is.
    """

    group: dist.ProcessGroup
    rank: int
    size: int

    @property
    def multiple(self) -> int:
        """What the length of rows must divide by."""
        return CHUNKS * self.size

    def places(self, length: int, device: torch.device) -> Tensor:
        """Where this process's tokens stand in rows of so many, (length / size,), ascending."""
        chunk = length // self.multiple
        first = torch.arange(chunk, device=device)
        return torch.cat((first + self.rank * chunk, first + (self.multiple - 1 - self.rank) * chunk))

    def see(
        self, ids: Tensor, positions: Tensor | None, dense: bool, prefix: Tensor | None
    ) -> tuple[Tensor, Tensor, Visible]:
        """This process's ids (n, t / size) of whole rows, their rotary positions (t / size,) or (n, 1, t / size), and
        what they see.

        Args:
            ids: (n, t), whose length divides by `multiple`.
            positions, prefix: see Llama.forward.
            dense: see attention.see_documents.
        """
        places = self.places(ids.shape[1], ids.device)
        found = positions
        if found is None:  # one document a row
            found = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        visible = Elsewhere(self._whole_pair, see_documents(found, dense=dense, prefix=prefix, places=places))
        turns = places if positions is None else positions[:, places].clamp(min=0).unsqueeze(1)
        return ids[:, places], turns, visible

    def whole(self, part: Tensor, dim: int) -> Tensor:
        """What belongs to all tokens of rows, from what belongs to this process's; the gradients of all processes are
        summed."""
        found: Tensor = _Whole.apply(part, dim, self)  # type: ignore[no-untyped-call]
        return found

    def _whole_pair(self, keys: Tensor, values: Tensor) -> Sequence[Tensor]:
        """Both (n, k, t, c), by one exchange."""
        return self.whole(torch.cat((keys, values), dim=1), 2).chunk(2, dim=1)

    def summed(self, value: Tensor) -> Tensor:
        """The sum over the processes of what has no gradient."""
        value = value.clone()
        dist.all_reduce(value, group=self.group)
        return value

    def answered(self, head: Callable[..., Any], hidden: Tensor, matrix: Tensor, length: int) -> Any:
        """What a head makes of rows of so many tokens, from this process's hidden states (n, t / size, d).

        What a TokenHead says of tokens (n, t) is gathered; its sums are those of this process's tokens, and so are
        their gradients. Any other head gets all hidden states.

        Raises:
            RowSplitError: there are gradients to compute, but the head is none for tokens.
        """
        if isinstance(head, TokenHead):
            places = self.places(hidden.shape[1] * self.size, hidden.device)
            own = {
                name: _lengthened(values, len(places) * self.size)[:, places] for name, values in head.of_tokens.items()
            }
            return tuple(
                self.whole(one, 1)[:, :length] if one.dim() else one for one in head.function(hidden, matrix, **own)
            )
        if torch.is_grad_enabled():
            raise RowSplitError("engine.parallel.context is for objectives that measure tokens one by one; use shard")
        return head(self.whole(hidden, 1)[:, :length], matrix)


def _lengthened(values: Tensor, length: int) -> Tensor:
    """(n, t) with tokens added that do not count."""
    missing = length - values.shape[1]
    return F.pad(values, (0, missing), value=0 if values.is_floating_point() else IGNORED) if missing else values


class _Whole(torch.autograd.Function):
    """Gathers shares of rows in the order of their tokens, and reduces gradients likewise."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, dim: int, split: RowSplit) -> Tensor:
        ctx.dim, ctx.split = dim, split
        part = part.contiguous()
        gathered = part.new_empty(split.size * part.shape[0], *part.shape[1:])
        all_gather_single(gathered, part, group=split.group)
        halves = [one.chunk(CHUNKS, dim=dim) for one in gathered.chunk(split.size)]
        return torch.cat([one for one, _ in halves] + [one for _, one in reversed(halves)], dim=dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        split: RowSplit = ctx.split
        chunks = gradients[0].chunk(split.multiple, dim=ctx.dim)
        shares = torch.cat(
            [
                torch.cat((front, back), dim=ctx.dim)
                for front, back in zip(chunks[: split.size], reversed(chunks[split.size :]), strict=True)
            ]
        )
        own = shares.new_empty(shares.shape[0] // split.size, *shares.shape[1:])
        reduce_scatter_single(own, shares, group=split.group)
        return own, None, None

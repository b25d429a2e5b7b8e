"""Context parallelism: every process computes a share of each row's tokens (Grattafiori
et al. 2024, section 3.3.2).

A row of t tokens is cut into two chunks per process; process r gets the r-th chunk from
the front and the r-th from the back, which balances the work under a causal mask. Only
attention exchanges data between tokens: keys and values of all tokens are gathered in
every layer while queries stay local, so any mask works. (Ring attention, as in
`torch.distributed.tensor.experimental.context_parallel`, supports only a causal mask
over the whole row, and only GPU kernels.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from gristmill.train.models.attention import Elsewhere, Visible, see_documents
from gristmill.train.models.model_config import CHUNKS
from gristmill.train.objectives.losses import IGNORED, Output

all_gather_single = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
reduce_scatter_single = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)
"""Names of torch 2.13, with those of torch 2.11 (deprecated in 2.13) as a fallback."""


class RowSplitError(ValueError):
    """A model or operation does not support rows that are split over processes."""


@dataclass(frozen=True)
class TokenHead:
    """Head (see `transformer.Head`) that computes values per token from its hidden
    state and further inputs per token.

    Attributes:
        function: (hidden (n, t, d), output matrix, ...) -> tensors (n, t) without
            gradients, and sums over tokens.
        of_tokens: its further inputs by name, (n, t) each; `targets` are IGNORED for
            tokens that do not count.
        selects: true to compute nothing of tokens without a target, whose values are
            0. If most tokens have one, selecting them costs more than it saves.
    """

    function: Callable[..., Any]
    of_tokens: Mapping[str, Tensor]
    selects: bool = False

    def __call__(self, hidden: Tensor, matrix: Output) -> Any:
        """Apply the head to all tokens."""
        if not self.selects:
            return self.function(hidden, matrix, **self.of_tokens)
        targets = self.of_tokens["targets"]
        places = (targets.flatten() != IGNORED).nonzero().squeeze(1)
        of_places = {
            name: values.flatten()[places][None]
            for name, values in self.of_tokens.items()
        }
        return tuple(
            output.new_zeros(targets.numel())
            .index_copy(0, places, output[0])
            .view_as(targets)
            if output.dim()
            else output
            for output in self.function(
                hidden.flatten(0, 1)[places][None], matrix, **of_places
            )
        )


@dataclass(frozen=True)
class RowSplit:
    """Processes that compute the same rows, each a share of their tokens.

    Attributes:
        group: the processes.
        rank, size: rank of this process in the group, and size of the group.
    """

    group: dist.ProcessGroup
    rank: int
    size: int

    @property
    def multiple(self) -> int:
        """Required divisor of the row length."""
        return CHUNKS * self.size

    def places(self, length: int, device: torch.device) -> Tensor:
        """Positions of this process's tokens in rows of a length, (length / size,),
        ascending.
        """
        chunk = length // self.multiple
        first = torch.arange(chunk, device=device)
        return torch.cat(
            (first + self.rank * chunk, first + (self.multiple - 1 - self.rank) * chunk)
        )

    def see(
        self, ids: Tensor, positions: Tensor | None, dense: bool, prefix: Tensor | None
    ) -> tuple[Tensor, Tensor, Visible]:
        """Local ids (n, t / size) of full rows, their rotary positions (t / size,) or
        (n, 1, t / size), and their mask.

        Args:
            ids: (n, t), with t a multiple of `multiple`.
            positions, prefix: see Llama.forward.
            dense: see attention.see_documents.
        """
        places = self.places(ids.shape[1], ids.device)
        token_positions = positions
        if token_positions is None:  # one document per row
            token_positions = torch.arange(ids.shape[1], device=ids.device).expand_as(
                ids
            )
        visible = Elsewhere(
            self.whole,
            see_documents(token_positions, dense=dense, prefix=prefix, places=places),
        )
        rotary_positions = (
            places
            if positions is None
            else positions[:, places].clamp(min=0).unsqueeze(1)
        )
        return ids[:, places], rotary_positions, visible

    def whole(self, part: Tensor, dim: int) -> Tensor:
        """Gather a tensor of all tokens from the local parts; the backward pass sums
        the gradients of all processes.
        """
        gathered: Tensor = _Whole.apply(part, dim, self)  # type: ignore[no-untyped-call]
        return gathered

    def summed(self, value: Tensor) -> Tensor:
        """Sum over the processes, without gradient."""
        value = value.clone()
        dist.all_reduce(value, group=self.group)
        return value

    def answered(
        self, head: Callable[..., Any], hidden: Tensor, matrix: Tensor, length: int
    ) -> Any:
        """Apply a head to rows of a length, from local hidden states (n, t / size, d).

        Tensors (n, t) of a TokenHead are gathered; its sums, and their gradients, are
        those of local tokens. Other heads get all hidden states.

        Raises:
            RowSplitError: gradients are enabled, but the head is not a TokenHead.
        """
        if isinstance(head, TokenHead):
            places = self.places(hidden.shape[1] * self.size, hidden.device)
            local_inputs = {}
            for name, values in head.of_tokens.items():
                missing = len(places) * self.size - values.shape[1]
                fill = 0 if values.is_floating_point() else IGNORED
                lengthened = F.pad(values, (0, missing), value=fill)
                local_inputs[name] = lengthened[:, places]
            return tuple(
                self.whole(output, 1)[:, :length] if output.dim() else output
                for output in replace(head, of_tokens=local_inputs)(hidden, matrix)
            )
        if torch.is_grad_enabled():
            raise RowSplitError(
                "engine.parallel.context is for objectives that measure tokens one "
                "by one; use shard"
            )
        return head(self.whole(hidden, 1)[:, :length], matrix)


class _Whole(torch.autograd.Function):
    """All-gather of token shares into token order, with reduce-scatter of gradients."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, dim: int, split: RowSplit) -> Tensor:
        ctx.dim, ctx.split = dim, split
        part = part.contiguous()
        gathered = part.new_empty(split.size * part.shape[0], *part.shape[1:])
        all_gather_single(gathered, part, group=split.group)
        halves = [shard.chunk(CHUNKS, dim=dim) for shard in gathered.chunk(split.size)]
        return torch.cat(
            [shard for shard, _ in halves] + [shard for _, shard in reversed(halves)],
            dim=dim,
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        split: RowSplit = ctx.split
        chunks = gradients[0].chunk(split.multiple, dim=ctx.dim)
        shards = torch.cat(
            [
                torch.cat((front, back), dim=ctx.dim)
                for front, back in zip(
                    chunks[: split.size], reversed(chunks[split.size :]), strict=True
                )
            ]
        )
        local_gradient = shards.new_empty(
            shards.shape[0] // split.size, *shards.shape[1:]
        )
        reduce_scatter_single(local_gradient, shards, group=split.group)
        return local_gradient, None, None

"""Base of objectives over rows of a packed set, with loss, tokens and bytes of each
source.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gristmill.tokenize.packed import PackedSet
from gristmill.train.eval.held_out import loss_metrics
from gristmill.train.loop.objective import Metrics

SUMS_PER_SOURCE = 3
"""Loss, trained tokens, and their bytes."""


class PackedObjective:
    """Rows of a packed set in their order, and metrics per source (see
    objective.Objective).

    Args:
        packed: the rows.
        seed: of their order.
        token_bytes: (vocab,) bytes per id, on the device.
        flops_per_token: model FLOPs.
    """

    def __init__(
        self, packed: PackedSet, seed: int, token_bytes: Tensor, flops_per_token: float
    ) -> None:
        self.packed = packed
        self.order = packed.order(seed)
        self.fingerprint = packed.fingerprint
        self.sequence_length = packed.sequence_length
        self.flops_per_token = flops_per_token
        self.sums_length = 1 + SUMS_PER_SOURCE * len(packed.sources)
        self._token_bytes = token_bytes

    def sums(
        self, sources: Tensor, targets: Tensor, counted: Tensor, nll: Tensor
    ) -> Tensor:
        """Total loss, then loss, tokens and bytes of each source: (1 + 3 s,) float64.

        Args:
            sources: (n,) int64, source of each row.
            targets: (n, t) ids; those that do not count may be negative.
            counted: (n, t) float32, 1 for tokens that count, else 0.
            nll: (n, t) losses.
        """
        num_bytes = self._token_bytes[targets.clamp(min=0)]
        per_row = torch.stack(
            [
                (part * counted).double().sum(dim=1)
                for part in (nll, counted, num_bytes)
            ],
            dim=1,
        )
        # A product with one-hot rows, as index_add_ is not deterministic on GPUs.
        numbers = torch.arange(len(self.packed.sources), device=sources.device)
        per_source = (sources == numbers[:, None]).double() @ per_row
        return torch.cat((per_source[:, :1].sum(dim=0), per_source.flatten()))

    def report(self, sums: Sequence[float], weight: float) -> Metrics:
        """Loss and bits per byte over all sources, and `sources`: loss, bits per byte
        and tokens of each source with data.

        Args:
            sums: as of `sums`; further ones are ignored.
            weight: number of trained tokens.
        """
        by_source = {
            name: sums[1 + SUMS_PER_SOURCE * n : 1 + SUMS_PER_SOURCE * (n + 1)]
            for n, name in enumerate(self.packed.sources)
        }
        num_bytes = sum(part[2] for part in by_source.values())
        return {
            **loss_metrics(sums[0], weight, num_bytes),
            "sources": {
                name: {**loss_metrics(*part), "tokens": int(part[1])}
                for name, part in by_source.items()
                if part[1]
            },
        }

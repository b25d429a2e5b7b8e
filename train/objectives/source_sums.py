"""Loss, tokens and bytes of each source of a packed set: summed on the device, and
reported.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gristmill.train.eval.held_out import loss_metrics

SUMS_PER_SOURCE = 3
"""Loss, trained tokens, and their bytes."""


def sums_by_source(
    nll: Tensor, counted: Tensor, num_bytes: Tensor, sources: Tensor, num_sources: int
) -> Tensor:
    """Total loss, then loss, tokens and bytes of each source: (1 + 3 s,) float64.

    Args:
        nll: (n, t) losses.
        counted: (n, t) float32, 1 for tokens that count, else 0.
        num_bytes: (n, t) bytes of the targets.
        sources: (n,) int64, source of each row.
        num_sources: s.
    """
    per_row = torch.stack(
        [(part * counted).double().sum(dim=1) for part in (nll, counted, num_bytes)],
        dim=1,
    )
    # A product with one-hot rows, as index_add_ is not deterministic on GPUs.
    numbers = torch.arange(num_sources, device=sources.device)
    per_source = (sources == numbers[:, None]).double() @ per_row
    return torch.cat((per_source[:, :1].sum(dim=0), per_source.flatten()))


def report_by_source(
    names: Sequence[str], sums: Sequence[float], weight: float
) -> dict[str, object]:
    """Loss and bits per byte over all sources, and `sources`: loss, bits per byte and
    tokens of each source with data.

    Args:
        names: of the sources.
        sums: from `sums_by_source`; further ones are ignored.
        weight: number of trained tokens.
    """
    by_source = {
        name: sums[1 + SUMS_PER_SOURCE * n : 1 + SUMS_PER_SOURCE * (n + 1)]
        for n, name in enumerate(names)
    }
    return {
        **loss_metrics(sums[0], weight, sum(part[2] for part in by_source.values())),
        "sources": {
            name: {**loss_metrics(*part), "tokens": int(part[1])}
            for name, part in by_source.items()
            if part[1]
        },
    }

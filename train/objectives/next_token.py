"""Objective of pre-training on all tokens of a packed set, with metrics per source.

It predicts the next token everywhere, unless a layout defines the targets (see
prediction_targets.py).

Padding after a row's documents is neither trained nor counted. It is identified by the
boundaries stored beside the rows, not by its id, which may also occur in a document.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from gristmill.tokenize.packed import PackedSet
from gristmill.train.data.batch import (
    document_positions,
    filled_positions,
    filled_tokens,
    predicted_tokens,
)
from gristmill.train.distributed.context_parallel import TokenHead
from gristmill.train.loop.batch_plan import or_first
from gristmill.train.loop.objective import (
    UNTRAINED,
    JsonObject,
    Measured,
    Metrics,
    ReadDocument,
    read_pieces,
)
from gristmill.train.loop.prefetch import TensorBatch, pinned, read_pinned
from gristmill.train.models.model_config import AnyShape
from gristmill.train.models.moe import expert_loads, report_loads
from gristmill.train.models.tensor_files import Tensors
from gristmill.train.objectives.losses import (
    IGNORED,
    next_tokens,
    weighted_nll,
)
from gristmill.train.objectives.packed_objective import PackedObjective
from gristmill.train.objectives.prediction_targets import Laid, Layout, Read

MOST_PIECES_DESCRIBED = 10_000


@dataclass(frozen=True)
class Rows(TensorBatch):
    """A micro-batch in host memory.

    Attributes:
        tokens: (n, t) in the packed set's dtype.
        sources: (n,) int64 source numbers.
        filled: (n,) int64, number of document tokens in each row; padding follows them.
        positions: (n, t) int32, position of each token in the document that it attends
            to; None if that is its whole row.
        real: false for an empty micro-batch, whose rows are padding.
        cuts: number of rows that one row of the set is split into.
        targets: (n, t) int64 of a layout, whose inputs replace the tokens.
        beside: further arguments of the model (see `Laid`).
        places: (n, t) int64, index of each target in its row (see `Laid`).
        weight: of the micro-batch, if a layout defines the targets.
    """

    tokens: Tensor
    sources: Tensor
    filled: Tensor
    positions: Tensor | None
    real: bool
    cuts: int = 1
    targets: Tensor | None = None
    beside: Tensors = field(default_factory=dict)
    weight: float | None = None
    places: Tensor | None = None


class NextToken(PackedObjective):
    """Cross-entropy over packed rows (see objective.Objective).

    Args:
        packed: the training set.
        seed: of the row order.
        token_bytes: (vocab,) bytes per id, on the device.
        shape: of the model.
        z_loss: see losses.weighted_nll.
        layout: defines the targets; next tokens if absent.
    """

    def __init__(
        self,
        packed: PackedSet,
        seed: int,
        token_bytes: Tensor,
        shape: AnyShape,
        z_loss: float = 0.0,
        layout: Layout | None = None,
    ) -> None:
        flops_per_token = shape.flops_per_token(packed.sequence_length)
        super().__init__(packed, seed, token_bytes, flops_per_token)
        self._layout = layout
        self._source_sums = self.sums_length
        self.sums_length += shape.layers * shape.experts
        self._shape = shape
        self._z_loss = z_loss

    def weight(self, rows: np.ndarray, cuts: int = 1, step: int = 0) -> float:
        """Number of predicted tokens, without the first token of a row and padding."""
        if self._layout is None:
            return float(predicted_tokens(self.packed, rows, cuts))
        return (
            _trained(self._laid(self._layout, rows, cuts, step)) if len(rows) else 0.0
        )

    def num_tokens(self, rows: np.ndarray) -> int:
        """Number of tokens of the rows with padding, which the model computes too."""
        return len(rows) * self.sequence_length

    def prepare(self, rows: np.ndarray, cuts: int = 1, step: int = 0) -> Rows:
        """Read rows, each split into `cuts` shorter rows; an empty micro-batch holds a
        row of weight zero.
        """
        real = bool(len(rows))
        rows = or_first(rows)
        length = self.sequence_length // cuts
        filled = filled_tokens(self.packed, rows, cuts)
        positions = None
        if self._shape.document_mask:
            positions = document_positions(self.packed, rows, cuts)
        elif self._shape.kind == "encoder" and (filled < length).any():
            positions = filled_positions(filled, length)
        laid = None
        if self._layout is not None:
            laid = self._laid(self._layout, rows, cuts, step)
            if laid.places is not None:  # inputs differ from the row's tokens
                positions = laid.positions
        batch = Rows(
            read_pinned(self.packed, rows).view(-1, length)
            if laid is None
            else torch.from_numpy(laid.inputs),
            torch.from_numpy(np.repeat(self.packed.source_of(rows), cuts)),
            torch.from_numpy(filled),
            None if positions is None else torch.from_numpy(positions),
            real,
            cuts,
        )
        if laid is not None:
            batch = replace(
                batch,
                targets=torch.from_numpy(laid.targets),
                beside={name: pinned(part) for name, part in laid.beside().items()},
                weight=_trained(laid) if real else 0.0,
                places=None if laid.places is None else torch.from_numpy(laid.places),
            )
        return batch.pinned()

    def _laid(self, layout: Layout, rows: np.ndarray, cuts: int, step: int) -> Laid:
        length = self.sequence_length // cuts
        positions = (
            document_positions(self.packed, rows, cuts)
            if self._shape.document_mask
            else filled_positions(filled_tokens(self.packed, rows, cuts), length)
        )
        return layout(
            Read(
                self.packed.tokens(rows).reshape(-1, length),
                positions,
                np.repeat(rows, cuts),
                np.tile(np.arange(cuts) * length, len(rows)),
            ),
            step,
        )

    def loss(self, model: nn.Module, batch: Rows, scale: float) -> Measured:
        """See objective.Objective.

        The sums are the total loss; loss, tokens and bytes of each source; tokens of
        each expert, layer by layer.
        """
        device = self._token_bytes.device
        real = float(batch.real)
        batch = batch.to(device)
        # Tokens are copied in the dtype of the packed set, and cast on the device.
        ids = batch.tokens.to(torch.int64)
        targets = (
            next_tokens(
                ids, torch.arange(ids.shape[1], device=device) < batch.filled[:, None]
            )
            if batch.targets is None
            else batch.targets
        )
        counted = (targets != IGNORED).float() * real
        weights = counted * scale
        head = partial(
            weighted_nll,
            z_loss=self._z_loss,
            fused=bool(getattr(model, "is_compiled", False)),
        )
        loss, nll = model(
            ids,
            TokenHead(
                head,
                {"targets": targets, "weights": weights},
                selects=batch.targets is not None,
            ),
            positions=batch.positions,
            trained=weights.sum(dim=1),
            **{
                name: part.to(device, non_blocking=True)
                for name, part in batch.beside.items()
            },
        )
        loads = [load.double() * real for load in expert_loads(model)]
        source_sums = self.sums(batch.sources, targets, counted, nll)
        sums = torch.cat((source_sums, *loads))
        row_losses = torch.where(counted > 0, nll, UNTRAINED)
        if batch.places is not None:
            length = self.sequence_length // batch.cuts
            # Targets that are not part of a row go to an extra column, which is cut
            # off.
            row_columns = torch.where(batch.places < 0, length, batch.places)
            padded_losses = row_losses.new_full(
                (len(row_losses), length + 1), UNTRAINED
            )
            row_losses = padded_losses.scatter(1, row_columns, row_losses)[:, :length]
        return Measured(loss, sums, row_losses.reshape(len(ids) // batch.cuts, -1))

    def report(self, sums: Sequence[float], weight: float) -> Metrics:
        """Loss over all sources; loss, bits per byte and tokens of each source with
        data; expert loads.
        """
        return {
            **super().report(sums, weight),
            **report_loads(sums[self._source_sums :], self._shape.experts),
        }

    def describe(self, rows: np.ndarray) -> JsonObject:
        """Documents of rows: id, source and tokens of each piece."""
        pieces = self.packed.pieces(rows).slice(0, MOST_PIECES_DESCRIBED).to_pylist()
        return {
            "documents": [
                {
                    "id": piece["id"].hex(),
                    "source": self.packed.sources[piece["source"]],
                    "row": piece["row"],
                    "tokens": piece["length"],
                }
                for piece in pieces
            ]
        }

    def blame(self, rows: np.ndarray, row_losses: np.ndarray) -> list[ReadDocument]:
        """Document pieces of rows, with the mean loss of their tokens; `head` is their
        first tokens.
        """
        ahead = 1 if self._layout is None else self._layout.ahead
        return [
            {
                "id": piece["id"].hex(),
                "source": self.packed.sources[piece["source"]],
                "loss": loss,
                "row": piece["row"],
                "start": piece["start"],
                "tokens": piece["length"],
                "offset": piece["offset"],
                "head": head,
            }
            for piece, loss, head in read_pieces(self.packed, rows, row_losses, ahead)
        ]


def _trained(laid: Laid) -> float:
    """Number of targets."""
    return float((laid.targets != IGNORED).sum())

"""Loss, perplexity, bits per byte and token accuracy of a model on held-out rows and
documents.

The bootstrap draws documents, which are (nearly) independent; tokens of a row are not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import NotRequired, TypedDict

import numpy as np
import torch
from torch import Tensor, nn

from gristmill.tokenize.packed import PackedSet
from gristmill.train.data.batch import filled_positions
from gristmill.train.distributed.context_parallel import TokenHead
from gristmill.train.distributed.fsdp import evaluating
from gristmill.train.distributed.process_groups import World, sum_over_ranks
from gristmill.train.eval.intervals import Estimate, interval
from gristmill.train.loop.batch_plan import or_first, slices
from gristmill.train.loop.objective import GroupedMetrics, Numbers
from gristmill.train.models.model_config import AnyShape
from gristmill.train.models.transformer import Llama
from gristmill.train.objectives.losses import IGNORED, score_tokens
from gristmill.train.objectives.prediction_targets import Laid, Layout, Read
from gristmill.train.optim.averaging import AveragedWeights

ROWS_PER_FORWARD = 16
LARGEST_EXPONENT = 700.0
"""Largest exponent without overflow of a float64."""
TOKEN_BYTES = "token_bytes.npy"
HELD_OUT_STEP = -1
"""Step of held-out rows in a layout, which no training step has."""
COLUMNS = 4
"""Columns per document: nats, predicted tokens, their bytes, tokens predicted
correctly.
"""


@torch.no_grad()
def score_rows(model: nn.Module, laid: Laid, token_bytes: Tensor) -> Tensor:
    """Loss, predicted tokens, their bytes and correct ones of each place: (COLUMNS, n,
    t) float64, zeros without a target.

    Args:
        model: predicts ids.
        laid: n rows.
        token_bytes: (vocab,) bytes of text per id, on the model's device.
    """

    def placed(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(token_bytes.device)

    targets = placed(laid.targets)
    nll, correct = model(
        placed(laid.inputs),
        TokenHead(score_tokens, {"targets": targets}),
        positions=None if laid.positions is None else placed(laid.positions),
        **{name: placed(array) for name, array in laid.beside().items()},
    )
    counted = targets != IGNORED
    num_bytes = token_bytes[targets.clamp(min=0)]
    return torch.stack(
        [part.double() * counted for part in (nll, counted, num_bytes, correct)]
    )


def loss_metrics(nll: float, tokens: float, num_bytes: float) -> Numbers:
    """`loss` per token and `bits_per_byte`, from sums; `tokens` is positive, bits per
    byte are omitted without bytes.
    """
    metrics = {"loss": nll / tokens}
    if num_bytes:
        metrics["bits_per_byte"] = nll / math.log(2.0) / num_bytes
    return metrics


def read_token_bytes(tokenizer: Path, device: torch.device) -> Tensor:
    """Bytes of text per id: (vocab,) float32; 0 for special tokens."""
    with (tokenizer / TOKEN_BYTES).open("rb") as stream:
        return torch.from_numpy(np.load(stream).astype(np.float32)).to(device)


def score_documents(
    model: Llama,
    packed: PackedSet,
    source: str,
    token_bytes: Tensor,
    layout: Layout | None = None,
) -> np.ndarray:
    """Sums over each held-out document of a source that has any predicted token:
    (documents, COLUMNS) float64.

    The first token of a row has no context and does not count as a next token. Rows
    replace documents in a set without a table of pieces.

    Args:
        model: predicts the targets.
        packed: a set with held-out rows.
        source: a source with held-out rows.
        token_bytes: (vocab,) bytes of text per id, on the model's device.
        layout: targets of the rows; the next tokens if absent.
    """
    held_out = HeldOutRows(packed, source, model.shape, layout)
    values = np.zeros((*held_out.read.tokens.shape, COLUMNS))
    ahead = 1 if layout is None else layout.ahead
    for part in slices(len(values), ROWS_PER_FORWARD):
        laid = held_out.laid(part)
        scored = score_rows(model, laid, token_bytes).movedim(0, -1).cpu().numpy()
        if laid.places is None:
            values[part, ahead:] = scored[:, : scored.shape[1] - ahead]
        else:
            row, number = np.nonzero(laid.places >= 0)
            values[part][row, laid.places[row, number]] = scored[row, number]
    pieces = packed.validation_pieces(source)
    if not len(pieces):
        return values.sum(axis=1)
    first = (
        pieces["row"].to_numpy() * packed.sequence_length + pieces["start"].to_numpy()
    )
    flat = values.reshape(-1, COLUMNS)
    total = np.zeros((len(flat) + 1, COLUMNS))
    np.cumsum(flat, axis=0, out=total[1:])
    per_piece = total[first + pieces["length"].to_numpy()] - total[first]
    _, document = np.unique(
        pieces["id"].to_numpy(zero_copy_only=False), return_inverse=True
    )
    summed = np.zeros((int(document.max()) + 1, COLUMNS))
    np.add.at(summed, document, per_piece)
    return summed[summed[:, 1] > 0]


class HeldOutRows:
    """Held-out rows of a source as inputs and targets of a model.

    Args:
        packed: the set.
        source: a source with held-out rows.
        shape: of the model.
        layout: targets; the next token at each place if absent.
    """

    def __init__(
        self, packed: PackedSet, source: str, shape: AnyShape, layout: Layout | None
    ) -> None:
        tokens = packed.validation(source)
        boundaries = packed.validation_boundaries(source)
        positions = (
            boundaries.positions(packed.sequence_length)
            if shape.document_mask
            else filled_positions(boundaries.filled(), packed.sequence_length)
        )
        zeros = np.zeros(len(tokens), dtype=np.int64)
        self.read = Read(tokens, positions, np.arange(len(tokens)), zeros)
        self._layout = layout
        # Decoders attend to full rows without positions.
        self._has_positions = shape.document_mask or shape.kind == "encoder"

    def laid(self, rows: slice | np.ndarray) -> Laid:
        """Inputs and targets of some rows."""
        part = Read(*(array[rows] for array in self.read))
        if self._layout is None:
            ids = part.tokens.astype(np.int64)
            targets = np.full_like(ids, IGNORED)
            targets[:, :-1] = ids[:, 1:]
            laid = Laid(ids, targets)
        else:
            laid = self._layout(part, HELD_OUT_STEP)
        if laid.places is None and self._has_positions:
            return laid._replace(positions=part.positions)
        return laid


class SourceMetrics(TypedDict):
    """Metrics on the held-out documents of a source.

    Attributes:
        loss: nats per token.
        perplexity: exponential of the loss.
        tokens, documents: numbers of predicted tokens and of documents.
        token_accuracy: share of the tokens predicted correctly.
        bits_per_byte: absent if no token has text.
    """

    loss: float
    perplexity: Estimate
    tokens: int
    documents: int
    token_accuracy: float
    bits_per_byte: NotRequired[Estimate]


def source_metrics(
    documents: np.ndarray, seed: int, bootstrap_samples: int
) -> SourceMetrics:
    """Loss, perplexity, bits per byte and token accuracy over documents, with intervals
    for the middle two.

    Args:
        documents: (n, COLUMNS), as from `score_documents`.
        seed, bootstrap_samples: of the bootstrap over documents.
    """
    nats, tokens, num_bytes, correct = documents.sum(axis=0)
    metrics: SourceMetrics = {
        "loss": nats / tokens,
        "perplexity": interval(documents, perplexity_of, seed, bootstrap_samples),
        "tokens": int(tokens),
        "documents": len(documents),
        "token_accuracy": correct / tokens,
    }
    if num_bytes:
        metrics["bits_per_byte"] = interval(documents, _bits, seed, bootstrap_samples)
    return metrics


def _bits(sums: np.ndarray) -> np.ndarray:
    return sums[..., 0] / math.log(2.0) / sums[..., 2]


def perplexity_of(sums: np.ndarray) -> np.ndarray:
    """Exponential of the nats per token, of sums or means (..., COLUMNS)."""
    return np.exp(np.minimum(sums[..., 0] / sums[..., 1], LARGEST_EXPONENT))


@dataclass(frozen=True, eq=False)
class Validation:
    """Measures every source's held-out rows after some steps and after the last.

    All stages measure the same rows in the same way, so their bits per byte are
    comparable.

    Attributes:
        every: steps between measurements; None: never.
        steps: of the whole training.
        packed: the mixture whose held-out rows are measured; None: measures nothing.
        model: sharded; its shape sets attention within documents.
        average: running mean of its weights, also measured.
        token_bytes: (vocab,) bytes per id, on the device.
        world: the processes.
        layout: targets of the rows, as in training; the next token if absent.
    """

    every: int | None
    steps: int
    packed: PackedSet | None
    model: nn.Module
    average: AveragedWeights | None
    token_bytes: Tensor
    world: World
    layout: Layout | None = None

    def __call__(self, step: int) -> dict[str, GroupedMetrics] | None:
        """`validation` (source -> metrics) and `validation_average` if there is an
        average; None after other steps.
        """
        if (
            self.every is None
            or self.packed is None
            or (step != self.steps and step % self.every)
        ):
            return None
        measurements = {"validation": self._measure(self.packed)}
        if self.average is not None:
            with self.average.in_place():
                measurements["validation_average"] = self._measure(self.packed)
        return measurements if measurements["validation"] else None

    def _measure(self, packed: PackedSet) -> GroupedMetrics:
        return {
            source: self._metrics(packed, source)
            for source in packed.manifest["validation"]
            if len(packed.validation(source))
        }

    def _metrics(self, packed: PackedSet, source: str) -> Numbers:
        """Metrics of the model on a source's rows, distributed over the ranks; a
        collective call.

        `loss` is nats per token, `perplexity` its exponential, `bits_per_byte` nats over
        ln 2 per byte of the text of the predicted tokens (special tokens have none, but
        their loss counts), `token_accuracy` the share of tokens that were predicted
        correctly.
        """
        world = self.world
        shape: AnyShape = self.model.shape  # type: ignore[assignment]
        held_out = HeldOutRows(packed, source, shape, self.layout)
        rows = held_out.read.rows
        sums = torch.zeros(COLUMNS, dtype=torch.float64, device=world.device)
        with evaluating(self.model):
            for batch in world.micro_batches(rows, ROWS_PER_FORWARD):
                scored = score_rows(
                    self.model, held_out.laid(or_first(batch)), self.token_bytes
                )
                if len(batch):
                    sums += torch.stack([column.sum() for column in scored])
        nll, tokens, num_bytes, correct = sum_over_ranks(sums, world).tolist()
        return {
            **loss_metrics(nll, tokens, num_bytes),
            "tokens": int(tokens),
            "perplexity": math.exp(min(nll / tokens, LARGEST_EXPONENT)),
            "token_accuracy": correct / tokens,
        }

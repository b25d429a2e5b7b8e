"""Loss, perplexity, bits per byte and token accuracy of a model on held-out rows and
documents.

The bootstrap draws documents, which are (nearly) independent; tokens of a row are not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
from gristmill.train.loop.batch_plan import micro_batches, slices
from gristmill.train.models.model_config import AnyShape
from gristmill.train.models.transformer import Llama
from gristmill.train.objectives.losses import IGNORED, next_tokens, score_tokens
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
def score_rows(
    model: nn.Module,
    ids: Tensor,
    token_bytes: Tensor,
    positions: Tensor | None = None,
    targets: Tensor | None = None,
    **beside: Tensor,
) -> Tensor:
    """Sums over rows of tokens: (4,) float64: loss, predicted tokens, their bytes,
    correct ones.

    Args:
        model: predicts ids.
        ids: (n, t) int64.
        token_bytes: (vocab,) bytes of text per id.
        positions: (n, t) in their documents, for a model with attention within
            documents.
        targets: (n, t) int64, target of each position; the next token if absent.
        beside: further arguments of the model (see `prediction_targets.Laid`).
    """
    targets = next_tokens(ids) if targets is None else targets
    nll, correct = model(
        ids,
        TokenHead(score_tokens, {"targets": targets}),
        positions=positions,
        **beside,
    )
    counted = targets != IGNORED
    num_bytes = token_bytes[targets.clamp(min=0)] * counted
    return torch.stack(
        [part.double().sum() for part in (nll, counted, num_bytes, correct)]
    )


def measure(
    model: nn.Module,
    rows: np.ndarray,
    token_bytes: Tensor,
    world: World,
    positions: np.ndarray | None = None,
    laid: Laid | None = None,
) -> dict[str, float]:
    """Metrics of a model on rows (n, t), distributed over the ranks; a collective call.

    `positions` (n, t) in their documents are for a model with attention within
    documents, `laid` the same rows for a model with other targets than the next token.
    """
    inputs, targets = (rows, None) if laid is None else (laid.inputs, laid.targets)
    if laid is not None and laid.places is not None:
        positions = laid.positions
    sums = torch.zeros(4, dtype=torch.float64, device=world.device)
    with evaluating(model):
        for batch in micro_batches(
            np.arange(len(rows)), world.data_rank, world.data_size, ROWS_PER_FORWARD
        ):
            # A rank without rows still takes part in the collectives of the forward
            # pass.
            chosen = batch if len(batch) else [0]
            ids = torch.from_numpy(inputs[chosen].astype(np.int64)).to(world.device)
            places, part_targets = (
                None
                if batch is None
                else torch.from_numpy(batch[chosen]).to(world.device)
                for batch in (positions, targets)
            )
            more = (
                {}
                if laid is None
                else {
                    name: torch.from_numpy(batch[chosen]).to(world.device)
                    for name, batch in laid.beside().items()
                }
            )
            scored = score_rows(model, ids, token_bytes, places, part_targets, **more)
            sums += scored if len(batch) else 0.0
    return metrics_of(sum_over_ranks(sums, world).tolist())


def metrics_of(sums: Sequence[float]) -> dict[str, float]:
    """Metrics from (loss, tokens, bytes, correct) sums.

    `loss` is nats per token, `perplexity` its exponential, `bits_per_byte` nats over ln
    2 per byte of the text of the predicted tokens (special tokens have none, but their
    loss counts), `token_accuracy` the share of tokens that were
    predicted correctly.
    """
    nll, tokens, num_bytes, correct = sums
    return {
        **loss_metrics(nll, tokens, num_bytes),
        "tokens": int(tokens),
        "perplexity": math.exp(min(nll / tokens, LARGEST_EXPONENT)),
        "token_accuracy": correct / tokens,
    }


def loss_metrics(nll: float, tokens: float, num_bytes: float) -> dict[str, float]:
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


@torch.no_grad()
def score_documents(
    model: Llama, packed: PackedSet, source: str, token_bytes: Tensor
) -> np.ndarray:
    """Sums over each held-out document of a source: (documents, COLUMNS) float64.

    The first token of a row has no context and does not count.
    """
    rows = packed.validation(source)
    positions = held_out_positions(packed, source, model.shape)
    bytes_of_id = token_bytes.cpu().numpy()
    values = np.zeros((*rows.shape, COLUMNS))
    for part in slices(len(rows), ROWS_PER_FORWARD):
        ids = rows[part].astype(np.int64)
        targets = np.full_like(ids, IGNORED)
        targets[:, :-1] = ids[:, 1:]
        places = None if positions is None else positions[part]
        scored = token_columns(model, ids, targets, places, bytes_of_id)
        values[part, 1:] = scored[:, :-1]
    return by_document(packed, source, values)


@torch.no_grad()
def token_columns(
    model: Llama,
    inputs: np.ndarray,
    targets: np.ndarray,
    positions: np.ndarray | None,
    token_bytes: np.ndarray,
    beside: Mapping[str, np.ndarray] | None = None,
) -> np.ndarray:
    """Scores of a model on rows: (n, t, COLUMNS) float64, zeros without a target.

    `beside` holds further arguments of the model.
    """
    device = next(model.parameters()).device
    values = np.zeros((*targets.shape, COLUMNS))
    for part in slices(len(inputs), ROWS_PER_FORWARD):
        ids, labels = (
            torch.from_numpy(array[part].astype(np.int64)).to(device)
            for array in (inputs, targets)
        )
        places = (
            None if positions is None else torch.from_numpy(positions[part]).to(device)
        )
        more = {
            name: torch.from_numpy(array[part]).to(device)
            for name, array in (beside or {}).items()
        }
        nll, correct = model(
            ids, TokenHead(score_tokens, {"targets": labels}), positions=places, **more
        )
        counted = labels != IGNORED
        columns: list[Tensor] = [
            nll.double() * counted,
            counted.double(),
            correct.double() * counted,
        ]
        values[part][..., [0, 1, 3]] = torch.stack(columns, dim=-1).cpu().numpy()
    values[..., 2] = np.where(targets == IGNORED, 0.0, token_bytes[targets.clip(min=0)])
    return values


def by_document(packed: PackedSet, source: str, values: np.ndarray) -> np.ndarray:
    """Sums over each held-out document of a source that has any predicted token:
    (documents, COLUMNS) float64.

    Rows replace documents in a set without a table of pieces.

    Args:
        values: (n, t, COLUMNS) of its held-out rows' tokens.
    """
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


def held_out_positions(
    packed: PackedSet, source: str, shape: AnyShape
) -> np.ndarray | None:
    """Position of each token in its attention span in a source's held-out rows (int32,
    (n, t)); None for full rows.
    """
    if not shape.document_mask and not shape.encoder:
        return None
    boundaries = packed.validation_boundaries(source)
    if shape.document_mask:
        return boundaries.positions(packed.sequence_length)
    return filled_positions(boundaries.filled(), packed.sequence_length)


def held_out_rows(packed: PackedSet, source: str, shape: AnyShape) -> Read:
    """Held-out rows of a source in the form that a layout reads."""
    rows = packed.validation(source)
    boundaries = packed.validation_boundaries(source)
    positions = (
        boundaries.positions(packed.sequence_length)
        if shape.document_mask
        else filled_positions(boundaries.filled(), packed.sequence_length)
    )
    return Read(
        rows, positions, np.arange(len(rows)), np.zeros(len(rows), dtype=np.int64)
    )


class SourceMetrics(TypedDict):
    """Metrics on the held-out documents of a source.

    Attributes:
        loss: nats per token.
        perplexity, perplexity_interval: exponential of the loss.
        tokens, documents: numbers of predicted tokens and of documents.
        token_accuracy: share of the tokens predicted correctly.
        bits_per_byte, bits_per_byte_interval: absent if no token has text.
    """

    loss: float
    perplexity: float
    perplexity_interval: Estimate
    tokens: int
    documents: int
    token_accuracy: float
    bits_per_byte: NotRequired[float]
    bits_per_byte_interval: NotRequired[Estimate]


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
        "perplexity": float(perplexity_of(documents.sum(axis=0))),
        "tokens": int(tokens),
        "documents": len(documents),
        "token_accuracy": correct / tokens,
        "perplexity_interval": interval(
            documents, perplexity_of, seed, bootstrap_samples
        ),
    }
    if num_bytes:
        metrics["bits_per_byte"] = float(_bits(documents.sum(axis=0)))
        metrics["bits_per_byte_interval"] = interval(
            documents, _bits, seed, bootstrap_samples
        )
    return metrics


def _bits(sums: np.ndarray) -> np.ndarray:
    return sums[..., 0] / math.log(2.0) / sums[..., 2]


def perplexity_of(sums: np.ndarray) -> np.ndarray:
    """Exponential of the nats per token, of sums (..., COLUMNS)."""
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

    def __call__(self, step: int) -> dict[str, dict[str, dict[str, float]]] | None:
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

    def _measure(self, packed: PackedSet) -> dict[str, dict[str, float]]:
        metrics = {}
        for source in packed.manifest["validation"]:
            rows = packed.validation(source)
            if len(rows):
                shape: AnyShape = self.model.shape  # type: ignore[assignment]
                laid = (
                    None
                    if self.layout is None
                    else self.layout(
                        held_out_rows(packed, source, shape), HELD_OUT_STEP
                    )
                )
                metrics[source] = measure(
                    self.model,
                    rows,
                    self.token_bytes,
                    self.world,
                    held_out_positions(packed, source, shape),
                    laid,
                )
        return metrics

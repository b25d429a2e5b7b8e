"""Metrics of encoders on masked tokens of held-out documents, and of encoder-decoders
on hidden spans.

Pseudo-perplexity (Salazar et al. 2020, section 2.2): the exponential of the mean loss
of tokens, each masked alone in its own copy of the row and predicted from all others.
Up to PLACES_PER_ROW tokens of a row are sampled, which estimates the mean over all.
Masked accuracy: the share of tokens predicted correctly if 15 % of a row are masked
together, for comparability independent of the model's training.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from gristmill.mixtures.objectives.span_objectives import SpanCorruption
from gristmill.mixtures.objectives.token_objectives import Masked
from gristmill.tokenize.encoding.tokenizer import load
from gristmill.tokenize.packed import PackedSet
from gristmill.train.evaluation.held_out import (
    COLUMNS,
    HELD_OUT_STEP,
    ROWS_PER_FORWARD,
    by_document,
    held_out_positions,
    held_out_rows,
    perplexity_of,
    read_token_bytes,
    token_columns,
)
from gristmill.train.evaluation.intervals import Estimate, interval
from gristmill.train.loop.batch_plan import slices
from gristmill.train.models.decoder import Llama
from gristmill.train.objectives.losses import IGNORED
from gristmill.train.objectives.masked_rows import Masking, masking_of
from gristmill.train.objectives.prediction_targets import Read, draws
from gristmill.train.objectives.span_rows import corruption_of

MEASURED = Masked(rate=0.15, mask_share=1.0, random_share=0.0)
"""Devlin et al. 2019, section 3.1, with the mask token for every chosen token."""
PLACES_PER_ROW = 64
"""Most forward passes per held-out row for its pseudo-perplexity."""


@dataclass(frozen=True)
class MaskedMetrics:
    """Metrics of an encoder on the held-out documents of a source.

    Attributes:
        pseudo_perplexity, pseudo_perplexity_interval: of sampled tokens.
        tokens, documents: numbers of sampled tokens and of their documents.
        masked_loss: nats per masked token.
        masked_accuracy, masked_accuracy_interval: share of them predicted correctly.
        masked_tokens: number of masked tokens.
    """

    pseudo_perplexity: float
    pseudo_perplexity_interval: Estimate
    tokens: int
    documents: int
    masked_loss: float
    masked_accuracy: float
    masked_accuracy_interval: Estimate
    masked_tokens: int


@dataclass(frozen=True)
class SpanMetrics:
    """Metrics of an encoder-decoder on the held-out documents of a source.

    Attributes:
        span_loss: nats per token of hidden spans.
        span_accuracy, span_accuracy_interval: share of these predicted correctly.
        tokens, documents: numbers of these and of their documents.
    """

    span_loss: float
    span_accuracy: float
    span_accuracy_interval: Estimate
    tokens: int
    documents: int


def masked_metrics(
    model: Llama,
    packed: PackedSet,
    source: str,
    tokenizer: Path,
    seed: int,
    bootstrap_samples: int,
) -> MaskedMetrics:
    """Pseudo-perplexity and masked accuracy over a source's held-out documents, with
    intervals.

    Args:
        model: an encoder.
        packed: a set with held-out rows.
        source: a source with held-out rows.
        tokenizer: folder of its tokenizer.
        seed, bootstrap_samples: of the draws and of the bootstrap over documents.
    """
    masking = masking_of(MEASURED, load(tokenizer), seed)
    token_bytes = read_token_bytes(tokenizer, torch.device("cpu")).numpy()
    read = held_out_rows(packed, source, model.shape)
    positions = held_out_positions(packed, source, model.shape)
    rows = read.tokens
    laid = masking(read, HELD_OUT_STEP)
    together = token_columns(
        model, np.arange(len(rows)), laid.inputs, laid.targets, positions, token_bytes
    )
    single = one_by_one(masking, read)
    numbers, places = np.nonzero(single)
    alone = np.zeros_like(together)
    for part in slices(len(numbers), ROWS_PER_FORWARD):
        row = numbers[part]
        place = places[part]
        copies = np.arange(len(row))
        inputs = rows[row].astype(np.int64)
        targets = np.full(inputs.shape, IGNORED)
        targets[copies, place] = inputs[copies, place]
        inputs[copies, place] = masking.mask
        alone[row, place] = token_columns(
            model, row, inputs, targets, positions, token_bytes
        )[copies, place]
    documents = by_document(packed, source, alone)
    masked = by_document(packed, source, together)
    return MaskedMetrics(
        pseudo_perplexity=float(perplexity_of(documents.sum(axis=0))),
        pseudo_perplexity_interval=interval(
            documents, perplexity_of, seed, bootstrap_samples
        ),
        tokens=int(documents[:, 1].sum()),
        documents=len(documents),
        masked_loss=float(masked[:, 0].sum() / masked[:, 1].sum()),
        masked_accuracy=float(_accuracy(masked.sum(axis=0))),
        masked_accuracy_interval=interval(masked, _accuracy, seed, bootstrap_samples),
        masked_tokens=int(masked[:, 1].sum()),
    )


def span_metrics(
    model: Llama,
    packed: PackedSet,
    source: str,
    tokenizer: Path,
    seed: int,
    bootstrap_samples: int,
) -> SpanMetrics:
    """Loss and accuracy on hidden spans of a source's held-out documents, with
    intervals; arguments as for `masked_metrics`. Spans are T5's, independent of the
    model's training; sentinels do not count.
    """
    read = held_out_rows(packed, source, model.shape)
    corruption = corruption_of(
        SpanCorruption(), load(tokenizer), seed, packed.sequence_length
    )
    laid = corruption(read, HELD_OUT_STEP)
    token_bytes = read_token_bytes(tokenizer, torch.device("cpu")).numpy()
    scored = token_columns(
        model,
        np.arange(len(read.rows)),
        laid.inputs,
        laid.targets,
        laid.positions,
        token_bytes,
        laid.beside(),
    )
    values = np.zeros((*read.tokens.shape, COLUMNS))
    assert laid.places is not None
    row, number = np.nonzero(laid.places >= 0)
    values[row, laid.places[row, number]] = scored[row, number]
    documents = by_document(packed, source, values)
    nats, tokens = documents.sum(axis=0)[:2]
    return SpanMetrics(
        span_loss=float(nats / tokens),
        span_accuracy=float(_accuracy(documents.sum(axis=0))),
        span_accuracy_interval=interval(documents, _accuracy, seed, bootstrap_samples),
        tokens=int(tokens),
        documents=len(documents),
    )


def one_by_one(masking: Masking, read: Read) -> np.ndarray:
    """Mask of tokens (n, t) to measure alone: a random sample of each row, without
    special tokens and padding.
    """
    rows = read.tokens
    may = masking.may_be_masked(read.tokens, read.positions)
    numbers, places = (
        np.broadcast_to(index, rows.shape)
        for index in (np.arange(len(rows))[:, None], np.arange(rows.shape[1]))
    )
    drawn = np.where(
        may, draws(masking.key("alone", HELD_OUT_STEP), numbers, places), 2.0
    )
    order = np.argsort(drawn, axis=1, kind="stable")[:, :PLACES_PER_ROW]
    chosen = np.zeros(rows.shape, dtype=bool)
    np.put_along_axis(chosen, order, True, axis=1)
    return chosen & may


def _accuracy(sums: np.ndarray) -> np.ndarray:
    return sums[..., 3] / np.maximum(sums[..., 1], 1.0)

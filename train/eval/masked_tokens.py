"""Metrics of encoders on masked tokens of held-out documents, and of encoder-decoders
on hidden spans.

15 % of a row are masked together, for comparability independent of the model's
training.
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
from gristmill.train.eval.held_out import (
    COLUMNS,
    HELD_OUT_STEP,
    by_document,
    held_out_positions,
    held_out_rows,
    read_token_bytes,
    token_columns,
)
from gristmill.train.eval.intervals import Estimate, interval
from gristmill.train.models.transformer import Llama
from gristmill.train.objectives.masked_rows import masking_of
from gristmill.train.objectives.span_rows import corruption_of

MEASURED = Masked(rate=0.15, mask_share=1.0, random_share=0.0)
"""Devlin et al. 2019, section 3.1, with the mask token for every chosen token."""


@dataclass(frozen=True)
class MaskedMetrics:
    """Metrics of an encoder on the held-out documents of a source.

    Attributes:
        masked_loss: nats per masked token.
        masked_accuracy, masked_accuracy_interval: share of these predicted correctly.
        masked_tokens, documents: numbers of these and of their documents.
    """

    masked_loss: float
    masked_accuracy: float
    masked_accuracy_interval: Estimate
    masked_tokens: int
    documents: int


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
    """Loss and accuracy on masked tokens of a source's held-out documents, with
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
    laid = masking(read, HELD_OUT_STEP)
    scored = token_columns(model, laid.inputs, laid.targets, positions, token_bytes)
    documents = by_document(packed, source, scored)
    nats, tokens = documents.sum(axis=0)[:2]
    return MaskedMetrics(
        masked_loss=float(nats / tokens),
        masked_accuracy=float(_accuracy(documents.sum(axis=0))),
        masked_accuracy_interval=interval(
            documents, _accuracy, seed, bootstrap_samples
        ),
        masked_tokens=int(tokens),
        documents=len(documents),
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


def _accuracy(sums: np.ndarray) -> np.ndarray:
    return sums[..., 3] / np.maximum(sums[..., 1], 1.0)

"""Metrics of encoders on masked tokens of held-out documents, and of encoder-decoders
on hidden spans.

15 % of a row are masked together, for comparability independent of the model's
training.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from gristmill.mixtures.objectives.span_objectives import SpanCorruption
from gristmill.mixtures.objectives.token_objectives import Masked
from gristmill.tokenize.encoding.tokenizer import load
from gristmill.tokenize.packed import PackedSet
from gristmill.train.eval.held_out import (
    COLUMNS,
    HELD_OUT_STEP,
    ROWS_PER_FORWARD,
    by_document,
    held_out_rows,
    read_token_bytes,
    score_rows,
)
from gristmill.train.eval.intervals import interval
from gristmill.train.loop.batch_plan import slices
from gristmill.train.models.transformer import Llama
from gristmill.train.objectives.masked_rows import masking_of
from gristmill.train.objectives.prediction_targets import Layout
from gristmill.train.objectives.span_rows import corruption_of

MEASURED = Masked(rate=0.15, mask_share=1.0, random_share=0.0)
"""Devlin et al. 2019, section 3.1, with the mask token for every chosen token."""


def hidden_token_metrics(
    model: Llama,
    packed: PackedSet,
    source: str,
    tokenizer: Path,
    seed: int,
    bootstrap_samples: int,
) -> dict[str, object]:
    """Loss and accuracy on hidden tokens of a source's held-out documents, with
    intervals.

    Args:
        model: an encoder, measured on masked tokens, or an encoder-decoder, on T5's
            spans, whatever it was trained on; sentinels do not count.
        packed: a set with held-out rows.
        source: a source with held-out rows.
        tokenizer: folder of its tokenizer.
        seed, bootstrap_samples: of the draws and of the bootstrap over documents.

    Returns:
        `hidden_loss` in nats per token, `hidden_accuracy` with its interval, and the
        numbers of `hidden_tokens` and `documents`.
    """
    text = load(tokenizer)
    read = held_out_rows(packed, source, model.shape)
    token_bytes = read_token_bytes(tokenizer, next(model.parameters()).device)
    layout: Layout
    if model.shape.kind == "encoder":
        layout = masking_of(MEASURED, text, seed)
    else:
        layout = corruption_of(SpanCorruption(), text, seed, packed.sequence_length)
    laid = layout(read, HELD_OUT_STEP)
    positions = read.positions if laid.places is None else laid.positions
    scored = np.zeros((*laid.targets.shape, COLUMNS))
    for part in slices(len(scored), ROWS_PER_FORWARD):
        places = None if positions is None else positions[part]
        columns = score_rows(model, laid.of_rows(part), places, token_bytes)
        scored[part] = columns.movedim(0, -1).cpu().numpy()
    values = scored
    if laid.places is not None:
        values = np.zeros((*read.tokens.shape, COLUMNS))
        row, number = np.nonzero(laid.places >= 0)
        values[row, laid.places[row, number]] = scored[row, number]
    documents = by_document(packed, source, values)
    sums = documents.sum(axis=0)
    accuracy = interval(
        documents, lambda sums: sums[..., 3] / sums[..., 1], seed, bootstrap_samples
    )
    return {
        "hidden_loss": float(sums[0] / sums[1]),
        "hidden_accuracy": accuracy,
        "hidden_tokens": int(sums[1]),
        "documents": len(documents),
    }

"""Metrics of encoders on masked tokens of held-out documents, and of encoder-decoders
on hidden spans.

15 % of a row are masked together, for comparability independent of the model's
training.
"""

from __future__ import annotations

from pathlib import Path

from gristmill.mixtures.objectives.span_objectives import SpanCorruption
from gristmill.mixtures.objectives.token_objectives import Masked
from gristmill.tokenize.encoding.tokenizer import load
from gristmill.tokenize.packed import PackedSet
from gristmill.train.eval.held_out import read_token_bytes, score_documents
from gristmill.train.eval.intervals import interval
from gristmill.train.loop.objective import JsonObject
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
) -> JsonObject:
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
    layout: Layout
    if model.shape.kind == "encoder":
        layout = masking_of(MEASURED, text, seed)
    else:
        layout = corruption_of(SpanCorruption(), text, seed, packed.sequence_length)
    token_bytes = read_token_bytes(tokenizer, next(model.parameters()).device)
    documents = score_documents(model, packed, source, token_bytes, layout)
    sums = documents.sum(axis=0)
    return {
        "hidden_loss": float(sums[0] / sums[1]),
        "hidden_accuracy": interval(
            documents, lambda sums: sums[..., 3] / sums[..., 1], seed, bootstrap_samples
        ),
        "hidden_tokens": int(sums[1]),
        "documents": len(documents),
    }

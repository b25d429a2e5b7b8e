"""A model on held-out rows, document by document: what an interval of bits per byte is made of.

The tokens of a row are not independent, documents (nearly) are: they are the units that the bootstrap draws.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gristmill.tokenize.packed import PackedSet
from gristmill.train.evaluation.held_out import LARGEST_EXPONENT, ROWS_PER_FORWARD
from gristmill.train.evaluation.intervals import interval
from gristmill.train.models.llama import Llama
from gristmill.train.objectives.losses import next_tokens, score_tokens

COLUMNS = 4
"""Per document: nats, predicted tokens, their bytes, tokens that were the likeliest."""


@torch.no_grad()
def score_documents(model: Llama, packed: PackedSet, source: str, token_bytes: Tensor) -> np.ndarray:
    """Sums over each held-out document of a source: (documents, COLUMNS) float64.

    The first token of a row is predicted from nothing, so it counts nowhere. Where a set has no table of pieces,
    rows stand for documents.
    """
    rows = packed.validation(source)
    masked = model.shape.document_mask
    positions = packed.validation_boundaries(source).positions(rows.shape[1]) if masked else None
    values = np.zeros((*rows.shape, COLUMNS))
    for start in range(0, len(rows), ROWS_PER_FORWARD):
        part = slice(start, start + ROWS_PER_FORWARD)
        ids = torch.from_numpy(rows[part].astype(np.int64)).to(token_bytes.device)
        places = None if positions is None else torch.from_numpy(positions[part]).to(token_bytes.device)
        nll, correct = model(ids, partial(score_tokens, targets=next_tokens(ids)), positions=places)
        num_bytes = token_bytes[ids]
        found = torch.stack([nll[:, :-1].double(), torch.ones_like(nll[:, 1:], dtype=torch.float64),
                             num_bytes[:, 1:].double(), correct[:, :-1].double()], dim=-1)
        values[start : start + len(ids), 1:] = found.cpu().numpy()
    pieces = packed.validation_pieces(source)
    if not len(pieces):
        sums: np.ndarray = values.sum(axis=1)
        return sums
    first = pieces["row"].to_numpy() * packed.sequence_length + pieces["start"].to_numpy()
    total = np.vstack([np.zeros(COLUMNS), np.cumsum(values.reshape(-1, COLUMNS), axis=0)])
    per_piece = total[first + pieces["length"].to_numpy()] - total[first]
    _, document = np.unique(pieces["id"].to_numpy(zero_copy_only=False), return_inverse=True)
    summed = np.zeros((int(document.max()) + 1, COLUMNS))
    np.add.at(summed, document, per_piece)
    return summed[summed[:, 1] > 0]


def source_metrics(documents: np.ndarray, seed: int, resamples: int) -> dict[str, Any]:
    """Loss, perplexity, bits per byte and token accuracy over documents, with the intervals of the middle two.

    Args:
        documents: (n, COLUMNS), as from `score_documents`.
        seed, resamples: of the bootstrap over documents.
    """
    nats, tokens, num_bytes, correct = documents.sum(axis=0)
    found = {"loss": nats / tokens, "perplexity": float(_perplexity(documents.sum(axis=0))), "tokens": int(tokens),
             "documents": len(documents), "token_accuracy": correct / tokens,
             "perplexity_interval": interval(documents, _perplexity, seed, resamples)}
    if num_bytes:
        found["bits_per_byte"] = float(_bits(documents.sum(axis=0)))
        found["bits_per_byte_interval"] = interval(documents, _bits, seed, resamples)
    return found


def _bits(sums: np.ndarray) -> np.ndarray:
    ratio: np.ndarray = sums[..., 0] / math.log(2.0) / sums[..., 2]
    return ratio


def _perplexity(sums: np.ndarray) -> np.ndarray:
    ratio: np.ndarray = np.exp(np.minimum(sums[..., 0] / sums[..., 1], LARGEST_EXPONENT))
    return ratio

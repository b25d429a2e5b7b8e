"""What a packing costs: the rows that it makes, what it pads and drops, and the documents that it cuts."""

from __future__ import annotations

from typing import Any

import numpy as np

from gristmill.dataprep.kernels import kernel
from gristmill.tokenize.mixing.best_fit import count_bins
from gristmill.tokenize.mixing.layouts import Layout, Packing, lay_out
from gristmill.tokenize.mixing.streams import Stream


def account(stream: Stream, begin: int, end: int, layout: Layout, packing: Packing) -> dict[str, Any]:
    """What a packing of the tokens [begin, end) of a stream costs.

    Returns:
        `rows`, `tokens` (of documents), `padding_tokens`, `dropped_tokens` (of [begin, end), in no row), `documents`,
        and `split_documents` and `split_tokens`: those that a row's end cuts, and their tokens in [begin, end).
    """
    cut, cut_tokens = cut_documents(stream.starts, np.sort(layout.at + layout.length), begin, end)
    return _described(stream, begin, end, packing, layout.rows, layout.tokens, cut, cut_tokens)


@kernel
def cut_documents(starts: np.ndarray, ends: np.ndarray, begin: int, end: int) -> tuple[int, int]:
    """How many documents some run ends within, and how many tokens they have in [begin, end).

    Args:
        starts: int64 of shape (k + 1,), see `Stream`.
        ends: int64 of shape (runs,), where runs end, ascending.
        begin, end: what of the stream is looked at.
    """
    entry, last, documents, tokens = 0, -1, 0, 0
    for place in ends:
        while entry < len(starts) - 1 and starts[entry + 1] <= place:
            entry += 1
        if starts[entry] < place and entry != last:
            documents += 1
            tokens += min(starts[entry + 1], end) - max(starts[entry], begin)
            last = entry
    return documents, tokens


def compare(stream: Stream, end: int, used: Packing, layout: Layout) -> dict[str, dict[str, Any]]:
    """`account` of every packing there is, by its name, for the same tokens [0, end) of a stream.

    Args:
        stream: the documents.
        end: up to where.
        used: the packing that was chosen; the others have its sequence length, and go through the stream at one go.
        layout: what came of it.
    """
    accounts = {}
    for best_fit in (False, True):
        for aligned in (False, True):
            packing = Packing(used.sequence_length, best_fit, aligned)
            if packing == used:
                accounts[packing.name] = account(stream, 0, end, layout, packing)
            elif best_fit:
                # Where each document goes is not asked for.
                counted = count_best_fit(stream.starts, end, packing.sequence_length, aligned)
                accounts[packing.name] = _described(stream, 0, end, packing, *counted)
            else:
                accounts[packing.name] = account(stream, 0, end, lay_out(stream, 0, end, packing), packing)
    return accounts


def _described(
    stream: Stream, begin: int, end: int, packing: Packing, rows: int, tokens: int, cut: int, cut_tokens: int
) -> dict[str, Any]:
    first = int(np.searchsorted(stream.starts, begin, side="right"))
    last = int(np.searchsorted(stream.starts, end, side="left"))
    return {
        "rows": rows, "tokens": tokens, "padding_tokens": rows * packing.sequence_length - tokens,
        "dropped_tokens": end - begin - tokens, "documents": max(0, last - first + 1) if end > begin else 0,
        "split_documents": cut, "split_tokens": cut_tokens,
    }


@kernel
def count_best_fit(starts: np.ndarray, end: int, length: int, aligned: bool) -> tuple[int, int, int, int]:
    """What the best fit makes of the tokens [0, end) of a stream, without laying it out.

    Args:
        starts: int64 of shape (k + 1,), see `Stream`.
        end: up to where.
        length: tokens per row.
        aligned: whether only the first `length` tokens of each document are taken.

    Returns:
        rows, tokens in them, and how many documents are cut, with their tokens in [0, end).
    """
    rests = np.zeros(length + 1, dtype=np.int64)
    rows, tokens, cut, cut_tokens = 0, 0, 0, 0
    for entry in range(len(starts) - 1):
        start, stop = starts[entry], starts[entry + 1]
        if start >= end:
            break
        size = min(stop, end) - start
        if min(start + length, end) < stop:
            cut += 1
            cut_tokens += size
        if aligned:
            size = min(size, length)
        rows += size // length
        rests[size % length] += 1
        tokens += size
    return rows + count_bins(rests, length), tokens, cut, cut_tokens

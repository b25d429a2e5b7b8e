"""The tokens of a shard's rows, copied from the token parts some rows at a time, while these are in the cache.

What is gathered is hashed and written next: of a whole shard, every token would come from the main memory three times.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numba import carray

from gristmill.dataprep.files import as_path, is_local
from gristmill.dataprep.kernels import kernel
from gristmill.tokenize.gather import pointer
from gristmill.tokenize.mixing.best_fit import by_bin
from gristmill.tokenize.mixing.contents import Contents
from gristmill.tokenize.mixing.plan import Documents, Plan
from gristmill.tokenize.mixing.spread import order_below
from gristmill.tokenize.packed_files import DTYPES, read_tokens

BLOCK_BYTES = 1_000_000
"""About the second-level cache of a core."""


def blocks_of(
    plan: Plan, documents: Documents, contents: Contents, rows: int, block_rows: int | None = None
) -> Iterator[np.ndarray]:
    """The tokens of a shard, some rows after the other.

    Args:
        plan: of the mixture.
        documents: all of them.
        contents: of the shard, ordered by row.
        rows: of the shard.
        block_rows: rows at a time; as BLOCK_BYTES say if None.

    Yields:
        (n, sequence_length) in the plan's dtype, in memory that the next block takes; one empty block of no rows.
    """
    parts = Parts([as_path(part) for part in plan.parts], DTYPES[plan.dtype])
    length, pieces = plan.sequence_length, len(contents.row)
    # What is not on a local disk is read part by part, whole: so only once.
    each = rows if not parts.local else block_rows or max(1, BLOCK_BYTES // (length * parts.dtype.itemsize))
    each = max(1, min(each, rows))
    blocks = max(1, -(-rows // each))
    part, origin, target, text = (np.empty(pieces, dtype=np.int64) for _ in range(4))
    route(contents.row, contents.start, contents.length, contents.document, contents.offset, parts.begins,
          documents.part, documents.offset, documents.tokens, length, part, origin, target, text)
    order, _ = order_below(origin, int(parts.begins[-1]))
    block = (contents.row // each).astype(np.int32)
    bounds = np.searchsorted(block, np.arange(blocks + 1))
    order = order[by_bin(block[order], bounds)]  # by origin within each block
    filled = np.bincount(contents.row, contents.length, rows).astype(np.int64)
    out = np.empty((each, length), dtype=parts.dtype)
    for number in range(blocks):
        first = number * each
        taken = out[: min(each, rows - first)]
        for opened, chosen in parts.opened(order[bounds[number] : bounds[number + 1]], origin):
            gather(opened, parts.begins, chosen, part, origin, target, text, contents.length, first * length, plan.eos,
                   taken.reshape(-1))
        pad_rows(taken, filled[first : first + len(taken)], plan.pad)
        yield taken


class Parts:
    """The token parts of a mixture, opened when they are first needed.

    Args:
        paths: of the files, by number.
        dtype: of the tokens.

    Attributes:
        begins: int64 of shape (parts + 1,), tokens in the parts before each.
        local: whether all of them lie on a local disk.
    """

    def __init__(self, paths: Sequence[Path], dtype: np.dtype[Any]) -> None:
        self.dtype, self.local = dtype, all(map(is_local, paths))
        sizes = [path.stat().st_size // dtype.itemsize for path in paths]
        self.begins = np.cumsum([0, *sizes], dtype=np.int64)
        self._paths, self._mapped = paths, list[np.ndarray]()
        self._addresses = np.zeros(len(paths), dtype=np.uint64)

    def opened(self, chosen: np.ndarray, origin: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Pieces whose parts are in memory: all at once where that is a memory map, else those of one part at a time.

        Args:
            chosen: int64 of shape (k,), numbers of pieces, ordered by their origin.
            origin: int64 of shape (n,), first token of every piece, counted through all parts.

        Yields:
            where the first token of each part lies in memory (uint64 of shape (parts,); valid until the next step), and
            some of `chosen`.
        """
        if self.local:
            if not self._mapped:
                self._mapped = [read_tokens(path, self.dtype) for path in self._paths]
                self._addresses[:] = [part.ctypes.data for part in self._mapped]
            yield self._addresses, chosen
            return
        bounds = [*np.searchsorted(origin[chosen], self.begins[:-1]).tolist(), len(chosen)]
        for number, (first, last) in enumerate(pairwise(bounds)):
            if first < last:
                part = read_tokens(self._paths[number], self.dtype)
                self._addresses[number] = part.ctypes.data
                yield self._addresses, chosen[first:last]


@kernel
def route(
    row: np.ndarray, start: np.ndarray, length: np.ndarray, document: np.ndarray, offset: np.ndarray,
    begins: np.ndarray, parts: np.ndarray, first: np.ndarray, tokens: np.ndarray, row_tokens: int, part: np.ndarray,
    origin: np.ndarray, target: np.ndarray, text: np.ndarray,
) -> None:  # fmt: skip
    """Where each piece comes from and goes to.

    Args:
        row, start, length, document, offset: see Contents.
        begins: see Parts.
        parts, first, tokens: of all documents, see Documents.
        row_tokens: tokens per row.
        part: int64, filled: the number of its part.
        origin: int64, filled: the first token, counted through all parts.
        target: int64, filled: where that goes.
        text: int64, filled: how many tokens there are; what is missing to `length` is an end of text.
    """
    for piece in range(len(row)):
        one = document[piece]
        part[piece] = parts[one]
        origin[piece] = begins[parts[one]] + first[one] + offset[piece]
        target[piece] = row[piece] * row_tokens + start[piece]
        text[piece] = min(length[piece], tokens[one] - offset[piece])


@kernel
def gather(
    addresses: np.ndarray, begins: np.ndarray, chosen: np.ndarray, part: np.ndarray, origin: np.ndarray,
    target: np.ndarray, text: np.ndarray, length: np.ndarray, before: int, eos: int, out: np.ndarray,
) -> None:  # fmt: skip
    """Copy pieces to where they go, each with its end of text.

    Args:
        addresses: uint64 (parts,), where each part's first token lies in memory; who calls keeps them there.
        begins: see Parts.
        chosen: int64 of shape (k,), which pieces.
        part, origin, target, text: see `route`.
        length: of the pieces, the end of text counted.
        before: target of the first token of `out`.
        eos: the end of text.
        out: tokens, flat.
    """
    size = np.uint64(out.itemsize)
    for piece in chosen:
        # Unsigned, as no index counts from the end: what makes vector instructions of the loop.
        here, number = np.uint64(target[piece] - before), np.uint64(text[piece])
        if number:
            passed = np.uint64(origin[piece] - begins[part[piece]])
            source = carray(pointer(addresses[part[piece]] + passed * size), (number,), out.dtype)
            for step in range(number):
                out[here + step] = source[step]
        if number < np.uint64(length[piece]):
            out[here + number] = eos


@kernel
def pad_rows(tokens: np.ndarray, filled: np.ndarray, pad: int) -> None:
    """Set the tokens (n, L) of each row behind its first `filled` (int64, shape (n,)) to the padding."""
    for row in range(len(tokens)):
        tokens[row, filled[row] :] = pad

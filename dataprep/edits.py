"""Edits: byte spans of a text with their replacements, so that a stage can change text
without rewriting documents.

A stage that edits writes a column `edits` into its annotation table: per judged
document a list of replacements in bytes of the UTF-8 text that the stage read,
ascending, disjoint and on code point boundaries. `documents.read_documents` applies the
edits of all stages in order. The expensive kernels are in `text/edit_kernels.py`, so
that commands that only read documents do not import numba.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from typing import NamedTuple, TypedDict

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.core.arrays import Column, offsets_of

EDITS = "edits"
"""Name of the column."""
EDIT_TYPE = pa.struct(
    [("begin", pa.int64()), ("end", pa.int64()), ("text", pa.string())]
)
EDITS_TYPE = pa.large_list(EDIT_TYPE)
MOST_PAIRS = 1_000_000
"""Maximum number of compared pairs of lines; a longer difference becomes one edit."""

Edit = tuple[int, int, str]
"""Bytes `begin` up to `end` of the text, and their replacement (empty for a cut)."""


class RuleEdits(NamedTuple):
    """Edits of n texts by some rules.

    Attributes:
        edits: EDITS_TYPE.
        counts, sizes: applications, and removed or replaced bytes, per text and rule:
            int64 of shape (n, rules), or (n,) for one rule.
        examples: per text a list of some applications, for people; None if the rules
            have none.
    """

    edits: pa.Array
    counts: np.ndarray
    sizes: np.ndarray
    examples: pa.Array | None = None


class Applications(TypedDict):
    """Applications of a rule or a function that edits; those to dropped documents are
    included.

    Attributes:
        documents: documents that it was applied to.
        bytes: bytes that it removed or replaced.
    """

    documents: int
    times: int
    bytes: int


class BadEditError(ValueError):
    """Edits overlap, are out of order or reach beyond their text."""


def edits_array(edits: Sequence[Sequence[Edit]]) -> pa.Array:
    """Column of edits of n documents; an empty list leaves a document unchanged."""
    sizes = [len(document_edits) for document_edits in edits]
    flat = [edit for document_edits in edits for edit in document_edits]
    begins, ends, texts = ([edit[part] for edit in flat] for part in range(3))
    return edits_column(
        pa.array(begins, pa.int64()),
        pa.array(ends, pa.int64()),
        pa.array(texts, pa.string()),
        offsets_of(sizes),
    )


def derive_edits(before: str, after: str) -> Iterator[Edit]:
    """Derive the edits, in bytes, from one text to another: of whole lines, ascending
    and separated by equal lines.

    Raises:
        UnicodeEncodeError: a text cannot be encoded as UTF-8.
    """
    lines, new_lines = (
        text.encode().splitlines(keepends=True) for text in (before, after)
    )
    head = _num_equal(lines, new_lines)
    tail = _num_equal(lines[head:][::-1], new_lines[head:][::-1])
    begin = sum(map(len, lines[:head]))
    lines = lines[head : len(lines) - tail]
    new_lines = new_lines[head : len(new_lines) - tail]
    if len(lines) * len(new_lines) > MOST_PAIRS:
        lines, new_lines = [b"".join(lines)], [b"".join(new_lines)]
    places = np.cumsum([begin, *map(len, lines)]).tolist()
    matcher = SequenceMatcher(None, lines, new_lines)
    for kind, first, last, new_first, new_last in matcher.get_opcodes():
        if kind != "equal":
            text = b"".join(new_lines[new_first:new_last]).decode()
            yield places[first], places[last], text


def _num_equal(lines: Sequence[bytes], new_lines: Sequence[bytes]) -> int:
    """Number of equal lines at the beginning of two texts."""
    pairs = enumerate(zip(lines, new_lines, strict=False))
    return next(
        (number for number, (line, new_line) in pairs if line != new_line),
        min(len(lines), len(new_lines)),
    )


def edits_column(
    begins: pa.Array, ends: pa.Array, texts: pa.Array, offsets: np.ndarray
) -> pa.Array:
    """Column of edits; text i has those from offsets[i] up to offsets[i + 1]."""
    values = pa.StructArray.from_arrays([begins, ends, texts], fields=list(EDIT_TYPE))
    return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), values)


def cuts_array(begins: np.ndarray, ends: np.ndarray, offsets: np.ndarray) -> pa.Array:
    """Column of edits that only cut.

    Args:
        begins, ends: int64 of shape (m,), bytes within each document's text.
        offsets: int64 of shape (n + 1,); document i has the cuts from offsets[i] up to
            offsets[i + 1].
    """
    texts = pa.repeat("", len(begins))
    return edits_column(pa.array(begins), pa.array(ends), texts, offsets)


def join_spans(
    text: np.ndarray, begins: np.ndarray, ends: np.ndarray, num_texts: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Join spans of the same text that touch or overlap.

    Args:
        text, begins, ends: int64, position of each span's text, and bytes of it; in any
            order.

    Returns:
        begins, ends, offsets: as `cuts_array` takes them.
    """
    order = np.lexsort((begins, text))
    text, begins, ends = text[order], begins[order], ends[order]
    # positions that do not touch those of another text
    base = text * (ends.max(initial=0) + 1)
    reach = np.maximum.accumulate(ends + base)
    starts = np.ones(len(text) + 1, bool)
    starts[1:-1] = (begins + base)[1:] > reach[:-1]
    first, last = starts[:-1], starts[1:]
    offsets = offsets_of(np.bincount(text[first], minlength=num_texts))
    return begins[first], (reach - base)[last], offsets


def apply_edits(texts: Column, edits: Column) -> pa.Array:
    """Apply edits to texts; a null list changes nothing.

    Args:
        texts: n strings.
        edits: n lists of EDITS_TYPE.

    Returns:
        `large_string` of n values.

    Raises:
        BadEditError: edits overlap, are out of order or reach beyond their text.
    """
    from gristmill.dataprep.text.edit_kernels import replace_spans
    from gristmill.dataprep.text.kernels import text_buffers

    if isinstance(edits, pa.ChunkedArray):
        edits = edits.combine_chunks()
    edited, edited_offsets, bad_document = replace_spans(
        *text_buffers(texts), *_buffers(edits)
    )
    if bad_document >= 0:
        raise BadEditError(
            f"the edits of document {bad_document} of {len(edits)} "
            "overlap or reach beyond its text"
        )
    return pa.LargeStringArray.from_buffers(
        len(edits), pa.py_buffer(edited_offsets), pa.py_buffer(edited)
    )


def size_changes(edits: Column) -> np.ndarray:
    """Bytes by which edits lengthen each of n texts: int64 of shape (n,), mostly
    negative; 0 for a null list.
    """
    if isinstance(edits, pa.ChunkedArray):
        edits = edits.combine_chunks()
    values = edits.flatten()
    grown = pc.subtract(
        pc.binary_length(values.field("text")).cast(pa.int64()),
        pc.subtract(values.field("end"), values.field("begin")),
    )
    total = offsets_of(grown.to_numpy(zero_copy_only=False))
    return np.diff(total[_firsts(edits)])


def _firsts(edits: pa.Array) -> np.ndarray:
    """Position of the first edit of each text, and of the end: int64."""
    counts = pc.fill_null(pc.list_value_length(edits), 0).to_numpy(zero_copy_only=False)
    return offsets_of(counts)


def then(first: pa.Array, second: pa.Array) -> pa.Array:
    """Compose edits: `first`, then `second`.

    Args:
        first: edits of n texts (EDITS_TYPE).
        second: edits of the n texts after `first`.

    Returns:
        edits of the n texts: `apply(text, then(a, b)) == apply(apply(text, a), b)`.
        Adjacent edits are merged, so that every edit that changes something has kept
        text on both sides.

    Raises:
        BadEditError: edits overlap or are out of order.
    """
    if len(second.flatten()) == 0:
        return first
    if len(first.flatten()) == 0:
        return second
    from gristmill.dataprep.text.edit_kernels import compose

    operands = _buffers(first), _buffers(second)
    for firsts, begins, ends, *_ in operands:
        # The edits of each text are ascending and disjoint.
        previous_ends = np.zeros(len(begins), np.int64)
        previous_ends[1:] = ends[:-1]
        previous_ends[firsts[:-1][firsts[:-1] < len(begins)]] = 0
        violations = np.flatnonzero((begins < previous_ends) | (ends < begins))
        if len(violations):
            text = int(np.searchsorted(firsts, violations[0], side="right")) - 1
            raise BadEditError(
                f"the edits of document {text} of {len(firsts) - 1} "
                "overlap or are out of order"
            )
    offsets, begins, ends, data, cuts = compose(*operands[0], *operands[1])
    texts = pa.LargeStringArray.from_buffers(
        len(begins), pa.py_buffer(cuts), pa.py_buffer(data)
    ).cast(pa.string())
    return edits_column(pa.array(begins), pa.array(ends), texts, offsets)


def _buffers(
    edits: pa.Array,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    from gristmill.dataprep.text.kernels import text_buffers

    values = edits.flatten()  # null lists have no values
    data, offsets = text_buffers(values.field("text"))
    return (
        _firsts(edits),
        values.field("begin").to_numpy(zero_copy_only=False).astype(np.int64),
        values.field("end").to_numpy(zero_copy_only=False).astype(np.int64),
        data,
        offsets,
    )

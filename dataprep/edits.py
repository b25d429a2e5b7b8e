"""Edits: how a stage changes text without touching the documents. Spans of bytes, each with what takes its place.

A stage that edits writes a column `edits` into its annotation table: per judged document a list of replacements in
bytes of the UTF-8 text as that stage read it, ascending and disjoint, on the borders of code points. Whoever reads
text through `documents.read_documents` gets it with the edits of all stages before applied, in their order. What takes
time is in `text/edit_kernels.py`, so that who only looks at documents does not wait for numba.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

EDITS = "edits"
"""Name of the column."""
EDIT_TYPE = pa.struct([("begin", pa.int64()), ("end", pa.int64()), ("text", pa.string())])
EDITS_TYPE = pa.large_list(EDIT_TYPE)

Edit = tuple[int, int, str]
"""Bytes `begin` up to `end` of the text, and what takes their place (empty: they are cut)."""


class BadEditError(ValueError):
    """Edits overlap, are out of order or reach beyond their text."""


def edits_array(edits: Sequence[Sequence[Edit]]) -> pa.Array:
    """The column of n documents; an empty list where one stays as it is."""
    sizes = [len(of_one) for of_one in edits]
    flat = [edit for of_one in edits for edit in of_one]
    begins, ends, texts = ([edit[part] for edit in flat] for part in range(3))
    values = pa.StructArray.from_arrays(
        [pa.array(begins, pa.int64()), pa.array(ends, pa.int64()), pa.array(texts, pa.string())],
        fields=list(EDIT_TYPE),
    )
    return pa.LargeListArray.from_arrays(pa.array(np.concatenate([[0], np.cumsum(sizes)]), pa.int64()), values)


def cuts_array(begins: np.ndarray, ends: np.ndarray, offsets: np.ndarray) -> pa.Array:
    """The column of edits that only cut.

    Args:
        begins, ends: int64 of shape (m,), bytes within each document's text.
        offsets: int64 of shape (n + 1,); document i has the cuts from offsets[i] up to offsets[i + 1].
    """
    nothing = pa.array(np.zeros(len(begins), np.int8)).cast(pa.string())
    texts = pc.replace_substring(nothing, "0", "")
    values = pa.StructArray.from_arrays([pa.array(begins), pa.array(ends), texts], fields=list(EDIT_TYPE))
    return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), values)


def apply_edits(texts: pa.Array | pa.ChunkedArray, edits: pa.Array | pa.ChunkedArray) -> pa.Array:
    """The texts with their edits applied; a null list changes nothing.

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
    counts = pc.fill_null(pc.list_value_length(edits), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    data, offsets = text_buffers(texts)
    values = edits.flatten()  # null lists have no values in here
    firsts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    begins = values.field("begin").to_numpy(zero_copy_only=False).astype(np.int64)
    ends = values.field("end").to_numpy(zero_copy_only=False).astype(np.int64)
    new_data, new_offsets = text_buffers(values.field("text"))
    made, made_offsets, bad = replace_spans(data, offsets, firsts, begins, ends, new_data, new_offsets)
    if bad >= 0:
        raise BadEditError(f"the edits of document {bad} of {len(counts)} overlap or reach beyond its text")
    return pa.LargeStringArray.from_buffers(len(counts), pa.py_buffer(made_offsets), pa.py_buffer(made))


def size_changes(edits: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """By how many bytes each of n texts grows: int64 of shape (n,), mostly negative; 0 for a null list."""
    if isinstance(edits, pa.ChunkedArray):
        edits = edits.combine_chunks()
    counts = pc.fill_null(pc.list_value_length(edits), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    values = edits.flatten()
    grown = pc.subtract(
        pc.binary_length(values.field("text")).cast(pa.int64()), pc.subtract(values.field("end"), values.field("begin"))
    )
    total = np.concatenate([[0], np.cumsum(grown.to_numpy(zero_copy_only=False).astype(np.int64))])
    ends = np.concatenate([[0], np.cumsum(counts)])
    changes: np.ndarray = np.diff(total[ends])
    return changes


def then(first: pa.Array, second: pa.Array) -> pa.Array:
    """The edits that do at once what `first` and after it `second` do.

    Args:
        first: edits of n texts (EDITS_TYPE).
        second: edits of those n texts as `first` leaves them.

    Returns:
        edits of the n texts: `apply(text, then(a, b)) == apply(apply(text, a), b)`. Neighbours are one edit, so that
        every edit but those that change nothing has kept text on both sides.

    Raises:
        BadEditError: edits overlap or are out of order.
    """
    if len(second.flatten()) == 0:
        return first
    if len(first.flatten()) == 0:
        return second
    from gristmill.dataprep.text.edit_kernels import compose

    rounds = _buffers(first), _buffers(second)
    for firsts, begins, ends, *_ in rounds:
        _check_order(firsts, begins, ends)
    offsets, begins, ends, data, cuts = compose(*rounds[0], *rounds[1])
    texts = pa.LargeStringArray.from_buffers(len(begins), pa.py_buffer(cuts), pa.py_buffer(data)).cast(pa.string())
    values = pa.StructArray.from_arrays([pa.array(begins), pa.array(ends), texts], fields=list(EDIT_TYPE))
    return pa.LargeListArray.from_arrays(pa.array(offsets), values)


def _buffers(edits: pa.Array) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    from gristmill.dataprep.text.kernels import text_buffers

    counts = pc.fill_null(pc.list_value_length(edits), 0).to_numpy(zero_copy_only=False)
    values = edits.flatten()
    data, offsets = text_buffers(values.field("text"))
    return (
        np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        values.field("begin").to_numpy(zero_copy_only=False).astype(np.int64),
        values.field("end").to_numpy(zero_copy_only=False).astype(np.int64),
        data,
        offsets,
    )


def _check_order(firsts: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> None:
    """See that the edits of each text follow one another (all int64; text i has those from firsts[i] on)."""
    after = np.zeros(len(begins), np.int64)
    after[1:] = ends[:-1]
    after[firsts[:-1][firsts[:-1] < len(begins)]] = 0
    wrong = np.flatnonzero((begins < after) | (ends < begins))
    if len(wrong):
        text = int(np.searchsorted(firsts, wrong[0], side="right")) - 1
        raise BadEditError(f"the edits of document {text} of {len(firsts) - 1} overlap or are out of order")

"""Edits: how a stage changes text without touching the documents. Spans of bytes, each with what takes its place.

A stage that edits writes a column `edits` into its annotation table: per judged document a list of replacements in
bytes of the UTF-8 text as that stage read it, ascending and disjoint, on the borders of code points. Whoever reads
text through `documents.read_documents` gets it with the edits of all stages before applied, in their order.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.dataprep.text.kernels import kernel, text_buffers

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
    if isinstance(edits, pa.ChunkedArray):
        edits = edits.combine_chunks()
    counts = pc.fill_null(pc.list_value_length(edits), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    data, offsets = text_buffers(texts)
    values = edits.flatten()  # null lists have no values in here
    firsts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    begins = values.field("begin").to_numpy(zero_copy_only=False).astype(np.int64)
    ends = values.field("end").to_numpy(zero_copy_only=False).astype(np.int64)
    new_data, new_offsets = text_buffers(values.field("text"))
    made, made_offsets, bad = _apply(data, offsets, firsts, begins, ends, new_data, new_offsets)
    if bad >= 0:
        raise BadEditError(f"the edits of document {bad} of {len(counts)} overlap or reach beyond its text")
    return pa.LargeStringArray.from_buffers(len(counts), pa.py_buffer(made_offsets), pa.py_buffer(made))


def size_changes(edits: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """By how many bytes each of n texts grows: int64 of shape (n,), mostly negative; 0 for a null list."""
    if isinstance(edits, pa.ChunkedArray):
        edits = edits.combine_chunks()
    counts = pc.fill_null(pc.list_value_length(edits), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    values = edits.flatten()
    grown = pc.subtract(pc.binary_length(values.field("text")).cast(pa.int64()),
                        pc.subtract(values.field("end"), values.field("begin")))  # fmt: skip
    total = np.concatenate([[0], np.cumsum(grown.to_numpy(zero_copy_only=False).astype(np.int64))])
    ends = np.concatenate([[0], np.cumsum(counts)])
    changes: np.ndarray = np.diff(total[ends])
    return changes


@kernel
def _apply(
    data: np.ndarray, offsets: np.ndarray, firsts: np.ndarray, begins: np.ndarray, ends: np.ndarray,
    new_data: np.ndarray, new_offsets: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, int]:  # fmt: skip
    number = len(offsets) - 1
    made_offsets = np.zeros(number + 1, np.int64)
    for text in range(number):
        size, at = offsets[text + 1] - offsets[text], 0
        length = size
        for edit in range(firsts[text], firsts[text + 1]):
            if begins[edit] < at or ends[edit] < begins[edit] or ends[edit] > size:
                return np.empty(0, np.uint8), made_offsets, text
            at = ends[edit]
            length += new_offsets[edit + 1] - new_offsets[edit] - (ends[edit] - begins[edit])
        made_offsets[text + 1] = made_offsets[text] + length
    made = np.empty(made_offsets[number], np.uint8)
    to = 0
    for text in range(number):
        at = offsets[text]
        for edit in range(firsts[text], firsts[text + 1]):
            stop = offsets[text] + begins[edit]
            made[to : to + stop - at] = data[at:stop]
            to += stop - at
            length = new_offsets[edit + 1] - new_offsets[edit]
            made[to : to + length] = new_data[new_offsets[edit] : new_offsets[edit + 1]]
            to += length
            at = offsets[text] + ends[edit]
        made[to : to + offsets[text + 1] - at] = data[at : offsets[text + 1]]
        to += offsets[text + 1] - at
    return made, made_offsets, -1


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
    rounds = _buffers(first), _buffers(second)
    for firsts, begins, ends, *_ in rounds:
        _check_order(firsts, begins, ends)
    offsets, begins, ends, data, cuts = _then(*rounds[0], *rounds[1])
    texts = pa.LargeStringArray.from_buffers(len(begins), pa.py_buffer(cuts), pa.py_buffer(data)).cast(pa.string())
    values = pa.StructArray.from_arrays([pa.array(begins), pa.array(ends), texts], fields=list(EDIT_TYPE))
    return pa.LargeListArray.from_arrays(pa.array(offsets), values)


def _buffers(edits: pa.Array) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
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


@kernel
def _then(
    firsts: np.ndarray, begins: np.ndarray, ends: np.ndarray, data: np.ndarray, texts: np.ndarray,
    firsts2: np.ndarray, begins2: np.ndarray, ends2: np.ndarray, data2: np.ndarray, texts2: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    number = len(firsts) - 1
    most = len(begins) + len(begins2)
    made_begins, made_ends = np.empty(most, np.int64), np.empty(most, np.int64)
    made = np.empty(texts[-1] - texts[0] + texts2[-1] - texts2[0], np.uint8)
    cuts = np.zeros(most + 1, np.int64)
    offsets = np.zeros(number + 1, np.int64)
    count = 0
    for text in range(number):
        one, two = firsts[text], firsts2[text]
        shift = 0  # a place of the text between the rounds, minus the same place of the text before
        while one < firsts[text + 1] or two < firsts2[text + 1]:
            # The next edit, of whichever round comes first; then all that touch it, of both.
            from_one = two == firsts2[text + 1] or (one < firsts[text + 1] and begins[one] + shift <= begins2[two])
            begin = begins[one] if from_one else begins2[two] - shift
            middle, size = begin + shift, cuts[count]  # how far the text between the rounds is used up
            while True:
                if one < firsts[text + 1] and begins[one] + shift <= middle:
                    # The replacement of this edit lies at `place` of the text between; what the second round has
                    # not cut of it is taken over, in order with the second round's own replacements.
                    length = texts[one + 1] - texts[one]
                    place = begins[one] + shift
                    at = max(middle, place)
                    stop = place + length
                    while two < firsts2[text + 1] and begins2[two] <= stop:
                        if begins2[two] > at:
                            size = _copy(made, size, data, texts[one] + at - place, texts[one] + begins2[two] - place)
                        size = _copy(made, size, data2, texts2[two], texts2[two + 1])
                        at = max(at, ends2[two])
                        two += 1
                    if at < stop:
                        size = _copy(made, size, data, texts[one] + at - place, texts[one + 1])
                    middle = max(at, stop)
                    shift += length - (ends[one] - begins[one])
                    one += 1
                elif two < firsts2[text + 1] and begins2[two] <= middle:
                    size = _copy(made, size, data2, texts2[two], texts2[two + 1])
                    middle = max(middle, ends2[two])
                    two += 1
                else:
                    break
            made_begins[count], made_ends[count] = begin, middle - shift
            count += 1
            cuts[count] = size
        offsets[text + 1] = count
    return offsets, made_begins[:count], made_ends[:count], made[: cuts[count]], cuts[: count + 1]


@kernel
def _copy(to: np.ndarray, size: int, data: np.ndarray, begin: int, end: int) -> int:
    to[size : size + end - begin] = data[begin:end]
    return size + end - begin

"""Two rounds of edits as one: what a stage of several steps writes down."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.dataprep.edits import EDIT_TYPE
from gristmill.dataprep.kernels import kernel
from gristmill.dataprep.text_buffers import text_buffers


def then(first: pa.Array, second: pa.Array) -> pa.Array:
    """The edits that do at once what `first` and after it `second` do.

    Args:
        first: edits of n texts (EDITS_TYPE).
        second: edits of those n texts as `first` leaves them.

    Returns:
        edits of the n texts: `apply(text, then(a, b)) == apply(apply(text, a), b)`. Neighbours are one edit, so that
        every edit but those that change nothing has kept text on both sides.
    """
    if len(second.flatten()) == 0:
        return first
    if len(first.flatten()) == 0:
        return second
    offsets, begins, ends, data, cuts = _then(*_buffers(first), *_buffers(second))
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

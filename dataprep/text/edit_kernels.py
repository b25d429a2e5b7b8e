"""Applying edits to texts, and making one round of edits of two; see `edits.py`."""

from __future__ import annotations

import numpy as np

from gristmill.dataprep.text.kernels import kernel


@kernel
def replace_spans(
    data: np.ndarray,
    offsets: np.ndarray,
    firsts: np.ndarray,
    begins: np.ndarray,
    ends: np.ndarray,
    new_data: np.ndarray,
    new_offsets: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, int]:
    """Texts with their edits applied.

    Args:
        data, offsets: bytes of n texts, text i from offsets[i] up to offsets[i + 1].
        firsts: text i has the edits from firsts[i] up to firsts[i + 1]: bytes begins[e] up to ends[e] within the text.
        new_data, new_offsets: bytes of what takes their places.

    Returns:
        Bytes and offsets of the n new texts; and the first text whose edits overlap or reach beyond it, or -1.
    """
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


@kernel
def compose(
    firsts: np.ndarray,
    begins: np.ndarray,
    ends: np.ndarray,
    data: np.ndarray,
    texts: np.ndarray,
    firsts2: np.ndarray,
    begins2: np.ndarray,
    ends2: np.ndarray,
    data2: np.ndarray,
    texts2: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """What `edits.then` says: `firsts`, `begins`, `ends`, and bytes and offsets of the replacements, of two rounds."""
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

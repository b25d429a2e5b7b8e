"""Kernels that apply edits to texts, and compose two rounds of edits into one; see
`edits.py`.
"""

from __future__ import annotations

import numpy as np

from gristmill.dataprep.text.kernels import Bytes, Offsets, Positions, kernel


@kernel
def replace_spans(
    data: Bytes,
    offsets: Offsets,
    firsts: np.ndarray,
    begins: Positions,
    ends: Positions,
    new_data: np.ndarray,
    new_offsets: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, int]:
    """Apply edits to texts.

    Args:
        data, offsets: bytes of n texts, text i from offsets[i] up to offsets[i + 1].
        firsts: text i has the edits from firsts[i] up to firsts[i + 1]: bytes begins[e]
            up to ends[e] within the text.
        new_data, new_offsets: bytes of the replacements.

    Returns:
        Bytes and offsets of the n edited texts; and the first text whose edits overlap
        or reach beyond it, or -1.
    """
    number = len(offsets) - 1
    edited_offsets = np.zeros(number + 1, np.int64)
    for text in range(number):
        size = offsets[text + 1] - offsets[text]
        pos = 0
        length = size
        for edit in range(firsts[text], firsts[text + 1]):
            if begins[edit] < pos or ends[edit] < begins[edit] or ends[edit] > size:
                return np.empty(0, np.uint8), edited_offsets, text
            pos = ends[edit]
            length += (
                new_offsets[edit + 1] - new_offsets[edit] - (ends[edit] - begins[edit])
            )
        edited_offsets[text + 1] = edited_offsets[text] + length
    edited = np.empty(edited_offsets[number], np.uint8)
    out_pos = 0
    for text in range(number):
        pos = offsets[text]
        for edit in range(firsts[text], firsts[text + 1]):
            stop = offsets[text] + begins[edit]
            out_pos = _copy(edited, out_pos, data, pos, stop)
            out_pos = _copy(
                edited, out_pos, new_data, new_offsets[edit], new_offsets[edit + 1]
            )
            pos = offsets[text] + ends[edit]
        out_pos = _copy(edited, out_pos, data, pos, offsets[text + 1])
    return edited, edited_offsets, -1


@kernel
def compose(
    firsts: np.ndarray,
    begins: Positions,
    ends: Positions,
    data: Bytes,
    texts: np.ndarray,
    firsts2: np.ndarray,
    begins2: np.ndarray,
    ends2: np.ndarray,
    data2: np.ndarray,
    texts2: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Compose two rounds of edits (`edits.then`): `firsts`, `begins`, `ends`, and bytes
    and offsets of the replacements.
    """
    number = len(firsts) - 1
    capacity = len(begins) + len(begins2)
    out_begins = np.empty(capacity, np.int64)
    out_ends = np.empty(capacity, np.int64)
    out_data = np.empty(texts[-1] - texts[0] + texts2[-1] - texts2[0], np.uint8)
    cuts = np.zeros(capacity + 1, np.int64)
    offsets = np.zeros(number + 1, np.int64)
    count = 0
    for text in range(number):
        edit1 = firsts[text]
        edit2 = firsts2[text]
        # position in the intermediate text minus position in the original text
        shift = 0
        while edit1 < firsts[text + 1] or edit2 < firsts2[text + 1]:
            # The next edit of either round, then all edits of both rounds that touch
            # it.
            is_first_round = edit2 == firsts2[text + 1] or (
                edit1 < firsts[text + 1] and begins[edit1] + shift <= begins2[edit2]
            )
            begin = begins[edit1] if is_first_round else begins2[edit2] - shift
            # consumed bytes of the intermediate text, and the end of the last
            # replacement of the first round in it
            middle = begin + shift
            stop = middle
            source = 0
            size = cuts[count]
            while True:
                is_cut = edit2 < firsts2[text + 1] and begins2[edit2] <= max(
                    middle, stop
                )
                if is_cut:
                    pos = begins2[edit2]
                elif middle < stop:
                    pos = stop
                elif edit1 < firsts[text + 1] and begins[edit1] + shift <= middle:
                    # The second round may cut parts of this replacement.
                    place = begins[edit1] + shift
                    source = texts[edit1] - place
                    stop = texts[edit1 + 1] - source
                    shift = stop - ends[edit1]
                    edit1 += 1
                    continue
                else:
                    break
                if middle < pos:
                    size = _copy(out_data, size, data, source + middle, source + pos)
                    middle = pos
                if is_cut:
                    size = _copy(
                        out_data, size, data2, texts2[edit2], texts2[edit2 + 1]
                    )
                    middle = max(middle, ends2[edit2])
                    edit2 += 1
            out_begins[count], out_ends[count] = begin, middle - shift
            count += 1
            cuts[count] = size
        offsets[text + 1] = count
    return (
        offsets,
        out_begins[:count],
        out_ends[:count],
        out_data[: cuts[count]],
        cuts[: count + 1],
    )


@kernel
def _copy(to: np.ndarray, size: int, data: Bytes, begin: int, end: int) -> int:
    to[size : size + end - begin] = data[begin:end]
    return size + end - begin

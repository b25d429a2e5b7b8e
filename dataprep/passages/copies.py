"""Copies of windows: compared with the first copy byte by byte, and joined to what can be cut. Numba kernels."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pyarrow as pa

from gristmill.dataprep.kernels import kernel
from gristmill.dataprep.text_buffers import text_buffers
from gristmill.dataprep.unicode_tables import code_point_flags
from gristmill.dataprep.words import word_spans


class Cuts(NamedTuple):
    """What is cut of n texts.

    Attributes:
        begins, ends, offsets: as `edits.cuts_array` takes them.
        words: int64 of shape (n,), words cut of each text.
    """

    begins: np.ndarray
    ends: np.ndarray
    offsets: np.ndarray
    words: np.ndarray


def are_copies(
    texts: pa.Array, text: np.ndarray, begins: np.ndarray, ends: np.ndarray,
    lent: pa.Array, lender: np.ndarray, lent_begins: np.ndarray,
) -> np.ndarray:  # fmt: skip
    """Which spans have the bytes of the spans that they are said to be copies of.

    Time is linear in the bytes that the spans cover, if they are sorted by `text` and `begins`: where a span goes on
    where the one before it was, only what is new is compared.

    Args:
        texts: the texts of the spans; text, begins, ends: int64 of shape (n,).
        lent: the texts of the first copies; lender, lent_begins: int64 of shape (n,), where in them.

    Returns:
        bool of shape (n,).
    """
    data, offsets = text_buffers(texts)
    lent_data, lent_offsets = text_buffers(lent)
    return _are_copies(data, offsets, text, begins, ends, lent_data, lent_offsets, lender, lent_begins)


def cut_copies(texts: pa.Array, text: np.ndarray, begins: np.ndarray, ends: np.ndarray, copy: np.ndarray) -> Cuts:
    """Cut the words that copies cover and no first copy does.

    A cut ends where the next word begins, so that what is left has one separator where there were two.

    Args:
        text, begins, ends: int64 of shape (n,), windows of words that are repeated, by text and begin.
        copy: bool, whether a window is a copy that may go, and not the first copy that has to stay.
    """
    data, offsets = text_buffers(texts)
    return Cuts(*_cut_copies(data, offsets, code_point_flags(), text, begins, ends, copy))


@kernel
def _same(first: np.ndarray, at: int, second: np.ndarray, other: int, length: int) -> bool:
    step = 0
    while step < length and first[at + step] == second[other + step]:
        step += 1
    return step == length


@kernel
def _are_copies(
    data: np.ndarray, offsets: np.ndarray, text: np.ndarray, begins: np.ndarray, ends: np.ndarray,
    lent_data: np.ndarray, lent_offsets: np.ndarray, lender: np.ndarray, lent_begins: np.ndarray,
) -> np.ndarray:  # fmt: skip
    copies = np.zeros(len(text), np.bool_)
    for span in range(len(text)):
        begin, end = begins[span], ends[span]
        shift = lent_begins[span] - begin
        if end + shift > lent_offsets[lender[span] + 1] - lent_offsets[lender[span]]:
            continue
        known = begin
        if span > 0 and copies[span - 1] and text[span] == text[span - 1] and lender[span] == lender[span - 1]:
            goes_on = lent_begins[span - 1] - begins[span - 1] == shift and begins[span - 1] <= begin
            if goes_on and ends[span - 1] > begin:
                known = ends[span - 1]
        place, other = offsets[text[span]] + known, lent_offsets[lender[span]] + known + shift
        copies[span] = _same(data, place, lent_data, other, end - known)
    return copies


@kernel
def _cut_copies(
    data: np.ndarray, offsets: np.ndarray, flags: np.ndarray, text: np.ndarray, begins: np.ndarray, ends: np.ndarray,
    copy: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    texts = len(offsets) - 1
    cut_begins, cut_ends = np.empty(len(text), np.int64), np.empty(len(text), np.int64)
    cut_offsets, cut_words = np.zeros(texts + 1, np.int64), np.zeros(texts, np.int64)
    count, window = 0, 0
    for number in range(texts):
        if window < len(text) and text[window] == number:
            base = offsets[number]
            firsts, lasts = word_spans(data, base, offsets[number + 1], flags)
            copied, kept, open_cut = -1, -1, False
            for word in range(len(firsts)):
                while window < len(text) and text[window] == number and begins[window] <= firsts[word] - base:
                    if copy[window]:
                        copied = max(copied, ends[window])
                    else:
                        kept = max(kept, ends[window])
                    window += 1
                goes = lasts[word] - base <= copied and lasts[word] - base > kept
                if goes and not open_cut:
                    cut_begins[count], open_cut = firsts[word] - base, True
                if not goes and open_cut:
                    cut_ends[count], open_cut = firsts[word] - base, False
                    count += 1
                cut_words[number] += goes
            if open_cut:
                cut_ends[count] = lasts[len(lasts) - 1] - base
                count += 1
        cut_offsets[number + 1] = count
    return cut_begins[:count].copy(), cut_ends[:count].copy(), cut_offsets, cut_words

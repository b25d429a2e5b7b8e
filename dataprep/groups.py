"""Sorted columns as groups of equal rows, and how a row is found by two numbers; plain NumPy."""

from __future__ import annotations

import numpy as np


def sort_rows(*columns: np.ndarray) -> np.ndarray:
    """The order (int64) that sorts rows by the first column, then by the second, and so on; stable."""
    order: np.ndarray = np.lexsort(columns[::-1])
    return order


def group_starts(*columns: np.ndarray) -> np.ndarray:
    """Where runs of equal rows begin: int64, ascending. Equal rows must be neighbours."""
    if not len(columns[0]):
        return np.empty(0, np.int64)
    new = np.zeros(len(columns[0]), bool)
    new[0] = True
    for column in columns:
        new[1:] |= column[1:] != column[:-1]
    return np.flatnonzero(new)


def spread_groups(starts: np.ndarray, rows: int) -> np.ndarray:
    """For each of so many rows, the number of the group that it is in."""
    marks = np.zeros(rows, np.int64)
    marks[starts] = 1
    numbers: np.ndarray = np.cumsum(marks) - 1
    return numbers


def find_pairs(high: np.ndarray, low: np.ndarray, wanted_high: np.ndarray, wanted_low: np.ndarray) -> np.ndarray:
    """The places of pairs of numbers among sorted distinct ones: int64, -1 where a pair is not there."""
    if not len(high):
        return np.full(len(wanted_high), -1, np.int64)
    places = np.searchsorted(high, wanted_high)
    while True:  # more than once only where two keys share their upper half
        inside = np.minimum(places, len(high) - 1)
        behind = (places < len(high)) & (high[inside] == wanted_high) & (low[inside] < wanted_low)
        if not behind.any():
            break
        places = places + behind
    found = (places < len(high)) & (high[inside] == wanted_high) & (low[inside] == wanted_low)
    result: np.ndarray = np.where(found, places, -1).astype(np.int64)
    return result

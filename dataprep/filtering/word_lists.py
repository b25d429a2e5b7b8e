"""Lists of the user's, one entry per line: read, and as sets that stay small where a list is long."""

from __future__ import annotations

import gzip
import io
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import islice

import numpy as np
import pyarrow as pa

from gristmill.dataprep.files import as_path
from gristmill.dataprep.text.hashing import hash_bytes
from gristmill.dataprep.text.kernels import kernel, text_buffers

ENTRIES_AT_ONCE = 100_000
COMMENT = "#"


class WordListError(ValueError):
    """A list of the user's cannot be read."""


def read_list(path: str) -> Iterator[str]:
    """The entries of a list, stripped; empty lines and those that begin with `#` are none.

    Args:
        path: a UTF-8 file, gzipped where its name ends in `.gz`.

    Raises:
        WordListError: it is not there, or no such file.
    """
    location = as_path(path)
    try:
        with location.open("rb") as raw, gzip.open(raw) if path.endswith(".gz") else raw as stream:
            for line in io.TextIOWrapper(stream, encoding="utf-8-sig"):
                entry = line.strip()
                if entry and not entry.startswith(COMMENT):
                    yield entry
    except (OSError, UnicodeDecodeError, EOFError) as error:
        raise WordListError(
            f"the list {path} cannot be read: {error}; it has to be UTF-8 text with an entry per line, "
            "gzipped if its name ends in .gz"
        ) from error


@lru_cache(maxsize=8)
def hashed_list(path: str, normalise: Callable[[str], str]) -> np.ndarray:
    """The 64-bit hashes of a list's entries, sorted: uint64 of shape (n,).

    Eight bytes an entry, however long: a list of five million domains takes 40 MB. The probability that any of a
    billion strings has the hash of one of a million entries by chance is below one in ten thousand.

    Args:
        path: see `read_list`.
        normalise: applied to each entry; a function of a module.
    """
    entries, parts = read_list(path), []
    while some := list(islice(entries, ENTRIES_AT_ONCE)):
        parts.append(hash_strings([normalise(entry) for entry in some]))
    return np.unique(np.concatenate(parts)) if parts else np.empty(0, np.uint64)


def hash_strings(strings: list[str]) -> np.ndarray:
    """64-bit hashes of n strings: uint64 of shape (n,)."""
    data, offsets = text_buffers(pa.array(strings, pa.large_string()))
    hashes: np.ndarray = _hash_strings(data, offsets)
    return hashes


def contained(hashes: np.ndarray, listed: np.ndarray) -> np.ndarray:
    """Which of n hashes a sorted list has: bool of shape (n,)."""
    if not len(listed):
        return np.zeros(len(hashes), bool)
    places = np.minimum(np.searchsorted(listed, hashes), len(listed) - 1)
    found: np.ndarray = listed[places] == hashes
    return found


@kernel
def _hash_strings(data: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    hashes = np.empty(len(offsets) - 1, np.uint64)
    for number in range(len(hashes)):
        hashes[number] = hash_bytes(data, offsets[number], offsets[number + 1])
    return hashes

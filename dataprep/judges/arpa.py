r"""Reading n-gram models in the ARPA format, which KenLM, SRILM and others write.

`\data\`, a line `ngram n=count` per order, then per order `\n-grams:` and one entry a line: log10 of the probability,
the words, and log10 of the backoff weight where there is one; `\end\`. A model without `<unk>` gives unknown words a
probability of 10^-100, as KenLM does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from gristmill.dataprep.judges.ngram_tables import (
    BEGIN,
    END,
    MAX_ORDER,
    UNKNOWN,
    Entries,
    NgramTables,
    extend,
    make_tables,
    next_word,
    word_hash,
)
from gristmill.dataprep.reading.compression import RecordTooLongError, read_lines, split_compression
from gristmill.dataprep.text.kernels import kernel, text_buffers

NO_UNKNOWN_LOG = -100.0
COUNT = re.compile(rb"ngram\s+(\d+)\s*=\s*(\d+)")
SECTION = re.compile(rb"\\(\d+)-grams:")


class ArpaError(ValueError):
    """A file is not a whole model in the ARPA format."""


def read_arpa(path: Path) -> NgramTables:
    """Read a model; the file may be compressed (.gz, .zst, .bz2).

    Raises:
        ArpaError: it is no such file, or ends early; says where.
        gristmill.dataprep.reading.compression.CorruptFileError: the compression is damaged.
    """
    lines = enumerate(read_lines(path, split_compression(path.name)[1]), start=1)
    declared = _read_header(path, lines)
    entries: list[Entries] = []
    closed = True
    for order, count in enumerate(declared, start=1):
        found, suffixes = _read_section(path, lines, order)
        if len(found.keys) != count:
            raise ArpaError(f"{path}: its header declares {count} {order}-grams, {len(found.keys)} are there; "
                            "the file is cut off or was edited, get it again")  # fmt: skip
        closed &= order == 1 or bool(np.isin(suffixes, entries[-1].keys).all())
        entries.append(found)
    if not (entries[0].keys == UNKNOWN).any():
        unknown = (np.array([UNKNOWN]), np.array([NO_UNKNOWN_LOG], np.float32), np.zeros(1, np.float32))
        entries[0] = Entries(*(np.concatenate(pair) for pair in zip(entries[0], unknown, strict=True)))
    return make_tables(entries, closed)


def _read_header(path: Path, lines: Iterator[tuple[int, bytes | RecordTooLongError]]) -> list[int]:
    counts: list[int] = []
    begun = False
    for number, line in lines:
        if isinstance(line, RecordTooLongError):
            raise ArpaError(f"{path}, line {number}: {line}")
        line = line.strip()
        if match := COUNT.fullmatch(line):
            counts.append(int(match[2]))
        elif line == b"\\data\\":
            begun = True
        elif line == b"\\1-grams:":
            break
        elif line and begun:
            raise ArpaError(f"{path}, line {number}: {line[:60]!r} is no line of an ARPA header")
    if not begun or not 1 <= len(counts) <= MAX_ORDER:
        raise ArpaError(f"{path} is no n-gram model in the ARPA format of order 1 to {MAX_ORDER} (no \\data\\ with "
                        "its counts)")  # fmt: skip
    return counts


def _read_section(
    path: Path, lines: Iterator[tuple[int, bytes | RecordTooLongError]], order: int
) -> tuple[Entries, np.ndarray]:  # fmt: skip
    """Read the entries of one order, up to the next section's heading, and the hashes of their last words."""
    logs, backoffs, texts = [], [], []
    for number, line in lines:
        if isinstance(line, RecordTooLongError):
            raise ArpaError(f"{path}, line {number}: {line}")
        if line[:1] == b"\\" and (line.strip() == b"\\end\\" or SECTION.fullmatch(line.strip())):
            break
        fields = line.split()
        if not fields:
            continue
        try:
            if not order + 1 <= len(fields) <= order + 2:
                raise ValueError("number of fields")
            logs.append(float(fields[0]))
            backoffs.append(float(fields[order + 1]) if len(fields) == order + 2 else 0.0)
        except ValueError as error:
            raise ArpaError(f"{path}, line {number}: {line[:60]!r} is no {order}-gram with a logarithm before it and "
                            "maybe one behind it") from error  # fmt: skip
        texts.append(b" ".join(fields[1 : order + 1]))
    keys, suffixes = _hash_ngrams(*text_buffers(pa.array(texts, pa.large_binary()).cast(pa.large_string())))
    return Entries(keys, np.array(logs, np.float32), np.array(backoffs, np.float32)), suffixes


@kernel
def _hash_ngrams(data: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The hash of each sequence of words, and of all but its first word."""
    keys, suffixes = np.empty(len(offsets) - 1, np.uint64), np.empty(len(offsets) - 1, np.uint64)
    for text in range(len(keys)):
        begin, at, found = next_word(data, offsets[text], offsets[text + 1])
        key, suffix, words = np.uint64(0), np.uint64(0), 0
        while found:
            word = _arpa_word(data, begin, at)
            suffix = word if words <= 1 else extend(suffix, word)
            key = word if words == 0 else extend(key, word)
            words += 1
            begin, at, found = next_word(data, at, offsets[text + 1])
        keys[text], suffixes[text] = key, suffix
    return keys, suffixes


@kernel
def _arpa_word(data: np.ndarray, begin: int, end: int) -> np.uint64:
    """What stands for a word or a mark: <s>, </s>, <unk> or <UNK>."""
    size = end - begin
    if size >= 3 and data[begin] == 60 and data[end - 1] == 62:  # < and >
        last = data[end - 2] | 0x20
        if last == 115 and size == 3:  # s
            return BEGIN
        if last == 115 and size == 4 and data[begin + 1] == 47:  # /
            return END
        if size == 5 and last == 107 and data[begin + 1] | 0x20 == 117 and data[begin + 2] | 0x20 == 110:  # u n k
            return UNKNOWN
    return word_hash(data, begin, end)

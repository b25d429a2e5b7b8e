"""Reader of fastText's model files (.bin, .ftz), for the kernels of `fasttext_words`
and `fasttext_predict`.

The format is that of fastText 0.9.3 (`FastText::saveModel`, `Dictionary::save`,
`QuantMatrix::save`), little-endian: settings, dictionary, input matrix (a row per word,
then a row per bucket of n-grams), output matrix (a row per label). A product-quantised
matrix (.ftz; Jegou et al. 2011) has a code per group of columns and one for the row's
norm; the input rows are dequantised here, to 4 bytes per number.
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gristmill.core.files import as_path, is_local
from gristmill.dataprep.text.hashing import equal_bytes
from gristmill.dataprep.text.kernels import Bytes, inner_kernel, kernel

MAGIC = 793_712_314
VERSIONS = (11, 12)
SUPERVISED = 3
HIERARCHICAL, NEGATIVE_SAMPLING, SOFTMAX, ONE_VS_ALL = 1, 2, 3, 4
"""`loss_name` in fastText's args.h."""
CENTROIDS = 256
MOST_ROW_BYTES = 4 << 30
"""Largest size of dequantised rows; larger quantised models are not read, since they
are meant to save memory.
"""
LARGEST = np.float32(1e15)
"""Bound of a matrix's numbers, so that sums stay finite; fastText refuses others."""
ENTRY_BYTES = 10
"""Bytes of a dictionary entry after its word: the terminating zero, a count of 8 bytes,
a kind of 1.
"""
WORD_BITS = 64
LINE_BYTES = 128
"""Two cache lines, which processors fetch together."""
SIGMOID_STEPS, SIGMOID_BOUND = 512, 8
"""fastText's table of the logistic function: steps and bound (`SIGMOID_TABLE_SIZE`,
`MAX_SIGMOID`).
"""
LABEL_PREFIX = b"__label__"
"""Prefix of labels, which no word has (`Args::label`, not stored in files)."""
END_OF_LINE = np.frombuffer(b"</s>", np.uint8)
"""Word that fastText appends to every line."""
FNV_OFFSET, FNV_PRIME = np.uint32(2_166_136_261), np.uint32(16_777_619)


class UnknownModelError(ValueError):
    """The kernels do not support this model, or its file is damaged, which fastText
    itself does not detect; the message says why.
    """


class Dictionary(NamedTuple):
    """Words and labels of a model."""

    content: np.ndarray
    """uint8, bytes of the file's dictionary."""
    starts: np.ndarray
    """int64, one per entry: offset of its word in `content`; words come before
    labels.
    """
    ends: np.ndarray
    """int64, one per entry: end of its word."""
    places: np.ndarray
    """uint64, a power of two of slots: hash table of the entries by `hash_word`. 1 +
    the entry and, in the upper half, its hash; 0 for an empty slot.
    """


class Ngrams(NamedTuple):
    """Rows of a model for n-grams."""

    kept: np.ndarray
    """uint64, a bit per bucket that a pruned model kept; empty for other models."""
    kept_before: np.ndarray
    """int32, per element of `kept` the number of kept buckets before it."""
    words: int
    """Rows of words, which come first."""
    shortest: int
    """Code points of a word's shortest n-grams."""
    longest: int
    """Code points of a word's longest n-grams; 0 without n-grams."""
    buckets: np.uint64
    reciprocal: np.uint64
    """Reciprocal of `buckets` (see `reciprocal`)."""


class Weights(NamedTuple):
    """Supervised model of d dimensions and n labels."""

    dictionary: Dictionary
    words: int
    """Entries that are words; all others are labels."""
    end_of_line: int
    """Entry of `</s>`, or -1."""
    rows: np.ndarray
    """float32 of shape (words and buckets, d); for a pruned model only the kept
    buckets, in order.
    """
    ngrams: Ngrams
    word_ngrams: int
    """Words of the longest word n-grams."""
    loss: int
    output: np.ndarray
    """float32: of shape (n, d) for HIERARCHICAL, a row per inner node of the tree;
    otherwise of shape (d, n).
    """
    norms: np.ndarray
    """float32 of shape (n,): factors of the products with each row (column) of
    `output`.
    """
    left: np.ndarray
    """int32, first child of each node of the tree, -1 for the leaves, which come first;
    empty without a tree.
    """
    right: np.ndarray
    """int32, second child of each node; the last node is the root."""
    sigmoid: np.ndarray
    """float32 of shape (SIGMOID_STEPS + 1,)."""


class Head(NamedTuple):
    """Header of a file: settings under fastText's names (`Args`), and sizes of the
    dictionary after them.
    """

    dim: int
    word_ngrams: int
    loss: int
    buckets: int
    minn: int
    maxn: int
    entries: int
    words: int
    labels: int
    pruned: int
    """Number of buckets that a pruned model kept; -1 if it is not pruned."""


class Model(NamedTuple):
    """Weights and labels of a file."""

    weights: Weights
    labels: tuple[str, ...]


def aligned(shape: tuple[int, ...], kind: Any) -> np.ndarray:
    """Zeros aligned to cache lines, so that rows of 64 bytes lie in one line each."""
    size = math.prod(shape) * np.dtype(kind).itemsize
    room = np.zeros(size + 2 * LINE_BYTES, np.uint8)
    first = -room.ctypes.data % LINE_BYTES
    return room[first : first + size].view(kind).reshape(shape)


class _Reader:
    """Sequential reader of a file."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.content = np.frombuffer(mapped, np.uint8)
        self.at = 0

    def numbers(self, kind: str) -> tuple[int, ...]:
        """Read numbers of a format of `struct`."""
        size = struct.calcsize("<" + kind)
        values: tuple[int, ...] = struct.unpack(
            "<" + kind, self.content[self.at : self.at + size].tobytes()
        )
        self.at += size
        return values

    def array(self, kind: str, *shape: int) -> np.ndarray:
        """Read an array into new, aligned memory."""
        size = math.prod(shape)
        source: np.ndarray = np.frombuffer(
            self.content, np.dtype(kind).newbyteorder("<"), size, self.at
        )
        self.at += size * source.itemsize
        copy = aligned(shape, np.dtype(kind))
        copy.reshape(-1)[:] = source
        return copy


def read_model(path: Path) -> Model:
    """Read a supervised model.

    Raises:
        UnknownModelError: the file is truncated or damaged, it is not a supervised
            model, or its dequantised rows would take over MOST_ROW_BYTES.
    """
    try:
        return _read(_Reader(path))
    except UnknownModelError as error:
        raise UnknownModelError(
            f"{path.name} cannot be used: {error}; give another model"
        ) from error
    except (struct.error, ValueError, IndexError) as error:
        raise UnknownModelError(
            f"{path.name}: the file is cut off or damaged; give another one"
        ) from error


def read_labels(path: str) -> list[str] | None:
    """Labels of a model, read without its weights; None if the file is not local or has
    another format.
    """
    location = as_path(path)
    if not is_local(location) or not location.is_file():
        return None
    try:
        reader = _Reader(Path(str(location)))
        head = _read_head(reader)
    except (struct.error, ValueError):
        return None
    starts, ends, _, size = read_entries(reader.content[reader.at :], head.entries)
    labels = _entries(
        reader.content[reader.at :], starts[head.words :], ends[head.words :]
    )
    is_complete = size >= 0 and all(label.startswith(LABEL_PREFIX) for label in labels)
    return (
        [label.decode("utf-8", "replace") for label in labels] if is_complete else None
    )


def _entries(content: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> list[bytes]:
    """Words of some entries of a dictionary."""
    return [
        content[start:end].tobytes() for start, end in zip(starts, ends, strict=True)
    ]


def _read_head(reader: _Reader) -> Head:
    magic, version = reader.numbers("ii")
    if magic != MAGIC or version not in VERSIONS:
        raise UnknownModelError(
            f"it is not a fastText file of version {VERSIONS[0]} or {VERSIONS[-1]}"
        )
    dim, _, _, _, _, word_ngrams, loss, kind, buckets, minn, maxn, _ = reader.numbers(
        "12i"
    )
    reader.numbers("d")
    if kind != SUPERVISED or loss not in (
        HIERARCHICAL,
        NEGATIVE_SAMPLING,
        SOFTMAX,
        ONE_VS_ALL,
    ):
        raise UnknownModelError("it predicts no labels")
    entries, words, labels, _, pruned = reader.numbers("3i2q")
    # supervised models of old files have no character n-grams
    maxn = 0 if version == VERSIONS[0] else maxn
    return Head(
        dim, word_ngrams, loss, buckets, minn, maxn, entries, words, labels, pruned
    )


def _read(reader: _Reader) -> Model:
    d, word_ngrams, loss, buckets, shortest, longest, size, words, n, pruned = (
        _read_head(reader)
    )
    starts, ends, counts, dictionary_bytes = read_entries(
        reader.content[reader.at :], size
    )
    if dictionary_bytes < 0 or words + n != size or n < 1:
        raise UnknownModelError("its dictionary is damaged")
    content = reader.content[reader.at : reader.at + dictionary_bytes].copy()
    reader.at += dictionary_bytes
    if buckets < 1 and (longest > 0 or word_ngrams > 1):
        raise UnknownModelError("it has n-grams, but no buckets for them")
    kept, kept_before, kept_rows = _read_kept(reader, pruned, buckets)
    (quantised,) = reader.numbers("?")
    if quantised:
        rows, row_norms = _read_quantised(reader, d)
        out = aligned(rows.shape, rows.dtype)
        rows = np.multiply(rows, row_norms[:, None], out=out)
    else:
        rows = _read_dense(reader)
    (quantised_output,) = reader.numbers("?")
    output, norms = (
        _read_quantised(reader, d)
        if quantised and quantised_output
        else (_read_dense(reader), None)
    )
    used_buckets = (
        kept_rows.max(initial=-1) + 1
        if pruned >= 0
        else buckets
        if longest > 0 or word_ngrams > 1
        else 0
    )
    if (
        rows.shape[0] < words + used_buckets
        or rows.shape[1] != d
        or output.shape != (n, d)
        or (pruned >= 0) > quantised
    ):
        raise UnknownModelError("its matrices do not go with its dictionary")
    if pruned >= 0:
        kept_indices = np.concatenate([np.arange(words), words + kept_rows])
        rows = np.take(
            rows, kept_indices, axis=0, out=aligned((len(kept_indices), d), rows.dtype)
        )
    for matrix in (rows, output):
        if not (matrix.min(initial=0) > -LARGEST and matrix.max(initial=0) < LARGEST):
            raise UnknownModelError(
                "its matrices have numbers that are not finite, or too large"
            )
    tree = (
        _grow_tree(counts[words:])
        if loss == HIERARCHICAL
        else np.empty((2, 0), np.int32)
    )
    labels = _entries(content, starts[words:], ends[words:])
    dictionary = make_dictionary(content, starts, ends)
    size = len(END_OF_LINE)
    end_of_line = int(
        find_entry(dictionary, hash_word(END_OF_LINE, 0, size), END_OF_LINE, 0, size)
    )
    if loss != HIERARCHICAL:
        output = np.ascontiguousarray(output.T)
    norms = np.ones(n, np.float32) if norms is None else norms
    weights = Weights(
        dictionary,
        words,
        end_of_line,
        rows,
        Ngrams(
            kept,
            kept_before,
            words,
            shortest,
            longest,
            np.uint64(max(buckets, 0)),
            reciprocal(buckets),
        ),
        word_ngrams,
        loss,
        output,
        norms,
        tree[0],
        tree[1],
        sigmoid_table(),
    )
    return Model(weights, tuple(label.decode("utf-8") for label in labels))


def _read_dense(reader: _Reader) -> np.ndarray:
    return reader.array("f4", *reader.numbers("2q"))


def _read_quantised(reader: _Reader, d: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows without their norms, float32 of shape (m, d), and the norms, float32 of
    shape (m,).
    """
    has_norms, m, columns, size = reader.numbers("?2qi")
    if columns != d or m * d * 4 > MOST_ROW_BYTES:
        raise UnknownModelError(
            f"its {m} quantised rows of {columns} numbers would take "
            f"{m * columns * 4:,} bytes, more than {MOST_ROW_BYTES:,}"
        )
    codes = reader.array("u1", size)
    parts = _read_centroids(reader)
    codes = codes.reshape(m, len(parts))
    rows = np.concatenate(
        [part[codes[:, number]] for number, part in enumerate(parts)], axis=1
    )
    norms = np.ones(m, np.float32)
    if has_norms:
        norm_codes = reader.array("u1", m)
        (centroids,) = _read_centroids(reader)
        norms = centroids[norm_codes, 0]
    return rows, norms


def _read_centroids(reader: _Reader) -> list[np.ndarray]:
    """Centroids of a quantiser, per group of columns: float32 of shape (CENTROIDS,
    columns).
    """
    columns, groups, width, last = reader.numbers("4i")
    centroids = reader.array("f4", columns * CENTROIDS)
    start = 0
    groups_centroids = []
    for number in range(groups):
        size = CENTROIDS * (last if number == groups - 1 else width)
        groups_centroids.append(centroids[start : start + size].reshape(CENTROIDS, -1))
        start += size
    return groups_centroids


def _read_kept(
    reader: _Reader, pruned: int, buckets: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`kept` and `kept_before` of Weights, and per kept bucket the row after those of
    the words, int32.

    Args:
        pruned: number of kept buckets, -1 for all.
    """
    if pruned < 0:
        return np.empty(0, np.uint64), np.empty(0, np.int32), np.empty(0, np.int32)
    pairs = reader.array("i4", pruned, 2)
    pairs = pairs[np.argsort(pairs[:, 0])]
    if pruned and not 0 <= pairs[0, 0] <= pairs[-1, 0] < buckets:
        raise UnknownModelError("its list of kept n-grams is damaged")
    kept = np.zeros(max(1, -(-buckets // WORD_BITS)), np.uint64)
    np.bitwise_or.at(
        kept,
        pairs[:, 0] // WORD_BITS,
        np.uint64(1) << (pairs[:, 0] % WORD_BITS).astype(np.uint64),
    )
    kept_before = np.searchsorted(pairs[:, 0], np.arange(len(kept)) * WORD_BITS).astype(
        np.int32
    )
    return kept, kept_before, pairs[:, 1]


def _grow_tree(counts: np.ndarray) -> np.ndarray:
    """Huffman tree of n labels with descending counts: int32 of shape (2, 2 n - 1), the
    children of each node.

    As `HierarchicalSoftmaxLoss::buildTree`: the two nodes of the least count become
    children of the next node.
    """
    n = len(counts)
    weights = [*counts.tolist(), *[10**15] * (n - 1)]
    children = np.full((2, 2 * n - 1), -1, np.int32)
    leaf = n - 1
    node = n
    for parent in range(n, 2 * n - 1):
        for side in range(2):
            if leaf >= 0 and weights[leaf] < weights[node]:
                children[side, parent], leaf = leaf, leaf - 1
            else:
                children[side, parent], node = node, node + 1
        weights[parent] = weights[children[0, parent]] + weights[children[1, parent]]
    return children


def reciprocal(number: int) -> np.uint64:
    """2^64 divided by a number, rounded down; one less for 1, and for 0."""
    return np.uint64(min(2**64 // max(number, 1), 2**64 - 1))


def path_to(weights: Weights, label: int) -> np.ndarray:
    """Nodes of the tree from its root to a label: int32; empty without a tree."""
    path = [label] if len(weights.left) else []
    while path and path[-1] < len(weights.left) - 1:
        path.append(
            int(
                np.flatnonzero(
                    (weights.left == path[-1]) | (weights.right == path[-1])
                )[0]
            )
        )
    return np.array(path[::-1], np.int32)


@kernel
def read_entries(
    content: np.ndarray, size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Read `size` entries of a dictionary: a zero-terminated word, its count (8 bytes),
    its kind (1 byte).

    Returns:
        starts, ends, counts: int64 of shape (size,); and the bytes of all entries, -1
            if the content is too short.
    """
    starts = np.empty(size, np.int64)
    ends = np.empty(size, np.int64)
    counts = np.zeros(size, np.int64)
    position = 0
    for entry in range(size):
        starts[entry] = position
        while position < len(content) and content[position]:
            position += 1
        ends[entry] = position
        if position + ENTRY_BYTES > len(content):
            return starts, ends, counts, -1
        for byte in range(8):
            counts[entry] |= np.int64(content[position + 1 + byte]) << (8 * byte)
        position += ENTRY_BYTES
    return starts, ends, counts, position


@inner_kernel
def hash_step(value: np.uint32, byte: np.uint8) -> np.uint32:
    """Step of fastText's hash: FNV-1a, except that bytes of at least 0x80 count as
    negative (`Dictionary::hash`).
    """
    signed = np.uint32(byte) | np.uint32(0xFFFFFF00) * np.uint32(byte >> np.uint8(7))
    return np.uint32(np.uint32(value ^ np.uint32(signed)) * FNV_PRIME)


@inner_kernel
def hash_word(data: Bytes, begin: int, end: int) -> np.uint32:
    """fastText's hash of some bytes."""
    value = FNV_OFFSET
    for position in range(np.uint64(begin), np.uint64(end)):
        value = hash_step(value, data[position])
    return value


@kernel
def make_dictionary(
    content: np.ndarray, starts: np.ndarray, ends: np.ndarray
) -> Dictionary:
    """Insert entries into a table that is at most half full; of two equal ones the
    later wins, as in fastText.
    """
    size = 2
    while size < 2 * len(starts):
        size *= 2
    dictionary = Dictionary(content, starts, ends, np.zeros(size, np.uint64))
    for entry in range(len(starts)):
        value = hash_word(content, starts[entry], ends[entry])
        place = find_place(dictionary, value, content, starts[entry], ends[entry])
        dictionary.places[place] = np.uint64(value) << np.uint64(32) | np.uint64(
            entry + 1
        )
    return dictionary


@inner_kernel
def find_entry(
    dictionary: Dictionary, value: np.uint32, data: Bytes, begin: int, end: int
) -> int:
    """Entry whose word is `data[begin:end]`, or -1; `value` is the word's hash."""
    entry = dictionary.places[
        find_place(dictionary, value, data, begin, end)
    ] & np.uint64(0xFFFFFFFF)
    return int(np.int64(entry)) - 1


@inner_kernel
def find_place(
    dictionary: Dictionary, value: np.uint32, data: Bytes, begin: int, end: int
) -> np.uint64:
    """Slot of a word in the table, or the empty slot for inserting it; `value` is its
    hash.
    """
    places = dictionary.places
    mask = np.uint64(len(dictionary.places) - 1)
    place = np.uint64(value) & mask
    while places[place]:
        if places[place] >> np.uint64(32) == np.uint64(value):
            entry = np.int64(places[place] & np.uint64(0xFFFFFFFF)) - 1
            start = dictionary.starts[entry]
            size = dictionary.ends[entry] - start
            if size == end - begin and equal_bytes(
                dictionary.content, start, data, begin, size
            ):
                break
        place = (place + np.uint64(1)) & mask
    return place


@kernel
def sigmoid_table() -> np.ndarray:
    """fastText's table of the logistic function: float32 of shape (SIGMOID_STEPS +
    1,).
    """
    table = np.empty(SIGMOID_STEPS + 1, np.float32)
    for step in range(SIGMOID_STEPS + 1):
        x = np.float32(
            np.float32(step * 2 * SIGMOID_BOUND) / np.float32(SIGMOID_STEPS)
        ) - np.float32(SIGMOID_BOUND)
        table[step] = 1.0 / (1.0 + float(math.exp(np.float32(-x))))
    return table

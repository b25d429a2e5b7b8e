"""Reads fastText's model files (.bin, .ftz) into arrays, for the kernels of `fasttext_words` and `fasttext_predict`.

The format is what fastText 0.9.3 writes and reads (`FastText::saveModel`, `Dictionary::save`, `QuantMatrix::save`),
little-endian: its settings, the dictionary, the input matrix (a row per word, then one per bucket of n-grams), the
output matrix (a row per label). A product-quantised matrix (.ftz; Jegou et al. 2011) has a code per few columns, and
one for the row's norm; the rows of the input are written out again here, which takes 4 bytes per number.
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gristmill.dataprep.files import as_path, is_local
from gristmill.dataprep.text.hashing import equal_bytes
from gristmill.dataprep.text.kernels import inner_kernel, kernel

MAGIC = 793_712_314
VERSIONS = (11, 12)
SUPERVISED = 3
HIERARCHICAL, NEGATIVE_SAMPLING, SOFTMAX, ONE_VS_ALL = 1, 2, 3, 4
"""`loss_name` in fastText's args.h."""
CENTROIDS = 256
MOST_ROW_BYTES = 4 << 30
"""A quantised matrix whose rows would take more is not read: such a model's point is to be small in memory."""
LARGEST = np.float32(1e15)
"""Beyond such numbers sums might not be finite, which fastText refuses."""
ENTRY_BYTES = 10
"""Of an entry of the dictionary beside its word: the zero at its end, a count of 8 bytes, a kind of 1."""
WORD_BITS = 64
LINE_BYTES = 128
"""Two lines of memory, which processors read together."""
SIGMOID_STEPS, SIGMOID_BOUND = 512, 8
"""fastText's table of the logistic function: so many steps between -8 and 8 (`SIGMOID_TABLE_SIZE`, `MAX_SIGMOID`)."""
LABEL_PREFIX = b"__label__"
"""How labels begin, and no word does (`Args::label`, which files do not have)."""
END_OF_LINE = np.frombuffer(b"</s>", np.uint8)
"""The word that fastText puts at the end of every line."""
FNV_OFFSET, FNV_PRIME = np.uint32(2_166_136_261), np.uint32(16_777_619)


class UnknownModelError(ValueError):
    """The kernels cannot use this model; the message says why."""


class DamagedModelError(UnknownModelError):
    """The file of a model is cut off or damaged, which fastText itself does not notice."""


class Dictionary(NamedTuple):
    """The words that a model knows, and its labels."""

    content: np.ndarray
    """uint8, the bytes of the file's dictionary."""
    starts: np.ndarray
    """int64, one per entry: where its word begins in `content`; words come before labels."""
    ends: np.ndarray
    """int64, likewise where it ends."""
    places: np.ndarray
    """uint64, a power of two of them: hash table of the entries by `hash_word`. 1 + the entry and, in the upper half,
    its hash; 0 where there is none."""


class Weights(NamedTuple):
    """A supervised model of d dimensions and n labels."""

    dictionary: Dictionary
    words: int
    """Entries that are words; the others are labels."""
    end_of_line: int
    """The entry `</s>`, or -1."""
    rows: np.ndarray
    """float32 of shape (words and buckets, d); of a pruned model the buckets that it kept, in their order."""
    kept: np.ndarray
    """uint64, a bit per bucket: which ones a pruned model kept; empty where all are there."""
    kept_before: np.ndarray
    """int32, per number of `kept` how many buckets are kept before it."""
    shortest: int
    """Code points of the shortest n-grams of a word."""
    longest: int
    """Code points of the longest ones; 0 without n-grams."""
    word_ngrams: int
    """Words of the longest n-grams of words."""
    buckets: int
    loss: int
    output: np.ndarray
    """float32: of shape (n, d), a row per inner node of the tree, for HIERARCHICAL; else of shape (d, n)."""
    norms: np.ndarray
    """float32 of shape (n,): what a product with each row (column) of `output` is multiplied by."""
    left: np.ndarray
    """int32, per node of the tree its first child, -1 for the leaves, which come first; empty without a tree."""
    right: np.ndarray
    """int32, likewise the second child; the last node is the root."""
    sigmoid: np.ndarray
    """float32 of shape (SIGMOID_STEPS + 1,)."""


class Head(NamedTuple):
    """How a file begins: settings under fastText's names (`Args`), and what the dictionary behind them has."""

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
    """Buckets that a pruned model kept; -1 for all."""


class Model(NamedTuple):
    """What a file says."""

    weights: Weights
    labels: tuple[str, ...]


def aligned(shape: tuple[int, ...], kind: Any) -> np.ndarray:
    """Zeros that begin where lines of memory do, so that rows of 64 bytes lie in one line each."""
    size = math.prod(shape) * np.dtype(kind).itemsize
    room = np.zeros(size + 2 * LINE_BYTES, np.uint8)
    first = -room.ctypes.data % LINE_BYTES
    return room[first : first + size].view(kind).reshape(shape)


class _Reader:
    """Reads a file from its beginning to its end."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self.mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.content = np.frombuffer(self.mapped, np.uint8)
        self.at = 0

    def numbers(self, kind: str) -> tuple[int, ...]:
        """The next numbers, of a format of `struct`."""
        size = struct.calcsize("<" + kind)
        found: tuple[int, ...] = struct.unpack("<" + kind, self.content[self.at : self.at + size].tobytes())
        self.at += size
        return found

    def array(self, kind: str, *shape: int) -> np.ndarray:
        """The next array, copied: in memory of its own it is aligned, and no longer a file's."""
        size = math.prod(shape)
        found: np.ndarray = np.frombuffer(self.content, np.dtype(kind).newbyteorder("<"), size, self.at)
        self.at += size * found.itemsize
        made = aligned(shape, np.dtype(kind))
        made.reshape(-1)[:] = found
        return made


def read_model(path: Path) -> Model:
    """Read a supervised model.

    Raises:
        DamagedModelError: the file is cut off or damaged.
        UnknownModelError: it is not one, or its quantised rows would take over MOST_ROW_BYTES.
    """
    try:
        return _read(_Reader(path))
    except UnknownModelError as error:
        raise type(error)(f"{path.name}: {error}") from error
    except (struct.error, ValueError, IndexError) as error:
        raise DamagedModelError(f"{path.name}: the file is cut off or damaged") from error


def read_labels(path: str) -> list[str] | None:
    """The labels of a model, from its file alone, which takes no time; None where it is not here or has another form.

    The words come before the labels in the file, and none begins like one (`dictionary.cc: getType`).
    """
    location = as_path(path)
    if not is_local(location) or not location.is_file():
        return None
    try:
        reader = _Reader(Path(str(location)))
        head = _read_head(reader)
    except (struct.error, ValueError):
        return None
    at = reader.mapped.find(LABEL_PREFIX, reader.at)
    labels: list[bytes] = []
    while at >= 0 and len(labels) < head.labels:
        end = reader.mapped.find(b"\0", at)
        labels.append(reader.mapped[at:end])
        at = end + ENTRY_BYTES
    is_whole = len(labels) == head.labels and all(label.startswith(LABEL_PREFIX) for label in labels)
    return [label.decode("utf-8", "replace") for label in labels] if is_whole else None


def _read_head(reader: _Reader) -> Head:
    magic, version = reader.numbers("ii")
    if magic != MAGIC or version not in VERSIONS:
        raise UnknownModelError(f"it is no fastText file of version {VERSIONS[0]} or {VERSIONS[-1]}")
    dim, _, _, _, _, word_ngrams, loss, kind, buckets, minn, maxn, _ = reader.numbers("12i")
    reader.numbers("d")
    if kind != SUPERVISED or loss not in (HIERARCHICAL, NEGATIVE_SAMPLING, SOFTMAX, ONE_VS_ALL):
        raise UnknownModelError("it predicts no labels")
    entries, words, labels, _, pruned = reader.numbers("3i2q")
    maxn = 0 if version == VERSIONS[0] else maxn  # supervised models of old files have no n-grams of characters
    return Head(dim, word_ngrams, loss, buckets, minn, maxn, entries, words, labels, pruned)


def _read(reader: _Reader) -> Model:
    d, word_ngrams, loss, buckets, shortest, longest, size, words, n, pruned = _read_head(reader)
    starts, ends, counts, bytes_taken = read_entries(reader.content[reader.at :], size)
    if bytes_taken < 0 or words + n != size or n < 1:
        raise DamagedModelError("its dictionary is damaged")
    content = reader.content[reader.at : reader.at + bytes_taken].copy()
    reader.at += bytes_taken
    if buckets < 1 and (longest > 0 or word_ngrams > 1):
        raise UnknownModelError("it has n-grams, but no buckets for them")
    kept, kept_before, kept_rows = _read_kept(reader, pruned, buckets)
    (quantised,) = reader.numbers("?")
    rows = _dequantise(*_read_quantised(reader, d)) if quantised else _read_dense(reader)
    (quantised_output,) = reader.numbers("?")
    output, norms = _read_quantised(reader, d) if quantised and quantised_output else (_read_dense(reader), None)
    used = kept_rows.max(initial=-1) + 1 if pruned >= 0 else buckets if longest > 0 or word_ngrams > 1 else 0
    if rows.shape[0] < words + used or rows.shape[1] != d or output.shape != (n, d) or (pruned >= 0) > quantised:
        raise DamagedModelError("its matrices do not go with its dictionary")
    if pruned >= 0:
        chosen = np.concatenate([np.arange(words), words + kept_rows])
        rows = np.take(rows, chosen, axis=0, out=aligned((len(chosen), d), rows.dtype))
    for matrix in (rows, output):
        if not (matrix.min(initial=0) > -LARGEST and matrix.max(initial=0) < LARGEST):
            raise UnknownModelError("its matrices have numbers that are not finite, or too large")
    tree = _grow_tree(counts[words:]) if loss == HIERARCHICAL else np.empty((2, 0), np.int32)
    entries = [content[start:end].tobytes() for start, end in zip(starts[words:], ends[words:], strict=True)]
    dictionary = make_dictionary(content, starts, ends)
    size = len(END_OF_LINE)
    last = int(find_entry(dictionary, hash_word(END_OF_LINE, 0, size), END_OF_LINE, 0, size))
    if loss != HIERARCHICAL:
        output = np.ascontiguousarray(output.T)
    norms = np.ones(n, np.float32) if norms is None else norms
    weights = Weights(
        dictionary,
        words,
        last,
        rows,
        kept,
        kept_before,
        shortest,
        longest,
        word_ngrams,
        buckets,
        loss,
        output,
        norms,
        tree[0],
        tree[1],
        sigmoid_table(),
    )
    return Model(weights, tuple(entry.decode("utf-8") for entry in entries))


def _read_dense(reader: _Reader) -> np.ndarray:
    m, d = reader.numbers("2q")
    return reader.array("f4", m, d)


def _read_quantised(reader: _Reader, d: int) -> tuple[np.ndarray, np.ndarray]:
    """The rows without their norms, float32 of shape (m, d), and the norms, float32 of shape (m,)."""
    has_norms, m, columns, size = reader.numbers("?2qi")
    if columns != d or m * d * 4 > MOST_ROW_BYTES:
        raise UnknownModelError(
            f"its {m} quantised rows of {columns} numbers would take {m * columns * 4:,} bytes, "
            f"more than {MOST_ROW_BYTES:,}"
        )
    codes = reader.array("u1", size)
    parts = _read_centroids(reader)
    codes = codes.reshape(m, len(parts))
    rows = np.concatenate([part[codes[:, number]] for number, part in enumerate(parts)], axis=1)
    norms = np.ones(m, np.float32)
    if has_norms:
        of_norms = reader.array("u1", m)
        (centroids,) = _read_centroids(reader)
        norms = centroids[of_norms, 0]
    return rows, norms


def _read_centroids(reader: _Reader) -> list[np.ndarray]:
    """A quantiser's centroids, per group of columns: float32 of shape (CENTROIDS, columns)."""
    columns, groups, width, last = reader.numbers("4i")
    centroids, at, found = reader.array("f4", columns * CENTROIDS), 0, []
    for number in range(groups):
        size = CENTROIDS * (last if number == groups - 1 else width)
        found.append(centroids[at : at + size].reshape(CENTROIDS, -1))
        at += size
    return found


def _dequantise(rows: np.ndarray, norms: np.ndarray) -> np.ndarray:
    return np.multiply(rows, norms[:, None], out=aligned(rows.shape, rows.dtype))


def _read_kept(reader: _Reader, pruned: int, buckets: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`kept` and `kept_before` of Weights, and the row behind the words of each kept bucket, int32.

    Args:
        pruned: how many buckets were kept, -1 for all.
    """
    if pruned < 0:
        return np.empty(0, np.uint64), np.empty(0, np.int32), np.empty(0, np.int32)
    pairs = reader.array("i4", pruned, 2)
    pairs = pairs[np.argsort(pairs[:, 0])]
    if pruned and not 0 <= pairs[0, 0] <= pairs[-1, 0] < buckets:
        raise DamagedModelError("its list of kept n-grams is damaged")
    kept = np.zeros(max(1, -(-buckets // WORD_BITS)), np.uint64)
    np.bitwise_or.at(kept, pairs[:, 0] // WORD_BITS, np.uint64(1) << (pairs[:, 0] % WORD_BITS).astype(np.uint64))
    before = np.searchsorted(pairs[:, 0], np.arange(len(kept)) * WORD_BITS).astype(np.int32)
    return kept, before, pairs[:, 1]


def _grow_tree(counts: np.ndarray) -> np.ndarray:
    """The Huffman tree of n labels, their counts descending: int32 of shape (2, 2 n - 1), the children of each node.

    As `HierarchicalSoftmaxLoss::buildTree`: the two nodes of the least count become children of the next one.
    """
    n = len(counts)
    weights = [*counts.tolist(), *[10**15] * (n - 1)]
    children = np.full((2, 2 * n - 1), -1, np.int32)
    leaf, node = n - 1, n
    for parent in range(n, 2 * n - 1):
        for side in range(2):
            if leaf >= 0 and weights[leaf] < weights[node]:
                children[side, parent], leaf = leaf, leaf - 1
            else:
                children[side, parent], node = node, node + 1
        weights[parent] = weights[children[0, parent]] + weights[children[1, parent]]
    return children


def path_to(weights: Weights, label: int) -> np.ndarray:
    """The nodes of a tree from its root to a label: int32; empty without a tree."""
    path = [label] if len(weights.left) else []
    while path and path[-1] < len(weights.left) - 1:
        path.append(int(np.flatnonzero((weights.left == path[-1]) | (weights.right == path[-1]))[0]))
    return np.array(path[::-1], np.int32)


@kernel
def read_entries(content: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Read so many entries of a dictionary: a word that ends in a zero, its count (8 bytes), its kind (1 byte).

    Returns:
        starts, ends, counts: int64 of shape (size,); and how many bytes they take, -1 where the content ends before.
    """
    starts, ends, counts = np.empty(size, np.int64), np.empty(size, np.int64), np.zeros(size, np.int64)
    at = 0
    for entry in range(size):
        starts[entry] = at
        while at < len(content) and content[at]:
            at += 1
        ends[entry] = at
        if at + ENTRY_BYTES > len(content):
            return starts, ends, counts, -1
        for byte in range(8):
            counts[entry] |= np.int64(content[at + 1 + byte]) << (8 * byte)
        at += ENTRY_BYTES
    return starts, ends, counts, at


@inner_kernel
def hash_step(value: np.uint32, byte: np.uint8) -> np.uint32:
    """One step of fastText's hash: FNV-1a, except that bytes from 0x80 on count as negative (`Dictionary::hash`)."""
    signed = np.uint32(byte) | np.uint32(0xFFFFFF00) * np.uint32(byte >> np.uint8(7))
    return np.uint32(np.uint32(value ^ np.uint32(signed)) * FNV_PRIME)


@inner_kernel
def hash_word(data: np.ndarray, begin: int, end: int) -> np.uint32:
    """fastText's hash of some bytes."""
    value = FNV_OFFSET
    for at in range(np.uint64(begin), np.uint64(end)):
        value = hash_step(value, data[at])
    return value


@kernel
def make_dictionary(content: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> Dictionary:
    """Put entries into a table that is at most half full; of two equal ones the later is in it, as in fastText's."""
    size = 2
    while size < 2 * len(starts):
        size *= 2
    made = Dictionary(content, starts, ends, np.zeros(size, np.uint64))
    for entry in range(len(starts)):
        value = hash_word(content, starts[entry], ends[entry])
        place = find_place(made, value, content, starts[entry], ends[entry])
        made.places[place] = np.uint64(value) << np.uint64(32) | np.uint64(entry + 1)
    return made


@inner_kernel
def find_entry(dictionary: Dictionary, value: np.uint32, data: np.ndarray, begin: int, end: int) -> int:
    """The entry whose word is `data[begin:end]`, or -1; `value` is the word's hash."""
    found = dictionary.places[find_place(dictionary, value, data, begin, end)] & np.uint64(0xFFFFFFFF)
    return int(np.int64(found)) - 1


@inner_kernel
def find_place(dictionary: Dictionary, value: np.uint32, data: np.ndarray, begin: int, end: int) -> np.uint64:
    """Where in the table a word is, or would be; `value` is its hash."""
    places, mask = dictionary.places, np.uint64(len(dictionary.places) - 1)
    place = np.uint64(value) & mask
    while places[place]:
        if places[place] >> np.uint64(32) == np.uint64(value):
            entry = np.int64(places[place] & np.uint64(0xFFFFFFFF)) - 1
            start = dictionary.starts[entry]
            size = dictionary.ends[entry] - start
            if size == end - begin and equal_bytes(dictionary.content, start, data, begin, size):
                break
        place = (place + np.uint64(1)) & mask
    return place


@kernel
def sigmoid_table() -> np.ndarray:
    """The logistic function as fastText has it, in steps: float32 of shape (SIGMOID_STEPS + 1,)."""
    table = np.empty(SIGMOID_STEPS + 1, np.float32)
    for step in range(SIGMOID_STEPS + 1):
        x = np.float32(np.float32(step * 2 * SIGMOID_BOUND) / np.float32(SIGMOID_STEPS)) - np.float32(SIGMOID_BOUND)
        table[step] = 1.0 / (1.0 + float(math.exp(np.float32(-x))))
    return table

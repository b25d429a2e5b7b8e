"""Predictors with fastText models, by our kernels: label probabilities from the averaged
rows of a line.

fastText 0.9.3 (`loss.cc`) takes the logarithm of every share plus 1e-5 and, in a tree
(hierarchical softmax; Morin & Bengio 2005), adds logarithms along the path to a label.
Here shares plus 1e-5 are multiplied in double precision, which is equivalent and needs
no logarithm per node. All other differences only save work: products of sixteen numbers
at once, and the likelier child of a node first, so that most of the tree is never
visited.
"""

from __future__ import annotations

import math
import tempfile
import threading
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa

from gristmill.core.files import as_path, is_local, sha256_file
from gristmill.dataprep.fasttext.fasttext_files import (
    HIERARCHICAL,
    SIGMOID_BOUND,
    SIGMOID_STEPS,
    SOFTMAX,
    Weights,
    aligned,
    path_to,
    read_model,
)
from gristmill.dataprep.fasttext.fasttext_words import (
    Cache,
    Lines,
    average_rows,
    make_cache,
)
from gristmill.dataprep.fasttext.float_rows import FLOAT_BYTES, dot_floats
from gristmill.dataprep.text.kernels import (
    Bytes,
    Offsets,
    inner_kernel,
    kernel,
    text_buffers,
)
from gristmill.dataprep.text.simd import address_of
from gristmill.dataprep.text.spans import count_code_points

BATCH_LINES = 4096
"""Lines whose averaged rows are in memory at once."""
STEP = 4
"""Least numbers of a row that are added at once."""
ADDED = 1e-5
"""fastText's addition to a share before the logarithm (`std_log`)."""
LEAST_SHARE = ADDED
"""Share below which nodes are skipped: fastText's threshold is 0, plus the same
addition.
"""
NEAR = 0.99
"""Least ratio of shares whose order may depend on the order of the walk: each step adds
1e-5.
"""
CLEARLY_LESS = np.float32(0.999)
"""Ratio of shares that guarantees a smaller logarithm, in single precision too."""


def lines_of(
    texts: pa.Array | Sequence[str], max_characters: int | None = None
) -> Lines:
    """Texts as lines, truncated to their first `max_characters`."""
    array = texts if isinstance(texts, pa.Array) else pa.array(texts, pa.large_string())
    data, offsets = text_buffers(array)
    return Lines(data, offsets[:-1], find_heads(data, offsets, max_characters))


def find_heads(data: Bytes, offsets: Offsets, max_characters: int | None) -> np.ndarray:
    """Ends of the first `max_characters` code points of texts, or of all of them:
    int64, one per text.
    """
    if max_characters is None:
        return offsets[1:]
    return _find_heads(data, offsets, max_characters)


@kernel
def _find_heads(data: Bytes, offsets: Offsets, characters: int) -> np.ndarray:
    ends = np.empty(len(offsets) - 1, np.int64)
    for text in range(len(ends)):
        position = offsets[text]
        end = offsets[text + 1]
        remaining = characters
        if end - position <= characters:
            ends[text] = end
            continue
        while remaining >= 8 and position + 8 <= end:
            remaining -= count_code_points(data, position, position + 8)
            position += 8
        while position < end and (remaining or data[position] & 0xC0 == 0x80):
            remaining -= data[position] & 0xC0 != 0x80
            position += 1
        ends[text] = position
    return ends


def multiply_rows(weights: Weights) -> Weights:
    """Replace a model's rows by their products with the outputs if these are shorter.

    An output is the product of the averaged rows with a vector, which equals the
    average of the rows' products: with two labels and 32 dimensions an eighth of the
    memory is read. Results differ in the last bits.

    Returns:
        a model with the same probabilities; `weights` themselves if the products need
        more than half of the rows' memory.
    """
    d = weights.rows.shape[1]
    n = len(weights.norms)
    width = -(-n // STEP) * STEP
    if 2 * width > d:
        return weights
    is_tree = weights.loss == HIERARCHICAL
    rows = aligned((len(weights.rows), width), np.float32)
    output = np.eye(width, n, dtype=np.float32)
    multiply(
        weights.rows,
        np.ascontiguousarray(weights.output.T) if is_tree else weights.output,
        weights.norms,
        rows,
    )
    return weights._replace(
        rows=rows,
        output=np.ascontiguousarray(output.T) if is_tree else output,
        norms=np.ones(n, np.float32),
    )


@kernel
def multiply(
    rows: np.ndarray, output: np.ndarray, norms: np.ndarray, products: np.ndarray
) -> None:
    """Multiply rows (m, d) with outputs (d, n) and their norms into the first n columns
    of `products` (m, ...).
    """
    for row in range(len(rows)):
        for label in range(len(norms)):
            total = 0.0
            for column in range(rows.shape[1]):
                total += np.float64(rows[row, column]) * np.float64(
                    output[column, label]
                )
            products[row, label] = np.float32(total * np.float64(norms[label]))


@kernel
def find_tops(
    weights: Weights,
    hidden: np.ndarray,
    counts: np.ndarray,
    labels: np.ndarray,
    shares: np.ndarray,
) -> None:
    """Find the likeliest label of n lines.

    Args:
        hidden, counts: from `average_rows`.
        labels: int32 of shape (n,), filled: -1 for a line without known tokens.
        shares: float64 of shape (n,), filled: the label's probability; 0 without a
            label.
    """
    n = len(weights.norms)
    nodes = np.empty(n + 1, np.int32)
    scores = np.empty(n + 1, np.float64)
    outputs = np.empty(n, np.float32)
    _find_tops(weights, hidden, counts, labels, shares, nodes, scores, outputs)


@inner_kernel
def _find_tops(
    weights: Weights,
    hidden: np.ndarray,
    counts: np.ndarray,
    labels: np.ndarray,
    shares: np.ndarray,
    nodes: np.ndarray,
    scores: np.ndarray,
    outputs: np.ndarray,
) -> None:
    loss = weights.loss
    output = weights.output
    norms = weights.norms
    table = weights.sigmoid
    left_children = weights.left
    right_children = weights.right
    for line in range(len(counts)):
        labels[line], shares[line] = -1, 0.0
        if counts[line] == 0:
            continue
        if loss == HIERARCHICAL:
            for likelier_first in (True, False):
                label, share, next_share = find_leaf(
                    left_children,
                    right_children,
                    output,
                    norms,
                    hidden,
                    line,
                    nodes,
                    scores,
                    likelier_first,
                )
                if next_share <= NEAR * share:
                    break
        else:
            find_outputs(output, norms, table, loss == SOFTMAX, hidden[line], outputs)
            label, score = find_largest(outputs)
            share = math.exp(score)
        if label >= 0:
            labels[line], shares[line] = label, share


@kernel
def find_shares(
    weights: Weights,
    hidden: np.ndarray,
    counts: np.ndarray,
    label: int,
    path: np.ndarray,
    shares: np.ndarray,
) -> None:
    """Find the probability of one label for n lines.

    Args:
        hidden, counts: from `average_rows`.
        path: int32, with a tree: the nodes from the root to the label.
        shares: float64 of shape (n,), filled: 0 if the model has no answer.
    """
    n = len(weights.norms)
    loss = weights.loss
    output = weights.output
    norms = weights.norms
    table = weights.sigmoid
    right_children = weights.right
    outputs = np.empty(n, np.float32)
    for line in range(len(counts)):
        shares[line] = 0.0
        if counts[line] == 0:
            continue
        if loss == HIERARCHICAL:
            share = share_of_path(right_children, output, norms, hidden, line, path)
            if share >= LEAST_SHARE:
                shares[line] = share
        else:
            find_outputs(output, norms, table, loss == SOFTMAX, hidden[line], outputs)
            shares[line] = math.exp(log_of(outputs[label]))


@inner_kernel
def log_of(share: np.float32) -> np.float32:
    """fastText's `std_log`."""
    return np.float32(math.log(np.float64(share) + ADDED))


@inner_kernel
def find_leaf(
    left: np.ndarray,
    right: np.ndarray,
    output: np.ndarray,
    norms: np.ndarray,
    hidden: np.ndarray,
    line: int,
    nodes: np.ndarray,
    scores: np.ndarray,
    likelier_first: bool,
) -> tuple[int, float, float]:
    """Walk the tree, skipping nodes whose share is below that of the best leaf so far.

    Args:
        left, right, output, norms: of the Weights.
        hidden: from `average_rows`; only row `line` is read.
        nodes, scores: scratch space of the number of labels plus one.
        likelier_first: visit the likelier child first; False for always the first
            child, as fastText.

    Returns:
        the leaf, or -1; its share; the share of the best skipped node.
    """
    best = -1
    best_share = 0.0
    next_share = LEAST_SHARE
    nodes[0], scores[0], stack_size = len(left) - 1, 1.0, np.uint64(1)
    while stack_size:
        stack_size -= np.uint64(1)
        node = nodes[stack_size]
        share = scores[stack_size]
        if share < LEAST_SHARE:
            continue
        if share < best_share:
            next_share = max(next_share, share)
            continue
        if left[node] < 0:
            next_share = max(next_share, best_share)
            best = node
            best_share = share
            continue
        right_probability = share_of_right(
            output, norms, hidden, line, node - len(norms)
        )
        left_share = share * (of_other(right_probability) + ADDED)
        right_share = share * (np.float64(right_probability) + ADDED)
        first = stack_size + np.uint64(1)
        second = stack_size
        if likelier_first and left_share <= right_share:
            first, second = second, first
        nodes[first], scores[first] = left[node], left_share
        nodes[second], scores[second] = right[node], right_share
        stack_size += np.uint64(2)
    return best, best_share, next_share


@inner_kernel
def share_of_right(
    output: np.ndarray, norms: np.ndarray, hidden: np.ndarray, line: int, row: int
) -> np.float32:
    """Share of an inner node, identified by its row of `output`, that goes to its
    second child.
    """
    d = hidden.shape[1]
    product = dot_floats(
        address_of(output) + FLOAT_BYTES * d * row,
        address_of(hidden) + FLOAT_BYTES * d * line,
        d,
    )
    return np.float32(1.0 / np.float64(np.float32(1) + math.exp(-product * norms[row])))


@inner_kernel
def of_other(share: np.float32) -> float:
    """Share of the first child, in single precision as in fastText."""
    return np.float64(np.float32(1.0 - np.float64(share)))


@inner_kernel
def share_of_path(
    right: np.ndarray,
    output: np.ndarray,
    norms: np.ndarray,
    hidden: np.ndarray,
    line: int,
    path: np.ndarray,
) -> float:
    """Share of the leaf at the end of a path from the root; below LEAST_SHARE if a node
    on the path is.
    """
    share = 1.0
    for step in range(len(path) - 1):
        right_probability = share_of_right(
            output, norms, hidden, line, path[step] - len(norms)
        )
        share *= (
            np.float64(right_probability)
            if right[path[step]] == path[step + 1]
            else of_other(right_probability)
        ) + ADDED
        if share < LEAST_SHARE:
            break
    return share


@inner_kernel
def find_outputs(
    output: np.ndarray,
    norms: np.ndarray,
    table: np.ndarray,
    softmax: bool,
    hidden: np.ndarray,
    outputs: np.ndarray,
) -> None:
    """Fill `outputs`, float32 of shape (n,), with label probabilities, by a softmax or
    independently.
    """
    n = len(outputs)
    outputs[:] = 0
    for row in range(len(hidden)):
        value = hidden[row]
        for label in range(n):
            outputs[label] += output[row, label] * value
    for label in range(n):
        outputs[label] *= norms[label]
    if softmax:
        largest = outputs[0]
        total = np.float32(0)
        for label in range(n):
            largest = max(largest, outputs[label])
        for label in range(n):
            outputs[label] = np.float32(math.exp(np.float64(outputs[label] - largest)))
            total += outputs[label]
        for label in range(n):
            outputs[label] /= total
        return
    for label in range(n):
        outputs[label] = sigmoid(table, outputs[label])


@inner_kernel
def sigmoid(table: np.ndarray, x: np.float32) -> np.float32:
    """Logistic function by fastText's table."""
    if x < -SIGMOID_BOUND:
        return np.float32(0)
    if x > SIGMOID_BOUND:
        return np.float32(1)
    return table[
        np.int64(
            (x + np.float32(SIGMOID_BOUND))
            * np.float32(SIGMOID_STEPS // (2 * SIGMOID_BOUND))
        )
    ]


@inner_kernel
def find_largest(outputs: np.ndarray) -> tuple[int, np.float32]:
    """Label of the largest output, and its logarithm; the last label if logarithms are
    equal in single precision.
    """
    best = -1
    best_score = np.float32(0)
    largest = np.float32(0)
    for label in range(len(outputs)):
        if best >= 0 and outputs[label] < CLEARLY_LESS * largest:
            continue
        score = log_of(outputs[label])
        if best < 0 or score >= best_score:
            best = label
            best_score = score
            largest = outputs[label]
    return best, best_score


class Predictor:
    """Supervised model that threads may share; every thread has a cache of at most
    `fasttext_words.MOST_CACHE_BYTES`.

    `shares` is for classifiers, mostly of two labels: products with the outputs replace
    their rows (`multiply_rows`).
    """

    def __init__(self, weights: Weights, labels: tuple[str, ...]) -> None:
        self.labels = labels
        self._rows = _Rows(weights)

    def tops(self, lines: Lines) -> tuple[np.ndarray, np.ndarray]:
        """Likeliest label's index, int32, and its probability, float64, for n lines; -1
        and 0 if there is none.
        """
        labels = np.empty(len(lines.begins), np.int32)
        shares = np.empty(len(lines.begins), np.float64)
        for batch, hidden, counts in self._rows.averages(lines):
            find_tops(self._rows.weights, hidden, counts, labels[batch], shares[batch])
        return labels, shares

    def shares(self, lines: Lines, label: str) -> np.ndarray:
        """Probability of one label for n lines: float64 of shape (n,)."""
        shares = np.empty(len(lines.begins), np.float64)
        number = self.labels.index(label)
        rows = self._outputs
        path = path_to(rows.weights, number)
        for batch, hidden, counts in rows.averages(lines):
            find_shares(rows.weights, hidden, counts, number, path, shares[batch])
        return shares

    @cached_property
    def _outputs(self) -> _Rows:
        products = multiply_rows(self._rows.weights)
        return self._rows if products is self._rows.weights else _Rows(products)


class _Rows:
    """Rows of a model, and a cache of their sums per thread."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self._of_thread = threading.local()

    def averages(self, lines: Lines) -> Iterator[tuple[slice, np.ndarray, np.ndarray]]:
        """Yield averaged rows batch by batch: the slice of lines, and the arrays that
        `average_rows` fills.
        """
        if not hasattr(self._of_thread, "cache"):
            self._of_thread.cache = make_cache(self.weights)
        cache: Cache = self._of_thread.cache
        for first in range(0, len(lines.begins), BATCH_LINES):
            batch_slice = slice(first, first + BATCH_LINES)
            batch = Lines(
                lines.data, lines.begins[batch_slice], lines.ends[batch_slice]
            )
            hidden = np.empty(
                (len(batch.begins), self.weights.rows.shape[1]), np.float32
            )
            counts = np.empty(len(batch.begins), np.int64)
            average_rows(self.weights, cache, batch, hidden, counts)
            yield batch_slice, hidden, counts


@lru_cache(maxsize=4)
def load_model(path: str, sha256: str) -> Predictor:
    """Load a fastText model once per process; threads share it.

    Args:
        path: of the file.
        sha256: of its content, so that the cache does not serve a replaced file.

    Raises:
        UnknownModelError: the kernels do not support the model, or it is damaged.
    """
    location = as_path(path)
    if is_local(location):
        return Predictor(*read_model(Path(str(location))))
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "model.bin"
        copy.write_bytes(location.read_bytes())
        return Predictor(*read_model(copy))


@lru_cache(maxsize=8)
def model_at(path: str) -> Predictor:
    """Load the fastText model of a file once per process, by its content; threads share
    it.
    """
    return load_model(path, sha256_file(as_path(path)))

"""From the averaged rows of a line to labels: the outputs of a fastText model.

fastText 0.9.3 (`loss.cc`) takes the logarithm of every share with 1e-5 added, in single precision, and adds logarithms
along the path of a tree (hierarchical softmax; Morin & Bengio 2005); all of that is done here in the same order and the
same precision. What is done otherwise only saves work: the products of all labels at once, and the likelier child of a
node first, so that most of the tree is never looked at.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from gristmill.dataprep.judges.fasttext_files import (
    HIERARCHICAL,
    SIGMOID_BOUND,
    SIGMOID_STEPS,
    SOFTMAX,
    Weights,
)
from gristmill.dataprep.judges.fasttext_words import Lines, borrow
from gristmill.dataprep.text.kernels import kernel, text_buffers, unowned
from gristmill.dataprep.text.spans import count_code_points

LEAST_SCORE = np.float32(math.log(1e-5))
"""Nodes of a lower score are left out: `std_log` of fastText's threshold, 0."""
NEAR = np.float32(0.01)
"""Scores that differ by less may change places by the order in which a tree is walked: a step adds up to 1e-5."""
CLEARLY_LESS = np.float32(0.999)
"""The logarithm of a share that is so much less than another is less, in single precision too."""


def lines_of(texts: pa.Array | Sequence[str], max_characters: int | None = None) -> Lines:
    """Texts as lines, each of its first characters only where there is a bound."""
    data, offsets = text_buffers(texts if isinstance(texts, pa.Array) else pa.array(texts, pa.large_string()))
    if max_characters is None:
        return Lines(data, offsets[:-1], offsets[1:])
    return Lines(data, offsets[:-1], find_heads(data, offsets, max_characters))


@kernel
def find_heads(data: np.ndarray, offsets: np.ndarray, characters: int) -> np.ndarray:
    """Where the first so many code points of each text end: int64, one per text."""
    ends = np.empty(len(offsets) - 1, np.int64)
    for text in range(len(ends)):
        at, end, left = offsets[text], offsets[text + 1], characters
        if end - at <= characters:
            ends[text] = end
            continue
        while left >= 8 and at + 8 <= end:
            left -= count_code_points(data, at, at + 8)
            at += 8
        while at < end and (left or data[at] & 0xC0 == 0x80):
            left -= data[at] & 0xC0 != 0x80
            at += 1
        ends[text] = at
    return ends


@kernel
def find_tops(weights: Weights, hidden: np.ndarray, counts: np.ndarray, labels: np.ndarray, shares: np.ndarray) -> None:
    """Find the likeliest label of n lines.

    Args:
        hidden, counts: as `average_rows` has them.
        labels: int32 of shape (n,), filled: -1 where a line has nothing that the model knows.
        shares: float64 of shape (n,), filled: the label's probability; 0 where there is none.
    """
    n = len(weights.norms)
    nodes, scores = np.empty(n + 1, np.int32), np.empty(n + 1, np.float32)
    _find_tops(borrow(weights), unowned(hidden), counts, labels, shares, unowned(nodes), unowned(scores))


@kernel
def _find_tops(
    weights: Weights, hidden: np.ndarray, counts: np.ndarray, labels: np.ndarray, shares: np.ndarray,
    nodes: np.ndarray, scores: np.ndarray,
) -> None:
    n, loss, output, norms, table = len(weights.norms), weights.loss, weights.output, weights.norms, weights.sigmoid
    left, right = weights.left, weights.right
    for line in range(len(counts)):
        labels[line], shares[line] = -1, 0.0
        if counts[line] == 0:
            continue
        if loss == HIERARCHICAL:
            label, score, lead = find_leaf(left, right, output, norms, hidden[line], nodes, scores, True)
            if lead < NEAR:
                label, score, lead = find_leaf(left, right, output, norms, hidden[line], nodes, scores, False)
        else:
            find_outputs(output, norms, table, loss == SOFTMAX, hidden[line], scores[:n])
            label, score = find_largest(scores[:n])
        if label >= 0:
            labels[line], shares[line] = label, math.exp(score)


@kernel
def find_shares(
    weights: Weights, hidden: np.ndarray, counts: np.ndarray, label: int, path: np.ndarray, shares: np.ndarray
) -> None:
    """Find the probability of one label for n lines.

    Args:
        hidden, counts: as `average_rows` has them.
        path: int32, with a tree: the nodes from the root to the label, which is the last.
        shares: float64 of shape (n,), filled: 0 where the model has no answer.
    """
    n, loss, output, norms, table = len(weights.norms), weights.loss, weights.output, weights.norms, weights.sigmoid
    right, outputs = weights.right, np.empty(n, np.float32)
    for line in range(len(counts)):
        shares[line] = 0.0
        if counts[line] == 0:
            continue
        if loss == HIERARCHICAL:
            score = score_path(right, output, norms, hidden[line], path)
            if score >= LEAST_SCORE:
                shares[line] = math.exp(score)
        else:
            find_outputs(output, norms, table, loss == SOFTMAX, hidden[line], outputs)
            shares[line] = math.exp(log_of(outputs[label]))


@kernel
def log_of(share: np.float32) -> np.float32:
    """fastText's `std_log`."""
    return np.float32(math.log(np.float64(share) + 1e-5))


@kernel
def find_leaf(
    left: np.ndarray, right: np.ndarray, output: np.ndarray, norms: np.ndarray, hidden: np.ndarray, nodes: np.ndarray,
    scores: np.ndarray, likelier_first: bool,
) -> tuple[int, np.float32, np.float32]:
    """Walk the tree, without the nodes whose score is below that of the best leaf so far.

    Args:
        left, right, output, norms: of the Weights.
        hidden: float32 of shape (d,).
        nodes, scores: room for as many nodes as there are labels, and one more.
        likelier_first: or always the first child first, as fastText does.

    Returns:
        the leaf, -1 if there is none; its score; by how much the best node that was left out is below it.
    """
    best, best_score, next_score = -1, np.float32(0), LEAST_SCORE
    nodes[0], scores[0], waiting = len(left) - 1, np.float32(0), 1
    while waiting:
        waiting -= 1
        node, score = nodes[waiting], scores[waiting]
        if score < LEAST_SCORE:
            continue
        if best >= 0 and score < best_score:
            next_score = max(next_score, score)
            continue
        if left[node] < 0:
            if best >= 0:
                next_score = max(next_score, best_score)
            best, best_score = node, score
            continue
        share = share_of_right(output, norms, hidden, node - len(norms))
        of_left, of_right = score + log_of(np.float32(1.0 - np.float64(share))), score + log_of(share)
        left_first = not likelier_first or of_left > of_right
        first, second = waiting + 1, waiting
        if not left_first:
            first, second = second, first
        nodes[first], scores[first] = left[node], of_left
        nodes[second], scores[second] = right[node], of_right
        waiting += 2
    return best, best_score, best_score - next_score


@kernel
def share_of_right(output: np.ndarray, norms: np.ndarray, hidden: np.ndarray, row: int) -> np.float32:
    """The share of an inner node, given by its row of `output`, that goes to its second child."""
    product, place = np.float32(0), np.uint64(row)
    for column in range(len(hidden)):
        product += output[place, column] * hidden[column]
    product *= norms[place]
    return np.float32(1.0 / np.float64(np.float32(1) + math.exp(-product)))


@kernel
def score_path(
    right: np.ndarray, output: np.ndarray, norms: np.ndarray, hidden: np.ndarray, path: np.ndarray
) -> np.float32:
    """The score of the leaf at the end of a path from the root; what is below LEAST_SCORE where a node on it is."""
    score = np.float32(0)
    for step in range(len(path) - 1):
        share = share_of_right(output, norms, hidden, path[step] - len(norms))
        if right[path[step]] == path[step + 1]:
            score += log_of(share)
        else:
            score += log_of(np.float32(1.0 - np.float64(share)))
        if score < LEAST_SCORE:
            break
    return score


@kernel
def find_outputs(
    output: np.ndarray, norms: np.ndarray, table: np.ndarray, softmax: bool, hidden: np.ndarray, outputs: np.ndarray
) -> None:
    """Find every label's probability, of a softmax or for itself: `outputs`, float32 of shape (n,), is filled."""
    n = len(outputs)
    outputs[:] = 0
    for row in range(len(hidden)):
        value = hidden[row]
        for label in range(n):
            outputs[label] += output[row, label] * value
    for label in range(n):
        outputs[label] *= norms[label]
    if softmax:
        largest, total = outputs[0], np.float32(0)
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


@kernel
def sigmoid(table: np.ndarray, x: np.float32) -> np.float32:
    """The logistic function in fastText's steps."""
    if x < -SIGMOID_BOUND:
        return np.float32(0)
    if x > SIGMOID_BOUND:
        return np.float32(1)
    return table[np.int64((x + np.float32(SIGMOID_BOUND)) * np.float32(SIGMOID_STEPS // (2 * SIGMOID_BOUND)))]


@kernel
def find_largest(outputs: np.ndarray) -> tuple[int, np.float32]:
    """The label of the largest output, and its logarithm; of those of equal logarithms in single precision the last."""
    best, best_score, largest = -1, np.float32(0), np.float32(0)
    for label in range(len(outputs)):
        if best >= 0 and outputs[label] < CLEARLY_LESS * largest:
            continue
        score = log_of(outputs[label])
        if best < 0 or score >= best_score:
            best, best_score, largest = label, score, outputs[label]
    return best, best_score

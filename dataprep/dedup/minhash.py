"""MinHash signatures and their bands: documents that share a band are candidate pairs.

The signatures equal those of datasketch 2 (`MinHash(..., scheme="affine32")`) bit for
bit over the shingle hashes of `shingles.py`: the permutations are drawn as there, with the
same seed. Two texts agree in one value with the probability of their Jaccard
similarity J (Broder 1997), and in all rows of at least one band with probability 1 - (1
- J^r)^b (Leskovec, Rajaraman, Ullman, Mining of Massive Datasets, section 3.4).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from gristmill.dataprep.dedup.shingles import ShingleSets
from gristmill.dataprep.text.hashing import ODD, fmix32, fmix64
from gristmill.dataprep.text.kernels import kernel


@lru_cache(maxsize=4)
def permutations(num_permutations: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Permutations h -> a * h + b mod 2^32: a (odd) and b, uint32 of shape
    (num_permutations,).

    Drawn as in datasketch (`MinHash._init_permutations`), whose import loads SciPy and
    clients of databases, a third of a second.
    """
    generator = np.random.RandomState(seed)
    a = 2 * generator.randint(0, 1 << 31, num_permutations, np.uint32) + 1
    return a, generator.randint(0, 1 << 32, num_permutations, np.uint32)


def signatures(sets: ShingleSets, num_permutations: int, seed: int) -> np.ndarray:
    """MinHash signatures: uint32 of shape (n, num_permutations); all ones (2^32 - 1)
    for a text without shingles.
    """
    return _signatures(sets, *permutations(num_permutations, seed))


@kernel
def _signatures(sets: ShingleSets, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Hash four shingles at a time, so that the row, a and b are read once for four
    permuted values.
    """
    hashes, offsets = sets
    result = np.full((len(offsets) - 1, len(a)), np.uint32(0xFFFFFFFF), np.uint32)
    for text in range(len(offsets) - 1):
        row = result[text]
        position = offsets[text]
        end = offsets[text + 1]
        while end - position >= 4:
            first = fmix32(hashes[position])
            second = fmix32(hashes[position + 1])
            third = fmix32(hashes[position + 2])
            fourth = fmix32(hashes[position + 3])
            for k in range(len(a)):
                lower_pair = min(
                    np.uint32(a[k] * first + b[k]), np.uint32(a[k] * second + b[k])
                )
                upper_pair = min(
                    np.uint32(a[k] * third + b[k]), np.uint32(a[k] * fourth + b[k])
                )
                row[k] = min(row[k], min(lower_pair, upper_pair))
            position += 4
        for shingle in hashes[position:end]:
            mixed = fmix32(shingle)
            for k in range(len(a)):
                row[k] = min(row[k], np.uint32(a[k] * mixed + b[k]))
    return result


@kernel
def band_keys(signature: np.ndarray, bands: int, rows: int) -> np.ndarray:
    """One 64-bit key per text and band; equal keys mean equal rows of the same band.

    Different bands collide with probability 2^-64 per pair.

    Args:
        signature: uint32 of shape (n, bands * rows).

    Returns:
        uint64 of shape (n, bands).
    """
    keys = np.empty((len(signature), bands), np.uint64)
    for text in range(len(signature)):
        for band in range(bands):
            value = np.uint64(band + 1)
            for row in range(rows):
                value = value * ODD + np.uint64(signature[text, band * rows + row])
                value ^= value >> np.uint64(29)
            keys[text, band] = fmix64(value)
    return keys

"""Loss masks of a packed set: one bit per token, in a file beside each shard of a
fine-tuning set.

`train-00000.mask` belongs to `train-00000.bin`: rows of ceil(L / 8) bytes, the first
token in the lowest bit. A token whose bit is set is predicted from the previous tokens
of its piece. A set without mask files trains on all tokens.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from gristmill.core.files import canonical_json, sha256_file, write_bytes
from gristmill.tokenize.packed import PackedSet
from gristmill.tokenize.packed_files import (
    by_shard,
    check_content,
    check_size,
    read_tokens,
)

ROWS_AT_A_TIME = 4096


def mask_name(file: str) -> str:
    """File name of the mask beside a shard."""
    return f"{file.removesuffix('.bin')}.mask"


def write_mask(path: Path, trained: np.ndarray) -> str:
    """Write a shard's mask, (rows, L) bool; returns the file's SHA-256."""
    write_bytes(path, np.packbits(trained, axis=1, bitorder="little").tobytes())
    return sha256_file(path)


class LossMasks:
    """Memory-mapped masks of a packed set on a local disk.

    Attributes:
        trained_per_row: int64 of shape (R,), trained tokens of each row.
        fingerprint: 32 hexadecimal digits of the set and its masks.

    Raises:
        PackedSetError: a mask is missing, has the wrong size, or differs from its
            checksum.
    """

    def __init__(self, packed: PackedSet) -> None:
        self._length = packed.sequence_length
        width = -(-self._length // 8)
        self._parts: list[np.ndarray] = []
        checksums = {}
        for shard in packed.shards:
            name, rows = mask_name(shard["file"]), shard["rows"]
            check_size(packed.folder / name, rows, width)
            mask = read_tokens(packed.folder / name, np.dtype(np.uint8))
            self._parts.append(mask.reshape(rows, width))
            checksums[name] = shard["beside"][name]
        check_content(packed.folder, checksums)
        self._ends = np.cumsum([len(part) for part in self._parts], dtype=np.int64)
        counts = [np.empty(0, np.int64)]
        for part in self._parts:
            for start in range(0, len(part), ROWS_AT_A_TIME):
                bits = np.bitwise_count(part[start : start + ROWS_AT_A_TIME])
                counts.append(bits.sum(axis=1, dtype=np.int64))
        self.trained_per_row = np.concatenate(counts)
        self.fingerprint = hashlib.blake2b(
            canonical_json([packed.fingerprint, [*checksums.values()]]), digest_size=16
        ).hexdigest()

    def read(self, rows: np.ndarray) -> np.ndarray:
        """Masks of rows: (n, L) bool, in the requested order."""
        bits = np.empty((len(rows), -(-self._length // 8)), np.uint8)
        for shard, within, places in by_shard(np.asarray(rows), self._ends):
            bits[places] = self._parts[shard][within]
        return np.unpackbits(
            bits, axis=1, count=self._length, bitorder="little"
        ).astype(bool)

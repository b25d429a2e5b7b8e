"""Readers of other trainers' token files, each written after the reader named in its
docstring.
"""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np


def read_llmc(path: Path) -> np.ndarray:
    """llm.c: the checks of `dataloader_load_shard_` in llmc/dataloader.h; 32 bits:
    HEADERS_INFO in data_common.py.
    """
    raw = path.read_bytes()
    header = struct.unpack("<256i", raw[:1024])
    dtype = {(20240520, 1): "<u2", (20240801, 7): "<u4"}[header[0], header[1]]
    assert header[3:] == (0,) * 253
    assert len(raw) == 256 * 4 + header[2] * np.dtype(dtype).itemsize
    return np.frombuffer(raw, dtype=dtype, offset=1024)


def llmc_batches(
    paths: list[Path], rows: int, length: int, permuted: bool
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Inputs and targets of an epoch of llm.c in one process: B T + 1 tokens, at steps
    of B T.

    `dataloader_reset` permutes the files and `prepare_intra_shard_indices_` the batches
    of each, by a Mersenne Twister of the seed 42 (`dataloader_init`). train_gpt2.cu
    permutes unless it has `-a 1`, which overfits one batch of the held-out files.
    """
    twister, size = np.random.RandomState(42), rows * length

    def order(count: int) -> list[int]:
        """`init_identity_permutation` and `random_permutation` in llmc/rand.h."""
        numbers = list(range(count))
        for index in range(count - 1, 0, -1) if permuted else ():
            swapped = int(twister._bit_generator.random_raw()) % (index + 1)
            numbers[index], numbers[swapped] = numbers[swapped], numbers[index]
        return numbers

    batches = []
    for file in order(len(paths)):
        tokens = read_llmc(paths[file]).astype(np.int64)
        assert tokens.max() < 2**16  # the C reader refuses the magic of 32-bit tokens
        for batch in order((len(tokens) - 1) // size):
            start = batch * size
            batches.append(
                (
                    tokens[start : start + size].reshape(rows, length),
                    tokens[start + 1 : start + 1 + size].reshape(rows, length),
                )
            )
    return batches


def modded_nanogpt_documents(path: Path, delimiter: int) -> list[list[int]]:
    """`Shard.bos_idx` in modded-nanogpt's train_gpt.py: a document goes from one
    delimiter up to the next.
    """
    tokens = read_llmc(path)
    begins = np.flatnonzero(tokens == delimiter).tolist()
    return [
        tokens[begin:end].tolist()
        for begin, end in zip(begins, [*begins[1:], len(tokens)], strict=True)
    ]


def read_megatron(prefix: Path) -> tuple[list[np.ndarray], np.ndarray]:
    """Sequences and document indices: `_IndexReader` in
    megatron/core/datasets/indexed_dataset.py.
    """
    raw = Path(f"{prefix}.idx").read_bytes()
    assert raw[:9] == b"MMIDIDX\x00\x00"
    version, code, sequences, documents = struct.unpack_from("<QBQQ", raw, 9)
    assert version == 1
    dtype = np.dtype(
        {
            1: "<u1",
            2: "<i1",
            3: "<i2",
            4: "<i4",
            5: "<i8",
            6: "<f8",
            7: "<f4",
            8: "<u2",
        }[code]
    )
    offset = 9 + 8 + 1 + 8 + 8
    lengths = np.frombuffer(raw, "<i4", sequences, offset)
    pointers = np.frombuffer(raw, "<i8", sequences, offset + lengths.nbytes)
    indices = np.frombuffer(
        raw, "<i8", documents, offset + lengths.nbytes + pointers.nbytes
    )
    assert offset + lengths.nbytes + pointers.nbytes + indices.nbytes == len(raw)
    data = Path(f"{prefix}.bin").read_bytes()
    assert len(data) == lengths.sum() * dtype.itemsize
    return [
        np.frombuffer(data, dtype, length, pointer)
        for length, pointer in zip(lengths.tolist(), pointers.tolist(), strict=True)
    ], indices


def read_nanogpt(path: Path, dtype: str = "uint16") -> np.ndarray:
    """`get_batch` in nanoGPT's train.py: a memory map of raw tokens."""
    return np.memmap(path, dtype=np.dtype(dtype), mode="r")


def olmo_instances(path: Path, length: int, dtype: str) -> np.ndarray:
    """`NumpyFSLDataset` in OLMo-core's data/numpy_dataset.py: whole instances, without
    the remainder.
    """
    tokens = np.memmap(path, dtype=np.dtype(dtype), mode="r")
    return tokens[: len(tokens) // length * length].reshape(-1, length)


def olmo_documents(path: Path, dtype: str) -> list[list[int]]:
    """`iter_document_indices` in OLMo-core's data/utils.py, by the metadata file."""
    tokens = np.memmap(path, dtype=np.dtype(dtype), mode="r")
    with gzip.open(str(path).replace(".npy", ".csv.gz"), "rt") as lines:
        places = [tuple(int(cell) for cell in line.split(",")[:2]) for line in lines]
    assert all(begin < end <= len(tokens) for begin, end in places)
    return [tokens[begin:end].tolist() for begin, end in places]

"""The bytes of the formats that other trainers read; each function's docstring names the reader that it follows."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import numpy as np

from gristmill.tokenize.exporting.split import Block

LLMC_MAGIC, LLMC_VERSION = 20240520, 1
"""Of 16-bit tokens: `dataloader_load_shard_` in llm.c's llmc/dataloader.h."""
LLMC_WIDE_MAGIC, LLMC_WIDE_VERSION = 20240801, 7
"""Of 32-bit tokens: the model `llama-3` of HEADERS_INFO in llm.c's dev/data/data_common.py."""
LLMC_HEADER_INTS = 256
MEGATRON_MAGIC, MEGATRON_VERSION = b"MMIDIDX\x00\x00", 1
"""`_INDEX_HEADER` and the version after it, in Megatron-LM's megatron/core/datasets/indexed_dataset.py."""
MEGATRON_CODES = {np.dtype("<u2"): 8, np.dtype("<i4"): 4}
"""`DType` there, which has no uint32: large vocabularies are int32."""
MOST_LLMC_TOKENS = 2**31 - 1
"""The number of tokens is an int32 of the header."""


class Sink(Protocol):
    """Takes the bytes of a file; what was given is not changed afterwards."""

    def write(self, data: bytes | memoryview, /) -> int:
        """Append some bytes."""
        ...

    def flush(self) -> None:
        """Hand on what is buffered."""
        ...


def llmc_header(tokens: int, dtype: np.dtype) -> bytes:
    """256 int32 before the tokens: magic, version, number of tokens, zeros (llm.c, modded-nanogpt's train_gpt.py)."""
    header = np.zeros(LLMC_HEADER_INTS, dtype="<i4")
    wide = dtype.itemsize == 4
    header[:3] = (LLMC_WIDE_MAGIC if wide else LLMC_MAGIC), (LLMC_WIDE_VERSION if wide else LLMC_VERSION), tokens
    return header.tobytes()


def megatron_dtype(dtype: np.dtype) -> np.dtype:
    """What Megatron stores tokens as, which are of this dtype here."""
    return np.dtype("<u2") if dtype.itemsize == 2 else np.dtype("<i4")


def write_tokens(sink: Sink, blocks: Iterable[Block], dtype: np.dtype) -> None:
    """Write the tokens of blocks back to back."""
    for block in blocks:
        sink.write(np.ascontiguousarray(block.tokens, dtype=dtype).data.cast("B") if len(block.tokens) else b"")


def write_megatron_index(sink: Sink, lengths: Callable[[], Iterator[np.ndarray]], dtype: np.dtype) -> None:
    """Write the index beside a Megatron `.bin` file, in which every document piece is a document of one sequence.

    Magic, version (uint64), dtype code (uint8), number of sequences and of document indices (uint64 each), then of all
    sequences the lengths (int32), the pointers in bytes (int64), and the number of sequences before each document and
    after the last one (int64): `_IndexReader` in Megatron-LM's indexed_dataset.py.

    Args:
        sink: the `.idx` file.
        lengths: gives the lengths of all pieces, some at a time; called anew for each part of the index.
        dtype: of the tokens in the `.bin` file.
    """
    count = sum(len(part) for part in lengths())
    sink.write(MEGATRON_MAGIC + np.uint64(MEGATRON_VERSION).tobytes() + np.uint8(MEGATRON_CODES[dtype]).tobytes())
    sink.write(np.array([count, count + 1], dtype="<u8").tobytes())
    for part in lengths():
        sink.write(part.astype("<i4").tobytes())
    at = 0
    for part in lengths():
        ends = at + np.cumsum(part) * dtype.itemsize
        sink.write((ends - part * dtype.itemsize).astype("<i8").tobytes())
        at = int(ends[-1]) if len(ends) else at
    document = 0
    for part in lengths():
        sink.write(np.arange(document, document + len(part), dtype="<i8").tobytes())
        document += len(part)
    sink.write(np.array([count], dtype="<i8").tobytes())


def write_olmo_documents(sink: Sink, lengths: Iterable[np.ndarray]) -> None:
    """Write begin and end of every document piece, as `iter_document_indices` in OLMo-core's data/utils.py reads it."""
    at = 0
    with gzip.GzipFile(filename="", mode="wb", fileobj=sink, mtime=0) as packed:
        for part in lengths:
            ends = at + np.cumsum(part)
            starts = ends - part
            packed.write("".join(f"{begin},{end}\n" for begin, end in zip(
                starts.tolist(), ends.tolist(), strict=True)).encode())
            at = int(ends[-1]) if len(ends) else at

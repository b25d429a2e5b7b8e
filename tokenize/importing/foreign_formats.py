"""Token files of other tools; each function's docstring names the writer whose format
it follows.

A file is parsed into `Runs`: byte ranges of token runs. Each run is one document if the
format marks document ends (Megatron's index, the metadata beside OLMo's arrays);
otherwise a single run holds all documents, each with an end of text before or after it.
`find_documents` turns the runs of a file into its documents.
"""

from __future__ import annotations

import csv
import gzip
import io
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from gristmill.core.arrays import offsets_of
from gristmill.core.files import as_path, is_local
from gristmill.tokenize.exporting.formats import (
    LLMC_HEADER_INTS,
    LLMC_MAGIC,
    LLMC_VERSION,
    LLMC_WIDE_MAGIC,
    LLMC_WIDE_VERSION,
    MEGATRON_MAGIC,
    MEGATRON_VERSION,
)
from gristmill.tokenize.packed_files import read_tokens

Kind = Literal["megatron", "llmc", "olmo", "memmap"]
MEGATRON_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""`DType` of Megatron-LM's indexed_dataset.py; 6 and 7 are floating-point types, which
hold no tokens.
"""
LLMC_EVALUATION_MAGIC = 20240522
"""Magic of multiple-choice questions: `write_evalfile` in llm.c's
dev/data/data_common.py.
"""
LLMC_DTYPES = {
    (LLMC_MAGIC, LLMC_VERSION): "<u2",
    (LLMC_WIDE_MAGIC, LLMC_WIDE_VERSION): "<u4",
}
NUMPY_MAGIC = b"\x93NUMPY"
SCAN_TOKENS = 1 << 22
"""Tokens scanned at a time, to bound memory."""
FEWEST_HEAD_TOKENS, HEAD_TOKENS = 64, 4096
"""Tokens whose zeros tell 32-bit tokens from 16-bit ones."""


class TokenFileError(ValueError):
    """A token file that is damaged, or differs from the manifest."""


@dataclass(frozen=True)
class TokenFile:
    """Token file to read.

    Attributes:
        name: relative to the source's path.
        location: path or address.
        size: bytes.
        kind: its format.
        beside: location of its index (`.idx`) or metadata (`.csv.gz`).
    """

    name: str
    location: str
    size: int
    kind: Kind
    beside: str | None = None


@dataclass(frozen=True)
class Runs:
    """Byte ranges of token runs in a file.

    Attributes:
        dtype: of the tokens, little-endian.
        begin: int64 of shape (n,), first byte of each run.
        tokens: int64 of shape (n,).
        are_documents: the format marks documents, and each run is one; otherwise there
            is one run.
        metadata: of each run's document, from the format; empty if it has none.
        ended: number of documents with an end of text before or after them.
        other_end: the most frequent other last id and its count; None if there is none.
    """

    dtype: np.dtype
    begin: np.ndarray
    tokens: np.ndarray
    are_documents: bool
    metadata: tuple[Mapping[str, str], ...] = ()
    ended: int = 0
    other_end: tuple[int, int] | None = None


def content_of(location: str, begin: int = 0, end: int | None = None) -> np.ndarray:
    """Bytes [begin, end) of a file, uint8: memory-mapped if local, otherwise read."""
    path = as_path(location)
    if is_local(path):
        return read_tokens(path, np.dtype("u1"))[begin:end]
    with path.open("rb") as stream:
        stream.seek(begin)
        return np.frombuffer(stream.read(-1 if end is None else end - begin), np.uint8)  # type: ignore[arg-type]


def runs_of(file: TokenFile, content: np.ndarray, dtype: str | None) -> Runs:
    """Parse a file into its token runs.

    Args:
        file: to parse.
        content: its bytes (`content_of`).
        dtype: of files that do not record it.

    Raises:
        TokenFileError: it is damaged, or has another format.
    """
    match file.kind:
        case "megatron":
            return _megatron(file, content)
        case "llmc":
            return _llmc(file, content)
        case "olmo":
            return _olmo(file, content, dtype)
    return _whole(file, content, 0, _named(file, dtype))


def _named(file: TokenFile, dtype: str | None) -> np.dtype:
    if dtype is None:
        raise TokenFileError(
            f"{file.name}: the file does not say what its tokens "
            "are stored as; set `dtype:`"
        )
    return np.dtype(dtype).newbyteorder("<")


def _whole(file: TokenFile, content: np.ndarray, begin: int, dtype: np.dtype) -> Runs:
    """A single run from a byte to the end.

    Raises:
        TokenFileError: the bytes are not tokens of this width.
    """
    tokens, remainder = divmod(len(content) - begin, dtype.itemsize)
    if remainder:
        raise TokenFileError(
            f"{file.name}: its {len(content) - begin:,} bytes of tokens are not a "
            "whole number of "
            f"{dtype.name}; correct `dtype:`, or the file, which may be cut off"
        )
    head = np.frombuffer(content, dtype, min(tokens, HEAD_TOKENS), begin)
    if (
        dtype.itemsize == 2
        and tokens >= FEWEST_HEAD_TOKENS
        and head.any()
        and not head[1::2].any()
    ):
        raise TokenFileError(
            f"{file.name}: every other token is 0, as where 32-bit tokens are read as "
            "16-bit ones; set `dtype: uint32`"
        )
    return Runs(
        dtype,
        np.array([begin], np.int64),
        np.array([tokens], np.int64),
        are_documents=False,
    )


def is_llmc(head: bytes) -> bool:
    """Return whether a file begins with a magic of llm.c."""
    first = int.from_bytes(head[:4], "little")
    return first in (LLMC_MAGIC, LLMC_WIDE_MAGIC, LLMC_EVALUATION_MAGIC)


def _llmc(file: TokenFile, content: np.ndarray) -> Runs:
    """256 int32 before the tokens: magic, version, number of tokens (`write_datafile`
    in llm.c's data_common.py).
    """
    size = 4 * LLMC_HEADER_INTS
    header = content[: 12 if len(content) >= size else 0].tobytes().ljust(12, b"\0")
    magic, version, tokens = struct.unpack("<3i", header)
    if magic == LLMC_EVALUATION_MAGIC:
        raise TokenFileError(
            f"{file.name}: holds multiple-choice questions for llm.c's evaluation, "
            "not text; leave it out"
        )
    if (magic, version) not in LLMC_DTYPES:
        allowed_headers = " or ".join(
            f"{magic} version {version}" for magic, version in LLMC_DTYPES
        )
        raise TokenFileError(
            f"{file.name}: begins with {magic} version {version}, and files of llm.c "
            f"with {allowed_headers}; set another `format:`"
        )
    runs = _whole(file, content, size, np.dtype(LLMC_DTYPES[magic, version]))
    if runs.tokens[0] != tokens:
        raise TokenFileError(
            f"{file.name}: its header says {tokens:,} tokens, but it holds "
            f"{runs.tokens[0]:,}; the file is cut off, or not written to its end"
        )
    return runs


def _megatron(file: TokenFile, content: np.ndarray) -> Runs:
    """A document is one or several sequences, as the index says (`_IndexReader` in
    Megatron-LM's indexed_dataset.py).

    Magic, version (uint64), dtype code (uint8), number of sequences and of document
    indices (uint64 each), then of all sequences the lengths (int32) and the pointers in
    bytes (int64), and where each document's sequences begin (int64).
    """
    if file.beside is None:
        raise TokenFileError(
            f"{file.name}: there is no index (.idx) beside it, which says where its "
            "documents end; copy it too, or read the file as `format: memmap`"
        )
    index = as_path(file.beside).read_bytes()
    name = f"the index of {file.name}"
    if index[:9] != MEGATRON_MAGIC:
        raise TokenFileError(
            f"{name} does not begin as those of Megatron-LM's indexed datasets do"
        )
    head = index[9:34].ljust(25, b"\0")
    version, code, sequences, documents = struct.unpack("<QBQQ", head)
    if version != MEGATRON_VERSION or code not in MEGATRON_DTYPES:
        raise TokenFileError(
            f"{name} is of version {version} and dtype {code}; version "
            f"{MEGATRON_VERSION} and whole numbers are read"
        )
    dtype = np.dtype(MEGATRON_DTYPES[code])
    ends = 34 + np.cumsum([4 * sequences, 8 * sequences, 8 * documents])
    if len(index) < ends[-1] or not documents:
        raise TokenFileError(
            f"{name} is cut off: it has {len(index):,} bytes of {int(ends[-1]):,}"
        )
    lengths = np.frombuffer(index, "<i4", sequences, 34).astype(np.int64)
    pointers = np.frombuffer(index, "<i8", sequences, int(ends[0]))
    first = np.frombuffer(index, "<i8", documents, int(ends[1]))
    descends = (np.diff(first) < 0).any() or (lengths < 0).any()
    if first[0] or first[-1] != sequences or descends:
        raise TokenFileError(
            f"{name} contradicts itself: {documents - 1} documents "
            f"of {sequences} sequences"
        )
    after = pointers + lengths * dtype.itemsize
    if sequences and (pointers.min() < 0 or after.max() > len(content)):
        raise TokenFileError(
            f"{file.name}: has {len(content):,} bytes, but its index says "
            f"{int(after.max()):,}; one of both is cut off, or of another set"
        )
    inner = np.ones(sequences, dtype=bool)
    inner[first[:-1][first[:-1] < sequences]] = False
    apart = np.flatnonzero(inner[1:] & (pointers[1:] != after[:-1]))
    if len(apart):
        raise TokenFileError(
            f"{file.name}: sequence {int(apart[0]) + 1} does not follow the one before "
            "it, though both are of one document; write the set again with its own tool"
        )
    before = offsets_of(lengths)
    begin = np.append(pointers, 0)[first[:-1]]
    return Runs(dtype, begin, np.diff(before[first]), are_documents=True)


def _olmo(file: TokenFile, content: np.ndarray, dtype: str | None) -> Runs:
    """An array without a header (`np.memmap`, as Dolma and OLMo-core write `.npy`), or
    one that `np.save` wrote.

    If `<name>.csv.gz` is beside it, its lines are the documents: first token, the one
    after the last, and in Dolma's files the document's id, its file and its place
    there (`iter_document_indices` in OLMo-core's data/utils.py, `MemmapWriter` in
    dolma's tokenizer).
    """
    if content[: len(NUMPY_MAGIC)].tobytes() == NUMPY_MAGIC:
        begin, stored = _numpy_header(file, content)
    else:
        begin, stored = 0, _named(file, dtype)
    array_run = _whole(file, content, begin, stored)
    if file.beside is None:
        return array_run
    text = gzip.decompress(as_path(file.beside).read_bytes()).decode()
    lines = list(csv.reader(io.StringIO(text)))
    try:
        bounds = np.array(
            [(int(line[0]), int(line[1])) for line in lines], np.int64
        ).reshape(-1, 2)
    except (ValueError, IndexError) as error:
        raise TokenFileError(
            f"the metadata of {file.name}: a line does not begin "
            f"with two numbers: {error}"
        ) from error
    first, stop = bounds.T
    if ((first < 0) | (first > stop) | (stop > array_run.tokens[0])).any():
        raise TokenFileError(
            f"the metadata of {file.name}: a document lies outside of its "
            f"{array_run.tokens[0]:,} "
            "tokens; they do not belong together, or `dtype:` is wrong"
        )
    metadata = tuple(
        dict(zip(("id", "src", "loc"), line[2:], strict=False)) for line in lines
    )
    return Runs(
        stored,
        begin + first * stored.itemsize,
        stop - first,
        are_documents=True,
        metadata=metadata if any(metadata) else (),
    )


def _numpy_header(file: TokenFile, content: np.ndarray) -> tuple[int, np.dtype]:
    """Offset and dtype of the numbers in a file of `np.save`."""
    stream = io.BytesIO(content[:65536].tobytes())
    read = np.lib.format.read_array_header_2_0
    try:
        if np.lib.format.read_magic(stream) == (1, 0):
            read = np.lib.format.read_array_header_1_0
        shape, _, dtype = read(stream)
    except ValueError as error:
        raise TokenFileError(
            f"{file.name}: its header of numpy cannot be read: {error}"
        ) from error
    if len(shape) != 1 or dtype.kind not in "ui" or dtype.newbyteorder("<") != dtype:
        raise TokenFileError(
            f"{file.name}: holds an array of shape {shape} and dtype {dtype}; tokens "
            "are flat arrays of little-endian whole numbers"
        )
    return stream.tell(), dtype


def find_documents(
    runs: Runs, content: np.ndarray, end_of_text: int, document_tokens: int | None
) -> Runs:
    """Documents of a file, one per run, without the ids that end them.

    A run that is a document yields one, without its end of text. The run of a file
    without document ends is cut at every end of text, ignoring empty stretches; with
    `document_tokens` it is cut after that many tokens instead.

    Args:
        runs: see `runs_of`.
        content: the file's bytes.
        end_of_text: the id that documents end with.
        document_tokens: see above.
    """
    size = runs.dtype.itemsize
    if runs.are_documents:
        nonempty = np.flatnonzero(runs.tokens)
        last = runs.begin[nonempty] + (runs.tokens[nonempty] - 1) * size
        last_ids = content[last[:, None] + np.arange(size)].view(runs.dtype).ravel()
        is_end = last_ids == end_of_text
        lengths = runs.tokens.copy()
        lengths[nonempty[is_end]] -= 1
        other_ids, counts = np.unique(last_ids[~is_end], return_counts=True)
        other_end = None
        if len(counts):
            top = int(counts.argmax())
            other_end = (int(other_ids[top]), int(counts[top]))
        ended = int(is_end.sum())
        return replace(runs, tokens=lengths, ended=ended, other_end=other_end)
    begin, tokens = int(runs.begin[0]), int(runs.tokens[0])
    if document_tokens is not None:
        starts = np.arange(0, tokens, document_tokens, dtype=np.int64)
        lengths = np.minimum(tokens - starts, document_tokens)
        return replace(runs, begin=begin + starts * size, tokens=lengths)
    ids = np.frombuffer(content, runs.dtype, tokens, begin)
    ends = [
        np.flatnonzero(ids[at : at + SCAN_TOKENS] == end_of_text) + at
        for at in range(0, tokens, SCAN_TOKENS)
    ]
    bounds = np.concatenate([[-1], *ends, [tokens]])
    lengths = np.diff(bounds) - 1
    is_nonempty = lengths > 0
    return replace(
        runs,
        begin=begin + (bounds[:-1] + 1)[is_nonempty] * size,
        tokens=lengths[is_nonempty],
        ended=len(bounds) - 2,
    )

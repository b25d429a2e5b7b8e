"""What the token files of other tools hold: each function's docstring names the writer that it follows.

A file becomes `Runs`: where runs of tokens lie in its bytes. A run is a document where the format says where documents
end (Megatron's index, the metadata beside OLMo's arrays). Any other may hold several, with an end of text after or
before each. `bounds_of` finds all documents of a file.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from gristmill.dataprep.files import as_path, is_local
from gristmill.dataprep.reading.compression import CorruptFileError, RecordTooLongError, read_whole
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

Kind = Literal["megatron", "llmc", "olmo", "memmap", "mds"]
MEGATRON_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""`DType` of Megatron-LM's indexed_dataset.py; 6 and 7 are floating-point numbers, which are not tokens."""
LLMC_EVALUATION_MAGIC = 20240522
"""Of multiple-choice questions: `write_evalfile` in llm.c's dev/data/data_common.py."""
LLMC_DTYPES = {(LLMC_MAGIC, LLMC_VERSION): "<u2", (LLMC_WIDE_MAGIC, LLMC_WIDE_VERSION): "<u4"}
NUMPY_MAGIC = b"\x93NUMPY"
MDS_VERSION = 2
MDS_INDEX = "index.json"
MDS_COLUMNS = ("tokens", "input_ids")
"""Where a sample's tokens are looked for, if the manifest names no column."""
SCAN_TOKENS = 1 << 22
"""Tokens that are looked through at a time, so that memory stays flat."""
MDS_DTYPES = {8: "u1", 9: "i1", 16: "<u2", 17: "<i2", 32: "<u4", 33: "<i4", 64: "<u8", 65: "<i8"}
"""`_int2value_dtype` of mosaicml-streaming's base/format/mds/encodings.py, whole numbers only."""


class TokenFileError(ValueError):
    """A file of tokens is damaged, or is not what the manifest says."""


@dataclass(frozen=True)
class TokenFile:
    """One file to read.

    Attributes:
        name: relative to the source's path; of a shard of MDS as well.
        location: where it is.
        size: bytes.
        kind: its format.
        beside: location of its index (`.idx`), or of its metadata (`.csv.gz`).
        shard: of MDS, what index.json says of it.
    """

    name: str
    location: str
    size: int
    kind: Kind
    beside: str | None = None
    shard: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Runs:
    """Where runs of tokens lie in a file.

    Attributes:
        dtype: of the tokens, little-endian.
        begin: int64 of shape (n,), first byte of each.
        tokens: int64 of shape (n,).
        are_documents: whether each run is one document.
        metadata: of each run, what the format says of its document; none if empty.
    """

    dtype: np.dtype[Any]
    begin: np.ndarray
    tokens: np.ndarray
    are_documents: bool
    metadata: tuple[Mapping[str, str], ...] = ()


def content_of(file: TokenFile, begin: int = 0, end: int | None = None) -> np.ndarray:
    """The bytes [begin, end) of a file, uint8: memory-mapped where it is local, else read; packed shards unpacked."""
    path, compression = as_path(file.location), (file.shard or {}).get("compression")
    if not compression and is_local(path):
        return read_tokens(path, np.dtype("u1"))[begin:end]
    if not compression:
        with path.open("rb") as stream:
            stream.seek(begin)
            return np.frombuffer(stream.read(-1 if end is None else end - begin), dtype=np.uint8)  # type: ignore[arg-type]
    family = str(compression).partition(":")[0]
    try:
        ending = {"zstd": ".zst", "gz": ".gz", "bz2": ".bz2"}[family]
    except KeyError:
        raise TokenFileError(
            f"{file.name}: its compression {family!r} is not read here; write the set with zstd, gz, bz2 or none"
        ) from None
    try:
        return np.frombuffer(read_whole(path, ending), dtype=np.uint8)[begin:end]
    except (CorruptFileError, RecordTooLongError) as error:
        raise TokenFileError(f"{file.name}: {error}") from error


def runs_of(file: TokenFile, content: np.ndarray, dtype: str | None, column: str | None) -> Runs:
    """Where the tokens of a file lie.

    Args:
        file: which.
        content: its bytes (`content_of`).
        dtype: of files that do not say it themselves.
        column: of MDS, the one that holds the tokens.

    Raises:
        TokenFileError: it is damaged, or of another format.
    """
    if file.kind == "megatron":
        return _megatron(file, content)
    if file.kind == "mds":
        return _mds(file, content, dtype, column)
    if file.kind == "llmc":
        return _llmc(file, content)
    if file.kind == "olmo":
        return _olmo(file, content, dtype)
    return _whole(file, content, 0, _named(file, dtype))


def _named(file: TokenFile, dtype: str | None) -> np.dtype[Any]:
    if dtype is None:
        raise TokenFileError(f"{file.name}: the file does not say what its tokens are stored as; set `dtype:`")
    return np.dtype(dtype).newbyteorder("<")


def _whole(file: TokenFile, content: np.ndarray, begin: int, dtype: np.dtype[Any]) -> Runs:
    """One run from some byte to the end."""
    tokens, rest = divmod(len(content) - begin, dtype.itemsize)
    if rest:
        raise TokenFileError(
            f"{file.name}: its {len(content) - begin:,} bytes of tokens are not a whole number of "
            f"{dtype.name}; correct `dtype:`, or the file, which may be cut off"
        )
    return Runs(dtype, np.array([begin], np.int64), np.array([tokens], np.int64), are_documents=False)


def is_llmc(head: bytes) -> bool:
    """Whether a file begins as llm.c's do."""
    first = int.from_bytes(head[:4], "little")
    return first in (LLMC_MAGIC, LLMC_WIDE_MAGIC, LLMC_EVALUATION_MAGIC)


def _llmc(file: TokenFile, content: np.ndarray) -> Runs:
    """256 int32 before the tokens: magic, version, number of tokens (`write_datafile` in llm.c's data_common.py)."""
    size = 4 * LLMC_HEADER_INTS
    header = content[:size].view("<i4") if len(content) >= size else np.zeros(3, np.int32)
    magic, version, tokens = header[:3].tolist()
    if magic == LLMC_EVALUATION_MAGIC:
        raise TokenFileError(
            f"{file.name}: holds multiple-choice questions for llm.c's evaluation, no text; leave it out"
        )
    if (magic, version) not in LLMC_DTYPES:
        known = " or ".join(f"{magic} version {version}" for magic, version in LLMC_DTYPES)
        raise TokenFileError(
            f"{file.name}: begins with {magic} version {version}, and files of llm.c with {known}; "
            "set another `format:`"
        )
    runs = _whole(file, content, size, np.dtype(LLMC_DTYPES[magic, version]))
    if runs.tokens[0] != tokens:
        raise TokenFileError(
            f"{file.name}: its header says {tokens:,} tokens, but it holds {int(runs.tokens[0]):,}; "
            "the file is cut off, or not written to its end"
        )
    return runs


def _megatron(file: TokenFile, content: np.ndarray) -> Runs:
    """A document is one or several sequences, as the index says (`_IndexReader` in Megatron-LM's indexed_dataset.py).

    Magic, version (uint64), dtype code (uint8), number of sequences and of document indices (uint64 each), then of all
    sequences the lengths (int32) and the pointers in bytes (int64), and where each document's sequences begin (int64).
    """
    if file.beside is None:
        raise TokenFileError(
            f"{file.name}: there is no index (.idx) beside it, which says where its documents end; "
            "copy it too, or read the file as `format: memmap`"
        )
    index, name = as_path(file.beside).read_bytes(), f"the index of {file.name}"
    if index[:9] != MEGATRON_MAGIC:
        raise TokenFileError(f"{name} does not begin as those of Megatron-LM's indexed datasets do")
    version, code = int.from_bytes(index[9:17], "little"), index[17] if len(index) > 17 else 0
    if version != MEGATRON_VERSION or code not in MEGATRON_DTYPES:
        raise TokenFileError(
            f"{name} is of version {version} and dtype {code}; version {MEGATRON_VERSION} and whole numbers are read"
        )
    dtype = np.dtype(MEGATRON_DTYPES[code])
    sequences, documents = (int.from_bytes(index[at : at + 8], "little") for at in (18, 26))
    ends = 34 + np.cumsum([4 * sequences, 8 * sequences, 8 * documents])
    if len(index) < ends[-1] or not documents:
        raise TokenFileError(f"{name} is cut off: it has {len(index):,} bytes of {int(ends[-1]):,}")
    lengths = np.frombuffer(index, "<i4", sequences, 34).astype(np.int64)
    pointers = np.frombuffer(index, "<i8", sequences, int(ends[0]))
    first = np.frombuffer(index, "<i8", documents, int(ends[1]))
    if first[0] or first[-1] != sequences or (np.diff(first) < 0).any() or (lengths < 0).any():
        raise TokenFileError(f"{name} contradicts itself: {documents - 1} documents of {sequences} sequences")
    after = pointers + lengths * dtype.itemsize
    if sequences and (pointers.min() < 0 or after.max() > len(content)):
        raise TokenFileError(
            f"{file.name}: has {len(content):,} bytes, but its index says {int(after.max()):,}; one "
            "of both is cut off, or of another set"
        )
    inner = np.ones(sequences, dtype=bool)
    inner[first[:-1][first[:-1] < sequences]] = False
    apart = np.flatnonzero(inner[1:] & (pointers[1:] != after[:-1]))
    if len(apart):
        raise TokenFileError(
            f"{file.name}: sequence {int(apart[0]) + 1} does not follow the one before it, though "
            "both are of one document; write the set again with its own tool"
        )
    before = np.concatenate([[0], np.cumsum(lengths)])
    begin = np.append(pointers, 0)[first[:-1]]
    return Runs(dtype, begin, before[first[1:]] - before[first[:-1]], are_documents=True)


def _olmo(file: TokenFile, content: np.ndarray, dtype: str | None) -> Runs:
    """An array without a header (`np.memmap`, as Dolma and OLMo-core write `.npy`), or one that `np.save` wrote.

    Where `<name>.csv.gz` lies beside it, its lines are the documents: first token, the one after the last, and in
    Dolma's files the document's id, its file and its place there (`iter_document_indices` in OLMo-core's data/utils.py,
    `MemmapWriter` in dolma's tokenizer).
    """
    if content[: len(NUMPY_MAGIC)].tobytes() == NUMPY_MAGIC:
        begin, stored = _numpy_header(file, content)
    else:
        begin, stored = 0, _named(file, dtype)
    whole = _whole(file, content, begin, stored)
    if file.beside is None:
        return whole
    with as_path(file.beside).open("rb") as stream:
        lines = list(csv.reader(io.StringIO(gzip.decompress(stream.read()).decode())))
    try:
        bounds = np.array([(int(line[0]), int(line[1])) for line in lines], np.int64).reshape(-1, 2)
    except (ValueError, IndexError) as error:
        raise TokenFileError(f"the metadata of {file.name}: a line does not begin with two numbers: {error}") from error
    if len(bounds) and (bounds.min() < 0 or (bounds[:, 0] > bounds[:, 1]).any() or bounds.max() > whole.tokens[0]):
        raise TokenFileError(
            f"the metadata of {file.name}: a document lies outside of its {int(whole.tokens[0]):,} "
            "tokens; they do not belong together, or `dtype:` is wrong"
        )
    said = tuple(dict(zip(("id", "src", "loc"), line[2:], strict=False)) for line in lines)
    return Runs(
        stored,
        begin + bounds[:, 0] * stored.itemsize,
        bounds[:, 1] - bounds[:, 0],
        are_documents=True,
        metadata=said if any(said) else (),
    )


def _numpy_header(file: TokenFile, content: np.ndarray) -> tuple[int, np.dtype[Any]]:
    """Where the numbers of a file of `np.save` begin, and what they are."""
    stream = io.BytesIO(content[:65536].tobytes())
    try:
        version = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(stream)
    except ValueError as error:
        raise TokenFileError(f"{file.name}: its header of numpy cannot be read: {error}") from error
    if len(shape) != 1 or dtype.kind not in "ui" or dtype.newbyteorder("<") != dtype:
        raise TokenFileError(
            f"{file.name}: holds an array of shape {shape} and dtype {dtype}; tokens are flat arrays "
            "of little-endian whole numbers"
        )
    return stream.tell(), dtype


def mds_shards(index: Path, name: str) -> list[dict[str, Any]]:
    """What an index.json of MosaicML Streaming says of its shards, in order.

    Raises:
        TokenFileError: it is none, or of another version.
    """
    try:
        shards: list[dict[str, Any]] = json.loads(index.read_bytes())["shards"]
        wrong = next((one for one in shards if one["format"] != "mds" or one["version"] != MDS_VERSION), None)
    except (ValueError, LookupError, TypeError) as error:
        raise TokenFileError(f"{name} is not an index of MosaicML Streaming: {error!r}") from error
    if wrong is not None:
        raise TokenFileError(
            f"{name}: a shard is of format {wrong['format']} version {wrong['version']}; mds version "
            f"{MDS_VERSION} is read"
        )
    return shards


def _mds(file: TokenFile, content: np.ndarray, dtype: str | None, column: str | None) -> Runs:
    """Samples of a shard: their number and offsets (uint32), then of each the sizes of its columns that vary (uint32)
    and the columns (`MDSReader.decode_sample` in mosaicml-streaming's base/format/mds/reader.py)."""
    shard = file.shard or {}
    names, encodings, sizes = (list(shard[f"column_{part}"]) for part in ("names", "encodings", "sizes"))
    wanted = column or next((name for name in MDS_COLUMNS if name in names), None)
    if wanted not in names:
        raise TokenFileError(
            f"{file.name}: has no column {column or ' or '.join(MDS_COLUMNS)}; set `column:` to the "
            f"one that holds the tokens (columns: {', '.join(names)})"
        )
    number = names.index(wanted)
    samples = int(content[:4].view("<u4")[0]) if len(content) >= 4 else -1
    head = 4 * (samples + 2)
    if samples != shard["samples"] or len(content) < head:
        raise TokenFileError(
            f"{file.name}: holds {samples} samples, but {MDS_INDEX} says {shard['samples']}; it is "
            "damaged, or of another set"
        )
    offsets = content[4:head].view("<u4").astype(np.int64)
    if offsets[-1] > len(content):
        raise TokenFileError(f"{file.name}: has {len(content):,} bytes of {int(offsets[-1]):,}; it is cut off")
    varying = [place for place, size in enumerate(sizes) if not size]
    heads = (
        content[(offsets[:-1, None] + np.arange(4 * len(varying)))].view("<u4").astype(np.int64)
        if (varying and samples)
        else np.zeros((samples, 0), np.int64)
    )
    all_sizes = np.tile(np.array([size or 0 for size in sizes], np.int64), (samples, 1))
    all_sizes[:, varying] = heads
    begin = offsets[:-1] + 4 * len(varying) + all_sizes[:, :number].sum(axis=1)
    return _in_column(file, content, begin, all_sizes[:, number], str(encodings[number]), dtype)


def _in_column(
    file: TokenFile, content: np.ndarray, begin: np.ndarray, size: np.ndarray, encoding: str, dtype: str | None
) -> Runs:
    """The tokens behind the head of each array (`NDArray` in mosaicml-streaming's encodings.py)."""
    kind, _, rest = encoding.partition(":")
    if kind == "bytes":  # as llm-foundry's earlier convert_dataset_hf.py has them: int64
        stored = _named(file, dtype or "int64")
    elif kind == "ndarray":
        named, _, shape = rest.partition(":")
        begin = begin.copy()
        if not named:
            codes = set(content[begin].tolist())
            if len(codes) > 1 or not codes <= MDS_DTYPES.keys():
                raise TokenFileError(
                    f"{file.name}: the arrays of its samples are of several dtypes, or of none that "
                    f"tokens have ({sorted(codes)})"
                )
            begin, size, named = begin + 1, size - 1, np.dtype(MDS_DTYPES[codes.pop()]).name if codes else "uint16"
        stored = _named(file, named)
        if not shape:
            # Axes and the width of their lengths in a byte, then the lengths.
            axes = content[begin].astype(np.int64)
            head = 1 + (axes >> 2) * (1 << (axes & 3))
            begin, size = begin + head, size - head
    else:
        raise TokenFileError(f"{file.name}: its tokens are stored as {encoding!r}; `ndarray` and `bytes` are read")
    if stored.kind not in "ui" or (size % stored.itemsize).any() or (size < 0).any():
        raise TokenFileError(f"{file.name}: its samples are not arrays of {stored.name}; set `column:` or `dtype:`")
    return Runs(stored, begin, size // stored.itemsize, are_documents=False)


@dataclass(frozen=True)
class Bounds:
    """The documents of a file, without the ids that end them.

    Attributes:
        dtype: of the tokens.
        begin: int64 of shape (n,), first byte of each.
        tokens: int64 of shape (n,), 0 of empty ones.
        ended: how many of them an end of text follows, or comes before.
        other_end: the id that most of the others end with, and how many; None where none is left.
        metadata: of each document, or none at all.
    """

    dtype: np.dtype[Any]
    begin: np.ndarray
    tokens: np.ndarray
    ended: int
    other_end: tuple[int, int] | None
    metadata: tuple[Mapping[str, str], ...] = ()


def bounds_of(runs: Runs, content: np.ndarray, end_of_text: int, document_tokens: int | None) -> Bounds:
    """The documents of a file's runs.

    A run that is a document is one, without the end of text behind it. Any other run is cut at every end of text:
    an empty stretch between two of them is not one. With `document_tokens` it is cut after that many tokens instead.

    Args:
        runs: see `formats.runs_of`.
        content: the file's bytes.
        end_of_text: the id that documents end with.
        document_tokens: see above.
    """
    if runs.are_documents:
        return _without_ends(runs, content, end_of_text)
    size, begins, lengths, ended = runs.dtype.itemsize, [], [], 0
    for begin, tokens in zip(runs.begin.tolist(), runs.tokens.tolist(), strict=True):
        if document_tokens is not None:
            starts = np.arange(0, tokens, document_tokens, dtype=np.int64)
            stops = np.minimum(starts + document_tokens, tokens)
        else:
            ends = _places(np.frombuffer(content, runs.dtype, tokens, begin), end_of_text)
            ended += len(ends)
            starts, stops = np.append(0, ends + 1), np.append(ends, tokens)
        is_some = stops > starts
        begins.append(begin + starts[is_some] * size)
        lengths.append((stops - starts)[is_some])
    nothing = np.empty(0, np.int64)
    return Bounds(runs.dtype, np.concatenate([nothing, *begins]), np.concatenate([nothing, *lengths]), ended, None)


def _places(tokens: np.ndarray, wanted: int) -> np.ndarray:
    """Where an id stands: int64, ascending."""
    found = [np.flatnonzero(tokens[at : at + SCAN_TOKENS] == wanted) + at for at in range(0, len(tokens), SCAN_TOKENS)]
    return np.concatenate([np.empty(0, np.int64), *found])


def _without_ends(runs: Runs, content: np.ndarray, end_of_text: int) -> Bounds:
    size, some = runs.dtype.itemsize, np.flatnonzero(runs.tokens)
    last = runs.begin[some] + (runs.tokens[some] - 1) * size
    ids = content[last[:, None] + np.arange(size)].view(runs.dtype).ravel().astype(np.int64)
    is_end = ids == end_of_text
    tokens = runs.tokens.copy()
    tokens[some[is_end]] -= 1
    others, counts = np.unique(ids[~is_end], return_counts=True)
    most = int(counts.argmax()) if len(counts) else -1
    other = None if most < 0 else (int(others[most]), int(counts[most]))
    return Bounds(runs.dtype, runs.begin, tokens, int(is_end.sum()), other, runs.metadata)

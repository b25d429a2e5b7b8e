"""What the workers of a mixture must know: which documents make which rows, as files that any machine can read."""

from __future__ import annotations

import json
import math
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from gristmill.dataprep.files import as_path, atomic_write, is_local

if TYPE_CHECKING:
    from gristmill.tokenize.mixing.layouts import Layout
    from gristmill.tokenize.mixing.streams import Stream

Record = TypeVar("Record", "Documents", "Stream", "Layout")
"""A dataclass whose fields are all arrays."""
ALIGNMENT = 64
"""Bytes of a cache line, and of the widest vector instruction."""


@dataclass(frozen=True)
class Documents:
    """Where the tokens of all documents lie, ordered by id.

    Attributes:
        words: uint64 of shape (n, 2), the ids.
        part: int64 of shape (n,), number of the token part.
        offset: int64 of shape (n,), first token within it.
        tokens: int64 of shape (n,), without an end of text.
    """

    words: np.ndarray
    part: np.ndarray
    offset: np.ndarray
    tokens: np.ndarray


@dataclass(frozen=True)
class Plan:
    """All that a worker must know to write a shard; the arrays are files in `folder`, for any machine to read.

    Attributes:
        folder: where `save` put the arrays.
        out: output folder of the stage.
        parts: token files, by number.
        dtype: of all tokens, by name.
        sequence_length: tokens per row.
        eos: id that ends a document.
        pad: id behind the last document of a row that is not full.
        seed: of the order of the rows.
        sources: names, in the order of the source numbers.
        stages: training rows of each source, for every stage in order.
        excluded: ids of the documents whose rows are emptied.
    """

    folder: str
    out: str
    parts: tuple[str, ...]
    dtype: str
    sequence_length: int
    eos: int
    pad: int
    seed: int
    sources: tuple[str, ...]
    stages: tuple[tuple[int, ...], ...]
    excluded: tuple[bytes, ...] = ()


def save(folder: Path, name: str, record: Documents | Stream | Layout) -> None:
    """Write the arrays of a record to one file: a line of JSON that says of each its dtype and shape, then all bytes.

    The line is filled up with blanks, so that every array begins at a multiple of ALIGNMENT.
    """
    arrays = {field: np.ascontiguousarray(array) for field, array in vars(record).items()}
    described = json.dumps({field: [array.dtype.str, array.shape] for field, array in arrays.items()}).encode()
    # Every attempt writes its plan anew, so that none has to survive the machine.
    with atomic_write(folder / name, durable=False) as sink:
        sink.write(described.ljust(_aligned(len(described) + 1) - 1) + b"\n")
        for array in arrays.values():
            sink.write(array.data.cast("B") if array.size else b"")
            sink.write(bytes(_aligned(array.nbytes) - array.nbytes))


def load_record(folder: str, name: str, kind: type[Record]) -> Record:
    """A record that `save` wrote; its arrays are memory-mapped where they are local."""
    path = as_path(folder) / name
    with path.open("rb") as stream:
        line = stream.readline()
        content = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) if is_local(path) else line + stream.read()
    arrays, begin = {}, len(line)
    for field, (dtype, shape) in json.loads(line).items():
        arrays[field] = np.frombuffer(content, dtype, math.prod(shape), begin).reshape(shape)
        begin += _aligned(arrays[field].nbytes)
    return kind(**arrays)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def train_stream(source: int) -> str:
    """The saved name of a source's training stream."""
    return f"train-{source}"


def validation_stream(source: int) -> str:
    """The saved name of a source's held-out stream."""
    return f"validation-{source}"


def layout_of(stream: str) -> str:
    """The saved name of the layout of a stream that is saved under some name."""
    return f"{stream}-layout"

"""What the workers of a mixture must know: which documents make which rows, as files that any machine can read."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from gristmill.dataprep.files import as_path, atomic_write, is_local

if TYPE_CHECKING:
    from gristmill.tokenize.mixing.layouts import Layout
    from gristmill.tokenize.mixing.streams import Stream

Record = TypeVar("Record", "Documents", "Stream", "Layout")
"""A dataclass whose fields are all arrays."""


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
    """Write the arrays of a record, each as a file."""
    for field, array in vars(record).items():
        # Every attempt writes its plan anew, so that none has to survive the machine.
        with atomic_write(folder / f"{name}.{field}.npy", durable=False) as sink:
            np.save(sink, array)


def load_record(folder: str, name: str, kind: type[Record]) -> Record:
    """A record that `save` wrote; its arrays are memory-mapped where they are local."""
    return kind(*(_load(as_path(folder) / f"{name}.{field}.npy") for field in kind.__dataclass_fields__))


def _load(path: Path) -> Any:
    with path.open("rb") as stream:
        if not is_local(path):
            return np.load(stream)
        # As `np.load` maps it, but with a fifth of the work: there are many, and some are small.
        np.lib.format.read_magic(stream)  # version 1.0: no header of ours is long
        shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
        begin = stream.tell()
        mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    return np.frombuffer(mapped, dtype, int(np.prod(shape)), begin).reshape(shape)


def train_stream(source: int) -> str:
    """The saved name of a source's training stream."""
    return f"train-{source}"


def validation_stream(source: int) -> str:
    """The saved name of a source's held-out stream."""
    return f"validation-{source}"


def layout_of(stream: str) -> str:
    """The saved name of the layout of a stream that is saved under some name."""
    return f"{stream}-layout"

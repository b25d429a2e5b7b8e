"""Arrays of a plan as files that any machine can read: a dataclass of arrays is one
file, whose arrays are mapped.
"""

from __future__ import annotations

import json
import math
import mmap
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from gristmill.core.files import atomic_write, is_local

Record = TypeVar("Record")
"""A dataclass whose fields are all arrays."""
ALIGNMENT = 64
"""Bytes of a cache line, and of the widest vector instruction."""


def save(folder: Path, name: str, record: Any) -> Path:
    """Write the arrays of a record to one file: a line of JSON with the dtype and
    shape of each, then all bytes.

    The line is filled up with blanks, so that every array begins at a multiple of
    ALIGNMENT. Returns its path.
    """
    arrays = {
        field: np.ascontiguousarray(array) for field, array in vars(record).items()
    }
    described = json.dumps(
        {field: [array.dtype.str, array.shape] for field, array in arrays.items()}
    ).encode()
    # A job compares sizes before it takes a file for done: what a crash of the machine
    # cuts is made again.
    with atomic_write(folder / name, durable=False) as sink:
        sink.write(described.ljust(_aligned(len(described) + 1) - 1) + b"\n")
        for array in arrays.values():
            sink.write(array.data.cast("B") if array.size else b"")
            sink.write(bytes(_aligned(array.nbytes) - array.nbytes))
    return folder / name


def load_record(folder: Path, name: str, kind: type[Record]) -> Record:
    """A record that `save` wrote; its arrays are memory-mapped if they are local."""
    path = folder / name
    with path.open("rb") as stream:
        line = stream.readline()
        content = (
            mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
            if is_local(path)
            else line + stream.read()
        )
    arrays = {}
    begin = len(line)
    for field, (dtype, shape) in json.loads(line).items():
        arrays[field] = np.frombuffer(content, dtype, math.prod(shape), begin).reshape(
            shape
        )
        begin += _aligned(arrays[field].nbytes)
    return kind(**arrays)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT

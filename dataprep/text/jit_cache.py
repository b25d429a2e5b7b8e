"""Cache of the kernels' machine code: on this machine and, for workers of a cluster, in
the store of the run.

Each compiled function, for each signature, is a file named by everything that its code
depends on: the sources of the kernels, the versions of Python, numba and LLVM, the
processor, the signature. Files therefore need no coordination: a file serves every
process on any machine. numba's own cache has an index per function, named by the folder
of its source; if two processes compile a function for different signatures at the same
time, one loses its entry, or both write the same file.
"""

from __future__ import annotations

import hashlib
import pickle
from pathlib import Path
from typing import Any

from gristmill.core.files import read_bytes, write_bytes

FOLDER = "kernels"
"""Folder below a store's files for workers (`runners/ship_files.py`)."""
DIGEST_BYTES = 32
_shared: list[Path] = []


def share(folder: Path) -> None:
    """Also load machine code from a store in this process, and save newly compiled code
    there.

    Args:
        folder: of the store.
    """
    _shared[:] = [folder]


class MachineCode:
    """Files of one kernel, with the interface of numba's `IndexDataCacheFile`.

    Args:
        folder: of all kernels; its name identifies their sources.
        name: of the kernel and the version of Python.
        source: identifies the content of the kernel's own file.
    """

    def __init__(self, folder: Path, name: str, source: object) -> None:
        self._folder = folder
        self._name = name
        self._source = source

    def load(self, key: object) -> Any:
        """Load the data saved with a key, or None.

        Args:
            key: of numba: argument types, processor, and hashes of the function.

        Raises:
            OSError: the store cannot be read.
        """
        file = self._file(key)
        if file is None:
            return None
        content = _content(self._folder / file)
        if content is None and _shared:
            content = _content(_shared[0] / self._folder.name / file)
            if content is not None:
                _write(self._folder / file, content)
        return None if content is None else pickle.loads(content)

    def save(self, key: object, data: Any) -> None:
        """Save numba's compiled data, also in the store, where `load` did not find
        it.
        """
        from numba.core.serialize import dumps

        file = self._file(key)
        if file is None:
            return
        content = dumps(data)
        _write(self._folder / file, content)
        if _shared:
            _write(_shared[0] / self._folder.name / file, content)

    def _file(self, key: object) -> str | None:
        """File name of a key; None if one of its types is local to this process."""
        import llvmlite
        import numba

        description = repr((numba.__version__, llvmlite.__version__, self._source, key))
        return (
            None
            if " at 0x" in description
            else f"{self._name}.{hashlib.sha256(description.encode()).hexdigest()[:32]}"
        )


def _content(file: Path) -> bytes | None:
    """Verified content of a file, as it will be executed; None if it is missing or
    damaged.
    """
    try:
        stored = read_bytes(file)
    except FileNotFoundError:
        return None
    digest = stored[:DIGEST_BYTES]
    content = stored[DIGEST_BYTES:]
    return content if hashlib.sha256(content).digest() == digest else None


def _write(file: Path, content: bytes) -> None:
    write_bytes(file, hashlib.sha256(content).digest() + content, durable=False)

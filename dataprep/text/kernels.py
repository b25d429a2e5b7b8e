"""Compilation of array functions with numba, and Arrow string columns as the arrays
that they read.

numba's cache only checks the file of the called function, not those of the functions
that it calls, and would run stale code after an update. The folder of the machine code
is therefore named after the content of all kernel sources. Its files: `jit_cache.py`.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import Any, TypeAlias

import numba
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from gristmill.core.arrays import Column
from gristmill.dataprep.text.jit_cache import MachineCode

Bytes: TypeAlias = np.ndarray
"""uint8: UTF-8 of texts, back to back."""
Offsets: TypeAlias = np.ndarray
"""int64 of shape (n + 1,): text i is `data[offsets[i]:offsets[i + 1]]`."""
Positions: TypeAlias = np.ndarray
"""int64: positions in `data`."""
Flags: TypeAlias = np.ndarray
"""Unsigned integers of shape (CODE_POINTS,): properties of every code point."""


def text_buffers(texts: Column, checked: bool = True) -> tuple[Bytes, Offsets]:
    """View a column of strings without copying it (slices included; nulls are empty
    texts).

    Args:
        texts: `string` or `large_string`, n values.
        checked: validate the values; otherwise the first kernel must detect invalid
            ones.

    Returns:
        data (the entire buffer, which may have more) and offsets; both are always
        read-only, since numba compiles a kernel separately for writable and read-only
        arrays.

    Raises:
        pa.ArrowInvalid: a value is not UTF-8; the kernels rely on this check.
    """
    if isinstance(texts, pa.ChunkedArray):
        # combine_chunks would copy a single chunk.
        texts = texts.chunk(0) if texts.num_chunks == 1 else texts.combine_chunks()
    texts = texts.cast(pa.large_string())
    if texts.null_count:
        texts = pc.fill_null(texts, "")
    if checked:
        texts.validate(full=True)
    if len(texts) == 0:
        return _read_only(np.empty(0, np.uint8)), _read_only(np.zeros(1, np.int64))
    _, offsets, data = texts.buffers()
    bounds = np.frombuffer(offsets, np.int64, len(texts) + 1, offset=8 * texts.offset)
    return _read_only(
        np.empty(0, np.uint8) if data is None else np.frombuffer(data, np.uint8)
    ), _read_only(bounds)


def _read_only(values: np.ndarray) -> np.ndarray:
    values.flags.writeable = False
    return values


MARK = re.compile(
    r"^ *@(?:kernel|inner_kernel|inlined_kernel|intrinsic)\b", re.MULTILINE
)
"""Decorator of a kernel, or of a function that kernels call."""
FOLDERS = ("dataprep", "tokenize")
"""Folders with kernels; those of the second call those of the first."""


def cache_folder() -> Path:
    """Folder with the machine code of this version of the kernels.

    Below `NUMBA_CACHE_DIR` if that is set, otherwise below the user's cache folder (XDG
    base directories).
    """
    digest = hashlib.blake2b(digest_size=8)
    folders = (Path(__file__).parents[2] / name for name in FOLDERS)
    for path in sorted(path for folder in folders for path in folder.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        if MARK.search(source):
            digest.update(f"{path.parent.name}/{path.name}\n{source}\n".encode())
    user = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    base = os.environ.get("NUMBA_CACHE_DIR") or Path(user) / "gristmill" / "numba"
    return Path(base) / digest.hexdigest()


numba.config.CACHE_DIR = str(cache_folder())
UNCOUNTED = {"_nrt": False}
"""Option of numba that omits reference counting; functions that create arrays do not
compile with it.
"""


def kernel(function: Any) -> Any:
    """Compile a function on its first call, and cache its machine code."""
    return _compiled(function)


def inner_kernel(function: Any) -> Any:
    """Compile a function that creates no arrays, to be called by other kernels.

    Other kernels count references to each of their arrays, twice per call and with
    atomic additions: more work than the rest of a function that is called for every
    word (see docs/patched.md).
    """
    return _compiled(function, **UNCOUNTED)


def inlined_kernel(function: Any) -> Any:
    """Compile an inner kernel that is inlined into its callers: an array takes seven
    arguments of a call.
    """
    return _compiled(function, forceinline=True, **UNCOUNTED)


def _compiled(function: Any, **options: bool) -> Any:
    dispatcher = numba.njit(nogil=True, cache=True, **options)(function)
    cache = getattr(dispatcher, "_cache", None)  # missing if NUMBA_DISABLE_JIT is set
    if cache is not None:
        cache_impl = cache._impl
        cache._cache_file = MachineCode(
            Path(numba.config.CACHE_DIR),
            cache_impl.filename_base,
            cache_impl.locator.get_source_stamp(),
        )
    return dispatcher


@intrinsic
def pointer(typing: Any, address: Any) -> Any:
    """Address as a pointer for `carray`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(address), generate

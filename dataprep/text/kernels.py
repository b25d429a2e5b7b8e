"""`kernel` compiles functions of arrays with numba; Arrow string columns as the arrays that such functions read.

numba looks only at the file of the function that is called, not at those of the functions that it calls: after an
update it would still run the old ones. So the folder of the machine code is named after the content of all kernel
sources. What is in it: `machine_code.py`.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from gristmill.dataprep.text.machine_code import MachineCode


def text_buffers(texts: pa.Array | pa.ChunkedArray, checked: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """View a column of strings without copying it (slices included; nulls count as empty text).

    Args:
        texts: `string` or `large_string`, n values.
        checked: whether each is looked at. Without, the first kernel that gets them must find out.

    Returns:
        data: uint8, the UTF-8 bytes of the values (and maybe more: it is the whole buffer).
        offsets: int64 of shape (n + 1,); value i is `data[offsets[i]:offsets[i + 1]]`.
        Both are read-only wherever their buffers come from, since numba compiles a kernel once for arrays that may be
        written to and once for those that may not.

    Raises:
        pa.ArrowInvalid: a value is not UTF-8. The kernels rely on this check.
    """
    if isinstance(texts, pa.ChunkedArray):
        # Putting one chunk together would copy it.
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
    return _read_only(np.empty(0, np.uint8) if data is None else np.frombuffer(data, np.uint8)), _read_only(bounds)


def _read_only(values: np.ndarray) -> np.ndarray:
    values.flags.writeable = False
    return values


MARK = re.compile(r"^ *@(?:kernel|inner_kernel|inlined_kernel|intrinsic)\b", re.MULTILINE)
"""How a kernel, or what kernels call, begins."""
FOLDERS = ("dataprep", "tokenize")
"""Where there are kernels; those of the second call those of the first."""


def cache_folder() -> Path:
    """Where the machine code of this version of the kernels is kept.

    Below `NUMBA_CACHE_DIR` if that is set, otherwise below the user's cache folder (XDG base directories).
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
"""numba's option that leaves out its counts of references; a function that makes an array does not compile with it."""


def kernel(function: Any) -> Any:
    """Compile a function when it is called, and keep its machine code."""
    return _compiled(function)


def inner_kernel(function: Any) -> Any:
    """Compile a function that makes no array, for other kernels to call.

    Any other kernel counts the references to each of its arrays, twice for each call and with atomic additions: more
    than what is done for a word, where it is done for every word (see docs/patched.md).
    """
    return _compiled(function, **UNCOUNTED)


def inlined_kernel(function: Any) -> Any:
    """Compile an inner kernel that is copied into those that call it: an array takes seven arguments of a call."""
    return _compiled(function, forceinline=True, **UNCOUNTED)


def _compiled(function: Any, **options: bool) -> Any:
    made = numba.njit(nogil=True, cache=True, **options)(function)
    cache = getattr(made, "_cache", None)  # there is none where NUMBA_DISABLE_JIT is set
    if cache is not None:
        named = cache._impl
        cache._cache_file = MachineCode(
            Path(numba.config.CACHE_DIR), named.filename_base, named.locator.get_source_stamp()
        )
    return made


@intrinsic
def pointer(typing: Any, address: Any) -> Any:
    """An address as a pointer that `carray` takes."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(address), generate

"""The memory of a training's process: what a step gives back, the next one needs again."""

from __future__ import annotations

import ctypes
import os

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Numbers of mallopt(3)."""
LARGEST_BLOCKS = (1 << 30, 1 << 25)
"""Bytes up to which a block is kept, the first that glibc takes; before 2.35 it takes no more than the second."""


def keep_freed_memory() -> bool:
    """Let glibc keep what is freed, in place of giving it back to the kernel after every step.

    A page that comes from the kernel is cleared and mapped when it is first touched; a step on a CPU takes tens of
    thousands of them. Blocks lie in one heap then, which only grows; what is larger than the largest of them is mapped
    and unmapped as ever. Nothing is changed where the user has said something else in MALLOC_TRIM_THRESHOLD_ or
    MALLOC_MMAP_THRESHOLD_, or where the C library is none of GNU's.

    Returns:
        whether it does now.
    """
    if {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"} & os.environ.keys():
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    # Either setting ends glibc's own search for a threshold, which begins at 128 KB: trimming comes second.
    return (any(library.mallopt(M_MMAP_THRESHOLD, size) for size in LARGEST_BLOCKS)
            and bool(library.mallopt(M_TRIM_THRESHOLD, -1)))

"""What a process of a training frees, it keeps."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from gristmill.train.host_memory import keep_freed_memory

TOUCHING = """
import ctypes, resource, sys
from gristmill.train.host_memory import keep_freed_memory
keeps = sys.argv[1] == "keep" and keep_freed_memory()
library = ctypes.CDLL(None)
library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
library.free.argtypes, library.memset.argtypes = [ctypes.c_void_p], [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]

def touch():
    block = library.malloc(100_000_000)
    library.memset(block, 1, 100_000_000)
    library.free(block)

touch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    touch()
print(keeps, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is none of GNU's")
def test_a_process_that_keeps_freed_memory_takes_no_new_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"):
        monkeypatch.delenv(name, raising=False)
    (keeps, faults), (gives_up, faults_without) = (_touched(how) for how in ("keep", "give up"))
    assert (keeps, gives_up) == ("True", "False")
    assert int(faults_without) > 1000
    assert int(faults) < int(faults_without) / 100


def test_what_the_user_has_set_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "100000")
    assert not keep_freed_memory()


def _touched(how: str) -> list[str]:
    """Whether a process keeps what it frees, and how many pages it takes that it had before."""
    done = subprocess.run([sys.executable, "-c", TOUCHING, how], check=True, text=True, capture_output=True)
    return done.stdout.split()

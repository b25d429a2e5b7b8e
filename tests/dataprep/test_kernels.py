"""Compiled kernels: cached machine code never outlives its source."""

from __future__ import annotations

import shutil
from itertools import pairwise
from pathlib import Path

import numba
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from gristmill.dataprep.text import kernels
from gristmill.dataprep.text.kernels import text_buffers
from gristmill.dataprep.text.unicode_tables import skip_flagged


def test_machine_code_of_changed_kernels_is_not_reused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = Path(kernels.__file__).parents[2]
    for name in (
        "dataprep/text/kernels.py",
        "dataprep/text/hashing.py",
        "tokenize/encoding/utf8_counts.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(sources / name, tmp_path / name)
    monkeypatch.setattr(
        kernels, "__file__", str(tmp_path / "dataprep" / "text" / "kernels.py")
    )
    before = kernels.cache_folder()
    (tmp_path / "dataprep" / "unrelated.py").write_text("x = 1\n")
    assert kernels.cache_folder() == before
    callee = tmp_path / "dataprep" / "text" / "hashing.py"
    callee.write_text(callee.read_text().replace("0x85EBCA6B", "0x85EBCA6D"))
    changed = kernels.cache_folder()
    assert changed != before
    caller = tmp_path / "tokenize" / "encoding" / "utf8_counts.py"
    caller.write_text(caller.read_text().replace("0x3F", "0x3E"))
    assert kernels.cache_folder() not in (before, changed)


def test_cache_folder_follows_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    assert kernels.cache_folder().parent == tmp_path


@pytest.mark.parametrize(
    "texts",
    [
        pa.array(["grain", "", "flour"]),
        pc.utf8_lower(pa.array(["GRAIN", "", "Flour"])),
        pa.array(["", "", ""]),
        pa.array(["x", "grain", "", "flour"], pa.large_string()).slice(1),
        pa.array([], pa.string()),
        pa.chunked_array([["grain", ""], ["flour"]]),
        pa.LargeStringArray.from_buffers(
            3,
            pa.py_buffer(np.array([0, 5, 5, 10])),
            pa.py_buffer(np.frombuffer(b"grainflour", np.uint8).copy()),
        ),
    ],
)
def test_text_buffers_are_read_only_so_that_no_kernel_compiles_twice(
    texts: pa.Array | pa.ChunkedArray,
) -> None:
    data, offsets = text_buffers(texts)
    assert (
        data.dtype,
        offsets.dtype,
        data.flags.writeable,
        offsets.flags.writeable,
    ) == (
        np.uint8,
        np.int64,
        False,
        False,
    )
    assert [
        data[begin:end].tobytes().decode() for begin, end in pairwise(offsets.tolist())
    ] == texts.to_pylist()


def test_inner_kernels_count_no_references() -> None:
    """numba does not document the option: see docs/patched.md."""
    data = np.frombuffer(b"grain", np.uint8)
    flags = np.zeros(128, np.uint8)
    for options, counts in (({}, True), (kernels.UNCOUNTED, False)):
        compiled = numba.njit(**options)(skip_flagged.py_func)
        assert compiled(data, 0, len(data), flags, 1) == 0
        (code,) = compiled.inspect_llvm().values()
        assert ("@NRT_incref(" in code) == counts

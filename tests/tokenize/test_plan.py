"""What the workers of a mixture are told, as files."""

from __future__ import annotations

from pathlib import Path

import fsspec
import numpy as np
import pytest

from gristmill.dataprep.files import as_path
from gristmill.tokenize.mixing.layouts import Layout
from gristmill.tokenize.mixing.plan import ALIGNMENT, Documents, load_record, save


@pytest.mark.parametrize("number", [0, 1, 3, 500])
@pytest.mark.parametrize("remote", [False, True])
def test_a_record_comes_back_as_it_was_saved_wherever_it_lies(tmp_path: Path, number: int, remote: bool) -> None:
    folder = as_path(f"memory://plan/{number}") if remote else tmp_path
    rng = np.random.default_rng(number)
    documents = Documents(rng.integers(0, 2**64, (number, 2), dtype=np.uint64), *rng.integers(0, 2**62, (3, number)))
    layout = Layout(np.arange(number + 1), np.arange(number) * 7, np.arange(number, dtype=np.int32))
    for name, record in (("documents", documents), ("layout", layout)):
        save(folder, name, record)
        loaded = load_record(str(folder), name, type(record))
        for field, array in vars(record).items():
            found = getattr(loaded, field)
            assert (found.dtype, found.shape, found.tolist()) == (array.dtype, array.shape, array.tolist())
            assert remote or found.ctypes.data % ALIGNMENT == 0
    fsspec.filesystem("memory").rm("/", recursive=True)

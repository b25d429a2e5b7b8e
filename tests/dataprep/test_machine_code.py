"""Machine code of kernels is reused if and only if everything that it depends on is the
same.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest

from gristmill.dataprep.text import jit_cache
from gristmill.dataprep.text.jit_cache import MachineCode

SOURCE = """\
from gristmill.dataprep.text.kernels import kernel


@kernel
def add(values):
    return values.sum() + 1
"""
KEY = (("array(uint8, 1d, C)",), ("x86_64", "skylake", "+avx2"), ("code", "closure"))


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Isolate each test from shared stores."""
    before = list(jit_cache._shared)
    jit_cache._shared.clear()
    yield
    jit_cache._shared[:] = before


def add_of(home: Path, monkeypatch: pytest.MonkeyPatch, source: str = SOURCE) -> Any:
    """Kernel of a worker with a home folder of its own."""
    # Its import sets the folder that is replaced here.
    importlib.import_module("gristmill.dataprep.text.kernels")
    file = home / "package" / "adding.py"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(source)
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(home / "cache" / "sources"))
    spec = importlib.util.spec_from_file_location("adding", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.add


def cache_hits_and_misses(add: Any) -> tuple[int, int]:
    """Numbers of hits and misses of the machine-code cache."""
    return sum(add.stats.cache_hits.values()), sum(add.stats.cache_misses.values())


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_worker_loads_machine_code_of_another_from_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jit_cache.share(tmp_path / "store")
    first = add_of(tmp_path / "a", monkeypatch)
    assert (first(np.ones(3, np.int64)), first(np.ones(3, np.float32))) == (4, 4)
    assert cache_hits_and_misses(first) == (0, 2)
    stored = files(tmp_path / "store")
    assert len(stored) == 2
    assert {path.parent for path in stored} == {tmp_path / "store" / "sources"}
    second = add_of(tmp_path / "b", monkeypatch)
    assert (second(np.ones(3, np.int64)), second(np.ones(3, np.float32))) == (4, 4)
    assert cache_hits_and_misses(second) == (2, 0)
    assert [path.read_bytes() for path in files(tmp_path / "b" / "cache")] == [
        path.read_bytes() for path in stored
    ]
    changed = add_of(tmp_path / "c", monkeypatch, SOURCE.replace("+ 1", "+ 2"))
    assert changed(np.ones(3, np.int64)) == 5
    assert cache_hits_and_misses(changed) == (0, 1)


def test_machine_code_is_cached_locally_without_a_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert add_of(tmp_path, monkeypatch)(np.ones(3, np.int64)) == 4
    again = add_of(tmp_path, monkeypatch)
    assert again(np.ones(3, np.int64)) == 4
    assert cache_hits_and_misses(again) == (1, 0)


def test_damaged_machine_code_is_recompiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_of(tmp_path, monkeypatch)(np.ones(3, np.int64))
    (file,) = files(tmp_path / "cache")
    intact = file.read_bytes()
    file.write_bytes(intact[:-9])
    again = add_of(tmp_path, monkeypatch)
    assert again(np.ones(3, np.int64)) == 4
    assert cache_hits_and_misses(again) == (0, 1)
    assert len(file.read_bytes()) == len(intact)


@pytest.mark.parametrize(
    "other_key",
    [
        (("readonly array(uint8, 1d, C)",), *KEY[1:]),
        (KEY[0], ("x86_64", "znver4", "+avx2"), KEY[2]),
        (*KEY[:2], ("other", "closure")),
    ],
)
def test_machine_code_depends_on_arguments_processor_and_function(
    other_key: Any, tmp_path: Path
) -> None:
    code = MachineCode(tmp_path / "sources", "add", "stamp")
    code.save(KEY, "machine code")
    assert (code.load(KEY), code.load(other_key)) == ("machine code", None)
    assert MachineCode(tmp_path / "sources", "add", "another").load(KEY) is None


def test_process_local_keys_are_not_cached(tmp_path: Path) -> None:
    code = MachineCode(tmp_path / "sources", "add", "stamp")
    code.save((("type(<function f at 0x7f0>)",), *KEY[1:]), "machine code")
    assert not files(tmp_path)

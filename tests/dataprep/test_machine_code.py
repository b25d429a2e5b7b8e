"""Machine code of kernels is found again wherever all that it was made of is the same, and nowhere else."""

from __future__ import annotations

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
    """Nothing is shared before, nor after."""
    before = list(jit_cache._shared)
    jit_cache._shared.clear()
    yield
    jit_cache._shared[:] = before


def add_of(home: Path, monkeypatch: pytest.MonkeyPatch, source: str = SOURCE) -> Any:
    """The kernel as a worker with a home of its own has it."""
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


def found(add: Any) -> tuple[int, int]:
    """How often machine code was found, and how often it was not."""
    return sum(add.stats.cache_hits.values()), sum(add.stats.cache_misses.values())


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_what_one_worker_compiled_another_home_has_from_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jit_cache.share(tmp_path / "store")
    first = add_of(tmp_path / "a", monkeypatch)
    assert (first(np.ones(3, np.int64)), first(np.ones(3, np.float32))) == (4, 4)
    assert found(first) == (0, 2)
    stored = files(tmp_path / "store")
    assert len(stored) == 2
    assert {path.parent for path in stored} == {tmp_path / "store" / "sources"}
    second = add_of(tmp_path / "b", monkeypatch)
    assert (second(np.ones(3, np.int64)), second(np.ones(3, np.float32))) == (4, 4)
    assert found(second) == (2, 0)
    assert [path.read_bytes() for path in files(tmp_path / "b" / "cache")] == [path.read_bytes() for path in stored]
    changed = add_of(tmp_path / "c", monkeypatch, SOURCE.replace("+ 1", "+ 2"))
    assert changed(np.ones(3, np.int64)) == 5
    assert found(changed) == (0, 1)


def test_without_a_store_it_is_kept_on_this_machine_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert add_of(tmp_path, monkeypatch)(np.ones(3, np.int64)) == 4
    again = add_of(tmp_path, monkeypatch)
    assert again(np.ones(3, np.int64)) == 4
    assert found(again) == (1, 0)


def test_machine_code_that_was_damaged_is_not_executed_but_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_of(tmp_path, monkeypatch)(np.ones(3, np.int64))
    (file,) = files(tmp_path / "cache")
    whole = file.read_bytes()
    file.write_bytes(whole[:-9])
    again = add_of(tmp_path, monkeypatch)
    assert again(np.ones(3, np.int64)) == 4
    assert found(again) == (0, 1)
    assert len(file.read_bytes()) == len(whole)


@pytest.mark.parametrize(
    "other",
    [
        (("readonly array(uint8, 1d, C)",), *KEY[1:]),
        (KEY[0], ("x86_64", "znver4", "+avx2"), KEY[2]),
        (*KEY[:2], ("other", "closure")),
    ],
)
def test_other_arguments_processors_and_functions_have_their_own(other: Any, tmp_path: Path) -> None:
    code = MachineCode(tmp_path / "sources", "add", "stamp")
    code.save(KEY, "machine code")
    assert (code.load(KEY), code.load(other)) == ("machine code", None)
    assert MachineCode(tmp_path / "sources", "add", "another").load(KEY) is None


def test_what_only_this_process_can_name_is_not_kept(tmp_path: Path) -> None:
    code = MachineCode(tmp_path / "sources", "add", "stamp")
    code.save((("type(<function f at 0x7f0>)",), *KEY[1:]), "machine code")
    assert not files(tmp_path)

"""A checkpoint is data: what would run code is refused before it does."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from gristmill.train.loop.safe_loading import SafePlanner, UnsafeCheckpointError, check_index

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Trap:
    """Its pickle makes a folder when it is loaded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, (str(self.folder),)


def state() -> dict[str, Any]:
    return {"weights": torch.arange(6.0).reshape(2, 3).bfloat16(), "lr": 0.5, "betas": [0.9, 0.95], "step": 7}


def test_what_a_training_saves_is_loaded_as_it_was(tmp_path: Path) -> None:
    saved, found = (
        state(),
        {"weights": torch.zeros(2, 3, dtype=torch.bfloat16), "lr": 0.0, "betas": [0.0, 0.0], "step": 0},
    )
    dcp.save(saved, checkpoint_id=tmp_path, no_dist=True)
    check_index(tmp_path)
    dcp.load(found, checkpoint_id=tmp_path, planner=SafePlanner(), no_dist=True)
    assert torch.equal(found.pop("weights"), saved.pop("weights"))  # type: ignore[arg-type]
    assert found == saved


def test_an_index_that_would_run_code_is_refused_and_has_not_run_it(tmp_path: Path) -> None:
    checkpoint, trace = tmp_path / "step-1", tmp_path / "trace"
    dcp.save(state(), checkpoint_id=checkpoint, no_dist=True)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(Trap(trace)))
    with pytest.raises(UnsafeCheckpointError, match=r"names (posix|nt)\.mkdir, .* remove .*step-1"):
        check_index(checkpoint)
    assert not trace.exists()
    (checkpoint / ".metadata").write_bytes(b"no pickle")
    with pytest.raises(UnsafeCheckpointError, match="it was not loaded"):
        check_index(checkpoint)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch", "load"),
        ("builtins", "eval"),
        ("torch", "hub.load"),
        ("torch.serialization", "load"),
        ("pathlib", "Path"),
    ],
)
def test_only_names_of_an_index_are_allowed(tmp_path: Path, module: str, name: str) -> None:
    (tmp_path / ".metadata").write_bytes(
        b"".join([b"\x80\x04", pickle.dumps(module, 4)[2:-1], pickle.dumps(name, 4)[2:-1], b"\x93."])
    )
    with pytest.raises(UnsafeCheckpointError, match=f"names {module}.{name}"):
        check_index(tmp_path)


def test_a_plain_value_that_would_run_code_is_refused_and_has_not_run_it(tmp_path: Path) -> None:
    content = io.BytesIO()
    torch.save(Trap(tmp_path / "trace"), content)
    content.seek(0)
    with pytest.raises(UnsafeCheckpointError, match=r"the value optimizer\.lr of a checkpoint was not loaded"):
        SafePlanner().load_bytes(SimpleNamespace(dest_index=SimpleNamespace(fqn="optimizer.lr")), content)
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize("module", [b"pathlib", b"pathlib._local"])
def test_the_index_may_name_a_path_as_any_version_of_python_does(module: bytes, tmp_path: Path) -> None:
    """Python 3.13 has its classes in another module, and a checkpoint is read by whatever version resumes it."""
    written = b"c" + module + b"\nPosixPath\n(S'/a'\nS'b'\ntR."
    (tmp_path / ".metadata").write_bytes(written)
    check_index(tmp_path)
    assert pickle.loads(written) == Path("/a/b"), "as torch reads it afterwards"
    (tmp_path / ".metadata").write_bytes(written.replace(b"PosixPath", b"os"))
    with pytest.raises(UnsafeCheckpointError, match=r"names pathlib\S*\.os"):
        check_index(tmp_path)

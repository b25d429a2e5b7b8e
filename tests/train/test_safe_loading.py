"""Checkpoints are data: code in them is rejected and not run."""

from __future__ import annotations

import io
import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from gristmill.train.safe_loading import (
    SafePlanner,
    UnsafeCheckpointError,
    check_index,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Trap:
    """Creates a folder when unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, (str(self.folder),)


def state() -> dict[str, Any]:
    return {
        "weights": torch.arange(6.0).reshape(2, 3).bfloat16(),
        "lr": 0.5,
        "betas": [0.9, 0.95],
        "step": 7,
    }


def test_saved_state_is_loaded(tmp_path: Path) -> None:
    saved = state()
    loaded = {
        "weights": torch.zeros(2, 3, dtype=torch.bfloat16),
        "lr": 0.0,
        "betas": [0.0, 0.0],
        "step": 0,
    }
    dcp.save(saved, checkpoint_id=tmp_path, no_dist=True)
    check_index(tmp_path)
    dcp.load(loaded, checkpoint_id=tmp_path, planner=SafePlanner(), no_dist=True)
    assert torch.equal(loaded.pop("weights"), saved.pop("weights"))  # type: ignore[arg-type]
    assert loaded == saved


def test_index_with_code_is_rejected_and_not_run(tmp_path: Path) -> None:
    checkpoint, trace = tmp_path / "step-1", tmp_path / "trace"
    dcp.save(state(), checkpoint_id=checkpoint, no_dist=True)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(Trap(trace)))
    with pytest.raises(UnsafeCheckpointError, match=r"(posix|nt)\.mkdir[\s\S]*step-1"):
        check_index(checkpoint)
    assert not trace.exists()
    (checkpoint / ".metadata").write_bytes(b"no pickle")
    with pytest.raises(UnsafeCheckpointError, match=r"step-1.*\.metadata"):
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
def test_only_names_of_an_index_are_allowed(
    tmp_path: Path, module: str, name: str
) -> None:
    (tmp_path / ".metadata").write_bytes(
        b"".join(
            [
                b"\x80\x04",
                pickle.dumps(module, 4)[2:-1],
                pickle.dumps(name, 4)[2:-1],
                b"\x93.",
            ]
        )
    )
    with pytest.raises(UnsafeCheckpointError, match=re.escape(f"{module}.{name}")):
        check_index(tmp_path)


def test_value_with_code_is_rejected_and_not_run(tmp_path: Path) -> None:
    content = io.BytesIO()
    torch.save(Trap(tmp_path / "trace"), content)
    content.seek(0)
    with pytest.raises(UnsafeCheckpointError, match=r"optimizer\.lr"):
        SafePlanner().load_bytes(
            SimpleNamespace(dest_index=SimpleNamespace(fqn="optimizer.lr")), content
        )
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize("module", [b"pathlib", b"pathlib._local"])
def test_index_may_name_paths_of_any_python_version(
    module: bytes, tmp_path: Path
) -> None:
    """Python 3.13 moved these classes, and another version may resume a checkpoint."""
    written = b"c" + module + b"\nPosixPath\n(S'/a'\nS'b'\ntR."
    (tmp_path / ".metadata").write_bytes(written)
    check_index(tmp_path)
    assert pickle.loads(written) == Path("/a/b")
    (tmp_path / ".metadata").write_bytes(written.replace(b"PosixPath", b"os"))
    with pytest.raises(UnsafeCheckpointError, match=r"pathlib\S*\.os"):
        check_index(tmp_path)

"""`gristmill demo`: its training is killed, resumes with the same bits, and the run
answers questions.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from gristmill.core.store import read_runs, store_at
from tests.commands import GRISTMILL

SETTINGS = (
    "mix.tokens=200_000",
    "pretrain.steps=24",
    "pretrain.log_every=1",
    "engine.checkpoint_every=5",
)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_demo_kills_resumes_and_answers(tmp_path: Path) -> None:
    settings = [part for setting in SETTINGS for part in ("--set", setting)]
    demo = subprocess.run(
        [
            *GRISTMILL,
            "demo",
            *("--store", str(tmp_path / "store"), *settings),
        ],
        cwd=tmp_path,
        env=os.environ | {"COLUMNS": "80"},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert demo.returncode == 0, demo.stdout
    killed, resumed, again, *_ = [
        record for _, record in read_runs(store_at(str(tmp_path / "store")))
    ]
    assert killed["state"] == "running"
    assert resumed["stages"]["pretrain"]["how"] == "Resumed"
    assert again["stages"]["pretrain"]["how"] == "Completed"
    lines = demo.stdout.strip().rpartition("\n\n")[2]
    assert len(re.findall(r"^- ", lines, re.MULTILINE)) == 5
    assert "the same bits" in " ".join(lines.split())

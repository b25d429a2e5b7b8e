"""Distribution of tests among the workers of a run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

TESTS = """
import os, pytest
@pytest.mark.parametrize("number", range(4))
def test_it(number):
    with open({log!r}, "a") as log:
        print({name!r}, os.environ["PYTEST_XDIST_WORKER"], file=log)
"""


@pytest.mark.slow
def test_a_file_and_a_folder_that_shares_a_server_stay_on_one_worker(
    tmp_path: Path,
) -> None:
    pytest.importorskip("xdist")
    log, workers = tmp_path / "log", defaultdict(set)
    for name in ("test_a", "browser/test_b", "browser/test_c", "train/test_d"):
        path = tmp_path / "tests" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(TESTS.format(log=str(log), name=name.partition("/")[0]))
    for name in ("conftest.py", "seconds.json"):
        shutil.copy(Path(__file__).with_name(name), tmp_path / "tests")
    environment = {
        **{
            name: value
            for name, value in os.environ.items()
            if not name.startswith("PYTEST_")
        },
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }  # what conftest.py imports
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-n",
            "2",
            "--dist",
            "loadfile",
            "-p",
            "no:cacheprovider",
            "--rootdir",
            str(tmp_path),
            "tests",
        ],
        cwd=tmp_path,
        env=environment,
        check=True,
    )
    lines = log.read_text().splitlines()
    for line in lines:
        name, worker = line.split()
        workers[name].add(worker)
    assert len(lines) == 16
    assert {name: len(names) for name, names in workers.items()} == {
        "test_a": 1,
        "browser": 1,
        "train": 1,
    }
    assert len(set.union(*workers.values())) == 2

"""A new run removes half-written records of killed runs, but not those of running
ones.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from gristmill.core.files import write_json
from gristmill.core.lease import identity
from gristmill.core.store import Store
from gristmill.flows.running.run_records import remove_half_written


def test_half_written_records_of_killed_runs_are_removed(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE
    ) as process:
        killed = identity(process.pid)
        process.kill()
    store = Store.at(str(tmp_path))
    leftovers = {}
    for name, owner in (
        ("killed", killed),
        ("living", identity(os.getpid())),
        ("beginning", None),
        ("old", None),
    ):
        folder = store.runs / name
        folder.mkdir(parents=True)
        leftovers[name] = folder / "run.json.tmp-1-abc"
        leftovers[name].write_text("{")
        if owner is not None:
            write_json(folder / "run.json", {"owner": owner})
    os.utime(leftovers["old"], (0, 0))
    remove_half_written(store)
    assert [name for name, leftover in leftovers.items() if leftover.exists()] == [
        "living",
        "beginning",
    ]
    assert (store.runs / "killed" / "run.json").exists()

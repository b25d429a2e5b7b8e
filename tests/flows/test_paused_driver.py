"""A driver that is stopped for longer than its lease while another run takes over, and
then resumes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gristmill.core.files import as_path, read_json
from gristmill.core.lease import FENCED
from tests.jsonl import write_jsonl
from tests.servers import wait_for
from tests.stores import Outage

DRIVER = """
import sys
from gristmill.core import heartbeats, lease
heartbeats.STALE_SECONDS, heartbeats.BEAT_SECONDS, lease.WAIT_SECONDS = 3.0, 0.5, 0.1
host = sys.argv.pop(1)
lease._pid_namespace = lambda: host
sys.argv[0] = "gristmill"
from gristmill.flows.cli.main import main
main()
"""
"""gristmill with leases of three seconds, which sees only processes of its own host
name.
"""
STEPS = """
import os, time

def wait_for_ten(text):
    folder = os.environ.get("PAUSED")
    if folder and "number 10" in text:
        open(os.path.join(folder, "reached"), "w").close()
        while not os.path.exists(os.path.join(folder, "never")):
            time.sleep(0.02)
    return {"length": len(text)}
"""
MANIFEST = """
name: paused
sources: {docs: {path: "FOLDER/docs.jsonl"}}
prepare: [{annotate: {use: ./steps.py:wait_for_ten}}]
engine: {workers: 1}
"""


@contextmanager
def driver(
    host: str, folder: Path, store: str, **environment: str
) -> Iterator[subprocess.Popen[str]]:
    """Start a run in a separate session and end its processes on exit."""
    command = [
        sys.executable,
        "-c",
        DRIVER,
        host,
        "run",
        str(folder / "m.yaml"),
        "--no-ui",
        "--store",
        store,
    ]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **environment},
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGCONT)
        process.terminate()
        process.communicate()


def runs(pid: int) -> bool:
    """Return whether a process runs and is not a zombie."""
    try:
        return (
            Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            not in "ZX"
        )
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "store_server"),
    [("folder", "s3"), ("store", "s3"), ("store", "gs"), ("store", "az")],
    indirect=["store_server"],
)
def test_superseded_driver_kills_its_children_and_does_not_commit(
    where: str, outage: Outage, tmp_path: Path
) -> None:
    write_jsonl(tmp_path / "docs.jsonl", [{"text": f"number {n}"} for n in range(20)])
    (tmp_path / "m.yaml").write_text(MANIFEST.replace("FOLDER", str(tmp_path)))
    (tmp_path / "steps.py").write_text(STEPS)
    store = (
        str(tmp_path / "store")
        if where == "folder"
        else f"{outage.url}/{tmp_path.name}"
    )
    with driver("one", tmp_path, store, PAUSED=str(tmp_path)) as paused:
        wait_for((tmp_path / "reached").exists, "the tenth document")
        (folder,) = (as_path(store) / "annotate").iterdir()
        child = wait_for(
            lambda: (
                (folder / "lease" / "1.child.json").exists()
                and read_json(folder / "lease" / "1.child.json")["pid"]
            ),
            "the name of its child",
        )
        paused.send_signal(signal.SIGSTOP)
        with driver("another", tmp_path, store) as successor:
            other_output = successor.communicate(timeout=280)[0]
        assert successor.returncode == 0, other_output
        assert f"(process {paused.pid} on " in " ".join(other_output.split())
        assert runs(child), "the child of the paused driver still runs"
        manifest_bytes = (folder / "manifest.json").read_bytes()
        paused.send_signal(signal.SIGCONT)
        paused_output = paused.communicate(timeout=120)[0]
    assert paused.returncode == 1, paused_output
    assert paused_output.rstrip().endswith(
        "was taken over by another run; this attempt stops"
    ), paused_output
    assert "Traceback" not in paused_output
    assert not runs(child)
    assert (folder / "lease" / "1.commit").read_bytes() == FENCED
    assert (folder / "manifest.json").read_bytes() == manifest_bytes
    assert json.loads(manifest_bytes)["lease"] == 2
    with driver("third", tmp_path, str(tmp_path / "undisturbed")) as third:
        assert third.wait(timeout=280) == 0
    (expected,) = (tmp_path / "undisturbed" / "annotate").iterdir()
    assert (
        json.loads(manifest_bytes)["files"]
        == read_json(expected / "manifest.json")["files"]
    )

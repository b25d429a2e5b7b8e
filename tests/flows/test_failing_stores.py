"""Runs in an object store whose network fails, whose owner is paused, or whose driver
died on another host.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gristmill.core import heartbeats
from gristmill.core import lease as leases
from gristmill.core.files import as_path, read_json, write_json
from gristmill.core.lease import LeaseLostError, acquire
from gristmill.core.object_stores import VARIABLE
from gristmill.core.store import Store
from gristmill.flows.running.events import StageWaits
from gristmill.flows.running.run import Runner
from tests.commands import GRISTMILL, finished
from tests.jsonl import write_jsonl
from tests.servers import wait_for
from tests.stores import Outage

ANOTHER = {
    "host": "another",
    "machine": "another",
    "boot": "of another host",
    "pids": "pid:[1]",
    "pid": 7,
    "ticks": 7,
}


@pytest.fixture
def far(toy_runner: Callable[..., Runner], outage: Outage, tmp_path: Path) -> Runner:
    """Two toy stages in an object store of this test."""
    runner = toy_runner(first={"n": 4}, second={})
    store = Store.at(f"{outage.url}/{tmp_path.name}")
    return replace(runner, session=replace(runner.session, store=store))


def squares(runner: Runner) -> list[bytes]:
    return [(runner.folder("second").data / f"{n}.txt").read_bytes() for n in range(4)]


@pytest.mark.slow
def test_run_survives_a_temporary_store_outage(far: Runner, outage: Outage) -> None:
    far.run_stage("first")
    # fewer than the attempts of a single request
    outage.begins_with, outage.refusals = "/data/1.txt", 8
    far.run_stage("second")
    assert outage.refused == 8, "the outage happened during the stage"
    assert squares(far) == [b"0", b"1", b"4", b"9"]
    assert far.folder("second").state() == "committed"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_during_a_store_outage_ends_the_run_quickly_and_names_unwritten_files(
    outage: Outage,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
) -> None:
    monkeypatch.setenv(VARIABLE, "3600")
    write_jsonl(tmp_path / "docs.jsonl", [{"text": f"number {n}"} for n in range(20)])
    (tmp_path / "m.yaml").write_text(
        f'name: far\nsources: {{docs: {{path: "{tmp_path}/docs.jsonl"}}}}\n'
    )
    store = f"{outage.url}/{number.name}-{tmp_path.name}"
    command = [
        *GRISTMILL,
        "run",
        str(tmp_path / "m.yaml"),
        "--until",
        "ingest",
        "--no-ui",
    ]
    outage.begins_with, outage.refusals = "/data/", 10**9
    with subprocess.Popen(
        [*command, "--store", store],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        wait_for(lambda: outage.refused > 3, "the outage during the stage")
        process.send_signal(number)
        output = process.communicate(timeout=120)[0]
    assert process.returncode == 130, output
    message = " ".join(output.split("interrupted while", 1)[1].split())
    assert message.startswith(
        f"the store {store} could not be reached; not written: "
    ), output
    assert "lease/1.done" in message, output
    assert "resume with: " in message, output
    assert "Traceback" not in output
    outage.refusals = 0
    for store_address in (store, str(tmp_path / "here")):
        finished([*command, "--store", store_address], timeout=200)
    remote_folder, local_folder = (
        stage_folder
        for store_address in (store, str(tmp_path / "here"))
        for stage_folder in (as_path(store_address) / "ingest").iterdir()
    )
    assert (
        read_json(remote_folder / "manifest.json")["files"]
        == read_json(local_folder / "manifest.json")["files"]
    )


WHOLE = """\
name: whole
seed: 3
sources: {{docs: {{path: "{folder}/docs.jsonl"}}}}
prepare: [{{dedup: {{exact: true}}}}]
tokenizer: {{vocab_size: 300}}
mix: {{tokens: 2000, sequence_length: 32, validation: 0.1}}
pretrain: {{model: {{layers: 1, width: 16, heads: 1}}, steps: 6, global_batch_size: 4}}
engine: {{workers: 1, checkpoint_every: 2}}
"""


@pytest.mark.chaos
@pytest.mark.timeout(900)
def test_killed_run_in_a_store_resumes_to_the_bytes_of_a_folder(
    outage: Outage, tmp_path: Path
) -> None:
    """All processes of the run are killed before the marker of its second
    checkpoint.
    """
    write_jsonl(
        tmp_path / "docs.jsonl",
        [{"text": f"document {n} has {n * n} words " * 9} for n in range(40)],
    )
    (tmp_path / "whole.yaml").write_text(WHOLE.format(folder=tmp_path))
    url = f"{outage.url}/{tmp_path.name}"
    command = [*GRISTMILL, "run", "whole.yaml", "--no-ui"]
    outage.begins_with, outage.refusals = "step-00000004/complete.json", 10**9
    with subprocess.Popen(
        [*command, "--store", url], cwd=tmp_path, start_new_session=True
    ) as process:
        wait_for(lambda: outage.refused, "the second checkpoint", seconds=500)
        os.killpg(process.pid, signal.SIGKILL)
    outage.refusals = 0
    for store in (url, "here"):
        subprocess.run([*command, "--store", store], cwd=tmp_path, check=True)
    in_store, in_folder = output_files(as_path(url)), output_files(tmp_path / "here")
    assert in_store == in_folder
    assert {stage for stage, _ in in_store} == {
        "ingest",
        "dedup",
        "tokenizer",
        "tokenize",
        "mix",
        "pretrain",
    }


def output_files(store: Path) -> dict[tuple[str, str], str]:
    """Stage and file -> SHA-256 of all files of a store's outputs but the times of
    training steps.
    """
    return {
        (stage, name): entry["sha256"]
        for stage, folder in Store(store).outputs()
        for name, entry in folder.manifest()["files"].items()
        if name != "metrics.jsonl"
    }


@pytest.mark.slow
def test_stage_of_a_dead_driver_on_another_host_is_resumed(
    far: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lease exists, its heartbeat stands still, and half of its shards are done."""
    far.run_stage("first")
    folder = far.folder("second")
    write_json(folder.path / "lease" / "1.json", ANOTHER)
    write_json(folder.path / "lease" / "1.beat.json", {"beats": 3})
    (folder.work / "note").write_bytes(b"of the first attempt")
    for n in (0, 1):
        (folder.data / f"{n}.txt").write_bytes(str(n * n).encode())
    monkeypatch.setattr(heartbeats, "STALE_SECONDS", 0.05)
    monkeypatch.setattr(leases, "WAIT_SECONDS", 0.01)
    events = far.emit.events  # type: ignore[attr-defined]
    outcome = far.run_stage("second")
    waits = [event.node.name for event in events if isinstance(event, StageWaits)]
    assert (outcome.how, waits) == ("Resumed", ["second"])
    assert squares(far) == [b"0", b"1", b"4", b"9"]
    assert folder.manifest()["lease"] == 2


@pytest.mark.slow
def test_owner_paused_past_its_lease_does_not_commit(
    outage: Outage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It resumes after another host took over; the store lets only one of them
    commit.
    """
    monkeypatch.setattr(heartbeats, "STALE_SECONDS", 0.05)
    monkeypatch.setattr(leases, "WAIT_SECONDS", 0.01)
    folder = as_path(f"{outage.url}/{tmp_path.name}/lease")
    paused = acquire(folder, lambda owner: None, lambda: True)
    assert paused is not None
    monkeypatch.setattr(leases, "is_here", lambda owner: False)
    new_lease = acquire(folder, lambda owner: None, lambda: True)
    assert new_lease is not None
    assert new_lease.number == 2
    with pytest.raises(
        LeaseLostError,
        match="taken over by another run; this attempt's work is not committed",
    ):
        paused.commit(b"mine")
    with pytest.raises(
        LeaseLostError, match="taken over by another run; this attempt stops"
    ):
        paused.check()
    new_lease.commit(b"theirs")
    assert (folder / "2.commit").read_bytes() == b"theirs"

"""One writer at a time: a dead owner is replaced at once, a living one is waited for, a
paused one cannot commit.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gristmill.core import heartbeats
from gristmill.core import lease as leases
from gristmill.core.files import create_exclusively, read_json, write_json
from gristmill.core.lease import (
    Lease,
    LeaseLostError,
    acquire,
    identity,
    is_alive,
    is_gone,
    running_owner,
)


def take(folder: Path) -> Lease:
    lease = acquire(
        folder, lambda owner: pytest.fail(f"waited for {owner}"), lambda: True
    )
    assert lease is not None
    return lease


def dead_process() -> dict[str, Any]:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    process_identity = identity(child.pid)
    child.kill()
    child.wait()
    return process_identity


def test_leases_are_numbered_consecutively(
    tmp_path: Path,
) -> None:
    first = take(tmp_path)
    first.release()
    assert [first.number, take(tmp_path).number] == [1, 2]


def test_a_dead_owners_lease_is_taken_over_at_once(tmp_path: Path) -> None:
    write_json(tmp_path / "1.json", dead_process())
    assert take(tmp_path).number == 2


def test_reused_process_id_does_not_keep_a_lease_alive(
    tmp_path: Path,
) -> None:
    write_json(tmp_path / "1.json", {**identity(os.getpid()), "ticks": 1})
    assert take(tmp_path).number == 2


def test_living_owner_is_awaited_until_its_output_exists(tmp_path: Path) -> None:
    take(tmp_path)
    waited_for: list[dict[str, Any]] = []
    call_count = 0

    def is_wanted() -> bool:
        nonlocal call_count
        call_count += 1
        return call_count < 3

    assert acquire(tmp_path, waited_for.append, is_wanted) is None
    assert [owner["pid"] for owner in waited_for] == [os.getpid()]


def test_superseded_owner_cannot_commit(
    tmp_path: Path,
) -> None:
    lease = take(tmp_path)
    lease.check()
    assert create_exclusively(tmp_path / "2.json", b"{}")
    with pytest.raises(LeaseLostError):
        lease.check()


def test_orphaned_processes_of_a_dead_owner_are_killed(
    tmp_path: Path,
) -> None:
    orphan = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True
    )
    write_json(tmp_path / "1.json", dead_process())
    write_json(tmp_path / "1.child.json", identity(orphan.pid))
    assert take(tmp_path).number == 2
    assert orphan.wait(timeout=10) == -9


def test_running_owner_is_visible_to_other_processes(
    tmp_path: Path,
) -> None:
    assert running_owner(tmp_path) is None
    lease = take(tmp_path)
    owner = running_owner(tmp_path)
    assert owner is not None
    assert owner["pid"] == os.getpid()
    lease.release()
    assert running_owner(tmp_path) is None


def test_a_lease_names_its_process_group(tmp_path: Path) -> None:
    take(tmp_path).name_child(os.getpid())
    assert is_alive(read_json(tmp_path / "1.child.json"))


OWNER = """
import sys
from pathlib import Path
from gristmill.core.lease import acquire
lease = acquire(Path(sys.argv[1]), print, lambda: True)
print(lease.number, flush=True)
sys.stdin.read()
"""


def in_another_namespace(folder: Path) -> subprocess.Popen[str] | None:
    """Start a lease owner in separate PID and mount namespaces; None if the machine
    does not permit them.
    """
    if shutil.which("unshare") is None:
        return None
    owner = subprocess.Popen(
        [
            "unshare",
            "--pid",
            "--fork",
            "--mount-proc",
            "--kill-child",
            sys.executable,
            "-c",
            OWNER,
            str(folder),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout is not None
    if owner.stdout.readline().strip() == "1":
        return owner
    owner.communicate()
    return None


@pytest.fixture
def owned_elsewhere(tmp_path: Path) -> Iterator[Callable[[], None]]:
    """Give lease 1 of the folder to a living process of another container of this
    machine; returns a function that ends it.
    """
    folder = tmp_path / "lease"
    owner = in_another_namespace(folder)
    if owner is None:  # the record that it would have written
        write_json(
            folder / "1.json",
            {**identity(os.getpid()), "pids": "pid:[1]", "pid": 2**22 + 1, "ticks": 7},
        )
    yield lambda: None if owner is None else owner.kill()
    if owner is not None:
        owner.kill()
        owner.communicate()


def test_living_owner_in_another_container_is_not_considered_dead(
    tmp_path: Path, owned_elsewhere: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its host has our name, and its process number is another process or absent in our
    table.
    """
    folder = tmp_path / "lease"
    owner = read_json(folder / "1.json")
    assert (owner["host"], owner["boot"]) == (identity(1)["host"], identity(1)["boot"])
    waited_for, wanted_answers = list[dict[str, Any]](), iter([True, True, False])
    monkeypatch.setattr(leases, "WAIT_SECONDS", 0.0)
    assert acquire(folder, waited_for.append, lambda: next(wanted_answers)) is None
    assert waited_for == [owner]
    assert running_owner(folder) == owner
    assert not is_gone(owner)
    monkeypatch.setattr(heartbeats, "STALE_SECONDS", 0.0)
    new_lease = acquire(folder, waited_for.append, lambda: True)
    assert new_lease is not None
    assert new_lease.number == 2, (
        "it is judged only by its heartbeat, which it does not send"
    )


def test_remote_owner_with_heartbeats_is_awaited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_json(
        tmp_path / "1.json",
        {**dead_process(), "boot": "of another machine with this one's name"},
    )
    monkeypatch.setattr(leases, "WAIT_SECONDS", 0.0)
    clock = iter(range(0, 10_000, 60))
    monkeypatch.setattr(leases.time, "monotonic", lambda: next(clock))
    beats = iter(range(6))

    def is_wanted() -> bool:
        if (beat := next(beats, None)) is not None:
            write_json(tmp_path / "1.beat.json", {"beats": beat})
        return beat is not None

    assert acquire(tmp_path, lambda owner: None, is_wanted) is None


def test_pause_of_the_observer_does_not_count_as_silence_of_the_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This process was paused or the store was unreachable: then its owner could not
    prove that it lives either.
    """
    file = tmp_path / "1.beat.json"
    write_json(file, {"beats": 1})
    now = [0.0]
    monkeypatch.setattr(heartbeats.time, "monotonic", lambda: now[0])
    watch = heartbeats.BeatWatch()
    for seconds, is_stale in (
        (1, False),
        (80, False),
        (600, False),
        (610, False),
        (680, False),
        (695, False),
    ):
        now[0] = float(seconds)
        assert watch.is_stale(file) == is_stale, seconds
    for seconds in range(700, 790, 10):
        now[0] = float(seconds)
        is_stale = watch.is_stale(file)
    assert is_stale


def test_leases_of_one_process_have_distinct_ids(tmp_path: Path) -> None:
    take(tmp_path).release()
    take(tmp_path).release()
    first, second = (
        json.loads((tmp_path / f"{number}.json").read_text()) for number in (1, 2)
    )
    assert first.pop("id") != second.pop("id")
    assert first == second


def test_owner_and_successor_agree_on_the_commit_in_any_order(
    tmp_path: Path,
) -> None:
    write_json(tmp_path / "paused" / "1.json", dead_process())
    take(tmp_path / "paused")
    with pytest.raises(LeaseLostError, match="not committed"):
        Lease(tmp_path / "paused", 1).commit(b"mine")
    write_json(tmp_path / "killed" / "1.json", dead_process())
    Lease(tmp_path / "killed", 1).commit(b"mine")
    published: list[bytes] = []

    def publish(content: bytes) -> bool:
        published.append(content)
        return True

    assert (
        acquire(tmp_path / "killed", lambda owner: None, lambda: not published, publish)
        is None
    )
    assert published == [b"mine"]

"""One writer at a time: a dead owner is followed at once, a living one is waited for, a paused one cannot commit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gristmill.dataprep.files import create_exclusively, read_json, write_json
from gristmill.flows.lease import Lease, LeaseLostError, acquire, identity, is_alive, running_owner


def take(folder: Path) -> Lease:
    lease = acquire(folder, lambda owner: pytest.fail(f"waited for {owner}"), lambda: True)
    assert lease is not None
    return lease


def dead_process() -> dict[str, Any]:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    seen = identity(child.pid)
    child.kill()
    child.wait()
    return seen


def test_leases_are_numbered_and_a_released_one_is_followed_by_the_next(tmp_path: Path) -> None:
    first = take(tmp_path)
    first.release()
    assert [first.number, take(tmp_path).number] == [1, 2]


def test_a_dead_owners_lease_is_taken_over_at_once(tmp_path: Path) -> None:
    write_json(tmp_path / "1.json", dead_process())
    assert take(tmp_path).number == 2


def test_a_number_that_the_system_gave_to_another_process_does_not_keep_a_lease_alive(tmp_path: Path) -> None:
    write_json(tmp_path / "1.json", {**identity(os.getpid()), "ticks": 1})
    assert take(tmp_path).number == 2


def test_a_living_owner_is_waited_for_until_its_output_is_there(tmp_path: Path) -> None:
    take(tmp_path)
    waited_for: list[dict[str, Any]] = []
    asked = 0

    def wanted() -> bool:
        nonlocal asked
        asked += 1
        return asked < 3

    assert acquire(tmp_path, waited_for.append, wanted) is None
    assert [owner["pid"] for owner in waited_for] == [os.getpid()]


def test_an_owner_that_was_overtaken_learns_it_before_it_commits(tmp_path: Path) -> None:
    lease = take(tmp_path)
    lease.check()
    assert create_exclusively(tmp_path / "2.json", b"{}")
    with pytest.raises(LeaseLostError):
        lease.check()


def test_the_processes_that_a_dead_owner_left_behind_are_ended_first(tmp_path: Path) -> None:
    orphan = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    write_json(tmp_path / "1.json", dead_process())
    write_json(tmp_path / "1.child.json", identity(orphan.pid))
    assert take(tmp_path).number == 2
    assert orphan.wait(timeout=10) == -9


def test_whether_somebody_works_on_an_output_is_seen_from_outside(tmp_path: Path) -> None:
    assert running_owner(tmp_path) is None
    lease = take(tmp_path)
    owner = running_owner(tmp_path)
    assert owner is not None
    assert owner["pid"] == os.getpid()
    lease.release()
    assert running_owner(tmp_path) is None


def test_a_lease_names_its_process_group(tmp_path: Path) -> None:
    lease = take(tmp_path)
    lease.name_child(os.getpid())
    assert is_alive(read_json(tmp_path / "1.child.json"))

"""Several hosts share the tasks of a job: each task runs once, whichever host joins,
dies or fails.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gristmill.core import heartbeats
from gristmill.core.files import create_exclusively, write_json
from gristmill.core.stage_context import Context
from gristmill.dataprep.runners import multi_host
from gristmill.dataprep.runners.multi_host import (
    claim_and_do,
    last_claims,
    offered,
    read_offers,
    take_share,
    taking_part,
)
from gristmill.dataprep.runners.pool import Element, Work
from gristmill.dataprep.runners.tasks import Done, Task, run_tasks
from gristmill.mixtures.schema.engine import BeamEngine

NAMES = [f"{number:02d}" for number in range(24)]


def in_turn(work: Work, elements: Sequence[Element]) -> None:
    for name, payload in elements:
        work(name, payload)


def offer_of(folder: Path, work: Any) -> Any:
    return offered(
        "job", folder, folder / "job", "memory", work, [(name, {}) for name in NAMES]
    )


def test_concurrent_hosts_share_the_tasks(tmp_path: Path) -> None:
    done: list[tuple[str, str]] = []
    barrier = threading.Barrier(2)

    def work(host: str, name: str, payload: Any) -> None:
        is_first = host not in {finisher for finisher, _ in done}
        done.append((host, name))
        if is_first:
            barrier.wait(30)  # until both hosts have started
        write_json(tmp_path / "job" / f"{name}.json", {})

    def run(host: str, work_of: Any, elements: Sequence[Element]) -> None:
        claims = work_of.args[1]
        for name, payload in elements:
            claim_and_do(partial(work, host), claims, host, {}, name, payload)

    with offer_of(tmp_path, in_turn) as offer:
        threads = [
            threading.Thread(
                target=take_share, args=(offer, host, partial(run, host)), daemon=True
            )
            for host in ("a", "b")
        ]
        with taking_part(tmp_path):
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
    assert sorted(name for _, name in done) == NAMES
    assert {host for host, _ in done} == {"a", "b"}
    assert [*read_offers(tmp_path)] == []


def record(folder: str, done: list[str], name: str, payload: Any) -> None:
    done.append(name)
    write_json(Path(folder) / f"{name}.json", {})


def test_tasks_claimed_by_a_dead_host_are_done_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One host left properly, one was killed: its heartbeat no longer changes."""
    monkeypatch.setattr(heartbeats, "STALE_SECONDS", 0.3)
    monkeypatch.setattr(heartbeats, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(multi_host, "LOOK_SECONDS", 0.05)
    done: list[str] = []
    killed = tmp_path / "offers" / "hosts" / "killed.beat"
    killed.parent.mkdir(parents=True)
    killed.write_text("7")
    with (
        taking_part(tmp_path) as host,
        offer_of(tmp_path, partial(record, str(tmp_path / "job"), done)) as offer,
    ):
        for name, owner in (("03", "gone"), ("05", "killed")):
            assert create_exclusively(
                Path(offer.claims) / f"{name}.claim-1", owner.encode()
            )
        take_share(offer, host, in_turn)
        assert last_claims(Path(offer.claims)) == {
            **dict.fromkeys(NAMES, 1),
            "03": 2,
            "05": 2,
        }
    assert sorted(done) == NAMES
    assert done[-1] == "05"  # after the wait for its heartbeat


def test_no_task_starts_after_a_failure_or_without_an_offer(tmp_path: Path) -> None:
    done: list[str] = []
    with offer_of(tmp_path, partial(record, str(tmp_path / "job"), done)) as offer:
        (tmp_path / "job.failure.json").write_text("{}")
        take_share(offer, "a", in_turn)
        (tmp_path / "job.failure.json").unlink()
    take_share(offer, "a", in_turn)
    assert done == []


def test_host_that_looks_during_removal_does_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    with offer_of(tmp_path, partial(record, str(tmp_path / "job"), done)) as offer:

        def remove(folder: Path) -> set[str]:
            (tmp_path / "offers" / "job.offer").unlink(missing_ok=True)
            return set()

        monkeypatch.setattr(multi_host, "file_names", remove)
        take_share(offer, "a", in_turn)
    assert done == []


def square(out: str, task: Task) -> Done:
    path = Path(out) / f"{task.name}.txt"
    path.write_text(str(task.payload["n"] ** 2))
    return Done([path], {"counts": {"kept": 1}})


def test_job_for_several_hosts_completes_on_one(tmp_path: Path) -> None:
    tasks = [Task(name, {"n": int(name)}) for name in NAMES]
    (tmp_path / "out").mkdir()
    alone, together = (
        run_tasks(
            "squares",
            tasks,
            partial(square, str(tmp_path / "out")),
            Context(
                work=tmp_path / name,
                beam=BeamEngine(workers=1, nodes=nodes),
                emit=lambda event: None,
            ),
        )
        for name, nodes in (("alone", 1), ("together", 2))
    )
    assert together == alone
    assert (tmp_path / "out" / "07.txt").read_text() == "49"
    assert len(
        [*(tmp_path / "together" / "offers").glob("squares-*/*.claim-1")]
    ) == len(NAMES)

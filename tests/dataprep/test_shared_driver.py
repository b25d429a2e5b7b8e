"""The stages of a run share one driver while they need it."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import cast

import pytest

from gristmill.dataprep.runners import shared_driver
from gristmill.dataprep.runners.errors import WorkerError
from gristmill.dataprep.runners.shared_driver import Driver, SharedDriver


@dataclass
class Drivers:
    """Drivers that were started; those still running, the cancelled processes, and an
    event at each end.
    """

    started: int = 0
    running: set[int] = field(default_factory=set)
    cancelled: list[int] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    def start(self) -> Driver:
        self.started += 1
        number = self.started
        self.running.add(number)

        def close() -> None:
            self.running.discard(number)
            self.ended.set()

        return cast(
            Driver,
            SimpleNamespace(
                environment={"NUMBER": str(number)},
                is_running=lambda: number in self.running,
                cancel=self.cancelled.append,
                close=close,
            ),
        )


def test_driver_serves_all_stages_and_is_replaced_after_its_death() -> None:
    drivers = Drivers()
    shared = SharedDriver(drivers.start)
    shared.start_soon()
    with shared.used() as first, shared.used() as second:
        assert first == second == {"NUMBER": "1"}
        shared.cancel(17)
    drivers.running.clear()
    shared.cancel(18)
    assert drivers.cancelled == [17]
    with shared.used() as environment:
        assert environment == {"NUMBER": "2"}
    shared.close()
    assert not drivers.running


def test_driver_ends_when_no_stage_has_used_it_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drivers = Drivers()
    shared = SharedDriver(drivers.start)
    monkeypatch.setattr(shared_driver, "IDLE_SECONDS", 0.01)
    with shared.used():
        assert not drivers.ended.wait(0.1)
    assert drivers.ended.wait(10)
    with shared.used() as environment:
        assert environment == {"NUMBER": "2"}
    shared.close()


def fail() -> Driver:
    raise WorkerError("no master")


def test_stage_runs_without_a_driver_that_does_not_start() -> None:
    with SharedDriver(fail).used() as environment:
        assert environment == {}

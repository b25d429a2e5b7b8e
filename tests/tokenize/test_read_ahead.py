"""Reading ahead gives the results, order and errors of reading in place."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from gristmill.tokenize.streaming.read_ahead import ReadAhead


def test_steps_come_in_order_however_long_each_takes() -> None:
    """Every even step waits for the odd step after it."""
    read = [threading.Event() for _ in range(20)]

    def slow(step: int) -> int:
        if step % 2 == 0:
            assert read[step + 1].wait(10)
        read[step].set()
        return step * step

    ahead = ReadAhead(slow, last_step=20, depth=5, threads=3)
    assert [ahead.take(step) for step in range(20)] == [
        step * step for step in range(20)
    ]
    ahead.close()


def test_at_most_depth_steps_are_read_ahead_and_none_after_the_last() -> None:
    started: list[int] = []
    ahead = ReadAhead(
        lambda step: started.append(step) or step, last_step=6, depth=2, threads=1
    )
    assert ahead.take(0) == 0
    ahead.close()
    assert max(started) <= 2
    ahead = ReadAhead(
        lambda step: started.append(step) or step, last_step=6, depth=100, threads=1
    )
    assert [ahead.take(step) for step in range(6)] == list(range(6))
    ahead.close()
    assert max(started) == 5


def test_out_of_order_step_restarts_there() -> None:
    ahead = ReadAhead(lambda step: step, last_step=100, depth=3, threads=2)
    assert [ahead.take(step) for step in (0, 1, 40, 41, 7, 8)] == [0, 1, 40, 41, 7, 8]
    ahead.close()


def test_error_is_raised_when_its_step_is_taken() -> None:
    def read(step: int) -> int:
        if step == 3:
            raise OSError("shard 3 is gone")
        return step

    ahead = ReadAhead(read, last_step=10, depth=8, threads=2)
    assert [ahead.take(step) for step in range(3)] == [0, 1, 2]
    with pytest.raises(OSError, match="shard 3 is gone"):
        ahead.take(3)
    ahead.close()


def test_waiting_time_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    waited_for = threading.Event()
    ahead = ReadAhead(
        lambda step: waited_for.wait(10) and step, last_step=3, depth=3, threads=1
    )
    wait_for = ahead._come.wait_for

    def wait(ready: Callable[[], bool]) -> bool:
        waited_for.set()
        return wait_for(ready)

    monkeypatch.setattr(ahead._come, "wait_for", wait)
    assert ahead.take(0) == 0
    waited = ahead.waited_seconds
    assert waited > 0
    ahead._pool.shutdown(wait=True)  # all three steps were read
    assert [ahead.take(1), ahead.take(2)] == [1, 2]
    assert ahead.waited_seconds == waited
    ahead.close()


def test_stale_results_are_dropped() -> None:
    """Step 1 is still being read when step 40 is taken; its later result comes from a
    second call.
    """
    began, go_on, calls = threading.Event(), threading.Event(), []

    def read(step: int) -> tuple[int, int]:
        calls.append(step)
        if calls.count(1) == 1 and step == 1:
            began.set()
            assert go_on.wait(10)
        return step, calls.count(step)

    ahead = ReadAhead(read, last_step=100, depth=1, threads=1)
    assert ahead.take(0) == (0, 1)
    assert began.wait(10)
    threading.Timer(0.0, go_on.set).start()
    assert [ahead.take(40), ahead.take(1)] == [(40, 1), (1, 2)]
    ahead.close()


def test_without_threads_steps_are_read_in_place() -> None:
    read: list[tuple[int, threading.Thread]] = []
    ahead = ReadAhead(
        lambda step: read.append((step, threading.current_thread())),
        last_step=9,
        depth=3,
        threads=0,
    )
    for step in (0, 1, 7):
        ahead.take(step)
    assert read == [(step, threading.current_thread()) for step in (0, 1, 7)]
    assert ahead.waited_seconds > 0
    ahead.close()

"""Reading ahead: the results, their order and their errors are those of reading in place."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import pytest

from gristmill.tokenize.streaming.ahead import ReadAhead


def test_steps_come_in_their_order_however_long_each_takes() -> None:
    """Every even step waits until the odd one after it was read."""
    read = [threading.Event() for _ in range(20)]

    def slow(step: int) -> int:
        if step % 2 == 0:
            assert read[step + 1].wait(10)
        read[step].set()
        return step * step

    ahead = ReadAhead(slow, last_step=20, depth=5, threads=3)
    assert [ahead.take(step) for step in range(20)] == [step * step for step in range(20)]
    ahead.close()


def test_no_more_than_depth_steps_are_read_ahead_and_none_behind_the_last() -> None:
    started: list[int] = []
    ahead = ReadAhead(lambda step: started.append(step) or step, last_step=6, depth=2, threads=1)
    assert ahead.take(0) == 0
    ahead.close()
    assert max(started) <= 2
    ahead = ReadAhead(lambda step: started.append(step) or step, last_step=6, depth=100, threads=1)
    assert [ahead.take(step) for step in range(6)] == list(range(6))
    ahead.close()
    assert max(started) == 5


def test_a_step_out_of_turn_starts_anew_there() -> None:
    ahead = ReadAhead(lambda step: step, last_step=100, depth=3, threads=2)
    assert [ahead.take(step) for step in (0, 1, 40, 41, 7, 8)] == [0, 1, 40, 41, 7, 8]
    ahead.close()


def test_an_error_is_raised_where_its_step_is_taken() -> None:
    def read(step: int) -> int:
        if step == 3:
            raise OSError("shard 3 is gone")
        return step

    ahead = ReadAhead(read, last_step=10, depth=8, threads=2)
    assert [ahead.take(step) for step in range(3)] == [0, 1, 2]
    with pytest.raises(OSError, match="shard 3 is gone"):
        ahead.take(3)
    ahead.close()


def test_waiting_is_measured_and_what_is_ready_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waited_for, result = threading.Event(), Future.result

    def wait(self: Future[int], timeout: float | None = None) -> int:
        waited_for.set()
        return result(self, timeout)

    monkeypatch.setattr(Future, "result", wait)
    ahead = ReadAhead(lambda step: waited_for.wait(10) and step, last_step=3, depth=3, threads=1)
    assert ahead.take(0) == 0
    waited = ahead.waited_seconds
    assert waited > 0
    while not ahead._ahead[0].done():
        threading.Event().wait(0.001)
    assert ahead.take(1) == 1
    assert ahead.waited_seconds == waited
    ahead.close()

from __future__ import annotations

import gc
import weakref

import pytest

from gristmill.train.loop.loop import COLLECT_EVERY_STEPS, collecting_between_steps


class Circle:
    """Holds itself, so that only the collector frees it."""

    def __init__(self) -> None:
        self.itself = self


def test_garbage_is_collected_after_the_steps_that_are_due_and_at_no_other_time() -> None:
    with collecting_between_steps() as collect:
        assert not gc.isenabled()
        seen = weakref.ref(Circle())
        for step in range(1, COLLECT_EVERY_STEPS):
            collect(step)
        assert seen() is not None
        collect(COLLECT_EVERY_STEPS)
        assert seen() is None
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_a_training_that_fails_leaves_the_collector_as_it_was() -> None:
    with pytest.raises(KeyError), collecting_between_steps():
        raise KeyError
    assert gc.isenabled()
    gc.disable()
    with collecting_between_steps():
        pass
    assert not gc.isenabled()
    gc.enable()

from __future__ import annotations

import gc
import weakref

import pytest

from gristmill.train.trainer import COLLECT_EVERY_STEPS, collecting_between_steps


class Cycle:
    """A reference cycle, which only the collector frees."""

    def __init__(self) -> None:
        self.itself = self


def test_garbage_is_collected_only_at_its_interval() -> None:
    with collecting_between_steps() as collect:
        assert not gc.isenabled()
        cycle = weakref.ref(Cycle())
        for step in range(1, COLLECT_EVERY_STEPS):
            collect(step)
        assert cycle() is not None
        collect(COLLECT_EVERY_STEPS)
        assert cycle() is None
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


@pytest.mark.slow
def test_collector_is_restored_after_a_failure() -> None:
    with pytest.raises(KeyError), collecting_between_steps():
        raise KeyError
    assert gc.isenabled()
    gc.disable()
    with collecting_between_steps():
        pass
    assert not gc.isenabled()
    gc.enable()

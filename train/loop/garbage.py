"""When Python looks for garbage: between steps, on all ranks after the same ones.

Left alone it looks whenever a rank has made enough objects. Others then wait for that rank in a collective, each time
for another one (torchtitan, tools/utils.py; nanochat, base_train.py).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

COLLECT_EVERY_STEPS = 50
"""torchtitan's own default."""


@contextmanager
def collecting_between_steps() -> Iterator[Callable[[int], None]]:
    """Collect garbage only where the yielded function is called with a step that is due; as it was before, afterwards.

    What is there at the start stays out of it, which makes each look short.
    """
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield _collect_where_due
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


def _collect_where_due(step: int) -> None:
    if step % COLLECT_EVERY_STEPS == 0:
        gc.collect()

"""The answers that a step of reinforcement learning learned from, with what each was rewarded with."""

from __future__ import annotations

from typing import Any

from gristmill.flows.provenance.readings import Reading
from gristmill.mixtures.reinforcement import Rl
from gristmill.train.reinforcement.kept import read_batch


def answers_of_step(reading: Reading, step: int, share: int = 0, shares: int = 1) -> list[dict[str, Any]]:
    """The answers to a step's prompts, those to one prompt side by side; none where they are not drawn yet.

    Args:
        reading: of the stage `rl`.
        step: counted from 1.
        share, shares: only those of this process, of so many that share the step's answers.

    Returns:
        what `train/reinforcement/kept.py` keeps of each.
    """
    section = reading.section
    assert isinstance(section, Rl)
    batch, within = divmod(step - 1, section.updates_per_batch)
    found = read_batch([reading.folder.data, reading.folder.work], batch)
    if found is None:
        return []
    first = within % section.steps_per_batch * section.global_batch_size
    return found[first : first + section.global_batch_size][share::shares]

"""The section `engine.stream`: how training reads its rows. Nothing here changes which rows, or what they hold."""

from __future__ import annotations

from gristmill.mixtures.section import Positive, Section


class Stream(Section):
    """Reading ahead of the training."""

    read_ahead_steps: Positive = 32
    """Steps whose rows are read before they are needed, each process its own share of them. They lie in memory: steps
    times rows of a batch on one process times bytes of a row (2 per token)."""

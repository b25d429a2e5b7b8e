"""Held-out rows measured while training: how well, and in the fine-tuning stages how much is being forgotten."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from gristmill.tokenize.packed import PackedSet
from gristmill.train.evaluation.held_out import measure
from gristmill.train.optim.averaging import AveragedWeights
from gristmill.train.parallel.world import World


class Validation:
    """Measures every source's held-out rows after some steps and after the last.

    Every stage measures the same rows in the same way, so that their bits per byte lie on one axis.

    Args:
        every: steps between measurements; nothing is measured where it is None.
        steps: of the whole training.
        packed: what the model was pre-trained on; its held-out rows are measured.
        model: sharded; says by its shape whether tokens see their own document only.
        average: the running mean of its weights, which is measured too.
        token_bytes: (vocab,) bytes per id, on the device.
        world: the processes.
    """

    def __init__(
        self, every: int | None, steps: int, packed: PackedSet, model: nn.Module, average: AveragedWeights | None,
        token_bytes: Tensor, world: World,
    ) -> None:
        self._every, self._last, self._average = every, steps, average
        self._packed, self._model, self._token_bytes, self._world = packed, model, token_bytes, world

    def __call__(self, step: int) -> dict[str, Any] | None:
        """`validation` (source -> metrics) and perhaps `validation_average`, or None after a step without."""
        if self._every is None or (step != self._last and step % self._every):
            return None
        found = {"validation": self._measure()}
        if self._average is not None:
            with self._average.in_place():
                found["validation_average"] = self._measure()
        return found if found["validation"] else None

    def _measure(self) -> dict[str, dict[str, float]]:
        found = {}
        for source in self._packed.manifest["validation"]:
            rows = self._packed.validation(source)
            if len(rows):
                positions = None
                if self._model.shape.document_mask:  # type: ignore[union-attr]
                    positions = self._packed.validation_boundaries(source).positions(rows.shape[1])
                found[source] = measure(self._model, rows, self._token_bytes, self._world, positions)
        return found

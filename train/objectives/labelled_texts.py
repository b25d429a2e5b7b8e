"""Objective of a classifier of texts, on rows of `train/data/labelled_texts.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from gristmill.train.loop.objective import UNTRAINED, Measured, Metrics
from gristmill.train.objectives.sft import AssistantTurns, Turns

COUNTS = 3
"""Sums per class: texts of the class, texts predicted to be, and those that are both."""


class LabelledTexts(AssistantTurns):
    """Cross-entropy of the classes of texts (see objective.Objective).

    Args:
        classes: names, in the order of their numbers.
        arguments: see `AssistantTurns`.
    """

    def __init__(self, classes: Sequence[str], *arguments: Any) -> None:
        super().__init__(*arguments)
        self._classes = classes
        self.sums_length = 1 + COUNTS * len(classes)

    def loss(self, model: nn.Module, batch: Turns, scale: float) -> Measured:
        """See objective.Objective; the sums are the total loss, and `COUNTS` of each
        class.
        """
        batch = batch.to(self._token_bytes.device)
        last = batch.trained.int().argmax(dim=1)
        labels = batch.ids.gather(1, last[:, None]).squeeze(1)
        logits = model(
            batch.ids,
            torch.arange(batch.ids.shape[1], device=last.device) < last[:, None],
        )
        losses = F.cross_entropy(logits, labels, reduction="none")
        is_label, is_predicted = (
            F.one_hot(numbers, len(self._classes)).double()
            for numbers in (labels, logits.argmax(dim=1))
        )
        counts = torch.stack((is_label, is_predicted, is_label * is_predicted), dim=2)
        total = losses.detach().double().sum()
        sums = torch.cat((total[None], counts.sum(dim=0).flatten())) * batch.real
        row_losses = torch.full(batch.ids.shape, UNTRAINED, device=last.device)
        row_losses[batch.trained] = losses.detach()
        return Measured(losses.sum() * (scale * batch.real), sums, row_losses)

    def report(self, sums: Sequence[float], weight: float) -> Metrics:
        """Loss per text, share of the texts predicted correctly, mean F1 of the classes, and F1 of each class; 0
        without a text of the class.
        """
        counts = [
            sums[1 + COUNTS * number : 1 + COUNTS * (number + 1)]
            for number in range(len(self._classes))
        ]
        f1 = {
            name: 2 * both / max(texts + predicted, 1.0)
            for name, (texts, predicted, both) in zip(
                self._classes, counts, strict=True
            )
        }
        return {
            "loss": sums[0] / weight,
            "text_accuracy": sum(both for _, _, both in counts) / weight,
            "mean_f1": sum(f1.values()) / len(f1),
            "f1": f1,
        }

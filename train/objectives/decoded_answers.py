"""Objective of an encoder-decoder: it encodes prompts and decodes their answers."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from gristmill.train.loop.objective import UNTRAINED, Measured
from gristmill.train.models.model_config import TransformersShape
from gristmill.train.objectives.losses import IGNORED, weighted_nll
from gristmill.train.objectives.sft import AssistantTurns, Turns


class DecodedAnswers(AssistantTurns):
    """Cross-entropy over the answers of rows of one example, whose trained tokens follow
    the prompt (see objective.Objective).
    """

    def loss(self, model: nn.Module, batch: Turns, scale: float) -> Measured:
        """See `AssistantTurns.loss`."""
        batch = batch.to(self._token_bytes.device)
        ids, trained = batch.ids, batch.trained
        columns = torch.arange(ids.shape[1], device=ids.device)
        lengths = trained.sum(dim=1, keepdim=True)
        is_answer = columns[: int(lengths.max())] < lengths
        targets = ids.new_full(is_answer.shape, IGNORED)
        targets[is_answer] = ids[trained]
        shape: TransformersShape = model.shape  # type: ignore[assignment]
        start = shape.config.get("decoder_start_token_id")
        if start is None:
            start = self.packed.manifest["tokenizer"]["pad"]
        decoder_ids = targets.roll(1, dims=1).clamp(min=0)
        decoder_ids[:, 0] = start
        counted = is_answer.float() * float(batch.real)
        head = partial(weighted_nll, targets=targets, weights=counted * scale)
        first = trained.int().argmax(dim=1, keepdim=True)
        loss, nll = model(
            ids,
            head,
            positions=torch.where(columns < first, columns, -1),
            decoder_ids=decoder_ids,
        )
        row_losses = torch.full(ids.shape, UNTRAINED, device=ids.device)
        row_losses[trained] = nll[is_answer]
        return Measured(
            loss, self.sums(batch.sources, targets, counted, nll), row_losses
        )

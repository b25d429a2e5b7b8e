"""Scores of held-out documents, and their memory."""

from __future__ import annotations

import tracemalloc
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from gristmill.train.eval.held_out import ROWS_PER_FORWARD, score_documents
from gristmill.train.objectives.losses import IGNORED

LENGTH = 128


class IdAsLoss(torch.nn.Module):
    """A model whose loss of a token is its id, and that predicts even ids correctly."""

    shape = SimpleNamespace(document_mask=False, kind="decoder")

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(
        self, ids: Tensor, head: Any, positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        targets = head.of_tokens["targets"]
        counted = targets != IGNORED
        return torch.where(counted, targets, 0).float(), counted & (targets % 2 == 0)


def held_out_set(rows: np.ndarray, pieces: list[dict[str, Any]]) -> Any:
    schema = {"id": pa.string()} | dict.fromkeys(("row", "start", "length"), pa.int64())
    table = pa.Table.from_pylist(pieces, pa.schema(list(schema.items())))
    return SimpleNamespace(
        sequence_length=rows.shape[1],
        validation=lambda source: rows,
        validation_pieces=lambda source: table,
        validation_boundaries=lambda source: SimpleNamespace(
            filled=lambda: np.full(len(rows), rows.shape[1])
        ),
    )


def test_every_document_has_the_sums_of_its_tokens_without_first_ones_of_rows() -> None:
    ids = np.array([[9, 3, 4, 8], [7, 2, 6, 5]], dtype=np.uint16)
    token_bytes = torch.arange(10, dtype=torch.float32) * 10
    # Document b begins in the first row and ends in the second one.
    pieces = [
        {"id": "a", "row": 0, "start": 0, "length": 2},
        {"id": "b", "row": 0, "start": 2, "length": 2},
        {"id": "b", "row": 1, "start": 0, "length": 2},
        {"id": "c", "row": 1, "start": 2, "length": 2},
    ]
    model: Any = IdAsLoss()
    scored = score_documents(model, held_out_set(ids, pieces), "web", token_bytes)
    assert scored.tolist() == [[3, 1, 30, 0], [14, 3, 140, 3], [11, 2, 110, 1]]
    by_row = score_documents(model, held_out_set(ids, []), "web", token_bytes)
    assert by_row.tolist() == [[15, 3, 150, 2], [13, 3, 130, 2]]


def test_scores_take_64_bytes_per_token() -> None:
    """Four numbers of 8 bytes per token, and their cumulative sums."""
    rows = np.zeros((40 * ROWS_PER_FORWARD, LENGTH), dtype=np.uint16)
    pieces = [
        {"id": str(row), "row": row, "start": 0, "length": LENGTH}
        for row in range(len(rows))
    ]
    model: Any = IdAsLoss()
    packed = held_out_set(rows, pieces)
    tracemalloc.start()
    try:
        score_documents(model, packed, "web", torch.ones(2))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak / rows.size < 72

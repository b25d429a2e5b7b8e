"""The parts of a training alone: the loop over a stream of rows, optimizers and
schedules by name, packing.
"""

from __future__ import annotations

from gristmill.tokenize.packing.pack_documents import PackedDocuments, pack
from gristmill.train.data.row_stream import RowStream, stream
from gristmill.train.optim.optimizer import optimizers_by_name
from gristmill.train.optim.schedules import schedule
from gristmill.train.stream_loop import next_token_losses, train_loop

__all__ = [
    "PackedDocuments",
    "RowStream",
    "next_token_losses",
    "optimizers_by_name",
    "pack",
    "schedule",
    "stream",
    "train_loop",
]

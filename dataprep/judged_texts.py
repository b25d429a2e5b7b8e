"""The texts of a shard that a stage judges, apart from those that cannot be read, and their way back into a table.

For stages that look at all documents together: every job of such a stage reads the same texts in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from gristmill.dataprep.counts import Counts
from gristmill.dataprep.documents import annotate, judged_rows, kept_rows, read_documents
from gristmill.dataprep.measuring import measure_texts
from gristmill.dataprep.text_buffers import text_buffers


@dataclass(frozen=True)
class JudgedTexts:
    """What a stage judges of one shard.

    Attributes:
        documents: the shard with `id`, `source`, `locator` and `text`.
        rows: int64, rows that earlier stages kept.
        judged: int64, those of them that this stage judges.
        errors: per judged row, why its text cannot be read, or None.
        good: int64, the judged rows whose text can be read, ascending.
        texts: their texts, one `large_string` array.
    """

    documents: pa.Table
    rows: np.ndarray
    judged: np.ndarray
    errors: Sequence[str | None]
    good: np.ndarray
    texts: pa.Array

    def ids(self) -> tuple[np.ndarray, np.ndarray]:
        """The ids of the readable texts as two uint64 each, which sort as the bytes do."""
        ids = self.documents["id"].take(pa.array(self.good)).combine_chunks()
        halves = np.frombuffer(b"".join(ids.to_pylist()), ">u8").astype(np.uint64).reshape(-1, 2)
        return halves[:, 0].copy(), halves[:, 1].copy()

    def spread(self, values: pa.Array) -> pa.Array:
        """One value per readable text as one per judged row, null where the text cannot be read."""
        readable = np.array([error is None for error in self.errors], bool)
        return values.take(pa.array(np.cumsum(readable) - 1, mask=~readable))

    def annotate(
        self, reasons: Sequence[str | None], measures: Mapping[str, pa.Array]
    ) -> tuple[pa.Table, Counts]:
        """The annotation table and its counts; `reasons` and `measures` have one value per readable text."""
        columns = {name: self.spread(values) for name, values in measures.items()}
        spread_reasons = self.spread(pa.array(reasons, pa.string()))
        return annotate(self.documents, self.rows, self.judged, spread_reasons, columns, self.errors)


def read_judged(inputs: Mapping[str, Path], shard: str, sources: Sequence[str] | None) -> JudgedTexts:
    """Read the texts of a shard that were kept so far and belong to the sources (all where None)."""
    documents = read_documents(inputs, shard, ["id", "source", "locator", "text"])
    rows = kept_rows(inputs, shard)
    judged = judged_rows(documents, rows, sources)
    column = documents["text"].take(pa.array(judged))
    _, errors = measure_texts(column, _check_encoding)
    readable = np.array([error is None for error in errors], bool)
    texts = column.filter(pa.array(readable)).combine_chunks().cast(pa.large_string())
    return JudgedTexts(documents, rows, judged, errors, judged[readable], texts)


def _check_encoding(texts: pa.Array) -> dict[str, np.ndarray]:
    """Raise where a text is not UTF-8, which all kernels rely on."""
    text_buffers(texts)
    return {}

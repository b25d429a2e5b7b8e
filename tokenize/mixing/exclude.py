"""Documents excluded from training: every row that holds any of them is emptied, and
every other row stays.

The mixture is laid out as if nothing were excluded, so each row keeps its number and
its tokens; the rows are emptied afterwards. A training that has read none of them
resumes exactly where it was (see `shuffle.OrderWithout`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.core.files import as_path
from gristmill.dataprep.documents import ID_BYTES
from gristmill.tokenize.mixing.quotas import MixError
from gristmill.tokenize.packed_files import ShardEntry


def read_excluded(path: str) -> tuple[bytes, ...]:
    """Read a list of ids: 32 hexadecimal digits per line, sorted and unique; blank
    lines and `#` lines are skipped.

    Raises:
        MixError: a line that is not an id.
    """
    documents = set()
    lines = as_path(path).read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        try:
            document = bytes.fromhex(text)
        except ValueError:
            document = b""
        if len(document) != ID_BYTES:
            raise MixError(
                f"mix.exclude: {path}:{number}: {text!r} is not a document id "
                f"({2 * ID_BYTES} hexadecimal "
                "digits); `gristmill takedown` makes such a list from addresses too"
            )
        documents.add(document)
    return tuple(sorted(documents))


class EmptiedRows:
    """Shard whose rows with an excluded document are emptied.

    Args:
        pieces: PIECES_SCHEMA, of the whole shard.
        first: number of the shard's first row.
        excluded: document ids.
        pad: the padding id.

    Attributes:
        rows: the emptied ones (int64, ascending).
        pieces: those of the other rows.
        touched: ids of all documents in the emptied rows, hexadecimal.
    """

    def __init__(
        self, pieces: pa.Table, first: int, excluded: Sequence[bytes], pad: int
    ) -> None:
        self.rows, self.pieces, self.touched = split_rows(pieces, excluded)
        self._first = first
        self._pad = pad
        self._whole = hashlib.sha256()

    def blocks(self, blocks: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
        """Blocks of the shard's tokens, (n, L) each, with the emptied rows filled with
        padding.
        """
        first = self._first
        for block in blocks:
            if len(self.rows):
                self._whole.update(np.ascontiguousarray(block).data.cast("B"))
                begin, end = np.searchsorted(self.rows, (first, first + len(block)))
                block[self.rows[begin:end] - first] = self._pad
                first += len(block)
            yield block

    def describe(self, entry: ShardEntry) -> ShardEntry:
        """Entry of the shard with the emptied rows, once all blocks are written."""
        if len(self.rows):
            entry["withheld"] = self.rows.tolist()
            entry["whole_sha256"] = self._whole.hexdigest()
        return entry


def drop_rows(
    tokens: np.ndarray, pieces: pa.Table, excluded: Sequence[bytes]
) -> tuple[np.ndarray, pa.Table, list[str]]:
    """Drop the held-out rows that hold an excluded document, and renumber the others.

    Returns:
        the remaining tokens and pieces, and the ids (hexadecimal) of all documents in
        the dropped rows.
    """
    rows, kept_pieces, touched = split_rows(pieces, excluded)
    numbers = kept_pieces["row"].to_numpy()
    renumbered = pa.array(numbers - np.searchsorted(rows, numbers))
    place = pieces.schema.get_field_index("row")
    return (
        np.delete(tokens, rows, axis=0) if len(rows) else tokens,
        kept_pieces.set_column(place, "row", renumbered),
        touched,
    )


def split_rows(
    pieces: pa.Table, documents: Sequence[bytes]
) -> tuple[np.ndarray, pa.Table, list[str]]:
    """Rows (int64, ascending) that hold any of the documents, the pieces outside of
    them, and the ids (hexadecimal) of all documents in them.
    """
    ids = pa.array(list(documents), pa.binary(ID_BYTES))
    hits = pieces.filter(pc.is_in(pieces["id"], value_set=ids))
    rows = np.unique(hits["row"].to_numpy())
    if not len(rows):
        return rows, pieces, []
    hit = pc.is_in(pieces["row"], value_set=pa.array(rows, pa.int64()))
    touched = set(pieces.filter(hit)["id"].to_pylist())
    return rows, pieces.filter(pc.invert(hit)), sorted(map(bytes.hex, touched))

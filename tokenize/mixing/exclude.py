"""Documents that must not be trained on: the rows that hold any of them are emptied, and every other row stays.

The mixture is laid out as if nothing were excluded, so that each row keeps its number and its tokens; only then are the
rows emptied. So a training that has read none of them resumes exactly where it was (see `order.OrderWithout`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.dataprep.documents import ID_BYTES
from gristmill.dataprep.files import as_path
from gristmill.tokenize.mixing.quotas import MixError


def read_excluded(path: str) -> tuple[bytes, ...]:
    """The ids in a list: 32 hexadecimal digits a line, sorted and each once; blank lines and `#` lines are passed over.

    Raises:
        MixError: a line that is not an id.
    """
    found = set()
    for number, line in enumerate(as_path(path).read_text(encoding="utf-8").splitlines(), start=1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        try:
            document = bytes.fromhex(text)
        except ValueError:
            document = b""
        if len(document) != ID_BYTES:
            raise MixError(
                f"mix.exclude: {path}:{number}: {text!r} is not a document id ({2 * ID_BYTES} hexadecimal "
                "digits); `gristmill takedown` makes such a list from addresses too"
            )
        found.add(document)
    return tuple(sorted(found))


class EmptiedRows:
    """A shard of which the rows that hold an excluded document are emptied.

    Args:
        pieces: PIECES_SCHEMA, of the whole shard.
        first: number of the shard's first row.
        excluded: document ids.
        pad: the padding id.
        excluded_later: document ids whose rows are emptied from some row on, and that row.

    Attributes:
        pieces: those that are left.
    """

    def __init__(
        self,
        pieces: pa.Table,
        first: int,
        excluded: Sequence[bytes],
        pad: int,
        excluded_later: Sequence[tuple[Sequence[bytes], int]] = (),
    ) -> None:
        self._rows, hit = rows_with(pieces, excluded)
        for ids, later in excluded_later:
            behind, _ = rows_with(pieces.filter(pc.greater_equal(pieces["row"], later)), ids)
            self._rows = np.union1d(self._rows, behind)
            hit = pc.is_in(pieces["row"], value_set=pa.array(self._rows, pa.int64()))
        self.pieces = pieces.filter(pc.invert(hit)) if len(self._rows) else pieces
        self._ids = _ids_of(pieces.filter(hit)) if len(self._rows) else {}
        self._first, self._pad, self._whole = first, pad, hashlib.sha256()

    def blocks(self, blocks: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
        """The blocks of the shard's tokens, each a number of rows (n, L), with these rows filled with padding."""
        first = self._first
        for block in blocks:
            if len(self._rows):
                self._whole.update(np.ascontiguousarray(block).data.cast("B"))
                here = slice(*np.searchsorted(self._rows, (first, first + len(block))).tolist())
                block[self._rows[here] - first] = self._pad
                first += len(block)
            yield block

    def entry(self) -> dict[str, Any]:
        """What packed.json must know, when all blocks are written; nothing where the shard is as it was.

        Returns:
            `withheld` (rows), `whole_sha256` (of the tokens before), `touched` (ids of all documents in these rows).
        """
        if not len(self._rows):
            return {}
        return {"withheld": self._rows.tolist(), "whole_sha256": self._whole.hexdigest(), **self._ids}


def drop_rows(tokens: np.ndarray, pieces: pa.Table, excluded: Sequence[bytes]) -> tuple[np.ndarray, pa.Table]:
    """Held-out rows without those that hold an excluded document; the others are renumbered."""
    rows, hit = rows_with(pieces, excluded)
    if not len(rows):
        return tokens, pieces
    left = pieces.filter(pc.invert(hit))
    numbers = left["row"].to_numpy()
    renumbered = pa.array(numbers - np.searchsorted(rows, numbers))
    return np.delete(tokens, rows, axis=0), left.set_column(left.schema.get_field_index("row"), "row", renumbered)


def documents_beside(pieces: pa.Table, excluded: Sequence[bytes]) -> dict[str, Any]:
    """`touched`, as `EmptiedRows.entry` gives it; nothing where no row holds an excluded document."""
    rows, hit = rows_with(pieces, excluded)
    return _ids_of(pieces.filter(hit)) if len(rows) else {}


def rows_with(pieces: pa.Table, documents: Sequence[bytes]) -> tuple[np.ndarray, Any]:
    """The rows (int64, ascending) that hold any of some documents, and which pieces lie in them (a boolean column)."""
    rows = np.unique(pieces.filter(among(pieces["id"], documents))["row"].to_numpy())
    return rows, pc.is_in(pieces["row"], value_set=pa.array(rows, pa.int64()))


def among(ids: pa.Array | pa.ChunkedArray, documents: Collection[bytes]) -> Any:
    """Which ids (a boolean column) are among some documents."""
    return pc.is_in(ids, value_set=pa.array(list(documents), pa.binary(ID_BYTES)))


def _ids_of(pieces: pa.Table) -> dict[str, Any]:
    return {"touched": sorted({one.hex() for one in pieces["id"].to_pylist()})}

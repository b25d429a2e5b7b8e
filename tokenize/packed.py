"""Reader of packed sets: rows, boundaries and origins of their documents.

`packed_files.py` defines the files.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.core.files import as_path, canonical_json, read_json
from gristmill.core.object_stores import Warn
from gristmill.dataprep.documents import ID_BYTES, read_table
from gristmill.dataprep.row_groups import read_matching
from gristmill.mixtures.schema.engine import Stream
from gristmill.tokenize.packed_files import (
    DTYPES,
    LEDGER_SCHEMA,
    MANIFEST,
    PIECES_SCHEMA,
    READABLE_FORMATS,
    Boundaries,
    PackedManifest,
    PackedSetError,
    ShardEntry,
    boundaries_name,
    by_shard,
    gather_boundaries,
    ids_name,
    ledger_name,
    pieces_name,
    read_boundaries,
)
from gristmill.tokenize.packed_rows import Shards
from gristmill.tokenize.shuffle import Order, OrderWithout, sources_of_rows


@dataclass(frozen=True)
class OpenShard:
    """Opened shard with its boundaries and pieces.

    Attributes:
        name: of its file.
        tokens: (rows, L) in the set's dtype, memory-mapped if local.
        boundaries: of its rows' document pieces.
        pieces: reads its table of pieces (PIECES_SCHEMA).
    """

    name: str
    tokens: np.ndarray
    boundaries: Boundaries
    pieces: Callable[[], pa.Table]


@dataclass(frozen=True)
class PackedPhase:
    """Phase of a packed set.

    Attributes:
        begin: its first position in the training order.
        shares: share of its rows of each source that has any.
    """

    begin: int
    shares: dict[str, float]


class PackedSet(Shards):
    """A committed packed set, read by row.

    Shards on a local disk are memory-mapped. Of shards in an object store single rows
    are read, and with `stream` whole shards are kept on the local disk (see
    `streaming/remote_rows.py`).

    Args:
        folder: of the set.
        stream: how rows are read from an object store, and the size of the cache;
            without it only rows, checksums and boundaries are fetched.
        warn: called when a store fails.

    Attributes:
        manifest: packed.json.
        dtype: of the files, little-endian.
        sequence_length: tokens per row, L.
        sources: names, in the order of the source numbers.
        rows: training rows, R.
        rows_per_source: training rows of each source.
        shards: of the training rows.
        withheld: int64, the rows that are empty, because a document that they held was
            excluded (`mix.exclude`).
        phases: the same for every phase of a set with phases, in order; one phase
            otherwise.

    Raises:
        PackedSetError: the folder holds no packed set that this version reads.
    """

    def __init__(
        self,
        folder: str | Path,
        stream: Stream | None = None,
        warn: Warn = warnings.warn,
    ) -> None:
        root = as_path(folder)
        path = root / MANIFEST
        if not path.exists():
            raise PackedSetError(
                f"{folder}: no {MANIFEST} there, so it is not a packed set"
            )
        manifest: PackedManifest = read_json(path)
        if manifest.get("format") not in READABLE_FORMATS:
            raise PackedSetError(
                f"{path}: format {manifest.get('format')!r}, but this version reads "
                f"formats {', '.join(map(str, READABLE_FORMATS))}; run the mix stage "
                "again"
            )
        train = manifest["train"]
        super().__init__(
            root,
            train["shards"],
            manifest["sequence_length"],
            DTYPES[manifest["dtype"]],
            stream,
            warn,
        )
        self.manifest = manifest
        self.sources = manifest["sources"]
        self.rows = train["rows"]
        self.rows_per_source = train["rows_per_source"]
        self.phases = train.get("stages") or [self.rows_per_source]
        self.withheld = np.array(
            [row for shard in self.shards for row in shard.get("withheld", ())],
            np.int64,
        )
        self._bounds: dict[str, Boundaries] = {}

    def __getstate__(self) -> dict[str, object]:
        return {**super().__getstate__(), "_bounds": {}}

    @property
    def fingerprint(self) -> str:
        """32 hexadecimal digits of its training rows: the checksums of their tokens,
        their shape and the tokenizer.

        Two sets with the same fingerprint have the same tokens in every row that is not
        withheld: a withheld row counts with its original tokens.
        """
        content = {
            "dtype": self.manifest["dtype"],
            "sequence_length": self.sequence_length,
            "tokenizer": self.manifest["tokenizer"].get("sha256"),
            "rows_per_source": self.rows_per_source,
            "shards": [
                [shard["rows"], shard.get("whole_sha256", shard["sha256"])]
                for shard in self.shards
            ],
        }
        return hashlib.blake2b(canonical_json(content), digest_size=16).hexdigest()

    def order(self, seed: int) -> Order:
        """Order in which training with this seed reads the rows; a set with phases is
        read once, phase after phase.

        Withheld rows are skipped; the order of all others is unchanged.
        """
        order = Order.of_phases(self.phases, seed)
        return OrderWithout(order, self.withheld) if len(self.withheld) else order

    def phase_ends(self) -> list[int]:
        """Positions at which the phases end; the end of the set for a single phase."""
        return self._positions_of(np.cumsum([sum(rows) for rows in self.phases]))

    def described_phases(self) -> list[PackedPhase]:
        """Position and shares of each phase; empty for a single phase."""
        if len(self.phases) == 1:
            return []
        totals = [sum(rows) for rows in self.phases]
        begins = self._positions_of(np.cumsum([0, *totals[:-1]]))
        return [
            PackedPhase(
                begin,
                {
                    name: number / total
                    for name, number in zip(self.sources, rows, strict=True)
                    if number
                },
            )
            for begin, total, rows in zip(begins, totals, self.phases, strict=True)
        ]

    def _positions_of(self, rows: np.ndarray) -> list[int]:
        """Number of positions before each phase border, given as row numbers."""
        return [row - int((self.withheld < row).sum()) for row in rows.tolist()]

    def read(self, rows: np.ndarray) -> np.ndarray:
        """Tokens of training rows, in the requested order.

        Args:
            rows: int64 of shape (n,), in [0, R).

        Returns:
            int64 of shape (n, L).
        """
        return self.tokens(rows).astype(np.int64)

    def source_of(self, rows: np.ndarray) -> np.ndarray:
        """Source numbers (int64, shape (n,)) of training rows."""
        return sources_of_rows(self.phases, self.checked(rows))

    def boundaries(self, rows: np.ndarray) -> Boundaries:
        """Boundaries of the document pieces of training rows (int64, shape (n,)), in
        the requested order.
        """
        readers = [partial(self._boundaries_of, entry) for entry in self.shards]
        return gather_boundaries(readers, self.ends, self.checked(rows))

    def positions(self, rows: np.ndarray) -> np.ndarray:
        """Position of each token within its document piece (int32, shape (n, L));
        `packed_files.PADDING` for padding.

        A 0 begins a piece: positions mask attention between documents, restart rotary
        positions and exclude padding from the loss.
        """
        return self.boundaries(rows).positions(self.sequence_length)

    def validation(self, source: str) -> np.ndarray:
        """All held-out rows of a source: (n, L) in the files' dtype; n may be 0.

        Raises:
            PackedSetError: no such source.
        """
        return self.load(self._held_out(source))

    def pieces(self, rows: np.ndarray) -> pa.Table:
        """Document pieces of training rows (PIECES_SCHEMA), ordered by row and start;
        reads only their shards.
        """
        rows = self.checked(rows)
        tables = [
            pieces_of_rows(self.folder, self.shards[shard]["file"], rows[places])
            for shard, _, places in by_shard(rows, self.ends)
        ]
        return pa.concat_tables([PIECES_SCHEMA.empty_table(), *tables])

    def rows_of_documents(self, documents: Collection[bytes]) -> pa.Table:
        """Pieces of documents in the training rows (PIECES_SCHEMA), of all copies, by
        row.
        """
        tables = [
            pieces_of_documents(self.folder, shard["file"], documents)
            for shard in self.shards
        ]
        return pa.concat_tables([PIECES_SCHEMA.empty_table(), *tables])

    def validation_rows_of_documents(
        self, source: str, documents: Collection[bytes]
    ) -> pa.Table:
        """Pieces of documents in a source's held-out rows (PIECES_SCHEMA)."""
        return pieces_of_documents(
            self.folder, self._held_out(source)["file"], documents
        )

    def validation_pieces(self, source: str) -> pa.Table:
        """Document pieces of a source's held-out rows (PIECES_SCHEMA; rows count from
        0).
        """
        return all_pieces(self.folder, self._held_out(source)["file"])

    def validation_boundaries(self, source: str) -> Boundaries:
        """Boundaries of the document pieces of a source's held-out rows."""
        return self._boundaries_of(self._held_out(source))

    def shards_of(self, rows: np.ndarray) -> list[str]:
        """Files that hold the training rows, in order."""
        shards = by_shard(self.checked(rows), self.ends)
        return [self.shards[shard]["file"] for shard, _, _ in shards]

    def ledger(self, documents: Collection[bytes]) -> pa.Table:
        """Ledger entries of documents (LEDGER_SCHEMA), by id; documents that were never
        tokenised are absent.
        """
        ids: dict[str, list[bytes]] = {}
        count = self.manifest.get("ledgers", 1)
        for document in sorted(documents):
            leading = int.from_bytes(document[:8]) * count >> 64
            ids.setdefault(ledger_name(leading, count), []).append(document)
        tables = [
            read_matching(self.folder / name, "id", of_table)
            for name, of_table in ids.items()
        ]
        return pa.concat_tables(tables) if tables else LEDGER_SCHEMA.empty_table()

    @property
    def has_ledger(self) -> bool:
        """Return whether the set has a ledger of its documents: it was mixed, or it
        holds examples.
        """
        return (self.folder / ledger_name(0, self.manifest.get("ledgers", 1))).exists()

    def open_training(self, compare: bool = True) -> list[OpenShard]:
        """Open the shards of the training rows, in order.

        Args:
            compare: first check local tokens against their checksums, which reads all
                of them.
        """
        return [self._open_shard(shard, compare) for shard in self.shards]

    def open_validation(self) -> list[OpenShard]:
        """Open the shards of the held-out rows, source by source."""
        return [
            self._open_shard(entry)
            for source in self.sources
            if (entry := self.manifest["validation"].get(source)) and entry["rows"]
        ]

    def _held_out(self, source: str) -> ShardEntry:
        entries = self.manifest["validation"]
        if source not in entries:
            raise PackedSetError(
                f"{self.folder}: no held-out rows of {source!r} (sources: "
                f"{', '.join(entries) or 'none'})"
            )
        return entries[source]

    def _open_shard(self, entry: ShardEntry, compare: bool = True) -> OpenShard:
        return OpenShard(
            entry["file"],
            self.load(entry, compare),
            self._boundaries_of(entry),
            partial(all_pieces, self.folder, entry["file"]),
        )

    def _boundaries_of(self, entry: ShardEntry) -> Boundaries:
        file = entry["file"]
        if file not in self._bounds:
            name = boundaries_name(file)
            path = self.here(name, entry["beside"][name])
            self._bounds[file] = read_boundaries(path, entry["rows"])
        return self._bounds[file]


def all_pieces(folder: Path, file: str) -> pa.Table:
    """Document pieces (PIECES_SCHEMA) of a shard, ordered by row and start."""
    return read_table(folder / pieces_name(file)).cast(PIECES_SCHEMA)


def pieces_of_rows(folder: Path, file: str, rows: np.ndarray) -> pa.Table:
    """Document pieces (PIECES_SCHEMA) of rows (int64) of a shard; reads only the row
    groups with these rows.
    """
    return read_matching(folder / pieces_name(file), "row", rows.tolist()).cast(
        PIECES_SCHEMA
    )


def pieces_of_documents(
    folder: Path, file: str, documents: Collection[bytes]
) -> pa.Table:
    """Pieces (PIECES_SCHEMA) of documents in a shard, located by the index beside
    it.
    """
    matching_rows = read_matching(
        folder / ids_name(file), "id", list(documents), ["row"]
    )["row"]
    pieces = pieces_of_rows(folder, file, np.unique(matching_rows.to_numpy()))
    return pieces.filter(
        pc.is_in(pieces["id"], value_set=pa.array(list(documents), pa.binary(ID_BYTES)))
    )

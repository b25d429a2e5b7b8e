"""The packed set: rows of tokens on disk, and who they came from.

    packed.json                 what is in the set (below)
    train-00000.bin             rows of `sequence_length` tokens, raw little-endian uint16 (uint32: large vocabularies)
    train-00000.docs.parquet    one row per document piece of that shard: row (of the whole set), start, length, id,
                                source, copy, offset (within the document); an end-of-text counts to its document
    train-00000.ids.parquet     the rows of each document in that shard, by id, so that it is found without a search
    train-00000.sums            XXH64 of each row, so that one row can be checked (`streaming/checksums.py`)
    train-00000.cu              where the pieces of each row begin and end, for hot loops (`boundaries.py`)
    val-<source>-00000.bin, .docs.parquet, .ids.parquet, .cu    held-out documents of one source; rows count from 0
    documents.parquet           every tokenised document by id: where it is, and why no row has it (`mixing/ledger.py`)

A training row holds text of one source only, and row r belongs to the source at place r of the merged order
(`order.unrank`), so the first n rows of the files are the mixture too. The rows of a staged set lie stage after stage,
each in the merged order of its own: `train.stages` of packed.json has the rows of each source for every stage.
"""

from __future__ import annotations

import hashlib
import threading
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.dataprep.documents import ID_BYTES, read_table, write_table
from gristmill.dataprep.files import as_path, atomic_write, canonical_json, is_local, read_json, sha256_file, write_json
from gristmill.dataprep.row_groups import read_matching
from gristmill.mixtures.streaming import Stream
from gristmill.tokenize.boundaries import Boundaries, boundaries_of, join, read_boundaries, to_bytes
from gristmill.tokenize.gather import by_shard, gather_mapped
from gristmill.tokenize.mixing.draws import id_words, ordered_by, word_ids
from gristmill.tokenize.order import Order, sources_of_rows
from gristmill.tokenize.streaming.buffers import Buffers
from gristmill.tokenize.streaming.checksums import row_checksums, sums_name
from gristmill.tokenize.withheld import OrderWithout

if TYPE_CHECKING:
    from gristmill.tokenize.streaming.remote import RemoteRows

FORMAT = 1
STAGED_FORMAT = 2
"""Of a staged set: a reader that knows no stages would take its rows for another mixture's."""
READABLE_FORMATS = (FORMAT, STAGED_FORMAT)
MANIFEST = "packed.json"
INDEX_GROUP_ROWS = 16_384
"""Larger than those of the other tables: an index is read for a few rows of it, and its groups are looked through."""
LARGEST_UINT16_VOCAB = 65_536
DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
PIECES_SCHEMA = pa.schema([
    ("row", pa.int64()), ("start", pa.int32()), ("length", pa.int32()), ("id", pa.binary(ID_BYTES)),
    ("source", pa.int32()), ("copy", pa.int32()), ("offset", pa.int64()),
])
LEDGER = "documents.parquet"
LEDGER_SCHEMA = pa.schema([
    ("id", pa.binary(ID_BYTES)), ("shard", pa.int32()), ("row", pa.int64()), ("source", pa.int32()),
    ("held_out", pa.bool_()), ("reason", pa.dictionary(pa.int8(), pa.string())),
])
"""`shard` and `row` say where ingest's document is, `shard` counting its sorted files; `source` is the number in
packed.json; `reason` is why no row holds it (`mixing.candidates.unused`), null where one does."""


class PackedSetError(RuntimeError):
    """A packed set is missing, incomplete, damaged, or was asked for what it does not hold."""


def dtype_name(vocab_size: int) -> str:
    """The smallest of uint16 and uint32 that holds every id of a vocabulary."""
    return "uint16" if vocab_size <= LARGEST_UINT16_VOCAB else "uint32"


def train_name(shard: int) -> str:
    """File name of a training shard."""
    return f"train-{shard:05d}.bin"


def validation_name(source: str) -> str:
    """File name of a source's held-out rows; a slash or a blank in the name of the source is percent-encoded."""
    return f"val-{quote(source, safe='')}-00000.bin"


def pieces_name(file: str) -> str:
    """File name of the table of document pieces beside a shard."""
    return f"{file.removesuffix('.bin')}.docs.parquet"


def boundaries_name(file: str) -> str:
    """File name of the boundaries of document pieces beside a shard."""
    return f"{file.removesuffix('.bin')}.cu"


def ids_name(file: str) -> str:
    """File name of the index by document beside a shard."""
    return f"{file.removesuffix('.bin')}.ids.parquet"


def files_of(path: Path) -> list[Path]:
    """A shard's `.bin` file and what lies beside it."""
    return [path, *(path.with_name(name(path.name)) for name in (pieces_name, boundaries_name, ids_name, sums_name))]


def write_rows(path: Path, tokens: np.ndarray, pieces: pa.Table, first: int = 0) -> dict[str, Any]:
    """Write a shard, its table of pieces, their boundaries and index by document, and a checksum of every row.

    Args:
        path: the `.bin` file.
        tokens: (rows, sequence_length) in the set's dtype.
        pieces: PIECES_SCHEMA, ordered by row and start; a row without any counts as one piece.
        first: number of the shard's first row.

    Returns:
        its entry in packed.json: file, rows, sha256, and the sha256 of the files beside it.
    """
    pieces = pieces.cast(PIECES_SCHEMA)
    _, table, boundaries, index, sums = files_of(path)
    write_table(table, pieces, repeating=("source", "copy"))
    write_table(index, index_of(pieces), INDEX_GROUP_ROWS, repeating=())
    columns = {name: pieces[name].to_numpy() for name in ("row", "start", "length")}
    with atomic_write(boundaries) as sink:
        sink.write(to_bytes(boundaries_of(columns, first, *tokens.shape)))
    with atomic_write(sums) as sink:
        sink.write(row_checksums(tokens).data.cast("B") if len(tokens) else b"")
    content = np.ascontiguousarray(tokens).data.cast("B") if tokens.size else b""
    with atomic_write(path) as sink:
        sink.write(content)
    # Of what is in memory: reading it again would take as long as mixing it does.
    return {"file": path.name, "rows": len(tokens), "sha256": hashlib.sha256(content).hexdigest(),
            "beside": {beside.name: sha256_file(beside) for beside in (table, boundaries, index, sums)}}


def index_of(pieces: pa.Table) -> pa.Table:
    """Each document's rows (`id`, `row`, once each), ordered by id, from a table of pieces."""
    words, row = id_words(pieces["id"]), pieces["row"].to_numpy()
    order = ordered_by(words[:, 0], words[:, 1], row)
    found = np.column_stack([words[order], row[order].astype(np.uint64)])
    new = np.concatenate([[True], (found[1:] != found[:-1]).any(axis=1)])[: len(found)]
    return pa.table([word_ids(words[order[new]]), row[order[new]]], ["id", "row"])


def write_packed_set(
    folder: Path,
    rows: np.ndarray,
    rows_per_source: Mapping[str, int],
    tokenizer: Mapping[str, Any],
    validation: Mapping[str, np.ndarray] | None = None,
) -> None:
    """Write a whole packed set from memory, one shard, with no document pieces.

    Args:
        folder: where to.
        rows: (R, L) tokens; row r is of the source at place r of the merged order.
        rows_per_source: source -> rows, R together.
        tokenizer: vocab_size, eos, pad, sha256.
        validation: source -> (n, L) tokens.

    Raises:
        PackedSetError: the counts do not sum to R, or a token is outside the vocabulary.
    """
    name = dtype_name(tokenizer["vocab_size"])
    checked = {source: np.asarray(part) for source, part in (validation or {}).items()}
    if sum(rows_per_source.values()) != len(rows):
        raise PackedSetError(f"{folder}: {len(rows)} rows, but {dict(rows_per_source)} per source")
    for part in (rows, *checked.values()):
        if part.size and not 0 <= part.min() <= part.max() < tokenizer["vocab_size"]:
            raise PackedSetError(f"{folder}: tokens {part.min()} to {part.max()} in a vocabulary of "
                                 f"{tokenizer['vocab_size']}")
    none = PIECES_SCHEMA.empty_table()
    shard = write_rows(folder / train_name(0), np.asarray(rows).astype(DTYPES[name]), none)
    held_out = {source: write_rows(folder / validation_name(source), part.astype(DTYPES[name]), none)
                for source, part in checked.items()}
    write_json(folder / MANIFEST, {
        "format": FORMAT, "dtype": name, "sequence_length": rows.shape[1], "sources": list(rows_per_source),
        "tokenizer": dict(tokenizer), "validation": held_out,
        "train": {"rows": len(rows), "rows_per_source": list(rows_per_source.values()), "shards": [shard]},
    })


@dataclass(frozen=True)
class OpenShard:
    """A shard with what lies beside it.

    Attributes:
        name: of its file.
        tokens: (rows, L) in the set's dtype, memory-mapped where it is local.
        boundaries: of its rows' document pieces.
        pieces: reads its table of pieces (PIECES_SCHEMA).
    """

    name: str
    tokens: np.ndarray
    boundaries: Boundaries
    pieces: Callable[[], pa.Table]


class PackedSet:
    """A committed packed set, read by row.

    Shards on a local disk are memory-mapped. Of shards in an object store single rows are read, and where `stream` is
    given, whole shards are kept on the local disk (see streaming.remote).

    Args:
        folder: of the set.
        stream: how rows are read from an object store, and the size of the cache; without it nothing but rows,
            checksums and boundaries is fetched.
        warn: told when a store fails.

    Attributes:
        manifest: packed.json.
        dtype: of the files, little-endian.
        sequence_length: tokens per row, L.
        sources: names, in the order of the source numbers.
        rows: training rows, R.
        rows_per_source: training rows of each source.
        withheld: int64, the rows that are empty, because a document that they held was excluded (`mix.exclude`).
        stages: the same for every stage of a staged set, in order; one stage otherwise.

    Raises:
        PackedSetError: the folder holds no packed set that this version reads.
    """

    def __init__(
        self, folder: str | Path, stream: Stream | None = None, warn: Callable[[str], None] = warnings.warn
    ) -> None:
        self.folder = as_path(folder)
        self._stream, self._warn = stream, warn
        self._remote: RemoteRows | None = None
        self._lock = threading.Lock()
        if not (self.folder / MANIFEST).exists():
            raise PackedSetError(f"{self.folder}: no {MANIFEST} there, so it is not a packed set")
        self.manifest: dict[str, Any] = read_json(self.folder / MANIFEST)
        if self.manifest.get("format") not in READABLE_FORMATS:
            raise PackedSetError(f"{self.folder / MANIFEST}: format {self.manifest.get('format')!r}, but this version "
                                 f"reads formats {', '.join(map(str, READABLE_FORMATS))}; run the mix stage again")
        train = self.manifest["train"]
        self.dtype = DTYPES[self.manifest["dtype"]]
        self.sequence_length: int = self.manifest["sequence_length"]
        self.sources: list[str] = self.manifest["sources"]
        self.rows: int = train["rows"]
        self.rows_per_source: list[int] = train["rows_per_source"]
        self.stages: list[list[int]] = train.get("stages") or [self.rows_per_source]
        self._shards: list[dict[str, Any]] = train["shards"]
        self._ends = np.cumsum([shard["rows"] for shard in self._shards], dtype=np.int64)
        self.withheld = np.array([row for shard in self._shards for row in shard.get("withheld", ())], dtype=np.int64)
        self._open: dict[str, np.ndarray] = {}
        self._buffers = Buffers()
        self._addresses = np.zeros(len(self._shards), dtype=np.uint64)
        self._local = is_local(self.folder)
        self._bounds: dict[str, Boundaries] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}, "_bounds": {}, "_remote": None, "_lock": None,
                "_addresses": np.zeros_like(self._addresses)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    @property
    def fingerprint(self) -> str:
        """32 hexadecimal digits of what its training rows hold: their tokens' checksums, shape and tokenizer.

        Two sets with the same fingerprint have the same tokens in every row that is not withheld: a withheld row counts
        with what it held before.
        """
        content = {
            "dtype": self.manifest["dtype"], "sequence_length": self.sequence_length,
            "tokenizer": self.manifest["tokenizer"].get("sha256"), "rows_per_source": self.rows_per_source,
            "shards": [[shard["rows"], shard.get("whole_sha256", shard["sha256"])] for shard in self._shards],
        }
        return hashlib.blake2b(canonical_json(content), digest_size=16).hexdigest()

    def order(self, seed: int) -> Order:
        """The order in which training with this seed reads the rows; a staged set is read stage after stage, once.

        Withheld rows are left out of it, and all others follow one another as they would with them.
        """
        order = Order.of_stages(self.stages, seed)
        return OrderWithout(order, self.withheld) if len(self.withheld) else order

    def check_reads(self, positions: int) -> None:
        """See that so many positions of the order can be read: a staged set has one epoch only.

        Raises:
            PackedSetError: it has fewer.
        """
        left = self.rows - len(self.withheld)
        if len(self.stages) > 1 and positions > left:
            raise PackedSetError(f"{self.folder}: {positions} rows would be read, but the staged set has {left}, "
                                 "and is read once; train for fewer steps, or mix more tokens (mix.tokens)")

    def read(self, rows: np.ndarray) -> np.ndarray:
        """Tokens of training rows, in the order asked for.

        Args:
            rows: int64 of shape (n,), in [0, R).

        Returns:
            int64 of shape (n, L).
        """
        return self.tokens(rows).astype(np.int64)

    def tokens(self, rows: np.ndarray) -> np.ndarray:
        """The same as `read`, in the files' dtype; their memory is used again once nothing refers to it."""
        rows = self._checked(rows)
        tokens = self._buffers.array((len(rows), self.sequence_length), self.dtype)
        if not self._local:
            self._elsewhere().fill(list(by_shard(rows, self._ends)), tokens)
            return tokens
        while (closed := gather_mapped(
                self._addresses, self._ends, rows, tokens.view(np.uint8))) >= 0:
            # `_open` keeps it where it is.
            self._addresses[closed] = self._load(self._shards[closed]).ctypes.data
        return tokens

    def close(self) -> None:
        """Ask an object store for nothing more, and let the cache's files go; a local set has nothing to close."""
        if self._remote is not None:
            self._remote.close()

    def source_of(self, rows: np.ndarray) -> np.ndarray:
        """Source numbers (int64, shape (n,)) of training rows."""
        return sources_of_rows(self.stages, self._locate(rows)[0])

    def boundaries(self, rows: np.ndarray) -> Boundaries:
        """Where the document pieces of training rows (int64, shape (n,)) begin and end, in the order asked for."""
        rows, shards = self._locate(rows)
        if not len(rows):
            return join([])
        used = np.unique(shards).tolist()
        parts = [self._boundaries_of(self._shards[shard], self._first(shard)).of(
            rows[shards == shard] - self._first(shard)) for shard in used]
        back = np.empty(len(rows), dtype=np.int64)
        back[np.concatenate([np.flatnonzero(shards == shard) for shard in used])] = np.arange(len(rows))
        return parts[0] if len(parts) == 1 else join(parts).of(back)

    def positions(self, rows: np.ndarray) -> np.ndarray:
        """Each token's number within its document piece (int32, shape (n, L)), boundaries.PADDING where it has none.

        A 0 begins a piece: this is what masks attention between documents, restarts rotary positions and takes
        padding out of the loss.
        """
        return self.boundaries(rows).positions(self.sequence_length)

    def validation(self, source: str) -> np.ndarray:
        """All held-out rows of a source: (n, L) in the files' dtype; n may be 0.

        Raises:
            PackedSetError: no such source.
        """
        return self._load(self._held_out(source))

    def pieces(self, rows: np.ndarray) -> pa.Table:
        """The document pieces of training rows (PIECES_SCHEMA), ordered by row and start; reads only their shards."""
        rows, shards = self._locate(rows)
        return pa.concat_tables([PIECES_SCHEMA.empty_table(), *(
            self._pieces_of_rows(self._shards[shard], rows[shards == shard]) for shard in np.unique(shards).tolist())])

    def rows_of_documents(self, documents: Collection[bytes]) -> pa.Table:
        """Where documents were put: their pieces in the training rows (PIECES_SCHEMA), of all copies, by row."""
        return pa.concat_tables([PIECES_SCHEMA.empty_table(),
                                 *(self._pieces_of_documents(shard, documents) for shard in self._shards)])

    def rows_of_document(self, document: bytes) -> pa.Table:
        """Where a document was put: its pieces in the training rows (PIECES_SCHEMA), of all copies."""
        return self.rows_of_documents([document])

    def validation_rows_of_documents(self, source: str, documents: Collection[bytes]) -> pa.Table:
        """Where documents are held out: their pieces in a source's held-out rows (PIECES_SCHEMA)."""
        return self._pieces_of_documents(self._held_out(source), documents)

    def validation_pieces(self, source: str) -> pa.Table:
        """The document pieces of a source's held-out rows (PIECES_SCHEMA; rows count from 0)."""
        return self._read_pieces(self._held_out(source))

    def validation_boundaries(self, source: str) -> Boundaries:
        """Where the document pieces of a source's held-out rows begin and end."""
        return self._boundaries_of(self._held_out(source), 0)

    def shards_of(self, rows: np.ndarray) -> list[str]:
        """The files that hold some training rows, in their order."""
        return [self._shards[shard]["file"] for shard in np.unique(self._locate(rows)[1]).tolist()]

    def ledger(self, documents: Collection[bytes]) -> pa.Table:
        """What is known of documents (LEDGER_SCHEMA), by id; those that were never tokenised are not there."""
        return read_matching(self.folder / LEDGER, "id", list(documents))

    def open_training(self) -> list[OpenShard]:
        """The shards of the training rows, one after another."""
        return [self._open_shard(shard, self._first(number)) for number, shard in enumerate(self._shards)]

    def open_validation(self) -> list[OpenShard]:
        """The shards of the held-out rows, source by source."""
        return [self._open_shard(entry, 0) for source in self.sources
                if (entry := self.manifest["validation"].get(source)) and entry["rows"]]

    def verify(self, deep: bool = False) -> None:
        """Check that all files are there with their sizes, and with `deep` their checksums.

        Raises:
            PackedSetError: names the file that differs.
        """
        for entry in (*self._shards, *self.manifest["validation"].values()):
            self._check_size(entry)
            if deep:
                self._check_content({entry["file"]: entry["sha256"], **entry.get("beside", {})})

    def _elsewhere(self) -> RemoteRows:
        """The reader of shards that lie in an object store."""
        from gristmill.tokenize.streaming.remote import RemoteRows

        with self._lock:
            if self._remote is None:
                missing = [entry["file"] for entry in self._shards if sums_name(entry["file"]) not in entry["beside"]]
                if missing:
                    raise PackedSetError(f"{self.folder}: {_list(missing)} have no checksums of their rows, so they "
                                         "can't be read from a store; run the mix stage again, or copy the set to "
                                         "a local disk")
                self._remote = RemoteRows(self.folder, self._shards, self.sequence_length, self.dtype,
                                          self._stream or Stream(), self._warn)
                if self._stream is not None:
                    self._remote.keep_shards()
            return self._remote

    def _here(self, name: str, sha256: str) -> Path:
        """The path of a file of the set on a local disk, where it is fetched to if it lies in a store."""
        return self.folder / name if is_local(self.folder) else self._elsewhere().file(name, sha256)

    def _locate(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rows = self._checked(rows)
        return rows, np.searchsorted(self._ends, rows, side="right")

    def _checked(self, rows: np.ndarray) -> np.ndarray:
        rows = np.asarray(rows, dtype=np.int64).reshape(-1)
        if rows.size and (rows.min() < 0 or rows.max() >= self.rows):
            raise PackedSetError(f"{self.folder}: rows are in [0, {self.rows}), not {rows.min()} to {rows.max()}")
        return rows

    def _first(self, shard: int) -> int:
        return int(self._ends[shard]) - int(self._shards[shard]["rows"])

    def _held_out(self, source: str) -> dict[str, Any]:
        entries: Mapping[str, dict[str, Any]] = self.manifest["validation"]
        if source not in entries:
            raise PackedSetError(f"{self.folder}: no held-out rows of {source!r} (sources: {_list(list(entries))})")
        return entries[source]

    def _open_shard(self, entry: Mapping[str, Any], first: int) -> OpenShard:
        return OpenShard(entry["file"], self._load(entry), self._boundaries_of(entry, first),
                         partial(self._read_pieces, entry))

    def _read_pieces(self, entry: Mapping[str, Any]) -> pa.Table:
        return read_table(self.folder / pieces_name(entry["file"])).cast(PIECES_SCHEMA)

    def _pieces_of_rows(self, entry: Mapping[str, Any], rows: np.ndarray) -> pa.Table:
        return read_matching(self.folder / pieces_name(entry["file"]), "row", rows.tolist()).cast(PIECES_SCHEMA)

    def _pieces_of_documents(self, entry: Mapping[str, Any], documents: Collection[bytes]) -> pa.Table:
        found = read_matching(self.folder / ids_name(entry["file"]), "id", list(documents), ["row"])["row"]
        pieces = self._pieces_of_rows(entry, np.unique(found.to_numpy()))
        return pieces.filter(pc.is_in(pieces["id"], value_set=pa.array(list(documents), pa.binary(ID_BYTES))))

    def _boundaries_of(self, entry: Mapping[str, Any], first: int) -> Boundaries:
        name = entry["file"]
        if name not in self._bounds:
            path = self.folder / boundaries_name(name)
            if path.name in entry.get("beside", {}):
                self._bounds[name] = read_boundaries(self._here(path.name, entry["beside"][path.name]), entry["rows"])
            else:  # a set from before there were such files
                pieces = self._read_pieces(entry)
                columns = {column: pieces[column].to_numpy() for column in ("row", "start", "length")}
                self._bounds[name] = boundaries_of(columns, first, entry["rows"], self.sequence_length)
        return self._bounds[name]

    def _check_content(self, checksums: Mapping[str, str]) -> None:
        for name, expected in checksums.items():
            if (found := sha256_file(self.folder / name)) != expected:
                raise PackedSetError(f"{self.folder / name}: SHA-256 is {found}, but {MANIFEST} says {expected}; the "
                                     "file is damaged: run the mix stage again")

    def _check_size(self, entry: Mapping[str, Any]) -> None:
        path, expected = self.folder / entry["file"], entry["rows"] * self.sequence_length * self.dtype.itemsize
        found = path.stat().st_size if path.exists() else None
        if found != expected:
            state = "is missing" if found is None else f"has {found} bytes"
            raise PackedSetError(f"{path}: {state}, but {entry['rows']} rows take {expected}; run the mix stage again")

    def _load(self, entry: Mapping[str, Any]) -> np.ndarray:
        name = entry["file"]
        if name not in self._open:
            if is_local(self.folder):
                self._check_size(entry)
            path = self._here(name, entry["sha256"])
            opened = read_tokens(path, self.dtype).reshape(-1, self.sequence_length)
            # Of threads that open it at once the first one's stays: its address may be in use already.
            self._open.setdefault(name, opened)
        return self._open[name]


def read_tokens(path: Path, dtype: np.dtype) -> np.ndarray:
    """A file of raw tokens as a flat read-only array: memory-mapped where it is local, else read whole."""
    if not is_local(path):
        return np.frombuffer(path.read_bytes(), dtype=dtype)
    if not path.stat().st_size:
        return np.empty(0, dtype=dtype)
    return np.asarray(np.memmap(path, dtype=dtype, mode="r"))


def _list(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"

"""The index of a deduplicated corpus: what a later run needs to drop its own duplicates of it, and to name them.

A folder `index` in the stage's output: `index.json` (what the keys were made with, and the name) and one Parquet file
per document shard with a row per document that was kept: `id`, `locator`, `length` (code points), `digest`
(BLAKE2b-128 of the text), `url` (the same of the normalised URL, zeros where there is none), `bands` (the MinHash band
keys, 8 bytes each) and `shingles` (their 32-bit hashes, ascending, stored as differences). With the shingles, a
candidate is verified by its true Jaccard similarity to the old document, whose text is not needed.

A run against an index reads it once, at the speed of Parquet, and sorts its keys with the new ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gristmill.dataprep.document_numbers import Numbering
from gristmill.dataprep.documents import ID_BYTES, ROW_GROUP_ROWS, read_table
from gristmill.dataprep.duplicates.sketches import (
    binary_numbers,
    read_sketches,
    sketch_batch,
    unpack_sketches,
)
from gristmill.dataprep.files import as_path, atomic_write, canonical_json, read_json, write_json
from gristmill.dataprep.jobs.engine import Task, partition_tasks
from gristmill.dataprep.jobs.shuffled import Shuffled
from gristmill.mixtures.steps.dedup import Dedup

FOLDER, HEADER = "index", "index.json"
VERSION = 1
"""Raised when the files change."""
SHINGLES = 1
"""Raised when `shingles.py` or `minhash.py` hash the same words to other numbers."""
URLS = 1
"""Raised when `urls.normalise_url` spells the same URL otherwise."""
MINHASH_FIELDS = ("ngram", "bands", "rows", "seed", "shingles")


class IndexMismatchError(ValueError):
    """A folder holds no index, or one that cannot be compared with this run."""


@dataclass(frozen=True)
class Index:
    """An index that a run is held against.

    Attributes:
        path: its folder.
        name: 16 hexadecimal digits that follow from what it was made with and from the ids in it.
        documents: how many it holds.
        files: its Parquet files, in order.
    """

    path: Path
    name: str
    documents: int
    files: Sequence[Path]


def parameters(section: Dedup) -> dict[str, Any]:
    """What two indexes must have in common to be compared; None for what the section switches off."""
    minhash = section.minhash
    fields = {field: getattr(minhash, field, None) for field in MINHASH_FIELDS[:-1]}
    return {
        "version": VERSION,
        "digest": "blake2b-128",
        "url": URLS if section.url else None,
        **fields,
        "shingles": SHINGLES if minhash else None,
    }


def open_index(location: str, section: Dedup) -> Index:
    """Find the index in an output of the stage, and check that this run can be compared with it.

    Args:
        location: the output's folder in a store, a copy of it or of its data, or the index itself.

    Raises:
        IndexMismatchError: there is no finished index, or it was made with something else; the field is named.
    """
    root = as_path(location)
    places = [root, root / FOLDER, root / "data" / FOLDER]
    path = next((place for place in places if (place / HEADER).exists()), None)
    if path is None:
        raise IndexMismatchError(
            f"dedup.against: {location} holds no finished index (no {FOLDER}/{HEADER}); name the output folder of a "
            "stage `dedup` that ran to its end with `index: true`"
        )
    header = read_json(path / HEADER)
    wanted, found = parameters(section), header["parameters"]
    for field in wanted:
        if wanted[field] is not None and found.get(field) != wanted[field]:
            raise IndexMismatchError(
                f"dedup.against: the index {path} was made with {field} {found.get(field)}, this run has "
                f"{wanted[field]}; use the same, or make the index again"
            )
    return Index(path, header["name"], header["documents"], sorted(path.glob("part-*.parquet")))


def write_index_shard(work: Path, shard: str, kept: np.ndarray, out: Path) -> tuple[list[Path], int]:
    """Write the index of one shard: of its sketches, those of the documents that were kept.

    Args:
        kept: int64, their row numbers, ascending.

    Returns:
        the files, and the sum of the ids, by which the index is named.
    """
    batch = read_sketches(work, shard)
    rows = np.searchsorted(batch["row"].to_numpy(), kept)
    table = pa.Table.from_batches([batch]).drop_columns(["row"]).take(pa.array(rows))
    path = out / FOLDER / shard
    with atomic_write(path) as sink:
        pq.write_table(
            table,
            sink,
            compression="zstd",
            row_group_size=ROW_GROUP_ROWS,
            use_dictionary=False,
            write_page_checksum=True,
            column_encoding={"shingles.list.element": "DELTA_BINARY_PACKED"},
        )
    return [path], sum_of_ids(table["id"])


def write_header(out: Path, section: Dedup, documents: int, id_sums: Iterable[int]) -> str:
    """Finish an index and return its name."""
    made_with = parameters(section)
    total = sum(id_sums) % 2**128
    content = canonical_json({"parameters": made_with, "documents": documents, "ids": f"{total:032x}"})
    name = hashlib.blake2b(content, digest_size=8).hexdigest()
    write_json(out / FOLDER / HEADER, {"name": name, "documents": documents, "parameters": made_with})
    return name


def import_shard(path: Path, section: Dedup) -> pa.RecordBatch:
    """The documents of an index file as sketches, `row` numbers included."""
    table = read_table(path)
    dropped = [] if section.minhash is not None else ["bands"]
    table = table.drop_columns([name for name in dropped if name in table.column_names])
    columns = {name: table[name].combine_chunks() for name in ("id", "locator", "length")}
    return sketch_batch({"row": pa.array(np.arange(len(table))), **columns}, unpack_sketches(table))


def sum_of_ids(ids: pa.ChunkedArray) -> int:
    """The ids as whole numbers, added up modulo 2^128: the same in every order."""
    numbers = np.ascontiguousarray(binary_numbers(ids)).view(np.uint32)
    words: Sequence[int] = numbers.sum(axis=0, dtype=np.uint64).tolist()
    return sum(word << 32 * place for place, word in enumerate(words)) % 2**128


@dataclass(frozen=True)
class DedupPlan:
    """What the tasks of the stage have in common."""

    inputs: Mapping[str, Path]
    """Merged (see `measuring.merge_annotations`)."""
    measured: Mapping[str, Path]
    """The inputs with every annotating stage."""
    section: Dedup
    indexes: Sequence[Index]
    numbering: Numbering
    num_partitions: int
    work: Path
    out: Path
    sends_sketches: bool = False
    """Whether sketches travel to where documents are compared, as they must where a file lies in a store and each
    reading is a request; else they are looked up in the files that the shards have left."""

    def index_of(self, documents: np.ndarray) -> np.ndarray:
        """Which of `indexes` holds each of some older documents: int64, positions."""
        sizes = [len(index.files) for index in self.indexes]
        owners = np.repeat(np.arange(len(sizes)), sizes)
        places: np.ndarray = owners[self.numbering.shards_of(documents) - self.numbering.num_new_shards]
        return places

    def partitions(self) -> list[Task]:
        """One task per partition of the keys, and of the pairs."""
        return partition_tasks(self.num_partitions)


MATCH_SCHEMA = pa.schema(
    [
        ("document", pa.int64()),
        ("match_id", pa.binary(ID_BYTES)),
        ("match_locator", pa.string()),
        ("match_index", pa.string()),
        ("match_kind", pa.int64()),
        ("match_jaccard", pa.float64()),
    ]
)


def spread_to_copies(matches: np.ndarray, jaccard: np.ndarray, copies: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Give the near matches of a document to the others of its text, which were not compared themselves.

    Args:
        matches: int64 of shape (m, 2), rows (new document, older one).
        jaccard: float64 of shape (m,), their similarities.
        copies: int64 of shape (n, 2), rows (new document, another of the same text).

    Returns:
        the matches of the copies, and their similarities; of each document's matches only the most similar.
    """
    documents, place = np.unique(matches[:, 0], return_inverse=True)
    highest = np.zeros(len(documents))
    np.maximum.at(highest, place, jaccard)
    top = np.flatnonzero(jaccard == highest[place])
    top = top[np.argsort(matches[top, 0], kind="stable")]
    begin, end = (np.searchsorted(matches[top, 0], copies[:, 0], side=side) for side in ("left", "right"))
    number = end - begin
    within = np.arange(number.sum()) - np.repeat(np.cumsum(number) - number, number)
    rows = top[np.repeat(begin, number) + within]
    return np.stack([np.repeat(copies[:, 1], number), matches[rows, 1]], axis=1), jaccard[rows]


def best_matches(plan: DedupPlan, shard: int, matches: Shuffled) -> pa.Table:
    """Of every document of a shard that matches older ones, the best match.

    An equal text comes before an equal URL, and that before a similar text; then the highest similarity, the index
    that is named first in `against`, and the smallest id decide.

    Args:
        matches: by shard.

    Returns:
        one row of MATCH_SCHEMA per document, ascending: the older document's id, locator and index (its name), the
        kind of likeness (position in `links.REASONS`) and the Jaccard similarity.
    """
    if not plan.indexes or matches.is_nothing:
        return MATCH_SCHEMA.empty_table()
    found = matches.read(shard)
    if not len(found):
        return MATCH_SCHEMA.empty_table()
    older, one, place = np.unique(found["right"].to_numpy(), return_index=True, return_inverse=True)
    named = found.select(["id", "locator"]).take(pa.array(one))
    rank = np.empty(len(older), np.int64)
    rank[pc.sort_indices(named["id"]).to_numpy()] = np.arange(len(older))
    index = plan.index_of(older)
    documents, kind, jaccard = (found[name].to_numpy() for name in ("left", "kind", "jaccard"))
    order = np.lexsort((rank[place], index[place], -jaccard, kind, documents))
    best = order[np.unique(documents[order], return_index=True)[1]]
    indexes = pa.array(np.array([index.name for index in plan.indexes])[index[place[best]]])
    take = pa.array(place[best])
    return pa.table(
        [documents[best], named["id"].take(take), named["locator"].take(take), indexes, kind[best], jaccard[best]],
        schema=MATCH_SCHEMA,
    )

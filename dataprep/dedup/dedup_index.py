"""Index of a deduplicated corpus, by which a later run drops and names its own
duplicates of that corpus.

A folder `index` in the stage's output: `index.json` (parameters of the keys, and the
name) and one Parquet file per document shard with a row per kept document: `id`,
`locator`, `length` (code points), `digest` (BLAKE2b-128 of the text), `url` (the same
of the normalised URL, zeros without a URL), `bands` (the MinHash band keys, 8 bytes
each) and `shingles` (their 32-bit hashes, ascending, stored as differences). The
shingles give a candidate's true Jaccard similarity to the older document without its
text.

A run against an index reads it once, at the speed of Parquet, and sorts its keys
together with the new ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gristmill.core.arrays import binary_numbers
from gristmill.core.files import (
    as_path,
    atomic_write,
    canonical_json,
    read_json,
    write_json,
)
from gristmill.dataprep.dedup.sketches import read_sketches
from gristmill.dataprep.document_numbers import Numbering
from gristmill.dataprep.documents import (
    ID_BYTES,
    ROW_GROUP_ROWS,
    Inputs,
    read_table,
    shard_names,
)
from gristmill.dataprep.runners.shuffle import Shuffled
from gristmill.dataprep.runners.tasks import PartitionTask, partition_tasks
from gristmill.dataprep.shuffle_format import group_starts, ranges
from gristmill.mixtures.steps.dedup import Dedup

FOLDER, HEADER = "index", "index.json"
VERSION = 1
"""Version of the files; raise it when they change."""
SHINGLES = 1
"""Version of the hashes; raise it when `shingles.py` or `minhash.py` hash the same
words to other numbers.
"""
URLS = 1
"""Version of normalised URLs; raise it when `urls.normalise_url` changes the spelling
of a URL.
"""
MINHASH_FIELDS = ("ngram", "bands", "rows", "seed", "shingles")


class IndexMismatchError(ValueError):
    """Error of a folder without an index, or with an index that cannot be compared with
    this run.
    """


@dataclass(frozen=True)
class Index:
    """Index of an older corpus that a run is compared with.

    Attributes:
        name: 16 hexadecimal digits that follow from its parameters and its ids.
        documents: number of documents in it.
        files: its Parquet files, in order.
    """

    name: str
    documents: int
    files: Sequence[Path]


def parameters(section: Dedup) -> dict[str, str | int | None]:
    """Parameters that two comparable indexes share; None for a feature that the section
    switches off.
    """
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
    """Find the index in an output of the stage, and check that it can be compared with
    this run.

    Args:
        location: folder of the output in a store, a copy of it or of its data, or the
            index itself.

    Raises:
        IndexMismatchError: there is no finished index, or it was made with another
            parameter; the field is named.
    """
    root = as_path(location)
    candidates = [root, root / FOLDER, root / "data" / FOLDER]
    path = next((place for place in candidates if (place / HEADER).exists()), None)
    if path is None:
        raise IndexMismatchError(
            f"dedup.against: {location} holds no finished index (no "
            f"{FOLDER}/{HEADER}); name the output folder of a "
            "stage `dedup` that ran to its end with `index: true`"
        )
    header = read_json(path / HEADER)
    required = parameters(section)
    recorded = header["parameters"]
    for field in required:
        if required[field] is not None and recorded.get(field) != required[field]:
            raise IndexMismatchError(
                f"dedup.against: the index {path} was made with {field} "
                f"{recorded.get(field)}, this run has "
                f"{required[field]}; use the same, or make the index again"
            )
    files = [path / name for name in shard_names(path)]
    return Index(header["name"], header["documents"], files)


def write_index_shard(
    work: Path, shard: str, kept: np.ndarray, out: Path
) -> tuple[list[Path], int]:
    """Write the index of one shard: the sketches of its kept documents.

    Args:
        kept: int64, row numbers of the kept documents, ascending.

    Returns:
        the files, and the sum of the ids as integers modulo 2^128, independent of their
        order, which the name of the index depends on.
    """
    sketches = read_sketches(work, shard)
    rows = np.searchsorted(sketches["row"].to_numpy(), kept)
    table = sketches.drop_columns(["row"]).take(rows)
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
    numbers = np.ascontiguousarray(binary_numbers(table["id"])).view(np.uint32)
    words: Sequence[int] = numbers.sum(axis=0, dtype=np.uint64).tolist()
    return [path], sum(word << 32 * place for place, word in enumerate(words)) % 2**128


def write_header(
    out: Path, section: Dedup, documents: int, id_sums: Iterable[int]
) -> str:
    """Finish an index and return its name."""
    index_parameters = parameters(section)
    total = sum(id_sums) % 2**128
    content = canonical_json(
        {"parameters": index_parameters, "documents": documents, "ids": f"{total:032x}"}
    )
    name = hashlib.blake2b(content, digest_size=8).hexdigest()
    write_json(
        out / FOLDER / HEADER,
        {"name": name, "documents": documents, "parameters": index_parameters},
    )
    return name


def import_shard(path: Path, section: Dedup) -> pa.Table:
    """Read an index file as sketches with `row` numbers."""
    table = read_table(path)
    if section.minhash is None and "bands" in table.column_names:
        table = table.drop_columns(["bands"])
    return table.combine_chunks().add_column(0, "row", pa.array(np.arange(len(table))))


@dataclass(frozen=True)
class DedupPlan:
    """Settings shared by all tasks of the stage."""

    inputs: Inputs
    """Inputs with merged annotations (see `annotate_batches.merge_annotations`)."""
    measured: Inputs
    """Inputs with every annotating stage."""
    section: Dedup
    indexes: Sequence[Index]
    numbering: Numbering
    num_partitions: int
    work: Path
    out: Path
    sends_sketches: bool = False
    """Send sketches to the tasks that compare documents. It is required if files lie in
    a store, where each read is a request; otherwise sketches are read from the shards'
    files.
    """

    def index_of(self, documents: np.ndarray) -> np.ndarray:
        """Positions (int64) in `indexes` of the indexes that hold some older
        documents.
        """
        sizes = [len(index.files) for index in self.indexes]
        index_of_file = np.repeat(np.arange(len(sizes)), sizes)
        return index_of_file[
            self.numbering.shards_of(documents) - self.numbering.num_new_shards
        ]

    def partitions(self) -> list[PartitionTask]:
        """Tasks for the partitions of the keys, and of the pairs."""
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


def spread_to_copies(
    matches: np.ndarray, jaccard: np.ndarray, copies: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Copy the near matches of a document to other documents of equal text, which were
    not compared themselves.

    Args:
        matches: int64 of shape (m, 2), rows (new document, older document).
        jaccard: float64 of shape (m,), similarities of the matches.
        copies: int64 of shape (n, 2), rows (new document, another new document of the
            same text).

    Returns:
        the matches of the copies, and their similarities; only the most similar matches
        of each document are copied.
    """
    documents, place = np.unique(matches[:, 0], return_inverse=True)
    highest = np.zeros(len(documents))
    np.maximum.at(highest, place, jaccard)
    top = np.flatnonzero(jaccard == highest[place])
    top = top[np.argsort(matches[top, 0], kind="stable")]
    begin, end = (
        np.searchsorted(matches[top, 0], copies[:, 0], side=side)
        for side in ("left", "right")
    )
    rows = top[ranges(begin, end)]
    new = np.repeat(copies[:, 1], end - begin)
    return np.stack([new, matches[rows, 1]], axis=1), jaccard[rows]


def best_matches(plan: DedupPlan, shard: int, matches: Shuffled) -> pa.Table:
    """Best match of every document of a shard that matches older documents.

    Equal text ranks before equal URL, and equal URL before similar text. Ties are
    broken by the highest similarity, the first index in `against`, and the smallest id.

    Args:
        matches: by shard.

    Returns:
        one row of MATCH_SCHEMA per document, ascending: id, locator and index name of
        the older document, kind of the match (position in `candidate_pairs.REASONS`)
        and Jaccard similarity.
    """
    # without an index, each shard would open the files of all partitions for nothing
    if not plan.indexes or matches.is_nothing:
        return MATCH_SCHEMA.empty_table()
    matches_here = matches.read(shard)
    if not len(matches_here):
        return MATCH_SCHEMA.empty_table()
    index = plan.index_of(matches_here["right"].to_numpy())
    ranked = matches_here.append_column("index", pa.array(index)).sort_by(
        [
            ("left", "ascending"),
            ("kind", "ascending"),
            ("jaccard", "descending"),
            ("index", "ascending"),
            ("id", "ascending"),
        ]
    )
    best = ranked.take(group_starts(ranked["left"].to_numpy()))
    names = pa.array([index.name for index in plan.indexes])
    return pa.table(
        [
            best["left"],
            best["id"],
            best["locator"],
            names.take(best["index"]),
            best["kind"],
            best["jaccard"],
        ],
        schema=MATCH_SCHEMA,
    )

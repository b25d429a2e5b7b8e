"""Origins of the documents in some rows: source, address, quality and cluster."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gristmill.dataprep.corpus import url_of
from gristmill.dataprep.documents import (
    JUDGEMENT_COLUMNS,
    MisalignedError,
    annotation_stages,
    column_names,
)
from gristmill.dataprep.edits import EDITS
from gristmill.dataprep.quality.scorers import SCORES
from gristmill.dataprep.row_groups import integers, read_rows
from gristmill.mixtures.sources import INGEST
from gristmill.tokenize.importing.token_sources import corpus_shards
from gristmill.tokenize.packed import PackedSet

CLUSTER_COLUMNS = ("cluster", "cluster_size")
LANGUAGE = "language"
KNOWN = ("url", "locator", "language", "quality", "cluster", "cluster_size")
"""Fields of a document's description in a loss-spike report: its origin and
measurements.
"""


def known_of(
    packed: PackedSet, inputs: Mapping[str, Path], ids: Iterable[str]
) -> dict[str, dict[str, Any]]:
    """`KNOWN` fields of documents, by hexadecimal id; see `describe_documents`."""
    described = describe_documents(
        packed, inputs, {bytes.fromhex(digits) for digits in ids}
    )
    return {
        key.hex(): {name: value[name] for name in KNOWN if name in value}
        for key, value in described.items()
    }


def describe_documents(
    packed: PackedSet, inputs: Mapping[str, Path], ids: Iterable[bytes]
) -> dict[bytes, dict[str, Any]]:
    """Describe the origin and measurements of documents.

    Reads only the row groups that hold them.

    Args:
        packed: the set whose ledger locates them.
        inputs: `ingest` and the steps that ran; `import_tokens`.
        ids: of tokenised documents.

    Returns:
        id -> `id` (hexadecimal), `source`, `locator`, `url` (if it has one), `quality`
        (measured name -> value), `language`, `cluster` and `cluster_size`.

    Raises:
        MisalignedError: a shard holds another document at the ledger's location.
    """
    ledger = packed.ledger(list(ids))
    shards = np.array(ledger["shard"].to_pylist(), dtype=np.int64)
    documents = corpus_shards(inputs)
    descriptions: dict[bytes, dict[str, Any]] = {}
    for shard in np.unique(shards).tolist():
        entries = ledger.take(integers(np.flatnonzero(shards == shard))).to_pylist()
        corpus, name = documents[shard]
        described = _describe_shard(corpus, name, [entry["row"] for entry in entries])
        for entry, description in zip(entries, described, strict=True):
            if description["id"] != entry["id"].hex():
                raise MisalignedError(
                    f"{corpus[INGEST] / name}: row {entry['row']} is document "
                    f"{description['id']}, but the packed set {packed.folder} says "
                    f"{entry['id'].hex()}; run the mix stage again"
                )
            descriptions[entry["id"]] = description
    return descriptions


def _describe_shard(
    inputs: Mapping[str, Path], shard: str, rows: Sequence[int]
) -> list[dict[str, Any]]:
    documents = read_rows(
        inputs[INGEST] / shard, rows, ["id", "source", "locator", "metadata"]
    ).to_pylist()
    described = [
        {
            "id": document["id"].hex(),
            "source": document["source"],
            "locator": document["locator"],
            **_address(document),
        }
        for document in documents
    ]
    for step in annotation_stages(inputs):
        names = set(column_names(inputs[step] / shard))
        if names & SCORES.keys():
            for description, values in zip(
                described, _measured(inputs[step] / shard, rows), strict=True
            ):
                description["quality"] = values
        if names & {LANGUAGE, *CLUSTER_COLUMNS}:
            for description, values in zip(
                described,
                _measured(inputs[step] / shard, rows, (LANGUAGE, *CLUSTER_COLUMNS)),
                strict=True,
            ):
                description.update(values)
    return described


def _measured(
    path: Path, rows: Sequence[int], only: Sequence[str] | None = None
) -> list[dict[str, Any]]:
    """Non-null values of an annotation table for some rows."""
    names = [
        name
        for name in column_names(path)
        if name not in (*JUDGEMENT_COLUMNS, EDITS) and (only is None or name in only)
    ]
    return [
        {
            name: value.hex() if isinstance(value, bytes) else value
            for name, value in row.items()
            if value is not None
        }
        for row in read_rows(path, rows, names).to_pylist()
    ]


def _address(document: Mapping[str, Any]) -> dict[str, str]:
    url = url_of(document["locator"], document["metadata"])
    return {} if url is None else {"url": url}

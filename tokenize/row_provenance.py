"""Origins of the documents in some rows: source, address, quality and cluster."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NotRequired, TypedDict, cast

from gristmill.dataprep.corpus import url_of
from gristmill.dataprep.documents import (
    JUDGEMENT_COLUMNS,
    Inputs,
    MisalignedError,
    annotation_stages,
    column_names,
)
from gristmill.dataprep.edits import EDITS
from gristmill.dataprep.quality.scorers import SCORES
from gristmill.dataprep.row_groups import read_rows
from gristmill.mixtures.schema.sources import INGEST
from gristmill.tokenize.importing.token_sources import corpus_shards
from gristmill.tokenize.packed import PackedSet

JUDGED_COLUMNS = ("language", "cluster", "cluster_size")


class DocumentOrigin(TypedDict):
    """Origin and measurements of a document; ids are hexadecimal."""

    id: str
    source: str
    locator: str
    url: NotRequired[str]
    quality: NotRequired[dict[str, float]]
    """Measured scores, by name."""
    language: NotRequired[str]
    cluster: NotRequired[str]
    cluster_size: NotRequired[int]


def known_of(
    packed: PackedSet, inputs: Inputs, ids: Iterable[str]
) -> dict[str, DocumentOrigin]:
    """`describe_documents` by hexadecimal ids."""
    origins = describe_documents(packed, inputs, {bytes.fromhex(id_) for id_ in ids})
    return {origin["id"]: origin for origin in origins.values()}


def describe_documents(
    packed: PackedSet, inputs: Inputs, ids: Iterable[bytes]
) -> dict[bytes, DocumentOrigin]:
    """Describe the origin and measurements of documents.

    Reads only the row groups that hold them.

    Args:
        packed: the set whose ledger locates them.
        inputs: `ingest` and the steps that ran; `import_tokens`.
        ids: of tokenised documents.

    Returns:
        id -> known facts about the document.

    Raises:
        MisalignedError: a shard holds another document at the ledger's location.
    """
    places: dict[int, list[tuple[int, bytes]]] = {}
    for entry in packed.ledger(list(ids)).to_pylist():
        places.setdefault(entry["shard"], []).append((entry["row"], entry["id"]))
    documents = corpus_shards(inputs)
    descriptions: dict[bytes, DocumentOrigin] = {}
    for shard, entries in sorted(places.items()):
        corpus, name = documents[shard]
        described = _describe_shard(corpus, name, [row for row, _ in entries])
        for (row, document), description in zip(entries, described, strict=True):
            if description["id"] != document.hex():
                raise MisalignedError(
                    f"{corpus[INGEST] / name}: row {row} is document "
                    f"{description['id']}, but the packed set {packed.folder} says "
                    f"{document.hex()}; run the mix stage again"
                )
            descriptions[document] = description
    return descriptions


def _describe_shard(
    inputs: Inputs, shard: str, rows: Sequence[int]
) -> list[DocumentOrigin]:
    origins: list[DocumentOrigin] = []
    columns = ["id", "source", "locator", "metadata"]
    for document in read_rows(inputs[INGEST] / shard, rows, columns).to_pylist():
        origin = DocumentOrigin(
            id=document["id"].hex(),
            source=document["source"],
            locator=document["locator"],
        )
        if (url := url_of(document["locator"], document["metadata"])) is not None:
            origin["url"] = url
        origins.append(origin)
    for step in annotation_stages(inputs):
        path = inputs[step] / shard
        names = column_names(path)
        scores = [name for name in names if name not in (*JUDGEMENT_COLUMNS, EDITS)]
        if SCORES.keys().isdisjoint(names):
            scores = []
        judged = [name for name in JUDGED_COLUMNS if name in names]
        if scores or judged:
            measured = read_rows(path, rows, [*{*scores, *judged}]).to_pylist()
            for origin, values in zip(origins, measured, strict=True):
                if scores:
                    origin["quality"] = _known(values, scores)
                origin.update(cast(DocumentOrigin, _known(values, judged)))
    return origins


def _known(values: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Values that are not null, ids in hexadecimal."""
    return {
        name: value.hex() if isinstance(value, bytes) else value
        for name in names
        if (value := values[name]) is not None
    }

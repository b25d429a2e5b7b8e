"""Search for documents in committed outputs: by id, id prefix, locator or URL."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from gristmill.dataprep.corpus import Corpus, urls_of
from gristmill.dataprep.documents import ID_BYTES, read_documents, read_table, shard_names
from gristmill.dataprep.row_groups import find_ids, read_rows
from gristmill.flows.running.session import Session
from gristmill.flows.stages.plan import Plan
from gristmill.flows.stages.registry import MIX
from gristmill.mixtures.sources import INGEST
from gristmill.tokenize.importing.token_sources import corpora, corpus_shards

SHOWN_HITS = 5


class DocumentNotFoundError(LookupError):
    """No document, or more than one, matches the query."""


class NothingIngestedError(ValueError):
    """No documents are committed yet."""


class AmbiguousDocumentError(DocumentNotFoundError):
    """More than one document matches the query."""


def committed_inputs(session: Session, plan: Plan) -> dict[str, Path]:
    """Return stage -> data folder for the committed stages of a plan."""
    return {name: folder.data for name in plan if (folder := session.committed(name)) is not None}


def committed_corpus(session: Session) -> Corpus:
    """Return the documents of a manifest as left by its committed steps, up to the first uncommitted one.

    Raises:
        NothingIngestedError: no documents are committed yet.
    """
    committed = committed_inputs(session, session.plan)
    if INGEST not in committed:
        if INGEST not in session.plan:
            raise NothingIngestedError(f"{session.manifest_file} has no source of documents, only of tokens")
        raise NothingIngestedError(
            f"ingest is not committed, so there are no documents; run: {session.command('run', '--until', INGEST)}"
        )
    steps = itertools.takewhile(committed.__contains__, session.manifest.steps)
    licences = {name: licence for name, licence in session.manifest.licences.items() if licence is not None}
    return Corpus({name: committed[name] for name in (INGEST, *steps)}, licences)


Place = tuple[Mapping[str, Path], str, int]
"""Place of a document: the inputs of its corpus (`importing.corpora`), its shard and row."""


def find_document(inputs: Mapping[str, Path], query: str) -> Place:
    """Return the place of the one document with this id, id prefix, locator or URL.

    A whole id is looked up in the ledger of the mixture first, which is sorted by id. Other ids and locators are
    searched in the document shards, reading only that column (16 bytes per id), a few shards at a time. URLs that are
    not locators are searched in the metadata.
    """
    direct = _find_in_ledger(inputs, query)
    if direct is not None:
        return direct
    hits: list[Place] = []
    for corpus in corpora(inputs) if _is_hex(query) and len(query) <= 2 * ID_BYTES else ():
        shards = shard_names(corpus[INGEST])
        hits += [(corpus, shard, row) for shard, row in find_ids(corpus[INGEST], shards, query)]
    if not hits:
        hits = [
            (corpus, shard, row)
            for corpus, shard in corpus_shards(inputs)
            for row in _rows_with_locator(corpus[INGEST] / shard, query)
        ]
    if not hits and "://" in query:
        hits = [
            (corpus, shard, row)
            for corpus, shard in corpus_shards(inputs)
            for row in _rows_with_url(corpus, shard, query)
        ]
    if not hits:
        raise DocumentNotFoundError(
            f"no document has the id, locator or address {query!r}; they are shown beside the "
            "samples of `gristmill report`: an id has 32 hexadecimal digits, a locator is "
            "FILE#NUMBER"
        )
    if len(hits) > 1:
        raise AmbiguousDocumentError(f"{len(hits)} documents fit {query!r}; give an id: {_list_ids(hits)}")
    return hits[0]


def _rows_with_locator(path: Path, locator: str) -> list[int]:
    rows: list[int] = pc.indices_nonzero(pc.equal(read_table(path, ["locator"])["locator"], locator)).to_pylist()
    return rows


def _rows_with_url(inputs: Mapping[str, Path], shard: str, url: str) -> list[int]:
    urls = urls_of(read_documents(inputs, shard, ["locator", "metadata"]))
    rows: list[int] = pc.indices_nonzero(pc.equal(urls, url)).to_pylist()
    return rows


def _find_in_ledger(inputs: Mapping[str, Path], id_: str) -> Place | None:
    """Return the place of a tokenised document by its whole id, without searching the shards."""
    if MIX not in inputs or not _is_hex(id_) or len(id_) != 2 * ID_BYTES:
        return None
    from gristmill.tokenize.packed import PackedSet

    entries = PackedSet(inputs[MIX]).ledger([bytes.fromhex(id_)]).to_pylist()
    return (*corpus_shards(inputs)[entries[0]["shard"]], entries[0]["row"]) if entries else None


def _list_ids(hits: Sequence[Place]) -> str:
    """List the ids and sources of the first few hits."""
    documents = [
        read_documents(corpus, shard, ["id", "source"]).slice(row, 1).to_pylist()[0]
        for corpus, shard, row in hits[:SHOWN_HITS]
    ]
    listing = ", ".join(f"{document['id'].hex()} ({document['source']})" for document in documents)
    return listing + (" ..." if len(hits) > SHOWN_HITS else "")


def _is_hex(text: str) -> bool:
    return len(text) >= 4 and all(character in "0123456789abcdefABCDEF" for character in text)


def documents_of(
    inputs: Mapping[str, Path], ids: Iterable[bytes], columns: Sequence[str]
) -> dict[bytes, dict[str, Any]]:
    """Return the requested columns of some documents by id; of all others only the ids are read."""
    id_values = pa.array(sorted(set(ids)), pa.binary(ID_BYTES))
    documents: dict[bytes, dict[str, Any]] = {}
    for shard in shard_names(inputs[INGEST]) if len(id_values) else ():
        path = inputs[INGEST] / shard
        rows = pc.indices_nonzero(pc.is_in(read_table(path, ["id"])["id"], value_set=id_values)).to_pylist()
        if rows:
            documents |= {document["id"]: document for document in read_rows(path, rows, ["id", *columns]).to_pylist()}
    return documents

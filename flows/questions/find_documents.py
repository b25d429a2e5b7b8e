"""Search for documents in committed outputs: by id, id prefix, locator or URL."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from operator import itemgetter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.core.arrays import Column
from gristmill.core.store import StageFolder
from gristmill.dataprep.corpus import Corpus, urls_of
from gristmill.dataprep.documents import (
    Inputs,
    read_documents,
    shard_names,
)
from gristmill.dataprep.row_groups import find_ids, read_document_rows
from gristmill.flows.running.session import Session
from gristmill.flows.stages.registry import MIX
from gristmill.mixtures.schema.sources import IMPORTED, INGEST
from gristmill.tokenize.importing.token_sources import corpora, corpus_shards

SHOWN_HITS = 5


class DocumentNotFoundError(LookupError):
    """No document, or more than one, matches the query."""


class NothingIngestedError(ValueError):
    """No documents are committed yet."""


def committed_folders(session: Session) -> dict[str, StageFolder]:
    """Return the folders of the committed stages, in the order of the plan."""
    folders = {name: session.committed(name) for name in session.plan}
    return {name: folder for name, folder in folders.items() if folder is not None}


def committed_inputs(session: Session) -> dict[str, Path]:
    """Return stage -> data folder for the committed stages of a plan."""
    folders = committed_folders(session)
    return {name: folder.data for name, folder in folders.items()}


def committed_corpus(session: Session) -> Corpus:
    """Return the documents of a manifest as left by its committed steps, up to the
    first uncommitted one.

    Raises:
        NothingIngestedError: no documents are committed yet.
    """
    committed = committed_inputs(session)
    if IMPORTED in session.plan and INGEST not in session.plan:
        raise NothingIngestedError(
            f"{session.manifest_file} has no source of documents, only of tokens"
        )
    if INGEST not in committed:
        raise NothingIngestedError(nothing_read(session))
    steps = itertools.takewhile(committed.__contains__, session.manifest.steps)
    inputs = {name: committed[name] for name in (INGEST, *steps)}
    return Corpus(inputs, session.manifest.licences)


def nothing_read(session: Session) -> str:
    """Describe a run without documents, and the command that reads them."""
    for first in (INGEST, IMPORTED):
        if first in session.plan:
            command = session.command("run", "--until", first)
            return f"no documents are read yet; run: {command}"
    return f"{session.manifest_file} has no `sources:` section, so it has no documents"


Place = tuple[Inputs, str, int]
"""Place of a document: the inputs of its corpus (`importing.corpora`), its shard and
row.
"""


def find_document(inputs: Inputs, query: str) -> Place | None:
    """Return the place of the one document with this id, id prefix, locator or URL;
    None if there is none.

    A whole id is looked up in the ledger of the mixture first, which is sorted by id.
    Other ids and locators are searched in the document shards, reading only that column
    (16 bytes per id), a few shards at a time. URLs that are not locators are searched
    in the metadata.

    Raises:
        DocumentNotFoundError: several documents match.
    """
    if MIX in inputs and corpora(inputs) and is_id(query):
        from gristmill.tokenize.packed import PackedSet

        ledger = PackedSet(inputs[MIX]).ledger([bytes.fromhex(query)])
        for entry in ledger.to_pylist():
            corpus, shard = corpus_shards(inputs)[entry["shard"]]
            return corpus, shard, entry["row"]
    hits: list[Place] = []
    if re.fullmatch("[0-9a-fA-F]{4,32}", query):
        for corpus_inputs in corpora(inputs):
            documents = corpus_inputs[INGEST]
            places = find_ids(documents, shard_names(documents), query)
            hits += [(corpus_inputs, shard, row) for shard, row in places]
    hits = hits or _with_value(inputs, query, ["locator"], itemgetter("locator"))
    if not hits and "://" in query:
        hits = _with_value(inputs, query, ["locator", "metadata"], urls_of)
    if len(hits) > 1:
        listing = [
            f"{document['id'].hex()} ({document['source']})"
            for corpus, shard, row in hits[:SHOWN_HITS]
            for document in read_document_rows(
                corpus, shard, [row], ["id", "source"]
            ).to_pylist()
        ]
        raise DocumentNotFoundError(
            f"{len(hits)} documents fit {query!r}; give an id, such as "
            f"{', '.join(listing)}"
        )
    return hits[0] if hits else None


def _with_value(
    inputs: Inputs,
    query: str,
    columns: Sequence[str],
    values: Callable[[pa.Table], Column],
) -> list[Place]:
    """Places of the documents with a value that is computed from some columns."""
    return [
        (corpus, shard, row)
        for corpus, shard in corpus_shards(inputs)
        for row in np.flatnonzero(
            pc.equal(values(read_documents(corpus, shard, columns)), query)
        ).tolist()
    ]


def is_id(text: str) -> bool:
    """Return True for a whole id."""
    return re.fullmatch("[0-9a-fA-F]{32}", text) is not None

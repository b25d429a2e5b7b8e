"""Finding documents in what is committed: by id, by the first digits of it, by locator."""

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
    """No document, or more than one, fits what was asked for."""


class NothingIngestedError(ValueError):
    """There are no committed documents to ask about."""


class AmbiguousDocumentError(DocumentNotFoundError):
    """More than one document fits what was asked for."""


def committed_inputs(session: Session, plan: Plan) -> dict[str, Path]:
    """Stage -> data folder, of the committed stages of a plan."""
    return {name: folder.data for name in plan if (folder := session.committed(name)) is not None}


def committed_corpus(session: Session) -> Corpus:
    """The documents of a manifest, as its committed steps have left them: up to the first one that is not committed.

    Raises:
        NothingIngestedError: there are none yet.
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
"""Where a document is: the inputs by which its corpus is read (`importing.corpora`), its shard and row."""


def find_document(inputs: Mapping[str, Path], wanted: str) -> Place:
    """The place of the one document with this id, id prefix, locator or address.

    A whole id of a document that a mixture knows is looked up in its ledger, which is ordered by id. Any other id is
    sought among the ids of the document shards, a locator among the locators: of each document 16 bytes are read, or
    its locator, and no more than some shards' are held. What is no locator but an address is sought in the metadata.
    """
    direct = _find_in_ledger(inputs, wanted)
    if direct is not None:
        return direct
    hits: list[Place] = []
    for corpus in corpora(inputs) if _is_hex(wanted) and len(wanted) <= 2 * ID_BYTES else ():
        shards = shard_names(corpus[INGEST])
        hits += [(corpus, shard, row) for shard, row in find_ids(corpus[INGEST], shards, wanted)]
    if not hits:
        hits = [
            (corpus, shard, row)
            for corpus, shard in corpus_shards(inputs)
            for row in _rows_with_locator(corpus[INGEST] / shard, wanted)
        ]
    if not hits and "://" in wanted:
        hits = [
            (corpus, shard, row)
            for corpus, shard in corpus_shards(inputs)
            for row in _rows_with_address(corpus, shard, wanted)
        ]
    if not hits:
        raise DocumentNotFoundError(
            f"no document has the id, locator or address {wanted!r}; they are shown beside the "
            "samples of `gristmill report`: an id has 32 hexadecimal digits, a locator is "
            "FILE#NUMBER"
        )
    if len(hits) > 1:
        raise AmbiguousDocumentError(f"{len(hits)} documents fit {wanted!r}; give an id: {_ids(hits)}")
    return hits[0]


def _rows_with_locator(path: Path, wanted: str) -> list[int]:
    rows: list[int] = pc.indices_nonzero(pc.equal(read_table(path, ["locator"])["locator"], wanted)).to_pylist()
    return rows


def _rows_with_address(inputs: Mapping[str, Path], shard: str, wanted: str) -> list[int]:
    urls = urls_of(read_documents(inputs, shard, ["locator", "metadata"]))
    rows: list[int] = pc.indices_nonzero(pc.equal(urls, wanted)).to_pylist()
    return rows


def _find_in_ledger(inputs: Mapping[str, Path], wanted: str) -> Place | None:
    """Where a tokenised document is by its whole id, without a search through the shards."""
    if MIX not in inputs or not _is_hex(wanted) or len(wanted) != 2 * ID_BYTES:
        return None
    from gristmill.tokenize.packed import PackedSet

    found = PackedSet(inputs[MIX]).ledger([bytes.fromhex(wanted)]).to_pylist()
    return (*corpus_shards(inputs)[found[0]["shard"]], found[0]["row"]) if found else None


def _ids(hits: Sequence[Place]) -> str:
    """The ids and sources of the first few hits."""
    found = [
        read_documents(corpus, shard, ["id", "source"]).slice(row, 1).to_pylist()[0]
        for corpus, shard, row in hits[:SHOWN_HITS]
    ]
    shown = ", ".join(f"{one['id'].hex()} ({one['source']})" for one in found)
    return shown + (" ..." if len(hits) > SHOWN_HITS else "")


def _is_hex(text: str) -> bool:
    return len(text) >= 4 and all(character in "0123456789abcdefABCDEF" for character in text)


def documents_of(
    inputs: Mapping[str, Path], ids: Iterable[bytes], columns: Sequence[str]
) -> dict[bytes, dict[str, Any]]:
    """Some documents by their ids: the columns asked for of each. Of all others 16 bytes are read."""
    wanted = pa.array(sorted(set(ids)), pa.binary(ID_BYTES))
    found: dict[bytes, dict[str, Any]] = {}
    for shard in shard_names(inputs[INGEST]) if len(wanted) else ():
        path = inputs[INGEST] / shard
        rows = pc.indices_nonzero(pc.is_in(read_table(path, ["id"])["id"], value_set=wanted)).to_pylist()
        if rows:
            found |= {one["id"]: one for one in read_rows(path, rows, ["id", *columns]).to_pylist()}
    return found

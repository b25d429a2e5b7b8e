"""Take-down of documents and example prompts: affected rows, checkpoints and models,
and a manifest without them.

The new manifest mixes the same rows, with those that hold such a document emptied and
left out (`mix.exclude`), and resumes from the last checkpoint whose training read none
of them (`pretrain.continue_from`). It therefore trains the same model as a set without
these rows would from the first step on. Generated sets of examples exclude everything
derived from the documents (`examples.NAME.exclude`) and are generated again. Answers of
models about them are overwritten in STORE/answers; STORE/takedown/documents.ids records
the ids, so that `gristmill gc` also overwrites later answers about them.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.core.files import atomic_write
from gristmill.dataprep.corpus import RECORD_ID, urls_of
from gristmill.dataprep.documents import (
    ID_BYTES,
    annotation_stages,
    read_documents,
    read_table,
    shard_names,
)
from gristmill.dataprep.examples.kept_examples import CLUSTERS
from gristmill.dataprep.llm.answer_store import forget_answers
from gristmill.dataprep.llm.lineage import LINEAGE, descendants
from gristmill.dataprep.row_groups import read_matching
from gristmill.flows.authoring.manifest_text import set_keys
from gristmill.flows.questions.find_documents import committed_inputs
from gristmill.flows.questions.training_reads import Reading, reading_of
from gristmill.flows.running.execute import ANSWERS
from gristmill.flows.running.session import Session
from gristmill.flows.stages.registry import MIX, PRETRAIN
from gristmill.mixtures.load import parse_manifest
from gristmill.mixtures.recipes.named_recipes import manifest_file
from gristmill.mixtures.sources import INGEST
from gristmill.mixtures.steps.examples import output_name
from gristmill.mixtures.yaml_text import why_unreadable
from gristmill.tokenize.importing.token_sources import corpus_shards
from gristmill.tokenize.packed import PackedSet

TAKEN_DOWN = "documents.ids"
SHOWN_NAMES = 3
"""Number of missing documents that an error names."""
LIST_KEYS = ("id", "locator", "url")


class TakedownError(ValueError):
    """The list of documents is invalid, or the new manifest cannot be written."""


def read_list(path: Path) -> list[str]:
    """Read a list: one id, locator or URL per line, or JSON objects with `id`,
    `locator` or `url`.

    Blank lines and lines that begin with `#` are skipped.

    Raises:
        TakedownError: the file cannot be read, is empty, or a JSON line has none of the
            keys.
    """
    names: dict[str, None] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TakedownError(f"{path}: {why_unreadable(error)}") from error
    for number, line in enumerate(lines, start=1):
        name = line.strip()
        if not name or name.startswith("#"):
            continue
        if name.startswith("{"):
            name = _name_of_json(path, number, name)
        names[name] = None
    if not names:
        raise TakedownError(
            f"{path}: names no document; write an id, a locator or an address a line, "
            f"or JSON lines with one of {', '.join(LIST_KEYS)}"
        )
    return list(names)


def _name_of_json(path: Path, number: int, text: str) -> str:
    try:
        entry = json.loads(text)
    except ValueError as error:
        raise TakedownError(
            f"{path}:{number}: begins like JSON, but is not: {error}"
        ) from error
    for key in LIST_KEYS:
        if isinstance(entry.get(key), str):
            return str(entry[key])
    raise TakedownError(f"{path}:{number}: has none of the keys {', '.join(LIST_KEYS)}")


def find_documents(
    inputs: Mapping[str, Path], names: Sequence[str]
) -> tuple[dict[bytes, dict[str, Any]], list[str]]:
    """Find the documents that a list names.

    A URL matches every document with it, as its locator (with or without a WARC record
    id) or in its metadata.

    Returns:
        id -> `source`, `locator` and `shard` (the document shard); and the names that
        match no document.
    """
    ids = {bytes.fromhex(name): name for name in names if _is_id(name)}
    locators = sorted({name for name in names if not _is_id(name)})
    urls = [locator for locator in locators if "://" in locator]
    id_values = pa.array(list(ids), pa.binary(ID_BYTES))
    locator_values = pa.array(locators, pa.string())
    url_values = pa.array(urls, pa.string())
    columns = ["id", "source", "locator"]
    if urls:
        columns.append("metadata")
    documents: dict[bytes, dict[str, Any]] = {}
    matched_names: set[str] = set()
    for corpus, shard in corpus_shards(inputs):
        table = read_documents(corpus, shard, columns)
        table = table.append_column(
            "url", urls_of(table) if urls else pa.nulls(len(table), pa.string())
        )
        plain_locators = pc.replace_substring_regex(
            table["locator"], RECORD_ID.pattern, ""
        )
        matches = pc.is_in(table["id"], value_set=id_values)
        matches = pc.or_(matches, pc.is_in(table["locator"], value_set=locator_values))
        matches = pc.or_(matches, pc.is_in(plain_locators, value_set=locator_values))
        matches = pc.or_(matches, pc.is_in(table["url"], value_set=url_values))
        for row in table.filter(matches).to_pylist():
            documents[row["id"]] = {
                "source": row["source"],
                "locator": row["locator"],
                "shard": shard,
            }
            matched_names |= {
                ids.get(row["id"], ""),
                row["locator"],
                RECORD_ID.sub("", row["locator"]),
                row["url"],
            }
    return documents, [name for name in names if name not in matched_names]


def none_there(names: Sequence[str]) -> TakedownError:
    """Build the error for a list without any existing document."""
    listing = ", ".join(names[:SHOWN_NAMES])
    if len(names) > SHOWN_NAMES:
        listing += " ..."
    if len(names) > 1:
        return TakedownError(f"none of the {len(names)} documents exists: {listing}")
    return TakedownError(f"there is no such document: {listing}")


def _is_id(text: str) -> bool:
    return len(text) == 2 * ID_BYTES and all(
        character in "0123456789abcdefABCDEF" for character in text
    )


def near_duplicates(
    inputs: Mapping[str, Path], documents: Iterable[bytes]
) -> set[bytes]:
    """Return the duplicates in the documents' clusters, and the survivors that `dedup`
    kept of them.
    """
    targets = set(documents)
    related: set[bytes] = set()
    for step in annotation_stages(inputs):
        if not (inputs[step] / CLUSTERS).exists():
            continue
        clusters: set[bytes] = set()
        for shard in shard_names(inputs[INGEST]):
            clusters.update(
                read_matching_ids(inputs[step] / shard, targets)["cluster"].to_pylist()
            )
        members = read_matching(
            inputs[step] / CLUSTERS,
            "cluster",
            [id_ for id_ in clusters if id_ is not None],
            ["survivor", "member"],
        )
        for column in members.columns:
            related.update(column.to_pylist())
    return {id_ for id_ in related if id_ is not None and id_ not in targets}


def _cluster_members(
    inputs: Mapping[str, Path], step: str, documents: set[bytes]
) -> set[bytes]:
    """Return the members and survivors of the documents' clusters in one step,
    including the documents.
    """
    clusters: set[bytes] = set()
    for shard in shard_names(inputs[INGEST]):
        rows = read_matching_ids(inputs[step] / shard, documents)
        clusters |= {id_ for id_ in rows["cluster"].to_pylist() if id_ is not None}
    members = read_matching(
        inputs[step] / CLUSTERS,
        "cluster",
        [id_ for id_ in clusters if id_ is not None],
        ["survivor", "member"],
    )
    return {
        id_
        for column in members.columns
        for id_ in column.to_pylist()
        if id_ is not None
    }


def read_matching_ids(path: Path, documents: set[bytes]) -> pa.Table:
    """Read the `cluster` of some documents from an annotation table, which is not
    sorted by id.
    """
    table = read_table(path, ["id", "cluster"])
    return table.filter(
        pc.is_in(table["id"], value_set=pa.array(list(documents), pa.binary(ID_BYTES)))
    )


def assess(
    session: Session, names: Sequence[str], with_duplicates: bool
) -> dict[str, Any]:
    """Assess the effects of a take-down: outputs that hold the documents, and
    checkpoints trained on them.

    Args:
        session: the opened manifest; if it trains, its mixture must be packed.
        names: ids, locators and URLs.
        with_duplicates: take their near-duplicates down too.

    Returns:
        `documents`, `near_duplicates` and `generated`, documents written from them
        (each with id, source, locator, shard), `examples`: listed prompts and examples
        derived from the documents (each with id and set), `not_found`, `excluded`
        (ids), `answers` of models about them (and `unknown_answers`, see
        `forget_answers`), and the effects: `document_shards`, `packed_shards`, `rows`,
        `validation_rows` (per source), `first_step`, `steps_done`, `checkpoints`
        (`clean`, `affected`), `last_clean` (a step or None), `models` (affected
        trainings, and later stages made from them).

    Raises:
        TraceError: the mixture that this manifest trains on is not packed.
        TakedownError: none of the documents or prompts exists.
    """
    inputs = committed_inputs(session, session.plan)
    reading = reading_of(session) if PRETRAIN in session.plan else None
    packed = PackedSet(inputs[MIX]) if MIX in inputs else None
    documents, not_found = _find_if_ingested(inputs, names)
    known_examples = {
        id_
        for id_, _ in in_sets(
            session, [bytes.fromhex(id_) for id_ in not_found if _is_id(id_)]
        )
    }
    not_found = [
        id_
        for id_ in not_found
        if not _is_id(id_) or bytes.fromhex(id_) not in known_examples
    ]
    if not documents and not known_examples:
        raise none_there(names)
    duplicate_ids = near_duplicates(inputs, documents) if documents else set()
    duplicates, _ = _find_if_ingested(inputs, [id_.hex() for id_ in duplicate_ids])
    removed = {**documents, **(duplicates if with_duplicates else {})}
    derived = descendants(inputs, {*removed, *known_examples})
    children, _ = _find_if_ingested(inputs, sorted(id_.hex() for id_ in derived))
    excluded, examples = (
        {**removed, **children},
        in_sets(session, {*known_examples, *removed, *derived}),
    )
    rows, held_out = _rows_of(packed, list(excluded))
    first = (
        min(reading.steps_that_read(rows), default=None)
        if reading is not None and len(rows)
        else None
    )
    ids = sorted(id_.hex() for id_ in {*excluded, *(id_ for id_, _ in examples)})
    answers = forget_answers(session.store.root / ANSWERS, ids, remove=False)
    return {
        "documents": _sorted_entries(documents),
        "near_duplicates": _sorted_entries(duplicates),
        "generated": _sorted_entries(children),
        "not_found": not_found,
        "examples": [{"id": id_.hex(), "set": name} for id_, name in examples],
        "excluded": ids,
        "answers": answers["answers"],
        "unknown_answers": answers["unknown"],
        "document_shards": sorted({entry["shard"] for entry in excluded.values()}),
        "packed_shards": [] if packed is None else packed.shards_of(rows),
        "rows": rows.tolist(),
        "validation_rows": {
            source: numbers.tolist()
            for source, numbers in held_out.items()
            if len(numbers)
        },
        **_state_of_training(session, reading, first, {name for _, name in examples}),
    }


def _find_if_ingested(
    inputs: Mapping[str, Path], names: Sequence[str]
) -> tuple[dict[bytes, dict[str, Any]], list[str]]:
    """Call `find_documents` if anything is ingested."""
    return (
        find_documents(inputs, names)
        if INGEST in inputs and names
        else ({}, list(names))
    )


def _rows_of(
    packed: PackedSet | None, documents: Sequence[bytes]
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return the training rows that hold some documents, and the held-out rows by
    source.
    """
    if packed is None:
        return np.zeros(0, np.int64), {}
    rows = np.unique(packed.rows_of_documents(documents)["row"].to_numpy())
    held_out = {}
    for source in packed.manifest["validation"]:
        pieces = packed.validation_rows_of_documents(source, documents)
        held_out[source] = np.unique(pieces["row"].to_numpy())
    return rows, held_out


def _sorted_entries(
    documents: Mapping[bytes, Mapping[str, Any]],
) -> list[dict[str, Any]]:
    return [{"id": id_.hex(), **entry} for id_, entry in sorted(documents.items())]


def _state_of_training(
    session: Session, reading: Reading | None, first: int | None, sets: set[str]
) -> dict[str, Any]:
    steps_done = 0 if reading is None else reading.steps_done()
    checkpoints = [] if reading is None else reading.checkpoints()
    clean = [step for step in checkpoints if first is None or step < first]
    is_tainted = first is not None and first <= steps_done
    # Trainings that read the documents or the example sets, and all stages that depend
    # on them.
    affected = {PRETRAIN} if is_tainted else set()
    examples_read = set(map(output_name, sets))
    models = []
    for name, node in session.plan.items():
        if examples_read & node.inputs.keys():
            examples_read.add(name)
        if affected & node.inputs.keys() or (
            name in examples_read and node.stage.requirements.torchrun
        ):
            affected.add(name)
        if name in affected and session.committed(name) is not None:
            models.append(name)
    return {
        "first_step": first,
        "steps_done": steps_done,
        "trained": is_tainted,
        "checkpoints": {
            "clean": clean,
            "affected": [step for step in checkpoints if step not in clean],
        },
        "last_clean": max(clean, default=None),
        "models": models,
    }


def in_sets(session: Session, ids: Iterable[bytes]) -> list[tuple[bytes, str]]:
    """Return (id, set) for the ids that are prompts or examples of generated sets."""
    pairs: set[tuple[bytes, str]] = set()
    id_list = list(ids)
    for name in session.manifest.examples:
        folder = session.committed(output_name(name))
        if folder is None or not id_list:
            continue
        for column in ("parent", "child"):
            hits = read_matching(folder.data / LINEAGE, column, id_list, [column])[
                column
            ].to_pylist()
            pairs |= {(id_, name) for id_ in hits}
    return sorted(pairs)


def write_takedown(session: Session, takedown: Mapping[str, Any]) -> dict[str, Any]:
    """Write the list and the manifest that continues without these documents, keep the
    last clean checkpoint, and delete answers of models about them.

    `NAME-takedown.ids` and `NAME-takedown.yaml` are written beside the manifest; the
    checkpoint is linked (or copied) to STORE/takedown, where no training deletes it. A
    manifest without a mixture and without examples derived from the documents has no
    key for the list, so no new manifest is written.

    Returns:
        `manifest` (or None), `list`, and `checkpoint` (None if training must start
        over).

    Raises:
        TakedownError: an output file exists with other content.
    """
    file = Path(session.manifest_file)
    list_file = file.with_name(f"{file.stem}-takedown.ids")
    manifest = file.with_name(f"{file.stem}-takedown.yaml")
    values: dict[tuple[str, ...], Any] = {}
    earlier_lists = []
    if session.manifest.mix is not None:
        values[MIX, "exclude"] = list_file.name
        earlier_lists.append(session.manifest.mix.exclude)
    for name in sorted({entry["set"] for entry in takedown["examples"]}):
        values["examples", name, "exclude"] = list_file.name
        earlier_lists.append(session.manifest.examples[name].exclude)
    ids = set(takedown["excluded"])
    for path in earlier_lists:
        if path is not None:
            lines = map(str.strip, Path(path).read_text().splitlines())
            ids.update(line for line in lines if line and not line.startswith("#"))
    checkpoint = None
    if takedown["last_clean"] is not None:
        checkpoint = str(keep_checkpoint(session, takedown["last_clean"]))
        values[PRETRAIN, "continue_from"] = checkpoint
    text = (
        set_keys(manifest_file(file).read_text(encoding="utf-8"), values)
        if values
        else None
    )
    write_once(list_file, "".join(f"{id_}\n" for id_ in sorted(ids)))
    if text is not None:
        parse_manifest(text, str(manifest))
        write_once(manifest, text)
    _remember(session.store.root, takedown["excluded"])
    forget_answers(session.store.root / ANSWERS, takedown["excluded"], remove=True)
    return {
        "manifest": None if text is None else str(manifest),
        "list": str(list_file),
        "checkpoint": checkpoint,
    }


def forget_taken_down(root: Path, remove: bool) -> int:
    """Delete answers of models about documents taken down from a store, and return
    their number.
    """
    ids = _taken_down(root)
    return forget_answers(root / ANSWERS, ids, remove)["answers"] if ids else 0


def _taken_down(root: Path) -> set[str]:
    path = root / "takedown" / TAKEN_DOWN
    return set(path.read_text(encoding="utf-8").split()) if path.exists() else set()


def _remember(root: Path, ids: Iterable[str]) -> None:
    (root / "takedown").mkdir(parents=True, exist_ok=True)
    with atomic_write(root / "takedown" / TAKEN_DOWN) as sink:
        sink.write(
            "".join(f"{id_}\n" for id_ in sorted({*_taken_down(root), *ids})).encode()
        )


def keep_checkpoint(session: Session, step: int, folder: str = "takedown") -> Path:
    """Hard-link (or copy) a checkpoint into a folder of the store where no training
    deletes it.
    """
    source = reading_of(session).folder.work / "checkpoints" / f"step-{step:08d}"
    target = (
        session.store.root
        / folder
        / session.plan[PRETRAIN].fingerprint[:16]
        / source.name
    )
    if not (target / "complete.json").exists():
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(
            source,
            target,
            copy_function=_link_or_copy,
            ignore=shutil.ignore_patterns("complete.json"),
        )
        shutil.copy2(source / "complete.json", target / "complete.json")
    return target


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def write_once(path: Path, text: str) -> None:
    """Write a file; raise TakedownError if it exists with other content."""
    if path.exists() and path.read_text(encoding="utf-8") != text:
        raise TakedownError(f"{path} exists with other content; move it away first")
    with atomic_write(path) as sink:
        sink.write(text.encode())

"""Taking documents, and prompts of examples, down: what holds them, which checkpoints know them, and a manifest that
continues without them.

The new manifest mixes the same rows, those with such a document emptied and left out (`mix.exclude`), and resumes from
the last checkpoint whose training has read none of them (`pretrain.continue_from`). So the model that it trains is the
one that would have come of the same set without these rows from the first step on. Sets of examples that a model has
written leave out what was made from them (`examples.NAME.exclude`), and are made again. What models have answered about
them is overwritten in STORE/answers; STORE/takedown/documents.ids remembers the ids, so that `gristmill gc` does the
same to what is asked about them later.
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
from gristmill.dataprep.documents import ID_BYTES, annotation_stages, read_documents, read_table, shard_names
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
"""Of documents that are not there."""
LIST_KEYS = ("id", "locator", "url")


class TakedownError(ValueError):
    """The list of documents cannot be used, or the new manifest cannot be written."""


def read_list(path: Path) -> list[str]:
    """What a list names: an id, a locator or an address a line, or JSON objects with `id`, `locator` or `url`.

    Blank lines, and lines that begin with `#`, are passed over.

    Raises:
        TakedownError: it cannot be read, names nothing, or a JSON line has none of the keys.
    """
    found: dict[str, None] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TakedownError(f"{path}: {why_unreadable(error)}") from error
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        if text and not text.startswith("#"):
            found[_named(path, number, text) if text.startswith("{") else text] = None
    if not found:
        raise TakedownError(
            f"{path}: names no document; write an id, a locator or an address a line, or JSON "
            f"lines with one of {', '.join(LIST_KEYS)}"
        )
    return list(found)


def _named(path: Path, number: int, text: str) -> str:
    try:
        entry = json.loads(text)
    except ValueError as error:
        raise TakedownError(f"{path}:{number}: begins like JSON, but is not: {error}") from error
    name = next((entry[key] for key in LIST_KEYS if isinstance(entry.get(key), str)), None)
    if name is None:
        raise TakedownError(f"{path}:{number}: has none of the keys {', '.join(LIST_KEYS)}")
    return str(name)


def find_documents(inputs: Mapping[str, Path], wanted: Sequence[str]) -> tuple[dict[bytes, dict[str, Any]], list[str]]:
    """The documents that a list names.

    An address finds every document of it, also where a locator has the id of a WARC record behind it, or where the
    metadata has the address.

    Returns:
        id -> `source`, `locator` and `shard` (the document shard); and what fits none.
    """
    ids = {bytes.fromhex(one): one for one in wanted if _is_id(one)}
    places = {one for one in wanted if not _is_id(one)}
    addresses = pa.array(sorted(one for one in places if "://" in one), pa.string())
    found: dict[bytes, dict[str, Any]] = {}
    met: set[str] = set()
    for corpus, shard in corpus_shards(inputs):
        table = read_documents(corpus, shard, ["id", "source", "locator", *(["metadata"] if len(addresses) else [])])
        table = table.append_column("url", urls_of(table) if len(addresses) else pa.nulls(len(table), pa.string()))
        plain = pc.replace_substring_regex(table["locator"], RECORD_ID.pattern, "")
        by_place = pa.array(sorted(places), pa.string())
        hit = pc.or_(
            pc.is_in(table["id"], value_set=pa.array(list(ids), pa.binary(ID_BYTES))),
            pc.or_(pc.is_in(table["locator"], value_set=by_place), pc.is_in(plain, value_set=by_place)),
        )
        hit = pc.or_(hit, pc.is_in(table["url"], value_set=addresses))
        for row in table.filter(hit).to_pylist():
            found[row["id"]] = {"source": row["source"], "locator": row["locator"], "shard": shard}
            met |= {ids.get(row["id"], ""), row["locator"], RECORD_ID.sub("", row["locator"]), row["url"]}
    return found, [one for one in wanted if one not in met]


def none_there(wanted: Sequence[str]) -> TakedownError:
    """What to raise where a list names nothing that is here."""
    shown = ", ".join(wanted[:SHOWN_NAMES]) + (" ..." if len(wanted) > SHOWN_NAMES else "")
    return TakedownError(
        f"none of the {len(wanted)} documents is there: {shown}"
        if len(wanted) > 1
        else f"there is no such document: {shown}"
    )


def _is_id(text: str) -> bool:
    return len(text) == 2 * ID_BYTES and all(character in "0123456789abcdefABCDEF" for character in text)


def near_duplicates(inputs: Mapping[str, Path], documents: Iterable[bytes]) -> set[bytes]:
    """The duplicates in the documents' clusters, and what `dedup` kept in their places."""
    own, found = set(documents), set[bytes]()
    for step in annotation_stages(inputs):
        if (inputs[step] / CLUSTERS).exists():
            found |= _of_clusters(inputs, step, own)
    return found - own


def _of_clusters(inputs: Mapping[str, Path], step: str, own: set[bytes]) -> set[bytes]:
    """Who is in the clusters of some documents, those documents too, as one step has found them."""
    clusters: set[bytes] = set()
    for shard in shard_names(inputs[INGEST]):
        found = read_matching_ids(inputs[step] / shard, own)
        clusters |= {one for one in found["cluster"].to_pylist() if one is not None}
    members = read_matching(inputs[step] / CLUSTERS, "cluster", list(clusters), ["survivor", "member"])
    return {one for column in members.columns for one in column.to_pylist() if one is not None}


def read_matching_ids(path: Path, documents: set[bytes]) -> pa.Table:
    """The `cluster` of some documents of an annotation table, which is not sorted by id."""
    table = read_table(path, ["id", "cluster"])
    return table.filter(pc.is_in(table["id"], value_set=pa.array(list(documents), pa.binary(ID_BYTES))))


def assess(session: Session, wanted: Sequence[str], with_duplicates: bool) -> dict[str, Any]:
    """What holds some documents, and which checkpoints know them.

    Args:
        session: the opened manifest; if it trains, its mixture must be packed.
        wanted: ids, locators and addresses.
        with_duplicates: take their near-duplicates down too.

    Returns:
        `documents`, `near_duplicates` and `generated`, what was written from those that go (each with id, source,
        locator, shard), `examples`, prompts that are listed and all that was made from what goes in sets of examples
        (each with id and set), `not_found`, `excluded` (ids), `answers` of models about them (and `unknown_answers`,
        see `forget_answers`), and what is affected: `document_shards`, `packed_shards`, `rows`, `validation_rows` (per
        source), `first_step`, `steps_done`, `checkpoints` (`clean`, `affected`), `last_clean` (a step or None),
        `models` (trainings that are affected, and later stages that were made from these).

    Raises:
        TraceError: the mixture that this manifest trains on is not packed.
        TakedownError: none of the documents, or prompts, is there.
    """
    inputs = committed_inputs(session, session.plan)
    reading = reading_of(session) if PRETRAIN in session.plan else None
    packed = PackedSet(inputs[MIX]) if MIX in inputs else None
    found, not_found = _documents(inputs, wanted)
    known = {one for one, _ in in_sets(session, [bytes.fromhex(one) for one in not_found if _is_id(one)])}
    not_found = [one for one in not_found if not _is_id(one) or bytes.fromhex(one) not in known]
    if not found and not known:
        raise none_there(wanted)
    near = near_duplicates(inputs, found) if found else set()
    others, _ = _documents(inputs, [one.hex() for one in near])
    gone = {**found, **(others if with_duplicates else {})}
    family = descendants(inputs, {*gone, *known})
    children, _ = _documents(inputs, sorted(one.hex() for one in family))
    excluded, examples = {**gone, **children}, in_sets(session, {*known, *gone, *family})
    rows, held_out = _rows_of(packed, list(excluded))
    first = min(reading.steps_that_read(rows), default=None) if reading is not None and len(rows) else None
    ids = sorted(one.hex() for one in {*excluded, *(one for one, _ in examples)})
    told = forget_answers(session.store.root / ANSWERS, ids, remove=False)
    return {
        "documents": _listed(found),
        "near_duplicates": _listed(others),
        "generated": _listed(children),
        "not_found": not_found,
        "examples": [{"id": one.hex(), "set": name} for one, name in examples],
        "excluded": ids,
        "answers": told["answers"],
        "unknown_answers": told["unknown"],
        "document_shards": sorted({entry["shard"] for entry in excluded.values()}),
        "packed_shards": [] if packed is None else packed.shards_of(rows),
        "rows": rows.tolist(),
        "validation_rows": {source: numbers.tolist() for source, numbers in held_out.items() if len(numbers)},
        **_state_of_training(session, reading, first, {name for _, name in examples}),
    }


def _documents(inputs: Mapping[str, Path], wanted: Sequence[str]) -> tuple[dict[bytes, dict[str, Any]], list[str]]:
    """`find_documents`, also where there are none at all."""
    return find_documents(inputs, wanted) if INGEST in inputs and wanted else ({}, list(wanted))


def _rows_of(packed: PackedSet | None, documents: Sequence[bytes]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The training rows that hold some documents, and the held-out ones by source."""
    if packed is None:
        return np.zeros(0, np.int64), {}
    return (
        np.unique(packed.rows_of_documents(documents)["row"].to_numpy()),
        {
            source: np.unique(packed.validation_rows_of_documents(source, documents)["row"].to_numpy())
            for source in packed.manifest["validation"]
        },
    )


def _listed(documents: Mapping[bytes, Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{"id": one.hex(), **entry} for one, entry in sorted(documents.items())]


def _state_of_training(session: Session, reading: Reading | None, first: int | None, sets: set[str]) -> dict[str, Any]:
    done, checkpoints = (0, []) if reading is None else (reading.steps_done(), reading.checkpoints())
    clean = [step for step in checkpoints if first is None or step < first]
    tainted = first is not None and first <= done
    return {
        "first_step": first,
        "steps_done": done,
        "trained": tainted,
        "checkpoints": {"clean": clean, "affected": [step for step in checkpoints if step not in clean]},
        "last_clean": max(clean, default=None),
        "models": [
            name
            for name in _after(session, {PRETRAIN} if tainted else set(), set(map(output_name, sets)))
            if session.committed(name) is not None
        ],
    }


def _after(session: Session, trainings: set[str], sets: set[str]) -> list[str]:
    """Some trainings, those that read some sets of examples, and all stages that read what these made, however
    indirectly."""
    found, reads = set(trainings), set(sets)
    for name, node in session.plan.items():
        reads |= {name} if reads & node.inputs.keys() else set()
        if found & node.inputs.keys() or (name in reads and node.stage.trains):
            found.add(name)
    return [name for name in session.plan if name in found]


def in_sets(session: Session, ids: Iterable[bytes]) -> list[tuple[bytes, str]]:
    """Which of some ids are prompts or examples of which sets that a model has written."""
    found: set[tuple[bytes, str]] = set()
    wanted = list(ids)
    for name in session.manifest.examples:
        folder = session.committed(output_name(name))
        if folder is None or not wanted:
            continue
        for column in ("parent", "child"):
            hits = read_matching(folder.data / LINEAGE, column, wanted, [column])[column].to_pylist()
            found |= {(one, name) for one in hits}
    return sorted(found)


def write_takedown(session: Session, found: Mapping[str, Any]) -> dict[str, Any]:
    """Write the list and the manifest that continues without these documents, keep the last clean checkpoint, and
    forget what models have answered about them.

    `NAME-takedown.ids` and `NAME-takedown.yaml` lie beside the manifest; the checkpoint is linked (or copied) to
    STORE/takedown, where no training deletes it. A manifest that mixes nothing and makes no examples of them has no key
    for the list: it gets no successor.

    Returns:
        `manifest` (or None), `list`, and `checkpoint` (None where training has to start over).

    Raises:
        TakedownError: a file is there already that says something else.
    """
    file = Path(session.manifest_file)
    listed, manifest = (file.with_name(f"{file.stem}-takedown.{end}") for end in ("ids", "yaml"))
    mix, sets = session.manifest.mix, sorted({one["set"] for one in found["examples"]})
    lists = [one.exclude for one in (mix, *(session.manifest.examples[name] for name in sets)) if one is not None]
    earlier = {line.strip() for one in lists if one is not None for line in Path(one).read_text().splitlines()}
    ids = sorted({*found["excluded"], *(line for line in earlier if line and not line.startswith("#"))})
    checkpoint = None if found["last_clean"] is None else keep_checkpoint(session, found["last_clean"])
    values: dict[tuple[str, ...], Any] = {} if mix is None else {(MIX, "exclude"): listed.name}
    values |= {("examples", name, "exclude"): listed.name for name in sets}
    if checkpoint is not None:
        values[PRETRAIN, "continue_from"] = str(checkpoint)
    text = set_keys(manifest_file(file).read_text(encoding="utf-8"), values) if values else None
    write_once(listed, "".join(f"{one}\n" for one in ids))
    if text is not None:
        parse_manifest(text, str(manifest))
        write_once(manifest, text)
    _remember(session.store.root, found["excluded"])
    forget_answers(session.store.root / ANSWERS, found["excluded"], remove=True)
    return {
        "manifest": None if text is None else str(manifest),
        "list": str(listed),
        "checkpoint": None if checkpoint is None else str(checkpoint),
    }


def forget_taken_down(root: Path, remove: bool) -> int:
    """Forget what models have answered about documents that were taken down from a store; how many answers that is."""
    ids = _taken_down(root)
    return forget_answers(root / ANSWERS, ids, remove)["answers"] if ids else 0


def _taken_down(root: Path) -> set[str]:
    path = root / "takedown" / TAKEN_DOWN
    return set(path.read_text(encoding="utf-8").split()) if path.exists() else set()


def _remember(root: Path, ids: Iterable[str]) -> None:
    (root / "takedown").mkdir(parents=True, exist_ok=True)
    with atomic_write(root / "takedown" / TAKEN_DOWN) as sink:
        sink.write("".join(f"{one}\n" for one in sorted({*_taken_down(root), *ids})).encode())


def keep_checkpoint(session: Session, step: int, folder: str = "takedown") -> Path:
    """Put a checkpoint into a folder of the store where no training deletes it; its files are the same ones where the
    file system allows."""
    source = reading_of(session).folder.work / "checkpoints" / f"step-{step:08d}"
    target = session.store.root / folder / session.plan[PRETRAIN].fingerprint[:16] / source.name
    if not (target / "complete.json").exists():
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(source, target, copy_function=_link, ignore=shutil.ignore_patterns("complete.json"))
        shutil.copy2(source / "complete.json", target / "complete.json")
    return target


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def write_once(path: Path, text: str) -> None:
    """Write a file, unless it is there already and says the same.

    Raises:
        TakedownError: it says something else.
    """
    if path.exists() and path.read_text(encoding="utf-8") != text:
        raise TakedownError(f"{path} exists with other content; move it away first")
    with atomic_write(path) as sink:
        sink.write(text.encode())

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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.core.files import write_text
from gristmill.dataprep.corpus import CLUSTERS, urls_of
from gristmill.dataprep.documents import (
    ID_BYTES,
    Inputs,
    annotation_stages,
    read_documents,
    read_table,
    shard_names,
)
from gristmill.dataprep.llm.answer_store import forget_answers
from gristmill.dataprep.llm.lineage import LINEAGE, descendants
from gristmill.dataprep.row_groups import read_matching
from gristmill.flows.authoring.manifest_text import set_keys
from gristmill.flows.pages.page_elements import Fields, Note, table
from gristmill.flows.pages.terminal_pages import print_parts
from gristmill.flows.questions.find_documents import committed_inputs, is_id
from gristmill.flows.questions.training_reads import reading_of
from gristmill.flows.running.execute import ANSWERS
from gristmill.flows.running.session import Session
from gristmill.flows.stages.registry import MIX, PRETRAIN
from gristmill.mixtures.loader import parse_manifest
from gristmill.mixtures.recipes.named_recipes import manifest_file
from gristmill.mixtures.schema.sources import INGEST
from gristmill.mixtures.steps.examples import output_name
from gristmill.mixtures.yaml_text import join_first, why_unreadable
from gristmill.tokenize.importing.token_sources import corpus_shards
from gristmill.tokenize.mixing.exclude import read_excluded
from gristmill.tokenize.packed import PackedSet

TAKEN_DOWN = "documents.ids"
MOST_SHOWN = 36
"""Documents and examples that are printed."""
SHOWN_NAMES = 3
"""Number of missing documents that an error names."""
LIST_KEYS = ("id", "locator", "url")


@dataclass(frozen=True)
class ListedDocument:
    """A document: its id, source, locator, and its shard in the output of `ingest`."""

    id: str
    source: str
    locator: str
    shard: str


@dataclass(frozen=True)
class ListedExample:
    """A prompt or an example of a generated set of examples."""

    id: str
    set: str


@dataclass(frozen=True)
class Checkpoints:
    """Steps of the checkpoints whose training read none of the documents, and of those
    that know some.
    """

    clean: list[int]
    affected: list[int]


@dataclass(frozen=True)
class TakedownFiles:
    """Files of a take-down.

    Attributes:
        manifest: the manifest that continues without the documents; None if it has no
            key for the list.
        list: file with the ids.
        checkpoint: folder of the last clean checkpoint; None if training must start
            over, or no row has the documents.
    """

    manifest: str | None
    list: str
    checkpoint: str | None


@dataclass(frozen=True)
class Takedown:
    """Effects of a take-down.

    Attributes:
        documents: documents of the list.
        near_duplicates: their near-duplicates.
        generated: documents written from them.
        not_found: names of the list that match nothing.
        examples: listed prompts, and examples derived from the documents.
        excluded: ids of all that is taken down.
        answers: number of answers of models about them.
        unknown_answers: number of answers that name no document.
        document_shards: shards of documents that hold them.
        packed_shards: shards of the packed set that hold them.
        rows: training rows that hold them.
        validation_rows: source -> held-out rows that hold them.
        first_step: the first step that reads them.
        steps_done: number of steps trained so far.
        trained: True if a step has read them.
        checkpoints: steps of clean and of affected checkpoints.
        last_clean: step of the last clean checkpoint.
        models: affected trainings, and later stages made from them.
    """

    documents: list[ListedDocument]
    near_duplicates: list[ListedDocument]
    generated: list[ListedDocument]
    not_found: list[str]
    examples: list[ListedExample]
    excluded: list[str]
    answers: int
    unknown_answers: int
    document_shards: list[str]
    packed_shards: list[str]
    rows: list[int]
    validation_rows: dict[str, list[int]]
    first_step: int | None
    steps_done: int
    trained: bool
    checkpoints: Checkpoints
    last_clean: int | None
    models: list[str]

    def show(self, written: TakedownFiles | None, command: str) -> None:
        """Print what the documents affect, and how to continue without them.

        Args:
            written: files of the take-down, if they were written.
            command: runs the new manifest; empty without one.
        """
        rows = [
            [
                "" if document.id in self.excluded else "stays",
                document.id[:16],
                document.source,
                document.locator,
            ]
            for document in (*self.documents, *self.near_duplicates, *self.generated)
        ]
        rows += [
            ["", each.id[:16], f"examples://{each.set}", ""] for each in self.examples
        ]
        held_out = sum(map(len, self.validation_rows.values()))
        kept = "kept" if written is None else "kept, forgotten now"
        effects: dict[str, Sequence[object]] = {
            "not found": self.not_found,
            "document shards": self.document_shards,
            "packed shards": self.packed_shards,
            "rows": [f"{len(self.rows)} of training", f"{held_out} held out"],
            "first read by": [f"step {self.first_step}"] if self.first_step else [],
            "clean checkpoints": self.checkpoints.clean,
            "checkpoints that know them": self.checkpoints.affected,
            "models that know them": self.models,
            "answers of asked models": [f"{self.answers:,} {kept}"],
        }
        unknown = (
            f"{self.unknown_answers:,} answers name no document; remove STORE/answers "
            "to be sure"
        )
        hidden = len(rows) - MOST_SHOWN
        print_parts(
            Note(
                f"documents: {len(self.documents)}, near-duplicates: "
                f"{len(self.near_duplicates)}, written from them: "
                f"{len(self.generated)}; {len(self.excluded)} to take down",
                "plain",
            ),
            table(
                dict.fromkeys(("", "id", "source", "locator"), ""), rows[:MOST_SHOWN]
            ),
            f"and {hidden} more (--json has them)" if hidden > 0 else None,
            Fields(
                [
                    (label, ", ".join(map(str, entries)) or "none")
                    for label, entries in effects.items()
                ]
            ),
            Note(unknown, "warning") if self.unknown_answers else None,
            None if written is None else self._next_step(written, command),
        )

    def _next_step(self, written: TakedownFiles, command: str) -> Note:
        """Describe how to continue without the documents."""
        if not command:
            sentence = (
                f"their ids are in {written.list}; remove their texts from the "
                "sources, and run again"
            )
        elif not self.steps_done:
            sentence = f"continue without them: `{command}`"
        elif not self.rows and not self.validation_rows:
            sentence = (
                "no row of the mixture has them, so that pre-training is reused: "
                f"`{command}`"
            )
        elif written.checkpoint is None:
            sentence = f"without them training starts over: `{command}`"
        else:
            step = self.last_clean
            sentence = f"without them training resumes from step {step}: `{command}`"
        return Note(sentence, "plain")


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
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise TakedownError(f"{path}: {why_unreadable(error)}") from error
    keys = ", ".join(LIST_KEYS)
    for number, line in enumerate(lines, start=1):
        name = line.strip()
        if not name or name.startswith("#"):
            continue
        if name.startswith("{"):
            try:
                entry = json.loads(name)
            except ValueError as error:
                raise TakedownError(
                    f"{path}:{number}: begins like JSON, but is not: {error}"
                ) from error
            values = map(entry.get, LIST_KEYS)
            name = next((value for value in values if isinstance(value, str)), "")
            if not name:
                raise TakedownError(f"{path}:{number}: has none of the keys {keys}")
        names[name] = None
    if not names:
        raise TakedownError(
            f"{path}: names no document; write an id, a locator or an address a line, "
            f"or JSON lines with one of {keys}"
        )
    return list(names)


def find_documents(
    inputs: Inputs, names: Sequence[str]
) -> tuple[dict[bytes, ListedDocument], list[str]]:
    """Find the documents that a list names, by id and in their order, and the names
    that match none.

    A URL matches every document with it, as its locator (with or without a WARC record
    id) or in its metadata.
    """
    ids = {bytes.fromhex(name): name for name in names if is_id(name)}
    others = pa.array([name for name in names if not is_id(name)], pa.string())
    has_urls = any("://" in name for name in names)
    id_values = pa.array(list(ids), pa.binary(ID_BYTES))
    columns = ["id", "source", "locator", *(["metadata"] if has_urls else [])]
    documents: dict[bytes, ListedDocument] = {}
    matched_names: set[str] = set()
    for corpus, shard in corpus_shards(inputs) if names else ():
        read = read_documents(corpus, shard, columns)
        urls = urls_of(read) if has_urls else read["locator"]
        matches = pc.is_in(read["id"], value_set=id_values)
        for column in (read["locator"], urls):
            matches = pc.or_(matches, pc.is_in(column, value_set=others))
        for row in read.append_column("url", urls).filter(matches).to_pylist():
            id_, locator = row["id"], row["locator"]
            documents[id_] = ListedDocument(id_.hex(), row["source"], locator, shard)
            matched_names |= {ids.get(id_, ""), locator, row["url"]}
    return dict(sorted(documents.items())), [
        name for name in names if name not in matched_names
    ]


def near_duplicates(inputs: Inputs, documents: Iterable[bytes]) -> set[bytes]:
    """Return the duplicates in the documents' clusters, and the survivors that `dedup`
    kept of them.
    """
    targets = set(documents)
    related: set[bytes] = set()
    id_values = pa.array(list(targets), pa.binary(ID_BYTES))
    for step in annotation_stages(inputs) if targets else ():
        folder = inputs[step]
        if not (folder / CLUSTERS).exists():
            continue
        clusters: set[bytes] = set()
        for shard in shard_names(inputs[INGEST]):
            # Annotation tables are not sorted by id.
            table = read_table(folder / shard, ["id", "cluster"])
            is_target = pc.is_in(table["id"], value_set=id_values)
            clusters.update(table["cluster"].filter(is_target).to_pylist())
        members = read_matching(
            folder / CLUSTERS,
            "cluster",
            list(clusters - {None}),
            ["survivor", "member"],
        )
        for column in members.columns:
            related.update(column.to_pylist())
    return related - targets - {None}


def assess(session: Session, names: Sequence[str], with_duplicates: bool) -> Takedown:
    """Assess the effects of a take-down: outputs that hold the documents, and
    checkpoints trained on them.

    Args:
        session: the opened manifest; if it trains, its mixture must be packed.
        names: ids, locators and URLs.
        with_duplicates: take their near-duplicates down too.

    Raises:
        TraceError: the mixture that this manifest trains on is not packed.
        TakedownError: none of the documents or prompts exists.
    """
    inputs = committed_inputs(session)
    reading = reading_of(session) if PRETRAIN in session.plan else None
    documents, not_found = find_documents(inputs, names)
    unknown_ids = [bytes.fromhex(name) for name in not_found if is_id(name)]
    known_examples = {id_ for id_, _ in in_sets(session, unknown_ids)}
    known_names = {id_.hex() for id_ in known_examples}
    not_found = [name for name in not_found if name.lower() not in known_names]
    if not documents and not known_examples:
        missing = join_first(names, SHOWN_NAMES)
        raise TakedownError(f"no such document exists: {missing}")
    duplicates = _named(inputs, near_duplicates(inputs, documents))
    removed = {**documents, **(duplicates if with_duplicates else {})}
    derived = descendants(inputs, {*removed, *known_examples})
    children = _named(inputs, derived)
    excluded = {**removed, **children}
    examples = in_sets(session, {*known_examples, *removed, *derived})
    ids = sorted(id_.hex() for id_ in {*excluded, *(id_ for id_, _ in examples)})
    answers = forget_answers(session.store.root / ANSWERS, ids, remove=False)
    rows: list[int] = []
    held_out: dict[str, list[int]] = {}
    packed_shards: list[str] = []
    if MIX in inputs:
        packed, excluded_ids = PackedSet(inputs[MIX]), list(excluded)
        row_array = _rows(packed.rows_of_documents(excluded_ids))
        rows, packed_shards = row_array.tolist(), packed.shards_of(row_array)
        for source in packed.manifest["validation"]:
            pieces = packed.validation_rows_of_documents(source, excluded_ids)
            if len(pieces):
                held_out[source] = _rows(pieces).tolist()
    first_step, steps_done = None, 0
    checkpoints: list[int] = []
    if reading is not None:
        steps_done, checkpoints = reading.steps_done(), reading.checkpoints()
        if rows:
            first_step = min(reading.steps_that_read(row_array), default=None)
    clean = [step for step in checkpoints if first_step is None or step < first_step]
    is_trained = first_step is not None and first_step <= steps_done
    return Takedown(
        list(documents.values()),
        list(duplicates.values()),
        list(children.values()),
        not_found,
        [ListedExample(id_.hex(), name) for id_, name in examples],
        ids,
        answers["answers"],
        answers["unknown"],
        sorted({document.shard for document in excluded.values()}),
        packed_shards,
        rows,
        held_out,
        first_step,
        steps_done,
        is_trained,
        Checkpoints(clean, checkpoints[len(clean) :]),
        max(clean, default=None),
        _affected_models(session, is_trained, {name for _, name in examples}),
    )


def _named(inputs: Inputs, ids: Iterable[bytes]) -> dict[bytes, ListedDocument]:
    return find_documents(inputs, [id_.hex() for id_ in ids])[0]


def _rows(pieces: pa.Table) -> np.ndarray:
    return np.unique(pieces["row"].to_numpy())


def _affected_models(session: Session, is_trained: bool, sets: set[str]) -> list[str]:
    """Return the committed trainings that read the documents or the example sets, and
    all stages that depend on them.
    """
    affected = {PRETRAIN} if is_trained else set()
    examples_read = set(map(output_name, sets))
    for name, node in session.plan.items():
        if examples_read & node.inputs.keys():
            examples_read.add(name)
            if node.stage.torchrun:
                affected.add(name)
        if affected & node.inputs.keys():
            affected.add(name)
    return [
        name for name in session.plan if name in affected and session.committed(name)
    ]


def in_sets(session: Session, ids: Iterable[bytes]) -> list[tuple[bytes, str]]:
    """Return (id, set) for the ids that are prompts or examples of generated sets."""
    pairs: set[tuple[bytes, str]] = set()
    id_list = list(ids)
    for name in session.manifest.examples:
        folder = session.committed(output_name(name))
        if folder is not None and id_list:
            for column in ("parent", "child"):
                hits = read_matching(folder.data / LINEAGE, column, id_list, [column])
                pairs |= {(id_, name) for id_ in hits[column].to_pylist()}
    return sorted(pairs)


def write_takedown(session: Session, takedown: Takedown) -> TakedownFiles:
    """Write the list and the manifest that continues without these documents, keep the
    last clean checkpoint, and delete answers of models about them.

    `NAME-takedown.ids` and `NAME-takedown.yaml` are written beside the manifest; the
    checkpoint is linked (or copied) to STORE/takedown, where no training deletes it. A
    manifest without a mixture and without examples derived from the documents has no
    key for the list, so no new manifest is written.

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
    for name in sorted({example.set for example in takedown.examples}):
        values["examples", name, "exclude"] = list_file.name
        earlier_lists.append(session.manifest.examples[name].exclude)
    ids = set(takedown.excluded)
    for path in filter(None, earlier_lists):
        ids.update(id_.hex() for id_ in read_excluded(path))
    checkpoint = text = None
    if takedown.last_clean is not None and (takedown.rows or takedown.validation_rows):
        checkpoint = str(keep_checkpoint(session, takedown.last_clean))
        values[PRETRAIN, "continue_from"] = checkpoint
    if values:
        text = set_keys(manifest_file(file).read_text(encoding="utf-8"), values)
    write_once(list_file, _id_lines(ids))
    if text is not None:
        parse_manifest(text, str(manifest))
        write_once(manifest, text)
    root = session.store.root
    (root / "takedown").mkdir(parents=True, exist_ok=True)
    all_ids = {*_taken_down(root), *takedown.excluded}
    write_text(root / "takedown" / TAKEN_DOWN, _id_lines(all_ids))
    forget_answers(root / ANSWERS, takedown.excluded, remove=True)
    return TakedownFiles(
        None if text is None else str(manifest), str(list_file), checkpoint
    )


def _id_lines(ids: Iterable[str]) -> str:
    return "".join(f"{id_}\n" for id_ in sorted(ids))


def forget_taken_down(root: Path, remove: bool) -> int:
    """Delete answers of models about documents taken down from a store, and return
    their number.
    """
    ids = _taken_down(root)
    return forget_answers(root / ANSWERS, ids, remove)["answers"] if ids else 0


def _taken_down(root: Path) -> set[str]:
    path = root / "takedown" / TAKEN_DOWN
    return set(path.read_text(encoding="utf-8").split()) if path.exists() else set()


def keep_checkpoint(session: Session, step: int) -> Path:
    """Hard-link (or copy) a checkpoint to STORE/takedown, where no training deletes it."""
    source = reading_of(session).folder.work / "checkpoints" / f"step-{step:08d}"
    fingerprint = session.plan[PRETRAIN].fingerprint[:16]
    target = session.store.root / "takedown" / fingerprint / source.name
    if not target.exists():
        unfinished = target.with_suffix(".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        shutil.copytree(source, unfinished, copy_function=_link_or_copy)
        unfinished.rename(target)
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
    write_text(path, text)

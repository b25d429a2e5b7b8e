"""History of one document through every committed stage: edits, verdicts, thresholds,
and its place in the mix.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gristmill.dataprep.cleaning.clean import RULE_PREFIX, WORDS_LEFT
from gristmill.dataprep.documents import annotation_stages
from gristmill.dataprep.edits import EDITS
from gristmill.dataprep.examples.kept_examples import prepared_inputs
from gristmill.dataprep.langid.language_codes import Language, best_match, parse_label
from gristmill.dataprep.llm.lineage import PARENTS, descendants
from gristmill.dataprep.row_groups import (
    integers,
    read_annotation_rows,
    read_document_rows,
)
from gristmill.flows.questions.find_documents import (
    AmbiguousDocumentError,
    DocumentNotFoundError,
    committed_inputs,
    find_document,
)
from gristmill.flows.running.session import Session
from gristmill.flows.running.terminal import plain_console, visible
from gristmill.flows.stages.registry import MIX, PRETRAIN
from gristmill.mixtures.sources import IMPORTED, INGEST
from gristmill.tokenize.importing.token_sources import corpora, decoded_text

SHOWN_NUMBERS = 8
SHOWN_EDITS = 3
SHOWN_CHARS = 60
EXCERPT_CHARS = 300
INDENT = 10
NEAR_DUPLICATES = ("near_duplicate", "against_near_duplicate", "chained_duplicate")
"""Reasons of `dedup` that its threshold explains."""
NOT_DRAWN = {
    "where": "it does not meet the condition `where` of its source",
    "where_unknown": "the condition `where` of its source uses a column that is null "
    "for it",
    "epochs": "the expression `epochs` of its source gives it 0",
    "epochs_unknown": "the expression `epochs` of its source uses a column that is "
    "null for it",
    "quota": "its source's share was filled by others",
    "validation_rest": "it is held out, but the validation rows were filled by others",
    "excluded": "it is on the list of excluded documents (`mix.exclude`)",
    "withheld": "it lies in rows that were emptied because of excluded documents",
    None: "its source is not in the mixture",
}
"""Meaning of the mixture's reasons (tokenize.mixing.candidates.unused)."""


def history(session: Session, query: str, with_text: bool = False) -> dict[str, Any]:
    """Return everything known about a document, or about an example and its
    preparation.

    Args:
        session: the opened manifest.
        query: id in hexadecimal (or its first digits), or locator; for an example its
            id, or file and line.
        with_text: include the whole text with its edits marked.

    Raises:
        DocumentNotFoundError: no document matches, or several do.
    """
    inputs = committed_inputs(session, session.plan)
    try:
        if not corpora(inputs):
            first = (
                INGEST
                if INGEST in session.plan or IMPORTED not in session.plan
                else IMPORTED
            )
            raise DocumentNotFoundError(
                "nothing is ingested yet; run: "
                f"{session.command('run', '--until', first)}"
            )
        recipes = {name: node.recipe for name, node in session.plan.items()}
        corpus, shard, row = find_document(inputs, query)
        document = judgements(recipes, corpus, shard, [row], with_text=with_text)[0]
    except AmbiguousDocumentError:
        raise
    except DocumentNotFoundError:
        example = _example_history(session, inputs, query, with_text)
        if example is None:
            raise
        return example
    family = {
        "parents": json.loads(document["metadata"] or "{}").get(PARENTS, "").split(),
        "children": sorted(
            id_.hex() for id_ in descendants(inputs, [bytes.fromhex(document["id"])])
        ),
    }
    document |= {relation: ids for relation, ids in family.items() if ids}
    if document["outcome"] == "kept" and MIX in inputs:
        document[MIX] = places_in_mix(
            session, inputs[MIX], document["source"], bytes.fromhex(document["id"])
        )
    return document


def _example_history(
    session: Session, inputs: Mapping[str, Path], query: str, with_text: bool
) -> dict[str, Any] | None:
    """Return the history of an example in `sft.prepare` or `dpo.prepare`; None if it is
    unknown there.
    """
    for stage, folder in inputs.items():
        if session.plan[stage].stage.output != "examples":
            continue
        prepared = prepared_inputs(folder)
        try:
            corpus, shard, row = find_document(prepared, query)
        except AmbiguousDocumentError:
            raise
        except DocumentNotFoundError:
            continue
        steps = session.plan[stage].recipe["prepare"]
        return judgements(
            {name: recipe for step in steps for name, recipe in step.items()},
            corpus,
            shard,
            [row],
            prefix=f"{stage}: ",
            with_text=with_text,
        )[0]
    return None


def judgements(
    recipes: Mapping[str, Mapping[str, Any]],
    inputs: Mapping[str, Path],
    shard: str,
    rows: Sequence[int],
    prefix: str = "",
    with_text: bool = False,
) -> list[dict[str, Any]]:
    """Describe documents of a shard with the verdict of every preparing stage, up to
    the one that dropped it.

    Args:
        recipes: stage -> its recipe.
        inputs: those of its corpus: `ingest` and the stages, in order.
        shard, rows: place of the documents.
        prefix: put before the names of stages.
        with_text: include the whole `text`, see `marked_text`.
    """
    table = read_document_rows(inputs, shard, rows)
    histories: list[dict[str, Any]] = []
    texts: list[str] = []
    edits: list[dict[str, Any]] = [{} for _ in rows]
    for row, document in zip(rows, table.to_pylist(), strict=True):
        text = (
            document["text"] if "text" in document else decoded_text(inputs, shard, row)
        )
        texts.append(text)
        histories.append(
            {
                "id": document["id"].hex(),
                "source": document["source"],
                "locator": document["locator"],
                "metadata": document["metadata"],
                "characters": len(text),
                "excerpt": text[:EXCERPT_CHARS],
                "shard": shard,
                "row": row,
                "stages": [],
                "outcome": "kept",
            }
        )
    remaining = list(range(len(rows)))
    for stage in annotation_stages(inputs):
        ids = table["id"].take(integers(np.array(remaining, dtype=np.int64)))
        annotations = read_annotation_rows(
            inputs, shard, stage, [rows[index] for index in remaining], ids
        )
        kept = []
        for index, judged in zip(remaining, annotations.to_pylist(), strict=True):
            if judged["keep"] is None:
                continue
            verdict = describe_judgement(prefix + stage, recipes[stage], judged)
            if judged.get(EDITS):
                edits[index][stage] = judged[EDITS]
                verdict["edits"] = describe_edits(
                    inputs, stage, shard, rows[index], judged[EDITS]
                )
            histories[index]["stages"].append(verdict)
            if judged["keep"]:
                kept.append(index)
            else:
                histories[index]["outcome"] = (
                    f"dropped by {prefix}{stage}: {judged['reason']}"
                )
        remaining = kept
        if not remaining:
            break
    if with_text:
        for document, text, edits_by_stage in zip(histories, texts, edits, strict=True):
            document["text"] = [{"text": text, "edit": None, "stage": None}]
            if edits_by_stage:
                document["text"] = marked_text(
                    inputs, shard, document["row"], edits_by_stage
                )
    return histories


def describe_judgement(
    stage: str, recipe: Mapping[str, Any], judged: Mapping[str, Any]
) -> dict[str, Any]:
    """Describe the verdict of one stage: its rule, every measured value, and the
    threshold.
    """
    values = {
        name: value.hex() if isinstance(value, bytes) else value
        for name, value in judged.items()
        if name not in ("id", "keep", "reason", "error", EDITS) and value is not None
    }
    verdict: dict[str, Any] = {
        "stage": stage,
        "keep": judged["keep"],
        "reason": judged["reason"],
        "values": values,
    }
    if judged.get("error"):
        verdict["error"] = judged["error"]
    threshold = find_threshold(recipe, judged["reason"], judged)
    if threshold is not None:
        verdict["threshold"] = threshold
    return verdict


def marked_text(
    inputs: Mapping[str, Path], shard: str, row: int, edits: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return a document's whole text with everything that its stages removed and added.

    Args:
        inputs: `ingest` and the stages, in order.
        shard, row: place of the document.
        edits: stage -> its edits, as offsets in the text that it saw.

    Returns:
        pieces in order: `text`, `stage` (None for unedited text), and `edit`:
        `removed`, `added` or None.
    """
    original = (
        read_document_rows({INGEST: inputs[INGEST]}, shard, [row], ["text"])["text"][0]
        .as_py()
        .encode()
    )
    pieces = [_Piece(original)]
    for stage, of_stage in edits.items():
        # From the end, so that earlier offsets stay valid.
        for edit in sorted(
            of_stage, key=lambda edit: (edit["begin"], edit["end"]), reverse=True
        ):
            pieces = _edited(pieces, stage, edit)
    return [
        {
            "text": piece.text.decode("utf-8", "replace"),
            "edit": piece.edit,
            "stage": piece.stage,
        }
        for piece in pieces
    ]


@dataclass(frozen=True)
class _Piece:
    """A stretch of text, and the stage that added or removed it."""

    text: bytes
    edit: str | None = None
    stage: str | None = None


def _edited(
    pieces: Sequence[_Piece], stage: str, edit: Mapping[str, Any]
) -> list[_Piece]:
    """Apply one more edit, whose offsets count only text that is not removed so far."""
    edited: list[_Piece] = []
    added, position, is_added = _Piece(edit["text"].encode(), "added", stage), 0, False
    for piece in pieces:
        if piece.edit == "removed":
            edited.append(piece)
            continue
        begin, end = (
            min(max(edit[side] - position, 0), len(piece.text))
            for side in ("begin", "end")
        )
        before, removed, after = (
            piece.text[:begin],
            piece.text[begin:end],
            piece.text[end:],
        )
        edited.append(replace(piece, text=before))
        # Text added by an earlier stage was not in the original, so it vanishes.
        edited += [] if piece.edit == "added" else [_Piece(removed, "removed", stage)]
        if not is_added and edit["end"] <= position + len(piece.text):
            edited.append(added)
            is_added = True
        edited.append(replace(piece, text=after))
        position += len(piece.text)
    return [piece for piece in (edited if is_added else [*edited, added]) if piece.text]


def describe_edits(
    inputs: Mapping[str, Path],
    stage: str,
    shard: str,
    row: int,
    edits: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Summarize a stage's edits of a document: their number, bytes removed and added,
    and the first few.
    """
    before = dict(itertools.takewhile(lambda item: item[0] != stage, inputs.items()))
    text = (
        read_document_rows(before, shard, [row], ["text"])["text"][0].as_py().encode()
    )
    return {
        "number": len(edits),
        "bytes_removed": sum(edit["end"] - edit["begin"] for edit in edits),
        "bytes_added": sum(len(edit["text"].encode()) for edit in edits),
        "first": [
            {
                "removed": text[edit["begin"] : edit["end"]].decode("utf-8", "replace"),
                "added": edit["text"],
            }
            for edit in edits[:SHOWN_EDITS]
        ],
    }


def find_threshold(
    recipe: Mapping[str, Any], reason: str | None, judged: Mapping[str, Any]
) -> Any:
    """Return the configured threshold of a rule: `gopher_quality/min_words` -> 50;
    `de/gopher_quality/min_words` for the rules of a language.

    Args:
        judged: values measured by the stage; thresholds by language depend on them.
    """
    if reason is None:
        return None
    value: Any = {**recipe, **recipe.get("rules", {}), **recipe.get("by_language", {})}
    for part in reason.split("/"):
        value = value.get(part) if isinstance(value, Mapping) else None
    # the rules of stages without rule sets: `clean/max_removed_word_ratio`
    if value is None and "/" in reason:
        rule = reason.partition("/")[2]
        side, _, column = rule.partition("_")
        bounds = recipe.get(side)
        value = bounds.get(column) if isinstance(bounds, Mapping) else recipe.get(rule)
    if value is not None:
        return value
    languages = recipe.get("keep")
    thresholds = recipe.get("threshold")
    if isinstance(languages, Mapping) and judged.get("language"):
        of_language = {
            str(parse_label(name)): least for name, least in languages.items()
        }
        thresholds = best_match(
            Language(judged["language"], judged.get("script") or ""), of_language
        )
    return {
        "language_score": thresholds,
        "language": languages,
        **dict.fromkeys(
            NEAR_DUPLICATES, (recipe.get("minhash") or {}).get("threshold")
        ),
    }.get(reason, recipe.get(reason.rpartition("/")[2]))


def places_in_mix(
    session: Session, mix: Path, source: str, document: bytes
) -> dict[str, Any]:
    """Locate a document in the packed set, and list the pre-training steps that read
    it.

    Returns:
        `use` (trained, held out or not drawn), `reason` (of not being drawn), and its
        rows, pieces, tokens, copies and steps (counted from 1).
    """
    from gristmill.tokenize.packed import PackedSet

    packed = PackedSet(mix)
    pieces = packed.rows_of_document(document)
    use = "trained" if len(pieces) else "not drawn"
    if not len(pieces) and source in packed.manifest["validation"]:
        pieces = packed.validation_rows_of_documents(source, [document])
        use = "held out" if len(pieces) else use
    reasons = (
        packed.ledger([document])["reason"].to_pylist() if use == "not drawn" else []
    )
    rows = pieces["row"].to_numpy()
    return {
        "use": use,
        "reason": reasons[0] if reasons else None,
        "pieces": len(pieces),
        "tokens": int(pieces["length"].to_numpy().sum()),
        "copies": len(set(pieces["copy"].to_pylist())),
        "rows": rows.tolist(),
        "steps": steps_that_read(session, rows) if use == "trained" else [],
    }


def steps_that_read(session: Session, rows: np.ndarray) -> list[int]:
    """Return the pre-training steps, counted from 1, that read any of these rows."""
    from gristmill.flows.questions.training_reads import reading_of

    if PRETRAIN not in session.plan:
        return []
    return list(reading_of(session).steps_that_read(np.unique(rows)))


def describe_values(judged: Mapping[str, Any]) -> list[str]:
    """Return lines about one verdict: threshold, error, edits, measured values."""
    lines = []
    if "threshold" in judged:
        lines.append(f"threshold {judged['threshold']}")
    if judged["reason"] == "chained_duplicate":
        lines.append(
            "less similar to the survivor than the threshold; joined "
            "through other members of its cluster"
        )
    if "error" in judged:
        lines.append(judged["error"])
    if "edits" in judged:
        edits = judged["edits"]
        lines.append(
            f"edits: {edits['number']}, {edits['bytes_removed']:,} bytes removed, "
            f"{edits['bytes_added']:,} added"
        )
        for edit in edits["first"]:
            lines.append(
                f"  {shorten_text(edit['removed'])} -> {shorten_text(edit['added'])}"
            )
    measured = []
    for name, value in judged["values"].items():
        if not is_idle_rule(name, value):
            measured.append(f"{name} {short_number(value)}")
    if measured:
        lines.append(", ".join(measured))
    return lines


def short_number(value: Any) -> str:
    """Format a measured value: four digits of a fraction, all digits of an integer."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if value.is_integer() else f"{value:.4g}"


def is_idle_rule(name: str, value: Any) -> bool:
    """Return True if a value only says that a rule of `clean` changed nothing."""
    return value == 0 and name.startswith(RULE_PREFIX) and name != WORDS_LEFT


def shorten_text(text: str) -> str:
    """Quote a piece of text on one line; an empty one becomes `(nothing)`."""
    if not text:
        return "(nothing)"
    line = text if len(text) <= SHOWN_CHARS else f"{text[: SHOWN_CHARS - 3]}..."
    return repr(line)


def print_history(document: Mapping[str, Any]) -> None:
    """Print a document's history."""
    console = plain_console()
    console.print(
        Text.assemble(
            (document["id"], "bold"),
            f"  {visible(document['source'])}  {visible(document['locator'])}",
        )
    )
    console.print(
        Text(
            f"{document['characters']} characters, {document['shard']} "
            f"row {document['row']}",
            style="dim",
        )
    )
    if "text" not in document:
        console.print(
            Text(
                visible(" ".join(document["excerpt"].split())[:200]) + " ...",
                style="italic",
            )
        )
    table = Table.grid(padding=(0, 1))
    table.add_column(min_width=INDENT - 1, no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for judged in document["stages"]:
        mark, style = (
            ("kept", "green")
            if judged["keep"]
            else (f"dropped: {judged['reason']}", "red")
        )
        table.add_row(judged["stage"], Text(mark, style=style))
        for line in describe_values(judged):
            table.add_row("", Text(visible(line), style="dim"))
    for line in describe_use(document.get(MIX)):
        table.add_row(MIX, line)
    table.add_row("outcome", document["outcome"])
    for relation in ("parents", "children"):
        if document.get(relation):
            table.add_row(relation, shorten_ids(document[relation]))
    console.print(table)
    if "text" in document:
        print_text(console, document["text"])


def print_text(console: Console, pieces: Sequence[Mapping[str, Any]]) -> None:
    """Print a whole text: removed text as [-...-], added text as {+...+} (as `git diff
    --word-diff`).
    """
    marked = Text()
    for piece in pieces:
        text = visible(piece["text"])
        if piece["edit"] == "removed":
            marked.append(f"[-{text}-]", style="red strike")
        elif piece["edit"] == "added":
            marked.append(f"{{+{text}+}}", style="green")
        else:
            marked.append(text)
    stages = dict.fromkeys(piece["stage"] for piece in pieces if piece["stage"])
    title = "the whole text, unchanged by any stage"
    if stages:
        title = f"the whole text; [-removed-] and {{+added+}} by {', '.join(stages)}"
    console.print()
    console.print(Text(title, style="dim"))
    console.print(marked, soft_wrap=True)


def print_document(document: Mapping[str, Any]) -> None:
    """Print a whole document: identity, one line per verdict, and its text with the
    edits marked.
    """
    console = plain_console()
    console.print(
        Text.assemble(
            (document["id"], "bold"),
            f"  {visible(document['source'])}  {visible(document['locator'])}",
        )
    )
    if document["metadata"] not in ("", "{}"):
        console.print(Text(visible(document["metadata"]), style="dim"))
    table = Table.grid(padding=(0, 1))
    table.add_column(min_width=INDENT - 1, no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for judged in document["stages"]:
        mark, style = (
            ("kept", "green")
            if judged["keep"]
            else (f"dropped: {judged['reason']}", "red")
        )
        number = judged.get("edits", {}).get("number", 0)
        edits = f", {number:,} edit{'s' if number > 1 else ''}" if number else ""
        table.add_row(judged["stage"], Text(f"{mark}{edits}", style=style))
        if not judged["keep"]:
            for line in describe_values(judged):
                table.add_row("", Text(visible(line), style="dim"))
    console.print(table)
    print_text(console, document["text"])


def text_of(document: Mapping[str, Any], side: str) -> str:
    """Return the whole text of a history, `before` or `after` all edits."""
    skipped_edit = "added" if side == "before" else "removed"
    return "".join(
        piece["text"] for piece in document["text"] if piece["edit"] != skipped_edit
    )


def describe_use(mix: Mapping[str, Any] | None) -> list[str]:
    """Describe a document's use by the mixture in at most one line; no line without a
    mixture.
    """
    if mix is None:
        return []
    if mix["use"] == "not drawn":
        return [f"not drawn: {NOT_DRAWN.get(mix['reason'], mix['reason'])}"]
    rows = (
        f"{mix['pieces']} pieces, {mix['tokens']} tokens, in rows "
        f"{shorten(mix['rows'])}"
    )
    if mix["use"] == "held out":
        return [f"held out for validation: {rows}"]
    if not mix["steps"]:
        return [f"{rows}; read by no step"]
    return [f"{rows}; read by steps {shorten(mix['steps'])}"]


def shorten_ids(ids: Sequence[str]) -> str:
    """Join the first few of many document ids."""
    listing = ", ".join(ids[:SHOWN_NUMBERS])
    if len(ids) <= SHOWN_NUMBERS:
        return listing
    return f"{listing} and {len(ids) - SHOWN_NUMBERS:,} more"


def shorten(numbers: Sequence[int]) -> str:
    """Join the first few of many numbers."""
    return ", ".join(map(str, numbers[:SHOWN_NUMBERS])) + (
        " ..." if len(numbers) > SHOWN_NUMBERS else ""
    )

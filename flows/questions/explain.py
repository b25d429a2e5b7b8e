"""Why was this document dropped, or where did it go: one document's history through every committed stage."""

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
from gristmill.dataprep.row_groups import integers, read_annotation_rows, read_document_rows
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
    "where_unknown": "the condition `where` of its source uses a column that is null for it",
    "epochs": "the expression `epochs` of its source gives it 0",
    "epochs_unknown": "the expression `epochs` of its source uses a column that is null for it",
    "quota": "its source's share was filled by others",
    "validation_rest": "it is held out, but the validation rows were filled by others",
    "excluded": "it is on the list of excluded documents (`mix.exclude`)",
    "withheld": "it lies in rows that were emptied because of excluded documents",
    None: "its source is not in the mixture",
}
"""What the mixture's reasons mean (tokenize.mixing.candidates.unused)."""


def history(session: Session, wanted: str, whole: bool = False) -> dict[str, Any]:
    """Everything that is known about a document, or about what the preparation of examples made of one of these.

    Args:
        session: the opened manifest.
        wanted: the id in hexadecimal (or its first digits), or the locator; of an example its id, or file and line.
        whole: with the whole text, its edits marked.

    Raises:
        DocumentNotFoundError: nothing, or more than one document, fits.
    """
    inputs = committed_inputs(session, session.plan)
    try:
        if not corpora(inputs):
            first = INGEST if INGEST in session.plan or IMPORTED not in session.plan else IMPORTED
            raise DocumentNotFoundError(f"nothing is ingested yet; run: {session.command('run', '--until', first)}")
        recipes = {name: node.recipe for name, node in session.plan.items()}
        corpus, shard, row = find_document(inputs, wanted)
        found = judgements(recipes, corpus, shard, [row], whole=whole)[0]
    except AmbiguousDocumentError:
        raise
    except DocumentNotFoundError:
        example = _example_history(session, inputs, wanted, whole)
        if example is None:
            raise
        return example
    family = {
        "parents": json.loads(found["metadata"] or "{}").get(PARENTS, "").split(),
        "children": sorted(one.hex() for one in descendants(inputs, [bytes.fromhex(found["id"])])),
    }
    found |= {relation: ids for relation, ids in family.items() if ids}
    if found["outcome"] == "kept" and MIX in inputs:
        found[MIX] = places_in_mix(session, inputs[MIX], found["source"], bytes.fromhex(found["id"]))
    return found


def _example_history(session: Session, inputs: Mapping[str, Path], wanted: str, whole: bool) -> dict[str, Any] | None:
    """What the steps of `sft.prepare` or `dpo.prepare` said of an example; None where neither knows it."""
    for stage, folder in inputs.items():
        if not session.plan[stage].stage.of_examples:
            continue
        prepared = prepared_inputs(folder)
        try:
            corpus, shard, row = find_document(prepared, wanted)
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
            called=f"{stage}: ",
            whole=whole,
        )[0]
    return None


def judgements(
    recipes: Mapping[str, Mapping[str, Any]],
    inputs: Mapping[str, Path],
    shard: str,
    rows: Sequence[int],
    called: str = "",
    whole: bool = False,
) -> list[dict[str, Any]]:
    """Documents of a shard with what every preparing stage of the inputs said of each, up to the one that dropped it.

    Args:
        recipes: stage -> its recipe.
        inputs: those of its corpus: `ingest` and the stages, in their order.
        shard, rows: where the documents are.
        called: what stands before the stages' names.
        whole: with the whole `text`, see `marked_text`.
    """
    table = read_document_rows(inputs, shard, rows)
    found: list[dict[str, Any]] = []
    edits: list[dict[str, Any]] = [{} for _ in rows]
    for row, document in zip(rows, table.to_pylist(), strict=True):
        text = document["text"] if "text" in document else decoded_text(inputs, shard, row)
        found.append(
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
                "text": text,
            }
        )
    left = list(range(len(rows)))
    for stage in annotation_stages(inputs):
        ids = table["id"].take(integers(np.array(left, dtype=np.int64)))
        of_stage = read_annotation_rows(inputs, shard, stage, [rows[at] for at in left], ids)
        judged = dict(zip(left, of_stage.to_pylist(), strict=True))
        left = [at for at in left if judged[at]["keep"] is not None]
        for at in left:
            verdict = describe_judgement(called + stage, recipes[stage], judged[at])
            if judged[at].get(EDITS):
                edits[at][stage] = judged[at][EDITS]
                verdict["edits"] = describe_edits(inputs, stage, shard, rows[at], judged[at][EDITS])
            found[at]["stages"].append(verdict)
            if not judged[at]["keep"]:
                found[at]["outcome"] = f"dropped by {called}{stage}: {judged[at]['reason']}"
        left = [at for at in left if judged[at]["keep"]]
        if not left:
            break
    for one, of_one in zip(found, edits, strict=True):
        text = one.pop("text")
        if whole:
            one["text"] = (
                marked_text(inputs, shard, one["row"], of_one)
                if of_one
                else [{"text": text, "edit": None, "stage": None}]
            )
    return found


def describe_judgement(stage: str, recipe: Mapping[str, Any], judged: Mapping[str, Any]) -> dict[str, Any]:
    """One stage's verdict: its rule, every measured value, and the thresholds that it was held against."""
    values = {
        name: value.hex() if isinstance(value, bytes) else value
        for name, value in judged.items()
        if name not in ("id", "keep", "reason", "error", EDITS) and value is not None
    }
    verdict: dict[str, Any] = {"stage": stage, "keep": judged["keep"], "reason": judged["reason"], "values": values}
    if judged.get("error"):
        verdict["error"] = judged["error"]
    threshold = find_threshold(recipe, judged["reason"], judged)
    if threshold is not None:
        verdict["threshold"] = threshold
    return verdict


def marked_text(inputs: Mapping[str, Path], shard: str, row: int, edits: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A document's whole text with what its stages took out and put in.

    Args:
        inputs: `ingest` and the stages, in their order.
        shard, row: where the document is.
        edits: stage -> its edits, in the text that it saw.

    Returns:
        pieces in their order: `text`, `stage` (None for what nobody touched), and `edit`: `removed`, `added` or None.
    """
    original = read_document_rows({INGEST: inputs[INGEST]}, shard, [row], ["text"])["text"][0].as_py().encode()
    pieces = [_Piece(original)]
    for stage, of_stage in edits.items():
        # From the end, so that the places of those before stay what they were.
        for edit in sorted(of_stage, key=lambda edit: (edit["begin"], edit["end"]), reverse=True):
            pieces = _edited(pieces, stage, edit)
    return [
        {"text": piece.text.decode("utf-8", "replace"), "edit": piece.edit, "stage": piece.stage} for piece in pieces
    ]


@dataclass(frozen=True)
class _Piece:
    """Bytes of a text, who has put them in or taken them out, and which of both."""

    text: bytes
    edit: str | None = None
    stage: str | None = None


def _edited(pieces: Sequence[_Piece], stage: str, edit: Mapping[str, Any]) -> list[_Piece]:
    """The pieces after one more edit, whose places count what has not been taken out so far."""
    found: list[_Piece] = []
    added, at, is_in = _Piece(edit["text"].encode(), "added", stage), 0, False
    for piece in pieces:
        if piece.edit == "removed":
            found.append(piece)
            continue
        begin, end = (min(max(edit[side] - at, 0), len(piece.text)) for side in ("begin", "end"))
        before, taken, after = piece.text[:begin], piece.text[begin:end], piece.text[end:]
        found.append(replace(piece, text=before))
        # What a stage before had put in was never there.
        found += [] if piece.edit == "added" else [_Piece(taken, "removed", stage)]
        if not is_in and edit["end"] <= at + len(piece.text):
            found.append(added)
            is_in = True
        found.append(replace(piece, text=after))
        at += len(piece.text)
    return [piece for piece in (found if is_in else [*found, added]) if piece.text]


def describe_edits(
    inputs: Mapping[str, Path], stage: str, shard: str, row: int, edits: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """What a stage did to a document's text: number of edits, bytes taken out and put in, and the first few of them."""
    before = dict(itertools.takewhile(lambda item: item[0] != stage, inputs.items()))
    text = read_document_rows(before, shard, [row], ["text"])["text"][0].as_py().encode()
    return {
        "number": len(edits),
        "bytes_removed": sum(edit["end"] - edit["begin"] for edit in edits),
        "bytes_added": sum(len(edit["text"].encode()) for edit in edits),
        "first": [
            {"removed": text[edit["begin"] : edit["end"]].decode("utf-8", "replace"), "added": edit["text"]}
            for edit in edits[:SHOWN_EDITS]
        ],
    }


def find_threshold(recipe: Mapping[str, Any], reason: str | None, judged: Mapping[str, Any]) -> Any:
    """The configured value that a rule's name stands for: `gopher_quality/min_words` -> 50, of a language's own rules
    `de/gopher_quality/min_words`.

    Args:
        judged: what the stage measured, where that decides which of several values counts.
    """
    if reason is None:
        return None
    at: Any = {**recipe, **recipe.get("rules", {}), **recipe.get("by_language", {})}
    for part in reason.split("/"):
        at = at.get(part) if isinstance(at, Mapping) else None
    if at is None and "/" in reason:  # the rules of stages without rule sets: `clean/max_removed_word_ratio`
        rule = reason.partition("/")[2]
        side, _, column = rule.partition("_")
        bounds = recipe.get(side)
        at = bounds.get(column) if isinstance(bounds, Mapping) else recipe.get(rule)
    if at is not None:
        return at
    languages = recipe.get("keep")
    thresholds = recipe.get("threshold")
    if isinstance(languages, Mapping) and judged.get("language"):
        of_language = {str(parse_label(name)): least for name, least in languages.items()}
        thresholds = best_match(Language(judged["language"], judged.get("script") or ""), of_language)
    return {
        "language_score": thresholds,
        "language": languages,
        **dict.fromkeys(NEAR_DUPLICATES, (recipe.get("minhash") or {}).get("threshold")),
    }.get(reason, recipe.get(reason.rpartition("/")[2]))


def places_in_mix(session: Session, mix: Path, source: str, document: bytes) -> dict[str, Any]:
    """Where the packed set holds a document, and which pre-training steps read it.

    Returns:
        `use` (trained, held out or not drawn), `reason` (why it is not drawn), and the rows, pieces, tokens, copies and
        steps (counted from 1).
    """
    from gristmill.tokenize.packed import PackedSet

    packed = PackedSet(mix)
    pieces = packed.rows_of_document(document)
    use = "trained" if len(pieces) else "not drawn"
    if not len(pieces) and source in packed.manifest["validation"]:
        pieces = packed.validation_rows_of_documents(source, [document])
        use = "held out" if len(pieces) else use
    reasons = packed.ledger([document])["reason"].to_pylist() if use == "not drawn" else []
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
    """The pre-training steps, counted from 1, that read any of these rows."""
    from gristmill.flows.questions.training_reads import reading_of

    if PRETRAIN not in session.plan:
        return []
    return list(reading_of(session).steps_that_read(np.unique(rows)))


def describe_values(judged: Mapping[str, Any]) -> list[str]:
    """Lines about one verdict: what it was held against, its error, what was measured."""
    lines = []
    if "threshold" in judged:
        lines.append(f"threshold {judged['threshold']}")
    if judged["reason"] == "chained_duplicate":
        lines.append("less similar to the survivor than the threshold; joined through other members of its cluster")
    if "error" in judged:
        lines.append(judged["error"])
    if "edits" in judged:
        edits = judged["edits"]
        lines.append(
            f"edits: {edits['number']}, {edits['bytes_removed']:,} bytes removed, {edits['bytes_added']:,} added"
        )
        lines += [f"  {shorten_text(edit['removed'])} -> {shorten_text(edit['added'])}" for edit in edits["first"]]
    values = (
        f"{name} {short_number(value)}" for name, value in judged["values"].items() if not is_idle_rule(name, value)
    )
    measured = ", ".join(values)
    return [*lines, measured] if measured else lines


def short_number(value: Any) -> str:
    """A measured value: of a fraction four digits, of a whole number all."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if value.is_integer() else f"{value:.4g}"


def is_idle_rule(name: str, value: Any) -> bool:
    """Whether a value says no more than that a rule of `clean` changed nothing."""
    return value == 0 and name.startswith(RULE_PREFIX) and name != WORDS_LEFT


def shorten_text(text: str) -> str:
    """A piece of text on one line, between quotes; nothing is called so."""
    if not text:
        return "(nothing)"
    line = text if len(text) <= SHOWN_CHARS else f"{text[: SHOWN_CHARS - 3]}..."
    return repr(line)


def print_history(found: Mapping[str, Any]) -> None:
    """Print a document's history."""
    console = plain_console()
    console.print(Text.assemble((found["id"], "bold"), f"  {visible(found['source'])}  {visible(found['locator'])}"))
    console.print(Text(f"{found['characters']} characters, {found['shard']} row {found['row']}", style="dim"))
    if "text" not in found:
        console.print(Text(visible(" ".join(found["excerpt"].split())[:200]) + " ...", style="italic"))
    table = Table.grid(padding=(0, 1))
    table.add_column(min_width=INDENT - 1, no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for judged in found["stages"]:
        mark, style = ("kept", "green") if judged["keep"] else (f"dropped: {judged['reason']}", "red")
        table.add_row(judged["stage"], Text(mark, style=style))
        for line in describe_values(judged):
            table.add_row("", Text(visible(line), style="dim"))
    for line in describe_use(found.get(MIX)):
        table.add_row(MIX, line)
    table.add_row("outcome", found["outcome"])
    for relation in ("parents", "children"):
        if found.get(relation):
            table.add_row(relation, shorten_ids(found[relation]))
    console.print(table)
    if "text" in found:
        print_text(console, found["text"])


def print_text(console: Console, pieces: Sequence[Mapping[str, Any]]) -> None:
    """Print a whole text: what was taken out as [-...-], what was put in as {+...+} (as `git diff --word-diff`)."""
    marks = {None: ("", "", ""), "removed": ("[-", "-]", "red strike"), "added": ("{+", "+}", "green")}
    whole = Text()
    for piece in pieces:
        before, after, style = marks[piece["edit"]]
        whole.append(f"{before}{visible(piece['text'])}{after}", style=style)
    edited = dict.fromkeys(piece["stage"] for piece in pieces if piece["stage"])
    console.print()
    console.print(
        Text(
            f"the whole text; [-taken out-] and {{+put in+}} by {', '.join(edited)}"
            if edited
            else "the whole text, which no stage has changed",
            style="dim",
        )
    )
    console.print(whole, soft_wrap=True)


def print_document(found: Mapping[str, Any]) -> None:
    """Print a whole document: what it is, each step's verdict in a line, and its text with the edits marked."""
    console = plain_console()
    console.print(Text.assemble((found["id"], "bold"), f"  {visible(found['source'])}  {visible(found['locator'])}"))
    if found["metadata"] not in ("", "{}"):
        console.print(Text(visible(found["metadata"]), style="dim"))
    table = Table.grid(padding=(0, 1))
    table.add_column(min_width=INDENT - 1, no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for judged in found["stages"]:
        mark, style = ("kept", "green") if judged["keep"] else (f"dropped: {judged['reason']}", "red")
        number = judged.get("edits", {}).get("number", 0)
        edits = f", {number:,} edit{'s' if number > 1 else ''}" if number else ""
        table.add_row(judged["stage"], Text(f"{mark}{edits}", style=style))
        if not judged["keep"]:
            for line in describe_values(judged):
                table.add_row("", Text(visible(line), style="dim"))
    console.print(table)
    print_text(console, found["text"])


def text_of(found: Mapping[str, Any], side: str) -> str:
    """The whole text of a history, `before` or `after` all edits."""
    left_out = "added" if side == "before" else "removed"
    return "".join(piece["text"] for piece in found["text"] if piece["edit"] != left_out)


def describe_use(mix: Mapping[str, Any] | None) -> list[str]:
    """What the mixture made of a document, in one line (none where there is no mixture yet)."""
    if mix is None:
        return []
    if mix["use"] == "not drawn":
        return [f"not drawn: {NOT_DRAWN.get(mix['reason'], mix['reason'])}"]
    rows = f"{mix['pieces']} pieces, {mix['tokens']} tokens, in rows {shorten(mix['rows'])}"
    if mix["use"] == "held out":
        return [f"held out for validation: {rows}"]
    return [f"{rows}; read by steps {shorten(mix['steps'])}" if mix["steps"] else f"{rows}; read by no step"]


def shorten_ids(ids: Sequence[str]) -> str:
    """The first few of many documents."""
    return ", ".join(ids[:SHOWN_NUMBERS]) + (
        f" and {len(ids) - SHOWN_NUMBERS:,} more" if len(ids) > SHOWN_NUMBERS else ""
    )


def shorten(numbers: Sequence[int]) -> str:
    """The first few of many numbers."""
    return ", ".join(map(str, numbers[:SHOWN_NUMBERS])) + (" ..." if len(numbers) > SHOWN_NUMBERS else "")

"""History of one document through every committed stage: edits, verdicts, thresholds,
and its place in the mix.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, TypedDict

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gristmill.dataprep.cleaning.clean import RULE_PREFIX, WORDS_LEFT
from gristmill.dataprep.documents import (
    JUDGEMENT_COLUMNS,
    Inputs,
    annotation_stages,
)
from gristmill.dataprep.edits import EDITS
from gristmill.dataprep.examples.kept_examples import prepared_inputs
from gristmill.dataprep.langid.language_codes import Language, best_match, parse_label
from gristmill.dataprep.llm.lineage import PARENTS, descendants
from gristmill.dataprep.row_groups import (
    read_annotation_rows,
    read_document_rows,
)
from gristmill.flows.pages.page_elements import value_text
from gristmill.flows.questions.find_documents import (
    DocumentNotFoundError,
    Place,
    committed_inputs,
    find_document,
    nothing_read,
)
from gristmill.flows.running.session import Session
from gristmill.flows.running.terminal import plain_console, visible
from gristmill.flows.stages.registry import MIX, PRETRAIN
from gristmill.mixtures.schema.sources import INGEST
from gristmill.mixtures.yaml_text import join_first
from gristmill.tokenize.importing.token_sources import corpora, decoded_text

Recipes = Mapping[str, Mapping[str, Any]]
"""Stage -> its recipe, as JSON."""
KEPT = "kept"
"""Outcome of a document that no stage dropped."""
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
"""Meaning of the mixture's reasons (`RULES` in tokenize/mixing/ledger.py)."""


@dataclass(frozen=True)
class Edit:
    """An edit of a text: what was removed, and what was added in its place."""

    removed: str
    added: str


@dataclass(frozen=True)
class Edits:
    """Edits of a document by one stage: their number, the bytes that they removed and
    added, and the first few.
    """

    number: int
    bytes_removed: int
    bytes_added: int
    first: list[Edit]


@dataclass(frozen=True)
class Judgement:
    """Verdict of one stage on a document.

    Attributes:
        stage: name of the stage; of an example, after the stage that prepared it.
        keep: True if the document passed.
        reason: rule that dropped it.
        values: column -> measured value.
        threshold: value in the manifest of the rule that dropped it.
        error: reason of its quarantine.
        edits: edits of its text.
    """

    stage: str
    keep: bool
    reason: str | None
    values: dict[str, Any]
    threshold: Any = None
    error: str | None = None
    edits: Edits | None = None

    def remarks(self) -> list[str]:
        """Describe the threshold, the error and the edits."""
        remarks = []
        if self.threshold is not None:
            remarks.append(f"threshold {self.threshold}")
        if self.reason == "chained_duplicate":
            remarks.append(
                "less similar to the survivor than the threshold; joined "
                "through other members of its cluster"
            )
        if self.error:
            remarks.append(self.error)
        if self.edits:
            remarks.append(
                f"edits: {self.edits.number}, {self.edits.bytes_removed:,} bytes "
                f"removed, {self.edits.bytes_added:,} added"
            )
        return remarks

    def telling_values(self) -> dict[str, Any]:
        """Measured values, without rules of `clean` that changed nothing."""
        return {
            name: value
            for name, value in self.values.items()
            if value or not name.startswith(RULE_PREFIX) or name == WORDS_LEFT
        }

    def lines(self) -> list[str]:
        """Describe the threshold, the error, the edits and the measured values."""
        lines = self.remarks()
        for edit in self.edits.first if self.edits else ():
            lines.append(
                f"  {shorten_text(edit.removed)} -> {shorten_text(edit.added)}"
            )
        values = self.telling_values().items()
        measured = [f"{name} {value_text(value)}" for name, value in values]
        return [*lines, ", ".join(measured)] if measured else lines


@dataclass(frozen=True)
class TextPiece:
    """A stretch of a document's text.

    Attributes:
        text: its characters.
        edit: `removed`, `added`, or None for unedited text.
        stage: the stage that removed or added it.
    """

    text: str
    edit: Literal["removed", "added"] | None = None
    stage: str | None = None


@dataclass(frozen=True)
class MixtureUse:
    """A document's place in the packed set.

    Attributes:
        use: `trained`, `held out` or `not drawn`.
        reason: why it was not drawn; see NOT_DRAWN.
        pieces: number of stretches that rows hold.
        tokens: number of tokens in them.
        copies: number of times that it was drawn.
        rows: row of each piece.
        steps: pre-training steps that read it, counted from 1.
    """

    use: str
    reason: str | None
    pieces: int
    tokens: int
    copies: int
    rows: list[int]
    steps: list[int]

    def line(self) -> str:
        """Describe the use."""
        if self.use == "not drawn":
            return f"not drawn: {NOT_DRAWN.get(self.reason, self.reason)}"
        rows = f"{self.pieces} pieces, {self.tokens} tokens, in rows {join_first(self.rows)}"
        if self.use == "held out":
            return f"held out for validation: {rows}"
        steps = f"steps {join_first(self.steps)}" if self.steps else "no step"
        return f"{rows}; read by {steps}"


@dataclass(frozen=True)
class Explanation:
    """A document's history.

    Attributes:
        id: 32 hexadecimal digits.
        source: name of its source.
        locator: file and record in the source.
        metadata: the other fields of its record, as JSON.
        characters: length of its text as read.
        excerpt: beginning of its text.
        shard: file of the document, among the output of `ingest`.
        row: its row in the shard.
        stages: verdict of each stage, up to the one that dropped it.
        outcome: `kept`, or the stage and rule that dropped it.
        text: the whole text with its edits; empty if it was not requested.
        parents: ids of the documents that it was generated from.
        children: ids of the documents generated from it.
        mix: its use by the mixture; None without a mixture.
    """

    id: str
    source: str
    locator: str
    metadata: str | None
    characters: int
    excerpt: str
    shard: str
    row: int
    stages: list[Judgement]
    outcome: str
    text: list[TextPiece] = field(default_factory=list)
    parents: list[str] = field(default_factory=list)
    children: list[str] = field(default_factory=list)
    mix: MixtureUse | None = None

    @property
    def kept(self) -> bool:
        """True if all stages kept the document."""
        return self.outcome == KEPT

    def show(self) -> None:
        """Print the history like `gristmill explain`."""
        console = plain_console()
        console.print(
            Text.assemble(
                (self.id, "bold"), f"  {visible(self.source)}  {visible(self.locator)}"
            )
        )
        console.print(
            f"{self.characters} characters, {self.shard} row {self.row}", style="dim"
        )
        if not self.text:
            console.print(
                visible(" ".join(self.excerpt.split())[:200]) + " ...", style="italic"
            )
        table = Table.grid(padding=(0, 1))
        table.add_column(min_width=INDENT - 1, no_wrap=True, style="bold")
        table.add_column(overflow="fold")
        for judgement in self.stages:
            outcome = Text(f"dropped: {judgement.reason}", style="red")
            if judgement.keep:
                outcome = Text(KEPT, style="green")
            table.add_row(judgement.stage, outcome)
            for line in judgement.lines():
                table.add_row("", Text(visible(line), style="dim"))
        if self.mix is not None:
            table.add_row(MIX, self.mix.line())
        table.add_row("outcome", self.outcome)
        for relation, ids in (("parents", self.parents), ("children", self.children)):
            if ids:
                table.add_row(relation, join_first(ids))
        console.print(table)
        if self.text:
            print_text(console, self.text)


def history(session: Session, query: str, with_text: bool = False) -> Explanation:
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
    plan, inputs = session.plan, committed_inputs(session)
    place = find_document(inputs, query)
    if place is None:
        for stage, folder in inputs.items():
            if plan[stage].stage.output == "examples":
                example = find_document(prepared_inputs(folder), query)
                if example is not None:
                    recipes: dict[str, Any] = {}
                    for step in plan[stage].recipe["prepare"]:
                        recipes |= step
                    return explain_row(recipes, example, f"{stage}: ", with_text)
        if not corpora(inputs):
            raise DocumentNotFoundError(nothing_read(session))
        raise DocumentNotFoundError(
            f"no document has the id, locator or address {query!r}; they are shown "
            "beside the samples of `gristmill report`: an id has 32 hexadecimal "
            "digits, a locator is FILE#NUMBER"
        )
    recipes = {name: node.recipe for name, node in plan.items()}
    document = explain_row(recipes, place, with_text=with_text)
    id_ = bytes.fromhex(document.id)
    mix = None
    if document.kept and MIX in inputs:
        mix = places_in_mix(session, inputs[MIX], document.source, id_)
    return replace(
        document,
        parents=json.loads(document.metadata or "{}").get(PARENTS, "").split(),
        children=sorted(child.hex() for child in descendants(inputs, [id_])),
        mix=mix,
    )


def explain_row(
    recipes: Recipes,
    place: Place,
    prefix: str = "",
    with_text: bool = False,
) -> Explanation:
    """Describe a document with the verdict of every preparing stage, up to the one that
    dropped it.

    Args:
        recipes: stage -> its recipe.
        place: of the document.
        prefix: put before the names of stages.
        with_text: include the whole text.
    """
    inputs, shard, row = place
    table = read_document_rows(inputs, shard, [row])
    (document,) = table.to_pylist()
    stages: list[Judgement] = []
    edits: dict[str, list[EditSpan]] = {}
    for stage in annotation_stages(inputs):
        (judged,) = read_annotation_rows(
            inputs, shard, stage, [row], table["id"]
        ).to_pylist()
        keep, reason = judged["keep"], judged["reason"]
        if keep is None:
            break
        described = None
        spans = judged.get(EDITS)
        if spans:
            edits[stage] = spans
            described = describe_edits(inputs, stage, shard, row, spans)
        values = {
            name: value.hex() if isinstance(value, bytes) else value
            for name, value in judged.items()
            if name not in (*JUDGEMENT_COLUMNS, EDITS) and value is not None
        }
        threshold = find_threshold(recipes[stage], reason, judged)
        error = judged.get("error") or None
        stages.append(
            Judgement(prefix + stage, keep, reason, values, threshold, error, described)
        )
        if not keep:
            break
    text = document.get("text")
    if text is None:
        text = decoded_text(inputs, shard, row)
    outcome = KEPT
    if stages and not stages[-1].keep:
        outcome = f"dropped by {stages[-1].stage}: {stages[-1].reason}"
    pieces = [TextPiece(text)] if with_text else []
    if with_text and edits:
        pieces = marked_text(inputs, shard, row, edits)
    return Explanation(
        document["id"].hex(),
        document["source"],
        document["locator"],
        document["metadata"],
        len(text),
        text[:EXCERPT_CHARS],
        shard,
        row,
        stages,
        outcome,
        pieces,
    )


class EditSpan(TypedDict):
    """An edit in an annotation table: bytes [begin, end) of the text that the stage
    saw, and what takes their place.
    """

    begin: int
    end: int
    text: str


def _text_bytes(inputs: Inputs, shard: str, row: int) -> bytes:
    text: str = read_document_rows(inputs, shard, [row], ["text"])["text"][0].as_py()
    return text.encode()


def marked_text(
    inputs: Inputs, shard: str, row: int, edits: Mapping[str, Sequence[EditSpan]]
) -> list[TextPiece]:
    """Return a document's whole text with everything that its stages removed and added.

    Args:
        inputs: `ingest` and the stages, in order.
        shard, row: place of the document.
        edits: stage -> its edits.
    """
    pieces = [_Piece(_text_bytes({INGEST: inputs[INGEST]}, shard, row))]
    for stage, spans in edits.items():
        # From the end, so that earlier offsets stay valid.
        for edit in sorted(spans, key=itemgetter("begin", "end"), reverse=True):
            edited: list[_Piece] = []
            added = [_Piece(edit["text"].encode(), "added", stage)]
            position = 0  # in the text that is not removed so far
            for piece in pieces:
                if piece.edit == "removed":
                    edited.append(piece)
                    continue
                text = piece.text
                begin, end = (
                    min(max(edit[side] - position, 0), len(text))
                    for side in ("begin", "end")
                )
                position += len(text)
                edited.append(replace(piece, text=text[:begin]))
                # Text added by an earlier stage was not in the original, so it
                # vanishes.
                if piece.edit != "added":
                    edited.append(_Piece(text[begin:end], "removed", stage))
                if edit["end"] <= position:
                    edited += added
                    added = []
                edited.append(replace(piece, text=text[end:]))
            pieces = [piece for piece in (*edited, *added) if piece.text]
    return [
        TextPiece(piece.text.decode("utf-8", "replace"), piece.edit, piece.stage)
        for piece in pieces
    ]


@dataclass(frozen=True)
class _Piece:
    """A stretch of text, and the stage that added or removed it."""

    text: bytes
    edit: Literal["removed", "added"] | None = None
    stage: str | None = None


def describe_edits(
    inputs: Inputs, stage: str, shard: str, row: int, edits: Sequence[EditSpan]
) -> Edits:
    """Summarize a stage's edits of a document."""
    before = dict(itertools.takewhile(lambda item: item[0] != stage, inputs.items()))
    text = _text_bytes(before, shard, row)
    first = []
    for edit in edits[:SHOWN_EDITS]:
        removed = text[edit["begin"] : edit["end"]].decode("utf-8", "replace")
        first.append(Edit(removed, edit["text"]))
    return Edits(
        len(edits),
        sum(edit["end"] - edit["begin"] for edit in edits),
        sum(len(edit["text"].encode()) for edit in edits),
        first,
    )


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
    *_, rule = parts = reason.split("/")
    value: Any = {**recipe, **recipe.get("rules", {}), **recipe.get("by_language", {})}
    for part in parts:
        value = value.get(part) if isinstance(value, Mapping) else None
    # the rules of stages without rule sets: `clean/max_removed_word_ratio`
    side, _, column = rule.partition("_")
    bounds = recipe.get(side)
    if value is None and isinstance(bounds, Mapping):
        value = bounds.get(column)
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
    if reason in NEAR_DUPLICATES:
        return (recipe.get("minhash") or {}).get("threshold")
    special = {"language_score": thresholds, "language": languages}
    return special.get(reason, recipe.get(rule))


def places_in_mix(
    session: Session, mix: Path, source: str, document: bytes
) -> MixtureUse:
    """Locate a document in the packed set, and list the pre-training steps that read
    it.
    """
    from gristmill.flows.questions.training_reads import reading_of
    from gristmill.tokenize.packed import PackedSet

    packed = PackedSet(mix)
    pieces = packed.rows_of_documents([document])
    use, reason, steps = "trained", None, dict[int, list[int]]()
    if not len(pieces):
        use = "not drawn"
        if source in packed.manifest["validation"]:
            pieces = packed.validation_rows_of_documents(source, [document])
        if len(pieces):
            use = "held out"
        else:
            reason = next(iter(packed.ledger([document])["reason"].to_pylist()), None)
    rows = pieces["row"].to_numpy()
    if use == "trained" and PRETRAIN in session.plan:
        steps = reading_of(session).steps_that_read(np.unique(rows))
    return MixtureUse(
        use,
        reason,
        len(pieces),
        int(pieces["length"].to_numpy().sum()),
        len(set(pieces["copy"].to_pylist())),
        rows.tolist(),
        list(steps),
    )


MARKS = {
    "removed": ("[-", "-]", "red strike"),
    "added": ("{+", "+}", "green"),
    None: ("", "", ""),
}


def shorten_text(text: str) -> str:
    """Quote a piece of text on one line; an empty one becomes `(nothing)`."""
    if not text:
        return "(nothing)"
    line = text if len(text) <= SHOWN_CHARS else f"{text[: SHOWN_CHARS - 3]}..."
    return repr(line)


def print_text(console: Console, pieces: Sequence[TextPiece]) -> None:
    """Print a whole text: removed text as [-...-], added text as {+...+} (as `git diff
    --word-diff`).
    """
    marked = Text()
    for piece in pieces:
        before, after, style = MARKS[piece.edit]
        marked.append(f"{before}{visible(piece.text)}{after}", style=style)
    stages = dict.fromkeys(piece.stage for piece in pieces if piece.stage)
    title = "the whole text, unchanged by any stage"
    if stages:
        title = f"the whole text; [-removed-] and {{+added+}} by {', '.join(stages)}"
    console.print(f"\n{title}", style="dim")
    console.print(marked, soft_wrap=True)

"""History of one document through every committed stage: edits, verdicts, thresholds,
and its place in the mix.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypedDict

import numpy as np

from gristmill.dataprep.cleaning.clean import RULE_PREFIX, WORDS_LEFT
from gristmill.dataprep.corpus import url_of
from gristmill.dataprep.documents import (
    JUDGEMENT_COLUMNS,
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
from gristmill.flows.pages.addresses import DOCUMENTS, Search, address
from gristmill.flows.pages.document_elements import (
    numbered_links,
    values_note,
    verdict,
)
from gristmill.flows.pages.page_elements import (
    ByName,
    Fields,
    Heading,
    Inline,
    Link,
    Links,
    Note,
    Page,
    Parts,
    Section,
    Span,
    Text,
    flatten,
)
from gristmill.flows.pages.terminal_pages import print_page
from gristmill.flows.questions.find_documents import (
    DocumentNotFoundError,
    Place,
    committed_inputs,
    find_document,
    nothing_read,
)
from gristmill.flows.running.session import Session
from gristmill.flows.stages.registry import MIX, PRETRAIN
from gristmill.mixtures.schema.sources import INGEST
from gristmill.mixtures.yaml_text import join_first
from gristmill.tokenize.importing.token_sources import corpora, decoded_text

Recipes = Mapping[str, Mapping[str, Any]]
"""Stage -> its recipe, as JSON."""
KEPT = "kept"
"""Outcome of a document that no stage dropped."""
SHOWN_EDITS = 3
EXCERPT_CHARS = 300
BEFORE_STEP = ": "
"""Separator of the stage that prepared an example and the step of its preparation."""
IDS = ("cluster", "duplicate_of")
"""Columns with ids."""
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
        """Measured values, without ids and rules of `clean` that changed nothing."""
        return {
            name: value
            for name, value in self.values.items()
            if (value or not name.startswith(RULE_PREFIX) or name == WORDS_LEFT)
            and name not in IDS
        }

    def parts(self, links: ByName[str] = MappingProxyType({})) -> list[Parts]:
        """Return the verdict, its remarks and the measured values as parts of a page;
        `links` are further pages about it.
        """
        first_edits = [
            Note([Span(edit.removed, "removed"), Span(edit.added, "added")])
            for edit in (self.edits.first if self.edits else ())
        ]
        step = self.stage.rpartition(BEFORE_STEP)[2]
        return [
            Heading([f"{step} ", verdict(self.keep, None, self.reason)]),
            "; ".join(self.remarks()),
            first_edits,
            Links([Link(text, href) for text, href in links.items() if href]),
            values_note(self.telling_values().items()),
        ]


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

    def parts(self, source: str) -> list[Parts]:
        """Return the use of a document of a source as parts of a page."""
        if self.use == "not drawn":
            return [f"Not drawn: {NOT_DRAWN.get(self.reason, self.reason)}."]
        is_held_out = self.use == "held out"
        use = "Held out, never trained" if is_held_out else "In the mixture"
        copies = f", {self.copies:,} copies" if self.copies > 1 else ""
        held_out = source if is_held_out else None
        return [
            f"{use}: {self.tokens:,} tokens in {self.pieces:,} pieces{copies}.",
            numbered_links(
                "rows",
                sorted(set(self.rows)),
                lambda row: address("rows", MIX, row, held_out=held_out),
            ),
            numbered_links(
                "steps that read it",
                self.steps,
                lambda step: address("training", PRETRAIN, step),
            ),
            "No step reads it." if self.use == "trained" and not self.steps else None,
        ]


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
        print_page(self.page())

    @property
    def corpus(self) -> str:
        """Name of its corpus in addresses of pages."""
        preparing = (
            self.stages[0].stage.rpartition(BEFORE_STEP)[0] if self.stages else ""
        )
        return preparing or DOCUMENTS

    def page(
        self,
        links: Callable[[Judgement], ByName[str]] = lambda judged: {},
        most: int | None = None,
    ) -> Page:
        """Return the history as a page.

        Args:
            links: text -> address of further pages about a verdict.
            most: maximum characters of the text.
        """
        corpus, source = self.corpus, self.source
        rows: list[tuple[str, Inline]] = [
            ("id", Span(self.id, "code")),
            ("source", Link(source, Search(corpus=corpus, source=source).link())),
        ]
        url = url_of(self.locator, self.metadata)
        rows += [("address", url)] if url else []
        if corpus != DOCUMENTS and self.kept:
            uses = "the rows that hold it, and the steps that read it"
            rows.append(("example", Link(uses, address("examples", self.id))))
        place = f"{self.shard}, row {self.row}; {self.characters:,} characters"
        rows.append(("place", place))
        for name, value in json.loads(self.metadata or "{}").items():
            is_text = isinstance(value, str)
            rows.append(
                (name, value if is_text else json.dumps(value, ensure_ascii=False))
            )
        for relation, ids in (("parents", self.parents), ("children", self.children)):
            rows += [(relation, join_first(ids))] if ids else []
        outcome = Span(self.outcome, "kept" if self.kept else "dropped")
        sections = {
            "What each step said": [each.parts(links(each)) for each in self.stages],
            "What training makes of it": self.mix and self.mix.parts(source),
            "Text": self._text(most),
        }
        return Page(
            self.locator,
            [
                Section(title, flatten(parts))
                for title, parts in sections.items()
                if parts
            ],
            [Note(outcome, "plain"), Fields(rows)],
        )

    def _text(self, most: int | None) -> list[Parts]:
        if not self.text:
            rest = " ..." if self.characters > len(self.excerpt) else ""
            return [Note(" ".join(self.excerpt.split()) + rest)]
        spans: list[Span] = []
        total = sum(len(piece.text) for piece in self.text)
        remaining = total if most is None else most
        for piece in self.text:
            text = piece.text[:remaining]
            spans.append(Span(text, piece.edit or "", piece.stage or ""))
            remaining -= len(text)
        legend = None
        if any(piece.edit for piece in self.text):
            suffix = " by the steps; text without a mark is as it was read."
            legend = Note(
                [Span("Removed", "removed"), " and ", Span("added", "added"), suffix]
            )
        truncated = None
        if most is not None and total > most:
            first = f"The first {most:,} of {self.characters:,} characters: "
            whole = Link("show all", address(DOCUMENTS, self.id, whole=True))
            truncated = Note([first, whole, "."])
        return [legend, truncated, Text([span for span in spans if span.text])]


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
            f"no document has the id, locator or address {query!r}; list them with: "
            + session.command("query", "SELECT id, locator, url FROM documents")
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
    table = read_document_rows({INGEST: inputs[INGEST]}, shard, [row])
    (document,) = table.to_pylist()
    text = document.get("text")
    if text is None:
        text = decoded_text(inputs, shard, row)
    content = original = text.encode()
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
        if spans := judged.get(EDITS):
            edits[stage] = spans
            described = describe_edits(content, spans)
            content = edited(content, spans)
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
    outcome = KEPT
    if stages and not stages[-1].keep:
        outcome = f"dropped by {stages[-1].stage}: {stages[-1].reason}"
    text = content.decode("utf-8", "replace")
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
        marked_text(original, edits) if with_text else [],
    )


class EditSpan(TypedDict):
    """An edit in an annotation table: bytes [begin, end) of the text that the stage
    saw, and what takes their place.
    """

    begin: int
    end: int
    text: str


def edited(text: bytes, edits: Sequence[EditSpan]) -> bytes:
    """Apply edits to a text."""
    # From the end, so that earlier offsets stay valid.
    for edit in sorted(edits, key=itemgetter("begin", "end"), reverse=True):
        text = text[: edit["begin"]] + edit["text"].encode() + text[edit["end"] :]
    return text


def marked_text(
    text: bytes, edits: Mapping[str, Sequence[EditSpan]]
) -> list[TextPiece]:
    """Return a whole text as it was read with everything that its stages removed and
    added.

    Args:
        text: as it was read.
        edits: stage -> its edits, in order.
    """
    # Offsets are in bytes: Latin-1 has one character for each.
    pieces = [TextPiece(text.decode("latin-1"))]
    for stage, spans in edits.items():
        for edit in sorted(spans, key=itemgetter("begin", "end"), reverse=True):
            edited: list[TextPiece] = []
            new_text = edit["text"].encode().decode("latin-1")
            added = [TextPiece(new_text, "added", stage)]
            position = 0  # in the text that is not removed so far
            for piece in pieces:
                if piece.edit == "removed":
                    edited.append(piece)
                    continue
                begin, end = (
                    min(max(edit[side] - position, 0), len(piece.text))
                    for side in ("begin", "end")
                )
                position += len(piece.text)
                edited.append(replace(piece, text=piece.text[:begin]))
                # Text added by an earlier stage was not in the original, so it
                # vanishes.
                if piece.edit != "added":
                    edited.append(TextPiece(piece.text[begin:end], "removed", stage))
                if edit["end"] <= position:
                    edited += added
                    added = []
                edited.append(replace(piece, text=piece.text[end:]))
            pieces = [piece for piece in (*edited, *added) if piece.text]
    return [
        replace(piece, text=piece.text.encode("latin-1").decode("utf-8", "replace"))
        for piece in pieces
    ]


def describe_edits(text: bytes, edits: Sequence[EditSpan]) -> Edits:
    """Summarize a stage's edits of the text that it saw."""
    first = [
        Edit(text[edit["begin"] : edit["end"]].decode("utf-8", "replace"), edit["text"])
        for edit in edits[:SHOWN_EDITS]
    ]
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
    if reason in NEAR_DUPLICATES:
        return (recipe.get("minhash") or {}).get("threshold")
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
    if reason == "language":
        return recipe.get("keep")
    if reason != "language_score":
        return recipe.get(rule)
    by_language = recipe.get("keep")
    if not isinstance(by_language, Mapping) or not judged.get("language"):
        return recipe.get("threshold")
    language = Language(judged["language"], judged.get("script") or "")
    least = {str(parse_label(name)): value for name, value in by_language.items()}
    return best_match(language, least)


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

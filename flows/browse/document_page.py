"""The page of one document: its text with its edits, the verdict of each step, and the
steps that read it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from gristmill.dataprep.corpus import url_of
from gristmill.flows.browse.addresses import (
    CLUSTERS_PAGE,
    DOCUMENTS,
    EXAMPLES_PAGE,
    ROWS_PAGE,
    TRAINING_PAGE,
    OneDocument,
    Search,
    address,
    corpus_parameter,
)
from gristmill.flows.browse.browse_elements import (
    numbered_links,
    value_text,
    values_note,
    verdict,
)
from gristmill.flows.browse.browsed_run import BrowsedRun
from gristmill.flows.browse.cluster_pages import steps_with_clusters
from gristmill.flows.browse.cut_pages import link_of_cut
from gristmill.flows.pages.page_elements import (
    Fields,
    Heading,
    Inline,
    Link,
    Links,
    Note,
    Page,
    Part,
    Section,
    Span,
    Text,
)
from gristmill.flows.questions.explain import (
    NOT_DRAWN,
    Explanation,
    Judgement,
    MixtureUse,
    TextPiece,
    history,
    is_idle_rule,
)
from gristmill.flows.stages.registry import MIX, PRETRAIN

MOST_CHARACTERS = 30_000
"""Of a text, unless the query asks for the whole."""
MOST_LINKS = 60
"""Rows and steps that are listed."""
BEFORE_STEP = ": "
"""Stands in a history between the stage that prepared an example and its step."""
IDS = ("cluster", "duplicate_of")


def document_page(run: BrowsedRun, query: OneDocument) -> Page:
    """A document's history, with its text as it was read and as it is now.

    Raises:
        gristmill.flows.questions.find_documents.DocumentNotFoundError: nothing, or more
            than one document, fits.
    """
    document = history(run.session, query.id, True)
    stages = [judged.stage.rpartition(BEFORE_STEP)[0] for judged in document.stages]
    corpus = next(iter(stages), "") or DOCUMENTS
    is_kept = document.kept
    badge = Span("kept" if is_kept else "not kept", "kept" if is_kept else "dropped")
    parts: list[Part] = [
        Note(badge if is_kept else [badge, f" {document.outcome}"], "plain"),
        _fields(document, corpus),
    ]
    sections = []
    if document.stages:
        steps = [
            part
            for judged in document.stages
            for part in _step(run, corpus, document.id, judged)
        ]
        sections.append(Section("What each step said", steps))
    if document.mix is not None:
        sections.append(
            Section("What training makes of it", _use(document.mix, document.source))
        )
    sections.append(
        Section("Text", _text(document, None if query.whole else MOST_CHARACTERS))
    )
    return Page(document.locator, sections, parts)


def _fields(document: Explanation, corpus: str) -> Fields:
    source = document.source
    rows: list[tuple[str, Inline]] = [
        ("id", Span(document.id, "code")),
        ("source", Link(source, Search(corpus=corpus, source=source).link())),
    ]
    url = url_of(document.locator, document.metadata)
    if url:
        rows.append(("address", url))
    if corpus != DOCUMENTS and document.kept:
        example = address(EXAMPLES_PAGE, document.id)
        rows.append(
            (
                "example",
                Link("the rows that hold it, and the steps that read it", example),
            )
        )
    place = f"{document.shard}, row {document.row}; {document.characters:,} characters"
    return Fields([*rows, ("place", place), *_metadata(document.metadata)])


def _metadata(text: str | None) -> list[tuple[str, Inline]]:
    """The metadata of the input, by name; metadata that is not an object has no
    name.
    """
    try:
        metadata = json.loads(text or "{}")
    except ValueError:
        metadata = text
    if not isinstance(metadata, dict):
        return [("", str(metadata))] if metadata else []
    return [
        (
            name,
            value if isinstance(value, str) else json.dumps(value, ensure_ascii=False),
        )
        for name, value in metadata.items()
    ]


def _step(run: BrowsedRun, corpus: str, document: str, judged: Judgement) -> list[Part]:
    """The verdict of a step, with links to its cut, its list and its cluster, and its
    measured values.
    """
    step = judged.stage.rpartition(BEFORE_STEP)[2]
    is_kept, reason, values = judged.keep, judged.reason, judged.values
    remarks: list[Inline] = []
    if judged.threshold is not None:
        remarks.append(f"threshold {value_text(judged.threshold)}. ")
    if judged.error:
        remarks.append(f"{judged.error}. ")
    edits = judged.edits
    if edits:
        number = f"{edits.number:,} edit{'s' if edits.number != 1 else ''}"
        remarks.append(
            f"{number}: {edits.bytes_removed:,} bytes removed, "
            f"{edits.bytes_added:,} added. "
        )
    links = []
    cut = link_of_cut(run, step, reason) if corpus == DOCUMENTS else ""
    if cut:
        links.append(Link("both sides of this cut", cut))
    if not is_kept:
        links.append(
            Link(
                "others dropped for it",
                Search(corpus=corpus, step=step, reason=reason).link(),
            )
        )
    if values.get("duplicate_of"):
        links.append(
            Link("what was kept for it", address(DOCUMENTS, values["duplicate_of"]))
        )
    has_twins = values.get("duplicate_of") or (values.get("cluster_size") or 1) > 1
    if (
        values.get("cluster")
        and has_twins
        and (corpus, step) in steps_with_clusters(run)
    ):
        own, member = corpus_parameter(corpus), None if is_kept else document
        link = address(
            CLUSTERS_PAGE, step, values["cluster"], corpus=own, member=member
        )
        links.append(Link("its duplicates", link))
    parts: list[Part] = [Heading([f"{step} ", verdict(is_kept, None, reason)])]
    parts += [Note(remarks)] if remarks else []
    measured = [
        (name, value)
        for name, value in values.items()
        if name not in IDS and not is_idle_rule(name, value)
    ]
    return [*parts, Links(links), *([values_note(measured)] if measured else [])]


def _use(mix: MixtureUse, source: str) -> list[Part]:
    """The use of a document in the mixture, with links to its rows and to the steps
    that read them.
    """
    if mix.use == "not drawn":
        return [Note(f"Not drawn: {NOT_DRAWN.get(mix.reason, mix.reason)}.", "plain")]
    is_held_out = mix.use == "held out"
    use = "Held out, never trained" if is_held_out else "In the mixture"
    copies = f", {mix.copies:,} copies" if mix.copies > 1 else ""
    rows = sorted(set(mix.rows))
    held_out = source if is_held_out else None
    row_links = [
        (row, address(ROWS_PAGE, MIX, row, held_out=held_out))
        for row in rows[:MOST_LINKS]
    ]
    step_links = [
        (step, address(TRAINING_PAGE, PRETRAIN, step))
        for step in mix.steps[:MOST_LINKS]
    ]
    parts: list[Part] = [
        Note(
            f"{use}: {mix.tokens:,} tokens in {mix.pieces:,} pieces{copies}.",
            "plain",
        ),
        numbered_links("rows", row_links, len(rows)),
        numbered_links("steps that read it", step_links, len(mix.steps)),
    ]
    if not step_links and mix.use == "trained":
        parts.append(Note("No step reads it."))
    return parts


def _text(document: Explanation, most: int | None) -> list[Part]:
    spans, is_cut = cut_spans(document.text, most)
    parts: list[Part] = []
    if any(piece.edit for piece in document.text):
        marks: list[Inline] = [
            Span("Removed", "removed"),
            " and ",
            Span("added", "added"),
        ]
        parts.append(
            Note([*marks, " by the steps; text without a mark is as it was read."])
        )
    if not is_cut:
        return [*parts, Text(spans)]
    whole = address(DOCUMENTS, document.id, whole="true")
    characters = f"{document.characters:,} characters"
    beginning = Note(
        [f"The first {most:,} of {characters}: ", Link("show all", whole), "."]
    )
    return [
        *parts,
        beginning,
        Text(spans),
        Links([Link(f"Show all {characters}", whole)]),
    ]


def cut_spans(pieces: Sequence[TextPiece], most: int | None) -> tuple[list[Span], bool]:
    """The first characters of a text in pieces, its edits marked, and whether there are
    more.
    """
    spans = []
    remaining = most
    for piece in pieces:
        text = piece.text
        is_cut = remaining is not None and len(text) > remaining
        spans.append(
            Span(
                text[:remaining] if is_cut else text,
                piece.edit or "",
                piece.stage or "",
            )
        )
        if is_cut:
            return spans, True
        if remaining is not None:
            remaining -= len(text)
    return spans, False

"""The page of one document: its text with its edits, the verdict of each step, and the
steps that read it.
"""

from __future__ import annotations

import json

from gristmill.dataprep.corpus import url_of
from gristmill.flows.browser.addresses import DOCUMENTS, Address, Search, address
from gristmill.flows.browser.browsed_run import BrowsedRun
from gristmill.flows.browser.cluster_pages import steps_with_clusters
from gristmill.flows.browser.cut_pages import link_of_cut
from gristmill.flows.browser.elements import (
    numbered_links,
    values_note,
    verdict,
)
from gristmill.flows.pages.page_elements import (
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
from gristmill.flows.questions.explain import (
    NOT_DRAWN,
    Explanation,
    Judgement,
    MixtureUse,
    history,
)
from gristmill.flows.stages.registry import MIX, PRETRAIN

MOST_CHARACTERS = 30_000
"""Code points of a text that are shown, unless the query asks for the whole."""
MOST_LINKS = 60
"""Rows and steps that are listed."""
BEFORE_STEP = ": "
"""Separator, in a history, of the stage that prepared an example and its step."""
IDS = ("cluster", "duplicate_of")


def document_page(run: BrowsedRun, id: Address, whole: bool = False) -> Page:
    """A document's history, with its text as it was read and as it is now.

    Raises:
        gristmill.flows.questions.find_documents.DocumentNotFoundError: nothing, or more
            than one document, fits.
    """
    document = history(run.session, id, True)
    stages = [judged.stage.rpartition(BEFORE_STEP)[0] for judged in document.stages]
    corpus = next(iter(stages), "") or DOCUMENTS
    source, is_kept = document.source, document.kept
    rows: list[tuple[str, Inline]] = [
        ("id", Span(document.id, "code")),
        ("source", Link(source, Search(corpus=corpus, source=source).link())),
    ]
    url = url_of(document.locator, document.metadata)
    rows += [("address", url)] if url else []
    if corpus != DOCUMENTS and is_kept:
        uses = "the rows that hold it, and the steps that read it"
        rows.append(("example", Link(uses, address("examples", document.id))))
    place = f"{document.shard}, row {document.row}; {document.characters:,} characters"
    rows.append(("place", place))
    for name, value in json.loads(document.metadata or "{}").items():
        is_text = isinstance(value, str)
        rows.append((name, value if is_text else json.dumps(value, ensure_ascii=False)))
    badge = Span("kept" if is_kept else "not kept", "kept" if is_kept else "dropped")
    outcome = Note(badge if is_kept else [badge, f" {document.outcome}"], "plain")
    sections = []
    if document.stages:
        steps = flatten(
            _step(run, corpus, document.id, judged) for judged in document.stages
        )
        sections.append(Section("What each step said", steps))
    if document.mix is not None:
        use = _use(document.mix, source)
        sections.append(Section("What training makes of it", flatten(use)))
    text = _text(document, None if whole else MOST_CHARACTERS)
    sections.append(Section("Text", flatten(text)))
    return Page(document.locator, sections, [outcome, Fields(rows)])


def _step(
    run: BrowsedRun, corpus: str, document: str, judged: Judgement
) -> list[Parts]:
    """The verdict of a step, with links to its cut, its list and its cluster, and its
    measured values.
    """
    step = judged.stage.rpartition(BEFORE_STEP)[2]
    is_kept, reason, values = judged.keep, judged.reason, judged.values
    links = {}
    if corpus == DOCUMENTS:
        links["both sides of this cut"] = link_of_cut(run, step, reason)
    if not is_kept:
        search = Search(corpus=corpus, step=step, reason=reason)
        links["others dropped for it"] = search.link()
    survivor = values.get("duplicate_of")
    if survivor:
        links["what was kept for it"] = address(DOCUMENTS, survivor)
    has_twins = survivor or (values.get("cluster_size") or 1) > 1
    cluster = values.get("cluster")
    if cluster and has_twins and (corpus, step) in steps_with_clusters(run):
        member = None if is_kept else document
        links["its duplicates"] = address(
            "duplicates", step, cluster, corpus=corpus, member=member
        )
    remarks = "; ".join(judged.remarks())
    measured = [item for item in judged.telling_values().items() if item[0] not in IDS]
    return [
        Heading([f"{step} ", verdict(is_kept, None, reason)]),
        Note([remarks]) if remarks else None,
        Links([Link(text, link) for text, link in links.items() if link]),
        values_note(measured),
    ]


def _use(mix: MixtureUse, source: str) -> list[Parts]:
    """The use of a document in the mixture, with links to its rows and to the steps
    that read them.
    """
    if mix.use == "not drawn":
        return [Note(f"Not drawn: {NOT_DRAWN.get(mix.reason, mix.reason)}.", "plain")]
    is_held_out = mix.use == "held out"
    use = "Held out, never trained" if is_held_out else "In the mixture"
    copies = f", {mix.copies:,} copies" if mix.copies > 1 else ""
    held_out = source if is_held_out else None
    return [
        Note(
            f"{use}: {mix.tokens:,} tokens in {mix.pieces:,} pieces{copies}.", "plain"
        ),
        numbered_links(
            "rows",
            sorted(set(mix.rows)),
            MOST_LINKS,
            lambda row: address("rows", MIX, row, held_out=held_out),
        ),
        numbered_links(
            "steps that read it",
            mix.steps,
            MOST_LINKS,
            lambda step: address("training", PRETRAIN, step),
        ),
        "No step reads it." if mix.use == "trained" and not mix.steps else None,
    ]


def _text(document: Explanation, most: int | None) -> list[Parts]:
    spans: list[Span] = []
    total = sum(len(piece.text) for piece in document.text)
    remaining = total if most is None else most
    for piece in document.text:
        text = piece.text[:remaining]
        spans.append(Span(text, piece.edit or "", piece.stage or ""))
        remaining -= len(text)
    legend = None
    if any(piece.edit for piece in document.text):
        marks: list[Inline] = [
            Span("Removed", "removed"),
            " and ",
            Span("added", "added"),
        ]
        suffix = " by the steps; text without a mark is as it was read."
        legend = Note([*marks, suffix])
    if most is None or total <= most:
        return [legend, Text(spans)]
    whole_link = address(DOCUMENTS, document.id, whole=True)
    characters = f"{document.characters:,} characters"
    first = f"The first {most:,} of {characters}: "
    return [
        legend,
        Note([first, Link("show all", whole_link), "."]),
        Text([span for span in spans if span.text]),
    ]

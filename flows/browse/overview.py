"""The first page: the stages of a run, its documents after each step, and links to
every listing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from gristmill.core.secrets import mask_text
from gristmill.flows.browse.addresses import (
    CLUSTERS_PAGE,
    CUTS_PAGE,
    DOCUMENTS,
    DOMAINS_PAGE,
    ROWS_PAGE,
    SEARCH_PAGE,
    TRAINING_PAGE,
    NoQuery,
    Search,
    address,
    corpus_parameter,
)
from gristmill.flows.browse.browsed_run import BrowsedRun
from gristmill.flows.browse.cluster_pages import steps_with_clusters
from gristmill.flows.browse.cut_pages import link_of_cut
from gristmill.flows.browse.domain_page import steps_with_domains
from gristmill.flows.browse.step_pages import trainings
from gristmill.flows.pages.page_elements import (
    Inline,
    Link,
    Note,
    Page,
    Section,
    ShareBar,
    Span,
    Table,
    table,
)
from gristmill.flows.questions.status import (
    StageState,
    describe_running,
    stage_states,
)
from gristmill.flows.report.report_facts import funnel, top_reasons
from gristmill.flows.report.stage_summaries import Counts, StageCounts

MOST_REASONS = 6
STATE_MARKS = {"committed": "good", "corrupt": "bad"}


def overview_page(run: BrowsedRun, query: NoQuery) -> Page:
    """All stages with their states, the funnel, and links to every listing."""
    rows = funnel(run.summaries(), run.session.manifest.steps)
    subject = (
        f"{run.session.manifest_file}, store {mask_text(str(run.session.store.root))}"
    )
    start = (
        f"No documents are read yet. Start with `{run.session.command('run')}`; "
        "what is committed appears here."
    )
    sections = [_funnel_section(run, rows), _source_section(rows)] if rows else []
    parts = [Note(subject)] if rows else [Note(subject), Note(start, "plain")]
    return Page(run.name, [*sections, _stage_section(run)], parts)


def _funnel_section(run: BrowsedRun, rows: Sequence[StageCounts]) -> Section:
    read = rows[0].kept or 1
    lines = []
    for row in rows:
        reasons: list[Inline] = []
        for reason, count in top_reasons(row.dropped, row.quarantined, MOST_REASONS):
            query = Search(step=row.stage, reason=reason)
            if reason == "quarantined":
                query = Search(step=row.stage, outcome=reason)
            cut = link_of_cut(run, row.stage, reason)
            reasons += [
                ", " if reasons else "",
                # What could not be read is in no list of documents.
                reason if row is rows[0] else Link(reason, query.link()),
                f" {count:,}",
                [" (", Link("its cut", cut), ")"] if cut else "",
            ]
        share = ShareBar(row.kept / read)
        size = row.bytes_kept / 1e6
        lines.append([row.stage, row.read, row.kept, size, share, reasons])
    columns = {"read": ",", "kept": ",", "MB kept": ",.2f", "": "", "dropped by": ""}
    return Section("Documents after each step", [table({"step": "", **columns}, lines)])


def _source_section(rows: Sequence[StageCounts]) -> Section:
    lines = []
    for name, counts in sorted(rows[0].sources.items()):
        kept = rows[-1].sources.get(name, Counts()).kept
        share = kept / counts.read if counts.read else None
        link = Link(name, Search(source=name).link())
        lines.append([link, counts.read, kept, share])
    columns = {"source": "", "read": ",", "left": ",", "share": ".1%"}
    return Section("Sources", [table(columns, lines, {"left": "after all steps"})])


def _stage_section(run: BrowsedRun) -> Section:
    lines = []
    for row in stage_states(run.session):
        link = _listing_of(run, row.stage)
        mark: Any = STATE_MARKS.get(row.state, "masked")
        lines.append(
            [
                Link(row.stage, link) if link else row.stage,
                Span(row.state, mark),
                "" if row.seconds is None else f"{row.seconds:,.1f}",
                "" if row.bytes is None else f"{row.bytes / 1e6:,.2f}",
                _remark(row),
            ]
        )
    return Section(
        "Stages",
        [
            Table(
                ["stage", "state", "seconds", "MB", ""],
                lines,
                {2, 3},
                {"MB": "of its output"},
            )
        ],
    )


def _remark(row: StageState) -> str:
    """The progress of a running stage, or why one is not committed."""
    if row.owner is not None:
        return describe_running(row, time.time())
    return row.details or ""


def _listing_of(run: BrowsedRun, stage: str) -> str:
    """The page about a stage; empty if there is none."""
    if stage in run.packed_sets():
        return address(ROWS_PAGE, stage)
    if stage in trainings(run):
        return address(TRAINING_PAGE, stage)
    if stage in steps_with_domains(run):
        return address(DOMAINS_PAGE, stage)
    return (
        address(CLUSTERS_PAGE, stage)
        if (DOCUMENTS, stage) in steps_with_clusters(run)
        else ""
    )


def navigation(run: BrowsedRun) -> list[Link]:
    """Links to the listings that a run has by now."""
    links = [Link("overview", "/")]
    for name in run.corpora():
        corpus = corpus_parameter(name)
        links.append(Link(name, address(DOCUMENTS, corpus=corpus)))
    if DOCUMENTS in run.corpora():
        links.append(Link("search", address(SEARCH_PAGE)))
        links.append(Link("cuts", address(CUTS_PAGE)))
    for step in steps_with_domains(run)[:1]:
        links.append(Link("domains", address(DOMAINS_PAGE, step)))
    for name, step in steps_with_clusters(run)[:1]:
        corpus = corpus_parameter(name)
        links.append(Link("duplicates", address(CLUSTERS_PAGE, step, corpus=corpus)))
    for stage in run.packed_sets()[:1]:
        links.append(Link("rows", address(ROWS_PAGE, stage)))
    for stage in trainings(run)[:1]:
        links.append(Link("training", address(TRAINING_PAGE, stage)))
    return links

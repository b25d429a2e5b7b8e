"""The first page: the stages of a run, its documents after each step, and links to
every listing.
"""

from __future__ import annotations

from collections.abc import Sequence

from gristmill.core.secrets import mask_text
from gristmill.dataprep.conservation import top_reasons
from gristmill.flows.browser.browsed_run import BrowsedRun
from gristmill.flows.browser.cluster_pages import steps_with_clusters
from gristmill.flows.browser.cut_pages import link_of_cut
from gristmill.flows.browser.search_page import steps_with_domains
from gristmill.flows.browser.step_pages import trainings
from gristmill.flows.pages.addresses import DOCUMENTS, Search, address
from gristmill.flows.pages.page_elements import (
    Inline,
    Link,
    Note,
    Page,
    Section,
    ShareBar,
    flatten,
    table,
)
from gristmill.flows.questions.status import stage_parts, stage_states
from gristmill.flows.report.facts import funnel
from gristmill.flows.report.stage_summaries import Counts, StageCounts

MOST_REASONS = 6


def overview_page(run: BrowsedRun) -> Page:
    """All stages with their states, the funnel, and links to every listing."""
    rows = funnel(run.summaries(), run.session.manifest.steps)
    subject = (
        f"{run.session.manifest_file}, store {mask_text(str(run.session.store.root))}"
    )
    start = (
        f"No documents have been read yet. Start with `{run.session.command('run')}`; "
        "committed stages appear here."
    )
    parts, sections = [Note(subject)], []
    if rows:
        sources = []
        for name, counts in sorted(rows[0].sources.items()):
            kept = rows[-1].sources.get(name, Counts()).kept
            share = kept / counts.read if counts.read else None
            link = Link(name, Search(source=name).link())
            sources.append([link, counts.read, kept, share])
        columns = {"source": "", "read": ",", "kept": ",", "share": ".1%"}
        by_source = table(columns, sources, {"kept": "after all steps"})
        sections = [_funnel_section(run, rows), Section("Sources", [by_source])]
    else:
        parts.append(Note(start, "plain"))
    listings = {
        step: address("duplicates", step)
        for corpus, step in steps_with_clusters(run)
        if corpus == DOCUMENTS
    }
    listings |= {step: address("domains", step) for step in steps_with_domains(run)}
    listings |= {stage: address("training", stage) for stage in trainings(run)}
    listings |= {stage: address("rows", stage) for stage in run.packed_sets()}
    states = stage_parts(stage_states(run.session), listings)
    stages = Section("Stages", flatten(states))
    return Page(run.name, [*sections, stages], parts)


def _funnel_section(run: BrowsedRun, rows: Sequence[StageCounts]) -> Section:
    read = rows[0].kept or 1
    lines = []
    for row in rows:
        reasons: list[Inline] = []
        for reason, count in top_reasons(row.dropped, row.quarantined, MOST_REASONS):
            query = Search(step=row.stage, reason=reason)
            if reason == "quarantined":
                query = Search(step=row.stage, outcome="quarantined")
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


def navigation(run: BrowsedRun) -> list[Link]:
    """Links to the listings that a run has by now."""
    links = [Link("overview", "/")]
    corpora = run.corpora()
    links += [Link(name, address(DOCUMENTS, corpus=name)) for name in corpora]
    if DOCUMENTS in corpora:
        links += [Link("search", address("search")), Link("cuts", address("cuts"))]
    listings = {
        "domains": steps_with_domains(run),
        "rows": run.packed_sets(),
        "training": trainings(run),
    }
    links += [
        Link(name, address(name, stages[0]))
        for name, stages in listings.items()
        if stages
    ]
    for corpus, step in steps_with_clusters(run)[:1]:
        links.append(Link("duplicates", address("duplicates", step, corpus=corpus)))
    return links

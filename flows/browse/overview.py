"""The first page: what of a run is made, what is left of its documents after each step, and where to look next."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from gristmill.core.secrets import mask_text
from gristmill.flows.browse.addresses import DOCUMENTS, Search, address
from gristmill.flows.browse.browsed_run import BrowsedRun
from gristmill.flows.browse.cluster_pages import CLUSTERS_PAGE, address_of, steps_with_clusters
from gristmill.flows.browse.cut_pages import CUTS_PAGE, link_of_cut
from gristmill.flows.browse.domain_page import DOMAINS_PAGE, steps_with_domains
from gristmill.flows.browse.row_pages import ROWS_PAGE, TRAINING_PAGE
from gristmill.flows.browse.search_page import SEARCH_PAGE
from gristmill.flows.browse.step_pages import trainings
from gristmill.flows.questions.status import describe_running, stage_states
from gristmill.flows.report.report_facts import funnel, top_reasons

MOST_REASONS = 6


def overview_page(run: BrowsedRun) -> dict[str, Any]:
    """All stages with their states, the funnel, and links to every listing."""
    states = stage_states(run.session)
    summaries = {name: run.summary(name) for name in run.committed()}
    rows = funnel(summaries, run.session.manifest.steps)
    read = rows[0]["kept"] if rows else 0
    links = {row["stage"]: _listing(run, row["stage"]) for row in states}
    return {
        "name": run.name,
        "store": mask_text(str(run.session.store.root)),
        "manifest": run.session.manifest_file,
        "stages": [{**row, "link": links[row["stage"]], "said": _said(row)} for row in states],
        "funnel": [
            {
                "step": row["stage"],
                "read": row["read"],
                "kept": row["kept"],
                "width": _width(row["kept"], read),
                "megabytes": row["bytes_kept"] / 1e6,
                "reasons": [
                    _reason(run, row["stage"], reason, count, row["stage"] == rows[0]["stage"])
                    for reason, count in top_reasons(row, MOST_REASONS)
                ],
            }
            for row in rows
        ],
        "sources": [
            {
                "name": name,
                "read": part["read"],
                "kept": rows[-1]["sources"].get(name, {}).get("kept", 0),
                "link": Search(source=name).link(),
            }
            for name, part in sorted(rows[0].get("sources", {}).items())
        ]
        if rows
        else [],
        "run_command": run.session.command("run"),
    }


def _said(row: Mapping[str, Any]) -> str:
    """Why a stage is not committed, or how far it is."""
    return describe_running(row, time.time()) if "owner" in row else str(row.get("details", ""))


def _width(kept: int, read: int) -> float:
    return round(600 * kept / read, 1) if read else 0.0


def _reason(run: BrowsedRun, step: str, reason: str, count: int, is_reading: bool) -> dict[str, Any]:
    """A rule with how many it dropped; what could not be read is in no list of documents."""
    found = Search(step=step, outcome="quarantined") if reason == "quarantined" else Search(step=step, reason=reason)
    return {
        "reason": reason,
        "count": count,
        "list": None if is_reading else found.link(),
        "cut": link_of_cut(run, step, reason),
    }


def _listing(run: BrowsedRun, stage: str) -> str | None:
    """The page that has most to say of a stage."""
    if stage in run.packed_sets():
        return address(ROWS_PAGE, stage)
    if stage in trainings(run):
        return address(TRAINING_PAGE, stage)
    if stage in steps_with_domains(run):
        return address(DOMAINS_PAGE, stage)
    return next(
        (
            address(CLUSTERS_PAGE, step, corpus=address_of(corpus))
            for corpus, step in steps_with_clusters(run)
            if stage == step and corpus == DOCUMENTS
        ),
        None,
    )


def navigation(run: BrowsedRun) -> list[tuple[str, str]]:
    """The listings that a run has by now: title and address."""
    found = [("overview", "/")]
    found += [
        ("documents" if name == DOCUMENTS else name, address(DOCUMENTS, corpus=address_of(name)))
        for name in run.corpora()
    ]
    found += [("search", address(SEARCH_PAGE)), ("cuts", address(CUTS_PAGE))] if DOCUMENTS in run.corpora() else []
    domains = steps_with_domains(run)
    found += [("domains", address(DOMAINS_PAGE, domains[0]))] if domains else []
    clusters = steps_with_clusters(run)
    found += (
        [("duplicates", address(CLUSTERS_PAGE, clusters[0][1], corpus=address_of(clusters[0][0])))] if clusters else []
    )
    sets = run.packed_sets()
    found += [("rows", address(ROWS_PAGE, sets[0]))] if sets else []
    trained = trainings(run)
    return found + ([("training", address(TRAINING_PAGE, trained[0]))] if trained else [])

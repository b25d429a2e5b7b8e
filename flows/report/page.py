"""The report of a run: one self-contained HTML file, readable on a phone, on paper and without a network."""

from __future__ import annotations

import hashlib
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import yaml
from markupsafe import escape

import gristmill.flows.questions as questions
from gristmill.core.files import atomic_write, canonical_json
from gristmill.core.secrets import mask_known, mask_secrets
from gristmill.flows.questions.status import duration
from gristmill.flows.report.document_sections import document_sections
from gristmill.flows.report.mixture import mixture_rows
from gristmill.flows.report.page_elements import Details, Figure, Note, Part, Section, Table, Text, definitions, page
from gristmill.flows.report.pictures import stacked_bars
from gristmill.flows.report.report_facts import Facts, gather_facts
from gristmill.flows.report.training import loss_rows, spikes, training_section
from gristmill.flows.running.run_records import RunRecord
from gristmill.flows.running.session import Session
from gristmill.flows.stages.stage import Stage, imported
from gristmill.mixtures.user_code import name_code

REPORT = "report.html"
MINUTE = "%Y-%m-%d %H:%M"
NOTE = re.compile("(<!--run-->).*?(<!--end of run-->)", re.DOTALL)
"""Which run a page is of, as its template marks it."""
EARLIER_RUNS = 5
"""So many reports are looked at for one that is made of the same."""
SOURCES = (Path(__file__).parent, Path(questions.__path__[0]))
"""What of gristmill makes a report."""


_drawing = threading.Lock()


def draw_ahead(session: Session) -> None:
    """Draw what the report will show, for whoever writes it to find; nobody hears of errors: the report has them too."""
    with _drawing, suppress(Exception):
        render_report(session, None)


def write_report(session: Session, record: RunRecord) -> Path:
    """Write `report.html` into a run's folder.

    A run that made nothing has the report of the one before it, but for the line that says which run it is of.
    """
    path, mark = record.folder / REPORT, f"<!-- {_ingredients(session, record.content)} -->\n"
    earlier = _earlier_report(record, mark)
    if earlier is None:
        with _drawing:
            text = render_report(session, record.content) + mark
    else:
        text = NOTE.sub(lambda found: found[1] + str(escape(run_note(record.content))) + found[2], earlier, count=1)
    with atomic_write(path) as sink:
        sink.write(mask_known(text).encode())
    return path


def _ingredients(session: Session, record: Mapping[str, Any]) -> str:
    """A name of all that a report is made of, but for the time and the state of its run."""
    code = {path.name: path.stat().st_mtime_ns for folder in SOURCES for path in sorted(folder.rglob("*.*"))}
    commits = {
        name: None if (folder := session.committed(name)) is None else (folder.path / "_SUCCESS").read_text()
        for name in session.plan
    }
    parts = {
        "code": code,
        "commits": commits,
        "manifest": mask_secrets(record["manifest"]),
        "fingerprints": {name: (node.fingerprint, node.alias) for name, node in session.plan.items()},
        "store": str(session.store.root),
    }
    return hashlib.sha256(canonical_json(parts)).hexdigest()


def _earlier_report(record: RunRecord, mark: str) -> str | None:
    """The report of a run not long before, if it is made of the same."""
    runs = sorted((path.name for path in record.folder.parent.iterdir()), reverse=True)
    for name in islice((name for name in runs if name < record.folder.name), EARLIER_RUNS):
        path = record.folder.parent / name / REPORT
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        if text.endswith(mark):
            return text
    return None


def render_report(session: Session, record: dict[str, Any] | None, write: Callable[..., str] = page) -> str:
    """Everything that is committed for a manifest, as HTML or in the form that `write` gives the parts of a page."""
    facts = gather_facts(session)
    kinds = {name: node.stage for name, node in session.plan.items() if name in facts["summaries"]}
    # What was prepared stands before what was trained on it.
    trainings = next((place for place, stage in enumerate(kinds.values()) if stage.trains), len(kinds))
    sections = [
        *document_sections(facts),
        *stage_sections(facts, dict(islice(kinds.items(), trainings))),
        training_section(facts),
        spikes(facts),
        *stage_sections(facts, dict(islice(kinds.items(), trainings, None))),
        costs(facts),
        lineage(facts, record),
    ]
    shown = [section for section in sections if section is not None]
    if (columns := definitions(shown)) is not None:
        shown.append(columns)
    note = run_note(record) if record else f"What the store had on {time.strftime(MINUTE)}"
    return write(facts["name"], shown, cards=cards(facts), note=note, contents=True)


def run_note(record: Mapping[str, Any]) -> str:
    """Which run a report is of."""
    return f"gristmill run of {time.strftime(MINUTE, time.localtime(record['started']))}, {record['state']}"


def stage_sections(facts: Facts, kinds: Mapping[str, Stage]) -> Iterator[Section]:
    """What the description of each stage says that the report shows of it.

    Args:
        facts: with the summaries of all of them.
        kinds: name in the plan -> stage; where they differ, titles have the name.
    """
    for name, stage in kinds.items():
        for path in stage.report:
            found: Section | None = imported(path)(facts, name)
            if found is not None:
                yield found if name == stage.name else replace(found, title=f"{found.title}: {name}")


def cards(facts: Facts) -> list[tuple[str, str]]:
    """The four numbers that people ask for first, and the time."""
    found = []
    if facts["funnel"]:
        first, last = facts["funnel"][0], facts["funnel"][-1]
        found += [("documents read", f"{first['read']:,}"), ("documents kept", f"{last['kept']:,}")]
    if "packed" in facts:
        found.append(("training tokens", f"{sum(row['tokens'] for row in mixture_rows(facts)):,}"))
    for row in loss_rows(facts)[:1]:
        found.append(("pre-training loss", f"{row['last']:.3f}"))
    return [*found, ("time of all stages", duration(sum(stage["seconds"] or 0 for stage in facts["stages"])))]


def costs(facts: Facts) -> Section | None:
    """Time, processor time, memory and disk of every stage."""
    done = [stage for stage in facts["stages"] if stage["seconds"] is not None]
    if not done:
        return None
    rows = [
        [
            stage["stage"],
            f"{stage['seconds']:,.1f}",
            f"{stage['bytes'] / 1e6:,.2f}",
            f"{stage['cost']['cpu_seconds']:,.1f}" if stage["cost"] else "",
            f"{stage['cost']['peak_memory_bytes'] / 1e6:,.0f}" if stage["cost"] else "",
        ]
        for stage in done
    ]
    bars = [(stage["stage"], {"seconds": stage["seconds"]}) for stage in done]
    return Section(
        "Time and cost",
        [
            Figure(
                stacked_bars(bars, "seconds"), "Time of every stage when it was run, also where this run reused it."
            ),
            Table(["stage", "seconds", "MB written", "CPU seconds", "MB of memory"], rows, {1, 2, 3, 4}),
        ],
    )


def provenance(stage: Mapping[str, Any]) -> str:
    """Remark on a stage's output: not made yet, equal to an earlier one, or kept of an earlier version."""
    if stage["seconds"] is None:
        return "not run"
    remarks = [f"every byte as in {stage['identity']}"] if stage["identity"] else []
    if stage["kept_version"] is not None:
        remarks.append(f"kept: made by version {stage['kept_version']} of the stage, now {stage['version']}")
    return "; ".join(remarks)


def lineage(facts: Facts, record: dict[str, Any] | None) -> Section:
    """Every stage's output and what it was made from; versions; the manifest as it was resolved."""
    rows = [
        [
            stage["stage"],
            stage["fingerprint"],
            ", ".join(stage["inputs"]) or "the sources",
            provenance(stage),
        ]
        for stage in facts["stages"]
    ]
    versions: dict[str, str] = next((s["versions"] for s in reversed(facts["stages"]) if s["versions"]), {})
    text = ", ".join(f"{name} {version}" for name, version in versions.items())
    parts: list[Part] = [
        Table(["stage", "fingerprint", "made from", ""], rows),
        Note(text),
        Note(f"Store: `{facts['store']}`"),
    ]
    if record:
        manifest = yaml.safe_dump(name_code(mask_secrets(record["manifest"])), sort_keys=False, allow_unicode=True)
        parts.append(Details("The manifest, with every default", [Text([(manifest, "")], columns=True)]))
    return Section("Lineage", parts)

"""The report of a run: one self-contained file, readable on a phone, on paper and
without a network.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from markupsafe import escape

from gristmill.core.files import json_digest, write_text
from gristmill.core.secrets import mask_known, mask_secrets
from gristmill.core.store import library_versions
from gristmill.flows.pages.page_elements import (
    ByName,
    Details,
    Figure,
    MaybeSection,
    Page,
    Section,
    Span,
    Text,
    section_of,
    table,
)
from gristmill.flows.pages.page_html import html_file
from gristmill.flows.pages.pictures import stacked_bars
from gristmill.flows.questions.find_documents import committed_folders
from gristmill.flows.questions.status import duration
from gristmill.flows.report.document_sections import document_sections
from gristmill.flows.report.facts import (
    Facts,
    gather_facts,
)
from gristmill.flows.report.mixture import mixture_rows
from gristmill.flows.report.training import loss_rows, spikes, training_section
from gristmill.flows.running.run_records import RunRecord
from gristmill.flows.running.session import Session
from gristmill.flows.stages.plan import Node, Plan
from gristmill.flows.stages.stage import Stage, imported
from gristmill.mixtures.user_code import name_code

REPORT = "report.html"
MINUTE = "%Y-%m-%d %H:%M"
NOTE = re.compile("(<!--run-->).*?(<!--end of run-->)", re.DOTALL)
"""The line about the run of a page, as its template marks it."""


def write_report(session: Session, record: RunRecord) -> Path:
    """Write `report.html` into a run's folder.

    A run without new outputs gets the last report with another line about the run.
    """
    path = record.folder / REPORT
    ingredients = [
        library_versions(),
        str(session.store.root),
        {
            name: (folder.path / "_SUCCESS").read_text()
            for name, folder in committed_folders(session).items()
        },
        mask_secrets(record.content["manifest"]),
        [(node.fingerprint, node.alias) for node in session.plan.values()],
    ]
    digest = json_digest(ingredients)
    mark = f"<!-- {digest} -->\n"
    last = max(path.parent.parent.glob(f"*/{REPORT}"), default=None)
    text = "" if last is None else last.read_text(encoding="utf-8")
    if text.endswith(mark):
        note = str(escape(run_note(record.content)))
        text = NOTE.sub(lambda match: match[1] + note + match[2], text, count=1)
    else:
        text = render_report(session, record.content) + mark
    write_text(path, mask_known(text))
    return path


def render_report(
    session: Session,
    record: ByName[Any] | None,
    write: Callable[[Page], str] = html_file,
) -> str:
    """All committed outputs of a manifest as a page, written as HTML or by `write`."""
    facts = gather_facts(session)
    stages = [
        (name, node.stage)
        for name, node in session.plan.items()
        if name in facts.summaries
    ]
    # Prepared data stands before the trainings on it.
    trains = [stage.torchrun for _, stage in stages]
    first_training = trains.index(True) if True in trains else len(stages)
    candidates = [
        *document_sections(facts),
        *stage_sections(facts, dict(stages[:first_training])),
        training_section(facts),
        spikes(facts),
        *stage_sections(facts, dict(stages[first_training:])),
        costs(facts),
        lineage(facts, session.plan, None if record is None else record["manifest"]),
    ]
    sections = [section for section in candidates if section is not None]
    note = f"What the store had on {time.strftime(MINUTE)}"
    if record is not None:
        note = run_note(record)
    return write(
        Page(facts.name, sections, note=note, cards=cards(facts), contents=True)
    )


def run_note(record: ByName[Any]) -> str:
    """A line about the run of a report."""
    return (
        f"gristmill run of {time.strftime(MINUTE, time.localtime(record['started']))}, "
        f"{record['state']}"
    )


def stage_sections(facts: Facts, stages: ByName[Stage]) -> Iterator[Section]:
    """The sections that the description of each stage names.

    Args:
        facts: with the summaries of all of them.
        stages: name in the plan -> stage; a name that differs from the stage's becomes
            part of the title.
    """
    for name, stage in stages.items():
        for path in stage.report:
            section: MaybeSection = imported(path)(facts, name)
            if section is not None:
                yield (
                    section
                    if name == stage.name
                    else replace(section, title=f"{section.title}: {name}")
                )


def cards(facts: Facts) -> list[tuple[str, str]]:
    """The four numbers that people ask for first, and the time."""
    numbers = []
    if facts.funnel:
        numbers += [
            ("documents read", f"{facts.funnel[0].read:,}"),
            ("documents kept", f"{facts.funnel[-1].kept:,}"),
        ]
    if facts.packed is not None:
        tokens = sum(row.tokens for row in mixture_rows(facts))
        numbers.append(("training tokens", f"{tokens:,}"))
    for row in loss_rows(facts)[:1]:
        numbers.append(("pre-training loss", f"{row.last:.3f}"))
    seconds = sum(stage.seconds for stage in facts.stages)
    return [*numbers, ("time of all stages", duration(seconds))]


def costs(facts: Facts) -> MaybeSection:
    """Time, processor time, memory and disk of every stage."""
    rows: list[list[object]] = []
    bars = []
    for stage in facts.stages:
        cost: list[float | None] = [None, None]
        if stage.cost is not None:
            cost = [stage.cost.cpu_seconds, stage.cost.peak_memory_bytes / 1e6]
        rows.append([stage.stage, stage.seconds, stage.bytes / 1e6, *cost])
        bars.append((stage.stage, {"seconds": stage.seconds}))
    if not rows:
        return None
    columns = {
        "stage": "",
        "seconds": ",.1f",
        "MB written": ",.2f",
        "CPU seconds": ",.1f",
        "MB of memory": ",.0f",
    }
    caption = "Time of every stage when it was run, also where this run reused it."
    figure = Figure(stacked_bars(bars, "seconds"), caption)
    return section_of("Time and cost", figure, table(columns, rows))


def provenance(node: Node) -> str:
    """Remark on a stage's output: equal to an earlier one, or kept of an earlier
    version.
    """
    remarks = [f"every byte as in {node.alias[:16]}"] if node.alias else []
    if node.kept_version is not None:
        remarks.append(
            f"kept: made by version {node.kept_version} of the stage, now "
            f"{node.stage.version}"
        )
    return "; ".join(remarks)


def lineage(facts: Facts, plan: Plan, manifest: object) -> MaybeSection:
    """Every stage's output and its inputs; versions; the resolved manifest, unless it
    is None.
    """
    rows = []
    for name, node in plan.items():
        inputs = ", ".join(node.inputs) or "the sources"
        remark = provenance(node) if name in facts.summaries else "not run"
        rows.append([name, node.fingerprint[:16], inputs, remark])
    versions = next((s.versions for s in reversed(facts.stages) if s.versions), {})
    masked = name_code(mask_secrets(manifest))
    text = Span(yaml.safe_dump(masked, sort_keys=False, allow_unicode=True))
    resolved = Details("The manifest, with every default", [Text([text], "columns")])
    return section_of(
        "Lineage",
        table({"stage": "", "fingerprint": "", "made from": "", "": ""}, rows),
        ", ".join(f"{name} {version}" for name, version in versions.items()),
        f"Store: `{facts.store}`",
        None if manifest is None else resolved,
    )

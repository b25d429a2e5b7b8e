"""The guard against vanished sources, domains and languages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gristmill.core.store import read_runs, store_at
from gristmill.flows.running.events import (
    RunEvent,
    StageFailed,
    StageFinished,
    StageWarning,
)
from gristmill.flows.running.launch import launch
from gristmill.flows.running.recorded_run import RunRequest
from gristmill.flows.running.session import open_session
from tests.commands import call
from tests.jsonl import write_jsonl
from tests.sessions import open_beside

pytestmark = pytest.mark.slow

MANIFEST = """
name: guarded
sources:
  calls: {path: calls.jsonl, id_field: url}
  prose: {path: prose.jsonl, id_field: url}
prepare:
  - dedup
  - opt_outs
engine: {workers: 1}
"""
CALL = (
    "The assistant may call the function book with a name, a date and a number of "
    "guests, and tells {name} that the table for {guests} is booked, the kitchen is "
    "open until late, and the garden is closed when it rains in the evening hours. "
    "The function returns a confirmation with the hour and the place at the window or "
    "at the wall; if no table is free, it returns the next hour at which one is, and "
    "the assistant asks whether that would do, before it calls the function again."
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a templated source, another one, and the manifest of both."""
    folder = tmp_path_factory.mktemp("guard")
    calls = [
        {
            "url": f"https://calls.org/{number}",
            "text": CALL.format(name=f"Guest{number}", guests=number),
        }
        for number in range(30)
    ]
    prose = [
        {
            "url": f"https://prose.org/{number}",
            "text": " ".join(f"w{number}x{place}" for place in range(40)),
        }
        for number in range(30)
    ]
    for name, rows in (("calls", calls), ("prose", prose)):
        write_jsonl(folder / f"{name}.jsonl", rows)
    (folder / "m.yaml").write_text(MANIFEST)
    return folder


def run(folder: Path, *overrides: str) -> tuple[int, list[RunEvent]]:
    """Run the manifest, and return the exit code and all events."""
    session = open_beside(folder / "m.yaml", *overrides)
    events: list[RunEvent] = []
    code = launch(RunRequest(session, list(session.plan), frozenset(), [events.append]))
    return code, events


def warnings_of(events: list[RunEvent]) -> list[str]:
    return [event.node.name for event in events if isinstance(event, StageWarning)]


def outcomes(events: list[RunEvent]) -> dict[str, str]:
    return {
        event.node.name: event.outcome.how
        for event in events
        if isinstance(event, StageFinished)
    }


def losses(folder: Path, *options: str) -> dict[str, Any]:
    result = call(
        *("losses", folder / "m.yaml", "--store", folder / "store"),
        *options,
        "--json",
        catch_exceptions=False,
    )
    report: dict[str, Any] = json.loads(result.stdout)
    return report


def test_vanished_source_is_a_warning_by_default(folder: Path) -> None:
    code, events = run(folder)
    assert code == 0
    # of the source and its domain
    assert warnings_of(events) == ["dedup"]
    ((_, record),) = read_runs(store_at(str(folder / "store")))
    assert len(record["stages"]["dedup"]["warnings"]) == 1
    report = losses(folder)
    vanished = [group for group in report["groups"] if group["vanished"]]
    assert [
        (group["column"], group["group"], group["read"], group["dropped"])
        for group in vanished
    ] == [("source", "calls", 30, 29), ("domain", "calls.org", 30, 29)]
    ((step, loss),) = vanished[0]["steps"].items()
    assert (step, loss["reason"]) == ("dedup", "near_duplicate")
    assert len(set(loss["examples"])) == 3
    assert list(report["duplicates"]) == ["dedup"]


def test_moved_guard_judges_committed_outputs(folder: Path) -> None:
    run(folder)
    code, events = run(folder, "guard.max_loss=0.99")
    assert (code, warnings_of(events)) == (0, [])
    assert set(outcomes(events).values()) == {"Cached"}
    code, events = run(folder, "guard.action=error")
    assert code == 1
    assert [event.node.name for event in events if isinstance(event, StageFailed)] == [
        "dedup"
    ]
    assert outcomes(events) == {"ingest": "Cached"}


def test_step_has_a_guard_of_its_own(folder: Path) -> None:
    manifest = MANIFEST.replace("- dedup", "- {dedup: {}, guard: {action: ignore}}")
    (folder / "own.yaml").write_text(manifest)
    overrides = ["documents.format=jsonl"]
    session, plain = (
        open_session(str(folder / name), overrides, str(folder / "store"))
        for name in ("own.yaml", "m.yaml")
    )
    fingerprints = {name: node.fingerprint for name, node in session.plan.items()}
    assert fingerprints == {name: node.fingerprint for name, node in plain.plan.items()}
    guards = session.manifest.guards
    assert (guards["dedup"].action, guards["opt_outs"].action) == ("ignore", "warn")


def test_small_groups_are_not_checked(folder: Path) -> None:
    run(folder)
    _, events = run(folder, "guard.min_documents=31")
    assert warnings_of(events) == []
    assert not any(
        group["vanished"]
        for group in losses(folder, "--set", "guard.min_documents=31")["groups"]
    )

"""A run that made nothing reuses the previous run's report with a first line of its
own.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gristmill.core.store import StageFolder
from gristmill.flows.pages.page_elements import Page
from gristmill.flows.pages.page_html import html_file
from gristmill.flows.questions.threshold_samples import Cut
from gristmill.flows.report import facts as report_facts
from gristmill.flows.report import prerender
from gristmill.flows.report import report as run_report
from gristmill.flows.report.facts import Facts
from gristmill.flows.running.events import StageFinished
from gristmill.flows.running.run_records import RunRecord


class Project:
    """A store with one committed stage, and a list of its rendered reports."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.rendered = folder, list[str]()
        self.commit("1")
        self.session: Any = SimpleNamespace(
            plan={
                "ingest": SimpleNamespace(
                    fingerprint="f",
                    alias="",
                    inputs={},
                    stage=SimpleNamespace(training=None),
                )
            },
            store=SimpleNamespace(root=folder),
            committed=lambda stage: SimpleNamespace(path=folder / "ingest"),
        )

    def commit(self, content: str) -> None:
        (self.folder / "ingest").mkdir(exist_ok=True)
        (self.folder / "ingest" / "_SUCCESS").write_text(content)

    def render(self, session: Any, record: dict[str, Any]) -> str:
        self.rendered.append(record["name"])
        return html_file(Page("a", note=run_report.run_note(record)))

    def report(self, name: str, started: float, seed: int = 1) -> str:
        folder = self.folder / "runs" / name
        folder.mkdir(parents=True)
        content = {
            "name": name,
            "started": started,
            "state": "completed",
            "manifest": {"seed": seed},
        }
        return run_report.write_report(
            self.session, RunRecord(folder, content)
        ).read_text()


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    new_project = Project(tmp_path)
    monkeypatch.setattr(run_report, "render_report", new_project.render)
    return new_project


def test_report_is_rendered_once_and_names_its_run(project: Project) -> None:
    first, second = (
        project.report("20260101-a", 0.0),
        project.report("20260102-a", 86_400.0),
    )
    assert project.rendered == ["20260101-a"]
    assert "of 1970-01-02" in second
    assert second.replace("1970-01-02", "1970-01-01") == first


def test_new_commit_or_manifest_renders_a_new_report(
    project: Project,
) -> None:
    project.report("20260101-a", 0.0)
    project.commit("2")
    project.report("20260102-a", 0.0)
    project.report("20260103-a", 0.0, seed=2)
    project.report("20260104-a", 0.0, seed=2)
    assert project.rendered == ["20260101-a", "20260102-a", "20260103-a"]


def test_other_version_of_gristmill_renders_a_new_report(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.report("20260101-a", 0.0)
    monkeypatch.setattr(run_report, "library_versions", lambda: {"gristmill": "0"})
    project.report("20260102-a", 0.0)
    assert project.rendered == ["20260101-a", "20260102-a"]


def test_moved_store_renders_a_new_report(project: Project, tmp_path: Path) -> None:
    project.report("20260101-a", 0.0)
    project.session.store.root = tmp_path / "elsewhere"
    project.report("20260102-a", 0.0)
    assert project.rendered == ["20260101-a", "20260102-a"]


def test_facts_are_gathered_again_only_for_new_commits(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    gather_calls: list[bool] = []
    monkeypatch.setattr(
        report_facts,
        "_gather",
        lambda session, folders, whole: gather_calls.append(whole) or Facts("a"),
    )
    for whole in (True, True, False):
        assert report_facts.gather_facts(project.session, whole) == Facts("a")
    assert gather_calls == [True]
    project.commit("2")
    for whole in (False, True):
        report_facts.gather_facts(project.session, whole)
    assert gather_calls == [True, False, True]


def test_documents_near_cuts_are_read_again_only_for_new_document_commits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    cut = Cut("rule", "key", "words", 50, 0, None, [], [])
    monkeypatch.setattr(
        report_facts,
        "describe_cuts",
        lambda *arguments: (calls.append(1), [replace(cut, dropped=len(calls))])[1],
    )
    monkeypatch.setattr(report_facts, "committed_inputs", lambda session: {})
    session: Any = SimpleNamespace(
        manifest=SimpleNamespace(steps={"filter": None}), plan={}
    )

    def cuts_after(**commits: str) -> list[int]:
        for name, content in commits.items():
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / "_SUCCESS").write_text(content)
        folders = {name: StageFolder(tmp_path / name) for name in commits}
        cuts = report_facts._cuts(session, folders, {})
        gathered = report_facts._Gathered(
            session, report_facts.commits_of(folders), Facts(cuts=cuts), True
        )
        monkeypatch.setattr(report_facts, "_last", gathered)
        return [cut.dropped for cut in cuts]

    assert cuts_after(ingest="1", filter="1") == [1]
    assert cuts_after(ingest="1", filter="1", mix="1") == [1]
    assert cuts_after(ingest="1", filter="2", mix="1") == [2]


def test_report_is_prerendered_once_all_documents_are_judged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    records, drawn = list[Any](), threading.Event()

    def render(session: Any, record: object) -> str:
        records.append(record)
        drawn.set()
        raise ValueError("nobody hears of it")

    monkeypatch.setattr(run_report, "render_report", render)
    kinds = {"ingest": False, "filter": True, "dedup": True, "mix": False}
    session: Any = SimpleNamespace(
        plan={
            name: SimpleNamespace(stage=SimpleNamespace(step=is_step or None))
            for name, is_step in kinds.items()
        },
        committed=lambda name: object() if name == "ingest" else None,
    )
    note = prerender.prerenderer(session)

    def on_stage_end(stage: str) -> None:
        note(StageFinished(SimpleNamespace(name=stage), None))  # type: ignore[arg-type]

    on_stage_end("ingest")
    on_stage_end("filter")
    assert records == []
    on_stage_end("dedup")
    assert drawn.wait(60)
    on_stage_end("mix")
    with run_report._rendering:
        assert records == [None]

"""A run that made nothing reuses the previous run's report with a first line of its
own.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gristmill.flows.pages.page_elements import Page
from gristmill.flows.pages.page_html import html_file
from gristmill.flows.report import report as run_report
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

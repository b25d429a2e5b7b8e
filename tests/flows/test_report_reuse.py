"""A run that made nothing has the report of the run before it, with a first line of its own."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gristmill.flows.report import page, parts, run_data
from gristmill.flows.store.runs import RunRecord


class Project:
    """A store with one committed stage, and what was rendered of it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.rendered = folder, list[str]()
        self.commit("1")
        self.session: Any = SimpleNamespace(
            plan={"ingest": SimpleNamespace(fingerprint="f", inputs={}, stage=SimpleNamespace(trained=None))},
            store=SimpleNamespace(root=folder),
            committed=lambda stage: SimpleNamespace(path=folder / "ingest"))

    def commit(self, content: str) -> None:
        (self.folder / "ingest").mkdir(exist_ok=True)
        (self.folder / "ingest" / "_SUCCESS").write_text(content)

    def render(self, session: Any, record: dict[str, Any]) -> str:
        self.rendered.append(record["name"])
        return parts.page("a", [], note=page.run_note(record))

    def report(self, name: str, started: float, seed: int = 1) -> str:
        folder = self.folder / "runs" / name
        folder.mkdir(parents=True)
        content = {"name": name, "started": started, "state": "completed", "manifest": {"seed": seed}}
        return page.write_report(self.session, RunRecord(folder, content)).read_text()


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    made = Project(tmp_path)
    monkeypatch.setattr(page, "render_report", made.render)
    return made


def test_it_is_rendered_once_and_says_which_run_it_is_of(project: Project) -> None:
    first, second = project.report("20260101-a", 0.0), project.report("20260102-a", 86_400.0)
    assert project.rendered == ["20260101-a"]
    assert "of 1970-01-02" in second
    assert second.replace("1970-01-02", "1970-01-01") == first


def test_another_commit_or_another_manifest_makes_another_report(project: Project) -> None:
    project.report("20260101-a", 0.0)
    project.commit("2")
    project.report("20260102-a", 0.0)
    project.report("20260103-a", 0.0, seed=2)
    project.report("20260104-a", 0.0, seed=2)
    assert project.rendered == ["20260101-a", "20260102-a", "20260103-a"]


def test_what_is_shown_is_gathered_again_for_new_commits_alone(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    gathered: list[bool] = []
    monkeypatch.setattr(run_data, "_gather", lambda session, folders, whole: (gathered.append(whole), {"a": 1})[1])
    for whole in (True, True, False):
        assert run_data.gather_facts(project.session, whole) == {"a": 1}
    assert gathered == [True]
    project.commit("2")
    for whole in (False, True):
        run_data.gather_facts(project.session, whole)
    assert gathered == [True, False, True]

"""`--json` prints only JSON, even for empty results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gristmill.core.store import Store
from gristmill.flows.running.session import open_session
from tests.commands import call


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "a.txt").write_text("some text")
    (tmp_path / "a.yaml").write_text("name: a\nsources: {a: {path: a.txt}}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GRISTMILL_STORE", str(tmp_path / "store"))
    return tmp_path


def printed(*arguments: str) -> object:
    return json.loads(call(*arguments).stdout)


def test_gc_lists_removable_outputs_with_their_size(project):
    folder = Store.at(project / "store").folder("ingest", "a", "f" * 64)
    folder.data.mkdir(parents=True)
    (folder.data / "part").write_bytes(b"12345")

    assert printed("gc", "--json") == {
        "deleted": False,
        "outputs": [{"path": str(folder.path), "bytes": 5}],
        "answers": 0,
    }
    assert printed("gc", "--json", "--delete") == {
        "deleted": True,
        "outputs": [{"path": str(folder.path), "bytes": 5}],
        "answers": 0,
    }
    assert not folder.path.exists()
    assert printed("gc", "--json") == {"deleted": False, "outputs": [], "answers": 0}


def test_verify_without_committed_outputs_reports_none(project):
    assert printed("verify", "a.yaml", "--json") == {"committed": [], "damage": {}}
    assert "no stage is committed yet; run:" in call("verify", "a.yaml").output


def test_empty_lists_are_printed_as_json(project):
    assert printed("runs", "--json") == []
    assert [
        row["state"] for row in printed("status", "a.yaml", "--json")["stages"]
    ] == ["missing"]
    assert [row["action"] for row in printed("plan", "a.yaml", "--json")] == ["make"]


def test_status_has_the_newest_run_with_its_exit_code_and_report(project):
    assert printed("status", "a.yaml", "--json")["run"] is None
    record = open_session("a.yaml", [], None).start_record()
    run = {"run": record.folder.name, "report": str(record.folder / "report.html")}
    assert printed("status", "a.yaml", "--json")["run"] == {
        **run,
        "state": "running",
        "exit_code": None,
        "message": None,
    }
    for state, exit_code in (("completed", 0), ("failed", 1), ("interrupted", 130)):
        record.finish(state, "why")
        assert printed("status", "a.yaml", "--json")["run"] == {
            **run,
            "state": state,
            "exit_code": exit_code,
            "message": "why",
        }


def test_metrics_are_printed_without_a_server(project):
    open_session("a.yaml", [], None).start_record()
    lines = call("runs", "--prometheus").stdout.splitlines()
    assert 'gristmill_run_state{name="a",state="running"} 1.0' in lines
    assert 'gristmill_stage_state{name="a",stage="ingest",state="waiting"} 1.0' in lines

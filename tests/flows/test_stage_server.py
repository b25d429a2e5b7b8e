"""A forked stage behaves as a started one: output, end, interrupt, death,
environment.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gristmill.core.files import write_json
from gristmill.flows.running import stage_server
from gristmill.flows.running.fork_server import ForkServer, ForkServerError, Server
from gristmill.flows.running.run import Runner, StageFailedError
from gristmill.flows.stages.registry import STAGES
from gristmill.mixtures.schema.engine import Engine
from gristmill.mixtures.steps.dedup import Dedup
from gristmill.mixtures.steps.filter import Filter
from tests.flows.conftest import toy_node
from tests.flows.test_run import is_running

Make = Callable[..., Runner]


@pytest.fixture
def forked(
    toy_runner: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Runner]]:
    """Return a factory for runners whose toy stages are forked."""
    monkeypatch.setattr(stage_server, "FORKABLE", ("gristmill_toy_stages:",))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    server = stage_server.StageServer(stage_server.__name__, {"PYTHONHASHSEED": "0"})
    yield lambda **configs: replace(toy_runner(**configs), server=server)
    server.close()
    assert not server.is_running


@pytest.mark.slow
def test_forked_stage_has_the_same_output_and_events(forked: Make) -> None:
    runner = forked(first={"n": 2}, second={})
    assert [runner.run_stage(stage).how for stage in runner.session.plan] == [
        "Completed",
        "Completed",
    ]
    assert (runner.folder("second").data / "1.txt").read_text() == "1"
    assert runner.emit.done == [1, 2]  # type: ignore[attr-defined]
    assert "a line for the log" in (runner.folder("second").logs / "1.log").read_text()
    assert 0 <= runner.folder("second").manifest()["cost"]["cpu_seconds"] < 5, (
        "the stage does not share modules that the server imported"
    )


@pytest.mark.slow
def test_forked_stage_resumes_after_sigkill_and_reports_failures(forked: Make) -> None:
    runner = forked(first={"n": 4}, second={"die_once": True}, failing={})
    runner.run_stage("first")
    with pytest.raises(StageFailedError, match="killed"):
        runner.run_stage("second")
    assert runner.run_stage("second").how == "Resumed"
    with pytest.raises(StageFailedError, match="the number 7 is not allowed here"):
        runner.run_stage("failing")


@pytest.mark.slow
def test_forked_stage_has_the_exit_code_of_a_program(forked: Make) -> None:
    with pytest.raises(StageFailedError, match="ended with code 3: last words"):
        forked(exiting={}).run_stage("exiting")


@pytest.mark.slow
def test_interrupt_kills_only_the_process_group_of_the_stage(
    forked: Make,
) -> None:
    runner = forked(first={"n": 1}, waiting={})
    runner.run_stage("first")
    main = threading.main_thread().ident or 0
    runner.emit.on_report = lambda event: signal.pthread_kill(main, signal.SIGINT)  # type: ignore[attr-defined]
    with pytest.raises(KeyboardInterrupt):
        runner.run_stage("waiting")
    pids = [
        int(pid)
        for pid in (runner.folder("waiting").data / "pids.txt").read_text().split()
    ]
    assert [pid for pid in pids if is_running(pid)] == []
    runner.emit.on_report = lambda event: None  # type: ignore[attr-defined]
    assert runner.run_stage("first", force=True).note == "same bytes as before", (
        "the server can fork another stage"
    )


@pytest.mark.slow
def test_stage_starts_without_a_dead_fork_server(
    forked: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = forked(first={"n": 1})
    assert runner.server is not None
    os.kill(runner.server._process.pid, signal.SIGKILL)
    runner.server._process.wait()
    assert runner.run_stage("first").how == "Completed"
    with pytest.raises(ForkServerError, match=r"has ended|ended with code"):
        runner.server.start({}, [], 1).begun()
    with monkeypatch.context() as dying:
        # it dies between the check and the fork
        dying.setattr(ForkServer, "is_running", property(lambda server: True))
        assert runner.run_stage("first", force=True).note == "same bytes as before"


def test_only_several_data_stages_and_trainings_of_proxies_are_forked() -> None:
    def node(name: str, run: str, torchrun: bool = False) -> Any:
        toy = toy_node(name, {})
        return replace(toy, stage=replace(toy.stage, run=run, torchrun=torchrun))

    plan = {
        "filter": node("filter", "gristmill.dataprep.filters.filter:run"),
        "mix": node("mix", "gristmill.tokenize.mixing.mix:run"),
        "pretrain": node(
            "pretrain", "gristmill.train.stages.pretrain:run", torchrun=True
        ),
        "own": node("own", "somebody.elses:run"),
    }
    assert [name for name in plan if stage_server.is_forkable(plan, name)] == [
        "filter",
        "mix",
    ]
    with stage_server.proxy_server(plan, Engine()) as server:
        assert server is not None
        assert server.forks_trainings
    with stage_server.proxy_server(plan, Engine(ranks=2)) as server:
        assert server is not None
        assert not server.forks_trainings
    assert stage_server.is_forkable(plan, "pretrain", with_trainings=True)
    assert not stage_server.is_forkable(plan, "own", with_trainings=True)
    with stage_server.stage_server(plan, ["filter", "pretrain"], Engine()) as server:
        assert server is None


def test_fork_server_starts_early_unless_the_run_was_completed_and_stops_if_unused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []

    def start() -> Any:
        started.append(SimpleNamespace(closed=0))
        return SimpleNamespace(
            close=lambda: setattr(started[-1], "closed", 1),
            driver=None,
            import_soon=lambda modules: None,
        )

    monkeypatch.setattr(stage_server, "_start", start)
    manifest, record = (
        tmp_path / "a.yaml",
        tmp_path / "store" / "runs" / "1" / "run.json",
    )
    manifest.write_text("name: a")
    store = str(tmp_path / "store")

    def begins(overrides: tuple[str, ...] = ()) -> bool:
        started_before = len(started)
        with stage_server.early_server(str(manifest), overrides, store):
            pass
        assert all(started_server.closed for started_server in started)
        return len(started) > started_before

    assert begins()
    write_json(
        record, {"state": "completed", "manifest_file": str(manifest), "overrides": []}
    )
    assert not begins()
    assert begins(("a=b",))
    write_json(
        record, {"state": "failed", "manifest_file": str(manifest), "overrides": []}
    )
    assert begins()
    write_json(
        record, {"state": "completed", "manifest_file": str(manifest), "overrides": []}
    )
    os.utime(record, (1, 1))
    assert begins(), "the manifest has changed since the start"
    node = toy_node("filter", {})
    plan = {
        name: replace(
            node,
            stage=replace(node.stage, run="gristmill.dataprep.filters.filter:run"),
        )
        for name in ("filter", "dedup")
    }
    with stage_server.early_server(str(manifest), (), store):
        with stage_server.stage_server(plan, list(plan), Engine()) as server:
            assert server is not None
            assert not started[-1].closed
        assert started[-1].closed, "the run uses the early server"


def test_lazily_imported_modules_are_imported_before_forking(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requested_modules: list[str] = []
    monkeypatch.setattr(
        stage_server,
        "_start",
        lambda: SimpleNamespace(
            close=lambda: None, driver=None, import_soon=requested_modules.extend
        ),
    )
    datatrove = Filter.model_validate(
        {"rules": [{"gopher_quality": {"dialect": "datatrove"}}]}
    )
    plan = {
        name: replace(toy_node(name, {}), stage=STAGES[name], settings=settings)
        for name, settings in (("filter", datatrove), ("dedup", Dedup()))
    }
    with stage_server.stage_server(plan, list(plan), Engine()):
        assert requested_modules == [
            "gristmill.dataprep.filters.filter",
            "gristmill.dataprep.words.spacy_preload",
            *stage_server.LATER,
            "gristmill.dataprep.dedup.dedup",
        ]
    assert STAGES["filter"].preload(Filter()) == []


@pytest.mark.parametrize(
    ("path", "size", "is_imported"),
    [
        ("a.jsonl", stage_server.LARGE_BYTES - 1, False),
        ("a.jsonl", stage_server.LARGE_BYTES, True),
        ("a.jsonl.gz", stage_server.LARGE_BYTES // 4, True),
    ],
)
def test_beam_is_imported_before_forking_for_large_sources(
    path: str, size: int, is_imported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested_modules: list[str] = []
    server = SimpleNamespace(
        close=lambda: None, driver=None, import_soon=requested_modules.extend
    )
    monkeypatch.setattr(stage_server, "_start", lambda: server)
    listing = [{"path": path, "size": size, "stamp": ""}]
    config = {"sources": {"web": {"listing": listing}}}
    plan = {
        "ingest": replace(
            toy_node("ingest", {}), stage=STAGES["ingest"], config=config
        ),
        "dedup": replace(
            toy_node("dedup", {}), stage=STAGES["dedup"], settings=Dedup()
        ),
    }
    with stage_server.stage_server(plan, list(plan), Engine()):
        assert (stage_server.BEAM in requested_modules) == is_imported


def test_worker_does_not_wait_for_imports_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gristmill_toy_module.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    ours, requests = socket.socketpair()
    with ours, requests:
        server = Server(requests, lambda request: 0)
        for modules in (["os", "gristmill_toy_module"], ["os"]):
            line, theirs = socket.socketpair()
            with line, theirs, open(os.devnull) as output:
                socket.send_fds(ours, [b"w"], [theirs.fileno(), output.fileno()])
                line.sendall(json.dumps({"modules": modules}).encode() + b"\n")
                assert server._answer_request()
        monkeypatch.setattr(os, "fork", iter((1, 2)).__next__)  # numbers of no children
        server._fork_ready_workers()
        waiting = [worker.request["modules"] for worker in server._pending]
        assert waiting == [["os", "gristmill_toy_module"]]
        server._import_one()
        server._fork_ready_workers()
        assert not server._pending
        server._woken.close()
        server._wake.close()
        for line in server._workers.values():
            line.close()
    sys.modules.pop("gristmill_toy_module")

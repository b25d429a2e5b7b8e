"""Events of a run reach the record, JSON lines, Prometheus and the final hook, and none
of their failures ends the run.
"""

from __future__ import annotations

import io
import json
import socket
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gristmill.core.files import read_json
from gristmill.core.secrets import mask_secrets
from gristmill.flows.cli import launch
from gristmill.flows.prefect.run_metrics import metrics_text
from gristmill.flows.report.server import metrics_link, serve_reports
from gristmill.flows.running.check_endpoints import unreachable_models
from gristmill.flows.running.events import (
    RunNotice,
    StageFailed,
    StageOutput,
    StageStarted,
    to_all,
)
from gristmill.flows.running.json_lines import JsonLines, JsonObserver
from gristmill.flows.running.notify import notify
from gristmill.flows.running.run import Runner, StageFailedError
from gristmill.flows.running.run_records import RunRecord
from gristmill.mixtures.schema.engine import Engine

Make = Callable[..., Runner]
SECRET = "/services/T000/B000/abcdefghijkl"


def run_recorded(runner: Runner, *observers: Any) -> RunRecord:
    """Run all stages with a record, which also holds a failure."""
    record = runner.session.start_record()
    recorded = replace(runner, emit=to_all(record.note, *observers))
    try:
        with record.until_end():
            for stage in list(runner.session.plan):
                recorded.run_stage(stage)
    except StageFailedError:
        pass
    notify(runner.session, record)
    return record


def samples(runner: Runner) -> dict[tuple[str, ...], float]:
    text = metrics_text(runner.session.store).decode()
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.mark.slow
def test_the_record_has_the_rows_and_the_failure_of_each_stage(
    toy_runner: Make,
) -> None:
    record = run_recorded(toy_runner(first={"n": 1}, failing={}))
    stages = read_json(record.folder / "run.json")["stages"]
    assert (stages["first"]["how"], stages["first"]["rows"]) == (
        "Completed",
        {"read": 1, "kept": 1},
    )
    assert "the number 7 is not allowed" in stages["failing"]["error"]


def test_unwritable_record_does_not_end_a_stage(
    toy_runner: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = toy_runner(first={"n": 1})
    record = runner.session.start_record()

    def full(record: RunRecord) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RunRecord, "save", full)
    node = runner.session.plan["first"]
    record.note(StageStarted(node, runner.folder("first"), resuming=False))
    record.note(StageFailed(node, "first: no"))
    assert record.content["stages"]["first"]["error"] == "first: no"


def test_a_stage_that_prints_does_not_wait_for_a_slow_store(
    toy_runner: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = toy_runner(first={"n": 1})
    record = runner.session.start_record()
    node = runner.session.plan["first"]
    saves, done = threading.Event(), threading.Event()

    def save(record: RunRecord) -> None:
        saves.set()
        assert done.wait(10)

    monkeypatch.setattr(RunRecord, "save", save)
    started = StageStarted(node, runner.folder("first"), resuming=False)
    slow = threading.Thread(target=record.note, args=(started,))
    slow.start()
    assert saves.wait(10)
    printing = threading.Thread(target=record.note, args=(StageOutput(node, "a"),))
    printing.start()
    printing.join(5)
    waits = printing.is_alive()
    done.set()
    slow.join()
    assert not waits


def test_run_without_models_imports_no_llm_client(
    toy_runner: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gristmill.dataprep.llm.client", None)
    session = toy_runner(first={"n": 1}).session
    assert unreachable_models(session, session.plan) == []


@pytest.mark.slow
def test_a_run_is_written_as_json_lines(toy_runner: Make) -> None:
    sink = io.StringIO()
    run_recorded(
        toy_runner(first={"n": 2}, second={}, failing={}), JsonObserver(JsonLines(sink))
    )
    lines = [json.loads(line) for line in sink.getvalue().splitlines()]
    assert all({"time", "level", "event"} <= line.keys() for line in lines)
    assert [
        (line["event"], line.get("stage"), line["level"])
        for line in lines
        if line["event"] != "stage_progress"
    ] == [
        ("stage_started", "first", "info"),
        ("stage_finished", "first", "info"),
        ("stage_started", "second", "info"),
        ("stage_warning", "second", "warning"),
        ("stage_finished", "second", "info"),
        ("stage_started", "failing", "info"),
        ("stage_failed", "failing", "error"),
    ]
    last = [line for line in lines if line["event"] == "stage_progress"][-1]
    assert (last["done"], last["total"], last["unit"]) == (2, 2, "shards")


def test_json_lines_mask_credentials() -> None:
    sink = io.StringIO()
    JsonObserver(JsonLines(sink))(RunNotice("s3://key:secret-secret@bucket"))
    line = json.loads(sink.getvalue())
    assert (line["event"], line["message"]) == ("run_notice", "s3://***@bucket")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "code", "state", "level"),
    [
        ({"first": {"n": 1}}, 0, "completed", "info"),
        ({"failing": {}}, 1, "failed", "error"),
    ],
)
def test_a_launched_run_with_json_lines_ends_with_its_state(
    toy_runner: Make,
    stage: dict[str, Any],
    code: int,
    state: str,
    level: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    session = toy_runner(**stage).session
    assert (
        launch.launch(
            session,
            list(session.plan),
            frozenset(),
            False,
            summarise=True,
            json_lines=True,
        )
        == code
    )
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[0]["event"] == "run_started"
    last = lines[-1]
    assert (last["event"], last["state"], last["level"]) == ("run_ended", state, level)


@pytest.mark.slow
def test_prometheus_metrics_contain_states_durations_and_rows(toy_runner: Make) -> None:
    runner = toy_runner(first={"n": 1}, failing={}, second={})
    run_recorded(runner)
    values = samples(runner)
    assert values["gristmill_run_state", "toy", "failed"] == 1
    assert values["gristmill_run_state", "toy", "running"] == 0
    assert values["gristmill_run_seconds", "toy"] > 0
    assert values["gristmill_stage_state", "toy", "first", "completed"] == 1
    assert values["gristmill_stage_state", "toy", "failing", "failed"] == 1
    assert values["gristmill_stage_state", "toy", "second", "waiting"] == 1
    assert values["gristmill_stage_rows", "read", "toy", "first"] == 1
    assert values["gristmill_stage_seconds", "toy", "first"] > 0


def test_prometheus_metrics_contain_progress_and_speed(
    toy_runner: Make,
) -> None:
    runner = toy_runner(first={"n": 1})
    record = runner.session.start_record()
    folder = runner.folder("first")
    record.note(StageStarted(runner.session.plan["first"], folder, resuming=False))
    (folder.path / "lease").mkdir(parents=True)
    (folder.path / "lease" / "1.json").write_text("{}")
    progress = {"done": 30, "total": 120, "unit": "steps", "tokens_per_second": 5000.0}
    (folder.path / "lease" / "1.progress.json").write_text(json.dumps(progress))
    values = samples(runner)
    assert values["gristmill_run_state", "toy", "running"] == 1
    assert values["gristmill_stage_state", "toy", "first", "running"] == 1
    assert values["gristmill_stage_progress", "toy", "first"] == 0.25
    assert values["gristmill_tokens_per_second", "toy", "first"] == 5000.0


@pytest.mark.slow
def test_metrics_are_served_beside_the_reports(toy_runner: Make) -> None:
    runner = toy_runner(first={"n": 1})
    run_recorded(runner)
    listening = socket.create_server(("127.0.0.1", 0))
    base = f"http://127.0.0.1:{listening.getsockname()[1]}"
    server = serve_reports(
        listening, "gristmill:secret", lambda: metrics_text(runner.session.store)
    )
    try:
        with urllib.request.urlopen(metrics_link(base, "gristmill:secret")) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain")
            assert (
                b'gristmill_run_state{name="toy",state="completed"} 1.0'
                in answer.read()
            )
        for url_without_token in (
            f"{base}/metrics",
            metrics_link(base, "gristmill:guess"),
        ):
            with pytest.raises(urllib.error.HTTPError, match="403"):
                urllib.request.urlopen(url_without_token)
    finally:
        server.should_exit = True


@pytest.fixture
def webhook() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Address of a server that keeps the received bodies and answers with an error."""
    bodies: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(
                json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            )
            self.send_error(500)

        def log_message(self, format: str, *args: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}{SECRET}", bodies
    server.shutdown()
    server.server_close()


@pytest.mark.slow
def test_webhook_is_notified_and_its_address_is_not_stored(
    toy_runner: Make,
    webhook: tuple[str, list[dict[str, Any]]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    url, bodies = webhook
    monkeypatch.setenv("TOY_HOOK", url)
    for hook in ("$TOY_HOOK", url):
        record = run_recorded(
            toy_runner(Engine(notify=hook, retries=0), first={"n": 1}, failing={})
        )
    assert [body["state"] for body in bodies] == ["failed", "failed"]
    assert bodies[0]["stages"]["first"]["rows"] == {"read": 1, "kept": 1}
    assert "7 is not allowed" in bodies[0]["text"]
    assert len(caplog.records) == 2, "the server's error is a warning"
    assert (
        SECRET
        not in (record.folder / "run.json").read_text()
        + json.dumps(bodies)
        + caplog.text
    )


def test_the_path_of_a_webhook_is_masked_in_manifests_and_settings() -> None:
    masked = mask_secrets({"engine": {"notify": f"https://hooks.example{SECRET}"}})
    assert masked == {"engine": {"notify": "https://hooks.example/***"}}
    assert mask_secrets([f"engine.notify=https://hooks.example{SECRET}"]) == [
        "engine.notify=https://hooks.example/***"
    ]
    assert mask_secrets({"notify": "./notify.sh --all"}) == {
        "notify": "./notify.sh --all"
    }


@pytest.mark.slow
def test_notify_command_gets_the_outcome_on_stdin(
    toy_runner: Make, tmp_path: Path
) -> None:
    record = run_recorded(
        toy_runner(Engine(notify=f"tee {tmp_path / 'end.json'}"), first={"n": 1})
    )
    payload = read_json(tmp_path / "end.json")
    assert (payload["state"], payload["run"], payload["stages"]["first"]["how"]) == (
        "completed",
        record.content["run"],
        "Completed",
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "hook", ["false", "/no/such/command", "http://127.0.0.1:9/", "unbalanced 'quote"]
)
def test_failing_hook_is_a_warning(
    toy_runner: Make, hook: str, caplog: pytest.LogCaptureFixture
) -> None:
    record = run_recorded(toy_runner(Engine(notify=hook), first={"n": 1}))
    assert record.content["state"] == "completed"
    assert [entry.name for entry in caplog.records] == ["gristmill.notify"]

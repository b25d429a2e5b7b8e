"""Pages of other origins, and host names rebound to this address, neither read nor
write anything of `gristmill up`.
"""

from __future__ import annotations

import http.server
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.servers import call_prefect, wait_for

ATTACK = """async ([api, deployment, marker]) => {
    const outcome = {};
    const attempt = async (name, path, options) => {
        try {
            const reply = await fetch(api + path, options);
            outcome[name] = reply.type === 'opaque' ? 'not readable' : await reply.text();
        } catch (error) {
            outcome[name] = 'refused';
        }
    };
    const json = (method, body) =>
        ({method, headers: {'Content-Type': 'application/json'}, body: JSON.stringify(body)});
    const shell = [{'prefect.deployments.steps.run_shell_script': {script: 'touch ' + marker}}];
    await attempt('read', '/deployments/filter', json('POST', {}));
    await attempt('read health', '/health', {});
    await attempt('read settings', '/../ui-settings', {});
    await attempt('rewrite', '/deployments/' + deployment, json('PATCH', {pull_steps: shell}));
    await attempt('start', `/deployments/${deployment}/create_flow_run`, json('POST', {}));
    for (const mode of ['no-cors', 'cors'])
        for (const type of ['text/plain', 'application/x-www-form-urlencoded'])
            await attempt(`start, ${mode} ${type}`, `/deployments/${deployment}/create_flow_run`,
                          {mode, method: 'POST', headers: {'Content-Type': type}, body: '{}', credentials: 'include'});
    const listen = (path, protocols) => new Promise(done => {
        const heard = [];
        const socket = new WebSocket(api.replace('http', 'ws') + path, protocols);
        socket.onopen = () => {
            socket.send(JSON.stringify({type: 'auth', token: null}));
            socket.send(JSON.stringify({type: 'filter', filter: {}}));
        };
        socket.onmessage = message => heard.push(message.data);
        socket.onclose = () => done(heard);
        setTimeout(() => done('stays open'), 20000);
    });
    for (const path of ['/events/out', '/events/in', '/logs/out', '/task_runs/subscriptions/scheduled'])
        for (const protocols of [[], ['prefect']])
            outcome['socket ' + path + protocols] = await listen(path, protocols);
    return outcome;
}"""


@pytest.fixture(scope="module")
def stranger() -> Iterator[str]:
    """Address of an empty page of another origin."""

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"<!doctype html><title>stranger</title>")

        def log_message(self, format: str, *args: object) -> None:
            return

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_a_page_of_another_origin_reads_nothing_and_starts_nothing(
    site: Any, browser: Any, finished: Any, stranger: str, tmp_path: Path
) -> None:
    deployment = site.deployment("gristmill")
    before = (
        site.call(f"/deployments/{deployment}"),
        len(site.call("/flow_runs/filter", {})),
    )
    marker = tmp_path / "was here"
    # a user who has Prefect's page open
    with closing(site.signed_in(browser)) as context:
        prefect = context.new_page()
        prefect.goto(f"{site.address}/deployments")
        prefect.get_by_text("gristmill-stage").first.wait_for()
        page = context.new_page()
        page.goto(stranger)
        outcome = page.evaluate(
            ATTACK, [f"{site.address}/api", deployment, str(marker)]
        )
    assert {
        name: response
        for name, response in outcome.items()
        if response not in ("refused", "not readable", [])
    } == {}
    after = (
        site.call(f"/deployments/{deployment}"),
        len(site.call("/flow_runs/filter", {})),
    )
    assert (after[0]["pull_steps"], after[1]) == (before[0]["pull_steps"], before[1])
    assert not marker.exists()


def test_a_report_is_neither_read_nor_framed_by_a_page_of_another_origin(
    site: Any, browser: Any, finished: Any, stranger: str
) -> None:
    link = (
        site.artifacts(finished["id"])["gristmill-report"]["data"]
        .partition("(")[2]
        .rstrip(")")
    )
    with closing(browser.new_context()) as context:
        page = context.new_page()
        page.goto(stranger)
        assert (
            page.evaluate(
                "link => fetch(link).then(reply => reply.text(), () => 'refused')", link
            )
            == "refused"
        )
        page.evaluate(
            """link => new Promise(done => {
            const frame = document.body.appendChild(document.createElement('iframe'));
            frame.onload = done;
            frame.src = link;
        })""",
            link,
        )
        assert all("tiny - gristmill" not in frame.content() for frame in page.frames)


def test_no_question_is_answered_without_the_password_whatever_host_is_named(
    site: Any,
) -> None:
    """Requests of a page whose host name is rebound to this address."""
    api = f"{site.address}/api"
    paths = site.call("/openapi.json")["paths"]
    assert len(paths) > 100
    answered = set()
    for path, methods in paths.items():
        for method in methods:
            for password in (None, "gristmill:guessed"):
                try:
                    call_prefect(
                        api,
                        path,
                        {} if method != "get" else None,
                        method.upper(),
                        password,
                        Host="rebound.example",
                    )
                except urllib.error.HTTPError as refused:
                    if refused.code == 401:
                        continue
                answered.add((path, method))
    assert answered == {("/health", "get"), ("/ready", "get")}
    assert call_prefect(api, "/health", Host="rebound.example") is True
    with urllib.request.urlopen(f"{site.address}/ui-settings", timeout=20) as reply:
        assert site.password not in reply.read().decode()


def test_the_page_asks_for_the_password_once(site: Any, browser: Any) -> None:
    with closing(browser.new_context()) as context:
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.goto(f"{site.address}/deployments")
        page.locator("input[type=password]").fill("gristmill:guessed")
        page.keyboard.press("Enter")
        page.get_by_text("Authentication failed.").first.wait_for()
        page.locator("input[type=password]").fill(site.password)
        page.keyboard.press("Enter")
        page.get_by_text("Dashboard").first.wait_for()
        again = context.new_page()
        again.goto(f"{site.address}/deployments")
        again.get_by_text("gristmill-stage").first.wait_for()


def test_the_password_is_for_its_owner_alone_and_on_no_command_line(site: Any) -> None:
    assert (site.home / "gristmill-password").stat().st_mode & 0o777 == 0o600
    assert len(site.password.partition(":")[2]) >= 24
    for process in [site.pid, *site.children().values()]:
        assert site.password not in Path(f"/proc/{process}/cmdline").read_text()
    wait_for(lambda: len(site.children()) == 2, "both processes of up")
    assert site.password not in json.dumps(site.call("/deployments/filter", {}))

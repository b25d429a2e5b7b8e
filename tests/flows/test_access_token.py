"""Servers reject requests without their token: every user of a machine can reach its
loopback address.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.cookies import SimpleCookie
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from gristmill.flows.pages import page_server
from gristmill.flows.pages.access_token import AccessToken, SignIn
from gristmill.flows.prefect.server_settings import keep_private
from gristmill.flows.report.server import VARIABLE, report_link, serve_reports
from tests.commands import call

TOKEN = AccessToken.fresh(4300)


@pytest.fixture
def client() -> TestClient:
    def answer(request: Request) -> PlainTextResponse:
        return PlainTextResponse(str(request.url.query))

    routes = [Route("/{path:path}", answer, methods=["GET", "POST"])]
    signed_in = SignIn(Starlette(routes=routes), TOKEN)
    return TestClient(signed_in, base_url="http://127.0.0.1:4300")


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "OPTIONS"])
@pytest.mark.parametrize(
    ("query", "headers"),
    [
        ("", {}),
        ("?token=", {}),
        ("?token=wrong", {}),
        ("", {"Authorization": "Bearer wrong"}),
        ("", {"Authorization": f"Basic {TOKEN.value}"}),
        ("", {"Authorization": "Bearer \xff".encode("latin-1")}),
        ("", {"Cookie": f"{TOKEN.cookie}=wrong"}),
        ("", {"Cookie": f"gristmill-4301={TOKEN.value}"}),
        ("", {"Cookie": "a=b; \x01 ;;="}),
    ],
)
def test_requests_without_the_token_are_rejected(
    client: TestClient, method: str, query: str, headers: dict[str, str]
) -> None:
    assert (
        client.request(method, f"/documents{query}", headers=headers).status_code == 403
    )


def test_printed_address_signs_in_a_browser(client: TestClient) -> None:
    address = TOKEN.url("127.0.0.1", "/documents/a%20b") + "&page=2"
    response = client.get(address, follow_redirects=False)
    assert (response.status_code, response.headers["location"]) == (
        303,
        "/documents/a%20b?page=2",
    )
    (cookie,) = SimpleCookie(response.headers["set-cookie"]).values()
    assert (cookie.key, cookie.value) == ("gristmill-4300", TOKEN.value)
    assert (cookie["httponly"], cookie["samesite"], cookie["path"]) == (
        True,
        "Strict",
        "/",
    )
    assert client.get("/documents?page=2").text == "page=2"
    assert client.post("/documents").status_code == 200


@pytest.mark.parametrize(
    "path", ["//attacker.example/", "/%5C/", "///a", "/\\attacker.example"]
)
def test_sign_in_never_redirects_to_another_host(path: str) -> None:
    location = TOKEN.signed_in_path(path, f"token={TOKEN.value}")
    assert location is not None
    assert location[0] == "/"
    assert location[1] not in "/\\"


def test_bearer_token_is_accepted(client: TestClient) -> None:
    assert (
        client.get(
            "/documents", headers={"Authorization": f"bearer {TOKEN.value}"}
        ).status_code
        == 200
    )


def test_two_servers_have_different_tokens() -> None:
    assert AccessToken.fresh(4300) != AccessToken.fresh(4300)
    assert len(TOKEN.value) >= 32


def test_browse_answers_only_at_its_printed_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[SignIn] = []

    def keep(app: SignIn, server_socket: socket.socket) -> None:
        served.append(app)
        server_socket.close()

    monkeypatch.setattr(page_server, "serve", keep)
    (tmp_path / "web.jsonl").write_text('{"text": "grist"}\n')
    manifest = tmp_path / "x.yaml"
    manifest.write_text(
        "name: x\nsources: {web: {path: web.jsonl}}\nprepare: [{dedup: {exact: "
        "true}}]\n"
    )
    arguments = [
        "browse",
        str(manifest),
        "--port=0",
        "--store",
        str(tmp_path / "store"),
    ]
    address = call(*arguments, catch_exceptions=False, code=None).output.split()[0]
    client = TestClient(served[0], base_url=address.partition("/?")[0])
    assert client.get("/").status_code == 403
    assert client.get(address).status_code == 200
    assert client.get("/").status_code == 200


@pytest.fixture
def reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A run's report while reports are served."""
    monkeypatch.setenv("PREFECT_SERVER_API_AUTH_STRING", "gristmill:secret")
    report = tmp_path / "report.html"
    report.write_text("grist")
    (tmp_path / "run.json").write_text("{}")
    listening = socket.create_server(("127.0.0.1", 0))
    server = serve_reports(listening, "gristmill:secret", bytes)
    monkeypatch.setenv(VARIABLE, f"http://127.0.0.1:{listening.getsockname()[1]}")
    yield report
    server.should_exit = True


def test_reports_are_served_only_under_their_signed_link(
    reports: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = report_link(reports)
    assert link is not None
    with urllib.request.urlopen(link) as response:
        assert response.read() == b"grist"
    base, _, path = link.rpartition("/")
    monkeypatch.setenv("PREFECT_SERVER_API_AUTH_STRING", "gristmill:another")
    other_password = report_link(reports)
    for invalid_link in (
        f"{base.rpartition('/')[0]}/{path}",
        f"{base}/x{path}",
        f"{base}{path}",
        other_password,
    ):
        assert invalid_link is not None
        with pytest.raises(urllib.error.HTTPError) as error:
            urllib.request.urlopen(invalid_link)
        with error.value:
            assert error.value.code == 403


def test_files_of_the_prefect_server_are_private_to_their_user(tmp_path: Path) -> None:
    (tmp_path / "prefect.db").touch(0o644)
    create = f"open({str(tmp_path / 'prefect.db-wal')!r}, 'w')"
    subprocess.run(
        [
            sys.executable,
            "-c",
            f"from {keep_private.__module__} import keep_private; keep_private(); "
            f"{create}",
        ],
        env={**os.environ, "PREFECT_HOME": str(tmp_path)},
        check=True,
    )
    assert {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {
        "prefect.db": 0o600,
        "prefect.db-wal": 0o600,
    }


@pytest.mark.parametrize("name", ["run.json", "../report.html", "absent/report.html"])
def test_signed_link_serves_reports_only(reports: Path, name: str) -> None:
    link = report_link(reports.parent / name)
    assert link is not None
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(link)
    with error.value:
        assert error.value.code == 404


def test_query_with_invalid_utf8_is_rejected() -> None:
    """Test clients encode such bytes."""
    scope = {
        "type": "http",
        "method": "GET",
        "path": "/",
        "raw_path": b"/",
        "query_string": b"x=\xff",
        "headers": [(b"host", b"127.0.0.1:4300")],
    }
    answers: list[Any] = []

    async def send(message: Any) -> None:
        answers.append(message)

    asyncio.run(SignIn(Starlette(), TOKEN)(scope, None, send))
    assert answers[0]["status"] == 403

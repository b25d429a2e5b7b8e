"""`gristmill browse` in a browser: no text runs as a script, pages work in dark mode
and on a phone, forms work.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.flows.browsed import make_run

PHONE, DESK = 390, 1200
"""Widths in pixels."""


@pytest.fixture(scope="module")
def printed_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start the server with the command and yield its printed address; Ctrl-C ends
    it.
    """
    session = make_run(tmp_path_factory.mktemp("browsed"))
    command = [
        sys.executable,
        "-m",
        "gristmill.flows.cli.main",
        "browse",
        session.manifest_file,
        "--port",
        "0",
        "--store",
        str(session.store.root),
    ]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        cwd=Path(session.manifest_file).parent,
    ) as server:
        assert server.stdout is not None
        line = server.stdout.readline()
        assert line.startswith("http://127.0.0.1:")
        assert "shows browsed; Ctrl-C ends it" in line
        yield line.split()[0]
        server.send_signal(signal.SIGINT)
        assert server.wait(timeout=30) == 130


@pytest.fixture(scope="module")
def address(printed_address: str) -> str:
    """The server's address without its token."""
    return printed_address.partition("/?")[0]


def signed_in_page(context: Any, printed_address: str) -> Any:
    """Return a browser page that has opened the printed address."""
    context.set_default_timeout(60_000)
    page = context.new_page()
    page.goto(printed_address)
    return page


@pytest.fixture
def page(printed_address: str, browser: Any) -> Iterator[Any]:
    with closing(
        browser.new_context(viewport={"width": DESK, "height": 900})
    ) as context:
        yield signed_in_page(context, printed_address)


def test_a_browser_is_signed_in_by_the_printed_address_alone(
    address: str, page: Any, browser: Any
) -> None:
    assert page.url == f"{address}/"
    assert page.evaluate("document.cookie") == ""  # the cookie is HttpOnly
    assert page.goto(f"{address}/documents").status == 200
    with closing(browser.new_context()) as context:
        assert context.new_page().goto(f"{address}/documents").status == 403


def links_of(page: Any) -> dict[str, str]:
    """Return one linked address of every kind of page."""
    hrefs = page.eval_on_selector_all(
        "a[href]", "all => all.map(one => one.getAttribute('href'))"
    )
    return {href.partition("?")[0].rstrip("0123456789abcdef"): href for href in hrefs}


def test_nothing_of_a_text_runs_or_is_loaded_whatever_page_shows_it(
    address: str, page: Any
) -> None:
    console_messages, requested_urls = [], []
    page.on("console", lambda message: console_messages.append(message.text))
    page.on("dialog", lambda dialog: dialog.accept())
    page.on("request", lambda request: requested_urls.append(request.url))
    queue, visited = (
        ["/", "/search?text=%22onerror%22&by=words", "/search?text=river&by=words"],
        set[str](),
    )
    while queue and len(visited) < 40:
        link = queue.pop(0)
        page.goto(address + link)
        assert "taken" not in page.title()
        assert page.locator("script, img, iframe, main style").count() == 0
        visited.add(link)
        queue += [
            url
            for url in links_of(page).values()
            if url not in visited and url not in queue
        ]
    assert len(visited) > 15
    assert console_messages == []
    assert {
        url.partition("?")[0].startswith(f"{address}/") or url.startswith("data:")
        for url in requested_urls
    } == {True}


def test_a_person_chooses_a_step_and_follows_a_document_to_its_cut(
    address: str, page: Any
) -> None:
    page.goto(f"{address}/documents")
    page.locator("[name=step]").select_option("filter-2")
    page.get_by_role("button", name="Search").click()
    page.locator("article h5 a").first.wait_for()
    assert page.locator("[name=step]").input_value() == "filter-2"
    page.locator("article h5 a").first.click()
    page.get_by_text("What each step said").wait_for()
    page.get_by_role("link", name="both sides of this cut").first.click()
    page.get_by_text("Passed this rule, nearest first").wait_for()


def test_pages_are_dark_where_the_browser_is_and_fit_a_phone(
    address: str, printed_address: str, browser: Any
) -> None:
    backgrounds = {}
    for scheme in ("light", "dark"):
        with closing(
            browser.new_context(
                viewport={"width": PHONE, "height": 800}, color_scheme=scheme
            )
        ) as context:
            page = signed_in_page(context, printed_address)
            backgrounds[scheme] = page.evaluate(
                "getComputedStyle(document.body).backgroundColor"
            )
            for link in (
                "/",
                "/documents",
                "/cuts",
                "/cuts/filter.rules.gopher_quality.min_words",
                "/duplicates/dedup",
                "/rows/mix",
                "/rows/mix/0",
                "/rows/mix/0?tokens=true",
                "/rows/sft_data/0",
                "/training/pretrain/1",
                "/nonsense",
            ):
                page.goto(address + link)
                assert page.evaluate("document.documentElement.scrollWidth") <= PHONE, (
                    link
                )
    assert backgrounds == {"light": "rgb(255, 255, 255)", "dark": "rgb(17, 24, 39)"}


def test_a_page_of_another_origin_reads_and_frames_nothing(
    address: str, printed_address: str, browser: Any
) -> None:
    with closing(browser.new_context()) as context:
        signed_in_page(context, printed_address)
        stranger = context.new_page()
        stranger.route(
            "http://elsewhere.example/",
            lambda route: route.fulfill(
                body="<title>x</title>", content_type="text/html"
            ),
        )
        stranger.goto("http://elsewhere.example/")
        fetch_script = (
            "link => fetch(link).then(reply => reply.text(), () => 'refused')"
        )
        assert stranger.evaluate(fetch_script, f"{address}/documents") == "refused"
        assert (
            stranger.evaluate(
                """link => new Promise(done => {
            const image = new Image();
            image.onload = () => done('loaded');
            image.onerror = () => done('refused');
            image.src = link;
        })""",
                f"{address}/style.css",
            )
            == "refused"
        )
        stranger.evaluate(
            """link => new Promise(done => {
            const frame = document.body.appendChild(document.createElement('iframe'));
            frame.onload = done;
            frame.src = link;
        })""",
            f"{address}/documents",
        )
        assert all("Documents" not in frame.content() for frame in stranger.frames)

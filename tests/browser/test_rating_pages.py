"""`gristmill rate` in a browser: a rater judges pairs by keys and buttons, and the file
holds the intended verdicts.
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

from gristmill.flows.rating.ratings import read_ratings

SERVER = """
import sys
from pathlib import Path
from gristmill.flows.pages.page_server import listen_locally, serve_pages
from gristmill.flows.rating.answer_pairs import AnswerPair
from gristmill.flows.rating.server import RatingPages
ratings = Path(sys.argv[1])
pairs = [AnswerPair(f"{one:032x}", f"Question {one}?", "sft", "dpo", (f"plain {one}", f"<b>other</b> {one}"))
         for one in range(4)]
pages = RatingPages(pairs, ratings, ratings.with_name("x.pairs.jsonl"), "gristmill rate")
serve_pages(pages.app(), listen_locally(0), "asks about 4 pairs")
"""


@pytest.fixture
def ratings(tmp_path: Path) -> Path:
    return tmp_path / "x.ratings.jsonl"


@pytest.fixture
def page(ratings: Path, browser: Any) -> Iterator[Any]:
    with subprocess.Popen(
        [sys.executable, "-c", SERVER, str(ratings)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as server:
        assert server.stdout is not None
        address = server.stdout.readline().split()[0]
        with closing(browser.new_context(base_url=address)) as context:
            context.set_default_timeout(60_000)
            page = context.new_page()
            page.goto(address)
            yield page
        server.send_signal(signal.SIGTERM)
        server.wait(timeout=30)


def plain_side(page: Any) -> str:
    left_answer = page.locator("section", has_text="Left").locator("pre").inner_text()
    return "Left" if left_answer.startswith("plain") else "Right"


def press(page: Any, key: str) -> None:
    """Press a key and wait for the next page with its script: an earlier key press
    would be lost.
    """
    with page.expect_navigation():
        page.keyboard.press(key)


def test_a_rater_goes_through_the_pairs_by_keys_and_buttons_and_back(
    page: Any, ratings: Path
) -> None:
    console_messages: list[str] = []
    page.on("console", lambda message: console_messages.append(message.text))
    page.goto("/")
    page.get_by_label("Your name").fill("ann")
    with page.expect_navigation():
        page.get_by_role("button", name="Begin").click()
    page.get_by_text("ann: 0 of 4 rated").wait_for()
    assert page.locator("pre b").count() == 0  # an answer is shown as plain text
    assert "sft" not in page.content()

    press(page, f"Arrow{plain_side(page)}")
    page.get_by_text("ann: 1 of 4 rated").wait_for()
    with page.expect_navigation():
        page.get_by_role("button", name=f"{plain_side(page)} is better").click()
    page.get_by_text("ann: 2 of 4 rated").wait_for()
    press(page, "t")
    page.get_by_text("ann: 3 of 4 rated").wait_for()
    press(page, "u")
    page.get_by_text("You have rated this one").wait_for()
    assert page.locator("button[aria-pressed=true]").inner_text().startswith("Tie")
    press(page, "b")
    assert page.get_by_text("You have rated this one").count() == 0
    press(page, "b")
    page.get_by_role("heading", name="All rated").wait_for()

    verdicts = read_ratings(ratings)
    assert sorted(rating["verdict"] for rating in verdicts) == [
        "both_bad",
        "both_bad",
        "first",
        "first",
    ]
    assert [
        rating["chosen"].startswith("plain")
        for rating in verdicts
        if "chosen" in rating
    ] == [True, True]
    # the file also holds the tie, which no longer counts
    assert len(ratings.read_text().splitlines()) == 5
    assert console_messages == []

"""`gristmill rate`: what a rater sees and says, the file of ratings, and results against numbers worked out by hand."""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from gristmill.dataprep.examples.read_examples import read_examples
from gristmill.flows.rating.answer_pairs import AnswerPair
from gristmill.flows.rating.rating_results import krippendorff_alpha, results_of
from gristmill.flows.rating.rating_server import RatingPages, verdict_of
from gristmill.flows.rating.ratings import (
    RatingsError,
    Verdict,
    add_rating,
    rating_files,
    read_ratings,
    settled_pairs,
    write_settled,
)


def pair(number: int) -> AnswerPair:
    answers = (f"plain {number}", f"<b>better</b> {number}")
    return AnswerPair(f"{number:032x}", f"Question {number}?", "sft", "dpo", answers)


PAIRS = [pair(number) for number in range(12)]


def rated(path: Path, *said: tuple[int, str, Verdict]) -> Path:
    for number, rater, verdict in said:
        add_rating(path, pair(number), rater, verdict)
    return path


def test_a_rating_that_prefers_an_answer_is_a_pair_that_dpo_reads(tmp_path: Path) -> None:
    path = rated(tmp_path / "x.ratings.jsonl", (0, "ann", "second"), (1, "ann", "first"))
    found = read_examples(str(path), "dpo")
    said = json.dumps(found, default=lambda one: one.__dict__)
    assert '"Question 0?"' in said
    assert said.index("<b>better</b> 0") < said.index("plain 0")
    assert said.index("plain 1") < said.index("<b>better</b> 1")


def test_a_line_that_was_cut_by_an_end_is_not_counted_and_the_next_rating_takes_its_place(tmp_path: Path) -> None:
    path = rated(tmp_path / "x.ratings.jsonl", (0, "ann", "tie"))
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"pair": "00')
    assert [one["verdict"] for one in read_ratings(path)] == ["tie"]
    rated(path, (1, "ann", "both_bad"))
    assert path.read_bytes().startswith(whole)
    assert [one["verdict"] for one in read_ratings(path)] == ["tie", "both_bad"]
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_a_file_that_holds_something_else_is_named_with_its_line(tmp_path: Path) -> None:
    path = rated(tmp_path / "x.ratings.jsonl", (0, "ann", "tie"))
    path.write_text(path.read_text() + '{"prompt": "x"}\n')
    with pytest.raises(RatingsError, match=r"x\.ratings\.jsonl, line 2: not a rating: KeyError: 'pair'"):
        read_ratings(path)


def test_the_last_rating_of_a_rater_counts_and_majorities_settle(tmp_path: Path) -> None:
    path = rated(
        tmp_path / "x.ratings.jsonl",
        (0, "ann", "first"),
        (0, "bob", "second"),
        (0, "ann", "second"),
        (1, "ann", "first"),
        (1, "bob", "second"),
        (2, "ann", "tie"),
        (2, "bob", "first"),
    )
    ratings = read_ratings(path)
    assert len(ratings) == 6
    assert [(one["prompt"], one["chosen"], one["for"], one["against"]) for one in settled_pairs(ratings)] == [
        ("Question 0?", "<b>better</b> 0", 2, 0),
        ("Question 2?", "plain 2", 1, 0),
    ]
    write_settled(ratings, tmp_path / "x.pairs.jsonl")
    assert len(read_examples(str(tmp_path / "x.pairs.jsonl"), "dpo")) == 2


def test_files_lie_beside_the_manifest_or_the_ratings(tmp_path: Path) -> None:
    beside = rating_files(None, "runs/small.yaml")
    assert [str(one) for one in (beside.ratings, beside.settled, beside.answers)] == [
        "runs/small.ratings.jsonl",
        "runs/small.pairs.jsonl",
        "runs/small.answers.json",
    ]
    assert rating_files(Path("a.jsonl"), "small.yaml").settled == Path("a.pairs.jsonl")


def test_win_rates_count_ties_as_halves_and_a_pair_once(tmp_path: Path) -> None:
    """Pairs: 1, (1 + 1/2) / 2, 0, 1/2: the mean is 2.25 / 4. Majorities: two for dpo, one against."""
    path = rated(
        tmp_path / "x.ratings.jsonl",
        (0, "ann", "second"),
        (1, "ann", "second"),
        (1, "bob", "tie"),
        (2, "ann", "first"),
        (3, "ann", "both_bad"),
    )
    (found,) = results_of(read_ratings(path))
    assert (found["first"], found["second"], found["pairs"], found["ratings"]) == ("sft", "dpo", 4, 5)
    assert found["win_rate"]["value"] == pytest.approx(2.25 / 4)
    assert found["win_rate"]["low"] <= 2.25 / 4 <= found["win_rate"]["high"]
    assert (found["decided"]["value"], found["decided"]["units"]) == (pytest.approx(2 / 3), 3)
    assert found["verdicts"] == {"first": 1, "second": 2, "tie": 1, "both_bad": 1}
    assert found["raters"] == {"ann": 4, "bob": 1}
    assert found["kappas"] == [{"raters": ["ann", "bob"], "pairs": 1, "same": 0.0, "kappa": 0.0}]


def test_krippendorffs_alpha_is_that_of_his_own_examples() -> None:
    """Krippendorff 2011: two observers, binary (section B: 0.095), and four with gaps, nominal (section C: 0.743)."""
    two = ("0100000000", "1110010010")
    assert krippendorff_alpha(list(zip(*two, strict=True))) == pytest.approx(0.095, abs=5e-4)
    units = [
        ["1", "1", "1"],
        ["2", "2", "3", "2"],
        ["3", "3", "3", "3"],
        ["3", "3", "3", "3"],
        ["2", "2", "2", "2"],
        ["1", "2", "3", "4"],
        ["4", "4", "4", "4"],
        ["1", "1", "2", "1"],
        ["2", "2", "2", "2"],
        ["5", "5", "5"],
        ["1", "1"],
        ["3"],
    ]
    assert krippendorff_alpha(units) == pytest.approx(0.743, abs=5e-4)


def test_alpha_is_one_for_raters_who_agree_and_undefined_without_a_choice() -> None:
    assert krippendorff_alpha([["a", "a"], ["b", "b"]]) == 1.0
    assert krippendorff_alpha([["a", "a"], ["a", "a"]]) is None
    assert krippendorff_alpha([["a"], ["b"]]) is None


@pytest.fixture
def pages(tmp_path: Path) -> TestClient:
    return client(tmp_path)


def client(folder: Path) -> TestClient:
    made = RatingPages(PAIRS, folder / "x.ratings.jsonl", folder / "x.pairs.jsonl", "gristmill rate x.yaml --results")
    return TestClient(made.app(), base_url="http://127.0.0.1", follow_redirects=True)


def form_of(page: httpx.Response) -> dict[str, str]:
    return {
        name: unescape(value)
        for name, value in re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)">', page.text)
    }


@pytest.mark.slow
def test_pairs_are_blind_the_sides_are_drawn_and_all_that_was_said_is_kept(pages: TestClient, tmp_path: Path) -> None:
    page, lefts = pages.get("/?rater=ann"), set()
    for number in range(len(PAIRS)):
        assert f"ann: {number} of 12 rated" in page.text
        assert "sft" not in page.text
        assert "dpo" not in page.text
        assert "<b>" not in page.text
        form = form_of(page)
        first = next(one for one in PAIRS if one.id == form["pair"])
        left = page.text.index("plain") < page.text.index("&lt;b&gt;")
        assert left is not first.is_swapped("ann")
        lefts.add(left)
        page = pages.post("/rate", data={**form, "choice": "left" if left else "right"})
    assert "All rated" in page.text
    assert lefts == {True, False}
    ratings = read_ratings(tmp_path / "x.ratings.jsonl")
    assert [one["verdict"] for one in ratings] == ["first"] * 12
    assert len(read_examples(str(tmp_path / "x.pairs.jsonl"), "dpo")) == 12
    # Another server goes on where this one ended, and another rater begins at the beginning.
    assert "All rated" in client(tmp_path).get("/?rater=ann").text
    assert "bob: 0 of 12 rated" in client(tmp_path).get("/?rater=bob").text


def test_a_rater_may_go_back_and_say_something_else(pages: TestClient, tmp_path: Path) -> None:
    first = form_of(pages.get("/?rater=ann"))
    page = pages.post("/rate", data={**first, "choice": "left"})
    (back,) = re.findall(r'<a href="([^"]*pair=[^"]*)"', page.text)
    page = pages.get(unescape(back))
    assert form_of(page)["pair"] == first["pair"]
    assert re.search(r'value="left"[^>]*aria-pressed="true"', page.text)
    pages.post("/rate", data={**form_of(page), "choice": "tie"})
    assert [one["verdict"] for one in read_ratings(tmp_path / "x.ratings.jsonl")] == ["tie"]
    assert len((tmp_path / "x.ratings.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"token": "guessed"}, 403),
        ({"choice": "middle"}, 400),
        ({"pair": "0"}, 400),
        ({"rater": "<ann>"}, 400),
        ({"rater": "x" * 20_000}, 413),
    ],
)
def test_what_no_page_of_this_server_sends_is_refused_and_not_kept(
    pages: TestClient, tmp_path: Path, change: dict[str, Any], status: int
) -> None:
    form = form_of(pages.get("/?rater=ann"))
    assert pages.post("/rate", data={**form, "choice": "left", **change}).status_code == status
    assert not (tmp_path / "x.ratings.jsonl").exists()


def test_names_of_raters_are_asked_for_and_checked(pages: TestClient) -> None:
    assert "Who rates?" in pages.get("/").text
    refused = pages.get("/", params={"rater": "<script>"})
    assert refused.status_code == 400
    assert "A name has letters" in refused.text
    assert "<script>" not in refused.text
    assert "script-src 'self'" in refused.headers["content-security-policy"]


@pytest.mark.parametrize("choice", ["tie", "both_bad"])
def test_what_prefers_no_side_is_the_same_on_either(choice: str) -> None:
    assert {verdict_of(one, "ann", choice) for one in PAIRS} == {choice}

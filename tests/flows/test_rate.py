"""`gristmill rate`: pages and verdicts of raters, the file of ratings, and results
checked against hand-computed numbers.
"""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from gristmill.dataprep.examples.read_examples import read_set
from gristmill.flows.rating.answer_pairs import AnswerPair
from gristmill.flows.rating.ratings import (
    RatingsError,
    Verdict,
    add_rating,
    rating_files,
    read_ratings,
    settled_pairs,
    write_settled,
)
from gristmill.flows.rating.results import Kappa, krippendorff_alpha, results_of
from gristmill.flows.rating.server import RatingPages, verdict_of


def pair(number: int) -> AnswerPair:
    answers = (f"plain {number}", f"<b>better</b> {number}")
    return AnswerPair(f"{number:032x}", f"Question {number}?", "sft", "dpo", answers)


PAIRS = [pair(number) for number in range(12)]


def rated(path: Path, *verdicts: tuple[int, str, Verdict]) -> Path:
    for number, rater, verdict in verdicts:
        add_rating(path, pair(number), rater, verdict)
    return path


def test_rating_with_a_preference_is_a_dpo_pair(
    tmp_path: Path,
) -> None:
    path = rated(
        tmp_path / "x.ratings.jsonl", (0, "ann", "second"), (1, "ann", "first")
    )
    examples = read_set(str(path), "dpo").examples
    serialized = json.dumps(examples, default=lambda example: example.__dict__)
    assert '"Question 0?"' in serialized
    assert serialized.index("<b>better</b> 0") < serialized.index("plain 0")
    assert serialized.index("plain 1") < serialized.index("<b>better</b> 1")


def test_torn_last_line_is_ignored_and_overwritten(
    tmp_path: Path,
) -> None:
    path = rated(tmp_path / "x.ratings.jsonl", (0, "ann", "tie"))
    complete_bytes = path.read_bytes()
    path.write_bytes(complete_bytes + b'{"pair": "00')
    assert [rating["verdict"] for rating in read_ratings(path)] == ["tie"]
    rated(path, (1, "ann", "both_bad"))
    assert path.read_bytes().startswith(complete_bytes)
    assert [rating["verdict"] for rating in read_ratings(path)] == ["tie", "both_bad"]
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_invalid_ratings_file_is_rejected_with_its_line(
    tmp_path: Path,
) -> None:
    path = rated(tmp_path / "x.ratings.jsonl", (0, "ann", "tie"))
    path.write_text(path.read_text() + '{"prompt": "x"}\n')
    with pytest.raises(
        RatingsError, match=r"x\.ratings\.jsonl, line 2: not a rating: KeyError: 'pair'"
    ):
        read_ratings(path)


def test_the_last_rating_of_a_rater_counts_and_majorities_settle(
    tmp_path: Path,
) -> None:
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
    assert [
        (
            settled_pair["prompt"],
            settled_pair["chosen"],
            settled_pair["for"],
            settled_pair["against"],
        )
        for settled_pair in settled_pairs(ratings)
    ] == [
        ("Question 0?", "<b>better</b> 0", 2, 0),
        ("Question 2?", "plain 2", 1, 0),
    ]
    write_settled(ratings, tmp_path / "x.pairs.jsonl")
    assert len(read_set(str(tmp_path / "x.pairs.jsonl"), "dpo").examples) == 2


def test_files_lie_beside_the_manifest_or_the_ratings(tmp_path: Path) -> None:
    files = rating_files(None, "runs/small.yaml")
    assert [str(path) for path in (files.ratings, files.settled, files.answers)] == [
        "runs/small.ratings.jsonl",
        "runs/small.pairs.jsonl",
        "runs/small.answers.json",
    ]
    assert rating_files(Path("a.jsonl"), "small.yaml").settled == Path("a.pairs.jsonl")


def test_win_rates_count_ties_as_halves_and_a_pair_once(tmp_path: Path) -> None:
    """Pairs score 1, (1 + 1/2) / 2, 0 and 1/2: the mean is 2.25 / 4. Majorities: two
    for dpo, one against.
    """
    path = rated(
        tmp_path / "x.ratings.jsonl",
        (0, "ann", "second"),
        (1, "ann", "second"),
        (1, "bob", "tie"),
        (2, "ann", "first"),
        (3, "ann", "both_bad"),
    )
    (comparison,) = results_of(read_ratings(path))
    assert (
        comparison.first,
        comparison.second,
        comparison.pairs,
        comparison.ratings,
    ) == (
        "sft",
        "dpo",
        4,
        5,
    )
    assert comparison.win_rate["value"] == pytest.approx(2.25 / 4)
    assert comparison.win_rate["low"] <= 2.25 / 4 <= comparison.win_rate["high"]
    assert (comparison.decided["value"], comparison.decided["units"]) == (
        pytest.approx(2 / 3),
        3,
    )
    assert comparison.verdicts == {"first": 1, "second": 2, "tie": 1, "both_bad": 1}
    assert comparison.raters == {"ann": 4, "bob": 1}
    assert comparison.kappas == [Kappa(("ann", "bob"), pairs=1, same=0.0, kappa=0.0)]


def test_krippendorff_alpha_matches_published_examples() -> None:
    """Krippendorff 2011: two observers, binary (section B: 0.095), and four with gaps,
    nominal (section C: 0.743).
    """
    observers = ("0100000000", "1110010010")
    assert krippendorff_alpha(list(zip(*observers, strict=True))) == pytest.approx(
        0.095, abs=5e-4
    )
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
    rating_pages = RatingPages(
        PAIRS,
        folder / "x.ratings.jsonl",
        folder / "x.pairs.jsonl",
        "gristmill rate x.yaml --results",
    )
    return TestClient(
        rating_pages.app(), base_url="http://127.0.0.1", follow_redirects=True
    )


def form_of(page: httpx.Response) -> dict[str, str]:
    return {
        name: unescape(value)
        for name, value in re.findall(
            r'<input type="hidden" name="(\w+)" value="([^"]*)">', page.text
        )
    }


@pytest.mark.slow
def test_pairs_are_blind_with_random_sides_and_every_rating_is_stored(
    pages: TestClient, tmp_path: Path
) -> None:
    page, sides = pages.get("/?rater=ann"), set()
    for number in range(len(PAIRS)):
        assert f"ann: {number} of 12 rated" in page.text
        assert "sft" not in page.text
        assert "dpo" not in page.text
        assert "<b>" not in page.text
        form = form_of(page)
        first = next(candidate for candidate in PAIRS if candidate.id == form["pair"])
        plain_is_left = page.text.index("plain") < page.text.index("&lt;b&gt;")
        assert plain_is_left is not first.is_swapped("ann")
        sides.add(plain_is_left)
        page = pages.post(
            "/rate", data={**form, "choice": "left" if plain_is_left else "right"}
        )
    assert "All rated" in page.text
    assert sides == {True, False}
    ratings = read_ratings(tmp_path / "x.ratings.jsonl")
    assert [candidate["verdict"] for candidate in ratings] == ["first"] * 12
    assert len(read_set(str(tmp_path / "x.pairs.jsonl"), "dpo").examples) == 12
    # A new server continues where this one ended, and a new rater starts at the first
    # pair.
    assert "All rated" in client(tmp_path).get("/?rater=ann").text
    assert "bob: 0 of 12 rated" in client(tmp_path).get("/?rater=bob").text


def test_rater_can_go_back_and_change_a_rating(
    pages: TestClient, tmp_path: Path
) -> None:
    first = form_of(pages.get("/?rater=ann"))
    page = pages.post("/rate", data={**first, "choice": "left"})
    (back,) = re.findall(r'<a href="([^"]*pair=[^"]*)"', page.text)
    page = pages.get(unescape(back))
    assert form_of(page)["pair"] == first["pair"]
    assert re.search(r'value="left"[^>]*aria-pressed="true"', page.text)
    pages.post("/rate", data={**form_of(page), "choice": "tie"})
    assert [
        rating["verdict"] for rating in read_ratings(tmp_path / "x.ratings.jsonl")
    ] == ["tie"]
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
def test_forged_ratings_are_rejected_and_not_stored(
    pages: TestClient, tmp_path: Path, change: dict[str, Any], status: int
) -> None:
    form = form_of(pages.get("/?rater=ann"))
    assert (
        pages.post("/rate", data={**form, "choice": "left", **change}).status_code
        == status
    )
    assert not (tmp_path / "x.ratings.jsonl").exists()


def test_rater_name_is_requested_and_validated(pages: TestClient) -> None:
    assert "Who rates?" in pages.get("/").text
    response = pages.get("/", params={"rater": "<script>"})
    assert response.status_code == 400
    assert "A name has letters" in response.text
    assert "<script>" not in response.text
    assert "script-src 'self'" in response.headers["content-security-policy"]


@pytest.mark.parametrize("choice", ["tie", "both_bad"])
def test_verdict_without_preference_does_not_depend_on_sides(choice: str) -> None:
    assert {verdict_of(answer_pair, "ann", choice) for answer_pair in PAIRS} == {choice}

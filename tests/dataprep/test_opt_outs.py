"""Opt-outs of sites and pages: what reserves a page from training, and what does not."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gristmill.core.stage_context import Context
from gristmill.dataprep.documents import DOCUMENT_SCHEMA, document_id, write_table
from gristmill.dataprep.opt_outs import opt_outs
from gristmill.dataprep.opt_outs.reservations import (
    directives_in,
    disallowed_agents,
    page_reservation,
    reserved_usage,
    site_reservation,
    training_preference,
)
from gristmill.dataprep.opt_outs.site_texts import SiteTextError, site_text
from gristmill.dataprep.readers.html import extract, with_resiliparse
from gristmill.dataprep.readers.records import Input, Page, Reading, Record
from gristmill.dataprep.readers.warc import read_warc
from gristmill.mixtures.schema.sources import ExtractOptions
from gristmill.mixtures.steps.opt_outs import OPT_OUT_RULES
from tests.dataprep.document_shards import rows_by_id
from tests.dataprep.warc_records import http, record

ROBOTS = """
User-agent: GPTBot
Disallow: /

User-agent: CCBot
User-agent: ClaudeBot
Disallow: /private
Allow: /private/open

User-agent: *
Disallow: /search
"""
AGENTS = ("GPTBot", "CCBot", "Google-Extended")


@pytest.mark.parametrize(
    ("path", "agents"),
    [
        ("/", "GPTBot"),
        ("/private/x", "GPTBot, CCBot"),
        ("/private/open/x", "GPTBot"),
        ("/search?q=1", "GPTBot, Google-Extended"),
    ],
)
def test_robots_txt_disallows_pages_to_agents(path: str, agents: str) -> None:
    assert disallowed_agents(ROBOTS, f"https://a.org{path}", AGENTS) == agents
    assert disallowed_agents(ROBOTS, f"https://a.org{path}", ["Other"]) == (
        "Other" if path.startswith("/search") else None
    )
    everyone = "User-agent: *\nDisallow: /"
    assert disallowed_agents(everyone, f"https://a.org{path}", AGENTS) == "all agents"


@pytest.mark.parametrize(
    ("usage", "preference"),
    [
        ("train-ai=n", False),
        ("search=y, Train-AI=n", False),
        ("train-ai=y", True),
        # the narrower category counts
        ("train-ai=n, train-genai=y", True),
        ("train-genai=n;x=1", False),
        ("search=n", None),
        ("", None),
    ],
)
def test_preference_on_training(usage: str, preference: bool | None) -> None:
    assert training_preference(usage) is preference


def test_usage_rules_match_groups_and_paths_like_other_rules() -> None:
    robots = """
        User-Agent: *
        Allow: /
        Content-Usage: train-ai=n   # all pages
        Content-Usage: /open train-ai=y

        User-Agent: GPTBot
        Disallow: /
    """
    assert reserved_usage(None, robots, "https://a.org/x", ["CCBot"]) == (
        "robots.txt: CCBot"
    )
    assert reserved_usage(None, robots, "https://a.org/open/x", ["CCBot"]) is None
    # its own group has no such rule
    assert reserved_usage(None, robots, "https://a.org/x", ["GPTBot"]) is None
    assert reserved_usage("train-ai=n", None, "https://a.org/x", ["GPTBot"]) == (
        "header: train-ai=n"
    )


def test_directives_are_whole_words() -> None:
    assert directives_in("GPTBot: noindex, NoAI", ["noai", "noimageai"]) == "noai"
    assert directives_in("noimageai", ["noai"]) is None
    assert directives_in("noarchive", ["noai"]) is None


def test_page_precedes_site_in_tdm_reservations() -> None:
    assert page_reservation({"tdm_reservation": "1"}) == ("header", True)
    both = {"tdm_reservation": "1", "meta_tdm_reservation": "0"}
    assert page_reservation(both) == ("meta", False)
    assert page_reservation({"tdm_reservation": "maybe"}) is None
    rules = json.dumps(
        [
            {"location": "/open/*", "tdm-reservation": 0},
            {"location": "/", "tdm-reservation": 1},
        ]
    )
    assert site_reservation(rules, "https://a.org/open/x") is None
    assert site_reservation(rules, "https://a.org/x") == "/"
    assert site_reservation("not JSON", "https://a.org/x") is None


def test_site_text_of_the_crawls_time() -> None:
    texts = {("a.org", "robots_txt"): [("2023-01", "old"), ("2024-01", "new")]}
    dates = ["2022-05", "2023-05", "2024-05"]
    for host in ("a.org", "www.a.org"):
        assert [site_text(texts, host, "robots_txt", date) for date in dates] == (
            ["old", "old", "new"]
        )
    assert site_text(texts, "a.org", "ai_txt", "2024-05") is None


PAGE = b"""<html><head>
<META content="noindex, NOAI" name="Robots"><meta name=tdm-reservation content=1>
</head><body><p>Some text of a page.</p></body></html>"""


def test_pages_keep_their_opt_outs(tmp_path: Path) -> None:
    headers = {
        "X_Robots_Tag": "noai",
        "TDM_Reservation": "1",
        "Content_Usage": "train-ai=n",
    }
    path = tmp_path / "a.warc"
    path.write_bytes(
        record("response", http(PAGE, **headers))
        + record("response", http(b"Plain.", content_type="text/plain"), 2)
    )
    page, plain = read_warc(Input("a.warc", path), Reading(metadata=["date"]))
    assert isinstance(page, Page)
    assert isinstance(plain, Record)
    stated = {
        "x_robots_tag": "noai",
        "tdm_reservation": "1",
        "content_usage": "train-ai=n",
    }
    assert stated.items() <= dict(page.metadata).items()
    options = ExtractOptions().model_dump()
    answer = extract(PAGE, "utf-8", "", with_resiliparse, options)
    tags = {"meta_robots": "noindex, NOAI", "meta_tdm_reservation": "1"}
    assert tags.items() <= dict(answer.metadata).items()
    # without extraction, and whatever metadata is selected
    reading = Reading(metadata=["date"], extract="none")
    kept, _ = read_warc(Input("a.warc", path), reading)
    assert isinstance(kept, Record)
    assert json.loads(kept.metadata).keys() == {"date", *stated, *tags}


Metadata = dict[str, str]
SITES = [
    {"host": "robots.org", "robots_txt": ROBOTS},
    {"host": "ai.org", "ai_txt": "User-agent: *\nDisallow: /"},
    {"host": "tdm.org", "tdmrep": [{"location": "/", "tdm-reservation": 1}]},
    {"host": "usage.org", "robots_txt": "User-agent: *\nContent-Usage: train-ai=n"},
]
PAGES: dict[str, tuple[str, Metadata]] = {
    "robots_txt": ("https://www.robots.org/1", {}),
    "ai_txt": ("https://ai.org/1", {}),
    "tdmrep": ("https://tdm.org/1", {}),
    "content_usage": ("https://usage.org/1", {}),
    "x_robots_tag": ("https://b.org/1", {"x_robots_tag": "noai"}),
    "meta_robots": ("https://b.org/2", {"meta_robots": "noai, noindex"}),
    "tdm_reservation": ("https://b.org/3", {"tdm_reservation": "1"}),
    "": ("https://tdm.org/2", {"tdm_reservation": "0"}),
    "no address": ("one.txt", {}),
}
"""Rule that drops a page -> its address and metadata."""


def judged(folder: Path, section: dict[str, Any]) -> tuple[Any, dict[str, str | None]]:
    """Run the step on PAGES: its summary, and the reason for dropping each page."""
    rows = [
        {
            "id": document_id("web", locator, "text"),
            "source": "web",
            "locator": locator,
            "text": "text",
            "metadata": json.dumps(metadata),
        }
        for locator, metadata in PAGES.values()
    ]
    write_table(
        folder / "documents" / "part-00000.parquet",
        pa.Table.from_pylist(rows, schema=DOCUMENT_SCHEMA),
    )
    context = Context(folder / "work", "opt_outs", emit=lambda event: None)
    inputs = {"ingest": folder / "documents"}
    summary = opt_outs.run(inputs, section, folder / "out", context)
    annotations = rows_by_id(folder / "out")
    reasons = {
        rule: annotations[row["id"]]["reason"]
        for rule, row in zip(PAGES, rows, strict=True)
    }
    return summary, reasons


@pytest.mark.parametrize("form", ["jsonl", "parquet", "csv"])
def test_each_rule_drops_its_pages(tmp_path: Path, form: str) -> None:
    path = tmp_path / f"sites.{form}"
    rows = [
        {**dict.fromkeys(["robots_txt", "ai_txt", "tdmrep"]), **row} for row in SITES
    ]
    for row in rows:
        row["tdmrep"] = row["tdmrep"] and json.dumps(row["tdmrep"])
    if form == "jsonl":
        path.write_text("\n".join(map(json.dumps, SITES)))
    elif form == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        with path.open("w", newline="") as lines:
            writer = csv.DictWriter(lines, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    summary, reasons = judged(tmp_path, {"files": [str(path)]})
    assert reasons == {rule: rule if rule in OPT_OUT_RULES else None for rule in PAGES}
    assert summary.reserved == dict.fromkeys(OPT_OUT_RULES, 1)
    assert summary.addressed == 8
    assert summary.with_site_text == {"robots_txt": 2, "ai_txt": 1, "tdmrep": 2}


def test_rules_can_be_switched_off_and_are_measured_still(tmp_path: Path) -> None:
    off = {rule: rule == "x_robots_tag" for rule in OPT_OUT_RULES}
    summary, reasons = judged(tmp_path, {"reservations": off})
    assert {rule for rule, reason in reasons.items() if reason} == {"x_robots_tag"}
    assert summary.reserved["meta_robots"] == 1
    assert summary.counts["kept"] == len(PAGES) - 1


def test_robots_records_of_a_crawl(tmp_path: Path) -> None:
    path = tmp_path / "robots.warc"
    robots = http(ROBOTS.encode(), content_type="text/plain")
    missing = http(b"User-agent: *\nDisallow: /", "404 Not Found")
    path.write_bytes(
        record("response", robots, url="https://www.robots.org/robots.txt")
        + record("response", missing, 2, url="https://b.org/robots.txt")
        + record("response", robots, 3, url="https://b.org/page.txt")
    )
    summary, reasons = judged(tmp_path, {"files": [str(path)]})
    assert summary.with_site_text["robots_txt"] == 1
    assert reasons["robots_txt"] == "robots_txt"


def test_table_without_texts_of_sites_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "sites.jsonl"
    path.write_text(json.dumps({"host": "a.org", "robots": ROBOTS}))
    with pytest.raises(SiteTextError):
        judged(tmp_path, {"files": [str(path)]})

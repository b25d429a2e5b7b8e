"""URL normalisation and registered domains."""

from __future__ import annotations

import json
import random

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gristmill.dataprep.cleaning.urls import (
    document_urls,
    normalise_url,
    url_host,
)

SPELLINGS = [
    ("http://example.org/a", "example.org/a"),
    ("https://example.org/a", "example.org/a"),
    ("//example.org/a", "example.org/a"),
    ("example.org/a", "example.org/a"),
    ("HTTP://WWW.Example.ORG/A", "example.org/A"),
    ("http://www.www.example.org", "example.org"),
    ("http://www.com/", "www.com"),
    ("http://example.org.:80/", "example.org"),
    ("https://example.org:443/a/", "example.org/a"),
    ("https://example.org:8443/a//", "example.org:8443/a"),
    ("http://me:secret@example.org/a", "example.org/a"),
    ("http://example.org/a#part", "example.org/a"),
    ("http://example.org/a?", "example.org/a"),
    ("http://example.org/a?utm_source=x&UTM_Medium=y", "example.org/a"),
    ("http://example.org/a/?ref=home&b=2&a=1&fbclid=z", "example.org/a?a=1&b=2"),
    ("http://example.org/a?feed=rss2", "example.org/a"),
    ("http://example.org/a?reference=7&a=2&a=1&&", "example.org/a?a=2&a=1&reference=7"),
    ("http://example.org/%7euser/%c3%a9%2f%41", "example.org/~user/%C3%A9%2FA"),
    ("http://example.org/é x", "example.org/%C3%A9%20x"),
    ("http://example.org/100%", "example.org/100%25"),
    ("http://example.org/%%341", "example.org/%2541"),
    ("http://bücher.example/", "xn--bcher-kva.example"),
    ("http://BÜCHER.example/", "xn--bcher-kva.example"),
    ("http://xn--bcher-kva.example/", "xn--bcher-kva.example"),
    ("http://[2001:DB8::1]:80/a", "[2001:db8::1]/a"),
    ("ftp://Example.org/a/", "ftp://example.org/a"),
    ("\t http://example.org/a\n", "example.org/a"),
    ("mailto:me@example.org", "mailto:me@example.org"),
    ("/only/a/path", "/only/a/path"),
    ("", ""),
]


@pytest.mark.parametrize(
    ("url", "expected"), SPELLINGS, ids=[url for url, _ in SPELLINGS]
)
def test_url_is_normalised(url: str, expected: str) -> None:
    assert normalise_url(url) == expected


PIECES = [
    "http:",
    "https:",
    "//",
    "/",
    "www.",
    "a.",
    "b",
    ".",
    ":80",
    ":",
    "@",
    "?",
    "&",
    "=",
    "#",
    "%",
    "%4",
    "%41",
    "%e9",
    "utm_x",
    "ref",
    "é",
    "Ü",
    "İ",
    "。",
    "：",
    "[",
    "]",
    "::1",
    "ftp:",
    "\\",
    " ",
    "xn--",
    "\u200d",
]


@given(
    st.one_of(st.text(), st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
)
@example("http://a@//b")
@example("http://:80//x")
@example("www.http://x")
@example("x:80:80")
def test_normalisation_is_idempotent(url: str) -> None:
    once = normalise_url(url)
    assert normalise_url(once) == once


def test_parameter_order_does_not_matter() -> None:
    parameters = [f"{name}=1" for name in "abcdefg"]
    random.Random(0).shuffle(parameters)
    assert normalise_url("http://a.org/?" + "&".join(parameters)) == normalise_url(
        "https://a.org?" + "&".join(sorted(parameters))
    )


def test_host_has_no_port_or_user() -> None:
    assert url_host("https://me@www.Example.org:8080/x?y") == "example.org"
    assert url_host("ftp://files.example.org/x") == "files.example.org"
    assert url_host("http://[::1]:8080/") == "[::1]"
    assert url_host("mailto:me@example.org") == ""


def test_document_url_is_that_of_its_metadata_or_locator() -> None:
    metadata = [
        {"url": "http://a.org/1"},
        {"url": 7},
        {"title": '"url"'},
        {},
        {"url": ""},
    ]
    locators = ["data/x.jsonl#1", "https://b.org/2", "data/y.txt", "HTTP://c.org", "z"]
    table = pa.table(
        {"locator": locators, "metadata": [json.dumps(values) for values in metadata]}
    )
    assert document_urls(table) == [
        "http://a.org/1",
        "https://b.org/2",
        None,
        "HTTP://c.org",
        None,
    ]

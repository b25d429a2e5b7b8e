"""Rights to a web page: its licence, and opt-outs from its use for training, as its
markup and its response headers state them; kept as metadata, since the page itself is
gone after `ingest`.

A link with `rel=license` is the page's own statement (microformats.org/wiki/rel-license).
Another address of a licence of Creative Commons is weaker: the page may speak of the
licence, or of that of a picture.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from html.parser import HTMLParser

from gristmill.dataprep.licences.statements import Statement
from gristmill.mixtures.spdx import join, spdx_of

HEADERS = {
    "x-robots-tag": "x_robots_tag",
    "tdm-reservation": "tdm_reservation",
    "content-usage": "content_usage",
}
"""Response header -> key of the metadata."""
META_TAGS = {"robots": "meta_robots", "tdm-reservation": "meta_tdm_reservation"}
"""Name of a meta tag -> key of the metadata."""
OPT_OUT_KEYS = (*HEADERS.values(), *META_TAGS.values())
"""Keys that documents keep whatever `metadata` a source selects."""
HEAD_CHARACTERS = 65_536
"""Characters of a page in which opt-outs are searched."""
MOST_CHARACTERS = 200
"""Kept characters of an opt-out."""
MAX_TAG_CHARACTERS = 2000
_REL = re.compile(r"\brel\s*=\s*[\"']?[^\"'>]*$", re.IGNORECASE)
_CREATIVE_COMMONS = re.compile(
    r"creativecommons\.org/(?:licenses/[a-z]|publicdomain/)[a-z0-9./+-]+"
)
_MENTIONS = re.compile("noai|noimageai|tdm-reservation", re.IGNORECASE)
_NO_AI = re.compile("noai|noimageai", re.IGNORECASE)


def page_rights(html: str) -> dict[str, str]:
    """Metadata of a page with the licence, several of which apply together, and the
    opt-outs that it states.

    Only the tags that may state any are parsed, and by Python's own parser: pages that
    are not extracted are read outside of the guarded process.
    """
    tags = _Tags()
    for word in re.finditer("license", html):
        begin = html.rfind("<", max(word.start() - MAX_TAG_CHARACTERS, 0), word.start())
        end = html.find(">", word.end(), word.end() + MAX_TAG_CHARACTERS) + 1
        if begin >= 0 and end and _REL.search(html, begin, word.start()):
            tags.feed(html[begin:end])
    if _MENTIONS.search(html, 0, HEAD_CHARACTERS):
        tags.feed(html[:HEAD_CHARACTERS])
    return {**_licence(tags.licences, html), **_opt_outs(META_TAGS, tags.meta)}


class _Tags(HTMLParser):
    """Addresses of links with `rel=license`, and names and contents of meta tags."""

    def __init__(self) -> None:
        super().__init__()
        self.licences: list[str] = []
        self.meta: list[tuple[str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note the address or the content of a tag."""
        values = {name: value or "" for name, value in attrs}
        if "license" in values.get("rel", "").split() and "href" in values:
            self.licences.append(values["href"])
        if tag == "meta":
            self.meta.append((values.get("name", ""), values.get("content", "")))


def header_opt_outs(headers: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Opt-outs in the headers of a response."""
    return _opt_outs(HEADERS, headers)


def _licence(links: list[str], html: str) -> dict[str, str]:
    for by, places in (("link", links), ("address", _CREATIVE_COMMONS.findall(html))):
        if licences := list(filter(None, map(spdx_of, places))):
            return Statement(join(licences), by).metadata()
    return Statement(links[0], "link").metadata() if links else {}


def _opt_outs(
    keys: Mapping[str, str], values: Iterable[tuple[str, str]]
) -> dict[str, str]:
    """Values of `keys`, repeated ones joined by commas, without directives for robots
    that are not about AI.
    """
    opt_outs = defaultdict(list)
    for name, value in values:
        opt_outs[keys.get(name.strip().lower(), "")].append(value.strip())
    joined = {key: ", ".join(parts) for key, parts in opt_outs.items() if key}
    return {
        key: value[:MOST_CHARACTERS]
        for key, value in joined.items()
        if "robots" not in key or _NO_AI.search(value)
    }

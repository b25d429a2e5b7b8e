"""Opt-outs from the use of a page for training, which its response headers and meta tags
state; kept as metadata, since the page itself is gone after `ingest`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from html.parser import HTMLParser

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
"""Characters of a page in which its meta tags are searched."""
MOST_CHARACTERS = 200
"""Kept characters of a value."""
_MENTIONS = re.compile("noai|noimageai|tdm-reservation", re.IGNORECASE)
_NO_AI = re.compile("noai|noimageai", re.IGNORECASE)


def header_opt_outs(headers: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Opt-outs in the headers of a response; repeated headers are joined by commas."""
    values: dict[str, list[str]] = {}
    for name, value in headers:
        key = HEADERS.get(name.lower())
        if key is not None:
            values.setdefault(key, []).append(value.strip())
    return _kept({key: ", ".join(parts) for key, parts in values.items()})


def meta_opt_outs(html: str) -> dict[str, str]:
    """Opt-outs in the meta tags at the beginning of a page."""
    head = html[:HEAD_CHARACTERS]
    if _MENTIONS.search(head) is None:
        return {}
    tags = _MetaTags()
    tags.feed(head)
    return _kept(tags.values)


def _kept(values: dict[str, str]) -> dict[str, str]:
    """Shortened values, without directives for robots that are not about AI."""
    return {
        key: value[:MOST_CHARACTERS]
        for key, value in values.items()
        if "robots" not in key or _NO_AI.search(value)
    }


class _MetaTags(HTMLParser):
    """Parser of the meta tags in META_TAGS."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, str] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note the content of a meta tag."""
        attributes = dict(attrs)
        key = META_TAGS.get((attributes.get("name") or "").strip().lower())
        if tag != "meta" or key is None:
            return
        content = (attributes.get("content") or "").strip()
        before = self.values.get(key)
        self.values[key] = content if before is None else f"{before}, {content}"

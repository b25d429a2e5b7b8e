"""Licence of a web page, by its markup, which is gone once the text is extracted.

A link with `rel=license` is the page's own statement (microformats.org/wiki/rel-license).
Another address of a licence of Creative Commons is weaker: the page may speak of the
licence, or of that of a picture.
"""

from __future__ import annotations

import re

from gristmill.dataprep.licences.statements import Statement, join
from gristmill.mixtures.spdx import spdx_of

_LINK = re.compile(r"<(?:a|link)\s[^>]*\blicense\b[^>]*>", re.IGNORECASE)
_REL = re.compile(r"\brel\s*=\s*[\"']?[^\"'>]*\blicense\b", re.IGNORECASE)
_TARGET = re.compile(r"\bhref\s*=\s*[\"']?([^\"'\s>]+)", re.IGNORECASE)
_CREATIVE_COMMONS = re.compile(
    r"creativecommons\.org/(?:licenses/[a-z]|publicdomain/)[a-z0-9./+-]+", re.IGNORECASE
)


def page_licence(html: str) -> dict[str, str]:
    """Metadata of a page with the licence that it states; several apply together."""
    addresses = []
    if "license" in html:
        addresses = [
            target[1]
            for link in _LINK.findall(html)
            if _REL.search(link) and (target := _TARGET.search(link))
        ]
    if licences := [name for name in map(spdx_of, addresses) if name]:
        return Statement(join(licences), "link").metadata()
    found = _CREATIVE_COMMONS.findall(html) if "creativecommons.org" in html else []
    if licences := [name for name in map(spdx_of, found) if name]:
        return Statement(join(licences), "address").metadata()
    return Statement(addresses[0], "link").metadata() if addresses else {}

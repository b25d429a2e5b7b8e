"""Statements of a licence: what a document's metadata or text says about it, and where
it was said.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Literal

from gristmill.mixtures.spdx import spdx_of

LICENCE, STATED_BY = "licence", "licence_by"
"""Keys of a document's metadata for a statement that was found while it was read."""
KEYS = (LICENCE, "license")
By = Literal["header", "link", "address", "package", "file", "record", "source"]
"""Place of a statement: an `SPDX-License-Identifier:` in the text; a page's link with
`rel=license`; another address of Creative Commons in a page; metadata of a package
beside a file; a licence's text beside it; the record's own field; the manifest.
"""
HEADER_CHARACTERS = 4096
"""Characters of a text in which its own header stands: tags further below are mostly
quoted. (The kernel's documentation, process/license-rules, wants the first lines; the
notices of the GNU licences may stand before it.)
"""
_HEADER = re.compile(
    r"SPDX-License-Identifier:[ \t]*([^\n]+?)[ \t]*(?:\*/|-->|\*\)|\"\"\"|#}|$)",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Statement:
    """A licence, as an SPDX expression if it has one, else as it was stated."""

    licence: str
    by: str

    @property
    def spdx(self) -> str | None:
        """SPDX expression, or None."""
        return spdx_of(self.licence)

    def metadata(self) -> dict[str, str]:
        """Keys for the metadata of a document."""
        return {LICENCE: self.licence, STATED_BY: self.by}


def join(licences: list[str]) -> str:
    """Expression of several licences that all apply."""
    distinct = sorted(set(licences))
    if len(distinct) == 1:
        return distinct[0]
    return " AND ".join(f"({each})" if " OR " in each else each for each in distinct)


def of_header(head: str) -> Statement | None:
    """Statement in the first HEADER_CHARACTERS of a text; several tags apply
    together.
    """
    if "SPDX-License-Identifier:" not in head:
        return None
    tags = _HEADER.findall(head)
    return Statement(join([spdx_of(tag) or tag for tag in tags]), "header")


def of_metadata(metadata: str | None) -> Statement | None:
    """Statement in a document's metadata (JSON)."""
    if not metadata or not any(f'"{key}"' in metadata for key in KEYS):
        return None
    values = json.loads(metadata)
    by = values.get(STATED_BY, "record")
    for key in KEYS:
        value = values.get(key)
        if isinstance(value, list) and value and all(isinstance(x, str) for x in value):
            value = join([spdx_of(each) or each for each in value])
        if isinstance(value, str) and value.strip():
            return Statement(value, by)
    return None

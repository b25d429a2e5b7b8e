"""Statements of a licence: what a document's metadata or text says about it, and where
it was said.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from gristmill.mixtures.spdx import expression_of, join

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
    def spdx(self) -> str:
        """SPDX expression, or `unknown`."""
        return expression_of(self.licence)

    def metadata(self) -> dict[str, str]:
        """Keys for the metadata of a document."""
        return {LICENCE: self.licence, STATED_BY: self.by}


def of_header(head: str) -> Statement | None:
    """Statement in the first HEADER_CHARACTERS of a text; several tags apply
    together.
    """
    if "SPDX-License-Identifier:" not in head:
        return None
    return Statement(join(_HEADER.findall(head)), "header")


def of_metadata(metadata: str | None) -> Statement | None:
    """Statement in a document's metadata (JSON)."""
    if not metadata or not any(f'"{key}"' in metadata for key in KEYS):
        return None
    return of_record(json.loads(metadata))


def of_record(values: Mapping[str, Any]) -> Statement | None:
    """Statement in the fields of a record; several licences in a list apply together."""
    for stated in filter(None, map(values.get, KEYS)):
        if isinstance(stated, list) and all(isinstance(each, str) for each in stated):
            stated = join(stated)
        if isinstance(stated, str):
            return Statement(stated, values.get(STATED_BY, "record"))
    return None

"""The section `licences`: the licence of each document, and the licences to keep."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

from gristmill.mixtures.base import Judging
from gristmill.mixtures.spdx import UNKNOWN, check_identifier


def check_allowed(licence: str) -> str:
    """Spell an SPDX identifier as SPDX does; `unknown` stays.

    Raises:
        ValueError: it is neither.
    """
    return licence if licence == UNKNOWN else check_identifier(licence)


class Licences(Judging):
    """Licences of documents as SPDX expressions, and a list of those to keep.

    The column `spdx` has the expression, or `unknown`, and `spdx_by` the place where
    the licence is stated, the first of these that states one: `header`
    (`SPDX-License-Identifier:` in the first 4,096 characters of the text), `record` (a
    field `licence` or `license` of the record, an identifier or the usual name of a
    licence with its version), `link` (a link with `rel=license` in a web page),
    `address` (another address of Creative Commons in a page), `package` (pyproject.toml,
    Cargo.toml, package.json, PKG-INFO or the header of a README.md beside a text file,
    or in the nearest folder above it within the source or the archive), `file` (a
    LICENSE or COPYING there with the text of one of 35 common licences), `source`
    (`licence` of the source in the manifest). Licences that are only described in prose
    are not recognised, nor those beside a file on a web server, which lists no folders.
    """

    allow: tuple[Annotated[str, AfterValidator(check_allowed)], ...] | None = None
    """Identifiers of the licences to keep, such as `[CC-BY-4.0, MIT]`; `unknown` keeps
    documents without a known licence. Of `A OR B` one must be among them, of `A AND B`
    both. If absent, all documents are kept, and only measured.
    """
    stated: dict[str, str] | None = None
    """Source -> licence of its documents that state none themselves; `licence` of the
    sources if absent.
    """

"""Pages as HTML: self-contained files, and pages of the servers of this machine."""

from __future__ import annotations

import hashlib
import os
import re
from base64 import b64encode
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from gristmill.flows.pages.column_glossary import MEANINGS
from gristmill.flows.pages.page_elements import Page

if TYPE_CHECKING:
    from jinja2 import BytecodeCache, Environment

TEMPLATES = Path(__file__).parent / "templates"
SERIES = {
    "#2563eb": "#60a5fa",
    "#d97706": "#fbbf24",
    "#059669": "#34d399",
    "#dc2626": "#f87171",
    "#7c3aed": "#a78bfa",
    "#0891b2": "#22d3ee",
    "#be185d": "#f472b6",
    "#4d7c0f": "#a3e635",
}
"""Colours of the series of a picture -> the same on a dark page."""
LIGHT = {
    "paper": "#ffffff",
    "ink": "#111827",
    "soft": "#6b7280",
    "line": "#e5e7eb",
    "edge": "#9ca3af",
    "accent": "#2563eb",
    "plain": "#f9fafb",
    "trained": "#bbf7d0",
    "removed": "#fee2e2",
    "added": "#dcfce7",
    "hit": "#fef08a",
    "good": "#15803d",
    "bad": "#b91c1c",
    **{f"series-{number}": colour for number, colour in enumerate(SERIES)},
}
DARK = {
    "paper": "#111827",
    "ink": "#f3f4f6",
    "soft": "#9ca3af",
    "line": "#374151",
    "edge": "#6b7280",
    "accent": "#60a5fa",
    "plain": "#1f2937",
    "trained": "#14532d",
    "removed": "#5b1a1a",
    "added": "#14452a",
    "hit": "#854d0e",
    "good": "#86efac",
    "bad": "#fca5a5",
    **{f"series-{number}": colour for number, colour in enumerate(SERIES.values())},
}
"""Variables of the style, in either mode."""
STYLE = "/style.css"
HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'self'; img-src data:; "
    "form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-store",
}
"""Headers of every answer of a server: untrusted texts stay text, and no other page
may show or load them.
"""
LONG_NAME = 16
"""Characters that a column of a table always has room for."""
BREAKS = re.compile(r"(?<=[/_])(?=[^\s/_])|(?<=\.)(?=[A-Za-z])")
"""Places where a line may end inside long names of rules, files and keys."""


def html_file(page: Page) -> str:
    """A whole HTML file. Browsers load nothing for it, and run only the script that
    sorts and searches its tables.
    """
    return _render(page, policy=file_policy(), table_script=table_script())


def served_html(page: Page) -> str:
    """A page of a server, which has `style_sheet` beside it."""
    return _render(page, policy="", table_script="")


def _render(page: Page, **options: str) -> str:
    template = environment(TEMPLATES).get_template("page.html.jinja")
    return template.render(page=page, style=STYLE, light=LIGHT, dark=DARK, **options)


def style_sheet() -> str:
    """The style of all pages, light or dark as the browser is."""
    template = environment(TEMPLATES).get_template("style.css.jinja")
    return template.render(light=LIGHT, dark=DARK)


@cache
def table_script() -> str:
    """The script that sorts and searches tables."""
    return (TEMPLATES / "tables.js").read_text(encoding="utf-8")


@cache
def file_policy() -> str:
    """The Content-Security-Policy of a file: no other file, and no script but
    `table_script`, by its hash.
    """
    digest = b64encode(hashlib.sha256(table_script().encode()).digest()).decode()
    return (
        "default-src 'none'; style-src 'unsafe-inline'; img-src data:; "
        f"script-src 'sha256-{digest}'"
    )


@cache
def environment(folder: Path) -> Environment:
    """The templates of a folder. They escape every value."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    templates = Environment(
        loader=FileSystemLoader(folder),
        bytecode_cache=compiled_templates(),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters |= {
        "breakable": breakable,
        "kind": lambda part: type(part).__name__,
        "colour": colour,
    }
    templates.globals["meanings"] = MEANINGS
    return templates


def compiled_templates() -> BytecodeCache | None:
    """Cache of compiled templates in the user's cache folder, which takes a quarter of
    a small report's time; None if that is read-only.

    Its files are named after this one, which has the options of the compilation.
    """
    from jinja2 import FileSystemBytecodeCache

    user = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(user) / "gristmill" / "templates"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    if not os.access(folder, os.W_OK):
        return None
    digest = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]
    return FileSystemBytecodeCache(str(folder), f"{digest}-%s.cache")


def colour(name: str) -> str:
    """A colour of the style, with the one on white as its default."""
    return f"var(--{name}, {LIGHT[name]})"


def breakable(value: object) -> list[str]:
    """A text in pieces between which a line may end: after the punctuation of its long
    names.
    """
    pieces = [""]
    for word in re.split(r"(\s+)", str(value)):
        first, *more = BREAKS.split(word) if len(word) > LONG_NAME else [word]
        pieces[-1] += first
        pieces += more
    return pieces

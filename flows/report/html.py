"""The pieces of HTML that reports are made of."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from gristmill.flows.report.pictures import ON_DARK


def _variables(colours: Mapping[str, str]) -> str:
    return " ".join(f"--{name}: {colour};" for name, colour in colours.items())


LIGHT = {"paper": "#ffffff", "ink": "#111827", "soft": "#6b7280", "line": "#e5e7eb", "edge": "#9ca3af",
         "accent": "#2563eb", "plain": "#f9fafb", "trained": "#bbf7d0"}
DARK = {"paper": "#111827", "ink": "#f3f4f6", "soft": "#9ca3af", "line": "#374151", "edge": "#6b7280",
        "accent": "#60a5fa", "plain": "#1f2937", "trained": "#14532d",
        **{f"series-{number}": colour for number, colour in enumerate(ON_DARK)}}
STYLE = f"""
:root {{ color-scheme: light dark; {_variables(LIGHT)} }}
@media screen and (prefers-color-scheme: dark) {{ :root {{ {_variables(DARK)} }} }}
""" + """
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 0 auto;
       max-width: 60rem; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.7rem; margin: 0; } h2 { font-size: 1.15rem; margin: 2.4rem 0 .6rem; }
p.note, figcaption { color: var(--soft); margin: .2rem 0; }
nav { margin: 1rem 0 0; font-size: .92rem; line-height: 1.9; } nav a { margin-right: .9rem; white-space: nowrap; }
a { color: var(--accent); text-decoration: none; }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: .92rem; }
th, td { text-align: left; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td { overflow-wrap: break-word; } td.n { white-space: nowrap; }
th { color: var(--soft); font-weight: 500; } .n { text-align: right; font-variant-numeric: tabular-nums; }
figure { margin: .6rem 0; } svg { width: 100%; max-width: 40rem; height: auto; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: var(--plain); border: 1px solid var(--line);
      border-radius: 6px; padding: .7rem .9rem; margin: .4rem 0 1rem; font-size: .85rem; }
code { overflow-wrap: anywhere; } .cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr));
gap: .7rem; margin: 1.2rem 0; } .card { border: 1px solid var(--line); border-radius: 8px; padding: .6rem .8rem; }
.card b { display: block; font-size: 1.25rem; } .card span { color: var(--soft); font-size: .85rem; }
.trained { background: var(--trained); print-color-adjust: exact; } .masked { color: var(--soft); }
h3 { font-size: 1rem; margin: 1.4rem 0 .3rem; } h4 { font-size: .88rem; margin: .7rem 0 .2rem; font-weight: 600; }
ul { margin: .2rem 0 .6rem; padding-left: 1.1rem; font-size: .85rem; } li span { color: var(--soft); }
li { overflow-wrap: anywhere; margin-bottom: .25rem; }
summary { cursor: pointer; color: var(--accent); overflow-wrap: anywhere; padding: .15rem 0; }
@media (max-width: 40rem) { td, th { padding-right: .5rem; font-size: .85rem; } }
@page { margin: 1.4cm; }
@media print { body { max-width: none; padding: 0; font-size: 11px; } nav { display: none; }
  .wide { overflow: visible; } h2, h3, h4, summary { break-after: avoid; }
  figure, tr, .card, li { break-inside: avoid; } pre { font-size: 9px; }
  pre.long { columns: 3; font-size: 7px; padding: 0; border: 0; } svg { max-width: 32rem; }
  details::details-content { content-visibility: visible; display: block; } }
"""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""Browsers run nothing of it, and refuse whatever would be loaded from elsewhere."""
LONG_NAME = 16
"""Characters that a column of a table always has room for."""
BREAKS = re.compile(r"(?<=[/_])(?=[^\s/_])|(?<=\.)(?=[A-Za-z])")
"""Where long names of rules, files and keys may be cut, rather than in the middle of a word."""


def page(title: str, body: str) -> str:
    """A whole file: nothing in it is loaded from elsewhere."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f"<title>{escape(title)} - gristmill</title><style>{STYLE}</style></head>\n"
        f"<body>\n{body}\n</body></html>\n"
    )


def contents(body: str) -> tuple[str, str]:
    """Links to the headings of the second level, and the body in which these can be linked to."""
    titles = re.findall(r"<h2>(.*?)</h2>", body)
    links = "".join(f'<a href="#part-{number}">{title}</a> ' for number, title in enumerate(titles))
    numbers = iter(range(len(titles)))
    return f"<nav>{links}</nav>", re.sub(r"<h2>", lambda _: f'<h2 id="part-{next(numbers)}">', body)


def breakable(text: str) -> str:
    """A text as HTML that may be cut behind the punctuation of its long names."""
    return "".join("<wbr>".join(map(escape, BREAKS.split(word))) if len(word) > LONG_NAME else escape(word)
                   for word in re.split(r"(\s+)", text))


def table(header_: list[str], rows: list[list[Any]], numeric: set[int]) -> str:
    """An HTML table; columns in `numeric` are set to the right."""
    def cells(tag: str, values: list[Any]) -> str:
        marks = [' class="n"' if index in numeric else "" for index in range(len(values))]
        return "".join(f"<{tag}{mark}>{escape(str(value)) if mark else breakable(str(value))}</{tag}>"
                       for mark, value in zip(marks, values, strict=True))

    lines = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{cells("th", header_)}</tr>{lines}</table></div>'


def figure(svg: str, caption: str) -> str:
    """A picture with a caption."""
    return f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>"


def details(summary: str, body: str) -> str:
    """A part that opens where it is asked for."""
    return f"<details><summary>{breakable(summary)}</summary>{body}</details>"


def listing(title: str, rows: Sequence[tuple[str, str, str]]) -> str:
    """Short texts under a title: (what stands before, where it is from, the text)."""
    lines = "".join(f"<li><b>{escape(mark)}</b> <span>{escape(place)}</span><br>{escape(text)}</li>"
                    for mark, place, text in rows)
    return f"<h4>{escape(title)}</h4><ul>{lines}</ul>" if rows else ""

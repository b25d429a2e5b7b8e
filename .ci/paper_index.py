"""Write the index of papers cited by docstrings and comments of the package:
docs/papers.md (`make reference`).

A citation is authors and a year, as in "Hu et al. 2022". Titles are in
`.ci/papers.yaml`; an author alone with a year is a citation only if that file has it.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from gristmill.dataprep.runners.worker_bootstrap import SUBPACKAGES

ROOT = Path(__file__).resolve().parents[1]
NAME = r"[A-Z][\w'’-]+"
CITED = re.compile(
    rf"({NAME}(?: et al\.|(?:, {NAME})*,? (?:&|and) {NAME})?),? \(?((?:19|20)\d\d)(?![\d-])[a-z]?"
)
TOPICS = {
    "Documents": ("dataprep/", "mixtures/steps/"),
    "Tokens and mixtures": (
        "tokenize/",
        "mixtures/schema/mix.py",
        "mixtures/schema/tokenizer.py",
        "flows/sweeps/",
    ),
    "Models and training": ("train/", "mixtures/"),
    "Planning, questions and people": ("flows/",),
    "Stores and seeds": ("core/",),
}
"""Heading -> folders and files whose citations are below it; the first match counts."""
Places = dict[tuple[str, str, str], list[str]]
"""Topic, paper and title -> links to the citing code."""
TITLE = """\
# Paper index

Papers that rules, losses, schedules and kernels follow, with the code that cites them: written by `make reference` from
docstrings and comments. Sections and equations stand beside the citation in the code.
"""


def page(lines: bool = False) -> str:
    """Return the whole page; with `lines`, each place has its current line, for the
    site, which is built each time.
    """
    parts = [TITLE]
    papers = cited(lines)
    for topic in TOPICS:
        parts += [f"## {topic}\n", "| paper | title | where |", "| --- | --- | --- |"]
        for (paper_topic, name, title), places in papers.items():
            if paper_topic == topic:
                parts.append(f"| {name} | {title} | {', '.join(places)} |")
        parts.append("")
    return "\n".join(parts)


def cited(lines: bool) -> Places:
    """Collect citations, sorted by topic and paper."""
    titles = yaml.safe_load((ROOT / ".ci" / "papers.yaml").read_text())
    links: dict[tuple[str, str, str], dict[str, None]] = defaultdict(dict)
    for folder in SUBPACKAGES:
        for path in sorted((ROOT / folder).rglob("*.py")):
            place = str(path.relative_to(ROOT))
            topic = next(
                topic for topic, starts in TOPICS.items() if place.startswith(starts)
            )
            for line, symbol, text in prose_of(path):
                for name in names_in(text, titles):
                    title = title_of(titles.get(name, ""), place)
                    label, anchor = (
                        (f" {place}:{line}", f"#L{line}") if lines else ("", "")
                    )
                    link = f"[`{symbol or path.stem}`{label}](../{place}{anchor})"
                    links[topic, name, title][link] = None
    return {paper: list(places) for paper, places in sorted(links.items())}


def names_in(text: str, titles: Mapping[str, Any]) -> Iterator[str]:
    """Return the papers that a text cites."""
    for match in CITED.finditer(text):
        name = f"{match[1]} {match[2]}"
        if name in titles or not re.fullmatch(rf"{NAME} \d+", name):
            yield name


def title_of(entry: str | list[list[str]], place: str) -> str:
    """Return the title of a citation in a file."""
    return (
        entry
        if isinstance(entry, str)
        else next(title for part, title in entry if part in place)
    )


def prose_of(path: Path) -> Iterator[tuple[int, str, str]]:
    """Return docstrings and comments of a file as single lines, each with its first
    line number and its symbol.
    """
    source = path.read_text()
    lines = source.splitlines()
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield (
                node.lineno,
                symbol_at(tree, node.lineno),
                " ".join(node.value.value.split()),
            )
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            line = token.start[0]
            described = next(
                number
                for number, text in enumerate(lines[line - 1 :], line)
                if not text.lstrip().startswith("#")
            )
            yield line, symbol_at(tree, described), token.string


def symbol_at(tree: ast.Module, line: int) -> str:
    """Return the class, function or name that a line describes: the innermost around
    it, or the one above it.
    """
    names: list[str] = []
    body: list[ast.stmt] = tree.body
    while True:
        before = [node for node in body if node.lineno <= line]
        inside = before[-1] if before else None
        if isinstance(inside, ast.ClassDef | ast.FunctionDef) and line <= (
            inside.end_lineno or 0
        ):
            names.append(inside.name)
            body = inside.body
            continue
        if len(before) > 1 and isinstance(inside, ast.Expr):
            inside = before[-2]
        if isinstance(inside, ast.AnnAssign | ast.Assign) and not any(
            name[0].islower() for name in names
        ):
            target = (
                inside.target
                if isinstance(inside, ast.AnnAssign)
                else inside.targets[0]
            )
            names.append(ast.unparse(target).strip("()"))
        return ".".join(names)


if __name__ == "__main__":
    print(page(), end="")

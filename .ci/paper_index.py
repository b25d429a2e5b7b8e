"""Write the index of papers from what docstrings and comments of the package cite: docs/papers.md (`make reference`).

A citation is authors and a year, as in "Hu et al. 2022". Titles are in `.ci/papers.yaml`; an author alone with a year
is taken for a paper only where that file has it.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
NAME = r"[A-Z][\w'’-]+"
CITED = re.compile(rf"({NAME}(?: et al\.|(?:, {NAME})*,? (?:&|and) {NAME})?),? \(?((?:19|20)\d\d)(?![\d-])[a-z]?")
TOPICS = {
    "Documents": ("dataprep/", "mixtures/steps/"),
    "Tokens and mixtures": ("tokenize/", "mixtures/mix.py", "mixtures/tokenizer.py", "flows/sweeps/"),
    "Models and training": ("train/", "mixtures/"),
    "Planning, questions and people": ("flows/",),
    "Stores and seeds": ("core/",),
}
"""Heading -> the folders and files whose citations stand below it; the first that fits."""
TITLE = """\
# Paper index

Which rule, loss, schedule or kernel follows which paper, and where it is: written by `make reference` from what the
code cites. Sections and equations stand beside the citation in the code.
"""


def page(lines: bool = False) -> str:
    """The whole page; with `lines` each place has its line, as it is now: for the site, which is built each time."""
    parts = [TITLE]
    papers = cited(lines)
    for topic in TOPICS:
        rows = [
            f"| {name} | {title} | {', '.join(places)} |" for (of, name, title), places in papers.items() if of == topic
        ]
        parts += [f"## {topic}\n", "| paper | title | where |", "| --- | --- | --- |", *rows, ""]
    return "\n".join(parts)


def cited(lines: bool) -> dict[tuple[str, str, str], list[str]]:
    """Topic, paper and title -> links to what cites it, sorted by paper."""
    titles = yaml.safe_load((ROOT / ".ci" / "papers.yaml").read_text())
    found: dict[tuple[str, str, str], dict[str, None]] = defaultdict(dict)
    for folder in ("mixtures", "core", "dataprep", "tokenize", "train", "flows"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            place = str(path.relative_to(ROOT))
            topic = next(topic for topic, starts in TOPICS.items() if place.startswith(starts))
            for line, symbol, text in written(path):
                for match in CITED.finditer(text):
                    name = f"{match[1]} {match[2]}"
                    if name in titles or not re.fullmatch(rf"{NAME} \d+", name):
                        title = title_of(titles.get(name, ""), place)
                        named, anchor = (f" {place}:{line}", f"#L{line}") if lines else ("", "")
                        link = f"[`{symbol or path.stem}`{named}](../{place}{anchor})"
                        found[topic, name, title][link] = None
    return {paper: list(places) for paper, places in sorted(found.items())}


def title_of(entry: str | list[list[str]], place: str) -> str:
    """The title of a citation in a file."""
    return entry if isinstance(entry, str) else next(title for part, title in entry if part in place)


def written(path: Path) -> Iterator[tuple[int, str, str]]:
    """Docstrings and comments of a file as single lines, each with where it begins and the name of what it is about."""
    source = path.read_text()
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, symbol_at(tree, node.lineno), " ".join(node.value.value.split())
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], symbol_at(tree, token.start[0]), token.string


def symbol_at(tree: ast.Module, line: int) -> str:
    """The class, function or name that a line describes: the innermost that it stands in, or the one above it."""
    names: list[str] = []
    body: list[ast.stmt] = tree.body
    while True:
        before = [node for node in body if node.lineno <= line]
        inside = before[-1] if before else None
        if isinstance(inside, ast.ClassDef | ast.FunctionDef) and line <= (inside.end_lineno or 0):
            names.append(inside.name)
            body = inside.body
            continue
        if len(before) > 1 and isinstance(inside, ast.Expr):
            inside = before[-2]
        if isinstance(inside, ast.AnnAssign | ast.Assign) and not any(name[0].islower() for name in names):
            target = inside.target if isinstance(inside, ast.AnnAssign) else inside.targets[0]
            names.append(ast.unparse(target).strip("()"))
        return ".".join(names)


if __name__ == "__main__":
    print(page(), end="")

"""Definitions of the columns of the report."""

from __future__ import annotations

import ast
import re

import pytest

from benchmarks.checkout import ROOT
from gristmill.flows.pages.column_glossary import MEANINGS

FLOWS = ROOT / "flows"


FORMAT = re.compile(r">|\+?,?(\.\d)?[fgd%]?")


def numeric_columns(tree: ast.Module) -> set[str]:
    """Return the names of columns with a format in the tables of a module's functions."""
    tuples: dict[str, list[ast.expr]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            for target in node.targets:
                tuples.setdefault(ast.unparse(target), []).extend(node.value.elts)

    def names_in(keys: list[ast.expr]) -> set[str]:
        names = {key.value for key in keys if isinstance(key, ast.Constant)}
        for key in keys:
            if isinstance(key, ast.Starred) and isinstance(key.value, ast.Name):
                names |= names_in(tuples[key.value.id])
        return names

    def is_number(form: ast.expr) -> bool:
        return (
            isinstance(form, ast.Constant)
            and bool(form.value)
            and FORMAT.fullmatch(str(form.value)) is not None
        )

    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    names = set()
    for node in (node for function in functions for node in ast.walk(function)):
        if isinstance(node, ast.Dict):
            pairs = zip(node.keys, node.values, strict=True)
            names |= names_in([key for key, form in pairs if key and is_number(form)])
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "fromkeys":
            keys, *forms = node.args
            if all(map(is_number, forms)):
                elements = getattr(keys, "elts", tuples.get(ast.unparse(keys), []))
                names |= names_in(elements)
    return names


@pytest.mark.slow
def test_every_numeric_column_has_a_definition() -> None:
    """A column is defined in its tooltip."""
    column_names, constants = set(), set()
    for path in FLOWS.rglob("*.py"):
        tree = ast.parse(path.read_text())
        if path.name != "column_glossary.py":
            constants |= {
                node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)
            }
        if path.parent.name == "report" and path.name != "terminal_summary.py":
            column_names |= numeric_columns(tree)
    assert len(column_names) > 90
    assert column_names - set(MEANINGS) == set()
    assert set(MEANINGS) - constants == set(), (
        "every meaning belongs to a column of a table"
    )

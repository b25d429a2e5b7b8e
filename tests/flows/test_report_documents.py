"""Whole documents in the report, and definitions of its columns."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from gristmill.dataprep.documents import DOCUMENT_SCHEMA, document_id, write_table
from gristmill.flows.pages.column_glossary import MEANINGS
from gristmill.flows.pages.markdown import markdown_page
from gristmill.flows.pages.page_elements import (
    Page,
    Span,
)
from gristmill.flows.questions.document_samples import (
    DROPPED_SHOWN,
    KEPT_SHOWN,
    MOST_GROUPS,
    SHOWN_CHARACTERS,
    DocumentGroup,
    ShownDocument,
    shown_documents,
)
from gristmill.flows.questions.explain import TextPiece
from gristmill.flows.report.document_sections import folded, whole_documents
from gristmill.flows.report.facts import Facts
from tests.flows.rendered import html_of

FLOWS = Path(__file__).resolve().parents[2] / "flows"


def committed(
    folder: Path, rows: list[tuple[str, str, str | None, str | None]]
) -> dict[str, Path]:
    """Write two shards of documents, each (source, text, reason of `first` or None,
    reason of `second` or None).
    """
    for shard in (0, 1):
        shard_rows = [
            (f"{place}.txt", *row)
            for place, row in enumerate(rows)
            if place % 2 == shard
        ]
        ids = [
            document_id(source, locator, text)
            for locator, source, text, _, _ in shard_rows
        ]
        write_table(
            folder / "ingest" / f"part-{shard}.parquet",
            pa.table(
                {
                    "id": ids,
                    "source": [row[1] for row in shard_rows],
                    "locator": [row[0] for row in shard_rows],
                    "text": [row[2] for row in shard_rows],
                    "metadata": ["{}"] * len(shard_rows),
                },
                DOCUMENT_SCHEMA,
            ),
        )
        for step, reason_index in (("first", 3), ("second", 4)):
            dropped_before = [
                step == "second" and row[3] is not None for row in shard_rows
            ]
            write_table(
                folder / step / f"part-{shard}.parquet",
                pa.table(
                    {
                        "id": pa.array(ids, pa.binary(16)),
                        "keep": pa.array(
                            [
                                None if is_dropped else row[reason_index] is None
                                for is_dropped, row in zip(
                                    dropped_before, shard_rows, strict=True
                                )
                            ],
                            pa.bool_(),
                        ),
                        "reason": pa.array(
                            [
                                None if is_dropped else row[reason_index]
                                for is_dropped, row in zip(
                                    dropped_before, shard_rows, strict=True
                                )
                            ],
                            pa.string(),
                        ).dictionary_encode(),
                        "error": pa.nulls(len(shard_rows), pa.string()),
                        "words": [len(row[2].split()) for row in shard_rows],
                    }
                ),
            )
    return {name: folder / name for name in ("ingest", "first", "second")}


RECIPES: dict[str, dict[str, Any]] = {
    "ingest": {},
    "first": {"min": {"words": 3}},
    "second": {},
}


@pytest.mark.slow
def test_document_sample_is_random_but_reproducible(
    tmp_path: Path,
) -> None:
    rows: list[tuple[str, str, str | None, str | None]] = [
        ("web", f"a page with number {n}", None, None) for n in range(30)
    ]
    rows += [("book", "x" * (SHOWN_CHARACTERS + 5), None, None)]
    rows += [("web", f"short {n}", "first/min_words", None) for n in range(7)]
    rows += [
        ("web", f"some text that is there twice {n}", None, "exact_duplicate")
        for n in range(3)
    ]
    inputs = committed(tmp_path, rows)
    kept, short, duplicates = shown_documents(RECIPES, inputs)
    assert [
        (group.step, group.rule, group.documents) for group in (kept, short, duplicates)
    ] == [
        (None, None, 31),
        ("first", "first/min_words", 7),
        ("second", "exact_duplicate", 3),
    ]
    assert [len(group.shown) for group in (kept, short, duplicates)] == [
        KEPT_SHOWN,
        DROPPED_SHOWN,
        DROPPED_SHOWN,
    ]
    assert [group.source for group in kept.shown] == [
        "book",
        *["web"] * (KEPT_SHOWN - 1),
    ]
    book, page, *_ = kept.shown
    assert [len(piece.text) for piece in book.pieces] == [SHOWN_CHARACTERS]
    assert book.characters == SHOWN_CHARACTERS + 5
    pages = {
        document_id("web", f"{n}.txt", text).hex(): text
        for n, (_, text, *reasons) in enumerate(rows[:30])
    }
    assert [group.id for group in kept.shown[1:]] == sorted(pages)[: KEPT_SHOWN - 1], (
        "the smallest ids of both shards"
    )
    assert page.pieces == [TextPiece(pages[page.id])]
    assert page.verdict == []
    assert [group.verdict for group in short.shown] == [["threshold 3", "words 2"]] * 2
    assert shown_documents(RECIPES, inputs) == [kept, short, duplicates]


def test_documents_are_shown_only_for_rules_that_dropped_most(
    tmp_path: Path,
) -> None:
    rows: list[tuple[str, str, str | None, str | None]] = [
        ("web", f"{rule} {n}", f"rule {rule:02}", None)
        for rule in range(MOST_GROUPS + 3)
        for n in range(rule + 1)
    ]
    groups = shown_documents(RECIPES, committed(tmp_path, rows))
    assert [group.rule for group in groups] == [
        f"rule {rule:02}" for rule in range(MOST_GROUPS + 2, 2, -1)
    ]


def test_long_common_passages_are_folded_on_both_sides() -> None:
    shared_text = "word " * 2000
    spans = folded([("new ", True), (shared_text, False), ("end", True)], "added")
    assert [span.mark for span in spans] == ["added", "", "masked", "", "added"]
    assert spans[2].text.strip() == "[8,000 characters that both have]"
    assert len(spans[1].text) == len(spans[3].text) == 1000
    assert folded([(shared_text, False)], "removed")[1] == spans[2]
    assert folded([("short", False), ("<b>", True)], "removed") == [
        Span("short"),
        Span("<b>", "removed"),
    ]


def test_whole_documents_open_individually_with_their_verdicts() -> None:
    kept = ShownDocument(
        id="ab" * 16,
        source="web",
        locator="a<b",
        characters=11,
        verdict=[],
        pieces=[
            TextPiece("mail "),
            TextPiece("me@x.y", "removed", "clean"),
            TextPiece("<EMAIL>", "added", "clean"),
        ],
    )
    long = ShownDocument(
        id="cd" * 16,
        source="web",
        locator="c",
        characters=50,
        verdict=["threshold 50", "words 3"],
        pieces=[TextPiece("Nothing but this")],
    )
    facts = Facts(
        shown_documents=[
            DocumentGroup(None, None, 1234, [kept]),
            DocumentGroup("filter", "gopher_quality/min_words", 2, [long]),
        ]
    )
    html = html_of(whole_documents(facts))
    assert re.findall(r"<h3>(.*?)</h3>", html) == [
        "Kept (1,234)",
        "Dropped by filter: gopher_quality/min_words (2)",
    ]
    assert re.findall(r"<summary>(.*?)</summary>", html) == [
        "web a&lt;b, 11 characters: mail me@x.y",
        "web c, 50 characters: Nothing but this",
    ]
    assert "<pre>mail <del>me@x.y</del><ins>&lt;EMAIL&gt;</ins></pre>" in html
    assert (
        '<p class="note">threshold 50</p>\n<p class="note">words 3</p>\n<pre>Nothing '
        "but this</pre>" in html
    )
    assert html.count("The first") == 1
    assert (
        "The first 16 of 50 characters; <code>gristmill explain MANIFEST "
        f"{'cd' * 16} --text</code>" in html
    )
    assert whole_documents(Facts()) is None
    markdown = markdown_page(
        Page(
            "x",
            [section for section in (whole_documents(facts),) if section is not None],
        )
    )
    assert "Kept (1,234)" in markdown
    assert "Nothing" not in markdown, "Markdown has no folded documents"


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

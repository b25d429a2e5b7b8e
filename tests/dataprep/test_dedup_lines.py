"""The stage `dedup_lines`: one copy of each line stays, for any shards."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.core.stage_context import Context
from gristmill.dataprep.conservation import check_conservation
from gristmill.dataprep.dedup import lines as dedup_lines
from gristmill.dataprep.dedup.lines import (
    LinesSummary,
    UnitCounts,
    cut_units,
    find_units,
)
from gristmill.dataprep.documents import document_id, write_table
from gristmill.dataprep.edits import apply_edits, cuts_array
from gristmill.dataprep.shuffle_format import find_pairs
from gristmill.dataprep.text.unicode_tables import lower_case
from tests.dataprep.document_shards import (
    Document,
    jobs_in_this_process,
    rewrite_texts,
    rows_by_id,
    texts_by_locator,
    write_shards,
)


@pytest.fixture
def run(run_stage: Callable) -> Callable:
    """Run the stage: (name, shards, settings, **settings of BeamEngine) -> inputs with
    its output, summary.
    """
    return partial(run_stage, dedup_lines, "dedup_lines")


def without_moves(summary: LinesSummary) -> LinesSummary:
    return replace(summary, units=replace(summary.units, shuffled=0))


def kept_texts_of(inputs: dict[str, Path]) -> dict[str, str]:
    """Edited texts of the kept documents, by locator."""
    kept_ids = {
        key for key, row in rows_by_id(inputs["dedup_lines"]).items() if row["keep"]
    }
    kept_locators = set()
    for path in inputs["ingest"].glob("part-*.parquet"):
        rows = pq.read_table(path, columns=["id", "locator"]).to_pylist()
        kept_locators |= {row["locator"] for row in rows if row["id"] in kept_ids}
    return {
        locator: text
        for locator, text in texts_by_locator(inputs).items()
        if locator in kept_locators
    }


def by_id(documents: Sequence[Document]) -> list[Document]:
    return sorted(documents, key=lambda document: document_id(*document))


def normalised(line: str) -> str:
    """Strip and lower, code point by code point."""
    table = lower_case()
    return "".join(chr(table[ord(char)]) for char in line.strip())


def lines_left(documents: Sequence[Document]) -> dict[str, list[str]]:
    """C4's rule in plain Python: documents in the order of their ids keep each line
    that no earlier one kept.
    """
    kept_lines: set[str] = set()
    lines_by_document: dict[str, list[str]] = {}
    for document in by_id(documents):
        lines = []
        for line in document[2].split("\n"):
            if line.strip() and normalised(line) not in kept_lines:
                kept_lines.add(normalised(line))
                lines.append(line.strip())
        lines_by_document[document[1]] = lines
    return lines_by_document


LINES = st.sampled_from(["a", "A ", "b", " b", "c c", "", " ", "ß", "Σ\u00a0", "日本"])
TEXTS = st.lists(LINES, max_size=6).map("\n".join)


@pytest.mark.slow
@settings(deadline=None, max_examples=25)
@given(texts=st.lists(TEXTS, min_size=1, max_size=6), cuts=st.integers(1, 3))
def test_kept_lines_equal_c4_in_plain_python(
    texts: list[str], cuts: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("case")
    documents = [("web", str(row), text) for row, text in enumerate(texts)]
    ingest = write_shards(
        folder / "ingest", [documents[at::cuts] for at in range(cuts)]
    )
    context = Context(
        work=folder / "work", stage="dedup_lines", emit=lambda event: None
    )
    with jobs_in_this_process(dedup_lines):
        summary = dedup_lines.run(
            {"ingest": ingest}, {"min_words": 1}, folder / "out", context
        )
    check_conservation(summary.counts, "dedup_lines")
    expected = {name: lines for name, lines in lines_left(documents).items() if lines}
    kept_texts = kept_texts_of({"ingest": ingest, "dedup_lines": folder / "out"})
    for name, text in kept_texts.items():
        lines = [line.strip() for line in text.split("\n") if line.strip()]
        assert lines == expected.get(name, [])
    untouched = {str(row) for row, text in enumerate(texts) if not text.strip()}
    assert set(kept_texts) == set(expected) | untouched


def corpus() -> list[Document]:
    footer = "All rights reserved by the owners of this page."
    pages = [
        (
            "web",
            f"page{n}",
            f"Only page {n} says this in so many words.\n{footer}\nAnd {n} ends.",
        )
        for n in range(12)
    ]
    news = "The committee met on Monday and decided nothing at all."
    return [
        *pages,
        ("news", "first", f"{news}\n  {footer.upper()}  "),
        ("news", "second", f"Intro of mine.\n{news}"),
        ("news", "copy", f"{news}\n{footer}"),
        ("books", "refrain", "Row, row, row your boat, gently.\n" * 3),
        ("web", "braces", "}\n}\n}"),
    ]


def test_repeated_line_stays_in_the_document_with_the_smallest_id(
    run: Callable,
) -> None:
    documents = corpus()
    inputs, summary = run("all", [documents[:5], documents[5:]], {})
    texts = kept_texts_of(inputs)
    footer = "all rights reserved by the owners of this page."
    with_footer = [name for name, text in texts.items() if footer in text.lower()]
    owners = [document for document in documents if footer in document[2].lower()]
    assert with_footer == [by_id(owners)[0][1]]
    assert texts["refrain"] == "Row, row, row your boat, gently.\n"
    assert texts["braces"] == "}\n}\n}"  # lines of one word stay
    assert sum("decided nothing" in text for text in texts.values()) == 1
    assert [(row.documents, row.text.lower()) for row in summary.most_repeated] == [
        (14, footer),
        (3, "the committee met on monday and decided nothing at all."),
    ]
    assert summary.most_repeated[0].document == document_id(*by_id(owners)[0]).hex()
    assert summary.units.repeated == 2
    assert summary.units.removed == 13 + 2 + 2
    sizes = {document[1]: len(document[2].encode()) for document in documents}
    rows = rows_by_id(inputs["dedup_lines"])
    cut = {
        document[1]: sum(
            edit["end"] - edit["begin"]
            for edit in rows[document_id(*document)]["edits"]
        )
        for document in documents
    }
    assert summary.units.bytes_cut == sum(cut.values())
    assert all(
        len(text.encode()) == sizes[name] - cut[name] for name, text in texts.items()
    )


def test_document_that_loses_too_much_is_dropped(run: Callable) -> None:
    same = "This sentence is in every one of them."
    documents = [
        ("web", str(row), text)
        for row, text in enumerate(
            [same, f"  {same}\n", f"{same}\nMine alone, and just as long as that is."]
        )
    ]
    first = by_id(documents)[0][1]
    inputs, _ = run(
        "all",
        [documents],
        {"max_removed_line_ratio": 0.4},
    )
    rows = {
        document[1]: rows_by_id(inputs["dedup_lines"])[document_id(*document)]
        for document in documents
    }
    for name, row in rows.items():
        if name == first:
            assert (row["keep"], row["lines_removed"], row["removed_line_ratio"]) == (
                True,
                0,
                0.0,
            )
        elif name == "2":
            assert row["reason"] == "dedup_lines/max_removed_line_ratio"
            assert row["removed_line_ratio"] == len(same) / (len(same) + 40)
        else:
            assert (row["reason"], row["removed_line_ratio"]) == (
                "dedup_lines/empty",
                1.0,
            )


def test_cut_all_removes_boilerplate_everywhere_and_keeps_rarer_lines(
    run: Callable,
) -> None:
    config = {"action": "cut_all", "min_documents": 10, "within_documents": False}
    inputs, summary = run("all", [corpus()], config)
    texts = kept_texts_of(inputs)
    assert not any("rights reserved" in text.lower() for text in texts.values())
    assert sum("decided nothing" in text for text in texts.values()) == 3
    assert texts["refrain"].count("Row") == 3
    assert summary.units.removed == 14


def test_paragraphs_are_compared_as_a_whole(run: Callable) -> None:
    shared = "One line of it,\nand another line of it."
    documents = [
        ("web", "a", f"First of all here.\n\n{shared}\n\nThe end of a."),
        ("web", "b", f"{shared}\n\n\nRest."),
    ]
    inputs, _ = run("all", [documents], {"unit": "paragraph"})
    texts = kept_texts_of(inputs)
    expected = {
        "a": {"a": documents[0][2], "b": "Rest."},
        "b": {"a": "First of all here.\n\nThe end of a.", "b": documents[1][2]},
    }
    assert texts == expected[by_id(documents)[0][1]]


@pytest.mark.parametrize(("normalise", "survivors"), [("strip_lower", 1), ("strip", 2)])
def test_case_matters_only_with_normalise_strip(
    run: Callable, normalise: str, survivors: int
) -> None:
    documents = [
        ("web", "a", "The same words again here."),
        ("web", "b", "the SAME words again here. "),
    ]
    inputs, _ = run(
        "all",
        [documents],
        {"normalise": normalise},
    )
    assert len(kept_texts_of(inputs)) == survivors


def test_shards_workers_and_order_do_not_change_the_result(
    run: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = corpus()
    mixed = random.Random(4).sample(documents, len(documents))
    cut = [mixed[at : at + 3] for at in range(0, len(mixed), 3)]
    first, first_summary = run("one", [documents], {})
    second, second_summary = run("cut", cut, {}, workers=2)
    monkeypatch.setattr(dedup_lines, "count_partitions", lambda size: 3)
    third, third_summary = run("three", cut, {})
    outs = [rows_by_id(inputs["dedup_lines"]) for inputs in (first, second, third)]
    assert outs[0] == outs[1] == outs[2]
    # how much is moved depends on the shards, the result does not
    assert (
        without_moves(first_summary)
        == without_moves(second_summary)
        == without_moves(third_summary)
    )


def test_line_on_every_page_is_shuffled_once_per_shard(run: Callable) -> None:
    licence = "Permission is hereby granted, free of charge, to any person."
    documents = [("web", str(row), "\n".join([licence] * 50)) for row in range(2000)]
    _, summary = run(
        "all",
        [documents[:1000], documents[1000:]],
        {},
    )
    assert summary.units.seen == 100_000
    assert summary.units.shuffled == 2
    assert summary.units.removed == 99_999
    assert (summary.counts["kept"], summary.counts["dropped"]) == (
        1,
        {"dedup_lines/empty": 1999},
    )


def test_only_kept_documents_of_the_sources_are_compared(
    write_ingest: Callable, make_context: Callable, tmp_path: Path
) -> None:
    line = "A line that all of these four have."
    documents = [
        ("web", str(row), f"{line}\nOwn line of number {row} is here.")
        for row in range(3)
    ]
    documents.append(("books", "book", line))
    ingest = write_ingest("ingest", [documents])
    ids = pq.read_table(ingest / "part-00000.parquet")["id"]
    first = by_id(documents[:3])[0][1]
    write_table(
        tmp_path / "filter" / "part-00000.parquet",
        pa.table(
            {
                "id": ids,
                "keep": pa.array([document[1] != first for document in documents]),
            }
        ),
    )
    inputs = {"ingest": ingest, "filter": tmp_path / "filter"}
    out = tmp_path / "out"
    summary = dedup_lines.run(inputs, {"sources": ["web"]}, out, make_context("work"))
    rows = {
        document[1]: rows_by_id(out)[document_id(*document)] for document in documents
    }
    assert (rows[first]["keep"], rows[first]["edits"]) == (None, None)
    assert (rows["book"]["keep"], rows["book"]["lines_removed"]) == (True, None)
    assert sum(row["lines_removed"] or 0 for row in rows.values()) == 1
    assert summary.counts["read"] == 3


def test_text_that_is_not_utf8_is_quarantined_and_not_compared(
    write_ingest: Callable, make_context: Callable, tmp_path: Path
) -> None:
    ingest = write_ingest(
        "ingest",
        [[("web", str(row), "The same line in all of them.") for row in range(3)]],
    )
    line = b"The same line in all of them."
    rewrite_texts(ingest / "part-00000.parquet", [line + b" caf\xe9", line, line])
    out = tmp_path / "out"
    summary = dedup_lines.run(
        {"ingest": ingest}, {"max_quarantined": 0.5}, out, make_context("work")
    )
    check_conservation(summary.counts, "dedup_lines")
    assert (summary.counts["quarantined"], summary.counts["kept"]) == (1, 1)
    (bad,) = [row for row in rows_by_id(out).values() if row["error"]]
    assert "UTF8" in bad["error"]
    assert (bad["reason"], bad["edits"]) == ("quarantine", None)


def test_empty_corpus_is_allowed(
    write_ingest: Callable, make_context: Callable, tmp_path: Path
) -> None:
    (tmp_path / "ingest").mkdir()
    summary = dedup_lines.run(
        {"ingest": tmp_path / "ingest"}, {}, tmp_path / "out", make_context("work")
    )
    assert summary.units == UnitCounts(
        seen=0, shuffled=0, repeated=0, removed=0, bytes_cut=0
    )


@settings(deadline=None)
@given(
    st.lists(st.text(alphabet="aB \nÄ\u2003ſ日\t\u0085", max_size=20), max_size=4),
    st.sampled_from(["line", "paragraph"]),
)
def test_units_equal_a_plain_split(texts: list[str], unit: str) -> None:
    units = find_units(pa.array(texts, pa.large_string()), unit, lower=True)
    expected = [
        [
            part.strip()
            for part in re.split(r"\n" if unit == "line" else r"\n{2,}", text)
            if part.strip()
        ]
        for text in texts
    ]
    flat = [part for parts in expected for part in parts]
    assert np.diff(units.spans.offsets).tolist() == [len(parts) for parts in expected]
    assert units.characters.tolist() == [len(part) for part in flat]
    assert units.words.tolist() == [len(part.split()) for part in flat]
    keys = list(zip(units.spans.high.tolist(), units.spans.low.tolist()))
    for unit_text, key in zip(flat, keys, strict=True):
        equal_texts = [
            normalised(unit_text) == normalised(candidate) for candidate in flat
        ]
        assert [key == candidate for candidate in keys] == equal_texts


@settings(deadline=None)
@given(
    st.text(alphabet="ab\n é", max_size=20),
    st.sets(st.integers(0, 9)),
    st.sampled_from(["line", "paragraph"]),
)
def test_cutting_units_keeps_exactly_the_others(
    text: str, chosen: set[int], unit: str
) -> None:
    texts = pa.array([text], pa.large_string())
    units = find_units(texts, unit, lower=False).spans
    cut = np.isin(np.arange(len(units.high)), list(chosen))
    (edited,) = apply_edits(
        texts, cuts_array(*cut_units(texts, units, cut))
    ).to_pylist()
    pattern = r"\n" if unit == "line" else r"\n{2,}"
    before = [part.strip() for part in re.split(pattern, text) if part.strip()]
    after = [part.strip() for part in re.split(pattern, edited) if part.strip()]
    assert after == [part for part, is_cut in zip(before, cut) if not is_cut]
    if not cut.any():
        assert edited == text


@pytest.mark.parametrize(
    ("text", "cut", "edited"),
    [
        ("one\ntwo\nthree", [False, True, False], "one\nthree"),
        ("one\ntwo\nthree", [False, True, True], "one"),
        ("one\ntwo\nthree\n", [False, False, True], "one\ntwo\n"),
        ("one\n\n  two\n\nthree", [False, True, False], "one\n\nthree"),
        ("  one\n  two", [True, False], "  two"),
        ("one\ntwo", [True, True], ""),
    ],
)
def test_cut_takes_the_line_with_its_line_break(
    text: str, cut: list[bool], edited: str
) -> None:
    texts = pa.array([text], pa.large_string())
    units = find_units(texts, "line", lower=False).spans
    edits = cuts_array(*cut_units(texts, units, np.array(cut)))
    assert apply_edits(texts, edits).to_pylist() == [edited]


def test_128_bit_pairs_with_equal_upper_halves_are_found() -> None:
    high, low = np.array([3, 3, 3, 9], np.uint64), np.array([1, 4, 6, 2], np.uint64)
    queries = [(3, 1), (3, 4), (3, 6), (9, 2), (3, 5), (9, 3), (1, 1), (10, 0)]
    places = find_pairs(
        high, low, *(np.array(part, np.uint64) for part in zip(*queries))
    )
    assert places.tolist() == [0, 1, 2, 3, -1, -1, -1, -1]

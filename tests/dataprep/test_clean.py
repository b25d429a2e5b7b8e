"""The stage `clean`: edits, counts and drops depend on the text alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from gristmill.core.stage_context import Context
from gristmill.dataprep.cleaning import clean
from gristmill.dataprep.cleaning.clean import clean_texts
from gristmill.dataprep.edits import EDITS, apply_edits
from gristmill.mixtures.steps.clean import Clean
from tests.dataprep.document_shards import file_contents, texts_by_locator
from tests.dataprep.own_steps import written

EVERYTHING = {
    "fix_unicode": True,
    "normalise": "NFC",
    "lines": ["c4", {"dclm": {"counters": False}}],
    "max_newlines": 2,
    "mask": ["email", "ip", "phone", "iban", "card"],
}


def cleaned(texts: list[str], section: Clean) -> tuple[list[str], dict[str, Any]]:
    array = pa.array(texts, pa.large_string())
    columns = clean_texts(array, section)
    return apply_edits(array, columns[EDITS]).to_pylist(), columns


def test_line_rules_accept_a_list_and_the_papers_constants() -> None:
    section = Clean.model_validate({"lines": [{"c4": {"constants": "paper"}}, "dclm"]})
    assert section.lines is not None
    assert section.lines.c4 is not None
    assert section.lines.c4.min_words == 3
    assert section.lines.dclm is not None
    assert Clean.model_validate(section.model_dump()) == section
    with pytest.raises(ValidationError, match="c5"):
        Clean.model_validate({"lines": ["c5"]})


@pytest.mark.slow
def test_cleaners_see_earlier_edits_and_join_into_one_list() -> None:
    text = (
        "sch\u00c3\u00b6ne Zeile mit f\u00c3\u00bcnf Worten.[1]\nno\n\u00e9 Zeile "
        "mit genau fünf Worten.\n"
    )
    texts, columns = cleaned(
        [text, "no"], Clean.model_validate({"fix_unicode": True, "lines": ["c4"]})
    )
    assert texts == [
        "schöne Zeile mit fünf Worten.\né Zeile mit genau fünf Worten.",
        "",
    ]
    assert columns["clean_fix_unicode"].tolist() == [1, 0]
    assert columns["clean_c4_citations"].tolist() == [1, 0]
    assert columns["clean_c4_no_terminal_punctuation"].tolist() == [1, 1]
    assert columns["clean_words"].tolist() == [11, 0]


@pytest.mark.slow
def test_masking_runs_last() -> None:
    text = (
        "Ask bob@mail.org about all these fine things.\nno\nOr ring +49 30 901820 "
        "on any day."
    )
    section = Clean.model_validate(
        {"lines": ["c4"], "mask": {"kinds": ["email"], "style": "tag"}}
    )
    texts, columns = cleaned([text], section)
    assert texts == [
        "Ask <EMAIL> about all these fine things.\nOr ring +49 30 901820 on any day."
    ]
    assert columns["clean_mask_email"].tolist() == [1]
    assert "clean_mask_phone" not in columns


@pytest.mark.slow
@given(st.lists(st.text(max_size=30), max_size=5))
@settings(deadline=None, max_examples=100)
def test_cleaning_ignores_the_batch_and_splits_no_character(texts: list[str]) -> None:
    section = Clean.model_validate(EVERYTHING)
    cleaned_texts, columns = cleaned(texts, section)
    for number, text in enumerate(texts):
        alone, own_columns = cleaned([text], section)
        assert alone == [cleaned_texts[number]]
        assert {name: values.tolist() for name, values in own_columns.items()} == {
            name: values.tolist()[number : number + 1]
            for name, values in columns.items()
        }
        for edit in own_columns[EDITS].to_pylist()[0]:
            text.encode()[edit["begin"] : edit["end"]].decode()


PROSE = "This is a line of prose.\n" * 20
PAGE = PROSE + "LOUD\n" + "And here it ends for good."


def test_stage_writes_edits_counts_rules_and_drops_emptied_documents(
    write_ingest: Callable[..., Path],
    make_context: Callable[..., Context],
    tmp_path: Path,
) -> None:
    shards = [
        [("web", "1", PAGE), ("web", "2", "LOUD LINE"), ("code", "3", "LOUD LINE")],
        [
            ("web", "4", "One line here.\nLOUD LINE\n\n\n\nanother line there"),
            ("web", "5", PROSE),
        ],
    ]
    inputs = {"ingest": write_ingest("ingest", shards)}
    config = {"lines": ["dclm"], "max_newlines": 2, "sources": ["web"]}
    outputs = [tmp_path / "once", tmp_path / "again"]
    summary = clean.run(inputs, config, outputs[0], make_context("work1"))
    assert (
        clean.run(inputs, config, outputs[1], make_context("work2", workers=2))
        == summary
    )
    rows = written(outputs[0])
    assert [row["reason"] for row in rows] == [
        None,
        clean.EMPTY,
        None,
        clean.REMOVED,
        None,
    ]
    assert [row["clean_dclm_uppercase"] for row in rows] == [1, 1, None, 1, 0]
    assert [row["clean_newlines"] for row in rows] == [0, 0, None, 1, 0]
    assert [row["clean_words"] for row in rows] == [126, 0, None, 6, 120]
    assert [row["removed_word_ratio"] for row in rows] == [
        1 / 127,
        1.0,
        None,
        2 / 8,
        0.0,
    ]
    texts = texts_by_locator({**inputs, "clean": outputs[0]})
    assert [*texts.values()] == [
        PAGE.replace("LOUD\n", ""),
        "",
        "LOUD LINE",
        "One line here.\n\nanother line there",
        PROSE.strip(),
    ]
    assert summary.edits["dclm_uppercase"] == {
        "documents": 3,
        "times": 3,
        "bytes": 4 + 9 + 9,
    }
    assert summary.edits["newlines"] == {"documents": 1, "times": 1, "bytes": 2}
    assert summary.counts["dropped"] == {clean.EMPTY: 1, clean.REMOVED: 1}
    assert (
        summary.counts["bytes_kept"]
        == len(PAGE) - 5 + len("LOUD LINE") + len(PROSE) - 1
    )
    assert sum(summary.histograms["removed_word_ratio"]["counts"]) == 4
    assert file_contents(outputs[0]) == file_contents(outputs[1])


def test_removed_ratio_at_the_bound_passes_and_null_drops_nothing(
    write_ingest: Callable[..., Path],
    make_context: Callable[..., Context],
    tmp_path: Path,
) -> None:
    inputs = {
        "ingest": write_ingest(
            "ingest",
            [[("web", "1", "LOUD\n" + "a line of four\n" * 4 + "and three more")]],
        )
    }
    for bound, dropped in ((0.05, {}), (0.0499, {clean.REMOVED: 1}), (None, {})):
        config = {"lines": ["dclm"], "max_removed_word_ratio": bound}
        name = f"bound {bound}"
        summary = clean.run(inputs, config, tmp_path / "out" / name, make_context(name))
        assert summary.counts["dropped"] == dropped


@pytest.mark.parametrize(
    ("text", "cut"),
    [
        ("a\r\n\r\n\r\n\r\nb", "a\r\n\r\nb"),
        ("a\n\r\n\n\r\nb", "a\n\r\nb"),
        ("a\r\n\r\nb\r\n\r\n", "a\r\n\r\nb\r\n\r\n"),
        ("\n\n\n", "\n\n"),
        ("a\r\r\r\rb", "a\r\r\r\rb"),
    ],
)
def test_runs_of_lf_or_crlf_are_capped(text: str, cut: str) -> None:
    texts = pa.array(["before\n", text], pa.large_string())
    edits, runs, sizes, _ = clean.cap_newlines(texts, 2)
    assert apply_edits(texts, edits).to_pylist() == ["before\n", cut]
    assert (runs[1], sizes[1]) == (int(text != cut), len(text) - len(cut))


def test_text_that_fails_cleaning_is_quarantined_alone(
    write_ingest: Callable[..., Path],
    make_context: Callable[..., Context],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(texts: pa.Array) -> Any:
        if "bad" in texts.to_pylist():
            raise ValueError("cannot be fixed")
        return clean.cap_newlines(texts, 2)

    monkeypatch.setattr(clean, "fix_unicode", refuse)
    shards = [
        [("web", "1", "good\n\n\n\ntext"), ("web", "2", "bad"), ("web", "3", "fine")]
    ]
    inputs = {"ingest": write_ingest("ingest", shards)}
    config = {"fix_unicode": True, "max_quarantined": 0.5}
    summary = clean.run(inputs, config, tmp_path / "out", make_context("work"))
    rows = written(tmp_path / "out")
    assert [row["reason"] for row in rows] == [None, "quarantine", None]
    assert rows[1]["error"] == "ValueError: cannot be fixed"
    assert rows[1][EDITS] is None
    assert len(rows[0][EDITS]) == 1
    assert summary.counts["quarantined"] == 1

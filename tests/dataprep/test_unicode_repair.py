"""Unicode repair and normalisation change only the characters that need it."""

from __future__ import annotations

import re
import unicodedata
from typing import Literal

import ftfy
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gristmill.dataprep.cleaning.lines_dclm import cap_newlines
from gristmill.dataprep.cleaning.unicode_repair import (
    fix_unicode,
    ftfy_config,
    normalise,
)
from gristmill.dataprep.edits import apply_edits

PIECES = [
    "\n",
    "plain ",
    "sch\u00c3\u00b6n ",
    "\u00e2\u20ac\u2122s ",
    "&amp; ",
    "<b>",
    "\u0085",
    "\x1b[32m",
    "ﬁ",
    "“”",
    "Ａ",
    "e\u0301",
    "\u0301",
    "\ufeff",
    "½",
    "\r",
    "\x07",
    "\u00a0",
    "é",
    "한",
    "\u1112\u1161\u11ab",
    "\x00",
]
texts = st.one_of(
    st.text(max_size=40), st.lists(st.sampled_from(PIECES), max_size=16).map("".join)
)


def array(*values: str) -> pa.Array:
    return pa.array(values, pa.large_string())


@pytest.mark.slow
@given(st.lists(texts, max_size=3))
@example(["&amp;\n<b>&amp;\n&amp;", "&amp;"])
@settings(deadline=None, max_examples=300)
def test_edits_equal_ftfy(values: list[str]) -> None:
    fixed = apply_edits(array(*values), fix_unicode(array(*values))[0])
    assert fixed.to_pylist() == [ftfy.fix_text(text, ftfy_config()) for text in values]


@given(texts, st.sampled_from(["NFC", "NFKC"]))
@settings(deadline=None, max_examples=300)
def test_edits_give_the_normal_form_and_are_idempotent(
    text: str, form: Literal["NFC", "NFKC"]
) -> None:
    once = apply_edits(array(text), normalise(array(text), form)[0])
    assert once.to_pylist() == [unicodedata.normalize(form, text)]
    assert normalise(once, form)[0].to_pylist() == [[]]


def test_edits_cover_only_changed_bytes() -> None:
    text = "eine Zeile\nschön und sch\u00c3\u00b6n, ja\nnoch eine ö"
    edits, counts, sizes, _ = fix_unicode(array(text, "schön", "plain"))
    begin = len("eine Zeile\nschön und sch".encode())
    assert edits.to_pylist() == [
        [{"begin": begin, "end": begin + 4, "text": "ö"}],
        [],
        [],
    ]
    assert counts.tolist() == [1, 0, 0]
    assert sizes.tolist() == [4, 0, 0]


@pytest.mark.parametrize("text", ["“curly”", "ﬁne", "ＡＢ", "a\r\nb", "e\u0301"])
def test_compatibility_forms_are_kept(text: str) -> None:
    assert fix_unicode(array(text))[0].to_pylist() == [[]]


@given(st.text("\nab", max_size=30), st.integers(1, 3))
@settings(deadline=None)
def test_newline_runs_are_capped_and_idempotent(text: str, most: int) -> None:
    edits, counts, sizes, _ = cap_newlines(array("x", text), most)
    capped = apply_edits(array("x", text), edits)
    assert capped.to_pylist() == ["x", re.sub(rf"\n{{{most + 1},}}", "\n" * most, text)]
    assert counts.tolist() == [0, len(re.findall(rf"\n{{{most + 1},}}", text))]
    assert sizes.tolist() == [0, len(text) - len(capped[1].as_py())]
    assert cap_newlines(capped, most)[0].to_pylist() == [[], []]

"""Gopher kernels in the dialect `dclm` agree with the plain definitions."""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow as pa
import pytest

from gristmill.dataprep.filters.gopher import (
    QUALITY_STATISTICS,
    REPETITION_STATISTICS,
    statistics,
)
from gristmill.dataprep.filters.gopher_words import STOP_WORDS
from gristmill.dataprep.text.unicode_tables import (
    ALPHABETIC,
    CODE_POINTS,
    SPACE,
    WORD,
    code_point_flags,
    lower_case,
)
from tests.dataprep import gopher_reference


def measured(texts: list[str | None]) -> list[dict[str, float]]:
    columns = statistics(pa.array(texts, pa.large_string()))
    return [
        {name: values[row].item() for name, values in columns.items()}
        for row in range(len(texts))
    ]


def expected(text: str | None) -> dict[str, float]:
    return gopher_reference.all_statistics(text or "")


@pytest.mark.slow
def test_code_points_are_classified_like_python() -> None:
    flags = code_point_flags()
    lower = lower_case()
    for code in range(CODE_POINTS):
        character = chr(code)
        assert bool(flags[code] & SPACE) == (not character.split())
        assert bool(flags[code] & ALPHABETIC) == character.isalpha()
        assert bool(flags[code] & WORD) == (character.isalnum() or character == "_")
        assert chr(lower[code]) == character.lower() or len(character.lower()) == 2


def test_every_code_point_is_measured_like_the_plain_definitions() -> None:
    scalar_values = [
        chr(code) for code in range(CODE_POINTS) if not 0xD800 <= code < 0xE000
    ]
    texts = [f" x{a}y {a} " for a in scalar_values[:0x3100]]
    texts += [
        "".join(scalar_values[start : start + 4096])
        for start in range(0, len(scalar_values), 4096)
    ]
    columns = statistics(pa.array(texts), repetition=False)
    for row, text in enumerate(texts):
        assert {
            name: values[row] for name, values in columns.items()
        } == gopher_reference.quality(text)


def test_only_ascii_letters_lower_to_letters_of_stop_words() -> None:
    letters = set("".join(STOP_WORDS["en"]))
    assert [
        c for c in map(chr, range(128, CODE_POINTS)) if set(c.lower()) <= letters
    ] == []


@pytest.mark.parametrize("text", ["", " ", " \n\n\t\u3000\n", None])
def test_text_without_words_has_only_repeated_lines(text: str | None) -> None:
    values = measured([text])[0]
    assert {name for name, value in values.items() if value} == set(
        REPETITION_STATISTICS[:4]
    )
    assert {values[name] for name in REPETITION_STATISTICS[:4]} == {1}


def test_repetition_statistics_counted_by_hand() -> None:
    values = measured(["aa bb\naa bb \n\ncc\n\n\naa bb\naa bb\n"])[0]
    assert values["duplicate_line_ratio"] == 4 / 5
    assert values["duplicate_line_char_ratio"] == 20 / 22
    # stripped, the first and the last are equal
    assert values["duplicate_paragraph_ratio"] == 2 / 3
    assert values["duplicate_paragraph_char_ratio"] == 22 / 24
    assert values["top_2gram_char_ratio"] == 4 * 4 / 18  # "aa bb" four times
    assert values["top_3gram_char_ratio"] == 2 * 6 / 18  # "aa bb aa" twice
    assert values["duplicate_5gram_char_ratio"] == 0


def test_first_copy_of_a_repeated_ngram_counts() -> None:
    block = "one two three four five six seven eight nine ten"
    values = measured([f"{block} and {block}"])[0]
    chars = len(block.replace(" ", ""))
    for n in range(5, 11):
        assert values[f"duplicate_{n}gram_char_ratio"] == 2 * chars / (2 * chars + 3)


def test_one_word_a_million_times_is_all_repetition() -> None:
    values = measured(["ab " * 1_000_000])[0]
    assert values["words"] == 1_000_000
    for n in range(2, 5):
        assert values[f"top_{n}gram_char_ratio"] == (1_000_000 - n + 1) * n / 1_000_000
    for n in range(5, 11):
        assert values[f"duplicate_{n}gram_char_ratio"] == 1.0


@pytest.mark.slow
def test_long_text_is_measured_like_the_plain_definitions() -> None:
    words = random.Random(20).choices(
        [*map(str, range(300)), "the", "\n", "\n\n"], k=200_000
    )
    text = " ".join(words)
    values = measured([text])[0]
    assert {
        name: values[name] for name in QUALITY_STATISTICS
    } == gopher_reference.quality(text)
    assert {
        name: values[name] for name in REPETITION_STATISTICS
    } == gopher_reference.repetition(text)


def test_slices_chunks_and_narrow_offsets_have_the_same_statistics() -> None:
    texts = ["zero", None, "the one\nthe one", "…two…", "", "three # ..."]
    expected_rows = measured(texts)
    for kind in (pa.string(), pa.large_string()):
        array = pa.array(texts, kind)
        chunked = pa.chunked_array([array.slice(0, 2), array.slice(2, 4)])
        for part, rows in (
            (array.slice(2, 3), slice(2, 5)),
            (chunked, slice(0, 6)),
            (array.slice(6), slice(6, 6)),
        ):
            columns = statistics(part)
            assert [
                dict(zip(columns, row))
                for row in zip(*(c.tolist() for c in columns.values()))
            ] == expected_rows[rows]


def test_text_that_is_not_utf8_is_rejected() -> None:
    offsets = pa.array([0, 2], pa.int32()).buffers()[1]
    broken = pa.Array.from_buffers(
        pa.string(), 1, [None, offsets, pa.py_buffer(b"a\xe2")]
    )
    with pytest.raises(pa.ArrowInvalid, match="UTF8"):
        statistics(broken)


@pytest.mark.slow
def test_standard_library_is_measured_like_the_plain_definitions() -> None:
    paths = sorted(Path(random.__file__).parent.glob("*.py"))[:40]
    texts = [path.read_text(encoding="utf-8") for path in paths]
    assert measured(texts) == [expected(text) for text in texts]

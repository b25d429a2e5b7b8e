"""The n-gram index finds exactly the matches of a search in plain Python."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.dataprep.decontamination.contamination import MOST_COPIES, find_matches
from gristmill.dataprep.decontamination.cut_span import widen, words_left
from gristmill.dataprep.decontamination.ngram import (
    MOST_PLACES,
    build_index,
    find_ngrams,
    read_index,
    write_index,
)
from gristmill.dataprep.text.unicode_tables import (
    ALONE,
    INVISIBLE_RANGES,
    WORD,
    code_point_flags,
    lower_case,
)

WORDS = st.sampled_from(
    [
        "a",
        "A",
        "b",
        "ä",
        "Ä",
        "日",
        "本",
        "x_1",
        "İ",
        "a\u00ad",
        "\u200bx_\u20601",
        "\ufeff",
    ]
)
TEXTS = st.lists(WORDS, max_size=14).flatmap(
    lambda words: st.sampled_from([" ", ", ", "\n", "-"]).map(
        lambda between: between.join(words)
    )
)


def words_of(text: str) -> list[tuple[int, int, str]]:
    """(begin, end, lower-cased word) in bytes, by the rule of `shingles.py`, without
    invisible characters.
    """
    flags, lower = code_point_flags(), lower_case()
    words: list[tuple[int, int, str]] = []
    at, joins = 0, False
    for char in text:
        size, flag = len(char.encode()), flags[ord(char)]
        if any(first <= ord(char) <= last for first, last in INVISIBLE_RANGES):
            if joins:
                begin, _, word = words.pop()
                words.append((begin, at + size, word))
        elif not flag & WORD:
            joins = False
        elif joins and not flag & ALONE:
            begin, _, word = words.pop()
            words.append((begin, at + size, word + chr(lower[ord(char)])))
        else:
            words.append((at, at + size, chr(lower[ord(char)])))
            joins = not flag & ALONE
        at += size
    return words


def matches_in_plain_python(
    text: str, part: str, ngram: int, min_words: int
) -> tuple[float, int]:
    """Share of the part's words in shared n-grams, and the longest run of them."""
    text_words, part_words = (
        [word for *_, word in words_of(text)],
        [word for *_, word in words_of(part)],
    )
    if len(part_words) < min_words:
        return 0.0, 0
    length = min(ngram, len(part_words))
    grams = {
        tuple(text_words[at : at + length])
        for at in range(len(text_words) - length + 1)
    }
    covered = set()
    for at in range(len(part_words) - length + 1):
        if tuple(part_words[at : at + length]) in grams:
            covered.update(range(at, at + length))
    longest = 0
    for at in range(len(part_words)):
        for start in range(len(text_words)):
            run = 0
            while (
                at + run < len(part_words)
                and start + run < len(text_words)
                and part_words[at + run] == text_words[start + run]
            ):
                run += 1
            longest = max(longest, run)
    return len(covered) / len(part_words), longest if longest >= length else 0


@pytest.mark.slow
@settings(deadline=None, max_examples=200)
@given(
    st.lists(TEXTS, min_size=1, max_size=4),
    st.lists(TEXTS, min_size=1, max_size=3),
    st.integers(2, 5),
    st.integers(1, 2),
)
def test_shares_and_runs_equal_plain_python(
    texts: list[str], parts: list[str], ngram: int, min_words: int
) -> None:
    index = build_index(pa.array(parts, pa.large_string()), ngram, min_words)
    hits = find_ngrams(pa.array(texts, pa.large_string()), index)
    matches, runs = find_matches(hits, index, np.zeros(index.num_ngrams, bool), 1.0)
    shares_and_runs = {
        (int(text), int(part)): (share, int(words))
        for text, part, share, words in zip(*matches)
    }
    expected = {}
    for number, text in enumerate(texts):
        for place, part in enumerate(parts):
            share, words = matches_in_plain_python(text, part, ngram, min_words)
            if words:
                expected[number, place] = (share, words)
    assert shares_and_runs == expected
    for match, begin, end, words in zip(*runs):
        spans = words_of(texts[matches.text[match]])
        first = [span[0] for span in spans].index(begin)
        assert spans[first + words - 1][1] == end
        run = [word for *_, word in spans[first : first + words]]
        part_words = [word for *_, word in words_of(parts[matches.part[match]])]
        assert any(part_words[at : at + words] == run for at in range(len(part_words)))


def test_index_round_trips_through_its_file(tmp_path: Path) -> None:
    index = build_index(
        pa.array(["one two three four", "two three four five 日本"], pa.large_string()),
        3,
        2,
    )
    write_index(tmp_path / "index.arrow", index)
    again = read_index(tmp_path / "index.arrow")
    for written, reread in zip(index, again):
        assert written.dtype == reread.dtype
        assert written.tolist() == reread.tolist()


@pytest.mark.slow
def test_items_without_letters_are_ignored() -> None:
    years = "1990 1991 1992 1993 1994 1995 1996 1997"
    index = build_index(pa.array([years, f"{years} was"], pa.large_string()), 8, 7)
    assert index.counted_words.tolist() == [0, 9]
    matches, _ = find_matches(
        find_ngrams(pa.array([f"| {years} |"]), index), index, np.zeros(2, bool), 0.8
    )
    assert matches.part.tolist() == [1]


def test_text_of_every_item_is_a_template() -> None:
    template = "answer the following question with one word"
    parts = [
        f"{template} item{n} asks for thing{n} and then stops"
        for n in range(MOST_PLACES + 1)
    ]
    index = build_index(pa.array(parts, pa.large_string()), 5, 3)
    assert (np.diff(index.place_offsets) > MOST_PLACES).sum() == 3
    assert index.counted_words.tolist() == [len(parts[0].split()) - 3] * len(parts)
    assert len(find_ngrams(pa.array([template], pa.large_string()), index).text) == 0
    matches, _ = find_matches(
        find_ngrams(pa.array([parts[7]], pa.large_string()), index),
        index,
        np.zeros(index.num_ngrams, bool),
        1.0,
    )
    assert (matches.part[0], matches.contamination[0]) == (7, 1.0)


def test_frequent_ngrams_count_only_with_most_of_the_item() -> None:
    quote = "we the people of the united states in order to form a more perfect union"
    part = (
        f"{quote} is how which document of seventeen eighty seven begins its very "
        "first sentence"
    )
    index = build_index(pa.array([part], pa.large_string()), 5, 3)
    texts = pa.array(
        [f"He said: {quote}!", f"Q: {part}?", part.partition("union ")[2]],
        pa.large_string(),
    )
    hits = find_ngrams(texts, index)
    frequent = np.zeros(index.num_ngrams, bool)
    frequent[np.unique(hits.ngram[hits.text == 0])] = True
    total, own_words = len(part.split()), len(part.partition("union ")[2].split())
    matches, _ = find_matches(hits, index, frequent, 0.8)
    assert matches.text.tolist() == [1, 2]
    assert matches.contamination.tolist() == [1.0, own_words / total]
    matches, _ = find_matches(hits, index, frequent, 0.3)
    assert matches.contamination.tolist() == [
        len(quote.split()) / total,
        1.0,
        own_words / total,
    ]


def test_many_copies_of_one_ngram_are_bounded_work() -> None:
    index = build_index(pa.array(["ha " * 60], pa.large_string()), 5, 3)
    hits = find_ngrams(pa.array(["ha " * 50_000], pa.large_string()), index)
    assert len(hits.ngram) == 50_000 - 4
    assert np.diff(index.place_offsets).tolist() == [56]
    matches, runs = find_matches(hits, index, np.zeros(index.num_ngrams, bool), 1.0)
    assert (matches.contamination.tolist(), matches.words.tolist()) == ([1.0], [60])
    assert runs.words.sum() < MOST_COPIES * 56 * 5


def cut(text: str, spans: list[tuple[int, int]], margin: int) -> str:
    texts = pa.array([text], pa.large_string())
    begins, ends = (np.array(side, np.int64) for side in zip(*spans))
    begins, ends, offsets = widen(
        texts, np.zeros(len(spans), np.int64), begins, ends, margin
    )
    data = text.encode()
    for begin, end in reversed(list(zip(begins.tolist(), ends.tolist()))):
        data = data[:begin] + data[end:]
    assert words_left(texts, begins, ends, offsets).tolist() == [
        len(words_of(data.decode()))
    ]
    return data.decode()


def test_cut_takes_lines_within_its_margin_and_words_elsewhere() -> None:
    text = "keep this line\nask me a THE MATCH of it\nanswer here\nkeep that line too"
    begin = text.index("THE")
    span = [(begin, begin + len("THE MATCH"))]
    assert cut(text, span, 0) == text.replace("THE MATCH", "")
    assert (
        cut(text, span, 4)
        == "keep this line\nask me  it\nanswer here\nkeep that line too"
    )
    assert cut(text, span, 12) == "keep this line\n\nanswer here\nkeep that line too"
    assert cut(text, span, 22) == "keep this line\n\nkeep that line too"
    assert cut(text, span, 1000) == ""
    assert cut("日本日本MATCH日本", [(12, 17)], 1) == "日本日本日本"


@settings(deadline=None)
@given(
    st.text(alphabet="ab é\n日", min_size=1, max_size=30), st.integers(0, 12), st.data()
)
def test_cuts_contain_their_spans_and_stay_within_the_margin(
    text: str, margin: int, data: st.DataObject
) -> None:
    borders = [0, *np.cumsum([len(char.encode()) for char in text]).tolist()]
    pairs = [
        sorted(data.draw(st.tuples(st.sampled_from(borders), st.sampled_from(borders))))
        for _ in range(3)
    ]
    begins, ends = (np.array(side, np.int64) for side in zip(*pairs))
    texts = pa.array([text], pa.large_string())
    wide_begins, wide_ends, offsets = widen(
        texts, np.zeros(3, np.int64), begins, ends, margin
    )
    assert offsets.tolist() == [0, len(wide_begins)]
    assert (wide_begins[1:] > wide_ends[:-1]).all()
    assert {*wide_begins.tolist(), *wide_ends.tolist()} <= set(borders)
    for begin, end in pairs:
        (place,) = [
            at
            for at in range(len(wide_begins))
            if wide_begins[at] <= begin and end <= wide_ends[at]
        ]
        assert place >= 0
    allowed = set()
    for begin, end in pairs:
        allowed.update(
            range(borders.index(begin) - margin, borders.index(end) + margin)
        )
    for begin, end in zip(wide_begins.tolist(), wide_ends.tolist()):
        assert set(range(borders.index(begin), borders.index(end))) <= allowed


def test_random_prose_has_no_matches() -> None:
    rng = random.Random(3)
    vocabulary = [f"w{n}" for n in range(300)]
    parts = [" ".join(rng.choices(vocabulary, k=40)) for _ in range(50)]
    texts = [" ".join(rng.choices(vocabulary, k=3000)) for _ in range(5)]
    index = build_index(pa.array(parts, pa.large_string()), 13, 8)
    assert len(find_ngrams(pa.array(texts, pa.large_string()), index).text) == 0

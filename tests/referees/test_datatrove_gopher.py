"""datatrove's own filters as the referee of the dialect `datatrove`."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from gristmill.dataprep.filters import gopher
from gristmill.dataprep.text.unicode_tables import CONTENT, code_point_flags
from gristmill.dataprep.thresholds import failures
from gristmill.mixtures.steps.rules import GopherQuality, GopherRepetition

DATA = Path("../shared/data")

RULES = {
    "gopher_short_doc": "min_words",
    "gopher_long_doc": "max_words",
    "gopher_below_avg_threshold": "min_mean_word_length",
    "gopher_above_avg_threshold": "max_mean_word_length",
    "gopher_too_many_hashes": "max_symbol_word_ratio",
    "gopher_too_many_ellipsis": "max_symbol_word_ratio",
    "gopher_too_many_bullets": "max_bullet_line_ratio",
    "gopher_too_many_end_ellipsis": "max_ellipsis_line_ratio",
    "gopher_below_alpha_threshold": "min_alpha_word_ratio",
    "gopher_enough_stop_words": "min_stop_words",
    "empty": "max_duplicate_paragraph_ratio",
    "dup_para_frac": "max_duplicate_paragraph_ratio",
    "dup_para_char_frac": "max_duplicate_paragraph_char_ratio",
    "dup_line_frac": "max_duplicate_line_ratio",
    "dup_line_char_frac": "max_duplicate_line_char_ratio",
    **{f"top_{n}_gram": f"max_top_{n}gram_char_ratio" for n in (2, 3, 4)},
    **{
        f"duplicated_{n}_n_grams": f"max_duplicate_{n}gram_char_ratio"
        for n in range(5, 11)
    },
}
"""datatrove's reason -> the rule here, in the order in which datatrove tries them."""
ORDER = list(dict.fromkeys(RULES.values()))
Verdicts = list[tuple[str | None, str | None]]
"""Per text the rule of each rule set that drops it, or None."""


@pytest.fixture(scope="module", autouse=True)
def peers() -> None:
    """Import in the tests, not at collection: spaCy takes seconds."""
    pytest.importorskip("datatrove.pipeline.filters")
    pytest.importorskip("spacy")


def generated_texts() -> Iterator[str]:
    """Generate texts on both sides of every two-sided rule."""
    stems = ("river", "stone", "letter", "garden", "morning", "table")
    words = [
        f"{stem}{chr(97 + step)}{chr(97 + step * step % 26)}s"
        for step in range(26)
        for stem in stems
    ]
    little = ("the", "of", "and", "with")
    prose = " ".join(
        word + (f" {little[step // 9 % 4]}" if step % 9 == 0 else "")
        for step, word in enumerate(words)
    )
    yield from (
        "",
        " ",
        "\n",
        "word",
        prose,
        prose.replace("the", "a"),
        "the word of one " * 26_000,
    )
    yield " ".join(words)
    yield "to be of a by it is an " * 20
    yield "the incomprehensibilities and counterrevolutionaries " * 30
    for share in (9, 13, 20, 40):
        yield prose + " # " * share
        yield prose + " ... " * share
        yield prose + "…" * share
        yield prose + " 12345" * 4 * share
        yield prose + "\n" + "\n".join(["one line that is the same"] * share)
        yield prose + "\n\n" + "\n\n".join(["one paragraph that is the same"] * share)
        for separator in ("\n", "\n\n"):
            copied = " ".join(words[: 3 * share])
            yield separator.join([copied, *words, prose, copied])
    for bullets in (88, 91, 95):
        lines = [
            ("- " if step < bullets else "") + word + " of the"
            for step, word in enumerate(words[:100])
        ]
        yield "\n".join(lines)
        yield "\r\n".join(
            line.replace("-", " •") + ("..." if step % 3 else " ")
            for step, line in enumerate(lines)
        )
    for copied in range(16, 50):
        yield f"{prose} {' '.join(words[:copied])}"
        yield f"{prose} {', '.join(words[:copied])}"
    # twenty repeated words are two 10-grams, or fewer characters of two 9-grams
    for length in range(110, 170, 3):
        yield " ".join(prose.split()[:length] + prose.split()[:20])
    for n in range(1, 12):
        for times in (4, 8, 16):
            chunk = " ".join(words[:n])
            yield " ".join(
                f"{chunk} {word}" if step < times else word
                for step, word in enumerate(words)
            )
            yield " ".join(
                f"{chunk}'s {word}." if step < times else word
                for step, word in enumerate(words)
            )


def real_texts(documents: int) -> list[str]:
    """Read some web pages, posts and TeX sections of the shared data."""
    import zstandard

    texts = []
    for name in (
        "quality/dclm_human_quality.jsonl.zst",
        "text/18f_posts.jsonl.zst",
        "text/openlogic_tex.jsonl.zst",
    ):
        with (DATA / name).open("rb") as file:
            lines = io.TextIOWrapper(
                zstandard.ZstdDecompressor().stream_reader(file), encoding="utf-8"
            )
            texts += [
                json.loads(line)["text"]
                for _, line in zip(range(documents), lines, strict=False)
            ]
    for path in sorted((DATA / "quality/dolma").glob("*.gz")):
        with gzip.open(path, "rt", encoding="utf-8") as file:
            texts += [json.loads(line)["text"] for line in file]
    return [text for text in texts if len(text) < 20_000]


def verdicts_of_datatrove(texts: list[str]) -> Verdicts:
    from datatrove.data import Document
    from datatrove.pipeline.filters import GopherQualityFilter, GopherRepetitionFilter

    filters = GopherQualityFilter(), GopherRepetitionFilter()
    verdicts: Verdicts = []
    for text in texts:
        results = [judge.filter(Document(text=text, id="0")) for judge in filters]
        quality, repetition = (
            None if result is True else RULES[result[1]] for result in results
        )
        verdicts.append((quality, repetition))
    return verdicts


def verdicts_here(texts: list[str]) -> Verdicts:
    quality = GopherQuality(dialect="datatrove")
    repetition = GopherRepetition(dialect="datatrove")
    columns = gopher.statistics(pa.array(texts, pa.large_string()), quality)
    verdicts: Verdicts = []
    for row in range(len(texts)):
        first = []
        for rules in (quality, repetition):
            failed = [
                rule.split("/")[1]
                for rule, mask in failures(columns, {"": rules}).items()
                if mask[row]
            ]
            first.append(min(failed, key=ORDER.index, default=None))
        verdicts.append((first[0], first[1]))
    return verdicts


def test_generated_texts_get_the_verdicts_and_reasons_of_datatrove() -> None:
    texts = list(generated_texts())
    theirs = verdicts_of_datatrove(texts)
    assert verdicts_here(texts) == theirs
    assert {reason for verdict in theirs for reason in verdict} == {*ORDER, None}, (
        "each rule should drop a text"
    )


@pytest.mark.skipif(not DATA.exists(), reason="no shared data beside the checkout")
def test_real_texts_get_the_verdicts_and_reasons_of_datatrove() -> None:
    texts = real_texts(30)
    assert verdicts_here(texts) == verdicts_of_datatrove(texts)


def test_words_equal_those_of_datatrove() -> None:
    from datatrove.utils.text import split_into_words

    from gristmill.dataprep.words.spacy_words import spacy_words

    unusual_text = (
        ":) :-( o_O (ノಠ益ಠ)ノ a.m. e.g. don't\u00a0it's  U.K.-based 'tis "
        "http://a.b/c?d=1#e x@y.com"
    )
    texts = [*generated_texts(), unusual_text]
    encoded = [text.encode() for text in texts]
    data, offsets = (
        np.frombuffer(b"".join(encoded), np.uint8),
        np.cumsum([0, *map(len, encoded)]),
    )
    words = spacy_words(data, offsets, code_point_flags(), np.arange(len(texts)))
    word_texts = [
        data[begin:end].tobytes().decode()
        for begin, end in zip(words.starts, words.ends, strict=True)
    ]
    for text, begin, end in zip(texts, words.offsets, words.offsets[1:], strict=False):
        assert word_texts[begin:end] == split_into_words(text, "en")


def test_punctuation_set_equals_that_of_datatrove() -> None:
    from datatrove.utils.text import PUNCTUATION_SET

    flags = code_point_flags()
    assert {
        chr(code) for code in np.flatnonzero(flags & CONTENT == 0)
    } == PUNCTUATION_SET

"""Rule sets against the filters of datatrove, on the same text, in the same run and on
one thread.

Gopher's rules from text to verdicts, of the others all statistics of a set, on
documentation of installed packages; `code` on this Python's standard library. Times are
of the processor.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa

from benchmarks.dataprep.texts import DOCUMENTS, library_texts, rate
from benchmarks.installed_texts import documentation
from benchmarks.measuring import Row, fastest, row, text_megabytes
from gristmill.dataprep.filters import gopher
from gristmill.dataprep.filters.filter import judge
from gristmill.dataprep.filters.rule_sets import measure
from gristmill.dataprep.thresholds import failures, first_failures
from gristmill.mixtures.steps.filter import Filter
from gristmill.mixtures.steps.rules import (
    GopherQuality,
    GopherRepetition,
    Rules,
    word_library,
)

SET_DOCUMENTS = 3000
PEER_DOCUMENTS = 60
"""datatrove is slow: it gets the first documents only; rates are per byte."""
LANGUAGES = ("en", "de", "fr", "ru")
REPEATS = 5
Peer = Callable[[list[str]], None]


def rows() -> Iterator[Row]:
    """Measure all rule sets."""
    yield from gopher_rows()
    yield from set_rows()
    yield by_language()


def gopher_rows() -> Iterator[Row]:
    """Measure Gopher's filters in each dialect, from text to verdicts, in MB of UTF-8
    per second.
    """
    texts = documentation(DOCUMENTS)
    peer = datatrove_rate(texts[:PEER_DOCUMENTS])
    missing = "" if peer else "datatrove with spaCy is not installed"
    for words, suffix, note in (
        ("dialect", "", "spaCy's words, each run of text looked up"),
        (
            "language",
            ", words: language",
            "the tokenizer of each document's language, here spaCy's as above",
        ),
    ):
        ours = verdict_rate(texts, "datatrove", words)
        yield row(f"filters_vs_datatrove{suffix}", ours, peer, "MB/s", missing or note)
    for dialect in gopher.DIALECTS:
        if dialect != "datatrove":
            ours = verdict_rate(texts, dialect, "dialect")
            yield row(
                f"filters_vs_datatrove, dialect {dialect}", ours, peer, "MB/s", missing
            )


def verdict_rate(texts: list[str], dialect: str, words: str) -> float | None:
    """Return MB per second from text to verdicts; None if a package is missing that
    cuts the words.
    """
    quality = GopherQuality.model_validate({"dialect": dialect, "words": words})
    library = word_library(quality)
    # datatrove cuts English with spaCy.
    if library is not None and not all(
        map(importlib.util.find_spec, (library, "spacy"))
    ):
        return None
    sets = {
        "quality": quality,
        "repetition": GopherRepetition.model_validate(
            {"dialect": dialect, "words": words}
        ),
    }
    array = pa.array(texts, pa.large_string())

    def judge(part: pa.Array) -> list[str | None]:
        return first_failures(
            failures(gopher.statistics(part, quality), sets), len(part)
        )

    judge(array.slice(0, 1))  # compiles, or loads what an earlier run compiled
    return rate(lambda: judge(array), texts)


def datatrove_rate(texts: list[str]) -> float | None:
    """Return MB per second of datatrove's two filters; None if datatrove is not
    installed.
    """
    if (
        importlib.util.find_spec("datatrove") is None
        or importlib.util.find_spec("spacy") is None
    ):
        return None
    from datatrove.data import Document
    from datatrove.pipeline.filters import GopherQualityFilter, GopherRepetitionFilter
    from datatrove.utils.text import split_into_parts

    filters = [GopherQualityFilter(), GopherRepetitionFilter()]

    def judge() -> None:
        split_into_parts.cache_clear()
        for text in texts:
            document = Document(text=text, id="0")
            for document_filter in filters:
                document_filter.filter(document)

    judge()
    return rate(judge, texts)


def by_language() -> Row:
    """Measure the stage's verdicts with rules of four languages beside those without,
    in MB of UTF-8 per second.

    The texts are the same English prose under all languages, so that both sides do the
    same work.
    """
    texts = documentation(DOCUMENTS)
    columns = {
        "text": pa.array(texts, pa.large_string()),
        "script": pa.nulls(len(texts), pa.string()),
        "language": [LANGUAGES[number % 4] for number in range(len(texts))],
    }
    table, sets = pa.table(columns), ["gopher_quality", "gopher_repetition", "fineweb"]
    plain = Filter.model_validate({"rules": sets})
    own = Filter.model_validate(
        {
            "rules": sets,
            "by_language": {
                language: {
                    "gopher_quality": {
                        "min_words": 40 + number,
                        "stop_words": ["the", "of", "and", language],
                    }
                }
                for number, language in enumerate(LANGUAGES)
            },
        }
    )
    for section in (plain, own):
        # compiles, or loads what an earlier run compiled
        judge(table.slice(0, 8), section)
    ours, peer = fastest(
        REPEATS, lambda: judge(table, own), lambda: judge(table, plain)
    )
    size = text_megabytes(texts)
    return row(
        "filter_by_language, 4 languages",
        size / ours,
        size / peer,
        "MB/s",
        "peer: the same rules for all languages",
    )


def set_rows(documents: int = SET_DOCUMENTS) -> Iterator[Row]:
    """Measure all statistics of each of the other rule sets, in MB of UTF-8 per
    second.
    """
    prose = documentation(documents)
    # 566, 2026-11-24, 2 busy cores
    yield of_set(
        "fineweb_vs_datatrove", "fineweb", prose, fineweb_of_datatrove, floor=300
    )
    # 461, 2026-11-24, 2 busy cores
    yield of_set("c4_vs_datatrove", "c4", prose, c4_of_datatrove, floor=300)
    # 4.3, 2026-11-24, 2 busy cores; 2.4 on 2026-11-23
    yield of_set("mc4_vs_datatrove", "mc4", prose, mc4_of_datatrove, floor=2)
    yield of_set("curator", "curator", prose, None)
    yield of_set("code", "code", library_texts(documents // 4), None)


def of_set(
    name: str,
    rule_set: str,
    texts: list[str],
    peer: Peer | None,
    floor: float | None = None,
) -> Row:
    """Time a rule set, and the peer if there is one."""
    rules = Rules.model_validate({rule_set: {}})
    table = pa.table(
        {
            "text": pa.array(texts, pa.large_string()),
            "locator": ["a.py"] * len(texts),
            "metadata": ["{}"] * len(texts),
        }
    )
    measure(table.slice(0, 1), rules)  # compiles, or loads what an earlier run compiled
    ours = rate(lambda: measure(table, rules), texts)
    if peer is None:
        return row(name, ours, None, "MB/s", "datatrove has no such rules")
    if importlib.util.find_spec("datatrove") is None:
        return row(name, ours, None, "MB/s", "datatrove is not installed")
    peer(texts[:1])  # loads its word tokenizer
    theirs = rate(lambda: peer(texts[:PEER_DOCUMENTS]), texts[:PEER_DOCUMENTS])
    return row(name, ours, theirs, "MB/s", floor=floor)


def fineweb_of_datatrove(texts: list[str]) -> None:
    """Judge by FineWeb's rules as in its production, up to the first that fails."""
    from datatrove.pipeline.filters import FineWebQualityFilter

    judge_all(FineWebQualityFilter(), texts)


def c4_of_datatrove(texts: list[str]) -> None:
    """Judge by C4's rules for documents; rules for lines are switched off as far as
    possible.
    """
    from datatrove.pipeline.filters import C4QualityFilter

    judge_all(
        C4QualityFilter(
            remove_citations=False,
            filter_no_terminal_punct=False,
            min_words_per_line=-1,
            max_word_length=-1,
            filter_javascript=False,
            filter_policy=False,
        ),
        texts,
    )


def mc4_of_datatrove(texts: list[str]) -> None:
    """Judge by mC4's rule."""
    from datatrove.pipeline.filters.c4_filters import C4ParagraphFilter

    judge_all(C4ParagraphFilter(), texts)


def judge_all(document_filter: Any, texts: list[str]) -> None:
    """Judge texts by a filter of datatrove, without its pipeline."""
    from datatrove.data import Document

    for text in texts:
        document_filter.filter(Document(text, ""))

"""Benchmarks of the rule sets: all of one set's statistics, against the filters of datatrove where it has them.

On one thread, on the same text, in the same run. The text is prose made up from words whose frequencies fall with
their rank, in sentences and lines; that of the set `code` is this Python's standard library.
"""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa

from benchmarks.dataprep.timing import library_texts, rate
from gristmill.dataprep.filtering.rule_sets import measure
from gristmill.mixtures.filter import Rules

DOCUMENTS, PEER_DOCUMENTS = 3000, 60
"""datatrove is slow: it gets the first documents only; rates are per byte."""
LINES = 12

Peer = Callable[[list[str]], None]


def rows() -> Iterator[dict[str, Any]]:
    """Measure, one row per rule set: `name`, `ours`, `peer` (both MB of UTF-8 per second), `unit`, `ratio`."""
    prose = prose_texts(DOCUMENTS)
    yield row("fineweb_vs_datatrove", "fineweb", prose, fineweb_of_datatrove)
    yield row("c4_vs_datatrove", "c4", prose, c4_of_datatrove)
    yield row("mc4_vs_datatrove", "mc4", prose, mc4_of_datatrove)
    yield row("curator", "curator", prose, None)
    yield row("code", "code", library_texts(DOCUMENTS // 4), None)


def row(name: str, rule_set: str, texts: list[str], peer: Peer | None) -> dict[str, Any]:
    """Time a rule set, and the peer if there is one."""
    rules = Rules.model_validate({rule_set: {}})
    table = pa.table({"text": pa.array(texts, pa.large_string()), "locator": ["a.py"] * len(texts),
                      "metadata": ["{}"] * len(texts)})  # fmt: skip
    measure(table.slice(0, 1), rules)  # compiles, or loads what an earlier run compiled
    ours = rate(lambda: measure(table, rules), texts)
    measured = {"name": name, "ours": ours, "peer": None, "unit": "MB/s", "ratio": None}
    if peer is None:
        return {**measured, "note": "datatrove has no such rules"}
    if importlib.util.find_spec("datatrove") is None:
        return {**measured, "note": "datatrove is not installed"}
    peer(texts[:1])  # loads its word tokenizer
    theirs = rate(lambda: peer(texts[:PEER_DOCUMENTS]), texts[:PEER_DOCUMENTS])
    return {**measured, "peer": theirs, "ratio": ours / theirs}


def fineweb_of_datatrove(texts: list[str]) -> None:
    """FineWeb's rules as its production had them, which stop at the first that fails."""
    from datatrove.pipeline.filters import FineWebQualityFilter

    judge(FineWebQualityFilter(), texts)


def c4_of_datatrove(texts: list[str]) -> None:
    """C4's rules for documents, with the rules for lines that have a switch off."""
    from datatrove.pipeline.filters import C4QualityFilter

    judge(C4QualityFilter(remove_citations=False, filter_no_terminal_punct=False, min_words_per_line=-1,
                          max_word_length=-1, filter_javascript=False, filter_policy=False), texts)  # fmt: skip


def mc4_of_datatrove(texts: list[str]) -> None:
    """mC4's rule."""
    from datatrove.pipeline.filters.c4_filters import C4ParagraphFilter

    judge(C4ParagraphFilter(), texts)


def judge(judging: Any, texts: list[str]) -> None:
    """Let a filter of datatrove judge texts, without its pipeline around it."""
    from datatrove.data import Document

    for text in texts:
        judging.filter(Document(text, ""))


def prose_texts(documents: int) -> list[str]:
    """Texts of sentences in lines, some kilobytes each; the same in every run."""
    source = random.Random(1)
    vocabulary = ["".join(source.choices("etaoinshrdlu", k=source.randint(2, 9))) for _ in range(20_000)]
    weights = [1 / (rank + 2) for rank in range(len(vocabulary))]
    words = iter(source.choices(vocabulary, weights, k=documents * 1000))

    def sentence() -> str:
        middle = " ".join(next(words) for _ in range(source.randint(4, 20)))
        return f"{middle.capitalize()}{source.choice('...?!')}"

    return ["\n".join(" ".join(sentence() for _ in range(source.randint(1, 6))) for _ in range(LINES))
            for _ in range(documents)]  # fmt: skip

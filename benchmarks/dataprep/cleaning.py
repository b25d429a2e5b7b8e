"""Cleaning: its speed, and recall and precision of its search for personal data.

For speed, datatrove and the stage both drop lines by C4's rules and replace mail and IP
addresses in the same documents: ours as one stage's edits, the peer document by
document. Its count of sentences is switched off: it needs a model that has to be
downloaded, and belongs to the stage `filter` here.

Personal data is that of `pii_samples.py`. A value counts as found if every byte of it
is replaced under its kind; a replacement is false if it touches no value of its kind;
reserved examples (`me@example.com`) are not personal data. The peer is datatrove's
`PIIFormatter`, which knows mail addresses and IPv4.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec

import pyarrow as pa

from benchmarks.dataprep.pii_samples import Sentence, sentences
from benchmarks.dataprep.texts import DOCUMENTS, compare, library_texts, rate
from benchmarks.installed_texts import documentation
from benchmarks.measuring import Row, row, text_megabytes
from gristmill.dataprep.cleaning.clean import clean_texts
from gristmill.dataprep.cleaning.masking import mask
from gristmill.dataprep.cleaning.pii import KINDS
from gristmill.dataprep.edits import EDITS, apply_edits
from gristmill.mixtures.steps.clean import Clean, Mask, PiiKind

SEED = 20
PER_SPELLING = 200
NOT_COVERED = "datatrove's PIIFormatter does not know this kind"
NOT_INSTALLED = "datatrove is not installed"
SECTION = Clean.model_validate({"lines": ["c4"], "mask": ["email", "ip"]})

Find = Callable[[Sequence[str]], list[list[tuple[int, int]]]]
"""Texts -> spans of each that are replaced."""


def pii_rows() -> Iterator[Row]:
    """Measure recall, precision and false replacements per MB of text, for each kind of
    personal data.
    """
    samples = sentences(SEED, PER_SPELLING)
    size = text_megabytes(sample.text for sample in samples)
    for kind in KINDS:
        ours = score(samples, kind, partial(found_by_us, kind=kind))
        peer, note = None, NOT_COVERED if find_spec("datatrove") else NOT_INSTALLED
        if find_spec("datatrove") and kind in ("email", "ip"):
            peer, note = (
                score(samples, kind, partial(found_by_datatrove, kind=kind)),
                "",
            )
        yield row(f"pii {kind}, recall", ours[0], peer and peer[0], "share", note)
        yield row(f"pii {kind}, precision", ours[1], peer and peer[1], "share", note)
        yield row(
            f"pii {kind}, false replacements",
            ours[2] / size,
            peer and peer[2] / size,
            "per MB",
            note,
        )


def score(
    samples: Sequence[Sentence], kind: PiiKind, find: Find
) -> tuple[float, float, int]:
    """Return recall, precision, and the number of false replacements."""
    hits = right = wrong = 0
    for sample, spans in zip(
        samples, find([sample.text for sample in samples]), strict=True
    ):
        is_of_kind = sample.kind == kind
        hits += is_of_kind and any(
            begin <= sample.begin and sample.end <= end for begin, end in spans
        )
        touching = sum(
            is_of_kind and begin < sample.end and sample.begin < end
            for begin, end in spans
        )
        right += touching
        wrong += len(spans) - touching
    return (
        hits / sum(sample.kind == kind for sample in samples),
        right / max(right + wrong, 1),
        wrong,
    )


def found_by_us(texts: Sequence[str], kind: PiiKind) -> list[list[tuple[int, int]]]:
    """Return spans that the stage `clean` replaces as this kind, with all kinds
    switched on.
    """
    edits, *_ = mask(pa.array(texts, pa.large_string()), Mask(kinds=KINDS, style="tag"))
    return [
        [
            (edit["begin"], edit["end"])
            for edit in text_edits
            if edit["text"] == f"<{kind.upper()}>"
        ]
        for text_edits in edits.to_pylist()
    ]


def found_by_datatrove(
    texts: Sequence[str], kind: PiiKind
) -> list[list[tuple[int, int]]]:
    """Return spans that datatrove's formatter replaces as this kind."""
    from datatrove.pipeline.formatters import PIIFormatter

    formatter = PIIFormatter()
    replacer = formatter.emails_replacer if kind == "email" else formatter.ip_replacer
    return [
        [
            match.span()
            for match in replacer.regex.finditer(text)
            if replacer.validator is None or replacer.validator(match[0])
        ]
        for text in texts
    ]


def speed_rows() -> Iterator[Row]:
    """Measure MB of UTF-8 per second from text to cleaned text, on one thread."""
    texts = library_texts(DOCUMENTS // 2) + [
        as_lines(text) for text in documentation(DOCUMENTS // 2)
    ]
    if find_spec("datatrove"):
        yield compare("clean_vs_datatrove", texts, clean_with_us, clean_with_datatrove)
        return
    array = pa.array(texts, pa.large_string())
    clean_with_us(array.slice(0, 1))  # compiles, or loads what an earlier run compiled
    yield row(
        "clean_vs_datatrove",
        rate(lambda: clean_with_us(array), texts),
        None,
        "MB/s",
        NOT_INSTALLED,
    )


def as_lines(text: str) -> str:
    """Break a text into lines of up to twelve words, two of three of which end in a
    full stop.
    """
    lines = re.findall(r"(?:\S+\s*){1,12}", text)
    return "\n".join(
        line.strip() + ("." if number % 3 else "") for number, line in enumerate(lines)
    )


def clean_with_us(texts: pa.Array) -> pa.Array:
    """Return cleaned texts, as later stages read them."""
    return apply_edits(texts, clean_texts(texts, SECTION)[EDITS])


def clean_with_datatrove(texts: list[str]) -> list[str]:
    """Return texts cleaned by datatrove, with the constants of C4's released code."""
    from datatrove.data import Document
    from datatrove.pipeline.filters import C4QualityFilter
    from datatrove.pipeline.formatters import PIIFormatter

    line_filter = C4QualityFilter(
        min_num_sentences=-1,
        min_words_per_line=5,
        filter_lorem_ipsum=False,
        filter_curly_bracket=False,
    )
    formatter = PIIFormatter()
    documents = [Document(text=text, id="") for text in texts]
    for document in documents:
        line_filter.filter(document)
    return [formatter.format(document.text) for document in documents]

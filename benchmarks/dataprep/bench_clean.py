"""How fast text is cleaned, against datatrove's filter of C4's lines and its formatter of personal data.

Both drop lines by C4's rules and replace mail and IP addresses in the same documents: ours as one stage's edits, the
peer document by document. Its count of sentences is switched off: it needs a model that has to be downloaded, and
belongs to the stage `filter` here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pyarrow as pa

from benchmarks.dataprep.timing import DOCUMENTS, compare, library_texts, rate, synthetic_texts
from gristmill.dataprep.cleaning.clean import clean_texts
from gristmill.dataprep.edits import EDITS, apply_edits
from gristmill.mixtures.clean import Clean

SECTION = Clean.model_validate({"lines": ["c4"], "mask": ["email", "ip"]})
NAME = "clean_vs_datatrove"


def rows() -> Iterator[dict[str, Any]]:
    """Measure: MB of UTF-8 per second from text to cleaned text, on one thread."""
    texts = library_texts(DOCUMENTS // 2) + [as_lines(text) for text in synthetic_texts(DOCUMENTS // 2)]
    if find_spec("datatrove"):
        yield compare(NAME, texts, clean_with_us, clean_with_datatrove)
        return
    array = pa.array(texts, pa.large_string())
    clean_with_us(array.slice(0, 1))  # compiles, or loads what an earlier run compiled
    yield {"name": NAME, "ours": rate(lambda: clean_with_us(array), texts), "peer": None, "unit": "MB/s",
           "ratio": None, "note": "datatrove is not installed"}  # fmt: skip


def as_lines(text: str) -> str:
    """A text of words as lines of about twelve, two of three of which end in a full stop."""
    lines = re.findall(r"(?:\S+\s*){1,12}", text)
    return "\n".join(line.strip() + ("." if number % 3 else "") for number, line in enumerate(lines))


def clean_with_us(texts: pa.Array) -> pa.Array:
    """Cleaned texts, as whoever reads documents behind the stage gets them."""
    return apply_edits(texts, clean_texts(texts, SECTION)[EDITS])


def clean_with_datatrove(texts: list[str]) -> list[str]:
    """The same by datatrove, with the constants of C4's released code."""
    from datatrove.data import Document
    from datatrove.pipeline.filters import C4QualityFilter
    from datatrove.pipeline.formatters import PIIFormatter

    lines = C4QualityFilter(
        min_num_sentences=-1, min_words_per_line=5, filter_lorem_ipsum=False, filter_curly_bracket=False
    )
    personal = PIIFormatter()
    documents = [Document(text=text, id="") for text in texts]
    for document in documents:
        lines.filter(document)
    return [personal.format(document.text) for document in documents]

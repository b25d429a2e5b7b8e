"""Count texts beyond the limits of the rule set `running_text`, and beyond stricter and
looser ones.

    python .ci/running_text_limits.py [FILE.jsonl.zst ...]

The kinds of `benchmarks/dataprep/text_kinds.py`, then files of JSON lines with a
`text`; books are cut into passages of 4,000 characters. The manual's figures are of
DCLM's 258 pages that people judged, 336 posts of 18F, 550 sections of the Open Logic
Text, 467 PEPs in their first 8,000 characters, and the first 4,000 passages of books of
Project Gutenberg.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from benchmarks.dataprep.text_kinds import KINDS, documents
from benchmarks.public_data import read_records
from gristmill.dataprep.filters.running_text import measure
from gristmill.mixtures.steps.rules import RunningText

FUNCTION_WORD_LIMITS = (0.08, 0.1)
DETERMINER_LIMITS = (0.08, 0.15, 0.25)
PASSAGE, LONGEST = 4000, 8000
MOST = 4000


def passages(path: Path) -> list[str]:
    """Return the texts of a file."""
    texts = [record["text"] for record in read_records(path)]
    if "books" not in path.name:
        return [text[:LONGEST] if "peps" in path.name else text for text in texts]
    return [
        text[start : start + PASSAGE]
        for text in texts
        for start in range(0, len(text), PASSAGE)
    ][:MOST]


def counts(texts: list[str]) -> str:
    """Count the texts beyond each limit."""
    rows = pa.table(
        {
            "text": pa.array(texts, pa.large_string()),
            "language": pa.nulls(len(texts), pa.string()),
        }
    )
    columns = measure(rows, RunningText())
    functions, stray = columns["function_word_ratio"], columns["stray_determiner_ratio"]
    below = [
        f"function words below {limit}: {np.sum(functions < limit)}"
        for limit in FUNCTION_WORD_LIMITS
    ]
    above = [
        f"stray determiners over {limit}: {np.sum(stray > limit)}"
        for limit in DETERMINER_LIMITS
    ]
    return ", ".join([f"{len(texts)} texts", *below, *above])


def rows(paths: list[str]) -> Iterator[str]:
    """Return a line for each kind and file."""
    yield from (f"{kind.name}: {counts(documents(kind))}" for kind in KINDS)
    yield from (f"{path}: {counts(passages(Path(path)))}" for path in paths)


if __name__ == "__main__":
    for line in rows(sys.argv[1:]):
        print(line)

"""Share of texts on which each dialect of Gopher's rules has the verdict of its
project's own code.

datatrove judges in the same run if it is installed. DCLM, Dolma, NeMo Curator and
RedPajama need environments of their own: their verdicts on the same texts are recorded
in `dialect_verdicts.json` with the project's commit, by `.ci/peers/record_verdicts.py`.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import operator
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa

from benchmarks.dataprep.text_kinds import KINDS, documents
from benchmarks.measuring import Row, row
from gristmill.dataprep.filters import gopher
from gristmill.dataprep.thresholds import failures, first_failures
from gristmill.mixtures.steps.rules import GopherQuality, GopherRepetition

RECORDED = Path(__file__).with_name("dialect_verdicts.json")
DOCUMENTS = 25
"""Texts of each kind; each also occurs in a mangled form."""
MANGLED = 4
"""Number of changes of a mangled text."""
SNIPPETS = (
    "can't",
    "e.g.",
    "U.S.A.",
    "3.14",
    "1,000",
    "snake_case",
    "_private",
    "well-known",
    "“quoted”",
    "(aside)",
    ". . .",
    "...",
    "…",
    "#tag",
    "- item",
    "• item",
    "\n",
    "\n\n",
    "\u00a0",
    "naïve",
    "東京",
    "jane@example.com",
)


def made_texts() -> list[str]:
    """Return texts of all kinds, plain, and with words, marks and copied pieces
    inserted; the same in every run.
    """
    plain = [text for kind in KINDS for text in documents(kind, DOCUMENTS)]
    return plain + [
        _mangled(text, random.Random(number)) for number, text in enumerate(plain)
    ]


def _mangled(text: str, source: random.Random) -> str:
    for _ in range(MANGLED):
        at = source.randrange(len(text) + 1)
        piece = (
            text[at : at + source.randint(20, 300)]
            if source.random() < 0.5
            else source.choice(SNIPPETS)
        )
        times = source.randint(1, 8)
        text = f"{text[:at]} {' '.join([piece] * times)} {text[at:]}"
    return text


def rows() -> Iterator[Row]:
    """Measure the share of equal verdicts of each dialect."""
    texts = made_texts()
    recorded: dict[str, dict[str, str]] = json.loads(RECORDED.read_text())
    verdicts = {
        name: [bit == "1" for bit in peer["kept"]] for name, peer in recorded.items()
    }
    notes = {
        name: f"recorded of commit {peer['commit'][:7]}"
        for name, peer in recorded.items()
    }
    if (
        importlib.util.find_spec("datatrove") is not None
        and importlib.util.find_spec("spacy") is not None
    ):
        verdicts["datatrove"] = datatrove_keeps(texts)
        notes["datatrove"] = (
            f"datatrove {importlib.metadata.version('datatrove')} in the same run"
        )
    for dialect in gopher.DIALECTS:
        peer = verdicts.get(dialect)
        note = notes.get(
            dialect, "its project's code is neither recorded nor installed"
        )
        ours = (
            None
            if peer is None
            else sum(map(operator.eq, kept(texts, dialect), peer)) / len(texts)
        )
        yield row(
            f"equal verdicts, dialect {dialect}",
            ours,
            1.0,
            "of texts",
            f"{len(texts)} texts; {note}",
        )


def thresholds(dialect: str) -> tuple[GopherQuality, GopherRepetition]:
    """Return Gopher's usual thresholds in a dialect."""
    settings = {"dialect": dialect}
    return GopherQuality.model_validate(settings), GopherRepetition.model_validate(
        settings
    )


def kept(texts: Sequence[str], dialect: str) -> list[bool]:
    """Return True for each text that the dialect keeps."""
    quality, repetition = thresholds(dialect)
    statistics = gopher.statistics(pa.array(texts, pa.large_string()), quality)
    reasons = first_failures(
        failures(statistics, {"quality": quality, "repetition": repetition}), len(texts)
    )
    return [reason is None for reason in reasons]


def datatrove_keeps(texts: Sequence[str]) -> list[bool]:
    """Return True for each text that datatrove's two filters keep."""
    from datatrove.data import Document
    from datatrove.pipeline.filters import GopherQualityFilter, GopherRepetitionFilter

    filters = GopherQualityFilter(), GopherRepetitionFilter()
    return [
        all(judge.filter(Document(text=text, id="0")) is True for judge in filters)
        for text in texts
    ]

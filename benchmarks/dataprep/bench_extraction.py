"""How much of the right text, and how little of the wrong, extraction keeps: trafilatura's own evaluation.

Each page of its set comes with snippets of its main text, and with snippets of its boilerplate. A snippet counts as
kept where it occurs in the extracted text, white space aside (adbar/trafilatura, tests/eval_common.py). The pages lie
in the folder of labelled data, below `web/trafilatura_cc`: the ones whose licence lets them be passed on.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.checkout import data_folder
from gristmill.dataprep.reading.extraction_guard import Guard
from gristmill.dataprep.reading.pages import extract_pages
from gristmill.dataprep.reading.readers import read_records
from gristmill.dataprep.reading.records import Reading, Record
from gristmill.dataprep.reading.sources import find_files
from gristmill.mixtures.sources import ExtractOptions

SET = "web/trafilatura_cc"
SETTINGS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "resiliparse": ("resiliparse", {}),
    "trafilatura": ("trafilatura", {}),
    "trafilatura, favor precision": ("trafilatura", {"favor": "precision"}),
}
ALL_TEXT: tuple[str, Mapping[str, Any]] = ("resiliparse", {"favor": "recall"})
"""The peer: everything that a browser would show."""


@dataclass(frozen=True)
class Snippets:
    """What should, and what should not, be in a page's text."""

    wanted: Sequence[str]
    unwanted: Sequence[str]


@dataclass(frozen=True)
class Score:
    """Shares of snippets: of those kept that are wanted, of those wanted that are kept, and their harmonic mean."""

    precision: float
    recall: float
    f1: float


def rows() -> Iterator[dict[str, Any]]:
    """Measure, one row per extractor and score; the peer keeps all text of the page."""
    folder = data_folder() / SET
    if not (folder / "evaldata.json").exists():
        yield {"name": "main text extraction", "ours": None, "peer": None, "unit": "", "ratio": None,
               "note": f"{folder} has no labelled pages"}  # fmt: skip
        return
    labelled = read_labels(folder / "evaldata.json")
    everything = score(labelled, extract_all(folder, *ALL_TEXT))
    for name, (extractor, options) in SETTINGS.items():
        found = score(labelled, extract_all(folder, extractor, options))
        for what in ("precision", "recall", "f1"):
            ours, peer = getattr(found, what), getattr(everything, what)
            yield {"name": f"{name}: {what}", "ours": ours, "peer": peer, "unit": "share", "ratio": ours / peer,
                   "note": f"{len(labelled)} pages; peer: all text of the page"}  # fmt: skip


def read_labels(path: Path) -> dict[str, Snippets]:
    """The snippets by the name of the page's file."""
    entries = json.loads(path.read_text("utf-8")).values()
    return {entry["file"]: Snippets(entry["with"], entry["without"]) for entry in entries}


def extract_all(folder: Path, extractor: str, options: Mapping[str, Any]) -> dict[str, str]:
    """The text of every page by the name of its file, read and extracted as `ingest` does it."""
    (file,) = find_files("pages", {"path": str(folder / "html.tar.zst")}).files
    reading = Reading(extract=extractor)
    with Guard(extractor, ExtractOptions.model_validate(options).model_dump()) as guard:
        records = list(extract_pages(read_records(file, reading), guard, reading))
    return {record.locator.rpartition("/")[2]: record.text for record in records if isinstance(record, Record)}


def score(labelled: Mapping[str, Snippets], texts: Mapping[str, str]) -> Score:
    """Count snippets over all pages; a page without text keeps none."""
    kept = wrongly_kept = wanted = 0
    for name, snippets in labelled.items():
        text = _plain(texts.get(name, ""))
        kept += sum(_plain(snippet) in text for snippet in snippets.wanted)
        wrongly_kept += sum(_plain(snippet) in text for snippet in snippets.unwanted)
        wanted += len(snippets.wanted)
    precision = kept / (kept + wrongly_kept) if kept else 0.0
    recall = kept / wanted if wanted else 0.0
    return Score(precision, recall, 2 * precision * recall / (precision + recall) if kept else 0.0)


def _plain(text: str) -> str:
    return " ".join(text.split())

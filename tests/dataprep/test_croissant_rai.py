"""Fields of Croissant about responsible AI."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from gristmill.dataprep.exporting.dataset_card import (
    CROISSANT,
    About,
    Exported,
    cards,
)
from gristmill.dataprep.exporting.origins import Origin
from gristmill.mixtures.schema.evaluation import Documents

ABOUT: About = {"name": "x", "sources": [], "steps": [], "manifest": "", "code": []}
EXPORTED = Exported(
    documents=0,
    text_bytes=0,
    columns=[],
    sources=[],
    funnel=[],
    measured=["cluster", "contamination", "language"],
    languages={"en": 3, "de": 1},
    files={},
    format="hf",
    dropped=False,
    where=None,
)


def croissant(origins: Sequence[Origin], about: About = ABOUT) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(
        cards(about, Documents(), EXPORTED, origins)[CROISSANT]
    )
    return fields


def test_collection_spans_all_sources_and_names_crawlers_and_models() -> None:
    origins = [
        Origin(
            "web",
            is_crawled=True,
            period=("2024-01-02", "2024-02-03"),
            evidence="WARC-Date",
            crawls=[{"software": "Nutch", "robots": "obeyed"}],
        ),
        Origin("notes", period=["2023-05-06"] * 2, evidence="dates of the files"),
        Origin("made", written_by="writer"),
    ]
    fields = croissant(origins)
    assert fields["rai:dataCollectionTimeframe"] == ["2023-05-06", "2024-02-03"]
    assert fields["rai:dataCollectionType"] == ["Web Scraping", "Synthetic"]
    assert fields["rai:hasSyntheticData"] is True
    assert fields["rai:dataCollection"] == (
        "web: web crawl, 2024-01-02 to 2024-02-03 (WARC-Date), software: Nutch; "
        "robots.txt: obeyed. notes: files, 2023-05-06 (dates of the files). made: "
        "written by the model writer"
    )
    assert fields["rai:dataBiases"] == [
        "Languages by share of the documents, by a model: en 75.0%, de 25.0%"
    ]


def test_what_is_not_recorded_is_absent() -> None:
    fields = croissant([Origin("notes")])
    assert fields["rai:dataCollection"] == "notes: files"
    absent = {
        "rai:dataCollectionTimeframe",
        "rai:dataCollectionType",
        "rai:dataPreprocessingProtocol",
        "rai:dataSocialImpact",
    }
    assert not absent & fields.keys()


def test_names_and_settings_with_quotes_and_line_breaks_stay_json() -> None:
    name = 'a "b" <c> \\ \u2028 &'
    about: About = {
        "name": name,
        "sources": [{"name": "web", "licence": None}],
        "steps": [
            {"name": "one", "stage": "filter", "settings": [("pattern", 'x\n"y"')]},
            {"name": "two", "stage": "dedup", "settings": []},
        ],
        "manifest": "",
        "code": [],
    }
    fields = croissant([], about)
    assert fields["name"] == name
    assert fields["rai:dataPreprocessingProtocol"] == [
        'one (pattern: x "y")',
        "two (no settings)",
    ]

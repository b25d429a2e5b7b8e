"""Fields of Croissant about responsible AI."""

from __future__ import annotations

from gristmill.dataprep.exporting.croissant_rai import responsible_ai
from gristmill.dataprep.exporting.dataset_card import About, Exported
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


def test_collection_spans_all_sources_and_names_crawlers_and_models() -> None:
    origins = [
        Origin(
            "web",
            is_crawled=True,
            crawled=("2024-01-02", "2024-02-03"),
            dated=("2025-01-01", "2025-01-01"),
            crawls=[{"software": "Nutch", "robots": "obeyed"}],
        ),
        Origin("notes", dated=("2023-05-06", "2023-05-06")),
        Origin("made", written_by="writer"),
    ]
    fields = responsible_ai(ABOUT, Documents(), EXPORTED, origins)
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
    fields = responsible_ai(ABOUT, Documents(), EXPORTED, [Origin("notes")])
    assert fields["rai:dataCollection"] == "notes: files"
    absent = {
        "rai:dataCollectionTimeframe",
        "rai:dataCollectionType",
        "rai:dataPreprocessingProtocol",
        "rai:dataSocialImpact",
    }
    assert not absent & fields.keys()

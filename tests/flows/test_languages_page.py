"""The manifest and commands of docs/languages.md run on texts in its three
languages.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from benchmarks.checkout import ROOT, data_folder
from gristmill.dataprep.fasttext.fasttext_models import MODEL_VARIABLE
from tests.flows.doc_pages import BLOCK, run_command
from tests.jsonl import write_jsonl

PAGE = ROOT / "docs" / "languages.md"
MODEL = data_folder() / "langid" / "lid176" / "lid.176.ftz"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not MODEL.exists(), reason="lid.176.ftz is missing"),
]
TEXTS = {
    "en": [
        "The river ran past the old mill all day.",
        "Nobody had seen the miller since the spring floods of {n}.",
        "She walked to the bridge with {n} letters in her bag.",
        "It was warm, and the fields smelled of hay.",
        "A boat with two men came slowly around the bend.",
        "They had been fishing, but their nets were empty.",
    ],
    "de": [
        "Der Fluss lief an der alten Mühle vorbei.",
        "Niemand hatte den Müller seit dem Hochwasser {n} gesehen.",
        "Sie ging mit {n} Briefen zur Brücke.",
        "Es war nicht kalt, und die Wiesen dufteten nach Heu.",
        "Ein Boot kam langsam um die Biegung, mit Männern und auch Netzen.",
        "Das Netz war leer geblieben.",
    ],
    "fr": [
        "La rivière passait devant le vieux moulin.",
        "Personne n'avait vu le meunier depuis la crue de {n}.",
        "Elle marchait vers le pont avec {n} lettres dans le sac.",
        "Il faisait doux, les prés sentaient le foin.",
        "Une barque avec deux hommes tournait lentement.",
        "Ils avaient pêché, mais leurs filets étaient vides.",
    ],
    "es": [
        "El río pasaba por delante del viejo molino.",
        "Nadie había visto al molinero desde la crecida de {n}.",
    ]
    * 3,
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with documents in four languages, one of them unwanted."""
    (tmp_path / "data").mkdir()
    rows = [
        {
            "text": " ".join(texts).format(n=7 * number),
            "url": f"https://{code}/{number}",
        }
        for code, texts in TEXTS.items()
        for number in range(6)
    ]
    rows += [
        {
            "text": "Donaudampfschifffahrtsgesellschaftskapitän und "
            "Straßenbahnhaltestellenschild der Stadt " * 9,
            "url": "https://de/long",
        }
    ]
    write_jsonl(tmp_path / "data" / "web.jsonl", rows)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(MODEL_VARIABLE, str(MODEL))
    monkeypatch.delenv("GRISTMILL_STORE", raising=False)
    return tmp_path


def test_examples_of_the_page_run_as_documented(folder: Path) -> None:
    outputs: dict[str, str] = {}
    for kind, text in BLOCK.findall(PAGE.read_text()):
        if kind == "yaml":
            (folder / text.splitlines()[0].removeprefix("# ")).write_text(text)
        elif kind == "bash":
            outputs |= {line: run_command(line, 80) for line in text.splitlines()}
    (table,) = (folder / "gristmill-store" / "filter").glob("*/data/part-*.parquet")
    rows = pq.read_table(table).to_pylist()
    assert {row["rules_language"] for row in rows} == {"general", "de", "fr", None}
    assert rows[-1]["reason"] == "de/gopher_quality/max_mean_word_length"
    assert sum(bool(row["keep"]) for row in rows) >= 12
    why = run_command("gristmill explain several.yaml " + rows[-1]["id"].hex(), 80)
    assert "dropped: de/gopher_quality/max_mean_word_length" in why
    assert "threshold 12" in why
    scores, lengths = (
        next(text for line, text in outputs.items() if key in line)
        for key in ("langid.keep", "max_mean")
    )
    assert "langid.keep.de" in scores
    assert "max_mean_word_length (de)" in lengths
    (report,) = (folder / "gristmill-store").rglob("report.html")
    page = report.read_text()
    assert "Rules by language" in page
    assert "<th>share</th>" in page or "share" in page

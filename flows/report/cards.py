"""Cards of a run in one folder: of the data set, the model, Croissant, and the summary
of training content.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

from gristmill.core.files import find_json, write_json, write_text
from gristmill.core.secrets import mask_known
from gristmill.dataprep.exporting.dataset_card import (
    CROISSANT,
    DATASET_CARD,
    Exported,
    cards,
)
from gristmill.dataprep.exporting.export_documents import (
    LIST,
    ExportError,
    describe_documents,
)
from gristmill.dataprep.licences.shares import LicenceShare
from gristmill.flows.pages.markdown import markdown_page
from gristmill.flows.pages.page_elements import Page
from gristmill.flows.questions.find_documents import committed_corpus
from gristmill.flows.report.facts import gather_facts
from gristmill.flows.report.licence_shares import licence_shares, licences_section
from gristmill.flows.report.source_origins import source_origins
from gristmill.flows.report.training_content import training_content
from gristmill.flows.running.session import Session
from gristmill.flows.stages.documents import recipe_of
from gristmill.flows.stages.registry import LAST
from gristmill.mixtures.schema.evaluation import Documents

MODEL_CARD, TRAINING_CONTENT = "model-card.md", "training-content.md"
LICENCES = "licences.json"
BASIS_NAMES = {"mixture": "tokens of the mixture", "tokens": "tokens", "text": "text"}


def write_cards(session: Session, folder: Path) -> list[str]:
    """Write the cards of a manifest's committed stages, and return their names.

    In a folder of `gristmill export-documents --format hf`, the cards describe the
    exported files. The model's card is written if `export` is committed.

    Raises:
        gristmill.flows.questions.find_documents.NothingIngestedError: no document is
            committed.
        ExportError: the folder holds a README.md, but no croissant.json.
    """
    if (folder / DATASET_CARD).exists() and not (folder / CROISSANT).exists():
        raise ExportError(
            f"{folder} holds a README.md of something else; choose another folder"
        )
    facts = gather_facts(session, whole=False)
    shares = licence_shares(session, facts)
    origins = source_origins(session, facts)
    listing = find_json(folder / LIST)
    section = Documents(format="hf")
    if listing is None:
        exported = describe_documents(committed_corpus(session), section)
    elif listing["format"] != section.format:
        raise ExportError(
            f"{folder} holds an export of format {listing['format']}; choose another "
            "folder, or one that `export-documents --format hf` wrote"
        )
    else:
        sources = [LicenceShare(**source) for source in listing["sources"]]
        exported = Exported(**{**listing, "sources": sources})
        section = Documents(format="hf", dropped=exported.dropped, where=exported.where)
    if not section.dropped and section.where is None:
        basis = BASIS_NAMES[shares.basis]
        exported = replace(exported, sources=shares.shares, basis=basis)
    about = recipe_of(session.manifest, section)["about"]
    texts = {
        **cards(about, section, exported, origins),
        TRAINING_CONTENT: markdown_page(training_content(session)),
    }
    if LAST in session.plan and (export := session.committed(LAST)) is not None:
        model_card = (export.data / "README.md").read_text(encoding="utf-8")
        licences = licences_section("Licences of the training data", shares)
        text = markdown_page(Page("", [licences])).partition("\n\n")[2]
        texts[MODEL_CARD] = f"{model_card.rstrip()}\n\n{text}"
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        write_text(folder / name, mask_known(text))
    write_json(folder / LICENCES, asdict(shares))
    return [*texts, LICENCES]

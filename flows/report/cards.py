"""Cards of a run in one folder: of the data set, the model, Croissant, and the summary
of training content.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import cast

from gristmill.core.files import find_json, write_json, write_text
from gristmill.core.secrets import mask_known
from gristmill.dataprep.exporting.croissant import croissant
from gristmill.dataprep.exporting.dataset_card import Exported, ExportedSource, card
from gristmill.dataprep.exporting.export_documents import (
    LIST,
    ExportError,
    describe_documents,
)
from gristmill.flows.pages.markdown import markdown_page
from gristmill.flows.pages.page_elements import Page, Section, flatten
from gristmill.flows.questions.find_documents import committed_corpus
from gristmill.flows.report.facts import gather_facts
from gristmill.flows.report.licence_shares import (
    LicenceShares,
    licence_shares,
    licence_table,
)
from gristmill.flows.report.source_origins import source_origins
from gristmill.flows.report.training_content import training_content
from gristmill.flows.running.session import Session
from gristmill.flows.stages.documents import recipe_of
from gristmill.flows.stages.registry import LAST
from gristmill.mixtures.schema.evaluation import Documents

DATASET_CARD, CROISSANT = "README.md", "croissant.json"
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
    if listing is not None and listing["format"] != "hf":
        raise ExportError(
            f"{folder} holds an export of format {listing['format']}; choose another "
            "folder, or one that `export-documents --format hf` wrote"
        )
    if listing is None:
        section = Documents(format="hf")
        exported = describe_documents(committed_corpus(session), section)
    else:
        exported = Exported(**listing)
        section = Documents.model_validate(
            {key: listing[key] for key in ("format", "dropped", "where")}
        )
    if not section.dropped and section.where is None:
        exported = with_tokens(exported, shares)
    about = recipe_of(session.manifest, section)["about"]
    texts = {
        DATASET_CARD: card(about, section, exported, origins),
        TRAINING_CONTENT: markdown_page(training_content(session)),
    }
    if LAST in session.plan and (export := session.committed(LAST)) is not None:
        model_card = (export.data / "README.md").read_text(encoding="utf-8")
        texts[MODEL_CARD] = f"{model_card.rstrip()}\n\n{_licences_text(shares)}"
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        write_text(folder / name, mask_known(text))
    write_json(folder / CROISSANT, croissant(about, section, exported, origins))
    write_json(folder / LICENCES, asdict(shares))
    return [*texts, CROISSANT, LICENCES]


def with_tokens(exported: Exported, shares: LicenceShares) -> Exported:
    """Description of all kept documents with their tokens, and shares of these."""
    sources = [cast(ExportedSource, asdict(share)) for share in shares.shares]
    return replace(exported, sources=sources, basis=BASIS_NAMES[shares.basis])


def _licences_text(shares: LicenceShares) -> str:
    """Section of the model's card."""
    section = Section(
        "Licences of the training data",
        flatten([shares.describe(), licence_table(shares)]),
    )
    return markdown_page(Page("", [section])).partition("\n\n")[2]

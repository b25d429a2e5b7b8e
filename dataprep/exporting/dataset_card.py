"""Cards of exported documents: README.md for Hugging Face's hub, with its YAML header
(`dataset_card.md.jinja`), and croissant.json, which describes them to search engines
and loaders in JSON-LD (`croissant.json.jinja`).

Keys of the header: https://github.com/huggingface/hub-docs/blob/main/datasetcard.md
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

from gristmill.core.files import json_bytes
from gristmill.dataprep.conservation import ranked
from gristmill.dataprep.exporting.origins import Origin
from gristmill.dataprep.licences.shares import LicenceShare, shares_by
from gristmill.mixtures.schema.evaluation import Documents
from gristmill.mixtures.spdx import UNKNOWN

DATASET_CARD, CROISSANT = "README.md", "croissant.json"
TEMPLATES = {
    DATASET_CARD: "dataset_card.md.jinja",
    CROISSANT: "croissant.json.jinja",
}
SIZES = (
    "n<1K 1K<n<10K 10K<n<100K 100K<n<1M 1M<n<10M 10M<n<100M 100M<n<1B 1B<n<10B "
    "10B<n<100B 100B<n<1T n>1T".split()
)
"""Size categories of the hub: each is ten times the one before."""
KNOWN_LICENCES = frozenset(
    "apache-2.0 mit cc cc0-1.0 cc-by-2.0 cc-by-2.5 cc-by-3.0 cc-by-4.0 cc-by-sa-3.0 "
    "cc-by-sa-4.0 cc-by-nc-4.0 cc-by-nc-sa-4.0 cc-by-nd-4.0 cc-by-nc-nd-4.0 odc-by "
    "odbl pddl gpl-2.0 gpl-3.0 lgpl-3.0 agpl-3.0 bsd-2-clause bsd-3-clause mpl-2.0 "
    "gfdl unlicense artistic-2.0 cdla-permissive-1.0 cdla-permissive-2.0 "
    "cdla-sharing-1.0".split()
)
"""Licences of texts among https://huggingface.co/docs/hub/repositories-licenses."""
LANGUAGE_CODE = re.compile(r"^[a-z]{2,3}$")
MOST_LANGUAGES = 30
MOST_SETTINGS_CHARS = 160


class LicensedSource(TypedDict):
    """Source of the manifest."""

    name: str
    licence: str | None


class PreparingStep(TypedDict):
    """Step of the manifest."""

    name: str
    stage: str
    settings: list[tuple[str, Any]]
    """Full name and value of each."""


class CodeFile(TypedDict):
    """File of the user's code."""

    file: str
    source: str


class About(TypedDict):
    """Description of the documents in a recipe.

    Attributes:
        name: of the manifest.
        manifest: part of it that shapes the documents, in YAML.
    """

    name: str
    sources: list[LicensedSource]
    steps: list[PreparingStep]
    manifest: str
    code: list[CodeFile]


class ExportedColumn(TypedDict):
    """Column of the files.

    Attributes:
        type: arrow's.
        step: step that measured it.
    """

    name: str
    type: str
    step: str | None


class FunnelStep(TypedDict):
    """Documents of the run before and after a step."""

    step: str
    read: int
    dropped: dict[str, int]
    """Documents by reason."""
    kept: int


class ExportedFile(TypedDict):
    """File of documents."""

    documents: int
    text_bytes: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Exported:
    """Exported documents and their files: the content of `_documents.json`.

    Attributes:
        documents, text_bytes: number of documents, and size of their texts in UTF-8.
        columns: the exported columns.
        sources: documents by source and licence.
        funnel: steps of the run, of all its documents.
        measured: columns that the steps measured, exported or not.
        languages: language -> exported documents; empty if no step determined it.
        files: name -> file.
        format, dropped, where: of the selection.
        identity: of the export; None for the stage.
        basis: of the shares of `sources`: text, tokens, or the tokens of the mixture.
    """

    documents: int
    text_bytes: int
    columns: Sequence[ExportedColumn]
    sources: Sequence[LicenceShare]
    funnel: Sequence[FunnelStep]
    measured: Sequence[str]
    languages: Mapping[str, int]
    files: Mapping[str, ExportedFile]
    format: str
    dropped: bool
    where: str | None
    identity: str | None = None
    basis: str = "text"


def cards(
    about: About,
    section: Documents,
    exported: Exported,
    origins: Sequence[Origin] = (),
) -> dict[str, str]:
    """README.md and croissant.json of a folder that `datasets.load_dataset` can load.

    Args:
        origins: of the sources; empty if not looked up.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "json": partial(json.dumps, ensure_ascii=False),
        "number": "{:,}".format,
        "reasons": lambda drops: ", ".join(f"{a} {b:,}" for a, b in ranked(drops)),
        "setting": setting_text,
        "share_by": lambda shares, key: shares_by(key, shares),
        "size_category": size_category,
        "licence_url": licence_url,
        "data_type": data_type,
    }
    licences = {hub_licence(share.licence) for share in exported.sources} or {UNKNOWN}
    languages = list(filter(LANGUAGE_CODE.match, exported.languages))
    facts = {
        "about": about,
        "section": section,
        "default": Documents(),
        "exported": exported,
        "origins": origins,
        "licences": sorted(licences),
        "languages": languages[:MOST_LANGUAGES],
        "personal_data": treatment_of_personal_data(about),
        "limits": known_limits(about, section, exported),
        "MOST_LANGUAGES": MOST_LANGUAGES,
    }
    texts = {
        name: environment.get_template(template).render(facts)
        for name, template in TEMPLATES.items()
    }
    # checked, and in the layout of every other JSON file
    texts[CROISSANT] = json_bytes(json.loads(texts[CROISSANT])).decode()
    return texts


def setting_text(value: Any) -> str:
    """Value of a setting in one line, cut if it is long."""
    is_text = isinstance(value, str)
    text = value if is_text else json.dumps(value, ensure_ascii=False, sort_keys=True)
    cut = " ..." if len(text) > MOST_SETTINGS_CHARS else ""
    return " ".join(f"{text[:MOST_SETTINGS_CHARS]}{cut}".split())


def treatment_of_personal_data(about: About) -> str:
    """Sentence on the treatment of personal data by the steps."""
    keys = [key for step in about["steps"] for key, _ in step["settings"]]
    if any(key.partition(".")[0] == "mask" for key in keys):
        return (
            "Personal data were masked by patterns, which miss what they do not know."
        )
    return "Personal data were not removed."


def known_limits(about: About, section: Documents, exported: Exported) -> list[str]:
    """Sentences on what the steps did not do, or cannot."""
    measured = exported.measured
    unknown = shares_by("licence", exported.sources).get(UNKNOWN, 0.0)
    failed = sum(step["dropped"].get("quarantine", 0) for step in exported.funnel)
    limits = {
        "Duplicates were not looked for.": "cluster" not in measured,
        "No evaluation set was searched for: benchmark items may be in the text.": (
            "contamination" not in measured
        ),
        "Languages were not determined.": "language" not in measured,
        treatment_of_personal_data(about): True,
        f"{unknown:.1%} of the {exported.basis} has no known licence.": unknown > 0,
        "Languages are what a model says, and wrong more often for short texts.": (
            bool(exported.languages)
        ),
        f"{failed:,} documents could not be judged by a step and are counted as "
        "dropped (`quarantine`).": failed > 0,
        "These documents were dropped: they are for looking at the rules, not for "
        "training.": section.dropped,
        "The rules are heuristics: they keep some bad text and drop some good.": True,
    }
    return [sentence for sentence, holds in limits.items() if holds]


def hub_licence(expression: str) -> str:
    """Hub name of an SPDX expression; `other` if the hub has no name for it."""
    if expression == UNKNOWN:
        return UNKNOWN
    name = re.sub(r"-(only|or-later)$", "", expression.lower())
    names = (name, name.removesuffix("-1.0"))
    return next((name for name in names if name in KNOWN_LICENCES), "other")


def licence_url(expression: str) -> str:
    """Address of an SPDX licence; an expression of several, or without one, as it is."""
    is_listed = re.fullmatch(r"(?!LicenseRef-)[A-Za-z0-9.+-]+", expression)
    if not is_listed or expression == UNKNOWN:
        return expression
    return f"https://spdx.org/licenses/{expression}"


def data_type(kind: str) -> str:
    """Schema.org type of an Arrow type."""
    types = {
        "bool": "Boolean",
        r"u?int\d+": "Integer",
        r"(half)?float\d*|double": "Float",
    }
    matches = (name for form, name in types.items() if re.fullmatch(form, kind))
    return f"sc:{next(matches, 'Text')}"


def size_category(documents: int) -> str:
    """Hub name of a number of rows."""
    return SIZES[min(max(len(str(documents)) - 3, 0), len(SIZES) - 1)]

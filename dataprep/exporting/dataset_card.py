"""Dataset card of exported documents: a README.md for Hugging Face's hub, with its YAML
header (`dataset_card.md.jinja`).

Keys of the header: https://github.com/huggingface/hub-docs/blob/main/datasetcard.md
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import yaml

from gristmill.dataprep.conservation import ranked
from gristmill.dataprep.exporting.origins import Origin
from gristmill.mixtures.schema.evaluation import Documents
from gristmill.mixtures.spdx import UNKNOWN

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
LIMITS = {
    "cluster": "Duplicates were not looked for.",
    "contamination": "No evaluation set was searched for: benchmark items may be in "
    "the text.",
    "language": "Languages were not determined.",
}
"""Column -> sentence of the card if no step measured it."""


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


class ExportedSource(TypedDict):
    """Exported documents of a source with the same licence.

    Attributes:
        licence: SPDX expression, or `unknown`.
        tokens: of the texts, if they are counted.
        share: of the `basis` of the export.
    """

    source: str
    licence: str
    documents: int
    text_bytes: int
    tokens: int | None
    share: float


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
    sources: Sequence[ExportedSource]
    funnel: Sequence[FunnelStep]
    measured: Sequence[str]
    languages: Mapping[str, int]
    files: Mapping[str, ExportedFile]
    format: str
    dropped: bool
    where: str | None
    identity: str | None = None
    basis: str = "text"


def card(
    about: About,
    section: Documents,
    exported: Exported,
    origins: Sequence[Origin] = (),
) -> str:
    """README.md of a folder that `datasets.load_dataset` can load.

    Args:
        origins: of the sources; empty if not looked up.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    # of `gristmill export-documents`
    options = [f"--format {section.format}", "--out DIR"]
    if section.dropped:
        options.append("--dropped")
    if section.where is not None:
        options.append(f"--where {json.dumps(section.where, ensure_ascii=False)}")
    if section.columns is not None:
        options.append(f"--columns {','.join(section.columns)}")
    if section.shard_bytes != Documents().shard_bytes:
        options.append(f"--shard-size {section.shard_bytes}")
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )

    def reasons(dropped: Mapping[str, int]) -> str:
        parts = [f"{name} {number:,}" for name, number in ranked(dropped)]
        return ", ".join(parts) or "nothing"

    def setting(value: Any) -> str:
        return f"`{setting_text(value).replace('`', chr(39))}`"

    environment.filters |= {
        "number": "{:,}".format,
        "reasons": reasons,
        "setting": setting,
    }
    return environment.get_template("dataset_card.md.jinja").render(
        about=about,
        section=section,
        exported=exported,
        header=_header(about, exported),
        limits=known_limits(about, section, exported),
        most_languages=MOST_LANGUAGES,
        origins=origins,
        options=options,
    )


def setting_text(value: Any) -> str:
    """Value of a setting in one line, cut if it is long."""
    text = (
        value
        if isinstance(value, str)
        else json.dumps(value, ensure_ascii=False, sort_keys=True)
    )
    if len(text) > MOST_SETTINGS_CHARS:
        text = f"{text[:MOST_SETTINGS_CHARS]} ..."
    return " ".join(text.split())


def masks_personal_data(about: About) -> str:
    """Sentence on the treatment of personal data by the steps."""
    is_masked = any(
        key.partition(".")[0] == "mask"
        for step in about["steps"]
        for key, _ in step["settings"]
    )
    return (
        "Personal data were masked by patterns, which miss what they do not know."
        if is_masked
        else "Personal data were not removed."
    )


def known_limits(about: About, section: Documents, exported: Exported) -> list[str]:
    """Sentences on what the steps did not do, or cannot."""
    limits = [
        sentence
        for column, sentence in LIMITS.items()
        if column not in exported.measured
    ]
    limits.append(masks_personal_data(about))
    unknown = sum(
        source["share"] for source in exported.sources if source["licence"] == UNKNOWN
    )
    if unknown:
        limits.append(f"{unknown:.1%} of the {exported.basis} has no known licence.")
    if exported.languages:
        limits.append(
            "Languages are what a model says, and wrong more often for short texts."
        )
    failed = sum(step["dropped"].get("quarantine", 0) for step in exported.funnel)
    if failed:
        limits.append(
            f"{failed:,} documents could not be judged by a step and are counted as "
            "dropped (`quarantine`)."
        )
    if section.dropped:
        limits.append(
            "These documents were dropped: they are for looking at the rules, not for "
            "training."
        )
    return [
        *limits,
        "The rules are heuristics: they keep some bad text and drop some good.",
    ]


def hub_licence(expression: str) -> str:
    """Hub name of an SPDX expression; `other` if the hub has no name for it."""
    if expression == UNKNOWN:
        return UNKNOWN
    name = re.sub(r"-(only|or-later)$", "", expression.lower())
    names = (name, name.removesuffix("-1.0"))
    return next((name for name in names if name in KNOWN_LICENCES), "other")


def size_category(documents: int) -> str:
    """Hub name of a number of rows."""
    return SIZES[min(max(len(str(documents)) - 3, 0), len(SIZES) - 1)]


def _header(about: About, exported: Exported) -> str:
    licences = sorted(
        {hub_licence(source["licence"]) for source in exported.sources}
    ) or [UNKNOWN]
    languages = [
        language for language in exported.languages if LANGUAGE_CODE.match(language)
    ]
    header: dict[str, object] = {
        "pretty_name": about["name"],
        "license": licences[0] if len(licences) == 1 else licences,
        **({"language": languages[:MOST_LANGUAGES]} if languages else {}),
        "size_categories": [size_category(exported.documents)],
        "task_categories": ["text-generation"],
        "tags": ["gristmill"],
    }
    if exported.files:
        header["configs"] = [
            {
                "config_name": "default",
                "data_files": [{"split": "train", "path": "data/train-*.parquet"}],
            }
        ]
    return yaml.safe_dump(header, sort_keys=False, allow_unicode=True).rstrip()

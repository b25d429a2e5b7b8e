"""Dataset card of exported documents: a README.md for Hugging Face's hub, with its YAML
header.

Keys of the header: https://github.com/huggingface/hub-docs/blob/main/datasetcard.md
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import yaml

from gristmill.mixtures.evaluation import Documents

SIZES = (
    ("n<1K", 1e3),
    ("1K<n<10K", 1e4),
    ("10K<n<100K", 1e5),
    ("100K<n<1M", 1e6),
    ("1M<n<10M", 1e7),
    ("10M<n<100M", 1e8),
    ("100M<n<1B", 1e9),
    ("1B<n<10B", 1e10),
    ("10B<n<100B", 1e11),
    ("100B<n<1T", 1e12),
)
"""Size categories of the hub, with their upper bounds."""
HUB_LICENCES = {
    "cc0": "cc0-1.0",
    "cc0-1-0": "cc0-1.0",
    "publicdomain": "pddl",
    "cc-by": "cc-by-4.0",
    "cc-by-sa": "cc-by-sa-4.0",
    "apache": "apache-2.0",
    "apache-2": "apache-2.0",
    "odc-by-1-0": "odc-by",
    "mit-license": "mit",
}
"""Common spellings -> names of the hub."""
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
    """Exported documents of a source with the same licence."""

    source: str
    licence: str | None
    documents: int
    text_bytes: int


class FunnelStep(TypedDict):
    """Documents of the run before and after a step."""

    step: str
    read: int
    dropped: dict[str, int]
    """By reason."""
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


def card(about: About, section: Documents, exported: Exported) -> str:
    """README.md of a folder that `datasets.load_dataset` can load."""
    return (
        "\n".join(
            [
                *_header(about, exported),
                "",
                *_introduction(about, section, exported),
                *_sources(exported),
                *_steps(about),
                *_funnel(section, exported),
                *_languages(exported),
                *_columns(exported),
                *_limits(about, section, exported),
                *_rebuild(about, section),
            ]
        )
        + "\n"
    )


def hub_licence(licence: str | None) -> str:
    """Hub name of a licence: `unknown` if it is None, `other` if the hub has no name
    for it.
    """
    if licence is None:
        return "unknown"
    spelling = re.sub(r"[\s_]+", "-", licence.strip().lower())
    name = HUB_LICENCES.get(
        spelling.replace(".", "-"), HUB_LICENCES.get(spelling, spelling)
    )
    return name if name in KNOWN_LICENCES else "other"


def size_category(documents: int) -> str:
    """Hub name of a number of rows."""
    return next((name for name, bound in SIZES if documents < bound), "n>1T")


def _header(about: About, exported: Exported) -> list[str]:
    licences = sorted(
        {hub_licence(source["licence"]) for source in exported.sources}
    ) or ["unknown"]
    languages = [
        language for language in exported.languages if LANGUAGE_CODE.match(language)
    ]
    header = {
        "pretty_name": about["name"],
        "license": licences[0] if len(licences) == 1 else licences,
        **({"language": languages[:MOST_LANGUAGES]} if languages else {}),
        "size_categories": [size_category(exported.documents)],
        "task_categories": ["text-generation"],
        "tags": ["gristmill"],
        "configs": [
            {
                "config_name": "default",
                "data_files": [{"split": "train", "path": "data/train-*.parquet"}],
            }
        ],
    }
    return [
        "---",
        yaml.safe_dump(header, sort_keys=False, allow_unicode=True).rstrip(),
        "---",
    ]


def _introduction(
    about: About, section: Documents, exported: Exported
) -> Iterator[str]:
    yield f"# {about['name']}\n"
    selection = (
        "that were dropped, each with its reason,"
        if section.dropped
        else "that every step kept"
    )
    plural = "document" if exported.documents == 1 else "documents"
    yield (
        f"{exported.documents:,} {plural} {selection} with "
        f"{_megabytes(exported.text_bytes)} of text, prepared with "
        "gristmill. Texts are as the steps below have edited them, in the order of "
        "the sources; a document's `id` "
        "is a hash of its source, its place there and its original text.\n"
    )
    if section.where is not None:
        yield f"Only documents that meet `{section.where}`.\n"
    yield (
        "```python\nfrom datasets import load_dataset\n\ndocuments = "
        'load_dataset("PATH/OF/THIS/FOLDER", '
        'split="train")\n```\n'
    )


def _sources(exported: Exported) -> Iterator[str]:
    yield "## Sources and licences\n"
    yield from _table(
        ["source", "licence", "documents", "text"],
        [
            [
                source["source"],
                source["licence"] or "not stated",
                f"{source['documents']:,}",
                _megabytes(source["text_bytes"]),
            ]
            for source in exported.sources
        ],
        numeric=2,
    )
    yield (
        "The licence is a document's own where its metadata has one, otherwise what "
        "the manifest says of its source; nobody has checked either.\n"
    )


def _steps(about: About) -> Iterator[str]:
    yield "## How the documents were prepared\n"
    if not about["steps"]:
        yield "They are as they were read; no step judged or changed them.\n"
        return
    yield (
        "Each step saw what the ones before it had kept. Its settings, defaults "
        "included:\n"
    )
    for number, step in enumerate(about["steps"], 1):
        stage = "" if step["stage"] == step["name"] else f" (`{step['stage']}`)"
        yield f"{number}. **{step['name']}**{stage}"
        yield from (
            f"   - `{key}`: {_shorten(value)}" for key, value in step["settings"]
        )
    yield ""


def _shorten(value: Any) -> str:
    text = (
        value
        if isinstance(value, str)
        else json.dumps(value, ensure_ascii=False, sort_keys=True)
    )
    text = (
        text
        if len(text) <= MOST_SETTINGS_CHARS
        else f"{text[:MOST_SETTINGS_CHARS]} ..."
    )
    return f"`{_one_line(text).replace('`', chr(39))}`"


def _funnel(section: Documents, exported: Exported) -> Iterator[str]:
    yield "## Funnel\n"
    if exported.funnel:
        rows = [
            [
                step["step"],
                f"{step['read']:,}",
                f"{step['kept']:,}",
                ", ".join(
                    f"{reason} {number:,}"
                    for reason, number in sorted(
                        step["dropped"].items(), key=lambda item: (-item[1], item[0])
                    )
                )
                or "nothing",
            ]
            for step in exported.funnel
        ]
        yield from _table(["step", "read", "kept", "dropped by"], rows, numeric=(1, 2))
    kind = "dropped" if section.dropped else "kept"
    yield f"{exported.documents:,} of the {kind} documents are in these files.\n"


def _languages(exported: Exported) -> Iterator[str]:
    if not exported.languages:
        return
    yield "## Languages\n"
    most_frequent = list(exported.languages.items())[:MOST_LANGUAGES]
    yield from _table(
        ["language", "documents"],
        [[name, f"{number:,}"] for name, number in most_frequent],
        numeric=1,
    )
    if len(exported.languages) > len(most_frequent):
        yield f"and {len(exported.languages) - len(most_frequent)} more.\n"


def _columns(exported: Exported) -> Iterator[str]:
    yield "## Columns\n"
    yield from _table(
        ["column", "type", "measured by"],
        [
            [f"`{column['name']}`", column["type"], column["step"] or ""]
            for column in exported.columns
        ],
    )
    yield (
        "A value is null where the step did not see the document, or the measure "
        "does not apply.\n"
    )


def _limits(about: About, section: Documents, exported: Exported) -> Iterator[str]:
    yield "## Known limits\n"
    yield from (
        f"- {sentence}"
        for column, sentence in LIMITS.items()
        if column not in exported.measured
    )
    masks = any(
        key.partition(".")[0] == "mask"
        for step in about["steps"]
        for key, _ in step["settings"]
    )
    yield (
        "- Personal data were masked by patterns, which miss what they do not know."
        if masks
        else "- Personal data were not removed."
    )
    if any(source["licence"] is None for source in exported.sources):
        yield "- Some documents have no stated licence."
    if exported.languages:
        yield "- Languages are what a model says, and wrong more often for short texts."
    failed = sum(step["dropped"].get("quarantine", 0) for step in exported.funnel)
    if failed:
        yield (
            f"- {failed:,} documents could not be judged by a step and are counted "
            "as dropped (`quarantine`)."
        )
    if section.dropped:
        yield (
            "- These documents were dropped: they are for looking at the rules, "
            "not for training."
        )
    yield "- The rules are heuristics: they keep some bad text and drop some good.\n"


def _rebuild(about: About, section: Documents) -> Iterator[str]:
    yield "## How to rebuild it\n"
    yield (
        f"`{about['name']}.yaml`, the part of the manifest that shapes these "
        "documents:\n"
    )
    yield f"```yaml\n{about['manifest'].rstrip()}\n```\n"
    for module in about["code"]:
        yield (
            f"`{module['file']}`, beside "
            f"it:\n\n```python\n{module['source'].rstrip()}\n```\n"
        )
    last = about["steps"][-1]["name"] if about["steps"] else "ingest"
    options = [
        f"--format {section.format}",
        "--out DIR",
        *(["--dropped"] if section.dropped else []),
    ]
    options += (
        [f"--where {json.dumps(section.where, ensure_ascii=False)}"]
        if section.where is not None
        else []
    )
    options += (
        [f"--columns {','.join(section.columns)}"]
        if section.columns is not None
        else []
    )
    options += (
        [f"--shard-size {section.shard_bytes}"]
        if section.shard_bytes != Documents().shard_bytes
        else []
    )
    yield (
        f"```\ngristmill run {about['name']}.yaml --until {last}\ngristmill "
        f"export-documents {about['name']}.yaml {' '.join(options)}\n```\n"
    )
    yield (
        "The same sources give the same bytes. `_documents.json` has the SHA-256 "
        "of every file."
    )


def _table(
    header: Sequence[str],
    rows: Sequence[Sequence[Any]],
    numeric: int | Sequence[int] = (),
) -> Iterator[str]:
    """Markdown table. Columns in `numeric`, or from index `numeric` on, are
    right-aligned.
    """
    right_aligned = range(numeric, len(header)) if isinstance(numeric, int) else numeric
    yield f"| {' | '.join(header)} |"
    yield f"| {' | '.join('---:' if index in right_aligned else '---' for index in range(len(header)))} |"
    yield from (
        f"| {' | '.join(_one_line(str(cell)).replace('|', chr(92) + '|') for cell in row)} |"
        for row in rows
    )
    yield ""


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB" if size >= 1e5 else f"{size:,} bytes"

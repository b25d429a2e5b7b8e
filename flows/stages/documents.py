"""`documents`: writes the prepared documents as files in common formats."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gristmill.flows.stages.sections import dump
from gristmill.flows.stages.stage import (
    Configured,
    MeasuredColumns,
    Problems,
    Stage,
    always,
    documents,
)
from gristmill.mixtures.base import Recipe
from gristmill.mixtures.manifest import Manifest
from gristmill.mixtures.schema.evaluation import Documents
from gristmill.mixtures.yaml_text import unknown_name

SHAPING = ("name", "seed", "sources", "ingest", "prepare")
"""Sections that determine the documents."""


def configure(manifest: Manifest, verify: bool) -> Configured | None:
    """Return the section, with the description of the documents for the dataset
    card.
    """
    if manifest.documents is None or not manifest.text_sources:
        return None
    return recipe_of(manifest, manifest.documents), {}


def recipe_of(manifest: Manifest, section: Documents) -> Recipe:
    """Return the settings of an export, with the description of the documents for the
    dataset card.

    The description has the sources with their licences, the steps with all their
    settings, and the manifest that rebuilds the documents. Ordered things are lists,
    since the keys of a recipe have no order.
    """
    import yaml

    from gristmill.core.secrets import mask_secrets
    from gristmill.mixtures.base import flat_items, outside_paths
    from gristmill.mixtures.user_code import own_functions

    sections = manifest.model_dump(
        mode="json",
        include={*SHAPING},
        exclude={"prepare": {"__all__": {"guard"}}},  # it shapes no document
        exclude_defaults=True,
    )
    steps = [
        {"name": name, "stage": step.stage, "settings": dump(step.config)}
        for name, step in manifest.steps.items()
    ]
    code: dict[str, str] = {}
    # Local paths are relative to their common folder: a card does not reveal the
    # machine, and a recipe does not change with the folder.
    replacements = {
        location: str(path)
        for location, path in outside_paths(manifest)
        if location[0] in SHAPING
    }
    local = {
        location: path
        for location, path in replacements.items()
        if Path(path).is_absolute()
    }
    common = os.path.commonpath([Path(path).parent for path in local.values()] or "/")
    for location, path in local.items():
        replacements[location] = os.path.relpath(path, common)
    for location, function in own_functions(manifest):
        replacements[location] = function.written_again
        code |= function.files
    for location, value in replacements.items():
        _put(sections, location, value)
        if location[0] == "prepare" and isinstance(location[1], int):
            _put(steps[location[1]]["settings"], location[3:], value)
    licences = manifest.licences
    about = {
        "name": manifest.name,
        "sources": [
            {"name": name, "licence": licences.get(name)}
            for name in manifest.text_sources
        ],
        "steps": [
            {
                **step,
                "settings": [
                    (name, value)
                    for name, value in flat_items(mask_secrets(step["settings"]))
                    if value not in (None, [])
                ],
            }
            for step in steps
        ],
        "manifest": yaml.safe_dump(
            mask_secrets(sections), sort_keys=False, allow_unicode=True, width=100
        ),
        "code": [{"file": file, "source": source} for file, source in code.items()],
    }
    return {"documents": dump(section), "about": about}


def _put(value: Any, location: Sequence[str | int], new: Any) -> None:
    """Replace the value at a location, if there is one."""
    for part in location[:-1]:
        if isinstance(value, dict):
            value = value.get(part)
        else:
            value = value[int(part)] if isinstance(value, list) else None
        if value is None:
            return
    if isinstance(value, dict) and location[-1] in value:
        value[location[-1]] = new
    elif isinstance(value, list):
        value[int(location[-1])] = new


def preflight(manifest: Manifest, name: str, measured: MeasuredColumns) -> Problems:
    """Yield an invalid condition, or a column that nothing measures."""
    assert manifest.documents is not None
    for key, message in problems_of(manifest.documents, measured):
        yield (STAGE.name, key), message


def problems_of(
    section: Documents, measured: MeasuredColumns
) -> Iterator[tuple[str, str]]:
    """Yield problems with the columns and the condition of an export: key, message."""
    from gristmill.dataprep.where_sql import (
        OWN_COLUMNS,
        NotAllowedError,
        all_names,
        columns_in,
    )

    names = [*OWN_COLUMNS, *all_names(measured)]
    unknown = [column for column in section.columns or () if column not in names]
    if unknown:
        yield "columns", f"there is no column {unknown_name(unknown[0], names)}"
    if section.where is not None:
        try:
            columns_in(section.where, names)
        except NotAllowedError as error:
            yield "where", str(error)


STAGE = Stage(
    "documents",
    2,
    "gristmill.dataprep.exporting.export_documents:run",
    configure,
    documents(),
    preflight=preflight,
    no_estimate_reason="a sample has no complete files of documents",
    is_parallel=always,
)

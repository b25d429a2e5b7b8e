"""`documents`: writes the prepared documents as files that everybody reads."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gristmill.flows.stages.sections import dump
from gristmill.flows.stages.stage import Location, Recipe, Stage, documents
from gristmill.mixtures.evaluation import Documents
from gristmill.mixtures.manifest import Manifest

SHAPING = ("name", "seed", "sources", "ingest", "prepare")
"""The sections that decide which documents there are."""


def configure(manifest: Manifest, verify: bool) -> tuple[Recipe, Recipe] | None:
    """The section, and what the dataset card says of the others."""
    if manifest.documents is None or not manifest.text_sources:
        return None
    return recipe_of(manifest, manifest.documents), {}


def recipe_of(manifest: Manifest, section: Documents) -> Recipe:
    """What is exported, and what the dataset card says of it."""
    return {"documents": dump(section), "about": _about(manifest)}


def _about(manifest: Manifest) -> dict[str, Any]:
    """The sources with their licences, the steps with all their settings, and the manifest that rebuilds them.

    What has an order is a list: the keys of a recipe have none.
    """
    import yaml

    from gristmill.core.secrets import mask_secrets
    from gristmill.mixtures.user_code import own_functions

    shown = manifest.model_dump(mode="json", include={*SHAPING}, exclude_defaults=True)
    steps = [
        {"name": name, "stage": step.stage, "settings": dump(step.config)} for name, step in manifest.steps.items()
    ]
    code: dict[str, str] = {}
    replaced = dict(_relative_paths(manifest))
    for location, own in own_functions(manifest):
        replaced[location] = f"./{own.file}:{own.name}" if own.files else own.reference
        code |= own.files
    for location, value in replaced.items():
        _put(shown, location, value)
        if location[0] == "prepare" and isinstance(location[1], int):
            _put(steps[location[1]]["settings"], location[3:], value)
    return {
        "name": manifest.name,
        "sources": [{"name": name, "licence": licence} for name, licence in manifest.licences.items()],
        "steps": [{**step, "settings": list(_flat(mask_secrets(step["settings"])))} for step in steps],
        "manifest": yaml.safe_dump(mask_secrets(shown), sort_keys=False, allow_unicode=True, width=100),
        "code": [{"file": file, "source": source} for file, source in code.items()],
    }


def _flat(settings: Mapping[str, Any], at: str = "") -> Iterator[tuple[str, Any]]:
    """The settings that are set, each under its whole name."""
    for key, value in settings.items():
        name = f"{at}.{key}" if at else key
        if isinstance(value, Mapping) and value:
            yield from _flat(value, name)
        elif value not in (None, [], {}):
            yield name, value


def _relative_paths(manifest: Manifest) -> Iterator[tuple[Location, str]]:
    """The outside paths of the shaping sections, local ones below the folder that all of them share.

    So a card says nothing of the machine, and a recipe does not change with the folder.
    """
    from gristmill.mixtures.base import outside_paths

    found = [(location, str(path)) for location, path in outside_paths(manifest) if location[0] in SHAPING]
    local = [str(Path(path).parent) for _, path in found if Path(path).is_absolute()]
    shared = os.path.commonpath(local) if local else ""
    for location, path in found:
        yield location, os.path.relpath(path, shared) if Path(path).is_absolute() else path


def _put(value: Any, location: Sequence[str | int], new: Any) -> None:
    """Replace what stands at a location, if anything does."""
    for part in location[:-1]:
        value = value.get(part) if isinstance(value, dict) else value[int(part)] if isinstance(value, list) else None
        if value is None:
            return
    if isinstance(value, dict) and location[-1] in value:
        value[location[-1]] = new
    elif isinstance(value, list):
        value[int(location[-1])] = new


def preflight(manifest: Manifest, name: str, measured: Mapping[str, Sequence[str]]) -> Iterator[tuple[Location, str]]:
    """A condition that is none, or a column that nothing measures."""
    assert manifest.documents is not None
    for key, message in problems_of(manifest.documents, measured):
        yield (STAGE.name, key), message


def problems_of(section: Documents, measured: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, str]]:
    """What is wrong with the columns and the condition of an export: key, message."""
    from gristmill.dataprep.where_sql import OWN_COLUMNS, NotAllowedError, check, names_of

    names = [*OWN_COLUMNS, *(name for columns in names_of(measured).values() for name in columns.values())]
    unknown = [column for column in section.columns or () if column not in names]
    if unknown:
        yield "columns", f"there is no column {unknown[0]!r}; there are {', '.join(names)}"
    if section.where is not None:
        try:
            check(section.where, names)
        except NotAllowedError as error:
            yield "where", str(error)


STAGE = Stage(
    "documents",
    1,
    "gristmill.dataprep.exporting.export_documents:run",
    configure,
    documents(),
    parallel=True,
    preflight=preflight,
    pace="a sample's documents are no whole files",
    facts="gristmill.flows.report.report_facts:exported_documents",
)

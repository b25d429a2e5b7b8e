"""Problems found before any work: missing or unusable outside files, wrong names in
expressions.

All problems are reported together, each with its line or setting.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import PurePath

from gristmill.flows.stages.registry import (
    LAST,
    STAGES,
    instances_of,
    measured_by,
    prepare_step,
)
from gristmill.flows.stages.stage import Stage
from gristmill.mixtures.base import Location, outside_paths
from gristmill.mixtures.generated_source import GeneratedSource
from gristmill.mixtures.load import Problem, Written
from gristmill.mixtures.manifest import MODELS, Manifest
from gristmill.mixtures.sources import TokenSource

LIST = "list"
"""Key of a source's listing function."""


def find_problems(
    manifest: Manifest, written: Written, stages: Iterable[str]
) -> list[Problem]:
    """Problems that would end a run later.

    Args:
        written: places of the manifest's keys.
        stages: stages that would run; inputs of others may be missing.
    """
    measured = {name: measured_by(step) for name, step in manifest.steps.items()}
    kinds: Mapping[str, Stage] = {
        **STAGES,
        **{name: STAGES[step.stage] for name, step in manifest.steps.items()},
        **instances_of(manifest),
    }
    problems = []
    for name in stages:
        preflight = kinds[name].preflight
        if preflight is not None:
            problems += [
                written.problem(*problem)
                for problem in preflight(manifest, name, measured)
            ]
    return problems


def missing_files(manifest: Manifest, written: Written) -> list[Problem]:
    """Problems with outside paths of a manifest that cannot be read."""
    problems = []
    for location, path in outside_paths(manifest):
        message = _unreadable(manifest, location, path)
        if message is None:
            continue
        # A problem of a source's listing is reported at the key `list`, not at `path`.
        if location[0] == "sources" and message.startswith(f"{LIST}: "):
            message = message.removeprefix(f"{LIST}: ")
            location = (*location[:-1], LIST)
        problems.append(written.problem(location, message))
    return problems


def _unreadable(manifest: Manifest, location: Location, path: str) -> str | None:
    """Reason that a path cannot be read; None if it can, or if the stage does not need
    it.
    """
    from gristmill.dataprep.reading.sources import (
        SourceError,
        find_files,
        outside_files,
    )
    from gristmill.tokenize.importing.token_files import token_files

    key = ".".join(map(str, location))
    if "prepare" in location and _is_left_out(manifest, location):
        return None
    source = (
        manifest.sources.get(str(location[1])) if location[0] == "sources" else None
    )
    try:
        if isinstance(source, TokenSource):
            key = f"source {location[1]!r}"
            token_files(str(location[1]), source)
        elif source is not None and not isinstance(source, GeneratedSource):
            key = f"source {location[1]!r}"
            find_files(str(location[1]), source)
        elif "data" in location:
            from gristmill.dataprep.examples.read_examples import examples_listing

            key = "source 'examples'"
            examples_listing(path)
        else:
            outside_files(key, path)
    except SourceError as error:
        return str(error).removeprefix(f"{key}: ") + _trained_later(
            manifest, location, path
        )
    return None


def _trained_later(manifest: Manifest, location: Location, path: str) -> str:
    """Advice if the missing model has the name of a stage of the manifest that trains
    one.
    """
    name = PurePath(path).name
    if (
        location[-1] != "folder"
        or name not in (*MODELS, LAST)
        or getattr(manifest, name) is None
    ):
        return ""
    return (
        f"; {'.'.join(map(str, location[:-1]))} needs the model before {name} has "
        "trained it: train and export it with "
        "another manifest, and set the exported folder"
    )


def _is_left_out(manifest: Manifest, location: Location) -> bool:
    """True if the stage of a step, `prepare[0].langid.model`, does not need the
    file.
    """
    step_end = location.index("prepare") + 3
    settings: object = manifest
    for part in location[:step_end]:
        is_container = isinstance(settings, tuple | dict)
        settings = settings[part] if is_container else getattr(settings, str(part))  # type: ignore[index]
    return location[step_end] in prepare_step(str(location[step_end - 1])).pinned_files(
        settings
    )

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
from gristmill.mixtures.base import outside_paths, value_at
from gristmill.mixtures.loader import Problem, Written
from gristmill.mixtures.manifest import MODELS, Manifest
from gristmill.mixtures.schema.sources import Source, TokenSource

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
    from gristmill.dataprep.examples.read_examples import examples_listing
    from gristmill.dataprep.readers.sources import (
        SourceError,
        find_files,
        outside_files,
    )
    from gristmill.tokenize.importing.token_files import token_files

    problems = []
    for location, path in outside_paths(manifest):
        if "prepare" in location:
            # The stage of a step, `prepare[0].langid.model`, may not need the file.
            end = location.index("prepare") + 3
            step = prepare_step(str(location[end - 1]))
            if location[end] in step.pinned_files(value_at(manifest, location[:end])):
                continue
        key = ".".join(map(str, location))
        source = None
        if location[0] == "sources":
            source = manifest.sources[str(location[1])]
        try:
            if isinstance(source, TokenSource):
                key = f"source {location[1]!r}"
                token_files(str(location[1]), source)
            elif isinstance(source, Source):
                key = f"source {location[1]!r}"
                find_files(str(location[1]), source)
            elif "data" in location:
                key = "source 'examples'"
                examples_listing(path)
            else:
                outside_files(key, path)
        except SourceError as error:
            message = str(error).removeprefix(f"{key}: ")
            name = PurePath(path).name
            if (
                location[-1] == "folder"
                and name in (*MODELS, LAST)
                and getattr(manifest, name) is not None
            ):
                message += (
                    f"; {'.'.join(map(str, location[:-1]))} needs the model before "
                    f"{name} has trained it: train and export it with another "
                    "manifest, and set the exported folder"
                )
            # A problem of a source's listing is reported at the key `list`, not at
            # `path`.
            if location[0] == "sources" and message.startswith(f"{LIST}: "):
                message = message.removeprefix(f"{LIST}: ")
                location = (*location[:-1], LIST)
            problems.append(written.problem(location, message))
    return problems

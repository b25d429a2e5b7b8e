"""Building blocks of recipes: the settings of a section, with outside files replaced by
listings.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

from gristmill.flows.stages.stage import (
    Configured,
    Stage,
)
from gristmill.mixtures.base import RECIPE, Judging, Recipe, Section, outside_paths
from gristmill.mixtures.manifest import Manifest


def dump(section: Section, *leave_out: str) -> Recipe:
    """Return the settings of a section as JSON, without `leave_out`."""
    return section.model_dump(mode="json", exclude=set(leave_out), context=RECIPE)


def seed_of(section: Any, manifest: Manifest) -> int:
    """Return the seed of a section; the manifest's if it has none."""
    return manifest.seed if section.seed is None else section.seed


def reads_of(manifest: Manifest) -> Recipe:
    """Return the settings that determine the rows that pre-training reads, for stages
    that analyse them.
    """
    from gristmill.mixtures.schema.pretrain import READING_KEYS

    section = manifest.pretrain
    if section is None:
        return {}
    settings = dump(section)
    return {
        "reads": {
            **{key: settings[key] for key in READING_KEYS},
            "seed": seed_of(section, manifest),
        }
    }


def step_recipe(
    stage: Stage, section: Judging, manifest: Manifest, verify: bool
) -> Configured:
    """Return the recipe of a step on documents or examples, and the argument of its
    function.
    """
    step = stage.step
    assert step is not None
    inherited = {"seed": manifest.seed, "stated": manifest.licences}
    config = dump(section) | {
        key: value
        for key, value in inherited.items()
        if getattr(section, key, value) is None
    }
    left_out = tuple(step.pinned_files(section))
    return step.recipe(
        section,
        name_outside_files(without(config, *left_out), section, verify, left_out),
    ), config


def name_outside_files(
    recipe: Recipe, section: Section, verify: bool, left_out: Sequence[str] = ()
) -> Recipe:
    """Return the recipe with the listing of its files in place of every outside path,
    except those left out.
    """
    from gristmill.dataprep.readers.sources import outside_listing

    pinned: Recipe = deepcopy(recipe)
    for location, path in outside_paths(section):
        if location[0] in left_out:
            continue
        *parents, last = location
        parent: Any = pinned
        for part in parents:
            parent = parent[part]
        parent[last] = outside_listing(".".join(map(str, location)), path, verify)
    return pinned


def with_listings(data: list[Recipe]) -> list[Recipe]:
    """Return sets of examples with the listings of their files in place of paths."""
    from gristmill.dataprep.examples.read_examples import examples_listing

    return [
        {**without(entry, "path"), "listing": examples_listing(entry["path"])}
        for entry in data
    ]


def without(item: Recipe, *keys: str) -> Recipe:
    """Return the settings except some."""
    return {key: value for key, value in item.items() if key not in keys}

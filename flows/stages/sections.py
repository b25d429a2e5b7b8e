"""What all recipes are made of: the settings of a section, with outside files named by what identifies them."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

from gristmill.flows.stages.stage import Recipe, Stage
from gristmill.mixtures.base import RECIPE, Judging, Section, outside_paths
from gristmill.mixtures.manifest import Manifest


def dump(section: Section, *leave_out: str) -> Recipe:
    """The settings of a section as JSON, without `leave_out`."""
    return section.model_dump(mode="json", exclude=set(leave_out), context=RECIPE)


def seed_of(section: Any, manifest: Manifest) -> int:
    """The seed of a section, which is the manifest's where it has none of its own."""
    return manifest.seed if section.seed is None else section.seed


def reads_of(manifest: Manifest) -> Recipe:
    """What decides which rows pre-training reads, for stages that ask about those."""
    from gristmill.mixtures.training import READING_KEYS

    section = manifest.pretrain
    if section is None:
        return {}
    settings = dump(section)
    return {"reads": {**{key: settings[key] for key in READING_KEYS}, "seed": seed_of(section, manifest)}}


def step_recipe(stage: Stage, section: Judging, manifest: Manifest, verify: bool) -> tuple[Recipe, Recipe]:
    """The recipe of a step, of documents' preparation or of examples', and what its function gets."""
    seed = {"seed": seed_of(section, manifest)} if "seed" in type(section).model_fields else {}
    config = {**dump(section), **seed}
    left_out = tuple(stage.leaves_out(section))
    return stage.recipe(section, name_outside_files(without(config, *left_out), section, verify, left_out)), config


def name_outside_files(recipe: Recipe, section: Section, verify: bool, left_out: Sequence[str] = ()) -> Recipe:
    """The recipe with every outside path, but those left out, replaced by what identifies the files that it names."""
    from gristmill.dataprep.reading.sources import outside_listing

    named: Recipe = deepcopy(recipe)
    for location, path in outside_paths(section):
        if location[0] in left_out:
            continue
        *parents, last = location
        at: Any = named
        for part in parents:
            at = at[part]
        at[last] = outside_listing(".".join(map(str, location)), path, verify)
    return named


def dump_only(section: Section, verify: bool, *keys: str) -> Recipe:
    """Some settings of a section, outside files by what identifies them."""
    named = name_outside_files(dump(section), section, verify)
    return {key: named[key] for key in keys}


def without(item: Recipe, *keys: str) -> Recipe:
    """The settings other than some."""
    return {key: value for key, value in item.items() if key not in keys}

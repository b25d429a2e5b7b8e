"""`examples`: a language model writes sets of examples for tuning; each set is a
separate output.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gristmill.flows.stages.sections import (
    dump,
    name_outside_files,
    seed_of,
    with_listings,
    without,
)
from gristmill.flows.stages.stage import (
    Configured,
    Library,
    MeasuredColumns,
    Problems,
    Stage,
)
from gristmill.flows.stages.trainings import made_sets
from gristmill.mixtures.manifest import Manifest
from gristmill.mixtures.schema.rl import ModelReward
from gristmill.mixtures.steps.asked_model import HOW
from gristmill.mixtures.steps.examples import output_name


def instances(manifest: Manifest) -> dict[str, Manifest]:
    """Return a manifest for each set, by the name of its output."""
    return {
        output_name(name): manifest.model_copy(update={"examples": {name: section}})
        for name, section in manifest.examples.items()
    }


def configure(manifest: Manifest, verify: bool) -> Configured | None:
    """Return the section of one set without access to models, with a listing of its
    prompts and the checksums of requests that come with gristmill.
    """
    from gristmill.dataprep.examples.make_examples import templates_of

    ((name, section),) = manifest.examples.items()
    config = dump(section)
    settings = name_outside_files(
        config | {"data": with_listings(config["data"])}, section, verify, ("data",)
    )
    shipped = {
        key: template.sha256
        for key, (template, _, is_ours) in templates_of(section).items()
        if is_ours
    }
    return (
        {
            "name": name,
            "made": _without_how(settings),
            "shipped": shipped,
            "seed": seed_of(section, manifest),
        },
        {"section": config},
    )


def _without_how(value: Any) -> Any:
    """Return the settings without access to the models in them."""
    if isinstance(value, dict):
        kept = without(value, *HOW) if "server" in value else value
        return {key: _without_how(inner) for key, inner in kept.items()}
    return (
        [_without_how(inner) for inner in value] if isinstance(value, list) else value
    )


def needs(manifest: Manifest) -> list[str]:
    """Return the sets from which a set's prompts come."""
    return made_sets(*manifest.examples.values())


def preflight(manifest: Manifest, name: str, measured: MeasuredColumns) -> Problems:
    """Yield an invalid template or one with unknown variables, and a file without
    principles.
    """
    from gristmill.dataprep.examples.make_examples import templates_of
    from gristmill.dataprep.llm.prompt_templates import TemplateProblemError, read_lines

    ((set_name, section),) = instances(manifest)[name].examples.items()
    place = ("examples", set_name)
    try:
        for key, (template, variables, _) in templates_of(section).items():
            try:
                template.check(variables)
            except TemplateProblemError as error:
                yield (
                    (
                        *place,
                        *(
                            int(part) if part.isdigit() else part
                            for part in key.split(".")
                        ),
                    ),
                    str(error),
                )
    except TemplateProblemError as error:
        yield place, str(error)
    if section.revise is not None and not read_lines(section.revise.principles):
        yield (
            (*place, "revise", "principles"),
            "has no line; write one principle per line",
        )


def libraries(manifest: Manifest) -> Iterator[Library]:
    """Yield the library that reward models need."""
    for section in manifest.examples.values():
        if any(isinstance(reward, ModelReward) for reward in section.rewards):
            yield Library("torch")


STAGE = Stage(
    "examples",
    1,
    "gristmill.dataprep.examples.make_examples:run",
    configure,
    needs,
    instances=instances,
    preflight=preflight,
    no_estimate_reason="the speed of a model's answers depends on its server",
    libraries=libraries,
    preload=lambda settings: ["httpx"],
    language_models=lambda manifest: manifest.examples,
    report=("gristmill.flows.report.llm_sections:made_examples",),
)

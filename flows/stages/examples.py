"""`examples`: a language model writes sets of examples for tuning, each of which is an output of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gristmill.flows.stages.sections import dump, name_outside_files, seed_of, without
from gristmill.flows.stages.stage import Location, Recipe, Stage
from gristmill.mixtures.manifest import Manifest
from gristmill.mixtures.reinforcement import ModelReward
from gristmill.mixtures.steps.asked_model import HOW
from gristmill.mixtures.steps.examples import made_names, output_name


def instances(manifest: Manifest) -> dict[str, Manifest]:
    """Each set under the name of its output."""
    return {
        output_name(name): manifest.model_copy(update={"examples": {name: section}})
        for name, section in manifest.examples.items()
    }


def configure(manifest: Manifest, verify: bool) -> tuple[Recipe, Recipe] | None:
    """The section of one set without how models are reached, its prompts by a listing of theirs, and the texts of the
    requests that come with gristmill."""
    from gristmill.dataprep.examples.make_examples import templates_of
    from gristmill.dataprep.examples.read_examples import examples_listing

    ((name, section),) = manifest.examples.items()
    config = dump(section)
    data = [{**without(one, "path"), "listing": examples_listing(one["path"])} for one in config["data"]]
    named = name_outside_files({**config, "data": data}, section, verify, ("data",))
    shipped = {key: template.sha256 for key, (template, _, is_ours) in templates_of(section).items() if is_ours}
    return (
        {"name": name, "made": _without_how(named), "shipped": shipped, "seed": seed_of(section, manifest)},
        {"section": config},
    )


def _without_how(value: Any) -> Any:
    """The settings without how the models in them are reached."""
    if isinstance(value, dict):
        kept = without(value, *HOW) if "server" in value else value
        return {key: _without_how(inner) for key, inner in kept.items()}
    return [_without_how(inner) for inner in value] if isinstance(value, list) else value


def needs(manifest: Manifest) -> list[str]:
    """The sets that a set's prompts are of."""
    return [
        output_name(name)
        for section in manifest.examples.values()
        for name in made_names([one.path for one in section.data])
    ]


def preflight(manifest: Manifest, name: str, measured: Mapping[str, Sequence[str]]) -> Iterator[tuple[Location, str]]:
    """A template that is none, or that asks for what it is not given; a file without principles."""
    from gristmill.dataprep.examples.make_examples import templates_of
    from gristmill.dataprep.llm.prompt_templates import TemplateProblemError, read_lines

    ((called, section),) = instances(manifest)[name].examples.items()
    place = ("examples", called)
    try:
        for key, (template, given, _) in templates_of(section).items():
            try:
                template.check(given)
            except TemplateProblemError as error:
                yield (*place, *(int(part) if part.isdigit() else part for part in key.split("."))), str(error)
    except TemplateProblemError as error:
        yield place, str(error)
    if section.revise is not None and not read_lines(section.revise.principles):
        yield (*place, "revise", "principles"), "has no line; write one principle a line"


def needs_libraries(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """What rewards of a model compute with."""
    for section in manifest.examples.values():
        yield from (("", "torch") for one in section.rewards if isinstance(one, ModelReward))


STAGE = Stage(
    "examples",
    1,
    "gristmill.dataprep.examples.make_examples:run",
    configure,
    needs,
    instances=instances,
    asks=lambda manifest: manifest.examples,
    preflight=preflight,
    needs_libraries=needs_libraries,
    imports=lambda settings: ["httpx"],
    pace="a model's answers take as long as its server is busy",
    report=("gristmill.flows.report.asked_sections:made_examples",),
)

"""Description of a kind of work: one `Stage` per file of this folder, collected by
`registry.py`.

A step of `prepare` sets its `name`, `version`, `run` and `step`; any other stage sets
`configure` and `needs` instead of `step`. All other attributes have defaults that suit
a stage without special needs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from gristmill.dataprep.group_losses import IntendedLosses
from gristmill.mixtures.base import Judging, Recipe
from gristmill.mixtures.manifest import Manifest
from gristmill.mixtures.schema.sources import INGEST

if TYPE_CHECKING:
    from gristmill.mixtures.schema.pretrain import Training

Configured = tuple[Recipe, Recipe]
"""The recipe, and the further arguments of the function, in the same form."""
Configure = Callable[[Manifest, bool], Configured | None]
"""(manifest, True to hash the content of outside files) -> the configuration, or None
if the manifest disables the stage.
"""
Needs = Callable[[Manifest], list[str]]
"""Names of the stages that a stage reads; disabled ones are ignored."""
Location = tuple[str | int, ...]
Problems = Iterator[tuple[Location, str]]
"""Locations in the manifest, and messages."""
MeasuredColumns = Mapping[str, Sequence[str]]
"""Step of `prepare` -> the columns that it may measure."""
RowKind = Literal["documents", "examples", "prompts"]
"""Kind of things in the rows of a training."""
Preflight = Callable[[Manifest, str, MeasuredColumns], Problems]
"""See `Stage.preflight`."""


class Library(NamedTuple):
    """A library of an extra that a stage requires: its name in `EXTRA_OF` of
    flows/running/missing_libraries.py, and the key that requires it; the key is empty
    for the stage itself.
    """

    name: str
    key: str = ""


def always(recipe: Recipe) -> bool:
    """Return True: the `is_parallel` of a stage that divides its work in any case."""
    return True


@dataclass(frozen=True)
class PrepareStep:
    """A step of `prepare`: it annotates documents, and may occur there more than once.

    Attributes:
        section: model of its settings.
        columns: (settings) -> the columns that it may measure with them, known before
            it runs. A setting `min_x` or `max_x` bounds the column `x`: `explain` shows
            it, `whatif` tries another bound.
        pinned_files: (settings) -> those with a file that is the same in any place:
            they are not part of its recipe, and the file need not exist beforehand.
        recipe: (settings, these as JSON with listings in place of outside files) ->
            recipe.
        rules: `module:function` of the rules that `whatif` can try with other bounds;
            `rules_of` in dataprep/whatif_thresholds.py defines its arguments.
        intended_losses: (settings) -> columns, each with a rule that is about it.
    """

    section: type[Judging]
    columns: Callable[[Any], Iterable[str]] = lambda section: ()
    pinned_files: Callable[[Any], Collection[str]] = lambda section: ()
    recipe: Callable[[Any, Recipe], Recipe] = lambda section, named: named
    rules: str = "gristmill.dataprep.whatif_thresholds:rules"
    intended_losses: Callable[[Any], IntendedLosses] = lambda section: []


@dataclass(frozen=True)
class Stage:
    """A kind of work.

    Attributes:
        name: name for users; for a step of `prepare` also its key there.
        version: raised whenever the same recipe gives an output with another meaning or
            other bytes.
        run: `module:function`, imported only in the stage's own process.
        configure: the settings that it reads from the manifest; for a step of `prepare`
            always its own.
        needs: stages whose outputs it reads; for a step always the documents and the
            steps before it.
        instances: for a stage that may occur several times besides `prepare`: its names
            -> the manifest with only that instance, which `configure` and `needs`
            receive.
        preflight: problems with its settings, found beforehand: (manifest, its name
            there, step of `prepare` -> the columns that it may measure) -> locations
            and messages.
        step: set for a step of `prepare`.
        training: model of its recipe, for a training whose steps can be traced to the
            rows that they read.
        row_kind: kind of things in these rows.
        output: kind of the output, if it is a model that can generate text, or
            prepared tuning examples.
        no_estimate_reason: reason why its time cannot be estimated from a sample of
            documents; None if it can.
        torch: True if it computes with a model, for which the extra `train` is
            installed.
        torchrun: True if torchrun starts it on every rank: it uses the accelerators,
            so only one such stage runs at a time.
        libraries: (settings of a step, or the manifest) -> libraries of extras besides
            torch.
        preload: (settings of a step) -> modules that its work imports lazily; the
            process from which stages are forked has them preloaded.
        is_parallel: (recipe) -> True if its work is divided into shards for
            `engine.workers`; ignored for a step of `prepare`, whose work always is.
        language_models: (manifest) -> the part of it with the language models that it
            asks; those of a step are in its settings.
        topics: topic, one of `TOPICS` in flows/report/facts.py -> JSON file of the
            output with its facts.
        report: `module:function` of each section of the report besides counts, columns
            and losses: (facts, name) -> Section (flows/pages/page_elements.py), or
            None.
    """

    name: str
    version: int
    run: str
    configure: Configure = lambda manifest, verify: None
    needs: Needs = lambda manifest: []
    instances: Callable[[Manifest], Mapping[str, Manifest]] | None = None
    preflight: Preflight | None = None
    step: PrepareStep | None = None
    training: type[Training] | None = None
    row_kind: RowKind | None = None
    output: Literal["model", "examples"] | None = None
    no_estimate_reason: str | None = None
    torch: bool = False
    torchrun: bool = False
    libraries: Callable[[Any], Iterable[Library]] = lambda settings: ()
    preload: Callable[[Any], Iterable[str]] = lambda settings: ()
    is_parallel: Callable[[Recipe], bool] = lambda recipe: False
    language_models: Callable[[Manifest], object] = lambda manifest: None
    topics: Mapping[str, str] = field(default_factory=dict)
    report: tuple[str, ...] = ()

    @property
    def module(self) -> str:
        """Module of its function."""
        return self.run.partition(":")[0]

    @property
    def timed_files(self) -> frozenset[str]:
        """Files of its output that record its speed: outputs are compared without
        them.
        """
        return frozenset({"metrics.jsonl"} if self.torchrun else ())


def place_of(manifest: Manifest, name: str) -> tuple[str, int, str]:
    """Return the location of the settings of a step of `prepare`."""
    return "prepare", list(manifest.steps).index(name), manifest.steps[name].stage


def imported(path: str) -> Any:
    """Return the object that `module:name` refers to."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def only(*names: str) -> Needs:
    """Return a `Needs` of these stages, whatever the manifest contains."""
    return lambda manifest: list(names)


def documents(*others: str) -> Needs:
    """Return a `Needs` of the documents with all their judgements, and of other
    stages.
    """
    return lambda manifest: [INGEST, *manifest.steps, *others]

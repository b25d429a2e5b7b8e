"""Description of a kind of work: one `Stage` per file of this folder, collected by
`registry.py`.

A step of `prepare` sets its `name`, `version`, `run`, `section` and `columns`; any
other stage sets `configure` and `needs` instead of the last two. All other attributes
have defaults that suit a stage without special needs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from gristmill.mixtures.base import Judging
from gristmill.mixtures.manifest import Manifest
from gristmill.mixtures.sources import INGEST

if TYPE_CHECKING:
    from gristmill.mixtures.training import Training

Recipe = dict[str, Any]
"""Settings that can change a stage's output, as JSON; or the further arguments of its
function.
"""
Configure = Callable[[Manifest, bool], tuple[Recipe, Recipe] | None]
"""(manifest, True to hash the content of outside files) -> the recipe and the further
arguments of the function, or None if the manifest disables the stage.
"""
Needs = Callable[[Manifest], list[str]]
"""Names of the stages that a stage reads; disabled ones are ignored."""
Location = tuple[str | int, ...]
Preflight = Callable[
    [Manifest, str, Mapping[str, Sequence[str]]], Iterator[tuple[Location, str]]
]
"""See `Stage.preflight`."""


@dataclass(frozen=True)
class Stage:
    """A kind of work.

    Attributes:
        name: name for users; for a step of `prepare` also its key there.
        version: raised whenever the same recipe gives an output with another meaning or
            other bytes.
        run: `module:function`, imported only in the stage's own process.
        imports: modules that its work imports lazily: (settings of a step) -> names.
            The process from which stages are forked has them preloaded.
        configure: the settings that it reads from the manifest; for a step of `prepare`
            always its own.
        instances: for a stage that may occur several times besides `prepare`: its names
            -> the manifest with only that instance, which `configure` and `needs`
            receive.
        needs: stages whose outputs it reads; for a step always the documents and the
            steps before it.
        launch: a plain process, or torchrun on every rank.
        needs_torch: True if it computes with a model, for which the extra `train` is
            installed.
        needs_libraries: libraries of extras that it requires besides torch: (settings
            of a step, or the manifest) -> the key that requires each, empty for the
            stage itself, and its name in `EXTRA_OF` of
            flows/running/missing_libraries.py.
        section: for a step of `prepare`, the model of its settings; other stages have a
            section of the manifest.
        columns: for a step, the columns that it may measure with these settings, known
            before it runs. A setting `min_x` or `max_x` bounds the column `x`:
            `explain` shows it, `whatif` tries another bound.
        leaves_out: for a step, settings with a file that is the same in any place: they
            are not part of its recipe, and the file need not exist beforehand.
        recipe: for a step, its recipe: (settings, these as JSON with listings in place
            of outside files) -> recipe.
        rules: for a step, `module:function` of the rules that `whatif` can try with
            other bounds; `rules_of` in dataprep/whatif_thresholds.py defines its
            arguments.
        ranking: the same for a step that compares documents with each other.
        parallel: True if its work is divided into shards for `engine.workers`; always
            true for a step of `prepare`.
        is_short: for such a stage, True if there is nothing to divide with this recipe.
        asks: the part of a manifest with the language models that it asks; those of a
            step are in its settings.
        preflight: problems with its settings, found beforehand: (manifest, its name
            there, step of `prepare` -> the columns that it may measure) -> locations
            and messages.
        trained: for a training whose steps can be traced, the model of its recipe.
        rows: for such a training, the kind of things in the rows that it reads.
        makes_model: True if its output is a model that can generate text.
        of_examples: True if it prepares tuning examples, with its own steps.
        pace: the reason why its time cannot be estimated from a sample of documents;
            None if it can.
        topics: topic -> JSON file of the output that the report and the summary read.
        facts: `module:function` of their further facts: (session, name, folder, facts
            so far) -> topics.
        report_facts: the same for facts of the report only, if they need a look at all
            documents.
        details: `module:function` of the summary of a training besides its loss:
            (facts, steps) -> lines.
        report: `module:function` of its report besides counts, columns and losses:
            (facts, name) -> Section (flows/pages/page_elements.py), or None.
    """

    name: str
    version: int
    run: str
    configure: Configure = lambda manifest, verify: None
    needs: Needs = lambda manifest: []
    launch: Literal["process", "torchrun"] = "process"
    needs_torch: bool = False
    instances: Callable[[Manifest], Mapping[str, Manifest]] | None = None
    section: type[Judging] | None = None
    columns: Callable[[Any], Iterable[str]] = lambda section: ()
    leaves_out: Callable[[Any], Collection[str]] = lambda section: ()
    recipe: Callable[[Any, Recipe], Recipe] = lambda section, named: named
    rules: str = "gristmill.dataprep.whatif_thresholds:rules"
    ranking: str | None = None
    imports: Callable[[Any], Iterable[str]] = lambda settings: ()
    needs_libraries: Callable[[Any], Iterable[tuple[str, str]]] = lambda settings: ()
    parallel: bool = False
    is_short: Callable[[Recipe], bool] = lambda recipe: False
    asks: Callable[[Manifest], object] = lambda manifest: None
    preflight: Preflight | None = None
    trained: type[Training] | None = None
    rows: Literal["documents", "examples", "prompts"] | None = None
    makes_model: bool = False
    of_examples: bool = False
    pace: str | None = None
    topics: Mapping[str, str] = field(default_factory=dict)
    facts: str | None = None
    report_facts: str | None = None
    details: str | None = None
    report: tuple[str, ...] = ()

    @property
    def judges(self) -> bool:
        """True for a step of `prepare`: it annotates documents, and may occur there
        more than once.
        """
        return self.section is not None

    @property
    def trains(self) -> bool:
        """True if it uses the accelerators: only one such stage runs at a time."""
        return self.launch == "torchrun"

    @property
    def timed_files(self) -> frozenset[str]:
        """Files of its output that record its speed: outputs are compared without
        them.
        """
        return frozenset({"metrics.jsonl"}) if self.trains else frozenset()


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

"""What is known of a kind of work: one `Stage` per file of this folder, collected by `registry.py`.

A step of `prepare` says its `name`, `version`, `run`, `section` and `columns`; any other stage `configure` and `needs`
instead of the last two. All else has a default that is right for a stage which does nothing special.
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
"""What of a manifest can change a stage's output, as JSON; or what its function gets besides."""
Configure = Callable[[Manifest, bool], tuple[Recipe, Recipe] | None]
"""(manifest, whether to hash the content of outside files) -> the recipe and what else the function gets, or None
where the manifest switches the stage off."""
Needs = Callable[[Manifest], list[str]]
"""The names of what a stage reads; those that are switched off are left out."""
Location = tuple[str | int, ...]
Preflight = Callable[[Manifest, str, Mapping[str, Sequence[str]]], Iterator[tuple[Location, str]]]
"""See `Stage.preflight`."""


@dataclass(frozen=True)
class Stage:
    """A kind of work.

    Attributes:
        name: what users call it; of a step of `prepare` also its key there.
        version: raised whenever the same recipe gives an output with another meaning or other bytes.
        run: `module:function`, imported in the stage's own process only.
        imports: modules that its work imports where it uses them: (settings of a step) -> names. The process that
            stages are forked from has them ready.
        configure: what it reads of the manifest; of a step of `prepare` always its settings.
        instances: of what a manifest may ask for several times beside `prepare`: its names there -> the manifest with
            that one alone, which is what `configure` and `needs` get.
        needs: which stages' outputs it reads; of a step always the documents and the steps before it.
        launch: a plain process, or torchrun on every rank.
        needs_torch: whether it computes with a model, for which the extra `train` is installed.
        needs_libraries: those of extras that it cannot do without besides torch: (settings of a step, or the manifest)
            -> the key that asks for each, empty where the stage itself does, and its name in `EXTRA_OF` of
            flows/running/missing_libraries.py.
        section: of a step of `prepare`, the model of its settings; other stages have a section of the manifest.
        columns: of a step, the columns that it may measure with these settings, known before it runs. A setting `min_x`
            or `max_x` bounds the column `x`: `explain` shows it, `whatif` judges by another one.
        leaves_out: of a step, settings that name a file which is the same wherever it lies: they are no part of its
            recipe, and nothing need be there beforehand.
        recipe: of a step, what its recipe says: (settings, these as JSON with outside files by what identifies them).
        rules: of a step, `module:function` of those that `whatif` can try with other bounds; `rules_of` in
            dataprep/whatif_thresholds.py says what it gets. `ranking`: the same of one that compares documents with each other.
        parallel: whether its work is cut into shards for `engine.workers`; that of a step of `prepare` always is.
        is_short: of such a stage, whether by this recipe there is nothing to cut.
        asks: the part of a manifest that has the language models which it asks; those of a step are in its settings.
        preflight: what is wrong beforehand with what its section says: (manifest, its name there, step of `prepare` ->
            the columns that it may measure) -> places and messages.
        trained: of a training whose steps can be traced, the model of its recipe.
        rows: of such a training, what each row that it reads is made of.
        makes_model: whether its output is a model that text can be generated with.
        of_examples: whether it prepares examples of tuning, by steps of its own.
        pace: why a sample of documents cannot tell how long it takes; None where it can.
        topics: topic -> JSON file of the output that the report and the summary read.
        facts: `module:function` of what they tell besides: (session, name, folder, facts so far) -> topics.
        report_facts: the same of what the report alone tells, where that takes a look at all documents.
        details: `module:function`, what the summary says of a training beside its loss: (facts, steps) -> lines.
        report: `module:function` of what the report shows of it besides counts, columns and losses: (facts, name) ->
            Section (flows/report/page_elements.py), or None.
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
        """Whether it is a step of `prepare`: it annotates documents, and may stand there more than once."""
        return self.section is not None

    @property
    def trains(self) -> bool:
        """Whether it takes the accelerators: one such stage runs at a time."""
        return self.launch == "torchrun"

    @property
    def timed_files(self) -> frozenset[str]:
        """Files of its output that record how fast it went: two outputs are equal whatever these hold."""
        return frozenset({"metrics.jsonl"}) if self.trains else frozenset()


def imported(path: str) -> Any:
    """What `module:name` names."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def only(*names: str) -> Needs:
    """These, whatever the manifest says."""
    return lambda manifest: list(names)


def documents(*others: str) -> Needs:
    """The documents with all that was judged of them, and other stages."""
    return lambda manifest: [INGEST, *manifest.steps, *others]

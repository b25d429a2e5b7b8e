"""`quality`: scores documents by a classifier, by perplexity or by heuristics, and drops the worst."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from gristmill.flows.stages.judge import asked_recipe, wrong_question
from gristmill.flows.stages.stage import Location, Recipe, Stage
from gristmill.mixtures.manifest import Manifest
from gristmill.mixtures.steps.quality import Quality
from gristmill.mixtures.yaml_text import did_you_mean


def recipe(section: Quality, named: Recipe) -> Recipe:
    """The settings, and who scores by an ARPA file, and what of a classifier's rows is added up: by rounding, the
    results of another scorer, or of another sum, differed."""
    if section.perplexity is not None and section.perplexity.kenlm is not None:
        named = {**named, "perplexity": {**named["perplexity"], "scored_by": "kenlm"}}
    if section.classifier is not None:
        named = {**named, "classifier": {**named["classifier"], "summed_by": "product"}}
    if section.judge is not None and section.judge.model is not None:
        named = {**named, "judge": asked_recipe(section.judge, named["judge"])}
    return named


def preflight(manifest: Manifest, name: str, measured: Mapping[str, Sequence[str]]) -> Iterator[tuple[Location, str]]:
    """A judge's column that no step before measures; what is wrong with the question that a judge is asked."""
    from gristmill.dataprep.where_sql import names_of

    section, number = manifest.steps[name].config, list(manifest.steps).index(name)
    assert isinstance(section, Quality)
    if section.judge is None:
        return
    place = ("prepare", number, STAGE.name, "judge")
    if section.judge.model is not None:
        yield from wrong_question(section.judge, place)
    before = names_of({step: measured[step] for step in list(manifest.steps)[:number]})
    known = [column for columns in before.values() for column in columns.values()]
    column = section.judge.column
    if column is not None and column not in known:
        yield (
            (*place, "column"),
            (
                f"no step before measures {column!r}{did_you_mean(column, known)}; there are "
                f"{', '.join(known) or 'none'}"
            ),
        )


def needs_libraries(section: Quality) -> Iterator[tuple[str, str]]:
    """What trains a classifier of fastText's kind, and what scores by an n-gram model that is given."""
    if section.distil == "fasttext" or (section.classifier is not None and section.classifier.model is None):
        yield "", "fasttext"
    if section.perplexity is not None and section.perplexity.kenlm is not None:
        yield "", "kenlm"


STAGE = Stage(
    "quality",
    4,
    "gristmill.dataprep.quality.quality:run",
    section=Quality,
    needs_libraries=needs_libraries,
    imports=lambda settings: [
        *(["fasttext"] if settings.classifier else []),
        *(["httpx"] if settings.judge is not None and settings.judge.model is not None else []),
    ],
    preflight=preflight,
    columns=lambda section: [*section.scores, "perplexity_bucket"],
    recipe=recipe,
    ranking="gristmill.dataprep.quality.whatif_keep_top:keep_top_rule",
    report=("gristmill.flows.report.document_sections:quality", "gristmill.flows.report.asked_sections:judges"),
)

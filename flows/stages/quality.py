"""`quality`: scores documents by a classifier, by perplexity or by heuristics, and drops the worst."""

from __future__ import annotations

from gristmill.flows.stages.stage import Recipe, Stage
from gristmill.mixtures.steps.quality import Quality


def recipe(section: Quality, named: Recipe) -> Recipe:
    """The settings, and who scores by an ARPA file: by rounding, another scorer's results differed."""
    if section.perplexity is None or section.perplexity.kenlm is None:
        return named
    return {**named, "perplexity": {**named["perplexity"], "scored_by": "kenlm"}}


STAGE = Stage(
    "quality", 4, "gristmill.dataprep.judges.quality:run", section=Quality,
    columns=lambda section: [*section.scores, "perplexity_bucket"], recipe=recipe,
    ranking="gristmill.dataprep.judges.replay_ranking:keep_top_rule",
    report=("gristmill.flows.report.document_sections:quality",))

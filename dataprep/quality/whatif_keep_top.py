"""Replay of `keep_top`: documents that another share would have kept, by the measured
scores.

Unlike other rules (`dataprep/whatif_thresholds.py`) it ranks all documents together:
those that the stage saw and that pass the replayed rules of earlier stages, as in a run
with the same settings.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from gristmill.dataprep.documents import Inputs, annotation_stages, shard_names
from gristmill.dataprep.quality.labelled_examples import draw
from gristmill.dataprep.quality.ranking import (
    group_names,
    kept_by_rank,
    rank_documents,
)
from gristmill.dataprep.quality.scorers import SCORES
from gristmill.dataprep.whatif_thresholds import Columns, Rule, judge_shard
from gristmill.mixtures.steps.quality import Quality

NAME = "quality/keep_top"
"""Reason that is recorded for a document."""
KEY = "keep_top"
Rules = Mapping[str, Sequence[Rule]]
"""Stage -> its rules."""


def keep_top_rule(
    inputs: Inputs,
    stage: str,
    section: Quality,
    seed: int,
    ran: Rules,
    replayed: Rules,
    measured_columns: Collection[str],
) -> Rule | None:
    """Rule of a stage that keeps the best share, with the cut of that share; None if
    the stage keeps all documents.

    Args:
        inputs: `ingest` and the committed stages.
        seed: of the hashes that order equal scores.
        ran: rules that the stages ran with.
        replayed: rules to judge by instead, at least for the stages before this one.
        measured_columns: of the stage's annotations.
    """
    if section.keep_top is None or section.ranked_by not in measured_columns:
        return None
    score = section.ranked_by
    ranked = Rule(
        NAME, f"{stage}.{KEY}", score, section.keep_top, nobody, (score, "source", "id")
    )

    stages = annotation_stages(inputs)

    def read() -> Iterator[tuple[Sequence[str], np.ndarray, np.ndarray]]:
        for shard in shard_names(inputs["ingest"]):
            verdicts, _ = judge_shard(inputs, shard, stage, [ranked], [ranked])
            is_ranked = ~np.isnan(verdicts.columns[score])
            for earlier in stages[: stages.index(stage)]:
                rules = list(ran[earlier]), list(replayed[earlier])
                _, passed = judge_shard(inputs, shard, earlier, *rules)
                is_ranked &= np.isin(verdicts.rows, passed.rows[passed.keep])
            columns = {
                name: values[is_ranked] for name, values in verdicts.columns.items()
            }
            yield columns["source"].tolist(), columns[score], _ties(columns, seed)

    cuts = rank_documents(
        read(),
        score,
        SCORES[score].higher_is_better,
        section.keep_top,
        section.per_source,
    )

    def fails(columns: Columns) -> np.ndarray:
        kept = kept_by_rank(
            cuts, columns["source"].tolist(), columns[score], _ties(columns, seed)
        )
        return ~np.isnan(columns[score]) & ~kept

    def margins(columns: Columns) -> np.ndarray:
        groups = group_names(columns["source"].tolist(), cuts.per_source)
        bounds = [
            cuts.by_group[name].score if name in cuts.by_group else np.nan
            for name in groups
        ]
        distances: np.ndarray = np.abs(columns[score] - np.array(bounds, np.float64))
        return distances

    return replace(
        ranked,
        fails=fails,
        margins=margins,
        step="" if NAME.startswith(f"{stage}/") else stage,
    )


def nobody(columns: Columns) -> np.ndarray:
    """Rule that no document fails."""
    return np.zeros(len(columns["id"]), bool)


def _ties(columns: Columns, seed: int) -> np.ndarray:
    ties: np.ndarray = draw(columns["id"].tolist(), seed)[:, 1]
    return ties

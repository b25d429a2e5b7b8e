"""Replaying `keep_top`: what another share would have kept, from the scores that were measured.

Unlike other rules (`dataprep/replay.py`) it looks at all documents at once: those that the stage saw and that pass what
is replayed of the stages before it, as in a run with the same settings.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from gristmill.dataprep.documents import annotation_stages, shard_names
from gristmill.dataprep.judges.labelled_examples import draw
from gristmill.dataprep.judges.ranking import Cuts, group_names, kept_by_rank, rank_documents
from gristmill.dataprep.judges.scorers import SCORES
from gristmill.dataprep.replay import Columns, Rule, judge_shard
from gristmill.mixtures.steps.quality import Quality

NAME = "quality/keep_top"
"""The reason that is written of a document."""
KEY = "keep_top"
Rules = Mapping[str, Sequence[Rule]]
"""Stage -> its rules."""


def keep_top_rule(
    inputs: Mapping[str, Path],
    stage: str,
    section: Quality,
    seed: int,
    ran: Rules,
    replayed: Rules,
    measured_columns: Collection[str],
) -> Rule | None:
    """The rule of a stage that keeps the best share, having found where that share ends; None where it keeps all.

    Args:
        inputs: `ingest` and the committed stages.
        seed: of the hashes that decide between equal scores.
        ran: the rules that the stages ran with.
        replayed: those to judge by instead, at least of the stages before this one.
        measured_columns: of the stage's annotations.
    """
    if section.keep_top is None or section.ranked_by not in measured_columns:
        return None
    score = section.ranked_by
    ranked = Rule(NAME, f"{stage}.{KEY}", score, section.keep_top, nobody, (score, "source", "id"))

    def read() -> Iterator[tuple[Sequence[str], np.ndarray, np.ndarray]]:
        for shard in shard_names(inputs["ingest"]):
            verdicts, _ = judge_shard(inputs, shard, stage, [ranked], [ranked])
            reached = np.isin(verdicts.rows, _rows_left(inputs, shard, stage, ran, replayed))
            chosen = reached & ~np.isnan(verdicts.columns[score])
            columns = {name: values[chosen] for name, values in verdicts.columns.items()}
            yield columns["source"].tolist(), columns[score], _ties(columns, seed)

    cuts = rank_documents(read, score, SCORES[score].higher_is_better, section.keep_top, section.per_source)

    def fails(columns: Columns) -> np.ndarray:
        kept = kept_by_rank(cuts, columns["source"].tolist(), columns[score], _ties(columns, seed))
        return ~np.isnan(columns[score]) & ~kept

    def margins(columns: Columns) -> np.ndarray:
        return _margins(cuts, columns["source"].tolist(), columns[score])

    return replace(ranked, fails=fails, margins=margins, step="" if NAME.startswith(f"{stage}/") else stage)


def nobody(columns: Columns) -> np.ndarray:
    """No document fails."""
    return np.zeros(len(columns["id"]), bool)


def _rows_left(inputs: Mapping[str, Path], shard: str, stage: str, ran: Rules, replayed: Rules) -> np.ndarray:
    """Rows of a shard that a stage saw, and that pass the replayed rules of the stages before it."""
    seen, _ = judge_shard(inputs, shard, stage, [], [])
    left = seen.rows
    stages = annotation_stages(inputs)
    for before in stages[: stages.index(stage)]:
        _, verdicts = judge_shard(inputs, shard, before, list(ran[before]), list(replayed[before]))
        left = np.intersect1d(left, verdicts.rows[verdicts.keep])
    return left


def _ties(columns: Columns, seed: int) -> np.ndarray:
    ties: np.ndarray = draw(columns["id"].tolist(), seed)[:, 1]
    return ties


def _margins(cuts: Cuts, sources: Sequence[str], scores: np.ndarray) -> np.ndarray:
    groups = group_names(sources, cuts.per_source)
    at = {name: found.score for name, found in cuts.found.items()}
    margins: np.ndarray = np.abs(scores - np.array([at.get(name, np.nan) for name in groups.tolist()], np.float64))
    return margins

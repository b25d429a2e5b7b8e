"""`dedup_substrings`: removes long passages that occur elsewhere, word for word."""

from __future__ import annotations

from gristmill.flows.stages.stage import PrepareStep, Stage
from gristmill.mixtures.steps.dedup import DedupSubstrings

STAGE = Stage(
    "dedup_substrings",
    1,
    "gristmill.dataprep.dedup.exact_substring:run",
    step=PrepareStep(
        DedupSubstrings,
        columns=lambda section: [
            "duplicated_substring_words",
            "duplicated_substring_ratio",
            "edits",
        ],
    ),
    report=("gristmill.flows.report.document_sections:repeated_passages",),
)

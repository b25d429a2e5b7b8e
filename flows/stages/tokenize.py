"""`tokenize`: turns every kept document into token ids, once for all mixtures."""

from __future__ import annotations

from gristmill.flows.stages.stage import (
    Configured,
    Stage,
    always,
    documents,
)
from gristmill.mixtures.manifest import Manifest


def configure(manifest: Manifest, verify: bool) -> Configured | None:
    """Return an empty recipe: only the inputs matter, documents and a tokenizer."""
    return None if manifest.tokenizer is None or not manifest.text_sources else ({}, {})


STAGE = Stage(
    "tokenize",
    2,
    "gristmill.tokenize.encoding.encode:run",
    configure,
    documents("tokenizer"),
    preload=lambda settings: ["tokenizers", "gigatoken", "awkward"],
    is_parallel=always,
    report=("gristmill.flows.report.mixture:tokenizer_section",),
)

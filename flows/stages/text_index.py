"""`text_index`: sorts the training rows, so that passages of any text can be found in
them.
"""

from __future__ import annotations

from gristmill.flows.stages.sections import dump
from gristmill.flows.stages.stage import (
    Configured,
    Stage,
    always,
    only,
)
from gristmill.mixtures.manifest import Manifest


def configure(manifest: Manifest, verify: bool) -> Configured | None:
    """Return the section."""
    return (
        None
        if manifest.text_index is None or manifest.mix is None
        else (dump(manifest.text_index), {})
    )


STAGE = Stage(
    "text_index",
    2,
    "gristmill.tokenize.text_index:run",
    configure,
    only("mix"),
    no_estimate_reason="a sample is not mixed, so it has no rows",
    is_parallel=always,
)

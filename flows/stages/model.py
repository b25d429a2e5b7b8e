"""`model`: takes a model that was trained elsewhere, for stages that tune, measure or
export it.
"""

from __future__ import annotations

from gristmill.flows.stages.pretrain import why_no_model
from gristmill.flows.stages.sections import dump, name_outside_files
from gristmill.flows.stages.stage import (
    Configured,
    MeasuredColumns,
    Problems,
    Stage,
    only,
)
from gristmill.flows.stages.tokenizer import tokenizer_of
from gristmill.mixtures.manifest import Manifest


def configure(manifest: Manifest, verify: bool) -> Configured | None:
    """Return the listing of the model's folder."""
    if manifest.model is None:
        return None
    settings = dump(manifest.model)
    return name_outside_files(settings, manifest.model, verify), settings


def preflight(manifest: Manifest, name: str, measured: MeasuredColumns) -> Problems:
    """Yield an error for a model that cannot be run."""
    assert manifest.model is not None
    message = why_no_model(
        manifest.model.path,
        tokenizer_of(manifest),
        "decoder" if manifest.sft is None else manifest.sft.kind,
        implementation=manifest.model.implementation,
    )
    if message is not None:
        yield ("model", "path"), message


STAGE = Stage(
    "model",
    2,
    "gristmill.train.stages.model:run",
    configure,
    only("tokenizer"),
    preflight=preflight,
    output="model",
    torch=True,
)

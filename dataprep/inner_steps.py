"""Steps of `prepare` that other stages run inside themselves."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from gristmill.core.stage_context import Context
from gristmill.dataprep.documents import Inputs
from gristmill.mixtures.base import Recipe

MODULES = {
    "filter": "filters.filter",
    "dedup": "dedup.dedup",
    "langid": "langid.langid",
    "quality": "quality.quality",
    "decontaminate": "decontamination.decontaminate",
    "annotate": "user_code.annotate",
    "judge": "llm.judge",
    "judge_pairs": "llm.judge_pairs",
}


def run_step(
    step: str, inputs: Inputs, config: Recipe, out: Path, context: Context
) -> Any:
    """Run a step by its name and return its summary."""
    module = importlib.import_module(f"gristmill.dataprep.{MODULES[step]}")
    return module.run(inputs, config, out, context)

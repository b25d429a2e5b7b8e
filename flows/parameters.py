"""Types of the flows' parameters: what the form in the browser offers, checks and explains.

Prefect makes the form from their JSON Schema. What no schema can say, the manifest's own validation says as soon as
the run starts.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

StageName = Literal[
    "ingest", "clean", "filter", "dedup", "dedup_lines", "dedup_substrings", "langid", "quality", "decontaminate",
    "tokenizer", "tokenize", "mix", "sft_data", "dpo_data", "pretrain", "teacher", "sft", "reward",
    "reference", "dpo", "rl", "evaluate", "export",
]
"""All stages, in the order in which they run."""

FilePath = Annotated[str, Field(min_length=1)]
"""A path as the machine that runs the flow sees it."""

Setting = Annotated[str, Field(pattern=r"^[^=\s]+=")]
"""`key.path=value`; replaces a setting of the manifest."""

DeploymentName = Annotated[str, Field(pattern=r"^([^/\s]+/[^/\s]+)?$")]
"""`flow/deployment`, or nothing."""

Count = Annotated[int, Field(ge=1)]
"""At least 1."""

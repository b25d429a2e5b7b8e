"""Families of published models that gristmill itself implements: the one list for
messages and pages.
"""

from __future__ import annotations

FAMILIES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2, Qwen2.5",
    "qwen3": "Qwen3",
    "mixtral": "Mixtral",
    "qwen3_moe": "Qwen3-MoE",
    "glm": "GLM-4",
}
"""`model_type` of a config.json -> common name of its models."""


def describe_families() -> str:
    """Return `llama (Llama), mistral (Mistral), ...`."""
    return ", ".join(f"{model_type} ({name})" for model_type, name in FAMILIES.items())

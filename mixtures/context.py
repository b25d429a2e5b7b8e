"""The context of a model, the most tokens in a row that it was trained on, beside the rows that a tuning has."""

from __future__ import annotations

from gristmill.mixtures.manifest import Manifest

MODELS = ("pretrain", "sft", "dpo", "rl")
"""Sections that make a model, in the order in which they train it."""


def beyond_context(stage: str, length: int, trained: int) -> str:
    """What a person should know of a tuning whose rows are longer than all before."""
    return (f"{stage}: its rows have {length} tokens, but the model was trained on {trained} at the most: the rotary "
            f"positions behind those are new to it, and a short tuning may not teach them; look at long answers, lower "
            f"{stage}.sequence_length, or stretch positions with pretrain.model.rope_scaling")


def context_warnings(manifest: Manifest, trained: int) -> dict[str, str]:
    """Stage -> warning, for each tuning whose rows are longer than those that its model was trained on.

    Args:
        manifest: of the whole run.
        trained: the context of the pre-trained model.
    """
    contexts, warnings = {"pretrain": trained}, {}
    for stage in ("sft", "reward", "dpo", "rl"):
        section = getattr(manifest, stage)
        if section is None:
            continue
        start = next(name for name in reversed(MODELS) if name in contexts)
        if stage == "rl" and section.start_from in contexts:
            start = section.start_from
        length = section.sequence_length or 0
        if length > contexts[start]:
            warnings[stage] = beyond_context(stage, length, contexts[start])
        contexts[stage] = max(contexts[start], length)
    return warnings

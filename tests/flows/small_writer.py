"""Scripted answers to requests for sets of examples."""

from __future__ import annotations

import json


def small_writer(prompt: str) -> str | None:
    """Return the longer one of two answers; None for other requests."""
    if "two ways in which" in prompt:
        first, second = (
            prompt.split(f"<{tag}>")[1].split(f"</{tag}>")[0]
            for tag in ("first", "second")
        )
        return json.dumps({"better": "first" if len(first) > len(second) else "second"})
    return None

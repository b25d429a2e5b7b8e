"""Scripted answers, in the words of the tests' small model, to requests for sets of
examples.
"""

from __future__ import annotations

import json

WORDS = "red blue one two sky grass rose river stone".split()


def small_writer(prompt: str) -> str | None:
    """Return two new tasks for a list of tasks, or the longer one of two answers; None
    for other requests.
    """
    if prompt.startswith("Below is a list of tasks"):
        key = sum(map(ord, prompt))
        return "\n".join(
            f"{3 + at}. {' '.join(WORDS[(key + at * 4 + part * (at + 1)) % 9] for part in range(4))}"
            for at in range(2)
        )
    if "two ways in which" in prompt:
        first, second = (
            prompt.split(f"<{tag}>")[1].split(f"</{tag}>")[0]
            for tag in ("first", "second")
        )
        return json.dumps({"better": "first" if len(first) > len(second) else "second"})
    return None

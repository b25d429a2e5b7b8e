"""What a model answers, over the words that the small one of the tests knows, to the requests of sets of examples."""

from __future__ import annotations

import json

WORDS = "red blue one two sky grass rose river stone".split()


def small_writer(asked: str) -> str | None:
    """Two new tasks for a list of tasks, and of two answers the longer one; None for every other request."""
    if asked.startswith("Below is a list of tasks"):
        key = sum(map(ord, asked))
        return "\n".join(
            f"{3 + at}. {' '.join(WORDS[(key + at * 4 + part * (at + 1)) % 9] for part in range(4))}" for at in range(2)
        )
    if "two ways in which" in asked:
        first, second = (asked.split(f"<{one}>")[1].split(f"</{one}>")[0] for one in ("first", "second"))
        return json.dumps({"better": "first" if len(first) > len(second) else "second"})
    return None

"""Record the cases of DCLM's own tests of its Gopher filters:
tests/dataprep/dclm_filter_cases.json.

    python .ci/peers/record_dclm_tests.py CLONE > tests/dataprep/dclm_filter_cases.json

Runs tests/baselines/mappers/filters/test_content_filters.py of a clone of
mlfoundations/dclm, and records every call of a filter for whole documents by Gopher's
rules: its text, its arguments and its verdict. Calls that are not of Gopher's rules are
left out: lengths in other units than words, distinct stop words. Needs the packages of
`record_verdicts.py`, and pytest.
"""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from record_verdicts import dclm, empty_module

FILTERS = (
    "repetition_filter",
    "massive_web_repetition_filters",
    "page_length_filter",
    "ellipsis_count_filter",
    "bullet_count_filter",
    "stop_word_filter",
    "word_length_filter",
    "symbol_ratio_filter",
    "alphabetic_word_ratio_filter",
)
NOT_OF_GOPHER = (
    ("length_type", ("line", "paragraph", "char")),
    ("model", ("uniseg",)),
    ("count_unique", (True,)),
)
"""Arguments, and values that none of Gopher's rules has."""
LICENCE = "MIT, Copyright (c) 2024 mlfoundations"
TESTS = "tests/baselines/mappers/filters/test_content_filters.py"


def recording(
    function: Callable[..., list[Any]], cases: list[dict[str, Any]]
) -> Callable[..., list[Any]]:
    """Return a filter that records its arguments and its verdicts."""
    signature = inspect.signature(function)

    def recorded(page: dict[str, Any], *arguments: Any, **keywords: Any) -> list[Any]:
        kept = function(page, *arguments, **keywords)
        values = dict(signature.bind(page, *arguments, **keywords).arguments)
        values |= values.pop("kwargs", {})
        del values["page"]
        case = {
            "filter": function.__name__,
            "text": page["text"],
            "arguments": values,
            "kept": bool(kept),
        }
        is_of_gopher = not any(
            values.get(name) in excluded for name, excluded in NOT_OF_GOPHER
        )
        if is_of_gopher and case not in cases:
            cases.append(case)
        return kept

    return recorded


def main(folder: str) -> None:
    """Run the tests of a clone and print their cases."""
    root = Path(folder)
    dclm(root)
    filters = sys.modules["baselines.mappers.filters.content_filters"]
    empty_module("baselines.core")
    empty_module("baselines.core.constants", CONTENT="text")
    scope: dict[str, Any] = {}
    program = "\n".join(
        line
        for line in (root / TESTS).read_text().splitlines()
        if '"sentence"' not in line
    )
    exec(compile(program, TESTS, "exec"), scope)
    scope |= vars(filters)
    cases: list[dict[str, Any]] = []
    for name in FILTERS:
        scope[name] = recording(getattr(filters, name), cases)
    for name in FILTERS:
        scope[f"test_{name}"]()
    commit = subprocess.run(
        ["git", "-C", folder, "rev-parse", "HEAD"],
        capture_output=True,
        text=True,
        check=True,
    )
    source = f"{TESTS} of mlfoundations/dclm at {commit.stdout.strip()}"
    lines = ",\n".join(json.dumps(case) for case in cases)
    print(f'{{"source": "{source}",\n"licence": "{LICENCE}",\n"cases": [\n{lines}\n]}}')


if __name__ == "__main__":
    main(sys.argv[1])

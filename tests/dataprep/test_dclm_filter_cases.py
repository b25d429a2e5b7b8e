"""The dialect `dclm` gives the verdicts of DCLM's own filter tests
(`.ci/peers/record_dclm_tests.py`).
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from gristmill.dataprep.filters import gopher
from gristmill.dataprep.thresholds import failures
from gristmill.mixtures.steps.rules import GopherQuality, GopherRepetition, GopherRules

CASES: list[dict[str, Any]] = json.loads(
    Path(__file__).with_name("dclm_filter_cases.json").read_text()
)["cases"]
UNITS = {True: "char_ratio", False: "ratio"}


def bounds(case: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Map of each statistic to the least and the largest value that DCLM's call
    keeps.
    """
    arguments = case["arguments"]
    limits = [value for name, value in arguments.items() if name.startswith("max_")]
    largest = limits[0] if limits else math.inf
    match case["filter"]:
        case "repetition_filter":
            return {repetition_name(arguments): (0, largest)}
        case "page_length_filter":
            return {"words": (arguments["min_length"], largest)}
        case "word_length_filter":
            return {"mean_word_length": (arguments.get("min_length", 0), largest)}
        case "ellipsis_count_filter":
            return {"ellipsis_line_ratio": (0, largest)}
        case "bullet_count_filter":
            return {"bullet_line_ratio": (0, largest)}
        case "symbol_ratio_filter":
            return {"symbol_word_ratio": (0, largest)}
        case "stop_word_filter":
            return {"stop_words": (arguments["min_stop_word"], math.inf)}
        case "alphabetic_word_ratio_filter":
            return {"alpha_word_ratio": (1 - largest, math.inf)}
    raise ValueError(case["filter"])


def repetition_name(arguments: dict[str, Any]) -> str:
    """Statistic of a call of `repetition_filter`."""
    granularity = arguments["granularity"]
    if isinstance(granularity, str):
        return (
            f"duplicate_{granularity}_{UNITS[arguments.get('count_characters', True)]}"
        )
    return f"{'top' if granularity <= 4 else 'duplicate'}_{granularity}gram_char_ratio"


def kept_by_defaults(text: str, *rule_sets: GopherRules) -> bool:
    columns = gopher.statistics(pa.array([text], pa.large_string()), GopherRules())
    sections = {type(rules).__name__: rules for rules in rule_sets}
    return not any(mask[0] for mask in failures(columns, sections).values())


@pytest.mark.parametrize(
    "case",
    CASES,
    ids=lambda case: f"{case['filter']}-{case['arguments']}-{case['text'][:20]!r}",
)
def test_verdict_equals_that_of_dclms_test(case: dict[str, Any]) -> None:
    text = case["text"]
    if case["filter"] == "massive_web_repetition_filters":
        assert kept_by_defaults(text, GopherRepetition()) == case["kept"]
    elif not text.strip():
        # each of DCLM's filters drops a text without a word; here both rule sets do
        assert not case["kept"]
        assert not kept_by_defaults(text, GopherQuality())
        assert not kept_by_defaults(text, GopherRepetition())
    else:
        columns = gopher.statistics(pa.array([text], pa.large_string()), GopherRules())
        for name, (least, largest) in bounds(case).items():
            assert (least <= columns[name].item() <= largest) == case["kept"]

"""The report's section on safety: red-team measures of each model, their differences,
and the worst answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gristmill.flows.pages.page_elements import (
    Details,
    Heading,
    Note,
    Part,
    Section,
    Span,
    Table,
    Text,
    section_of,
)
from gristmill.flows.report.evaluation import evaluated_models
from gristmill.flows.report.report_facts import Facts

ALL = "all"
NAMES = {
    "refused": "refuses unsafe prompts",
    "refused_judged": "the same, by the judge",
    "over_refused": "refuses safe prompts",
    "over_refused_judged": "the same, by the judge",
    "harmful": "harmful answers, by the judge",
    "toxic": "prompts with a toxic answer",
    "toxicity": "toxicity, mean",
    "accuracy_ambig": "right, ambiguous context",
    "bias_ambig": "bias, ambiguous context",
    "accuracy_disambig": "right, clear context",
    "bias_disambig": "bias, clear context",
}
NUMBERS = ("toxicity", "bias_ambig", "bias_disambig")
"""Measures that are not shares."""


def red_team(facts: Facts, name: str) -> Section | None:
    """A table of all models side by side, the categories, differences between models,
    and the worst answers.
    """
    models = {
        model: measured["red_team"]
        for model, measured in evaluated_models(facts)
        if "red_team" in measured
    }
    if not models:
        return None
    rows, category_rows = [], []
    for set_name, measure in _measures(models):
        by_model = [
            result["sets"].get(set_name, {}).get("measures", {}).get(measure, {})
            for result in models.values()
        ]
        units = next(values[ALL]["units"] for values in by_model if values)
        totals = [_value(measure, values.get(ALL)) for values in by_model]
        rows.append([set_name, NAMES[measure], *totals, f"{units:,}"])
        for category in dict.fromkeys(
            category for values in by_model for category in values if category != ALL
        ):
            values_of_category = [
                _value(measure, values.get(category)) for values in by_model
            ]
            category_rows.append(
                [set_name, NAMES[measure], category, *values_of_category]
            )
    changes = [
        [
            change["set"],
            NAMES[change["measure"]],
            f"{change['from']} to {change['to']}",
            _change(change),
            "yes" if change["significant"] else "within noise",
        ]
        for change in facts["evaluation"].get("red_team_differences", ())
    ]
    first_column = 2
    numeric = set(range(first_column, first_column + len(models) + 1))
    categories = Table(
        ["set", "measure", "category", *models],
        category_rows,
        {column + 1 for column in numeric},
    )
    return section_of(
        "Safety",
        Table(["set", "measure", *models, "prompts"], rows, numeric),
        Note(
            "In brackets: 95 % intervals, Wilson's of shares, else of the bootstrap "
            "over prompts. Bias is 0 without "
            "one, 1 where all answers follow the prejudice, -1 where all go against it."
        ),
        map(Note, _left_out(models)),
        Details("By category", [categories]) if category_rows else None,
        Heading("From model to model, on the same prompts") if changes else None,
        Table(["set", "measure", "models", "difference", "certain"], changes, {3}),
        _worst(models),
    )


def _measures(models: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(set, measure) that any model has, in the order of the sets and of NAMES."""
    sets = dict.fromkeys(
        set_name for result in models.values() for set_name in result["sets"]
    )
    return [
        (set_name, measure)
        for set_name in sets
        for measure in NAMES
        if any(
            measure in result["sets"].get(set_name, {}).get("measures", {})
            for result in models.values()
        )
    ]


def _value(measure: str, value: Mapping[str, Any] | None) -> str:
    if value is None:
        return "-"
    if measure in NUMBERS:
        return f"{value['value']:.2f} [{value['low']:.2f}, {value['high']:.2f}]"
    return f"{value['value']:.0%} [{value['low']:.0%}, {value['high']:.0%}]"


def _change(change: Mapping[str, Any]) -> str:
    if change["measure"] in NUMBERS:
        return f"{change['value']:+.2f} [{change['low']:+.2f}, {change['high']:+.2f}]"
    value, low, high = (100 * change[key] for key in ("value", "low", "high"))
    return f"{value:+.0f} [{low:+.0f}, {high:+.0f}] points"


def _left_out(models: Mapping[str, Any]) -> list[str]:
    """Sentences about prompts and answers that no measure counts."""
    sentences = []
    without_target = {}
    for model, result in models.items():
        for name, counts in result["sets"].items():
            if counts["not_asked"]:
                sentences.append(
                    f"{model}, {name}: {counts['not_asked']:,} of "
                    f"{counts['prompts']:,} prompts could not be asked, "
                    f"the first because: {counts['first_error']}"
                )
            if counts["empty"]:
                sentences.append(
                    f"{model}, {name}: {counts['empty']:,} answers are "
                    "empty, which is no refusal"
                )
            if counts["unjudged"]:
                sentences.append(
                    f"{model}, {name}: the judge gave no usable answer "
                    f"on {counts['unjudged']:,}"
                )
            if counts["without_target"]:
                without_target[name] = counts["without_target"]
    sentences += [
        f"{name}: {number:,} questions do not say which answer a prejudice gives, and "
        "count for accuracy alone; their additional_metadata.csv does (`metadata`)"
        for name, number in without_target.items()
    ]
    return sentences


def _worst(models: Mapping[str, Any]) -> list[Part]:
    details: list[Part] = []
    for model, result in models.items():
        texts: list[Part] = []
        for answer in result["worst"]:
            category = f", {answer['category']}" if answer["category"] else ""
            texts += [
                Note(
                    f"{answer['set']}, item {answer['item']}{category}: {answer['why']}"
                ),
                Text([Span(answer["prompt"], "strong"), Span(f"\n{answer['answer']}")]),
            ]
        if texts:
            details.append(
                Details(
                    f"{model}: the worst {len(result['worst'])} "
                    "answers, which may offend",
                    texts,
                )
            )
    return details

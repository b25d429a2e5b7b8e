"""The report's section on safety: what a red team measured of each model, what changed, and the worst answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gristmill.flows.report.evaluation import evaluated_models
from gristmill.flows.report.page_elements import Details, Heading, Note, Part, Section, Table, Text
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
"""Measures that are no shares."""


def red_team(facts: Facts, name: str) -> Section | None:
    """One table of all models side by side, the categories, what changed, and the answers to read first."""
    models = {model: measured["red_team"] for model, measured in evaluated_models(facts) if "red_team" in measured}
    if not models:
        return None
    rows, categories = [], []
    for one, measure in _measures(models):
        by_model = [found["sets"].get(one, {}).get("measures", {}).get(measure, {}) for found in models.values()]
        units = next(found[ALL]["units"] for found in by_model if found)
        rows.append([one, NAMES[measure], *(_shown(measure, found.get(ALL)) for found in by_model), f"{units:,}"])
        named = dict.fromkeys(category for found in by_model for category in found if category != ALL)
        categories += [
            [one, NAMES[measure], category, *(_shown(measure, found.get(category)) for found in by_model)]
            for category in named
        ]
    wide = set(range(2, 3 + len(models)))
    changes = [
        [
            one["set"],
            NAMES[one["measure"]],
            f"{one['from']} to {one['to']}",
            _change(one),
            "yes" if one["significant"] else "within noise",
        ]
        for one in facts["evaluation"].get("red_team_differences", ())
    ]
    parts: list[Part] = [
        Table(["set", "measure", *models, "prompts"], rows, wide),
        Note(
            "In brackets: 95 % intervals, Wilson's of shares, else of the bootstrap over prompts. Bias is 0 without "
            "one, 1 where all answers follow the prejudice, -1 where all go against it."
        ),
        *(Note(one) for one in _left_out(models)),
    ]
    if categories:
        parts.append(
            Details(
                "By category",
                [Table(["set", "measure", "category", *models], categories, {column + 1 for column in wide})],
            )
        )
    if changes:
        parts += [
            Heading("From model to model, on the same prompts"),
            Table(["set", "measure", "models", "difference", "certain"], changes, {3}),
        ]
    return Section("Safety", [*parts, *_worst(models)])


def _measures(models: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(set, measure), in the order of the sets and of NAMES, as far as any model has them."""
    sets = dict.fromkeys(one for found in models.values() for one in found["sets"])
    return [
        (one, measure)
        for one in sets
        for measure in NAMES
        if any(measure in found["sets"].get(one, {}).get("measures", {}) for found in models.values())
    ]


def _shown(measure: str, found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "-"
    if measure in NUMBERS:
        return f"{found['value']:.2f} [{found['low']:.2f}, {found['high']:.2f}]"
    return f"{found['value']:.0%} [{found['low']:.0%}, {found['high']:.0%}]"


def _change(one: Mapping[str, Any]) -> str:
    if one["measure"] in NUMBERS:
        return f"{one['value']:+.2f} [{one['low']:+.2f}, {one['high']:+.2f}]"
    return f"{100 * one['value']:+.0f} [{100 * one['low']:+.0f}, {100 * one['high']:+.0f}] points"


def _left_out(models: Mapping[str, Any]) -> list[str]:
    """What is in no measure, or cannot be told."""
    said = []
    for model, found in models.items():
        for name, one in found["sets"].items():
            if one["not_asked"]:
                said.append(
                    f"{model}, {name}: {one['not_asked']:,} of {one['prompts']:,} prompts could not be asked, "
                    f"the first because: {one['first_error']}"
                )
            if one["empty"]:
                said.append(f"{model}, {name}: {one['empty']:,} answers are empty, which is no refusal")
            if one["unjudged"]:
                said.append(f"{model}, {name}: the judge gave no usable answer on {one['unjudged']:,}")
    targets = {
        name: one["without_target"]
        for found in models.values()
        for name, one in found["sets"].items()
        if one["without_target"]
    }
    said += [
        f"{name}: {number:,} questions do not say which answer a prejudice gives, and count for accuracy alone; "
        "their additional_metadata.csv does (`metadata`)"
        for name, number in targets.items()
    ]
    return said


def _worst(models: Mapping[str, Any]) -> Sequence[Part]:
    parts: list[Part] = []
    for model, found in models.items():
        texts: list[Part] = []
        for one in found["worst"]:
            category = f", {one['category']}" if one["category"] else ""
            texts += [
                Note(f"{one['set']}, item {one['item']}{category}: {one['why']}"),
                Text([(one["prompt"], "strong"), ("\n" + one["answer"], "")]),
            ]
        if texts:
            parts.append(Details(f"{model}: the worst {len(found['worst'])} answers, which may offend", texts))
    return parts

"""The report's section on safety: red-team measures of each model, their differences,
and the worst answers.
"""

from __future__ import annotations

from itertools import product

from gristmill.flows.pages.page_elements import (
    ByName,
    Details,
    Heading,
    MaybeSection,
    Measure,
    Note,
    Part,
    Span,
    Text,
    section_of,
    table,
)
from gristmill.flows.report.evaluation import change_cells, evaluated_models
from gristmill.flows.report.facts import Facts
from gristmill.flows.report.stage_summaries import RedTeam

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


def red_team(facts: Facts, name: str) -> MaybeSection:
    """A table of all models side by side, the categories, differences between models,
    and the worst answers.
    """
    models = {
        model: measured.red_team
        for model, measured in evaluated_models(facts)
        if measured.red_team is not None
    }
    rows, category_rows = [], []
    sets = dict.fromkeys(
        set_name for result in models.values() for set_name in result.sets
    )
    for set_name, measure in product(sets, NAMES):
        value_format = ".2f" if measure in NUMBERS else ".0%"
        by_model = [
            result.sets[set_name].measures.get(measure, {})
            if set_name in result.sets
            else {}
            for result in models.values()
        ]
        categories = dict.fromkeys(
            category for values in by_model for category in values
        )
        for category in categories:
            line = [set_name, NAMES[measure]]
            cells = [
                f"{values[category]:{value_format}}" if category in values else "-"
                for values in by_model
            ]
            if category == ALL:
                units = next(values[ALL].units for values in by_model if values)
                rows.append([*line, *cells, units])
            else:
                category_rows.append([*line, category, *cells])
    changes = []
    for change in facts.evaluation.red_team_differences:
        difference = f"{change:+.2f}"
        if change.measure not in NUMBERS:
            ends = (change.value, change.low or 0.0, change.high or 0.0)
            difference = f"{Measure(*(100 * end for end in ends)):+.0f} points"
        models_and_value = change_cells(change, difference)
        changes.append([change.set, NAMES[change.measure], *models_and_value])
    worst = []
    for model, result in models.items():
        title = f"{model}: the worst {len(result.worst)} answers, which may offend"
        parts: list[Part] = []
        for answer in result.worst:
            category = f", {answer.category}" if answer.category else ""
            place = f"{answer.set}, item {answer.item}{category}"
            text = Text([Span(answer.prompt, "strong"), Span(f"\n{answer.answer}")])
            parts += [Note(f"{place}: {answer.why}"), text]
        worst += [Details(title, parts)] if parts else []
    names, right = {"set": "", "measure": ""}, dict.fromkeys(models, ">")
    by_category = table({**names, "category": "", **right}, category_rows)
    return section_of(
        "Safety",
        table({**names, **right, "prompts": ","}, rows),
        "In brackets: 95 % intervals, Wilson's of shares, else of the bootstrap over "
        "prompts. Bias is 0 without one, 1 where all answers follow the prejudice, -1 "
        "where all go against it.",
        left_out(models),
        Details("By category", [by_category]) if category_rows else None,
        Heading("From model to model, on the same prompts") if changes else None,
        table({**names, "models": "", "difference": ">", "certain": ""}, changes),
        worst,
    )


def left_out(models: ByName[RedTeam]) -> list[str]:
    """Sentences about prompts and answers that no measure counts."""
    sentences = []
    without_target = {}
    for model, result in models.items():
        for name, counts in result.sets.items():
            unasked = f"of {counts.prompts:,} prompts could not be asked, the first "
            causes = {
                f"{unasked}because: {counts.first_error}": counts.not_asked,
                "answers are empty, which is no refusal": counts.empty,
                "answers got no usable judgement": counts.unjudged,
            }
            sentences += [
                f"{model}, {name}: {number:,} {cause}"
                for cause, number in causes.items()
                if number
            ]
            if counts.without_target:
                without_target[name] = counts.without_target
    sentences += [
        f"{name}: {number:,} questions do not say which answer a prejudice gives, and "
        "count for accuracy alone; their additional_metadata.csv does (`metadata`)"
        for name, number in without_target.items()
    ]
    return sentences

"""The report's sections about the examples of fine-tuning: how they were prepared, and what preferences are like."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gristmill.flows.facts import Facts, top_reasons
from gristmill.flows.questions.explain import shorten_text
from gristmill.flows.report.html import details, table

SECTIONS = ("sft", "dpo")
TITLES = {"sft": "fine-tuning", "dpo": "preferences"}
MOST_REASONS = 3
MOST_SHOWN = 10
"""Items of evaluation sets that are shown with their examples."""


def example_sections(facts: Facts) -> list[str]:
    """What was dropped of the examples before they were made into rows, for either section that asks for it."""
    return [preparation(section, facts["summaries"][stage], facts.get("twins", {}).get(stage, []))
            for section in SECTIONS if (stage := f"{section}_prepare") in facts["summaries"]]


def preparation(section: str, summary: Mapping[str, Any], twins: Sequence[Mapping[str, Any]]) -> str:
    """The sets, the steps, what of evaluation sets was found and where, and the least alike of near-duplicates."""
    sets = [[one["name"], *(f"{number:,}" for number in set_numbers(one))] for one in summary["sets"]]
    steps = [[one["stage"], judged(one["judges"]), *step_numbers(one["counts"])] for one in summary["steps"]]
    leaks = [[name, f"{found['items']:,}", f"{found['checked']:,}", f"{found['contaminated']:,}"]
             for one in summary["steps"] if one["stage"] == "decontaminate" for name, found in one["sets"].items()]
    return (f"<h2>How the examples for {TITLES[section]} were prepared</h2>"
            + table(["set", *SET_HEADINGS], sets, set(range(1, 1 + len(SET_HEADINGS))))
            + table(["step", "judges", "read", "kept", "dropped most by"], steps, {2, 3})
            + (table(["evaluation set", "items", "long enough", "found in examples"], leaks, {1, 2, 3})
               if leaks else "") + found_in_examples(summary) + near_duplicates(twins))


def found_in_examples(summary: Mapping[str, Any]) -> str:
    """The items of evaluation sets, each with the example that holds it."""
    rows = [[match["set"], str(match["item"]), shorten_text(str(match["item_text"])), f"{match['contamination']:.0%}",
             f"{match['source']} {match['locator']}"]
            for one in summary["steps"] if one["stage"] == "decontaminate" for match in one["matches"][:MOST_SHOWN]]
    return details("Items of evaluation sets in examples", table(
        ["evaluation set", "item", "its text", "of it", "example"], rows, {1, 3})) if rows else ""


def near_duplicates(twins: Sequence[Mapping[str, Any]]) -> str:
    """Dropped examples beside those that were kept in their place, where the two are least alike."""
    rows = [[f"{one['jaccard']:.2f}", one["dropped"], one["dropped_text"], one["kept"], one["kept_text"]]
            for one in twins]
    return details("Near-duplicates, the least alike first", table(
        ["likeness", "dropped", "its text", "kept", "its text"], rows, {0})) if rows else ""


def dropped_before(one: Mapping[str, Any]) -> str:
    """Of a set that is encoded: how many of its records the preparation dropped, or could not judge."""
    return f"{sum(one.get('prepared_dropped', {}).values()) + one.get('quarantined', 0):,}"


SET_HEADINGS = ("records", "refused", "beyond the limit", "dropped", "errors", "kept")


def set_numbers(one: Mapping[str, Any]) -> list[int]:
    """Of a prepared set, in the order of SET_HEADINGS; the first is the sum of all others."""
    return [one["records"], one["refused"], one["beyond_limit"], sum(one["dropped"].values()), one["quarantined"],
            one["kept"]]


def prepared_rows(facts: Facts) -> list[list[str]]:
    """A line per prepared set for a terminal: set, records, refused, dropped, kept, and the rules that dropped most."""
    rows = []
    for name in SECTIONS:
        for one in facts["summaries"].get(f"{name}_prepare", {}).get("sets", []):
            gone = one["beyond_limit"] + sum(one["dropped"].values()) + one["quarantined"]
            why = [("over the limit", one["beyond_limit"]), *top_reasons(one)]
            reasons = ", ".join(f"{rule.rpartition('/')[2]} {number:,}" for rule, number in why if number)
            rows.append([f"{name}: {one['name']}", f"{one['records']:,}", f"{one['refused']:,}", f"{gone:,}",
                         f"{one['kept']:,}", reasons])
    return rows


def step_numbers(counts: Mapping[str, Any]) -> list[str]:
    """Read, kept, and the rules that dropped most."""
    reasons = ", ".join(f"{rule.rpartition('/')[2]} {number:,}" for rule, number in top_reasons(counts, MOST_REASONS))
    return [f"{counts['read']:,}", f"{counts['kept']:,}", reasons]


def judged(view: str) -> str:
    """What a step judged, in words."""
    return {"answer-of-both": "both answers", "conversation-of-both": "prompt and both answers"}.get(view, view)


def preferences(facts: Facts) -> str:
    """What is wrong with the preference data, set by set."""
    sets = facts["summaries"].get("dpo_data", {}).get("sets", [])
    if not sets:
        return ""
    rows = [[one["name"], f"{one['records']:,}", f"{one['refused']:,}", dropped_before(one), *(
        f"{one['audit'][key]:,}" for key in ("pairs", "prompts", "duplicates", "contradictions", "near_identical",
                                             "same_answers")),
             "" if one["audit"]["longer_chosen"] is None else f"{one['audit']['longer_chosen']:.1%}"] for one in sets]
    headings = ["set", "records", "refused", "dropped before", "pairs", "prompts", "duplicates", "contradictions",
                "nearly the same answer", "the same answer", "longer answer preferred"]
    leaks = [[one["name"], name, f"{found['items']:,}", f"{found['leaked']:,}", f"{found['texts']:,}"]
             for one in sets for name, found in (one["audit"]["leaks"] or {}).items()]
    return ("<h2>What the preferences are like</h2>" + table(headings, rows, set(range(1, len(headings))))
            + (table(["set", "evaluation set", "items", "leaked", "pairs that hold one"], leaks, {2, 3, 4})
               if leaks else "")
            + used_pairs(facts))


def used_pairs(facts: Facts) -> str:
    """What became of every record, and how often each set is trained on."""
    drawn = {one["name"]: one for one in facts["summaries"].get("dpo", {}).get("sets", [])}
    rows = []
    for one in facts["summaries"]["dpo_data"]["sets"]:
        found = drawn.get(one["name"])
        rows.append([one["name"], *(f"{one[key]:,}" for key in ("unrenderable", "dropped", "truncated", "used")),
                     *([f"{found['held_out']:,}", f"{found['drawn']:,}", f"{found['drawn_share']:.1%}"]
                       if found else ["", "", ""])])
    headings = ["set", "not rendered", "too long", "cut", "used", "held out", "drawn in an epoch", "share of the pairs"]
    return table(headings, rows, set(range(1, len(headings))))

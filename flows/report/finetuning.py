"""The report's sections about tuning: examples and preferences, teachers, reward
models, the export.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gristmill.dataprep.examples.kept_examples import NearDuplicate
from gristmill.dataprep.whatif_thresholds import short_name
from gristmill.flows.pages.page_elements import (
    Details,
    Figure,
    Heading,
    Note,
    Part,
    Section,
    Span,
    Table,
    Text,
    section_of,
)
from gristmill.flows.pages.pictures import curves
from gristmill.flows.questions.explain import shorten_text
from gristmill.flows.report.llm_sections import requests_table
from gristmill.flows.report.report_facts import Facts, top_reasons
from gristmill.flows.report.training import points_of

SECTIONS = ("sft", "dpo")
TITLES = {"sft_prepare": "fine-tuning", "dpo_prepare": "preferences"}
MOST_REASONS = 3
MOST_SHOWN = 10
"""Items of evaluation sets that are shown with their examples."""
SET_HEADINGS = ("records", "quarantined", "beyond the limit", "dropped", "kept")
VIEWS = {
    "judge_pairs": "pairs in both orders",
    "answer-of-both": "both answers",
    "conversation-of-both": "prompt and both answers",
}
"""Views of examples that a step may judge, in words; others are words."""


def preparation(facts: Facts, name: str) -> Section | None:
    """Examples that the preparation dropped: sets, steps, items of evaluation sets, and
    near-duplicates.
    """
    summary = facts["summaries"][name]
    sets = [
        [one_set["name"], *(f"{number:,}" for number in set_numbers(one_set))]
        for one_set in summary["sets"]
    ]
    steps = [
        [
            step["stage"],
            VIEWS.get(step["judges"], step["judges"]),
            *step_numbers(step["counts"]),
        ]
        for step in summary["steps"]
    ]
    leaks = [
        [
            set_name,
            f"{counts['items']:,}",
            f"{counts['checked']:,}",
            f"{counts['contaminated']:,}",
        ]
        for step in _steps_of(summary, "decontaminate")
        for set_name, counts in step["sets"].items()
    ]
    parts: list[Part] = []
    for step in _steps_of(summary, "judge_pairs"):
        parts += comparisons(step)
    return section_of(
        f"How the examples for {TITLES[name]} were prepared",
        Table(["set", *SET_HEADINGS], sets, set(range(1, 1 + len(SET_HEADINGS)))),
        Table(["step", "judges", "read", "kept", "dropped most by"], steps, {2, 3}),
        Table(
            ["evaluation set", "items", "long enough", "found in examples"],
            leaks,
            {1, 2, 3},
        ),
        parts,
        found_in_examples(summary),
        near_duplicates(facts.get("near_duplicates", {}).get(name, [])),
    )


def _steps_of(summary: Mapping[str, Any], stage: str) -> list[Mapping[str, Any]]:
    return [step for step in summary["steps"] if step["stage"] == stage]


def comparisons(step: Mapping[str, Any]) -> list[Part]:
    """Verdicts of judges of pairs, their biases by place and length, and the agreement
    of two judges.
    """
    keys = ("decided", "confirmed", "first_taken", "longer_taken", "longer_chosen")
    rows = [
        [
            bias["model"],
            f"{bias['pairs']:,}",
            *("" if bias[key] is None else f"{bias[key]:.1%}" for key in keys),
        ]
        for bias in step["biases"]
    ]
    header = [
        "judge",
        "pairs",
        "decided",
        "chosen preferred",
        "first taken",
        "longer preferred",
        "longer chosen",
    ]
    parts: list[Part] = [
        Heading("Answers compared in both orders"),
        Table(header, rows, set(range(1, 7))),
        Note(
            "Decided: both orders say the same. First taken: 50 % has no bias of "
            "place. Longer preferred, beside the "
            "share in which it was the chosen one: of decided pairs."
        ),
    ]
    agreement = step.get("agreement")
    if agreement and agreement["documents"]:
        kappa = (
            ""
            if agreement["kappa"] is None
            else f"; Cohen's kappa {agreement['kappa']:.3f}"
        )
        parts.append(
            Note(f"Both judges say the same of {agreement['same']:.1%}{kappa}.")
        )
    return [*parts, requests_table(step["asked"])]


def found_in_examples(summary: Mapping[str, Any]) -> list[Part]:
    """The items of evaluation sets, each with the example that holds it."""
    rows = [
        [
            match["set"],
            str(match["item"]),
            shorten_text(str(match["item_text"])),
            f"{match['contamination']:.0%}",
            f"{match['source']} {match['locator']}",
        ]
        for step in _steps_of(summary, "decontaminate")
        for match in step["matches"][:MOST_SHOWN]
    ]
    table = Table(
        ["evaluation set", "item", "its text", "of it", "example"], rows, {1, 3}
    )
    return [Details("Items of evaluation sets in examples", [table])] if rows else []


def near_duplicates(pairs: Sequence[NearDuplicate]) -> list[Part]:
    """Dropped examples with the kept ones, the least similar first."""
    rows = [
        [
            f"{pair.jaccard:.2f}",
            pair.dropped,
            pair.dropped_text,
            pair.kept,
            pair.kept_text,
        ]
        for pair in pairs
    ]
    table = Table(["likeness", "dropped", "its text", "kept", "its text"], rows, {0})
    return (
        [Details("Near-duplicates, the least similar first", [table])] if rows else []
    )


def dropped_before(one_set: Mapping[str, Any]) -> str:
    """Records of an encoded set that the preparation dropped, or could not judge."""
    return f"{sum(one_set.get('prepared_dropped', {}).values()) + one_set.get('quarantined', 0):,}"


def set_numbers(one_set: Mapping[str, Any]) -> list[int]:
    """Counts of a prepared set, in the order of SET_HEADINGS; the first is the sum of
    all others.
    """
    return [
        one_set["records"],
        one_set["refused"] + one_set["quarantined"],
        one_set["beyond_limit"],
        sum(one_set["dropped"].values()),
        one_set["kept"],
    ]


def prepared_rows(facts: Facts) -> list[list[str]]:
    """A line per prepared set for a terminal: records, quarantined, dropped, kept, and
    the rules that dropped most.
    """
    rows = []
    for name in SECTIONS:
        for one_set in facts["summaries"].get(f"{name}_prepare", {}).get("sets", []):
            records, quarantined, beyond_limit, dropped, kept = set_numbers(one_set)
            reasons = _reasons_text(
                [("over the limit", beyond_limit), *top_reasons(one_set)]
            )
            numbers = [
                f"{number:,}"
                for number in (records, quarantined, beyond_limit + dropped, kept)
            ]
            rows.append([f"{name}: {one_set['name']}", *numbers, reasons])
    return rows


def step_numbers(counts: Mapping[str, Any]) -> list[str]:
    """Read, kept, and the rules that dropped most."""
    return [
        f"{counts['read']:,}",
        f"{counts['kept']:,}",
        _reasons_text(top_reasons(counts, MOST_REASONS)),
    ]


def _reasons_text(reasons: Sequence[tuple[str, int]]) -> str:
    return ", ".join(
        f"{short_name(rule)} {number:,}" for rule, number in reasons if number
    )


def masks(facts: Facts, name: str = "sft_data") -> Section | None:
    """Tokens that supervised fine-tuning trains on: counts per set, and decoded
    examples.
    """
    summary = facts["summaries"].get(name, {})
    if not summary.get("samples"):
        return None
    columns = {
        "records": lambda one_set: f"{one_set['records']:,}",
        "quarantined": lambda one_set: f"{one_set['refused']:,}",
        "dropped before": dropped_before,
        "not rendered": lambda one_set: f"{one_set['unrenderable']:,}",
        "too long": lambda one_set: f"{one_set['dropped']:,}",
        "cut": lambda one_set: f"{one_set['truncated']:,}",
        "used": lambda one_set: f"{one_set['used']:,}",
        "share of trained tokens": lambda one_set: f"{one_set['drawn_share']:.1%}",
        "tokens trained": lambda one_set: f"{one_set['trained_share']:.1%}",
        "ends of turn trained": lambda one_set: f"{one_set['end_of_turn_share']:.2%}",
    }
    rows = [
        [one_set["name"], *(write(one_set) for write in columns.values())]
        for one_set in summary["sets"]
    ]
    parts: list[Part] = []
    for sample in summary["samples"]:
        spans = [
            Span(text, "trained" if is_trained else "masked")
            for text, is_trained in sample["spans"]
        ]
        parts += [Note(f"{sample['set']}, example {sample['example']}"), Text(spans)]
    return section_of(
        "Fine-tuning data",
        Table(["set", *columns], rows, set(range(1, 1 + len(columns)))),
        Note(
            f"{describe_rows(facts, summary)}. Marked text is trained on; the rest "
            "is context."
        ),
        parts,
    )


def describe_rows(facts: Facts, summary: Mapping[str, Any]) -> str:
    """The rows of fine-tuning: how full they are, replay, the checks before the first
    step, held-out examples.
    """
    tuned = facts["summaries"].get("sft", {})
    clauses = [
        f"{summary['rows']:,} rows of {summary['sequence_length']:,} tokens, "
        f"{summary['fill']:.1%} full",
    ]
    if summary["replay"]["rows"]:
        clauses.append(
            f"{summary['replay']['share']:.1%} of the tokens are replayed "
            "from pre-training"
        )
    check = tuned.get("step_0")
    if check:
        clauses.append(
            f"before the first step the loss was {check['loss']:.4f} packed and "
            f"{check['loss_unpacked']:.4f} one by one, and gradients of micro-batches "
            f"were {check['accumulation_difference']:.1e} from those of one batch"
        )
    text = "; ".join(clauses)
    held_out = sum(one_set.get("held_out", 0) for one_set in summary["sets"])
    if held_out:
        text += f"; {held_out:,} of the used examples are held out"
    measured = tuned.get("held_out")
    return text + (
        f", whose loss is {measured['loss']:.4f} in the end" if measured else ""
    )


def preferences(facts: Facts, name: str = "dpo_data") -> Section | None:
    """Defects of the preference data, set by set."""
    sets = facts["summaries"].get(name, {}).get("sets", [])
    columns = {
        "pairs": "pairs",
        "prompts": "prompts",
        "duplicates": "duplicates",
        "contradictions": "contradictions",
        "nearly the same answer": "near_identical",
        "the same answer": "same_answers",
    }
    rows, leaks = [], []
    for one_set in sets:
        audit = one_set["audit"]
        counts = [
            f"{one_set['records']:,}",
            f"{one_set['refused']:,}",
            dropped_before(one_set),
        ]
        longer_chosen = (
            "" if audit["longer_chosen"] is None else f"{audit['longer_chosen']:.1%}"
        )
        rows.append(
            [
                one_set["name"],
                *counts,
                *(f"{audit[key]:,}" for key in columns.values()),
                longer_chosen,
            ]
        )
        for set_name, leak in (audit["leaks"] or {}).items():
            counts = [f"{leak[key]:,}" for key in ("items", "leaked", "texts")]
            leaks.append([one_set["name"], set_name, *counts])
    header = [
        "set",
        "records",
        "quarantined",
        "dropped before",
        *columns,
        "longer answer preferred",
    ]
    return section_of(
        "Preference data",
        Table(header, rows, set(range(1, len(header)))),
        Table(
            ["set", "evaluation set", "items", "leaked", "pairs that hold one"],
            leaks,
            {2, 3, 4},
        ),
        used_pairs(facts) if sets else None,
    )


def used_pairs(facts: Facts) -> Table:
    """Outcome of every record, and how often each set is trained on."""
    drawn_sets = {
        drawn["name"]: drawn
        for drawn in facts["summaries"].get("dpo", {}).get("sets", [])
    }
    rows = []
    for one_set in facts["summaries"]["dpo_data"]["sets"]:
        counts = [
            f"{one_set[key]:,}"
            for key in ("unrenderable", "dropped", "truncated", "used")
        ]
        drawn = drawn_sets.get(one_set["name"])
        use = ["", "", ""]
        if drawn:
            use = [
                f"{drawn['held_out']:,}",
                f"{drawn['drawn']:,}",
                f"{drawn['drawn_share']:.1%}",
            ]
        rows.append([one_set["name"], *counts, *use])
    return Table(
        [
            "set",
            "not rendered",
            "too long",
            "cut",
            "used",
            "held out",
            "drawn in an epoch",
            "share of the pairs",
        ],
        rows,
        set(range(1, 8)),
    )


def distillation(facts: Facts, name: str = "teacher") -> Section | None:
    """The teacher's kept predictions, and how near the student came to it."""
    summary = facts["summaries"].get(name)
    if summary is None:
        return None
    rows = [
        ["tokens of the teacher", f"{summary['tokens']:,}"],
        ["ids kept per token", f"{summary['top_k']}"],
        ["mass of the others", f"{summary['rest_mass']:.3%}"],
        ["temperature", f"{summary['temperature']:g}"],
        ["the teacher's own loss on the labels", f"{summary['loss']:.4f}"],
    ]
    lines = [line for line in facts["training"].get("sft", []) if "divergence" in line]
    for label, key in (
        ("student's loss on the labels", "label_loss"),
        ("divergence from the teacher", "divergence"),
    ):
        for when, line in zip(("first", "last"), lines[:1] + lines[-1:], strict=False):
            rows.append([f"{label}, {when}", f"{line[key]:.4f}"])
    return section_of(
        "Distillation",
        Table(["measured", "value"], rows, {1}),
        Note("Losses and divergences are nats per trained token."),
        _curves(
            lines,
            {"divergence": "divergence"},
            "nats per token",
            "sft: divergence from the teacher",
        ),
    )


def _curves(
    record: Sequence[Mapping[str, Any]],
    names: Mapping[str, str],
    label: str,
    caption: str,
) -> Figure | None:
    """Curves of some keys of a record; None for a single step."""
    series = points_of(record, names)
    has_curve = any(len(points) > 1 for points in series.values())
    return Figure(curves(series, "step", label), caption) if has_curve else None


def reward_model(facts: Facts, name: str = "reward") -> Section | None:
    """Ranking of unseen pairs by a reward model, and the correlation of its scores with
    the length of answers.
    """
    summary = facts["summaries"].get(name)
    if summary is None:
        return None
    measured = summary["held_out"]
    rows = [
        ["pairs trained on", f"{summary['training_pairs']:,}"],
        ["pairs held out", f"{summary['held_out_pairs']:,}"],
        ["pairs too long", f"{summary['too_long_pairs']:,}"],
        ["chosen answer scores higher, held out", share(measured["accuracy"])],
        ["chosen answer is the longer one, held out", share(measured["longer_chosen"])],
        ["mean difference of scores, held out", number(measured["margin"])],
        ["correlation of score and length", number(measured["length_correlation"])],
        [
            "mean and deviation of scores",
            f"{number(measured['mean'])}, {number(measured['deviation'])}",
        ],
    ]
    names = {f"scores/{answer}": answer for answer in ("chosen", "rejected")}
    return section_of(
        "Reward model",
        Table(["measured", "value"], rows, {1}),
        Note(
            "In brackets: Wilson's 95 % intervals over pairs. A model that ranks no "
            "better than the length of answers does has learnt their length."
        ),
        _curves(
            facts["training"].get("reward", []),
            names,
            "score",
            "reward: mean scores of answers",
        ),
        unlearned(summary.get("margins")),
    )


def preference_effects(facts: Facts, name: str = "dpo") -> Section | None:
    """Origin of preference optimisation's margin: answers against the reference, and
    the alarm if it rang.
    """
    lines = [
        line
        for line in facts["training"].get("dpo", [])
        if "fell/chosen" in line and "fell/rejected" in line
    ]
    if not lines:
        return None
    summary, last = facts["summaries"].get("dpo", {}), lines[-1]
    answers = ("chosen", "rejected")
    rows = [
        [
            answer,
            f"{last[f'fell/{answer}']:.1%}",
            f"{last[f'log_ratio/{answer}']:+.4f}",
            f"{last[f'rewards/{answer}']:+.4f}",
        ]
        for answer in answers
    ]
    header = [
        "answers",
        "less likely than under the reference",
        "nats per token against it",
        "reward",
    ]
    names = {f"log_ratio/{answer}": answer for answer in answers}
    note = (
        f"Loss {summary.get('objective', '')}; means over pairs at the last "
        f"logged step. {_effect_note(summary)}"
    )
    return section_of(
        "Preference optimisation",
        Table(header, rows, {1, 2, 3}),
        Note(note),
        _curves(
            lines, names, "nats per token", "dpo: log-probability against the reference"
        ),
        unlearned(summary.get("margins")),
    )


def _effect_note(summary: Mapping[str, Any]) -> str:
    alarm = summary.get("chosen_decline", {}).get("alarm_step")
    sentences = ["Chosen answers did not keep becoming less likely."]
    if alarm is not None:
        sentences = [
            f"Alarm at step {alarm}: the margin grew although most chosen "
            "answers became less likely."
        ]
    held_out = summary.get("held_out", {})
    if held_out.get("reward_accuracy") is not None:
        sentences.append(
            f"On {summary['held_out_pairs']:,} held-out pairs the chosen answer gained "
            f"more in {with_range(held_out, 'reward_accuracy')}, and is the likelier "
            f"one in {with_range(held_out, 'chosen_more_likely')}, "
            f"{held_out['chosen_more_likely_before']:.1%} before."
        )
    if held_out.get("ranked_right") is not None:
        counts = summary["held_out_answers"]
        sentences.append(
            f"Of {counts['desirable']:,} desirable and {counts['undesirable']:,} other "
            "held-out answers a desirable one gained more than another in "
            f"{with_range(held_out, 'ranked_right')} of all cases."
        )
    return " ".join(sentences)


def unlearned(margins: dict[str, Any] | None) -> list[Part]:
    """Share of margins that are not positive after training, by set, and the worst
    margins.
    """
    if margins is None:
        return []
    sets = []
    for one_set in margins["sets"]:
        for part, counts in one_set.items():
            if part != "name":
                values = [
                    f"{counts['measured']:,}",
                    f"{counts['wrong']:.1%}",
                    f"{counts['median']:+.3f}",
                ]
                sets.append([one_set["name"], part.replace("_", " "), *values])
    worst = [
        [
            pair["id"][:16],
            pair["set"],
            "held out" if pair["held_out"] else "trained",
            f"{pair['margin']:+.3f}",
            pair.get("prompt_text", ""),
            *answers_of(pair),
        ]
        for pair in margins["worst"]
    ]
    note = (
        "Pairs that are still ranked wrong are mislabelled, contradict other pairs, or "
        "are hard. `gristmill trace --document ID` says which steps read it, and "
        "`margins.parquet` has all that were measured."
    )
    worst_table = Table(
        ["id", "set", "", "margin", "prompt", "preferred", "not preferred"], worst, {3}
    )
    return [
        Table(
            ["set", "pairs", "measured", "margin not positive", "median margin"],
            sets,
            {2, 3, 4},
        ),
        Details("The worst margins after training", [worst_table, Note(note)]),
    ]


def answers_of(pair: dict[str, Any]) -> list[str]:
    """The preferred and the other answer of a pair; of a single answer the other is
    empty.
    """
    if "completion_text" not in pair:
        return [pair.get("chosen_text", ""), pair.get("rejected_text", "")]
    return (
        [pair["completion_text"], ""]
        if pair["rejected"] is None
        else ["", pair["completion_text"]]
    )


def rounding(facts: Facts, name: str = "export") -> Section | None:
    """Loss of quality by rounding the exported matrices to 8 bits."""
    cost = facts["summaries"].get(name, {}).get("int8")
    if cost is None:
        return None
    if cost["growth"] is None:
        return Section(
            "Export in 8 bits",
            [
                Note(
                    "The mixture holds no rows out, so what "
                    "rounding costs is not measured."
                )
            ],
        )
    row = [
        f"{cost['rows']:,}",
        f"{cost['perplexity_before']:.4f}",
        f"{cost['perplexity']:.4f}",
        f"{cost['growth']:+.3%}",
    ]
    header = ["held-out rows", "perplexity before", "perplexity rounded", "growth"]
    return section_of("Export in 8 bits", Table(header, [row], {0, 1, 2, 3}))


def share(value: dict[str, Any] | None) -> str:
    """A share of pairs with its interval, as `91.2% [84.0%, 95.4%] of 96`."""
    if value is None:
        return ""
    return (
        f"{value['value']:.1%} [{value['low']:.1%}, {value['high']:.1%}] of "
        f"{value['units']:,}"
    )


def with_range(values: dict[str, Any], name: str) -> str:
    """A share by its name, with its interval if it has one."""
    interval = values.get(f"{name}_interval")
    return f"{values[name]:.1%}" + (
        "" if interval is None else f" [{interval['low']:.1%}, {interval['high']:.1%}]"
    )


def number(value: float | None) -> str:
    """A number; empty if it was not measured."""
    return "" if value is None else f"{value:.3f}"

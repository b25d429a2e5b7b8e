"""The report's sections about tuning: its examples and preferences, teachers, reward models, the export."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gristmill.dataprep.whatif_thresholds import short_name
from gristmill.flows.questions.explain import shorten_text
from gristmill.flows.report.asked_sections import asked
from gristmill.flows.report.page_elements import Details, Figure, Heading, Note, Part, Section, Table, Text
from gristmill.flows.report.pictures import curves
from gristmill.flows.report.report_facts import Facts, top_reasons

SECTIONS = ("sft", "dpo")
TITLES = {"sft_prepare": "fine-tuning", "dpo_prepare": "preferences"}
MOST_REASONS = 3
MOST_SHOWN = 10
"""Items of evaluation sets that are shown with their examples."""


def preparation(facts: Facts, name: str) -> Section:
    """What was dropped of examples before they were made into rows: the sets, the steps, what of evaluation sets was
    found and where, and the least alike of near-duplicates.
    """
    summary, pairs = facts["summaries"][name], facts.get("near_duplicates", {}).get(name, [])
    sets = [[one["name"], *(f"{number:,}" for number in set_numbers(one))] for one in summary["sets"]]
    steps = [[one["stage"], judged(one["judges"]), *step_numbers(one["counts"])] for one in summary["steps"]]
    leaks = [
        [name, f"{found['items']:,}", f"{found['checked']:,}", f"{found['contaminated']:,}"]
        for one in summary["steps"]
        if one["stage"] == "decontaminate"
        for name, found in one["sets"].items()
    ]
    return Section(
        f"How the examples for {TITLES[name]} were prepared",
        [
            Table(["set", *SET_HEADINGS], sets, set(range(1, 1 + len(SET_HEADINGS)))),
            Table(["step", "judges", "read", "kept", "dropped most by"], steps, {2, 3}),
            Table(["evaluation set", "items", "long enough", "found in examples"], leaks, {1, 2, 3}),
            *(part for one in summary["steps"] if one["stage"] == "judge_pairs" for part in comparisons(one)),
            *found_in_examples(summary),
            *near_duplicates(pairs),
        ],
    )


def comparisons(step: Mapping[str, Any]) -> list[Part]:
    """What judges of pairs say, how far place and length sway them, and how far two of them agree."""
    keys = ("decided", "confirmed", "first_taken", "longer_taken", "longer_chosen")
    rows = [
        [one["model"], f"{one['pairs']:,}", *("" if one[key] is None else f"{one[key]:.1%}" for key in keys)]
        for one in step["biases"]
    ]
    found: list[Part] = [
        Heading("Answers compared in both orders"),
        Table(
            ["judge", "pairs", "decided", "chosen preferred", "first taken", "longer preferred", "longer chosen"],
            rows,
            set(range(1, 7)),
        ),
        Note(
            "Decided: both orders say the same. First taken: 50 % has no bias of place. Longer preferred, beside the "
            "share in which it was the chosen one: of decided pairs."
        ),
    ]
    both = step.get("agreement")
    if both and both["documents"]:
        found.append(
            Note(
                f"Both judges say the same of {both['same']:.1%}"
                + ("" if both["kappa"] is None else f"; Cohen's kappa {both['kappa']:.3f}")
                + "."
            )
        )
    return [*found, *asked(step["asked"])]


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
        for one in summary["steps"]
        if one["stage"] == "decontaminate"
        for match in one["matches"][:MOST_SHOWN]
    ]
    return (
        [
            Details(
                "Items of evaluation sets in examples",
                [Table(["evaluation set", "item", "its text", "of it", "example"], rows, {1, 3})],
            )
        ]
        if rows
        else []
    )


def near_duplicates(pairs: Sequence[Mapping[str, Any]]) -> list[Part]:
    """Dropped examples beside those that were kept in their place, where the two are least alike."""
    rows = [
        [f"{one['jaccard']:.2f}", one["dropped"], one["dropped_text"], one["kept"], one["kept_text"]] for one in pairs
    ]
    return (
        [
            Details(
                "Near-duplicates, the least similar first",
                [Table(["likeness", "dropped", "its text", "kept", "its text"], rows, {0})],
            )
        ]
        if rows
        else []
    )


def dropped_before(one: Mapping[str, Any]) -> str:
    """Of a set that is encoded: how many of its records the preparation dropped, or could not judge."""
    return f"{sum(one.get('prepared_dropped', {}).values()) + one.get('quarantined', 0):,}"


SET_HEADINGS = ("records", "quarantined", "beyond the limit", "dropped", "kept")


def set_numbers(one: Mapping[str, Any]) -> list[int]:
    """Of a prepared set, in the order of SET_HEADINGS; the first is the sum of all others."""
    return [
        one["records"],
        one["refused"] + one["quarantined"],
        one["beyond_limit"],
        sum(one["dropped"].values()),
        one["kept"],
    ]


def prepared_rows(facts: Facts) -> list[list[str]]:
    """A line per prepared set for a terminal: records, quarantined, dropped, kept, and the rules that dropped most."""
    rows = []
    for name in SECTIONS:
        for one in facts["summaries"].get(f"{name}_prepare", {}).get("sets", []):
            gone = one["beyond_limit"] + sum(one["dropped"].values())
            quarantined = one["refused"] + one["quarantined"]
            why = [("over the limit", one["beyond_limit"]), *top_reasons(one)]
            reasons = ", ".join(f"{short_name(rule)} {number:,}" for rule, number in why if number)
            rows.append(
                [
                    f"{name}: {one['name']}",
                    f"{one['records']:,}",
                    f"{quarantined:,}",
                    f"{gone:,}",
                    f"{one['kept']:,}",
                    reasons,
                ]
            )
    return rows


def step_numbers(counts: Mapping[str, Any]) -> list[str]:
    """Read, kept, and the rules that dropped most."""
    reasons = ", ".join(f"{short_name(rule)} {number:,}" for rule, number in top_reasons(counts, MOST_REASONS))
    return [f"{counts['read']:,}", f"{counts['kept']:,}", reasons]


def judged(view: str) -> str:
    """What a step judged, in words."""
    return {
        "judge_pairs": "pairs in both orders",
        "answer-of-both": "both answers",
        "conversation-of-both": "prompt and both answers",
    }.get(view, view)


def masks(facts: Facts, name: str = "sft_data") -> Section | None:
    """Which tokens supervised fine-tuning trains on: counts per set, and decoded examples."""
    summary = facts["summaries"].get(name, {})
    if not summary.get("samples"):
        return None
    rows = [
        [
            one["name"],
            f"{one['records']:,}",
            f"{one['refused']:,}",
            dropped_before(one),
            f"{one['unrenderable']:,}",
            f"{one['dropped']:,}",
            f"{one['truncated']:,}",
            f"{one['used']:,}",
            f"{one['drawn_share']:.1%}",
            f"{one['trained_share']:.1%}",
            f"{one['end_of_turn_share']:.2%}",
        ]
        for one in summary["sets"]
    ]
    headings = [
        "set",
        "records",
        "quarantined",
        "dropped before",
        "not rendered",
        "too long",
        "cut",
        "used",
        "share of trained tokens",
        "tokens trained",
        "ends of turn trained",
    ]
    parts: list[Part] = [
        Table(headings, rows, set(range(1, len(headings)))),
        Note(f"{describe_rows(facts, summary)}. Marked text is trained on; the rest is context."),
    ]
    for one in summary["samples"]:
        parts += [
            Note(f"{one['set']}, example {one['example']}"),
            Text([(text, "trained" if trained else "masked") for text, trained in one["spans"]]),
        ]
    return Section("Fine-tuning data", parts)


def describe_rows(facts: Facts, summary: Mapping[str, Any]) -> str:
    """The rows of fine-tuning: how full they are, what is replayed, what was proved before, what is held out."""
    replay, tuned = summary["replay"], facts["summaries"].get("sft", {})
    proved, measured = tuned.get("step_0"), tuned.get("held_out")
    held_out = sum(one.get("held_out", 0) for one in summary["sets"])
    return (
        f"{summary['rows']:,} rows of {summary['sequence_length']:,} tokens, {summary['fill']:.1%} full"
        + (f"; {replay['share']:.1%} of the tokens are replayed from pre-training" if replay["rows"] else "")
        + (
            f"; before the first step the loss was {proved['loss']:.4f} packed and {proved['loss_unpacked']:.4f} "
            f"one by one, and gradients of micro-batches were {proved['accumulation_difference']:.1e} from those of "
            "one batch"
            if proved
            else ""
        )
        + (f"; {held_out:,} of the used examples are held out" if held_out else "")
        + (f", whose loss is {measured['loss']:.4f} in the end" if measured else "")
    )


def preferences(facts: Facts, name: str = "dpo_data") -> Section | None:
    """What is wrong with the preference data, set by set."""
    sets = facts["summaries"].get(name, {}).get("sets", [])
    if not sets:
        return None
    rows = [
        [
            one["name"],
            f"{one['records']:,}",
            f"{one['refused']:,}",
            dropped_before(one),
            *(
                f"{one['audit'][key]:,}"
                for key in ("pairs", "prompts", "duplicates", "contradictions", "near_identical", "same_answers")
            ),
            "" if one["audit"]["longer_chosen"] is None else f"{one['audit']['longer_chosen']:.1%}",
        ]
        for one in sets
    ]
    headings = [
        "set",
        "records",
        "quarantined",
        "dropped before",
        "pairs",
        "prompts",
        "duplicates",
        "contradictions",
        "nearly the same answer",
        "the same answer",
        "longer answer preferred",
    ]
    leaks = [
        [one["name"], name, f"{found['items']:,}", f"{found['leaked']:,}", f"{found['texts']:,}"]
        for one in sets
        for name, found in (one["audit"]["leaks"] or {}).items()
    ]
    return Section(
        "Preference data",
        [
            Table(headings, rows, set(range(1, len(headings)))),
            Table(["set", "evaluation set", "items", "leaked", "pairs that hold one"], leaks, {2, 3, 4}),
            used_pairs(facts),
        ],
    )


def used_pairs(facts: Facts) -> Part:
    """What became of every record, and how often each set is trained on."""
    drawn = {one["name"]: one for one in facts["summaries"].get("dpo", {}).get("sets", [])}
    rows = []
    for one in facts["summaries"]["dpo_data"]["sets"]:
        found = drawn.get(one["name"])
        rows.append(
            [
                one["name"],
                *(f"{one[key]:,}" for key in ("unrenderable", "dropped", "truncated", "used")),
                *(
                    [f"{found['held_out']:,}", f"{found['drawn']:,}", f"{found['drawn_share']:.1%}"]
                    if found
                    else ["", "", ""]
                ),
            ]
        )
    headings = ["set", "not rendered", "too long", "cut", "used", "held out", "drawn in an epoch", "share of the pairs"]
    return Table(headings, rows, set(range(1, len(headings))))


def distillation(facts: Facts, name: str = "teacher") -> Section | None:
    """What a fine-tuning learnt from its teacher, and how much of the teacher was kept."""
    summary = facts["summaries"].get(name)
    lines = [line for line in facts["training"].get("sft", []) if "divergence" in line]
    if summary is None:
        return None
    rows = [
        ["tokens of the teacher", f"{summary['tokens']:,}"],
        ["ids kept per token", f"{summary['top_k']}"],
        ["mass of the others", f"{summary['rest_mass']:.3%}"],
        ["temperature", f"{summary['temperature']:g}"],
        ["the teacher's own loss on the labels", f"{summary['loss']:.4f}"],
    ]
    for name, key in (("student's loss on the labels", "label_loss"), ("divergence from the teacher", "divergence")):
        rows += (
            [[f"{name}, {when}", f"{line[key]:.4f}"] for when, line in (("first", lines[0]), ("last", lines[-1]))]
            if lines
            else []
        )
    apart = {"divergence": [(line["step"], line["divergence"]) for line in lines]}
    parts: list[Part] = [
        Table(["measured", "value"], rows, {1}),
        Note("Losses and divergences are nats per trained token."),
    ]
    if len(lines) > 1:
        parts.append(Figure(curves(apart, "step", "nats per token"), "sft: divergence from the teacher"))
    return Section("Distillation", parts)


def reward_model(facts: Facts, name: str = "reward") -> Section | None:
    """How well a reward model ranks pairs that it has not seen, beside the length of answers."""
    summary = facts["summaries"].get(name)
    if summary is None:
        return None
    found, lines = summary["held_out"], facts["training"].get("reward", [])
    measured = {
        name: [(line["step"], line[f"scores/{name}"]) for line in lines if f"scores/{name}" in line]
        for name in ("chosen", "rejected")
    }
    rows = [
        ["pairs trained on", f"{summary['training_pairs']:,}"],
        ["pairs held out", f"{summary['held_out_pairs']:,}"],
        ["pairs too long", f"{summary['too_long_pairs']:,}"],
        ["chosen answer scores higher, held out", share(found["accuracy"])],
        ["chosen answer is the longer one, held out", share(found["longer_chosen"])],
        ["mean difference of scores, held out", number(found["margin"])],
        ["correlation of score and length", number(found["length_correlation"])],
        ["mean and deviation of scores", f"{number(found['mean'])}, {number(found['deviation'])}"],
    ]
    parts: list[Part] = [
        Table(["measured", "value"], rows, {1}),
        Note(
            "In brackets: Wilson's 95 % intervals over pairs. A model that ranks no better than the length of answers "
            "does has learnt their length."
        ),
    ]
    if len(measured["chosen"]) > 1:
        parts.append(Figure(curves(measured, "step", "score"), "reward: mean scores of answers"))
    return Section("Reward model", [*parts, *unlearned(summary.get("margins"))])


def preference_effects(facts: Facts, name: str = "dpo") -> Section | None:
    """Where preference optimisation's margin came from: answers against the reference, and the alarm if it rang."""
    lines = [line for line in facts["training"].get("dpo", []) if "fell/chosen" in line and "fell/rejected" in line]
    if not lines:
        return None
    summary = facts["summaries"].get("dpo", {})
    alarm = summary.get("chosen_decline", {}).get("alarm_step")
    rows = [
        [
            answer,
            f"{lines[-1][f'fell/{answer}']:.1%}",
            f"{lines[-1][f'log_ratio/{answer}']:+.4f}",
            f"{lines[-1][f'rewards/{answer}']:+.4f}",
        ]
        for answer in ("chosen", "rejected")
    ]
    ratios = {
        answer: [(line["step"], line[f"log_ratio/{answer}"]) for line in lines] for answer in ("chosen", "rejected")
    }
    note = (
        "Chosen answers did not keep becoming less likely."
        if alarm is None
        else f"Alarm at step {alarm}: the margin grew although most chosen answers became less likely."
    )
    held_out = summary.get("held_out", {})
    if held_out.get("reward_accuracy") is not None:
        note += (
            f" On {summary['held_out_pairs']:,} held-out pairs the chosen answer gained more in "
            f"{with_range(held_out, 'reward_accuracy')}, and is the likelier one in "
            f"{with_range(held_out, 'chosen_more_likely')}, {held_out['chosen_more_likely_before']:.1%} before."
        )
    if held_out.get("ranked_right") is not None:
        counts = summary["held_out_answers"]
        note += (
            f" Of {counts['desirable']:,} desirable and {counts['undesirable']:,} other held-out answers a "
            f"desirable one gained more than another in {with_range(held_out, 'ranked_right')} of all cases."
        )
    parts: list[Part] = [
        Table(
            ["answers", "less likely than under the reference", "nats per token against it", "reward"], rows, {1, 2, 3}
        ),
        Note(f"Loss {summary.get('objective', '')}; means over pairs at the last logged step. {note}"),
    ]
    if len(lines) > 1:
        parts.append(Figure(curves(ratios, "step", "nats per token"), "dpo: log-probability against the reference"))
    return Section("Preference optimisation", [*parts, *unlearned(summary.get("margins"))])


def unlearned(margins: dict[str, Any] | None) -> list[Part]:
    """Set by set how many margins are not positive in the end, and what has the worst ones."""
    if margins is None:
        return []
    sets = [
        [
            one["name"],
            part.replace("_", " "),
            f"{found['measured']:,}",
            f"{found['wrong']:.1%}",
            f"{found['median']:+.3f}",
        ]
        for one in margins["sets"]
        for part, found in one.items()
        if part != "name"
    ]
    worst = [
        [
            one["id"][:16],
            one["set"],
            "held out" if one["held_out"] else "trained",
            f"{one['margin']:+.3f}",
            one.get("prompt_text", ""),
            *answers_of(one),
        ]
        for one in margins["worst"]
    ]
    return [
        Table(["set", "pairs", "measured", "margin not positive", "median margin"], sets, {2, 3, 4}),
        Details(
            "The worst margins after training",
            [
                Table(["id", "set", "", "margin", "prompt", "preferred", "not preferred"], worst, {3}),
                Note(
                    "Pairs that are still ranked wrong are mislabelled, contradict other pairs, or are hard. "
                    "`gristmill trace --document ID` says which steps read it, and `margins.parquet` has all that were "
                    "measured."
                ),
            ],
        ),
    ]


def answers_of(one: dict[str, Any]) -> list[str]:
    """The answer that was preferred and the one that was not, of a line of the worst margins; of a single answer the
    other is empty."""
    if "completion_text" not in one:
        return [one.get("chosen_text", ""), one.get("rejected_text", "")]
    return [one["completion_text"], ""] if one["rejected"] is None else ["", one["completion_text"]]


def rounding(facts: Facts, name: str = "export") -> Section | None:
    """What rounding the exported matrices to 8 bits costs."""
    cost = facts["summaries"].get(name, {}).get("int8")
    if cost is None:
        return None
    if cost["growth"] is None:
        return Section(
            "Export in 8 bits", [Note("The mixture holds no rows out, so what rounding costs is not measured.")]
        )
    return Section(
        "Export in 8 bits",
        [
            Table(
                ["held-out rows", "perplexity before", "perplexity rounded", "growth"],
                [
                    [
                        f"{cost['rows']:,}",
                        f"{cost['perplexity_before']:.4f}",
                        f"{cost['perplexity']:.4f}",
                        f"{cost['growth']:+.3%}",
                    ]
                ],
                {0, 1, 2, 3},
            )
        ],
    )


def share(found: dict[str, Any] | None) -> str:
    """A share of pairs with its interval, as `91.2% [84.0%, 95.4%] of 96`."""
    return (
        ""
        if found is None
        else (f"{found['value']:.1%} [{found['low']:.1%}, {found['high']:.1%}] of {found['units']:,}")
    )


def with_range(found: dict[str, Any], name: str) -> str:
    """A share by its name, with its interval where it was kept beside it."""
    interval = found.get(f"{name}_interval")
    return f"{found[name]:.1%}" + ("" if interval is None else f" [{interval['low']:.1%}, {interval['high']:.1%}]")


def number(value: float | None) -> str:
    """A number, or nothing where none was measured."""
    return "" if value is None else f"{value:.3f}"

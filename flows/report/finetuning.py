"""The report's sections about tuning: examples and preferences, teachers, reward
models, the export.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter

from gristmill.dataprep.conservation import top_reasons
from gristmill.dataprep.examples.kept_examples import PreparedSet
from gristmill.dataprep.whatif_thresholds import short_name
from gristmill.flows.pages.page_elements import (
    Details,
    Figure,
    Heading,
    MaybeSection,
    Note,
    Part,
    Table,
    flatten,
    section_of,
    table,
)
from gristmill.flows.pages.pictures import curves
from gristmill.flows.report.document_sections import leaked_items
from gristmill.flows.report.facts import Facts
from gristmill.flows.report.llm_sections import requests_table
from gristmill.flows.report.stage_summaries import (
    HeldOut,
    Margins,
    PreparedExamples,
    PreparedStep,
    Record,
    Row,
    TeacherSummary,
    TuningData,
)
from gristmill.flows.report.training import number_at, points_of

SECTIONS = ("sft", "dpo")
TITLES = {"sft_prepare": "fine-tuning", "dpo_prepare": "preferences"}
MOST_SHOWN = 10
"""Items of evaluation sets that are shown with their examples."""
VIEWS = {
    "judge_pairs": "pairs in both orders",
    "answer-of-both": "both answers",
    "conversation-of-both": "prompt and both answers",
}
"""Views of examples that a step may judge, in words; others are words."""
ANSWERS = ("chosen", "rejected")
RECORD_COUNTS = ("records", "quarantined", "dropped before")


def preparation(facts: Facts, name: str) -> MaybeSection:
    """Examples that the preparation dropped: sets, steps, and items of evaluation
    sets.
    """
    summary = facts.summary(name, PreparedExamples)
    sets = [[part.name, *set_numbers(part)] for part in summary.sets]
    steps, leaks = [], []
    matches: list[Row] = []
    for step in summary.steps:
        counts = step.counts
        reasons = _reasons_text(top_reasons(counts.dropped, counts.quarantined))
        judged = VIEWS.get(step.judges, step.judges)
        steps.append([step.stage, judged, counts.read, counts.kept, reasons])
        leaks += [
            [set_name, leaked.items, leaked.checked, leaked.contaminated]
            for set_name, leaked in step.sets.items()
        ]
        matches += step.matches[:MOST_SHOWN]
    leaked_table = leaked_items(matches, "evaluation set", "example")
    numbers = ("records", "quarantined", "beyond the limit", "dropped", "kept")
    leak_columns = {"items": ",", "long enough": ",", "found in examples": ","}
    step_columns = {"read": ",", "kept": ",", "dropped most by": ""}
    return section_of(
        f"How the examples for {TITLES[name]} were prepared",
        table({"set": "", **dict.fromkeys(numbers, ",")}, sets),
        table({"step": "", "judges": "", **step_columns}, steps),
        table({"evaluation set": "", **leak_columns}, leaks),
        map(comparisons, summary.steps),
        Details("Items of evaluation sets in examples", [leaked_table])
        if matches
        else None,
    )


def comparisons(step: PreparedStep) -> list[Part]:
    """Verdicts of a judge of pairs, and its biases by place and length."""
    if not step.biases:
        return []
    keys = (
        "model",
        "pairs",
        "decided",
        "confirmed",
        "first_taken",
        "longer_taken",
        "longer_chosen",
    )
    rows = [[step.biases[key] for key in keys]]
    shares = (
        "decided",
        "chosen preferred",
        "first taken",
        "longer preferred",
        "longer chosen",
    )
    return flatten(
        [
            Heading("Answers compared in both orders"),
            table({"judge": "", "pairs": ",", **dict.fromkeys(shares, ".1%")}, rows),
            "Decided: both orders say the same. First taken: 50 % has no bias of "
            "place. Longer preferred, beside the share in which it was the chosen one: "
            "of decided pairs.",
            requests_table(step.asked),
        ]
    )


def set_numbers(part: PreparedSet) -> list[int]:
    """Records of a prepared set, and those that were quarantined, beyond the limit,
    dropped, and kept, which add up to them.
    """
    return [
        part.records,
        part.refused + part.quarantined,
        part.beyond_limit,
        sum(part.dropped.values()),
        part.kept,
    ]


def prepared_table(facts: Facts) -> Table:
    """Prepared sets for a terminal: records, quarantined, dropped, kept, and the rules
    that dropped most.
    """
    rows = []
    for name in SECTIONS:
        for part in facts.summary(f"{name}_prepare", PreparedExamples).sets:
            records, quarantined, beyond_limit, dropped, kept = set_numbers(part)
            reasons = [
                ("over the limit", beyond_limit),
                *top_reasons(part.dropped, part.quarantined),
            ]
            numbers = records, quarantined, beyond_limit + dropped, kept
            rows.append([f"{name}: {part.name}", *numbers, _reasons_text(reasons)])
    counts = dict.fromkeys(("records", "quarantined", "dropped", "kept"), ",")
    return table({"set": "", **counts, "dropped most by": ""}, rows)


def _reasons_text(reasons: Sequence[tuple[str, int]]) -> str:
    return ", ".join(
        f"{short_name(rule)} {number:,}" for rule, number in reasons if number
    )


def masks(facts: Facts, name: str = "sft_data") -> MaybeSection:
    """Tokens that supervised fine-tuning trains on, per set."""
    summary = facts.summary(name, TuningData)
    if not summary.sets:
        return None
    numbers = attrgetter(
        "name",
        "records",
        "refused",
        "dropped_before",
        "unrenderable",
        "dropped",
        "truncated",
        "used",
        "drawn_share",
        "trained_share",
        "end_of_turn_share",
    )
    counts = (*RECORD_COUNTS, "not rendered", "too long", "cut", "used")
    shares = dict.fromkeys(("share of trained tokens", "tokens trained"), ".1%")
    shares["ends of turn trained"] = ".2%"
    columns = {**dict.fromkeys(counts, ","), **shares}
    return section_of(
        "Fine-tuning data",
        table({"set": "", **columns}, map(numbers, summary.sets)),
        f"{describe_rows(facts, summary)}. `gristmill browse` shows rows with the "
        "tokens that are trained on.",
    )


def describe_rows(facts: Facts, summary: TuningData) -> str:
    """The rows of fine-tuning: how full they are, replay, the checks before the first
    step, held-out examples.
    """
    tuned = facts.trained("sft")
    clauses = [
        f"{summary.rows:,} rows of {summary.sequence_length:,} tokens, "
        f"{summary.fill:.1%} full",
    ]
    if summary.replay.rows:
        share = f"{summary.replay.share:.1%}"
        clauses.append(f"{share} of the tokens are replayed from pre-training")
    check = tuned.step_0
    if check is not None:
        clauses.append(
            f"before the first step the loss was {check.loss:.4f} packed and "
            f"{check.loss_unpacked:.4f} one by one, and gradients of micro-batches "
            f"were {check.accumulation_difference:.1e} from those of one batch"
        )
    held_out = sum(part.held_out for part in summary.sets)
    if held_out:
        clauses.append(f"{held_out:,} of the used examples are held out")
    text = "; ".join(clauses)
    if tuned.held_out is not None:
        text += f", whose loss is {tuned.held_out.loss:.4f} in the end"
        if tuned.held_out.text_accuracy is not None:
            text += (
                f"; the class of {tuned.held_out.text_accuracy:.1%} is predicted "
                f"correctly, and the mean F1 of the classes is {tuned.held_out.mean_f1:.3f}"
            )
    return text


def preferences(facts: Facts, name: str) -> MaybeSection:
    """Defects of the preference data, set by set; the outcome of every record, and how
    often each set is trained on.
    """
    drawn_sets = {part.name: part for part in facts.trained("dpo").sets}
    numbers = attrgetter(
        "name",
        "records",
        "refused",
        "dropped_before",
        "audit.pairs",
        "audit.prompts",
        "audit.duplicates",
        "audit.contradictions",
        "audit.near_identical",
        "audit.same_answers",
        "audit.longer_chosen",
    )
    rows, leaks, used = [], [], []
    for part in facts.summary(name, TuningData).sets:
        audit, drawn = part.audit, drawn_sets.get(part.name)
        if audit is None:
            continue
        rows.append(numbers(part))
        leaks += [
            [part.name, set_name, leak["items"], leak["leaked"], leak["texts"]]
            for set_name, leak in (audit.leaks or {}).items()
        ]
        use: list[object] = [None, None, None]
        if drawn is not None:
            use = [drawn.held_out, drawn.drawn, drawn.drawn_share]
        counts = part.unrenderable, part.dropped, part.truncated, part.used
        used.append([part.name, *counts, *use])
    defects = (
        *RECORD_COUNTS,
        "pairs",
        "prompts",
        "duplicates",
        "contradictions",
        "nearly the same answer",
        "the same answer",
    )
    columns = {"set": "", **dict.fromkeys(defects, ",")}
    uses = ("not rendered", "too long", "cut", "used", "held out", "drawn in an epoch")
    use_columns = {"set": "", **dict.fromkeys(uses, ",")}
    leak_columns = {"items": ",", "leaked": ",", "pairs that hold one": ","}
    return section_of(
        "Preference data",
        table({**columns, "longer answer preferred": ".1%"}, rows),
        table({"set": "", "evaluation set": "", **leak_columns}, leaks),
        table({**use_columns, "share of the pairs": ".1%"}, used),
    )


def distillation(facts: Facts, name: str = "teacher") -> MaybeSection:
    """The teacher's kept predictions, and how near the student came to it."""
    if name not in facts.summaries:
        return None
    summary = facts.summary(name, TeacherSummary)
    rows = [
        ["tokens of the teacher", f"{summary.tokens:,}"],
        ["ids kept per token", f"{summary.top_k}"],
        ["mass of the others", f"{summary.rest_mass:.3%}"],
        ["temperature", f"{summary.temperature:g}"],
        ["the teacher's own loss on the labels", f"{summary.loss:.4f}"],
    ]
    lines = [line for line in facts.training.get("sft", ()) if "divergence" in line]
    for label, key in (
        ("student's loss on the labels", "label_loss"),
        ("divergence from the teacher", "divergence"),
    ):
        for when, line in zip(("first", "last"), lines[:1] + lines[-1:], strict=False):
            rows.append([f"{label}, {when}", f"{number_at(line, key):.4f}"])
    return section_of(
        "Distillation",
        table({"measured": "", "value": ">"}, rows),
        "Losses and divergences are nats per trained token.",
        _curves(
            lines,
            {"divergence": "divergence"},
            "nats per token",
            "sft: divergence from the teacher",
        ),
    )


def _curves(
    record: Record, names: Mapping[str, str], label: str, caption: str
) -> Figure | None:
    """Curves of some keys of a record; None for a single step."""
    series = points_of(record, names)
    has_curve = any(len(points) > 1 for points in series.values())
    return Figure(curves(series, "step", label), caption) if has_curve else None


def reward_model(facts: Facts, name: str = "reward") -> MaybeSection:
    """Ranking of unseen pairs by a reward model, and the correlation of its scores with
    the length of answers.
    """
    summary = facts.trained(name)
    measured = summary.held_out
    if measured is None:
        return None
    scores = ", ".join(
        "" if score is None else f"{score:.3f}"
        for score in (measured.mean, measured.deviation)
    )
    higher, longer = (
        "" if share is None else f"{share:.1%} of {share.units:,}"
        for share in (measured.accuracy, measured.longer_chosen)
    )
    rows: list[Sequence[object]] = [
        ["pairs trained on", f"{summary.training_pairs:,}"],
        ["pairs held out", f"{summary.held_out_pairs:,}"],
        ["pairs too long", f"{summary.too_long_pairs:,}"],
        ["chosen answer scores higher, held out", higher],
        ["chosen answer is the longer one, held out", longer],
        ["mean difference of scores, held out", measured.margin],
        ["correlation of score and length", measured.length_correlation],
        ["mean and deviation of scores", scores],
    ]
    return section_of(
        "Reward model",
        table({"measured": "", "value": ".3f"}, rows),
        "In brackets: Wilson's 95 % intervals over pairs. A model that ranks no better "
        "than the length of answers does has learnt their length.",
        _curves(
            facts.training.get("reward", ()),
            {f"scores/{answer}": answer for answer in ANSWERS},
            "score",
            "reward: mean scores of answers",
        ),
        unlearned(summary.margins),
    )


def preference_effects(facts: Facts, name: str = "dpo") -> MaybeSection:
    """Origin of preference optimisation's margin: answers against the reference, and
    the alarm if it rang.
    """
    lines = [
        line
        for line in facts.training.get("dpo", ())
        if "fell/chosen" in line and "fell/rejected" in line
    ]
    if not lines:
        return None
    summary = facts.trained("dpo")
    keys = ("fell", "log_ratio", "rewards")
    rows = [
        [answer, *(number_at(lines[-1], f"{key}/{answer}") for key in keys)]
        for answer in ANSWERS
    ]
    columns = {
        "answers": "",
        "less likely than under the reference": ".1%",
        "nats per token against it": "+.4f",
        "reward": "+.4f",
    }
    sentences = [f"Loss {summary.objective}; means over pairs at the last logged step."]
    alarm, held_out = summary.chosen_decline.alarm_step, summary.held_out or HeldOut()
    sentences.append(
        "Chosen answers did not keep becoming less likely."
        if alarm is None
        else f"Alarm at step {alarm}: the margin grew although most chosen answers "
        "became less likely."
    )
    accuracy = held_out.reward_accuracy_interval
    if accuracy is not None:
        sentences.append(
            f"On {summary.held_out_pairs:,} held-out pairs the chosen answer gained "
            f"more in {accuracy:.1%}, and is the likelier one in "
            f"{held_out.chosen_more_likely_interval:.1%}, "
            f"{held_out.chosen_more_likely_before:.1%} before."
        )
    return section_of(
        "Preference optimisation",
        table(columns, rows),
        " ".join(sentences),
        _curves(
            lines,
            {f"log_ratio/{answer}": answer for answer in ANSWERS},
            "nats per token",
            "dpo: log-probability against the reference",
        ),
        unlearned(summary.margins),
    )


def unlearned(margins: Margins | None) -> list[Part]:
    """Share of margins that are not positive after training, by set, and the worst
    margins.
    """
    if margins is None:
        return []
    sets = [
        [part.name, pairs, values.measured, values.wrong, values.median]
        for part in margins.sets
        for pairs, values in (("held out", part.held_out), ("trained", part.trained))
        if values is not None
    ]
    worst = []
    for pair in margins.worst:
        use = "held out" if pair.held_out else "trained"
        place = pair.id[:16], pair.set, use, pair.margin, pair.prompt_text
        worst.append([*place, pair.chosen_text, pair.rejected_text])
    note = (
        "Pairs that are still ranked wrong are mislabelled, contradict other pairs, or "
        "are hard. `gristmill trace --document ID` says which steps read it, and "
        "`margins.parquet` has all that were measured."
    )
    columns = {"measured": ",", "margin not positive": ".1%", "median margin": "+.3f"}
    texts = dict.fromkeys(("prompt", "preferred", "not preferred"), "")
    worst_columns = {"id": "", "set": "", "": "", "margin": "+.3f", **texts}
    return [
        table({"set": "", "pairs": "", **columns}, sets),
        Details(
            "The worst margins after training",
            [table(worst_columns, worst), Note(note)],
        ),
    ]

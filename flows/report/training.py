"""The report's sections about training: losses, skipped steps, and rewards of
reinforcement learning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gristmill.flows.pages.page_elements import (
    Details,
    Entry,
    Figure,
    Heading,
    Inline,
    Listing,
    Note,
    Part,
    Section,
    Span,
    Table,
    Text,
    section_of,
)
from gristmill.flows.pages.pictures import curves
from gristmill.flows.report.before_after import effect_parts
from gristmill.flows.report.report_facts import Facts
from gristmill.flows.stages.registry import STAGES
from gristmill.flows.stages.stage import imported
from gristmill.train.loop.spike_report import describe_origin

MOST_ATTRIBUTED = 5
EXCERPT = 300
"""Characters of an attributed document's text, of a prompt or of an answer."""
REWARD, REWARD_PREFIX = "reward", "rewards/"
Points = dict[str, list[tuple[float, float]]]
"""Name of a curve -> (step, value)."""


def training_section(facts: Facts) -> Section | None:
    """Loss curves of every training, in total and per source, and the losses at both
    ends.
    """
    if not facts["training"]:
        return None
    losses = loss_rows(facts)
    rows = [
        [row["stage"], row["steps"], f"{row['first']:.4f}", f"{row['last']:.4f}"]
        for row in losses
    ]
    parts: list[Part] = []
    for stage, record in facts["training"].items():
        parts += training_figures(stage, record)
    parts.append(Table(["stage", "steps", "first loss", "last loss"], rows, {1, 2, 3}))
    effects = effect_parts(facts)
    if effects:
        parts += [Heading("What each stage changed"), *effects]
    parts += [
        Note(f"{row['stage']}: {row['ended']}.") for row in losses if row["ended"]
    ]
    return Section("Training", parts)


def training_figures(stage: str, record: Sequence[Mapping[str, Any]]) -> list[Part]:
    """The curves of a training's record."""
    steps = [line for line in record if "loss" in line]
    if not steps:
        return []
    figures: list[Part] = []
    for measure, key in (("loss", "loss"), ("bits per byte", "bits_per_byte")):
        series = by_source(steps, key)
        if series:
            figures.append(
                Figure(curves(series, "step", measure), f"{stage}: training {measure}")
            )
    validation: Points = {}
    for line in record:
        for source, values in line.get("validation", {}).items():
            validation.setdefault(source, []).append(
                (line["step"], values["bits_per_byte"])
            )
    # A single measurement is not a curve; it stands in the table of held-out text.
    if any(len(points) > 1 for points in validation.values()):
        figures.append(
            Figure(
                curves(validation, "step", "bits per byte"),
                f"{stage}: held-out bits per byte",
            )
        )
    held_out = [
        (line["step"], line["held_out"]["loss"])
        for line in record
        if "held_out" in line
    ]
    if len(held_out) > 1:
        # With a teacher the loss is not of the labels alone.
        trained = [
            (line["step"], line.get("label_loss", line["loss"])) for line in steps
        ]
        caption = (
            f"{stage}: loss on the conversations that are trained on, and on "
            "those held out"
        )
        figures.append(
            Figure(
                curves({"trained": trained, "held out": held_out}, "step", "loss"),
                caption,
            )
        )
    if stage == "dpo":
        rewards = points_of(
            steps,
            {f"rewards/{name}": name for name in ("chosen", "rejected", "margins")},
        )
        if "margins" in rewards:
            figures.append(Figure(curves(rewards, "step", "reward"), "dpo: rewards"))
    return figures


def by_source(steps: Sequence[Mapping[str, Any]], key: str) -> Points:
    """(step, value) of a training's record, in total and of every source if there are
    several.
    """
    series: Points = {}
    for line in steps:
        for name, values in (("all", line), *line.get("sources", {}).items()):
            if key in values:
                series.setdefault(name, []).append((line["step"], values[key]))
    has_single_source = len(series) == 2
    return {"all": series["all"]} if has_single_source else series


def loss_rows(facts: Facts) -> list[dict[str, Any]]:
    """A row per training stage: steps, first and last logged loss, why a callback ended
    it, and details.
    """
    rows = []
    for stage, record in facts["training"].items():
        steps = [line for line in record if "loss" in line]
        if not steps:
            continue
        summary = facts.get("summaries", {}).get(stage, {})
        training = STAGES[stage].training if stage in STAGES else None
        details = ""
        if training is not None and training.details is not None:
            details = imported(training.details)(facts, steps)
        ended = ended_by(summary)
        rows.append(
            {
                "stage": stage,
                "steps": summary.get("stopped_by", steps[-1])["step"],
                "first": steps[0]["loss"],
                "last": steps[-1]["loss"],
                "ended": ended,
                "details": "\n".join(filter(None, (ended, details))),
            }
        )
    return rows


def ended_by(summary: Mapping[str, Any]) -> str:
    """The callback that ended a training, and its reason; empty if the training ran to
    its end.
    """
    stopped = summary.get("stopped_by")
    if stopped is None:
        return ""
    return (
        f"{stopped['callback']} ended it after step {stopped['step']}: "
        f"{stopped['reason']}"
    )


def reward_details(facts: Facts, steps: list[dict[str, Any]]) -> str:
    """Share of answers that are rewarded as they were judged, trained on and held
    out.
    """
    summary = facts["summaries"].get("dpo", {})
    lines = []
    shares = shares_right(summary)
    if shares:
        label = (
            "answers rewarded right"
            if summary.get("objective") == "kto"
            else "reward accuracy"
        )
        lines.append(f"{label} {shares}")
    decline = summary.get("chosen_decline", {})
    if decline.get("fell_chosen") is not None:
        alarm = (
            ""
            if decline["alarm_step"] is None
            else f", alarm at step {decline['alarm_step']}"
        )
        lines.append(
            "log-probability below the reference in the last batch: "
            f"{decline['fell_chosen']:.0%} of chosen, "
            f"{decline['fell_rejected']:.0%} of rejected{alarm}"
        )
    return "\n".join(lines)


def teaching_details(facts: Facts, steps: list[dict[str, Any]]) -> str:
    """Divergence of a student from its teacher, and the loss on held-out
    conversations.
    """
    divergences = [line["divergence"] for line in steps if "divergence" in line]
    losses = [
        line["held_out"]["loss"]
        for line in facts["training"]["sft"]
        if "held_out" in line
    ]
    lines = (
        [f"divergence from the teacher {divergences[0]:.3f} -> {divergences[-1]:.3f}"]
        if divergences
        else []
    )
    lines += [f"held-out loss {losses[-1]:.4f}"] if losses else []
    return "\n".join(lines)


def ranking_details(facts: Facts, steps: list[dict[str, Any]]) -> str:
    """Share of held-out pairs that a reward model ranks as they were judged, with the
    interval.
    """
    shares = shares_right(facts["summaries"].get("reward", {}))
    return f"ranked right {shares}" if shares else ""


def shares_right(summary: dict[str, Any]) -> str:
    """The shares of positive margins, as `95% of 22 trained, 80% of 5 held out (38% to
    96%)` (objectives/margins.py).

    Empty if none were measured.
    """
    shares = []
    for part, share in sorted(
        summary.get("margins", {}).get("right", {}).items(), reverse=True
    ):
        bounds = (
            "" if part == "trained" else f" ({share['low']:.0%} to {share['high']:.0%})"
        )
        shares.append(
            f"{share['value']:.0%} of {share['units']:,} "
            f"{part.replace('_', ' ')}{bounds}"
        )
    return ", ".join(shares)


def spikes(facts: Facts) -> Section | None:
    """Steps that were skipped for their loss, with the documents of the highest
    loss.
    """
    details = [
        skipped_step(stage, report)
        for stage, reports in facts.get("spikes", {}).items()
        for report in reports
    ]
    return section_of("Loss spikes", details)


def skipped_step(stage: str, report: Mapping[str, Any]) -> Part:
    """A skipped step with its attributed documents, from train/loop/spike_report.py."""
    suspects = set(report["suspects"])
    entries = [
        _attributed(document)
        for document in report["documents"]
        if document["id"] in suspects
    ]
    title = (
        f"{stage}, step {report['step']}: loss {_loss(report['loss'])}, where "
        f"{_loss(report.get('mean'))} was "
        f"usual; {len(suspects)} attributed document{'s' * (len(suspects) != 1)}"
    )
    heading = "Attributed documents: loss, source, id, where from, how judged"
    return Details(title, [Listing(heading, entries[:MOST_ATTRIBUTED])])


def _attributed(document: Mapping[str, Any]) -> Entry:
    place = " ".join(
        str(document[key]) for key in ("source", "id") if document.get(key)
    )
    origin = describe_origin(document)
    title: Inline = [
        Span(_loss(document["loss"]), "strong"),
        f" {place} · {origin}" if origin else f" {place}",
    ]
    return Entry(
        title, [Span(" ".join(str(document.get("text") or "").split())[:EXCERPT])]
    )


def _loss(value: float | None) -> str:
    return "NaN or Inf" if value is None else f"{value:.3f}"


SHARES = (
    (
        "share of answers",
        "Answers whose group has one and the same reward teach nothing.",
        {
            "pass_rate": "passed",
            "frac_reward_zero_std": "group has one reward",
            "completions/clipped_ratio": "cut",
        },
    ),
    (
        "share of prompts",
        "Prompts that were asked, by the share of answers that passed the last time.",
        {
            "curriculum/too_hard": "too hard",
            "curriculum/wanted": "wanted",
            "curriculum/too_easy": "too easy",
        },
    ),
    ("calls per answer", "Calls of tools.", {"tools/call_frequency": "calls"}),
    (
        "share of calls",
        "Calls that were answered with an error.",
        {"tools/failure_frequency": "errors"},
    ),
)
"""Further pictures of reinforcement learning: label of the axis, caption, and keys of
the record with their names.
"""


def reinforcement(facts: Facts, name: str = "rl") -> Section | None:
    """Rewards, the distance from the start, and answers before and after."""
    summary, record = facts["summaries"].get("rl", {}), facts["training"].get("rl", [])
    rewards = reward_points(record)
    if not summary or not rewards:
        return None
    drift = points_of(
        record,
        {
            "kl": "divergence from the start, nats per token",
            "entropy": "entropy, nats per token",
        },
    )
    lengths = points_of(record, {"completions/mean_length": "tokens per answer"})
    figures = [
        Figure(
            curves(rewards, "step", "reward"),
            "Mean rewards of the answers of each logged step.",
        ),
        Figure(
            curves(drift, "step", "nats per token"),
            "How far the policy moved, and how free its choice is.",
        ),
        Figure(curves(lengths, "step", "tokens"), "Length of answers."),
    ]
    for label, caption, keys in SHARES:
        points = points_of(record, keys)
        if points:
            figures.append(Figure(curves(points, "step", label), caption))
    return section_of(
        "Reinforcement learning",
        Table(["reward", "first step", "last step"], reward_rows(summary), {1, 2}),
        Note(held_out_note(summary)),
        figures,
        map(sample_of, summary.get("samples", [])),
    )


def reward_points(record: Sequence[Mapping[str, Any]]) -> Points:
    """(step, value) of the whole reward, and of each reward if there are several."""
    first: Mapping[str, Any] = next((line for line in record if REWARD in line), {})
    keys = [key for key in first if key.startswith(REWARD_PREFIX)]
    if len(keys) < 2:
        return points_of(record, {REWARD: REWARD})
    return points_of(
        record,
        {REWARD: "all", **{key: key.removeprefix(REWARD_PREFIX) for key in keys}},
    )


def points_of(record: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> Points:
    """(step, value) of some keys of a record, by their names; keys that it does not
    have are left out.
    """
    series = {
        name: [(line["step"], line[key]) for line in record if key in line]
        for key, name in names.items()
    }
    return {name: points for name, points in series.items() if points}


def reward_rows(summary: Mapping[str, Any]) -> list[list[Any]]:
    """Each reward, in the first and in the last line of the record."""
    last = summary.get("last_rewards", {})
    return [
        [
            "all, weighted" if key == REWARD else key.removeprefix(REWARD_PREFIX),
            f"{value:.3f}",
            f"{last[key]:.3f}",
        ]
        for key, value in summary.get("first_rewards", {}).items()
    ]


def held_out_note(summary: Mapping[str, Any]) -> str:
    """Rewards of the likeliest answers to held-out prompts, before and after."""
    method = (
        f"{summary['algorithm'].upper()} from the model of {summary['started_from']}"
    )
    rewards = summary.get("held_out")
    if rewards is None:
        return f"{method}; no prompts were held out."
    gain = rewards["difference"]
    return (
        f"{method}. Reward of the likeliest answers to {summary['held_out_prompts']:,} "
        f"held-out prompts: {rewards['reward_before']:.3f} before, "
        f"{rewards['reward']:.3f} after; a gain of {gain['value']:+.3f} "
        f"({gain['low']:+.3f} to {gain['high']:+.3f})."
    )


def sample_of(sample: Mapping[str, Any]) -> Part:
    """A held-out prompt with its answers before and after."""
    parts: list[Part] = []
    for when, reward in (("before", "reward_before"), ("after", "reward")):
        parts += [
            Note(f"{when}: reward {sample[reward]:.3f}"),
            Text([Span(str(sample[when])[:EXCERPT])]),
        ]
    return Details(" ".join(str(sample["prompt"]).split())[:EXCERPT], parts)


def reinforcement_details(facts: Facts, steps: Sequence[Mapping[str, Any]]) -> str:
    """Rewards at both ends, in training and on held-out prompts, for a line of the
    summary.
    """
    rewards = [line[REWARD] for line in steps if REWARD in line]
    trained = f"reward {rewards[0]:.3f} -> {rewards[-1]:.3f}" if rewards else ""
    held_out = facts["summaries"].get("rl", {}).get("held_out")
    if held_out is None:
        return trained
    return (
        f"{trained}\nheld out {held_out['reward_before']:.3f} -> "
        f"{held_out['reward']:.3f}"
    )

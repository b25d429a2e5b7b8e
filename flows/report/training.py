"""The report's sections about training: losses, skipped steps, and rewards of
reinforcement learning.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
    Text,
    section_of,
    table,
)
from gristmill.flows.pages.pictures import curves
from gristmill.flows.report.before_after import effect_parts
from gristmill.flows.report.report_facts import Facts, SpikeReport
from gristmill.flows.report.stage_summaries import (
    MetricsLine,
    Record,
    RewardedSample,
    TrainingSummary,
)
from gristmill.flows.stages.registry import STAGES
from gristmill.flows.stages.stage import imported
from gristmill.train.loop.spike_report import describe_origin

MOST_ATTRIBUTED = 5
EXCERPT = 300
"""Characters of an attributed document's text, of a prompt or of an answer."""
REWARD, REWARD_PREFIX = "reward", "rewards/"
Points = dict[str, list[tuple[float, float]]]
"""Name of a curve -> (step, value)."""


@dataclass(frozen=True)
class LossRow:
    """A training.

    Attributes:
        stage: its name.
        steps: trained.
        first, last: logged losses.
        ended: the callback that ended it, and its reason; empty at its end.
        details: lines on what its stage measures besides.
    """

    stage: str
    steps: int
    first: float
    last: float
    ended: str
    details: str


def training_section(facts: Facts) -> Section | None:
    """Loss curves of every training, in total and per source, and the losses at both
    ends.
    """
    losses = loss_rows(facts)
    rows = [[row.stage, row.steps, row.first, row.last] for row in losses]
    columns = {"stage": "", "steps": "d", "first loss": ".4f", "last loss": ".4f"}
    effects = effect_parts(facts)
    return section_of(
        "Training",
        [
            figure
            for stage, record in facts.training.items()
            for figure in training_figures(stage, record)
        ],
        table(columns, rows),
        Heading("What each stage changed") if effects else None,
        effects,
        [Note(f"{row.stage}: {row.ended}.") for row in losses if row.ended],
    )


def training_figures(stage: str, record: Record) -> list[Figure]:
    """The curves of a training's record."""
    steps = [line for line in record if "loss" in line]
    if not steps:
        return []
    validation: Points = {}
    for line in record:
        for source, values in line.get("validation", {}).items():
            point = (line["step"], values["bits_per_byte"])
            validation.setdefault(source, []).append(point)
    # With a teacher the loss is not of the labels alone.
    tuned: Points = {
        "trained": [
            (line["step"], line.get("label_loss", line["loss"])) for line in steps
        ],
        "held out": [
            (line["step"], line["held_out"]["loss"])
            for line in record
            if "held_out" in line
        ],
    }
    sides = ("chosen", "rejected", "margins")
    rewards = points_of(steps, {f"{REWARD_PREFIX}{name}": name for name in sides})
    # A single measurement is not a curve; it stands in the table of held-out text.
    has_validation = any(len(points) > 1 for points in validation.values())
    drawn: list[tuple[Points, str, str]] = [
        (by_source(steps, "loss"), "loss", "training loss"),
        (by_source(steps, "bits_per_byte"), "bits per byte", "training bits per byte"),
        (
            validation if has_validation else {},
            "bits per byte",
            "held-out bits per byte",
        ),
        (
            tuned if len(tuned["held out"]) > 1 else {},
            "loss",
            "loss on the conversations that are trained on, and on those held out",
        ),
        (
            rewards if stage == "dpo" and "margins" in rewards else {},
            "reward",
            "rewards",
        ),
    ]
    return [
        Figure(curves(series, "step", measure), f"{stage}: {caption}")
        for series, measure, caption in drawn
        if series
    ]


def by_source(steps: Record, key: str) -> Points:
    """(step, value) of a training's record, in total and of every source if there are
    several.
    """
    series = points_of(steps, {key: "all"})
    for line in steps:
        for name, values in line.get("sources", {}).items():
            if key in values:
                series.setdefault(name, []).append((line["step"], values[key]))
    has_single_source = len(series) == 2
    return {"all": series["all"]} if has_single_source else series


def loss_rows(facts: Facts) -> list[LossRow]:
    """A row per training with logged losses."""
    rows = []
    for name, record in facts.training.items():
        steps = [line for line in record if "loss" in line]
        if not steps:
            continue
        stopped = facts.trained(name).stopped_by
        ended, last_step = "", steps[-1]["step"]
        if stopped is not None:
            last_step = stopped.step
            ended = f"{stopped.callback} ended it after step {stopped.step}"
            ended = f"{ended}: {stopped.reason}"
        training = STAGES[name].training if name in STAGES else None
        details = ""
        if training is not None and training.details is not None:
            details = imported(training.details)(facts, steps)
        lines = "\n".join(filter(None, (ended, details)))
        first_loss, last_loss = steps[0]["loss"], steps[-1]["loss"]
        rows.append(LossRow(name, last_step, first_loss, last_loss, ended, lines))
    return rows


def reward_details(facts: Facts, steps: Record) -> str:
    """Share of answers that are rewarded as they were judged, trained on and held
    out.
    """
    summary = facts.trained("dpo")
    is_kto, shares = summary.objective == "kto", shares_right(summary)
    label = "answers rewarded right" if is_kto else "reward accuracy"
    lines = [f"{label} {shares}"] if shares else []
    decline = summary.chosen_decline
    if decline.fell_chosen is not None:
        alarm = decline.alarm_step
        suffix = "" if alarm is None else f", alarm at step {alarm}"
        lines.append(
            "log-probability below the reference in the last batch: "
            f"{decline.fell_chosen:.0%} of chosen, {decline.fell_rejected:.0%} of "
            f"rejected{suffix}"
        )
    return "\n".join(lines)


def teaching_details(facts: Facts, steps: Record) -> str:
    """Divergence of a student from its teacher, and the loss on held-out
    conversations.
    """
    divergences = [line["divergence"] for line in steps if "divergence" in line]
    losses = [
        line["held_out"]["loss"] for line in facts.training["sft"] if "held_out" in line
    ]
    lines = []
    if divergences:
        ends = f"{divergences[0]:.3f} -> {divergences[-1]:.3f}"
        lines.append(f"divergence from the teacher {ends}")
    lines += [f"held-out loss {losses[-1]:.4f}"] if losses else []
    return "\n".join(lines)


def ranking_details(facts: Facts, steps: Record) -> str:
    """Share of held-out pairs that a reward model ranks as they were judged, with the
    interval.
    """
    shares = shares_right(facts.trained("reward"))
    return f"ranked right {shares}" if shares else ""


def shares_right(summary: TrainingSummary) -> str:
    """The shares of positive margins, as `95% of 22 trained, 80% of 5 held out (38% to
    96%)` (objectives/margins.py).

    Empty if none were measured.
    """
    right = {} if summary.margins is None else summary.margins.right
    shares = []
    for part, share in sorted(right.items(), reverse=True):
        bounds = "" if part == "trained" else f" ({share.low:.0%} to {share.high:.0%})"
        pairs = f"{share.units:,} {part.replace('_', ' ')}"
        shares.append(f"{share.value:.0%} of {pairs}{bounds}")
    return ", ".join(shares)


def spikes(facts: Facts) -> Section | None:
    """Steps that were skipped for their loss, with the documents of the highest
    loss.
    """
    details = [
        skipped_step(stage, report)
        for stage, reports in facts.spikes.items()
        for report in reports
    ]
    return section_of("Loss spikes", details)


def skipped_step(stage: str, report: SpikeReport) -> Part:
    """A skipped step with its attributed documents."""
    entries = []
    for document in report.documents:
        if document["id"] in report.suspects:
            place = (str(document.get(key) or "") for key in ("source", "id"))
            origin = describe_origin(document)
            title: list[Inline] = [
                Span(_loss(document["loss"]), "strong"),
                f" {' '.join(filter(None, place))}",
                f" · {origin}" if origin else "",
            ]
            excerpt = " ".join(str(document.get("text") or "").split())[:EXCERPT]
            entries.append(Entry(title, excerpt))
    number = len(set(report.suspects))
    title_of_step = (
        f"{stage}, step {report.step}: loss {_loss(report.loss)}, where "
        f"{_loss(report.mean)} was usual; {number} attributed "
        f"document{'s' * (number != 1)}"
    )
    heading = "Attributed documents: loss, source, id, where from, how judged"
    return Details(title_of_step, [Listing(heading, entries[:MOST_ATTRIBUTED])])


def _loss(value: object) -> str:
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
    summary, record = facts.trained("rl"), facts.training.get("rl", ())
    rewards = reward_points(record)
    if "rl" not in facts.summaries or not rewards:
        return None
    drift = {
        "kl": "divergence from the start, nats per token",
        "entropy": "entropy, nats per token",
    }
    lengths = {"completions/mean_length": "tokens per answer"}
    figures = [
        Figure(
            curves(rewards, "step", "reward"),
            "Mean rewards of the answers of each logged step.",
        ),
        Figure(
            curves(points_of(record, drift), "step", "nats per token"),
            "How far the policy moved, and how free its choice is.",
        ),
        Figure(
            curves(points_of(record, lengths), "step", "tokens"), "Length of answers."
        ),
    ]
    for label, caption, keys in SHARES:
        points = points_of(record, keys)
        if points:
            figures.append(Figure(curves(points, "step", label), caption))
    rows = [
        [
            "all, weighted" if key == REWARD else key.removeprefix(REWARD_PREFIX),
            value,
            summary.last_rewards[key],
        ]
        for key, value in summary.first_rewards.items()
    ]
    columns = {"reward": "", "first step": ".3f", "last step": ".3f"}
    return section_of(
        "Reinforcement learning",
        table(columns, rows),
        Note(held_out_note(summary)),
        figures,
        map(sample_of, summary.samples),
    )


def reward_points(record: Record) -> Points:
    """(step, value) of the whole reward, and of each reward if there are several."""
    first = next((line for line in record if REWARD in line), MetricsLine())
    keys = [key for key in first if key.startswith(REWARD_PREFIX)]
    if len(keys) < 2:
        return points_of(record, {REWARD: REWARD})
    names = {key: key.removeprefix(REWARD_PREFIX) for key in keys}
    return points_of(record, {REWARD: "all", **names})


def points_of(record: Record, names: Mapping[str, str]) -> Points:
    """(step, value) of some keys of a record, by their names; keys that it does not
    have are left out.
    """
    series: Points = {}
    for key, name in names.items():
        for line in record:
            value = number_at(line, key)
            if value is not None:
                series.setdefault(name, []).append((line["step"], value))
    return series


def number_at(line: MetricsLine, key: str) -> float | None:
    """The number under a key of a record's line."""
    value = line.get(key)
    return value if isinstance(value, int | float) else None


def held_out_note(summary: TrainingSummary) -> str:
    """Rewards of the likeliest answers to held-out prompts, before and after."""
    method = f"{summary.algorithm.upper()} from the model of {summary.started_from}"
    rewards = summary.held_out
    if rewards is None or rewards.difference is None:
        return f"{method}; no prompts were held out."
    gain = rewards.difference
    return (
        f"{method}. Reward of the likeliest answers to {summary.held_out_prompts:,} "
        f"held-out prompts: {rewards.reward_before:.3f} before, {rewards.reward:.3f} "
        f"after; a gain of {gain.value:+.3f} ({gain.low:+.3f} to {gain.high:+.3f})."
    )


def sample_of(sample: RewardedSample) -> Part:
    """A held-out prompt with its answers before and after."""
    parts: list[Part] = [
        Note(f"before: reward {sample.reward_before:.3f}"),
        Text([Span(sample.before[:EXCERPT])]),
        Note(f"after: reward {sample.reward:.3f}"),
        Text([Span(sample.after[:EXCERPT])]),
    ]
    return Details(" ".join(sample.prompt.split())[:EXCERPT], parts)


def reinforcement_details(facts: Facts, steps: Record) -> str:
    """Rewards at both ends, in training and on held-out prompts, for a line of the
    summary.
    """
    rewards = [line["reward"] for line in steps if "reward" in line]
    lines = [f"reward {rewards[0]:.3f} -> {rewards[-1]:.3f}"] if rewards else [""]
    held_out = facts.trained("rl").held_out
    if held_out is not None:
        before, after = held_out.reward_before, held_out.reward
        lines.append(f"held out {before:.3f} -> {after:.3f}")
    return "\n".join(lines)

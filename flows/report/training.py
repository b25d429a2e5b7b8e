"""The report's sections about training: losses, skipped steps, and rewards of
reinforcement learning.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from gristmill.flows.pages.page_elements import (
    Details,
    Entry,
    Figure,
    Heading,
    Inline,
    Listing,
    MaybeSection,
    Note,
    Part,
    Span,
    Text,
    section_of,
    table,
)
from gristmill.flows.pages.pictures import curves
from gristmill.flows.report.facts import Facts
from gristmill.flows.report.stage_summaries import (
    HeldOut,
    MetricsLine,
    Record,
    TrainingSummary,
)

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
    """

    stage: str
    steps: int
    first: float
    last: float
    ended: str


def training_section(facts: Facts) -> MaybeSection:
    """Loss curves of every training, in total and per source, and the losses at both
    ends.
    """
    losses = loss_rows(facts)
    rows = [[row.stage, row.steps, row.first, row.last] for row in losses]
    columns = {"stage": "", "steps": "d", "first loss": ".4f", "last loss": ".4f"}
    effects = effect_rows(facts)
    return section_of(
        "Training",
        [
            figure
            for stage, record in facts.training.items()
            for figure in training_figures(stage, record)
        ],
        table(columns, rows),
        Heading("What each stage changed") if effects else None,
        table(EFFECT_COLUMNS, effects),
        EFFECT_NOTE if effects else None,
        [f"{row.stage}: {row.ended}." for row in losses if row.ended],
    )


def training_figures(stage: str, record: Record) -> list[Figure]:
    """The curves of a training's record."""
    steps = [line for line in record if "loss" in line]
    if not steps:
        return []
    # With a teacher the loss is not of the labels alone.
    losses: list[tuple[float, float]] = [
        (line["step"], line.get("label_loss", line["loss"])) for line in steps
    ]
    validation, held_out = Points(), list[tuple[float, float]]()
    for line in record:
        for source, values in line.get("validation", {}).items():
            point = (line["step"], values["bits_per_byte"])
            validation.setdefault(source, []).append(point)
        if "held_out" in line:
            held_out.append((line["step"], line["held_out"]["loss"]))
    drawn = [
        (by_source(steps, "loss"), "loss", "training loss"),
        (by_source(steps, "bits_per_byte"), "bits per byte", "training bits per byte"),
    ]
    # A single measurement is not a curve; it stands in the table of held-out text.
    if any(len(points) > 1 for points in validation.values()):
        drawn.append((validation, "bits per byte", "held-out bits per byte"))
    if len(held_out) > 1:
        caption = "loss on the conversations that are trained on, and on those held out"
        drawn.append(({"trained": losses, "held out": held_out}, "loss", caption))
    sides = ("chosen", "rejected", "margins")
    rewards = points_of(steps, {f"{REWARD_PREFIX}{name}": name for name in sides})
    if stage == "dpo" and "margins" in rewards:
        drawn.append((rewards, "reward", "rewards"))
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
    return series if len(series) != 2 else {"all": series["all"]}


def loss_rows(facts: Facts) -> list[LossRow]:
    """A row per training with logged losses."""
    rows = []
    for name, record in facts.training.items():
        steps = [line for line in record if "loss" in line]
        if not steps:
            continue
        first, last = steps[0], steps[-1]
        stopped = facts.trained(name).stopped_by
        ended, last_step = "", last["step"]
        if stopped is not None:
            last_step = stopped.step
            ended = f"{stopped.callback} ended it after step {stopped.step}"
            ended += f": {stopped.reason}"
        rows.append(LossRow(name, last_step, first["loss"], last["loss"], ended))
    return rows


def spikes(facts: Facts) -> MaybeSection:
    """Steps that were skipped for their loss, with the documents of the highest
    loss.
    """
    details = []
    for stage, reports in facts.spikes.items():
        for report in reports:
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
                    entries.append(Entry(title, _excerpt(document.get("text"))))
            number = len(set(report.suspects))
            summary = (
                f"{stage}, step {report.step}: loss {_loss(report.loss)}, where "
                f"{_loss(report.mean)} was usual; {number} attributed "
                f"document{'s' * (number != 1)}"
            )
            heading = "Attributed documents: loss, source, id, where from, how judged"
            listing = Listing(heading, entries[:MOST_ATTRIBUTED])
            details.append(Details(summary, [listing]))
    return section_of("Loss spikes", details)


def describe_origin(document: Mapping[str, Any]) -> str:
    """Origin and quality of a document as one line."""
    parts = [
        str(document.get("url") or document.get("locator") or ""),
        str(document.get("language") or ""),
    ]
    parts += [
        f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in document.get("quality", {}).items()
    ]
    if document.get("cluster_size", 1) > 1:
        parts.append(f"cluster {document['cluster'][:8]} of {document['cluster_size']}")
    return " · ".join(part for part in parts if part)


def _excerpt(text: object) -> str:
    return " ".join(str(text or "").split())[:EXCERPT]


def _loss(value: object) -> str:
    return "NaN or Inf" if value is None else f"{value:.3f}"


FIGURES = (
    (
        "nats per token",
        "How far the policy moved, and how free its choice is.",
        {
            "kl": "divergence from the start, nats per token",
            "entropy": "entropy, nats per token",
        },
    ),
    (
        "tokens",
        "Length of answers.",
        {"completions/mean_length": "tokens per answer"},
    ),
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


def reinforcement(facts: Facts, name: str = "rl") -> MaybeSection:
    """Rewards, the distance from the start, and answers before and after."""
    summary, record = facts.trained("rl"), facts.training.get("rl", ())
    rewards = reward_points(record)
    if "rl" not in facts.summaries or not rewards:
        return None
    caption = "Mean rewards of the answers of each logged step."
    figures = [Figure(curves(rewards, "step", "reward"), caption)]
    for label, caption, keys in FIGURES:
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
    samples = []
    for sample in summary.samples:
        parts: list[Part] = [
            Note(f"before: reward {sample.reward_before:.3f}"),
            Text([Span(sample.before[:EXCERPT])]),
            Note(f"after: reward {sample.reward:.3f}"),
            Text([Span(sample.after[:EXCERPT])]),
        ]
        samples.append(Details(_excerpt(sample.prompt), parts))
    columns = {"reward": "", "first step": ".3f", "last step": ".3f"}
    return section_of(
        "Reinforcement learning",
        table(columns, rows),
        held_out_note(summary),
        figures,
        samples,
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


EFFECT_COLUMNS = {"stage": "", "held out": "", "before": ">", "after": ">", "": ""}
Effect: TypeAlias = tuple[str, str, str, str, str]
"""Cells below EFFECT_COLUMNS: the training, the held-out data, both values, and a
verdict.
"""
EFFECT_NOTE = (
    "Text: bits per byte, before training those of the first batch. Answers: loss per "
    "token of held-out conversations. Pairs: how often the chosen answer gains more "
    "than the rejected one, where a coin has 50 %, with its 95 % interval."
)


def effect_rows(facts: Facts) -> list[Effect]:
    """The effects of all trainings of a run."""
    record = facts.training.get("pretrain", ())
    validations = (
        line["validation"] for line in reversed(record) if "validation" in line
    )
    validation = {
        source: values["bits_per_byte"]
        for source, values in next(validations, {}).items()
        if "bits_per_byte" in values
    }
    first = next((line for line in record if "loss" in line), MetricsLine())
    sources = first.get("sources", {})
    rows: list[Effect] = []
    for source, value in validation.items():
        batch = sources.get(source, first).get("bits_per_byte")
        rows += _loss_effect("pretrain", f"text of {source}", batch, value)
    for stage in ("sft", "reward", "dpo", "rl"):
        if stage not in facts.training:
            continue
        summary = facts.trained(stage)
        before = summary.held_out_before or HeldOut()
        held_out = summary.held_out or HeldOut()
        if stage == "sft":
            rows += _loss_effect(stage, "answers", before.loss, held_out.loss)
        accuracy = held_out.reward_accuracy_interval
        if stage == "reward":
            margins = summary.margins
            accuracy = margins.right.get("held_out") if margins else None
        if accuracy is not None and stage in ("reward", "dpo"):
            low, high = accuracy.low or 0.0, accuracy.high or 1.0
            verdict = "within chance"
            if low > 0.5 or high < 0.5:
                verdict = "above chance" if low > 0.5 else "below chance"
            pairs = f"{accuracy.units:,} pairs"
            bounds = f"{verdict} ({low:.0%} to {high:.0%})"
            rows.append((stage, pairs, "50%", f"{accuracy.value:.0%}", bounds))
        gain = held_out.difference
        if gain is not None and gain.low is not None and gain.high is not None:
            verdict = f"within noise ({gain.low:+.3f} to {gain.high:+.3f})"
            if gain.low == gain.high == 0:
                verdict = "the same"
            elif gain.low > 0 or gain.high < 0:
                verdict = "better" if gain.low > 0 else "worse"
            prompts = f"rewards of {summary.held_out_prompts:,} prompts"
            rewards = f"{held_out.reward_before:.3f}", f"{held_out.reward:.3f}"
            rows.append((stage, prompts, *rewards, verdict))
    return rows


def _loss_effect(
    stage: str, held_out: str, before: float | None, after: float | None
) -> Iterator[Effect]:
    """A loss before and after; lower is better."""
    if before is not None and after is not None:
        change = "better" if after < before else "worse"
        verdict = "the same" if after == before else change
        yield stage, held_out, f"{before:.3f}", f"{after:.3f}", verdict

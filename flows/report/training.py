"""The report's sections about training: losses, skipped steps, and what rewards became."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gristmill.flows.report.before_after import effect_parts
from gristmill.flows.report.page_elements import Details, Figure, Heading, Listing, Note, Part, Section, Table, Text
from gristmill.flows.report.pictures import curves
from gristmill.flows.report.report_facts import Facts
from gristmill.flows.stages.registry import STAGES
from gristmill.flows.stages.stage import imported
from gristmill.train.loop.spike_report import describe_origin

MOST_ATTRIBUTED = 5
EXCERPT = 300
"""Characters of an attributed document's text, of a prompt or of an answer."""
REWARD, OF_REWARDS = "reward", "rewards/"
Points = dict[str, list[tuple[float, float]]]


def training_section(facts: Facts) -> Section | None:
    """Loss curves of every training, in total and per source, and the losses at both ends."""
    if not facts["training"]:
        return None
    found = loss_rows(facts)
    rows = [[row["stage"], row["steps"], f"{row['first']:.4f}", f"{row['last']:.4f}"] for row in found]
    return Section(
        "Training",
        [
            *(figure for stage, record in facts["training"].items() for figure in training_figures(stage, record)),
            Table(["stage", "steps", "first loss", "last loss"], rows, {1, 2, 3}),
            *([Heading("What each stage changed"), *effects] if (effects := effect_parts(facts)) else []),
            *(Note(f"{row['stage']}: {row['ended']}.") for row in found if row["ended"]),
        ],
    )


def training_figures(stage: str, record: Sequence[Mapping[str, Any]]) -> list[Part]:
    """The curves of one training's record, those that it has."""
    steps = [line for line in record if "loss" in line]
    found: list[Part] = [
        Figure(curves(series, "step", what), f"{stage}: training {what}")
        for what, series in (("loss", by_source(steps, "loss")), ("bits per byte", by_source(steps, "bits_per_byte")))
        if series
    ]
    validation: Points = {}
    for line in record if steps else ():
        for source, values in line.get("validation", {}).items():
            validation.setdefault(source, []).append((line["step"], values["bits_per_byte"]))
    # One measurement is no curve; it stands in the table of held-out text.
    if any(len(points) > 1 for points in validation.values()):
        found.append(Figure(curves(validation, "step", "bits per byte"), f"{stage}: held-out bits per byte"))
    held_out = [(line["step"], line["held_out"]["loss"]) for line in record if "held_out" in line]
    if steps and len(held_out) > 1:
        # With a teacher the loss is not of the labels alone.
        trained = [(line["step"], line.get("label_loss", line["loss"])) for line in steps]
        found.append(
            Figure(
                curves({"trained": trained, "held out": held_out}, "step", "loss"),
                f"{stage}: loss on the conversations that are trained on, and on those held out",
            )
        )
    if stage == "dpo" and any("rewards/margins" in line for line in steps):
        margins = {
            name: [(line["step"], line[f"rewards/{name}"]) for line in steps if f"rewards/{name}" in line]
            for name in ("chosen", "rejected", "margins")
        }
        found.append(Figure(curves(margins, "step", "reward"), "dpo: rewards"))
    return found


def by_source(steps: Sequence[Mapping[str, Any]], key: str) -> Points:
    """(step, value) of a training's record, of everything and of every source where there are several."""
    series: Points = {}
    for line in steps:
        for name, values in (("all", line), *line.get("sources", {}).items()):
            if key in values:
                series.setdefault(name, []).append((line["step"], values[key]))
    return series if len(series) != len(("all", "one")) else {"all": series["all"]}


def loss_rows(facts: Facts) -> list[dict[str, Any]]:
    """One row per training stage: steps, first and last logged loss, why a callback ended it, and details."""
    rows = []
    for stage, record in facts["training"].items():
        steps = [line for line in record if "loss" in line]
        if not steps:
            continue
        details = STAGES[stage].details if stage in STAGES else None
        summary = facts.get("summaries", {}).get(stage, {})
        ended, last = ended_by(summary), summary.get("stopped_by", steps[-1])["step"]
        detail = "" if details is None else imported(details)(facts, steps)
        rows.append(
            {
                "stage": stage,
                "steps": last,
                "first": steps[0]["loss"],
                "last": steps[-1]["loss"],
                "ended": ended,
                "details": "\n".join(part for part in (ended, detail) if part),
            }
        )
    return rows


def ended_by(summary: Mapping[str, Any]) -> str:
    """Which callback ended a training and why; empty where none did."""
    stopped = summary.get("stopped_by")
    if stopped is None:
        return ""
    return f"{stopped['callback']} ended it after step {stopped['step']}: {stopped['reason']}"


def reward_details(facts: Facts, steps: list[dict[str, Any]]) -> str:
    """How often answers are rewarded as they were judged in the end: those trained on, and those held out."""
    summary = facts["summaries"].get("dpo", {})
    shares = shares_right(summary)
    accuracy = (
        [f"{'answers rewarded right' if summary.get('objective') == 'kto' else 'reward accuracy'} {shares}"]
        if shares
        else []
    )
    found = summary.get("chosen_decline", {})
    if found.get("fell_chosen") is not None:
        alarm = "" if found["alarm_step"] is None else f", alarm at step {found['alarm_step']}"
        accuracy.append(
            f"log-probability below the reference in the last batch: {found['fell_chosen']:.0%} of chosen, "
            f"{found['fell_rejected']:.0%} of rejected{alarm}"
        )
    return "\n".join(accuracy)


def teaching_details(facts: Facts, steps: list[dict[str, Any]]) -> str:
    """The loss on held-out conversations, and how far a student is from its teacher, where there are any."""
    apart = [line["divergence"] for line in steps if "divergence" in line]
    measured = [line["held_out"]["loss"] for line in facts["training"]["sft"] if "held_out" in line]
    found = [f"divergence from the teacher {apart[0]:.3f} -> {apart[-1]:.3f}"] if apart else []
    return "\n".join([*found, *([f"held-out loss {measured[-1]:.4f}"] if measured else [])])


def ranking_details(facts: Facts, steps: list[dict[str, Any]]) -> str:
    """How often a reward model ranks held-out pairs as they were judged, with the interval."""
    shares = shares_right(facts["summaries"].get("reward", {}))
    return f"ranked right {shares}" if shares else ""


def shares_right(summary: dict[str, Any]) -> str:
    """The shares of positive margins, as `95% of 22 trained, 80% of 5 held out (38% to 96%)` (objectives/margins.py).

    Empty where none were measured, as in outputs of earlier versions.
    """
    right = summary.get("margins", {}).get("right", {})
    shown = [
        f"{found['value']:.0%} of {found['units']:,} {part.replace('_', ' ')}"
        + ("" if part == "trained" else f" ({found['low']:.0%} to {found['high']:.0%})")
        for part, found in sorted(right.items(), reverse=True)
    ]
    return ", ".join(shown)


def spikes(facts: Facts) -> Section | None:
    """Steps whose update was left out for their loss, with the documents that had the worst of it."""
    parts = [skipped_step(stage, step) for stage, found in facts.get("spikes", {}).items() for step in found]
    return Section("Loss spikes", parts) if parts else None


def skipped_step(stage: str, step: Mapping[str, Any]) -> Part:
    """A skipped step with its attributed documents, as train/loop/spike_report.py wrote them."""
    suspects = set(step["suspects"])
    rows = [
        (
            _loss(one["loss"]),
            " ".join(str(one[key]) for key in ("source", "id") if one.get(key))
            + (f" · {origin}" if (origin := describe_origin(one)) else ""),
            " ".join(str(one.get("text") or "").split())[:EXCERPT],
        )
        for one in step["documents"]
        if one["id"] in suspects
    ][:MOST_ATTRIBUTED]
    title = (
        f"{stage}, step {step['step']}: loss {_loss(step['loss'])}, where {_loss(step.get('mean'))} was "
        f"usual; {len(suspects)} attributed document{'s' * (len(suspects) != 1)}"
    )
    return Details(title, [Listing("Attributed documents: loss, source, id, where from, how judged", rows)])


def _loss(value: float | None) -> str:
    return "NaN or Inf" if value is None else f"{value:.3f}"


SHARES = (
    (
        "share of answers",
        "Answers whose group has one and the same reward teach nothing.",
        {"pass_rate": "passed", "frac_reward_zero_std": "group has one reward", "completions/clipped_ratio": "cut"},
    ),
    (
        "share of prompts",
        "Prompts that were asked, by the share of answers that passed the last time.",
        {"curriculum/too_hard": "too hard", "curriculum/wanted": "wanted", "curriculum/too_easy": "too easy"},
    ),
    ("calls per answer", "Calls of tools.", {"tools/call_frequency": "calls"}),
    ("share of calls", "Calls that were answered with an error.", {"tools/failure_frequency": "errors"}),
)
"""Pictures of reinforcement besides: what is counted, what is said of it, and the keys of the record."""


def reinforcement(facts: Facts, name: str = "rl") -> Section | None:
    """What rewards became, at what distance from the start, and answers before and after; None without any."""
    summary, lines = facts["summaries"].get("rl", {}), facts["training"].get("rl", [])
    rewards = reward_points(lines)
    if not summary or not rewards:
        return None
    drift = points_of(lines, {"kl": "divergence from the start, nats per token", "entropy": "entropy, nats per token"})
    lengths = points_of(lines, {"completions/mean_length": "tokens per answer"})
    return Section(
        "Reinforcement learning",
        [
            Table(["reward", "first step", "last step"], reward_rows(summary), {1, 2}),
            Note(held_out_note(summary)),
            Figure(curves(rewards, "step", "reward"), "Mean rewards of the answers of each logged step."),
            Figure(curves(drift, "step", "nats per token"), "How far the policy moved, and how free its choice is."),
            Figure(curves(lengths, "step", "tokens"), "Length of answers."),
            *(
                Figure(curves(points, "step", what), told)
                for what, told, wanted in SHARES
                if (points := points_of(lines, wanted))
            ),
            *(sample_of(one) for one in summary.get("samples", [])),
        ],
    )


def reward_points(lines: Sequence[Mapping[str, Any]]) -> Points:
    """(step, value) of the whole reward, and of each where there are several."""
    names = [key for key in next((line for line in lines if REWARD in line), {}) if key.startswith(OF_REWARDS)]
    wanted = {REWARD: "all" if len(names) > 1 else REWARD}
    if len(names) > 1:
        wanted |= {name: name.removeprefix(OF_REWARDS) for name in names}
    return points_of(lines, wanted)


def points_of(lines: Sequence[Mapping[str, Any]], wanted: Mapping[str, str]) -> Points:
    """(step, value) of some keys of a record, by what they are to be called; those that it has."""
    found = {label: [(line["step"], line[key]) for line in lines if key in line] for key, label in wanted.items()}
    return {label: points for label, points in found.items() if points}


def reward_rows(summary: Mapping[str, Any]) -> list[list[Any]]:
    """Each reward, in the first and in the last line of the record."""
    first, last = summary.get("first_rewards", {}), summary.get("last_rewards", {})
    return [
        ["all, weighted" if key == REWARD else key.removeprefix(OF_REWARDS), f"{value:.3f}", f"{last[key]:.3f}"]
        for key, value in first.items()
    ]


def held_out_note(summary: Mapping[str, Any]) -> str:
    """What became of the likeliest answers to prompts that were not trained on."""
    found = summary.get("held_out")
    how = f"{summary['algorithm'].upper()} from the model of {summary['started_from']}"
    if found is None:
        return f"{how}; no prompts were held out."
    gain = found["difference"]
    return (
        f"{how}. Reward of the likeliest answers to {summary['held_out_prompts']:,} held-out prompts: "
        f"{found['reward_before']:.3f} before, {found['reward']:.3f} after; a gain of {gain['value']:+.3f} "
        f"({gain['low']:+.3f} to {gain['high']:+.3f})."
    )


def sample_of(one: Mapping[str, Any]) -> Part:
    """A held-out prompt with its answers before and after."""
    parts: list[Part] = []
    for when, reward in (("before", "reward_before"), ("after", "reward")):
        parts += [Note(f"{when}: reward {one[reward]:.3f}"), Text([(str(one[when])[:EXCERPT], "")])]
    return Details(" ".join(str(one["prompt"]).split())[:EXCERPT], parts)


def reinforcement_details(facts: Facts, steps: Sequence[Mapping[str, Any]]) -> str:
    """Rewards at both ends, in training and on held-out prompts, for a line of the summary."""
    rewarded = [line[REWARD] for line in steps if REWARD in line]
    found = facts["summaries"].get("rl", {}).get("held_out")
    trained = f"reward {rewarded[0]:.3f} -> {rewarded[-1]:.3f}" if rewarded else ""
    return trained if found is None else (f"{trained}\nheld out {found['reward_before']:.3f} -> {found['reward']:.3f}")

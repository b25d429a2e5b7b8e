"""The report's part on reinforcement learning: what rewards became, at what distance, and answers before and after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from gristmill.flows.facts import Facts
from gristmill.flows.report.html import details, figure, table

REWARD, OF_REWARDS = "reward", "rewards/"
EXCERPT = 300
"""Characters of a prompt or an answer."""
Points = dict[str, list[tuple[float, float]]]


def reinforcement(facts: Facts) -> str:
    """The section, or nothing where no model was reinforced."""
    from gristmill.flows.report.pictures import curves

    summary, lines = facts["summaries"].get("rl", {}), facts["training"].get("rl", [])
    rewards = reward_points(lines)
    if not summary or not rewards:
        return ""
    drift = points_of(lines, {"kl": "divergence from the start, nats per token", "entropy": "entropy, nats per token"})
    lengths = points_of(lines, {"completions/mean_length": "tokens per answer"})
    return ("<h2>What was learned from rewards</h2>"
            + table(["reward", "first step", "last step"], reward_rows(summary), {1, 2})
            + f'<p class="note">{escape(held_out_note(summary))}</p>'
            + figure(curves(rewards, "step", "reward"), "Mean rewards of the answers of each logged step.")
            + figure(curves(drift, "step", "nats per token"), "How far the policy moved, and how free its choice is.")
            + figure(curves(lengths, "step", "tokens"), "Length of answers.")
            + "".join(sample_of(one) for one in summary.get("samples", [])))


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
    return [["all, weighted" if key == REWARD else key.removeprefix(OF_REWARDS), f"{value:.3f}", f"{last[key]:.3f}"]
            for key, value in first.items()]


def held_out_note(summary: Mapping[str, Any]) -> str:
    """What became of the likeliest answers to prompts that were not trained on."""
    found = summary.get("held_out")
    how = f"{summary['algorithm'].upper()} from the model of {summary['started_from']}"
    if found is None:
        return f"{how}; no prompts were held out."
    gain = found["difference"]
    return (f"{how}. Reward of the likeliest answers to {summary['held_out_prompts']:,} held-out prompts: "
            f"{found['reward_before']:.3f} before, {found['reward']:.3f} after; a gain of {gain['value']:+.3f} "
            f"({gain['low']:+.3f} to {gain['high']:+.3f}).")


def sample_of(one: Mapping[str, Any]) -> str:
    """A held-out prompt with its answers before and after."""
    prompt = " ".join(str(one["prompt"]).split())[:EXCERPT]
    answers = "".join(f'<p class="note">{when}: reward {one[key]:.3f}</p><pre>{escape(str(one[when])[:EXCERPT])}</pre>'
                      for when, key in (("before", "reward_before"), ("after", "reward")))
    return details(prompt, answers)


def reinforcement_details(facts: Facts, steps: Sequence[Mapping[str, Any]]) -> str:
    """Rewards at both ends, in training and on held-out prompts, for a line of the summary."""
    rewarded = [line[REWARD] for line in steps if REWARD in line]
    found = facts["summaries"].get("rl", {}).get("held_out")
    trained = f"reward {rewarded[0]:.3f} -> {rewarded[-1]:.3f}" if rewarded else ""
    return trained if found is None else (
        f"{trained}\nheld out {found['reward_before']:.3f} -> {found['reward']:.3f}")

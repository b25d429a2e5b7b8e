"""What the report says of tuning: what a teacher gave, reward models, what preferences moved, and the export."""

from __future__ import annotations

from html import escape
from typing import Any

from gristmill.flows.facts import Facts
from gristmill.flows.report.html import details, figure, table


def distillation(facts: Facts) -> str:
    """What a fine-tuning learnt from its teacher, and how much of the teacher was kept."""
    summary = facts["summaries"].get("teacher")
    lines = [line for line in facts["training"].get("sft", []) if "divergence" in line]
    if summary is None:
        return ""
    from gristmill.flows.report.pictures import curves

    rows = [["tokens of the teacher", f"{summary['tokens']:,}"], ["ids kept per token", f"{summary['top_k']}"],
            ["mass of the others", f"{summary['rest_mass']:.3%}"], ["temperature", f"{summary['temperature']:g}"],
            ["the teacher's own loss on the labels", f"{summary['loss']:.4f}"]]
    for name, key in (("student's loss on the labels", "label_loss"), ("divergence from the teacher", "divergence")):
        rows += [[f"{name}, {when}", f"{line[key]:.4f}"] for when, line in (("first", lines[0]), ("last", lines[-1]))
                 ] if lines else []
    apart = {"divergence": [(line["step"], line["divergence"]) for line in lines]}
    return ("<h2>Distillation</h2>" + table(["measured", "value"], rows, {1})
            + '<p class="note">Losses and divergences are nats per trained token.</p>'
            + (figure(curves(apart, "step", "nats per token"), "sft: divergence from the teacher")
               if len(lines) > 1 else ""))


def reward_model(facts: Facts) -> str:
    """How well a reward model ranks pairs that it has not seen, beside the length of answers."""
    summary = facts["summaries"].get("reward")
    if summary is None:
        return ""
    from gristmill.flows.report.pictures import curves

    found, lines = summary["held_out"], facts["training"].get("reward", [])
    measured = {name: [(line["step"], line[f"scores/{name}"]) for line in lines if f"scores/{name}" in line]
                for name in ("chosen", "rejected")}
    rows = [["pairs trained on", f"{summary['training_pairs']:,}"],
            ["pairs held out", f"{summary['held_out_pairs']:,}"], ["pairs too long", f"{summary['too_long_pairs']:,}"],
            ["chosen answer scores higher, held out", share(found["accuracy"])],
            ["chosen answer is the longer one, held out", share(found["longer_chosen"])],
            ["mean difference of scores, held out", number(found["margin"])],
            ["correlation of score and length", number(found["length_correlation"])],
            ["mean and deviation of scores", f"{number(found['mean'])}, {number(found['deviation'])}"]]
    return ("<h2>Reward model</h2>" + table(["measured", "value"], rows, {1})
            + '<p class="note">In brackets: Wilson\'s 95 % intervals over pairs. A model that ranks no better than the '
              "length of answers does has learnt their length.</p>"
            + (figure(curves(measured, "step", "score"), "reward: mean scores of answers")
               if len(measured["chosen"]) > 1 else "") + unlearned(summary.get("margins")))


def preference_effects(facts: Facts) -> str:
    """Where preference optimisation's margin came from: answers against the reference, and the alarm if it rang."""
    lines = [line for line in facts["training"].get("dpo", []) if "fell/chosen" in line and "fell/rejected" in line]
    if not lines:
        return ""
    from gristmill.flows.report.pictures import curves

    summary = facts["summaries"].get("dpo", {})
    alarm = summary.get("chosen_decline", {}).get("alarm_step")
    rows = [[answer, f"{lines[-1][f'fell/{answer}']:.1%}", f"{lines[-1][f'log_ratio/{answer}']:+.4f}",
             f"{lines[-1][f'rewards/{answer}']:+.4f}"] for answer in ("chosen", "rejected")]
    ratios = {answer: [(line["step"], line[f"log_ratio/{answer}"]) for line in lines]
              for answer in ("chosen", "rejected")}
    note = ("Chosen answers did not keep falling." if alarm is None else
            f"Alarm at step {alarm}: the margin grew although most chosen answers became less likely.")
    held_out = summary.get("held_out", {})
    if held_out.get("reward_accuracy") is not None:
        note += (f" On {summary['held_out_pairs']:,} held-out pairs the chosen answer gained more in "
                 f"{with_range(held_out, 'reward_accuracy')}, and is the likelier one in "
                 f"{with_range(held_out, 'chosen_more_likely')}, {held_out['chosen_more_likely_before']:.1%} before.")
    if held_out.get("ranked_right") is not None:
        counts = summary["held_out_answers"]
        note += (f" Of {counts['desirable']:,} desirable and {counts['undesirable']:,} other held-out answers a "
                 f"desirable one gained more than another in {with_range(held_out, 'ranked_right')} of all cases.")
    return ("<h2>What preference optimisation moved</h2>"
            + table(["answers", "less likely than under the reference", "nats per token against it", "reward"], rows,
                    {1, 2, 3})
            + f'<p class="note">Loss {escape(str(summary.get("objective", "")))}; means over pairs at the last logged '
              f"step. {escape(note)}</p>"
            + (figure(curves(ratios, "step", "nats per token"), "dpo: log-probability against the reference")
               if len(lines) > 1 else "") + unlearned(summary.get("margins")))


def unlearned(margins: dict[str, Any] | None) -> str:
    """Set by set how many margins are not positive in the end, and what has the worst ones."""
    if margins is None:
        return ""
    sets = [[one["name"], part.replace("_", " "), f"{found['measured']:,}", f"{found['wrong']:.1%}",
             f"{found['median']:+.3f}"] for one in margins["sets"] for part, found in one.items() if part != "name"]
    worst = [[one["id"][:16], one["set"], "held out" if one["held_out"] else "trained", f"{one['margin']:+.3f}",
              one.get("prompt_text", ""), *answers_of(one)] for one in margins["worst"]]
    return (table(["set", "pairs", "measured", "margin not positive", "median margin"], sets, {2, 3, 4})
            + details("The worst margins in the end", table(
                ["id", "set", "", "margin", "prompt", "preferred", "not preferred"], worst, {3})
                + '<p class="note">What is still ranked wrong was labelled the wrong way round, contradicts other '
                  "pairs, or is hard; <code>gristmill trace --document ID</code> says which steps read it, and "
                  "<code>margins.parquet</code> has all that were measured.</p>"))


def answers_of(one: dict[str, Any]) -> list[str]:
    """The answer that was preferred and the one that was not, of a line of the worst margins; of a single answer the
    other is empty."""
    if "completion_text" not in one:
        return [one.get("chosen_text", ""), one.get("rejected_text", "")]
    return [one["completion_text"], ""] if one["rejected"] is None else ["", one["completion_text"]]


def rounding(facts: Facts) -> str:
    """What rounding the exported matrices to 8 bits costs."""
    cost = facts["summaries"].get("export", {}).get("int8")
    if cost is None:
        return ""
    if cost["growth"] is None:
        return ('<h2>Export in 8 bits</h2><p class="note">The mixture holds no rows out, so what rounding costs is not '
                "measured.</p>")
    return "<h2>Export in 8 bits</h2>" + table(
        ["held-out rows", "perplexity before", "perplexity rounded", "growth"],
        [[f"{cost['rows']:,}", f"{cost['perplexity_before']:.4f}", f"{cost['perplexity']:.4f}",
          f"{cost['growth']:+.3%}"]], {0, 1, 2, 3})


def share(found: dict[str, Any] | None) -> str:
    """A share of pairs with its interval, as `91.2% [84.0%, 95.4%] of 96`."""
    return "" if found is None else (
        f"{found['value']:.1%} [{found['low']:.1%}, {found['high']:.1%}] of {found['units']:,}")


def with_range(found: dict[str, Any], name: str) -> str:
    """A share by its name, with its interval where it was kept beside it."""
    interval = found.get(f"{name}_interval")
    return f"{found[name]:.1%}" + ("" if interval is None else f" [{interval['low']:.1%}, {interval['high']:.1%}]")


def number(value: float | None) -> str:
    """A number, or nothing where none was measured."""
    return "" if value is None else f"{value:.3f}"

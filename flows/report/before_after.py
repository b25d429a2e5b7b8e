"""Effect of each training, measured on data that it did not train on: a line per
training, before and after.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeAlias

from gristmill.flows.pages.page_elements import Note, Part, table
from gristmill.flows.report.report_facts import Facts
from gristmill.flows.report.stage_summaries import (
    HeldOut,
    Interval,
    MetricsLine,
    TrainingSummary,
)

EFFECT_COLUMNS = {"stage": "", "held out": "", "before": ">", "after": ">", "": ""}
Effect: TypeAlias = tuple[str, str, str, str, str]
"""Cells below EFFECT_COLUMNS: the training, the held-out data, both values, and a
verdict.
"""
NOTE = (
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
    batch = {
        source: first.get("sources", {}).get(source, first).get("bits_per_byte")
        for source in validation
    }
    merged = {
        source: measures.bits_per_byte
        for source, measures in facts.trained("merge").sources.items()
    }
    rows = [
        *_text("pretrain", batch, validation),
        # An average of checkpoints replaces the end, also if it is worse.
        *_text(
            "merge", validation, {source: merged.get(source) for source in validation}
        ),
    ]
    for stage in ("sft", "reward", "dpo", "rl"):
        if stage in facts.training:
            rows += _tuning(stage, facts.trained(stage))
    return rows


def effect_parts(facts: Facts) -> list[Part]:
    """The effects as a table of the report, with a note."""
    rows = effect_rows(facts)
    return [table(EFFECT_COLUMNS, rows), Note(NOTE)] if rows else []


def _text(
    stage: str, before: Mapping[str, float | None], after: Mapping[str, float | None]
) -> Iterator[Effect]:
    """Bits per byte of the text of each source; lower is better."""
    for source, value in after.items():
        yield from _loss(stage, f"text of {source}", before[source], value)


def _loss(
    stage: str, held_out: str, before: float | None, after: float | None
) -> Iterator[Effect]:
    if before is not None and after is not None:
        change = "better" if after < before else "worse"
        verdict = "the same" if after == before else change
        yield stage, held_out, f"{before:.3f}", f"{after:.3f}", verdict


def _tuning(stage: str, summary: TrainingSummary) -> Iterator[Effect]:
    before, held_out = (
        summary.held_out_before or HeldOut(),
        summary.held_out or HeldOut(),
    )
    if stage == "sft":
        yield from _loss(stage, "answers", before.loss, held_out.loss)
    accuracy = held_out.reward_accuracy_interval
    if stage == "reward":
        accuracy = summary.margins.right.get("held_out") if summary.margins else None
    if accuracy is not None and stage in ("reward", "dpo"):
        share = f"{accuracy.value:.0%}"
        verdict = _against_chance(accuracy)
        yield stage, f"{accuracy.units:,} pairs", "50%", share, verdict
    gain = held_out.difference
    if gain is not None and gain.low is not None and gain.high is not None:
        yield (
            stage,
            f"rewards of {summary.held_out_prompts:,} prompts",
            f"{held_out.reward_before:.3f}",
            f"{held_out.reward:.3f}",
            _gain(gain.low, gain.high),
        )


def _gain(low: float, high: float) -> str:
    if low == high == 0:
        return "the same"
    if low > 0:
        return "better"
    return "worse" if high < 0 else f"within noise ({low:+.3f} to {high:+.3f})"


def _against_chance(accuracy: Interval) -> str:
    if accuracy.low is None or accuracy.high is None:
        return ""
    bounds = f"({accuracy.low:.0%} to {accuracy.high:.0%})"
    if accuracy.low > 0.5:
        return f"above chance {bounds}"
    verdict = "below chance" if accuracy.high < 0.5 else "not to be told from chance"
    return f"{verdict} {bounds}"

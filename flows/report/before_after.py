"""Effect of each training, measured on data that it did not train on: a line per
training, before and after.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from gristmill.flows.pages.page_elements import Note, Part, Table
from gristmill.flows.report.report_facts import Facts

EFFECT_HEADINGS = ("stage", "held out", "before", "after", "")
Effect: TypeAlias = tuple[str, str, str, str, str]
"""Cells below EFFECT_HEADINGS: the training, the held-out data, both values, and a
verdict.
"""
NOTE = (
    "Text: bits per byte, before training those of the first batch. Answers: loss per "
    "token of held-out conversations. Pairs: how often the chosen answer gains more "
    "than the rejected one, where a coin has 50 %, with its 95 % interval."
)


def effect_rows(facts: Facts) -> list[Effect]:
    """The effects of all trainings of a run."""
    summaries = facts.get("summaries", {})
    pretraining = facts["training"].get("pretrain", ())
    rows = [*_text(pretraining), *_merged(pretraining, summaries.get("merge", {}))]
    for stage, measure in (
        ("sft", _answers),
        ("reward", _ranking),
        ("dpo", _pairs),
        ("rl", _rewards),
    ):
        if stage in facts["training"]:
            rows += measure(summaries.get(stage, {}))
    return rows


def effect_parts(facts: Facts) -> list[Part]:
    """The effects as a table of the report, with a note."""
    rows = effect_rows(facts)
    return (
        [Table(list(EFFECT_HEADINGS), [list(row) for row in rows], {2, 3}), Note(NOTE)]
        if rows
        else []
    )


def _text(record: Sequence[Mapping[str, Any]]) -> Iterator[Effect]:
    first: Mapping[str, Any] = next((line for line in record if "loss" in line), {})
    for source, values in _last_validation(record).items():
        before = first.get("sources", {}).get(source, first).get("bits_per_byte")
        if before is not None and "bits_per_byte" in values:
            yield _text_effect("pretrain", source, before, values["bits_per_byte"])


def _last_validation(record: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The last validation of a training: source -> its measurements."""
    return next(
        (line["validation"] for line in reversed(record) if "validation" in line), {}
    )


def _merged(
    record: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]
) -> Iterator[Effect]:
    """An average of checkpoints replaces the end of the training, also if it is
    worse.
    """
    for source, values in _last_validation(record).items():
        measured = summary.get("sources", {}).get(source, {})
        if "bits_per_byte" in values and "bits_per_byte" in measured:
            yield _text_effect(
                "merge", source, values["bits_per_byte"], measured["bits_per_byte"]
            )


def _text_effect(stage: str, source: str, before: float, after: float) -> Effect:
    return (
        stage,
        f"text of {source}",
        f"{before:.3f}",
        f"{after:.3f}",
        _change(before, after),
    )


def _answers(summary: Mapping[str, Any]) -> Iterator[Effect]:
    before, after = (
        (summary.get(key) or {}).get("loss") for key in ("held_out_before", "held_out")
    )
    if before is not None and after is not None:
        yield "sft", "answers", f"{before:.3f}", f"{after:.3f}", _change(before, after)


def _ranking(summary: Mapping[str, Any]) -> Iterator[Effect]:
    yield from _pairs_effect(
        "reward", summary.get("margins", {}).get("right", {}).get("held_out")
    )


def _pairs(summary: Mapping[str, Any]) -> Iterator[Effect]:
    yield from _pairs_effect(
        "dpo", (summary.get("held_out") or {}).get("reward_accuracy_interval")
    )


def _pairs_effect(stage: str, accuracy: Mapping[str, Any] | None) -> Iterator[Effect]:
    if accuracy:
        yield (
            stage,
            f"{accuracy['units']:,} pairs",
            "50%",
            f"{accuracy['value']:.0%}",
            _against_chance(accuracy),
        )


def _rewards(summary: Mapping[str, Any]) -> Iterator[Effect]:
    rewards = summary.get("held_out")
    if not rewards:
        return
    low, high = rewards["difference"]["low"], rewards["difference"]["high"]
    if low == high == 0:
        verdict = "the same"
    elif low > 0:
        verdict = "better"
    elif high < 0:
        verdict = "worse"
    else:
        verdict = f"within noise ({low:+.3f} to {high:+.3f})"
    prompts = f"rewards of {summary['held_out_prompts']:,} prompts"
    yield (
        "rl",
        prompts,
        f"{rewards['reward_before']:.3f}",
        f"{rewards['reward']:.3f}",
        verdict,
    )


def _change(before: float, after: float) -> str:
    if after == before:
        return "the same"
    return "better" if after < before else "worse"


def _against_chance(accuracy: Mapping[str, Any]) -> str:
    if "low" not in accuracy:
        return ""
    bounds = f"({accuracy['low']:.0%} to {accuracy['high']:.0%})"
    if accuracy["low"] > 0.5:
        return f"above chance {bounds}"
    return (
        f"below chance {bounds}"
        if accuracy["high"] < 0.5
        else f"not to be told from chance {bounds}"
    )

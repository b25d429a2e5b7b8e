"""What each training changed, measured on what it did not train on: a line per training, before and after."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gristmill.flows.report.page_elements import Note, Part, Table
from gristmill.flows.report.report_facts import Facts

EFFECT_HEADINGS = ("stage", "held out", "before", "after", "")
NOTE = (
    "Text: bits per byte, before training those of the first batch. Answers: loss per token of held-out "
    "conversations. Pairs: how often the chosen answer gains more than the rejected one, where a coin has 50 %, "
    "with its 95 % interval."
)


def effect_rows(facts: Facts) -> list[tuple[str, str, str, str, str]]:
    """Rows of EFFECT_HEADINGS: the training, what of held-out data was measured, both values, and what they say."""
    summaries = facts.get("summaries", {})
    found = list(_text(facts["training"].get("pretrain", ())))
    found += _merged(facts["training"].get("pretrain", ()), summaries.get("merge", {}))
    for stage, read in (("sft", _answers), ("reward", _ranking), ("dpo", _pairs), ("rl", _rewards)):
        if stage in facts["training"]:
            found += read(summaries.get(stage, {}))
    return found


def effect_parts(facts: Facts) -> list[Part]:
    """The same as a table of the report, and how to read it."""
    rows = effect_rows(facts)
    return [Table(list(EFFECT_HEADINGS), [list(row) for row in rows], {2, 3}), Note(NOTE)] if rows else []


def _text(record: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str, str, str, str]]:
    first: Mapping[str, Any] = next((line for line in record if "loss" in line), {})
    for source, values in _held_out(record).items():
        before = first.get("sources", {}).get(source, first).get("bits_per_byte")
        if before is not None and "bits_per_byte" in values:
            after = values["bits_per_byte"]
            yield ("pretrain", f"text of {source}", f"{before:.3f}", f"{after:.3f}", _change(before, after))


def _held_out(record: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """What the last validation of a training has found: source -> its measurements."""
    return next((line["validation"] for line in reversed(record) if "validation" in line), {})


def _merged(
    record: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]
) -> Iterator[tuple[str, str, str, str, str]]:
    """An average of checkpoints takes the place of the training's end, also where it is the worse."""
    after = summary.get("sources", {})
    for source, values in _held_out(record).items():
        measured = after.get(source, {})
        if "bits_per_byte" in values and "bits_per_byte" in measured:
            before, merged = values["bits_per_byte"], measured["bits_per_byte"]
            yield "merge", f"text of {source}", f"{before:.3f}", f"{merged:.3f}", _change(before, merged)


def _answers(summary: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str, str]]:
    before, after = ((summary.get(key) or {}).get("loss") for key in ("held_out_before", "held_out"))
    if before is not None and after is not None:
        yield "sft", "answers", f"{before:.3f}", f"{after:.3f}", _change(before, after)


def _ranking(summary: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str, str]]:
    found = summary.get("margins", {}).get("right", {}).get("held_out")
    if found:
        yield "reward", f"{found['units']:,} pairs", "50%", f"{found['value']:.0%}", _against_chance(found)


def _pairs(summary: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str, str]]:
    found = (summary.get("held_out") or {}).get("reward_accuracy_interval")
    if found:
        yield "dpo", f"{found['units']:,} pairs", "50%", f"{found['value']:.0%}", _against_chance(found)


def _rewards(summary: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str, str]]:
    found = summary.get("held_out")
    if found:
        gain = found["difference"]
        said = (
            "the same"
            if gain["low"] == gain["high"] == 0
            else "better"
            if gain["low"] > 0
            else "worse"
            if gain["high"] < 0
            else f"within noise ({gain['low']:+.3f} to {gain['high']:+.3f})"
        )
        yield (
            "rl",
            f"rewards of {summary['held_out_prompts']:,} prompts",
            f"{found['reward_before']:.3f}",
            f"{found['reward']:.3f}",
            said,
        )


def _change(before: float, after: float) -> str:
    return "better" if after < before else "worse" if after > before else "the same"


def _against_chance(found: Mapping[str, Any]) -> str:
    if "low" not in found:
        return ""
    of = f"({found['low']:.0%} to {found['high']:.0%})"
    if found["low"] > 0.5:
        return f"above chance {of}"
    return f"below chance {of}" if found["high"] < 0.5 else f"not to be told from chance {of}"

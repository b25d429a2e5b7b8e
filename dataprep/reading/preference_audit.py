"""What is wrong with preference data before anything is trained on it.

Duplicates weigh a pair twice; contradictions (the same two answers, preferred the other way round) cancel out; and
where longer answers win, length is what is learned (Singhal et al. 2023, "A Long Way to Go"). Texts are compared
without case and with blanks made equal.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gristmill.dataprep.reading.conversations_messages import said

Example = Mapping[str, Any]
SAME = "chosen and rejected are the same"
"""The reason that such records are refused for, see conversations_preferences."""
LARGEST_BIAS = 0.2
"""How far the share of pairs whose longer answer is preferred may be from a half without a warning. Our own choice:
people's preferences are not free of it either (0.446 in the test split of HH-RLHF's harmless half)."""


def audit(examples: Sequence[Example]) -> dict[str, Any]:
    """Measure a set of pairs.

    Args:
        examples: `prompt`, `chosen`, `rejected`, lists of messages each.

    Returns:
        `pairs`; `duplicates`: pairs beyond the first with the same prompt and answers; `contradictions`: pairs whose
        opposite is there too; `prompts`: distinct ones; `longer_chosen`: share, among pairs whose answers differ in
        length, in which the longer one is preferred (None without any); `mean_characters` of both answers;
        `near_identical`: pairs whose answers differ in case and blanks alone.
    """
    keys = [tuple(normalised(all_said(one[part])) for part in ("prompt", "chosen", "rejected")) for one in examples]
    lengths = np.array([[len(all_said(one[part])) for part in ("chosen", "rejected")] for one in examples],
                       dtype=np.int64).reshape(-1, 2)
    known = set(keys)
    differ = lengths[:, 0] != lengths[:, 1]
    longer = float((lengths[differ, 0] > lengths[differ, 1]).mean()) if differ.any() else None
    return {
        "pairs": len(keys), "prompts": len({prompt for prompt, _, _ in keys}),
        "duplicates": sum(number - 1 for number in Counter(keys).values()),
        "contradictions": sum((prompt, rejected, chosen) in known and chosen != rejected
                              for prompt, chosen, rejected in keys),
        "near_identical": sum(chosen == rejected for _, chosen, rejected in keys),
        "longer_chosen": longer,
        "mean_characters": {name: float(lengths[:, column].mean()) if len(keys) else 0.0
                            for column, name in enumerate(("chosen", "rejected"))},
    }


def warnings_of(name: str, found: Mapping[str, Any]) -> list[str]:
    """What a person should look at, a sentence each."""
    pairs, said_of = found["pairs"], []
    for key, what in (("duplicates", "repeat another pair, which counts twice then"),
                      ("contradictions", "have their opposite in the set: both are trained on and cancel out"),
                      ("near_identical", "have two answers that differ in case and blanks alone"),
                      ("same_answers", "had the same answer twice and were refused")):
        if number := found.get(key):
            said_of.append(f"{name}: {number:,} of {pairs:,} pairs {what}")
    for of_set, leaked in (found.get("leaks") or {}).items():
        if leaked["texts"]:
            said_of.append(f"{name}: {leaked['texts']:,} of {pairs:,} pairs hold an item of the evaluation set "
                           f"{of_set} in prompt or chosen answer ({leaked['leaked']:,} of its {leaked['items']:,} "
                           "items): what is measured there will say little; drop them with dpo.prepare: "
                           "[decontaminate: ...]")
    longer = found["longer_chosen"]
    if longer is not None and abs(longer - 0.5) > LARGEST_BIAS:
        said_of.append(f"{name}: the {'longer' if longer > 0.5 else 'shorter'} answer is preferred in "
                       f"{max(longer, 1 - longer):.0%} of the pairs: length is what will be learned; compare with "
                       "dpo.loss sigmoid_norm or simpo, which take means over tokens")
    return said_of


def all_said(messages: Sequence[Mapping[str, Any]]) -> str:
    """What messages say and call tools with, one after the other."""
    return "\n".join(part for message in messages for part in said(message))


def normalised(text: str) -> str:
    """A text without case, its runs of blanks made one."""
    return re.sub(r"\s+", " ", text).strip().casefold()

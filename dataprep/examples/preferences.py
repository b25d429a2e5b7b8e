"""Preferences from all input forms, as `prompt`, `chosen` and `rejected`, and an audit
of a set of pairs.

    pairs         prompt, chosen and rejected, texts or messages; answers may repeat the
                  prompt's messages, and without a prompt it is their common beginning.
                  The prompt may be under conversations or messages, or be an
                  instruction with its input, and an answer may be one message
                  (LLaMA-Factory); whole dialogues may be under chosen_messages and
                  rejected_messages
    transcripts   chosen and rejected, whole dialogues as text with "\n\nHuman:" and
                  "\n\nAssistant:" (HH-RLHF)
    scored        prompt (or instruction) and several answers with scores: completions,
                  responses or answers, a list of objects with a score each, or of texts
                  beside a list `scores`; the best is chosen, the worst rejected (the
                  first of equal ones)

Tool descriptions of a row (tools) are part of its prompt. Unless a manifest names the
form, a row's keys determine it.

Duplicates give a pair twice the weight; contradictions (the same two answers with the
preference reversed) cancel out; if longer answers win, length is learned (Singhal et
al. 2023, "A Long Way to Go"). Texts are compared without case and with whitespace
collapsed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gristmill.dataprep.examples.conversations import (
    Example,
    Message,
    Role,
    Row,
    check_answered,
    first_key,
    instructed,
    refuse_media,
    said,
    text,
    turns,
    with_system,
    with_tools,
)

ANSWER_LISTS = ("completions", "responses", "answers")
ANSWER_TEXTS = ("response", "text", "content", "answer", "completion")
DIALOGUES = ("messages", "conversations")
"""Keys of a row's messages."""
WHOLE = {"chosen": "chosen_messages", "rejected": "rejected_messages"}
"""Keys of the two dialogues in LLaMA-Factory's newer form."""
SCORES = ("score", "overall_score", "rating", "reward")
"""Keys of an answer's score in UltraFeedback, Nectar-like sets and reward models; the
first one present counts.
"""
_TURN = re.compile(r"\n\n(Human|Assistant):")
_SPEAKERS: Mapping[str, Role] = {"Human": "user", "Assistant": "assistant"}
SAME = "chosen and rejected are the same"
"""Reason for quarantining such records."""


def dpo_example(row: Row, form: str = "auto") -> Example:
    """Convert a row to a preference pair (without `id`).

    Raises:
        ValueError: there is no such form, or the record's form is unknown, or is not
            `form`; the message says why.
    """
    refuse_media("the record", row)
    if form == "auto":
        form = preference_form_of(row)
    if form not in DPO_FORMS:
        raise ValueError(f"there is no form {form!r}; there are {', '.join(DPO_FORMS)}")
    example = DPO_FORMS[form](row)
    prompt = example["prompt"]
    if not prompt:
        raise ValueError("chosen and rejected begin with no common prompt")
    answers = example["chosen"], example["rejected"]
    for name, answer in zip(WHOLE, answers, strict=True):
        if not answer:
            raise ValueError(f"{name} has only the prompt")
        check_answered("the conversation", prompt + answer)
    if example["chosen"] == example["rejected"]:
        raise ValueError(SAME)
    return with_tools(row, {**example, "prompt": with_system(row, prompt)})


def preference_form_of(row: Row) -> str:
    """Determine the form of a row from its keys.

    Raises:
        ValueError: the keys match no form.
    """
    if any(isinstance(row.get(key), list) for key in ANSWER_LISTS):
        return "scored"
    if all(key in row for key in WHOLE.values()):
        return "pairs"
    missing = [key for key in WHOLE if key not in row]
    if missing:
        absent = missing if _has_prompt_key(row) else ["prompt", *missing]
        raise ValueError(
            f"lacks {', '.join(absent)}; its keys are {', '.join(row) or 'none'}"
        )
    is_text = isinstance(row["chosen"], str) and isinstance(row["rejected"], str)
    return "transcripts" if is_text and not _has_prompt_key(row) else "pairs"


def _has_prompt_key(row: Row) -> bool:
    return first_key(row, ("prompt", "instruction", *DIALOGUES)) is not None


def _pairs(row: Row) -> Example:
    is_whole = "chosen" not in row and WHOLE["chosen"] in row
    keys = tuple(WHOLE.values() if is_whole else WHOLE)
    are_dialogues = all(isinstance(row.get(key), list) for key in keys)
    if "prompt" not in row and (are_dialogues or not _has_prompt_key(row)):
        return _split(*(turns(key, row.get(key), "assistant") for key in keys))
    prompt_key = first_key(row, ("prompt", *DIALOGUES))
    if prompt_key is None and "instruction" in row:
        prompt = instructed(row)
    else:
        prompt_key = prompt_key or "prompt"
        prompt = turns(prompt_key, row.get(prompt_key), "user")
    answers = []
    for key in keys:
        answer = turns(key, row.get(key), "assistant")
        repeats_prompt = answer[: len(prompt)] == prompt
        answers.append(answer[len(prompt) :] if repeats_prompt else answer)
    chosen, rejected = answers
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def _split(chosen: list[Message], rejected: list[Message]) -> Example:
    """Split two dialogues into their common prefix and the two answers; shared
    assistant turns stay in the prompt.
    """
    common = 0
    while (
        common < min(len(chosen), len(rejected)) and chosen[common] == rejected[common]
    ):
        common += 1
    if common == len(chosen) == len(rejected):
        raise ValueError(SAME)
    return {
        "prompt": chosen[:common],
        "chosen": chosen[common:],
        "rejected": rejected[common:],
    }


def _transcripts(row: Row) -> Example:
    dialogues: list[list[Message]] = []
    for key in WHOLE:
        preamble, *parts = _TURN.split(text(key, row.get(key)))
        if preamble.strip() or not parts:
            raise ValueError(
                f"{key} is not a transcript: it must begin with a blank line and Human:"
            )
        messages: list[Message] = []
        speakers = zip(parts[::2], parts[1::2], strict=True)
        for number, (speaker, content) in enumerate(speakers, start=1):
            role = _SPEAKERS[speaker]
            if messages and messages[-1]["role"] == role:
                raise ValueError(
                    f"{key}: turns {number - 1} and {number} are both the {role}'s"
                )
            content = text(f"{key}, turn {number} ({speaker})", content.strip())
            messages.append({"role": role, "content": content})
        dialogues.append(messages)
    return _split(*dialogues)


def _scored(row: Row) -> Example:
    key = next((key for key in ANSWER_LISTS if isinstance(row.get(key), list)), None)
    if key is None:
        raise ValueError(
            f"lacks a list of answers, under one of {', '.join(ANSWER_LISTS)}"
        )
    question = "prompt" if "prompt" in row else "instruction"
    prompt = turns(question, row.get(question), "user")
    answers = []
    for number, answer in enumerate(row[key], start=1):
        if isinstance(answer, dict):
            text_key = first_key(answer, ANSWER_TEXTS)
            if text_key is None:
                raise ValueError(
                    f"{key}, answer {number} has no text, under one of "
                    f"{', '.join(ANSWER_TEXTS)}"
                )
            answer = answer[text_key]
        answers.append(answer)
    raw_scores = row.get("scores")
    if not isinstance(raw_scores, list):
        raw_scores = [
            answer.get(first_key(answer, SCORES)) if isinstance(answer, dict) else None
            for answer in row[key]
        ]
    scores: list[float] = []
    for number, value in enumerate(raw_scores, start=1):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or math.isnan(value):
            raise ValueError(
                f"{key}, answer {number} has no score ({', '.join(SCORES)}, or a list "
                f"scores): {value!r}"
            )
        scores.append(float(value))
    if len(answers) != len(scores):
        raise ValueError(f"{len(answers)} {key}, but {len(scores)} scores")
    if len(set(scores)) < 2:
        raise ValueError(
            f"all {len(scores)} {key} have the same score, so that none is preferred"
        )
    chosen, rejected = (
        turns(f"{key}, answer {place + 1}", answers[place], "assistant")
        for place in (scores.index(max(scores)), scores.index(min(scores)))
    )
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


DPO_FORMS: dict[str, Callable[[Row], Example]] = {
    "pairs": _pairs,
    "transcripts": _transcripts,
    "scored": _scored,
}


LARGEST_BIAS = 0.2
"""Largest distance from a half, without a warning, of the share of pairs whose longer
answer is preferred. Our choice: human preferences are biased too (0.446 in the test
split of HH-RLHF's harmless half).
"""


@dataclass(frozen=True)
class Audit:
    """Defects of a set of preference pairs.

    Attributes:
        pairs: number of pairs.
        prompts: distinct prompts.
        duplicates: pairs after the first with the same prompt and answers.
        contradictions: pairs whose opposite is in the set.
        near_identical: pairs whose answers differ only in case and whitespace.
        longer_chosen: share of pairs in which the longer answer is preferred, with ties
            counted half; None without pairs.
        same_answers: records quarantined because their answers are equal.
        leaks: of each evaluation set its `items`, those that are `leaked`, and the
            `texts` that hold one; None if not searched.
    """

    pairs: int
    prompts: int
    duplicates: int
    contradictions: int
    near_identical: int
    longer_chosen: float | None
    same_answers: int = 0
    leaks: Mapping[str, Mapping[str, int]] | None = None


def audit(
    pairs: Sequence[Example],
    same_answers: int = 0,
    leaks: Mapping[str, Mapping[str, int]] | None = None,
) -> Audit:
    """Measure a set of pairs; `same_answers` and `leaks` are measured elsewhere."""
    texts = [
        [all_said(pair["prompt"]), all_said(pair["chosen"]), all_said(pair["rejected"])]
        for pair in pairs
    ]
    keys = [tuple(map(normalised, pair_texts)) for pair_texts in texts]
    lengths = np.array([list(map(len, answers)) for _, *answers in texts], np.int64)
    lengths = lengths.reshape(-1, 2)
    distinct = set(keys)
    preference = np.sign(lengths[:, 0] - lengths[:, 1])
    return Audit(
        pairs=len(keys),
        prompts=len({prompt for prompt, _, _ in keys}),
        duplicates=len(keys) - len(distinct),
        contradictions=sum(
            (prompt, rejected, chosen) in distinct and chosen != rejected
            for prompt, chosen, rejected in keys
        ),
        near_identical=sum(chosen == rejected for _, chosen, rejected in keys),
        longer_chosen=float((1 + preference).mean() / 2) if keys else None,
        same_answers=same_answers,
        leaks=leaks,
    )


def warnings_of(name: str, audit: Audit) -> list[str]:
    """Warnings about a set, one sentence each."""
    warnings = [
        f"{name}: {number:,} of {audit.pairs:,} pairs {description}"
        for number, description in (
            (audit.duplicates, "repeat another pair, so it counts twice"),
            (
                audit.contradictions,
                "have their opposite in the set: both are trained on and cancel out",
            ),
            (
                audit.near_identical,
                "have two answers that differ in case and blanks alone",
            ),
            (audit.same_answers, "have the same answer twice and are quarantined"),
        )
        if number
    ]
    for evaluation_set, leak in (audit.leaks or {}).items():
        if leak["texts"]:
            warnings.append(
                f"{name}: {leak['texts']:,} of {audit.pairs:,} pairs hold an item of "
                f"the evaluation set {evaluation_set} in prompt or chosen answer "
                f"({leak['leaked']:,} of its {leak['items']:,} items), so that scores "
                "on it are too high; drop them with dpo.prepare: [decontaminate: ...]"
            )
    longer = audit.longer_chosen
    if longer is not None and abs(longer - 0.5) > LARGEST_BIAS:
        warnings.append(
            f"{name}: the {'longer' if longer > 0.5 else 'shorter'} answer is "
            f"preferred in {max(longer, 1 - longer):.0%} of the pairs, ties counted "
            "half: the model will learn length; compare with dpo.loss sigmoid_norm or "
            "simpo, which take means over tokens"
        )
    return warnings


def all_said(messages: Sequence[Message], separator: str = "\n") -> str:
    """Texts and tool calls of messages, joined by newlines."""
    return separator.join(part for message in messages for part in said(message))


def normalised(text: str) -> str:
    """Case-fold a text and collapse its whitespace."""
    return re.sub(r"\s+", " ", text).strip().casefold()

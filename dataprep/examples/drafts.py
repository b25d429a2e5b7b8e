"""Answers on their way to examples: how each was asked for, rewritten, rewarded and compared, and why it was dropped.

Whatever asks gets requests and gives answers in their order, so that nothing here depends on when one comes.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gristmill.dataprep.asking.judge_pairs import in_both_orders, score_of
from gristmill.dataprep.asking.prompt_templates import PromptTemplate
from gristmill.dataprep.asking.prompting import Answer, Message, Request
from gristmill.dataprep.files import canonical_json
from gristmill.dataprep.judges.answer_checks import Answer as Checked
from gristmill.dataprep.judges.answer_checks import own_reward, record_columns, verifier_of
from gristmill.dataprep.seeds import seeded_key
from gristmill.mixtures.reinforcement import ModelReward, OwnReward, name_of
from gristmill.mixtures.steps.asked_model import AskedModel
from gristmill.mixtures.steps.judge import SCORE
from gristmill.mixtures.steps.judge_pairs import Comparison
from gristmill.mixtures.steps.made_examples import AnyReward, JudgeReward

EMPTY, CUT, REPEATED = "empty", "cut", "repeated"
"""Why an answer is dropped: it says nothing, it ended at `max_tokens`, the prompt has the same one already."""
CRITIQUE, REVISION, SCORING = (
    ("prompt", "answer", "principle"),
    ("prompt", "answer", "principle", "critique"),
    ("prompt", "answer", "answer_schema"),
)
"""What templates get."""
MODEL_SCORES = "gristmill.train.reinforcement.rewards:load_answer_scorer"
"""Where the scores of a reward model are. It is named, not imported: what prepares runs without torch, and imports
nothing from above itself, unless a manifest asks for such a reward."""
Ask = Callable[[AskedModel, Sequence[Request | str]], Sequence[Answer]]
"""(who is asked, n requests or why there are none) -> n answers."""


@dataclass(frozen=True)
class Asked:
    """A prompt that is answered.

    Attributes:
        id: as `read_set` gives it.
        messages: the conversation so far.
        parents: ids of what it was made from.
        example: what else its record has: `answer`, the right one, and `columns`.
        licences: of its record, and of what it was made from.
    """

    id: str
    messages: Sequence[Message]
    parents: tuple[str, ...] = ()
    example: Mapping[str, Any] = field(default_factory=dict)
    licences: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The conversation as one text."""
        if len(self.messages) == 1:
            return self.messages[0]["content"]
        return "\n\n".join(f"{message['role']}: {message['content']}" for message in self.messages)

    @property
    def about(self) -> str:
        """Whose answers are forgotten with it."""
        return " ".join((self.id, *self.parents))


@dataclass
class Draft:
    """An answer to a prompt.

    Attributes:
        asked: the prompt.
        number: which of its answers, from 0.
        text: the answer as it is by now.
        first: as it was first given.
        principles: those that it was criticised by.
        rewards: name -> what it was rewarded with.
        reward: their weighted sum.
        dropped: why it is of no use, if it is of none.
        error: why the endpoint gave no answer, if it gave none.
    """

    asked: Asked
    number: int
    text: str = ""
    first: str = ""
    principles: list[str] = field(default_factory=list)
    rewards: dict[str, float] = field(default_factory=dict)
    reward: float = 0.0
    dropped: str | None = None
    error: str | None = None

    @property
    def usable(self) -> bool:
        """Whether it may become an example."""
        return self.dropped is None and self.error is None

    def take(self, answer: Answer, keeps_cut: bool) -> str | None:
        """What a model has written for it; None, with the reason noted, where that is of no use."""
        text = answer.text.strip()
        self.error = answer.error
        if answer.error is None and not text:
            self.dropped = EMPTY
        elif answer.error is None and answer.finish == "length" and not keeps_cut:
            self.dropped = CUT
        return text if self.usable else None


def answer_prompts(prompts: Sequence[Asked], number: int, model: AskedModel, keeps_cut: bool, ask: Ask) -> list[Draft]:
    """So many answers to each prompt, those to one prompt side by side; equal ones count once."""
    drafts = [Draft(one, at) for one in prompts for at in range(number)]
    requests = [Request(one.asked.messages, number=one.number, about=one.asked.about) for one in drafts]
    seen: set[tuple[str, str]] = set()
    for draft, answer in zip(drafts, ask(model, requests), strict=True):
        draft.text = draft.first = draft.take(answer, keeps_cut) or ""
        if draft.usable and (draft.asked.id, draft.text) in seen:
            draft.dropped = REPEATED
        seen.add((draft.asked.id, draft.text))
    return drafts


def revise(
    drafts: Sequence[Draft],
    principles: Sequence[str],
    templates: tuple[PromptTemplate, PromptTemplate],
    rounds: int,
    seed: int,
    model: AskedModel,
    keeps_cut: bool,
    ask: Ask,
) -> None:
    """Let a model criticise each answer by a principle, and write it again (Bai et al. 2022, section 3.1).

    The principle of a round is chosen by the hash of the prompt, the answer's number and the round.
    """
    for round_ in range(rounds):
        waiting = [one for one in drafts if one.usable]
        for draft in waiting:
            key = seeded_key(seed, "principle", draft.asked.id, draft.number, round_)
            draft.principles.append(principles[key % len(principles)])
        critiques: list[str | None] = [None] * len(waiting)
        for template in templates:
            requests = [
                _filled(template, draft, "" if said is None else said, draft.principles[-1])
                for draft, said in zip(waiting, critiques, strict=True)
            ]
            said_now = [
                draft.take(answer, keeps_cut) for draft, answer in zip(waiting, ask(model, requests), strict=True)
            ]
            going = [at for at, draft in enumerate(waiting) if draft.usable]
            waiting, critiques = [waiting[at] for at in going], [said_now[at] for at in going]
        for draft, text in zip(waiting, critiques, strict=True):
            draft.text = text or ""


def _filled(template: PromptTemplate, draft: Draft, critique: str, principle: str) -> Request | str:
    return template.request(
        {"prompt": draft.asked.text, "answer": draft.text, "principle": principle, "critique": critique},
        number=draft.number,
        about=draft.asked.about,
    )


def reward(
    drafts: Sequence[Draft], rewards: Sequence[AnyReward], templates: Mapping[str, PromptTemplate], ask: Ask
) -> None:
    """Give all answers their rewards, and the sum of these times their weights.

    Args:
        drafts: the answers.
        rewards: which there are.
        templates: the questions of those that a language model gives, by the rewards' names.
        ask: who asks it.

    Raises:
        OwnCodeError: a function of the user's fails.
    """
    for one in rewards:
        waiting, name = [draft for draft in drafts if draft.usable], name_of(one)
        for draft, value in zip(waiting, _values(waiting, one, templates.get(name), ask), strict=True):
            if value is not None:
                draft.rewards[name] = value
                draft.reward += one.weight * value


def _values(
    drafts: Sequence[Draft], one: AnyReward, template: PromptTemplate | None, ask: Ask
) -> Sequence[float | None]:
    if isinstance(one, JudgeReward):
        assert template is not None
        return _judged(drafts, one, template, ask)
    if isinstance(one, OwnReward):
        examples = [draft.asked.example for draft in drafts]
        columns = record_columns(one, examples, [list(draft.asked.messages) for draft in drafts])
        return own_reward(one)(
            [draft.asked.messages[-1]["content"] for draft in drafts], [draft.text for draft in drafts], columns
        )
    if isinstance(one, ModelReward):
        module, _, function = MODEL_SCORES.partition(":")
        score = getattr(importlib.import_module(module), function)(one.path)
        scores: list[float] = score([[*draft.asked.messages, answer_of(draft.text)] for draft in drafts])
        return scores
    check = verifier_of(one)
    return [check(Checked(draft.text, 0, draft.asked.example.get("answer"))) for draft in drafts]


def _judged(drafts: Sequence[Draft], one: JudgeReward, template: PromptTemplate, ask: Ask) -> list[float | None]:
    schema = canonical_json(SCORE).decode()
    answers = ask(
        one.model,
        [
            template.request(
                {"prompt": draft.asked.text, "answer": draft.text, "answer_schema": schema},
                SCORE,
                about=draft.asked.about,
            )
            for draft in drafts
        ],
    )
    for draft, answer in zip(drafts, answers, strict=True):
        draft.error = answer.error
    return [None if answer.error is not None else float(answer.value["score"]) for answer in answers]


def compare(
    pairs: Sequence[tuple[Draft, Draft]],
    section: Comparison,
    template: PromptTemplate,
    principles: Sequence[str],
    seed: int,
    ask: Ask,
) -> list[int]:
    """Which answer of each pair a language model prefers in both orders: 1 for the first one, -1 for the other, 0 where
    it is undecided (Bai et al. 2022, section 4.1; Zheng et al. 2023, section 3.4).

    The principle of a pair is chosen by the hash of its prompt.
    """
    requests: list[Request | str] = []
    for one, other in pairs:
        asked = one.asked
        principle = principles[seeded_key(seed, "compare", asked.id) % len(principles)] if principles else ""
        texts = {"prompt": asked.text, "chosen": one.text, "rejected": other.text}
        requests += in_both_orders(section, template, texts, principle, "", asked.about)
        if principle:
            one.principles.append(principle)
            other.principles.append(principle)
    answers = ask(section.model, requests)
    found = []
    for (one, other), first, last in zip(pairs, answers[::2], answers[1::2], strict=True):
        one.error = other.error = first.error or last.error
        found.append(score_of(first.value["better"], last.value["better"]) if one.error is None else 0)
    return found


def answer_of(text: str) -> dict[str, str]:
    """A text as the assistant's message."""
    return {"role": "assistant", "content": text}

"""Draft answers of examples: requests, revisions, rewards, comparisons, and reasons for
dropping them.

`ask` takes requests and returns answers in their order, so that nothing here depends on
when an answer arrives.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from gristmill.core.files import canonical_json
from gristmill.core.seeds import seeded_key
from gristmill.dataprep.examples.conversations import Example, Message
from gristmill.dataprep.llm.batch_requests import first_error
from gristmill.dataprep.llm.judge_pairs import drawn, in_both_orders, score_of
from gristmill.dataprep.llm.prompt_templates import PromptTemplate
from gristmill.dataprep.llm.prompting import Answer, Request
from gristmill.dataprep.rewards.answer_checks import Answer as Checked
from gristmill.dataprep.rewards.answer_checks import (
    own_reward,
    record_columns,
    verifier_of,
)
from gristmill.mixtures.schema.rl import ModelReward, OwnReward
from gristmill.mixtures.steps.asked_model import AskedModel
from gristmill.mixtures.steps.examples import AnyReward, JudgeReward
from gristmill.mixtures.steps.judge import SCORE
from gristmill.mixtures.steps.judge_pairs import Comparison
from gristmill.mixtures.user_code import name_of

EMPTY, CUT, REPEATED = "empty", "cut", "repeated"
"""Reasons for dropping an answer: it is empty, was cut at `max_tokens`, or repeats
another answer to the prompt.
"""
CRITIQUE, REVISION, SCORING = (
    ("prompt", "answer", "principle"),
    ("prompt", "answer", "principle", "critique"),
    ("prompt", "answer", "answer_schema"),
)
"""Names that the templates may use."""
MODEL_SCORES = "gristmill.train.rl.rewards:load_answer_scorer"
"""Loader of the scores of a reward model. It is a name, imported only if a manifest
asks for such a reward: data preparation runs without torch and does not import the
layers above it.
"""
Ask = Callable[[AskedModel, Sequence[Request | str]], Sequence[Answer]]
"""(model, n requests or reasons for having none) -> n answers."""


@dataclass(frozen=True)
class Asked:
    """A prompt to be answered.

    Attributes:
        id: id from `read_set`.
        messages: the conversation so far.
        record: id of its record, if that is another one.
        example: further fields of its record: `answer`, the reference answer, and
            `columns`.
        licence: of its record, if given.
    """

    id: str
    messages: Sequence[Message]
    record: str | None
    example: Example
    licence: str | None

    @property
    def parents(self) -> list[str]:
        """Ids of an example's parents: the prompt, and its record."""
        return [self.id] if self.record is None else [self.id, self.record]

    @property
    def text(self) -> str:
        """The conversation as one text."""
        if len(self.messages) == 1:
            return self.messages[0]["content"]
        return "\n\n".join(
            f"{message['role']}: {message['content']}" for message in self.messages
        )

    @property
    def about(self) -> str:
        """Its `parents` as a text; forgetting one of them forgets the answers."""
        return " ".join(self.parents)


@dataclass
class Draft:
    """An answer to a prompt.

    Attributes:
        prompt: the prompt.
        number: index among the prompt's answers, from 0.
        text: current text of the answer.
        first: text before any revision.
        principles: the principles that it was criticised by.
        rewards: name -> reward.
        reward: weighted sum of the rewards.
        dropped: reason for dropping it, or None.
        error: the endpoint's error, or None.
    """

    prompt: Asked
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
        """True if it may become an example."""
        return self.dropped is None and self.error is None

    def take(self, answer: Answer, keeps_cut: bool) -> str | None:
        """Text of a model's answer; None if it is unusable, in which case `dropped` or
        `error` is set.
        """
        text = answer.text.strip()
        self.error = answer.error
        if answer.error is None and not text:
            self.dropped = EMPTY
        elif answer.error is None and answer.finish == "length" and not keeps_cut:
            self.dropped = CUT
        return text if self.usable else None


def answer_prompts(
    prompts: Sequence[Asked], number: int, model: AskedModel, keeps_cut: bool, ask: Ask
) -> list[Draft]:
    """Ask for `number` answers per prompt, adjacent in the result; repeated answers are
    dropped.
    """
    drafts = [Draft(prompt, index) for prompt in prompts for index in range(number)]
    requests = [
        Request(draft.prompt.messages, number=draft.number, about=draft.prompt.about)
        for draft in drafts
    ]
    known_answers: set[tuple[str, str]] = set()
    for draft, answer in zip(drafts, ask(model, requests), strict=True):
        draft.text = draft.first = draft.take(answer, keeps_cut) or ""
        if draft.usable and (draft.prompt.id, draft.text) in known_answers:
            draft.dropped = REPEATED
        known_answers.add((draft.prompt.id, draft.text))
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
    """Let a model criticise each answer by a principle and rewrite it (Bai et al. 2022,
    section 3.1).

    The principle of a round is chosen by the hash of the prompt, the answer's number
    and the round.
    """
    for round_ in range(rounds):
        active = [draft for draft in drafts if draft.usable]
        for draft in active:
            key = seeded_key(seed, "principle", draft.prompt.id, draft.number, round_)
            draft.principles.append(drawn(principles, key))
        texts = [""] * len(active)
        for template in templates:
            requests = [
                template.request(
                    {
                        "prompt": draft.prompt.text,
                        "answer": draft.text,
                        "principle": draft.principles[-1],
                        "critique": previous_text,
                    },
                    number=draft.number,
                    about=draft.prompt.about,
                )
                for draft, previous_text in zip(active, texts, strict=True)
            ]
            answers = ask(model, requests)
            new_texts = [
                draft.take(answer, keeps_cut)
                for draft, answer in zip(active, answers, strict=True)
            ]
            active = [draft for draft in active if draft.usable]
            texts = [text for text in new_texts if text is not None]
        for draft, text in zip(active, texts, strict=True):
            draft.text = text


def reward(
    drafts: Sequence[Draft],
    rewards: Sequence[AnyReward],
    templates: Mapping[str, PromptTemplate],
    ask: Ask,
) -> None:
    """Set the rewards of all usable answers, and their weighted sum.

    Args:
        drafts: the answers.
        rewards: the rewards to compute.
        templates: templates of rewards by a language model, by the rewards' names.
        ask: asks the language model.

    Raises:
        OwnCodeError: a user's function fails.
    """
    for spec in rewards:
        usable = [draft for draft in drafts if draft.usable]
        name = name_of(spec)
        for draft, value in zip(
            usable, _values(usable, spec, templates.get(name), ask), strict=True
        ):
            if value is not None:
                draft.rewards[name] = value
                draft.reward += spec.weight * value


def _values(
    drafts: Sequence[Draft], spec: AnyReward, template: PromptTemplate | None, ask: Ask
) -> Sequence[float | None]:
    if isinstance(spec, JudgeReward):
        assert template is not None
        schema = canonical_json(SCORE).decode()
        requests = []
        for draft in drafts:
            values = {
                "prompt": draft.prompt.text,
                "answer": draft.text,
                "answer_schema": schema,
            }
            requests.append(template.request(values, SCORE, about=draft.prompt.about))
        scores: list[float | None] = []
        for draft, answer in zip(drafts, ask(spec.model, requests), strict=True):
            draft.error = answer.error
            scores.append(None if answer.error else float(answer.value["score"]))
        return scores
    if isinstance(spec, OwnReward):
        examples = [draft.prompt.example for draft in drafts]
        columns = record_columns(
            spec, examples, [list(draft.prompt.messages) for draft in drafts]
        )
        return own_reward(spec)(
            [draft.prompt.messages[-1]["content"] for draft in drafts],
            [draft.text for draft in drafts],
            columns,
        )
    if isinstance(spec, ModelReward):
        score = pkgutil.resolve_name(MODEL_SCORES)(spec.path)
        return score(
            [[*draft.prompt.messages, answer_of(draft.text)] for draft in drafts]
        )
    check = verifier_of(spec)
    return [
        check(Checked(draft.text, 0, draft.prompt.example.get("answer")))
        for draft in drafts
    ]


def compare(
    pairs: Sequence[tuple[Draft, Draft]],
    section: Comparison,
    template: PromptTemplate,
    principles: Sequence[str],
    seed: int,
    ask: Ask,
) -> list[int]:
    """Preferred answer of each pair by a language model in both orders: 1 for the
    first, -1 for the second, 0 if undecided (Bai et al. 2022, section 4.1; Zheng et al.
    2023, section 3.4).

    The principle of a pair is chosen by the hash of its prompt.
    """
    requests: list[Request | str] = []
    for first, second in pairs:
        prompt = first.prompt
        principle = drawn(principles, seeded_key(seed, "compare", prompt.id))
        texts = {"prompt": prompt.text, "chosen": first.text, "rejected": second.text}
        requests += in_both_orders(
            section, template, texts, principle, "", prompt.about
        )
        if principle:
            first.principles.append(principle)
            second.principles.append(principle)
    answers = ask(section.model, requests)
    scores = []
    for (first, second), *orders in zip(
        pairs, answers[::2], answers[1::2], strict=True
    ):
        first.error = second.error = first_error(orders)
        scores.append(
            0 if first.error else score_of(*(order.value["better"] for order in orders))
        )
    return scores


def answer_of(text: str) -> Message:
    """An assistant's message with this text."""
    return {"role": "assistant", "content": text}

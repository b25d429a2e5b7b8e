"""Stage `examples`: a language model writes a set of examples for tuning, from its
prompts.

    NAME.jsonl           examples, by id, each with its origin, as `read_set` reads them
    quarantine.jsonl     prompts that the endpoint refused, with its error
    lineage.parquet      parents of examples and prompts (`lineage.py`): from a record
                         of another set to its prompt, from a prompt to its examples

Every answer is stored on arrival (`answer_store.py`), so that a killed attempt asks
nothing twice. Random choices are hashes of the seed and ids. Memory: all prompts and
their answers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

import numpy as np

from gristmill.core.files import write_json_lines
from gristmill.core.stage_context import Context
from gristmill.dataprep.conservation import (
    Counts,
    check_conservation,
    check_quarantine,
    ranked,
)
from gristmill.dataprep.documents import Inputs
from gristmill.dataprep.examples import example_candidates as steps
from gristmill.dataprep.examples.conversations import Example, Message, sft_example
from gristmill.dataprep.examples.example_candidates import Asked, Draft, answer_of
from gristmill.dataprep.examples.preferences import dpo_example
from gristmill.dataprep.examples.read_examples import (
    ExamplesError,
    example_id,
    made_path,
    read_set,
)
from gristmill.dataprep.llm import judge_pairs
from gristmill.dataprep.llm.batch_requests import with_problems
from gristmill.dataprep.llm.client import Asking
from gristmill.dataprep.llm.lineage import GENERATED, lineage_rows, write_lineage
from gristmill.dataprep.llm.prompt_templates import (
    PromptTemplate,
    read_lines,
    read_template,
)
from gristmill.dataprep.llm.prompting import Answer, Request
from gristmill.dataprep.llm.request_counts import RequestCounts
from gristmill.dataprep.rewards.answer_checks import check_answers
from gristmill.mixtures.schema.rl import columns_of
from gristmill.mixtures.steps.asked_model import AskedModel
from gristmill.mixtures.steps.examples import JudgeReward, MadeExamples
from gristmill.mixtures.user_code import name_of

BELOW, TIED, UNDECIDED, EXCLUDED = "below", "tied", "undecided", "excluded"
"""Reasons for a prompt without an example: its best reward is too small, its best and
worst answers are equally good, the comparing model prefers neither, the example is
excluded. `example_candidates.py` has the reasons about its answers.
"""
QUARANTINE = "quarantine.jsonl"
SHOWN_REASONS = 3
PERCENTILES = (10, 50, 90)


def templates_of(
    section: MadeExamples,
) -> dict[str, tuple[PromptTemplate, Sequence[str], bool]]:
    """Templates that a section needs: key of the section -> template, the names it may
    use, and True if it is shipped.

    Raises:
        TemplateProblemError: a file cannot be read.
    """
    templates: dict[str, tuple[str | None, str, Sequence[str]]] = {}
    if (revise := section.revise) is not None:
        templates["revise.critique"] = (revise.critique, "critique", steps.CRITIQUE)
        templates["revise.revision"] = (revise.revision, "revision", steps.REVISION)
    for number, reward in enumerate(section.rewards):
        if isinstance(reward, JudgeReward):
            template = (reward.template, "score-answer", steps.SCORING)
            templates[f"rewards.{number}.template"] = template
    if (compare := section.compare) is not None:
        question = (compare.template, judge_pairs.QUESTION, judge_pairs.GIVEN)
        templates["compare.template"] = question
    return {
        key: (read_template(path, name), variables, path is None)
        for key, (path, name, variables) in templates.items()
    }


class ExamplesRecipe(TypedDict):
    """Recipe of the stage: name of the set, its section as in the manifest, and the
    seed.
    """

    name: str
    section: dict[str, object]
    seed: int


def run(inputs: Inputs, config: ExamplesRecipe, out: Path, context: Context) -> MadeSet:
    """Write one set of examples.

    Args:
        inputs: generated sets that the prompts come from.
        config: set and settings.

    Raises:
        AskingError: answers are unavailable, or the budget is spent; all answers
            received are stored.
        TemplateProblemError: a template cannot be used.
        ExamplesError: too many records of a set are quarantined, or no example is left.
        ConservationError, QuarantineError: see `counts`.
        NoAnswerError, OwnCodeError: a reward cannot be computed.
    """
    section = MadeExamples.model_validate(config["section"])
    with ExitStack() as stack:
        return _SetWriter(
            config["name"], section, config["seed"], inputs, out, context, stack
        ).make()


@dataclass(frozen=True)
class AnswerCounts:
    """Numbers of answers: requested, usable, and dropped by reason."""

    asked: int
    usable: int
    dropped: Mapping[str, int]


@dataclass(frozen=True)
class RewardSpread:
    """Weighted rewards of some answers: their number, mean, and PERCENTILES."""

    answers: int
    mean: float
    percentiles: list[float]


@dataclass(frozen=True)
class MadeSet:
    """Summary of a set of examples.

    Attributes:
        set: its name.
        gives: `examples` or `pairs`.
        prompts: read, kept, dropped by reason, and quarantined.
        examples: number of examples.
        answers: numbers of answers.
        asked: requests and costs per model.
        rewards: of `all`, `chosen` and `rejected` answers.
        principles: number of uses of each.
        licences: of the records of the prompts.
    """

    set: str
    gives: str
    prompts: Counts
    examples: int
    answers: AnswerCounts
    asked: list[RequestCounts]
    rewards: Mapping[str, RewardSpread]
    principles: Mapping[str, int]
    licences: list[str]


@dataclass
class _Made:
    """Outcome of all prompts.

    Attributes:
        records: example records by id.
        kept: answers in the examples, without the rejected ones.
        rejected: rejected answers in the examples.
        dropped: number of prompts without an example, by reason.
        errors: prompt -> error of the endpoint.
        prompts: number of prompts.
    """

    records: dict[str, dict[str, object]] = field(default_factory=dict)
    kept: list[Draft] = field(default_factory=list)
    rejected: list[Draft] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    errors: dict[str, str] = field(default_factory=dict)
    prompts: int = 0


@dataclass
class _SetWriter:
    """Writer of one set of examples.

    Attributes:
        name: of the set.
        section: of the set.
        seed: of the choices.
        inputs: generated sets that the prompts come from.
        out: output folder.
        context: of the stage.
        opened: closes the sessions.
        asking: session of each model.
        links: parents and children.
    """

    name: str
    section: MadeExamples
    seed: int
    inputs: Inputs
    out: Path
    context: Context
    opened: ExitStack
    asking: dict[str, Asking] = field(default_factory=dict)
    links: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.templates: dict[str, PromptTemplate] = {}
        for key, (template, variables, _) in templates_of(self.section).items():
            template.check(variables)
            self.templates[key] = template
        exclude = self.section.exclude
        self.excluded = frozenset(() if exclude is None else read_lines(exclude))

    def ask(
        self, model: AskedModel, requests: Sequence[Request | str]
    ) -> Sequence[Answer]:
        """Answer requests, in their order; sessions are opened once per model."""
        key = model.model_dump_json()
        if key not in self.asking:
            self.asking[key] = self.opened.enter_context(Asking(model, self.context))
        session = self.asking[key]
        askable = [request for request in requests if isinstance(request, Request)]
        session.expect(len(askable))
        return with_problems(requests, iter(list(session.answers(askable))))

    def make(self) -> MadeSet:
        """Ask for all answers, choose and write the examples; return the summary."""
        section = self.section
        prompts, refused = self.read_prompts()
        keeps_cut = section.cut == "keep"
        drafts = steps.answer_prompts(
            prompts, section.per_prompt, section.model, keeps_cut, self.ask
        )
        if section.revise is not None:
            steps.revise(
                drafts,
                read_lines(section.revise.principles),
                (self.templates["revise.critique"], self.templates["revise.revision"]),
                section.revise.rounds,
                self.seed,
                section.model,
                keeps_cut,
                self.ask,
            )
        if section.rewards:
            judge_templates = {
                name_of(reward): self.templates[f"rewards.{number}.template"]
                for number, reward in enumerate(section.rewards)
                if isinstance(reward, JudgeReward)
            }
            steps.reward(drafts, section.rewards, judge_templates, self.ask)
        outcome = self.choose(drafts, refused)
        self.write(outcome)
        return self.summary(outcome, drafts)

    def read_prompts(self) -> tuple[list[Asked], dict[str, str]]:
        """Prompts without duplicates, by id, and the reasons of prompts that cannot be
        sent.
        """
        prompts: dict[str, Asked] = {}
        refused: dict[str, str] = {}
        columns = columns_of(self.section.rewards)
        for source in self.section.data:
            read = read_set(
                made_path(source.path, self.inputs),
                "prompts",
                source.format,
                source.limit,
                source.max_quarantined,
                source.answer,
                columns,
            )
            check_answers(
                f"examples.{self.name} data {source.path}",
                read.examples,
                self.section.rewards,
                source.answer,
            )
            for example, origin in zip(read.examples, read.origins, strict=True):
                id_ = example["id"]
                if id_ in prompts or not self.excluded.isdisjoint((id_, origin.record)):
                    continue
                if "tools" in example or any(
                    "tool_calls" in message for message in example["prompt"]
                ):
                    refused[id_] = (
                        "it has tools, which are not sent to a model that writes "
                        "examples"
                    )
                    continue
                record = None if origin.record == id_ else origin.record
                if record is not None:
                    self.links.append((record, id_))
                messages: list[Message] = [
                    {"role": message["role"], "content": message["content"]}
                    for message in example["prompt"]
                ]
                prompts[id_] = Asked(id_, messages, record, example, origin.licence)
        return [prompts[prompt_id] for prompt_id in sorted(prompts)], refused

    def choose(self, drafts: Sequence[Draft], refused: Mapping[str, str]) -> _Made:
        """Choose the answers to each prompt that become examples."""
        number = self.section.per_prompt
        outcome = _Made(errors=dict(refused))
        groups = [
            drafts[start : start + number] for start in range(0, len(drafts), number)
        ]
        outcome.prompts = len(groups) + len(refused)
        needed = (
            2
            if self.section.chooses
            and (self.section.compare or self.section.gives == "pairs")
            else 1
        )
        preferred: dict[str, list[Draft]] = {}
        if (compare := self.section.compare) is not None:
            pairs = [
                (group[0], group[1])
                for group in groups
                if all(draft.usable for draft in group)
            ]
            orders = steps.compare(
                pairs,
                compare,
                self.templates["compare.template"],
                read_lines(compare.principles),
                self.seed,
                self.ask,
            )
            preferred = {
                pair[0].prompt.id: list(pair[::order])
                for pair, order in zip(pairs, orders, strict=True)
                if order
            }
        for group in groups:
            usable = sorted(
                (draft for draft in group if draft.usable),
                key=lambda draft: (-draft.reward, draft.number),
            )
            errors = [draft.error for draft in group if draft.error is not None]
            prompt = group[0].prompt
            if errors and (compare is not None or not usable):
                outcome.errors[prompt.id] = errors[0]
                continue
            reason: str | None
            if len(usable) < needed:
                reason = next(
                    draft.dropped for draft in group if draft.dropped is not None
                )
            else:
                if compare is not None:
                    usable = preferred.get(prompt.id, [])
                reason = self._take_examples(prompt, usable, outcome)
            if reason is not None:
                outcome.dropped[reason] += 1
        return outcome

    def _take_examples(
        self, prompt: Asked, usable: Sequence[Draft], outcome: _Made
    ) -> str | None:
        """Turn the answers to a prompt into examples, the best first; return the reason
        if there are none.
        """
        section = self.section
        if not usable:
            return UNDECIDED
        sufficient = [
            draft
            for draft in usable
            if section.min_reward is None or draft.reward >= section.min_reward
        ]
        if not sufficient:
            return BELOW
        if section.gives == "pairs":
            best = usable[0]
            worst = usable[-1:] if section.chooses else []
            rejected = worst[0].text if worst else best.first
            if rejected == best.text or (
                section.rewards and best.reward == usable[-1].reward
            ):
                return TIED
            pair: Example = {
                "prompt": list(prompt.messages),
                "chosen": [answer_of(best.text)],
                "rejected": [answer_of(rejected)],
            }
            if not self._keep(prompt, pair, [best, *worst], outcome):
                return EXCLUDED
            outcome.kept.append(best)
            outcome.rejected += worst
            return None
        kept = [
            draft
            for draft in sufficient[: section.best]
            if self._keep(
                prompt,
                {"messages": [*prompt.messages, answer_of(draft.text)]},
                [draft],
                outcome,
            )
        ]
        outcome.kept += kept
        return None if kept else EXCLUDED

    def _keep(
        self,
        prompt: Asked,
        content: Example,
        drafts: Sequence[Draft],
        outcome: _Made,
    ) -> bool:
        """Record an example; return False if it is excluded."""
        read = sft_example(content) if "messages" in content else dpo_example(content)
        id_ = example_id(read)
        if id_ in self.excluded:
            return False
        generation: dict[str, object] = {
            "kind": GENERATED,
            "model": self.section.model.called,
            "parents": prompt.parents,
        }
        if self.section.rewards:
            generation["rewards"] = [draft.rewards for draft in drafts]
        if drafts[0].principles:
            generation["principles"] = drafts[0].principles
        if prompt.licence is not None:
            generation["licence"] = prompt.licence
        outcome.records[id_] = {"id": id_, **content, **generation}
        self.links.append((prompt.id, id_))
        return True

    def write(self, made: _Made) -> None:
        """Write the examples by id, and their lineage.

        Raises:
            ExamplesError: there are no examples.
        """
        counts = _counts(made)
        check_conservation(counts, self.context.stage)
        check_quarantine(counts, self.section.max_quarantined, self.context.stage)
        if not made.records:
            most_frequent = ranked(made.dropped)[:SHOWN_REASONS]
            reasons = ", ".join(
                f"{reason} {number:,}" for reason, number in most_frequent
            )
            raise ExamplesError(
                f"examples.{self.name}: none of {made.prompts} prompts gives an "
                f"example ({reasons or 'nothing was dropped'}); loosen what drops "
                "them, or look at what the model writes"
            )
        write_json_lines(
            self.out / f"{self.name}.jsonl",
            (made.records[id_] for id_ in sorted(made.records)),
        )
        if made.errors:
            write_json_lines(
                self.out / QUARANTINE,
                (
                    {"prompt": prompt, "error": error}
                    for prompt, error in sorted(made.errors.items())
                ),
            )
        write_lineage(self.out, lineage_rows(list(set(self.links)), self.name))

    def summary(self, made: _Made, drafts: Sequence[Draft]) -> MadeSet:
        """Summary for the report."""
        groups = {
            "all": [draft for draft in drafts if draft.usable],
            "chosen": made.kept,
            "rejected": made.rejected,
        }
        rewards: dict[str, RewardSpread] = {}
        for name, group in groups.items():
            if group and self.section.rewards:
                values = np.array([draft.reward for draft in group])
                percentiles = np.percentile(values, PERCENTILES).tolist()
                rewards[name] = RewardSpread(
                    len(group), float(values.mean()), percentiles
                )
        dropped = Counter(draft.dropped for draft in drafts if draft.dropped)
        principles = Counter(
            principle for draft in made.kept for principle in draft.principles
        )
        return MadeSet(
            set=self.name,
            gives=self.section.gives,
            prompts=_counts(made),
            examples=len(made.records),
            answers=AnswerCounts(len(drafts), len(groups["all"]), dict(dropped)),
            asked=[
                session.tally.as_json(session.model) for session in self.asking.values()
            ],
            rewards=rewards,
            principles=dict(principles),
            licences=sorted(
                {
                    draft.prompt.licence
                    for draft in made.kept
                    if draft.prompt.licence is not None
                }
            ),
        )


def _counts(outcome: _Made) -> Counts:
    return {
        "read": outcome.prompts,
        "kept": outcome.prompts - outcome.dropped.total() - len(outcome.errors),
        "dropped": dict(outcome.dropped),
        "quarantined": len(outcome.errors),
    }

"""The stage `examples`: a language model writes a set of examples for tuning, after its prompts or new ones.

    NAME.jsonl           the examples, by their ids: `messages`, or `prompt`, `chosen` and `rejected`, as `read_set`
                         reads them, with `id`, `kind`, `model`, `parents` (ids), and what they were chosen by
    quarantine.jsonl     prompts that the endpoint refused, with its error
    lineage.parquet      who was made from whom (`lineage.py`): from a record of another set its prompt, from a prompt
                         new prompts, from each of these its examples

Every answer is kept as soon as it is there (`answer_store.py`), so that a killed attempt asks nothing twice. What is
drawn is a hash of the seed and of ids. Memory: all prompts and their answers.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.dataprep.asking import judge_pairs
from gristmill.dataprep.asking.client import Asking
from gristmill.dataprep.asking.diversity import SAMPLE_TEXTS, describe
from gristmill.dataprep.asking.lineage import GENERATED, KIND, PARENTS, SCHEMA, write_lineage
from gristmill.dataprep.asking.prompt_templates import PromptTemplate, read_lines, read_template
from gristmill.dataprep.asking.prompting import Answer, Request
from gristmill.dataprep.asking.shard_answers import with_problems
from gristmill.dataprep.context import Context
from gristmill.dataprep.counts import check_conservation, check_quarantine
from gristmill.dataprep.examples import drafts as steps
from gristmill.dataprep.examples import new_prompts
from gristmill.dataprep.examples.conversations import sft_example
from gristmill.dataprep.examples.drafts import Asked, Draft, answer_of
from gristmill.dataprep.examples.preferences import dpo_example
from gristmill.dataprep.examples.read_examples import (
    Example,
    ExamplesError,
    Origin,
    example_id,
    made_path,
    prompt_example,
    read_set,
)
from gristmill.dataprep.files import atomic_write
from gristmill.dataprep.judges.answer_checks import check_answers
from gristmill.mixtures.reinforcement import columns_of, name_of
from gristmill.mixtures.steps.asked_model import AskedModel
from gristmill.mixtures.steps.made_examples import JudgeReward, MadeExamples

BELOW, TIED, UNDECIDED, EXCLUDED = "below", "tied", "undecided", "excluded"
"""Why a prompt gives no example: its best answer has too little reward, its best one is no better than its worst one,
the model that compares prefers neither, the example is excluded. The others are of its answers (`drafts.py`)."""
QUARANTINE = "quarantine.jsonl"
SAMPLE_CHARACTERS = 4000
SHOWN_REASONS = 3
PERCENTILES = (10, 50, 90)


def templates_of(section: MadeExamples) -> dict[str, tuple[PromptTemplate, Sequence[str], bool]]:
    """What is asked beside the prompts themselves: key of the section -> template, what it gets, and whether it is one
    that comes with gristmill.

    Raises:
        TemplateProblemError: a file cannot be read.
    """
    wanted: dict[str, tuple[str | None, str, Sequence[str]]] = {}
    if section.grow is not None:
        wanted["grow.template"] = section.grow.template, "new-prompts", new_prompts.GIVEN
    if section.revise is not None:
        wanted["revise.critique"] = section.revise.critique, "critique", steps.CRITIQUE
        wanted["revise.revision"] = section.revise.revision, "revision", steps.REVISION
    for number, one in enumerate(section.rewards):
        if isinstance(one, JudgeReward):
            wanted[f"rewards.{number}.template"] = one.template, "score-answer", steps.SCORING
    if section.compare is not None:
        wanted["compare.template"] = section.compare.template, judge_pairs.QUESTION, judge_pairs.GIVEN
    return {key: (read_template(path, name), given, path is None) for key, (path, name, given) in wanted.items()}


def run(inputs: Mapping[str, Path], config: dict[str, Any], out: Path, context: Context) -> dict[str, Any]:
    """Make one set.

    Args:
        inputs: the sets of this section that its prompts are of.
        config: `name`; `section`, as the manifest has it; `seed`.

    Returns:
        what `_Making.summary` says.

    Raises:
        AskingError: answers cannot be had, or the budget is spent; all that were given are kept.
        TemplateProblemError: a template cannot be used.
        ExamplesError: more records of a set are quarantined than may be, or nothing is left.
        ConservationError, QuarantineError: see `counts`.
        NoAnswerError, OwnCodeError: a reward cannot be given.
    """
    section = MadeExamples.model_validate(config["section"])
    with ExitStack() as opened:
        return _Making(config["name"], section, config["seed"], inputs, out, context, opened).make()


@dataclass
class _Made:
    """What became of the prompts.

    Attributes:
        records: the examples with all that is known of them, by their ids.
        kept: the answers that are in them, rejected ones not counted.
        rejected: those that are.
        dropped: why prompts gave none.
        errors: prompt -> why it was not answered.
        prompts: how many there are.
    """

    records: dict[str, dict[str, Any]] = field(default_factory=dict)
    kept: list[Draft] = field(default_factory=list)
    rejected: list[Draft] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    errors: dict[str, str] = field(default_factory=dict)
    prompts: int = 0


class _Making:
    """A set that is being made."""

    def __init__(
        self,
        name: str,
        section: MadeExamples,
        seed: int,
        inputs: Mapping[str, Path],
        out: Path,
        context: Context,
        opened: ExitStack,
    ) -> None:
        self.name, self.section, self.seed, self.inputs, self.out = name, section, seed, inputs, out
        self.context, self._opened, self._asking = context, opened, dict[str, Asking]()
        self.templates = {}
        for key, (template, given, _) in templates_of(section).items():
            template.check(given)
            self.templates[key] = template
        self.excluded = frozenset() if section.exclude is None else frozenset(read_lines(section.exclude))
        self.grown: new_prompts.Grown | None = None
        self.links: list[tuple[str, str]] = []

    def ask(self, model: AskedModel, requests: Sequence[Request | str]) -> Sequence[Answer]:
        """Answers in the order of the requests; a model that several steps ask is opened once."""
        key = model.model_dump_json()
        if key not in self._asking:
            self._asking[key] = self._opened.enter_context(Asking(model, self.context))
        asked = [one for one in requests if isinstance(one, Request)]
        self._asking[key].expect(len(asked))
        return with_problems(requests, list(self._asking[key].answers(asked)))

    def make(self) -> dict[str, Any]:
        """Ask for all that is wanted, choose, and write; the summary."""
        section = self.section
        prompts, refused = self.read_prompts()
        if section.grow is not None:
            prompts = self.grow(prompts)
        keeps_cut = section.cut == "keep"
        drafts = steps.answer_prompts(prompts, section.per_prompt, section.model, keeps_cut, self.ask)
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
            of_judges = {
                name_of(one): self.templates[f"rewards.{number}.template"]
                for number, one in enumerate(section.rewards)
                if isinstance(one, JudgeReward)
            }
            steps.reward(drafts, section.rewards, of_judges, self.ask)
        made = self.choose(drafts, refused)
        self.write(made)
        return self.summary(made, drafts)

    def read_prompts(self) -> tuple[list[Asked], dict[str, str]]:
        """The prompts, each once, by their ids; and why some of them cannot be asked."""
        found: dict[str, Asked] = {}
        refused: dict[str, str] = {}
        columns = columns_of(self.section.rewards)
        for one in self.section.data:
            read = read_set(
                made_path(one.path, self.inputs),
                "prompts",
                one.format,
                one.limit,
                one.max_quarantined,
                one.answer,
                columns,
            )
            if self.section.grow is None:
                check_answers(f"examples.{self.name} data {one.path}", read.examples, self.section.rewards, one.answer)
            for example, origin in zip(read.examples, read.origins, strict=True):
                if self.excluded.isdisjoint((example["id"], origin.record)) and example["id"] not in found:
                    self._take(example, origin, found, refused)
        return [found[one] for one in sorted(found)], refused

    def _take(self, example: Example, origin: Origin, found: dict[str, Asked], refused: dict[str, str]) -> None:
        parents = () if origin.record in (None, example["id"]) else (str(origin.record),)
        if "tools" in example or any("tool_calls" in message for message in example["prompt"]):
            refused[example["id"]] = "it has tools, which are not sent to a model that writes examples"
            return
        self.links += [(parent, example["id"]) for parent in parents]
        messages = [{"role": message["role"], "content": message["content"]} for message in example["prompt"]]
        licences = () if origin.licence is None else (origin.licence,)
        found[example["id"]] = Asked(example["id"], messages, parents, example, licences)

    def grow(self, seeds: Sequence[Asked]) -> list[Asked]:
        """New prompts, which alone are answered."""
        section = self.section.grow
        assert section is not None
        of_seeds = {one.id: one for one in seeds}
        shown = [new_prompts.Shown(one.id, one.text) for one in seeds]
        self.grown = new_prompts.grow(
            shown,
            section,
            self.templates["grow.template"],
            self.seed,
            lambda text: example_id(prompt_example({"prompt": text})),
            self.excluded.__contains__,
            lambda requests: self.ask(self.section.model, requests),
        )
        licences: dict[str, tuple[str, ...]] = {one.id: one.licences for one in seeds}
        found = []
        for one in self.grown.prompts:
            self.links += [(parent, one.id) for parent in one.parents]
            licences[one.id] = tuple(sorted({noted for parent in one.parents for noted in licences[parent]}))
            older = [parent for seed in one.parents if seed in of_seeds for parent in of_seeds[seed].parents]
            found.append(
                Asked(
                    one.id,
                    [{"role": "user", "content": one.text}],
                    (*one.parents, *dict.fromkeys(older)),
                    licences=licences[one.id],
                )
            )
        if not found:
            raise ExamplesError(
                f"examples.{self.name}: {self.grown.requests} requests gave no new prompt "
                f"({_listed(self.grown.dropped)}); the model should answer with a numbered list: look "
                "at what it writes, or give grow.template"
            )
        if len(found) < section.number:
            self.context.warn(
                f"{len(found)} of {section.number} new prompts were found in {self.grown.rounds} rounds "
                f"({_listed(self.grown.dropped)})"
            )
        return found

    def choose(self, drafts: Sequence[Draft], refused: Mapping[str, str]) -> _Made:
        """What of the answers to each prompt becomes an example."""
        number, made = self.section.per_prompt, _Made(errors=dict(refused))
        groups = [drafts[at : at + number] for at in range(0, len(drafts), number)]
        made.prompts = len(groups) + len(refused)
        needed = 2 if self.section.chooses and (self.section.compare or self.section.gives == "pairs") else 1
        preferred = self._compared(groups)
        for group in groups:
            usable = sorted((one for one in group if one.usable), key=lambda one: (-one.reward, one.number))
            error = next((one.error for one in group if one.error is not None), None)
            asked = group[0].asked
            if error is not None and (self.section.compare is not None or not usable):
                made.errors[asked.id] = error
                continue
            reason: str | None
            if len(usable) < needed:
                reason = next(one.dropped for one in group if one.dropped is not None)
            else:
                reason = self._take_examples(
                    asked, usable if self.section.compare is None else preferred.get(asked.id, []), made
                )
            if reason is not None:
                made.dropped[reason] += 1
        return made

    def _compared(self, groups: Sequence[Sequence[Draft]]) -> dict[str, list[Draft]]:
        """Prompt -> its two answers, the preferred one first; nothing of those that are undecided."""
        section = self.section.compare
        if section is None:
            return {}
        pairs = [(group[0], group[1]) for group in groups if all(one.usable for one in group)]
        takes = steps.compare(
            pairs, section, self.templates["compare.template"], read_lines(section.principles), self.seed, self.ask
        )
        return {pair[0].asked.id: list(pair[::take]) for pair, take in zip(pairs, takes, strict=True) if take}

    def _take_examples(self, asked: Asked, usable: Sequence[Draft], made: _Made) -> str | None:
        """Make examples of the answers to a prompt, the best one first; why there are none, or None."""
        section = self.section
        if not usable:
            return UNDECIDED
        enough = [one for one in usable if section.min_reward is None or one.reward >= section.min_reward]
        if not enough:
            return BELOW
        if section.gives == "pairs":
            return self._take_pair(asked, usable, made)
        taken = [
            one
            for one in enough[: section.best]
            if self._keep(asked, {"messages": [*asked.messages, answer_of(one.text)]}, [one], made)
        ]
        made.kept += taken
        return None if taken else EXCLUDED

    def _take_pair(self, asked: Asked, usable: Sequence[Draft], made: _Made) -> str | None:
        best, worst = usable[0], usable[-1]
        rejected = worst.text if self.section.chooses else best.first
        if rejected == best.text or (self.section.rewards and best.reward == worst.reward):
            return TIED
        pair = {"prompt": list(asked.messages), "chosen": [answer_of(best.text)], "rejected": [answer_of(rejected)]}
        if not self._keep(asked, pair, [best, worst] if self.section.chooses else [best], made):
            return EXCLUDED
        made.kept.append(best)
        made.rejected += [worst] if self.section.chooses else []
        return None

    def _keep(self, asked: Asked, content: dict[str, Any], drafts: Sequence[Draft], made: _Made) -> bool:
        """Note an example with what is known of it; false where it is excluded."""
        read = sft_example(content) if "messages" in content else dpo_example(content)
        id_ = example_id(read)
        if id_ in self.excluded:
            return False
        known = {"licence": " and ".join(asked.licences)} if asked.licences else {}
        rewards = {"rewards": [one.rewards for one in drafts]} if self.section.rewards else {}
        principles = {"principles": drafts[0].principles} if drafts[0].principles else {}
        made.records[id_] = {
            "id": id_,
            **content,
            KIND: GENERATED,
            "model": self.section.model.called,
            PARENTS: [asked.id, *asked.parents],
            **rewards,
            **principles,
            **known,
        }
        self.links.append((asked.id, id_))
        return True

    def write(self, made: _Made) -> None:
        """Write the examples, by their ids, and beside them who was made from whom.

        Raises:
            ExamplesError: there are none.
        """
        counts = _counts(made)
        check_conservation(counts, self.context.stage)
        check_quarantine(counts, self.section.max_quarantined, self.context.stage)
        if not made.records:
            raise ExamplesError(
                f"examples.{self.name}: none of {made.prompts} prompts gives an example "
                f"({_listed(made.dropped)}); loosen what drops them, or look at what the model writes"
            )
        _write_lines(self.out / f"{self.name}.jsonl", [made.records[one] for one in sorted(made.records)])
        if made.errors:
            _write_lines(
                self.out / QUARANTINE, [{"prompt": one, "error": error} for one, error in sorted(made.errors.items())]
            )
        links = sorted(set(self.links))
        of_ids = SCHEMA.field("parent").type
        write_lineage(
            self.out,
            pa.table(
                {
                    "parent": pa.array([bytes.fromhex(parent) for parent, _ in links], of_ids),
                    "child": pa.array([bytes.fromhex(child) for _, child in links], of_ids),
                    "source": pa.array([self.name] * len(links), pa.string()),
                }
            ),
        )

    def summary(self, made: _Made, drafts: Sequence[Draft]) -> dict[str, Any]:
        """What the report shows.

        Returns:
            `set`, `gives`; `prompts`: read, kept, dropped (reason -> number) and quarantined; `answers`: asked for,
            usable, dropped; `examples`: how many; `grown` (see `Grown.as_json`); `asked`: what asking each model came
            to; `texts`: lengths and diversity of chosen answers (see `describe`), beside the prompts; `rewards`: mean
            and percentiles of all answers, of chosen and of rejected ones; `principles`: how often each was drawn;
            `licences`.
        """
        sample = sorted(((one.asked.id, one.number, one) for one in made.kept), key=lambda item: item[:2])
        shown = [one for *_, one in sample[:SAMPLE_TEXTS]]
        groups = {"all": [one for one in drafts if one.usable], "chosen": made.kept, "rejected": made.rejected}
        return {
            "set": self.name,
            "gives": self.section.gives,
            "prompts": _counts(made),
            "examples": len(made.records),
            "answers": {
                "asked": len(drafts),
                "usable": len(groups["all"]),
                "dropped": _sorted(Counter(one.dropped for one in drafts if one.dropped is not None)),
            },
            **({} if self.grown is None else {"grown": self.grown.as_json()}),
            "asked": [one.tally.as_json(one.model) for one in self._asking.values()],
            "texts": describe(
                [one.text[:SAMPLE_CHARACTERS] for one in shown], [one.asked.text[:SAMPLE_CHARACTERS] for one in shown]
            ),
            "rewards": {name: _spread(group) for name, group in groups.items() if group and self.section.rewards},
            "principles": _sorted(Counter(principle for one in made.kept for principle in one.principles)),
            "licences": sorted({noted for one in made.kept for noted in one.asked.licences}),
        }


def _counts(made: _Made) -> dict[str, Any]:
    return {
        "read": made.prompts,
        "kept": made.prompts - sum(made.dropped.values()) - len(made.errors),
        "dropped": _sorted(made.dropped),
        "quarantined": len(made.errors),
    }


def _sorted(counted: Mapping[str, int]) -> dict[str, int]:
    return dict(sorted(counted.items()))


def _listed(counted: Mapping[str, int]) -> str:
    worst = sorted(counted.items(), key=lambda item: (-item[1], item[0]))[:SHOWN_REASONS]
    return ", ".join(f"{reason} {number:,}" for reason, number in worst) or "nothing was dropped"


def _spread(drafts: Sequence[Draft]) -> dict[str, Any]:
    values = np.array([one.reward for one in drafts])
    return {
        "answers": len(drafts),
        "mean": float(values.mean()),
        "percentiles": [float(value) for value in np.percentile(values, PERCENTILES)],
    }


def _write_lines(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    with atomic_write(path) as sink:
        sink.write("".join(_line(one) for one in lines).encode())


def _line(one: Mapping[str, Any]) -> str:
    return json.dumps(one, ensure_ascii=False, sort_keys=True) + "\n"

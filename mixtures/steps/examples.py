"""The section `examples`: named sets of examples for tuning that a language model
writes.

examples:
  revised:
    data: [{path: red-team.jsonl}]
    model: {folder: models/helpful}
    revise: {principles: ./principles.txt}
sft: {data: [{path: "examples://revised"}], ...}
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from gristmill.mixtures.base import (
    Fraction,
    Location,
    OutsidePath,
    Positive,
    RawSection,
    Section,
    in_circles,
)
from gristmill.mixtures.reinforcement import (
    AnswerReward,
    Contains,
    Exact,
    Format,
    ModelReward,
    Number,
    OwnReward,
    Prompts,
    Regex,
    kind_of_own,
    name_of,
)
from gristmill.mixtures.steps.asked_model import AskedModel
from gristmill.mixtures.steps.judge_pairs import Comparison
from gristmill.mixtures.yaml_text import did_you_mean

MADE = "examples://"
"""Prefix of the path of a set that the manifest defines."""
READERS = ("sft", "reward", "dpo", "rl")
"""Sections that read sets of examples."""


def made_names(paths: Iterable[str]) -> Iterator[str]:
    """Return the names of the sets among some paths that the manifest defines."""
    return (path.removeprefix(MADE) for path in paths if path.startswith(MADE))


def output_name(name: str) -> str:
    """Return the name in the plan of the output that is a set."""
    return f"examples-{name}"


class Grow(Section):
    """New prompts, written after the example of existing ones (self-instruct: Wang et
    al. 2023).
    """

    number: Positive
    """Number of new prompts. Only these are answered."""
    rounds: Positive = 10
    """Largest number of rounds. Each asks for as many prompts as are still missing, and
    may show results of earlier ones.
    """
    shown: Annotated[int, Field(ge=2)] = 8
    """Prompts that each request shows (Wang et al., section 2.2: 8); a quarter of them
    are new ones, once there are some.
    """
    similarity: Fraction = 0.7
    """ROUGE-L with any other prompt from which a new one is dropped (their section 2.2:
    0.7).
    """
    template: OutsidePath | None = None
    """A file with a request of your own, as a Jinja template of `shown`, a list of
    texts, and `wanted`, the number of new ones that a request must give. The answer is
    a numbered list.
    """


class Revise(Section):
    """Critique and revision of answers by a principle, by the model that gave them
    (constitutional AI: Bai et al. 2022, section 3.1).
    """

    principles: Annotated[tuple[str, ...], Field(min_length=1)] | OutsidePath
    """Principles for answers, of which each round of each answer draws one by hash: a
    list, or a file with one per line.
    """
    rounds: Positive = 1
    """Number of rounds of critique and revision (Bai et al.: 4)."""
    critique: OutsidePath | None = None
    """A file with a request of your own, as a Jinja template of `prompt`, `answer` and
    `principle`.
    """
    revision: OutsidePath | None = None
    """A file with the request for the new answer, with the same variables and
    `critique`.
    """


class JudgeReward(AnswerReward):
    """Score of the answer by a language model, from 0 to 5."""

    kind: Literal["judge"]
    """Selects this reward."""
    model: AskedModel
    """The model that judges."""
    template: OutsidePath | None = None
    """A file with a question of your own, as a Jinja template of `prompt`, `answer` and
    `answer_schema`: JSON with a `score`.
    """


AnyReward = Annotated[
    Annotated[
        Exact
        | Contains
        | Number
        | Regex
        | Format
        | ModelReward
        | OwnReward
        | JudgeReward,
        Field(discriminator="kind"),
    ],
    BeforeValidator(kind_of_own),
]


class MadeExamples(Section):
    """A set of examples that a language model writes; see docs/examples.md."""

    data: Annotated[tuple[Prompts, ...], Field(min_length=1)]
    """Sets of prompts, with `grow` those after whose example new ones are written.
    `examples://NAME` is another set of this section.
    """
    exclude: OutsidePath | None = None
    """A file with ids, one per line: prompts to leave out, with everything that would
    be made from them.
    """
    model: AskedModel
    """The model that answers."""
    grow: Grow | None = None
    """Write new prompts first; off if absent."""
    per_prompt: Positive = 1
    """Number of answers to each prompt."""
    revise: Revise | None = None
    """Criticise and rewrite each answer; off if absent."""
    rewards: tuple[AnyReward, ...] = ()
    """Rewards by which answers are chosen: those of `rl`, except `length`, whose tokens
    are the policy's. A reward of kind `model` needs its `path`; the kind `judge` asks a
    language model.
    """
    compare: Comparison | None = None
    """Choose between two answers with a language model instead: the one that it prefers
    in both orders (Bai et al. 2022, section 4.1).
    """
    gives: Literal["conversations", "pairs"] = "conversations"
    """`conversations`: each prompt with its best answer, for `sft`; `pairs`: with the
    best and the worst one, for `dpo` and `reward`; without `rewards` or `compare`, with
    the revised answer and the first one.
    """
    best: Positive = 1
    """For conversations: number of the best answers to keep per prompt."""
    min_reward: float | None = None
    """Smallest reward of kept answers, in pairs of the chosen ones (rejection
    sampling).
    """
    cut: Literal["drop", "keep"] = "drop"
    """Treatment of an answer that ended at `model.max_tokens`: dropped, or kept as it
    is.
    """
    max_quarantined: Fraction = 0.05
    """Share of the prompts that the endpoint may refuse before the stage fails."""
    seed: int | None = None
    """Seed of the choice of principles and of shown prompts; the manifest's if
    absent.
    """

    @property
    def chooses(self) -> bool:
        """True if rewards or comparisons say which answer is better."""
        return bool(self.rewards) or self.compare is not None

    @model_validator(mode="after")
    def _chooses_by_one_thing(self) -> Self:
        if self.rewards and self.compare is not None:
            raise ValueError(
                "rewards and compare both choose among answers; keep one of the two"
            )
        if self.min_reward is not None and not self.rewards:
            raise ValueError("min_reward needs `rewards`")
        for number, reward in enumerate(self.rewards):
            if isinstance(reward, ModelReward) and reward.path is None:
                raise ValueError(
                    f"rewards[{number}]: kind model needs the `path` of "
                    "a reward model here"
                )
        names = [name_of(reward) for reward in self.rewards]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(
                f"rewards: two are called {twice}; give each a `name` of its own"
            )
        return self

    @model_validator(mode="after")
    def _has_answers_to_choose_from(self) -> Self:
        if self.per_prompt > 1 and self.model.temperature == 0:
            raise ValueError(
                f"per_prompt is {self.per_prompt}, but at model.temperature 0 all "
                "answers to a prompt are the same; raise model.temperature (1.0 is "
                "usual), or lower per_prompt to 1"
            )
        if self.compare is not None and self.per_prompt != 2:
            raise ValueError(
                "compare chooses between two answers, but per_prompt is "
                f"{self.per_prompt}; set it to 2, or give `rewards`"
            )
        if self.gives == "pairs":
            self._check_pairs()
        elif self.best > self.per_prompt:
            raise ValueError(
                f"best is {self.best}, but per_prompt gives "
                f"{self.per_prompt} answers; lower it"
            )
        elif not self.chooses and self.best < self.per_prompt:
            raise ValueError(
                f"per_prompt is {self.per_prompt}, but nothing determines the best "
                "answer; give "
                f"`rewards`, or `compare`, or keep all with `best: {self.per_prompt}`"
            )
        elif self.compare is not None and self.best > 1:
            raise ValueError(
                "compare takes one of two answers; set best to 1, or give `rewards`"
            )
        return self

    def _check_pairs(self) -> None:
        if self.best > 1:
            raise ValueError(
                "best is for conversations; a prompt gives one pair: remove it"
            )
        if not self.chooses and (self.revise is None or self.per_prompt > 1):
            raise ValueError(
                "pairs need a rule for the better answer: give `rewards` or "
                "`compare`, or `revise` with per_prompt 1"
            )
        if self.rewards and self.per_prompt < 2:
            raise ValueError(
                "pairs by rewards need at least two answers; raise per_prompt"
            )


def made_problems(raw: RawSection) -> Iterator[tuple[Location, str]]:
    """Yield paths of a manifest that name a missing set, and sets that are made from
    each other.
    """
    sets = raw.get("examples")
    sets = sets if isinstance(sets, Mapping) else {}
    places: list[tuple[Location, Any]] = [((name,), raw.get(name)) for name in READERS]
    places += [(("examples", name), examples) for name, examples in sets.items()]
    waiting: dict[str, set[str]] = {}
    for place, section in places:
        data = section.get("data") if isinstance(section, Mapping) else None
        referenced: dict[int, str] = {}
        for number, entry in enumerate(data if isinstance(data, list) else []):
            path = str(entry.get("path")) if isinstance(entry, Mapping) else ""
            if path.startswith(MADE):
                referenced[number] = path.removeprefix(MADE)
        for number, name in referenced.items():
            if name not in sets:
                available = (
                    f"there are {', '.join(map(str, sets))}"
                    if sets
                    else "there is no section `examples:`"
                )
                hint = did_you_mean(name, map(str, sets))
                yield (
                    (*place, "data", number, "path"),
                    f"no such set: {name!r}{hint} ({available})",
                )
        if len(place) > 1:
            waiting[str(place[1])] = set(referenced.values())
    circular = in_circles(waiting)
    for name in circular:
        yield (
            ("examples", name, "data"),
            f"{', '.join(circular)} are made from each other in a cycle",
        )

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

from collections.abc import Iterable, Iterator
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from gristmill.mixtures.base import (
    Fraction,
    Location,
    NonEmpty,
    OutsidePath,
    Positive,
    RawSection,
    Section,
    dependency_order,
    entries,
    inside,
    repeated,
)
from gristmill.mixtures.schema.rl import (
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
)
from gristmill.mixtures.steps.asked_model import AskedModel
from gristmill.mixtures.steps.judge_pairs import Comparison
from gristmill.mixtures.user_code import name_of
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


class Revise(Section):
    """Critique and revision of answers by a principle, by the model that gave them
    (constitutional AI: Bai et al. 2022, section 3.1).
    """

    principles: NonEmpty[str] | OutsidePath
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

    data: NonEmpty[Prompts]
    """Sets of prompts; `examples://NAME` is another set of this section."""
    exclude: OutsidePath | None = None
    """A file with ids, one per line: prompts to leave out, with everything that would
    be made from them.
    """
    model: AskedModel
    """The model that answers."""
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
    """Seed of the choice of principles; the manifest's if absent."""

    @property
    def chooses(self) -> bool:
        """True if rewards or comparisons say which answer is better."""
        return bool(self.rewards) or self.compare is not None

    def _problems(self) -> Iterator[str]:
        if self.rewards and self.compare is not None:
            yield "rewards and compare both choose among answers; keep one of the two"
        if self.min_reward is not None and not self.rewards:
            yield "min_reward needs `rewards`"
        for number, reward in enumerate(self.rewards):
            if isinstance(reward, ModelReward) and reward.path is None:
                yield (
                    f"rewards[{number}]: kind model needs the `path` of "
                    "a reward model here"
                )
        if twice := repeated([name_of(reward) for reward in self.rewards]):
            yield f"rewards: two are called {twice}; give each a `name` of its own"
        if self.per_prompt > 1 and self.model.temperature == 0:
            yield (
                f"per_prompt is {self.per_prompt}, but at model.temperature 0 all "
                "answers to a prompt are the same; raise model.temperature (1.0 is "
                "usual), or lower per_prompt to 1"
            )
        if self.compare is not None and self.per_prompt != 2:
            yield (
                "compare chooses between two answers, but per_prompt is "
                f"{self.per_prompt}; set it to 2, or give `rewards`"
            )
        if self.gives == "pairs":
            if self.best > 1:
                yield "best is for conversations; a prompt gives one pair: remove it"
            if not self.chooses and (self.revise is None or self.per_prompt > 1):
                yield (
                    "pairs need a rule for the better answer: give `rewards` or "
                    "`compare`, or `revise` with per_prompt 1"
                )
            if self.rewards and self.per_prompt < 2:
                yield "pairs by rewards need at least two answers; raise per_prompt"
        elif self.best > self.per_prompt:
            yield (
                f"best is {self.best}, but per_prompt gives "
                f"{self.per_prompt} answers; lower it"
            )
        elif not self.chooses and self.best < self.per_prompt:
            yield (
                f"per_prompt is {self.per_prompt}, but nothing determines the best "
                "answer; give "
                f"`rewards`, or `compare`, or keep all with `best: {self.per_prompt}`"
            )
        elif self.compare is not None and self.best > 1:
            yield "compare takes one of two answers; set best to 1, or give `rewards`"


def made_problems(raw: RawSection) -> Iterator[tuple[Location, str]]:
    """Yield paths of a manifest that name a missing set, and sets that are made from
    each other.
    """
    sets = inside(raw, "examples")
    available = (
        f"there are {', '.join(map(str, sets))}"
        if sets
        else "there is no section `examples:`"
    )
    parents: dict[str, set[str]] = {str(name): set() for name in sets}
    places: list[tuple[str, ...]] = [(name,) for name in READERS]
    places += [("examples", name) for name in sets]
    for place in places:
        for number, entry in enumerate(entries(inside(raw, *place), "data")):
            path = str(inside(entry).get("path"))
            name = path.removeprefix(MADE)
            if name == path:
                continue
            if len(place) > 1:
                parents[str(place[1])].add(name)
            if name not in sets:
                hint = did_you_mean(name, map(str, sets))
                yield (
                    (*place, "data", number, "path"),
                    f"no such set: {name!r}{hint} ({available})",
                )
    circular = dependency_order(parents)[1]
    for name in circular:
        yield (
            ("examples", name, "data"),
            f"{', '.join(circular)} are made from each other in a cycle",
        )

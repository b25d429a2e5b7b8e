"""New prompts after the example of others (self-instruct: Wang et al. 2023), and how alike two prompts are."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any

from gristmill.dataprep.asking.prompt_templates import PromptTemplate
from gristmill.dataprep.asking.prompting import Answer, Request, prompt
from gristmill.dataprep.seeds import seeded_key
from gristmill.mixtures.steps.made_examples import Grow

GIVEN = ("shown", "wanted")
"""What templates get."""
FEWEST_WORDS, MOST_WORDS = 4, 150
"""Of a new prompt (the authors' code: github.com/yizhongw/self-instruct, bootstrap_instructions.py)."""
NEW_SHARE = 4
"""One in so many of the shown prompts is a new one: 2 of 8 (Wang et al., section 2.2)."""
LENGTH, ALIKE, EXCLUDED = "length", "alike", "excluded"
"""Why a new prompt is dropped."""
WORD = re.compile(r"\w+")
NUMBERED = re.compile(r"^[ \t]*(?:task[ \t]+)?\d+[ \t]*[.):][ \t]*", re.IGNORECASE | re.MULTILINE)


@dataclass(frozen=True)
class Shown:
    """A prompt that new ones are written after.

    Attributes:
        id: of the prompt.
        text: what it says.
        parents: the ids of those that it was written after, if it is a new one.
    """

    id: str
    text: str
    parents: tuple[str, ...] = ()


@dataclass
class Grown:
    """What came of it: the new prompts, how many rounds and requests that took, and how many were dropped for what."""

    prompts: list[Shown] = field(default_factory=list)
    rounds: int = 0
    requests: int = 0
    dropped: Counter[str] = field(default_factory=Counter)

    def as_json(self) -> dict[str, Any]:
        """For a summary."""
        return {
            "kept": len(self.prompts),
            "rounds": self.rounds,
            "requests": self.requests,
            "dropped": dict(sorted(self.dropped.items())),
        }


def grow(
    seeds: Sequence[Shown],
    section: Grow,
    template: PromptTemplate,
    seed: int,
    id_of: Callable[[str], str],
    is_excluded: Callable[[str], bool],
    ask: Callable[[Sequence[Request]], Iterable[Answer]],
) -> Grown:
    """Ask for new prompts until there are as many as are wanted, or no round is left.

    A request shows prompts that the hash of its number and of their ids chooses: who is left out changes those requests
    alone that would have shown it. Answers are read in the order of the requests, whenever they come.

    Args:
        seeds: the prompts that there are.
        section: how many are wanted, and when one is like another.
        template: of a request.
        seed: of the choices.
        id_of: the id of a prompt's text.
        is_excluded: whether an id is.
        ask: what answers requests, in their order.
    """
    found, pool = Grown(), Likeness(section.similarity)
    for one in seeds:
        pool.add(one.text)
    while found.rounds < section.rounds and len(found.prompts) < section.number:
        shown = [
            _shown(seeds, found.prompts, section.shown, seed, found.rounds, number)
            for number in range(ceil((section.number - len(found.prompts)) / section.shown))
        ]
        requests = [
            prompt(
                template.fill({"shown": [one.text for one in of_request], "wanted": section.shown}),
                about=" ".join(one.id for one in of_request),
            )
            for of_request in shown
        ]
        found.rounds += 1
        found.requests += len(requests)
        for of_request, answer in zip(shown, ask(requests), strict=True):
            parents = tuple(one.id for one in of_request)
            for text in read_numbered(answer.text, was_cut=answer.finish == "length"):
                id_ = id_of(text)
                reason = _reason(text, id_, pool, is_excluded)
                if reason is not None:
                    found.dropped[reason] += 1
                elif len(found.prompts) < section.number:
                    pool.add(text)
                    found.prompts.append(Shown(id_, text, parents))
    return found


def _shown(
    seeds: Sequence[Shown], new: Sequence[Shown], wanted: int, seed: int, rounds: int, number: int
) -> list[Shown]:
    """What a request shows, ordered by the hashes that choose."""

    def first(prompts: Sequence[Shown], count: int) -> list[tuple[int, Shown]]:
        keyed = [(seeded_key(seed, "shown", rounds, number, one.id), one) for one in prompts]
        return sorted(keyed, key=lambda item: item[0])[:count]

    of_new = first(new, wanted // NEW_SHARE)
    chosen = [*of_new, *first(seeds, wanted - len(of_new))]
    return [one for _, one in sorted(chosen, key=lambda item: item[0])]


def _reason(text: str, id_: str, pool: Likeness, is_excluded: Callable[[str], bool]) -> str | None:
    if is_excluded(id_):
        return EXCLUDED
    if not FEWEST_WORDS <= len(text.split()) <= MOST_WORDS:
        return LENGTH
    return ALIKE if pool.has_like(text) else None


def read_numbered(text: str, was_cut: bool = False) -> list[str]:
    """The entries of a numbered list, `1. ...`, `2) ...` or `Task 3: ...`; what stands before it is passed over.

    Args:
        text: what a model has written.
        was_cut: whether it ends in the middle of the last entry, which is then left out.
    """
    entries = [entry.strip() for entry in NUMBERED.split(text)[1:]]
    return [entry for entry in (entries[:-1] if was_cut else entries) if entry]


class Likeness:
    """Texts, and whether another one is like any of them.

    Args:
        threshold: the ROUGE-L from which on two are alike.
    """

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold
        self._texts: list[list[str]] = []
        self._holders: defaultdict[str, dict[int, int]] = defaultdict(dict)

    def add(self, text: str) -> None:
        """Compare with this text too, from now on."""
        words = words_of(text)
        for word, count in Counter(words).items():
            self._holders[word][len(self._texts)] = count
        self._texts.append(words)

    def has_like(self, text: str) -> bool:
        """Whether one of the texts is like this one. Only those that share enough words are compared word by word."""
        words, shared = words_of(text), Counter[int]()
        for word, count in Counter(words).items():
            for number, held in self._holders.get(word, {}).items():
                shared[number] += min(count, held)
        return any(
            2 * most >= self.threshold * (len(words) + len(self._texts[number]))
            and rouge_l(words, self._texts[number]) >= self.threshold
            for number, most in shared.items()
        )


def words_of(text: str) -> list[str]:
    """The words of a text in lower case."""
    return WORD.findall(text.lower())


def rouge_l(one: Sequence[str], other: Sequence[str]) -> float:
    """The F-measure of the longest common subsequence of two texts' words (Lin 2004, section 3.1), with beta 1."""
    total = len(one) + len(other)
    return 2 * common_subsequence(one, other) / total if total else 0.0


def common_subsequence(one: Sequence[str], other: Sequence[str]) -> int:
    """The length of the longest common subsequence, a row of the table at a time as the bits of an integer (Hyyrö 2004,
    "Bit-parallel LCS-length computation revisited")."""
    places: defaultdict[str, int] = defaultdict(int)
    for at, word in enumerate(one):
        places[word] |= 1 << at
    every = row = (1 << len(one)) - 1
    for word in other:
        met = row & places[word] if word in places else 0
        row = ((row + met) | (row - met)) & every
    return len(one) - row.bit_count()

"""New prompts from example prompts (self-instruct: Wang et al. 2023), and the
similarity of prompts.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil

from gristmill.core.seeds import seeded_key
from gristmill.dataprep.examples.conversations import Message
from gristmill.dataprep.examples.example_candidates import Asked
from gristmill.dataprep.llm.prompt_templates import PromptTemplate
from gristmill.dataprep.llm.prompting import Answer, Request, prompt
from gristmill.mixtures.steps.examples import Grow

GIVEN = ("shown", "wanted")
"""Names that the template may use."""
FEWEST_WORDS, MOST_WORDS = 4, 150
"""Words of a new prompt (the authors' code: github.com/yizhongw/self-instruct,
bootstrap_instructions.py).
"""
NEW_SHARE = 4
"""One in NEW_SHARE of the example prompts is a new one: 2 of 8 (Wang et al., section
2.2).
"""
LENGTH, ALIKE, EXCLUDED = "length", "alike", "excluded"
"""Reasons for dropping a new prompt."""
WORD = re.compile(r"\w+")
NUMBERED = re.compile(
    r"^[ \t]*(?:task[ \t]+)?\d+[ \t]*[.):][ \t]*", re.IGNORECASE | re.MULTILINE
)


@dataclass(frozen=True)
class GrownCounts:
    """Numbers of new prompts, of rounds and requests, and of dropped prompts by
    reason.
    """

    kept: int
    rounds: int
    requests: int
    dropped: Mapping[str, int]


@dataclass
class Grown:
    """Outcome: the new prompts, numbers of rounds and requests, and the number of
    dropped prompts by reason.
    """

    prompts: list[Asked] = field(default_factory=list)
    rounds: int = 0
    requests: int = 0
    dropped: Counter[str] = field(default_factory=Counter)

    def counts(self) -> GrownCounts:
        """Counts for the summary."""
        return GrownCounts(
            len(self.prompts), self.rounds, self.requests, dict(self.dropped)
        )


def grow(
    seeds: Sequence[Asked],
    section: Grow,
    template: PromptTemplate,
    seed: int,
    id_of: Callable[[str], str],
    excluded: Collection[str],
    ask: Callable[[Sequence[Request]], Iterable[Answer]],
) -> Grown:
    """Ask for new prompts until there are `section.number` of them, or all rounds are
    used.

    A hash of the request's number and the prompts' ids chooses the examples of a
    request: excluding a prompt changes only the requests that would have shown it.
    Answers are read in the order of the requests, independent of their arrival.

    Args:
        seeds: the existing prompts.
        section: number of new prompts, and the similarity limit.
        template: of a request.
        seed: of the choices.
        id_of: id of a prompt's text.
        excluded: ids of prompts that must not be generated.
        ask: answers requests, in their order.
    """
    grown = Grown()
    pool = Likeness(section.similarity)
    for example in seeds:
        pool.add(example.text)
    while grown.rounds < section.rounds and len(grown.prompts) < section.number:
        examples_by_request = [
            _shown(seeds, grown.prompts, section.shown, seed, grown.rounds, number)
            for number in range(
                ceil((section.number - len(grown.prompts)) / section.shown)
            )
        ]
        requests = []
        for request_examples in examples_by_request:
            texts = [example.text for example in request_examples]
            filled = template.fill({"shown": texts, "wanted": section.shown})
            about = " ".join(example.id for example in request_examples)
            requests.append(prompt(filled, about=about))
        grown.rounds += 1
        grown.requests += len(requests)
        for request_examples, answer in zip(
            examples_by_request, ask(requests), strict=True
        ):
            parents = tuple(example.id for example in request_examples)
            for text in read_numbered(answer.text, was_cut=answer.finish == "length"):
                id_ = id_of(text)
                if id_ in excluded:
                    grown.dropped[EXCLUDED] += 1
                elif not FEWEST_WORDS <= len(text.split()) <= MOST_WORDS:
                    grown.dropped[LENGTH] += 1
                elif pool.has_like(text):
                    grown.dropped[ALIKE] += 1
                elif len(grown.prompts) < section.number:
                    pool.add(text)
                    messages: list[Message] = [{"role": "user", "content": text}]
                    grown.prompts.append(Asked(id_, messages, parents))
    return grown


def _shown(
    seeds: Sequence[Asked],
    new: Sequence[Asked],
    count: int,
    seed: int,
    rounds: int,
    number: int,
) -> list[Asked]:
    """Examples of a request, ordered by the hashes that choose them."""

    def key(example: Asked) -> int:
        return seeded_key(seed, "shown", rounds, number, example.id)

    chosen = sorted(new, key=key)[: count // NEW_SHARE]
    chosen += sorted(seeds, key=key)[: count - len(chosen)]
    return sorted(chosen, key=key)


def read_numbered(text: str, was_cut: bool = False) -> list[str]:
    """Entries of a numbered list, `1. ...`, `2) ...` or `Task 3: ...`; text before the
    first entry is skipped.

    Args:
        text: a model's answer.
        was_cut: True if the text ends within the last entry, which is then dropped.
    """
    entries = [entry.strip() for entry in NUMBERED.split(text)[1:]]
    return [entry for entry in (entries[:-1] if was_cut else entries) if entry]


class Likeness:
    """Set of texts that can be searched for a similar text.

    Args:
        threshold: least ROUGE-L of similar texts.
    """

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold
        self._texts: list[list[str]] = []
        self._counts_by_word: defaultdict[str, dict[int, int]] = defaultdict(dict)

    def add(self, text: str) -> None:
        """Add a text."""
        words = words_of(text)
        for word, count in Counter(words).items():
            self._counts_by_word[word][len(self._texts)] = count
        self._texts.append(words)

    def has_like(self, text: str) -> bool:
        """Return True if a text is similar to one in the set. Only texts that share
        enough words are compared in full.
        """
        words = words_of(text)
        shared = Counter[int]()
        for word, count in Counter(words).items():
            for number, text_count in self._counts_by_word.get(word, {}).items():
                shared[number] += min(count, text_count)
        return any(
            2 * shared_count >= self.threshold * (len(words) + len(self._texts[number]))
            and rouge_l(words, self._texts[number]) >= self.threshold
            for number, shared_count in shared.items()
        )


def words_of(text: str) -> list[str]:
    """Lower-case words of a text."""
    return WORD.findall(text.lower())


def rouge_l(one: Sequence[str], other: Sequence[str]) -> float:
    """F-measure of the longest common subsequence of two texts' words (Lin 2004,
    section 3.1), with beta 1.
    """
    total = len(one) + len(other)
    return 2 * common_subsequence(one, other) / total if total else 0.0


def common_subsequence(one: Sequence[str], other: Sequence[str]) -> int:
    """Length of the longest common subsequence, one row of the table at a time as the
    bits of an integer (Hyyrö 2004, "Bit-parallel LCS-length computation revisited").
    """
    places: defaultdict[str, int] = defaultdict(int)
    for index, word in enumerate(one):
        places[word] |= 1 << index
    mask = row = (1 << len(one)) - 1
    for word in other:
        matches = row & places[word] if word in places else 0
        row = ((row + matches) | (row - matches)) & mask
    return len(one) - row.bit_count()

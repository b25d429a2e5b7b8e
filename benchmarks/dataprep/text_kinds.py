"""Thirty kinds of text, drawn by a seed, that a first filter should keep or drop.

Prose is that of Python's own reference (`pydoc_data.topics`, in every installation) and
of sentences from a grammar with a large vocabulary; the same in every run and on every
machine with the same Python.
"""

from __future__ import annotations

import base64
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pydoc_data.topics import topics

DOCUMENTS = 40
"""Documents of each kind."""
SEED = 2502
LOREM = (
    "lorem ipsum dolor sit amet consectetur adipiscing elit sed do eiusmod tempor "
    "incididunt ut labore et dolore magna aliqua ut enim ad minim veniam quis nostrud "
    "exercitation ullamco laboris nisi ut aliquip ex ea commodo consequat duis aute "
    "irure dolor in reprehenderit in voluptate velit esse cillum dolore eu fugiat "
    "nulla pariatur excepteur sint occaecat cupidatat non proident sunt in culpa qui "
    "officia deserunt mollit anim id est laborum"
).split()
PEOPLE = "Anna Ben Clara David Eva Frank Grace Henry Ines Jacob Karin Liam Mona Nils Olga Peter Rosa Sven Tara Victor".split()
PLACES = (
    "harbour market station school library garden bridge village museum workshop "
    "kitchen valley coast tower".split()
)
THINGS = (
    "boat letter lamp bread coat map clock basket painting ladder window violin "
    "bucket carpet kettle hammer notebook "
    "bicycle blanket candle drawer engine fence glove hat jar key mirror needle oven"
).split()
ADJECTIVES = (
    "old small bright heavy quiet broken wooden cheap yellow narrow warm strange "
    "simple careful distant rough gentle "
    "sharp empty famous muddy patient rusty silent steady sudden tired usual wet young"
).split()
VERBS = (
    "carried repaired found painted borrowed sold described watched moved bought "
    "cleaned dropped hid lost kept opened "
    "packed pushed raised showed traded used wanted weighed wrapped"
).split()
CLAUSES = (
    "{P} {v} {d} {a} {t}",
    "{d} {t} of {P} was {a}",
    "{n} {a} {t}s were {v} at {d} {l}",
    "nobody in {d} {l} had ever {v} such a {t}",
    "{P} and {Q} {v} every {t} that they could find",
    "{d} {l} looked {a} from here",
    "it took {P} {n} hours to reach {d} {a} {l}",
    "{Q} would rather have {v} {d} {t}",
    "behind {d} {l} there stood a {a} {t}",
    "everyone who came with {Q} {v} a {t}",
    "the {t} that {P} {v} was too {a}",
    "{P} asked whether {d} {a} {l} was open",
)
LINKS = (
    "because",
    "while",
    "although",
    "before",
    "so that",
    "after",
    "and",
    "but",
    "until",
    "since",
)
FOODS = "flour sugar butter milk eggs salt rice onions garlic carrots beans cream cheese lemon pepper oil yeast honey".split()
STEPS = (
    "Mix the {a} with the {b} in a large bowl until it is smooth.",
    "Add the {a} slowly and stir for {n} minutes.",
    "Let the dough rest under a cloth while you chop the {b}.",
    "Heat the {a} in a heavy pan and fry the {b} until they are golden.",
    "Pour it over the {b} and bake for {n} minutes at {t} degrees.",
    "Season with the {a} and serve it while it is still warm.",
    "Fold in the {a} and the {b}, and leave it to cool for {n} minutes.",
    "Bring it to the boil, then turn down the heat and cover the pan.",
    "Cut it into {n} pieces and put them on a tray with the {a}.",
    "Taste it, and add more {b} if you think that it needs some.",
)


@dataclass(frozen=True)
class Kind:
    """A kind of text.

    Attributes:
        name: in reports.
        keep: True if a first filter should keep it.
        make: writes a document from a random source.
        note: reason for wrong verdicts of rules, if there are any.
    """

    name: str
    keep: bool
    make: Callable[[random.Random], str]
    note: str = ""


def reference_prose() -> list[str]:
    """Return sentences of Python's reference without markup."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    sentences: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text):
        if re.search(r"[`{}<>*_=|]|::|^\s{4}", paragraph):
            continue
        flat = " ".join(paragraph.split())
        sentences += [
            s
            for s in re.findall(r"[A-Z][^.!?]+[.!?](?= |$)", flat)
            if 8 <= len(s.split()) <= 40
        ]
    return sentences


SENTENCES = reference_prose()
WORDS = [word for sentence in SENTENCES for word in sentence.split()]
FOLLOWERS: dict[str, list[str]] = {}
for _word, _next in pairwise(WORDS):
    FOLLOWERS.setdefault(_word, []).append(_next)
VOCABULARY = sorted({word.lower().strip(".,;:()?!\"'") for word in WORDS} - {""})


def clause(source: random.Random) -> str:
    """Write a clause of a story."""
    pick = source.choice
    return pick(CLAUSES).format(
        P=pick(PEOPLE),
        Q=pick(PEOPLE),
        v=pick(VERBS),
        a=pick(ADJECTIVES),
        t=pick(THINGS),
        l=pick(PLACES),
        d=pick(("the", "our", "their", "that", "her")),
        n=pick(("two", "three", "seven", "twelve", "forty")),
    )


def sentence(source: random.Random) -> str:
    """Write a sentence of a story."""
    text = f"{clause(source)} {source.choice(LINKS)} {clause(source)}"
    return f"{text[0].upper()}{text[1:]}."


def story(source: random.Random) -> str:
    """Write paragraphs of such sentences."""
    return paragraphs([sentence(source) for _ in range(24)], 6)


def paragraphs(sentences: list[str], size: int) -> str:
    """Join sentences to paragraphs of `size` each."""
    return "\n\n".join(
        " ".join(sentences[at : at + size]) for at in range(0, len(sentences), size)
    )


def article(source: random.Random) -> str:
    """Write paragraphs of Python's reference."""
    return paragraphs(source.sample(SENTENCES, 14), 4)


def dialogue(source: random.Random) -> str:
    """Write speech in turns."""
    speakers = source.sample(PEOPLE, 2)
    return "\n".join(
        f'"{sentence(source)}" said {speakers[turn % 2]}.' for turn in range(14)
    )


def letter(source: random.Random) -> str:
    """Write a letter with a greeting and a name at the end."""
    name = source.choice(PEOPLE)
    return f"Dear {name},\n\n{paragraphs([sentence(source) for _ in range(10)], 5)}\n\nWith kind regards,\n{source.choice(PEOPLE)}"


def questions(source: random.Random) -> str:
    """Write questions with answers."""
    all_questions = [
        f"Why did {source.choice(PEOPLE)} want the {source.choice(THINGS)} at the "
        f"{source.choice(PLACES)}?"
        for _ in range(7)
    ]
    return "\n\n".join(
        f"Q: {question}\nA: {sentence(source)} {sentence(source)}"
        for question in all_questions
    )


def review(source: random.Random) -> str:
    """Write a review of a thing."""
    thing = source.choice(THINGS)
    opening = (
        f"I bought this {thing} {source.randint(2, 9)} months ago and have "
        "used it nearly every day since."
    )
    return (
        f"{opening} {' '.join(sentence(source) for _ in range(7))} I would buy "
        f"the {thing} again, and {source.randint(3, 5)} of 5 stars seem fair to me."
    )


def report(source: random.Random) -> str:
    """Write news with dates and amounts."""
    lines = [
        f"In {source.randint(1950, 2020)} {clause(source)} for "
        f"{source.randint(2, 900):,} thousand, which is "
        f"{source.randint(2, 60)} percent more. {sentence(source)} {sentence(source)}"
        for _ in range(9)
    ]
    return paragraphs(lines, 3)


def steps(source: random.Random, number: int) -> list[str]:
    """Write steps of a recipe."""
    numbers = {"n": source.randint(3, 50), "t": 10 * source.randint(15, 24)}
    chosen = source.sample(STEPS, number)
    return [
        step.format(a=source.choice(FOODS), b=source.choice(FOODS), **numbers)
        for step in chosen
    ]


def recipe(source: random.Random) -> str:
    """Write ingredients with amounts, and numbered steps."""
    foods = source.sample(FOODS, 8)
    listed = "\n".join(f"- {source.randint(1, 500)} g {food}" for food in foods)
    numbered = "\n".join(
        f"{number}. {step}" for number, step in enumerate(steps(source, 9), start=1)
    )
    return (
        f"{source.choice(ADJECTIVES).title()} {foods[0]} cake\n\n{listed}\n\n{numbered}"
    )


def terse_recipe(source: random.Random) -> str:
    """Write a recipe of short lines, each with a number."""
    foods = source.sample(FOODS, 10)
    listed = "\n".join(
        f"{number} ) {source.randint(1, 9)} cups of {food}"
        for number, food in enumerate(foods, start=1)
    )
    numbered = "\n".join(
        f"{number} . {step}" for number, step in enumerate(steps(source, 7), start=1)
    )
    return f"What you need to make it:\n{listed}\n\nHow to make it:\n{numbered}"


def instructions(source: random.Random) -> str:
    """Write numbered instructions with bullets below them."""
    blocks = []
    for number in range(1, 7):
        bullets = "\n".join(
            f"  - {source.choice(ADJECTIVES)} {source.choice(THINGS)} from the "
            f"{source.choice(PLACES)}"
            for _ in range(3)
        )
        blocks.append(f"{number}. {sentence(source)}\n{bullets}")
    return "\n".join(blocks)


def contract(source: random.Random) -> str:
    """Write clauses with letters in brackets."""
    clauses = []
    for number in range(1, 6):
        clauses.append(
            f"{number}. The {source.choice(THINGS)} shall be kept at the "
            f"{source.choice(PLACES)} as follows:"
        )
        clauses += [f"({letter_}) {sentence(source)}" for letter_ in "abc"]
    return "\n".join(clauses)


PROBLEMS = (
    (
        "{P} has {a} {t}s and {b} boxes of {c}. How many is that?",
        "{b} * {c} = {bc} are in boxes, and {a} + {bc} = {s}.",
    ),
    (
        "A {t} costs {c} coins; {P} buys {b} and pays {a} for the way. What is spent?",
        "{P} spends {bc} + {a} = {s}.",
    ),
    (
        "{b} friends of {P} bring {c} {t}s each to the {a} there. Count them.",
        "They bring {bc}, which makes {s} in all.",
    ),
    (
        "In {b} weeks {P} sells {c} {t}s a week, and {a} later on. How many?",
        "First {bc}, then {a} more: {s} {t}s.",
    ),
    (
        "{P} walks {c} miles on {b} days and {a} on the last. How far is it?",
        "The {b} days give {bc} miles, so {s}.",
    ),
    (
        "Each of {b} shelves holds {c} {t}s, and {a} lie below. Add up.",
        "On shelves: {bc}. Below: {a}. Together {s}.",
    ),
)


def word_problem(source: random.Random) -> str:
    """Write maths in words, with a solution in words and numbers."""
    lines = []
    for number, (question, answer) in enumerate(source.sample(PROBLEMS, 6), start=1):
        a, b, c = source.randint(3, 40), source.randint(2, 9), source.randint(2, 20)
        values = {
            "P": source.choice(PEOPLE),
            "t": source.choice(THINGS),
            "a": a,
            "b": b,
            "c": c,
            "bc": b * c,
        }
        lines.append(
            f"{number}. {question.format(**values)}\n{answer.format(**values, s=a + b * c)}"
        )
    return "\n".join(lines)


def arithmetic(source: random.Random) -> str:
    """Write maths in words with a solution that is mostly equations."""
    lines = []
    for _ in range(6):
        a, b, c = (source.randint(2, 90) for _ in range(3))
        lines.append(f"{sentence(source)} It cost {a}, then {c} a day for {b} days.")
        lines.append(
            f"{b} - 1 = {b - 1}\n{b - 1} * {c} = {(b - 1) * c}\n{a} + "
            f"{(b - 1) * c} = {a + (b - 1) * c}"
        )
    return "\n".join(lines)


def poem(source: random.Random) -> str:
    """Write short lines in stanzas."""
    pick = source.choice
    lines = [
        f"The {pick(ADJECTIVES)} {pick(THINGS)} of the {pick(ADJECTIVES)} "
        f"{pick(PLACES)} and the {pick(THINGS)},"
        for _ in range(16)
    ]
    return "\n\n".join("\n".join(lines[at : at + 4]) for at in range(0, 16, 4))


def quoted_latin(source: random.Random) -> str:
    """Write an essay that quotes a few words of Latin."""
    return (
        f"{paragraphs([sentence(source) for _ in range(12)], 4)}\n\nCicero wrote "
        "of pain: neque porro quisquam est, and little has changed since then."
    )


def lorem(source: random.Random) -> str:
    """Write placeholder text with its usual beginning."""
    text = list(LOREM) + [source.choice(LOREM) for _ in range(120)]
    return _sentences(text, source)


def lorem_within(source: random.Random) -> str:
    """Write a page with a rest of its template."""
    return (
        f"{paragraphs([sentence(source) for _ in range(6)], 3)}\n\nLorem ipsum dolor "
        f"sit amet, {_sentences([source.choice(LOREM) for _ in range(60)], source)}"
    )


def salad(source: random.Random) -> str:
    """Draw words as often as they occur in prose, in sentences."""
    return _sentences(
        [
            source.choice(WORDS).lower().strip(".,;:()?!\"'") or "the"
            for _ in range(200)
        ],
        source,
    )


def endless_salad(source: random.Random) -> str:
    """Draw words without punctuation."""
    return " ".join(
        source.choice(WORDS).lower().strip(".,;:()?!\"'") or "the" for _ in range(200)
    )


def dictionary_salad(source: random.Random) -> str:
    """Draw words evenly from a vocabulary, with the stop words that a filter counts."""
    return _sentences(
        [*source.choices(VOCABULARY, k=190), "the", "of", "and", "that", "with"], source
    )


def _sentences(words: list[str], source: random.Random) -> str:
    text, at = [], 0
    while at < len(words):
        size = source.randint(7, 18)
        part = " ".join(words[at : at + size])
        text.append(f"{part[:1].upper()}{part[1:]}.")
        at += size
    return paragraphs(text, 5)


def markov(source: random.Random) -> str:
    """Draw a chain in which each word follows its predecessor as in prose."""
    words = [source.choice(WORDS)]
    while len(words) < 200:
        words.append(source.choice(FOLLOWERS.get(words[-1]) or WORDS))
    return " ".join(words)


def spam(source: random.Random) -> str:
    """Write sentences stuffed with a search phrase."""
    thing, place = source.choice(THINGS), source.choice(PLACES)
    phrase = f"best cheap {thing} {place}"
    lines = [
        f"If you are looking for the {phrase}, our {phrase} is the {phrase} that you "
        "need.",
        f"Buy {phrase} online today and get the {phrase} with free delivery to your "
        f"{place}.",
        f"Why is our {phrase} better than every other {phrase}? Because the {phrase} "
        f"is {source.choice(ADJECTIVES)}.",
        f"Read reviews of the {phrase} and order the {phrase} of "
        f"{source.choice(PEOPLE)} with a discount.",
    ]
    return "\n".join(source.sample(lines, 4) + source.sample(lines, 3))


def keywords(source: random.Random) -> str:
    """Write keywords between commas."""
    return ", ".join(
        f"{source.choice(ADJECTIVES)} {source.choice(THINGS)} {source.choice(PLACES)}"
        for _ in range(80)
    )


def menu(source: random.Random) -> str:
    """Write links of a page's navigation."""
    return "\n".join(
        source.choice(
            (
                source.choice(PLACES).title(),
                f"{source.choice(ADJECTIVES)} {source.choice(THINGS)}s".title(),
            )
        )
        for _ in range(90)
    )


def prices(source: random.Random) -> str:
    """Write a table of goods and prices."""
    return "\n".join(
        f"{source.choice(THINGS)} | {source.randint(1, 99)}.{source.randint(10, 99)} "
        f"| {source.randint(1, 500)} | {source.randint(1000, 9999)}"
        for _ in range(60)
    )


def log(source: random.Random) -> str:
    """Write lines of a server's log."""
    return "\n".join(
        f"2024-03-{source.randint(10, 28)} "
        f"12:{source.randint(10, 59)}:{source.randint(10, 59)} "
        f"10.0.0.{source.randint(1, 250)} GET "
        f"/{source.choice(PLACES)}/{source.randint(1, 9999)} 200 "
        f"{source.randint(100, 99999)}"
        for _ in range(50)
    )


def encoded(source: random.Random) -> str:
    """Write bytes in base 64 after a sentence."""
    lines = "\n".join(
        base64.b64encode(source.randbytes(48)).decode() for _ in range(60)
    )
    return (
        f"{sentence(source)} The attachment of the message follows and has to be "
        f"decoded with the key.\n{lines}"
    )


def repeated(source: random.Random) -> str:
    """Repeat a paragraph."""
    return "\n".join([" ".join(sentence(source) for _ in range(2))] * 12)


def cookies(source: random.Random) -> str:
    """Write notices of a site without content."""
    notice = (
        "We use cookies so that you have the best experience with our site. "
        "Read our privacy policy and our terms of use to learn more."
    )
    return "\n".join(
        [
            notice,
            f"Sign in to the {source.choice(PLACES)}.",
            "Share this page with a friend.",
            notice,
            "All rights reserved.",
            notice,
        ]
    )


KINDS = (
    Kind("story", True, story),
    Kind("technical prose", True, article),
    Kind("dialogue", True, dialogue),
    Kind("letter", True, letter),
    Kind("questions and answers", True, questions),
    Kind("review", True, review),
    Kind("report with numbers", True, report),
    Kind("recipe, numbered steps", True, recipe),
    Kind("recipe, short numbered lines", True, terse_recipe),
    Kind("instructions with bullets", True, instructions),
    Kind("contract with lettered clauses", True, contract),
    Kind("maths word problems", True, word_problem),
    Kind("maths, mostly equations", True, arithmetic),
    Kind("poem", True, poem),
    Kind("essay with a Latin quotation", True, quoted_latin),
    Kind("lorem ipsum", False, lorem),
    Kind("page with lorem ipsum", False, lorem_within),
    Kind("word salad in sentences", False, salad),
    Kind("word salad without marks", False, endless_salad),
    Kind("word salad of a dictionary", False, dictionary_salad),
    Kind(
        "Markov text",
        False,
        markov,
        "not caught: each pair of words is one of prose, and the shares of word "
        "trigrams known from 8.7 MB of books "
        "overlap (median 0.38, of technical prose 0.43)",
    ),
    Kind("SEO spam", False, spam),
    Kind("keywords", False, keywords),
    Kind("navigation", False, menu),
    Kind("table of prices", False, prices),
    Kind("server log", False, log),
    Kind("base 64", False, encoded),
    Kind("one paragraph repeated", False, repeated),
    Kind("cookie notices", False, cookies),
    Kind(
        "random letters",
        False,
        lambda source: _sentences(
            [
                "".join(source.choices("etaoinshrdlu", k=source.randint(2, 9)))
                for _ in range(150)
            ]
            + ["the", "of"],
            source,
        ),
    ),
)


def documents(kind: Kind, number: int = DOCUMENTS) -> list[str]:
    """Return documents of a kind; the same in every run."""
    return [
        kind.make(random.Random(f"{SEED} {kind.name} {place}"))
        for place in range(number)
    ]

"""The definitions of `lines_and_sentences.py` and the `rules_*.py` modules in the
plainest Python.

One document at a time. What the kernels must agree with exactly; nothing else uses it.
"""

from __future__ import annotations

import re
import unicodedata

from gristmill.dataprep.filters.curator import BOILERPLATE
from gristmill.dataprep.filters.lines_and_sentences import (
    ABBREVIATIONS,
    CLOSERS,
    OPENERS,
    TERMINAL_RANGES,
)
from gristmill.dataprep.text.unicode_tables import UNSPACED_RANGES, ranges

TERMINAL_MARKS = frozenset(
    chr(code)
    for first, last in ranges(TERMINAL_RANGES)
    for code in range(first, last + 1)
)


def words(text: str) -> int:
    """`lines_and_sentences.count_words` of one text."""
    kinds = "".join(map(_kind, text))
    return len(re.findall(r"1|w+(?:[.'’]w+)*|([^ 1w])\1*", kinds))


def _kind(character: str) -> str:
    if character.isspace():
        return " "
    if any(first <= ord(character) <= last for first, last in UNSPACED_RANGES):
        return "1"
    category = unicodedata.category(character)
    return (
        "w"
        if character.isalnum()
        or character == "_"
        or category[0] == "M"
        or category == "Cf"
        else character
    )


def sentences(text: str) -> int:
    """`lines_and_sentences.count_sentences` of one text."""
    return sum(map(sentences_of_line, text.splitlines()))


def sentences_of_line(line: str) -> int:
    """Sentences of one line."""
    marks, closers = re.escape("".join(TERMINAL_MARKS) + "…"), re.escape(CLOSERS)
    count, last = 0, 0
    for run in re.finditer(f"([{marks}]+)[{closers}]*", line):
        after = line[run.end() :]
        if after and not after[0].isspace() and not set(run[1]) - set(".?!…"):
            continue
        if after and run[1] == "." and is_abbreviation(line[: run.start()]):
            continue
        if set(run[1]) & {".", "…"} and run[1] != "." and after.lstrip()[:1].islower():
            continue
        count, last = count + 1, run.end()
    return count + bool(line[last:].strip())


def is_abbreviation(before: str) -> bool:
    """Return True if a text ends in an initial or in an abbreviation without its full
    stop.
    """
    word = "" if before[-1:].isspace() else (before.split() or [""])[-1].lstrip(OPENERS)
    return ascii_lower(word) in ABBREVIATIONS or (
        len(word) == 1 and word.isalpha() and word not in "iI"
    )


def ascii_lower(text: str) -> str:
    """Text with A to Z in lower case, and no other letters changed."""
    return re.sub("[A-Z]", lambda letter: letter[0].lower(), text)


def fineweb(text: str, short_line_characters: int = 30) -> dict[str, float]:
    """`fineweb.measure` of one text."""
    lines = [line for line in text.split("\n") if line.strip()]
    repeated = [line for row, line in enumerate(lines) if line in lines[:row]]
    return {
        "filled_lines": len(lines),
        "terminal_line_ratio": share(
            sum(line[-1] in TERMINAL_MARKS for line in lines), len(lines)
        ),
        "short_line_ratio": share(
            sum(len(line) <= short_line_characters for line in lines), len(lines)
        ),
        "repeated_line_char_ratio": share(
            sum(map(len, repeated)), len(text.replace("\n", ""))
        ),
        "newline_word_ratio": share(text.count("\n"), words(text)),
    }


def c4(text: str) -> dict[str, int]:
    """`c4.measure` of one text."""
    return {
        "document_characters": len(text),
        "sentences": sentences(text),
        "lorem_ipsum": ascii_lower(text).count("lorem ipsum"),
        "curly_brackets": text.count("{"),
    }


def mc4(text: str, paragraph_characters: int = 200) -> dict[str, int]:
    """`long_paragraphs` of one text."""
    return {
        "long_paragraphs": sum(
            len(line) >= paragraph_characters for line in text.split("\n")
        )
    }


def curator(text: str) -> dict[str, float]:
    """`curator.measure` of one text."""
    urls = re.findall(r"https?://(?:[a-zA-Z0-9$\-_@.&+!*(),]|%[0-9a-fA-F]{2})+", text)
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    paragraphs = ascii_lower(text).split("\n\n")
    boilerplate = sum(
        any(phrase in paragraph for phrase in BOILERPLATE) for paragraph in paragraphs
    )
    shares = {
        "non_alphanumeric_ratio": len(re.findall(r"[^a-zA-Z0-9\n?!,.]", text)),
        "digit_ratio": len(re.findall(r"[0-9]", text)),
        "url_char_ratio": sum(map(len, urls)),
        "whitespace_ratio": sum(character in " \t\n\r\b" for character in text),
        "bracket_ratio": sum(character in "()[]{}⟨⟩" for character in text),
    }
    return {
        **{
            name: number / len(text) if text else 1.0 for name, number in shares.items()
        },
        "boilerplate_paragraph_ratio": (
            1.0 if "lorem ipsum" in ascii_lower(text) else boilerplate / len(paragraphs)
        ),
        "unended_line_ratio": sum(line[-1] not in ".?!\"'" for line in lines)
        / len(lines)
        if lines
        else 1.0,
        "longest_word_characters": max(map(len, text.split()), default=0),
    }


def share(part: float, whole: float) -> float:
    """Quotient of `part` and `whole`; 0 if `whole` is 0."""
    return part / whole if whole else 0.0

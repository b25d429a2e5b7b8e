"""Plain Python reference of `tokenise_words.py` and `punctuated_words.py`, for tests
and `bench`.
"""

from __future__ import annotations

import re
import string
import unicodedata
from functools import cache

from gristmill.dataprep.text.unicode_tables import JOINERS, UNSPACED_RANGES, ranges
from gristmill.dataprep.words.punctuated_words import UNITS, WHOLE
from gristmill.dataprep.words.word_breaks import EXTENDED_PICTOGRAPHIC, WORD_BREAK

HYPHENS = "-–—~"
APOSTROPHES = "'’"
BEYOND = "\u00a1-\U0010ffff"
"""Character range of everything but ASCII, control characters and the no-break
space.
"""


def word_punct(text: str) -> list[str]:
    """`word_cuts.word_punct_words` of one text."""
    return re.findall(r"\w+|[^\w\s]+", text)


def unspaced(text: str) -> list[str]:
    """`word_cuts.unspaced_words` of one text."""
    words: list[str] = []
    for run in text.split():
        word = ""
        for character in run:
            letters = [
                character_before
                for character_before in word
                if is_word(character_before)
            ]
            if (
                is_word(character)
                and letters
                and (is_unspaced(character) or is_unspaced(letters[-1]))
            ):
                words.append(word)
                word = ""
            word += character
        words.append(word)
    return words


LETTERS = ("ALetter", "Hebrew_Letter")
ATTACHED = ("Extend", "Format", "ZWJ")
BREAKING = ("CR", "LF", "Newline")


def segmented(text: str) -> list[str]:
    """`word_breaks.segmented_words` of one text: a cut before each code point that no
    rule of UAX #29 joins.
    """
    values = [word_breaks().get(ord(character), "Other") for character in text]
    following = [""] * len(text)
    for at in range(len(text) - 2, -1, -1):
        following[at] = (
            following[at + 1] if values[at + 1] in ATTACHED else values[at + 1]
        )
    segments: list[str] = []
    second_last = last = ""
    for at, character in enumerate(text):
        value = values[at]
        is_pictograph = ord(character) in pictographs()
        joined = at > 0 and is_joined(
            second_last, last, values[at - 1], value, following[at], is_pictograph
        )
        if joined:
            segments[-1] += character
        else:
            segments.append(character)
        if value not in ATTACHED:
            second_last, last = last, value
    return [segment for segment in segments if segment[0].isalnum()]


def is_joined(
    second_last: str,
    last: str,
    before: str,
    value: str,
    following: str,
    is_pictograph: bool,
) -> bool:
    """Return True if no boundary lies before a code point, by the rules WB3a to WB13b
    of UAX #29.

    Args:
        second_last, last, following: values of its neighbours, without characters
            attached to them (WB4).
        before: value of the code point right before it.
        value: its own value.
    """
    if value in BREAKING or before in BREAKING:
        return False
    if value in ATTACHED or (before == "ZWJ" and is_pictograph):
        return True
    return (
        is_pair(last, value)
        or is_bridge(last, value, following)
        or is_bridge(second_last, last, value)
    )


def is_pair(last: str, value: str) -> bool:
    """Return True if two neighbours belong together (WB5, WB7a, WB8 to WB10, WB13 to
    WB13b).
    """
    if value == "ExtendNumLet":
        return last in (*LETTERS, "Numeric", "Katakana", "ExtendNumLet")
    if last == "ExtendNumLet":
        return value in (*LETTERS, "Numeric", "Katakana")
    if last == "Hebrew_Letter" and value == "Single_Quote":
        return True
    if last == "Katakana":
        return value == "Katakana"
    return last in (*LETTERS, "Numeric") and value in (*LETTERS, "Numeric")


def is_bridge(left: str, mark: str, right: str) -> bool:
    """Return True if a mark joins its two sides (WB6, WB7, WB7b, WB7c, WB11, WB12)."""
    if (
        left in LETTERS
        and right in LETTERS
        and mark in ("MidLetter", "MidNumLet", "Single_Quote")
    ):
        return True
    if left == right == "Hebrew_Letter" and mark == "Double_Quote":
        return True
    return left == right == "Numeric" and mark in (
        "MidNum",
        "MidNumLet",
        "Single_Quote",
    )


@cache
def word_breaks() -> dict[int, str]:
    """Word_Break value of every code point that has one."""
    return {
        code: value
        for value, code_ranges in WORD_BREAK.items()
        for first, last in ranges(code_ranges)
        for code in range(first, last + 1)
    }


@cache
def pictographs() -> frozenset[int]:
    """Code points that are Extended_Pictographic."""
    return frozenset(
        code
        for first, last in ranges(EXTENDED_PICTOGRAPHIC)
        for code in range(first, last + 1)
    )


def normalized(text: str) -> str:
    """RedPajama's normal form: no ASCII punctuation, lower case, NFD."""
    return unicodedata.normalize(
        "NFD", text.translate(str.maketrans("", "", string.punctuation)).lower()
    )


def punctuated(text: str) -> list[str]:
    """`punctuated_words.punctuated_words` of one text."""
    return [word for run in text.split() for word in take_apart(run)]


def take_apart(run: str) -> list[str]:
    """Words of a run without whitespace."""
    before: list[str] = []
    after: list[str] = []
    while run and run not in WHOLE and (length := opening_length(run)):
        before.append(run[:length])
        run = run[length:]
    while run and run not in WHOLE and (length := closing_length(run)):
        after.insert(0, run[-length:])
        run = run[:-length]
    if run in WHOLE or is_address(run):
        middle = [run]
    else:
        contraction = len(run) - contraction_length(run)
        middle = [*split_inside(run[:contraction]), run[contraction:]]
    return joined([word for word in [*before, *middle, *after] if word])


def joined(words: list[str]) -> list[str]:
    """Words of a run; neighbours that form a word of WHOLE are joined, unless they
    belong to a longer row of marks.
    """
    result: list[str] = []
    at = 0
    while at < len(words):
        ends = [
            end
            for end in range(len(words), at + 1, -1)
            if "".join(words[at:end]) in WHOLE
        ]
        around = (
            "".join(words[:at])[-1:] + "".join(words[ends[0] :])[:1] if ends else ""
        )
        mark = "".join(words[at : ends[0]]) if ends else ""
        if ends and not (len(mark) == 2 and mark[0] == mark[1] and mark[0] in around):
            result.append(mark)
            at = ends[0]
        else:
            result.append(words[at])
            at += 1
    return result


def is_address(run: str) -> bool:
    """Return True if a run is a web or mail address."""
    name = rf"[A-Za-z0-9{BEYOND}](?:[A-Za-z0-9_{BEYOND}-]*[A-Za-z0-9{BEYOND}])?"
    host = rf"(?:{name}\.)+[a-z{BEYOND}]{{2,}}(?::[0-9]{{2,5}})?(?:[/?#].*)?"
    before = r"\A[\w+.-]{2,}://|(?<=.)@"
    starts = [0, *(match.end() for match in re.finditer(before, run, re.DOTALL))]
    return any(re.fullmatch(host, run[start:], re.DOTALL) for start in starts)


def opening_length(run: str) -> int:
    """Number of leading characters that are a word of their own."""
    if run.startswith(".."):
        return len(run) - len(run.lstrip("."))
    if keeps(run[0]) or run[0] in "-/\\@^~|.":
        return 0
    return 0 if re.match(r"\+[0-9]", run) else 1


def closing_length(run: str) -> int:
    """Number of trailing characters that are a word of their own."""
    last = run[-1]
    if len(run) == 1:
        return 0
    if len(run) > 2 and last in "sS" and run[-2] in APOSTROPHES:
        return 2
    if last == ".":
        if run.endswith(".."):
            return len(run) - len(run.rstrip("."))
        return 0 if re.search(r"(^|[^A-Z])[A-Z]\.$|[/\\@^~|=$€£¥]\.$", run) else 1
    if keeps(last):
        unit = re.search(rf"[0-9]({'|'.join(UNITS)})$", run)
        return len(unit[1]) if unit else 0
    if last in "-/\\@^~|=+%$€£¥":
        return 1 if last in "+%$€£¥" and run[-2] in string.digits else 0
    return 1


def contraction_length(run: str) -> int:
    """Length of a contraction that closes a run."""
    if re.fullmatch("cannot", run, re.IGNORECASE | re.ASCII):
        return 3
    if re.search(rf".[nN][{APOSTROPHES}][tT]$", run, re.DOTALL):
        return 3
    if re.search(rf".[{APOSTROPHES}][dDmM]$", run, re.DOTALL):
        return 2
    if re.search(rf".[{APOSTROPHES}]([rRvV][eE]|[lL][lL])$", run, re.DOTALL):
        return 3
    return 0


def split_inside(run: str) -> list[str]:
    """Middle of a run, cut around marks."""
    words, word, step = [], "", 0
    while step < len(run):
        length = mark_length(run, step) if 0 < step < len(run) - 1 else 0
        if length == 0:
            word += run[step]
            step += 1
            continue
        words += [word, run[step : step + length]]
        word = ""
        step += length
    return [*words, word]


def mark_length(run: str, step: int) -> int:
    """Length of the mark that cuts a run here."""
    remainder, before, after = run[step:], run[step - 1], run[step + 1]
    dots = len(remainder) - len(remainder.lstrip("."))
    if dots > 1:
        return dots
    if remainder[0] == "…":
        return 1
    if remainder[0] == ".":
        small = before.isalpha() and before not in string.ascii_uppercase
        return 1 if small and after in string.ascii_uppercase else 0
    if remainder[0] == ",":
        return 1 if before.isalpha() and after.isalpha() else 0
    if remainder[0] in ":/<=>":
        return (
            1
            if (before.isalpha() or before in string.digits) and after.isalpha()
            else 0
        )
    hyphens = len(remainder) - len(remainder.lstrip(HYPHENS))
    if hyphens == 0 or hyphens == len(remainder):
        return 0
    if (before.isalpha() or before in string.digits) and remainder[hyphens].isalpha():
        return hyphens
    return 1 if re.match(r"[0-9]-[0-9]", before + remainder) else 0


def keeps(character: str) -> bool:
    """Return True if a character is a letter, a digit or a mark attached to one."""
    return (
        character.isalnum()
        or unicodedata.category(character) in ("Mn", "Mc")
        or ord(character) in JOINERS
    )


def is_word(character: str) -> bool:
    """Return True if `\\w` in a regular expression matches."""
    return character.isalnum() or character == "_"


def is_unspaced(character: str) -> bool:
    """Return True if a character's script has no spaces between words."""
    return any(first <= ord(character) <= last for first, last in UNSPACED_RANGES)

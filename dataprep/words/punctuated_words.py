"""Words with their punctuation marks taken off, close to what spaCy's rules for English give.

spaCy takes each run without whitespace apart by prefixes, suffixes and infixes, and by a list of 1,300 exceptions.
Here are the former, and of the latter abbreviations and emoticons (WHOLE): without these every `e.g.` would have a mark
more than spaCy's, and all verdicts that differ would drop.
"""

from __future__ import annotations

import numpy as np

from gristmill.dataprep.text.eight_bytes import HIGH_BITS, digits_of, first_of, letters_of
from gristmill.dataprep.text.hashing import load64
from gristmill.dataprep.text.kernels import kernel
from gristmill.dataprep.text.unicode_tables import ALPHABETIC, MARK, SPACE, WORD, decode
from gristmill.dataprep.words.word_cuts import Words

JOINED_AT_BEGIN = tuple(map(ord, "-/\\@^~|."))
"""Marks that open a word and stay with it: they are in none of spaCy's prefixes."""
JOINED_AT_END = tuple(map(ord, "-/\\@^~|=+%$€£¥"))
"""Marks that close a word and stay with it: they are in none of spaCy's suffixes, or after a digit only."""
AFTER_DIGITS = tuple(map(ord, "+%$€£¥"))
"""Those of them that do not stay with a digit."""
UNDERSCORE = 0x5F
HYPHENS = tuple(map(ord, "-–—~"))
SCHEME_MARKS = tuple(map(ord, "+-."))
CANNOT = tuple(map(ord, "cannot"))
APOSTROPHES = tuple(map(ord, "'’"))
FULL_STOP, PLUS, APOSTROPHE = 0x2E, 0x2B, 0x27

WHOLE = tuple(
    (
        # abbreviations
        "Adm. Ak. Ala. Apr. Ariz. Ark. Aug. Bros. Calif. Co. Colo. Conn. Corp. D.C. Dec. Del. Dr. E.G. E.g. Feb. Fla. Ga. "
        "Gen. Gov. I.E. I.e. Ia. Id. Ill. Inc. Ind. Jan. Jr. Jul. Jun. Kan. Kans. Ky. La. Ltd. Mar. Mass. Md. Messrs. "
        "Mich. Minn. Miss. Mo. Mont. Mr. Mrs. Ms. Mt. N.C. N.D. N.H. N.J. N.M. N.Y. Neb. Nebr. Nev. Nov. Oct. Okla. Ore. "
        "Pa. Ph.D. Prof. Rep. Rev. S.C. Sen. Sep. Sept. St. Tenn. Va. Wash. Wis. a.m. co. e.g. i.e. p.m. v.s. vs. "
        "a. b. c. d. e. f. g. h. i. j. k. l. m. n. o. p. q. r. s. t. u. v. w. x. y. z. and/or w/o "
        # words that have lost a piece
        "'s 'S 'd 'em 'cause 'bout ol' Ol' "
        # emoticons and doubled marks
        "'' (*_*) (-: (-; (-_-) (._.) (: (; (= (>_<) (^_^) )-: ): -_- -__- ._. :'( :') :'-( :'-) :( :(( :((( :() :) :)) "
        ":))) :* :-( :-(( :-((( :-) :-)) :-))) :-* :-/ :-> :-] :-| :-} :/ :> :] :| :} ;) ;-) ;_; <.< =( =) =/ =[ =] =| >.< "
        '>.> >:( @_@ [-: [: [= \\") ]= ^_^ ^__^ ^___^'
    ).split()
)
"""Exceptions of spaCy 3.8 that stay one word: those of at most eight characters of ASCII (`lang/en` and `lang`,
tokenizer_exceptions.py). Their case counts."""
UNITS = tuple("km m dm cm mm ha nm yd in ft kg g mg t lb oz mph hPa Pa mbar mb MB kb KB gb GB tb TB T G M K".split())
"""Units that are a word of their own behind a digit (spaCy's `char_classes.py`, those of ASCII letters)."""
LONGEST_WHOLE = 8
_WHOLE = np.sort(np.array([int.from_bytes(word.encode(), "big") for word in WHOLE], np.uint64))
_UNITS = np.sort(np.array([int.from_bytes(unit.encode(), "big") for unit in UNITS], np.uint64))
_LONGEST_UNIT = max(map(len, UNITS))
_PAIRS = np.zeros((128, 128), np.bool_)
for _first, _second in ((word[0], word[1]) for word in WHOLE if not (word[0].isalnum() or word[1].isalnum())):
    _PAIRS[ord(_first), ord(_second)] = True
"""Two marks that some emoticon begins with."""
NEVER_BEFORE_STOP = tuple(map(ord, "/\\@^~|=$€£¥"))
"""A full stop behind one of these stays with it: it is none of those that spaCy's suffix asks for."""

PLAIN, BLANK, OPENING, CLOSING, STOP = (np.uint16(1 << bit) for bit in (11, 12, 13, 14, 15))
"""What a byte of ASCII is in a run, beside the flags of its code point: a letter or digit, the end, a mark that is
always a word of its own where it opens the run or where it closes it, a full stop."""
FLAGS = np.uint16(0x07FF)
ZERO, ONE, EIGHT = np.uint64(0), np.uint64(1), np.uint64(8)
LETTER, DIGIT = ord("a"), ord("0")
"""All letters of ASCII have the same flags, and so do all digits."""


@kernel
def punctuated_words(data: np.ndarray, offsets: np.ndarray, flags: np.ndarray, which: np.ndarray) -> Words:
    """Cut some texts at whitespace and take the marks off; the arguments are those of `word_cuts.whitespace_words`."""
    most, longest = 0, 0
    for text in which:
        most += offsets[text + 1] - offsets[text]
        longest = max(longest, offsets[text + 1] - offsets[text])
    starts, ends = np.empty(most, np.int64), np.empty(most, np.int64)
    chars, seen = np.empty(most, np.int32), np.empty(most, np.uint16)
    codes, positions = np.empty(longest, np.int32), np.empty(longest + 1, np.int64)
    cuts = np.empty(longest + 1, np.bool_)
    word_offsets = np.zeros(len(which) + 1, np.int64)
    roles = _ascii_roles(flags)
    count = 0
    for number in range(len(which)):
        at, end = offsets[which[number]], offsets[which[number] + 1]
        while at < end:
            at, count = _simple_runs(data, at, end, roles, starts, ends, chars, seen, count)
            if at == end:
                break
            begin, length, found, plain = at, 0, np.uint16(0), True
            while at < end:
                code, width = int(data[at]), 1
                if code >= 0x80:
                    code, width = decode(data, at)
                flag = flags[code]
                if flag & SPACE != 0:
                    break
                found |= flag
                plain &= flag & (WORD | MARK) != 0 and code != UNDERSCORE
                at, length = at + width, length + 1
            odd = length > 0 and ((length == 6 and _spells_cannot(data, begin)) or _may_have_unit(data, begin, at))
            if plain and length > 0 and not odd:
                starts[count], ends[count], chars[count], seen[count] = begin, at, length, found
                count += 1
            elif length > 0:
                _decode_run(data, begin, at, codes, positions)
                take_apart(codes[:length], flags, cuts)
                count = _emit(codes, positions, cuts, length, flags, starts, ends, chars, seen, count)
            at += width
        word_offsets[number + 1] = count
    return Words(word_offsets, starts[:count], ends[:count], chars[:count], seen[:count])


@kernel
def _ascii_roles(flags: np.ndarray) -> np.ndarray:
    """The flags of every byte with what it is in a run of ASCII: uint16 of shape (256,); no role for other bytes."""
    roles = np.zeros(256, np.uint16)
    for code in range(128):
        roles[code] = flags[code]
        if flags[code] & SPACE != 0:
            roles[code] |= BLANK
        elif flags[code] & WORD != 0 and code != UNDERSCORE:
            roles[code] |= PLAIN
        elif code == FULL_STOP:
            roles[code] |= STOP
        else:
            roles[code] |= 0 if code in JOINED_AT_BEGIN or code == PLUS else OPENING
            roles[code] |= 0 if code in JOINED_AT_END else CLOSING
    return roles


@kernel
def _simple_runs(
    data: np.ndarray,
    at: int,
    end: int,
    roles: np.ndarray,
    starts: np.ndarray,
    ends: np.ndarray,
    chars: np.ndarray,
    seen: np.ndarray,
    count: int,
) -> tuple[np.int64, np.int64]:
    """Write the words of all runs from here on that are letters and digits of ASCII with marks around them.

    These are nearly all runs of English, and `take_apart` does with them what needs no second look: each mark is a
    word, and so is what is left in the middle.

    Returns:
        where the first other run begins, or the end; and the number of words by now.
    """
    place, stop, word = np.uint64(at), np.uint64(end), np.uint64(count)
    while place < stop:
        role = roles[data[place]]
        if role & BLANK != 0:
            place += ONE
            continue
        run, first = place, word
        last = 0  # the mark before, or none
        while role & OPENING != 0:
            if last and _PAIRS[last, data[place]]:
                return np.int64(run), np.int64(first)
            last = data[place]
            starts[word], ends[word], chars[word], seen[word] = place, place + ONE, 1, role & FLAGS
            place, word = place + ONE, word + ONE
            role = roles[data[place]] if place < stop else BLANK
        begin = place
        place, found = _plain_bytes(data, place, stop, roles)
        length = place - begin
        if length == ZERO:
            return np.int64(run), np.int64(first)
        role = roles[data[place]] if place < stop else BLANK
        starts[word], ends[word], chars[word], seen[word] = begin, place, length, found
        word += ONE
        marked = role & STOP != 0 or (role & CLOSING != 0 and data[place] == APOSTROPHE)
        joined = (marked and _is_whole(data, begin, place + ONE)) or (
            last == APOSTROPHE and _is_whole(data, begin - ONE, place)
        )
        if joined or _may_have_unit(data, begin, place):
            return np.int64(run), np.int64(first)
        last = 0
        while role & CLOSING != 0 or (role & STOP != 0 and _is_single_stop(data, place, stop)):
            if last and _PAIRS[last, data[place]]:
                return np.int64(run), np.int64(first)
            last = data[place]
            starts[word], ends[word], chars[word], seen[word] = place, place + ONE, 1, role & FLAGS
            place, word = place + ONE, word + ONE
            role = roles[data[place]] if place < stop else BLANK
        if role & BLANK == 0 or (length == np.uint64(6) and _begins_cannot(data, begin)):
            return np.int64(run), np.int64(first)
    return np.int64(end), np.int64(word)


@kernel
def _may_have_unit(data: np.ndarray, begin: int, end: int) -> bool:
    """Whether bytes begin with a digit and end in a letter of ASCII."""
    return _is_digit(data[begin]) and 0x61 <= data[end - 1] | 0x20 <= 0x7A


@kernel
def _plain_bytes(data: np.ndarray, place: np.uint64, stop: np.uint64, roles: np.ndarray) -> tuple[np.uint64, np.uint16]:
    """Where the letters and digits of ASCII from here on end, and the flags that they have together."""
    letters, digits = ZERO, ZERO
    while place + EIGHT <= stop:
        eight = load64(data, place)
        letter, digit = letters_of(eight), digits_of(eight)
        others = ~(letter | digit) & HIGH_BITS
        if others != 0:
            before = (others & (~others + ONE)) - ONE
            letters, digits = letters | letter & before, digits | digit & before
            place += first_of(others)
            break
        letters, digits, place = letters | letter, digits | digit, place + EIGHT
    found = (roles[LETTER] & FLAGS if letters else np.uint16(0)) | (roles[DIGIT] & FLAGS if digits else np.uint16(0))
    while place < stop and roles[data[place]] & PLAIN != 0:  # the last seven bytes of a text
        found |= roles[data[place]] & FLAGS
        place += ONE
    return place, found


@kernel
def _begins_cannot(data: np.ndarray, begin: int) -> bool:
    same = True
    for step in range(6):
        same &= data[begin + np.uint64(step)] | 0x20 == CANNOT[step]
    return same


@kernel
def _is_single_stop(data: np.ndarray, place: int, end: int) -> bool:
    """Whether the full stop here, which is not the first of its run, is not part of an ellipsis or of initials."""
    before = data[place - ONE]
    if before == FULL_STOP or _is_capital(before):
        return False
    return place + ONE == end or data[place + ONE] != FULL_STOP


@kernel
def _decode_run(data: np.ndarray, at: int, end: int, codes: np.ndarray, positions: np.ndarray) -> None:
    length = 0
    while at < end:
        code, width = decode(data, at)
        codes[length], positions[length] = code, at
        length, at = length + 1, at + width
    positions[length] = end


@kernel
def _emit(
    codes: np.ndarray,
    positions: np.ndarray,
    cuts: np.ndarray,
    length: int,
    flags: np.ndarray,
    starts: np.ndarray,
    ends: np.ndarray,
    chars: np.ndarray,
    seen: np.ndarray,
    count: int,
) -> int:
    first, found = 0, np.uint16(0)
    for step in range(length):
        found |= flags[codes[step]]
        if cuts[step + 1]:
            starts[count], ends[count] = positions[first], positions[step + 1]
            chars[count], seen[count] = step + 1 - first, found
            count, first, found = count + 1, step + 1, np.uint16(0)
    return count


@kernel
def take_apart(codes: np.ndarray, flags: np.ndarray, cuts: np.ndarray) -> None:
    """Mark where the words of a run without whitespace begin.

    From both ends inwards each mark is a word of its own, dots in a row are one, and `'s` at the end is one. A single
    dot at the end stays with an initial (`J.`, `U.S.`). A unit behind
    a digit is a word. What is left in the middle, unless it is an address, loses a contraction (n't, 're, 've,
    'll, 'd, 'm; `cannot` becomes two words) and is cut around commas between letters, around hyphens and
    `:<>=/` before a letter, around dots in a row, ellipses, and a dot between a small and a capital letter.

    What is in WHOLE stays one word, where it is left between marks and where several words come to it.

    Args:
        codes: int32 code points, n of them, none of them whitespace.
        cuts: bool, n + 1 of them or more; becomes true where a word begins and at the end, false between.
    """
    cuts[: len(codes)] = False
    cuts[0] = cuts[len(codes)] = True
    low, high = 0, len(codes)
    while low < high and not _is_whole(codes, low, high):
        taken = _taken_at_begin(codes, low, high, flags)
        if taken == 0:
            break
        low += taken
        cuts[low] = True
    while low < high and not _is_whole(codes, low, high):
        taken = _taken_at_end(codes, low, high, flags)
        if taken == 0:
            break
        high -= taken
        cuts[high] = True
    if not (_is_whole(codes, low, high) or _is_address(codes, low, high, flags)):
        _take_apart_middle(codes, low, high, flags, cuts)
    _join_whole(codes, cuts)


@kernel
def _take_apart_middle(codes: np.ndarray, low: int, high: int, flags: np.ndarray, cuts: np.ndarray) -> None:
    core = high - _contraction(codes, low, high)
    cuts[core] = True
    step = low + 1
    while step < core - 1:
        taken = _taken_inside(codes, step, core, flags)
        if taken > 0:
            cuts[step] = cuts[step + taken] = True
        step += max(taken, 1)


@kernel
def _is_whole(codes: np.ndarray, low: int, high: int) -> bool:
    """Whether code points (or bytes of ASCII) are in WHOLE."""
    if high - low > LONGEST_WHOLE or high - low < 2:
        return False
    packed = ZERO
    for step in range(low, high):
        if codes[step] >= 0x80:
            return False
        packed = packed << EIGHT | np.uint64(codes[step])
    place = np.searchsorted(_WHOLE, packed)
    return bool(place < len(_WHOLE) and _WHOLE[place] == packed)


@kernel
def _join_whole(codes: np.ndarray, cuts: np.ndarray) -> None:
    """Join neighbouring words that are one of WHOLE together; the longest from each place on, from left to right."""
    begin = 0
    while begin < len(codes) - 1:
        joined = 0
        for end in range(min(begin + LONGEST_WHOLE, len(codes)), begin + 1, -1):
            if cuts[end] and _is_whole(codes, begin, end) and not _repeats(codes, begin, end):
                joined = end
                break
        for step in range(begin + 1, joined):
            cuts[step] = False
        begin = max(joined, begin + 1)
        while begin < len(codes) and not cuts[begin]:
            begin += 1


@kernel
def _repeats(codes: np.ndarray, begin: int, end: int) -> bool:
    """Whether two equal marks are part of a longer row of them, most of which spaCy leaves apart."""
    mark = codes[begin]
    if end - begin != 2 or mark != codes[begin + 1]:
        return False
    return bool((begin > 0 and codes[begin - 1] == mark) or (end < len(codes) and codes[end] == mark))


@kernel
def _is_digit(code: int) -> bool:
    return 0x30 <= code <= 0x39


@kernel
def _is_capital(code: int) -> bool:
    return 0x41 <= code <= 0x5A


@kernel
def _dots(codes: np.ndarray, step: int, high: int) -> int:
    number = 0
    while step + number < high and codes[step + number] == 0x2E:
        number += 1
    return number


@kernel
def _taken_at_begin(codes: np.ndarray, low: int, high: int, flags: np.ndarray) -> int:
    code = codes[low]
    dots = _dots(codes, low, high)
    if dots > 1:
        return dots
    if (code != UNDERSCORE and flags[code] & (WORD | MARK) != 0) or code in JOINED_AT_BEGIN:
        return 0
    return 0 if code == 0x2B and low + 1 < high and _is_digit(codes[low + 1]) else 1


@kernel
def _taken_at_end(codes: np.ndarray, low: int, high: int, flags: np.ndarray) -> int:
    code = codes[high - 1]
    if high - low == 1:
        return 0
    before = codes[high - 2]
    if (code == 0x73 or code == 0x53) and before in APOSTROPHES and high - low > 2:
        return 2
    if code == 0x2E:
        dots = 1
        while high - dots > low and codes[high - dots - 1] == 0x2E:
            dots += 1
        initial = _is_capital(before) and not (high - low > 2 and _is_capital(codes[high - 3]))
        return dots if dots > 1 or not (initial or before in NEVER_BEFORE_STOP) else 0
    if code != UNDERSCORE and flags[code] & (WORD | MARK) != 0:
        return _unit(codes, low, high)
    if code in JOINED_AT_END:
        return 1 if code in AFTER_DIGITS and _is_digit(before) else 0
    return 1


@kernel
def _unit(codes: np.ndarray, low: int, high: int) -> int:
    """How many letters at the end are a unit behind a digit, or 0."""
    length, packed = 0, ZERO
    while length <= _LONGEST_UNIT and high - length > low and 0x61 <= codes[high - length - 1] | 0x20 <= 0x7A:
        packed |= np.uint64(codes[high - length - 1]) << np.uint64(8 * length)
        length += 1
    if length == 0 or length > _LONGEST_UNIT or high - length <= low or not _is_digit(codes[high - length - 1]):
        return 0
    place = np.searchsorted(_UNITS, packed)
    return length if place < len(_UNITS) and _UNITS[place] == packed else 0


@kernel
def _is_address(codes: np.ndarray, low: int, high: int, flags: np.ndarray) -> bool:
    """Whether code points are an address of the web or of mail: a host, what may stand before it, a path behind it."""
    if _is_host(codes, low, high):
        return True
    scheme = low  # where the characters that a scheme may have end
    while scheme < high and (flags[codes[scheme]] & WORD != 0 or codes[scheme] in SCHEME_MARKS):
        scheme += 1
    found = low + 2 <= scheme < high - 3 and codes[scheme] == 0x3A and _is_host(codes, scheme + 3, high)
    found &= codes[min(scheme + 1, high - 1)] == codes[min(scheme + 2, high - 1)] == 0x2F
    for step in range(low + 1, high - 1):
        found |= codes[step] == 0x40 and _is_host(codes, step + 1, high)
    return bool(found)


@kernel
def _is_host(codes: np.ndarray, low: int, high: int) -> bool:
    """Whether code points are names between dots, the last one of small letters alone, and a path or nothing behind."""
    dots, name, letters = 0, 0, True
    at = low
    while at < high:
        code = codes[at]
        letter = 0x61 <= code | 0x20 <= 0x7A or code > 0xA0
        if not (letter or _is_digit(code) or ((code == 0x2D or code == UNDERSCORE) and name > 0)):
            break
        letters &= 0x61 <= code <= 0x7A or code > 0xA0
        name, at = name + 1, at + 1
        if at < high - 1 and codes[at] == FULL_STOP:
            if codes[at - 1] == 0x2D or codes[at - 1] == UNDERSCORE:
                return False
            dots, name, letters, at = dots + 1, 0, True, at + 1
    if dots == 0 or name < 2 or not letters:
        return False
    if at < high and codes[at] == 0x3A:
        port = at + 1
        while port < high and _is_digit(codes[port]):
            port += 1
        if not 3 <= port - at <= 6:
            return False
        at = port
    return at == high or codes[at] == 0x2F or codes[at] == 0x3F or codes[at] == 0x23


@kernel
def _contraction(codes: np.ndarray, low: int, high: int) -> int:
    length = high - low
    if length == 6 and _spells_cannot(codes, low):
        return 3
    if length > 2 and codes[high - 2] in APOSTROPHES:
        last = codes[high - 1] | 0x20
        if last == 0x74 and length > 3 and codes[high - 3] | 0x20 == 0x6E:  # n't
            return 3
        return 2 if last == 0x64 or last == 0x6D else 0  # 'd, 'm
    if length > 3 and codes[high - 3] in APOSTROPHES:
        last, before = codes[high - 1] | 0x20, codes[high - 2] | 0x20
        have_or_are = last == 0x65 and (before == 0x72 or before == 0x76)  # 're, 've
        return 3 if have_or_are or last == before == 0x6C else 0  # 'll
    return 0


@kernel
def _spells_cannot(codes: np.ndarray, low: int) -> bool:
    same = True
    for step in range(6):
        same &= codes[low + step] | 0x20 == CANNOT[step]
    return same


@kernel
def _taken_inside(codes: np.ndarray, step: int, high: int, flags: np.ndarray) -> int:
    code, before = codes[step], codes[step - 1]
    dots = _dots(codes, step, high)
    if dots > 1 or code == 0x2026:
        return max(dots, 1)
    after = codes[step + 1]
    letter_before, letter_after = flags[before] & ALPHABETIC != 0, flags[after] & ALPHABETIC != 0
    if dots == 1:
        return 1 if letter_before and not _is_capital(before) and _is_capital(after) else 0
    if code == 0x2C:
        return 1 if letter_before and letter_after else 0
    if code == 0x3A or code == 0x2F or 0x3C <= code <= 0x3E:  # : / < = >
        return 1 if (letter_before or _is_digit(before)) and letter_after else 0
    if code not in HYPHENS:
        return 0
    number = 1
    while step + number < high and codes[step + number] in HYPHENS:
        number += 1
    if step + number >= high:
        return 0
    after = codes[step + number]
    letters = (letter_before or _is_digit(before)) and flags[after] & ALPHABETIC != 0
    digits = number == 1 and code == 0x2D and _is_digit(before) and _is_digit(after)
    return number if letters or digits else 0

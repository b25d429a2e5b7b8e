"""Words with their punctuation split off, an approximation of spaCy's rules for
English.

spaCy splits each run without whitespace by prefixes, suffixes and infixes, and by a
list of 1,300 exceptions. This module has the former, and of the latter abbreviations
and emoticons (WHOLE): without these every `e.g.` would have one mark more than in
spaCy, and all verdicts that differ would be drops.
"""

from __future__ import annotations

import numpy as np

from gristmill.dataprep.text.hashing import load64
from gristmill.dataprep.text.kernels import kernel
from gristmill.dataprep.text.swar import HIGH_BITS, digits_of, first_of, letters_of
from gristmill.dataprep.text.unicode_tables import ALPHABETIC, MARK, SPACE, WORD, decode
from gristmill.dataprep.words.tokenise_words import Words, total_bytes

JOINED_AT_BEGIN = tuple(map(ord, "-/\\@^~|."))
"""Marks that stay with the word after them: not among spaCy's prefixes."""
JOINED_AT_END = tuple(map(ord, "-/\\@^~|=+%$€£¥"))
"""Marks that stay with the word before them: not among spaCy's suffixes, or only after
a digit.
"""
AFTER_DIGITS = tuple(map(ord, "+%$€£¥"))
"""Marks of JOINED_AT_END that are split from a digit."""
UNDERSCORE = 0x5F
HYPHENS = tuple(map(ord, "-–—~"))
SCHEME_MARKS = tuple(map(ord, "+-."))
CANNOT = tuple(map(ord, "cannot"))
APOSTROPHES = tuple(map(ord, "'’"))
FULL_STOP, PLUS, APOSTROPHE = 0x2E, 0x2B, 0x27

WHOLE = tuple(
    (
        # abbreviations
        "Adm. Ak. Ala. Apr. Ariz. Ark. Aug. Bros. Calif. Co. Colo. Conn. Corp. D.C. "
        "Dec. Del. Dr. E.G. E.g. Feb. Fla. Ga. Gen. Gov. I.E. I.e. Ia. Id. Ill. Inc. "
        "Ind. Jan. Jr. Jul. Jun. Kan. Kans. Ky. La. Ltd. Mar. Mass. Md. Messrs. Mich. "
        "Minn. Miss. Mo. Mont. Mr. Mrs. Ms. Mt. N.C. N.D. N.H. N.J. N.M. N.Y. Neb. "
        "Nebr. Nev. Nov. Oct. Okla. Ore. Pa. Ph.D. Prof. Rep. Rev. S.C. Sen. Sep. "
        "Sept. St. Tenn. Va. Wash. Wis. a.m. co. e.g. i.e. p.m. v.s. vs. a. b. c. d. "
        "e. f. g. h. i. j. k. l. m. n. o. p. q. r. s. t. u. v. w. x. y. z. and/or w/o "
        # clipped words
        "'s 'S 'd 'em 'cause 'bout ol' Ol' "
        # emoticons and doubled marks
        "'' (*_*) (-: (-; (-_-) (._.) (: (; (= (>_<) (^_^) )-: ): -_- -__- ._. :'( "
        ":') :'-( :'-) :( :(( :((( :() :) :)) "
        ":))) :* :-( :-(( :-((( :-) :-)) :-))) :-* :-/ :-> :-] :-| :-} :/ :> :] :| "
        ":} ;) ;-) ;_; <.< =( =) =/ =[ =] =| >.< "
        '>.> >:( @_@ [-: [: [= \\") ]= ^_^ ^__^ ^___^'
    ).split()
)
"""Exceptions of spaCy 3.8 that stay one word: those of at most eight ASCII characters
(`lang/en` and `lang`, tokenizer_exceptions.py). Case-sensitive.
"""
UNITS = tuple(
    "km m dm cm mm ha nm yd in ft kg g mg t lb oz mph hPa Pa mbar mb MB kb "
    "KB gb GB tb TB T G M K".split()
)
"""Units that are separate words after a digit (spaCy's `char_classes.py`, those of
ASCII letters).
"""
LONGEST_WHOLE = 8
_WHOLE = np.sort(
    np.array([int.from_bytes(word.encode(), "big") for word in WHOLE], np.uint64)
)
_UNITS = np.sort(
    np.array([int.from_bytes(unit.encode(), "big") for unit in UNITS], np.uint64)
)
_LONGEST_UNIT = max(map(len, UNITS))
_PAIRS = np.zeros((128, 128), np.bool_)
for _first, _second in (
    (word[0], word[1]) for word in WHOLE if not (word[0].isalnum() or word[1].isalnum())
):
    _PAIRS[ord(_first), ord(_second)] = True
"""Pairs of marks at the start of an emoticon."""
NEVER_BEFORE_STOP = tuple(map(ord, "/\\@^~|=$€£¥"))
"""Marks that keep a full stop after them: spaCy's suffix does not match after them."""

PLAIN, BLANK, OPENING, CLOSING, STOP = (
    np.uint16(1 << bit) for bit in (11, 12, 13, 14, 15)
)
"""Roles of an ASCII byte in a run, beside the flags of its code point: a letter or
digit, the end of the run, a mark that is always a separate word at the start or at the
end of the run, a full stop.
"""
FLAGS = np.uint16(0x07FF)
ZERO, ONE, EIGHT = np.uint64(0), np.uint64(1), np.uint64(8)
LETTER, DIGIT = ord("a"), ord("0")
"""Examples: all ASCII letters have the same flags, and so do all digits."""


@kernel
def punctuated_words(
    data: np.ndarray, offsets: np.ndarray, flags: np.ndarray, which: np.ndarray
) -> Words:
    """Split texts at whitespace and split off punctuation; the arguments are those of
    `tokenise_words.whitespace_words`.
    """
    capacity = total_bytes(offsets, which)
    longest = 0
    for text in which:
        longest = max(longest, offsets[text + 1] - offsets[text])
    starts = np.empty(capacity, np.int64)
    ends = np.empty(capacity, np.int64)
    chars = np.empty(capacity, np.int32)
    flag_unions = np.empty(capacity, np.uint16)
    codes = np.empty(longest, np.int32)
    positions = np.empty(longest + 1, np.int64)
    cuts = np.empty(longest + 1, np.bool_)
    word_offsets = np.zeros(len(which) + 1, np.int64)
    roles = _ascii_roles(flags)
    count = 0
    for number in range(len(which)):
        pos = offsets[which[number]]
        end = offsets[which[number] + 1]
        while pos < end:
            pos, count = _simple_runs(
                data, pos, end, roles, starts, ends, chars, flag_unions, count
            )
            if pos == end:
                break
            begin = pos
            length = 0
            flag_union = np.uint16(0)
            is_plain = True
            while pos < end:
                code = int(data[pos])
                width = 1
                if code >= 0x80:
                    code, width = decode(data, pos)
                flag = flags[code]
                if flag & SPACE != 0:
                    break
                flag_union |= flag
                is_plain &= flag & (WORD | MARK) != 0 and code != UNDERSCORE
                pos = pos + width
                length = length + 1
            stop = pos
            pos += width
            if length == 0:
                continue
            is_exception = (
                length == 6 and _spells_cannot(data, begin)
            ) or _may_have_unit(data, begin, stop)
            if is_plain and not is_exception:
                starts[count], ends[count], chars[count], flag_unions[count] = (
                    begin,
                    stop,
                    length,
                    flag_union,
                )
                count += 1
                continue
            place = begin
            for step in range(length):
                positions[step] = place
                codes[step], size = decode(data, place)
                place += size
            positions[length] = stop
            take_apart(codes[:length], flags, cuts)
            first = 0
            flag_union = np.uint16(0)
            for step in range(length):
                flag_union |= flags[codes[step]]
                if cuts[step + 1]:
                    starts[count], ends[count] = positions[first], positions[step + 1]
                    chars[count], flag_unions[count] = step + 1 - first, flag_union
                    count = count + 1
                    first = step + 1
                    flag_union = np.uint16(0)
        word_offsets[number + 1] = count
    return Words(
        word_offsets, starts[:count], ends[:count], chars[:count], flag_unions[:count]
    )


@kernel
def _ascii_roles(flags: np.ndarray) -> np.ndarray:
    """Flags and roles of every byte: uint16 of shape (256,); no role for bytes beyond
    ASCII.
    """
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
    pos: int,
    end: int,
    roles: np.ndarray,
    starts: np.ndarray,
    ends: np.ndarray,
    chars: np.ndarray,
    flag_unions: np.ndarray,
    count: int,
) -> tuple[np.int64, np.int64]:
    """Write the words of leading runs that are ASCII letters and digits with marks
    around them.

    Nearly all English runs are such. Their words are the single marks and the part in
    the middle, as in `take_apart`.

    Returns:
        start of the first other run, or the end; and the number of words so far.
    """
    place = np.uint64(pos)
    stop = np.uint64(end)
    word = np.uint64(count)
    while place < stop:
        role = roles[data[place]]
        if role & BLANK != 0:
            place += ONE
            continue
        run = place
        first = word
        last_mark = 0  # the previous mark, or 0
        while role & OPENING != 0:
            if last_mark and _PAIRS[last_mark, data[place]]:
                return np.int64(run), np.int64(first)
            last_mark = data[place]
            starts[word], ends[word], chars[word], flag_unions[word] = (
                place,
                place + ONE,
                1,
                role & FLAGS,
            )
            place = place + ONE
            word = word + ONE
            role = roles[data[place]] if place < stop else BLANK
        begin = place
        place, flag_union = _plain_bytes(data, place, stop, roles)
        length = place - begin
        if length == ZERO:
            return np.int64(run), np.int64(first)
        role = roles[data[place]] if place < stop else BLANK
        starts[word], ends[word], chars[word], flag_unions[word] = (
            begin,
            place,
            length,
            flag_union,
        )
        word += ONE
        marked = role & STOP != 0 or (role & CLOSING != 0 and data[place] == APOSTROPHE)
        joined = (marked and _is_whole(data, begin, place + ONE)) or (
            last_mark == APOSTROPHE and _is_whole(data, begin - ONE, place)
        )
        if joined or _may_have_unit(data, begin, place):
            return np.int64(run), np.int64(first)
        last_mark = 0
        while role & CLOSING != 0 or (
            role & STOP != 0 and _is_single_stop(data, place, stop)
        ):
            if last_mark and _PAIRS[last_mark, data[place]]:
                return np.int64(run), np.int64(first)
            last_mark = data[place]
            starts[word], ends[word], chars[word], flag_unions[word] = (
                place,
                place + ONE,
                1,
                role & FLAGS,
            )
            place = place + ONE
            word = word + ONE
            role = roles[data[place]] if place < stop else BLANK
        if role & BLANK == 0 or (
            length == np.uint64(6) and _spells_cannot(data, np.int64(begin))
        ):
            return np.int64(run), np.int64(first)
    return np.int64(end), np.int64(word)


@kernel
def _may_have_unit(data: np.ndarray, begin: int, end: int) -> bool:
    """True if bytes start with a digit and end with an ASCII letter."""
    return _is_digit(data[begin]) and 0x61 <= data[end - 1] | 0x20 <= 0x7A


@kernel
def _plain_bytes(
    data: np.ndarray, place: np.uint64, stop: np.uint64, roles: np.ndarray
) -> tuple[np.uint64, np.uint16]:
    """End of the ASCII letters and digits from `place` on, and the union of their
    flags.
    """
    letters = ZERO
    digits = ZERO
    while place + EIGHT <= stop:
        eight = load64(data, place)
        letter = letters_of(eight)
        digit = digits_of(eight)
        other_bytes = ~(letter | digit) & HIGH_BITS
        if other_bytes != 0:
            before = (other_bytes & (~other_bytes + ONE)) - ONE
            letters = letters | letter & before
            digits = digits | digit & before
            place += first_of(other_bytes)
            break
        letters = letters | letter
        digits = digits | digit
        place = place + EIGHT
    flag_union = (roles[LETTER] & FLAGS if letters else np.uint16(0)) | (
        roles[DIGIT] & FLAGS if digits else np.uint16(0)
    )
    # the last seven bytes of a text
    while place < stop and roles[data[place]] & PLAIN != 0:
        flag_union |= roles[data[place]] & FLAGS
        place += ONE
    return place, flag_union


@kernel
def _is_single_stop(data: np.ndarray, place: int, end: int) -> bool:
    """True if a full stop, not the first byte of its run, is not part of an ellipsis or
    of initials.
    """
    previous = data[place - ONE]
    if previous == FULL_STOP or _is_capital(previous):
        return False
    return place + ONE == end or data[place + ONE] != FULL_STOP


@kernel
def take_apart(codes: np.ndarray, flags: np.ndarray, cuts: np.ndarray) -> None:
    """Mark the starts of the words in a run without whitespace.

    From both ends inwards each mark is a separate word, a row of dots is one word, and
    a final `'s` is one word. A single final dot stays with an initial (`J.`, `U.S.`). A
    unit after a digit is a word. Unless it is an address, the middle loses a
    contraction (n't, 're, 've, 'll, 'd, 'm; `cannot` becomes two words) and is split
    around commas between letters, around hyphens and `:<>=/` before a letter, around
    rows of dots, ellipses, and a dot between a lower-case and a capital letter.

    Entries of WHOLE stay one word, both between marks and if several words add up to
    one.

    Args:
        codes: int32 code points of shape (n,), without whitespace.
        cuts: output: bool of shape (n + 1 or more,); True at the start of each word and
            at the end.
    """
    cuts[: len(codes)] = False
    cuts[0] = cuts[len(codes)] = True
    low = 0
    high = len(codes)
    while low < high and not _is_whole(codes, low, high):
        length = _prefix_length(codes, low, high, flags)
        if length == 0:
            break
        low += length
        cuts[low] = True
    while low < high and not _is_whole(codes, low, high):
        length = _suffix_length(codes, low, high, flags)
        if length == 0:
            break
        high -= length
        cuts[high] = True
    if not (_is_whole(codes, low, high) or _is_address(codes, low, high, flags)):
        core = high - _contraction(codes, low, high)
        cuts[core] = True
        step = low + 1
        while step < core - 1:
            length = _infix_length(codes, step, core, flags)
            if length > 0:
                cuts[step] = cuts[step + length] = True
            step += max(length, 1)
    _join_whole(codes, cuts)


@kernel
def _is_whole(codes: np.ndarray, low: int, high: int) -> bool:
    """True if code points (or ASCII bytes) are in WHOLE."""
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
    """Join adjacent words that add up to an entry of WHOLE; longest match first, from
    left to right.
    """
    begin = 0
    while begin < len(codes) - 1:
        joined = 0
        for end in range(min(begin + LONGEST_WHOLE, len(codes)), begin + 1, -1):
            if not (cuts[end] and _is_whole(codes, begin, end)):
                continue
            mark = codes[begin]
            # spaCy leaves most pairs within a longer row of the mark split.
            is_in_row = (begin > 0 and codes[begin - 1] == mark) or (
                end < len(codes) and codes[end] == mark
            )
            if end - begin != 2 or mark != codes[begin + 1] or not is_in_row:
                joined = end
                break
        for step in range(begin + 1, joined):
            cuts[step] = False
        begin = max(joined, begin + 1)
        while begin < len(codes) and not cuts[begin]:
            begin += 1


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
def _prefix_length(codes: np.ndarray, low: int, high: int, flags: np.ndarray) -> int:
    code = codes[low]
    dots = _dots(codes, low, high)
    if dots > 1:
        return dots
    if (
        code != UNDERSCORE and flags[code] & (WORD | MARK) != 0
    ) or code in JOINED_AT_BEGIN:
        return 0
    return 0 if code == 0x2B and low + 1 < high and _is_digit(codes[low + 1]) else 1


@kernel
def _suffix_length(codes: np.ndarray, low: int, high: int, flags: np.ndarray) -> int:
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
        initial = _is_capital(before) and not (
            high - low > 2 and _is_capital(codes[high - 3])
        )
        return dots if dots > 1 or not (initial or before in NEVER_BEFORE_STOP) else 0
    if code == UNDERSCORE or flags[code] & (WORD | MARK) == 0:
        if code in JOINED_AT_END:
            return 1 if code in AFTER_DIGITS and _is_digit(before) else 0
        return 1
    # a unit after a digit
    length = 0
    packed = ZERO
    while (
        length <= _LONGEST_UNIT
        and high - length > low
        and 0x61 <= codes[high - length - 1] | 0x20 <= 0x7A
    ):
        packed |= np.uint64(codes[high - length - 1]) << np.uint64(8 * length)
        length += 1
    if (
        length == 0
        or length > _LONGEST_UNIT
        or high - length <= low
        or not _is_digit(codes[high - length - 1])
    ):
        return 0
    place = np.searchsorted(_UNITS, packed)
    return length if place < len(_UNITS) and _UNITS[place] == packed else 0


@kernel
def _is_address(codes: np.ndarray, low: int, high: int, flags: np.ndarray) -> bool:
    """True if code points are a web or mail address: a host, with an optional scheme or
    user, and an optional path.
    """
    if _is_host(codes, low, high):
        return True
    scheme = low  # end of the characters allowed in a scheme
    while scheme < high and (
        flags[codes[scheme]] & WORD != 0 or codes[scheme] in SCHEME_MARKS
    ):
        scheme += 1
    is_match = (
        low + 2 <= scheme < high - 3
        and codes[scheme] == 0x3A
        and _is_host(codes, scheme + 3, high)
    )
    is_match &= (
        codes[min(scheme + 1, high - 1)] == codes[min(scheme + 2, high - 1)] == 0x2F
    )
    for step in range(low + 1, high - 1):
        is_match |= codes[step] == 0x40 and _is_host(codes, step + 1, high)
    return bool(is_match)


@kernel
def _is_host(codes: np.ndarray, low: int, high: int) -> bool:
    """True if code points are names between dots, the last one of lower-case letters
    only, with an optional port and path.
    """
    dots = 0
    name = 0
    letters = True
    pos = low
    while pos < high:
        code = codes[pos]
        letter = 0x61 <= code | 0x20 <= 0x7A or code > 0xA0
        if not (
            letter
            or _is_digit(code)
            or ((code == 0x2D or code == UNDERSCORE) and name > 0)
        ):
            break
        letters &= 0x61 <= code <= 0x7A or code > 0xA0
        name = name + 1
        pos = pos + 1
        if pos < high - 1 and codes[pos] == FULL_STOP:
            if codes[pos - 1] == 0x2D or codes[pos - 1] == UNDERSCORE:
                return False
            dots = dots + 1
            name = 0
            letters = True
            pos = pos + 1
    if dots == 0 or name < 2 or not letters:
        return False
    if pos < high and codes[pos] == 0x3A:
        port = pos + 1
        while port < high and _is_digit(codes[port]):
            port += 1
        if not 3 <= port - pos <= 6:
            return False
        pos = port
    return pos == high or codes[pos] == 0x2F or codes[pos] == 0x3F or codes[pos] == 0x23


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
        last = codes[high - 1] | 0x20
        before = codes[high - 2] | 0x20
        have_or_are = last == 0x65 and (before == 0x72 or before == 0x76)  # 're, 've
        return 3 if have_or_are or last == before == 0x6C else 0  # 'll
    return 0


@kernel
def _spells_cannot(codes: np.ndarray, low: int) -> bool:
    is_equal = True
    for step in range(6):
        is_equal &= codes[low + step] | 0x20 == CANNOT[step]
    return is_equal


@kernel
def _infix_length(codes: np.ndarray, step: int, high: int, flags: np.ndarray) -> int:
    code = codes[step]
    before = codes[step - 1]
    dots = _dots(codes, step, high)
    if dots > 1 or code == 0x2026:
        return max(dots, 1)
    after = codes[step + 1]
    letter_before = flags[before] & ALPHABETIC != 0
    letter_after = flags[after] & ALPHABETIC != 0
    if dots == 1:
        return (
            1 if letter_before and not _is_capital(before) and _is_capital(after) else 0
        )
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

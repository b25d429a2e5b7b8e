"""Definitions of personal data: matchers of addresses and numbers, and the places in a
text where they look.

A matcher takes a text as UTF-8 bytes and a place in it, and returns the range of
personal data at that place, or None. All repetitions in the patterns are bounded, so
the cost of a matcher is bounded for every text.

- `email` (place: the `@`): a local part of at most 64 bytes (RFC 5321) of letters,
  digits and `._%+'-`, including Latin letters with diacritics, without a dot at its
  ends or two in a row; and a domain name that ends in a top level of the public suffix
  list. The reserved domains of RFC 2606 are excluded; `git@host:path` is not a mail
  address.
- `ip` (place: the first digit): an address that `ipaddress` parses and calls global;
  IPv6 starting with a group of four digits (2000::/3, the only assigned range so far).
  Networks (`.0` or `::` at the end) stay, as do probable versions: four numbers that
  are part of a longer name, that follow a word such as `version` or `section`, or of
  which three are below 10.
- `iban` (place: its first letter): a country's code, two check digits and the country's
  number of letters and digits (ISO 13616, the registry of SWIFT), in capitals,
  contiguous or in groups with single spaces or hyphens; the remainder modulo 97 is 1.
- `card` (place: its first digit): 13 to 19 digits, contiguous or in the groups printed
  on cards, with one separator throughout; an issuer's prefix and length (ISO/IEC 7812);
  Luhn's check digit.
- `phone` (place: its first digit, `+` or `(`), one of
  - `+`, an assigned country code and 8 to 15 digits in total (E.164); for +1 a North
    American number;
  - a North American number as `(212) 555-2368`, `212-555-2368` or `212.555.2368`, with
    or without a 1 before it; area and exchange begin with 2 to 9 and do not end in 11;
  - a British or an Australian number with its area code, in the usual groups: `020 7123
    4567`, `(0161) 234 5678`, `01234 567890`, `07911 123456`, `(02) 9123 4567`, `0412
    345 678`;
  - 7 to 13 digits in any grouping right after a word such as `tel`, `phone`, `fax` or
    `mobile` (PHONE_WORDS), unless they are written like a date; after `call`, a North
    American number with spaces too.

  Numbers 555-0100 to 555-0199 are fictitious and stay; so do British and Australian
  numbers reserved for films, unless one of these words precedes them.

A matcher matches only at these places: `find_anchors` may return too many places, never
too few.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_address
from string import ascii_letters, digits

import numpy as np

from gristmill.dataprep.cleaning.line_pieces import new_rows, push
from gristmill.dataprep.text.kernels import Bytes, Offsets, kernel
from gristmill.dataprep.text.unicode_tables import byte_table
from gristmill.mixtures.steps.clean import PiiKind

Span = tuple[int, int]
"""Start and end of a byte range in a text."""
Match = Callable[[bytes, int], Span | None]

LOCAL_PART_BYTES = 64
"""RFC 5321, section 4.5.3.1.1."""
CONTEXT_BYTES = 40
"""Bytes before a number that are searched for its context."""
RESERVED_DOMAINS = (b"example.com", b"example.net", b"example.org")
"""RFC 2606, section 3."""
REPOSITORY_USERS = (b"git", b"hg", b"svn", b"bzr")
"""Shared users of code hosts: `git@github.com:me/it.git`, `git@github.com` alone."""
LEAST_OF_AN_ADDRESS = 10
"""Numbers below this are small: three small ones of four make a version; one address in
five thousand is like that.
"""
NUMBERED = tuple(
    (
        "version versions ver v release releases rel revision rev build firmware driver "
        "kernel patch update upgrade sdk api schema section sections sect sec chapter "
        "clause paragraph para article art figure fig table appendix annex rule item "
        "oid"
    ).split()
)
"""Words before dotted numbers that are not addresses."""

_SSH = b"ssh://"
_LATIN = rb"[\xc3-\xc9][\x80-\xbf]"  # U+00C0 to U+027F
_LOCAL = re.compile(rb"(?:[A-Za-z0-9._%+'-]|" + _LATIN + rb")+\Z")
_LETTER = rb"(?:[A-Za-z0-9]|" + _LATIN + rb")"
_LABEL = _LETTER + rb"(?:(?:-|" + _LETTER + rb"){0,61}" + _LETTER + rb")?"
_DOMAIN = re.compile(_LABEL + rb"(?:\." + _LABEL + rb"){1,8}")
_IPV4 = re.compile(rb"\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3}(?!\w|\.\w|-[A-Za-z])")
_IPV6 = re.compile(rb"[23][0-9A-Fa-f]{3}:[0-9A-Fa-f:]{1,34}(?!\w)")
_NUMBERED = re.compile(
    rb"(?i:(?<![a-z])(?:"
    + "|".join(NUMBERED).encode()
    + rb")[.:]?\s{0,2}#?v?|\xc2\xa7\s?)\Z"
)
_WORD = re.compile(rb"\w")


def email(text: bytes, at: int) -> Span | None:
    """Span of the mail address around the `@` at `at`, or None."""
    if text[at : at + 1] != b"@":
        return None
    local = _LOCAL.search(text[max(0, at - LOCAL_PART_BYTES - 1) : at])
    domain = _DOMAIN.match(text, at + 1)
    if (
        local is None
        or domain is None
        or len(local[0]) > LOCAL_PART_BYTES
        or local[0].endswith(b".")
    ):
        return None
    name = local[0].rpartition(b"..")[2].lstrip(b".%+'-")
    labels = domain[0].split(b".")
    while labels and labels[-1].decode("utf-8", "replace").lower() not in top_levels():
        labels.pop()
    host = b".".join(labels) if len(labels) > 1 else b""
    end = at + 1 + len(host)
    host = host.lower()
    reserved = host in RESERVED_DOMAINS or host.endswith(
        tuple(b"." + reserved for reserved in RESERVED_DOMAINS)
    )
    begin = at - len(name)
    is_login = (
        name.lower() in REPOSITORY_USERS
        or text[max(0, begin - len(_SSH)) : begin].lower() == _SSH
    )
    return None if not name or not host or reserved or is_login else (begin, end)


@lru_cache(maxsize=1)
def top_levels() -> frozenset[str]:
    """Top-level domains of the public suffix list in the package `tld`, in Unicode and
    in ASCII.
    """
    import idna
    from tld.utils import get_tld_names

    (suffixes,) = get_tld_names().values()
    names = [name for name in suffixes.root.children or () if name != "*"]
    return frozenset(names) | {
        idna.encode(name).decode("ascii") for name in names if not name.isascii()
    }


def ip(text: bytes, at: int) -> Span | None:
    """Span of the public IP address that begins at `at`, or None."""
    previous = text[max(0, at - 1) : at]
    if match := _IPV4.match(text, at):
        # not within a name; after a slash or hyphen only in a URL or range
        before_previous = text[max(0, at - 2) : max(0, at - 1)]
        if previous == b"/":
            may_begin = not _WORD.match(before_previous)
        elif previous == b"-":
            may_begin = before_previous.isdigit()
        else:
            may_begin = previous != b"." and not _WORD.match(previous)
        address = _read(match[0]) if may_begin else None
        if address is None or not address.is_global or address.is_multicast:
            return None
        small = sum(number < LEAST_OF_AN_ADDRESS for number in address.packed)
        if small >= 3 or address.packed[-1] == 0:
            return None
        context = text[max(0, at - CONTEXT_BYTES) : at]
        return None if _NUMBERED.search(context) else match.span()
    match = _IPV6.match(text, at)
    if match is None or previous in (b":", b".", b"-") or _WORD.match(previous):
        return None
    address_text = match[0].removesuffix(b":")
    address = None if match[0].endswith(b"::") else _read(address_text)
    if address is None or not address.is_global:
        return None
    return at, at + len(address_text)


def _read(address_text: bytes) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(address_text.decode("ascii"))
    except ValueError:
        return None


IBAN_LENGTHS = {
    item[:2]: int(item[2:])
    for item in (
        "AD24 AE23 AL28 AT20 AZ28 BA20 BE16 BG22 BH22 BI27 BR29 BY28 CH21 CR22 CY28 "
        "CZ24 DE22 DJ27 DK18 DO28 EE20 EG29 ES24 FI18 FK18 FO18 FR27 GB22 GE22 GI23 "
        "GL18 GR27 GT28 HN28 HR21 HU28 IE22 IL23 IQ23 IS26 IT27 JO30 KW30 KZ20 LB28 "
        "LC32 LI21 LT20 LU20 LV21 LY25 MC27 MD24 ME22 MK19 MN20 MR27 MT31 MU30 NI28 "
        "NL18 NO15 OM23 PK24 PL28 PS29 PT25 QA29 RO24 RS22 RU33 SA24 SC31 SD18 SE24 "
        "SI19 SK24 SM27 SO23 ST25 SV28 TL23 TN24 TR26 UA29 VA22 VG24 XK20 YE30"
    ).split()
}
"""Country -> characters of an IBAN (SWIFT's IBAN registry)."""

CARD_PREFIXES = {
    "Visa": (b"4", (13, 16, 19)),
    "Mastercard": (b"51-55 2221-2720", (16,)),
    "American Express": (b"34 37", (15,)),
    "Diners Club": (b"300-305 36 38-39", (14, 16, 19)),
    "Discover": (b"6011 644-649 65", (16, 19)),
    "JCB": (b"3528-3589", (16, 19)),
    "UnionPay": (b"62", (16, 17, 18, 19)),
    "Maestro": (b"5018 5020 5038 5893 6304 6759 6761-6763", (13, 16, 19)),
}
"""Issuer -> its prefixes and numbers of digits (ISO/IEC 7812; the networks' published
rules).
"""

COUNTRY_CODES = frozenset(
    "1 7 20 27 30 31 32 33 34 36 39 40 41 43 44 45 46 47 48 49 51 52 53 54 55 56 57 58 "
    "60 61 62 63 64 65 66 81 82 84 86 90 91 92 93 94 95 98 211 212 213 216 218 220 221 "
    "222 223 224 225 226 227 228 229 230 231 232 233 234 235 236 237 238 239 240 241 "
    "242 243 244 245 246 247 248 249 250 251 252 253 254 255 256 257 258 260 261 262 "
    "263 264 265 266 267 268 269 290 291 297 298 299 350 351 352 353 354 355 356 357 "
    "358 359 370 371 372 373 374 375 376 377 378 380 381 382 383 385 386 387 389 420 "
    "421 423 500 501 502 503 504 505 506 507 508 509 590 591 592 593 594 595 596 597 "
    "598 599 670 672 673 674 675 676 677 678 679 680 681 682 683 685 686 687 688 689 "
    "690 691 692 850 852 853 855 856 880 886 960 961 962 963 964 965 966 967 968 970 "
    "971 972 973 974 975 976 977 992 993 994 995 996 998".split()
)
"""Assigned country codes (ITU-T E.164, list of assigned codes)."""
PHONE_WORDS = tuple(
    (
        "telephone phone tel ph fax telefax mobile mob cell cellphone cellular whatsapp "
        "sms hotline helpline landline telefon handy mobil téléphone portable teléfono "
        "telefono móvil celular cellulare telefone telemóvel telefoon puhelin tlf "
        "телефон тел моб факс τηλ 电话 電話 手机 전화 ☎ 📞"
    ).split()
)
"""Words and signs before telephone numbers, in the most frequent languages of web
text.
"""
CALL_WORDS = ("call", "dial", "text", "ring")

_GAP = rb"(?:[ .()/-]|\xc2\xa0){0,3}"
_AFTER = rb"(?![\w%]|[.,:/-]\d)"
_INTERNATIONAL = re.compile(rb"\+\d(?:" + _GAP + rb"\d){7,14}" + _AFTER)
_NORTH_AMERICAN = re.compile(
    rb"(?:\+?1[ .-]?)?(?:\((\d{3})\) ?(\d{3})[ .-](\d{4})|(\d{3})([.-])(\d{3})\5(\d{4}))"
    + _AFTER
)
_SPACE = rb"(?:[ -]|\xc2\xa0)"
_NATIONAL = re.compile(
    (
        rb"(?:"
        + rb"|".join(
            rb"(?:\(%b\)_?|%b_)%b" % (area, area, local)
            for area, local in (
                (rb"02\d", rb"[3-8]\d{3}_\d{4}"),  # London, Cardiff, Belfast, ...
                # other cities, services
                (rb"0(?:11\d|1\d1|3\d\d|8[047]\d)", rb"\d{3}_\d{4}"),
                (rb"01\d{3}", rb"\d{3}_?\d{3}"),  # other places
                (rb"07[1-57-9]\d{2}", rb"\d{3}_?\d{3}"),  # British mobiles
                (rb"0[2378]", rb"[2-9]\d{3}_\d{4}"),  # Australian areas
            )
        )
        + rb"|04\d\d_\d{3}_\d{3})"  # Australian mobiles
    ).replace(b"_", _SPACE)
    + _AFTER
    + rb"(?!"
    + _SPACE
    + rb"\d)"
)
"""Ofcom's National Telephone Numbering Plan; ACMA's Telecommunications Numbering Plan
2015.
"""
_FILM_NUMBERS = re.compile(
    rb"02079460\d{3}|0(?:11\d|1\d1)4960\d{3}|01632960\d{3}|07700900\d{3}|0[2378](?:5550|7010)\d{4}|0491570\d{3}"
)
"""Numbers reserved for drama by Ofcom and ACMA."""
_SPACED = re.compile(rb"(?:1 )?(\d{3}) (\d{3}) (\d{4})" + _AFTER)
_ANY_GROUPS = re.compile(
    rb"\(?\d(?:" + _GAP + rb"\d){6,12}" + _AFTER + rb"(?!" + _GAP + rb"\d)"
)
_DATE = re.compile(
    rb"\d{4}([./-])\d{1,2}\1\d{1,2}(?!\d)|\d{1,2}([./-])\d{1,2}\2\d{4}(?!\d)|(?:19|20)\d{2} ?- ?(?:19|20)\d{2}"
)
_LINK = rb"(?:[\s.:#|*)>\"'-]|\xef\xbc\x9a|\xc2\xa0){0,4}" + (
    rb"(?:(?:no|nr|num|number|numbers|us|me|at|on|is)\b[\s.:#]{0,3}){0,3}\(?\Z"
)


def _after_words(words: tuple[str, ...]) -> re.Pattern[bytes]:
    forms = "|".join(
        sorted(
            {form for word in words for form in (word, word.upper(), word.capitalize())}
        )
    )
    return re.compile(rb"(?<![A-Za-z])(?:" + forms.encode() + rb")" + _LINK)


_PHONE_WORDS, _CALL_WORDS = (
    _after_words(PHONE_WORDS),
    _after_words((*PHONE_WORDS, *CALL_WORDS)),
)
_IBANS = {
    country.encode(): re.compile(
        rb"[A-Z]{2}\d{2}(?:(?:[ -]|\xc2\xa0)?[0-9A-Z]){%d}(?!\w)" % (length - 4)
    )
    for country, length in IBAN_LENGTHS.items()
}
_CARD = re.compile(
    rb"(?:\d{13,19}|\d{4}([ -])\d{4}\1\d{4}\1\d{4}(?:\1\d{3})?|\d{4}([ -])\d{6}\2\d{4,5})(?!\w|[ .,:/-]\d)"
)
_NOT_DIGITS = re.compile(rb"\D+")


def digits_of(written: bytes) -> bytes:
    """Digits of a number, without separators."""
    return _NOT_DIGITS.sub(b"", written)


def iban(text: bytes, at: int) -> Span | None:
    """Span of the IBAN that begins at `at`, or None."""
    pattern = _IBANS.get(text[at : at + 2])
    match = (
        None
        if pattern is None or _WORD.match(text[max(0, at - 1) : at])
        else pattern.match(text, at)
    )
    if match is None:
        return None
    compact = re.sub(rb"[^0-9A-Z]", b"", match[0])
    rotated = compact[4:] + compact[:4]
    number = int("".join(str(int(chr(byte), 36)) for byte in rotated))
    return match.span() if number % 97 == 1 else None


def card(text: bytes, at: int) -> Span | None:
    """Span of the payment card number that begins at `at`, or None."""
    match = _CARD.match(text, at)
    previous = text[max(0, at - 1) : at]
    if match is None or _WORD.match(previous) or (previous and previous in b".,-/+#"):
        return None
    digits = digits_of(match[0])
    if not luhn(digits):
        return None
    for prefixes, lengths in CARD_PREFIXES.values():
        if len(digits) not in lengths:
            continue
        for prefix in prefixes.split():
            first, _, last = prefix.partition(b"-")
            if first <= digits[: len(first)] <= (last or first):
                return match.span()
    return None


def luhn(digits: bytes) -> bool:
    """Return True if the last digit is the check digit of those before it (ISO/IEC
    7812-1, annex B).
    """
    total = 0
    for index, byte in enumerate(reversed(digits)):
        digit = byte - 0x30
        total += digit if index % 2 == 0 else digit * 2 - 9 * (digit > 4)
    return total % 10 == 0


def phone(text: bytes, at: int) -> Span | None:
    """Span of the telephone number that begins at `at`, or None."""
    previous = text[max(0, at - 1) : at]
    if previous and (_WORD.match(previous) or previous in b"._,/-+#=$@%&\\~^"):
        return None
    if text[at : at + 1] == b"+":
        match = _NORTH_AMERICAN.match(text, at) or _INTERNATIONAL.match(text, at)
        if match is None:
            return None
        digits = digits_of(match[0])
        starts = {digits[:length].decode("ascii") for length in (1, 2, 3)}
        is_assigned = (
            is_north_american(digits) if "1" in starts else starts & COUNTRY_CODES
        )
        return match.span() if is_assigned else None
    match = _NORTH_AMERICAN.match(text, at)
    if match is not None and is_north_american(digits_of(match[0])):
        return match.span()
    match = _NATIONAL.match(text, at)
    if match is not None and not _FILM_NUMBERS.fullmatch(digits_of(match[0])):
        return match.span()
    context = text[max(0, at - CONTEXT_BYTES) : at]
    match = _SPACED.match(text, at)
    if (
        match is not None
        and is_north_american(digits_of(match[0]))
        and _CALL_WORDS.search(context)
    ):
        return match.span()
    match = _ANY_GROUPS.match(text, at)
    if (
        match is None
        or _DATE.match(text, at)
        or _is_fictitious(digits_of(match[0]))
        or not _PHONE_WORDS.search(context)
    ):
        return None
    return match.span()


def is_north_american(digits: bytes) -> bool:
    """Return True if 10 digits, or 11 with a leading 1, are an assignable number of the
    plan (NANPA).
    """
    digits = digits[1:] if len(digits) == 11 and digits.startswith(b"1") else digits
    if len(digits) != 10 or _is_fictitious(digits):
        return False
    area = digits[:3]
    exchange = digits[3:6]
    return all(
        part[0] >= 0x32 and not part.endswith(b"11") for part in (area, exchange)
    )


def _is_fictitious(digits: bytes) -> bool:
    """Return True for 555-0100 to 555-0199, which NANPA reserves for films and
    examples.
    """
    return len(digits) >= 7 and digits[-7:-2] == b"55501"


MATCHERS: dict[PiiKind, Match] = {
    "email": email,
    "iban": iban,
    "card": card,
    "ip": ip,
    "phone": phone,
}
KINDS = tuple(MATCHERS)
"""Kinds in order of precedence; anchors identify them by index."""
EMAIL, IBAN, CARD, IP, PHONE = range(len(KINDS))
_IS_WORD = byte_table(ascii_letters + digits + "_")
LEAST_CARD_DIGITS, LEAST_PHONE_DIGITS = 13, 7
MOST_GAP = 3
"""Most separators, of one byte or no-break spaces, between two digits of a telephone
number.
"""


@kernel
def find_anchors(
    data: Bytes, offsets: Offsets, wanted: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Find the places of n texts where personal data may be.

    Args:
        wanted: bool per kind, True for kinds to find.

    Returns:
        rows of place (byte within the text), kind and 0, ascending in each text; and
        per text its first row (int64 of shape (n + 1,)).
    """
    number = len(offsets) - 1
    rows = new_rows()
    count = 0
    firsts = np.zeros(number + 1, np.int64)
    for text in range(number):
        begin = offsets[text]
        end = offsets[text + 1]
        for at in range(begin, end):
            byte = data[at]
            # most of every text: lower-case letters, spaces, non-ASCII
            if byte >= 0x5B or byte < 0x28:
                continue
            if byte == 0x40:
                if (
                    wanted[EMAIL]
                    and at > begin
                    and at + 1 < end
                    and data[at - 1] > 0x20
                    and data[at + 1] >= 0x30
                ):
                    rows = push(rows, count, at - begin, EMAIL, 0)
                    count += 1
                continue
            digit = is_digit(byte)
            if not (digit or byte >= 0x41 or byte == 0x28 or byte == 0x2B):
                continue
            if at > begin and _IS_WORD[data[at - 1]]:
                continue
            for kind in range(IBAN, len(KINDS)):
                if not wanted[kind]:
                    continue
                if kind == IBAN:
                    is_anchor = (
                        byte >= 0x41
                        and at + 15 <= end
                        and 0x41 <= data[at + 1] <= 0x5A
                        and is_digit(data[at + 2])
                        and is_digit(data[at + 3])
                    )
                elif kind == CARD:
                    is_anchor = (
                        digit
                        and _digits_from(data, at, end, 1, False) >= LEAST_CARD_DIGITS
                    )
                elif kind == IP:
                    begins_ipv6 = (
                        at + 6 <= end
                        and (byte == 0x32 or byte == 0x33)
                        and data[at + 4] == 0x3A
                    )
                    is_anchor = digit and (begins_ipv6 or _begins_ipv4(data, at, end))
                else:
                    is_anchor = (
                        byte < 0x41
                        and _digits_from(data, at, end, MOST_GAP, True)
                        >= LEAST_PHONE_DIGITS
                    )
                if is_anchor:
                    rows = push(rows, count, at - begin, kind, 0)
                    count += 1
        firsts[text + 1] = count
    return rows[:count], firsts


@kernel
def is_digit(byte: int) -> bool:
    """Return True for an ASCII digit."""
    return 0x30 <= byte <= 0x39


@kernel
def _begins_ipv4(data: Bytes, at: int, end: int) -> bool:
    """Return True if up to three digits and a dot occur three times, followed by a
    digit.
    """
    for _ in range(3):
        digits = 0
        while at < end and is_digit(data[at]) and digits < 3:
            at = at + 1
            digits = digits + 1
        if digits == 0 or at >= end or data[at] != 0x2E:
            return False
        at += 1
    return at < end and is_digit(data[at])


@kernel
def _digits_from(data: Bytes, at: int, end: int, gap: int, marks: bool) -> int:
    """Number of digits in a row with at most `gap` separators between two, counted up
    to 13.

    Separators are space, no-break space and `-`, and with `marks` also `.`, `/`, `+`
    and parentheses.
    """
    digits = 0
    separators = 0
    while at < end and digits < LEAST_CARD_DIGITS:
        byte = data[at]
        if is_digit(byte):
            digits = digits + 1
            separators = 0
            at += 1
            continue
        width = 0
        if (
            byte == 0x20
            or byte == 0x2D
            or (marks and (byte == 0x2E or byte == 0x2F or 0x28 <= byte <= 0x2B))
        ):
            width = 1
        elif byte == 0xC2 and at + 1 < end and data[at + 1] == 0xA0:
            width = 2
        separators += 1
        if width == 0 or (separators > gap and digits):
            break
        at += width
    return digits

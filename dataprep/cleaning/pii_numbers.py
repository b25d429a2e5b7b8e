"""What counts as personal data among numbers: bank accounts, payment cards, telephones. See `pii.py` for matchers.

- `iban` (place: its first letter): a country's code, two check digits and as many letters and digits as that country
  has (ISO 13616, the registry of SWIFT), in capitals, alone or in groups with single spaces or hyphens; the remainder
  modulo 97 is 1.
- `card` (place: its first digit): 13 to 19 digits, alone or in the groups that cards show, one separator throughout;
  an issuer's prefix and length (ISO/IEC 7812); Luhn's check digit.
- `phone` (place: its first digit, `+` or `(`), one of
  - `+`, an assigned country code and 8 to 15 digits in all (E.164); for +1 a North American number;
  - a North American number as `(212) 555-2368`, `212-555-2368` or `212.555.2368`, with or without a 1 before it;
    area and exchange begin with 2 to 9 and do not end in 11;
  - a British or an Australian number with its area code, in the groups that these are written in: `020 7123 4567`,
    `(0161) 234 5678`, `01234 567890`, `07911 123456`, `(02) 9123 4567`, `0412 345 678`;
  - 7 to 13 digits in any grouping right after a word such as `tel`, `phone`, `fax` or `mobile` (PHONE_WORDS), unless
    they are written like a date; after `call`, a North American number with spaces too.

  Numbers 555-0100 to 555-0199 are nobody's, and stay; so do British and Australian ones that
  are kept for films, unless such a word stands before them.
"""

from __future__ import annotations

import re

from gristmill.dataprep.cleaning.pii import CONTEXT_BYTES, Span

IBAN_LENGTHS = {
    "AD": 24, "AE": 23, "AL": 28, "AT": 20, "AZ": 28, "BA": 20, "BE": 16, "BG": 22, "BH": 22, "BI": 27, "BR": 29,
    "BY": 28, "CH": 21, "CR": 22, "CY": 28, "CZ": 24, "DE": 22, "DJ": 27, "DK": 18, "DO": 28, "EE": 20, "EG": 29,
    "ES": 24, "FI": 18, "FK": 18, "FO": 18, "FR": 27, "GB": 22, "GE": 22, "GI": 23, "GL": 18, "GR": 27, "GT": 28,
    "HN": 28, "HR": 21, "HU": 28, "IE": 22, "IL": 23, "IQ": 23, "IS": 26, "IT": 27, "JO": 30, "KW": 30, "KZ": 20,
    "LB": 28, "LC": 32, "LI": 21, "LT": 20, "LU": 20, "LV": 21, "LY": 25, "MC": 27, "MD": 24, "ME": 22, "MK": 19,
    "MN": 20, "MR": 27, "MT": 31, "MU": 30, "NI": 28, "NL": 18, "NO": 15, "OM": 23, "PK": 24, "PL": 28, "PS": 29,
    "PT": 25, "QA": 29, "RO": 24, "RS": 22, "RU": 33, "SA": 24, "SC": 31, "SD": 18, "SE": 24, "SI": 19, "SK": 24,
    "SM": 27, "SO": 23, "ST": 25, "SV": 28, "TL": 23, "TN": 24, "TR": 26, "UA": 29, "VA": 22, "VG": 24, "XK": 20,
    "YE": 30,
}  # fmt: skip
"""Country -> characters of an IBAN (SWIFT's IBAN registry)."""

CARD_PREFIXES = (
    (4, 4, (13, 16, 19)),  # Visa
    (51, 55, (16,)), (2221, 2720, (16,)),  # Mastercard
    (34, 34, (15,)), (37, 37, (15,)),  # American Express
    (300, 305, (14, 16, 19)), (36, 36, (14, 16, 19)), (38, 39, (14, 16, 19)),  # Diners Club
    (6011, 6011, (16, 19)), (644, 649, (16, 19)), (65, 65, (16, 19)),  # Discover
    (3528, 3589, (16, 19)),  # JCB
    (62, 62, (16, 17, 18, 19)),  # UnionPay
    (5018, 5018, (13, 16, 19)), (5020, 5020, (13, 16, 19)), (5038, 5038, (13, 16, 19)), (5893, 5893, (13, 16, 19)),
    (6304, 6304, (13, 16, 19)), (6759, 6759, (13, 16, 19)), (6761, 6763, (13, 16, 19)),  # Maestro
)  # fmt: skip
"""(first prefix, last prefix, lengths) of the issuers' ranges (ISO/IEC 7812; the networks' published rules)."""

COUNTRY_CODES = frozenset(
    "1 7 20 27 30 31 32 33 34 36 39 40 41 43 44 45 46 47 48 49 51 52 53 54 55 56 57 58 60 61 62 63 64 65 66 "
    "81 82 84 86 90 91 92 93 94 95 98 211 212 213 216 218 220 221 222 223 224 225 226 227 228 229 230 231 232 "
    "233 234 235 236 237 238 239 240 241 242 243 244 245 246 247 248 249 250 251 252 253 254 255 256 257 258 "
    "260 261 262 263 264 265 266 267 268 269 290 291 297 298 299 350 351 352 353 354 355 356 357 358 359 370 "
    "371 372 373 374 375 376 377 378 380 381 382 383 385 386 387 389 420 421 423 500 501 502 503 504 505 506 "
    "507 508 509 590 591 592 593 594 595 596 597 598 599 670 672 673 674 675 676 677 678 679 680 681 682 683 "
    "685 686 687 688 689 690 691 692 850 852 853 855 856 880 886 960 961 962 963 964 965 966 967 968 970 971 "
    "972 973 974 975 976 977 992 993 994 995 996 998".split()
)
"""The country codes that are assigned (ITU-T E.164, list of assigned codes)."""
PHONE_WORDS = (
    "telephone", "phone", "tel", "ph", "fax", "telefax", "mobile", "mob", "cell", "cellphone", "cellular",
    "whatsapp", "sms", "hotline", "helpline", "landline", "telefon", "handy", "mobil", "téléphone", "portable",
    "teléfono", "telefono", "móvil", "celular", "cellulare", "telefone", "telemóvel", "telefoon", "puhelin",
    "tlf", "телефон", "тел", "моб", "факс", "τηλ", "电话", "電話", "手机", "전화", "☎", "📞",
)  # fmt: skip
"""Words and signs that a telephone number follows, in the languages that most web text is written in."""
CALL_WORDS = ("call", "dial", "text", "ring")

_GAP = rb"(?:[ .()/-]|\xc2\xa0){0,3}"
_AFTER = rb"(?![\w%]|[.,:/-]\d)"
_INTERNATIONAL = re.compile(rb"\+\d(?:" + _GAP + rb"\d){7,14}" + _AFTER)
_NORTH_AMERICAN = re.compile(
    rb"(?:\+?1[ .-]?)?(?:\((\d{3})\) ?(\d{3})[ .-](\d{4})|(\d{3})([.-])(\d{3})\5(\d{4}))" + _AFTER
)
_SPACE = rb"(?:[ -]|\xc2\xa0)"
_AREA = rb"(?:\(%s\)" + _SPACE + rb"?|%s" + _SPACE + rb")"


def _area(digits: bytes) -> bytes:
    """An area code in brackets, or with a space or hyphen behind it."""
    return _AREA % (digits, digits)


_NATIONAL = re.compile(rb"(?:" + rb"|".join((
    _area(rb"02\d") + rb"[3-8]\d{3}" + _SPACE + rb"\d{4}",  # London, Cardiff, Belfast, ...
    _area(rb"0(?:11\d|1\d1|3\d\d|8[047]\d)") + rb"\d{3}" + _SPACE + rb"\d{4}",  # other cities, services
    _area(rb"01\d{3}") + rb"\d{3}" + _SPACE + rb"?\d{3}",  # other places
    _area(rb"07[1-57-9]\d{2}") + rb"\d{3}" + _SPACE + rb"?\d{3}",  # British mobiles
    _area(rb"0[2378]") + rb"[2-9]\d{3}" + _SPACE + rb"\d{4}",  # Australian areas
    rb"04\d\d" + _SPACE + rb"\d{3}" + _SPACE + rb"\d{3}",  # Australian mobiles
)) + rb")" + _AFTER + rb"(?!" + _SPACE + rb"\d)")
"""Ofcom's National Telephone Numbering Plan; ACMA's Telecommunications Numbering Plan 2015."""
_FILM_NUMBERS = re.compile(
    rb"02079460\d{3}|0(?:11\d|1\d1)4960\d{3}|01632960\d{3}|07700900\d{3}|0[2378](?:5550|7010)\d{4}|0491570\d{3}")
"""Numbers for use in drama: Ofcom's list, and ACMA's."""
_SPACED = re.compile(rb"(?:1 )?(\d{3}) (\d{3}) (\d{4})" + _AFTER)
_ANY_GROUPS = re.compile(rb"\(?\d(?:" + _GAP + rb"\d){6,12}" + _AFTER + rb"(?!" + _GAP + rb"\d)")
_DATE = re.compile(
    rb"\d{4}([./-])\d{1,2}\1\d{1,2}(?!\d)|\d{1,2}([./-])\d{1,2}\2\d{4}(?!\d)|(?:19|20)\d{2} ?- ?(?:19|20)\d{2}"
)
_LINK = rb"(?:[\s.:#|*)>\"'-]|\xef\xbc\x9a|\xc2\xa0){0,4}" + (
    rb"(?:(?:no|nr|num|number|numbers|us|me|at|on|is)\b[\s.:#]{0,3}){0,3}\(?\Z"
)


def _after_words(words: tuple[str, ...]) -> re.Pattern[bytes]:
    known = "|".join(sorted({form for word in words for form in (word, word.upper(), word.capitalize())}))
    return re.compile(rb"(?<![A-Za-z])(?:" + known.encode() + rb")" + _LINK)


_PHONE_WORDS, _CALL_WORDS = _after_words(PHONE_WORDS), _after_words((*PHONE_WORDS, *CALL_WORDS))
_IBANS = {
    country.encode(): re.compile(rb"[A-Z]{2}\d{2}(?:(?:[ -]|\xc2\xa0)?[0-9A-Z]){%d}(?!\w)" % (length - 4))
    for country, length in IBAN_LENGTHS.items()
}
_CARD = re.compile(
    rb"(?:\d{13,19}|\d{4}([ -])\d{4}\1\d{4}\1\d{4}(?:\1\d{3})?|\d{4}([ -])\d{6}\2\d{4,5})(?!\w|[ .,:/-]\d)"
)
_NOT_DIGITS = re.compile(rb"\D+")
_WORD = re.compile(rb"\w")


def digits_of(written: bytes) -> bytes:
    """The digits of a number, without what groups them."""
    return _NOT_DIGITS.sub(b"", written)


def iban(text: bytes, at: int) -> Span | None:
    """The IBAN that begins at a place."""
    pattern = _IBANS.get(text[at : at + 2])
    found = None if pattern is None or _WORD.match(text[max(0, at - 1) : at]) else pattern.match(text, at)
    if found is None:
        return None
    compact = re.sub(rb"[^0-9A-Z]", b"", found[0])
    rotated = compact[4:] + compact[:4]
    number = int("".join(str(int(chr(byte), 36)) for byte in rotated))
    return found.span() if number % 97 == 1 else None


def card(text: bytes, at: int) -> Span | None:
    """The payment card number that begins at a place."""
    found = _CARD.match(text, at)
    before = text[max(0, at - 1) : at]
    if found is None or _WORD.match(before) or before in (b".", b",", b"-", b"/", b"+", b"#"):
        return None
    digits = digits_of(found[0])
    return found.span() if _is_issued(digits) and luhn(digits) else None


def _is_issued(digits: bytes) -> bool:
    return any(
        first <= int(digits[: len(str(first))]) <= last and len(digits) in lengths
        for first, last, lengths in CARD_PREFIXES
    )


def luhn(digits: bytes) -> bool:
    """Whether the last digit is the check digit of those before it (ISO/IEC 7812-1, annex B)."""
    total = 0
    for place, byte in enumerate(reversed(digits)):
        digit = byte - 0x30
        total += digit if place % 2 == 0 else digit * 2 - 9 * (digit > 4)
    return total % 10 == 0


def phone(text: bytes, at: int) -> Span | None:
    """The telephone number that begins at a place."""
    before = text[max(0, at - 1) : at]
    if _WORD.match(before) or before in tuple(b"._,/-+#=$@%&\\~^"[place : place + 1] for place in range(15)):
        return None
    if text[at : at + 1] == b"+":
        found = _NORTH_AMERICAN.match(text, at) or _INTERNATIONAL.match(text, at)
        return found.span() if found is not None and _is_international(digits_of(found[0])) else None
    found = _NORTH_AMERICAN.match(text, at)
    if found is not None and is_north_american(digits_of(found[0])):
        return found.span()
    found = _NATIONAL.match(text, at)
    if found is not None and not _FILM_NUMBERS.fullmatch(digits_of(found[0])):
        return found.span()
    context = text[max(0, at - CONTEXT_BYTES) : at]
    found = _SPACED.match(text, at)
    if found is not None and is_north_american(digits_of(found[0])) and _CALL_WORDS.search(context):
        return found.span()
    found = _ANY_GROUPS.match(text, at)
    if found is None or _DATE.match(text, at) or _is_fiction(digits_of(found[0])) or not _PHONE_WORDS.search(context):
        return None
    return found.span()


def _is_international(digits: bytes) -> bool:
    if digits.startswith(b"1"):
        return is_north_american(digits)
    return any(digits[:length].decode("ascii") in COUNTRY_CODES for length in (1, 2, 3))


def is_north_american(digits: bytes) -> bool:
    """Whether 10 digits, or 11 with a 1 before them, are a number of the plan (NANPA) that somebody can have."""
    digits = digits[1:] if len(digits) == 11 and digits.startswith(b"1") else digits
    if len(digits) != 10 or _is_fiction(digits):
        return False
    area, exchange = digits[:3], digits[3:6]
    return all(part[0] >= 0x32 and not part.endswith(b"11") for part in (area, exchange))


def _is_fiction(digits: bytes) -> bool:
    """555-0100 to 555-0199, which NANPA keeps for films and examples."""
    return len(digits) >= 7 and digits[-7:-2] == b"55501"

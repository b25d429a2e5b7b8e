"""Sentences with personal data and with strings that only look like it, drawn by a
seed, for `cleaning.py`.

Values are drawn from wide ranges in the spellings of real text: addresses of people and
machines, numbers with right and wrong check digits, versions, sections, dates, ISBNs,
hashes, prices, private addresses, code.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from ipaddress import IPv4Address, IPv6Address
from typing import NamedTuple

from gristmill.dataprep.cleaning.pii import IBAN_LENGTHS, luhn
from gristmill.mixtures.steps.clean import PiiKind

Draw = Callable[[random.Random], str]

FRAMES = (
    "Please send it to {} before Friday.",
    "{}",
    "Contact: {}",
    "The entry ({}) was changed by the office.",
    "We wrote down {}, and nothing came of it.",
    "- {}\n- another line",
    "It was {}.",
    '"{}" is what it says',
)
PHONE_FRAMES = (
    "Tel: {}",
    "Phone {}",
    "tel. {} or by mail",
    "Mobile: {} (evenings)",
    "Fax {}.",
    "Telefon: {}",
    "Our hotline: {}",
)
"""Frames of a phone number in its national form."""


class Sentence(NamedTuple):
    """A sentence (ASCII) with a value.

    Attributes:
        kind: of the value; None if it only looks like personal data.
        text: the sentence.
        begin, end: span of the value.
    """

    kind: PiiKind | None
    text: str
    begin: int
    end: int


def sentences(seed: int, per_spelling: int) -> list[Sentence]:
    """Return `per_spelling` sentences of every spelling of every kind, and of every
    lookalike; shuffled.
    """
    source = random.Random(seed)
    samples = [
        _frame(
            source, kind, draw(source), PHONE_FRAMES if draw is _national else FRAMES
        )
        for kind, draw in _spellings()
        for _ in range(per_spelling)
    ]
    source.shuffle(samples)
    return samples


def _spellings() -> Iterator[tuple[PiiKind | None, Draw]]:
    for kind, draws in POSITIVES.items():
        yield from ((kind, draw) for draw in draws)
    yield from ((None, draw) for draw in NEGATIVES)


def _frame(
    source: random.Random, kind: PiiKind | None, value: str, frames: Sequence[str]
) -> Sentence:
    before, after = source.choice(frames).split("{}")
    return Sentence(kind, before + value + after, len(before), len(before) + len(value))


def _digits(source: random.Random, number: int) -> str:
    return "".join(source.choices(string.digits, k=number))


def _name(source: random.Random) -> str:
    return "".join(source.choices("abdefgiklmnoprstuvz", k=source.randint(3, 8)))


def _domain(source: random.Random) -> str:
    top = source.choice(
        [
            "com",
            "org",
            "net",
            "de",
            "co.uk",
            "io",
            "fr",
            "com.br",
            "info",
            "edu",
            "museum",
        ]
    )
    return f"{_name(source)}{source.choice(['', '-' + _name(source), '.' + _name(source)])}.{top}"


def _email(source: random.Random, local: str) -> str:
    names = {"a": _name(source), "b": _name(source), "n": _digits(source, 3)}
    return f"{local.format(**names)}@{_domain(source)}"


def _public_ipv4(source: random.Random) -> str:
    while True:
        address = IPv4Address(source.getrandbits(32))
        if address.is_global and not address.is_multicast:
            return str(address)


def _private_ipv4(source: random.Random) -> str:
    return source.choice(
        ["10.{}.{}.{}", "192.168.{1}.{2}", "172.16.{1}.{2}", "127.0.0.{2}"]
    ).format(*(source.randint(0, 255) for _ in range(3)))


def _public_ipv6(source: random.Random, spelling: Callable[[IPv6Address], str]) -> str:
    """Draw an address as providers assign them: 32 bits of theirs, 32 of a customer's
    network, and a host.
    """
    provider = source.choice(
        [0x24000000, 0x26000000, 0x28000000, 0x2A000000]
    ) + source.randint(0x1000, 0xFFFF)
    host = source.choice([source.getrandbits(64), source.getrandbits(12) + 1])
    return spelling(
        IPv6Address((provider << 96) | (source.getrandbits(32) << 64) | host)
    )


def _iban(source: random.Random, separator: str, shift: int = 0) -> str:
    country = source.choice(sorted(IBAN_LENGTHS))
    account = _digits(source, IBAN_LENGTHS[country] - 4)
    number = int("".join(str(int(letter, 36)) for letter in f"{account}{country}00"))
    return _grouped(f"{country}{98 - number % 97 + shift:02d}{account}", 4, separator)


def _card(source: random.Random, separator: str, shift: int = 0) -> str:
    prefix = source.choice(["4", "51", "55", "2221", "6011", "3530"])
    body = prefix + _digits(source, 15 - len(prefix))
    check = next(digit for digit in range(10) if luhn(f"{body}{digit}".encode()))
    return _grouped(f"{body}{(check + shift) % 10}", 4, separator)


def _grouped(text: str, size: int, separator: str) -> str:
    return separator.join(text[at : at + size] for at in range(0, len(text), size))


def _north_american(source: random.Random, form: str) -> str:
    def part() -> str:
        return f"{source.randint(2, 9)}{source.choice('023456789')}{source.choice('0234678')}"

    return form.format(part(), part(), _digits(source, 4))


def _international(source: random.Random, separator: str) -> str:
    code = source.choice(
        [
            "44",
            "49",
            "33",
            "34",
            "39",
            "31",
            "48",
            "91",
            "81",
            "55",
            "61",
            "353",
            "420",
            "972",
        ]
    )
    return f"+{code}{separator}" + _grouped(
        f"{source.randint(2, 9)}{_digits(source, 8)}", 3, separator
    )


def _national(source: random.Random) -> str:
    form = source.choice(["0{}0 {} {}", "(0{}0) {}{}", "0{}0/{}{}", "0{}1-{}-{}"])
    return form.format(source.randint(1, 9), _digits(source, 3), _digits(source, 4))


def _numbers(source: random.Random, form: str) -> str:
    """Replace every question mark of a form by a random digit."""
    return "".join(_digits(source, 1) if letter == "?" else letter for letter in form)


POSITIVES: Mapping[PiiKind, Sequence[Draw]] = {
    "email": [
        partial(_email, local=local)
        for local in ("{a}", "{a}.{b}", "{a}_{b}", "{a}{n}", "{a}+{b}", "o'{a}")
    ],
    "ip": [
        _public_ipv4,
        partial(_public_ipv6, spelling=str),
        partial(_public_ipv6, spelling=lambda address: address.exploded.upper()),
    ],
    "iban": [partial(_iban, separator=separator) for separator in ("", " ", "-")],
    "card": [partial(_card, separator=separator) for separator in ("", " ", "-")],
    "phone": [
        *(
            partial(_international, separator=separator)
            for separator in ("", " ", "-", ".")
        ),
        *(
            partial(_north_american, form=form)
            for form in ("({}) {}-{}", "{}-{}-{}", "{}.{}.{}", "+1 {}-{}-{}")
        ),
        _national,
    ],
}
"""Kind -> its spellings."""

NEGATIVES: Sequence[Draw] = [
    _private_ipv4,
    partial(_iban, separator="", shift=1),
    partial(_card, separator=" ", shift=3),
    *(
        partial(_numbers, form=form)
        for form in (
            "version 3.1?.?.??",
            "v?.?.??.?",
            "section 1?.??.??.?",
            "2.?.1.?",
            "978-?-??-??????-?",
            "2012-1-2?",
            "1?.12.2019",
            "1?:3?:??.??????",
            "$1,???,???.??",
            "order ????????????????",
            "??????????",
            "#????????",
            "ticket-????-???-????",
            "user@localhost",
            "pkg@1?.?.?",
            "@handle??",
            "3??x???@2x.png",
            "git@github.com:team/repo?.git",
            "0x????????",
            "3.1415926????????",
            "std::vector<int> v?",
            "??:??:5e:??:53:??",
            "2001:db8::??",
            "fe80::??",
            "ISSN ????-???",
            "1????????? bytes",
            "f(x) = ?????? + ????? - ????",
            "e83c5163316f89bf????ab23ca2e25604af290",
            "1990-2000 (??? ??? ??? people)",
            "me??@example.com",
            "202-555-01??",
            "pages 1??-12?, 2??-???",
        )
    ),
]
"""Strings that only look like personal data."""

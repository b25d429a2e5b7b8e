"""Masking of personal data: detection, exceptions and placeholders."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from gristmill.dataprep.cleaning.masking import find_pii, mask, placeholder
from gristmill.dataprep.cleaning.pii import CARD_PREFIXES, IBAN_LENGTHS, KINDS
from gristmill.dataprep.edits import apply_edits
from gristmill.mixtures.steps.clean import Clean, Mask, PiiKind

ALL = Mask(kinds=KINDS)
TAGS = Mask(kinds=KINDS, style="tag")


def masked(text: str, options: Mask = TAGS) -> str:
    texts = pa.array([text], pa.large_string())
    result: str = apply_edits(texts, mask(texts, options)[0]).to_pylist()[0]
    return result


MASKED = {
    "mail bob@mail.org.": "mail <EMAIL>.",
    "<bob.o'neil+x_y%z@a-b.co.uk>, mailto:BOB@MAIL.ORG": "<<EMAIL>>, mailto:<EMAIL>",
    "'josé@bücher.de'": "'<EMAIL>'",
    "联系foo@bar.cn谢谢": "联系<EMAIL>谢谢",
    "me@bar.org.My": "<EMAIL>",  # .my is Malaysia's
    "me@bar.org.Zzz": "<EMAIL>.Zzz",
    "u:p@x.org:22": "u:<EMAIL>:22",
    "ping 31.13.24.5, 172.217.4.142:80; http://93.184.216.34/x": "ping <IP>, <IP>:80; http://<IP>/x",
    "31.13.24.5-31.13.24.9 and [2a00:1450:4001:81b::200e].": "<IP>-<IP> and [<IP>].",
    "from 2607:f8b0:4004:0c07:0000:0000:0000:008a:": "from <IP>:",
    "IBAN DE89 3704 0044 0532 0130 00, GB82WEST12345698765432": "IBAN <IBAN>, <IBAN>",
    "FR14-2004-1010-0505-0001-3M02-606.": "<IBAN>.",
    "4111 1111 1111 1111, 5500-0055-5555-5559 and 378282246310005": "<CARD>, <CARD> "
    "and <CARD>",
    "3782 822463 10005": "<CARD>",
    "+49 30 901820, +4915112345678, +44 (0)20 7946 1234": "<PHONE>, <PHONE>, <PHONE>",
    "+1 212-555-2368, +1 (212) 555-2368": "<PHONE>, <PHONE>",
    "(212) 555-2368, 212-555-2368, 212.555.2368, 1-212-555-2368": "<PHONE>, <PHONE>, "
    "<PHONE>, <PHONE>",
    "Tel.: 030 / 123 45 67, Fax: 030 123456, mobile 07700 900123": "Tel.: <PHONE>, "
    "Fax: <PHONE>, "
    "mobile <PHONE>",
    "Call us at 212 555 2368 now": "Call us at <PHONE> now",
    "тел. 8 (495) 123-45-67 电话：010-12345678": "тел. <PHONE> 电话：<PHONE>",
    "Téléphone : 01 23 45 67 89": "Téléphone : <PHONE>",
    "020 7123 4567, (020) 7123 4567, 0161 234 5678, (0113)234 5678": "<PHONE>, <PHONE>, <PHONE>, <PHONE>",
    "01234 567890, (01234) 567 890; 07911 123456 or 07911 123 456.": "<PHONE>, <PHONE>; <PHONE> or <PHONE>.",
    "0345 123 4567, 0800 123 4567": "<PHONE>, <PHONE>",
    "(02) 9123 4567, 03 9123 4567, 0412 345 678, 0412-345-678": "<PHONE>, <PHONE>, "
    "<PHONE>, <PHONE>",
    "git@mail.org's friend is gitte@mail.org": "git@mail.org's friend is <EMAIL>",
}

UNMASKED = [
    "git@github.com:",
    "git@github.com",
    "ssh://git@github.com/me/it.git",
    "ssh://me@host.bar.org:22/x",
    "hg@bitbucket.org",
    "Git@github.com/me",
    "020 7946 0958",
    "07700 900123",
    "(02) 5550 1234",
    "0491 570 156",
    "01632 960 123",
    "01234 567890 12",
    "0412 345 6789",
    "05 1234 5678",
    "03 1123 4567",
    "0612 345 678",
    "0001 234 5678",
    "2012 3456 7890",
    "00 1234 5678",
    "1.0412 345 678",
    "01234567890",
    "0412345678",
    "a@b",
    "@handle",
    "foo@2x.png",
    "git@github.com:me/it.git",
    "me@example.com",
    "me@mail.example.org",
    "x.@y.org",
    "a" * 65 + "@mail.org",
    "python@3.11.2",
    "user@localhost",
    "version 31.13.24.5",
    "v31.13.24.5",
    "section 10.20.30.40",
    "§ 31.13.24.5",
    "1.2.3.4",
    "8.8.8.8",
    "192.168.1.10",
    "127.0.0.1",
    "3.3.9.45",
    "31.13.24.0",
    "2006::",
    "2a00:1450::",
    "10.20.30.40",
    "31.13.24.256",
    "031.13.24.5",
    "31.13.24.5.6",
    "lib-31.13.24.5.tar",
    "31.13.24.5-beta",
    "Chrome/91.13.24.5",
    "255.255.255.0",
    "192.0.2.1",
    "224.0.0.251",
    "x31.13.24.5",
    "2001:db8::1",
    "fe80::1",
    "std::cout",
    "12:34:56",
    "2c:54:91:88:c9:e3",
    "2012:11:05 10:20:30",
    "a::b",
    "2345::x",
    "DE88 3704 0044 0532 0130 00",
    "DE89 3704 0044 0532 0130 0",
    "ZZ89370400440532013000",
    "XDE89370400440532013000",
    "4111 1111 1111 1112",
    "1234567812345670",
    "4111-1111 1111-1111",
    "4111111111111111.5",
    "id_4111111111111111",
    "978-3-16-148410-0",
    "202-555-0142",
    "(202) 555-0199",
    "112-555-2368",
    "211-555-2368",
    "+1 123 456 7890",
    "+999 123 456 789",
    "030 123 45 67",
    "01 02 03 04 05",
    "2012-11-05",
    "Tel Aviv 1948",
    "phone 2012-11-05",
    "iPhone 12 34 56",
    "3.14159265358979",
    "1,234,567,890",
    "192837465",
    "2^31 = 2147483648",
    "0x7fffffff",
    "212-555-23681",
    "$212.555.2368",
    "tracking 1Z999AA10123456784",
    "e83c5163316f89bfbde7d9ab23ca2e25604af290",
]


@pytest.mark.parametrize(("text", "expected"), MASKED.items(), ids=list(MASKED))
def test_personal_data_is_masked(text: str, expected: str) -> None:
    assert masked(text) == expected


@pytest.mark.parametrize("text", UNMASKED)
def test_lookalikes_of_personal_data_stay(text: str) -> None:
    assert masked(text) == text
    assert masked(f"see {text} there") == f"see {text} there"


def test_only_configured_kinds_are_masked() -> None:
    text = "bob@mail.org 31.13.24.5 +49 30 901820"
    assert masked(text, Mask(style="tag")) == "<EMAIL> <IP> +49 30 901820"
    assert (
        masked(text, Mask(kinds=("phone",), style="tag"))
        == "bob@mail.org 31.13.24.5 <PHONE>"
    )
    section = Clean.model_validate({"mask": ["email", "card"]})
    assert section.mask == Mask(kinds=("email", "card"))
    for bad in ([], ["email", "email"], ["name"]):
        with pytest.raises(ValidationError):
            Clean.model_validate({"mask": bad})


def test_equal_values_have_equal_placeholders_in_any_notation() -> None:
    equal_values: list[tuple[PiiKind, str, str]] = [
        ("email", "Bob@Mail.org", "bob@mail.ORG"),
        ("ip", "2A00::1", "2a00:0:0:0:0:0:0:1"),
        ("phone", "(212) 555-2368", "212.555.2368"),
        ("iban", "DE89 3704", "DE893704"),
        ("card", "4111 1111 1111 1111", "4111111111111111"),
    ]
    for kind, value, notation in equal_values:
        assert placeholder(value, kind) == placeholder(notation, kind)
    assert placeholder("a@mail.org", "email") != placeholder("b@mail.org", "email")
    text = "bob@mail.org, ann@mail.org, bob@mail.org"
    first, second, third = masked(text, ALL).split(", ")
    assert first == third != second


def test_placeholders_are_stable() -> None:
    assert placeholder("bob@mail.org", "email") == "user7523@example.com"
    assert placeholder("31.13.24.5", "ip") == "192.0.2.27"
    assert placeholder("2a00::1", "ip") == "2001:db8::c8f3"
    assert placeholder("+49 30 901820", "phone") == "202-555-0112"
    assert placeholder("DE89370400440532013000", "iban") == "XX00 0000 0000 8786"
    assert placeholder("4111111111111111", "card") == "0000 0000 0000 3146"


PIECES = [
    *MASKED,
    *UNMASKED,
    "@",
    "+",
    "(",
    ")",
    " ",
    "  ",
    "\n",
    ".",
    ":",
    "-",
    "/",
    "tel",
    "Tel: ",
    "\u00a0",
    "é",
    "电话",
    "0",
    "12",
    "345",
    "6789",
    "DE89",
    "GB",
    "2a00",
    "::",
    "ffff",
    "a",
    "Z",
    "_",
    "mail.org",
    "31.13.",
]
texts = st.lists(
    st.one_of(st.sampled_from(PIECES), st.text(max_size=4)), max_size=8
).map("".join)


@pytest.mark.slow
@given(texts)
@settings(deadline=None, max_examples=500)
def test_fast_pass_finds_every_place(text: str) -> None:
    data = text.encode()
    everywhere = [(at, kind) for kind in range(len(KINDS)) for at in range(len(data))]
    matches = find_pii(data, everywhere)
    edits = mask(pa.array([text], pa.large_string()), ALL)[0].to_pylist()[0]
    assert [(edit["begin"], edit["end"]) for edit in edits] == [
        (begin, end) for begin, end, _ in matches
    ]
    for begin, end, _ in matches:
        data[begin:end].decode()


@given(st.lists(texts, max_size=4))
@settings(deadline=None, max_examples=100)
def test_masking_does_not_depend_on_the_batch(values: list[str]) -> None:
    array = pa.array(values, pa.large_string())
    together = apply_edits(array, mask(array, ALL)[0]).to_pylist()
    assert together == [masked(text, ALL) for text in values]


@pytest.mark.parametrize("options", [ALL, TAGS], ids=["placeholder", "tag"])
def test_masking_is_idempotent(options: Mask) -> None:
    for text in MASKED:
        once = masked(text, options)
        assert masked(once, options) == once


def test_counts_and_bytes_per_kind() -> None:
    texts = pa.array(["bob@mail.org 31.13.24.5 bob@mail.org", ""], pa.large_string())
    _, counts, sizes, _ = mask(texts, ALL)
    assert dict(zip(KINDS, counts.T.tolist(), strict=True)) == {
        "email": [2, 0],
        "iban": [0, 0],
        "card": [0, 0],
        "ip": [1, 0],
        "phone": [0, 0],
    }
    assert dict(zip(KINDS, sizes.T.tolist(), strict=True))["email"] == [24, 0]


ADVERSARIAL = [
    "a@",
    "a.",
    "@",
    "a@a.",
    "1.",
    "1 ",
    "12-",
    "(1",
    "+1 ",
    "2a00:",
    "2222:",
    ":",
    "DE89 ",
    "DE89A",
    "4",
    "4111 ",
    "tel ",
    "é@é.",
    "1\u00a0",
    "-a@-",
    "0.0.0.0.",
]


@pytest.mark.slow
@pytest.mark.parametrize("unit", ADVERSARIAL)
def test_hostile_text_is_masked_in_linear_time(unit: str) -> None:
    """Quadratic work on a text of this size would exceed the time limit of a test."""
    mask(pa.array([unit * (100_000 // len(unit.encode()))], pa.large_string()), ALL)


def test_tables_meet_the_assumptions_of_the_matchers() -> None:
    assert all(len(country) == 2 and country.isupper() for country in IBAN_LENGTHS)
    assert all(15 <= length <= 33 for length in IBAN_LENGTHS.values())
    for prefixes, lengths in CARD_PREFIXES.values():
        for first, last in (
            range_.split(b"-") for range_ in prefixes.split() if b"-" in range_
        ):
            assert len(first) == len(last)
            assert first < last
        assert all(13 <= length <= 19 for length in lengths)

"""Character encodings of pages and files: declared, detected, or rejected."""

import codecs

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gristmill.dataprep.readers.charsets import (
    Decoded,
    UndecodableError,
    declared_in_page,
    decode,
    known_codec,
)

RUSSIAN = "Все люди рождаются свободными и равными в своём достоинстве и правах. "
JAPANESE = "すべての人間は、生まれながらにして自由であり、かつ、尊厳と権利とについて平等である。"


@pytest.mark.parametrize(
    ("mark", "codec"),
    [
        (codecs.BOM_UTF8, "utf-8"),
        (codecs.BOM_UTF16_LE, "utf-16-le"),
        (codecs.BOM_UTF16_BE, "utf-16-be"),
        (codecs.BOM_UTF32_LE, "utf-32-le"),
        (codecs.BOM_UTF32_BE, "utf-32-be"),
    ],
)
def test_byte_order_mark_takes_precedence_and_is_removed(
    mark: bytes, codec: str
) -> None:
    page = '<meta charset="koi8-r">' + RUSSIAN
    assert decode(mark + page.encode(codec), "auto", "cp1252", html=True) == Decoded(
        page, codec
    )


def test_server_charset_precedes_the_pages_and_that_precedes_utf8() -> None:
    content = '<meta charset="cp1251">é'.encode()
    assert decode(content, "auto", "iso-8859-1", html=True) == Decoded(
        '<meta charset="cp1251">Ã©', "cp1252"
    )
    assert decode(content, "auto", html=True) == Decoded(
        '<meta charset="cp1251">Г©', "cp1251"
    )
    assert decode(content, "auto") == Decoded('<meta charset="cp1251">é', "utf-8")


def test_declared_encoding_that_does_not_decode_is_ignored() -> None:
    assert decode("naïve".encode(), "auto", "ascii-that-nobody-knows") == Decoded(
        "naïve", "utf-8"
    )
    assert decode(JAPANESE.encode(), "auto", "euc-jp") == Decoded(JAPANESE, "utf-8")
    assert decode(JAPANESE.encode("shift_jis"), "auto", "utf-8") == Decoded(
        JAPANESE, "cp932"
    )


@pytest.mark.parametrize("codec", ["cp1251", "koi8-r", "shift_jis", "euc_jp"])
def test_undeclared_encoding_is_detected(codec: str) -> None:
    text = (RUSSIAN if codec in ("cp1251", "koi8-r") else JAPANESE) * 3
    assert decode(text.encode(codec), "auto").text == text


def test_binary_data_is_rejected() -> None:
    picture = (
        b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\1\0\0\0\1\0\x08\x06" + bytes(range(256)) * 4
    )
    for errors in ("strict", "replace"):
        with pytest.raises(UndecodableError):
            decode(
                picture,
                "auto",
                "iso-8859-1" if errors == "replace" else "",
                errors=errors,
            )


def test_utf8_with_bad_bytes_is_rejected_rather_than_guessed() -> None:
    content = (RUSSIAN * 3).encode() + b"\xff" + RUSSIAN.encode()
    with pytest.raises(
        UndecodableError,
        match=f"UTF-8: byte 0xff at position {3 * len(RUSSIAN.encode())}",
    ):
        decode(content, "auto", "utf-8", html=True)
    assert (
        decode(
            "Ein Café, naïve Œuvre, größer: für Übung. ".encode("cp1252") * 3, "auto"
        ).encoding
        == "cp1252"
    )


def test_named_encoding_is_strict() -> None:
    assert decode(b"caf\xe9", "latin-1") == Decoded("café", "iso8859-1")
    with pytest.raises(UndecodableError, match="UTF-8: byte 0xe9 at position 3"):
        decode(b"caf\xe9", None)
    with pytest.raises(UndecodableError, match="UTF-8: byte 0xed at position 0"):
        decode("\ud800".encode("utf-8", "surrogatepass"), "utf-8")


@pytest.mark.parametrize(
    ("page", "label"),
    [
        (
            b'<html><META http-equiv=Content-Type content="text/html; charset=GB2312">',
            "GB2312",
        ),
        (b"<meta name=x><meta charset='utf-8'/>", "utf-8"),
        (b"<meta charset = latin1 >", "latin1"),
        (b'<?xml version="1.0" encoding="euc-kr"?><html>', "euc-kr"),
        (b"<!-- <meta charset=koi8-r> --><p>", ""),
        (b" " * 1024 + b"<meta charset=koi8-r>", "koi8-r"),
        (b" " * 1024 + b"<body><meta charset=koi8-r>", ""),
        (
            b" " * 1024
            + b"<script>'<meta charset=koi8-r>'</script><meta charset=big5>",
            "big5",
        ),
        (b" " * 1024 + b"<!--<meta charset=koi8-r>--><meta charset=big5>", "big5"),
        (b"", ""),
    ],
)
def test_charset_declaration_is_found_in_the_head(page: bytes, label: str) -> None:
    assert declared_in_page(page) == label


def test_labels_follow_the_encoding_standard() -> None:
    labels = [
        "latin1",
        "ASCII",
        " GB2312 ",
        '"Shift_JIS"',
        "ks_c_5601-1987",
        "windows-874",
        "nonsense",
        "",
    ]
    assert [known_codec(label) for label in labels] == [
        "cp1252",
        "cp1252",
        "gb18030",
        "cp932",
        "cp949",
        "cp874",
        None,
        None,
    ]


def test_page_that_declares_utf16_in_ascii_is_utf8() -> None:
    assert (
        decode('<meta charset="utf-16">é'.encode(), "auto", html=True).encoding
        == "utf-8"
    )


@given(
    text=st.text(), codec=st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-32"])
)
def test_unicode_encodings_round_trip(text: str, codec: str) -> None:
    # The mark of UTF-32 is that of UTF-16 and a NUL after it: such UTF-16 is read as
    # UTF-32, or rejected.
    assume(not (codec == "utf-16" and text.startswith("\x00")))
    content = text.encode(codec)
    if codec == "utf-8" and content.startswith((codecs.BOM_UTF8,)):
        content = codecs.BOM_UTF8 + content
    assert decode(content, "auto").text == text


@given(content=st.binary())
def test_any_bytes_are_decoded_losslessly_or_rejected(content: bytes) -> None:
    try:
        decoded = decode(content, "auto")
    except UndecodableError:
        return
    assert (
        "\ufffd" not in decoded.text
        or b"\xef\xbf\xbd" in content
        or decoded.encoding != "utf-8"
    )
    decoded.text.encode("utf-8")


FIVE = bytes([0x81, 0x8D, 0x8F, 0x90, 0x9D])
"""Bytes that Python's cp1252 leaves undefined; the Encoding standard maps them to
control characters.
"""


def test_undefined_bytes_of_windows_encodings_are_control_characters() -> None:
    page = b"<p>" + "naïve “quoted” text ".encode("cp1252") * 20 + FIVE
    for errors in ("replace", "strict"):
        decoded = decode(page, "auto", "iso-8859-1", html=True, errors=errors)
        assert decoded == Decoded(
            page[:-5].decode("cp1252") + "\x81\x8d\x8f\x90\x9d", "cp1252"
        )
    assert decode(b"\x81", "cp1252").text == "\x81"
    assert decode(b"\x98", "cp1251").text == "\x98"
    with pytest.raises(UndecodableError, match="0xaa"):
        decode(b"\xaa", "cp1253")  # undefined bytes above 0x9f are errors


@pytest.mark.parametrize(
    ("charset", "text", "bad", "codec"),
    [
        ("utf-8", RUSSIAN * 9, b"\xff", "utf-8"),
        ("", RUSSIAN * 9, b"\xe2\x82", "utf-8"),
        ("euc-jp", JAPANESE * 9, b"\xff", "euc_jp"),
        ("shift_jis", JAPANESE * 9, b"\xeb", "cp932"),
        (
            "windows-1253",
            "Όλοι οι άνθρωποι γεννιούνται ελεύθεροι. " * 9,
            b"\xaa",
            "cp1253",
        ),
        ("gbk", "人人生而自由，在尊严和权利上一律平等。" * 20, b"\xff", "gb18030"),
    ],
)
def test_few_bad_bytes_are_replaced_and_counted(
    charset: str, text: str, bad: bytes, codec: str
) -> None:
    page = text.encode(codec) + bad + b" " + text.encode(codec)
    assert decode(page, "auto", charset, errors="replace") == Decoded(
        f"{text}\ufffd {text}", codec, 1
    )
    assert decode(page, codec, errors="replace") == Decoded(
        f"{text}\ufffd {text}", codec, 1
    )
    with pytest.raises(UndecodableError):
        decode(page, codec, errors="strict")


def test_many_bad_bytes_are_rejected() -> None:
    text = ("word " * 40).encode()  # 200 bytes
    assert decode(text + b"\xff", None, errors="replace").replaced == 1
    with pytest.raises(UndecodableError, match="UTF-8: byte 0xff at position 200"):
        decode(text + b"\xff\xff", None, errors="replace")


def test_wrongly_declared_encoding_is_overruled() -> None:
    russian = (RUSSIAN * 9).encode()
    assert decode(russian, "auto", "iso-8859-1", errors="replace") == Decoded(
        RUSSIAN * 9, "utf-8"
    )
    damaged = decode(russian + b"\xff", "auto", "iso-8859-1", errors="replace")
    assert damaged == Decoded(RUSSIAN * 9 + "\ufffd", "utf-8", 1)
    german = "Ein Café, naïve Œuvre, größer: für Übung. " * 9
    assert decode(
        german.encode("cp1252"), "auto", "utf-8", errors="replace"
    ) == Decoded(german, "cp1252")


def test_hostile_head_is_searched_in_linear_time() -> None:
    page = b"<meta " * 40_000 + b"<script>" * 40_000 + b"<!--" * 40_000
    assert declared_in_page(page) == ""


BAD = {
    "utf-8": b"\xff",
    "utf-16-le": b"\x00\xdc",
    "gb18030": b"\xff",
    "cp932": b"\xeb ",
    "cp1252": b"\x81",
}


@given(text=st.text(), bad=st.integers(0, 3), codec=st.sampled_from(list(BAD)))
def test_replacements_are_counted_exactly(text: str, bad: int, codec: str) -> None:
    encoded = text.replace("\ufffd", "").encode(codec, "ignore")
    padding = ("x" * 1000).encode(codec)
    decoded = decode(
        padding + encoded + padding + BAD[codec] * bad + padding,
        codec,
        errors="replace",
    )
    assert (
        decoded.replaced
        == decoded.text.count("\ufffd")
        == (0 if codec == "cp1252" else bad)
    )

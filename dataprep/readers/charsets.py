"""Decoding of bytes by the rules of the Encoding standard and HTML: the declared
encoding, or the first that decodes all bytes.

A browser uses the declared encoding and shows U+FFFD for invalid bytes. As declarations
are often wrong, a declared encoding that does not decode every byte is first compared
with UTF-8 and a detector's guess. Only if no candidate decodes all bytes, and few are
invalid, these become U+FFFD and are counted. More invalid bytes, or control characters
as in binary data, are an error. UTF-8 with a few invalid bytes is always read as UTF-8.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Literal, TypeVar

Other = TypeVar("Other")
AUTO = "auto"
UTF8 = "utf-8"
PRESCAN_BYTES = 1024
"""Start of a page that is searched for a declaration (HTML, 13.2.3.2 "prescan")."""
HEAD_BYTES = 1 << 18
"""Start of a page, up to its body, that is searched next: a parser restarts at a
declaration there (HTML, 13.2.3.5).
"""
_BYTE_ORDER_MARKS = {  # UTF-32's mark starts with UTF-16's, so it comes first
    UTF8: codecs.BOM_UTF8,
    "utf-32-le": codecs.BOM_UTF32_LE,
    "utf-32-be": codecs.BOM_UTF32_BE,
    "utf-16-le": codecs.BOM_UTF16_LE,
    "utf-16-be": codecs.BOM_UTF16_BE,
}
MOST_MARK_BYTES = 4
_SUPERSETS = {
    "gbk": "gb18030",
    "shift_jis": "cp932",
    "euc_kr": "cp949",
    "big5": "big5hkscs",
    "iso8859-11": "cp874",
}
"""Encodings of the Encoding standard -> Python codecs that decode a superset."""
MAX_REPLACED_SHARE = 0.005
"""Largest share of invalid bytes: 1 in 200. Of 918 real pages 6 had some, 1 to 4
each.
"""
KEEP_BAD = "gristmill.keep_bad"
"""Error handler of codecs: an invalid sequence becomes a lone surrogate, one for each
U+FFFD of the Encoding standard.
"""
Errors = Literal["replace", "strict"]
_WITH_CONTROLS = ("cp874", *(f"cp{number}" for number in range(1250, 1259)))
_CONTROLS = {0xDC80 + number: 0x80 + number for number in range(32)}
_BAD = re.compile("[\udc00-\udcff]")
_LOW_CONTROL = re.compile("[\x00-\x08\x0b\x0e-\x1f\x7f]")
_COMMENT = re.compile(rb"<!--.*?(-->|\Z)", re.DOTALL)
_META_CHARSET = re.compile(
    rb"<meta\b[^>]{0,500}?\bcharset\s*=\s*[\"']?\s*([A-Za-z0-9_:.+-]+)", re.IGNORECASE
)
_BODY = re.compile(rb"<body\b", re.IGNORECASE)
_SCRIPT = re.compile(rb"<(script|style)\b.*?(</\1|\Z)", re.IGNORECASE | re.DOTALL)
_XML_ENCODING = re.compile(
    rb"\A\s*<\?xml\b[^>]*?\bencoding\s*=\s*[\"']([A-Za-z0-9_:.+-]+)", re.IGNORECASE
)
_BEYOND_ASCII = re.compile("[\x80-\U0010ffff]")
_CONTROL = re.compile("[\x00-\x08\x0b\x0e-\x1f\x7f-\x84\x86-\x9f]")


class UndecodableError(ValueError):
    """Bytes that are not text in the encoding, or in any candidate."""


@dataclass(frozen=True)
class Decoded:
    """A text, its Python codec, and the number of invalid sequences replaced by
    U+FFFD.
    """

    text: str
    encoding: str
    replaced: int = 0


def decode(
    content: bytes,
    encoding: str | None,
    charset: str = "",
    html: bool = False,
    errors: Errors = "strict",
) -> Decoded:
    """Decode a content; a byte order mark is not part of the text.

    Little-endian UTF-16 that starts with a NUL has the mark of UTF-32, and is decoded
    as such.

    Args:
        content: bytes to decode.
        encoding: name of a codec, or `auto`: byte order mark, `charset`, the page's
            declaration, UTF-8, a detector's guess. None: byte order mark, else UTF-8.
        charset: declared with the content (an HTTP header), or empty.
        html: look for a declaration in the content.
        errors: `replace` invalid bytes if they are at most MAX_REPLACED_SHARE of the
            content; `strict`: reject them.

    Raises:
        UndecodableError: no candidate decodes enough.
    """
    marked = marked_codec(content) if encoding in (None, AUTO) else None
    if marked is not None or encoding != AUTO:
        return _decode_as(content, marked or encoding or UTF8, errors)
    in_page = known_codec(declared_in_page(content)) if html else None
    if in_page is not None and in_page.startswith("utf-16"):
        in_page = UTF8  # a readable declaration is not UTF-16
    declared = filter(None, (known_codec(charset), in_page, UTF8))
    tried = list(dict.fromkeys(declared))
    for codec in tried:
        if (text := _try(content, codec)) is not None:
            return Decoded(text, codec)
    # a page with few invalid bytes, which a guess would garble
    damaged = content.decode(UTF8, "replace")
    if _is_mostly_right(damaged, damaged.count("\ufffd")):
        return _decode_as(content, UTF8, errors)
    sound = [
        candidate
        for codec in tried
        if (candidate := _decode_replacing(content, codec, errors)) is not None
        and len(_LOW_CONTROL.findall(candidate.text))
        <= most_replaced(len(candidate.text))
    ]
    for candidate in sound:
        if _is_mostly_right(candidate.text, candidate.replaced):
            return candidate
    from resiliparse.parse.encoding import detect_encoding

    guess = known_codec(detect_encoding(content, html5_compatible=False) or "")
    if (
        guess is not None
        and (text := _try(content, guess)) is not None
        and not _CONTROL.search(text)
    ):
        return Decoded(text, guess)
    if sound:
        return sound[0]
    tried += [guess] if guess is not None else []
    raise UndecodableError(
        f"not text in any encoding that was tried ({', '.join(tried)})"
    )


def marked_codec(content: bytes) -> str | None:
    """Codec of the byte order mark at the start, or None."""
    return next(
        (
            codec
            for codec, mark in _BYTE_ORDER_MARKS.items()
            if content.startswith(mark)
        ),
        None,
    )


def utf8_parts(parts: Iterator[bytes | Other]) -> Iterator[bytes | Other]:
    """Transcode parts of a content to UTF-8 if its byte order mark has another
    encoding.

    The byte order mark is dropped; invalid bytes become bytes that are not UTF-8.

    Args:
        parts: of the content; other items between them are passed on.
    """
    begin = b""
    other_items = []
    for part in parts:
        if isinstance(part, bytes):
            begin += part
        else:
            other_items.append(part)
        if other_items or len(begin) >= MOST_MARK_BYTES:
            break
    codec = marked_codec(begin) or UTF8
    begin = begin.removeprefix(_BYTE_ORDER_MARKS[codec])
    content = chain(filter(None, [begin]), other_items, parts)
    if codec == UTF8:
        yield from content
        return
    decoder = codecs.getincrementaldecoder(codec)(KEEP_BAD)
    for part in content:
        if isinstance(part, bytes):
            yield decoder.decode(part).encode(UTF8, "surrogatepass")
        else:
            decoder.reset()
            yield part
    yield decoder.decode(b"", final=True).encode(UTF8, "surrogatepass")


def _decode_as(content: bytes, codec: str, errors: Errors) -> Decoded:
    """Decode with a certain codec."""
    body = content.removeprefix(_BYTE_ORDER_MARKS.get(codec, b""))
    try:
        return Decoded(body.decode(codec), codecs.lookup(codec).name)
    except UnicodeDecodeError as error:
        if (decoded := _decode_replacing(body, codec, errors)) is not None:
            return decoded
        name = "UTF-8" if codec == UTF8 else codec
        position = error.start + len(content) - len(body)
        raise UndecodableError(
            f"not valid {name}: byte 0x{content[position]:02x} at position {position}"
        ) from error


def _decode_replacing(content: bytes, codec: str, errors: Errors) -> Decoded | None:
    """Decode with U+FFFD for invalid bytes; None if there are too many."""
    codec = codecs.lookup(codec).name
    if codec not in _WITH_CONTROLS and content.decode(codec, "replace").count(
        "\ufffd"
    ) > most_replaced(len(content)):
        return None  # fast path: the handler takes a microsecond per sequence
    text, replaced = replace_bad(content.decode(codec, KEEP_BAD), codec)
    allowed = most_replaced(len(content)) if errors == "replace" else 0
    return Decoded(text, codec, replaced) if replaced <= allowed else None


def most_replaced(size: int) -> int:
    """Largest number of invalid sequences in a content of so many bytes or
    characters.
    """
    return int(MAX_REPLACED_SHARE * size)


def replace_bad(text: str, codec: str) -> tuple[str, int]:
    """Replace the lone surrogates of a text decoded with `KEEP_BAD` by U+FFFD, and
    count them.

    Bytes 0x80 to 0x9f that are undefined in the Windows codecs are control characters
    by the Encoding standard.
    """
    if text.isascii():
        return text, 0
    if codec in _WITH_CONTROLS:
        text = text.translate(_CONTROLS)
    return _BAD.subn("\ufffd", text)


def _keep_bad(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    is_wide = error.encoding.lower().startswith("utf")
    bad = chr(0xDC00 + error.object[error.start])
    return bad, error.end if is_wide else error.start + 1


codecs.register_error(KEEP_BAD, _keep_bad)


def _is_mostly_right(text: str, replaced: int) -> bool:
    """True if most characters beyond ASCII were decoded."""
    return len(_BEYOND_ASCII.findall(text)) > 2 * replaced


def declared_in_page(content: bytes) -> str:
    """Label in a page's `<meta>` element or XML declaration, or an empty string."""
    prescan = content[:PRESCAN_BYTES]
    declaration = _XML_ENCODING.search(prescan) or _META_CHARSET.search(
        _COMMENT.sub(b"", prescan)
    )
    if declaration is None and len(content) > PRESCAN_BYTES:
        head = _BODY.split(_COMMENT.sub(b"", content[:HEAD_BYTES]), maxsplit=1)[0]
        declaration = _META_CHARSET.search(_SCRIPT.sub(b"", head))
    return declaration.group(1).decode("ascii") if declaration else ""


def known_codec(label: str) -> str | None:
    """Python codec of a label by the Encoding standard (`latin1` is cp1252), or
    None.
    """
    if not label:
        return None
    from resiliparse.parse.encoding import map_encoding_to_html5

    codec = map_encoding_to_html5(label.strip().strip("\"'"), fallback_utf8=False)
    return None if codec is None else _SUPERSETS.get(codec, codec)


def _try(content: bytes, codec: str) -> str | None:
    try:
        return content.decode(codec)
    except UnicodeDecodeError:
        return None

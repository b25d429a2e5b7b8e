"""From bytes to text: the encoding that a document declares, or the first that decodes every one of its bytes.

Nothing is ever replaced: bytes that no candidate decodes are an error, and so is a guess that gives control
characters, as a detector's guess about binary data does. UTF-8 with a few bad bytes is UTF-8 with bad bytes, whatever
else could hold it.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from dataclasses import dataclass

AUTO = "auto"
UTF8 = "utf-8"
PRESCAN_BYTES = 1024
"""How far into a page its own declaration is looked for (HTML, 13.2.3.2 "prescan")."""
_BYTE_ORDER_MARKS = (  # UTF-32's begins with UTF-16's, so it comes first
    (codecs.BOM_UTF8, UTF8), (codecs.BOM_UTF32_LE, "utf-32-le"), (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"),
)  # fmt: skip
_WIDER = {"gbk": "gb18030", "shift_jis": "cp932", "euc_kr": "cp949", "big5": "big5hkscs", "iso8859-11": "cp874"}
"""Codecs of Python that decode everything that the Encoding standard's decoder of the first name does."""
_COMMENT = re.compile(rb"<!--.*?(-->|\Z)", re.DOTALL)
_META_CHARSET = re.compile(rb"<meta\b[^>]*?\bcharset\s*=\s*[\"']?\s*([A-Za-z0-9_:.+-]+)", re.IGNORECASE)
_XML_ENCODING = re.compile(rb"\A\s*<\?xml\b[^>]*?\bencoding\s*=\s*[\"']([A-Za-z0-9_:.+-]+)", re.IGNORECASE)
_BEYOND_ASCII = re.compile("[\x80-\U0010ffff]")
_CONTROL = re.compile("[\x00-\x08\x0b\x0e-\x1f\x7f-\x84\x86-\x9f]")


class UndecodableError(ValueError):
    """Bytes that are no text in the encoding, or in any that could be meant."""


@dataclass(frozen=True)
class Decoded:
    """A text, and the Python codec that it was decoded with."""

    text: str
    encoding: str


def decode(content: bytes, encoding: str | None, charset: str = "", html: bool = False) -> Decoded:
    """Decode the whole content strictly; a byte order mark is no part of the text.

    Little-endian UTF-16 that begins with a NUL has the mark of UTF-32, and is taken for it.

    Args:
        content: what to decode.
        encoding: a codec's name, or `auto` for: byte order mark, `charset`, the page's own declaration, UTF-8, a
            detector's guess. None is UTF-8.
        charset: what came with the content (an HTTP header), or empty.
        html: look for a declaration inside.

    Raises:
        UndecodableError: no candidate decodes every byte.
    """
    if encoding != AUTO:
        return _strictly(content, encoding or UTF8)
    if (marked := marked_codec(content)) is not None:
        return _strictly(content, marked)
    tried: list[str] = []
    for codec in _declared(content, charset, html):
        if codec not in tried:
            tried.append(codec)
            if (text := _try(content, codec)) is not None:
                return Decoded(text, codec)
    if _is_damaged_utf8(content):
        return _strictly(content, UTF8)
    guess = _guess(content)
    if guess is not None and (text := _try(content, guess)) is not None and not _CONTROL.search(text):
        return Decoded(text, guess)
    tried += [guess] if guess is not None else []
    raise UndecodableError(f"not text in any encoding that was tried ({', '.join(tried)})")


def marked_codec(content: bytes) -> str | None:
    """The codec that a byte order mark at the beginning stands for."""
    return next((codec for mark, codec in _BYTE_ORDER_MARKS if content.startswith(mark)), None)


def _strictly(content: bytes, codec: str) -> Decoded:
    mark = next((mark for mark, of in _BYTE_ORDER_MARKS if of == codec and content.startswith(mark)), b"")
    try:
        return Decoded(content.removeprefix(mark).decode(codec), codecs.lookup(codec).name)
    except UnicodeDecodeError as error:
        name = "UTF-8" if codec == UTF8 else codec
        at = error.start + len(mark)
        raise UndecodableError(f"not valid {name}: byte 0x{content[at]:02x} at position {at}") from error


def _declared(content: bytes, charset: str, html: bool) -> Iterator[str]:
    codec = known_codec(charset)
    if codec is not None:
        yield codec
    codec = known_codec(declared_in_page(content)) if html else None
    if codec is not None:
        yield UTF8 if codec.startswith("utf-16") else codec  # its declaration was readable, so it is not UTF-16
    yield UTF8


def declared_in_page(content: bytes) -> str:
    """The label that a page's `<meta>` element or XML declaration names, or nothing."""
    begin = content[:PRESCAN_BYTES]
    found = _XML_ENCODING.search(begin) or _META_CHARSET.search(_COMMENT.sub(b"", begin))
    return found.group(1).decode("ascii") if found else ""


def known_codec(label: str) -> str | None:
    """The Python codec of a label by the Encoding standard (`latin1` is cp1252), or None."""
    if not label:
        return None
    from resiliparse.parse.encoding import map_encoding_to_html5

    codec = map_encoding_to_html5(label.strip().strip("\"'"), fallback_utf8=False)
    return None if codec is None else _WIDER.get(codec, codec)


def _is_damaged_utf8(content: bytes) -> bool:
    """Whether most of what is beyond ASCII is UTF-8: a page with a few bad bytes, of which a guess would spoil all."""
    text = content.decode(UTF8, "replace")
    damaged = text.count("\ufffd")
    return len(_BEYOND_ASCII.findall(text)) - damaged > damaged


def _guess(content: bytes) -> str | None:
    from resiliparse.parse.encoding import detect_encoding

    label = detect_encoding(content, html5_compatible=False)
    return known_codec(label) if label else None


def _try(content: bytes, codec: str) -> str | None:
    try:
        return content.decode(codec)
    except UnicodeDecodeError:
        return None

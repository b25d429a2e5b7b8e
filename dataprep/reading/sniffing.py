"""What a body without a declared type is, by its first bytes: the rules that browsers follow.

WHATWG MIME Sniffing Standard, 7.1 "Identifying a resource with an unknown MIME type" (https://mimesniff.spec.whatwg.org).
Two things differ, since what is looked for is pages: a byte order mark before a tag is passed over, and XML whose
root is `html` is XHTML.
"""

from __future__ import annotations

import re

HEADER_BYTES = 1445
"""How much of a body is looked at (5.2, "resource header")."""
_HTML = re.compile(
    rb"[\t\n\x0c\r ]*<(?:!doctype html|html|head|script|iframe|h1|div|font|table|a|style|title|b|body|br|p|!--)[ >]",
    re.IGNORECASE,
)
_XML = re.compile(rb"[\t\n\x0c\r ]*<\?xml")
_XHTML_ROOT = re.compile(rb"<(?:!doctype\s+)?html[\s>]", re.IGNORECASE)
_TEXT_MARKS = (b"\xfe\xff", b"\xff\xfe", b"\xef\xbb\xbf")
_PRINTED = {b"%PDF-": "application/pdf", b"%!PS-Adobe-": "application/postscript"}
"""Types that begin with letters; all others of the standard's tables have bytes that no text has."""
_BINARY = re.compile(rb"[\x00-\x08\x0b\x0e-\x1a\x1c-\x1f]")
"""The standard's "binary data bytes" (3)."""


def sniff_type(content: bytes) -> str:
    """The media type of a body, one of text/html, application/xhtml+xml, text/xml, text/plain and some that are not."""
    begin = content[:HEADER_BYTES]
    marked = begin.removeprefix(b"\xef\xbb\xbf")
    if _HTML.match(marked):
        return "text/html"
    if _XML.match(marked):
        return "application/xhtml+xml" if _XHTML_ROOT.search(marked) else "text/xml"
    printed = next((name for mark, name in _PRINTED.items() if begin.startswith(mark)), None)
    if printed is not None:
        return printed
    return "text/plain" if begin.startswith(_TEXT_MARKS) or is_text(begin) else "application/octet-stream"


def is_text(content: bytes) -> bool:
    """Whether the first bytes hold none that only binary data has."""
    return _BINARY.search(content[:HEADER_BYTES]) is None

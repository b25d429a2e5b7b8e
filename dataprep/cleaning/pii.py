"""What counts as personal data: matchers of addresses; numbers are in `pii_numbers.py`.

A matcher gets a text as UTF-8 bytes and a place in it, and says which bytes around that place are personal data, if
any. Every pattern has bounded repetitions, so a matcher's cost has a bound whatever the text.

- `email` (place: the `@`): a local part of at most 64 bytes (RFC 5321) of letters, digits and `._%+'-`, Latin letters
  with marks included, without a dot at its ends or two in a row; and a domain name that ends in a top level of the
  public suffix list. The reserved domains of RFC 2606 are nobody's; `git@host:path` is no mail address.
- `ip` (place: the first digit): what `ipaddress` reads as an address and calls global; IPv6 written from its first
  group of four digits on (2000::/3, all that is assigned so far). Networks (`.0` or `::` at the end) stay, and so does
  what is rather a version: four numbers that are part of a longer name, that follow a word such as `version` or
  `section`, or of which three are below 10.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_address

Span = tuple[int, int]
"""Bytes `begin` up to `end` of a text."""
Match = Callable[[bytes, int], Span | None]

LOCAL_PART_BYTES = 64
"""RFC 5321, section 4.5.3.1.1."""
CONTEXT_BYTES = 40
"""How far before a number its meaning is looked for."""
RESERVED_DOMAINS = (b"example.com", b"example.net", b"example.org")
"""RFC 2606, section 3."""
REPOSITORY_USERS = (b"git", b"hg", b"svn", b"bzr")
"""Users of hosts of code, the same for everybody: `git@github.com:me/it.git`, `git@github.com` alone."""
LEAST_OF_AN_ADDRESS = 10
"""Four numbers of which three are less are taken for a version: one address in five thousand is like that."""
NUMBERED = (
    "version", "versions", "ver", "v", "release", "releases", "rel", "revision", "rev", "build", "firmware", "driver",
    "kernel", "patch", "update", "upgrade", "sdk", "api", "schema", "section", "sections", "sect", "sec", "chapter",
    "clause", "paragraph", "para", "article", "art", "figure", "fig", "table", "appendix", "annex", "rule", "item",
    "oid",
)  # fmt: skip
"""Words that are followed by numbers with dots that are no addresses."""

_SSH = b"ssh://"
_LATIN = rb"[\xc3-\xc9][\x80-\xbf]"  # U+00C0 to U+027F
_LOCAL = re.compile(rb"(?:[A-Za-z0-9._%+'-]|" + _LATIN + rb")+\Z")
_LETTER = rb"(?:[A-Za-z0-9]|" + _LATIN + rb")"
_LABEL = _LETTER + rb"(?:(?:-|" + _LETTER + rb"){0,61}" + _LETTER + rb")?"
_DOMAIN = re.compile(_LABEL + rb"(?:\." + _LABEL + rb"){1,8}")
_IPV4 = re.compile(rb"\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3}(?!\w|\.\w|-[A-Za-z])")
_IPV6 = re.compile(rb"[23][0-9A-Fa-f]{3}:[0-9A-Fa-f:]{1,34}(?!\w)")
_NUMBERED = re.compile(rb"(?i:(?<![a-z])(?:" + "|".join(NUMBERED).encode() + rb")[.:]?\s{0,2}#?v?|\xc2\xa7\s?)\Z")
_WORD = re.compile(rb"\w")


def email(text: bytes, at: int) -> Span | None:
    """The mail address around an `@`."""
    if text[at : at + 1] != b"@":
        return None
    local = _LOCAL.search(text[max(0, at - LOCAL_PART_BYTES - 1) : at])
    domain = _DOMAIN.match(text, at + 1)
    if local is None or domain is None or len(local[0]) > LOCAL_PART_BYTES or local[0].endswith(b"."):
        return None
    name = local[0].rpartition(b"..")[2].lstrip(b".%+'-")
    end = at + 1 + len(_with_known_top(domain[0]))
    host = text[at + 1 : end].lower()
    reserved = host in RESERVED_DOMAINS or host.endswith(tuple(b"." + reserved for reserved in RESERVED_DOMAINS))
    begin = at - len(name)
    is_login = name.lower() in REPOSITORY_USERS or text[max(0, begin - len(_SSH)) : begin].lower() == _SSH
    return None if not name or not host or reserved or is_login else (begin, end)


def _with_known_top(domain: bytes) -> bytes:
    """A domain without the labels behind its last top level; empty where no two labels are left."""
    labels = domain.split(b".")
    while len(labels) > 1 and labels[-1].decode("utf-8", "replace").lower() not in top_levels():
        labels.pop()
    return b".".join(labels) if len(labels) > 1 else b""


@lru_cache(maxsize=1)
def top_levels() -> frozenset[str]:
    """Every top-level domain of the public suffix list that the package `tld` carries, in Unicode and in ASCII."""
    import idna
    from tld.utils import get_tld_names

    (suffixes,) = get_tld_names().values()
    names = [name for name in suffixes.root.children or () if name != "*"]
    return frozenset(names) | {idna.encode(name).decode("ascii") for name in names if not name.isascii()}


def ip(text: bytes, at: int) -> Span | None:
    """The public IP address that begins at a place."""
    return _ipv4(text, at) or _ipv6(text, at)


def _ipv4(text: bytes, at: int) -> Span | None:
    found = _IPV4.match(text, at)
    if found is None or not _may_begin(text, at):
        return None
    address = _read(found[0])
    if address is None or not address.is_global or address.is_multicast:
        return None
    small = sum(number < LEAST_OF_AN_ADDRESS for number in address.packed)
    if small >= 3 or address.packed[-1] == 0:
        return None
    if _NUMBERED.search(text[max(0, at - CONTEXT_BYTES) : at]):
        return None
    return found.span()


def _may_begin(text: bytes, at: int) -> bool:
    """Not inside a name; behind a slash or hyphen only in a URL or a range."""
    before, second = text[max(0, at - 1) : at], text[max(0, at - 2) : max(0, at - 1)]
    if before == b"/":
        return not _WORD.match(second)
    if before == b"-":
        return second.isdigit()
    return before != b"." and not _WORD.match(before)


def _ipv6(text: bytes, at: int) -> Span | None:
    found = _IPV6.match(text, at)
    before = text[max(0, at - 1) : at]
    if found is None or before in (b":", b".", b"-") or _WORD.match(before):
        return None
    written = found[0]
    if written.endswith(b"::"):
        return None
    written = written.removesuffix(b":")
    address = _read(written)
    return (at, at + len(written)) if address is not None and address.is_global else None


def _read(written: bytes) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(written.decode("ascii"))
    except ValueError:
        return None

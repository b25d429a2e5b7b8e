"""URLs of documents: normalisation, and the URL in a document's metadata.

`normalise_url` combines three sources that identify pages. C4 (tensorflow/datasets,
`c4_utils.py`, `normalize_url`) removes the scheme, `www.`, queries that begin with
`utm_`, `ref` or `feed`, and trailing slashes; RefinedWeb (Penedo et al. 2023, appendix
G.1) compares URLs after such a normalisation to deduplicate pages over all dumps; RFC
3986 section 6.2.2 defines the equivalent spellings of the other parts.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from urllib.parse import quote

import pyarrow as pa

TRACKING_PREFIXES = ("utm_", "mtm_", "pk_", "hsa_")
"""Prefixes of the parameters in Google's, Matomo's and HubSpot's campaign links (`utm_`
is C4's).
"""
TRACKING_PARAMETERS = frozenset(
    # C4 cuts queries that begin with `ref` or `feed`
    (
        "ref ref_src ref_url referrer feed fbclid gclid gclsrc dclid gbraid wbraid "
        "msclkid yclid twclid ttclid igshid li_fat_id mc_cid mc_eid mkt_tok "
        "oly_anon_id oly_enc_id vero_id _hsenc _hsmi _ga _gl _openstat wickedid s_cid "
        "rb_clickid __s"
    ).split()
)
"""Parameters that identify the click, not the page (those that Firefox and Brave strip,
and C4's two).
"""

_WEB = re.compile(r"(?:(?:https?:)?//+)+", re.IGNORECASE)
_OTHER_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://", re.IGNORECASE)
_PARTS = re.compile(r"([^/?#]*)([^?#]*)(?:\?([^#]*))?")
_AUTHORITY = re.compile(
    r"(\[[0-9a-fA-F:.]+\]|[^\s\x00-\x20\x7f:@\[\]\\%<>\"`{}|^]+)((?::\d*)*)"
)
_DEFAULT_PORTS = re.compile(r"(?::(?:80|443)?)+$")
_ESCAPE = re.compile(r"%([0-9A-Fa-f]{2})?")
_UNRESERVED = frozenset(
    "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~"
)
_KEPT = "%!$&'()*+,;=:@/?"
"""RFC 3986's reserved characters that are allowed in a path or query; others, except
unreserved, are escaped.
"""
_TRIMMED = "".join(map(chr, range(0x21))) + "\x7f\u00a0\ufeff"


def normalise_url(url: str) -> str:
    """Normalise a page's URL and remove its scheme:
    `http://WWW.a.org:80/x/?utm_source=y#z` becomes `a.org/x`.

    In this order:

    - surrounding spaces and control characters, and the fragment, are removed;
    - `http://`, `https://` and `//` are removed, even if repeated; another scheme
      stays, in lower case;
    - user and password are removed; the host is converted to lower case and the ASCII
      form of IDNA (UTS 46), without a trailing dot and without every leading `www.`
      that is followed by a name with a dot;
    - the ports 80 and 443 and an empty port are removed;
    - in path and query, escapes of unreserved characters are decoded, all others get
      upper-case digits, and characters not allowed in a URL are escaped, non-ASCII
      characters as UTF-8;
    - trailing slashes of the path are removed;
    - empty and tracking parameters (TRACKING_PREFIXES, TRACKING_PARAMETERS, ignoring
      case) are removed, and the others are sorted by name; parameters of one name keep
      their order.

    Idempotent. A string without a host (`mailto:x`, `/path`) is only trimmed.
    """
    url = url.strip(_TRIMMED)
    web_match, scheme_match = _WEB.match(url), _OTHER_SCHEME.match(url)
    scheme = scheme_match[0].lower() if scheme_match and not web_match else ""
    match = web_match or scheme_match
    parts = _PARTS.match(url, match.end() if match else 0)
    assert parts is not None  # it matches every string
    authority, path, query = parts.groups("")
    if match:
        authority = authority.rpartition("@")[2]
    authority_match = _AUTHORITY.fullmatch(authority)
    host = "" if authority_match is None else normalise_host(authority_match[1])
    if authority_match is None or not host:
        return url
    port = _DEFAULT_PORTS.sub("", authority_match[2])
    path = _normalise_escapes(path).rstrip("/")
    parameters = []
    for parameter in _normalise_escapes(query).split("&"):
        name = parameter.partition("=")[0].lower()
        is_tracking = name in TRACKING_PARAMETERS or name.startswith(TRACKING_PREFIXES)
        if parameter and not is_tracking:
            parameters.append(parameter)
    parameters.sort(key=lambda parameter: parameter.partition("=")[0])
    query = "?" + "&".join(parameters) if parameters else ""
    return f"{scheme}{host}{port}{path}{query}"


def normalise_host(host: str) -> str:
    """Convert a host to lower case and ASCII (IDNA's A-labels by UTS 46), without
    trailing dot or leading `www.`.
    """
    host = host.lower()
    if not host.isascii():
        import idna

        # a name that is not valid in IDNA is compared unchanged
        with suppress(idna.IDNAError, UnicodeError):
            host = idna.encode(host, uts46=True).decode("ascii")
    host = host.rstrip(".")
    while host.startswith("www.") and "." in host[4:]:
        host = host[4:]
    return host


def _normalise_escapes(text: str) -> str:
    """Normalise escapes by RFC 3986 section 6.2.2; a stray `%` is escaped, so that the
    function is idempotent.
    """

    def normalised(match: re.Match[str]) -> str:
        digits = match[1]
        if digits is None:
            return "%25"
        character = chr(int(digits, 16))
        return character if character in _UNRESERVED else f"%{digits.upper()}"

    if "%" in text:
        text = _ESCAPE.sub(normalised, text)
    return quote(text, safe=_KEPT, errors="surrogatepass")


def url_host(url: str) -> str:
    """Normalised host of a URL without its port; empty if it has none."""
    normalised = normalise_url(url)
    scheme_match = _OTHER_SCHEME.match(normalised)
    authority = re.split(
        r"[/?#]",
        normalised[scheme_match.end() :] if scheme_match else normalised,
        maxsplit=1,
    )[0]
    authority_match = _AUTHORITY.fullmatch(authority)
    return "" if authority_match is None else authority_match[1]


def document_urls(documents: pa.Table) -> list[str | None]:
    """URL of each document: the string `url` of its metadata, else its locator if that
    begins with http(s)://.

    Args:
        documents: a shard with at least `locator` and `metadata`.
    """
    urls: list[str | None] = []
    for metadata, locator in zip(
        documents["metadata"].to_pylist(),
        documents["locator"].to_pylist(),
        strict=True,
    ):
        values = json.loads(metadata) if metadata and '"url"' in metadata else {}
        url = values.get("url") if isinstance(values, dict) else None
        if not isinstance(url, str) or not url:
            is_url = locator.lower().startswith(("http://", "https://"))
            url = locator if is_url else None
        urls.append(url)
    return urls

"""URLs of documents: one spelling per page, the domain that somebody registered, and where a document's URL is kept.

`normalise_url` joins what three sources do to tell pages apart. C4 (tensorflow/datasets, `c4_utils.py`,
`normalize_url`) removes the scheme, `www.`, queries that begin with `utm_`, `ref` or `feed`, and trailing slashes;
RefinedWeb (Penedo et al. 2023, appendix G.1) compares URLs after such a normalisation to see a page once over all
dumps; RFC 3986 section 6.2.2 says which spellings of the rest are equivalent.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from urllib.parse import quote

import pyarrow as pa

TRACKING_PREFIXES = ("utm_", "mtm_", "pk_", "hsa_")
"""How the parameters of Google's, Matomo's and HubSpot's campaign links begin (`utm_` is C4's)."""
TRACKING_PARAMETERS = frozenset(
    {
        "ref",
        "ref_src",
        "ref_url",
        "referrer",
        "feed",  # C4 cuts the query where `ref` or `feed` begins it
        "fbclid",
        "gclid",
        "gclsrc",
        "dclid",
        "gbraid",
        "wbraid",
        "msclkid",
        "yclid",
        "twclid",
        "ttclid",
        "igshid",
        "li_fat_id",
        "mc_cid",
        "mc_eid",
        "mkt_tok",
        "oly_anon_id",
        "oly_enc_id",
        "vero_id",
        "_hsenc",
        "_hsmi",
        "_ga",
        "_gl",
        "_openstat",
        "wickedid",
        "s_cid",
        "rb_clickid",
        "__s",
    }
)
"""Parameters that name the click and not the page (those that Firefox and Brave strip, and C4's two)."""

_WEB = re.compile(r"(?:(?:https?:)?//+)+", re.IGNORECASE)
_OTHER_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://", re.IGNORECASE)
_PARTS = re.compile(r"([^/?#]*)([^?#]*)(?:\?([^#]*))?")
_AUTHORITY = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\s\x00-\x20\x7f:@\[\]\\%<>\"`{}|^]+)((?::\d*)*)")
_DEFAULT_PORTS = re.compile(r"(?::(?:80|443)?)+$")
_ESCAPE = re.compile(r"%([0-9A-Fa-f]{2})?")
_UNRESERVED = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")
_KEPT = "%!$&'()*+,;=:@/?"
"""RFC 3986's reserved characters that may stand in a path or query; all others but the unreserved are escaped."""
_TRIMMED = "".join(map(chr, range(0x21))) + "\x7f\u00a0\ufeff"


def normalise_url(url: str) -> str:
    """The one spelling of a page's URL, without its scheme: `http://WWW.a.org:80/x/?utm_source=y#z` is `a.org/x`.

    In this order:

    - what surrounds it (spaces, control characters) and the fragment go;
    - `http://`, `https://` and `//` go, however often; another scheme stays, in lower case;
    - user and password go; the host gets lower case and the ASCII form of IDNA (UTS 46), and loses a trailing dot
      and every leading `www.` that is followed by a name with a dot;
    - the ports 80 and 443 and an empty one go;
    - in path and query, escapes of unreserved characters are undone, all others get upper-case digits, and whatever
      may not stand in a URL is escaped, non-ASCII characters as UTF-8;
    - trailing slashes of the path go;
    - parameters that are empty or tracking (TRACKING_PREFIXES, TRACKING_PARAMETERS, in any case) go, and the others
      are sorted by name, those of one name in their order.

    Idempotent. A string that has no host (`mailto:x`, `/path`) comes back trimmed and otherwise as it was.
    """
    url = url.strip(_TRIMMED)
    rest, scheme = url, ""
    if web := _WEB.match(url):
        rest = url[web.end() :]
    elif other := _OTHER_SCHEME.match(url):
        rest, scheme = url[other.end() :], other[0].lower()
    parts = _PARTS.match(rest)
    assert parts is not None  # it matches every string
    authority, path, query = parts[1], parts[2], parts[3]
    if rest is not url:
        authority = authority.rpartition("@")[2]
    place = _AUTHORITY.fullmatch(authority)
    host = "" if place is None else normalise_host(place[1])
    if place is None or not host:
        return url
    port = _DEFAULT_PORTS.sub("", place[2])
    path = _normalise_escapes(path).rstrip("/")
    query = _normalise_query(query or "")
    return f"{scheme}{host}{port}{path}{query}"


def normalise_host(host: str) -> str:
    """A host in lower case and ASCII (IDNA's A-labels by UTS 46), without a trailing dot or leading `www.`."""
    host = host.lower()
    if not host.isascii():
        host = _ascii_host(host)
    host = host.rstrip(".")
    while host.startswith("www.") and "." in host[4:]:
        host = host[4:]
    return host


def _ascii_host(host: str) -> str:
    import idna

    try:
        return idna.encode(host, uts46=True).decode("ascii")
    except (idna.IDNAError, UnicodeError):
        return host  # no name that IDNA knows; it is compared as it stands


def _normalise_query(query: str) -> str:
    kept = []
    for parameter in _normalise_escapes(query).split("&"):
        name = parameter.partition("=")[0]
        tracking = name.lower() in TRACKING_PARAMETERS or name.lower().startswith(TRACKING_PREFIXES)
        if parameter and not tracking:
            kept.append((name, parameter))
    kept.sort(key=lambda item: item[0])
    return "?" + "&".join(parameter for _, parameter in kept) if kept else ""


def _normalise_escapes(text: str) -> str:
    """RFC 3986 section 6.2.2: a stray `%` is escaped itself, so that a second time changes nothing."""
    if "%" in text:
        text = _ESCAPE.sub(_normalise_escape, text)
    return quote(text, safe=_KEPT, errors="surrogatepass")


def _normalise_escape(match: re.Match[str]) -> str:
    digits = match[1]
    if digits is None:
        return "%25"
    character = chr(int(digits, 16))
    return character if character in _UNRESERVED else f"%{digits.upper()}"


def url_host(url: str) -> str:
    """The normalised host of a URL without its port; empty where it has none."""
    normalised = normalise_url(url)
    other = _OTHER_SCHEME.match(normalised)
    authority = re.split(r"[/?#]", normalised[other.end() :] if other else normalised, maxsplit=1)[0]
    place = _AUTHORITY.fullmatch(authority)
    return "" if place is None else place[1]


@lru_cache(maxsize=100_000)
def registered_domain(host: str) -> str:
    """The domain that somebody registered: `news.bbc.co.uk` belongs to `bbc.co.uk`.

    By the public suffix list that the package `tld` carries (no network), its private part included: each
    `somebody.github.io` is a domain of its own. A host that is an address, has an unknown top level or is itself a
    public suffix stands for itself.

    Args:
        host: as `normalise_host` or `url_host` gives it.
    """
    from tld import get_fld

    unicode_host = _unicode_host(host) if "xn--" in host else host
    found = None if host.startswith("[") else get_fld(f"//{unicode_host}", fail_silently=True)
    if found is None:
        return host
    return host if found == unicode_host else ".".join(host.split(".")[-len(found.split(".")) :])


def _unicode_host(host: str) -> str:
    """The list has internationalised suffixes in Unicode."""
    import idna

    try:
        return idna.decode(host)
    except (idna.IDNAError, UnicodeError):
        return host


def document_urls(documents: pa.Table) -> list[str | None]:
    """Each document's URL: the string `url` of its metadata, else its locator if that begins with http(s)://.

    Args:
        documents: a shard with at least `locator` and `metadata`.
    """
    return [
        _metadata_url(metadata) or (locator if locator.lower().startswith(("http://", "https://")) else None)
        for metadata, locator in zip(documents["metadata"].to_pylist(), documents["locator"].to_pylist(), strict=True)
    ]


def _metadata_url(metadata: str | None) -> str | None:
    if not metadata or '"url"' not in metadata:
        return None
    values = json.loads(metadata)
    url = values.get("url") if isinstance(values, dict) else None
    return url if isinstance(url, str) and url else None

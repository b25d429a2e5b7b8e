"""Statistics of the rule set `urls`: matches of a document's URL, or of words in it,
with the user's lists.

- url_blocked_domain: 1 if the host, or the host without some of its first labels, is in
  `block_domains`.
- url_blocked_page: 1 if the normalised URL (`urls.normalise_url`) is that of an entry
  of `block_urls`.
- url_hard_words, url_soft_words: distinct entries whose words occur consecutively in
  the URL. Words are maximal runs of ASCII letters and digits, in the URL and in an
  entry.
- url_strict_words: places of the URL, without its `-` and `.`, where an entry (without
  them) ends.

All in lower case, unlike the words of the URL in datatrove (`filters/url_filter.py`).
Words and parts are searched in the document's URL as it is, without its scheme.
Everything is NaN for a document without a URL.
"""

from __future__ import annotations

import re
from functools import lru_cache

import numpy as np
import pyarrow as pa

from gristmill.dataprep.cleaning.urls import (
    document_urls,
    normalise_host,
    normalise_url,
    url_host,
)
from gristmill.dataprep.filtering.listed_words import (
    Automaton,
    build,
    contained,
    count,
    hash_strings,
    hashed_list,
    read_list,
)
from gristmill.dataprep.filtering.rule_sets import RuleSet, spread
from gristmill.mixtures.steps.rules import Urls

_SCHEME = re.compile(r"^[a-z][a-z0-9+.-]*://(?:www\.)?")
_WORDS = re.compile(r"[a-z0-9]+")
_UNSTRICT = str.maketrans("", "", "-.")


def url_statistics(rows: pa.Table, options: Urls) -> dict[str, np.ndarray]:
    """Measure the columns of n documents (columns `locator`, `metadata`): float64 of
    shape (n,); NaN without URL.
    """
    all_urls = document_urls(rows)
    has_url = np.array([url is not None for url in all_urls], bool)
    urls = [url for url in all_urls if url is not None]
    plain = [_SCHEME.sub("", url.lower()) for url in urls]
    columns = {}
    for name, measure, forms, path in (
        ("url_blocked_domain", _blocked_domains, urls, options.block_domains),
        ("url_blocked_page", _blocked_pages, urls, options.block_urls),
        ("url_hard_words", _count_words, plain, options.hard_words),
        ("url_soft_words", _count_words, plain, options.soft_words),
        ("url_strict_words", _count_parts, plain, options.strict_words),
    ):
        columns[name] = np.zeros(len(urls)) if path is None else measure(forms, path)
    return spread(columns, has_url)


RULE_SET = RuleSet(url_statistics, ("locator", "metadata"))


def listed_domain(entry: str) -> str:
    """Return an entry of a list of domains as a host; lists may write `*.a.org` or
    `.a.org` for `a.org`.
    """
    return normalise_host(entry.lstrip("*."))


def _blocked_domains(urls: list[str], path: str) -> np.ndarray:
    names: list[str] = []
    rows: list[int] = []
    for row, url in enumerate(urls):
        host = url_host(url)
        labels = host.split(".") if host else []
        names += [".".join(labels[first:]) for first in range(len(labels))]
        rows += [row] * len(labels)
    is_listed = contained(hash_strings(names), hashed_list(path, listed_domain))
    blocked = np.zeros(len(urls), bool)
    blocked[np.array(rows, np.int64)[is_listed]] = True
    return blocked


def _blocked_pages(urls: list[str], path: str) -> np.ndarray:
    pages = hash_strings([normalise_url(url) for url in urls])
    return contained(pages, hashed_list(path, normalise_url))


@lru_cache(maxsize=8)
def _entries(path: str) -> tuple[frozenset[str], tuple[str, ...]]:
    """Entries of one word, and those of several with single spaces."""
    entries = {" ".join(_WORDS.findall(entry.lower())) for entry in read_list(path)}
    several = {entry for entry in entries if " " in entry}
    return frozenset(entries - several - {""}), tuple(several)


def _count_words(urls: list[str], path: str) -> np.ndarray:
    counts = np.zeros(len(urls), np.int64)
    single, several = _entries(path)
    for row, url in enumerate(urls):
        words = _WORDS.findall(url)
        joined = f" {' '.join(words)} "
        counts[row] = len(single.intersection(words)) + sum(
            f" {entry} " in joined for entry in several
        )
    return counts


@lru_cache(maxsize=8)
def _parts(path: str) -> Automaton:
    return build(entry.lower().translate(_UNSTRICT) for entry in read_list(path))


def _count_parts(urls: list[str], path: str) -> np.ndarray:
    parts = [url.translate(_UNSTRICT) for url in urls]
    return count(pa.array(parts, pa.large_string()), _parts(path), False)[0]

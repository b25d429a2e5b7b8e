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
from gristmill.dataprep.filters.listed_words import (
    Automaton,
    build,
    contained,
    count,
    hash_strings,
    hashed_list,
    read_list,
)
from gristmill.dataprep.filters.rule_sets import RuleSet, spread
from gristmill.dataprep.text.kernels import text_buffers
from gristmill.dataprep.text.unicode_tables import code_point_flags
from gristmill.dataprep.thresholds import Columns
from gristmill.mixtures.steps.rules import Urls

_SCHEME = re.compile(r"^[a-z][a-z0-9+.-]*://(?:www\.)?")
_WORDS = re.compile(r"[a-z0-9]+")
_UNSTRICT = str.maketrans("", "", "-.")
URL_STATISTICS = (
    "url_blocked_domain",
    "url_blocked_page",
    "url_hard_words",
    "url_soft_words",
    "url_strict_words",
)


def url_statistics(rows: pa.Table, options: Urls) -> Columns:
    """Measure the columns of n documents (columns `locator`, `metadata`): float64 of
    shape (n,); NaN without URL.
    """
    all_urls = document_urls(rows)
    has_url = np.array([url is not None for url in all_urls], bool)
    urls = [url for url in all_urls if url is not None]
    plain = [_SCHEME.sub("", url.lower()) for url in urls]
    columns = {name: np.zeros(len(urls)) for name in URL_STATISTICS}
    if options.block_domains is not None:
        domains: list[str] = []
        rows_of_domains: list[int] = []
        for row, url in enumerate(urls):
            host = url_host(url)
            labels = host.split(".") if host else []
            domains += [".".join(labels[first:]) for first in range(len(labels))]
            rows_of_domains += [row] * len(labels)
        blocked = hashed_list(options.block_domains, listed_domain)
        is_listed = contained(hash_strings(domains), blocked)
        blocked_rows = np.array(rows_of_domains, np.int64)[is_listed]
        columns["url_blocked_domain"][blocked_rows] = 1
    if options.block_urls is not None:
        pages = hash_strings([normalise_url(url) for url in urls])
        columns["url_blocked_page"] = contained(
            pages, hashed_list(options.block_urls, normalise_url)
        )
    if options.hard_words is not None:
        columns["url_hard_words"] = _count_words(plain, options.hard_words)
    if options.soft_words is not None:
        columns["url_soft_words"] = _count_words(plain, options.soft_words)
    if options.strict_words is not None:
        parts = [url.translate(_UNSTRICT) for url in plain]
        columns["url_strict_words"], _ = count(
            *text_buffers(pa.array(parts, pa.large_string())),
            _parts(options.strict_words),
            code_point_flags(),
            False,
        )
    return spread(columns, has_url)


RULE_SET = RuleSet(url_statistics, ("locator", "metadata"))


def listed_domain(entry: str) -> str:
    """Return an entry of a list of domains as a host; lists may write `*.a.org` or
    `.a.org` for `a.org`.
    """
    return normalise_host(entry.lstrip("*."))


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

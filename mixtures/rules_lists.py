"""Rule sets of the stage `filter` that judge by lists and models of the user's: URLs, bad words, toxicity."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from gristmill.mixtures.section import Fraction, OutsidePath, Section

Count = Annotated[int, Field(ge=0)]
MC4_ALLOWED = {"ja": ("sm", "グロ", "女の子"), "zh": ("性",)}
"""Entries of LDNOOBW's lists that mC4 leaves out (tensorflow/datasets, `c4.py`)."""


class Urls(Section):
    """What a document's URL says about it (Penedo et al. 2023, appendix G.1; datatrove, `filters/url_filter.py`).

    Every list is a text file, gzipped where its name ends in `.gz`: an entry per line, lines that begin with `#` aside.
    All is compared in lower case. A document without a URL (metadata `url`, or a locator that is one) passes.
    """

    block_domains: OutsidePath | None = None
    """Domains, subdomains included (such as the lists of the University of Toulouse, UT1)."""
    block_urls: OutsidePath | None = None
    """Pages, in whatever spelling (see `dataprep/cleaning/urls.py`)."""
    hard_words: OutsidePath | None = None
    """Whole words of a URL, between characters that are neither letters nor digits; any one drops the document."""
    soft_words: OutsidePath | None = None
    """Whole words of which several drop the document."""
    strict_words: OutsidePath | None = None
    """Parts of words, looked for anywhere in the URL without its `-` and `.`."""
    max_url_blocked_domain: Count | None = 0
    """1 where the host, or a domain that it belongs to, is in `block_domains`."""
    max_url_blocked_page: Count | None = 0
    """1 where the page is in `block_urls`."""
    max_url_hard_words: Count | None = 0
    """Distinct entries of `hard_words` in the URL."""
    max_url_soft_words: Count | None = 1
    """Distinct entries of `soft_words` in the URL (RefinedWeb, datatrove, DCLM: two are too many)."""
    max_url_strict_words: Count | None = 0
    """Places of the URL where an entry of `strict_words` is."""


class BadWords(Section):
    """Words that a text should not have (C4 and mC4: tensorflow/datasets, `c4_utils.py`, `get_badwords_filter_fn`).

    An entry counts where no word character is next to it; in `unspaced` languages anywhere. All is compared in lower
    case. A document whose language has no list passes.
    """

    lists: dict[str, OutsidePath] = Field(default_factory=dict)
    """Language -> a text file, gzipped where its name ends in `.gz`: an entry per line (such as LDNOOBW's lists, which
    C4 takes)."""
    language: str | None = "en"
    """Whose list judges documents of which no stage `langid` has measured the `language`; null judges none of them."""
    unspaced: tuple[str, ...] = ("ja", "th", "zh")
    """Languages written without spaces (C4's)."""
    allowed: dict[str, tuple[str, ...]] = Field(default_factory=lambda: dict(MC4_ALLOWED))
    """Language -> entries that do not count (mC4's: each is part of words in a tenth of all documents)."""
    max_bad_words: Count | None = 0
    """Places of the text where an entry ends (C4 drops at the first)."""
    max_bad_word_ratio: Fraction | None = None
    """Bytes of the text that belong to entries / bytes of the text."""


class Toxicity(Section):
    """How sure a fastText classifier of the user's is that a text is toxic (such as Dolma's, trained on Jigsaw)."""

    model: OutsidePath
    """A supervised fastText model, `.bin` or `.ftz`."""
    label: str = "__label__toxic"
    """The label whose probability is measured."""
    max_toxicity: Fraction | None = 0.5
    """Probability of the label, of the whole text as one line."""

"""The section `opt_outs`: documents whose publishers reserve their use for training."""

from __future__ import annotations

from typing import Literal

from gristmill.mixtures.base import Judging, NonEmpty, OutsidePath, Section, Text


class Reservations(Section):
    """Reservations that drop a document; each has a column of its name."""

    robots_txt: bool = True
    """A robots.txt (RFC 9309) disallows the page to one of `agents`."""
    content_usage: bool = True
    """`train-ai=n` or `train-genai=n` in the header Content-Usage, or in such a rule of a
    robots.txt (IETF drafts aipref-attach and aipref-vocab).
    """
    x_robots_tag: bool = True
    """The header X-Robots-Tag has one of `directives`."""
    meta_robots: bool = True
    """The meta tag `robots` has one of `directives`."""
    tdm_reservation: bool = True
    """The page's meta tag or header reserves its rights (TDM Reservation Protocol of a
    W3C community group).
    """
    tdmrep: bool = True
    """The site's tdmrep.json reserves the page's rights; a page that has a meta tag or
    header of that protocol decides for itself.
    """
    ai_txt: bool = True
    """An ai.txt, which has the form of a robots.txt, disallows the page to one of
    `agents`.
    """


OPT_OUT_RULES = tuple(Reservations.model_fields)


class OptOuts(Judging):
    """Machine-readable opt-outs (reservations of rights) of sites and pages, from files:
    nothing is fetched. See docs/how-to/data/opt-outs.md.
    """

    files: tuple[OutsidePath, ...] = ()
    """Texts of sites at the time of the crawl: WARC files with responses to
    `/robots.txt` and `/ai.txt`, or tables (Parquet, CSV, JSON lines) with the columns
    `host`, perhaps `date` (as in WARC), and any of `robots_txt`, `ai_txt` and `tdmrep`
    (the content of `/.well-known/tdmrep.json`). Of several texts of a site, a page has
    the last one before its own date.
    """
    reservations: Reservations = Reservations()
    """Rules to apply: `{ai_txt: false}` switches one off. All reservations are measured
    in any case.
    """
    agents: NonEmpty[Text] = (
        "GPTBot",
        "ClaudeBot",
        "anthropic-ai",
        "CCBot",
        "Google-Extended",
        "Applebot-Extended",
        "meta-externalagent",
        "Bytespider",
    )
    """User agents, or product tokens, that stand for training. A group for `*` counts
    for those that a robots.txt does not name.
    """
    directives: NonEmpty[Literal["noai", "noimageai"]] = ("noai", "noimageai")
    """Directives that count; `noimageai` alone is about images."""

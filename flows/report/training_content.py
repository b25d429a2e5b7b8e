"""`gristmill report --training-summary`: the training content, in the order of the
European Commission's template.

The template for the public summary of training content (Article 53(1)(d) of Regulation
(EU) 2024/1689; Commission, 24 July 2025) has three sections: general information, a
list of data sources by kind, and data processing. Facts of the manifest and the store
are filled in; facts that only the provider knows are named as open, never guessed.
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from gristmill.dataprep.conservation import ranked
from gristmill.dataprep.exporting.origins import Origin
from gristmill.dataprep.sites import SITE
from gristmill.flows.pages.page_elements import (
    Heading,
    Note,
    Page,
    Part,
    Section,
    flatten,
    table,
)
from gristmill.flows.questions.find_documents import committed_corpus
from gristmill.flows.questions.query import ask
from gristmill.flows.report.document_sections import opt_out_table
from gristmill.flows.report.facts import Facts, gather_facts
from gristmill.flows.report.licence_shares import (
    LicenceShares,
    licence_shares,
    licences_section,
)
from gristmill.flows.report.mixture import mixture_rows
from gristmill.flows.report.report import MINUTE
from gristmill.flows.report.source_origins import source_origins
from gristmill.flows.running.session import Session
from gristmill.mixtures.spdx import expression_of
from gristmill.mixtures.steps.opt_outs import OptOuts
from gristmill.mixtures.yaml_text import join_first

SIZES = (
    (1_000_000_000, "less than 1 billion tokens"),
    (10_000_000_000_000, "1 billion to 10 trillion tokens"),
    (math.inf, "more than 10 trillion tokens"),
)
"""The template's ranges for text, section 1.3, each with its end."""
DOMAIN_SHARE, LEAST_DOMAINS = 0.1, 10
"""The template asks for the top 10 % of all domain names by the size of scraped text,
section 2.3.
"""
MOST_DOMAINS = 1000
MOST_LANGUAGES = 12
OPEN = "to be filled in by the provider"
NOT_RECORDED = "not recorded"
SOURCE_COLUMNS = {
    "source": "",
    "path": "",
    "documents": ",",
    "MB kept": ",.2f",
    "tokens": ",",
    "share": ".2%",
    "languages": "",
    "licences": "",
    "collected": "",
    "crawler": "",
}


_CONTENTS = """
    WITH groups AS (
        SELECT source, coalesce({language}, '{unknown}') AS language,
            count(*) AS documents, sum(strlen(text)) AS size, count(url) AS addressed
        FROM documents WHERE kept GROUP BY ALL
    )
    SELECT source, sum(documents), sum(size) / 1e6, sum(addressed) = sum(documents),
        list(language), list(size::BIGINT)
    FROM groups GROUP BY GROUPING SETS ((source), ())
"""


_DOMAINS = f"""
    WITH domains AS (
        SELECT lower(regexp_extract(url, '{SITE}', 1)) AS domain,
            count(*) AS documents, sum(strlen(text)) / 1e6 AS size
        FROM documents WHERE kept AND list_contains({{sources}}, source)
        GROUP BY domain
    )
    SELECT *, count(*) OVER () AS number FROM domains
    QUALIFY row_number() OVER (ORDER BY size DESC, domain)
        <= least({MOST_DOMAINS}, greatest({LEAST_DOMAINS}, ceil(number * {DOMAIN_SHARE})))
    ORDER BY size DESC, domain
"""


class Content(NamedTuple):
    """Kept documents of a source, or of all.

    Attributes:
        documents, megabytes: number of documents, and size of their texts in UTF-8.
        is_addressed: True if all documents have an address.
        languages: by their share of the bytes.
    """

    documents: int
    megabytes: float
    is_addressed: bool
    languages: str


def training_content(session: Session) -> Page:
    """The summary as a page.

    Raises:
        NothingIngestedError: no document of the manifest is committed.
    """
    facts = gather_facts(session, whole=False)
    corpus = committed_corpus(session)
    language = corpus.last_measured("language") or "NULL"
    nothing = Content(0, 0.0, False, NOT_RECORDED)
    contents: dict[str | None, Content] = defaultdict(lambda: nothing)
    sql = _CONTENTS.format(language=language, unknown=NOT_RECORDED)
    with ask(corpus, sql) as answer:
        for source, documents, size, is_addressed, *languages in answer.rows():
            shares = _most_frequent(zip(*languages, strict=True))
            contents[source] = Content(documents, size, is_addressed, shares)
    origins, licences = source_origins(session, facts), licence_shares(session, facts)
    note = (
        "Written by gristmill from the manifest and its store on "
        f"{time.strftime(MINUTE)}, in the order of the European Commission's template "
        "for the public summary of training content of general-purpose AI models."
    )
    sources = _sources(session, facts, contents, origins, licences)
    sections = [
        _general(session, facts, contents[None], origins),
        Section("2. Sources of data", flatten(sources)),
        licences_section("Licences of the sources of data", licences),
        Section("3. Aspects of data processing", flatten(_processing(session, facts))),
    ]
    return Page(f"Training content of {session.manifest.name}", sections, note=note)


def _general(
    session: Session, facts: Facts, content: Content, origins: Sequence[Origin]
) -> Section:
    manifest = session.manifest
    tokens = sum(row.tokens for row in mixture_rows(facts))
    size = next(name for most, name in SIZES if tokens < most)
    generated = manifest.generated_sources.values()
    writers = {source.generate.model.called for source in generated}
    writers |= {examples.model.called for examples in manifest.examples.values()}
    models = [f"text written by {', '.join(sorted(writers))}"] if writers else []
    if manifest.model is not None and manifest.model.path:
        models.insert(0, f"continues {manifest.model.path}")
    last = session.plan[facts.stages[-1].stage]
    trained = {name: facts.trained(name).tokens for name in facts.training}
    days = (replace(origin, period=origin.period[1:]) for origin in origins)
    rows = {
        "provider, authorised representative": OPEN,
        "model": manifest.name,
        "version": f"fingerprint {last.fingerprint[:16]} of its last stage",
        "models that it depends on": "; ".join(models) or "none",
        "date of placement on the market": OPEN,
        "modality": "text",
        "size of the training data": f"{size}: {tokens:,} in the mixture"
        if facts.packed
        else NOT_RECORDED,
        **{f"tokens read by {name}": f"{n:,}" for name, n in trained.items() if n},
        "documents kept": f"{content.documents:,}",
        "languages": content.languages,
        "latest date of acquisition": max(day.collected for day in days) or OPEN,
        "linguistic and demographic characteristics": OPEN,
    }
    return Section(
        "1. General information", [table({"": "", "value": ""}, rows.items())]
    )


def _sources(
    session: Session,
    facts: Facts,
    contents: Mapping[str | None, Content],
    origins: Sequence[Origin],
    shares: LicenceShares,
) -> Iterator[Part | str | Sequence[Part]]:
    """Sources by kind; those whose documents all have an address are scraped."""
    manifest = session.manifest
    mixed = {row.source: [row.tokens, row.share] for row in mixture_rows(facts)}
    sets: list[list[object]] = []
    scraped: list[list[object]] = []
    written: list[list[object]] = []
    for origin in origins:
        name = origin.source
        content = contents[name]
        rows = scraped if content.is_addressed else sets
        rows = written if origin.written_by else rows
        licences = (
            (share.licence, share.text_bytes)
            for share in shares.shares
            if share.source == name
        )
        rows.append(
            [
                name,
                _place(session, name),
                content.documents,
                content.megabytes,
                *mixed.get(name, [None, None]),
                content.languages,
                _most_frequent(licences),
                origin.collected or NOT_RECORDED,
                origin.crawlers,
            ]
        )
    for name, source in manifest.token_sources.items():
        use = [None, None, *mixed.get(name, [None, None]), NOT_RECORDED]
        licence = expression_of(source.licence)
        sets.append([name, source.tokens, *use, licence, NOT_RECORDED, ""])
    examples = [
        [name, ", ".join(data.path for data in section.data), section.model.called]
        for name, section in manifest.examples.items()
    ]
    yield Heading("2.1 and 2.2 Data sets, public and private")
    yield table(SOURCE_COLUMNS, sets)
    yield f"Whether each is public, who gave it, and under which terms: {OPEN}."
    yield Heading("2.3 Data crawled and scraped from online sources")
    yield table(SOURCE_COLUMNS, scraped)
    yield _domains(session, [str(row[0]) for row in scraped])
    yield Heading("2.4 User data")
    yield f"{OPEN.capitalize()}: gristmill has no such kind of source."
    yield Heading("2.5 Synthetic data")
    yield table(SOURCE_COLUMNS, written)
    yield table({"examples for tuning": "", "written after": "", "by": ""}, examples)
    if not written and not examples:
        yield "Nothing that this manifest reads is written by a model."
    # Examples of fine-tuning and preferences, and prompts, are training content, too.
    tuning = [
        [name, data.path]
        for name, section in manifest
        for data in getattr(section, "data", None) or ()
    ]
    if tuning:
        yield Heading("2.6 Other sources: examples for fine-tuning")
        yield table({"trains": "", "path": ""}, tuning)


def _place(session: Session, name: str) -> str:
    """Path of a source, which says nothing of the machine, or its parents."""
    if name in session.manifest.generated_sources:
        parents = session.manifest.generated_sources[name].generate.parents
        return f"from {', '.join(parents)}"
    path = str(session.manifest.document_sources[name].path)
    folder = Path(session.manifest_file).parent
    return path if "://" in path else os.path.relpath(path, folder)


def _processing(session: Session, facts: Facts) -> Iterator[Part | str]:
    mix = session.manifest.mix
    yield Heading("3.1 Reservations of rights (text and data mining opt-outs)")
    if mix is not None and mix.exclude:
        yield (
            "Documents taken down, which no training of this manifest reads: those of "
            f"the list `{mix.exclude}`."
        )
    else:
        yield "No document was taken down (`mix.exclude` is absent)."
    for name, step in session.manifest.steps.items():
        if isinstance(step.config, OptOuts) and name in facts.summaries:
            summary = facts.step(name)
            dropped = summary.counts.read - summary.counts.kept
            yield (
                f"The step `{name}` found machine-readable reservations, for the agents "
                f"{', '.join(step.config.agents)}; {dropped:,} of "
                f"{summary.counts.read:,} documents were removed for one."
            )
            yield opt_out_table(summary)
    yield (
        "How reservations of rights were found and respected when the data was "
        f"collected: {OPEN}."
    )
    yield Heading("3.2 Removal of illegal content, and all other steps")
    columns = {"read": ",", "kept": ",", "rules that dropped documents": ""}
    steps = [
        [row.stage, row.read, row.kept, ", ".join(sorted(row.dropped))]
        for row in facts.funnel
    ]
    yield table({"stage": "", **columns}, steps)
    yield f"Measures against illegal content beyond these steps: {OPEN}."


def _domains(session: Session, sources: list[str]) -> list[Part]:
    """The domain names with most text, of the sources whose documents all have an
    address.
    """
    if not sources:
        return [Note("Not every document of any source has a web address.")]
    # names are letters, digits, - and _
    with ask(committed_corpus(session), _DOMAINS.format(sources=sources)) as answer:
        domains = list(answer.rows())
    note = (
        f"Domain names with most text, {len(domains):,} of {domains[0][-1]:,}. "
        f"Behaviour of the crawlers beyond what their records say: {OPEN}."
    )
    columns = {"domain name": "", "documents": ",", "MB kept": ",.2f"}
    return [Note(note), table(columns, (row[:-1] for row in domains))]


def _most_frequent(sizes: Iterable[tuple[str, int]]) -> str:
    """Names with their share of the bytes, the most frequent first."""
    sums = Counter[str]()
    for name, size in sizes:
        sums[name] += size
    total = sums.total() or 1
    values = [f"{name} {size / total:.1%}" for name, size in ranked(sums)]
    return join_first(values, MOST_LANGUAGES) or NOT_RECORDED

"""`gristmill report --training-summary`: the training content, in the order of the
European Commission's template.

The template for the public summary of training content (Article 53(1)(d) of Regulation
(EU) 2024/1689; Commission, 24 July 2025) has three sections: general information, a
list of data sources by kind, and data processing. Facts of the manifest and the store
are filled in; facts that only the provider knows are named as open, never guessed.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gristmill.dataprep.conservation import ranked
from gristmill.dataprep.count_losses import HOST
from gristmill.dataprep.exporting.origins import Origin
from gristmill.dataprep.licences.shares import licence_column
from gristmill.flows.pages.page_elements import (
    Heading,
    Note,
    Page,
    Part,
    Section,
    Table,
    flatten,
    table,
)
from gristmill.flows.questions.find_documents import committed_corpus
from gristmill.flows.questions.query import ask
from gristmill.flows.report.document_sections import opt_out_table
from gristmill.flows.report.facts import Facts, gather_facts
from gristmill.flows.report.licence_shares import (
    licence_shares,
    licence_table,
)
from gristmill.flows.report.mixture import mixture_rows
from gristmill.flows.report.report import MINUTE
from gristmill.flows.report.source_origins import source_origins
from gristmill.flows.report.stage_summaries import FoundOptOuts
from gristmill.flows.running.session import Session
from gristmill.mixtures.spdx import UNKNOWN, spdx_of
from gristmill.mixtures.steps.opt_outs import OptOuts
from gristmill.mixtures.yaml_text import join_first

SIZES = (
    (1_000_000_000, "less than 1 billion tokens"),
    (10_000_000_000_000, "1 billion to 10 trillion tokens"),
)
"""The template's ranges for text, section 1.3; above the last: more than 10 trillion
tokens.
"""
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
}


@dataclass(frozen=True)
class Group:
    """Kept documents of a source, a language and a licence.

    Attributes:
        source: its name.
        language: None is not recorded.
        licence: SPDX expression, or `unknown`.
        documents: their number.
        bytes: of UTF-8 of their texts.
        addressed: documents with an address.
    """

    source: str
    language: str | None
    licence: str
    documents: int
    bytes: int
    addressed: int


def training_content(session: Session) -> Page:
    """The summary as a page.

    Raises:
        NothingIngestedError: no document of the manifest is committed.
    """
    facts = gather_facts(session, whole=False)
    corpus = committed_corpus(session)
    language = "language" if "language" in corpus.schema.names else "NULL"
    sql = (
        f"SELECT source, {language} AS language, {licence_column(corpus)} AS licence, "
        "count(*), sum(strlen(text)), count(url) FROM documents WHERE kept GROUP BY ALL "
        "ORDER BY ALL"
    )
    with ask(corpus, sql) as answer:
        groups = [
            Group(source, language, spdx_of(licence or "") or UNKNOWN, *numbers)
            for source, language, licence, *numbers in answer.rows()
        ]
    origins = source_origins(session, facts)
    shares = licence_shares(session, facts)
    steps = [
        [row.stage, row.read, row.kept, ", ".join(sorted(row.dropped))]
        for row in facts.funnel
    ]
    columns = {"read": ",", "kept": ",", "rules that dropped documents": ""}
    mix = session.manifest.mix
    taken_down = "No document was taken down (`mix.exclude` is absent)."
    if mix is not None and mix.exclude:
        taken_down = (
            "Documents taken down, which no training of this manifest reads: those of "
            f"the list `{mix.exclude}`."
        )
    processing = flatten(
        [
            Heading("3.1 Reservations of rights (text and data mining opt-outs)"),
            taken_down,
            *_reservations(session, facts),
            "How reservations of rights were found and respected when the data was "
            f"collected: {OPEN}.",
            Heading("3.2 Removal of illegal content, and all other steps"),
            table({"stage": "", **columns}, steps),
            f"Measures against illegal content beyond these steps: {OPEN}.",
        ]
    )
    sections = [
        _general(session, facts, groups, origins),
        *_sources(session, facts, groups, origins),
        Section(
            "Licences of the sources of data",
            flatten([shares.describe(), licence_table(shares)]),
        ),
        Section("3. Aspects of data processing", processing),
    ]
    note = (
        "Written by gristmill from the manifest and its store on "
        f"{time.strftime(MINUTE)}, in the order of the European Commission's template "
        "for the public summary of training content of general-purpose AI models."
    )
    return Page(f"Training content of {session.manifest.name}", sections, note=note)


def _reservations(session: Session, facts: Facts) -> Iterator[Part | str]:
    """Reservations that each step `opt_outs` found, and dropped."""
    for name, step in session.manifest.steps.items():
        if isinstance(step.config, OptOuts) and name in facts.summaries:
            summary = facts.summary(name, FoundOptOuts)
            dropped = summary.counts.read - summary.counts.kept
            yield (
                f"The step `{name}` found machine-readable reservations, for the agents "
                f"{', '.join(step.config.agents)}; {dropped:,} of "
                f"{summary.counts.read:,} documents were removed for one."
            )
            yield opt_out_table(summary)


def _general(
    session: Session, facts: Facts, groups: Sequence[Group], origins: Sequence[Origin]
) -> Section:
    manifest = session.manifest
    size = NOT_RECORDED
    if facts.packed is not None:
        tokens = sum(row.tokens for row in mixture_rows(facts))
        ranges = (name for most, name in SIZES if tokens < most)
        range_ = next(ranges, "more than 10 trillion tokens")
        size = f"{range_}: {tokens:,} in the mixture"
    writers = [source.generate.model for source in manifest.generated_sources.values()]
    writers += [examples.model for examples in manifest.examples.values()]
    models = []
    if manifest.model is not None and manifest.model.path:
        models.append(f"continues {manifest.model.path}")
    if writers:
        names = sorted({str(model.model or model.folder) for model in writers})
        models.append(f"text written by {', '.join(names)}")
    committed = [stage for stage in facts.stages if stage.seconds is not None]
    rows = [
        ["provider, authorised representative", OPEN],
        ["model", manifest.name],
        ["version", f"fingerprint {committed[-1].fingerprint} of its last stage"],
        ["models that it depends on", "; ".join(models) or "none"],
        ["date of placement on the market", OPEN],
        ["modality", "text"],
        ["size of the training data", size],
    ]
    for name in facts.training:
        read = facts.trained(name).tokens
        if read is not None:
            rows.append([f"tokens read by {name}", f"{read:,}"])
    days = [origin.last_day for origin in origins if origin.period is not None]
    rows += [
        ["documents kept", f"{sum(group.documents for group in groups):,}"],
        ["languages", _most_frequent("language", groups)],
        ["latest date of acquisition", max(days, default=OPEN)],
        ["linguistic and demographic characteristics", OPEN],
    ]
    return Section("1. General information", [table({"": "", "value": ""}, rows)])


def _sources(
    session: Session, facts: Facts, groups: Sequence[Group], origins: Sequence[Origin]
) -> list[Section]:
    manifest = session.manifest
    mixed = {row.source: [row.tokens, row.share] for row in mixture_rows(facts)}
    unmixed = [None, None]
    kinds: dict[str, list[Sequence[object]]] = {"set": [], "crawl": [], "model": []}
    crawled = []
    for name in manifest.text_sources:
        groups_of_source = [group for group in groups if group.source == name]
        kind = "set"
        if name in manifest.document_sources:
            path = str(manifest.document_sources[name].path)
            if "://" not in path:  # says nothing of the machine
                path = os.path.relpath(path, Path(session.manifest_file).parent)
        else:
            parents = manifest.generated_sources[name].generate.parents
            path = f"from {', '.join(parents)}"
        if name in manifest.generated_sources:
            kind = "model"
        elif groups_of_source and all(
            group.addressed == group.documents for group in groups_of_source
        ):
            kind = "crawl"
            crawled.append(name)
        kinds[kind].append(
            [
                name,
                path,
                sum(group.documents for group in groups_of_source),
                sum(group.bytes for group in groups_of_source) / 1e6,
                *mixed.get(name, unmixed),
                _most_frequent("language", groups_of_source),
                _most_frequent("licence", groups_of_source),
            ]
        )
    for name, source in manifest.token_sources.items():
        use = [None, None, *mixed.get(name, unmixed), NOT_RECORDED]
        licence = spdx_of(source.licence or "") or UNKNOWN
        kinds["set"].append([name, source.tokens, *use, licence])
    examples = [
        [
            name,
            ", ".join(data.path for data in section.data),
            str(section.model.model or section.model.folder),
        ]
        for name, section in manifest.examples.items()
    ]
    nothing = "Nothing that this manifest reads is written by a model."
    parts = flatten(
        [
            Heading("2.1 and 2.2 Data sets, public and private"),
            table(SOURCE_COLUMNS, kinds["set"]),
            _periods(origins, kinds["set"]),
            f"Whether each is public, who gave it, and under which terms: {OPEN}.",
            Heading("2.3 Data crawled and scraped from online sources"),
            table(SOURCE_COLUMNS, kinds["crawl"]),
            _periods(origins, kinds["crawl"]),
            _domains(session, crawled),
            Heading("2.4 User data"),
            f"{OPEN.capitalize()}: gristmill has no such kind of source.",
            Heading("2.5 Synthetic data"),
            table(SOURCE_COLUMNS, kinds["model"]),
            table({"examples for tuning": "", "written after": "", "by": ""}, examples),
            None if kinds["model"] or examples else nothing,
        ]
    )
    # Examples of fine-tuning and preferences, and prompts, are training content too.
    tuning = [
        [name, data.path]
        for name in type(manifest).model_fields
        for data in getattr(getattr(manifest, name), "data", None) or ()
    ]
    title = "2.6 Other sources: examples for fine-tuning"
    trains = Section(title, [table({"trains": "", "path": ""}, tuning)])
    return [Section("2. Sources of data", parts), *([trains] if tuning else [])]


def _periods(origins: Sequence[Origin], sources: Sequence[Sequence[object]]) -> Table:
    """Period of collection and crawlers of some sources, as far as they are recorded;
    `sources` are rows that begin with a source's name.
    """
    names = [row[0] for row in sources]
    rows = [
        [
            origin.source,
            origin.describe_period(),
            " / ".join(origin.describe_crawlers()) or NOT_RECORDED,
        ]
        for origin in origins
        if origin.period is not None and origin.source in names
    ]
    columns = {"source": "", "period of collection": "", "crawler": ""}
    return table(columns, rows)


def _domains(session: Session, sources: Sequence[str]) -> list[Part]:
    """The domain names with most text, of the sources whose documents all have an
    address.
    """
    if not sources:
        return [Note("Not every document of any source has a web address.")]
    # names are letters, digits, - and _
    names = ", ".join(f"'{name}'" for name in sources)
    host = f"lower(regexp_extract(url, '{HOST}', 1))"
    sql = (
        f"SELECT {host} AS domain, count(*), sum(strlen(text)) / 1e6 AS size "
        f"FROM documents WHERE kept AND source IN ({names}) GROUP BY domain ORDER BY "
        "size DESC, domain"
    )
    with ask(committed_corpus(session), sql) as answer:
        domains = list(answer.rows())
    tenth = -(-len(domains) // round(1 / DOMAIN_SHARE))
    num_shown = min(max(LEAST_DOMAINS, tenth), MOST_DOMAINS, len(domains))
    note = (
        f"Domain names with most text, {num_shown:,} of {len(domains):,}. Behaviour of "
        f"the crawlers beyond what their records say: {OPEN}."
    )
    columns = {"domain name": "", "documents": ",", "MB kept": ",.2f"}
    return [Note(note), table(columns, domains[:num_shown])]


def _most_frequent(
    column: Literal["language", "licence"], groups: Sequence[Group]
) -> str:
    """Values with their share of the bytes, the most frequent first."""
    sizes = Counter[str]()
    for group in groups:
        sizes[getattr(group, column) or NOT_RECORDED] += group.bytes
    total = sizes.total() or 1
    values = [f"{value} {size / total:.1%}" for value, size in ranked(sizes)]
    return join_first(values, MOST_LANGUAGES) or NOT_RECORDED

"""`gristmill report --training-summary`: the training content, in the order of the
European Commission's template.

The template for the public summary of training content (Article 53(1)(d) of Regulation
(EU) 2024/1689; Commission, 24 July 2025) has three sections: general information, a
list of data sources by kind, and data processing. Facts of the manifest and the store
are filled in; facts that only the provider knows are named as open, never guessed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from gristmill.flows.pages.page_elements import (
    Heading,
    Note,
    Page,
    Part,
    Section,
    Table,
)
from gristmill.flows.questions.find_documents import committed_corpus
from gristmill.flows.questions.query import ask
from gristmill.flows.report.mixture import mixture_rows
from gristmill.flows.report.report_facts import Facts, gather_facts
from gristmill.flows.report.run_report import MINUTE
from gristmill.flows.running.session import Session

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
SOURCE_HEADER = [
    "source",
    "path",
    "documents",
    "MB kept",
    "tokens",
    "share",
    "languages",
    "licences",
]
SOURCE_NUMBERS = {2, 3, 4, 5}


def training_content(session: Session) -> Page:
    """The summary as a page.

    Raises:
        NothingIngestedError: no document of the manifest is committed.
    """
    facts = gather_facts(session, whole=False)
    groups = _groups(session)
    note = (
        "Written by gristmill from the manifest and its store on "
        f"{time.strftime(MINUTE)}, in the order of the European Commission's template "
        "for the public summary of training content of general-purpose AI models."
    )
    sections = [
        _general(session, facts, groups),
        *_sources(session, facts, groups),
        _processing(session, facts),
    ]
    return Page(f"Training content of {session.manifest.name}", sections, note=note)


def _groups(session: Session) -> list[dict[str, Any]]:
    """Kept documents by source, language and licence: `documents`, `bytes` of UTF-8,
    and those with an address.
    """
    corpus = committed_corpus(session)
    language = "language" if "language" in corpus.schema.names else "NULL"
    sql = (
        f"SELECT source, {language} AS language, licence, count(*) AS documents, "
        "sum(strlen(text)) AS bytes, "
        "count(url) AS addressed FROM documents WHERE kept GROUP BY ALL ORDER BY ALL"
    )
    with ask(corpus, sql) as answer:
        return [dict(zip(answer.columns, row, strict=True)) for row in answer.rows()]


def _general(
    session: Session, facts: Facts, groups: Sequence[Mapping[str, Any]]
) -> Section:
    size = NOT_RECORDED
    if "packed" in facts:
        tokens = sum(row["tokens"] for row in mixture_rows(facts))
        range_ = next(
            (name for most, name in SIZES if tokens < most),
            "more than 10 trillion tokens",
        )
        size = f"{range_}: {tokens:,} in the mixture"
    fingerprints = [
        stage["fingerprint"]
        for stage in facts["stages"]
        if stage["seconds"] is not None
    ]
    rows = [
        ["provider, authorised representative", OPEN],
        ["model", session.manifest.name],
        ["version", f"fingerprint {fingerprints[-1]} of its last stage"],
        ["models that it depends on", _models(session)],
        ["date of placement on the market", OPEN],
        ["modality", "text"],
        ["size of the training data", size],
    ]
    for name in facts["training"]:
        if "tokens" in facts["summaries"].get(name, {}):
            rows.append(
                [f"tokens read by {name}", f"{facts['summaries'][name]['tokens']:,}"]
            )
    rows += [
        ["documents kept", f"{sum(group['documents'] for group in groups):,}"],
        ["languages", _most_frequent(groups, "language")],
        ["latest date of acquisition", OPEN],
        ["linguistic and demographic characteristics", OPEN],
    ]
    return Section("1. General information", [Table(["", "value"], rows)])


def _models(session: Session) -> str:
    """The models that the model continues, and those that wrote its texts."""
    manifest = session.manifest
    writers = [source.generate.model for source in manifest.generated_sources.values()]
    writers += [examples.model for examples in manifest.examples.values()]
    clauses = []
    if manifest.model is not None and manifest.model.path:
        clauses.append(f"continues {manifest.model.path}")
    if writers:
        names = sorted({str(model.model or model.folder) for model in writers})
        clauses.append(f"text written by {', '.join(names)}")
    return "; ".join(clauses) or "none"


def _sources(
    session: Session, facts: Facts, groups: Sequence[Mapping[str, Any]]
) -> list[Section]:
    manifest = session.manifest
    mixed = (
        {row["source"]: row for row in mixture_rows(facts)} if "packed" in facts else {}
    )
    crawled, files, generated = [], [], []
    for name in manifest.text_sources:
        groups_of_source = [group for group in groups if group["source"] == name]
        row = _source_row(session, name, groups_of_source, mixed)
        if name in manifest.generated_sources:
            generated.append(row)
        elif groups_of_source and all(
            group["addressed"] == group["documents"] for group in groups_of_source
        ):
            crawled.append(row)
        else:
            files.append(row)
    for name, source in manifest.token_sources.items():
        use = _in_mixture(mixed, name)
        files.append(
            [
                name,
                source.tokens,
                "",
                "",
                *use,
                NOT_RECORDED,
                source.licence or NOT_RECORDED,
            ]
        )
    examples = [
        [
            name,
            ", ".join(data.path for data in section.data),
            str(section.model.model or section.model.folder),
        ]
        for name, section in manifest.examples.items()
    ]
    parts: list[Part] = [
        Heading("2.1 and 2.2 Data sets, public and private"),
        Table(SOURCE_HEADER, files, SOURCE_NUMBERS),
        Note(f"Whether each is public, who gave it, and under which terms: {OPEN}."),
        Heading("2.3 Data crawled and scraped from online sources"),
        Table(SOURCE_HEADER, crawled, SOURCE_NUMBERS),
        *_domains(session, [row[0] for row in crawled]),
        Heading("2.4 User data"),
        Note(f"{OPEN.capitalize()}: gristmill has no such kind of source."),
        Heading("2.5 Synthetic data"),
        Table(SOURCE_HEADER, generated, SOURCE_NUMBERS),
        Table(["examples for tuning", "written after", "by"], examples),
    ]
    if not generated and not examples:
        parts.append(Note("Nothing that this manifest reads is written by a model."))
    return [Section("2. Sources of data", parts), *_tuning_examples(session)]


def _source_row(
    session: Session,
    name: str,
    groups: Sequence[Mapping[str, Any]],
    mixed: Mapping[str, Mapping[str, Any]],
) -> list[str]:
    manifest = session.manifest
    if name in manifest.document_sources:
        path = str(manifest.document_sources[name].path)
    else:
        path = f"from {', '.join(manifest.generated_sources[name].generate.parents)}"
    documents = f"{sum(group['documents'] for group in groups):,}"
    megabytes = f"{sum(group['bytes'] for group in groups) / 1e6:,.2f}"
    languages, licences = (
        _most_frequent(groups, "language"),
        _most_frequent(groups, "licence"),
    )
    return [
        name,
        path,
        documents,
        megabytes,
        *_in_mixture(mixed, name),
        languages,
        licences,
    ]


def _in_mixture(mixed: Mapping[str, Mapping[str, Any]], name: str) -> tuple[str, str]:
    """Tokens and share of a source; empty before it is in a mixture."""
    return (
        (f"{mixed[name]['tokens']:,}", f"{mixed[name]['share']:.2%}")
        if name in mixed
        else ("", "")
    )


def _tuning_examples(session: Session) -> list[Section]:
    """Examples of fine-tuning and preferences, and prompts, which are training content
    too.
    """
    rows = []
    for name in type(session.manifest).model_fields:
        for data in getattr(getattr(session.manifest, name), "data", None) or ():
            rows.append([name, data.path])
    return (
        [
            Section(
                "2.6 Other sources: examples for fine-tuning",
                [Table(["trains", "path"], rows)],
            )
        ]
        if rows
        else []
    )


def _domains(session: Session, sources: Sequence[str]) -> list[Part]:
    """The domain names with most text, of the sources whose documents all have an
    address.
    """
    if not sources:
        return [Note("Not every document of any source has a web address.")]
    # names are letters, digits, - and _
    names = ", ".join(f"'{name}'" for name in sources)
    host = r"lower(regexp_extract(url, '^[a-zA-Z]+://(?:[^/@]*@)?(?:www\.)?([^/:?#]+)', 1))"
    sql = (
        f"SELECT {host} AS domain, count(*) AS documents, sum(strlen(text)) AS bytes "
        f"FROM documents WHERE kept AND source IN ({names}) GROUP BY domain ORDER BY "
        "bytes DESC, domain"
    )
    with ask(committed_corpus(session), sql) as answer:
        domains = list(answer.rows())
    tenth = -(-len(domains) // round(1 / DOMAIN_SHARE))
    shown = min(max(LEAST_DOMAINS, tenth), MOST_DOMAINS, len(domains))
    note = (
        f"Domain names with most text, {shown:,} of {len(domains):,}. Crawler, its "
        f"behaviour and period of collection: {OPEN}."
    )
    rows = [
        [name, f"{number:,}", f"{size / 1e6:,.2f}"]
        for name, number, size in domains[:shown]
    ]
    return [Note(note), Table(["domain name", "documents", "MB kept"], rows, {1, 2})]


def _processing(session: Session, facts: Facts) -> Section:
    rows = [
        [
            row["stage"],
            f"{row['read']:,}",
            f"{row['kept']:,}",
            ", ".join(sorted(row.get("dropped", {}))),
        ]
        for row in facts["funnel"]
    ]
    excluded = (
        session.manifest.mix.exclude if session.manifest.mix is not None else None
    )
    taken_down = "No document was taken down (`mix.exclude` is absent)."
    if excluded:
        taken_down = (
            "Documents taken down, which no training of this manifest "
            f"reads: those of the list `{excluded}`."
        )
    parts: list[Part] = [
        Heading("3.1 Reservations of rights (text and data mining opt-outs)"),
        Note(taken_down),
        Note(
            "How reservations of rights were found and respected when the data was "
            f"collected: {OPEN}."
        ),
        Heading("3.2 Removal of illegal content, and all other steps"),
        Table(["stage", "read", "kept", "rules that dropped documents"], rows, {1, 2}),
        Note(f"Measures against illegal content beyond these steps: {OPEN}."),
    ]
    return Section("3. Aspects of data processing", parts)


def _most_frequent(groups: Sequence[Mapping[str, Any]], key: str) -> str:
    """Values of a column with their share of the bytes, the most frequent first."""
    sizes: dict[str, int] = {}
    for group in groups:
        value = group[key] if group[key] is not None else NOT_RECORDED
        sizes[value] = sizes.get(value, 0) + group["bytes"]
    total = sum(sizes.values()) or 1
    ranked = sorted(sizes.items(), key=lambda item: (-item[1], item[0]))
    text = ", ".join(
        f"{value} {size / total:.1%}" for value, size in ranked[:MOST_LANGUAGES]
    )
    more = (
        f", and {len(ranked) - MOST_LANGUAGES} more"
        if len(ranked) > MOST_LANGUAGES
        else ""
    )
    return text + more or NOT_RECORDED

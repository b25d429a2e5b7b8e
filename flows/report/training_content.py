"""`gristmill report --training-summary`: what was trained on, in the order of the European Commission's template.

The template for the public summary of training content (Article 53(1)(d) of Regulation (EU) 2024/1689; Commission,
24 July 2025) has three sections: general information, a list of data sources by kind, and data processing. What the
manifest and the store know is filled in; what only the provider knows is named as open, never guessed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from gristmill.flows.questions.find_documents import committed_corpus
from gristmill.flows.questions.query import ask
from gristmill.flows.report.mixture import mixture_rows
from gristmill.flows.report.page import MINUTE
from gristmill.flows.report.page_elements import Heading, Note, Part, Section, Table
from gristmill.flows.report.report_facts import Facts, gather_facts
from gristmill.flows.running.session import Session

SIZES = ((1_000_000_000, "less than 1 billion tokens"), (10_000_000_000_000, "1 billion to 10 trillion tokens"))
"""The template's ranges for text, section 1.3; above the last: more than 10 trillion tokens."""
DOMAIN_SHARE, LEAST_DOMAINS = 0.1, 10
"""The template asks for the top 10 % of all domain names by the size of what was scraped, section 2.3."""
MOST_DOMAINS = 1000
MOST_LANGUAGES = 12
OPEN = "to be filled in by the provider"
NOBODY = "not recorded"


def training_content(session: Session) -> tuple[str, list[Section], str]:
    """The summary as a page: its title, sections, and the line beneath the title.

    Raises:
        NothingIngestedError: no document of the manifest is committed.
    """
    facts = gather_facts(session, whole=False)
    groups = _groups(session)
    title = f"Training content of {session.manifest.name}"
    note = (
        f"Written by gristmill from the manifest and its store on {time.strftime(MINUTE)}, in the order of the "
        "European Commission's template for the public summary of training content of general-purpose AI models."
    )
    sections = [_general(session, facts, groups), *_sources(session, facts, groups), _processing(session, facts)]
    return title, sections, note


def _groups(session: Session) -> list[dict[str, Any]]:
    """Kept documents by source, language and licence: `documents`, `bytes` of UTF-8, and how many have an address."""
    corpus = committed_corpus(session)
    language = "language" if "language" in corpus.schema.names else "NULL"
    sql = (
        f"SELECT source, {language} AS language, licence, count(*) AS documents, sum(strlen(text)) AS bytes, "
        "count(url) AS addressed FROM documents WHERE kept GROUP BY ALL ORDER BY ALL"
    )
    with ask(corpus, sql) as answer:
        return [dict(zip(answer.columns, row, strict=True)) for row in answer.rows()]


def _general(session: Session, facts: Facts, groups: Sequence[Mapping[str, Any]]) -> Section:
    tokens = sum(row["tokens"] for row in mixture_rows(facts)) if "packed" in facts else None
    size = next((said for most, said in SIZES if tokens is not None and tokens < most), "more than 10 trillion tokens")
    trained = {
        name: summary["tokens"]
        for name, summary in facts["summaries"].items()
        if name in facts["training"] and "tokens" in summary
    }
    done = [stage["fingerprint"] for stage in facts["stages"] if stage["seconds"] is not None]
    rows = [
        ["provider, authorised representative", OPEN],
        ["model", session.manifest.name],
        ["version", f"fingerprint {done[-1]} of its last stage"],
        ["models that it depends on", _depends_on(session)],
        ["date of placement on the market", OPEN],
        ["modality", "text"],
        ["size of the training data", f"{size}: {tokens:,} in the mixture" if tokens is not None else NOBODY],
        *([f"tokens read by {name}", f"{number:,}"] for name, number in trained.items()),
        ["documents kept", f"{sum(group['documents'] for group in groups):,}"],
        ["languages", _most_frequent(groups, "language", MOST_LANGUAGES)],
        ["latest date of acquisition", OPEN],
        ["linguistic and demographic characteristics", OPEN],
    ]
    return Section("1. General information", [Table(["", "value"], rows)])


def _depends_on(session: Session) -> str:
    given = None if session.manifest.model is None else session.manifest.model.path
    asked = [source.generate.model for source in session.manifest.generated_sources.values()]
    asked += [made.model for made in session.manifest.examples.values()]
    writers = sorted({str(model.model or model.folder) for model in asked})
    named = ([f"continues {given}"] if given else []) + ([f"text written by {', '.join(writers)}"] if writers else [])
    return "; ".join(named) or "none"


def _sources(session: Session, facts: Facts, groups: Sequence[Mapping[str, Any]]) -> list[Section]:
    manifest = session.manifest
    mixed = {row["source"]: row for row in mixture_rows(facts)} if "packed" in facts else {}
    tables: dict[str, list[list[str]]] = {"crawled": [], "files": [], "generated": []}
    for name in manifest.text_sources:
        own = [group for group in groups if group["source"] == name]
        documents, addressed = (sum(group[key] for group in own) for key in ("documents", "addressed"))
        is_crawled = documents > 0 and addressed == documents
        kind = "generated" if name in manifest.generated_sources else "crawled" if is_crawled else "files"
        path = (
            manifest.document_sources[name].path
            if name in manifest.document_sources
            else (f"from {', '.join(manifest.generated_sources[name].generate.parents)}")
        )
        tables[kind].append(
            [
                name,
                path,
                f"{documents:,}",
                f"{sum(group['bytes'] for group in own) / 1e6:,.2f}",
                *_in_mixture(mixed, name),
                _most_frequent(own, "language", MOST_LANGUAGES),
                _most_frequent(own, "licence", MOST_LANGUAGES),
            ]
        )
    tokens = [
        [name, source.tokens, "", "", *_in_mixture(mixed, name), NOBODY, source.licence or NOBODY]
        for name, source in manifest.token_sources.items()
    ]
    header = ["source", "path", "documents", "MB kept", "tokens", "share", "languages", "licences"]
    numeric = {2, 3, 4, 5}
    parts: list[Part] = [
        Heading("2.1 and 2.2 Data sets, public and private"),
        Table(header, [*tables["files"], *tokens], numeric),
        Note(f"Whether each is public, who gave it, and under which terms: {OPEN}."),
        Heading("2.3 Data crawled and scraped from online sources"),
        Table(header, tables["crawled"], numeric),
        *_domains(session, [row[0] for row in tables["crawled"]]),
        Heading("2.4 User data"),
        Note(f"{OPEN.capitalize()}: gristmill has no such kind of source."),
        Heading("2.5 Synthetic data"),
        Table(header, tables["generated"], numeric),
    ]
    made = [
        [name, ", ".join(one.path for one in section.data), str(section.model.model or section.model.folder)]
        for name, section in manifest.examples.items()
    ]
    parts.append(Table(["examples for tuning", "written after", "by"], made))
    if not tables["generated"] and not made:
        parts.append(Note("Nothing that this manifest reads is written by a model."))
    return [Section("2. Sources of data", parts), *_examples(session)]


def _in_mixture(mixed: Mapping[str, Mapping[str, Any]], name: str) -> tuple[str, str]:
    """Tokens and share of a source; empty where it is in no mixture yet."""
    return (f"{mixed[name]['tokens']:,}", f"{mixed[name]['share']:.2%}") if name in mixed else ("", "")


def _examples(session: Session) -> list[Section]:
    """Examples of fine-tuning and preferences, and prompts, which are training content too."""
    sections = ((name, getattr(session.manifest, name)) for name in type(session.manifest).model_fields)
    rows = [[name, one.path] for name, section in sections for one in getattr(section, "data", None) or ()]
    return [Section("2.6 Other sources: examples for fine-tuning", [Table(["trains", "path"], rows)])] if rows else []


def _domains(session: Session, sources: Sequence[str]) -> list[Part]:
    """The domain names with most text, of the sources whose documents all have an address."""
    if not sources:
        return [Note("Not every document of any source has a web address.")]
    names = ", ".join(f"'{name}'" for name in sources)  # names are letters, digits, - and _
    host = r"lower(regexp_extract(url, '^[a-zA-Z]+://(?:[^/@]*@)?(?:www\.)?([^/:?#]+)', 1))"
    sql = (
        f"SELECT {host} AS domain, count(*) AS documents, sum(strlen(text)) AS bytes FROM documents "
        f"WHERE kept AND source IN ({names}) GROUP BY domain ORDER BY bytes DESC, domain"
    )
    with ask(committed_corpus(session), sql) as answer:
        rows = list(answer.rows())
    shown = min(max(LEAST_DOMAINS, -(-len(rows) // round(1 / DOMAIN_SHARE))), MOST_DOMAINS)
    return [
        Note(
            f"Domain names with most text, {min(shown, len(rows)):,} of {len(rows):,}. Crawler, its behaviour and "
            f"period of collection: {OPEN}."
        ),
        Table(
            ["domain name", "documents", "MB kept"],
            [[name, f"{number:,}", f"{size / 1e6:,.2f}"] for name, number, size in rows[:shown]],
            {1, 2},
        ),
    ]


def _processing(session: Session, facts: Facts) -> Section:
    rows = [
        [row["stage"], f"{row['read']:,}", f"{row['kept']:,}", ", ".join(sorted(row.get("dropped", {})))]
        for row in facts["funnel"]
    ]
    excluded = session.manifest.mix.exclude if session.manifest.mix is not None else None
    return Section(
        "3. Aspects of data processing",
        [
            Heading("3.1 Reservations of rights (text and data mining opt-outs)"),
            Note(
                f"Documents taken down, which no training of this manifest reads: those of the list `{excluded}`."
                if excluded
                else "No document was taken down (`mix.exclude` is absent)."
            ),
            Note(f"How reservations of rights were found and respected when the data was collected: {OPEN}."),
            Heading("3.2 Removal of illegal content, and all other steps"),
            Table(["stage", "read", "kept", "rules that dropped documents"], rows, {1, 2}),
            Note(f"Measures against illegal content beyond these steps: {OPEN}."),
        ],
    )


def _most_frequent(groups: Sequence[Mapping[str, Any]], key: str, most: int) -> str:
    """Values of a column with their share of the bytes, the most frequent first."""
    found: dict[str, int] = {}
    for group in groups:
        value = group[key] if group[key] is not None else NOBODY
        found[value] = found.get(value, 0) + group["bytes"]
    total = sum(found.values()) or 1
    ranked = sorted(found.items(), key=lambda item: (-item[1], item[0]))
    more = f", and {len(ranked) - most} more" if len(ranked) > most else ""
    return ", ".join(f"{value} {size / total:.1%}" for value, size in ranked[:most]) + more or NOBODY

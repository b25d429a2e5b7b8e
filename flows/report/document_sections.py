"""The report's sections about documents: of all steps together, and of each step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import shorten
from typing import Any

from gristmill.dataprep.whatif_thresholds import short_name
from gristmill.flows.pages import pictures
from gristmill.flows.pages.dot_map import draw_map, series_of
from gristmill.flows.pages.histogram import draw_histogram
from gristmill.flows.pages.page_elements import (
    Details,
    Entry,
    Figure,
    Heading,
    Inline,
    Listing,
    Mark,
    Note,
    Part,
    Section,
    SeriesKey,
    Sides,
    Span,
    Table,
    Text,
    section_of,
)
from gristmill.flows.pages.text_diff import Piece, differences
from gristmill.flows.report.report_facts import Facts, eaten_sources, top_reasons
from gristmill.mixtures.sources import INGEST

MOST_REASONS = 20
MOST_BARS = 12
MOST_LANGUAGES = 20
CONTEXT = 1000
"""Characters that remain at both ends of a folded passage, which is the same in two
texts for four times as long.
"""
TITLE_CHARS = 80
"""Beginning of a document, shown before it is opened."""


def document_sections(facts: Facts) -> list[Section | None]:
    """The sections about all steps together; None for those without content."""
    return [
        funnel(facts),
        reasons(facts),
        cuts(facts),
        whole_documents(facts),
        quarantine(facts),
    ]


def funnel(facts: Facts) -> Section | None:
    """Documents, bytes and tokens after each stage, as a picture and a table."""
    if not facts["funnel"]:
        return None
    rows = [
        [
            row["stage"],
            f"{row['read']:,}",
            f"{row['kept']:,}",
            f"{row['read'] - row['kept']:,}",
            f"{row['bytes_kept'] / 1e6:.2f}",
            tokens_kept(row),
        ]
        for row in facts["funnel"]
    ]
    estimate = Note(
        "Tokens before the last stage are estimated from the bytes per "
        "token of each source."
    )
    has_tokens = any("tokens_kept" in row for row in facts["funnel"])
    return section_of(
        "Documents",
        Figure(funnel_picture(facts), "Text kept after each stage."),
        Table(
            ["stage", "read", "kept", "gone", "MB kept", "tokens kept"],
            rows,
            {1, 2, 3, 4, 5},
        ),
        estimate if has_tokens else None,
        [Note(f"{sentence}.") for sentence in eaten_sources(facts["funnel"])],
        by_source(facts),
    )


def funnel_picture(facts: Facts) -> str:
    """Megabytes of text after each stage, by source."""
    bars = []
    for row in facts["funnel"]:
        sources = sorted(row.get("sources", {}).items())
        bars.append(
            (
                row["stage"],
                {name: counts.get("bytes_kept", 0) / 1e6 for name, counts in sources},
            )
        )
    return pictures.stacked_bars(bars, "MB of text kept, by source")


def by_source(facts: Facts) -> list[Part]:
    """Documents of each source after each stage: shares as a picture, numbers as a
    table; empty for a single source.
    """
    first, *later = facts["funnel"]
    read = {
        name: counts["read"]
        for name, counts in sorted(first.get("sources", {}).items())
        if counts.get("read")
    }
    # A first stage that lost nothing would be drawn twice.
    drawn = later if first["kept"] == first["read"] else [first, *later]
    if len(read) < 2 or not drawn:
        return []
    rows = []
    shares = {}
    for name, number in read.items():
        counts_by_stage = [row["sources"].get(name, {}) for row in drawn]
        shares[name] = [
            1.0,
            *(counts.get("kept", 0) / number for counts in counts_by_stage),
        ]
        for row in (first, *later):
            counts = row["sources"].get(name, {})
            tokens = (
                tokens_kept({**counts, "tokens_exact": row["tokens_exact"]})
                if "tokens_kept" in counts
                else ""
            )
            kept = counts.get("kept", 0)
            megabytes = f"{counts.get('bytes_kept', 0) / 1e6:.2f}"
            rows.append(
                [
                    name,
                    row["stage"],
                    f"{kept:,}",
                    f"{kept / number:.1%}",
                    megabytes,
                    tokens,
                ]
            )
    picture = pictures.steps(
        shares, ["read", *(row["stage"] for row in drawn)], "of a source's documents"
    )
    meanings = {
        "left": "kept after the stage, of all documents of the source that were read"
    }
    return [
        Heading("Each source"),
        Figure(picture, "Share of each source's documents kept after each stage."),
        Table(
            ["source", "after", "kept", "left", "MB kept", "tokens kept"],
            rows,
            {2, 3, 4, 5},
            meanings,
        ),
    ]


def tokens_kept(row: Mapping[str, Any]) -> str:
    """The tokens after a stage, marked if they are estimated; empty without a
    tokenizer.
    """
    if "tokens_kept" not in row:
        return ""
    return f"{'' if row['tokens_exact'] else '≈ '}{row['tokens_kept']:,.0f}"


def reasons(facts: Facts) -> Section | None:
    """Documents that each rule dropped, and those that no other rule drops."""
    alone: dict[str, int] = {}
    for summary in facts["summaries"].values():
        alone |= {
            rule: tally["only"] for rule, tally in summary.get("rules", {}).items()
        }
    rows = []
    for row in facts["funnel"]:
        for rule, count in top_reasons(row, MOST_REASONS):
            share = f"{count / max(row['read'], 1):.2%}"
            rows.append(
                [
                    row["stage"],
                    rule,
                    f"{count:,}",
                    share,
                    f"{alone[rule]:,}" if rule in alone else "",
                ]
            )
    if not rows:
        return None
    table = Table(
        ["stage", "rule", "documents", "of those read", "by it alone"], rows, {2, 3, 4}
    )
    return section_of(
        "Why documents were dropped",
        Figure(reasons_picture(facts), "Documents by the first rule that they failed."),
        Details(f"All {len(rows)} rules that dropped any", [table]),
    )


def reasons_picture(facts: Facts) -> str:
    """The rules that dropped most documents."""
    counts = [
        (count, row["stage"], rule)
        for row in facts["funnel"]
        for rule, count in top_reasons(row, MOST_BARS)
    ]
    counts.sort(key=lambda entry: (-entry[0], entry[2]))
    bars = [
        (f"{stage}: {short_name(rule)}", {"documents": float(count)})
        for count, stage, rule in counts
    ]
    return pictures.stacked_bars(bars[:MOST_BARS], "documents")


def cuts(facts: Facts) -> Section | None:
    """The cut of every rule that dropped most among the measured values, and the texts
    next to it on both sides.
    """
    details = [
        Details(
            f"{cut['rule']} = {cut['bound']:g}: {cut['dropped']:,} documents",
            both_sides(cut),
        )
        for cut in facts.get("cuts", [])
    ]
    return section_of("Both sides of each cut", details)


def both_sides(cut: Mapping[str, Any]) -> list[Part]:
    """The histogram of the values that a cut bounds, if they were counted, and the
    texts next to the cut.
    """
    parts: list[Part] = []
    if cut["histogram"]:
        edges, counts = cut["histogram"]["edges"], cut["histogram"]["counts"]
        caption = (
            f"Documents by {cut['statistic']}. The cut of {cut['key']} lies at "
            f"{cut['bound']:g}."
        )
        parts.append(draw_histogram(edges, counts, cut["bound"], caption))
    for side, title in (
        ("failing", "dropped, next to the cut"),
        ("passing", "passed, next to the cut"),
    ):
        entries = []
        for sample in cut[side]:
            label: list[Inline] = [
                Span(f"{sample['value']:.4g}", "strong"),
                f" {sample['source']} {sample['locator']}",
            ]
            entries.append(Entry(label, [Span(sample["excerpt"])]))
        parts.append(Listing(title, entries))
    return parts


def whole_documents(facts: Facts) -> Section | None:
    """Whole documents, kept and dropped ones, chosen by chance."""
    groups = facts.get("shown_documents")
    if not groups:
        return None
    parts: list[Part] = []
    for group in groups:
        heading = (
            "Kept"
            if group["step"] is None
            else f"Dropped by {group['step']}: {group['rule']}"
        )
        parts.append(Heading(f"{heading} ({group['documents']:,})"))
        parts += [_whole_document(document) for document in group["shown"]]
    note = (
        "Some of each, by chance and the same in every report of this data: a click "
        "opens one. What steps took out of a text is struck out and red, what they put "
        "in is green."
    )
    return section_of("Whole documents", Note(note), parts)


def _whole_document(document: Mapping[str, Any]) -> Details:
    spans = [Span(piece["text"], piece["edit"] or "") for piece in document["pieces"]]
    original = "".join(span.text for span in spans if span.mark != "added")
    characters = f"{document['characters']:,}"
    parts: list[Part] = [*map(Note, document["said"]), Text(spans)]
    if len(original) < document["characters"]:
        command = f"`gristmill explain MANIFEST {document['id']} --text`"
        parts.append(
            Note(
                f"The first {len(original):,} of {characters} characters; "
                f"{command} shows all."
            )
        )
    beginning = shorten(original[: 8 * TITLE_CHARS], TITLE_CHARS, placeholder=" ...")
    title = (
        f"{document['source']} {document['locator']}, {characters} characters: "
        f"{beginning}"
    )
    return Details(title, [*parts, Note(f"Its id is `{document['id']}`.")], long=True)


def lengths(facts: Facts, name: str = "filter") -> Section | None:
    """Number of words of the documents that the filter read."""
    counted = facts["summaries"][name].get("histograms", {}).get("words")
    if not counted:
        return None
    caption = "Documents that the filter has read, by their number of words."
    return section_of(
        "Lengths", draw_histogram(counted["edges"], counted["counts"], None, caption)
    )


def rules_by_language(facts: Facts, name: str = "filter") -> Section | None:
    """Documents that the rules of each language kept."""
    counted = facts["summaries"][name].get("by_language", {})
    rows = [
        [
            language,
            f"{counts['read']:,}",
            f"{counts['kept']:,}",
            f"{counts['kept'] / max(counts['read'], 1):.1%}",
        ]
        for language, counts in sorted(
            counted.items(), key=lambda item: (-item[1]["read"], item[0])
        )
    ]
    return section_of(
        "Rules by language",
        Table(["rules of", "read", "kept", "share"], rows, {1, 2, 3}),
    )


def languages(facts: Facts, name: str = "langid") -> Section | None:
    """The languages of documents, and the confidence of the model."""
    summary = facts["summaries"][name]
    if not summary.get("languages"):
        return None
    number = len(summary["languages"])
    scores = summary.get("histograms", {}).get("language_score")
    suffix = f"; the {MOST_LANGUAGES} most frequent:" if number > MOST_LANGUAGES else ""
    return section_of(
        "Languages",
        Note(f"{number} language{'s' if number > 1 else ''}{suffix}"),
        Figure(languages_picture(summary), "Documents by their likeliest language."),
        kept_by_language(summary) if "languages_kept" in summary else None,
        draw_histogram(
            scores["edges"], scores["counts"], None, "Confidence of the model."
        )
        if scores
        else None,
    )


def most_frequent_languages(summary: Mapping[str, Any]) -> list[tuple[str, int]]:
    """(language, documents) of the most frequent languages."""
    ranked = sorted(summary["languages"].items(), key=lambda item: (-item[1], item[0]))
    return ranked[:MOST_LANGUAGES]


def kept_by_language(summary: Mapping[str, Any]) -> Table:
    """Documents of the most frequent languages, and how many of them are kept."""
    rows = []
    for language, read in most_frequent_languages(summary):
        kept = summary["languages_kept"].get(language, 0)
        rows.append([language, f"{read:,}", f"{kept:,}", f"{kept / read:.1%}"])
    return Table(["language", "documents", "kept", "share"], rows, {1, 2, 3})


def languages_picture(summary: Mapping[str, Any]) -> str:
    """Documents by language, the most frequent ones."""
    bars = [
        (language, {"documents": float(count)})
        for language, count in most_frequent_languages(summary)
    ]
    return pictures.stacked_bars(bars, "documents")


def quality(facts: Facts, name: str = "quality") -> Section | None:
    """Scores by source, and how well the classifier separates held-out documents."""
    summary = facts["summaries"][name]
    if "histogram" not in summary:
        return None
    parts: list[Part] = []
    if "auc" in summary:
        alone = (
            f"; by their length alone {summary['length_auc']:.4f}"
            if "length_auc" in summary
            else ""
        )
        parts.append(
            Note(
                f"AUC {summary['auc']:.4f} on {summary['held_out']:,} "
                f"held-out documents{alone}."
            )
        )
    if "distilled" in summary:
        parts += agreement(summary["distilled"])
    picture = quality_picture(summary)
    if picture:
        parts.append(Figure(picture, "Quality scores by source."))
    return Section("Quality", parts)


def agreement(distilled: Mapping[str, Any]) -> list[Part]:
    """Agreement of a classifier with the judge that it learnt from."""
    cut, confusion, best = (
        distilled["at_cut"],
        distilled["confusion"],
        distilled["best"],
    )
    calibration = [
        [
            f"from {row['from']:.1f}",
            f"{row['documents']:,}",
            f"{row['score']:.3f}",
            f"{row['good']:.1%}",
        ]
        for row in distilled["calibration"]
    ]
    confusions = [
        [
            "judge: good",
            f"{confusion['good_kept']:,}",
            f"{confusion['good_dropped']:,}",
        ],
        [
            "otherwise",
            f"{confusion['other_kept']:,}",
            f"{confusion['other_dropped']:,}",
        ],
    ]
    return [
        Note(
            f"Learnt from {distilled['learnt']:,} of {distilled['sample']:,} judged "
            f"documents, {distilled['good']:,} of them good. On "
            f"{distilled['held_out']:,} held out: AUC {distilled['auc']:.4f}; at "
            f"{cut['cut']:.3g} F1 {cut['f1']:.3f}, precision {cut['precision']:.3f}, "
            f"recall {cut['recall']:.3f}; best F1 {best['f1']:.3f} at "
            f"{best['cut']:.3g}."
        ),
        Table(["", "classifier: good", "otherwise"], confusions, {1, 2}),
        Table(
            ["score", "documents", "mean score", "good by the judge"],
            calibration,
            {1, 2, 3},
        ),
    ]


def quality_picture(summary: Mapping[str, Any]) -> str:
    """Quality scores by source; empty without any."""
    series = summary["histogram"]
    bins = len(next(iter(series.values()), []))
    return (
        pictures.histogram(
            series, [index / bins for index in range(bins + 1)], "quality score"
        )
        if bins
        else ""
    )


def duplicates(facts: Facts, name: str = "dedup") -> Section | None:
    """Sizes of clusters of duplicates, the largest clusters, and near duplicates side
    by side.
    """
    clusters = facts.get("clusters", {}).get(name)
    if not clusters or not clusters["largest"]:
        return None
    summary = facts["summaries"][name]
    rows = [
        [cluster["locator"], cluster["survivor"][:16], cluster["size"]]
        for cluster in clusters["largest"]
    ]
    parts: list[Part] = [
        Note(f"{summary['clusters']:,} clusters of two or more documents.")
    ]
    dropped = summary.get("dropped_by_rule")
    if dropped:
        parts.append(
            Note(
                f"`clusters: survivors` drops {dropped['survivors']:,} documents, each "
                "similar to a kept one; `clusters: connected` drops "
                f"{dropped['connected']:,}, all but one of each chain."
            )
        )
    if clusters["sizes"]:
        parts.append(
            Figure(
                clusters_picture(clusters["sizes"]),
                "Clusters by their number of documents.",
            )
        )
    parts += [
        Table(["survivor of the largest", "id", "documents"], rows, {2}),
        Heading("Near duplicates side by side, the least similar first"),
    ]
    for pair in clusters.get("beside", []):
        similarity = f"{pair['measure']} {pair['similarity']:.2f}"
        places = (
            f"{pair['dropped']['locator']}, dropped, and "
            f"{pair['kept']['locator']}, kept in its place"
        )
        parts.append(Details(f"{similarity}: {places}", [both_texts(pair)]))
    return section_of("Duplicates", parts)


def both_texts(pair: Mapping[str, Any]) -> Sides:
    """A dropped document and the kept one, with their differences marked."""
    dropped, kept = differences(pair["dropped"]["text"], pair["kept"]["text"])
    columns: list[tuple[Inline, Sequence[Part]]] = [
        (f"dropped: {pair['dropped']['locator']}", [Text(folded(dropped, "removed"))]),
        (f"kept: {pair['kept']['locator']}", [Text(folded(kept, "added"))]),
    ]
    return Sides(columns)


def folded(pieces: Sequence[Piece], mark: Mark) -> list[Span]:
    """A text with its differences marked; only both ends remain of a long passage
    without any.
    """
    spans: list[Span] = []
    for text, differs in pieces:
        if differs or len(text) <= 4 * CONTEXT:
            spans.append(Span(text, mark if differs else ""))
        else:
            hidden = f"\n[{len(text) - 2 * CONTEXT:,} characters that both have]\n"
            spans += [
                Span(text[:CONTEXT]),
                Span(hidden, "masked"),
                Span(text[-CONTEXT:]),
            ]
    return spans


def clusters_picture(sizes: Mapping[str, int]) -> str:
    """Clusters by their number of documents."""
    return pictures.stacked_bars(
        [(name, {"clusters": float(count)}) for name, count in sizes.items()],
        "clusters",
    )


def edits(facts: Facts, name: str = "clean") -> Section | None:
    """Edits of a cleaning step, by rule."""
    rows = [
        [rule, f"{tally['documents']:,}", f"{tally['times']:,}", f"{tally['bytes']:,}"]
        for rule, tally in facts["summaries"][name].get("edits", {}).items()
        if tally["times"]
    ]
    meanings = {
        "documents": "in which it changed something",
        "times": "passages that it changed",
        "bytes": "of UTF-8 that it took out",
    }
    return section_of(
        "Edits",
        Table(["rule", "documents", "times", "bytes"], rows, {1, 2, 3}, meanings),
    )


def own_code(facts: Facts, name: str) -> Section | None:
    """The user's code that a step ran, and whether its calls differed."""
    summary = facts["summaries"][name]
    notes = [Note(f"{summary[key]}.") for key in ("code", "differs") if key in summary]
    return Section(f"Code of {name}", notes) if notes else None


def domains(facts: Facts, name: str = "cluster") -> Section | None:
    """Clusters of documents about the same subject, with their names, and a map of
    them.
    """
    summary = facts["summaries"][name]
    if not summary.get("domains"):
        return None
    total = sum(domain["documents"] for domain in summary["domains"]) or 1
    rows = [
        [
            [SeriesKey(series_of(domain["domain"])), str(domain["domain"])],
            domain["name"],
            f"{domain['documents']:,}",
            f"{domain['documents'] / total:.1%}",
        ]
        for domain in summary["domains"]
    ]
    caption = (
        "Documents of the sample along the two directions in which their vectors "
        "differ most; the numbers are those of the domains."
    )
    meanings = {"share": "of the documents of the sample"}
    return section_of(
        f"Domains of {name}",
        draw_map(summary["map"], summary["domains"], caption),
        Table(["domain", "name", "documents", "share"], rows, {0, 2, 3}, meanings),
    )


def reader(facts: Facts, name: str) -> Section | None:
    """The model that scored documents, and how much of them it read."""
    counts = facts["summaries"][name].get("reader")
    if counts is None:
        return None
    row = [
        counts["model"],
        *(f"{counts[key]:,}" for key in ("documents", "windows", "tokens", "cut")),
    ]
    header = ["model", "documents", "windows", "tokens", "not read whole"]
    return section_of(f"Model of {name}", Table(header, [row], {1, 2, 3, 4}))


def repeated_lines(facts: Facts, name: str = "dedup_lines") -> Section | None:
    """Lines that repeated so often that they were cut."""
    rows = [
        [f"{row['documents']:,}", _shorten(row["text"])]
        for row in facts["summaries"][name].get("most_repeated", [])[:MOST_REASONS]
    ]
    return section_of(
        "Repeated lines",
        Table(
            ["documents", "line"], rows, {0}, {"documents": "in which the line stands"}
        ),
    )


def repeated_passages(facts: Facts, name: str = "dedup_substrings") -> Section | None:
    """Passages that repeated so often that they were cut."""
    rows = [
        [f"{row['copies']:,}", f"{row['words']:,}", _shorten(row["text"])]
        for row in facts["summaries"][name].get("largest_repeats", [])[:MOST_REASONS]
    ]
    return section_of(
        "Repeated passages", Table(["copies", "words", "begins"], rows, {0, 1})
    )


def contamination(facts: Facts, name: str = "decontaminate") -> Section | None:
    """Items of each evaluation set that documents hold, and these documents."""
    summary = facts["summaries"][name]
    sets = [
        [
            set_name,
            f"{counts['items']:,}",
            f"{counts['checked']:,}",
            f"{counts['contaminated']:,}",
            f"{counts['contaminated_share']:.2%}",
        ]
        for set_name, counts in summary.get("sets", {}).items()
    ]
    rows = [
        [
            match["set"],
            match["item"],
            _shorten(match["item_text"]),
            f"{match['contamination']:.0%}",
            f"{match['source']} {match['locator']}",
        ]
        for match in summary.get("matches", [])[:MOST_REASONS]
    ]
    meanings = {"share": "found, of all that it has"}
    return section_of(
        "Contamination of documents",
        Table(
            ["set", "items", "checked", "found", "share"], sets, {1, 2, 3, 4}, meanings
        ),
        Table(["set", "item", "its text", "of it", "document"], rows, {1, 3}),
    )


def quarantine(facts: Facts) -> Section | None:
    """Records that could not be processed, by stage, and the first records that could
    not be read.
    """
    counts = [
        [
            row["stage"],
            f"{row['quarantined']:,}",
            f"{row['quarantined'] / max(row['read'], 1):.2%}",
        ]
        for row in facts["funnel"]
        if row.get("quarantined")
    ]
    records = facts["summaries"].get(INGEST, {}).get("quarantined", [])
    rows = [
        [record["file"], record.get("record", ""), record["error"]]
        for record in records[:MOST_REASONS]
    ]
    return section_of(
        "Quarantine",
        Table(["stage", "records", "of those read"], counts, {1, 2}),
        Table(["file", "record", "error"], rows),
    )


def damaged_files(facts: Facts, name: str = INGEST) -> Section | None:
    """Files that could not be read to their end, and their lost records."""
    rows = [
        [
            file["source"],
            file["file"],
            f"{file['records']:,}",
            f"{file['lost']:,}",
            file["error"],
        ]
        for file in facts["summaries"][name].get("damaged", [])
    ]
    return section_of(
        "Files that could not be read to their end",
        Note("What they lost is estimated from their bytes and from the other files."),
        Table(["source", "file", "records read", "lost, about", "why"], rows, {2, 3}),
    )


def skipped_records(facts: Facts, name: str = INGEST) -> Section | None:
    """Records of the sources that are not documents."""
    skipped = sorted(
        facts["summaries"][name].get("skipped", {}).items(), key=lambda item: -item[1]
    )
    rows = [[kind, f"{count:,}"] for kind, count in skipped]
    return section_of(
        "No documents",
        Note("What the sources hold besides documents."),
        Table(["what", "records"], rows, {1}),
    )


def _shorten(text: str) -> str:
    return text if len(text) < 160 else f"{text[:157]}..."

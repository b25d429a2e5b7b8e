"""The report's sections about documents: what all steps did, and what each has to show besides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import shorten
from typing import Any

from gristmill.dataprep.whatif_thresholds import short_name
from gristmill.flows.report import pictures
from gristmill.flows.report.page_elements import (
    Details,
    Figure,
    Heading,
    Listing,
    Note,
    Part,
    Section,
    Sides,
    Table,
    Text,
)
from gristmill.flows.report.report_facts import Facts, eaten_sources, top_reasons
from gristmill.flows.report.text_diff import Piece, differences
from gristmill.mixtures.sources import INGEST

MOST_REASONS = 20
MOST_BARS = 12
MOST_LANGUAGES = 20
CONTEXT = 1000
"""Characters that remain at both ends of what is folded of two texts, because it is the same for four times as long."""
BEGINS = 80
"""Characters of a document by which it is known before it is opened."""


def document_sections(facts: Facts) -> list[Section | None]:
    """What is said of all steps together; None where nothing is to be said."""
    return [funnel(facts), reasons(facts), cuts(facts), whole_documents(facts), quarantine(facts)]


def funnel(facts: Facts) -> Section | None:
    """Documents, bytes and tokens that are left after each stage, as a picture and a table."""
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
    parts: list[Part] = [
        Figure(funnel_picture(facts), "Text kept after each stage."),
        Table(["stage", "read", "kept", "gone", "MB kept", "tokens kept"], rows, {1, 2, 3, 4, 5}),
    ]
    if any("tokens_kept" in row for row in facts["funnel"]):
        parts.append(Note("Tokens before the last stage are estimated from the bytes per token of each source."))
    parts += [Note(f"{sentence}.") for sentence in eaten_sources(facts["funnel"])]
    return Section("Documents", [*parts, *by_source(facts)])


def funnel_picture(facts: Facts) -> str:
    """Megabytes of text after each stage, by source."""
    bars = [(row["stage"], _per_source(row, "bytes_kept")) for row in facts["funnel"]]
    return pictures.stacked_bars(bars, "MB of text kept, by source")


def by_source(facts: Facts) -> list[Part]:
    """What is left of the documents of each source after each stage: shares as a picture, numbers as a table."""
    first, *later = facts["funnel"]
    read = {name: part["read"] for name, part in sorted(first.get("sources", {}).items()) if part.get("read")}
    if len(read) < 2:
        return []
    # What was read without a loss would be told twice.
    stages = later if first["kept"] == first["read"] else [first, *later]
    kept = {name: [row["sources"].get(name, {}).get("kept", 0) for row in stages] for name in read}
    if not stages:
        return []
    rows = [
        [
            name,
            row["stage"],
            f"{part.get('kept', 0):,}",
            f"{part.get('kept', 0) / number:.1%}",
            f"{part.get('bytes_kept', 0) / 1e6:.2f}",
            tokens_kept({**part, "tokens_exact": row["tokens_exact"]}) if "tokens_kept" in part else "",
        ]
        for name, number in read.items()
        for row in (first, *stages[first in stages :])
        for part in (row["sources"].get(name, {}),)
    ]
    shares = {name: [1.0, *(left / read[name] for left in kept[name])] for name in read}
    return [
        Heading("Each source"),
        Figure(
            pictures.steps(shares, ["read", *(row["stage"] for row in stages)], "of a source's documents"),
            "Share of each source's documents kept after each stage.",
        ),
        Table(
            ["source", "after", "kept", "left", "MB kept", "tokens kept"],
            rows,
            {2, 3, 4, 5},
            {"left": "kept after the stage, of all documents of the source that were read"},
        ),
    ]


def tokens_kept(row: Mapping[str, Any]) -> str:
    """The tokens that are left after a stage, marked where they are estimated; empty where nothing is tokenised."""
    if "tokens_kept" not in row:
        return ""
    return f"{'' if row['tokens_exact'] else '≈ '}{row['tokens_kept']:,.0f}"


def _per_source(counts: Mapping[str, Any], key: str) -> dict[str, float]:
    return {name: part.get(key, 0) / 1e6 for name, part in sorted(counts.get("sources", {}).items())}


def reasons(facts: Facts) -> Section | None:
    """Why documents were dropped: how many by each rule, and how many by it alone."""
    alone = {
        rule: tally["only"]
        for summary in facts["summaries"].values()
        for rule, tally in summary.get("rules", {}).items()
    }
    found = [
        (row["stage"], rule, count, row["read"])
        for row in facts["funnel"]
        for rule, count in top_reasons(row, MOST_REASONS)
    ]
    if not found:
        return None
    rows = [
        [stage, rule, f"{count:,}", f"{count / max(read, 1):.2%}", f"{alone[rule]:,}" if rule in alone else ""]
        for stage, rule, count, read in found
    ]
    return Section(
        "Why documents were dropped",
        [
            Figure(reasons_picture(facts), "Documents by the first rule that they failed."),
            Details(
                f"All {len(rows)} rules that dropped any",
                [Table(["stage", "rule", "documents", "of those read", "by it alone"], rows, {2, 3, 4})],
            ),
        ],
    )


def reasons_picture(facts: Facts) -> str:
    """The rules that dropped most documents."""
    found = [(count, row["stage"], rule) for row in facts["funnel"] for rule, count in top_reasons(row, MOST_BARS)]
    bars = [
        (f"{stage}: {short_name(rule)}", {"documents": float(count)})
        for count, stage, rule in sorted(found, key=lambda item: (-item[0], item[2]))[:MOST_BARS]
    ]
    return pictures.stacked_bars(bars, "documents")


def cuts(facts: Facts) -> Section | None:
    """For every rule that dropped most: where its cut lies, and the texts next to it on both sides."""
    found = [
        Details(f"{cut['rule']} = {cut['bound']:g}: {cut['dropped']:,} documents", both_sides(cut))
        for cut in facts.get("cuts", [])
    ]
    return Section("Both sides of each cut", found) if found else None


def both_sides(cut: Mapping[str, Any]) -> list[Part]:
    """A cut in the histogram of what it bounds, where that was counted, and the texts next to it."""
    parts: list[Part] = (
        [
            Figure(
                pictures.cut_histogram(cut["histogram"], cut["bound"], cut["statistic"]),
                f"The cut of {cut['key']} lies at {cut['bound']:g}.",
            )
        ]
        if cut["histogram"]
        else []
    )
    return parts + [
        Listing(
            title,
            [
                (f"{sample['value']:.4g}", f"{sample['source']} {sample['locator']}", sample["excerpt"])
                for sample in cut[side]
            ],
        )
        for side, title in (("failing", "dropped, next to the cut"), ("passing", "passed, next to the cut"))
    ]


def whole_documents(facts: Facts) -> Section | None:
    """Documents that were kept and that the rules dropped, chosen by chance, each from its first to its last word."""
    groups = facts.get("shown_documents")
    if not groups:
        return None
    parts: list[Part] = [
        Note(
            "Some of each, by chance and the same in every report of this data: a click opens one. "
            "What steps took out of a text is struck out and red, what they put in is green."
        )
    ]
    for group in groups:
        heading = "Kept" if group["step"] is None else f"Dropped by {group['step']}: {group['rule']}"
        parts.append(Heading(f"{heading} ({group['documents']:,})"))
        parts += [_whole(one) for one in group["shown"]]
    return Section("Whole documents", parts)


def _whole(one: Mapping[str, Any]) -> Details:
    shown = [(piece["text"], piece["edit"] or "") for piece in one["pieces"]]
    length = sum(len(text) for text, mark in shown if mark != "added")
    cut = (
        []
        if length >= one["characters"]
        else [
            Note(
                f"The first {length:,} of {one['characters']:,} characters; `gristmill explain MANIFEST {one['id']} "
                "--text` shows all."
            )
        ]
    )
    begins = shorten("".join(text for text, mark in shown if mark != "added")[: 8 * BEGINS], BEGINS, placeholder=" ...")
    return Details(
        f"{one['source']} {one['locator']}, {one['characters']:,} characters: {begins}",
        [*map(Note, one["said"]), Text(shown), *cut, Note(f"Its id is `{one['id']}`.")],
        long=True,
    )


def lengths(facts: Facts, name: str = "filter") -> Section | None:
    """How long the documents that the filter has read are, in words."""
    counted = facts["summaries"][name].get("histograms", {}).get("words")
    if not counted:
        return None
    return Section(
        "Lengths",
        [
            Figure(
                pictures.cut_histogram(counted, None, "words per document, from this many on"),
                "Documents that the filter has read, by their number of words.",
            )
        ],
    )


def rules_by_language(facts: Facts, name: str = "filter") -> Section | None:
    """What the rules of each language have kept, where there are any."""
    counted = facts["summaries"][name].get("by_language")
    if not counted:
        return None
    ranked = sorted(counted.items(), key=lambda item: (-item[1]["read"], item[0]))
    rows = [
        [entry, f"{of['read']:,}", f"{of['kept']:,}", f"{of['kept'] / max(of['read'], 1):.1%}"] for entry, of in ranked
    ]
    return Section("Rules by language", [Table(["rules of", "read", "kept", "share"], rows, {1, 2, 3})])


def languages(facts: Facts, name: str = "langid") -> Section | None:
    """The languages found, and how sure the model was."""
    summary = facts["summaries"][name]
    if not summary.get("languages"):
        return None
    number = len(summary["languages"])
    scores = summary.get("histograms", {}).get("language_score")
    many = f"; the {MOST_LANGUAGES} most frequent:" if number > MOST_LANGUAGES else ""
    parts: list[Part] = [
        Note(f"{number} language{'s' if number > 1 else ''}{many}"),
        Figure(languages_picture(summary), "Documents by their likeliest language."),
    ]
    if "languages_kept" in summary:
        parts.append(kept_by_language(summary))
    if scores:
        parts.append(Figure(pictures.cut_histogram(scores, None, "language score"), "Confidence of the model."))
    return Section("Languages", parts)


def kept_by_language(summary: Mapping[str, Any]) -> Table:
    """Documents of the most frequent languages, and how many of them are kept."""
    ranked = sorted(summary["languages"].items(), key=lambda item: (-item[1], item[0]))[:MOST_LANGUAGES]
    kept = {name: summary["languages_kept"].get(name, 0) for name, _ in ranked}
    rows = [[name, f"{read:,}", f"{kept[name]:,}", f"{kept[name] / read:.1%}"] for name, read in ranked]
    return Table(["language", "documents", "kept", "share"], rows, {1, 2, 3})


def languages_picture(summary: Mapping[str, Any]) -> str:
    """Documents by language, the most frequent ones."""
    counts = sorted(summary["languages"].items(), key=lambda item: (-item[1], item[0]))
    return pictures.stacked_bars(
        [(name, {"documents": float(count)}) for name, count in counts[:MOST_LANGUAGES]], "documents"
    )


def quality(facts: Facts, name: str = "quality") -> Section | None:
    """Scores per source, and how well the classifier separates held-out documents."""
    summary = facts["summaries"][name]
    if "histogram" not in summary:
        return None
    parts: list[Part] = []
    if "auc" in summary:
        alone = f"; by their length alone {summary['length_auc']:.4f}" if "length_auc" in summary else ""
        parts.append(Note(f"AUC {summary['auc']:.4f} on {summary['held_out']:,} held-out documents{alone}."))
    if "distilled" in summary:
        parts += agreement(summary["distilled"])
    if picture := quality_picture(summary):
        parts.append(Figure(picture, "Quality scores by source."))
    return Section("Quality", parts)


def agreement(found: Mapping[str, Any]) -> list[Part]:
    """How far a classifier agrees with the judge that it learnt from."""
    cut, said = found["at_cut"], found["confusion"]
    rows = [
        [f"from {row['from']:.1f}", f"{row['documents']:,}", f"{row['score']:.3f}", f"{row['good']:.1%}"]
        for row in found["calibration"]
    ]
    return [
        Note(
            f"Learnt from {found['learnt']:,} of {found['sample']:,} judged documents, {found['good']:,} of them "
            f"good. On {found['held_out']:,} held out: AUC {found['auc']:.4f}; at {cut['cut']:.3g} F1 "
            f"{cut['f1']:.3f}, precision {cut['precision']:.3f}, recall {cut['recall']:.3f}; best F1 "
            f"{found['best']['f1']:.3f} at {found['best']['cut']:.3g}."
        ),
        Table(
            ["", "classifier: good", "otherwise"],
            [
                ["judge: good", f"{said['good_kept']:,}", f"{said['good_dropped']:,}"],
                ["otherwise", f"{said['other_kept']:,}", f"{said['other_dropped']:,}"],
            ],
            {1, 2},
        ),
        Table(["score", "documents", "mean score", "good by the judge"], rows, {1, 2, 3}),
    ]


def quality_picture(summary: Mapping[str, Any]) -> str:
    """Quality scores by source; empty without any."""
    series = summary["histogram"]
    bins = len(next(iter(series.values()), []))
    return pictures.histogram(series, [index / bins for index in range(bins + 1)], "quality score") if bins else ""


def duplicates(facts: Facts, name: str = "dedup") -> Section | None:
    """How large clusters of duplicates are, and the largest of them."""
    found = facts.get("clusters", {}).get(name)
    if not found or not found["largest"]:
        return None
    rows = [[cluster["locator"], cluster["survivor"][:16], cluster["size"]] for cluster in found["largest"]]
    summary = facts["summaries"][name]
    parts: list[Part] = [Note(f"{summary['clusters']:,} clusters of two or more documents.")]
    if dropped := summary.get("dropped_by_rule"):
        parts.append(
            Note(
                f"`clusters: survivors` drops {dropped['survivors']:,} documents, each similar to a kept one;"
                f" `clusters: connected` drops {dropped['connected']:,}, all but one of each chain."
            )
        )
    if found["sizes"]:
        parts.append(Figure(clusters_picture(found["sizes"]), "Clusters by their number of documents."))
    parts.append(Table(["survivor of the largest", "id", "documents"], rows, {2}))
    beside = found.get("beside", [])
    if beside:
        parts += [
            Heading("Near duplicates side by side, the least similar first"),
            *(
                Details(
                    f"{one['measure']} {one['similarity']:.2f}: {one['dropped']['locator']}, dropped, and "
                    f"{one['kept']['locator']}, kept in its place",
                    [both_texts(one)],
                )
                for one in beside
            ),
        ]
    return Section("Duplicates", parts)


def both_texts(pair: Mapping[str, Any]) -> Sides:
    """A dropped document and the one that stays for it, with what each has that the other has not."""
    dropped, kept = differences(pair["dropped"]["text"], pair["kept"]["text"])
    return Sides(
        [
            (f"dropped: {pair['dropped']['locator']}", Text(folded(dropped, "removed"))),
            (f"kept: {pair['kept']['locator']}", Text(folded(kept, "added"))),
        ]
    )


def folded(pieces: Sequence[Piece], mark: str) -> list[tuple[str, str]]:
    """A text in pieces, of which those that differ have a mark; of what is the same for long, both ends remain."""
    found: list[tuple[str, str]] = []
    for text, differs in pieces:
        if differs or len(text) <= 4 * CONTEXT:
            found.append((text, mark if differs else ""))
        else:
            hidden = f"\n[{len(text) - 2 * CONTEXT:,} characters that both have]\n"
            found += [(text[:CONTEXT], ""), (hidden, "masked"), (text[-CONTEXT:], "")]
    return found


def clusters_picture(sizes: Mapping[str, int]) -> str:
    """Clusters by their number of documents."""
    return pictures.stacked_bars([(name, {"clusters": float(count)}) for name, count in sizes.items()], "clusters")


def edits(facts: Facts, name: str = "clean") -> Section | None:
    """What cleaning changed."""
    rows = [
        [rule, f"{done['documents']:,}", f"{done['times']:,}", f"{done['bytes']:,}"]
        for rule, done in facts["summaries"][name].get("edits", {}).items()
        if done["times"]
    ]
    return (
        Section(
            "Edits",
            [
                Table(
                    ["rule", "documents", "times", "bytes"],
                    rows,
                    {1, 2, 3},
                    {
                        "documents": "in which it changed something",
                        "times": "passages that it changed",
                        "bytes": "of UTF-8 that it took out",
                    },
                )
            ],
        )
        if rows
        else None
    )


def own_code(facts: Facts, name: str) -> Section | None:
    """Which code of the user's a step ran, and that its calls differed."""
    summary = facts["summaries"][name]
    said = [summary[key] for key in ("code", "differs") if key in summary]
    return Section(f"Code of {name}", [Note(f"{one}.") for one in said]) if said else None


def domains(facts: Facts, name: str = "cluster") -> Section | None:
    """The clusters of documents that are about the same, with their names, and where they lie to each other."""
    found = facts["summaries"][name].get("domains")
    if not found:
        return None
    total = sum(one["documents"] for one in found) or 1
    rows = [[one["domain"], one["name"], f"{one['documents']:,}", f"{one['documents'] / total:.1%}"] for one in found]
    picture = pictures.domain_map(facts["summaries"][name]["map"], found)
    return Section(
        f"Domains of {name}",
        [
            Figure(
                picture,
                "Documents of the sample along the two directions in which their vectors differ most; the "
                "numbers are those of the domains.",
            ),
            Table(
                ["domain", "name", "documents", "share"], rows, {0, 2, 3}, {"share": "of the documents of the sample"}
            ),
        ],
    )


def reader(facts: Facts, name: str) -> Section | None:
    """Which model scored documents, and how much of them it read."""
    read = facts["summaries"][name].get("reader")
    if read is None:
        return None
    rows = [[read["model"], *(f"{read[key]:,}" for key in ("documents", "windows", "tokens", "cut"))]]
    return Section(
        f"Model of {name}", [Table(["model", "documents", "windows", "tokens", "not read whole"], rows, {1, 2, 3, 4})]
    )


def repeated_lines(facts: Facts, name: str = "dedup_lines") -> Section | None:
    """Lines that repeated so often that they were cut."""
    rows = [
        [f"{row['documents']:,}", _short(row["text"])]
        for row in facts["summaries"][name].get("most_repeated", [])[:MOST_REASONS]
    ]
    return (
        Section("Repeated lines", [Table(["documents", "line"], rows, {0}, {"documents": "in which the line stands"})])
        if rows
        else None
    )


def repeated_passages(facts: Facts, name: str = "dedup_substrings") -> Section | None:
    """Passages that repeated so often that they were cut."""
    rows = [
        [f"{row['copies']:,}", f"{row['words']:,}", _short(row["text"])]
        for row in facts["summaries"][name].get("largest_repeats", [])[:MOST_REASONS]
    ]
    return Section("Repeated passages", [Table(["copies", "words", "begins"], rows, {0, 1})]) if rows else None


def contamination(facts: Facts, name: str = "decontaminate") -> Section | None:
    """How many items of each evaluation set were found, and in which documents."""
    summary = facts["summaries"][name]
    if not summary.get("sets"):
        return None
    sets = [
        [
            of,
            f"{found['items']:,}",
            f"{found['checked']:,}",
            f"{found['contaminated']:,}",
            f"{found['contaminated_share']:.2%}",
        ]
        for of, found in summary["sets"].items()
    ]
    rows = [
        [
            match["set"],
            match["item"],
            _short(match["item_text"]),
            f"{match['contamination']:.0%}",
            f"{match['source']} {match['locator']}",
        ]
        for match in summary.get("matches", [])[:MOST_REASONS]
    ]
    return Section(
        "Contamination of documents",
        [
            Table(
                ["set", "items", "checked", "found", "share"],
                sets,
                {1, 2, 3, 4},
                {"share": "found, of all that it has"},
            ),
            Table(["set", "item", "its text", "of it", "document"], rows, {1, 3}),
        ],
    )


def quarantine(facts: Facts) -> Section | None:
    """What could not be processed, by stage, and the first records that could not be read."""
    counts = [
        [row["stage"], f"{row['quarantined']:,}", f"{row['quarantined'] / max(row['read'], 1):.2%}"]
        for row in facts["funnel"]
        if row.get("quarantined")
    ]
    shown = [
        [item["file"], item.get("record", ""), item["error"]]
        for item in facts["summaries"].get(INGEST, {}).get("quarantined", [])[:MOST_REASONS]
    ]
    return (
        Section(
            "Quarantine",
            [Table(["stage", "records", "of those read"], counts, {1, 2}), Table(["file", "record", "error"], shown)],
        )
        if counts or shown
        else None
    )


def damaged_files(facts: Facts, name: str = INGEST) -> Section | None:
    """Files that could not be read to their end, and what they lost."""
    rows = [
        [file["source"], file["file"], f"{file['records']:,}", f"{file['lost']:,}", file["error"]]
        for file in facts["summaries"][name].get("damaged", [])
    ]
    return (
        Section(
            "Files that could not be read to their end",
            [
                Note("What they lost is estimated from their bytes and from the other files."),
                Table(["source", "file", "records read", "lost, about", "why"], rows, {2, 3}),
            ],
        )
        if rows
        else None
    )


def skipped_records(facts: Facts, name: str = INGEST) -> Section | None:
    """What the sources hold besides documents."""
    skipped = sorted(facts["summaries"][name].get("skipped", {}).items(), key=lambda item: -item[1])
    return (
        Section(
            "No documents",
            [
                Note("What the sources hold besides documents."),
                Table(["what", "records"], [[what, f"{count:,}"] for what, count in skipped], {1}),
            ],
        )
        if skipped
        else None
    )


def _short(value: Any) -> str:
    text = f"{value:.3g}" if isinstance(value, float) else str(value)
    return text if len(text) < 160 else f"{text[:157]}..."

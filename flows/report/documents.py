"""The report's sections about documents: the funnel, every cut with texts on both sides, languages, duplicates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gristmill.flows.facts import Facts, top_reasons
from gristmill.flows.report import pictures
from gristmill.flows.report.html import details, figure, listing, table

MOST_REASONS = 20
MOST_BARS = 12
MOST_LANGUAGES = 20


def document_sections(facts: Facts) -> list[str]:
    """All of them, empty where a stage did not run."""
    return [funnel(facts), reasons(facts), cuts(facts), lengths(facts), languages(facts), quality(facts), edits(facts),
            duplicates(facts), contamination(facts), quarantine(facts)]


def funnel(facts: Facts) -> str:
    """Documents, bytes and tokens that are left after each stage, as a picture and a table."""
    if not facts["funnel"]:
        return ""
    rows = [[row["stage"], f"{row['read']:,}", f"{row['kept']:,}", f"{row['read'] - row['kept']:,}",
             f"{row['bytes_kept'] / 1e6:.2f}", tokens_kept(row)] for row in facts["funnel"]]
    return (
        "<h2>Documents</h2>"
        + figure(funnel_picture(facts), "Text that is left after each stage.")
        + table(["stage", "read", "kept", "gone", "MB kept", "tokens kept"], rows, {1, 2, 3, 4, 5})
        + ('<p class="note">Tokens before the last stage are estimated from the bytes per token of each source.</p>'
           if any("tokens_kept" in row for row in facts["funnel"]) else "")
        + by_source(facts)
    )


def funnel_picture(facts: Facts) -> str:
    """Megabytes of text after each stage, by source."""
    bars = [(row["stage"], _per_source(row, "bytes_kept")) for row in facts["funnel"]]
    return pictures.stacked_bars(bars, "MB of text kept, by source")


def by_source(facts: Facts) -> str:
    """What is left of the documents of each source after each stage: shares as a picture, numbers as a table."""
    first, *later = facts["funnel"]
    read = {name: part["read"] for name, part in sorted(first.get("sources", {}).items()) if part.get("read")}
    if len(read) < 2:
        return ""
    # What was read without a loss would be told twice.
    stages = later if first["kept"] == first["read"] else [first, *later]
    kept = {name: [row["sources"].get(name, {}).get("kept", 0) for row in stages] for name in read}
    if not stages:
        return ""
    rows = [[name, f"{kept[name][-1] / number:.1%}", f"{number:,}", *(f"{left:,}" for left in kept[name])]
            for name, number in read.items()]
    heading = ["source", "left", "read", *(f"after {row['stage']}" for row in stages)]
    return (
        "<h3>Each source</h3>"
        + figure(pictures.steps({name: [1.0, *(left / read[name] for left in kept[name])] for name in read},
                                ["read", *(row["stage"] for row in stages)], "of a source's documents"),
                 "Share of each source's documents that is left after each stage.")
        + table(heading, rows, set(range(1, len(heading))))
    )


def tokens_kept(row: Mapping[str, Any]) -> str:
    """The tokens that are left after a stage, marked where they are estimated; empty where nothing is tokenised."""
    if "tokens_kept" not in row:
        return ""
    return f"{'' if row['tokens_exact'] else '≈ '}{row['tokens_kept']:,.0f}"


def _per_source(counts: Mapping[str, Any], key: str) -> dict[str, float]:
    return {name: part.get(key, 0) / 1e6 for name, part in sorted(counts.get("sources", {}).items())}


def reasons(facts: Facts) -> str:
    """Why documents went: how many by each rule, and how many by it alone."""
    alone = {rule: tally["only"] for summary in facts["summaries"].values()
             for rule, tally in summary.get("rules", {}).items()}
    found = [(row["stage"], rule, count, row["read"])
             for row in facts["funnel"] for rule, count in top_reasons(row, MOST_REASONS)]
    if not found:
        return ""
    rows = [[stage, rule, f"{count:,}", f"{count / max(read, 1):.2%}", f"{alone[rule]:,}" if rule in alone else ""]
            for stage, rule, count, read in found]
    return (
        "<h2>Why documents went</h2>"
        + figure(reasons_picture(facts), "Documents by the first rule that they failed.")
        + details(f"All {len(rows)} rules that dropped any", table(
            ["stage", "rule", "documents", "of those read", "by it alone"], rows, {2, 3, 4}))
    )


def reasons_picture(facts: Facts) -> str:
    """The rules that dropped most documents."""
    found = [(count, row["stage"], rule) for row in facts["funnel"] for rule, count in top_reasons(row, MOST_BARS)]
    bars = [(f"{stage}: {rule.rpartition('/')[2]}", {"documents": float(count)})
            for count, stage, rule in sorted(found, key=lambda item: (-item[0], item[2]))[:MOST_BARS]]
    return pictures.stacked_bars(bars, "documents")


def cuts(facts: Facts) -> str:
    """For every rule that dropped most: where its cut lies, and the texts next to it on both sides."""
    parts = []
    for cut in facts.get("cuts", []):
        picture = pictures.cut_histogram(cut["histogram"], cut["bound"], cut["statistic"]) if cut["histogram"] else ""
        body = (figure(picture, f"The cut of {cut['key']} lies at {cut['bound']:g}.") if picture else "")
        for side, title in (("failing", "dropped, next to the cut"), ("passing", "passed, next to the cut")):
            body += listing(title, [(f"{sample['value']:.4g}", f"{sample['source']} {sample['locator']}",
                                     sample["excerpt"]) for sample in cut[side]])
        parts.append(details(f"{cut['rule']} = {cut['bound']:g}: {cut['dropped']:,} documents", body))
    return "<h2>Both sides of each cut</h2>" + "".join(parts) if parts else ""


def lengths(facts: Facts) -> str:
    """How long the documents that the filter has read are, in words."""
    counted = facts["summaries"].get("filter", {}).get("histograms", {}).get("words")
    if not counted:
        return ""
    return "<h2>Lengths</h2>" + figure(pictures.cut_histogram(counted, None, "words per document, from this many on"),
                                       "Documents that the filter has read, by their number of words.")


def languages(facts: Facts) -> str:
    """The languages found, and how sure the model was."""
    summary = facts["summaries"].get("langid")
    if not summary or not summary.get("languages"):
        return ""
    counts = sorted(summary["languages"].items(), key=lambda item: (-item[1], item[0]))
    scores = summary.get("histograms", {}).get("language_score")
    many = f"; the {MOST_LANGUAGES} most frequent:" if len(counts) > MOST_LANGUAGES else ""
    return (
        f'<h2>Languages</h2><p class="note">{len(counts)} language{"s" if len(counts) > 1 else ""}{many}</p>'
        + figure(languages_picture(facts), "Documents by their likeliest language.")
        + (figure(pictures.cut_histogram(scores, None, "language score"), "How sure the model was.") if scores else "")
    )


def languages_picture(facts: Facts) -> str:
    """Documents by language, the most frequent ones."""
    counts = sorted(facts["summaries"]["langid"]["languages"].items(), key=lambda item: (-item[1], item[0]))
    return pictures.stacked_bars(
        [(name, {"documents": float(count)}) for name, count in counts[:MOST_LANGUAGES]], "documents")


def quality(facts: Facts) -> str:
    """Scores per source, and how well the classifier separates held-out documents."""
    summary = facts["summaries"].get("quality")
    if not summary or "histogram" not in summary:
        return ""
    picture = quality_picture(facts)
    note = f"AUC {summary['auc']:.4f} on {summary['held_out']:,} held-out documents" if "auc" in summary else ""
    if note:
        note += f"; by their length alone {summary['length_auc']:.4f}." if "length_auc" in summary else "."
    return (f'<h2>Quality</h2><p class="note">{note}</p>'
            + (figure(picture, "Quality scores by source.") if picture else ""))


def quality_picture(facts: Facts) -> str:
    """Quality scores by source; empty without any."""
    series = facts["summaries"]["quality"]["histogram"]
    bins = len(next(iter(series.values()), []))
    return pictures.histogram(series, [index / bins for index in range(bins + 1)], "quality score") if bins else ""


def duplicates(facts: Facts) -> str:
    """How large clusters of duplicates are, and the largest of them."""
    if not facts.get("clusters"):
        return ""
    rows = [[cluster["locator"], cluster["survivor"][:16], cluster["size"]] for cluster in facts["clusters"]]
    number = facts["summaries"]["dedup"]["clusters"]
    return (
        f'<h2>Duplicates</h2><p class="note">{number:,} clusters of two or more documents.</p>'
        + (figure(clusters_picture(facts), "Clusters by their number of documents.")
           if facts.get("cluster_sizes") else "")
        + table(["survivor of the largest", "id", "documents"], rows, {2})
    )


def clusters_picture(facts: Facts) -> str:
    """Clusters by their number of documents."""
    bars = [(name, {"clusters": float(count)}) for name, count in facts["cluster_sizes"].items()]
    return pictures.stacked_bars(bars, "clusters")


def edits(facts: Facts) -> str:
    """What cleaning changed, and what repeated so often that it was cut."""
    summaries = facts["summaries"]
    cleaned = [[rule, f"{done['documents']:,}", f"{done['times']:,}", f"{done['bytes']:,}"]
               for rule, done in summaries.get("clean", {}).get("edits", {}).items() if done["times"]]
    lines = [[f"{row['documents']:,}", _short(row["text"])]
             for row in summaries.get("dedup_lines", {}).get("most_repeated", [])[:MOST_REASONS]]
    passages = [[f"{row['copies']:,}", f"{row['words']:,}", _short(row["text"])]
                for row in summaries.get("dedup_substrings", {}).get("largest_repeats", [])[:MOST_REASONS]]
    return "".join((
        "<h2>Edits</h2>" + table(["rule", "documents", "times", "bytes"], cleaned, {1, 2, 3}) if cleaned else "",
        "<h2>Repeated lines</h2>" + table(["documents", "line"], lines, {0}) if lines else "",
        "<h2>Repeated passages</h2>" + table(["copies", "words", "begins"], passages, {0, 1}) if passages else "",
    ))


def contamination(facts: Facts) -> str:
    """How many items of each evaluation set were found, and in which documents."""
    summary = facts["summaries"].get("decontaminate", {})
    if not summary.get("sets"):
        return ""
    sets = [[name, f"{found['items']:,}", f"{found['checked']:,}", f"{found['contaminated']:,}",
             f"{found['contaminated_share']:.2%}"] for name, found in summary["sets"].items()]
    rows = [[match["set"], match["item"], _short(match["item_text"]), f"{match['contamination']:.0%}",
             f"{match['source']} {match['locator']}"] for match in summary.get("matches", [])[:MOST_REASONS]]
    return (
        "<h2>Evaluation text in documents</h2>"
        + table(["set", "items", "checked", "found", "share"], sets, {1, 2, 3, 4})
        + (table(["set", "item", "its text", "of it", "document"], rows, {1, 3}) if rows else "")
    )


def quarantine(facts: Facts) -> str:
    """What could not be processed, by stage, and the first records that could not be read."""
    counts = [[row["stage"], f"{row['quarantined']:,}", f"{row['quarantined'] / max(row['read'], 1):.2%}"]
              for row in facts["funnel"] if row.get("quarantined")]
    shown = [[item["file"], item.get("record", ""), item["error"]]
             for item in facts["summaries"].get("ingest", {}).get("quarantined", [])[:MOST_REASONS]]
    skipped = sorted(facts["summaries"].get("ingest", {}).get("skipped", {}).items(), key=lambda item: -item[1])
    damaged = [[file["source"], file["file"], f"{file['records']:,}", f"{file['lost']:,}", file["error"]]
               for file in facts["summaries"].get("ingest", {}).get("damaged", [])]
    parts = []
    if counts:
        parts += ["<h2>Quarantine</h2>", table(["stage", "records", "of those read"], counts, {1, 2})]
    if shown:
        parts.append(table(["file", "record", "error"], shown, set()))
    if damaged:
        parts += ["<h2>Files that could not be read to their end</h2>",
                  '<p class="note">What they lost is estimated from their bytes and from the other files.</p>',
                  table(["source", "file", "records read", "lost, about", "why"], damaged, {2, 3})]
    if skipped:
        parts += ["<h2>No documents</h2>", '<p class="note">What the sources hold besides documents.</p>',
                  table(["what", "records"], [[what, f"{count:,}"] for what, count in skipped], {1})]
    return "".join(parts)


def _short(value: Any) -> str:
    text = f"{value:.3g}" if isinstance(value, float) else str(value)
    return text if len(text) < 160 else f"{text[:157]}..."


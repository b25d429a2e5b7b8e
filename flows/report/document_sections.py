"""The report's sections about documents: of all steps together, and of each step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter, itemgetter

from gristmill.dataprep.conservation import ranked, top_reasons
from gristmill.dataprep.quality.separation import DistilledAgreement
from gristmill.dataprep.whatif_thresholds import short_name
from gristmill.flows.pages import pictures
from gristmill.flows.pages.page_elements import (
    ByName,
    Details,
    Entry,
    Figure,
    Heading,
    Link,
    Listing,
    MaybeSection,
    Note,
    Part,
    Section,
    Span,
    Table,
    flatten,
    section_of,
    table,
)
from gristmill.flows.questions.threshold_samples import CutSample
from gristmill.flows.report.facts import Facts
from gristmill.flows.report.stage_summaries import (
    Binned,
    Counts,
    Leaks,
    Row,
    StageCounts,
    StepSummary,
)
from gristmill.mixtures.schema.sources import INGEST

MOST_REASONS = 20
MOST_BARS = 12
MOST_LANGUAGES = 20


def document_sections(facts: Facts) -> list[MaybeSection]:
    """The sections about all steps together; None for those without content."""
    return [section(facts) for section in (funnel, losses, reasons, cuts, quarantine)]


def funnel(facts: Facts) -> MaybeSection:
    """Documents, bytes and tokens after each stage, as a picture and a table."""
    if not facts.funnel:
        return None
    rows = [
        [
            row.stage,
            row.read,
            row.kept,
            row.read - row.kept,
            row.bytes_kept / 1e6,
            tokens_kept(row, row),
        ]
        for row in facts.funnel
    ]
    columns = {"read": ",", "kept": ",", "removed": ",", "MB kept": ".2f"}
    bars = [
        (
            row.stage,
            {name: row.sources[name].bytes_kept / 1e6 for name in sorted(row.sources)},
        )
        for row in facts.funnel
    ]
    picture = pictures.stacked_bars(bars, "MB of text kept, by source")
    estimate = (
        "Tokens before the last stage are estimated from the bytes per token of each "
        "source."
    )
    commands = (
        "`gristmill browse MANIFEST` shows whole documents, kept and dropped, with the "
        "edits of every step; `gristmill explain MANIFEST ID --text` prints one."
    )
    return section_of(
        "Documents",
        Figure(picture, "Text kept after each stage."),
        table({"stage": "", **columns, "tokens kept": ">"}, rows),
        None if facts.funnel[0].tokens_kept is None else estimate,
        by_source(facts),
        commands,
    )


def by_source(facts: Facts) -> list[Part]:
    """Documents of each source after each stage: shares as a picture, numbers as a
    table; empty for a single source, or a single stage.
    """
    first = facts.funnel[0]
    names = sorted(name for name, counts in first.sources.items() if counts.read)
    if len(names) < 2 or len(facts.funnel) < 2:
        return []
    rows: list[Sequence[object]] = []
    shares = {name: [1.0] for name in names}
    for name in names:
        for row in facts.funnel:
            counts = row.sources.get(name, Counts())
            share = counts.kept / first.sources[name].read
            size, tokens = counts.bytes_kept / 1e6, tokens_kept(counts, row)
            rows.append([name, row.stage, counts.kept, share, size, tokens])
            shares[name].append(share)
    columns = {"kept": ",", "share kept": ".1%", "MB kept": ".2f", "tokens kept": ">"}
    meaning = "kept after the stage, of all documents of the source that were read"
    stages = ["read", *(row.stage for row in facts.funnel)]
    return [
        Heading("Each source"),
        Figure(
            pictures.steps(shares, stages, "of a source's documents"),
            "Share of each source's documents kept after each stage.",
        ),
        table({"source": "", "after": "", **columns}, rows, {"share kept": meaning}),
    ]


def tokens_kept(counts: Counts, row: StageCounts) -> str:
    """The tokens after the stage of a row, marked if they are estimated; empty without
    a tokenizer.
    """
    if counts.tokens_kept is None:
        return ""
    return f"{'' if row.tokens_exact else '≈ '}{counts.tokens_kept:,.0f}"


def losses(facts: Facts) -> MaybeSection:
    """Sources, domains and languages that lost most of their documents."""
    report = facts.losses
    examples = [
        Entry(group.describe(), "\n".join(group.examples)) for group in report.vanished
    ]
    return section_of(
        "Losses by source, domain and language",
        Note(report.verdict(), "warning" if report.vanished else "note"),
        report.tables(),
        Details("Examples of what they lost", [Listing("dropped documents", examples)])
        if examples
        else None,
        [f"{step}: {sentence}." for step, sentence in report.duplicates.items()],
    )


def reasons(facts: Facts) -> MaybeSection:
    """Documents that each rule dropped, and those that no other rule drops."""
    rows = []
    counts = {}
    for row in facts.funnel:
        tallies = facts.step(row.stage).rules
        for rule, count in top_reasons(row.dropped, row.quarantined, MOST_REASONS):
            alone = tallies[rule]["only"] if rule in tallies else None
            rows.append([row.stage, rule, count, count / max(row.read, 1), alone])
            counts[f"{row.stage}: {short_name(rule)}"] = count
    if not rows:
        return None
    columns = {"documents": ",", "of those read": ".2%", "by it alone": ","}
    rules = table({"stage": "", "rule": "", **columns}, rows)
    picture = count_bars(ranked(counts)[:MOST_BARS], "documents")
    return section_of(
        "Why documents were dropped",
        Figure(picture, "Documents by the first rule that they failed."),
        Details(f"All {len(rows)} rules that dropped any", [rules]),
    )


def count_bars(counts: Iterable[tuple[str, int]], label: str) -> str:
    """A bar for each name, as long as its count."""
    bars = [(name, {label: float(count)}) for name, count in counts]
    return pictures.stacked_bars(bars, label)


def cuts(facts: Facts) -> MaybeSection:
    """The cut of every rule that dropped most among the measured values, and the texts
    next to it on both sides.
    """
    details = []
    for cut in facts.cuts:
        title = f"{cut.rule} = {cut.bound:g}: {cut.dropped:,} dropped"
        caption = (
            f"Documents by {cut.statistic}. The cut of {cut.key} lies at {cut.bound:g}."
        )
        sides = [
            Listing(f"{side}, next to the cut", [*map(cut_sample, samples)])
            for side, samples in (("dropped", cut.failing), ("passed", cut.passing))
        ]
        picture = cut.histogram and histogram(
            cut.histogram, cut.statistic, caption, cut.bound
        )
        details.append(Details(title, flatten([picture, sides])))
    return section_of("Both sides of each cut", details)


def cut_sample(sample: CutSample) -> Entry:
    """A document next to a cut, with its value."""
    value = Span(f"{sample.value:.4g}", "strong")
    return Entry([value, f" {sample.source} {sample.locator}"], sample.excerpt)


def lengths(facts: Facts, name: str = "filter") -> MaybeSection:
    """Number of words of the documents that the filter read."""
    caption = "Documents that the filter has read, by their number of words."
    values = facts.step(name).histograms.get("words")
    return section_of("Lengths", values and histogram(values, "words", caption))


def histogram(
    values: Binned, column: str, caption: str, cut: float | None = None
) -> Figure:
    """Documents by a measured column, with a line at the cut."""
    svg = pictures.binned_counts(values.edges, values.counts, column, cut)
    return Figure(svg, caption)


def rules_by_language(facts: Facts, name: str = "filter") -> MaybeSection:
    """Documents that the rules of each language kept."""
    by_language = facts.step(name).by_language
    read = {language: row.read for language, row in by_language.items()}
    kept = {language: row.kept for language, row in by_language.items()}
    return section_of("Rules by language", kept_table("rules of", read, kept))


def kept_table(title: str, read: ByName[int], kept: ByName[int]) -> Table:
    """Documents by name, and those that were kept, the most frequent first."""
    rows = [
        [name, number, kept.get(name, 0), kept.get(name, 0) / max(number, 1)]
        for name, number in ranked(read)
    ]
    return table({title: "", "documents": ",", "kept": ",", "share": ".1%"}, rows)


def languages(facts: Facts, name: str = "langid") -> MaybeSection:
    """The languages of documents, and the confidence of the model."""
    summary = facts.step(name)
    number = len(summary.languages)
    if not number:
        return None
    suffix = f"; the {MOST_LANGUAGES} most frequent:" if number > MOST_LANGUAGES else ""
    most = ranked(summary.languages)[:MOST_LANGUAGES]
    kept = summary.languages_kept
    scores = summary.histograms.get("language_score")
    return section_of(
        "Languages",
        f"{number} language{'s' if number > 1 else ''}{suffix}",
        Figure(count_bars(most, "documents"), "Documents by their likeliest language."),
        None if kept is None else kept_table("language", dict(most), kept),
        scores and histogram(scores, "language_score", "Confidence of the model."),
    )


def licences(facts: Facts, name: str = "licences") -> MaybeSection:
    """Documents by licence, kept and dropped."""
    summary = facts.step(name)
    licence_table = kept_table("licence", summary.licences, summary.licences_kept)
    return section_of("Licences", licence_table)


def quality(facts: Facts, name: str = "quality") -> MaybeSection:
    """Scores by source, and how well the classifier separates held-out documents."""
    summary = facts.step(name)
    if not summary.histogram:
        return None
    auc = ""
    if summary.auc is not None:
        auc = f"AUC {summary.auc:.4f} on {summary.held_out:,} held-out documents"
        if summary.length_auc is not None:
            auc += f"; by their length alone {summary.length_auc:.4f}"
        auc += "."
    bins = len(next(iter(summary.histogram.values())))
    edges = [index / bins for index in range(bins + 1)]
    picture = pictures.histogram(summary.histogram, edges, "quality score")
    return section_of(
        "Quality",
        auc,
        None if summary.distilled is None else agreement(summary.distilled),
        Figure(picture, "Quality scores by source."),
    )


def agreement(distilled: DistilledAgreement) -> list[Part]:
    """Agreement of a classifier with the judge that it learnt from."""
    counts = distilled["confusion"]
    note = Note(
        "Learnt from {learnt:,} of {sample:,} judged documents, {good:,} of them good. "
        "On {held_out:,} held out: AUC {auc:.4f}; at {at_cut[cut]:.3g} F1 "
        "{at_cut[f1]:.3f}, precision {at_cut[precision]:.3f}, recall "
        "{at_cut[recall]:.3f}; best F1 {best[f1]:.3f} at {best[cut]:.3g}.".format(
            **distilled
        )
    )
    confusion = [
        ["judge: good", counts["good_kept"], counts["good_dropped"]],
        ["otherwise", counts["other_kept"], counts["other_dropped"]],
    ]
    columns = {"documents": ",", "mean score": ".3f", "good by the judge": ".1%"}
    calibration = [
        [f"from {row['from']:.1f}", row["documents"], row["score"], row["good"]]
        for row in distilled["calibration"]
    ]
    return [
        note,
        table({"": "", "classifier: good": ",", "otherwise": ","}, confusion),
        table({"score": "", **columns}, calibration),
    ]


def duplicates(facts: Facts, name: str = "dedup") -> MaybeSection:
    """Sizes of clusters of duplicates, and the largest clusters."""
    summary = facts.step(name)
    rows = [
        [
            cluster.get("locator"),
            cluster["survivor"][:16],
            cluster["size"],
            cluster.get("kind"),
        ]
        for cluster in summary.largest_clusters
    ]
    by_rule = (
        "`clusters: survivors` drops {survivors:,} documents, each similar to a kept "
        "one; `clusters: connected` drops {connected:,}, all but one of each chain."
    )
    dropped = summary.dropped_by_rule
    columns = {"survivor of the largest": "", "id": "", "documents": "d", "kind": ""}
    sizes = [(size, number) for size, number in summary.cluster_sizes.items() if number]
    return section_of(
        "Duplicates",
        f"{summary.clusters:,} clusters of two or more documents.",
        by_rule.format(**dropped) if dropped else None,
        Figure(count_bars(sizes, "clusters"), "Clusters by their number of documents.")
        if sizes
        else None,
        table(columns, rows),
        "`gristmill browse MANIFEST` shows the documents of a cluster side by side.",
    )


def edits(facts: Facts, name: str = "clean") -> MaybeSection:
    """Edits of a cleaning step, by rule."""
    meanings = {
        "documents": "in which it changed something",
        "times": "passages that it changed",
        "bytes": "of UTF-8 that it took out",
    }
    rows = [
        [rule, *itemgetter(*meanings)(tally)]
        for rule, tally in facts.step(name).edits.items()
        if tally["times"]
    ]
    columns = {"rule": "", **dict.fromkeys(meanings, ",")}
    return section_of("Edits", table(columns, rows, meanings))


def personal_data(facts: Facts, name: str = "clean") -> MaybeSection:
    """Masked values of a cleaning step by source and kind, with examples."""
    found = facts.step(name).personal_data
    columns = {"source": "", "kind": "", "documents": ",", "values": ","}
    parts = itemgetter("before", "value", "after", "id")
    examples = [
        [row["source"], row["kind"], *parts(example)]
        for row in found
        for example in row["examples"]
    ]
    example_columns = ("source", "kind", "before", "value", "after", "document")
    return section_of(
        "Personal data",
        table(columns, map(itemgetter(*columns), found)),
        Heading("Examples, to find false alarms"),
        table({**dict.fromkeys(example_columns, ""), "before": ">"}, examples),
    )


def own_code(facts: Facts, name: str) -> MaybeSection:
    """The user's code that a step ran, and whether its calls differed."""
    summary = facts.step(name)
    notes = [Note(f"{text}.") for text in (summary.code, summary.differs) if text]
    return Section(f"Code of {name}", notes) if notes else None


def domains(facts: Facts, name: str = "cluster") -> MaybeSection:
    """Clusters of documents about the same subject, with their names, and a map of
    them.
    """
    summary = facts.step(name)
    if not summary.domains:
        return None
    caption = (
        "Documents of the sample along the two directions in which their vectors "
        "differ most; the numbers are those of the domains."
    )
    labels = [
        (domain.x, domain.y, str(domain.domain))
        for domain in summary.domains
        if domain.documents
    ]
    return section_of(
        f"Domains of {name}",
        Figure(pictures.dot_map(summary.map, labels), caption),
        domain_table(summary, "of the documents of the sample"),
    )


def domain_table(
    summary: StepSummary, share: str, link: Callable[[int], str] | None = None
) -> Table:
    """The domains of a step.

    Args:
        summary: of the step.
        share: meaning of the column `share`.
        link: address for a domain.
    """
    total = sum(domain.documents for domain in summary.domains) or 1
    rows = [
        [
            str(domain.domain),
            Link(domain.name, link(domain.domain)) if link else domain.name,
            domain.documents,
            domain.documents / total,
        ]
        for domain in summary.domains
    ]
    columns = {"domain": ">", "name": "", "documents": ",", "share": ".1%"}
    return table(columns, rows, {"share": share})


def reader(facts: Facts, name: str) -> MaybeSection:
    """The model that scored documents, and how much of them it read."""
    tally = facts.step(name).reader
    columns = ("documents", "windows", "tokens", "not read whole")
    rows = [] if tally is None else [vars(tally).values()]
    return section_of(
        f"Model of {name}", table({"model": "", **dict.fromkeys(columns, ",")}, rows)
    )


def opt_outs(facts: Facts, name: str = "opt_outs") -> MaybeSection:
    """Documents with each kind of reservation."""
    summary = facts.step(name)
    texts = [f"{kind} {number:,}" for kind, number in summary.with_site_text.items()]
    return section_of(
        f"Opt-outs of {name}",
        f"{summary.addressed:,} of {summary.counts.read:,} documents have an address; "
        f"with texts of their sites: {', '.join(texts)}.",
        opt_out_table(summary),
    )


def opt_out_table(summary: StepSummary) -> Table:
    """Documents with each kind of reservation, and those that it dropped."""
    rows = [
        [rule, number, summary.counts.dropped.get(rule, 0)]
        for rule, number in summary.reserved.items()
    ]
    meanings = {"dropped": "by this rule, the first of those that apply"}
    return table({"reservation": "", "documents": ",", "dropped": ","}, rows, meanings)


def repeated_lines(facts: Facts, name: str = "dedup_lines") -> MaybeSection:
    """Lines that repeated so often that they were cut."""
    rows = [
        [row.documents, _shorten(row.text)]
        for row in facts.step(name).most_repeated[:MOST_REASONS]
    ]
    columns = {"documents": ",", "line": ""}
    meanings = {"documents": "in which the line stands"}
    return section_of("Repeated lines", table(columns, rows, meanings))


def repeated_passages(facts: Facts, name: str = "dedup_substrings") -> MaybeSection:
    """Passages that repeated so often that they were cut."""
    rows = [
        [row["copies"], row["words"], _shorten(row["text"])]
        for row in facts.step(name).largest_repeats[:MOST_REASONS]
    ]
    columns = {"copies": ",", "words": ",", "begins": ""}
    return section_of("Repeated passages", table(columns, rows))


def contamination(facts: Facts, name: str = "decontaminate") -> MaybeSection:
    """Items of each evaluation set that documents hold, and these documents."""
    summary = facts.summary(name, Leaks)
    sets = [[name_, *vars(row).values()] for name_, row in summary.sets.items()]
    columns = {"items": ",", "checked": ",", "found": ",", "share": ".2%"}
    meanings = {"share": "found, of all that it has"}
    return section_of(
        "Contamination of documents",
        table({"set": "", **columns}, sets, meanings),
        leaked_items(summary.matches[:MOST_REASONS], "set", "document"),
    )


def leaked_items(items: Sequence[Row], set_column: str, holder: str) -> Table:
    """Items of evaluation sets, each with the text that holds it.

    Args:
        items: in their order.
        set_column, holder: names of the columns of the set and of the text.
    """
    rows = [
        [
            item["set"],
            str(item["item"]),
            _shorten(str(item["item_text"])),
            item["contamination"],
            f"{item['source']} {item['locator']}",
        ]
        for item in items
    ]
    columns = {"item": ">", "its text": "", "of it": ".0%"}
    return table({set_column: "", **columns, holder: ""}, rows)


def quarantine(facts: Facts) -> MaybeSection:
    """Records that could not be processed, by stage, and the first records that could
    not be read.
    """
    counts = [
        [row.stage, row.quarantined, row.quarantined / max(row.read, 1)]
        for row in facts.funnel
        if row.quarantined
    ]
    columns = {"file": "", "record": "", "error": ""}
    records = facts.step(INGEST).quarantined[:MOST_REASONS]
    return section_of(
        "Quarantine",
        table({"stage": "", "records": ",", "of those read": ".2%"}, counts),
        table(columns, map(itemgetter(*columns), records)),
    )


def damaged_files(facts: Facts, name: str) -> MaybeSection:
    """Files that could not be read to their end, and their lost records."""
    columns = {"source": "", "file": "", "records": ",", "lost": ",", "error": ""}
    damaged = map(attrgetter(*columns), facts.step(name).damaged)
    return section_of(
        "Files that could not be read to their end",
        table(columns, damaged, {"records": "read before the damage"}),
    )


def skipped_records(facts: Facts, name: str) -> MaybeSection:
    """Records of the sources that are not documents."""
    return section_of(
        "No documents",
        "What the sources hold besides documents.",
        table({"what": "", "records": ","}, ranked(facts.step(name).skipped)),
    )


def _shorten(text: str) -> str:
    return text if len(text) < 160 else f"{text[:157]}..."

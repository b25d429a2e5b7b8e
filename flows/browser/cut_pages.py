"""The pages of cuts: rules that bound a measured value, and the documents next to each
bound on both sides.
"""

from __future__ import annotations

from bisect import bisect_right

from gristmill.dataprep.documents import shard_names
from gristmill.dataprep.whatif_thresholds import Rule
from gristmill.flows.browser.browsed_run import BrowsedRun, Inputs, NotThereError
from gristmill.flows.pages.addresses import DOCUMENTS, Name, Search, address
from gristmill.flows.pages.document_elements import listing_of
from gristmill.flows.pages.page_elements import (
    Link,
    Note,
    Page,
    ShareBar,
    Sides,
    Span,
    page_of,
    table,
    value_text,
)
from gristmill.flows.questions.threshold_samples import (
    MOST_SHARDS,
    nearest_samples,
    stored_rules,
)
from gristmill.mixtures.loader import short_key
from gristmill.mixtures.schema.sources import INGEST

SAMPLES = 8


def rules_of_run(run: BrowsedRun) -> dict[str, tuple[str, Rule, list[Rule]]]:
    """Key of a rule -> its step, the rule, and all rules of that step; empty before
    documents are read.
    """
    corpus = run.corpora().get(DOCUMENTS)
    if corpus is None:
        return {}
    by_step = run.cached("rules", lambda: stored_rules(run.session, corpus))
    return {
        rule.key: (step, rule, rules)
        for step, rules in by_step.items()
        for rule in rules
    }


def link_of_cut(run: BrowsedRun, step: str, reason: str | None) -> str:
    """The page of the rule that a reason names; empty if it bounds no value."""
    for key, (step_of_rule, rule, _) in rules_of_run(run).items():
        if (step_of_rule, rule.name) == (step, reason):
            return address("cuts", key)
    return ""


def cuts_page(run: BrowsedRun) -> Page:
    """All rules of all steps, with the number of documents that each dropped."""
    run.corpus(DOCUMENTS)
    rows = []
    for key, (step, rule, _) in rules_of_run(run).items():
        dropped, alone = _dropped(run, step, rule)
        listed = Link("list", Search(step=step, reason=rule.name).link())
        link = Link(rule.name, address("cuts", key))
        bound = value_text(rule.bound)
        rows.append([step, link, bound, dropped, alone, listed if dropped else None])
    note = (
        "Rules that bound a measured value. Each leads to the documents next to its "
        "bound, dropped and passed."
    )
    columns = {"step": "", "rule": "", "bound": ">", "dropped": ",", "by it alone": ","}
    meanings = {
        "dropped": "documents for which this is the first rule that they failed"
    }
    nothing = Note("No step that bounds a value is committed yet.", "plain")
    rules = table({**columns, "": ""}, rows, meanings)
    return page_of("Cuts", note, rules if rows else nothing)


def _dropped(run: BrowsedRun, step: str, rule: Rule) -> tuple[int, int | None]:
    """Documents that a rule dropped, and those that no other one would drop."""
    tallies = run.step(step).rules
    alone = tallies[rule.name]["only"] if rule.name in tallies else None
    return rule.dropped(run.summaries()[step]), alone


def cut_page(run: BrowsedRun, key: Name) -> Page:
    """A rule: the place of its bound among the measured values, and the nearest
    documents on both sides.
    """
    rules = rules_of_run(run)
    if key not in rules:
        raise NotThereError(f"there is no rule {key!r}; rules are", rules)
    step, rule, rules_of_step = rules[key]
    corpus, summary = run.corpus(DOCUMENTS), run.step(step)
    all_dropped = Search(step=step, reason=rule.name).link()
    is_numeric = isinstance(rule.bound, int | float)
    comparison = "differs from"
    if is_numeric:
        comparison = "is more than" if rule.side == "max" else "is less than"
    dropped, alone = _dropped(run, step, rule)
    sentence = Note(
        [
            f"{step} drops a document whose ",
            Span(rule.statistic, "code"),
            f" {comparison} ",
            Span(value_text(rule.bound), "strong"),
            ". It has dropped ",
            Link(f"{dropped:,}", all_dropped),
            f" of {summary.counts.read:,}",
            "." if alone is None else f", {alone:,} of them by this rule alone.",
        ],
        "plain",
    )
    if not is_numeric:
        text = "This bound is not a number, so that nothing lies next to it: "
        link = Link("all that it dropped", all_dropped)
        return page_of(rule.name, sentence, Note([text, link, "."], "plain"))
    histogram = None
    values = summary.histograms.get(rule.statistic)
    if values is not None:
        # From the first to the last bin that has any document or holds the bound.
        bins = [bin_ for bin_, count in enumerate(values.counts) if count]
        bins.append(bisect_right(values.edges, rule.bound))
        most = max(*values.counts, 1)
        rows = [
            [None if low is None else f"{low:,g}", count, ShareBar(count / most)]
            for low, count in zip([None, *values.edges], values.counts, strict=True)
        ]
        rows = rows[min(bins) : max(bins) + 1]
        histogram = table({"from": ">", "documents": ",", "": ""}, rows)
    is_sampled = len(shard_names(corpus[INGEST])) > MOST_SHARDS
    sampled = f"Looked for in {MOST_SHARDS} shards, spread over the corpus."
    command = run.session.command("whatif", "--set", f"{short_key(key)}=VALUE")
    return page_of(
        rule.name,
        sentence,
        histogram,
        sampled if is_sampled else None,
        run.cached(("cut", key), lambda: _nearest(corpus, step, rule, rules_of_step)),
        f"What another bound would keep: `{command}`",
    )


def _nearest(corpus: Inputs, step: str, rule: Rule, rules_of_step: list[Rule]) -> Sides:
    """The documents next to a bound: dropped ones, and those that it let through, which
    other rules may have dropped.
    """
    rules = {step: rules_of_step}
    samples = nearest_samples(corpus, rules, [rule.label], SAMPLES)[rule.label]
    sides = {"Dropped": samples.failing, "Passed this rule": samples.passing}
    return Sides(
        [
            (
                f"{title}, nearest first",
                [listing_of([sample.entry() for sample in side], "None.")],
            )
            for title, side in sides.items()
        ]
    )

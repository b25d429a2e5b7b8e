"""The pages of cuts: rules that bound a measured value, and the documents next to each
bound on both sides.
"""

from __future__ import annotations

from collections.abc import Sequence

from gristmill.dataprep.documents import shard_names
from gristmill.dataprep.row_groups import read_annotation_rows, read_document_rows
from gristmill.dataprep.whatif_thresholds import Rule, judge_shard, nearest
from gristmill.flows.browse.addresses import (
    CUTS_PAGE,
    DOCUMENTS,
    NoQuery,
    OneCut,
    Search,
    address,
)
from gristmill.flows.browse.browse_elements import id_span, value_text
from gristmill.flows.browse.browsed_run import BrowsedRun, Inputs, NotThereError
from gristmill.flows.pages.histogram import draw_histogram
from gristmill.flows.pages.page_elements import (
    Entry,
    Inline,
    Link,
    Listing,
    Note,
    Page,
    Part,
    Sides,
    Span,
    Table,
)
from gristmill.flows.questions.threshold_samples import (
    Found,
    merge_nearest,
    stored_rules,
)
from gristmill.mixtures.load import short_key
from gristmill.mixtures.sources import INGEST

SAMPLES = 8
MOST_SHARDS = 50
"""Shards, spread evenly over the corpus, that are searched for samples."""
EXCERPT_CHARS = 500


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
        if step_of_rule == step and rule.name == reason:
            return address(CUTS_PAGE, key)
    return ""


def cuts_page(run: BrowsedRun, query: NoQuery) -> Page:
    """All rules of all steps, with the number of documents that each dropped."""
    run.corpus(DOCUMENTS)
    rows: list[list[Inline]] = []
    for key, (step, rule, _) in rules_of_run(run).items():
        dropped = rule.dropped(run.summary(step))
        listed = (
            Link("list", Search(step=step, reason=rule.name).link()) if dropped else ""
        )
        alone = value_text(_dropped_alone(run, step, rule))
        rows.append(
            [
                step,
                Link(rule.name, address(CUTS_PAGE, key)),
                value_text(rule.bound),
                f"{dropped:,}",
                alone,
                listed,
            ]
        )
    note = Note(
        "Rules that bound a measured value. Each leads to the documents next "
        "to its bound, dropped and passed."
    )
    if not rows:
        return Page(
            "Cuts",
            parts=[
                note,
                Note("No step that bounds a value is committed yet.", "plain"),
            ],
        )
    meanings = {
        "dropped": "documents for which this is the first rule that they failed"
    }
    return Page(
        "Cuts",
        parts=[
            note,
            Table(
                ["step", "rule", "bound", "dropped", "by it alone", ""],
                rows,
                {2, 3, 4},
                meanings,
            ),
        ],
    )


def _dropped_alone(run: BrowsedRun, step: str, rule: Rule) -> int | None:
    count: int | None = (
        run.summary(step).get("rules", {}).get(rule.name, {}).get("only")
    )
    return count


def cut_page(run: BrowsedRun, query: OneCut) -> Page:
    """A rule: the place of its bound among the measured values, and the nearest
    documents on both sides.
    """
    rules = rules_of_run(run)
    if query.key not in rules:
        raise NotThereError(
            f"there is no rule {query.key!r}; rules are "
            f"{', '.join(rules) or 'not known yet'}"
        )
    step, rule, rules_of_step = rules[query.key]
    corpus, summary = run.corpus(DOCUMENTS), run.summary(step)
    all_dropped = Search(step=step, reason=rule.name).link()
    is_numeric = isinstance(rule.bound, int | float)
    bound: list[Inline] = [" is not what is asked for: ", value_text(rule.bound)]
    if is_numeric:
        bound = [
            f" is {'more' if rule.side == 'max' else 'less'} than ",
            Span(value_text(rule.bound), "strong"),
        ]
    sentence: list[Inline] = [
        f"{step} drops a document whose ",
        Span(rule.statistic, "code"),
        *bound,
        ". It has dropped ",
    ]
    sentence += [
        Link(f"{rule.dropped(summary):,}", all_dropped),
        f" of {summary['counts']['read']:,}",
    ]
    alone = _dropped_alone(run, step, rule)
    sentence.append(
        "." if alone is None else f", {alone:,} of them by this rule alone."
    )
    parts: list[Part] = [Note(sentence, "plain")]
    if not is_numeric:
        text = "This bound is not a number, so that nothing lies next to it: "
        return Page(
            rule.name,
            parts=[
                *parts,
                Note([text, Link("all that it dropped", all_dropped), "."], "plain"),
            ],
        )
    counted = summary.get("histograms", {}).get(rule.statistic)
    if counted:
        columns = run.columns(DOCUMENTS).measured
        column = next(
            (
                name
                for name, place in columns.items()
                if place == (step, rule.statistic)
            ),
            "",
        )

        def documents_of(low: float | None, high: float | None) -> str:
            # A range of the form has both ends; a bar does not have its upper one.
            bounds = [f'"{column}" >= {low!r}'] if low is not None else []
            bounds += [f'"{column}" < {high!r}'] if high is not None else []
            return Search(where=" AND ".join(bounds)).link()

        caption = (
            f"Documents by {rule.statistic}; the line is the cut. A bar leads "
            "to its documents."
        )
        parts.append(
            draw_histogram(
                counted["edges"], counted["counts"], rule.bound, caption, documents_of
            )
        )
    if len(shard_names(corpus[INGEST])) > MOST_SHARDS:
        parts.append(
            Note(f"Looked for in {MOST_SHARDS} shards, spread over the corpus.")
        )
    parts.append(
        run.cached(
            ("cut", rule.key), lambda: _nearest(corpus, step, rule, rules_of_step)
        )
    )
    command = run.session.command("whatif", "--set", f"{short_key(rule.key)}=VALUE")
    return Page(
        rule.name, parts=[*parts, Note(f"What another bound would keep: `{command}`")]
    )


def _nearest(
    corpus: Inputs, step: str, rule: Rule, rules_of_step: Sequence[Rule]
) -> Sides:
    """The documents next to a bound: dropped ones, and those that it let through."""
    sides: dict[str, list[Found]] = {"failing": [], "passing": []}
    shards = shard_names(corpus[INGEST])
    for shard in shards[:: max(1, -(-len(shards) // MOST_SHARDS))]:
        verdicts, _ = judge_shard(
            corpus, shard, step, list(rules_of_step), list(rules_of_step)
        )
        merge_nearest(sides, shard, nearest(verdicts, rule, SAMPLES), SAMPLES)
    columns: list[tuple[Inline, Sequence[Part]]] = []
    for title, side in (
        ("Dropped, nearest first", "failing"),
        ("Passed, nearest first", "passing"),
    ):
        entries = [
            _sample(corpus, step, shard, row, value, side)
            for _, shard, row, value in sides[side]
        ]
        columns.append(
            (title, [Listing("", entries) if entries else Note("None.", "plain")])
        )
    return Sides(columns)


def _sample(
    corpus: Inputs, step: str, shard: str, row: int, value: float, side: str
) -> Entry:
    """A document next to a bound, with the verdict of the whole step."""
    table = read_document_rows(
        corpus, shard, [row], ["id", "source", "locator", "text"]
    )
    judged = read_annotation_rows(
        corpus, shard, step, [row], table["id"], ["keep", "reason"]
    ).to_pylist()[0]
    document = table.to_pylist()[0]
    id_ = document["id"].hex()
    note: list[Inline] = [document["source"], " · ", id_span(id_)]
    if side == "passing" and not judged["keep"]:
        note.append(f" · dropped by {judged['reason']}")
    text = document["text"]
    excerpt = text[:EXCERPT_CHARS] + ("..." if len(text) > EXCERPT_CHARS else "")
    title: list[Inline] = [
        Span(value_text(value), "strong"),
        " ",
        Link(document["locator"], address(DOCUMENTS, id_)),
    ]
    return Entry(title, [Span(excerpt)], note)

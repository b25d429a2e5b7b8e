"""The pages of cuts: the rules that bound a measured value, and what lies next to each bound on both sides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gristmill.dataprep.documents import shard_names
from gristmill.dataprep.row_groups import read_annotation_rows, read_document_rows
from gristmill.dataprep.whatif_thresholds import Rule, judge_shard, nearest
from gristmill.flows.browse.addresses import DOCUMENTS, OneCut, Search, address
from gristmill.flows.browse.browsed_run import BrowsedRun, Inputs, NotThereError
from gristmill.flows.questions.threshold_samples import Found, merge_nearest, stored_rules
from gristmill.flows.report.pictures import place_on_bins
from gristmill.mixtures.load import short_key
from gristmill.mixtures.sources import INGEST

CUTS_PAGE = "cuts"
SAMPLES = 8
MOST_SHARDS = 50
"""So many shards, spread evenly, are looked at."""
EXCERPT_CHARS = 500


def rules_of_run(run: BrowsedRun) -> dict[str, tuple[str, Rule, list[Rule]]]:
    """Key of a rule -> its step, the rule, and all rules of that step; none before documents are read."""
    corpus = run.corpora().get(DOCUMENTS)
    found = {} if corpus is None else run.once("rules", lambda: stored_rules(run.session, corpus))
    return {rule.key: (step, rule, rules) for step, rules in found.items() for rule in rules}


def link_of_cut(run: BrowsedRun, step: str, reason: str | None) -> str | None:
    """The page of the rule that a reason names; None where it bounds no value."""
    found = (key for key, (of, rule, _) in rules_of_run(run).items() if of == step and rule.name == reason)
    return next((address(CUTS_PAGE, key) for key in found), None)


def cuts_page(run: BrowsedRun) -> dict[str, Any]:
    """All rules of all steps, with what each has dropped."""
    run.corpus(DOCUMENTS)
    rows = []
    for key, (step, rule, _) in rules_of_run(run).items():
        summary = run.summary(step)
        tally: Mapping[str, int] = summary.get("rules", {}).get(rule.name, {})
        rows.append(
            {
                "step": step,
                "rule": rule.name,
                "key": short_key(key),
                "bound": rule.bound,
                "dropped": rule.dropped(summary),
                "only": tally.get("only"),
                "link": address(CUTS_PAGE, key),
                "list": Search(step=step, reason=rule.name).link(),
            }
        )
    return {"rules": rows}


def cut_page(run: BrowsedRun, asked: OneCut) -> dict[str, Any]:
    """A rule: where its bound lies among what was measured, and the nearest dropped and kept documents."""
    rules = rules_of_run(run)
    if asked.key not in rules:
        raise NotThereError(f"there is no rule {asked.key!r}; rules are {', '.join(rules) or 'not known yet'}")
    step, rule, of_step = rules[asked.key]
    corpus, summary = run.corpus(DOCUMENTS), run.summary(step)
    numeric = isinstance(rule.bound, int | float)
    sides = run.once(("cut", rule.key), lambda: _nearest(corpus, step, rule, of_step)) if numeric else None
    counted = summary.get("histograms", {}).get(rule.statistic)
    column = next((name for name, of in run.columns(DOCUMENTS).measured.items() if of == (step, rule.statistic)), "")
    return {
        "step": step,
        "rule": rule.name,
        "key": rule.key,
        "short_key": short_key(rule.key),
        "bound": rule.bound,
        "statistic": rule.statistic,
        "is_most": rule.side == "max",
        "dropped": rule.dropped(summary),
        "read": summary["counts"]["read"],
        "only": summary.get("rules", {}).get(rule.name, {}).get("only"),
        "list": Search(step=step, reason=rule.name).link(),
        "sides": sides,
        "bars": bars(counted["edges"], counted["counts"], rule.bound, column) if counted and numeric else None,
        "try": run.session.command("whatif", "--set", f"{short_key(rule.key)}=VALUE"),
        "sampled": len(shard_names(corpus[INGEST])) > MOST_SHARDS,
    }


def _nearest(corpus: Inputs, step: str, rule: Rule, of_step: Sequence[Rule]) -> list[dict[str, Any]]:
    """The documents next to a bound: those that it dropped, and those that it let through."""
    sides: dict[str, list[Found]] = {"failing": [], "passing": []}
    shards = shard_names(corpus[INGEST])
    for shard in shards[:: max(1, -(-len(shards) // MOST_SHARDS))]:
        verdicts, _ = judge_shard(corpus, shard, step, list(of_step), list(of_step))
        merge_nearest(sides, shard, nearest(verdicts, rule, SAMPLES), SAMPLES)
    return [
        {"side": side, "samples": [_sample(corpus, step, shard, row, value) for _, shard, row, value in sides[side]]}
        for side in ("failing", "passing")
    ]


def _sample(corpus: Inputs, step: str, shard: str, row: int, value: float) -> dict[str, Any]:
    """A document next to a bound, with what the whole step made of it."""
    document = read_document_rows(corpus, shard, [row], ["id", "source", "locator", "text"])
    judged = read_annotation_rows(corpus, shard, step, [row], document["id"], ["keep", "reason"]).to_pylist()[0]
    found = document.to_pylist()[0]
    return {
        "id": found["id"].hex(),
        "link": address(DOCUMENTS, found["id"].hex()),
        "source": found["source"],
        "locator": found["locator"],
        "value": value,
        "keep": judged["keep"],
        "reason": judged["reason"],
        "excerpt": found["text"][:EXCERPT_CHARS] + ("..." if len(found["text"]) > EXCERPT_CHARS else ""),
    }


def bars(edges: Sequence[float], counts: Sequence[int], cut: float | None, column: str) -> dict[str, Any]:
    """A histogram as bars, each with a link to its documents, in the places of an SVG of 600 by 160.

    Args:
        edges, counts: as in `gristmill.dataprep.conservation.Histogram`.
        cut: what is marked among them.
        column: what was measured, under the name by which it is searched.
    """
    filled = [place for place, count in enumerate(counts) if count]
    nearest_edge = None if cut is None else min(range(len(edges)), key=lambda place: abs(edges[place] - cut))
    marked = [] if nearest_edge is None else [max(nearest_edge - 1, 0), min(nearest_edge + 2, len(counts) - 1)]
    first, last = min(filled + marked, default=0), max(filled + marked, default=len(counts) - 1)
    width, highest = 600 / (last - first + 1), max(counts, default=0) or 1
    ends = ["", *(f"{edge:g}" for edge in edges), ""]
    found = []
    for place in range(first, last + 1):
        # A range of the form has both ends; a bar does not have its upper one.
        bounds = [
            *([f'"{column}" >= {edges[place - 1]!r}'] if place else []),
            *([f'"{column}" < {edges[place]!r}'] if place < len(edges) else []),
        ]
        height = round(max(140 * counts[place] / highest, 1.0 if counts[place] else 0.0), 2)
        found.append(
            {
                "x": round((place - first) * width, 2),
                "width": round(width * 0.92, 2),
                "y": 150 - height,
                "height": height,
                "count": counts[place],
                "title": f"{ends[place]} to {ends[place + 1]}".strip(),
                "link": Search(where=" AND ".join(bounds)).link(),
            }
        )
    return {
        "bars": found,
        "cut": None if cut is None else round((place_on_bins(cut, edges) - first) * width, 2),
        "from": ends[first],
        "to": ends[last + 1],
    }

"""The report's sections about language models that a run asked: judges, their cost,
generated documents and examples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gristmill.flows.pages.page_elements import (
    Heading,
    Note,
    Section,
    Table,
    section_of,
)
from gristmill.flows.report.report_facts import Facts


def judges(facts: Facts, name: str = "judge") -> Section | None:
    """Requests of judges, and the agreement of two judges."""
    summary = facts["summaries"][name]
    unusable = summary.get("unusable")
    rows = [
        [
            score,
            f"{agreement['documents']:,}",
            *(
                _number(agreement[key])
                for key in (
                    "same",
                    "kappa",
                    "weighted_kappa",
                    "correlation",
                    "difference",
                )
            ),
        ]
        for score, agreement in (summary.get("agreement") or {}).items()
    ]
    header = [
        "score",
        "documents",
        "same",
        "kappa",
        "weighted kappa",
        "correlation",
        "first less second",
    ]
    return section_of(
        f"Answers of {name}",
        requests_table(summary.get("asked", ())),
        Note(f"{unusable:,} documents have no usable answer.") if unusable else None,
        Heading("Agreement of both judges"),
        Table(header, rows, {1, 2, 3, 4, 5, 6}),
    )


def generated(facts: Facts, name: str = "generate") -> Section | None:
    """Yield of each generated source, the diversity of its texts, and its share of the
    mixture.
    """
    sources = facts["summaries"][name].get("generated", {})
    realised = facts.get("packed", {}).get("realised", {})
    rows = [
        [
            source,
            counts["style"],
            ", ".join(counts["made_from"]),
            f"{counts['used']:,} of {counts['parents']:,}",
            f"{counts['requests']:,}",
            f"{counts['kept']:,}",
            f"{sum(counts['dropped'].values()):,}",
            f"{counts['quarantined']:,}",
            f"{counts['bytes'] / 1e6:.2f}",
            f"{realised[source]['share']:.1%}" if source in realised else "",
        ]
        for source, counts in sources.items()
    ]
    sampled = {
        source: counts["texts"]
        for source, counts in sources.items()
        if counts["texts"]["sampled"]
    }
    header = [
        "source",
        "style",
        "from",
        "parents",
        "asked for",
        "documents",
        "dropped",
        "refused",
        "MB",
        "of the mixture",
    ]
    return section_of(
        "Generated documents",
        Table(header, rows, {3, 4, 5, 6, 7, 8, 9}),
        Heading("How diverse they are") if sampled else None,
        Table(
            ["source", *DIVERSITY],
            [[source, *_diversity(texts)] for source, texts in sampled.items()],
            set(range(1, 8)),
        ),
        Note(SAMPLED),
        requests_table(
            [counts["asked"] for counts in sources.values() if counts["asked"]]
        ),
    )


def made_examples(facts: Facts, name: str) -> Section | None:
    """Yield of a set of examples, the lengths and diversity of its answers, and their
    rewards.
    """
    summary = facts["summaries"][name]
    prompts, answers, texts = summary["prompts"], summary["answers"], summary["texts"]
    yield_row = [
        f"{prompts['read']:,}",
        f"{answers['asked']:,}",
        _counts_text({**prompts["dropped"], **answers["dropped"]}),
        f"{sum(prompts['dropped'].values()):,}",
        f"{prompts['quarantined']:,}",
        f"{summary['examples']:,}",
    ]
    grown_rows = []
    if "grown" in summary:
        grown = summary["grown"]
        dropped = _counts_text(grown["dropped"])
        grown_rows.append(
            [
                f"{grown['kept']:,}",
                dropped,
                f"{grown['rounds']:,}",
                f"{grown['requests']:,}",
            ]
        )
    reward_rows = [
        [
            which,
            f"{reward['answers']:,}",
            f"{reward['mean']:.3f}",
            *(f"{value:.3f}" for value in reward["percentiles"]),
        ]
        for which, reward in summary["rewards"].items()
    ]
    principle_rows = [
        [principle, f"{number:,}"]
        for principle, number in (summary["principles"] or {}).items()
    ]
    diversity_rows = [_diversity(texts)] if texts["sampled"] else []
    header = [
        "prompts",
        "answers",
        "dropped",
        "prompts without an example",
        "refused",
        summary["gives"],
    ]
    return section_of(
        "Examples that a model wrote",
        Table(header, [yield_row], {0, 1, 3, 4, 5}),
        Heading("New prompts"),
        Table(["kept", "dropped", "rounds", "requests"], grown_rows, {0, 2, 3}),
        Heading("Rewards"),
        Table(
            ["answers", "number", "mean", "10 %", "half", "90 %"],
            reward_rows,
            {1, 2, 3, 4, 5},
        ),
        Heading("Principles"),
        Table(["principle", "examples"], principle_rows, {1}),
        Heading("How diverse the answers are") if diversity_rows else None,
        Table(DIVERSITY, diversity_rows, set(range(len(DIVERSITY)))),
        Note(SAMPLED) if diversity_rows else None,
        Note(f"Made from prompts under {', '.join(summary['licences'])}.")
        if summary["licences"]
        else None,
        requests_table(summary["asked"]),
    )


def _counts_text(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{reason} {number:,}" for reason, number in counts.items())


DIVERSITY = (
    "characters (10 %, half, 90 %)",
    "distinct words",
    "pairs",
    "triples",
    "alike each other",
    "parents alike",
    "like its parent",
)
SAMPLED = (
    "On a sample: shares of n-grams of words that are no repetition; mean Jaccard "
    "similarity of triples. Of examples the parents are their prompts."
)


def _diversity(texts: Mapping[str, Any]) -> list[str]:
    return [
        " / ".join(f"{value:,}" for value in texts["characters"]),
        *(_number(texts["distinct"][n]) for n in ("1", "2", "3")),
        *(
            _number(texts[key])
            for key in (
                "self_similarity",
                "parent_self_similarity",
                "parent_similarity",
            )
        ),
    ]


def requests_table(tallies: Sequence[Mapping[str, Any]]) -> Table:
    """Requests, tokens and money by model."""
    columns = {
        "asked": "asked",
        "kept before": "kept",
        "sent again": "retried",
        "repaired": "repaired",
        "unusable": "unusable",
        "prompt tokens": "prompt_tokens",
        "answer tokens": "answer_tokens",
    }
    rows = []
    for tally in tallies:
        money = f"{tally['money']:,.2f}" if "money" in tally else ""
        rows.append(
            [tally["model"], *(f"{tally[key]:,}" for key in columns.values()), money]
        )
    return Table(["model", *columns, "money"], rows, set(range(1, 9)))


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"

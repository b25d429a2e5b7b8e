"""The report's sections about models that were asked: what judges said and cost, what was generated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gristmill.flows.report.page_elements import Heading, Note, Part, Section, Table
from gristmill.flows.report.report_facts import Facts


def judges(facts: Facts, name: str = "judge") -> Section | None:
    """What asking came to, and how far two judges agree."""
    summary = facts["summaries"][name]
    parts: list[Part] = asked(summary.get("asked", ()))
    if summary.get("unusable"):
        parts.append(Note(f"{summary['unusable']:,} documents have no usable answer."))
    if summary.get("agreement"):
        rows = [
            [
                score,
                f"{of['documents']:,}",
                *(_number(of[key]) for key in ("same", "kappa", "weighted_kappa", "correlation", "difference")),
            ]
            for score, of in summary["agreement"].items()
        ]
        parts += [
            Heading("Agreement of both judges"),
            Table(
                ["score", "documents", "same", "kappa", "weighted kappa", "correlation", "first less second"],
                rows,
                {1, 2, 3, 4, 5, 6},
            ),
        ]
    return Section(f"Answers of {name}", parts) if parts else None


def generated(facts: Facts, name: str = "generate") -> Section | None:
    """What each generated source gave, how diverse its texts are, and its share in the mixture."""
    found = facts["summaries"][name].get("generated", {})
    if not found:
        return None
    shares = _shares(facts)
    yields = [
        [
            source,
            of["style"],
            ", ".join(of["made_from"]),
            f"{of['used']:,} of {of['parents']:,}",
            f"{of['requests']:,}",
            f"{of['kept']:,}",
            f"{sum(of['dropped'].values()):,}",
            f"{of['quarantined']:,}",
            f"{of['bytes'] / 1e6:.2f}",
            shares.get(source, ""),
        ]
        for source, of in found.items()
    ]
    texts = [[source, *_diversity(of["texts"])] for source, of in found.items() if of["texts"]["sampled"]]
    parts: list[Part] = [
        Table(
            [
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
            ],
            yields,
            {3, 4, 5, 6, 7, 8, 9},
        ),
        Heading("How diverse they are"),
        Table(["source", *DIVERSITY], texts, {1, 2, 3, 4, 5, 6, 7}),
        Note(SAMPLED),
        *asked([of["asked"] for of in found.values() if of["asked"]]),
    ]
    return Section("Generated documents", parts)


def made_examples(facts: Facts, name: str) -> Section | None:
    """What a set of examples gave: its yield, how long and diverse its answers are, and how they were rewarded."""
    of = facts["summaries"][name]
    prompts, answers, texts = of["prompts"], of["answers"], of["texts"]
    dropped = {
        **answers["dropped"],
        **{key: number for key, number in prompts["dropped"].items() if key not in answers["dropped"]},
    }
    parts: list[Part] = [
        Table(
            ["prompts", "answers", "dropped", "prompts without an example", "refused", of["gives"]],
            [
                [
                    f"{prompts['read']:,}",
                    f"{answers['asked']:,}",
                    _counted(dropped),
                    f"{sum(prompts['dropped'].values()):,}",
                    f"{prompts['quarantined']:,}",
                    f"{of['examples']:,}",
                ]
            ],
            {0, 1, 3, 4, 5},
        )
    ]
    if "grown" in of:
        grown = of["grown"]
        parts += [
            Heading("New prompts"),
            Table(
                ["kept", "dropped", "rounds", "requests"],
                [[f"{grown['kept']:,}", _counted(grown["dropped"]), f"{grown['rounds']:,}", f"{grown['requests']:,}"]],
                {0, 2, 3},
            ),
        ]
    if of["rewards"]:
        rows = [
            [which, f"{one['answers']:,}", f"{one['mean']:.3f}", *(f"{value:.3f}" for value in one["percentiles"])]
            for which, one in of["rewards"].items()
        ]
        parts += [
            Heading("Rewards"),
            Table(["answers", "number", "mean", "10 %", "half", "90 %"], rows, {1, 2, 3, 4, 5}),
        ]
    if of["principles"]:
        rows = [[principle, f"{number:,}"] for principle, number in of["principles"].items()]
        parts += [Heading("Principles"), Table(["principle", "examples"], rows, {1})]
    if texts["sampled"]:
        parts += [
            Heading("How diverse the answers are"),
            Table(DIVERSITY, [_diversity(texts)], set(range(len(DIVERSITY)))),
            Note(SAMPLED),
        ]
    if of["licences"]:
        parts.append(Note(f"Made from prompts under {', '.join(of['licences'])}."))
    return Section("Examples that a model wrote", [*parts, *asked(of["asked"])])


def _counted(dropped: Mapping[str, int]) -> str:
    return ", ".join(f"{reason} {number:,}" for reason, number in dropped.items())


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
    "On a sample: shares of n-grams of words that are no repetition; mean Jaccard similarity of triples. Of "
    "examples the parents are their prompts."
)


def _diversity(texts: Mapping[str, Any]) -> list[str]:
    return [
        " / ".join(f"{value:,}" for value in texts["characters"]),
        *(_number(texts["distinct"][n]) for n in ("1", "2", "3")),
        *(_number(texts[key]) for key in ("self_similarity", "parent_self_similarity", "parent_similarity")),
    ]


def _shares(facts: Facts) -> dict[str, str]:
    """The share of each source in the training tokens of the mixture; empty before there is one."""
    return {source: f"{of['share']:.1%}" for source, of in facts.get("packed", {}).get("realised", {}).items()}


def asked(tallies: Sequence[Mapping[str, Any]]) -> list[Part]:
    """What asking each model came to."""
    rows = [
        [
            of["model"],
            *(
                f"{of[key]:,}"
                for key in ("asked", "kept", "retried", "repaired", "unusable", "prompt_tokens", "answer_tokens")
            ),
            f"{of['money']:,.2f}" if "money" in of else "",
        ]
        for of in tallies
    ]
    return (
        [
            Table(
                [
                    "model",
                    "asked",
                    "kept before",
                    "sent again",
                    "repaired",
                    "unusable",
                    "prompt tokens",
                    "answer tokens",
                    "money",
                ],
                rows,
                set(range(1, 9)),
            )
        ]
        if rows
        else []
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"

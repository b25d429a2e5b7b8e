"""The report's sections about language models that a run asked: judges, their cost,
generated documents and examples.
"""

from __future__ import annotations

from collections.abc import Iterable

from gristmill.dataprep.examples.make_examples import MadeSet
from gristmill.flows.pages.page_elements import (
    Heading,
    MaybeSection,
    Table,
    section_of,
    table,
)
from gristmill.flows.report.facts import Facts
from gristmill.flows.report.stage_summaries import Row


def judges(facts: Facts, name: str = "judge") -> MaybeSection:
    """Requests of a judge."""
    summary = facts.step(name)
    unusable = f"{summary.unusable:,} documents have no usable answer."
    return section_of(
        f"Answers of {name}",
        requests_table(summary.asked),
        unusable if summary.unusable else None,
    )


def generated(facts: Facts, name: str = "generate") -> MaybeSection:
    """Yield of each generated source, and its share of the mixture."""
    sources = facts.step(name).generated
    realised = {} if facts.packed is None else facts.packed.realised
    rows = [
        [
            source,
            counts.style,
            ", ".join(counts.made_from),
            f"{counts.used:,} of {counts.parents:,}",
            counts.requests,
            counts.kept,
            sum(counts.dropped.values()),
            counts.quarantined,
            counts.bytes / 1e6,
            realised[source].share if source in realised else None,
        ]
        for source, counts in sources.items()
    ]
    columns = {
        "source": "",
        "style": "",
        "from": "",
        "parents": ">",
        "asked for": ",",
        "documents": ",",
        "dropped": ",",
        "refused": ",",
        "MB": ".2f",
        "of the mixture": ".1%",
    }
    return section_of(
        "Generated documents",
        table(columns, rows),
        requests_table(counts.asked for counts in sources.values() if counts.asked),
    )


def made_examples(facts: Facts, name: str) -> MaybeSection:
    """Yield of a set of examples, and the rewards of its answers."""
    summary = facts.summary(name, MadeSet)
    prompts, answers = summary.prompts, summary.answers
    dropped = {**prompts["dropped"], **answers.dropped}
    yield_row = [
        prompts["read"],
        answers.asked,
        ", ".join(f"{reason} {number:,}" for reason, number in dropped.items()),
        sum(prompts["dropped"].values()),
        prompts["quarantined"],
        summary.examples,
    ]
    yield_columns = {
        "prompts": ",",
        "answers": ",",
        "dropped": "",
        "prompts without an example": ",",
        "refused": ",",
        summary.gives: ",",
    }
    reward_rows = [
        [answers_of_kind, reward.answers, reward.mean, *reward.percentiles]
        for answers_of_kind, reward in summary.rewards.items()
    ]
    spread = dict.fromkeys(("mean", "10 %", "half", "90 %"), ".3f")
    licences = f"Made from prompts under {', '.join(summary.licences)}."
    return section_of(
        "Examples that a model wrote",
        table(yield_columns, [yield_row]),
        Heading("Rewards"),
        table({"answers": "", "number": ",", **spread}, reward_rows),
        Heading("Principles"),
        table({"principle": "", "examples": ","}, summary.principles.items()),
        licences if summary.licences else None,
        requests_table(summary.asked),
    )


def requests_table(tallies: Iterable[Row]) -> Table:
    """Requests, tokens and money by model."""
    keys = {
        "asked": "asked",
        "kept": "kept before",
        "retried": "sent again",
        "repaired": "repaired",
        "unusable": "unusable",
        "prompt_tokens": "prompt tokens",
        "answer_tokens": "answer tokens",
    }
    columns = {"model": "", **dict.fromkeys(keys.values(), ","), "money": ",.2f"}
    rows = [[tally.get(key) for key in ("model", *keys, "money")] for tally in tallies]
    return table(columns, rows)

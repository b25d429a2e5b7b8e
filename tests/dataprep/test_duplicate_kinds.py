"""Kinds of duplicates: copies, instances of a template, revisions."""

from __future__ import annotations

from pathlib import Path

import pytest

from gristmill.core.stage_context import Context
from gristmill.dataprep.dedup import dedup
from gristmill.dataprep.dedup.duplicate_kinds import (
    MOST_TOKENS,
    kind_of,
    tokens_of,
)
from tests.dataprep.document_shards import write_shards
from tests.dataprep.small_models import WORDS, write_word_vectors

ORDER = (
    "The guest asked for {drink} with {extra} and paid at the counter before the clerk "
    "called the number of the order and handed over the cup"
)
ONE = ORDER.format(drink="a latte", extra="oat milk")


def kind_among(survivor: str, *members: str) -> str:
    return kind_of(tokens_of(survivor), [*map(tokens_of, members)])


@pytest.mark.parametrize(
    ("members", "kind"),
    [
        ([ONE, ONE.upper(), ONE.replace(" ", "\n")], "copy"),
        # values of several members at the same places
        (
            [
                ORDER.format(drink="a mocha", extra="soy milk"),
                ORDER.format(drink="an iced tea", extra="lemon"),
            ],
            "template",
        ),
        # one other member: its values are not numbers or names
        ([ORDER.format(drink="a mocha", extra="oat milk")], "revision"),
        ([ORDER.format(drink="2 espressos", extra="oat milk")], "revision"),
        ([f"{ONE} and the guest went home"], "revision"),
        ([ONE.replace("paid at the counter before ", "")], "revision"),
    ],
)
def test_kind_follows_from_the_differences(members: list[str], kind: str) -> None:
    assert kind_among(ONE, *members) == kind


def test_numbers_and_names_are_values_of_a_template() -> None:
    line = "The report of {name} for {year} was read on page {page} of the record"
    first = line.format(name="Ada Byron", year=1843, page=7)
    second = line.format(name="Grace Hopper", year=1952, page=12)
    assert kind_among(first, second) == "template"
    revised = second.replace("was read", "has been read aloud")
    assert kind_among(first, revised) == "revision"


def test_text_after_the_compared_tokens_does_not_decide() -> None:
    beginning = "Invoice 1 of the firm " + "word " * MOST_TOKENS
    other = beginning.replace("Invoice 1 ", "Invoice 2 number 3 ")
    assert kind_among(beginning, f"{other} and more") == "template"


def test_meanings_of_the_sample_are_compared_by_a_model(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    model = write_word_vectors(tmp_path / "model")
    documents = [("web", f"same{number}", " ".join(WORDS)) for number in range(3)]
    inputs = {"ingest": write_shards(tmp_path / "documents", [documents])}
    context = Context(tmp_path / "work", "dedup", emit=lambda event: None)
    section = {"meaning": {"path": str(model)}}
    summary = dedup.run(inputs, section, tmp_path / "out", context)
    assert (summary.duplicate_sample.documents, summary.duplicate_sample.alike) == (
        2,
        2,
    )


def test_dedup_describes_a_sample_of_what_it_drops(tmp_path: Path) -> None:
    text = " ".join(f"word{number}" for number in range(80))
    template = "Ticket {number}: " + " ".join(f"line{n}" for n in range(80))
    documents = [("web", f"copy{number}", text) for number in range(3)]
    documents += [
        ("web", f"ticket{number}", template.format(number=number))
        for number in range(6)
    ]
    inputs = {"ingest": write_shards(tmp_path / "documents", [documents])}
    context = Context(tmp_path / "work", "dedup", emit=lambda event: None)
    summary = dedup.run(inputs, {}, tmp_path / "out", context)
    sample = summary.duplicate_sample
    assert (sample.documents, sample.copies, sample.templates) == (7, 2, 5)
    assert (sample.revisions, sample.alike) == (0, None)
    kinds = [(cluster["size"], cluster["kind"]) for cluster in summary.largest_clusters]
    assert kinds == [(6, "template"), (3, "copy")]

"""Canaries: exact numbers of copies, independent of shards, at ends of lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gristmill.core.stage_context import Context
from gristmill.dataprep.cleaning import canaries
from gristmill.dataprep.cleaning.canary_texts import PATTERN, draw_canaries
from gristmill.dataprep.documents import read_documents, shard_names
from gristmill.mixtures.steps.canaries import Canaries

SECTION = Canaries(copies=(1, 3), secrets=2, sources=("web",), seed=5)
DOCUMENTS = [
    ("code" if number % 5 == 0 else "web", str(number), f"first {number}\nsecond\n\n")
    for number in range(40)
]


@pytest.fixture
def inserted(
    write_ingest: Callable[..., Path],
    make_context: Callable[..., Context],
    tmp_path: Path,
) -> Callable[..., dict[str, str]]:
    """Insert SECTION's canaries: (shards, section) -> locator -> text."""

    def run(shards: Any, section: Canaries = SECTION) -> dict[str, str]:
        name = f"run{len(list(tmp_path.iterdir()))}"
        inputs = {"ingest": write_ingest(f"{name}/ingest", shards)}
        out = tmp_path / name / "out"
        context = make_context(f"{name}/work")
        summary = canaries.run(inputs, section.model_dump(), out, context)
        assert summary.counts["kept"] == sum(map(len, shards))
        texts = {}
        for shard in shard_names(inputs["ingest"]):
            read = read_documents(
                {**inputs, "canaries": out}, shard, ["locator", "text"]
            )
            texts.update(
                zip(read["locator"].to_pylist(), read["text"].to_pylist(), strict=True)
            )
        return texts

    return run


def test_each_secret_has_its_number_of_copies(inserted: Any) -> None:
    texts = inserted([DOCUMENTS])
    lines = Counter(line for text in texts.values() for line in PATTERN.findall(text))
    drawn = draw_canaries(SECTION)
    assert [canary.copies for canary in drawn] == [0, 0, 1, 1, 3, 3]
    assert lines == Counter(
        {canary.line: canary.copies for canary in drawn if canary.copies}
    )
    for source, locator, text in DOCUMENTS:
        found = PATTERN.findall(texts[locator])
        assert len(found) <= (source == "web")
        assert texts[locator].replace(f"\n{''.join(found)}", "", len(found)) == text
        assert all(line in texts[locator].split("\n") for line in found)


def test_insertion_does_not_depend_on_shards(inserted: Any) -> None:
    once = inserted([DOCUMENTS])
    assert inserted([DOCUMENTS[25:], DOCUMENTS[:4], DOCUMENTS[4:25]]) == once
    other = SECTION.model_copy(update={"seed": 6})
    assert inserted([DOCUMENTS], other) != once


def test_too_few_documents_are_an_error(inserted: Any) -> None:
    with pytest.raises(canaries.TooFewDocumentsError):
        inserted([DOCUMENTS[:6]])


def test_secrets_differ_and_references_are_never_inserted() -> None:
    drawn = draw_canaries(Canaries(secrets=50, seed=1))
    assert len({canary.beginning for canary in drawn}) == len(drawn) == 250
    assert all(PATTERN.fullmatch(canary.line) for canary in drawn)
    codes = {canary.code(draw) for canary in drawn for draw in range(20)}
    assert len(codes) > 20 * 250 - 10  # of 10^8; equal ones by chance

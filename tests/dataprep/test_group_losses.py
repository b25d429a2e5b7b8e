"""Losses of a step by source, domain and language."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import astuple
from pathlib import Path

import pyarrow as pa
import pytest

from gristmill.core.stage_context import Context
from gristmill.dataprep.conservation import Counts, add_counts
from gristmill.dataprep.count_losses import EXAMPLES, count_losses
from gristmill.dataprep.documents import Shard, document_id, read_shard
from gristmill.dataprep.group_losses import GroupLoss, IntendedLosses
from gristmill.dataprep.readers import ingest
from gristmill.mixtures.schema.guard import LEAST_DOCUMENTS
from gristmill.mixtures.schema.sources import INGEST
from tests.dataprep.document_shards import Document, write_shards

Verdict = tuple[Document, str | None, str | None]
"""Document, language, and the rule that drops it."""


def losses_of(
    folder: Path, verdicts: list[Verdict], intended: IntendedLosses
) -> list[GroupLoss]:
    """Write the verdicts of a step on two shards, and count its losses."""
    half = len(verdicts) // 2
    halves = [verdicts[:half], verdicts[half:]]
    documents = [[verdict[0] for verdict in part] for part in halves]
    inputs = {"ingest": write_shards(folder / "documents", documents)}
    counts: list[Counts] = []
    for number, part in enumerate(halves):
        name = f"part-{number:05d}.parquet"
        shard: Shard = read_shard(inputs, name)
        languages = pa.array([language for _, language, _ in part], pa.string())
        reasons = [reason for _, _, reason in part]
        counts.append(
            shard.write(folder / "step" / name, reasons, {"language": languages})
        )
    context = Context(folder / "work", "step", emit=lambda event: None)
    return count_losses(inputs, folder / "step", intended, add_counts(counts), context)


def page(source: str, host: str, number: int) -> Document:
    return source, f"https://{host}/{number}", f"text {number} of {host}"


def test_losses_are_counted_by_every_column(tmp_path: Path) -> None:
    verdicts: list[Verdict] = [
        (page("web", "www.a.org", number), "en", "short" if number < 9 else None)
        for number in range(12)
    ]
    verdicts += [(page("web", "b.org", number), "de", None) for number in range(20)]
    verdicts.append((("books", "one.txt", "a book"), None, "short"))
    losses = losses_of(tmp_path, verdicts, [])
    lost = [
        (document_id(*document), document[1])
        for document, _, reason in verdicts
        if reason and document[0] == "web"
    ]
    examples = sorted(locator for _, locator in sorted(lost)[:EXAMPLES])
    assert losses == [
        GroupLoss("source", "web", 32, 9, "short", examples),
        GroupLoss("domain", "a.org", 12, 9, "short", examples),
        GroupLoss("language", "en", 12, 9, "short", examples),
    ]


def test_rules_about_a_column_do_not_count_for_it(tmp_path: Path) -> None:
    verdicts: list[Verdict] = [
        (page("web", "a.org", number), "de", "language") for number in range(30)
    ]
    verdicts += [
        (page("web", "b.org", number), "en", "unsure" if number < 15 else None)
        for number in range(30)
    ]
    losses = losses_of(tmp_path, verdicts, [("language", "language")])
    assert [(loss.column, loss.group, loss.dropped) for loss in losses] == [
        ("source", "web", 45),
        ("domain", "a.org", 30),
        ("domain", "b.org", 15),
        ("language", "en", 15),
    ]
    assert {loss.reason for loss in losses if loss.column == "source"} == {"language"}


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_losses_equal_a_plain_count(tmp_path: Path, seed: int) -> None:
    print("seed", seed)
    source = random.Random(seed)
    verdicts: list[Verdict] = [
        (
            page(source.choice("xyz"), f"h{source.randrange(9)}.org", number),
            source.choice(["en", "de", None]),
            source.choice([None, None, "rule/a", "rule/b"]),
        )
        for number in range(300)
    ]
    read, dropped = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for (name, locator, _), language, reason in verdicts:
        groups = {
            "source": name,
            "domain": locator.split("/")[2],
            "language": language,
        }
        for column, group in groups.items():
            if group is not None:
                read[column, group] += 1
                dropped[column, group] += reason is not None
    expected = {
        key: (read[key], dropped[key])
        for key in read
        if read[key] >= LEAST_DOCUMENTS and dropped[key]
    }
    losses = losses_of(tmp_path, verdicts, [])
    assert {
        (loss.column, loss.group): (loss.read, loss.dropped) for loss in losses
    } == expected


def test_records_that_ingest_drops_are_losses_of_sources_and_domains(
    tmp_path: Path,
) -> None:
    empty, full = (
        [
            {"url": f"https://{host}/{number}", "text": text}
            for number in range(LEAST_DOCUMENTS)
        ]
        for host, text in (("a.org", ""), ("b.org", "A page."))
    )
    lines = ["{not JSON", *map(json.dumps, [*empty, *full, full[0]])]
    (tmp_path / "web.jsonl").write_text("\n".join(lines))
    section = {
        "path": str(tmp_path / "web.jsonl"),
        "id_field": "url",
        "on_repeat": "keep_first",
    }
    config = {"sources": {"web": section}, "ingest": {"max_quarantined": 0.5}}
    context = Context(tmp_path / "work", INGEST, emit=lambda event: None)
    out = tmp_path / "documents"
    counts = ingest.run({}, config, out, context).counts
    losses = count_losses({}, out, [], counts, context)
    read = 2 * LEAST_DOCUMENTS + 2
    assert [(*astuple(loss)[:4], len(loss.examples)) for loss in losses] == [
        ("source", "web", read, LEAST_DOCUMENTS + 2, EXAMPLES),
        ("domain", "a.org", LEAST_DOCUMENTS, LEAST_DOCUMENTS, EXAMPLES),
        ("domain", "b.org", LEAST_DOCUMENTS + 1, 1, 1),
    ]
    assert losses[1].examples[0] == "https://a.org/0"

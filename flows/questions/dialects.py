"""`gristmill dialects`: keep rates of the Gopher rules under the definitions of each
project.

Measured with the manifest's thresholds on the documents kept by the committed stages
before `filter` (by all committed stages if the manifest has no `filter`), or on a
sample of them by the hash of their ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from rich.text import Text

from gristmill.dataprep.documents import read_shard, shard_names
from gristmill.dataprep.filtering.gopher import DIALECTS
from gristmill.dataprep.filtering.rule_sets import measure
from gristmill.dataprep.thresholds import bounded_statistics, failures
from gristmill.flows.pages.terminal_tables import plain_table, section
from gristmill.flows.questions.find_documents import (
    NothingIngestedError,
    committed_corpus,
)
from gristmill.flows.running.session import Session
from gristmill.flows.running.terminal import plain_console
from gristmill.mixtures.sources import INGEST
from gristmill.mixtures.steps.filter import Filter
from gristmill.mixtures.steps.rules import (
    GopherQuality,
    GopherRepetition,
    GopherRules,
    Rules,
)

EXAMPLES = 5
BATCH_DOCUMENTS = 1000
SETS = ("gopher_quality", "gopher_repetition")


@dataclass
class _Totals:
    documents: int = 0
    text_bytes: int = 0
    kept: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)
    """Dialect -> rule set -> documents and bytes that it keeps, int64 of shape (2,)."""
    disagreeing: int = 0
    examples: dict[tuple[bool, ...], tuple[bytes, dict[str, Any]]] = field(
        default_factory=dict
    )


def compare_dialects(session: Session, sample: int) -> dict[str, Any]:
    """Judge a sample of the documents by every dialect.

    A text that cannot be measured raises its error here; the stage `filter` would
    quarantine that document alone.

    Args:
        sample: maximum number of documents to judge.

    Returns:
        `documents` and `bytes` judged, `of` the documents available; `dialects`: per
        dialect and rule set the shares of `documents` and `bytes` kept; `disagreeing`:
        number of documents on which dialects disagree; `examples`, one for each
        division of the dialects: locator, and per dialect `keep`, or the failed rule,
        its value and bound.

    Raises:
        NothingIngestedError: `ingest` is not committed, or kept nothing.
    """
    inputs = {}
    for name, folder in committed_corpus(session).inputs.items():
        if name != INGEST and isinstance(session.manifest.steps[name].config, Filter):
            break
        inputs[name] = folder
    limit, available = _sample_limit(inputs, sample)
    sections = _sections(session)
    totals = _Totals()
    for rows in _sampled_rows(inputs, limit):
        _judge_batch(rows, sections, totals)
    shares = {
        dialect: {
            name: {
                "documents": tally[0].item() / max(totals.documents, 1),
                "bytes": tally[1].item() / max(totals.text_bytes, 1),
            }
            for name, tally in tallies.items()
        }
        for dialect, tallies in totals.kept.items()
    }
    examples = sorted(totals.examples.values(), key=lambda example: example[0])
    return {
        "documents": totals.documents,
        "of": available,
        "bytes": totals.text_bytes,
        "dialects": shares,
        "disagreeing": totals.disagreeing,
        "examples": [description for _, description in examples[:EXAMPLES]],
    }


def _sections(session: Session) -> dict[str, Rules]:
    """Return the manifest's Gopher rules (or the defaults) in every dialect."""
    configured = next(
        (
            step.config
            for step in session.manifest.prepare
            if isinstance(step.config, Filter)
        ),
        Filter(),
    )
    quality = configured.rules.gopher_quality or GopherQuality()
    repetition = configured.rules.gopher_repetition or GopherRepetition()
    return {
        dialect: Rules(
            gopher_quality=GopherQuality(**_in_dialect(quality, dialect)),
            gopher_repetition=GopherRepetition(**_in_dialect(repetition, dialect)),
        )
        for dialect in DIALECTS
    }


def _in_dialect(rules: GopherRules, dialect: str) -> dict[str, Any]:
    words = (
        "dialect" if rules.words == "exact" and dialect != "datatrove" else rules.words
    )
    return {**rules.model_dump(), "dialect": dialect, "words": words}


def _sample_limit(inputs: Mapping[str, Path], sample: int) -> tuple[int, int]:
    """Return the largest key of the sample, which takes the smallest keys, and the
    number of documents.
    """
    parts = [np.zeros(0, np.uint64)]
    for shard in shard_names(inputs[INGEST]):
        read = read_shard(inputs, shard, ["id"])
        parts.append(_keys(read.documents["id"].take(pa.array(read.rows))))
    keys = np.concatenate(parts)
    if len(keys) == 0:
        raise NothingIngestedError(
            "the committed stages kept no document; nothing can be measured"
        )
    last = min(sample, len(keys)) - 1
    return int(np.partition(keys, last)[last]), len(keys)


def _keys(ids: pa.ChunkedArray) -> np.ndarray:
    """Return the first eight bytes of ids, which are hashes: their order is random and
    reproducible.
    """
    return np.frombuffer(b"".join(ids.to_pylist()), ">u8")[::2].astype(np.uint64)


def _sampled_rows(inputs: Mapping[str, Path], limit: int) -> Iterator[pa.Table]:
    for shard in shard_names(inputs[INGEST]):
        read = read_shard(inputs, shard, ["id", "locator", "text", "language"])
        rows = read.documents.take(pa.array(read.rows))
        rows = rows.filter(pa.array(_keys(rows["id"]) <= np.uint64(limit)))
        for start in range(0, len(rows), BATCH_DOCUMENTS):
            yield rows.slice(start, BATCH_DOCUMENTS)


def _judge_batch(
    rows: pa.Table, sections: Mapping[str, Rules], totals: _Totals
) -> None:
    failed: dict[str, dict[str, np.ndarray]] = {}
    measured: dict[str, Mapping[str, np.ndarray]] = {}
    for dialect, rules in sections.items():
        measured[dialect] = measure(rows, rules)
        failed[dialect] = failures(measured[dialect], rules.sets)
    sizes = pc.binary_length(rows["text"]).to_numpy().astype(np.int64)
    totals.documents += len(rows)
    totals.text_bytes += int(sizes.sum())
    for dialect, masks in failed.items():
        kept = {}
        for name in SETS:
            kept[name] = _unset(
                mask for rule, mask in masks.items() if rule.startswith(name)
            )
        kept["both"] = kept["gopher_quality"] & kept["gopher_repetition"]
        tallies = totals.kept.setdefault(dialect, {})
        for name, mask in kept.items():
            tally = tallies.setdefault(name, np.zeros(2, np.int64))
            tally += mask.sum(), sizes[mask].sum()

    keeps = np.array([_unset(masks.values()) for masks in failed.values()])
    for row in np.flatnonzero(keeps.any(axis=0) & ~keeps.all(axis=0)).tolist():
        totals.disagreeing += 1
        division = tuple(keeps[:, row].tolist())
        identity = rows["id"][row].as_py()
        if division in totals.examples and totals.examples[division][0] <= identity:
            continue
        verdicts = {
            dialect: _verdict(sections[dialect], measured[dialect], masks, row)
            for dialect, masks in failed.items()
        }
        example = {
            "id": identity.hex(),
            "locator": rows["locator"][row].as_py(),
            "verdicts": verdicts,
        }
        totals.examples[division] = (identity, example)


def _unset(masks: Iterable[np.ndarray]) -> np.ndarray:
    """Return True where no mask is set."""
    return ~np.any(list(masks), axis=0)


def _verdict(
    rules: Rules,
    values: Mapping[str, np.ndarray],
    failed: Mapping[str, np.ndarray],
    row: int,
) -> dict[str, Any]:
    rule = next((rule for rule, mask in failed.items() if mask[row]), None)
    if rule is None:
        return {"keep": True}
    name, _, threshold = rule.partition("/")
    bounds = getattr(rules, name)
    _, statistic = bounded_statistics(type(bounds))[threshold]
    return {
        "keep": False,
        "rule": rule,
        "value": values[statistic][row].item(),
        "bound": getattr(bounds, threshold),
    }


def print_dialects(comparison: Mapping[str, Any]) -> None:
    """Print the keep rates and the examples, 60 columns wide."""
    console = plain_console()
    section(
        console,
        f"Kept of {comparison['documents']:,} documents "
        f"({comparison['bytes'] / 1e6:.1f} MB)",
    )
    table = plain_table(
        ("dialect", False),
        ("quality", True),
        ("repetition", True),
        ("both", True),
        ("bytes", True),
    )
    for dialect, kept in comparison["dialects"].items():
        rates = [kept[name]["documents"] for name in (*SETS, "both")]
        rates.append(kept["both"]["bytes"])
        table.add_row(dialect, *(f"{rate:.1%}" for rate in rates))
    console.print(table)
    section(
        console, f"The dialects disagree on {comparison['disagreeing']:,} documents"
    )
    for example in comparison["examples"]:
        console.print(Text(example["locator"], style="bold"), soft_wrap=True)
        for dialect, verdict in example["verdicts"].items():
            text = "keep"
            if not verdict["keep"]:
                text = f"{verdict['rule'].partition('/')[2]} {verdict['value']:.4g}"
            console.print(f"  {dialect:<10} {text}")

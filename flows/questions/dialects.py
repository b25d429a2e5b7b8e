"""`gristmill dialects`: keep rates of the Gopher rules under the definitions of each
project.

Measured with the manifest's thresholds on the documents kept by the committed stages
before `filter` (by all committed stages if the manifest has no `filter`), or on a
sample of them by the hash of their ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.dataprep.documents import read_shard, shard_names
from gristmill.dataprep.filters.gopher import DIALECTS
from gristmill.dataprep.filters.rule_sets import measure
from gristmill.dataprep.thresholds import failures
from gristmill.flows.pages.page_elements import table
from gristmill.flows.pages.terminal_tables import print_table, section
from gristmill.flows.questions.find_documents import (
    NothingIngestedError,
    committed_corpus,
)
from gristmill.flows.running.session import Session
from gristmill.flows.running.terminal import plain_console
from gristmill.mixtures.schema.sources import INGEST
from gristmill.mixtures.steps.filter import Filter
from gristmill.mixtures.steps.rules import (
    GopherQuality,
    GopherRepetition,
    GopherRules,
    Rules,
)

BATCH_DOCUMENTS = 1000
SETS = ("gopher_quality", "gopher_repetition")
GopherSet = TypeVar("GopherSet", bound=GopherRules)


@dataclass(frozen=True)
class KeptShares:
    """Shares of the documents and of their bytes that rules keep."""

    documents: float
    bytes: float


@dataclass(frozen=True)
class DialectComparison:
    """Documents that each dialect keeps.

    Attributes:
        documents: number of documents judged.
        of: number of documents available.
        bytes: size of the judged documents.
        dialects: dialect -> rule set, or `both` -> what it keeps.
        disagreeing: number of documents on which dialects disagree.
    """

    documents: int
    of: int
    bytes: int
    dialects: dict[str, dict[str, KeptShares]]
    disagreeing: int

    def show(self) -> None:
        """Print the keep rates, 60 columns wide."""
        console = plain_console()
        section(
            console,
            f"Kept of {self.documents:,} documents ({self.bytes / 1e6:.1f} MB)",
        )
        rows = []
        for dialect, kept in self.dialects.items():
            rates = [kept[name].documents for name in (*SETS, "both")]
            rows.append([dialect, *rates, kept["both"].bytes])
        formats = dict.fromkeys(("quality", "repetition", "both", "bytes"), ".1%")
        print_table(console, table({"dialect": "", **formats}, rows))
        console.print(f"The dialects disagree on {self.disagreeing:,} documents")


@dataclass
class _Totals:
    documents: int = 0
    text_bytes: int = 0
    kept: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)
    """Dialect -> rule set -> documents and bytes that it keeps, int64 of shape (2,)."""
    disagreeing: int = 0


def compare_dialects(session: Session, sample: int) -> DialectComparison:
    """Judge a sample of the documents by every dialect.

    A text that cannot be measured raises its error here; the stage `filter` would
    quarantine that document alone.

    Args:
        sample: maximum number of documents to judge.

    Raises:
        NothingIngestedError: `ingest` is not committed, or kept nothing.
    """
    inputs = {}
    for name, folder in committed_corpus(session).inputs.items():
        if name != INGEST and isinstance(session.manifest.steps[name].config, Filter):
            break
        inputs[name] = folder
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
    limit, available = int(np.partition(keys, last)[last]), len(keys)
    steps = (step.config for step in session.manifest.prepare)
    filters = (config for config in steps if isinstance(config, Filter))
    configured = next(filters, Filter()).rules
    quality = configured.gopher_quality or GopherQuality()
    repetition = configured.gopher_repetition or GopherRepetition()
    sections: dict[str, Rules] = {
        dialect: Rules(
            gopher_quality=_in_dialect(quality, dialect),
            gopher_repetition=_in_dialect(repetition, dialect),
        )
        for dialect in DIALECTS
    }
    totals = _Totals()
    for shard in shard_names(inputs[INGEST]):
        read = read_shard(inputs, shard, ["id", "text", "language", "script"])
        rows = read.documents.take(pa.array(read.rows))
        rows = rows.filter(pa.array(_keys(rows["id"]) <= np.uint64(limit)))
        for start in range(0, len(rows), BATCH_DOCUMENTS):
            _judge_batch(rows.slice(start, BATCH_DOCUMENTS), sections, totals)
    shares = {
        dialect: {
            name: KeptShares(
                documents / max(totals.documents, 1),
                num_bytes / max(totals.text_bytes, 1),
            )
            for name, (documents, num_bytes) in tallies.items()
        }
        for dialect, tallies in totals.kept.items()
    }
    return DialectComparison(
        totals.documents, available, totals.text_bytes, shares, totals.disagreeing
    )


def _in_dialect(rules: GopherSet, dialect: str) -> GopherSet:
    words = rules.words
    if words == "language" and dialect != "datatrove":
        words = "dialect"
    return type(rules)(**{**rules.model_dump(), "dialect": dialect, "words": words})


def _keys(ids: pa.ChunkedArray) -> np.ndarray:
    """Return the first eight bytes of ids, which are hashes: their order is random and
    reproducible.
    """
    return np.frombuffer(b"".join(ids.to_pylist()), ">u8")[::2].astype(np.uint64)


def _judge_batch(
    rows: pa.Table, sections: Mapping[str, Rules], totals: _Totals
) -> None:
    sizes = pc.binary_length(rows["text"]).to_numpy().astype(np.int64)
    totals.documents += len(rows)
    totals.text_bytes += int(sizes.sum())
    keeps = []
    for dialect, rules in sections.items():
        masks = failures(measure(rows, rules), rules.sets)
        kept = {}
        for name in SETS:
            of_set = [mask for rule, mask in masks.items() if rule.startswith(name)]
            kept[name] = ~np.any(of_set, axis=0)
        kept["both"] = kept["gopher_quality"] & kept["gopher_repetition"]
        tallies = totals.kept.setdefault(dialect, {})
        for name, mask in kept.items():
            tally = tallies.setdefault(name, np.zeros(2, np.int64))
            tally += mask.sum(), sizes[mask].sum()
        keeps.append(kept["both"])
    is_kept = np.array(keeps)
    totals.disagreeing += int((is_kept.any(axis=0) & ~is_kept.all(axis=0)).sum())

"""`gristmill dialects`: keep rates of the Gopher rules under the definitions of each
project.

Measured with the manifest's thresholds on the documents kept by the committed stages
before `filter` (by all committed stages if the manifest has no `filter`), or on a
sample of them by the hash of their ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.dataprep.documents import read_shard, shard_names
from gristmill.dataprep.filters.gopher import DIALECTS
from gristmill.flows.authoring.measured_sample import (
    RulesVerdict,
    judge_by_rules,
    print_verdicts,
)
from gristmill.flows.pages.terminal_tables import section
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

GopherSet = TypeVar("GopherSet", bound=GopherRules)


@dataclass(frozen=True)
class DialectComparison:
    """Documents that each dialect keeps.

    Attributes:
        documents: number of documents judged.
        of: number of documents available.
        bytes: size of the judged documents.
        dialects: verdict of each.
    """

    documents: int
    of: int
    bytes: int
    dialects: list[RulesVerdict]

    def show(self) -> None:
        """Print the keep rates, 60 columns wide."""
        console = plain_console()
        size = f"{self.bytes / 1e6:.1f} MB"
        section(console, f"Kept of {self.documents:,} documents ({size})")
        print_verdicts(console, "dialect", self.dialects)


def compare_dialects(session: Session, sample: int) -> DialectComparison:
    """Judge a sample of the documents by every dialect.

    A text that cannot be measured counts as dropped here; the stage `filter` would
    quarantine it.

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
    shards = shard_names(inputs[INGEST])
    parts = [np.zeros(0, np.uint64)]
    for shard in shards:
        read = read_shard(inputs, shard, ["id"])
        parts.append(_keys(read.documents["id"].take(pa.array(read.rows))))
    keys = np.concatenate(parts)
    if len(keys) == 0:
        raise NothingIngestedError(
            "the committed stages kept no document; nothing can be measured"
        )
    last = min(sample, len(keys)) - 1
    limit = np.partition(keys, last)[last]
    tables = []
    for shard in shards:
        read = read_shard(inputs, shard, ["id", "text", "language", "script"])
        documents = read.documents.take(pa.array(read.rows))
        tables.append(documents.filter(pa.array(_keys(documents["id"]) <= limit)))
    rows = pa.concat_tables(tables, promote_options="permissive")
    sizes = pc.binary_length(rows["text"]).to_numpy().astype(np.int64)
    steps = (step.config for step in session.manifest.prepare)
    filters = (config for config in steps if isinstance(config, Filter))
    configured = next(filters, Filter()).rules
    quality = configured.gopher_quality or GopherQuality()
    repetition = configured.gopher_repetition or GopherRepetition()
    verdicts = []
    for dialect in DIALECTS:
        rules = Rules(
            gopher_quality=_in_dialect(quality, dialect),
            gopher_repetition=_in_dialect(repetition, dialect),
        )
        verdicts.append(judge_by_rules(dialect, rules, rows, sizes))
    return DialectComparison(len(rows), len(keys), int(sizes.sum()), verdicts)


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

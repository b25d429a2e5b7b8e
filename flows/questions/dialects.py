"""`gristmill dialects`: keep rates of the Gopher rules under the definitions of each
project.

Measured with the manifest's thresholds on the documents kept by the committed stages
before `filter` (by all committed stages if the manifest has no `filter`), or on a
sample of them by the hash of their ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from gristmill.dataprep.corpus import Corpus
from gristmill.dataprep.filters.gopher import DIALECTS
from gristmill.flows.authoring.measured_sample import (
    RulesVerdict,
    judge_by_rules,
    text_sizes,
    verdict_table,
)
from gristmill.flows.pages.page_elements import Heading, Parts
from gristmill.flows.pages.terminal_pages import Answer
from gristmill.flows.questions.find_documents import (
    NothingIngestedError,
    committed_corpus,
)
from gristmill.flows.questions.query import ask
from gristmill.flows.running.session import Session
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
class DialectComparison(Answer):
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

    def parts(self) -> list[Parts]:
        """Return the keep rates as parts of a page."""
        size = f"{self.bytes / 1e6:.1f} MB"
        return [
            Heading(f"Kept of {self.documents:,} documents ({size})"),
            verdict_table("dialect", self.dialects),
        ]


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
    corpus = Corpus(inputs)
    optional = [
        name if name in corpus.schema.names else f"NULL::VARCHAR AS {name}"
        for name in ("language", "script")
    ]
    # Ids are hashes: their order is random and reproducible.
    sql = (
        f"SELECT text, {', '.join(optional)} FROM documents WHERE kept "
        f"ORDER BY id LIMIT {sample}"
    )
    with ask(corpus, sql) as answer:
        rows = answer.table()
    if not len(rows):
        raise NothingIngestedError(
            "the committed stages kept no document; nothing can be measured"
        )
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
        verdicts.append(judge_by_rules(dialect, rules, rows))
    available = corpus.count_rows()
    return DialectComparison(
        len(rows), available, int(text_sizes(rows).sum()), verdicts
    )


def _in_dialect(rules: GopherSet, dialect: str) -> GopherSet:
    words = rules.words
    if words == "language" and dialect != "datatrove":
        words = "dialect"
    return type(rules)(**{**rules.model_dump(), "dialect": dialect, "words": words})

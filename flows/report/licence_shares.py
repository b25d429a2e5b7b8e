"""Licences of the documents by source, with their shares of the training data."""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace
from typing import Literal

import pyarrow as pa

from gristmill.dataprep.corpus import TEXT
from gristmill.dataprep.documents import read_table
from gristmill.dataprep.licences.shares import (
    LicenceShare,
    licence_column,
    measure_sizes,
    shares_by,
    sum_shares,
)
from gristmill.flows.pages.page_elements import Section, Table, flatten, table
from gristmill.flows.questions.find_documents import committed_corpus
from gristmill.flows.report.facts import Facts
from gristmill.flows.report.mixture import mixture_rows
from gristmill.flows.running.session import Session
from gristmill.flows.stages.registry import TOKENIZE
from gristmill.mixtures.spdx import UNKNOWN, expression_of
from gristmill.tokenize.encoding.encode import docs_name

Basis = Literal["mixture", "tokens", "text"]
SIZE_COLUMNS = ["row", "tokens", "bytes"]
BASES: dict[Basis, str] = {
    "mixture": "Shares of the training tokens of the mixture: a source's share, divided "
    "like the tokens of its kept documents.",
    "tokens": "Shares of the tokens of the kept documents.",
    "text": "Shares of the text of the kept documents.",
}


@dataclass(frozen=True)
class LicenceShares:
    """Licences of the kept documents.

    Attributes:
        basis: what `share` of `shares` and `licences` is a part of; see BASES.
        unknown: share without a known licence.
        licences: SPDX expression, or `unknown` -> share, the largest first.
        shares: by source and licence.
    """

    basis: Basis
    unknown: float
    licences: dict[str, float]
    shares: list[LicenceShare]

    def describe(self) -> str:
        """Meaning of the shares, and the one without a known licence."""
        return f"{BASES[self.basis]} Without a known licence: {self.unknown:.2%}."


def licence_shares(session: Session, facts: Facts) -> LicenceShares:
    """Shares of the licences in a manifest's committed documents.

    Raises:
        gristmill.flows.questions.find_documents.NothingIngestedError: no document is
            committed.
    """
    corpus = committed_corpus(session)
    licence = licence_column(corpus)
    folder = session.committed(TOKENIZE) if TOKENIZE in session.plan else None

    def sizes(shard: str) -> pa.Table:
        if folder is None:
            documents = corpus.read(shard, ["source", licence, TEXT])
            return measure_sizes(documents, licence)
        tokenized = read_table(folder.data / docs_name(shard), SIZE_COLUMNS)
        documents = corpus.read(shard, ["source", licence], kept=None)
        return measure_sizes(documents.take(tokenized["row"]), licence, tokenized)

    basis: Basis = "text" if folder is None else "tokens"
    shares = sum_shares(map(sizes, corpus.shards))
    if facts.packed is not None:
        basis = "mixture"
        shares = _in_mixture(session, facts, shares)
    licences = shares_by("licence", shares)
    return LicenceShares(basis, licences.get(UNKNOWN, 0.0), licences, shares)


def _in_mixture(
    session: Session, facts: Facts, shares: list[LicenceShare]
) -> list[LicenceShare]:
    """Shares of the mixture; sources of tokens have the licence of the manifest."""
    mixed = {row.source: row.share for row in mixture_rows(facts)}
    shares += [
        LicenceShare(name, expression_of(source.licence), 0, 0, None, 1.0)
        for name, source in session.manifest.token_sources.items()
    ]
    totals = shares_by("source", shares)
    return [
        replace(
            row,
            share=mixed.get(row.source, 0.0) * row.share / (totals[row.source] or 1.0),
        )
        for row in shares
    ]


def licence_table(shares: LicenceShares) -> Table:
    """Sources and licences with their sizes and shares."""
    columns = {
        "source": "",
        "licence": "",
        "documents": ",",
        "bytes": ",",
        "tokens": ",",
        "share": ".2%",
    }
    return table(columns, map(astuple, shares.shares))


def licences_section(title: str, shares: LicenceShares) -> Section:
    """The table below the meaning of its shares."""
    return Section(title, flatten([shares.describe(), licence_table(shares)]))

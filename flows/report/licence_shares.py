"""Licences of the documents by source, with their shares of the training data."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Literal

import pyarrow as pa

from gristmill.dataprep.documents import read_table
from gristmill.dataprep.licences.shares import (
    LicenceShare,
    by_licence,
    count_shares,
    shard_tables,
)
from gristmill.flows.pages.page_elements import Table, table
from gristmill.flows.questions.find_documents import committed_corpus
from gristmill.flows.report.facts import Facts
from gristmill.flows.report.mixture import mixture_rows
from gristmill.flows.running.session import Session
from gristmill.flows.stages.registry import TOKENIZE
from gristmill.mixtures.spdx import UNKNOWN, spdx_of
from gristmill.tokenize.encoding.encode import docs_name

BASES = {
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

    basis: Literal["mixture", "tokens", "text"]
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
    folder = session.committed(TOKENIZE) if TOKENIZE in session.plan else None
    basis: Literal["mixture", "tokens", "text"] = "text"
    if folder is None:
        shares = count_shares(shard_tables(corpus))
    else:
        basis = "tokens"
        data: Path = folder.data

        def tokens_of(shard: str) -> pa.Table:
            return read_table(data / docs_name(shard), ["id", "tokens", "bytes"])

        shares = count_shares(shard_tables(corpus, tokens_of))
    if facts.packed is not None:
        basis = "mixture"
        shares = _in_mixture(session, facts, shares)
    licences = by_licence(shares)
    return LicenceShares(basis, licences.get(UNKNOWN, 0.0), licences, shares)


def _in_mixture(
    session: Session, facts: Facts, shares: list[LicenceShare]
) -> list[LicenceShare]:
    """Shares of the mixture; sources of tokens have the licence of the manifest."""
    share_of_source = {row.source: row.share for row in mixture_rows(facts)}
    for name, source in session.manifest.token_sources.items():
        licence = spdx_of(source.licence or "") or UNKNOWN
        shares = [*shares, LicenceShare(name, licence, 0, 0, None, 1.0)]
    totals: dict[str, float] = defaultdict(float)
    for share in shares:
        totals[share.source] += share.share
    return [
        replace(
            share,
            share=share_of_source.get(share.source, 0.0)
            * share.share
            / (totals[share.source] or 1.0),
        )
        for share in shares
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

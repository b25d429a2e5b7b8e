"""The pages of duplicates: the clusters of a step, and two documents of one side by
side.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.dataprep.documents import (
    ID_BYTES,
    annotation_stages,
    read_table,
    shard_names,
)
from gristmill.dataprep.examples.kept_examples import CLUSTERS
from gristmill.dataprep.row_groups import read_document_rows, read_matching
from gristmill.flows.browse.addresses import (
    CLUSTERS_PAGE,
    DOCUMENTS,
    Clusters,
    OneCluster,
    address,
    corpus_parameter,
    page_links,
)
from gristmill.flows.browse.browse_elements import tabs, value_text
from gristmill.flows.browse.browsed_run import BrowsedRun, Inputs, NotThereError
from gristmill.flows.pages.page_elements import (
    Inline,
    Link,
    Mark,
    Note,
    Page,
    Part,
    Section,
    Sides,
    Span,
    Table,
    Text,
)
from gristmill.flows.pages.text_diff import differences
from gristmill.mixtures.sources import INGEST

CLUSTERS_ON_PAGE = 50
MEMBERS_ON_PAGE = 100
SIMILARITIES = {"jaccard": "Jaccard similarity", "cosine": "Cosine"}
"""Column with the similarity of two duplicates -> its name."""
MOST_CHARACTERS = 20_000
"""Of each of two texts that are compared, unless the query asks for the whole."""
MOST_WHOLE = 400_000
"""Even then: so much is compared in about a second."""


def steps_with_clusters(run: BrowsedRun) -> list[tuple[str, str]]:
    """(corpus, step) of all that searched for duplicates."""
    return [
        (name, step)
        for name, corpus in run.corpora().items()
        for step in annotation_stages(corpus)
        if (corpus[step] / CLUSTERS).exists()
    ]


def _corpus_with_clusters(run: BrowsedRun, corpus: str, step: str) -> Inputs:
    inputs = run.corpus(corpus)
    steps = steps_with_clusters(run)
    if (corpus, step) not in steps:
        raise NotThereError(
            f"{step} of {corpus} has looked for no duplicates yet; steps that have are "
            f"{', '.join(name for _, name in steps) or 'none'}"
        )
    return inputs


def clusters_page(run: BrowsedRun, query: Clusters) -> Page:
    """The clusters of a step, those that lost most documents first."""
    step, own = query.step, corpus_parameter(query.corpus)
    path = _corpus_with_clusters(run, query.corpus, step)[step] / CLUSTERS
    sizes = run.cached(
        ("clusters", query.corpus, step),
        lambda: _sizes(read_table(path, ["cluster", "survivor_locator"])),
    )
    rows: list[list[Inline]] = []
    for cluster in sizes.slice(query.after, CLUSTERS_ON_PAGE).to_pylist():
        id_ = cluster["cluster"].hex()
        link = Link(cluster["kept"], address(CLUSTERS_PAGE, step, id_, corpus=own))
        rows.append([f"{cluster['dropped']:,}", link, Span(id_[:16], "code")])
    steps = [
        (
            _step_name(corpus, name),
            address(CLUSTERS_PAGE, name, corpus=corpus_parameter(corpus)),
        )
        for corpus, name in steps_with_clusters(run)
    ]
    dropped = pc.sum(sizes["dropped"]).as_py() or 0
    meanings = {
        "dropped": "documents of the cluster",
        "kept": "one of the documents that stay",
        "cluster": "its least id",
    }
    parts: list[Part] = [
        tabs(steps, _step_name(query.corpus, step)),
        Note(
            f"{step} dropped {dropped:,} documents of {len(sizes):,} clusters; the "
            "largest come first."
        ),
        Table(["dropped", "kept", "cluster"], rows, {0}, meanings),
        page_links(
            len(sizes),
            query.after,
            CLUSTERS_ON_PAGE,
            lambda after: address(CLUSTERS_PAGE, step, corpus=own, after=after),
        ),
    ]
    return Page("Duplicates", parts=parts)


def _step_name(corpus: str, step: str) -> str:
    return step if corpus == DOCUMENTS else f"{step} of {corpus}"


def _sizes(members: pa.Table) -> pa.Table:
    """Cluster, dropped documents, and the locator of a kept one; largest first."""
    grouped = members.group_by("cluster").aggregate(
        [("cluster", "count"), ("survivor_locator", "min")]
    )
    sizes = pa.table(
        {
            "cluster": grouped["cluster"],
            "dropped": grouped["cluster_count"],
            "kept": grouped["survivor_locator_min"],
        }
    )
    return sizes.sort_by([("dropped", "descending"), ("cluster", "ascending")])


def cluster_page(run: BrowsedRun, query: OneCluster) -> Page:
    """A cluster: its dropped documents with the kept ones, and one such pair with its
    differences.
    """
    corpus = _corpus_with_clusters(run, query.corpus, query.step)
    members = read_matching(
        corpus[query.step] / CLUSTERS, "cluster", [bytes.fromhex(query.cluster)]
    )
    similarity = next(name for name in SIMILARITIES if name in members.column_names)
    members = members.sort_by(
        [(similarity, "ascending"), ("member", "ascending")]
    ).to_pylist()
    if not members:
        raise NotThereError(
            f"{query.step} has no cluster {query.cluster}; a "
            "document without duplicates has none"
        )
    pair = next(
        (member for member in members if member["member"].hex() == query.member), None
    )
    if pair is None and query.member is not None:
        raise NotThereError(
            f"the cluster {query.cluster} has lost no document {query.member}"
        )
    pair = pair or members[query.after if query.after < len(members) else 0]

    def link(**parameters: Any) -> str:
        own = corpus_parameter(query.corpus)
        return address(
            CLUSTERS_PAGE, query.step, query.cluster, corpus=own, **parameters
        )

    whole_link = link(member=pair["member"].hex(), after=query.after, whole="true")
    kept = len({member["survivor"] for member in members})
    all_clusters = address(
        CLUSTERS_PAGE, query.step, corpus=corpus_parameter(query.corpus)
    )
    counts = f" dropped {len(members):,} of its documents and kept {kept:,}."
    rows = []
    for member in members[query.after : query.after + MEMBERS_ON_PAGE]:
        id_, locator = member["member"].hex(), member["member_locator"]
        # The pair that is shown has no link to itself.
        document = (
            Span(locator, "strong")
            if member is pair
            else Link(locator, link(member=id_, after=query.after))
        )
        causes = [
            member["linked_by"] or "",
            member["survivor_locator"],
            member["decided_by"] or "",
        ]
        rows.append([value_text(member[similarity]), document, *causes])
    header = [
        SIMILARITIES[similarity],
        "dropped",
        "found by",
        "kept for it",
        "decided by",
    ]
    dropped: list[Part] = [
        Table(
            header, rows, {0}, {"dropped": "documents of the cluster that did not stay"}
        ),
        page_links(
            len(members), query.after, MEMBERS_ON_PAGE, lambda after: link(after=after)
        ),
    ]
    parts = [
        Note([Link(query.step, all_clusters), counts]),
        *_pair_parts(corpus, query, pair, similarity, whole_link),
    ]
    return Page(
        f"Cluster {query.cluster[:16]}",
        [Section("All that was dropped", dropped)],
        parts,
    )


def _pair_parts(
    corpus: Inputs,
    query: OneCluster,
    pair: dict[str, Any],
    similarity: str,
    whole_link: str,
) -> list[Part]:
    """Both texts of a pair as the step compared them; a document of an older corpus has
    no text.
    """
    before = dict(
        itertools.takewhile(lambda item: item[0] != query.step, corpus.items())
    )
    texts = texts_of(before, [pair["survivor"], pair["member"]])
    kept_text, dropped_text = texts.get(pair["survivor"]), texts.get(pair["member"])
    most = MOST_WHOLE if query.whole else MOST_CHARACTERS
    kept_pieces: Sequence[tuple[str, bool]] = ()
    dropped_pieces: Sequence[tuple[str, bool]] = ()
    if kept_text is not None and dropped_text is not None:
        kept_pieces, dropped_pieces = differences(kept_text[:most], dropped_text[:most])

    def column(
        side: Mark, document: str, text: str | None, pieces: Sequence[tuple[str, bool]]
    ) -> tuple[Inline, list[Part]]:
        link = Link(
            pair[f"{document}_locator"], address(DOCUMENTS, pair[document].hex())
        )
        title: Inline = [Span(side, side), " ", link]
        if text is None:
            return title, [Note("Its text is not in this corpus.", "plain")]
        length: list[Inline] = [f"{len(text):,} characters"]
        if len(text) > most:
            length += [
                "; the beginnings are compared, ",
                Link("compare all", whole_link),
            ]
        mark: Mark = "added" if side == "kept" else "removed"
        return title, [
            Note(length),
            Text([Span(piece, mark if differs else "") for piece, differs in pieces]),
        ]

    sentence: list[Inline] = ["These two are equal."]
    if kept_text is None or kept_text != dropped_text:
        value = Span(value_text(pair[similarity]), "strong")
        sentence = [
            f"{SIMILARITIES[similarity]} of these two: ",
            value,
            f", found by {pair['linked_by']}.",
        ]
    if pair["decided_by"]:
        values = f" decided: {pair['survivor_value']} against {pair['member_value']}."
        sentence += [" ", Span(pair["decided_by"], "code"), values]
    if pair.get("against_index"):
        sentence.append(
            f" The kept one is of the older corpus {pair['against_index']}."
        )
    kept = column("kept", "survivor", kept_text, kept_pieces)
    dropped = column("dropped", "member", dropped_text, dropped_pieces)
    return [Note(sentence, "plain"), Sides([kept, dropped])]


def texts_of(corpus: Inputs, ids: Iterable[bytes]) -> dict[bytes, str]:
    """The texts of documents by id; documents that are not in the corpus are left
    out.
    """
    remaining = set(ids)
    texts: dict[bytes, str] = {}
    for shard in shard_names(corpus[INGEST]):
        column = read_table(corpus[INGEST] / shard, ["id"])["id"]
        rows = np.flatnonzero(
            pc.is_in(
                column, pa.array(sorted(remaining), pa.binary(ID_BYTES))
            ).to_numpy()
        )
        if len(rows):
            table = read_document_rows(corpus, shard, rows.tolist(), ["id", "text"])
            texts |= dict(
                zip(table["id"].to_pylist(), table["text"].to_pylist(), strict=True)
            )
            remaining -= texts.keys()
        if not remaining:
            break
    return texts

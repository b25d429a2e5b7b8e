"""The pages of duplicates: the clusters of a step, and two documents of one side by
side.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
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
    Sides,
    Span,
    Text,
    page_of,
    section_of,
    table,
)
from gristmill.flows.pages.text_diff import Piece, differences
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
    rows = []
    for cluster in sizes.slice(query.after, CLUSTERS_ON_PAGE).to_pylist():
        id_ = cluster["cluster"].hex()
        link = Link(cluster["kept"], address(CLUSTERS_PAGE, step, id_, corpus=own))
        rows.append([cluster["dropped"], link, Span(id_[:16], "code")])
    steps = []
    for corpus, name in steps_with_clusters(run):
        parameter = corpus_parameter(corpus)
        steps.append(
            (_step_name(corpus, name), address(CLUSTERS_PAGE, name, corpus=parameter))
        )
    dropped = pc.sum(sizes["dropped"]).as_py() or 0
    counts = f"{step} dropped {dropped:,} documents of {len(sizes):,} clusters"
    meanings = {
        "dropped": "documents of the cluster",
        "kept": "one of the documents that stay",
        "cluster": "its least id",
    }
    return page_of(
        "Duplicates",
        tabs(steps, _step_name(query.corpus, step)),
        Note(f"{counts}; the largest come first."),
        table({"dropped": ",", "kept": "", "cluster": ""}, rows, meanings),
        page_links(
            len(sizes),
            query.after,
            CLUSTERS_ON_PAGE,
            lambda after: address(CLUSTERS_PAGE, step, corpus=own, after=after),
        ),
    )


def _step_name(corpus: str, step: str) -> str:
    return step if corpus == DOCUMENTS else f"{step} of {corpus}"


def _sizes(members: pa.Table) -> pa.Table:
    """Cluster, dropped documents, and the locator of a kept one; largest first."""
    grouped = members.group_by("cluster").aggregate(
        [("cluster", "count"), ("survivor_locator", "min")]
    )
    names = {"cluster_count": "dropped", "survivor_locator_min": "kept"}
    return grouped.rename_columns(
        [names.get(name, name) for name in grouped.column_names]
    ).sort_by([("dropped", "descending"), ("cluster", "ascending")])


def cluster_page(run: BrowsedRun, query: OneCluster) -> Page:
    """A cluster: its dropped documents with the kept ones, and one such pair with its
    differences.
    """
    corpus = _corpus_with_clusters(run, query.corpus, query.step)
    rows = read_matching(
        corpus[query.step] / CLUSTERS, "cluster", [bytes.fromhex(query.cluster)]
    )
    similarity = next(name for name in SIMILARITIES if name in rows.column_names)
    rows = rows.sort_by([(similarity, "ascending"), ("member", "ascending")])
    members = rows.to_pylist()
    if not members:
        raise NotThereError(
            f"{query.step} has no cluster {query.cluster}; a document without "
            "duplicates has none"
        )
    pair = members[query.after if query.after < len(members) else 0]
    if query.member is not None:
        pairs = (member for member in members if member["member"].hex() == query.member)
        named = next(pairs, None)
        if named is None:
            raise NotThereError(
                f"the cluster {query.cluster} has lost no document {query.member}"
            )
        pair = named
    own = corpus_parameter(query.corpus)

    def link(**parameters: object) -> str:
        return address(
            CLUSTERS_PAGE, query.step, query.cluster, corpus=own, **parameters
        )

    whole = link(member=pair["member"].hex(), after=query.after, whole="true")
    kept = len({member["survivor"] for member in members})
    step_link = Link(query.step, address(CLUSTERS_PAGE, query.step, corpus=own))
    counts = f" dropped {len(members):,} of its documents and kept {kept:,}."
    lines = []
    for member in members[query.after : query.after + MEMBERS_ON_PAGE]:
        place = link(member=member["member"].hex(), after=query.after)
        lines.append(
            [
                value_text(member[similarity]),
                # The pair that is shown has no link to itself.
                Span(member["member_locator"], "strong")
                if member is pair
                else Link(member["member_locator"], place),
                member["linked_by"],
                member["survivor_locator"],
                member["decided_by"],
            ]
        )
    columns = {"dropped": "", "found by": "", "kept for it": "", "decided by": ""}
    meanings = {"dropped": "documents of the cluster that did not stay"}
    dropped = section_of(
        "All that was dropped",
        table({SIMILARITIES[similarity]: ">", **columns}, lines, meanings),
        page_links(
            len(members), query.after, MEMBERS_ON_PAGE, lambda after: link(after=after)
        ),
    )
    parts = [
        Note([step_link, counts]),
        *_pair_parts(corpus, query, pair, similarity, whole),
    ]
    sections = [] if dropped is None else [dropped]
    return Page(f"Cluster {query.cluster[:16]}", sections, parts)


def _pair_parts(
    corpus: Inputs,
    query: OneCluster,
    pair: Mapping[str, Any],
    similarity: str,
    whole_link: str,
) -> list[Part]:
    """Both texts of a pair as the step compared them; a document of an older corpus has
    no text.
    """
    steps_before = itertools.takewhile(
        lambda item: item[0] != query.step, corpus.items()
    )
    texts = texts_of(dict(steps_before), [pair["survivor"], pair["member"]])
    kept_text, dropped_text = texts.get(pair["survivor"]), texts.get(pair["member"])
    most = MOST_WHOLE if query.whole else MOST_CHARACTERS
    kept_pieces, dropped_pieces = differences(
        (kept_text or dropped_text or "")[:most],
        (dropped_text or kept_text or "")[:most],
    )

    def column(
        side: Mark, document: str, text: str | None, pieces: Sequence[Piece]
    ) -> tuple[Inline, list[Part]]:
        place = address(DOCUMENTS, pair[document].hex())
        title: Inline = [
            Span(side, side),
            " ",
            Link(pair[f"{document}_locator"], place),
        ]
        if text is None:
            return title, [Note("Its text is not in this corpus.", "plain")]
        length: list[Inline] = [f"{len(text):,} characters"]
        if len(text) > most:
            all_ = Link("compare all", whole_link)
            length += ["; the beginnings are compared, ", all_]
        mark: Mark = "added" if side == "kept" else "removed"
        spans = [Span(piece, mark if differs else "") for piece, differs in pieces]
        return title, [Note(length), Text(spans)]

    sentence: list[Inline] = ["These two are equal."]
    if kept_text is None or kept_text != dropped_text:
        value = Span(value_text(pair[similarity]), "strong")
        linked_by = f", found by {pair['linked_by']}."
        sentence = [f"{SIMILARITIES[similarity]} of these two: ", value, linked_by]
    if pair["decided_by"]:
        values = f" decided: {pair['survivor_value']} against {pair['member_value']}."
        sentence += [" ", Span(pair["decided_by"], "code"), values]
    if pair.get("against_index"):
        index = pair["against_index"]
        sentence.append(f" The kept one is of the older corpus {index}.")
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

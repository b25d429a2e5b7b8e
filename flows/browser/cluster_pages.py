"""The pages of duplicates: the clusters of a step, and two documents of one side by
side.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from gristmill.dataprep.corpus import CLUSTERS
from gristmill.dataprep.documents import annotation_stages, read_table
from gristmill.dataprep.row_groups import documents_of, read_matching
from gristmill.flows.browser.browsed_run import BrowsedRun, Inputs, NotThereError
from gristmill.flows.pages.addresses import (
    DOCUMENTS,
    Hash,
    Name,
    Number,
    address,
    page_links,
)
from gristmill.flows.pages.document_elements import tabs
from gristmill.flows.pages.page_elements import (
    Inline,
    Link,
    Mark,
    Note,
    Page,
    Part,
    Parts,
    Section,
    Span,
    Text,
    flatten,
    page_of,
    table,
    value_text,
)
from gristmill.flows.pages.text_diff import COMPARED_WORDS, word_diff

CLUSTERS_ON_PAGE = 50
MEMBERS_ON_PAGE = 100
SIMILARITIES = {"jaccard": "Jaccard similarity", "cosine": "Cosine"}
"""Column with the similarity of two duplicates -> its name."""


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
            f"{step} of {corpus} has looked for no duplicates yet; steps that have are",
            (name for _, name in steps),
        )
    return inputs


def clusters_page(
    run: BrowsedRun, step: Name, corpus: Name = DOCUMENTS, after: Number = 0
) -> Page:
    """The clusters of a step, those that lost most documents first."""
    path = _corpus_with_clusters(run, corpus, step)[step] / CLUSTERS

    def read_sizes() -> pa.Table:
        members = read_table(path, ["cluster", "survivor_locator"])
        return (
            members.group_by("cluster")
            .aggregate([("cluster", "count"), ("survivor_locator", "min")])
            .sort_by([("cluster_count", "descending"), ("cluster", "ascending")])
        )

    sizes = run.cached(("clusters", corpus, step), read_sizes)
    rows = []
    for cluster in sizes.slice(after, CLUSTERS_ON_PAGE).to_pylist():
        id_ = cluster["cluster"].hex()
        place = address("duplicates", step, id_, corpus=corpus)
        link = Link(cluster["survivor_locator_min"], place)
        rows.append([cluster["cluster_count"], link, Span(id_[:16], "code")])
    steps = {
        name if in_corpus == DOCUMENTS else f"{name} of {in_corpus}": address(
            "duplicates", name, corpus=in_corpus
        )
        for in_corpus, name in steps_with_clusters(run)
    }
    dropped = pc.sum(sizes["cluster_count"]).as_py() or 0
    meanings = {
        "dropped": "documents of the cluster",
        "kept": "one of the documents that stay",
        "cluster": "its least id",
    }
    return page_of(
        "Duplicates",
        tabs(steps, step if corpus == DOCUMENTS else f"{step} of {corpus}"),
        f"{step} dropped {dropped:,} documents of {len(sizes):,} clusters; the largest "
        "come first.",
        table({"dropped": ",", "kept": "", "cluster": ""}, rows, meanings),
        page_links(
            len(sizes),
            after,
            CLUSTERS_ON_PAGE,
            lambda after: address("duplicates", step, corpus=corpus, after=after),
        ),
    )


def cluster_page(
    run: BrowsedRun,
    step: Name,
    cluster: Hash,
    corpus: Name = DOCUMENTS,
    member: Hash | None = None,
    after: Number = 0,
) -> Page:
    """A cluster: its dropped documents with the kept ones, and one such pair with its
    differences: that of `member`, or the first that is listed.
    """
    inputs = _corpus_with_clusters(run, corpus, step)
    rows = read_matching(inputs[step] / CLUSTERS, "cluster", [bytes.fromhex(cluster)])
    similarity = next(name for name in SIMILARITIES if name in rows.column_names)
    rows = rows.sort_by([(similarity, "ascending"), ("member", "ascending")])
    members = rows.to_pylist()
    if not members:
        raise NotThereError(
            f"{step} has no cluster {cluster}; a document without duplicates has none"
        )
    pair = members[after if after < len(members) else 0]
    if member is not None:
        pairs = (row for row in members if row["member"].hex() == member)
        pair = next(pairs, None)
        if pair is None:
            raise NotThereError(f"the cluster {cluster} has lost no document {member}")

    def link(**parameters: object) -> str:
        return address("duplicates", step, cluster, corpus=corpus, **parameters)

    kept = len({row["survivor"] for row in members})
    step_link = Link(step, address("duplicates", step, corpus=corpus))
    counts = f" dropped {len(members):,} of its documents and kept {kept:,}."
    lines = []
    for row in members[after : after + MEMBERS_ON_PAGE]:
        place = link(member=row["member"].hex(), after=after)
        lines.append(
            [
                value_text(row[similarity]),
                # The pair that is shown has no link to itself.
                Span(row["member_locator"], "strong")
                if row is pair
                else Link(row["member_locator"], place),
                row["linked_by"],
                row["survivor_locator"],
                row["decided_by"],
            ]
        )
    columns = {"dropped": "", "found by": "", "kept for it": "", "decided by": ""}
    meanings = {"dropped": "documents of the cluster that did not stay"}
    before = dict(itertools.takewhile(lambda item: item[0] != step, inputs.items()))
    parts = flatten([Note([step_link, counts]), _pair_parts(before, pair, similarity)])
    dropped: list[Part] = [
        table({SIMILARITIES[similarity]: ">", **columns}, lines, meanings),
        page_links(
            len(members), after, MEMBERS_ON_PAGE, lambda after: link(after=after)
        ),
    ]
    sections = [Section("All that was dropped", dropped)] if lines else []
    return Page(f"Cluster {cluster[:16]}", sections, parts)


def _pair_parts(
    corpus: Inputs, pair: Mapping[str, Any], similarity: str
) -> list[Parts]:
    """A pair, and the difference of the beginnings of both texts as the step compared
    them; a document of an older corpus has no text.
    """
    sides: dict[str, Mark] = {"survivor": "kept", "member": "dropped"}
    links = [
        Note(
            [
                Span(badge, badge),
                " ",
                Link(pair[f"{side}_locator"], address(DOCUMENTS, pair[side].hex())),
            ],
            "plain",
        )
        for side, badge in sides.items()
    ]
    documents = documents_of(corpus, {pair[side] for side in sides}, ["text"])
    kept, dropped = (documents.get(pair[side], {}).get("text", "") for side in sides)
    sentence: list[Inline] = ["These two are equal."]
    if kept != dropped:
        value = Span(value_text(pair[similarity]), "strong")
        linked_by = f", found by {pair['linked_by']}."
        sentence = [f"{SIMILARITIES[similarity]} of these two: ", value, linked_by]
    if pair["decided_by"]:
        values = f" decided: {pair['survivor_value']} against {pair['member_value']}."
        sentence += [" ", Span(pair["decided_by"], "code"), values]
    if pair.get("against_index"):
        index = pair["against_index"]
        sentence.append(f" The kept one is of the older corpus {index}.")
    legend = "The text of the kept one is not in this corpus."
    if kept and kept != dropped:
        legend = (
            f"From the dropped one ({len(dropped):,} characters) to the kept one "
            f"({len(kept):,}); the first {COMPARED_WORDS:,} words are compared."
        )
    elif kept:
        legend = f"{len(kept):,} characters."
    difference = Text(word_diff(dropped, kept or dropped))
    return [links, Note(sentence, "plain"), legend, difference]

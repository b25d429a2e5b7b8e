"""The pages of duplicates: the clusters of a step, and the documents of one side by side."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.dataprep.documents import ID_BYTES, annotation_stages, read_table, shard_names
from gristmill.dataprep.examples.kept_examples import CLUSTERS
from gristmill.dataprep.row_groups import read_document_rows, read_matching
from gristmill.flows.browse.addresses import DOCUMENTS, Clusters, OneCluster, address
from gristmill.flows.browse.browsed_run import BrowsedRun, Inputs, NotThereError
from gristmill.flows.report.text_diff import differences
from gristmill.mixtures.sources import INGEST

CLUSTERS_PAGE = "duplicates"
CLUSTERS_ON_PAGE = 50
MEMBERS_ON_PAGE = 100
LIKENESSES = {"jaccard": "Jaccard similarity", "cosine": "Cosine"}
"""Column of how alike two duplicates are -> what people call it."""
MOST_CHARACTERS = 20_000
"""Of each of two texts that are compared, unless they are wanted whole."""
MOST_WHOLE = 400_000
"""Even then: so much is compared in about a second."""


def steps_with_clusters(run: BrowsedRun) -> list[tuple[str, str]]:
    """(corpus, step) of all that have looked for duplicates."""
    return [
        (name, step)
        for name, corpus in run.corpora().items()
        for step in annotation_stages(corpus)
        if (corpus[step] / CLUSTERS).exists()
    ]


def _checked(run: BrowsedRun, corpus: str, step: str) -> Inputs:
    found = run.corpus(corpus)
    steps = steps_with_clusters(run)
    if (corpus, step) not in steps:
        raise NotThereError(
            f"{step} of {corpus} has looked for no duplicates yet; steps that have are "
            f"{', '.join(name for _, name in steps) or 'none'}"
        )
    return found


def clusters_page(run: BrowsedRun, asked: Clusters) -> dict[str, Any]:
    """The clusters of a step, those that lost most documents first."""
    corpus = _checked(run, asked.corpus, asked.step)
    path = corpus[asked.step] / CLUSTERS
    sizes = run.once(
        ("clusters", asked.corpus, asked.step), lambda: _sizes(read_table(path, ["cluster", "survivor_locator"]))
    )
    shown = sizes.slice(asked.after, CLUSTERS_ON_PAGE).to_pylist()
    own = address_of(asked.corpus)
    return {
        "step": asked.step,
        "total": len(sizes),
        "dropped": pc.sum(sizes["dropped"]).as_py() or 0,
        "clusters": [
            {
                **one,
                "id": one["cluster"].hex(),
                "link": address(CLUSTERS_PAGE, asked.step, one["cluster"].hex(), corpus=own),
            }
            for one in shown
        ],
        "others": [
            (f"{step} of {name}" if name != DOCUMENTS else step, address(CLUSTERS_PAGE, step, corpus=address_of(name)))
            for name, step in steps_with_clusters(run)
        ],
        "before": address(CLUSTERS_PAGE, asked.step, corpus=own, after=max(0, asked.after - CLUSTERS_ON_PAGE) or None)
        if asked.after
        else None,
        "next": address(CLUSTERS_PAGE, asked.step, corpus=own, after=asked.after + CLUSTERS_ON_PAGE)
        if asked.after + CLUSTERS_ON_PAGE < len(sizes)
        else None,
    }


def address_of(corpus: str) -> str | None:
    """What an address says of a corpus: nothing of that which is meant without."""
    return None if corpus == DOCUMENTS else corpus


def _sizes(twins: pa.Table) -> pa.Table:
    """Cluster, documents that it lost, and the locator of one that was kept; largest first."""
    grouped = twins.group_by("cluster").aggregate([("cluster", "count"), ("survivor_locator", "min")])
    sizes = pa.table(
        {"cluster": grouped["cluster"], "dropped": grouped["cluster_count"], "kept": grouped["survivor_locator_min"]}
    )
    return sizes.sort_by([("dropped", "descending"), ("cluster", "ascending")])


def cluster_page(run: BrowsedRun, asked: OneCluster) -> dict[str, Any]:
    """A cluster: what was dropped and what was kept for it, and one of the pairs with its differences."""
    corpus = _checked(run, asked.corpus, asked.step)
    path = corpus[asked.step] / CLUSTERS
    twins = read_matching(path, "cluster", [bytes.fromhex(asked.cluster)])
    likeness = next(name for name in LIKENESSES if name in twins.column_names)
    twins = twins.sort_by([(likeness, "ascending"), ("member", "ascending")])
    twins = twins.append_column("likeness", twins[likeness]).to_pylist()
    if not twins:
        raise NotThereError(f"{asked.step} has no cluster {asked.cluster}; a document without duplicates has none")
    chosen = next((twin for twin in twins if twin["member"].hex() == asked.member), None)
    if chosen is None and asked.member is not None:
        raise NotThereError(f"the cluster {asked.cluster} has lost no document {asked.member}")
    chosen = chosen or twins[asked.after if asked.after < len(twins) else 0]
    own = address_of(asked.corpus)

    def link(**more: Any) -> str:
        return address(CLUSTERS_PAGE, asked.step, asked.cluster, corpus=own, **more)

    return {
        "step": asked.step,
        "cluster": asked.cluster,
        "list": address(CLUSTERS_PAGE, asked.step, corpus=own),
        "total": len(twins),
        "kept": len({twin["survivor"] for twin in twins}),
        "after": asked.after,
        "measure": LIKENESSES[likeness],
        "twins": [
            {
                **twin,
                "survivor": twin["survivor"].hex(),
                "member": twin["member"].hex(),
                "is_chosen": twin is chosen,
                "link": link(member=twin["member"].hex(), after=asked.after),
            }
            for twin in twins[asked.after : asked.after + MEMBERS_ON_PAGE]
        ],
        "pair": _pair(corpus, asked, chosen),
        "whole_link": link(member=chosen["member"].hex(), after=asked.after, whole="true"),
        "before": link(after=max(0, asked.after - MEMBERS_ON_PAGE) or None) if asked.after else None,
        "next": link(after=asked.after + MEMBERS_ON_PAGE) if asked.after + MEMBERS_ON_PAGE < len(twins) else None,
    }


def _pair(corpus: Inputs, asked: OneCluster, twin: dict[str, Any]) -> dict[str, Any]:
    """Both texts of a pair as the step compared them, in pieces; of an older corpus's document there is no text."""
    seen = dict(itertools.takewhile(lambda item: item[0] != asked.step, corpus.items()))
    ids = [twin["survivor"], twin["member"]]
    texts = texts_of(seen, ids)
    most = MOST_WHOLE if asked.whole else MOST_CHARACTERS
    ours, theirs = (texts.get(one) for one in ids)
    pieces: Any = ([], [])
    if ours is not None and theirs is not None:
        pieces = differences(ours[:most], theirs[:most])
    return {
        "sides": [
            {
                "id": one.hex(),
                "link": address(DOCUMENTS, one.hex()),
                "locator": locator,
                "title": title,
                "pieces": side,
                "characters": None if text is None else len(text),
                "cut": text is not None and len(text) > most,
            }
            for one, locator, title, side, text in zip(
                ids,
                (twin["survivor_locator"], twin["member_locator"]),
                ("kept", "dropped"),
                pieces,
                (ours, theirs),
                strict=True,
            )
        ],
        "likeness": twin["likeness"],
        "linked_by": twin["linked_by"],
        "decided_by": twin["decided_by"],
        "values": (twin["survivor_value"], twin["member_value"]),
        "against_index": twin.get("against_index"),
        "equal": ours is not None and ours == theirs,
    }


def texts_of(corpus: Inputs, ids: Iterable[bytes]) -> dict[bytes, str]:
    """The texts of some documents, found by the columns of ids; those that are not there are left out."""
    wanted = set(ids)
    found: dict[bytes, str] = {}
    for shard in shard_names(corpus[INGEST]):
        column = read_table(corpus[INGEST] / shard, ["id"])["id"]
        rows = np.flatnonzero(pc.is_in(column, pa.array(sorted(wanted), pa.binary(ID_BYTES))).to_numpy())
        if len(rows):
            table = read_document_rows(corpus, shard, rows.tolist(), ["id", "text"])
            found |= dict(zip(table["id"].to_pylist(), table["text"].to_pylist(), strict=True))
        if len(found) == len(wanted):
            break
    return found

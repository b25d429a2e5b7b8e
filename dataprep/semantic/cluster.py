"""Stage `cluster`: number and name the clusters of documents with similar meaning, for
selection and weighting.

1. embed: per shard, the vectors of its documents, and sampled vectors with the
   beginnings of their texts.
2. fit: the centroids, largest cluster first, their names and their places on a map,
   from the sample.
3. apply: per shard, the annotation table and the vectors.

A task holds a shard or the sample: two copies of 256 MB of vectors, and at most 2,000
characters per document.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypedDict

import numpy as np
import pyarrow as pa

from gristmill.core.stage_context import Context
from gristmill.dataprep.conservation import Counted, Counts, add_counts, balance
from gristmill.dataprep.documents import Inputs
from gristmill.dataprep.encoders.document_scores import Reader, describe_reader
from gristmill.dataprep.runners.shuffle import Shuffled, run_stream
from gristmill.dataprep.runners.tasks import (
    Done,
    ShardTask,
    Task,
    run_tasks,
    shard_tasks,
)
from gristmill.dataprep.semantic.centroids import fit_centroids, nearest_centroids
from gristmill.dataprep.semantic.cluster_names import name_clusters, project
from gristmill.dataprep.semantic.embedding_store import unpack_vectors
from gristmill.dataprep.semantic.vector_jobs import (
    CENTROIDS,
    SAMPLE,
    VectorPlan,
    embed,
    make_plan,
    read_centroids,
    read_sample,
    read_vectors,
    write_centroids,
    write_shard,
)
from gristmill.mixtures.base import Recipe
from gristmill.mixtures.steps.dedup_semantic import Cluster

MOST_POINTS = 1_000
"""Maximum number of sampled documents on the map."""


class DomainPlace(TypedDict):
    """Cluster of documents with a name, and its place on the map."""

    domain: int
    name: str
    x: float
    y: float


class Domain(DomainPlace):
    """Cluster with its number of documents."""

    documents: int


Point = Sequence[float]
"""Place of a sampled document on the map, x and y, and the number of its cluster."""


@dataclass(frozen=True)
class ClusterSummary:
    """Summary of the clusters.

    Attributes:
        counts: documents by outcome.
        domains: the clusters, largest first.
        map: places of up to MOST_POINTS sampled documents.
        sample: documents that the clusters were learned from.
        reader: the model, and the amount of text that it read.
    """

    counts: Counts
    domains: Sequence[Domain]
    map: Sequence[Point]
    sample: int
    reader: Reader


class FittedDomains(TypedDict):
    """Result of learning and naming the clusters; see `ClusterSummary`."""

    sample: int
    domains: list[DomainPlace]
    map: list[Point]


class ClusteredShard(Counted):
    """Result of writing a shard's annotations."""

    domains: dict[str, int]
    """Number of a cluster -> documents."""


def run(inputs: Inputs, config: Recipe, out: Path, context: Context) -> ClusterSummary:
    """Annotate every kept document with number (`domain`) and name (`domain_name`) of
    its cluster; drops no document.

    Writes one annotation table per document shard, `centroids.npy` and `vectors/`, as
    `dedup_semantic` does.

    Args:
        inputs: `ingest`, and the earlier annotating stages.
        config: the manifest's `cluster` section
            (`mixtures.steps.dedup_semantic.Cluster`).

    Raises:
        ModelFolderError: the model does not exist, or a package is missing.
        ConservationError, QuarantineError: see `counts`.
    """
    section = Cluster.model_validate(config)
    plan = make_plan(inputs, section, out, context)
    shards = shard_tasks(inputs["ingest"])
    embedded, sample = run_stream(
        "embed",
        shards,
        partial(embed, plan=plan, with_texts=True),
        context,
        1,
        SAMPLE,
    )
    (fitted,) = run_tasks(
        "fit",
        [Task("centroids")],
        partial(fit, plan=plan, sample=sample),
        context,
    )
    names = [domain["name"] for domain in fitted["domains"]]
    applied = run_tasks(
        "apply", shards, partial(apply, plan=plan, names=names), context
    )
    sizes = add_counts(result["domains"] for result in applied)
    return ClusterSummary(
        balance(applied, section.max_quarantined, context.stage, errors=out),
        [
            Domain(**domain, documents=sizes.get(str(domain["domain"]), 0))
            for domain in fitted["domains"]
        ],
        fitted["map"],
        fitted["sample"],
        describe_reader(section.model, plan.sha256, embedded),
    )


def fit(task: Task, plan: VectorPlan, sample: Shuffled) -> Done[FittedDomains]:
    """Learn the centroids from the sample, sorted by id, and name the clusters."""
    rows = read_sample(sample)
    vectors = unpack_vectors(rows["vector"])
    centroids = fit_centroids(vectors, plan.clusters, plan.section.seed)
    sizes = np.bincount(nearest_centroids(vectors, centroids), minlength=len(centroids))
    centroids = centroids[np.argsort(-sizes, kind="stable")]
    write_centroids(plan.out, centroids)
    cluster_of_row = nearest_centroids(vectors, centroids)
    names = name_clusters(rows["text"].to_pylist(), cluster_of_row, len(centroids))
    places, points = project(vectors, cluster_of_row, len(centroids), MOST_POINTS)
    return Done(
        [plan.out / CENTROIDS],
        {
            "sample": len(vectors),
            "domains": [
                {"domain": number, "name": name, "x": x, "y": y}
                for number, (name, (x, y)) in enumerate(zip(names, places, strict=True))
            ],
            "map": [
                [x, y, int(domain)]
                for (x, y), domain in zip(points, cluster_of_row, strict=False)
            ],
        },
    )


def apply(task: ShardTask, plan: VectorPlan, names: list[str]) -> Done[ClusteredShard]:
    """Write the annotations of one shard, and its vectors."""
    embedded = read_vectors(plan, task.name)
    domain = nearest_centroids(
        unpack_vectors(embedded["vector"]), read_centroids(plan.out)
    )
    measures = {
        "domain": pa.array(domain),
        "domain_name": pa.array(names, pa.string()).take(domain),
    }
    files, counts = write_shard(
        plan,
        task.name,
        embedded,
        measures,
        measures["domain"],
        pa.nulls(len(domain), pa.string()),
    )
    sizes = Counter(map(str, domain.tolist()))
    return Done(files, {"counts": counts, "domains": dict(sizes)})

"""First jobs of `cluster` and `dedup_semantic`: the vectors of all documents, a sample
of them, and its centroids.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.core.arrays import binary_numbers
from gristmill.core.files import array_bytes, write_bytes
from gristmill.core.stage_context import Context
from gristmill.dataprep.annotate_batches import merge_annotations
from gristmill.dataprep.conservation import Counts
from gristmill.dataprep.document_numbers import Numbering, number_documents
from gristmill.dataprep.documents import (
    Inputs,
    positions,
    read_shard,
    write_table,
)
from gristmill.dataprep.encoders.document_scores import ReadCounts
from gristmill.dataprep.encoders.embeddings import load_embedder
from gristmill.dataprep.encoders.model_folders import folder_sha256, needed
from gristmill.dataprep.runners.shuffle import Sending, Sent, Shuffled
from gristmill.dataprep.runners.tasks import Done, ShardTask, Task
from gristmill.dataprep.semantic.centroids import (
    count_clusters,
    count_sample,
    draw,
    fit_centroids,
)
from gristmill.dataprep.semantic.embedding_store import embed_shard, unpack_vectors
from gristmill.dataprep.shuffle_format import open_batches, task_file, write_rows
from gristmill.mixtures.steps.dedup_semantic import Cluster, DedupSemantic

SAMPLE, CENTROIDS, VECTORS = "sample", "centroids.npy", "vectors"
"""Stream of the sample for k-means, file of the centroids, folder with the vectors of
kept documents.
"""
BEGINNING = 2_000
"""Code points of each text that are sent with the sample."""


@dataclass(frozen=True)
class VectorPlan:
    """Settings shared by all tasks of a stage with vectors.

    Attributes:
        inputs: the documents, with merged annotations of the earlier steps
            (`annotate_batches.merge_annotations`).
        measured: inputs with every annotating stage, for the columns of `keep`.
        sha256: hash of the model's folder.
        clusters: number of k-means clusters.
        sample: number of documents to learn them from.
    """

    inputs: Inputs
    measured: Inputs
    section: DedupSemantic | Cluster
    sha256: str
    numbering: Numbering
    clusters: int
    sample: int
    work: Path
    out: Path


def make_plan(
    inputs: Inputs,
    section: DedupSemantic | Cluster,
    out: Path,
    context: Context,
) -> VectorPlan:
    """Number the documents and choose the number of clusters and the size of the
    sample.
    """
    needed("sklearn.cluster")
    sha256 = folder_sha256(section.model.path)
    dim = load_embedder(section.model, sha256).dim
    numbering = number_documents(inputs["ingest"])
    configured = section.k if isinstance(section, Cluster) else section.clusters
    clusters = configured or count_clusters(numbering.num_new)
    return VectorPlan(
        merge_annotations(inputs, context),
        inputs,
        section,
        sha256,
        numbering,
        clusters,
        count_sample(clusters, dim),
        context.work,
        out,
    )


def embed(
    task: ShardTask, plan: VectorPlan, with_texts: bool = False
) -> Sending[ReadCounts]:
    """Write the vectors of one shard's documents, and send the sampled ones.

    Args:
        with_texts: also send the beginnings of their texts.
    """
    section = plan.section
    batch, sizes_and_errors, texts, read_counts = embed_shard(
        plan.inputs, task.name, section.sources, section.model, plan.sha256
    )
    paths = [vectors_path(plan, task.name), seen_path(plan, task.name)]
    write_rows(paths[0], batch)
    write_rows(paths[1], sizes_and_errors)
    beginnings = binary_numbers(batch["id"], ">u8")[:, 0].astype(np.uint64)
    drawn = pa.array(
        draw(beginnings, section.seed, plan.sample, plan.numbering.num_new)
    )
    sample = batch.select(["id", "vector"]).filter(drawn)
    if with_texts:
        sample = sample.append_column(
            "text", pc.utf8_slice_codeunits(texts.filter(drawn), 0, BEGINNING)
        )
    yield Sent(SAMPLE, sample, np.zeros(len(sample), np.int64))
    return Done(paths, read_counts)


def vectors_path(plan: VectorPlan, shard: str) -> Path:
    """File with the vectors of a shard's documents."""
    return task_file(plan.work, "embedded", shard)


def seen_path(plan: VectorPlan, shard: str) -> Path:
    """File with the text sizes and errors of all documents of a shard."""
    return task_file(plan.work, "embedded", f"{shard}.seen")


def read_vectors(plan: VectorPlan, shard: str) -> pa.Table:
    """Read the documents of a shard that have vectors, ascending by row; see
    `embedding_store.embed_shard`.
    """
    return open_batches(vectors_path(plan, shard)).read_all()


def write_shard(
    plan: VectorPlan,
    name: str,
    embedded: pa.Table,
    measures: Mapping[str, pa.Array],
    centroid: pa.Array,
    reasons: pa.Array,
) -> tuple[list[Path], Counts]:
    """Write the annotations of one shard, and the vectors of kept documents.

    Args:
        embedded: the documents, from `read_vectors`.
        measures, centroid, reasons: values of these documents.

    Returns:
        the files, and the counts of the shard.
    """
    shard = read_shard(plan.inputs, name, ["id", "source"], plan.section.sources)
    rows = positions(shard.judged, embedded["row"].to_numpy())
    sizes_and_errors = open_batches(seen_path(plan, name)).get_batch(0)
    paths = [plan.out / name, plan.out / VECTORS / name]
    counts = shard.write(
        paths[0],
        reasons.take(rows),
        {column: values.take(rows) for column, values in measures.items()},
        sizes_and_errors["error"].take(shard.judged),
        sizes_and_errors["bytes"],
    )
    vectors = embedded.select(["id", "vector"]).append_column("centroid", centroid)
    write_table(paths[1], vectors.filter(reasons.is_null()), repeating=())
    return paths, counts


def read_sample(sample: Shuffled) -> pa.Table:
    """Read the sampled documents, sorted by id: `vector` and, if sent, `text`."""
    if sample.is_nothing:
        return pa.table(
            {"vector": pa.array([], pa.binary(2)), "text": pa.array([], pa.string())}
        )
    return sample.read(0).sort_by("id")


def fit(task: Task, plan: VectorPlan, sample: Shuffled) -> Done:
    """Learn the centroids from the sample, sorted by id."""
    vectors = unpack_vectors(read_sample(sample)["vector"])
    write_centroids(plan.out, fit_centroids(vectors, plan.clusters, plan.section.seed))
    return Done([plan.out / CENTROIDS])


def write_centroids(out: Path, centroids: np.ndarray) -> None:
    """Write the centroids into an output."""
    write_bytes(out / CENTROIDS, array_bytes(centroids))


def read_centroids(out: Path) -> np.ndarray:
    """Read the centroids of an output: float32 of shape (k, dim)."""
    with (out / CENTROIDS).open("rb") as stream:
        centroids: np.ndarray = np.load(stream, allow_pickle=False)
    return centroids

"""The stage `cluster`: one number and one name per subject, whatever computes it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gristmill.dataprep.conservation import check_conservation
from gristmill.dataprep.semantic import cluster
from gristmill.dataprep.semantic.cluster_names import name_clusters, project
from tests.dataprep.document_shards import (
    MakeContext,
    WriteIngest,
    file_contents,
    rows_by_id,
)

SUBJECTS = {
    "bread": "the baker kneads dough of flour and yeast, and bakes bread in the hot "
    "oven".split(),
    "court": "the judge of the court heard the lawyer and sentenced the thief to "
    "prison".split(),
    "stars": "the telescope shows galaxies, planets and stars that orbit in the "
    "night sky".split(),
}


def documents() -> list[tuple[str, str, str]]:
    """Ten texts on each subject, of its words in random order."""
    rng = random.Random(1)
    return [
        ("web", f"{subject}-{number}", " ".join(rng.sample(words, len(words) - 2)))
        for number in range(10)
        for subject, words in SUBJECTS.items()
    ]


Run = Callable[..., tuple[Path, dict[str, Any]]]


@pytest.fixture
def run(
    write_ingest: WriteIngest, make_context: MakeContext, tmp_path: Path, mini_lm: Path
) -> Run:
    """Run the stage: (name, shards, **settings of BeamEngine) -> output folder,
    summary.
    """

    def run(
        name: str, shards: Sequence[Any], **context: Any
    ) -> tuple[Path, dict[str, Any]]:
        out = tmp_path / f"{name}-out"
        return out, cluster.run(
            {"ingest": write_ingest(f"{name}-ingest", shards)},
            {"model": str(mini_lm), "k": 3},
            out,
            make_context(f"{name}-work", **context),
        )

    return run


@pytest.mark.slow
def test_each_subject_is_one_cluster_named_by_its_words(
    run: Run, tmp_path: Path
) -> None:
    out, summary = run("subjects", [documents()])
    check_conservation(summary.counts, "cluster")
    assert summary.counts["kept"] == 30
    rows = list(rows_by_id(out).values())
    subjects = [document[1].split("-")[0] for document in documents()]
    assert (
        len(
            {
                (subject, row["domain"])
                for subject, row in zip(subjects, rows, strict=True)
            }
        )
        == 3
    )
    for subject, row in zip(subjects, rows, strict=True):
        assert set(row["domain_name"].split()) <= {
            word.strip(",") for word in SUBJECTS[subject]
        } - {"the", "and"}
    domains = summary.domains
    assert [(domain["domain"], domain["documents"]) for domain in domains] == [
        (0, 10),
        (1, 10),
        (2, 10),
    ]
    assert {row["domain"]: row["domain_name"] for row in rows} == {
        domain["domain"]: domain["name"] for domain in domains
    }
    assert len(summary.map) == 30


@pytest.mark.slow
def test_workers_shards_and_engine_do_not_change_the_clusters(run: Run) -> None:
    shards = [documents()[start::3] for start in range(3)]
    first, summary = run("one", shards)
    for name, context in {
        "three": {"workers": 3, "mode": "threads"},
        "engine": {
            "runner": "FnApiRunner",
            "options": {"direct_running_mode": "in_memory"},
        },
    }.items():
        out, other_summary = run(name, shards, **context)
        assert (other_summary, file_contents(out)) == (summary, file_contents(first)), (
            name
        )
    single_shard, _ = run("whole", [documents()])
    assert rows_by_id(single_shard) == rows_by_id(first)


def test_empty_input_has_no_clustered_documents(run: Run) -> None:
    _, summary = run("none", [[]])
    assert summary.counts["read"] == 0
    assert [domain["documents"] for domain in summary.domains] == [0]


def test_cluster_name_has_the_most_distinctive_words() -> None:
    texts = [
        "the mill grinds grain",
        "the mill grinds corn",
        "the sea is deep",
        "the sea has waves",
    ]
    assert name_clusters(texts, np.array([0, 0, 1, 1]), 3) == [
        "grinds mill corn grain",
        "sea deep has waves",
        "empty",
    ]
    assert name_clusters(["1 2", "a b"], np.array([0, 0]), 1) == ["no words"]


def test_map_projects_on_the_principal_components() -> None:
    rng = np.random.default_rng(2)
    vectors = rng.normal(size=(500, 5)) * [0.1, 3.0, 0.1, 1.0, 0.1]
    middles, points = project(vectors, np.arange(500), 500, 100)
    assert len(points) == 100
    assert points == middles[:100]
    projected = np.array(points)
    centred = vectors - vectors.mean(axis=0)
    assert np.abs(projected - centred[:100, [1, 3]]).max() < 0.5


def test_cluster_lies_at_the_mean_of_its_documents_on_the_map() -> None:
    """Vectors of length 1 around two directions: the centroid of each, of length 1 too,
    would stand outside.
    """
    rng = np.random.default_rng(3)
    clusters = np.repeat([0, 1], [60, 40])
    vectors = np.eye(8)[clusters] + rng.normal(size=(100, 8)) * 0.6
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    middles, points = project(vectors, clusters, 3, 100)
    for number in range(2):
        cluster_points = np.array(points)[clusters == number]
        assert np.abs(cluster_points.mean(axis=0) - middles[number]).max() < 0.001
        assert (cluster_points.min(axis=0) < middles[number]).all()
        assert (middles[number] < cluster_points.max(axis=0)).all()
    assert middles[2] == (0.0, 0.0)

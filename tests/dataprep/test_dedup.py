"""The stage `dedup`: duplicates and survivors follow from the documents alone."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gristmill.dataprep.conservation import check_conservation
from gristmill.dataprep.dedup import dedup
from gristmill.dataprep.dedup.repeats import Clusters
from gristmill.dataprep.dedup.survivors import add_clusters, describe_clusters
from gristmill.dataprep.documents import document_id, write_table
from tests.dataprep.document_shards import (
    Document,
    file_contents,
    rewrite_texts,
    rows_by_id,
)

PEPS = Path(__file__).parents[3] / "shared" / "data" / "dedup" / "pep_revisions"


def text(seed: int, words: int = 200) -> str:
    return " ".join(
        f"w{random.Random(seed * 1000 + step).randrange(5000)}" for step in range(words)
    )


def edited(original: str, edits: int, seed: int = 0) -> str:
    """Text with `edits` words replaced."""
    words = original.split()
    for place in random.Random(seed).sample(range(len(words)), edits):
        words[place] = f"edit{place}"
    return " ".join(words)


def planted() -> dict[str, Document]:
    """Documents by role: unrelated, exact copies, near copies, empty and very short
    texts.
    """
    documents = {f"alone{n}": ("web", f"alone{n}", text(n)) for n in range(20)}
    documents |= {
        f"exact{n}": (source, f"exact{n}", text(100))
        for n, source in enumerate(["web", "books", "code"])
    }
    documents |= {
        f"near{n}": ("web", f"near{n}", edited(text(200), n, n) + " end" * n)
        for n in range(4)
    }
    documents |= {
        "both": ("web", "both", text(200)),
        "loud": ("web", "loud", text(300).upper() + "!"),
    }
    documents |= {"quiet": ("web", "quiet", text(300))}
    documents |= {f"empty{n}": ("web", f"empty{n}", "") for n in range(2)}
    documents |= {"dots": ("web", "dots", "..."), "dashes": ("web", "dashes", "---")}
    documents |= {
        "short": ("web", "short", "Two words"),
        "shorter": ("web", "shorter", "two words."),
    }
    return documents


@pytest.fixture
def run(run_stage: Callable) -> Callable:
    """Run the stage: (name, shards, settings, **settings of BeamEngine) -> output
    folder, summary.
    """

    def run(*arguments: Any, **engine: Any) -> tuple[Path, dedup.DedupSummary]:
        inputs, summary = run_stage(dedup, "dedup", *arguments, **engine)
        return inputs["dedup"], summary

    return run


def names(out: Path, documents: dict[str, Document]) -> dict[str, dict[str, Any]]:
    """Rows by role, ids replaced by roles."""
    role = {document_id(*document): name for name, document in documents.items()}
    rows = {role[key]: row for key, row in rows_by_id(out).items()}
    return {
        name: {**row, "duplicate_of": role.get(row["duplicate_of"])}
        for name, row in rows.items()
    }


def test_planted_duplicates_are_dropped_and_unrelated_documents_kept(
    run: Callable,
) -> None:
    documents = planted()
    out, summary = run("all", [list(documents.values())])
    rows = names(out, documents)
    check_conservation(summary.counts, "dedup")
    assert all(
        rows[f"alone{n}"]["keep"] and rows[f"alone{n}"]["cluster_size"] == 1
        for n in range(20)
    )
    assert all(
        rows[f"alone{n}"]["cluster"] == rows[f"alone{n}"]["id"] for n in range(20)
    )
    # Longest first, then by source: of three equal texts that from "books" survives.
    assert [rows[f"exact{n}"]["keep"] for n in range(3)] == [False, True, False]
    assert {
        (rows[f"exact{n}"]["reason"], rows[f"exact{n}"]["jaccard"]) for n in (0, 2)
    } == {("exact_duplicate", 1.0)}
    family = ["near0", "near1", "near2", "near3", "both"]
    assert [rows[name]["keep"] for name in family] == [False, False, False, True, False]
    assert {rows[name]["duplicate_of"] for name in family} == {"near3", None}
    assert {rows[name]["reason"] for name in family} == {"near_duplicate", None}
    assert len({rows[name]["cluster"] for name in family}) == 1
    assert min(rows[name]["id"] for name in family) == rows["both"]["cluster"]
    assert rows["quiet"]["duplicate_of"] == "loud"
    assert (rows["quiet"]["reason"], rows["quiet"]["jaccard"]) == (
        "near_duplicate",
        1.0,
    )
    assert sorted(rows[f"empty{n}"]["keep"] for n in range(2)) == [False, True]
    assert rows["dots"]["keep"]
    assert rows["dashes"]["keep"]
    assert (rows["short"]["keep"], rows["shorter"]["duplicate_of"]) == (False, None)
    assert summary.clusters == 5
    assert summary.cluster_sizes["5-8"] == 1
    assert summary.counts["dropped"] == {"exact_duplicate": 3, "near_duplicate": 6}
    assert summary.largest_clusters[0] == {
        "cluster": rows["both"]["cluster"].hex(),
        "survivor": rows["near3"]["id"].hex(),
        "locator": "near3",
        "size": 5,
        "kind": "revision",
    }


def test_cluster_table_names_the_survivor_and_the_deciding_key(run: Callable) -> None:
    documents = planted()
    out, _ = run("all", [list(documents.values())])
    rows = names(out, documents)
    table = pq.read_table(out / "clusters.parquet").to_pylist()
    order = [(row["cluster"], row["member"]) for row in table]
    assert order == sorted(order)
    twins = {row["member"]: row for row in table}
    assert len(twins) == 9
    web = twins[rows["exact0"]["id"]]
    assert (web["survivor"], web["cluster"]) == (
        rows["exact1"]["id"],
        rows["exact1"]["cluster"],
    )
    assert (web["decided_by"], web["survivor_value"], web["member_value"]) == (
        "source",
        "books",
        "web",
    )
    quiet = twins[rows["quiet"]["id"]]
    length = len(documents["quiet"][2])
    assert (quiet["decided_by"], quiet["survivor_value"]) == (
        "length desc",
        str(length + 1),
    )
    assert quiet["jaccard"] == 1.0
    assert [row["jaccard"] for row in twins.values()] == [
        rows[name]["jaccard"]
        for member in twins
        for name in rows
        if rows[name]["id"] == member
    ]


@pytest.mark.slow
def test_survivors_rule_drops_only_documents_similar_to_a_kept_one(
    run: Callable,
) -> None:
    words = text(7, 2000).split()
    windows = [
        ("web", f"{n:02d}", " ".join(words[24 * n : 24 * n + 200])) for n in range(60)
    ]
    shuffled = random.Random(3).sample(windows, len(windows))
    rows_of_rule = {}
    for rule, shards in (
        ("survivors", [windows]),
        ("connected", [windows]),
        ("again", [shuffled[:25], shuffled[25:]]),
    ):
        config = {
            "keep": ["locator"],
            "minhash": {"bands": 28, "rows": 4},
            "clusters": rule,
        }
        config["clusters"] = "survivors" if rule == "again" else rule
        out, summary = run(rule, shards, config)
        rows_of_rule[rule] = rows_by_id(out)
        assert summary.linked_pairs >= 59
        assert summary.uncompared == 0
        assert summary.dropped_by_rule == {"survivors": 30, "connected": 59}
    assert rows_of_rule["again"] == rows_of_rule["survivors"]
    chained = [
        row["jaccard"]
        for row in rows_of_rule["connected"].values()
        if row["reason"] == "chained_duplicate"
    ]
    assert (
        len(chained),
        sum(row["keep"] for row in rows_of_rule["connected"].values()),
    ) == (58, 1)
    dropped = [row for row in rows_of_rule["survivors"].values() if not row["keep"]]
    assert {row["reason"] for row in dropped} == {"near_duplicate"}
    assert min(row["jaccard"] for row in dropped) >= 0.75
    assert len(dropped) == 30
    assert {row["cluster_size"] for row in rows_of_rule["survivors"].values()} == {2}
    assert len({row["cluster"] for row in rows_of_rule["survivors"].values()}) == 1


@pytest.mark.slow
def test_shards_workers_and_order_do_not_change_the_result(run: Callable) -> None:
    documents = list(planted().values())
    shuffled = random.Random(4).sample(documents, len(documents))
    cut = [shuffled[at : at + 5] for at in range(0, len(shuffled), 5)]
    first, first_summary = run("one", [documents])
    second, second_summary = run("cut", cut)
    third, third_summary = run("two", cut, workers=2)
    assert rows_by_id(first) == rows_by_id(second)
    assert (first / "clusters.parquet").read_bytes() == (
        second / "clusters.parquet"
    ).read_bytes()
    assert file_contents(second) == file_contents(third)
    assert first_summary == second_summary == third_summary


@pytest.mark.slow
def test_resumed_run_writes_the_same_bytes(
    run: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dedup, "LEAST_KEY_BYTES", 1)  # several partitions of few keys
    documents = list(planted().values())
    cut = [documents[at : at + 8] for at in range(0, len(documents), 8)]
    undisturbed, summary = run("whole", cut)
    again, _ = run("again", cut)
    work = tmp_path / "again-work"
    for record in (
        "sketch/part-00001.parquet.json",
        "sketches/part-00002.parquet.arrow",
        "pairs/00003-0.arrow",
        "verify/00001.json",
        "labels/00000-0.arrow",
        "members/part-00001.parquet.json",
        "decisions/00000-0.arrow",
        "apply/part-00000.parquet.json",
    ):
        (work / record).unlink()
    (again / "part-00003.parquet").unlink()
    (again / "index" / "part-00002.parquet").unlink()
    (again / "index" / "index.json").unlink()
    (again / "clusters.parquet").unlink()
    repeated, repeated_summary = run("again", cut)
    assert file_contents(repeated) == file_contents(undisturbed)
    assert repeated_summary == summary


@pytest.mark.parametrize(
    ("keep", "survivor"),
    [
        (("length desc",), "long"),
        (("length",), "short"),
        (("source", "length desc"), "books"),
        (("source desc",), "web"),
        (("locator",), "books"),
        (("score desc", "locator desc"), "web"),
        (("score",), "short"),
        (("rating", "locator"), "books"),
    ],
)
def test_keep_keys_choose_the_survivor(
    keep: tuple[str, ...],
    survivor: str,
    write_ingest: Callable,
    make_context: Callable,
    tmp_path: Path,
) -> None:
    original = text(1)
    documents = {
        "short": ("prose", "c", original),
        "long": ("prose", "d", original + " and more"),
        "books": ("books", "a", original + " end"),
        "web": ("web", "z", original + " fin"),
    }
    ingest = write_ingest("ingest", [list(documents.values())])
    ids = pq.read_table(ingest / "part-00000.parquet")["id"]
    quality = pa.table(
        {
            "id": ids,
            "keep": pa.array([True] * 4),
            "score": pa.array([0.25, 0.5, None, 0.5]),
            "rating": pa.array(["b", None, "a", "a"]).dictionary_encode(),
        }
    )
    write_table(tmp_path / "quality" / "part-00000.parquet", quality)
    inputs = {"ingest": ingest, "quality": tmp_path / "quality"}
    dedup.run(inputs, {"keep": list(keep)}, tmp_path / "out", make_context("work"))
    assert [
        name for name, row in names(tmp_path / "out", documents).items() if row["keep"]
    ] == [survivor]


def test_only_kept_documents_of_the_sources_are_compared(
    write_ingest: Callable, make_context: Callable, tmp_path: Path
) -> None:
    documents = {
        name: (source, name, text(1))
        for name, source in [
            ("dropped", "web"),
            ("kept", "web"),
            ("second", "web"),
            ("other", "books"),
        ]
    }
    ingest = write_ingest("ingest", [list(documents.values())])
    ids = pq.read_table(ingest / "part-00000.parquet")["id"]
    write_table(
        tmp_path / "langid" / "part-00000.parquet",
        pa.table({"id": ids, "keep": pa.array([False, True, True, True])}),
    )
    inputs = {"ingest": ingest, "langid": tmp_path / "langid"}
    config = {"sources": ["web"], "keep": ["locator"]}
    summary = dedup.run(inputs, config, tmp_path / "out", make_context("work"))
    rows = names(tmp_path / "out", documents)
    assert {name: row["keep"] for name, row in rows.items()} == {
        "dropped": None,
        "kept": True,
        "second": False,
        "other": True,
    }
    assert (rows["second"]["duplicate_of"], rows["second"]["cluster_size"]) == (
        "kept",
        2,
    )
    assert (rows["other"]["cluster"], rows["dropped"]["cluster"]) == (None, None)
    assert (summary.counts["read"], summary.counts["kept"]) == (3, 2)


@pytest.mark.parametrize(
    ("config", "dropped"),
    [
        ({"exact": True, "minhash": None}, {"exact_duplicate": 4}),
        # equal texts without words are not compared
        ({"exact": False}, {"exact_duplicate": 2, "near_duplicate": 6}),
        ({"exact": False, "minhash": None}, {}),
        ({"minhash": {"threshold": 1.0}}, {"exact_duplicate": 4, "near_duplicate": 2}),
        ({"minhash": {"verify": False}}, {"exact_duplicate": 3, "near_duplicate": 6}),
    ],
)
def test_each_method_can_be_switched_off(
    run: Callable, config: dict[str, Any], dropped: dict[str, int]
) -> None:
    _, summary = run("all", [list(planted().values())], config)
    assert summary.counts["dropped"] == dropped


def test_unknown_keep_key_is_rejected_before_any_work(
    write_ingest: Callable, make_context: Callable, tmp_path: Path
) -> None:
    ingest = write_ingest("ingest", [[("web", "a", "text")]])
    with pytest.raises(ValueError, match=r"'lenght'.* length, id, source, locator"):
        dedup.run(
            {"ingest": ingest},
            {"keep": ["lenght desc"]},
            tmp_path / "out",
            make_context("work"),
        )
    with pytest.raises(ValueError, match="'length descending'"):
        dedup.run(
            {"ingest": ingest},
            {"keep": ["length descending"]},
            tmp_path / "out",
            make_context("work"),
        )
    assert not (tmp_path / "out").exists()


def test_text_that_is_not_utf8_is_quarantined_and_not_compared(
    write_ingest: Callable, make_context: Callable, tmp_path: Path
) -> None:
    ingest = write_ingest("ingest", [[("web", str(row), text(1)) for row in range(3)]])
    rewrite_texts(
        ingest / "part-00000.parquet", [b"caf\xe9", *([text(1).encode()] * 2)]
    )
    summary = dedup.run(
        {"ingest": ingest},
        {"max_quarantined": 0.5},
        tmp_path / "out",
        make_context("work"),
    )
    assert (summary.counts["quarantined"], summary.counts["kept"]) == (1, 1)
    (row,) = [row for row in rows_by_id(tmp_path / "out").values() if row["error"]]
    assert (row["reason"], row["cluster"], row["cluster_size"]) == (
        "quarantine",
        None,
        None,
    )
    assert "UTF8" in row["error"]
    check_conservation(summary.counts, "dedup")


def test_oversized_bucket_is_one_cluster(run: Callable) -> None:
    template = text(1)
    documents = [
        ("web", str(row), f"{template} for customer{row}") for row in range(80)
    ]
    _, summary = run("all", [documents[:30], documents[30:]])
    assert summary.candidate_pairs < 80 * 79 // 2
    assert (summary.clusters, summary.counts["kept"]) == (1, 1)


def test_empty_corpus_and_single_document_are_allowed(run: Callable) -> None:
    empty, summary = run("empty", [[]])
    assert summary.clusters == 0
    assert pq.read_table(empty / "clusters.parquet").num_rows == 0
    _, summary = run("single", [[("web", "a", text(1))]])
    assert (summary.counts["kept"], summary.largest_clusters) == (1, [])


@pytest.mark.slow
@pytest.mark.skipif(not PEPS.exists(), reason="the PEP revisions are not here")
def test_pep_revisions_are_found_with_exact_jaccard_similarities(run: Callable) -> None:
    """Other code computed the exact Jaccard similarities (word 5-grams) of all pairs.

    Bands of 14 x 8 find a pair of similarity 0.8 with probability 0.92, and the cluster
    finds most of the others.
    """
    import zstandard

    def lines(name: str) -> list[dict[str, Any]]:
        with zstandard.open(
            PEPS / f"{name}.jsonl.zst", "rt", encoding="utf-8"
        ) as stream:
            return [json.loads(line) for line in stream]

    documents = {row["id"]: ("peps", row["id"], row["text"]) for row in lines("docs")}
    similarity = {
        frozenset((row["a"], row["b"])): row["jaccard_w5"] for row in lines("pairs")
    }
    cut = [sorted(documents.values())[at::4] for at in range(4)]
    out, _ = run("peps", cut, workers=2)
    rows = names(out, documents)
    alike = [tuple(pair) for pair, jaccard in similarity.items() if jaccard >= 0.8]
    clustered = sum(rows[a]["cluster"] == rows[b]["cluster"] for a, b in alike)
    dropped = {name: row for name, row in rows.items() if not row["keep"]}
    exact = {
        name: similarity.get(frozenset((name, row["duplicate_of"])), 0.0)
        for name, row in dropped.items()
    }
    assert all(
        abs(row["jaccard"] - exact[name]) < 2e-3 for name, row in dropped.items()
    )
    assert clustered / len(alike) > 0.99
    assert min(exact.values()) >= 0.75


def test_clusters_are_added_by_size() -> None:
    def part(*sizes: int) -> Clusters:
        ids = [bytes([size % 251]) * 16 for size in sizes]
        survivors = {
            "cluster": pa.array(ids, pa.binary(16)),
            "member": pa.array(ids, pa.binary(16)),
            "member_locator": [str(size) for size in sizes],
            "size": pa.array(sizes, pa.int32()),
        }
        return describe_clusters(pa.table(survivors))

    total = add_clusters([part(2, 4, 3), part(), part(5000, *range(5, 17))])
    sizes = {name: number for name, number in total["cluster_sizes"].items() if number}
    assert sizes == {"2": 1, "3-4": 2, "5-8": 4, "9-16": 8, "more": 1}
    largest = [int(cluster["locator"]) for cluster in total["largest_clusters"]]
    assert largest == [5000, *range(16, 7, -1)]

"""The stage `dedup` by URL and against older corpora."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from gristmill.dataprep.conservation import check_conservation
from gristmill.dataprep.dedup import (
    candidate_pairs,
    components,
    dedup,
    sketches,
    survivors,
)
from gristmill.dataprep.dedup.dedup_index import IndexMismatchError, best_matches
from gristmill.dataprep.documents import document_id
from gristmill.dataprep.runners import shuffle
from gristmill.mixtures.base import outside_paths
from gristmill.mixtures.steps.dedup import Dedup
from tests.dataprep.document_shards import Document, file_contents


def text(seed: int, words: int = 400) -> str:
    return " ".join(
        f"w{random.Random(seed * 1000 + step).randrange(5000)}" for step in range(words)
    )


def edited(seed: int, edits: int) -> str:
    """Text with some words replaced; each replacement changes five of its 396
    shingles.
    """
    words = text(seed).split()
    for place in range(edits):
        words[7 * place + 3] = f"edit{place}"
    return " ".join(words)


def page(url: str, content: str) -> Document:
    """Document whose locator is its URL."""
    return ("web", url, content)


@pytest.fixture
def run_dedup(
    write_ingest: Callable, make_context: Callable, tmp_path: Path
) -> Callable:
    """Deduplicate documents by role: (name, documents, config) -> output folder, rows
    by role, summary.
    """

    def run(
        name: str,
        documents: dict[str, Document],
        config: dict[str, Any],
        shards: int = 1,
        **context: Any,
    ) -> tuple[Path, dict[str, dict[str, Any]], dict[str, Any]]:
        roles = {document_id(*document): role for role, document in documents.items()}
        listed = list(documents.values())
        ingest = write_ingest(
            f"{name}-ingest", [listed[at::shards] for at in range(shards)]
        )
        out = tmp_path / f"{name}-out"
        summary = dedup.run(
            {"ingest": ingest}, config, out, make_context(f"{name}-work", **context)
        )
        check_conservation(summary.counts, "dedup")
        rows = [
            row
            for path in out.glob("part-*.parquet")
            for row in pq.read_table(path).to_pylist()
        ]
        return out, {roles[row["id"]]: row for row in rows}, summary

    return run


def reasons(rows: dict[str, dict[str, Any]]) -> dict[str, str | None]:
    return {role: row["reason"] for role, row in sorted(rows.items())}


def twins(out: Path, documents: dict[str, Document]) -> dict[str, dict[str, Any]]:
    roles = {document_id(*document): role for role, document in documents.items()}
    return {
        roles[row["member"]]: row
        for row in pq.read_table(out / "clusters.parquet").to_pylist()
    }


PAGES = {
    "long": page("https://a.org/x", text(1) + " and some more"),
    "short": page("http://www.a.org/x/?utm_source=b#top", text(2)),
    "copy": page("https://b.org/copy", text(2)),
    "near": page("https://c.org/near", edited(1, 1)),
    "other": page("https://a.org/y", text(3)),
    "nowhere": ("files", "a/b.txt", text(4)),
    "nowhere2": ("files", "a/c.txt", text(5)),
}


def test_files_of_matches_stay_closed_without_an_index(tmp_path: Path) -> None:
    plan: Any = SimpleNamespace(indexes=[])
    matches = shuffle.Shuffled(tmp_path, 1, ["missing.arrow"])
    assert len(best_matches(plan, 0, matches)) == 0


def test_documents_with_the_same_normalised_url_are_duplicates(
    run_dedup: Callable,
) -> None:
    kept = reasons(run_dedup("survivors", PAGES, {"url": True})[1])
    assert kept == {
        **dict.fromkeys(PAGES),
        "near": "near_duplicate",
        "short": "url_duplicate",
    }
    out, rows, summary = run_dedup("url", PAGES, {"url": True, "clusters": "connected"})
    assert reasons(rows) == {
        "copy": "chained_duplicate",
        "long": None,
        "near": "near_duplicate",
        "nowhere": None,
        "nowhere2": None,
        "other": None,
        "short": "url_duplicate",
    }
    table = twins(out, PAGES)
    assert {role: row["linked_by"] for role, row in table.items()} == {
        "copy": "chain",
        "near": "minhash",
        "short": "url",
    }
    assert {row["survivor_locator"] for row in table.values()} == {"https://a.org/x"}
    assert table["short"]["member_locator"] == PAGES["short"][1]
    assert table["short"]["jaccard"] == rows["short"]["jaccard"] == 0.0
    assert table["near"]["jaccard"] > 0.75
    assert summary.counts["dropped"] == {
        "chained_duplicate": 1,
        "near_duplicate": 1,
        "url_duplicate": 1,
    }
    assert rows["copy"]["cluster_size"] == 4


def test_url_of_the_metadata_overrides_the_locator(
    write_ingest: Callable, make_context: Callable, tmp_path: Path
) -> None:
    ingest = write_ingest(
        "ingest", [[("web", f"record-{row}", text(row)) for row in range(3)]]
    )
    path = ingest / "part-00000.parquet"
    table = pq.read_table(path)
    urls = [
        json.dumps({"url": url})
        for url in ("https://a.org/1", "http://a.org/1/", "https://a.org/2")
    ]
    pq.write_table(table.set_column(4, table.schema.field("metadata"), [urls]), path)
    config = {"url": True, "exact": False, "minhash": None, "keep": ["locator"]}
    summary = dedup.run(
        {"ingest": ingest}, config, tmp_path / "out", make_context("work")
    )
    assert summary.counts["dropped"] == {"url_duplicate": 1}
    (row,) = pq.read_table(tmp_path / "out" / "clusters.parquet").to_pylist()
    assert (row["linked_by"], row["jaccard"], row["decided_by"]) == (
        "url",
        None,
        "locator",
    )


OLD = {
    "old_a": page("https://old.org/a", text(10)),
    "old_a_copy": page("https://old.org/a-copy", text(10)),
    "old_b": page("https://old.org/b", text(11)),
    "old_c": page("https://old.org/c", text(12)),
}
NEW = {
    "exact": page("https://new.org/a", text(10)),
    "near": page("https://new.org/b", edited(11, 2)),
    "url": page("http://www.old.org/c/", text(20)),
    "beside_near": page("https://new.org/b2", edited(11, 4)),
    "fresh": page("https://new.org/fresh", text(21)),
    "fresh_copy": page("https://new.org/fresh2", text(21)),
}


def test_documents_that_match_an_older_corpus_are_dropped_with_the_match(
    run_dedup: Callable,
) -> None:
    old, old_rows, old_summary = run_dedup(
        "old", OLD, {"url": True, "keep": ["locator"]}
    )
    assert old_rows["old_a_copy"]["reason"] == "exact_duplicate"
    out, rows, summary = run_dedup(
        "new", NEW, {"url": True, "keep": ["locator"], "against": [str(old)]}
    )
    assert reasons(rows) == {
        "beside_near": "against_near_duplicate",
        "exact": "against_exact_duplicate",
        "fresh": None,
        "fresh_copy": "exact_duplicate",
        "near": "against_near_duplicate",
        "url": "against_url_duplicate",
    }
    assert summary.against == [dedup.AgainstIndex(old_summary.index, documents=3)]
    matches = {"exact": "old_a", "near": "old_b", "url": "old_c"}
    for new_role, old_role in matches.items():
        row = rows[new_role]
        assert row["duplicate_of"] == document_id(*OLD[old_role])
        assert (row["against_index"], row["against_locator"]) == (
            old_summary.index,
            OLD[old_role][1],
        )
    assert (
        rows["fresh_copy"]["against_index"],
        rows["fresh_copy"]["against_locator"],
    ) == (None, None)
    assert rows["near"]["cluster"] == rows["beside_near"]["cluster"]
    table = twins(out, NEW)
    assert table["near"]["survivor_locator"] == "https://old.org/b"
    assert (table["near"]["linked_by"], table["near"]["against_index"]) == (
        "minhash",
        old_summary.index,
    )
    assert (table["near"]["decided_by"], table["near"]["survivor_value"]) == (
        "against",
        None,
    )
    assert 0.75 <= table["near"]["jaccard"] == rows["near"]["jaccard"] < 1
    assert table["exact"]["linked_by"] == "exact"
    assert table["fresh_copy"]["against_index"] is None


@pytest.mark.slow
def test_older_documents_drop_only_direct_matches(run_dedup: Callable) -> None:
    """a is near old (0.90), b is near a (0.90) but not near old (0.82): once a is
    dropped, b is not a duplicate.
    """
    config = {
        "keep": ["locator"],
        "minhash": {"threshold": 0.85, "bands": 28, "rows": 4},
    }
    old, _, _ = run_dedup("old", {"old": page("https://old.org", text(1))}, config)
    new = {
        "a": page("https://new.org/a", edited(1, 4)),
        "b": page("https://new.org/b", edited(1, 8)),
    }
    assert reasons(run_dedup("alone", new, config)[1]) == {
        "a": None,
        "b": "near_duplicate",
    }
    _, rows, _ = run_dedup("new", new, {**config, "against": [str(old)]})
    assert reasons(rows) == {"a": "against_near_duplicate", "b": None}
    assert rows["a"]["cluster"] == rows["b"]["cluster"]
    assert rows["b"]["cluster_size"] == 1
    _, rows, _ = run_dedup(
        "connected", new, {**config, "against": [str(old)], "clusters": "connected"}
    )
    assert reasons(rows) == {"a": "against_near_duplicate", "b": None}
    assert rows["b"]["cluster_size"] == 2


@pytest.mark.slow
def test_copies_share_the_match_of_their_text(run_dedup: Callable) -> None:
    old, _, _ = run_dedup(
        "old", {"old": page("https://old.org/x", text(1))}, {"url": True}
    )
    new = {f"copy{n}": page(f"https://new.org/{n}", edited(1, 1)) for n in range(3)}
    new |= {"same_url": page("https://old.org/x", edited(1, 1))}
    _, rows, _ = run_dedup("new", new, {"url": True, "against": [str(old)]}, shards=2)
    near = "against_near_duplicate"
    assert reasons(rows) == {
        "copy0": near,
        "copy1": near,
        "copy2": near,
        "same_url": "against_url_duplicate",
    }
    assert len({row["jaccard"] for row in rows.values()}) == 1


@pytest.mark.slow
def test_corpus_grows_part_by_part_against_several_indexes(run_dedup: Callable) -> None:
    parts = [
        {f"{part}-{seed}": page(f"{part}/{seed}", text(seed)) for seed in seeds}
        for part, seeds in (("first", [1, 2]), ("second", [2, 3]), ("third", [1, 3, 4]))
    ]
    outs: list[str] = []
    kept = []
    for number, part in enumerate(parts):
        out, rows, _ = run_dedup(
            f"part{number}", part, {"against": list(outs)}, shards=2
        )
        outs.append(str(out))
        kept.append(sorted(role for role, row in rows.items() if row["keep"]))
    assert kept == [["first-1", "first-2"], ["second-3"], ["third-4"]]
    assert rows["third-1"]["against_locator"] == "first/1"
    assert rows["third-3"]["against_locator"] == "second/3"
    assert rows["third-1"]["against_index"] != rows["third-3"]["against_index"]


def by_role(rows: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return dict(sorted(rows.items()))


@pytest.mark.parametrize(
    "rule", ["survivors", pytest.param("connected", marks=pytest.mark.slow)]
)
def test_shards_partitions_and_workers_do_not_change_the_result(
    run_dedup: Callable, monkeypatch: pytest.MonkeyPatch, rule: str
) -> None:
    rng = random.Random(8)
    old = {
        f"old{n}": page(f"https://old.org/{n}", edited(n % 12, n // 12))
        for n in range(30)
    }
    new = {
        f"new{n}": page(
            f"https://{'old' if n % 9 == 0 else 'new'}.org/{n}", edited(n % 16, n // 8)
        )
        for n in range(60)
    }
    new |= {
        f"copy{n}": page(f"https://copy.org/{n}", text(n % 4 + 11)) for n in range(8)
    }
    new |= {f"twin{n}": page(f"https://twin.org/{n}", text(50)) for n in range(2)}
    # Copies, pages of one URL and near copies overlap, so that the choice of
    # representatives could matter.
    new |= {
        f"mixed{n}": page(f"https://mixed.org/{n % 3}?utm_id={n}", edited(60, n % 2))
        for n in range(9)
    }
    config = {"url": True, "clusters": rule}

    def attempt(
        name: str, shards: int, partitions: int, workers: int
    ) -> tuple[Any, ...]:
        monkeypatch.setattr(dedup, "count_partitions", lambda size, fewest: partitions)
        monkeypatch.setattr(
            dedup, "count_star_partitions", lambda links: max(1, partitions // 2)
        )
        monkeypatch.setattr(candidate_pairs, "PARTITION_BYTES", 10**9 // partitions**10)
        monkeypatch.setattr(candidate_pairs, "PAIRS_PER_RUN", 10**6 // partitions**6)
        monkeypatch.setattr(components, "LINKS_PER_RUN", 10**6 // partitions**6)
        monkeypatch.setattr(survivors, "MEMBERS_PER_PARTITION", 10**6 // partitions**5)
        mixed = dict(rng.sample(sorted(old.items()), len(old)))
        index, _, _ = run_dedup(
            f"{name}-old", mixed, config, shards=max(1, shards - 1), workers=workers
        )
        mixed = dict(rng.sample(sorted(new.items()), len(new)))
        out, rows, summary = run_dedup(
            name, mixed, {**config, "against": [str(index)]}, shards, workers=workers
        )
        return (
            by_role(rows),
            (out / "clusters.parquet").read_bytes(),
            summary,
        )

    first = attempt("one", 1, 1, 1)
    assert {
        "against_exact_duplicate",
        "against_url_duplicate",
        "against_near_duplicate",
        "near_duplicate",
        "exact_duplicate",
    } <= set(first[2].counts["dropped"])
    second = attempt("cut", 4, 7, 2)
    assert first == second


@pytest.mark.parametrize(
    ("config", "facts"),
    [
        ({"minhash": {"ngram": 4}}, "ngram 5, .* 4"),
        ({"minhash": {"bands": 7}}, "bands 14, .* 7"),
        ({"minhash": {"rows": 4}}, "rows 8, .* 4"),
        ({"minhash": {"seed": 2}}, "seed 1, .* 2"),
        ({"url": True}, "url None, .* 1"),
    ],
)
def test_index_with_other_settings_is_rejected_with_the_field(
    config: dict[str, Any], facts: str, run_dedup: Callable
) -> None:
    old, _, _ = run_dedup("old", {"old_a": OLD["old_a"]}, {})
    with pytest.raises(IndexMismatchError, match=facts):
        run_dedup("new", NEW, {**config, "against": [str(old)]})


def test_settings_of_methods_that_are_off_may_differ(run_dedup: Callable) -> None:
    old, _, _ = run_dedup("old", OLD, {"url": True, "minhash": {"ngram": 3}})
    _, rows, _ = run_dedup("new", NEW, {"minhash": None, "against": [str(old)]})
    assert {
        role for role, row in rows.items() if row["reason"] == "against_exact_duplicate"
    } == {"exact"}


@pytest.mark.slow
def test_index_is_found_in_a_store_or_a_copy_but_only_if_finished(
    run_dedup: Callable, tmp_path: Path
) -> None:
    old, _, _ = run_dedup("old", {"old_a": OLD["old_a"]}, {})
    stage = tmp_path / "store" / "dedup" / "demo--0123"
    shutil.copytree(old, stage / "data")
    for place in (stage, old, old / "index"):
        _, rows, _ = run_dedup(
            f"new-{place.name}", {"exact": NEW["exact"]}, {"against": [str(place)]}
        )
        assert rows["exact"]["reason"] == "against_exact_duplicate"
    (old / "index" / "index.json").unlink()
    with pytest.raises(IndexMismatchError, match="finished index"):
        run_dedup("unfinished", NEW, {"against": [str(old)]})
    without, _, summary = run_dedup(
        "without", {"old_a": OLD["old_a"]}, {"index": False}
    )
    assert summary.index is None
    assert not (without / "index").exists()


@pytest.mark.slow
def test_index_id_is_a_hash_of_its_content(run_dedup: Callable) -> None:
    names = [
        run_dedup(name, documents, config, shards)[2].index
        for name, documents, config, shards in [
            ("a", OLD, {}, 1),
            ("b", dict(reversed(OLD.items())), {}, 3),
            ("c", NEW, {}, 1),
            ("d", OLD, {"url": True}, 1),
        ]
    ]
    assert names[0] == names[1]
    assert len(set(names)) == 3


def test_indexes_are_outside_paths() -> None:
    section = Dedup.model_validate({"against": ["a", "b"]})
    assert [(location, str(path)) for location, path in outside_paths(section)] == [
        (("against", 0), "a"),
        (("against", 1), "b"),
    ]


@pytest.mark.slow
def test_shuffled_sketches_give_the_same_bytes_as_local_ones(
    run_dedup: Callable, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = {"url": True, "keep": ["locator"]}
    old, _, _ = run_dedup("old", OLD, config, shards=2)
    template = " ".join(f"w{at}" for at in range(300))
    new = {
        **NEW,
        **PAGES,
        **{
            f"t{n}": page(f"https://t.org/{n}", f"{template} end{n}")
            for n in range(candidate_pairs.LARGEST_BUCKET + 6)
        },
    }
    config["against"] = [str(old)]
    looked_up, _, summary = run_dedup("looked-up", new, config, shards=3)

    lookups: list[Path] = []

    class Counted(sketches.ShardSketches):
        def parts(self, documents: np.ndarray) -> Iterator[Any]:
            lookups.append(self.work)
            return super().parts(documents)

    monkeypatch.setattr(candidate_pairs, "ShardSketches", Counted)
    monkeypatch.setattr(candidate_pairs, "BYTES_PER_BATCH", 5_000)
    monkeypatch.setattr(shuffle, "BATCH_BYTES", 2_000)
    engine = {"runner": "FnApiRunner", "options": {"direct_running_mode": "in_memory"}}
    shuffled, _, shuffled_summary = run_dedup(
        "travelled", new, config, shards=3, shuffle="engine", **engine
    )
    assert shuffled_summary == summary
    assert file_contents(looked_up) == file_contents(shuffled)
    assert not lookups

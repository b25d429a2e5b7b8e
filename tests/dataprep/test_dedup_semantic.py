"""The stage `dedup_semantic`: paraphrases are found, one survives, and the result
follows from the documents alone.
"""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gristmill.dataprep.conservation import check_conservation
from gristmill.dataprep.dedup import dedup
from gristmill.dataprep.dedup import semantic as dedup_semantic
from gristmill.dataprep.dedup.semantic_pairs import BLOCK, survivors_in_order
from gristmill.dataprep.documents import document_id
from gristmill.dataprep.semantic import vector_jobs
from gristmill.dataprep.semantic.centroids import (
    count_clusters,
    count_sample,
    draw,
    fit_centroids,
    nearest_centroids,
)
from gristmill.dataprep.semantic.embedding_store import pack_vectors, unpack_vectors
from tests.dataprep.document_shards import file_contents, rewrite_texts, rows_by_id
from tests.dataprep.small_models import WORDS, write_word_vectors

PARAPHRASES = [
    (
        "The cat is sleeping on the warm windowsill this afternoon.",
        "This afternoon a cat sleeps on the windowsill, where it is warm.",
    ),
    (
        "The central bank raised interest rates by a quarter of a percentage point "
        "on Wednesday.",
        "On Wednesday, interest rates were increased by 0.25 percentage points by "
        "the central bank.",
    ),
    (
        "Heavy rain flooded several streets in the old town during the night.",
        "During the night, several old town streets were flooded by heavy rainfall.",
    ),
    (
        "Photosynthesis lets plants turn sunlight, water and carbon dioxide into "
        "sugar and oxygen.",
        "Plants use photosynthesis to convert light from the sun, carbon dioxide and "
        "water to oxygen and sugar.",
    ),
    (
        "The company will close two of its factories and cut nine hundred jobs next "
        "year.",
        "Next year nine hundred jobs are to go at the company as two factories shut.",
    ),
    (
        "To reset your password, click the link in the email that we have sent you.",
        "Click on the link we sent you by email in order to reset the password.",
    ),
    (
        "The train from Hamburg to Berlin was delayed by forty minutes because of a "
        "signal failure.",
        "A signal failure made the Hamburg to Berlin train forty minutes late.",
    ),
    (
        "Whisk the eggs with the sugar until the mixture is pale and thick.",
        "Beat eggs and sugar together until you have a thick, pale mixture.",
    ),
    (
        "The museum is open every day except Monday from ten in the morning to six "
        "in the evening.",
        "Opening hours of the museum: 10 am to 6 pm daily, closed on Mondays.",
    ),
    (
        "Regular exercise lowers the risk of heart disease.",
        "The risk of heart disease is reduced by exercising regularly.",
    ),
    (
        "The Nile is generally regarded as the longest river in Africa.",
        "Africa's longest river is usually considered to be the Nile.",
    ),
    (
        "Her first novel sold more than a million copies within a year.",
        "Within one year, over a million copies of her debut novel were sold.",
    ),
    (
        "A hash table finds a value by its key in constant time on average.",
        "On average, looking up a value by key in a hash table takes constant time.",
    ),
    (
        "The mayor promised to build five thousand affordable flats by the end of "
        "the decade.",
        "By the decade's end, five thousand affordable apartments will be built, the "
        "mayor has promised.",
    ),
    (
        "Bees communicate the direction of food to each other by dancing.",
        "By dancing, bees tell one another in which direction there is food.",
    ),
    (
        "The battery of this phone lasts two days and charges fully in under an hour.",
        "This phone has a battery that runs for two days, and a full charge takes "
        "less than an hour.",
    ),
    (
        "The court dismissed the appeal and upheld the original sentence.",
        "The original sentence was upheld when the court rejected the appeal.",
    ),
    (
        "Mount Everest was first climbed in 1953 by Edmund Hillary and Tenzing Norgay.",
        "In 1953 Tenzing Norgay and Edmund Hillary became the first to climb Mount "
        "Everest.",
    ),
    (
        "Water the tomatoes every morning, and never wet their leaves.",
        "Tomatoes should be watered each morning without getting the leaves wet.",
    ),
    (
        "The two countries signed a treaty that ends their dispute about fishing.",
        "A treaty ending the fishing dispute was signed by both countries.",
    ),
]
UNLIKE = [
    (
        "The dog is barking at the postman in front of the gate.",
        "The dog is eating a bone in the kitchen behind the door.",
    ),
    (
        "The central bank left interest rates where they were on Wednesday.",
        "The blood bank is asking for donors before the holidays.",
    ),
    (
        "The bridge over the river was closed for repairs in March.",
        "The song about the river was the band's first success in March.",
    ),
    (
        "Mitosis divides one cell into two cells with the same chromosomes.",
        "Prisoners are held two to a cell in the old wing of the prison.",
    ),
    (
        "The firm hired four hundred engineers for its new research centre.",
        "The university gave its new research prize to a historian.",
    ),
    (
        "To delete your account, write to our support team.",
        "To open a bank account, bring your passport to any branch.",
    ),
    (
        "The flight from Oslo to Madrid landed early.",
        "The ferry from Oslo to Kiel carries two thousand passengers.",
    ),
    (
        "Knead the dough for ten minutes and let it rest.",
        "Paint the door with two coats and let it dry.",
    ),
    (
        "The library lends films and games as well as books.",
        "The bookshop on the corner closed after sixty years.",
    ),
    (
        "Smoking damages the lungs and the heart.",
        "A smoking chimney should be swept before winter.",
    ),
    (
        "The Amazon carries more water than any other river.",
        "Amazon delivers most parcels within a day.",
    ),
    (
        "His second film was a failure at the box office.",
        "His second marriage was to a Danish painter.",
    ),
    (
        "A stack returns what was put in last.",
        "A stack of plates fell off the kitchen table.",
    ),
    (
        "The mayor opened a playground beside the school.",
        "The school's playground is being used as a car park.",
    ),
    (
        "Ants follow trails of scent that others have left.",
        "Perfume makers test each scent on strips of paper.",
    ),
    (
        "This camera takes sharp pictures in low light.",
        "This lamp gives a low light that is pleasant to read by.",
    ),
    (
        "The jury could not agree on a verdict.",
        "The jury of the film festival gave the prize to a comedy.",
    ),
    (
        "The South Pole was first reached in 1911 by Roald Amundsen.",
        "The polar bear lives in the Arctic and eats seals.",
    ),
    (
        "Prune the roses at the end of February.",
        "Send a dozen roses to the hotel by the end of the day.",
    ),
    (
        "The two teams drew their last match of the season.",
        "The artist drew two portraits in her last year.",
    ),
]
STATIC_THRESHOLD = 0.95


@pytest.fixture(scope="module")
def words_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_word_vectors(tmp_path_factory.mktemp("words")))


def documents_of(
    pairs: Sequence[tuple[str, str]], name: str
) -> list[tuple[str, str, str]]:
    return [
        ("web", f"{name}-{number}-{side}", text)
        for number, pair in enumerate(pairs)
        for side, text in enumerate(pair)
    ]


def shuffled_words(number: int, seed: int) -> list[tuple[str, str, str]]:
    """Texts of twelve words, each in two orders and with one word more."""
    rng = random.Random(seed)
    documents = []
    for text in range(number):
        words = rng.choices(WORDS, k=12)
        shuffled = rng.sample(words, len(words))
        documents += [
            ("a", f"{text}-0", " ".join(words)),
            ("b", f"{text}-1", " ".join(shuffled)),
            ("b", f"{text}-2", " ".join([*words, rng.choice(WORDS)])),
        ]
    return documents


Run = Callable[..., tuple[Path, dict[str, Any]]]


@pytest.fixture
def run(write_ingest: Callable, make_context: Callable, tmp_path: Path) -> Run:
    """Run the stage: (name, shards, settings, **settings of BeamEngine) -> output
    folder, summary.
    """

    def run(
        name: str, shards: Sequence[Any], config: Mapping[str, Any], **context: Any
    ) -> tuple[Path, dict[str, Any]]:
        ingest = write_ingest(f"{name}-ingest", shards)
        out = tmp_path / f"{name}-out"
        return out, dedup_semantic.run(
            {"ingest": ingest},
            dict(config),
            out,
            make_context(f"{name}-work", **context),
        )

    return run


def test_paraphrases_that_minhash_misses_are_found(
    run: Run,
    mini_lm: Path,
    write_ingest: Callable,
    make_context: Callable,
    tmp_path: Path,
) -> None:
    """Precision and recall on forty pairs: half are paraphrases, half share only
    words.
    """
    documents = [*documents_of(PARAPHRASES, "same"), *documents_of(UNLIKE, "other")]
    locators = {document_id(*document): document[1] for document in documents}
    rows_of_method = {}
    out, summary = run("all", [documents], {"model": str(mini_lm), "threshold": 0.8})
    check_conservation(summary.counts, "dedup_semantic")
    rows_of_method["meaning"] = rows_by_id(out)
    dedup.run(
        {"ingest": tmp_path / "all-ingest"},
        {},
        tmp_path / "minhash",
        make_context("minhash-work"),
    )
    rows_of_method["minhash"] = rows_by_id(tmp_path / "minhash")
    true_pairs, false_pairs = {}, {}
    for name, rows in rows_of_method.items():
        pairs = {
            (locators[key][:-2], locators[row["duplicate_of"]][:-2])
            for key, row in rows.items()
            if row["duplicate_of"] is not None
        }
        true_pairs[name] = sum(
            duplicate == survivor and duplicate.startswith("same")
            for duplicate, survivor in pairs
        )
        false_pairs[name] = len(pairs) - true_pairs[name]
    assert (true_pairs["minhash"], false_pairs["minhash"]) == (0, 0)
    assert true_pairs["meaning"] >= 17, true_pairs  # recall 0.85
    assert false_pairs["meaning"] == 0
    assert summary.counts["dropped"] == {"semantic_duplicate": true_pairs["meaning"]}


def test_survivor_is_chosen_by_the_keys_of_keep(run: Run, words_model: str) -> None:
    documents = [
        ("web", "short", "w1 w2 w3"),
        ("books", "other", "w3 w2 w1"),
        ("web", "long", "w2 w3  w1"),
        ("web", "alone", "w40 w41"),
        ("web", "empty", ""),
        ("web", "unknown", "no such words"),
    ]
    out, summary = run(
        "keep",
        [documents[:2], documents[2:]],
        {"model": words_model, "threshold": 0.99},
    )
    names = {document_id(*document): document[1] for document in documents}
    rows = {names[key]: row for key, row in rows_by_id(out).items()}
    assert {name for name, row in rows.items() if row["keep"]} == {
        "long",
        "alone",
        "empty",
        "unknown",
    }
    assert {rows[name]["reason"] for name in ("short", "other")} == {
        "semantic_duplicate"
    }
    assert {names[rows[name]["duplicate_of"]] for name in ("short", "other")} == {
        "long"
    }
    assert {rows[name]["cosine"] for name in ("short", "other")} == {1.0}
    assert [
        rows[name]["cluster_size"] for name in ("long", "short", "alone", "empty")
    ] == [3, 3, 1, 1]
    family = [rows[name] for name in ("short", "other", "long")]
    assert {row["cluster"] for row in family} == {min(row["id"] for row in family)}
    twins = {
        names[row["member"]]: row
        for row in pq.read_table(out / "clusters.parquet").to_pylist()
    }
    assert {
        (
            row["decided_by"],
            row["survivor_value"],
            row["member_value"],
            row["linked_by"],
        )
        for row in twins.values()
    } == {("length desc", "9", "8", "meaning")}
    assert summary.clusters == 1
    assert summary.largest_clusters[0]["size"] == 3
    by_source, _ = run(
        "source",
        [documents],
        {"model": words_model, "threshold": 0.99, "keep": ["source"]},
    )
    assert {
        names[key] for key, row in rows_by_id(by_source).items() if row["reason"]
    } == {"short", "long"}


def test_kept_documents_differ_and_dropped_ones_resemble_their_survivor(
    run: Run, words_model: str
) -> None:
    documents = shuffled_words(60, 3)
    out, summary = run(
        "laws",
        [documents],
        {"model": words_model, "threshold": STATIC_THRESHOLD, "clusters": 3},
    )
    rows = rows_by_id(out)
    assert len(np.load(out / "centroids.npy")) == 3
    vectors = {}
    for path in (out / "vectors").iterdir():
        table = pq.read_table(path)
        vectors |= dict(
            zip(
                table["id"].to_pylist(),
                unpack_vectors(table["vector"]).astype(np.float64),
                strict=True,
            )
        )
    assert set(vectors) == {key for key, row in rows.items() if row["keep"]}
    centroid = {key: row["centroid"] for key, row in rows.items()}
    kept = sorted(vectors)
    products = (
        np.stack([vectors[key] for key in kept])
        @ np.stack([vectors[key] for key in kept]).T
    )
    same = np.array(
        [
            [centroid[row_id] == centroid[column_id] for column_id in kept]
            for row_id in kept
        ]
    )
    assert (
        np.round(products[same & ~np.eye(len(kept), dtype=bool)], 3) < STATIC_THRESHOLD
    ).all()
    for row in rows.values():
        if not row["keep"]:
            assert rows[row["duplicate_of"]]["keep"]
            assert row["cosine"] >= STATIC_THRESHOLD
            assert centroid[row["id"]] == centroid[row["duplicate_of"]]
    assert summary.counts["dropped"]["semantic_duplicate"] >= 60


@pytest.mark.slow
def test_workers_engine_and_resumption_write_the_same_bytes(
    run: Run,
    words_model: str,
    write_ingest: Callable,
    make_context: Callable,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    documents = shuffled_words(40, 9)
    shards = [documents[start::3] for start in range(3)]
    config = {"model": words_model, "threshold": STATIC_THRESHOLD, "clusters": 5}
    first, summary = run("one", shards, config, workers=1)
    contexts: dict[str, dict[str, Any]] = {
        "three": {"workers": 3, "mode": "threads"},
        "engine": {
            "runner": "FnApiRunner",
            "options": {"direct_running_mode": "in_memory"},
        },
    }
    for name, context in contexts.items():
        out, other_summary = run(name, shards, config, **context)
        assert other_summary == summary
        assert file_contents(out) == file_contents(first), name
    ingest, out = tmp_path / "one-ingest", tmp_path / "again"

    def fail(*_: object) -> None:
        raise InterruptedError("killed")

    with monkeypatch.context() as patched:
        patched.setattr(dedup_semantic, "decide_cluster", fail)
        with pytest.raises(InterruptedError):
            dedup_semantic.run(
                {"ingest": ingest}, config, out, make_context("again-work")
            )
    with monkeypatch.context() as patched:
        # the vectors of the first attempt are reused
        patched.setattr(vector_jobs, "embed_shard", fail)
        other_summary = dedup_semantic.run(
            {"ingest": ingest}, config, out, make_context("again-work")
        )
    assert (other_summary, file_contents(out)) == (summary, file_contents(first))


def test_shards_do_not_change_the_result(run: Run, words_model: str) -> None:
    documents = shuffled_words(40, 21)
    config = {"model": words_model, "threshold": STATIC_THRESHOLD, "clusters": 4}
    single_shard, _ = run("one", [documents], config)
    mixed = random.Random(4).sample(documents, len(documents))
    seven_shards, _ = run("many", [mixed[start::7] for start in range(7)], config)
    assert rows_by_id(single_shard) == rows_by_id(seven_shards)
    assert (single_shard / "clusters.parquet").read_bytes() == (
        seven_shards / "clusters.parquet"
    ).read_bytes()


def test_text_that_is_not_utf8_is_quarantined_alone(
    write_ingest: Callable, make_context: Callable, words_model: str, tmp_path: Path
) -> None:
    documents = shuffled_words(10, 2)
    ingest = write_ingest("ingest", [documents])
    texts = [text.encode() for _, _, text in documents]
    texts[4] = b"w1 \xff w2"
    rewrite_texts(ingest / "part-00000.parquet", texts)
    out = tmp_path / "out"
    summary = dedup_semantic.run(
        {"ingest": ingest}, {"model": words_model}, out, make_context("work")
    )
    check_conservation(summary.counts, "dedup_semantic")
    assert summary.counts["quarantined"] == 1
    (row,) = [row for row in rows_by_id(out).values() if row["error"]]
    assert row["id"] == document_id(*documents[4])


def test_empty_input_is_allowed(run: Run, words_model: str) -> None:
    _, summary = run("none", [[]], {"model": words_model})
    assert summary.counts["read"] == 0
    _, summary = run(
        "others", [shuffled_words(3, 1)], {"model": words_model, "sources": ["c"]}
    )
    assert summary.counts["kept"] == 9


@pytest.mark.slow
def test_survivors_equal_a_sequential_comparison() -> None:
    rng = np.random.default_rng(17)
    vectors = rng.normal(size=(BLOCK + 300, 6))
    vectors[::50] = 0
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    vectors = (vectors / np.where(lengths > 0, lengths, 1)).astype(np.float16)
    survivor, cosine = survivors_in_order(vectors, 0.9)
    wide, kept = vectors.astype(np.float32), list[int]()
    for row in range(len(wide)):
        cosines = [round(float(wide[row] @ wide[kept_row]), 3) for kept_row in kept]
        best = next(
            (place for place, similarity in enumerate(cosines) if similarity >= 0.9),
            None,
        )
        assert survivor[row] == (row if best is None else kept[best])
        assert cosine[row] == pytest.approx(
            1.0 if best is None else cosines[best], abs=1.1e-3
        )
        if best is None:
            kept.append(row)
    assert 100 < len(kept) < BLOCK


def test_comparison_memory_is_bounded() -> None:
    """All documents survive, so that all are compared with all: at most 200 MB beside
    the vectors.
    """
    vectors = np.random.default_rng(4).normal(size=(20_000, 64)).astype(np.float16)
    vectors /= np.linalg.norm(vectors.astype(np.float32), axis=1, keepdims=True).astype(
        np.float16
    )
    tracemalloc.start()
    try:
        survivor, _ = survivors_in_order(vectors, 0.95)
        assert tracemalloc.get_traced_memory()[1] < 200e6
    finally:
        tracemalloc.stop()
    assert (survivor == np.arange(len(vectors))).all()


def test_packed_vectors_round_trip_and_keep_cosines() -> None:
    vectors = np.random.default_rng(8).normal(size=(50, 384)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    packed = pack_vectors(vectors)
    assert np.array_equal(unpack_vectors(packed), vectors.astype(np.float16))
    assert np.array_equal(
        unpack_vectors(pa.chunked_array([packed, packed]).slice(3, 60)),
        np.concatenate([vectors, vectors])[3:63].astype(np.float16),
    )
    halves = unpack_vectors(packed).astype(np.float32)
    assert np.abs(halves @ halves.T - vectors @ vectors.T).max() < 1e-3
    assert unpack_vectors(packed.slice(0, 0)).shape == (0, 384)


def test_centroids_are_deterministic_and_separate_clusters() -> None:
    pytest.importorskip("sklearn")
    rng = np.random.default_rng(2)
    means = np.eye(8)[:4]
    vectors = np.repeat(means, 50, axis=0) + rng.normal(scale=0.05, size=(200, 8))
    vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(
        np.float16
    )
    centroids = fit_centroids(vectors, 4, 1)
    assert np.array_equal(centroids, fit_centroids(vectors, 4, 1))
    assert np.allclose(np.linalg.norm(centroids, axis=1), 1, atol=1e-6)
    assignment = nearest_centroids(vectors, centroids).reshape(4, 50)
    assert (assignment == assignment[:, :1]).all()
    assert len(set(assignment[:, 0].tolist())) == 4
    assert len(fit_centroids(vectors[:1].repeat(9, axis=0), 4, 1)) == 1


def test_cluster_count_and_sample_size_follow_from_the_documents() -> None:
    assert [
        count_clusters(number) for number in (0, 999, 5_000, 1_000_000, 100_000_000)
    ] == [1, 1, 5, 1000, 10_000]
    assert count_sample(10, 384) == 2560
    assert count_sample(10_000, 384) * 384 * 4 <= 256_000_000
    ids = np.random.default_rng(1).integers(0, 2**64, 100_000, np.uint64)
    assert draw(ids, 1, 100_000, 100_000).all()
    drawn = draw(ids, 1, 5_000, 100_000)
    assert 4_500 < drawn.sum() < 5_500
    assert (drawn & draw(ids, 2, 5_000, 100_000)).sum() < 1_000

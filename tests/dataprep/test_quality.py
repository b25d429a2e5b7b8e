import gzip
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.dataprep import classifier, quality
from gristmill.dataprep.classifier import ClassifierError, area_under_curve, normalise, score, train
from gristmill.dataprep.context import Context
from gristmill.dataprep.documents import read_table, shard_names
from gristmill.dataprep.models import load_model
from gristmill.dataprep.quality import QualityError, draw, split_draws
from gristmill.mixtures.quality import Classifier

SECTION = {"positive": ["books"], "negative": ["ads"], "epochs": 5, "dimensions": 8, "buckets": 1000, "holdout": 0.25}
SETTINGS = Classifier.model_validate(SECTION)
GOOD = "the river carried its silt slowly toward a quiet sea while old stories were told".split()
BAD = "buy now cheap discount click here free offer best price deal win money fast".split()


def text(words: list[str], number: int) -> str:
    chosen = random.Random(number)
    return " ".join(chosen.choice(words if chosen.random() < 0.7 else GOOD + BAD) for _ in range(40))


@pytest.fixture
def ingest(write_ingest: Callable[..., Path]) -> Path:
    """Three shards of two easily told sources and a third one in between."""
    documents = [("books", f"b{n}", text(GOOD, n)) for n in range(150)]
    documents += [("ads", f"a{n}", text(BAD, 1000 + n)) for n in range(150)]
    documents += [("web", f"w{n}", text(GOOD if n % 2 else BAD, 2000 + n)) for n in range(60)]
    random.Random(3).shuffle(documents)
    return write_ingest("ingest", [documents[:120], documents[120:240], documents[240:]])


@settings(deadline=None)  # the first call imports scipy
@given(st.lists(st.integers(0, 5), min_size=1, max_size=20), st.lists(st.integers(0, 5), min_size=1, max_size=20))
def test_the_area_under_the_curve_is_the_chance_of_winning(positive: list[int], negative: list[int]) -> None:
    wins = sum((p > n) + 0.5 * (p == n) for p in positive for n in negative)
    found = area_under_curve(np.array(positive, float), np.array(negative, float))
    assert found == pytest.approx(wins / (len(positive) * len(negative)), abs=1e-12)


@given(st.text())
def test_a_normalised_text_is_one_line_without_fasttexts_own_marks(content: str) -> None:
    for whole in (content, f"__LABEL__positive {content} </S>"):
        line = normalise(whole, 2000)
        assert "\n" not in line
        assert not line.startswith("__label__")
        assert "__label__" not in line
        assert "</s>" not in line
        assert line == " ".join(line.split())


def test_only_the_beginning_is_normalised() -> None:
    assert normalise("Ab  C\ndef", 7) == "ab c d"


@given(st.integers(2, 200), st.floats(0.01, 0.99), st.integers(1, 50), st.integers(0, 1000))
def test_a_split_loses_nothing_but_what_exceeds_the_maximum(count: int, holdout: float, most: int, seed: int) -> None:
    draws = draw([number.to_bytes(16, "little") for number in range(count)], seed)
    training, held = split_draws(draws, holdout, count)
    assert sorted([*training.tolist(), *held.tolist()]) == list(range(count))
    assert len(training) > 0
    assert len(held) > 0
    fewer = split_draws(draws, holdout, most)
    assert fewer[0].tolist() == training[:most].tolist()
    assert fewer[1].tolist() == held[:most].tolist()


def test_the_draw_depends_on_seed_and_id_alone() -> None:
    ids = [bytes([number] * 16) for number in range(100)]
    assert draw(ids, 1).tolist() == draw(ids[::-1], 1)[::-1].tolist()
    assert draw(ids, 1).tolist() != draw(ids, 2).tolist()
    assert draw(ids, -1).shape == (100, 2)


def test_training_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    examples = [(number % 2 == 0, text(GOOD if number % 2 == 0 else BAD, number)) for number in range(200)]
    once, again = (train(examples, SETTINGS, 5, tmp_path) for _ in range(2))
    assert once == again
    assert train(examples, SETTINGS, 6, tmp_path) != once
    assert list(tmp_path.iterdir()) == []


def test_a_failed_training_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ClassifierError, match="could not be trained"):
        train([], SETTINGS, 1, tmp_path)
    monkeypatch.setattr(classifier, "ZEROED_MEMORY", {"MALLOC_PERTURB_": "7"})
    with pytest.raises(ClassifierError, match="Linux with glibc"):
        train([(True, "a"), (False, "b")], SETTINGS, 1, tmp_path)


def test_the_stage_separates_easy_sources_and_scores_every_document(
    ingest: Path, tmp_path: Path, make_context: Callable[..., Context]
) -> None:
    out = tmp_path / "out"
    summary = quality.run({"ingest": ingest}, {"classifier": SECTION, "seed": 1}, out, make_context("work"))
    assert summary["auc"] > 0.97
    assert sum(summary["training_documents"].values()) + summary["held_out"] == 300
    assert 40 <= summary["held_out"] <= 110
    assert summary["counts"]["kept"] == summary["counts"]["read"] == 360
    assert {source: sum(bins) for source, bins in summary["histogram"].items()} == {"ads": 150, "books": 150, "web": 60}
    assert all(len(bins) == 20 for bins in summary["histogram"].values())
    scores: dict[str, list[float]] = {}
    for shard in shard_names(ingest):
        documents = read_table(ingest / shard).to_pylist()
        for document, row in zip(documents, read_table(out / shard).to_pylist(), strict=True):
            assert document["id"] == row["id"]
            assert 0.0 <= row["quality"] <= 1.0
            scores.setdefault(document["source"], []).append(row["quality"])
    assert np.mean(scores["books"]) > 0.8
    assert np.mean(scores["ads"]) < 0.2
    model = load_model(str(out / "model.bin"), "as written")
    assert score(model, [normalise(text(GOOD, 7), 2000)])[0] > 0.5


def test_neither_workers_nor_an_interruption_change_a_byte(
    ingest: Path, tmp_path: Path, make_context: Callable[..., Context], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"classifier": SECTION, "seed": 1, "threshold": 0.5}
    once, again = tmp_path / "once", tmp_path / "again"
    first = quality.run({"ingest": ingest}, config, once, make_context("work1"))
    original = quality.write_table

    def failing(path: Path, table: Any) -> None:
        if path.name.endswith("2.parquet"):
            raise OSError(28, "No space left on device")
        original(path, table)

    with monkeypatch.context() as patch:
        patch.setattr(quality, "write_table", failing)
        with pytest.raises(Exception, match="No space left"):
            quality.run({"ingest": ingest}, config, again, make_context("work2", workers=2))
    assert (again / "model.bin").exists()
    monkeypatch.setattr(quality, "train", lambda *arguments: pytest.fail("the model was there already"))
    assert quality.run({"ingest": ingest}, config, again, make_context("work2", workers=2)) == first
    files = {path.name: path.read_bytes() for path in once.iterdir()}
    assert {path.name: path.read_bytes() for path in again.iterdir()} == files
    assert set(files) == {"model.bin", *shard_names(ingest)}
    assert first["counts"]["dropped"]["quality"] > 100


def test_training_ignores_which_sources_are_judged(
    ingest: Path, tmp_path: Path, make_context: Callable[..., Context]
) -> None:
    config = {"classifier": SECTION, "seed": 1, "threshold": 0.5, "sources": ["web"]}
    summary = quality.run({"ingest": ingest}, config, tmp_path / "out", make_context("work"))
    assert summary["auc"] > 0.97
    assert set(summary["histogram"]) == {"web"}
    assert summary["counts"]["sources"]["ads"]["kept"] == 150
    assert 20 <= summary["counts"]["sources"]["web"]["dropped"]["quality"] <= 40


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"positive": ["novels"]}, r"positive sources \(novels\) have 0 documents"),
        ({"negative": ["spam", "junk"]}, r"negative sources \(spam, junk\) have 0 documents"),
        ({"negative": ["ads", "books"]}, "books is both positive and negative"),
    ],
)
def test_a_class_without_documents_is_an_error_that_names_its_sources(
    ingest: Path, tmp_path: Path, make_context: Callable[..., Context], change: dict[str, Any], message: str
) -> None:
    config = {"classifier": {**SECTION, **change}, "seed": 1}
    with pytest.raises(Exception, match=message):
        quality.run({"ingest": ingest}, config, tmp_path / "out", make_context("work"))


def test_the_error_is_a_quality_error_where_no_runner_wraps_it(ingest: Path) -> None:
    settings = Classifier.model_validate({**SECTION, "positive": ["novels"]})
    with pytest.raises(QualityError):
        quality.choose_examples({"ingest": ingest}, shard_names(ingest), settings, 1)


SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "quality"


@pytest.mark.skipif(not SHARED.exists(), reason="the real data sets are not here")
def test_real_headlines_are_told_from_clickbait(
    write_ingest: Callable[..., Path], tmp_path: Path, make_context: Callable[..., Context]
) -> None:
    documents = []
    for source in ("clickbait", "non_clickbait"):
        lines = gzip.decompress((SHARED / f"{source}_data.gz").read_bytes()).decode("utf-8").splitlines()
        documents += [(source, str(number), line) for number, line in enumerate(filter(None, lines[:6000]))]
    section = {"positive": ["non_clickbait"], "negative": ["clickbait"], "epochs": 10, "buckets": 20_000}
    inputs = {"ingest": write_ingest("ingest", [documents])}
    summary = quality.run(inputs, {"classifier": section, "seed": 1}, tmp_path / "out", make_context("work"))
    assert summary["auc"] > 0.98

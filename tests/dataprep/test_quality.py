"""The stage `quality`: classifiers, cuts, and reproducible training."""

import gzip
import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import fasttext
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.dataprep.documents import read_table, shard_names
from gristmill.dataprep.fasttext.fasttext_files import read_model
from gristmill.dataprep.fasttext.fasttext_predict import Predictor, load_model
from gristmill.dataprep.fasttext.normalise_lines import one_line_each
from gristmill.dataprep.quality import classifier, quality, quality_models, scorers
from gristmill.dataprep.quality.classifier import (
    ClassifierError,
    as_line,
    characters_seen,
    epochs_of,
    is_lowered,
    score_texts,
    train,
)
from gristmill.dataprep.quality.labelled_examples import (
    LabelledFileError,
    QualityError,
    draw,
    split_draws,
)
from gristmill.dataprep.quality.separation import area_under_curve
from gristmill.mixtures.steps.quality import Classifier, Quality
from tests.dataprep.back_off_model import BackOffModel
from tests.dataprep.document_shards import MakeContext, WriteIngest
from tests.dataprep.random_models import Shape, write_classifier, write_model

SECTION = {
    "positive": ["books"],
    "negative": ["ads"],
    "epochs": 5,
    "dimensions": 8,
    "buckets": 1000,
    "holdout": 0.25,
}
SETTINGS = Classifier.model_validate(SECTION)
KENLM = {"kenlm": "m.arpa"}
GOOD = "the river carried its silt slowly toward a quiet sea while old stories were told".split()
BAD = "buy now cheap discount click here free offer best price deal win money fast".split()


def text(words: list[str], number: int) -> str:
    chosen = random.Random(number)
    return " ".join(
        chosen.choice(words if chosen.random() < 0.7 else GOOD + BAD) for _ in range(40)
    )


def labelled(number: int, first: int = 0) -> list[tuple[bool, str]]:
    """Good and bad texts in turn."""
    return [
        (place % 2 == 0, text(BAD if place % 2 else GOOD, first + place))
        for place in range(number)
    ]


@pytest.fixture
def ingest(write_ingest: WriteIngest) -> Path:
    """Three shards of two easily separated sources and a third one between them."""
    documents = [("books", f"b{n}", text(GOOD, n)) for n in range(150)]
    documents += [("ads", f"a{n}", text(BAD, 1000 + n)) for n in range(150)]
    documents += [
        ("web", f"w{n}", text(GOOD if n % 2 else BAD, 2000 + n)) for n in range(60)
    ]
    random.Random(3).shuffle(documents)
    return write_ingest(
        "ingest", [documents[:120], documents[120:240], documents[240:]]
    )


@pytest.fixture
def run(
    make_context: MakeContext, tmp_path: Path, request: pytest.FixtureRequest
) -> Callable[..., quality.QualitySummary]:
    """Run the stage, by default on `ingest` and into the folder `out`."""

    def running(
        config: dict[str, Any],
        name: str = "out",
        ingest: Path | None = None,
        **settings: Any,
    ) -> quality.QualitySummary:
        ingest = ingest or request.getfixturevalue("ingest")
        context = make_context(f"{name}.work", **settings)
        return quality.run({"ingest": ingest}, config, tmp_path / name, context)

    return running


@given(st.text())
def test_normalised_text_is_one_line_without_fasttext_marks(content: str) -> None:
    for text in (content, f"__LABEL__positive {content} </S>"):
        line = as_line(text, SETTINGS)
        assert "\n" not in line
        assert not line.startswith("__label__")
        assert "__label__" not in line
        assert "</s>" not in line
        assert line == " ".join(line.split())


PIECES = st.sampled_from(["__label__", "</s>", "__LABEL__", *"_>ÉİΣẞȺ \x85\u2003\0"])


@settings(deadline=None)  # the first call compiles the kernel
@given(
    st.lists(st.text(max_size=20) | PIECES, max_size=12).map("".join),
    st.sampled_from(
        [
            SETTINGS,
            Classifier(model="m.bin"),
            Classifier(model="m.bin", lower=True, max_characters=9),
        ]
    ),
)
def test_kernel_line_has_the_words_of_the_plain_line(
    content: str, section: Classifier
) -> None:
    given_model = section.model is not None
    lines, left_out = one_line_each(
        pa.array(["before", content, "After"]),
        characters_seen(section),
        is_lowered(section),
        marks=given_model,
    )
    kernel_lines = [
        " ".join(filter(None, lines.data[begin:end].tobytes().decode().split(" ")))
        for begin, end in zip(lines.begins, lines.ends, strict=True)
    ]
    expected = [as_line(source, section) for source in ("before", content, "After")]
    assert kernel_lines == [
        expected[0],
        "" if left_out[1] else expected[1],
        expected[2],
    ]
    lowered = content.lower() if is_lowered(section) else content
    marked = not given_model and ("__label__" in lowered or "</s>" in lowered)
    if content.isascii():
        assert left_out[1] == marked
    elif marked:
        assert left_out[1]


def test_texts_that_the_kernel_skips_are_scored(tmp_path: Path) -> None:
    path = write_model(
        tmp_path / "model",
        Shape(labels=2, word_ngrams=2),
        ["s", "label", "όσος", "a"],
        seed=1,
    )
    predictor = Predictor(*read_model(path))
    predictor.labels = ("__label__positive", "__label__negative")
    content = ["a </s> b", "__label__a", "ΌΣΟΣ ΣΑΣ", "a b", "İstanbul"]
    scores = score_texts(predictor, pa.array(content), SETTINGS)
    lines = [as_line(line, SETTINGS) for line in content]
    names, probabilities = fasttext.load_model(str(path)).predict(lines, k=2)
    predictions = [
        dict(zip(*prediction, strict=True))
        for prediction in zip(names, probabilities, strict=True)
    ]
    assert scores == pytest.approx(
        [prediction["__label__0"] for prediction in predictions]
    )


def test_only_max_characters_are_normalised() -> None:
    section = Classifier.model_validate({**SECTION, "max_characters": 7})
    assert as_line("Ab  C\ndef", section) == "ab c d"
    assert as_line("x" * 3000, SETTINGS) == "x" * 2000


def test_given_model_sees_the_unmodified_text_by_default() -> None:
    given_model = Classifier(model="m.bin")  # type: ignore[arg-type]
    assert as_line("Ab\n\nC </s>" + "x" * 3000, given_model) == "Ab C </s>" + "x" * 3000
    limited = Classifier(model="m.bin", lower=True, max_characters=4)  # type: ignore[arg-type]
    assert as_line("Ab\nCD", limited) == "ab c"


@given(
    st.integers(2, 200), st.floats(0.01, 0.99), st.integers(1, 50), st.integers(0, 1000)
)
def test_split_covers_all_documents_up_to_the_maximum(
    count: int, holdout: float, most: int, seed: int
) -> None:
    draws = draw([number.to_bytes(16, "little") for number in range(count)], seed)
    training, held_out = split_draws(draws, holdout, count)
    assert sorted([*training.tolist(), *held_out.tolist()]) == list(range(count))
    assert len(training) > 0
    assert len(held_out) > 0
    fewer = split_draws(draws, holdout, most)
    assert fewer[0].tolist() == training[:most].tolist()
    assert fewer[1].tolist() == held_out[:most].tolist()


def test_draw_depends_on_seed_and_id_alone() -> None:
    ids = [bytes([number] * 16) for number in range(100)]
    assert draw(ids, 1).tolist() == draw(ids[::-1], 1)[::-1].tolist()
    assert draw(ids, 1).tolist() != draw(ids, 2).tolist()
    assert draw(ids, -1).shape == (100, 2)


@pytest.mark.slow
def test_training_is_deterministic(tmp_path: Path) -> None:
    examples = labelled(200)
    once, again = (train(examples, SETTINGS, 5, tmp_path) for _ in range(2))
    assert once == again
    assert train(examples, SETTINGS, 6, tmp_path) != once
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_failed_training_names_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ClassifierError):
        train([], SETTINGS, 1, tmp_path)
    monkeypatch.setattr(classifier, "ZEROED_MEMORY", {"MALLOC_PERTURB_": "7"})
    with pytest.raises(ClassifierError, match="glibc"):
        train([(True, "a"), (False, "b")], SETTINGS, 1, tmp_path)


def test_stage_separates_easy_sources_and_scores_every_document(
    run: Any, ingest: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    summary = run({"classifier": SECTION, "seed": 1})
    assert summary.auc > 0.97
    assert sum(summary.training_documents.values()) + summary.held_out == 300
    assert 40 <= summary.held_out <= 110
    assert summary.counts["kept"] == summary.counts["read"] == 360
    assert {source: sum(bins) for source, bins in summary.histogram.items()} == {
        "ads": 150,
        "books": 150,
        "web": 60,
    }
    assert all(len(bins) == 20 for bins in summary.histogram.values())
    scores: dict[str, list[float]] = {}
    for row in read_rows(out, ingest):
        assert 0.0 <= row["quality"] <= 1.0
        scores.setdefault(row["source"], []).append(row["quality"])
    assert np.mean(scores["books"]) > 0.8
    assert np.mean(scores["ads"]) < 0.2
    model = load_model(str(out / "model.bin"), "as written")
    assert score_texts(model, pa.array([text(GOOD, 7)]), SETTINGS)[0] > 0.5
    separation = summary.scores["quality"]["separation"]
    assert separation["auc"] == summary.auc
    assert separation["at_cut"] is None  # nothing is cut
    assert separation["best"]["f1"] > 0.9


@pytest.mark.slow
def test_workers_and_resumption_write_the_same_bytes(
    run: Any, ingest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {
        "classifier": SECTION,
        "seed": 1,
        "min_quality": 0.5,
        "keep_top": 0.6,
    }
    once, again = tmp_path / "once", tmp_path / "again"
    first = run(config, "once")
    original = quality.write_table

    def failing(path: Path, table: Any) -> None:
        if path.name.endswith("2.parquet"):
            raise OSError(28, "No space left on device")
        original(path, table)

    with monkeypatch.context() as patch:
        patch.setattr(quality, "write_table", failing)
        with pytest.raises(Exception, match="No space left"):
            run(config, "again", workers=2)
    assert (again / "model.bin").exists()
    monkeypatch.setattr(
        quality_models,
        "train",
        lambda *arguments: pytest.fail("the model was there already"),
    )
    assert run(config, "again", workers=2) == first
    files = {path.name: path.read_bytes() for path in once.iterdir()}
    assert {path.name: path.read_bytes() for path in again.iterdir()} == files
    assert set(files) == {"model.bin", *shard_names(ingest)}
    assert first.counts["dropped"]["quality/min_quality"] > 100


def test_training_ignores_which_sources_are_judged(run: Any) -> None:
    config = {"classifier": SECTION, "seed": 1, "min_quality": 0.5, "sources": ["web"]}
    summary = run(config)
    assert summary.auc > 0.97
    assert set(summary.histogram) == {"web"}
    assert summary.counts["sources"]["ads"]["kept"] == 150
    assert (
        20 <= summary.counts["sources"]["web"]["dropped"]["quality/min_quality"] <= 40
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"positive": ["novels"]}, r"positive .*\(novels\) .*0 documents"),
        ({"negative": ["spam", "junk"]}, r"negative .*\(spam, junk\) .*0 documents"),
        ({"negative": ["ads", "books"]}, "books .*positive .*negative"),
        ({"negative": []}, "both classes"),
    ],
)
def test_class_without_documents_is_an_error_with_its_sources(
    run: Any, change: dict[str, Any], message: str
) -> None:
    config = {"classifier": {**SECTION, **change}, "seed": 1}
    with pytest.raises((QualityError, ValueError), match=message):
        run(config)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({}, "measure"),
        ({"perplexity": KENLM, "min_quality": 0.5}, "min_quality .*quality"),
        (
            {"perplexity": KENLM, "keep_top": 0.5, "keep_top_by": "quality"},
            "keep_top_by .*quality",
        ),
        ({"perplexity": KENLM, "per_source": True}, "per_source"),
        ({"perplexity": KENLM, "keep_top": 0}, "greater than 0"),
        ({"classifier": SECTION, "threshold": 0.5}, "threshold"),
    ],
)
def test_meaningless_sections_are_rejected(
    section: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Quality.model_validate(section)


def read_rows(out: Path, ingest: Path) -> list[dict[str, Any]]:
    """Source, text and judgement of every document, over all shards."""
    rows = []
    for shard in shard_names(ingest):
        pairs = zip(
            read_table(ingest / shard).to_pylist(),
            read_table(out / shard).to_pylist(),
            strict=True,
        )
        for document, judged in pairs:
            assert document["id"] == judged["id"]
            rows.append({**document, **judged})
    return rows


def test_keep_top_keeps_the_exact_share_for_any_shards(
    run: Any, write_ingest: WriteIngest, tmp_path: Path
) -> None:
    # Every text occurs seven times, so that the cut goes through documents of the same
    # score.
    documents = [
        ("web", f"{copy}/{n}", text(GOOD, n % 20) + "." * n)
        for n in range(20)
        for copy in range(7)
    ]
    single_shard = write_ingest("whole", [documents])
    random.Random(1).shuffle(documents)
    three_shards = write_ingest(
        "parts", [documents[:30], documents[30:31], documents[31:]]
    )
    classifier = write_classifier(tmp_path, GOOD)
    config = {"classifier": classifier, "keep_top": 0.32, "seed": 5}
    kept = []
    for name, ingest in (("a", single_shard), ("b", three_shards)):
        summary = run(config, name, ingest)
        rows = read_rows(tmp_path / name, ingest)
        kept.append({row["locator"] for row in rows if row["keep"]})
        assert summary.counts["dropped"] == {"quality/keep_top": 95}
        cut = summary.cuts["all"]
        assert (cut.kept, cut.of, cut.by) == (45, 140, "quality")
        assert min(row["quality"] for row in rows if row["keep"]) == cut.score
        assert max(row["quality"] for row in rows if not row["keep"]) <= cut.score
    assert kept[0] == kept[1]
    assert len(kept[0]) == 45
    other_seed = run({**config, "seed": 6}, "c", single_shard)
    assert other_seed.cuts["all"].score == summary.cuts["all"].score
    # ties by seed
    assert {
        row["locator"] for row in read_rows(tmp_path / "c", single_shard) if row["keep"]
    } != kept[0]


@pytest.mark.slow
def test_per_source_keeps_the_best_share_of_every_source(
    run: Any, ingest: Path, tmp_path: Path
) -> None:
    config = {"classifier": SECTION, "seed": 1, "keep_top": 0.1, "per_source": True}
    summary = run(config)
    assert {source: (cut.kept, cut.of) for source, cut in summary.cuts.items()} == {
        "ads": (15, 150),
        "books": (15, 150),
        "web": (6, 60),
    }
    rows = read_rows(tmp_path / "out", ingest)
    for source, cut in summary.cuts.items():
        scores = sorted(
            (row["quality"] for row in rows if row["source"] == source), reverse=True
        )
        assert scores[cut.kept - 1] == cut.score
        assert sum(row["keep"] for row in rows if row["source"] == source) == cut.kept
    # every source has its own
    assert summary.scores["quality"]["separation"]["at_cut"] is None
    together = {**config, "per_source": False}
    summary = run(together, "together")
    at_cut = summary.scores["quality"]["separation"]["at_cut"]
    assert at_cut["cut"] == summary.cuts["all"].score
    assert at_cut["precision"] > 0.95
    assert summary.counts["kept"] == 36


def test_unscorable_document_is_quarantined_and_not_ranked(
    run: Any,
    write_ingest: WriteIngest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fragile(predictor: Predictor, texts: pa.Array, section: Classifier) -> Any:
        if any("poison" in text for text in texts.to_pylist()):
            raise RuntimeError("choked")
        return score_texts(predictor, texts, section)

    monkeypatch.setattr(scorers, "score_texts", fragile)
    documents = [("web", str(n), text(GOOD, n)) for n in range(10)] + [
        ("web", "bad", "poison")
    ]
    ingest = write_ingest("ingest", [documents[5:], documents[:5]])
    config = {
        "classifier": write_classifier(tmp_path, GOOD),
        "keep_top": 0.5,
        "max_quarantined": 0.2,
    }
    summary = run(config, ingest=ingest)
    assert (summary.counts["kept"], summary.counts["quarantined"]) == (5, 1)
    assert summary.counts["dropped"] == {"quality/keep_top": 5}
    (bad,) = [
        row for row in read_rows(tmp_path / "out", ingest) if row["locator"] == "bad"
    ]
    assert (bad["reason"], bad["error"], bad["quality"]) == (
        "quarantine",
        "RuntimeError: choked",
        None,
    )


def test_shards_without_judged_documents_are_allowed(
    run: Any, write_ingest: WriteIngest, tmp_path: Path
) -> None:
    web = [("web", "1", text(GOOD, 1)), ("web", "2", text(BAD, 2))]
    prose = [("prose", str(number), text(GOOD, number)) for number in range(8)]
    ingest = write_ingest("ingest", [prose, web, []])
    pytest.importorskip("kenlm")
    model = tmp_path / "prose.arpa"
    model.write_text(BackOffModel([text for _, _, text in prose], 2).arpa())
    perplexity = {"kenlm": str(model), "buckets": [0.5, 0.5]}
    config = {
        "classifier": write_classifier(tmp_path, GOOD),
        "perplexity": perplexity,
        "keep_top": 0.5,
        "sources": ["web"],
        "per_source": True,
    }
    summary = run(config, ingest=ingest)
    assert (summary.counts["read"], summary.counts["kept"]) == (10, 9)
    # the first score that is configured
    assert summary.cuts["web"].by == "quality"
    nobody = run({**config, "sources": ["mail"]}, "none", ingest)
    assert nobody.counts["kept"] == 10
    assert nobody.cuts == {}


def test_files_can_provide_the_classes(run: Any, tmp_path: Path) -> None:
    good = tmp_path / "good.txt.gz"
    good.write_bytes(
        gzip.compress(
            "".join(f"__label__hq {text(GOOD, n)}\n\n" for n in range(120)).encode()
        )
    )
    bad = tmp_path / "bad.jsonl"
    bad.write_text(
        "".join(json.dumps({"text": text(BAD, 500 + n)}) + "\n" for n in range(60))
    )
    files = {
        "positive": [],
        "positive_files": [str(good)],
        "negative_files": [str(bad)],
    }
    config = {"classifier": {**SECTION, **files}, "seed": 1}
    summary = run(config)
    assert sum(summary.training_documents.values()) + summary.held_out == 120 + 60 + 150
    assert summary.auc > 0.97
    bad.write_text('{"text": 3}\n')
    with pytest.raises(LabelledFileError, match=r"bad\.jsonl, record 1: .*'text'"):
        run(config, "again")


@pytest.mark.slow
def test_given_model_scores_and_the_classes_measure_it(
    run: Any, ingest: Path, tmp_path: Path
) -> None:
    model = tmp_path / "given.bin"
    model.write_bytes(train(labelled(200, 5000), SETTINGS, 5, tmp_path))
    settings = {
        "model": str(model),
        "positive": ["books"],
        "negative": ["ads"],
        "holdout": 0.5,
    }
    config = {"classifier": settings, "min_quality": 0.5, "seed": 1}
    summary = run(config)
    assert summary.auc > 0.97
    assert summary.training_documents == {}
    # nothing was trained
    assert {path.name for path in (tmp_path / "out").iterdir()} == set(
        shard_names(ingest)
    )
    alone = run({"classifier": {"model": str(model)}}, "b")
    assert alone.auc is None
    wrong = {"classifier": {"model": str(model), "label": "__label__hq"}}
    with pytest.raises(
        ClassifierError, match=r"'__label__hq'.*__label__negative, __label__positive"
    ):
        run(wrong, "c")


SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "quality"


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.exists(), reason="the real data sets are not here")
def test_real_headlines_are_separated_from_clickbait(
    run: Any, write_ingest: WriteIngest
) -> None:
    documents = []
    for source in ("clickbait", "non_clickbait"):
        lines = (
            gzip.decompress((SHARED / f"{source}_data.gz").read_bytes())
            .decode("utf-8")
            .splitlines()
        )
        documents += [
            (source, str(number), line)
            for number, line in enumerate(filter(None, lines[:6000]))
        ]
    section = {
        "positive": ["non_clickbait"],
        "negative": ["clickbait"],
        "epochs": 10,
        "buckets": 20_000,
    }
    ingest = write_ingest("ingest", [documents])
    summary = run({"classifier": section, "seed": 1}, ingest=ingest)
    assert summary.auc > 0.98


@pytest.mark.parametrize(
    ("documents", "epochs"),
    [(2, 50), (206, 50), (800, 50), (1600, 25), (8000, 5), (10**6, 5)],
)
def test_fewer_documents_are_trained_for_more_epochs(
    documents: int, epochs: int
) -> None:
    section = Classifier(positive=("a",), negative=("b",))
    assert epochs_of(section, documents) == epochs
    assert epochs_of(section.model_copy(update={"epochs": 7}), documents) == 7


@pytest.mark.slow
def test_default_settings_learn_from_few_documents(tmp_path: Path) -> None:
    """Each of 60 texts has one telling word among 20; five epochs at rate 0.2 see it
    too seldom.
    """
    rng = random.Random(3)

    def example(good: bool) -> str:
        words = [f"w{rng.randrange(400)}" for _ in range(20)]
        words[rng.randrange(20)] = rng.choice(
            ["wise", "apt", "fine"] if good else ["cheap", "wow", "free"]
        )
        return " ".join(words)

    examples = [(number % 2 == 0, example(number % 2 == 0)) for number in range(360)]
    training, held_out = examples[:60], examples[60:]

    def separation(**settings: float) -> float:
        section = Classifier.model_validate(
            {"positive": ["a"], "negative": ["b"], "buckets": 1000, **settings}
        )
        path = tmp_path / f"{len(settings)}.bin"
        path.write_bytes(train(training, section, 1, tmp_path))
        texts = pa.array([text for _, text in held_out])
        scores = score_texts(load_model(str(path), str(path)), texts, section)
        good = np.array([label for label, _ in held_out])
        return area_under_curve(scores[good], scores[~good])

    assert separation() > separation(epochs=5, learning_rate=0.2) + 0.05


def test_classifier_no_better_than_length_is_warned_about(
    write_ingest: WriteIngest,
    make_context: MakeContext,
    tmp_path: Path,
) -> None:
    rng = random.Random(5)
    noise = [
        (
            name,
            f"{name}{number}",
            " ".join(f"w{rng.randrange(50)}" for _ in range(words)),
        )
        for name, words in (("long", 60), ("short", 20))
        for number in range(60)
    ]
    ingest = write_ingest("noise", [noise])
    context = make_context("work", stage="quality")
    events: list[dict[str, Any]] = []
    section = {**SECTION, "positive": ["long"], "negative": ["short"]}
    summary = quality.run(
        {"ingest": ingest},
        {"classifier": section, "seed": 1},
        tmp_path / "out",
        replace(context, emit=events.append),
    )
    assert summary.length_auc == 1.0
    warnings = [event["message"] for event in events if event["event"] == "warning"]
    assert len(warnings) == 1
    assert "length" in warnings[0]

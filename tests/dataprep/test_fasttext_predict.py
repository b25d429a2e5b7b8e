"""fastText kernels agree with fastText itself on the same model files."""

import struct
import threading
import zipfile
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import fasttext
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.dataprep.annotate_batches import measure_texts
from gristmill.dataprep.fasttext.fasttext_files import (
    Ngrams,
    UnknownModelError,
    read_model,
    reciprocal,
)
from gristmill.dataprep.fasttext.fasttext_predict import (
    Predictor,
    lines_of,
    load_model,
    multiply_rows,
)
from gristmill.dataprep.fasttext.fasttext_words import (
    COLUMNS,
    MOST_CACHE_BYTES,
    MOST_SLOTS,
    bucket_of,
    make_cache,
)
from gristmill.dataprep.langid.langid import (
    LanguageError,
    measure,
    top_labels,
    view,
)
from gristmill.mixtures.steps.langid import LanguageId
from tests.dataprep.random_models import (
    HIERARCHICAL,
    NEGATIVE_SAMPLING,
    ONE_VS_ALL,
    SOFTMAX,
    Shape,
    write_model,
)

SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "data"
MODEL = SHARED / "langid" / "lid176" / "lid.176.ftz"
requires_lid176 = pytest.mark.skipif(
    not MODEL.exists(), reason="lid.176.ftz is not here"
)
WORDS = (
    "</s>",
    "the",
    "a",
    "house",
    "Größe",
    "中文",
    "internationalisation",
    "__label__odd",
    "x",
)
LINES = (
    "",
    " ",
    "\0",
    "the",
    "the house",
    "a  house\twith\va\fGröße\r中文",
    "</s>",
    "the </s> house",
    "the</s> house",
    "x",
    "__label__0",
    "__label__0 the",
    "__label__unheard the",
    "__label__odd the",
    "the __label__",
    "_",
    "é",
    "\U0001f600",
    "internationalisation of internationalisations",
    "12345678 123456789 1234567 12345678901234567",
    "the\0house",
    "a" * 64,
    "a" * 65,
    "é" * 40,
    "the house " * 500,
    "nbsp\xa0is\u2003no\u3000space\x85here\x1c",
)
LONG = ("word" * 25_000, "中" * 33_000 + " the", "ab " * 40_000)
SHAPES = {
    "dense": Shape(),
    "one column": Shape(dim=1),
    "odd columns": Shape(dim=37),
    "wide": Shape(dim=256, bucket=100),
    "one label": Shape(labels=1),
    "many labels": Shape(labels=300, scale=0.3),
    "no n-grams": Shape(minn=0, maxn=0, bucket=0),
    "n-grams of one": Shape(minn=1, maxn=3),
    "n-grams from zero": Shape(minn=0, maxn=2),
    "long n-grams": Shape(minn=3, maxn=70),
    "no n-grams that long": Shape(minn=5, maxn=3),
    "word bigrams": Shape(minn=0, maxn=0, word_ngrams=2),
    "word n-grams of five": Shape(word_ngrams=5, bucket=77),
    "flat": Shape(scale=0.01),
    "steep": Shape(scale=20.0),
    "nothing": Shape(scale=0.0),
    "quantised": Shape(quantised=True),
    "quantised, norms": Shape(quantised=True, qnorm=True, dim=15),
    "quantised, output too": Shape(
        quantised=True, qout=True, qnorm=True, dsub=3, dim=16
    ),
    "quantised by single columns": Shape(quantised=True, dsub=1, dim=9),
    "pruned": Shape(quantised=True, qnorm=True, kept=130, word_ngrams=2),
    "pruned of all": Shape(quantised=True, kept=0),
}


def reference(path: Path) -> Any:
    return fasttext.load_model(str(path))


LONG_LINE = 2000
LONG_LINE_TOLERANCE = 5e-4
"""fastText's own sums of so many rows are not good to 1e-5; ours are
(`test_long_sums_are_as_good_as_fasttexts`).
"""


def assert_same_top_labels(
    predictor: Predictor, model: Any, lines: Sequence[str]
) -> None:
    """Assert equal labels and nearly equal probabilities of the likeliest label."""
    labels, shares = predictor.tops(lines_of(lines))
    for line, label, share, names, expected in zip(
        lines, labels, shares, *model.predict(list(lines)), strict=True
    ):
        assert (predictor.labels[label] if label >= 0 else None) == (
            names[0] if names else None
        ), line[:100]
        tolerance = 1e-5 if len(line) <= LONG_LINE else LONG_LINE_TOLERANCE
        assert share == pytest.approx(expected[0] if names else 0.0, abs=tolerance), (
            line[:100]
        )


def assert_same_shares(predictor: Predictor, model: Any, lines: Sequence[str]) -> None:
    """Assert nearly equal probabilities of every label."""
    names, probabilities = model.predict(list(lines), k=len(predictor.labels))
    expected = [
        dict(zip(*of_line, strict=True))
        for of_line in zip(names, probabilities, strict=True)
    ]
    for label in predictor.labels:
        shares = predictor.shares(lines_of(lines), label)
        for line, share, of_line in zip(lines, shares, expected, strict=True):
            tolerance = 1e-5 if len(line) <= LONG_LINE else LONG_LINE_TOLERANCE
            assert share == pytest.approx(of_line.get(label, 0.0), abs=tolerance), line[
                :100
            ]


OUTPUT_SHAPES = (
    "dense",
    "one label",
    "many labels",
    "steep",
    "nothing",
    "quantised, output too",
)
"""Shapes that differ in the output layer, where the losses differ."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "loss"),
    [
        *((name, SOFTMAX) for name in SHAPES),
        *product(OUTPUT_SHAPES, (HIERARCHICAL, NEGATIVE_SAMPLING, ONE_VS_ALL)),
    ],
)
def test_every_kind_of_model_predicts_like_fasttext(
    tmp_path: Path, name: str, loss: int
) -> None:
    shape = Shape(**{**vars(SHAPES[name]), "loss": loss})
    path = write_model(tmp_path / "model", shape, WORDS, seed=len(name))
    predictor, model = load_model(str(path), f"{name}/{loss}"), reference(path)
    assert list(predictor.labels) == model.get_labels()
    assert_same_top_labels(predictor, model, LINES)
    assert_same_top_labels(predictor, model, LINES)  # from the cache
    assert_same_shares(predictor, model, LINES)


@pytest.mark.parametrize("words", [WORDS[1:], ("a",), ()])
def test_line_without_known_words_has_no_label(
    tmp_path: Path, words: Sequence[str]
) -> None:
    path = write_model(
        tmp_path / "model", Shape(minn=0, maxn=0, bucket=0), words, seed=1
    )
    predictor = Predictor(*read_model(path))
    assert_same_top_labels(predictor, reference(path), LINES)
    assert predictor.tops(lines_of(["unheard of"]))[0].tolist() == [-1]
    assert predictor.shares(lines_of(["unheard of"]), "__label__0").tolist() == [0.0]
    with pytest.raises(LanguageError, match="text"):
        top_labels(predictor, lines_of(["unheard of"]))


@pytest.mark.parametrize("loss", [HIERARCHICAL, SOFTMAX])
def test_long_words_and_lines_predict_like_fasttext(tmp_path: Path, loss: int) -> None:
    path = write_model(
        tmp_path / "model", Shape(loss=loss, word_ngrams=2), WORDS, seed=3
    )
    assert_same_top_labels(Predictor(*read_model(path)), reference(path), LONG)


@pytest.fixture(scope="module")
def predictor_and_fasttext(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Predictor, Any]:
    """A model with every feature, read by our kernels and by fastText."""
    shape = Shape(
        loss=HIERARCHICAL,
        labels=40,
        word_ngrams=2,
        quantised=True,
        qnorm=True,
        kept=400,
    )
    path = write_model(tmp_path_factory.mktemp("model") / "model", shape, WORDS, seed=7)
    return load_model(str(path), "pair"), reference(path)


TEXT = st.text(
    st.characters(exclude_characters="\n", exclude_categories=["Cs"]), max_size=80
)
PIECES = st.lists(
    st.sampled_from([*WORDS, *" \t\r\0", "é", "__label__0", "s>", "<"]), max_size=20
).map("".join)


@settings(deadline=None, max_examples=200)
@given(lines=st.lists(TEXT | PIECES, min_size=1, max_size=8))
def test_random_unicode_predicts_like_fasttext(
    predictor_and_fasttext: tuple[Predictor, Any], lines: list[str]
) -> None:
    assert_same_top_labels(*predictor_and_fasttext, lines)


@requires_lid176
@settings(deadline=None, max_examples=100)
@given(lines=st.lists(TEXT, min_size=1, max_size=8))
def test_random_unicode_has_fasttexts_language(lines: list[str]) -> None:
    assert_same_top_labels(
        load_model(str(MODEL), "lid.176"), lid176_by_fasttext(), lines
    )


def lid176_by_fasttext() -> Any:
    """fastText's own reading of the language model."""
    if not hasattr(lid176_by_fasttext, "model"):
        lid176_by_fasttext.model = reference(MODEL)  # type: ignore[attr-defined]
    return lid176_by_fasttext.model  # type: ignore[attr-defined]


def declarations() -> Iterator[str]:
    with zipfile.ZipFile(SHARED / "langid" / "udhr2.zip") as archive:
        for name in sorted(archive.namelist()):
            if name.endswith(".txt"):
                yield archive.read(name).decode("utf-8")


@pytest.mark.slow
@requires_lid176
def test_every_line_of_388_translations_has_fasttexts_language() -> None:
    predictor, model = load_model(str(MODEL), "lid.176"), lid176_by_fasttext()
    lines = [line for text in declarations() for line in text.split("\n")]
    expected, expected_shares = model.predict(lines)
    labels, shares = predictor.tops(lines_of(lines))
    assert len(lines) > 60_000
    assert [predictor.labels[label] for label in labels] == [
        names[0] for names in expected
    ]
    assert (
        np.abs(shares - np.array([share[0] for share in expected_shares])).max() <= 1e-5
    )


@pytest.mark.slow
@requires_lid176
def test_documents_have_fasttexts_language() -> None:
    predictor, section = load_model(str(MODEL), "lid.176"), LanguageId()
    texts = list(declarations())
    expected, expected_shares = lid176_by_fasttext().predict(
        [view(text, section.max_characters) for text in texts]
    )
    measures = measure(
        predictor,
        section,
        pa.array(texts, pa.large_string()),
    )
    assert [f"__label__{language}" for language in measures["language"]] == [
        names[0] for names in expected
    ]
    shares = np.minimum([share[0] for share in expected_shares], 1.0)
    assert np.abs(measures["language_score"] - shares).max() <= 1e-5
    assert_same_top_labels(
        predictor, lid176_by_fasttext(), [text.replace("\n", " ") for text in texts]
    )


def train(path: Path, **options: Any) -> Any:
    """Train a small model; with as many threads fastText initialises all of its
    rows.
    """
    rng = np.random.default_rng(5)
    vocabulary = [f"w{number}é" for number in range(400)]
    lines = path.with_suffix(".txt")
    lines.write_text(
        "".join(
            f"__label__{row % 6} "
            f"{' '.join(rng.choice(vocabulary[row % 6 * 50 : row % 6 * 50 + 150], 12))}\n"
            for row in range(600)
        ),
        encoding="utf-8",
    )
    return fasttext.train_supervised(
        str(lines), epoch=3, dim=12, bucket=2000, thread=12, verbose=0, **options
    ), lines


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "quantise"),
    [
        ("hs", None),
        ("hs", {}),
        ("softmax", {"qnorm": True, "qout": False, "cutoff": 900}),
        ("ns", {"dsub": 4}),
        ("ova", None),
    ],
)
def test_trained_and_quantised_models_predict_like_fasttext(
    tmp_path: Path, loss: str, quantise: dict[str, Any] | None
) -> None:
    model, lines = train(tmp_path / "model", loss=loss, wordNgrams=2, minn=2, maxn=3)
    path = tmp_path / "model.bin"
    if quantise is not None:
        model.quantize(input=str(lines), **quantise)
    model.save_model(str(path))
    predictor = Predictor(*read_model(path))
    texts = [
        *LINES,
        *(
            line.partition(" ")[2]
            for line in lines.read_text(encoding="utf-8").splitlines()[:50]
        ),
    ]
    assert_same_top_labels(predictor, reference(path), texts)
    assert_same_shares(predictor, reference(path), texts)


@pytest.mark.parametrize("loss", [HIERARCHICAL, SOFTMAX])
@pytest.mark.parametrize(
    ("labels", "width"), [(1, 4), (2, 4), (5, 8), (8, 8), (9, 20), (30, 20)]
)
def test_few_labels_use_precomputed_products(
    tmp_path: Path, labels: int, width: int, loss: int
) -> None:
    shape = Shape(
        loss=loss,
        labels=labels,
        dim=20,
        word_ngrams=2,
        quantised=True,
        qout=True,
        qnorm=True,
    )
    path = write_model(tmp_path / "model", shape, WORDS, seed=labels)
    weights = read_model(path).weights
    products = multiply_rows(weights)
    assert products.rows.shape[1] == width
    assert (products is weights) == (width == 20)
    predictor = Predictor(*read_model(path))
    assert_same_shares(predictor, reference(path), LINES)
    labels_found, tops = predictor.tops(lines_of(LINES))
    shares = np.array(
        [predictor.shares(lines_of(LINES), label) for label in predictor.labels]
    )
    known = labels_found >= 0
    np.testing.assert_allclose(
        shares[labels_found[known], np.flatnonzero(known)], tops[known], atol=1e-5
    )


@pytest.mark.parametrize("loss", [HIERARCHICAL, SOFTMAX])
def test_long_sums_are_as_good_as_fasttexts(tmp_path: Path, loss: int) -> None:
    """A line that repeats a few words has nearly the average of their rows, which short
    lines have exactly.
    """
    path = write_model(tmp_path / "model", Shape(loss=loss), WORDS[1:], seed=3)
    predictor, model = Predictor(*read_model(path)), reference(path)
    for phrase in ("ab ", "the house ", "Größe of 中文 "):
        _, exact = predictor.tops(lines_of([phrase * 10]))
        _, ours = predictor.tops(lines_of([phrase * 20_000]))
        ((theirs,),) = model.predict([phrase * 20_000])[1]
        assert abs(ours[0] - exact[0]) <= abs(theirs - exact[0]) + 1e-5


@pytest.mark.parametrize("name", ["dense", "word bigrams", "pruned"])
def test_cache_does_not_change_a_bit_of_the_scores(tmp_path: Path, name: str) -> None:
    path = write_model(tmp_path / "model", SHAPES[name], WORDS, seed=9)
    model = read_model(path)
    warm = Predictor(*model)
    rng = np.random.default_rng(11)  # varies the words, and which of them share a slot
    words = [
        f"{number:x}" * int(times)
        for number, times in enumerate(rng.integers(1, 9, 3000))
    ]
    lines = [" ".join(rng.choice(words, 20)) for _ in range(300)]
    together = warm.tops(lines_of(lines))[1].tolist()
    assert warm.tops(lines_of(lines))[1].tolist() == together
    assert warm.tops(lines_of(lines[::-1]))[1].tolist() == together[::-1]
    weights, labels = model
    for line, share in list(zip(lines, together, strict=True))[:20]:
        assert Predictor(weights, labels).tops(lines_of([line]))[1].tolist() == [share]
    small = Predictor(weights, labels)
    cache = make_cache(weights)
    small._rows._of_thread.cache = type(cache)(
        cache.table[:9].copy(), cache.sums[:9].copy()
    )
    assert small.tops(lines_of(lines))[1].tolist() == together


@pytest.mark.slow
def test_cache_is_bounded_and_evicts(tmp_path: Path) -> None:
    path = write_model(
        tmp_path / "model", Shape(minn=1, maxn=6, bucket=5000), WORDS, seed=2
    )
    predictor = Predictor(*read_model(path))
    words = [f"{word}{'long' * (word % 5)}" for word in range(2 * MOST_SLOTS)]
    lines = [" ".join(words[at : at + 200]) for at in range(0, len(words), 197)]
    assert_same_top_labels(predictor, reference(path), lines[::100])
    labels, _ = predictor.tops(lines_of(lines))
    again, _ = predictor.tops(lines_of(lines))
    assert labels.tolist() == again.tolist()
    cache = predictor._rows._of_thread.cache
    assert (
        sum(part.nbytes for part in cache)
        <= MOST_CACHE_BYTES + 8 * COLUMNS + 4 * cache.sums.shape[1]
    )
    used_slots = np.count_nonzero(cache.table[:-1, 0])
    assert len(cache.table) // 2 < used_slots < len(cache.table)


@pytest.mark.parametrize(
    ("shape", "slots"),
    [
        (Shape(dim=16), MOST_SLOTS),
        (Shape(dim=256), MOST_SLOTS // 16),
        (Shape(dim=256, maxn=0), MOST_SLOTS),
    ],
)
def test_cache_has_fewer_slots_for_wide_rows(
    tmp_path: Path, shape: Shape, slots: int
) -> None:
    cache = make_cache(
        read_model(write_model(tmp_path / "model", shape, WORDS, seed=2)).weights
    )
    assert len(cache.table) == slots + 1
    assert cache.table.ctypes.data % 128 == 0
    assert (
        sum(part.nbytes for part in cache) <= MOST_CACHE_BYTES + 8 * COLUMNS + 4 * 256
    )


@given(
    st.integers(1, 2**31 - 1),
    st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=50),
)
def test_buckets_are_remainders(buckets: int, values: list[int]) -> None:
    for number in (buckets, 1, 2, 2_000_000):
        ngrams = Ngrams(
            np.empty(0, np.uint64),
            np.empty(0, np.int32),
            0,
            1,
            1,
            np.uint64(number),
            reciprocal(number),
        )
        for value in (*values, 0, number - 1, number, 2**64 - 1):
            assert bucket_of(ngrams, np.uint64(value)) == value % number


def test_threads_share_a_model(tmp_path: Path) -> None:
    path = write_model(
        tmp_path / "model", Shape(loss=HIERARCHICAL, labels=30), WORDS, seed=4
    )
    predictor = Predictor(*read_model(path))
    lines = lines_of([f"{word} the house of {word * 7}" for word in range(3000)])
    labels, shares = predictor.tops(lines)
    predictions: list[tuple[np.ndarray, np.ndarray]] = []
    threads = [
        threading.Thread(target=lambda: predictions.append(predictor.tops(lines)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(predictions) == 4
    for prediction in predictions:
        assert np.array_equal(prediction[0], labels)
        assert np.array_equal(prediction[1], shares)


def test_too_large_numbers_are_rejected(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model", Shape(scale=3e15), WORDS, seed=6)
    with pytest.raises(UnknownModelError, match=r"model .*too large"):
        load_model(str(path), "too large")


@pytest.mark.parametrize(
    ("at", "change", "reason"),
    [
        (0, struct.pack("<i", 1), "not a fastText file"),
        (4, struct.pack("<i", 13), "not a fastText file"),
        (36, struct.pack("<i", 1), "predicts no labels"),
        (32, struct.pack("<i", 9), "predicts no labels"),
        (40, struct.pack("<i", 0), "no buckets"),
        (40, struct.pack("<i", 10**6), "do not go with"),
        (64, struct.pack("<i", 8), "dictionary is damaged"),
    ],
)
def test_unknown_model_file_is_rejected(
    tmp_path: Path, at: int, change: bytes, reason: str
) -> None:
    path = write_model(tmp_path / "model", Shape(), WORDS, seed=6)
    content = bytearray(path.read_bytes())
    content[at : at + len(change)] = change
    path.write_bytes(content)
    with pytest.raises(UnknownModelError, match=reason):
        read_model(path)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.1, 0.5, 0.9, 0.999])
def test_truncated_model_file_is_rejected(tmp_path: Path, share: float) -> None:
    path = write_model(
        tmp_path / "model", Shape(quantised=True, qnorm=True, kept=30), WORDS, seed=6
    )
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(UnknownModelError):
        read_model(path)


@requires_lid176
def test_text_that_is_not_utf8_fails_alone() -> None:
    texts = pa.Array.from_buffers(
        pa.large_string(),
        2,
        [
            None,
            pa.py_buffer(np.array([0, 2, 30], np.int64)),
            pa.py_buffer(b"\xff\xfe" + b"This is plain English text.."[:28]),
        ],
    )
    section = LanguageId()
    predictor = load_model(str(MODEL), "lid.176")
    measures, errors = measure_texts(
        pa.chunked_array([texts]),
        lambda batch: measure(predictor, section, batch),
    )
    assert measures["language"].tolist() == ["en"]
    assert errors[0] is not None
    assert errors[1] is None


@requires_lid176
@settings(deadline=None)
@given(
    st.lists(TEXT.map(lambda text: text.replace("e", "\n")), min_size=1, max_size=5),
    st.integers(1, 90),
)
def test_kernel_sees_the_view_of_a_text(texts: list[str], characters: int) -> None:
    lines = lines_of(texts, characters)
    line_texts = [
        lines.data[begin:end].tobytes().decode()
        for begin, end in zip(lines.begins, lines.ends, strict=True)
    ]
    assert [text.replace("\n", " ") for text in line_texts] == [
        view(text, characters) for text in texts
    ]

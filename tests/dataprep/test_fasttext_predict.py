"""Our kernels against fastText itself, on the same model files."""

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
from gristmill.dataprep.fasttext.fasttext_backend import FastTextPredictor, KernelPredictor, Predictor, load_model
from gristmill.dataprep.fasttext.fasttext_files import DamagedModelError, UnknownModelError, read_model
from gristmill.dataprep.fasttext.fasttext_predict import lines_of, multiply_rows
from gristmill.dataprep.fasttext.fasttext_words import (
    COLUMNS,
    MOST_CACHE_BYTES,
    MOST_SLOTS,
    make_cache,
)
from gristmill.dataprep.fasttext.ngram_rows import Ngrams, bucket_of, reciprocal
from gristmill.dataprep.langid.langid import LanguageError, identify, measure, view, wanted_languages
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
needs_model = pytest.mark.skipif(not MODEL.exists(), reason="lid.176.ftz is not here")
WORDS = ("</s>", "the", "a", "house", "Größe", "中文", "internationalisation", "__label__odd", "x")
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
    "quantised, output too": Shape(quantised=True, qout=True, qnorm=True, dsub=3, dim=16),
    "quantised by single columns": Shape(quantised=True, dsub=1, dim=9),
    "pruned": Shape(quantised=True, qnorm=True, kept=130, word_ngrams=2),
    "pruned of all": Shape(quantised=True, kept=0),
}


def reference(path: Path) -> Any:
    return fasttext.load_model(str(path))


LONG_LINE, OF_LONG_LINES = 2000, 5e-4
"""fastText's own sums of so many rows are not good to 1e-5; ours are (`test_sums_of_long_lines_are_no_worse_...`)."""


def agree(predictor: Predictor, model: Any, lines: Sequence[str]) -> None:
    """Assert that labels are equal and probabilities nearly so, of the likeliest label and of every single one."""
    labels, shares = predictor.tops(lines_of(lines))
    for line, label, share, names, wanted in zip(lines, labels, shares, *model.predict(list(lines)), strict=True):
        assert (predictor.labels[label] if label >= 0 else None) == (names[0] if names else None), line[:100]
        tolerance = 1e-5 if len(line) <= LONG_LINE else OF_LONG_LINES
        assert share == pytest.approx(wanted[0] if names else 0.0, abs=tolerance), line[:100]


def agree_on_every_label(predictor: Predictor, model: Any, lines: Sequence[str]) -> None:
    found = model.predict(list(lines), k=len(predictor.labels))
    wanted = [dict(zip(*one, strict=True)) for one in zip(*found, strict=True)]
    for label in predictor.labels:
        shares = predictor.shares(lines_of(lines), label)
        for line, share, one in zip(lines, shares, wanted, strict=True):
            tolerance = 1e-5 if len(line) <= LONG_LINE else OF_LONG_LINES
            assert share == pytest.approx(one.get(label, 0.0), abs=tolerance), line[:100]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "loss"), product(SHAPES, (HIERARCHICAL, NEGATIVE_SAMPLING, SOFTMAX, ONE_VS_ALL)))
def test_models_of_every_kind_say_what_fasttext_says(tmp_path: Path, name: str, loss: int) -> None:
    shape = Shape(**{**vars(SHAPES[name]), "loss": loss})
    path = write_model(tmp_path / "model", shape, WORDS, seed=len(name))
    predictor, model = load_model(str(path), f"{name}/{loss}"), reference(path)
    assert not predictor.fallback
    assert list(predictor.labels) == model.get_labels()
    agree(predictor, model, LINES)
    agree(predictor, model, LINES)  # from the cache
    agree_on_every_label(predictor, model, LINES)


@pytest.mark.parametrize("words", [WORDS[1:], ("a",), ()])
def test_a_line_of_which_the_model_knows_nothing_has_no_label(tmp_path: Path, words: Sequence[str]) -> None:
    path = write_model(tmp_path / "model", Shape(minn=0, maxn=0, bucket=0), words, seed=1)
    predictor = KernelPredictor(*read_model(path))
    agree(predictor, reference(path), LINES)
    assert predictor.tops(lines_of(["unheard of"]))[0].tolist() == [-1]
    assert predictor.shares(lines_of(["unheard of"]), "__label__0").tolist() == [0.0]
    with pytest.raises(LanguageError, match="knows nothing of the text"):
        identify(predictor, ["unheard of"])


@pytest.mark.parametrize("loss", [HIERARCHICAL, SOFTMAX])
def test_very_long_words_and_lines_say_what_fasttext_says(tmp_path: Path, loss: int) -> None:
    path = write_model(tmp_path / "model", Shape(loss=loss, word_ngrams=2), WORDS, seed=3)
    agree(KernelPredictor(*read_model(path)), reference(path), LONG)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Predictor, Any]:
    """A model with everything, read by us and by fastText."""
    shape = Shape(loss=HIERARCHICAL, labels=40, word_ngrams=2, quantised=True, qnorm=True, kept=400)
    path = write_model(tmp_path_factory.mktemp("model") / "model", shape, WORDS, seed=7)
    return load_model(str(path), "pair"), reference(path)


TEXT = st.text(st.characters(exclude_characters="\n", exclude_categories=["Cs"]), max_size=80)
PIECES = st.lists(st.sampled_from([*WORDS, *" \t\r\0", "é", "__label__0", "s>", "<"]), max_size=20).map("".join)


@settings(deadline=None, max_examples=200)
@given(lines=st.lists(TEXT | PIECES, min_size=1, max_size=8))
def test_random_unicode_says_what_fasttext_says(pair: tuple[Predictor, Any], lines: list[str]) -> None:
    agree(*pair, lines)


@needs_model
@settings(deadline=None, max_examples=100)
@given(lines=st.lists(TEXT, min_size=1, max_size=8))
def test_random_unicode_is_the_same_language_as_fasttexts(lines: list[str]) -> None:
    agree(load_model(str(MODEL), "lid.176"), referee(), lines)


def referee() -> Any:
    """fastText's own reading of the language model."""
    if not hasattr(referee, "model"):
        referee.model = reference(MODEL)  # type: ignore[attr-defined]
    return referee.model  # type: ignore[attr-defined]


def declarations() -> Iterator[str]:
    with zipfile.ZipFile(SHARED / "langid" / "udhr2.zip") as archive:
        for name in sorted(archive.namelist()):
            if name.endswith(".txt"):
                yield archive.read(name).decode("utf-8")


@pytest.mark.slow
@needs_model
def test_every_line_of_388_translations_is_the_same_language_as_fasttexts() -> None:
    predictor, model = load_model(str(MODEL), "lid.176"), referee()
    lines = [line for text in declarations() for line in text.split("\n")]
    wanted, of_wanted = model.predict(lines)
    labels, shares = predictor.tops(lines_of(lines))
    assert len(lines) > 60_000
    assert [predictor.labels[label] for label in labels] == [names[0] for names in wanted]
    assert np.abs(shares - np.array([share[0] for share in of_wanted])).max() <= 1e-5


@pytest.mark.slow
@needs_model
def test_whole_documents_are_the_same_language_as_fasttexts() -> None:
    predictor, section = load_model(str(MODEL), "lid.176"), LanguageId()
    texts = list(declarations())
    wanted, of_wanted = referee().predict([view(text, section.max_characters) for text in texts])
    found = measure(predictor, section, wanted_languages(section), pa.array(texts, pa.large_string()))
    assert [f"__label__{language}" for language in found["language"]] == [names[0] for names in wanted]
    shares = np.minimum([share[0] for share in of_wanted], 1.0)
    assert np.abs(found["language_score"] - shares).max() <= 1e-5
    agree(predictor, referee(), [text.replace("\n", " ") for text in texts])


def train(path: Path, **options: Any) -> Any:
    """A small model that fastText trains; with as many threads it initialises all of its rows."""
    random = np.random.default_rng(5)
    vocabulary = [f"w{number}é" for number in range(400)]
    lines = path.with_suffix(".txt")
    lines.write_text(
        "".join(
            f"__label__{row % 6} {' '.join(random.choice(vocabulary[row % 6 * 50 : row % 6 * 50 + 150], 12))}\n"
            for row in range(600)
        ),
        encoding="utf-8",
    )
    return fasttext.train_supervised(str(lines), epoch=3, dim=12, bucket=2000, thread=12, verbose=0, **options), lines


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["hs", "softmax", "ns", "ova"])
@pytest.mark.parametrize("quantise", [None, {}, {"qnorm": True, "qout": False, "cutoff": 900}, {"dsub": 4}])
def test_models_that_fasttext_trains_and_quantises_are_read(
    tmp_path: Path, loss: str, quantise: dict[str, Any] | None
) -> None:
    model, lines = train(tmp_path / "model", loss=loss, wordNgrams=2, minn=2, maxn=3)
    path = tmp_path / "model.bin"
    if quantise is not None:
        model.quantize(input=str(lines), **quantise)
    model.save_model(str(path))
    predictor = KernelPredictor(*read_model(path))
    texts = [*LINES, *(line.partition(" ")[2] for line in lines.read_text(encoding="utf-8").splitlines()[:50])]
    agree(predictor, reference(path), texts)
    agree_on_every_label(predictor, reference(path), texts)


@pytest.mark.parametrize("loss", [HIERARCHICAL, NEGATIVE_SAMPLING, SOFTMAX, ONE_VS_ALL])
@pytest.mark.parametrize(("labels", "width"), [(1, 4), (2, 4), (5, 8), (8, 8), (9, 20), (30, 20)])
def test_few_labels_are_read_from_the_rows_products_with_them(
    tmp_path: Path, labels: int, width: int, loss: int
) -> None:
    shape = Shape(loss=loss, labels=labels, dim=20, word_ngrams=2, quantised=True, qout=True, qnorm=True)
    path = write_model(tmp_path / "model", shape, WORDS, seed=labels)
    weights = read_model(path).weights
    products = multiply_rows(weights)
    assert products.rows.shape[1] == width
    assert (products is weights) == (width == 20)
    predictor = KernelPredictor(*read_model(path))
    agree_on_every_label(predictor, reference(path), LINES)
    labels_found, tops = predictor.tops(lines_of(LINES))
    shares = np.array([predictor.shares(lines_of(LINES), label) for label in predictor.labels])
    known = labels_found >= 0
    np.testing.assert_allclose(shares[labels_found[known], np.flatnonzero(known)], tops[known], atol=1e-5)


@pytest.mark.parametrize("loss", [HIERARCHICAL, SOFTMAX])
def test_sums_of_long_lines_are_no_worse_than_fasttexts(tmp_path: Path, loss: int) -> None:
    """A line that repeats a few words has nearly the average of their rows, which short lines have exactly."""
    path = write_model(tmp_path / "model", Shape(loss=loss), WORDS[1:], seed=3)
    predictor, model = KernelPredictor(*read_model(path)), reference(path)
    for once in ("ab ", "the house ", "Größe of 中文 "):
        _, exact = predictor.tops(lines_of([once * 10]))
        _, ours = predictor.tops(lines_of([once * 20_000]))
        ((theirs,),) = model.predict([once * 20_000])[1]
        assert abs(ours[0] - exact[0]) <= abs(theirs - exact[0]) + 1e-5


@pytest.mark.parametrize("name", ["dense", "word bigrams", "pruned"])
def test_scores_are_the_same_to_the_last_bit_whatever_the_cache_holds(tmp_path: Path, name: str) -> None:
    path = write_model(tmp_path / "model", SHAPES[name], WORDS, seed=9)
    model = read_model(path)
    warm = KernelPredictor(*model)
    random = np.random.default_rng(11)  # by which words lines differ, and which of them meet in a slot
    words = [f"{number:x}" * int(times) for number, times in enumerate(random.integers(1, 9, 3000))]
    lines = [" ".join(random.choice(words, 20)) for _ in range(300)]
    together = warm.tops(lines_of(lines))[1].tolist()
    assert warm.tops(lines_of(lines))[1].tolist() == together
    assert warm.tops(lines_of(lines[::-1]))[1].tolist() == together[::-1]
    weights, labels = model
    for line, share in list(zip(lines, together, strict=True))[:20]:
        assert KernelPredictor(weights, labels).tops(lines_of([line]))[1].tolist() == [share]
    small = KernelPredictor(weights, labels)
    cache = make_cache(weights)
    small._rows._of_thread.cache = type(cache)(cache.table[:9].copy(), cache.sums[:9].copy())
    assert small.tops(lines_of(lines))[1].tolist() == together


@pytest.mark.slow
def test_the_cache_has_a_bound_and_is_filled_anew_beyond_it(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model", Shape(minn=1, maxn=6, bucket=5000), WORDS, seed=2)
    predictor = KernelPredictor(*read_model(path))
    words = [f"{word}{'long' * (word % 5)}" for word in range(2 * MOST_SLOTS)]
    lines = [" ".join(words[at : at + 200]) for at in range(0, len(words), 197)]
    agree(predictor, reference(path), lines[::100])
    labels, _ = predictor.tops(lines_of(lines))
    again, _ = predictor.tops(lines_of(lines))
    assert labels.tolist() == again.tolist()
    cache = predictor._rows._cache()
    assert sum(part.nbytes for part in cache) <= MOST_CACHE_BYTES + 8 * COLUMNS + 4 * cache.sums.shape[1]
    taken = np.count_nonzero(cache.table[:-1, 0])
    assert len(cache.table) // 2 < taken < len(cache.table)


@pytest.mark.parametrize(
    ("shape", "slots"),
    [(Shape(dim=16), MOST_SLOTS), (Shape(dim=256), MOST_SLOTS // 16), (Shape(dim=256, maxn=0), MOST_SLOTS)],
)
def test_long_rows_are_kept_of_fewer_words(tmp_path: Path, shape: Shape, slots: int) -> None:
    cache = make_cache(read_model(write_model(tmp_path / "model", shape, WORDS, seed=2)).weights)
    assert len(cache.table) == slots + 1
    assert cache.table.ctypes.data % 128 == 0
    assert sum(part.nbytes for part in cache) <= MOST_CACHE_BYTES + 8 * COLUMNS + 4 * 256


@given(st.integers(1, 2**31 - 1), st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=50))
def test_buckets_are_remainders(buckets: int, values: list[int]) -> None:
    for number in (buckets, 1, 2, 2_000_000):
        ngrams = Ngrams(
            np.empty(0, np.uint64), np.empty(0, np.int32), 0, 1, 1, np.uint64(number), reciprocal(np.uint64(number))
        )
        for value in (*values, 0, number - 1, number, 2**64 - 1):
            assert bucket_of(ngrams, np.uint64(value)) == value % number


def test_threads_share_a_model_and_say_the_same(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model", Shape(loss=HIERARCHICAL, labels=30), WORDS, seed=4)
    predictor = KernelPredictor(*read_model(path))
    lines = lines_of([f"{word} the house of {word * 7}" for word in range(3000)])
    labels, shares = predictor.tops(lines)
    found: list[tuple[np.ndarray, np.ndarray]] = []
    threads = [threading.Thread(target=lambda: found.append(predictor.tops(lines))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    for of_thread in found:
        assert np.array_equal(of_thread[0], labels)
        assert np.array_equal(of_thread[1], shares)


def test_fasttext_predicts_where_our_kernels_cannot_and_says_why(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model", Shape(scale=3e15), WORDS, seed=6)
    predictor = load_model(str(path), "too large")
    assert isinstance(predictor, FastTextPredictor)
    assert predictor.fallback == "model: its matrices have numbers that are not finite, or too large"
    agree(predictor, reference(path), LINES)
    agree_on_every_label(predictor, reference(path), LINES)
    assert predictor.tops(lines_of(["the\nhouse"]))[0] == predictor.tops(lines_of(["the house"]))[0]


@pytest.mark.parametrize(
    ("at", "change", "reason"),
    [
        (0, struct.pack("<i", 1), "no fastText file"),
        (4, struct.pack("<i", 13), "no fastText file"),
        (36, struct.pack("<i", 1), "predicts no labels"),
        (32, struct.pack("<i", 9), "predicts no labels"),
        (40, struct.pack("<i", 0), "no buckets"),
        (40, struct.pack("<i", 10**6), "do not go with"),
        (64, struct.pack("<i", 8), "dictionary is damaged"),
    ],
)
def test_a_file_that_is_not_such_a_model_is_refused(tmp_path: Path, at: int, change: bytes, reason: str) -> None:
    path = write_model(tmp_path / "model", Shape(), WORDS, seed=6)
    content = bytearray(path.read_bytes())
    content[at : at + len(change)] = change
    path.write_bytes(content)
    with pytest.raises(UnknownModelError, match=reason):
        read_model(path)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.1, 0.5, 0.9, 0.999])
def test_a_file_that_is_not_whole_is_refused(tmp_path: Path, share: float) -> None:
    path = write_model(tmp_path / "model", Shape(quantised=True, qnorm=True, kept=30), WORDS, seed=6)
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(DamagedModelError):
        read_model(path)


@needs_model
def test_a_text_that_is_not_utf8_costs_itself_alone() -> None:
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
    found, errors = measure_texts(
        pa.chunked_array([texts]), lambda some: measure(predictor, section, wanted_languages(section), some)
    )
    assert found["language"].tolist() == ["en"]
    assert errors[0] is not None
    assert errors[1] is None


@needs_model
@settings(deadline=None)
@given(st.lists(TEXT.map(lambda text: text.replace("e", "\n")), min_size=1, max_size=5), st.integers(1, 90))
def test_what_the_kernel_sees_of_a_text_is_its_view(texts: list[str], characters: int) -> None:
    lines = lines_of(texts, characters)
    seen = [lines.data[begin:end].tobytes().decode() for begin, end in zip(lines.begins, lines.ends, strict=True)]
    assert [text.replace("\n", " ") for text in seen] == [view(text, characters) for text in texts]

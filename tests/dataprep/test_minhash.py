"""Shingles, signatures and bands equal plain Python, datasketch and the theory."""

from __future__ import annotations

import hashlib
import random
import re
from itertools import combinations

import numpy as np
import pyarrow as pa
import pytest
from datasketch import MinHash, MinHashLSH
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.dataprep.dedup.minhash import band_keys, signatures
from gristmill.dataprep.dedup.shingles import (
    ShingleSets,
    shingle_sets,
    similarities,
)
from gristmill.dataprep.dedup.sketches import sketch_texts
from gristmill.dataprep.text.unicode_tables import UNSPACED_RANGES

MASK = 2**64 - 1
ODD = 0x9E3779B97F4A7C15
any_text = st.text(st.characters(codec="utf-8"))
PIECES = ["a", "B", "b", "Éa", "_x1", "東京", "タ", "ไทย", "-", "İ", "ΣΑΣ", "٣", " "]
wordy_text = st.lists(st.sampled_from(PIECES)).map(" ".join)


def words_of(text: str) -> list[str]:
    """Words of a text by a regular expression, as `shingles` defines them."""
    alone = "".join(f"{chr(first)}-{chr(last)}" for first, last in UNSPACED_RANGES)
    lowered = "".join(c.lower() if len(c.lower()) == 1 else c for c in text)
    return [
        word
        for word in re.findall(f"[{alone}]|[^\\W{alone}]+", lowered)
        if re.match(r"\w", word)
    ]


def mix(value: int) -> int:
    """MurmurHash3's 64-bit finaliser in Python integers."""
    value ^= value >> 33
    value = value * 0xFF51AFD7ED558CCD & MASK
    value ^= value >> 33
    value = value * 0xC4CEB9FE1A85EC53 & MASK
    return value ^ value >> 33


def word_hash(word: str) -> int:
    value = 0
    for character in word:
        value = (value ^ ord(character)) * ODD & MASK
        value ^= value >> 32
    return mix((value + len(word)) & MASK)


def shingles_of(text: str, ngram: int) -> list[int]:
    """Hashes of a text's word n-grams in plain Python."""
    words = words_of(text)
    size = min(ngram, len(words))
    hashes = set()
    for start in range(len(words) - size + 1 if size else 0):
        value = 0
        for word in words[start : start + size]:
            value = (value * ODD + word_hash(word)) & MASK
        hashes.add(mix(value) >> 32)
    return sorted(hashes)


def as_lists(sets: ShingleSets) -> list[list[int]]:
    return [part.tolist() for part in np.split(sets.hashes, sets.offsets[1:-1])]


def perturbed(seed: int, words: int = 400) -> tuple[str, str]:
    """Two texts; the second has some words of the first replaced."""
    rng = random.Random(seed)
    first = [str(rng.randrange(10_000)) for _ in range(words)]
    share = rng.random() ** 2 / 4
    second = [
        str(rng.randrange(10_000)) if rng.random() < share else word for word in first
    ]
    return " ".join(first), " ".join(second)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.one_of(any_text, wordy_text), min_size=1, max_size=4), st.integers(1, 6)
)
def test_shingles_agree_exactly_with_the_plain_definition(
    texts: list[str], ngram: int
) -> None:
    assert as_lists(shingle_sets(pa.array(texts), ngram)) == [
        shingles_of(text, ngram) for text in texts
    ]


def test_case_punctuation_and_spacing_are_ignored() -> None:
    texts = [
        "The quick, brown FOX -- jumps!",
        "the\nquick brown   fox.jumps",
        "ÀÉÎ Straße Ωμέγα",
        "àéî straße ωμέγα",
    ]
    sets = as_lists(shingle_sets(pa.array(texts), 2))
    assert sets[0] == sets[1]
    assert sets[2] == sets[3]


def test_each_character_of_an_unspaced_script_is_a_word() -> None:
    (chinese,) = as_lists(shingle_sets(pa.array(["自然语言处理很有趣"]), 5))
    assert len(chinese) == 5
    (mixed,) = as_lists(shingle_sets(pa.array(["Python语言"]), 1))
    assert len(mixed) == 3


def test_short_text_has_one_shingle_and_wordless_text_none() -> None:
    sets = as_lists(
        shingle_sets(pa.array(["one two", "One... two?", "two one", "", "?!"]), 5)
    )
    assert [len(shingles) for shingles in sets] == [1, 1, 1, 0, 0]
    assert sets[0] == sets[1] != sets[2]


@pytest.mark.parametrize("num_permutations", [112, 128])
@pytest.mark.parametrize("seed", [1, 42])
def test_signatures_equal_datasketch(num_permutations: int, seed: int) -> None:
    texts = [text for pair in range(20) for text in perturbed(pair)] + [
        "",
        "one",
        "...",
    ]
    sets = shingle_sets(pa.array(texts), 5)
    ours = signatures(sets, num_permutations, seed)
    assert ours.dtype == np.uint32
    for row, shingles in zip(ours, as_lists(sets), strict=True):
        theirs = MinHash(
            num_permutations, seed, scheme="affine32", hashfunc=lambda value: value
        )
        theirs.update_batch(shingles)
        np.testing.assert_array_equal(row, theirs.hashvalues)


def test_signature_agreement_estimates_the_similarity() -> None:
    pairs = [perturbed(seed) for seed in range(300)]
    sets = shingle_sets(pa.array([text for pair in pairs for text in pair]), 5)
    signature = signatures(sets, 112, 1)
    left, right = np.arange(0, 600, 2), np.arange(1, 600, 2)
    estimate = (signature[left] == signature[right]).mean(axis=1)
    truth = similarities(sets, left, right)
    plain = [set(shingles) for shingles in as_lists(sets)]
    expected = [
        len(plain[a] & plain[b]) / len(plain[a] | plain[b]) for a, b in zip(left, right)
    ]
    np.testing.assert_array_equal(truth, expected)
    assert truth.min() < 0.3 < 0.9 < truth.max()
    # A mean of 112 Bernoulli trials: standard deviation sqrt(J (1 - J) / 112); here its
    # root mean square and bias.
    deviation = np.sqrt((truth * (1 - truth) / 112).mean())
    assert np.sqrt(((estimate - truth) ** 2).mean()) < 1.15 * deviation
    assert abs((estimate - truth).mean()) < 4 * deviation / np.sqrt(300)


def test_bands_find_the_pairs_of_datasketchs_index() -> None:
    texts = [text for pair in range(60) for text in perturbed(pair)]
    sets = shingle_sets(pa.array(texts), 5)
    signature = signatures(sets, 112, 1)
    keys = band_keys(signature, 14, 8)
    index = MinHashLSH(num_perm=112, params=(14, 8))
    sketches = [MinHash(112, hashvalues=row, scheme="affine32") for row in signature]
    for number, sketch in enumerate(sketches):
        index.insert(number, sketch)
    theirs = {
        (a, b)
        for b, sketch in enumerate(sketches)
        for a in index.query(sketch)
        if a < b
    }
    ours = {
        (a, b)
        for a, b in combinations(range(len(texts)), 2)
        if (keys[a] == keys[b]).any()
    }
    assert ours == theirs
    assert 20 < len(ours) < 60


def test_equal_rows_in_different_bands_have_different_keys() -> None:
    keys = band_keys(np.ones((1, 24), np.uint32), 3, 8)
    assert len(set(keys[0].tolist())) == 3


@given(st.lists(st.sets(st.integers(0, 30)), min_size=2, max_size=6))
def test_similarity_equals_that_of_the_sets(sets: list[set[int]]) -> None:
    sizes = [np.int64(len(values)) for values in sets]
    hashes = np.array([value for values in sets for value in sorted(values)], np.uint32)
    shingles = ShingleSets(hashes, np.cumsum([np.int64(0), *sizes]))
    left, right = np.triu_indices(len(sets))
    for a, b, similarity in zip(left, right, similarities(shingles, left, right)):
        union = len(sets[a] | sets[b])
        assert similarity == (len(sets[a] & sets[b]) / union if union else 0)
        assert similarities(shingles, np.array([b]), np.array([a])) == [similarity]


@given(st.lists(any_text, max_size=6))
def test_digests_equal_hashlib(texts: list[str]) -> None:
    column = pa.array(["before", *texts], pa.large_string()).slice(1)
    assert sketch_texts(column, None)["digest"].to_pylist() == [
        hashlib.blake2b(text.encode(), digest_size=16).digest() for text in texts
    ]

"""spaCy's English words: the fast cuts equal spaCy's own."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Sequence

import numpy as np
import pytest

from gristmill.dataprep.text.unicode_tables import code_point_flags
from gristmill.dataprep.words import spacy_words
from gristmill.dataprep.words.tokenise_words import describe_words

spacy = pytest.importorskip("spacy")
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def together(texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    encoded = [text.encode() for text in texts]
    return np.frombuffer(b"".join(encoded), np.uint8), np.cumsum(
        [0, *map(len, encoded)]
    )


def sizes_of(runs: Sequence[str]) -> list[int]:
    data, offsets = together(runs)
    exceptions = spacy_words._exceptions(spacy_words.load_tokenizer())
    kinds = spacy_words._byte_kinds()
    sizes: list[int] = spacy_words.count_simple_words(
        data, offsets[:-1], offsets[1:], kinds, exceptions
    ).tolist()
    return sizes


def words_of(runs: Sequence[str]) -> list[list[str]]:
    data, offsets = together(runs)
    words = spacy_words.spacy_words(
        data, offsets, code_point_flags(), np.arange(len(offsets) - 1)
    )
    texts = [
        data[begin:end].tobytes().decode()
        for begin, end in zip(words.starts, words.ends, strict=True)
    ]
    return [
        texts[begin:end]
        for begin, end in zip(words.offsets, words.offsets[1:], strict=False)
    ]


def random_runs(seed: int) -> list[str]:
    """Letters, digits and spaCy's exceptions: alone, joined by hyphens, and between
    marks.
    """
    rng = random.Random(seed)
    stems = ["".join(rng.choices(LETTERS, k=rng.randint(1, 9))) for _ in range(1500)]
    stems += [
        "".join(rng.choices("0123456789", k=rng.randint(1, 6))) for _ in range(300)
    ]
    stems += [stem.title() for stem in stems[:500]] + [
        stem.lower() for stem in stems[:500]
    ]
    stems += list(spacy_words.load_tokenizer().rules)
    marks = [
        "",
        *"".join(spacy_words.KINDS.values()).replace("-", "")[-9:],
        "..",
        "'",
        "%",
        "km",
        "-",
        "'s",
    ]
    runs = list(stems)
    for stem in stems * 3:
        joined = rng.choice(
            [stem, stem, stem + rng.choice(["-", "--", "---", "/"]) + rng.choice(stems)]
        )
        before, after = (
            "".join(rng.choices(marks, k=rng.randint(0, most))) for most in (1, 3)
        )
        runs.append(before + joined + after)
    return [
        run for run in runs if run and not any(character.isspace() for character in run)
    ]


@pytest.mark.slow
def test_runs_are_cut_like_spacy() -> None:
    runs = random_runs(20261123)
    tokenizer = spacy.blank("en").tokenizer
    assert sum(size > 0 for size in sizes_of(runs)) > len(runs) / 5
    for run, words in zip(runs, words_of(runs), strict=True):
        assert words == [token.text for token in tokenizer(run)]


@pytest.mark.parametrize(
    "run",
    [
        "cannot",
        "dont,",
        "Mr.",
        "vs.",
        "A.",
        "USA.",
        "I.",
        "naïve",
        "5km",
        "o.O",
        ".",
        "a1",
        "don't",
        "(him):",
        "well-",
        "was--Mrs.",
        "3.5",
        "a---b",
        "_",
        "-a",
    ],
)
def test_ambiguous_runs_are_left_to_spacy(run: str) -> None:
    assert sizes_of([run]) == [0]


def test_simple_runs_are_cut_without_spacy() -> None:
    assert sizes_of(
        ["e", "1990,", '"Yes,"', "well-known", "day--night;", "(him)", "1."]
    ) == [1, 2, 4, 3, 4, 3, 2]


def test_words_have_the_usual_description() -> None:
    texts = [
        "The cats, don't sit: 1990. naïve “x” :-) U.K.-based",
        "",
        "one",
        "  ",
        "end.",
    ]
    data, offsets = together(texts)
    words = spacy_words.spacy_words(
        data, offsets, code_point_flags(), np.arange(len(offsets) - 1)
    )
    expected = describe_words(
        data, code_point_flags(), words.offsets, words.starts, words.ends
    )
    assert words.chars.tolist() == expected.chars.tolist()
    assert words.seen.tolist() == expected.seen.tolist()
    word_texts = [
        data[begin:end].tobytes().decode()
        for begin, end in zip(words.starts, words.ends, strict=True)
    ]
    for text, begin, end in zip(texts, words.offsets, words.offsets[1:], strict=False):
        assert word_texts[begin:end] == [
            token.text
            for token in spacy_words.load_tokenizer()(text)
            if token.text.strip()
        ]


@pytest.mark.slow
def test_spacy_loads_without_torch() -> None:
    script = """
import sys
from gristmill.dataprep.words.spacy_words import load_tokenizer
print([token.text for token in load_tokenizer()("Don't!")], "torch" in sys.modules)
import torch
print(torch.ones(1).item())
"""
    printed = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout
    assert printed.splitlines() == ["['Do', \"n't\", '!'] False", "1.0"]

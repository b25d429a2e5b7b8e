"""spaCy's English words: the fast cuts equal spaCy's own."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Sequence

import numpy as np
import pytest

from gristmill.dataprep.text.unicode_tables import code_point_flags
from gristmill.dataprep.words import spacy_rules, spacy_words
from gristmill.dataprep.words.tokenise_words import describe_words

spacy = pytest.importorskip("spacy")
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def together(texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    encoded = [text.encode() for text in texts]
    return np.frombuffer(b"".join(encoded), np.uint8), np.cumsum(
        [0, *map(len, encoded)]
    )


def sizes_of(runs: Sequence[str]) -> np.ndarray:
    data, offsets = together(runs)
    rules = spacy_words.english_rules()
    return spacy_rules.split_runs(data, offsets[:-1], offsets[1:], rules)[0]


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
    """Letters, digits and spaCy's exceptions: alone, joined by marks, and between
    marks; and marks alone.
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
        *"\"'()[]{}<>,;:!?.-+*/=_#&%$^~@|\\",
        *"“”’—–…«»¿°²é東я€★",
        *("..", "...", "……", "km", "US$", "'s", "’S", "://", "):", ".com", "x.y"),
        *("1.2.3.4", "8", "😀", "--", "---", "——", "-5"),
    ]
    runs = list(stems)
    for stem in stems * 3:
        joint = "".join(rng.choices(marks, k=rng.randint(1, 3)))
        joined = rng.choice([stem, stem, stem + joint + rng.choice(stems)])
        before, after = (
            "".join(rng.choices(marks, k=rng.randint(0, most))) for most in (2, 4)
        )
        runs.append(before + joined + after)
    runs += ["".join(rng.choices(marks, k=rng.randint(1, 6))) for _ in range(5000)]
    return [
        run for run in runs if run and not any(character.isspace() for character in run)
    ]


@pytest.mark.slow
def test_runs_are_cut_like_spacy() -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    runs = random_runs(seed)
    tokenizer = spacy.blank("en").tokenizer
    assert (sizes_of(runs) > 0).mean() > 0.8
    for run, words in zip(runs, words_of(runs), strict=True):
        assert words == [token.text for token in tokenizer(run)]


@pytest.mark.parametrize(
    "run",
    [
        "1😀",
        "20°C.",
        "US$5",
        "http://example.com/a-b",
        "me@x.org/a-b",
        "x):)",
        "a" * 256,
    ],
)
def test_rare_runs_are_left_to_spacy(run: str) -> None:
    assert sizes_of([run]).tolist() == [0]


def test_runs_are_cut_without_spacy() -> None:
    runs = {
        "e": 1,
        "cannot": 2,
        "don't": 2,
        "Mr.": 1,
        "Mr.,": 2,
        "C++;": 2,
        '"Yes,"': 4,
        "well-known": 3,
        "day--night;": 4,
        "(him):": 3,
        "f(x):": 2,
        "naïve…": 2,
        "“x”": 3,
        "3.5km.": 3,
        "a/b<c": 5,
        "it's": 2,
        "1.": 2,
    }
    tokenizer = spacy_words.load_tokenizer()
    assert runs == {run: len(tokenizer(run)) for run in runs}
    assert sizes_of([*runs]).tolist() == [*runs.values()]


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

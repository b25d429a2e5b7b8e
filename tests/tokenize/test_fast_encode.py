"""Ids by gigatoken equal those of the tokenizers library, for any text and every family
of tokenizers.
"""

from __future__ import annotations

import io
import json
import os
import random
import subprocess
import sys
import threading
import unicodedata
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from gristmill.core.processes import resident_bytes
from gristmill.dataprep.text.unicode_tables import ranges
from gristmill.tokenize.encoding import fast_encode
from gristmill.tokenize.encoding.fast_encode import (
    NFC_SINCE_UNICODE_9,
    NONCHARACTERS,
    UNICODE_17,
    FastEncoder,
    replace_stand_ins,
    unlike,
)
from gristmill.tokenize.encoding.known_tokenizers import NEVER_TEXT, NotKnownError
from gristmill.tokenize.encoding.pretokens import LLAMA3, byte_characters
from tests.tokenize.families import (
    BYTE_LEVEL,
    CL100K,
    FAMILIES,
    MANIFEST,
    SPECIAL,
    changed,
    family,
)

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
PIECES = [
    "'s",
    "'S",
    "'ll",
    "'LL",
    "'ſ",
    "'ve",
    "'rE",
    "'",
    " ",
    "  ",
    "        ",
    "\n",
    "\r\n",
    "\r",
    "\t",
    "\u00a0",
    "\u3000",
    "\u0085",
    "\u200b",
    "a",
    "B",
    "é",
    "e\u0301",
    "1",
    "23",
    "456",
    "²",
    "Ⅷ",
    "٣",
    "_",
    "-",
    "...",
    "日",
    "本",
    "ไท",
    "한",
    "🏳️\u200d🌈",
    "\x00",
    "\x00" * 9,
    "\U000e0001",
    "word",
    "\ufffd",
    "Ünder",
    "\u212a",
    "/",
    "//\n",
    "seven77",
    "eightsss",
    "fifteenlettersss",
    "sixteenletterssss",
    "[",
    "`",
    "{",
    "@",
    "\x7f",
    "\u0378",
    "\u2581",
    "\u2581\u2581",
    "<0x41>",
    "\u088f",
    "\U000323b0",
    "\u07fd",
    "\u1bf3",
    "नमस्ते",
    "\u1c89",
    "McDonald",
    "HTTPServer",
    "ǅ",
    "ʰ",
    "zq",
    "日日",
    NEVER_TEXT,
    "\uffff",
    *SPECIAL,
    "<|endo",
    "text|>",
]


@cache
def encoder_of(name: str) -> FastEncoder:
    return FastEncoder.for_tokenizer(family(name))


SUPPORTED = tuple(name for name in FAMILIES if name != "cl100k")
by_family = pytest.mark.parametrize("name", SUPPORTED)
with_shared_data = pytest.mark.skipif(
    not SHARED.exists(), reason="no shared data beside the checkout"
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return family("gpt2")


def by_library(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    return [
        encoding.ids
        for encoding in tokenizer.encode_batch(list(texts), add_special_tokens=False)
    ]


def split_ids(ids: np.ndarray, lengths: np.ndarray) -> list[list[int]]:
    parts = np.split(ids, np.cumsum(lengths)[:-1]) if len(lengths) else []
    return [part.tolist() for part in parts]


def by_encoder(encoder: FastEncoder, texts: Sequence[str]) -> list[list[int]]:
    return split_ids(*encoder.encode(pa.array(texts, pa.large_string())))


def by_gigatoken(encoder: FastEncoder, texts: Sequence[str]) -> list[list[int]]:
    """Encode all texts without the library."""
    column = pa.array(texts, pa.large_string())
    return split_ids(*encoder._encode(*fast_encode.text_buffers(column)))


def check_ids(
    tokenizer: Tokenizer, texts: Sequence[str], encoder: FastEncoder | None = None
) -> None:
    """Assert that an encoder (by default a new one) has the ids of the library."""
    encoder = encoder or FastEncoder.for_tokenizer(tokenizer)
    assert by_encoder(encoder, texts) == by_library(tokenizer, texts)


awkward_text = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)


@pytest.mark.slow
@by_family
@settings(deadline=None, max_examples=100)
@given(texts=st.lists(awkward_text | st.text(max_size=20), max_size=5))
@example(texts=["\x00" * 15 + "a" * 9, "\x00" * 9, "a word" + "\x00" * 8])
@example(texts=[NEVER_TEXT, "a" + NEVER_TEXT + "٣", "plain ٣ text"])
@example(texts=["a\u088fa1\u088f", "", "plain", "\U000323b0\U000323b0 x", "12٣4 1²3"])
def test_ids_equal_those_of_the_library_on_any_text(
    name: str, texts: list[str]
) -> None:
    check_ids(family(name), texts, encoder_of(name))


@pytest.mark.slow
@by_family
@settings(deadline=None, max_examples=50)
@given(
    text=st.lists(
        st.sampled_from([*SPECIAL, " ", "a", "\n", "<", "|>", "s>", "[", "]"]),
        max_size=8,
    ).map("".join)
)
def test_text_spelling_a_special_token_is_encoded_as_text(name: str, text: str) -> None:
    special = {
        number
        for number, token in family(name).get_added_tokens_decoder().items()
        if token.special
    }
    assert len(special) >= len(SPECIAL)
    ids = by_encoder(encoder_of(name), [text])[0]
    unknown = family(name).token_to_id("<unk>")
    assert not special.intersection(ids) - {unknown}
    assert ids == by_library(family(name), [text])[0]


def listed_codes(listed: str) -> list[int]:
    return [code for first, last in ranges(listed) for code in range(first, last + 1)]


def code_points() -> list[int]:
    return [code for code in range(0x34000) if not 0xD800 <= code < 0xE000]


def disagreements(name: str, codes: Sequence[int]) -> list[int]:
    """Return code points whose texts gigatoken alone encodes differently from the
    library.
    """
    texts = [
        f"a{chr(code)}1{chr(code)}! {chr(code)}A{chr(code)}.{chr(code)}"
        for code in codes
    ]
    library = every_pair(name)
    ids = by_gigatoken(FastEncoder.for_tokenizer(library), texts)
    return [
        code
        for code, ids_of_text, expected in zip(
            codes, ids, by_library(library, texts), strict=True
        )
        if ids_of_text != expected
    ]


@cache
def every_pair(name: str) -> Tokenizer:
    """Build a tokenizer that merges any two bytes, so that its ids show where a text
    was split.
    """
    characters = byte_characters()
    pairs = [(first, second) for first in characters for second in characters]

    def change(described: dict[str, Any]) -> None:
        described["model"].update(
            {
                "vocab": {
                    token: number
                    for number, token in enumerate([*characters, *map("".join, pairs)])
                },
                "merges": pairs,
                "ignore_merges": False,
            }
        )
        described["added_tokens"] = []

    return changed(family(name), change)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in BYTE_LEVEL if name in SUPPORTED])
def test_unicode_17_list_is_complete(name: str) -> None:
    """Fails if a new version of either library knows other characters, which UNICODE_17
    must then list.

    Two families try all characters; the others, with the same classes in their
    patterns, the borders of the classes.
    """
    codes = code_points()
    if name not in ("gpt2", "deepseek"):
        categories = [unicodedata.category(chr(code)) for code in range(0x34001)]
        codes = [
            code
            for code in codes
            if len(set(categories[max(code - 1, 0) : code + 2])) > 1
        ]
    differing = {
        code
        for start in range(0, len(codes), 8192)
        for code in disagreements(name, codes[start : start + 8192])
    }
    unlisted = differing.difference(listed_codes(UNICODE_17))
    assert not unlisted, sorted(map(hex, unlisted))[:20]


@pytest.mark.slow
def test_nfc_list_is_complete() -> None:
    listed = set(listed_codes(UNICODE_17 + NFC_SINCE_UNICODE_9))
    codes = code_points()
    texts = [
        "a\u0301{0}a\u0345{0}a{0}\u0301a{0}\u0334{0}e".format(chr(code))
        for code in codes
    ]
    texts += [unicodedata.normalize("NFD", chr(code)) for code in codes]
    plain = merging([])
    plain.normalizer = normalizers.NFC()
    encoder = FastEncoder.for_tokenizer(plain)
    for start in range(0, len(texts), 8192):
        batch = texts[start : start + 8192]
        ids = by_gigatoken(encoder, batch)
        for text, *both in zip(batch, ids, by_library(plain, batch), strict=True):
            if both[0] != both[1]:
                assert listed.intersection(map(ord, text)), ascii(text)


@pytest.mark.slow
def test_every_listed_character_is_unassigned_in_the_unicode_of_the_library() -> None:
    codes = listed_codes(UNICODE_17)
    assert {unicodedata.category(chr(code)) for code in codes} == {"Cn"}
    assert len(codes) == 4803
    assert disagreements("deepseek", codes) == codes


def test_batches_with_listed_characters_keep_their_order(tokenizer: Tokenizer) -> None:
    source = random.Random(4)
    for _ in range(50):
        texts = [
            "".join(
                source.choices(
                    ["a\u088fb", "word ", "x", "日", "\U000323b1", "ä"],
                    k=source.randint(0, 3),
                )
            )
            for _ in range(6)
        ]
        check_ids(tokenizer, texts, encoder_of("gpt2"))


@settings(deadline=None, max_examples=200)
@given(
    texts=st.lists(
        st.lists(
            st.sampled_from(
                [
                    "a" * 7,
                    "b" * 63,
                    " ",
                    "é",
                    "\u07fd",
                    "\u07fc",
                    "日",
                    "\u20c1",
                    "\u20c0",
                    "\ufffd",
                    "\ufffe",
                    "😀",
                    "\U0001fac8",
                    "\u0c3c",
                    "c" * 256,
                ]
            ),
            max_size=12,
        ).map("".join),
        max_size=5,
    ),
    nfc=st.booleans(),
)
def test_listed_characters_are_found_at_any_position(
    texts: list[str], nfc: bool
) -> None:
    listed = set(
        map(chr, listed_codes(NONCHARACTERS + UNICODE_17 + NFC_SINCE_UNICODE_9 * nfc))
    )
    flags = np.ones(len(texts), bool)
    counts = np.empty((2, len(texts)), np.int64)
    fast_encode.scan_texts(
        *fast_encode.text_buffers(pa.array(texts, pa.large_string())),
        unlike(nfc),
        *counts,
        flags,
    )
    assert flags.tolist() == [not listed.isdisjoint(text) for text in texts]


def test_stand_ins_are_replaced_by_several_ids() -> None:
    ids, lengths = (
        np.array([3, 101, 100, 4, 100], np.uint32),
        np.array([0, 2, 0, 2, 1, 0]),
    )
    replaced, longer = replace_stand_ins(ids, lengths, 100, [[7, 8], [1, 2, 5]])
    assert replaced.tolist() == [3, 1, 2, 5, 7, 8, 4, 7, 8]
    assert longer.tolist() == [0, 4, 0, 3, 2, 0]
    same, lengths = replace_stand_ins(ids, lengths, 102, [])
    assert (same.tolist(), lengths.tolist()) == (ids.tolist(), [0, 2, 0, 2, 1, 0])


def test_full_cache_is_reset_without_changing_ids(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, resets = random.Random(3), []
    encoder = FastEncoder.for_tokenizer(tokenizer)
    monkeypatch.setattr(fast_encode, "CACHE_BYTES", 0)
    monkeypatch.setattr(fast_encode, "resident_bytes", lambda: source.randint(0, 3))
    monkeypatch.setattr(
        FastEncoder,
        "forget",
        lambda self, forget=FastEncoder.forget: (resets.append(1), forget(self)),
    )
    for _ in range(60):
        texts = [
            "".join(source.choices(PIECES, k=8)) + str(source.random())
            for _ in range(3)
        ]
        check_ids(tokenizer, texts, encoder)
    assert 5 < len(resets) < 60


@pytest.mark.slow
def test_cache_of_unique_words_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unbounded, they would take some 600 MB; a call adds to CACHE_BYTES what it
    encodes before the reset.
    """
    monkeypatch.setattr(fast_encode, "CACHE_BYTES", 64 << 20)
    encoder, source = (
        FastEncoder.for_tokenizer(family("gpt2")),
        np.random.default_rng(5),
    )
    baseline, peak = resident_bytes(), 0
    for _ in range(25):
        letters = source.integers(97, 123, 4 << 20, np.uint8)
        letters[::7] = 32
        encoder.encode(pa.array([letters.tobytes().decode()]))
        peak = max(peak, resident_bytes() - baseline)
    assert peak < 300 << 20, peak


ONE_THREAD = """
import os, sys
import pyarrow as pa
from gristmill.tokenize.encoding.fast_encode import FastEncoder
from tests.tokenize.families import family

texts = pa.array(["some words and 1234 " * 500] * 400)
tokenizers = [family(name) for name in ("gpt2", "llama2")]
before = os.listdir("/proc/self/task")
for tokenizer in tokenizers:
    FastEncoder.for_tokenizer(tokenizer).encode(texts)
sys.exit(os.listdir("/proc/self/task") != before)
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/task").exists(), reason="only Linux lists threads there"
)
def test_encoding_starts_no_threads() -> None:
    """Runs in a new process, since thread pools of this one persist."""
    root = Path(__file__).parents[2]
    environment = {
        **os.environ,
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": str(root),
    }
    process = subprocess.run(
        [sys.executable, "-c", ONE_THREAD],
        cwd=root,
        env=environment,
        check=False,
        timeout=120,
    )
    assert process.returncode == 0


def test_encoders_in_several_threads_are_independent(tokenizer: Tokenizer) -> None:
    texts = [
        f"{word} number {number} \u088f"
        for number in range(300)
        for word in ("river", "日本", "12٣")
    ]
    started = threading.Barrier(4)

    def encoded(_: int) -> list[list[int]]:
        started.wait()
        return by_encoder(FastEncoder.for_tokenizer(tokenizer), texts)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(encoded, range(4))) == [by_library(tokenizer, texts)] * 4


def test_panic_in_gigatoken_falls_back_to_the_library(tokenizer: Tokenizer) -> None:
    PanicException = type("PanicException", (BaseException,), {})

    class Panicking:
        def encode_batch(self, texts: Any, parallel: bool) -> Any:
            raise PanicException("index out of bounds")

    encoder = FastEncoder.for_tokenizer(tokenizer)
    encoder._gigatoken = Panicking()
    check_ids(tokenizer, ["one", "", "two words"], encoder)


@by_family
def test_long_and_repetitive_texts_are_encoded_as_by_the_library(name: str) -> None:
    texts = [
        "river " + "waterriver" * 300 + " end",
        "-" * 5000,
        "日本語" * 2000,
        "x" * 30_000,
        "\x00" * 3000,
        " " * 5000 + "a",
        "\n" * 5000,
        "1" * 5000,
        "e\u0301" * 3000,
        "a\u00a0" * 2000,
    ]
    check_ids(family(name), texts, encoder_of(name))


def test_sliced_and_chunked_arrays_are_encoded(tokenizer: Tokenizer) -> None:
    texts = ["one", "two words", "", "thirteen more letters", "end"]
    column = pa.chunked_array(
        [pa.array(texts, pa.string())[1:4], pa.array(texts[::-1], pa.string())]
    )
    ids, lengths = encoder_of("gpt2").encode(column)
    expected = by_library(tokenizer, [*texts[1:4], *texts[::-1]])
    assert ids.tolist() == [
        number for document_ids in expected for number in document_ids
    ]
    assert lengths.tolist() == [len(document_ids) for document_ids in expected]
    assert ids.dtype == np.uint32
    for empty_texts in ([], [""], ["", None]):
        ids, lengths = encoder_of("gpt2").encode(
            pa.array(empty_texts, pa.large_string())
        )
        assert (ids.tolist(), lengths.tolist()) == ([], [0] * len(empty_texts))


def test_invalid_utf8_is_rejected() -> None:
    for name in ("gpt2", "llama2"):
        with pytest.raises(pa.ArrowInvalid):
            encoder_of(name).encode(pa.array([b"\xff\xfe"]).view(pa.string()))


def test_ignore_merges_keeps_whole_tokens() -> None:
    """Llama 3's `ignore_merges`; no merges lead to the token "zq"."""
    llama3, numbers = family("llama3 whole"), family("llama3 whole").get_vocab()
    assert by_encoder(
        encoder_of("llama3 whole"), ["zq", "(zq", "zqzqzqzqzqzqzqzqzqzqzq"]
    ) == [
        [numbers["zq"]],
        by_library(llama3, ["(zq"])[0],
        [numbers["zqzqzqzqzqzqzqzqzqzqzq"]],
    ]
    plain = changed(
        llama3, lambda described: described["model"].update(ignore_merges=False)
    )
    assert (
        by_encoder(FastEncoder.for_tokenizer(plain), ["zq"])
        == by_library(plain, ["zq"])
        != [[numbers["zq"]]]
    )


def merging(
    merges: Sequence[tuple[str, str]], vocabulary: Sequence[str] = ()
) -> Tokenizer:
    tokens = dict.fromkeys([*byte_characters(), *vocabulary, *map("".join, merges)])
    tokenizer = Tokenizer(
        models.BPE({token: number for number, token in enumerate(tokens)}, list(merges))
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.encode_special_tokens = True
    return tokenizer


@settings(deadline=None, max_examples=60)
@given(
    merges=st.lists(
        st.tuples(
            st.sampled_from(["a", "b", "aa", "ab", "ba", "bb", "aab"]),
            st.sampled_from(["a", "b", "aa", "ab", "ba", "bb", "abb"]),
        ),
        min_size=1,
        max_size=12,
    ),
    tokens=st.permutations(["aa", "ab", "ba", "bb", "aab", "abb", "aaa", "abab"]),
    texts=st.lists(
        st.text(alphabet="ab", min_size=1, max_size=40), min_size=1, max_size=6
    ),
)
def test_unordered_and_repeated_merges_are_applied_as_by_the_library(
    merges: list[tuple[str, str]], tokens: list[str], texts: list[str]
) -> None:
    """Two merges may make one token, their ids may not follow their ranks, and one may
    be listed twice.
    """
    tokenizer = merging(merges, tokens)
    check_ids(tokenizer, texts)


@settings(deadline=None, max_examples=60)
@given(
    added=st.lists(
        st.text(alphabet="abc <|", min_size=1, max_size=5), max_size=5, unique=True
    ),
    special=st.lists(
        st.text(alphabet="abc <|", min_size=1, max_size=5), max_size=5, unique=True
    ),
    texts=st.lists(st.text(alphabet="abc <|", max_size=30), max_size=6),
)
def test_added_tokens_are_matched_as_by_the_library_or_left_to_it(
    added: list[str], special: list[str], texts: list[str]
) -> None:
    tokenizer = merging([("a", "b"), ("ab", "c"), ("<", "|")])
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.add_tokens([token for token in added if token not in special])
    try:
        encoder = FastEncoder.for_tokenizer(tokenizer)
    except NotKnownError as error:
        assert "special token" in str(error)  # noqa: PT017 - most examples raise nothing
    else:
        check_ids(tokenizer, texts, encoder)


def test_thousands_of_added_tokens_are_matched(tokenizer: Tokenizer) -> None:
    extended = Tokenizer.from_str(tokenizer.to_str())
    extended.add_tokens([f"word{number}" for number in range(3000)])
    extended.encode_special_tokens = True
    texts = ["a word2999 b", "word1", "word30000wor word"]
    check_ids(extended, texts)


def test_byte_characters_equal_those_of_the_library() -> None:
    assert sorted(byte_characters()) == sorted(pre_tokenizers.ByteLevel.alphabet())
    assert byte_characters()[ord(" ")] == "Ġ"


def _add(token: AddedToken) -> Callable[[Tokenizer], None]:
    return lambda tokenizer: tokenizer.add_tokens([token])


def _split(
    regex: str, behaviour: str = "isolated", before: Sequence[Any] = ()
) -> Callable[[Tokenizer], None]:
    def change(tokenizer: Tokenizer) -> None:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                *before,
                pre_tokenizers.Split(Regex(regex), behaviour),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )

    return change


def _pre(*steps: Any) -> Callable[[Tokenizer], None]:
    return lambda tokenizer: setattr(
        tokenizer, "pre_tokenizer", pre_tokenizers.Sequence([*steps])
    )


BYTES_ONLY = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
UNSUPPORTED: dict[str, tuple[Callable[[Tokenizer], Any], str]] = {
    "normalizer": (
        lambda tokenizer: setattr(tokenizer, "normalizer", normalizers.Lowercase()),
        "its normalizer is Lowercase",
    ),
    "no pattern": (_pre(BYTES_ONLY), "its pre-tokenizer is ByteLevel"),
    "no pre-tokenizer": (
        lambda tokenizer: setattr(tokenizer, "pre_tokenizer", None),
        "its pre-tokenizer is none",
    ),
    "punctuation": (
        _pre(
            pre_tokenizers.Punctuation(),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ),
        "its pre-tokenizer is Punctuation [+] ByteLevel",
    ),
    "regex": (
        _split(LLAMA3.replace("{1,3}", "{1,2}")),
        "gigatoken does not know it: .*Unknown pre_tokenizer",
    ),
    "digits and a regex": (
        _split(LLAMA3, before=[pre_tokenizers.Digits(individual_digits=True)]),
        "its pre-tokenizer is Digits [+] Split [+] ByteLevel",
    ),
    "removed": (_split(LLAMA3, "removed"), "in another way: Removed, invert False"),
    "possessive": (_split(CL100K), "its ids differ from the library's on probes"),
    "prefix": (
        _pre(
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=True),
        ),
        "Digits [+] ByteLevel with add_prefix_space",
    ),
    "whole words": (
        _add(AddedToken("river", single_word=True)),
        "its added token 'river' has single_word",
    ),
    "stripping": (
        _add(AddedToken("river", lstrip=True)),
        "its added token 'river' has lstrip",
    ),
    "hidden": (
        _add(AddedToken("endoftext", special=False)),
        "'endoftext' may be a part of .* '<.endoftext.>'",
    ),
}


@pytest.mark.parametrize("change", UNSUPPORTED)
def test_unsupported_tokenizer_is_left_to_the_library(
    tokenizer: Tokenizer, change: str
) -> None:
    unknown = Tokenizer.from_str(tokenizer.to_str())
    unknown.encode_special_tokens = True
    UNSUPPORTED[change][0](unknown)
    with pytest.raises(NotKnownError, match=UNSUPPORTED[change][1]):
        FastEncoder.for_tokenizer(unknown)


@pytest.mark.parametrize(
    ("tokenizer", "reason"),
    [
        (
            Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?")),
            "its model is WordLevel",
        ),
        (Tokenizer(models.Unigram([("a", 0.0)], 0)), "its model is Unigram"),
        (
            Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")])),
            "lacks 241 of the bytes of text",
        ),
        (Tokenizer(models.BPE({"a": 0}, [], dropout=0.1)), "its model has dropout"),
        (
            Tokenizer(models.BPE({"a": 0}, [], end_of_word_suffix="</w>")),
            "its model has end_of_word_suffix",
        ),
        (
            Tokenizer(models.BPE({"<0x41>": 0}, [], byte_fallback=True)),
            "lacks 242 of the bytes of text",
        ),
    ],
)
def test_unsupported_model_is_left_to_the_library(
    tokenizer: Tokenizer, reason: str
) -> None:
    with pytest.raises(NotKnownError, match=reason):
        FastEncoder.for_tokenizer(tokenizer)


def test_tokenizer_with_differing_probe_ids_is_left_to_the_library(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = FastEncoder.encode

    def wrong(self: FastEncoder, texts: pa.Array) -> tuple[np.ndarray, np.ndarray]:
        ids, lengths = encode(self, texts)
        ids[-1] += 1
        return ids, lengths

    monkeypatch.setattr(FastEncoder, "encode", wrong)
    with pytest.raises(
        NotKnownError, match="its ids differ from the library's on probes"
    ):
        FastEncoder.for_tokenizer(tokenizer)


@pytest.mark.slow
@with_shared_data
@by_family
def test_ids_equal_those_of_the_library_in_all_languages_of_udhr(name: str) -> None:
    import zipfile

    max_characters = 3000 if name in MANIFEST else 300
    with zipfile.ZipFile(SHARED / "langid" / "udhr2.zip") as archive:
        names = [name for name in archive.namelist() if name.endswith(".txt")]
        texts = [
            archive.read(name).decode("utf-8", "ignore")[200 : 200 + max_characters]
            for name in names
        ]
    assert len(texts) > 300
    check_ids(family(name), texts, encoder_of(name))


@pytest.mark.slow
@with_shared_data
def test_ids_equal_those_of_the_library_with_published_vocabularies() -> None:
    """GPT-2's, and GPT-NeoX's with its runs of blanks as added tokens."""
    import zstandard

    vocabulary = json.loads((SHARED / "tokenizer" / "gpt2_encoder.json").read_text())
    merges = [
        tuple(line.split(" "))
        for line in (SHARED / "tokenizer" / "gpt2_vocab.bpe")
        .read_text()
        .splitlines()[1:]
        if line
    ]
    gpt2 = Tokenizer(models.BPE(vocabulary, merges))  # type: ignore[arg-type]
    gpt2.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    packed = (SHARED / "tokenizer" / "gpt_neox_tokenizer.json.zst").read_bytes()
    neox = Tokenizer.from_str(
        zstandard.ZstdDecompressor().stream_reader(io.BytesIO(packed)).read().decode()
    )
    neox.encode_special_tokens = True
    text = (SHARED / "text" / "tinyshakespeare.txt").read_text()
    texts = [text[at : at + 5000] for at in range(0, 200_000, 5000)] + [
        "def f(x):\n        return  x\n    y"
    ]
    for published in (gpt2, neox):
        check_ids(published, texts)

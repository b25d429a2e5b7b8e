"""The fast encoder gives the library's ids, for every text, whatever it has seen before."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from gristmill.dataprep.hashing import hash_bytes
from gristmill.tokenize.encoding.fast_encode import FastEncoder
from gristmill.tokenize.encoding.merges import byte_characters, read_merges
from gristmill.tokenize.encoding.piece_cache import PieceCache, find_entries
from gristmill.tokenize.encoding.pretokens import LETTER, NUMBER, OTHER, SPACE, CharacterClasses, split

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
LEARNT_FROM = [
    "It's the river that they'll have seen, 1234 times.\n\n  def f(x):\n\treturn x_1 + 'a'", "naïve café 日本語テスト",
] * 9
PIECES = [
    "'s", "'S", "'ll", "'", " ", "  ", "\n", "\t", "\u00a0", "\u3000", "\u0085", "\u200b", "a", "B", "é", "e\u0301",
    "1", "²", "Ⅷ", "٣", "_", "-", "...", "日", "本", "ไท", "한", "🏳️\u200d🌈", "\x00", "\U000e0001", "<|endoftext|>",
    "word", "\ufffd",
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.train_from_iterator(LEARNT_FROM, trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|endoftext|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False))
    made.encode_special_tokens = True
    return made


@pytest.fixture(scope="module")
def encoder(tokenizer: Tokenizer) -> FastEncoder:
    made = FastEncoder.for_tokenizer(tokenizer)
    assert made is not None
    return made


def by_library(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    return [one.ids for one in tokenizer.encode_batch(texts, add_special_tokens=False)]


def by_encoder(encoder: FastEncoder, texts: list[str]) -> list[list[int]]:
    ids, lengths = encoder.encode(pa.array(texts, pa.large_string()))
    return [part.tolist() for part in np.split(ids, np.cumsum(lengths)[:-1])] if texts else []


awkward = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)


@settings(deadline=None, max_examples=300)
@given(texts=st.lists(awkward | st.text(max_size=20), max_size=5))
def test_ids_equal_the_librarys_on_any_text(tokenizer: Tokenizer, encoder: FastEncoder, texts: list[str]) -> None:
    assert by_encoder(encoder, texts) == by_library(tokenizer, texts)


@settings(deadline=None, max_examples=200)
@given(text=awkward | st.text(max_size=40))
def test_pieces_equal_the_librarys(text: str) -> None:
    library = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text)
    assert split(text, CLASSES) == [text[begin:end] for _, (begin, end) in library]


CLASSES = CharacterClasses()


def test_every_code_point_of_the_first_planes_splits_as_in_the_library() -> None:
    source = random.Random(5)
    codes = [code for code in range(0x20000) if not 0xD800 <= code < 0xE000]
    source.shuffle(codes)
    for start in range(0, len(codes), 9000):
        text = "".join(chr(code) + source.choice(("", " ", "a", "1", "!")) for code in codes[start : start + 9000])
        library = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text)
        assert split(text, CLASSES) == [text[begin:end] for _, (begin, end) in library]


def test_the_classes_are_those_of_unicode() -> None:
    for character, kind in (("a", LETTER), ("ß", LETTER), ("日", LETTER), ("7", NUMBER), ("½", NUMBER), ("Ⅷ", NUMBER),
                            (" ", SPACE), ("\u2028", SPACE), ("\u00a0", SPACE), ("!", OTHER), ("\u0301", OTHER)):
        CLASSES.learn(ord(character))
        assert CLASSES.table[ord(character)] == kind, character


def test_a_full_memory_is_emptied_and_nothing_changes(tokenizer: Tokenizer) -> None:
    source, small = random.Random(3), PieceCache(arena_bytes=300, most_entries=300)
    encoder = FastEncoder(tokenizer, read_merges(tokenizer), small)  # type: ignore[arg-type]
    emptied = 0
    for _ in range(60):
        texts = ["".join(source.choices(PIECES, k=8)) + str(source.random()) for _ in range(3)]
        before = small.entries
        assert by_encoder(encoder, texts) == by_library(tokenizer, texts)
        emptied += small.entries < before
        assert small.starts[small.entries] <= len(small.arena)
    assert emptied > 3


def test_a_text_larger_than_the_memory_is_encoded(tokenizer: Tokenizer) -> None:
    encoder = FastEncoder(tokenizer, read_merges(tokenizer), PieceCache(64, 64))  # type: ignore[arg-type]
    texts = ["some words and 1234 " * 50, "x"]
    assert by_encoder(encoder, texts) == by_library(tokenizer, texts)


def test_pieces_whose_hashes_are_equal_are_told_apart() -> None:
    cache, texts = PieceCache(arena_bytes=64, most_entries=64), np.frombuffer(b"abcxyz", np.uint8)
    CLASSES.learn(ord("a"))

    def look_up(begin: int, end: int) -> int:
        found = np.empty(8, np.int32)
        count, cache.entries, unknown = find_entries(
            texts, begin, end, CLASSES.table, cache.slots, cache.hashes, cache.starts, cache.arena, cache.entries,
            found)
        assert (count, unknown) == (1, 0)
        return int(found[0])

    assert look_up(0, 3) == 0
    other = hash_bytes(texts, 3, 6)
    cache.hashes[0] = other  # as if "abc" had the hash of "xyz", and stood where that is looked for
    cache.slots[int(other) & (len(cache.slots) - 1)] = 0
    assert look_up(3, 6) == 1
    assert look_up(3, 6) == 1


def test_a_piece_that_is_very_long_goes_to_the_library(tokenizer: Tokenizer, encoder: FastEncoder) -> None:
    texts = ["river " + "waterriver" * 300 + " end", "-" * 5000, "日本語" * 2000]
    assert by_encoder(encoder, texts) == by_library(tokenizer, texts)


def test_an_interrupted_batch_leaves_nothing_behind(tokenizer: Tokenizer) -> None:
    class Failing:
        def encode(self, *arguments: Any, **options: Any) -> Any:
            raise OverflowError("no")

    encoder = FastEncoder(tokenizer, read_merges(tokenizer))  # type: ignore[arg-type]
    encoder._unsplit, library = Failing(), encoder._unsplit  # type: ignore[assignment]
    texts = ["river water " + "x" * 2000]
    with pytest.raises(OverflowError):
        by_encoder(encoder, texts)
    encoder._unsplit = library
    assert by_encoder(encoder, texts) == by_library(tokenizer, texts)


def test_bytes_are_spelt_as_in_the_library() -> None:
    assert sorted(byte_characters()) == sorted(pre_tokenizers.ByteLevel.alphabet())
    assert byte_characters()[ord(" ")] == "Ġ"


@pytest.mark.parametrize("change", ["normalizer", "pattern", "prefix", "added", "bytes"])
def test_a_tokenizer_that_is_not_known_is_left_to_the_library(tokenizer: Tokenizer, change: str) -> None:
    other = Tokenizer.from_str(tokenizer.to_str())
    if change == "normalizer":
        other.normalizer = normalizers.Lowercase()
    elif change == "pattern":
        other.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.ByteLevel(False)])
    elif change == "prefix":
        other.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    elif change == "added":
        other.add_tokens(["river water"])
    else:
        other = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
        other.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    other.encode_special_tokens = True
    assert FastEncoder.for_tokenizer(other) is None


@pytest.mark.skipif(not SHARED.exists(), reason="the shared data is not here")
def test_ids_equal_the_librarys_on_human_rights_in_all_languages(tokenizer: Tokenizer, encoder: FastEncoder) -> None:
    import zipfile

    with zipfile.ZipFile(SHARED / "langid" / "udhr2.zip") as archive:
        names = [name for name in archive.namelist() if name.endswith(".txt")]
        texts = [archive.read(name).decode("utf-8", "ignore")[:1500] for name in names]
    assert len(texts) > 300
    assert by_encoder(encoder, texts) == by_library(tokenizer, texts)


@pytest.mark.skipif(not SHARED.exists(), reason="the shared data is not here")
def test_ids_equal_the_librarys_with_the_vocabulary_of_gpt2() -> None:
    vocabulary = json.loads((SHARED / "tokenizer" / "gpt2_encoder.json").read_text())
    merges = [tuple(line.split(" ")) for line in (SHARED / "tokenizer" / "gpt2_vocab.bpe").read_text().splitlines()[1:]
              if line]
    gpt2 = Tokenizer(models.BPE(vocabulary, merges))  # type: ignore[arg-type]
    gpt2.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder = FastEncoder.for_tokenizer(gpt2)
    assert encoder is not None
    text = (SHARED / "text" / "tinyshakespeare.txt").read_text()
    texts = [text[at : at + 5000] for at in range(0, 200_000, 5000)]
    assert by_encoder(encoder, texts) == by_library(gpt2, texts)

"""The fast encoder gives the library's ids, for every text and every known pre-tokenisation, whatever it has seen."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from gristmill.tokenize.encoding.fast_encode import FastEncoder, whole_tokens
from gristmill.tokenize.encoding.merges import SHORT_PIECE, byte_characters, merge_piece, read_merges
from gristmill.tokenize.encoding.piece_cache import (
    ARENA,
    CELLS,
    IDS,
    empty_cache,
    find_cell,
    first_cell,
    piece_key,
    remember,
)
from gristmill.tokenize.encoding.pretokens import (
    ALONE,
    GPT2,
    LETTER,
    LLAMA3,
    NUMBER,
    OTHER,
    QWEN2,
    SPACE,
    CharacterClasses,
    NotKnownError,
    Pattern,
    make_pre_tokenizer,
    next_piece,
    read_pattern,
)

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
LEARNT_FROM = [
    "It's the river that they'll have seen, 1234 times.\n\n  def f(x):\n\treturn x_1 + 'a'", "naïve café 日本語テスト",
    "internationalisation antidisestablishmentarianism ================================================",
] * 9
PIECES = [
    "'s", "'S", "'ll", "'LL", "'ſ", "'ve", "'rE", "'", " ", "  ", "        ", "\n", "\r\n", "\r", "\t", "\u00a0",
    "\u3000", "\u0085", "\u200b", "a", "B", "é", "e\u0301", "1", "23", "456", "²", "Ⅷ", "٣", "_", "-", "...", "日",
    "本", "ไท", "한", "🏳️\u200d🌈", "\x00", "\x00" * 9, "\U000e0001", "<|endoftext|>", "word", "\ufffd", "Ünder",
    "seven77", "eightsss", "fifteenlettersss", "[", "`", "{", "@", "\x7f", "\u0378",
]
NAMES = ("gpt2", "llama3", "digits", "qwen2", "gpt2 as a split")


def make(name: str) -> pre_tokenizers.PreTokenizer:
    """Those that a manifest can name, and two that published tokenizers have."""
    if name in ("qwen2", "gpt2 as a split"):
        return pre_tokenizers.Sequence([
            pre_tokenizers.Split(Regex(QWEN2 if name == "qwen2" else GPT2), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    return make_pre_tokenizer(name)


@cache
def tokenizer_of(name: str) -> Tokenizer:
    """A tokenizer of 400 tokens that is learnt once, by the first test that asks."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = make(name)
    made.train_from_iterator(LEARNT_FROM, trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|endoftext|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False))
    made.encode_special_tokens = True
    return made


@cache
def encoder_of(name: str) -> FastEncoder:
    return FastEncoder.for_tokenizer(tokenizer_of(name))


CLASSES = {False: CharacterClasses(), True: CharacterClasses(digits_alone=True)}
by_name = pytest.mark.parametrize("name", NAMES)
with_shared_data = pytest.mark.skipif(not SHARED.exists(), reason="the shared data is not here")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tokenizer_of("gpt2")


def by_library(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    return [one.ids for one in tokenizer.encode_batch(list(texts), add_special_tokens=False)]


def by_encoder(encoder: FastEncoder, texts: Sequence[str]) -> list[list[int]]:
    ids, lengths = encoder.encode(pa.array(texts, pa.large_string()))
    return [part.tolist() for part in np.split(ids, np.cumsum(lengths)[:-1])] if texts else []


def split(text: str, pattern: Pattern) -> list[str]:
    """The pieces of a text as the kernels find them."""
    data, classes, pieces, at = np.frombuffer(text.encode(), np.uint8), CLASSES[pattern.digits_alone], [], 0
    while at < len(data):
        stop = next_piece(data, at, len(data), classes.table, pattern.most_digits)
        if stop < 0:
            classes.learn(-1 - stop)
            continue
        pieces.append(bytes(data[at:stop]).decode())
        at = stop
    return pieces


def split_by_library(text: str, name: str) -> list[str]:
    return [text[begin:end] for _, (begin, end) in make(name).pre_tokenize_str(text)]


def pattern_of(name: str) -> Pattern:
    return read_pattern(json.loads(tokenizer_of(name).to_str()))


awkward = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)


@by_name
@settings(deadline=None, max_examples=150)
@given(texts=st.lists(awkward | st.text(max_size=20), max_size=5))
@example(texts=["\x00" * 15 + "a" * 9, "\x00" * 9, "a word" + "\x00" * 8])
def test_ids_equal_the_librarys_on_any_text(name: str, texts: list[str]) -> None:
    assert by_encoder(encoder_of(name), texts) == by_library(tokenizer_of(name), texts)


@by_name
@settings(deadline=None, max_examples=150)
@given(text=awkward | st.text(max_size=40))
def test_pieces_equal_the_librarys(name: str, text: str) -> None:
    assert split(text, pattern_of(name)) == split_by_library(text, name)


@pytest.mark.parametrize("name", ["gpt2", "llama3", "digits"])
def test_every_code_point_of_the_first_planes_splits_as_in_the_library(name: str) -> None:
    source = random.Random(5)
    codes = [code for code in range(0x20000) if not 0xD800 <= code < 0xE000]
    source.shuffle(codes)
    for start in range(0, len(codes), 9000):
        text = "".join(source.choice(("", "'", " ")) + chr(code) + source.choice(("", " ", "a", "1", "!", "\n"))
                       for code in codes[start : start + 9000])
        assert split(text, pattern_of(name)) == split_by_library(text, name)


def test_the_classes_are_those_of_unicode() -> None:
    for character, kind in (("a", LETTER), ("ß", LETTER), ("日", LETTER), ("7", NUMBER), ("½", NUMBER), ("Ⅷ", NUMBER),
                            (" ", SPACE), ("\u2028", SPACE), ("\u00a0", SPACE), ("!", OTHER), ("\u0301", OTHER)):
        for digits_alone, classes in CLASSES.items():
            classes.learn(ord(character))
            expected = ALONE if digits_alone and kind == NUMBER else kind
            assert classes.table[ord(character)] == expected, character


def test_what_each_pattern_is_for() -> None:
    text = "Don't pay 12345\n\n\tnow!!\n"
    assert split(text, pattern_of("gpt2")) == ["Don", "'t", " pay", " 12345", "\n\n", "\t", "now", "!!", "\n"]
    assert split(text, pattern_of("llama3")) == ["Don", "'t", " pay", " ", "123", "45", "\n\n", "\tnow", "!!\n"]
    assert split(text, pattern_of("digits")) == [
        "Don", "'t", " pay", " ", "1", "2", "3", "4", "5", "\n\n", "\t", "now", "!!", "\n"]


def merge_slowly(piece: bytes, model: dict[str, Any]) -> list[int]:
    """Merge the adjacent pair of the lowest rank, the leftmost first, until none is left."""
    ranks = {tuple(pair): rank for rank, pair in enumerate(model["merges"])}
    parts = [byte_characters()[byte] for byte in piece]
    while True:
        ranked = [(ranks[pair], at) for at, pair in enumerate(pairwise(parts)) if pair in ranks]
        if not ranked:
            return [model["vocab"][part] for part in parts]
        at = min(ranked)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


@settings(deadline=None, max_examples=200)
@given(piece=st.lists(st.sampled_from(["in", "ter", "nation", "al", "is", "=", "====", "日", "e", "s", "x"]),
                      min_size=1, max_size=40).map("".join))
def test_merging_short_and_long_pieces_equals_the_definition(tokenizer: Tokenizer, piece: str) -> None:
    model = json.loads(tokenizer.to_str())["model"]
    data, ids = np.frombuffer(piece.encode(), np.uint8), np.empty(len(piece.encode()), np.uint32)
    count = merge_piece(data, 0, len(data), read_merges(model), ids)
    assert ids[:count].tolist() == merge_slowly(piece.encode(), model)


def test_both_ways_of_merging_are_taken() -> None:
    assert len("internationalisation" * 3) > SHORT_PIECE
    texts = ["internationalisation" * number + "=" * 3 * number for number in range(1, 60)]
    assert by_encoder(encoder_of("gpt2"), texts) == by_library(tokenizer_of("gpt2"), texts)


def test_a_full_memory_is_emptied_and_nothing_changes(tokenizer: Tokenizer) -> None:
    source, small = random.Random(3), empty_cache(4096)
    encoder, emptied = FastEncoder.for_tokenizer(tokenizer, small), [0, 0, 0]
    for _ in range(60):
        texts = ["".join(source.choices(PIECES, k=8)) + str(source.random()) for _ in range(3)]
        before = small.used.copy()
        assert by_encoder(encoder, texts) == by_library(tokenizer, texts)
        for part in (CELLS, ARENA, IDS):
            emptied[part] += small.used[part] < before[part]
        assert small.used[CELLS] <= 0.6 * (len(small.cells) // 4)
        assert small.used[ARENA] <= len(small.arena)
        assert small.used[IDS] <= len(small.ids)
    assert min(emptied) > 3


def test_the_memory_takes_no_more_than_it_may() -> None:
    for most in (4096, 1 << 20, 48 << 20):
        cache = empty_cache(most)
        assert most // 2 < cache.cells.nbytes + cache.arena.nbytes + cache.ids.nbytes <= most


def test_a_text_larger_than_the_memory_is_encoded(tokenizer: Tokenizer) -> None:
    encoder = FastEncoder.for_tokenizer(tokenizer, empty_cache(0))
    texts = ["some words and 1234 " * 50, "x", "=" * 100]
    assert by_encoder(encoder, texts) == by_library(tokenizer, texts)


def test_pieces_whose_hashes_are_equal_are_told_apart() -> None:
    """A long piece is looked up by its hash; then its bytes are compared."""
    cache, first = empty_cache(1 << 16), np.array([7], np.uint32)
    data = np.frombuffer(b"abcdefghijklmnopq" b"ABCDEFGHIJKLMNOPQ", np.uint8)
    low, high = piece_key(data, 17, 34)

    def find(at: int) -> np.uint64:
        return find_cell(data, at, first_cell(low, high, len(cache.cells)), low, high, cache.cells, cache.arena)

    place = find(17)
    remember(data, 17, place, low, high, first, 1, cache)
    assert find(17) == place
    assert cache.cells[place + np.uint64(1)] != 0
    other = find(0)  # as if the first seventeen bytes had the hash of the others
    assert other != place
    assert cache.cells[other + np.uint64(1)] == 0


def test_a_piece_that_is_very_long_is_encoded_and_not_remembered(tokenizer: Tokenizer) -> None:
    texts = ["river " + "waterriver" * 300 + " end", "-" * 5000, "日本語" * 2000, "x" * 70_000]
    cache = empty_cache(1 << 20)
    assert by_encoder(FastEncoder.for_tokenizer(tokenizer, cache), texts) == by_library(tokenizer, texts)
    assert cache.used[ARENA] < 4000


def test_texts_of_a_slice_and_in_chunks_are_read_where_they_lie(tokenizer: Tokenizer) -> None:
    texts = ["one", "two words", "", "thirteen more letters", "end"]
    column = pa.chunked_array([pa.array(texts, pa.string())[1:4], pa.array(texts[::-1], pa.string())])
    ids, lengths = encoder_of("gpt2").encode(column)
    expected = by_library(tokenizer, [*texts[1:4], *texts[::-1]])
    assert ids.tolist() == [number for one in expected for number in one]
    assert lengths.tolist() == [len(one) for one in expected]
    assert ids.dtype == np.uint16
    for nothing in ([], [""], ["", None]):
        ids, lengths = encoder_of("gpt2").encode(pa.array(nothing, pa.large_string()))
        assert (ids.tolist(), lengths.tolist()) == ([], [0] * len(nothing))


def test_a_piece_that_is_a_token_is_not_merged_where_the_tokenizer_says_so() -> None:
    """Llama 3's `ignore_merges`; no merges lead to the token "zq"."""
    described = json.loads(tokenizer_of("llama3").to_str())
    vocabulary = described["model"]["vocab"]
    for token in ("zq", "zqzqzqzqzqzqzqzqzqzqzq"):
        vocabulary[token] = len(vocabulary)
    plain = Tokenizer.from_str(json.dumps(described))
    described["model"]["ignore_merges"] = True
    whole = Tokenizer.from_str(json.dumps(described))
    texts = ["zq zqzqzqzqzqzqzqzqzqzqzq", "(zq", "zqzqzqzqzqzqzqzqzqzqzq", "the river that they'll"]
    for made in (plain, whole):
        made.encode_special_tokens = True
        assert by_encoder(FastEncoder.for_tokenizer(made), texts) == by_library(made, texts)
    assert by_encoder(FastEncoder.for_tokenizer(whole), ["zq"]) == [[vocabulary["zq"]]]
    assert len(by_encoder(FastEncoder.for_tokenizer(plain), ["zq"])[0]) == 2
    assert whole_tokens(vocabulary).used[CELLS] == len(vocabulary)


def test_bytes_are_spelt_as_in_the_library() -> None:
    assert sorted(byte_characters()) == sorted(pre_tokenizers.ByteLevel.alphabet())
    assert byte_characters()[ord(" ")] == "Ġ"


@pytest.mark.parametrize(("change", "reason"), [
    ("normalizer", "its normalizer is Lowercase"), ("pattern", "its pre-tokenizer is Punctuation [+] ByteLevel"),
    ("regex", "splits by another pattern: "), ("removed", "in another way: Removed, invert False"),
    ("prefix", "ByteLevel with add_prefix_space"), ("added", r"1 added tokens are found in text .*'river water'"),
    ("bytes", "lacks 254 of the 256 bytes"), ("model", "its model is WordLevel"),
])
def test_a_tokenizer_that_is_not_known_is_left_to_the_library(tokenizer: Tokenizer, change: str, reason: str) -> None:
    other = Tokenizer.from_str(tokenizer.to_str())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=change == "pattern")
    if change == "normalizer":
        other.normalizer = normalizers.Lowercase()
    elif change == "pattern":
        other.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Punctuation(), byte_level])
    elif change == "regex":
        other.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.Split(Regex(LLAMA3.replace("{1,3}", "{1,2}")), "isolated"), byte_level])
    elif change == "removed":
        other.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3), "removed"), byte_level])
    elif change == "prefix":
        other.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    elif change == "added":
        other.add_tokens(["river water"])
    elif change == "bytes":
        other = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
        other.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        other = Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    other.encode_special_tokens = True
    with pytest.raises(NotKnownError, match=reason):
        FastEncoder.for_tokenizer(other)


@with_shared_data
@pytest.mark.parametrize("name", ["gpt2", "llama3", "digits"])
def test_ids_equal_the_librarys_on_human_rights_in_all_languages(name: str) -> None:
    import zipfile

    with zipfile.ZipFile(SHARED / "langid" / "udhr2.zip") as archive:
        names = [name for name in archive.namelist() if name.endswith(".txt")]
        texts = [archive.read(name).decode("utf-8", "ignore")[:1500] for name in names]
    assert len(texts) > 300
    assert by_encoder(encoder_of(name), texts) == by_library(tokenizer_of(name), texts)


@with_shared_data
def test_ids_equal_the_librarys_with_the_vocabulary_of_gpt2() -> None:
    vocabulary = json.loads((SHARED / "tokenizer" / "gpt2_encoder.json").read_text())
    merges = [tuple(line.split(" ")) for line in (SHARED / "tokenizer" / "gpt2_vocab.bpe").read_text().splitlines()[1:]
              if line]
    gpt2 = Tokenizer(models.BPE(vocabulary, merges))  # type: ignore[arg-type]
    gpt2.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder = FastEncoder.for_tokenizer(gpt2)
    text = (SHARED / "text" / "tinyshakespeare.txt").read_text()
    texts = [text[at : at + 5000] for at in range(0, 200_000, 5000)]
    assert by_encoder(encoder, texts) == by_library(gpt2, texts)

"""Vocabularies of every model are lossless, determined by the text alone, and built as
defined.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import subprocess
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from benchmarks.tokenize import vocabularies
from benchmarks.tokenize.texts import declarations
from gristmill.mixtures.sections.tokenizer import Tokenizer
from gristmill.tokenize.encoding import superbpe, unigram
from gristmill.tokenize.encoding.chat_templates import SPECIAL_TOKENS
from gristmill.tokenize.encoding.encode import DOCS_SCHEMA
from gristmill.tokenize.encoding.pretokens import byte_characters, make_pre_tokenizer
from gristmill.tokenize.encoding.token_report import token_text
from gristmill.tokenize.encoding.tokenizer import TextTokenizer, load
from gristmill.tokenize.encoding.vocabulary import (
    BLANK,
    VocabularyError,
    frequent_characters,
    train,
)
from gristmill.tokenize.encoding.vocabulary_sample import TokenizerSample

SCRIPTS = (
    "Größe, naïve; Ελλάδα! Привет, мир. שלום עולם. مرحبا بالعالم؟ नमस्ते दुनिया। "
    "สวัสดีชาวโลก 你好，世界。こんにちは世界 한국어 \U0001f469\u200d\U0001f469 ½ ٣"
)
PROSE = (
    "Of course, the miller said that he would not grind it. The mill, of course, "
    "would; and the miller's men didn't say: it'll cost 1,250.75 a day!\n\n    if "
    "grist >= 42:\n\t\treturn mill(grist)\n"
)


def prose(number: int = 120) -> list[str]:
    """Build documents of random words, some prose and many scripts."""
    rng = random.Random(7)
    pseudo_words = [
        "".join(rng.choices(("gr", "mi", "ll", "sto", "ne", "fl", "our", "ing"), k=4))
        for _ in range(300)
    ]
    words = [*PROSE.split(" "), *SCRIPTS.split(" "), *pseudo_words]
    return [
        f"{PROSE}{' '.join(rng.choices(words, k=60))}\n{SCRIPTS if index % 3 else ''}"
        for index in range(number)
    ]


@pytest.fixture(scope="module")
def tokenizers(module_stages: Any) -> dict[str, TextTokenizer]:
    """Tokenizers of every model by name; `unigram` only if its package is installed."""
    ingest = module_stages.ingest(
        "ingest", [("prose", str(index), text) for index, text in enumerate(prose())], 2
    )
    tokenizers = {}
    for model in ("bpe", "sentencepiece_bpe", "superbpe", "unigram"):
        if model == "unigram" and not _has_sentencepiece():
            continue
        summary = module_stages.tokenizer(
            model,
            {"ingest": ingest},
            ["prose"],
            model=model,
            vocab_size=700,
            special_tokens=["<|tool|>"],
        )
        assert summary.model == model
        tokenizers[model] = load(module_stages.root / model)
    return tokenizers


def _has_sentencepiece() -> bool:
    try:
        import sentencepiece  # noqa: F401
    except ImportError:
        return False
    return True


def tokenizer_or_skip(
    tokenizers: Mapping[str, TextTokenizer], model: str
) -> TextTokenizer:
    """Return the tokenizer of a model, or skip the test."""
    if model not in tokenizers:
        pytest.skip("sentencepiece is not installed")
    return tokenizers[model]


ALL = ("bpe", "sentencepiece_bpe", "superbpe", "unigram")


@given(text=st.text())
@example(text="<|endoftext|> and <|user|>\n<|tool|><0x0A> Ġ")
@example(
    text="\0 \u0378 \U000e0fff \ufeff  \r\n\t\u00a0 e\u0301 \u1e9b\u0323 n't 've     "
    "x   "
)
@example(text=SCRIPTS)
@example(text=f"a{BLANK}b")
@pytest.mark.parametrize("model", ALL)
def test_every_string_round_trips_except_the_blank_sign_of_sentencepiece(
    tokenizers: dict[str, TextTokenizer], model: str, text: str
) -> None:
    loaded = tokenizer_or_skip(tokenizers, model)
    ids = loaded.encode([text])[0].ids
    expected = text.replace(BLANK, " ") if model == "sentencepiece_bpe" else text
    assert loaded.decode(ids) == expected
    assert not set(ids) & set(loaded.special_ids.values())
    assert int(loaded.token_bytes[ids].sum()) == len(expected.encode())


@pytest.mark.slow
@pytest.mark.parametrize("model", ALL)
def test_text_in_every_language_round_trips(
    tokenizers: dict[str, TextTokenizer], shared_data: Path, model: str
) -> None:
    loaded, texts = (
        tokenizer_or_skip(tokenizers, model),
        [text[:3000] for text in declarations().values()],
    )
    assert len(texts) > 300
    decoded = [loaded.decode(encoding.ids) for encoding in loaded.encode(texts)]
    assert decoded == [
        text.replace(BLANK, " ") if model == "sentencepiece_bpe" else text
        for text in texts
    ]


@pytest.mark.parametrize("model", ALL)
def test_vocabulary_starts_with_special_tokens_and_covers_all_bytes(
    tokenizers: dict[str, TextTokenizer], model: str
) -> None:
    loaded = tokenizer_or_skip(tokenizers, model)
    assert [
        loaded.tokenizer.token_to_id(token) for token in (*SPECIAL_TOKENS, "<|tool|>")
    ] == [*range(7)]
    assert loaded.vocab_size == len(loaded.tokenizer.get_vocab()) == 700
    spelt = (
        f"<0x{byte:02X}>" if model == "sentencepiece_bpe" else character
        for byte, character in enumerate(byte_characters())
    )
    assert all(loaded.tokenizer.token_to_id(token) is not None for token in spelt)


@pytest.mark.slow
def test_files_do_not_depend_on_document_order_threads_or_hash_seed(
    tokenizers: dict[str, TextTokenizer], module_stages: Any
) -> None:
    documents = [("prose", str(index), text) for index, text in enumerate(prose())]
    module_stages.ingest("resharded", documents[::-1], 3)
    script = """
import sys
from pathlib import Path
from gristmill.core.stage_context import Context
from gristmill.tokenize.encoding import tokenizer
root, name, *models = sys.argv[1:]
for model in models:
    out, section = Path(root) / f"{model}-{name}", {"model": model, "vocab_size": 700, "special_tokens": ["<|tool|>"]}
    config = {"tokenizer": section, "sources": ["prose"], "seed": 1}
    context = Context(Path(root) / f"{model}-work", emit=lambda event: None)
    tokenizer.run({"ingest": Path(root) / "resharded"}, config, out, context)
"""
    subprocess.run(
        [sys.executable, "-c", script, str(module_stages.root), "again", *tokenizers],
        check=True,
        env={**os.environ, "RAYON_NUM_THREADS": "3", "PYTHONHASHSEED": "3"},
    )  # the first run had one thread
    for model in tokenizers:
        assert module_stages.files(f"{model}-again") == module_stages.files(model), (
            model
        )


@pytest.mark.parametrize("model", ALL)
def test_stage_encodes_losslessly_with_every_model(
    tokenizers: dict[str, TextTokenizer], module_stages: Any, model: str
) -> None:
    loaded = tokenizer_or_skip(tokenizers, model)
    inputs = {
        "ingest": module_stages.root / "ingest",
        "tokenizer": module_stages.root / model,
    }
    summary = module_stages.tokenize(f"{model}-tokens", inputs)
    assert summary.sources["prose"].bytes_per_token > 1.5
    decoded = []
    for shard in sorted(
        (module_stages.root / f"{model}-tokens").glob("*.docs.parquet")
    ):
        import pyarrow.parquet as pq

        docs = pq.read_table(shard, schema=DOCS_SCHEMA)
        ids = np.fromfile(
            shard.with_name(shard.name.replace(".docs.parquet", ".tokens.bin")),
            np.uint16,
        )
        for offset, tokens in zip(
            docs["offset"].to_pylist(), docs["tokens"].to_pylist(), strict=True
        ):
            decoded.append(loaded.decode(ids[offset : offset + tokens].tolist()))
    assert Counter(decoded) == Counter(prose())


def test_tokens_of_every_model_are_shown_as_text(
    tokenizers: dict[str, TextTokenizer],
) -> None:
    pieces, spelt = tokenizers["sentencepiece_bpe"], tokenizers["bpe"]
    for token, text in (
        (f"{BLANK}miller", " miller"),
        ("ö", "ö"),
        ("<0xC3>", "<0xC3>"),
        ("<|end|>", "<|end|>"),
    ):
        assert token_text(pieces.tokenizer.token_to_id(token), pieces) == text
    for token, text in (
        ("Ġmiller", " miller"),
        ("ĠGrÃ¶ÃŁe", " Größe"),
        ("Ã", r"\xc3"),
        ("<|end|>", "<|end|>"),
    ):
        assert token_text(spelt.tokenizer.token_to_id(token), spelt) == text


@pytest.mark.parametrize("model", ALL)
def test_transformers_encodes_with_the_file_of_every_model(
    tokenizers: dict[str, TextTokenizer], module_stages: Any, model: str
) -> None:
    transformers = pytest.importorskip("transformers")
    loaded, auto = (
        tokenizer_or_skip(tokenizers, model),
        transformers.AutoTokenizer.from_pretrained(module_stages.root / model),
    )
    for text in (PROSE, SCRIPTS):
        assert (
            auto.encode(text, add_special_tokens=False) == loaded.encode([text])[0].ids
        )
        assert auto.decode(auto.encode(text, add_special_tokens=False)) == text
    assert auto.encode("<|tool|>x")[0] == 6


def naive_merges(
    words: Mapping[tuple[str, ...], int], ids: dict[str, int], size: int
) -> list[tuple[str, str]]:
    """Merge by the definition of BPE: the most frequent pair, ties by the lowest ids,
    counted anew every time.
    """
    merges = []
    while len(ids) < size:
        counts: Counter[tuple[str, str]] = Counter()
        for word, count in words.items():
            for pair in itertools.pairwise(word):
                counts[pair] += count
        best = min(
            counts,
            key=lambda pair: (-counts[pair], ids[pair[0]], ids[pair[1]]),
            default=None,
        )
        if best is None or counts[best] < 2:
            break
        ids.setdefault("".join(best), len(ids))
        merges.append(best)
        words = _merged(words, best)
    return merges


def _merged(
    words: Mapping[tuple[str, ...], int], pair: tuple[str, str]
) -> dict[tuple[str, ...], int]:
    merged_words: Counter[tuple[str, ...]] = Counter()
    for word, count in words.items():
        symbols: list[str] = []
        position = 0
        while position < len(word):
            is_pair = word[position : position + 2] == pair
            symbols.append("".join(pair) if is_pair else word[position])
            position += 2 if is_pair else 1
        merged_words[tuple(symbols)] += count
    return merged_words


@pytest.mark.parametrize("seed", range(8))
def test_merges_equal_those_of_naive_bpe(seed: int) -> None:
    rng = random.Random(seed)
    texts = ["".join(rng.choices("abcd é'1 \n", k=300)) for _ in range(3)]
    splitter, first = (
        make_pre_tokenizer("gpt2"),
        [*SPECIAL_TOKENS, *sorted(byte_characters())],
    )
    words = Counter(
        tuple(word) for text in texts for word, _ in splitter.pre_tokenize_str(text)
    )
    merges = naive_merges(
        words, {token: number for number, token in enumerate(first)}, 330
    )
    model = json.loads(train(TokenizerSample({"a": texts}, {}), 330).to_str())["model"]
    assert [*map(tuple, model["merges"])] == merges, f"seed {seed}"
    assert len(merges) > 30


@pytest.mark.parametrize("pretokenizer", ["gpt2", "llama3", "digits"])
@given(text=st.text() | st.text(alphabet="ab'sS:.,! \n\t12é\u0301\u3042\u00a0"))
@example(text=PROSE + SCRIPTS)
def test_superwords_are_cut_only_at_word_boundaries(
    pretokenizer: str, text: str
) -> None:
    words, wider = (
        make_pre_tokenizer(pretokenizer),
        superbpe.make_superword_splitter(pretokenizer),
    )
    assert _cuts(wider.pre_tokenize_str(text)) <= _cuts(words.pre_tokenize_str(text))


def _cuts(pieces: Iterable[tuple[str, tuple[int, int]]]) -> set[int]:
    return {place for _, span in pieces for place in span}


@pytest.mark.parametrize(
    ("pretokenizer", "pieces"),
    [
        (
            "gpt2",
            ["Of course, he didn't say", ":", " it", " 12", "..", "\n\n", " go.", "\n"],
        ),
        (
            "llama3",
            ["Of course, he didn't say", ":", " it", " ", "12", "..\n\n", " go", ".\n"],
        ),
        (
            "digits",
            [
                "Of course, he didn't say",
                ":",
                " it",
                " ",
                "1",
                "2",
                "..",
                "\n\n",
                " go.",
                "\n",
            ],
        ),
    ],
)
def test_superwords_cross_words_and_marks_but_no_colon_number_or_line(
    pretokenizer: str, pieces: list[str]
) -> None:
    text = "Of course, he didn't say: it 12..\n\n go.\n"
    spans = superbpe.make_superword_splitter(pretokenizer).pre_tokenize_str(text)
    assert [text[begin:end] for _, (begin, end) in spans] == pieces


def naive_superwords(
    texts: Sequence[str], vocabulary: Mapping[str, int], encode: Any, num_new: int
) -> list[tuple[str, str]]:
    """Merge by the definition of SuperBPE's second stage: symbols are tuples of up to
    four ids of the first.
    """
    spelt = {number: token for token, number in vocabulary.items()}
    words: Counter[tuple[tuple[int, ...], ...]] = Counter(
        tuple((number,) for number in word) for text in texts for word in encode(text)
    )
    order = {(number,): number for number in vocabulary.values()}
    merges: list[tuple[str, str]] = []
    new: set[str] = set()
    while True:
        counts: Counter[tuple[Any, Any]] = Counter()
        for word, count in words.items():
            for pair in itertools.pairwise(word):
                counts[pair] += count * (len(pair[0] + pair[1]) <= superbpe.MOST_TOKENS)
        first, second = min(
            counts, key=lambda pair: (-counts[pair], order[pair[0]], order[pair[1]])
        )
        text = "".join(spelt[number] for number in first + second)
        if text not in vocabulary and text not in new:
            if len(new) == num_new or counts[first, second] < 2:
                return merges
            new.add(text)
        order.setdefault(first + second, len(order))
        sides = ("".join(spelt[number] for number in side) for side in (first, second))
        merges.append((next(sides), next(sides)))
        words = _joined(words, first, second)


def _joined(words: Mapping[Any, int], first: Any, second: Any) -> Any:
    merged_words: Counter[Any] = Counter()
    for word, count in words.items():
        symbols: list[Any] = []
        position = 0
        while position < len(word):
            is_pair = word[position : position + 2] == (first, second)
            symbols.append(first + second if is_pair else word[position])
            position += 2 if is_pair else 1
        merged_words[tuple(symbols)] += count
    return merged_words


def test_superword_merges_equal_those_of_naive_superbpe() -> None:
    sample = TokenizerSample({"a": prose(30)}, {})
    first = train(sample, 500)
    word_vocabulary, word_merges = (
        first.get_vocab(with_added_tokens=False),
        json.loads(first.to_str())["model"]["merges"],
    )
    superbpe_model = json.loads(
        train(sample, 560, model="superbpe", transition_point=500 / 560).to_str()
    )["model"]
    assert superbpe_model["merges"][: len(word_merges)] == word_merges
    first.pre_tokenizer = superbpe.make_superword_splitter("gpt2")

    def encode(text: str) -> list[list[int]]:
        ids_of_word: dict[int, list[int]] = {}
        encoding = first.encode(text, add_special_tokens=False)
        for number, word in zip(encoding.ids, encoding.word_ids, strict=True):
            ids_of_word.setdefault(word, []).append(number)
        return [*ids_of_word.values()]

    merges = naive_superwords(prose(30), word_vocabulary, encode, 60)
    assert [*map(tuple, superbpe_model["merges"][len(word_merges) :])] == merges
    assert {
        token for token in superbpe_model["vocab"] if token not in word_vocabulary
    } <= {first_part + second_part for first_part, second_part in merges}
    assert any(
        token.count("Ġ") > 1 and token.strip("Ġ").count("Ġ")
        for token in superbpe_model["vocab"]
    )
    assert len(superbpe_model["vocab"]) == 560


def test_superwords_take_fewer_tokens_than_words(
    tokenizers: dict[str, TextTokenizer],
) -> None:
    text = PROSE * 5
    assert len(tokenizers["superbpe"].encode([text])[0].ids) < len(
        tokenizers["bpe"].encode([text])[0].ids
    )


def test_sentencepiece_characters_are_the_most_frequent_and_others_are_bytes() -> None:
    assert frequent_characters(iter(["aab \0\0\0", "a  bc"]), 1.0, 10) == f"abc{BLANK}"
    assert frequent_characters(iter(["aac", "ab"]), 1.0, 2) == f"ab{BLANK}"
    assert frequent_characters(iter(["aaaaaaab", "a c"]), 0.9, 10) == f"ab{BLANK}"
    assert frequent_characters(iter(["aaaaaaaab", "a c"]), 0.8, 10) == f"a{BLANK}"
    tokenizer = train(
        TokenizerSample({"a": ["ab" * 500, "xé"]}, {}),
        300,
        model="sentencepiece_bpe",
        character_coverage=0.99,
    )
    assert tokenizer.encode("é").tokens == ["<0xC3>", "<0xA9>"]
    assert tokenizer.token_to_id("ab") is not None
    assert tokenizer.decode(tokenizer.encode(" aé  b\n").ids) == " aé  b\n"


def test_sentencepiece_tokens_never_mix_kinds_of_characters(
    tokenizers: dict[str, TextTokenizer],
) -> None:
    tokens = [
        token
        for token in tokenizers["sentencepiece_bpe"].tokenizer.get_vocab(
            with_added_tokens=False
        )
        if not token.startswith(("<0x", "<|"))
    ]
    assert f"{BLANK}miller" in tokens
    for token in tokens:
        kinds = {
            "L"
            if unicodedata.category(character)[0] in "LM"
            else "S"
            if character.isspace()
            else unicodedata.category(character)[0] == "N"
            for character in token.removeprefix(BLANK)
            if character != BLANK
        }
        assert len(kinds) <= 1, token
        assert True not in kinds or len(token) == 1, token


def test_unigram_vocabulary_has_frequent_words_and_probabilities() -> None:
    pytest.importorskip("sentencepiece")
    entries = json.loads(
        train(TokenizerSample({"a": prose()}, {}), 700, model="unigram").to_str()
    )["model"]["vocab"]
    scores = dict(map(tuple, entries[len(SPECIAL_TOKENS) :]))
    assert {"Ġcourse", "Ġmiller", "Ġwould", "Ġthe"} <= set(scores)
    assert [*scores.values()] == sorted(scores.values(), reverse=True)
    assert math.fsum(map(math.exp, scores.values())) == pytest.approx(1.0, abs=0.2)


@given(
    st.lists(
        st.text(alphabet="abc", min_size=1, max_size=20),
        min_size=1,
        max_size=12,
        unique=True,
    )
)
def test_frequent_substrings_are_all_that_repeat(words: list[str]) -> None:
    words, counts = sorted(words), np.arange(1, len(words) + 1)
    expected: Counter[str] = Counter()
    for word, count in zip(words, counts.tolist(), strict=True):
        for begin in range(len(word)):
            for end in range(
                begin + 2, min(len(word), begin + unigram.LONGEST_PIECE) + 1
            ):
                expected[word[begin:end]] += count
    substrings = unigram.frequent_substrings(words, counts, 10**6)
    assert dict(substrings) == {
        piece: count for piece, count in expected.items() if count > 1
    }
    cover = [len(piece) * count for piece, count in substrings]
    assert cover == sorted(cover, reverse=True)
    assert unigram.frequent_substrings(words, counts, 3) == substrings[:3]


def test_missing_sentencepiece_is_an_error_with_the_command_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(
        VocabularyError, match=r"pip install 'gristmill\[sentencepiece\]'"
    ):
        train(TokenizerSample({"a": ["some text"]}, {}), 300, model="unigram")


@pytest.mark.parametrize("model", ["bpe", "sentencepiece_bpe", "superbpe", "unigram"])
def test_ambiguous_special_token_is_rejected_by_every_model(model: Any) -> None:
    for token in ("word", "<<>>"):
        with pytest.raises(VocabularyError, match=token):
            train(
                TokenizerSample({"a": ["some text"]}, {}),
                300,
                special_tokens=[token],
                model=model,
            )


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"model": "wordpiece"}, "'bpe', 'unigram', 'sentencepiece_bpe' or 'superbpe'"),
        ({"path": "a.json", "model": "unigram"}, "model unigram"),
        (
            {"model": "sentencepiece_bpe", "pretokenizer": "llama3"},
            "pretokenizer llama3",
        ),
        (
            {"character_coverage": 0.9},
            "character_coverage is for model sentencepiece_bpe, not for bpe",
        ),
        (
            {"model": "unigram", "transition_point": 0.9},
            "transition_point is for model superbpe, not for unigram",
        ),
        (
            {"model": "superbpe", "vocab_size": 1000, "transition_point": 0.2},
            "at 200 of vocab_size 1000",
        ),
        (
            {"model": "superbpe", "transition_point": 1},
            r"transition_point\s.*less than 1",
        ),
        (
            {"model": "sentencepiece_bpe", "character_coverage": 1.5},
            r"character_coverage\s.*equal to 1",
        ),
    ],
)
def test_setting_of_another_model_is_rejected(
    section: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        Tokenizer.model_validate(section)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "max_ratio"),
    [("bpe", 35), ("sentencepiece_bpe", 35), ("superbpe", 60), ("unigram", 45)],
)
def test_memory_of_training_is_within_the_documented_bound(
    shared_data: Path, model: str, max_ratio: int
) -> None:
    if model == "unigram":
        pytest.importorskip("sentencepiece")
    measurement = vocabularies.in_process(
        "multilingual", model, vocabularies.MODEL_SIZE
    )
    assert measurement is not None
    assert (
        measurement.memory * vocabularies.MEGA / vocabularies.LEARNT_BYTES < max_ratio
    )
    assert (
        f"up to {max_ratio}"
        in (Path(__file__).parents[2] / "docs" / "tokenizer-models.md").read_text()
    )

"""What a vocabulary of each model promises: nothing is lost, nothing but the text decides, and what it is made of."""

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
from gristmill.mixtures.tokenizer import Tokenizer
from gristmill.tokenize.encoding import superbpe, unigram
from gristmill.tokenize.encoding.chat_templates import SPECIAL_TOKENS
from gristmill.tokenize.encoding.encode import DOCS_SCHEMA
from gristmill.tokenize.encoding.pretokens import byte_characters, make_pre_tokenizer
from gristmill.tokenize.encoding.token_report import token_text
from gristmill.tokenize.encoding.tokenizer import TextTokenizer, load
from gristmill.tokenize.encoding.vocabulary import BLANK, VocabularyError, frequent_characters, train
from gristmill.tokenize.encoding.vocabulary_sample import TokenizerSample

SCRIPTS = (
    "Größe, naïve; Ελλάδα! Привет, мир. שלום עולם. مرحبا بالعالم؟ नमस्ते दुनिया। สวัสดีชาวโลก 你好，世界。"
    "こんにちは世界 한국어 \U0001f469\u200d\U0001f469 ½ ٣"
)
PROSE = (
    "Of course, the miller said that he would not grind it. The mill, of course, would; and the miller's men "
    "didn't say: it'll cost 1,250.75 a day!\n\n    if grist >= 42:\n\t\treturn mill(grist)\n"
)


def prose(number: int = 120) -> list[str]:
    """Documents of random words, some prose and many scripts."""
    rng = random.Random(7)
    made = ["".join(rng.choices(("gr", "mi", "ll", "sto", "ne", "fl", "our", "ing"), k=4)) for _ in range(300)]
    words = [*PROSE.split(" "), *SCRIPTS.split(" "), *made]
    return [f"{PROSE}{' '.join(rng.choices(words, k=60))}\n{SCRIPTS if at % 3 else ''}" for at in range(number)]


@pytest.fixture(scope="module")
def trained(module_stages: Any) -> dict[str, TextTokenizer]:
    """A tokenizer of every model, by name; `unigram` where its package is installed."""
    ingest = module_stages.ingest("ingest", [("prose", str(at), text) for at, text in enumerate(prose())], 2)
    found = {}
    for model in ("bpe", "sentencepiece_bpe", "superbpe", "unigram"):
        if model == "unigram" and not _has_sentencepiece():
            continue
        summary = module_stages.tokenizer(
            model, {"ingest": ingest}, ["prose"], model=model, vocab_size=700, special_tokens=["<|tool|>"]
        )
        assert summary["model"] == model
        found[model] = load(module_stages.root / model)
    return found


def _has_sentencepiece() -> bool:
    try:
        import sentencepiece  # noqa: F401
    except ImportError:
        return False
    return True


def of(trained: Mapping[str, TextTokenizer], model: str) -> TextTokenizer:
    """One of them, or skip."""
    if model not in trained:
        pytest.skip("sentencepiece is not installed")
    return trained[model]


ALL = ("bpe", "sentencepiece_bpe", "superbpe", "unigram")


@given(text=st.text())
@example(text="<|endoftext|> and <|user|>\n<|tool|><0x0A> Ġ")
@example(text="\0 \u0378 \U000e0fff \ufeff  \r\n\t\u00a0 e\u0301 \u1e9b\u0323 n't 've     x   ")
@example(text=SCRIPTS)
@example(text=f"a{BLANK}b")
@pytest.mark.parametrize("model", ALL)
def test_every_string_comes_back_and_only_sentencepiece_makes_its_own_sign_a_blank(
    trained: dict[str, TextTokenizer], model: str, text: str
) -> None:
    loaded = of(trained, model)
    ids = loaded.encode([text])[0].ids
    expected = text.replace(BLANK, " ") if model == "sentencepiece_bpe" else text
    assert loaded.decode(ids) == expected
    assert not set(ids) & set(loaded.special_ids.values())
    assert int(loaded.token_bytes[ids].sum()) == len(expected.encode())


@pytest.mark.parametrize("model", ALL)
def test_text_in_every_language_comes_back(trained: dict[str, TextTokenizer], shared_data: Path, model: str) -> None:
    loaded, texts = of(trained, model), [text[:3000] for text in declarations().values()]
    assert len(texts) > 300
    decoded = [loaded.decode(encoding.ids) for encoding in loaded.encode(texts)]
    assert decoded == [text.replace(BLANK, " ") if model == "sentencepiece_bpe" else text for text in texts]


@pytest.mark.parametrize("model", ALL)
def test_special_tokens_have_the_first_ids_and_every_byte_has_a_token(
    trained: dict[str, TextTokenizer], model: str
) -> None:
    loaded = of(trained, model)
    assert [loaded.tokenizer.token_to_id(token) for token in (*SPECIAL_TOKENS, "<|tool|>")] == [*range(7)]
    assert loaded.vocab_size == len(loaded.tokenizer.get_vocab()) == 700
    spelt = (
        f"<0x{byte:02X}>" if model == "sentencepiece_bpe" else character
        for byte, character in enumerate(byte_characters())
    )
    assert all(loaded.tokenizer.token_to_id(token) is not None for token in spelt)


def test_the_same_text_gives_the_same_files_for_any_order_threads_and_hashes(
    trained: dict[str, TextTokenizer], module_stages: Any
) -> None:
    documents = [("prose", str(at), text) for at, text in enumerate(prose())]
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
        [sys.executable, "-c", script, str(module_stages.root), "again", *trained],
        check=True,
        env={**os.environ, "RAYON_NUM_THREADS": "3", "PYTHONHASHSEED": "3"},
    )  # before, it was one thread
    for model in trained:
        assert module_stages.files(f"{model}-again") == module_stages.files(model), model


@pytest.mark.parametrize("model", ALL)
def test_the_stage_encodes_with_every_model_and_loses_no_token(
    trained: dict[str, TextTokenizer], module_stages: Any, model: str
) -> None:
    loaded = of(trained, model)
    inputs = {"ingest": module_stages.root / "ingest", "tokenizer": module_stages.root / model}
    summary = module_stages.tokenize(f"{model}-tokens", inputs)
    assert summary["sources"]["prose"]["bytes_per_token"] > 1.5
    decoded = []
    for shard in sorted((module_stages.root / f"{model}-tokens").glob("*.docs.parquet")):
        import pyarrow.parquet as pq

        docs = pq.read_table(shard, schema=DOCS_SCHEMA)
        ids = np.fromfile(shard.with_name(shard.name.replace(".docs.parquet", ".tokens.bin")), np.uint16)
        for offset, tokens in zip(docs["offset"].to_pylist(), docs["tokens"].to_pylist(), strict=True):
            decoded.append(loaded.decode(ids[offset : offset + tokens].tolist()))
    assert Counter(decoded) == Counter(prose())


def test_the_report_shows_tokens_of_every_model_as_text(trained: dict[str, TextTokenizer]) -> None:
    pieces, spelt = trained["sentencepiece_bpe"], trained["bpe"]
    for token, text in ((f"{BLANK}miller", " miller"), ("ö", "ö"), ("<0xC3>", "<0xC3>"), ("<|end|>", "<|end|>")):
        assert token_text(pieces.tokenizer.token_to_id(token), pieces) == text
    for token, text in (("Ġmiller", " miller"), ("ĠGrÃ¶ÃŁe", " Größe"), ("Ã", r"\xc3"), ("<|end|>", "<|end|>")):
        assert token_text(spelt.tokenizer.token_to_id(token), spelt) == text


@pytest.mark.parametrize("model", ALL)
def test_transformers_encodes_with_the_file_of_every_model(
    trained: dict[str, TextTokenizer], module_stages: Any, model: str
) -> None:
    transformers = pytest.importorskip("transformers")
    loaded, auto = of(trained, model), transformers.AutoTokenizer.from_pretrained(module_stages.root / model)
    for text in (PROSE, SCRIPTS):
        assert auto.encode(text, add_special_tokens=False) == loaded.encode([text])[0].ids
        assert auto.decode(auto.encode(text, add_special_tokens=False)) == text
    assert auto.encode("<|tool|>x")[0] == 6


def naive_merges(words: Mapping[tuple[str, ...], int], ids: dict[str, int], size: int) -> list[tuple[str, str]]:
    """BPE as it is defined: the most frequent pair, of equal ones that with the lowest ids; counted anew every time."""
    merges = []
    while len(ids) < size:
        counts: Counter[tuple[str, str]] = Counter()
        for word, count in words.items():
            for pair in itertools.pairwise(word):
                counts[pair] += count
        best = min(counts, key=lambda pair: (-counts[pair], ids[pair[0]], ids[pair[1]]), default=None)
        if best is None or counts[best] < 2:
            break
        ids.setdefault("".join(best), len(ids))
        merges.append(best)
        words = _merged(words, best)
    return merges


def _merged(words: Mapping[tuple[str, ...], int], pair: tuple[str, str]) -> dict[tuple[str, ...], int]:
    found: Counter[tuple[str, ...]] = Counter()
    for word, count in words.items():
        symbols: list[str] = []
        at = 0
        while at < len(word):
            both = word[at : at + 2] == pair
            symbols.append("".join(pair) if both else word[at])
            at += 2 if both else 1
        found[tuple(symbols)] += count
    return found


@pytest.mark.parametrize("seed", range(8))
def test_merges_are_those_of_the_definition_with_ties_by_the_lowest_ids(seed: int) -> None:
    rng = random.Random(seed)
    texts = ["".join(rng.choices("abcd é'1 \n", k=300)) for _ in range(3)]
    splitter, first = make_pre_tokenizer("gpt2"), [*SPECIAL_TOKENS, *sorted(byte_characters())]
    words = Counter(tuple(word) for text in texts for word, _ in splitter.pre_tokenize_str(text))
    merges = naive_merges(words, {token: number for number, token in enumerate(first)}, 330)
    found = json.loads(train(TokenizerSample({"a": texts}, {}), 330).to_str())["model"]
    assert [*map(tuple, found["merges"])] == merges, f"seed {seed}"
    assert len(merges) > 30


@pytest.mark.parametrize("pretokenizer", ["gpt2", "llama3", "digits"])
@given(text=st.text() | st.text(alphabet="ab'sS:.,! \n\t12é\u0301\u3042\u00a0"))
@example(text=PROSE + SCRIPTS)
def test_super_words_are_cut_only_where_words_are(pretokenizer: str, text: str) -> None:
    words, wider = make_pre_tokenizer(pretokenizer), superbpe.make_superword_splitter(pretokenizer)
    assert _cuts(wider.pre_tokenize_str(text)) <= _cuts(words.pre_tokenize_str(text))


def _cuts(pieces: Iterable[tuple[str, tuple[int, int]]]) -> set[int]:
    return {place for _, span in pieces for place in span}


@pytest.mark.parametrize(
    ("pretokenizer", "pieces"),
    [
        ("gpt2", ["Of course, he didn't say", ":", " it", " 12", "..", "\n\n", " go.", "\n"]),
        ("llama3", ["Of course, he didn't say", ":", " it", " ", "12", "..\n\n", " go", ".\n"]),
        ("digits", ["Of course, he didn't say", ":", " it", " ", "1", "2", "..", "\n\n", " go.", "\n"]),
    ],
)
def test_super_words_reach_across_words_and_single_marks_but_no_colon_number_or_line(
    pretokenizer: str, pieces: list[str]
) -> None:
    text = "Of course, he didn't say: it 12..\n\n go.\n"
    found = superbpe.make_superword_splitter(pretokenizer).pre_tokenize_str(text)
    assert [text[begin:end] for _, (begin, end) in found] == pieces


def naive_superwords(texts: Sequence[str], known: Mapping[str, int], encode: Any, wanted: int) -> list[tuple[str, str]]:
    """The second stage by its definition: symbols are tuples of the first stage's ids, at most four together."""
    spelt = {number: token for token, number in known.items()}
    words: Counter[tuple[tuple[int, ...], ...]] = Counter(
        tuple((number,) for number in word) for text in texts for word in encode(text)
    )
    order = {(number,): number for number in known.values()}
    merges: list[tuple[str, str]] = []
    new: set[str] = set()
    while True:
        counts: Counter[tuple[Any, Any]] = Counter()
        for word, count in words.items():
            for pair in itertools.pairwise(word):
                counts[pair] += count * (len(pair[0] + pair[1]) <= superbpe.MOST_TOKENS)
        left, right = min(counts, key=lambda pair: (-counts[pair], order[pair[0]], order[pair[1]]))
        text = "".join(spelt[number] for number in left + right)
        if text not in known and text not in new:
            if len(new) == wanted or counts[left, right] < 2:
                return merges
            new.add(text)
        order.setdefault(left + right, len(order))
        sides = ("".join(spelt[number] for number in side) for side in (left, right))
        merges.append((next(sides), next(sides)))
        words = _joined(words, left, right)


def _joined(words: Mapping[Any, int], left: Any, right: Any) -> Any:
    found: Counter[Any] = Counter()
    for word, count in words.items():
        symbols: list[Any] = []
        at = 0
        while at < len(word):
            both = word[at : at + 2] == (left, right)
            symbols.append(left + right if both else word[at])
            at += 2 if both else 1
        found[tuple(symbols)] += count
    return found


def test_super_words_go_on_with_the_merges_of_the_words_as_the_definition_says() -> None:
    sample = TokenizerSample({"a": prose(30)}, {})
    first = train(sample, 500)
    known, learnt = first.get_vocab(with_added_tokens=False), json.loads(first.to_str())["model"]["merges"]
    both = json.loads(train(sample, 560, model="superbpe", transition_point=500 / 560).to_str())["model"]
    assert both["merges"][: len(learnt)] == learnt
    first.pre_tokenizer = superbpe.make_superword_splitter("gpt2")

    def encode(text: str) -> list[list[int]]:
        found: dict[int, list[int]] = {}
        encoding = first.encode(text, add_special_tokens=False)
        for number, word in zip(encoding.ids, encoding.word_ids, strict=True):
            found.setdefault(word, []).append(number)
        return [*found.values()]

    merges = naive_superwords(prose(30), known, encode, 60)
    assert [*map(tuple, both["merges"][len(learnt) :])] == merges
    assert {token for token in both["vocab"] if token not in known} <= {left + right for left, right in merges}
    assert any(token.count("Ġ") > 1 and token.strip("Ġ").count("Ġ") for token in both["vocab"])
    assert len(both["vocab"]) == 560


def test_super_words_take_fewer_tokens_than_words(trained: dict[str, TextTokenizer]) -> None:
    text = PROSE * 5
    assert len(trained["superbpe"].encode([text])[0].ids) < len(trained["bpe"].encode([text])[0].ids)


def test_characters_of_a_sentencepiece_vocabulary_are_the_most_frequent_ones_and_others_are_bytes() -> None:
    assert frequent_characters(iter(["aab \0\0\0", "a  bc"]), 1.0, 10) == f"abc{BLANK}"
    assert frequent_characters(iter(["aac", "ab"]), 1.0, 2) == f"ab{BLANK}"
    assert frequent_characters(iter(["aaaaaaab", "a c"]), 0.9, 10) == f"ab{BLANK}"
    assert frequent_characters(iter(["aaaaaaaab", "a c"]), 0.8, 10) == f"a{BLANK}"
    tokenizer = train(
        TokenizerSample({"a": ["ab" * 500, "xé"]}, {}), 300, model="sentencepiece_bpe", character_coverage=0.99
    )
    assert tokenizer.encode("é").tokens == ["<0xC3>", "<0xA9>"]
    assert tokenizer.token_to_id("ab") is not None
    assert tokenizer.decode(tokenizer.encode(" aé  b\n").ids) == " aé  b\n"


def test_no_token_of_a_sentencepiece_vocabulary_mixes_kinds_of_characters(trained: dict[str, TextTokenizer]) -> None:
    tokens = [
        token
        for token in trained["sentencepiece_bpe"].tokenizer.get_vocab(with_added_tokens=False)
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


def test_a_unigram_vocabulary_has_the_frequent_words_and_probabilities() -> None:
    pytest.importorskip("sentencepiece")
    found = json.loads(train(TokenizerSample({"a": prose()}, {}), 700, model="unigram").to_str())["model"]["vocab"]
    scores = dict(map(tuple, found[len(SPECIAL_TOKENS) :]))
    assert {"Ġcourse", "Ġmiller", "Ġwould", "Ġthe"} <= set(scores)
    assert [*scores.values()] == sorted(scores.values(), reverse=True)
    assert math.fsum(map(math.exp, scores.values())) == pytest.approx(1.0, abs=0.2)


@given(st.lists(st.text(alphabet="abc", min_size=1, max_size=20), min_size=1, max_size=12, unique=True))
def test_frequent_substrings_are_all_that_occur_twice(words: list[str]) -> None:
    words, counts = sorted(words), np.arange(1, len(words) + 1)
    expected: Counter[str] = Counter()
    for word, count in zip(words, counts.tolist(), strict=True):
        for begin in range(len(word)):
            for end in range(begin + 2, min(len(word), begin + unigram.LONGEST_PIECE) + 1):
                expected[word[begin:end]] += count
    found = unigram.frequent_substrings(words, counts, 10**6)
    assert dict(found) == {piece: count for piece, count in expected.items() if count > 1}
    cover = [len(piece) * count for piece, count in found]
    assert cover == sorted(cover, reverse=True)
    assert unigram.frequent_substrings(words, counts, 3) == found[:3]


def test_without_its_package_a_unigram_vocabulary_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(VocabularyError, match=r"pip install 'gristmill\[sentencepiece\]'"):
        train(TokenizerSample({"a": ["some text"]}, {}), 300, model="unigram")


@pytest.mark.parametrize("model", ["bpe", "sentencepiece_bpe", "superbpe", "unigram"])
def test_a_special_token_that_text_could_become_is_refused_by_every_model(model: Any) -> None:
    for token in ("word", "<<>>"):
        with pytest.raises(VocabularyError, match="text could be encoded as that token"):
            train(TokenizerSample({"a": ["some text"]}, {}), 300, special_tokens=[token], model=model)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"model": "wordpiece"}, "Input should be 'bpe', 'unigram', 'sentencepiece_bpe' or 'superbpe'"),
        ({"path": "a.json", "model": "unigram"}, "model unigram is for a tokenizer trained here"),
        ({"model": "sentencepiece_bpe", "pretokenizer": "llama3"}, "pretokenizer llama3 is for models over bytes"),
        ({"character_coverage": 0.9}, "character_coverage is for model sentencepiece_bpe, not for bpe; leave it out"),
        ({"model": "unigram", "transition_point": 0.9}, "transition_point is for model superbpe, not for unigram"),
        ({"model": "superbpe", "vocab_size": 1000, "transition_point": 0.2}, "at 200 of vocab_size 1000"),
        ({"model": "superbpe", "transition_point": 1}, "less than 1"),
        ({"model": "sentencepiece_bpe", "character_coverage": 1.5}, "less than or equal to 1"),
    ],
)
def test_settings_that_do_not_fit_the_model_are_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Tokenizer.model_validate(section)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "most"), [("bpe", 35), ("sentencepiece_bpe", 35), ("superbpe", 60), ("unigram", 45)])
def test_learning_takes_no_more_memory_per_byte_than_the_page_says(shared_data: Path, model: str, most: int) -> None:
    if model == "unigram":
        pytest.importorskip("sentencepiece")
    found = vocabularies.in_process("multilingual", model, vocabularies.MODEL_SIZE)
    assert found is not None
    assert found["memory"] * vocabularies.MEGA / vocabularies.LEARNT_BYTES < most
    assert f"up to {most}" in (Path(__file__).parents[2] / "docs" / "tokenizer-models.md").read_text()

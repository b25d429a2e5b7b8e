"""Vocabularies are lossless, determined by the text alone, and built as defined."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from benchmarks.tokenize import vocabularies
from benchmarks.tokenize.texts import declarations
from gristmill.tokenize.chat_template import SPECIAL_TOKENS
from gristmill.tokenize.encoding.bpe import VocabularyError, train
from gristmill.tokenize.encoding.encode import DOCS_SCHEMA
from gristmill.tokenize.encoding.pretokens import byte_characters, make_pre_tokenizer
from gristmill.tokenize.encoding.tokenizer import TextTokenizer, load
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
def tokenizer(module_stages: Any) -> TextTokenizer:
    """A tokenizer learnt by the stage."""
    ingest = module_stages.ingest(
        "ingest", [("prose", str(index), text) for index, text in enumerate(prose())], 2
    )
    module_stages.tokenizer(
        "tokenizer",
        {"ingest": ingest},
        ["prose"],
        vocab_size=700,
        special_tokens=["<|tool|>"],
    )
    return load(module_stages.root / "tokenizer")


@given(text=st.text())
@example(text="<|endoftext|> and <|user|>\n<|tool|><0x0A> Ġ")
@example(
    text="\0 \u0378 \U000e0fff \ufeff  \r\n\t\u00a0 e\u0301 \u1e9b\u0323 n't 've     "
    "x   "
)
@example(text=SCRIPTS)
@example(text="a\u2581b")
def test_every_string_round_trips(tokenizer: TextTokenizer, text: str) -> None:
    ids = tokenizer.encode([text])[0].ids
    assert tokenizer.decode(ids) == text
    assert not set(ids) & set(tokenizer.special_ids.values())
    assert int(tokenizer.token_bytes[ids].sum()) == len(text.encode())


@pytest.mark.slow
def test_text_in_every_language_round_trips(
    tokenizer: TextTokenizer, shared_data: Path
) -> None:
    texts = [text[:3000] for text in declarations().values()]
    assert len(texts) > 300
    decoded = [tokenizer.decode(encoding.ids) for encoding in tokenizer.encode(texts)]
    assert decoded == texts


def test_vocabulary_starts_with_special_tokens_and_covers_all_bytes(
    tokenizer: TextTokenizer,
) -> None:
    assert [
        tokenizer.tokenizer.token_to_id(token)
        for token in (*SPECIAL_TOKENS, "<|tool|>")
    ] == [*range(7)]
    assert tokenizer.vocab_size == len(tokenizer.tokenizer.get_vocab()) == 700
    assert all(
        tokenizer.tokenizer.token_to_id(character) is not None
        for character in byte_characters()
    )


@pytest.mark.slow
def test_files_do_not_depend_on_document_order_threads_or_hash_seed(
    tokenizer: TextTokenizer, module_stages: Any
) -> None:
    documents = [("prose", str(index), text) for index, text in enumerate(prose())]
    module_stages.ingest("resharded", documents[::-1], 3)
    script = """
import sys
from pathlib import Path
from gristmill.core.stage_context import Context
from gristmill.tokenize.encoding import tokenizer
root = Path(sys.argv[1])
section = {"vocab_size": 700, "special_tokens": ["<|tool|>"]}
config = {"tokenizer": section, "sources": ["prose"], "seed": 1}
context = Context(root / "again-work", emit=lambda event: None)
tokenizer.run({"ingest": root / "resharded"}, config, root / "again", context)
"""
    subprocess.run(
        [sys.executable, "-c", script, str(module_stages.root)],
        check=True,
        env={**os.environ, "RAYON_NUM_THREADS": "3", "PYTHONHASHSEED": "3"},
    )  # the first run had one thread
    assert module_stages.files("again") == module_stages.files("tokenizer")


def test_stage_encodes_losslessly(tokenizer: TextTokenizer, module_stages: Any) -> None:
    inputs = {
        "ingest": module_stages.root / "ingest",
        "tokenizer": module_stages.root / "tokenizer",
    }
    summary = module_stages.tokenize("tokens", inputs)
    assert summary.sources["prose"].bytes_per_token > 1.5
    decoded = []
    for shard in sorted((module_stages.root / "tokens").glob("*.docs.parquet")):
        docs = pq.read_table(shard, schema=DOCS_SCHEMA)
        ids = np.fromfile(
            shard.with_name(shard.name.replace(".docs.parquet", ".tokens.bin")),
            np.uint16,
        )
        for offset, tokens in zip(
            docs["offset"].to_pylist(), docs["tokens"].to_pylist(), strict=True
        ):
            decoded.append(tokenizer.decode(ids[offset : offset + tokens].tolist()))
    assert Counter(decoded) == Counter(prose())


def test_transformers_encodes_with_the_file(
    tokenizer: TextTokenizer, module_stages: Any
) -> None:
    transformers = pytest.importorskip("transformers")
    auto = transformers.AutoTokenizer.from_pretrained(module_stages.root / "tokenizer")
    for text in (PROSE, SCRIPTS):
        assert (
            auto.encode(text, add_special_tokens=False)
            == tokenizer.encode([text])[0].ids
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


def test_ambiguous_special_token_is_rejected() -> None:
    for token in ("word", "<<>>"):
        with pytest.raises(VocabularyError, match=token):
            train(
                TokenizerSample({"a": ["some text"]}, {}), 300, special_tokens=[token]
            )


@pytest.mark.slow
def test_memory_of_training_is_within_the_documented_bound(shared_data: Path) -> None:
    measurement = vocabularies.in_process(
        "multilingual", "bpe", max(vocabularies.SIZES)
    )
    assert measurement is not None
    assert measurement.memory * vocabularies.MEGA / vocabularies.LEARNT_BYTES < 40
    page = (Path(__file__).parents[2] / "docs" / "tokenizers.md").read_text()
    assert "up to\n40 bytes" in page

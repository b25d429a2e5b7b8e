"""A small tokenizer of every family that gigatoken knows, trained on a few
sentences.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from gristmill.tokenize.encoding.pretokens import (
    GPT2,
    LLAMA3,
    QWEN2,
    byte_characters,
    make_pre_tokenizer,
)

TRAINING_TEXTS = [
    "It's the river that they'll have seen, 1234 times.\n\n  def f(x):\n\treturn x_1 "
    "+ 'a'",
    "naïve café 日本語テスト",
    "internationalisation antidisestablishmentarianism "
    "================================================",
    "CamelCaseWords HTTPServer I'LL path//to/file\r\n\r\n",
    "e\u0301a\u0302 नमस्ते दुनिया ไทย 한국어 😀👍🏽",
] * 9
CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|"
    r"\s*[\r\n]|\s+(?!\S)|\s+"
)
CL100K_PLAIN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|"
    r"\s+(?!\S)|\s+"
)
GPT2_GROUPED = (
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
)
QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDING = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_CASES = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
O200K = _CASES % (_ENDING, _ENDING) + r"\p{N}{1,3}" + _REST
NEMOTRON = _CASES % ("", "") + r"\p{N}" + _REST
DEEPSEEK = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+|"
    " ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
)
SPLITS = {
    "gpt2 as a split": (GPT2,),
    "gpt2 grouped": (GPT2_GROUPED,),
    "cl100k": (CL100K,),
    "cl100k plain": (CL100K_PLAIN,),
    "qwen2": (QWEN2,),
    "qwen2 NFC": (QWEN2,),
    "qwen3.5": (QWEN35,),
    "o200k": (O200K,),
    "nemotron": (NEMOTRON,),
    "deepseek": DEEPSEEK,
    "llama3 whole": (LLAMA3,),
}
MANIFEST = ("gpt2", "llama3", "digits")
"""Families that a manifest can name."""
BYTE_LEVEL = (*MANIFEST, "gpt2 with a prefix", *SPLITS)
SENTENCEPIECE = (
    "llama2",
    "metaspace",
    "metaspace first",
    "metaspace whole",
    "gemma",
    "collapsing",
)
FAMILIES = (*BYTE_LEVEL, *SENTENCEPIECE)
SPECIAL = ("<|endoftext|>", "<s>", "</s>", "[INST]", "<|im_start|>")


@cache
def family(name: str) -> Tokenizer:
    """A tokenizer of 600 tokens or more that treats special tokens as text."""
    tokenizer = _sentencepiece(name) if name in SENTENCEPIECE else _byte_level(name)
    tokenizer.encode_special_tokens = True
    return tokenizer


def _byte_level(name: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    if name in SPLITS:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                *(
                    pre_tokenizers.Split(Regex(regex), "isolated")
                    for regex in SPLITS[name]
                ),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    elif name == "gpt2 with a prefix":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    else:
        tokenizer.pre_tokenizer = make_pre_tokenizer(name)
    if name.endswith("NFC"):
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.train_from_iterator(
        TRAINING_TEXTS,
        trainers.BpeTrainer(
            vocab_size=600,
            special_tokens=list(SPECIAL),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return changed(tokenizer, whole_words) if name == "llama3 whole" else tokenizer


def _sentencepiece(name: str) -> Tokenizer:
    """Build a tokenizer as `transformers` converts a sentencepiece model, with byte
    fallback.
    """
    tokenizer = Tokenizer(
        models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    scheme = {
        "metaspace": "always",
        "metaspace first": "first",
        "metaspace whole": "first",
    }.get(name)
    if scheme is not None:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
            prepend_scheme=scheme, split=not name.endswith("whole")
        )
    else:
        collapse = (
            [normalizers.Replace(Regex(" {2,}"), "\u2581")]
            if name == "collapsing"
            else []
        )
        prepend = [] if name == "gemma" else [normalizers.Prepend("\u2581")]
        tokenizer.normalizer = normalizers.Sequence(
            [*collapse, *prepend, normalizers.Replace(" ", "\u2581")]
        )
    if name == "gemma":
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    # without a split, a text is one word
    texts = [text[:40] for text in TRAINING_TEXTS]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer.train_from_iterator(
        [word for text in texts for word in (text, *text.split())],
        trainers.BpeTrainer(
            vocab_size=600,
            special_tokens=["<unk>", *SPECIAL, *bytes_],
            show_progress=False,
            limit_alphabet=60,
        ),
    )

    def not_special(described: dict[str, Any]) -> None:
        described["added_tokens"] = [
            token
            for token in described["added_tokens"]
            if token["content"] not in bytes_
        ]

    return changed(tokenizer, not_special)


def changed(base: Tokenizer, change: Any) -> Tokenizer:
    """Return a tokenizer whose JSON was changed by a function."""
    described = json.loads(base.to_str())
    change(described)
    tokenizer = Tokenizer.from_str(json.dumps(described))
    tokenizer.encode_special_tokens = True
    return tokenizer


def whole_words(described: dict[str, Any]) -> None:
    """Set Llama 3's `ignore_merges`, and add words that no merges lead to."""
    described["model"]["ignore_merges"] = True
    spelt = "".join(byte_characters()[byte] for byte in "日日".encode())
    for token in ("zq", "\u0120zq", "zqzqzqzqzqzqzqzqzqzqzq", spelt):
        described["model"]["vocab"][token] = (
            max(described["model"]["vocab"].values()) + 1
        )

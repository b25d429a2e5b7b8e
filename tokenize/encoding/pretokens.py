"""Pre-tokenization patterns of a manifest, and the byte spelling of tokens.

A byte-level BPE never merges across pre-tokens, so the pattern limits the possible
tokens. The regular expressions are those of OpenAI's encoder.py (GPT-2; Radford et al.
2019), of OpenAI's tiktoken (`cl100k_base`, adopted by Llama 3 in Meta's
llama3/tokenizer.py), and of Qwen 2, which is the latter with single digits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers.pre_tokenizers import PreTokenizer


GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS_OF_ANY_CASE = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_CL100K = (
    r"%s|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = _CL100K % (_CONTRACTIONS_OF_ANY_CASE, r"\p{N}{1,3}")
QWEN2 = _CL100K % (_CONTRACTIONS_OF_ANY_CASE, r"\p{N}")


def make_pre_tokenizer(name: str) -> PreTokenizer:
    """Pre-tokenizer `gpt2`, `llama3` or `digits` (`tokenizer.pretokenizer`)."""
    from tokenizers import Regex, pre_tokenizers

    if name == "llama3":
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(LLAMA3), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name == "digits":
        return pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), byte_level]
        )
    return byte_level


def byte_characters() -> list[str]:
    """GPT-2's character for each byte: printable ones stand for themselves, others
    follow U+0100.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    substitutes = iter(range(0x100, 0x200))
    return [
        chr(byte) if byte in printable else chr(next(substitutes))
        for byte in range(0x100)
    ]

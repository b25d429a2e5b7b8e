"""The pre-tokenisations that are known here: how each is built for training, and found again in a tokenizer.json.

A byte-level BPE never merges across pre-tokens, so the pattern decides what a token can be. The regular expressions
are those of OpenAI's encoder.py (GPT-2; Radford et al. 2019), of OpenAI's tiktoken (`cl100k_base`, taken over by
Llama 3 in Meta's llama3/tokenizer.py), and of Qwen 2, which is the latter with every digit alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers.pre_tokenizers import PreTokenizer

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS_OF_ANY_CASE = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_CL100K = (r"%s|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
LLAMA3 = _CL100K % (_CONTRACTIONS_OF_ANY_CASE, r"\p{N}{1,3}")
QWEN2 = _CL100K % (_CONTRACTIONS_OF_ANY_CASE, r"\p{N}")


@dataclass(frozen=True)
class Pattern:
    """How text is split.

    Attributes:
        most_digits: longest run of numbers of the patterns like cl100k; 0 stands for GPT-2's pattern.
        digits_alone: whether every numeric character is cut out first (`tokenizers`' Digits).
    """

    most_digits: int = 0
    digits_alone: bool = False


REGEXES = {GPT2: Pattern(), LLAMA3: Pattern(most_digits=3), QWEN2: Pattern(most_digits=1)}


class NotKnownError(ValueError):
    """A tokenizer that only the `tokenizers` library can encode with; the message is the reason."""


def make_pre_tokenizer(name: str) -> PreTokenizer:
    """What splits text before the merges are learnt: `gpt2`, `llama3` or `digits` (`tokenizer.pretokenizer`)."""
    from tokenizers import Regex, pre_tokenizers

    if name == "llama3":
        return pre_tokenizers.Sequence([
            pre_tokenizers.Split(Regex(LLAMA3), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ])
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name == "digits":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    return byte_level


def read_pattern(described: Mapping[str, Any]) -> Pattern:
    """The pattern of a tokenizer.json.

    Args:
        described: the parsed file.

    Raises:
        NotKnownError: its pre-tokenizer is none of those above.
    """
    splitting = described.get("pre_tokenizer") or {"type": "none"}
    steps = splitting["pretokenizers"] if splitting["type"] == "Sequence" else [splitting]
    *before, last = steps or [{"type": "none"}]
    if last["type"] != "ByteLevel" or last.get("add_prefix_space", True) or len(before) > 1:
        raise NotKnownError(f"its pre-tokenizer is {_names(steps)}")
    with_regex = last.get("use_regex", True)
    if not before and with_regex:
        return REGEXES[GPT2]
    if before and before[0]["type"] == "Digits" and before[0].get("individual_digits") and with_regex:
        return Pattern(digits_alone=True)
    if before and before[0]["type"] == "Split" and not with_regex:
        return _read_split(before[0])
    raise NotKnownError(f"its pre-tokenizer is {_names(steps)}")


def _read_split(split: Mapping[str, Any]) -> Pattern:
    regex = split["pattern"].get("Regex")
    if regex not in REGEXES:
        raise NotKnownError(f"its pre-tokenizer splits by another pattern: {regex or split['pattern']}")
    if split["behavior"] != "Isolated" or split.get("invert"):
        raise NotKnownError(f"its pre-tokenizer splits in another way: {split['behavior']}, "
                            f"invert {bool(split.get('invert'))}")
    return REGEXES[regex]


def _names(steps: list[Mapping[str, Any]]) -> str:
    return " + ".join(
        step["type"] + "".join(f" with {key}" for key in ("add_prefix_space",) if step.get(key)) for step in steps)

"""Keys of a tokenizer.json that other encoders depend on."""

from __future__ import annotations

from typing import TYPE_CHECKING, NotRequired, TypedDict

import orjson

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class Pattern(TypedDict, total=False):
    """Pattern of a `Split`: a text or a regular expression."""

    String: str
    Regex: str


class Step(TypedDict):
    """Normalizer or pre-tokenizer; its type determines which other keys it has."""

    type: str
    normalizers: NotRequired[list[Step]]
    pretokenizers: NotRequired[list[Step]]
    add_prefix_space: NotRequired[bool]
    use_regex: NotRequired[bool]
    individual_digits: NotRequired[bool]
    pattern: NotRequired[Pattern]
    behavior: NotRequired[str]
    invert: NotRequired[bool]


class AddedToken(TypedDict):
    """A token that is found in text before any other."""

    id: int
    content: str
    special: bool
    normalized: bool


class Bpe(TypedDict):
    """A model; all keys but the type are those of `BPE`."""

    type: str
    vocab: dict[str, int]
    merges: list[str | list[str]]
    byte_fallback: NotRequired[bool | None]
    ignore_merges: NotRequired[bool | None]
    dropout: NotRequired[float | None]
    continuing_subword_prefix: NotRequired[str | None]
    end_of_word_suffix: NotRequired[str | None]


UNUSUAL_KEYS = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
"""Keys of a `BPE` that no other encoder supports."""


class TokenizerJson(TypedDict):
    """A tokenizer.json."""

    added_tokens: list[AddedToken]
    normalizer: Step | None
    pre_tokenizer: Step | None
    model: Bpe


def describe(tokenizer: Tokenizer) -> TokenizerJson:
    """Content of the tokenizer.json of a tokenizer."""
    return orjson.loads(tokenizer.to_str())

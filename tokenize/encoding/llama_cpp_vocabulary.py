"""Conversion of a tokenizer.json to llama.cpp's GGUF fields: tokens, their kinds,
merges, and the pre-tokenizer.

llama.cpp takes no pattern: it knows patterns by the names of models that use them (its
`llama-vocab.cpp`). A tokenizer is written only if one of these names stands for exactly
its pattern; any other is refused, since llama.cpp would silently encode the same text
to other ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gristmill.tokenize.encoding.pretokens import GPT2, LLAMA3, QWEN2
from gristmill.tokenize.encoding.tokenizer_json import UNUSUAL_KEYS, Step, describe

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
"""Kinds of tokens (llama.h, `llama_token_type`)."""
PRE_TOKENIZERS = {
    ("gpt2",): "gpt-2",
    ("digits", "gpt2"): "smollm",
    (LLAMA3,): "dbrx",
    (QWEN2,): "qwen2",
    (GPT2,): "gpt-2",
}
"""Steps of a pre-tokenizer -> llama.cpp's name. `dbrx` has Llama 3's pattern without
taking words that are tokens before merging, which `llama-bpe` does.
"""
WHOLE_WORDS = {"dbrx": "llama-bpe"}
"""Names of the same patterns with words that are tokens taken before merging
(`ignore_merges`).
"""


class NotForLlamaCppError(ValueError):
    """A tokenizer that llama.cpp cannot reproduce; the message is the reason."""


@dataclass(frozen=True)
class Vocabulary:
    """Tokenizer fields of a GGUF file.

    Attributes:
        tokens: by id; bytes in GPT-2's spelling.
        kinds: of each, NORMAL to UNUSED.
        merges: `left right`, by rank.
        pre_tokenizer: llama.cpp's name.
    """

    tokens: Sequence[str]
    kinds: Sequence[int]
    merges: Sequence[str]
    pre_tokenizer: str


def llama_cpp_vocabulary(tokenizer: Tokenizer, size: int) -> Vocabulary:
    """Convert a tokenizer to the fields of a GGUF file.

    Args:
        tokenizer: a byte-level BPE.
        size: number of the model's ids; ids without a token are unused.

    Raises:
        NotForLlamaCppError: llama.cpp would encode the same text differently.
    """
    described = describe(tokenizer)
    model = described["model"]
    if model["type"] != "BPE" or model.get("byte_fallback"):
        kind = "a BPE over characters" if model.get("byte_fallback") else model["type"]
        raise NotForLlamaCppError(
            f"it is {kind}, and only a BPE over bytes is split by llama.cpp in the same "
            "way"
        )
    for key in UNUSUAL_KEYS:
        if model.get(key):
            raise NotForLlamaCppError(
                f"its model has {key}, which llama.cpp does not have"
            )
    if described["normalizer"] is not None:
        raise NotForLlamaCppError(
            f"its normalizer {described['normalizer']['type']} changes text, which "
            "llama.cpp leaves as it is"
        )
    name = pre_tokenizer_name(
        described["pre_tokenizer"], bool(model.get("ignore_merges"))
    )
    tokens = [f"[UNUSED{number}]" for number in range(size)]
    kinds = [UNUSED] * size
    added = tokenizer.get_added_tokens_decoder()
    for token, number in tokenizer.get_vocab(with_added_tokens=True).items():
        if number < size:
            tokens[number] = token
            kinds[number] = NORMAL
            if number in added:
                kinds[number] = CONTROL if added[number].special else USER_DEFINED
    merges = [
        merge if isinstance(merge, str) else " ".join(merge)
        for merge in model["merges"]
    ]
    return Vocabulary(tokens, kinds, merges, name)


def pre_tokenizer_name(described: Step | None, ignores_merges: bool) -> str:
    """llama.cpp's name for the `pre_tokenizer` of a tokenizer.json.

    Raises:
        NotForLlamaCppError: it has no name.
    """
    steps = (
        described["pretokenizers"]
        if described is not None and described["type"] == "Sequence"
        else [described]
    )
    parts: list[str] = []
    for step in steps:
        match step or {"type": "none"}:
            case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}:
                pass  # it only spells bytes
            case {"type": "ByteLevel", "add_prefix_space": False}:
                parts.append("gpt2")
            case {"type": "Digits", "individual_digits": True}:
                parts.append("digits")
            case {
                "type": "Split",
                "behavior": "Isolated",
                "invert": False,
                "pattern": {"Regex": pattern},
            }:
                parts.append(pattern)
            case {"type": kind}:
                parts.append(kind)
    name = PRE_TOKENIZERS.get(tuple(parts))
    if name is None:
        raise NotForLlamaCppError(
            "it splits text in a way that llama.cpp has no name for: "
            f"{', then '.join(parts) or 'not at all'}"
        )
    if ignores_merges and name not in WHOLE_WORDS:
        raise NotForLlamaCppError(
            "it takes words that are tokens without their merges, which llama.cpp's "
            f"{name} does not"
        )
    return WHOLE_WORDS[name] if ignores_merges else name

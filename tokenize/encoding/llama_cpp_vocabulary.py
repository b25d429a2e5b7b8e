"""A tokenizer.json as llama.cpp reads it out of a GGUF file: tokens, what kind each is, merges, and how text is split.

llama.cpp does not take a pattern: it knows patterns by the names of models that had them (its `llama-vocab.cpp`). So a
tokenizer is written only where one of these names stands for exactly what it does; any other is refused, because
llama.cpp would give other ids for the same text and say nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gristmill.tokenize.encoding.pretokens import GPT2, LLAMA3, QWEN2

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
"""How text is split, step by step -> llama.cpp's name for it. `dbrx` has Llama 3's pattern too, but takes no word that
is a token without its merges, which `llama-bpe` does."""
WHOLE_WORDS = {"dbrx": "llama-bpe"}
"""The name of the same pattern where a word that is a token is taken without its merges (`ignore_merges`)."""


class NotForLlamaCppError(ValueError):
    """A tokenizer that llama.cpp would not follow; the message is the reason."""


@dataclass(frozen=True)
class Vocabulary:
    """What a GGUF file says of a tokenizer.

    Attributes:
        tokens: by id; bytes spelt as GPT-2 spells them.
        kinds: of each, NORMAL to UNUSED.
        merges: `left right`, the first to be made first.
        pre_tokenizer: llama.cpp's name of how text is split.
    """

    tokens: Sequence[str]
    kinds: Sequence[int]
    merges: Sequence[str]
    pre_tokenizer: str


def llama_cpp_vocabulary(tokenizer: Tokenizer, size: int) -> Vocabulary:
    """What a GGUF file says of a tokenizer.

    Args:
        tokenizer: a byte-level BPE.
        size: ids that the model has; those without a token are unused.

    Raises:
        NotForLlamaCppError: llama.cpp would encode the same text otherwise.
    """
    described = json.loads(tokenizer.to_str())
    model = described["model"]
    refuse_other_models(model.get("type"), bool(model.get("byte_fallback")))
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise NotForLlamaCppError(f"its model has {key}, which llama.cpp does not have")
    if described.get("normalizer") is not None:
        raise NotForLlamaCppError(
            f"its normalizer {described['normalizer']['type']} changes text, which llama.cpp leaves as it is"
        )
    name = pre_tokenizer_name(described.get("pre_tokenizer"), bool(model.get("ignore_merges")))
    added = tokenizer.get_added_tokens_decoder()
    by_id = {number: token for token, number in tokenizer.get_vocab(with_added_tokens=True).items()}
    tokens = [by_id.get(number, f"[UNUSED{number}]") for number in range(size)]
    kinds = [
        UNUSED
        if number not in by_id
        else NORMAL
        if number not in added
        else CONTROL
        if added[number].special
        else USER_DEFINED
        for number in range(size)
    ]
    merges = [one if isinstance(one, str) else " ".join(one) for one in model["merges"]]
    return Vocabulary(tokens, kinds, merges, name)


def refuse_other_models(model: str | None, byte_fallback: bool) -> None:
    """Raise NotForLlamaCppError unless a tokenizer is a BPE over bytes."""
    if model != "BPE" or byte_fallback:
        raise NotForLlamaCppError(
            f"it is {'a BPE over characters' if byte_fallback else model}, and only a BPE over "
            "bytes is split by llama.cpp in the same way (tokenizer.model: bpe)"
        )


def pre_tokenizer_name(described: Mapping[str, Any] | None, ignores_merges: bool) -> str:
    """llama.cpp's name for the `pre_tokenizer` of a tokenizer.json.

    Raises:
        NotForLlamaCppError: it has none.
    """
    steps = described["pretokenizers"] if described is not None and described["type"] == "Sequence" else [described]
    found = tuple(part for step in steps for part in _part_of(step or {"type": "none"}))
    name = PRE_TOKENIZERS.get(found)
    if name is None:
        raise NotForLlamaCppError(
            f"it splits text in a way that llama.cpp has no name for: {', then '.join(found) or 'not at all'}"
        )
    if ignores_merges and name not in WHOLE_WORDS:
        raise NotForLlamaCppError(
            f"it takes words that are tokens without their merges, which llama.cpp's {name} does not"
        )
    return WHOLE_WORDS[name] if ignores_merges else name


def _part_of(step: Mapping[str, Any]) -> list[str]:
    """A step as PRE_TOKENIZERS name it; nothing where it only spells bytes."""
    match step:
        case {"type": "ByteLevel", "add_prefix_space": False}:
            return ["gpt2"] if step.get("use_regex", True) else []
        case {"type": "Digits", "individual_digits": True}:
            return ["digits"]
        case {"type": "Split", "behavior": "Isolated", "invert": False, "pattern": {"Regex": pattern}}:
            return [str(pattern)]
    return [str(step["type"])]

"""The section `tokenizer`: a trained vocabulary, or a tokenizer.json."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from gristmill.mixtures.base import (
    Count,
    NotNegative,
    OutsidePath,
    Positive,
    Seeded,
    Text,
    repeated,
)
from gristmill.mixtures.objectives.span_objectives import SENTINEL

BYTES, OWN_SPECIAL_TOKENS = 256, 6
"""Tokens of every vocabulary: all bytes; end of text, padding, three roles and the end
of a turn.
"""


class Tokenizer(Seeded):
    """A byte-level BPE trained here, as in GPT-2 and Llama 3, or any tokenizer.json."""

    path: OutsidePath | None = None
    """A tokenizer.json to use instead of training one."""
    end_of_text: Text | None = None
    """The token in the file of `path` that ends a text, such as `"[SEP]"` of BERT's
    WordPiece vocabularies; if absent, the first of `<|endoftext|>`, `</s>`,
    `<|end_of_text|>`, `<eos>`, `<|eot_id|>`, `[EOS]` and DeepSeek's that it has.
    """
    vocab_size: Annotated[int, Field(ge=264)] = 8192
    """Size of the vocabulary: 256 bytes, the special tokens and the learnt tokens
    together.
    """
    pretokenizer: Literal["gpt2", "llama3", "digits"] = "gpt2"
    """Boundaries that no token crosses. `gpt2`: words with the blank in front of them,
    runs of digits, runs of punctuation (Radford et al. 2019). `llama3`: numbers in
    groups of up to three digits, any punctuation mark in front of a word, line breaks
    with the punctuation before them (tiktoken's cl100k_base, as in Llama 3). `digits`:
    `gpt2` with every digit a token.
    """
    special_tokens: tuple[Text, ...] = ()
    """Further special tokens, after those of every tokenizer trained here; text is
    never encoded as one of them.
    """
    sentinels: Count = Field(default=0, exclude=True)
    """Number of additional special tokens, `<extra_id_0>` and so on, which stand for
    hidden spans: one for each span of a row (T5: 100).
    """
    chat_template: Text | None = None
    """Chat template: the format of conversations, in Jinja as transformers reads it,
    with the answers between `{% generation %}` and `{% endgeneration %}`. If absent, a
    template with the roles as special tokens.
    """
    chat_template_path: OutsidePath | None = None
    """A file with the chat template."""
    sample_bytes: Positive = 50_000_000
    """Bytes of text from which the merges are learnt."""
    weights: dict[str, NotNegative] | None = None
    """Shares of the sample per source; equal shares if absent (so that a new mixture
    keeps the tokenizer).
    """
    seed: int | None = None
    """Seed of the hashes that choose documents; the manifest's if absent."""

    @model_validator(mode="before")
    @classmethod
    def _name_sentinels(cls, values: Any) -> Any:
        if not isinstance(values, dict) or not isinstance(
            count := values.get("sentinels"), int
        ):
            return values
        special_tokens = values.get("special_tokens", ())
        sentinels = [
            name
            for number in range(count)
            if (name := SENTINEL.format(number)) not in special_tokens
        ]
        return {**values, "special_tokens": (*special_tokens, *sentinels)}

    def _problems(self) -> Iterator[str]:
        if self.chat_template is not None and self.chat_template_path is not None:
            yield "chat_template and chat_template_path are both set; leave one out"
        if self.path is not None and self.pretokenizer != "gpt2":
            yield (
                f"pretokenizer {self.pretokenizer} is for a tokenizer trained here; "
                "the file of `path` has its own"
            )
        if twice := repeated(self.special_tokens):
            yield f"special_tokens names {twice!r} twice"
        min_vocab_size = BYTES + OWN_SPECIAL_TOKENS + len(self.special_tokens)
        if self.path is None and self.vocab_size < min_vocab_size:
            yield (
                f"vocab_size {self.vocab_size} is too small for the bytes and the "
                f"special tokens; the minimum is {min_vocab_size}"
            )

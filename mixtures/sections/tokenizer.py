"""The section `tokenizer`: a trained vocabulary, or a tokenizer.json."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from gristmill.mixtures.base import (
    Count,
    InnerFraction,
    NotNegative,
    OutsidePath,
    Positive,
    PositiveFloat,
    Seeded,
    Share,
    Text,
    repeated,
)
from gristmill.mixtures.objectives.span_objectives import SENTINEL
from gristmill.mixtures.user_code import Own

BYTES, OWN_SPECIAL_TOKENS = 256, 6
"""Tokens of every vocabulary: all bytes; end of text, padding, three roles and the end
of a turn.
"""
VocabularyModel = Literal["bpe", "unigram", "sentencepiece_bpe", "superbpe"]
CHARACTER_COVERAGE, TRANSITION_POINT = 0.9995, 0.9
"""SentencePiece's default; the share of SuperBPE's best model (180,000 of 200,000
tokens).
"""


class OwnFormatter(Own):
    """A function that formats conversations: `write(messages)` returns pairs of text
    and whether the assistant speaks.
    """

    time_limit_seconds: PositiveFloat = 60.0
    """Time limit per conversation. An example that takes longer is left out, like one
    on which the function raises.
    """


class Tokenizer(Seeded):
    """A vocabulary trained here, or any tokenizer.json."""

    path: OutsidePath | None = None
    """A tokenizer.json to use instead of training one."""
    end_of_text: Text | None = None
    """The token in the file of `path` that ends a text, such as `"[SEP]"` of BERT's
    WordPiece vocabularies; if absent, the first of `<|endoftext|>`, `</s>`,
    `<|end_of_text|>`, `<eos>`, `<|eot_id|>` and `[EOS]` that it has.
    """
    model: VocabularyModel = "bpe"
    """Kind of vocabulary to train. `bpe`: byte pair encoding over bytes, as in GPT-2
    and Llama 3. `unigram`: a unigram language model over bytes (Kudo 2018; in T5 and
    XLM-R over characters); it needs gristmill[sentencepiece]. `sentencepiece_bpe`: byte
    pair encoding over characters, with U+2581 for a blank and bytes for rare
    characters, as in Llama 2 and Gemma; U+2581 itself decodes to a blank, any other
    text to itself. `superbpe`: `bpe` whose last merges reach across words (Liu et al.
    2025). docs/tokenizer-models.md compares them.
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
    `gpt2` with every digit a token. The super-words of `superbpe` reach across words
    and single marks; `sentencepiece_bpe` has its own boundaries.
    """
    character_coverage: Share | None = None
    """For `sentencepiece_bpe`: share of the text whose characters get tokens, the most
    frequent first; 0.9995 if absent. They take at most half of the vocabulary; all
    others are written as their bytes.
    """
    transition_point: InnerFraction | None = None
    """For `superbpe`: share of `vocab_size` that is learnt within words, before
    super-words begin; 0.9 if absent.
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
    chat_formatter: OwnFormatter | None = None
    """A function of your own that formats conversations, instead of a template: it
    takes the messages and returns pairs of text and whether the assistant speaks.
    Tuning, evaluation, `chat` and `generate` use it; an exported model cannot contain
    it, and says so. See docs/own-readers.md.
    """
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
        if self.chat_formatter and (self.chat_template or self.chat_template_path):
            yield (
                "chat_formatter and a chat template both define the format of "
                "conversations; leave one out"
            )
        if self.path is not None and self.pretokenizer != "gpt2":
            yield (
                f"pretokenizer {self.pretokenizer} is for a tokenizer trained here; "
                "the file of `path` has its own"
            )
        if self.path is not None and self.model != "bpe":
            yield (
                f"model {self.model} is for a tokenizer trained here; "
                "the file of `path` has its own"
            )
        if self.model == "sentencepiece_bpe" and self.pretokenizer != "gpt2":
            yield (
                f"pretokenizer {self.pretokenizer} is for models over bytes; "
                "sentencepiece_bpe has its own boundaries: leave pretokenizer out"
            )
        for key, model in (
            ("character_coverage", "sentencepiece_bpe"),
            ("transition_point", "superbpe"),
        ):
            if getattr(self, key) is not None and self.model != model:
                yield f"{key} is for model {model}, not for {self.model}; leave it out"
        if twice := repeated(self.special_tokens):
            yield f"special_tokens names {twice!r} twice"
        min_vocab_size = BYTES + OWN_SPECIAL_TOKENS + len(self.special_tokens)
        if self.path is None and self.vocab_size < min_vocab_size:
            yield (
                f"vocab_size {self.vocab_size} is too small for the bytes and the "
                f"special tokens; the minimum is {min_vocab_size}"
            )
        words = int(self.vocab_size * (self.transition_point or TRANSITION_POINT))
        if self.model == "superbpe" and words < min_vocab_size:
            yield (
                f"the transition point is at {words} of vocab_size "
                f"{self.vocab_size}, which is too small for "
                f"the bytes and the special tokens; the minimum is {min_vocab_size}"
            )

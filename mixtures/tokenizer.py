"""The section `tokenizer`: what turns text into tokens."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from gristmill.mixtures.base import OutsidePath, Positive, PositiveFloat, Seeded
from gristmill.mixtures.objectives.span_objectives import SENTINEL
from gristmill.mixtures.user_code import Own

BYTES, OWN_SPECIAL_TOKENS = 256, 6
"""What every vocabulary has: all bytes; end of text, padding, three roles and the end of a turn."""
VocabularyModel = Literal["bpe", "unigram", "sentencepiece_bpe", "superbpe"]
CHARACTER_COVERAGE, TRANSITION_POINT = 0.9995, 0.9
"""SentencePiece's default; the share of SuperBPE's best model (180,000 of 200,000 tokens)."""


class OwnFormatter(Own):
    """A function that writes conversations: `write(messages)` gives pairs of text and whether the assistant speaks."""

    time_limit_seconds: PositiveFloat = 60.0
    """For one conversation. An example that takes longer is left out, like one that the function raises on."""


class Tokenizer(Seeded):
    """A vocabulary trained here, or any tokenizer.json."""

    path: OutsidePath | None = None
    """A tokenizer.json to use instead of training one."""
    end_of_text: Annotated[str, Field(min_length=1)] | None = None
    """The token of the file of `path` that ends a text, such as `"[SEP]"` of BERT's WordPiece vocabularies; if absent, the
    first that it has of `<|endoftext|>`, `</s>`, `<|end_of_text|>`, `<eos>`, `<|eot_id|>` and `[EOS]`."""
    model: VocabularyModel = "bpe"
    """What is trained. `bpe`: byte pair encoding over bytes, as GPT-2 and Llama 3 have it. `unigram`: a unigram
    language model over bytes (Kudo 2018); T5 and XLM-R have one over characters. It needs gristmill[sentencepiece].
    `sentencepiece_bpe`: byte pair encoding over characters, with U+2581 for a blank and bytes for rare characters, as
    Llama 2 and Gemma have it; U+2581 itself comes back as a blank, any other text as it was. `superbpe`: `bpe` whose
    last merges reach across words (Liu et al. 2025). docs/tokenizer-models.md compares them."""
    vocab_size: Annotated[int, Field(ge=264)] = 8192
    """256 bytes, the special tokens and what is learnt together."""
    pretokenizer: Literal["gpt2", "llama3", "digits"] = "gpt2"
    """What no token reaches across. `gpt2`: words with the blank in front of them, runs of numbers, runs of marks
    (Radford et al. 2019). `llama3`: numbers in groups of up to three, any mark in front of a word, line breaks with
    the marks before them (tiktoken's cl100k_base, as Llama 3 has it). `digits`: `gpt2` with every digit a token. The
    super-words of `superbpe` reach across words and single marks; `sentencepiece_bpe` has cuts of its own."""
    character_coverage: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Of `sentencepiece_bpe`: the share of the text whose characters get tokens, the most frequent first; 0.9995 if
    absent. They take half of the vocabulary at most; all others are written as their bytes."""
    transition_point: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """Of `superbpe`: the share of `vocab_size` that is learnt within words, before super-words begin; 0.9 if absent."""
    special_tokens: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Further special tokens, behind those that every tokenizer here has; text never becomes one."""
    sentinels: Annotated[int, Field(ge=0)] = Field(default=0, exclude=True)
    """So many more special tokens, `<extra_id_0>` and on, which stand for hidden spans: one for each span of a row
    (T5: 100)."""
    chat_template: Annotated[str, Field(min_length=1)] | None = None
    """How conversations are written, in Jinja as transformers reads it; the answers between `{% generation %}` and
    `{% endgeneration %}`. A template with the roles as special tokens if absent."""
    chat_template_path: OutsidePath | None = None
    """A file that holds the template."""
    chat_formatter: OwnFormatter | None = None
    """A function of yours that writes conversations, instead of a template: it takes the messages, and gives pairs of
    text and whether the assistant speaks. Tuning, evaluation, `chat` and `serve-model` use it; an exported model cannot
    carry it, and says so. See docs/own-readers.md."""
    sample_bytes: Positive = 50_000_000
    """Text that the merges are learnt from."""
    weights: dict[str, Annotated[float, Field(ge=0.0)]] | None = None
    """Shares of the sample per source; equal shares if absent (so that a new mixture keeps the tokenizer)."""
    seed: int | None = None
    """Seed of the hashes that choose documents; the manifest's if absent."""

    @model_validator(mode="before")
    @classmethod
    def _name_sentinels(cls, values: Any) -> Any:
        if not isinstance(values, dict) or not isinstance(count := values.get("sentinels"), int):
            return values
        named = values.get("special_tokens", ())
        sentinels = [name for number in range(count) if (name := SENTINEL.format(number)) not in named]
        return {**values, "special_tokens": (*named, *sentinels)}

    @model_validator(mode="after")
    def _check(self) -> Tokenizer:
        if self.chat_template is not None and self.chat_template_path is not None:
            raise ValueError("chat_template and chat_template_path both give a template; leave one out")
        if self.chat_formatter is not None and (self.chat_template, self.chat_template_path) != (None, None):
            raise ValueError("chat_formatter and a chat template both say how conversations are written; leave one out")
        if self.path is not None and self.pretokenizer != "gpt2":
            raise ValueError(
                f"pretokenizer {self.pretokenizer} is for a tokenizer that is trained here; the file of "
                "path has its own"
            )
        self._check_model()
        if len(set(self.special_tokens)) < len(self.special_tokens):
            twice = next(token for token in self.special_tokens if self.special_tokens.count(token) > 1)
            raise ValueError(f"special_tokens names {twice!r} twice")
        least = BYTES + OWN_SPECIAL_TOKENS + len(self.special_tokens)
        if self.path is None and self.vocab_size < least:
            raise ValueError(
                f"vocab_size {self.vocab_size} has no room for the bytes and the special tokens: {least} is the least"
            )
        words = int(self.vocab_size * (self.transition_point or TRANSITION_POINT))
        if self.model == "superbpe" and words < least:
            raise ValueError(
                f"the transition point is at {words} of vocab_size {self.vocab_size}, where there is no "
                f"room for the bytes and the special tokens: {least} is the least"
            )
        return self

    def _check_model(self) -> None:
        """Settings that only some vocabularies have."""
        if self.path is not None and self.model != "bpe":
            raise ValueError(
                f"model {self.model} is for a tokenizer that is trained here; the file of path has one of its own"
            )
        if self.model == "sentencepiece_bpe" and self.pretokenizer != "gpt2":
            raise ValueError(
                f"pretokenizer {self.pretokenizer} is for models over bytes; sentencepiece_bpe has cuts "
                "of its own: leave pretokenizer out"
            )
        for key, model in (("character_coverage", "sentencepiece_bpe"), ("transition_point", "superbpe")):
            if getattr(self, key) is not None and self.model != model:
                raise ValueError(f"{key} is for model {model}, not for {self.model}; leave it out")

"""Where a vocabulary comes from: learnt from a sample of the documents, or read from somebody else's tokenizer.json."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gristmill.tokenize.encoding.chat import END_OF_TEXT, SPECIAL_TOKENS
from gristmill.tokenize.encoding.patterns import make_pre_tokenizer
from gristmill.tokenize.encoding.sample import Sample

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TEXT_NAMES = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>", "<|eot_id|>", "[EOS]")
"""What published tokenizers call it: GPT-2 and NeoX, Llama 2, Llama 3, Gemma, Llama 3 Instruct, others."""
MIN_PAIR_COUNT = 2
"""A merge that occurs once in the sample says nothing about other text."""


class TokenizerError(ValueError):
    """A tokenizer.json that cannot be used, or text that it cannot encode."""


def train(
    sample: Sample, vocab_size: int, pretokenizer: str = "gpt2", special_tokens: Sequence[str] = ()
) -> Tokenizer:
    """Learn a byte-level BPE (Sennrich et al. 2016; bytes as GPT-2, Radford et al. 2019).

    Special tokens have the first ids, then come all 256 bytes, then the merges. The result depends on the words of
    the sample and how often each occurs, not on their order or the number of threads.

    Args:
        sample: the text to learn from.
        vocab_size: tokens at most.
        pretokenizer: a name of `patterns.make_pre_tokenizer`.
        special_tokens: further ones, behind SPECIAL_TOKENS.

    Raises:
        TokenizerError: text could become one of the special tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = make_pre_tokenizer(pretokenizer)
    tokenizer.decoder = decoders.ByteLevel()
    for token in special_tokens:
        # Merges stay inside of a pre-token: what is cut into several is never the result of one.
        if token in SPECIAL_TOKENS or len(tokenizer.pre_tokenizer.pre_tokenize_str(token)) < 2:
            why = "every tokenizer here has it" if token in SPECIAL_TOKENS else "a text could become that token"
            raise TokenizerError(f"tokenizer.special_tokens: {token!r}: {why}; write another like <|name|>")
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, min_frequency=MIN_PAIR_COUNT, special_tokens=[*SPECIAL_TOKENS, *special_tokens],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
    )
    tokenizer.train_from_iterator((text for texts in sample.learn.values() for text in texts), trainer)
    return tokenizer


def read_external(path: Path, special_tokens: Sequence[str] = (), own_template: bool = False) -> Tokenizer:
    """Read somebody else's tokenizer.json; special tokens that it lacks are added behind its vocabulary.

    Args:
        path: the file.
        special_tokens: those that the manifest names.
        own_template: the manifest has a chat template too, so the tokens of the one here are not needed.

    Raises:
        TokenizerError: it does not parse, has no token that ends a text, or has a plain token that is to be special.
    """
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises bare Exception for every malformed file
        raise TokenizerError(f"tokenizer.path: {path} is not a tokenizer.json that the tokenizers library reads: "
                             f"{error}") from error
    if first_known(tokenizer, END_OF_TEXT_NAMES) is None:
        raise TokenizerError(f"tokenizer.path: {path} has no token that ends a text; one of "
                             f"{', '.join(END_OF_TEXT_NAMES)} is needed")
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    wanted = [*(() if own_template else SPECIAL_TOKENS[2:]), *special_tokens]
    for token in special_tokens:
        if token not in special and tokenizer.token_to_id(token) is not None:
            raise TokenizerError(f"tokenizer.special_tokens: {token!r} is a plain token of {path}, which a text could "
                                 "become; write another like <|name|>")
    if missing := [token for token in wanted if tokenizer.token_to_id(token) is None]:
        tokenizer.add_special_tokens(missing)
    return tokenizer


def first_known(tokenizer: Tokenizer, names: Sequence[str]) -> str | None:
    """The first of some names that a tokenizer has a token for."""
    return next((name for name in names if tokenizer.token_to_id(name) is not None), None)

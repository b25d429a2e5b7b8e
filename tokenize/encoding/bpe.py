"""Training of a byte-level BPE vocabulary on a sample of text (Sennrich et al. 2016;
bytes as in GPT-2, Radford et al. 2019).

Special tokens have the first ids; all 256 bytes are tokens, so any text can be encoded.

The result depends on the texts of the sample and their counts; not on their order, the
number of threads or the order of a hash map. Of two equally frequent pairs, the trainer
of `tokenizers` merges the one whose left token has the lower id, then the one whose
right token has; ids are assigned by character, then in merge order.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING

from gristmill.tokenize.chat_template import SPECIAL_TOKENS
from gristmill.tokenize.encoding.pretokens import make_pre_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from gristmill.tokenize.encoding.vocabulary_sample import TokenizerSample

MIN_PAIR_COUNT = 2
"""A merge that occurs once in the sample does not generalise."""


class VocabularyError(ValueError):
    """A vocabulary that cannot be learnt as requested."""


def train(
    sample: TokenizerSample,
    vocab_size: int,
    pretokenizer: str = "gpt2",
    special_tokens: Sequence[str] = (),
) -> Tokenizer:
    """Learn a vocabulary.

    Args:
        sample: the text to learn from; memory grows with its size (docs/tokenizers.md).
        vocab_size: most tokens.
        pretokenizer: a name of `pretokens.make_pre_tokenizer`.
        special_tokens: additional ones, after SPECIAL_TOKENS.

    Raises:
        VocabularyError: text could become one of the special tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = splitter = make_pre_tokenizer(pretokenizer)
    tokenizer.decoder = decoders.ByteLevel()
    for token in special_tokens:
        why = ""
        if token in SPECIAL_TOKENS:
            why = "every tokenizer here has it"
        # Merges stay within pre-tokens: they cannot spell a token that is split.
        elif len(splitter.pre_tokenize_str(token)) < 2:
            why = "text could be encoded as that token"
        if why:
            raise VocabularyError(
                f"tokenizer.special_tokens: {token!r}: {why}; write another like "
                "<|name|>"
            )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=MIN_PAIR_COUNT,
        special_tokens=[*SPECIAL_TOKENS, *special_tokens],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(chain.from_iterable(sample.learn.values()), trainer)
    return tokenizer

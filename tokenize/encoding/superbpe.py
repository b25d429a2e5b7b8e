"""Super-words: tokens across words, learnt on top of a vocabulary of words (SuperBPE,
Liu et al. 2025).

The second stage of SuperBPE continues the merges of the first without the cuts between
words. No trainer of a well-maintained library continues merges; instead, the text is
encoded with the first vocabulary, each token is written as a single character, and the
trainer of `tokenizers` learns merges of these characters.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from gristmill.tokenize.encoding.pretokens import GPT2, LLAMA3

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import PreTokenizer

MOST_TOKENS = 4
"""Most first-stage tokens in a super-word; the authors allow four words. Longer ones
are boilerplate.
"""
SUPERWORDS_GPT2 = (
    r"(?:'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?[^\s\p{L}\p{N}:](?![^\s\p{L}\p{N}]))+|"
    + GPT2
)
SUPERWORDS_LLAMA3 = (
    r"(?:(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
    r"| ?[^\s\p{L}\p{N}:](?![\r\n]|[^\s\p{L}\p{N}]))+|" + LLAMA3
)
"""Pre-tokens of super-words. No super-word crosses numbers, line ends, runs of blanks
or of marks, or a colon followed by a blank (so that a prompt may end there, as in the
paper). Every cut is also a cut of the word pattern.
"""
FIRST_CHARACTER = 0x10000
"""Character of token 0 while super-words are learnt, followed by enough characters for
any vocabulary.
"""
SPARE = 8
"""Divisor for the surplus of merges to learn: some merges spell an existing token."""
BATCH_DOCUMENTS = 256


def make_superword_splitter(pretokenizer: str) -> PreTokenizer:
    """Pre-tokenizer for learning super-words and for encoding with them.

    Args:
        pretokenizer: word pattern, a name of `pretokens.make_pre_tokenizer`.
    """
    from tokenizers import Regex, pre_tokenizers

    regex = SUPERWORDS_LLAMA3 if pretokenizer == "llama3" else SUPERWORDS_GPT2
    digits = (
        [pre_tokenizers.Digits(individual_digits=True)]
        if pretokenizer == "digits"
        else []
    )
    return pre_tokenizers.Sequence(
        [
            *digits,
            pre_tokenizers.Split(Regex(regex), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def learn_superwords(
    words: Tokenizer, texts: Iterable[str], vocab_size: int, min_count: int
) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Continue the merges of a BPE.

    Args:
        words: the first stage, with the super-word pre-tokenizer.
        texts: to learn from.
        vocab_size: most tokens of both stages together.
        min_count: least occurrences of a pair.

    Returns:
        the new tokens with ids after the existing ones, and the merges to append; a few
        of them spell an existing token in another way.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    word_vocab = words.get_vocab(with_added_tokens=False)
    spelt = {
        chr(FIRST_CHARACTER + number): token for token, number in word_vocab.items()
    }
    new_tokens = vocab_size - len(word_vocab)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.CharDelimiterSplit("\n")
    trainer = trainers.BpeTrainer(
        vocab_size=len(word_vocab) + new_tokens + new_tokens // SPARE + SPARE,
        min_frequency=min_count,
        show_progress=False,
        initial_alphabet=[*spelt],
        max_token_length=MOST_TOKENS + 1,  # the library's bound is exclusive
    )
    tokenizer.train_from_iterator(_as_characters(words, texts), trainer)
    vocab: dict[str, int] = {}
    merges: dict[tuple[str, str], None] = {}
    for merge in json.loads(tokenizer.to_str())["model"]["merges"]:
        prefix, suffix = (
            "".join(spelt[character] for character in side) for side in merge
        )
        if prefix + suffix not in word_vocab and prefix + suffix not in vocab:
            if len(vocab) == new_tokens:
                break
            vocab[prefix + suffix] = len(word_vocab) + len(vocab)
        merges[prefix, suffix] = None
    return vocab, [*merges]


def _as_characters(words: Tokenizer, texts: Iterable[str]) -> Iterator[str]:
    """Each text as a character per token, a line per pre-token."""
    remaining = iter(texts)
    while batch := list(islice(remaining, BATCH_DOCUMENTS)):
        for encoding in words.encode_batch(batch, add_special_tokens=False):
            ids = np.array(encoding.ids, np.uint32) + np.uint32(FIRST_CHARACTER)
            cuts = np.flatnonzero(np.diff(np.array(encoding.word_ids, np.int64))) + 1
            yield np.insert(ids, cuts, ord("\n")).tobytes().decode("utf-32-le")

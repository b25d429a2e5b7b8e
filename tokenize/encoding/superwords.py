"""Super-words: tokens that reach across words, learnt on top of a vocabulary of words (SuperBPE, Liu et al. 2025).

The second stage of SuperBPE goes on with the merges of the first, without the cuts between words. No trainer of a
well-kept library goes on with merges, and none is needed: the text is encoded with the vocabulary so far, every token
written as a character of its own, and the trainer of `tokenizers` learns merges of these characters.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from gristmill.tokenize.encoding.pretokens import GPT2, LLAMA3

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import PreTokenizer

MOST_TOKENS = 4
"""Tokens of the first stage in a super-word; the authors take at most four words. Longer ones are boilerplate."""
SUPERWORDS_GPT2 = r"(?:'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?[^\s\p{L}\p{N}:](?![^\s\p{L}\p{N}]))+|" + GPT2
SUPERWORDS_LLAMA3 = (
    r"(?:(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
    r"| ?[^\s\p{L}\p{N}:](?![\r\n]|[^\s\p{L}\p{N}]))+|" + LLAMA3
)
"""What no super-word reaches across: numbers, line ends, runs of blanks or of marks, and a colon with a blank behind it
(so that a prompt may end there, as the authors have it). Every cut is one of the pattern's below too."""
FIRST_CHARACTER = 0x10000
"""Of the token 0 while super-words are learnt: behind it are more characters than any vocabulary has tokens."""
SPARE = 8
"""One in so many merges more than needed is learnt, since some spell a token that the vocabulary has already."""
BATCH_DOCUMENTS = 256


def make_superword_splitter(pretokenizer: str) -> PreTokenizer:
    """What splits text before super-words are learnt, and when text is encoded with them.

    Args:
        pretokenizer: what the words are cut by, a name of `pretokens.make_pre_tokenizer`.
    """
    from tokenizers import Regex, pre_tokenizers

    regex = SUPERWORDS_LLAMA3 if pretokenizer == "llama3" else SUPERWORDS_GPT2
    digits = [pre_tokenizers.Digits(individual_digits=True)] if pretokenizer == "digits" else []
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
    """Go on with the merges of a BPE.

    Args:
        words: the first stage, with what splits super-words as its pre-tokenizer.
        texts: what to learn from.
        vocab_size: tokens of both stages together, at most.
        min_count: least occurrences of a pair.

    Returns:
        the new tokens with their ids behind the known ones, and the merges to append; a few of these spell a token that
        is known, and give it another way to come about.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    known = words.get_vocab(with_added_tokens=False)
    spelt = {chr(FIRST_CHARACTER + number): token for token, number in known.items()}
    wanted = vocab_size - len(known)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.CharDelimiterSplit("\n")
    trainer = trainers.BpeTrainer(
        vocab_size=len(known) + wanted + wanted // SPARE + SPARE,
        min_frequency=min_count,
        show_progress=False,
        initial_alphabet=[*spelt],
        max_token_length=MOST_TOKENS + 1,  # the library's bound is exclusive
    )
    tokenizer.train_from_iterator(_as_characters(words, texts), trainer)
    vocab: dict[str, int] = {}
    merges: dict[tuple[str, str], None] = {}
    for merge in json.loads(tokenizer.to_str())["model"]["merges"]:
        left, right = ("".join(spelt[character] for character in side) for side in merge)
        if left + right not in known and left + right not in vocab:
            if len(vocab) == wanted:
                break
            vocab[left + right] = len(known) + len(vocab)
        merges[left, right] = None
    return vocab, [*merges]


def _as_characters(words: Tokenizer, texts: Iterable[str]) -> Iterator[str]:
    """Each text as a character per token, a line per pre-token."""
    for batch in _batches(texts):
        for encoding in words.encode_batch(batch, add_special_tokens=False):
            ids = np.array(encoding.ids, np.uint32) + np.uint32(FIRST_CHARACTER)
            cuts = np.flatnonzero(np.diff(np.array(encoding.word_ids, np.int64))) + 1
            yield np.insert(ids, cuts, ord("\n")).tobytes().decode("utf-32-le")


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    for text in texts:
        batch.append(text)
        if len(batch) == BATCH_DOCUMENTS:
            yield batch
            batch = []
    yield batch

"""Training of vocabularies on a sample of text, one library per `tokenizer.model`.

`tokenizers` learns `bpe` and `sentencepiece_bpe`; `superbpe` runs the same trainer
twice (`superbpe.py`); `sentencepiece` learns `unigram` (`unigram.py`). All return a
Tokenizer that `tokenizers` and transformers load. Special tokens have the first ids;
all 256 bytes are tokens, so any text can be encoded.

The result depends on the texts of the sample and their counts; not on their order, the
number of threads or the order of a hash map. Of two equally frequent pairs, the trainer
of `tokenizers` merges the one whose left token has the lower id, then the one whose
right token has; ids are assigned by character, then in merge order.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gristmill.mixtures.sections.tokenizer import (
    CHARACTER_COVERAGE,
    TRANSITION_POINT,
    VocabularyModel,
)
from gristmill.tokenize.encoding.chat_templates import SPECIAL_TOKENS
from gristmill.tokenize.encoding.pretokens import make_pre_tokenizer
from gristmill.tokenize.encoding.superbpe import (
    learn_superwords,
    make_superword_splitter,
)
from gristmill.tokenize.encoding.unigram import learn_unigram

if TYPE_CHECKING:
    from tokenizers import Tokenizer, models
    from tokenizers.pre_tokenizers import PreTokenizer

    from gristmill.tokenize.encoding.vocabulary_sample import TokenizerSample

MIN_PAIR_COUNT = 2
"""A merge that occurs once in the sample does not generalise."""
BLANK = "\u2581"
"""SentencePiece's character for a blank (Kudo and Richardson 2018). This character in
text is decoded as a blank.
"""
WORDS = (
    rf"{BLANK}?[\p{{L}}\p{{M}}]+|\p{{N}}|{BLANK}?[^{BLANK}\s\p{{L}}\p{{M}}\p{{N}}]+"
    rf"|{BLANK}+(?![^{BLANK}\s])|{BLANK}+(?={BLANK})|{BLANK}+|\s+"
)
"""Pre-tokens of `sentencepiece_bpe`: runs of one kind of character with the blank in
front; single digits.

Cuts lie only where the kind of character changes, so no merge of two learnt tokens can
cross one, and text is encoded without pre-tokenization.
"""
MOST_CHARACTERS = 0.5
"""Largest share of the learnt tokens for single characters, even for a sample of
Chinese.
"""
UNLEARNT = "\0"
"""Placeholder for every character that is encoded as bytes."""


class VocabularyError(ValueError):
    """A vocabulary that cannot be learnt as requested."""


def train(
    sample: TokenizerSample,
    vocab_size: int,
    pretokenizer: str = "gpt2",
    special_tokens: Sequence[str] = (),
    model: VocabularyModel = "bpe",
    character_coverage: float | None = None,
    transition_point: float | None = None,
) -> Tokenizer:
    """Learn a vocabulary.

    Args:
        sample: the text to learn from; memory grows with its size
            (docs/tokenizer-models.md).
        vocab_size: most tokens.
        pretokenizer: a name of `pretokens.make_pre_tokenizer`; `sentencepiece_bpe` has
            its own.
        special_tokens: additional ones, after SPECIAL_TOKENS.
        model: kind of vocabulary.
        character_coverage: of `sentencepiece_bpe`, as in the manifest.
        transition_point: of `superbpe`, as in the manifest.

    Raises:
        VocabularyError: text could become one of the special tokens, or a package is
            missing.
    """
    from tokenizers import decoders, models

    special = [*SPECIAL_TOKENS, *special_tokens]
    if model == "sentencepiece_bpe":
        splitter = _word_splitter()
    elif model == "superbpe":
        splitter = make_superword_splitter(pretokenizer)
    else:
        splitter = make_pre_tokenizer(pretokenizer)
    for token in special_tokens:
        spelt = token.replace(" ", BLANK) if model == "sentencepiece_bpe" else token
        why = ""
        if token in SPECIAL_TOKENS:
            why = "every tokenizer here has it"
        # Merges stay within pre-tokens: they cannot spell a token that is split.
        elif len(splitter.pre_tokenize_str(spelt)) < 2:
            why = "text could be encoded as that token"
        if why:
            raise VocabularyError(
                f"tokenizer.special_tokens: {token!r}: {why}; write another like "
                "<|name|>"
            )
    match model:
        case "sentencepiece_bpe":
            coverage = character_coverage or CHARACTER_COVERAGE
            return _train_sentencepiece_bpe(sample, vocab_size, special, coverage)
        case "unigram":
            return _train_unigram(sample, vocab_size, special, splitter)
        case "superbpe":
            words = _train_bpe(
                sample,
                int(vocab_size * (transition_point or TRANSITION_POINT)),
                special,
                make_pre_tokenizer(pretokenizer),
            )
            learnt = json.loads(words.to_str())["model"]
            words.pre_tokenizer = splitter
            vocab, merges = learn_superwords(
                words, _texts(sample), vocab_size, MIN_PAIR_COUNT
            )
            bpe = models.BPE(
                vocab={**learnt["vocab"], **vocab},
                merges=[*map(tuple, learnt["merges"]), *merges],
            )
            return _assemble(bpe, special, splitter, decoders.ByteLevel())
    return _train_bpe(sample, vocab_size, special, splitter)


def _texts(sample: TokenizerSample) -> Iterator[str]:
    return (text for texts in sample.learn.values() for text in texts)


def _train_bpe(
    sample: TokenizerSample,
    vocab_size: int,
    special: Sequence[str],
    splitter: PreTokenizer,
) -> Tokenizer:
    """A byte-level BPE (Sennrich et al. 2016; bytes as GPT-2, Radford et al. 2019)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=MIN_PAIR_COUNT,
        special_tokens=[*special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(sample), trainer)
    return tokenizer


def _train_unigram(
    sample: TokenizerSample,
    vocab_size: int,
    special: Sequence[str],
    splitter: PreTokenizer,
) -> Tokenizer:
    """A unigram language model (Kudo 2018) over bytes written as GPT-2 writes them."""
    from tokenizers import decoders, models, pre_tokenizers

    try:
        pieces = learn_unigram(
            _texts(sample),
            vocab_size - len(special),
            splitter,
            sorted(pre_tokenizers.ByteLevel.alphabet()),
        )
    except ImportError as error:
        raise VocabularyError(
            "tokenizer.model unigram is learnt by the package sentencepiece, which is "
            "not installed; install it with: pip install 'gristmill[sentencepiece]'"
        ) from error
    model = models.Unigram([*((token, 0.0) for token in special), *pieces], None, False)
    return _assemble(model, special, splitter, decoders.ByteLevel())


def _train_sentencepiece_bpe(
    sample: TokenizerSample, vocab_size: int, special: Sequence[str], coverage: float
) -> Tokenizer:
    """A BPE over characters, a blank written as U+2581 and rare characters as their
    bytes (as Gemma's tokenizer.json).
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, trainers

    first = {
        token: number
        for number, token in enumerate(
            [*special, *(f"<0x{byte:02X}>" for byte in range(256))]
        )
    }
    room = vocab_size - len(first)
    characters = frequent_characters(
        _texts(sample), coverage, int(room * MOST_CHARACTERS)
    )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = _word_splitter()
    trainer = trainers.BpeTrainer(
        vocab_size=room,
        min_frequency=MIN_PAIR_COUNT,
        show_progress=False,
        initial_alphabet=[*characters],
    )
    tokenizer.train_from_iterator(_only(characters, _texts(sample)), trainer)
    learnt = json.loads(tokenizer.to_str())["model"]
    vocab = {token: len(first) + number for token, number in learnt["vocab"].items()}
    model = models.BPE(
        vocab={**first, **vocab},
        merges=[*map(tuple, learnt["merges"])],
        byte_fallback=True,
    )
    decoder = decoders.Sequence(
        [decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    assembled = _assemble(model, special, None, decoder)
    assembled.normalizer = normalizers.Replace(" ", BLANK)
    return assembled


def _assemble(
    model: models.Model,
    special: Sequence[str],
    splitter: PreTokenizer | None,
    decoder: Any,
) -> Tokenizer:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer(model)
    if splitter is not None:
        tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens([*special])  # already in the model, with the same ids
    return tokenizer


def _word_splitter() -> PreTokenizer:
    from tokenizers import Regex, pre_tokenizers

    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(UNLEARNT, "removed"),
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
        ]
    )


CODE_POINTS = 0x110000


def frequent_characters(texts: Iterator[str], coverage: float, most: int) -> str:
    """Most frequent characters that cover a share of the text, with U+2581 for the
    blank; by code point.

    Args:
        texts: all text.
        coverage: the share, of all characters but blanks.
        most: most characters besides the blank; lower code points win ties.
    """
    counts = np.zeros(CODE_POINTS, np.int64)
    for text in texts:
        codes, times = np.unique(
            np.frombuffer(text.encode("utf-32-le"), np.uint32), return_counts=True
        )
        counts[codes] += times
    counts[[ord(" "), ord(BLANK), ord(UNLEARNT)]] = 0
    order = np.argsort(-counts, kind="stable")
    ordered = counts[order]
    before = np.cumsum(ordered) - ordered
    chosen = order[(before < coverage * counts.sum()) & (ordered > 0)][:most]
    return "".join(sorted({BLANK, *map(chr, chosen.tolist())}))


def _only(characters: str, texts: Iterator[str]) -> Iterator[str]:
    """Texts with blanks as U+2581 and every other character outside the set as
    UNLEARNT, which ends a word.
    """
    code_map = np.zeros(CODE_POINTS, np.uint32)
    code_map[[*map(ord, characters)]] = [*map(ord, characters)]
    code_map[ord(" ")] = code_map[ord(BLANK)]
    for text in texts:
        yield (
            code_map[np.frombuffer(text.encode("utf-32-le"), np.uint32)]
            .tobytes()
            .decode("utf-32-le")
        )

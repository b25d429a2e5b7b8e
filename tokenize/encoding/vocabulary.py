"""Learning a vocabulary from a sample of text: the models of `tokenizer.model`, each by a library that is kept.

`bpe` and `sentencepiece_bpe` are learnt by `tokenizers`, `superbpe` by the same trainer twice (`superwords.py`),
`unigram` by `sentencepiece` (`unigram.py`). All give a Tokenizer that `tokenizers` and transformers load. Special
tokens have the first ids; all 256 bytes are tokens, so that any text can be encoded.

The result depends on the texts of the sample and on how often each occurs; not on their order, the number of threads or
the order of a hash map. Of two pairs that are equally frequent, the trainer of `tokenizers` merges the one whose left
token has the lower id, then the one whose right token has; ids are given by character, then in the order of the merges.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gristmill.mixtures.tokenizer import CHARACTER_COVERAGE, TRANSITION_POINT, VocabularyModel
from gristmill.tokenize.encoding.chat_templates import SPECIAL_TOKENS
from gristmill.tokenize.encoding.pretokens import make_pre_tokenizer
from gristmill.tokenize.encoding.superwords import learn_superwords, make_superword_splitter
from gristmill.tokenize.encoding.unigram import learn_unigram

if TYPE_CHECKING:
    from tokenizers import Tokenizer, models
    from tokenizers.pre_tokenizers import PreTokenizer

    from gristmill.tokenize.encoding.sample import TokenizerSample

MIN_PAIR_COUNT = 2
"""A merge that occurs once in the sample says nothing about other text."""
BLANK = "\u2581"
"""How SentencePiece writes a blank (Kudo and Richardson 2018). Text that has this character itself gets a blank."""
WORDS = (
    rf"{BLANK}?[\p{{L}}\p{{M}}]+|\p{{N}}|{BLANK}?[^{BLANK}\s\p{{L}}\p{{M}}\p{{N}}]+"
    rf"|{BLANK}+(?![^{BLANK}\s])|{BLANK}+(?={BLANK})|{BLANK}+|\s+"
)
"""What no token of a `sentencepiece_bpe` reaches across: a kind of character, with the blank in front; every digit.

A cut lies only where the kind of character changes, so that no merge of two learnt tokens could bridge one, and text is
encoded without looking for cuts."""
MOST_CHARACTERS = 0.5
"""Of the room for learnt tokens, what characters take at most, however many a sample of Chinese has."""
UNLEARNT = "\0"
"""Stands for every character that is left to its bytes while the rest is learnt from."""


class VocabularyError(ValueError):
    """A vocabulary cannot be learnt as it is asked for."""


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
        sample: the text to learn from; memory grows with its size (docs/tokenizer-models.md).
        vocab_size: tokens at most.
        pretokenizer: a name of `pretokens.make_pre_tokenizer`; `sentencepiece_bpe` has its own.
        special_tokens: further ones, behind SPECIAL_TOKENS.
        model: what is learnt.
        character_coverage: of `sentencepiece_bpe`, as in the manifest.
        transition_point: of `superbpe`, as in the manifest.

    Raises:
        VocabularyError: text could become one of the special tokens, or a package is missing.
    """
    special = [*SPECIAL_TOKENS, *special_tokens]
    if model == "sentencepiece_bpe":
        splitter = _word_splitter()
    elif model == "superbpe":
        splitter = make_superword_splitter(pretokenizer)
    else:
        splitter = make_pre_tokenizer(pretokenizer)
    for token in special_tokens:
        _check_special(token, token.replace(" ", BLANK) if model == "sentencepiece_bpe" else token, splitter)
    if model == "sentencepiece_bpe":
        return _train_sentencepiece_bpe(sample, vocab_size, special, character_coverage or CHARACTER_COVERAGE)
    if model == "unigram":
        return _train_unigram(sample, vocab_size, special, splitter)
    if model == "superbpe":
        return _train_superbpe(sample, vocab_size, special, pretokenizer, transition_point or TRANSITION_POINT)
    return _train_bpe(sample, vocab_size, special, splitter)


def _check_special(token: str, spelt: str, splitter: PreTokenizer) -> None:
    """Tokens stay inside of a pre-token: what is cut into several is never learnt as one."""
    if token in SPECIAL_TOKENS or len(splitter.pre_tokenize_str(spelt)) < 2:
        why = "every tokenizer here has it" if token in SPECIAL_TOKENS else "text could be encoded as that token"
        raise VocabularyError(f"tokenizer.special_tokens: {token!r}: {why}; write another like <|name|>")


def _texts(sample: TokenizerSample) -> Iterator[str]:
    return (text for texts in sample.learn.values() for text in texts)


def _train_bpe(sample: TokenizerSample, vocab_size: int, special: Sequence[str], splitter: PreTokenizer) -> Tokenizer:
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


def _train_superbpe(
    sample: TokenizerSample, vocab_size: int, special: Sequence[str], pretokenizer: str, transition_point: float
) -> Tokenizer:
    """Words first, then what reaches across them (Liu et al. 2025)."""
    from tokenizers import decoders, models

    words = _train_bpe(sample, int(vocab_size * transition_point), special, make_pre_tokenizer(pretokenizer))
    learnt = json.loads(words.to_str())["model"]
    words.pre_tokenizer = make_superword_splitter(pretokenizer)
    vocab, merges = learn_superwords(words, _texts(sample), vocab_size, MIN_PAIR_COUNT)
    model = models.BPE(vocab={**learnt["vocab"], **vocab}, merges=[*map(tuple, learnt["merges"]), *merges])
    return _assemble(model, special, words.pre_tokenizer, decoders.ByteLevel())


def _train_unigram(
    sample: TokenizerSample, vocab_size: int, special: Sequence[str], splitter: PreTokenizer
) -> Tokenizer:
    """A unigram language model (Kudo 2018) over bytes written as GPT-2 writes them."""
    from tokenizers import decoders, models, pre_tokenizers

    try:
        pieces = learn_unigram(
            _texts(sample), vocab_size - len(special), splitter, sorted(pre_tokenizers.ByteLevel.alphabet())
        )
    except ImportError as error:
        raise VocabularyError(
            "tokenizer.model unigram is learnt by the package sentencepiece, which is not installed; "
            "install it with: pip install 'gristmill[sentencepiece]'"
        ) from error
    model = models.Unigram([*((token, 0.0) for token in special), *pieces], None, False)
    return _assemble(model, special, splitter, decoders.ByteLevel())


def _train_sentencepiece_bpe(
    sample: TokenizerSample, vocab_size: int, special: Sequence[str], coverage: float
) -> Tokenizer:
    """A BPE over characters, a blank written as U+2581 and rare characters as their bytes (as Gemma's tokenizer.json)."""
    from tokenizers import Tokenizer, decoders, models, normalizers, trainers

    first = {token: number for number, token in enumerate([*special, *(f"<0x{byte:02X}>" for byte in range(256))])}
    room = vocab_size - len(first)
    characters = frequent_characters(_texts(sample), coverage, int(room * MOST_CHARACTERS))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = _word_splitter()
    trainer = trainers.BpeTrainer(
        vocab_size=room, min_frequency=MIN_PAIR_COUNT, show_progress=False, initial_alphabet=[*characters]
    )
    tokenizer.train_from_iterator(_only(characters, _texts(sample)), trainer)
    learnt = json.loads(tokenizer.to_str())["model"]
    vocab = {token: len(first) + number for token, number in learnt["vocab"].items()}
    model = models.BPE(vocab={**first, **vocab}, merges=[*map(tuple, learnt["merges"])], byte_fallback=True)
    decoder = decoders.Sequence([decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse()])
    found = _assemble(model, special, None, decoder)
    found.normalizer = normalizers.Replace(" ", BLANK)
    return found


def _assemble(model: models.Model, special: Sequence[str], splitter: PreTokenizer | None, decoder: Any) -> Tokenizer:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer(model)
    if splitter is not None:
        tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens([*special])  # the model has them, with these ids
    return tokenizer


def _word_splitter() -> PreTokenizer:
    from tokenizers import Regex, pre_tokenizers

    return pre_tokenizers.Sequence(
        [pre_tokenizers.Split(UNLEARNT, "removed"), pre_tokenizers.Split(Regex(WORDS), "isolated")]
    )


CODE_POINTS = 0x110000


def frequent_characters(texts: Iterator[str], coverage: float, most: int) -> str:
    """The most frequent characters that make up a share of the text, and U+2581 for the blank; by code point.

    Args:
        texts: all text.
        coverage: the share, of all characters but blanks.
        most: characters at most besides the blank. Of equally frequent ones those with the lower code points are taken.
    """
    counts = np.zeros(CODE_POINTS, np.int64)
    for text in texts:
        codes, times = np.unique(np.frombuffer(text.encode("utf-32-le"), np.uint32), return_counts=True)
        counts[codes] += times
    counts[[ord(" "), ord(BLANK), ord(UNLEARNT)]] = 0
    order = np.lexsort((np.arange(CODE_POINTS), -counts))
    before = np.cumsum(counts[order]) - counts[order]
    taken = order[(before < coverage * counts.sum()) & (counts[order] > 0)][:most]
    return "".join(sorted({BLANK, *map(chr, taken.tolist())}))


def _only(characters: str, texts: Iterator[str]) -> Iterator[str]:
    """The texts with blanks as U+2581 and every other character as UNLEARNT, which ends a word."""
    known = np.zeros(CODE_POINTS, np.uint32)
    known[[*map(ord, characters)]] = [*map(ord, characters)]
    known[ord(" ")] = known[ord(BLANK)]
    for text in texts:
        yield known[np.frombuffer(text.encode("utf-32-le"), np.uint32)].tobytes().decode("utf-32-le")

"""Words by the tokenizer that datatrove assigns to a language, as counted for FineWeb-2
(Penedo et al. 2025).

datatrove (`utils/word_tokenizers.py`, `assets/tokenizer_assignment.csv`, made for
FineWeb-2) has a tokenizer for about 2,000 languages and scripts: for nine in ten of
them spaCy's for the language or a related one; PyThaiNLP for Thai, jieba for Chinese,
SudachiPy for Japanese, Kiwi for Korean, IndicNLP, Stanza and others. spaCy's rules
split each run between whitespace independently, so that each distinct run is split
once; the other tokenizers split complete texts, at their own speed.

A language without an assigned tokenizer is split by spaCy's rules for all languages
(`xx`); a text of unknown language is treated as English. Of the 1,900 labels of
FineWeb-2 two (`azj_Latn`, `ayr_Latn`) get another tokenizer than there, since datatrove
also has one for the macrolanguage, whose code is in the column `language`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from threading import Lock
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.dataprep.langid.language_codes import Languages, parse_label
from gristmill.dataprep.text.kernels import Bytes, Offsets
from gristmill.dataprep.text.unicode_tables import code_point_flags
from gristmill.dataprep.words.spacy_words import Lengths, words_of_runs
from gristmill.dataprep.words.tokenise_words import CutTexts, describe_words, join_parts

REMEMBERED_TEXTS = 1000
"""Texts with cached words, since several rule sets need those of the same batch."""
DEFAULT_LANGUAGE = "en"
ANY_LANGUAGE = "xx"
"""spaCy's rules for all languages."""


class NoTokenizerError(ImportError):
    """`words: language` needs a library that is not installed."""


@dataclass(frozen=True)
class Tokenizer:
    """Tokenizer of one or several languages.

    Attributes:
        cut: text -> words.
        of_runs: spaCy's tokenizer, if it splits each run between whitespace
            independently, or None.
        lengths: cache of runs.
    """

    cut: Callable[[str], list[str]]
    of_runs: Any
    lengths: Lengths = field(default_factory=dict)


def language_names(rows: pa.Table) -> list[str | None]:
    """Measured language of each row with its script: `zh_Hans`."""
    scripts = rows["script"].to_pylist()
    return [
        f"{code}_{script}" if code and script else code
        for code, script in zip(rows["language"].to_pylist(), scripts, strict=True)
    ]


def language_words(data: Bytes, offsets: Offsets, languages: Languages) -> CutTexts:
    """Split n texts into words, each by the tokenizer of its language; the words of
    tokenizers that return strings follow the texts in `data`.

    Args:
        data, offsets: the texts (`kernels.text_buffers`).
        languages: one per text, with or without a script; None if unknown.

    Raises:
        NoTokenizerError: a library is not installed.
    """
    data = data[offsets[0] : offsets[-1]]
    offsets = offsets - offsets[0]
    groups: dict[str | None, list[int]] = {}
    for text, language in enumerate(languages):
        groups.setdefault(language, []).append(text)
    flags = code_point_flags()
    parts = []
    added = [data]
    size = len(data)
    for language, texts in groups.items():
        tokenizer = tokenizer_of(language)
        text_numbers = np.array(texts, np.int64)
        if tokenizer.of_runs is not None:
            parts.append(
                words_of_runs(
                    data, offsets, text_numbers, tokenizer.of_runs, tokenizer.lengths
                )
            )
            continue
        for text in texts:
            words, lengths = _cut(
                language, data[offsets[text] : offsets[text + 1]].tobytes()
            )
            ends = size + np.cumsum(lengths, dtype=np.int64)
            parts.append(
                describe_words(
                    np.frombuffer(words, np.uint8),
                    flags,
                    np.array([0, len(lengths)]),
                    ends - lengths - size,
                    ends - size,
                )._replace(starts=ends - lengths, ends=ends)
            )
            added.append(np.frombuffer(words, np.uint8))
            size += len(words)
    places = np.empty(len(languages), np.int64)
    places[[text for texts in groups.values() for text in texts]] = np.arange(
        len(languages)
    )
    buffer = data if len(added) == 1 else np.concatenate(added)
    for array in (buffer, offsets):
        array.flags.writeable = False
    per_word = np.ones(len(languages), np.uint8)
    return CutTexts(buffer, offsets, flags, join_parts(parts), places, per_word)


_spacy_lock = Lock()
"""Lock for spaCy's languages, which share memory between threads."""


@lru_cache(maxsize=REMEMBERED_TEXTS)
def _cut(language: str | None, text: bytes) -> tuple[bytes, np.ndarray]:
    """Words of a text, concatenated, and the bytes of each."""
    tokenizer = tokenizer_of(language)
    with _spacy_lock:
        words = [word.encode() for word in tokenizer.cut(text.decode())]
    return b"".join(words), np.array([len(word) for word in words], np.int64)


@lru_cache(maxsize=10_000)
def tokenizer_of(language: str | None) -> Tokenizer:
    """Tokenizer of a language, with or without a script; of English for None.

    Raises:
        NoTokenizerError: datatrove, or its library for the language, is not installed.
    """
    label = parse_label(language or DEFAULT_LANGUAGE)
    try:
        from datatrove.utils.word_tokenizers import load_tokenizer_assignments
    except ImportError as error:
        raise _missing(label.code, "datatrove", error) from error
    assigned = load_tokenizer_assignments()
    name = next((name for name in (str(label), label.code) if name in assigned), None)
    return _load(name)


@lru_cache(maxsize=10_000)
def _load(name: str | None) -> Tokenizer:
    from datatrove.utils.word_tokenizers import (
        SpaCyTokenizer,
        WhitespaceTokenizer,
        load_word_tokenizer,
    )

    try:
        tokenizer = (
            SpaCyTokenizer(ANY_LANGUAGE) if name is None else load_word_tokenizer(name)
        )
        if type(tokenizer) is WhitespaceTokenizer:
            tokenizer = SpaCyTokenizer(ANY_LANGUAGE)  # its tokenizer for words
        tokenizer.word_tokenize("a")  # loads its resources
    except ImportError as error:
        raise _missing(
            name or ANY_LANGUAGE, getattr(error, "name", None) or "a package", error
        ) from error
    from spacy.tokenizer import Tokenizer as ByRules

    # spaCy's tokenizer inside, if it splits each run between whitespace independently
    inner = getattr(getattr(tokenizer, "tokenizer", None), "tokenizer", None)
    is_of_runs = isinstance(inner, ByRules) and all(
        len(rule.split()) < 2 for rule in inner.rules
    )
    return Tokenizer(tokenizer.word_tokenize, inner if is_of_runs else None)


def _missing(language: str, package: str, error: ImportError) -> NoTokenizerError:
    message = " ".join(str(error).split())
    return NoTokenizerError(
        f"words: language cuts texts in {language!r} by a tokenizer of datatrove's "
        f"that needs {package}, which is not installed ({message}); install it, or "
        "gristmill[languages], or leave `words` out for this language"
    )

"""Inputs of all Gopher dialects: the words of a text, by dialect, manifest and
language; and its stop words.

Running text has at least two of the most frequent function words of its language.
English has the eight words of Gopher (Rae et al. 2021, section A1.1). The other lists
hold about twelve words of the closed classes (articles, prepositions, conjunctions,
pronouns, auxiliaries) that nearly every paragraph has. Nine in ten of them are among
the stop words of spaCy 3.8 (`spacy/lang/*/stop_words.py`) if it has the language; the
others, and those of other languages, are the most common such words of the language's
grammar.

Languages are ISO 639-1 codes, or 639-3 if there is none, as fastText's lid.176 names
them. A list may hold words of several scripts and spellings. Chinese and Japanese words
are single characters, since `tokenise_words.unspaced_words` makes each a word. Thai,
Lao, Khmer and Burmese have no list: by that rule their function words are not words.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from gristmill.dataprep.filters.lines_and_sentences import (
    ends_with,
    segment_chars,
    starts_with,
)
from gristmill.dataprep.filters.repetition import copied_segments
from gristmill.dataprep.langid.language_codes import Languages, parse_label
from gristmill.dataprep.text.hashing import (
    ODD,
    append_hash,
    first_bytes,
    fmix64,
)
from gristmill.dataprep.text.kernels import (
    Bytes,
    Flags,
    Offsets,
    Positions,
    inner_kernel,
    kernel,
)
from gristmill.dataprep.text.simd import ones
from gristmill.dataprep.text.spans import strip
from gristmill.dataprep.text.swar import HIGH_BITS, count_pattern, letters_of
from gristmill.dataprep.text.unicode_tables import (
    code_point_flags,
    decode,
    lower_case,
)
from gristmill.dataprep.words.language_words import language_words
from gristmill.dataprep.words.spacy_words import spacy_words
from gristmill.dataprep.words.tokenise_words import (
    CutTexts,
    Words,
    characters_per_word,
    join_parts,
    unspaced_words,
    whitespace_words,
    word_punct_words,
)
from gristmill.mixtures.steps.rules import GopherRules

PLACES = 256
"""Slots of a language's table of stop words: twice the number of their keys."""


class StopWords(NamedTuple):
    """The stop words of several languages, and the language of each of n texts."""

    languages: np.ndarray
    """int32 of shape (n,): index of the text's language, or -1 without one."""
    lower: np.ndarray
    """uint32: `unicode_tables.lower_case()`, or empty to compare words as they are."""
    longest: np.ndarray
    """int32, one per language: code points of its longest stop word."""
    keys: np.ndarray
    """uint64 of shape (languages, PLACES): a hash table of the stop words, by
    `key_of_bytes` and `key_of_code_points`.
    """
    numbers: np.ndarray
    """int32 of the same shape: the number (at most 63) of the stop word in a slot, or
    -1.
    """


@kernel
def text_words(
    texts: CutTexts, text: int
) -> tuple[Positions, Positions, np.ndarray, np.ndarray]:
    """Return the words of a text: starts, ends (int64), chars (int32), flags (uint16);
    see `tokenise_words.Words`.
    """
    words, place = texts.words, texts.places[text]
    first, last = words.offsets[place], words.offsets[place + 1]
    return (
        words.starts[first:last],
        words.ends[first:last],
        words.chars[first:last],
        words.seen[first:last],
    )


@kernel
def find_stop_words(
    texts: CutTexts, text: int, stop_words: StopWords
) -> tuple[int, int]:
    """Count the stop words among the words of a text.

    Returns:
        occurrences, and the number of different stop words.
    """
    language = stop_words.languages[text]
    if language < 0:
        return 0, 0
    data, lower = texts.data, stop_words.lower
    starts, ends, chars, _ = text_words(texts, text)
    keys, numbers = stop_words.keys[language], stop_words.numbers[language]
    longest = stop_words.longest[language]
    count, distinct = 0, np.uint64(0)
    for word in range(len(starts)):
        if chars[word] > longest:
            continue
        start, size = starts[word], ends[word] - starts[word]
        key = first_bytes(data, start, size)
        if size <= 8 and key & HIGH_BITS == 0:
            key = key_of_bytes(lower_ascii(key) if len(lower) else key, size)
        else:
            key = key_of_code_points(data, start, start + size, lower)
        place = key & np.uint64(PLACES - 1)
        number = numbers[place]
        while number >= 0 and keys[place] != key:
            place = (place + np.uint64(1)) & np.uint64(PLACES - 1)
            number = numbers[place]
        if number >= 0:
            count += 1
            distinct |= np.uint64(1) << np.uint64(number)
    return count, int(np.int64(ones(distinct)))


@inner_kernel
def key_of_bytes(word: np.uint64, size: int) -> np.uint64:
    """Return the key of a word of up to eight bytes of ASCII, of `first_bytes`."""
    return fmix64(word + np.uint64(size) * ODD)


@inner_kernel
def key_of_code_points(
    data: Bytes, start: int, end: int, lower: np.ndarray
) -> np.uint64:
    """Return the key of any word, in lower case if `lower` is not empty."""
    key = np.uint64(0)
    while start < end:
        code, width = decode(data, start)
        if len(lower):
            code = int(lower[code])
        key = append_hash(key, np.uint64(code))
        start += width
    return fmix64(key)


@kernel
def lower_ascii(key: np.uint64) -> np.uint64:
    """Return eight bytes of ASCII in lower case."""
    return key | letters_of(key) >> np.uint64(2)


@kernel
def count_flag(word_flags: np.ndarray, flag: int) -> int:
    """Return the number of words that have a code point with this flag."""
    count = 0
    for flags in word_flags:
        count += flags & flag != 0
    return count


HASH = ord("#")
DOTS, ELLIPSIS = np.frombuffer(b"...", np.uint8), np.frombuffer("…".encode(), np.uint8)


@kernel
def count_marked_lines(
    data: Bytes,
    starts: Positions,
    ends: Positions,
    flags: Flags,
    bullets: np.ndarray,
    ellipses: tuple[np.ndarray, ...],
) -> tuple[int, int]:
    """Return the numbers of lines that begin with a bullet, and that end in an
    ellipsis.

    Args:
        flags: `code_point_flags()` to strip the lines; empty to leave them as they are.
        bullets: uint32 code points.
        ellipses: uint8, the bytes of each.
    """
    num_bullets, num_ellipses = 0, 0
    for line in range(len(starts)):
        first, last = starts[line], ends[line]
        if len(flags):
            first, last = strip(data, first, last, flags)
        num_bullets += starts_with(data, first, last, bullets)
        has_ellipsis = False
        for ellipsis in ellipses:
            has_ellipsis |= ends_with(data, first, last, ellipsis)
        num_ellipses += has_ellipsis
    return num_bullets, num_ellipses


@kernel
def count_ellipses(data: Bytes, begin: int, end: int) -> int:
    """Return the number of occurrences of `...` and of `…`."""
    return count_pattern(data, begin, end, DOTS) + count_pattern(
        data, begin, end, ELLIPSIS
    )


@kernel
def share(part: float, whole: float, of_nothing: float) -> float:
    """Return part / whole, or a given value if the whole is 0."""
    return part / whole if whole else of_nothing


@kernel
def set_shares(
    row: np.ndarray,
    symbols: int,
    bullets: int,
    ellipses: int,
    lines: int,
    lettered: int,
    words: int,
    of_nothing: float,
) -> None:
    """Set the shares of symbols, marked lines and words with a letter among
    `gopher.QUALITY_STATISTICS`.
    """
    row[2] = share(symbols, words, of_nothing)
    row[3] = share(bullets, lines, of_nothing)
    row[4] = share(ellipses, lines, of_nothing)
    row[5] = share(lettered, words, of_nothing)


@kernel
def copy_shares(
    data: Bytes,
    starts: Positions,
    ends: Positions,
    first_counts: bool,
    of_nothing: float,
) -> tuple[float, float]:
    """Return the shares of copied segments in all segments, and in their code points;
    the arguments are those of `repetition.copied_segments` and `share`.
    """
    chars = segment_chars(data, starts, ends)
    number, length = copied_segments(data, starts, ends, first_counts)
    return (
        share(number, len(starts), of_nothing),
        share(length, chars.sum(), of_nothing),
    )


_LISTED = """
en the be to of and that have with
af die van en in het is nie dat op vir met om
ar في من على أن إلى عن لا أو التي هذا كل ما
az və bu bir ilə üçün də da o hər ki olan kimi
be і ў на не з да што за па яго або для
bg на и да в за се от с не е по че
bn এবং এই করে না ও থেকে এ যে তার জন্য করা বা
bs i u je na se da za od su s ne ili
ca de la i el a en que les els per no amb
cs a v se na je že s z o i do to
cy yn y a i o ar yr ei neu gan wedi ac
da og i at er en det af til på som for den
de der die und in den von zu das mit nicht ist ein
el και το να του η της για με την από που σε
eo la de kaj en al estas por kiu ne ĉiu aŭ kun
es de la que el en y a los se del por con
et ja on et ei või oma see ta kui ning mis tema
eu eta du da ez edo bat ere dira izan hau zuen dute
fa و در به از که این را با است هر یا برای
fi ja on ei että hän tai se oli hänen sekä mutta joka
fr de la le et les des en un du une que est
ga an a agus na ar i le go do is de nó
gl de e a o que en do da un por con os
gu અને છે આ ના તે એ પણ કે માટે પર કરવા તેના
he של את על לא הוא כל או זה כי אם עם גם
hi के और है को का में की से कि या पर अपने
hr i u je na se da za od su s ne ili
hu a az és hogy nem van egy vagy minden is meg ki
hy և է որ ու իր այդ են մեջ կամ համար ունի նա
id dan yang di untuk dengan tidak ini dari dalam atau pada setiap
is og að í á er sem til um við eða hann ekki
it di e la il che in a per un del è una
ja の に は を た が と で も な し て
ka და არ რომ ამ ეს იყო თუ ან უნდა მისი მის ყოველი
kn ಮತ್ತು ಈ ಒಂದು ಅಥವಾ ತನ್ನ ಎಂದು ಅವರ ಯಾವುದೇ ಹಾಗೂ ಆ ಎಲ್ಲ ಎಲ್ಲಾ
ko 및 이 그 수 또는 있는 한 모든 위한 것 그의 의하여
ky жана бул менен бир да же үчүн бар ар өз эч болуп
la et in est ad ut non cum de ex aut qui quae
lb an de der an op vun d' mat fir a sech dat
lt ir į kad yra ar su iš jo kaip ne arba turi
lv un ir ar no uz par ka vai kas ne tā bet
mk на и да во за се од со не или е ги
ml ഒരു ഈ എന്ന അല്ലെങ്കിൽ എല്ലാ ആ എന്നാൽ തന്റെ അതിന്റെ എന്നിവ മറ്റ് കൂടി
mr आणि व आहे या किंवा हा की तो आपल्या ते हे त्या
ms dan yang di untuk dengan tidak ini dari dalam atau pada setiap
ne र को छ मा वा यो हरेक गर्न तथा पनि छैन हुने
nl de en van het een in is dat op te met voor
no og i det er til en på som for av at å
nn og i det er til ein på som for av at å
pl i w na z do się nie że o jest to lub
pt de a o que e do da em um para com os
ro de și în a la cu care pe o să din nu
ru и в на не что с по к из или его от
si සහ ඒ මේ හා ද එම හෝ වූ කිසිදු සෑම ඇති සඳහා
sk a v sa na je že s z o i do to
sl in v je na se da za od so z ne ali
sq e të dhe në për që me një nga nuk i ose
sr и у је на се да за од су с не или i u je na se da za od su s ne ili
sv och i att en som det är på av för till den
sw ya na wa kwa ni katika au za kila kuwa la cha
ta ஒரு மற்றும் இந்த என்று அல்லது அந்த தனது எந்த ஒவ்வொரு என்ற எல்லா உள்ள
te ఒక మరియు ఈ లేదా ఆ తన కు లో ప్రతి అన్ని తమ గల
tl ang ng sa na at mga ay o kanyang may hindi kaniyang
tr ve bir bu için ile da de olarak her o veya hiç
uk і в на не що з до та за або від його
ur کے اور ہے کو کا میں کی سے کہ یا پر اپنے
uz va bu bilan har bir uchun ham yoki o'z hech ega bo'lgan
vi và của là có các được cho trong người một không với
yo ni ti àti láti tí ó fún ní tàbí sí náà gbogbo
zh 的 是 不 了 在 有 和 这 這 为 為 及 或 之 與 与
"""
STOP_WORDS = {
    language: tuple(words)
    for language, *words in map(str.split, _LISTED.strip().splitlines())
}
"""Language -> its stop words, in lower case."""

UNSPACED_LANGUAGES = frozenset({"zh", "ja", "th", "lo", "km", "my", "wuu", "yue"})
"""Languages whose script is in `unicode_tables.UNSPACED_RANGES`; Korean has spaces."""
ALIASES = {"nb": "no", "wuu": "zh", "yue": "zh", "sh": "sr", "fil": "tl"}
"""Codes of languages whose list has another code."""
DEFAULT_LANGUAGE = "en"


def language_index(language: str | None) -> int:
    """Return the number of a language in `stop_words_of`; -1 without a list, English's
    if the language is unknown.
    """
    code = parse_label(language or DEFAULT_LANGUAGE).code
    return _INDEX.get(ALIASES.get(code, code), -1)


def is_unspaced(language: str | None) -> bool:
    """Return True if a language is written without spaces between words."""
    return language is not None and parse_label(language).code in UNSPACED_LANGUAGES


def is_cut_by_characters(counting: GopherRules, language: str | None) -> bool:
    """Return True if a text is split by `unspaced_words` instead of the dialect's
    words.
    """
    return counting.words == "unicode" or is_unspaced(language)


def stop_words_of(
    languages: Languages, custom: tuple[str, ...] | None, ignore_case: bool
) -> StopWords:
    """Return the stop words of n texts for the kernels.

    Args:
        languages: one code per text, None if unknown.
        custom: a list for all of them instead.
    """
    numbers = np.zeros(len(languages), np.int32)
    if custom is None:
        numbers[:] = [language_index(language) for language in languages]
    elif ignore_case:
        custom = tuple(word.lower() for word in custom)
    lists = tuple(STOP_WORDS.values()) if custom is None else (custom,)
    lower = lower_case() if ignore_case else np.empty(0, np.uint32)
    return StopWords(numbers, lower, *_tables(lists))


_INDEX = {language: number for number, language in enumerate(STOP_WORDS)}


@lru_cache(maxsize=1000)
def _tables(
    lists: tuple[tuple[str, ...], ...],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    longest = np.array([max(map(len, words), default=0) for words in lists], np.int32)
    keys = np.zeros((len(lists), PLACES), np.uint64)
    numbers = np.full((len(lists), PLACES), -1, np.int32)
    as_they_are = np.empty(0, np.uint32)
    for language, words in enumerate(lists):
        for number, word in enumerate(dict.fromkeys(words)):
            encoded = np.frombuffer(word.encode(), np.uint8)
            size = len(encoded)
            word_keys = [key_of_code_points(encoded, 0, size, as_they_are)]
            if word.isascii() and size <= 8:
                short = np.uint64(first_bytes(encoded, 0, size))
                word_keys.append(key_of_bytes(short, size))
            for key in word_keys:
                place = int(key) % PLACES
                while numbers[language, place] >= 0:
                    place = (place + 1) % PLACES
                keys[language, place], numbers[language, place] = key, number
    return longest, keys, numbers


Cut = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], Words]
"""`tokenise_words.whitespace_words`, or another function with its arguments."""

CUTS: dict[str, Cut] = {
    "dclm": whitespace_words,
    "datatrove": spacy_words,
    "dolma": whitespace_words,
    "curator": whitespace_words,
    "redpajama": word_punct_words,
}
"""Splitting of the text itself into words in each dialect (RedPajama has another for
the normalised text).
"""


def cut_words(
    data: Bytes,
    offsets: Offsets,
    counting: GopherRules,
    languages: Languages,
    cut: Cut | None = None,
) -> CutTexts:
    """Split n texts into words.

    Args:
        data, offsets: the texts.
        counting: the dialect and its words.
        languages: one code per text, None if unknown.
        cut: for texts in scripts with spaces, instead of the dialect's function.

    Raises:
        gristmill.dataprep.words.spacy_words.NoSpacyError: `dialect: datatrove` without
            the package spacy.
        gristmill.dataprep.words.language_words.NoTokenizerError: `words: language`
            without what it needs.
    """
    if counting.words == "language":
        return language_words(data, offsets, languages)
    num_texts, flags = len(offsets) - 1, code_point_flags()
    per_word = np.ones(num_texts, np.uint8)
    unspaced = np.array(
        [is_cut_by_characters(counting, language) for language in languages], bool
    )
    spaced_texts, unspaced_texts = np.flatnonzero(~unspaced), np.flatnonzero(unspaced)
    parts = []
    if len(spaced_texts):
        parts.append(
            (cut or CUTS[counting.dialect])(data, offsets, flags, spaced_texts)
        )
    if len(unspaced_texts):
        parts.append(unspaced_words(data, offsets, flags, unspaced_texts))
        per_word[unspaced_texts] = characters_per_word(
            data, offsets, flags, unspaced_texts
        )
    places = np.empty(num_texts, np.int64)
    places[np.concatenate([spaced_texts, unspaced_texts])] = np.arange(num_texts)
    return CutTexts(data, offsets, flags, join_parts(parts), places, per_word)

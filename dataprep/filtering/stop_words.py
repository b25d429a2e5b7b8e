"""The most frequent function words of many languages, for the rule that running text has at least two of them.

English has the eight words of Gopher (Rae et al. 2021, section A1.1). The other lists hold about twelve words of the
closed classes (articles, prepositions, conjunctions, pronouns, auxiliaries) that nearly every paragraph has. Nine in
ten of them are among the stop words of spaCy 3.8 (`spacy/lang/*/stop_words.py`) where it has the language; the others,
and those of languages that it has not, are the commonest such words of the language's grammar.

Languages are ISO 639-1 codes, or 639-3 where there is none, as fastText's lid.176 names them. A list may hold words of
several scripts and spellings. Chinese and Japanese words are single characters, since `word_cuts.unspaced_words` makes
each a word. Thai, Lao, Khmer and Burmese have no list: by that rule their function words are not words.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np

from gristmill.dataprep.filtering.gopher_texts import PLACES, StopWords, table_place
from gristmill.dataprep.judges.language_codes import parse_label

STOP_WORDS: dict[str, tuple[str, ...]] = {
    language: tuple(words.split())
    for language, words in {
        "en": "the be to of and that have with",
        "af": "die van en in het is nie dat op vir met om",
        "ar": "في من على أن إلى عن لا أو التي هذا كل ما",
        "az": "və bu bir ilə üçün də da o hər ki olan kimi",
        "be": "і ў на не з да што за па яго або для",
        "bg": "на и да в за се от с не е по че",
        "bn": "এবং এই করে না ও থেকে এ যে তার জন্য করা বা",
        "bs": "i u je na se da za od su s ne ili",
        "ca": "de la i el a en que les els per no amb",
        "cs": "a v se na je že s z o i do to",
        "cy": "yn y a i o ar yr ei neu gan wedi ac",
        "da": "og i at er en det af til på som for den",
        "de": "der die und in den von zu das mit nicht ist ein",
        "el": "και το να του η της για με την από που σε",
        "eo": "la de kaj en al estas por kiu ne ĉiu aŭ kun",
        "es": "de la que el en y a los se del por con",
        "et": "ja on et ei või oma see ta kui ning mis tema",
        "eu": "eta du da ez edo bat ere dira izan hau zuen dute",
        "fa": "و در به از که این را با است هر یا برای",
        "fi": "ja on ei että hän tai se oli hänen sekä mutta joka",
        "fr": "de la le et les des en un du une que est",
        "ga": "an a agus na ar i le go do is de nó",
        "gl": "de e a o que en do da un por con os",
        "gu": "અને છે આ ના તે એ પણ કે માટે પર કરવા તેના",
        "he": "של את על לא הוא כל או זה כי אם עם גם",
        "hi": "के और है को का में की से कि या पर अपने",
        "hr": "i u je na se da za od su s ne ili",
        "hu": "a az és hogy nem van egy vagy minden is meg ki",
        "hy": "և է որ ու իր այդ են մեջ կամ համար ունի նա",
        "id": "dan yang di untuk dengan tidak ini dari dalam atau pada setiap",
        "is": "og að í á er sem til um við eða hann ekki",
        "it": "di e la il che in a per un del è una",
        "ja": "の に は を た が と で も な し て",
        "ka": "და არ რომ ამ ეს იყო თუ ან უნდა მისი მის ყოველი",
        "kn": "ಮತ್ತು ಈ ಒಂದು ಅಥವಾ ತನ್ನ ಎಂದು ಅವರ ಯಾವುದೇ ಹಾಗೂ ಆ ಎಲ್ಲ ಎಲ್ಲಾ",
        "ko": "및 이 그 수 또는 있는 한 모든 위한 것 그의 의하여",
        "ky": "жана бул менен бир да же үчүн бар ар өз эч болуп",
        "la": "et in est ad ut non cum de ex aut qui quae",
        "lb": "an de der an op vun d' mat fir a sech dat",
        "lt": "ir į kad yra ar su iš jo kaip ne arba turi",
        "lv": "un ir ar no uz par ka vai kas ne tā bet",
        "mk": "на и да во за се од со не или е ги",
        "ml": "ഒരു ഈ എന്ന അല്ലെങ്കിൽ എല്ലാ ആ എന്നാൽ തന്റെ അതിന്റെ എന്നിവ മറ്റ് കൂടി",
        "mr": "आणि व आहे या किंवा हा की तो आपल्या ते हे त्या",
        "ms": "dan yang di untuk dengan tidak ini dari dalam atau pada setiap",
        "ne": "र को छ मा वा यो हरेक गर्न तथा पनि छैन हुने",
        "nl": "de en van het een in is dat op te met voor",
        "no": "og i det er til en på som for av at å",
        "nn": "og i det er til ein på som for av at å",
        "pl": "i w na z do się nie że o jest to lub",
        "pt": "de a o que e do da em um para com os",
        "ro": "de și în a la cu care pe o să din nu",
        "ru": "и в на не что с по к из или его от",
        "si": "සහ ඒ මේ හා ද එම හෝ වූ කිසිදු සෑම ඇති සඳහා",
        "sk": "a v sa na je že s z o i do to",
        "sl": "in v je na se da za od so z ne ali",
        "sq": "e të dhe në për që me një nga nuk i ose",
        "sr": "и у је на се да за од су с не или i u je na se da za od su s ne ili",
        "sv": "och i att en som det är på av för till den",
        "sw": "ya na wa kwa ni katika au za kila kuwa la cha",
        "ta": "ஒரு மற்றும் இந்த என்று அல்லது அந்த தனது எந்த ஒவ்வொரு என்ற எல்லா உள்ள",
        "te": "ఒక మరియు ఈ లేదా ఆ తన కు లో ప్రతి అన్ని తమ గల",
        "tl": "ang ng sa na at mga ay o kanyang may hindi kaniyang",
        "tr": "ve bir bu için ile da de olarak her o veya hiç",
        "uk": "і в на не що з до та за або від його",
        "ur": "کے اور ہے کو کا میں کی سے کہ یا پر اپنے",
        "uz": "va bu bilan har bir uchun ham yoki o'z hech ega bo'lgan",
        "vi": "và của là có các được cho trong người một không với",
        "yo": "ni ti àti láti tí ó fún ní tàbí sí náà gbogbo",
        "zh": "的 是 不 了 在 有 和 这 這 为 為 及 或 之 與 与",
    }.items()
}
"""Language -> its stop words, in lower case."""

UNSPACED_LANGUAGES = frozenset({"zh", "ja", "th", "lo", "km", "my", "wuu", "yue"})
"""Languages of whose script `unicode_tables.UNSPACED_RANGES` has the characters; Korean has spaces."""
ALIASES = {"nb": "no", "wuu": "zh", "yue": "zh", "sh": "sr", "fil": "tl"}
"""Codes whose language has its list under another code."""
DEFAULT_LANGUAGE = "en"


def language_index(language: str | None) -> int:
    """The number of a language in `stop_words_of`; -1 without a list, English where there is no language."""
    code = parse_label(language or DEFAULT_LANGUAGE).code
    return _INDEX.get(ALIASES.get(code, code), -1)


def is_unspaced(language: str | None) -> bool:
    """Whether a language is written without spaces between words."""
    return language is not None and parse_label(language).code in UNSPACED_LANGUAGES


def stop_words_of(languages: Sequence[str | None]) -> StopWords:
    """The stop words of n texts for the kernels.

    Args:
        languages: one code per text, None where it is not known.
    """
    return StopWords(np.fromiter(map(language_index, languages), np.int32, len(languages)), *_tables())


_INDEX = {language: number for number, language in enumerate(STOP_WORDS)}


@lru_cache(maxsize=1)
def _tables() -> tuple[np.ndarray, ...]:
    lists = [tuple(dict.fromkeys(words)) for words in STOP_WORDS.values()]
    words = [word for listed in lists for word in listed]
    begins = np.cumsum([0, *map(len, lists)]).astype(np.int32)
    offsets = np.cumsum([0, *map(len, words)]).astype(np.int32)
    codes = np.array([ord(character) for word in words for character in word], np.uint32)
    lengths = np.array([_bits(map(len, listed)) for listed in lists], np.uint64)
    initials = np.array([_bits(ord(word[0]) & 63 for word in listed) for listed in lists], np.uint64)
    return begins, offsets, codes, lengths, initials, *_short_words(words, begins)


def _short_words(words: Sequence[str], begins: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The hash tables of `StopWords`: keys and numbers."""
    keys = np.zeros((len(begins) - 1, PLACES), np.uint64)
    numbers = np.full((len(begins) - 1, PLACES), -1, np.int32)
    for language in range(len(begins) - 1):
        for number in range(begins[language], begins[language + 1]):
            encoded = words[number].encode()
            if len(encoded) > 8:
                continue
            key = int.from_bytes(encoded, "little")
            place = int(table_place(np.uint64(key)))
            while numbers[language, place] >= 0:
                place = (place + 1) % PLACES
            keys[language, place], numbers[language, place] = key, number
    return keys, numbers


def _bits(numbers: Iterable[int]) -> int:
    bits = 0
    for number in numbers:
        bits |= 1 << number
    return bits

"""Rule sets of the section `filter`: thresholds and options, with the source of
each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue

from gristmill.mixtures.base import (
    Count,
    DumpedSection,
    Fraction,
    OutsidePath,
    Positive,
    PositiveFloat,
    RawSection,
    Section,
    named_items,
)


class C4(Section):
    """C4's rules for whole documents (Raffel et al. 2020; released code: TensorFlow
    Datasets, text/c4_utils.py).

    Its rules for lines are `clean: {lines: [c4]}`, to be run before `filter`.
    Definitions: dataprep/filters/c4.py.
    """

    constants: Literal["code", "paper"] = "code"
    """Source of the default number of sentences: 3 in the released code, 5 in the
    paper.
    """
    max_document_characters: Positive | None = 190_000
    """Longest document (c4_utils.py, `is_valid_length`; the paper does not mention
    it).
    """
    max_lorem_ipsum: int = 0
    """Largest number of occurrences of the placeholder text."""
    max_curly_brackets: int = 0
    """Largest number of occurrences of `{`, which indicates code."""
    min_sentences: int = 3
    """Smallest number of sentences: the released code's; 5 with `constants: paper`."""

    @model_validator(mode="before")
    @classmethod
    def _constants(cls, value: Any) -> Any:
        return defaults_of(value, "code", {"code": {}, "paper": {"min_sentences": 5}})


class MC4(Section):
    """mC4's rule (Xue et al. 2021, section 3.1): a page has at least three long
    paragraphs, which are lines.
    """

    paragraph_characters: Positive = 200
    """A line of at least this many characters is a long paragraph."""
    min_long_paragraphs: int = 3
    """Smallest number of long paragraphs of a page."""


class FineWeb(Section):
    """FineWeb's own rules (Penedo et al. 2024, section 3.6). Definitions:
    dataprep/filters/fineweb.py.

    FineWeb runs them after Gopher's and C4's (those without the rule that lines end in
    punctuation).
    """

    added = ("words",)

    constants: Literal["paper", "datatrove"] = "paper"
    """Source of the default limit for characters in repeated lines: 0.1 in the paper,
    0.01 in datatrove's code.
    """
    short_line_characters: Positive = 30
    """Number of characters up to which a line is short."""
    min_filled_lines: int = 1
    """Smallest number of lines that are not empty; datatrove's reason `empty`."""
    min_terminal_line_ratio: Fraction = 0.12
    """Smallest share of lines that end in terminal punctuation."""
    max_short_line_ratio: Fraction = 0.67
    """Largest share of lines that are short."""
    max_repeated_line_char_ratio: Fraction = 0.1
    """Largest share of characters in lines that repeat earlier ones; 0.01 with
    `constants: datatrove`.
    """
    max_newline_word_ratio: PositiveFloat = 0.3
    """Largest number of newlines per word."""
    words: Literal["rule", "language"] = "rule"
    """Definition of words for newlines per word: a rule that is close to spaCy's, or
    with `language` datatrove's tokenizer for the document's language, as in `words:
    language` of Gopher's rules.
    """

    @model_validator(mode="before")
    @classmethod
    def _constants(cls, value: Any) -> Any:
        alias = {"paper": {}, "datatrove": {"max_repeated_line_char_ratio": 0.01}}
        return defaults_of(value, "paper", alias)


class Curator(Section):
    """NeMo Curator's heuristics for English beside Gopher's rules
    (config/text/heuristic_filter_english_pipeline.yaml).

    Definitions: dataprep/filters/curator.py. The pipeline also has Gopher's
    rules, in Curator's dialect.
    """

    max_non_alphanumeric_ratio: Fraction = 0.25
    """Largest share of characters that are not ASCII letters, digits, newlines or
    `?!,.`.
    """
    max_digit_ratio: Fraction = 0.15
    """Largest share of characters that are digits."""
    max_url_char_ratio: Fraction = 0.2
    """Largest share of characters in URLs, not counting their paths."""
    max_whitespace_ratio: Fraction = 0.25
    """Largest share of characters that are white space."""
    max_bracket_ratio: Fraction = 0.1
    """Largest share of characters that are brackets."""
    max_boilerplate_paragraph_ratio: Fraction = 0.4
    """Largest share of paragraphs with a phrase of cookie notices and similar
    boilerplate.
    """
    max_unended_line_ratio: Fraction = 0.85
    """Largest share of lines that do not end in punctuation."""
    max_longest_word_characters: Positive = 1000
    """Characters of the longest word."""


def defaults_of(value: Any, default: str, aliases: Mapping[str, RawSection]) -> Any:
    """Return a section as written, with the defaults of its `constants` for keys that
    it does not set.

    Args:
        default: `constants` if absent.
        aliases: alias -> the defaults that differ from those of the fields.
    """
    if not isinstance(value, dict):
        return value
    return {**aliases.get(str(value.get("constants", default)), {}), **value}


class RunningText(Section):
    """Rules that tell running English from placeholder text and from words in a random
    order. Definitions: dataprep/filters/running_text.py.

    Texts in other languages are judged by the placeholder alone.
    """

    max_placeholder_phrases: int = 0
    """Largest number of occurrences of `lorem ipsum` (C4: Raffel et al. 2020, section
    2.2).
    """
    min_lettered_word_ratio: Fraction | None = 0.8
    """Smallest share of words with a letter: Gopher's threshold (Rae et al. 2021,
    appendix A1.1), over words that are not list markers, arithmetic or numbers in a
    sentence. It replaces `gopher_quality.min_alpha_word_ratio`, which drops recipes and
    worked problems.
    """
    max_eflaw: PositiveFloat | None = None
    """Largest EFLAW score (McAlpine). GneissWeb has 70 for science, technology,
    medicine and education and 30 for other text, in a vote of several rules (Gohari et
    al. 2025; recipes/GneissWeb of data-prep-kit). Alone, 70 drops 1.5 % of 4,000
    passages of books.
    """
    min_function_word_ratio: Fraction | None = 0.1
    """Smallest share of words of the closed classes. Measured by
    `.ci/running_text_limits.py`: 33 of 40 synthetic texts of random dictionary words
    have less (14 less than 0.08), and of real texts 3 of 258 web pages, 1 of 336 posts,
    48 of 550 TeX sections, none of 467 proposals nor of 4,000 passages of books.
    """
    max_stray_determiner_ratio: Fraction | None = 0.15
    """Largest share of determiners before a word that cannot follow them (`the of`).
    Measured by the same command: none of those 5,611 real texts has more than 0.08; of
    80 synthetic texts of words in a random order 79 have more than 0.15, and 75 more
    than 0.25.
    """


class Code(Section):
    """Rules for files of source code, by the extension of their names. Definitions:
    dataprep/filters/code.py.

    Most are StarCoder's (Li et al. 2023, section 3.1) and StarCoder2's (Lozhkov et al.
    2024, section 2.1). A rule from which an extension is exempt measures null there,
    and drops nothing.
    """

    path_field: str | None = None
    """Key of the metadata with a file's path; if absent, the locator is the path."""
    max_generated_markers: int = 0
    """Largest number of phrases such as `auto-generated` in the first five lines
    (StarCoder2).
    """
    max_minified: int = 0
    """0 drops JavaScript and CSS without line breaks (GitHub Linguist,
    lib/linguist/generated.rb).
    """
    max_xml_header: int = 0
    """0 drops files not named as XML with `<?xml version=` in the first 100 characters
    (StarCoder).
    """
    max_code_lines: Positive | None = 100_000
    """Largest number of lines (StarCoder2)."""
    max_data_lines: Positive | None = 512
    """Largest number of lines of text, JSON, YAML, OWL and Graphviz (StarCoder2)."""
    min_data_characters: Positive | None = 50
    """Smallest number of characters of JSON and YAML (StarCoder)."""
    max_data_characters: Positive | None = 5000
    """Largest number of characters of JSON and YAML (StarCoder)."""
    max_longest_line_characters: Positive | None = 1000
    """Longest line, except in markup and data (Codex, The Stack, RedPajama,
    StarCoder2).
    """
    max_mean_line_characters: PositiveFloat | None = 100.0
    """Largest mean length of lines, except in markup and data (Codex, The Stack,
    RedPajama, StarCoder2).
    """
    max_longest_markup_line_characters: Positive | None = 100_000
    """Longest line of markup and data (StarCoder2)."""
    min_alphanumeric_ratio: Fraction | None = 0.25
    """Smallest share of alphanumeric characters (The Stack, RedPajama)."""
    min_alphabetic_ratio: Fraction | None = 0.25
    """Smallest share of alphabetic characters (StarCoder, StarCoder2)."""
    max_longest_encoded_characters: Positive | None = 1024
    """Longest piece of Base64, hexadecimal or escaped data (StarCoder2)."""
    max_encoded_ratio: Fraction | None = 0.5
    """Largest share of characters in such pieces (StarCoder2)."""
    min_html_visible_characters: Positive | None = 100
    """Smallest number of visible characters of HTML (StarCoder)."""
    min_html_visible_ratio: Fraction | None = 0.2
    """Smallest visible share of HTML (StarCoder)."""
    min_code_tokens: Positive | None = 40
    """Smallest number of words and punctuation marks in a file. PolyCoder (Xu et al.
    2022) requires 100 GPT-2 tokens; Python has 2.5 of them per word.
    """


MC4_ALLOWED = {"ja": ("sm", "グロ", "女の子"), "zh": ("性",)}
"""Entries of LDNOOBW's lists that mC4 excludes (tensorflow/datasets, `c4.py`)."""


class Urls(Section):
    """Rules on a document's URL (Penedo et al. 2023, appendix G.1; datatrove,
    `filters/url_filter.py`).

    Every list is a text file, gzipped if its name ends in `.gz`: one entry per line,
    except lines that begin with `#`. Comparison is in lower case. A document without a
    URL (metadata `url`, or a locator that is one) passes.
    """

    block_domains: OutsidePath | None = None
    """Blocked domains, including subdomains (such as the lists of the University of
    Toulouse, UT1).
    """
    block_urls: OutsidePath | None = None
    """Blocked pages, in any spelling (see `dataprep/cleaning/urls.py`)."""
    hard_words: OutsidePath | None = None
    """Whole words of a URL, between characters that are neither letters nor digits; one
    of them drops the document.
    """
    soft_words: OutsidePath | None = None
    """Whole words of which several drop the document."""
    strict_words: OutsidePath | None = None
    """Parts of words, searched anywhere in the URL without its `-` and `.`."""
    max_url_blocked_domain: Count | None = 0
    """0 drops a document whose host, or a domain to which it belongs, is in
    `block_domains` (value 1).
    """
    max_url_blocked_page: Count | None = 0
    """0 drops a document whose page is in `block_urls` (value 1)."""
    max_url_hard_words: Count | None = 0
    """Largest number of distinct entries of `hard_words` in the URL."""
    max_url_soft_words: Count | None = 1
    """Largest number of distinct entries of `soft_words` in the URL (RefinedWeb,
    datatrove, DCLM: two are too many).
    """
    max_url_strict_words: Count | None = 0
    """Largest number of places in the URL with an entry of `strict_words`."""


class BadWords(Section):
    """Rules against listed words in a text (C4 and mC4: tensorflow/datasets,
    `c4_utils.py`, `get_badwords_filter_fn`).

    An entry counts if no word character is next to it; in `unspaced` languages
    anywhere. Comparison is in lower case. A document whose language has no list passes.
    """

    lists: dict[str, OutsidePath] = Field(default_factory=dict)
    """Language -> a text file, gzipped if its name ends in `.gz`: one entry per line
    (such as LDNOOBW's lists, which C4 uses).
    """
    language: str | None = "en"
    """Language whose list judges documents without a `language` from a stage `langid`;
    null judges none of them.
    """
    unspaced: tuple[str, ...] = ("ja", "th", "zh")
    """Languages written without spaces (C4's)."""
    allowed: dict[str, tuple[str, ...]] = Field(
        default_factory=lambda: dict(MC4_ALLOWED)
    )
    """Language -> entries that do not count (mC4's: each is part of words in a tenth of
    all documents).
    """
    max_bad_words: Count | None = 0
    """Largest number of places in the text where an entry ends (C4 drops at the
    first).
    """
    max_bad_word_ratio: Fraction | None = None
    """Largest share of the bytes of the text that belong to entries."""


class Toxicity(Section):
    """A rule on the toxicity of a text, by a user's fastText classifier (such as
    Dolma's, trained on Jigsaw).
    """

    model: OutsidePath
    """A supervised fastText model, `.bin` or `.ftz`."""
    label: str = "__label__toxic"
    """Label whose probability is measured."""
    max_toxicity: Fraction | None = 0.5
    """Largest probability of the label, for the whole text as one line."""


class GneissWeb(Section):
    """GneissWeb's two heuristics for English (Gohari et al. 2025); limits and
    combination are those of its released recipe (data-prep-kit, recipes/GneissWeb).
    Definitions: dataprep/filters/gneissweb.py.

    A document passes if one of the two votes for it: its readability is below a limit,
    or its tokens per character are within a range. GneissWeb also requires a quality
    score, which is a step `quality`.
    """

    tokenizer: OutsidePath | None = None
    """A `tokenizer.json` for tokens per character (GneissWeb: StarCoder's). Without
    one, readability alone votes.
    """
    categories: tuple[OutsidePath, ...] = ()
    """fastText classifiers of the categories with wider limits: technology, medicine,
    education and science (such as ibm-granite/GneissWeb.Sci_classifier). A text is in a
    category if the likeliest label of any of them is not `general_label`.
    """
    general_label: str = "__label__cc"
    """Label of texts outside a classifier's category."""
    readability_limit: PositiveFloat = 30.0
    """Readability below which a text in no category gets a vote."""
    category_readability_limit: PositiveFloat = 70.0
    """Readability below which a text in a category gets a vote."""
    token_range: tuple[PositiveFloat, PositiveFloat] = (0.22, 0.28)
    """Tokens per character with which a text in no category gets a vote."""
    category_token_range: tuple[PositiveFloat, PositiveFloat] = (0.1, 0.5)
    """Tokens per character with which a text in a category gets a vote."""
    max_readability: PositiveFloat | None = None
    """Largest readability, whatever the votes."""
    min_tokens_per_character: PositiveFloat | None = None
    """Smallest number of tokens per character, whatever the votes."""
    max_tokens_per_character: PositiveFloat | None = None
    """Largest number of tokens per character, whatever the votes."""
    min_gneissweb_votes: Annotated[int, Field(ge=0, le=2)] = 1
    """Smallest number of votes."""


RuleSets = dict[str, RawSection]

_REFINEDWEB: RuleSets = {
    "gopher_quality": {"dialect": "dclm"},
    "gopher_repetition": {"dialect": "dclm"},
}
PRESETS: dict[str, RuleSets] = {"refinedweb": _REFINEDWEB, "dclm": _REFINEDWEB}
"""Preset -> its rule sets, with the values that are not defaults.

RefinedWeb as in DCLM (baselines_configs/dclm_baseline_refinedweb.yaml): its rules for
whole documents are Gopher's with the thresholds of the paper, in DCLM's way of
counting. Its rules for lines are `clean: {lines: [dclm]}`.
"""


def expand(rules: Any) -> Any:
    """Return rule sets as a mapping of name to section, from any form in which they may
    be written.

    A list has names, and mappings of a name to its values; a preset stands for its rule
    sets, and its mapping changes them: `[{refinedweb: {gopher_quality: {min_words:
    20}}}, fineweb]`.

    Raises:
        ValueError: an item has another form, or a rule set is given twice.
    """
    if isinstance(rules, str):
        raise ValueError(f"write a list of rule sets: [{rules}]")
    if not isinstance(rules, list | dict):
        return rules
    expanded: dict[str, object] = {}
    for name, values in named_items(rules):
        sections: Iterable[tuple[str, Any]] = [(name, values)]
        if name in PRESETS:
            if values is None:
                continue
            preset = PRESETS[name]
            unknown = (
                values.keys() - preset.keys()
                if isinstance(values, Mapping)
                else {repr(values)}
            )
            if unknown:
                raise ValueError(
                    f"{name} stands for {', '.join(preset)}; it has no "
                    f"{', '.join(sorted(unknown))}"
                )
            sections = (
                (rule_set, {**section, **(values.get(rule_set) or {})})
                for rule_set, section in preset.items()
            )
        for rule_set, section in sections:
            if rule_set in expanded:
                raise ValueError(
                    f"the rule set {rule_set!r} is given twice; put all "
                    "its values in one place"
                )
            expanded[rule_set] = section
    return expanded


def add_to_schema(schema: JsonSchemaValue) -> None:
    """Add the presets to the JSON schema of the rule sets."""
    for name, preset in PRESETS.items():
        schema["properties"][name] = {
            "description": f"Stands for {' and '.join(preset)}; values in here "
            "change theirs.",
            "anyOf": [
                {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {
                        rule_set: schema["properties"][rule_set] for rule_set in preset
                    },
                },
                {"type": "null"},
            ],
        }


Dialect = Literal["dclm", "datatrove", "dolma", "curator", "redpajama"]
"""Source of the definition of the Gopher statistics; `gopher_<dialect>.py` in dataprep
implements each.
"""


class GopherRules(Section):
    """Settings of both Gopher rule sets: how the statistics are counted."""

    dialect: Dialect = "dclm"
    """Definition of the statistics: the projects share the thresholds, but count words,
    lines, symbols and repeated n-grams differently, so that they keep different
    documents (`gristmill dialects MANIFEST` shows which).
    """
    words: Literal["dialect", "unicode", "language"] = "dialect"
    """How text is split into words. `dialect`: as the dialect does it, `datatrove` by
    spaCy's tokenizer for English (needs the extra `spacy`). `unicode`: between spaces,
    and each character of scripts without spaces (Chinese, Japanese, Thai, Lao, Khmer,
    Burmese) is a word; documents in these languages are split like that under `dialect`
    too. `language`: by the tokenizer that datatrove assigns to the language, as
    FineWeb-2 did (datatrove only; needs the extra `languages`): spaCy's for that
    language or a related one, or a library such as jieba (Chinese) and PyThaiNLP
    (Thai), which is slow.
    """
    language: Annotated[str, Field(pattern=r"^(auto|[a-z]{2,3})$")] = "auto"
    """Language of the stop words, which also determines if the script has spaces: an
    ISO 639 code, or `auto` for each document's own, as measured by a stage `langid`
    before (otherwise English). A language without a list of stop words is not judged by
    them. Text in a script without spaces is not judged by its mean word length, and its
    n-grams use units of two characters (Chinese, Japanese) or three (Thai, Lao, Khmer,
    Burmese) as words.
    """

    def _problems(self) -> Iterator[str]:
        if self.words == "language" and self.dialect != "datatrove":
            yield (
                "words: language is for dialect: datatrove; leave it out for dialect: "
                f"{self.dialect}"
            )


MOST_STOP_WORDS = 63
"""Largest number of stop words of a language, and of characters in one: the kernel has
a bit for each.
"""

StopWord = Annotated[str, Field(min_length=1, max_length=MOST_STOP_WORDS)]


class GopherQuality(GopherRules):
    """Thresholds of the Gopher quality rules (Rae et al. 2021, appendix A1.1)."""

    added = ("stop_words",)

    min_words: int = 50
    """Smallest number of words."""
    max_words: int = 100_000
    """Largest number of words."""
    min_mean_word_length: float = 3.0
    """Smallest mean length of words, in characters."""
    max_mean_word_length: float = 10.0
    """Largest mean length of words, in characters."""
    max_symbol_word_ratio: float = 0.1
    """Largest number of hash signs and ellipses per word."""
    max_bullet_line_ratio: float = 0.9
    """Largest share of lines that begin with a bullet."""
    max_ellipsis_line_ratio: float = 0.3
    """Largest share of lines that end in an ellipsis."""
    min_alpha_word_ratio: float = 0.8
    """Smallest share of words with a letter."""
    min_stop_words: int = 2
    """Smallest number of stop words of the text's language."""
    stop_words: (
        Annotated[tuple[StopWord, ...], Field(max_length=MOST_STOP_WORDS)] | None
    ) = None
    """Your own stop words instead of the list of the document's language; `language`
    selects another list.
    """


class GopherRepetition(GopherRules):
    """Thresholds of the Gopher repetition rules (Rae et al. 2021, table A1)."""

    max_duplicate_line_ratio: float = 0.30
    """Largest share of lines that are repeated."""
    max_duplicate_paragraph_ratio: float = 0.30
    """Largest share of paragraphs that are repeated."""
    max_duplicate_line_char_ratio: float = 0.20
    """Largest share of characters in repeated lines."""
    max_duplicate_paragraph_char_ratio: float = 0.20
    """Largest share of characters in repeated paragraphs."""
    max_top_2gram_char_ratio: float = 0.20
    """Largest share of characters in the most frequent sequence of 2 words."""
    max_top_3gram_char_ratio: float = 0.18
    """Largest share of characters in the most frequent sequence of 3 words."""
    max_top_4gram_char_ratio: float = 0.16
    """Largest share of characters in the most frequent sequence of 4 words."""
    max_duplicate_5gram_char_ratio: float = 0.15
    """Largest share of characters in repeated sequences of 5 words."""
    max_duplicate_6gram_char_ratio: float = 0.14
    """Largest share of characters in repeated sequences of 6 words."""
    max_duplicate_7gram_char_ratio: float = 0.13
    """Largest share of characters in repeated sequences of 7 words."""
    max_duplicate_8gram_char_ratio: float = 0.12
    """Largest share of characters in repeated sequences of 8 words."""
    max_duplicate_9gram_char_ratio: float = 0.11
    """Largest share of characters in repeated sequences of 9 words."""
    max_duplicate_10gram_char_ratio: float = 0.10
    """Largest share of characters in repeated sequences of 10 words."""


class Rules(Section):
    """Rule sets that judge documents; absent ones do not.

    `min_x` and `max_x` of a set bound its column x, and its other keys are options. The
    module of the set's name in `dataprep/filters/` measures the columns.
    """

    model_config = ConfigDict(json_schema_extra=add_to_schema)

    gopher_quality: GopherQuality | None = None
    gopher_repetition: GopherRepetition | None = None
    c4: C4 | None = None
    mc4: MC4 | None = None
    fineweb: FineWeb | None = None
    curator: Curator | None = None
    running_text: RunningText | None = None
    code: Code | None = None
    urls: Urls | None = None
    bad_words: BadWords | None = None
    toxicity: Toxicity | None = None
    gneissweb: GneissWeb | None = None

    @property
    def sets(self) -> dict[str, Section]:
        """The enabled rule sets, in the order in which they are declared here."""
        sections = {name: getattr(self, name) for name in type(self).model_fields}
        return {
            name: section for name, section in sections.items() if section is not None
        }

    @model_serializer(mode="wrap")
    def _only_configured(self, dump: SerializerFunctionWrapHandler) -> DumpedSection:
        """Leave out absent sets, so that a rule set that is new to the schema does not
        change fingerprints.
        """
        return {
            name: section for name, section in dump(self).items() if section is not None
        }


def word_library(rule_set: Section) -> str | None:
    """Return the library that splits text into words for a rule set, or None."""
    words = getattr(rule_set, "words", None)
    if words == "language":
        return "datatrove"
    if words == "dialect" and getattr(rule_set, "dialect", None) == "datatrove":
        return "spacy"
    return None


def section_of(rule_set: str) -> type[Section]:
    """Return the model of a rule set's thresholds and options."""
    section: type[Section] = get_args(Rules.model_fields[rule_set].annotation)[0]
    return section


def columns_of(rule_set: str) -> list[str]:
    """Return the columns that a rule set measures: those that its thresholds bound."""
    keys = section_of(rule_set).model_fields
    return list(dict.fromkeys(key[4:] for key in keys if key[:4] in ("min_", "max_")))

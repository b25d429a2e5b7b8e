"""Record the verdicts of the projects' own filters on the texts of `dialects.py`:
benchmarks/dataprep/dialect_verdicts.json.

    python .ci/peers/record_verdicts.py dclm=CLONE dolma=CLONE curator=CLONE
    redpajama=CLONE > dialect_verdicts.json

Needs gristmill's environment, uniseg 0.10.1 on the path, a run of its own for RedPajama and
PYTHONHASHSEED=0 for Curator, whose ties depend on it; a clone is one of
mlfoundations/dclm, allenai/dolma, NVIDIA-NeMo/Curator or
togethercomputer/RedPajama-Data. Modules that their filters import and do not use are
replaced by empty ones.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.dataprep.dialects import made_texts, thresholds

Keep = Callable[[str], bool]


def empty_module(name: str, **attributes: Any) -> None:
    """Register an empty module in place of one that is not needed."""
    module = types.ModuleType(name)
    module.__dict__.update(attributes)
    module.__path__ = []  # type: ignore[attr-defined]
    sys.modules[name] = module


def package(name: str, folder: Path) -> None:
    """Register a package without running its `__init__.py`."""
    empty_module(name)
    sys.modules[name].__path__ = [str(folder)]


def dclm(root: Path) -> Keep:
    """Return the filters of dclm_baseline_refinedweb.yaml for whole documents by
    Gopher's rules.
    """
    empty_module("transformers", AutoTokenizer=None)
    empty_module("unidecode", unidecode=str)
    empty_module("core")
    empty_module("core.factory_utils", factory_function=lambda function: function)
    empty_module("core.constants", CONTENT="text")
    package("baselines", root / "baselines")
    package("baselines.mappers", root / "baselines/mappers")
    package("baselines.mappers.filters", root / "baselines/mappers/filters")
    filters: Any = importlib.import_module("baselines.mappers.filters.content_filters")

    def keep(text: str) -> bool:
        page = {"text": text}
        return all(
            (
                filters.page_length_filter(
                    page, "word", 50, 100_000, ignore_punctuation=True
                ),
                filters.word_length_filter(page, 3, 10),
                filters.symbol_ratio_filter(page, 0.1),
                filters.bullet_count_filter(page, 0.9),
                filters.ellipsis_count_filter(page, 0.3),
                filters.alphabetic_word_ratio_filter(page, 0.2),
                filters.stop_word_filter(page, False, 2),
                filters.massive_web_repetition_filters(page),
            )
        )

    return keep


def dolma(root: Path) -> Keep:
    """Return the attributes of `taggers/gopher.py`, compared with Gopher's
    thresholds.
    """
    package("dolma", root / "python/dolma")
    package("dolma.core", root / "python/dolma/core")
    package("dolma.taggers", root / "python/dolma/taggers")
    empty_module("dolma.core.data_types", DocResult=None, Document=None, Span=None)
    empty_module(
        "dolma.core.registry",
        TaggerRegistry=types.SimpleNamespace(add=lambda name: lambda tagger: tagger),
    )
    empty_module("dolma.core.taggers", BaseTagger=object)
    tagger: Any = importlib.import_module("dolma.taggers.gopher")
    quality, repetition = thresholds("dolma")

    def keep(text: str) -> bool:
        attributes = tagger.get_attributes(text)
        tops = dict(attributes.fraction_of_characters_in_most_common_ngram)
        duplicates = dict(attributes.fraction_of_characters_in_duplicate_ngrams)
        return all(
            (
                quality.min_words <= attributes.word_count <= quality.max_words,
                quality.min_mean_word_length
                <= attributes.median_word_length
                <= quality.max_mean_word_length,
                attributes.symbol_to_word_ratio <= quality.max_symbol_word_ratio,
                attributes.fraction_of_lines_starting_with_bullet_point
                <= quality.max_bullet_line_ratio,
                attributes.fraction_of_lines_ending_with_ellipsis
                <= quality.max_ellipsis_line_ratio,
                attributes.fraction_of_words_with_alpha_character
                >= quality.min_alpha_word_ratio,
                attributes.required_word_count >= quality.min_stop_words,
                attributes.fraction_of_duplicate_lines
                <= repetition.max_duplicate_line_ratio,
                attributes.fraction_of_characters_in_duplicate_lines
                <= repetition.max_duplicate_line_char_ratio,
                *(
                    tops.get(n, 0) <= getattr(repetition, f"max_top_{n}gram_char_ratio")
                    for n in (2, 3, 4)
                ),
                *(
                    duplicates.get(n, 0)
                    <= getattr(repetition, f"max_duplicate_{n}gram_char_ratio")
                    for n in range(5, 11)
                ),
            )
        )

    return keep


def curator(root: Path) -> Keep:
    """Return Gopher's filters of heuristic_filter_english_pipeline.yaml."""
    stages = root / "nemo_curator/stages"
    package("nemo_curator", root / "nemo_curator")
    package("nemo_curator.stages", stages)
    package("nemo_curator.stages.text", stages / "text")
    package("nemo_curator.stages.text.filters", stages / "text/filters")
    package(
        "nemo_curator.stages.text.filters.heuristic", stages / "text/filters/heuristic"
    )
    package("nemo_curator.stages.text.utils", stages / "text/utils")
    prefix = "nemo_curator.stages.text.filters.heuristic"
    strings: Any = importlib.import_module(f"{prefix}.string")
    repeats: Any = importlib.import_module(f"{prefix}.repetition.repetition")
    tops = {2: 0.2, 3: 0.18, 4: 0.16}
    duplicates = {5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.1}
    filters = [
        strings.WordCountFilter(),
        strings.MeanWordLengthFilter(),
        strings.SymbolsToWordsFilter(),
        strings.BulletsFilter(),
        strings.EllipsisFilter(),
        strings.WordsWithoutAlphabetsFilter(),
        strings.CommonEnglishWordsFilter(),
        repeats.RepeatedLinesFilter(),
        repeats.RepeatedParagraphsFilter(),
        repeats.RepeatedLinesByCharFilter(),
        repeats.RepeatedParagraphsByCharFilter(),
        *(repeats.RepeatingTopNGramsFilter(n, share) for n, share in tops.items()),
        *(
            repeats.RepeatingDuplicateNGramsFilter(n, share)
            for n, share in duplicates.items()
        ),
    ]
    return lambda text: all(
        judge.keep_document(judge.score_document(text)) for judge in filters
    )


def redpajama(root: Path) -> Keep:
    """Return the quality signals of `app/src`, compared with Gopher's thresholds.

    RedPajama publishes signals and no thresholds. Its stop words are longer lists with
    a share; Gopher's eight are counted among its raw words instead, in lower case as there.
    """
    source = root / "app/src"
    for name in (
        "core",
        "core.quality_signals",
        "core.quality_signals.utils",
        "utilities",
        "utilities.register",
    ):
        package(name, source / name.replace(".", "/"))
    empty_module("msgspec", Struct=object)
    sys.path.insert(0, str(source))
    documents: Any = importlib.import_module("core.document")
    language: Any = importlib.import_module("core.quality_signals.natural_language")
    lines: Any = importlib.import_module("core.quality_signals.lines")
    repetitions: Any = importlib.import_module("core.quality_signals.repetitions")
    quality, repetition = thresholds("redpajama")
    stop_words = {"the", "be", "to", "of", "and", "that", "have", "with"}
    tops = [
        getattr(repetitions, f"RPS_Doc_Frac_Chars_Top_{n}gram")() for n in (2, 3, 4)
    ]
    duplicates = [
        getattr(repetitions, f"RPS_Doc_Frac_Chars_Dupe_{n}Grams")()
        for n in range(5, 11)
    ]

    def keep(text: str) -> bool:
        document = documents.Document(text, domain=None)

        def score(signal: Any) -> float:
            return signal(document)[0][2]

        if score(language.RPS_Doc_Word_Count()) < quality.min_words:
            return False
        bullets = [
            line_score
            for _, _, line_score in lines.RPS_Lines_Start_With_Bulletpoint()(document)
        ]
        return all(
            (
                score(language.RPS_Doc_Word_Count()) <= quality.max_words,
                quality.min_mean_word_length
                <= score(language.RPS_Doc_Mean_Word_Length())
                <= quality.max_mean_word_length,
                score(language.RPS_Doc_Symbol_To_Word_Ratio())
                <= quality.max_symbol_word_ratio,
                sum(bullets) / len(bullets) <= quality.max_bullet_line_ratio,
                score(language.RPS_Doc_Frac_Lines_End_With_Ellipsis())
                <= quality.max_ellipsis_line_ratio,
                1 - score(language.RPS_Doc_Frac_No_Alph_Words())
                >= quality.min_alpha_word_ratio,
                sum(word in stop_words for word in document.raw_words)
                >= quality.min_stop_words,
                *(
                    score(signal)
                    <= getattr(
                        repetition, f"max_top_{signal.NGRAM_SIZE}gram_char_ratio"
                    )
                    for signal in tops
                ),
                *(
                    score(signal)
                    <= getattr(
                        repetition, f"max_duplicate_{signal.NGRAM_SIZE}gram_char_ratio"
                    )
                    for signal in duplicates
                ),
            )
        )

    return keep


PROJECTS = {"dclm": dclm, "dolma": dolma, "curator": curator, "redpajama": redpajama}


def main(arguments: list[str]) -> None:
    """Judge the texts by each project of which there is a clone, and print the
    record.
    """
    recorded = {}
    for argument in arguments:
        name, _, folder = argument.partition("=")
        commit = subprocess.run(
            ["git", "-C", folder, "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            check=True,
        )
        keep = PROJECTS[name](Path(folder))
        kept = "".join("1" if keep(text) else "0" for text in made_texts())
        recorded[name] = {"commit": commit.stdout.strip(), "kept": kept}
    print(json.dumps(recorded, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])

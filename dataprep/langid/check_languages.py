"""Languages that `langid` keeps, checked against its model's labels; light enough for
checking manifests.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

from gristmill.dataprep.fasttext.fasttext_models import is_other_model
from gristmill.dataprep.langid.language_codes import (
    EVERY_OTHER,
    LID_176,
    parse_label,
    short_code,
)
from gristmill.mixtures.steps.langid import LanguageId
from gristmill.mixtures.yaml_text import join_first

Wanted = Mapping[str, float]
"""Code of a language, with or without a script (`en`, `en_Latn`), or EVERY_OTHER ->
least score.
"""


class LanguageError(ValueError):
    """The model does not know a language to be kept."""


def wanted_languages(section: LanguageId) -> Wanted:
    """Languages to keep, each with its threshold."""
    thresholds = (
        section.keep
        if isinstance(section.keep, Mapping)
        else dict.fromkeys(section.keep, section.threshold)
    )
    return {str(parse_label(code)): threshold for code, threshold in thresholds.items()}


def check_labels(section: LanguageId, labels: Sequence[str], model: str) -> None:
    """Raise LanguageError if the manifest maps labels that the model does not have."""
    unknown = [label for label in section.labels if label not in labels]
    if unknown:
        raise LanguageError(
            f"langid.labels: {unknown[0]!r} is not a label of {model}, which has "
            f"{', '.join(labels[:3])}, ...; correct it"
        )


def check_languages(wanted: Wanted, labels: Sequence[str], model: str) -> None:
    """Refuse languages that the model does not know, since no document would be kept
    for them.

    Raises:
        LanguageError: names one, and similar known languages.
    """
    for code in wanted:
        if (problem := why_unknown(code, labels, model)) is not None:
            raise LanguageError(f"langid.keep: {problem}")


def why_unknown(code: str, labels: Sequence[str], model: str) -> str | None:
    """Reason that a model never predicts a language, with similar known languages; None
    if it knows the language.

    Args:
        code: as `str(parse_label(...))`, or EVERY_OTHER.
        labels: those of the model.
        model: its name.
    """
    languages = {parse_label(label) for label in labels}
    codes = {language.code for language in languages} | {
        str(language) for language in languages
    }
    if code in codes or code == EVERY_OTHER:
        return None
    from babel import Locale

    first = code.partition("_")[0]
    english_names = Locale("en").languages.items()
    candidates = [
        first,
        short_code(first),
        *(short_code(named) for named, name in english_names if name.lower() == code),
        *difflib.get_close_matches(code, sorted(codes), 3, 0.5),
    ]
    hint = ", ".join(dict.fromkeys(repr(name) for name in candidates if name in codes))
    return f"{code!r} is not a language of {model}, which knows {len(codes)}; " + (
        f"did you mean {hint}?"
        if hint
        else f"its codes are {join_first(sorted(codes))}"
    )


def known_labels(section: LanguageId) -> list[str] | None:
    """Labels of a section's model after the section's mapping, if known without loading
    the model; None if its file is remote, missing or of an unknown form.
    """
    if section.model is None or not is_other_model(section.model):
        labels: list[str] | None = list(LID_176)
    else:
        from gristmill.dataprep.fasttext.fasttext_files import read_labels

        labels = read_labels(str(section.model))
    return (
        None
        if labels is None
        else [section.labels.get(label, label) for label in labels]
    )

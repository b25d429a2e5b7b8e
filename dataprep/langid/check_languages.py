"""Languages that `langid` keeps, checked against its model's labels."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

from gristmill.dataprep.langid.language_codes import EVERY_OTHER, parse_label
from gristmill.mixtures.steps.langid import LanguageId

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

    Args:
        wanted: see `wanted_languages`.
        labels: those of the model.
        model: its name.

    Raises:
        LanguageError: names one, and similar known languages.
    """
    languages = {parse_label(label) for label in labels}
    codes = {language.code for language in languages} | {
        str(language) for language in languages
    }
    for code in wanted:
        if code in codes or code == EVERY_OTHER:
            continue
        first = code.partition("_")[0]
        candidates = [
            first,
            parse_label(f"{first}_Latn").code,
            *difflib.get_close_matches(code, sorted(codes), 3, 0.5),
        ]
        names = [repr(name) for name in dict.fromkeys(candidates) if name in codes]
        hint = f"did you mean {', '.join(names)}?" if names else "see the model's list"
        raise LanguageError(
            f"langid.keep: {code!r} is not a language of {model}, which knows "
            f"{len(codes)}; {hint}"
        )

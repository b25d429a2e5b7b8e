"""Preloads spaCy's tokenizer and its rules if spaCy is installed; half a second (see
`text/preload.py`).
"""

from contextlib import suppress

from gristmill.dataprep.words.spacy_words import NoSpacyError, english_rules

with suppress(NoSpacyError):  # the step reports it, in its own process
    english_rules()

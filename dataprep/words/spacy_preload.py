"""Preloads spaCy's tokenizer if spaCy is installed; half a second (see
`text/preload.py`).
"""

from contextlib import suppress

from gristmill.dataprep.words.spacy_words import NoSpacyError, load_tokenizer

with suppress(NoSpacyError):  # the step reports it, in its own process
    load_tokenizer()

from typing import Any

import pytest
from pydantic import ValidationError

from gristmill.mixtures.sources import Ingest, Source


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"encoding": "klingon"}, "'klingon' is not a text encoding; use `auto`, or a Python codec such as cp1252"),
        ({"encoding": "base64"}, "'base64' is not a text encoding"),
        ({"split": "test"}, "`split: test` is not a way to split a text; use `chapters` or"),
        ({"extract_options": {"favor": "precision"}}, "only trafilatura can favor precision"),
        ({"extract": "resiliparse", "extract_options": {"favor": "precision"}}, "only trafilatura can favor precision"),
        ({"extract": "justext"}, "'resiliparse', 'trafilatura' or 'none'"),
    ],
)
def test_what_does_not_fit_together_is_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Source.model_validate({"path": "a", **section})


def test_what_fits_together_is_accepted() -> None:
    found = Source.model_validate(
        {
            "path": "a",
            "format": "hf",
            "split": "dev",
            "encoding": "cp1252",
            "extract": "trafilatura",
            "extract_options": {"favor": "precision"},
        }
    )
    assert (found.split, found.extract_options.favor, found.extract_options.tables) == ("dev", "precision", True)
    plain = Source.model_validate({"path": "a"})
    assert (plain.encoding, plain.extract, plain.split) == (None, None, None)


def test_the_memory_of_extraction_has_a_floor() -> None:
    with pytest.raises(ValidationError, match="greater than or equal to 268435456"):
        Ingest.model_validate({"extract_memory_bytes": 1 << 20})


@pytest.mark.parametrize("size", [0, (256 << 20) + 1])
def test_the_longest_document_is_no_longer_than_a_record_may_be(size: int) -> None:
    with pytest.raises(ValidationError, match="max_document_bytes"):
        Ingest.model_validate({"max_document_bytes": size})

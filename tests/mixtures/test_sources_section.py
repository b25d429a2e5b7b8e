from typing import Any

import pytest
from pydantic import ValidationError

from gristmill.mixtures.schema.sources import Ingest, Source


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"encoding": "klingon"}, "'klingon' is not a text encoding.*`auto`"),
        ({"encoding": "base64"}, "'base64' is not a text encoding"),
        ({"split": "test"}, "`split: test`.*`format: hf`"),
        (
            {"extract_options": {"favor": "precision"}},
            "only trafilatura can favor precision",
        ),
        (
            {"extract": "resiliparse", "extract_options": {"favor": "precision"}},
            "only trafilatura can favor precision",
        ),
        ({"extract": "jusText"}, "'resiliparse', 'trafilatura', .* or 'none'"),
        ({"extract": "justext", "extract_options": {"links": True}}, "justext.*links"),
        ({"format": "docx", "split": "pages"}, "`split: pages`.*format docx"),
        ({"format": "pdf", "split": {"paragraphs": 9}}, "format pdf"),
    ],
)
def test_inconsistent_source_is_rejected(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Source.model_validate({"path": "a", **section})


def test_consistent_source_is_accepted() -> None:
    source = Source.model_validate(
        {
            "path": "a",
            "format": "hf",
            "split": "dev",
            "encoding": "cp1252",
            "extract": "trafilatura",
            "extract_options": {"favor": "precision"},
        }
    )
    assert (
        source.split,
        source.extract_options.favor,
        source.extract_options.tables,
    ) == ("dev", "precision", True)
    plain = Source.model_validate({"path": "a"})
    assert (plain.encoding, plain.extract, plain.split) == (None, None, None)


def test_extraction_memory_has_a_floor() -> None:
    with pytest.raises(ValidationError, match="greater than or equal to 268435456"):
        Ingest.model_validate({"extract_memory_bytes": 1 << 20})


@pytest.mark.parametrize("size", [0, (256 << 20) + 1])
def test_max_document_bytes_is_bounded_by_the_largest_record(size: int) -> None:
    with pytest.raises(ValidationError, match="max_document_bytes"):
        Ingest.model_validate({"max_document_bytes": size})

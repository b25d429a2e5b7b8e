"""Main-text extraction from HTML by resiliparse and trafilatura."""

import pytest

from gristmill.dataprep.readers.charsets import UndecodableError
from gristmill.dataprep.readers.html import EXTRACTORS, extract, find_extractor
from gristmill.mixtures.schema.sources import ExtractOptions

PARAGRAPH = (
    "The mill grinds slowly, yet it grinds exceedingly small, as the old saying of "
    "the poets has it. " * 3
)
PAGE = f"""<!DOCTYPE html><html lang="en-GB"><head><title>On  mills</title><meta charset="utf-8">
<meta property="article:published_time" content="2019-10-31"></head><body>
<nav><a href="/">Home</a> <a href="/all">All posts</a></nav>
<article><h1>On mills</h1><p>{PARAGRAPH}</p>
<p>See <a href="https://mill.example/">the mill</a> for more. {PARAGRAPH}</p>
<table><tr><td>wheat flour</td><td>twelve sacks</td></tr></table></article>
<section class="comments" id="comments"><div class="comment"><p>A reader's opinion.</p></div></section>
<footer>Copyright notice</footer></body></html>"""


def run(
    extractor: str, page: bytes = PAGE.encode(), **options: object
) -> tuple[str, dict[str, object]]:
    chosen = ExtractOptions.model_validate(options).model_dump()
    extracted = extract(page, "auto", "", EXTRACTORS[extractor], chosen)
    return extracted["text"], dict(extracted["metadata"])


@pytest.mark.parametrize("extractor", EXTRACTORS)
def test_main_text_is_kept_without_boilerplate(extractor: str) -> None:
    text, metadata = run(extractor)
    assert PARAGRAPH.strip() in text
    assert "twelve sacks" in text
    for boilerplate in (
        "All posts",
        "Copyright notice",
        "A reader's opinion",
        "https://mill.example/",
    ):
        assert boilerplate not in text
    assert metadata["title"] == "On mills"
    assert metadata["charset"] == "utf-8"
    assert "encoding" not in metadata


def test_page_metadata_is_extracted() -> None:
    assert run("resiliparse")[1]["language"] == "en-GB"
    assert run("trafilatura")[1]["published"] == "2019-10-31"


@pytest.mark.parametrize("extractor", EXTRACTORS)
def test_options_for_tables_and_links(extractor: str) -> None:
    assert "twelve sacks" not in run(extractor, tables=False)[0]
    assert "https://mill.example/" in run(extractor, links=True)[0]


def test_favor_recall_keeps_boilerplate_of_resiliparse() -> None:
    assert "Copyright notice" in run("resiliparse", favor="recall")[0]


@pytest.mark.parametrize("extractor", EXTRACTORS)
@pytest.mark.parametrize(
    "page",
    [b"<html></html>", b"<p></p>", b"  \n ", b"<body><script>x()</script></body>"],
)
def test_page_without_text_is_empty(extractor: str, page: bytes) -> None:
    assert run(extractor, page)[0] == ""


@pytest.mark.parametrize("extractor", EXTRACTORS)
def test_encoding_is_recorded_and_invalid_bytes_are_rejected(extractor: str) -> None:
    page = (
        PAGE.replace("utf-8", "latin1")
        .replace("slowly", "très lentement")
        .encode("latin-1")
    )
    text, metadata = run(extractor, page)
    assert "très lentement" in text
    assert (metadata["encoding"], metadata["charset"]) == ("cp1252", "latin1")
    with pytest.raises(UndecodableError, match="UTF-8"):
        extract(
            b"<p>\xff",
            "utf-8",
            "",
            EXTRACTORS[extractor],
            ExtractOptions().model_dump(),
        )


def test_custom_extractor_is_found_by_module_and_function() -> None:
    assert find_extractor("trafilatura") is EXTRACTORS["trafilatura"]
    assert (
        find_extractor("gristmill.dataprep.readers.html:with_resiliparse")
        is EXTRACTORS["resiliparse"]
    )


def test_trafilatura_text_is_nfc() -> None:
    paragraph = "Un cafe\u0301 et une E\u0301cole, " * 20
    page = f"<html><body><article><p>{paragraph}</p></article></body></html>".encode()
    text, _ = run("trafilatura", page)
    assert "caf\u00e9 et une \u00c9cole" in text
    assert "\u0301" not in text

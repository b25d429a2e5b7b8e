"""Main-text extraction from HTML, and its structure as Markdown."""

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


DIVISIONS = (
    PAGE.replace("<nav>", "<div>" + "<a href='/'>Home</a> " * 9)
    .replace("</nav>", "</div>")
    .replace("article>", "div>")
)
"""For readability, which knows no elements of HTML 5."""


def run(
    extractor: str, page: bytes = PAGE.encode(), **options: object
) -> tuple[str, dict[str, object]]:
    chosen = ExtractOptions.model_validate(options).model_dump()
    extracted = extract(page, "auto", "", EXTRACTORS[extractor], chosen)
    return extracted.parts[0].strip(), dict(extracted.metadata)


@pytest.mark.parametrize("extractor", EXTRACTORS)
def test_main_text_is_kept_without_boilerplate(extractor: str) -> None:
    page = DIVISIONS if extractor == "readability" else PAGE
    text, metadata = run(extractor, page.encode())
    assert PARAGRAPH.strip() in text
    is_cautious = extractor in ("justext", "readability")  # short cells go
    assert ("twelve sacks" in text) != is_cautious
    for boilerplate in (
        "All posts",
        "Copyright notice",
        "A reader's opinion",
        "https://mill.example/",
    ):
        assert boilerplate not in text
    assert metadata["title"] == "On mills"
    assert metadata["language"] == (None if extractor == "trafilatura" else "en-GB")
    assert metadata["charset"] == "utf-8"
    assert "encoding" not in metadata


def test_trafilatura_finds_the_date() -> None:
    assert run("trafilatura")[1]["published"] == "2019-10-31"


@pytest.mark.parametrize("extractor", sorted(set(EXTRACTORS) - {"justext"}))
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


STRUCTURED = f"""<html><body><article><h1>On mills</h1><p>{PARAGRAPH}</p><h2>Use</h2>
<ul><li>{PARAGRAPH}</li><li>{PARAGRAPH}</li></ul><ol><li>fill</li><li>grind</li></ol>
<table><tr><th>Flour</th><th>Sacks</th></tr><tr><td>wheat</td><td>{PARAGRAPH}</td></tr></table>
<pre><code>def grind(sacks):
    return sacks * 2  # a_b * c_d
</code></pre><p>{PARAGRAPH}</p><p>Its area is
<span class="katex"><span class="katex-mathml"><math><semantics><mi>x</mi><annotation
encoding="application/x-tex">a_1 * b_2</annotation></semantics></math></span><span
class="katex-html" aria-hidden="true">a1b2</span></span>. {PARAGRAPH}</p></article></body></html>"""


@pytest.mark.parametrize("extractor", ["resiliparse", "trafilatura", "readability"])
def test_structure_is_kept_as_markdown(extractor: str) -> None:
    # resiliparse takes a bare list for navigation
    favor = "recall" if extractor == "resiliparse" else "balanced"
    text, _ = run(extractor, STRUCTURED.encode(), markdown=True, favor=favor)
    assert "# On mills\n" in text
    assert "## Use\n" in text
    assert f"- {PARAGRAPH.strip()}\n- The mill" in text
    assert "1. fill\n2. grind" in text
    assert "| Flour | Sacks |" in text
    assert f"| wheat | {PARAGRAPH.strip()} |" in text
    assert "```\ndef grind(sacks):\n    return sacks * 2  # a_b * c_d\n" in text
    assert "Its area is $a_1 * b_2$." in " ".join(text.split())


FORMULAS = {
    'an <math alttext="x^2"><mi>x</mi></math> end': "an $x^2$ end",
    '<math display="block"><semantics><mi>x</mi><annotation encoding="application/x-tex">'
    "x &lt; y</annotation></semantics></math>": "$$x < y$$",
    'an <span class="MathJax">x</span><script type="math/tex">x_1</script> end': (
        "an $x_1$ end"
    ),
    '<script type="math/tex; mode=display">x</script>': "$$x$$",
    '<span class="katex-display"><span class="katex"><math><semantics><annotation '
    'encoding="application/x-tex">x</annotation></semantics></math></span></span>': (
        "$$x$$"
    ),
    '<span class="mwe-math-element"><math alttext="{\\displaystyle x_{1}}"><mi>x</mi>'
    '</math><img alt="{\\displaystyle x_{1}}"></span>': "$x_{1}$",
    'an <img class="latex" alt="x+1" src="x.png"> end': "an $x+1$ end",
    "an <math><mi>x</mi></math> end": "an x end",
}


@pytest.mark.parametrize("html", FORMULAS)
def test_formulas_become_latex(html: str) -> None:
    page = f"<html><body><p>{html}</p></body></html>".encode()
    text, _ = run("resiliparse", page, favor="recall", markdown=True)
    assert text == FORMULAS[html]


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


def test_readability_as_markdown_without_tables() -> None:
    nested = STRUCTURED.replace(
        "<th>Flour</th>", "<th><table><tr><td>x</td></tr></table></th>"
    )
    text, _ = run("readability", nested.encode(), markdown=True, tables=False)
    assert "## Use" in text
    assert "|" not in text

"""Pages as HTML and Markdown: every value is escaped, pages load nothing, and text is
readable in light and dark mode.
"""

from __future__ import annotations

import hashlib
import re
from base64 import b64encode
from collections import Counter
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import get_args
from xml.etree import ElementTree

import pytest
from jinja2 import StrictUndefined

from benchmarks.checkout import ROOT
from gristmill.flows.pages.column_glossary import MEANINGS
from gristmill.flows.pages.markdown import markdown_page
from gristmill.flows.pages.page_elements import (
    Choice,
    Details,
    Entry,
    Field,
    Fields,
    Figure,
    Form,
    Heading,
    Link,
    Links,
    Listing,
    Note,
    Page,
    Part,
    Section,
    Sides,
    Span,
    Table,
    Text,
    section_of,
)
from gristmill.flows.pages.page_html import (
    DARK,
    LIGHT,
    TEMPLATES,
    breakable,
    compiled_templates,
    environment,
    html_file,
    served_html,
    table_script,
)
from gristmill.flows.pages.pictures import (
    binned_counts,
    curves,
    histogram,
    stacked_bars,
    steps,
)


def test_bins_are_labelled_by_their_edges_and_the_cut_is_a_line() -> None:
    svg = binned_counts([0, 10, 20], [0, 4, 2, 0], "words", 12)
    assert re.findall(">([^<]+)</text>", svg)[:4] == ["0", "10", "20", "words"]
    assert f"var(--series-3, {LIGHT['series-3']})" in svg
    assert "series-3" not in binned_counts([0, 10], [3, 0, 0], "words")
    counts = [1, 4, 2]
    assert binned_counts([10, 20], counts, "words", 5) != (
        binned_counts([10, 20], counts, "words", 10)
    )


def test_legends_are_beneath_the_axes() -> None:
    two = {"a": [0.1, 0.5], "b": [0.9, 0.4]}
    for svg in (
        curves(
            {name: list(enumerate(values)) for name, values in two.items()}, "x", "y"
        ),
        stacked_bars([("one", {"a": 1.0, "b": 2.0})], "x"),
        histogram(two, [0, 1, 2], "x"),
        steps(two, ["p", "q"], "y"),
    ):
        root = ElementTree.fromstring(svg)
        groups = [group for group in root if group.tag.endswith("}g")]
        axes, *legend = groups
        assert ["".join(name.itertext()) for name in legend] == ["a", "b"]
        rows = [float(mark.get("y", 0)) for name in legend for mark in name]
        heights = [float(number) for number in re.findall(r"V([\d.]+)", svg)]
        assert min(rows) > max(heights)
        assert max(rows) < float(root.get("viewBox", "").split()[3])
        assert not {"a", "b"} & set(axes.itertext())


def points_of(svg: str) -> list[tuple[float, float]]:
    """Points of the first line of a picture."""
    (points, *_) = re.findall(r'<polyline points="([^"]+)"', svg)
    return [tuple(map(float, point.split(","))) for point in points.split()]


def test_places_follow_the_ticks() -> None:
    """A point whose values are ticks lies on the lines of both."""
    svg = curves({"a": [(0, 2.0), (100, 4.0)]}, "x", "y")
    first, last = points_of(svg)
    across = list(map(float, re.findall(r'd="M([\d.]+) 6V[\d.]+" stroke', svg)))
    up = list(map(float, re.findall(r'd="M[\d.]+ ([\d.]+)H', svg)))
    labels = " ".join(re.findall(">([^<]+)</text>", svg))
    assert labels == "0 20 40 60 80 100 x 2 2.5 3 3.5 4 y"
    assert (first[0], last[0]) == (across[0], across[-1])
    assert (first[1], last[1]) == (up[0], up[-1])


def test_lines_leave_out_values_that_are_not_finite() -> None:
    svg = curves({"a": [(0, 1.0), (1, float("nan")), (2, 3.0)]}, "x", "y")
    assert len(points_of(svg)) == 2
    assert "<svg" in curves({"a": []}, "x", "y")


def test_bars_are_as_long_as_their_shares() -> None:
    svg = stacked_bars([("one", {"a": 1.0, "b": 3.0}), ("two", {"b": 4.0})], "x")
    bars = re.findall(r'd="M([\d.]+) [\d.]+H([\d.]+)V[^"]+" fill="var\(--([\w-]+)', svg)
    ends = [(float(begin), float(end), series) for begin, end, series in bars]
    (zero, quarter, first), (begin, end, second), (other_zero, other_end, third) = ends
    assert [first, second, third] == ["series-0", "series-1", "series-1"]
    assert (begin, other_zero, other_end) == (quarter, zero, end)
    assert quarter - zero == pytest.approx((end - zero) / 4, abs=0.1)


def test_every_drawing_has_dark_mode_colours() -> None:
    drawn = curves(
        {str(number): [(0, number), (1, number)] for number in range(8)}, "x", "y"
    )
    assert re.findall(r"(?<!, )#[0-9a-f]{6}", drawn) == [], (
        "a fixed colour that dark mode cannot replace"
    )
    html = html_file(Page("x", parts=[Figure(drawn, "")]))
    dark = html.partition("(prefers-color-scheme: dark)")[2].partition("}")[0]
    used = set(re.findall(r"var\(--([\w-]+)", html))
    assert {name for name in used if f"--{name}: #" not in dark} == set()


@pytest.mark.parametrize("colours", [LIGHT, DARK])
def test_text_has_enough_contrast_in_both_modes(colours: dict[str, str]) -> None:
    """WCAG 2.2, 1.4.3: a contrast of at least 4.5 to 1 for text; 1.4.11: 3 to 1 for
    graphics.
    """

    def luminance(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        red, green, blue = (
            part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
            for part in parts
        )
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    def contrast(first_colour: str, second_colour: str) -> float:
        low, high = sorted(
            luminance(colour) + 0.05 for colour in (first_colour, second_colour)
        )
        return high / low

    for name in ("ink", "soft", "accent", "good", "bad"):
        assert contrast(colours[name], colours["paper"]) >= 4.5, name
        assert name == "accent" or contrast(colours[name], colours["plain"]) >= 4.5, (
            name
        )
    for name in ("trained", "removed", "added", "hit"):
        assert contrast(colours["ink"], colours[name]) >= 4.5, name
    for name, colour in colours.items():
        assert (
            not name.startswith("series") or contrast(colour, colours["paper"]) >= 3
        ), name


def test_page_policy_blocks_the_network_and_foreign_scripts() -> None:
    html = html_file(
        Page(
            "a<b",
            [Section("Loss & more", [Note("x")]), Section("Spikes", [])],
            contents=True,
        )
    )
    assert (
        '<nav><a href="#part-0">Loss &amp; more</a> <a href="#part-1">Spikes</a> </nav>'
        in html
    )
    assert '<h2 id="part-0">Loss &amp; more</h2>\n<p class="note">x</p>' in html
    assert '<h2 id="part-1">Spikes</h2>' in html
    assert "<title>a&lt;b - gristmill</title>" in html
    digest = b64encode(hashlib.sha256(table_script().encode()).digest()).decode()
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; img-src data:; "
        f"script-src 'sha256-{digest}'"
    )
    assert f'content="{policy}"' in unescape(html)
    assert re.findall("<script>(.*?)</script>", html, re.DOTALL) == [table_script()], (
        "the policy allows only this script"
    )
    assert "@media print" in html


def test_columns_have_tooltips_with_their_meaning() -> None:
    html = html_file(
        Page("x", parts=[Table(["stage", "by it alone"], [["filter", 3]], {1})])
    )
    assert f'<th>stage</th><th class="n" title="{MEANINGS["by it alone"]}' in html
    custom_html = html_file(
        Page("x", parts=[Table(["share"], [["3 %"]], {0}, {"share": "of & all"})])
    )
    assert 'title="of &amp; all"' in custom_html
    cards = html_file(Page("x", cards=[("documents read", "3")]))
    assert f'<div class="card" title="{MEANINGS["documents read"]}">' in cards


def test_markdown_page_contains_tables_and_escapes_document_text() -> None:
    parts = [
        Note("kept in `a_b`"),
        Table(["a", "n"], [["x|y", 3], ["<b>", 4]], {1}),
        Figure("<svg/>", "A picture."),
        Listing("Samples", [Entry([Span("0.5", "strong"), " web p*1"], "line\nline")]),
        Text([Span("one ```"), Span(" two", "strong")]),
        Details("<more>", [Heading("Inside"), Table(["a"], [])]),
        Links([Link("gone", "/a")]),
    ]
    sections = [
        Section("First", parts),
        Section("Only a picture", [Figure("<svg/>", "x")]),
    ]
    markdown = markdown_page(
        Page("A_b", sections, note="today", cards=[("documents", "3")])
    )
    assert markdown.splitlines() == [
        r"# A\_b",
        "",
        "today",
        "",
        "documents **3**",
        "",
        "## First",
        "",
        "kept in `a_b`",
        "",
        "| a | n |",
        "| --- | ---: |",
        r"| x\|y | 3 |",
        r"| \<b\> | 4 |",
        "",
        "**Samples**",
        "",
        r"- **0.5 web p\*1**: line line",
        "",
        "````",
        "one ``` two",
        "````",
        "",
        r"**\<more\>**",
        "",
        "### Inside",
    ]


def test_section_omits_empty_tables_and_dangling_headings() -> None:
    table, note = Table(["a"], [["1"]]), Note("about it")
    section = section_of(
        "x",
        Heading("gone"),
        Table(["a"], []),
        Heading("first"),
        [table, note],
        None,
        Heading("last"),
    )
    assert section == Section("x", [Heading("first"), table, note])
    assert section_of("x", Heading("gone"), Table(["a"], []), note) is None


def test_long_names_break_only_after_punctuation() -> None:
    assert breakable("gopher_quality/min_words") == [
        "gopher_",
        "quality/",
        "min_",
        "words",
    ]
    assert breakable("in gopher_quality/min_words, 0.5") == [
        "in gopher_",
        "quality/",
        "min_",
        "words, 0.5",
    ]
    assert breakable(1_000) == ["1000"]
    cells = html_file(
        Page("x", parts=[Table(["a", "n"], [["gopher_quality/min_words"] * 2], {1})])
    )
    assert cells.count("<wbr>") == 3, "numbers do not break"


EVIL = (
    "<script>alert('x')</script>\"><img src=x onerror=y>`<b>`{{ 7 * 6 }}{% raw %}_/_a.b"
)


def test_every_value_of_every_part_is_escaped() -> None:
    """Values of documents, file names and manifests stay text, wherever a page shows
    them.
    """
    parts = [
        Note(EVIL),
        Heading(EVIL),
        Table([EVIL] * 2, [[EVIL] * 2], {1}),
        Table(["x"], [[Link(EVIL, EVIL)], [[Span(EVIL), EVIL]]], meanings={"x": EVIL}),
        Listing(EVIL, [Entry(EVIL, EVIL, EVIL)]),
        Text([Span(EVIL), Span(EVIL, "strong", EVIL), Span(EVIL, "masked", EVIL)]),
        Figure("<svg/>", EVIL),
        Sides(
            [
                (EVIL, [Text([Span(EVIL, "removed")])]),
                (EVIL, [Text([Span(EVIL, "added")])]),
            ]
        ),
        Details(EVIL, [Note(EVIL)]),
        Fields([(EVIL, EVIL)]),
        Links([EVIL, Link(EVIL, EVIL, EVIL)], EVIL),
        Form(
            EVIL,
            [
                Field(EVIL, EVIL, EVIL, EVIL),
                Choice(EVIL, EVIL, {EVIL: [EVIL]}, EVIL, EVIL),
            ],
            EVIL,
            {EVIL: EVIL},
            after=EVIL,
        ),
    ]
    assert {type(part) for part in parts} == set(get_args(Part)), (
        "every kind of part is tested"
    )
    page = Page(
        EVIL, [Section(EVIL, parts)], parts, EVIL, [(EVIL, EVIL)], parts, True, EVIL
    )
    html = html_file(page)
    tag_counts = Counter[str]()

    class Reader(HTMLParser):
        def handle_starttag(
            self, tag: str, attributes: list[tuple[str, str | None]]
        ) -> None:
            tag_counts[tag] += 1
            tag_counts.update(name for name, _ in attributes)

    Reader().feed(html)
    assert tag_counts["script"] == 1, "the page's own script"
    assert not {"img", "onerror", "src"} & set(tag_counts)
    # Page and section titles appear twice; the value of a choice marks an option, in
    # each of three places.
    assert html.count("&lt;script&gt;") == repr(page).count("<script>") + 2 - 3
    assert "{{ 7 * 6 }}" in html
    assert tag_counts["svg"] == 3
    assert served_html(page).count("&lt;script&gt;") == html.count("&lt;script&gt;")


def test_templates_escape_everything_except_generated_pictures() -> None:
    assert environment(TEMPLATES).autoescape is True
    assert environment(TEMPLATES).undefined is StrictUndefined, (
        "a misspelt name would render as nothing"
    )
    unescaped = re.compile(
        r"\|\s*(?:safe|xmlattr|tojson|urlize)\b|autoescape|Markup|__html__"
    )
    unescaped_lines = [
        (path.name, line.strip())
        for suffix in ("*.jinja", "*.css", "*.py")
        for room in ("flows", "train")
        for path in (ROOT / room).rglob(suffix)
        for line in path.read_text().splitlines()
        if unescaped.search(line) and "autoescape=True" not in line
    ]
    figure, script = sorted(unescaped_lines)
    assert script == ("page.html.jinja", "<script>{{ table_script|safe }}</script>")
    assert figure[0] == "elements.html.jinja"
    assert figure[1].startswith("<figure>{{ part.svg|safe }}<figcaption>")


def test_templates_are_compiled_once_per_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    make = environment.__wrapped__
    template = make(TEMPLATES).get_template("page.html.jinja")
    loaded = make(TEMPLATES)
    monkeypatch.setattr(
        type(loaded), "compile", lambda *arguments: pytest.fail("again")
    )
    assert (
        loaded.get_template("page.html.jinja").blocks.keys() == template.blocks.keys()
    )
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert compiled_templates() is None


def test_no_python_code_contains_html_tags() -> None:
    """HTML belongs in templates, which escape; Python strings would not."""
    tags = re.compile(
        r"</?(?:p|td|tr|th|table|h[1-6]|div|span|html|figure|details|pre|li|ul|nav)[ >]"
    )
    files_with_tags = {
        path.name
        for room in ("flows", "train")
        for path in (ROOT / room).rglob("*.py")
        if tags.search(path.read_text())
    }
    assert files_with_tags == set()

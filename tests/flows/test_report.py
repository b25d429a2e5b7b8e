"""Figures of the report before drawing: tokens along the funnel, cluster sizes,
positions of cuts.
"""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pyarrow as pa
import pytest
from rich.console import Console

from benchmarks.checkout import ROOT
from gristmill.dataprep.documents import (
    DOCUMENT_SCHEMA,
    document_id,
    write_table,
)
from gristmill.dataprep.row_groups import documents_of
from gristmill.flows.pages.markdown import markdown_page
from gristmill.flows.pages.page_elements import Figure, Note, Page, Section
from gristmill.flows.questions.threshold_samples import Cut, CutSample
from gristmill.flows.report.document_sections import (
    cuts,
    document_sections,
    duplicates,
    tokens_kept,
)
from gristmill.flows.report.evaluation import samples, some_samples
from gristmill.flows.report.facts import (
    Facts,
    funnel,
    with_tokens,
)
from gristmill.flows.report.mixture import MOST_LANGUAGES, tokenizer_section
from gristmill.flows.report.report import costs, stage_sections
from gristmill.flows.report.stage_summaries import (
    Binned,
    Tokenized,
    read_as,
)
from gristmill.flows.report.terminal_summary import print_funnel, print_tokens
from gristmill.flows.report.training import by_source, describe_origin, spikes
from gristmill.flows.stages.registry import STAGES
from gristmill.flows.stages.stage import Stage
from tests.flows.rendered import facts_of, html_of, sections_about

FLOWS = ROOT / "flows"
SOURCES = {
    "a": {"bytes_read": 100, "bytes_kept": 80},
    "b": {"bytes_read": 50, "bytes_kept": 10},
}
TOPICS: dict[str, Any] = {
    "funnel": [
        {
            "stage": "ingest",
            "read": 10,
            "kept": 10,
            "dropped": {},
            "quarantined": 1,
            "bytes_kept": 150,
            "sources": {
                "a": {"bytes_read": 100, "bytes_kept": 100},
                "b": {"bytes_read": 50, "bytes_kept": 50},
            },
        },
        {
            "stage": "filter",
            "read": 10,
            "kept": 7,
            "dropped": {"gopher_quality/min_words": 3},
            "quarantined": 0,
            "bytes_kept": 90,
            "sources": SOURCES,
        },
    ],
    "summaries": {
        "filter": {"rules": {"gopher_quality/min_words": {"failing": 5, "only": 2}}}
    },
    "cuts": [
        Cut(
            rule="gopher_quality/min_words",
            key="filter.rules.gopher_quality.min_words",
            statistic="words",
            bound=50,
            dropped=3,
            histogram=Binned(edges=[0, 50, 100], counts=[0, 3, 4, 1]),
            failing=[CutSample("ab", "a", "x<y", "nearly <b>enough</b>", 49)],
            passing=[CutSample("cd", "b", "z", "just enough", 50)],
        )
    ],
}
FACTS = facts_of(**TOPICS)


def test_tokens_are_estimated_by_source_before_the_last_stage_and_counted_after_it() -> (
    None
):
    tokenized = {
        "tokens_per_source": {"a": 20, "b": 5},
        "counts": {
            "bytes_kept": 90,
            "sources": {"a": {"bytes_kept": 80}, "b": {"bytes_kept": 10}},
        },
    }
    first, last = with_tokens(FACTS.funnel, read_as(Tokenized, tokenized))
    assert (first.tokens_kept, first.tokens_exact) == (
        pytest.approx(100 * 20 / 80 + 50 * 5 / 10),
        False,
    )
    assert (last.tokens_kept, last.tokens_exact) == (25, True)
    assert (tokens_kept(first, first), tokens_kept(last, last)) == ("≈ 50", "25")
    steps = {row["stage"]: {"counts": row} for row in TOPICS["funnel"]}
    assert funnel({**steps, "tokenize": tokenized}, ["filter"]) == [first, last]
    assert funnel(steps, ["filter"]) == FACTS.funnel


@pytest.mark.slow
def test_sections_show_every_fact_and_escape_document_text() -> None:
    html = html_of(*sections_about(FACTS))
    assert "gopher_quality/min_words</td>" in html
    assert '<td class="n">3</td><td class="n">30.00%</td><td class="n">2</td>' in html
    assert "Quarantine</h2>" in html
    cuts_html = html_of(cuts(FACTS))
    assert cuts_html.index("nearly &lt;b&gt;enough&lt;/b&gt;") < cuts_html.index(
        "just enough"
    )
    assert "x&lt;y" in cuts_html
    assert "<b>enough" not in cuts_html


@pytest.mark.slow
def test_funnel_is_shown_for_every_source() -> None:
    """A source of 28 pages beside one of 20,000 is invisible in megabytes, but not in
    its own share.
    """

    def row(stage: str, big: tuple[int, int], small: tuple[int, int]) -> dict[str, Any]:
        parts = {
            name: {"read": read, "kept": kept, "bytes_kept": kept}
            for name, (read, kept) in (("web", big), ("german", small))
        }
        return {
            "stage": stage,
            "read": big[0] + small[0],
            "kept": big[1] + small[1],
            "dropped": {},
            "quarantined": 0,
            "bytes_kept": 1,
            "sources": parts,
        }

    rows = [
        row("ingest", (20_000, 20_000), (28, 28)),
        row("filter", (20_000, 19_000), (28, 8)),
        row("dedup", (19_000, 18_000), (8, 8)),
    ]
    facts = facts_of(funnel=rows)
    html = html_of(document_sections(facts)[0])
    cells = [
        re.findall(r"<td[^>]*>(.*?)</td>", line)
        for line in re.findall(r"<tr>(.*?)</tr>", html)
    ]
    assert cells[-6:] == [
        ["german", "ingest", "28", "100.0%", "0.00", ""],
        ["german", "filter", "8", "28.6%", "0.00", ""],
        ["german", "dedup", "8", "28.6%", "0.00", ""],
        ["web", "ingest", "20,000", "100.0%", "0.02", ""],
        ["web", "filter", "19,000", "95.0%", "0.02", ""],
        ["web", "dedup", "18,000", "90.0%", "0.02", ""],
    ]
    tokenized = {
        "tokens_per_source": {"web": 4_500, "german": 4},
        "counts": {"bytes_kept": 18_008, "sources": rows[-1]["sources"]},
    }
    with_estimates = with_tokens(facts.funnel, read_as(Tokenized, tokenized))
    counted = html_of(document_sections(Facts(funnel=with_estimates))[0])
    assert (
        '<td>german</td><td>filter</td><td class="n">8</td><td class="n">28.6%</td>'
        in counted
    )
    assert [
        re.findall(r"<td[^>]*>(.*?)</td>", line)[-1]
        for line in re.findall(r"<tr>(.*?)</tr>", counted)[-6:]
    ] == [
        "≈ 14",
        "≈ 4",
        "4",
        "≈ 5,000",
        "≈ 4,750",
        "4,500",
    ]
    (picture, *_) = re.findall("<svg.*?</svg>", html, re.DOTALL)
    assert labels(picture) >= {"ingest", "filter", "dedup"}
    assert "read" not in labels(picture), (
        "ingest lost nothing, so a bar for read would repeat it"
    )
    single_source_facts = facts_of(
        funnel=[
            {**stage, "sources": {"web": stage["sources"]["web"]}} for stage in rows
        ]
    )
    assert "Each source" not in html_of(document_sections(single_source_facts)[0])


def labels(svg: str) -> set[str]:
    return {
        text.strip() for text in ElementTree.fromstring(svg).itertext() if text.strip()
    }


def test_samples_are_grouped_by_the_stage_of_their_model() -> None:
    models = {
        name: {
            "samples": [
                {"prompt": f"<{number}>", "completion": name} for number in range(4)
            ]
        }
        for name in ("pretrain", "sft", "dpo")
    }
    facts = facts_of(evaluation={"models": models})
    html = html_of(samples(facts))
    assert re.findall(r"<h3>(.*?)</h3>", html) == [
        "pretrain: continues a text",
        "sft: answers a prompt",
        "dpo: answers a prompt",
    ]
    assert (
        html.index("pretrain:")
        < html.index("<b>&lt;0&gt;</b>pretrain")
        < html.index("sft:")
    )
    assert [model for model, _ in some_samples(facts)] == [
        "pretrain",
        "sft",
        "dpo",
    ]


def test_markdown_contains_pictures_where_they_are_shown() -> None:
    page = Page("x", parts=[Figure("<svg/>", "a_b")])
    picture = r"![a\_b](data:image/svg+xml;base64,PHN2Zy8+)"
    assert markdown_page(page, has_pictures=True) == f"# x\n\n{picture}\n"
    assert markdown_page(page) == "# x\n"


def test_duplicates_section_shows_drops_of_both_cluster_rules() -> None:
    summary = {
        "clusters": 2,
        "largest_clusters": [
            {"cluster": "", "locator": "a.txt", "survivor": "00" * 16, "size": 3}
        ],
    }
    dropped = {"dropped_by_rule": {"survivors": 1200, "connected": 1345}}
    html = html_of(duplicates(facts_of(summaries={"dedup": {**summary, **dropped}})))
    assert "drops 1,200 documents, each similar to a kept one" in html
    assert "drops 1,345, all but one of each chain" in html
    older_html = html_of(duplicates(facts_of(summaries={"dedup": summary})))
    assert "2 clusters of two or more documents." in older_html
    assert "drops" not in older_html


def test_documents_are_read_by_id(tmp_path: Path) -> None:
    ids = [document_id("web", str(row), "t") for row in range(7)]
    documents = pa.table(
        [
            pa.array(ids, pa.binary(16)),
            pa.array(["web"] * 7).dictionary_encode(),
            pa.array(list("0123456")),
            pa.array(["t"] * 7, pa.large_string()),
            pa.array(["{}"] * 7),
        ],
        schema=DOCUMENT_SCHEMA,
    )
    write_table(tmp_path / "ingest" / "part-0.parquet", documents)
    inputs = {"ingest": tmp_path / "ingest"}
    assert documents_of(inputs, [ids[4], ids[2], b"?" * 16], ["locator"]) == {
        ids[2]: {"id": ids[2], "locator": "2"},
        ids[4]: {"id": ids[4], "locator": "4"},
    }


def test_repeated_steps_have_separate_sections_and_stages_can_add_sections() -> None:
    words = {"histograms": {"words": {"edges": [0, 10, 20], "counts": [0, 4, 2, 0]}}}
    facts = Facts(
        summaries={
            "filter": words,
            "filter-2": words,
            "shouting": {"loudest": "A & B"},
        }
    )
    shouting = Stage(
        "shouting",
        1,
        "nowhere:run",
        report=("tests.flows.test_report:loudest",),
    )
    kinds = {
        "filter": STAGES["filter"],
        "filter-2": STAGES["filter"],
        "shouting": shouting,
    }
    html = html_of(*stage_sections(facts, kinds))
    assert re.findall(r"<h2[^>]*>(.*?)</h2>", html) == [
        "Lengths",
        "Lengths: filter-2",
        "Loudest",
    ]
    assert '<p class="note">A &amp; B</p>' in html


def loudest(facts: Facts, name: str) -> Section:
    return Section("Loudest", [Note(str(facts.summaries[name]["loudest"]))])


def test_edits_repeated_lines_and_leaks_are_shown() -> None:
    facts = Facts(
        summaries={
            "ingest": {"skipped": {"revisit record": 2, "request record": 17}},
            "clean": {
                "edits": {
                    "mask_email": {"documents": 3, "times": 5, "bytes": 90},
                    "mask_ip": {"documents": 0, "times": 0, "bytes": 0},
                }
            },
            "dedup_lines": {
                "most_repeated": [
                    {
                        "documents": 213,
                        "document": "00",
                        "text": "All rights <reserved>.",
                    }
                ]
            },
            "dedup_substrings": {
                "largest_repeats": [
                    {
                        "copies": 2,
                        "words": 115,
                        "text": "June 2013",
                        "document": "0",
                        "begin": 0,
                    }
                ]
            },
            "decontaminate": {
                "sets": {
                    "gsm8k": {
                        "items": 9,
                        "checked": 8,
                        "contaminated": 1,
                        "contaminated_share": 0.125,
                    }
                },
                "matches": [
                    {
                        "set": "gsm8k",
                        "item": 4,
                        "item_text": "The dragon",
                        "contamination": 0.75,
                        "source": "web",
                        "locator": "http://x",
                    }
                ],
            },
        }
    )
    html = html_of(*sections_about(facts))
    for row in (
        '<td>mask_email</td><td class="n">3</td>',
        "213</td><td>All rights &lt;reserved&gt;.</td>",
        '2</td><td class="n">115</td><td>June 2013</td>',
        '<td class="n">12.50%</td>',
        '<td>The dragon</td><td class="n">75%</td><td>web http://x</td>',
        '<td>request record</td><td class="n">17</td>',
    ):
        assert row in html
    assert "mask_ip" not in html


GROUP = {
    "documents": 2,
    "tokens": 40,
    "bytes": 120,
    "characters": 100,
    "words": 20,
    "bytes_per_token": 3.0,
    "characters_per_token": 2.5,
    "tokens_per_word": 2.0,
}
TOKENIZED = {
    "sources": {
        "a<b": GROUP,
        "b": {**GROUP, "tokens": 60, "words": 0, "tokens_per_word": None},
    },
    "languages": {
        f"l{number:02}": {**GROUP, "tokens": number}
        for number in range(MOST_LANGUAGES + 1)
    },
    "encoder": "the tokenizers library, because its normalizer is NFC",
}


def test_tokenizer_section_shows_fit_by_source_and_language() -> None:
    html = html_of(tokenizer_section(Facts(summaries={"tokenize": TOKENIZED})))
    assert html.index("<td>b</td>") < html.index("<td>a&lt;b</td>")
    assert (
        '<td>a&lt;b</td><td class="n">2</td><td class="n">0.00</td><td '
        'class="n">40</td><td class="n">3.00</td>'
        '<td class="n">2.50</td><td class="n">2.00</td>'
    ) in html
    assert "<td>l20</td>" in html
    assert "<td>l00</td>" not in html
    assert (
        f"The {MOST_LANGUAGES} languages with most tokens of {MOST_LANGUAGES + 1}"
        in html
    )
    assert "Encoded by the tokenizers library, because its normalizer is NFC." in html
    assert tokenizer_section(Facts(summaries={"tokenize": {"tokens": 3}})) is None


def test_terminal_shows_the_tokenizer_fit() -> None:
    console = Console(record=True, width=60, file=io.StringIO())
    print_tokens(Facts(summaries={"tokenize": TOKENIZED}), console)
    lines = [line.split() for line in console.export_text().splitlines() if line]
    assert lines[0] == ["Tokens"]
    assert lines[1] == ["source", "tokens", "MB", "bytes/token", "tokens/word"]
    assert lines[2] == ["b", "60", "0.00", "3.00"]
    assert lines[3] == ["a<b", "40", "0.00", "3.00", "2.00"]


def test_loss_spike_is_shown_with_attributed_documents() -> None:
    suspect = {"id": "ab12", "source": "web", "loss": None, "text": "<script> 0 0 0"}
    innocent = {"id": "cd34", "source": "web", "loss": 2.0, "text": "plain prose"}
    step = {
        "step": 21,
        "loss": 9.5,
        "mean": 3.0,
        "suspects": ["ab12"],
        "documents": [suspect, innocent],
    }
    html = html_of(spikes(facts_of(spikes={"pretrain": [step], "sft": []})))
    assert (
        "pretrain, step 21: loss 9.500, where 3.000 was usual; 1 attributed document<"
        in html
    )
    assert (
        '<b>NaN or Inf</b> web ab12</h5>\n<p class="excerpt">&lt;script&gt; 0 0 0</p>'
        in html
    )
    assert "plain prose" not in html
    assert spikes(facts_of(spikes={"pretrain": []})) is None


def test_attributed_document_is_shown_with_origin_and_verdicts() -> None:
    suspect = {
        "id": "ab12",
        "source": "web",
        "loss": 9.0,
        "text": "0 0 0",
        "url": "https://site.example/a",
        "locator": "web.jsonl#3",
        "language": "de",
        "quality": {"score": 0.123456, "lines": 3},
        "cluster": "0123456789abcdef",
        "cluster_size": 4,
    }
    step = {
        "step": 21,
        "loss": 9.5,
        "mean": 3.0,
        "suspects": ["ab12"],
        "documents": [suspect],
    }
    assert (
        "web ab12 · https://site.example/a · de · score 0.123 · lines 3 · cluster "
        "01234567 of 4" in html_of(spikes(facts_of(spikes={"pretrain": [step]})))
    )
    assert (
        describe_origin({"locator": "web.jsonl#3", "cluster": "01", "cluster_size": 1})
        == "web.jsonl#3"
    )


def test_curves_are_drawn_for_every_source_where_there_are_several() -> None:
    steps = [
        {"step": 1, "loss": 3.0, "sources": {"a": {"loss": 4.0}, "b": {"loss": 2.0}}},
        {"step": 2, "loss": 2.5},
    ]
    assert by_source(steps, "loss") == {
        "all": [(1, 3.0), (2, 2.5)],
        "a": [(1, 4.0)],
        "b": [(1, 2.0)],
    }
    assert by_source(
        [{"step": 1, "loss": 3.0, "sources": {"a": {"loss": 3.0}}}], "loss"
    ) == {"all": [(1, 3.0)]}
    assert by_source(steps, "bits_per_byte") == {}


def test_time_and_cost_are_of_the_stages_that_are_made() -> None:
    made_stage = {"stage": "ingest", "seconds": 2.5, "bytes": 3_000_000, "cost": None}
    html = html_of(costs(facts_of(stages=[made_stage])))
    assert '<td>ingest</td><td class="n">2.5</td><td class="n">3.00</td>' in html
    assert costs(Facts()) is None


def test_files_that_ended_early_are_on_the_terminal_and_in_the_report() -> None:
    damaged = [
        {
            "source": "web",
            "file": f"{name}.jsonl.gz",
            "records": 200,
            "lost": lost,
            "error": "cut off",
        }
        for name, lost in (("a", 1800), ("b", 90))
    ]
    facts = replace(FACTS, summaries={"ingest": {"lost": 1890, "damaged": damaged}})
    note = (
        "files that could not be read to their end lost about 1,890 records: "
        "a.jsonl.gz (about 1,800)"
    )
    console = Console(file=io.StringIO(), width=200)
    print_funnel(facts, console)
    assert note in console.file.getvalue()  # type: ignore[attr-defined]
    html = html_of(*sections_about(facts))
    assert "Files that could not be read to their end</h2>" in html
    assert "a.jsonl.gz</td>" in html
    assert '<td class="n">1,800</td>' in html
    assert "to their end" not in html_of(*sections_about(FACTS))


def test_skipped_records_are_printed_by_cause_below_the_funnel() -> None:
    skipped = {
        "request record": 20,
        "HTTP status 404": 1,
        **{f"content type image/{n}": 2 for n in "abcdef"},
    }
    facts = replace(FACTS, summaries={"ingest": {"skipped": skipped}})
    console = Console(file=io.StringIO(), width=250)
    print_funnel(facts, console)
    note = (
        "ingest skipped 33 records: request record 20, content type image/a 2, content "
        "type image/b 2, content type image/c 2, content type image/d 2, others 5"
    )
    assert note in console.file.getvalue()  # type: ignore[attr-defined]

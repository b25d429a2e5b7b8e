"""`gristmill search` by meaning, by words and by both: its answers, and the lack of
vectors.
"""

from __future__ import annotations

import json
import random
import re
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from starlette.testclient import TestClient

import gristmill
from gristmill.dataprep.encoders.embeddings import load_embedder
from gristmill.dataprep.semantic import vector_search as nearest_module
from gristmill.dataprep.words.snippets import snippet
from gristmill.flows.browser.browsed_run import BrowsedRun
from gristmill.flows.browser.server import make_app
from gristmill.flows.cli.launch import launch
from gristmill.flows.pages.document_elements import marked
from gristmill.flows.pages.page_elements import Span
from gristmill.flows.pages.pictures import dot_map
from gristmill.flows.questions.search import (
    FUSION,
    SearchError,
    SearchHit,
    SearchHits,
    WordsRank,
    merge,
    search,
)
from gristmill.flows.running.session import Session, open_session
from gristmill.mixtures.schema.encoder_settings import ReadingModel
from tests.commands import call
from tests.dataprep.small_models import WORDS, write_word_vectors
from tests.jsonl import write_jsonl

pytestmark = pytest.mark.slow

MANIFEST = """
name: found
sources: {web: {path: web.jsonl, id_field: key}}
ingest: {shard_bytes: 2_000}
prepare:
  - filter: {rules: [{gopher_quality: {min_words: 3, min_stop_words: 0, min_alpha_word_ratio: 0,
                                       min_mean_word_length: 0}}]}
  - cluster: {model: model, k: 4}
  - filter: {rules: [{gopher_quality: {max_words: 30, min_words: 0, min_stop_words: 0, min_alpha_word_ratio: 0,
                                       min_mean_word_length: 0}}]}
    name: short
tokenizer: {vocab_size: 300}
"""


def texts() -> dict[str, str]:
    draw = random.Random(9)
    drawn = {
        f"d{number}": " ".join(draw.choices(WORDS, k=draw.randint(4, 25)))
        for number in range(120)
    }
    return {
        **drawn,
        "tiny": "w1 w2",
        "long": "w7 w8 w9 " * 12,
        "attack": "w50 w51 w52 <script>alert(1)</script> w53",
    }


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Session:
    """A session whose documents are prepared in several shards."""
    folder = tmp_path_factory.mktemp("found")
    write_word_vectors(folder / "model")
    write_jsonl(
        folder / "web.jsonl",
        [{"key": key, "text": text} for key, text in texts().items()],
    )
    (folder / "found.yaml").write_text(MANIFEST)
    new_session = open_session(
        str(folder / "found.yaml"), [], str(folder / "store"), until="short"
    )
    assert (
        launch(
            new_session,
            list(new_session.plan),
            frozenset(),
            tracked=False,
            summarise=False,
        )
        == 0
    )
    return new_session


def hits_of(answer: SearchHits) -> list[str]:
    return [hit.locator for hit in answer.hits]


def test_search_by_meaning_ranks_the_nearest_vectors(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Includes documents that a later step dropped, but not those that an earlier one
    dropped.
    """
    monkeypatch.setattr(nearest_module, "ROWS_AT_ONCE", 7)
    embedder = load_embedder(
        ReadingModel(path=str(Path(session.manifest_file).parent / "model"))
    )
    query = "w9 w7 w7 w8"
    candidate_texts = {key: text for key, text in texts().items() if key != "tiny"}
    cosines = (
        embedder.embed(list(candidate_texts.values())) @ embedder.embed([query])[0]
    )
    expected = sorted(zip(-cosines, candidate_texts, strict=True))
    answer = search(session, query, "meaning", 8)
    assert (answer.by, answer.with_vectors, answer.with_words) == (
        ["meaning"],
        len(candidate_texts),
        None,
    )
    measured = [hit.meaning.cosine for hit in answer.hits if hit.meaning]
    assert np.allclose(measured, [-cosine for cosine, _ in expected[:8]], atol=2e-3)
    first = answer.hits[0]
    assert (first.locator, first.kept, first.dropped_by) == (
        "long",
        False,
        "short",
    )
    assert first.reason == "gopher_quality/max_words"
    assert first.words is None


def test_search_by_words_scans_all_documents(session: Session) -> None:
    answer = search(session, '"w1 w2"', "words", 50)
    assert (answer.by, answer.documents, answer.with_words) == (
        ["words"],
        len(texts()),
        len(texts()),
    )
    expected = {key for key, text in texts().items() if "w1 w2 " in f"{text} "}
    assert set(hits_of(answer)) == expected
    assert answer.matching == len(expected)
    tiny = next(hit for hit in answer.hits if hit.locator == "tiny")
    assert (tiny.kept, tiny.dropped_by, tiny.snippet) == (
        False,
        "filter",
        "w1 w2",
    )


def test_results_are_merged_by_rank(session: Session) -> None:
    answer = search(session, "w3 w4 w5", limit=300)
    assert answer.by == ["meaning", "words"]
    for hit in answer.hits:
        ranks = [ranked.rank for ranked in (hit.meaning, hit.words) if ranked]
        assert hit.score == pytest.approx(
            sum(1 / (FUSION + rank) for rank in ranks), abs=1e-6
        )
    scores = [hit.score for hit in answer.hits]
    assert scores == sorted(scores, reverse=True)
    assert sum(bool(hit.meaning and hit.words) for hit in answer.hits) > 5
    near, words = [("a", 1), ("b", 0)], [("b", 0), ("c", 2)]
    assert list(merge(near, words)) == [("b", 0), ("a", 1), ("c", 2)]


def test_search_without_vectors_explains_how_to_add_them(
    session: Session, tmp_path: Path
) -> None:
    bare = Path(session.manifest_file).with_name("bare.yaml")
    bare.write_text(re.sub(r"  - cluster.*\n", "", MANIFEST))
    session_without_vectors = open_session(
        str(bare), [], str(session.store.root), until="filter"
    )
    assert (
        launch(
            session_without_vectors,
            list(session_without_vectors.plan),
            frozenset(),
            tracked=False,
            summarise=False,
        )
        == 0
    )
    answer = search(session_without_vectors, "w3 w4")
    assert answer.by == ["words"]
    assert answer.note.startswith(
        "searched by words alone: no step stored vectors; to search by meaning add a "
        "step"
    )
    assert len(answer.hits) == 10
    with pytest.raises(SearchError, match="add a step `cluster` or `dedup_semantic`"):
        search(session_without_vectors, "w3 w4", "meaning")


def test_search_rejects_a_changed_embedding_model(session: Session) -> None:
    readme = Path(session.manifest_file).parent / "model" / "README.md"
    readme.write_text("another one")
    try:
        answer = search(session, "w3 w4")
    finally:
        readme.unlink()
    assert "is not the one that cluster computed its vectors with" in answer.note
    assert answer.by == ["words"]


@pytest.mark.parametrize("text", ["", "  \n"])
def test_empty_search_is_rejected(session: Session, text: str) -> None:
    with pytest.raises(SearchError, match="the search text is empty"):
        search(session, text)


@pytest.mark.parametrize("text", ["zebra", "?!", "\x00", "\N{SNOWMAN}" * 300])
def test_absent_words_have_no_hits(session: Session, text: str) -> None:
    assert search(session, text).hits == []


def test_the_command_and_the_python_interface_answer_the_same(session: Session) -> None:
    command = [
        "search",
        session.manifest_file,
        "w3 w4 w5",
        f"--store={session.store.root}",
        "--limit=3",
    ]
    answer = search(session, "w3 w4 w5", limit=3)
    printed_json = call(*command, "--json", code=None).stdout
    assert json.loads(printed_json) == asdict(answer)
    run = gristmill.Store(session.store.root).runs[0]
    assert run.search("w3 w4 w5", limit=3) == answer
    printed = call(*command, code=None).stdout
    assert (
        f"3 of {len(texts())} documents; searched {len(texts()) - 1} by meaning"
        in printed
    )
    assert answer.hits[0].id[:16] in printed
    call(*command, "--by=smell", code=2)


def test_browser_search_escapes_its_results(session: Session) -> None:
    with TestClient(
        make_app(BrowsedRun(session)), base_url="http://127.0.0.1:4300"
    ) as client:
        assert 'href="/search"' in client.get("/").text
        assert '<form action="/search"' in client.get("/search").text
        page = client.get("/search", params={"text": "w50 script"}).text
        assert "<mark>w50</mark>" in page
        assert "&lt;<mark>script</mark>&gt;" in page
        assert "<script>" not in page
        assert (
            "dropped</span> by short"
            in client.get("/search", params={"text": "w7 w8 w9", "by": "meaning"}).text
        )
        response = client.get("/search", params={"text": " "})
        assert (response.status_code, "search text is empty" in response.text) == (
            400,
            True,
        )


def test_browser_lists_domains_with_document_links(
    session: Session,
) -> None:
    summary = session.folder("cluster").manifest()["summary"]
    with TestClient(
        make_app(BrowsedRun(session)), base_url="http://127.0.0.1:4300"
    ) as client:
        assert 'href="/domains/cluster"' in client.get("/").text
        page = client.get("/domains/cluster").text
        assert page.count("<tr>") == 1 + len(summary["domains"])
        for domain in summary["domains"]:
            assert domain["name"] in page
            listed = client.get(f"/documents?where=domain+%3D+{domain['domain']}").text
            assert f"{domain['documents']} of {len(texts())} documents" in listed
            assert f'href="/documents?where=domain+%3D+{domain["domain"]}"' in page
        assert client.get("/domains/short").status_code == 404


def test_map_has_a_dot_for_each_document_in_the_colour_of_its_domain() -> None:
    svg = dot_map([(-1.0, 0.0, 0), (3.0, 2.0, 9)], [(1.0, 1.0, "9")])
    assert svg.count("<circle") == 2
    assert [f"series-{number}," in svg for number in (0, 1, 2)] == [True, True, False]
    assert "<circle" not in dot_map([], [])


def test_a_snippet_begins_before_the_first_word_and_marks_all() -> None:
    text = "a\n" * 200 + "the Mill grinds"
    pieces = snippet(text, ["mill"])
    assert pieces.startswith("... a a")
    spans = marked(pieces, ["mill", "grinds"])
    assert [span.text for span in spans if span.mark] == ["Mill", "grinds"]
    assert marked("plain", []) == [Span("plain")]


def test_wrapped_lines_of_a_hit_are_indented(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    hit = SearchHit(
        id="ab" * 16,
        source="web",
        locator="a.txt",
        url=None,
        score=0.02,
        meaning=None,
        words=WordsRank(rank=1, bm25=1.0),
        kept=True,
        dropped_by=None,
        reason=None,
        characters=128,
        snippet="the mill grinds " * 8,
    )
    SearchHits("mill", ["words"], 9, None, 9, 1, None, [hit]).show()
    lines = capsys.readouterr().out.rstrip().splitlines()
    wrapped = lines[lines.index("a.txt") + 1 :]
    assert len(wrapped) >= 6
    assert all(line[:4] == "    " and line[4] != " " for line in wrapped)
    assert max(map(len, wrapped)) <= 40

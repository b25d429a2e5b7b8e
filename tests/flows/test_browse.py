"""Pages of `gristmill browse`: their content, their refusals, and the escaping of
documents.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient

from gristmill.dataprep.arrow_dataset import CorpusDataset
from gristmill.dataprep.corpus import Corpus
from gristmill.flows.browser.browsed_run import BrowsedRun
from gristmill.flows.browser.server import PAGES, make_app
from gristmill.flows.pages.addresses import Search
from gristmill.flows.pages.page_html import HEADERS
from gristmill.flows.pages.text_diff import word_diff
from gristmill.flows.report.stage_summaries import StepSummary, read_as
from gristmill.flows.running.session import Session, open_session
from tests.flows.browsed import ADDRESSED, make_run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Session:
    """A run with all stages committed except training."""
    return make_run(tmp_path_factory.mktemp("browsed"))


@pytest.fixture(scope="module")
def run(session: Session) -> BrowsedRun:
    return BrowsedRun(session)


def client_of(run: BrowsedRun) -> TestClient:
    return TestClient(
        make_app(run), base_url="http://127.0.0.1:4300", raise_server_exceptions=False
    )


@pytest.fixture(scope="module")
def client(run: BrowsedRun) -> Iterator[TestClient]:
    with client_of(run) as test_client:
        yield test_client


class Elements(HTMLParser):
    """The elements of a page, and its links."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    @property
    def links(self) -> list[str]:
        return [
            attributes["href"] or "" for tag, attributes in self.found if tag == "a"
        ]


def text_of(page: str) -> str:
    return " ".join(
        unescape(re.sub(r"<[^>]*>", " ", page.replace("<wbr>", ""))).split()
    )


def text_of_spans(page: str, marks: str) -> str:
    """Return the text with these marks, a regular expression."""
    spans = re.findall(rf'<span class="(?:{marks})">(.*?)</span>', page, flags=re.S)
    return unescape("".join(spans))


def shown_ids(page: str) -> list[str]:
    """Return the ids of a list's documents, in order."""
    return re.findall(r'<h5><a href="/documents/([0-9a-f]{32})"', page)


def every_id(client: TestClient, link: str) -> list[str]:
    """Return the ids of the documents on all pages of a list."""
    ids: list[str] = []
    while True:
        page = client.get(link).text
        ids += shown_ids(page)
        following = re.search(r'<a href="([^"]+)" rel="next"', page)
        if following is None:
            return ids
        link = unescape(following[1])


def rows_of(session: Session, *columns: str) -> list[dict[str, Any]]:
    corpus = Corpus(BrowsedRun(session).corpus("documents"))
    return CorpusDataset.of(corpus, columns, kept=None).to_table().to_pylist()


def kind_of(link: str) -> str:
    """Return a link without its numbers and values."""
    path, _, query = link.partition("?")
    return re.sub(r"[0-9a-f]{32}|\d+", "N", path) + re.sub("=[^&]*", "", query)


def test_all_links_resolve_and_document_text_is_escaped(
    client: TestClient,
) -> None:
    queue, visited, kinds = ["/"], {"/"}, set()
    while queue:
        link = queue.pop()
        answer = client.get(link)
        assert answer.status_code == 200, (link, text_of(answer.text))
        assert {name: answer.headers[name] for name in HEADERS} == HEADERS
        kinds.add(kind_of(link.partition("?")[0]))
        elements = Elements(answer.text)
        assert not {"script", "img", "iframe", "style", "base", "object"} & {
            tag for tag, _ in elements.found
        }, link
        attributes = {name for _, named in elements.found for name in named}
        assert "style" not in attributes
        assert not [name for name in attributes if name.startswith("on")]
        for target in elements.links:
            assert target.startswith("/"), target
            # Visit only some pages of each listing.
            alike = list(map(kind_of, visited)).count(kind_of(target))
            if target not in visited and alike < 4:
                visited.add(target)
                queue.append(target)
    assert {
        "/",
        "/documents",
        "/documents/N",
        "/cuts",
        "/duplicates/dedup",
        "/duplicates/dedup/N",
        "/rows/mix",
        "/rows/mix/N",
        "/rows/sft_data/N",
        "/training/pretrain",
        "/training/pretrain/N",
        "/training/sft",
        "/examples/N",
    } <= kinds


@pytest.mark.parametrize(
    ("query", "matches"),
    [
        ({}, lambda row: True),
        ({"source": "notes"}, lambda row: row["source"] == "notes"),
        ({"outcome": "kept"}, lambda row: row["kept"]),
        (
            {"outcome": "dropped", "step": "filter-2"},
            lambda row: row["dropped_by"] == "filter-2",
        ),
        ({"reason": "near_duplicate"}, lambda row: row["reason"] == "near_duplicate"),
        (
            {"where": "filter_words BETWEEN 30 AND 60"},
            lambda row: 30 <= (row["filter_words"] or 0) <= 60,
        ),
        (
            {"where": "filter_words > 100 AND kept"},
            lambda row: row["kept"] and row["filter_words"] > 100,
        ),
    ],
)
def test_search_lists_matching_documents_in_corpus_order(
    client: TestClient, session: Session, query: dict[str, Any], matches: Any
) -> None:
    rows = rows_of(
        session, "id", "source", "kept", "dropped_by", "reason", "filter_words"
    )
    expected = [row["id"] for row in rows if matches(row)]
    link = Search(**query).link()
    assert every_id(client, link) == expected
    assert f"{len(expected)} of {len(rows)} documents" in text_of(client.get(link).text)


def test_document_page_shows_text_before_and_after_edits(
    client: TestClient, session: Session
) -> None:
    (id_,) = (
        row["id"]
        for row in rows_of(session, "id", "text")
        if ADDRESSED[:9] in row["text"]
    )
    page = client.get(f"/documents/{id_}").text
    assert re.search(
        r'<del title="clean">somebody@mail\.org</del><ins title="clean">[^<]+</ins>',
        page,
    )
    assert "&lt;script&gt;document.title" in page
    assert "{{ 7 * 7 }}" in page
    assert "javascript:alert(1)" in text_of(page)  # as text, not as a link
    assert "clean kept" in text_of(page)


def test_long_document_is_truncated_with_a_link_to_its_full_text(
    client: TestClient, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gristmill.flows.browser import document_page

    monkeypatch.setattr(document_page, "MOST_CHARACTERS", 50)
    texts = {
        row["original_text"]: f"/documents/{row['id']}"
        for row in rows_of(session, "id", "original_text")
    }
    longest = max(texts, key=len)
    page = unescape(client.get(texts[longest]).text)
    assert longest[:50] in page
    assert longest[:60] not in page
    assert longest in unescape(client.get(f"{texts[longest]}?whole=true").text)


def test_cut_page_shows_nearest_dropped_and_passed_documents(
    client: TestClient,
) -> None:
    page = client.get("/cuts/filter.rules.gopher_quality.min_words").text
    dropped, passed = (
        list(map(int, re.findall(r"<h5><b>(\d+)</b>", side)))
        for side in page.partition("<h4>Passed")[::2]
    )
    assert dropped == sorted(dropped, reverse=True)
    assert passed == sorted(passed)
    assert dropped[0] < 20 <= passed[0]
    bins = re.findall(r'<td class="n">([\d,]+)</td><td(?: class="n")?><svg', page)
    assert sum(map(int, bins)) == 69
    assert int(bins[-1]) > 0  # empty bins at the end are left out


def test_cluster_page_shows_the_differences_of_a_pair(client: TestClient) -> None:
    list_page = client.get("/duplicates/dedup").text
    assert "dedup dropped 2 documents of 2 clusters" in text_of(list_page)
    pages = [
        client.get(link).text
        for link in Elements(list_page).links
        if re.fullmatch("/duplicates/dedup/[0-9a-f]{32}", link)
    ]
    assert sum("These two are equal" in text_of(page) for page in pages) == 1
    assert [
        re.findall("<(ins|del)>([^<]*)</", page)
        for page in pages
        if "are equal" not in page
    ] == [[("ins", "One more.")]]


def test_row_page_shows_tokens_with_boundaries_and_loss_masks(
    client: TestClient, run: BrowsedRun
) -> None:
    packed = run.packed("mix")
    page = client.get("/rows/mix/3").text
    text = text_of_spans(page, "plain|masked")
    assert text == run.tokenizer().decode(packed.read([3])[0].tolist())
    assert page.count("<pre>") == len(packed.pieces([3]))
    masked = client.get("/rows/sft_data/0").text
    assert "&lt;|assistant|" in masked
    assert "<|user|>" in text_of_spans(masked, "masked")
    assert "<|user|>" not in text_of_spans(masked, "trained")


def test_page_of_a_future_step_shows_the_rows_it_will_read(
    client: TestClient,
) -> None:
    page = text_of(client.get("/training/pretrain/2").text)
    assert "It will read 4 rows with 256 tokens of" in page
    answer = client.get("/training/pretrain?step=2", follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (
        303,
        "/training/pretrain/2",
    )


def test_find_redirects_an_id_or_locator_to_its_page(
    client: TestClient, session: Session
) -> None:
    document = rows_of(session, "id", "locator")[5]
    page = f"/documents/{document['id']}"
    for name in (document["id"][:12], document["locator"]):
        answer = client.get("/find", params={"wanted": name}, follow_redirects=False)
        assert (answer.status_code, answer.headers["location"]) == (303, page)


def test_prepared_examples_show_their_drop_reason_and_link_to_duplicates_and_rows(
    client: TestClient,
) -> None:
    (dropped_id,) = every_id(client, "/documents?corpus=sft_prepare&outcome=dropped")
    page = client.get(f"/documents/{dropped_id}").text
    links = Elements(page).links
    assert "dropped by sft_prepare: dedup: exact_duplicate" in text_of(page)
    assert every_id(
        client, next(link for link in links if "reason=exact_duplicate" in link)
    ) == [dropped_id]
    kept_id = every_id(client, "/documents?corpus=sft_prepare&outcome=kept")[0]
    links += Elements(client.get(f"/documents/{kept_id}").text).links
    for address, text in (
        ("/duplicates/dedup/", "These two are equal"),
        ("/examples/", r"row \d+ of sft_data"),
    ):
        target = next(link for link in links if link.startswith(address))
        assert re.search(text, text_of(client.get(target).text))


@pytest.mark.parametrize(
    ("link", "status", "message"),
    [
        ("/documents?where=nonsense%3D1", 400, "nonsense"),
        ("/documents?where=read_text('/etc/passwd')", 400, "not allowed"),
        ("/documents?colour=red", 400, "query.colour: Extra inputs are not permitted"),
        ("/cuts?colour=red", 400, "colour: Unexpected keyword argument"),
        ("/documents?after=9999-1", 200, "None of them fits"),
        ("/documents?after=../..", 400, "after:"),
        ("/documents?outcome=lost", 400, "outcome:"),
        (
            "/documents?corpus=nonsense",
            404,
            "there is no corpus 'nonsense'; this run has documents, sft_prepare",
        ),
        (
            "/documents/ffffffffffff",
            404,
            "no document has the id, locator or address 'ffffffffffff'",
        ),
        (
            "/cuts/nonsense",
            404,
            "there is no rule 'nonsense'; rules are "
            "filter.rules.gopher_quality.min_words",
        ),
        (
            "/duplicates/filter",
            404,
            "filter of documents has looked for no duplicates yet; steps that have "
            "are dedup",
        ),
        ("/duplicates/dedup/00", 400, "cluster:"),
        (f"/duplicates/dedup/{'0' * 32}", 404, "dedup has no cluster"),
        ("/rows/mix/99999999", 404, "rows, counted from 0; there is no row 99,999,999"),
        ("/rows/mix/-1", 400, "row: Input should be greater than or equal to 0"),
        ("/rows/mix/99999999999999999999999", 400, "row:"),
        (
            "/rows/mix?held_out=nobody",
            404,
            "mix holds no rows of 'nobody' out; sources are notes, web",
        ),
        ("/rows/filter", 404, "filter makes no rows; those that do are mix, sft_data"),
        ("/rows/nonsense", 404, "there is no stage 'nonsense'"),
        (
            "/training/filter",
            404,
            "the steps of filter cannot be traced; those of pretrain, sft",
        ),
        ("/training/pretrain/7", 404, "pretrain has 6 steps; there is no step 7"),
        (
            "/training/sft/1",
            404,
            "the examples that sft reads are known once it has started",
        ),
        ("/find", 400, "wanted: Missing required argument"),
        ("/find?wanted=%00", 404, "no document has the id, locator or address"),
        ("/nonsense", 404, "Not Found"),
    ],
)
def test_invalid_address_gets_an_error_page_with_one_sentence(
    client: TestClient, link: str, status: int, message: str
) -> None:
    answer = client.get(link)
    assert answer.status_code == status
    assert message in text_of(answer.text)
    assert "Traceback" not in answer.text
    assert (
        answer.headers["content-security-policy"] == HEADERS["content-security-policy"]
    )


def test_invalid_value_in_an_output_is_a_server_error(
    run: BrowsedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(run: BrowsedRun) -> str:
        return str(read_as(StepSummary, {"lost": "many"}))

    monkeypatch.setitem(PAGES, "/cuts", broken)
    with client_of(run) as client:
        assert client.get("/cuts").status_code == 500


def test_foreign_hosts_sites_and_methods_are_rejected(
    client: TestClient,
) -> None:
    for host in ("rebound.example", "127.0.0.1.rebound.example:4300", ""):
        assert client.get("/documents", headers={"Host": host}).status_code == 400
    for site in ("cross-site", "same-site"):
        forbidden = client.get(
            "/documents", headers={"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "no-cors"}
        )
        assert (forbidden.status_code, "Documents" in forbidden.text) == (403, False)
    linked = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    assert client.get("/documents", headers=linked).status_code == 200
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH"):
        assert client.request(method, "/documents").status_code == 405
    answer = client.get("/documents", headers={"Origin": "http://elsewhere.example"})
    assert [name for name in answer.headers if name.startswith("access-control")] == []


def test_pages_without_data_name_the_command_to_run(
    session: Session, tmp_path: Path
) -> None:
    folder = Path(session.manifest_file).parent
    empty_session = open_session(session.manifest_file, [], str(tmp_path / "store"))
    with client_of(BrowsedRun(empty_session)) as client:
        assert "No documents are read yet. Start with" in text_of(client.get("/").text)
        for link in ("/documents", "/cuts", "/rows/mix"):
            answer = client.get(link)
            assert (answer.status_code, "run:" in text_of(answer.text)) == (404, True)
        # The running server sees new commits.
        for stage in ("ingest", "clean"):
            shutil.copytree(folder / "store" / stage, tmp_path / "store" / stage)
        assert "69 of 69 documents" in text_of(client.get("/documents").text)
        assert "mix is not committed yet" in text_of(client.get("/rows/mix").text)
        assert client.get("/documents?where=words").status_code == 400


def test_damaged_output_breaks_only_its_own_pages(
    session: Session, tmp_path: Path
) -> None:
    shutil.copytree(Path(session.manifest_file).parent / "store", tmp_path / "store")
    damaged_session = open_session(session.manifest_file, [], str(tmp_path / "store"))
    ids = [row["id"] for row in rows_of(damaged_session, "id")]
    shard = min(damaged_session.folder("ingest").data.glob("part-*.parquet"))
    content = bytearray(shard.read_bytes())
    content[40:400] = bytes(360)
    shard.write_bytes(content)
    with client_of(BrowsedRun(damaged_session)) as client:
        answer = client.get("/documents")
        assert answer.status_code == 500
        assert re.search(
            r"is damaged: .*`gristmill verify MANIFEST --repair` and a run make it again",
            text_of(answer.text),
        ), text_of(answer.text)
        assert client.get("/").status_code == 200
        assert client.get(f"/documents/{ids[-1]}").status_code in (200, 500)
        (damaged_session.folder("mix").data / "train-00000.docs.parquet").unlink()
        answer = client.get("/rows/mix/0")
        assert answer.status_code == 500
        assert "train-00000.docs.parquet" in text_of(answer.text)


WORDY = st.lists(
    st.sampled_from(["a", "b", "river", ".", "\n", " ", "  ", "!", "é"]), max_size=40
).map("".join)


@given(WORDY, WORDY)
def test_word_diff_contains_both_texts(before: str, after: str) -> None:
    spans = word_diff(before, after)

    def without(mark: str) -> str:
        text = "".join(span.text for span in spans if span.mark != mark)
        return "".join(text.split())

    assert without("added") == "".join(before.split())
    assert without("removed") == "".join(after.split())
    words = [re.findall(r"\w+|[^\w\s]", text) for text in (before, after)]
    assert any(span.mark for span in spans) == (words[0] != words[1])


def test_only_the_beginnings_of_long_texts_are_compared() -> None:
    words = [f"word{number} " for number in range(6000)]
    new_words = list(words)
    new_words[7], new_words[5500] = "river ", "sea "
    spans = word_diff("".join(words), "".join(new_words))
    assert [span.text for span in spans if span.mark] == ["word7 ", "river "]
    text = "".join(span.text for span in spans if span.mark != "removed")
    assert text == "".join(new_words[:5000])

"""A step `dedup_semantic` in a run: explain, the report, pages of duplicates,
refusals.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from gristmill.flows.browser.browsed_run import BrowsedRun
from gristmill.flows.browser.server import make_app
from gristmill.flows.questions.explain import Judgement, history
from gristmill.flows.report.report import render_report
from gristmill.flows.running.session import Session
from gristmill.mixtures.loader import ManifestError
from tests.dataprep.small_models import write_word_vectors
from tests.jsonl import write_jsonl
from tests.sessions import open_beside, run_all

pytestmark = pytest.mark.slow

MANIFEST = """
name: meanings
sources: {web: {path: web.jsonl, id_field: key}}
prepare:
  - dedup
  - dedup_semantic: {model: model, threshold: 0.95}
  - cluster: {model: model, k: 2}
  - filter: {rules: []}
tokenizer: {vocab_size: 300}
"""
TEXTS = {
    "first": "w1 w2 w3 w4 w5 w6",
    "other order": "w6 w5 w4 w3 w2 w1",
    "else": "w40 w41 w42 w43",
}


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Session:
    """A session whose documents are prepared."""
    folder = tmp_path_factory.mktemp("meanings")
    write_word_vectors(folder / "model")
    write_jsonl(
        folder / "web.jsonl",
        [{"key": key, "text": text} for key, text in TEXTS.items()],
    )
    (folder / "meanings.yaml").write_text(MANIFEST)
    new_session = open_beside(folder / "meanings.yaml", until="cluster")
    assert run_all(new_session) == 0
    return new_session


def test_explain_names_the_kept_document_and_the_cosine(
    session: Session,
) -> None:
    (kept_key,) = [
        key for key in ("first", "other order") if not _dropped(session, key)
    ]
    (dropped_key,) = {"first", "other order"} - {kept_key}
    verdict = _dropped(session, dropped_key)
    assert verdict is not None
    assert verdict.reason == "semantic_duplicate"
    assert verdict.values["duplicate_of"] == history(session, kept_key).id
    assert verdict.values["cosine"] == 1.0
    assert not _dropped(session, "else")


def _dropped(session: Session, key: str) -> Judgement | None:
    verdict = next(
        verdict
        for verdict in history(session, key).stages
        if verdict.stage == "dedup_semantic"
    )
    return None if verdict.keep else verdict


def test_the_report_has_the_reason_the_clusters_and_the_model(session: Session) -> None:
    page = render_report(session, None).replace("<wbr>", "")
    assert "semantic_duplicate" in page
    assert "1 clusters of two or more documents" in page
    assert "Model of dedup_semantic" in page


def test_the_report_names_the_domains_and_draws_them(session: Session) -> None:
    page = render_report(session, None).replace("<wbr>", "")
    assert "Domains of cluster" in page
    assert "Model of cluster" in page
    judged = {
        key: next(
            cluster_verdict
            for cluster_verdict in history(session, key).stages
            if cluster_verdict.stage == "cluster"
        )
        for key in ("first", "else")
        if not _dropped(session, key)
    }
    assert {
        cluster_verdict.values["domain"] for cluster_verdict in judged.values()
    } <= {0, 1}


def test_the_pages_of_duplicates_show_the_cosine(session: Session) -> None:
    with TestClient(
        make_app(BrowsedRun(session)), base_url="http://127.0.0.1:4300"
    ) as client:
        listed = client.get("/duplicates/dedup_semantic").text
        (link,) = set(
            re.findall('href="(/duplicates/dedup_semantic/[0-9a-f]{32})"', listed)
        )
        page = client.get(link).text
        assert "Cosine of these two: <b>1" in page
        assert "found by meaning" in page
        assert "Jaccard" not in page


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ("{model: absent}", "there is no such folder"),
        ("{model: model, keep: [lenght desc]}", "there is no column 'lenght'"),
        ("{model: web.jsonl}", "there is no such folder"),
        ("{threshold: 0.9}", "model"),
    ],
)
def test_invalid_semantic_dedup_is_rejected_before_any_work(
    session: Session, tmp_path: Path, step: str, message: str
) -> None:
    write_word_vectors(tmp_path / "model")
    (tmp_path / "web.jsonl").write_text('{"key": "a", "text": "w1"}\n')
    (tmp_path / "wrong.yaml").write_text(
        re.sub(r"\{model: model, .*", step, MANIFEST, count=1)
    )
    with pytest.raises(ManifestError) as caught:
        open_beside(tmp_path / "wrong.yaml")
    assert message in str(caught.value)
    assert "dedup_semantic" in str(caught.value)

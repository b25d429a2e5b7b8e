"""Generated sources: documents that a model writes from documents, with lineage in
every command that reports it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gristmill.dataprep.documents import read_documents, read_table, shard_names
from gristmill.dataprep.llm.answer_store import forget_answers
from gristmill.dataprep.llm.lineage import LINEAGE, descendants
from gristmill.flows.questions.explain import history
from gristmill.flows.questions.find_documents import committed_corpus, committed_inputs
from gristmill.flows.report.report import render_report
from gristmill.flows.running.session import Session, open_session
from gristmill.mixtures.loader import ManifestError
from tests.chat_endpoint import Does, Ended, Endpoint, Refuse
from tests.jsonl import write_jsonl
from tests.sessions import open_beside, run_all

WORDS = (
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi "
    "omicron pi rho sigma tau upsilon"
).split()
TEXTS = [f"{WORDS[at]} {WORDS[-at - 1]} " * 12 + f"number {at}" for at in range(10)]
MANIFEST = """
name: taught
seed: 7
sources:
  web: {{path: web.jsonl, licence: CC-BY-4.0}}
  words:
    generate:
      parents: [web]
      style: textbook
      per_document: 2
      model: {{endpoint: "{url}", model: writer, max_tokens: 100, seed: 1, api_key_env: TAUGHT_KEY}}
      {more}
    weight: 0.25
  asked:
    generate: {{parents: [words], style: question_answer, share: 0.5, model: {{endpoint: "{url}", model: writer}}}}
prepare:
  - dedup: {{exact: true}}
"""


def write(prompt: str, earlier_requests: int) -> Does:
    """A writer: a distinct text for each prompt, the parent's own text for number 3, an
    empty text for 4 and a truncated one for 5.
    """
    text = prompt.rsplit("\n\n", 1)[-1].removeprefix("The text:\n")
    if "number 3" in text:
        return text
    if "number 4" in text:
        return "   "
    if "number 5" in text:
        return Ended("It was a dark and")
    return (
        f"About {text.split()[0]} one may say, the {earlier_requests + 1}st time: "
        + " ".join(reversed(text.split()))
    )


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    monkeypatch.setenv("TAUGHT_KEY", "sk-a-key-of-nobody")
    with Endpoint(write) as running_endpoint:
        yield running_endpoint


@pytest.fixture
def manifest(endpoint: Endpoint, tmp_path: Path) -> Path:
    write_jsonl(tmp_path / "web.jsonl", [{"text": text} for text in TEXTS])
    return written(tmp_path, endpoint)


def written(folder: Path, endpoint: Endpoint, extra_settings: str = "") -> Path:
    (folder / "taught.yaml").write_text(
        MANIFEST.format(url=endpoint.url, more=extra_settings)
    )
    return folder / "taught.yaml"


def ran(manifest: Path) -> Session:
    session = open_beside(manifest, until="dedup")
    assert run_all(session) == 0
    return session


def documents(session: Session) -> list[dict[str, Any]]:
    inputs = committed_inputs(session)
    return [
        row
        for shard in shard_names(inputs["ingest"])
        for row in read_documents({"ingest": inputs["ingest"]}, shard).to_pylist()
    ]


@pytest.mark.slow
def test_generated_documents_have_lineage_in_explain_licences_and_report(
    manifest: Path, endpoint: Endpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    session = ran(manifest)
    assert list(session.plan) == ["generate", "ingest", "dedup"]
    all_documents = documents(session)
    by_source = {
        name: [document for document in all_documents if document["source"] == name]
        for name in ("web", "words", "asked")
    }
    parents = {document["id"].hex(): document for document in by_source["web"]}
    assert len(by_source["words"]) == 16
    assert len(by_source["asked"]) in range(2, 15)
    for child in by_source["words"]:
        metadata = json.loads(child["metadata"])
        assert (metadata["kind"], metadata["style"], metadata["model"]) == (
            "generated",
            "textbook",
            "writer",
        )
        assert parents[metadata["parents"]]["text"].split()[-1] in child["text"]

    inputs = committed_inputs(session)
    lineage = read_table(inputs["generate"] / LINEAGE).to_pylist()
    assert {row["child"] for row in lineage} == {
        document["id"] for document in all_documents
    } - {document["id"] for document in by_source["web"]}
    first = next(
        document for document in by_source["web"] if document["text"] == TEXTS[0]
    )
    descendant_ids = descendants(inputs, [first["id"]])
    assert sum(document["id"] in descendant_ids for document in by_source["words"]) == 2
    explained = history(session, first["id"].hex())
    assert set(explained.children) == {document.hex() for document in descendant_ids}
    child = next(
        document for document in by_source["words"] if document["id"] in descendant_ids
    )
    assert history(session, child["id"].hex()).parents == [first["id"].hex()]

    assert session.manifest.licences == {
        "web": "CC-BY-4.0",
        "words": "CC-BY-4.0",
        "asked": "CC-BY-4.0",
    }
    corpus = committed_corpus(session)
    licences = corpus.read(corpus.shards[0], ["licence"], kept=None)["licence"]
    assert set(licences.to_pylist()) == {"CC-BY-4.0"}

    summary = session.folder("generate").manifest()["summary"]["generated"]["words"]
    assert (
        summary["requests"]
        == 20
        == summary["kept"] + sum(summary["dropped"].values()) + summary["quarantined"]
    )
    assert summary["dropped"] == {"generate/empty": 2, "generate/cut": 2}
    assert "Generated documents" in render_report(session, None).replace("<wbr>", "")
    for path in (manifest.parent / "store").rglob("*"):
        assert path.is_dir() or b"sk-a-key-of-nobody" not in path.read_bytes(), path
    # headers of the last source, which names no key
    assert endpoint.headers.get("authorization") is None
    assert "sk-a-key" not in capsys.readouterr().out


@pytest.mark.slow
def test_child_of_several_parents_inherits_licences_and_is_taken_down_with_any_parent(
    endpoint: Endpoint, tmp_path: Path
) -> None:
    licences = ("MIT", "CC0-1.0")
    write_jsonl(
        tmp_path / "web.jsonl",
        [{"text": text, "licence": licences[at % 2]} for at, text in enumerate(TEXTS)],
    )
    (tmp_path / "join.j2").write_text(
        "Join\n{% for one in others %}{{ one }}\n{% endfor %}\n\nThe text:\n{{ text }}"
    )
    manifest = written(
        tmp_path, endpoint, f"template: {tmp_path / 'join.j2'}\n      others: 2"
    )
    session = ran(manifest)
    all_documents = documents(session)
    by_id = {document["id"].hex(): document for document in all_documents}
    inputs = committed_inputs(session)
    pairs = {
        (row["parent"].hex(), row["child"].hex())
        for row in read_table(inputs["generate"] / LINEAGE).to_pylist()
    }
    children = [document for document in all_documents if document["source"] == "words"]
    assert children
    for child in children:
        metadata = json.loads(child["metadata"])
        parents = metadata["parents"].split()
        assert len(set(parents)) == 3
        assert {(parent, child["id"].hex()) for parent in parents} <= pairs
        parent_licences = {
            json.loads(by_id[document]["metadata"])["licence"] for document in parents
        }
        assert set(metadata["licence"].split(" AND ")) == parent_licences
        assert history(session, child["id"].hex()).parents == parents
        assert all(
            child["id"] in descendants(inputs, [bytes.fromhex(document)])
            for document in parents
        )
        assert all(
            forget_answers(tmp_path / "store" / "answers", {document}, remove=False)[
                "answers"
            ]
            for document in parents
        )


@pytest.mark.slow
def test_dedup_drops_generated_copies_of_the_parent(manifest: Path) -> None:
    counts = ran(manifest).folder("dedup").manifest()["summary"]["counts"]
    assert sum(counts["dropped"].values()) >= 2
    assert counts["read"] == counts["kept"] + sum(counts["dropped"].values())


@pytest.mark.slow
def test_larger_limit_requests_only_additional_parents(
    manifest: Path, endpoint: Endpoint, tmp_path: Path
) -> None:
    written(tmp_path, endpoint, "limit: 4")
    first_locators = {
        document["locator"]
        for document in documents(ran(manifest))
        if document["source"] == "words"
    }
    first_requests = endpoint.asked.total()
    written(tmp_path, endpoint, "limit: 6")
    second_locators = {
        document["locator"]
        for document in documents(ran(manifest))
        if document["source"] == "words"
    }
    assert first_locators < second_locators
    assert endpoint.asked.total() < 2 * first_requests
    written(tmp_path, endpoint, "limit: 4")
    requests_before = endpoint.asked.total()
    assert {
        document["locator"]
        for document in documents(ran(manifest))
        if document["source"] == "words"
    } == first_locators
    assert endpoint.asked.total() == requests_before


@pytest.mark.slow
def test_steps_choose_among_the_parents(
    manifest: Path, endpoint: Endpoint, tmp_path: Path
) -> None:
    written(tmp_path, endpoint, "prepare: [{dedup: {exact: true}}]")
    lines = [json.dumps({"text": text}) + "\n" for text in [*TEXTS, *TEXTS]]
    (tmp_path / "web.jsonl").write_text("".join(lines))
    summary = (
        ran(manifest).folder("generate").manifest()["summary"]["generated"]["words"]
    )
    assert (summary["parents"], summary["requests"]) == (10, 20)


def test_fingerprint_contains_the_rubric_but_not_the_endpoint_of_a_judge(
    endpoint: Endpoint, tmp_path: Path
) -> None:
    (tmp_path / "web.jsonl").write_text(json.dumps({"text": TEXTS[0]}) + "\n")

    def fingerprint(settings: str, rubric: str = "quality") -> str:
        judge_settings = f"model: {{model: judge, {settings}}}, at_least: 3"
        steps = (
            f"{{quality: {{judge: {{{judge_settings}, rubric: {rubric}}}, distil: fasttext}}}}, "
            f"{{judge: {{model: {{model: judge, {settings}}}, rubric: {rubric}}}}}"
        )
        manifest = written(tmp_path, endpoint, f"prepare: [{steps}]")
        return (
            open_session(str(manifest), [], str(tmp_path / "store"), until="dedup")
            .plan["generate"]
            .fingerprint
        )

    endpoint_setting = 'endpoint: "http://127.0.0.1:1/v1"'
    assert fingerprint(endpoint_setting) == fingerprint(
        'endpoint: "http://127.0.0.1:2/v1", concurrency: 2, budget: {requests: 9}'
    )
    assert fingerprint(endpoint_setting) != fingerprint(
        f"{endpoint_setting}, temperature: 0.5"
    )
    assert fingerprint(endpoint_setting) != fingerprint(
        endpoint_setting, rubric="toxicity"
    )


@pytest.mark.slow
def test_refused_requests_are_quarantined_and_limited(
    manifest: Path,
    endpoint: Endpoint,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    endpoint.behaviour = lambda prompt, earlier_requests: (
        Refuse(400, "too long")
        if "number 7" in prompt
        else write(prompt, earlier_requests)
    )
    session = open_session(str(manifest), [], str(tmp_path / "store"), until="dedup")
    assert run_all(session) == 1
    assert "2 of 20 records (10.0%) could not be processed" in capsys.readouterr().err
    written(tmp_path, endpoint, "max_quarantined: 0.2")
    session = ran(manifest)
    lines = (
        (session.folder("generate").data / "quarantine" / "words.jsonl")
        .read_text()
        .splitlines()
    )
    assert ["400 too long" in json.loads(line)["error"] for line in lines] == [
        True,
        True,
    ]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("parents: [web]", "parents: [wbe]", "no such source: 'wbe'"),
        ("parents: [web]", "parents: [asked]", "made from each other in a cycle"),
        ("style: textbook", "style: translate", "style translate needs `language`"),
        ("style: textbook", "style: persona", "style persona needs `personas`"),
        ("style: textbook", "stile: textbook", "unknown key, did you mean 'style'"),
    ],
)
def test_invalid_generation_settings_are_rejected_before_any_work(
    manifest: Path, old: str, new: str, message: str
) -> None:
    manifest.write_text(manifest.read_text().replace(old, new))
    with pytest.raises(ManifestError, match=message):
        open_beside(manifest, until="dedup")


def test_unreachable_model_and_missing_key_are_reported_before_any_stage_runs(
    manifest: Path,
    endpoint: Endpoint,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Endpoint() as closed_endpoint:
        closed_url = closed_endpoint.url
    monkeypatch.delenv("TAUGHT_KEY")
    manifest.write_text(
        manifest.read_text().replace(
            f'model: {{endpoint: "{endpoint.url}", model: writer}}',
            f'model: {{endpoint: "{closed_url}", model: away}}',
        )
    )
    store = manifest.parent / "store"
    session = open_session(str(manifest), [], str(store), until="dedup")
    assert run_all(session) == 1
    error_text = capsys.readouterr().err
    assert "generate: `api_key_env` of the model writer names $TAUGHT_KEY" in error_text
    assert (
        f"generate: no endpoint of the model away answers ({closed_url}: connection "
        "refused)" in error_text
    )
    assert not list(store.rglob("stage.json"))
    assert not endpoint.asked


def test_template_of_a_judge_of_parents_is_checked_before_any_work(
    manifest: Path, endpoint: Endpoint
) -> None:
    (manifest.parent / "wrong.j2").write_text("{{ txt }}")
    written(
        manifest.parent,
        endpoint,
        f"prepare: [{{judge: {{model: {{endpoint: '{endpoint.url}', model: judge}}, template: wrong.j2}}}}]",
    )
    with pytest.raises(ManifestError, match=r"there is no 'txt'"):
        open_beside(manifest, until="dedup")


@pytest.mark.parametrize(
    "name", sorted(path.name for path in Path("dataprep/llm/templates").glob("*.j2"))
)
def test_every_built_in_template_renders(name: str) -> None:
    from gristmill.dataprep.examples import example_candidates
    from gristmill.dataprep.llm import generated_documents, judge, judge_pairs
    from gristmill.dataprep.llm.prompt_templates import shipped

    variables = {
        "generate": generated_documents.GIVEN,
        "judge": judge.GIVEN,
        "compare": judge_pairs.GIVEN,
        "critique": example_candidates.CRITIQUE,
        "revision": example_candidates.REVISION,
        "score": example_candidates.SCORING,
    }[name.removesuffix(".j2").partition("-")[0]]
    template = shipped(name.removesuffix(".j2"))
    template.check(variables)
    values = {
        "text": "THE TEXT",
        "prompt": "THE TEXT",
        "persona": "a smith",
        "language": "German",
        "principle": "Be kind.",
    }
    filled_text = template.fill(
        dict.fromkeys(variables, "")
        | {key: value for key, value in values.items() if key in variables}
    )
    assert "THE TEXT" in filled_text
    assert os.linesep * 3 not in filled_text

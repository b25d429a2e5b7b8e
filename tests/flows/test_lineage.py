"""Lineage of generated documents in trace, takedown, decontamination and the report, on
one run.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gristmill.dataprep.documents import read_documents, read_table, shard_names
from gristmill.dataprep.llm.answer_store import KeptAnswers
from gristmill.flows.pages.page_elements import Table
from gristmill.flows.questions.find_documents import committed_inputs
from gristmill.flows.questions.takedown import forget_taken_down
from gristmill.flows.report.facts import gather_facts
from gristmill.flows.report.llm_sections import generated
from gristmill.flows.running.session import Session
from gristmill.tokenize.packed import PackedSet
from tests.chat_endpoint import Endpoint
from tests.commands import call
from tests.jsonl import write_jsonl
from tests.sessions import open_beside, run_all

pytestmark = pytest.mark.slow

EXAM = (
    "which of the four rivers that leave the garden is said to wind through the "
    "land of gold and onyx"
)
"""An evaluation item, which the model writes into the texts about document 2."""
THINGS = ("stone", "water", "bread", "lamp", "road")
TEXTS = [" ".join(f"{name}{number}" for name in THINGS) * 3 for number in range(12)]
MANIFEST = """
name: family
seed: 3
sources:
  web: {{path: web.jsonl, weight: 0.5, max_epochs: 4}}
  words:
    generate: {{parents: [web], style: textbook, per_document: 2, model: {{endpoint: "{url}", model: writer}}}}
    weight: 0.3
  asked:
    generate: {{parents: [words], style: question_answer, model: {{endpoint: "{url}", model: writer}}}}
    weight: 0.2
prepare:
  - decontaminate: {{against: [exam.jsonl]}}
tokenizer: {{vocab_size: 280}}
mix: {{tokens: 1200, sequence_length: 32}}
pretrain: {{model: {{layers: 1, width: 16, heads: 2}}, steps: 4, global_batch_size: 2}}
"""


def write(prompt: str, earlier_requests: int) -> str:
    """Return a distinct text for every prompt; the one about document 2 contains an
    evaluation item.
    """
    text = prompt.rsplit("\n\n", 1)[-1].removeprefix("The text:\n")
    subject = text.split()[0].removeprefix("of:")
    exam_text = f" {EXAM}" if subject == "stone2" else ""
    return (
        f"of:{subject} "
        + " ".join(f"{word}-{earlier_requests}" for word in reversed(text.split()[1:9]))
        + exam_text
    )


@dataclass(frozen=True)
class Ran:
    """A finished mixture.

    Attributes:
        manifest: path of its manifest.
        of_web: number of the text -> document id.
        children, grandchildren: number of the text -> ids of documents written from it,
            and from its children.
    """

    session: Session
    manifest: Path
    of_web: dict[int, str]
    children: dict[int, list[str]]
    grandchildren: dict[int, list[str]]

    def call(self, *words: str) -> str:
        outcome = call(
            words[0],
            self.manifest,
            *words[1:],
            "--store",
            self.manifest.parent / "store",
            env={"COLUMNS": "80", "TERM": "dumb"},
        )
        return outcome.stdout


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    folder = tmp_path_factory.mktemp("family")
    write_jsonl(folder / "web.jsonl", [{"text": text} for text in TEXTS])
    (folder / "exam.jsonl").write_text(json.dumps({"text": EXAM}) + "\n")
    with Endpoint(write) as endpoint:
        (folder / "family.yaml").write_text(MANIFEST.format(url=endpoint.url))
        session = open_beside(folder / "family.yaml", until="mix")
        assert run_all(session) == 0
    inputs = committed_inputs(session)
    rows = [
        row
        for shard in shard_names(inputs["ingest"])
        for row in read_documents({"ingest": inputs["ingest"]}, shard).to_pylist()
    ]
    numbered_ids = {
        name: [
            (
                int(row["text"].split()[0].removeprefix("of:").removeprefix("stone")),
                row["id"].hex(),
            )
            for row in rows
            if row["source"] == name
        ]
        for name in ("web", "words", "asked")
    }
    generations = [
        {
            number: sorted(
                document_id
                for parent_number, document_id in numbered_ids[name]
                if parent_number == number
            )
            for number in range(len(TEXTS))
        }
        for name in ("words", "asked")
    ]
    return Ran(
        open_beside(folder / "family.yaml"),
        folder / "family.yaml",
        dict(numbered_ids["web"]),
        *generations,
    )


def judged(ran: Ran, stage: str) -> dict[str, str | None]:
    inputs = committed_inputs(ran.session)
    rows: list[dict[str, Any]] = [
        row
        for shard in shard_names(inputs["ingest"])
        for row in read_table(inputs[stage] / shard).to_pylist()
    ]
    return {row["id"].hex(): row["reason"] for row in rows}


def test_trace_lists_parents_and_children_as_json_and_abbreviated(ran: Ran) -> None:
    family_ids = sorted([*ran.children[5], *ran.grandchildren[5]])
    assert (len(ran.children[5]), len(ran.grandchildren[5])) == (2, 2)
    assert (
        json.loads(ran.call("trace", "--document", ran.of_web[5], "--json"))["children"]
        == family_ids
    )
    traced = json.loads(ran.call("trace", "--document", ran.children[5][0], "--json"))
    assert traced["parents"] == [ran.of_web[5]]
    assert len(traced["children"]) == 1
    printed = ran.call("trace", "--document", ran.children[5][0])
    assert max(map(len, printed.splitlines())) <= 80
    lines = dict(
        line.split(maxsplit=1)
        for line in printed.splitlines()
        if line.startswith(("parents", "children"))
    )
    assert lines["parents"].strip() == ran.of_web[5]
    assert lines["children"].strip() == traced["children"][0]


def test_decontamination_covers_generated_text(
    ran: Ran,
) -> None:
    reasons = judged(ran, "decontaminate")
    tainted = {*ran.children[2], *ran.grandchildren[2]}
    assert {
        document_id for document_id, reason in reasons.items() if reason is not None
    } == tainted
    assert len(tainted) == 4
    assert {reasons[document_id] for document_id in tainted} == {
        "decontaminate/max_contamination"
    }


def test_takedown_removes_all_descendants(ran: Ran) -> None:
    id_file = ran.manifest.with_name("gone.txt")
    id_file.write_text(ran.of_web[5] + "\n")
    family_ids = {ran.of_web[5], *ran.children[5], *ran.grandchildren[5]}
    assessment = json.loads(
        ran.call("takedown", "--ids", str(id_file), "--dry", "--json")
    )
    assert set(assessment["excluded"]) == family_ids
    assert {document["id"] for document in assessment["generated"]} == family_ids - {
        ran.of_web[5]
    }
    packed = PackedSet(committed_inputs(ran.session)["mix"])
    rows = packed.rows_of_documents(
        [bytes.fromhex(document) for document in family_ids]
    )["row"].to_pylist()
    assert assessment["rows"] == sorted(set(rows)) != []
    printed = ran.call("takedown", "--ids", str(id_file), "--dry")
    assert (
        printed.splitlines()[0]
        == "documents: 1, near-duplicates: 0, written from them: 4; 5 to take down"
    )
    assert max(map(len, printed.splitlines())) <= 80
    child = next(
        document
        for document in assessment["generated"]
        if document["id"] == ran.children[5][0]
    )
    assert f"{child['id'][:16]}  words" in printed

    id_file.write_text(ran.children[5][0] + "\n")
    child_assessment = json.loads(
        ran.call("takedown", "--ids", str(id_file), "--dry", "--json")
    )
    # only its own child, neither parent nor sibling
    assert len(child_assessment["excluded"]) == 2
    assert set(child_assessment["excluded"]) < family_ids - {ran.of_web[5]}


def test_takedown_deletes_stored_answers_and_gc_deletes_later_ones(
    ran: Ran,
) -> None:
    def stored_answers() -> bytes:
        return b"".join(
            path.read_bytes()
            for path in sorted(ran.manifest.parent.glob("store/answers/*/*.jsonl"))
        )

    id_file = ran.manifest.with_name("forgotten.txt")
    id_file.write_text(ran.of_web[7] + "\n")
    assert stored_answers().count(b"of:stone7 ") == 4
    answers_before = stored_answers()
    assessment = json.loads(
        ran.call("takedown", "--ids", str(id_file), "--dry", "--json")
    )
    assert (assessment["answers"], assessment["unknown_answers"], stored_answers()) == (
        4,
        0,
        answers_before,
    )
    printed = ran.call("takedown", "--ids", str(id_file))
    assert "4 kept, forgotten now" in printed
    # commands are never truncated
    assert max(map(len, printed.splitlines()[:-1])) <= 80
    assert b"stone7" not in stored_answers()
    assert stored_answers().count(b"of:stone8 ") == 4
    assert (
        json.loads(ran.call("takedown", "--ids", str(id_file), "--dry", "--json"))[
            "answers"
        ]
        == 0
    )

    answers = KeptAnswers(
        ran.manifest.parent / "store" / "answers", {"model": "later"}, "later"
    )
    answers.keep("ab" * 32, {"text": "of:stone7 again"}, ran.of_web[7])
    answers.close()
    store = ("--store", str(ran.manifest.parent / "store"))
    assert json.loads(call("gc", *store, "--json").stdout)["answers"] == 1
    assert (
        "answers about documents that were taken down: 1 can be deleted"
        in call("gc", *store).stdout
    )
    assert b"stone7" in stored_answers()
    # the part of `gc --delete` that concerns answers
    assert forget_taken_down(ran.manifest.parent / "store", remove=True) == 1
    assert b"stone7" not in stored_answers()


def test_the_report_counts_yield_and_the_share_in_the_mixture(
    ran: Ran,
) -> None:
    section = generated(gather_facts(ran.session))
    assert section is not None
    yields = section.parts[0]
    assert isinstance(yields, Table)
    yield_rows = {
        row[0]: dict(zip(yields.header, row, strict=True)) for row in yields.rows
    }
    mixed = PackedSet(committed_inputs(ran.session)["mix"]).manifest["realised"]
    for name, parents, number in (("words", 12, 24), ("asked", 24, 24)):
        assert yield_rows[name]["parents"] == f"{parents} of {parents}"
        assert [
            yield_rows[name][key] for key in ("asked for", "documents", "dropped")
        ] == [
            str(number),
            str(number),
            "0",
        ]
        assert yield_rows[name]["of the mixture"] == f"{mixed[name]['share']:.1%}"
    assert 0.25 < mixed["words"]["share"] < 0.35

"""Sets of examples that a model writes: from the manifest to the tunings and the
commands that report on them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from gristmill.core.files import read_json
from gristmill.flows.questions.takedown import assess, write_takedown
from gristmill.flows.questions.trace import trace_document
from gristmill.flows.report.report import render_report
from gristmill.flows.running.check_endpoints import unreachable_models
from gristmill.flows.running.run import Runner
from gristmill.flows.running.session import Session, open_session
from gristmill.mixtures.loader import ManifestError
from gristmill.train.data.conversation_tokens import Chat
from gristmill.train.rl.prompts import read_prompts
from tests.chat_endpoint import Does, Endpoint
from tests.flows.small_writer import small_writer
from tests.flows.test_begin_anywhere import made, write_small_model
from tests.jsonl import read_jsonl, write_jsonl
from tests.sessions import open_beside

MANIFEST = """
name: aligned
seed: 7
model: {{path: model}}
examples:
  answered:
    data: [{{path: seeds.jsonl}}]
    model: {{endpoint: "{url}", model: writer}}
  revised:
    data: [{{path: "examples://answered"}}]
    model: {{endpoint: "{url}", model: writer}}
    revise: {{principles: [Be kind.]}}
  compared:
    data: [{{path: seeds.jsonl}}]
    model: {{endpoint: "{url}", model: writer, temperature: 1.0}}
    per_prompt: 2
    compare: {{model: {{endpoint: "{url}", model: judge}}}}
    gives: pairs
sft: {{data: [{{path: "examples://revised"}}], steps: 1, global_batch_size: 2, schedule: {{warmup_steps: 0}}}}
dpo:
  data: [{{path: "examples://compared"}}]
  prepare: [dedup]
  steps: 1
  global_batch_size: 2
  holdout: 0.3
  schedule: {{warmup_steps: 0}}
rl:
  data: [{{path: "examples://answered"}}]
  rewards: [{{kind: length, target_tokens: 4}}]
  steps: 1
  group_size: 2
  global_batch_size: 2
  max_new_tokens: 4
  holdout: 0.0
  schedule: {{warmup_steps: 0}}
"""


def write(prompt: str, earlier_requests: int) -> Does:
    """A writer and judge in the small model's words."""
    if prompt.startswith("Below are a request"):
        return "river stone" if "<critique>" in prompt else "grass"
    return small_writer(prompt) or "sky " * (1 + earlier_requests)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("examples")
    write_small_model(folder)
    write_jsonl(
        folder / "seeds.jsonl",
        [
            {"prompt": f"red {word} two blue", "licence": "CC0-1.0"}
            for word in ("sky", "grass", "rose", "river", "stone", "one")
        ],
    )
    return folder


@pytest.fixture(scope="module")
def endpoint() -> Iterator[Endpoint]:
    with Endpoint(write) as running_endpoint:
        yield running_endpoint


@pytest.fixture(scope="module")
def session(folder: Path, endpoint: Endpoint) -> Session:
    """A session whose stages before the first training are committed."""
    (folder / "aligned.yaml").write_text(MANIFEST.format(url=endpoint.url))
    made(open_beside(folder / "aligned.yaml", until="sft"))
    return open_beside(folder / "aligned.yaml")


def opened(session: Session, *settings: str) -> Session:
    return open_session(session.manifest_file, list(settings), str(session.store.root))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_manifest_plans_generated_examples_before_their_training(
    session: Session,
) -> None:
    assert list(session.plan) == [
        "tokenizer",
        "model",
        "examples-answered",
        "examples-revised",
        "examples-compared",
        "sft_data",
        "dpo_prepare",
        "dpo_data",
        "sft",
        "reference",
        "dpo",
        "rl",
    ]
    inputs = {name: set(node.inputs) for name, node in session.plan.items()}
    assert inputs["examples-revised"] == {"examples-answered"}
    assert {"examples-revised"} < inputs["sft_data"]
    assert inputs["dpo_prepare"] == {"examples-compared"}
    assert "examples-answered" in inputs["rl"]
    summaries = {
        name: folder.manifest()["summary"]
        for name in session.plan
        if (folder := session.committed(name)) is not None
    }
    assert (
        summaries["examples-answered"]["examples"]
        == summaries["examples-revised"]["examples"]
    )
    assert summaries["examples-revised"]["licences"] == ["CC0-1.0"]
    assert [example_set["path"] for example_set in summaries["sft_data"]["sets"]] == [
        "examples://revised"
    ]
    assert summaries["sft_data"]["sets"][0]["name"] == "revised"
    assert (
        summaries["dpo_data"]["sets"][0]["records"]
        == summaries["examples-compared"]["examples"]
        == 6
    )
    prepared = read_json(session.folder("dpo_prepare").data / "prepared.json")
    assert prepared["sets"][0]["path"] == "examples://compared"
    chat = Chat(session.folder("tokenizer").data)
    prompts, sets = read_prompts(
        session.manifest.rl.data if session.manifest.rl else (),
        [],
        chat,
        64,
        {"examples-answered": session.folder("examples-answered").data},
    )
    assert (
        len(prompts)
        == sets[0].records.records
        == summaries["examples-answered"]["examples"]
    )


@pytest.mark.slow
def test_changed_example_set_rebuilds_only_its_readers(
    session: Session, endpoint: Endpoint
) -> None:
    def changed(*settings: str) -> set[str]:
        return {
            name
            for name, node in opened(session, *settings).plan.items()
            if node.fingerprint != session.plan[name].fingerprint
        }

    assert changed("examples.compared.compare.principles=[Be brief.]") == {
        "examples-compared",
        "dpo_prepare",
        "dpo_data",
        "reference",
        "dpo",
        "rl",
    }
    assert changed("examples.revised.revise.rounds=2") >= {
        "examples-revised",
        "sft_data",
        "sft",
    }
    assert "examples-compared" not in changed("examples.answered.cut=keep")
    assert (
        changed(
            "examples.answered.model.concurrency=2",
            "examples.compared.compare.model.timeout_seconds=9",
        )
        == set()
    )
    requests_before = endpoint.asked.copy()
    changed_session = opened(session, "examples.revised.cut=keep")
    Runner(changed_session, lambda event: None).run_stage("examples-revised")
    assert endpoint.asked == requests_before, "kept answers are not requested again"


@pytest.mark.slow
def test_only_uncommitted_example_sets_need_a_reachable_model(
    session: Session,
) -> None:
    unreachable_settings = [
        "examples.compared.model.endpoint=http://127.0.0.1:9/v1",
        "examples.compared.model.model=other",
    ]
    changed_session = opened(session, *unreachable_settings)
    (message,) = unreachable_models(changed_session, changed_session.plan)
    assert message.startswith(
        "examples-compared: no endpoint of the model other answers"
    )


def wrong(folder: Path, *settings: str) -> str:
    (folder / "wrong.yaml").write_text(MANIFEST.format(url="http://127.0.0.1:9/v1"))
    with pytest.raises(ManifestError) as error:
        open_session(
            str(folder / "wrong.yaml"), list(settings), str(folder / "wrong-store")
        )
    return str(error.value)


def test_invalid_references_of_example_sets_are_rejected_before_any_work(
    folder: Path,
) -> None:
    assert "no such set: 'revisd', did you mean 'revised'" in wrong(
        folder, "sft.data.0.path=examples://revisd"
    )
    assert "answered, revised are made from each other in a cycle" in wrong(
        folder, "examples.answered.data.0.path=examples://revised"
    )
    (folder / "bad.j2").write_text("{{ promt }}")
    assert "there is no 'promt', did you mean 'prompt'" in wrong(
        folder, "examples.revised.revise.critique=bad.j2"
    )
    assert "gone.j2" in wrong(folder, "examples.revised.revise.revision=gone.j2")
    (folder / "none.txt").write_text("\n\n")
    assert "has no line; write one principle per line" in wrong(
        folder, "examples.revised.revise.principles=none.txt"
    )
    assert "examples.revised.revise.round: " in wrong(
        folder, "examples.revised.revise.round=2"
    )
    assert (
        "examples.compared.compare.model needs the model before sft has trained it: "
        "train and export it with another manifest, and set the exported folder"
    ) in wrong(folder, 'examples.compared.compare.model={"folder": "sft"}')


@pytest.mark.slow
def test_takedown_of_a_prompt_removes_everything_derived_from_it(
    session: Session,
) -> None:
    lines = (
        (session.folder("examples-answered").data / "answered.jsonl")
        .read_text()
        .splitlines()
    )
    [seed] = json.loads(lines[0])["parents"]
    records = {
        name: read_jsonl(session.folder(f"examples-{name}").data / f"{name}.jsonl")
        for name in ("answered", "revised", "compared")
    }
    assessment = assess(session, [seed, "f" * 32], with_duplicates=False)
    excluded_ids = {example.id for example in assessment.examples}
    assert excluded_ids == set(assessment.excluded)
    assert assessment.not_found == ["f" * 32]
    assert {
        example["id"] for example in records["compared"] if seed in example["parents"]
    } <= excluded_ids
    seed_ids = {
        example["id"] for example in records["answered"] if seed in example["parents"]
    }
    assert seed_ids
    assert seed_ids <= excluded_ids
    assert {
        example["id"]
        for example in records["revised"]
        if seed_ids & set(example["parents"])
    } <= excluded_ids
    assert assessment.answers > 0

    takedown = write_takedown(session, assessment)
    assert takedown.manifest is not None
    reduced_session = open_session(takedown.manifest, [], str(session.store.root))
    assert reduced_session.manifest.examples["compared"].exclude is not None
    changed = {
        name
        for name, node in reduced_session.plan.items()
        if node.fingerprint != session.plan[name].fingerprint
    }
    assert changed >= {
        "examples-answered",
        "examples-revised",
        "examples-compared",
        "sft_data",
        "dpo_data",
        "sft",
        "dpo",
    }
    Runner(reduced_session, lambda event: None).run_stage("examples-compared")
    kept_text = (
        reduced_session.folder("examples-compared").data / "compared.jsonl"
    ).read_text()
    assert kept_text == "".join(
        json.dumps(example, ensure_ascii=False, sort_keys=True) + "\n"
        for example in records["compared"]
        if example["id"] not in excluded_ids
    )
    second_assessment = assess(session, [seed], with_duplicates=False)
    assert second_assessment.answers == 0, "the answers were forgotten"


@pytest.mark.slow
def test_trace_of_a_generated_example_names_its_parents(session: Session) -> None:
    folder = session.folder("examples-revised").data
    example = json.loads((folder / "revised.jsonl").read_text().splitlines()[0])
    traced = trace_document(session, example["id"])
    assert (traced.kind, traced.parents, traced.children) == (
        "example",
        [example["parents"][0]],
        [],
    )
    assert {step.stage for step in traced.steps} == {"sft"}


@pytest.mark.slow
def test_report_shows_the_yield_of_each_example_set(session: Session) -> None:
    page = render_report(session, None).replace("<wbr>", "")
    for title in (
        "Examples that a model wrote: examples-answered",
        "Principles",
        "Be kind.",
        "CC0-1.0",
    ):
        assert title in page

"""Runs from Python equal those of the command line and give the same answers."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import re
import shutil
import signal
import sys
import threading
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow.dataset
import pytest

import gristmill
from gristmill.core.files import read_json
from gristmill.flows.running import launch
from gristmill.flows.running.events import (
    RunEvent,
    StageStarted,
)
from gristmill.flows.running.terminal import TerminalObserver
from tests.commands import call, finished
from tests.flows.corpus import write_project

pytestmark = pytest.mark.slow

TRAINING = {"pretrain.steps": 4, "pretrain.validate_every": 4}
STAGES = [
    "ingest",
    "filter",
    "dedup",
    "quality",
    "tokenizer",
    "tokenize",
    "mix",
    "pretrain",
]


def write_short_project(folder: Path) -> Path:
    """Write a project that ends with pre-training."""
    file = write_project(folder)
    remaining_lines = [
        line
        for line in file.read_text().splitlines()
        if not line.startswith(("sft", "dpo", "evaluate", "export"))
    ]
    file.write_text("\n".join(remaining_lines))
    return file


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_short_project(tmp_path_factory.mktemp("project"))


@pytest.fixture(scope="module")
def run(project: Path) -> gristmill.Run:
    return gristmill.run(
        project, set=TRAINING, store=project.parent / "store", progress=False
    )


def on_the_command_line(
    run: gristmill.Run, project: Path, verb: str, *arguments: str
) -> Any:
    settings = [
        f"--set={key}={value}" for key, value in TRAINING.items() if verb != "whatif"
    ]
    outcome = call(
        verb,
        project,
        *arguments,
        *settings,
        "--store",
        run.path.parent.parent,
        "--json",
    )
    return json.loads(outcome.stdout)


def a_small_one(
    folder: Path, documents: int = 6, **sections: Any
) -> gristmill.Manifest:
    (folder / "web").mkdir(exist_ok=True, parents=True)
    lines = [
        json.dumps(
            {
                "text": f"This is the document number {number}, and it has "
                f"{'very ' * number}little in it."
            }
        )
        for number in range(documents)
    ]
    (folder / "web" / "a.jsonl").write_text("\n".join(lines))
    return gristmill.Manifest(
        name="small",
        sources={"web": {"path": "web/*.jsonl"}},
        folder=folder,
        **sections,
    )


def test_run_lists_its_stages_with_outputs_and_counts(
    run: gristmill.Run,
) -> None:
    assert run.state == "completed"
    assert list(run.stages) == STAGES
    assert {stage.state for stage in run.stages.values()} == {"committed"}
    assert {stage.how for stage in run.stages.values()} == {"Completed"}
    ingest = run.stages["ingest"]
    assert ingest.counts is not None
    assert ingest.counts["read"] == sum(
        ingest.counts["dropped"].values(),
        ingest.counts["kept"] + ingest.counts["quarantined"],
    )
    assert run.stages["pretrain"].counts is None
    assert run.summaries["ingest"]["counts"] == ingest.counts
    assert (run.folder("mix") / "packed.json").is_file()
    assert repr(run) == f"Run({run.name!r}: completed, 8 of 8 stages committed)"


def test_losses_are_returned_as_a_table(run: gristmill.Run) -> None:
    metrics = run.metrics()
    assert set(metrics["stage"].to_pylist()) == {"pretrain"}
    logged = [line for line in metrics.to_pylist() if line["loss"] is not None]
    assert [line["step"] for line in logged] == [1, 2, 3, 4]
    assert all(0 < line["loss"] < 10 for line in logged)
    assert any(name.startswith("sources/web/") for name in metrics.column_names)
    assert len(run.metrics("sft")) == 0


def test_command_line_and_python_give_equal_answers(
    run: gristmill.Run, project: Path
) -> None:
    dropped = run.whatif({"filter.gopher_quality.min_words": 10}, samples=3)
    assert asdict(dropped) == on_the_command_line(
        run,
        project,
        "whatif",
        "--samples",
        "3",
        "--set=filter.gopher_quality.min_words=10",
    )
    document = dropped.cuts[0].passing[0].id
    assert asdict(run.explain(document)) == on_the_command_line(
        run, project, "explain", document
    )
    assert asdict(run.explain(document, text=True)) == on_the_command_line(
        run, project, "explain", document, "--text"
    )
    assert asdict(run.trace(2)) == on_the_command_line(
        run, project, "trace", "--step", "2"
    )
    assert asdict(run.trace_document(document)) == on_the_command_line(
        run, project, "trace", "--document", document
    )
    assert [asdict(threshold) for threshold in run.thresholds()] == on_the_command_line(
        run, project, "whatif"
    )


def test_run_without_training_answers_like_the_command_line(
    run: gristmill.Run, project: Path
) -> None:
    """The rows of every step are known before training."""
    settings = {**TRAINING, "pretrain.steps": 5}
    ended = gristmill.run(
        project, set=settings, until="mix", store=run.path.parent.parent, progress=False
    )
    overrides = [f"--set={key}={value}" for key, value in settings.items()]

    def answer_of(*words: str) -> Any:
        outcome = call(*words, *overrides, "--store", run.path.parent.parent, "--json")
        return json.loads(outcome.stdout)

    for ended_run in (ended, gristmill.Store(run.path.parent.parent).run(ended.name)):
        step = ended_run.trace(5)
        assert asdict(step) == answer_of("trace", str(project), "--step", "5")
        assert step.use == "will read"
        document = step.documents[0].id
        assert asdict(ended_run.explain(document)) == answer_of(
            "explain", str(project), document
        )
        assert asdict(ended_run.trace_document(document)) == answer_of(
            "trace", str(project), "--document", document
        )
        assert "pretrain" not in ended_run.stages


def test_documents_are_taken_down_from_a_manifest_that_trains_nothing(
    run: gristmill.Run, project: Path
) -> None:
    store = ["--store", str(run.path.parent.parent)]
    document = run.trace(1).documents[0].id
    id_file = project.with_name("list.txt")
    id_file.write_text(document)
    sections = (
        "pretrain",
        "  model",
        "  steps",
        "  global",
        "  micro",
        "  log_every",
        "  validate",
    )
    untrained = [
        line
        for line in project.read_text().splitlines()
        if not line.startswith(sections)
    ]
    for name, lines in (
        ("mixed", untrained),
        (
            "cleaned",
            [line for line in untrained if not line.startswith(("mix", "tokenizer"))],
        ),
    ):
        manifest = project.with_name(f"{name}.yaml")
        manifest.write_text("\n".join(lines))
        outcome = call("takedown", manifest, "--ids", id_file, "--json", *store)
        takedown = json.loads(outcome.stdout)
        assert takedown["excluded"] == [document]
        assert (
            takedown["first_step"],
            takedown["checkpoints"],
            takedown["models"],
        ) == (
            None,
            {"clean": [], "affected": []},
            [],
        )
        assert Path(takedown["written"]["list"]).read_text().split() == [document]
        assert bool(takedown["rows"]) == (name == "mixed")
        assert (takedown["written"]["manifest"] is None) == (name == "cleaned")


def test_answers_are_typed_objects(
    run: gristmill.Run,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replay = run.whatif({"filter.gopher_quality.min_words": 345})
    assert 0 < replay.then["web"].documents < replay.now["web"].documents
    assert isinstance(replay.now["web"].tokens, int)
    explained = run.explain(replay.cuts[0].failing[0].id)
    assert explained.kept
    assert [verdict.stage for verdict in explained.stages] == [
        "filter",
        "dedup",
        "quality",
    ]
    assert json.loads(explained.metadata or "")["author"].startswith("a")
    assert all(verdict.keep and verdict.values for verdict in explained.stages)
    step = run.trace(1)
    assert step.tokens == sum(document.tokens for document in step.documents) > 0
    steps = {entry.step for entry in run.trace_document(step.documents[0].id).steps}
    assert 1 in steps
    # The output is plain text in a notebook too.
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    explained.show()
    assert explained.id in capsys.readouterr().out


def test_run_is_reopened_from_its_record_without_manifest_and_sources(
    tmp_path: Path,
) -> None:
    rules = {"gopher_quality": {"min_words": 13, "min_stop_words": 0}}
    manifest = a_small_one(tmp_path / "project", prepare=[{"filter": {"rules": rules}}])
    store = gristmill.Store(tmp_path / "store")
    original_run = gristmill.run(
        manifest.save(tmp_path / "project" / "small.yaml"), store=store, progress=False
    )
    shutil.rmtree(tmp_path / "project")
    reopened_run = store.run()
    assert (reopened_run.name, reopened_run.stages, reopened_run.manifest) == (
        original_run.name,
        original_run.stages,
        original_run.manifest,
    )
    changed = {"filter.gopher_quality.min_words": 15}
    assert reopened_run.whatif(changed) == original_run.whatif(changed)
    document = reopened_run.whatif(changed).cuts[0].failing[0].id
    assert reopened_run.explain(document) == original_run.explain(document)
    assert reopened_run.documents().to_table() == original_run.documents().to_table()
    assert "min_words" in reopened_run.report().page
    assert [stored_run.name for stored_run in store.runs] == [original_run.name]
    assert {stage.name for stage in store.stages} == {"ingest", "filter"}


def test_documents_are_a_dataset_with_every_column_of_every_step(
    run: gristmill.Run,
) -> None:
    kept, dropped, all_of_them = (
        run.documents(kept=kept) for kept in (True, False, None)
    )
    assert isinstance(kept, pyarrow.dataset.Dataset)
    counts = run.stages["quality"].counts
    assert counts is not None
    assert kept.count_rows() == counts["kept"]
    assert (
        kept.count_rows() + dropped.count_rows()
        == all_of_them.count_rows()
        == run.summaries["ingest"]["counts"]["kept"]
    )
    assert {"id", "text", "kept", "reason", "words", "cluster_size"} <= {
        *kept.schema.names
    }
    assert set(dropped.to_table(columns=["kept"])["kept"].to_pylist()) == {False}
    some = run.documents(columns=["words", "id"])
    assert some.schema.names == some.head(3).column_names == ["words", "id"]
    assert [len(batch) for batch in some.to_batches()] != []
    assert run.explain(some.head(1)["id"][0].as_py()).kept


def test_document_filters_are_pushed_down(
    run: gristmill.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents, words = run.documents(), pyarrow.dataset.field("words")
    long = documents.filter(words > 320)
    expected = [
        row
        for row in documents.to_table(columns=["id", "words"]).to_pylist()
        if (row["words"] or 0) > 320
    ]
    assert 0 < len(expected) < documents.count_rows()
    assert long.to_table(columns=["id", "words"]).to_pylist() == expected
    assert (
        long.count_rows()
        == run.documents(where="words > 320").count_rows()
        == len(expected)
    )
    assert (
        long.filter(words < 340).count_rows()
        == long.count_rows(filter=words < 340)
        == sum(row["words"] < 340 for row in expected)
    )
    assert pickle.loads(pickle.dumps(long)).count_rows() == len(expected)
    monkeypatch.setattr(
        "gristmill.dataprep.corpus.read_table",
        lambda *_, **__: pytest.fail("a shard was read"),
    )
    run.documents(kept=None).filter(words > 3)


def test_documents_convert_to_other_libraries_with_equal_values(
    run: gristmill.Run,
) -> None:
    documents = run.documents(columns=["id", "source", "text", "words"])
    expected = documents.to_table().to_pylist()
    relation = documents.to_duckdb()
    assert relation.filter("words > 320").aggregate("count(*)").fetchall() == [
        (sum((row["words"] or 0) > 320 for row in expected),)
    ]
    pytest.importorskip("pandas")
    assert list(documents.to_pandas()["text"]) == [row["text"] for row in expected]
    pytest.importorskip("datasets")
    assert list(documents.to_hf()) == expected


def test_documents_convert_to_lazy_polars(run: gristmill.Run) -> None:
    polars = pytest.importorskip("polars")
    documents = run.documents()
    frame = (
        documents.to_polars()
        .filter(polars.col("words") > 320)
        .select("id", "words")
        .collect()
    )
    assert (
        frame.to_dicts()
        == documents.filter(pyarrow.dataset.field("words") > 320)
        .to_table(columns=["id", "words"])
        .to_pylist()
    )


def test_missing_library_error_names_its_extra(
    run: gristmill.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = run.documents()
    for name, extra, convert in (
        ("pandas", "pandas", documents.to_pandas),
        ("polars", "polars", documents.to_polars),
        ("datasets", "hf", documents.to_hf),
    ):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(
            gristmill.MissingLibraryError,
            match=rf"{name} is not installed; .*gristmill\[{extra}\]",
        ):
            convert()


def test_second_run_reuses_everything_as_planned(
    run: gristmill.Run, project: Path
) -> None:
    store = run.path.parent.parent
    planned_stages = gristmill.plan(project, set=TRAINING, store=store)
    assert [(stage.stage, stage.action) for stage in planned_stages] == [
        (name, "reuse") for name in STAGES
    ]
    planned_stages = gristmill.plan(
        project, until="dedup", set={"filter.gopher_quality.min_words": 40}, store=store
    )
    assert {stage.stage: stage.action for stage in planned_stages} == {
        "ingest": "reuse",
        "filter": "make",
        "dedup": "make",
    }
    assert "min_words 50 -> 40" in planned_stages[1].reason
    second_run = gristmill.run(
        gristmill.Manifest.load(project),
        until="mix",
        set=TRAINING,
        store=store,
        progress=False,
    )
    assert {stage.how for stage in second_run.stages.values()} == {"Cached"}
    assert second_run.stages["mix"].fingerprint == run.stages["mix"].fingerprint


def test_manifest_without_a_file_is_saved_and_can_be_run_again_from_there(
    tmp_path: Path,
) -> None:
    manifest = a_small_one(tmp_path)
    run = gristmill.run(manifest, store=tmp_path / "store", progress=False)
    assert run.stages["ingest"].counts is not None
    assert run.stages["ingest"].counts["kept"] == 6
    file = read_json(run.path / "run.json")["manifest_file"]
    assert gristmill.Manifest.load(file) == manifest == run.manifest
    assert [
        stage.action for stage in gristmill.plan(file, store=tmp_path / "store")
    ] == ["reuse"]


def test_run_works_inside_an_event_loop_and_in_another_thread(
    tmp_path: Path,
) -> None:
    manifest, finished_runs = a_small_one(tmp_path), []

    async def cell() -> None:
        finished_runs.append(
            gristmill.run(manifest, store=tmp_path / "one", progress=False)
        )

    asyncio.run(cell())
    thread = threading.Thread(
        target=lambda: finished_runs.append(
            gristmill.run(manifest, store=tmp_path / "other", progress=False)
        )
    )
    thread.start()
    thread.join()
    assert [run.state for run in finished_runs] == ["completed", "completed"]


def test_script_without_main_guard_is_not_imported_again(tmp_path: Path) -> None:
    a_small_one(tmp_path).save(tmp_path / "small.yaml")
    (tmp_path / "script.py").write_text(
        "import gristmill\nprint('begins')\nrun = gristmill.run('small.yaml', "
        "set={'engine.mode': 'processes'})\n"
        "print(run.stages['ingest'].counts['kept'])\n"
    )
    process = finished([sys.executable, "script.py"], cwd=tmp_path)
    lines = process.stdout.splitlines()
    assert (lines[0], lines[-1], lines.count("begins")) == ("begins", "6", 1)
    # on a slow machine after its progress
    assert re.search(r"^\+ ingest +Completed ", process.stdout, re.MULTILINE)


def test_an_interrupt_ends_the_run_cleanly_and_the_next_one_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, store = a_small_one(tmp_path), gristmill.Store(tmp_path / "store")

    show = TerminalObserver.__call__

    def press(observer: TerminalObserver, event: RunEvent) -> None:
        show(observer, event)
        if isinstance(event, StageStarted):
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr(TerminalObserver, "__call__", press)
        with pytest.raises(KeyboardInterrupt):
            gristmill.run(manifest, store=store, progress=False)
    assert store.run().state == "interrupted"
    assert gristmill.run(manifest, store=store, progress=False).state == "completed"
    assert [run.state for run in store.runs] == ["interrupted", "completed"]


def test_failed_stage_raises_the_message_of_the_command_line(
    tmp_path: Path,
) -> None:
    manifest = a_small_one(tmp_path)
    (tmp_path / "web" / "b.jsonl").write_text("no json\n" * 4)
    store = gristmill.Store(tmp_path / "store")
    with pytest.raises(
        gristmill.StageFailedError, match=r"ingest: .*quarantined"
    ) as failed:
        gristmill.run(manifest, store=store, progress=False)
    assert "resume with: " in str(failed.value)
    assert store.run().state == "failed"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"until": "dedup"}, gristmill.UnknownStageError, "has no stage 'dedup'"),
        ({"until": "ingset"}, gristmill.UnknownStageError, "did you mean 'ingest'"),
        ({"force": ["filter"]}, gristmill.UnknownStageError, "has no stage 'filter'"),
        ({"set": {"sed": 1}}, gristmill.ManifestError, "did you mean 'seed'"),
        (
            {"store": "memory://x"},
            gristmill.StoreLocationError,
            "in the memory of this process alone",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_invalid_arguments_raise_one_sentence_and_run_nothing(
    arguments: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    for function in (gristmill.run, gristmill.plan):
        with pytest.raises(error, match=message):
            function(
                a_small_one(tmp_path), **{"store": tmp_path / "store", **arguments}
            )
    assert not (tmp_path / "store" / "runs").exists()
    with pytest.raises(gristmill.UnknownRunError, match="has no runs yet"):
        gristmill.Store(tmp_path / "store").run()


@pytest.mark.parametrize(
    "location", ["a run", "its folder", "the folder of its packed set"]
)
def test_stream_reads_the_rows_that_trace_reports(
    run: gristmill.Run, location: str
) -> None:
    place: Any = {
        "a run": run,
        "its folder": run.path,
        "the folder of its packed set": run.folder("mix"),
    }[location]
    seed = json.loads((run.path / "run.json").read_text())["manifest"]["seed"]
    seed_option = {} if location != "the folder of its packed set" else {"seed": seed}
    rows = gristmill.stream(
        place, batch_size=len(run.trace(1).rows), provenance=True, **seed_option
    )
    for step, batch in zip(
        range(1, TRAINING["pretrain.steps"] + 1), rows, strict=False
    ):
        traced, row_provenance = run.trace(step), batch["provenance"]
        assert [entry["row"] for entry in row_provenance] == traced.rows
        tokens: Counter[tuple[str, str]] = Counter()
        for entry in row_provenance:
            for piece in entry["documents"]:
                tokens[piece["id"], entry["source"]] += piece["length"]
        assert tokens == {
            (document.id, document.source): document.tokens
            for document in traced.documents
        }


def test_unanswerable_questions_raise_one_sentence(run: gristmill.Run) -> None:
    with pytest.raises(
        gristmill.UnknownStageError, match="has no stage 'dedpu', did you mean 'dedup'"
    ):
        run.folder("dedpu")
    with pytest.raises(
        gristmill.DocumentNotFoundError,
        match="no document has the id, locator or address 'ffff'",
    ):
        run.explain("ffff")
    with pytest.raises(
        gristmill.UnknownColumnError, match="there is no column 'wrods'"
    ):
        run.documents(columns=["wrods"])
    with pytest.raises(gristmill.ExpressionError, match="there is no column 'wrods'"):
        run.documents(where="wrods > 3").count_rows()
    with pytest.raises(gristmill.TraceError, match="step"):
        run.trace(99)
    with pytest.raises(
        gristmill.NotReplayableError, match="which stored values cannot replay"
    ):
        run.whatif({"mix.sequence_length": 32})
    with pytest.raises(gristmill.ManifestError, match="did you mean 'min_words'"):
        run.whatif({"filter.gopher_quality.min_wrds": 3})


def test_notebook_shows_the_report_in_a_sandboxed_frame_and_the_run_as_a_table(
    run: gristmill.Run, tmp_path: Path
) -> None:
    report = run.report()
    frame = report._repr_html_()
    assert frame.startswith('<iframe sandbox="" srcdoc="')
    # only the frame's own tags: the page inside is escaped
    assert frame.count("<") == 2
    assert report.save(tmp_path / "report.html").read_text() == report.page
    table = run._repr_html_()
    assert all(f">{name}</td>" in table for name in STAGES)


def test_signal_handlers_are_restored_after_a_run(tmp_path: Path) -> None:
    original_handler = signal.getsignal(signal.SIGTERM)
    gristmill.run(a_small_one(tmp_path), store=tmp_path / "store", progress=False)
    assert signal.getsignal(signal.SIGTERM) == original_handler != launch.interrupt

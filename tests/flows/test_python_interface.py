"""A run that Python starts is one of the command line's, and says the same when it is asked."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.dataset
import pytest
from typer.testing import CliRunner

import gristmill
from gristmill.core.files import read_json
from gristmill.flows.cli.main import app
from gristmill.flows.python import notebook
from gristmill.flows.running import launch
from gristmill.flows.running.terminal import TerminalObserver
from tests.flows.corpus import write_project

pytestmark = pytest.mark.slow

TRAINING = {"pretrain.steps": 4, "pretrain.validate_every": 4}
STAGES = ["ingest", "filter", "dedup", "quality", "tokenizer", "tokenize", "mix", "pretrain"]


def write_short_project(folder: Path) -> Path:
    """A project that ends with its pre-training."""
    file = write_project(folder)
    kept = [line for line in file.read_text().splitlines() if not line.startswith(("sft", "dpo", "evaluate", "export"))]
    file.write_text("\n".join(kept))
    return file


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_short_project(tmp_path_factory.mktemp("project"))


@pytest.fixture(scope="module")
def run(project: Path) -> gristmill.Run:
    return gristmill.run(project, set=TRAINING, store=project.parent / "store", progress=False)


def on_the_command_line(run: gristmill.Run, project: Path, verb: str, *rest: str) -> Any:
    settings = [f"--set={key}={value}" for key, value in TRAINING.items() if verb != "whatif"]
    done = CliRunner().invoke(
        app, [verb, str(project), *rest, *settings, "--store", str(run.path.parent.parent), "--json"]
    )
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def a_small_one(folder: Path, documents: int = 6, **sections: Any) -> gristmill.Manifest:
    (folder / "web").mkdir(exist_ok=True, parents=True)
    lines = [
        json.dumps({"text": f"This is the document number {number}, and it has {'very ' * number}little in it."})
        for number in range(documents)
    ]
    (folder / "web" / "a.jsonl").write_text("\n".join(lines))
    return gristmill.Manifest(name="small", sources={"web": {"path": "web/*.jsonl"}}, folder=folder, **sections)


def test_a_run_has_its_stages_with_what_they_made_and_measured(run: gristmill.Run) -> None:
    assert run.state == "completed"
    assert list(run.stages) == STAGES
    assert {stage.state for stage in run.stages.values()} == {"committed"}
    assert {stage.how for stage in run.stages.values()} == {"Completed"}
    read = run.stages["ingest"]
    assert read.counts is not None
    assert read.counts["read"] == sum(read.counts["dropped"].values(), read.counts["kept"] + read.counts["quarantined"])
    assert run.stages["pretrain"].counts is None
    assert run.summaries["ingest"]["counts"] == read.counts
    assert (run.folder("mix") / "packed.json").is_file()
    assert repr(run) == f"Run({run.name!r}: completed, 8 of 8 stages committed)"


def test_losses_are_a_table(run: gristmill.Run) -> None:
    metrics = run.metrics()
    assert set(metrics["stage"].to_pylist()) == {"pretrain"}
    logged = [line for line in metrics.to_pylist() if line["loss"] is not None]
    assert [line["step"] for line in logged] == [1, 2, 3, 4]
    assert all(0 < line["loss"] < 10 for line in logged)
    assert any(name.startswith("sources/web/") for name in metrics.column_names)
    assert len(run.metrics("sft")) == 0


def test_the_command_line_answers_the_same(run: gristmill.Run, project: Path) -> None:
    dropped = run.whatif({"filter.gopher_quality.min_words": 10}, samples=3)
    assert dropped.found == on_the_command_line(
        run, project, "whatif", "--samples", "3", "--set=filter.gopher_quality.min_words=10"
    )
    document = dropped.cuts[0]["passing"][0]["id"]
    assert run.explain(document).found == on_the_command_line(run, project, "explain", document)
    assert run.explain(document, text=True).found == on_the_command_line(run, project, "explain", document, "--text")
    assert run.trace(2).found == on_the_command_line(run, project, "trace", "--step", "2")
    assert run.trace_document(document).found == on_the_command_line(run, project, "trace", "--document", document)
    assert [one.found for one in run.thresholds()] == on_the_command_line(run, project, "whatif")


def test_a_run_that_ended_before_its_training_answers_as_the_command_line_does(
    run: gristmill.Run, project: Path
) -> None:
    """The steps of a training are known before it is trained."""
    settings = {**TRAINING, "pretrain.steps": 5}
    ended = gristmill.run(project, set=settings, until="mix", store=run.path.parent.parent, progress=False)
    overrides = [f"--set={key}={value}" for key, value in settings.items()]

    def answer_of(*words: str) -> Any:
        done = CliRunner().invoke(app, [*words, *overrides, "--store", str(run.path.parent.parent), "--json"])
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    for ended_run in (ended, gristmill.Store(run.path.parent.parent).run(ended.name)):
        step = ended_run.trace(5)
        assert step.found == answer_of("trace", str(project), "--step", "5")
        assert step.found["use"] == "will read"
        document = step.documents[0]["id"]
        assert ended_run.explain(document).found == answer_of("explain", str(project), document)
        assert ended_run.trace_document(document).found == answer_of("trace", str(project), "--document", document)
        assert "pretrain" not in ended_run.stages


def test_documents_are_taken_down_from_a_manifest_that_trains_nothing(run: gristmill.Run, project: Path) -> None:
    store = ["--store", str(run.path.parent.parent)]
    document = run.trace(1).documents[0]["id"]
    listed = project.with_name("list.txt")
    listed.write_text(document)
    sections = ("pretrain", "  model", "  steps", "  global", "  micro", "  log_every", "  validate")
    untrained = [line for line in project.read_text().splitlines() if not line.startswith(sections)]
    for name, lines in (
        ("mixed", untrained),
        ("cleaned", [line for line in untrained if not line.startswith(("mix", "tokenizer"))]),
    ):
        manifest = project.with_name(f"{name}.yaml")
        manifest.write_text("\n".join(lines))
        done = CliRunner().invoke(app, ["takedown", str(manifest), "--ids", str(listed), "--json", *store])
        assert done.exit_code == 0, done.output
        takedown = json.loads(done.stdout)
        assert takedown["excluded"] == [document]
        assert (takedown["first_step"], takedown["checkpoints"], takedown["models"]) == (
            None,
            {"clean": [], "affected": []},
            [],
        )
        assert Path(takedown["written"]["list"]).read_text().split() == [document]
        assert bool(takedown["rows"]) == (name == "mixed")
        assert (takedown["written"]["manifest"] is None) == (name == "cleaned")


def test_answers_are_objects(
    run: gristmill.Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = run.whatif({"filter.gopher_quality.min_words": 345})
    assert 0 < found.then["web"].documents < found.now["web"].documents
    assert isinstance(found.now["web"].tokens, int)
    told = run.explain(found.cuts[0]["failing"][0]["id"])
    assert told.kept
    assert [judged.stage for judged in told.stages] == ["filter", "dedup", "quality"]
    assert told.metadata["author"].startswith("a")
    assert all(judged.keep and judged.values for judged in told.stages)
    step = run.trace(1)
    assert step.tokens == sum(document["tokens"] for document in step.documents) > 0
    steps = {one["step"] for one in run.trace_document(step.documents[0]["id"]).steps}
    assert 1 in steps
    # In a notebook, too, it is plain text.
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    told.show()
    assert told.id in capsys.readouterr().out


def test_a_run_is_asked_by_its_record_when_manifest_and_sources_are_gone(tmp_path: Path) -> None:
    rules = {"gopher_quality": {"min_words": 13, "min_stop_words": 0}}
    written = a_small_one(tmp_path / "project", prepare=[{"filter": {"rules": rules}}])
    store = gristmill.Store(tmp_path / "store")
    made = gristmill.run(written.save(tmp_path / "project" / "small.yaml"), store=store, progress=False)
    shutil.rmtree(tmp_path / "project")
    again = store.run()
    assert (again.name, again.stages, again.manifest) == (made.name, made.stages, made.manifest)
    changed = {"filter.gopher_quality.min_words": 15}
    assert again.whatif(changed).found == made.whatif(changed).found
    assert again.whatif(changed) == made.whatif(changed)
    document = again.whatif(changed).cuts[0]["failing"][0]["id"]
    assert again.explain(document) == made.explain(document)
    assert again.documents().to_table() == made.documents().to_table()
    assert "min_words" in again.report().page
    assert [one.name for one in store.runs] == [made.name]
    assert {stage.name for stage in store.stages} == {"ingest", "filter"}


def test_documents_are_a_dataset_with_every_column_of_every_step(run: gristmill.Run) -> None:
    kept, dropped, all_of_them = (run.documents(kept=kept) for kept in (True, False, None))
    assert isinstance(kept, pyarrow.dataset.Dataset)
    counts = run.stages["quality"].counts
    assert counts is not None
    assert kept.count_rows() == counts["kept"]
    assert (
        kept.count_rows() + dropped.count_rows()
        == all_of_them.count_rows()
        == run.summaries["ingest"]["counts"]["kept"]
    )
    assert {"id", "text", "kept", "reason", "words", "cluster_size"} <= {*kept.schema.names}
    assert set(dropped.to_table(columns=["kept"])["kept"].to_pylist()) == {False}
    some = run.documents(columns=["words", "id"])
    assert some.schema.names == some.head(3).column_names == ["words", "id"]
    assert [len(batch) for batch in some.to_batches()] != []
    assert run.explain(some.head(1)["id"][0].as_py()).kept


def test_documents_are_filtered_without_being_read_before(run: gristmill.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    documents, words = run.documents(), pyarrow.dataset.field("words")
    long = documents.filter(words > 320)
    expected = [one for one in documents.to_table(columns=["id", "words"]).to_pylist() if (one["words"] or 0) > 320]
    assert 0 < len(expected) < documents.count_rows()
    assert long.to_table(columns=["id", "words"]).to_pylist() == expected
    assert long.count_rows() == run.documents(where="words > 320").count_rows() == len(expected)
    assert (
        long.filter(words < 340).count_rows()
        == long.count_rows(filter=words < 340)
        == sum(one["words"] < 340 for one in expected)
    )
    assert pickle.loads(pickle.dumps(long)).count_rows() == len(expected)
    monkeypatch.setattr("gristmill.dataprep.corpus.read_table", lambda *_, **__: pytest.fail("a shard was read"))
    run.documents(kept=None).filter(words > 3)


def test_documents_go_into_other_libraries_with_the_same_values(run: gristmill.Run) -> None:
    documents = run.documents(columns=["id", "source", "text", "words"])
    expected = documents.to_table().to_pylist()
    relation = documents.to_duckdb()
    assert relation.filter("words > 320").aggregate("count(*)").fetchall() == [
        (sum((one["words"] or 0) > 320 for one in expected),)
    ]
    pytest.importorskip("pandas")
    frame = documents.to_pandas()
    assert list(frame["text"]) == [one["text"] for one in expected]
    pytest.importorskip("datasets")
    assert list(documents.to_hf()) == expected


def test_documents_go_into_polars_lazily(run: gristmill.Run) -> None:
    polars = pytest.importorskip("polars")
    documents = run.documents()
    found = documents.to_polars().filter(polars.col("words") > 320).select("id", "words").collect()
    assert (
        found.to_dicts()
        == documents.filter(pyarrow.dataset.field("words") > 320).to_table(columns=["id", "words"]).to_pylist()
    )


def test_a_library_that_is_missing_is_named_with_what_installs_it(
    run: gristmill.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = run.documents()
    for name, extra, convert in (
        ("pandas", "pandas", documents.to_pandas),
        ("polars", "polars", documents.to_polars),
        ("datasets", "hf", documents.to_hf),
    ):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(gristmill.MissingLibraryError, match=rf"{name} is not installed; .*gristmill\[{extra}\]"):
            convert()


def test_nothing_is_run_again_and_the_plan_says_so(run: gristmill.Run, project: Path) -> None:
    store = run.path.parent.parent
    planned = gristmill.plan(project, set=TRAINING, store=store)
    assert [(stage.stage, stage.action) for stage in planned] == [(name, "reuse") for name in STAGES]
    planned = gristmill.plan(project, until="dedup", set={"filter.gopher_quality.min_words": 40}, store=store)
    assert {stage.stage: stage.action for stage in planned} == {"ingest": "reuse", "filter": "make", "dedup": "make"}
    assert "min_words 50 -> 40" in planned[1].reason
    again = gristmill.run(gristmill.Manifest.load(project), until="mix", set=TRAINING, store=store, progress=False)
    assert {stage.how for stage in again.stages.values()} == {"Cached"}
    assert again.stages["mix"].fingerprint == run.stages["mix"].fingerprint


def test_a_manifest_without_a_file_is_run_and_can_be_run_again_by_the_file_that_commands_name(tmp_path: Path) -> None:
    made = a_small_one(tmp_path)
    run = gristmill.run(made, store=tmp_path / "store", progress=False)
    assert run.stages["ingest"].counts is not None
    assert run.stages["ingest"].counts["kept"] == 6
    file = read_json(run.path / "run.json")["manifest_file"]
    assert gristmill.Manifest.load(file) == made == run.manifest
    assert [stage.action for stage in gristmill.plan(file, store=tmp_path / "store")] == ["reuse"]


def test_it_works_inside_a_running_event_loop_and_in_another_thread(tmp_path: Path) -> None:
    made, found = a_small_one(tmp_path), []

    async def cell() -> None:
        found.append(gristmill.run(made, store=tmp_path / "one", progress=False))

    asyncio.run(cell())
    thread = threading.Thread(
        target=lambda: found.append(gristmill.run(made, store=tmp_path / "other", progress=False))
    )
    thread.start()
    thread.join()
    assert [run.state for run in found] == ["completed", "completed"]


def test_a_script_needs_no_guard_since_nothing_imports_it_again(tmp_path: Path) -> None:
    a_small_one(tmp_path).save(tmp_path / "small.yaml")
    (tmp_path / "script.py").write_text(
        "import gristmill\nprint('begins')\nrun = gristmill.run('small.yaml', set={'engine.mode': 'processes'})\n"
        "print(run.stages['ingest'].counts['kept'])\n"
    )
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert (lines[0], lines[-1], lines.count("begins")) == ("begins", "6", 1)
    assert re.search(r"^\+ ingest +Completed ", done.stdout, re.MULTILINE)  # on a slow machine behind its progress


def test_an_interrupt_ends_the_run_cleanly_and_the_next_one_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, store = a_small_one(tmp_path), gristmill.Store(tmp_path / "store")

    begin = TerminalObserver.stage_started

    def pressed(*arguments: Any) -> None:
        begin(*arguments)
        os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr(TerminalObserver, "stage_started", pressed)
        with pytest.raises(KeyboardInterrupt):
            gristmill.run(made, store=store, progress=False)
    assert store.run().state == "interrupted"
    assert gristmill.run(made, store=store, progress=False).state == "completed"
    assert [run.state for run in store.runs] == ["interrupted", "completed"]


def test_a_stage_that_fails_is_an_error_with_the_sentence_of_the_command_line(tmp_path: Path) -> None:
    made = a_small_one(tmp_path)
    (tmp_path / "web" / "b.jsonl").write_text("no json\n" * 4)
    store = gristmill.Store(tmp_path / "store")
    with pytest.raises(gristmill.StageFailedError, match=r"ingest: .*quarantined") as failed:
        gristmill.run(made, store=store, progress=False)
    assert "resume with: " in str(failed.value)
    assert store.run().state == "failed"


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"until": "dedup"}, gristmill.UnknownStageError, "has no stage 'dedup'"),
        ({"until": "ingset"}, gristmill.UnknownStageError, "did you mean 'ingest'"),
        ({"force": ["filter"]}, gristmill.UnknownStageError, "has no stage 'filter'"),
        ({"set": {"sed": 1}}, gristmill.ManifestError, "did you mean 'seed'"),
        ({"store": "memory://x"}, gristmill.StoreLocationError, "in the memory of this process alone"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_arguments_get_one_sentence_and_nothing_is_run(
    arguments: dict[str, Any], error: type[Exception], said: str, tmp_path: Path
) -> None:
    for call in (gristmill.run, gristmill.plan):
        with pytest.raises(error, match=said):
            call(a_small_one(tmp_path), **{"store": tmp_path / "store", **arguments})
    assert not (tmp_path / "store" / "runs").exists()
    with pytest.raises(gristmill.UnknownRunError, match="has no runs yet"):
        gristmill.Store(tmp_path / "store").run()


@pytest.mark.parametrize("given_as", ["a run", "its folder", "the folder of its packed set"])
def test_a_stream_reads_what_the_trace_of_the_runs_training_says(run: gristmill.Run, given_as: str) -> None:
    place: Any = {"a run": run, "its folder": run.path, "the folder of its packed set": run.folder("mix")}[given_as]
    seed = json.loads((run.path / "run.json").read_text())["manifest"]["seed"]
    told = {} if given_as != "the folder of its packed set" else {"seed": seed}
    rows = gristmill.stream(place, batch_size=len(run.trace(1).rows), provenance=True, **told)
    for step, batch in zip(range(1, TRAINING["pretrain.steps"] + 1), rows, strict=False):
        traced, read = run.trace(step), batch["provenance"]
        assert [one["row"] for one in read] == traced.rows
        tokens: Counter[tuple[str, str]] = Counter()
        for one in read:
            for piece in one["documents"]:
                tokens[piece["id"], one["source"]] += piece["length"]
        assert tokens == {(one["id"], one["source"]): one["tokens"] for one in traced.documents}


def test_questions_that_have_no_answer_get_one_sentence(run: gristmill.Run) -> None:
    with pytest.raises(gristmill.UnknownStageError, match="has no stage 'dedpu', did you mean 'dedup'"):
        run.folder("dedpu")
    with pytest.raises(gristmill.DocumentNotFoundError, match="no document has the id, locator or address 'ffff'"):
        run.explain("ffff")
    with pytest.raises(gristmill.UnknownColumnError, match="there is no column 'wrods'"):
        run.documents(columns=["wrods"])
    with pytest.raises(gristmill.ExpressionError, match="there is no column 'wrods'"):
        run.documents(where="wrods > 3").count_rows()
    with pytest.raises(gristmill.TraceError, match="step"):
        run.trace(99)
    with pytest.raises(gristmill.NotReplayableError, match="which stored values cannot replay"):
        run.whatif({"mix.sequence_length": 32})
    with pytest.raises(gristmill.ManifestError, match="did you mean 'min_words'"):
        run.whatif({"filter.gopher_quality.min_wrds": 3})


def test_the_report_stands_in_a_frame_that_runs_nothing_and_the_run_is_a_table(
    run: gristmill.Run, tmp_path: Path
) -> None:
    report = run.report()
    shown = report._repr_html_()
    assert shown.startswith('<iframe sandbox="" srcdoc="')
    assert shown.count("<") == 2  # the frame's own: all of the page is escaped inside
    assert report.save(tmp_path / "report.html").read_text() == report.page
    table = run._repr_html_()
    assert all(f">{name}</td>" in table for name in STAGES)


@pytest.fixture
def displayed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a notebook has been shown, as HTML, every update."""
    shown: list[str] = []

    def display(one: Any, display_id: bool) -> Any:
        shown.append(one._repr_html_())
        return SimpleNamespace(update=lambda one: shown.append(one._repr_html_()))

    monkeypatch.setitem(
        sys.modules,
        "IPython",
        SimpleNamespace(  # matplotlib asks for its version, too
            get_ipython=lambda: SimpleNamespace(kernel=1), version_info=(9, 0, 0)
        ),
    )
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    return shown


def test_in_a_notebook_a_run_is_one_table_that_moves(
    tmp_path: Path, displayed: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert notebook.in_notebook()
    gristmill.run(a_small_one(tmp_path), store=tmp_path / "store")
    assert capsys.readouterr().out == ""
    assert ">ingest</td>" not in displayed[0]
    assert ">runs</td>" in displayed[1]
    assert ">completed</td>" in displayed[-1]


def test_a_notebook_says_of_what_was_running_that_it_was_ended_and_escapes_what_stages_say(
    displayed: list[str],
) -> None:
    observer, node = notebook.NotebookObserver(), SimpleNamespace(name="filter")
    observer.stage_event(node, {"event": "warning", "message": "<script>"})  # type: ignore[arg-type]
    observer.stop_bar()
    assert "&lt;script&gt;" in displayed[1]
    assert ">ended</td>" in displayed[-1]
    assert repr(observer) == "filter  ended"


def test_signals_are_those_of_before_when_a_run_has_ended(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    gristmill.run(a_small_one(tmp_path), store=tmp_path / "store", progress=False)
    assert signal.getsignal(signal.SIGTERM) == before != launch.interrupt

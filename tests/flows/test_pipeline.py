"""The whole path from raw text to an aligned, exported model, and its invariants.

All tests share one undisturbed run and compare with it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.chaos import undisturbed as undisturbed_run
from gristmill.core.store import StageFolder
from gristmill.flows.pages.page_html import table_script
from gristmill.flows.questions.training_reads import reading_of
from gristmill.flows.running.session import Session, open_session
from gristmill.tokenize.packed import PackedSet
from tests.commands import GRISTMILL, call
from tests.jsonl import read_jsonl

pytestmark = pytest.mark.slow

_spec = importlib.util.spec_from_file_location(
    "gristmill_test_corpus", Path(__file__).with_name("corpus.py")
)
assert _spec is not None
assert _spec.loader is not None
corpus = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(corpus)

ALL_STAGES = [
    "ingest",
    "filter",
    "dedup",
    "quality",
    "tokenizer",
    "tokenize",
    "mix",
    "sft_data",
    "dpo_data",
    "pretrain",
    "sft",
    "reference",
    "dpo",
    "evaluate",
    "export",
]
START_SECONDS = 120.0


def gristmill(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a command whose processes are forked from one that has imported
    everything.
    """
    run = undisturbed_run.gristmill(arguments)
    if check:
        assert run.returncode == 0, run.stdout
    return run


def look(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a read-only command in this process: importing gristmill anew takes longer
    than the command.
    """
    outcome = call(*arguments, code=None)
    if outcome.exception is not None and not isinstance(outcome.exception, SystemExit):
        raise outcome.exception
    if check:
        assert outcome.exit_code == 0, outcome.output
    return subprocess.CompletedProcess(
        arguments, outcome.exit_code, outcome.stdout, outcome.stderr
    )


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return corpus.write_project(tmp_path_factory.mktemp("project"))


@pytest.fixture(scope="module")
def undisturbed(project: Path) -> Session:
    """A run from beginning to end without interruption."""
    store = project.parent / "store"
    gristmill("run", str(project), "--store", str(store), "--no-ui")
    return open_session(str(project), [], str(store))


def files_of(folder: StageFolder) -> dict[str, Any]:
    return folder.manifest()["files"]


def losses_of(folder: StageFolder) -> list[tuple[int, float]]:
    lines = read_jsonl(folder.data / "metrics.jsonl")
    return [(line["step"], line["loss"]) for line in lines if "loss" in line]


def test_every_stage_records_its_cost(undisturbed: Session) -> None:
    costs = {
        stage: undisturbed.folder(stage).manifest()["cost"] for stage in ALL_STAGES
    }
    assert all(
        cost["cpu_seconds"] > 0 and cost["peak_memory_bytes"] > 10e6
        for cost in costs.values()
    ), costs


def copy_store(undisturbed: Session, target: Path, without_from: str) -> None:
    """Copy the committed outputs of all stages before the given one."""
    for stage in ALL_STAGES[: ALL_STAGES.index(without_from)]:
        folder = undisturbed.folder(stage)
        shutil.copytree(folder.path, target / stage / folder.path.name)


def test_second_run_reuses_every_committed_stage(
    undisturbed: Session,
) -> None:
    assert list(undisturbed.plan) == ALL_STAGES
    status = look(
        "status",
        undisturbed.manifest_file,
        "--store",
        str(undisturbed.store.root),
        "--json",
    )
    assert {
        row["stage"]: row["state"] for row in json.loads(status.stdout)["stages"]
    } == dict.fromkeys(ALL_STAGES, "committed")
    second_run = gristmill(
        "run",
        undisturbed.manifest_file,
        "--store",
        str(undisturbed.store.root),
        "--no-ui",
    )
    assert second_run.stdout.count("Cached") == len(ALL_STAGES)


def test_every_document_is_accounted_for_at_every_stage(undisturbed: Session) -> None:
    kept_before = None
    for stage in ("ingest", "filter", "dedup", "quality", "tokenize", "mix"):
        counts = undisturbed.folder(stage).manifest()["summary"]["counts"]
        assert (
            counts["read"]
            == counts["kept"] + sum(counts["dropped"].values()) + counts["quarantined"]
        )
        assert kept_before in (None, counts["read"])
        kept_before = counts["kept"]
    ingest = undisturbed.folder("ingest").manifest()["summary"]["counts"]
    assert ingest["quarantined"] == corpus.PLANTED_QUARANTINED
    assert undisturbed.folder("dedup").manifest()["summary"]["counts"]["dropped"] == {
        "exact_duplicate": 1,
        "near_duplicate": 1,
    }


def test_packed_set_matches_the_weights_exactly(undisturbed: Session) -> None:
    packed = json.loads((undisturbed.folder("mix").data / "packed.json").read_text())
    # 24,000 tokens are 375 rows of 64: 225, 75 and 75 of them for weights 0.6, 0.2 and
    # 0.2.
    assert dict(
        zip(packed["sources"], packed["train"]["rows_per_source"], strict=True)
    ) == {
        "web": 225,
        "books": 75,
        "code": 75,
    }


def test_explain_prints_the_history_of_a_dropped_document(undisturbed: Session) -> None:
    base = ["--store", str(undisturbed.store.root), "--json"]
    explained = json.loads(
        look("explain", undisturbed.manifest_file, "b.jsonl#33", *base).stdout
    )
    assert explained["outcome"] == "dropped by filter: gopher_quality/min_words"
    (verdict,) = explained["stages"]
    assert (verdict["values"]["words"], verdict["threshold"]) == (2, 50)


def test_explain_and_trace_agree_on_the_rows_of_a_step(undisturbed: Session) -> None:
    base = ["--store", str(undisturbed.store.root), "--json"]
    step = json.loads(
        look("trace", undisturbed.manifest_file, "--step", "3", *base).stdout
    )
    assert len(step["rows"]) == 8
    assert step["tokens"] == 8 * 64
    document = step["documents"][0]
    explained = json.loads(
        look("explain", undisturbed.manifest_file, document["id"], *base).stdout
    )
    assert explained["locator"] == document["locator"]
    assert set(document["rows"]) <= set(explained["mix"]["rows"])
    assert 3 in explained["mix"]["steps"]
    assert explained["mix"]["use"] == "trained"


def traced(undisturbed: Session, *arguments: str) -> dict[str, Any]:
    run = look(
        "trace",
        undisturbed.manifest_file,
        *arguments,
        "--store",
        str(undisturbed.store.root),
        "--json",
    )
    answer: dict[str, Any] = json.loads(run.stdout)
    return answer


def test_trace_follows_documents_and_examples_through_every_training(
    undisturbed: Session,
) -> None:
    step = traced(undisturbed, "--step", "3")
    assert step["use"] == "read"
    read_document = step["documents"][0]
    assert set(read_document["quality"]) == {"quality"}
    assert read_document["cluster_size"] == 1
    document = traced(undisturbed, "--document", read_document["id"])
    assert {entry["step"]: entry["rows"] for entry in document["steps"]}[
        3
    ] == read_document["rows"]
    assert {entry["use"] for entry in document["steps"]} == {"read"}
    dropped = traced(undisturbed, "--document", "b.jsonl#33")
    assert (dropped["outcome"], dropped["steps"]) == (
        "dropped by filter: gopher_quality/min_words",
        [],
    )
    packed = PackedSet(undisturbed.folder("mix").data)
    held_out = traced(
        undisturbed,
        "--document",
        packed.validation_pieces("web")["id"][0].as_py().hex(),
    )
    assert (held_out["use"], held_out["steps"]) == ("held out", [])
    for stage in ("sft", "dpo"):
        tuning_step = traced(undisturbed, "--step", "2", "--stage", stage)
        example = traced(undisturbed, "--document", tuning_step["examples"][0])
        assert (stage, 2) in {
            (entry["stage"], entry["step"]) for entry in example["steps"]
        }


def test_trace_rejects_unknown_steps_and_several_questions(
    undisturbed: Session,
) -> None:
    for arguments, complaint in (
        (("--step", "25"), "pretrain has 24 steps; there is no step 25"),
        (
            ("--step", "3", "--document", "x"),
            "give one of --step N, --document ID and --text FILE",
        ),
    ):
        process = look(
            "trace",
            undisturbed.manifest_file,
            *arguments,
            "--store",
            str(undisturbed.store.root),
            check=False,
        )
        assert process.returncode == 2
        assert complaint in process.stderr


def test_takedown_empties_only_the_rows_of_the_documents(
    undisturbed: Session, tmp_path: Path
) -> None:
    store, before = (
        str(undisturbed.store.root),
        PackedSet(undisturbed.folder("mix").data),
    )
    document = before.pieces(reading_of(undisturbed).rows(5))["id"][0].as_py()
    (tmp_path / "list.txt").write_text(f"# asked for\n{document.hex()}\n")
    takedown = json.loads(
        look(
            "takedown",
            undisturbed.manifest_file,
            "--ids",
            str(tmp_path / "list.txt"),
            "--store",
            store,
            "--json",
        ).stdout
    )
    assert [entry["id"] for entry in takedown["documents"]] == [document.hex()]
    assert takedown["trained"]
    assert takedown["first_step"] <= 5
    rows = sorted(set(before.rows_of_documents([document])["row"].to_pylist()))
    assert takedown["rows"] == rows
    reduced_run = open_session(takedown["written"]["manifest"], [], store)
    assert takedown["command"].endswith(
        f"{takedown['written']['manifest']} --store {store}"
    )
    changed = [
        stage
        for stage in ALL_STAGES
        if reduced_run.plan[stage].fingerprint != undisturbed.plan[stage].fingerprint
    ]
    assert changed[0] == "mix"
    gristmill(
        "run", reduced_run.manifest_file, "--until", "mix", "--store", store, "--no-ui"
    )
    packed = PackedSet(reduced_run.folder("mix").data)
    assert packed.withheld.tolist() == rows
    assert packed.rows_of_documents([document]).num_rows == 0
    other_rows = np.setdiff1d(np.arange(before.rows), rows)
    assert np.array_equal(packed.read(other_rows), before.read(other_rows))
    assert packed.ledger([document])["reason"].to_pylist() == ["excluded"]


def test_takedown_of_a_document_in_no_row_reuses_the_training(
    undisturbed: Session, tmp_path: Path
) -> None:
    file, store = Path(undisturbed.manifest_file), str(undisturbed.store.root)
    manifest = file.with_name("dropped.yaml")
    manifest.write_text(file.read_text())
    sql = "SELECT id FROM documents WHERE NOT kept LIMIT 1"
    answer = look("query", str(manifest), sql, "--csv", "--store", store).stdout
    (tmp_path / "list.txt").write_text(answer.splitlines()[1])
    arguments = ("--ids", str(tmp_path / "list.txt"), "--store", store, "--json")
    takedown = json.loads(look("takedown", str(manifest), *arguments).stdout)
    assert (takedown["rows"], takedown["written"]["checkpoint"]) == ([], None)
    reduced = takedown["written"]["manifest"]
    gristmill("run", reduced, "--until", "mix", "--store", store, "--no-ui")
    plan = open_session(reduced, [], store).plan
    assert plan["mix"].fingerprint != undisturbed.plan["mix"].fingerprint
    assert plan["pretrain"].fingerprint == undisturbed.plan["pretrain"].fingerprint


def test_whatif_predicts_the_documents_kept_by_new_thresholds(
    undisturbed: Session, tmp_path: Path
) -> None:
    file, store = undisturbed.manifest_file, str(undisturbed.store.root)
    change = ("--set", "filter.gopher_quality.min_stop_words=36")
    prediction = json.loads(
        look(
            "whatif", file, *change, "--store", store, "--json", "--samples", "3"
        ).stdout
    )
    other_store = tmp_path / "store"
    shutil.copytree(
        undisturbed.folder("ingest").path,
        other_store / "ingest" / undisturbed.folder("ingest").path.name,
    )
    gristmill(
        "run",
        file,
        *change,
        "--store",
        str(other_store),
        "--until",
        "filter",
        "--no-ui",
    )
    summary = (
        open_session(file, [change[1]], str(other_store))
        .folder("filter")
        .manifest()["summary"]
    )
    counts, rules = summary["counts"], summary["rules"]
    kept_by_filter = {
        name: source["kept"] for name, source in counts["sources"].items()
    }
    assert 0 < kept_by_filter["web"] < 90
    # Documents that dedup and quality dropped stay dropped, so fewer remain than the
    # filter keeps.
    now, then = (
        {name: size["documents"] for name, size in prediction[side].items()}
        for side in ("now", "then")
    )
    assert then["code"] == now["code"]
    assert then["web"] < now["web"]
    assert then["web"] <= kept_by_filter["web"]
    assert (
        prediction["rules"]["gopher_quality/min_stop_words"]["then"]
        == rules["gopher_quality/min_stop_words"]
    )
    (cut,) = prediction["cuts"]
    assert (cut["now"], cut["then"], len(cut["failing"]), len(cut["passing"])) == (
        2,
        36,
        3,
        3,
    )
    assert all(sample["value"] < 36 for sample in cut["failing"])
    assert all(sample["value"] >= 36 for sample in cut["passing"])
    process = look(
        "whatif", file, "--set", "dedup.exact=false", "--store", store, check=False
    )
    assert process.returncode == 2
    assert "dedup.exact changes a measurement" in process.stderr


def test_the_report_is_one_file_that_needs_no_network(undisturbed: Session) -> None:
    (run, *_) = sorted(undisturbed.store.runs.iterdir())
    html = (run / "report.html").read_text()
    for text in (
        "Documents",
        "Why documents were dropped",
        "Quarantine",
        "Mixture",
        "Training",
        "Held-out text",
        "<svg",
    ):
        assert text in html
    without_namespaces = html.replace("http://www.w3.org/", "")
    assert "http://" not in without_namespaces.replace("http://purl.org", "").replace(
        "http://creativecommons.org", ""
    )
    assert html.count("<script") == 1, "only the script that sorts tables"
    assert table_script() in html


@pytest.mark.parametrize(
    "stage",
    [
        "mix",
        *(
            pytest.param(stage, marks=pytest.mark.chaos)
            for stage in ("ingest", "dedup", "pretrain")
        ),
    ],
)
def test_repeatedly_killed_run_writes_the_same_bytes(
    undisturbed: Session, tmp_path: Path, stage: str
) -> None:
    """SIGKILL to the run and to the stage's process group, twice, after random numbers
    of written files.
    """
    seed = int.from_bytes(os.urandom(4), "little")
    print(f"seed {seed}")
    random_ = random.Random(seed)
    store = tmp_path / "store"
    copy_store(undisturbed, store, stage)
    folder = open_session(undisturbed.manifest_file, [], str(store)).folder(stage)
    command = [
        *GRISTMILL,
        "run",
        undisturbed.manifest_file,
        "--store",
        str(store),
        "--no-ui",
        "--until",
        stage,
    ]
    for _ in range(2):
        kill_when_files_reach(command, folder, random_.randint(2, 14))
    gristmill(*command[3:])
    assert folder.state() == "committed"
    if stage == "pretrain":
        assert losses_of(folder) == losses_of(undisturbed.folder(stage))
    else:
        assert files_of(folder) == files_of(undisturbed.folder(stage))


def kill_when_files_reach(
    command: list[str], folder: StageFolder, new_files: int
) -> None:
    """Start a run, and kill it and its stage after it has written a number of files, or
    when it ends.
    """

    def files() -> int:
        # unlike rglob, os.walk passes over folders that the run removes meanwhile
        return sum(
            len(folders) + len(names)
            for part in (folder.data, folder.work)
            for _, folders, names in os.walk(part)
        )

    initial_files, leases = files(), set((folder.path / "lease").glob("*.child.json"))
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    deadline = time.monotonic() + START_SECONDS
    while (
        process.poll() is None
        and files() < initial_files + new_files
        and folder.state() != "committed"
    ):
        assert time.monotonic() < deadline
        time.sleep(0.002)
    children = set((folder.path / "lease").glob("*.child.json")) - leases
    os.killpg(process.pid, signal.SIGKILL) if process.poll() is None else None
    for child in children:
        try:
            os.killpg(json.loads(child.read_text())["pid"], signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()


def test_one_worker_and_a_permuted_listing_give_the_same_packed_set(
    undisturbed: Session, tmp_path: Path
) -> None:
    manifest = corpus.write_project(tmp_path / "project", reverse=True)
    store = str(tmp_path / "store")
    gristmill(
        "run",
        str(manifest),
        "--store",
        store,
        "--no-ui",
        "--until",
        "mix",
        "--set",
        "engine.workers=1",
    )
    permuted_run = open_session(str(manifest), [], store)
    for stage in (
        "ingest",
        "filter",
        "dedup",
        "quality",
        "tokenizer",
        "tokenize",
        "mix",
    ):
        assert files_of(permuted_run.folder(stage)) == files_of(
            undisturbed.folder(stage)
        ), stage


def test_two_training_processes_read_the_same_rows_and_reach_the_same_losses(
    undisturbed: Session, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    copy_store(undisturbed, store, "pretrain")
    gristmill(
        "run",
        undisturbed.manifest_file,
        "--store",
        str(store),
        "--no-ui",
        "--until",
        "pretrain",
        "--set",
        "engine.ranks=2",
    )
    two_ranks = open_session(undisturbed.manifest_file, [], str(store)).folder(
        "pretrain"
    )
    one_rank = undisturbed.folder("pretrain")
    assert [step for step, _ in losses_of(two_ranks)] == [
        step for step, _ in losses_of(one_rank)
    ]
    for (_, loss_of_two), (_, loss_of_one) in zip(
        losses_of(two_ranks), losses_of(one_rank), strict=True
    ):
        assert loss_of_two == pytest.approx(loss_of_one, abs=1e-4)


def test_changed_weight_rebuilds_the_mixture_only(
    undisturbed: Session, tmp_path: Path
) -> None:
    plan = look(
        "plan",
        undisturbed.manifest_file,
        "--store",
        str(undisturbed.store.root),
        "--json",
        "--set",
        "sources.code.weight=0.4",
    )
    actions = {row["stage"]: row["action"] for row in json.loads(plan.stdout)}
    assert [
        stage for stage, action in actions.items() if action == "reuse"
    ] == ALL_STAGES[:6]
    reason = next(
        row["reason"] for row in json.loads(plan.stdout) if row["stage"] == "mix"
    )
    assert reason == "config changed: sources.code.weight 0.2 -> 0.4"


def test_forced_stage_reproduces_its_bytes(undisturbed: Session) -> None:
    run = gristmill(
        "stage",
        "dedup",
        undisturbed.manifest_file,
        "--force",
        "--no-ui",
        "--store",
        str(undisturbed.store.root),
    )
    assert "same bytes as before" in run.stdout


@pytest.mark.slow
def test_run_continues_after_its_output_pipe_closes(
    project: Path, tmp_path: Path
) -> None:
    command = [
        *GRISTMILL,
        "run",
        str(project),
        "--store",
        str(tmp_path),
        "--no-ui",
        "--until",
        "filter",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 0
    session = open_session(str(project), [], str(tmp_path), until="filter")
    assert [session.folder(stage).state() for stage in session.plan] == [
        "committed",
        "committed",
    ]


def test_missing_source_is_reported_without_traceback(
    project: Path, tmp_path: Path
) -> None:
    run = gristmill(
        "run",
        str(project),
        "--set",
        "sources.web.path=nowhere/*.jsonl",
        "--no-ui",
        "--store",
        str(tmp_path),
        check=False,
    )
    assert run.returncode == 2
    assert "nowhere" in run.stdout
    assert "web" in run.stdout
    assert "Traceback" not in run.stdout


def test_too_many_unreadable_records_fail_the_stage_with_the_share(
    project: Path, tmp_path: Path
) -> None:
    run = gristmill(
        "run",
        str(project),
        "--set",
        "ingest.max_quarantined=0.01",
        "--no-ui",
        "--until",
        "ingest",
        "--store",
        str(tmp_path),
        check=False,
    )
    assert run.returncode == 1
    assert "more than the allowed 1.0%" in run.stdout
    assert "Traceback" not in run.stdout


def test_invalid_manifest_is_rejected_before_any_work(tmp_path: Path) -> None:
    manifest = tmp_path / "bad.yaml"
    manifest.write_text(
        "name: bad\nsources:\n  a: {path: x, wieght: 1}\nmix: {tokens: -5}\n"
    )
    run = look("run", str(manifest), "--store", str(tmp_path / "store"), check=False)
    assert run.returncode == 2
    assert (
        "bad.yaml:3: sources.a.wieght: unknown key, did you mean 'weight'?"
        in run.stderr
    )
    assert "3 problems in" in run.stderr
    assert not (tmp_path / "store").exists()

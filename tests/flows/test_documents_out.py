"""Export of a run's documents to files, a store and the hub; their display and queries
in the terminal.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from typer.testing import Result

from gristmill.dataprep.exporting import export_documents
from gristmill.flows.running.terminal import visible
from gristmill.flows.stages.plan import make_plan
from gristmill.mixtures.loader import load_manifest
from tests.commands import call
from tests.flows.hub_stand_in import serve_hub
from tests.jsonl import write_jsonl

pytestmark = pytest.mark.slow

STEERING = "\x1b[31mred\x07 \x9b2J \u202eright to left"
SECRET = "hf_neverShownInAnyLogOrFile42"
MANIFEST = """\
name: letters
sources:
  web: {path: "data/*.jsonl", licence: CC-BY-4.0, id_field: name}
  notes: {path: "notes/*.txt"}
ingest: {shard_bytes: 2000}
prepare:
  - clean: {mask: [email]}
  - filter: {rules: [{gopher_quality: {min_words: 5, min_stop_words: 0}}]}
  - filter: {rules: [{gopher_quality: {max_words: 60, min_words: 1, min_stop_words: 0}}]}
documents: {format: hf, shard_bytes: 3000}
engine: {workers: 2, mode: threads}
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a manifest, and a store with its prepared and exported
    documents.
    """
    folder = tmp_path_factory.mktemp("project")
    (folder / "data").mkdir()
    (folder / "notes").mkdir()
    rows = [
        {
            "name": f"n{number}",
            "text": f"Letter {number}: "
            + "the quiet river " * (number % 7 + 1)
            + "ends.",
            "url": f"https://letters.example/{number}",
        }
        for number in range(60)
    ]
    rows += [
        {
            "name": "mail",
            "text": "Please write to ann@letters.org about the river "
            "before the winter.",
        },
        {"name": "short", "text": "Too short."},
        {"name": "long", "text": "word and word " * 50},
        {
            "name": "steering",
            "text": f"The text of this letter would steer {STEERING} a terminal.",
        },
    ]
    write_jsonl(folder / "data" / "a.jsonl", rows)
    (folder / "notes" / "one.txt").write_text(
        "A note about the river and the garden of the old house."
    )
    (folder / "letters.yaml").write_text(MANIFEST)
    outcome = invoke(folder, "run", "--until=documents", "--no-ui")
    assert outcome.exit_code == 0, outcome.output
    assert re.search(
        r"(?m)^files:   .*/documents/letters--\w+/data$", outcome.output
    ), outcome.output
    return folder


def invoke(project: Path, verb: str, *arguments: str) -> Result:
    return call(
        verb,
        project / "letters.yaml",
        *arguments,
        "--store",
        project / "store",
        env={"COLUMNS": "60"},
        code=None,
    )


def asked(project: Path, sql: str) -> list[dict[str, Any]]:
    outcome = invoke(project, "query", sql, "--json")
    assert outcome.exit_code == 0, outcome.output
    rows: list[dict[str, Any]] = json.loads(outcome.stdout)
    return rows


def files_in(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def exported(project: Path, out: Path, *arguments: str) -> dict[str, Any]:
    outcome = invoke(project, "export-documents", f"--out={out}", "--json", *arguments)
    assert outcome.exit_code == 0, outcome.output
    record: dict[str, Any] = json.loads(outcome.stdout)
    return record


def test_the_stage_and_the_command_write_the_same_bytes(
    project: Path, tmp_path: Path
) -> None:
    record = exported(project, tmp_path / "out", "--format=hf", "--shard-size=3kB")
    assert (record["is_new"], record["documents"], len(record["files"]) > 1) == (
        True,
        63,
        True,
    )
    [stage] = (project / "store" / "documents").iterdir()
    stage_files, command_files = files_in(stage / "data"), files_in(tmp_path / "out")
    command_record = json.loads(command_files.pop("_documents.json"))
    assert json.loads(stage_files.pop("_documents.json")) == {
        key: command_record[key] for key in command_record if key != "identity"
    }
    assert stage_files == command_files
    assert str(project) not in command_files["README.md"].decode()
    assert "path: data/*.jsonl" in command_files["README.md"].decode()
    summary = json.loads((stage / "manifest.json").read_bytes())["summary"]
    assert (summary["documents"], summary["funnel"][-1]["kept"]) == (63, 63)
    assert not (project / "store" / "exports").exists()


def test_manifest_of_the_dataset_card_reproduces_the_documents(project: Path) -> None:
    [stage] = (project / "store" / "documents").iterdir()
    card = (stage / "data" / "README.md").read_text()
    [card_manifest] = re.findall(r"```yaml\n(name: .*?)```", card, re.DOTALL)
    (project / "card.yaml").write_text(card_manifest)
    first, again = (
        make_plan(load_manifest(project / name))
        for name in ("letters.yaml", "card.yaml")
    )
    assert len(again) == 4
    assert {name: node.fingerprint for name, node in again.items()} == {
        name: node.fingerprint for name, node in first.items() if name in again
    }


def test_complete_export_is_kept_and_foreign_files_are_never_overwritten(
    project: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    exported(project, out, "--format=jsonl")
    modification_times = {
        name: (out / name).stat().st_mtime_ns for name in files_in(out)
    }
    assert exported(project, out, "--format=jsonl")["is_new"] is False
    assert {
        name: (out / name).stat().st_mtime_ns for name in files_in(out)
    } == modification_times
    outcome = invoke(
        project, "export-documents", f"--out={out}", "--format=jsonl", "--dropped"
    )
    assert (outcome.exit_code, "already holds another export" in outcome.output) == (
        2,
        True,
    )
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "README.md").write_text("mine")
    outcome = invoke(
        project, "export-documents", "--out", str(tmp_path / "mine"), "--format=hf"
    )
    assert (outcome.exit_code, "already holds README.md" in outcome.output) == (2, True)
    assert files_in(tmp_path / "mine") == {"README.md": b"mine"}


def test_killed_export_is_resumed(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_documents, "TASK_BYTES", 1)  # one task per file
    arguments, out = ["--format=parquet", "--shard-size=1kB"], tmp_path / "out"
    uninterrupted = exported(project, tmp_path / "whole", *arguments)
    # one worker, since a second may have written a file that is not yet recorded
    process = subprocess.run(
        [
            sys.executable,
            "-c",
            KILLED,
            "export-documents",
            str(project / "letters.yaml"),
            *arguments,
            f"--out={out}",
            "--store",
            str(project / "store"),
            "--set=engine.workers=1",
        ],
        capture_output=True,
        check=False,
    )
    assert process.returncode == -9, process.stderr
    modification_times = {
        path.name: path.stat().st_mtime_ns for path in out.glob("documents-*.parquet")
    }
    assert 0 < len(modification_times) < len(uninterrupted["files"])
    assert not (out / "_documents.json").exists()
    resumed = exported(project, out, *arguments)
    assert (resumed["identity"], files_in(out)) == (
        uninterrupted["identity"],
        files_in(tmp_path / "whole"),
    )
    assert {
        name: (out / name).stat().st_mtime_ns for name in modification_times
    } == modification_times


KILLED = """
import os, signal
from gristmill.dataprep.exporting import export_documents as exporting
from gristmill.flows.cli.main import main
exporting.TASK_BYTES, real, calls = 1, exporting._write_file, []
def write(path, *given):
    calls.append(path)
    if len(calls) == 6:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(path, *given)
exporting._write_file = write
main()
"""


def test_export_selects_columns_and_rows(project: Path, tmp_path: Path) -> None:
    record = exported(
        project,
        tmp_path / "some",
        "--format=parquet",
        "--columns=text, filter_words",
        "--where=filter_words > 15 AND source = 'web'",
    )
    table = pq.read_table(tmp_path / "some" / next(iter(record["files"])))
    assert table.column_names == ["text", "filter_words"]
    assert (
        0
        < len(table)
        == record["documents"]
        == len(
            asked(
                project,
                "SELECT id FROM documents WHERE kept AND filter_words "
                "> 15 AND source = 'web'",
            )
        )
    )
    record = exported(project, tmp_path / "dropped", "--format=parquet", "--dropped")
    table = pq.read_table(
        tmp_path / "dropped" / next(iter(record["files"]))
    ).to_pylist()
    assert [(row["dropped_by"], row["reason"]) for row in table] == [
        ("filter", "gopher_quality/min_words"),
        ("filter-2", "gopher_quality/max_words"),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--where=wrods > 1"], "there is no column 'wrods'"),
        (
            ["--where=(SELECT count(*) FROM read_text('/etc/passwd')) > 0"],
            "a sub-query is not allowed",
        ),
        (
            ["--columns=id,filter_wrods"],
            "--columns: there is no column 'filter_wrods', did you mean 'filter_words'?",
        ),
        (["--columns=id,id"], "--columns: 'id' is given twice"),
        (["--shard-size=big"], "Invalid value for '--shard-size'"),
        (
            ["--out=hf://models/a/b"],
            "a data set of the hub is written hf://datasets/USER/NAME",
        ),
        (["--out=nosuch://a"], "nosuch://a"),
    ],
)
def test_invalid_export_options_are_rejected_with_one_sentence(
    project: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    outcome = invoke(
        project,
        "export-documents",
        "--format=jsonl",
        "--out",
        str(tmp_path / "out"),
        *arguments,
    )
    assert (outcome.exit_code, message in outcome.output) == (2, True), outcome.output
    assert not (tmp_path / "out").exists()
    assert "Traceback" not in outcome.output


def test_unknown_export_column_is_rejected_before_any_work(
    project: Path, tmp_path: Path
) -> None:
    outcome = invoke(
        project,
        "plan",
        "--set=documents.where=wrods > 1",
        "--set=documents.columns=[id, nope]",
    )
    assert outcome.exit_code == 2
    assert "there is no column 'nope'" in outcome.output
    assert "there is no column 'wrods'" in outcome.output


def test_commands_without_documents_name_the_command_to_run(
    project: Path, tmp_path: Path
) -> None:
    manifest, store = (
        str(project / "letters.yaml"),
        ["--store", str(tmp_path / "store")],
    )
    for verb, *arguments in (
        ["query", "SELECT 1"],
        ["export-documents", "--format=hf", f"--out={tmp_path}"],
    ):
        outcome = call(verb, manifest, *arguments, *store, code=2)
        assert re.search(
            r"no documents are read yet.*run .*--until ingest", outcome.output
        ), outcome.output


def test_query_reads_every_column_of_every_document(project: Path) -> None:
    assert asked(
        project, "SELECT kept, count(*) AS n FROM documents GROUP BY kept ORDER BY n"
    ) == [
        {"kept": False, "n": 2},
        {"kept": True, "n": 63},
    ]
    assert asked(
        project,
        "SELECT a.locator, b.original_text LIKE '%ann@%' AS before, a.text LIKE "
        "'%ann@%' AS after "
        "FROM documents a JOIN documents b ON a.id = b.id WHERE a.clean_mask_email > 0",
    ) == [{"locator": "mail", "before": True, "after": False}]
    assert asked(
        project,
        "WITH d AS (SELECT * FROM documents WHERE source = 'notes') SELECT "
        "licence, url, kept FROM d",
    ) == [{"licence": None, "url": None, "kept": True}]
    names = [row["column_name"] for row in asked(project, "DESCRIBE documents")]
    assert {"id", "text", "filter_words", "filter_2_words", "original_text"} <= {*names}


def test_decimal_integers_are_integers_in_json(project: Path) -> None:
    [totals] = asked(
        project,
        "SELECT sum(filter_words) AS a, 7::DECIMAL(20, 0) AS b, 1.5::DECIMAL(4, 2) AS "
        "c, max(NULL::HUGEINT) AS d FROM documents WHERE kept",
    )
    words = [
        row["filter_words"]
        for row in asked(project, "SELECT filter_words FROM documents WHERE kept")
    ]
    assert totals == {"a": sum(words), "b": 7, "c": 1.5, "d": None}


def test_query_prints_a_table_or_csv_or_writes_a_file(
    project: Path, tmp_path: Path
) -> None:
    sql = (
        "SELECT locator, filter_words FROM documents WHERE filter_words > 17 AND "
        "source = 'web' ORDER BY locator"
    )
    table = invoke(project, "query", sql).stdout
    assert [line.split() for line in table.splitlines()][:2] == [
        ["locator", "filter_words"],
        ["long", "150"],
    ]
    assert max(map(len, table.splitlines())) <= 60
    lines = invoke(project, "query", sql, "--csv").stdout.removesuffix("\n").split("\n")
    assert lines[:2] == ["locator,filter_words", "long,150"]
    outcome = invoke(project, "query", sql, "--out", str(tmp_path / "a.parquet"))
    assert outcome.stdout.startswith(f"{len(lines) - 1} rows in ")
    assert pq.read_table(tmp_path / "a.parquet")["locator"].to_pylist() == [
        line.split(",")[0] for line in lines[1:]
    ]
    many = invoke(project, "query", "SELECT locator FROM documents").stdout
    assert "and 25 more rows" in many
    wide = invoke(project, "query", "SELECT * FROM documents LIMIT 1").stdout
    assert max(map(len, wide.splitlines())) <= 60
    assert re.search(r"(?m)^original_text +A note about the river", wide)


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("SELECT * FROM read_text('/etc/passwd')", "disabled by configuration"),
        ("SELECT * FROM '{data}'", "disabled by configuration"),
        ("COPY documents TO '{out}'", "give one SELECT"),
        ("ATTACH '{out}' AS x", "give one SELECT"),
        ("SELECT 1; SELECT 2", "give one SELECT"),
        ("SET enable_external_access = true", "give one SELECT"),
        ("CREATE TABLE x AS SELECT 1", "give one SELECT"),
        ("SELECT nope FROM documents", "nope"),
        ("SELEC 1", "SELEC"),
        ("", "give one SELECT"),
        ("SELECT CAST(text AS INTEGER) FROM documents", "Could not convert"),
        ("SELECT * FROM sqlite_scan('{out}', 'x')", "sqlite_scan"),
        ("SELECT getenv('HOME')", "getenv"),
    ],
)
def test_query_cannot_access_files_or_network(
    project: Path, tmp_path: Path, sql: str, message: str
) -> None:
    files_before = files_in(tmp_path)
    outcome = invoke(
        project,
        "query",
        sql.format(data=project / "data" / "a.jsonl", out=tmp_path / "out"),
    )
    assert (outcome.exit_code, message in outcome.output) == (2, True), outcome.output
    assert files_in(tmp_path) == files_before


def test_explain_prints_the_full_text_with_edits_and_verdicts(project: Path) -> None:
    [row] = asked(project, "SELECT id FROM documents WHERE locator = 'mail'")
    page = invoke(project, "explain", row["id"][:10], "--text").stdout
    assert "[-ann@letters.org-]{+" in page
    assert re.search(r"clean kept *\nedits: 1, ", page)
    dropped = invoke(project, "explain", "short", "--text").stdout
    assert "dropped: gopher_quality/min_words" in dropped
    assert "threshold 5" in dropped
    outcome = invoke(project, "explain", "ffffffff")
    assert (
        outcome.exit_code,
        "no document has the id, locator or address 'ffffffff'" in outcome.output,
    ) == (2, True)


def test_control_characters_of_documents_are_not_printed(project: Path) -> None:
    sql = "SELECT text FROM documents WHERE locator = 'steering'"
    for outcome in (
        invoke(project, "explain", "steering", "--text"),
        invoke(project, "explain", "steering"),
        invoke(project, "query", sql),
    ):
        assert outcome.exit_code == 0
        assert not set(outcome.stdout) & set("\x1b\x07\x9b\u202e"), outcome.stdout
        assert "\u241b[31mred\u2407" in outcome.stdout
    assert not set(invoke(project, "query", sql, "--json").stdout) & set(
        "\x1b\x07\x9b\u202e"
    )
    assert asked(project, sql)[0]["text"].count(STEERING) == 1
    assert visible("a\tb\nc\rd\x7f\x85") == "a\tb\nc\u240dd\u2421<85>"


@pytest.fixture(scope="module")
def object_store() -> Iterator[dict[str, str]]:
    """Environment variables of a fake S3 server with a bucket `bucket`."""
    pytest.importorskip("moto")
    boto3 = pytest.importorskip("boto3")
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    url = f"http://127.0.0.1:{server.get_host_and_port()[1]}"
    keys = {
        "aws_access_key_id": "any",
        "aws_secret_access_key": SECRET,
        "region_name": "us-east-1",
    }
    boto3.client("s3", endpoint_url=url, **keys).create_bucket(Bucket="bucket")
    yield {
        "AWS_ACCESS_KEY_ID": "any",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_ENDPOINT_URL": url,
    }
    server.stop()


def publish(
    project: Path, environment: dict[str, str], *arguments: str
) -> subprocess.CompletedProcess[str]:
    """Run the command in a separate process, whose libraries read their addresses at
    import.
    """
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "gristmill.flows.cli.main",
            "export-documents",
            str(project / "letters.yaml"),
            "--store",
            str(project / "store"),
            *arguments,
        ],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_export_to_an_object_store_equals_export_to_a_folder(
    project: Path, tmp_path: Path, object_store: dict[str, str]
) -> None:
    import boto3

    arguments = ["--format=hf", "--shard-size=3kB"]
    process = publish(
        project, object_store, *arguments, "--out=s3://bucket/sets/letters"
    )
    assert process.returncode == 0, process.stderr
    exported(project, tmp_path / "out", *arguments)
    client = boto3.client(
        "s3",
        endpoint_url=object_store["AWS_ENDPOINT_URL"],
        aws_access_key_id="any",
        aws_secret_access_key=SECRET,
        region_name="us-east-1",
    )
    keys = [
        item["Key"]
        for item in client.list_objects_v2(Bucket="bucket", Prefix="sets/letters/")[
            "Contents"
        ]
    ]
    stored = {
        key.removeprefix("sets/letters/"): client.get_object(Bucket="bucket", Key=key)[
            "Body"
        ].read()
        for key in keys
    }
    assert stored == files_in(tmp_path / "out")
    assert SECRET not in process.stdout + process.stderr + "".join(
        map(repr, stored.values())
    )


def test_hub_export_creates_a_private_dataset(project: Path, tmp_path: Path) -> None:
    arguments = ["--format=hf", "--shard-size=3kB"]
    with serve_hub() as hub:
        environment = {
            "HF_ENDPOINT": hub.url,
            "HF_TOKEN": SECRET,
            "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }
        process = publish(
            project, environment, *arguments, "--out=hf://datasets/ann/letters"
        )
        assert process.returncode == 0, process.stderr
        again = publish(
            project, environment, *arguments, "--out=hf://datasets/ann/letters"
        )
        different_export = publish(
            project,
            environment,
            *arguments,
            "--dropped",
            "--out",
            "hf://datasets/ann/letters",
        )
    exported(project, tmp_path / "out", *arguments)
    stored = {
        name: content
        for name, content in hub.files["ann/letters"].items()
        if name != ".gitattributes"
    }
    assert stored == files_in(tmp_path / "out")
    assert hub.private == {"ann/letters"}
    assert hub.tokens == {SECRET}
    # last: the data set is incomplete before it
    assert hub.commits[-1] == ["_documents.json"]
    assert "nothing changed" in again.stdout
    assert (
        different_export.returncode,
        "already holds another export" in different_export.stderr,
    ) == (2, True)
    output = "".join(
        published.stdout + published.stderr
        for published in (process, again, different_export)
    )
    assert SECRET not in output + "".join(map(repr, stored.values())) + repr(
        files_in(project / "store" / "runs")
    )


def test_corpus_ends_before_the_first_uncommitted_step(
    project: Path, tmp_path: Path
) -> None:
    shutil.copytree(project / "store", tmp_path / "store")
    [filter_folder] = (tmp_path / "store" / "filter").iterdir()
    shutil.rmtree(filter_folder)
    outcome = call(
        "query",
        project / "letters.yaml",
        "DESCRIBE documents",
        "--json",
        "--store",
        tmp_path / "store",
    )
    names = [row["column_name"] for row in json.loads(outcome.stdout)]
    assert "clean_mask_email" in names
    assert "filter_words" not in names
    assert "words" not in names

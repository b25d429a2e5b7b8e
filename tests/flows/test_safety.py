"""A manifest is data, and the files of a run hold no credentials."""

from __future__ import annotations

import inspect
import io
import re
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gristmill.core.files import read_json
from gristmill.dataprep.readers.readers import read_records
from gristmill.dataprep.readers.records import Reading, Record
from gristmill.dataprep.readers.sources import find_files
from gristmill.flows.cli import main as cli
from gristmill.flows.pages.page_server import listen_locally
from gristmill.flows.prefect import serving
from gristmill.flows.running.run import Runner, StageFailedError
from gristmill.mixtures.loader import ManifestError, parse_manifest
from gristmill.mixtures.manifest import Manifest
from gristmill.mixtures.schema.sources import Source
from tests.commands import call

Make = Callable[..., Runner]
SECRET = "hunter2"
URL = f"https://me:{SECRET}@example.org/a.jsonl?sig={SECRET}&pwd={SECRET}&auth={SECRET}&code={SECRET}"
MASKED = "https://***@example.org/a.jsonl?sig=***&pwd=***&auth=***&code=***"
BUCKET = "s3://AKIAEXAMPLE:wJalrXUtnFEMI/K7MDENG@bucket"
MANIFEST = "name: a\nsources: {a: {path: x}}\n"


@pytest.mark.parametrize(
    "line",
    [
        "!!python/object/apply:os.mkdir [{trace}]",
        "!!python/name:os.mkdir",
        "!!python/module:os",
    ],
)
def test_a_manifest_runs_no_code(line: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    with pytest.raises(ManifestError, match="not valid YAML"):
        parse_manifest(f"{MANIFEST}seed: {line.format(trace=trace)}\n", "a.yaml")
    with pytest.raises(ManifestError, match="is not valid YAML"):
        parse_manifest(MANIFEST, "a.yaml", [f"seed={line.format(trace=trace)}"])
    assert not trace.exists()


def test_secrets_are_rejected_in_files_and_settings() -> None:
    options = ["engine.runner=FlinkRunner", f"engine.options.password={SECRET}"]
    with pytest.raises(
        ManifestError, match=r"engine\.options\.password: secrets do not belong"
    ) as error:
        parse_manifest(MANIFEST, "a.yaml", options)
    assert SECRET not in str(error.value)


def test_no_file_of_a_run_contains_url_credentials(
    toy_runner: Make, tmp_path: Path
) -> None:
    (tmp_path / "modules" / "gristmill_secret_stages.py").write_text(
        "def first(inputs, config, out, context):\n"
        "    print('reading', config['path'])\n"
        "    assert 'hunter2' in config['path']\n"
        "    for path in context.work.parents[2].rglob('*'):\n"
        "        assert path.is_dir() or 'hunter2' not in path.read_text(), f'{path} "
        "holds it while the stage runs'\n"
        "    raise ValueError(config['path'] + ' is not there')\n"
    )
    runner = toy_runner(first={"path": URL})
    node = runner.session.plan["first"]
    object.__setattr__(node.stage, "run", "gristmill_secret_stages:first")
    record = replace(
        runner.session,
        manifest=Manifest(name="toy", sources={"a": Source(path=URL)}),
        overrides=[f"sources.a.path={URL}"],
    ).start_record()
    with (
        pytest.raises(StageFailedError, match=re.escape(f"{MASKED} is not there")),
        record.until_end(),
    ):
        runner.run_stage("first")
    written_files = [
        path for path in runner.session.store.root.rglob("*") if path.is_file()
    ]
    assert {path.name for path in written_files} >= {
        "run.json",
        "stage.json",
        "error.json",
        "1.log",
    }
    assert [path for path in written_files if SECRET in path.read_text()] == []
    assert (
        read_json(record.folder / "run.json")["manifest"]["sources"]["a"]["path"]
        == MASKED
    )


@pytest.mark.slow
def test_summaries_of_stages_mask_url_credentials(
    toy_runner: Make, tmp_path: Path
) -> None:
    (tmp_path / "modules" / "gristmill_telling_stages.py").write_text(
        "def first(inputs, config, out, context):\n"
        "    (out / 'a.txt').write_text('a')\n"
        "    return {'sources': [{'path': config['path'], 'token': 'the'}]}\n"
    )
    runner = toy_runner(first={"path": URL})
    object.__setattr__(
        runner.session.plan["first"].stage, "run", "gristmill_telling_stages:first"
    )
    summary = runner.run_stage("first").folder.manifest()["summary"]
    assert summary == {"sources": [{"path": MASKED, "token": "the"}]}
    assert [
        path
        for path in runner.session.store.root.rglob("*")
        if path.is_file() and SECRET in path.read_text()
    ] == []


def test_messages_of_libraries_mask_parts_of_credentials(
    toy_runner: Make, tmp_path: Path
) -> None:
    (tmp_path / "modules" / "gristmill_refused_stages.py").write_text(
        "def first(inputs, config, out, context):\n"
        "    context.warn('first: Invalid bucket name ' + config['path'][5:30])\n"
        "    print('looking for', config['path'].split('@')[0][5:])\n"
        "    raise ValueError('Parameter validation failed: Invalid bucket name ' + "
        "repr(config['path'][5:30]))\n"
    )
    runner = toy_runner(first={"path": BUCKET})
    object.__setattr__(
        runner.session.plan["first"].stage, "run", "gristmill_refused_stages:first"
    )
    with pytest.raises(StageFailedError) as error:
        runner.run_stage("first")
    assert "Invalid bucket name '***'" in str(error.value)
    written_files = [
        path for path in runner.session.store.root.rglob("*") if path.is_file()
    ]
    assert [path for path in written_files if "wJalrXUtnFEMI" in path.read_text()] == []
    assert "wJalrXUtnFEMI" not in str(runner.emit.events)  # type: ignore[attr-defined]


@pytest.mark.slow
def test_store_errors_mask_credentials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("some text")
    (tmp_path / "a.yaml").write_text("name: a\nsources: {a: {path: a.txt}}\n")

    def refuse(location: str) -> None:
        raise ValueError(f"Invalid bucket name {location[5:30]!r}")

    monkeypatch.setattr("gristmill.core.store.Store.at", refuse)
    for command in (["status", str(tmp_path / "a.yaml")], ["runs"]):
        result = call(*command, "--store", BUCKET, code=2)
        assert "Invalid bucket name '***'" in result.output
        assert "wJalrXUtnFEMI" not in result.output


def test_archive_members_are_never_written_to_disk(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "data" / "deep"
    folder.mkdir(parents=True)
    with tarfile.open(folder / "evil.tar", "w") as archive:
        for name in ("../../evil.txt", str(tmp_path / "absolute.txt")):
            member = tarfile.TarInfo(name)
            member.size = 5
            archive.addfile(member, io.BytesIO(b"prose"))
        link = tarfile.TarInfo("link.txt")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/hostname"
        archive.addfile(link)
    paths_before = sorted(tmp_path.rglob("*"))
    (file,) = find_files(
        "a", Source.model_validate({"path": str(folder / "evil.tar")})
    ).files
    archive_records = [
        item for item in read_records(file, Reading()) if isinstance(item, Record)
    ]
    assert [record.text for record in archive_records] == ["prose"], (
        "hidden names and links are not read"
    )
    assert sorted(tmp_path.rglob("*")) == paths_before


def test_servers_listen_on_the_loopback_address() -> None:
    commands = [
        command.callback
        for command in cli.app.registered_commands
        if command.callback is not None
    ]
    options = {
        name for command in commands for name in inspect.signature(command).parameters
    }
    assert "port" in options
    assert "host" not in options
    with listen_locally(0) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
    assert re.search(r'"--host",\s+"127\.0\.0\.1"', inspect.getsource(serving))

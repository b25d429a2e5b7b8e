"""What `make engines` fetches: once, whole, and with a sentence where it cannot be had."""

from __future__ import annotations

from pathlib import Path

import pytest

from gristmill.dataprep.jobs import engine_downloads
from gristmill.dataprep.jobs.engine_downloads import FLINK_VERSION, MissingEngineError, Part, fetch, find, flink
from gristmill.mixtures.engine import FLINK_VERSIONS

LACKS_IT = r"^flink-2.0: Maven's repository here has no {jar}; .* flink-2.0=FILE`$"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(engine_downloads.CACHE_VARIABLE, str(tmp_path / "engines"))
    return tmp_path / "engines"


def toy(tool: str = "sh", fails: bool = False) -> Part:
    def put(folder: Path) -> None:
        (folder / "program").write_text("half" if fails else "whole")
        if fails:
            raise MissingEngineError("toy: the registry has none")

    return Part("toy", "toy-1", "program", tool, put)


def test_a_part_is_fetched_once_and_again_where_it_was_damaged(cache: Path) -> None:
    assert fetch(toy()) == f"toy: fetched into {cache / 'toy-1'}"
    assert fetch(toy()) == f"toy: is in {cache / 'toy-1'}"
    (cache / "toy-1" / "program").write_text("changed")
    assert fetch(toy()) == f"toy: fetched into {cache / 'toy-1'}"
    assert find(toy()).read_text() == "whole"
    assert [path.name for path in cache.iterdir()] == ["toy-1"]


def test_what_fails_leaves_nothing_behind(cache: Path) -> None:
    with pytest.raises(MissingEngineError, match="toy: the registry has none"):
        fetch(toy(fails=True))
    assert list(cache.iterdir()) == []


def test_a_missing_tool_and_a_missing_part_are_named(cache: Path) -> None:
    with pytest.raises(MissingEngineError, match=r"^toy: needs no-such-tool, which is not on this machine$"):
        fetch(toy("no-such-tool"))
    with pytest.raises(MissingEngineError, match=rf"^flink-2.0 is not in {cache}: fetch it with `make engines`"):
        find(flink("2.0"))


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("Could not find artifact {jar} in central", LACKS_IT),
        ("[ERROR] {jar} was not found in central during a previous attempt", LACKS_IT),
        ("[ERROR] no route to host", r"^mvn --batch-mode failed: \[ERROR\] no route to host$"),
    ],
)
def test_a_repository_that_lacks_the_job_server_is_told_from_one_that_cannot_be_reached(
    said: str, expected: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jar = f"org.apache.beam:beam-runners-flink-2.0-job-server:{engine_downloads.beam_version()}"
    mvn = tmp_path / "bin" / "mvn"
    mvn.parent.mkdir()
    mvn.write_text(f"#!/bin/sh\necho '{said.format(jar=jar)}'\nexit 1\n")
    mvn.chmod(0o755)
    monkeypatch.setenv("PATH", f"{mvn.parent}:/usr/bin:/bin")
    with pytest.raises(MissingEngineError, match=expected.format(jar=jar)):
        fetch(flink("2.0"))


WITHOUT_JOB_SERVERS = """\
#!/bin/sh
case "$*" in
  *package*) mkdir target && cp pom.xml target/job-server-1.jar ;;
  *) echo "[ERROR] Could not find artifact in central"; exit 1 ;;
esac
"""


def test_a_job_server_is_assembled_from_its_runner_where_the_repository_has_none(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mvn = tmp_path / "bin" / "mvn"
    mvn.parent.mkdir()
    mvn.write_text(WITHOUT_JOB_SERVERS)
    mvn.chmod(0o755)
    monkeypatch.setenv("PATH", f"{mvn.parent}:/usr/bin:/bin")
    monkeypatch.setattr(engine_downloads, "PARTS", {"flink": flink})
    [(line, beam)] = engine_downloads.RUNNERS.items()
    assert engine_downloads.main([]) == 0
    said = capsys.readouterr()
    assert said.err.startswith(f"flink-{FLINK_VERSION}: Maven's repository here has no org.apache.beam:")
    assert said.out == (
        f"flink-{line}: fetched into {cache / flink(line).folder}; Maven's repository here has no org.apache.beam:"
        f"beam-runners-flink-{line}-job-server:{engine_downloads.beam_version()}, so that it was assembled from Beam "
        f"{beam}'s runner\n"
    )
    pom = find(flink(line)).read_text()
    assert f"<artifactId>beam-runners-flink-{line}</artifactId>\n      <version>{beam}</version>" in pom
    assert engine_downloads.main([f"flink-{FLINK_VERSION}"]) == 1  # which was named: another line does not stand in
    assert len(list(cache.iterdir())) == 1


def test_flink_itself_is_fetched_where_its_job_server_is_there_or_it_is_asked_for(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def put(line: str, folder: Path) -> None:
        (folder / "lib").mkdir()
        (folder / "lib" / "flink-dist.jar").write_text(f"Flink {line}")

    monkeypatch.setattr(engine_downloads, "_fetch_flink_cluster", put)
    monkeypatch.setattr(engine_downloads, "PARTS", {"flink-cluster": engine_downloads.flink_cluster})
    name = f"flink-cluster-{FLINK_VERSION}"
    assert engine_downloads.main([]) == 1
    assert capsys.readouterr().err == "".join(
        f"flink-cluster-{line}: is not fetched, for flink-{line} is not there, without which it is of no use\n"
        for line in (FLINK_VERSION, *engine_downloads.RUNNERS)
    )
    assert engine_downloads.main(["flink-cluster"]) == 0
    (cache / name / "lib" / "flink-dist.jar").unlink()
    (tmp_path / "server.jar").write_text("a job server")
    assert engine_downloads.main([f"flink-{FLINK_VERSION}={tmp_path / 'server.jar'}"]) == 0
    assert engine_downloads.main([]) == 0
    assert find(engine_downloads.flink_cluster()).read_text() == f"Flink {FLINK_VERSION}"


def test_an_unknown_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert engine_downloads.main(["flnk", "flink-1.7=jar"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("unknown: flink-1.7, flnk; there are spark, flink, flink-cluster, dataflow, flink-1.")


def test_what_the_registry_lacks_is_taken_from_a_file(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jar = tmp_path / "built.jar"
    jar.write_text("a job server")
    assert engine_downloads.main([f"flink-1.20={jar}"]) == 0
    assert capsys.readouterr().out == f"flink-1.20: fetched into {cache / flink('1.20').folder}\n"
    assert find(flink("1.20")).read_text() == "a job server"
    jar.write_text("a newer one")
    assert engine_downloads.main([f"flink-1.20={jar}", "flink=/nowhere.jar", f"spark={jar}"]) == 1
    assert find(flink("1.20")).read_text() == "a newer one"
    assert capsys.readouterr().err == (
        f"flink-{FLINK_VERSION}: cannot be taken from /nowhere.jar, which is no file\n"
        "spark: is more than one file, and is fetched whole\n"
    )


def test_the_versions_of_flink_are_those_of_the_installed_beam() -> None:
    from apache_beam.options.pipeline_options import FlinkRunnerOptions

    assert list(FLINK_VERSIONS) == FlinkRunnerOptions.PUBLISHED_FLINK_VERSIONS

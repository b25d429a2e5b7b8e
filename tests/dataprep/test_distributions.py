"""Engine downloads (`make engines`): each part is fetched once and completely, or its
absence is reported.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from gristmill.dataprep.runners import engine_downloads
from gristmill.dataprep.runners.engine_downloads import (
    FLINK_VERSION,
    MissingEngineError,
    Part,
    fetch,
    find,
    flink,
)
from gristmill.mixtures.sections.engine import FLINK_VERSIONS

LACKS_IT = r"^flink-2.0: .*{jar}; .*flink-2.0=FILE"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(engine_downloads.CACHE_VARIABLE, str(tmp_path / "engines"))
    return tmp_path / "engines"


def toy(tool: str = "sh", is_broken: bool = False) -> Part:
    def put(folder: Path) -> None:
        (folder / "program").write_text("half" if is_broken else "complete")
        if is_broken:
            raise MissingEngineError("toy: the registry has none")

    return Part("toy", "toy-1", "program", tool, put)


def test_part_is_fetched_once_and_again_if_damaged(cache: Path) -> None:
    assert "fetched" in fetch(toy())
    message = fetch(toy())
    assert "fetched into" not in message
    assert str(cache / "toy-1") in message
    (cache / "toy-1" / "program").write_text("changed")
    assert "fetched" in fetch(toy())
    assert find(toy()).read_text() == "complete"
    assert [path.name for path in cache.iterdir()] == ["toy-1"]


def test_failed_fetch_leaves_no_files(cache: Path) -> None:
    with pytest.raises(MissingEngineError, match="toy: the registry has none"):
        fetch(toy(is_broken=True))
    assert list(cache.iterdir()) == []


def test_missing_tool_and_missing_part_are_named(cache: Path) -> None:
    with pytest.raises(MissingEngineError, match=r"^toy: .*no-such-tool"):
        fetch(toy("no-such-tool"))
    with pytest.raises(
        MissingEngineError, match=rf"^flink-2.0 .*{cache}.*`make engines`"
    ):
        find(flink("2.0"))


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("Could not find artifact {jar} in central", LACKS_IT),
        ("[ERROR] {jar} was not found in central during a previous attempt", LACKS_IT),
        ("[ERROR] no route to host", r"^mvn .*no route to host$"),
    ],
)
def test_missing_job_server_differs_from_an_unreachable_repository(
    output: str,
    expected: str,
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    jar = f"org.apache.beam:beam-runners-flink-2.0-job-server:{engine_downloads.beam_version()}"
    mvn = tmp_path / "bin" / "mvn"
    mvn.parent.mkdir()
    mvn.write_text(f"#!/bin/sh\necho '{output.format(jar=jar)}'\nexit 1\n")
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


def test_job_server_is_assembled_from_the_runner_if_the_repository_lacks_it(
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    mvn = tmp_path / "bin" / "mvn"
    mvn.parent.mkdir()
    mvn.write_text(WITHOUT_JOB_SERVERS)
    mvn.chmod(0o755)
    monkeypatch.setenv("PATH", f"{mvn.parent}:/usr/bin:/bin")
    monkeypatch.setattr(engine_downloads, "PARTS", {"flink": flink})
    [(line, beam)] = engine_downloads.RUNNERS.items()
    assert engine_downloads.main([]) == 0
    output = capsys.readouterr()
    assert output.err.startswith(f"flink-{FLINK_VERSION}: ")
    assert output.out.startswith(
        f"flink-{line}: fetched into {cache / flink(line).folder}"
    )
    assert (
        f"beam-runners-flink-{line}-job-server:{engine_downloads.beam_version()}"
        in output.out
    )
    assert f"Beam {beam}'s runner" in output.out
    pom = find(flink(line)).read_text()
    assert (
        f"<artifactId>beam-runners-flink-{line}</artifactId>\n      "
        f"<version>{beam}</version>" in pom
    )
    # no other version replaces a named one
    assert engine_downloads.main([f"flink-{FLINK_VERSION}"]) == 1
    assert len(list(cache.iterdir())) == 1


def test_flink_cluster_is_fetched_with_its_job_server_or_by_name(
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def put(line: str, folder: Path) -> None:
        (folder / "lib").mkdir()
        (folder / "lib" / "flink-dist.jar").write_text(f"Flink {line}")

    monkeypatch.setattr(engine_downloads, "_fetch_flink_cluster", put)
    monkeypatch.setattr(
        engine_downloads, "PARTS", {"flink-cluster": engine_downloads.flink_cluster}
    )
    name = f"flink-cluster-{FLINK_VERSION}"
    assert engine_downloads.main([]) == 1
    messages = capsys.readouterr().err.splitlines()
    for line, message in zip(
        (FLINK_VERSION, *engine_downloads.RUNNERS), messages, strict=True
    ):
        assert message.startswith(f"flink-cluster-{line}: ")
        assert f"flink-{line} " in message
    assert engine_downloads.main(["flink-cluster"]) == 0
    (cache / name / "lib" / "flink-dist.jar").unlink()
    (tmp_path / "server.jar").write_text("a job server")
    assert (
        engine_downloads.main([f"flink-{FLINK_VERSION}={tmp_path / 'server.jar'}"]) == 0
    )
    assert engine_downloads.main([]) == 0
    assert (
        find(engine_downloads.flink_cluster()).read_text() == f"Flink {FLINK_VERSION}"
    )


def test_unknown_engine_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    assert engine_downloads.main(["flnk", "flink-1.7=jar"]) == 2
    message = capsys.readouterr().err
    assert "flink-1.7, flnk" in message
    assert "spark, flink, flink-cluster, dataflow, flink-1." in message


def test_part_is_taken_from_a_file(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jar = tmp_path / "built.jar"
    jar.write_text("a job server")
    assert engine_downloads.main([f"flink-1.20={jar}"]) == 0
    assert str(cache / flink("1.20").folder) in capsys.readouterr().out
    assert find(flink("1.20")).read_text() == "a job server"
    jar.write_text("a newer one")
    assert (
        engine_downloads.main(
            [f"flink-1.20={jar}", "flink=/nowhere.jar", f"spark={jar}"]
        )
        == 1
    )
    assert find(flink("1.20")).read_text() == "a newer one"
    flink_error, spark_error = capsys.readouterr().err.splitlines()
    assert flink_error.startswith(f"flink-{FLINK_VERSION}: ")
    assert "/nowhere.jar" in flink_error
    assert spark_error.startswith("spark: ")


def test_flink_versions_equal_those_of_the_installed_beam() -> None:
    from apache_beam.options.pipeline_options import FlinkRunnerOptions

    assert list(FLINK_VERSIONS) == FlinkRunnerOptions.PUBLISHED_FLINK_VERSIONS

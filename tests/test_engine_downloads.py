"""Engine downloads (`make engines`): each is fetched once and completely, or its absence
is reported.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.engines.clusters import find_engine
from gristmill.dataprep.runners.errors import MissingEngineError
from tests.ci_scripts import load_script

WITHOUT_JOB_SERVERS = """\
#!/bin/sh
case "$*" in
  *package*) mkdir target && cp pom.xml target/job-server-1.jar ;;
  *) echo "[ERROR] Could not find artifact in central"; exit 1 ;;
esac
"""


@pytest.fixture
def downloads() -> Any:
    return load_script("engine_downloads")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GRISTMILL_ENGINES", str(tmp_path / "engines"))
    return tmp_path / "engines"


def test_engine_is_fetched_once_and_a_failed_fetch_leaves_no_files(
    downloads: Any, cache: Path
) -> None:
    def fail(folder: Path) -> None:
        (folder / "program").write_text("half")
        raise downloads.DownloadError("the registry has none")

    with pytest.raises(MissingEngineError, match="make engines"):
        find_engine("toy-*/program")
    with pytest.raises(downloads.DownloadError):
        downloads.put("toy-1", fail)
    assert list(cache.iterdir()) == []
    downloads.put("toy-1", lambda folder: (folder / "program").write_text("whole"))
    downloads.put("toy-1", fail)
    assert find_engine("toy-*/program").read_text() == "whole"
    assert [path.name for path in cache.iterdir()] == ["toy-1"]


def test_job_server_is_assembled_from_the_runner_if_the_repository_lacks_it(
    downloads: Any, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mvn = tmp_path / "bin" / "mvn"
    mvn.parent.mkdir()
    mvn.write_text(WITHOUT_JOB_SERVERS)
    mvn.chmod(0o755)
    monkeypatch.setenv("PATH", f"{mvn.parent}:/usr/bin:/bin")
    lines: list[str] = []
    monkeypatch.setattr(
        downloads, "fill_flink_cluster", lambda line, folder: lines.append(line)
    )
    downloads.fetch_flink()
    assert lines == [downloads.RUNNER_LINE]
    assert (
        f"<artifactId>beam-runners-flink-{downloads.RUNNER_LINE}</artifactId>\n      "
        f"<version>{downloads.RUNNER_BEAM}</version>"
        in find_engine("flink-*-beam-*/*.jar").read_text()
    )

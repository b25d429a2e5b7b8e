"""Engines that are not Python dependencies: their names, versions and cache folders.

`python -m gristmill.dataprep.runners.engine_downloads` (`make engines`) fetches them into
a cache outside of the repository, each by the client of its registry, which verifies
the download: pip against the index's SHA-256 (Spark's is pinned below), Maven against
the repository's checksums. An engine is not fetched again if its executable file has
the recorded SHA-256.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

from gristmill.core.files import sha256_file
from gristmill.dataprep.runners.errors import WorkerError
from gristmill.mixtures.sections.engine import FLINK_VERSIONS

CACHE_VARIABLE = "GRISTMILL_ENGINES"
"""Environment variable with the cache folder; by default it is in the user's cache
folder.
"""
SPARK_VERSION = "3.5.9"
"""Version of Spark's distribution, contained in the PyPI package `pyspark`; the last
line that runs on Java 8 to 17.
"""
SPARK_SHA256 = "ea27adc39ddac9413b8951e45aa748cbed6c785971b81386efc41938f6243d93"
"""SHA-256 of its source archive on PyPI."""
FLINK_VERSION = FLINK_VERSIONS[-1]
"""Default version, as in Beam."""
JOB_SERVER = "org.apache.beam:beam-runners-flink-{line}-job-server:{beam}"
"""Maven coordinates of Beam's job server for Flink."""
RUNNERS = {"1.19": "2.62.0"}
"""Line of Flink -> Beam version of the runner from which a job server is assembled if
the repository does not have it. Partial mirrors of Maven Central have this version with
its dependencies; the tests run the installed Beam's jobs on it.
"""
RUNNER_POM = """\
<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>gristmill</groupId>
  <artifactId>job-server</artifactId>
  <version>1</version>
  <dependencies>
    <dependency>
      <groupId>org.apache.beam</groupId>
      <artifactId>beam-runners-flink-{line}</artifactId>
      <version>{beam}</version>
      <exclusions>
        <exclusion><groupId>org.apache.beam</groupId><artifactId>beam-sdks-java-transform-service-launcher</artifactId></exclusion>
        <exclusion><groupId>org.apache.flink</groupId><artifactId>flink-rpc-akka-loader</artifactId></exclusion>
        <exclusion><groupId>org.apache.flink</groupId><artifactId>flink-shaded-zookeeper-3</artifactId></exclusion>
        <exclusion><groupId>io.grpc</groupId><artifactId>*</artifactId></exclusion>
        <exclusion><groupId>org.conscrypt</groupId><artifactId>*</artifactId></exclusion>
      </exclusions>
    </dependency>
    <dependency>
      <groupId>org.slf4j</groupId>
      <artifactId>slf4j-simple</artifactId>
      <version>1.7.30</version>
    </dependency>
  </dependencies>
  <build><plugins><plugin>
    <groupId>org.apache.maven.plugins</groupId>
    <artifactId>maven-shade-plugin</artifactId>
    <version>3.6.0</version>
    <executions><execution>
      <phase>package</phase>
      <goals><goal>shade</goal></goals>
      <configuration>
        <createDependencyReducedPom>false</createDependencyReducedPom>
        <transformers>
          <transformer implementation="org.apache.maven.plugins.shade.resource.ServicesResourceTransformer"/>
          <transformer implementation="org.apache.maven.plugins.shade.resource.ManifestResourceTransformer">
            <mainClass>org.apache.beam.runners.flink.FlinkJobServerDriver</mainClass>
          </transformer>
        </transformers>
        <filters><filter>
          <artifact>*:*</artifact>
          <excludes><exclude>META-INF/*.SF</exclude><exclude>META-INF/*.DSA</exclude><exclude>META-INF/*.RSA</exclude></excludes>
        </filter></filters>
      </configuration>
    </execution></executions>
  </plugin></plugins></build>
</project>
"""
"""POM that packs a runner and its dependencies into one jar, which starts as Beam's job
server and goes to Flink with each job: without dependencies of an embedded Flink,
ZooKeeper and Google's stores, and without the signatures of the original jars.
"""
MAVEN = ("mvn", "--batch-mode", "--quiet", "--strict-checksums", "-Dstyle.color=never")
DATAFLOW = (
    "google-cloud-dataflow-client==0.13.0",
    "google-auth==2.62.2",
    "google-api-core==2.44.0",
    "google-apitools==0.5.31",
    "google-cloud-core==2.8.0",
    "google-cloud-monitoring==2.32.0",
    "google-cloud-storage==3.17.1",
    "google-crc32c==1.9.0",
    "google-resumable-media==2.11.0",
    "googleapis-common-protos==1.76.0",
    "grpcio-status==1.85.1",
    "google-auth-httplib2==0.4.4",
    "httplib2==0.32.1",
    "oauth2client==4.1.3",
    "proto-plus==1.29.0",
    "cachetools==8.0.1",
    "fasteners==0.20",
    "pyasn1==0.6.5",
    "pyasn1-modules==0.4.2",
    "rsa==4.9.1",
)
"""Packages for a dry run of a Dataflow job; to run one, install `apache-beam[gcp]`."""
WHOLE = "whole.json"
"""File with the SHA-256 by file, written last into a part's folder."""


class MissingEngineError(WorkerError):
    """Error of an engine, or a tool to fetch it, that is not on this machine."""


Fill = Callable[[Path], str | None]
"""Function that fills an empty folder; returns a note for the message, or None."""


@dataclass(frozen=True)
class Part:
    """Engine, or part of one, to fetch.

    Attributes:
        name: name on the command line.
        folder: its folder in the cache, with its version.
        file: its executable file, below the folder.
        tool: the program that fetches it.
        fetch: fills an empty folder.
        needs: part that this one requires; if that is missing, this one is fetched only
            if named explicitly.
        instead: part to fetch if this one is unavailable and was not named explicitly.
    """

    name: str
    folder: str
    file: str
    tool: str
    fetch: Fill
    needs: Part | None = None
    instead: Part | None = None

    @property
    def path(self) -> Path:
        """Path of its file, which may not exist."""
        return cache_folder() / self.folder / self.file


def cache_folder() -> Path:
    """Cache folder of the engines: GRISTMILL_ENGINES, or `gristmill/engines` in the
    user's cache folder.
    """
    configured = os.environ.get(CACHE_VARIABLE)
    if configured:
        return Path(configured)
    return (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        / "gristmill"
        / "engines"
    )


def spark() -> Part:
    """Spark's distribution."""
    return Part(
        "spark",
        f"spark-{SPARK_VERSION}",
        "bin/spark-submit",
        sys.executable,
        _fetch_spark,
    )


def flink(line: str = FLINK_VERSION) -> Part:
    """Beam's job server for a line of Flink, such as `2.2`."""
    jar = f"beam-runners-flink-{line}-job-server.jar"
    return Part(
        f"flink-{line}",
        f"flink-{line}-beam-{beam_version()}",
        jar,
        "mvn",
        partial(_fetch_flink, line, jar),
        instead=None if line in RUNNERS else flink(next(iter(RUNNERS))),
    )


def flink_cluster(line: str = FLINK_VERSION) -> Part:
    """Flink itself, to start a trial cluster: the distribution's jars, which the PyPI
    package contains.
    """
    return Part(
        f"flink-cluster-{line}",
        f"flink-cluster-{line}",
        "lib/flink-dist.jar",
        sys.executable,
        partial(_fetch_flink_cluster, line),
        flink(line),
        None if line in RUNNERS else flink_cluster(next(iter(RUNNERS))),
    )


def dataflow() -> Part:
    """Packages of Beam's extra `gcp` with which its Dataflow runner can describe a job,
    but not store it.
    """

    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps")

    def fetch(folder: Path) -> None:
        _call(*pip, f"--target={folder}", *DATAFLOW)

    return Part(
        "dataflow",
        f"dataflow-{beam_version()}",
        "google/cloud/dataflow/__init__.py",
        sys.executable,
        fetch,
    )


PARTS: dict[str, Callable[[], Part]] = {
    "spark": spark,
    "flink": flink,
    "flink-cluster": flink_cluster,
    "dataflow": dataflow,
}
"""Parts that are fetched by default."""
LINES: dict[str, Callable[[], Part]] = {
    f"{name}-{line}": partial(part, line)
    for name, part in (("flink", flink), ("flink-cluster", flink_cluster))
    for line in FLINK_VERSIONS
}
"""Parts by line of Flink."""


def beam_version() -> str:
    """Version of the installed Beam, which its engines must share."""
    return version("apache-beam")


def is_there(part: Part) -> bool:
    """Test if a part was fetched."""
    return (cache_folder() / part.folder / WHOLE).exists()


def find(part: Part) -> Path:
    """Find the file of a fetched part.

    Raises:
        MissingEngineError: the part was not fetched.
    """
    if not is_there(part):
        raise MissingEngineError(
            f"{part.name} is not in {cache_folder()}: fetch it with `make engines`, or "
            f"`python -m {__spec__.name} {part.name}`"
        )
    return part.path


def fetch(part: Part) -> str:
    """Fetch a part unless it is complete in the cache; returns a message.

    Raises:
        MissingEngineError: its tool is not on this machine, or failed.
    """
    folder = cache_folder() / part.folder
    try:
        sums = json.loads((folder / WHOLE).read_bytes())
        is_whole = all(sha256_file(folder / file) == sums[file] for file in sums)
    except (OSError, ValueError):
        is_whole = False
    if is_whole:
        return f"{part.name}: is in {folder}"
    if shutil.which(part.tool) is None:
        raise MissingEngineError(
            f"{part.name}: needs {part.tool}, which is not on this machine"
        )
    return _put(part, part.fetch)


def lay(file: Path, part: Part) -> str:
    """Install a single-file part from a local file, for a part that the registry lacks;
    returns a message.

    Raises:
        MissingEngineError: the part has more than one file, or the file does not exist.
    """
    if "/" in part.file:
        raise MissingEngineError(
            f"{part.name}: is more than one file, and is fetched whole"
        )
    if not file.is_file():
        raise MissingEngineError(
            f"{part.name}: cannot be taken from {file}, which is no file"
        )

    def copy(folder: Path) -> None:
        shutil.copy(file, folder / part.file)

    return _put(part, copy)


def _put(part: Part, fill: Fill) -> str:
    """Replace a part's folder atomically."""
    folder = cache_folder() / part.folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        dir=folder.parent, prefix=f"{part.folder}."
    ) as temporary:
        staging = Path(temporary) / "made"
        staging.mkdir()
        note = fill(staging)
        (staging / WHOLE).write_text(
            json.dumps({part.file: sha256_file(staging / part.file)})
        )
        shutil.rmtree(folder, ignore_errors=True)
        staging.rename(folder)
    return f"{part.name}: fetched into {folder}{note or ''}"


def _call(*command: str, folder: Path | None = None) -> None:
    """Run a tool.

    Raises:
        MissingEngineError: the tool failed; the message has its first line about the
            cause.
    """
    completed = subprocess.run(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    if completed.returncode:
        lines = completed.stdout.strip().splitlines() or ["it printed nothing"]
        missing = [line for line in lines if "Could not find" in line]
        errors = [line for line in lines if "error" in line.lower()]
        reason = (missing or errors or lines)[0].strip()
        raise MissingEngineError(f"{' '.join(command[:2])} failed: {reason}")


def _unpack_source(folder: Path, requirement: str) -> Path:
    """Download the source archive of a package with pip and unpack it beside the folder
    of its part; return the folder of the unpacked files.

    Args:
        requirement: line of a requirements file; a hash in it is checked.
    """
    unpacked = folder.parent / "archive"
    unpacked.mkdir()
    requirements = unpacked / "wanted.txt"
    requirements.write_text(f"{requirement}\n")
    _call(
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--no-binary=:all:",
        f"--dest={unpacked}",
        f"--requirement={requirements}",
    )
    [archived] = unpacked.glob("*.tar.gz")
    with tarfile.open(archived) as archive:
        archive.extractall(unpacked, filter="data")
    return unpacked


def _fetch_spark(folder: Path) -> None:
    """Arrange the archive of `pyspark` as a distribution of Spark (`SPARK_HOME`)."""
    unpacked = _unpack_source(
        folder, f"pyspark=={SPARK_VERSION} --hash=sha256:{SPARK_SHA256}"
    )
    root = unpacked / f"pyspark-{SPARK_VERSION}"
    for name in ("bin", "sbin", "jars"):
        (root / "deps" / name).rename(folder / name)
    (folder / "python").mkdir()
    (root / "pyspark").rename(folder / "python" / "pyspark")
    (root / "lib").rename(folder / "python" / "lib")
    for script in (*(folder / "bin").iterdir(), *(folder / "sbin").iterdir()):
        script.chmod(0o755)


def _fetch_flink(line: str, jar: str, folder: Path) -> str | None:
    """Fetch Beam's job server for a line of Flink; if the repository lacks it, assemble
    it and return a note.
    """
    artifact = JOB_SERVER.format(line=line, beam=beam_version())
    try:
        _call(*MAVEN, "dependency:get", f"-Dartifact={artifact}", "-Dtransitive=false")
    except MissingEngineError as error:
        if not re.search("was not found|Could not find", str(error)):
            raise
        lacks = f"Maven's repository here has no {artifact}"
        if line not in RUNNERS:
            raise MissingEngineError(
                f"flink-{line}: {lacks}; to take it from a file: `python -m "
                f"{__spec__.name} flink-{line}=FILE`"
            ) from error
        source = folder.parent / "source"
        source.mkdir()
        (source / "pom.xml").write_text(
            RUNNER_POM.format(line=line, beam=RUNNERS[line])
        )
        _call(*MAVEN, "package", folder=source)
        (source / "target" / "job-server-1.jar").rename(folder / jar)
        return f"; {lacks}, so that it was assembled from Beam {RUNNERS[line]}'s runner"
    _call(
        *MAVEN,
        "dependency:copy",
        f"-Dartifact={artifact}",
        f"-DoutputDirectory={folder}",
        "-Dmdep.stripVersion=true",
    )
    return None


def _fetch_flink_cluster(line: str, folder: Path) -> None:
    """Arrange the jars of `apache-flink-libraries`, with the distribution's jar under a
    name without its version.
    """
    unpacked = _unpack_source(folder, f"apache-flink-libraries=={line}.*")
    [dist] = unpacked.glob("*/deps/lib/flink-dist-*.jar")
    dist.parent.rename(folder / "lib")
    (folder / "lib" / dist.name).rename(folder / "lib" / "flink-dist.jar")


def main(names: list[str]) -> int:
    """Fetch the named engines, or all, print a message for each, and return 1 if one is
    unavailable.

    Args:
        names: names of parts; `NAME=FILE` installs a part from a local file, for a part
            that the registry lacks.
    """
    requests = [name.partition("=") for name in names]
    part_by_name = {**PARTS, **LINES}
    unknown = {name for name, _, _ in requests} - part_by_name.keys()
    if unknown:
        print(
            f"unknown: {', '.join(sorted(unknown))}; there are "
            f"{', '.join(part_by_name)}",
            file=sys.stderr,
        )
        return 2
    requested_parts = [(part_by_name[name](), file) for name, _, file in requests] or [
        (part(), "") for part in PARTS.values()
    ]
    missing = 0
    for part, file in requested_parts:
        try:
            if not names and part.needs is not None and not is_there(part.needs):
                raise MissingEngineError(
                    f"{part.name}: is not fetched, for {part.needs.name} is not "
                    "there, without which it is of no use"
                )
            print(lay(Path(file), part) if file else fetch(part), flush=True)
        except MissingEngineError as error:
            print(error, file=sys.stderr, flush=True)
            if not names and part.instead is not None:
                requested_parts.append((part.instead, ""))
            else:
                missing = 1
    return missing


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

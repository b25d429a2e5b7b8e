"""The engines that are no Python packages of ours: what they are called, which versions, and where they are kept.

`python -m gristmill.dataprep.jobs.distributions` (`make engines`) fetches them into a cache outside of the repository,
each by the client of its own registry, which checks what it got: pip against the index's SHA-256 (Spark's is pinned
below), Maven against the repository's checksums. What is there and whole, by the SHA-256 of the file that is run, is left
alone.
"""

from __future__ import annotations

import hashlib
import json
import os
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

from gristmill.dataprep.jobs.errors import WorkerError
from gristmill.mixtures.engine import FLINK_VERSIONS

CACHE_VARIABLE = "GRISTMILL_ENGINES"
"""The cache's folder, where the user's own cache folder is not the place."""
SPARK_VERSION = "3.5.9"
"""Of Spark's distribution, which the PyPI package `pyspark` holds whole; the last line that runs on Java 8 to 17."""
SPARK_SHA256 = "ea27adc39ddac9413b8951e45aa748cbed6c785971b81386efc41938f6243d93"
"""Of its source archive, as PyPI has it."""
FLINK_VERSION = FLINK_VERSIONS[-1]
"""The one taken where none is named, as Beam does."""
JOB_SERVER = "org.apache.beam:beam-runners-flink-{line}-job-server:{beam}"
"""Beam's job server for Flink, in Maven's words."""
RUNNERS = {"1.19": "2.62.0"}
"""Line of Flink -> Beam of the runner that a job server is assembled from where the repository has none: one that
repositories with a part of Maven Central have too, with all that it requires. The tests run this Beam's jobs by it."""
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
"""Puts a runner and what it requires into one jar, which starts as Beam's job server and goes to Flink with each job:
without what only a Flink inside of it, ZooKeeper and Google's stores want, and without signatures, which are those of
the jars that it was made from."""
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
"""Packages for a dry run of a Dataflow job; whoever runs one wants `apache-beam[gcp]` whole."""
WHOLE = "whole.json"
"""Written last into a part's folder: SHA-256 by file."""


class MissingEngineError(WorkerError):
    """An engine, or what it takes to get it, is not on this machine."""


@dataclass(frozen=True)
class Part:
    """Something to fetch.

    Attributes:
        name: what a user calls it.
        folder: its folder in the cache, with its version.
        file: what of it is run, below the folder.
        tool: the program that fetches it.
        fetch: puts it into an empty folder; returns what is to be said of it, if anything.
        needs: the part without which it is of no use, if any: it is not fetched then, unless it is named.
        instead: fetched where this one cannot be had, unless this one was named.
    """

    name: str
    folder: str
    file: str
    tool: str
    fetch: Callable[[Path], str | None]
    needs: Part | None = None
    instead: Part | None = None

    @property
    def path(self) -> Path:
        """Where its file is, or would be."""
        return cache_folder() / self.folder / self.file


def cache_folder() -> Path:
    """Where engines are kept: `gristmill/engines` in the user's cache folder, unless GRISTMILL_ENGINES says where."""
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gristmill" / "engines"


def spark() -> Part:
    """Spark's distribution."""
    return Part("spark", f"spark-{SPARK_VERSION}", "bin/spark-submit", sys.executable, _fetch_spark)


def flink(line: str = FLINK_VERSION) -> Part:
    """Beam's job server for a line of Flink, such as `2.2`, which this machine hands jobs to."""
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
    """Flink itself, to start a cluster for a trial: the distribution's Java, which the PyPI package has whole."""
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
    """What Beam's runner for Dataflow wants beside Beam, of its extra `gcp`: enough to describe a job, not to store."""

    def fetch(folder: Path) -> None:
        _call(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", f"--target={folder}", *DATAFLOW)

    return Part("dataflow", f"dataflow-{beam_version()}", "google/cloud/dataflow/__init__.py", sys.executable, fetch)


PARTS: dict[str, Callable[[], Part]] = {
    "spark": spark,
    "flink": flink,
    "flink-cluster": flink_cluster,
    "dataflow": dataflow,
}
"""Those that are fetched where none is named."""
LINES: dict[str, Callable[[], Part]] = {
    f"{name}-{line}": partial(part, line)
    for name, part in (("flink", flink), ("flink-cluster", flink_cluster))
    for line in FLINK_VERSIONS
}
"""Those of other lines of Flink."""


def beam_version() -> str:
    """The installed Beam's, which its engines must share."""
    return version("apache-beam")


def is_there(part: Part) -> bool:
    """Whether a part was fetched."""
    return (cache_folder() / part.folder / WHOLE).exists()


def find(part: Part) -> Path:
    """The file of a part that was fetched.

    Raises:
        MissingEngineError: it was not.
    """
    if not is_there(part):
        raise MissingEngineError(
            f"{part.name} is not in {cache_folder()}: fetch it with `make engines`, or "
            f"`python -m {__spec__.name} {part.name}`"
        )
    return part.path


def fetch(part: Part) -> str:
    """Get a part, unless it is there and whole; returns a sentence about it.

    Raises:
        MissingEngineError: its tool is not here, or failed.
    """
    folder = cache_folder() / part.folder
    if _is_whole(folder):
        return f"{part.name}: is in {folder}"
    if shutil.which(part.tool) is None:
        raise MissingEngineError(f"{part.name}: needs {part.tool}, which is not on this machine")
    return _put(part, part.fetch)


def lay(file: Path, part: Part) -> str:
    """Take a part that is one file from a file of this machine, for what a registry lacks; returns a sentence about it.

    Raises:
        MissingEngineError: the part is more than one file, or there is no such file.
    """
    if "/" in part.file:
        raise MissingEngineError(f"{part.name}: is more than one file, and is fetched whole")
    if not file.is_file():
        raise MissingEngineError(f"{part.name}: cannot be taken from {file}, which is no file")

    def copy(folder: Path) -> None:
        shutil.copy(file, folder / part.file)

    return _put(part, copy)


def _put(part: Part, fill: Callable[[Path], str | None]) -> str:
    """Make a part's folder anew, whole or not at all."""
    folder = cache_folder() / part.folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{part.folder}.") as temporary:
        made = Path(temporary) / "made"
        made.mkdir()
        said = fill(made)
        (made / WHOLE).write_text(json.dumps({part.file: _sha256(made / part.file)}))
        shutil.rmtree(folder, ignore_errors=True)
        made.rename(folder)
    return f"{part.name}: fetched into {folder}{said or ''}"


def _is_whole(folder: Path) -> bool:
    try:
        sums = json.loads((folder / WHOLE).read_bytes())
        return all(_sha256(folder / file) == expected for file, expected in sums.items())
    except (OSError, ValueError):
        return False


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _call(*command: str, folder: Path | None = None, **environment: str) -> str:
    """Run a tool; returns what it printed.

    Raises:
        MissingEngineError: it failed; with the first line that says why.
    """
    ran = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    if ran.returncode:
        lines = ran.stdout.strip().splitlines() or ["it printed nothing"]
        why = [line.partition("Could not find")[1:] for line in lines if "Could not find" in line]
        errors = [line for line in lines if "error" in line.lower()] or lines
        raise MissingEngineError(f"{' '.join(command[:2])} failed: {''.join(why[0]) if why else errors[0].strip()}")
    return ran.stdout


def _fetch_spark(folder: Path) -> None:
    """Lay the archive of `pyspark` out as a distribution of Spark is (`SPARK_HOME`)."""
    unpacked = folder.parent / "archive"
    unpacked.mkdir()
    wanted = unpacked / "wanted.txt"
    wanted.write_text(f"pyspark=={SPARK_VERSION} --hash=sha256:{SPARK_SHA256}\n")
    _call(
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--no-binary=:all:",
        "--require-hashes",
        f"--dest={unpacked}",
        f"--requirement={wanted}",
    )
    with tarfile.open(unpacked / f"pyspark-{SPARK_VERSION}.tar.gz") as archive:
        archive.extractall(unpacked, filter="data")
    root = unpacked / f"pyspark-{SPARK_VERSION}"
    for name in ("bin", "sbin", "jars"):
        (root / "deps" / name).rename(folder / name)
    (folder / "python").mkdir()
    (root / "pyspark").rename(folder / "python" / "pyspark")
    (root / "lib").rename(folder / "python" / "lib")
    for script in (*(folder / "bin").iterdir(), *(folder / "sbin").iterdir()):
        script.chmod(0o755)


def _fetch_flink(line: str, jar: str, folder: Path) -> str | None:
    """Get the job server of a line as Beam publishes it; where the repository has none, assemble one, and say so."""
    artifact = JOB_SERVER.format(line=line, beam=beam_version())
    try:
        _call(*MAVEN, "dependency:get", f"-Dartifact={artifact}", "-Dtransitive=false")
    except MissingEngineError as error:
        if not any(words in str(error) for words in ("was not found", "Could not find")):
            raise
        lacks = f"Maven's repository here has no {artifact}"
        if line not in RUNNERS:
            raise MissingEngineError(
                f"flink-{line}: {lacks}; to take it from a file: `python -m {__spec__.name} flink-{line}=FILE`"
            ) from error
        source = folder.parent / "source"
        source.mkdir()
        (source / "pom.xml").write_text(RUNNER_POM.format(line=line, beam=RUNNERS[line]))
        _call(*MAVEN, "package", folder=source)
        (source / "target" / "job-server-1.jar").rename(folder / jar)
        return f"; {lacks}, so that it was assembled from Beam {RUNNERS[line]}'s runner"
    _call(
        *MAVEN, "dependency:copy", f"-Dartifact={artifact}", f"-DoutputDirectory={folder}", "-Dmdep.stripVersion=true"
    )
    return None


def _fetch_flink_cluster(line: str, folder: Path) -> None:
    """Lay the Java of the archive of `apache-flink-libraries` out, the distribution's jar under a name without version."""
    unpacked = folder.parent / "archive"
    unpacked.mkdir()
    _call(
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--no-binary=:all:",
        f"--dest={unpacked}",
        f"apache-flink-libraries=={line}.*",
    )
    [archived] = unpacked.glob("*.tar.gz")
    with tarfile.open(archived) as archive:
        archive.extractall(unpacked, filter="data")
    [dist] = unpacked.glob("*/deps/lib/flink-dist-*.jar")
    dist.parent.rename(folder / "lib")
    (folder / "lib" / dist.name).rename(folder / "lib" / "flink-dist.jar")


def main(names: list[str]) -> int:
    """Fetch the named engines, or all; says a sentence about each, and returns 1 where one could not be had.

    Args:
        names: `NAME=FILE` takes what of it is run from a file, for what a registry lacks.
    """
    asked = [name.partition("=") for name in names]
    known = {**PARTS, **LINES}
    unknown = {name for name, _, _ in asked} - known.keys()
    if unknown:
        print(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    wanted = [(known[name](), file) for name, _, file in asked] or [(part(), "") for part in PARTS.values()]
    missing = 0
    for part, file in wanted:
        try:
            if not names and part.needs is not None and not is_there(part.needs):
                raise MissingEngineError(
                    f"{part.name}: is not fetched, for {part.needs.name} is not there, without which it is of no use"
                )
            print(lay(Path(file), part) if file else fetch(part), flush=True)
        except MissingEngineError as error:
            print(error, file=sys.stderr, flush=True)
            if not names and part.instead is not None:
                wanted.append((part.instead, ""))
            else:
                missing = 1
    return missing


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

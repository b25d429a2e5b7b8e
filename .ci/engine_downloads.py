"""Download the engines that the tests and benchmarks of other runners need (`make
engines`).

Each is fetched into a cache outside of the repository by the client of its registry,
which verifies the download: pip against the index's SHA-256 (Spark's is pinned below),
Maven and npm against the repository's checksums, Go against its checksum database.
Folders appear whole or not at all.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))
from benchmarks.engines.clusters import engine_cache  # noqa: E402

SPARK_VERSION = "3.5.9"
"""Version of Spark's distribution, contained in the PyPI package `pyspark`; the last
line that runs on Java 8 to 17.
"""
SPARK_SHA256 = "ea27adc39ddac9413b8951e45aa748cbed6c785971b81386efc41938f6243d93"
"""SHA-256 of its source archive on PyPI."""
BEAM_VERSION = version("apache-beam")
"""Version of the installed Beam, which its engines should share."""
FLINK_LINE = "2.2"
"""Newest line of Flink for which Beam publishes a job server."""
JOB_SERVER = "org.apache.beam:beam-runners-flink-{line}-job-server:{beam}"
"""Maven coordinates of Beam's job server for Flink."""
RUNNER_LINE, RUNNER_BEAM = "1.19", "2.62.0"
"""Line of Flink, and Beam version, of the runner from which a job server is assembled
if the repository lacks the published one. Partial mirrors of Maven Central have this
version with its dependencies; it runs the installed Beam's jobs.
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
FAKE_GCS_SERVER = "github.com/fsouza/fake-gcs-server@v{version}"
"""Go module of an emulator of Google Cloud Storage."""
FAKE_GCS_VERSION = "1.56.1"
AZURITE_VERSION = "3.35.0"
"""Version of Microsoft's emulator of Azure Blob Storage, the last that runs on Node.js
20.
"""
MAVEN = ("mvn", "--batch-mode", "--quiet", "--strict-checksums", "-Dstyle.color=never")
PIP = (sys.executable, "-m", "pip")


class DownloadError(RuntimeError):
    """Error of a tool that cannot fetch an engine."""


def put(name: str, fill: Callable[[Path], None]) -> None:
    """Fill a folder of the cache, unless it exists."""
    folder = engine_cache() / name
    if folder.exists():
        print(f"{name}: is in {folder}")
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        dir=folder.parent, prefix=f".{name}."
    ) as temporary:
        staging = Path(temporary) / "staging"
        staging.mkdir()
        fill(staging)
        staging.rename(folder)
    print(f"{name}: fetched into {folder}")


def call(*command: str, folder: Path | None = None) -> None:
    """Run a tool.

    Raises:
        DownloadError: the tool is missing or failed; the message has its first line
            about the cause.
    """
    if shutil.which(command[0]) is None:
        raise DownloadError(f"{command[0]} is not on this machine")
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
        errors = [line for line in lines if "error" in line.lower()]
        raise DownloadError(f"{command[0]} failed: {(errors or lines)[0].strip()}")


def unpack_source(folder: Path, requirement: str) -> Path:
    """Download the source archive of a package with pip and unpack it beside a folder;
    return the folder of the unpacked files.

    Args:
        requirement: line of a requirements file; a hash in it is checked.
    """
    unpacked = folder.parent / "archive"
    unpacked.mkdir()
    requirements = unpacked / "requirements.txt"
    requirements.write_text(f"{requirement}\n")
    call(
        *PIP,
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


def fill_spark(folder: Path) -> None:
    """Arrange the archive of `pyspark` as a distribution of Spark (`SPARK_HOME`)."""
    unpacked = unpack_source(
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


def fill_published_job_server(folder: Path) -> None:
    """Fetch Beam's published job server for Flink."""
    artifact = JOB_SERVER.format(line=FLINK_LINE, beam=BEAM_VERSION)
    call(*MAVEN, "dependency:get", f"-Dartifact={artifact}", "-Dtransitive=false")
    call(
        *MAVEN,
        "dependency:copy",
        f"-Dartifact={artifact}",
        f"-DoutputDirectory={folder}",
        "-Dmdep.stripVersion=true",
    )


def fill_assembled_job_server(folder: Path) -> None:
    """Assemble a job server from Beam's runner for Flink."""
    source = folder.parent / "source"
    source.mkdir()
    (source / "pom.xml").write_text(
        RUNNER_POM.format(line=RUNNER_LINE, beam=RUNNER_BEAM)
    )
    call(*MAVEN, "package", folder=source)
    (source / "target" / "job-server-1.jar").rename(
        folder / f"beam-runners-flink-{RUNNER_LINE}-job-server.jar"
    )


def fill_flink_cluster(line: str, folder: Path) -> None:
    """Arrange the jars of `apache-flink-libraries`, with the distribution's jar under a
    name without its version.
    """
    unpacked = unpack_source(folder, f"apache-flink-libraries=={line}.*")
    [dist] = unpacked.glob("*/deps/lib/flink-dist-*.jar")
    dist.parent.rename(folder / "lib")
    (folder / "lib" / dist.name).rename(folder / "lib" / "flink-dist.jar")


def fetch_spark() -> None:
    """Fetch Spark's distribution."""
    put(f"spark-{SPARK_VERSION}", fill_spark)


def fetch_flink() -> None:
    """Fetch Beam's job server for Flink, and Flink itself for trial clusters; for the
    line of the assembled job server if the repository lacks the published one.
    """
    line = FLINK_LINE
    try:
        put(f"flink-{line}-beam-{BEAM_VERSION}", fill_published_job_server)
    except DownloadError as error:
        print(f"flink-{line}: {error}")
        line = RUNNER_LINE
        put(f"flink-{line}-beam-{BEAM_VERSION}", fill_assembled_job_server)
    put(f"flink-cluster-{line}", partial(fill_flink_cluster, line))


def fetch_dataflow() -> None:
    """Fetch the packages for a dry run of a Dataflow job."""
    put(
        f"dataflow-{BEAM_VERSION}",
        lambda folder: call(
            *PIP, "install", "--quiet", "--no-deps", f"--target={folder}", *DATAFLOW
        ),
    )


def fill_fake_gcs_server(folder: Path) -> None:
    """Build the emulator of Google Cloud Storage."""
    module = FAKE_GCS_SERVER.format(version=FAKE_GCS_VERSION)
    call("env", f"GOBIN={folder}", "go", "install", module)


def fetch_emulators_of_stores() -> None:
    """Fetch the emulators of Google Cloud Storage and Azure Blob Storage."""
    put(f"fake-gcs-server-{FAKE_GCS_VERSION}", fill_fake_gcs_server)
    put(
        f"azurite-{AZURITE_VERSION}",
        lambda folder: call(
            "npm",
            "install",
            "--no-audit",
            "--no-fund",
            f"--prefix={folder}",
            f"azurite@{AZURITE_VERSION}",
        ),
    )


def main() -> int:
    """Fetch all engines; return 1 if one is unavailable."""
    status = 0
    for fetch in (
        fetch_spark,
        fetch_flink,
        fetch_dataflow,
        fetch_emulators_of_stores,
    ):
        try:
            fetch()
        except DownloadError as error:
            print(f"{fetch.__name__}: {error}", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())

"""Object stores as servers on the loopback address, for tests and measurements: moto
for S3, fake-gcs-server for Google Cloud Storage, Azurite for Azure Blob Storage.
"""

from __future__ import annotations

import http.client
import json
import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.engines.clusters import Cluster, answers, find_engine, wait_until
from gristmill.dataprep.runners.servers import free_port

AWS_CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "any",
    "AWS_SECRET_ACCESS_KEY": "any",
    "AWS_REGION": "us-east-1",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}
AZURE_ACCOUNT = "devstoreaccount1"
AZURE_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/"
    "K1SZFPTOtr/KBHBeksoGMGw=="
)
"""Account of Azurite and its published key."""


@dataclass(frozen=True)
class StoreServer:
    """A running object store with one empty bucket.

    Attributes:
        scheme: of its URLs.
        bucket: name of the bucket, or container.
        port: port of the loopback address.
    """

    scheme: str
    bucket: str
    port: int

    @property
    def url(self) -> str:
        """URL of the bucket."""
        return f"{self.scheme}://{self.bucket}"

    @property
    def address(self) -> str:
        """Address of the server."""
        return f"http://127.0.0.1:{self.port}"

    def environment(self, address: str | None = None) -> dict[str, str]:
        """Variables by which a process reaches the store.

        Args:
            address: of a proxy; the server's own if None.
        """
        return ENVIRONMENTS[self.scheme](address or self.address)


def _azure_connection(address: str) -> str:
    return (
        f"DefaultEndpointsProtocol=http;AccountName={AZURE_ACCOUNT};"
        f"AccountKey={AZURE_KEY};BlobEndpoint={address}/{AZURE_ACCOUNT};"
    )


ENVIRONMENTS: Mapping[str, Callable[[str], dict[str, str]]] = {
    "s3": lambda address: {**AWS_CREDENTIALS, "AWS_ENDPOINT_URL": address},
    "gs": lambda address: {
        "STORAGE_EMULATOR_HOST": address,
        "NO_GCE_CHECK": "true",
    },
    "az": lambda address: {
        "AZURE_STORAGE_CONNECTION_STRING": _azure_connection(address)
    },
}
"""Scheme -> variables by which a process reaches the store at an address."""
SCHEMES = tuple(ENVIRONMENTS)


@contextmanager
def object_store(bucket: str, scheme: str = "s3") -> Iterator[StoreServer]:
    """Serve an object store with an empty bucket.

    Raises:
        ImportError: the store's client, or moto, is not installed.
        MissingEngineError: the server was not downloaded.
    """
    with SERVERS[scheme](bucket) as port:
        yield StoreServer(scheme, bucket, port)


@contextmanager
def _moto(bucket: str) -> Iterator[int]:
    import s3fs  # type: ignore[import-untyped]  # noqa: F401 - used by the runs
    from moto.server import ThreadedMotoServer

    # else it prints a line for every request
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        port = server.get_host_and_port()[1]
        _request(port, "PUT", f"/{bucket}", b"")
        yield port
    finally:
        server.stop()


@contextmanager
def _fake_gcs_server(bucket: str) -> Iterator[int]:
    import gcsfs  # type: ignore[import-untyped]  # noqa: F401 - used by the runs

    program = find_engine("fake-gcs-server-*/fake-gcs-server")
    port = free_port()
    command = (
        f"{program} -scheme http -host 127.0.0.1 -port {port} -backend memory "
        "-log-level error"
    )
    with _serving(command.split(), port):
        content = json.dumps({"name": bucket}).encode()
        _request(port, "POST", "/storage/v1/b?project=test", content)
        yield port


@contextmanager
def _azurite(bucket: str) -> Iterator[int]:
    import adlfs  # type: ignore[import-untyped]  # noqa: F401 - used by the runs
    from azure.storage.blob import ContainerClient

    script = find_engine("azurite-*/node_modules/azurite/dist/src/blob/main.js")
    port = free_port()
    command = (
        f"node {script} --blobHost 127.0.0.1 --blobPort {port} --inMemoryPersistence "
        "--silent --disableTelemetry --skipApiVersionCheck"
    )
    with _serving(command.split(), port):
        connection = _azure_connection(f"http://127.0.0.1:{port}")
        with ContainerClient.from_connection_string(connection, bucket) as client:
            client.create_container()
        yield port


SERVERS = {"s3": _moto, "gs": _fake_gcs_server, "az": _azurite}


@contextmanager
def _serving(command: list[str], port: int) -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="gristmill-store-") as folder:
        cluster = Cluster({}, command[0])
        cluster.start(Path(folder), *command)
        try:
            wait_until(lambda: answers(port))
            yield
        finally:
            for process in cluster.processes:
                process.kill()
                process.wait()


def _request(port: int, method: str, path: str, content: bytes) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request(method, path, content, {"Content-Type": "application/json"})
    connection.getresponse().read()
    connection.close()

"""Training on a packed set in an S3-compatible server behind a network that fails: the same model, bit by bit."""

from __future__ import annotations

import http.client
import json
import socket
import struct
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gristmill.dataprep.files import as_path
from gristmill.mixtures.streaming import Stream
from gristmill.tokenize.packed import PackedSet
from gristmill.tokenize.streaming.patience import StoreUnavailableError

pytest.importorskip("s3fs")
pytest.importorskip("moto")
BUCKET = "tokens"
FAULTS = ("500", "reset", "short", "flip", "hang")
"""What happens to requests for tokens and checksums, by turns, and every other one is let through."""


class FaultyNetwork(ThreadingHTTPServer):
    """Hands requests on to a server, and spoils GETs of objects while `faulty` is set."""

    daemon_threads = True

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.upstream, self.faulty, self.away = port, False, False
        self.spoilt: list[str] = []
        self.gets = 0
        self.lock = threading.Lock()
        self.done = threading.Event()

    def next_fault(self, method: str, path: str) -> str | None:
        """What happens to this request."""
        if self.away:
            return "reset"
        if method != "GET" or not self.faulty or not path.partition("?")[0].endswith((".bin", ".sums", ".cu")):
            return None
        with self.lock:
            self.gets += 1
            if self.gets % 2:
                return None
            self.spoilt.append(FAULTS[len(self.spoilt) % len(FAULTS)])
            return self.spoilt[-1]


class Handler(BaseHTTPRequestHandler):
    """One connection of a client."""

    protocol_version = "HTTP/1.1"
    server: FaultyNetwork

    def handle_request(self) -> None:
        """Hand on, or fail."""
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = self.server.next_fault(self.command, self.path)
        if fault == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            self.close_connection = True
            return
        if fault == "hang":
            self.server.done.wait(60)
            self.close_connection = True
            return
        status, headers, content = self.ask(body)
        if fault == "500":
            status, headers, content = 500, [], b"<Error><Code>InternalError</Code></Error>"
        if fault == "flip":
            middle = len(content) // 2
            content = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        self.send_response(status)
        for name, value in headers:
            if name.lower() not in ("content-length", "transfer-encoding", "connection", "date", "server"):
                self.send_header(name, value)
        length = len(content)
        if self.command == "HEAD":
            length = next((int(value) for name, value in headers if name.lower() == "content-length"), 0)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        if fault == "short":
            content, self.close_connection = content[: len(content) // 2], True
        self.wfile.write(content)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_request

    def ask(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        """The server's own answer."""
        upstream = http.client.HTTPConnection("127.0.0.1", self.server.upstream, timeout=30)
        try:
            upstream.request(self.command, self.path, body, dict(self.headers))
            response = upstream.getresponse()
            return response.status, response.getheaders(), response.read()
        finally:
            upstream.close()

    def log_message(self, *arguments: Any) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def moto_port() -> Iterator[int]:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield server.get_host_and_port()[1]
    server.stop()


@pytest.fixture
def network(moto_port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyNetwork]:
    import s3fs

    with FaultyNetwork(moto_port) as found:
        threading.Thread(target=found.serve_forever, daemon=True).start()
        for name, value in {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any", "AWS_REGION": "us-east-1",
                            "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true",
                            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{found.server_address[1]}"}.items():
            monkeypatch.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()
        yield found
        found.done.set()
        found.shutdown()
        s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def stored(network: FaultyNetwork, mix_folder: Path) -> Path:
    """The packed set, uploaded."""
    folder = as_path(f"s3://{BUCKET}/mix")
    folder.fs.makedirs(BUCKET, exist_ok=True)  # type: ignore[attr-defined]
    for path in mix_folder.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def test_a_training_from_a_failing_store_learns_what_it_learns_from_the_disk(
    run_stage: Any, network: FaultyNetwork, stored: Path, tokenizer_folder: Path, mix_folder: Path,
    pretrain_config: dict[str, Any], tmp_path: Path,
) -> None:
    config = {**pretrain_config, "steps": 4}
    run_stage("pretrain", {"tokenizer": tokenizer_folder, "mix": mix_folder}, config, tmp_path / "disk")
    expected = (tmp_path / "disk" / "data" / "model" / "model.safetensors").read_bytes()
    network.faulty = True
    for name, cache_bytes in (("rows", 0), ("shards", 1 << 20)):
        stream = Stream(cache_folder=str(tmp_path / "cache" / name), cache_bytes=cache_bytes, timeout_seconds=0.5,
                        read_ahead_steps=2)
        run_stage("pretrain", {"tokenizer": tokenizer_folder, "mix": stored}, config, tmp_path / name, stream=stream)
        assert (tmp_path / name / "data" / "model" / "model.safetensors").read_bytes() == expected
        lines = [json.loads(line) for line in (tmp_path / name / "data" / "metrics.jsonl").read_text().splitlines()]
        assert all(line["data_wait_seconds"] >= 0 for line in lines if "loss" in line and line["step"] > 1)
    assert set(FAULTS) <= set(network.spoilt)
    shards = PackedSet(mix_folder).manifest["train"]["shards"]
    kept = {path.name for path in (tmp_path / "cache" / "shards" / "shards").iterdir()}
    assert {name for name in kept if not name.endswith(".lock")} == {entry["sha256"] for entry in shards}


def test_a_server_that_goes_away_and_does_not_come_back_is_named(
    network: FaultyNetwork, stored: Path, tmp_path: Path
) -> None:
    packed = PackedSet(stored, Stream(cache_folder=str(tmp_path), cache_bytes=0, timeout_seconds=0.5,
                                      retry_seconds=0.2), [].append)
    assert packed.tokens(np.arange(4)).shape == (4, 32)
    network.away = True
    with pytest.raises(StoreUnavailableError, match=rf"{BUCKET}/mix/train-00000\.bin could not be read"):
        packed.tokens(np.arange(4))
    packed.close()

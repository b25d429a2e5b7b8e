"""Object stores: passing failures are retried in one place, and a store that stays away
is named.
"""

from __future__ import annotations

import hashlib
import os
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from upath import UPath

from gristmill.core import object_stores
from gristmill.core.files import (
    as_path,
    atomic_write,
    create_exclusively,
    file_names,
    file_sizes,
    sha256_file,
    write_bytes,
)
from gristmill.core.object_stores import (
    EXTRAS,
    VARIABLE,
    Failing,
    StoreUnavailableError,
    interrupt,
    is_passing,
    until_interrupted,
)
from gristmill.core.store import StoreLocationError, remove_tree, store_at
from tests.servers import wait_for
from tests.stores import BUCKET, Outage


@pytest.mark.slow
@pytest.mark.parametrize("failure", ["503", "500", "429", "cut"])
def test_every_kind_of_request_survives_an_outage(outage: Outage, failure: str) -> None:
    outage.how = failure
    folder = as_path(f"{outage.url}/{failure}")

    def fail_next_requests() -> None:
        outage.refusals = 8

    fail_next_requests()
    with atomic_write(folder / "a.bin") as sink:
        sink.write(b"content")
    fail_next_requests()
    assert (folder / "a.bin").read_bytes() == b"content"
    fail_next_requests()
    assert [path.name for path in folder.iterdir()] == ["a.bin"]
    fail_next_requests()
    assert sha256_file(folder / "a.bin").startswith("ed7002b439e9ac84")
    fail_next_requests()
    assert (folder / "a.bin").stat().st_size == 7
    fail_next_requests()
    assert create_exclusively(folder / "once", b"mine")
    fail_next_requests()
    assert not create_exclusively(folder / "once", b"yours")
    fail_next_requests()
    remove_tree(folder)
    assert not folder.exists()
    assert outage.refusals == 0, "all refusals were met"


def test_unavailable_store_is_named_with_its_answer(
    outage: Outage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "0.05")
    outage.refusals = 10**6
    with pytest.raises(
        StoreUnavailableError,
        match=rf"/{BUCKET}/gone .*\d+ attempts .*503.*{VARIABLE}=0\.05",
    ):
        as_path(f"{outage.url}/gone").read_bytes()


def test_unavailable_store_is_not_asked_again_for_a_while(
    outage: Outage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "0.05")
    outage.refusals = 10**6
    path = as_path(f"{outage.url}/rests")
    with pytest.raises(StoreUnavailableError):
        path.read_bytes()
    requests = len(outage.asked)
    with pytest.raises(StoreUnavailableError, match="503"):
        write_bytes(path, b"x")
    assert len(outage.asked) == requests
    monkeypatch.setattr(
        object_stores.time, "monotonic", lambda now=time.monotonic: now() + 60.0
    )
    outage.refusals = 1
    write_bytes(path, b"x")
    assert path.read_bytes() == b"x"


def test_interrupt_ends_waiting_writes_and_lists_them(
    outage: Outage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "3600")
    monkeypatch.setattr(object_stores, "HASTY_SECONDS", 0.05)
    outage.refusals = 10**6
    with until_interrupted() as unwritten, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(write_bytes, as_path(f"{outage.url}/late"), b"x")
        wait_for(lambda: outage.asked, "the first attempt")
        interrupt()
        with pytest.raises(StoreUnavailableError):
            waiting.result()
        with pytest.raises(StoreUnavailableError, match="later"):
            write_bytes(as_path(f"{outage.url}/later"), b"x")
    assert [url.rpartition(f"/{BUCKET}/")[2] for url in unwritten] == ["late", "later"]


@pytest.mark.slow
def test_permanent_errors_are_not_retried(outage: Outage) -> None:
    with pytest.raises(FileNotFoundError):
        as_path(f"{outage.url}/nothing").read_bytes()
    assert len(outage.asked) <= 2
    assert not any(is_passing(status) for status in (400, 403, 404, 409, 412, 501))


def test_codes_of_transient_failures_of_s3_are_retried() -> None:
    s3 = pytest.importorskip("gristmill.core.s3")
    assert s3.may_pass(409, "ConditionalRequestConflict")
    assert not s3.may_pass(409, "BucketNotEmpty")


def test_write_needs_one_request_and_creates_no_bucket(outage: Outage) -> None:
    outage.asked.clear()
    with atomic_write(as_path(f"{outage.url}/deep/er/still/a.txt")) as sink:
        sink.write(b"x")
    [request] = outage.asked
    assert request.startswith(("PUT ", "POST "))
    with (
        pytest.raises(FileNotFoundError),
        atomic_write(as_path(f"{outage.url}-no-such/a.txt")) as sink,
    ):
        sink.write(b"x")


def test_pauses_double_with_jitter_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, *[0.0] * 12, 700.0])
    monkeypatch.setattr(object_stores.time, "monotonic", lambda: next(clock))
    messages: list[str] = []
    failing = Failing("s3://b/k", 600.0, "read", "wait")
    pauses = [failing.failed(OSError("503"), messages.append) for _ in range(12)]
    for number, pause in enumerate(pauses):
        longest = min(0.1 * 2**number, 30.0)
        assert 0.5 * longest <= pause <= longest
    assert len(set(pauses)) == 12
    with pytest.raises(
        StoreUnavailableError, match=r"s3://b/k .*13 attempts .*700 seconds"
    ):
        failing.failed(OSError("503"), messages.append)
    assert messages[0].startswith("s3://b/k ")
    assert "OSError: 503" in messages[0]


def test_missing_bucket_is_named(outage: Outage) -> None:
    location = f"{outage.url}-no-such/x"
    with pytest.raises(StoreLocationError, match=f"{location}: .*{BUCKET}-no-such"):
        store_at(location)


@pytest.mark.parametrize("scheme", ["s3", "gs", "az", "abfs"])
def test_missing_package_of_a_store_is_named(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    extra = EXTRAS[scheme]

    def missing(path: UPath) -> None:
        raise ImportError("not here")

    monkeypatch.setattr(UPath, "fs", property(missing))
    with pytest.raises(
        StoreLocationError, match=rf"pip install 'gristmill\[{extra}\]'"
    ):
        store_at(f"{scheme}://{BUCKET}/x")


def test_store_of_an_unknown_kind_is_rejected() -> None:
    with pytest.raises(StoreLocationError, match=r"nosuch://b/x: .*fsspec"):
        store_at("nosuch://b/x")


REFUSALS = {"s3": 403, "gs": 401, "az": 403}
"""Scheme -> status of the answer to requests without valid credentials."""


def test_refused_credentials_are_named_with_the_variables_to_set(
    outage: Outage,
) -> None:
    scheme = outage.url.partition("://")[0]
    outage.how, outage.refusals = str(REFUSALS[scheme]), 10**6
    with pytest.raises(
        StoreLocationError,
        match=r"denied .*(AWS_ACCESS_KEY_ID|GOOGLE_APPL|AZURE_STORAGE_ACCOUNT_KEY)",
    ):
        store_at(f"{outage.url}/x")


def test_s3_without_credentials_is_rejected(
    moto_port: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{moto_port}")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(
        StoreLocationError, match=r"credentials .*AWS_ACCESS_KEY_ID and AWS_SE"
    ):
        store_at(f"s3://{BUCKET}/x")


def test_azure_without_an_account_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    azure = pytest.importorskip("gristmill.core.azure_blobs")
    for name in [name for name in os.environ if name.startswith("AZURE_STORAGE_")]:
        monkeypatch.delenv(name)
    azure.AzureFiles.clear_instance_cache()
    with pytest.raises(
        StoreLocationError, match=r"credentials .*AZURE_STORAGE_CONNECTION_STRING"
    ):
        store_at(f"az://{BUCKET}/x")


BLOCKS = 130
"""MiB of a file that is written in three parts."""


def large_content(seed: int) -> bytes:
    return np.random.default_rng(seed).bytes(BLOCKS << 20)


@pytest.mark.slow
def test_large_file_is_written_in_parts_and_read_in_ranges(outage: Outage) -> None:
    content = large_content(1)
    path = as_path(f"{outage.url}/large/file")
    with atomic_write(path) as sink:
        for start in range(0, len(content), 1 << 20):
            sink.write(content[start : start + (1 << 20)])
    parts = [request for request in outage.asked if request[:4] in ("PUT ", "POST")]
    assert 3 <= len(parts) <= 5
    files = path.fs  # type: ignore[attr-defined]
    assert files.info(path.path)["size"] == len(content)
    start = (50 << 20) - 3
    read = files.cat_file(path.path, start=start, end=start + 7)
    assert read == content[start : start + 7]
    outage.asked.clear()
    with path.open("rb") as source:
        digest = hashlib.sha256()
        while piece := source.read(1 << 20):
            digest.update(piece)
    assert digest.digest() == hashlib.sha256(content).digest()
    assert len(outage.asked) <= 4


@pytest.mark.parametrize(
    "num_bytes", [5, pytest.param(BLOCKS << 20, marks=pytest.mark.slow)]
)
def test_interrupted_write_leaves_no_file_and_keeps_the_former_one(
    outage: Outage, num_bytes: int
) -> None:
    def interrupt_write(path: Path) -> None:
        with atomic_write(path) as sink:
            sink.write(bytes(num_bytes))
            raise KeyboardInterrupt

    folder = as_path(f"{outage.url}/interrupted-{num_bytes}")
    (folder / "former").write_bytes(b"former")
    for name in ("new", "former"):
        with pytest.raises(KeyboardInterrupt):
            interrupt_write(folder / name)
    assert file_sizes(folder) == {"former": 6}
    assert (folder / "former").read_bytes() == b"former"


@pytest.mark.slow
def test_file_is_invisible_until_it_is_complete(outage: Outage) -> None:
    folder = as_path(f"{outage.url}/invisible")
    with atomic_write(folder / "file") as sink:
        sink.write(bytes(BLOCKS << 20))
        assert file_sizes(folder) == {}
    assert file_sizes(folder) == {"file": BLOCKS << 20}


def test_folders_with_a_common_prefix_are_listed_apart(outage: Outage) -> None:
    root = as_path(f"{outage.url}/listed")
    names = ("ab/1", "ab/2", "ab/c/3", "abc/4", "ab.txt")
    for name in names:
        (root / name).write_bytes(name.encode())
    assert file_sizes(root / "ab") == {"1": 4, "2": 4}
    assert sorted(path.name for path in (root / "ab").iterdir()) == ["1", "2", "c"]
    assert sorted(
        str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()
    ) == sorted(names)
    assert file_sizes(root / "nothing") == {}
    assert not (root / "a").exists()
    remove_tree(root / "ab")
    assert not (root / "ab").exists()
    assert file_names(root) == {"ab.txt"}
    assert (root / "abc" / "4").read_bytes() == b"abc/4"


def test_writes_of_other_clients_are_visible_at_once(outage: Outage) -> None:
    """A cached listing would hide leases and commits of other processes."""
    folder = as_path(f"{outage.url}/clients")
    other = type(folder.fs)(skip_instance_cache=True)  # type: ignore[attr-defined]
    assert create_exclusively(folder / "1.json", b"first")
    assert [path.name for path in folder.glob("*.json")] == ["1.json"]
    assert not (folder / "2.json").exists()
    other.pipe_file((folder / "2.json").path, b"another's")  # type: ignore[attr-defined]
    assert sorted(path.name for path in folder.glob("*.json")) == ["1.json", "2.json"]
    assert (folder / "2.json").exists()
    other.pipe_file((folder / "2.json").path, b"now it is longer")  # type: ignore[attr-defined]
    assert (folder / "2.json").read_bytes() == b"now it is longer"


@pytest.mark.parametrize("content", [b"", b"whoever"])
def test_file_is_created_once(outage: Outage, content: bytes) -> None:
    path = as_path(f"{outage.url}/once") / (content.decode() or "empty")
    assert create_exclusively(path, content)
    assert not create_exclusively(path, b"another" if content else b"")
    assert path.read_bytes() == content
    if content:
        assert create_exclusively(path, content), (
            "a repeated request whose answer was lost"
        )


@pytest.mark.slow
def test_one_of_many_contenders_creates_a_file(outage: Outage) -> None:
    folder = as_path(f"{outage.url}/contended")
    with ThreadPoolExecutor(8) as pool:
        for round_number in range(10):
            path = folder / str(round_number)
            create = partial(create_exclusively, path)
            contents = [f"{round_number} {n}".encode() for n in range(8)]
            created = list(pool.map(create, contents))
            assert created.count(True) == 1
            assert path.read_bytes() == contents[created.index(True)]


PART_MARKS = {"s3": "partNumber=2", "gs": "uploadType=resumable", "az": "comp=block&"}
"""Scheme -> text in the address of a part's upload; with Google, of its beginning:
fake-gcs-server appends a repeated part, of which Google ignores the bytes that it has.
"""


@pytest.mark.parametrize("mebibytes", [1, pytest.param(BLOCKS, marks=pytest.mark.slow)])
def test_requests_whose_answers_are_lost_are_repeated_without_harm(
    outage: Outage, mebibytes: int
) -> None:
    content = large_content(mebibytes)[: mebibytes << 20]
    path = as_path(f"{outage.url}/lost-{mebibytes}")
    outage.how, outage.refusals = "lost", 1
    assert create_exclusively(path / "lease", b"mine")
    scheme = outage.url.partition("://")[0]
    outage.begins_with = PART_MARKS[scheme] if mebibytes == BLOCKS else ""
    outage.refusals = 1
    with atomic_write(path / "file") as sink:
        sink.write(content)
    assert hashlib.sha256((path / "file").read_bytes()).digest() == (
        hashlib.sha256(content).digest()
    )
    for name in ("lease", "file"):
        asked = len(outage.asked)
        outage.begins_with, outage.refusals = f"/{name}", 0
        (path / name).unlink()
        assert len(outage.asked) > asked
    assert file_sizes(path) == {}

"""Object stores: passing failures are retried in one place, and a store that stays away
is named.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gristmill.core import object_stores
from gristmill.core.files import as_path, atomic_write, create_exclusively, sha256_file
from gristmill.core.object_stores import (
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
    folder = as_path(f"s3://{BUCKET}/{failure}")

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
        as_path(f"s3://{BUCKET}/gone").read_bytes()


def test_unavailable_store_is_not_asked_again_for_a_while(
    outage: Outage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "0.05")
    outage.refusals = 10**6
    path = as_path(f"s3://{BUCKET}/rests")
    with pytest.raises(StoreUnavailableError):
        path.read_bytes()
    requests = len(outage.asked)
    with pytest.raises(StoreUnavailableError, match="503"):
        path.write_bytes(b"x")
    assert len(outage.asked) == requests
    monkeypatch.setattr(
        object_stores.time, "monotonic", lambda now=time.monotonic: now() + 60.0
    )
    outage.refusals = 1
    path.write_bytes(b"x")
    assert path.read_bytes() == b"x"


def test_interrupt_ends_waiting_writes_and_lists_them(
    outage: Outage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "3600")
    monkeypatch.setattr(object_stores, "HASTY_SECONDS", 0.05)
    outage.refusals = 10**6
    with until_interrupted() as unwritten, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(as_path(f"s3://{BUCKET}/late").write_bytes, b"x")
        wait_for(lambda: outage.asked, "the first attempt")
        interrupt()
        with pytest.raises(StoreUnavailableError):
            waiting.result()
        with pytest.raises(StoreUnavailableError, match="later"):
            as_path(f"s3://{BUCKET}/later").write_bytes(b"x")
    assert unwritten == [
        f"{outage.address}/{BUCKET}/{name}" for name in ("late", "later")
    ]


@pytest.mark.slow
def test_permanent_errors_are_not_retried(outage: Outage) -> None:
    with pytest.raises(FileNotFoundError):
        as_path(f"s3://{BUCKET}/nothing").read_bytes()
    assert len(outage.asked) <= 2
    assert is_passing(409, "ConditionalRequestConflict")
    assert not any(is_passing(status, "") for status in (400, 403, 404, 409, 412, 501))


def test_write_needs_one_request_and_creates_no_bucket(outage: Outage) -> None:
    outage.asked.clear()
    with atomic_write(as_path(f"s3://{BUCKET}/deep/er/still/a.txt")) as sink:
        sink.write(b"x")
    assert [request.partition(" ")[0] for request in outage.asked] == ["PUT"]
    with (
        pytest.raises(FileNotFoundError),
        atomic_write(as_path("s3://no-such-shelf/a.txt")) as sink,
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


@pytest.mark.parametrize(
    ("location", "facts"),
    [
        ("s3://no-such-shelf/x", "bucket no-such-shelf"),
        ("gs://b/x", "gs://.*gcsfs"),
        ("nosuch://b/x", "fsspec"),
    ],
)
def test_invalid_store_location_is_rejected(
    outage: Outage, location: str, facts: str
) -> None:
    with pytest.raises(StoreLocationError, match=f"{location}: .*{facts}"):
        store_at(location)


def test_store_without_credentials_is_rejected(
    outage: Outage, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(
        StoreLocationError, match=r"credentials .*AWS_ACCESS_KEY_ID and AWS_SE"
    ):
        store_at(f"s3://{BUCKET}/x")

"""A store that fails for a while is asked again, at one place, and one that does not come back is named."""

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
@pytest.mark.parametrize("how", ["503", "500", "429", "cut"])
def test_every_kind_of_request_outlasts_an_outage(outage: Outage, how: str) -> None:
    outage.how = how
    folder = as_path(f"s3://{BUCKET}/{how}")

    def broken() -> None:
        outage.refusals = 8

    broken()
    with atomic_write(folder / "a.bin") as sink:
        sink.write(b"content")
    broken()
    assert (folder / "a.bin").read_bytes() == b"content"
    broken()
    assert [path.name for path in folder.iterdir()] == ["a.bin"]
    broken()
    assert sha256_file(folder / "a.bin").startswith("ed7002b439e9ac84")
    broken()
    assert (folder / "a.bin").stat().st_size == 7
    broken()
    assert create_exclusively(folder / "once", b"mine")
    broken()
    assert not create_exclusively(folder / "once", b"yours")
    broken()
    remove_tree(folder)
    assert not folder.exists()
    assert outage.refusals == 0, "all refusals were met"


def test_a_store_that_stays_away_is_named_with_what_it_said(outage: Outage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "0.05")
    outage.refusals = 10**6
    with pytest.raises(
        StoreUnavailableError,
        match=(
            rf"/{BUCKET}/gone .*could not be reached in \d+ attempts over 0 seconds .*503.*; see that the store can be "
            rf"reached, or let it be asked for longer \({VARIABLE}=0.05\)"
        ),
    ):
        as_path(f"s3://{BUCKET}/gone").read_bytes()


def test_a_store_that_was_given_up_rests_and_gets_little_time_until_it_answers(
    outage: Outage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "0.05")
    outage.refusals = 10**6
    path = as_path(f"s3://{BUCKET}/rests")
    with pytest.raises(StoreUnavailableError, match="could not be reached"):
        path.read_bytes()
    asked = len(outage.asked)
    with pytest.raises(StoreUnavailableError, match=r"not asked for, since the store had just been given up: .*503"):
        path.write_bytes(b"x")
    assert len(outage.asked) == asked
    monkeypatch.setattr(object_stores.time, "monotonic", lambda now=time.monotonic: now() + 60.0)
    outage.refusals = 1
    path.write_bytes(b"x")
    assert path.read_bytes() == b"x"


def test_an_interrupt_ends_what_waits_for_a_store_and_keeps_what_was_to_be_written(
    outage: Outage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "3600")
    monkeypatch.setattr(object_stores, "HASTY_SECONDS", 0.05)
    outage.refusals = 10**6
    with until_interrupted() as unwritten, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(as_path(f"s3://{BUCKET}/late").write_bytes, b"x")
        wait_for(lambda: outage.asked, "the first attempt")
        interrupt()
        with pytest.raises(StoreUnavailableError, match="could not be reached"):
            waiting.result()
        with pytest.raises(StoreUnavailableError, match="was not asked for"):
            as_path(f"s3://{BUCKET}/later").write_bytes(b"x")
    assert unwritten == [f"{outage.address}/{BUCKET}/{name}" for name in ("late", "later")]


@pytest.mark.slow
def test_what_is_refused_for_good_is_not_asked_again(outage: Outage) -> None:
    with pytest.raises(FileNotFoundError):
        as_path(f"s3://{BUCKET}/nothing").read_bytes()
    assert len(outage.asked) <= 2
    assert is_passing(409, "ConditionalRequestConflict")
    assert not any(is_passing(status, "") for status in (400, 403, 404, 409, 412, 501))


def test_a_file_costs_no_request_for_its_folder_and_makes_no_bucket(outage: Outage) -> None:
    outage.asked.clear()
    with atomic_write(as_path(f"s3://{BUCKET}/deep/er/still/a.txt")) as sink:
        sink.write(b"x")
    assert [asked.partition(" ")[0] for asked in outage.asked] == ["PUT"]
    with pytest.raises(FileNotFoundError), atomic_write(as_path("s3://no-such-shelf/a.txt")) as sink:
        sink.write(b"x")


def test_pauses_double_are_shortened_at_random_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, *[0.0] * 12, 700.0])
    monkeypatch.setattr(object_stores.time, "monotonic", lambda: next(clock))
    told: list[str] = []
    failing = Failing("s3://b/k", 600.0, "read", "wait")
    pauses = [failing.failed(OSError("503"), told.append) for _ in range(12)]
    for number, pause in enumerate(pauses):
        whole = min(0.1 * 2**number, 30.0)
        assert 0.5 * whole <= pause <= whole
    assert len(set(pauses)) == 12
    with pytest.raises(StoreUnavailableError, match=r"s3://b/k could not be read in 13 attempts over 700 seconds"):
        failing.failed(OSError("503"), told.append)
    assert told[0] == "s3://b/k could not be read for 0 seconds (OSError: 503); trying again"


@pytest.mark.parametrize(
    ("location", "complaint"),
    [
        ("s3://no-such-shelf/x", "there is no bucket no-such-shelf, or these credentials may not know of it; make it"),
        ("gs://b/x", "the package that opens gs:// is not installed: Please install gcsfs"),
        ("nosuch://b/x", "give a folder, or a URL of a kind that fsspec opens here"),
    ],
)
def test_a_store_that_cannot_be_is_refused_before_any_work(outage: Outage, location: str, complaint: str) -> None:
    with pytest.raises(StoreLocationError, match=f"the store {location}: .*{complaint}"):
        store_at(location)


def test_a_store_without_credentials_is_refused_before_any_work(
    outage: Outage, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(StoreLocationError, match=r"there are no credentials .*AWS_ACCESS_KEY_ID and AWS_SE"):
        store_at(f"s3://{BUCKET}/x")

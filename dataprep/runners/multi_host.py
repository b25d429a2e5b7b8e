"""Job sharing: several hosts run the tasks of a job, with only the store in common.

The leading host of a stage offers a job in `work/offers/JOB.offer`. Every host,
including the leader, claims a task by exclusively creating a file, runs it, and writes
its record. Each host starts at a different position, so that they rarely compete for a
task. Claims of a dead host are renewed by others. The offer is withdrawn once all tasks
have records.

If a host was wrongly taken for dead, two hosts run the same task and write the same
bytes. An offer is pickled code, as are other files of unfinished stages: write access
to the store implies code execution on its hosts.
"""

from __future__ import annotations

import logging
import os
import socket
import time
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from gristmill.core import heartbeats
from gristmill.core.files import (
    as_path,
    create_exclusively,
    file_names,
    is_local,
    write_bytes,
    write_json,
)
from gristmill.core.heartbeats import BeatWatch, Repetition
from gristmill.dataprep.runners.errors import failure_path
from gristmill.dataprep.runners.pool import Element, Mode, Payload, Work

OFFERS = "offers"
"""Folder of a stage's `work/` with the offers and the claims of each."""
HOSTS = "hosts"
"""Folder of heartbeats beside the offers."""
LOOK_SECONDS, STORE_LOOK_SECONDS = 0.5, 10.0
"""Intervals between checks for other hosts' files: in a folder, in an object store."""
log = logging.getLogger("gristmill.sharing")


@dataclass(frozen=True)
class Offer:
    """Job that hosts run together.

    Attributes:
        file: file of the offer, deleted when the offer is withdrawn.
        claims: folder of the claims of this offer.
        records: folder of the job's records.
        mode: kind of workers on each host (`pool.Mode`).
        work: runs one element and writes its record.
        elements: all elements, the largest first.
    """

    file: str
    claims: str
    records: str
    mode: Mode
    work: Work
    elements: Sequence[Element]


@contextmanager
def offered(
    job: str,
    folder: Path,
    records: Path,
    mode: Mode,
    work: Work,
    elements: Sequence[Element],
) -> Iterator[Offer]:
    """Context in which a job is offered to all hosts of a stage.

    Args:
        folder: the stage's `work/`.
    """
    import cloudpickle

    file = folder / OFFERS / f"{job}.offer"
    offer = Offer(
        str(file),
        str(folder / OFFERS / f"{job}-{uuid.uuid4().hex[:8]}"),
        str(records),
        mode,
        work,
        elements,
    )
    write_bytes(file, cloudpickle.dumps(offer), durable=False)
    try:
        yield offer
    finally:
        # for example a full disk, on which the stage has failed before
        with suppress(OSError):
            file.unlink(missing_ok=True)


def read_offers(folder: Path) -> Iterator[Offer]:
    """Read the current offers of a stage; `folder` is its `work/`."""
    import cloudpickle

    for file in sorted((folder / OFFERS).glob("*.offer")):
        with suppress(FileNotFoundError):  # withdrawn since the listing
            yield cloudpickle.loads(file.read_bytes())


@contextmanager
def taking_part(folder: Path) -> Iterator[str]:
    """Context in which this host sends heartbeats to the others of a stage; yields its
    name for claims.

    Args:
        folder: the stage's `work/`.
    """
    name = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
    file = folder / OFFERS / HOSTS / beat_name(name)

    def beat() -> None:
        try:
            write_json(file, {"at": time.time()}, durable=False)
        except Exception as error:  # noqa: BLE001 - libraries of object stores raise their own errors
            log.warning("%s could not be kept fresh: %s", file, error)

    beat()
    try:
        with Repetition(beat, heartbeats.BEAT_SECONDS):
            yield name
    finally:
        with suppress(OSError):  # frees its claims immediately
            file.unlink(missing_ok=True)


def take_share(
    offer: Offer, host: str, run: Callable[[Work, Sequence[Element]], None]
) -> None:
    """Run tasks of a job until all have records, one has failed, or the offer is
    withdrawn.

    Args:
        offer: the job.
        host: name of this host.
        run: runs elements on this host's workers and waits for them.
    """
    records = as_path(offer.records)
    claims = as_path(offer.claims)
    watch = BeatWatch()
    pause = LOOK_SECONDS if is_local(records) else STORE_LOOK_SECONDS
    share_start = zlib.crc32(host.encode()) / (1 << 32)
    done: set[str] = set()
    hosts = as_path(offer.file).parent / HOSTS

    @cache
    def owner_of(claim: str) -> str:
        return (claims / claim).read_text()

    while not failure_path(records).exists():
        done |= {name.removesuffix(".json") for name in file_names(records)}
        claimed = last_claims(claims)
        missing = [element for element in offer.elements if element[0] not in done]
        # Check the offer last: after its withdrawal the records may be gone and all
        # tasks look free.
        if not missing or not as_path(offer.file).exists():
            return
        owners = {
            name: owner_of(f"{name}.claim-{claimed[name]}")
            for name, _ in missing
            if name in claimed
        }
        # Listed after the claims: a host has a heartbeat before it claims a task.
        beats = file_names(hosts) if owners else set()
        dead_hosts = {
            owner
            for owner in set(owners.values())
            if beat_name(owner) not in beats or watch.is_stale(hosts / beat_name(owner))
        }
        free = [
            (name, payload)
            for name, payload in missing
            if name not in owners or owners[name] in dead_hosts
        ]
        if free:
            begin = int(share_start * len(free))
            run(
                partial(claim_and_do, offer.work, offer.claims, host, claimed),
                [*free[begin:], *free[:begin]],
            )
        else:
            time.sleep(pause)


def claim_and_do(
    work: Work,
    claims: str,
    host: str,
    claimed: Mapping[str, int],
    name: str,
    payload: Payload,
) -> None:
    """Claim and run a task, unless another host has claimed it meanwhile."""
    number = claimed.get(name, 0) + 1
    if create_exclusively(as_path(claims) / f"{name}.claim-{number}", host.encode()):
        work(name, payload)


def last_claims(claims: Path) -> dict[str, int]:
    """Number of the last claim by task, from 1."""
    number_by_task: dict[str, int] = {}
    for file in file_names(claims):
        name, _, number = file.rpartition(".claim-")
        if number.isdigit():  # an unfinished file has a longer name
            number_by_task[name] = max(number_by_task.get(name, 0), int(number))
    return number_by_task


def beat_name(host: str) -> str:
    """File name of a host's heartbeat."""
    return f"{host}.beat"

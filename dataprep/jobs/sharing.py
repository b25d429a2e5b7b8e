"""Tasks of a job done by several hosts that have nothing but the store in common.

The host that leads a stage offers a job: `work/offers/JOB.offer` says what is to be done. Every host, that one
included, claims a task by creating a file that nobody else has created, does it, and leaves its record; each begins at
a place of its own, so that they rarely meet at a task. What a host has claimed that died is claimed once more. When all
tasks have records the offer is withdrawn.

A task that two hosts do all the same, since one of them was taken for dead, is done twice with the same bytes. An
offer is code, as is whatever else a store says of unfinished stages: only those may write there who may run code on its
hosts.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from gristmill.dataprep.files import as_path, atomic_write, create_exclusively, file_names, is_local
from gristmill.dataprep.jobs.errors import failure_path
from gristmill.dataprep.jobs.pool import Element, Work

OFFERS = "offers"
"""The folder of a stage's `work/` that has the offers, and the claims of each."""
BEAT_SECONDS = 15.0
"""How often a host that takes part says that it lives."""
LOST_SECONDS = 90.0
"""It has died where it has not said so for so long, by the clock of whoever waits for it."""
LOOK_SECONDS, STORE_LOOK_SECONDS = 0.5, 10.0
"""Between two looks for what others have left: in a folder, in a store of objects."""
log = logging.getLogger("gristmill.sharing")


@dataclass(frozen=True)
class Offer:
    """A job that hosts do together.

    Attributes:
        file: by which it is known; gone once it is withdrawn.
        claims: the folder where its tasks are claimed; of this offer alone.
        records: the folder of the job's records.
        mode: what the workers of each host are (`engine.Mode`).
        work: does one element, and leaves its record.
        elements: all of them, the largest first.
    """

    file: str
    claims: str
    records: str
    mode: str
    work: Work
    elements: Sequence[Element]


@contextmanager
def offered(
    job: str, folder: Path, records: Path, mode: str, work: Work, elements: Sequence[Element]
) -> Iterator[Offer]:
    """Offer a job to all hosts that take part in a stage; within it they do its tasks.

    Args:
        folder: the stage's `work/`.
    """
    import cloudpickle

    file = folder / OFFERS / f"{job}.offer"
    offer = Offer(str(file), str(folder / OFFERS / f"{job}-{uuid.uuid4().hex[:8]}"), str(records), mode, work, elements)
    with atomic_write(file, durable=False) as sink:
        sink.write(cloudpickle.dumps(offer))
    try:
        yield offer
    finally:
        with suppress(OSError):  # a full disk, perhaps: the stage has failed before
            file.unlink(missing_ok=True)


def read_offers(folder: Path) -> Iterator[Offer]:
    """What a stage offers now; `folder` is its `work/`."""
    import cloudpickle

    for file in sorted((folder / OFFERS).glob("*.offer")):
        with suppress(FileNotFoundError):  # withdrawn this very moment
            yield cloudpickle.loads(file.read_bytes())


@contextmanager
def taking_part(folder: Path) -> Iterator[str]:
    """Let the other hosts of a stage know that this one lives; gives the name that it claims tasks by.

    Args:
        folder: the stage's `work/`.
    """
    name = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
    beat, ended = _beat_file(folder / OFFERS, name), threading.Event()

    def live() -> None:
        beats = 0
        while beats == 0 or not ended.wait(BEAT_SECONDS):
            beats += 1
            try:
                with atomic_write(beat, durable=False) as sink:
                    sink.write(str(beats).encode())
            except Exception as error:  # noqa: BLE001 - object stores' libraries raise errors of their own
                log.warning("%s could not be kept fresh: %s", beat, error)

    thread = threading.Thread(target=live, daemon=True)
    thread.start()
    try:
        yield name
    finally:
        ended.set()
        thread.join()
        with suppress(OSError):  # what it had claimed is free at once
            beat.unlink(missing_ok=True)


def take_share(offer: Offer, host: str, run: Callable[[Work, Sequence[Element]], Any]) -> None:
    """Do tasks of a job until all have records, one has failed, or the offer is withdrawn.

    Args:
        offer: the job.
        host: the name of this one.
        run: hands elements to this host's workers, and waits for them.
    """
    records, claims, watch = as_path(offer.records), as_path(offer.claims), BeatWatch(as_path(offer.file).parent)
    pause = LOOK_SECONDS if is_local(records) else STORE_LOOK_SECONDS
    place = zlib.crc32(host.encode()) / (1 << 32)
    done: set[str] = set()
    while not failure_path(records).exists():
        done |= {name.removesuffix(".json") for name in file_names(records)}
        claimed = last_claims(claims)
        missing = [element for element in offer.elements if element[0] not in done]
        # Asked last: once it is withdrawn the records may be gone, and all tasks seem to be free.
        if not missing or not as_path(offer.file).exists():
            return
        free = [
            element
            for element in missing
            if (number := claimed.get(element[0])) is None
            or watch.has_died((claims / f"{element[0]}.claim-{number}").read_text())
        ]
        if free:
            begin = int(place * len(free))
            run(partial(claim_and_do, offer.work, offer.claims, host, claimed), [*free[begin:], *free[:begin]])
        else:
            time.sleep(pause)


def claim_and_do(
    work: Work, claims: str, host: str, claimed: Mapping[str, int], name: str, payload: Mapping[str, Any]
) -> Any:
    """Do a task, unless another host has claimed it meanwhile: then there is nothing to count."""
    number = claimed.get(name, 0) + 1
    if not create_exclusively(as_path(claims) / f"{name}.claim-{number}", host.encode()):
        return {}
    return work(name, payload)


def last_claims(claims: Path) -> dict[str, int]:
    """Task -> the number of its last claim, from 1."""
    found: dict[str, int] = {}
    for file in file_names(claims):
        name, _, number = file.rpartition(".claim-")
        if number.isdigit():  # a file that is just being written has a longer name
            found[name] = max(found.get(name, 0), int(number))
    return found


@dataclass
class BeatWatch:
    """Finds out which hosts have died: whose beat is gone, or has been the same for LOST_SECONDS.

    Attributes:
        folder: of the offers.
    """

    folder: Path
    _seen: dict[str, tuple[str, float]] = field(default_factory=dict)

    def has_died(self, host: str) -> bool:
        """Whether a host that takes part has died."""
        try:
            beat = _beat_file(self.folder, host).read_text()
        except FileNotFoundError:
            return True
        if host not in self._seen or self._seen[host][0] != beat:
            self._seen[host] = (beat, time.monotonic())
        return time.monotonic() - self._seen[host][1] > LOST_SECONDS


def _beat_file(folder: Path, host: str) -> Path:
    return folder / "hosts" / f"{host}.beat"

"""Jobs as futures on Ray and Dask: parts of a shuffle, and failures before work
begins.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import random
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engines import clusters
from benchmarks.engines.clusters import PATIENCE_SECONDS, Cluster, running
from gristmill.core.stage_context import Context
from gristmill.dataprep.runners import connections, futures
from gristmill.dataprep.runners.connection import Job
from gristmill.dataprep.runners.errors import WorkerError
from gristmill.dataprep.runners.pool import Element, Mode
from gristmill.dataprep.runners.runner import run_there
from gristmill.dataprep.runners.shuffle import run_shuffle
from gristmill.dataprep.runners.tasks import Done, Task, run_tasks
from gristmill.mixtures.schema.encoder_settings import ReadingModel
from gristmill.mixtures.schema.engine import BeamEngine
from tests.dataprep.test_shuffled import PARTITIONS, arrived, expected, send, tasks

Received = dict[int, list[bytes]]


class LocalCluster(futures.FuturesConnection):
    """Cluster that calls the functions in this process, when it waits for them."""

    def __init__(self) -> None:
        super().__init__()
        self.num_parts: list[int] = []

    def num_slots(self) -> int:
        return 2

    def put(self, function: bytes) -> Any:
        return pickle.loads(function)

    def submit(
        self, job: Job, function: Any, arguments: Any, outputs: int
    ) -> list[Any]:
        self.num_parts.append(outputs - 1)
        results: list[Any] = function(*arguments)
        assert len(results) == outputs
        return results

    def wait(self, waiting: Sequence[Any], seconds: float | None) -> None:
        assert set(waiting) == {None}

    def cancel(self, waiting: Sequence[Any]) -> None:
        raise AssertionError("a job that succeeds cancels nothing")

    def close(self) -> None: ...

    def is_alive(self) -> bool:
        return True


def batches(seed: int, name: str) -> list[tuple[int, bytes]]:
    rng = random.Random(f"{seed} {name}")
    names = [0, 1 << 32]
    return [
        (rng.choice(names) + rng.randrange(7), rng.randbytes(rng.randrange(200)))
        for _ in range(rng.randrange(30))
    ]


RECEIVED: Received = {}
"""Received batches of the last job of a LocalCluster."""


def receive(key: int, arriving: Iterable[bytes]) -> None:
    assert key not in RECEIVED
    RECEIVED[key] = sorted(arriving)


def send_batches(seed: int, group: Sequence[Element]) -> Iterator[tuple[int, bytes]]:
    for name, _ in group:
        yield from batches(seed, name)


@pytest.mark.parametrize(
    ("num_cpus", "mode", "num_senders"),
    [(None, "threads", 3), (1, "threads", 3), (2, "threads", 2), (2, "processes", 3)],
)
@pytest.mark.parametrize("most_parts", [3, 1000])
@pytest.mark.parametrize("seed", range(4))
def test_every_key_receives_the_batches_of_all_senders(
    seed: int,
    most_parts: int,
    num_cpus: int | None,
    mode: Mode,
    num_senders: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tasks of two CPUs share the elements of the two slots, unless they hold the GIL."""
    monkeypatch.setattr(futures, "MOST_PARTS", most_parts)
    cluster = LocalCluster()
    monkeypatch.setattr(connections, "connect", lambda engine: cluster)
    groups: list[list[Element]] = [[("a", {}), ("b", {})], [("c", {})], [("d", {})]]
    RECEIVED.clear()
    engine = BeamEngine(runner="ray", address="auto", options={"num_cpus": num_cpus})
    connections.run_by_connection(
        engine, partial(send_batches, seed), groups, receive, None, mode
    )
    sent: Received = {}
    for name in "abcd":
        for key, batch in batches(seed, name):
            sent.setdefault(key, []).append(batch)
    assert {key: sorted(contents) for key, contents in sent.items()} == RECEIVED, seed
    parts = min(4, most_parts // num_senders)
    assert cluster.num_parts == [parts] * num_senders + [0] * parts


@pytest.mark.parametrize(("device", "gpu"), [("cpu", False), ("gpu", True)])
def test_job_that_reads_with_a_model_on_a_gpu_wants_one(
    device: str, gpu: bool, tmp_path: Path
) -> None:
    model = ReadingModel.model_validate({"path": str(tmp_path), "device": device})
    work = partial(send_batches, {"settings": [model]})
    assert connections.wants_gpu(work) is gpu


def fail_on_two(task: Task) -> Done:
    if task.payload["n"] == 2:
        raise LookupError("two is not allowed")
    return Done([], {})


def on_ray(work: Path, engine: Mapping[str, Any], **settings: Any) -> Context:
    beam = BeamEngine.model_validate({**engine, **settings})
    return Context(work, "toy", beam, emit=lambda event: None)


@pytest.mark.parametrize("prefix", ["", "ray://"])
def test_unreachable_head_is_named_with_the_setting(
    prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(futures, "CONNECT_SECONDS", 0.1)
    context = on_ray(tmp_path, {"runner": "ray", "address": f"{prefix}127.0.0.1:9"})
    with pytest.raises(WorkerError, match=r"Ray .*127\.0\.0\.1:9 .*engine\.address"):
        run_there("job", context, partial(send_batches, 1), [[("a", {})]])


def test_malformed_address_of_ray_is_rejected() -> None:
    with pytest.raises(WorkerError, match=r"ray://HOST:PORT"):
        connections.connect(BeamEngine(runner="ray", address="head"))


@pytest.fixture(scope="module")
def ray_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running("ray", tmp_path_factory.mktemp("ray")) as cluster:
        yield cluster


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("client", [False, True])
def test_ray_shuffles(client: bool, ray_cluster: Cluster, tmp_path: Path) -> None:
    """From a machine of the cluster, and from elsewhere through Ray's client server."""
    engine = {
        **ray_cluster.engine,
        "worker_seconds": PATIENCE_SECONDS,
        "shuffle": "engine",
    }
    if client:
        engine["address"] = ray_cluster.client_address
    planned = tasks(4, 40)
    _, sent = run_shuffle(
        "job", planned, partial(send, None), on_ray(tmp_path, engine), PARTITIONS
    )
    assert arrived(sent) == expected(planned)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_task_error_on_ray_keeps_its_type(ray_cluster: Cluster, tmp_path: Path) -> None:
    engine = {**ray_cluster.engine, "worker_seconds": PATIENCE_SECONDS}
    planned = [Task(f"t{n}", {"n": n}) for n in range(6)]
    with pytest.raises(LookupError, match=r"^job/t2: LookupError: two is not allowed"):
        run_tasks("job", planned, fail_on_two, on_ray(tmp_path, engine))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_resources_that_ray_never_has_are_an_error_before_work(
    ray_cluster: Cluster, tmp_path: Path
) -> None:
    context = on_ray(
        tmp_path, ray_cluster.engine, options={"num_cpus": 64}, worker_seconds=1.0
    )
    with pytest.raises(WorkerError, match=r"1 s \(engine\.worker_seconds\)"):
        run_tasks("job", [Task("t0", {"n": 0})], fail_on_two, context)


NOISE_BYTES = 4_500_000
NUM_KEYS, NUM_SENDERS = 4, 10


def noise(sender: int, key: int) -> bytes:
    return random.Random(f"{sender} {key}").randbytes(NOISE_BYTES)


def send_noise(group: Sequence[Element]) -> Iterator[tuple[int, bytes]]:
    for name, _ in group:
        for key in range(NUM_KEYS):
            yield key, noise(int(name), key)


def checksums(contents: Iterable[bytes]) -> list[str]:
    return sorted(hashlib.sha256(content).hexdigest() for content in contents)


def note_checksums(folder: Path, key: int, arriving: Iterable[bytes]) -> None:
    (folder / f"{key}.json").write_text(json.dumps(checksums(arriving)))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ray_spills_a_shuffle_that_is_larger_than_its_object_stores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """180 MB pass through two nodes with 80 MB each."""
    monkeypatch.setattr(clusters, "RAY_STORE_BYTES", 80_000_000)
    with running("ray", tmp_path) as cluster:
        run_there(
            "job",
            on_ray(tmp_path, cluster.engine),
            send_noise,
            [[(str(sender), {})] for sender in range(NUM_SENDERS)],
            partial(note_checksums, tmp_path),
        )
        ray = str(Path(sys.executable).with_name("ray"))
        address = f"--address={cluster.engine['address']}"
        statistics = subprocess.run(
            [ray, "memory", "--stats-only", address],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    spilled = re.findall(r"Spilled (\d+) MiB", statistics)
    assert sum(map(int, spilled)) > 0, statistics
    for key in range(NUM_KEYS):
        assert json.loads((tmp_path / f"{key}.json").read_text()) == checksums(
            noise(sender, key) for sender in range(NUM_SENDERS)
        )

"""Training on a packed set, and in a folder, of a faulty object store: the same
model.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote

import numpy as np
import pytest
import torch

from benchmarks.chaos.network import Network, serving
from benchmarks.store_servers import StoreServer
from gristmill.core.files import as_path, read_json, write_json
from gristmill.core.object_stores import StoreUnavailableError
from gristmill.mixtures.schema.engine import Engine, Stream
from gristmill.tokenize.packed import PackedSet
from gristmill.train.loop.metrics_log import TIMINGS
from gristmill.train.models.model_config import Shape
from gristmill.train.models.transformer import Llama
from gristmill.train.models.weights import drawn, load_model, save_model
from gristmill.train.worker_main import write_error
from tests.jsonl import read_metrics
from tests.stores import BUCKET, store_clients
from tests.train.trained import assert_same_output

FAULTS = ("500", "cut", "short", "flip", "hang")
"""Faults of requests for tokens and checksums, in turn; every other request
succeeds.
"""


class FaultyNetwork(Network):
    """Corrupts GETs of objects while `is_faulty` is set, and kills a training before
    one request.
    """

    def __init__(self, server: StoreServer) -> None:
        super().__init__(server.port)
        self.url = server.url
        self.is_down = False
        self.kill_before: tuple[str, str] | None = None
        self.kill: Callable[[], None] = lambda: None
        self.requested: list[tuple[str, str]] = []
        self.faults: list[str] = []

    def fault(self, method: str, path: str) -> str | None:
        """Return the fault of this request."""
        path = object_of(path)
        self.requested.append((method, path))
        if self.kill_before == (WRITES.get(method, method), path.partition("/one/")[2]):
            self.kill_before = None
            self.kill()
            return "cut"
        if self.is_down:
            return "cut"
        if (
            method != "GET"
            or not self.is_faulty
            or not path.endswith((".bin", ".sums", ".cu"))
        ):
            return None
        with self.lock:
            self.requests += 1
            if self.requests % 2:
                return None
            self.faults.append(FAULTS[len(self.faults) % len(FAULTS)])
            return self.faults[-1]


WRITES = {"POST": "PUT"}
"""Method of Google's writes -> that of the others."""


def object_of(path: str) -> str:
    """Return the name in a request's path: after `/o/` or `name=` for Google's, else
    the path itself.
    """
    address, _, query = path.partition("?")
    name = parse_qs(query).get("name", [""])[0]
    return name or unquote(address).rpartition("/o/")[2]


@pytest.fixture
def network(store_server: StoreServer) -> Iterator[FaultyNetwork]:
    with (
        serving(FaultyNetwork(store_server)) as faulty,
        store_clients(store_server, faulty.address),
    ):
        yield faulty


@pytest.fixture
def stored(network: FaultyNetwork, mix_folder: Path) -> Path:
    """The packed set in the store."""
    folder = as_path(f"{network.url}/mix")
    for path in mix_folder.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


@pytest.mark.slow
def test_training_from_a_faulty_store_equals_training_from_disk(
    run_stage: Any,
    network: FaultyNetwork,
    stored: Path,
    tokenizer_folder: Path,
    mix_folder: Path,
    pretrain_config: dict[str, Any],
    tmp_path: Path,
) -> None:
    config = {**pretrain_config, "steps": 4}
    run_stage(
        "pretrain",
        {"tokenizer": tokenizer_folder, "mix": mix_folder},
        config,
        tmp_path / "disk",
    )
    network.is_faulty = True
    for name, cache_bytes in (("rows", 0), ("shards", 1 << 20)):
        stream = Stream(
            cache_folder=str(tmp_path / "cache" / name),
            cache_bytes=cache_bytes,
            timeout_seconds=0.5,
            read_ahead_steps=2,
        )
        run_stage(
            "pretrain",
            {"tokenizer": tokenizer_folder, "mix": stored},
            config,
            tmp_path / name,
            stream=stream,
        )
        assert_same_output(tmp_path / name, tmp_path / "disk")
        lines = read_metrics(tmp_path / name)
        assert all(
            line["data_wait_seconds"] >= 0
            for line in lines
            if "loss" in line and line["step"] > 1
        )
    assert set(FAULTS) <= set(network.faults)
    shards = PackedSet(mix_folder).manifest["train"]["shards"]
    cached = {
        path.name for path in (tmp_path / "cache" / "shards" / "shards").iterdir()
    }
    assert {name for name in cached if not name.endswith(".lock")} == {
        entry["sha256"] for entry in shards
    }


def test_persistent_outage_names_the_object(
    network: FaultyNetwork, stored: Path, tmp_path: Path
) -> None:
    packed = PackedSet(
        stored,
        Stream(
            cache_folder=str(tmp_path),
            cache_bytes=0,
            timeout_seconds=0.5,
            retry_seconds=0.2,
        ),
        [].append,
    )
    assert packed.tokens(np.arange(4)).shape == (4, 32)
    network.is_down = True
    with pytest.raises(StoreUnavailableError, match=rf"{BUCKET}/mix/train-00000\.bin"):
        packed.tokens(np.arange(4))
    packed.close()


CRASHES = (
    ("PUT", "work/checkpoints/step-00000004/complete.json"),
    ("DELETE", "work/checkpoints/step-00000004/complete.json"),
    ("PUT", "data/model/model.safetensors"),
)
"""Requests before which the processes of a training are killed, attempt after
attempt.
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_training_in_a_store_resumes_to_the_same_bytes(
    run_stage: Any,
    network: FaultyNetwork,
    stored: Path,
    tokenizer_folder: Path,
    mix_folder: Path,
    pretrain_config: dict[str, Any],
    tmp_path: Path,
) -> None:
    run_stage(
        "pretrain",
        {"tokenizer": tokenizer_folder, "mix": mix_folder},
        pretrain_config,
        tmp_path / "disk",
    )
    folder = as_path(f"{network.url}/store/pretrain/one")
    for path in tokenizer_folder.iterdir():
        (as_path(f"{network.url}/tokenizer") / path.name).write_bytes(path.read_bytes())
    engine = {
        **Engine().model_dump(mode="json"),
        "ranks": 1,
        "checkpoint_every": 2,
        "stream": {"cache_folder": str(tmp_path / "cache"), "retry_seconds": 20.0},
    }
    write_json(
        folder / "stage.json",
        {
            "stage": "pretrain",
            "run": "gristmill.train.stages.pretrain:run",
            "launch": "torchrun",
            "config": pretrain_config,
            "engine": engine,
            "inputs": [
                {"stage": "tokenizer", "folder": f"{network.url}/tokenizer"},
                {"stage": "mix", "folder": str(stored)},
            ],
        },
    )
    resumed = []
    for crash in (*CRASHES, None):
        network.kill_before, network.requested = crash, []
        attempt = subprocess.Popen(
            [sys.executable, "-m", "gristmill.flows.running.execute", str(folder)],
            start_new_session=True,
        )
        network.kill = partial(os.killpg, attempt.pid, signal.SIGKILL)
        assert attempt.wait(timeout=300) == (0 if crash is None else -signal.SIGKILL), (
            crash
        )
        fetched = [
            path
            for method, path in network.requested
            if method == "GET" and "/step-" in path
        ]
        resumed.append(
            max((int(path.partition("/step-")[2][:8]) for path in fetched), default=0)
        )
    assert resumed == [0, 4, 8, 10], (
        "each attempt fetches what the previous one had sent"
    )
    files = ("model/model.safetensors", "model/config.json", "skipped_steps.jsonl")
    assert [(folder / "data" / name).read_bytes() for name in files] == [
        (tmp_path / "disk" / "data" / name).read_bytes() for name in files
    ]
    assert metrics(folder / "data") == metrics(tmp_path / "disk" / "data")
    assert (
        read_json(folder / "work" / "result.json")["steps"] == pretrain_config["steps"]
    )
    kept = sorted(path.name for path in (folder / "work" / "checkpoints").iterdir())
    assert kept == ["step-00000010"], (
        "the last attempt keeps the one that it resumed from"
    )
    assert list((tmp_path / "cache" / "training").iterdir()) == [], (
        "no local file remains"
    )


def metrics(data: Path) -> list[dict[str, Any]]:
    """Read the metrics of a training, without those that differ between runs."""
    return [
        {name: value for name, value in json.loads(line).items() if name not in TIMINGS}
        for line in (data / "metrics.jsonl").read_text().splitlines()
    ]


def test_lost_connection_does_not_hide_its_cause(tmp_path: Path) -> None:
    lost = RuntimeError(
        "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:42709"
    )
    messages = []
    for errors in (
        [ValueError("the cause"), lost],
        [lost, ValueError("the cause")],
        [lost, lost],
    ):
        folder = tmp_path / str(len(messages))
        (folder / "work").mkdir(parents=True)
        for error in errors:
            write_error(folder, error)
        messages.append(read_json(folder / "work" / "error.json")["message"])
    assert messages == ["the cause", "the cause", str(lost)]


def test_model_is_read_from_a_store(
    run_stage: Any, network: FaultyNetwork, stored: Path, tiny_shape: Shape
) -> None:
    tensor_of = drawn(tiny_shape, 3)
    with torch.device("meta"):
        names = [
            (name, parameter.shape)
            for name, parameter in Llama(tiny_shape).named_parameters()
        ]
    folder = stored.parent / "model"
    save_model(
        folder, tiny_shape, {name: tensor_of(name, shape) for name, shape in names}
    )
    loaded = dict(load_model(folder).named_parameters())
    assert all(
        torch.equal(loaded[name], tensor_of(name, shape)) for name, shape in names
    )

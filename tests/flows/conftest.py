"""A small pipeline of plain functions that tests the machinery without real work."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gristmill.core.store import Store
from gristmill.flows.running.events import (
    RunEvent,
    StageEvent,
    StageFailed,
    StageOutput,
    StageProgress,
    StageStarted,
    StageWarning,
)
from gristmill.flows.running.run import Runner
from gristmill.flows.running.session import Session
from gristmill.flows.stages.plan import Node, fingerprint
from gristmill.flows.stages.stage import Stage
from gristmill.mixtures.manifest import Manifest
from gristmill.mixtures.schema.engine import Engine
from gristmill.mixtures.schema.sources import Source

TOY_STAGES = '''
import os, signal, sys, time
from pathlib import Path
from gristmill.dataprep.runners.tasks import Done, Task, run_tasks
from gristmill.core.files import atomic_write

def write(path, content):
    with atomic_write(path) as sink:
        sink.write(content)

def first(inputs, config, out, context):
    write(out / "numbers.txt", str(config["n"]).encode() + os.environ.get("TOY_END", "").encode())
    return {"counts": {"read": 1, "kept": 1}}

def second(inputs, config, out, context):
    """Writes its shards one by one; told so, it is killed in the middle, once."""
    number = int((inputs["first"] / "numbers.txt").read_text())
    for shard in range(number):
        target = out / f"{shard}.txt"
        if target.exists():
            continue
        if shard == 2 and config.get("die_once") and not (context.work / "died").exists():
            (context.work / "died").write_text("")
            os.kill(os.getpid(), signal.SIGKILL)
        write(target, f"{shard * shard}".encode())
        context.progress(shard + 1, number, "shards")
    print("a line for the log")
    context.warn("second: rows are long")
    return {"shards": number}

def failing(inputs, config, out, context):
    raise ValueError("failing: the number 7 is not allowed here; give another")

def damaged(inputs, config, out, context):
    from gristmill.core.files import REPAIR
    raise ValueError(f"x.bin is damaged: `{REPAIR}` and a run make it again")

def ranks(inputs, config, out, context):
    from gristmill.core.stage_context import print_failure
    print_failure("gloo/transport: Connection closed by peer", is_consequence=True)
    print_failure("[Errno 28] No space left on device: 'step-00000004'")
    print("=" * 60, flush=True)
    os._exit(1)

def silent(inputs, config, out, context):
    print("the last line that says a thing")
    print("=" * 60, flush=True)
    os._exit(1)

def exhausted(inputs, config, out, context):
    raise MemoryError("no room")

def exiting(inputs, config, out, context):
    print("last words")
    sys.exit(3)

def killed(inputs, config, out, context):
    print("last words", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

def killed_rank(inputs, config, out, context):
    from gristmill.core.stage_context import print_failure
    print("last words", flush=True)
    print_failure("rank 1 was killed", is_killed=True)
    sys.exit(1)

def losing(inputs, config, out, context):
    """Gets one step further in each attempt, up to `steps`."""
    from gristmill.core.files import read_json, write_json
    print("last words", flush=True)
    counter = context.work / "attempts.json"
    attempts = 1 + (read_json(counter) if counter.exists() else 0)
    write_json(counter, attempts)
    context.progress(min(attempts, config["steps"]), 9, "steps")
    write_json(context.work / "error.json", {"type": config["type"], "message": "lost"})
    os._exit(1)

def killed_worker(inputs, config, out, context):
    from gristmill.dataprep.runners.errors import KilledWorkerError
    print("last words", flush=True)
    raise KilledWorkerError("worker 1 was killed by signal 9")

def waiting(inputs, config, out, context):
    """Starts a child, says so, and works until it is told to stop."""
    import subprocess
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
    write(out / "pids.txt", f"{os.getpid()} {child.pid}".encode())
    context.progress(0, 1, "steps")
    time.sleep(120)
    return {}
'''


class Silent:
    """A subscriber that keeps the events of a run; `on_report` is called with each one
    that a stage's process reports.
    """

    def __init__(self) -> None:
        self.events: list[StageEvent] = []
        self.on_report: Callable[[StageEvent], None] = lambda event: None

    def __call__(self, event: RunEvent) -> None:
        assert isinstance(event, StageEvent)
        self.events.append(event)
        if isinstance(event, StageProgress | StageOutput | StageWarning):
            self.on_report(event)

    @property
    def started(self) -> list[tuple[str, bool]]:
        return [
            (event.node.name, event.resuming)
            for event in self.events
            if isinstance(event, StageStarted)
        ]

    @property
    def done(self) -> list[float]:
        return [event.done for event in self.events if isinstance(event, StageProgress)]

    @property
    def warnings(self) -> list[str]:
        return [
            event.message for event in self.events if isinstance(event, StageWarning)
        ]

    @property
    def failures(self) -> list[tuple[str, str]]:
        return [
            (event.node.name, event.message)
            for event in self.events
            if isinstance(event, StageFailed)
        ]


def toy_stage(name: str) -> Stage:
    return Stage(name, 1, f"gristmill_toy_stages:{name}")


def toy_node(
    name: str, config: dict[str, Any], inputs: dict[str, str] | None = None
) -> Node:
    stage = toy_stage(name)
    return Node(
        stage, fingerprint(stage, config, inputs or {}), config, config, inputs or {}
    )


@pytest.fixture
def toy_runner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Runner]:
    """Return a factory for runners of toy stages: `toy_runner(first={"n": 3},
    second={})`.
    """
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "gristmill_toy_stages.py").write_text(TOY_STAGES)
    monkeypatch.setenv("PYTHONPATH", str(modules), prepend=os.pathsep)

    def make(engine: Engine | None = None, **configs: dict[str, Any]) -> Runner:
        manifest = Manifest(
            name="toy",
            sources={"a": Source(path="letters/*.jsonl")},
            engine=engine or Engine(retries=0),
        )
        plan: dict[str, Node] = {}
        for name, config in configs.items():
            plan[name] = toy_node(
                name, config, {earlier: plan[earlier].fingerprint for earlier in plan}
            )
        store = Store.at(tmp_path / "store")
        return Runner(Session(manifest, "toy.yaml", [], store, None, plan), Silent())

    return make

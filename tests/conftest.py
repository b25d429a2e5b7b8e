"""What holds for all tests: the same examples in every run, one thread per process, and
which worker runs what when.

Property tests try the same examples in every run, however slow the machine is.
GRISTMILL_TEST_EXPLORE=1 makes them try new ones, and more of them; a failing example is
printed and remembered. What a test draws from the generators of a process does not
depend on the tests before it; GRISTMILL_TEST_SEED=5 makes it draw something else, and
is printed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings

import gristmill.flows.stages.registry  # noqa: F401 - lets the steps of `prepare` stand in manifests
from benchmarks.chaos.network import serving
from benchmarks.store_servers import SCHEMES, StoreServer, object_store
from gristmill.core import object_stores
from gristmill.core.object_stores import VARIABLE
from gristmill.dataprep.runners.errors import MissingEngineError
from tests.stores import BUCKET, Outage, store_clients

# The tensors of tests are tiny, and there is a worker per core already: more threads
# would wait for each other, and spin. It must be set before torch is imported.
# Processes that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# otherwise processes of their own, which import torch too
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# A shell that starts something in the background lets it ignore Ctrl-C, and with it all
# that it starts. Tests press it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How fast examples are made, and how many of them fit, says nothing of what is tested;
# both change with the machine and with which modules a worker happens to have loaded,
# whose constants hypothesis tries.
settings.register_profile(
    "same",
    deadline=None,
    derandomize=True,
    # Phase.explain traces each line, in which Python 3.11 may hang beside threads.
    phases=[phase for phase in Phase if phase is not Phase.explain],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile("explore" if os.environ.get("GRISTMILL_TEST_EXPLORE") else "same")

SEED = int(os.environ.get("GRISTMILL_TEST_SEED", "0"))
"""What every test's generators begin from."""
TORCHS_OWN_SEED = 67280421310721
"""What torch's generator begins from in a process that imports it only within a test
(`default_rng_seed_val`).
"""

FOLDERS = {"tests/browser": "browser", "tests/referees": "referee"}
"""Folders that one worker runs, and the mark of their tests: they share a server and a
browser, or slow imports.
"""
SECONDS = Path(__file__).parent / "seconds.json"
"""Measured seconds of each file or folder of FOLDERS: the longest begin first, so that
no worker is left alone with one at the end, and `--part` deals them evenly. `make
test-seconds` writes it.
"""
WARM = frozenset(
    """test_browse test_compare test_dialects test_distilled test_own_steps_guide test_python_interface
                    test_python_reference""".split()
)
"""Files of tests that look at what runs leave behind, and not at their processes:
stages need not begin as programs.
"""


def pytest_report_header() -> str:
    """Say what the tests draw from."""
    return f"GRISTMILL_TEST_SEED={SEED}"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Let a test draw the same numbers whatever ran before it in its worker."""
    random.seed(SEED)
    np.random.seed(SEED)
    if SEED:
        import torch
    elif (torch := sys.modules.get("torch")) is None:
        # it is slow to import, and begins from the same seed when it is
        return
    torch.manual_seed(TORCHS_OWN_SEED + SEED)


@pytest.fixture(scope="session")
def prefect_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty database of a Prefect server, made once for all workers."""
    from tests.servers import make_prefect_database

    own = tmp_path_factory.getbasetemp()
    return make_prefect_database(
        own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    )


@pytest.fixture(scope="module", autouse=True)
def warm_stages(request: pytest.FixtureRequest) -> Iterator[None]:
    """Lets the stages of runs of the files WARM begin as forks of a process that has
    imported everything.
    """
    if request.path.stem not in WARM:
        yield
        return
    from gristmill.flows.running import run, session, stage_server
    from tests.warm_commands import WarmStages

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage_server, "_start", WarmStages)
        patch.setattr(
            session,
            "stage_server",
            lambda plan, stages, engine: nullcontext(WarmStages()),
        )
        patch.setattr(run, "is_forkable", lambda plan, stage, with_trainings: True)
        yield


def unit_of(nodeid: str) -> str:
    """What a worker gets as a whole: the test's file, so that fixtures of a module are
    made once, or its folder.
    """
    file = nodeid.partition("::")[0]
    return next((folder for folder in FOLDERS if file.startswith(f"{folder}/")), file)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of `make test-long` and `make test-seconds`."""
    parser.addoption(
        "--part",
        help="run only part K of N of the files, such as 2/8, "
        "and what --changed-since names",
    )
    parser.addoption(
        "--changed-since",
        help="with --part: also run the files that changed since this commit",
    )
    parser.addoption(
        "--write-seconds", action="store_true", help=f"write {SECONDS.name}"
    )


def parts_of(
    units: Iterable[str], seconds: Mapping[str, float], num_parts: int
) -> dict[str, int]:
    """Deal units to parts of about equal time: the longest first, each to the part with
    the least time so far.
    """
    totals = [0.0] * num_parts
    parts = {}
    for unit in sorted(set(units), key=lambda unit: (-seconds.get(unit, 0.0), unit)):
        parts[unit] = totals.index(min(totals))
        totals[parts[unit]] += seconds.get(unit, 1.0)
    return parts


def changed_units(revision: str) -> set[str]:
    """Test files, or their folders, that changed since a commit."""
    command = ["git", "diff", "--name-only", revision, "--", "tests"]
    files = subprocess.run(
        command, cwd=SECONDS.parents[1], capture_output=True, text=True, check=True
    ).stdout.split()
    return {unit_of(file) for file in files}


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Iterator[None]:
    """Mark the tests of folders, keep those of the chosen part, and begin with the
    longest files.

    xdist deals the files out in this order.
    """
    for item in items:
        if mark := FOLDERS.get(unit_of(item.nodeid)):
            item.add_marker(mark)
    yield  # here `-m` deselects
    seconds: dict[str, float] = json.loads(SECONDS.read_text())
    items.sort(key=lambda item: -seconds.get(unit_of(item.nodeid), 0.0))
    if part := config.getoption("part"):
        number, num_parts = map(int, part.split("/"))
        parts = parts_of((unit_of(item.nodeid) for item in items), seconds, num_parts)
        revision = config.getoption("changed_since")
        changed = changed_units(revision) if revision else set()
        items[:] = [
            item
            for item in items
            if unit_of(item.nodeid) in changed
            or parts[unit_of(item.nodeid)] == number % num_parts
        ]


@pytest.hookimpl(wrapper=True)
def pytest_terminal_summary(
    terminalreporter: Any, config: pytest.Config
) -> Iterator[None]:
    """Write the seconds of each unit."""
    yield
    if not config.getoption("write_seconds"):
        return
    seconds: dict[str, float] = defaultdict(float, json.loads(SECONDS.read_text()))
    reports = [
        report
        for kind in ("", "passed", "failed")
        for report in terminalreporter.stats.get(kind, [])
    ]
    seconds |= dict.fromkeys((unit_of(report.nodeid) for report in reports), 0.0)
    for report in reports:
        seconds[unit_of(report.nodeid)] += report.duration
    lines = {
        unit: round(total, 1) for unit, total in sorted(seconds.items()) if total >= 1
    }
    SECONDS.write_text(json.dumps(lines, indent=0) + "\n")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Deal whole files and folders out, in the order of collection.

    The marks of `--dist loadgroup` would do nothing: the workers of xdist 3.8 tell them
    by changing the names of tests, which pytest 9.2 does not let them.
    """
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class InOrder(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit_of(nodeid)

        def remove_node(self, node: Any) -> Any:
            # xdist deals out a crashed worker's finished files again, and whoever gets
            # one waits forever
            units = self.assigned_work[node]
            for unit in [unit for unit, done in units.items() if all(done.values())]:
                del units[unit]
            return super().remove_node(node)

    config.option.loadscopereorder = False  # by how many tests a file has
    return InOrder(config, log)


@pytest.fixture(scope="module")
def moto_port() -> Iterator[int]:
    """The port of an S3-compatible server of this process."""
    pytest.importorskip("s3fs")
    pytest.importorskip("moto")
    with object_store(BUCKET) as server:
        yield server.port


@pytest.fixture(scope="module", params=SCHEMES)
def store_server(request: pytest.FixtureRequest) -> Iterator[StoreServer]:
    """An object store with a bucket: one of each kind in turn."""
    with ExitStack() as stack:
        try:
            server = stack.enter_context(object_store(BUCKET, request.param))
        except (ImportError, MissingEngineError) as error:
            pytest.skip(str(error))
        yield server


@pytest.fixture
def outage(
    store_server: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Outage]:
    """A network before a store; this process, and those that it starts, ask it for
    `outage.url`, for half a minute.
    """
    monkeypatch.setattr(object_stores, "FIRST_PAUSE_SECONDS", 0.001)
    # another test's network may have had the same port
    monkeypatch.setattr(object_stores._RetryState, "given_up", {})
    with (
        serving(Outage(store_server)) as network,
        store_clients(store_server, network.address),
    ):
        monkeypatch.setenv(VARIABLE, "30")
        yield network

"""What holds for all tests: the same examples in every run, one thread per process, and which worker runs what when.

Property tests try the same examples in every run, however slow the machine is. GRISTMILL_TEST_EXPLORE=1 makes them try
new ones, and more of them; a failing example is printed and remembered. What a test draws from the generators of a
process does not depend on the tests before it; GRISTMILL_TEST_SEED=5 makes it draw something else, and is printed.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

import gristmill.flows.stages.registry  # noqa: F401 - lets the steps of `prepare` stand in manifests
from benchmarks.chaos.network import CREDENTIALS, object_store, serving
from gristmill.core import object_stores
from gristmill.core.object_stores import VARIABLE
from tests.stores import BUCKET, Outage

# The tensors of tests are tiny, and there is a worker per core already: more threads would wait for each other, and
# spin. It must be set before torch is imported. Processes that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # otherwise processes of their own, which import torch too

# A shell that starts something in the background lets it ignore Ctrl-C, and with it all that it starts. Tests press it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How fast examples are made, and how many of them fit, says nothing of what is tested; both change with the machine and
# with which modules a worker happens to have loaded, whose constants hypothesis tries.
settings.register_profile(
    "same", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile("explore" if os.environ.get("GRISTMILL_TEST_EXPLORE") else "same")

SEED = int(os.environ.get("GRISTMILL_TEST_SEED", "0"))
"""What every test's generators begin from."""
TORCHS_OWN_SEED = 67280421310721
"""What torch's generator begins from in a process that imports it only within a test (`default_rng_seed_val`)."""

FOLDERS = {"tests/browser": "browser", "tests/referees": "referee"}
"""Folders that one worker runs, and the mark of their tests: they share a server and a browser, or slow imports."""
LONGEST = (
    "tests/flows/test_engines.py",
    "tests/browser",
    "tests/flows/test_survives.py",
    "tests/train/test_parallel.py",
    "tests/flows/test_pipeline.py",
    "tests/flows/test_serving.py",
    "tests/referees",
    "tests/train/test_compute.py",
    "tests/train/test_resume.py",
    "tests/train/test_tuning_parallel.py",
    "tests/train/test_post_training.py",
    "tests/train/test_loop.py",
    "tests/flows/test_python_interface.py",
)
"""What takes longest is begun first, so that at the end no worker is left alone with one of them."""
WARM = frozenset(
    """test_browse test_compare test_dialects test_distilled test_own_steps_guide test_python_interface
                    test_python_reference""".split()
)
"""Files of tests that look at what runs leave behind, and not at their processes: stages need not begin as programs."""


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
    elif (torch := sys.modules.get("torch")) is None:  # it is slow to import, and begins from the same seed when it is
        return
    torch.manual_seed(TORCHS_OWN_SEED + SEED)


@pytest.fixture(scope="session")
def prefect_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty database of a Prefect server, made once for all workers."""
    from tests.servers import make_prefect_database

    own = tmp_path_factory.getbasetemp()
    return make_prefect_database(own.parent if "PYTEST_XDIST_WORKER" in os.environ else own)


@pytest.fixture(scope="module", autouse=True)
def warm_stages(request: pytest.FixtureRequest) -> Iterator[None]:
    """Lets the stages of runs of the files WARM begin as forks of a process that has imported everything."""
    if request.path.stem not in WARM:
        yield
        return
    from gristmill.flows.running import run, session, stage_server
    from tests.warm_commands import WarmStages

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage_server, "_start", WarmStages)
        patch.setattr(session, "stage_server", lambda plan, stages, engine: nullcontext(WarmStages()))
        patch.setattr(run, "is_forkable", lambda plan, stage: True)
        yield


def unit_of(nodeid: str) -> str:
    """What a worker gets as a whole: the test's file, so that fixtures of a module are made once, or its folder."""
    file = nodeid.partition("::")[0]
    return next((folder for folder in FOLDERS if file.startswith(f"{folder}/")), file)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of folders, and put what takes longest first; xdist deals the files out in this order."""
    for item in items:
        if mark := FOLDERS.get(unit_of(item.nodeid)):
            item.add_marker(mark)
    order = {unit: place for place, unit in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(unit_of(item.nodeid), len(LONGEST)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Deal whole files and folders out, in the order of collection.

    The marks of `--dist loadgroup` would do nothing: the workers of xdist 3.8 tell them by changing the names of tests,
    which pytest 9.2 does not let them.
    """
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class InOrder(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit_of(nodeid)

    config.option.loadscopereorder = False  # by how many tests a file has
    return InOrder(config, log)


@pytest.fixture(scope="module")
def moto_port() -> Iterator[int]:
    """The port of an S3-compatible server of this process."""
    pytest.importorskip("s3fs")
    pytest.importorskip("moto")
    with object_store(BUCKET) as port:
        yield port


@pytest.fixture
def outage(moto_port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Outage]:
    """A network before it; this process, and those that it starts, ask it for a store in `s3://`, for half a minute."""
    from gristmill.core.s3_files import S3Files

    with serving(Outage(moto_port)) as network:
        for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": network.address, VARIABLE: "30"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(object_stores, "FIRST_PAUSE_SECONDS", 0.001)
        S3Files.clear_instance_cache()
        yield network
    S3Files.clear_instance_cache()

"""Faults of the servers of a run: the object store of its store, and Prefect's API."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.chaos.fuse import burn_at
from benchmarks.chaos.kills import still_running
from benchmarks.chaos.network import (
    REFUSE_SECONDS,
    Network,
    serving,
    silent_server,
    unused_address,
)
from benchmarks.chaos.prefect_server import POLL_SECONDS, prefect_server
from benchmarks.chaos.surroundings import Scene
from benchmarks.chaos.undisturbed import (
    RUN_SECONDS,
    finish,
    gristmill,
    start,
    wrong_code,
    wrong_end,
)
from benchmarks.store_servers import ENVIRONMENTS, object_store
from gristmill.core.object_stores import VARIABLE

BUCKET = "chaos"
RETRY_SECONDS = 10
"""Time of retries of a store that is away: the run ends then, and is started once
more.
"""
PATIENT_SECONDS = 600
"""The default time of retries."""
DELAY_SECONDS = 0.02
"""Approximate time of a request to a store in the same region."""


def slow_and_failing_store(scene: Scene) -> list[str]:
    """Run the first stages in an object store with slow answers, some of which fail."""
    with _store_behind_network() as between:
        between.delay_seconds, between.is_faulty = DELAY_SECONDS, True
        return [*_make(scene, between), *_compare(scene, between)]


def store_goes_away(scene: Scene) -> list[str]:
    """Let the object store go away in the middle of the first stages, and come back for
    the same command.
    """
    with _store_behind_network() as between:
        between.away_from = 10 + int(scene.place("away") * 200)
        wrong = wrong_end(gristmill(_arguments(scene), _environment(between)), 1)
        between.away_from = None
        return [*wrong, *_make(scene, between), *_compare(scene, between)]


def store_refuses_everything(scene: Scene) -> list[str]:
    """Let the object store answer 503 to all requests for a minute in the middle of the
    first stages.
    """
    with _store_behind_network() as between:
        between.refuses_from = 10 + int(scene.place("refused") * 200)
        start_time = time.monotonic()
        wrong = wrong_code(
            gristmill(
                _arguments(scene),
                {**_environment(between), VARIABLE: str(PATIENT_SECONDS)},
            )
        )
        seconds = time.monotonic() - start_time
        if not between.refused or seconds < REFUSE_SECONDS:
            wrong.append(
                f"only {between.refused} requests were refused, in {seconds:.0f} s"
            )
        return [*wrong, *_compare(scene, between)]


def no_prefect_server(scene: Scene) -> list[str]:
    """Name a Prefect server that does not exist, or one that does not answer: the run
    does not need it.
    """
    scene.run.lend(scene.store, scene.stage)
    arguments = [
        word
        for word in scene.run.arguments(scene.store, scene.stage)
        if word != "--no-ui"
    ]
    wrong = list[str]()
    with silent_server() as silent:
        for address in (unused_address(), silent):
            done = gristmill(
                [*arguments, "--force", scene.stage],
                {**os.environ, "PREFECT_API_URL": address},
            )
            wrong += wrong_code(done)
            wrong += (
                []
                if "does not answer" in done.stdout
                else ["does not say that the server does not answer"]
            )
    return [*wrong, *scene.goes_on()]


def prefect_server_dies(scene: Scene) -> list[str]:
    """Kill Prefect's server in the middle of the stage, and start it again: it still
    learns of the run's end.
    """
    scene.run.lend(scene.store, scene.stage)
    arguments = [
        word
        for word in scene.run.arguments(scene.store, scene.stage)
        if word != "--no-ui"
    ]
    fuse = scene.fuse(scene.some_change("server"), "nothing")
    with prefect_server(Path(fuse.log).parent) as server:
        environment = {
            **burn_at(fuse),
            "PREFECT_API_URL": server.api,
            "PREFECT_HOME": str(server.home),
        }
        # Prefect starts stages from threads of its own, which `warm` does not fork
        # from.
        run = start(arguments, environment, warmed=False)
        deadline = time.monotonic() + RUN_SECONDS
        while not fuse.has_burnt() and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        server.kill()
        server.start()
        done, states = finish(run), server.states()
    wrong = wrong_end(done)
    wrong += (
        []
        if states == ["Completed"]
        else [f"the server knows of runs that are {', '.join(states)}"]
    )
    return [*wrong, *scene.goes_on(), *still_running([fuse.log])]


def _make(scene: Scene, between: Network) -> list[str]:
    return wrong_end(gristmill(_arguments(scene), _environment(between)))


def _arguments(scene: Scene) -> list[str]:
    """Return arguments up to the second stage, which reads the first one's output from
    the object store.
    """
    return scene.run.arguments(_url(scene), scene.run.stages[1])


def _url(scene: Scene) -> str:
    return f"s3://{BUCKET}/{scene.store.name}"


@contextmanager
def _store_behind_network() -> Iterator[Network]:
    with object_store(BUCKET) as server, serving(Network(server.port)) as between:
        yield between


def _environment(between: Network) -> dict[str, str]:
    return {
        **os.environ,
        **ENVIRONMENTS["s3"](between.address),
        VARIABLE: str(RETRY_SECONDS),
    }


def _compare(scene: Scene, between: Network) -> list[str]:
    """Fetch the outputs, and compare them."""
    between.is_faulty, between.delay_seconds = False, 0.0
    _fetch(_url(scene), scene.store, between.address)
    return scene.run.differences(scene.store, scene.run.stages[:2])


def _fetch(url: str, target: Path, endpoint: str) -> None:
    import s3fs  # type: ignore[import-untyped]

    files = s3fs.S3FileSystem(
        key="any",
        secret="any",
        endpoint_url=endpoint,
        client_kwargs={"region_name": "us-east-1"},
        skip_instance_cache=True,
    )
    root = url.removeprefix("s3://")
    for path in files.find(root):
        local = target / path.removeprefix(f"{root}/")
        local.parent.mkdir(parents=True, exist_ok=True)
        local.write_bytes(files.cat_file(path))

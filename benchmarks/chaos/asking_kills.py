"""`gristmill bench chaos_asking`: stages that ask a model are killed at any of their
requests to a bad endpoint.

Each attempt at a stage is killed at its n-th request, drawn by hash, before the answer
or after it; the last one is not. Then the stage has the bytes of a run whose endpoint
never failed, no request with a kept answer was repeated, and no answer is kept twice.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

from benchmarks.chaos.bad_endpoint import TIMEOUT_SECONDS, BadEndpoint, kept_answers
from benchmarks.chaos.chaos import disturb, rows_of
from benchmarks.chaos.fuse import Fuse, burn_at, new_log
from benchmarks.chaos.kills import (
    ATTEMPTS_IN_CHAIN,
    KILLS,
    KILLS_IN_CHAIN,
    Kill,
    Result,
    carriers,
    draw,
    still_running,
    wrong_kill,
)
from benchmarks.chaos.network import serving
from benchmarks.chaos.project import MODIFIED_AT, json_lines, prose
from benchmarks.chaos.undisturbed import Undisturbed, finish, start, wrong_code
from benchmarks.measuring import Row
from gristmill.flows.running.fork_server import Forked

AT_ONCE = 4
"""Concurrent requests, all of which may be repeated after a kill."""
ENDPOINT = "http://127.0.0.1:9/v1"
MODEL = (
    f'{{endpoint: "{ENDPOINT}", model: writer, concurrency: {AT_ONCE}, timeout_seconds: {TIMEOUT_SECONDS}, '
    "seed: 1, temperature: 1.0}"
)
MANIFEST = f"""\
name: asking
seed: 5
sources:
  web: {{path: "web/*.jsonl"}}
  taught: {{generate: {{parents: [web], style: textbook, per_document: 2, model: {MODEL}}}}}
ingest: {{shard_bytes: 6_000}}
prepare:
  - judge: {{model: {MODEL}, max_quarantined: 0.5}}
examples:
  revised:
    data: [{{path: prompts.jsonl}}]
    model: {MODEL}
    revise: {{principles: [Be kind., Be brief.], rounds: 2}}
    rewards: [{{kind: judge, model: {MODEL}}}]
    max_quarantined: 0.5
  compared:
    data: [{{path: "examples://revised"}}]
    model: {MODEL}
    per_prompt: 2
    compare: {{model: {MODEL}}}
    gives: pairs
    max_quarantined: 0.5
"""
STAGES = ("generate", "judge", "examples-revised", "examples-compared")
"""Stages that ask; of the sets of examples one has a judge for its reward, and one a
judge of pairs.
"""
ASKED = {
    "generate": ["sources.taught.generate.model"],
    "judge": ["prepare.0.judge.model"],
    "examples-revised": ["examples.revised.model", "examples.revised.rewards.0.model"],
    "examples-compared": ["examples.compared.model", "examples.compared.compare.model"],
}
"""Stage -> models of the manifest that it asks."""
WAYS = tuple(kill for kill in KILLS if kill.role == "any")
NOTHING_TWICE = "nothing asked twice whose answer was kept, no answer kept twice"


def rows(
    points: int = 200, seed: int = 0, folder: Path | None = None, at_once: int = 2
) -> Iterator[Row]:
    """Kill the stages that ask; arguments as of `chaos.rows`."""
    results = disturb(
        partial(all_points, points, seed), f"asking-{seed}", folder, at_once
    )
    yield from rows_of(
        "asking: identical_after_kill",
        f"every byte as in the run that nothing disturbed, {NOTHING_TWICE}",
        {f"asking: {way.name}": way.promised for way in WAYS},
        results,
    )


def all_points(points: int, seed: int, work: Path) -> dict[str, Callable[[], Result]]:
    """Return all chains of kills by name."""
    run = undisturbed_run(work)
    chains: dict[str, Callable[[], Result]] = {}
    for number in range(-(-points // KILLS_IN_CHAIN)):
        stage = STAGES[number % len(STAGES)]
        chains[f"asking {number}: {stage}"] = partial(
            run_chain, run, stage, number, seed, work
        )
    return chains


def undisturbed_run(folder: Path) -> Undisturbed:
    """Run the project that asks, with an endpoint that answers each request at once and
    correctly.
    """
    project = folder / "asking"
    run = Undisturbed(
        project / "asking.yaml", folder / "clean-asking", folder / "changes-asking"
    )
    if not run.manifest.exists():
        write_project(project)
    with serving(BadEndpoint()) as endpoint:
        endpoint.faulty = 0.0
        run.finish(
            [word for stage in STAGES for word in _endpoint_settings(stage, endpoint)]
        )
    return run


def write_project(folder: Path) -> None:
    """Write documents, prompts and the manifest; the same files every time."""
    random_ = random.Random(17)
    files = {
        f"web/{number}.jsonl": json_lines(
            [{"text": prose(random_, 6)} for _ in range(9)]
        )
        for number in range(3)
    }
    files["prompts.jsonl"] = json_lines(
        [{"prompt": f"What is {prose(random_, 3)}"} for _ in range(10)]
    )
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        os.utime(path, (MODIFIED_AT, MODIFIED_AT))
    # last, as the mark of a whole project
    (folder / "asking.yaml").write_text(MANIFEST)


def run_chain(
    run: Undisturbed, stage: str, number: int, seed: int, folder: Path
) -> Result:
    """Kill attempt after attempt at a stage, but not the last one, and compare; see
    `kills.run_chain`.
    """
    way = WAYS[int(draw(seed, number, "way") * len(WAYS))]
    store, kills, wrong = (
        folder / f"asking-{number}",
        list[Result](),
        list[str](),
    )
    shutil.rmtree(store, ignore_errors=True)
    run.lend(store, stage)
    total = kept_answers(run.store, run.session.folder(stage).path.name).total()
    with serving(BadEndpoint(seed, number)) as endpoint:
        attempt = partial(_attempt, run, stage, store, endpoint, way)
        try:
            for turn in range(ATTEMPTS_IN_CHAIN):
                if len(kills) == KILLS_IN_CHAIN or wrong:
                    break
                remaining = max(total - kept_answers(store).total(), AT_ONCE)
                at = 1 + int(draw(seed, number, "place", turn) * remaining)
                is_late = draw(seed, number, "late", turn) < 0.5
                code, wrong = attempt(at, is_late)
                if code is not None:
                    kills.append({"request": at, "behind": is_late, "code": code})
                if run.folder_in(store, stage).state() == "committed" and not wrong:
                    wrong = _compare(run, stage, store, endpoint, len(kills))
                    shutil.rmtree(store)  # with its answers
                    endpoint.answered.clear()
                    run.lend(store, stage)
            wrong = wrong or [
                *attempt()[1],
                *_compare(run, stage, store, endpoint, len(kills)),
            ]
        except subprocess.TimeoutExpired as error:
            wrong.append(f"an attempt hangs: {error}")
    if not wrong:
        shutil.rmtree(store)
    return {
        "number": number,
        "fault": f"asking: {way.name}",
        "stage": stage,
        "kills": kills,
        "wrong": wrong,
    }


def _attempt(
    run: Undisturbed,
    stage: str,
    store: Path,
    endpoint: BadEndpoint,
    way: Kill,
    at: int = 0,
    is_late: bool = False,
) -> tuple[int | None, list[str]]:
    """Run the stage, and kill it at a request; returns its code if it was killed, and
    sentences about broken promises.
    """
    # marks its processes, and never burns
    fuse = Fuse(str(run.folder_in(store, stage).path), new_log(store))
    kept, flow = kept_answers(store), list[int]()
    endpoint.begin(at, is_late, lambda: _end(way, flow[0], fuse.log))
    started = start(
        run.arguments(store, stage, *_endpoint_settings(stage, endpoint)), burn_at(fuse)
    )
    assert isinstance(started.process, Forked)
    flow.append(started.process.begun())
    done = finish(started)
    wrong = still_running([fuse.log])
    is_killed = 0 < at <= len(endpoint.asked)
    if is_killed:
        wrong += wrong_kill(way, done, is_late)
    else:
        wrong += wrong_code(done)
    repeated = {name for name in endpoint.asked if name in kept}
    wrong += (
        [f"{len(repeated)} requests were made again whose answers were kept"]
        if repeated
        else []
    )
    shutil.rmtree(Path(fuse.log).parent)
    return done.returncode if is_killed else None, wrong


def _endpoint_settings(stage: str, endpoint: BadEndpoint) -> list[str]:
    return [
        word
        for place in ASKED[stage]
        for word in ("--set", f"{place}.endpoint={endpoint.address}")
    ]


def _end(way: Kill, flow: int, log: str) -> None:
    """Kill a run from outside."""
    number = signal.SIGTERM if way.act == "terminate the flow" else signal.SIGKILL
    for process in (
        sorted(carriers(log)) if way.act == "kill it and all above" else [flow]
    ):
        with suppress(ProcessLookupError):
            os.kill(process, number)


def _compare(
    run: Undisturbed, stage: str, store: Path, endpoint: BadEndpoint, kills: int
) -> list[str]:
    """Return differences from the undisturbed run, and requests that were repeated more
    often than kills explain.
    """
    kept = kept_answers(store)
    double = [name for name, count in kept.items() if count > 1]
    lost = [name for name in endpoint.answered if name not in kept]
    repeated = endpoint.answered.total() - len(endpoint.answered)
    wrong = run.differences(store, [stage])
    if double:
        wrong.append(f"{len(double)} answers are kept twice")
    if lost:
        wrong.append(f"{len(lost)} answers were lost")
    if repeated > kills * AT_ONCE:
        wrong.append(
            f"{repeated} requests were answered again after {kills} kills, "
            f"{AT_ONCE} at a time"
        )
    return wrong

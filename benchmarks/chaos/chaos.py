"""`gristmill bench chaos`: the pipeline is killed, starved and damaged, and must end
with the same bytes each time.

The tiny projects of `project.py` run through all stages once, undisturbed. Then every
point disturbs a stage in a store that borrows the outputs of earlier stages, runs the
same command again, and compares.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from benchmarks.chaos import servers, surroundings
from benchmarks.chaos.kills import KILLS, Result, chains, draw, run_chain
from benchmarks.chaos.surroundings import CannotMountError, Scene
from benchmarks.chaos.undisturbed import Undisturbed
from benchmarks.measuring import Row, row
from gristmill.flows.stages.registry import STAGES

KILLS_PER_SCENE = 100
"""Kills for which every other fault is tried once."""


@dataclass(frozen=True)
class Fault:
    """Fault around a run, the promise of what happens then, and a function that causes
    it.
    """

    name: str
    promised: str
    act: Callable[[Scene], list[str]]


FAULTS = (
    Fault(
        "a committed file is deleted",
        "found by whoever needs it; made again",
        partial(surroundings.damage_a_file, how="delete"),
    ),
    Fault(
        "a committed file is truncated",
        "found by its size; made again",
        partial(surroundings.damage_a_file, how="truncate"),
    ),
    Fault(
        "a bit of a committed file is flipped",
        "`verify` names it; --repair and a run make it again",
        partial(surroundings.damage_a_file, how="flip"),
    ),
    Fault(
        "the store is read-only",
        "code 1 and the reason, nothing changes; later the same command resumes it",
        surroundings.forbid_writing,
    ),
    Fault(
        "two runs at once",
        "one makes it, once; the other waits and uses it",
        partial(surroundings.run_two_at_once, kill_one=False),
    ),
    Fault(
        "two runs at once, one is killed",
        "the other takes over",
        partial(surroundings.run_two_at_once, kill_one=True),
    ),
    Fault(
        "the clock is set back by 400 days",
        "the run continues to its end",
        surroundings.set_the_clock_back,
    ),
    Fault(
        "the object store is slow, and fails at times",
        "the run continues to its end",
        servers.slow_and_failing_store,
    ),
    Fault(
        "the object store goes away",
        "code 1 and the reason; later the same command resumes it",
        servers.store_goes_away,
    ),
    Fault(
        "the Prefect server is away, or silent",
        "the run says so, and continues to its end",
        servers.no_prefect_server,
    ),
    Fault(
        "the Prefect server is killed, and comes back",
        "the run continues to its end, and the server hears of it",
        servers.prefect_server_dies,
    ),
)


def rows(
    points: int = 200, seed: int = 0, folder: Path | None = None, at_once: int = 2
) -> Iterator[Row]:
    """Disturb the pipeline, and measure for each fault the share of points that ended
    with the same bytes.

    Args:
        points: kills; of every other fault there is one scene for each hundred of them.
        seed: of places and kinds.
        folder: work folder. Points of the same seed that were done in it count and are
            not repeated; stores with differences stay in it. Otherwise a temporary
            folder, which is removed unless something was wrong.
        at_once: points at a time.
    """
    results = disturb(
        lambda work: all_points(undisturbed_runs(work), points, seed, work),
        f"points-{seed}",
        folder,
        at_once,
    )
    promised = (
        "every byte as in the run that nothing disturbed, nothing lost, "
        "nothing double, nothing left running"
    )
    promises = {fault.name: fault.promised for fault in (*KILLS, *FAULTS)}
    yield from rows_of("identical_after_kill", promised, promises, results)


def disturb(
    make_points: Callable[[Path], Mapping[str, Callable[[], Result]]],
    name: str,
    folder: Path | None,
    at_once: int,
) -> list[Result]:
    """Do all points of a work folder, and record them in its file `NAME.jsonl`; see
    `rows`.
    """
    work = (
        Path(tempfile.mkdtemp(prefix="gristmill-chaos-")) if folder is None else folder
    )
    results = do_points(make_points(work), work / f"{name}.jsonl", at_once)
    if folder is None and not any(result["wrong"] for result in results):
        shutil.rmtree(work)
    return results


def rows_of(
    name: str, promised: str, promises: Mapping[str, str], results: Sequence[Result]
) -> Iterator[Row]:
    """Return a row for all kills if there are any, and one for each fault that was
    tried.

    Args:
        name, promised: of the row for all kills.
        promises: fault -> its promise.
        results: of all points.
    """
    kills = [result for result in results if "kills" in result]
    if kills:
        yield _row(name, promised, kills)
    by_fault = defaultdict(list)
    for result in results:
        by_fault[result["fault"]].append(result)
    for fault, fault_promised in promises.items():
        if by_fault[fault]:
            yield _row(fault, fault_promised, by_fault[fault])


def undisturbed_runs(folder: Path) -> dict[str, Undisturbed]:
    """Return stage -> its run; stages that begin with given tokens, or a given model,
    have a run of their own.
    """
    whole = Undisturbed.make(folder)
    given = Undisturbed.make_given(folder, whole)
    return {**dict.fromkeys(given.stages, given), **dict.fromkeys(whole.stages, whole)}


def do_points(
    points: Mapping[str, Callable[[], Result]], record: Path, at_once: int
) -> list[Result]:
    """Do all points that are not in the record yet; each is recorded as soon as it is
    done.
    """
    lock = threading.Lock()
    lines = record.read_text().splitlines() if record.exists() else []
    done = {result["key"]: result for result in map(json.loads, lines)}
    start = time.monotonic()

    def do(key: str) -> None:
        result = {"key": key, **points[key]()}
        with lock, record.open("a") as sink:
            sink.write(json.dumps(result) + "\n")
            done[key] = result
            verdict = "; ".join(result["wrong"]) or "as promised"
            seconds = time.monotonic() - start
            print(
                f"{seconds:6.0f} s  {len(done)} points: {key}: {verdict}",
                file=sys.stderr,
                flush=True,
            )

    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(do, [key for key in points if key not in done]))
    return [done[key] for key in sorted(done)]


def all_points(
    runs: Mapping[str, Undisturbed], points: int, seed: int, folder: Path
) -> dict[str, Callable[[], Result]]:
    """Return all points by name, in an order drawn by hash, so that a stopped run has
    done some of each fault.
    """
    by_name: dict[str, Callable[[], Result]] = {
        f"kills {chain.number}: {chain.kill.name}, {chain.stage}": partial(
            run_chain, runs[chain.stage], chain, folder
        )
        for chain in chains(runs, points, seed)
    }
    for number in range(max(1, points // KILLS_PER_SCENE)):
        for fault in FAULTS:
            stage = list(runs)[int(draw(seed, number, fault.name) * len(runs))]
            scene = Scene(
                runs[stage],
                folder / f"scene-{FAULTS.index(fault)}-{number}",
                stage,
                seed,
                number,
            )
            by_name[f"{fault.name}, {number}: {stage}"] = partial(play, fault, scene)
    return dict(sorted(by_name.items(), key=lambda item: draw(seed, "order", item[0])))


def play(fault: Fault, scene: Scene) -> Result:
    """Cause a fault; the store stays if something is wrong."""
    shutil.rmtree(scene.store, ignore_errors=True)
    try:
        wrong = fault.act(scene)
    except subprocess.SubprocessError as error:
        wrong = [f"a command hangs, or cannot be run: {error}"]
    except (CannotMountError, ImportError) as error:
        return {
            "fault": fault.name,
            "stage": scene.stage,
            "wrong": [],
            "not_tried": str(error),
        }
    if not wrong:
        for leftover in (
            scene.store,
            *scene.store.parent.glob(f"{scene.store.name}-fuse-*"),
        ):
            shutil.rmtree(leftover)
    return {"fault": fault.name, "stage": scene.stage, "wrong": wrong}


def _row(name: str, promised: str, results: Sequence[Result]) -> Row:
    tried = [result for result in results if "not_tried" not in result]
    if not tried:
        not_tried = replace(row(name, None, 1.0, "identical"), promised=promised)
        return replace(not_tried, happened=f"not tried: {results[0]['not_tried']}")
    right = total = 0
    for result in tried:
        points = max(1, len(result.get("kills", [])))
        total += points
        # A single wrong end of a chain of kills spoils all of them.
        right += 0 if result["wrong"] else points
    wrong = [
        f"{result['stage']}: {result['wrong'][0]}"
        for result in tried
        if result["wrong"]
    ]
    verdict = (
        f"{len(wrong)} otherwise: {'; '.join(wrong[:3])}"
        if wrong
        else "all as promised"
    )
    stages = {result["stage"] for result in tried}
    happened = f"{total} points in {len(stages)} of {len(STAGES)} stages, {verdict}"
    return replace(
        row(name, right / total, 1.0, "identical"), promised=promised, happened=happened
    )

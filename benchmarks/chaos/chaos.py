"""`gristmill bench chaos`: the pipeline is killed, starved and damaged, and must end with the same bytes each time.

The tiny projects of `project.py` go through all stages once, undisturbed. Then every point disturbs one stage of it in
a store that borrows the outputs of the stages before, lets the same command run again, and compares.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.chaos import servers, surroundings
from benchmarks.chaos.kills import KILLS, chains, draw, run_chain
from benchmarks.chaos.surroundings import CannotMountError, Scene
from benchmarks.chaos.undisturbed import Undisturbed
from gristmill.flows.stages.registry import STAGES

KILLS_PER_SCENE = 100
"""For so many kills, every other fault is tried once."""
Result = dict[str, Any]


@dataclass(frozen=True)
class Fault:
    """What may go wrong around a run, what is promised then, and how it is brought about."""

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
        "two runs at once, one is killed", "the other takes over", partial(surroundings.run_two_at_once, kill_one=True)
    ),
    Fault("the clock is set back by 400 days", "the run continues to its end", surroundings.set_the_clock_back),
    Fault(
        "the object store is slow, and fails at times", "the run continues to its end", servers.slow_and_failing_store
    ),
    Fault(
        "the object store goes away",
        "code 1 and the reason; later the same command resumes it",
        servers.store_goes_away,
    ),
    Fault(
        "the Prefect server is away, or silent", "the run says so, and continues to its end", servers.no_prefect_server
    ),
    Fault(
        "the Prefect server is killed, and comes back",
        "the run continues to its end, and the server hears of it",
        servers.prefect_server_dies,
    ),
)


def rows(points: int = 200, seed: int = 0, folder: Path | None = None, at_once: int = 2) -> Iterator[dict[str, Any]]:
    """Disturb the pipeline, and yield a row per fault: the share of points that ended with the same bytes.

    Args:
        points: kills; of every other fault there is one scene for each hundred of them.
        seed: of where and how.
        folder: where to work. What is there already of the same seed counts and is not done again; what was wrong
            stays there to be looked at. Otherwise a temporary folder, which is removed.
        at_once: points at a time.
    """
    work = Path(tempfile.mkdtemp(prefix="gristmill-chaos-")) if folder is None else folder
    results = disturb(undisturbed_runs(work), points, seed, work, at_once)
    if folder is None and not any(result["wrong"] for result in results):
        shutil.rmtree(work)
    promised = "every byte as in the run that nothing disturbed, nothing lost, nothing double, nothing left running"
    yield from rows_of(
        "identical_after_kill", promised, [(one.name, one.promised) for one in (*KILLS, *FAULTS)], results
    )


def rows_of(
    name: str, promised: str, faults: Iterable[tuple[str, str]], results: Sequence[Result]
) -> Iterator[dict[str, Any]]:
    """A row for all kills if there are any, and one for each fault that was tried: its name, and what is promised."""
    killed = [result for result in results if "kills" in result]
    if killed:
        yield _row(name, promised, killed)
    by_fault = defaultdict(list)
    for result in results:
        by_fault[result["fault"]].append(result)
    for fault, said in faults:
        if by_fault[fault]:
            yield _row(fault, said, by_fault[fault])


def undisturbed_runs(folder: Path) -> dict[str, Undisturbed]:
    """Stage -> the run that has it; what begins with given tokens, or a given model, is a run of its own."""
    whole = Undisturbed.make(folder)
    given = Undisturbed.make_given(folder, whole)
    return {**dict.fromkeys(given.stages, given), **dict.fromkeys(whole.stages, whole)}


def disturb(runs: Mapping[str, Undisturbed], points: int, seed: int, folder: Path, at_once: int) -> list[Result]:
    """Do all points of the stages of some runs that are not done yet."""
    return do_points(all_points(runs, points, seed, folder), folder / f"points-{seed}.jsonl", at_once)


def do_points(points: Mapping[str, Callable[[], Result]], record: Path, at_once: int) -> list[Result]:
    """Do all points that are not in the record yet; each is written down there as soon as it is known."""
    lock = threading.Lock()
    lines = record.read_text().splitlines() if record.exists() else []
    done = {result["key"]: result for result in map(json.loads, lines)}
    todo = {key: act for key, act in points.items() if key not in done}
    began = time.monotonic()

    def work(item: tuple[str, Callable[[], Result]]) -> None:
        result = {"key": item[0], **item[1]()}
        with lock, record.open("a") as sink:
            sink.write(json.dumps(result) + "\n")
            done[item[0]] = result
            print(
                f"{time.monotonic() - began:6.0f} s  {len(done)} points: {item[0]}: "
                f"{'; '.join(result['wrong']) or 'as promised'}",
                file=sys.stderr,
                flush=True,
            )

    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(work, todo.items()))
    return [done[key] for key in sorted(done)]


def all_points(
    runs: Mapping[str, Undisturbed], points: int, seed: int, folder: Path
) -> dict[str, Callable[[], Result]]:
    """A name and the doing of every point, in an order drawn by hash: what is stopped has done some of each fault."""
    found: dict[str, Callable[[], Result]] = {
        f"kills {chain.number}: {chain.kill.name}, {chain.stage}": partial(run_chain, runs[chain.stage], chain, folder)
        for chain in chains(runs, points, seed)
    }
    for number in range(max(1, points // KILLS_PER_SCENE)):
        for fault in FAULTS:
            stage = list(runs)[int(draw(seed, number, fault.name) * len(runs))]
            scene = Scene(runs[stage], folder / f"scene-{FAULTS.index(fault)}-{number}", stage, seed, number)
            found[f"{fault.name}, {number}: {stage}"] = partial(play, fault, scene)
    return dict(sorted(found.items(), key=lambda item: draw(seed, "order", item[0])))


def play(fault: Fault, scene: Scene) -> Result:
    """Bring a fault about; the store stays where something is wrong."""
    shutil.rmtree(scene.store, ignore_errors=True)
    try:
        wrong = fault.act(scene)
    except subprocess.SubprocessError as error:
        wrong = [f"a command hangs, or cannot be run: {error}"]
    except (CannotMountError, ImportError) as error:
        return {"fault": fault.name, "stage": scene.stage, "wrong": [], "not_tried": str(error)}
    if not wrong:
        for leftover in (scene.store, *scene.store.parent.glob(f"{scene.store.name}-fuse-*")):
            shutil.rmtree(leftover)
    return {"fault": fault.name, "stage": scene.stage, "wrong": wrong}


def _row(name: str, promised: str, results: Sequence[Result]) -> dict[str, Any]:
    tried = [result for result in results if "not_tried" not in result]
    row = {"name": name, "peer": 1.0, "unit": "identical", "promised": promised}
    if not tried:
        return {**row, "ours": None, "ratio": None, "happened": f"not tried: {results[0]['not_tried']}"}
    weights = [max(1, len(result.get("kills", []))) for result in tried]
    # One kill of a chain that ends otherwise spoils all of them.
    good = sum(weight for weight, result in zip(weights, tried, strict=True) if not result["wrong"])
    share = good / max(sum(weights), 1)
    return {**row, "ours": share, "ratio": share, "happened": _happened(tried, sum(weights))}


def _happened(results: Sequence[Result], points: int) -> str:
    stages = Counter(result["stage"] for result in results)
    wrong = [f"{result['stage']}: {result['wrong'][0]}" for result in results if result["wrong"]]
    said = f"{points} points in {len(stages)} of {len(STAGES)} stages, "
    return said + ("all as promised" if not wrong else f"{len(wrong)} otherwise: {'; '.join(wrong[:3])}")

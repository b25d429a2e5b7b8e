"""Runs that are killed: chains of attempts at a stage, each killed at a random
change.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.chaos.fuse import Act, Fuse, Role, burn_at, new_log
from benchmarks.chaos.undisturbed import Undisturbed, gristmill, wrong_code, wrong_end
from gristmill.flows.stages.registry import STAGES

KILLS_IN_CHAIN = 6
"""Attempts at a stage that are killed before the last one."""
ATTEMPTS_IN_CHAIN = 2 * KILLS_IN_CHAIN
"""Most attempts: a fuse may be set to a change that an attempt does not reach, since an
earlier one has made it.
"""
LATE_SECONDS = 0.05
"""Most delay of a fuse: half of them burn after their change, in the middle of the work
that follows.
"""
LEAVE_SECONDS = 20.0
"""Most time until processes of killed runs have ended: a training saves a checkpoint at
its end.
"""


Result = dict[str, Any]
"""Line of JSON about a point or a kill in the record of a work folder."""


@dataclass(frozen=True)
class Kill:
    """Way to end a run from outside.

    Attributes:
        name, promised: of its row.
        act: of the fuse.
        role: of the process before whose change the fuse burns.
        codes: exit codes that the run may have then.
        settings: of the manifest, which change no result.
    """

    name: str
    promised: str
    act: Act
    role: Role
    codes: tuple[int, ...]
    settings: tuple[str, ...] = ()

    def stages(self, run: Undisturbed) -> list[str]:
        """Return the stages that can be ended in this way."""
        torchrun = {"rank": True, "worker": False}.get(self.role)
        workers = [
            stage
            for stage in run.stages
            if self.role != "worker" or stage in BEAM_STAGES
        ]
        return [
            stage for stage in workers if torchrun in (None, STAGES[stage].torchrun)
        ]


BEAM_STAGES = (
    "clean",
    "filter",
    "dedup",
    "dedup_lines",
    "dedup_substrings",
    "langid",
    "decontaminate",
    "tokenize",
)
"""Stages whose work is done by Beam workers, which can be processes."""
KILLS = (
    Kill(
        "SIGKILL of the flow",
        "its stage ends with it; the same command resumes it",
        "kill the flow",
        "any",
        (-9,),
    ),
    Kill(
        "SIGKILL of the flow and what is below it",
        "the same command resumes it",
        "kill it and all above",
        "any",
        (-9,),
    ),
    Kill(
        "SIGTERM to the flow",
        "code 130, the stage has ended; the same command resumes it",
        "terminate the flow",
        "any",
        (130,),
    ),
    Kill(
        "SIGKILL of a Beam worker",
        "code 1, the stage and the signal are named; the same command resumes it",
        "kill it",
        "worker",
        (1,),
        ("engine.mode=processes",),
    ),
    Kill(
        "SIGKILL of a training rank",
        "code 1, the other ranks end; the same command resumes it",
        "kill it",
        "rank",
        (1,),
    ),
)


@dataclass(frozen=True)
class Chain:
    """Attempts at a stage.

    Attributes:
        number: of the chain.
        kill: way to end all attempts.
        stage: its name.
        places: place of each attempt's end among the remaining changes, in [0, 1).
        lates: delay of each fuse in seconds.
    """

    number: int
    kill: Kill
    stage: str
    places: tuple[float, ...]
    lates: tuple[float, ...]


def chains(runs: Mapping[str, Undisturbed], kills: int, seed: int) -> Iterator[Chain]:
    """Draw chains with `kills` kills by hash of the seed.

    They go through all stages again and again, each time in another order; each has one
    of the ways that can end its stage.
    """
    for number in range(-(-kills // KILLS_IN_CHAIN)):
        turn, place = divmod(number, len(runs))
        stage = sorted(runs, key=lambda stage: draw(seed, "turn", turn, stage))[place]
        possible = [kill for kill in KILLS if stage in kill.stages(runs[stage])]
        kill = possible[int(draw(seed, number, "kill") * len(possible))]
        places = tuple(
            draw(seed, number, "place", attempt) for attempt in range(ATTEMPTS_IN_CHAIN)
        )
        lates = tuple(
            max(0.0, 2 * draw(seed, number, "late", attempt) - 1) * LATE_SECONDS
            for attempt in range(ATTEMPTS_IN_CHAIN)
        )
        yield Chain(number, kill, stage, places, lates)


def run_chain(run: Undisturbed, chain: Chain, folder: Path) -> Result:
    """Kill attempt after attempt, but not the last one, and compare.

    Returns:
        the chain, with the change before which every attempt ended, and `wrong`: a
        sentence for each broken promise.
    """
    killed: list[Result] = []
    try:
        wrong = _kill_and_compare(run, chain, folder, killed)
    except subprocess.TimeoutExpired as error:
        wrong = [f"an attempt hangs: {error}"]
    return {
        "number": chain.number,
        "fault": chain.kill.name,
        "stage": chain.stage,
        "kills": killed,
        "wrong": wrong,
    }


def _kill_and_compare(
    run: Undisturbed, chain: Chain, folder: Path, killed: list[Result]
) -> list[str]:
    """Return sentences about broken promises; `killed` takes every attempt that was
    killed.
    """
    store = folder / f"chain-{chain.number}"
    shutil.rmtree(store, ignore_errors=True)
    run.lend(store, chain.stage)
    root = run.folder_in(store, chain.stage).path
    changes = run.changes(chain.kill.role)[chain.stage]
    remaining, wrong = changes, list[str]()
    fuses: list[Fuse] = []
    for place, late in zip(chain.places, chain.lates, strict=True):
        if len(killed) == KILLS_IN_CHAIN:
            break
        at = 1 + int(place * remaining)
        fuse = Fuse(
            str(root), new_log(store), at, chain.kill.act, chain.kill.role, late
        )
        fuses.append(fuse)
        settings = [
            word for setting in chain.kill.settings for word in ("--set", setting)
        ]
        done = gristmill(run.arguments(store, chain.stage, *settings), burn_at(fuse))
        if fuse.has_burnt():
            killed.append(
                {
                    "change": fuse.changes()[at - 1],
                    "late": round(late, 4),
                    "code": done.returncode,
                }
            )
            wrong += wrong_kill(chain.kill, done, late)
        else:
            wrong += wrong_code(done)
        remaining = max(remaining - at, 4)
        if run.folder_in(store, chain.stage).state() == "committed" and not wrong:
            wrong += _finish(run, chain.stage, store)
            shutil.rmtree(store)
            run.lend(store, chain.stage)
            remaining = changes
    wrong += _finish(run, chain.stage, store)
    wrong += still_running([fuse.log for fuse in fuses])
    for fuse in fuses:
        shutil.rmtree(Path(fuse.log).parent)
    if not wrong:
        shutil.rmtree(store)
    return wrong


def _finish(run: Undisturbed, stage: str, store: Path) -> list[str]:
    """Run an attempt to its end, and compare."""
    return [
        *wrong_code(gristmill(run.arguments(store, stage))),
        *run.differences(store, [stage]),
    ]


def wrong_kill(
    kill: Kill, done: subprocess.CompletedProcess[str], late: float
) -> list[str]:
    """Return a sentence if a killed run did not end as promised."""
    # A late fuse may burn after the run has ended well.
    if late and done.returncode == 0:
        return wrong_end(done)
    return wrong_end(
        done, done.returncode if done.returncode in kill.codes else kill.codes[0]
    )


def still_running(logs: Sequence[str]) -> list[str]:
    """Return a sentence for each process of a killed run that has not ended within
    LEAVE_SECONDS.

    Each has the name of its fuse's log in its environment, or that folder open if it
    was forked.
    """
    deadline = time.monotonic() + LEAVE_SECONDS
    while (
        pids := [pid for log in logs for pid in carriers(log)]
    ) and time.monotonic() < deadline:
        time.sleep(0.1)
    return [f"process {pid} of a killed run still runs" for pid in pids]


def draw(seed: int, *key: int | str) -> float:
    """Return a number in [0, 1) by hash."""
    digest = hashlib.sha256(repr((seed, *key)).encode()).digest()
    return int.from_bytes(digest[:7], "big") / (1 << 56)


def carriers(log: str) -> list[int]:
    """Return the processes of a run, by the log of its fuse."""
    pids = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            try:
                environment = (process / "environ").read_bytes()
                is_open = any(
                    link.readlink() == Path(log).parent
                    for link in (process / "fd").iterdir()
                )
            except OSError:
                continue
            if is_open or log.encode() in environment:
                pids.append(int(process.name))
    return pids

"""Runs that are killed, and what becomes of them: a chain of attempts at one stage, each ended at a random change."""

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
from benchmarks.chaos.undisturbed import Undisturbed, gristmill
from gristmill.flows.stages.registry import STAGES

KILLS_IN_CHAIN = 6
"""Attempts of one stage that are ended before one is let through."""
ATTEMPTS_IN_CHAIN = 2 * KILLS_IN_CHAIN
"""At the most: a fuse may be set to a change that an attempt does not come to, since the one before has made it."""
LATE_SECONDS = 0.05
"""Half of the fuses burn up to so long after their change, so within what is written and computed then."""
LEAVE_SECONDS = 20.0
"""How long processes of killed runs may take to be gone: a training saves a checkpoint on its way out."""


@dataclass(frozen=True)
class Kill:
    """A way to end a run from outside.

    Attributes:
        name: for the table.
        promised: for the table.
        act: what the fuse does.
        role: before whose change it burns.
        codes: with which codes the run may end then; 0 and -9 aside, each comes with a sentence.
        settings: of the manifest; such as change no result.
    """

    name: str
    promised: str
    act: Act
    role: Role
    codes: tuple[int, ...]
    settings: tuple[str, ...] = ()

    def stages(self, run: Undisturbed) -> list[str]:
        """The stages that can be ended like this."""
        launched = {"rank": "torchrun", "worker": "process"}.get(self.role)
        workers = [stage for stage in run.stages if self.role != "worker" or stage in BEAM_STAGES]
        return [stage for stage in workers if launched in (None, STAGES[stage].launch)]


# Stages whose work lies with Beam workers, which are processes where the engine's settings say so.
BEAM_STAGES = ("clean", "filter", "dedup", "dedup_lines", "dedup_substrings", "langid", "decontaminate", "tokenize")
KILLS = (
    Kill("SIGKILL of the flow", "its stage ends with it; the same command resumes it", "kill the flow", "any", (-9,)),
    Kill(
        "SIGKILL of the flow and what is below it", "the same command resumes it", "kill it and all above", "any", (-9,)
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
    """One stage, one way to end its runs, and where."""

    number: int
    kill: Kill
    stage: str
    places: tuple[float, ...]
    """Where in the changes that are left each attempt ends: in [0, 1)."""
    lates: tuple[float, ...]
    """How late each fuse burns, in seconds."""


def chains(runs: Mapping[str, Undisturbed], kills: int, seed: int) -> Iterator[Chain]:
    """The chains that hold so many kills, of the stages of some runs: all drawn by hash of the seed.

    They go round the stages, in another order each time, so that none is left out; each ends its stage in one of the
    ways in which that can be ended.
    """
    for number in range(-(-kills // KILLS_IN_CHAIN)):
        turn, place = divmod(number, len(runs))
        stage = sorted(runs, key=lambda stage: draw(seed, "turn", turn, stage))[place]
        able = [kill for kill in KILLS if stage in kill.stages(runs[stage])]
        kill = able[int(draw(seed, number, "kill") * len(able))]
        places = tuple(draw(seed, number, "place", attempt) for attempt in range(ATTEMPTS_IN_CHAIN))
        lates = tuple(
            max(0.0, 2 * draw(seed, number, "late", attempt) - 1) * LATE_SECONDS for attempt in range(ATTEMPTS_IN_CHAIN)
        )
        yield Chain(number, kill, stage, places, lates)


def run_chain(run: Undisturbed, chain: Chain, folder: Path) -> dict[str, Any]:
    """Kill attempt after attempt, let the last one through, and compare.

    Returns:
        what was done, with the change before which every attempt ended, and `wrong`: a sentence for everything that
        is not as promised.
    """
    ended: list[dict[str, Any]] = []
    try:
        wrong = _kill_and_compare(run, chain, folder, ended)
    except subprocess.TimeoutExpired as error:
        wrong = [f"an attempt hangs: {error}"]
    return {"number": chain.number, "fault": chain.kill.name, "stage": chain.stage, "kills": ended, "wrong": wrong}


def _kill_and_compare(run: Undisturbed, chain: Chain, folder: Path, ended: list[dict[str, Any]]) -> list[str]:
    """What is not as promised; `ended` takes every attempt that was ended."""
    store = folder / f"chain-{chain.number}"
    shutil.rmtree(store, ignore_errors=True)
    run.lend(store, chain.stage)
    root = run.folder_in(store, chain.stage).path
    changes = run.changes(chain.kill.role)[chain.stage]
    left, wrong = changes, list[str]()
    fuses: list[Fuse] = []
    for place, late in zip(chain.places, chain.lates, strict=True):
        if len(ended) == KILLS_IN_CHAIN:
            break
        at = 1 + int(place * left)
        fuse = Fuse(str(root), new_log(store), at, chain.kill.act, chain.kill.role, late)
        fuses.append(fuse)
        settings = [word for setting in chain.kill.settings for word in ("--set", setting)]
        done = gristmill(run.arguments(store, chain.stage, *settings), burn_at(fuse))
        if fuse.has_burnt():
            ended.append({"change": fuse.changes()[at - 1], "late": round(late, 4), "code": done.returncode})
            wrong += wrong_end(chain.kill, done.returncode, done.stdout, late)
        elif done.returncode:
            wrong.append(f"an attempt that nothing ended failed: {done.stdout[-300:]}")
        left = max(left - at, 4)
        if run.folder_in(store, chain.stage).state() == "committed" and not wrong:
            wrong += _end(run, chain.stage, store)
            shutil.rmtree(store)
            run.lend(store, chain.stage)
            left = changes
    wrong += _end(run, chain.stage, store)
    wrong += still_running([fuse.log for fuse in fuses])
    for fuse in fuses:
        shutil.rmtree(Path(fuse.log).parent)
    if not wrong:
        shutil.rmtree(store)
    return wrong


def _end(run: Undisturbed, stage: str, store: Path) -> list[str]:
    """Let an attempt through, and compare what it has made."""
    done = gristmill(run.arguments(store, stage))
    failed = [] if done.returncode == 0 else [f"an attempt that nothing ended failed: {done.stdout[-300:]}"]
    return [*failed, *run.differences(store, [stage])]


def wrong_end(kill: Kill, code: int, output: str, late: float) -> list[str]:
    """A sentence where a run that was ended did not end as is promised."""
    # A late fuse may burn when the run has ended well, or failed by itself for want of a killed process.
    if code not in kill.codes and not (late and code == 0):
        return [f"ended with code {code} instead of {kill.codes[0]}: {output[-300:]}"]
    return ["ended with a traceback"] if "Traceback" in output else []


def still_running(logs: Sequence[str]) -> list[str]:
    """A sentence where a process of a killed run is still there after a while.

    Each carries its fuse's log's name in its environment, or has that folder open where it was forked.
    """
    deadline = time.monotonic() + LEAVE_SECONDS
    while (found := [pid for log in logs for pid in carriers(log)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    return [f"process {pid} of a killed run still runs" for pid in found]


def draw(seed: int, *what: int | str) -> float:
    """A number in [0, 1) by hash."""
    digest = hashlib.sha256(repr((seed, *what)).encode()).digest()
    return int.from_bytes(digest[:7], "big") / (1 << 56)


def carriers(log: str) -> list[int]:
    """The processes of a run, by the log of its fuse."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            try:
                environment = (process / "environ").read_bytes()
                is_open = any(link.readlink() == Path(log).parent for link in (process / "fd").iterdir())
            except OSError:
                continue
            if is_open or log.encode() in environment:
                found.append(int(process.name))
    return found

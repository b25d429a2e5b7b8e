"""`gristmill bench train`, the whole loop: reading, spike statistics, records and
clocks beside the bare arithmetic.

All sides train the same sizes on the same tokens, with the same batch, precision,
clipping, fused AdamW and number of logged lines, in a process each, whose threads sleep
while they wait. They take turns step by step, in another order each time, so that other
load of some seconds slows all of them down. Chance, such as the place of a process's
memory, makes two processes that do the same differ by several percent: every round
starts new ones, and a ratio is the median over the rounds.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO

from benchmarks.checkout import ROOT
from benchmarks.measuring import Row, row
from benchmarks.train.loop_sides import Seconds, Setting
from benchmarks.train.small_models import RANK_VARIABLES, random_packed_set

ROUNDS = 8
FLOORS = {"plain": 0.93, "transformers": 1.05}
"""Peer -> floor of the ratio; 1.02 and 1.16 of one round, 2026-11-28, 2 cores."""
Round = dict[str, list[Seconds]]
"""Side -> seconds of each step that counts."""


def rows(rounds: int = ROUNDS) -> Iterator[Row]:
    """Measure; the ratio is the median over the rounds.

    Raises:
        RuntimeError: a side failed; the message has its output.
    """
    setting, sides = Setting(), ["ours", "plain"]
    if all(map(importlib.util.find_spec, ("transformers", "accelerate"))):
        sides.append("transformers")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        random_packed_set(
            folder / "mix", setting.vocab, setting.rows * setting.steps, setting.length
        ).close()
        measured = [
            _run_round(sides, folder, setting, number) for number in range(rounds)
        ]
    yield _row("plain", measured, setting)
    if "transformers" in sides:
        yield _row("transformers", measured, setting)
    else:
        yield row(
            "loop_vs_transformers",
            None,
            None,
            "tokens/s",
            "transformers or accelerate is not installed",
        )


class Side:
    """Process that trains a step at a time on request."""

    def __init__(
        self, name: str, folder: Path, setting: Setting, printed: IO[str]
    ) -> None:
        self._name, self._printed = name, printed
        environment = {
            key: value for key, value in os.environ.items() if key not in RANK_VARIABLES
        }
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "benchmarks.train.loop_sides",
                name,
                str(folder / "mix"),
                json.dumps(vars(setting)),
            ],
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=printed,
            cwd=ROOT,
            env={**environment, "OMP_WAIT_POLICY": "PASSIVE"},
        )

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *error: object) -> None:
        """Kill the process, which waits for its turn."""
        self._process.kill()
        self._process.communicate()

    def step(self) -> Seconds:
        """Train a step.

        Raises:
            RuntimeError: the process has failed.
        """
        assert self._process.stdin is not None  # both are pipes
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):  # then no answer comes
            print(file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            self._process.wait()
            self._printed.seek(0)
            raise RuntimeError(
                f"the loop of {self._name} could not be measured: "
                f"{self._printed.read()[-4000:]}"
            )
        return Seconds(*json.loads(answer))


def _run_round(
    names: Sequence[str], folder: Path, setting: Setting, number: int
) -> Round:
    """Time the steps of new processes, except the first ones."""
    order = random.Random(number)
    by_side: Round = {name: [] for name in names}
    with ExitStack() as stack:
        sides = {
            name: stack.enter_context(
                Side(
                    name,
                    folder,
                    setting,
                    stack.enter_context(open(folder / f"{name}.log", "w+")),
                )
            )
            for name in names
        }
        for step in range(setting.steps):
            for name in order.sample(names, len(names)):
                seconds = sides[name].step()
                if step >= setting.warmup_steps:
                    by_side[name].append(seconds)
    return by_side


def _row(peer: str, rounds: list[Round], setting: Setting) -> Row:
    wall_ratios, process_ratios = [], []
    for by_side in rounds:
        ours, theirs = _sum(by_side["ours"]), _sum(by_side[peer])
        wall_ratios.append(theirs.wall / ours.wall)
        process_ratios.append(theirs.process / ours.process)
    tokens = setting.rows * setting.length
    measured = row(
        f"loop_vs_{peer}",
        tokens / _median_wall(rounds, "ours"),
        tokens / _median_wall(rounds, peer),
        "tokens/s",
        f"median of {len(rounds)} rounds, {min(wall_ratios):.2f} to "
        f"{max(wall_ratios):.2f}; "
        f"by process time {statistics.median(process_ratios):.3f}",
        FLOORS[peer],
    )
    return replace(measured, ratio=statistics.median(wall_ratios))


def _sum(steps: Sequence[Seconds]) -> Seconds:
    return Seconds(
        sum(step.wall for step in steps), sum(step.process for step in steps)
    )


def _median_wall(rounds: list[Round], side: str) -> float:
    return statistics.median(
        seconds.wall for by_side in rounds for seconds in by_side[side]
    )

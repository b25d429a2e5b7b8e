"""`gristmill bench train`, the whole loop: reading, spike statistics, records and clocks beside the bare arithmetic.

All sides train the same sizes on the same tokens, with the same batch, precision, clipping, fused AdamW and number of
logged lines, in a process each, whose threads sleep where they wait. They take turns step by step, in another order
each time, so that what slows the machine down for some seconds slows them all down. What a process was given by chance,
such as where its memory lies, makes two that do the same differ by several percent: every round begins new ones, and a
ratio is the median over the rounds.
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
from pathlib import Path
from typing import IO

import numpy as np

from benchmarks.checkout import ROOT
from benchmarks.measuring import Row, row
from benchmarks.train.loop_sides import Seconds, Setting
from gristmill.tokenize.packed_writing import write_packed_set

ROUNDS = 8
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Which accelerate would take for a launch of its own."""
Taken = dict[str, list[Seconds]]
"""By side, of each counted step."""


def rows(rounds: int = ROUNDS) -> Iterator[Row]:
    """Measure; `ratio` is ours over the peer's tokens per second.

    Raises:
        RuntimeError: a side failed; what it printed is in the message.
    """
    yield from measured_rows(Setting(), rounds)


def measured_rows(setting: Setting, rounds: int) -> list[Row]:
    """Both rows; see `rows`."""
    sides = ["ours", "plain"]
    if has_peer := all(map(importlib.util.find_spec, ("transformers", "accelerate"))):
        sides.append("transformers")
    with tempfile.TemporaryDirectory() as folder:
        _write_rows(Path(folder) / "mix", setting)
        taken = [_one_round(sides, Path(folder), setting, number) for number in range(rounds)]
    found = [_row("loop_vs_plain", "plain", taken, setting)]
    found.append(
        _row("loop_vs_transformers", "transformers", taken, setting)
        if has_peer
        else row("loop_vs_transformers", None, None, "tokens/s", "transformers or accelerate is not installed")
    )
    return found


class Side:
    """A process that trains step by step as it is asked to."""

    def __init__(self, name: str, folder: Path, setting: Setting, printed: IO[str]) -> None:
        self._name, self._printed = name, printed
        environment = {key: value for key, value in os.environ.items() if key not in RANK_VARIABLES}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.train.loop_sides", name, str(folder / "mix"), json.dumps(vars(setting))],
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
        """End it: it ends where it waits for its turn."""
        self._process.kill()
        self._process.communicate()

    def step(self) -> Seconds:
        """Let it train a step.

        Raises:
            RuntimeError: it has failed.
        """
        assert self._process.stdin is not None  # both are pipes
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):  # no answer comes then
            print(file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            self._process.wait()
            self._printed.seek(0)
            raise RuntimeError(f"the loop of {self._name} could not be measured: {self._printed.read()[-4000:]}")
        return Seconds(*json.loads(answer))


def _one_round(names: Sequence[str], folder: Path, setting: Setting, number: int) -> Taken:
    """What the counted steps of new processes take."""
    order = random.Random(number)
    taken: Taken = {name: [] for name in names}
    with ExitStack() as stack:
        sides = {
            name: stack.enter_context(
                Side(name, folder, setting, stack.enter_context(open(folder / f"{name}.log", "w+")))
            )
            for name in names
        }
        for step in range(setting.steps):
            for name in order.sample(names, len(names)):
                seconds = sides[name].step()
                if step >= setting.warmup_steps:
                    taken[name].append(seconds)
    return taken


def _row(name: str, peer: str, rounds: list[Taken], setting: Setting) -> Row:
    ratios = [_sum(one[peer]).wall / _sum(one["ours"]).wall for one in rounds]
    by_process = statistics.median(_sum(one[peer]).process / _sum(one["ours"]).process for one in rounds)
    ours, theirs = (
        statistics.median(seconds.wall for one in rounds for seconds in one[side]) for side in ("ours", peer)
    )
    tokens = setting.rows * setting.length
    return {
        "name": name,
        "ours": tokens / ours,
        "peer": tokens / theirs,
        "unit": "tokens/s",
        "ratio": statistics.median(ratios),
        "note": f"median of {len(rounds)} rounds, {min(ratios):.2f} to {max(ratios):.2f}; "
        f"by process time {by_process:.3f}",
    }


def _sum(steps: Sequence[Seconds]) -> Seconds:
    return Seconds(*map(sum, zip(*steps, strict=True)))


def _write_rows(folder: Path, setting: Setting) -> None:
    ids = np.random.default_rng(0).integers(0, setting.vocab, (setting.rows * setting.steps, setting.length))
    write_packed_set(folder, ids, {"all": len(ids)}, {"vocab_size": setting.vocab, "eos": 0, "pad": 1, "sha256": ""})

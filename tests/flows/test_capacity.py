"""Errors of stages that ran out of memory name settings that reduce it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gristmill.flows.running.run import Runner, StageFailedError

Make = Callable[..., Runner]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "message"),
    [
        (
            {"second": {"die_once": True}},
            r"second: its process was killed, most likely out of memory: fewer engine\.work",
        ),
        (
            {"exhausted": {}},
            r"exhausted: out of memory \(no room\): fewer engine\.workers, or smaller ingest\.shard_bytes",
        ),
    ],
)
def test_out_of_memory_error_suggests_fewer_shards_in_memory(
    toy_runner: Make, stage: dict[str, dict[str, object]], message: str
) -> None:
    runner = toy_runner(first={"n": 3}, **stage)
    runner.run_stage("first")
    with pytest.raises(StageFailedError, match=message):
        runner.run_stage(next(iter(stage)))
